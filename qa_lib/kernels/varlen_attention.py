"""Varlen attention for short sequences, a Triton kernel (variants E-varlen and L-attention).

FlashAttention is made for sequences of thousands of tokens. The samples of a packed sequence have
180 on average, and there its kernel reaches a fifth of the GEMM rate: much of what its tiles of 128
tokens compute is padding, its dropout takes ten rounds of Philox, and its backward pass adds up the
gradients of queries in memory, in fp32, which more kernels clear, convert and copy. What is
different here:

- A program takes 64 tokens of one head of one segment, and nothing is computed across segments.
  Forward, it goes over the keys in blocks with a running maximum m and sum l (online softmax,
  Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), and keeps the logarithm of the sum
  for the backward pass.
- Backward, scores S are computed twice: once for dK and dV of the program's keys and values, over
  all queries, and once for dQ of its queries, over all keys. That is 7 products where
  FlashAttention takes 5, but nothing is added up by several programs: no atomic additions, no fp32
  gradients in memory, and equal results in every run. With a bias by distance it is otherwise, see
  below.
- For output O with gradient dO and the softmax P of the scores, dS = P * (dP - delta) with
  delta = rowsum(dO * O), and dropout in dP. delta is a small kernel of its own; within the other,
  every block of keys would compute it again.
- Query, key and value are one tensor, the fused projections' output, and so is their gradient:
  nothing is copied. Each program also leaves the partial sums of the gradient over its tokens:
  added up, they are the gradient of the projections' bias (partial_sums.py).
- Dropout's bits are a hash (hash_dropout.py) of seed, head, query and key, computed again in the
  backward pass. The hash of seed, head and query seeds that of the keys. Tensor cores leave to one
  thread the queries i and i + 8 of every 16, and the keys j and j + 8: these four scores share a
  hash of 32 bits. A rate is thus a multiple of 2^-8, like FlashAttention's, and 0.1 is 26/256.
- Causal attention, a decoder's, leaves out the blocks of keys after the last query of a program.
  Only the blocks on the diagonal are masked, in a loop of their own. Its windows of text are
  segments of one length (variant L-attention).
- A bias of the scores by distance (BiasByDistance; MPNet's, T5's) is a row of numbers for each
  head, 1 KB for 128 tokens in each direction, which stays in the first cache. A score reads one of
  them and adds it; farther scores read the last. Its gradient at a distance is the sum of dS along
  a diagonal, over all segments. Where there is no bias, none of this is in the program.
- With such a bias, dS is computed once and stored in the type of `qkv`, and the backward pass has
  three kernels beside delta's. The first computes dK, dV and dS (varlen_attention_backward), the
  second dQ = dS K (attention_query_backward), and the third the sums of dS by distance
  (attention_distance_sums). Two of the seven products go, and exponentials, biases and dropout's
  hash are computed once, not twice. Sums along diagonals take many instructions for each tile. The
  third kernel adds up the tiles of many segments first, and sums the diagonals of the total. Still
  nothing is added up by several programs.
- Stored, dS saves instructions and costs bytes. For 32 samples of SQuAD and 12 heads it is 26 MB,
  written once and read twice. In a trial on one H200 such a layer's backward pass took 163 µs,
  where one kernel took 208. Without a bias there are fewer instructions to save, and no sums:
  BERT's took 78 µs with two kernels and 76 with one, and keeps the one.
- Where the linear layers before and after it are in 8-bit floats (kernels/fp8.py), the forward
  kernel writes the e4m3 copy of the output, and the backward kernel the e5m2 copy of the gradient
  of `qkv`, each laid out like what it is a copy of. Where the layer before reads the copy alone,
  only the copy is written.
- Triton's GEMMs are supported from compute capability 8.0 on, in bf16 and fp16.
- Powers are of base 2, which the GPU has an instruction for; log2(e) is multiplied into the scale.

On a CPU the same mathematics in plain PyTorch takes the kernel's place, with the same dropout, and
is what the tests hold the kernel to.

Here are the functions that models call, and the operators that launch the kernels. Those are in
varlen_forward.py, varlen_backward.py and varlen_distance.py (the sums of dS by distance), each file
with the sizes of its tiles. varlen_device.py says how their tensors lie in memory and has what both
passes compute alike. varlen_reference.py has the plain PyTorch.
"""

