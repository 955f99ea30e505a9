"""Windows are equal, one by one, to those of the tokenizer's own overflow.

Their labels are those that the search of the reference recipe finds.
"""

import itertools
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from qa_lib.data.examples import Example
from qa_lib.data.squad import open_source
from qa_lib.data.windows import Samples, build_samples, content_sha256
from tests.material import (
    best_of,
    document,
    question,
    real_squad,
    real_tokenizer,
    refused,
    trained_tokenizer,
    write,
)
from tests.plain import overflow, plain_positions, plain_span
from tests.tiny import byte_level_tokenizer, modern_tokenizer, mpnet_tokenizer

TEXT = "The river Rhine, 1,233 km long, flows north through naïve cafés and e\u0301clairs; "
TEXT += "its mouth lies near Rotterdam. "
TEXT += "日本語の川 and ½ of São Paulo 🙂👩‍👩‍👧 drink   from\tit.\n\nWhere? There!"


class Given:
    """A source of ready examples."""

    name = "given.json"
    split = "train"
    labelled = True
    sha256 = "0"

    def __init__(self, examples):
        self.examples = examples


@pytest.fixture(scope="module")
def small():
    return trained_tokenizer([TEXT] * 3, 300)


def built(examples, tokenizer, max_length=384, stride=128) -> Samples:
    """Return the samples of `examples`, which are not cached."""
    return build_samples(Given(examples), tokenizer, max_length, stride, cache=False)


def check(examples: list[Example], tokenizer, max_length: int, stride: int) -> Samples:
    """Return the samples of `examples`, after a comparison of all their arrays.

    They are compared with the tokenizer's own overflow and with a plain search for the label.
    """
    samples = built(examples, tokenizer, max_length, stride)
    questions = [example.question.lstrip() for example in examples]
    contexts = [example.context for example in examples]
    wanted = overflow(tokenizer, questions, contexts, max_length, stride)
    offsets = [
        without_blanks(wanted, window, questions, contexts)
        for window in range(len(wanted["input_ids"]))
    ]
    check_tokens(samples, wanted, offsets, max_length)
    check_token_types(samples, wanted, max_length)
    check_labels(samples, wanted, offsets, examples)
    return samples


def check_tokens(samples: Samples, wanted, offsets: list, max_length: int) -> None:
    assert samples.lengths.tolist() == [len(ids) for ids in wanted["input_ids"]]
    assert samples.lengths.max() <= max_length
    assert np.array_equal(samples.tokens, np.concatenate(wanted["input_ids"]))
    assert np.array_equal(samples.example, wanted["overflow_to_sample_mapping"])
    assert np.array_equal(samples.offsets, np.concatenate(offsets))


def check_token_types(samples: Samples, wanted, max_length: int) -> None:
    batch = samples.batch(np.arange(len(samples)), max_length)
    if "token_type_ids" in batch:
        types = batch["token_type_ids"][np.arange(max_length) < samples.lengths[:, None]]
        assert np.array_equal(types, np.concatenate(wanted["token_type_ids"]))
    else:  # models take all types for 0 where there are none
        assert not any(map(any, wanted.get("token_type_ids", [])))


def check_labels(samples: Samples, wanted, offsets: list, examples: list[Example]) -> None:
    of_context = {number: [] for number in range(len(examples))}  # offsets, by example
    for window, number in enumerate(samples.example.tolist()):
        first, stop = samples.context[window]
        of_context[number] += offsets[window][first:stop]
    for window, (first, stop) in enumerate(samples.context.tolist()):
        origins = wanted.sequence_ids(window)
        assert [i for i, text in enumerate(origins) if text == 1] == list(range(first, stop))
        number = samples.example[window]
        span = plain_span(of_context[number], examples[number].answers)
        start, end = plain_positions(offsets[window], first, stop - 1, span)
        assert samples.start_positions[window] == start
        assert samples.end_positions[window] == end


def without_blanks(
    wanted, window: int, questions: list[str], contexts: list[str]
) -> list[tuple[int, int]]:
    """Return the offsets of a window's tokens, without a blank that a longer token begins with."""
    number = wanted["overflow_to_sample_mapping"][window]
    texts = {None: "", 0: questions[number], 1: contexts[number]}
    places = zip(wanted["offset_mapping"][window], wanted.sequence_ids(window), strict=True)
    found = []
    for (begin, end), origin in places:
        has_blank = end - begin > 1 and texts[origin][begin] == " "
        found.append((begin + has_blank, end))
    return found


