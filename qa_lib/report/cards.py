"""What to run on a card of so much memory: tables from the records of the bench, vram and fit scales."""

import math

import pandas as pd

from qa_lib.presets import PRESETS
from qa_lib.report.quality import FULL_EPOCHS, FULL_FEATURES, MARGIN, as_text, equivalence, projected, quality_runs
from qa_lib.report.runs import (
    BASELINE,
    RECOMMENDED,
    NotMeasured,
    commits,
    neighbours,
    published,
    score_name,
    select,
    sibling,
    usual,
)
from qa_lib.report.tables import DATA_SHEET_TFLOPS, in_order, summarise
from qa_lib.report.text import MISSING, folded, gain, number, or_why, say
from qa_lib.spec import Machine, missing
from qa_lib.variants import VARIANTS, choices, find_recipe, since

SIZES_GIB = (1, 1.5, 2, 3, 4, 6, 8, 12, 14.9, 24)  # 14.9: a T4
GENERATIONS = {75: "T4, RTX 20", 80: "A100, RTX 30", 89: "L4, RTX 40", 90: "H100 and newer"}  # by sm
# What may be recommended: by what trains, how many points of F1 a row may have lost in the mean (the project's goals).
ALLOWED = {"all": MARGIN, "lora": 2.0}  # in the order of preference, which is that of the alphabet
CONTEXT_GIB = 0.5  # a process takes this beside what PyTorch reserves
SCATTER = 0.06  # by so much a try's speed depends on the lengths that it draws, counted over 30 seeds


