"""The table of models in 8 and 4 bits, on made-up runs."""

from types import SimpleNamespace

import pandas as pd
import pytest

from qa_lib.lab.report import quantized_table
from qa_lib.lab.report.quantized_table import (
    FULL,
    NOT_ROUNDED,
    ROUNDED_AFTER,
    ROUNDED_DURING,
    quantized_scores,
)
from tests.material import refused
from tests.report_runs import gpu_runs


def a_file(width, before, after, before_ms=40.0, after_ms=20.0):
    """What is kept of a quantized model whose F1 was one and became another."""

    def model(f1, weights_bytes, latency_ms):
        return {
            "best_f1": f1,
            "f1": f1 - 10.0,
            "weights_bytes": weights_bytes,
            "latency_ms": latency_ms,
        }

    return {
        "width": width,
        "before": model(before, 90e6, before_ms),
        "after": model(after, 60e6, after_ms),
    }


def trained(variant, seed, *files, group="h200-quality", **more):
    """A run whose model was quantized to these."""
    columns = {
        "group": group,
        "spec.seed": seed,
        "task.name": "qa",
        "run": SimpleNamespace(quantized=lambda: list(files)),
        **more,
    }
    return variant, 1, 32, 32, 100.0, columns


RUNS = [
    trained(FULL, 0, a_file("int8", 60.0, 59.0), a_file("int4", 60.0, 55.0)),
    trained(FULL, 1, a_file("int8", 62.0, 61.0), a_file("int4", 62.0, 57.0)),
    trained("A1-int8", 0, a_file("int8", 50.0, 60.5, after_ms=10.0)),
    trained("A1-int4", 1, a_file("int4", 50.0, 60.0)),
]


def test_a_model_counts_as_it_is_and_as_it_was_rounded():
    scores = quantized_scores(gpu_runs(*RUNS))
    assert scores["f1"].to_dict() == {
        (NOT_ROUNDED, "fp32", 0): 60.0,
        (NOT_ROUNDED, "fp32", 1): 62.0,
        (ROUNDED_AFTER, "int8", 0): 59.0,
        (ROUNDED_AFTER, "int8", 1): 61.0,
        (ROUNDED_AFTER, "int4", 0): 55.0,
        (ROUNDED_AFTER, "int4", 1): 57.0,
        (ROUNDED_DURING, "int8", 0): 60.5,
        (ROUNDED_DURING, "int4", 1): 60.0,
    }


def test_a_change_is_against_full_precision_of_the_same_seed():
    scores = quantized_scores(gpu_runs(*RUNS))
    assert scores.loc[(ROUNDED_DURING, "int8", 0), "change"] == 0.5
    assert scores.loc[(ROUNDED_DURING, "int4", 1), "change"] == -2.0
    assert scores.loc[(ROUNDED_AFTER, "int4", 1), "change_at_0"] == -5.0


def test_a_seed_without_full_precision_has_no_change():
    alone = trained("A1-int8", 7, a_file("int8", 50.0, 60.0))
    scores = quantized_scores(gpu_runs(*RUNS, alone))
    assert pd.isna(scores.loc[(ROUNDED_DURING, "int8", 7), "change"])


def test_speed_is_over_the_same_run_before_it_was_rounded():
    scores = quantized_scores(gpu_runs(*RUNS))
    assert scores.loc[(ROUNDED_DURING, "int8", 0), "quicker"] == 4.0
    assert scores.loc[(NOT_ROUNDED, "fp32", 0), "quicker"] == 1.0
    assert scores.loc[(ROUNDED_AFTER, "int8", 0), "mb"] == 60.0


def test_a_model_that_was_trained_for_another_width_does_not_count():
    other = trained("A1-int8", 0, a_file("int4", 50.0, 10.0))
    scores = quantized_scores(gpu_runs(*RUNS, other))
    assert (ROUNDED_DURING, "int4", 0) not in scores.index


@pytest.mark.parametrize("runs", [[trained(FULL, 0)], RUNS[2:]], ids=["none", "others"])
def test_without_full_precision_there_is_nothing_to_compare_with(runs):
    refused("no run of A1-fp32 was quantized", quantized_scores, gpu_runs(*runs))


# The table.


@pytest.fixture
def table(monkeypatch):
    """The table of RUNS, on hardware on which A1-int8 trains at two fifths of the speed."""
    timed = gpu_runs(
        (FULL, 1, 32, 32, 100.0, {"task.name": "qa"}),
        (FULL, 1, 32, 8, 10.0, {"task.name": "qa"}),
        ("A1-int8", 1, 32, 32, 40.0, {"task.name": "qa"}),
    )
    evidence = quantized_table.evidence
    monkeypatch.setattr(evidence, "runs_at_preset", lambda runs, group, preset: timed)
    monkeypatch.setattr(evidence, "select", lambda runs, group: runs)
    shown = quantized_table.quantized_table(gpu_runs(*RUNS), "h200-quality")
    return shown.set_index("what it is")


def test_the_table_goes_from_full_precision_to_fewer_bits(table):
    assert list(table.index) == [
        "full precision fp32",
        "post-training int8",
        "post-training int4",
        "quantization-aware int8",
        "quantization-aware int4",
    ]
    assert table["variant"].tolist() == [FULL, FULL, FULL, "A1-int8", "A1-int4"]
    assert table["n"].tolist() == ["2", "2", "2", "1", "1"]


def test_full_precision_is_not_compared_with_itself(table):
    full = table.loc["full precision fp32"]
    assert full[["ΔF1", "ΔF1 at 0", "× as quick"]].tolist() == ["–"] * 3
    assert full["F1"] == "61.00"


def test_training_speed_is_that_of_the_variant_at_the_largest_micro_batch(table):
    assert table["× training speed"].tolist() == ["1.00", "1.00", "1.00", "0.40", "–"]


def test_a_run_that_did_not_end_ok_does_not_count(monkeypatch):
    monkeypatch.setattr(quantized_table.evidence, "select", lambda runs, group: runs)
    runs = gpu_runs(*RUNS).assign(status="killed")
    refused("no run of A1-fp32", quantized_table.quantized_table, runs, "h200-quality")
