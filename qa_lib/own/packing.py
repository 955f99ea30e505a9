"""Packing for any data: token ids in, packed sequences out, for models after `speed_up`.

`pack` deals the samples of a dataset to packed sequences of one length (data/packing.py says why,
and how they are dealt), as many to each, so that the mean of a loss is over as many samples in
every step. PackedCollator makes a model's inputs of one of them, or of any list of samples. What a
head then returns, own/packed_model.py lays out for each sample. Which samples are refused, and what
is told of others, own/samples.py says.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from qa_lib.calls import checked, shown
from qa_lib.data.batches import round_up
from qa_lib.data.packing import ALIGN, DEALT_TOGETHER, deal, segment_ends
from qa_lib.errors import UserError
from qa_lib.own.samples import (
    LABELS,
    PER_SAMPLE,
    check_dict,
    columns_of,
    doubts,
    has_real_labels,
    length_of,
    lengths_and_ends,
)

IGNORED = -100  # the label of padding, which losses leave out
# Spans of samples that are dealt by themselves, so that few samples too are dealt otherwise in each
# epoch; each gives at least so many packed sequences.
SPANS = 4
LEAST_SPAN = 16
SPARE = 1.01  # the length of packed sequences, over the first epoch's fullest
TRIES = 4  # dealings of an epoch, until one fits
PER_TOKEN = ("input_ids", "token_type_ids")  # columns of one number for each token
TAKEN = {*PER_TOKEN, *PER_SAMPLE, *LABELS, "attention_mask"}  # what PackedCollator knows by name
LOW_FILL = 0.8  # below this share of tokens that are no padding, `pack` says what helps
WORTH_SAYING = 0.1  # of the fill, which it gains at least
MOST_LONGER = 8  # by how many times it recommends longer sequences at the most


@dataclass(eq=False)
class PackedSequence(Mapping):
    """The samples of a packed sequence, and its shape, which PackedCollator gives it.

    PyTorch's own collators, and whoever hands this to a model, take it for a batch of tensors. It
    is a Mapping so that they get an answer: whatever reads its items raises UserError.
    """

    samples: list[dict]
    tokens: int
    """How many the sequence has, padding included."""
    longest: int
    """The most tokens that any sample of the dataset has."""
    has_real_labels: bool = False
    """Whether labels are real numbers, though those of these samples may all be whole."""

    def _refuse(self, *_):
        """Raise UserError that says how a batch is made of this."""
        raise UserError(
            "an item of pack(...) is no batch yet: "
            "DataLoader(rows, batch_size=None, collate_fn=PackedCollator())"
        )

    __getitem__ = _refuse
    __iter__ = _refuse
    __len__ = _refuse


class PackedDataset(Dataset):
    """A dataset whose items are PackedSequences of another one's samples; `pack` makes it.

    `tokens`, `samples` and `longest` are what each packed sequence has: its length, how many
    samples, and the most tokens of one. `fill` is the share of tokens that are no padding. `rows`
    has the numbers of the samples of each packed sequence in this epoch.
    """

    def __init__(
        self,
        dataset,
        lengths: np.ndarray,
        tokens: int | None,
        samples: int | None,
        seed: int,
        drop_last: bool,
    ):
        self.dataset = dataset
        self.lengths = lengths
        self.longest = int(lengths.max())
        self.seed = seed
        self.drop_last = drop_last
        if samples is None:
            self.samples = self._most_samples(tokens)
        else:
            self.samples = min(samples, len(lengths))
        self.first = self._dealt(0, 0)
        fullest = max(lengths[row].sum() for row in self.first)
        self.tokens = int(round_up(int(fullest * SPARE), ALIGN))
        if tokens is not None:
            self.tokens = min(self.tokens, tokens)
        self.rows = self.first
        self.rows_epoch = 0
        self.has_real_labels = False
        self._share_epoch()
        self.fill = lengths[np.concatenate(self.rows)].sum() / (len(self.rows) * self.tokens)

    def _most_samples(self, tokens: int) -> int:
        """Return the most samples of which as many fit into every sequence of so many tokens."""
        most = min(int(tokens // self.lengths.mean()), len(self.lengths))
        for samples in range(most, 1, -1):
            self.samples = samples
            if self._fits(self._dealt(0, 0), tokens):
                return samples
        return 1

    def _dealt(self, epoch: int, attempt: int) -> list[np.ndarray]:
        """Return the numbers of the samples of each packed sequence, in random order."""
        draw = np.random.default_rng([self.seed, epoch, attempt])
        order = draw.permutation(len(self.lengths))
        full = len(order) // self.samples
        groups = order[: full * self.samples].reshape(full, self.samples)
        together = np.clip(full // SPANS, LEAST_SPAN, DEALT_TOGETHER)
        rows = []
        for span in np.array_split(groups, max(1, full // together)):
            rows += list(deal(span.ravel(), self.lengths, self.samples))
        rows = [rows[number] for number in draw.permutation(full)]
        rest = order[full * self.samples :]
        if len(rest) and not self.drop_last:
            rows.append(rest)
        return rows

    def _fits(self, rows: list[np.ndarray], tokens: int) -> bool:
        """Return whether all packed sequences have at most so many tokens."""
        return all(self.lengths[row].sum() <= tokens for row in rows)

    def set_epoch(self, epoch: int) -> None:
        """Deal the samples anew for an epoch, as its number and the seed have it.

        The number of packed sequences and their shape stay. Where several dealings do not fit into
        it, the packed sequences are those of the first epoch. Workers of a DataLoader follow.
        """
        self.rows = self._rows_of(epoch)
        self.rows_epoch = epoch
        if self.process == os.getpid():
            self.epoch.fill_(epoch)
        else:  # another process has handed this over, and counts epochs for itself
            self._share_epoch()

    def _share_epoch(self) -> None:
        """Put the epoch's number into shared memory, for the workers that this process starts.

        They have copies of this dataset, which they may keep through all epochs.
        """
        self.epoch = torch.tensor(self.rows_epoch).share_memory_()
        self.process = os.getpid()

    def _rows_of(self, epoch: int) -> list[np.ndarray]:
        """Return the numbers of the samples of each packed sequence in an epoch."""
        for attempt in range(TRIES):
            rows = self._dealt(epoch, attempt)
            if self._fits(rows, self.tokens):
                return rows
        return self.first

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> PackedSequence:
        if get_worker_info() is not None and self.epoch != self.rows_epoch:
            self.rows_epoch = int(self.epoch)
            self.rows = self._rows_of(self.rows_epoch)
        numbers = self.rows[number].tolist()
        if hasattr(self.dataset, "__getitems__"):  # all in one look-up
            samples = self.dataset.__getitems__(numbers)
        else:
            samples = [self.dataset[number] for number in numbers]
        return PackedSequence(samples, self.tokens, self.longest, self.has_real_labels)

    def __copy__(self) -> "PackedDataset":
        """Return a copy that has an epoch of its own."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._share_epoch()
        return twin

    def __setstate__(self, state: dict) -> None:
        """Become a copy that has an epoch of its own, or in a worker the epoch that it follows."""
        self.__dict__.update(state)
        if not self.epoch.is_shared():  # what a worker gets is
            self._share_epoch()


