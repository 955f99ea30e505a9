"""torch.compile around the forward pass, by backend (variants A3 and D).

`inductor` traces the model into one graph, fuses elementwise work into few kernels that read and write memory once, and
takes Python out of the step. `aot_eager` traces and differentiates the graph but runs its kernels as they are, which
shows what tracing alone contributes; `cudagraphs` replays those kernels as CUDA graphs, which shows what launches cost.
Inductor writes its kernels in Triton, for GPUs of compute capability 7.0 and newer.

`regions` is Inductor again, on a few layers of packed sequences at a time (variant E-regions). All layers are alike, so
that one program serves every region, and the time before the first step falls with the tracing and code generation.
What would be fused across a border is lost, and the backward pass comes in pieces, whose gradients can be sent on
meanwhile (variant P-overlap).

Inductor's partitioner also decides what the forward pass keeps for the backward pass. What elementwise work would give
again from other values that are kept, it leaves out, unless a GEMM needs it as a whole: the outputs of GELU
and of the layer norms, a third of all that BERT keeps. Row E-recompute-elementwise leaves these out as well: each is
written once more, and no GEMM is repeated, as it is where whole layers are recomputed (variant C2)."""

import dataclasses
import re
from functools import partial

import torch
import torch._functorch.config

from qa_lib.kernels.precompile import found_compiled
from qa_lib.measure.meter import PEAK_FROM
from qa_lib.model.architectures import layers_of
from qa_lib.model.build import build_model
from qa_lib.model.packed import RegionalModel
from qa_lib.spec import Spec
from qa_lib.train.optim import Precision
from qa_lib.variants import Settings

SHAPE = (8, 64)  # sequences and tokens of the input; the kernels are the same for others
NO_WORK = ("_unsafe_view", "empty_like")  # beside the views
# In the program that inductor generates, the lines that start a kernel.
CALLS = re.compile(r"^ +(?:buf\d+ = )?((?:extern_kernels|aten|torch\.ops\.aten|cpp_fused|triton)\w*(?:\.\w+)*)\(", re.M)


class LossOf(torch.nn.Module):
    """A model whose forward pass gives its loss alone.

    What a compiled function returns gets a gradient, of zeros where nothing came back: of the logits of a language
    model, 3.3 GB in a step of GPT-2 small, which would be written and read for nothing.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs) -> torch.Tensor:
        return self.model(**inputs).loss


def compiled(model: torch.nn.Module, settings: Settings):
    """The model's compiled form, which shares its weights; or the model. Of regions it is the form of a LossOf.

    Where padding varies, shapes are symbolic from the start, so that a new length compiles again at most where it fuses
    differently.
    """
    if settings.compile == "none":
        return model
    backend = "inductor" if settings.compile == "regional" else settings.compile
    # Read when the first forward pass is compiled.
    torch._functorch.config.ban_recompute_materialized_backward = settings.activation_checkpointing != "elementwise"
    options = None
    if backend == "inductor" and settings.norms == "fused":
        from qa_lib.train.inductor_passes import OperatorFusion  # which imports Inductor, a second's work

        options = {"post_grad_custom_pre_pass": OperatorFusion()}
    by_backend = partial(torch.compile, backend=backend, dynamic=settings.padding == "longest", options=options)
    return RegionalModel(model.model, by_backend) if settings.compile == "regional" else by_backend(model)


def start_compilers(settings: Settings, device: torch.device) -> None:
    """Start the processes that will compile a GPU's kernels for Inductor, and do not wait for them.

    They need seconds to import PyTorch. Inductor starts them when it has a first kernel, and until they are there it
    compiles in this process, one kernel after the other. Called before the data is read, they are there in time.
    Meanwhile this process imports the rest of Inductor, which the first step would do.
    """
    if device.type == "cuda" and settings.compile in ("inductor", "regional"):
        from torch._inductor.async_compile import AsyncCompile  # which variants without a compiler do not need

        AsyncCompile.wakeup()
        import torch._inductor.compile_fx  # noqa: F401


_compiled_before = False  # whether this process has compiled for an earlier run, which leaves more than Dynamo forgets


def forget_compiled() -> None:
    """Start as in a new process: Dynamo counts what it compiled for all models, and soon leaves the rest uncompiled."""
    global _compiled_before
    _compiled_before |= torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def found_in_cache() -> bool:
    """Whether an earlier run, of this process or another, has compiled a part of what this one needed."""
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    return _compiled_before or hits > 0 or found_compiled()


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


def translated(spec: Spec, device: torch.device) -> tuple[list[str], list[str], str]:
    """The forward pass of one layer of a variant's model, with attention `sdpa` and without packing: the operators that
    run without a compiler, the kernels that inductor's program calls in their place, and that program. Nothing of it is
    compiled to machine code."""
    from torch._inductor.utils import get_code  # a second's work, as is the next
    from torch.fx.experimental.proxy_tensor import make_fx

    spec = dataclasses.replace(
        spec, settings=dataclasses.replace(spec.settings, attention="sdpa", padding="max_length")
    )
    precision = Precision(spec.settings, device)
    model = build_model(spec).to(device, precision.weights).train()
    layer, hidden = layers_of(model)[0], torch.randn(*SHAPE, model.config.hidden_size, device=device)
    hidden = hidden.to(precision.weights)
    with torch.no_grad(), precision.autocast():
        called = [node.target for node in make_fx(layer)(hidden).graph.nodes if node.op == "call_function"]
        # From a cache there would be no program to read.
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            program = get_code(torch.compile(layer), hidden)[0]
    forget_compiled()
    operators = [each for each in called if isinstance(each, torch._ops.OpOverload) and not each.is_view]
    names = [each.overloadpacket.__name__ for each in operators]
    return [name for name in names if name not in NO_WORK], CALLS.findall(program), program
