"""The lengths of SQuAD v2's training samples without the data: 33 quantiles stand for them."""

from pathlib import Path

import numpy as np

from qa_lib.errors import UserError

# Tokens of a sample in windows of 384 tokens, from the shortest to the longest.
QUANTILES = np.loadtxt(Path(__file__).with_name("squad_lengths.csv"))
SAMPLES = 131_754  # in SQuAD v2's training set, in windows of 384 tokens
# Tokens of a sample that every window repeats: about those of a question and what stands around it.
QUESTION_TOKENS = 15


class SquadLengths:
    """SQuAD v2's training samples by their lengths alone, as far as QUANTILES tell.

    `lengths` (int64 [samples]) has the tokens of each sample. Packing reads nothing else of them.
    """

    def __init__(self, max_length: int, stride: int):
        """Cut the samples into windows of at most `max_length` tokens that share `stride`.

        Raises UserError for windows that a question and the shared tokens fill.
        """
        if max_length <= QUESTION_TOKENS + stride:
            raise UserError(
                f"{max_length} tokens are too few for a question and the {stride} that "
                "windows share"
            )
        rank_of_sample = np.linspace(0, 1, SAMPLES)
        rank_of_quantile = np.linspace(0, 1, len(QUANTILES))
        whole = np.interp(rank_of_sample, rank_of_quantile, QUANTILES).round().astype(int)
        # A sample that is too long becomes full windows and a rest. Each full window moves on by
        # the tokens that it does not share.
        new_tokens = max_length - QUESTION_TOKENS - stride
        excess = np.maximum(0, whole - max_length)
        full_windows = -(-excess // new_tokens)  # rounded up
        rests = whole - full_windows * new_tokens
        full = np.full(full_windows.sum(), max_length)
        self.lengths = np.concatenate([rests, full])

    def __len__(self) -> int:
        return len(self.lengths)
