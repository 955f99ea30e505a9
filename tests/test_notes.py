"""What a run puts into its record, of made-up measures; what a real run records is in test_fit.py.

Most are of four processes, which are two pipelines of two stages.
"""

import types
from unittest.mock import Mock

import pytest
import torch

from qa_lib.measure.meter import StepCounts
from qa_lib.records import record
from qa_lib.records.schema import Noise, Speed, StepTime
from qa_lib.run import notes
from qa_lib.train.parallel.process_group import ProcessGroup
from tests.tiny import planned, resized

CPU = torch.device("cpu")


@pytest.fixture
def entry():
    return record.new_record(planned("A1-fp32"), {})


@pytest.fixture
def ranks():
    """The second of the four processes."""
    ranks = ProcessGroup(CPU)
    ranks.rank = 1
    ranks.world = 4
    ranks.stages = 2
    ranks.replicas = 2
    return ranks


@pytest.fixture
def measures():
    """What each process has measured: 8 samples in each of two steps."""
    return [
        notes.RankMeasures(
            joules=rank + 1.0,
            counts=[StepCounts(8, 80, 800, 96, 960), StepCounts(8, 70, 700, 96, 960)],
            samples=[0.1 * rank],
            peak_mib=100.0 + rank,
            step_ms=10.0 + rank,
            weights="alike",
            allreduce_gbs=5.0 + rank,
            pipelined=(0.010 + rank / 1000, 0.020),
            overlap={"busy_ms": 4.0 * rank, "exposed_ms": 2.0},
        )
        for rank in range(4)
    ]


# Sizes and steps.


def test_sizes_of_data_and_model_are_noted(entry):
    data = types.SimpleNamespace(max_answer_length=17, samples=range(5), n_eval=3, n=7)
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    model.config = types.SimpleNamespace(num_hidden_layers=4)
    notes.note_sizes(entry, data, model, steps=11)
    assert entry["spec"]["preset"]["max_answer_length"] == 17
    spec = {name: entry["spec"][name] for name in ("planned_steps", "n_train", "n_eval")}
    assert spec == {"planned_steps": 11, "n_train": 5, "n_eval": 3}
    assert entry["data"]["n"] == 7
    sizes = {name: entry["model"][name] for name in ("params_total", "params_trainable", "layers")}
    assert sizes == {"params_total": 8, "params_trainable": 2, "layers": 4}


def test_a_length_of_answers_that_the_preset_gives_stays_noted(entry):
    data = types.SimpleNamespace(max_answer_length=None, samples=range(5), n_eval=3, n=7)
    model = torch.nn.Linear(3, 2)
    model.config = types.SimpleNamespace(num_hidden_layers=4)
    notes.note_sizes(entry, data, model, steps=11)
    assert entry["spec"]["preset"]["max_answer_length"] == 30


@pytest.mark.parametrize(
    ("before", "steps", "resumed"), [(0, 5, None), (3, 8, 3)], ids=["begun", "resumed"]
)
def test_steps_of_an_earlier_process_count(before, steps, resumed, entry):
    notes.note_steps(entry, 5, before, "went on" if before else None)
    assert entry["time"]["steps"] == steps
    assert entry["time"]["resumed_from_step"] == resumed
    assert entry["spec"]["adjusted"] == (["checkpoint: went on"] if before else [])


def test_the_noise_scale_is_noted_with_the_efficiency_of_the_batch(entry, ranks, monkeypatch):
    monkeypatch.setattr(ranks.stats, "noise", lambda steps: Noise(sqr=1.0, var=500.0, steps=steps))
    ranks.batch = 128
    notes.note_noise(entry, 6, ranks)
    assert entry["parallel"]["noise"] == {"sqr": 1.0, "var": 500.0, "steps": 6}
    assert entry["parallel"]["efficiency"] == pytest.approx(532 / 628)


@pytest.mark.parametrize(
    ("world", "noted", "adjusted"), [(1, None, []), (4, 4, ["world: 4 processes at the end"])]
)
def test_other_processes_than_were_planned_are_noted(world, noted, adjusted, entry, ranks):
    ranks.world = world
    ranks.wrapper = "Engine"
    notes.note_processes(entry, planned("A1-fp32"), ranks)
    assert entry["parallel"]["wrapper"] == "Engine"
    assert entry["parallel"]["world"] == noted
    assert entry["spec"]["adjusted"] == adjusted


# Several processes.


def test_each_process_tells_what_it_has_measured(entry, ranks, monkeypatch):
    monkeypatch.setattr(ranks, "gather", lambda own: [own])
    monkeypatch.setattr(notes.hardware, "reduce_rate", lambda device: 7.5)
    ranks.stats.waits.append(([(0.0, 1.0)], (0.0, 3.0)))
    ranks.stats.overlap = {"busy_ms": 4.0}
    entry["memory"]["peak_alloc_mib"] = 99.0
    meter = types.SimpleNamespace(
        joules_per_sample=lambda: 0.5,
        step_counts=[StepCounts(8, 80, 800, 96, 960)],
        busy_shares=[0.25],
        step_ms=lambda: StepTime(n=2, median=12.0, p10=11.0, p90=13.0),
    )
    model = torch.nn.Linear(1, 1)
    (own,) = notes.gather_measures(entry, meter, model, ranks)
    assert len(own.weights) == 64
    expected = notes.RankMeasures(
        joules=0.5,
        counts=meter.step_counts,
        samples=[0.25],
        peak_mib=99.0,
        step_ms=12.0,
        weights=own.weights,
        allreduce_gbs=7.5,
        pipelined=(1.0, 3.0),
        overlap={"busy_ms": 4.0},
    )
    assert own == expected
    with torch.no_grad():
        model.bias += 1
    assert notes.gather_measures(entry, meter, model, ranks)[0].weights != own.weights


