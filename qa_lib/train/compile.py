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
again from other values that are kept, it leaves out, unless a GEMM needs it as a whole: the outputs of GELU and of the
layer norms, a third of all that BERT keeps. Variant E-recompute-elementwise leaves these out as well: each is written
once more, and no GEMM is repeated, as it is where whole layers are recomputed (variant C2)."""

import os
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch._functorch.config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qa_lib.kernels.common import found_compiled
from qa_lib.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy
from qa_lib.model.packed import RegionalModel
from qa_lib.private import BREAKS_A_COMMAND, plain_path
from qa_lib.spec.settings import Settings


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


class ChunkedLossOf(torch.nn.Module):
    """As LossOf, of a language model whose head and loss are computed together."""

    def __init__(self, model: torch.nn.Module, fp8: bool = False):
        super().__init__()
        self.model, self.fp8 = model, fp8

    def forward(self, input_ids, labels) -> torch.Tensor:
        """The mean loss of predicting each next token; both [batch, tokens]."""
        hidden = self.model.base_model(input_ids=input_ids).last_hidden_state
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return linear_cross_entropy(
            hidden.flatten(0, 1), self.model.lm_head.weight, targets.flatten(), self.fp8
        )


def compiled(model: torch.nn.Module, settings: Settings):
    """The model's compiled form, which shares its weights; or the model. Of regions it is the form of a LossOf.

    Where padding varies, shapes are symbolic from the start, so that a new length compiles again at most where it fuses
    differently.
    """
    if settings.compile == "none":
        return model
    backend = "inductor" if settings.compile == "regional" else settings.compile
    # Read when the first forward pass is compiled.
    torch._functorch.config.ban_recompute_materialized_backward = (
        settings.activation_checkpointing != "elementwise"
    )
    # Their forward and backward passes are parts of the traced graph, and so of its key.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # Where shapes are symbolic, the rates of dropout would be as well at first, and all would be traced a second time.
    torch._dynamo.config.specialize_float = True
    if backend == "inductor" and settings.loss != "native":
        from torch._inductor.lowering import make_fallback, require_contiguous

        # Inductor would do so itself, and first write a log line of all that leads to the operator: in PyTorch 2.11 it
        # takes twice as long for every layer, and hours for twelve.
        make_fallback(torch.ops.qa_lib.linear_cross_entropy.default, require_contiguous, warn=False)
    by_backend = partial(torch.compile, backend=backend, dynamic=settings.padding == "longest")
    return (
        RegionalModel(model.model, by_backend)
        if settings.compile == "regional"
        else by_backend(model)
    )


def use_plain_paths() -> None:
    """Have Inductor's C++ compiler find its files by paths without blanks and quotes.

    Inductor does not quote the paths of temporary files, of its cache, of PyTorch's libraries and of Python's in the
    command that it gives the compiler, and all of these may lie anywhere. Paths that can be in a command stay as they
    are. Raises UserError where no link can stand for one that cannot.
    """
    temporary = tempfile.gettempdir()
    if BREAKS_A_COMMAND.search(temporary):
        tempfile.tempdir = os.environ["TMPDIR"] = plain_path(temporary)
    if cache := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):  # else it is a temporary folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = plain_path(os.path.abspath(cache))
    if BREAKS_A_COMMAND.search(torch.__file__):
        from torch.utils import cpp_extension  # which Inductor asks for this path

        cpp_extension.TORCH_LIB_PATH = plain_path(cpp_extension.TORCH_LIB_PATH)
    variables = sysconfig.get_config_vars()
    if variables.get("LIBDIR"):
        variables["LIBDIR"] = plain_path(variables["LIBDIR"])


def start_compilers(settings: Settings, device: torch.device) -> None:
    """Start the processes that will compile a GPU's kernels for Inductor, and do not wait for them.

    They need seconds to import PyTorch. Inductor starts them when it has a first kernel, and until they are there it
    compiles in this process, one kernel after the other. Called before the data is read, they are there in time.
    Meanwhile this process imports the rest of Inductor, which the first step would do.
    """
    if device.type == "cuda" and settings.compile in ("inductor", "regional"):
        from torch._inductor.async_compile import (
            AsyncCompile,
        )  # which variants without a compiler do not need

        AsyncCompile.wakeup()
        import torch._inductor.compile_fx  # noqa: F401


def compile_kernels(forward: Callable[[], torch.Tensor], model: torch.nn.Module) -> None:
    """Have Triton compile the kernels of a step at once, where no compiler of the model asks for them before the first
    one runs (kernels/common.py): by a forward and a backward pass among fake tensors. `forward` gives the loss."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.autograd.grad(
            forward(), [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )


_compiled_before = False  # whether this process has compiled for an earlier run, which leaves more than Dynamo forgets


def forget_compiled() -> None:
    """Start as in a new process: Dynamo counts what it compiled for all models, and soon leaves the rest uncompiled."""
    global _compiled_before
    if (
        counters := torch._dynamo.utils.counters
    ):  # or else there is nothing, and `reset` would import Inductor
        _compiled_before |= counters["stats"]["unique_graphs"] > 0
        torch._dynamo.reset()
        counters.clear()


def found_in_cache() -> bool:
    """Whether an earlier run, of this process or another, has compiled a part of what this one needed."""
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    return _compiled_before or hits > 0 or found_compiled()
