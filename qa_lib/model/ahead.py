"""Triton kernels of our own are compiled while the compiler is still at work on the model.

Triton compiles a kernel when it is first started, and has the C compiler make the function that starts it: a quarter to
a whole second for each, one after the other, and a step has a dozen. But long before that the compiler of the model
calls every operator with fake tensors, which have a shape and a type and no memory. An operator of ours does then what
it always does, but `start` compiles, in threads, where it cannot start anything. Most of that work is done outside of
Python, which the compiler of the model keeps busy. This works on every GPU that the kernels are for.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import library
from torch._subclasses.fake_tensor import FakeTensor

_threads = ThreadPoolExecutor(4, "kernels-ahead")
_lock = threading.Lock()
_compiling: dict[tuple, Future] = {}
_found: list[bool] = []  # of each kernel that was asked for, whether an earlier process had compiled it


def operator(name: str) -> Callable:
    """Make a function that starts kernels an operator of that name, which the compiler does not look into. The function
    itself tells the compiler shapes and types."""

    def decorate(function):
        made = library.custom_op(name, function, mutates_args=())
        made.register_fake(function)
        return made

    return decorate


def start(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """Start a Triton kernel, like `kernel[grid](*arguments, **options)`; among fake tensors, compile it soon. Tuples of
    tensors are allowed."""
    tensor = next(t for argument in arguments for t in _each(argument) if isinstance(t, torch.Tensor))
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
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
    _warmed(kernel, likes, options).run  # noqa: B018  which loads it, and makes what starts it


def found_compiled() -> bool:
    """Whether an earlier process had compiled a kernel of ours that this one asked for."""
    return any(_found)


def _warmed(kernel, likes: tuple, options: dict):
    """The kernel compiled for arguments like these."""
    from triton import knobs
    from triton.runtime.jit import MockTensor

    knobs.compilation.listener = lambda *, cache_hit, **_: _found.append(cache_hit)
    mocks = [tuple(map(MockTensor.wrap_dtype, like)) if isinstance(like, tuple) else like for like in likes]
    return kernel.warmup(*mocks, grid=(1,), **options)
