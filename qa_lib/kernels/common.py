"""What kernels share: compilation ahead, dropout by a hash, many tensors in a call, partial sums.

Compilation ahead. Triton compiles a kernel at its first launch, and has the C compiler make the
function that launches it. Each kernel takes a quarter to a whole second, one after the other, and a
step has a dozen. But long before that, PyTorch's compiler calls every custom operator with fake
tensors, which have a shape and a type and no memory. The operator then runs as it always does, and
`launch`, which cannot launch anything there, compiles the kernel in a thread. Most of that work is
done outside of Python, so that it goes on beside PyTorch's compiler, which is in Python. This works
on every GPU that the kernels are for.

Dropout. Its random bits are a hash of the element's number; model/fused_blocks.py says why. The
hash is here in PyTorch and as a device function. Both give the same bits, so that a kernel can
compute again in the backward pass what the forward pass dropped, and so that tests can hold the
kernels to plain PyTorch.

Many tensors in a call. What is done to every parameter of a model takes one launch for
TENSORS_PER_CALL of them, which come as tuples of pointers. Each of the launch's programs works on a
block of elements of one tensor, and finds out which (`locate`).

Partial sums. The gradient of a bias is a sum over all tokens of the gradient of its layer's output.
PyTorch and its compiler read that gradient once more to sum it. The kernel that writes the gradient
has it in registers and can sum it there (varlen_attention.py, fused_norm.py, gelu.py): each program
sums the tokens that it has, and a small kernel adds up the programs' sums. No program adds to
another's, so that results are equal in every run. It is for GPUs of compute capability 7.5 and
newer.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

# Kernels read 16 bytes at a time where sizes and beginnings are multiples of so many elements.
ALIGN = 16
TENSORS_PER_CALL = 16  # at most, where a kernel takes many
SUM_PARTIALS = {"ROWS": 128, "COLUMNS": 8, "num_warps": 4}  # a program's tile, and its warps
DROPOUT = {"ELEMENTS": 1024, "num_warps": 4}

_threads = ThreadPoolExecutor(4, "precompile")
_driver_lock = threading.Lock()  # held while Triton's driver is made
_loading_lock = threading.Lock()  # held while programs are loaded
# The kernels that were asked for, each with what it is compiled for.
_asked_for: set[tuple] = set()
# Those of them that are not loaded yet.
_unloaded: list[Future] = []
# For each kernel that was compiled, whether an earlier process had compiled it.
_cache_hits: list[bool] = []


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


def launch(kernel, grid: tuple[int, ...], /, **arguments) -> None:
    """Launch a Triton kernel, as `kernel[grid](**arguments)` does; compile it for fake tensors.

    `arguments` are the kernel's, by name, and Triton's own, such as `num_warps`. Tensors may come
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
    from triton.runtime.jit import MockTensor

    def mock(like):
        return tuple(map(mock, like)) if isinstance(like, tuple) else MockTensor.wrap_dtype(like)

    # Triton calls it once for each kernel that is compiled, or found in its cache on the disk.
    knobs.compilation.listener = lambda *, cache_hit, **_: _cache_hits.append(cache_hit)
    mocks = {name: mock(like) for name, like in likes.items()}
    return kernel.warmup(grid=(1,), **mocks)