@pytest.mark.parametrize(("max_length", "stride"), [(384, 128), (128, 40)])
def test_all_of_the_real_data_with_the_real_vocabulary(max_length, stride):
    tokenizer = real_tokenizer()
    for split in ("train", "validation"):
        check(real_squad(split), tokenizer, max_length, stride)


@pytest.mark.slow
def test_real_data_with_a_vocabulary_of_its_own():
    examples = real_squad("validation")
    samples = check(
        examples, trained_tokenizer({example.context for example in examples}, 4000), 160, 48
    )
    answered = sum(not example.impossible for example in examples)
    assert len(set(samples.example[samples.start_positions > 0].tolist())) > 0.99 * answered


# Odd texts.
EDGES = ["", " ", "\t\n", "a  b", "\x00", "\u00a0", "\u200b", "\u2028z", "\ufffd", "'", "--"]
EDGES += ["\u0301", "e\u0301", " \u0301x", "a\u0301 \u0301b", "naïve", "İ", "ΑΣ", "ﬁn", "½"]
EDGES += ["日本", "각", "🙂", "[SEP]", "x[MASK]y", "wwwwww" * 30]


def edges(longest: int) -> list[Example]:
    """Return odd questions over odd contexts, and answers at both edges of every window.

    The questions, some blank or empty, are shorter than `longest`.
    """
    pairs = itertools.product(enumerate(EDGES), enumerate(EDGES))
    examples = [
        Example(f"e{i}{j}", "", q, f"{c} {c}") for (i, q), (j, c) in pairs if len(q) < longest
    ]
    for start, length in itertools.product(range(0, len(TEXT) - 8), (1, 3, 8)):
        answers = ((TEXT[start : start + length], start),)
        examples.append(Example(f"a{start}-{length}", "", "  Where does it", TEXT, answers))
    return examples


@pytest.mark.parametrize("max_length", [24, 40])
def test_edge_cases(small, max_length):
    assert len(check(edges(20), small, max_length, 9)) > len(edges(20))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_text(small, data):
    pieces = st.sampled_from(EDGES) | st.text(max_size=8) | st.sampled_from(TEXT.split())
    text = (
        st.lists(pieces, max_size=30)
        .map(" ".join)
        .filter(lambda t: t.encode("utf-8", "ignore").decode() == t)
    )
    context = data.draw(text)
    asked = data.draw(text)
    start = data.draw(st.integers(0, max(0, len(context) - 1)))
    answers = ((context[start : start + data.draw(st.integers(1, 9))], start),) if context else ()
    stride = data.draw(st.integers(0, 12))
    example = Example("q", "", asked[:40], context, answers)
    room = 60 - 3 - len(small(example.question.lstrip(), add_special_tokens=False)["input_ids"])
    if room > stride:
        check([example], small, 60, stride)


def test_tokens_that_share_a_character_may_be_parted_by_a_windows_edge():
    """A Hangul syllable is taken apart into letters, which are tokens with the same offset."""
    tokenizer = trained_tokenizer(["각흙가나각 x"], 1)
    context = "각흙가나" * 9
    assert len(tokenizer(context, add_special_tokens=False)["input_ids"]) > 2 * len(context)
    examples = [
        Example(f"{i}-{n}", "", "x", context, ((context[i : i + n], i),))
        for i in range(33)
        for n in (1, 2, 3)
    ]
    for max_length in range(16, 22):
        check(examples, tokenizer, max_length, 7)


ROOM = [
    (30, 1, True),
    (17, 1, True),
    (16, 1, False),
    (17, 0, False),
    (16, 2, True),
    (13, 4, False),
    (13, 5, True),
]


@pytest.mark.parametrize(("words", "context", "crowded"), ROOM)
def test_a_question_that_leaves_no_room_is_refused_where_the_tokenizer_refuses(
    small, words, context, crowded
):
    """20 tokens with stride 4: 17 of them for question and context."""
    example = Example("q7", "Rivers", " ".join(["river"] * words), " ".join(["river"] * context))
    if not crowded:
        check([example], small, 20, 4)
        return
    wanted = r"^given\.json: article 'Rivers', question 'q7': its \d+ tokens leave \d+ of 20 .* "
    wanted += r"stride 4 \(1 such"
    refused(wanted, built, [Example("ok", "", "river", "river"), example], small, 20, 4)
    with pytest.raises(BaseException):  # noqa: B017 - a panic of the tokenizer's is no Exception
        if len(overflow(small, [example.question], [example.context], 20, 4)["input_ids"][0]) > 20:
            raise ValueError("transformers only warns where it cannot cut")


