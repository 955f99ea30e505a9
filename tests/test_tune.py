"""Searches: the points they try; how runs share a GPU or take turns on it, and their times."""

import dataclasses
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from qa_lib.__main__ import main
from qa_lib.data.load import load_data
from qa_lib.errors import UserError
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
    """The specs that would have run, each with the card that it got and whether it shared it.

    The score at the best threshold is best at a rate of 2e-3, and worst with rank 32. At 4e-3 seed
    1 fails, and at threshold 0 that rate looks best.
    """
    specs = []

    def work(self, spec, run_dir, cards):
        time.sleep(0.05)  # so that each card gets one
        specs.append((spec, *cards, child_env(cards, self._shares(cards)).get(SHARE)))
        rate = spec.preset.learning_rate
        entry = record.new_record(spec, {})
        if (rate, spec.seed) == (4e-3, 1):
            return record.finish(run_dir, entry, "error", {"message": "loss is nan at step 12"})
        score = 90 - 1e4 * abs(rate - 2e-3) - spec.recipe.rank
        if spec.preset.task == "lm":
            entry["quality"]["word_perplexity"] = 110 - score
        else:
            entry["quality"] |= {"f1": 1e4 * rate, "best_f1": score}
        return record.finish(run_dir, entry, "ok")

    monkeypatch.setattr(launch.Launcher, "_work", work)
    monkeypatch.setattr(tune, "probe", lambda: (CPU, {}))
    monkeypatch.chdir(tmp_path)  # where runs go unless they are told
    return specs


@pytest.fixture(scope="module")
def lora():
    return planned("B1-all")


@pytest.fixture(scope="module")
def points(lora):
    return tune.points([lora], [1e-3, 2e-3], ["lora-all-r8", "lora-qv-r32"])


def test_points_are_all_pairs_of_rates_and_recipes(points):
    pairs = [(point.preset.learning_rate, point.asked.trainable) for point in points]
    assert pairs == [
        (1e-3, "lora-all-r8"),
        (1e-3, "lora-qv-r32"),
        (2e-3, "lora-all-r8"),
        (2e-3, "lora-qv-r32"),
    ]
    assert [point.recipe.rank for point in points] == [8, 32, 8, 32]


def test_every_point_is_a_run_of_its_own_in_a_group_of_tries(lora, points):
    assert len({lora.hash, *(point.hash for point in points)}) == 5
    assert {point.group for point in points} == {"cpu-tune"}
    assert {point.search for point in points} == {"tune"}


def test_a_point_trains_at_the_rate_that_was_asked_for(lora, points):
    assert lora.recipe.lr_factor > 1
    assert {point.recipe.lr_factor for point in points} == {1.0}


@pytest.mark.parametrize(("recipe_rates", "rate"), [(True, "0.005"), (False, "0.001")])
def test_a_point_is_named_by_the_rate_that_its_recipe_makes_of_the_presets(
    recipe_rates, rate, lora
):
    preset = dataclasses.replace(lora.preset, recipe_rates=recipe_rates, learning_rate=1e-3)
    point = dataclasses.replace(lora, preset=preset)
    assert tune.point_name(point) == f"lora-all, learning rate {rate}"


def test_without_rates_and_recipes_the_specs_own_stand(lora):
    (point,) = tune.points([lora], [], [])
    assert point.asked.trainable == "lora-all"


def test_a_recipe_that_does_not_exist_is_refused(lora):
    refused("lora-any-r8", tune.points, [lora], [], ["lora-any-r8"])


def test_the_best_point_is_named(tried, typed):
    words = "--preset smoke --trainable lora-all-r8 lora-all-r32 --learning-rate 1e-3 2e-3 4e-3"
    out = typed(f"tune B1-all {words}").splitlines()
    assert out[6:] == [
        "B1-all, best: lora-all-r8, learning rate 0.002, F1 at the best threshold 82.00"
    ]
    assert [cards for _, *cards in tried] == [[None]] * 6


def test_without_a_point_that_has_all_its_seeds_none_is_the_best(tried, capsys):
    words = "--preset smoke --learning-rate 4e-3 --seeds 0 1"
    assert main(f"tune B1-all {words}".split()) == 1
    assert "B1-all: no point was measured with every seed" in capsys.readouterr().out


def test_a_point_that_fails_ends_no_search_and_is_not_the_best(tried, capsys):
    words = "--preset smoke --trainable lora-all-r8 --learning-rate 4e-3 1e-3 --seeds 0 1"
    assert main(f"tune B1-all {words}".split()) == 1
    out = capsys.readouterr().out
    assert "loss is nan at step 12" in out
    assert len(tried) == 4
    assert (
        out.splitlines()[-1]
        == "B1-all, best: lora-all-r8, learning rate 0.001, F1 at the best threshold 72.00"
    )


def test_a_point_that_runs_out_of_memory_is_a_result_and_no_failure(tried, monkeypatch, typed):
    def work(self, spec, run_dir, cards):
        return record.finish(run_dir, record.new_record(spec, {}), "oom", {"message": "too much"})

    monkeypatch.setattr(launch.Launcher, "_work", work)
    assert ": oom, too much" in typed("tune A1 --preset smoke --learning-rate 1e-3")


