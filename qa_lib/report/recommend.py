"""What to run on a card of so much memory: from the records of the bench preset, and of quality for what it costs."""

import math

import pandas as pd

from qa_lib.report import load
from qa_lib.report.format import MISSING, gain, say
from qa_lib.report.load import REFERENCE, NotMeasured, ReportError, numbers, select, usual
from qa_lib.report.stats import BASELINE, MARGIN, equivalence
from qa_lib.report.summary import DATA_SHEET_TFLOPS, summary
from qa_lib.spec import CONTEXT_GIB, Machine, missing
from qa_lib.variants import RECOMMENDED, VARIANTS, choices, find_recipe, tagged

SIZES_GIB = (1, 1.5, 2, 3, 4, 6, 8, 12, 14.9, 24)  # 14.9: a T4
GENERATIONS = {75: "T4, RTX 20", 80: "A100, RTX 30", 89: "L4, RTX 40", 90: "H100 and newer"}  # by sm
# What may be recommended: by what trains, how many points of F1 a variant may have lost in the mean (the goals).
ALLOWED = {"all": MARGIN, "lora": 2.0}  # in the order of preference, which is that of the alphabet
SCATTER = 0.06  # by so much a try's speed depends on the lengths that it draws, counted over 30 seeds
PROJECTED = 32  # micro-batch


def projected(lines: pd.DataFrame, variants=()) -> pd.DataFrame:
    """Minutes of training on the full data set at a bench group's speeds (`lines` of summary), indexed by variant: of
    the headline ones, or of these.

    Columns: speed (samples/s); compile_s, NaN where it was not measured; cold, whether compile_s is of runs that found
    nothing compiled; minutes of training and compilation. Data and scoring are not counted. Raises NotMeasured.
    """
    if len(lines) and lines["task.name"].iloc[0] != "qa":
        raise NotMeasured("the projection is to SQuAD v2's training questions, and this is another task")
    part = usual(lines)
    part = part[(part["micro_batch"] == PROJECTED) & part["samples_per_s"].notna()].set_index("variant")
    if load.baseline(lines) not in part.index:
        raise NotMeasured(f"the baseline has no measured speed at micro-batch {PROJECTED} to project from")
    part = part.loc[[name for name in variants or tagged("headline") if name in part.index]]
    cold = part["compile_s"].astype(float)
    eager = pd.Series([VARIANTS[name].settings.compile == "none" for name in part.index], part.index)
    compile_s = cold.fillna(part["warm_compile_s"].astype(float)).mask(eager, 0.0)
    table = pd.DataFrame({"speed": part["samples_per_s"], "compile_s": compile_s, "cold": eager | cold.notna()})
    table["minutes"] = (load.FULL_SAMPLES * load.FULL_EPOCHS / table["speed"] + compile_s.fillna(0.0)) / 60
    return table


def worth(judged: pd.DataFrame) -> pd.DataFrame:
    """What each variant's score is worth: columns text, the difference to the baseline's at threshold 0 or the best
    one, whichever is worse in the mean, and lost, the points of that. Empty where it was not measured."""
    try:
        tested = equivalence(usual(judged))
    except NotMeasured:
        return pd.DataFrame(columns=["text", "lost"], dtype=object)
    best_worse = tested["best_delta"] < tested["delta"]
    delta = tested["delta"].mask(best_worse, tested["best_delta"])
    half = tested["delta±"].mask(best_worse, tested["best_delta±"])
    text = [f"{gain(*values)} (n = {n})" for *values, n in zip(delta, half, tested["n"], strict=True)]
    found = pd.DataFrame({"text": text, "lost": -delta}, tested.index)
    found.loc[BASELINE] = (gain(0.0), 0.0)
    return found


def best_first(runs: pd.DataFrame, f1: pd.DataFrame) -> pd.DataFrame:
    """Variants of the kinds in ALLOWED at each micro-batch, the one to prefer first: variant, micro_batch, speed
    (samples/s, the mean of all seeds), reserved (MiB, the most of them), kind, doubt (0: keeps its score, 1: not
    known, 2: does not).

    Full fine-tunes stand before adapters. Among either the quickest is preferred; then those of unknown score; last
    those that lost more than ALLOWED in the mean, the least lossy of them first. `f1` by worth(). Raises NotMeasured.
    """
    runs = usual(runs)
    runs = runs[runs["status"] == "ok"]
    values = numbers(runs, {"speed": "speed.samples_per_s", "reserved": "memory.peak_reserved_mib"}).dropna()
    if values.empty:
        raise NotMeasured("no run of this group has both GPU memory and speed, so none can be recommended")
    found = values.join(runs[["spec.variant", "micro_batch"]]).rename(columns={"spec.variant": "variant"})
    found = found.groupby(["variant", "micro_batch"]).agg({"speed": "mean", "reserved": "max"}).reset_index()
    found["kind"] = found["variant"].map(lambda name: find_recipe(VARIANTS[name].settings.trainable).kind)
    found = found[found["kind"].isin(ALLOWED)]
    lost = found["variant"].map(f1["lost"]).astype(float)
    lossy = lost > found["kind"].map(ALLOWED)
    found = found.assign(doubt=lost.isna() + 2 * lossy, merit=found["speed"].where(~lossy, -lost))
    return found.sort_values(["kind", "doubt", "merit", "speed"], ascending=[True, True, False, False])


