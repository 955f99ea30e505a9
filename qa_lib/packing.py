"""Training without padding: several features in one row of one static length, isolated from one another.

A micro-batch keeps its number of features. Features are dealt to micro-batches so that all have nearly the same number
of tokens, and each is laid end to end in a row of `budget` tokens, the same for every step of a run: one shape to
compile and to capture, and hardly any padding. Attention runs within segments (`cu_seqlens`), softmax and loss as well.
"""

import numpy as np
import torch
from torch import library
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from qa_lib.batches import Batches
from qa_lib.data import UserError
from qa_lib.variants import Spec

WINDOW = 256  # micro-batches that are dealt together: more are better balanced, fewer are more random
ALIGN = 64  # the budget is a multiple of this many tokens, for whole tiles in matrix products


def deal(order: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Features `order` (n x size of them) in n groups of `size` with nearly equal sums of `lengths`: int [n, size].

    Longest first, in rounds that give each group one feature, the longest of the round to the group that has least so
    far (the greedy rule for balanced partition of Graham 1969, with equal numbers).
    """
    rounds = order[np.argsort(-lengths[order], kind="stable")].reshape(size, -1)
    groups, totals = np.empty_like(rounds), np.zeros(rounds.shape[1], dtype=np.int64)
    for row, chunk in zip(groups, rounds, strict=True):
        row[np.argsort(totals, kind="stable")] = chunk
        totals += lengths[row]
    return groups.T


class PackedBatches(Batches):
    """Micro-batches as packed rows: `size` features end to end, then padding up to `budget` tokens.

    The padding is cut into segments of its own of at most max_length tokens: a kernel given a longer one would leave
    part of its output unwritten.
    """

    def __init__(self, features, spec: Spec):
        super().__init__(features, spec)
        epochs = -(-self.steps * spec.accumulation // self.per_epoch)
        totals = [features.lengths[self._drawn(epoch)].sum(1) for epoch in range(epochs)]
        most, least = max(t.max() for t in totals), min(t.min() for t in totals)
        self.budget = int(-(-most // ALIGN) * ALIGN)
        self.tails = -(-(self.budget - int(least)) // spec.scale.max_length)

    def _drawn(self, epoch: int) -> np.ndarray:
        order = super()._drawn(epoch)
        # Windows of like size: a small one at the end could not be balanced, and would set the budget of all.
        windows = np.array_split(order, max(1, len(order) // WINDOW))
        dealt = [deal(window.ravel(), self.features.lengths, self.size) for window in windows]
        return np.random.default_rng([self.spec.seed, epoch, 1]).permutation(np.concatenate(dealt))

    def rows(self, micro_batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        lengths = [self.features.lengths[m] for m in micro_batches]
        # Attention pays for a segment's own length alone, the rest of the model for the whole row.
        tails = [[self.budget - part.sum()] for part in lengths]
        return np.concatenate(lengths), np.concatenate([*lengths, *tails])

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """A packed row, int64: input_ids, token_type_ids and position_ids [1, budget]; cu_seqlens int32 [segments + 1],
        where each segment begins and the last one ends; start_positions and end_positions [size] within segments."""
        limit, lengths = self.spec.scale.max_length, self.features.lengths[indices]
        if (total := lengths.sum()) > self.budget:
            raise UserError(f"features of {total} tokens do not fit into a row of {self.budget}")
        batch = self.features.batch(indices, int(lengths.max()))
        real = batch["attention_mask"].astype(bool)
        rows = {"position_ids": np.broadcast_to(np.arange(real.shape[1]), real.shape)} | batch
        packed = {}
        for name in ("input_ids", "token_type_ids", "position_ids"):
            packed[name] = np.zeros((1, self.budget), dtype=np.int64)
            packed[name][0, :total] = rows[name][real]
        ends = np.minimum(total + limit * np.arange(1, self.tails + 1), self.budget)
        packed["cu_seqlens"] = np.concatenate([[0], lengths.cumsum(), ends]).astype(np.int32)
        return packed | {name: batch[name] for name in ("start_positions", "end_positions")}


class Packed(torch.nn.Module):
    """A question-answering model called with packed rows: the loss is the mean over features, as it is with padding."""

    def __init__(self, model: torch.nn.Module, max_length: int):
        super().__init__()
        self.model, self.max_length = model, max_length

    def forward(self, input_ids, token_type_ids, position_ids, cu_seqlens, start_positions, end_positions):
        """Tensors as PackedBatches.arrays gives them; the output has `loss` and logits [1, budget]."""
        output = self.model(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=self.max_length,
        )
        losses = [
            segment_loss(logits[0], positions, cu_seqlens, self.max_length)
            for logits, positions in ((output.start_logits, start_positions), (output.end_logits, end_positions))
        ]
        return QuestionAnsweringModelOutput(
            loss=(losses[0] + losses[1]) / 2, start_logits=output.start_logits, end_logits=output.end_logits
        )


def segment_loss(logits: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Mean cross-entropy of `positions` [n] under a softmax over each of the first n segments of `logits` [tokens].

    BertForQuestionAnswering's own loss also counts the padding in its softmax; here there is none to count.
    """
    n = len(positions)
    begin, end = cu_seqlens[:n, None], cu_seqlens[1 : n + 1, None]
    index = begin + torch.arange(longest, device=logits.device)
    rows = logits[index.clamp(max=len(logits) - 1)].float().masked_fill(index >= end, -torch.inf)
    return F.cross_entropy(rows, positions)


def flash(query, key, value, cu_seqlens, max_seqlen, dropout, scale):
    """FlashAttention by PyTorch's own op, for sm_80 and newer; fp16 or bf16. Each tensor [tokens, heads, width]."""
    return torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout, False, False, scale=scale
    )[0]


