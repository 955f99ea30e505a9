"""Searches: the points they try; how runs share a GPU or take turns on it, and which times they record."""

import dataclasses
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from qa_lib.__main__ import main
from qa_lib.data.load import load_data
from qa_lib.lab.launch import local as launch
from qa_lib.lab.launch.driver import SHARE
from qa_lib.lab.launch.process import child_env
from qa_lib.lab.search import tune
from qa_lib.measure import hardware
from qa_lib.records import record
from qa_lib.run import fit
from tests.material import refused
from tests.tiny import CPU, H200, planned, quiet


@pytest.fixture
def tried(monkeypatch, tmp_path):
    """The specs that would have run; the score at the best threshold is best at a rate of 2e-3, and worst with rank 32;
    at 4e-3 seed 1 fails, and at threshold 0 that rate looks best."""
    specs = []

    def work(self, spec, run_dir, cards):
        time.sleep(0.05)  # so that each card gets one
        specs.append((spec, *cards, child_env(cards, self._shares(cards)).get(SHARE)))
        rate, entry = spec.preset.learning_rate, record.new_record(spec, {})
        if (rate, spec.seed) == (4e-3, 1):
            return record.finish(run_dir, entry, "error", {"message": "loss is nan at step 12"})
        score = 90 - 1e4 * abs(rate - 2e-3) - spec.recipe.rank
        answers, text = {"f1": 1e4 * rate, "best_f1": score}, {"word_perplexity": 110 - score}
        entry["quality"] |= text if spec.preset.task == "lm" else answers
        return record.finish(run_dir, entry, "ok")

    monkeypatch.setattr(launch.Launcher, "_work", work)
    monkeypatch.setattr(tune, "probe", lambda: (CPU, {}))
    monkeypatch.chdir(tmp_path)  # where runs go unless they are told
    return specs


def test_every_point_is_a_run_of_its_own_in_a_group_of_tries():
    spec = planned("B1-all")
    recipes = ("lora-all-r8", 8), ("lora-qv-r32", 32)
    points = tune.points([spec], [1e-3, 2e-3], [name for name, _ in recipes])
    assert len({point.hash for point in points} | {spec.hash}) == 5
    found = [(p.group, p.preset.learning_rate, p.asked.trainable, p.recipe.rank) for p in points]
    assert found == [("cpu-tune", rate, *recipe) for rate in (1e-3, 2e-3) for recipe in recipes]
    assert {p.recipe.lr_factor for p in points} == {1.0} and spec.recipe.lr_factor > 1, (
        "at the rate that was asked for"
    )
    assert [p.asked.trainable for p in tune.points([spec], [], [])] == ["lora-all"]
    refused("lora-any-r8", tune.points, [spec], [], ["lora-any-r8"])


def test_the_best_point_is_named(tried, typed):
    words = "--preset smoke --trainable lora-all-r8 lora-all-r32 --learning-rate 1e-3 2e-3 4e-3"
    out = typed(f"tune B1-all {words}").splitlines()
    assert out[6:] == [
        "B1-all, best: lora-all-r8, learning rate 0.002, F1 at the best threshold 82.00"
    ]
    assert [cards for _, *cards in tried] == [[None]] * 6


def test_a_point_that_fails_ends_no_search_and_is_not_the_best(tried, capsys):
    words = "--preset smoke --trainable lora-all-r8 --learning-rate 4e-3 1e-3 --seeds 0 1"
    assert main(f"tune B1-all {words}".split()) == 1
    out = capsys.readouterr().out
    assert "loss is nan at step 12" in out and len(tried) == 4
    assert (
        out.splitlines()[-1]
        == "B1-all, best: lora-all-r8, learning rate 0.001, F1 at the best threshold 72.00"
    )


def test_a_language_model_is_tuned_to_the_least_perplexity(tried, typed):
    out = typed("tune L1 L-lora --preset lm-smoke --learning-rate 1e-3 2e-3 3e-3").splitlines()
    best = [("L1", "all", 28), ("L-lora", "lora-all", 52)]  # whose recipe has no rate here
    assert out[-2:] == [
        f"{row}, best: {recipe}, learning rate 0.002, perplexity {least}.00"
        for row, recipe, least in best
    ]
    assert {spec.group for spec, *_ in tried} == {"cpu-tune-lm"}


def test_a_card_that_is_named_twice_is_shared(tried, typed, monkeypatch):
    for cards, rates, found in (
        ("0 0", "1e-3 2e-3", {(0, "1")}),
        ("0 0 1", "3e-3 5e-3 6e-3", {(0, "1"), (1, None)}),
    ):
        monkeypatch.setattr(tune, "probe", lambda: (dataclasses.replace(H200, gpus=2), {}))
        typed(f"tune A1 --preset smoke --learning-rate {rates} --seeds 0 2 --gpus {cards}")
        assert {(gpu, shared) for _, gpu, shared in tried} == found, (
            "one run at a time on the second card"
        )
        tried.clear()


def test_bad_searches_are_refused_by_name(tried, typed):
    assert "--gpus 5: this machine has" in typed("tune A1 --preset smoke --gpus 5", code=2)
    assert "no quality" in typed("tune A1 --preset bench --data synthetic:80 --model tiny", code=2)
    assert not tried


def test_runs_on_one_gpu_take_turns(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="GPU-1")
    )
    gpu, waits = types.SimpleNamespace(type="cuda"), Mock()

    def waited(device=gpu):
        with hardware.gpu_lock(device, waits=waits) as seconds:
            return seconds

    with hardware.gpu_lock(gpu, shared=True) as _, hardware.gpu_lock(gpu, shared=True) as seconds:
        assert seconds < 0.1, "those that are not timed do not wait for each other"
    with ThreadPoolExecutor(1) as pool:
        with hardware.gpu_lock(gpu, waits=waits) as seconds:
            second = pool.submit(waited)
            time.sleep(0.5)
            assert seconds < 0.1 and not second.done()
        assert second.result() >= 0.4 and waits.call_count == 1
    assert waited(torch.device("cpu")) == 0.0


def test_data_that_were_loaded_before_count_as_time_of_the_run(tmp_path):
    spec = planned(sizes={"steps": 2, "measure_from": 1})
    data = load_data(spec)
    assert data.load_s > 0
    data.load_s = 100.0
    times = fit.fit(spec, tmp_path, data=data, say=quiet)["time"]
    assert times["wall_s"] > times["prepare_s"] > 100
