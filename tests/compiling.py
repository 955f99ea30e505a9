"""Every Triton kernel of ours, compiled for a GPU that need not be there: its name, a line each.

python -m tests.compiling 9.0
"""

import sys
from collections.abc import Callable
from unittest.mock import Mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from qa_lib.kernels import (
    embedding_gradient,
    fp8,
    fused_norm,
    gelu,
    hash_dropout,
    linear_cross_entropy,
    peer_gradients,
    precompile,
    varlen_attention,
)
from qa_lib.train.master_adamw import MasterAdamW

TOKENS = 5632
WIDTH = 768
INNER = 3072
HEADS = 12
WORDS = 50_304


def call_all(capability: int) -> None:
    """Call every operator as a BERT in half precision does, and make its optimizers."""
    half = torch.bfloat16 if capability >= 80 else torch.float16
    call_embeddings(half)
    call_norms(half, has_fp8=capability >= 89)
    call_gelu(half, has_fp8=capability >= 89)
    if capability >= 80:
        call_loss(half, has_fp8=capability >= 89)
        call_attention(half, has_fp8=capability >= 89)
    if capability >= 89:
        call_fp8(half)
    exchange_gradients(half)
    make_optimizers(half)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def seed() -> torch.Tensor:
    return empty(dtype=torch.int32)


def call_embeddings(half: torch.dtype) -> None:
    ids = empty(TOKENS, dtype=torch.int64)
    for dtype in (half, torch.float32):
        grad = empty(TOKENS, WIDTH, dtype=dtype)
        for rows, padding in ((WORDS, 0), (512, None), (2, None), (1, None)):
            embedding_gradient._table_gradient(grad, ids, rows, padding)


def call_norms(half: torch.dtype, has_fp8: bool) -> None:
    hidden = empty(TOKENS, WIDTH, dtype=half)
    weight = empty(WIDTH, dtype=half)
    statistics = empty(2, TOKENS, dtype=torch.float32)
    hash_dropout.hash_dropout(hidden, seed(), 0.1)
    inputs = (hidden, weight, hidden, weight, weight, seed(), 0.1, 1e-12)
    rest = (weight, hidden, weight, seed(), statistics, 0.1, half)
    fused_norm._norm(*inputs)
    fused_norm._norm_backward(hidden, None, hidden, *rest)
    fused_norm._norm_backward(hidden, hidden, hidden, *rest)
    fused_norm._norm(*inputs, keeps=True)
    fused_norm._norm_backward(hidden, hidden, None, *rest)
    if has_fp8:
        fused_norm._norm(*inputs, copies=True)
        fused_norm._norm(*inputs, keeps=True, copies=True)
        for alone in (False, True):
            fused_norm._norm_backward(hidden, hidden, hidden, *rest, True, alone)
            fused_norm._norm_backward(hidden, hidden, None, *rest, True, alone)


def call_gelu(half: torch.dtype, has_fp8: bool) -> None:
    inner = empty(TOKENS, INNER, dtype=half)
    bias = empty(INNER, dtype=half)
    for factor in (0.0, 2.0**16) if has_fp8 else (0.0,):
        gelu._gelu_forward(inner, bias, factor)
        gelu._gelu_backward(inner, inner, bias, factor)
    if has_fp8:
        gelu._gelu_backward_turned(inner, inner, bias)


def call_loss(half: torch.dtype, has_fp8: bool) -> None:
    hidden = empty(TOKENS, WIDTH, dtype=half)
    weight = empty(WORDS, WIDTH, dtype=half)
    targets = empty(TOKENS, dtype=torch.int64)
    linear_cross_entropy._loss(hidden, weight, targets, None)
    if has_fp8:
        hidden8 = empty(TOKENS, WIDTH, dtype=torch.float8_e4m3fn)
        linear_cross_entropy._loss(hidden, weight, targets, hidden8)


