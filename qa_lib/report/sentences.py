"""What the records of a group say, in sentences computed from them: titles of figures, captions, the list of findings.

The words are in texts/sentences.md.j2. Each `*_finding` speaks of one cell (see runs.AXES), since ratios hold within
one only; where no record supports it, it raises NotMeasured with the reason.
"""

import contextlib

import pandas as pd

from qa_lib.report import quality
from qa_lib.report.runs import (
    AXES,
    BASELINE,
    RECOMMENDED,
    NotMeasured,
    baseline,
    commits,
    direction,
    in_cells,
    measured_apart,
    on_cpu,
    score_name,
)
from qa_lib.report.tables import LEVEL, cost_table, interval, place, summarise
from qa_lib.report.text import say
from qa_lib.variants import VARIANTS

PLAIN = ("A0", "L0")  # transformers.Trainer as it comes
PEERS = ("A0", "A0-grouped", "A0-compile", "L0", "L0-sdpa", "L0-compile")  # drawn beside the ladder, no rungs of it
# Each but E-packed changes the rung before.
LADDER = ("A1", "A2", "A3", "A4-nb", "A4", "E-packed", "E-adamw", "E-graph", "E-bf16", "E-masters", "E-qkv", "E-dropout", "E-regions",
          "E-varlen", "E-norm", "E-gelu", "E-moments", "E-fp8",
          "L1", "L-bf16", "L-sdpa", "L-compile", "L-adamw", "L-graph", "L-masters", "L-dropout")  # fmt: skip
CPU_CAVEAT = "CPU speeds prove the plumbing only and say nothing about GPUs"
WHISKERS = f"± and whiskers: t-based {LEVEL} % interval over seeds, where n ≥ 3"


def seeds_of(lines: pd.DataFrame) -> str:
    """'n = 1 seed' or 'n = 1–3 seeds': how many runs are behind each line that has any."""
    counts = lines.loc[lines["n"] > 0, "n"]
    if counts.empty:
        return "no finished run"
    low, high = counts.min(), counts.max()
    return f"n = {low if low == high else f'{low}–{high}'} {'seed' if high == 1 else 'seeds'}"


def caption(runs: pd.DataFrame, lines: pd.DataFrame) -> str:
    """What has to stand beside every figure and table of a group: where from, how many, and what not to conclude."""
    parts = [f"Group {runs['group'].iloc[0]}"]
    for axis in AXES:
        values = sorted(set(lines[axis.name]))
        if len(values) > 1 or axis.name == "micro_batch":
            parts.append(f"{axis.label} {', '.join(map(str, values))}")
    parts += [seeds_of(lines), f"code {commits(runs)}"]
    if lines["n"].max() >= 3:
        parts.append(WHISKERS)
    notes = runs["spec.adjusted"].explode().dropna().value_counts().sort_index()
    parts += [note if n == len(runs) else f"{note} ({n} of {len(runs)} runs)" for note, n in notes.items()]
    if on_cpu(runs):
        parts.append(CPU_CAVEAT)
    return " · ".join(parts) + "."


def _line(part: pd.DataFrame, variant: str, *measures: str) -> dict:
    """The one line of a row, which must have these measures."""
    lines = part[part["variant"] == variant].dropna(subset=measures)
    if lines.empty:
        names = [score_name(part) if name == "score" else name for name in measures]
        raise NotMeasured(f"{variant} has no measured {', '.join(names)}")
    return lines.iloc[0].to_dict()


def speed_finding(part: pd.DataFrame) -> str:
    """How far the ladder reaches, and the peer beside it."""
    base = _line(part, baseline(part), "samples_per_s")
    timed = part.dropna(subset="ratio").set_index("variant", drop=False)
    rungs = [name for name in LADDER if name in timed.index]
    top = timed.loc[RECOMMENDED if RECOMMENDED in rungs else rungs[-1]].to_dict()
    peers = timed[timed["variant"].isin(PEERS)]
    peer = None if peers.empty else peers.loc[peers["ratio"].idxmax()].to_dict()
    return say("sentences.speed", base=base, top=top, peer=peer, plain=PLAIN)


def trains_all(lines: pd.DataFrame) -> pd.Series:
    """Which lines are of rows that train every parameter."""
    return lines["variant"].map(lambda name: name in VARIANTS and VARIANTS[name].settings.trainable == "all")


def memory_finding(part: pd.DataFrame) -> str:
    """Of the rows that train everything, the one with the smallest peak, and its speed."""
    part = part.dropna(subset=["peak_mib"])
    if part.empty:
        raise NotMeasured("peak GPU memory was not measured: these runs had no GPU, whose allocator counts it")
    part = part[trains_all(part)].dropna(subset=["ratio"])
    if part.empty:
        raise NotMeasured("no row has a speed beside its peak memory: other runs shared the GPU")
    least = part.loc[part["peak_mib"].idxmin()].to_dict()
    return say("sentences.memory", base=_line(part, baseline(part), "peak_mib"), least=least)