def efficient(query, key, value, cu_seqlens, max_seqlen, dropout, scale):
    """PyTorch's memory-efficient kernel, for sm_50 and newer (a T4 is sm_75), over segments padded for it alone.

    The kernel also takes cu_seqlens, but then its forward pass drops out by another pattern than its backward pass (it
    begins every segment and head at the same random number), and training fails without a word.
    """
    return _efficient(query, key, value, cu_seqlens, max_seqlen, dropout, scale)[0]


# Operators of their own, which the compiler does not look into: it would keep what is padded for the backward pass.
@library.custom_op("qa_lib::efficient_attention", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = _Rows(cu_seqlens, max_seqlen, query)
    output, logsumexp, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
        *map(rows.pad, (query, key, value)), rows.bias, True, dropout, scale=scale
    )
    return rows.unpad(output), logsumexp, seed.clone(), offset.clone()


@_efficient.register_fake
def _(query, key, value, cu_seqlens, max_seqlen, dropout, scale):
    steps = -(-max_seqlen // 32) * 32
    logsumexp = query.new_empty((len(cu_seqlens) - 1, query.shape[1], steps), dtype=torch.float32)
    random = query.new_empty((), dtype=torch.int64)
    return torch.empty_like(query, memory_format=torch.contiguous_format), logsumexp, random, random.clone()


@library.custom_op("qa_lib::efficient_attention_backward", mutates_args=())
def _efficient_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = _Rows(cu_seqlens, max_seqlen, query)
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        rows.pad(grad).masked_fill(~rows.inside[:, None, :, None], 0.0), *map(rows.pad, (query, key, value)), rows.bias,
        rows.pad(output), logsumexp, seed, offset, dropout, [True, True, True, False], scale=scale,
    )  # fmt: skip
    return tuple(map(rows.unpad, grads[:3]))


@_efficient_backward.register_fake
def _(grad, query, key, value, *_):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))


def _keep(ctx, inputs, output):
    query, key, value, cu_seqlens, ctx.max_seqlen, ctx.dropout, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)


def _differentiate(ctx, grad, *_):
    *saved, cu_seqlens = ctx.saved_tensors
    grads = _efficient_backward(grad, *saved, cu_seqlens, ctx.max_seqlen, ctx.dropout, ctx.scale)
    return *grads, None, None, None, None


_efficient.register_autograd(_differentiate, setup_context=_keep)


class _Rows:
    """Between tensors [tokens, heads, width] of packed segments and [segments, heads, length, width] of padded ones."""

    def __init__(self, cu_seqlens: torch.Tensor, longest: int, like: torch.Tensor):
        length = -(-longest // 16) * 16  # the kernel wants an aligned bias
        index = cu_seqlens[:-1, None] + torch.arange(length, device=like.device, dtype=cu_seqlens.dtype)
        self.inside = index < cu_seqlens[1:, None]
        self.index = index.clamp(max=len(like) - 1)
        segment = _segments(like, cu_seqlens)
        self.place = torch.arange(len(like), device=like.device) - cu_seqlens[segment] + segment * length
        bias = torch.zeros(index.shape, dtype=like.dtype, device=like.device).masked_fill(~self.inside, -torch.inf)
        self.bias = bias[:, None, None].expand(-1, like.shape[1], length, -1)  # added to the scores

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """Beyond a segment's end stands any token."""
        return packed[self.index].transpose(1, 2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.transpose(1, 2).flatten(0, 1)[self.place]


def _segments(packed: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The segment of each token, int64 [tokens]."""
    tokens = torch.arange(len(packed), device=packed.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], tokens, right=True)


def blockmask(query, key, value, cu_seqlens, max_seqlen, dropout, scale):
    """SDPA under a mask [tokens, tokens] that is true within segments: any device and dtype, quadratic in the row."""
    segment = _segments(query, cu_seqlens)
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    mask = segment[:, None] == segment
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)[0].transpose(0, 1)


def _interface(kernel):
    def attention(
        module, query, key, value, attention_mask, dropout=0.0, scaling=None, cu_seqlens=None, max_seqlen=0, **kwargs
    ):
        """An attention function of transformers: tensors [batch, heads, tokens, width] in, [batch, tokens, heads,
        width] out. Rows without cu_seqlens, as in evaluation, are padded ones and go to SDPA."""
        if cu_seqlens is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
        return kernel(query, key, value, cu_seqlens, max_seqlen, dropout, scaling)[None], None

    return attention


KERNELS = {"flash": flash, "efficient": efficient, "blockmask": blockmask}


def attention_name(kernel: str) -> str:
    """The name that a kernel for packed rows has in transformers, which takes any with "flash" in it for its own."""
    return "packed-" + kernel.replace("flash", "fa")


for _name, _kernel in KERNELS.items():
    AttentionInterface.register(attention_name(_name), _interface(_kernel))
    AttentionMaskInterface.register(attention_name(_name), sdpa_mask)