def runs_on(variant: str, sm: int) -> bool:
    """Whether a GPU of this compute capability (x 10) has the kernels that a variant asks for."""
    gpu = Machine(gpus=1, sm=sm, backends=choices()["compile"], bitsandbytes=True, compiler=True)
    return missing(VARIANTS[variant].settings, gpu) is None


def quickest_on(ranked: pd.DataFrame, gib: float, sm: int):
    """The first of `best_first` that fits into so much memory and runs on that capability, or the recommended variant
    where that is as quick, as far as can be told; None where none does."""
    fits = ranked["reserved"] / 1024 + CONTEXT_GIB <= gib
    ranked = ranked[fits & ranked["variant"].map(lambda name: runs_on(name, sm))]
    close = (ranked["variant"] == RECOMMENDED) & (ranked["speed"] > (1 - SCATTER) * ranked["speed"].iloc[:1].max())
    return next(pd.concat([ranked[close], ranked]).itertuples(), None)


def generation_table(runs: pd.DataFrame, judged: pd.DataFrame) -> pd.DataFrame:
    """For each of SIZES_GIB and GENERATIONS the variant to take, an adapter where no full fine-tune fits; without sizes
    at which nothing changes. Speeds are those of the GPU that ran them. Raises NotMeasured."""
    ranked = best_first(runs, worth(judged))
    lines = []
    for size in SIZES_GIB:
        found = {cards: quickest_on(ranked, size, sm) for sm, cards in GENERATIONS.items()}
        texts = {cards: f"{one.variant} at {one.micro_batch}" if one else MISSING for cards, one in found.items()}
        lines.append({"you have at least": f"{size:g} GiB"} | texts)
    table = pd.DataFrame(lines).drop_duplicates(list(GENERATIONS.values()))
    return table[(table[list(GENERATIONS.values())] != MISSING).any(axis=1)]


def best_for(runs: pd.DataFrame, group: str, gib: float, sm: int):
    """The variant to take on a card, by the records of a group: a line of `best_first`. Raises NotMeasured."""
    found = quickest_on(best_first(select(runs, group), worth(load.judging(runs, group))), gib, sm)
    if found is None:
        raise NotMeasured(f"no variant is known to fit {gib:.3g} GiB")
    return found


def estimated_minutes(runs: pd.DataFrame, group: str, variant: str, card: str, sm: int) -> float:
    """Minutes of the full training on a card that has run nothing, if a variant kept its share of the data sheet's peak
    there; without compilation. By its best speed in a search with the kernels of that compute capability (x 10), or
    where there was none, in the group. `runs` are all records. Raises NotMeasured."""
    own, near = select(runs, group), load.neighbours(runs, group)
    measured_on = own["env.gpu"].iloc[0]
    if absent := {measured_on, card} - DATA_SHEET_TFLOPS.keys():
        raise NotMeasured(f"no data sheet is known of {', '.join(map(str, sorted(absent, key=str)))}")
    tries = near[(near["spec.search"] == "max-batch") & (near["spec.sm"] == sm) & (near["spec.variant"] == variant)]
    speed = tries["speed.samples_per_s"].astype(float).max()
    if math.isnan(speed):
        speed = projected(summary(own), [variant])["speed"].get(variant)
    if speed is None:
        raise NotMeasured(f"{variant} has no measured speed")
    there = speed * DATA_SHEET_TFLOPS[card] / DATA_SHEET_TFLOPS[measured_on]
    return load.FULL_SAMPLES * load.FULL_EPOCHS / there / 60


def advice(env: dict, runs: str = "runs") -> str:
    """As Markdown: which card this is, which variant to take on it, and about how long three epochs take; by the
    reference group's records below `runs`. `env` is a record's."""
    if not env["gpu"]:
        return say("no_gpu")
    gib, gpu = env["gpu_mem_mib"] / 1024, env["gpu"]
    try:
        every = load.load_runs(runs)
        found = best_for(every, REFERENCE, gib, env["sm"])
    except ReportError as reason:
        return f"**This card:** {gpu}, {gib:.1f} GiB. Which variant suits it is not known: {reason}."
    said = say("advice", gpu=gpu, gib=gib, variant=found.variant, size=found.micro_batch)
    try:
        own = select(every, REFERENCE)
        if own["env.gpu"].iloc[0] == gpu:
            minutes = projected(summary(own), [found.variant])["minutes"].get(found.variant)
            basis = "projected from its measured speed"
        else:
            minutes = estimated_minutes(every, REFERENCE, found.variant, gpu, env["sm"])
            basis = "an estimate from the data sheets of this card and of the one that was measured"
    except NotMeasured:
        return f"{said} How long it takes on such a card is not known."
    return f"{said} {say('takes', minutes=f'{minutes:.{0 if minutes > 9.5 else 1}f}', basis=basis)}"
