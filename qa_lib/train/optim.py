"""Number formats, optimizers by name, the learning rate's schedule, and clipping.

Tensor cores multiply 16-bit numbers several times as fast as 32-bit ones. fp16 has the finer
mantissa but ends at 65,504 and underflows early, so its loss is scaled up before the backward pass
and gradients down after it (GradScaler); bf16 has fp32's range and needs none of that (variant
E-bf16). With autocast the weights stay in fp32, and each GEMM casts its operands; with the
optimizer `adamw-master` the weights themselves are in half precision and nothing is cast (variant
E-masters). Tensor cores multiply fp16 from compute capability 7.0 on, which a T4 exceeds, and bf16
from 8.0 on.

Adding an optimizer takes a function here and a line in OPTIMIZERS, its name among the values that
Settings allows, and its bytes in lab/search/memory_estimate.py.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.amp.grad_scaler import OptState

from qa_lib.model.build import DTYPES
from qa_lib.spec.settings import Settings
from qa_lib.spec.spec import Spec
from qa_lib.train.master_adamw import MasterAdamW

CLIP = 1.0  # the norm to which gradients are clipped


class Precision:
    """The settings' number format on a device.

    `weights` is the type that the model is cast to (None: it stays as it is), `autocast()` a
    context for the forward pass, and `scaler` that of the loss, which does nothing where none is
    needed.
    """

    def __init__(self, settings: Settings, device: torch.device):
        self.dtype = DTYPES[settings.precision]
        self.device = device
        self.weights = self.dtype if settings.half_weights else None
        self.mixed = settings.precision != "fp32" and not settings.half_weights
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.mixed)


def build_optimizer(
    model: torch.nn.Module, spec: Spec, parameters: list | None = None
) -> torch.optim.Optimizer:
    """Return the settings' optimizer over `parameters`, by default all that train.

    It is AdamW without weight decay, the reference project's, in one of its forms.
    """
    make = OPTIMIZERS[spec.settings.optimizer]
    return make(model, parameters or trained(model), peak_rate(spec))


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that train."""
    return [p for p in model.parameters() if p.requires_grad]


def _adamw(model, parameters, rate) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW with its default options, as most people write it.

    It runs many small kernels and keeps its step counts on the host.
    """
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)


def _fused(model, parameters, rate) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW as one kernel for all parameters.

    On a GPU rate and step count stay there, and no step waits for the device.
    """
    device = parameters[0].device
    on_gpu = device.type == "cuda"
    if on_gpu:
        rate = torch.tensor(rate, device=device)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0, fused=True, capturable=on_gpu)


def _master(model, parameters, rate, moments=torch.float32, masters=True) -> torch.optim.Optimizer:
    """Return AdamW over half-precision weights, with or without fp32 masters (master_adamw.py)."""
    rate = torch.tensor(rate, device=parameters[0].device)
    options = {"max_norm": CLIP, "moments": moments, "masters": masters}
    return MasterAdamW(parameters, rate, weight_decay=0.0, **options)


def _adamw8bit(model, parameters, rate) -> torch.optim.Optimizer:
    """Return AdamW with moments in 8 bits, a scale for each block of them (Dettmers et al. 2022).

    Tensors of fewer than 4,096 elements and every embedding keep 32-bit moments, by the advice of
    bitsandbytes: embedding gradients are sparse and uneven.
    """
    # Only these variants need it, and its import is slow. It warns of a 4-bit CPU kernel that
    # nothing here uses.
    import bitsandbytes

    # There is one manager for the whole process, which knows a parameter by its place in its
    # optimizer: it must forget an earlier model's, and keep no module alive.
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=rate, weight_decay=0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.check_overrides()
    manager.module_weight_config_triple.clear()
    return optimizer


OPTIMIZERS = {
    "adamw": _adamw,
    "adamw-fused": _fused,
    "adamw-8bit": _adamw8bit,
    "adamw-master": _master,
    "adamw-master-bf16": partial(_master, moments=torch.bfloat16),
    "adamw-master-8bit": partial(_master, moments=torch.uint8),
    "adamw-rounded-bf16": partial(_master, moments=torch.bfloat16, masters=False),
    "adamw-rounded-8bit": partial(_master, moments=torch.uint8, masters=False),
}


def unscale(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Take the loss's scale off the gradients.

    MasterAdamW does so itself while it reads them: where they are in fp16, without the scale small
    ones would be lost, and GradScaler refuses.
    """
    if not isinstance(optimizer, MasterAdamW):
        scaler.unscale_(optimizer)
    elif scaler.is_enabled():
        # GradScaler.step does the same, but processes must agree before on what they have found.
        scaler._check_inf_per_device(optimizer)
        scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
        optimizer.grad_scale = scaler._get_scale_async()


def clip(
    optimizer: torch.optim.Optimizer, global_norm: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Scale the gradients down to the norm CLIP; MasterAdamW does so itself while it reads them.

    `global_norm` makes the norm of all gradients from that of the optimizer's (see
    data_parallel.NoParallel).
    """
    if isinstance(optimizer, MasterAdamW):
        optimizer.global_norm = global_norm
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(torch.nn.utils.get_total_norm(gradients))
    torch.nn.utils.clip_grads_with_norm_(parameters, CLIP, norm)


def peak_rate(spec: Spec) -> float:
    """Return the highest learning rate of a run, its recipe's factor included."""
    factor = spec.recipe.lr_factor if spec.preset.recipe_rates else 1.0
    return spec.preset.learning_rate * factor


def learning_rate(spec: Spec, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 0, of so many `steps`.

    It warms up linearly and decays linearly. No step has a rate of 0: the first is one part of the
    warm-up above it, and the last one part of the decay.
    """
    peak = peak_rate(spec)
    warmup = int(spec.preset.warmup * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):  # in place, since a graph reads it from the device
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
