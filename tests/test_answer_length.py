"""How long an answer may be: an argument of every way to answer, by default what the training
answers need."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from qa_lib import ask, plan
from qa_lib.data.examples import Example
from qa_lib.data.load import load_data
from qa_lib.data.synthetic import vocabulary
from qa_lib.lab import sweep
from qa_lib.lab.app.asking import answer as app_answer
from qa_lib.lab.app.choices import choices_of_user
from qa_lib.lab.cli.verbs import parser_of
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.tools.quantize import quantize_run
from qa_lib.records import record
from qa_lib.score.decode import decode
from qa_lib.score.predict import answer_tokens
from qa_lib.spec.presets import PRESETS
from tests.material import (
    best_of,
    document,
    question,
    refused,
    squad_folder,
    trained_tokenizer,
    write,
)
from tests.test_windows import TEXT, built
from tests.tiny import CPU, planned

WORDS = [word for word in vocabulary() if word.isalpha()]
LONG = " ".join(WORDS[i % len(WORDS)] for i in range(40))
PARAGRAPH = f"{LONG} . {LONG}"


def test_presets_of_the_protocol_keep_30_tokens_and_their_hashes():
    assert {name for name, preset in PRESETS.items() if preset.max_answer_length != 30} == {"local"}
    same = planned("A1", max_answer_length=30)
    assert (same.hash, same.own) == (planned("A1").hash, {"max_answer_length": 30})


def test_another_length_is_another_run_and_is_handed_to_its_notebook(tmp_path):
    spec = planned("A1", max_answer_length=50)
    assert spec.preset.max_answer_length == 50
    assert spec.hash != planned("A1").hash
    assert sweep.notebook_parameters(spec, tmp_path)["max_answer_length"] == 50
    assert "max_answer_length" not in sweep.notebook_parameters(planned("A1"), tmp_path)


def test_30_tokens_that_were_asked_for_are_not_what_the_training_answers_need():
    sources = {"data": "synthetic:40", "model": "tiny", "machine": CPU}
    (usual,) = plan(["A1"], "local", **sources)
    (given,) = plan(["A1"], "local", **sources, max_answer_length=30)
    assert usual.preset.max_answer_length is None
    assert usual.run_id != given.run_id


@pytest.mark.parametrize("wrong", [-1, 1.5, "x", True, 2**31])
def test_lengths_that_cannot_be(wrong):
    refused("max_answer_length", planned, "A1", max_answer_length=wrong)


def test_a_language_model_gives_no_answers():
    refused("'lm-smoke' gives no answers", plan, ["L1"], "lm-smoke", max_answer_length=9)


@pytest.mark.parametrize("verb", ["run", "sweep", "tune", "predict", "quantize", "app"])
def test_every_verb_that_decodes_takes_it(verb):
    assert "--max-answer-length N" in parser_of(verb).format_help()
    assert "--max-answer-length" not in parser_of("score").format_help()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, one_thread):
    """A run on answers of 40 words at preset local, its folder, and what it said."""
    folder = tmp_path_factory.mktemp("lab")
    said = []
    squad = squad_folder(folder / "squad", PARAGRAPH, LONG)
    sizes = {"steps": 40, "epochs": None, "measure_from": 1, "checkpoint_every": 0}
    spec = planned(
        "A1",
        "local",
        sizes=sizes,
        data=str(squad),
        model="tiny",
        max_length=128,
        learning_rate=4e-3,
        batch=8,
    )
    entry = fit(spec, folder / "runs", say=said.append)
    return SimpleNamespace(
        entry=entry, model=folder / "runs" / spec.run_path / "model", said=said, squad=squad
    )


def test_the_default_follows_the_training_answers_and_is_told_and_recorded(trained):
    assert trained.entry["spec"]["preset"]["max_answer_length"] == 40
    kept = record.read_record(trained.model.parent)
    assert kept["spec"]["preset"]["max_answer_length"] == 40
    (line,) = (line for line in trained.said if "answers may have" in line)
    assert line.startswith("answers may have 40 tokens: as the training answers need")
    assert json.loads((trained.model / "config.json").read_text())["max_answer_length"] == 40


def longest(found: dict) -> int:
    return max(len(entry["text"].split()) for entry in found["nbest"])


def test_the_trained_model_answers_as_long_wherever_it_is_asked(trained, tmp_path, typed):
    asked = ask(trained.model, "who came?", PARAGRAPH)
    assert 30 < longest(asked) <= 40
    assert longest(ask(trained.model, "who came?", PARAGRAPH, max_answer_length=3)) <= 3
    assert longest(ask(trained.model, "who came?", PARAGRAPH)) == longest(asked), "it is not kept"
    data = write(tmp_path / "data.json", document((PARAGRAPH, [question("q", "who came?")])))
    for words, most in (((), 40), (("--max-answer-length", 5), 5)):
        typed("predict --model", trained.model, data, "--out", tmp_path / "out", *words)
        listed = json.loads((tmp_path / "out" / "nbest_predictions.json").read_text())
        found = longest({"nbest": listed["q"]})
        assert found <= most
        assert (found > 30) == (most == 40)
        words = ("--question", "who came?", "--context", PARAGRAPH, *words)
        text = json.loads(typed("predict --model", trained.model, *words))["answer"]
        assert len(text.split()) <= most


def test_the_page_answers_as_long_as_the_asker_says(trained):
    (choice,) = choices_of_user([trained.model])
    assert longest(app_answer(choice, "who came?", PARAGRAPH)) > 30
    assert longest(app_answer(choice, "who came?", PARAGRAPH, 4)) <= 4
    for wrong in (0, -1, 1.5, "9", True, [], 10**30, float("nan")):
        refused("^The longest answer is ", app_answer, choice, "who came?", PARAGRAPH, wrong)


@pytest.mark.torchao
def test_quantized_models_are_scored_as_long(trained):
    for most, f1 in ((None, 100.0), (1, 0.0)):
        found = quantize_run(trained.model.parent, "int8", str(trained.squad), most, say=print)
        assert found["before"]["best_f1"] >= f1


def test_golds_that_cannot_be_given_are_told_in_one_line(trained):
    spec = planned("A1", data=str(trained.squad), model="tiny", max_length=128)
    notes = load_data(spec).notes
    assert [note.partition(": ")[2] for note in notes] == [
        "40 of 40 gold answers are longer than 30 tokens and cannot be given; --max-answer-length "
        "allows more"
    ] * 2
    assert notes[0].startswith(f"{trained.squad}/train.json: ")
    spec = planned(
        "A1", data=str(trained.squad), model="tiny", max_length=128, max_answer_length=40
    )
    assert load_data(spec).notes == []


def test_golds_of_the_validation_data_alone_are_told_of_the_validation_data(trained, tmp_path):
    folder = squad_folder(tmp_path / "squad", PARAGRAPH, WORDS[0])
    shutil.copy(trained.squad / "validation.json", folder)
    (note,) = load_data(planned("A1", data=str(folder), model="tiny", max_length=128)).notes
    assert note.startswith(f"{folder}/validation.json: 40 of 40 gold answers are longer")


@pytest.mark.parametrize("kept", [None, 0, -3, "40", 40.0, True, 2**31])
def test_a_checkpoint_from_elsewhere_answers_with_30_tokens(kept):
    config = SimpleNamespace(max_answer_length=kept) if kept is not None else SimpleNamespace()
    assert answer_tokens(SimpleNamespace(config=config)) == 30
    assert answer_tokens(SimpleNamespace(config=config), 7) == 7


def test_long_answers_cost_no_more_time_to_decode():
    words = TEXT.split() * 30
    examples = [Example(str(i), "", "where?", " ".join(words[i : i + 300])) for i in range(60)]
    samples = built(examples, trained_tokenizer([TEXT] * 3, 300))
    logits = torch.randn(2, len(samples), int(samples.lengths.max()))
    seconds = [
        best_of(
            5,
            lambda most=most: decode(
                samples, examples, torch.arange(len(samples)), *logits, max_answer_length=most
            ),
        )[0]
        for most in (30, 384)
    ]
    assert seconds[1] < 2 * seconds[0]
