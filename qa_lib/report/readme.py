"""README.md's results: what stands there between markers is made of the records of the committed groups.

Each of BLOCKS is a part of the README. Where a record is missing, the reason stands in the number's place.
"""

import contextlib
import os
import re
from pathlib import Path

import pandas as pd
from PIL import Image

from qa_lib.report import curves, recommend, scaling
from qa_lib.report.figures import speed_finding, timed
from qa_lib.report.format import MISSING, compact, digits, factor, gain, markdown, number, points, written
from qa_lib.report.load import (
    REFERENCE,
    NotMeasured,
    ReportError,
    baseline,
    commits,
    committed,
    judging,
    largest_batch,
    on_cpu,
    other_days,
    published,
    searches,
    select,
    sibling,
    trains_all,
    usual,
)
from qa_lib.report.stats import BASELINE, LEVEL, MARGIN, VERDICTS, compare, equivalence
from qa_lib.report.summary import summary
from qa_lib.variants import RECOMMENDED, VARIANTS, tagged

README = Path("README.md")
NOTHING = "No reference runs are committed yet; `make quickstart` makes a set of your own below `runs/`."


def with_results(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> tuple[str, str]:
    """README.md's text, and the same with its BLOCKS made anew. Raises ReportError where the file or a block is
    missing."""
    try:
        before = README.read_text(encoding="utf-8")
    except OSError as problem:
        raise ReportError(f"cannot read {README} in this folder: {problem.strerror}") from problem
    runs = runs[runs["group"].isin(committed(runs_dir))] if runs_dir.is_dir() else runs[:0]
    groups = sorted(set(runs["group"]) - searches(runs))
    group = REFERENCE if REFERENCE in groups else groups[0] if groups else None
    after = before
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if not (found := re.search(f"(?s){begin}.*?{end}", after)):
            raise ReportError(f"{README} has no block between {begin} and {end}")
        try:
            content = block(runs, group, figures) if group else NOTHING
        except NotMeasured as reason:
            content = f"What is missing here is not known: {reason}."
        after = after.replace(found[0], f"{begin}\n{content}\n{end}")
    return before, after


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
    full = lines[trains_all(lines["variant"])]
    if plain is None or len(peers) < 2 or RECOMMENDED not in minutes.index or full["peak_mib"].isna().all():
        raise NotMeasured(f"the Trainer, {RECOMMENDED} and their memory have not all been measured in {group}")
    judged = usual(judging(runs, group))
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
    minutes = said["minutes"]["minutes"]
    return (
        f"**Three epochs of SQuAD v2 train BERT-base in {minutes[RECOMMENDED]:.1f} minutes on one {said['gpu']}, where "
        f"`transformers.Trainer` takes {minutes[said['plain']]:.1f} as it comes and about {minutes[said['peer']]:.0f} "
        "with everything it offers.**"
    )


def headline(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """The result in minutes, with what was not shown; and the techniques with what each gains over its parent."""
    said = facts(runs, group)
    lines, judged, peer = said["lines"], said["judged"], said["minutes"].loc[said["peer"]]
    gib, speed = lines["peak_mib"] / 1024, lines["samples_per_s"]
    caveat = "" if peer["cold"] else (
        f"; the Trainer's {peer['minutes']:.0f} hold {peer['compile_s']:.0f} s of it, the longest of its runs, though "
        "each found a part of the code compiled by an earlier one"
    )  # fmt: skip
    within = judged["verdict"] == "within"
    evidence = (
        f"Peak memory falls from {number(gib[BASELINE])} to {number(gib[RECOMMENDED])} GiB; the leanest full training "
        f"takes {number(gib[said['lean']])}. (This is what tensors take; a card needs what PyTorch reserves for them, "
        "see *Results*.) The minutes are projected from measured speed, with compilation ([the "
        f"report](runs/h200-report.ipynb) shows the arithmetic under *Time to quality*){caveat}. F1 "
        f"{'stays within' if within else 'does not fall'} {MARGIN:g} point {'of' if within else 'below'} a plain "
        f"loop's, shown on a smaller model ({judged['params'] / 1e6:.0f} M parameters, {judged['n']} seeds, {LEVEL} % "
        f"intervals): the difference is {gain(judged['delta'], judged['delta±'])}, and "
        f"{gain(judged['best_delta'], judged['best_delta±'])} at the best "
        'threshold for "no answer".'
    )
    together = (
        f"The recommended stack, row {RECOMMENDED} below, trains {number(speed[RECOMMENDED] / speed[BASELINE])} times "
        "as fast as the same training in a plain loop. Most of that comes from six techniques, each against the row "
        "that it changes:"
    )
    gains = [
        f"- {factor(speed[name] / speed[VARIANTS[name].parent])} **{name}**: {VARIANTS[name].why}"
        for name in tagged("technique")
        if {name, VARIANTS[name].parent} <= set(speed.index)
    ]
    return "\n\n".join([result(said), evidence, said["not_shown"], together, "\n".join(gains)])


def headline_table(runs: pd.DataFrame, judged: pd.DataFrame, every: bool = False) -> pd.DataFrame:
    """The variants of a group at its largest micro-batch as text: what each is, n, speed, memory (the most of all
    seeds), and the score at the best threshold against the baseline's by the runs `judged`. Those with the tag
    `headline`; or all, with what they change, where `every` or where none of these ran."""
    lines = largest_batch(summary(runs)).set_index("variant", drop=False)
    reserved = largest_batch(runs).groupby("spec.variant")["memory.peak_reserved_mib"].max().astype(float) / 1024
    every = every or not lines["variant"].isin(tagged("headline")).any()
    words = lines["change"] if every else lines["variant"].map({name: one.why for name, one in VARIANTS.items()})
    table = pd.DataFrame({
        "row": lines["variant"],
        "what it is": words,
        "n": lines["n"].map(str),
        "features/s": written(number, lines, "samples_per_s"),
        f"× {baseline(lines)}": lines["ratio"].map(number),
        "GiB reserved": reserved.reindex(lines.index).map(number),
    })  # fmt: skip
    with contextlib.suppress(NotMeasured):  # the columns are left out, and the table of quality says why
        tested = equivalence(usual(judged)).dropna(subset="delta±").reindex(lines.index)
        table["ΔF1"] = written(gain, tested, "best_delta")
        table[f"within {MARGIN:g} F1"] = tested["verdict"].map(VERDICTS)
    return compact(table if every else table[table["row"].isin(tagged("headline"))])


def source(runs: pd.DataFrame, counts: str = "n") -> str:
    """Where the speed and memory of `headline_table` come from, in a sentence."""
    shown = largest_batch(runs)
    where = "a CPU" if on_cpu(runs) else f"one {shown['env.gpu'].iloc[0]}"
    said = (
        f"Speed and memory: group {shown['group'].iloc[0]}, code {commits(runs)}, on {where}, "
        f"{shown['micro_batch'].iloc[0]} features in a forward pass, means of {counts} runs; ± is half a t-based "
        f"{LEVEL} % interval, of three runs or more."
    )
    others = other_days(shown)
    return f"{said} {', '.join(others)} ran on another day than {baseline(runs)}, on another host." if others else said


def rows(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """The headline variants as a table with where its numbers come from, and two pictures."""
    own, judged = select(runs, group), usual(judging(runs, group))
    table = headline_table(own, judged)
    counts = table.pop("n").astype(int)
    table = table.drop(columns=f"within {MARGIN:g} F1", errors="ignore")
    said = source(own, "–".join(dict.fromkeys(map(str, (counts.min(), counts.max())))))
    parts = [markdown(table), f"{said} {_judged(judged)} {lead(runs, group)}"]
    return "\n\n".join([*parts, *_pictures(figures / group, {
        "ladder": "Bar chart of training speed, a bar a row of the table in the report.",
        "timeline": "One training step as a timeline, coloured by part of the model.",
    })])  # fmt: skip


def lead(runs: pd.DataFrame, group: str) -> str:
    """How the recommended variant's lead over the Trainer at its best changes with the batch, by the group's own runs
    or those of preset `fit` on that hardware, if one of them tells."""
    peers = [name for name in tagged("peer") if VARIANTS[name].settings.compile != "none"]
    for found in (runs[runs["group"] == group], sibling(runs, group, "sizing")):
        with contextlib.suppress(NotMeasured):
            return curves.lead_by_batch(found[found["spec.variant"].isin([*peers, RECOMMENDED])])
    return (
        "The lead over the Trainer is largest where a step is short, since the Trainer waits for the host: at larger "
        "batches it is smaller, by how much is not measured yet."
    )


def _judged(judged: pd.DataFrame) -> str:
    """Where the table's differences in quality come from."""
    try:
        tested = equivalence(judged).dropna(subset="delta±")
    except NotMeasured as reason:
        return f"What is missing here is not known: {reason}."
    counts = tested.loc[tested.index.isin(tagged("headline")), "n"]
    base = judged[(judged["spec.variant"] == BASELINE) & (judged["status"] == "ok")]
    means = base.filter(like="quality.").mean(numeric_only=True)
    return (
        f'ΔF1: against {BASELINE} at the best threshold for "no answer"; group {judged["group"].iloc[0]}, code '
        f"{commits(judged)}, {judged['model.name'].iloc[0]} on {judged['spec.n_train'].max():,.0f} features, scored on "
        f"{base['quality.n'].max():,.0f} questions (never answering scores {points(means['quality.always_null_f1'])}, "
        f"{BASELINE} {points(means['quality.best_f1'])}), means over "
        f"{'–'.join(dict.fromkeys(map(str, (counts.min(), counts.max()))))} equal seeds with t-based {LEVEL} % "
        "intervals; – where fewer than three seeds ran."
    )


def several(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What several GPUs of the group's kind come to, with its picture."""
    own = sibling(runs, group, "parallel")
    finding, found = scaling.speed_finding(scaling.scaling(own)), scaling.projection(own)
    spoken = {re.search(r"\((.*)\)", finding)[1], found["variant"]}
    spoken |= {scaling.one_gpu(name) for name in spoken - {found["variant"]}}
    said = [
        f"**{finding}.** Group {own['group'].iloc[0]}, code {commits(own[own['spec.variant'].isin(spoken)])}, a run's "
        "GPUs all of one host.",
        scaling.projected_words(found),
    ]
    with contextlib.suppress(NotMeasured, KeyError):
        line = scaling.batch_worth(scaling.logs_of(sibling(runs, group, "critical-batch")))[0].loc[found["batch"]]
        said.append(
            f"Each step takes {found['batch']} features, of which one teaches "
            f"{points(line['measured'], line['measured±'])} of what it does at {scaling.REFERENCE} "
            f"({points(line['predicted'])} by the noise scale; both measured on a smaller model)."
        )
    pictures = {"scaling": "Two line charts of features a second against the number of GPUs."}
    parts = [" ".join(said), *_pictures(figures / own["group"].iloc[0], pictures)]
    return scaling.worded("\n\n".join(parts), own)


def language(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What the same techniques give on a language model, on the group's hardware."""
    own = sibling(runs, group, "lm-bench")
    if own.empty:
        raise NotMeasured("no language model was timed on this hardware")
    lines = largest_batch(summary(own)).set_index("variant", drop=False)
    ratios = lines["ratio"].dropna()
    climbed, peers = (ratios[ratios.index.isin(tagged(tag))] for tag in ("ladder", "peer"))
    mixed = next((name for name in climbed.index if VARIANTS[name].change == {"precision": "bf16"}), None)
    if mixed is None or peers.empty:
        raise NotMeasured("no language model was timed with mixed precision and by the Trainer")
    best, peer = lines.loc[climbed.index[-1]], lines.loc[peers.idxmax()]
    said = (
        f"**{speed_finding(lines)}**; {factor(best['samples_per_s'] / lines.loc[mixed, 'samples_per_s'])} as fast as "
        f"{mixed}, which adds mixed precision to that baseline in fp32. That is "
        f"{number(best['tokens_per_s_padded'], best['tokens_per_s_padded±'])} tokens/s of a model in GPT-2 small's shape "
        f"(`{own['model.name'].iloc[0]}`) with {own['length'].iloc[0]:,} tokens of context, at a peak of "
        f"{number(best['peak_mib'] / 1024)} GiB, where the Trainer takes {number(peer['peak_mib'] / 1024)}. Group "
        f"{own['group'].iloc[0]}, code {commits(own)}."
    )
    try:
        said += f" {apart(sibling(runs, group, 'lm-quality'), best['variant'], peer['variant'])}"
    except NotMeasured:
        said += " **Not shown:** that these rows end at one perplexity."
    fits = sibling(runs, group, "lm-sizing")
    with contextlib.suppress(NotMeasured):
        said += " " + curves.lead_by_batch(fits[fits["spec.variant"].isin([best["variant"], peer["variant"]])])
    pictures = {"ladder": "Bar chart of training speed, a bar a row of the table in the report."}
    return "\n\n".join([said, *_pictures(figures / own["group"].iloc[0], pictures)])


def apart(runs: pd.DataFrame, variant: str, other: str) -> str:
    """How far two language models end from each other where they were trained alike, in a sentence. Raises
    NotMeasured."""
    scored = runs[(runs["status"] == "ok") & runs["spec.variant"].isin([variant, other])]
    parts = [part for _, part in scored.groupby(["model", "length", "training", "batch", "micro_batch"])]
    most = max(parts, key=lambda part: (part["spec.variant"].nunique(), len(part)), default=scored)
    column = "quality.bits_per_byte"
    difference = compare(most, variant, other, column)
    both = most.groupby("spec.seed").filter(lambda part: part["spec.variant"].nunique() == 2)
    ends, n = both.groupby("spec.variant")[column].mean().astype(float), both["spec.seed"].nunique()
    first = most.iloc[0]
    return (
        f"On the validation text, a smaller model (`{first['model.name']}`, {first['training']}) ends at "
        f"{digits(ends[variant])} bits per byte with {variant} and at {digits(ends[other])} with {other}: "
        f"{digits(*difference, sign='+')} over {n} seed{'s' if n > 1 else ''}, where less is better (group "
        f"{first['group']}, code {commits(most)})."
    )


def _pictures(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Those of a group's figures that were drawn, {name: what it shows}, each with that and its title in words."""
    found = []
    for name, words in wanted.items():
        path = folder / f"{name}.png"
        if path.is_file():
            with Image.open(path) as image:
                title = image.text.get("Title", name)
            found.append(f"![{words} {title}]({Path(os.path.relpath(path, README.parent)).as_posix()})")
    return found


def card(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Which variant to take, by a card's memory and generation; and what may be expected of a T4."""
    own, t4 = select(runs, group), recommend.for_t4(runs, group)
    table = recommend.generation_table(own, judging(runs, group))
    minutes = recommend.estimated_minutes(runs, group, t4, "Tesla T4", 75)
    theirs = published().loc[BASELINE, "train_s"] / 60
    return (
        f"{markdown(table)}\n\nEach is the quickest row (or {RECOMMENDED}, if that is within "
        f"{100 * recommend.SCATTER:.0f} %) of those that train all parameters, keep their F1, fit (memory reserved on "
        f"the {own['env.gpu'].iloc[0]}, and {recommend.CONTEXT_GIB} GiB for the process) and find their kernels on the "
        "card; where none fits, the quickest adapter (E-packed-lora is LoRA). None of the other cards has run anything. On "
        f"a T4, the seeds' plain Trainer took {theirs:.0f} minutes for three epochs; {t4} would take about "
        f"{minutes:.0f}, by its best speed here with the attention kernel of a T4, at a larger micro-batch than that, "
        "and the two cards' data-sheet peaks: an estimate that nobody has checked."
    )


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
    return (
        f"{markdown(pd.DataFrame(table))}\n\n*One run*: the median of its seconds from a fresh process to the record "
        "(lowest–highest), with imports, data and compilation; several runs of quality shared a GPU. – where runs had "
        "no process of their own, or were timed in another way."
    )


BLOCKS = {"headline": headline, "rows": rows, "several": several, "language": language, "cards": card, "groups": groups}