@checked
def pack(
    dataset: Sequence[dict],
    tokens: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    drop_last: bool = False,
    say: Callable[[str], None] = print,
) -> PackedDataset:
    """Deal the samples of a dataset to packed sequences of one length; return these as a dataset.

    `dataset` is one of `datasets`, one of PyTorch or a list. Its samples are dicts: `input_ids`, a
    list of whole numbers without padding, and what else the model takes (PackedCollator says what).
    A packed sequence has at most `tokens` tokens, and as many samples as fit into each; or it has
    `samples` samples, and as many tokens as they need. The last one has what is left over, unless
    it is to be left out (`drop_last`). Its length is a multiple of 64 where it can be. Samples are
    dealt anew by `set_epoch(number)`, from `seed`. `say` takes a line on what came out, which says
    what would help where much is padding, and a line where samples seem to have been cut or padded.

    Raises UserError, which names the sample, where one is empty, has no labels though others have,
    or is longer than a packed sequence; no sample is ever cut.

        from torch.utils.data import DataLoader
        from qa_lib import PackedCollator, pack

        rows = pack(tokenized, tokens=4096)
        loader = DataLoader(rows, batch_size=None, shuffle=True, collate_fn=PackedCollator())
        for batch in loader:
            loss = model(**batch).loss
    """
    if (tokens is None) == (samples is None):
        raise UserError("pack takes either tokens=4096 or samples=32: how long, or how many")
    _check_number("tokens", tokens)
    _check_number("samples", samples)
    columns = columns_of(dataset)
    lengths, ends = lengths_and_ends(columns["input_ids"])
    if tokens is not None and lengths.max() > tokens:
        number = int(lengths.argmax())
        raise UserError(
            f"sample {number} has {lengths[number]} tokens, and a packed sequence {tokens}: "
            f"pack(tokens={round_up(int(lengths[number]), ALIGN)}) or more, or cut it, "
            f"tokenizer(..., truncation=True, max_length={tokens})"
        )
    packed = PackedDataset(dataset, lengths, tokens, samples, seed, drop_last)
    packed.has_real_labels = has_real_labels(columns)
    say(
        f"{len(lengths):,} samples in {len(packed):,} packed sequences of {packed.tokens:,} "
        f"tokens, {packed.samples:,} in each, {packed.fill:.0%} full{_advice(packed, tokens)}"
    )
    unused = columns_left_out(dataset)
    if unused:
        say(f"columns that PackedCollator takes by keep=[...] alone: {', '.join(unused)}")
    for line in doubts(columns["input_ids"], lengths, ends):
        say(line)
    return packed


