"""What the compiler leaves between our operators is left to them (variant E-norm).

The compiler fuses elementwise work with the kernel that reads or writes its tensor where that is its own kernel. It
does not look into an operator, so that such work beside one is a kernel by itself, which moves whole tensors. Inductor
lets its users rewrite its graphs. One such piece is done by an operator here: a norm's output goes two ways, into the
next linear layer and past it, as the residual of the next norm. Two gradients come back, and the norm's backward pass
takes their sum. The operator gets both, and reads one more (kernels/fused_norm.py). It is for every GPU that the norm's
kernel is for, of compute capability 7.5 and newer.
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

import qa_lib.kernels.fused_norm  # noqa: F401  registers the operator

aten, ours = torch.ops.aten, torch.ops.qa_lib


class OperatorFusion(CustomGraphPass):
    """Rewrites a graph in place."""

    def __call__(self, graph: Graph) -> None:
        """Give every norm_backward that takes one gradient its two addends, where nothing else takes their sum."""
        for node in graph.find_nodes(op="call_function", target=ours.norm_backward.default):
            added, other, *_ = node.args
            if other is None and added.target is aten.add.Tensor and len(added.users) == 1 and _plain(added):
                node.args = (*added.args, *node.args[2:])
                graph.erase_node(added)

    def uuid(self) -> bytes:
        """For Inductor's cache of compiled graphs: another text of this file is another pass."""
        return get_hash_for_files((__file__,))


def _plain(added: Node) -> bool:
    """Whether a sum is of two tensors of its own shape, neither of them multiplied."""
    shapes = [one.meta["val"].shape for one in (added, *added.args) if isinstance(one, Node)]
    return len(shapes) == 3 and shapes[0] == shapes[1] == shapes[2] and not added.kwargs
