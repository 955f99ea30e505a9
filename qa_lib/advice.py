"""What to run on a card of so much memory: tables from the records of the bench, vram and fit scales."""

import pandas as pd

from qa_lib import evidence, tables
from qa_lib.tables import NotMeasured, number
from qa_lib.variants import VARIANTS, find_recipe

SIZES_GIB = (1, 1.5, 2, 3, 4, 6, 8, 12, 14.9, 24)  # 14.9: a T4
CONTEXT_GIB = 0.5  # a process takes this beside what PyTorch reserves


def vram_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Peaks of one step at micro-batch 8 after one to settle, the seeds' protocol, ours beside their T4's.

    `runs` of one group at scale vram. Raises NotMeasured where no run has a peak.
    """
    ours = runs[runs["memory.peak_alloc_mib"].notna() & (runs["spec.settings.micro_batch"] == 8)]
    if ours.empty:
        raise NotMeasured("no run at scale vram has a peak: GPU memory is counted by the GPU's allocator")
    theirs = pd.read_csv(tables.PUBLISHED, comment="#").set_index("row")
    ours = ours.drop_duplicates("spec.variant", keep="last").set_index("spec.variant")
    rows = [name for name in VARIANTS if name in ours.index]
    table = pd.DataFrame({"row": rows, "what it changes": [tables.change(name) for name in rows]})
    for kind, column in (("allocated", "peak_alloc_mib"), ("reserved", "peak_reserved_mib")):
        peak = ours.loc[rows, f"memory.{column}"].astype(float)
        seeds = theirs[column].reindex(rows)
        table[f"{kind} MiB"] = peak.map(number).to_numpy()
        table[f"T4: {kind} MiB"] = seeds.map(number).to_numpy()
        table[f"{kind}, ours over theirs"] = (peak / seeds).map(number).to_numpy()
    return table


def largest_batches(runs: pd.DataFrame) -> pd.DataFrame:
    """Of a group that `fit-batch` made: each row's largest micro-batch that fitted, the smallest that did not, and the
    best speed at any; last the rows that cannot run there, and why. Raises NotMeasured where nothing fitted."""
    lines, skipped = [], []
    for name in VARIANTS:
        row = runs[runs["spec.variant"] == name]
        tries = row[row["status"] == "ok"]
        if tries.empty:
            reasons = row[row["status"] == "skipped"]["error.message"]
            skipped += [{"row": name, "what it changes": tables.change(name), "note": why} for why in reasons]
            continue
        failed = row[row["status"] == "oom"]["spec.settings.micro_batch"]
        most, best = (tries.loc[tries[column].astype(float).idxmax()] for column in
                      ("spec.settings.micro_batch", "speed.features_per_s"))  # fmt: skip
        lines.append(
            {
                "row": name,
                "what it changes": tables.change(name),
                "largest micro-batch": str(most["spec.settings.micro_batch"]),
                "too large": str(failed.min()) if len(failed) else tables.MISSING,
                "reserved MiB": number(most["memory.peak_reserved_mib"]),
                "best features/s tried": number(best["speed.features_per_s"]),
                "at micro-batch": str(best["spec.settings.micro_batch"]),
            }
        )
    if not lines:
        raise NotMeasured("no try of fit-batch has fitted in this group")
    return pd.DataFrame(lines + skipped).fillna(tables.MISSING)


def decision_table(runs: pd.DataFrame, quality: pd.DataFrame) -> pd.DataFrame:
    """For cards of SIZES_GIB: the quickest full fine-tune and the quickest adapter that were measured to fit. Rows of
    unknown F1 stand only where none of known F1 fits, and of rows that were shown to be more than evidence.MARGIN off
    the baseline's F1 the one with the most, where nothing else fits.

    From `runs` of one group, by peak reserved memory plus CONTEXT_GIB; `quality` are runs with F1, or none. Speeds are
    those of the GPU that ran them. Raises NotMeasured.
    """
    measured = runs[runs["status"] == "ok"].dropna(subset=["memory.peak_reserved_mib", "speed.features_per_s"])
    if measured.empty:
        raise NotMeasured("no run of this group has both GPU memory and speed, so none can be recommended")
    try:
        f1 = evidence.equivalence(quality).set_index("variant")
    except NotMeasured:
        f1 = pd.DataFrame(columns=["delta", "half", "verdict"], dtype=object)
    verdict = measured["spec.variant"].map(f1["verdict"])
    verdict = verdict.mask((measured["spec.variant"] == tables.BASELINE) & bool(len(f1)), "within")
    speed = measured["speed.features_per_s"].astype(float)
    measured = measured.assign(
        doubt=verdict.map({"within": 0, "open": 0, "beyond": 2}).fillna(1),
        merit=speed.where(verdict != "beyond", measured["spec.variant"].map(f1["delta"]).astype(float)),
    )
    kinds = measured["spec.variant"].map(lambda name: find_recipe(VARIANTS[name].settings.trainable).kind)
    needed = measured["memory.peak_reserved_mib"].astype(float) / 1024 + CONTEXT_GIB
    lines = []
    for size in SIZES_GIB:
        line = {"you have": f"{size:g} GiB"}
        for want, wanted in (("train everything", kinds == "all"), ("train adapters", kinds == "lora")):
            fitting = measured[wanted & (needed <= size)]
            if fitting.empty:
                line |= dict.fromkeys((want, f"{want}: ΔF1", f"{want}: features/s"), tables.MISSING)
                continue
            best = fitting.sort_values(["doubt", "merit"], ascending=[True, False]).iloc[0]
            name = best["spec.variant"]
            line[want] = f"{name}, micro-batch {best['spec.settings.micro_batch']}"
            line[f"{want}: ΔF1"] = (
                tables.points(*f1.loc[name, ["delta", "half"]], "+") if name in f1.index else "not known"
            )
            line[f"{want}: features/s"] = number(best["speed.features_per_s"])
        lines.append(line)
    return pd.DataFrame(lines)


def recipes(runs: pd.DataFrame, group: str) -> str:
    """For a notebook: the tables of a group's hardware as Markdown, each with what it says, or why it is not there.

    `runs` are all records; the seeds' protocol and the searches of fit-batch are groups of their own.
    """
    hardware = group.rsplit("-", 1)[0]
    said = (
        f"**What to run on a card of so much memory**, from this group: reserved memory and {CONTEXT_GIB:g} GiB for "
        "the process must fit. A row that loses F1 stands only where nothing else fits. The speeds are those of the "
        "GPU that ran it, and a row needs what its settings need: a T4 has no bf16 and no 8-bit floats, so see the "
        "last table for one."
    )
    quality = evidence.quality_runs(runs, group)
    parts = [said, tables.or_why(lambda part: decision_table(part, quality), runs[runs["group"] == group])]
    said = "**The seeds' protocol**: one step at micro-batch 8 after one to settle. *T4* is theirs, the rest is ours."
    parts += [said, tables.or_why(vram_table, runs[runs["group"] == f"{hardware}-vram"])]
    for name in sorted(set(runs["group"])):
        if name.startswith(f"{hardware}-fit-"):
            tries = runs[runs["group"] == name]
            limit, sm = tries["spec.scale.limit_gib"].iloc[0], name.rsplit("-sm", 1)[-1]
            absent = [row for row in VARIANTS if row not in set(tries["spec.variant"])]
            parts += [
                f"**The largest micro-batch within {limit:g} GiB**, with the allocator capped to that and with what "
                f"compute capability {int(sm) / 10:g} offers. The speeds are not those of such a card."
                + (f" Not searched: {', '.join(absent)}." if absent else ""),
                tables.or_why(largest_batches, tries),
            ]
    return "\n\n".join(parts)