def columns_left_out(dataset) -> list[str]:
    """Return the columns of the first sample that no model is handed.

    A mask of padding is made anew.
    """
    return [name for name in dataset[0] if name not in TAKEN]


def _check_number(name: str, value: int | None) -> None:
    """Raise UserError for a number of tokens or samples that is none."""
    if value is not None and (type(value) is not int or value < 1):
        raise UserError(f"{name} is {value!r}: give a whole number, 1 or more")


def _advice(packed: PackedDataset, tokens: int | None) -> str:
    """Return what makes packed sequences fuller, if they are not full; else an empty text.

    One long sample leaves few tokens to others in its sequence, and all sequences have as many
    samples. Where more samples share a sequence, each has its part of the long ones.
    """
    if packed.fill >= LOW_FILL:
        return ""
    fullest = packed
    samples = packed.samples
    while fullest.fill < LOW_FILL and samples < len(packed.lengths):
        samples *= 2
        longer = PackedDataset(
            packed.dataset, packed.lengths, None, samples, packed.seed, packed.drop_last
        )
        if longer.tokens > MOST_LONGER * packed.tokens:
            break
        if longer.fill > fullest.fill:
            fullest = longer
    if fullest.fill < packed.fill + WORTH_SAYING:
        return ""
    if tokens is not None:
        return f"; longer ones would be {fullest.fill:.0%} full: tokens={fullest.tokens}"
    return (
        f"; {fullest.samples:,} in each would make them {fullest.fill:.0%} full: "
        f"samples={fullest.samples}"
    )