# Batches.

ROWS = np.array([31, 0, 5, 5])


@pytest.fixture
def samples(small):
    """Samples of questions over contexts of growing length."""
    gold = (TEXT[4:9], 4)
    examples = []
    for number in range(30):
        answers = (gold,) if number > 1 else ()
        examples.append(Example(str(number), "", "where", TEXT[: 7 * number], answers))
    return built(examples, small, 30, 10)


def test_a_batch_has_the_tokens_and_labels_of_its_rows_padded_to_a_length(samples, small):
    batch = samples.batch(ROWS, 56)
    for place, row in enumerate(ROWS):
        length = samples.lengths[row]
        first, stop = samples.context[row]
        ids = samples.tokens[samples.starts[row] : samples.starts[row + 1]]
        padding = 56 - length
        of_context = stop + 1 - first  # with the special token at its end
        types = [0] * first + [1] * of_context + [0] * padding
        assert batch["input_ids"][place].tolist() == [*ids, *[small.pad_token_id] * padding]
        assert batch["attention_mask"][place].tolist() == [1] * length + [0] * padding
        assert batch["token_type_ids"][place].tolist() == types
        assert batch["start_positions"][place] == samples.start_positions[row]
        assert batch["end_positions"][place] == samples.end_positions[row]


def test_all_arrays_of_a_batch_are_of_64_bit_integers(samples):
    types = {name: array.dtype for name, array in samples.batch(ROWS, 56).items()}
    assert types == {
        "input_ids": np.int64,
        "attention_mask": np.int64,
        "token_type_ids": np.int64,
        "start_positions": np.int64,
        "end_positions": np.int64,
    }


def test_a_batch_that_is_shorter_than_one_of_its_rows_is_refused(samples):
    with pytest.raises(ValueError, match="does not fit"):
        samples.batch(ROWS, int(samples.lengths[ROWS].max()) - 1)


def test_a_batch_of_no_rows_is_empty(samples):
    assert samples.batch(ROWS[:0], 8)["input_ids"].shape == (0, 8)


def test_what_a_tokenizers_file_says_of_truncation_and_padding_does_not_count(small):
    small.backend_tokenizer.enable_truncation(9, stride=2)
    small.backend_tokenizer.enable_padding(length=11)
    assert built([Example("q", "", "where", TEXT)], small, 200, 10).lengths[0] > 11


@pytest.mark.parametrize("change", ["left", "right", "phrase", "normalizer", "splitter"])
def test_tokenizers_that_cannot_be_cut_at_blanks_give_the_same_as_their_own_overflow(change):
    """With an added token that swallows blanks, another normaliser or another splitter, the tokens
    of a word depend on its neighbours."""
    examples = [
        Example("q", "", "where  <b> is", TEXT + " <b>  is <b> x"),
        Example("r", "", "  é", "a  b " * 30),
    ]
    tokenizer = trained_tokenizer([TEXT] * 3, 300)
    if change in ("left", "right"):
        strips = {"lstrip": change == "left", "rstrip": change == "right"}
        tokenizer.add_tokens([AddedToken("<b>", **strips)])
    elif change == "phrase":
        tokenizer.add_tokens([AddedToken("<b> x")])
    elif change == "normalizer":
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Replace("h f", "hf"), normalizers.BertNormalizer()]
        )
    else:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("e", "isolated")
    check(examples, tokenizer, 50, 10)


# Tokenizers that split bytes have no token types, blanks that belong to words, and several tokens
# for a character.
SPLITTING_BYTES = {
    "RoBERTa": byte_level_tokenizer,  # with four special tokens
    "RoBERTa's with a blank in front": partial(byte_level_tokenizer, add_prefix_space=True),
    "ModernBERT": modern_tokenizer,
}


@pytest.fixture(params=SPLITTING_BYTES)
def byte_tokenizer(request):
    """A tokenizer that splits bytes."""
    return SPLITTING_BYTES[request.param]([TEXT] * 3)


def test_tokenizers_that_split_bytes_give_their_own_overflow(byte_tokenizer):
    samples = check(edges(8), byte_tokenizer, 60, 9)
    assert len(samples) > len(edges(8))
    assert {*samples.tokens[samples.starts[:-1]]} == {byte_tokenizer.cls_token_id}


