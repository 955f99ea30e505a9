"""Every Triton kernel of ours, compiled for a GPU that need not be there: its name, a line each.

python -m tests.compiling 9.0
"""

import sys
from unittest.mock import Mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from qa_lib.kernels import common, fp8, fused_norm, gelu, linear_cross_entropy, varlen_attention
from qa_lib.train.master_adamw import MasterAdamW


def call_all(capability: int) -> None:
    """Call every operator as a model of BERT's shape in half precision does, and update such weights."""
    tokens, width, inner, heads = 5632, 768, 3072, 12

    def drawn(*shape, dtype=torch.bfloat16 if capability >= 80 else torch.float16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    def whole(*shape):
        return drawn(*shape, dtype=torch.int32)

    hidden, bias, statistics = (
        drawn(tokens, width),
        drawn(width),
        drawn(2, tokens, dtype=torch.float32),
    )
    common.hash_dropout(hidden, whole(), 0.1)
    fused_norm._norm(hidden, bias, hidden, bias, bias, whole(), 0.1, 1e-12)
    rest = (bias, hidden, bias, whole(), statistics, 0.1, hidden.dtype)
    for other in (None, hidden):
        fused_norm._norm_backward(hidden, other, hidden, *rest)
    fused_norm._norm(hidden, bias, hidden, bias, bias, whole(), 0.1, 1e-12, keeps=True)
    fused_norm._norm_backward(hidden, hidden, None, *rest)
    for factor in (0.0, 2.0**16) if capability >= 89 else (0.0,):
        gelu._gelu_forward(drawn(tokens, inner), drawn(inner), factor)
        gelu._gelu_backward(drawn(tokens, inner), drawn(tokens, inner), drawn(inner), factor)
    if capability >= 80:
        for kind in (None, torch.float8_e4m3fn) if capability >= 89 else (None,):
            eighth = drawn(tokens, width, dtype=kind) if kind else None
            linear_cross_entropy._loss(
                hidden, drawn(50_304, width), drawn(tokens, dtype=torch.int64), eighth
            )
        if capability >= 89:
            fp8._weight_in_e4m3(drawn(width, inner))
            fp8.in_e4m3(hidden, fp8.ACTIVATION), fp8.in_e5m2(hidden, fp8.GRADIENT)
        qkv, sums, ends = (
            drawn(tokens, 3, heads, 64),
            drawn(heads, tokens, dtype=torch.float32),
            whole(33),
        )
        for added, causal in ((None, False), (drawn(3 * width), False), (drawn(3 * width), True)):
            varlen_attention._attention(qkv, added, ends, whole(), 384, 0.1, 0.125, causal)
            grad = drawn(tokens, heads, 64)
            options = (384, 0.1, 0.125, causal)
            varlen_attention._attention_backward(
                grad, qkv, added, grad, sums, ends, whole(), *options
            )
    for moments in (torch.float32, torch.bfloat16, torch.uint8):
        weights = [torch.nn.Parameter(drawn(*shape)) for shape in [(width, inner), (width,), (2,)]]
        MasterAdamW(weights, torch.empty((), device="cuda"), 1.0, moments)


def main() -> None:
    capability = int(sys.argv[1].replace(".", ""))
    gpu = Mock(**{f"get_current_{name}.return_value": 0 for name in ("device", "stream")})
    gpu.get_current_target.return_value = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(gpu)  # what it asks of a GPU before it compiles for it
    common._compile = lambda kernel, likes, _: common._warmup(kernel, likes)
    with FakeTensorMode():
        call_all(capability)
    for (_, (_, like), *_), future in common._compiling.items():
        program = future.result()
        assert f"sm_{capability}" in program.asm["ptx"] and program.asm["cubin"]
        print(program.metadata.name, like)
    print("found", common.found_compiled())


if __name__ == "__main__":
    main()
