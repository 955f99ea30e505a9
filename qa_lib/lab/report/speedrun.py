"""The history and the verdict of notebooks/speedrun.ipynb, by the rules of docs/speedrun.md."""

import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.format import factor, points
from qa_lib.lab.report.summary import average
from qa_lib.lab.report.tables import Column, render

CARD = "h100"  # with which the hardware of entries begins
QUESTIONS = 11_873  # of the official dev set
LAYERS = 6
SEEDS = range(5)
BELOW = 0.5  # points of F1 by which the target lies below the baseline


def entries() -> pd.DataFrame:
    """Return the committed runs that count: those of the baseline, and those of the speedrun."""
    runs = evidence.load_runs()
    runs = runs[runs["spec.hardware"].str.startswith(CARD)]
    return pd.concat([baseline(runs), counted(runs, "speedrun")])


def counted(runs: pd.DataFrame, preset: str) -> pd.DataFrame:
    """Return the finished runs of a preset that keep the rules: layers, seeds, all questions."""
    is_finished = runs["status"].eq("ok") & runs["spec.preset.name"].eq(preset)
    return runs[
        is_finished
        & runs["spec.seed"].isin(SEEDS)
        & runs["model.layers"].eq(LAYERS)
        & runs["quality.n"].eq(QUESTIONS)
    ]


def baseline(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs whose mean F1, less BELOW, is the target: three epochs of A1."""
    is_plain_loop = runs["spec.variant"].eq("A1") & runs[evidence.EPOCHS].eq(3)
    return counted(runs[is_plain_loop], "quality")


def recipes(runs: pd.DataFrame, seeds: int = 1) -> pd.DataFrame:
    """Return a line of text for each recipe of at least so many seeds, in the order of their runs.

    The last column is the training of the line above over its own.

    Raises NotMeasured where there is no run.
    """
    if runs.empty:
        raise evidence.NotMeasured("no record yet")
    runs = runs.sort_values("time.started").assign(code=runs["code.commit"].str[:7])
    values = evidence.numbers(runs, {"f1": "quality.best_f1", "score": "time.notebook_s"})
    # Without the first step, which waits for kernels to be compiled and for data.
    values["train"] = [run.steps()["ms"][1:].sum(min_count=1) / 1000 for run in runs["run"]]
    keys = ["group", "spec.variant", "training", "batch", "micro_batch", "code", "data.sha256"]
    lines = average(values, [runs[key] for key in keys]).reset_index()
    lines = lines[lines["n"] >= seeds]
    columns = [
        Column("group"),
        Column("spec.variant", "variant"),
        Column("training"),
        Column("batch"),
        Column("micro_batch", "micro-batch"),
        Column("code"),
        Column("n", "seeds"),
        Column("f1", "best F1", points),
        Column("train", "training s"),
        Column("score", "prompt to score s"),
        Column("gain", "× line above", factor),
    ]
    return render(lines.assign(gain=lines["train"].shift() / lines["train"]), columns)


def verdict(own: pd.DataFrame, committed: pd.DataFrame) -> str:
    """Return as Markdown whether a recipe's runs meet the target, and by how much.

    Raises NotMeasured where they do not keep the rules, or the baseline has too few seeds.
    """
    done = counted(own, "speedrun")
    base = baseline(committed)
    if done["spec.seed"].nunique() < len(SEEDS):
        raise evidence.NotMeasured(
            f"a record takes preset speedrun, {LAYERS} layers, seeds 0 to 4, the official dev set"
        )
    if base["spec.seed"].nunique() < len(SEEDS):
        raise evidence.NotMeasured(
            f"there is no target yet, for lack of A1's seeds 0 to 4 on an {CARD.upper()}"
        )
    found = done["quality.best_f1"].mean()
    target = base["quality.best_f1"].mean() - BELOW
    word = "met" if found >= target else "missed"
    return (
        f"**The target is {word} by {abs(found - target):.2f}**: best F1 {found:.2f}, "
        f"wanted {target:.2f}."
    )