def vram_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Peaks of one step at micro-batch 8 after one to settle, the seeds' protocol, ours beside their T4's.

    `runs` of one group at preset vram. Raises NotMeasured where no run has a peak.
    """
    runs = usual(runs)
    ours = runs[runs["memory.peak_alloc_mib"].notna() & (runs["micro_batch"] == 8)]
    if ours.empty:
        raise NotMeasured("no run at preset vram has a peak: GPU memory is counted by the GPU's allocator")
    ours = in_order(ours.drop_duplicates("spec.variant", keep="last").set_index("spec.variant"))
    theirs = published().reindex(ours.index)
    table = pd.DataFrame(index=ours.index)
    for kind, column, name in (("allocated", "memory.peak_alloc_mib", "peak_mib"),
                               ("reserved", "memory.peak_reserved_mib", "peak_reserved_mib")):  # fmt: skip
        table[f"{kind} MiB"] = ours[column].map(number)
        table[f"T4: {kind} MiB"] = theirs[name].map(number)
        table[f"{kind}, ours over theirs"] = (ours[column] / theirs[name]).map(number)
    return table.rename_axis("row").reset_index()


def worth(quality: pd.DataFrame) -> pd.DataFrame:
    """What each row's score is worth, by runs that have one: columns text, the difference to the baseline's at
    threshold 0 or at the best one, whichever is worse in the mean, and lost, the points of that. Without rows where it
    was not measured."""
    try:
        tested = equivalence(usual(quality))
    except NotMeasured:
        return pd.DataFrame(columns=["text", "lost"], dtype=object)
    rows = tested.set_index("variant")
    text = as_text(tested).where(rows["delta"] <= rows["best_delta"], as_text(tested, "best_"))
    found = pd.DataFrame({"text": text + " (n = " + rows["n"].astype(str) + ")"})
    found["lost"] = -rows[["delta", "best_delta"]].min(axis=1)
    found.loc[BASELINE] = (gain(0.0), 0.0)
    return found


def largest_batches(runs: pd.DataFrame, f1: pd.DataFrame) -> pd.DataFrame:
    """Of a group that `max-batch` made: each row's largest micro-batch that fitted, the smallest that did not, the best
    speed at any, and its score by worth(); last the rows that cannot run there, and why.

    Raises NotMeasured where nothing fitted.
    """
    runs = usual(runs).set_index("spec.variant").astype({"speed.samples_per_s": float})
    fitted = runs[runs["status"] == "ok"]
    if fitted.empty:
        raise NotMeasured("no try of max-batch has fitted in this group")
    most, best = (fitted.sort_values(column, ascending=False, kind="stable").groupby(level=0).head(1) for column in
                  ("micro_batch", "speed.samples_per_s"))  # fmt: skip
    failed = runs.loc[runs["status"] == "oom", "micro_batch"].groupby(level=0).min()
    table = pd.DataFrame({
        "largest micro-batch": most["micro_batch"].astype(str),
        "too large": failed.reindex(most.index).map("{:.0f}".format, na_action="ignore"),
        "reserved MiB": most["memory.peak_reserved_mib"].map(number),
        "best features/s tried": best["speed.samples_per_s"].map(number),
        "at micro-batch": best["micro_batch"].astype(str),
    })  # fmt: skip
    table[f"Δ{score_name(runs)} vs {BASELINE}"] = [f1["text"].get(name, "not known") for name in table.index]
    skipped = runs.loc[(runs["status"] == "skipped") & ~runs.index.isin(table.index), "error.message"]
    table = pd.concat([in_order(table), in_order(skipped.to_frame("note"))]).fillna(MISSING)
    return table.rename_axis("row").reset_index()


def best_first(runs: pd.DataFrame, f1: pd.DataFrame) -> pd.DataFrame:
    """Rows of the kinds in ALLOWED at each micro-batch, the one to prefer first: variant, size, speed (features/s, the
    mean of all seeds), reserved (MiB, the most of them), kind, doubt (0: keeps its score, 1: not known, 2: does not).

    Full fine-tunes stand before adapters. Among either the quickest is preferred; then those of unknown score; last
    those that lost more than ALLOWED in the mean, the least lossy of them first. `f1` by worth(). Raises NotMeasured.
    """
    columns = {"spec.variant": "variant", "micro_batch": "size", "speed.samples_per_s": "speed",
               "memory.peak_reserved_mib": "reserved"}  # fmt: skip
    runs = usual(runs)
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
    return measured.sort_values(["kind", "doubt", "merit", "speed"], ascending=[True, True, False, False])


def runs_on(variant: str, sm: int) -> bool:
    """Whether a GPU of this compute capability (x 10) has the kernels that a row asks for."""
    gpu = Machine(gpus=1, sm=sm, backends=choices()["compile"], bitsandbytes=True, compiler=True)
    return missing(VARIANTS[variant].settings, gpu) is None


def quickest_on(ranked: pd.DataFrame, gib: float, sm: int):
    """The first of `best_first` that fits into so much memory and runs on that capability, or the recommended row where
    that is as quick, as far as can be told; None where none does."""
    fits = ranked["reserved"] / 1024 + CONTEXT_GIB <= gib
    fits &= ranked["variant"].map(lambda name: runs_on(name, sm))
    ranked = ranked[fits]
    close = (ranked["variant"] == RECOMMENDED) & (ranked["speed"] > (1 - SCATTER) * ranked["speed"].iloc[:1].max())
    return next(pd.concat([ranked[close], ranked]).itertuples(), None)


def generation_table(runs: pd.DataFrame, f1: pd.DataFrame) -> pd.DataFrame:
    """For each of SIZES_GIB and GENERATIONS the row to take, an adapter where no full fine-tune fits; without sizes at
    which nothing changes. Speeds are those of the GPU that ran them; `f1` by worth(). Raises NotMeasured."""
    ranked = best_first(runs, f1)
    lines = []
    for size in SIZES_GIB:
        found = {cards: quickest_on(ranked, size, sm) for sm, cards in GENERATIONS.items()}
        texts = {cards: f"{row.variant} at {row.size}" if row else MISSING for cards, row in found.items()}
        lines.append({"you have at least": f"{size:g} GiB"} | texts)
    table = pd.DataFrame(lines).drop_duplicates(list(GENERATIONS.values()))
    return table[(table[list(GENERATIONS.values())] != MISSING).any(axis=1)]


def estimated_minutes(runs: pd.DataFrame, group: str, variant: str, card: str, sm: int) -> float:
    """Minutes of the full training on a card that has run nothing, if a row kept its share of the data sheet's peak
    there; without compilation. By the row's best speed in a search with the kernels of that compute capability (x 10),
    or where there was none, in the group. `runs` are all records. Raises NotMeasured."""
    own, near = select(runs, group), neighbours(runs, group)
    measured_on = own["env.gpu"].iloc[0]
    if absent := {measured_on, card} - DATA_SHEET_TFLOPS.keys():
        raise NotMeasured(f"no data sheet is known of {', '.join(map(str, sorted(absent, key=str)))}")
    tries = near[(near["spec.search"] == "max-batch") & (near["spec.sm"] == sm) & (near["spec.variant"] == variant)]
    speed = tries["speed.samples_per_s"].astype(float).max()
    if math.isnan(speed):
        speed = projected(summarise(own), [variant])["speed"].get(variant)
    if speed is None:
        raise NotMeasured(f"{variant} has no measured speed")
    return FULL_FEATURES * FULL_EPOCHS / (speed * DATA_SHEET_TFLOPS[card] / DATA_SHEET_TFLOPS[measured_on]) / 60


def _quickest(tries: pd.DataFrame, f1: pd.DataFrame) -> list[dict]:
    """Under the limits of a search, the quickest row that keeps its quality, and those too close to it to tell."""
    try:
        ranked = best_first(tries, f1)
    except NotMeasured:
        return []
    ranked = ranked[(ranked["kind"] == "all") & (ranked["doubt"] == 0)].drop_duplicates("variant")
    return ranked[ranked["speed"] >= (1 - SCATTER) * ranked["speed"].max()].to_dict("records")


def which_row(runs: pd.DataFrame, group: str) -> str:
    """For a notebook: which row to take on which card, and folded below it the tables of a group's hardware, each with
    what it says, or why it is not there; as Markdown.

    `runs` are all records; the seeds' protocol and the searches of max-batch are groups of their own.
    """
    own = select(runs, group)
    f1 = worth(quality_runs(runs, group))
    said = {"context": CONTEXT_GIB, "all": ALLOWED["all"], "score": score_name(own)}
    parts = [
        say("cards.card", lora=ALLOWED["lora"], recommended=RECOMMENDED, scatter=SCATTER, **said),
        or_why(generation_table, own, f1),
        folded(
            "Memory by the seeds' protocol", say("cards.protocol"), or_why(vram_table, sibling(runs, group, "vram"))
        ),
    ]
    found = neighbours(runs, group)
    for name in sorted(set(found.loc[found["spec.search"] == "max-batch", "group"])):
        tries = select(runs, name)
        limit, sm, task = tries[["spec.preset.limit_gib", "spec.sm", "task.name"]].iloc[0]
        tried = set(tries["spec.variant"])
        fitting = [row for row in VARIANTS.values() if row.task == task and row.settings.parallel == "none"]
        absent = [row.name for row in fitting if row.name not in tried and (since(row.settings) or 0) <= sm]
        largest = PRESETS["full"].effective_batch
        room = say("cards.search", limit=limit, sm=sm, absent=absent, code=commits(tries), **said)
        quickest = _quickest(tries, f1)
        parts += [
            say("cards.take", limit=limit, sm=sm, quickest=quickest, scatter=SCATTER, largest=largest, **said),
            folded(
                f"The largest micro-batch of each row within {limit:g} GiB", room, or_why(largest_batches, tries, f1)
            ),
        ]
    return "\n\n".join(parts)
