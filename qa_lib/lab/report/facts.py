"""Facts that were transcribed from elsewhere: cards, and what the reference project published.

They lie in CSV files beside this one, whose first lines say what a file holds and from where.
"""

from pathlib import Path

import pandas as pd

from qa_lib.spec.variants import BASELINES


def _read(name: str) -> pd.DataFrame:
    """Return a CSV file beside this one; an empty cell is NaN."""
    return pd.read_csv(Path(__file__).with_name(name), comment="#")


def cards() -> pd.DataFrame:
    """Return graphics cards.

    Columns: card (its name in README.md), gpu (PyTorch's name for it), sm (its compute capability
    times 10), gib (free at rest), tflops (dense, of fp16 and bf16, by the data sheet).
    """
    return _read("cards.csv")


def published() -> pd.DataFrame:
    """Return the reference project's numbers, indexed by variant.

    Columns: score, samples_per_s, peak_mib, ratio and delta, as `summary` names them; exact,
    eval_samples_per_s, train_s and peak_reserved_mib, as the file does; speed, in samples/s, by
    the seconds of training where no throughput was published.
    """
    names = {"f1": "score", "train_samples_per_s": "samples_per_s", "peak_alloc_mib": "peak_mib"}
    table = _read("published.csv").rename(columns=names).set_index("variant")
    base = table.loc[BASELINES["qa"]]
    by_time = base["samples_per_s"] * base["train_s"] / table["train_s"]
    return table.assign(
        speed=table["samples_per_s"].fillna(by_time),
        ratio=table["samples_per_s"] / base["samples_per_s"],
        delta=table["score"] - base["score"],
    )