class PackedCollator:
    """Makes a model's inputs of samples, which become one packed sequence.

    It takes an item of `pack(...)`, or a list of samples: as a Trainer's data_collator, or a
    DataLoader's collate_fn, with any dataset and sampler. Packed sequences then have `tokens`
    tokens, or as many as the samples need, a multiple of 64.

    It takes these columns of a sample: `input_ids` and `token_type_ids`; `labels` (or `label`),
    which are a number, a list of real numbers for the sample, or a list of whole numbers, one for
    each token; `start_positions` and `end_positions`; and those that `keep` names, such as a weight
    in a loss of your own: numbers, or lists of as many numbers for each sample. It leaves out
    others. The result is a dict of tensors on the CPU:

    - `input_ids`, `position_ids` and `token_type_ids`, int64 [1, tokens];
    - `cu_seqlens`, int32 [segments + 1]: 0, then where each sample ends, then the padding's ends;
    - `attention_mask`, int64 [samples, longest], which is 1 for tokens: of what the head gets;
    - `labels` and positions as for padded batches of `longest` tokens: [samples],
      [samples, labels], or [samples, longest] with -100 for padding;
    - what `keep` names, [samples] or [samples, numbers], fp32 for real numbers. No model of
      transformers knows these: take them out of the batch before the model is called.

    A call of the model returns for each sample what a padded batch would.

    Raises UserError, which names the sample, where one is empty or padded, lacks what others have,
    or has another number of labels than of tokens; where all have more tokens than `tokens`; and
    for a name in `keep` that is of no column of numbers, or of one that is taken anyway.

        from qa_lib import PackedCollator

        batch = PackedCollator()(tokenized[:32])
        logits = model(**batch).logits  # [samples, labels], for a head that classifies samples
    """

    def __init__(self, tokens: int | None = None, keep: Sequence[str] = ()):
        _check_number("tokens", tokens)
        _check_names(keep)
        self.tokens = tokens
        self.keep = tuple(keep)

    def __call__(self, samples: PackedSequence | list) -> dict[str, torch.Tensor]:
        """Return the inputs of `samples`: a list of dicts, or what an item of `pack(...)` is."""
        tokens = self.tokens
        longest = None
        is_real = False
        if isinstance(samples, list) and samples and isinstance(samples[0], PackedSequence):
            if len(samples) > 1:
                raise UserError(
                    f"{len(samples)} packed sequences in a batch: one is a batch already, "
                    "DataLoader(..., batch_size=None), or 1 for a Trainer"
                )
            (samples,) = samples
        if isinstance(samples, PackedSequence):
            tokens = samples.tokens
            longest = samples.longest
            is_real = samples.has_real_labels
            samples = samples.samples
        if not isinstance(samples, list | tuple) or not samples:
            raise UserError(
                f"PackedCollator got {shown(samples)}: "
                "give a list of samples, or an item of pack(...)"
            )
        lengths = _checked_lengths(samples)
        longest = longest or int(lengths.max())
        total = int(lengths.sum())
        tokens = tokens or int(round_up(total, ALIGN))
        if total > tokens:
            raise UserError(
                f"{len(samples)} samples have {total} tokens, and a packed sequence {tokens}: "
                "take fewer samples, or pack(dataset, tokens=...), which counts them"
            )
        inputs = _inputs(samples, lengths, tokens, longest, is_real)
        for name in self.keep:
            inputs[name] = _kept(samples, name)
        return inputs


def _check_names(keep: Sequence[str]) -> None:
    """Raise UserError for what are no names of columns beside those that are taken anyway."""
    if isinstance(keep, str):
        raise UserError(f"keep is {keep!r}: give a list of names, keep=[{keep!r}]")
    for name in keep:
        if name in TAKEN:
            raise UserError(f"keep names {name}, which PackedCollator takes anyway: leave it out")


def _kept(samples: Sequence[dict], name: str) -> torch.Tensor:
    """Return a further column of samples as a tensor [samples] or [samples, numbers].

    Raises UserError where it is not of numbers, as many for each sample.
    """
    for number, sample in enumerate(samples):
        if name not in sample:
            raise UserError(
                f"sample {number} of the batch has no {name}, which keep names "
                "(a Trainer leaves it out, unless remove_unused_columns=False)"
            )
    arrays = [np.asarray(sample[name]) for sample in samples]
    for number, array in enumerate(arrays):
        if array.dtype.kind not in "biuf" or array.shape != arrays[0].shape:
            raise UserError(
                f"{name} of sample {number} of the batch is {shown(samples[number][name])}: "
                "keep takes numbers, as many for each sample"
            )
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked.float() if stacked.is_floating_point() else stacked


