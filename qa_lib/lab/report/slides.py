"""A student's slides on several GPUs (slides.csv): their numbers, and their claims judged.

notebooks/multi_gpu.ipynb shows both. hypotheses.py has what may have led to the numbers.
"""

import pandas as pd

from qa_lib.lab.report import one_stack
from qa_lib.lab.report.claims import CANNOT_TELL
from qa_lib.lab.report.stats import FAILS

# Samples of a GPU in a step, as the scripts have it that agree with the slides.
SAMPLES_A_GPU = 16

# The columns of slides.csv -> their headings in the table.
HEADINGS = {
    "experiment": "their experiment",
    "gpus": "GPUs",
    "steps": "steps",
    "runtime_s": "seconds",
    "samples_per_s": "samples/s",
    "validation_loss": "validation loss",
    "gpu_utilization_percent": "GPU utilization %",
    "stats_efficiency": "statistical efficiency",
    "goodput": "goodput",
}


def numbers_table() -> pd.DataFrame:
    """Return the slides' numbers as text, digit for digit, a line an experiment."""
    table = pd.read_csv(one_stack.SLIDES, comment="#", dtype=str)
    return table[list(HEADINGS)].rename(columns=HEADINGS)


def claims_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the slides' claims on pipelines, with what their numbers come to, and our verdicts.

    `runs` are those of a group of speeds; without any the claims on speed cannot be told. Columns:
    "their claim"; theirs, the pipelines' numbers over those of data parallelism; here, what was
    measured or why nothing is; holds, a sign.
    """
    lines = [
        (f"{claim}: {part}", theirs, found.text, found.sign)
        for claim, part, theirs, found in one_stack.speed_claims(runs)
    ]
    experiments = one_stack.theirs()
    samples = experiments["steps"] * experiments["gpus"] * SAMPLES_A_GPU
    trained = ", ".join(f"{count:,}" for count in samples)
    lines += [
        (
            f"the same, by steps × GPUs × {SAMPLES_A_GPU} samples ÷ seconds",
            _over_the_first(samples / experiments["runtime_s"]),
            "their two speeds disagree",
            CANNOT_TELL,
        ),
        (
            "pipelines take less time",
            _over_the_first(experiments["runtime_s"]),
            f"theirs trained on {trained} samples",
            CANNOT_TELL,
        ),
        (
            "pipelines raise the validation loss",
            _over_the_first(experiments["validation_loss"]),
            "H4: the mean of the training loss",
            CANNOT_TELL,
        ),
        (
            "pipelines leave GPUs idle",
            _over_the_first(experiments["gpu_utilization_percent"]),
            "H5: so does asking in every step",
            CANNOT_TELL,
        ),
        (
            "pipelines teach less a sample",
            _over_the_first(experiments["stats_efficiency"], decimals=4),
            "H2, H3, H6: it does not depend on them",
            FAILS,
        ),
        (
            "pipelines have less goodput",
            _over_the_first(experiments["goodput"], decimals=4),
            "H2, H3, H6: as above",
            FAILS,
        ),
    ]
    return pd.DataFrame(lines, columns=["their claim", "theirs", "here", "holds"])


def _over_the_first(values: pd.Series, decimals: int = 2) -> str:
    """Return every value but the first over the first: '×0.85 and ×0.52'."""
    ratios = values.iloc[1:] / values.iloc[0]
    return " and ".join(f"×{ratio:.{decimals}f}" for ratio in ratios)
