"""From records to tables: which runs count, statistics over seeds, ratios to the baseline, and their text.

Two forms go through this module: `runs`, the DataFrame of record.load_runs(), a row a run; and `lines`, the DataFrame
of `summarise`, a row for each row of the variants table and micro-batch, averaged over seeds. A value that was not
measured is NaN in both and "–" in text.
"""

import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from qa_lib.errors import UserError
from qa_lib.variants import FAMILIES, VARIANTS

BASELINE = "A1"
PUBLISHED = Path(__file__).with_name("published.csv")
PUBLISHED_MICRO_BATCH = 8
MISSING = "–"
# Columns of words, which are set to the left.
LEFT = {
    "row",
    "what it changes",
    "status",
    "note",
    "arithmetic",
    "claim of the seeds",
    "measured here",
    "verdict",
    "why",
}

MEASURES = {  # name in `lines` -> value of a record
    "features_per_s": "speed.features_per_s",
    "step_ms": "time.step_ms.median",
    "step_p10_ms": "time.step_ms.p10",
    "step_p90_ms": "time.step_ms.p90",
    "mfu": "speed.mfu",
    "peak_mib": "memory.peak_alloc_mib",
    "joules": "energy.joules_per_feature",
    "exact": "quality.exact",
    "f1": "quality.f1",
    "trainable": "model.params_trainable",
    "params": "model.params_total",
    "compile_s": "time.compile_s",
    "train_s": "time.train_s",
    "wall_s": "time.wall_s",
}
WHOLE_RUN = ["compile_s", "train_s", "wall_s"]  # a resumed run timed only its last part
# What must be equal within a group, or a ratio would compare different work.
IDENTITY = ("spec.scale.", "data.name", "data.sha256", "model.name", "model.revision")
# Student's t for two-sided intervals of a level in percent, for 2, 3, ... degrees of freedom (any table of the
# distribution); more seeds use the last one.
STUDENT = {
    95: (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120),
    90: (2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746),
}


class ReportError(UserError):
    """A report that cannot be made from these records; the message names group and baseline or file."""


class NotMeasured(ReportError):
    """No record holds what a figure or sentence shows; the message says what is missing and why."""


