"""README.md's results: what stands there between markers is made of the records of one reference group.

Each of BLOCKS is a part of the README. The words are in texts/readme.md.j2, the numbers come from tables.py, quality.py
and cards.py. Where a record is missing, the reason stands in the number's place.
"""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from qa_lib.report import cards, curves, quality, scaling, scores, slides
from qa_lib.report.gallery import read_manifest
from qa_lib.report.runs import (
    BASELINE,
    RECOMMENDED,
    NotMeasured,
    ReportError,
    commits,
    on_cpu,
    published,
    searches,
    select,
    sibling,
    usual,
)
from qa_lib.report.sentences import CPU_CAVEAT, apart_finding, speed_finding
from qa_lib.report.tables import LEVEL, summarise
from qa_lib.report.text import MISSING, markdown, number, say
from qa_lib.variants import VARIANTS

README = Path("README.md")
REFERENCE = "h200-bench"  # the group that the README shows if it is there
PLAIN, BEST_PEER, LEAN = "A0", "A0-compile", "E-recompute-moments"
LANGUAGE = ("L-bf16", "L-dropout", "L0-compile")  # mixed precision, the recommended row, the Trainer at its best
# What one may decide for: the rows of this page's table, and with two steps between them those of the report's first.
T4 = "E-t4-norm"  # the quickest that such a card can run
SHORT = (PLAIN, BEST_PEER, BASELINE, T4, RECOMMENDED, LEAN, "E-packed-lora")
ROWS = (*SHORT, "A4", "E-packed-8bit")
# The six techniques that gain most: row, the row it is compared with. E-masters holds two steps, both of half
# precision.
GAINS = {
    "A2": "A1",
    "A3": "A2",
    "E-packed": "A3",
    "E-graph": "E-adamw",
    "E-masters": "E-graph",
    "E-varlen": "E-regions",
}


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
        if not (found := re.search(f"(?s){begin}.*?{end}", after)):
            raise ReportError(f"{README} has no block between {begin} and {end}")
        content = block(runs, group, figures_dir) if group else say("readme.nothing")
        after = after.replace(found[0], f"{begin}\n{content}\n{end}")
    return text, after


