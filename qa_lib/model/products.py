"""Matrix products that leave their bias to the kernel after them, or its gradient (rows E-varlen, E-norm, E-gelu).

A bias costs next to nothing to add, in the product's own kernel or in one that reads the product anyway. Its gradient
is the trap: the sum of the product's gradient over all tokens, for which PyTorch and its compiler read that gradient
once more. The kernel that writes the gradient has it in its registers, and can sum it there (model/short.py,
model/norms.py, model/gelu.py): each program sums the rows that it has, and a small kernel adds up what they found. None
adds to another's, so that results are equal in every run. The small kernel is for GPUs of compute capability 7.5 and
newer, as are those of norms and GELU; attention's takes 8.0.
"""

import torch
from torch import nn
from torch.nn import functional as F

from qa_lib.model.ahead import start


class Product(nn.Linear):
    """nn.Linear with a `bias` that the module around it adds."""

    def forward(self, x):
        return F.linear(x, self.weight)


class BiasedProduct(nn.Linear):
    """nn.Linear that adds its bias, whose gradient is left to the module around it."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias.detach())


def unchanged(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product of a BiasedProduct [..., 3, heads, width], through which the bias gets its gradient."""
    return product + (bias - bias.detach()).view(product.shape[-3:])


def linear_of(kind: type[nn.Linear], native: nn.Linear) -> nn.Linear:
    """A linear layer of that `kind` on the weights of `native`."""
    linear = kind(native.in_features, native.out_features, device="meta")
    linear.weight, linear.bias = native.weight, native.bias
    return linear


def added_up(sums: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The sum over programs of what they found, fp32 [programs, ...] on a GPU, in this type."""
    from qa_lib.model import sum_kernels as kernels  # Triton comes with the CUDA builds of PyTorch alone

    total = sums.new_empty(sums.shape[1:], dtype=kind)
    grid = (-(-total.numel() // kernels.ADD_UP["COLUMNS"]),)
    start(kernels.add_up, grid, sums, total, len(sums), WIDTH=total.numel(), **kernels.ADD_UP)
    return total