def select(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """The runs of one group that count: for each row, seed and micro-batch the newest.

    Raises ReportError for a group without records, and for one whose runs differ in scale, data or model.
    """
    chosen = runs[runs["group"] == group]
    if chosen.empty:
        known = ", ".join(sorted(set(runs["group"]))) or "none; make quickstart makes cpu-smoke"
        raise ReportError(f"group {group!r} has no records (groups with records: {known})")
    chosen = chosen.sort_values(["time.started", "run_id"])
    chosen = chosen.drop_duplicates(["spec.variant", "spec.seed", "spec.settings.micro_batch"], keep="last")
    for column in (name for name in chosen if name.startswith(IDENTITY)):
        values = [None if pd.isna(value) else value for value in chosen[column]]
        first, *others = dict.fromkeys(values)
        if others:
            one, other = (chosen["run_id"].iloc[values.index(value)] for value in (first, others[0]))
            raise ReportError(
                f"group {group!r} mixes runs that cannot be compared: {column} is {first!r} in {one} and "
                f"{others[0]!r} in {other}; move the older runs away"
            )
    return chosen.reset_index(drop=True)


def is_search(group: str) -> bool:
    """Whether a group holds the tries of a search (`fit-batch`, `tune`), of which no row is compared with another."""
    return re.search(r"-(fit-.*|tune)$", group) is not None


def sibling(runs: pd.DataFrame, group: str, scale: str) -> pd.DataFrame:
    """The runs on the group's hardware at another scale; without rows where there are none."""
    name = f"{group.rsplit('-', 1)[0]}-{scale}"
    return select(runs, name) if (runs["group"] == name).any() else runs[:0]


def commits(runs: pd.DataFrame) -> str:
    """Which versions of the code the runs are of."""
    names = runs["code.commit"].fillna("unknown").str[:7]
    return ", ".join(sorted(set(names.where(~runs["code.dirty"].eq(True), names + " with changes"))))


def change(variant: str) -> str:
    """What a row changes, as its parent and the one setting: 'A1 + attention: sdpa'."""
    row = VARIANTS.get(variant)
    if row is None:
        return MISSING
    return " + ".join([row.parent or "baseline", *(f"{key}: {value}" for key, value in row.change.items())])


def place(variant: str) -> tuple[int, str]:
    """A key that sorts rows in the order of the variants table, unknown ones last."""
    return (list(VARIANTS).index(variant) if variant in VARIANTS else len(VARIANTS)), variant


def interval(values: pd.Series, level: int = 95) -> float:
    """Half the width of the t-based interval of the mean over seeds, at a level of STUDENT; NaN below three values."""
    n, table = values.count(), STUDENT[level]
    return table[min(n - 3, len(table) - 1)] * values.std() / math.sqrt(n) if n >= 3 else math.nan


def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """A group's runs, averaged over seeds, in the order of the variants table: `lines`.

    Columns: micro_batch, variant, family, change, status, note, n (runs that ended ok) and, over these, each of
    MEASURES as the mean with `<name>±` beside it (see `interval`); ratio, features/s over the baseline's at the same
    micro-batch, with `ratio±` over equal seeds where both rows have the same ones; and delta_f1 with `delta_f1±`, F1
    minus the baseline's over the seeds that both have. Raises ReportError where a micro-batch has no baseline.
    """
    lines = []
    for micro_batch, part in runs.groupby("spec.settings.micro_batch"):
        rows = dict(list(part.groupby("spec.variant")))
        base = _measured(_baseline(rows, part["group"].iloc[0], micro_batch))
        for variant in sorted(rows, key=place):
            row = _measured(rows[variant])
            means = row.mean()
            paired = variant != BASELINE and set(row.index) == set(base.index)
            line = {
                "micro_batch": micro_batch,
                "variant": variant,
                "family": variant[0],
                "change": change(variant),
                "status": _status(rows[variant]),
                "note": _note(rows[variant]),
                "n": len(row),
                "ratio": means["features_per_s"] / base["features_per_s"].mean(),
                "ratio±": interval(row["features_per_s"] / base["features_per_s"]) if paired else math.nan,
                "break_even": _break_even(means, base.mean()),
                "delta_f1": (row["f1"] - base["f1"]).mean(),
                "delta_f1±": interval(row["f1"] - base["f1"]) if variant != BASELINE else math.nan,
            }
            lines.append(line | dict(means) | {f"{name}±": interval(row[name]) for name in MEASURES})
    return pd.DataFrame(lines)


def _baseline(rows: dict[str, pd.DataFrame], group: str, micro_batch: int) -> pd.DataFrame:
    status = Counter(rows[BASELINE]["status"] if BASELINE in rows else [])
    # A baseline that does not fit into memory is a result: its ratios are unknown, not an error.
    if not status["ok"] and not status["oom"]:
        found = f"is {', '.join(status)}" if status else "has no record"
        raise ReportError(
            f"group {group!r}, micro-batch {micro_batch}: the baseline {BASELINE} {found}, and every ratio needs it"
        )
    return rows[BASELINE]


def _measured(row: pd.DataFrame) -> pd.DataFrame:
    """MEASURES of a row's runs that ended ok, as floats, indexed by seed."""
    row = row[row["status"] == "ok"].set_index("spec.seed")
    values = pd.DataFrame({name: row[column].astype(float) for name, column in MEASURES.items()})
    values.loc[row["time.resumed_from_step"].notna(), WHOLE_RUN] = math.nan
    if "time.compile_cached" in row:  # what an earlier run has compiled is not this row's price
        values.loc[row["time.compile_cached"].eq(True), "compile_s"] = math.nan
    return values


def _break_even(row: pd.Series, base: pd.Series) -> float:
    """Optimizer steps after which a row has made up for its compilation against the baseline; inf if it never does."""
    if pd.isna(row["compile_s"]):
        return math.nan
    saved = (base["step_ms"] - row["step_ms"]) / 1e3
    return row["compile_s"] / saved if saved > 0 else math.inf


def _status(row: pd.DataFrame) -> str:
    counts = Counter(row["status"])
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {name}" for name, n in counts.items())


def _note(row: pd.DataFrame) -> str:
    """Why a row's runs did not end ok, and which were resumed."""
    reasons = {}
    columns = ["spec.seed", "status", "error.message", "error.step", "time.resumed_from_step"]
    for run in row[columns].to_dict("records"):
        if run["status"] != "ok":
            message = run["error.message"] if pd.notna(run["error.message"]) else "not finished"
            at = f" (after step {run['error.step']:.0f})" if pd.notna(run["error.step"]) else ""
            text = textwrap.shorten(f"{run['status']}: {message}", 140, placeholder=" …") + at
        elif pd.notna(run["time.resumed_from_step"]):
            text = f"resumed at step {run['time.resumed_from_step']:.0f}, so no time of the whole run"
        else:
            continue
        reasons.setdefault(text, []).append(str(run["spec.seed"]))
    return "; ".join(
        text if len(seeds) == len(row) else f"seed {', '.join(seeds)} {text}" for text, seeds in reasons.items()
    )


def number(value: float, half: float = math.nan) -> str:
    """Three significant digits or all before the point, '–' for NaN; with ± half an interval where there is one."""
    if pd.isna(value):
        return MISSING
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}" + (f" ± {half:,.{digits}f}" if pd.notna(half) else "")


