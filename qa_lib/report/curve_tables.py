"""The tables beside the scaling profiles of curves.py: what ran, each optimization before and after, and what memory is
made of."""

import contextlib
import math
from collections.abc import Sequence

import pandas as pd

from qa_lib.report import scaling
from qa_lib.report.curves import NONE, SIZES, STRAIGHT, Profile, along, fit
from qa_lib.report.runs import NotMeasured, ReportError, select
from qa_lib.report.tables import change
from qa_lib.report.text import MISSING, count, factor, number, say, share
from qa_lib.variants import VARIANTS

STATES = "weights + gradients + optimizer, GiB"
DATA_PARALLEL = ("P0", "P1", "P-one-bucket")  # the Trainer under DDP, the baseline under it, and the fast stack


def setup_table(every: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """What ran in each of these groups that has runs: model, hardware, data, how many runs and of which sizes."""
    table = []
    for group in dict.fromkeys(groups):
        with contextlib.suppress(ReportError):  # a group without runs is named where it would be shown
            table.append({"group": group} | _setup(select(every, group)))
    found = pd.DataFrame(table)
    return found.loc[:, (found != MISSING).any()]


def _setup(runs: pd.DataFrame) -> dict[str, str]:
    first, models = runs.iloc[0], sorted(set(runs["model.name"]))
    counts = runs[["data.n", "spec.n_eval"]].astype(float).max()
    trained, unit = counts["data.n"], "questions"
    if first["task.name"] == "lm":
        # What is left at the end of the text makes no window: of short windows that is the least.
        trained, unit = (runs["spec.n_train"].astype(float) * runs["length"]).max(), "tokens"
    return {
        "model": models[0] if len(models) == 1 else f"{len(models)} models",
        "parameters": _range(runs["model.params_total"], count),
        "hardware": "CPU" if pd.isna(first["env.gpu"]) else first["env.gpu"],
        "torch": ", ".join(sorted(set(runs.reindex(columns=["env.torch"])["env.torch"].dropna()))) or MISSING,
        "training data": ", ".join(filter(None, [first["data.name"], _amount(trained, unit)])),
        "validation data": _amount(counts["spec.n_eval"], unit) or MISSING,
        "runs": str(len(runs)),
        "lengths": _range(runs["length"], "{:,.0f}".format),
        "micro-batches": _range(runs["micro_batch"], "{:,.0f}".format),
    }


def _amount(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if pd.notna(value) else ""


def _range(values: pd.Series, text) -> str:
    """The least and the largest of some numbers, or the only one."""
    values = values.dropna().astype(float)
    return "–".join(dict.fromkeys(map(text, (values.min(), values.max())))) if len(values) else MISSING


def commands(profiles: Sequence[Profile]) -> str:
    """As Markdown, for each group without runs why, and the commands that make both tasks' profiles on a GPU; for the
    others the rows without runs."""
    absent = [f"Not run in {each.group}: {', '.join(each.absent)}." for each in profiles if each.absent]
    lacking = [each.lacking for each in profiles if each.lacking]
    return "\n\n".join([*absent, *lacking, *([say("curves.commands")] if lacking else [])])


def cost_table(table: pd.DataFrame) -> pd.DataFrame:
    """Of each row in `points` its fixed cost and cost per token where a line through its points has them, and what of
    the fixed cost weights, gradients and optimizer explain; how far that line and the prediction are off, the largest
    size that ran (a larger one may fit as well), the smallest that ran out of memory, and the best speed."""
    size = "micro_batch" if table["micro_batch"].nunique() > 1 else "length"
    _, part = along(table, size)
    lines = []
    for variant, row in part.groupby("variant", sort=False):
        own = table[table["variant"] == variant]
        fixed, each, miss = _straightest(own)
        fitted = row[~row["oom"]]
        off = (own["predicted"] / own["gib"] - 1).dropna()
        best = row.loc[row["speed"].idxmax()] if row["speed"].notna().any() else None
        name = size.replace("_", "-")
        lines.append({
            "row": variant,
            "fixed GiB": number(fixed) if miss <= STRAIGHT else MISSING,
            STATES: number(own["states"].mean()),
            "KiB a token": number(each) if miss <= STRAIGHT else MISSING,
            "line misses by": share(miss),
            "prediction misses by": share(off.loc[off.abs().idxmax()]).replace("-", "−") if len(off) else MISSING,
            "largest that ran": f"{fitted[size].max():,.0f}" if len(fitted) else MISSING,
            "too large": f"{row.loc[row['oom'], size].min():,.0f}" if row["oom"].any() else MISSING,
            "best features/s": number(best["speed"]) if best is not None else MISSING,
            f"at {name}": f"{best[size]:,.0f}" if best is not None else MISSING,
        })  # fmt: skip
    found = pd.DataFrame(lines)
    return found.loc[:, (found != MISSING).any()]


def _straightest(own: pd.DataFrame) -> tuple[float, float, float]:
    """Of `fit` along micro-batches and along lengths, for a row's `points`, the one that misses least; NaN where no
    curve has three."""
    fits = []
    for size in ("micro_batch", "length"):
        with contextlib.suppress(NotMeasured):
            fits.append(fit(along(own, size)[1]))
    return min(fits, key=lambda one: math.inf if math.isnan(one[2]) else one[2], default=(math.nan,) * 3)


def steps_table(table: pd.DataFrame) -> pd.DataFrame:
    """Before and after each optimization: every row in `points` against the row that it changes, or the nearest of that
    row's own parents that was measured at an equal size, at the largest size of both. A speed against one of other code
    is marked, since the host may be another. Raises NotMeasured where no row stands beside such a one."""
    if table.empty:
        raise NotMeasured(NONE)
    measured = table[~table["oom"]].set_index(["variant", *SIZES])
    code, measured = measured["code"], measured[["gib", "speed"]]
    lines = []
    for variant in dict.fromkeys(table["variant"]):
        ancestor, ratios = _against_nearest(measured, variant)
        if ancestor is None:
            continue
        sizes = max(ratios.index, key=lambda sizes: (sizes[0] * sizes[2], sizes))
        at, apart = ratios.loc[sizes], code[variant, *sizes] != code[ancestor, *sizes]
        lines.append({
            "row": variant,
            "what it changes": change(variant, ancestor),
            "length": f"{sizes[0]:,}",
            "micro-batch": f"{sizes[2]:,}",
            "memory": factor(at["gib"]),
            "speed": factor(at["speed"]) + (" of another day" if apart and pd.notna(at["speed"]) else ""),
        })  # fmt: skip
    if not lines:
        raise NotMeasured("no row was measured at the same size as a row that it was made from")
    found = pd.DataFrame(lines)
    return found.loc[:, (found != MISSING).any()]


def _against_nearest(measured: pd.DataFrame, variant: str) -> tuple[str | None, pd.DataFrame]:
    """The nearest row that a row was made from and that has a size in common with it, and the ratios at each such
    size; None where there is none."""
    names, ancestor = set(measured.index.get_level_values("variant")), VARIANTS[variant].parent
    while variant in names and ancestor is not None:
        if ancestor in names:
            ratios = (measured.loc[variant] / measured.loc[ancestor]).dropna(how="all")
            if len(ratios):
                return ancestor, ratios
        ancestor = VARIANTS[ancestor].parent
    return None, measured[:0]


def parallel_table(every: pd.DataFrame, group: str) -> pd.DataFrame:
    """Data parallelism off and on: each of DATA_PARALLEL on several GPUs against its row on one, where a GPU has as
    many features in a step as that one has alone, at the number that most of them have. Raises NotMeasured."""
    lines = scaling.scaling(select(every, group))
    lines = lines[lines["variant"].isin(DATA_PARALLEL) & (lines["world"] > 1) & lines["weak"].notna()]
    if lines.empty:
        raise NotMeasured(f"no run of {', '.join(DATA_PARALLEL)} beside its row on one GPU in group {group}")
    shares = lines["batch"] // lines["world"]
    lines = lines[shares == max(shares, key=lambda size: ((shares == size).sum(), size))]
    lines = lines.loc[lines.groupby(["variant", "world"], sort=False)["rate"].idxmax()]
    times = lines["world"] * lines["weak"]
    return pd.DataFrame({
        "row": lines["variant"],
        "GPUs": lines["world"].map(str),
        "features a GPU": (lines["batch"] // lines["world"]).map(str),
        "n": lines["n"].map(str),
        "on, features/s": list(map(number, lines["rate"], lines["rate±"])),
        "off, features/s": (lines["rate"] / times).map(number),
        "× off": times.map(factor),
        "off is": lines["reference"],
    })  # fmt: skip
