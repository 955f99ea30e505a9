"""The samples that are to be packed: how long they are, which are refused, and what looks wrong.

A sample is a dict with `input_ids`, and its labels where it has some. What cannot be trained is
refused in one line that names the sample. What may be a mistake, samples that seem to have been cut
or padded, is told in a line of `pack`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from qa_lib.errors import UserError

PER_SAMPLE = ("start_positions", "end_positions")  # columns of one number for a sample
LABELS = ("labels", "label", "label_ids")  # names of one column, of which models know the first
# Samples that all have the length of the longest may have been cut there: at least this share of
# all, and so many times as many as have each length just below.
CUT_SHARE = 0.01
CUT_TIMES = 5
CUT_BELOW = 10
# Nobody cuts at fewer tokens, and texts that are repeated have fewer lengths.
LEAST_CUT = 32
LEAST_LENGTHS = 10
# At least so many samples, and this share of all, are padded where padding is spoken of.
LEAST_PADDED = 2
PADDED_SHARE = 0.01
NOT_REPEATED = -1  # stands for the token that a sample's end repeats, where it repeats none


def columns_of(dataset) -> dict[str, Sequence]:
    """Return the tokens of all samples, and their labels where they have some, by their names.

    Raises UserError for what is no list of samples, where some samples lack what others have, and
    where labels are None.
    """
    if isinstance(dataset, Mapping):  # what a tokenizer returns, too
        raise UserError(
            f"a {type(dataset).__name__} is no list of samples: of columns make one, "
            "datasets.Dataset.from_dict(...), and of splits give one, dataset['train']"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"a {type(dataset).__name__} cannot be packed ahead, its length is not known: "
            "DataLoader(dataset, batch_size=32, collate_fn=PackedCollator()), "
            "or FastTrainer(..., packed=False)"
        )
    if len(dataset) == 0:
        raise UserError("the dataset is empty: there is nothing to pack")
    columns = _columns(dataset)
    for name in (*LABELS, *PER_SAMPLE):
        missing = [number for number, value in enumerate(columns.get(name, ())) if value is None]
        _refuse_samples(missing, f"no {name}")
    return columns


def _columns(dataset) -> dict[str, Sequence]:
    """Return what `columns_of` says; raise UserError where some samples lack what others have."""
    wanted = ("input_ids", *LABELS, *PER_SAMPLE)
    names = getattr(dataset, "column_names", None)
    if names is not None and has_columns_as_samples(dataset):
        columns = {name: dataset[name] for name in wanted if name in names}
    else:
        samples = [dataset[number] for number in range(len(dataset))]
        for number, sample in enumerate(samples):
            check_dict(sample, f"sample {number}")
        names = set().union(*samples)
        columns = {}
        for name in wanted:
            lacking = [number for number, sample in enumerate(samples) if name not in sample]
            if name in names:
                _refuse_samples(lacking, f"no {name}, and others have")
                columns[name] = [sample[name] for sample in samples]
    if "input_ids" not in columns:
        raise UserError(
            f"samples have no input_ids, only {', '.join(sorted(names))}: tokenize them"
        )
    return columns


def has_columns_as_samples(dataset) -> bool:
    """Return whether the columns of a dataset are what its samples have, and no transform's input.

    It is one of `datasets`, or has column names as these do.
    """
    kind = (getattr(dataset, "format", None) or {}).get("type")
    return "input_ids" in dataset.column_names and kind != "custom"


def _refuse_samples(numbers: Sequence[int], what: str) -> None:
    """Raise UserError that samples of these numbers have `what`, if there are any."""
    if len(numbers) == 1:
        raise UserError(f"sample {numbers[0]} has {what}: leave it out before packing")
    if len(numbers):
        raise UserError(
            f"sample {numbers[0]} and {len(numbers) - 1:,} others have {what}: "
            "leave them out before packing"
        )


def has_real_labels(columns: dict[str, Sequence]) -> bool:
    """Return whether any sample's label, a number, is not whole by its type."""
    for name in LABELS:
        if name in columns:
            return any(np.asarray(v).dtype.kind == "f" for v in columns[name] if np.ndim(v) == 0)
    return False


