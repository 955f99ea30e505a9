"""What the notebooks say about parameters, a machine, answers, and runs of a family."""

import dataclasses
import functools
import re
import sys
from types import SimpleNamespace

import pytest

from qa_lib.data.examples import Example
from qa_lib.lab.report import evidence, notebook
from qa_lib.lab.report.evidence import load_runs
from qa_lib.lab.report.notebook import (
    advice,
    answers,
    check_parameters,
    committed,
    describe,
    family_table,
    finished,
    first_questions,
    gains,
    text_within_reach,
)
from qa_lib.lab.report.techniques import Source
from qa_lib.spec.variants import FAMILIES, find_variant
from tests import material
from tests.material import ROOT, leave, refused, write
from tests.report_runs import make_one_of_each_kind
from tests.tiny import planned

# Parameters.


def cells_with(injected):
    """The cells that IPython has run when a notebook checks what papermill has injected."""
    parameters = 'variant = "A1"\nseed = 0'
    return ["", "import os", parameters, f"# Parameters\n{injected}\n", "check_parameters(In)"]


def test_a_misspelt_parameter_stops_the_run():
    message = "unknown parameter 'varient'; did you mean 'variant'"
    refused(message, check_parameters, cells_with('varient = "A3"'))


def test_a_parameter_of_the_notebook_passes():
    check_parameters(cells_with('variant = "A3"'))


# Data.


@pytest.fixture
def vocabulary(monkeypatch):
    """Says whether BERT's vocabulary is on this machine."""

    def set_whether(is_there):
        path = "vocab.txt" if is_there else None
        monkeypatch.setattr(notebook, "try_to_load_from_cache", lambda *_: path)

    return set_whether


def test_without_data_within_reach_text_is_generated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, model, text = text_within_reach("", "")
    assert (data, model) == ("", "")
    assert text.startswith("**Generated text**")


def test_a_folder_squad_is_within_reach(tmp_path, monkeypatch, vocabulary):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad").mkdir()
    vocabulary(True)
    assert text_within_reach("", "") == ("squad", "", "**Text:** squad.")


def test_without_berts_vocabulary_each_word_is_a_token(vocabulary):
    vocabulary(False)
    data, model, text = text_within_reach("my/data", "")
    assert (data, model) == ("my/data", "tiny")
    assert text == (
        "**Text:** data. BERT's vocabulary is not on this machine: each word counts as one token."
    )


def test_in_colab_squad_comes_from_the_hub(tmp_path, monkeypatch, vocabulary):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    vocabulary(False)
    assert text_within_reach("", "")[:2] == ("squad_v2", "")


def test_the_first_question_of_each_kind_is_shown_with_its_paragraph():
    examples = [
        Example("1", "t", "who ?", "alice came", (("alice", 0), ("alice came", 0))),
        Example("2", "t", "what ?", "alice came", (("alice", 0),)),
        Example("3", "t", "where ?", "bob left"),
    ]
    text = first_questions(examples)
    assert "| who ? | alice came | alice / alice came |" in text
    assert "| where ? | bob left | (no answer) |" in text
    assert "what ?" not in text
    assert "where ?" not in first_questions(examples[:2])


# The machine.


def test_a_card_is_named_with_what_suits_it():
    assert advice("t4").startswith(
        '**This card:** T4. `variant = "recommended"` takes what suits it'
    )


def test_a_cpu_is_told_what_it_can_do():
    assert "No GPU here" in advice("cpu")


def test_what_a_run_trains_is_told_with_what_this_machine_changes_of_it():
    spec = dataclasses.replace(planned("A1"), adjusted=["one thread"], skip="no GPU")
    text = describe(spec)
    assert "Preset smoke, seed 0: tiny on synthetic:40, " in text
    assert "Adjusted to this machine: one thread." in text
    assert "**Skipped here**: no GPU." in text


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            {"steps": 1200, "epochs": None, "effective_batch": 32},
            ", 1,200 steps of 32 samples of at most 96",
        ),
        (
            {"steps": None, "epochs": 2, "effective_batch": None},
            ", epochs: 2, steps of 8 samples of at",
        ),
    ],
)
def test_how_long_and_by_which_batch_a_run_trains_is_told(sizes, words):
    assert words in describe(planned("A1", sizes=sizes | {"max_length": 96}, micro_batch=8))


def test_a_language_model_is_told_nothing_of_presets_for_questions():
    assert "No GPU here" in describe(planned("A1"))
    assert "No GPU here" not in describe(planned("L1", "lm-smoke", data="synthetic:40"))


def test_code_is_linked_by_its_line_in_a_checkout_alone(monkeypatch):
    found = Source("qa_lib/a.py", 7, "")
    for is_checkout, link in ((True, "](../qa_lib/a.py#L7)"), (False, "")):
        monkeypatch.setattr(notebook, "IS_CHECKOUT", is_checkout)
        assert notebook._link_to(found).partition("line 7")[2] == link


# Answers.


@pytest.fixture
def questions():
    """Validation data of ten questions, of which the first alone has an answer."""
    examples = [SimpleNamespace(id="a", question="who ?", answers=(("alice", 3),))]
    for number in range(9):
        examples.append(SimpleNamespace(id=str(number), question="what ?", answers=()))
    return SimpleNamespace(validation=SimpleNamespace(examples=examples))


