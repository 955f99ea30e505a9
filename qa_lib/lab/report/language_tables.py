"""The tables of a language model's variants: scores and speeds (notebooks/scaling.ipynb)."""

import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import three_decimals
from qa_lib.lab.report.stats import by_seed, interval
from qa_lib.lab.report.summary import result_table, summary
from qa_lib.lab.report.tables import Column, render

SCORE = "quality.bits_per_byte"  # of which less is better
# The columns of `summary.columns` that the table of speeds has, in a table's own order.
SPEEDS = [
    "variant",
    "change",
    "batch",
    "status",
    "n",
    "samples_per_s",
    "tokens_per_s",
    "ratio",
    "step",
    "busy",
    "mfu",
    "peak_mib",
    "waits",
    "note",
]


def speeds_table(timed: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of a group on one GPU as text, a line a variant, with the columns SPEEDS.

    Raises NotMeasured where none ran on one GPU.
    """
    return result_table(_on_one_gpu(timed), SPEEDS)


def scores_table(every: pd.DataFrame, group: str, timed: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of the variants that a group trained alike, as text, beside their speeds.

    `every` are the runs of all groups, and `timed` those of a group of speeds; its variants on one
    GPU count. Of several conditions those are taken under which most variants ran. Columns:

    - variant, n
    - × and the baseline's name: the speed over the baseline's
    - "bits per byte"
    - against and the baseline's name: the score less the baseline's, over equal seeds

    Raises NotMeasured where none ran on one GPU, and where the baseline has no score.
    """
    lines = _on_one_gpu(timed)
    scored = evidence.select(every, group)
    scored = scored[scored["status"].eq("ok") & scored["spec.variant"].isin(lines["variant"])]
    alike = _most_variants(scored)
    base = evidence.baseline(alike)
    scores = by_seed(alike, SCORE)
    if base not in scores:
        raise NotMeasured(f"{base} has no bits per byte in group {group}")
    against = scores.drop(columns=base).sub(scores[base], axis="index")
    table = pd.DataFrame({
        "n": scores.count(),
        "bits": scores.mean(),
        "bits±": interval(scores),
        "against": against.mean(),
        "against±": interval(against),
    })  # fmt: skip
    table = table.join(lines.set_index("variant")["ratio"])
    table = evidence.in_table_order(table).rename_axis("variant").reset_index()
    columns = [
        Column("variant"),
        Column("ratio", f"× {base}"),
        Column("n"),
        Column("bits", "bits per byte", three_decimals),
        Column("against", f"against {base}", three_decimals),
    ]
    return render(table, columns)


def _on_one_gpu(timed: pd.DataFrame) -> pd.DataFrame:
    """Return `summary` of the runs on one GPU."""
    alone = timed[timed["world"] == 1]
    if alone.empty:
        raise NotMeasured("no language model was timed on one GPU")
    return summary(alone)


def _most_variants(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that agree in all axes: those of the most variants, and of these the most."""

    def sizes(part: pd.DataFrame) -> tuple[int, int]:
        """Return how many variants a part has, and how many runs."""
        return part["spec.variant"].nunique(), len(part)

    parts = [part for _, part in runs.groupby([*evidence.AXES], dropna=False)]
    return max(parts, key=sizes, default=runs)
