"""Scores beside speeds, and the goals of the language model, from records whose answers are known."""

import pytest
from IPython.display import Markdown
from qa_lib.report.runs import NotMeasured, load_runs
from qa_lib.report.text import said_or_why

from qa_lib.report import goals, scores
from tests.test_report import GPU, make
from tests.test_tradeoffs import SHAPES, write

QUALITY, BENCH = "h200-lm-quality", "h200-lm-bench"


@pytest.fixture
def every(tmp_path):
    """L1, L-bf16 and L-dropout with three seeds of one shape and rate, L-dropout at other shapes, rates and lengths
    too; all but L-sdpa timed."""
    for seed in range(3):
        for row, loss in (("L1", 2.0), ("L-bf16", 2.01), ("L-dropout", 1.99), ("L-sdpa", 2.5)):
            write(tmp_path, SHAPES[2], seed, loss + seed / 10, row=row)
        for other in ({"rate": 2e-3}, {"length": 256}, {"epochs": 1}):
            write(tmp_path, SHAPES[2], seed, 9.0, **other)
        write(tmp_path, SHAPES[3], seed, 9.0)
    for row, speed in (
        ("L1", 40.0),
        ("L-bf16", 100.0),
        ("L-dropout", 480.0),
        ("L0-compile", 320.0),
        ("L-compile", 200.0),
    ):
        make(tmp_path, row, machine=GPU, preset="lm-bench", task="lm", micro_batch=32, model=goals.SHAPE, speed=speed)
    runs = load_runs(tmp_path)
    timed = runs["group"] == BENCH
    return runs.assign(**{
        "speed.tokens_per_s_padded": (runs["speed.samples_per_s"] * 1024).where(timed),
        "speed.gemm_utilization": 0.6, "speed.gemm_tflops_measured": 700.0, "env.gpu": "NVIDIA H200",
    })  # fmt: skip


def table_of(shown):
    """{row: cells} of the first of what a notebook shows."""
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown[0].data.splitlines()]
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def test_only_rows_that_were_trained_alike_stand_in_one_table(every):
    table = table_of(scores.shown(every, QUALITY, BENCH))
    assert list(table) == ["L1", "L-bf16", "L-dropout"], "L-sdpa was not timed, L-compile has no score"
    best = {name: cell.replace("\u00a0", " ") for name, cell in table["L-dropout"].items()}
    assert (best["× L1"], best["n"]) == ("12.0", "3")
    assert best["bits per byte"] == "2.090 ± 0.169", "9.0 is of another rate, length, number of epochs or shape"
    assert best["against L1"] == "−0.010 ± 0.000", "over equal seeds, which all three differ by as much"
    assert table["L-bf16"]["against L1"].startswith("+0.010")
    shorter = every[(every["spec.variant"] != "L-bf16") | (every["spec.seed"] < 2)]
    assert table_of(scores.shown(shorter, QUALITY, BENCH))["L-bf16"]["against L1"].replace("\u00a0", " ") == "+0.010"
    more = every[(every["spec.variant"] != "L1") | (every["spec.seed"] < 2)]
    assert table_of(scores.shown(more, QUALITY, BENCH))["L-bf16"]["against L1"].endswith("\u00a02)"), (
        "of its three seeds"
    )


def test_the_table_says_what_was_trained_and_what_was_timed(every):
    said = scores.shown(every, QUALITY, BENCH)[1].data
    assert f"Scores: group {QUALITY}, {SHAPES[2]}, length 512, 3 epochs at 0.001, micro-batch" in said
    assert f"Speeds: group {BENCH}, {goals.SHAPE}, micro-batch 32." in said and "never answers" not in said


def test_named_rows_stand_there_without_a_speed_too(every):
    table = table_of(scores.shown(every, QUALITY, BENCH, "L1 L-sdpa"))
    assert list(table) == ["L1", "L-sdpa"] and table["L-sdpa"]["× L1"] == "–"


def test_questions_have_a_margin(tmp_path):
    for seed in range(3):
        for row, f1 in (("A1", 60.0), ("A2", 60.1), ("A3", 50.0)):
            make(tmp_path, row, seed, machine=GPU, preset="quality", f1=f1 + seed)
            make(tmp_path, row, seed, machine=GPU, preset="bench")
    every = load_runs(tmp_path).assign(**{"quality.always_null_f1": 52.12})
    shown = scores.shown(every, "h200-quality", "h200-bench", "A1 A2 A3")
    table = table_of(shown)
    assert [table[row]["within 1 F1"] for row in ("A1", "A2", "A3")] == ["–", "✓", "✗"]
    assert table["A2"]["against A1"].replace("\u00a0", " ") == "+0.10 ± 0.00" and table["A2"]["× A1"] == "1.20"
    assert "A model that never answers has 52.12." in shown[1].data


def test_two_rows_are_held_against_each_other_over_equal_seeds(every):
    said = scores.apart(every, QUALITY, "L-dropout", "L-bf16").replace("\u00a0", " ")
    assert (
        "ends at 2.090 bits per byte with L-dropout and at 2.110 with L-bf16: −0.020 ± 0.000 over 3 seeds, where"
        in said
    )
    assert f"`{SHAPES[2]}`, 3 epochs at 0.001" in said
    other = every[(every["spec.variant"] != "L-bf16") | (every["spec.seed"] == 0)]
    assert "−0.020 over 1 seed, where less is better" in scores.apart(other, QUALITY, "L-dropout", "L-bf16")
    for absent in ("L-compile", "L0-compile"):
        with pytest.raises(NotMeasured, match="no two of these rows have bits per byte"):
            scores.apart(every, QUALITY, "L-dropout", absent)


def test_scores_that_are_not_there_are_told(every):
    for group, bench, rows, why in (
        ("nowhere", BENCH, "", "group 'nowhere' has no records"),
        (QUALITY, "nowhere", "", "group 'nowhere' has no records"),
        (QUALITY, BENCH, "L-bf16 L-compile", "no two of these rows have bits per byte in group h200-lm-quality"),
    ):
        (said,) = scores.shown(every, group, bench, rows)
        assert isinstance(said, Markdown) and why in said.data


def test_goals_say_what_was_reached_and_what_was_missed(every):
    said = goals.reached(every, BENCH)
    assert "500,000 tokens/s (491,520, missed by 8,480)" in said
    assert "Trainer with all it offers, L0-compile (×1.50, missed by 0.50)" in said
    assert "at least 45 % of the data sheet's peak (42.5 %, missed by 2.53 percentage points)" in said
    faster = every.assign(**{
        "speed.tokens_per_s_padded": every["speed.tokens_per_s_padded"].where(every["spec.variant"] != "L-dropout", 900_000.0),
        "speed.gemm_utilization": 0.7,
    })  # fmt: skip
    said = goals.reached(faster, BENCH)
    assert "(900,000, met)" in said and "(×2.75, met)" in said and "(49.5 %, met)" in said
    unknown = goals.reached(every.assign(**{"env.gpu": "another card"}), BENCH)
    assert "data sheet's peak (not known)" in unknown


def test_goals_are_of_one_shape_and_length(every):
    for other in ({"model.name": "gpt2:L6H384"}, {"length": 512}, {"world": 2}):
        with pytest.raises(NotMeasured, match="no run of gpt2:L12H768 at 1,024 tokens on one GPU"):
            goals.reached(every.assign(**other), BENCH)
    without = every[every["spec.variant"] != "L0-compile"]
    assert said_or_why(goals.reached, without, BENCH) == f"*Not known: group {BENCH} has no run of L0-compile.*"