def test_samples_of_a_replica_count_once(measures, ranks):
    meter = types.SimpleNamespace()
    notes.pool_samples(meter, measures, ranks)
    assert meter.step_counts == [
        StepCounts(16, 160, 1600, 192, 1920),
        StepCounts(16, 140, 1400, 192, 1920),
    ]
    assert meter.busy_shares == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_energy_is_that_of_all_processes_over_the_samples_of_the_replicas(measures, ranks):
    assert notes.pooled_joules(measures, ranks) == (1.0 + 2.0 + 3.0 + 4.0) / 2


def test_energy_that_one_process_did_not_measure_is_not_known(measures, ranks):
    measures[2].joules = None
    assert notes.pooled_joules(measures, ranks) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_processes_did_together_is_noted_by_rank(device, measures, ranks, entry, monkeypatch):
    monkeypatch.setattr(notes.hardware, "interconnect", lambda: "NV18")
    ranks.device = torch.device(device)
    notes.note_ranks(entry, measures, ranks)
    on_gpus = device == "cuda"
    expected = {
        "world": 4,
        "replicas": 2,
        "backend": "gloo",
        "interconnect": "NV18" if on_gpus else None,
        "allreduce_gbs": 6.0,
        "rank_peak_mib": {"0": 100.0, "1": 101.0, "2": 102.0, "3": 103.0} if on_gpus else None,
        "rank_step_ms": {"0": 10.0, "1": 11.0, "2": 12.0, "3": 13.0},
        "weights_equal": True,
    }
    assert {name: entry["parallel"][name] for name in expected} == expected


def test_weights_of_one_process_that_differ_are_noted(measures, ranks, entry):
    measures[3].weights = "others"
    notes.note_ranks(entry, measures, ranks)
    assert entry["parallel"]["weights_equal"] is False


def test_a_pipelines_waits_are_noted(measures, ranks, entry):
    """A replica has four of the step's eight micro-batches; the first stage waits most."""
    spec = resized(planned("P-1f1b", micro_batch=2), effective_batch=16)
    assert spec.micro_batches == 8
    notes.note_pipeline(entry, spec, measures, ranks)
    expected = {
        "stages": 2,
        "schedule": "1f1b",
        "bubble": pytest.approx(0.5),
        "bubble_formula": pytest.approx(1 / 5),
        "rank_computing_ms": pytest.approx({"0": 10.0, "1": 11.0, "2": 12.0, "3": 13.0}),
    }
    assert {name: entry["parallel"][name] for name in expected} == expected


def test_what_was_communicated_beside_computing_is_a_mean_of_the_processes(measures, entry):
    notes.note_overlap(entry, measures)
    assert entry["parallel"]["busy_ms"] == 6.0
    assert entry["parallel"]["exposed_ms"] == 2.0


# Times.


@pytest.fixture
def meter():
    """A meter of a run of three steps, the first of which was warm-up."""
    return Mock(
        times=[3.0, 1.0, 2.0],
        warm_up=1,
        measured=slice(1, None),
        compiled_before_s=0.0,
        step_ms=lambda: StepTime(n=2, median=1500.0, p10=1100.0, p90=1900.0),
        data_ms=lambda: 7.0,
        compile_s=lambda: 1.5,
    )


@pytest.mark.parametrize(("backend", "known"), [("none", False), ("inductor", True)])
def test_times_are_noted_and_those_of_compiling_where_something_was_compiled(
    backend, known, entry, meter, monkeypatch
):
    monkeypatch.setattr(notes, "found_in_cache", lambda: True)
    spec = resized(planned(), {"compile": backend})
    notes.note_times(entry, spec, meter, 0.5, Speed(samples_per_s=80.0))
    assert entry["speed"]["samples_per_s"] == 80.0
    time = entry["time"]
    assert time["step_ms"] == {"n": 2, "median": 1500.0, "p10": 1100.0, "p90": 1900.0}
    assert (time["train_s"], time["data_ms"]) == (6.0, 7.0)
    assert entry["energy"]["joules_per_sample"] == 0.5
    assert time["compile_s"] == (1.5 if known else None)
    assert time["compile_cached"] == (True if known else None)


@pytest.mark.parametrize(("efficiency", "goodput"), [(0.25, 20.0), (None, None)])
def test_goodput_is_speed_times_efficiency(efficiency, goodput, entry, meter):
    entry["parallel"]["efficiency"] = efficiency
    notes.note_times(entry, planned(), meter, None, Speed(samples_per_s=80.0))
    assert entry["parallel"]["goodput"] == goodput


def test_a_run_is_timed_from_one_step_beyond_its_warm_up_on(meter):
    assert notes.why_untimed(meter) is None
    meter.warm_up = 3
    meter.measured = slice(3, None)
    assert "too few steps to time: 3, of which the first 3" in notes.why_untimed(meter)
