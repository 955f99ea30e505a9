"""Which checkpoints the app offers, in which order, and by which names."""

import shutil

import pytest

from qa_lib.lab.app.choices import Choices, choices_of_runs, choices_of_user
from tests.app.server import folder_of, key_of
from tests.material import change_record


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


def test_a_key_is_no_path(runs):
    choices = Choices([], runs)
    assert choices.find(key_of(runs)).folder == folder_of(runs)
    for wrong_key in ("../../etc", str(folder_of(runs)), "cpu-smoke/A9-s0-000000"):
        assert choices.find(wrong_key) is None


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