def _checked_lengths(samples: Sequence[dict]) -> np.ndarray:
    """Return how many tokens each sample of a batch has, int64.

    Raises UserError for samples that are empty, padded, or have no labels where others have.
    """
    for number, sample in enumerate(samples):
        check_dict(sample, f"sample {number} of the batch")
    names = set().union(*samples) & {*LABELS, *PER_SAMPLE, *PER_TOKEN} | {"input_ids"}
    lengths = []
    for number, sample in enumerate(samples):
        which = f"sample {number} of the batch"
        for name in names:
            if sample.get(name) is None:
                raise UserError(f"{which} has no {name}, and others have")
        lengths.append(length_of(sample["input_ids"], which))
        if lengths[-1] == 0:
            raise UserError(f"{which} is empty: leave it out")
        if "attention_mask" in sample and not all(sample["attention_mask"]):
            raise UserError(
                f"{which} is padded: tokenize without padding=..., which packing makes needless"
            )
    return np.array(lengths, dtype=np.int64)


def _inputs(samples, lengths, tokens: int, longest: int, is_real: bool) -> dict[str, torch.Tensor]:
    """Return what PackedCollator says."""
    inputs = {}
    for name in PER_TOKEN:
        if name in samples[0]:
            inputs[name] = _packed([sample[name] for sample in samples], name, lengths, tokens)
    inputs["position_ids"] = _packed(
        [np.arange(length) for length in lengths], "position_ids", lengths, tokens
    )
    padding_segments = -(-tokens // longest)
    cu_seqlens = segment_ends(lengths, tokens, padding_segments, longest)
    inputs["cu_seqlens"] = torch.from_numpy(cu_seqlens.astype(np.int32))
    mask = np.arange(longest) < lengths[:, None]
    inputs["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
    for name in PER_SAMPLE:
        if name in samples[0]:
            inputs[name] = torch.tensor([int(sample[name]) for sample in samples])
    for name in LABELS:
        if name in samples[0]:
            inputs["labels"] = _labels(
                [sample[name] for sample in samples], lengths, longest, is_real
            )
            break
    return inputs


def _packed(columns: list, name: str, lengths: np.ndarray, tokens: int) -> torch.Tensor:
    """Return the numbers of all samples' tokens, one after the other, int64 [1, tokens]."""
    for number, (column, length) in enumerate(zip(columns, lengths, strict=True)):
        if len(column) != length:
            raise UserError(
                f"sample {number} of the batch has {len(column)} {name} for {length} tokens"
            )
    packed = np.zeros((1, tokens), dtype=np.int64)
    packed[0, : lengths.sum()] = np.concatenate([np.asarray(column) for column in columns])
    return torch.from_numpy(packed)


def _labels(labels: list, lengths: np.ndarray, longest: int, is_real: bool) -> torch.Tensor:
    """Return labels of samples, or of their tokens as for padded batches.

    They are real numbers if one of them is, or where the dataset's others are (`is_real`).
    """
    arrays = [np.asarray(label) for label in labels]
    for number, array in enumerate(arrays):
        if array.dtype.kind not in "biuf":
            raise UserError(
                f"labels of sample {number} of the batch are {shown(labels[number])}: "
                "give numbers, such as the class's"
            )
    is_real |= any(array.dtype.kind == "f" for array in arrays)
    if arrays[0].ndim == 0 or is_real:
        for number, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise UserError(
                    f"sample {number} of the batch has {array.size} labels, "
                    f"and sample 0 has {arrays[0].size}"
                )
        stacked = torch.from_numpy(np.stack(arrays))
        return stacked.float() if is_real else stacked.long()
    padded = np.full((len(labels), longest), IGNORED, dtype=np.int64)
    for number, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if array.shape != (length,):
            raise UserError(
                f"sample {number} of the batch has {array.size} labels for {length} tokens: "
                "give a label for each token; where a sample has several labels, give them as "
                "real numbers, such as 1.0"
            )
        padded[number, :length] = array
    return torch.from_numpy(padded)
