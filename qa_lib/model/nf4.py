"""Frozen weights in 4 bits under adapters that train: QLoRA (variant L-qlora).

What does not train needs no gradients and no optimizer state, and its own bits are then most of what is left. NF4
(Dettmers et al. 2023) has 16 values, spaced so that weights drawn from a normal distribution fill them evenly, and a
scale for each block of 64 weights. bitsandbytes rounds to it and widens it again; the adapters stay in fp32. The paper
rounds the scales, too, which is not done here: 4.5 bits a weight instead of 4.13.

Each layer widens its weight, uses it and forgets it; its backward pass widens it again. To keep the wide weight until
then would take two bytes more for each. Both passes are custom operators that the compiler does not look into: it
cannot decide to keep the wide weight, and what is around them is one graph.

bitsandbytes' own layer lets peft make adapters in the half precision that it computes in; it returns the type of its
input, which is fp32 after a layer norm, so that activations take twice the memory; and it casts its bias in place when
it is first called, which takes the compiler's graph apart. The loss of NF4 is in quality and in the time to widen. It
works on the GPUs that bitsandbytes is built for, a T4 among them, and on a CPU.

Widening is a table and a multiplication. On a GPU bitsandbytes' kernel does it, and is held against that once, when a
model is built. On a CPU it is plain PyTorch, since the kernel of bitsandbytes 0.50.2 is wrong by up to twice the
largest weight on processors with AVX512-BF16, whose packed bits are right.
"""

from importlib.metadata import version

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from qa_lib.errors import UserError
from qa_lib.kernels.precompile import custom_op
from qa_lib.model.architectures import layers_of

BLOCK = 64  # weights that share a scale
# What the 4 bits stand for, in shares of the block's scale: appendix E of the QLoRA paper.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class NF4Linear(nn.Linear):
    """A linear layer with a frozen weight in 4 bits: `weight`, uint8 [out * in / 2, 1], two weights a byte, and
    `scales`, one for each BLOCK of them: the bits of fp32 numbers, as int32, so that `model.half()` leaves them alone.

    It is an nn.Linear for peft, which looks for one; `native` gives a layer that can be merged or initialised.
    """

    def __init__(self, linear: nn.Linear | Conv1D, compute: torch.dtype):
        """The layer that computes in type `compute` what `linear` computes."""
        from bitsandbytes.functional import quantize_4bit  # only these variants need it, and its import is slow

        nn.Module.__init__(self)
        self.transposed = isinstance(linear, Conv1D)  # GPT-2's linear layer, whose weight is [in, out]
        weight = (linear.weight.T if self.transposed else linear.weight).detach().contiguous()
        self.out_features, self.in_features = weight.shape
        packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(state.absmax.view(torch.int32), requires_grad=False)
        self.bias, self.compute = linear.bias, compute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], of the type that it computes in."""
        outputs = _linear(inputs.to(self.compute), self.weight, self.scales, self.out_features)
        return outputs if self.bias is None else outputs + self.bias.to(self.compute)

    def weights_held(self) -> dict[nn.Parameter, int]:
        """How many weights its packed parameters hold, for `sizes` of encoders.py."""
        return {self.weight: self.in_features * self.out_features, self.scales: 0}

    def wide(self) -> torch.Tensor:
        """The weight [out, in] that the 4 bits stand for, in fp32."""
        return _wide(self.weight, self.scales, self.out_features, self.in_features, torch.float32)


def _wide(packed: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [rows, columns]. bitsandbytes reads as many bytes as that has, whatever there are."""
    torch._check(
        packed.numel() == (rows * columns + 1) // 2,
        lambda: f"{packed.numel()} bytes of weights in 4 bits are no matrix of {rows} x {columns}",
    )
    if packed.device.type == "cpu":
        return _widen(packed, scales, rows, columns).to(dtype)
    widen = torch.ops.bitsandbytes.dequantize_4bit
    return widen(packed, scales.view(torch.float32), BLOCK, "nf4", (rows, columns), dtype)


def _widen(packed: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The weight [rows, columns] in fp32: each number's value times its block's scale. The first of two weights is in
    the upper half of their byte, and the last block may be shorter."""
    values = torch.tensor(VALUES, device=packed.device)
    bits = packed.view(-1)
    weights = values[torch.stack([bits >> 4, bits & 15], dim=1).long()].view(-1)[: rows * columns]
    scale = scales.view(torch.float32).view(-1).repeat_interleave(BLOCK)[: rows * columns]
    return (weights * scale).view(rows, columns)


def check_kernel(device: torch.device, dtype: torch.dtype) -> None:
    """Hold what widens weights to this type on this device against the table. Raises UserError where they differ."""
    packed = torch.arange(256, dtype=torch.uint8, device=device)  # all there are
    scales = torch.arange(1.0, 9.0, device=device)
    found, wanted = _wide(packed, scales.view(torch.int32), 8, BLOCK, dtype), _widen(packed, scales, 8, BLOCK)
    error = ((found - wanted).abs() / scales[:, None]).max().item()
    if not error <= torch.finfo(dtype).eps:
        raise UserError(
            f"bitsandbytes {version('bitsandbytes')} widens weights in 4 bits wrongly on {device.type}, by {error:.2g} "
            "of the largest: install another version of it, or train L-lora, which needs none"
        )


@custom_op("qa_lib::nf4_linear")
def _linear(inputs: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, out: int) -> torch.Tensor:
    """[..., in] -> [..., out], without a bias, in the inputs' type."""
    with torch.autocast(inputs.device.type, enabled=False):
        return functional.linear(inputs, _wide(packed, scales, out, inputs.shape[-1], inputs.dtype))


@custom_op("qa_lib::nf4_linear_backward")
def _linear_backward(grad: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """The gradient of the inputs [..., width] from that of the outputs [..., out]."""
    return grad @ _wide(packed, scales, grad.shape[-1], width, grad.dtype)


def _setup_context(ctx, inputs, output):
    x, packed, scales, _ = inputs
    ctx.save_for_backward(packed, scales)
    ctx.width = x.shape[-1]


def _backward(ctx, grad):
    return _linear_backward(grad, *ctx.saved_tensors, ctx.width), None, None, None


_linear.register_autograd(_backward, setup_context=_setup_context)


def use_nf4(model: nn.Module, compute: torch.dtype) -> None:
    """Give the linear layers of every layer weights in 4 bits, in place, and compute them in this type. Raises
    UserError where bitsandbytes widens them wrongly on this machine's GPU."""
    if torch.cuda.is_available():
        import bitsandbytes  # noqa: F401 - which registers the kernel

        check_kernel(torch.device("cuda"), compute)
    for layer in layers_of(model):
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear | Conv1D):
                layer.set_submodule(name, NF4Linear(linear, compute))


def native(small: NF4Linear, delta: torch.Tensor | float = 0.0) -> nn.Module:
    """The layer of before, in fp32, with the weights that the 4 bits stand for plus `delta` [out, in]."""
    weight = small.wide() + delta
    outputs, inputs = weight.shape
    layer = Conv1D(outputs, inputs) if small.transposed else nn.Linear(inputs, outputs)
    layer.weight = nn.Parameter(weight.T.contiguous() if small.transposed else weight)
    layer.bias = small.bias
    return layer
