"""Frozen weights in 4 bits under adapters that train: QLoRA (variant L-qlora).

A weight that does not train needs no gradient and no optimizer state, so that most of the memory
that is left goes to its own bits. NF4 (Dettmers et al. 2023) has 16 values, spaced so that weights
drawn from a normal distribution fill them evenly, and a scale for each block of 64 weights.
bitsandbytes rounds to it and widens it again; the adapters stay in fp32. The paper rounds the
scales, too, which is not done here: 4.5 bits a weight instead of 4.13.

Each layer widens its weight, uses it and forgets it; its backward pass widens it again. To keep the
wide weight until then would take two bytes more for each. Both passes are custom operators that the
compiler does not look into: it cannot decide to keep the wide weight, and what is around them is
one graph.

bitsandbytes' own layer lets peft make adapters in the half precision that it computes in; it
returns the type of its input, which is fp32 after a layer norm, so that activations take twice the
memory; and it casts its bias in place when it is first called, which takes the compiler's graph
apart. The loss of NF4 is in quality and in the time to widen. It works on the GPUs that
bitsandbytes is built for, a T4 among them, and on a CPU.

Widening is a table and a multiplication. On a GPU bitsandbytes' kernel does it. On a CPU it is
plain PyTorch, since the kernel of bitsandbytes 0.50.2 is wrong by up to twice the largest weight on
processors with AVX512-BF16, whose packed bits are right.
"""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from qa_lib.kernels.common import custom_op
from qa_lib.model.architectures import layers_of

BLOCK = 64  # weights that share a scale


class NF4Linear(nn.Linear):
    """A linear layer with a frozen weight in 4 bits.

    `weight` is uint8 [out * in / 2, 1], two weights a byte. `scales` has one for each BLOCK of
    weights: the bits of fp32 numbers as int32, so that `model.half()` leaves them alone.

    It is an nn.Linear for peft, which looks for one; `native` gives a layer that can be merged or
    initialised.
    """

    def __init__(self, linear: nn.Linear | Conv1D, compute: torch.dtype):
        """Make the layer that computes in type `compute` what `linear` computes."""
        # Only these variants need it, and its import is slow.
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        # The weight of GPT-2's linear layer is [in, out].
        self.transposed = isinstance(linear, Conv1D)
        weight = (linear.weight.T if self.transposed else linear.weight).detach().contiguous()
        self.out_features, self.in_features = weight.shape
        packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(state.absmax.view(torch.int32), requires_grad=False)
        # How many weights each holds, for architectures.param_counts.
        self.weight.held = weight.numel()
        self.scales.held = 0
        self.bias = linear.bias
        self.compute = compute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., out] for inputs [..., in], in the type that it computes in."""
        outputs = _linear(inputs.to(self.compute), self.weight, self.scales, self.out_features)
        return outputs if self.bias is None else outputs + self.bias.to(self.compute)

    def wide(self) -> torch.Tensor:
        """Return the weight [out, in] that the 4 bits stand for, in fp32."""
        return _wide(self.weight, self.scales, self.out_features, self.in_features, torch.float32)


def _wide(
    packed: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [rows, columns] that `packed` bits and `scales` stand for, in type `dtype`.

    Raises RuntimeError for bits of another size: bitsandbytes reads as many bytes as the weight
    has, whatever there are.
    """
    size = rows * columns
    if packed.numel() != (size + 1) // 2:
        raise RuntimeError(
            f"{packed.numel()} bytes of weights in 4 bits are no matrix of {rows} x {columns}"
        )
    scales = scales.view(torch.float32)
    if packed.device.type != "cpu":
        return torch.ops.bitsandbytes.dequantize_4bit(
            packed, scales, BLOCK, "nf4", (rows, columns), dtype
        )
    from bitsandbytes.functional import get_4bit_type

    # Each number's value (appendix E of the QLoRA paper) times its block's scale. The first of two
    # weights is in the upper half of their byte, and the last block may be shorter.
    bits = packed.view(-1)
    codes = torch.stack([bits >> 4, bits & 15], dim=1).long()
    values = get_4bit_type("nf4", "cpu")[codes].view(-1)[:size]
    weights = values * scales.repeat_interleave(BLOCK)[:size]
    return weights.view(rows, columns).to(dtype)


@custom_op("qa_lib::nf4_linear")
def _linear(
    inputs: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, out: int
) -> torch.Tensor:
    """Return outputs [..., out] for inputs [..., in], without a bias, in the inputs' type."""
    with torch.autocast(inputs.device.type, enabled=False):
        weight = _wide(packed, scales, out, inputs.shape[-1], inputs.dtype)
        return nn.functional.linear(inputs, weight)


@custom_op("qa_lib::nf4_linear_backward")
def _linear_backward(
    grad: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, width: int
) -> torch.Tensor:
    """Return the gradient of the inputs [..., width] from that of the outputs [..., out]."""
    return grad @ _wide(packed, scales, grad.shape[-1], width, grad.dtype)


def _setup_context(ctx, inputs, output):
    x, packed, scales, _ = inputs
    ctx.save_for_backward(packed, scales)
    ctx.width = x.shape[-1]


def _backward(ctx, grad):
    packed, scales = ctx.saved_tensors
    return _linear_backward(grad, packed, scales, ctx.width), None, None, None


_linear.operator.register_autograd(_backward, setup_context=_setup_context)


def use_nf4(model: nn.Module, compute: torch.dtype) -> None:
    """Give the linear layers of every layer weights in 4 bits, in place.

    They compute in type `compute`.
    """
    for layer in layers_of(model):
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear | Conv1D):
                layer.set_submodule(name, NF4Linear(linear, compute))


def native(small: NF4Linear, delta: torch.Tensor | float = 0.0) -> nn.Module:
    """Return a layer of the kind that was replaced, with weights in fp32.

    They are what the 4 bits stand for plus `delta` [out, in].
    """
    weight = small.wide() + delta
    outputs, inputs = weight.shape
    if small.transposed:
        layer = Conv1D(outputs, inputs)
        weight = weight.T.contiguous()
    else:
        layer = nn.Linear(inputs, outputs)
    layer.weight = nn.Parameter(weight)
    layer.bias = small.bias
    return layer
