"""The whole stack on a language model beside plain PyTorch, from runs in turns.

docs/language-model.md shows it. A block is runs of several variants with one seed, one after the
other on one host and of one code (docs/evidence.toml). Ratios are taken within blocks and then
averaged, so that neither another host nor other code is in them.
"""

from typing import NamedTuple

import pandas as pd

from qa_lib.lab.report import evidence, in_turns, spoken
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import MISSING, factor, number, points, three_decimals
from qa_lib.lab.report.in_turns import KERNEL_MS, SPEED
from qa_lib.lab.report.stats import LEVEL, by_seed, compare, interval
from qa_lib.lab.report.tables import markdown

PRESET = "lm-bench"
PLAIN = "L-searched"
STACK = "L-fp8-all"
# The rows of each part of the table, from the slowest to the quickest, without dropout apart.
SHOWN = (PLAIN, "L-moments", "L-fp8-head", "L-fp8-gradients", STACK)
SHOWN_WITHOUT_DROPOUT = (f"{PLAIN}-nodropout", f"{STACK}-nodropout")
PEAK_MIB = "memory.peak_reserved_mib"
BITS = "quality.bits_per_byte"
IN_16_BITS = "L-moments"  # whose bits a byte those in 8 bits are compared with
ENOUGH_SEEDS = 3
LEFT = frozenset({"windows in a forward pass", "training"})  # headings of words in the table


class Part(NamedTuple):
    """Runs that are compared: of one micro-batch, with dropout or without it."""

    windows: int
    """In a forward pass."""
    drops: bool

    @property
    def rows(self) -> tuple[str, ...]:
        """The variants that are shown; the first is plain PyTorch, and the last the stack."""
        return SHOWN if self.drops else SHOWN_WITHOUT_DROPOUT

    @property
    def words(self) -> str:
        """What a sentence says of it, beside the part with as many windows and dropout."""
        return f"at {self.windows} windows" if self.drops else "without dropout"

    def __str__(self) -> str:
        return f"{self.windows}" if self.drops else f"{self.windows}, no dropout"


# What the stack is to reach: its speed over that of plain PyTorch; and with 32 windows tokens a
# second and GiB of memory.
FIRST = Part(32, drops=True)
LEADS = {FIRST: 1.4, Part(8, drops=True): 1.35, Part(32, drops=False): 1.3}
TOKENS_PER_S = 680_000
MOST_GIB = 10.0


def beside_plain_pytorch(runs: pd.DataFrame) -> str:
    """Return as Markdown how far the stack leads plain PyTorch: a sentence, a table, the goals.

    `runs` are those of all groups. Raises NotMeasured where no block has the stack beside it.
    """
    blocks = blocks_with_plain(runs)
    parts = {part: lead_table(blocks, part) for part in LEADS}
    parts = {part: table for part, table in parts.items() if len(table)}
    if FIRST not in parts:
        raise NotMeasured(f"{STACK} and {PLAIN} have not been timed in one block")
    first = blocks.iloc[0]
    source = (
        f"Runs in turns on one {spoken.card(first['env.gpu'])}: windows of "
        f"{first['spec.preset.max_length']:,} tokens of text, {first['model.name']} with random "
        f"weights, group {first['group']}, code {evidence.commits(blocks)}. A block is runs one "
        "after the other, each variant once. Ratios are means over blocks, with "
        f"{LEVEL} % intervals. By kernels: the time for which a step's kernels run, without what "
        f"the GPU waits for the host. GiB are the peak that PyTorch reserves. {PLAIN} was searched "
        "at 32 windows with dropout."
    )
    paragraphs = [
        f"{finding(parts[FIRST], first['env.gpu'])} {goals(parts)}",
        markdown(_in_words(parts), LEFT),
        source,
        bits_table(runs),
    ]
    return "\n\n".join(filter(None, paragraphs))


