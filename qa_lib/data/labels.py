"""Labels: which tokens of a window are the gold answer.

A window's label is the first and the last token of the gold answer. Characters at an answer's edges
that no token has (an uncased vocabulary drops marks, every WordPiece one drops U+200B and its like)
and blanks there move neither: the label is about the tokens between them. A gold answer that no
window holds whole leaves all windows of its question without an answer, as in the reference script
(run_qa of transformers). These windows are kept, since leaving them out would give SQuAD itself
other windows at short lengths; `gold_notes` counts them for the run's output, and says what to do.
"""

from dataclasses import dataclass

import numpy as np

from qa_lib.data.examples import Example
from qa_lib.data.tokenize import Pieces, ranges

TOKENLESS = -1  # stands in `Golds.tokens` for an answer of which no token has any character
ROW_KEY = 1 << 32  # more characters than a text has: see TokenSearch
WINDOWS_TOGETHER = 1_000  # windows that are labelled together: few enough for the processor's cache


@dataclass
class Golds:
    """The gold answer of each example: the first of its answers that is not blank."""

    # int64 [examples, 2]: the first character of the answer's tokens in the paragraph, and one past
    # the last; 0 and 0 where there is no answer, or none that tokens have
    spans: np.ndarray
    # int32 [examples]: tokens of the answer; 0 where there is none, TOKENLESS where it has none
    tokens: np.ndarray


