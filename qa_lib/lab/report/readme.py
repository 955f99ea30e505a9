"""README.md's results, and those of pages in docs/: what stands there between markers is made of the records of the
committed groups.

Each of BLOCKS is a part of one page. Where a record is missing, the reason stands in the number's place.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
from PIL import Image

from qa_lib.lab.report import evidence, facts, scaling
from qa_lib.lab.report.figures import speed_finding, timed
from qa_lib.lab.report.format import MISSING, factor, gain, number, percent, points
from qa_lib.lab.report.stats import BASELINE, LEVEL, MARGIN, equivalence
from qa_lib.lab.report.summary import summary
from qa_lib.lab.report.tables import Column, markdown, render
from qa_lib.spec.resolve import resolve
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged

# Of changes of settings (`of`, the first that matches): the code, as module:name, and how it works. README.md names
# some by the variant that `adds` one, what that gains `over` another, and what this is, in words (`than`).
TECHNIQUES = pd.read_csv(Path(__file__).with_name("techniques.csv"), keep_default_na=False)
STEADY = 0.05  # of a speed, half of its interval at most
PROJECTED = 32  # the micro-batch at whose speed a full training is projected
NOTHING = (
    "No reference runs are committed yet; `make quickstart` makes a set of your own below `runs/`."
)


def with_results(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> dict[Path, tuple[str, str]]:
    """The text of README.md and of each page of docs/ with one of BLOCKS, and the same with these made anew. Raises
    ReportError where README.md or a block is missing."""
    runs = (
        runs[runs["group"].isin(evidence.committed_groups(runs_dir))]
        if runs_dir.is_dir()
        else runs[:0]
    )
    groups = sorted(set(runs["group"]) - evidence.search_groups(runs))
    group = evidence.REFERENCE if evidence.REFERENCE in groups else groups[0] if groups else None
    pages = [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
    try:
        before = {page: page.read_text(encoding="utf-8") for page in pages}
    except OSError as problem:
        raise evidence.ReportError(
            f"cannot read {problem.filename} in this folder: {problem.strerror}"
        ) from problem
    before = {page: text for page, text in before.items() if "<!-- /" in text or page == pages[0]}
    after = dict(before)
    for name, block in BLOCKS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        found = {page: re.search(f"(?s){begin}.*?{end}", text) for page, text in after.items()}
        page = next((page for page, part in found.items() if part), None)
        if page is None:
            raise evidence.ReportError(
                f"no page has a block between {begin} and {end}: {', '.join(map(str, before))}"
            )
        try:
            content = block(runs, group, figures) if group else NOTHING
        except evidence.NotMeasured as reason:
            content = f"What is missing here is not known: {reason}."
        if page.parent.name:  # links are from the page
            content = re.sub(r"\]\((figures|runs)/", r"](../\1/", content)
        after[page] = after[page].replace(found[page][0], f"{begin}\n{content}\n{end}")
    return {page: (before[page], after[page]) for page in before}


def headline(runs: pd.DataFrame, group: str, figures: Path = Path()) -> str:
    """The result in minutes, what it costs, whether F1 is kept, what was not shown; and the picture of the ladder.
    Raises NotMeasured."""
    own = evidence.select(runs, group)
    lines = timed(own).set_index("variant", drop=False)
    gib = lines["reserved_mib"] / 1024
    full = gib[evidence.trains_all(lines["variant"])]
    if RECOMMENDED not in lines.index or full.isna().all():
        raise evidence.NotMeasured(
            f"{RECOMMENDED} and its memory have not been measured in {group}"
        )
    before, after, lean = map(number, (*gib[[BASELINE, RECOMMENDED]], full.min()))
    finding = speed_finding(lines)
    costs = (
        f"{finding}: {BASELINE} is an unoptimized loop, {RECOMMENDED} the whole stack in bf16. "
        f"Memory reserved falls from {before} to {after} GiB; the leanest full training takes {lean}."
    )
    said = [_minutes(runs, own), f"{costs} {_kept(runs, group)}", _not_shown(runs, own)]
    return "\n\n".join([*said, *_picture(figures / group / "ladder.png")])


def _minutes(runs: pd.DataFrame, own: pd.DataFrame) -> str:
    """The minutes of a whole training, where the stack and the plain Trainer were measured so; else projected ones."""
    whole, gpu = _whole(runs, own), own["env.gpu"].iloc[0]
    minutes = whole.groupby("spec.variant")["minutes"].mean()
    if RECOMMENDED in minutes and (rivals := _rivals(minutes)):
        first, short = whole.iloc[0], whole.loc[whole["times"] > 1, "spec.variant"].unique()
        until = "the score" if whole["quality.f1"].notna().all() else "the last step"
        times = "".join(
            f"; {name}: start, {evidence.FULL_EPOCHS} times one epoch" for name in short
        )
        n = whole.value_counts("spec.variant").min()
        return (
            f"**Three epochs of {first['spec.n_train']:,.0f} samples train BERT-base in "
            f"{minutes[RECOMMENDED]:.1f} minutes on one {gpu}, where `transformers.Trainer` takes "
            f"{rivals}.** Measured from the command to {until}, with nothing cached "
            f"(runs of each: {n}; data: {first['data.name']}; SQuAD v2: {evidence.FULL_SAMPLES:,}; "
            f"group {first['group']}, code {evidence.commits(whole)}{times})."
        )
    table = projected(summary(own))
    minutes = table["minutes"]
    if RECOMMENDED not in minutes or not (rivals := _rivals(minutes)):
        raise evidence.NotMeasured(
            f"{RECOMMENDED} and the Trainer have not both been timed in {own['group'].iloc[0]}"
        )
    rival = table.loc[minutes.index.intersection(tagged("trainer")), "speed"].idxmax()
    caveat = ""
    if not table.loc[rival, "cold"]:
        compile_s = table.loc[rival, "compile_s"]
        caveat = f"; {rival} compiles for {compile_s:.0f} s, with a part of the code from a cache"
    return (
        "**Projected from measured speed: three epochs of SQuAD v2 train BERT-base in "
        f"{minutes[RECOMMENDED]:.1f} minutes on one {gpu}, where `transformers.Trainer` takes "
        f"{rivals}.** With compilation, without data and scoring{caveat}."
    )


def projected(lines: pd.DataFrame) -> pd.DataFrame:
    """Minutes of training on the full data set at a bench group's speeds (`lines` of summary), indexed by variant: of
    the headline ones.

    Columns: speed (samples/s); compile_s, NaN where it was not measured; cold, whether compile_s is of runs that found
    nothing compiled; minutes of training and compilation. Data and scoring are not counted. Raises NotMeasured.
    """
    if len(lines) and lines["task.name"].iloc[0] != "qa":
        raise evidence.NotMeasured(
            "the projection is to SQuAD v2's training questions, and this is another task"
        )
    part = evidence.usual_conditions(lines)
    part = part[(part["micro_batch"] == PROJECTED) & part["samples_per_s"].notna()].set_index(
        "variant"
    )
    if evidence.baseline(lines) not in part.index:
        raise evidence.NotMeasured(
            f"the baseline has no measured speed at micro-batch {PROJECTED} to project from"
        )
    part = part.loc[[name for name in tagged("headline") if name in part.index]]
    cold = part["compile_s"].astype(float)
    eager = pd.Series(
        [VARIANTS[name].settings.compile == "none" for name in part.index], part.index
    )
    compile_s = cold.fillna(part["warm_compile_s"].astype(float)).mask(eager, 0.0)
    table = pd.DataFrame(
        {"speed": part["samples_per_s"], "compile_s": compile_s, "cold": eager | cold.notna()}
    )
    table["minutes"] = (
        evidence.FULL_SAMPLES * evidence.FULL_EPOCHS / table["speed"] + compile_s.fillna(0.0)
    ) / 60
    return table


def _whole(runs: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """The runs that trained the model of the group `own` on its hardware for FULL_EPOCHS, or for one, which stands for
    as many `times`, with nothing compiled before; on the most samples that any had, and with their minutes."""
    params = own.loc[own["spec.variant"] == BASELINE, "model.params_total"]
    alike = runs["spec.hardware"].isin(own["spec.hardware"]) & runs["model.params_total"].isin(
        params
    )
    whole = (
        runs["status"].eq("ok")
        & runs[evidence.EPOCHS].isin([1, evidence.FULL_EPOCHS])
        & runs["spec.search"].eq("")
    )
    done = runs[
        alike & whole & runs["time.resumed_from_step"].isna() & ~evidence.found_compiled(runs)
    ]
    seconds = evidence.numbers(
        done, {"process": "time.notebook_s", "run": "time.wall_s", "start": "time.first_step_s"}
    )
    times = evidence.FULL_EPOCHS / done[evidence.EPOCHS].astype(float)
    spent = times * seconds["process"].fillna(seconds["run"]) - (times - 1) * seconds[
        "start"
    ].fillna(0.0)  # one start
    done = done.assign(times=times, minutes=spent / 60, training="").dropna(subset="minutes")
    return evidence.largest_micro_batch(done[done["spec.n_train"] == done["spec.n_train"].max()])


def _rivals(minutes: pd.Series) -> str:
    """What a training takes the Trainer as it comes, the Trainer with its compiler and plain PyTorch at its
    best, of those that have minutes; nothing without a Trainer."""
    tuned = [name for name in tagged("trainer") if VARIANTS[name].settings.compile != "none"]
    ways = {"{:.1f} as it comes": tagged("default"), "{:.1f} with torch.compile": tuned}
    ways["plain PyTorch {:.1f} at its best"] = tagged("plain")
    found = {words: minutes.reindex(names).min() for words, names in ways.items()}
    said = [words.format(least) for words, least in found.items() if pd.notna(least)]
    trainer = minutes.index.isin([*tagged("default"), *tuned]).any()
    return (
        ", and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)
        if trainer
        else ""
    )


def _kept(runs: pd.DataFrame, group: str) -> str:
    judged = evidence.usual_conditions(evidence.judging_runs(runs, group))
    tested = equivalence(judged)
    if RECOMMENDED not in tested.index:
        return f"The F1 of {RECOMMENDED} has not been measured."
    line, own = tested.loc[RECOMMENDED], judged[judged["spec.variant"] == RECOMMENDED].iloc[0]
    known = {"within": "stays within {:g} point of", "no worse": "does not fall {:g} point below"}
    kept = known.get(line["verdict"], "is not shown to stay within {:g} point of")
    delta, best = gain(line["delta"], line["delta±"]), gain(line["best_delta"], line["best_delta±"])
    return (
        f"F1 {kept.format(MARGIN)} {BASELINE}'s: it changes by {best} at the best threshold for "
        f'"no answer", and by {delta} at threshold 0. That is of a smaller model '
        f"({own['model.params_total'] / 1e6:.0f} M parameters, {line['n']} seeds, {LEVEL} % "
        "intervals)."
    )


def _not_shown(runs: pd.DataFrame, own: pd.DataFrame) -> str:
    said, gpus = "**Not shown:**", sorted(set(runs["env.gpu"].dropna()))
    if (
        not runs.loc[runs["quality.f1"].notna(), "model.params_total"]
        .isin(own["model.params_total"])
        .any()
    ):
        said += " the F1 of BERT-base itself; and"
    said += f" anything on any card but the {' and '.join(gpus)}"
    return said + ("." if "Tesla T4" in gpus else ": no T4 has run anything.")


def techniques(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What each of TECHNIQUES gains over what a practitioner would have, with its code."""
    speed = timed(evidence.select(runs, group)).set_index("variant")["samples_per_s"].dropna()
    table = [
        {
            "gain": factor(speed[one.adds] / speed[one.over]),
            "what it is": f"**[{one.adds}]({one.code.split(':')[0].replace('.', '/')}.py)**: {VARIANTS[one.adds].why}",
            "over": f"{one.over}: {one.than}",
        }
        for one in TECHNIQUES.itertuples()
        if {one.adds, one.over} <= set(speed.index)
    ]
    return markdown(pd.DataFrame(table))


