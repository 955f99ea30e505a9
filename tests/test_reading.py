"""What people's files and models have: numbers for ids, equal ids in two files, a mark in front,
capitals, length."""

import json
import logging

import datasets
import pytest

from qa_lib import ask
from qa_lib.data.load import load_data
from qa_lib.data.text import open_text
from qa_lib.data.tokenize import _warn_of_capitals, build_tokenizer, fast_backend, tokenize
from qa_lib.lab.search.plan import plan
from tests.material import (
    best_of,
    document,
    edited,
    question,
    refused,
    trained_tokenizer,
    write,
)
from tests.tiny import CPU, byte_level_tokenizer, checkpoint, modern_tokenizer, planned

TEXT = "then alice baker came ."
GOLD = ("alice", 5)


def folder_of(path, **splits):
    """A folder of two files, whose questions are {id: question}."""
    path.mkdir()
    for split, questions in splits.items():
        entries = [question(key, asked, GOLD) for key, asked in questions.items()]
        write(path / f"{split}.json", document((TEXT, entries)))
    return str(path)


def loaded(folder):
    return load_data(planned("A1", data=folder))


def test_two_files_may_number_their_questions_alike(tmp_path):
    train = {str(i): f"who came {i} ?" for i in range(9)}
    validation = {str(i): f"who went {i} ?" for i in range(9)}
    data = loaded(folder_of(tmp_path / "squad", train=train, validation=validation))
    assert (data.n, data.n_eval) == (9, 9)


@pytest.mark.parametrize("order", [1, -1])
def test_the_same_questions_under_other_ids_are_refused(tmp_path, order):
    train = {f"t{i}": f"who came {i} ?" for i in range(9)}
    validation = {f"v{i}": f"who came {i} ?" for i in range(9)[::order]}
    folder = folder_of(tmp_path / "squad", train=train, validation=validation)
    refused("has the questions of .*train.json", loaded, folder)


def test_ids_that_are_numbers_are_answered_by_their_digits(tmp_path, typed):
    model = checkpoint("bert", tmp_path / "model")
    data = write(tmp_path / "data.json", document((TEXT, [question(262, "who came ?", GOLD)])))
    typed("predict --model", model, data, "--out", tmp_path / "out")
    assert list(json.loads((tmp_path / "out" / "texts.json").read_text())) == ["262"]
    found = json.loads(typed("score", data, tmp_path / "out" / "texts.json"))
    assert found["total"] == 1


def test_a_data_set_without_answers_is_answered_as_its_json_is(tmp_path, typed):
    model = checkpoint("bert", tmp_path / "model")
    row = {"id": "q", "question": "who came ?", "context": TEXT}
    data = write(tmp_path / "data.json", document((TEXT, [{"id": "q", "question": "who came ?"}])))
    answers = [typed("predict --model", model, data, "--out", tmp_path / "json") and None]
    answers = [json.loads((tmp_path / "json" / "nbest_predictions.json").read_text())]
    for name, more in (("bare", {}), ("null", {"answers": None})):
        datasets.Dataset.from_list([row | more]).save_to_disk(tmp_path / name)
        typed("predict --model", model, tmp_path / name, "--out", tmp_path / f"{name}-out")
        path = tmp_path / f"{name}-out" / "nbest_predictions.json"
        answers.append(json.loads(path.read_text()))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    "learn",
    [trained_tokenizer, byte_level_tokenizer, modern_tokenizer],
    ids=["BERT", "RoBERTa", "ModernBERT"],
)
@pytest.mark.parametrize("unit", ["then alice ", "abcdefé", "a\n", " "], ids=ascii)
def test_a_text_ten_times_as_long_takes_no_more_than_ten_times_as_long(learn, unit):
    backend = fast_backend(learn([TEXT] * 3))

    def seconds(length: int) -> float:
        return best_of(1, lambda: tokenize(backend, [unit * (length // len(unit))]))[0]

    short = max(0.005, min(seconds(30_000), seconds(30_000)))
    # Again where other work has slowed it.
    assert any(seconds(300_000) < 30 * short for _ in range(2))


def test_a_paragraph_of_a_million_characters_is_asked_about(tmp_path):
    model = checkpoint("bert", tmp_path / "model")
    found = ask(model, "who came ?", "x" * 999_900 + f" {TEXT}")
    assert found["windows"] == 1
    assert found["nbest"]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    content = b"one line\nand \xef\xbb\xbfanother\n"
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_bytes(mark + content)
    plain, marked = (
        list(open_text(tmp_path / name, "train").read()) for name in ("plain", "marked")
    )
    assert plain == marked == ["one line\n", "and \ufeffanother\n"]
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    assert list(open_text(tmp_path / "empty.txt", "train").read()) == []


def test_a_byte_order_mark_in_front_of_a_hubs_text_is_no_part_of_it(monkeypatch):
    table = datasets.Dataset.from_dict({"text": ["\ufeffone", "\ufefftwo"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: table)
    assert list(open_text("somebody/text", "train").load_rows()) == ["one\n", "\ufefftwo\n"]


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] {} came at nine .".split(" ")


@pytest.fixture
def with_words(tmp_path, caplog):
    """A checkpoint with a vocabulary, and what is warned of when its tokenizer is loaded."""
    folder = checkpoint("bert", tmp_path / "model")

    def load(name: str, *, config: dict | None = None, whole: bool = False) -> tuple[str, object]:
        for path in (tmp_path / "model").glob("*token*"):
            path.unlink()
        words = [word.format(name) for word in WORDS]
        (tmp_path / "model" / "vocab.txt").write_text("\n".join(words) + "\n")
        if whole:
            write(tmp_path / "model" / "tokenizer_config.json", {"do_lower_case": False})
            build_tokenizer(folder).save_pretrained(folder)
            (tmp_path / "model" / "tokenizer_config.json").unlink()
        if config is not None:
            write(tmp_path / "model" / "tokenizer_config.json", config)
        _warn_of_capitals.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "qa_lib"):
            tokenizer = build_tokenizer(folder)
            build_tokenizer(folder)
        return caplog.text, tokenizer

    return load


@pytest.mark.parametrize("whole", [False, True], ids=["vocab.txt", "tokenizer.json"])
@pytest.mark.parametrize("config", [None, {}, {"model_max_length": 512}])
def test_a_cased_vocabulary_that_is_read_as_uncased_is_told_once(with_words, config, whole):
    said, tokenizer = with_words("Ilse", config=config, whole=whole)
    assert tokenizer.tokenize("Ilse") == ["[UNK]"]
    assert said.count("read as uncased") == 1
    assert said.count("\n") == 1
    assert '{"do_lower_case": false} into its tokenizer_config.json' in said


def test_nothing_is_told_where_the_configuration_says_so_or_no_word_has_capitals(with_words):
    said, tokenizer = with_words("Ilse", config={"do_lower_case": False})
    assert said == ""
    assert tokenizer.tokenize("Ilse") == ["Ilse"]
    assert with_words("Ilse", config={"do_lower_case": True})[0] == ""
    assert with_words("ilse")[0] == ""


def test_a_roberta_of_66_positions_says_64(tmp_path):
    folder = checkpoint("roberta", tmp_path / "model")
    edited(tmp_path / "model" / "config.json", max_position_embeddings=66)
    for length in (65, 66, 96):
        with pytest.raises(Exception, match=rf"takes 64 tokens, .* have {length}$"):
            plan(["A1"], "smoke", data="synthetic:40", model=folder, max_length=length, machine=CPU)
    plan(["A1"], "smoke", data="synthetic:40", model=folder, max_length=64, machine=CPU)
