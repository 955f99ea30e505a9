"""Attention for short segments by a Triton kernel of our own (row E-varlen).

FlashAttention is made for sequences of thousands of tokens. The features of a packed row have 180 on average, and there
its kernel reaches a fifth of the rate of matrix products: much of what its tiles of 128 tokens compute is padding, its
dropout takes ten rounds of Philox, and its backward pass adds up the gradients of queries in memory, in fp32, which
more kernels clear, convert and copy. What is different here:

- A program takes 64 tokens of one head of one segment, and nothing is computed across segments. Forward, it goes over
  the keys in blocks with a running maximum and sum (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et
  al. 2022), and keeps the logarithm of the sum for the backward pass.
- Backward, scores are computed twice: once for the gradients of the program's keys and values, over all queries, and
  once for those of its queries, over all keys. That is 7 products where FlashAttention takes 5, but nothing is added
  up by several programs: no atomic additions, no fp32 gradients in memory, and equal results in every run.
- For output O with gradient dO and shares P of the scores' softmax, the gradient of the scores is
  P * (dP - rowsum(dO * O)), with dropout in dP. The row sums are left to PyTorch, whose compiler makes one small kernel
  of them; within ours, every block of keys would compute them again.
- Query, key and value are one tensor, the fused projections' product, and so is their gradient: nothing is copied. Of
  the gradient each program also leaves the sums over its tokens: added up, they are that of the projections' bias
  (model/products.py).
- Dropout's bits are a hash (model/dropout.py) of seed, head, query and key, computed again in the backward pass. The
  hash of seed, head and query seeds that of the keys. Tensor cores leave to one thread the keys j and j + 8 of every
  16, and these two share a hash of 32 bits. A rate is thus a multiple of 2^-16.
- Triton's matrix products are supported from compute capability 8.0 on, in bf16 and fp16.
- Powers are of base 2, which the GPU has an instruction for; log2(e) is multiplied into the scale.

On a CPU the same mathematics in plain PyTorch takes the kernel's place, with the same dropout, and is what the tests
hold the kernel to.
"""

import math

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qa_lib.errors import UserError
from qa_lib.model.ahead import operator, start
from qa_lib.model.attention import attention_name, in_one, segment_of
from qa_lib.model.dropout import HashDropout, hashed
from qa_lib.model.encoders import encoder_of, layers_of
from qa_lib.model.products import BiasedProduct, added_up, linear_of, unchanged
from qa_lib.model.projections import FusedSelfAttention

NAME = attention_name("triton-varlen")
HALF = 2**16  # values of half a hash


def short(product, bias, segments, seed, dropout, scale):
    """Attention [tokens, heads, width] within the Segments of a `product` [tokens, 3, heads, width], which has fewer
    than 2^31 elements: query, key and value, whose width is a power of 2 and at least 16. `bias` [3 x heads x width],
    or None, is in the product already, and gets its gradient here. `seed`, an int32 on the device, decides what is
    dropped out."""
    if product.is_cuda:
        return _short(product, bias, segments.cu_seqlens, seed, max(segments.limits), dropout, scale)[0]
    return reference(product, bias, segments.cu_seqlens, seed, dropout, scale)


def reference(product, bias, ends, seed, dropout, scale):
    """As `short` in plain PyTorch, with all scores [heads, tokens, tokens] in memory; `ends` are cu_seqlens."""
    if bias is not None:
        product = unchanged(product, bias)
    query, key, value = product.permute(1, 2, 0, 3)
    segment = segment_of(ends, len(product))
    scores = (query @ key.mT * scale).masked_fill(segment[:, None] != segment, -torch.inf)
    shares = torch.softmax(scores, -1)
    if dropout:
        place = torch.arange(len(product), device=ends.device, dtype=torch.int32) - ends[segment]
        kept = _dropout_mask(place, product.shape[2], seed, dropout)
        shares = torch.where(kept, shares * _dropout_scale(dropout), 0.0)
    return (shares @ value).transpose(0, 1)


