"""README.md's results, and those of pages in docs/: what stands there between markers is made of the records of the
committed groups.

Each of BLOCKS is a part of one page. Where a record is missing, the reason stands in the number's place.
"""

import contextlib
import os
import re
from pathlib import Path

import pandas as pd
from PIL import Image

from qa_lib.report import curves, load, recommend, scaling
from qa_lib.report.figures import speed_finding, timed
from qa_lib.report.format import MISSING, digits, factor, gain, markdown, number, points, render, say
from qa_lib.report.load import REFERENCE, NotMeasured, ReportError, commits, select, sibling, usual
from qa_lib.report.stats import BASELINE, LEVEL, MARGIN, VERDICTS, compare, equivalence
from qa_lib.report.summary import summary
from qa_lib.variants import RECOMMENDED, VARIANTS, tagged

PAGES = [Path("README.md"), *map(Path, ("docs/several-gpus.md", "docs/language-model.md", "docs/presets.md"))]
NOTHING = "No reference runs are committed yet; `make quickstart` makes a set of your own below `runs/`."


def with_results(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> dict[Path, tuple[str, str]]:
    """The text of each of PAGES, and the same with its BLOCKS made anew. Raises ReportError where README.md or a block
    is missing."""
    runs = runs[runs["group"].isin(load.committed(runs_dir))] if runs_dir.is_dir() else runs[:0]
    groups = sorted(set(runs["group"]) - load.searches(runs))
    group = REFERENCE if REFERENCE in groups else groups[0] if groups else None
    try:
        before = {page: page.read_text(encoding="utf-8") for page in PAGES if page.exists() or page == PAGES[0]}
    except OSError as problem:
        raise ReportError(f"cannot read {problem.filename} in this folder: {problem.strerror}") from problem
    after = dict(before)
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        found = {page: re.search(f"(?s){begin}.*?{end}", text) for page, text in after.items()}
        page = next((page for page, part in found.items() if part), None)
        if page is None:
            raise ReportError(f"no page has a block between {begin} and {end}: {', '.join(map(str, PAGES))}")
        try:
            content = block(runs, group, figures) if group else NOTHING
        except NotMeasured as reason:
            content = f"What is missing here is not known: {reason}."
        if page.parent.name:  # links are from the page
            content = re.sub(r"\]\((figures|runs)/", r"](../\1/", content)
        after[page] = after[page].replace(found[page][0], f"{begin}\n{content}\n{end}")
    return {page: (before[page], after[page]) for page in before}


def facts(runs: pd.DataFrame, group: str) -> dict:
    """What the first sentences of README.md and of the report say of a bench group. Raises NotMeasured.

    lines (of the largest micro-batch, by variant), minutes (of recommend.projected), the names of the plain Trainer,
    the best one, the recommended variant and the leanest full training; judged, the recommended variant's line of
    stats.equivalence with its model's params; not_shown, a sentence.
    """
    own = select(runs, group)
    every, lines = summary(own), timed(own).set_index("variant", drop=False)
    minutes = recommend.projected(every)
    peers = [name for name in tagged("peer") if name in minutes.index]
    plain = next((name for name in peers if VARIANTS[name].change == {"engine": "trainer"}), None)
    full = lines[load.trains_all(lines["variant"])]
    if plain is None or len(peers) < 2 or RECOMMENDED not in minutes.index or full["peak_mib"].isna().all():
        raise NotMeasured(f"the Trainer, {RECOMMENDED} and their memory have not all been measured in {group}")
    judged = usual(load.judging(runs, group))
    tested = equivalence(judged)
    if RECOMMENDED not in tested.index:
        raise NotMeasured(f"{RECOMMENDED} has no score")
    params = judged.loc[judged["spec.variant"] == RECOMMENDED, "model.params_total"].iloc[0]
    return {
        "gpu": own["env.gpu"].iloc[0], "lines": lines, "minutes": minutes, "plain": plain,
        "peer": minutes.loc[peers, "speed"].idxmax(), "lean": full["peak_mib"].idxmin(),
        "judged": tested.loc[RECOMMENDED].to_dict() | {"params": params}, "not_shown": _not_shown(runs, own),
    }  # fmt: skip


def _not_shown(runs: pd.DataFrame, own: pd.DataFrame) -> str:
    said, gpus = "**Not shown:**", sorted(set(runs["env.gpu"].dropna()))
    if own["model.name"].iloc[0] not in set(runs.loc[runs["quality.f1"].notna(), "model.name"]):
        said += " the F1 of BERT-base itself, which no run here has measured; and"
    said += f" anything on any card but the {' and '.join(gpus)}"
    return said + ("." if "Tesla T4" in gpus else ": no T4 has run anything.")


def result(said: dict) -> str:
    """The result in minutes on named hardware, of `facts`."""
    best, plain, peer = (said["minutes"].loc[name, "minutes"] for name in (RECOMMENDED, said["plain"], said["peer"]))
    return say("result", best=best, plain=plain, peer=peer, gpu=said["gpu"])


def headline(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """The result in minutes, with what was not shown; and the techniques with what each gains over its parent."""
    said = facts(runs, group)
    lines, judged, peer = said["lines"], said["judged"], said["minutes"].loc[said["peer"]]
    gib, speed = (lines["peak_mib"] / 1024).map(number), lines["samples_per_s"]
    kept = "stays within {:g} point of" if judged["verdict"] == "within" else "does not fall {:g} point below"
    evidence = say(
        "evidence", before=gib[BASELINE], after=gib[RECOMMENDED], lean=gib[said["lean"]], n=judged["n"],
        caveat="" if peer["cold"] else say("partly_cached", **peer), params=judged["params"] / 1e6, level=LEVEL,
        kept=kept.format(MARGIN),
        delta=gain(judged["delta"], judged["delta±"]), best=gain(judged["best_delta"], judged["best_delta±"]),
    )  # fmt: skip
    together = say("together", variant=RECOMMENDED, ratio=number(speed[RECOMMENDED] / speed[BASELINE]))
    gaining = [VARIANTS[name] for name in tagged("technique") if {name, VARIANTS[name].parent} <= set(speed.index)]
    gains = [f"- {factor(speed[one.name] / speed[one.parent])} **{one.name}**: {one.why}" for one in gaining]
    return "\n\n".join([result(said), evidence, said["not_shown"], together, "\n".join(gains)])


def headline_table(runs: pd.DataFrame, judged: pd.DataFrame) -> pd.DataFrame:
    """The variants of a group at its largest micro-batch as text: what each is, n, speed, memory (the most of all
    seeds), and the score at the best threshold against the baseline's by the runs `judged`. Those with the tag
    `headline`, or all where none of these ran."""
    lines = load.largest_batch(summary(runs)).set_index("variant", drop=False)
    if lines["variant"].isin(tagged("headline")).any():
        lines = lines[lines["variant"].isin(tagged("headline"))]
    reserved = load.largest_batch(runs).groupby("spec.variant")["memory.peak_reserved_mib"].max().astype(float) / 1024
    words = lines["variant"].map({name: variant.why for name, variant in VARIANTS.items()})
    lines = lines.drop(columns="ratio±").assign(gib=reserved.reindex(lines.index), why=words)
    heads = f"variant, why=what it is, n, samples_per_s=samples/s, ratio=× {load.baseline(lines)}, gib=GiB reserved"
    with contextlib.suppress(NotMeasured):  # the columns are left out, and the table of quality says why
        lines = lines.join(equivalence(usual(judged)).dropna(subset="delta±")[["best_delta", "best_delta±", "verdict"]])
        lines["verdict"] = lines["verdict"].map(VERDICTS)
        heads += f", best_delta=ΔF1, verdict=within {MARGIN:g} F1"
    return render(lines, heads, gain="best_delta")


def source(runs: pd.DataFrame, counts: str = "n") -> str:
    """Where the speed and memory of `headline_table` come from, in a sentence."""
    shown = load.largest_batch(runs)
    first, others = shown.iloc[0], load.other_days(shown)
    where = "a CPU" if load.on_cpu(runs) else f"one {first['env.gpu']}"
    said = say("source", group=first["group"], code=commits(runs), where=where, micro_batch=first["micro_batch"],
               counts=counts, level=LEVEL)  # fmt: skip
    days = f" {', '.join(others)} ran on another day than {load.baseline(runs)}, on another host."
    return said + days * bool(others)


def variants(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """The headline variants as a table with where its numbers come from, and two pictures."""
    own, judged = select(runs, group), usual(load.judging(runs, group))
    table = headline_table(own, judged)
    said = source(own, _range(table.pop("n").astype(int)))
    table = table.drop(columns=f"within {MARGIN:g} F1", errors="ignore")
    parts = [markdown(table), f"{said} {_judged(judged)} {lead(runs, group)}"]
    return "\n\n".join([*parts, *_pictures(figures / group, {
        "ladder": "Bar chart of training speed, a bar a variant of the table in the report.",
        "timeline": "One training step as a timeline, coloured by part of the model.",
    })])  # fmt: skip


def lead(runs: pd.DataFrame, group: str) -> str:
    """How the recommended variant's lead over the Trainer at its best changes with the batch, by the group's own runs
    or those of preset `fit` on that hardware, if one of them tells."""
    peers = [name for name in tagged("peer") if VARIANTS[name].settings.compile != "none"]
    for found in (runs[runs["group"] == group], sibling(runs, group, "sizing")):
        with contextlib.suppress(NotMeasured):
            return curves.lead_by_batch(found[found["spec.variant"].isin([*peers, RECOMMENDED])])
    return say("lead_unknown")


def _range(counts: pd.Series) -> str:
    """From the least to the most of some counts, '1–3'; one number where they are equal."""
    return "–".join(dict.fromkeys(map(str, (counts.min(), counts.max()))))


def _judged(judged: pd.DataFrame) -> str:
    """Where the table's differences in quality come from."""
    try:
        tested = equivalence(judged).dropna(subset="delta±")
    except NotMeasured as reason:
        return f"What is missing here is not known: {reason}."
    counts = tested.loc[tested.index.isin(tagged("headline")), "n"]
    base = judged[(judged["spec.variant"] == BASELINE) & (judged["status"] == "ok")]
    means = base.filter(like="quality.").mean(numeric_only=True)
    return say(
        "judged", base=BASELINE, group=judged["group"].iloc[0], code=commits(judged),
        model=judged["model.name"].iloc[0], n_train=judged["spec.n_train"].max(), n_eval=base["quality.n"].max(),
        best=points(means["quality.best_f1"]),
        silent=points(means["quality.always_null_f1"]), seeds=_range(counts), level=LEVEL,
    )  # fmt: skip


def several(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What several GPUs of the group's kind come to, with its picture."""
    own = sibling(runs, group, "parallel")
    finding, found = scaling.speed_finding(scaling.scaling(own)), scaling.projection(own)
    spoken = {re.search(r"\((.*)\)", finding)[1], found["variant"]}
    spoken |= {scaling.one_gpu(name) for name in spoken - {found["variant"]}}
    code, name = commits(own[own["spec.variant"].isin(spoken)]), own["group"].iloc[0]
    said = [say("several", finding=finding, group=name, code=code), scaling.projected_words(found)]
    with contextlib.suppress(NotMeasured, KeyError):
        line = scaling.batch_worth(scaling.logs_of(sibling(runs, group, "critical-batch")))[0].loc[found["batch"]]
        measured, predicted = points(line["measured"], line["measured±"]), points(line["predicted"])
        known = {"measured": measured, "predicted": predicted, "reference": scaling.REFERENCE}
        said.append(say("teaches", batch=found["batch"], **known))
    pictures = {"scaling": "Two line charts of samples a second against the number of GPUs."}
    parts = [" ".join(said), *_pictures(figures / name, pictures)]
    return scaling.worded("\n\n".join(parts), own)


def language(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What the same techniques give on a language model, on the group's hardware."""
    own = sibling(runs, group, "lm-bench")
    if own.empty:
        raise NotMeasured("no language model was timed on this hardware")
    lines = load.largest_batch(summary(own)).set_index("variant", drop=False)
    ratios = lines["ratio"].dropna()
    climbed, peers = (ratios[ratios.index.isin(tagged(tag))] for tag in ("ladder", "peer"))
    mixed = next((name for name in climbed.index if VARIANTS[name].change == {"precision": "bf16"}), None)
    if mixed is None or peers.empty:
        raise NotMeasured("no language model was timed with mixed precision and by the Trainer")
    best, peer = lines.loc[climbed.index[-1]], lines.loc[peers.idxmax()]
    ratio = factor(best["samples_per_s"] / lines.loc[mixed, "samples_per_s"])
    said = say(
        "language", finding=speed_finding(lines), ratio=ratio, mixed=mixed, model=own["model.name"].iloc[0],
        tokens=number(best["tokens_per_s"], best["tokens_per_s±"]), length=own["length"].iloc[0],
        code=commits(own),
        gib=number(best["peak_mib"] / 1024), peer_gib=number(peer["peak_mib"] / 1024), group=own["group"].iloc[0],
    )  # fmt: skip
    try:
        said += f" {apart(sibling(runs, group, 'lm-quality'), best['variant'], peer['variant'])}"
    except NotMeasured:
        said += " **Not shown:** that these variants end at one perplexity."
    fits = sibling(runs, group, "lm-sizing")
    with contextlib.suppress(NotMeasured):
        said += " " + curves.lead_by_batch(fits[fits["spec.variant"].isin([best["variant"], peer["variant"]])])
    pictures = {"ladder": "Bar chart of training speed, a bar a variant of the table in the report."}
    return "\n\n".join([said, *_pictures(figures / own["group"].iloc[0], pictures)])


def apart(runs: pd.DataFrame, variant: str, other: str) -> str:
    """How far two language models end from each other where they were trained alike, in a sentence. Raises
    NotMeasured."""
    scored = runs[(runs["status"] == "ok") & runs["spec.variant"].isin([variant, other])]
    most = usual(scored[scored["model"].isin(scored.loc[scored["spec.variant"] == other, "model"])])
    column = "quality.bits_per_byte"
    difference = compare(most, variant, other, column)
    both = most.groupby("spec.seed").filter(lambda part: part["spec.variant"].nunique() == 2)
    ends, first = both.groupby("spec.variant")[column].mean().astype(float).map(digits), most.iloc[0]
    return say("apart", model=first["model.name"], training=first["training"], end=ends[variant], variant=variant,
               other_end=ends[other], other=other, difference=digits(*difference, sign="+"), group=first["group"],
               n=both["spec.seed"].nunique(), code=commits(most))  # fmt: skip


def _pictures(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Those of a group's figures that were drawn, {name: what it shows}, each with that and its title in words."""
    found = []
    for name, words in wanted.items():
        path = folder / f"{name}.png"
        if path.is_file():
            with Image.open(path) as image:
                title = image.text.get("Title", name)
            found.append(f"![{words} {title}]({Path(os.path.relpath(path)).as_posix()})")
    return found


def cards(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Which variant to take, by a card's memory and generation; and what may be expected of a T4."""
    own, t4 = select(runs, group), recommend.best_for(runs, group, 14.9, 75).variant
    table = recommend.generation_table(own, load.judging(runs, group))
    minutes = recommend.estimated_minutes(runs, group, t4, "Tesla T4", 75)
    theirs, gpu = load.published().loc[BASELINE, "train_s"] / 60, own["env.gpu"].iloc[0]
    said = say("cards", recommended=RECOMMENDED, scatter=100 * recommend.SCATTER, context=recommend.CONTEXT_GIB,
               gpu=gpu, theirs=theirs, variant=t4, minutes=minutes)  # fmt: skip
    return f"{markdown(table)}\n\n{said}"


def groups(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Each committed group: what ran, on which hardware, how many runs, and how long one took."""
    table = []
    for name, part in runs.groupby("group"):
        seconds = part["time.notebook_s"].astype(float).dropna()
        first, names = part.iloc[0], sorted(set(part["model.name"]))
        threads = part.reindex(columns=["env.cpu_count"])["env.cpu_count"].dropna().astype(int)
        hardware = [f"{' or '.join(map(str, sorted(set(threads))))} CPU threads"] if len(threads) else []
        if pd.notna(first["env.gpu"]):
            hardware.insert(0, f"{first['env.gpu']} ({first['env.gpu_mem_mib'] / 1024:.0f} GiB)")
        took = f"{number(seconds.median())} s ({number(seconds.min())}–{number(seconds.max())})"
        table.append({
            "group": f"`{name}`",
            "model": ", ".join(names) if len(names) < 3 else f"{len(names)} models",
            "hardware": ", ".join(hardware) or "not recorded",
            "runs": str(len(part)),
            "one run": took if len(seconds) else MISSING,
        })  # fmt: skip
    return f"{markdown(pd.DataFrame(table))}\n\n{say('groups')}"


BLOCKS = {block.__name__: block for block in (headline, variants, several, language, cards, groups)}
