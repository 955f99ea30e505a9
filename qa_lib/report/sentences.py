"""What the records of a group say, in sentences computed from them: titles of figures, captions, the list of findings.

A sentence that no record supports raises NotMeasured with the reason. With several micro-batches there is a line for
each, since ratios hold within one only.
"""

import pandas as pd

from qa_lib.report import quality as evidence
from qa_lib.report import tables
from qa_lib.report.tables import BASELINE, NotMeasured, factor, number, points, share
from qa_lib.variants import VARIANTS

PEERS = ("A0", "A0-best", "A0-compile")  # drawn beside the ladder, no rungs of it
LADDER = (
    "A1",
    "A2",
    "A3",
    "A4-nb",
    "A4",
    "E1",
    "E2",
    "E3",
    "E4",
    "E5",
    "E6",
    "E-best",
    "E-fp8",
)  # each but E1 changes the rung before
RECOMMENDED = "E-best"  # the row that sentences speak of, where it was run
CPU_CAVEAT = "CPU speeds prove the plumbing only and say nothing about GPUs"


def seeds_of(lines: pd.DataFrame) -> str:
    """'n = 1 seed' or 'n = 1–3 seeds': how many runs are behind each line that has any."""
    counts = lines.loc[lines["n"] > 0, "n"]
    if counts.empty:
        return "no finished run"
    low, high = counts.min(), counts.max()
    return f"n = {low if low == high else f'{low}–{high}'} {'seed' if high == 1 else 'seeds'}"


WHISKERS = "± and whiskers: t-based 95 % interval over seeds, where n ≥ 3"


def caption(runs: pd.DataFrame, lines: pd.DataFrame, whiskers: str = WHISKERS) -> str:
    """What has to stand beside every figure and table of a group: where from, how many, and what not to conclude."""
    group = runs["group"].iloc[0]
    sizes = ", ".join(map(str, sorted(set(lines["micro_batch"]))))
    parts = [f"Group {group}", f"micro-batch {sizes}", seeds_of(lines), f"code {tables.commits(runs)}"]
    if lines["n"].max() >= 3:
        parts.append(whiskers)
    notes = runs["spec.adjusted"].explode().dropna().value_counts().sort_index()
    parts += [note if n == len(runs) else f"{note} ({n} of {len(runs)} runs)" for note, n in notes.items()]
    if group.startswith("cpu-"):
        parts.append(CPU_CAVEAT)
    return " · ".join(parts) + "."


