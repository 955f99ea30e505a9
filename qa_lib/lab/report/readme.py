"""The results in README.md and in pages of docs/.

What stands there between two markers is a block, made of the records of the committed groups.
BLOCKS names all of them; each is a part of one page. Where a record is missing, the block says so.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from qa_lib.lab.report import evidence, facts, in_turns, language_in_turns, scaling, spoken
from qa_lib.lab.report.counters import kernel_use
from qa_lib.lab.report.figures import picture_link, timed
from qa_lib.lab.report.format import MISSING, factor, number, percent
from qa_lib.lab.report.headline import first_screen, folded, judged
from qa_lib.lab.report.one_network import one_network
from qa_lib.lab.report.own_loop_table import own_lead, own_loop
from qa_lib.lab.report.stats import LEVEL, interval
from qa_lib.lab.report.tables import compact, markdown
from qa_lib.lab.report.techniques import TECHNIQUES, source_of
from qa_lib.lab.report.variants_table import caption, headline_table, lead
from qa_lib.spec.machine import gpu_of
from qa_lib.spec.resolve import resolve
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import VARIANTS

NOTHING = (
    "No reference runs are committed yet; `make quickstart` makes a set of your own below `runs/`."
)

# The night of docs/overnight.md: its variants, what each is, and how often it is trained.
NIGHT = {
    "A1": "the baseline",
    "A4": "grouped by length",
    "E-recompute-8bit": "the leanest",
    TASKS["qa"].on_gpu[0]: "which `recommended` takes where the card has FP8",
}
NIGHT_SEEDS = 12
IN_TURNS = pd.Timedelta(hours=1)
NIGHT_START_MINUTES = 1


def with_results(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> dict[Path, tuple[str, str]]:
    """Return README.md and each page of docs/ that has a block: its text, and that with the blocks
    made anew.

    `runs` are all records below the folder `runs_dir`, and `figures` is the folder of their
    pictures. The pages are those of the current folder.

    Raises ReportError where README.md or a block is missing.
    """
    committed = evidence.committed_groups(runs_dir) if runs_dir.is_dir() else []
    runs = runs[runs["group"].isin(committed)]
    group = _shown_group(runs)
    before = _pages_with_blocks()
    after = dict(before)
    for name, block in BLOCKS.items():
        page, old = _find_block(name, after)
        content = NOTHING if group is None else _content(block, runs, group, figures)
        if page.parent.name:
            # Links are from the page, which lies in a folder.
            content = re.sub(r"\]\((figures|runs)/", r"](../\1/", content)
        new = f"<!-- {name} -->\n{content}\n<!-- /{name} -->"
        after[page] = after[page].replace(old, new)
    return {page: (before[page], after[page]) for page in before}


def _shown_group(runs: pd.DataFrame) -> str | None:
    """Return the group that the blocks are about: the reference, or else the first by name."""
    groups = sorted(set(runs["group"]) - evidence.search_groups(runs))
    if evidence.REFERENCE in groups:
        return evidence.REFERENCE
    return groups[0] if groups else None


def _pages_with_blocks() -> dict[Path, str]:
    """Return the text of README.md, and of each page of docs/ that has a block.

    Raises ReportError for a page that cannot be read.
    """
    readme = Path("README.md")
    texts = {}
    for page in [readme, *sorted(Path("docs").glob("*.md"))]:
        try:
            text = page.read_text(encoding="utf-8")
        except OSError as problem:
            raise evidence.ReportError(
                f"cannot read {problem.filename} in this folder: {problem.strerror}"
            ) from problem
        if page == readme or "<!-- /" in text:
            texts[page] = text
    return texts


def _find_block(name: str, pages: dict[Path, str]) -> tuple[Path, str]:
    """Return the page that a block stands in, and the block with its markers.

    Raises ReportError where no page has it.
    """
    begin = f"<!-- {name} -->"
    end = f"<!-- /{name} -->"
    for page, text in pages.items():
        block = re.search(f"{begin}.*?{end}", text, re.DOTALL)
        if block:
            return page, block[0]
    raise evidence.ReportError(
        f"no page has a block between {begin} and {end}: {', '.join(map(str, pages))}"
    )


def _content(block: Callable[..., str], runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return what stands between the markers of a block, or why it is not known."""
    try:
        return block(runs, group, figures)
    except evidence.NotMeasured as reason:
        return f"Not measured yet: {reason}."


