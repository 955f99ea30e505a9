"""README.md's results: what stands there between markers is made of the records of one reference group.

Each of BLOCKS is a part of the README. The words are in texts/readme.md.j2, the numbers come from tables.py, quality.py
and cards.py. Where a record is missing, the reason stands in the number's place.
"""

import os
import subprocess
from pathlib import Path

import pandas as pd

from qa_lib.report import cards, quality
from qa_lib.report.gallery import read_manifest
from qa_lib.report.runs import (
    BASELINE,
    NotMeasured,
    ReportError,
    commits,
    published,
    score_name,
    searches,
    select,
    usual,
)
from qa_lib.report.sentences import PEERS, RECOMMENDED, caption, speed_finding
from qa_lib.report.tables import summarise
from qa_lib.report.text import MISSING, gain, markdown, number, say

README = Path("README.md")
REFERENCE = "h200-bench"  # the group that the README shows if it is there
PLAIN, BEST_PEER, LEAN = PEERS[0], PEERS[-1], "EC2"
ROWS = (PLAIN, BEST_PEER, BASELINE, "A4", "E-t4", RECOMMENDED, LEAN)
# The six techniques that gain most: row, the row it is compared with. E5 holds two steps, both of half precision.
GAINS = {"A2": "A1", "A3": "A2", "E1": "A3", "E2": "E1", "E3": "E2", "E5": "E3"}


