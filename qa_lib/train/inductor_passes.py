"""What the compiler leaves between our operators and its own kernels is left to ours (variants E-norm and E-fp8).

The compiler fuses elementwise work with the kernel that reads or writes its tensor where that is its own kernel. It
does not look into an operator, so that such work beside one is a kernel by itself, which moves whole tensors. Inductor
lets its users rewrite its graphs. Two such pieces are done by the operators here:

- A norm's output goes two ways, into the next linear layer and past it, as the residual of the next norm. Two
  gradients come back, and the norm's backward pass takes their sum. The operator gets both, and reads one more
  (kernels/fused_norm.py).
- A linear layer in 8-bit floats takes the gradient that GELU's backward pass has just written, times a power of two, in
  e5m2. The operator writes both (kernels/gelu.py, kernels/fp8.py).

The first is for every GPU that the norm's kernel is for, of compute capability 7.5 and newer, the second for those with
8-bit GEMMs, 8.9 and newer.
"""

import operator

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import CallFunction, KeywordArg
from torch.fx import Graph, Node

import qa_lib.kernels.fused_norm
import qa_lib.kernels.gelu  # noqa: F401  register the operators
from qa_lib.kernels.fp8 import E5M2_MAX

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.qa_lib


class OperatorFusion(CustomGraphPass):
    """Rewrites a graph in place."""

    def __call__(self, graph: Graph) -> None:
        _fold_sums(graph)
        _fold_conversions(graph)

    def uuid(self) -> bytes:
        """For Inductor's cache of compiled graphs: another text of this file is another pass."""
        return get_hash_for_files((__file__,))


def _fold_sums(graph: Graph) -> None:
    """Give every norm_backward that takes one gradient the two addends of it, where nothing else takes their sum."""
    for node in graph.find_nodes(op="call_function", target=ours.norm_backward.default):
        added, other, *_ = node.args
        if other is None and added.target is aten.add.Tensor and len(added.users) == 1 and _plain(added):
            node.args = (*added.args, *node.args[2:])
            graph.erase_node(added)


def _plain(added: Node) -> bool:
    """Whether a sum is of two tensors of its own shape, neither of them multiplied."""
    shapes = [one.meta["val"].shape for one in (added, *added.args) if isinstance(one, Node)]
    return len(shapes) == 3 and shapes[0] == shapes[1] == shapes[2] and not added.kwargs


# The operators of fp8.in_e5m2.
_WIDE = CallFunction(prims.convert_element_type.default, KeywordArg("source"), torch.float32)
_SCALED = CallFunction(aten.mul.Tensor, _WIDE, KeywordArg("factor"))
_SATURATED = CallFunction(aten.clamp_max.default, CallFunction(aten.clamp_min.default, _SCALED, -E5M2_MAX), E5M2_MAX)
_IN_E5M2 = CallFunction(prims.convert_element_type.default, _SATURATED, torch.float8_e5m2)


def _fold_conversions(graph: Graph) -> None:
    """Take e5m2 copies of gradients that a gelu_backward wrote from that."""
    for converted in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        found = _IN_E5M2.match(converted)
        if not found or isinstance(found.kwargs["factor"], Node):
            continue
        source = found.kwargs["source"]
        while source.target in (aten.view.default, aten.reshape.default):
            source = source.args[0]
        call = source.args[0] if source.target is operator.getitem and source.args[1] == 0 else None
        if call is None or call.target is not ours.gelu_backward.default or call.args[3]:
            continue
        call.args = (*call.args[:3], float(found.kwargs["factor"]), *call.args[4:])
        call.meta["val"] = (*call.meta["val"][:2], converted.meta["val"])
        with graph.inserting_after(call):
            eighth = graph.call_function(operator.getitem, (call, 2))
        eighth.meta["val"] = converted.meta["val"]
        converted.replace_all_uses_with(eighth)
        found.erase_nodes()
