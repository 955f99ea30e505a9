"""Triton kernels of our own are compiled while the compiler is still at work on the model.

Triton compiles a kernel at its first launch, and has the C compiler make the function that launches it: a quarter to a
whole second for each, one after the other, and a step has a dozen. But long before that the compiler of the model
calls every custom operator with fake tensors, which have a shape and a type and no memory. The operator then runs as
it always does, and `launch`, which cannot launch anything there, compiles in a thread. Most of that work is done
outside of Python, which the compiler of the model keeps busy. This works on every GPU that the kernels are for.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace

import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton.language as tl
    from triton import jit
except ImportError:  # it comes with PyTorch's CUDA builds alone; elsewhere kernels are defined, and never launched
    tl = SimpleNamespace(constexpr=lambda value: value)

    def jit(function=None, **_):
        return function or jit


_threads = ThreadPoolExecutor(4, "precompile")
_lock = threading.Lock()
_compiling: dict[tuple, Future] = {}
_cache_hits: list[bool] = []  # of each kernel that was compiled, whether an earlier process had compiled it


def custom_op(name: str) -> Callable:
    """Make a function that launches kernels a custom operator of that name, which the compiler does not look into. The
    function itself tells the compiler shapes and types."""

    def decorate(function):
        op = library.custom_op(name, function, mutates_args=())
        op.register_fake(function)
        return op

    return decorate


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape and a type and no memory."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Launch a Triton kernel, like `kernel[grid](*arguments, **options)`; among fake tensors, compile it soon. Tuples
    of tensors are allowed."""
    tensor = next(t for argument in arguments for t in _each(argument) if isinstance(t, torch.Tensor))
    if is_fake(tensor):
        likes = tuple(tuple(map(_like, a)) if isinstance(a, tuple) else _like(a) for a in arguments)
        key = (id(kernel), likes, *options.items())
        if tensor.is_cuda and key not in _compiling:
            _compiling[key] = _threads.submit(_compile, kernel, likes, options, tensor.device)
        return
    # What failed there fails again here, and is told.
    wait([future for future in _compiling.values() if not future.done()])
    kernel[grid](*arguments, **options)


def _each(argument):
    return argument if isinstance(argument, tuple) else (argument,)


def _like(argument):
    """What a kernel is compiled for: of a tensor its type."""
    return argument.dtype if isinstance(argument, torch.Tensor) else argument


def _compile(kernel, likes: tuple, options: dict, device: torch.device) -> None:
    from triton.runtime import driver

    torch.cuda.set_device(device)
    with _lock:
        driver.active.get_current_device()  # the first call makes the driver
    _warmup(kernel, likes, options).run  # noqa: B018  which loads it, and makes what launches it


def found_compiled() -> bool:
    """Whether an earlier process had compiled a kernel of ours that this one asked for."""
    return any(_cache_hits)


def _warmup(kernel, likes: tuple, options: dict):
    """The kernel compiled for arguments like these."""
    from triton import knobs
    from triton.runtime.jit import MockTensor

    knobs.compilation.listener = lambda *, cache_hit, **_: _cache_hits.append(cache_hit)
    mocks = [tuple(map(MockTensor.wrap_dtype, like)) if isinstance(like, tuple) else like for like in likes]
    return kernel.warmup(*mocks, grid=(1,), **options)
