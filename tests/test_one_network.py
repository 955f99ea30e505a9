"""The table of one pretrained network: its speed, time and F1."""

from pathlib import Path

import pandas as pd
import pytest

from qa_lib.lab.report import evidence, one_network
from qa_lib.lab.report.in_turns import PLAIN, STACK, STACK_16_BITS
from qa_lib.lab.report.stats import BEST_EXACT, BEST_F1, F1
from tests.material import committed
from tests.test_in_turns import cells_of, run

MPNET = {
    "model": "all-mpnet-base-v2",
    "model.name": "all-mpnet-base-v2",
    "model.params_total": 109e6,
    "spec.hardware": "h200",
    "code.digest": None,
    evidence.EPOCHS: 3.0,
    "spec.n_train": 64553,
    "time.resumed_from_step": None,
    "time.compile_cached": False,
    "time.compile_s": None,
    "time.first_step_s": 20.0,
    "time.wall_s": None,
}
SPEEDS = {PLAIN: 2000.0, STACK_16_BITS: 3600.0, STACK: 4000.0}


def timed(name, seed):
    """A run in turns."""
    columns = MPNET | {evidence.EPOCHS: None}
    return run(name, seed, SPEEDS[name], 1e4 / SPEEDS[name], **columns)


def trained(name, seed, f1, **more):
    """A whole training that was scored; it took 100 s, of which 60 s trained."""
    scores = {BEST_F1: f1, F1: f1 - 1.0, BEST_EXACT: f1 - 3.0}
    times = {"time.notebook_s": 100.0, "time.train_s": 60.0}
    quality = {"spec.preset.name": "quality", "group": "h200-quality"}
    return run(name, seed, None, None, **MPNET | quality | scores | times | more)


SHARED = {"time.notebook_s": None}  # a run that shared its GPU has no time
ROWS = [
    *(timed(name, seed) for name in SPEEDS for seed in range(3)),
    *(trained(STACK, seed, 80.0 + seed) for seed in range(3)),
    trained(PLAIN, 0, 81.0, **{"time.compile_s": 20.0}),
    *(trained("A1", seed, 79.0, **SHARED) for seed in range(2)),
]


def text_of(rows):
    return one_network.one_network(pd.DataFrame(rows), "", Path("figures"))


def test_a_row_has_what_was_measured_of_a_variant():
    head, *rows = cells_of(text_of(ROWS))
    assert head[1:] == [
        "samples/s",
        "ms of its kernels",
        "the 8-bit stack over this row",
        "s to the score",
        "s of it training",
        "s of that compiling",
        "F1",
        "F1 at threshold 0",
        "exact match",
    ]
    assert rows[1][0] == "plain PyTorch by what pays for BERT, not searched here (E-searched)"
    by_name = {row[0].rpartition("(")[2].rstrip(")"): row[1:] for row in rows}
    assert list(by_name) == ["A1", PLAIN, STACK_16_BITS, STACK]
    assert by_name["A1"] == ["–"] * 6 + ["79.00 (2)", "78.00 (2)", "76.00 (2)"]
    assert by_name[PLAIN] == [
        *("2,000 (3)", "5.00", "–"),
        *("100 (1)", "60.0 (1)", "20.0 (1)", "81.00 (1)", "80.00 (1)", "78.00 (1)"),
    ]
    assert by_name[STACK_16_BITS][2:] == ["×1.11 ± 0.00"] + ["–"] * 6
    assert by_name[STACK] == [
        *("4,000 (3)", "2.50", "–"),
        *("100 (3)", "60.0 (3)", "–", "81.00 ± 1.69 (3)", "80.00 ± 1.69 (3)", "78.00 ± 1.69 (3)"),
    ]


@pytest.mark.parametrize(("seeds", "said"), [(0, None), (2, "+0.50 ("), (3, "+0.50 ± 0.00 (")])
def test_what_padding_does_in_the_loss_is_said_where_it_was_measured(seeds, said):
    both = [trained("A1", 2, 79.0, **SHARED)]
    both += [trained(one_network.MASKED, seed, 79.5, **SHARED) for seed in range(seeds)]
    text = text_of([*ROWS, *both])
    assert ("**Padding in the loss:**" in text) == (said is not None)
    if said is not None:
        assert f"F1 changes by {said}A1-masked against A1)" in text


def test_a_model_that_was_not_timed_in_turns_is_not_shown():
    larger = {"model.name": "large", "model": "large", "model.params_total": 335e6}
    assert text_of([*ROWS, trained(STACK, 0, 85.0, **larger)]) == text_of(ROWS)
    scored_alone = [row for row in ROWS if row["spec.preset.name"] == "quality"]
    assert text_of(scored_alone) == one_network.NOT_SCORED
    assert text_of(row for row in ROWS if row["spec.preset.name"] == "bench") == (
        one_network.NOT_SCORED
    )


def test_the_committed_records_have_such_a_network():
    text = one_network.one_network(committed(), "", Path("figures"))
    assert "MPNet-base with its pretrained weights on one H200, 32 samples of half of SQuAD" in text
    assert "The reference project reports F1 76.62 and exact match 73.21 for its A1" in text