def call_fp8(half: torch.dtype) -> None:
    hidden = empty(TOKENS, WIDTH, dtype=half)
    fp8._weights_in_e4m3([empty(WIDTH, INNER, dtype=half) for _ in range(12)])
    fp8.in_e4m3(hidden, fp8.ACTIVATION)
    fp8.in_e5m2(hidden, fp8.GRADIENT)
    fp8.turned(empty(TOKENS, WIDTH, dtype=torch.float8_e4m3fn))


def exchange_gradients(half: torch.dtype) -> None:
    slots = [empty(2, WIDTH * INNER, dtype=half) for _ in range(2)]
    peer_gradients.send_gradients([empty(WIDTH, INNER, dtype=half)] * 2, slots, rank=0)
    peer_gradients.mean_by_kernel(slots[0])
    numbers = [empty(2, dtype=torch.float32) for _ in range(2)]
    peer_gradients.spread(empty(dtype=torch.float32), numbers, rank=0)


def call_attention(half: torch.dtype, has_fp8: bool) -> None:
    qkv = empty(TOKENS, 3, HEADS, 64, dtype=half)
    output = empty(TOKENS, HEADS, 64, dtype=half)
    logsumexp = empty(HEADS, TOKENS, dtype=torch.float32)
    cu_seqlens = empty(33, dtype=torch.int32)
    some_bias = empty(3 * WIDTH, dtype=half)
    distance_bias = {
        "weight": empty(32, HEADS, dtype=half),
        "buckets": empty(257, dtype=torch.int32),
        "table": empty(HEADS, 257, dtype=torch.float32),
    }
    placeholder = fp8.placeholder_of(empty(TOKENS, 3 * WIDTH, dtype=half)) if has_fp8 else None
    cases = [
        (None, False, {}, None),
        (some_bias, False, {}, None),
        (some_bias, True, {}, None),
        (some_bias, False, distance_bias, None),
    ]
    if has_fp8:
        cases += [
            (some_bias, False, {}, placeholder),
            (some_bias, False, distance_bias, placeholder),
        ]
    for bias, causal, others, given in cases:
        options = {"longest": 384, "dropout": 0.1, "scale": 0.125, "causal": causal, **others}
        varlen_attention._attention(qkv, bias, cu_seqlens, seed(), **options, placeholder=given)
        for alone in (False, True) if given is not None else (False,):
            varlen_attention._attention_backward(
                output,
                qkv,
                bias,
                output,
                logsumexp,
                cu_seqlens,
                seed(),
                **options,
                copies=given is not None,
                copy_alone=alone,
            )


def make_optimizers(half: torch.dtype) -> None:
    """Make optimizers, which compile their kernels then."""
    shapes = [(WIDTH, INNER), (WIDTH,), (2,)]
    forms = [(moments, True) for moments in (torch.float32, torch.bfloat16, torch.uint8)]
    if half == torch.bfloat16:
        forms += [(moments, False) for moments in (torch.bfloat16, torch.uint8)]
    for moments, masters in forms:
        weights = [torch.nn.Parameter(empty(*shape, dtype=half)) for shape in shapes]
        MasterAdamW(
            weights,
            empty(dtype=torch.float32),
            weight_decay=0.0,
            max_norm=1.0,
            moments=moments,
            masters=masters,
        )


def compiled(capability: int, call: Callable[[], None]) -> list[tuple]:
    """Return the programs that `call` launches, each with what it was compiled for.

    `call` uses no GPU, and its tensors are fake.
    """
    gpu = Mock()
    gpu.get_current_device.return_value = 0
    gpu.get_current_stream.return_value = 0
    gpu.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(gpu)  # what it asks of a GPU before it compiles for it
    precompile._compile = lambda kernel, likes, _: (precompile._warmup(kernel, likes), likes)
    with FakeTensorMode():
        call()
    return [future.result() for future in precompile._unloaded]


def main() -> None:
    capability = int(sys.argv[1].replace(".", ""))
    for program, likes in compiled(capability, lambda: call_all(capability)):
        like = next(iter(likes.values()))
        assert f"sm_{capability}" in program.asm["ptx"] and program.asm["cubin"]
        print(program.metadata.name, like)
    print("found", precompile.found_compiled())


if __name__ == "__main__":
    main()
