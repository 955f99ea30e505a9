"""What FastTrainer cannot take over from a script, each refused in one line; and how it pads.

A script was written for transformers.Trainer. Its collator may do more than pad, its samples may be
padded, and the checkpoint that it resumes may be one of another training. Most of these would not
stop a training: it would go on, and learn something else or less.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from qa_lib.errors import UserError
from qa_lib.model.fused_projections import FusedSelfAttention
from qa_lib.own.packing import (
    LABELS,
    PackedCollator,
    PackedDataset,
    PackedSequence,
    columns_left_out,
)
from qa_lib.own.samples import has_columns_as_samples
from qa_lib.train.master_adamw import MasterAdamW

# Names in a model's configuration: tokens that texts begin with, and tokens that they end in.
FIRST_TOKENS = ("bos_token_id", "cls_token_id")
LAST_TOKENS = ("eos_token_id", "sep_token_id")
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
ROWS = 1_000  # of a dataset that are looked at together


# Padding.


class SuitedPadding:
    """Pads a batch by the collator of transformers that suits its labels.

    `default` is the one that Trainer takes, which leaves labels as they are. Where each sample has
    a label for each of its tokens, DataCollatorForTokenClassification pads these as well.

    Raises UserError for packed sequences, and for samples of unequal lengths where there is no
    tokenizer that pads them.
    """

    def __init__(self, default: Callable):
        self.default = default
        self.tokenizer = getattr(default, "tokenizer", None)

    def __call__(self, samples: list) -> dict[str, torch.Tensor]:
        """Return the batch of these samples."""
        check_unpacked(samples[0])
        if not isinstance(samples[0], Mapping) or "input_ids" not in samples[0]:
            return self.default(samples)
        lengths = [len(sample["input_ids"]) for sample in samples]
        if self.tokenizer is None:
            if min(lengths) < max(lengths):
                raise UserError(
                    f"a batch has samples of {min(lengths)} to {max(lengths)} tokens, and nothing "
                    "pads them: FastTrainer(..., processing_class=tokenizer)"
                )
            return self.default(samples)
        name = _name_of_token_labels(samples, lengths)
        if name is None:
            return self.default(samples)
        if name != "labels":  # the only name that the model knows
            samples = [_renamed(sample, name) for sample in samples]
        return DataCollatorForTokenClassification(self.tokenizer)(samples)


def _name_of_token_labels(samples: list[Mapping], lengths: list[int]) -> str | None:
    """Return under which name samples have a whole number for each token; None if they do not."""
    for name in LABELS:
        if name not in samples[0]:
            continue
        labels = [np.asarray(sample[name]) for sample in samples]
        are_whole = all(label.dtype.kind in "iu" for label in labels)
        are_of_tokens = [label.shape for label in labels] == [(length,) for length in lengths]
        return name if are_whole and are_of_tokens else None
    return None


def _renamed(sample: Mapping, name: str) -> dict:
    """Return a sample whose labels, under that name, are its `labels`."""
    renamed = dict(sample)
    renamed["labels"] = renamed.pop(name)
    return renamed


# Collators that only pad, which packing makes needless. A subclass may do more.
ONLY_PAD = (
    type(None),
    DefaultDataCollator,
    DataCollatorWithPadding,
    DataCollatorForTokenClassification,
    PackedCollator,
    SuitedPadding,
)


# Data.


def check_collator(collator: Callable | None) -> None:
    """Raise UserError for a collator that may do more than pad, which packing would leave out."""
    if type(collator) in ONLY_PAD or collator is default_data_collator:
        return
    raise UserError(
        f"packing replaces data_collator, and this {name_of(collator)} may do more than pad: "
        "FastTrainer(..., packed=False) keeps it"
    )


def check_sampler(trainer: type) -> None:
    """Raise UserError for a Trainer with a sampler of its own, which packing would leave out."""
    if trainer._get_train_sampler is not Trainer._get_train_sampler:
        raise UserError(
            f"packing deals the samples itself, and {trainer.__name__} has _get_train_sampler of "
            "its own: FastTrainer(..., packed=False) keeps it"
        )


def check_columns(dataset, kept: Sequence[str]) -> None:
    """Raise UserError for a column of numbers that packing leaves out, and the Trainer would not.

    `kept` are those that the collator keeps. It is for `remove_unused_columns=False`.
    """
    sample = dataset[0]
    lost = [
        name
        for name in columns_left_out(dataset)
        if name not in kept and np.asarray(sample[name]).dtype.kind in "biuf"
    ]
    if lost:
        raise UserError(
            f"packing would leave out {', '.join(lost)}, which remove_unused_columns=False keeps: "
            f"data_collator=PackedCollator(keep={lost}), or leave the columns out"
        )


def check_noise(args: TrainingArguments) -> None:
    """Raise UserError for NEFTune, whose noise is scaled by the length of a padded sample."""
    if args.neftune_noise_alpha:
        raise UserError(
            "neftune_noise_alpha scales its noise by the length of a sample, which packing hides: "
            "FastTrainer(..., packed=False) keeps it"
        )


def check_unpacked(data) -> None:
    """Raise UserError for a dataset that `pack` has made, or for one of its items."""
    if isinstance(data, PackedDataset | PackedSequence):
        raise UserError(
            "these samples are packed already: give FastTrainer the samples themselves, "
            "which it packs"
        )


def check_padding(dataset, config: PreTrainedConfig) -> None:
    """Raise UserError for a sample that begins or ends in padding, which no attention mask tells.

    Its samples are such as `pack` takes. Where the token of padding is also the one that begins or
    ends every text, nothing can be told.
    """
    pad = getattr(config, "pad_token_id", None)
    if pad is None:
        return
    first, last = _outer_tokens(dataset)
    if all(getattr(config, name, None) != pad for name in FIRST_TOKENS):
        _refuse_padding(first == pad, "begins with", pad)
    if all(getattr(config, name, None) != pad for name in LAST_TOKENS):
        _refuse_padding(last == pad, "ends in", pad)


def _refuse_padding(is_padding: np.ndarray, where: str, pad: int) -> None:
    """Raise UserError for the first sample that is padded, if there is one."""
    if is_padding.any():
        raise UserError(
            f"sample {is_padding.argmax()} {where} token {pad}, by which the model's configuration "
            "pads: tokenize without padding=..., or give attention_mask where it is text"
        )


def _outer_tokens(dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last token of each sample, int64; -1 where it has a mask."""
    if isinstance(dataset, datasets.Dataset) and has_columns_as_samples(dataset):
        return _outer_tokens_of_columns(dataset)
    first = np.full(len(dataset), -1)
    last = np.full(len(dataset), -1)
    for number in range(len(dataset)):
        sample = dataset[number]
        if "attention_mask" not in sample:
            first[number] = sample["input_ids"][0]
            last[number] = sample["input_ids"][-1]
    return first, last


