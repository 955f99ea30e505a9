"""In which number formats a step computes: fp32, or half precision in one of three ways.

Tensor cores multiply 16-bit numbers several times as fast as 32-bit ones. fp16 has the finer mantissa but ends at
65,504 and underflows early, so its loss is scaled up before the backward pass and gradients down after it (GradScaler);
bf16 has fp32's range and needs none of that (row E-bf16). With `autocast` the weights stay in fp32, and each product
casts its operands; with the optimizer `master` the weights themselves are in half precision and nothing is cast (row
E-masters). Tensor cores multiply fp16 from compute capability 7.0 on, as a T4 has, and bf16 from 8.0 on."""

import torch

from qa_lib.model.build import DTYPES
from qa_lib.variants import Settings


class Precision:
    """What the settings' number format means on a device: `weights`, the type the model is cast to (None: as it is), an
    `autocast()` context for the forward pass, and the `scaler` of the loss, which does nothing where none is needed."""

    def __init__(self, settings: Settings, device: torch.device):
        self.dtype, self.device = DTYPES[settings.precision], device
        self.weights = self.dtype if settings.half_weights else None
        self.mixed = settings.precision != "fp32" and not settings.half_weights
        needs_scale = settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=needs_scale)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.mixed)