def test_a_point_that_lacks_a_seed_is_not_the_best_however_well_it_scored(tried, capsys):
    words = "--preset smoke --trainable lora-all-r8 --learning-rate 4e-3 9e-3 --seeds 0 1"
    main(f"tune B1-all {words}".split())
    best = capsys.readouterr().out.splitlines()[-1]
    assert best.startswith("B1-all, best: lora-all-r8, learning rate 0.009, ")


def test_a_language_model_is_tuned_to_the_least_perplexity(tried, typed):
    out = typed("tune L1 L-lora --preset lm-smoke --learning-rate 1e-3 2e-3 3e-3").splitlines()
    assert out[-2:] == [
        "L1, best: all, learning rate 0.002, perplexity 28.00",
        "L-lora, best: lora-all, learning rate 0.002, perplexity 52.00",  # without its factor
    ]
    assert {spec.group for spec, *_ in tried} == {"cpu-tune-lm"}


@pytest.mark.parametrize(("cards", "used"), [("0 0", {(0, "1")}), ("0 0 1", {(0, "1"), (1, None)})])
def test_a_card_that_is_named_twice_is_shared(cards, used, tried, typed, monkeypatch):
    """One that is named once has one run at a time."""
    monkeypatch.setattr(tune, "probe", lambda: (dataclasses.replace(H200, gpus=2), {}))
    rates = "--learning-rate 3e-3 5e-3 6e-3"
    typed(f"tune A1 --preset smoke {rates} --seeds 0 2 --gpus {cards}")
    assert {(gpu, shared) for _, gpu, shared in tried} == used


def test_a_search_names_the_gpus_that_stay_idle(tried, typed, monkeypatch):
    monkeypatch.setattr(tune, "probe", lambda: (dataclasses.replace(H200, gpus=2), {}))
    out = typed("tune A1 --preset smoke --learning-rate 3e-3")
    assert out.startswith("one of 2 GPUs has work at a time")


def test_what_is_typed_reaches_the_plan_and_the_launcher(monkeypatch, tmp_path, typed):
    plan, launcher = Mock(wraps=tune.plan), Mock(side_effect=UserError("no launcher"))
    monkeypatch.setattr(tune, "plan", plan)
    monkeypatch.setattr(tune, "Launcher", launcher)
    monkeypatch.setattr(tune, "probe", lambda: (CPU, {"gpu": None}))
    sizes = {"micro_batch": 2, "batch": 4, "max_answer_length": 9}
    typed(
        "tune A1 --preset smoke --data synthetic:40 --model tiny --seeds 3 4 --time-limit 7 "
        "--micro-batch 2 --batch 4 --max-answer-length 9 --runs",
        tmp_path,
        code=2,
    )
    asked = plan.call_args.kwargs
    assert {name: asked[name] for name in sizes} == sizes
    assert (asked["variants"], asked["preset"], asked["seeds"]) == (["A1"], "smoke", [3, 4])
    assert (asked["data"], asked["model"], asked["machine"]) == ("synthetic:40", "tiny", CPU)
    (call,) = launcher.call_args_list
    assert call.kwargs == {
        "runs": asked["runs"],
        "machine": CPU,
        "env": {"gpu": None},
        "gpus": None,
        "share": True,
        "time_limit_s": 7,
    }
    assert str(asked["runs"]) == str(tmp_path)


BAD_SEARCHES = [
    ("--preset smoke --gpus 5", "--gpus 5: this machine has"),
    ("--preset bench --data synthetic:80 --model tiny", "no quality"),
]


@pytest.mark.parametrize(("words", "message"), BAD_SEARCHES)
def test_bad_searches_are_refused_by_name(words, message, tried, typed):
    assert message in typed(f"tune A1 {words}", code=2)
    assert not tried


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that there is not, whose lock is this test's own."""
    monkeypatch.setattr(hardware.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="GPU-1")
    )
    return types.SimpleNamespace(type="cuda")


def seconds_waited(device, waits):
    with hardware.gpu_lock(device, waits=waits) as seconds:
        return seconds


def test_runs_that_are_not_timed_do_not_wait_for_each_other(gpu):
    with hardware.gpu_lock(gpu, shared=True), hardware.gpu_lock(gpu, shared=True) as seconds:
        assert seconds < 0.1


def test_timed_runs_on_one_gpu_take_turns(gpu):
    waits = Mock()
    with ThreadPoolExecutor(1) as pool:
        with hardware.gpu_lock(gpu, waits=waits) as seconds:
            assert seconds < 0.1
            second = pool.submit(seconds_waited, gpu, waits)
            time.sleep(0.5)
            assert not second.done()
        assert second.result() >= 0.4
    assert waits.call_count == 1


def test_runs_on_a_cpu_do_not_wait(gpu):
    assert seconds_waited(torch.device("cpu"), Mock()) == 0.0


def test_data_that_were_loaded_before_count_as_time_of_the_run(tmp_path):
    spec = planned(sizes={"steps": 2, "measure_from": 1})
    data = load_data(spec)
    assert data.load_s > 0
    data.load_s = 100.0
    times = fit.fit(spec, tmp_path, data=data, say=quiet)["time"]
    assert times["wall_s"] > times["prepare_s"] > 100