def factor(value: float) -> str:
    """A ratio as '×1.52'."""
    return f"×{number(value)}" if pd.notna(value) else MISSING


def count(value: float) -> str:
    """A number of parameters: '75.3 k', '109 M'."""
    if pd.isna(value) or value < 1000:
        return MISSING if pd.isna(value) else f"{value:.0f}"
    return f"{value / 1e6:.3g} M" if value >= 999_500 else f"{value / 1e3:.3g} k"


def share(value: float) -> str:
    """A part of a whole, or of another row's value, in percent."""
    return f"{number(100 * value)} %"


def points(value: float, half: float = math.nan, sign: str = "") -> str:
    """A score or a difference of scores, in points of 100."""
    if pd.isna(value):
        return MISSING
    return f"{value:{sign}.2f}".replace("-", "−") + (f" ± {half:.2f}" if pd.notna(half) else "")


def _step(line: dict) -> str:
    if pd.isna(line["step_ms"]):
        return MISSING
    return f"{number(line['step_ms'])} [{number(line['step_p10_ms'])}–{number(line['step_p90_ms'])}]"


COLUMNS = {  # heading -> text of one of `lines`
    "row": lambda line: line["variant"],
    "what it changes": lambda line: line["change"],
    "micro-batch": lambda line: str(line["micro_batch"]),
    "status": lambda line: line["status"],
    "n": lambda line: str(line["n"]),
    "features/s": lambda line: number(line["features_per_s"], line["features_per_s±"]),
    "× A1": lambda line: number(line["ratio"], line["ratio±"]),
    "step ms [p10–p90]": _step,
    "MFU": lambda line: share(line["mfu"]) if pd.notna(line["mfu"]) else MISSING,
    "peak MiB": lambda line: number(line["peak_mib"]),
    "J/feature": lambda line: number(line["joules"]),
    "exact": lambda line: points(line["exact"], line["exact±"]),
    "F1": lambda line: points(line["f1"], line["f1±"]),
    "ΔF1 vs A1": lambda line: points(line["delta_f1"], line["delta_f1±"], "+"),
    "trainable": lambda line: count(line["trainable"]),
    "compile s": lambda line: number(line["compile_s"]),
    "break-even step": lambda line: "never" if line["break_even"] == math.inf else number(line["break_even"]),
    "wall s": lambda line: number(line["wall_s"]),
    "note": lambda line: line["note"] or MISSING,
}


def result_table(lines: pd.DataFrame, headings=tuple(COLUMNS)) -> pd.DataFrame:
    """`lines` as text under these headings; without the columns that say nothing: no value, one micro-batch, all ok."""
    table = pd.DataFrame([{name: COLUMNS[name](line) for name in headings} for line in lines.to_dict("records")])
    if lines["micro_batch"].nunique() == 1:
        table = table.drop(columns="micro-batch", errors="ignore")
    if lines["status"].eq("ok").all():
        table = table.drop(columns="status", errors="ignore")
    return table.loc[:, (table != MISSING).any()]


