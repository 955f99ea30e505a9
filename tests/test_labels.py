"""Labels are the answers, whatever stands at a gold answer's edges.

A model that answers each window by its label therefore scores 100.

The thousands of generated golds are slow: `pytest tests/test_labels.py -m slow`.
"""

import hashlib
import itertools
import random
import unicodedata
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import SentencePieceUnigramTokenizer, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import BertTokenizer, PreTrainedTokenizerFast

from qa_lib.data.examples import Example
from qa_lib.data.labels import TokenSearch, answer_limit, answer_positions, gold_notes
from qa_lib.data.squad import open_source
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.data.windows import Samples
from qa_lib.score.decode import decode, text_edges
from qa_lib.score.f1 import score
from tests.conftest import slow
from tests.material import real_squad, trained_tokenizer
from tests.test_windows import Given, build_samples, built
from tests.tiny import byte_level_tokenizer, modern_tokenizer, mpnet_tokenizer

TEXT = "The ferry left Port Amber at nine. Captain Ilse steered it north, past Dalmé and the café."
BLANKS = [" ", "\n", "\t", "\r\n", "  ", "\u00a0", "\u2003", "\u3000", " \n ", "\x1f"]
# What a vocabulary may drop: zero-width characters, marks of direction, a soft hyphen, joiners,
# variation selectors.
UNSEEN = ["\u200b", "\u200f", "\u200e", "\u00ad", "\ufeff", "\u200d", "\u200c", "\u2060", "\ufe0f"]
UNSEEN += ["\u202b", "\u180e", "\u200b\u200b", "\u200f\u200d"]
MARKS = ["\u0301", "\u0308\u0323", "\u20dd"]
# Words of several scripts, in both normal forms, also with marks on their last or only letters, and
# joined emoji.
WORDS = [
    "Ilse",
    "nine",
    "1,233",
    "Amber's",
    "café",
    "cafe\u0301",
    "Dalmé",
    "Dalme\u0301",
    "İstanbul",
]
WORDS += ["अपने", "है", "में", "שָׁלוֹם", "كِتَابٌ", "ที่นี่"]
WORDS += ["Tiếng", "각", "\u1100\u1161\u11a8", "日本", "½"]
WORDS += [
    "👨\u200d👩\u200d👧",
    "✈\ufe0f",
    "🚢🚢",
    "U.S.",
    "(two)",
    "e\u0301clairs",
    "n\u0303",
    "ﬁn",
]