def _outer_tokens_of_columns(dataset: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return what `_outer_tokens` does, without a Python object for each sample."""
    if "attention_mask" in dataset.column_names:
        nothing = np.full(len(dataset), -1)
        return nothing, nothing
    first = []
    last = []
    tables = dataset.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=ROWS)
    for table in tables:
        column = table.column("input_ids")
        tokens = pc.list_flatten(column).to_numpy()
        lengths = pc.list_value_length(column).to_numpy()
        ends = lengths.cumsum()
        first.append(tokens[ends - lengths])
        last.append(tokens[ends - 1])
    return np.concatenate(first), np.concatenate(last)


# Checkpoints.


def check_checkpoint(
    checkpoint: str, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> None:
    """Raise UserError for a checkpoint that this model and optimizer cannot go on from.

    Its weights may be in another precision, it may lack masters, or have some that nothing would
    read, and the model may not have been sped up, which has more parameters. Nothing is loaded.
    """
    why = _why_not_resumed(Path(checkpoint), model, optimizer)
    if why:
        raise UserError(
            f"{checkpoint} cannot be resumed: {why}; resume it by what wrote it, or start from its "
            f"weights, from_pretrained({checkpoint!r}, dtype='float32')"
        )


def _why_not_resumed(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> str | None:
    """Return why a checkpoint cannot be resumed; None if it can."""
    here = short_name(model.dtype)
    there = _type_of_weights(folder) or here
    state = _optimizer_state(folder)
    if state is None:
        return f"its weights are in {there}, and here in {here}" if there != here else None
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    count_there = sum(len(group["params"]) for group in state["param_groups"])
    has_masters = any("low_bits" in values for values in state["state"].values())
    if count_there > count and not has_masters:
        return f"transformers.Trainer wrote it, for {count_there} parameters, and here are {count}"
    here = _with_masters(here, isinstance(optimizer, MasterAdamW) and optimizer.masters)
    there = _with_masters(there, has_masters)
    if there != here:
        # Where speed_up fuses no linear layers, the parameters do not tell the one from the other.
        can_tell = has_masters or any(isinstance(m, FusedSelfAttention) for m in model.modules())
        writer = "FastTrainer" if can_tell else "Trainer or FastTrainer"
        return f"{writer} wrote it with weights in {there}, and here they are in {here}"
    if count_there != count:
        return f"its optimizer holds {count_there} parameters, and this one {count}"
    return None


def _type_of_weights(folder: Path) -> str | None:
    """Return the type in which a checkpoint has the weights, by name; None if it does not say.

    The model's configuration says it, which `save_pretrained` writes.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    dtype = json.loads(path.read_text(encoding="utf-8")).get("dtype")
    return dtype and short_name(dtype)


def _optimizer_state(folder: Path) -> dict | None:
    """Return an optimizer's state, whose tensors stay in the file; None if there is no file."""
    path = folder / "optimizer.pt"
    if not path.is_file():
        return None
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _with_masters(name: str, has_masters: bool) -> str:
    """Return the name of the weights' type, with whether an optimizer keeps masters of them."""
    return f"{name} over masters" if has_masters else f"{name} without masters"


# Names for messages.


def name_of(thing: object) -> str:
    """Return the name of a function or class, and of any other object that of its class."""
    return getattr(thing, "__name__", type(thing).__name__)


def short_name(dtype: torch.dtype | str) -> str:
    """Return the name of a type of numbers, shortened where it is a usual one."""
    name = str(dtype).removeprefix("torch.")
    return SHORT_NAMES.get(name, name)