def lengths_and_ends(column: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens each sample has, and which token its end repeats: both int64.

    `column` has the ids of all samples, and is gone through once. Raises UserError where the ids of
    a sample are no flat list, or empty.
    """
    lengths = []
    ends = []
    for number, ids in enumerate(column):
        lengths.append(length_of(ids, f"sample {number}"))
        ends.append(_repeated_end(ids))
    lengths = np.array(lengths, dtype=np.int64)
    _refuse_samples(np.flatnonzero(lengths == 0), "no tokens")
    return lengths, np.array(ends, dtype=np.int64)


def _repeated_end(ids: Sequence) -> int:
    """Return the token that the last two of a sample are, and the first is not."""
    if len(ids) > 2 and ids[-1] == ids[-2] and ids[-1] != ids[0]:
        return int(ids[-1])
    return NOT_REPEATED


def check_dict(sample, which: str) -> None:
    """Raise UserError for a sample that is no dict."""
    if not isinstance(sample, Mapping):
        raise UserError(f"{which} is a {type(sample).__name__}: give a dict with input_ids")


def length_of(ids, which: str) -> int:
    """Return how many tokens a sample has; raise UserError where its ids are no flat list."""
    try:
        first = np.asarray(ids[:1])
        is_flat = first.ndim == 1
        # An empty list has no type of numbers.
        is_whole = first.size == 0 or first.dtype.kind in "iu"
    except (TypeError, IndexError):  # a number, or a tensor that is not on the CPU
        is_flat = is_whole = False
    if not is_flat or not is_whole:
        raise UserError(
            f"input_ids of {which} are no list of whole numbers: "
            "tokenize by tokenizer(text), without return_tensors"
        )
    return len(ids)


def doubts(column: Sequence, lengths: np.ndarray, ends: np.ndarray) -> list[str]:
    """Return a line on each thing that may be wrong with the samples.

    `column` has their ids, and the others are what `lengths_and_ends` returns for it.
    """
    lines = []
    cut = perhaps_cut(lengths)
    if cut:
        lines.append(
            f"{cut:,} of {len(lengths):,} samples have exactly {lengths.max():,} tokens, "
            "many more than have any number just below: the tokenizer may have cut them"
        )
    padded, token = perhaps_padded(column, lengths, ends)
    if padded:
        lines.append(
            f"{padded:,} of {len(lengths):,} samples end in token {token} repeated: they seem to "
            "be padded, and padding is trained as text: tokenize without padding=..."
        )
    return lines


def perhaps_cut(lengths: np.ndarray) -> int:
    """Return how many samples have the length of the longest, if they seem to have been cut."""
    counts = np.bincount(lengths)
    if lengths.max() < LEAST_CUT or np.count_nonzero(counts) < LEAST_LENGTHS:
        return 0
    at_most = int(counts[-1])
    below = counts[:-1][-CUT_BELOW:].mean()
    many = at_most > CUT_SHARE * len(lengths) and at_most > CUT_TIMES * max(below, 1)
    return at_most if many else 0


def perhaps_padded(column: Sequence, lengths: np.ndarray, ends: np.ndarray) -> tuple[int, int]:
    """Return how many samples end in one token repeated, if they seem to be padded, and the token.

    Padding makes samples of different texts equally long, leaves the longest text as it is, and has
    a token that stands nowhere else than at the end. Returns 0 samples where that is not so.
    """
    none = (0, NOT_REPEATED)
    repeated = ends[ends != NOT_REPEATED]
    if len(repeated) < max(LEAST_PADDED, PADDED_SHARE * len(lengths)):
        return none
    tokens, counts = np.unique(repeated, return_counts=True)
    token = int(tokens[counts.argmax()])
    padded = int(counts.max())
    is_padded = ends == token
    if padded < max(LEAST_PADDED, PADDED_SHARE * len(lengths)):
        return none
    different = len(np.unique(lengths[is_padded]))
    # Two at the least of each length. If all end in it, they are padded to one length or not at
    # all: of tokens that somebody sets at the end of each text there may be two.
    if 2 * different > padded or (is_padded.all() and different > 1):
        return none
    if all(_at_end_alone(token, ids) for ids in column):
        return padded, token
    return none


def _at_end_alone(token: int, ids: Sequence) -> bool:
    """Return whether all places of a token in a sample, if there are any, are its last ones."""
    places = np.flatnonzero(np.asarray(ids) == token)
    return len(places) == 0 or places[0] == len(ids) - len(places)