def sizes_of(lines: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The lines of each micro-batch with its name, which is empty if there is only one; the largest first, since it
    keeps the GPU busiest."""
    parts = list(lines.groupby("micro_batch"))[::-1]
    return [(f"micro-batch {size}" if len(parts) > 1 else "", part) for size, part in parts]


def _each_size(lines: pd.DataFrame, sentence) -> str:
    """sentence(lines of one micro-batch) for all of them that have one, a line each. Raises NotMeasured if none has."""
    found, problem = [], None
    for size, part in sizes_of(lines):
        try:
            found.append(f"{size}: ".capitalize() * bool(size) + sentence(part))
        except NotMeasured as nothing:
            problem = nothing
    if not found:
        raise problem
    return ";\n".join(found)


def _line(part: pd.DataFrame, variant: str, *measures: str) -> pd.Series:
    """The one line of a row, which must have these measures."""
    lines = part[part["variant"] == variant].dropna(subset=measures)
    if lines.empty:
        raise NotMeasured(f"{variant} has no measured {', '.join(measures)}")
    return lines.iloc[0]


def speed_finding(lines: pd.DataFrame) -> str:
    """How far the ladder reaches, and the peer beside it."""

    def sentence(part: pd.DataFrame) -> str:
        base = _line(part, BASELINE, "features_per_s")
        rungs = [name for name in LADDER if part.loc[part["variant"] == name, "features_per_s"].notna().any()]
        top = RECOMMENDED if RECOMMENDED in rungs else rungs[-1]
        if top == BASELINE:
            return f"{BASELINE} trains {number(base['features_per_s'])} features/s; no other rung has finished"
        said = f"{top} trains {factor(_line(part, top)['ratio'])} the features/s of {BASELINE}"
        peers = part[part["variant"].isin(PEERS)].dropna(subset=["ratio"])
        if peers.empty:
            return said
        best = peers.loc[peers["ratio"].idxmax()]
        name = "plain transformers.Trainer" if best["variant"] == PEERS[0] else "transformers.Trainer"
        return f"{said}, {name} ({best['variant']}) {factor(best['ratio'])}"

    return _each_size(lines, sentence)


def quality_finding(lines: pd.DataFrame) -> str:
    """The quickest row whose mean F1 is close to the baseline's; whether it is equal is for evidence.equivalence."""

    def sentence(part: pd.DataFrame) -> str:
        base = _line(part, BASELINE, "f1", "train_s")
        close = part[part["delta_f1"] >= -1].dropna(subset=["train_s"])
        quickest = close.loc[close["train_s"].idxmin()]
        if quickest["variant"] == BASELINE:
            return f"No timed row whose mean F1 is within 1 of {BASELINE}'s or above it trains in less time"
        part_of = share(quickest["train_s"] / base["train_s"])
        return (
            f"Of {len(close)} timed rows with a mean F1 within 1 of {BASELINE}'s or above it, {quickest['variant']} is "
            f"the quickest: {part_of} of {BASELINE}'s training time, compilation included"
        )

    return _each_size(lines, sentence)


def memory_finding(lines: pd.DataFrame) -> str:
    """Of the rows that train everything, the one with the smallest peak, and what it costs in step time."""

    def sentence(part: pd.DataFrame) -> str:
        part = part.dropna(subset=["peak_mib"])
        if part.empty:
            raise NotMeasured("peak GPU memory was not measured: these runs had no GPU, whose allocator counts it")
        every = part["variant"].map(lambda name: name in VARIANTS and VARIANTS[name].settings.trainable == "all")
        part = part[every].dropna(subset=["step_ms"])
        if part.empty:
            raise NotMeasured("no row has a step time beside its peak memory: other runs shared the GPU")
        least = part.loc[part["peak_mib"].idxmin()]
        said = f"{least['variant']} peaks lowest of {len(part)} rows that train everything: "
        said += f"{number(least['peak_mib'])} MiB"
        base = part[part["variant"] == BASELINE]
        if base.empty or least["variant"] == BASELINE:
            return said
        memory, time = (share(least[name] / base[name].iloc[0]) for name in ("peak_mib", "step_ms"))
        return f"{said}, {memory} of {BASELINE}'s, at {time} of its step time"

    return _each_size(lines, sentence)


def peft_finding(lines: pd.DataFrame) -> str:
    """The PEFT row with the best F1."""

    def sentence(part: pd.DataFrame) -> str:
        rows = part[part["family"] == "B"].dropna(subset=["f1", "trainable"])
        if rows.empty:
            raise NotMeasured("no PEFT row (B*) has a measured F1")
        if (rows["n"] >= 3).any():
            rows = rows[rows["n"] >= 3]
        best = rows.loc[rows["f1"].idxmax()]
        said = (
            f"Best F1 of PEFT: {best['variant']}, {points(best['delta_f1'], sign='+')} against {BASELINE} in the mean"
        )
        if pd.notna(best["ratio"]):
            said += f" at {factor(best['ratio'])} its speed"
        return f"{said}; {share(best['trainable'] / best['params'])} of its model's parameters train"

    return _each_size(lines, sentence)


def cost_finding(runs: pd.DataFrame) -> str:
    """What all runs of the group took together, and the longest."""
    rows = tables.cost_table(runs)
    total = rows.iloc[-1]
    if not total["runs"]:
        raise NotMeasured("no run has a measured wall time")
    longest = rows.loc[rows["wall_s"][:-1].idxmax()]
    minutes = f"{total['wall_s'] / 60:.1f} min" if total["wall_s"] >= 90 else f"{total['wall_s']:.0f} s"
    runs_s = "run" if total["runs"] == 1 else "runs"
    return (
        f"{total['runs']} {runs_s} took {minutes} in all; {longest['row']} took longest, {number(longest['wall_s'])} s "
        f"for {longest['runs']} of them"
    )


def failed_join_finding(lines: pd.DataFrame) -> str:
    """What the wrong join of row A4-b costs against the same training joined by id."""

    def sentence(part: pd.DataFrame) -> str:
        wrong, right = (points(_line(part, name, "f1")["f1"]) for name in ("A4-b", "A4"))
        return f"Joining sorted predictions by position (A4-b) gives F1 {wrong} where A4 has {right}"

    return _each_size(lines, sentence)


def findings(runs: pd.DataFrame, judged: pd.DataFrame | None = None) -> str:
    """What a group's records say, as a Markdown list: a sentence a figure, the rows without a result, the caption.

    `judged` are the runs that tell quality, where these do not.
    """
    lines = tables.summarise(runs)
    judged, scores = (runs, lines) if judged is None else (judged, tables.summarise(judged))
    where = "".join(f"{group}: " for group in set(judged["group"]) - set(runs["group"]))  # one group at most
    sources = [("", speed_finding, lines), ("", memory_finding, lines)]
    sources += [(where, lambda scored: evidence.equivalence_finding(evidence.equivalence(scored)), judged)]
    sources += [(where, finding, scores) for finding in (quality_finding, peft_finding, failed_join_finding)]
    said = []
    for where, finding, source in [*sources, ("", cost_finding, runs)]:
        try:
            said += [where + sentence for sentence in finding(source).split(";\n")]
        except NotMeasured as problem:
            said.append(f"Not known here: {problem}")
    said += [f"{line['variant']}: {line['note']}" for line in lines.to_dict("records") if line["note"]]
    return "\n".join(f"- {sentence}." for sentence in said) + f"\n\n{caption(runs, lines)}"
