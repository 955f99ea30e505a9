"""A language model's head and its loss, without ever holding all logits (variant L-loss).

The logits of 32 windows of 1,024 tokens over GPT-2's 50,304 words are 3.3 GB in bf16, a fifth of
the memory of a whole step, and they are written and read several times: by the GEMM, by the
softmax, by its gradient and by the two GEMMs of the backward pass. But the loss is a number, and
its gradient by the logits, softmax - one-hot, needs nothing from outside but a factor. So the
forward pass takes a part of the tokens at a time: it makes their logits, turns them into their own
gradients in place by one kernel, and multiplies these at once by the weight and by the hidden
states. The gradients of both are left, and the memory of one part. The backward pass only scales
them. Three GEMMs, like before, and no logits to remember (Hsu et al. 2024, "Liger Kernel", have the
same idea).

The weight's gradient is a sum over the parts. Where there are several it is summed in fp32, and
each reads and writes that sum once: in parts of 8,192 tokens instead of 4,096 the whole loss of
such a batch took 0.7 ms less of 13.6 on an H100.

The kernel reads a token's logits twice. They come from memory once if the cache keeps them in
between, so each load and store says whether its data is wanted again. With 16 warps a row it then
took 0.29 ms for 4,096 tokens instead of 0.40 on an H100, as long as a plain copy of the logits;
with the gradient in 8 bits, too, 0.36 instead of 0.56.

In 8-bit floats (variant L-fp8-head; kernels/fp8.py says which and why) are the GEMMs that make the
logits and the gradient of the hidden states. That of the weight stays in bf16. The gradient of a
hidden state is a sum over all words of one large term, the true word's, and thousands of small
ones, which fast sums of about 14 bits would drop. So this GEMM adds up its partial sums in fp32.

On a CPU plain PyTorch takes its place. The kernel is for GPUs of compute capability 8.0 and newer.
"""

import torch
from torch.nn import functional as F

from qa_lib.kernels.common import KERNEL_LOG2_E, custom_op, is_fake, jit, tl
from qa_lib.kernels.fp8 import ACTIVATION, WEIGHT, in_e4m3, scaled_mm, weight_in_e4m3
from qa_lib.kernels.precompile import launch

# By which gradients by logits are multiplied in e5m2. Before the mean they lie within ±1, and e5m2
# ends at 57,344.
FACTOR = 2.0**14
IGNORED = -100  # the target of a token that does not count
PART = 8192  # tokens at a time
ROW = {"BLOCK": 4096, "num_warps": 16}


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, in_fp8: bool = False
) -> torch.Tensor:
    """Return the mean cross-entropy of the logits hidden @ weight.T, in fp32.

    `hidden` is [tokens, width] and `weight` [words, width], of one type, which is bf16 if `in_fp8`;
    `targets`, int64 [tokens], are IGNORED where a token does not count. On a CPU `in_fp8` changes
    nothing.
    """
    if not hidden.is_cuda:
        return reference(hidden, weight, targets)
    # Cast here and not in the operator, so that PyTorch's compiler makes one kernel of it.
    hidden8 = in_e4m3(hidden.detach(), ACTIVATION) if in_fp8 else None
    loss, _, _ = _loss(hidden, weight, targets, hidden8)
    return loss


def reference(hidden, weight, targets):
    """Return what linear_cross_entropy returns, by plain PyTorch."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED)


@custom_op("qa_lib::linear_cross_entropy")
def _loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    hidden8: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, and its gradients by hidden and weight.

    With `hidden8`, which is hidden in e4m3, the GEMMs that need no bf16 take 8-bit floats.
    """
    tokens = len(hidden)
    words = len(weight)
    in_fp8 = hidden8 is not None
    total = hidden.new_empty((), dtype=torch.float32)
    losses = hidden.new_empty(tokens, dtype=torch.float32)
    hidden_grad = torch.empty_like(hidden)
    grads8 = None
    if in_fp8:
        grads8 = hidden.new_empty(min(PART, tokens), words, dtype=torch.float8_e5m2)
    if is_fake(hidden):
        # There is nothing to multiply, and the kernel is compiled.
        logits = hidden.new_empty(PART, words)
        _losses_and_grads(logits, grads8, targets, total, losses)
        return total, hidden_grad, torch.empty_like(weight)

    scale = 1 / (targets != IGNORED).sum().float()
    if in_fp8:
        weight8, transposed8 = weight_in_e4m3(weight)
    weight_grad = None
    for begin in range(0, tokens, PART):
        part = slice(begin, begin + PART)
        if in_fp8:
            logits = scaled_mm(hidden8[part], weight8.t(), ACTIVATION * WEIGHT)
        else:
            logits = hidden[part] @ weight.T
        _losses_and_grads(logits, grads8, targets[part], scale, losses[part])
        logit_grads = logits  # the kernel has written them there

        if in_fp8:
            hidden_grad[part] = scaled_mm(
                grads8[: len(logits)],
                transposed8.t(),
                FACTOR * WEIGHT,
                factor=scale,
                fast=False,
            )
        else:
            torch.mm(logit_grads, weight, out=hidden_grad[part])

        if weight_grad is None:
            dtype = torch.float32 if tokens > PART else weight.dtype
            weight_grad = torch.mm(logit_grads.T, hidden[part], out_dtype=dtype)
        else:
            torch.addmm(
                weight_grad,
                logit_grads.T,
                hidden[part],
                out_dtype=torch.float32,
                out=weight_grad,
            )
        del logits, logit_grads  # before the next part's are there
    return losses.sum() * scale, hidden_grad, weight_grad.to(weight.dtype)


