"""A language model's head and its loss, without ever holding all logits (variant L-loss).

The logits of 32 windows of 1,024 tokens over GPT-2's 50,304 words are 3.3 GB in bf16, a fifth of the memory of a whole
step, and they are written and read several times: by the GEMM, by the softmax, by its gradient and by the two GEMMs of
the backward pass. But the loss is a number, and its gradient by the logits, softmax - one-hot, needs nothing from
outside but a factor. So the forward pass takes a part of the tokens at a time: it makes their logits, turns them into
their own gradients in place by one kernel of our own, and multiplies these at once by the weight and by the hidden
states. What is left are the gradients of both, and the memory of one part. The backward pass only scales them. Three
GEMMs, as before, and no logits to remember (Hsu et al. 2024, "Liger Kernel", have the same idea).

The weight's gradient is a sum over the parts. Of several it is summed in fp32, and each reads and writes that sum once:
in parts of 8,192 tokens instead of 4,096 the whole loss of such a batch took 0.7 ms less of 13.6 on an H100.

The kernel reads a token's logits twice. They come from memory once if the cache keeps them in between, so each load and
store says whether its data is wanted again. With 16 warps a row it then took 0.29 ms for 4,096 tokens instead of 0.40
on an H100, as long as a plain copy of the logits; with the gradient in 8 bits, too, 0.36 instead of 0.56.

In 8-bit floats (variant L-fp8-head; kernels/fp8.py says which and why) are the GEMMs that make the logits and the
gradient of the hidden states. That of the weight stays in bf16. The gradient of a hidden state is a sum over all words
of one large term, the true word's, and thousands of small ones, which fast sums of about 14 bits would drop. So this
GEMM adds up its partial sums in fp32.

On a CPU plain PyTorch takes its place. The kernel is for GPUs of compute capability 8.0 and newer.
"""

import torch
from torch.nn import functional as F

from qa_lib.kernels.common import custom_op, is_fake, jit, launch, tl
from qa_lib.kernels.fp8 import ACTIVATION, WEIGHT, in_e4m3, scaled_mm, weight_in_e4m3

FACTOR = 2.0**14  # gradients by logits, before the mean, lie within ±1, and e5m2 ends at 57,344
IGNORED = -100  # the target of a token that does not count
PART = 8192  # tokens at a time
ROW = {"BLOCK": 4096, "num_warps": 16}


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, in_fp8: bool = False
) -> torch.Tensor:
    """The mean cross-entropy of hidden @ weight.T, fp32: hidden [tokens, width], weight [words, width] of the same
    type, targets int64 [tokens], IGNORED where a token does not count. In fp8 both are bf16, and on a GPU."""
    if not hidden.is_cuda:
        return reference(hidden, weight, targets)
    if not in_fp8:
        return _loss(hidden, weight, targets)[0]
    # Converted here, where the compiler makes one kernel of it.
    return _loss(hidden, weight, targets, in_e4m3(hidden.detach(), ACTIVATION))[0]


def reference(hidden, weight, targets):
    """As linear_cross_entropy in plain PyTorch."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, ignore_index=IGNORED)


@custom_op("qa_lib::linear_cross_entropy")
def _loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, hidden8: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss, and its gradients by hidden and weight; the GEMMs that need not be in bf16 in 8-bit floats where
    hidden is given in e4m3, too."""
    tokens, words, in_fp8 = len(hidden), len(weight), hidden8 is not None
    options = {"WORDS": words, "IGNORED": IGNORED, "FACTOR": FACTOR if in_fp8 else 0.0, **ROW}
    total, losses = (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(tokens, dtype=torch.float32),
    )
    hidden_grad = torch.empty_like(hidden)
    grads8 = hidden.new_empty(min(PART, tokens), words, dtype=torch.float8_e5m2) if in_fp8 else None
    if is_fake(hidden):  # there is nothing to multiply, and the kernel is compiled
        launch(
            loss_kernel,
            (1,),
            hidden.new_empty(PART, words),
            grads8,
            targets,
            total,
            losses,
            **options,
        )
        return total, hidden_grad, torch.empty_like(weight)
    scale = 1 / (targets != IGNORED).sum().float()
    weight8, across8 = weight_in_e4m3(weight) if in_fp8 else (None, None)
    weight_grad = None
    for begin in range(0, tokens, PART):
        part = slice(begin, begin + PART)
        logits = (
            scaled_mm(hidden8[part], weight8.t(), ACTIVATION * WEIGHT)
            if in_fp8
            else hidden[part] @ weight.T
        )
        launch(
            loss_kernel,
            (len(logits),),
            logits,
            grads8,
            targets[part],
            scale,
            losses[part],
            **options,
        )
        if in_fp8:
            hidden_grad[part] = scaled_mm(
                grads8[: len(logits)], across8.t(), FACTOR * WEIGHT, factor=scale, fast=False
            )
        else:
            torch.mm(logits, weight, out=hidden_grad[part])
        if weight_grad is None:
            sums = torch.float32 if tokens > PART else weight.dtype
            weight_grad = torch.mm(logits.T, hidden[part], out_dtype=sums)
        else:
            torch.addmm(
                weight_grad, logits.T, hidden[part], out_dtype=torch.float32, out=weight_grad
            )
        del logits  # before the next part's are there
    return losses.sum() * scale, hidden_grad, weight_grad.to(weight.dtype)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*output[1:])


