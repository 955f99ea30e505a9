"""The whole stack beside its rivals, from runs in turns: README.md's first lines and a table.

A block is runs of several variants with one seed, one after the other on one host and of one code
(docs/evidence.toml). Ratios are taken within blocks and then averaged, so that neither another host
nor other code is in them. Blocks of several codes may stand together.
"""

from collections.abc import Sequence

import pandas as pd

from qa_lib.lab.report import evidence, spoken
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import MISSING, factor, gain, number, percent
from qa_lib.lab.report.stats import BEST_F1, LEVEL, by_seed, compare, interval
from qa_lib.lab.report.tables import markdown
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import BASELINES

# The quickest of the library, and the quickest in 16 bits.
STACK, STACK_16_BITS = TASKS["qa"].on_gpu[:2]
PLAIN = "E-searched"
TUNED_TRAINER = "A0-tuned"
TRAINER_AS_IT_COMES = "A0-defaults"
# Quicker and leaner than the stack, and scored on one small model alone.
WITHOUT_MASTERS = "E-fp8-rounded"
# The rows of the table, from the slowest to the quickest.
SHOWN = (
    TRAINER_AS_IT_COMES,
    BASELINES["qa"],
    TUNED_TRAINER,
    PLAIN,
    STACK_16_BITS,
    STACK,
    WITHOUT_MASTERS,
)
# The presets by whose runs F1 is compared -> their questions.
QUESTIONS = {"quality": "SQuAD v2", "answerable": "answerable questions"}
SHORT = {STACK_16_BITS: "16 bits", PLAIN: "plain PyTorch"}
SPEED = "speed.samples_per_s"
KERNEL_MS = "time.kernel_ms"
# Columns of runs whose values are those of a block.
BLOCK = ("group", "model", "data", "length", "micro_batch", "block")
ENOUGH_BLOCKS = 3  # for an interval
ENOUGH_SEEDS = 3  # for the F1 of a model to go before that of a smaller one


