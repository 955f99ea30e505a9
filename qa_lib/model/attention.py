"""Attention within the segments of a packed sequence, by whichever kernel the GPU has.

A packed sequence holds many samples, and a token must attend to its own sample's tokens alone. A
mask over the whole sequence would do that and cost as much as attention over all of it: quadratic
in its length. FlashAttention (Dao et al. 2022, 2023) is told where segments end, computes nothing
across them, and never writes the scores to memory: variant E-packed. A T4 lacks it and has
PyTorch's memory-efficient kernel (Rabe and Staats 2021), for which packed sequences have a place of
fixed length for each sample: variants E-packed-efficient and E-t4. A CPU takes the mask. A kernel
of our own for short segments is in kernels/varlen_attention.py, variant E-varlen. The kernels of
padded batches, eager in A1 and SDPA in A2, are transformers' and PyTorch's.

Kernels here take query, key and value [tokens, heads, width], `Segments`, dropout and the scale of
the scores; those for fused projections take the three as one tensor [tokens, 3, heads, width].
ModernBERT's local layers have a `window` as well: a token attends to so many tokens on either side
of it, in its segment. They are registered with transformers.

**Query, key and value as one linear layer of three times the width** (variants E-qkv and E-t4).
Self-attention (Vaswani et al. 2017) multiplies the same hidden states by three matrices. Three
GEMMs of width 768 leave a large GPU partly idle: each has few tiles to spread over its
multiprocessors, each is a launch, and each reads the hidden states anew. One GEMM with the three
matrices side by side gives the same numbers from one launch. Training changes only in the order of
rounding. A checkpoint must look like any other, so that the matrices are taken apart again before
it is saved. It works on every GPU and on a CPU.
"""

from itertools import groupby
from typing import NamedTuple

import torch
from torch import library, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

from qa_lib.errors import UserError
from qa_lib.kernels.fp8 import fp8_linear, fp8_linear_and_placeholder
from qa_lib.kernels.varlen_attention import (
    RelativeBias,
    varlen_attention,
    varlen_attention_and_copy,
)
from qa_lib.kernels.varlen_reference import attach_bias_grad, relative_scores, segment_of
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.model.fused_blocks import (
    HashDropout,
    hash_dropout_for,
    leave_copy,
    take_copy,
    to_float8,
)
from qa_lib.spec.rules import unfit_heads

# PyTorch's memory-efficient kernel rounds the number of logsumexp's entries for a segment up to a
# multiple of the block size of its backward pass (kAlignLSE in PyTorch's sources).
LOGSUMEXP_ALIGN = 32


class Segments(NamedTuple):
    """Where the samples of a packed sequence lie."""

    # int32 [segments + 1]: where each segment begins and the last one ends.
    cu_seqlens: torch.Tensor
    # At most so many tokens in each segment, the same for every packed sequence of a run. With a
    # bias, exactly so many.
    limits: list[int]
    # float32 [tokens], -inf where a segment is padded; for the kernel that wants that.
    bias: torch.Tensor | None = None
    # The bias of scores by distance, in a model that has one.
    relative: RelativeBias | None = None


def flash(query, key, value, segments, dropout, scale, window=None):
    """Attend by FlashAttention, PyTorch's own op, for sm_80 and newer; fp16 or bf16."""
    longest = max(segments.limits)
    outputs = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q=segments.cu_seqlens,
        cum_seq_k=segments.cu_seqlens,
        max_q=longest,
        max_k=longest,
        dropout_p=dropout,
        is_causal=False,
        return_debug_mask=False,
        scale=scale,
        window_size_left=window,
        window_size_right=window,
    )
    return outputs[0]


def efficient(qkv, segments, dropout, scale):
    """Attend by PyTorch's memory-efficient kernel, for sm_50 and newer, over padded segments.

    (A T4 is sm_75.) Every segment is padded to its limit. The kernel also takes cu_seqlens, but
    then its forward pass drops out by another pattern than its backward pass (it begins every
    segment and head at the same random number), and training fails without a word.
    """
    outputs = _efficient(qkv, segments.bias, segments.limits, dropout, scale)
    return outputs[0]


def stack_qkv(query, key, value, qkv=None):
    """Return query, key and value [1, heads, tokens, width] as one [tokens, 3, heads, width].

    With fused projections the three are views of `qkv`, which is returned; without, it is a copy.
    """
    if qkv is None:
        qkv = torch.stack([part.transpose(1, 2) for part in (query, key, value)], 2)
    return qkv.squeeze(0)  # indexed, it would be copied in the backward pass


