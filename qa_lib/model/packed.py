"""A question-answering model over packed sequences: several samples in one, isolated from another.

Variants E-packed and on have it. data/packing.py says why samples are packed and how. A model must
then do three things that it does not do by itself: count positions from the start of each sample,
keep attention within it (packed_attention.py), and take the softmax of the loss over it alone. The
loss is then that of padded batches, and a test holds it to that.

`Packed` is the whole model; a `ModelStage` is some of its layers, for a pipeline's stages and for
`RegionalModel`, which are compiled one by one.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from qa_lib.model.architectures import (
    embeddings_of,
    encoder_of,
    first_position,
    heads_of,
    layers_of,
)
from qa_lib.model.packed_attention import Segments

REGION = 3  # layers that are compiled as one


class Packed(torch.nn.Module):
    """A question-answering model that is called with packed sequences.

    The loss is the mean over samples, which it is with padding, too. `limits` are those of
    Segments.
    """

    def __init__(self, model: torch.nn.Module, limits: list[int]):
        super().__init__()
        self.model = model
        self.limits = limits
        self.first_position = first_position(model.config)
        # A model with several kinds of layers makes a mask for each, of all tokens by all, unless
        # it is given them.
        kinds = getattr(model.config, "layer_types", None) or ()
        self.masks = dict.fromkeys(kinds) or None

    def forward(
        self,
        input_ids,
        position_ids,
        cu_seqlens,
        start_positions,
        end_positions,
        token_type_ids=None,
        padding_mask=None,
    ):
        """Return an output with `loss` and logits [1, budget].

        Tensors are those that PackedBatches.arrays gives.
        """
        output = self.model(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids + self.first_position,
            attention_mask=self.masks,
            segments=Segments(cu_seqlens, self.limits, padding_mask),
        )
        loss = span_loss(
            output.start_logits,
            output.end_logits,
            start_positions,
            end_positions,
            cu_seqlens,
            longest=max(self.limits),
            padding_mask=padding_mask,
        )
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=output.start_logits, end_logits=output.end_logits
        )


class ModelStage(torch.nn.Module):
    """Some of the layers of a model over packed sequences.

    It has the `embeddings` below them and the `head` above where asked for. Hidden states go in and
    come out, both [1, tokens, width]. The embeddings take none, and the head gives the loss.
    """

    def __init__(self, packed: Packed, layers: list, embeddings: bool = False, head: bool = False):
        super().__init__()
        model = packed.model
        self.limits = packed.limits
        self.first_position = packed.first_position
        name = encoder_of(model).distance_bias
        self.distance_bias = model.get_submodule(name) if name else None
        below = [module for module in embeddings_of(model) if module is not self.distance_bias]
        self.embeddings = torch.nn.ModuleList(below if embeddings else [])
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Sequential(*heads_of(model)) if head else None

    def forward(
        self,
        hidden=None,
        *,
        input_ids,
        position_ids,
        cu_seqlens,
        start_positions,
        end_positions,
        token_type_ids=None,
        padding_mask=None,
    ):
        """Return hidden states, or the loss; keywords are those of Packed.forward."""
        # Some embeddings have no such argument.
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        for number, module in enumerate(self.embeddings):
            if number == 0:
                hidden = module(
                    input_ids=input_ids,
                    position_ids=position_ids + self.first_position,
                    **types,
                )
            else:
                hidden = module(hidden)
        segments = Segments(cu_seqlens, self.limits, padding_mask)
        if self.distance_bias is not None:
            segments = segments._replace(distance_bias=self.distance_bias.by_distance())
        for layer in self.layers:
            hidden = layer(hidden, segments=segments)
        if self.head is None:
            return hidden
        start_logits, end_logits = self.head(hidden).unbind(-1)
        return span_loss(
            start_logits,
            end_logits,
            start_positions,
            end_positions,
            cu_seqlens,
            longest=max(self.limits),
            padding_mask=padding_mask,
        )


def regions_of(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Return a model's modules by region: the embeddings, every REGION layers, the head."""
    layers = layers_of(model)
    groups = [layers[begin : begin + REGION] for begin in range(0, len(layers), REGION)]
    return [embeddings_of(model), *groups, heads_of(model)]


class RegionalModel(torch.nn.Module):
    """A packed model as its regions one after the other.

    `compiled` compiles each; those of layers are alike, so that the compiler makes one program for
    all of them. `before` is called with the number of each part before its forward pass.
    """

    def __init__(self, packed: Packed, compiled: Callable[[ModelStage], Callable]):
        super().__init__()
        below = ModelStage(packed, [], embeddings=True)
        between = [ModelStage(packed, layers) for layers in regions_of(packed.model)[1:-1]]
        above = ModelStage(packed, [], head=True)
        self.parts = [compiled(part) for part in (below, *between, above)]
        self.before: Callable[[int], None] = lambda number: None

    def forward(self, **inputs):
        """Return the loss, for the keywords of Packed.forward."""
        hidden = None
        for number, part in enumerate(self.parts):
            self.before(number)
            hidden = part(hidden, **inputs)
        return hidden


def span_loss(
    start_logits,
    end_logits,
    start_positions,
    end_positions,
    cu_seqlens,
    longest: int,
    padding_mask=None,
) -> torch.Tensor:
    """Return the loss of a packed sequence from its logits [1, tokens].

    Positions are those of `segment_loss`; `padding_mask` [tokens] is that of Segments.
    """
    if padding_mask is not None:
        start_logits = start_logits + padding_mask
        end_logits = end_logits + padding_mask
    start_loss = segment_loss(start_logits[0], start_positions, cu_seqlens, longest)
    end_loss = segment_loss(end_logits[0], end_positions, cu_seqlens, longest)
    return (start_loss + end_loss) / 2


def segment_loss(
    logits: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
) -> torch.Tensor:
    """Return the mean cross-entropy of `positions` under a softmax over each segment.

    `logits` are [tokens]. `positions` [n] count from the start of each of the first n segments,
    none of which is longer than `longest`.

    The model's own loss also counts the padding in its softmax; here there is none to count.
    """
    n = len(positions)
    begin = cu_seqlens[:n, None]
    end = cu_seqlens[1 : n + 1, None]
    index = begin + torch.arange(longest, device=logits.device)
    # The backward pass of `take` adds where that of `logits[index]` would sort: no logit is in two
    # segments.
    rows = logits.take(index.clamp(max=len(logits) - 1)).float()
    rows = rows.masked_fill(index >= end, -torch.inf)
    return F.cross_entropy(rows, positions)