def _losses_and_grads(logits, grads8, targets, scale, losses) -> None:
    """Run the kernel on some tokens: their losses, and gradients in place of their logits."""
    launch(
        loss_kernel,
        (len(logits),),
        logits=logits,
        grads8=grads8,
        targets=targets,
        scale=scale,
        losses=losses,
        WORDS=logits.shape[1],
        IGNORED=IGNORED,
        FACTOR=0.0 if grads8 is None else FACTOR,
        **ROW,
    )


def _setup_context(ctx, inputs, output):
    _, hidden_grad, weight_grad = output
    ctx.save_for_backward(hidden_grad, weight_grad)


def _backward(ctx, grad, *_):
    hidden_grad, weight_grad = ctx.saved_tensors
    return hidden_grad * grad, weight_grad * grad, None, None


_loss.operator.register_autograd(_backward, setup_context=_setup_context)


@jit
def loss_kernel(
    logits,
    grads8,
    targets,
    scale,
    losses,
    WORDS: tl.constexpr,
    IGNORED: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one token's loss, and write over its `logits` [tokens, WORDS] with their gradient.

    The gradient is multiplied by `scale`. With a FACTOR, the gradient times that (and not times
    `scale`) goes into `grads8`, too.

    A row is read twice, the second time from the cache: first for its maximum and the sum of its
    exponentials (online softmax; Milakov and Gimelshein 2018), which takes four blocks of words at
    a time, so that a sum is scaled anew only once for them. Exponents are of 2, for which the GPU
    has an instruction.
    """
    log2e = KERNEL_LOG2_E
    row = tl.program_id(0)
    begin_of_row = row.to(tl.int64) * WORDS
    logits += begin_of_row
    target = tl.load(targets + row)
    counts = target != IGNORED
    # Read before the sums over the row, for which all warps wait: later another warp may have
    # written over it.
    chosen = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WORDS, 4 * BLOCK):
        x0 = _read(logits, begin + lane, WORDS)
        x1 = _read(logits, begin + BLOCK + lane, WORDS)
        x2 = _read(logits, begin + 2 * BLOCK + lane, WORDS)
        x3 = _read(logits, begin + 3 * BLOCK + lane, WORDS)
        higher = tl.maximum(most, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
        at = higher * log2e
        total = total * tl.exp2(most * log2e - at)
        total = total + tl.exp2(x0 * log2e - at) + tl.exp2(x1 * log2e - at)
        total += tl.exp2(x2 * log2e - at) + tl.exp2(x3 * log2e - at)
        most = higher
    highest = tl.max(most, 0)
    logsum = highest * log2e + tl.log2(tl.sum(total * tl.exp2((most - highest) * log2e), 0))
    tl.store(losses + row, tl.where(counts, logsum / log2e - chosen, 0.0))
    factor = tl.where(counts, tl.load(scale), 0.0)
    factor8 = tl.where(counts, FACTOR, 0.0)
    for begin in range(0, WORDS, BLOCK):
        word = begin + lane
        inside = word < WORDS
        x = tl.load(logits + word, mask=inside, other=0.0, eviction_policy="evict_first")
        grad = tl.exp2(x.to(tl.float32) * log2e - logsum)
        if (target >= begin) & (target < begin + BLOCK):
            grad -= tl.where(word == target, 1.0, 0.0)
        scaled = (grad * factor).to(logits.dtype.element_ty)
        tl.store(logits + word, scaled, mask=inside, eviction_policy="evict_first")
        if FACTOR != 0.0:
            grads8_at = grads8 + begin_of_row + word
            grad8 = (grad * factor8).to(grads8.dtype.element_ty)
            tl.store(grads8_at, grad8, mask=inside, eviction_policy="evict_first")


@jit
def _read(logits, word, WORDS: tl.constexpr):
    """Return logits in fp32, and have the cache keep them for the second time."""
    inside = word < WORDS
    x = tl.load(logits + word, mask=inside, other=-float("inf"), eviction_policy="evict_last")
    return x.to(tl.float32)