def sentencepiece(texts) -> PreTrainedTokenizerFast:
    """Return a Unigram tokenizer, to which blanks are letters of words."""
    learner = SentencePieceUnigramTokenizer()
    special = ["<pad>", "<unk>", "<s>", "</s>"]
    learner.train_from_iterator(
        texts, vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    inner = learner._tokenizer
    ends = [("<s>", 2), ("</s>", 3)]
    inner.post_processor = TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", ends)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=inputs, **names)


def cased(texts) -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer that keeps capitals and marks."""
    made = trained_tokenizer(texts, 600)
    made.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    return made


def mpnets(texts):
    """Return MPNet's tokenizer, which splits as BERT's does and joins as RoBERTa's."""
    return mpnet_tokenizer(sorted(trained_tokenizer(texts, 600).get_vocab()))


KINDS = {
    "uncased": trained_tokenizer,
    "cased": cased,
    "RoBERTa": byte_level_tokenizer,
    "ModernBERT": modern_tokenizer,
    "SentencePiece": sentencepiece,
    "MPNet": mpnets,
}


@cache
def tokenizer_of(kind: str):
    return KINDS[kind]([f"{TEXT} {word}" for word in WORDS] * 2)


every_kind = pytest.mark.parametrize("kind", KINDS)


def perfect(samples: Samples, examples: list[Example], **options) -> dict[str, str]:
    """Return the answers of a model that answers each window by its label."""
    rows = torch.arange(len(samples))
    start, end = torch.zeros(2, len(samples), int(samples.lengths.max()))
    start[rows, torch.tensor(samples.start_positions)] = 10
    end[rows, torch.tensor(samples.end_positions)] = 10
    return decode(samples, examples, rows, start, end, **options).predictions


def label_texts(samples: Samples, examples: list[Example]) -> list[str]:
    """Return the text of each question's label, or "" where it has none."""
    texts = [""] * len(examples)
    rows = np.flatnonzero(samples.start_positions)
    begins, ends = samples.characters(
        rows, samples.start_positions[rows], samples.end_positions[rows]
    )
    for row, begin, end in zip(rows, begins, ends, strict=True):
        number = samples.example[row]
        texts[number] = examples[number].context[begin:end]
    return texts


def asked(context: str, gold: str, start: int | None = None) -> Example:
    """Return a question whose answer is `gold`, at `start` or where it first stands."""
    start = context.index(gold) if start is None else start
    assert context.startswith(gold, start)
    return Example(f"{start} {gold!r} {context!r}", "", "who came?", context, ((gold, start),))


def placed(gold: str) -> list[Example]:
    """Return questions whose answer is at the beginning, in the middle and at the end of a text."""
    return [
        asked(f"{gold} came at noon.", gold, 0),
        asked(f"The pilot was {gold} at noon.", gold),
        asked(f"The pilot was {gold}", gold),
    ]


def around(edge: str, word: str) -> list[str]:
    """Return the word with that edge before it, after it, and on both sides."""
    return [edge + word, word + edge, edge + word + edge]


def scored(examples: list[Example], kind: str, **lengths) -> float:
    """Return the exact match of a perfect model with a tokenizer of that kind."""
    samples = built(examples, tokenizer_of(kind), **{"max_length": 60, "stride": 20} | lengths)
    return score(examples, perfect(samples, examples))["exact"]


@every_kind
def test_blanks_at_a_golds_edges_are_no_part_of_the_label(kind):
    examples = []
    for blank in BLANKS:
        for gold in around(blank, "Ilse"):
            examples += placed(gold)
    samples = built(examples, tokenizer_of(kind))
    assert {*label_texts(samples, examples)} == {"Ilse"}
    assert {*perfect(samples, examples).values()} == {"Ilse"}


@every_kind
@pytest.mark.parametrize("edge", [*UNSEEN, *MARKS], ids=ascii)
def test_characters_that_a_vocabulary_may_drop_move_no_label_and_are_in_the_text(kind, edge):
    examples = placed(f"Ilse{edge}") + placed(f"the Ilse{edge}")
    if edge not in MARKS:  # which belong to what is before them
        examples += placed(f"{edge}Ilse") + placed(f"{edge}Ilse{edge}")
    found = label_texts(built(examples, tokenizer_of(kind)), examples)
    assert {text.removeprefix("the ").strip(edge) for text in found} == {"Ilse"}
    assert scored(examples, kind) == 100


@every_kind
@pytest.mark.parametrize("word", WORDS, ids=ascii)
def test_words_of_many_scripts_are_labelled_whole(kind, word):
    assert scored(placed(word) + placed(f"the {word} of {word}"), kind) == 100


@every_kind
def test_a_clean_gold_beside_odd_characters_keeps_its_label(kind):
    for edge in UNSEEN:
        context = f"The pilot was {edge}Ilse{edge} at noon."
        examples = [asked(context, "Ilse"), asked(context, "noon")]
        samples = built(examples, tokenizer_of(kind))
        assert samples.held.all()
        labels = label_texts(samples, examples)
        assert [text.strip(edge) for text in labels] == ["Ilse", "noon"]
        assert perfect(samples, examples)[examples[1].id] == "noon"


@every_kind
def test_a_gold_inside_a_token_is_labelled_by_that_token(kind):
    examples = [asked("It weighs 1789kg today.", gold) for gold in ("789", "17", "kg", "9k")]
    samples = built(examples, tokenizer_of(kind))
    for text, example in zip(label_texts(samples, examples), examples, strict=True):
        assert example.answers[0][0] in text
        assert text in "1789kg"


@every_kind
def test_the_first_gold_that_is_not_blank_is_the_label(kind):
    golds = ((" ", 3), ("Ilse", 9))
    example = Example("q", "", "who?", "The pilotIlse.", golds)
    assert "Ilse" in label_texts(built([example], tokenizer_of(kind)), [example])[0]


def test_golds_without_a_token_are_counted():
    examples = [asked("It was  Ilse.", " "), asked("It was \u200b so.", "\u200b")]
    samples = built([*examples, *placed("Ilse")], tokenizer_of("uncased"))
    assert samples.gold_tokens[:2].tolist() == [-1, -1]
    (note,) = gold_notes(samples, "train.json", 30)
    assert note.startswith("train.json: 2 of 5 gold answers have no token (")


def test_golds_that_no_window_holds_are_counted():
    words = [f"w{i}" for i in range(60)]
    context = " ".join(words)
    examples = [asked(context, " ".join(words[10:50])), asked(context, "w3 w4"), *placed("Ilse")]
    examples.append(Example("none", "", "why?", context))
    samples = built(examples, tokenizer_of("uncased"), 40, 8)
    assert samples.held.tolist() == [False, True, True, True, True, False]
    assert not samples.start_positions[samples.example == 0].any()
    (note,) = gold_notes(samples, "train.json", 1000)
    assert note.startswith("train.json: 1 of 5 gold answers are whole in no window of 40 tokens: ")
    assert gold_notes(built(examples[1:], tokenizer_of("uncased")), "x", 30) == []


def test_golds_longer_than_an_answer_may_be_are_counted_and_the_rest_are_given():
    words = ["nine"] * 60
    context = " ".join(words)
    examples = [asked(context, " ".join(words[:length])) for length in (1, 30, 31, 40)]
    samples = built(examples, tokenizer_of("uncased"))
    (each,) = {n // m for n, m in zip(samples.gold_tokens, (1, 30, 31, 40), strict=True)}
    limit = int(30 * each)
    (note,) = gold_notes(samples, "dev.json", limit)
    assert note.startswith(f"dev.json: 2 of 4 gold answers are longer than {limit} tokens and can")
    golds = [example.answers[0][0] for example in examples]
    given = list(perfect(samples, examples, max_answer_length=limit).values())
    assert given[:2] == golds[:2]
    assert given[2] != golds[2]
    assert given[3] != golds[3]
    longest = answer_limit(samples, limit)
    assert longest == samples.gold_tokens.max()
    assert score(examples, perfect(samples, examples, max_answer_length=longest))["exact"] == 100


def test_an_answers_limit_follows_all_but_the_longest_thousandth_that_a_window_holds():
    words = ["nine"] * 300
    context = " ".join(words)
    tokenizer = tokenizer_of("cased")
    each = len(tokenizer("nine", add_special_tokens=False)["input_ids"])
    short = [asked(context, " ".join(words[:50])) for _ in range(1001)]
    few = built([asked(context, "nine")] * 2, tokenizer)
    assert answer_limit(few, 30) == 30
    assert answer_limit(built(short, tokenizer), 30) == 50 * each
    outlier = asked(context, " ".join(words[:70]))
    assert answer_limit(built([*short, outlier], tokenizer), 30) == 50 * each
    assert answer_limit(built([*short[:50], outlier], tokenizer), 30) == 70 * each
    cut = built([*short[:50], asked(context, context)], tokenizer, 200, 60)
    assert answer_limit(cut, 30) == 50 * each
    unlabelled = Example("q", "", "who?", context)
    assert answer_limit(built([unlabelled], tokenizer), 30) == 30


def test_an_uncovered_character_belongs_to_the_token_before_it_or_else_to_the_one_after():
    context = "\u200ba\u0301b \u200bc\u200b \u200b d"
    offsets = np.array([(1, 2), (3, 4), (6, 7), (11, 12)])
    first, last = text_edges(context, offsets)
    assert [first[begin] for begin in (1, 3, 6, 11)] == [0, 3, 5, 11]
    assert [last[end] for end in (2, 4, 7, 12)] == [3, 4, 8, 12]
    assert text_edges("a b\n", np.array([(0, 1), (1, 1), (2, 3)])) is None


def test_a_window_without_tokens_of_its_paragraph_holds_no_answer():
    spans, offsets = np.array([(1, 3)] * 2), np.array([(0, 5)])
    found = answer_positions(spans, offsets, begins=np.zeros(2, int), lengths=np.array([0, 1]))
    assert found.tolist() == [[-1, 0], [-1, 0]]


def test_a_token_without_characters_is_no_token_of_a_text():
    search = TokenSearch(np.array([(0, 1), (3, 3), (5, 6)]), np.array([0, 3]))
    has_tokens, _, _ = search.covered(np.zeros(2, int), np.array([2, 2]), np.array([4, 6]))
    assert has_tokens.tolist() == [False, True]


# The windows and labels of clean golds are what they were before those with odd edges were labelled
# rightly.


def characters() -> BertTokenizer:
    """Return a tokenizer of characters, whose vocabulary is the same wherever it is made."""
    letters = sorted({*unicodedata.normalize("NFD", TEXT.lower())} - {" ", "\u0301"})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)})