class TokenSearch:
    """Finds tokens by their characters, in many rows of tokens at once.

    A row is a text, or a window's part of one. A character's key is its number plus ROW_KEY times
    the row's, so that keys rise from row to row, and one search over all tokens serves all rows.

    `offsets` int [T, 2] are the first character of each token and one past its last; row i has the
    tokens from starts[i] to starts[i + 1].
    """

    def __init__(self, offsets: np.ndarray, starts: np.ndarray):
        row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        self.starts = starts
        self.begins = row * ROW_KEY + offsets[:, 0]
        self.ends = row * ROW_KEY + offsets[:, 1]

    def first_and_last(
        self, rows: np.ndarray, begin: np.ndarray, finish: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which tokens of `rows` are first and last of the text from `begin` to `finish`.

        All are int [n]; tokens are counted from their row's first. The reference script takes the
        same: the last token that begins no later than the text, and the first that ends no earlier.
        Where a tokenizer's offsets step back, the search ends at the first token beyond the text.

        A character may be several tokens, of bytes or of a syllable's letters. Where the text is
        that character alone, the two searches end at the last and at the first of its tokens, and
        no answer can be given in that order: here it is all of them.
        """
        reached = np.maximum.accumulate(self.begins)
        remaining = np.minimum.accumulate(self.ends[::-1])[::-1]
        last_to_begin = np.searchsorted(reached, rows * ROW_KEY + begin, side="right") - 1
        first_to_end = np.searchsorted(remaining, rows * ROW_KEY + finish, side="left")
        first = np.minimum(last_to_begin, first_to_end) - self.starts[rows]
        last = np.maximum(last_to_begin, first_to_end) - self.starts[rows]
        return first, last

    def covered(
        self, rows: np.ndarray, begin: np.ndarray, finish: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return which texts of `rows`, from `begin` to `finish`, have tokens, and these tokens'
        characters.

        The arguments are int [n]. The results are bool [n], and int64 [n] twice: the first
        character of the tokens that share any with the text, and one past the last, which mean
        nothing where there is no such token.
        """
        begin_key = rows * ROW_KEY + begin
        finish_key = rows * ROW_KEY + finish
        # Offsets may step back, so that these bounds hold more than the tokens that are looked for.
        latest_end = np.maximum.accumulate(self.ends)
        earliest_begin = np.minimum.accumulate(self.begins[::-1])[::-1]
        low = np.searchsorted(latest_end, begin_key, side="right")
        high = np.searchsorted(earliest_begin, finish_key, side="left")
        count = np.maximum(high - low, 0)

        # All pairs of a text and a token within its bounds.
        token = ranges(low, count)
        text = np.repeat(np.arange(len(rows)), count)
        shares = self.begins[token] < finish_key[text]
        shares &= self.ends[token] > begin_key[text]
        shares &= self.ends[token] > self.begins[token]
        token = token[shares]
        text = text[shares]

        first = finish_key.copy()
        np.minimum.at(first, text, self.begins[token])
        past = begin_key.copy()
        np.maximum.at(past, text, self.ends[token])
        has_tokens = np.bincount(text, minlength=len(rows)) > 0
        return has_tokens, first - rows * ROW_KEY, past - rows * ROW_KEY


def find_golds(examples: list[Example], pieces: Pieces, context: np.ndarray) -> Golds:
    """Find the gold answer of each example in the tokens of its paragraph.

    `context` int [examples] is which text of `pieces` an example's paragraph is. Blanks at an
    answer's edges are no part of it: a byte-level vocabulary has tokens for them.
    """
    numbers, begins, finishes = [], [], []
    for number, example in enumerate(examples):
        if example.answers:
            text, start = _first_filled(example.answers)
            numbers.append(number)
            begins.append(start + len(text) - len(text.lstrip()))
            finishes.append(start + len(text.rstrip()))
    numbers = np.array(numbers, np.int64)
    begins = np.array(begins, np.int64)
    finishes = np.array(finishes, np.int64)

    spans = np.zeros((len(examples), 2), np.int64)
    tokens = np.zeros(len(examples), np.int32)
    search = TokenSearch(pieces.offsets, pieces.starts)
    has_tokens, first, past = search.covered(context[numbers], begins, finishes)
    has_tokens &= begins < finishes
    tokens[numbers[~has_tokens]] = TOKENLESS

    numbers = numbers[has_tokens]
    begin = np.maximum(begins, first)[has_tokens]
    finish = np.minimum(finishes, past)[has_tokens]
    spans[numbers, 0] = begin
    spans[numbers, 1] = finish
    first_token, last_token = search.first_and_last(context[numbers], begin, finish)
    tokens[numbers] = last_token - first_token + 1
    return Golds(spans, tokens)


def _first_filled(answers: tuple[tuple[str, int], ...]) -> tuple[str, int]:
    """Return the first answer that is not blank, or the first where all are blank."""
    for answer in answers:
        if answer[0].strip():
            return answer
    return answers[0]


def answer_positions(
    spans: np.ndarray, offsets: np.ndarray, begins: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return the first and last token of the answer in each window's part of its paragraph.

    Window i has the `lengths[i]` tokens from begins[i] on whose characters are `offsets`, and the
    answer is the characters `spans[i]` of its paragraph, 0 and 0 for none. The result is int64
    [2, n], counted from the window's first token of the paragraph, -1 and -1 where the window does
    not hold the answer whole.
    """
    positions = np.full((2, len(begins)), -1, np.int64)
    asked = np.flatnonzero((spans[:, 1] > spans[:, 0]) & (lengths > 0))
    first_character = offsets[begins[asked], 0]
    past_character = offsets[begins[asked] + lengths[asked] - 1, 1]
    holds = (first_character <= spans[asked, 0]) & (past_character >= spans[asked, 1])
    held = asked[holds]
    for first in range(0, len(held), WINDOWS_TOGETHER):
        rows = held[first : first + WINDOWS_TOGETHER]
        tokens = ranges(begins[rows], lengths[rows])
        starts = np.concatenate([[0], np.cumsum(lengths[rows])])
        search = TokenSearch(offsets[tokens], starts)
        begin, finish = spans[rows].T
        positions[:, rows] = search.first_and_last(np.arange(len(rows)), begin, finish)
    return positions


def answer_limit(samples, least: int) -> int:
    """Return how many tokens an answer needs to be given as long as the gold answers are.

    All but the longest 0.1 % of the gold answers that a window of `samples` (data/windows.py) holds
    have no more; it is at least `least`. A gold answer that is a paragraph by mistake does not
    count.
    """
    lengths = samples.gold_tokens[samples.held]
    if not len(lengths):
        return least
    return max(least, int(np.quantile(lengths, 0.999, method="higher")))


def gold_notes(samples, name: str, limit: int) -> list[str]:
    """Return a sentence for each reason for which gold answers of the file `name` cannot be given.

    The reasons, each with its count: no token has any of an answer's characters, no window holds
    the answer whole, or it has more than `limit` tokens.
    """
    golds = int((samples.gold_tokens != 0).sum())
    tokenless = int((samples.gold_tokens == TOKENLESS).sum())
    cut = int((~samples.held & (samples.gold_tokens > 0)).sum())
    long = int((samples.gold_tokens > limit).sum())
    notes = []
    if tokenless:
        notes.append(
            f"{name}: {tokenless} of {golds} gold answers have no token (they are blank, or of "
            "characters that the vocabulary drops): their questions count as unanswerable in "
            "training, and cannot be answered"
        )
    if cut:
        notes.append(
            f"{name}: {cut} of {golds} gold answers are whole in no window of "
            f"{samples.max_length} tokens: their questions count as unanswerable in training, and "
            "cannot be answered; a larger --max-length holds more"
        )
    if long:
        notes.append(
            f"{name}: {long} of {golds} gold answers are longer than {limit} tokens and cannot be "
            "given; --max-answer-length allows more"
        )
    return notes