def _equal_limits(limits: list[int]) -> list[tuple[slice, tuple[int, int]]]:
    """Return the runs of neighbouring segments that have the same limit.

    One call of the kernel takes a run. For each: the slice of its tokens, and the number of its
    segments with their limit.
    """
    runs = []
    begin = 0
    for limit, group in groupby(limits):
        count = len(list(group))
        end = begin + count * limit
        runs.append((slice(begin, end), (count, limit)))
        begin = end
    return runs


def _heads_first(tokens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a view of [segments x limit, heads, width] as [segments, heads, limit, width]."""
    return tokens.unflatten(0, shape).transpose(1, 2)


def _tokens_first(heads: torch.Tensor) -> torch.Tensor:
    """Return a view of [segments, heads, limit, width] as [segments, limit, heads, width]."""
    return heads.transpose(1, 2)


def _score_bias(bias: torch.Tensor, shape: tuple[int, int], heads: int) -> torch.Tensor:
    """Return the bias of keys [segments x limit] for scores [segments, heads, limit, limit]."""
    segments, limit = shape
    return bias.view(segments, 1, 1, limit).expand(-1, heads, limit, -1)


def _logsumexp_length(limit: int) -> int:
    """Return how many entries the kernel keeps for the softmax of a segment and head."""
    return -(-limit // LOGSUMEXP_ALIGN) * LOGSUMEXP_ALIGN


_OPTIONS = "Tensor bias, SymInt[] limits, float dropout, float scale"


# Operators of their own, which the compiler does not look into: it would trace a dozen calls in
# every layer.
@library.custom_op(
    "qa_lib::efficient_attention",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
    schema=f"(Tensor qkv, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _efficient(qkv, bias, limits, dropout, scale):
    """Return the output, and for the backward pass logsumexp, and seed and offset of each run."""
    heads = qkv.shape[2]
    bias = bias.to(qkv.dtype)
    outputs = []
    logsumexps = []
    seeds = []
    offsets = []
    for part, shape in _equal_limits(limits):
        query, key, value = (_heads_first(t[part], shape) for t in qkv.unbind(1))
        output, logsumexp, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            query,
            key,
            value,
            attn_bias=_score_bias(bias[part], shape, heads),
            compute_log_sumexp=True,
            dropout_p=dropout,
            scale=scale,
        )
        outputs.append(output)
        logsumexps.append(logsumexp)
        seeds.append(seed)
        offsets.append(offset)
    return (
        torch.cat([_tokens_first(output).flatten(0, 1) for output in outputs]),
        torch.cat([logsumexp.flatten() for logsumexp in logsumexps]),
        torch.stack(seeds),
        torch.stack(offsets),
    )


@_efficient.register_fake
def _(qkv, bias, limits, dropout, scale):
    tokens, _, heads, width = qkv.shape
    output = qkv.new_empty(tokens, heads, width)
    entries = heads * sum(map(_logsumexp_length, limits))
    logsumexp = qkv.new_empty(entries, dtype=torch.float32)
    seeds = qkv.new_empty(len(_equal_limits(limits)), dtype=torch.int64)
    return output, logsumexp, seeds, seeds.clone()


@library.custom_op(
    "qa_lib::efficient_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor qkv, Tensor output, Tensor logsumexp, Tensor seeds, "
    f"Tensor offsets, {_OPTIONS}) -> Tensor",
)
def _efficient_backward(grad, qkv, output, logsumexp, seeds, offsets, bias, limits, dropout, scale):
    """Return the gradient of `qkv`, [tokens, 3, heads, width]."""
    heads = qkv.shape[2]
    bias = bias.to(qkv.dtype)
    qkv_grad = qkv.new_empty(qkv.shape)
    grad = grad.contiguous()
    runs = _equal_limits(limits)
    entries = [heads * count * _logsumexp_length(limit) for _, (count, limit) in runs]
    for (part, shape), run_logsumexp, seed, offset in zip(
        runs, logsumexp.split(entries), seeds, offsets, strict=True
    ):
        segments, _ = shape
        output_grad, query, key, value = (
            _heads_first(t[part], shape) for t in (grad, *qkv.unbind(1))
        )
        *qkv_grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            output_grad,
            query,
            key,
            value,
            attn_bias=_score_bias(bias[part], shape, heads),
            out=_heads_first(output[part], shape),
            logsumexp=run_logsumexp.view(segments, heads, -1),
            philox_seed=seed,
            philox_offset=offset,
            dropout_p=dropout,
            grad_input_mask=[True, True, True, False],
            scale=scale,
        )
        out = qkv_grad[part].unflatten(0, shape)
        torch.stack([_tokens_first(part_grad) for part_grad in qkv_grads], 2, out=out)
    return qkv_grad


@_efficient_backward.register_fake
def _(grad, qkv, *_):
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx, inputs, output):
    qkv, bias, *ctx.options = inputs
    ctx.save_for_backward(qkv, *output, bias)


def _backward(ctx, grad, *_):
    qkv_grad = _efficient_backward(grad, *ctx.saved_tensors, *ctx.options)
    return qkv_grad, None, None, None, None


_efficient.register_autograd(_backward, setup_context=_setup_context)


def blockmask(query, key, value, segments, dropout, scale, window=None):
    """Attend by SDPA under a mask [tokens, tokens] that is true within segments.

    It works on any device, in any type and with a bias by distance, but takes quadratic time.
    """
    segment = segment_of(segments.cu_seqlens, len(query))
    mask = segment[:, None] == segment
    if window is not None:
        place = torch.arange(len(segment), device=segment.device)
        mask &= (place[:, None] - place).abs() <= window
    if segments.relative is not None:
        place = torch.arange(len(segment), device=segment.device) - segments.cu_seqlens[segment]
        relative = segments.relative
        bias = relative_scores(relative.weight, relative.buckets, place)
        mask = bias.masked_fill(~mask, -torch.inf).to(query.dtype)
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    return output[0].transpose(0, 1)


def _interface(kernel):
    """Return the attention function of transformers that calls a kernel for packed sequences."""

    def attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=0.0,
        scaling=None,
        segments=None,
        qkv=None,
        bias=None,
        sliding_window=None,
        **kwargs,
    ):
        """Attend for tensors [1, heads, tokens, width]; return [1, tokens, heads, width] and None.

        A `bias` that is in `qkv` gets its gradient from varlen_attention, whose modules have a
        HashDropout. `sliding_window` counts the token itself and those on one side of it. Batches
        without segments, which evaluation has, are padded ones and go to SDPA.
        """
        if segments is None:
            return sdpa_attention_forward(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )
        if kernel is varlen_attention:
            output = varlen_attention(
                stack_qkv(query, key, value, qkv),
                bias,
                segments.cu_seqlens,
                longest=max(segments.limits),
                seed=module.dropout.seed,
                dropout=dropout,
                scale=scaling,
                relative=segments.relative,
            )
        elif kernel is efficient:
            output = efficient(stack_qkv(query, key, value, qkv), segments, dropout, scaling)
        else:
            window = None if sliding_window is None else sliding_window - 1
            query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
            output = kernel(query, key, value, segments, dropout, scaling, window)
        return output[None], None

    return attention


KERNELS = {
    "flash": flash,
    "efficient": efficient,
    "block-diagonal": blockmask,
    "triton-varlen": varlen_attention,
}


def attention_name(kernel: str) -> str:
    """Return the name that a kernel for packed sequences has in transformers.

    transformers takes any name with "flash" in it for one of its own.
    """
    return "packed-" + kernel.replace("flash", "fa")


_INTERFACES = {name: _interface(kernel) for name, kernel in KERNELS.items()}
for _name, _function in _INTERFACES.items():
    AttentionInterface.register(attention_name(_name), _function)
    AttentionMaskInterface.register(attention_name(_name), sdpa_mask)


def quickest_kernel(
    module: nn.Module, query: torch.Tensor, segments: Segments | None = None
) -> str:
    """Return the name of the quickest kernel for packed sequences that takes this query.

    `module` is the self-attention. It has a HashDropout where the model was prepared for our own
    kernel, which a CPU computes in plain PyTorch. FlashAttention takes no bias by distance, which
    `segments` may have.
    """
    is_prepared = isinstance(getattr(module, "dropout", None), HashDropout)
    if query.is_cuda:
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        # PyTorch's compiler can trace this call, and not get_device_capability.
        if not is_half or torch.cuda.get_device_properties(query.device).major < 8:
            return "block-diagonal"
        if is_prepared:
            return "triton-varlen"
        has_bias = segments is not None and segments.relative is not None
        return "block-diagonal" if has_bias else "flash"
    return "triton-varlen" if is_prepared else "block-diagonal"


def _quickest(module, query, *args, segments=None, **kwargs):
    """Attend as `_interface` says, by whichever kernel is the quickest for this query."""
    kernel = _INTERFACES[quickest_kernel(module, query, segments)]
    return kernel(module, query, *args, segments=segments, **kwargs)


# For a model that takes padded batches and packed sequences of any type, on any device.
QUICKEST = attention_name("quickest")
AttentionInterface.register(QUICKEST, _quickest)
AttentionMaskInterface.register(QUICKEST, sdpa_mask)

# For windows of text, which have no padding: SDPA that is told "causal" and given no mask. For a
# compiled model transformers makes the mask all the same, and with one PyTorch does not take
# FlashAttention.
UNMASKED = "unmasked"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)
AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)


class BiasDeferredLinear(nn.Linear):
    """nn.Linear that adds its bias and leaves the bias's gradient to the attention kernel after it.

    kernels/partial_sums.py says why.
    """

    def forward(self, x):
        return F.linear(x, self.weight, self.bias.detach())


class Float8BiasDeferredLinear(BiasDeferredLinear):
    """A BiasDeferredLinear for bf16 inputs and weights whose GEMMs are in 8-bit floats."""

    in_8_bits = True
    weight_grad8 = False

    @property
    def reads_grad8_alone(self) -> bool:
        """Whether nothing reads the gradient of its output in bf16."""
        return self.weight_grad8

    def forward(self, x):
        return fp8_linear(x, self.weight, self.bias.detach(), take_copy(x), self.weight_grad8)

    def with_placeholder(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and a placeholder for its gradient in e5m2 (kernels/fp8.py)."""
        return fp8_linear_and_placeholder(
            x, self.weight, self.bias.detach(), take_copy(x), self.weight_grad8
        )


class FusedSelfAttention(nn.Module):
    """The self-attention of a BERT-like encoder with one linear layer for the three projections.

    `names` are those of the projections in the original, the module `separate`; `split` gives the
    original back. The fused weights train where the originals do, all three of them.
    """

    def __init__(self, separate: nn.Module, names: tuple[str, ...]):
        super().__init__()
        projections = [separate.get_submodule(name) for name in names]
        in_features = projections[0].in_features
        out_features = sum(projection.out_features for projection in projections)
        weight = torch.cat([projection.weight.detach() for projection in projections])
        bias = torch.cat([projection.bias.detach() for projection in projections])
        self.qkv = nn.Linear(in_features, out_features, device="meta")
        self.qkv.weight = nn.Parameter(weight, projections[0].weight.requires_grad)
        self.qkv.bias = nn.Parameter(bias, projections[0].bias.requires_grad)
        self.config = separate.config
        self.names = names
        self.dropout = separate.dropout
        self.scaling = separate.scaling
        self.width = separate.attention_head_size
        self.is_causal = separate.is_causal
        # Without its weights, and in a list, so as not to be a submodule.
        self.separate = [separate.to("meta")]

    def split(self) -> nn.Module:
        """Return the original module with this one's weights."""
        (separate,) = self.separate
        weights = self.qkv.weight.chunk(3)
        biases = self.qkv.bias.chunk(3)
        for name, weight, bias in zip(self.names, weights, biases, strict=True):
            projection = separate.get_submodule(name)
            projection.weight = nn.Parameter(weight.detach().clone())
            projection.bias = nn.Parameter(bias.detach().clone())
        return separate

    def project(self, hidden_states, is_packed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return query, key and value [batch, tokens, 3, heads, width], and a bias or None.

        It is the bias that is in them already and whose gradient is left to the attention kernel.
        """
        qkv = self.qkv(hidden_states).unflatten(-1, (3, -1, self.width))
        if not isinstance(self.qkv, BiasDeferredLinear):
            return qkv, None
        if is_packed:
            return qkv, self.qkv.bias
        # A padded batch goes to another kernel, which knows nothing of a bias.
        return attach_bias_grad(qkv, self.qkv.bias), None

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        """Do what the original's forward does for an encoder.

        Takes hidden_states [batch, tokens, hidden]; returns the output, of that shape, and the
        attention's weights, which are None unless it is eager.
        """
        shape = hidden_states.shape[:-1]
        qkv, bias = self.project(hidden_states, is_packed=kwargs.get("segments") is not None)
        if bias is not None:
            kwargs["bias"] = bias
        query, key, value = qkv.transpose(1, 3).unbind(2)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout.p if self.training else 0.0,
            scaling=self.scaling,
            qkv=qkv,
            **kwargs,
        )
        return output.reshape(*shape, -1).contiguous(), weights


class Float8SelfAttention(FusedSelfAttention):
    """A FusedSelfAttention between linear layers in 8 bits.

    Its `qkv` is a Float8BiasDeferredLinear. Packed samples go to our own kernel, which makes the
    operands in 8 bits; there transformers' interface of attention has no place for these.
    """

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        """Do what the original's forward does; the output may carry an e4m3 copy."""
        segments = kwargs.get("segments")
        if segments is None or torch.compiler.is_compiling():
            return super().forward(hidden_states, attention_mask, past_key_values, **kwargs)
        qkv, placeholder = self.qkv.with_placeholder(hidden_states)
        output, output8 = varlen_attention_and_copy(
            qkv.unflatten(-1, (3, -1, self.width)).squeeze(0),
            self.qkv.bias,
            segments.cu_seqlens,
            longest=max(segments.limits),
            seed=self.dropout.seed,
            dropout=self.dropout.p if self.training else 0.0,
            scale=self.scaling,
            relative=segments.relative,
            placeholder=placeholder,
            grad8_alone=self.qkv.reads_grad8_alone,
        )
        output = output.reshape(hidden_states.shape).contiguous()
        leave_copy(output, output8)
        return output, None


def fuse_projections(model: nn.Module, kind: type = FusedSelfAttention) -> None:
    """Fuse the three projections of every layer, in place, by a FusedSelfAttention of that kind."""
    encoder = encoder_of(model)
    for layer in layers_of(model):
        separate = layer.get_submodule(encoder.self_attention)
        fused = kind(separate, encoder.projections)
        layer.set_submodule(encoder.self_attention, fused)


def split_projections(model: nn.Module) -> None:
    """Undo `fuse_projections`, in place; do nothing to other models."""
    name = encoder_of(model).self_attention
    for layer in layers_of(model):
        fused = layer.get_submodule(name)
        if isinstance(fused, FusedSelfAttention):
            layer.set_submodule(name, fused.split())


class ExactRotaryEmbedding(ModernBertRotaryEmbedding):
    """The angles by which queries and keys are turned, whose frequencies stay in fp32.

    Cast to half precision with the rest of a model, they would be rounded, and a token's angle off
    by a whole radian some hundreds of tokens on.
    """

    def _apply(self, fn, recurse=True):
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, moved in self.named_buffers():
            setattr(self, name, exact[name].to(moved.device))
        return self


def keep_frequencies(model: nn.Module) -> None:
    """Leave the frequencies of rotary embeddings in fp32 whatever a model is cast to, in place."""
    for module in model.modules():
        if isinstance(module, ModernBertRotaryEmbedding):
            module.__class__ = ExactRotaryEmbedding


def use_varlen_attention(model: nn.Module, defers_bias: bool = True) -> None:
    """Prepare a model for the kernel of kernels/varlen_attention.py, in place.

    Every layer's attention gets a seed for its dropout, which fused_blocks.renew draws anew, and
    the gradient of fused projections' bias is left to the kernel, if it `defers_bias`. Raises
    UserError for heads of a width that the kernel does not take.
    """
    width = model.config.hidden_size // model.config.num_attention_heads
    why = unfit_heads(width)
    if why:
        raise UserError(why)
    for layer in layers_of(model):
        self_attention = layer.get_submodule(encoder_of(model).self_attention)
        self_attention.dropout = hash_dropout_for(self_attention, self_attention.dropout.p)
        if defers_bias and isinstance(self_attention, FusedSelfAttention):
            self_attention.qkv.__class__ = BiasDeferredLinear


def use_float8_projections(model: nn.Module) -> None:
    """Give the linear layers before and after attention 8-bit operands, in place.

    The model has fused projections and is prepared for the kernel of kernels/varlen_attention.py.
    Weights stay in bf16.
    """
    encoder = encoder_of(model)
    for layer in layers_of(model):
        self_attention = layer.get_submodule(encoder.self_attention)
        self_attention.__class__ = Float8SelfAttention
        self_attention.qkv.__class__ = Float8BiasDeferredLinear
        to_float8(layer.get_submodule(encoder.attention_output))
