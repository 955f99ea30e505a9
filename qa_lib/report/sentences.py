"""What the records of a group say, in sentences computed from them: titles of figures, captions, the list of findings.

The words are in texts/sentences.md.j2. A sentence that no record supports raises NotMeasured with the reason. A group
of several cells (see runs.AXES) has a line for each, since ratios hold within one only.
"""

from collections.abc import Callable
from functools import wraps

import pandas as pd

from qa_lib.report import quality
from qa_lib.report.runs import AXES, BASELINE, NotMeasured, baseline, commits, direction, in_cells, on_cpu, score_name
from qa_lib.report.tables import cost_table, summarise
from qa_lib.report.text import say
from qa_lib.variants import VARIANTS

PEERS = ("A0", "A0-best", "A0-compile")  # drawn beside the ladder, no rungs of it
# Each but E1 changes the rung before.
LADDER = ("A1", "A2", "A3", "A4-nb", "A4", "E1", "E2", "E3", "E4", "E5", "E6", "E-best", "E-fp8",
          "L1", "L2", "L3", "L4", "L5", "L6", "L7", "L-best")  # fmt: skip
RECOMMENDED = "E-best"  # the row that sentences speak of, where it was run
CPU_CAVEAT = "CPU speeds prove the plumbing only and say nothing about GPUs"
WHISKERS = "± and whiskers: t-based 95 % interval over seeds, where n ≥ 3"


def seeds_of(lines: pd.DataFrame) -> str:
    """'n = 1 seed' or 'n = 1–3 seeds': how many runs are behind each line that has any."""
    counts = lines.loc[lines["n"] > 0, "n"]
    if counts.empty:
        return "no finished run"
    low, high = counts.min(), counts.max()
    return f"n = {low if low == high else f'{low}–{high}'} {'seed' if high == 1 else 'seeds'}"


def caption(runs: pd.DataFrame, lines: pd.DataFrame, whiskers: str = WHISKERS) -> str:
    """What has to stand beside every figure and table of a group: where from, how many, and what not to conclude."""
    parts = [f"Group {runs['group'].iloc[0]}"]
    for axis in AXES:
        values = sorted(set(lines[axis.name]))
        if len(values) > 1 or axis.name == "micro_batch":
            parts.append(f"{axis.label} {', '.join(map(str, values))}")
    parts += [seeds_of(lines), f"code {commits(runs)}"]
    if lines["n"].max() >= 3:
        parts.append(whiskers)
    notes = runs["spec.adjusted"].explode().dropna().value_counts().sort_index()
    parts += [note if n == len(runs) else f"{note} ({n} of {len(runs)} runs)" for note, n in notes.items()]
    if on_cpu(runs):
        parts.append(CPU_CAVEAT)
    return " · ".join(parts) + "."


def per_cell(sentence: Callable[[pd.DataFrame], str]) -> Callable[[pd.DataFrame], str]:
    """Turns a sentence about one cell into one about all cells that have it, a line each."""

    @wraps(sentence)
    def finding(table: pd.DataFrame) -> str:
        said = in_cells(table, sentence)
        return ";\n".join(f"{label[0].upper()}{label[1:]}: {text}" if label else text for label, text in said)

    return finding


def _line(part: pd.DataFrame, variant: str, *measures: str) -> dict:
    """The one line of a row, which must have these measures."""
    lines = part[part["variant"] == variant].dropna(subset=measures)
    if lines.empty:
        names = [score_name(part) if name == "score" else name for name in measures]
        raise NotMeasured(f"{variant} has no measured {', '.join(names)}")
    return lines.iloc[0].to_dict()


@per_cell
def speed_finding(part: pd.DataFrame) -> str:
    """How far the ladder reaches, and the peer beside it."""
    base = _line(part, baseline(part), "features_per_s")
    timed = part.dropna(subset="ratio").set_index("variant", drop=False)
    rungs = [name for name in LADDER if name in timed.index]
    top = timed.loc[RECOMMENDED if RECOMMENDED in rungs else rungs[-1]].to_dict()
    peers = timed[timed["variant"].isin(PEERS)]
    peer = None if peers.empty else peers.loc[peers["ratio"].idxmax()].to_dict()
    return say("sentences.speed", base=base, top=top, peer=peer, plain=PEERS[0])