def test_mpnets_tokenizer_gives_its_own_overflow_and_no_token_types():
    tokenizer = mpnet_tokenizer(sorted(trained_tokenizer([TEXT] * 3, 300).get_vocab()))
    samples = check(edges(8), tokenizer, 60, 9)
    assert not samples.segments
    first_window = samples.tokens[: samples.lengths[0]].tolist()
    assert first_window[0] == 0
    assert first_window.count(2) == 3


def test_batches_of_tokenizers_that_split_bytes_have_no_token_types(byte_tokenizer):
    samples = built([Example("q", "", "where", "river")], byte_tokenizer, 60, 9)
    batch = samples.batch(np.array([0]), 60)
    assert {*batch} == {"input_ids", "attention_mask", "start_positions", "end_positions"}
    assert batch["input_ids"][0, -1] == byte_tokenizer.pad_token_id


def test_a_question_that_leaves_no_room_is_refused_by_tokenizers_that_split_bytes(byte_tokenizer):
    crowded = [Example("q7", "Rivers", "river " * 30, "river")]
    wanted = r"question 'q7': its \d+ tokens leave 0 of 20 .* stride 4 \(1 such"
    refused(wanted, built, crowded, byte_tokenizer, 20, 4)


def test_an_answer_begins_with_no_blank_where_blanks_belong_to_words(byte_tokenizer):
    word = TEXT.split()[3]
    answer = (word, TEXT.index(f" {word}") + 1)
    samples = check([Example("q", "", "where", TEXT, (answer,))], byte_tokenizer, 400, 9)
    start, end = samples.characters(np.array([0]), samples.start_positions, samples.end_positions)
    assert TEXT[start.item() : end.item()] == word


def test_tokenizers_and_lengths_that_cannot_work(small):
    examples = [Example("q", "", "where", TEXT)]
    for lengths in ((3, 0), (20, 17), (20, -1)):
        refused("max_length", built, examples, small, *lengths)
    refused("^object: no fast tokenizer", built, examples, object())
    bare = trained_tokenizer([TEXT] * 3, 300)
    bare.backend_tokenizer.post_processor = TemplateProcessing(
        "$A", "$A [SEP] $B", [("[SEP]", bare.sep_token_id)]
    )
    refused("does not join texts as a special token", built, examples, bare)
    bare.pad_token = None
    refused(f"^{type(bare).__name__}: .* has no token that pads", built, examples, bare)


# The cache.


def same(a: Samples, b: Samples) -> bool:
    """Return whether all arrays of two samples are equal."""
    return all(np.array_equal(value, vars(b)[name]) for name, value in vars(a).items())


@pytest.fixture
def file(tmp_path):
    """A file of two questions, one of them with an answer."""
    gold = ("Rotterdam", TEXT.index("Rotterdam"))
    questions = [question("q", "where", gold), question("r", "")]
    return write(tmp_path / "a.json", document((TEXT, questions)))


@pytest.fixture
def cached(file, tmp_path, small):
    """A function that builds samples of a file through a cache, and the cache's folder."""

    def build(source=file, tokenizer=small, max_length=64, stride=16, **more):
        return build_samples(
            open_source(source, "train", **more), tokenizer, max_length, stride, cache=store
        )

    store = tmp_path / "store"
    return build, store


def test_the_second_call_reads_the_cache_and_no_data(cached, file, small):
    build, store = cached
    first = build()
    again = open_source(file, "validation")
    second = build_samples(again, small, 64, 16, cache=store)
    assert "examples" not in vars(again)
    assert len(list(store.iterdir())) == 1
    assert same(first, second)
    assert same(first, build_samples(again, small, 64, 16, cache=False))
    with pytest.raises(ValueError):
        second.tokens[0] = 1  # mapped read-only


def test_an_entry_for_each_thing_that_matters(cached, file):
    build, store = cached
    cased = trained_tokenizer([TEXT] * 3, 300)
    cased.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    other = {"labelled": False}, {"max_length": 65}, {"stride": 17}, {"tokenizer": cased}
    for more in ({}, *other, {"tokenizer": trained_tokenizer([TEXT] * 3, 290)}):
        build(**more)
    file.write_text(file.read_text().replace("where", "which"))
    build()
    assert len(list(store.iterdir())) == 7


