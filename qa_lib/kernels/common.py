"""What several kernels need: compilation ahead of their first launch, dropout's random bits by a hash, and the sum of
what each program has summed.

Triton kernels of our own are compiled while the compiler is still at work on the model. Triton compiles a kernel at its
first launch, and has the C compiler make the function that launches it: a quarter to a whole second for each, one after
the other, and a step has a dozen. But long before that the compiler of the model calls every custom operator with fake
tensors, which have a shape and a type and no memory. The operator then runs as it always does, and `launch`, which
cannot launch anything there, compiles in a thread. Most of that work is done outside of Python, which the compiler of
the model keeps busy. This works on every GPU that the kernels are for.

Dropout's bits are a hash of the element's number; model/fused_blocks.py says why. The hash is here in PyTorch and as a
device function. Both forms give the same bits, so that a kernel can compute again in the backward pass what the forward
pass dropped, and so that tests can hold the kernels to plain PyTorch.

Partial-sum reduction is the last step of a gradient that is a sum over all tokens, as that of a bias is of its layer's
output gradient. PyTorch and its compiler read that gradient once more for it. The kernel that writes the gradient has
it in registers and can sum it there (varlen_attention.py, fused_norm.py, gelu.py): each program sums the tokens that it
has, and a small kernel adds up the programs' partial sums. No program adds to another's, so that results are equal in
every run. It is for GPUs of compute capability 7.5 and newer.
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
except (
    ImportError
):  # it comes with PyTorch's CUDA builds alone; elsewhere kernels are defined, and never launched
    tl = SimpleNamespace(constexpr=lambda value: value)

    def jit(function=None, **_):
        return function or jit


TILE = {"ROWS": 128, "COLUMNS": 8, "num_warps": 4}  # of sum_partials
DROPOUT = {"ELEMENTS": 1024, "num_warps": 4}
_threads = ThreadPoolExecutor(4, "precompile")
_lock = threading.Lock()
_compiling: dict[tuple, Future] = {}
_cache_hits: list[
    bool
] = []  # of each kernel that was compiled, whether an earlier process had compiled it


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
    tensor = next(
        t
        for a in arguments
        for t in (a if isinstance(a, tuple) else [a])
        if isinstance(t, torch.Tensor)
    )
    if is_fake(tensor):
        likes = tuple(tuple(map(_like, a)) if isinstance(a, tuple) else _like(a) for a in arguments)
        key = (id(kernel), likes, *options.items())
        if tensor.is_cuda and key not in _compiling:
            _compiling[key] = _threads.submit(_compile, kernel, likes, options, tensor.device)
        return
    # What failed there fails again here, and is told.
    wait([future for future in _compiling.values() if not future.done()])
    kernel[grid](*arguments, **options)


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
    mocks = [
        tuple(map(MockTensor.wrap_dtype, like)) if isinstance(like, tuple) else like
        for like in likes
    ]
    return kernel.warmup(*mocks, grid=(1,), **options)


def hash32(numbers: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """32 bits for each of some `numbers`, which two seeds make unrelated; all of them int32, of shapes that broadcast.

    The finalizer "lowbias32" (Wellons 2018), with the seed near its start.
    """
    # PyTorch's int32 wraps when it multiplies, and keeps the sign when it shifts, hence the masks.
    bits = ((numbers ^ ((numbers >> 16) & 0xFFFF)) + seed) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def threshold_of(p: float) -> int:
    """Below it 31 bits of a hash drop their element."""
    return int(p * 2**31)


def hash_dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout with rate `p` of a tensor of fewer than 2^31 elements."""
    if x.is_cuda and not torch.compiler.is_compiling():
        return _HashDropout.apply(
            x, seed, p
        )  # one kernel, where the compiler would make one of what follows
    bits = (
        hash32(torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape), seed)
        & 0x7FFFFFFF
    )
    return torch.where(bits >= threshold_of(p), x * (1 / (1 - p)), 0.0)


class _HashDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p, y = p, torch.empty_like(x, memory_format=torch.contiguous_format)
        grid = (-(-x.numel() // DROPOUT["ELEMENTS"]),)
        launch(
            dropout_kernel,
            grid,
            x.contiguous(),
            y,
            seed,
            x.numel(),
            threshold_of(p),
            1 / (1 - p),
            **DROPOUT,
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        return _HashDropout.apply(grad, *ctx.saved_tensors, ctx.p), None, None


@jit(do_not_specialize=["threshold"])
def dropout_kernel(x, y, seed, size, threshold, keeps, ELEMENTS: tl.constexpr):
    """ELEMENTS of a contiguous tensor of `size`, as hash_dropout has them; `keeps` is 1 / (1 - rate)."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * keeps
    keep = keep_mask(at, tl.load(seed).to(tl.uint32, bitcast=True), threshold)
    tl.store(y + at, tl.where(keep, value, 0.0).to(y.dtype.element_ty), mask=at < size)


@jit
def hash32_kernel(numbers, seed):
    """As hash32, in unsigned numbers."""
    bits = ((numbers ^ (numbers >> 16)) + seed) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit
def keep_mask(at, seed, threshold):
    """Which elements `at` these places in memory hash_dropout keeps."""
    return (hash32_kernel(at.to(tl.uint32), seed) & 0x7FFFFFFF).to(tl.int32) >= threshold


def sum_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over programs of fp32 [programs, ...] on a GPU, in this type."""
    total = partials.new_empty(partials.shape[1:], dtype=dtype)
    grid = (-(-total.numel() // TILE["COLUMNS"]),)
    launch(sum_partials_kernel, grid, partials, total, len(partials), WIDTH=total.numel(), **TILE)
    return total


@jit
def sum_partials_kernel(
    partials, total, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Of COLUMNS columns of `partials` [programs, WIDTH], over ROWS rows at a time: the `total` [WIDTH]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        program = first + tl.arange(0, ROWS)[:, None]
        found += tl.load(
            partials + program * WIDTH + column, mask=(program < programs) & in_width, other=0.0
        )
    tl.store(total + column, tl.sum(found, 0).to(total.dtype.element_ty), mask=in_width)