def blocks_with_plain(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the timed runs of the group with the most blocks that have plain PyTorch.

    They have a column `block`, which tells blocks apart. Raises NotMeasured where no group has one.
    """
    timed = in_turns.timed_in_blocks(runs, [*SHOWN, *SHOWN_WITHOUT_DROPOUT], PRESET)
    beside = in_turns.blocks_with([SHOWN[0], SHOWN_WITHOUT_DROPOUT[0]], timed)
    if beside.empty:
        raise NotMeasured(f"{PLAIN} has not been timed")
    groups = [part for _, part in beside.groupby(["group", "model", "data"])]
    return max(groups, key=lambda part: (part["block"].nunique(), part["time.started"].max()))


def lead_table(blocks: pd.DataFrame, part: Part) -> pd.DataFrame:
    """Return a line for each variant of a part that was timed in it, indexed by variant.

    Columns: n, its runs; tokens_per_s; step_ms and kernel_ms of an optimizer step; gib, the peak of
    memory; lead and lead±, its speed over that of plain PyTorch; kernel_lead, the same by kernels.
    All but n are means over blocks.
    """
    in_part = blocks[blocks["micro_batch"] == part.windows].astype({PEAK_MIB: float})
    of_block = in_part.groupby(["block", "spec.variant"])
    speeds = of_block[SPEED].mean().unstack()
    kernels = of_block[KERNEL_MS].mean().unstack()
    peaks = of_block[PEAK_MIB].mean().unstack()
    plain = part.rows[0]
    lines = {}
    for name in part.rows:
        if name not in speeds or plain not in speeds:
            continue
        preset = in_part.iloc[0]
        leads = (speeds[name] / speeds[plain]).dropna()
        lines[name] = {
            "n": speeds[name].count(),
            "tokens_per_s": speeds[name].mean() * preset["spec.preset.max_length"],
            "step_ms": 1e3 * preset["spec.preset.effective_batch"] / speeds[name].mean(),
            "kernel_ms": kernels[name].mean(),
            "gib": peaks[name].mean() / 1024,
            "lead": leads.mean(),
            "lead±": interval(leads),
            "kernel_lead": (kernels[plain] / kernels[name]).mean(),
        }
    return pd.DataFrame.from_dict(lines, orient="index")


def finding(table: pd.DataFrame, gpu: str) -> str:
    """Return the stack's speed and lead in a sentence, by the table of FIRST."""
    line = table.loc[STACK]
    return (
        f"**On one {spoken.card(gpu)} {spoken.variant(STACK)} trains GPT-2's small shape at "
        f"{line['tokens_per_s']:,.0f} tokens/s, {factor(line['lead'], line['lead±'])} of "
        f"{spoken.variant(PLAIN)}.**"
    )


def goals(parts: dict[Part, pd.DataFrame]) -> str:
    """Return which goals are reached, and what was reached of the others."""
    first = parts[FIRST].loc[STACK]
    said = [
        _judged(f"{number(TOKENS_PER_S)} tokens/s", first["tokens_per_s"] >= TOKENS_PER_S),
        _judged(f"at most {number(MOST_GIB)} GiB", first["gib"] <= MOST_GIB),
    ]
    for part, goal in LEADS.items():
        if part not in parts:
            continue
        lead = parts[part].loc[part.rows[-1], "lead"]
        missed_by = f" by {goal - lead:.3f}"
        said.append(_judged(f"{factor(goal)} {part.words}", lead >= goal, missed_by))
    return f"Goals: {', '.join(said)}."


def _judged(goal: str, is_reached: bool, missed_by: str = "") -> str:
    """Return a goal and whether it is reached."""
    verdict = "reached" if is_reached else f"missed{missed_by}"
    return f"{goal} ({verdict})"


def _in_words(parts: dict[Part, pd.DataFrame]) -> pd.DataFrame:
    """Return the tables of all parts as one, as people read it."""
    rows = []
    for part, table in parts.items():
        for name, line in table.iterrows():
            is_plain = name == part.rows[0]
            rows.append({
                "windows in a forward pass": str(part) if is_plain else "",
                "training": spoken.variant(name),
                "runs": str(int(line["n"])),
                "tokens/s": number(line["tokens_per_s"]),
                "ms for 32 windows": number(line["step_ms"]),
                "ms of its kernels": number(line["kernel_ms"]),
                "peak GiB": number(line["gib"]),
                "over plain PyTorch": MISSING if is_plain else factor(line["lead"], line["lead±"]),
                "the same by kernels": MISSING if is_plain else factor(line["kernel_lead"]),
            })  # fmt: skip
    return pd.DataFrame(rows)


def bits_table(runs: pd.DataFrame) -> str:
    """Return as Markdown the bits a byte of 16 bits and of what it is compared with.

    "" where fewer than ENOUGH_SEEDS equal seeds have both.
    """
    scored = runs[(runs["spec.preset.name"] == "lm-quality") & (runs["spec.search"] == "")]
    scored = scored[scored["status"].eq("ok") & scored["spec.variant"].isin(SHOWN)]
    parts = {}
    for _, part in scored.groupby(["group", "model", "data", "training", "code"], dropna=False):
        scores = by_seed(part, BITS)
        if IN_16_BITS not in scores:
            continue
        others = [
            name
            for name in scores
            if name != IN_16_BITS and len(scores[[IN_16_BITS, name]].dropna()) >= ENOUGH_SEEDS
        ]
        if others:
            parts[len(others), part["time.started"].max()] = part, others
    if not parts:
        return ""
    part, others = parts[max(parts)]
    scores = by_seed(part, BITS)
    rows = []
    for name in [IN_16_BITS, *(name for name in SHOWN if name in others)]:
        difference = MISSING
        if name != IN_16_BITS:
            mean, half = compare(part, name, IN_16_BITS, BITS)
            difference = points(mean, half, sign="+", decimals=3)
        rows.append({
            "training": spoken.variant(name),
            "seeds": str(scores[name].count()),
            "bits a byte": three_decimals(scores[name].mean()),
            "against 16 bits": difference,
        })  # fmt: skip
    first = part.iloc[0]
    source = (
        f"Bits a byte of held-out text, of which less is better: {first['model.name']}, "
        f"{first['spec.preset.epochs']:.0f} epochs, group {first['group']}, code "
        f"{evidence.commits(part)}; differences over equal seeds."
    )
    if STACK not in others:
        source += f" What {spoken.variant(STACK)} does to them is not measured yet."
    return f"{markdown(pd.DataFrame(rows))}\n\n{source}"