def headline_table(
    runs: pd.DataFrame, judged: pd.DataFrame, names: Iterable[str] = ()
) -> pd.DataFrame:
    """The variants of a group at its largest micro-batch as text: what each is, n, speed, memory and the score at the
    best threshold against the baseline's by the runs `judged`. Of the variants these `names`, or those with the tag
    `headline`; all where none of them ran. The memory is what PyTorch reserved: what it counts as allocated leaves out
    that of torch.compile's own CUDA graphs."""
    names = [*names] or tagged("headline")
    lines = evidence.largest_micro_batch(summary(runs)).set_index("variant", drop=False)
    if lines["variant"].isin(names).any():
        lines = lines[lines["variant"].isin(names)]
    words = lines["variant"].map({name: variant.why for name, variant in VARIANTS.items()})
    lines = lines.drop(columns="ratio±").assign(gib=lines["reserved_mib"] / 1024, why=words)
    columns = [
        Column("variant"),
        Column("why", "what it is"),
        Column("n"),
        Column("samples_per_s", "samples/s"),
        Column("ratio", f"× {evidence.baseline(lines)}"),
        Column("gib", "GiB reserved"),
    ]
    with contextlib.suppress(
        evidence.NotMeasured
    ):  # the columns are left out, and the table of quality says why
        tested = equivalence(evidence.usual_conditions(judged)).dropna(subset="delta±")
        lines = lines.join(tested[["best_delta", "best_delta±"]])
        columns.append(Column("best_delta", "ΔF1", gain))
    return render(lines, columns)