def clean_golds() -> list[Example]:
    """Return a question for each one, two and five words of TEXT that follow one another."""
    words = TEXT.split()
    examples = []
    for first, length in itertools.product(range(len(words)), (1, 2, 5)):
        gold = " ".join(words[first : first + length]).strip(".,")
        examples.append(asked(TEXT, gold))
    return examples


# Digests of the arrays of samples, by data.
PINNED = {
    "synthetic": "020597f5cbf5bf56",
    "characters": "8e6f8622f2f5ddc4",
}
ARRAYS = [
    "tokens",
    "offsets",
    "starts",
    "example",
    "context",
    "start_positions",
    "end_positions",
]


@pytest.mark.parametrize("name", PINNED)
def test_windows_and_labels_of_clean_golds_are_bit_for_bit_what_they_were(name):
    if name == "synthetic":
        source = open_source("synthetic:200", "train")
        tokenizer = build_tokenizer("tiny")
    else:
        source = Given(clean_golds())
        tokenizer = characters()
    samples = build_samples(source, tokenizer, 48, 16, cache=False)
    digest = hashlib.sha256()
    for array in ARRAYS:
        digest.update(np.ascontiguousarray(getattr(samples, array)).tobytes())
    assert digest.hexdigest()[:16] == PINNED[name]
    assert samples.start_positions.any()


