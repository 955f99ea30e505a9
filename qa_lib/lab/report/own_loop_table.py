"""What the techniques give in one's own loop or Trainer: a table of docs/own-code.md.

Its lines are those that `python -m qa_lib.own.bench --out docs/own-bench.jsonl` wrote, one for each
turn of a way (qa_lib/own/bench.py says what the ways are). Ratios are taken within rounds, whose
turns came one after the other, and medians over rounds are shown.
"""

import json
from pathlib import Path

import pandas as pd

from qa_lib.lab.report import spoken
from qa_lib.lab.report.evidence import NotMeasured, ReportError
from qa_lib.lab.report.format import MISSING, factor, number, percent
from qa_lib.lab.report.tables import compact, markdown
from qa_lib.paths import ROOT

FILE = Path("docs/own-bench.jsonl")
NOT_MEASURED = "How much it gives on a GPU is not measured yet."
LOOP, TUNED, ALL, FAST = "loop", "trainer-tuned", "all", "fast-trainer"
WAYS = {
    LOOP: "a plain loop",
    "trainer": "the Trainer as it comes, in fp32",
    TUNED: "the tuned, compiled Trainer",
    "speed_up": "the loop and `speed_up`",
    "packing": "the loop and packing, without `speed_up`",
    "masters": "`speed_up`, packing and masters",
    ALL: "`speed_up`, packing and masters as one CUDA graph",
    FAST: "`FastTrainer(cuda_graph=True)`",
}
ALONE = ("speed_up", "packing", "masters")  # ways that lack the graph
TASKS = {"pairs": "pairs of sentences", "paragraphs": "paragraphs", "labels": "token labels"}
MODELS = {"base": "BERT-base", "modernbert": "ModernBERT-base", "tiny": "a tiny BERT"}
# A way and samples in a step -> how often it is to be as fast as the tuned Trainer.
GOALS = {(ALL, 32): 3.0, (ALL, 128): 1.6, (FAST, 32): 1.5, (FAST, 128): 1.5}
# The library's own training of answers, and the share of its tokens/s that the loop is to reach.
OWN_STEP = "E-uncompiled"
OWN_SHARE = 0.9
OWN_MODELS = ("bert-base", "bert-base-uncased")
OWN_PLACE = {"task": "paragraphs", "size": "base", "batch": 32}
# What is equal for all lines that are shown, and what tells the parts of the table apart.
ORIGIN = ["card", "torch", "transformers", "code"]
PART = ["size", "task", "batch"]
TURN = [*ORIGIN, *PART, "way", "round"]
SPEED = "samples_per_s"
LEFT = frozenset({"task", "training"})  # headings of words in the table
PLACE = "over the tuned Trainer, by samples a step"