def beside_rivals(runs: pd.DataFrame) -> str:
    """Return as Markdown how far the stack leads each rival: a sentence, a table, and one of F1.

    `runs` are those of all groups. Raises NotMeasured where no block has the stack beside plain
    PyTorch.
    """
    blocks = blocks_with_rivals(runs)
    at_size = largest_part(blocks)
    first = at_size.iloc[0]
    size = first["micro_batch"]
    source = (
        f"Runs in turns on one {spoken.card(first['env.gpu'])}: {size} samples of "
        f"{spoken.training_set(first['data'])} in a forward pass, "
        f"{spoken.model(first['model.name'])} with random weights, group {first['group']}, code "
        f"{evidence.commits(at_size)}. A block is runs one after the other, each variant once. "
        f"Leads are means over blocks that have both, with {LEVEL} % intervals from three "
        "blocks on. By kernels: the time for which a step's kernels run, without what the GPU "
        "waits for the host."
    )
    paragraphs = [
        f"{finding(at_size)}{_other_sizes(blocks, size)}",
        markdown(_in_words(lead_table(at_size))),
        source,
        f1_table(runs),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def blocks_with_rivals(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the blocks of runs that have the stack beside the most of its rivals.

    They are of one group, model and data, at every micro-batch that was run so, and have a column
    `block`, which tells them apart. Raises NotMeasured where no block has the stack and plain
    PyTorch.
    """
    beside_stack = blocks_with([STACK], timed_in_blocks(runs, SHOWN, "bench"))
    parts = [
        part
        for _, part in beside_stack.groupby(["group", "model", "data", "length"])
        if PLAIN in set(part["spec.variant"])
    ]
    if not parts:
        raise NotMeasured(f"{STACK} and {PLAIN} have not both been timed in one block")
    return max(parts, key=_rank)


def timed_in_blocks(runs: pd.DataFrame, variants: Sequence[str], preset: str) -> pd.DataFrame:
    """Return the timed runs of some variants at a preset, with a column `block`.

    Runs of one block have one code and seed; BLOCK has all columns that tell blocks apart.
    """
    is_meant = runs["spec.variant"].isin(variants) & runs["spec.preset.name"].eq(preset)
    timed = runs[is_meant & runs["status"].eq("ok") & runs["spec.search"].eq("")]
    timed = timed.astype({SPEED: float, KERNEL_MS: float}).copy()
    timed["block"] = timed["code"] + " " + timed["spec.seed"].astype(str)
    return timed


def blocks_with(variants: Sequence[str], timed: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of those blocks that have one of these variants."""
    is_one = timed["spec.variant"].isin(variants)
    return timed[is_one.groupby([timed[name] for name in BLOCK]).transform("any")]


def largest_part(blocks: pd.DataFrame) -> pd.DataFrame:
    """Return the blocks of one micro-batch: that of the most variants and runs.

    `blocks` are those of `blocks_with_rivals`.
    """
    return max((part for _, part in blocks.groupby("micro_batch")), key=_rank)


def enough_blocks(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the blocks that a headline and its picture may speak of, all of one micro-batch.

    Raises NotMeasured where fewer than ENOUGH_BLOCKS have the stack beside plain PyTorch.
    """
    blocks = largest_part(blocks_with_rivals(runs))
    table = lead_table(blocks)
    if PLAIN not in table.index or table.loc[PLAIN, "n"] < ENOUGH_BLOCKS:
        raise NotMeasured(f"{STACK} and {PLAIN} have not been timed in {ENOUGH_BLOCKS} blocks")
    return blocks


def _rank(runs: pd.DataFrame) -> tuple:
    """Return by what runs go before others: most variants, then most runs, then the newest."""
    return runs["spec.variant"].nunique(), len(runs), runs["time.started"].max()


def lead_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each of SHOWN that was timed at one micro-batch, indexed by variant.

    `runs` are those of `blocks_with_rivals`. Columns:

    - n: its runs
    - samples_per_s and samples_per_s±
    - step_ms and kernel_ms, of an optimizer step
    - lead and lead±: the stack's speed over its own
    - kernel_lead: its kernel time over the stack's

    All but n are means over blocks, each of which has the stack.
    """
    of_block = runs.groupby(["block", "spec.variant"])
    speeds = of_block[SPEED].mean().unstack()
    kernels = of_block[KERNEL_MS].mean().unstack()
    first = runs.iloc[0]
    samples_a_step = first["batch"] or first["micro_batch"]
    lines = {}
    for name in SHOWN:
        if name not in speeds:
            continue
        leads = (speeds[STACK] / speeds[name]).dropna()
        lines[name] = {
            "n": speeds[name].count(),
            "samples_per_s": speeds[name].mean(),
            "samples_per_s±": interval(speeds[name].dropna()),
            "step_ms": 1e3 * samples_a_step / speeds[name].mean(),
            "kernel_ms": kernels[name].mean(),
            "lead": leads.mean(),
            "lead±": interval(leads),
            "kernel_lead": (kernels[name] / kernels[STACK]).mean(),
        }
    return pd.DataFrame.from_dict(lines, orient="index")


def finding(blocks: pd.DataFrame) -> str:
    """Return the lead over plain PyTorch and the tuned Trainer in a sentence, as Markdown.

    `blocks` are those of `largest_part`.
    """
    table = lead_table(blocks)
    first = blocks.iloc[0]
    text = (
        f"On one {spoken.card(first['env.gpu'])} {spoken.variant(STACK)} trains "
        f"{spoken.model(first['model.name'])} **{number(table.loc[PLAIN, 'lead'])} times as fast "
        f"as {spoken.VARIANTS[PLAIN]}** ({PLAIN})"
    )
    if TUNED_TRAINER in table.index:
        text += f" and {_over_trainer(table)}"
    return f"{text}."


def finding_beside(blocks: pd.DataFrame, of_trainer: pd.DataFrame) -> str:
    """Return `finding` of blocks, with the lead over the tuned Trainer where others have it.

    Both are those of `largest_part`. `of_trainer` may be of another model.
    """
    table = lead_table(of_trainer)
    if TUNED_TRAINER in lead_table(blocks).index or TUNED_TRAINER not in table.index:
        return finding(blocks)
    model = spoken.model(of_trainer["model.name"].iloc[0])
    return f"{finding(blocks)} {model} it trains {_over_trainer(table)}."


def _over_trainer(table: pd.DataFrame) -> str:
    """Return the lead over the tuned Trainer in words, and how busy that keeps its GPU."""
    trainer = table.loc[TUNED_TRAINER]
    return (
        f"{number(trainer['lead'])} times as fast as {spoken.variant(TUNED_TRAINER)}, "
        f"whose GPU works for {percent(trainer['kernel_ms'] / trainer['step_ms'])} of a step"
    )


def _in_words(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table as people read it; the stack's own row has no lead."""
    rows = []
    for name, line in table.iterrows():
        lead = factor(line["lead"], line["lead±"])
        by_kernels = factor(line["kernel_lead"])
        rows.append({
            "training": spoken.variant(name),
            "runs": str(int(line["n"])),
            "samples/s": number(line["samples_per_s"]),
            "ms a step": number(line["step_ms"]),
            "ms of its kernels": number(line["kernel_ms"]),
            "the 8-bit stack over this row": MISSING if name == STACK else lead,
            "the same by kernels": MISSING if name == STACK else by_kernels,
        })  # fmt: skip
    return pd.DataFrame(rows)


def _other_sizes(blocks: pd.DataFrame, shown: int) -> str:
    """Return the leads over plain PyTorch at the micro-batches that the table does not show."""
    said = []
    for size, part in blocks.groupby("micro_batch"):
        table = lead_table(part)
        if size == shown or PLAIN not in table.index:
            continue
        line = table.loc[PLAIN]
        blocks_of_both = int(line["n"])
        said.append(
            f"{factor(line['lead'], line['lead±'])} at {size} samples in a forward pass "
            f"({blocks_of_both} block{'s' if blocks_of_both > 1 else ''})"
        )
    if not said:
        return ""
    return f" Over {spoken.variant(PLAIN)} it is {' and '.join(said)}."


def f1_table(runs: pd.DataFrame) -> str:
    """Return as Markdown the F1 of the stack less those of 16 bits and of plain PyTorch.

    A row has the differences of one variant, with intervals over equal seeds, on all and on
    answerable questions; sentences below say of which runs, and how far the stack is off at
    threshold 0. It is "" if none was scored.
    """
    rows: dict[str, dict[str, str]] = {}
    at_zero = []
    sources = []
    for preset, questions in QUESTIONS.items():
        scored = scored_part(runs, preset)
        if scored.empty:
            continue
        scores = by_seed(scored, BEST_F1)
        seeds = set()
        for name in (STACK, WITHOUT_MASTERS, STACK_16_BITS):
            for other in (STACK_16_BITS, PLAIN):
                shared = len(scores.reindex(columns=[name, other]).dropna())
                if name == other or not shared:
                    continue
                heading = f"ΔF1 to {SHORT[other]}, {questions}"
                difference = gain(*compare(scored, name, other, BEST_F1))
                rows.setdefault(name, {"training": spoken.variant(name)})[heading] = difference
                seeds.add(shared)
            if name == STACK:
                at_zero += _at_zero(scored, questions)
        counts = " to ".join(str(count) for count in sorted({min(seeds), max(seeds)}))
        sources.append(
            f"{spoken.model(scored['model.name'].iloc[0])} on {questions}, {counts} equal seeds "
            f"(group {scored['group'].iloc[0]})"
        )
    if not rows:
        return ""
    table = pd.DataFrame(rows.values()).fillna(MISSING)
    text = f"{markdown(table)}\n\nF1 at the best threshold: {'; '.join(sources)}."
    if at_zero:
        text += f" At threshold 0 {spoken.variant(STACK)} differs by {', '.join(at_zero)}."
    return text


def _at_zero(scored: pd.DataFrame, questions: str) -> list[str]:
    """Return in words the stack's differences of F1 at threshold 0, with intervals."""
    known = set(by_seed(scored))
    return [
        f"{gain(*compare(scored, STACK, other))} from {SHORT[other]} on {questions}"
        for other in (STACK_16_BITS, PLAIN)
        if {STACK, other} <= known
    ]


def scored_part(runs: pd.DataFrame, preset: str = "quality") -> pd.DataFrame:
    """Return the runs by which F1 of the stack is compared; none where it was never scored.

    They are those at a preset of QUESTIONS of one group, model, data and training. They have the
    stack and 16 bits at ENOUGH_SEEDS equal seeds, if any have; then they are of the largest model,
    and have the most seeds.
    """
    scored = runs[(runs["spec.preset.name"] == preset) & (runs["spec.search"] == "")]
    parts = {}
    for _, part in scored.groupby(["group", "model", "data", "training"], dropna=False):
        scores = by_seed(part, BEST_F1)
        if {STACK, STACK_16_BITS} <= set(scores):
            seeds = len(scores[[STACK, STACK_16_BITS]].dropna())
            size = float(part["model.params_total"].iloc[0])
            parts[seeds >= ENOUGH_SEEDS, size, seeds] = part
    return parts[max(parts)] if parts else runs[:0]
