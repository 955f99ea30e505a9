"""torch.compile around the forward pass, by backend (variants A3 and D).

`inductor` traces the model into one graph, fuses elementwise work into few kernels that read and
write memory once, and takes Python out of the step. `aot_eager` traces and differentiates the graph
but runs its kernels as they are, which shows what tracing alone contributes; `cudagraphs` replays
those kernels as CUDA graphs, which shows what launches cost. Inductor writes its kernels in Triton,
for GPUs of compute capability 7.0 and newer.

`regional` is Inductor again, on a few layers of packed sequences at a time (variant E-regions). All
layers are alike, so that one program serves every region, and the time before the first step falls
with the tracing and code generation. Nothing is fused across a border, and the backward pass comes
in pieces, whose gradients can be sent on meanwhile (variant P-overlap).

Inductor's partitioner also decides what the forward pass keeps for the backward pass. Results of
elementwise work that other kept values would give again are not kept, unless a GEMM needs them as a
whole: the outputs of GELU and of the layer norms, a third of all that BERT keeps. Variant
E-recompute-elementwise does not keep these either: each is computed once more, and no GEMM is
repeated, as it is where whole layers are recomputed (variant C2).
"""

import os
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch._functorch.config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from qa_lib.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy
from qa_lib.kernels.precompile import found_compiled
from qa_lib.model.packed import RegionalModel
from qa_lib.private import BREAKS_A_COMMAND, plain_path
from qa_lib.spec.settings import Settings


class LossOf(torch.nn.Module):
    """A model whose forward pass gives its loss alone.

    Every tensor that a compiled function returns gets a gradient, which is zeros if nobody used the
    tensor. For the logits of a language model these would be 3.3 GB in a step of GPT-2 small,
    written and read for nothing.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs) -> torch.Tensor:
        return self.model(**inputs).loss


class MaskedLossOf(LossOf):
    """A LossOf for padded samples, whose padding is left out of the loss."""

    def forward(self, attention_mask, start_positions, end_positions, **inputs) -> torch.Tensor:
        """Return the mean loss over samples of a softmax over each one's own tokens.

        `attention_mask` is [samples, tokens] with 0 for padding, positions are [samples].
        """
        output = self.model(attention_mask=attention_mask, **inputs)
        is_padding = attention_mask == 0
        start_logits = output.start_logits.float().masked_fill(is_padding, -torch.inf)
        end_logits = output.end_logits.float().masked_fill(is_padding, -torch.inf)
        start_loss = F.cross_entropy(start_logits, start_positions)
        end_loss = F.cross_entropy(end_logits, end_positions)
        return (start_loss + end_loss) / 2


class ChunkedLossOf(torch.nn.Module):
    """A LossOf for a language model, whose head and loss are computed together.

    `fp8` has the head's GEMMs in 8-bit floats (kernels/linear_cross_entropy.py).
    """

    def __init__(self, model: torch.nn.Module, fp8: bool = False):
        super().__init__()
        self.model = model
        self.fp8 = fp8

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting each next token; both are [batch, tokens]."""
        hidden = self.model.base_model(input_ids=input_ids).last_hidden_state
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return linear_cross_entropy(
            hidden.flatten(0, 1), self.model.lm_head.weight, targets.flatten(), self.fp8
        )


def compiled(model: torch.nn.Module, settings: Settings) -> torch.nn.Module:
    """Return the model's compiled form, which shares its weights; the model itself without one.

    With `regional` the model is a LossOf. Where padding varies, shapes are symbolic from the start,
    so that a new length is compiled again at most where it fuses differently.
    """
    if settings.compile == "none":
        return model
    backend = "inductor" if settings.compile == "regional" else settings.compile
    _configure_tracing(settings)
    if backend == "inductor" and settings.loss != "native":
        _leave_chunked_loss_to_pytorch()
    compile_module = partial(torch.compile, backend=backend, dynamic=settings.padding == "longest")
    if settings.compile == "regional":
        return RegionalModel(model.model, compile_module)
    return compile_module(model)


def _configure_tracing(settings: Settings) -> None:
    """Set what PyTorch reads when the first forward pass is compiled."""
    torch._functorch.config.ban_recompute_materialized_backward = (
        settings.activation_checkpointing != "elementwise"
    )
    # The forward and backward passes of custom functions are parts of the traced graph, and so of
    # its key in the cache.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # Where shapes are symbolic, the rates of dropout would be so at first, too, and all would be
    # traced a second time.
    torch._dynamo.config.specialize_float = True


def _leave_chunked_loss_to_pytorch() -> None:
    """Have Inductor call the operator of head and loss as it is.

    Inductor would do so by itself, but first write a log line of all that leads to the operator: in
    PyTorch 2.11 it takes twice as long for every layer, and hours for twelve.
    """
    from torch._inductor.lowering import make_fallback, require_contiguous

    make_fallback(torch.ops.qa_lib.linear_cross_entropy.default, require_contiguous, warn=False)


def use_plain_paths() -> None:
    """Have Inductor's C++ compiler find its files by paths without blanks and quotes.

    Inductor does not quote the paths of temporary files, of its cache, of PyTorch's libraries and
    of Python's in the command that it gives the compiler, and all of these may lie anywhere. Paths
    that can be in a command stay as they are. Raises UserError where no link can stand for one that
    cannot.
    """
    temporary = tempfile.gettempdir()
    if BREAKS_A_COMMAND.search(temporary):
        link = plain_path(temporary)
        tempfile.tempdir = link
        os.environ["TMPDIR"] = link
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if cache:  # without it, the cache is a temporary folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = plain_path(os.path.abspath(cache))
    if BREAKS_A_COMMAND.search(torch.__file__):
        from torch.utils import cpp_extension  # which Inductor asks for this path

        cpp_extension.TORCH_LIB_PATH = plain_path(cpp_extension.TORCH_LIB_PATH)
    variables = sysconfig.get_config_vars()
    if variables.get("LIBDIR"):
        variables["LIBDIR"] = plain_path(variables["LIBDIR"])


def start_compilers(settings: Settings, device: torch.device) -> None:
    """Start the processes that will compile a GPU's kernels for Inductor, and return at once.

    They need seconds to import PyTorch. Inductor starts them when it has a first kernel, and until
    they are there it compiles in this process, one kernel after the other. If they are started
    before the data is read, they are there in time. Meanwhile this process imports the rest of
    Inductor, which the first step would do.
    """
    if device.type != "cuda" or settings.compile not in ("inductor", "regional"):
        return
    # Variants without a compiler do not need it.
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.wakeup()
    import torch._inductor.compile_fx  # noqa: F401


def compile_kernels(forward: Callable[[], torch.Tensor], model: torch.nn.Module) -> None:
    """Have Triton compile all kernels of a step at once, before the first of them runs.

    It is for models without a compiler, which would ask for them (kernels/precompile.py). `forward`
    returns the loss; it and the backward pass run among fake tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(forward(), trained, allow_unused=True)


# Whether this process has compiled for an earlier run, which leaves more than Dynamo forgets.
_compiled_before = False


def forget_compiled() -> None:
    """Start as in a new process.

    Dynamo counts what it has compiled for all models together, and soon leaves the rest uncompiled.
    """
    global _compiled_before
    counters = torch._dynamo.utils.counters
    if not counters:
        # There is nothing to forget, and `reset` would import Inductor.
        return
    _compiled_before |= counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    counters.clear()


def found_in_cache() -> bool:
    """Return whether an earlier run has compiled a part of what this one needed.

    That run may have been one of this process or of another.
    """
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    return _compiled_before or hits > 0 or found_compiled()
