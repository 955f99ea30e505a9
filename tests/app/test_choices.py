"""Which checkpoints the app offers, in which order, and by which names."""

import shutil

import pytest

from qa_lib.lab.app import choices
from qa_lib.lab.app.choices import Choice, Choices, choices_of_runs, choices_of_user
from qa_lib.records.schema import QUANTIZED_SCHEMA
from tests.app.server import folder_of, key_of
from tests.material import change_record, leave, write
from tests.tiny import planned


@pytest.fixture
def with_real_text(runs, tmp_path):
    """Two runs of synthetic text, and one of SQuAD: the folder of all, and of the last run."""
    for variant in ("A1", "A2"):
        shutil.copytree(folder_of(runs, variant).parent, tmp_path / key_of(runs, variant))
    real = shutil.copytree(folder_of(runs).parent, tmp_path / "h200-local" / "E-packed-s2-aaaaaa")
    change_record(
        real,
        quality={"best_f1": 76.0},
        data={"name": "squad"},
        spec={"variant": "E-packed", "seed": 2},
    )
    return tmp_path, real


def test_the_best_model_comes_first_and_those_of_synthetic_text_last(with_real_text):
    found = choices_of_runs(with_real_text[0])
    assert [choice.name for choice in found[:2]] == [
        "E-packed-s2 · smoke · F1 76.0",
        "A2-s0 · smoke · F1 99.9",
    ]
    assert [choice.synthetic for choice in found] == [False, True, True]


def test_a_choice_has_the_threshold_of_its_record(with_real_text):
    assert choices_of_runs(with_real_text[0])[1].threshold == 3.25


@pytest.mark.parametrize("spoilt", ["x", None, [], float("inf")])
def test_a_run_whose_f1_is_no_number_is_not_offered(with_real_text, spoilt):
    folder, real = with_real_text
    change_record(real, quality={"best_f1": spoilt})
    assert len(choices_of_runs(folder)) == 2


SCORES = {"best_f1": 70.0, "best_f1_threshold": 1.0}


def test_a_quantized_copy_has_the_name_of_its_width_and_scores_of_its_own(tmp_path):
    copy = leave(tmp_path, planned(), quality=SCORES) / "model-int8"
    copy.mkdir()
    after = {"best_f1": 65.0, "best_f1_threshold": 2.0}
    quantized = {"schema": QUANTIZED_SCHEMA, "width": "int8", "after": after}
    write(copy / "quantized.json", quantized)
    (choice,) = choices_of_runs(tmp_path)
    assert choice.name == "A1-s0 · int8 · smoke · F1 65.0"
    assert (choice.f1, choice.threshold) == (65.0, 2.0)
    assert choice.key == f"{planned().run_path}/model-int8"


@pytest.mark.parametrize(
    ("status", "task", "offers"), [("ok", "qa", 1), ("ok", "lm", 0), ("killed", "qa", 0)]
)
def test_models_of_runs_that_answer_questions_and_ended_ok_are_offered(
    status, task, offers, tmp_path
):
    run = leave(tmp_path, planned(), status, quality=SCORES, task={"name": task})
    (run / "model").mkdir()
    (run / "model" / "model.safetensors").touch()
    assert len(choices_of_runs(tmp_path)) == offers


def test_a_model_that_a_link_leads_to_has_the_record_of_its_run(tmp_path):
    run = leave(tmp_path / "runs", planned(), quality=SCORES)
    (run / "model").mkdir()
    (tmp_path / "link").symlink_to(run / "model")
    assert choices._choice_if_recorded(tmp_path / "link").threshold == 1.0


def test_a_key_is_no_path(runs):
    listed = Choices([], runs)
    assert listed.find(key_of(runs)).folder == folder_of(runs)
    for wrong_key in ("../../etc", str(folder_of(runs)), "cpu-smoke/A9-s0-000000"):
        assert listed.find(wrong_key) is None


@pytest.fixture
def offers(monkeypatch):
    """The checkpoints that runs offer, for tests to set."""
    found = []
    monkeypatch.setattr(choices, "choices_of_runs", lambda runs: list(found))
    return found


def test_a_run_that_has_ended_since_the_list_was_made_is_found_by_its_key(offers, tmp_path):
    offers.append(Choice("first", "first", tmp_path / "first"))
    listed = Choices([], tmp_path)
    assert listed.find("first") is offers[0]
    offers.append(Choice("second", "second", tmp_path / "second"))
    assert listed.find("second") is offers[1]


def test_a_run_that_was_done_again_is_asked_with_its_new_threshold(offers, tmp_path):
    listed = Choices([], tmp_path)
    for threshold in (1.0, 2.0):
        offers[:] = [Choice("run", "run", tmp_path / "run", threshold=threshold)]
        listed.listed()
    assert listed.find("run").threshold == 2.0


def test_a_model_that_was_named_by_a_link_is_listed_once(offers, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    offers.append(Choice("run", "run", tmp_path / "run"))
    named_model = Choice("model 1", "link", tmp_path / "link")
    assert Choices([named_model], tmp_path).listed() == [named_model]


def test_a_named_run_has_its_records_threshold_and_is_listed_once(runs):
    run = folder_of(runs, "A2").parent
    (by_run,) = choices_of_user([run])
    (by_model,) = choices_of_user([str(run / "model")])
    assert by_run == by_model
    assert by_run.threshold == 3.25
    assert len(Choices([by_run], runs).listed()) == 2


def test_models_of_one_name_are_told_apart(runs, tmp_path):
    model = folder_of(runs, "A2")
    folders = [shutil.copytree(model, tmp_path / name) for name in ("one/bert", "other/bert")]
    names = [choice.name for choice in Choices(choices_of_user(folders), tmp_path).listed()]
    assert names == ["bert (model 1)", "bert (model 2)"]


def test_a_model_without_safetensors_is_refused_and_not_offered(runs, tmp_path, typed):
    run = shutil.copytree(folder_of(runs).parent, tmp_path / "cpu-smoke" / "A1-s0-aaaaaa")
    (run / "model" / "model.safetensors").rename(run / "model" / "pytorch_model.bin")
    assert "error: " in typed("app --port 0 --model", run / "model", code=2)
    assert Choices([], tmp_path).listed() == []