def source(runs: pd.DataFrame) -> str:
    """Where the speed and memory of `headline_table` come from, in a sentence."""
    shown = evidence.largest_micro_batch(runs)
    first, others = shown.iloc[0], evidence.timed_on_other_days(shown)
    count = "one" if first["world"] == 1 else first["world"]
    where = "a CPU" if evidence.on_cpu(runs) else f"{count} {first['env.gpu']}"
    said = (
        f"Speed and memory: group {first['group']}, code {evidence.commits(shown)}, on {where}, "
        f"{first['micro_batch']} samples in a forward pass, means of n runs; ± is half a {LEVEL} % "
        "interval."
    )
    others = [name for name in others if name in tagged("headline")]
    days = f" {', '.join(others)} ran in another sitting than {evidence.baseline(runs)}."
    return said + days * bool(others)


def caption(runs: pd.DataFrame, judged: pd.DataFrame) -> str:
    """Where all numbers of `headline_table` come from."""
    with contextlib.suppress(evidence.NotMeasured):  # the table is there without scores
        return f"{source(runs)} {_judged(judged)}"
    return source(runs)


def variants(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """The headline variants as a table, and where its numbers come from."""
    own, judged = (
        evidence.select(runs, group),
        evidence.usual_conditions(evidence.judging_runs(runs, group)),
    )
    said = caption(own, judged)
    with contextlib.suppress(evidence.NotMeasured):  # the table is there without the Trainer
        said += f" {lead(runs, group)}"
    return f"{markdown(headline_table(own, judged))}\n\n{said}"


def lead(runs: pd.DataFrame, group: str) -> str:
    """How the lead of the recommended variant over the best of the Trainer and plain PyTorch changes with the batch, in
    a sentence. Speeds that scatter by more than STEADY, as a busy host makes them, are left out. Raises NotMeasured."""
    lines = summary(evidence.select(runs, group)).rename(columns={"samples_per_s": "speed"})
    lines = evidence.usual_conditions(lines.drop(columns="batch")).drop_duplicates(
        ["variant", "micro_batch"]
    )
    lines = lines[~(lines["samples_per_s±"] > STEADY * lines["speed"])]
    name, rival, leads = scaling.lead(
        lines[lines["variant"].isin([RECOMMENDED, *tagged("trainer"), *tagged("plain")])]
    )
    if len(leads) < 2:
        raise evidence.NotMeasured(f"{rival} has a speed at one micro-batch alone")
    said = ", ".join(f"{factor(times)} at {size}" for size, times in leads.items())
    return f"{name} leads {rival} by {said} samples a pass."


def _judged(judged: pd.DataFrame) -> str:
    """Where the table's differences in quality come from."""
    base = judged[(judged["spec.variant"] == BASELINE) & (judged["status"] == "ok")]
    columns = {"best": "quality.best_f1", "silent": "quality.always_null_f1", "n_eval": "quality.n"}
    means = evidence.numbers(base, columns).mean()
    if means.isna().any():
        raise evidence.NotMeasured(f"{BASELINE} has no F1")
    group = judged["group"].iloc[0]
    model = judged["model.name"].iloc[0]
    share = percent(1 / (means["best"] - means["silent"]))
    return (
        f'ΔF1: against {BASELINE} over equal seeds, at the best threshold for "no answer"; {model} '
        f"on {judged['spec.n_train'].max():,.0f} samples, scored on {means['n_eval']:,.0f} questions "
        f"(group {group}). Never answering scores {points(means['silent'])} there and {BASELINE} "
        f"{points(means['best'])}, so that 1 F1 is {share} of what {BASELINE} has learnt."
    )


def several(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What several GPUs come to, of the group's kind where that has run, with its picture."""
    own = evidence.nearest_runs_at_preset(runs, group, "parallel")
    finding, name = scaling.speed_finding(scaling.scaling(own)), own["group"].iloc[0]
    measured = (
        f"**{finding}.** Group {name}, code {evidence.commits(own)}, a run's GPUs "
        f"({own['env.gpu'].iloc[0]}) all of one host."
    )
    said = f"{measured} {scaling.projected_words(scaling.projection(own))}"
    return scaling.worded("\n\n".join([said, *_picture(figures / name / "scaling.png")]), own)


def language(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What the same techniques give on a language model, on the group's hardware where it has run, with its picture."""
    own = evidence.nearest_runs_at_preset(runs, group, "lm-bench")
    if own.empty:
        raise evidence.NotMeasured("no language model was timed")
    picture = _picture(figures / own["group"].iloc[0] / "ladder.png")
    return "\n\n".join([f"**{speed_finding(timed(own))}.** {source(own)}", *picture])


def _picture(path: Path) -> list[str]:
    """A figure as Markdown with its title in words, if it was drawn."""
    if not path.is_file():
        return []
    with Image.open(path) as image:
        return [
            f"![{image.text.get('Title', path.stem)}]({Path(os.path.relpath(path)).as_posix()})"
        ]


def cards(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """What `recommended` takes on cards that people have."""
    gpu = evidence.select(runs, group)["env.gpu"].iloc[0]
    said = (
        "`recommended` takes the first of [a list](qa_lib/spec/tasks.py), quickest on the "
        f"{gpu} first, for which the card has kernels and memory. Elsewhere the order is a guess."
    )
    return f"{markdown(cards_table())}\n\n{said}"


def cards_table() -> pd.DataFrame:
    """As text, what `recommended` takes for BERT-base on SQuAD v2 (lab/search/recommend.py) on each card that README.md names,
    with everything installed. Imports torch, which predicts the memory."""
    from qa_lib.lab.search.memory_estimate import gpu_of
    from qa_lib.lab.search.recommend import choose

    data, model = {"name": "squad_v2", "sha256": ""}, {"name": "bert-base-uncased", "revision": ""}
    lines = []
    named = facts.cards().dropna(subset="card")
    for card, sm, gib in named[["card", "sm", "gib"]].itertuples(index=False):
        machine = dataclasses.replace(gpu_of(sm), hardware=card, free_mib=round(1024 * gib))
        asked = resolve("recommended", "full", 0, machine, data, model, data["name"], model["name"])
        found = choose(asked, machine, os.devnull)  # where no card has failed
        lines.append((card, number(gib), found.variant, str(found.settings.micro_batch)))
    return pd.DataFrame(lines, columns=["card", "GiB free", "variant", "micro-batch"])


def groups(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Each committed group: what ran, on which hardware, how many runs, and how long one took."""
    table = []
    for name, part in runs.groupby("group"):
        seconds = part["time.notebook_s"].astype(float).dropna()
        first, names = part.iloc[0], sorted(set(part["model.name"]))
        hardware = "a CPU"
        if not evidence.on_cpu(part):
            hardware = f"{first['env.gpu']} ({first['env.gpu_mem_mib'] / 1024:.0f} GiB)"
        took = f"{number(seconds.median())} s ({number(seconds.min())}–{number(seconds.max())})"
        table.append({
            "group": f"`{name}`",
            "model": ", ".join(names) if len(names) < 3 else f"{len(names)} models",
            "hardware": hardware,
            "runs": str(len(part)),
            "one run": took if len(seconds) else MISSING,
        })  # fmt: skip
    said = (
        "*One run*: the median of its seconds from a fresh process to the record (lowest–highest), "
        "with imports, data and compilation; several runs of quality shared a GPU. – where runs "
        "had no process of their own, or were timed in another way."
    )
    return f"{markdown(pd.DataFrame(table))}\n\n{said}"


BLOCKS = {
    block.__name__: block
    for block in (headline, techniques, variants, several, language, cards, groups)
}
