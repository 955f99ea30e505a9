"""Facts that were transcribed from elsewhere: cards, and what the reference project published.

They lie in CSV files beside this one, whose first lines say what a file holds and from where.
"""

from functools import cache
from pathlib import Path

import pandas as pd

from qa_lib.spec.variants import BASELINES


@cache
def _read(name: str) -> pd.DataFrame:
    """Return a CSV file beside this one as a table, which is the same in each call.

    An empty cell is NaN.
    """
    return pd.read_csv(Path(__file__).with_name(name), comment="#")


def cards() -> pd.DataFrame:
    """Return graphics cards, a row for each; a value that nothing here needs is NaN.

    Columns: card (its name in README.md), gpu (PyTorch's name for it), sm (its compute capability
    times 10), gib (GiB that are free at rest), tflops (dense TFLOP/s of fp16 and bf16, by the data
    sheet).
    """
    return _read("cards.csv")


def published() -> pd.DataFrame:
    """Return the reference project's numbers, indexed by variant.

    Columns: score, samples_per_s, peak_mib, ratio and delta, which mean what they mean in
    `summary.summary`; exact, eval_samples_per_s, train_s and peak_reserved_mib, as the file has
    them; and speed: samples_per_s, or where that was not published what follows from train_s, since
    every variant trained on the same samples.
    """
    names_of_summary = {
        "f1": "score",
        "train_samples_per_s": "samples_per_s",
        "peak_alloc_mib": "peak_mib",
    }
    table = _read("published.csv").rename(columns=names_of_summary).set_index("variant")
    base = table.loc[BASELINES["qa"]]
    speed_by_time = base["samples_per_s"] * base["train_s"] / table["train_s"]
    return table.assign(
        speed=table["samples_per_s"].fillna(speed_by_time),
        ratio=table["samples_per_s"] / base["samples_per_s"],
        delta=table["score"] - base["score"],
    )