from inspect import signature
from typing import NamedTuple

import torch

from qa_lib.kernels.common import LOG2_E, custom_op
from qa_lib.kernels.fp8 import ACTIVATION, E4M3_MAX, E5M2_MAX, GRADIENT
from qa_lib.kernels.partial_sums import sum_partials
from qa_lib.kernels.precompile import launch
from qa_lib.kernels.varlen_backward import (
    BACKWARD,
    DELTA,
    attention_query_backward,
    delta_kernel,
    varlen_attention_backward,
)
from qa_lib.kernels.varlen_distance import reach_of, sums_by_distance
from qa_lib.kernels.varlen_forward import CAUSAL_FORWARD, FORWARD, varlen_attention_forward
from qa_lib.kernels.varlen_reference import dropout_scale, reference, threshold_in_8_bits


class BiasByDistance(NamedTuple):
    """A bias of scores by the distance from query to key, in tokens; farther ones have the last."""

    # [buckets, heads]: the bias of each bucket of distances, whose number is a power of 2.
    weight: torch.Tensor
    # int32 [2 x reach + 1]: the bucket of each distance from -reach to reach.
    buckets: torch.Tensor
    # float32 [heads, 2 x reach + 1]: the bias of each distance, which is weight's, times log2(e),
    # for the kernel.
    table: torch.Tensor


def varlen_attention(
    qkv: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    longest: int,
    seed: torch.Tensor,
    dropout: float,
    scale: float,
    causal: bool = False,
    distance_bias: BiasByDistance | None = None,
) -> torch.Tensor:
    """Return attention [tokens, heads, width] within segments of at most `longest` tokens.

    `qkv` [tokens, 3, heads, width] is query, key and value, of fewer than 2^31 elements; width is a
    power of 2 and at least 16. Segments begin and end at `cu_seqlens`, int32 [segments + 1].
    `qkv_bias` [3 x heads x width], or None, is in `qkv` already, and gets its gradient here.
    `seed`, an int32 on the device, decides what is dropped out. `scale` multiplies the scores. If
    `causal`, a token attends to itself and those before it alone. `distance_bias` is added to the
    scaled scores, and its weight gets its gradient.
    """
    if not qkv.is_cuda:
        return reference(
            qkv,
            qkv_bias,
            cu_seqlens,
            seed=seed,
            dropout=dropout,
            scale=scale,
            causal=causal,
            distance_bias=distance_bias,
        )
    of_distances = (None, None, None) if distance_bias is None else distance_bias
    inputs = (qkv, qkv_bias, cu_seqlens, seed, longest, dropout, scale, causal, *of_distances)
    if torch.compiler.is_compiling():
        output, *_ = _attention(*inputs)
    else:
        placeholder = None  # so that nothing is copied
        grad8_alone = False
        output, _ = _Uncompiled.apply(*inputs, placeholder, grad8_alone)
    return output


