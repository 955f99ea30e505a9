"""What to run on a card of so much memory: tables from the records of the bench, vram and fit scales."""

import pandas as pd

from qa_lib.report import quality as evidence
from qa_lib.report import tables
from qa_lib.report.tables import NotMeasured, number
from qa_lib.spec import SCALES
from qa_lib.variants import VARIANTS, find_recipe

SIZES_GIB = (1, 1.5, 2, 3, 4, 6, 8, 12, 14.9, 24)  # 14.9: a T4
# What may be recommended: by what trains, how many points of F1 a row may have lost in the mean (the project's goals).
ALLOWED = {"all": evidence.MARGIN, "lora": 2.0}
CONTEXT_GIB = 0.5  # a process takes this beside what PyTorch reserves
SCATTER = 0.06  # by so much a try's speed depends on the lengths that it draws, counted over 30 seeds


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


def worth(quality: pd.DataFrame) -> pd.DataFrame:
    """What each row's F1 is worth, by runs that have one: columns text, the difference to the baseline's at threshold
    0 or at the best one, whichever is worse in the mean, and lost, the points of that. Without rows where it was not
    measured."""
    try:
        tested = evidence.equivalence(quality)
    except NotMeasured:
        return pd.DataFrame(columns=["text", "lost"], dtype=object)
    rows = tested.set_index("variant")
    text = evidence.as_text(tested).where(rows["delta"] <= rows["best_delta"], evidence.as_text(tested, "best_"))
    found = pd.DataFrame({"text": text + " (n = " + rows["n"].astype(str) + ")"})
    found["lost"] = -rows[["delta", "best_delta"]].min(axis=1)
    found.loc[tables.BASELINE] = (tables.points(0.0, sign="+"), 0.0)
    return found


def largest_batches(runs: pd.DataFrame, f1: pd.DataFrame) -> pd.DataFrame:
    """Of a group that `fit-batch` made: each row's largest micro-batch that fitted, the smallest that did not, the best
    speed at any, and its F1 by worth(); last the rows that cannot run there, and why.

    Raises NotMeasured where nothing fitted.
    """
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
                f"ΔF1 vs {tables.BASELINE}": f1["text"].get(name, "not known"),
            }
        )
    if not lines:
        raise NotMeasured("no try of fit-batch has fitted in this group")
    return pd.DataFrame(lines + skipped).fillna(tables.MISSING)


def _best_first(runs: pd.DataFrame, f1: pd.DataFrame) -> pd.DataFrame:
    """Rows of the kinds in ALLOWED at each micro-batch, as decision_table() prefers them: variant, size, speed
    (features/s), reserved (MiB, the most of all seeds), kind; `f1` by worth(). Raises NotMeasured."""
    columns = {"spec.variant": "variant", "spec.settings.micro_batch": "size", "speed.features_per_s": "speed",
               "memory.peak_reserved_mib": "reserved"}  # fmt: skip
    measured = runs.loc[runs["status"] == "ok", list(columns)].rename(columns=columns).dropna()
    if measured.empty:
        raise NotMeasured("no run of this group has both GPU memory and speed, so none can be recommended")
    measured = measured.astype({"speed": float, "reserved": float}).groupby(["variant", "size"], as_index=False)
    measured = measured.agg({"speed": "mean", "reserved": "max"})
    measured["kind"] = measured["variant"].map(lambda name: find_recipe(VARIANTS[name].settings.trainable).kind)
    measured = measured[measured["kind"].isin(ALLOWED)]
    lost = measured["variant"].map(f1["lost"]).astype(float)
    lossy = lost > measured["kind"].map(ALLOWED)
    measured = measured.assign(doubt=lost.isna() + 2 * lossy, merit=measured["speed"].where(~lossy, -lost))
    return measured.sort_values(["doubt", "merit", "speed"], ascending=[True, False, False])