def headline(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """The result in minutes on named hardware, with what was not shown; and the techniques with what each gains."""
    try:
        said = facts(runs, group)
    except NotMeasured as reason:
        finding = speed_finding(quality.largest_batch(summarise(select(runs, group))))
        return f"**{finding}.**\n\n{say('readme.unknown', reason=reason)}"
    speed = said["speed"]
    gains = [say("readme.gain", row=row, factor=speed[row] / speed[base]) for row, base in GAINS.items()]
    paragraphs = [say(f"readme.{name}", **said) for name in ("headline", "evidence", "not_shown", "together")]
    return "\n\n".join([*paragraphs, "\n".join(f"- {line}" for line in gains)])


def facts(runs: pd.DataFrame, group: str) -> dict:
    """What the first sentences of README.md and of the report say of a bench group, by the names of the macros in
    texts/readme.md.j2. Raises NotMeasured."""
    own = select(runs, group)
    every = summarise(own)
    minutes = quality.projected(every)
    lines = quality.largest_batch(every).set_index("variant", drop=False)
    wanted = {PLAIN, BEST_PEER, RECOMMENDED, LEAN, *GAINS, *GAINS.values()}
    if absent := sorted(wanted - set(lines.index)):
        raise NotMeasured(f"{', '.join(absent)} have not been run")
    return {
        "plain": minutes.loc[PLAIN], "peer": minutes.loc[BEST_PEER], "best": minutes.loc[RECOMMENDED],
        "baseline": lines.loc[BASELINE], "stack": lines.loc[RECOMMENDED], "lean": lines.loc[LEAN],
        "speed": lines["samples_per_s"], "gpu": own["env.gpu"].iloc[0], "gpus": sorted(set(runs["env.gpu"].dropna())),
        "model": own["model.name"].iloc[0], "judged": _judged(runs, group), "margin": quality.MARGIN,
        "scored": set(runs.loc[runs["quality.f1"].notna(), "model.name"]),
    }  # fmt: skip


def _judged(runs: pd.DataFrame, group: str) -> dict:
    """What is known of the recommended row's score: its line of quality.equivalence, and its model's parameters."""
    judged = usual(quality.quality_runs(runs, group))
    tested = quality.equivalence(judged).set_index("variant")
    if RECOMMENDED not in tested.index:
        raise NotMeasured(f"{RECOMMENDED} has no score")
    params = judged.loc[judged["spec.variant"] == RECOMMENDED, "model.params_total"].iloc[0]
    return tested.loc[RECOMMENDED].to_dict() | {"params": params}


def rows(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """SHORT as a table with where its numbers come from, and two pictures."""
    own = select(runs, group)
    judged = usual(quality.quality_runs(runs, group))
    table = decisions(own, judged, SHORT)
    counts = table.pop("n").astype(int)
    table = table.drop(columns=f"within {quality.MARGIN:g} F1", errors="ignore")
    parts = [markdown(table), f"{measured(own, (counts.min(), counts.max()))} {_source(judged)} {lead(runs, group)}"]
    return "\n\n".join([*parts, *_pictures(group, figures_dir, "ladder", "timeline")])


def lead(runs: pd.DataFrame, group: str) -> str:
    """How the recommended row's lead over the Trainer at its best changes with the batch, by the group's own runs or
    those of preset `fit` on that hardware, if one of them tells."""
    for found in (runs[runs["group"] == group], sibling(runs, group, "fit")):
        with contextlib.suppress(NotMeasured):
            return curves.lead_by_batch(found[found["spec.variant"].isin([BEST_PEER, RECOMMENDED])])
    return say("readme.lead_unknown")


def several(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """What several GPUs of the group's kind come to, with its picture."""
    own = sibling(runs, group, "parallel")
    try:
        finding = scaling.speed_finding(scaling.scaling(own))
    except NotMeasured as reason:
        return say("readme.unknown", reason=reason)
    name, facts = own["group"].iloc[0], slides.Facts(own, sibling(runs, group, "slides"))
    told, more = {scaling.SHOWN, scaling.one_gpu(scaling.SHOWN)}, ""
    with contextlib.suppress(NotMeasured):
        more = " " + say("slides.shortest", facts=facts)
        told.add(facts.shortest()["variant"])
    code = commits(own[own["spec.variant"].isin(told)])
    said = say("readme.several", finding=finding, group=name, code=code) + more
    return scaling.worded("\n\n".join([said, *_pictures(name, figures_dir, "scaling")]), own)


def language(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """What the same techniques give on a language model, on the group's hardware."""
    own = sibling(runs, group, "lm-bench")
    if own.empty:
        return say("readme.unknown", reason="no language model was timed on this hardware")
    lines = quality.largest_batch(summarise(own)).set_index("variant", drop=False)
    if absent := [name for name in LANGUAGE if name not in lines.index]:
        return say("readme.unknown", reason=f"{', '.join(absent)} have not been run")
    mixed, best, peer = (lines.loc[name] for name in LANGUAGE)
    name, ends = own["group"].iloc[0], None
    if len(scored := sibling(runs, group, "lm-quality")):
        with contextlib.suppress(NotMeasured):
            ends = scores.apart(runs, scored["group"].iloc[0], best["variant"], peer["variant"])
    said = say("readme.language", finding=speed_finding(lines), mixed=mixed, best=best, peer=peer, group=name,
               model=own["model.name"].iloc[0], length=own["length"].iloc[0], code=commits(own), ends=ends)  # fmt: skip
    rows = sibling(runs, group, "lm-fit")
    rows = rows[rows["spec.variant"].isin(LANGUAGE[1:])]
    with contextlib.suppress(NotMeasured):
        said += " " + curves.lead_by_batch(rows)
    return "\n\n".join([said, *_pictures(name, figures_dir, "ladder")])


def _pictures(group: str, figures_dir: Path, *names: str) -> list[str]:
    """Those of a group's figures that were drawn, each with what it shows in words."""
    manifest, found = read_manifest(figures_dir / group).get("figures", {}), []
    for name in names:
        if drawn := manifest.get(f"{name}.png"):
            alt = say(f"readme.{name}", title=drawn["title"])
            address = os.path.relpath(figures_dir / group / f"{name}.png", README.parent)
            found.append(f"![{alt}]({Path(address).as_posix()})")
    return found


def decisions(runs: pd.DataFrame, judged: pd.DataFrame, wanted: tuple[str, ...] = ROWS) -> pd.DataFrame:
    """Of quality.overview the rows `wanted`, or all where none of these ran, and in words what each is."""
    table = quality.overview(runs, judged).rename(columns={"what it changes": "what it is"})
    if table["row"].isin(wanted).any():
        table = table[table["row"].isin(wanted)]
    words = {
        name: say("readme.row", row=name, why=VARIANTS[name].why, recommended=RECOMMENDED) for name in table["row"]
    }
    return table.assign(**{"what it is": table["row"].map(words)})


def measured(runs: pd.DataFrame, counts: Iterable[int] = ("n",)) -> str:
    """Where the speed and memory of `decisions` come from, in a sentence; with the fewest and most runs of a row where
    the table has no column for them."""
    shown = quality.largest_batch(runs)
    first, apart = shown.iloc[0], ""
    with contextlib.suppress(NotMeasured):
        apart = apart_finding(shown)
    return say("readme.measured", gpu=None if on_cpu(runs) else first["env.gpu"], group=first["group"],
               micro_batch=first["micro_batch"], code=commits(runs), level=LEVEL, caveat=CPU_CAVEAT,
               counts=list(dict.fromkeys(counts)), apart=apart)  # fmt: skip


def _source(judged: pd.DataFrame) -> str:
    """Where the table's differences in quality come from."""
    try:
        tested = quality.equivalence(judged).dropna(subset="half").set_index("variant")
    except NotMeasured as reason:
        return say("readme.unknown", reason=reason)
    counts = tested.loc[tested.index.isin(SHORT), "n"]
    base = judged[(judged["spec.variant"] == BASELINE) & (judged["status"] == "ok")]
    return say(
        "readme.quality", group=judged["group"].iloc[0], code=commits(judged), model=judged["model.name"].iloc[0],
        means=base.filter(like="quality.").mean(numeric_only=True), n_train=judged["spec.n_train"].max(),
        n_eval=base["quality.n"].max(), baseline=BASELINE, seeds=sorted({counts.min(), counts.max()}),
    )  # fmt: skip


def card(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """Which row to take, by a card's memory and generation; and what may be expected of a T4."""
    own = select(runs, group)
    worth = cards.worth(quality.quality_runs(runs, group))
    try:
        table = cards.generation_table(own, worth)
        minutes = cards.estimated_minutes(runs, group, T4, "Tesla T4", 75)
    except NotMeasured as reason:
        return say("readme.unknown", reason=reason)
    theirs = published().loc[BASELINE, "train_s"] / 60
    gpu = own["env.gpu"].iloc[0]
    said = say(
        "readme.cards", gpu=gpu, context=cards.CONTEXT_GIB, minutes=minutes, theirs=theirs, row=T4,
        recommended=RECOMMENDED,
    )  # fmt: skip
    return f"{markdown(table)}\n\n{said}"


def groups(runs: pd.DataFrame, group: str, figures_dir: Path) -> str:
    """Each committed group: what ran, on which hardware, how many runs, and how long one took."""
    table = []
    for name, part in runs.groupby("group"):
        seconds = part["time.notebook_s"].astype(float).dropna()
        first = part.iloc[0]
        threads = part.reindex(columns=["env.cpu_count"])["env.cpu_count"].dropna().astype(int)
        hardware = [f"{' or '.join(map(str, sorted(set(threads))))} CPU threads"] if len(threads) else []
        if pd.notna(first["env.gpu"]):
            hardware.insert(0, f"{first['env.gpu']} ({first['env.gpu_mem_mib'] / 1024:.0f} GiB)")
        names = sorted(set(part["model.name"]))
        took = f"{number(seconds.median())} s ({number(seconds.min())}–{number(seconds.max())})"
        table.append({
            "group": f"`{name}`",
            "model": ", ".join(names) if len(names) < 3 else f"{len(names)} models",
            "hardware": ", ".join(hardware) or "not recorded",
            "runs": str(len(part)),
            "one run": took if len(seconds) else MISSING,
        })  # fmt: skip
    return f"{markdown(pd.DataFrame(table))}\n\n{say('readme.groups')}"


BLOCKS = {"headline": headline, "rows": rows, "several": several, "language": language, "cards": card, "groups": groups}
