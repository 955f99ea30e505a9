"""The tables of a language model's variants, on made-up runs."""

import dataclasses

import pytest

from qa_lib.lab.report import evidence, language_tables
from qa_lib.lab.report.language_tables import SCORE
from tests.material import committed, refused
from tests.report_runs import gpu_runs, make
from tests.tiny import H200

SCORES = {"L1": 2.0, "L-bf16": 2.1, "L-sdpa": 1.9}


def scored(variant, seed, bits, training="1 epoch at 0.001", **more):
    """A run with a score."""
    columns = {
        "group": "h200-lm-quality",
        "task.name": "lm",
        "spec.seed": seed,
        "training": training,
        SCORE: bits,
        **more,
    }
    return variant, 1, 32, 32, 100.0, columns


SCORED = [
    scored(name, seed, bits + 0.01 * seed) for name, bits in SCORES.items() for seed in range(3)
]


@pytest.fixture
def timed(tmp_path):
    """Runs of a group of speeds: three variants on one GPU, and one on two."""
    machine = dataclasses.replace(H200, gpus=2)
    for variant, world, speed in (
        ("L1", 1, 100.0),
        ("L-bf16", 1, 250.0),
        ("L-sdpa", 1, 500.0),
        ("L-ddp", 2, 900.0),
    ):
        make(tmp_path, variant, machine=machine, preset="lm-bench", world=world, speed=speed)
    return evidence.select(evidence.load_runs(tmp_path), "h200-lm-bench")


def table_of(runs, timed, monkeypatch):
    """The table of scores of runs, by variant."""
    monkeypatch.setattr(evidence, "select", lambda runs, group: runs)
    table = language_tables.scores_table(gpu_runs(*runs), "h200-lm-quality", timed)
    return table.set_index("variant")


def test_speeds_are_of_one_gpu(timed):
    table = language_tables.speeds_table(timed).set_index("variant")
    assert list(table.index) == ["L1", "L-bf16", "L-sdpa"]
    assert table["× L1"].tolist() == ["1.00", "2.50", "5.00"]


def test_speeds_of_several_gpus_alone_are_not_shown(timed):
    several = timed[timed["world"] > 1]
    refused("no language model was timed on one GPU", language_tables.speeds_table, several)


def test_scores_stand_beside_the_speeds_of_their_variants(timed, monkeypatch):
    table = table_of(SCORED, timed, monkeypatch)
    assert list(table.index) == ["L1", "L-bf16", "L-sdpa"]
    assert table["× L1"].tolist() == ["1.00", "2.50", "5.00"]
    assert table["bits per byte"].tolist() == ["2.010 ± 0.017", "2.110 ± 0.017", "1.910 ± 0.017"]
    assert table["against L1"].tolist() == ["–", "0.100 ± 0.000", "−0.100 ± 0.000"]


def test_a_score_is_against_the_baseline_over_equal_seeds(timed, monkeypatch):
    more = [scored("L-bf16", seed, 9.0) for seed in (3, 4)]
    table = table_of([*SCORED, *more], timed, monkeypatch)
    assert table.loc["L-bf16", "n"] == "5"
    assert table.loc["L-bf16", "against L1"] == "0.100 ± 0.000"


def test_variants_that_were_not_timed_have_no_line(timed, monkeypatch):
    runs = [*SCORED, scored("L-lora", 0, 3.0), scored("L-sdpa", 3, 9.0, status="killed")]
    table = table_of(runs, timed, monkeypatch)
    assert list(table.index) == ["L1", "L-bf16", "L-sdpa"]
    assert table.loc["L-sdpa", "n"] == "3"


def test_scores_are_of_the_training_that_most_variants_had(timed, monkeypatch):
    often = [scored("L1", seed, 7.0, training="at another rate") for seed in range(20)]
    table = table_of([*often, *SCORED], timed, monkeypatch)
    assert table.loc["L1", "n"] == "3"
    assert table.loc["L1", "bits per byte"].startswith("2.010")


def test_scores_take_the_baseline(timed, monkeypatch):
    without = [run for run in SCORED if run[0] != "L1"]
    refused("L1 has no bits per byte", table_of, without, timed, monkeypatch)


def test_the_committed_records_have_scores_beside_speeds():
    every = committed()
    timed = evidence.select(every, "h200-lm-bench")
    table = language_tables.scores_table(every, "h200-lm-quality", timed)
    assert table["variant"].is_unique
    assert table["variant"].iloc[0] == "L1"
