"""A model of transformers that takes packed sequences and answers for each sample, with any head.

The layers compute a packed sequence (data/packing.py says why). A head must not notice: it takes
the first token of each sample, or a mean over each, or a loss over labels that are padded. So what
the encoder hands to the head is laid out again as a padded batch, [samples, longest, width], with
zeros for padding. Head, loss and outputs are then those of transformers, as for the padded batch. A
span head alone needs more: its softmax is over the tokens of a sample, as in model/packed.py, where
transformers' own would count the padding.

All is done by hooks that keep nothing between calls, so that a model may be called twice before
a backward pass, copied, checkpointed, compiled or wrapped. What a call needs goes through the model
as keyword arguments, which transformers hands down to the attention kernel.

The seeds of hash dropout (model/hash_dropout.py) go the same way. They are drawn anew in each call
in training. A layer takes its own at its attention, which comes before all of its dropouts and is
computed again under gradient checkpointing, with the arguments of its call.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import ModelOutput

from qa_lib.errors import UserError
from qa_lib.model.architectures import encoder_of, first_position, layers_of, max_positions
from qa_lib.model.hash_dropout import HashDropout, drawn_seeds
from qa_lib.model.packed_attention import QUICKEST, Segments
from qa_lib.own.packing import IGNORED

# The last modules of the heads of transformers, of which a model has one.
HEAD_OUTPUTS = ("classifier", "qa_outputs")


class Rooted(nn.Module):
    """The encoder of any model of transformers where model/architectures.py looks for it.

    That table has the names of a model with a head. Here the encoder of a model with another head,
    or with none, stands under the same name.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.config = model.config
        self.encoder_name = model.base_model_prefix
        self.add_module(self.encoder_name, model.base_model)


# Logits.


def score_in_fp32(model: nn.Module) -> None:
    """Have a head of transformers give its logits in fp32, in place, also with weights in half.

    A loss is then computed in fp32, as it is under autocast, and one of somebody's own may have
    weights of classes in fp32. A class of somebody's own may hand its logits to further weights,
    and stays as it is.
    """
    if type(model).__module__.partition(".")[0] != "transformers":
        return
    for name in HEAD_OUTPUTS:
        head = getattr(model, name, None)
        if head is not None:
            head.register_forward_hook(_in_fp32)


def _in_fp32(head: nn.Module, args: tuple, logits: torch.Tensor) -> torch.Tensor:
    """Return logits in fp32, or in fp64 as they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# Seeds.


def draw_dropouts(root: Rooted) -> None:
    """Have every call in training draw new seeds for the encoder's hash dropouts, in place."""
    encoder = root.get_submodule(root.encoder_name)
    in_layers = []
    for layer in layers_of(root):
        attention = layer.get_submodule(encoder_of(root).self_attention)
        # In lists, so as not to be submodules; a copy of the model has lists of its own modules.
        attention.layer_dropouts = _hash_dropouts(layer)
        attention.first_seed = len(in_layers)
        in_layers += attention.layer_dropouts
        attention.register_forward_pre_hook(_take_seeds, with_kwargs=True)
    encoder.layer_dropouts = in_layers
    encoder.embedding_dropouts = [
        module for module in _hash_dropouts(root) if module not in in_layers
    ]
    encoder.register_forward_pre_hook(_draw_seeds, with_kwargs=True)


def _hash_dropouts(module: nn.Module) -> list[HashDropout]:
    """Return the hash dropouts in a module."""
    return [part for part in module.modules() if isinstance(part, HashDropout)]