def varlen_attention_and_copy(
    qkv: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    longest: int,
    seed: torch.Tensor,
    dropout: float,
    scale: float,
    placeholder: torch.Tensor,
    grad8_alone: bool,
    causal: bool = False,
    distance_bias: BiasByDistance | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what varlen_attention does, and its e4m3 copy, times ACTIVATION; None on a CPU.

    Call it where the linear layers before and after attention are in 8 bits, and nothing is
    compiled by PyTorch.
    `placeholder` came with `qkv` from the first of these, and gets the gradient of `qkv` in e5m2;
    with `grad8_alone` `qkv` itself gets none.
    """
    if not qkv.is_cuda:
        output = varlen_attention(
            qkv, qkv_bias, cu_seqlens, longest, seed, dropout, scale, causal, distance_bias
        )
        return output, None
    of_distances = (None, None, None) if distance_bias is None else distance_bias
    output, output8 = _Uncompiled.apply(
        qkv,
        qkv_bias,
        cu_seqlens,
        seed,
        longest,
        dropout,
        scale,
        causal,
        *of_distances,
        placeholder,
        grad8_alone,
    )
    return output, output8.view(torch.float8_e4m3fn)


class _Uncompiled(torch.autograd.Function):
    """Attention's output and its copy, without the operator around `_attention`.

    kernels/common.py says what that spares. A call has to give all of `_attention`'s arguments, in
    its order: for an operator PyTorch fills in the defaults of those that are left out, but not for
    a function like this, and `_setup_context` reads every one of them.
    """

    @staticmethod
    def forward(ctx, *inputs):
        output, logsumexp, output8 = _attention(*inputs)
        _setup_context(ctx, inputs, (output, logsumexp, output8))
        return output, output8

    @staticmethod
    def backward(ctx, grad, _):
        return _backward(ctx, grad, None, None)


@custom_op("qa_lib::varlen_attention")
def _attention(
    qkv: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    seed: torch.Tensor,
    longest: int,
    dropout: float,
    scale: float,
    causal: bool = False,
    weight: torch.Tensor | None = None,
    buckets: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    placeholder: torch.Tensor | None = None,
    grad8_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output [tokens, heads, width], logsumexp, fp32 [heads, tokens], and a copy.

    logsumexp is for each query the logarithm to base 2 of the sum of its exponentials. `weight`,
    `buckets` and `table` are a BiasByDistance. The copy is the output's in e4m3, as bytes, of which
    autograd knows that they have no gradient. It is empty without a `placeholder`, which gets the
    gradient of `qkv` in e5m2; with `grad8_alone` `qkv` itself gets none.
    """
    tokens, _, heads, width = qkv.shape
    output = qkv.new_empty(tokens, heads, width)
    logsumexp = qkv.new_empty(heads, tokens, dtype=torch.float32)
    copies = placeholder is not None
    output8 = qkv.new_empty(output.shape if copies else 0, dtype=torch.uint8)
    options = CAUSAL_FORWARD if causal else FORWARD
    blocks = -(-longest // options["QUERIES"])
    segments = len(cu_seqlens) - 1
    launch(
        varlen_attention_forward,
        (blocks, heads, segments),
        qkv=qkv.contiguous(),
        output=output,
        output8=output8.view(torch.float8_e4m3fn) if copies else None,
        logsumexp=logsumexp,
        cu_seqlens=cu_seqlens,
        seed=seed,
        table=table,
        tokens=tokens,
        scale_log2=scale * LOG2_E,
        threshold=threshold_in_8_bits(dropout),
        kept_scale=dropout_scale(dropout),
        HEADS=heads,
        WIDTH=width,
        DROPS=dropout > 0,
        CAUSAL=causal,
        REACH=reach_of(buckets),
        FACTOR=ACTIVATION if copies else 0.0,
        MAX=E4M3_MAX,
        **options,
    )
    return output, logsumexp, output8


@custom_op("qa_lib::varlen_attention_backward")
def _attention_backward(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seed: torch.Tensor,
    longest: int,
    dropout: float,
    scale: float,
    causal: bool = False,
    weight: torch.Tensor | None = None,
    buckets: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    copies: bool = False,
    copy_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `qkv`, of the bias in it and of the weight of a BiasByDistance.

    Those of what is None are empty. The fourth result is the e5m2 copy [tokens, 3 x heads x width]
    of the first. It is empty unless `copies`; with `copy_alone` only the copy is made, and the
    first is empty.
    """
    tokens, _, heads, width = qkv.shape
    blocks = -(-longest // BACKWARD["BLOCK"])
    segments = len(cu_seqlens) - 1
    qkv_grad = qkv.new_empty(0 if copy_alone else qkv.shape)
    qkv_grad8 = qkv.new_empty((tokens, 3 * heads * width) if copies else 0, dtype=torch.float8_e5m2)
    partials = qkv.new_empty(
        segments * blocks, 0 if qkv_bias is None else len(qkv_bias), dtype=torch.float32
    )
    span = blocks * BACKWARD["BLOCK"]
    ds = None if weight is None else qkv.new_empty(heads, tokens, span)
    grad = grad.contiguous()
    qkv = qkv.contiguous()
    delta = torch.empty_like(logsumexp)
    launch(
        delta_kernel,
        (-(-tokens // DELTA["TOKENS"]), heads),
        grad=grad,
        output=output.contiguous(),
        delta=delta,
        tokens=tokens,
        HEADS=heads,
        WIDTH=width,
        **DELTA,
    )
    # What both kernels take that may compute the gradients of queries.
    shared = {
        "qkv": qkv,
        "cu_seqlens": cu_seqlens,
        "qkv_grad": None if copy_alone else qkv_grad,
        "qkv_grad8": qkv_grad8 if copies else None,
        "ds": ds,
        "partials": partials,
        "tokens": tokens,
        "span": span,
        "scale": scale,
        "HEADS": heads,
        "WIDTH": width,
        "SUMS": qkv_bias is not None,
        "CAUSAL": causal,
        "FACTOR": GRADIENT if copies else 0.0,
        "MAX": E5M2_MAX,
        **BACKWARD,
    }
    launch(
        varlen_attention_backward,
        (blocks, heads, segments),
        grad=grad,
        delta=delta,
        logsumexp=logsumexp,
        seed=seed,
        table=table,
        threshold=threshold_in_8_bits(dropout),
        kept_scale=dropout_scale(dropout),
        DROPS=dropout > 0,
        REACH=reach_of(buckets),
        **shared,
    )
    weight_grad = qkv.new_empty(0)
    if weight is not None:
        launch(attention_query_backward, (blocks, heads, segments), **shared)
        weight_grad = sums_by_distance(ds, cu_seqlens, buckets, len(weight), causal, weight.dtype)
    bias_grad = qkv.new_empty(0)
    if qkv_bias is not None:
        bias_grad = sum_partials(partials, qkv_bias.dtype)
    return qkv_grad, bias_grad, weight_grad, qkv_grad8


# The names of `_attention`'s arguments, in the order in which autograd gives and takes what belongs
# to them: the arguments, whether each needs a gradient, and the gradients.
ARGUMENTS = tuple(signature(_attention).parameters)
# Those of the arguments that the backward pass takes as they are.
SAVED_TENSORS = ("qkv", "qkv_bias", "cu_seqlens", "seed", "weight", "buckets", "table")
SAVED_OPTIONS = ("longest", "dropout", "scale", "causal")


def _setup_context(ctx, inputs, output):
    arguments = dict(zip(ARGUMENTS, inputs, strict=True))
    attended, logsumexp, _ = output
    ctx.save_for_backward(attended, logsumexp, *(arguments[name] for name in SAVED_TENSORS))
    ctx.options = {name: arguments[name] for name in SAVED_OPTIONS}
    ctx.has_placeholder = arguments["placeholder"] is not None
    ctx.grad8_alone = arguments["grad8_alone"]
    # Otherwise logsumexp would get a gradient of zeros, by a kernel of its own.
    ctx.set_materialize_grads(False)


def _backward(ctx, output_grad, _, __):
    attended, logsumexp, *saved = ctx.saved_tensors
    tensors = dict(zip(SAVED_TENSORS, saved, strict=True))
    # An operator counts no arguments at the end that have their defaults, which train nothing.
    trains = dict.fromkeys(ARGUMENTS, False)
    trains.update(zip(ARGUMENTS, ctx.needs_input_grad, strict=False))
    if not trains["qkv_bias"]:
        tensors["qkv_bias"] = None
    qkv_grad, bias_grad, weight_grad, qkv_grad8 = _attention_backward(
        output_grad,
        output=attended,
        logsumexp=logsumexp,
        **tensors,
        **ctx.options,
        copies=ctx.has_placeholder,
        copy_alone=ctx.grad8_alone,
    )
    gradients = dict.fromkeys(ARGUMENTS)
    if not ctx.grad8_alone:
        gradients["qkv"] = qkv_grad
    if trains["qkv_bias"]:
        gradients["qkv_bias"] = bias_grad
    if trains["weight"]:
        gradients["weight"] = weight_grad
    if ctx.has_placeholder:
        gradients["placeholder"] = qkv_grad8
    return tuple(gradients.values())


_attention.operator.register_autograd(_backward, setup_context=_setup_context)