def own_loop(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return as Markdown what each way came to, and whether the goals hold.

    A block of readme.py. `runs` are those of all committed groups.

    Raises ReportError for a file that cannot be read.
    """
    if not FILE.exists():
        return NOT_MEASURED
    lines = load_lines(FILE)
    shown = newest_of_most(lines)
    ways = way_lines(shown)
    first = shown.iloc[0]
    leads = lead_lines(ways)
    steps = "–".join(map(str, sorted({shown["steps"].min(), shown["steps"].max()})))
    calls = shown["sitting"].nunique()
    source = (
        f"Medians over rounds (lowest–highest) of {steps} steps each, in turns, in "
        f"{'one call' if calls == 1 else f'{calls} calls'} of the bench, on one "
        f"{spoken.card(first['card'])} with torch {first['torch']}, transformers "
        f"{first['transformers']}, by files with the digest {first['code'][:7]}. A ratio is the "
        "median of those within rounds: two medians of speeds, divided, may give another. "
        "Weights and tokens are random; tokens/s are without padding. Kernels' ms are of "
        "a step, from one profile: without what the GPU waits for the host. With another "
        "host's CPU the factors are others, and the kernels' times nearly the same."
    )
    parts = [
        finding_of(ways, spoken.card(first["card"])),
        lead_table(leads),
        " ".join(filter(None, [waiting_sentence(leads), goal_sentence(leads)])),
        own_step_sentence(ways, runs, first["card"]),
        slower_sentence(ways),
        markdown(in_words(ways), LEFT),
        source,
        elsewhere_sentence(lines.drop(shown.index)),
    ]
    return "\n\n".join(part for part in parts if part)


def own_lead(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return the finding of `own_loop` alone, and FastTrainer's lead at the same place.

    A block of readme.py. Raises ReportError for a file that cannot be read.
    """
    if not FILE.exists():
        return NOT_MEASURED
    shown = newest_of_most(load_lines(FILE))
    ways = way_lines(shown)
    leads = lead_lines(ways)
    finding = finding_of(ways, spoken.card(shown["card"].iloc[0]))
    of_trainer = leads.loc[_is_own_place(leads), "fast"].dropna()
    if of_trainer.empty:
        return finding
    return f"{finding} {WAYS[FAST]} trains at {factor(of_trainer.iloc[0])}."


def on_a_gpu() -> str:
    """Return as Markdown the finding and the table of the committed lines, for a notebook.

    Raises NotMeasured where they are not here, as in an installed package.
    """
    if not (ROOT / FILE).exists():
        raise NotMeasured(f"{FILE} is in a checkout alone")
    shown = newest_of_most(load_lines(ROOT / FILE))
    ways = way_lines(shown)
    leads = lead_lines(ways)
    parts = [
        finding_of(ways, spoken.card(shown["card"].iloc[0])),
        lead_table(leads),
        waiting_sentence(leads),
        markdown(in_words(ways), LEFT),
    ]
    return "\n\n".join(filter(None, parts))


def load_lines(path: Path) -> pd.DataFrame:
    """Return the measurements of a file, a row for each; of equal ones the last.

    Raises ReportError for a file that is not as the bench writes it.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
        lines = pd.DataFrame([json.loads(text) for text in texts])
        turns = lines[TURN]
    except (OSError, ValueError, KeyError) as problem:
        raise ReportError(
            f"{path} is not what the bench writes: {type(problem).__name__}, {problem}"
        ) from problem
    return lines[~turns.duplicated(keep="last")]


def newest_of_most(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of one card and code: those that measured the most.

    That is by how many ways of how many parts; of equals it is the newest.
    """

    def rank(part: pd.DataFrame) -> tuple:
        return len(part.drop_duplicates([*PART, "way"])), part["date"].max()

    return max((part for _, part in lines.groupby(ORIGIN)), key=rank)


def way_lines(lines: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each way of each part, in the order of MODELS, TASKS, batch and WAYS.

    Columns: PART, way; rounds; samples_per_s with lowest and highest; over_loop and over_tuned, its
    speed over theirs, NaN where no round has both; most_over_loop, the highest of those ratios;
    tokens_per_s, without padding; kernel_ms.
    """
    table = []
    for part, of_part in lines.groupby(PART):
        speeds = of_part.pivot(index="round", columns="way", values=SPEED)
        for way, turns in of_part.groupby("way"):
            median = turns[SPEED].median()
            table.append({
                **dict(zip(PART, part, strict=True)),
                "way": way,
                "rounds": len(turns),
                SPEED: median,
                "lowest": turns[SPEED].min(),
                "highest": turns[SPEED].max(),
                "over_loop": _ratios(speeds, way, LOOP).median(),
                "most_over_loop": _ratios(speeds, way, LOOP).max(),
                "over_tuned": _ratios(speeds, way, TUNED).median(),
                "tokens_per_s": median * turns["tokens_a_sample"].iloc[0],
                "kernel_ms": turns["kernel_ms"].astype(float).median(),
            })  # fmt: skip
    order = {name: place for place, name in enumerate([*MODELS, *TASKS, *WAYS])}
    return pd.DataFrame(table).sort_values(
        ["size", "task", "batch", "way"], key=lambda column: column.replace(order)
    )


def _ratios(speeds: pd.DataFrame, way: str, over: str) -> pd.Series:
    """Return a way's speed over another's in each round; NaN where a round has not both."""
    if over not in speeds:
        return pd.Series(float("nan"), speeds.index)
    return speeds[way] / speeds[over]


def in_words(ways: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `way_lines` as text; a part is named in its first line alone."""
    rows = []
    last = None
    for line in ways.itertuples():
        part = f"{TASKS[line.task]}, {MODELS[line.size]}, {line.batch} in a step"
        rows.append({
            "task": "" if part == last else part,
            "training": f"{WAYS[line.way]} ({line.way})",
            "samples/s": _with_range(line),
            "× the plain loop": MISSING if line.way == LOOP else factor(line.over_loop),
            "× the tuned Trainer": MISSING if line.way == TUNED else factor(line.over_tuned),
            "tokens/s": number(line.tokens_per_s),
            "ms of its kernels": number(line.kernel_ms),
        })  # fmt: skip
        last = part
    return compact(pd.DataFrame(rows))


def _with_range(line) -> str:
    """Return a way's speed with that of its slowest and quickest round, where it has several."""
    text = number(line.samples_per_s)
    if line.rounds == 1:
        return f"{text} (one round)"
    return f"{text} ({number(line.lowest)}–{number(line.highest)})"


# Leads over the tuned Trainer.


def lead_lines(ways: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each part in which the loop or FastTrainer has a lead over the Trainer.

    Columns: PART; all and fast, how often the loop with all of it and FastTrainer are as fast as
    the tuned Trainer; by_kernels, the loop's lead by the kernels' times; busy, the share of the
    tuned Trainer's step in which its GPU works. NaN where that was not measured.
    """
    table = []
    for part, of_part in ways.groupby(PART, sort=False):
        by_way = of_part.set_index("way").reindex([TUNED, ALL, FAST])
        tuned = by_way.loc[TUNED]
        tuned_step_ms = 1000 * of_part["batch"].iloc[0] / tuned[SPEED]
        table.append({
            **dict(zip(PART, part, strict=True)),
            "all": by_way.loc[ALL, "over_tuned"],
            "fast": by_way.loc[FAST, "over_tuned"],
            "by_kernels": tuned["kernel_ms"] / by_way.loc[ALL, "kernel_ms"],
            "busy": tuned["kernel_ms"] / tuned_step_ms,
        })  # fmt: skip
    leads = pd.DataFrame(table)
    return leads[leads[["all", "fast"]].notna().any(axis=1)]


def lead_table(leads: pd.DataFrame) -> str:
    """Return the lines of `lead_lines` as Markdown; "" where there are none."""
    if leads.empty:
        return ""
    rows = [
        {
            PLACE: _place(line),
            "a loop with all of it": factor(line.all),
            "by kernels": factor(line.by_kernels),
            "`FastTrainer`": factor(line.fast),
            "the Trainer's GPU works for": percent(line.busy),
        }
        for line in leads.itertuples()
    ]
    return markdown(pd.DataFrame(rows), {PLACE})


def waiting_sentence(leads: pd.DataFrame) -> str:
    """Return why leads by time and by kernels differ; "" where kernels were not timed."""
    if leads["busy"].isna().all():
        return ""
    return (
        "For the rest of its step the tuned Trainer's GPU waits for the host: where a lead is "
        f"larger than the lead by kernels, the difference is this host's.{_all_the_hosts(leads)}"
    )


def _all_the_hosts(leads: pd.DataFrame) -> str:
    """Return where the loop's kernels take longer than the tuned Trainer's; "" where nowhere."""
    slower = [_place(line) for line in leads[leads["by_kernels"] < 1].itertuples()]
    if not slower:
        return ""
    return f" For {' and '.join(slower)} its compiled kernels are quicker: that lead is the host's."


def goal_sentence(leads: pd.DataFrame) -> str:
    """Return how many of GOALS BERT-base reaches, and by how much it misses others.

    "" where none was measured.
    """
    missed = []
    count = 0
    for line in leads[leads["size"] == "base"].itertuples():
        for way, lead in ((ALL, line.all), (FAST, line.fast)):
            goal = GOALS.get((way, line.batch))
            if goal is None or pd.isna(lead):
                continue
            count += 1
            if lead < goal:
                name = "the loop" if way == ALL else "`FastTrainer`"
                missed.append(f"{name} for {_place(line)} ({factor(lead)} of {factor(goal)})")
    if not count:
        return ""
    wanted = (
        f"The goals, for BERT-base, are {factor(GOALS[ALL, 32])} for the loop at 32 samples and "
        f"{factor(GOALS[ALL, 128])} at 128, and {factor(GOALS[FAST, 32])} for `FastTrainer`: "
    )
    if not missed:
        return f"{wanted}all {count} are reached."
    return f"{wanted}{count - len(missed)} of {count} are reached, missed by {', '.join(missed)}."


# Sentences.


def finding_of(ways: pd.DataFrame, card: str) -> str:
    """Return the loop's speed, with all of it, over the tuned Trainer's, or else the plain loop's.

    That is at OWN_PLACE, or where it was measured first. "" where neither was measured beside it.
    """
    for column, way, other in (
        ("over_tuned", TUNED, "the tuned Trainer"),
        ("over_loop", LOOP, "a plain loop"),
    ):
        compared = ways[(ways["way"] == ALL) & ways[column].notna()]
        if len(compared):
            place = _is_own_place(compared).idxmax()  # the first line, where none is
            line = next(compared.loc[[place]].itertuples())
            lead = factor(getattr(line, column))
            return (
                f"**On one {card} a loop with all of it trains at {lead} the speed of {other}, for "
                f"{_place(line)} samples a step{_by_kernels(ways, line, way)}.**"
            )
    return ""


def _is_own_place(lines: pd.DataFrame) -> pd.Series:
    """Return which lines are of OWN_PLACE."""
    return (lines[list(OWN_PLACE)] == list(OWN_PLACE.values())).all(axis=1)


def _by_kernels(ways: pd.DataFrame, line, other: str) -> str:
    """Return a line's lead over another way of its part by kernel time, in brackets, if known."""
    in_part = (ways[PART] == [getattr(line, name) for name in PART]).all(axis=1)
    of_other = ways.loc[in_part & (ways["way"] == other), "kernel_ms"]
    ratio = of_other.iloc[0] / line.kernel_ms
    return "" if pd.isna(ratio) else f" ({factor(ratio)} by kernels)"


def elsewhere_sentence(others: pd.DataFrame) -> str:
    """Return what was faster than the tuned Trainer in lines that the table does not show.

    "" where it was not timed there.
    """
    said = []
    for (card, _, _, code), lines in others.groupby(ORIGIN):
        ways = way_lines(lines)
        compared = ways[ways["way"].isin([ALL, FAST]) & ways["over_tuned"].notna()]
        for line in compared.itertuples():
            in_part = (ways[PART] == [getattr(line, name) for name in PART]).all(axis=1)
            tuned = ways.loc[in_part & (ways["way"] == TUNED), SPEED].iloc[0]
            said.append(
                f"{WAYS[line.way]} {factor(line.over_tuned)} over {number(tuned)} samples/s for "
                f"{_place(line)} (one {spoken.card(card)}, digest {code[:7]})"
            )
    if not said:
        return ""
    return f"Other hosts and older code, over the tuned Trainer there: {'; '.join(said)}."


def slower_sentence(ways: pd.DataFrame) -> str:
    """Return which techniques alone lost to the plain loop in every round, and by kernels.

    "" where none did.
    """
    plain = ways[ways["way"] == LOOP].set_index(PART)["kernel_ms"]
    said = []
    for line in ways[ways["most_over_loop"] < 1].itertuples():
        if line.way not in ALONE:
            continue
        of_loop = plain[tuple(getattr(line, name) for name in PART)]
        text = f"{WAYS[line.way]}, {factor(line.over_loop)} for {_place(line)}"
        if not pd.isna(line.kernel_ms + of_loop):
            text += f" ({number(line.kernel_ms)} ms of kernels for {number(of_loop)})"
        said.append(text)
    if not said:
        return ""
    return (
        f"**Without the graph some lose to the plain loop in every round:** {'; '.join(said)}. "
        "Python starts our "
        "kernels one by one, for which a slow host takes longer than for PyTorch's own. "
        "`GraphedStep` replays them without Python."
    )


def _place(line) -> str:
    """Return the task, model and batch of a line of `way_lines` in words."""
    model = "" if line.size == "base" else f" with {MODELS[line.size]}"
    return f"{TASKS[line.task]}{model} at {line.batch}"


def _verdict(value: float, goal: float) -> str:
    return "reached" if value >= goal else "missed"


def own_step_sentence(ways: pd.DataFrame, runs: pd.DataFrame, card: str) -> str:
    """Return the loop's tokens/s beside those of the library's own training of answers.

    That is at OWN_PLACE, by the median of the newest code's timed runs on this card. "" where
    either was not measured.
    """
    is_loop = ways["way"].eq(ALL) & _is_own_place(ways)
    own = _newest_own_runs(runs, card)
    if own.empty or not is_loop.any():
        return ""
    of_own = own["speed.tokens_per_s"].astype(float).median()
    share = ways.loc[is_loop, "tokens_per_s"].iloc[0] / of_own
    return (
        f"At {TASKS[OWN_PLACE['task']]} the loop makes {percent(share)} of the {number(of_own)} "
        f"tokens/s of the library's own training of answers, {spoken.variant(OWN_STEP)}, on such a "
        f"card (group {own['group'].iloc[0]}, other lengths): the goal of "
        f"{percent(OWN_SHARE)} is {_verdict(share, OWN_SHARE)}."
    )


def _newest_own_runs(runs: pd.DataFrame, card: str) -> pd.DataFrame:
    """Return the timed runs of OWN_STEP with BERT-base on a card, of the newest code and data."""
    if runs.empty:
        return runs
    is_own = (
        runs["spec.variant"].eq(OWN_STEP)
        & runs["spec.preset.name"].eq("bench")
        & runs["spec.search"].eq("")
        & runs["status"].eq("ok")
        & runs["env.gpu"].eq(card)
        & runs["model.name"].isin(OWN_MODELS)
        & runs["micro_batch"].eq(OWN_PLACE["batch"])
        & runs["speed.tokens_per_s"].notna()
    )
    own = runs[is_own].sort_values("time.started")
    newest = own.tail(1)
    return own[own["code"].isin(newest["code"]) & own["data"].isin(newest["data"])]
