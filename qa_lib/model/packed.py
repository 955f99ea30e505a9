"""A question-answering model over packed sequences: several samples in one, isolated from one another (variants
E-packed and on).

data/packing.py says why samples are packed and how. A model must then do three things that it does not do by itself:
count positions from the start of each sample, keep attention within it (model/attention.py), and take the softmax of
the loss over it alone. The loss is then that of padded batches, and a test holds it to that.

`Packed` is the whole model; a `ModelStage` is some of its layers, for a pipeline's stages and for `RegionalModel`,
which are compiled one by one.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from qa_lib.model.architectures import embeddings_of, encoder_of, first_position, layers_of
from qa_lib.model.attention import Segments

REGION = 3  # layers that are compiled as one


class Packed(torch.nn.Module):
    """A question-answering model called with packed sequences: the loss is the mean over samples, as it is with
    padding."""

    def __init__(self, model: torch.nn.Module, limits: list[int]):
        super().__init__()
        self.model, self.limits, self.first_position = model, limits, first_position(model.config)
        # A model with several kinds of layers makes a mask for each, of all tokens by all, unless it is given them.
        self.masks = dict.fromkeys(getattr(model.config, "layer_types", None) or ()) or None

    def forward(
        self,
        input_ids,
        position_ids,
        cu_seqlens,
        start_positions,
        end_positions,
        token_type_ids=None,
        **layout,
    ):
        """Tensors as PackedBatches.arrays gives them; the output has `loss` and logits [1, budget]."""
        output = self.model(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids + self.first_position,
            attention_mask=self.masks,
            segments=Segments(cu_seqlens, self.limits, **layout),
        )
        starts, ends = output.start_logits, output.end_logits
        loss = span_loss(
            starts, ends, start_positions, end_positions, cu_seqlens, max(self.limits), **layout
        )
        return QuestionAnsweringModelOutput(loss=loss, start_logits=starts, end_logits=ends)


class ModelStage(torch.nn.Module):
    """Some of the layers of a model over packed sequences, with the `embeddings` below them and the `head` above where
    asked for; hidden states in and out, both [1, tokens, width]. The embeddings take none, and the head gives the
    loss."""

    def __init__(self, packed: Packed, layers: list, embeddings: bool = False, head: bool = False):
        super().__init__()
        model = packed.model
        self.limits, self.first_position = packed.limits, packed.first_position
        self.embeddings = torch.nn.ModuleList(embeddings_of(model) if embeddings else [])
        self.layers = torch.nn.ModuleList(layers)
        self.head = model.get_submodule(encoder_of(model).head) if head else None

    def forward(
        self, hidden=None, *, input_ids, position_ids, cu_seqlens, start_positions, end_positions, token_type_ids=None,
        **layout,
    ):  # fmt: skip
        """Keywords as Packed.forward takes them."""
        for number, module in enumerate(self.embeddings):
            if number:
                hidden = module(hidden)
            else:
                positions = position_ids + self.first_position
                hidden = module(
                    input_ids=input_ids, token_type_ids=token_type_ids, position_ids=positions
                )
        segments = Segments(cu_seqlens, self.limits, **layout)
        for layer in self.layers:
            hidden = layer(hidden, segments=segments)
        if self.head is None:
            return hidden
        starts, ends = self.head(hidden).unbind(-1)
        return span_loss(
            starts, ends, start_positions, end_positions, cu_seqlens, max(self.limits), **layout
        )


def regions_of(model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """The modules of a model in order of the forward pass: the embeddings, every REGION layers, the head."""
    layers = layers_of(model)
    groups = [layers[begin : begin + REGION] for begin in range(0, len(layers), REGION)]
    return [embeddings_of(model), *groups, [model.get_submodule(encoder_of(model).head)]]


class RegionalModel(torch.nn.Module):
    """A packed model as its regions one after the other. `compiled` compiles each; those of layers are alike, so that
    the compiler makes one program for all of them."""

    def __init__(self, packed: Packed, compiled: Callable[[ModelStage], Callable]):
        super().__init__()
        below, above = ModelStage(packed, [], embeddings=True), ModelStage(packed, [], head=True)
        between = [ModelStage(packed, layers) for layers in regions_of(packed.model)[1:-1]]
        self.parts = [compiled(part) for part in (below, *between, above)]
        self.before = lambda number: None  # is called before that part's forward pass

    def forward(self, **inputs):
        """The loss, for keywords as Packed.forward takes them."""
        hidden = None
        for number, part in enumerate(self.parts):
            self.before(number)
            hidden = part(hidden, **inputs)
        return hidden


def span_loss(
    starts, ends, start_positions, end_positions, cu_seqlens, longest: int, bias=None
) -> torch.Tensor:
    """The loss of a packed sequence from its logits [1, tokens], for positions as `segment_loss` takes them; a `bias`
    [tokens] is -inf where segments are padded."""
    if bias is not None:
        starts, ends = starts + bias, ends + bias
    start_loss = segment_loss(starts[0], start_positions, cu_seqlens, longest)
    return (start_loss + segment_loss(ends[0], end_positions, cu_seqlens, longest)) / 2


def segment_loss(
    logits: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
) -> torch.Tensor:
    """Mean cross-entropy of `positions` [n] under a softmax over each of the first n segments of `logits` [tokens].

    The model's own loss also counts the padding in its softmax; here there is none to count.
    """
    n = len(positions)
    begin, end = cu_seqlens[:n, None], cu_seqlens[1 : n + 1, None]
    index = begin + torch.arange(longest, device=logits.device)
    # Its backward pass adds where `logits[index]` would sort: no logit is in two segments.
    rows = (
        logits.take(index.clamp(max=len(logits) - 1)).float().masked_fill(index >= end, -torch.inf)
    )
    return F.cross_entropy(rows, positions)
