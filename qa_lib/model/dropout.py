"""Dropout whose random bits come from a hash of the element's number, not from PyTorch's generator.

Compiled, PyTorch's dropout calls its Philox generator for every element, ten rounds of which one in four results is
used: more time than the layer norm it is fused into. A 32-bit hash takes a tenth of the instructions, and the backward
pass computes it again rather than read a mask.
"""

import torch
from torch import nn


class Seeds(nn.Module):
    """What a model's hash dropouts share: a module, so that moving the model moves it once for all of them."""

    def __init__(self, count: int):
        super().__init__()
        self.register_buffer("values", torch.zeros(count, dtype=torch.int32), persistent=False)


class HashDropout(nn.Module):
    """nn.Dropout with rate `p` for tensors of fewer than 2^31 elements; seed `number` decides what it drops."""

    def __init__(self, p: float, seeds: Seeds, number: int):
        super().__init__()
        self.p, self.seeds, self.number = p, seeds, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        # The finalizer "lowbias32" (Wellons 2018), with the seed near its start, so that two seeds give unrelated
        # patterns. PyTorch's int32 wraps when it multiplies, and keeps the sign when it shifts, hence the masks.
        bits = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
        bits = ((bits ^ ((bits >> 16) & 0xFFFF)) + self.seeds.values[self.number]) * 0x7FEB352D
        bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
        bits = (bits ^ ((bits >> 16) & 0xFFFF)) & 0x7FFFFFFF
        return torch.where(bits >= int(self.p * 2**31), x * (1 / (1 - self.p)), 0.0)


def use_hash_dropout(model: nn.Module) -> None:
    """Replace the dropouts of a BERT's hidden states, in place; attention's own is its kernel's affair."""
    layers = model.bert.encoder.layer
    owners = [model.bert.embeddings, *(part for layer in layers for part in (layer.attention.output, layer.output))]
    seeds = Seeds(len(owners))
    for number, owner in enumerate(owners):
        owner.dropout = HashDropout(owner.dropout.p, seeds, number)
    model.dropout_seeds = seeds


def renew(model: nn.Module) -> None:
    """Draw new seeds for a model's hash dropouts, from PyTorch's generator on its device; before each forward pass.

    Does nothing to a model without them."""
    if hasattr(model, "dropout_seeds"):
        model.dropout_seeds.values.random_()
