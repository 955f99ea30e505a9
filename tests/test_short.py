"""Attention for short segments: the kernel against plain PyTorch in float64, dropout and gradients included.

The kernels run on a GPU, or in Triton's interpreter where it is installed without one (conftest.py asks for it).
"""

import dataclasses
from importlib.util import find_spec

import pytest
import torch

from qa_lib.model import short
from qa_lib.model.attention import KERNELS, Segments
from qa_lib.model.build import build_model
from qa_lib.model.dropout import HashDropout, renew
from qa_lib.model.encoders import ENCODERS
from qa_lib.run.plan import plan
from qa_lib.spec import Machine
from tests.tiny import checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.3
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")
# One token, none, an odd number, a whole tile, one more, and two tokens of padding.
LENGTHS = [1, 0, 37, 64, 65, 2]


def drawn(lengths=LENGTHS, heads=2, width=16, dtype=torch.float32):
    """A product and the gradient of the attention's output, where segments end, and a seed."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    product, grad = torch.randn(tokens, 3, heads, width), torch.randn(tokens, heads, width)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seed = torch.tensor(-1234567, dtype=torch.int32)
    return product.to(DEVICE, dtype), grad.to(DEVICE, dtype), ends.to(DEVICE), seed.to(DEVICE)


def with_gradient(attention, product, grad):
    """What `attention` makes of a product, and the product's gradient."""
    product = product.detach().requires_grad_()
    output = attention(product)
    return output.detach(), torch.autograd.grad(output, product, grad)[0]


def expected(product, grad, ends, seed, dropout):
    return with_gradient(lambda p: short.reference(p, ends, seed, dropout, SCALE), product.double(), grad.double())


def by_kernel(product, grad, ends, seed, dropout, longest=None):
    longest = longest or int(ends.diff().max())
    return with_gradient(lambda p: short._short(p, ends, seed, longest, dropout, SCALE)[0], product, grad)


def assert_close(found, wanted, error):
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).norm() < error * other.norm()


@needs_triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("lengths", [LENGTHS, [130, 3], [1]], ids=str)
def test_the_kernel_is_the_reference(lengths, dropout):
    inputs = drawn(lengths)
    assert_close(by_kernel(*inputs, dropout), expected(*inputs, dropout), 1e-5)