def _backward(ctx, grad, *_):
    return *(factor * grad for factor in ctx.saved_tensors), *(None,) * 2


_loss.register_autograd(_backward, setup_context=_setup_context)


@jit
def loss_kernel(
    logits, grads8, targets, scale, losses, WORDS: tl.constexpr, IGNORED: tl.constexpr, FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one token: its loss, and in place of its `logits` [tokens, WORDS] their gradient times `scale`; with a FACTOR,
    the gradient times that is in `grads8`, too. A row is read twice, the second time from the cache: first for its
    maximum and the sum of its exponentials (online softmax; Milakov and Gimelshein 2018), which takes four blocks of
    words at a time, so that a sum is scaled anew only once for them. Exponents are of 2, which the hardware has."""
    log2e = 1.4426950408889634
    row = tl.program_id(0)
    begin_of_row = row.to(tl.int64) * WORDS
    logits += begin_of_row
    target = tl.load(targets + row)
    counts = target != IGNORED
    # Before the sums over the row, for which all warps wait: later another warp may have written over it.
    chosen = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WORDS, 4 * BLOCK):
        x0, x1 = _read(logits, begin + lane, WORDS), _read(logits, begin + BLOCK + lane, WORDS)
        x2, x3 = (
            _read(logits, begin + 2 * BLOCK + lane, WORDS),
            _read(logits, begin + 3 * BLOCK + lane, WORDS),
        )
        higher = tl.maximum(most, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
        at = higher * log2e
        total = (
            total * tl.exp2(most * log2e - at) + tl.exp2(x0 * log2e - at) + tl.exp2(x1 * log2e - at)
        )
        total += tl.exp2(x2 * log2e - at) + tl.exp2(x3 * log2e - at)
        most = higher
    highest = tl.max(most, 0)
    logsum = highest * log2e + tl.log2(tl.sum(total * tl.exp2((most - highest) * log2e), 0))
    tl.store(losses + row, tl.where(counts, logsum / log2e - chosen, 0.0))
    factor, factor8 = tl.where(counts, tl.load(scale), 0.0), tl.where(counts, FACTOR, 0.0)
    for begin in range(0, WORDS, BLOCK):
        word = begin + lane
        x = tl.load(logits + word, mask=word < WORDS, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        grad = tl.exp2(x * log2e - logsum)
        if (target >= begin) & (target < begin + BLOCK):
            grad -= tl.where(word == target, 1.0, 0.0)
        at = logits + word
        tl.store(
            at,
            (grad * factor).to(at.dtype.element_ty),
            mask=word < WORDS,
            eviction_policy="evict_first",
        )
        if FACTOR != 0.0:
            at = grads8 + begin_of_row + word
            grad = (grad * factor8).to(at.dtype.element_ty)
            tl.store(at, grad, mask=word < WORDS, eviction_policy="evict_first")


@jit
def _read(logits, word, WORDS: tl.constexpr):
    """Logits that are wanted again, in fp32."""
    return tl.load(
        logits + word, mask=word < WORDS, other=-float("inf"), eviction_policy="evict_last"
    ).to(tl.float32)