def _dropout_mask(place, heads, seed, dropout):
    """Which scores are kept [heads, tokens, tokens], for the keys' places in their segments, int32 [tokens]."""
    rows = rows_of(torch.arange(heads * len(place), device=place.device, dtype=torch.int32), seed)
    bits = hashed(place // 16 * 8 + place % 8, rows.view(heads, -1, 1))
    half = (bits >> (16 * (1 - place // 8 % 2))) & (HALF - 1)
    return half >= _threshold(dropout)


def rows_of(numbers, seed):
    """What seeds the hashes of a query's keys: half a hash of the query's number, since every thread has to compute it
    for few keys. The golden ratio (Knuth 1973) puts neighbours far apart."""
    bits = numbers * (0x9E3779B1 - 2**32) + seed
    return (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)


def _threshold(dropout: float) -> int:
    """Below it half a hash drops its score."""
    return round(dropout * HALF)


def _dropout_scale(dropout: float) -> float:
    """What scores that are kept are multiplied with."""
    return 1 / (1 - _threshold(dropout) / HALF)


@operator("qa_lib::short_attention")
def _short(
    product: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor, seed: torch.Tensor, longest: int,
    dropout: float, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, and for each head and query the logarithm to base 2 of the sum of its exponentials."""
    from qa_lib.model import short_kernels as kernels  # Triton comes with the CUDA builds of PyTorch alone

    tokens, _, heads, width = product.shape
    output, logsumexp = product.new_empty(tokens, heads, width), product.new_empty(heads, tokens, dtype=torch.float32)
    start(
        kernels.attention_short_forward, (-(-longest // kernels.FORWARD["QUERIES"]), heads, len(ends) - 1),
        product.contiguous(), output, logsumexp, ends, seed, tokens, scale * math.log2(math.e), _threshold(dropout),
        _dropout_scale(dropout), HEADS=heads, WIDTH=width, DROPS=dropout > 0, **kernels.FORWARD,
    )  # fmt: skip
    return output, logsumexp


@operator("qa_lib::short_attention_backward")
def _short_backward(
    grad: torch.Tensor, product: torch.Tensor, bias: torch.Tensor | None, row_sums: torch.Tensor,
    logsumexp: torch.Tensor, ends: torch.Tensor, seed: torch.Tensor, longest: int, dropout: float, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of `product` and of the bias in it; the latter is empty where there is none."""
    from qa_lib.model import short_kernels as kernels

    tokens, _, heads, width = product.shape
    blocks, segments = -(-longest // kernels.BACKWARD["BLOCK"]), len(ends) - 1
    product_grad = product.new_empty(product.shape)
    sums = product.new_empty(segments * blocks, 0 if bias is None else len(bias), dtype=torch.float32)
    start(
        kernels.attention_short_backward, (blocks, heads, segments), grad.contiguous(), product.contiguous(),
        row_sums.contiguous(), logsumexp, ends, seed, product_grad, sums, tokens, scale, _threshold(dropout),
        _dropout_scale(dropout), HEADS=heads, WIDTH=width, DROPS=dropout > 0, SUMS=bias is not None,
        **kernels.BACKWARD,
    )  # fmt: skip
    return product_grad, product.new_empty(0) if bias is None else added_up(sums, bias.dtype)


def _save_for_backward(ctx, inputs, output):
    product, bias, ends, seed, *ctx.options = inputs
    ctx.save_for_backward(product, bias, *output, ends, seed)


def _differentiate(ctx, grad, _):
    product, bias, output, logsumexp, ends, seed = ctx.saved_tensors
    row_sums = (grad.float() * output.float()).sum(-1).T.contiguous()
    needed = ctx.needs_input_grad[1]
    grads = _short_backward(grad, product, bias if needed else None, row_sums, logsumexp, ends, seed, *ctx.options)
    return grads[0], grads[1] if needed else None, *(None,) * 5


_short.register_autograd(_differentiate, setup_context=_save_for_backward)


def attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, segments=None, product=None, bias=None,
    **kwargs,
):  # fmt: skip
    """An attention function of transformers for modules whose `dropout` is a HashDropout, as those of attention.py are;
    separate projections, which come without their `product`, are copied into one. The `bias` is as `short` takes it."""
    if segments is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    product = in_one(query, key, value, product)
    return short(product, bias, segments, module.dropout.seed, dropout, scaling)[None], None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use_short_attention(model: nn.Module) -> None:
    """Give the attention of every layer a seed for its dropout, in place, which dropout.renew draws anew, and leave it
    the gradient of fused projections' bias. Raises UserError for heads of a width that the kernel does not take."""
    width = model.config.hidden_size // model.config.num_attention_heads
    if width < 16 or width & (width - 1):
        raise UserError(f"attention 'short' takes heads as wide as a power of 2, 16 or more, and not {width}")
    for layer in layers_of(model):
        owner = layer.get_submodule(encoder_of(model).self_attention)
        owner.dropout = HashDropout(owner.dropout.p)
        if isinstance(owner, FusedSelfAttention):
            owner.qkv = linear_of(BiasedProduct, owner.qkv)