def committed_groups(runs: pd.DataFrame, folder: Path) -> list[str]:
    """The groups below `folder` that git tracks: only those may README.md quote. Raises ReportError without git."""
    if not folder.is_dir():
        return []
    command = ["git", "-C", str(folder), "ls-files", "-z", "--", "*/record.json"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        raise ReportError(f"cannot ask git which groups of {folder} are committed: {problem}") from problem
    return sorted({Path(name).parts[0] for name in listed.split("\0") if len(Path(name).parts) == 3})


def with_results(runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> tuple[str, str]:
    """README.md's text, and the same with its BLOCKS made anew. Raises ReportError where the file or a block is
    missing."""
    try:
        text = README.read_text(encoding="utf-8")
    except OSError as problem:
        raise ReportError(f"cannot read {README} in this folder: {problem.strerror}") from problem
    runs = runs[runs["group"].isin(committed_groups(runs, runs_dir))]
    groups = sorted(set(runs["group"]) - searches(runs))
    group = REFERENCE if REFERENCE in groups else groups[0] if groups else None
    after = text
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        head, found, rest = after.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ReportError(f"{README} has no block between {begin} and {end}")
        content = block(runs, group, figures_dir) if group else say("readme.nothing")
        after = f"{head}{begin}\n{content}\n{end}{tail}"
    return text, after


def headline(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """The result in minutes on named hardware, with what was not shown; and the techniques with what each gains."""
    own = select(runs, group)
    every = summarise(own)
    try:
        minutes = quality.projected(every)
        lines = _of_largest_batch(every).set_index("variant")
        wanted = {PLAIN, BEST_PEER, RECOMMENDED, LEAN, *GAINS, *GAINS.values()}
        if absent := sorted(wanted - set(lines.index)):
            raise NotMeasured(f"{', '.join(absent)} have not been run")
        said = {
            "plain": minutes.loc[PLAIN], "peer": minutes.loc[BEST_PEER], "best": minutes.loc[RECOMMENDED],
            "baseline": lines.loc[BASELINE], "stack": lines.loc[RECOMMENDED], "lean": lines.loc[LEAN],
            "gpu": own["env.gpu"].iloc[0], "gpus": sorted(set(runs["env.gpu"].dropna())),
            "model": own["model.name"].iloc[0], "judged": _judged(runs, group), "margin": quality.MARGIN,
            "scored": set(runs.loc[runs["quality.f1"].notna(), "model.name"]),
        }  # fmt: skip
    except NotMeasured as reason:
        return f"**{speed_finding(_of_largest_batch(every))}.**\n\n{say('readme.unknown', reason=reason)}"
    speed = lines["features_per_s"]
    gains = [say("readme.gain", row=row, factor=speed[row] / speed[base]) for row, base in GAINS.items()]
    paragraphs = [say(f"readme.{name}", **said) for name in ("headline", "evidence", "not_shown")]
    paragraphs.append(say("readme.together", factor=speed[RECOMMENDED] / speed[BASELINE]))
    return "\n\n".join([*paragraphs, "\n".join(f"- {line}" for line in gains)])


def _of_largest_batch(lines: pd.DataFrame) -> pd.DataFrame:
    lines = usual(lines)
    return lines[lines["micro_batch"] == lines["micro_batch"].max()]


def _judged(runs: pd.DataFrame, group: str) -> dict:
    """What is known of the recommended row's score: its line of quality.equivalence, and its model's parameters."""
    judged = usual(quality.quality_runs(runs, group))
    tested = quality.equivalence(judged).set_index("variant")
    if RECOMMENDED not in tested.index:
        raise NotMeasured(f"{RECOMMENDED} has no score")
    params = judged.loc[judged["spec.variant"] == RECOMMENDED, "model.params_total"].iloc[0]
    return tested.loc[RECOMMENDED].to_dict() | {"params": params}


def rows(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """The ladder as a picture, and ROWS as a table with where its numbers come from."""
    own = select(runs, group)
    every = summarise(own)
    lines = _of_largest_batch(every)
    lines = lines[lines["variant"].isin(ROWS)]
    reserved = own.groupby(["micro_batch", "spec.variant"])["memory.peak_reserved_mib"].max()
    reserved = reserved.reindex(list(zip(lines["micro_batch"], lines["variant"], strict=True)))
    table = pd.DataFrame({
        "row": lines["variant"].to_list(),
        "what it is": [say("readme.row", row=name) for name in lines["variant"]],
        "features/s": list(map(number, lines["features_per_s"], lines["features_per_s±"])),
        f"× {BASELINE}": lines["ratio"].map(number).to_list(),
        "GiB reserved": (reserved.astype(float) / 1024).map(number).to_list(),
    })  # fmt: skip
    judged = usual(quality.quality_runs(runs, group))
    try:
        tested = quality.equivalence(judged).set_index("variant")
    except NotMeasured as reason:
        source = say("readme.unknown", reason=reason)
    else:
        tested = tested[tested["half"].notna()]
        shown = tested.apply(lambda row: gain(row["best_delta"], row["best_half"]), axis=1)
        table[f"Δ{score_name(judged)}"] = table["row"].map(shown)
        counts = tested.loc[tested.index.isin(ROWS), "n"]
        base = judged[(judged["spec.variant"] == BASELINE) & (judged["status"] == "ok")]
        source = say(
            "readme.quality", group=judged["group"].iloc[0], code=commits(judged), model=judged["model.name"].iloc[0],
            means=base.filter(like="quality.").mean(numeric_only=True), n_train=judged["spec.n_train"].max(),
            n_eval=base["quality.n"].max(), baseline=BASELINE,
            seeds=sorted({counts.min(), counts.max()}),
        )  # fmt: skip
    picture = say("readme.ladder", finding=speed_finding(_of_largest_batch(every)))
    parts = [
        markdown(table.fillna(MISSING)),
        f"{caption(own, lines)} {source}",
        f"![{picture}]({_address(figures_dir, group, 'ladder.png')})",
    ]
    if timeline := read_manifest(figures_dir / group).get("figures", {}).get("timeline.png"):
        alt = say("readme.timeline", title=timeline["title"])
        parts.append(f"![{alt}]({_address(figures_dir, group, 'timeline.png')})")
    return "\n\n".join(parts)


def _address(figures_dir: Path, group: str, name: str) -> str:
    return Path(os.path.relpath(figures_dir / group / name, README.parent)).as_posix()


def card(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """Which row to take, by a card's memory and generation; and what may be expected of a T4."""
    own = select(runs, group)
    worth = cards.worth(quality.quality_runs(runs, group))
    try:
        table = cards.generation_table(own, worth)
        minutes = cards.estimated_minutes(summarise(own), "E-t4", own["env.gpu"].iloc[0], "Tesla T4")
    except NotMeasured as reason:
        return say("readme.unknown", reason=reason)
    theirs = published().loc[BASELINE, "train_s"] / 60
    gpu = own["env.gpu"].iloc[0]
    said = say("readme.cards", gpu=gpu, context=cards.CONTEXT_GIB, minutes=minutes, theirs=theirs, row="E-t4")
    return f"{markdown(table)}\n\n{said}"


def groups(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """Each committed group: what ran, on which hardware, how many runs, and how long one took."""
    table = []
    for name, part in runs.groupby("group"):
        seconds = part["time.notebook_s"].fillna(part["time.wall_s"]).astype(float).dropna()
        first = part.iloc[0]
        hardware = [f"{first['env.cpu_count']} CPU threads"] if "env.cpu_count" in first else []
        if pd.notna(first["env.gpu"]):
            hardware.insert(0, f"{first['env.gpu']} ({first['env.gpu_mem_mib'] / 1024:.0f} GiB)")
        took = f"{number(seconds.median())} s ({number(seconds.min())}–{number(seconds.max())})"
        table.append({
            "group": f"`{name}`",
            "model": ", ".join(sorted(set(part["model.name"]))),
            "hardware": ", ".join(hardware) or "not recorded",
            "runs": str(len(part)),
            "one run": took if len(seconds) else MISSING,
        })  # fmt: skip
    return f"{markdown(pd.DataFrame(table))}\n\n{say('readme.groups')}"


BLOCKS = {"headline": headline, "rows": rows, "cards": card, "groups": groups}
