"""Frozen weights in 4 bits under adapters that train: QLoRA (row L-qlora).

What does not train needs no gradients and no optimizer state, and its own bits are then most of what is left. NF4
(Dettmers et al. 2023) has 16 values, spaced so that weights drawn from a normal distribution fill them evenly, and a
scale for each block of 64 weights. bitsandbytes keeps them so and widens them for each product; the adapters stay as
they are. The loss is in quality, not in the arithmetic: a product takes longer than with native weights. It works on
every GPU that PyTorch supports.
"""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from qa_lib.model.encoders import layers_of


def use_nf4(model: nn.Module, compute: torch.dtype) -> None:
    """Give the products of every layer weights in 4 bits, in place, and compute them in this type. They are rounded
    when the model is moved to its device."""
    import bitsandbytes  # only these rows need it, and its import is slow

    for layer in layers_of(model):
        for name, product in list(layer.named_modules()):
            if not isinstance(product, nn.Linear | Conv1D):
                continue
            transposed = isinstance(product, Conv1D)  # GPT-2's linear layer, whose weight is [in, out]
            weight = (product.weight.T if transposed else product.weight).detach().contiguous()
            outputs, inputs = weight.shape
            small = bitsandbytes.nn.Linear4bit(inputs, outputs, compute_dtype=compute, quant_type="nf4")
            small.weight = bitsandbytes.nn.Params4bit(weight, quant_type="nf4", module=small)
            small.bias, small.transposed = product.bias, transposed
            small.support_avx512bf16_for_cpu = False  # it would round the scales again as soon as a CPU evaluates
            layer.set_submodule(name, small)
    model.is_loaded_in_4bit = True  # peft looks for this


def is_nf4(module: nn.Module) -> bool:
    return hasattr(module, "transposed") and isinstance(module, nn.Linear)


def native(small: nn.Module, delta: torch.Tensor | float = 0.0) -> nn.Module:
    """The layer of before, in fp32, with the weights that the 4 bits stand for plus `delta` [out, in]."""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(small.weight.data, small.weight.quant_state).float() + delta
    outputs, inputs = weight.shape
    layer = Conv1D(outputs, inputs) if small.transposed else nn.Linear(inputs, outputs)
    layer.weight = nn.Parameter(weight.T.contiguous() if small.transposed else weight)
    layer.bias = small.bias
    return layer
