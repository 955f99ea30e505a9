"""torch.compile around the forward pass, by backend (rows A3 and D).

`inductor` traces the model into one graph, fuses elementwise work into few kernels that read and write memory once, and
takes Python out of the step. `aot_eager` traces and differentiates the graph but runs its kernels as they are, which
shows what tracing alone contributes; `cudagraphs` replays those kernels as CUDA graphs, which shows what launches cost.
"""

import re

import torch
import torch._functorch.config
from torch._inductor.utils import get_code
from torch.utils._python_dispatch import TorchDispatchMode

from qa_lib.measure.meter import PEAK_FROM
from qa_lib.spec import Spec
from qa_lib.variants import Settings


def compiled(model: torch.nn.Module, settings: Settings):
    """The model's compiled form, which shares its weights; or the model.

    Where padding varies, shapes are symbolic from the start, so that a new length compiles again at most where it fuses
    differently.
    """
    if settings.compile == "none":
        return model
    return torch.compile(model, backend=settings.compile, dynamic=settings.padding == "longest")


def forget_compiled() -> None:
    """Start as in a new process: Dynamo counts what it compiled for all models, and soon leaves the rest uncompiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def found_in_cache() -> bool:
    """Whether an earlier run has compiled a part of what this process has."""
    return torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] > 0


def own_gradients(spec: Spec) -> bool:
    """Whether gradients need memory of their own, for the whole run.

    The cudagraphs backend returns them in memory which its next replay writes over, and a further micro-batch must add
    to them.
    """
    return spec.settings.compile == "cudagraphs" and spec.accumulation > 1


def peak_from(settings: Settings) -> int:
    """The step after which compilation allocates no more; the cudagraphs backend records its graphs in the first, and a
    replay allocates nothing that would be seen."""
    return 0 if settings.compile == "cudagraphs" else PEAK_FROM


class _Operators(TorchDispatchMode):
    """Notes the name of every operator that computes something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not operator.is_view and operator.overloadpacket.__name__ not in _NO_WORK:
            self.names.append(operator.overloadpacket.__name__)
        return operator(*args, **kwargs or {})


_NO_WORK = ("_unsafe_view", "empty_like", "empty")
_CALLS = re.compile(
    r"^ +(?:buf\d+ = )?((?:extern_kernels|aten|torch\.ops\.aten|cpp_fused|triton)\w*(?:\.\w+)*)\(", re.M
)


def translated(layer: torch.nn.Module, hidden: torch.Tensor) -> tuple[list[str], list[str], str]:
    """What inductor makes of a layer's forward pass on `hidden` [rows, tokens, width]: the operators of the layer as it
    is, the kernels that the generated program calls, and that program. Nothing is compiled to machine code."""
    fresh = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with torch.no_grad(), fresh[0], fresh[1]:
        with _Operators() as eager:
            layer(hidden)
        program = get_code(torch.compile(layer), hidden)[0]
    forget_compiled()
    return eager.names, _CALLS.findall(program), program
