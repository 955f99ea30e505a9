"""How well kernels use the card: a block of docs/profiles.md, of profiles with hardware counters.

`python -m qa_lib profile VARIANT --ncu` reads the counters (lab/tools/profile.py): how many warps a
kernel keeps active, and how close it comes to the peaks of the SMs and of the memory.
"""

import re

import numpy as np
import pandas as pd

from qa_lib.lab.report import evidence, spoken
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import MISSING, percent
from qa_lib.lab.report.tables import Column, markdown, render
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import BASELINES

# The variants of the block, from the slowest to the quickest.
SHOWN = (BASELINES["qa"], "A3", TASKS["qa"].on_gpu[0])
# Kernels of a variant that have a row.
HEAVIEST = 6
# Letters of a kernel's name, at most.
LETTERS = 40
# What a profile has of a kernel, in percent -> its heading.
PERCENTAGES = {
    "warps_active_percent": "warps active %",
    "sm_percent": "SM %",
    "dram_percent": "DRAM %",
}
# Percent of a peak. Nsight Compute takes a kernel that reaches this much of neither for one that
# mostly waits.
NEAR_PEAK = 60

# Names of GEMMs, those of cuBLAS in FP8, the tiles in them, and how their operands lie.
_GEMM = re.compile(r"nvjet|gemm|cutlass::Kernel", re.IGNORECASE)
_FP8_GEMM = re.compile(r"nvjet_sm\d+_[qr]")
_TILES = re.compile(r"\d+x\d+(?:x\d+)*(?:_\d+x\d+)*")
_LAYOUT = re.compile(r"_((?:(?:bias|splitK)_)*[NT]{2,3})(?![a-z])", re.IGNORECASE)
# Namespaces without a name, as the profiler and as Nsight Compute write them.
_UNNAMED = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
# PyTorch's elementwise kernels differ by a type that they are made with, which other types wrap.
_ELEMENTWISE = re.compile(r"\w*elementwise_kernel")
_FUNCTION = re.compile(
    r"\b(?!\w*(?:Unary|Binary)Functor)\w*(?:[fF]unctor|_kernel_cuda|scale_kernel|KernelImpl)\w*"
)


def kernel_use(runs: pd.DataFrame) -> str:
    """Return as Markdown how well the kernels of SHOWN use the card: a sentence and tables.

    `runs` are those of all groups. Raises NotMeasured where no profile has counters.
    """
    counted = counted_runs(runs)
    kernels = {
        variant: kernel_table(profile)
        for variant, profile in zip(counted["spec.variant"], counted["profile"], strict=True)
    }
    paragraphs = [f"**{_finding(kernels)}** {_source(counted)}", _means_table(counted, kernels)]
    for variant, table in kernels.items():
        heaviest = table.head(HEAVIEST)
        paragraphs.append(
            f"The heaviest kernels of {spoken.variant(variant)} take "
            f"{percent(heaviest['share'].sum())} of its kernel time:"
        )
        paragraphs.append(markdown(render(heaviest, KERNEL_COLUMNS)))
    return "\n\n".join(paragraphs)


# The profiles.