@pytest.fixture
def record_of(tmp_path, questions):
    """Leave the answers of a variant, which answers the first question alone; its record."""

    def leave_answers(variant, first_answer):
        folder = tmp_path / "g" / f"{variant}-s0-x" / "answers"
        folder.mkdir(parents=True)
        given = {example.id: "" for example in questions.validation.examples}
        write(folder / "predictions.json", given | {"a": first_answer})
        return {
            "run_id": f"{variant}-s0-x",
            "group": "g",
            "status": "ok",
            "spec": {"variant": variant},
        }

    return leave_answers


def test_answers_of_runs_stand_beside_the_gold_ones(tmp_path, questions, record_of):
    text = answers([record_of("A4", "bob"), record_of("A1", "")], tmp_path, questions)
    assert "| question | A4 | A1 | gold |" in text
    assert "| who ? | bob | (no answer) | alice |" in text


def test_answers_to_five_questions_are_shown(tmp_path, questions, record_of):
    text = answers([record_of("A4", "bob")], tmp_path, questions)
    assert text.count("| what ? |") == 4


def test_a_run_that_did_not_end_ok_has_no_answers(tmp_path, questions, record_of):
    record = record_of("A4", "bob") | {"status": "oom"}
    assert "A4" not in answers([record], tmp_path, questions)


def test_without_validation_data_there_are_no_answers(tmp_path, record_of):
    text = answers([record_of("A4", "bob")], tmp_path, SimpleNamespace(validation=None))
    assert text == "*Nothing of this table was measured.*"


# Runs.


@pytest.mark.parametrize(("status", "is_finished"), [("ok", True), ("killed", False)])
def test_what_a_variant_is_compared_with_is_not_run_again_if_it_ended_ok(
    tmp_path, status, is_finished
):
    spec = planned()
    leave(tmp_path, spec, status, time={"steps": 400}, spec={"planned_steps": 400})
    assert (finished(spec, tmp_path) is not None) == is_finished


def test_a_run_without_a_record_is_not_finished(tmp_path):
    assert finished(planned(), tmp_path) is None


# What runs cost.


def a_cost(hardware, variant, pad_fraction):
    """Return a record of 400 steps of 16 samples, which have 40 tokens each without padding."""
    rate = 100.0
    return {
        "spec": {"variant": variant, "hardware": hardware, "preset": {"effective_batch": 16}},
        "time": {"steps": 400, "train_s": 64.0},
        "quality": {"f1": 90.0, "best_f1": 91.0},
        "speed": {
            "pad_fraction": pad_fraction,
            "samples_per_s": rate,
            "tokens_per_s_padded": 40 * rate / (1 - pad_fraction),
        },
        "memory": {"peak_reserved_mib": 2048.0},
    }


def test_the_cost_of_runs_on_a_gpu_is_seconds_and_what_they_reserved():
    text = gains([a_cost("t4", "A1", 0.5)])
    assert "| A1 | 400 | 90.00 | 91.00 | 50.0\u00a0% | 0.51 | 2.00 | 64.0 | 100 |" in text


def test_the_cost_of_runs_on_a_cpu_is_tokens_and_predicted_memory():
    text = gains([a_cost("cpu", "A0-longest", 0.5), a_cost("cpu", "A4", 0.2)])
    assert "| 50.0\u00a0% | 0.51 | 6.28 |" in text
    assert "| 20.0\u00a0% | 0.32 | 5.67 |" in text
    assert "samples/s" not in text


# A family.


@pytest.fixture
def every(tmp_path):
    """Runs of a CPU with one variant of each kind."""
    make_one_of_each_kind(tmp_path)
    return load_runs(tmp_path)


def records_of(every, *variants):
    by_variant = every.set_index("spec.variant")["run"]
    return [by_variant[name].record for name in variants]


def test_a_familys_table_has_the_baseline_and_what_its_variants_change(every):
    table = family_table(every, records_of(every, "B1"))
    assert list(table["variant"]) == ["A1", "A3", "B1"]


def test_a_familys_table_has_no_runs_of_another_training(every):
    others = every["spec.variant"] == "A3"
    runs = every.assign(training=every["training"].mask(others, "another"))
    table = family_table(runs, records_of(every, "B1"))
    assert list(table["variant"]) == ["A1", "B1"]


def test_a_familys_table_has_runs_of_other_families_that_were_made_with_it(every):
    table = family_table(every, records_of(every, "B1", "A4"))
    assert list(table["variant"]) == ["A1", "A3", "A4", "B1"]


def test_a_familys_table_has_no_speeds_of_a_cpu(every):
    assert "samples/s" not in family_table(every, records_of(every, "B1"))


# Families whose first variant with a committed run is not the first of the family.
FIRST_COMMITTED = {"L": "L-dropout", "P": "P1", "E": "E-moments"}


def test_a_family_without_committed_runs_has_no_table(monkeypatch):
    monkeypatch.setattr(evidence, "load_runs", lambda runs: material.committed()[:0])
    refused("no committed group has family E", committed, "E")


LOADED_ONCE = functools.cache(load_runs)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_committed_runs_are_a_table_of_a_gpu(family, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(evidence, "load_runs", LOADED_ONCE)
    text = committed(family)
    assert find_variant(FIRST_COMMITTED.get(family, f"{family}1")).name in text
    assert "| samples/s |" in text
    assert re.search(r"on (one|\d) [\w ]+, 32", text)
    assert "nan" not in text