def test_a_tokenizer_that_gives_no_token_types_has_an_entry_of_its_own(cached):
    """All else, which its backend knows, is the same."""
    build, store = cached
    plain = trained_tokenizer([TEXT] * 3, 300)
    assert build(tokenizer=plain).segments
    plain.model_input_names = ["input_ids", "attention_mask"]
    assert not build(tokenizer=plain).segments
    assert len(list(store.iterdir())) == 2


def test_a_damaged_entry_is_replaced(cached, caplog):
    build, store = cached
    whole = build()
    (entry,) = store.iterdir()
    (entry / "tokens.npy").unlink()  # what is mapped stays as it was
    (entry / "tokens.npy").write_bytes(b"junk")
    assert same(build(), whole)
    assert "damaged, made anew" in caplog.text
    caplog.clear()
    assert same(build(), whole)
    assert not caplog.text


def test_an_entry_under_another_key_is_damaged(cached, caplog):
    """One that was copied, or whose folder was renamed."""
    build, store = cached
    build()
    (entry,) = store.iterdir()
    wanted = build(stride=17)
    (other,) = {*store.iterdir()} - {entry}
    shutil.rmtree(other)
    entry.rename(other)
    assert same(build(stride=17), wanted)
    assert "damaged, made anew" in caplog.text


@pytest.mark.parametrize(
    "constant", ["tokenize.TEXTS_PER_CALL", "tokenize.WORDS_PER_ROW", "labels.WINDOWS_TOGETHER"]
)
def test_how_many_are_worked_on_at_a_time_changes_nothing(constant, small, monkeypatch):
    gold = ("Rotterdam", TEXT.index("Rotterdam"))
    examples = [Example(str(i), "", f"where {i}", f"{TEXT} {i}", (gold,)) for i in range(4)]
    byte_level = byte_level_tokenizer([TEXT] * 3)
    usual = [built(examples, tokenizer, 40, 10) for tokenizer in (small, byte_level)]
    assert min(len(samples) for samples in usual) > 3
    monkeypatch.setattr(f"qa_lib.data.{constant}", 3)
    for samples, tokenizer in zip(usual, (small, byte_level), strict=True):
        assert same(built(examples, tokenizer, 40, 10), samples)


def test_the_content_of_a_source_is_its_questions_and_paragraphs():
    first = Example("q", "", "where", TEXT)
    second = Example("r", "", "who", TEXT)
    digest = content_sha256([first, second])
    assert digest == content_sha256([replace(second, id="x"), replace(first, id="y")])
    assert digest != content_sha256([first, replace(second, question="which")])
    assert digest != content_sha256([first, replace(second, context=f"{TEXT} .")])
    assert digest != content_sha256([first, second, second])


def test_without_a_place_to_write_features_are_still_built(cached, caplog):
    build, store = cached
    store.write_text("a file where the folder should be")
    assert len(build())
    assert "not cached" in caplog.text


def test_bad_data_leaves_nothing_in_the_cache(cached, tmp_path):
    build, store = cached
    refused("empty", build, write(tmp_path / "a.json", document()))
    assert not store.exists() or not list(store.iterdir())


def test_where_the_cache_is(file, small, tmp_path, monkeypatch):
    for name, folder in (
        ("QA_LIB_CACHE", "one"),
        ("XDG_CACHE_HOME", "two/qa_lib"),
        ("HOME", "three/.cache/qa_lib"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder.split("/")[0]))
        build_samples(open_source(file, "train"), small, 64, 16)
        assert len(list((tmp_path / folder / "features").iterdir())) == 1
        monkeypatch.delenv(name)


def test_a_variable_that_is_empty_names_no_place_for_the_cache(file, small, tmp_path, monkeypatch):
    monkeypatch.delenv("QA_LIB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    build_samples(open_source(file, "train"), small, 64, 16)
    assert len(list((tmp_path / ".cache/qa_lib/features").iterdir())) == 1


@pytest.mark.slow
def test_a_cached_start_is_quick(cached, tmp_path):
    paragraphs = [
        (f"{TEXT} {i}", [question(f"{i}-{k}", f"where {k}") for k in range(7)]) for i in range(2000)
    ]
    file = write(tmp_path / "train.json", document(*paragraphs))
    build = cached[0]
    build(file, max_length=384, stride=128)
    seconds, _ = best_of(3, lambda: build(file, max_length=384, stride=128))
    assert seconds < 1