# The blocks. Each takes the runs of all committed groups, the group that is shown and the folder of
# the figures, and returns Markdown. The first has a module of its own.


def beside(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return how far the quickest stack leads its rivals in runs in turns, on whichever card."""
    return in_turns.beside_rivals(runs)


def techniques(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return what techniques gain over what a practitioner would have, with links to their code.

    Imports torch, as the code does.
    """
    chosen = evidence.select(runs, group)
    lines = timed(chosen).set_index("variant")
    at_size = evidence.usual_conditions(chosen)
    at_size = at_size[at_size["micro_batch"].isin(lines["micro_batch"])]
    table = []
    for technique in TECHNIQUES:
        gain = technique.gain
        if gain is None:
            continue
        ratios = _ratios_in_turns(at_size, gain.adds, gain.over)
        if ratios.empty:
            continue
        path = source_of(technique.code()[0]).path
        ratio = ratios.mean()
        half = interval(ratios)
        kernel_ms = lines["kernel_ms"]
        busy = lines["busy"].map(percent, na_action="ignore")
        table.append({
            "what it is": f"[{VARIANTS[gain.adds].why.removesuffix('.')}]({path}) ({gain.adds})",
            "over": f"{gain.than} ({gain.over})",
            "gain": factor(ratio),
            "interval": f"{number(ratio - half)}–{number(ratio + half)}",
            "by kernels": factor(kernel_ms[gain.over] / kernel_ms[gain.adds]),
            "GPU busy before": busy[gain.over],
            "after": busy[gain.adds],
        })  # fmt: skip
    card = spoken.card(chosen["env.gpu"].iloc[0])
    explanation = (
        f"Timed on one {card}, with {lines['micro_batch'].iloc[0]} samples in a forward pass. Each "
        "row is a pair of its own: do not multiply the gains. Intervals are of "
        f"{LEVEL} %, over equal seeds that ran on one host within an hour. Where the GPU was not "
        "busy before, it waited for the host, "
        "and a part of the gain is the host's: a quicker one leaves less."
    )
    return f"{markdown(compact(pd.DataFrame(table)))}\n\n{explanation}"


def _ratios_in_turns(runs: pd.DataFrame, variant: str, over: str) -> pd.Series:
    """Return a variant's speed over another's for each seed that ran both within IN_TURNS.

    Runs that are farther apart may be of two hosts, of which one launches kernels faster.
    """
    newest = runs.sort_values("time.started").drop_duplicates(
        ["spec.variant", "spec.seed"], keep="last"
    )
    first, second = (
        newest[newest["spec.variant"] == name].set_index("spec.seed") for name in (variant, over)
    )
    begun = pd.to_datetime(first["time.started"]), pd.to_datetime(second["time.started"])
    speed = "speed.samples_per_s"
    ratios = first[speed].astype(float) / second[speed].astype(float)
    return ratios[(begun[0] - begun[1]).abs() <= IN_TURNS].dropna()


def variants(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return the headline variants as a table, and, folded, where its numbers come from.

    The ladder of all rungs is folded below, if it was drawn.
    """
    chosen = evidence.select(runs, group)
    scored = judged(runs, group)
    table = headline_table(chosen, scored)
    table.insert(0, "training", table.pop("variant").map(_spoken_first))
    sentences = [caption(chosen, scored)]
    # The table is shown without the Trainer, too.
    with contextlib.suppress(evidence.NotMeasured):
        sentences.append(lead(runs, group))
    if evidence.on_cpu(chosen):
        where = "a CPU"
    else:
        where = f"one {spoken.card(chosen['env.gpu'].iloc[0])}"
    size = timed(chosen)["micro_batch"].iloc[0]
    parts = [
        f"On {where}, at {size} samples in a forward pass; other runs than those above:",
        markdown(table),
        folded("Where these numbers come from", " ".join(sentences)),
    ]
    ladder = picture_link(figures / group / "ladder.png")
    if ladder:
        parts.append(folded("The ladder, as a picture", ladder))
    return "\n\n".join(parts)


def _spoken_first(variant: str) -> str:
    """Return a variant as the first cell of its row."""
    words = spoken.VARIANTS.get(variant)
    return f"**{words}** ({variant})" if words else f"**{variant}**"


def several(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return what several GPUs come to, of the group's kind where that has run: a picture, a table.

    Raises NotMeasured where no variant was run on one GPU and on several.
    """
    chosen = evidence.nearest_runs_at_preset(runs, group, "parallel")
    lines = scaling.scaling(chosen)
    finding = scaling.speed_finding(lines)
    name = chosen["group"].iloc[0]
    text = (
        f"**{finding}.** Group {name}, code {evidence.commits(chosen)}, a run's GPUs "
        f"({chosen['env.gpu'].iloc[0]}) all of one host."
    )
    lost = scaling.lost_sentence(lines)
    if lost:
        text += f" {lost}"
    text += f" {scaling.projected_words(scaling.projection(chosen))}"
    shown = _above(text, figures / name / "scaling.png")
    if scaling.common(lines, "weak"):
        size = scaling.common(lines, "weak")[0]
        table = markdown(scaling.speed_table(lines))
        shown += f"\n\nSamples/s of all GPUs together, at {size} samples a GPU:\n\n{table}"
    return scaling.worded(shown, chosen)


def language(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return how far the stack leads plain PyTorch on a language model, with the ladder's picture.

    Raises NotMeasured where no block of runs has both.
    """
    blocks = language_in_turns.blocks_with_plain(runs)
    text = language_in_turns.beside_plain_pytorch(runs)
    return _above(text, figures / blocks["group"].iloc[0] / "ladder.png")


def step(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return the picture of where a step's milliseconds go."""
    return picture_link(figures / group / "step.png") or NOTHING


def counters(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return how well the kernels of three variants use the card, on whichever that was counted."""
    return kernel_use(runs)


def _above(text: str, picture: Path) -> str:
    """Return a paragraph with a picture below it, if that was drawn."""
    link = picture_link(picture)
    return f"{text}\n\n{link}" if link else text


def cards(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return what `recommended` takes on cards that people have, and on which that was measured."""
    gpu = spoken.card(evidence.select(runs, group)["env.gpu"].iloc[0])
    measured = {spoken.card(name) for name in runs["env.gpu"].dropna().unique()}
    table = cards_table()
    table["variant"] = table["variant"].map(spoken.variant)
    table = table.rename(
        columns={"variant": "training", "micro-batch": "samples in a forward pass"}
    )
    table["measured or predicted"] = [
        "measured" if card in measured else "predicted" for card in table["card"]
    ]
    explanation = (
        "`recommended` takes the first of [a list](qa_lib/spec/tasks.py) for which the card has "
        f"kernels and memory. The list begins with what is quickest on the {gpu}; on other cards "
        "that order is a guess."
    )
    return f"{markdown(table)}\n\n{explanation}"


def cards_table() -> pd.DataFrame:
    """Return as text what `recommended` takes for BERT-base on SQuAD v2 on each card of README.md.

    It is what lab/search/recommend.py chooses with everything installed. Imports torch, which
    predicts the memory.
    """
    from qa_lib.lab.search.recommend import choose

    named = facts.cards().dropna(subset="card")
    lines = []
    for card, sm, gib in named[["card", "sm", "gib"]].itertuples(index=False):
        machine = dataclasses.replace(gpu_of(sm), hardware=card, free_mib=round(1024 * gib))
        asked = resolve(
            "recommended",
            "full",
            0,
            machine,
            data={"name": "squad_v2", "sha256": ""},
            model={"name": "bert-base-uncased", "revision": ""},
            data_source="squad_v2",
            model_source="bert-base-uncased",
        )
        chosen = choose(asked, machine, os.devnull)  # a runs folder in which no card has failed
        lines.append({
            "card": card,
            "GiB free": number(gib),
            "variant": chosen.variant,
            "micro-batch": str(chosen.settings.micro_batch),
        })  # fmt: skip
    return pd.DataFrame(lines)


def night(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return how long the variants of a night of sweeps take, as a table, by speeds of the group.

    Raises NotMeasured where the baseline, which is one of them, was not timed.
    """
    chosen = evidence.select(runs, group)
    lines = timed(chosen).set_index("variant")
    samples = evidence.FULL_EPOCHS * evidence.FULL_SAMPLES
    speeds = lines["samples_per_s"].dropna()
    measured = [variant for variant in NIGHT if variant in speeds.index]
    hours = {variant: samples / speeds[variant] / 3600 for variant in measured}
    table = pd.DataFrame([
        {
            "variant": f"{variant}, {NIGHT[variant]}",
            "samples/s": number(speeds[variant]),
            "minutes a training": number(60 * hours[variant]),
            f"hours for {NIGHT_SEEDS}": number(NIGHT_SEEDS * hours[variant]),
        }
        for variant in measured
    ])  # fmt: skip
    total = NIGHT_SEEDS * (sum(hours.values()) + len(measured) * NIGHT_START_MINUTES / 60)
    size = int(lines["micro_batch"].iloc[0])
    explanation = (
        f"{NIGHT_SEEDS} trainings of each would take {number(total)} hours on one "
        f"{spoken.card(chosen['env.gpu'].iloc[0])}, with {NIGHT_START_MINUTES} minute a run, a "
        "guess, for start, compilation and scoring. This is projected; nobody has run it. A "
        f"training has {samples:,} samples: {evidence.FULL_SAMPLES:,} in each of "
        f"{evidence.FULL_EPOCHS} epochs. Speeds are from the records ({group}, {size} samples in "
        "a forward pass)."
    )
    return f"{explanation}\n\n{markdown(table)}"


def groups(runs: pd.DataFrame, group: str, figures: Path) -> str:
    """Return the committed groups as a table: evidence for what, what ran, where, for how long."""
    table = [_group_line(name, part) for name, part in runs.groupby("group")]
    explanation = (
        "*One run*: the median of its seconds from a fresh process to the record (lowest–highest), "
        "with imports, data and compilation; several runs of quality shared a GPU. – where runs "
        "had no process of their own, or were timed in another way."
    )
    return f"{markdown(pd.DataFrame(table))}\n\n{explanation}"


def _group_line(name: str, runs: pd.DataFrame) -> dict[str, str]:
    """Return the line of a group in the table of groups."""
    first = runs.iloc[0]
    models = sorted(set(runs["model.name"]))
    if evidence.on_cpu(runs):
        hardware = "a CPU"
    else:
        hardware = f"{first['env.gpu']} ({first['env.gpu_mem_mib'] / 1024:.0f} GiB)"
    seconds = runs["time.notebook_s"].astype(float).dropna()
    one_run = MISSING
    if len(seconds):
        median, least, most = map(number, (seconds.median(), seconds.min(), seconds.max()))
        one_run = f"{median} s ({least}–{most})"
    return {
        "group": f"`{name}`",
        "evidence for": evidence.purpose(runs),
        "model": ", ".join(models) if len(models) < 3 else f"{len(models)} models",
        "hardware": hardware,
        "runs": str(len(runs)),
        "one run": one_run,
    }


# The name in a block's markers -> the function that makes what stands between them.
BLOCKS: dict[str, Callable[[pd.DataFrame, str, Path], str]] = {
    "headline": first_screen,
    "beside": beside,
    "network": one_network,
    "techniques": techniques,
    "variants": variants,
    "several": several,
    "language": language,
    "step": step,
    "counters": counters,
    "cards": cards,
    "night": night,
    "own-lead": own_lead,
    "own": own_loop,
    "groups": groups,
}