@per_cell
def quality_finding(part: pd.DataFrame) -> str:
    """The quickest row whose mean score is close to the baseline's; whether it is equal is for quality.equivalence."""
    quality.require_answers(part)
    base = _line(part, baseline(part), "score", "train_s")
    close = part[part["delta"] >= -quality.MARGIN].dropna(subset=["train_s"])
    quickest = close.loc[close["train_s"].idxmin()].to_dict()
    return say("sentences.quality", base=base, quickest=quickest, rows=len(close), margin=quality.MARGIN)


@per_cell
def memory_finding(part: pd.DataFrame) -> str:
    """Of the rows that train everything, the one with the smallest peak, and what it costs in step time."""
    part = part.dropna(subset=["peak_mib"])
    if part.empty:
        raise NotMeasured("peak GPU memory was not measured: these runs had no GPU, whose allocator counts it")
    every = part["variant"].map(lambda name: name in VARIANTS and VARIANTS[name].settings.trainable == "all")
    part = part[every].dropna(subset=["step_ms"])
    if part.empty:
        raise NotMeasured("no row has a step time beside its peak memory: other runs shared the GPU")
    least = part.loc[part["peak_mib"].idxmin()].to_dict()
    base = next(iter(part[part["variant"] == baseline(part)].to_dict("records")), None)
    return say("sentences.memory", base=base, least=least, rows=len(part))


@per_cell
def peft_finding(part: pd.DataFrame) -> str:
    """The PEFT row with the best score."""
    rows = part[part["family"] == "B"].dropna(subset=["score", "trainable"])
    if rows.empty:
        raise NotMeasured(f"no PEFT row (B*) has a measured {score_name(part)}")
    if (rows["n"] >= 3).any():
        rows = rows[rows["n"] >= 3]
    best = rows.loc[(direction(rows) * rows["score"]).idxmax()].to_dict()
    return say("sentences.peft", best=best, score=score_name(part), baseline=baseline(part))


@per_cell
def failed_join_finding(part: pd.DataFrame) -> str:
    """What the wrong join of row A4-b costs against the same training joined by id."""
    wrong, right = (_line(part, name, "score") for name in ("A4-b", "A4"))
    return say("sentences.failed_join", wrong=wrong, right=right, score=score_name(part))


@per_cell
def _equivalence_finding(runs: pd.DataFrame) -> str:
    rows = quality.equivalence(runs).dropna(subset="half").set_index("variant")
    named = {told: ", ".join(rows.index[rows["verdict"] == told]) for told in quality.VERDICTS}
    shown = rows.loc[rows["verdict"].isin(["within", "no worse"]), "n"]
    seeds = "three seeds or more"
    if len(shown):
        seeds = "–".join(map(str, sorted({shown.min(), shown.max()}))) + " seeds"
    return say("sentences.equivalence", margin=quality.MARGIN, baseline=BASELINE, seeds=seeds, rows=named)


def equivalence_finding(runs: pd.DataFrame) -> str:
    """Which rows of `runs` are shown to be as good as the baseline, and which are not; over all micro-batches."""
    return _equivalence_finding(runs.drop(columns="micro_batch"))


def cost_finding(runs: pd.DataFrame) -> str:
    """What all runs of the group took together, and the longest."""
    *rows, total = cost_table(runs).to_dict("records")
    if not rows:
        raise NotMeasured("no run has a measured wall time")
    return say("sentences.cost", total=total, longest=max(rows, key=lambda row: row["wall_s"]))


def findings(runs: pd.DataFrame, judged: pd.DataFrame | None = None) -> str:
    """What a group's records say, as a Markdown list: a sentence a figure, the rows without a result, the caption.

    `judged` are the runs that tell quality, where these do not.
    """
    lines = summarise(runs)
    judged, scores = (runs, lines) if judged is None else (judged, summarise(judged))
    group = judged["group"].iloc[0]
    where = "" if group == runs["group"].iloc[0] else f"{group}: "
    sources = [
        ("", speed_finding, lines),
        ("", memory_finding, lines),
        (where, equivalence_finding, judged),
        *((where, finding, scores) for finding in (quality_finding, peft_finding, failed_join_finding)),
        ("", cost_finding, runs),
    ]
    said = []
    for prefix, finding, source in sources:
        try:
            said += [prefix + sentence for sentence in finding(source).split(";\n")]
        except NotMeasured as problem:
            said.append(f"Not known here: {problem}")
    notes = lines[lines["note"] != ""].groupby("note", sort=False)["variant"].agg(", ".join)
    said += [f"{rows}: {note}" for note, rows in notes.items()]
    return "\n".join(f"- {sentence}." for sentence in said) + f"\n\n{caption(runs, lines)}"
