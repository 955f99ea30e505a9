"""A sum of two gradients is left to the kernel that reads it (row E-norm).

A norm's output goes two ways: into the next product, and past it, as the residual of the next norm. Two gradients come
back, and the norm's backward pass takes their sum. The compiler fuses an addition with what reads it where that is its
own kernel. It does not look into an operator (model/norms.py), so that the addition would be a kernel by itself, which
moves three tensors of hidden states for each norm. Inductor lets its users rewrite its graphs: here the operator gets
both gradients, and reads one more.
"""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import qa_lib.model.norms  # noqa: F401  registers the operator


class Folding(CustomGraphPass):
    """Gives every norm_backward of a graph the two addends of its gradient, where nothing else takes their sum."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.qa_lib.norm_backward.default):
            added = node.args[0]
            if added.target is torch.ops.aten.add.Tensor and len(added.users) == 1 and _plain(added):
                node.args = (*added.args, *node.args[2:])
                graph.erase_node(added)

    def uuid(self) -> bytes:
        """For Inductor's cache of compiled graphs: another text of this file is another pass."""
        return get_hash_for_files((__file__,))


def _plain(added: torch.fx.Node) -> bool:
    """Whether a sum is of two tensors of its own shape, neither of them multiplied."""
    shapes = [one.meta["val"].shape for one in (added, *added.args) if isinstance(one, torch.fx.Node)]
    return len(shapes) == 3 and shapes[0] == shapes[1] == shapes[2] and not added.kwargs