def decision_table(runs: pd.DataFrame, f1: pd.DataFrame) -> pd.DataFrame:
    """For cards of SIZES_GIB: the quickest full fine-tune and the quickest adapter that were measured to fit. Rows of
    unknown F1 stand only where none of known F1 fits, and of rows that lost more than ALLOWED in the mean, at either
    threshold, the one that lost least, where nothing else fits.

    From `runs` of one group, by peak reserved memory plus CONTEXT_GIB; `f1` by worth(). Speeds are those of the GPU
    that ran them. Raises NotMeasured.
    """
    measured = _best_first(runs, f1)
    needed = measured["reserved"] / 1024 + CONTEXT_GIB
    lines = []
    for size in SIZES_GIB:
        line = {"you have": f"{size:g} GiB"}
        for want, wanted in (("train everything", "all"), ("train adapters", "lora")):
            fitting = measured[(measured["kind"] == wanted) & (needed <= size)]
            if fitting.empty:
                line |= dict.fromkeys((want, f"{want}: ΔF1", f"{want}: features/s"), tables.MISSING)
                continue
            best = fitting.iloc[0]
            line[want] = f"{best['variant']}, micro-batch {best['size']}"
            line[f"{want}: ΔF1"] = f1["text"].get(best["variant"], "not known")
            line[f"{want}: features/s"] = number(best["speed"])
        lines.append(line)
    return pd.DataFrame(lines)


def _quickest(tries: pd.DataFrame, f1: pd.DataFrame) -> str:
    """A sentence on the row to take under the limits of a search, or nothing."""
    try:
        ranked = _best_first(tries, f1)
    except NotMeasured:
        return ""
    ranked = ranked[(ranked["kind"] == "all") & (ranked["doubt"] == 0)]
    if ranked.empty:
        return ""
    ranked = ranked.drop_duplicates("variant")
    alike = ranked[ranked["speed"] >= (1 - SCATTER) * ranked["speed"].max()]
    said = [f"{row.variant} at micro-batch {row.size}, {number(row.speed)} features/s" for row in alike.itertuples()]
    return (
        f" Quickest there, of the rows that train everything and lost no more than {ALLOWED['all']:g} F1 in the mean "
        f"at either threshold (at the scale's own batch): {'; '.join(said)}"
        + f"; closer to each other than such tries can tell, {100 * SCATTER:.0f} %"
        * (len(said) > 1)
        + ". A try makes one micro-batch a step, while a training's must divide its effective batch: at scale full, "
        f"{SCALES['full'].effective_batch} is the largest."
    )


def recipes(runs: pd.DataFrame, group: str) -> str:
    """For a notebook: the tables of a group's hardware as Markdown, each with what it says, or why it is not there.

    `runs` are all records; the seeds' protocol and the searches of fit-batch are groups of their own.
    """
    hardware = group.rsplit("-", 1)[0]
    said = (
        f"**What to run on a card of so much memory**, from this group: reserved memory and {CONTEXT_GIB:g} GiB for "
        f"the process must fit. A row that lost more than {ALLOWED['all']:g} F1 in the mean (an adapter: "
        f"{ALLOWED['lora']:g}), at threshold 0 or at the best one, stands only where nothing else fits; ΔF1 is the "
        "worse of both. The speeds are those of the GPU that ran it, and a row needs what its settings need: a T4 has "
        "no bf16 and no 8-bit floats, so see the last table for one."
    )
    f1 = worth(evidence.quality_runs(runs, group))
    parts = [said, tables.or_why(lambda part: decision_table(part, f1), tables.select(runs, group))]
    said = (
        "**The seeds' protocol**: one step at micro-batch 8 after one to settle. *T4* is theirs, the rest is ours. A "
        "row that pads to the longest of a batch shows the one batch it drew; no graph is captured so early."
    )
    parts += [said, tables.or_why(vram_table, tables.sibling(runs, group, "vram"))]
    for name in sorted(set(runs["group"])):
        if name.startswith(f"{hardware}-fit-"):
            tries = tables.select(runs, name)
            limit, sm = tries["spec.scale.limit_gib"].iloc[0], name.rsplit("-sm", 1)[-1]
            absent = [row for row in VARIANTS if row not in set(tries["spec.variant"])]
            parts += [
                f"**The largest micro-batch within {limit:g} GiB**, with the allocator capped to that (the process "
                f"takes about {CONTEXT_GIB:g} GiB beside it) and with what compute capability {int(sm) / 10:g} offers. "
                "The speeds, of one short run each, are not those of such a card; rows that pad to the longest of a "
                "batch vary by several percent with what they draw in it, and rows that launch kernel by kernel lose "
                "most where other searches keep the host busy. The F1 of packed rows is that of the "
                "kernel which the GPU of the runs for quality has; ΔF1 is at the worse threshold again."
                + (f" Not searched: {', '.join(absent)}." if absent else "")
                + _quickest(tries, f1)
                + f" Code {tables.commits(tries)}.",
                tables.or_why(lambda part: largest_batches(part, f1), tries),
            ]
    return "\n\n".join(parts)