def _draw_seeds(encoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Give the embeddings' dropouts new seeds, and the layers theirs as an argument `seeds`."""
    dropouts = [*encoder.layer_dropouts, *encoder.embedding_dropouts]
    if not encoder.training or not any(module.p for module in dropouts):
        return args, kwargs
    seeds = drawn_seeds(len(dropouts), dropouts[0].seed.device)
    count = len(encoder.layer_dropouts)
    for module, seed in zip(encoder.embedding_dropouts, seeds[count:], strict=True):
        module.seed = seed
    return args, kwargs | {"seeds": seeds[:count]}


def _take_seeds(attention: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Give the dropouts of this attention's layer their seeds."""
    kwargs = dict(kwargs)
    seeds = kwargs.pop("seeds", None)
    if seeds is not None:
        dropouts = attention.layer_dropouts
        begin = attention.first_seed
        for module, seed in zip(dropouts, seeds[begin : begin + len(dropouts)], strict=True):
            # Another tensor: the backward pass of an earlier call may need the old one yet.
            module.seed = seed
    return args, kwargs


# Packed sequences.


class PackedPositions(NamedTuple):
    """Positions of a packed sequence, with where its samples end."""

    position_ids: torch.Tensor | None
    cu_seqlens: torch.Tensor


def hand_on_segments(model: nn.Module) -> None:
    """Have a head that hands its encoder no further arguments hand on `cu_seqlens`, in place.

    MPNet's do not, but hand on positions as they are: `cu_seqlens` go with these.
    """
    if model is not model.base_model:
        model.register_forward_pre_hook(_join_positions, with_kwargs=True)


def _join_positions(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Join `cu_seqlens` to the positions."""
    ends = kwargs.get("cu_seqlens")
    if ends is None:
        return args, kwargs
    return args, kwargs | {"position_ids": PackedPositions(kwargs.get("position_ids"), ends)}


def take_packed(model: nn.Module, root: Rooted) -> None:
    """Have a model take what PackedCollator gives as well as padded batches, in place."""
    for layer in layers_of(root):
        attention = layer.get_submodule(encoder_of(root).self_attention)
        attention.config._attn_implementation = QUICKEST
    encoder = root.get_submodule(root.encoder_name)
    encoder.register_forward_pre_hook(_enter, with_kwargs=True)
    encoder.register_forward_hook(_leave, with_kwargs=True)
    if type(model).__name__.endswith("ForQuestionAnswering"):
        model.register_forward_hook(_score_spans, with_kwargs=True)


def refuse_packed(model: nn.Module, why: str) -> None:
    """Have a model, and its encoder where that is called alone, refuse packed sequences."""
    for module in {model, model.base_model}:
        module.register_forward_pre_hook(partial(_refuse, why), with_kwargs=True)


def _refuse(why: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    """Raise UserError for a packed sequence."""
    if kwargs.get("cu_seqlens") is not None:
        raise UserError(f"this model takes no packed sequences: {why}")


def _enter(encoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Hand the segments of a packed sequence to the layers; leave a padded batch as it is."""
    positions = kwargs.get("position_ids")
    if isinstance(positions, PackedPositions):
        kwargs = kwargs | positions._asdict()
    if kwargs.get("cu_seqlens") is None:
        _check_mask(args, kwargs)
        return args, kwargs
    kwargs = dict(kwargs)
    cu_seqlens = kwargs.pop("cu_seqlens")
    sample_mask = kwargs.get("attention_mask")
    if sample_mask is None or kwargs.get("position_ids") is None:
        raise UserError(
            "cu_seqlens without attention_mask and position_ids: hand the model all that "
            "PackedCollator gives, model(**batch)"
        )
    if kwargs.get("return_dict") is False:
        raise UserError("packed sequences need return_dict=True")
    longest = sample_mask.shape[1]
    most = max_positions(encoder.config)
    if longest > most:
        raise UserError(
            f"samples of up to {longest} tokens, and the model has {most} positions: "
            f"cut them, tokenizer(..., truncation=True, max_length={most})"
        )
    # A model with several kinds of layers makes a mask for each, of all tokens by all, unless it is
    # given them.
    kinds = getattr(encoder.config, "layer_types", None) or ()
    kwargs["attention_mask"] = dict.fromkeys(kinds) or None
    kwargs["position_ids"] = kwargs["position_ids"] + first_position(encoder.config)
    kwargs["segments"] = Segments(cu_seqlens, [longest])
    kwargs["sample_mask"] = sample_mask
    return args, kwargs


def _check_mask(args: tuple, kwargs: dict) -> None:
    """Raise UserError for a packed sequence of which `cu_seqlens` has been lost on the way here."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    mask = kwargs.get("attention_mask")
    if ids is None or mask is None:
        return
    # The mask of a packed sequence is [samples, longest], and its ids are [1, tokens].
    has_other_shape = mask.ndim == 2 and mask.shape != ids.shape
    if has_other_shape:
        raise UserError(
            f"input_ids are {tuple(ids.shape)} and attention_mask {tuple(mask.shape)}: of a packed "
            "sequence the model's forward has to hand its **kwargs on to the encoder"
        )


def _leave(encoder: nn.Module, args: tuple, kwargs: dict, output: ModelOutput) -> ModelOutput:
    """Lay the hidden states of a packed sequence out as a padded batch, and pool them again."""
    segments = kwargs.get("segments")
    if segments is None:
        return output
    sample_mask = kwargs["sample_mask"]
    output.last_hidden_state = padded(output.last_hidden_state, segments.cu_seqlens, sample_mask)
    if output.hidden_states is not None:
        output.hidden_states = tuple(
            padded(hidden, segments.cu_seqlens, sample_mask) for hidden in output.hidden_states
        )
    if getattr(encoder, "pooler", None) is not None:
        output.pooler_output = encoder.pooler(output.last_hidden_state)
    return output


def padded(
    hidden: torch.Tensor, cu_seqlens: torch.Tensor, sample_mask: torch.Tensor
) -> torch.Tensor:
    """Return hidden states [1, tokens, width] as a padded batch [samples, longest, width].

    Samples begin at the first of `cu_seqlens`. The mask [samples, longest] is 0 for padding, whose
    hidden states are zeros.
    """
    samples, longest = sample_mask.shape
    begin = cu_seqlens[:samples, None]
    place = begin + torch.arange(longest, device=hidden.device)
    place = place.clamp(max=hidden.shape[1] - 1)
    # The backward pass of `index_select` adds where that of an index would sort.
    rows = hidden[0].index_select(0, place.flatten()).view(samples, longest, -1)
    return rows.masked_fill(sample_mask[..., None] == 0, 0.0)


def _score_spans(model: nn.Module, args: tuple, kwargs: dict, output: ModelOutput) -> ModelOutput:
    """Take the padding out of a span head's softmax, whose logits are -inf there."""
    if kwargs.get("cu_seqlens") is None:
        return output
    sample_mask = kwargs["attention_mask"]
    is_padding = sample_mask == 0
    output.start_logits = output.start_logits.masked_fill(is_padding, -torch.inf)
    output.end_logits = output.end_logits.masked_fill(is_padding, -torch.inf)
    if output.loss is not None:
        lengths = sample_mask.sum(1)
        start_loss = _span_loss(output.start_logits, kwargs["start_positions"], lengths)
        end_loss = _span_loss(output.end_logits, kwargs["end_positions"], lengths)
        output.loss = (start_loss + end_loss) / 2
    return output


def _span_loss(logits, positions, lengths) -> torch.Tensor:
    """Return the mean cross-entropy of `positions` [samples]; those beyond a sample are ignored."""
    targets = positions.flatten()
    targets = torch.where((targets < 0) | (targets >= lengths), IGNORED, targets)
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED)
