"""Dropout of the hidden states whose random bits are a hash: variant E-dropout, and all after it.

Dropout (Srivastava et al. 2014) needs a random bit for every element of the hidden states. PyTorch
takes them from Philox (Salmon et al. 2011), ten rounds of multiplications for each. Compiled,
dropout is fused into a kernel with a layer norm, calls Philox for every element and uses one result
in four: more time than the norm itself. A 32-bit hash of the element's number and a seed is as good
for this purpose at a tenth of the instructions, and the backward pass computes it again rather than
read a mask from memory. It pays where one kernel does it all, the compiler's or our own, so on GPUs
that Triton writes for, of compute capability 7.0 and newer.

Seeds are drawn anew before each forward pass, from PyTorch's generator on the device, so that a run
stays a function of its seed and a captured graph draws other patterns in each replay.
"""

import torch
from torch import nn

from qa_lib.kernels.hash_dropout import hash_dropout
from qa_lib.model.architectures import encoder_of, layers_of


class HashDropout(nn.Module):
    """nn.Dropout with rate `p` for tensors of fewer than 2^31 elements.

    Its `seed`, an int32 on `device`, decides what it drops; `renew` draws it anew. A kernel reads
    it, so it has to be on the device of the tensors.
    """

    def __init__(self, p: float, device: torch.device | None = None):
        super().__init__()
        self.p = p
        seed = torch.zeros((), dtype=torch.int32, device=device)
        self.register_buffer("seed", seed, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hash_dropout(x, self.seed, self.p) if self.training and self.p else x


def use_hash_dropout(model: nn.Module) -> None:
    """Replace the dropouts of the hidden states, in place.

    Attention's own dropout is its kernel's affair (kernels/varlen_attention.py).
    """
    encoder = encoder_of(model)
    owners = [(model, encoder.embeddings_dropout or f"{encoder.embeddings[0]}.dropout")]
    owners += [(layer, name) for layer in layers_of(model) for name in encoder.dropouts]
    for owner, name in owners:
        owner.set_submodule(name, hash_dropout_for(owner, owner.get_submodule(name).p))


def hash_dropout_for(module: nn.Module, p: float) -> HashDropout:
    """Return a HashDropout with rate `p` on the device of a module's weights."""
    return HashDropout(p, next(module.parameters()).device)


def renew(model: nn.Module) -> None:
    """Draw new seeds for a model's hash dropouts, from PyTorch's generator on its device.

    The loop calls it before each forward pass. It does nothing to a model without hash dropout.
    """
    seeds = [module.seed for module in model.modules() if isinstance(module, HashDropout)]
    if not seeds:
        return
    torch._foreach_copy_(seeds, list(drawn_seeds(len(seeds), seeds[0].device)))


def drawn_seeds(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return so many new seeds for hash dropouts, int32 tensors of no dimension."""
    if torch.compiler.is_compiling():  # PyTorch's compiler does not know the other
        return torch.randint(2**31, (count,), dtype=torch.int32, device=device).unbind()
    return torch.empty(count, dtype=torch.int32, device=device).random_().unbind()
