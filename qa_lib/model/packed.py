"""A question-answering model over packed rows: several features in one row, isolated from one another."""

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from qa_lib.model.attention import Segments


class Packed(torch.nn.Module):
    """A question-answering model called with packed rows: the loss is the mean over features, as it is with padding."""

    def __init__(self, model: torch.nn.Module, limits: list[int]):
        super().__init__()
        self.model, self.limits = model, limits

    def forward(self, input_ids, token_type_ids, position_ids, cu_seqlens, start_positions, end_positions, **layout):
        """Tensors as PackedBatches.arrays gives them; the output has `loss` and logits [1, budget]."""
        output = self.model(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            segments=Segments(cu_seqlens, self.limits, **layout),
        )
        losses = [
            segment_loss(logits[0], positions, cu_seqlens, max(self.limits))
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