def reference_label(offsets, answers) -> tuple[int, int]:
    """Return a window's first and last labelled token, or (-1, -1), as transformers' run_qa does.

    The tokens of the window's context have these offsets.
    """
    if not answers:
        return -1, -1
    text, begin = answers[0]
    if not (offsets[0][0] <= begin and offsets[-1][1] >= begin + len(text)):
        return -1, -1
    first = max(i for i, (place, _) in enumerate(offsets) if place <= begin)
    last = min(i for i, (_, place) in enumerate(offsets) if place >= begin + len(text))
    return first, last


@every_kind
@pytest.mark.parametrize(
    ("split", "every"), [("validation", 8), slow("validation", 1), slow("train", 1)]
)
def test_the_labels_of_squad_are_those_of_the_reference_script(kind, split, every):
    """One gold answer of the training set is an exception.

    Where a normaliser puts letters together, no token has the last letter of its last syllable, and
    the script's label goes on to the next word.
    """
    examples = real_squad(split)[::every]
    odd = set()
    tokenizer = KINDS[kind]([example.context for example in examples[:4000:8]])
    samples = built(examples, tokenizer, 200, 64)
    for row in range(len(samples)):
        first, stop = samples.context[row]
        begin = samples.starts[row]
        offsets = samples.offsets[begin + first : begin + stop].tolist()
        wanted = reference_label(offsets, examples[samples.example[row]].answers)
        wanted = (0, 0) if wanted[0] < 0 else (first + wanted[0], first + wanted[1])
        if (samples.start_positions[row], samples.end_positions[row]) != wanted:
            (text, start), *_ = examples[samples.example[row]].answers
            assert not any(begin < start + len(text) <= end for begin, end in offsets)
            odd.add(examples[samples.example[row]].id)
    assert len(odd) <= (kind in ("ModernBERT", "SentencePiece"))


# Thousands of golds, put together at random.


def generated(seed: int) -> Example:
    """Return a question whose gold answer has odd characters at its edges, in random words."""
    draw = random.Random(seed)

    def some(most: int) -> str:
        parts = []
        for _ in range(draw.randint(1, most)):
            parts += [draw.choice(WORDS), draw.choice([*BLANKS, ", ", ". ", "; "])]
        return "".join(parts[:-1])

    gold = some(4)
    if draw.random() < 0.5:
        gold = draw.choice(UNSEEN) + gold
    if draw.random() < 0.5:
        gold += draw.choice([*UNSEEN, *MARKS])
    if draw.random() < 0.5:
        gold = draw.choice(BLANKS) + gold
    if draw.random() < 0.5:
        gold += draw.choice(BLANKS)
    before = f"{some(20)} " if draw.random() < 0.7 else ""
    after = f" {some(20)}" if draw.random() < 0.7 else ""
    return Example(str(seed), "", draw.choice(WORDS), before + gold + after, ((gold, len(before)),))


@every_kind
@pytest.mark.parametrize("count", [200, slow(4000)])
def test_a_perfect_model_scores_100_on_generated_golds(kind, count):
    examples = [generated(seed) for seed in range(count)]
    samples = built(examples, tokenizer_of(kind), 256, 120)
    assert samples.held.all()
    predictions = perfect(samples, examples, max_answer_length=256)
    wrong = []
    for example in examples:
        if not score([example], predictions)["exact"]:
            wrong.append(example.answers[0][0])
    assert wrong == []