def family_lines(lines: pd.DataFrame, family: str) -> pd.DataFrame:
    """A family's lines and above them, to compare with, the baseline and those that the family's rows change."""
    rows = set(lines.loc[lines["family"] == family, "variant"])
    parents = {VARIANTS[name].parent for name in rows if name in VARIANTS}
    return lines[lines["variant"].isin(rows | parents | {BASELINE})] if rows else lines[:0]


def family_tables(lines: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """A table for each family that has a line: 'systems', 'peft', 'memory', 'backends' and what may come."""
    return {FAMILIES.get(name, name): result_table(family_lines(lines, name)) for name in sorted(set(lines["family"]))}


def family_table(runs: pd.DataFrame, group: str, variant: str) -> str:
    """For a notebook: the finished rows of a variant's family in its group, as Markdown; or why there is no table."""
    try:
        lines = summarise(select(runs, group))
    except ReportError as problem:
        return f"*No table yet: {problem}.*"
    return markdown(result_table(family_lines(lines, VARIANTS[variant].family)))


def published_table(lines: pd.DataFrame, group: str) -> pd.DataFrame:
    """The seeds' published T4 numbers beside ours at their micro-batch (or our smallest), each against its own A1."""
    theirs = pd.read_csv(PUBLISHED, comment="#").set_index("row")
    sizes = set(lines["micro_batch"])
    size = PUBLISHED_MICRO_BATCH if PUBLISHED_MICRO_BATCH in sizes else min(sizes)
    ours = lines[lines["micro_batch"] == size].set_index("variant").reindex(theirs.index)
    speed = theirs["train_samples_per_s"]
    columns = {
        "T4: samples/s": speed.map(number),
        "T4: × A1": (speed / speed[BASELINE]).map(number),
        "T4: F1": theirs["f1"].map(points),
        "T4: ΔF1": (theirs["f1"] - theirs["f1"][BASELINE]).map(lambda value: points(value, sign="+")),
        "T4: peak MiB": theirs["peak_alloc_mib"].map(number),
        f"{group}: features/s": ours["features_per_s"].map(number),
        f"{group}: × A1": ours["ratio"].map(number),
        f"{group}: F1": ours["f1"].map(points),
        f"{group}: ΔF1": ours["delta_f1"].map(lambda value: points(value, sign="+")),
        f"{group}: peak MiB": ours["peak_mib"].map(number),
    }
    table = pd.DataFrame(columns).reset_index()
    return table.loc[:, (table != MISSING).any()]


def cost_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Seconds that each row's runs took, those that were measured whole, and the sum of all rows in the last line."""
    wall_s = runs["time.wall_s"].astype(float).mask(runs["time.resumed_from_step"].notna())
    seconds = wall_s.groupby(runs["spec.variant"])
    rows = pd.DataFrame({"runs": seconds.count(), "wall_s": seconds.sum()})
    rows = rows[rows["runs"] > 0].sort_index(key=lambda names: names.map(place))
    rows.loc["total"] = rows.sum()
    return rows.rename_axis("row").reset_index().astype({"runs": int})


def markdown(table: pd.DataFrame) -> str:
    """A table of text as a Markdown table, numbers to the right; a sentence if it has no rows."""
    if table.empty:
        return "*No row of this table has been run.*"
    text = table.astype(str).map(lambda cell: cell.replace("|", "\\|"))
    for name in set(text) - LEFT:
        text[name] = text[name].str.replace(" ", "\u00a0")  # "609 ± 6" stays in one line
    rule = ["---" if name in LEFT else "---:" for name in text]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [list(text), rule, *text.to_numpy().tolist()])


def or_why(table_of: Callable[..., pd.DataFrame], *sources) -> str:
    """table_of(*sources) as Markdown; or the reason, where it is not measured."""
    try:
        return markdown(table_of(*sources))
    except NotMeasured as reason:
        return f"*No table: {reason}.*"


def terminal(table: pd.DataFrame) -> str:
    """A table of text in columns for a terminal; notes are not padded, so that a long one only wraps its own line."""
    text = table.astype(str)
    widths = {name: max(len(name), *text[name].str.len()) for name in text}
    widths["note"] = 0
    rows = [dict(zip(text, text, strict=True)), *text.to_dict("records")]
    aligned = [[f"{row[name]:{'<' if name in LEFT else '>'}{widths[name]}}" for name in text] for row in rows]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)