def counted_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the newest run of each of SHOWN that has a profile with counters, in that order.

    They are of one group and agree in all axes: of those parts the one with the most variants, then
    the newest. The column `profile` has the profiles. Raises NotMeasured where there is none.
    """
    is_shown = runs["spec.variant"].isin(SHOWN) & runs["spec.search"].eq("")
    shown = runs[is_shown]
    shown = shown.assign(profile=[run.profile() for run in shown["run"]])
    counted = shown[shown["profile"].map(has_counters).astype(bool)]
    if counted.empty:
        raise NotMeasured(
            f"no profile of {', '.join(SHOWN)} has hardware counters: "
            "python -m qa_lib profile VARIANT --ncu reads them"
        )
    parts = [part for _, part in counted.groupby(["group", *evidence.AXES], dropna=False)]
    chosen = max(
        parts, key=lambda part: (part["spec.variant"].nunique(), part["time.started"].max())
    )
    newest = chosen.sort_values("time.started").drop_duplicates("spec.variant", keep="last")
    return newest.sort_values("spec.variant", key=lambda names: names.map(SHOWN.index))


def has_counters(profile: dict | None) -> bool:
    """Return whether a profile has percentages of peaks, which those of older code lack."""
    kernels = (profile or {}).get("ncu") or []
    return any(kernel.get(name) is not None for kernel in kernels for name in PERCENTAGES)


def kernel_table(profile: dict) -> pd.DataFrame:
    """Return a line for each kernel whose counters a profile has, the one that takes longest first.

    Columns: kernel, its short name; part, what of the step it computes; count, launches in a step;
    us, the microseconds of all of them; share, the part of the kernels' time that this is; and
    PERCENTAGES.
    """
    columns = ["name", "count", "us", *PERCENTAGES]
    table = pd.DataFrame(profile["ncu"]).reindex(columns=columns)
    table[["us", *PERCENTAGES]] = table[["us", *PERCENTAGES]].astype(float)
    names = table.pop("name").map(plain_name)
    table.insert(0, "kernel", names.map(_shortened))
    table.insert(1, "part", names.map(_parts_by_name(profile["time"]["kernels"])).fillna(MISSING))
    table["share"] = table["us"] / table["us"].sum()
    return table.sort_values("us", ascending=False, kind="stable", ignore_index=True)


def _parts_by_name(kernels: list[dict]) -> dict[str, str]:
    """Return what of a step kernels compute, such as 'forward: attention, feed-forward'.

    `kernels` are those of the profile's time, and the keys are their plain names: the profiler and
    Nsight Compute write types differently.
    """
    phases_by_name: dict[str, dict[str, list[str]]] = {}
    for kernel in kernels:
        phases = phases_by_name.setdefault(plain_name(kernel["name"]), {})
        parts = phases.setdefault(kernel["phase"], [])
        if kernel["part"] not in parts:
            parts.append(kernel["part"])
    return {
        name: "; ".join(_in_words(phase, parts) for phase, parts in phases.items())
        for name, phases in phases_by_name.items()
    }


def _in_words(phase: str, parts: list[str]) -> str:
    """Return a phase with parts of the model."""
    return phase if parts == [phase] else f"{phase}: {', '.join(parts)}"


def plain_name(kernel: str) -> str:
    """Return the name of a kernel without namespaces and types.

    A GEMM is told by its tiles and by how its operands lie, and an elementwise kernel of PyTorch by
    its function.
    """
    plain = _UNNAMED.sub("", kernel)
    tiles = _TILES.search(kernel)
    if _GEMM.search(kernel) and tiles:
        layouts = _LAYOUT.findall(kernel)
        kind = "8-bit GEMM" if _FP8_GEMM.match(kernel) else "GEMM"
        return " ".join([kind, tiles[0], *layouts[-1:]])
    name = re.split("[<(]", plain)[0].split("::")[-1].removeprefix("void ").strip()
    function = _FUNCTION.search(plain)
    if _ELEMENTWISE.fullmatch(name) and function:
        return f"elementwise {function[0]}"
    return name


def _shortened(name: str) -> str:
    """Return a name in at most LETTERS letters: its beginning and its end, which has a number."""
    if len(name) <= LETTERS:
        return name
    half = LETTERS // 2
    return f"{name[:half]}…{name[1 - half :]}"


# What is said.

KERNEL_COLUMNS = [
    Column("kernel"),
    Column("part", "part of the step"),
    Column("count", "launches a step"),
    Column("us", "µs a step"),
    Column("share", "of kernel time", percent),
    *(Column(name, heading) for name, heading in PERCENTAGES.items()),
]


def _finding(kernels: dict[str, pd.DataFrame]) -> str:
    """Return how much of each variant's kernel time is spent near a peak of the card."""
    shares = []
    for variant, table in kernels.items():
        peak_percent = table[["sm_percent", "dram_percent"]].max(axis="columns")
        near_peak = table.loc[peak_percent > NEAR_PEAK, "share"].sum()
        shares.append(f"{percent(near_peak)} in {spoken.variant(variant)}")
    return (
        f"Kernels that reach more than {NEAR_PEAK} % of the SMs' or the DRAM's peak take this much "
        f"of the kernel time: {', '.join(shares)}."
    )


def _source(counted: pd.DataFrame) -> str:
    """Return what the profiles are of, and what their columns mean."""
    first = counted.iloc[0]
    kept = max(len(profile["ncu"]) for profile in counted["profile"])
    commits = sorted({str(profile["code"]["commit"])[:7] for profile in counted["profile"]})
    return (
        f"One step on one {spoken.card(first['env.gpu'])}, {first['micro_batch']} samples of "
        f"{first['data']} in a forward pass, {spoken.model(first['model.name'])}, group "
        f"{first['group']}, code {', '.join(commits)}. Nsight Compute runs each kernel alone and "
        "several times, each time with empty caches, so that the memory is read more than in a "
        "training. *Warps active*: of those that an SM can hold, while it has any (occupancy). "
        "*SM* and *DRAM*: throughput over that of the peak. Means over kernels are weighted by "
        f"time; counters are kept of the {kept} kernels that take longest."
    )


def _means_table(counted: pd.DataFrame, kernels: dict[str, pd.DataFrame]) -> str:
    """Return as Markdown a row for each variant: its step, and means over its kernels."""
    lines = []
    for profile, (variant, table) in zip(counted["profile"], kernels.items(), strict=True):
        lines.append({
            "training": spoken.variant(variant),
            "ms a step": profile["time"]["step_ms"],
            "ms of its kernels": table["us"].sum() / 1e3,
            **{heading: mean(table, name) for name, heading in PERCENTAGES.items()},
        })  # fmt: skip
    means = pd.DataFrame(lines)
    return markdown(render(means, [Column(name) for name in means]))


def mean(table: pd.DataFrame, name: str) -> float:
    """Return the mean of a column over kernels, weighted by time; NaN where none has a value."""
    known = table.dropna(subset=name)
    return np.average(known[name], weights=known["us"]) if len(known) else np.nan
