"""Dropout whose random bits come from a hash of the element's number, not from PyTorch's generator (variant E-dropout).

Dropout (Srivastava et al. 2014) needs a random bit for every element of the hidden states. PyTorch takes them from
Philox (Salmon et al. 2011), ten rounds of multiplications for each. Compiled, dropout is fused into a kernel with a
layer norm, calls Philox for every element and uses one result in four: more time than the norm itself. A 32-bit hash of
the element's number and a seed is as good for this purpose at a tenth of the instructions, and the backward pass
computes it again rather than read a mask from memory. It pays where a compiler makes one kernel of it, so on GPUs that
Triton writes for, of compute capability 7.0 and newer.

Seeds are drawn anew before each forward pass, from PyTorch's generator on the device, so that a run stays a function
of its seed and a captured graph draws other patterns in each replay.
"""

import torch
from torch import nn

from qa_lib.kernels.hash_dropout import hash_dropout
from qa_lib.model.architectures import encoder_of, layers_of


class HashDropout(nn.Module):
    """nn.Dropout with rate `p` for tensors of fewer than 2^31 elements; its `seed` decides what it drops."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p
        self.register_buffer("seed", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hash_dropout(x, self.seed, self.p) if self.training and self.p else x


def use_hash_dropout(model: nn.Module) -> None:
    """Replace the dropouts of the hidden states, in place; attention's own is its kernel's affair
    (kernels/varlen_attention.py)."""
    encoder = encoder_of(model)
    owners = [(model, encoder.embeddings_dropout or f"{encoder.embeddings[0]}.dropout")]
    owners += [(layer, name) for layer in layers_of(model) for name in encoder.dropouts]
    for owner, name in owners:
        owner.set_submodule(name, HashDropout(owner.get_submodule(name).p))


def renew(model: nn.Module) -> None:
    """Draw new seeds for a model's hash dropouts, from PyTorch's generator on its device; before each forward pass.

    Does nothing to a model without them.
    """
    seeds = [module.seed for module in model.modules() if isinstance(module, HashDropout)]
    if seeds:
        drawn = torch.empty(len(seeds), dtype=torch.int32, device=seeds[0].device).random_()
        torch._foreach_copy_(seeds, list(drawn.unbind()))
