"""What all kernels share: Triton, where it is installed, and making a function an operator."""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

try:
    import triton.language as tl
    from triton import jit, knobs
except ImportError:
    # Triton comes with PyTorch's CUDA builds alone. Elsewhere kernels are defined, never launched.
    tl = SimpleNamespace(constexpr=lambda value: value)
    knobs = None

    def jit(function=None, **_):
        return function or jit


# Whether kernels run in Triton's interpreter, which has neither the GPU's own instructions nor
# conversions to 8 bits that saturate.
INTERPRETED = tl.constexpr(knobs is not None and knobs.runtime.interpret)

LOG2_E = math.log2(math.e)  # GPUs have an instruction for powers of 2
KERNEL_LOG2_E = tl.constexpr(LOG2_E)  # the same, as kernels read it


def custom_op(name: str) -> Callable:
    """Make the decorated function, which launches kernels, a custom operator of that name.

    PyTorch's compiler does not look into it, and calls the function itself, on fake tensors, to
    learn the shapes and types that it returns. The operator is the decorated function's `operator`.
    A call goes around it where nothing needs it: PyTorch's way through an operator takes a CPU as
    long as the function with its launch does.
    """

    def decorate(function):
        operator = library.custom_op(name, function, mutates_args=())
        operator.register_fake(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if torch.compiler.is_compiling() or _is_watched():
                return operator(*args, **kwargs)
            return function(*args, **kwargs)

        call.operator = operator
        return call

    return decorate


def _is_watched() -> bool:
    """Return whether autograd records calls of operators, or a mode such as tracing sees them.

    Within a pass of an autograd.Function nothing is recorded.
    """
    return torch.is_grad_enabled() or is_in_torch_dispatch_mode()


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape and a type and no memory."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta
