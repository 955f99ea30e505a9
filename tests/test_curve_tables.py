"""The tables of memory and speed against length and batch, on made-up points."""

import math

import pandas as pd
import pytest

from qa_lib.lab.report import curve_tables
from tests.material import refused
from tests.report_runs import gpu_runs

# What ran.


def test_runs_are_chosen_by_the_variants_that_are_named(monkeypatch):
    runs = gpu_runs(*((name, 1, 32, 32, 100, {"group": "g"}) for name in ("A1", "A2", "A1-fp32")))
    monkeypatch.setattr(curve_tables.evidence, "select_or_empty", lambda runs, group: runs)
    chosen = curve_tables.chosen_runs(runs, "g", "A2 A1")
    assert chosen["spec.variant"].tolist() == ["A1", "A2"]
    assert len(curve_tables.chosen_runs(runs, "g", "")) == 3


def sized(group, length, micro_batch, gpu="NVIDIA H200"):
    """A run of a group at a size."""
    columns = {
        "group": group,
        "model.name": "bert",
        "env.gpu": gpu,
        "data.name": "squad",
        "length": length,
    }
    return "A1", 1, 0, micro_batch, 100, columns


def test_a_group_is_named_with_the_sizes_that_ran():
    lengths = [sized("b", length, 8) for length in (512, 64, 128, 256, 384)]
    batches = [sized("a", 64, micro_batch) for micro_batch in (8, 16, 16, 4, 32)]
    runs = gpu_runs(*lengths, *batches, sized("c", 64, 8))
    table = curve_tables.setup_table(runs, ["b", "a", "nothing"])
    assert table["group"].tolist() == ["a", "b"]
    assert table["runs"].tolist() == ["5", "5"]
    assert table["lengths"].tolist() == ["64", "64/…/512"]
    assert table["micro-batches"].tolist() == ["4/8/16/32", "8"]


def test_a_group_of_a_cpu_has_no_hardware():
    table = curve_tables.setup_table(gpu_runs(sized("a", 64, 8, gpu=None)), ["a"])
    assert table["hardware"].tolist() == [""]


# One optimization after the other.


def points_of(*lines):
    """Points of (variant, length, micro-batch, GiB, samples/s), with other columns after these."""
    rows = []
    for variant, length, micro_batch, gib, speed, *more in lines:
        rows.append({
            "variant": variant,
            "length": length,
            "batch": 0,
            "micro_batch": micro_batch,
            "gib": gib,
            "speed": speed,
            "tokens": length * micro_batch,
            "states": 1.0,
            "predicted": gib,
            "oom": False,
            "code": "a",
            **(more[0] if more else {}),
        })  # fmt: skip
    return pd.DataFrame(rows)


def test_a_step_is_over_the_nearest_ancestor_that_ran_at_its_size():
    points = points_of(
        ("A1", 384, 32, 8.0, 100.0),
        ("A2", 128, 32, 3.0, 300.0),
        ("A3", 384, 32, 2.0, 150.0),
    )
    (step,) = curve_tables.steps_table(points).to_dict("records")
    assert step["variant"] == "A3"
    assert step["what it changes"] == "A1 + attention: sdpa + compile: inductor"
    assert (step["memory"], step["speed"]) == ("×0.25", "×1.50")


def test_a_variant_has_one_step_over_the_variant_that_it_changes():
    points = points_of(*((name, 384, 32, 8.0, 100.0) for name in ("A1", "A2", "A3")))
    steps = curve_tables.steps_table(points)
    assert steps["variant"].tolist() == ["A2", "A3"]
    assert steps["what it changes"].iloc[-1] == "A2 + compile: inductor"


def test_a_step_is_at_the_size_of_the_most_tokens_that_both_ran():
    sizes = [(384, 32), (128, 64), (4096, 1)]
    points = points_of(
        *(("A1", length, micro_batch, 8.0, 100.0) for length, micro_batch in sizes),
        *(("A2", length, micro_batch, 4.0, 100.0) for length, micro_batch in sizes),
        ("A2", 512, 64, 4.0, 100.0),
    )
    (step,) = curve_tables.steps_table(points).to_dict("records")
    assert (step["length"], step["micro-batch"]) == ("384", "32")


def test_what_ran_out_of_memory_is_no_step():
    out_of_memory = {"oom": True}
    points = points_of(
        ("A1", 128, 32, 8.0, 100.0),
        ("A1", 512, 32, math.nan, math.nan, out_of_memory),
        ("A2", 128, 32, 4.0, 200.0),
        ("A2", 512, 32, 8.0, 100.0),
    )
    (step,) = curve_tables.steps_table(points).to_dict("records")
    assert step["length"] == "128"


@pytest.mark.parametrize(
    ("speed", "code", "said"),
    [(200.0, "b", "×2.00 of another day"), (200.0, "a", "×2.00"), (math.nan, "b", None)],
)
def test_a_speed_by_other_code_says_so(speed, code, said):
    points = points_of(("A1", 128, 32, 8.0, 100.0), ("A2", 128, 32, 4.0, speed, {"code": code}))
    (step,) = curve_tables.steps_table(points).to_dict("records")
    assert step.get("speed") == said


def test_variants_that_this_code_does_not_know_make_no_step():
    points = points_of(("A1", 128, 32, 8.0, 100.0), ("A-of-old", 128, 32, 4.0, 100.0))
    assert curve_tables.steps_table(points).empty


# The two costs.


def on_a_line(variant, size, fixed, kib_a_token, values):
    """Points of a variant on a straight line over one size."""
    lines = []
    for value in values:
        length, micro_batch = (64, value) if size == "micro_batch" else (value, 8)
        gib = fixed + kib_a_token * length * micro_batch / 2**20
        lines.append((variant, length, micro_batch, gib, 10.0 * micro_batch))
    return lines


def test_a_variant_has_its_fixed_cost_and_that_of_a_token():
    points = points_of(*on_a_line("A1", "micro_batch", 1.5, 512, (8, 16, 32)))
    (costs,) = curve_tables.costs_table(points).to_dict("records")
    assert costs["fixed GiB"] == "1.50"
    assert costs["KiB a token"] == "512"
    assert costs["line misses by"] == "0.00 %"
    assert costs["weights + gradients + optimizer GiB"] == "1.00"


def test_costs_are_of_the_curve_whose_line_misses_least():
    points = points_of(
        *on_a_line("A1", "length", 2.0, 256, (32, 64, 128)),
        ("A1", 64, 16, 9.0, 1.0),
        ("A1", 64, 32, 5.0, 1.0),
    )
    (costs,) = curve_tables.costs_table(points).to_dict("records")
    assert costs["fixed GiB"] == "2.00"
    assert costs["KiB a token"] == "256"


def test_what_is_no_straight_line_has_no_costs_and_says_by_how_much():
    points = points_of(("A1", 64, 8, 2.0, 1.0), ("A1", 64, 16, 9.0, 1.0), ("A1", 64, 32, 5.0, 1.0))
    (costs,) = curve_tables.costs_table(points).to_dict("records")
    assert "fixed GiB" not in costs
    assert "KiB a token" not in costs
    assert float(costs["line misses by"].removesuffix(" %")) > 5


def test_the_largest_miss_of_the_prediction_has_its_sign():
    predictions = {8: 2.1, 16: 1.6, 32: math.nan}
    points = points_of(
        *(("A1", 64, size, 2.0, 1.0, {"predicted": gib}) for size, gib in predictions.items())
    )
    (costs,) = curve_tables.costs_table(points).to_dict("records")
    assert costs["prediction misses by"] == "-20.0 %"


def test_sizes_are_whole_numbers_where_another_variant_has_none():
    out_of_memory = {"oom": True}
    points = points_of(
        ("A1", 64, 8, 2.0, 90.0),
        ("A1", 64, 16, 3.0, 80.0),
        ("A1", 64, 32, math.nan, math.nan, out_of_memory),
        ("A1", 64, 64, math.nan, math.nan, out_of_memory),
        ("A2", 64, 8, 2.0, 50.0),
    )
    first, second = curve_tables.costs_table(points).to_dict("records")
    assert (first["largest that ran"], second["largest that ran"]) == ("16", "8")
    assert (first["too large"], second["too large"]) == ("32", "–")
    assert (first["best samples/s"], first["at micro_batch"]) == ("90.0", "8")


def test_lengths_are_told_where_no_micro_batch_differs():
    points = points_of(("A1", 64, 8, 2.0, 90.0), ("A1", 512, 8, 9.0, 10.0))
    (costs,) = curve_tables.costs_table(points).to_dict("records")
    assert costs["largest that ran"] == "512"
    assert costs["at length"] == "64"


def test_one_size_alone_has_no_costs():
    points = points_of(("A1", 64, 8, 2.0, 90.0))
    refused("no two runs differ in length alone", curve_tables.costs_table, points)
