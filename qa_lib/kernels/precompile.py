"""Launching a kernel, and compiling it long before it is launched.

Triton compiles a kernel at its first launch, and has the C compiler make the function that launches
it. Each kernel takes a quarter to a whole second, one after the other, and a step has a dozen. But
long before that, PyTorch's compiler calls every custom operator with fake tensors, which have a
shape and a type and no memory. The operator then runs as it always does, and `launch`, which cannot
launch anything there, compiles the kernel in a thread. Most of that work is done outside of Python,
so that it goes on beside PyTorch's compiler, which is in Python. This works on every GPU that the
kernels are for.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from qa_lib.kernels.common import is_fake

_threads = ThreadPoolExecutor(4, "precompile")
_driver_lock = threading.Lock()  # held while Triton's driver is made
_loading_lock = threading.Lock()  # held while programs are loaded
# The kernels that were asked for, each with what it is compiled for.
_asked_for: set[tuple] = set()
# Those of them that are not loaded yet.
_unloaded: list[Future] = []
# For each kernel that was compiled, whether an earlier process had compiled it.
_cache_hits: list[bool] = []


def launch(kernel, grid: tuple[int, ...], /, **arguments) -> None:
    """Launch a Triton kernel, as `kernel[grid](**arguments)` does; compile it for fake tensors.

    `arguments` are the kernel's, by name, and Triton's own, such as num_warps. Tensors may come
    in tuples. Fake tensors return at once, while a thread compiles.
    """
    tensor = next(_tensors(arguments.values()))
    if is_fake(tensor):
        if tensor.is_cuda:
            _compile_in_thread(kernel, arguments, tensor.device)
        return
    _load_compiled()
    kernel[grid](**arguments)


def _tensors(arguments: Iterable) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, those in tuples too."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


def _compile_in_thread(kernel, arguments: dict, device: torch.device) -> None:
    """Begin to compile a kernel for arguments like these, unless that was begun before."""
    likes = {name: _like(argument) for name, argument in arguments.items()}
    key = (id(kernel), *likes.items())
    if key not in _asked_for:
        _asked_for.add(key)
        _unloaded.append(_threads.submit(_compile, kernel, likes, device))


def _like(argument):
    """Return what a kernel is compiled for: a tensor's type, and every other argument itself."""
    if isinstance(argument, tuple):
        return tuple(_like(item) for item in argument)
    return argument.dtype if isinstance(argument, torch.Tensor) else argument


def _compile(kernel, likes: dict, device: torch.device):
    """Compile a kernel in this thread, and its launcher; return the program, which is not loaded.

    The launcher is a module in C, for which Triton calls the C compiler. It stays in Triton's cache
    on the disk, and what is loaded of it here is dropped (see _load_compiled).
    """
    from triton.runtime import driver

    torch.cuda.set_device(device)
    with _driver_lock:
        driver.active.get_current_device()  # the first call makes the driver
    program = _warmup(kernel, likes)
    driver.active.launcher_cls(program.src, program.metadata)
    return program


def _load_compiled() -> None:
    """Wait for the threads, and load the programs that they compiled, one after the other.

    Up to Triton 3.6 the launchers' modules have one name. Where CPython loads such a module again
    it fills the module object that has the name now, be it another launcher's: two threads at once
    would take each other's launching function.
    """
    if not _unloaded:
        return
    with _loading_lock:
        wait(_unloaded)
        for future in _unloaded:
            # The launch meets a compilation's error again, and raises it.
            if future.exception() is None:
                future.result().run  # noqa: B018  reading it loads the program
        _unloaded.clear()


def found_compiled() -> bool:
    """Return whether an earlier process had compiled one of the kernels that this one asked for."""
    return any(_cache_hits)


def _warmup(kernel, likes: dict):
    """Return the kernel compiled for arguments like these (see `_like`)."""
    from triton import knobs
    from triton.runtime.jit import MockTensor

    def mock(like):
        return tuple(map(mock, like)) if isinstance(like, tuple) else MockTensor.wrap_dtype(like)

    # Triton calls it once for each kernel that is compiled, or found in its cache on the disk.
    knobs.compilation.listener = lambda *, cache_hit, **_: _cache_hits.append(cache_hit)
    mocks = {name: mock(like) for name, like in likes.items()}
    return kernel.warmup(grid=(1,), **mocks)