def hash32(numbers: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits, as int32, for each of some `numbers`; two seeds give unrelated bits.

    Numbers and seed are int32, and their shapes broadcast. The hash is the finalizer "lowbias32"
    (Wellons 2018), with the seed added near its start.
    """
    # PyTorch's int32 wraps when it multiplies, and keeps the sign when it shifts, hence the masks.
    bits = ((numbers ^ ((numbers >> 16) & 0xFFFF)) + seed) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def threshold_of(p: float) -> int:
    """Return the number below which 31 bits of a hash drop their element, at dropout rate `p`."""
    return int(p * 2**31)


def hash_dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Return `x` after dropout with rate `p`; `x` has fewer than 2^31 elements, `seed` is int32."""
    if x.is_cuda and not torch.compiler.is_compiling():
        return _HashDropout.apply(x, seed, p)
    # PyTorch's compiler makes one kernel of what follows; on a CPU it runs as it is.
    numbers = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
    bits = hash32(numbers, seed) & 0x7FFFFFFF
    return torch.where(bits >= threshold_of(p), x * (1 / (1 - p)), 0.0)


class _HashDropout(torch.autograd.Function):
    """`hash_dropout` by one kernel, which drops the gradient by the same bits."""

    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        grid = (-(-x.numel() // DROPOUT["ELEMENTS"]),)
        launch(
            dropout_kernel,
            grid,
            x=x.contiguous(),
            y=y,
            seed=seed,
            size=x.numel(),
            threshold=threshold_of(p),
            kept_scale=1 / (1 - p),
            **DROPOUT,
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        (seed,) = ctx.saved_tensors
        return _HashDropout.apply(grad, seed, ctx.p), None, None


@jit(do_not_specialize=["threshold"])
def dropout_kernel(x, y, seed, size, threshold, kept_scale, ELEMENTS: tl.constexpr):
    """Drop out ELEMENTS of a contiguous `x` of `size` elements into `y`, as hash_dropout does.

    Kept elements are multiplied by `kept_scale`, which is 1 / (1 - rate).
    """
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * kept_scale
    keep = keep_mask(at, tl.load(seed).to(tl.uint32, bitcast=True), threshold)
    tl.store(y + at, tl.where(keep, value, 0.0).to(y.dtype.element_ty), mask=at < size)


def largest_first(row: tuple) -> int:
    """Return the key by which rows of `in_calls` are sorted from the largest tensor down."""
    return -row[0].numel()


def in_calls(
    *columns: list, order: Callable[[tuple], int] = largest_first
) -> Iterator[tuple[tuple[tuple, ...], tuple[int, ...]]]:
    """Divide many tensors, and what belongs to each, among the calls of a kernel.

    `columns` are lists of equal length. The first has the tensors; items at one place of all lists
    belong together and make a row. Yields, for each call, a tuple with a tuple of items for each
    column, and the number of elements of each of the call's tensors. A call has TENSORS_PER_CALL
    rows, and the last one what is left.

    Rows are sorted by the key `order`. One tensor whose size is no multiple of ALIGN slows its
    whole call, so that these come after all others.
    """

    def key(row):
        is_unaligned = row[0].numel() % ALIGN > 0
        return is_unaligned, order(row)

    rows = sorted(zip(*columns, strict=True), key=key)
    for begin in range(0, len(rows), TENSORS_PER_CALL):
        rows_of_call = rows[begin : begin + TENSORS_PER_CALL]
        sizes = tuple(row[0].numel() for row in rows_of_call)
        yield tuple(zip(*rows_of_call, strict=True)), sizes


def with_sums(
    all_calls: Sequence[tuple[tuple, tuple[int, ...]]], block: int, device: torch.device
) -> tuple[torch.Tensor, list[tuple[tuple, tuple[int, ...], torch.Tensor]]]:
    """Return room for the sum of each program of some calls, and the calls with their room.

    `all_calls` are those of `in_calls`, and a program takes `block` elements of one tensor. The
    room is one fp32 tensor [programs of all calls], not yet written. Each call comes back with its
    part of it, a view [programs of the call], as a third item.
    """
    programs = [sum(-(-size // block) for size in sizes) for _, sizes in all_calls]
    sums = torch.empty(sum(programs), dtype=torch.float32, device=device)
    parts = sums.split(programs)
    return sums, [(*call, part) for call, part in zip(all_calls, parts, strict=True)]


@jit
def locate(sizes, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return which BLOCK elements of which of COUNT tensors this program works on.

    These are the number of the tensor, the number of the block in it, the places of the block's
    elements in the tensor, and whether each lies in it. `sizes` has the elements of each tensor.
    The programs of the first tensor come before those of the second.
    """
    program = tl.program_id(0)
    number = 0
    begin = 0
    size = sizes[0]
    blocks = tl.cdiv(sizes[0], BLOCK)
    for other in tl.static_range(1, COUNT):
        if program >= blocks:
            number = other
            begin = blocks
            size = sizes[other]
        blocks += tl.cdiv(sizes[other], BLOCK)
    block = program - begin
    element = block * BLOCK + tl.arange(0, BLOCK)
    return number, block, element, element < size


@jit
def chosen(pointers, number, COUNT: tl.constexpr):
    """Return `pointers[number]` for a number that is known only when the kernel runs.

    Triton indexes a tuple by what it knows when it compiles.
    """
    pointer = pointers[0]
    for other in tl.static_range(1, COUNT):
        if number == other:
            pointer = pointers[other]
    return pointer


@jit
def hash32_kernel(numbers, seed):
    """Return the bits of `hash32` for unsigned numbers."""
    bits = ((numbers ^ (numbers >> 16)) + seed) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit
def keep_mask(at, seed, threshold):
    """Return which elements hash_dropout keeps, of those with the numbers `at` in their tensor."""
    return (hash32_kernel(at.to(tl.uint32), seed) & 0x7FFFFFFF).to(tl.int32) >= threshold


def sum_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum over programs of fp32 `partials` [programs, ...] on a GPU, in type `dtype`."""
    total = partials.new_empty(partials.shape[1:], dtype=dtype)
    grid = (-(-total.numel() // SUM_PARTIALS["COLUMNS"]),)
    launch(
        sum_partials_kernel,
        grid,
        partials=partials,
        total=total,
        programs=len(partials),
        WIDTH=total.numel(),
        **SUM_PARTIALS,
    )
    return total


@jit
def sum_partials_kernel(
    partials,
    total,
    programs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum COLUMNS of the columns of `partials` [programs, WIDTH] into `total` [WIDTH]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        program = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(
            partials + program * WIDTH + column, mask=(program < programs) & in_width, other=0.0
        )
    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty), mask=in_width)
