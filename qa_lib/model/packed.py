"""A question-answering model over packed rows: several features in one row, isolated from one another (rows E1 and on).

data/packing.py says why rows are packed and how. A model must then do three things that it does not do by itself:
count positions from the start of each feature, keep attention within it (model/attention.py), and take the softmax of
the loss over it alone. The loss is then that of padded rows, and a test holds it to that.
"""

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from qa_lib.model.attention import Segments
from qa_lib.model.encoders import first_position


class Packed(torch.nn.Module):
    """A question-answering model called with packed rows: the loss is the mean over features, as it is with padding."""

    def __init__(self, model: torch.nn.Module, limits: list[int]):
        super().__init__()
        self.model, self.limits, self.first_position = model, limits, first_position(model.config)

    def forward(
        self, input_ids, position_ids, cu_seqlens, start_positions, end_positions, token_type_ids=None, **layout
    ):
        """Tensors as PackedBatches.arrays gives them; the output has `loss` and logits [1, budget]."""
        output = self.model(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids + self.first_position,
            segments=Segments(cu_seqlens, self.limits, **layout),
        )
        starts, ends = output.start_logits, output.end_logits
        loss = span_loss(starts, ends, start_positions, end_positions, cu_seqlens, max(self.limits))
        return QuestionAnsweringModelOutput(loss=loss, start_logits=starts, end_logits=ends)


def span_loss(starts, ends, start_positions, end_positions, cu_seqlens, longest: int) -> torch.Tensor:
    """The loss of a packed row from its logits [1, tokens], for positions as `segment_loss` takes them."""
    start_loss = segment_loss(starts[0], start_positions, cu_seqlens, longest)
    return (start_loss + segment_loss(ends[0], end_positions, cu_seqlens, longest)) / 2


def segment_loss(logits: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Mean cross-entropy of `positions` [n] under a softmax over each of the first n segments of `logits` [tokens].

    The model's own loss also counts the padding in its softmax; here there is none to count.
    """
    n = len(positions)
    begin, end = cu_seqlens[:n, None], cu_seqlens[1 : n + 1, None]
    index = begin + torch.arange(longest, device=logits.device)
    rows = logits[index.clamp(max=len(logits) - 1)].float().masked_fill(index >= end, -torch.inf)
    return F.cross_entropy(rows, positions)