def peft_scores(runs: pd.DataFrame) -> pd.DataFrame:
    """The score of the PEFT rows, the baseline and the row they start from, over all micro-batches of one cell; of
    question answering F1 at the best threshold, since at threshold 0 silence does as well.

    By row in table order: score, half, n; delta, delta_half against the baseline over equal seeds; share, of parameters
    that train.
    """
    qa = runs["task.name"].iloc[0] == "qa"
    scores = quality.by_seed(runs, quality.METRICS[1] if qa else f"quality.{runs['task.metric'].iloc[0]}")
    rows = [name for name in sorted(scores, key=place) if name.startswith("B")]
    if not rows or BASELINE not in scores:
        raise NotMeasured(f"no PEFT row (B*) has a measured {score_name(runs)} beside {BASELINE}'s")
    delta = scores.drop(columns=BASELINE).sub(scores[BASELINE], axis="index")
    done = runs[runs["status"] == "ok"].groupby("spec.variant")
    trainable = done["model.params_trainable"].mean() / done["model.params_total"].mean()
    columns = {"score": scores.mean(), "half": interval(scores), "n": scores.count(), "delta": delta.mean(),
               "delta_half": interval(delta), "share": trainable}  # fmt: skip
    return pd.DataFrame(columns).loc[[name for name in (BASELINE, "A3") if name in scores] + rows]


def peft_finding(runs: pd.DataFrame) -> str:
    """The PEFT row with the best score, and whether it is as good as the baseline."""
    rows = peft_scores(runs).filter(like="B", axis="index")
    if (rows["n"] >= 3).any():
        rows = rows[rows["n"] >= 3]
    best = (direction(runs) * rows["score"]).idxmax()
    try:
        told = quality.equivalence(runs).set_index("variant")["verdict"].get(best)
    except NotMeasured:
        told = None
    return say("sentences.peft", best=rows.loc[best], row=best, verdict=told, score=score_name(runs), baseline=BASELINE)


def failed_join_finding(part: pd.DataFrame) -> str:
    """What the wrong join of row A4-b costs against the same training joined by id."""
    wrong, right = (_line(part, name, "score") for name in ("A4-b", "A4"))
    return say("sentences.failed_join", wrong=wrong, right=right, score=score_name(part))


def equivalence_finding(runs: pd.DataFrame) -> str:
    """Which rows are shown to be as good as the baseline, and which are not; over all micro-batches."""
    rows = quality.equivalence(runs).dropna(subset="half").set_index("variant")
    named = {told: ", ".join(rows.index[rows["verdict"] == told]) for told in quality.VERDICTS}
    shown = rows.loc[rows["verdict"].isin(["within", "no worse"]), "n"]
    seeds = "three seeds or more"
    if len(shown):
        seeds = "–".join(map(str, sorted({shown.min(), shown.max()}))) + " seeds"
    return say("sentences.equivalence", margin=quality.MARGIN, baseline=BASELINE, seeds=seeds, rows=named, level=LEVEL)


def equivalence_counts(runs: pd.DataFrame) -> str:
    """equivalence_finding with numbers of rows in place of their names."""
    told = quality.equivalence(runs).dropna(subset="half")["verdict"].value_counts()
    counts = {verdict: int(told.get(verdict, 0)) for verdict in quality.VERDICTS}
    return say("sentences.counts", margin=quality.MARGIN, baseline=BASELINE, counts=counts, rows=int(told.sum()))


def cost_finding(runs: pd.DataFrame) -> str:
    """What a run takes, and what compilation takes of it."""
    rows = cost_table(runs)
    if rows.empty:
        raise NotMeasured("no run that found nothing compiled has a measured wall time")
    return say("sentences.cost", low=rows["wall"].min(), high=rows["wall"].max(), rows=len(rows),
               longest=rows["compiling"].max(), row=rows["compiling"].idxmax())  # fmt: skip


def apart_finding(runs: pd.DataFrame) -> str:
    """Which rows' ratios to the baseline are of different days."""
    rows = measured_apart(runs)
    if not rows:
        raise NotMeasured(f"every timed row is of the same code as {baseline(runs)}")
    return say("sentences.apart", rows=rows, baseline=baseline(runs))


def _labelled(told: list[tuple[str, str]]) -> list[str]:
    """Sentences of cells, each after the label of its cell, if that has one."""
    return [(f"{label[0].upper()}{label[1:]}: " if label else "") + text for label, text in told]


def findings(runs: pd.DataFrame, judged: pd.DataFrame | None = None) -> str:
    """What a group's records say, as a Markdown list: a sentence a figure, the rows without a result, the caption.

    `judged` are the runs that tell quality, where these do not.
    """
    lines = summarise(runs)
    judged, scores = (runs, lines) if judged is None else (judged, summarise(judged))
    group = judged["group"].iloc[0]
    where = "" if group == runs["group"].iloc[0] else f"{group}: "
    over_sizes = judged.drop(columns="micro_batch")
    sources = [
        ("", speed_finding, lines),
        ("", memory_finding, lines),
        (where, equivalence_finding, over_sizes),
        (where, peft_finding, over_sizes),
        (where, failed_join_finding, scores),
        ("", cost_finding, runs),
    ]
    said = []
    for prefix, finding, source in sources:
        try:
            told = in_cells(source, finding)
        except NotMeasured as problem:
            told = [("", f"Not known here: {problem}")]
        said += [prefix + text for text in _labelled(told)]
    with contextlib.suppress(NotMeasured):
        said += _labelled(in_cells(runs, apart_finding))
    notes = lines[lines["note"] != ""].groupby("note", sort=False)["variant"].unique()
    said += [f"{', '.join(rows)}: {note}" for note, rows in notes.items()]
    return "\n".join(f"- {sentence}." for sentence in said) + f"\n\n{caption(runs, lines)}"
