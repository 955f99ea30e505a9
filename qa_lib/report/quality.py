"""Whether rows keep the baseline's quality, how long that takes, and which tries led to the learning rates.

`runs` are those of one group at a preset that measures quality. A difference that is not significant is no evidence of
equality. So equality is tested as such: by two one-sided t-tests (Schuirmann 1987) over the differences between runs of
equal seeds, which come to whether their 90 % interval lies within a margin.
"""

import math

import numpy as np
import pandas as pd

from qa_lib.presets import PRESETS
from qa_lib.report.runs import (
    BASELINE,
    RECOMMENDED,
    NotMeasured,
    beside_baseline,
    found_compiled,
    in_cells,
    neighbours,
    score_name,
    select,
    sibling,
    usual,
)
from qa_lib.report.tables import interval, summarise
from qa_lib.report.text import MISSING, gain, number, points, share
from qa_lib.variants import VARIANTS, find_recipe

MARGIN = 1.0  # points of F1 within which a row counts as good as the baseline
FAULTY = {name for name, row in VARIANTS.items() if row.settings.fault == "positional-join"}
VERDICTS = {"beyond": "✗", "open": "?", "no worse": "✓+", "within": "✓"}
HEADS = {"F1": "quality.f1", "F1 at best threshold": "quality.best_f1"}
METRICS = tuple(HEADS.values())  # at threshold 0, and at the best one
FULL_FEATURES, FULL_EPOCHS = 131_754, 3  # of all of SQuAD v2's training questions at 384/128, and the seeds' epochs
PROJECTED = 32  # micro-batch
COMPARED = 200  # steps whose losses stand beside those of another row
TIMED = ("A0", "A0-compile", "A1", "A4", "E-dropout", RECOMMENDED)


def quality_runs(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Of all records, those that say what the rows of a group are worth: of preset `quality` on the same hardware, or
    else the group's own."""
    found = sibling(runs, group, "quality")
    return select(runs, group) if found.empty else found


def tries_of(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Of all records, the tries of `python -m qa_lib tune` on the hardware of a group."""
    found = neighbours(runs, group)
    return found[found["spec.search"] == "tune"]


def require_answers(table: pd.DataFrame) -> None:
    """Raises NotMeasured for runs or lines of another task than question answering, for whose F1 the margin is."""
    if len(table) and table["task.name"].iloc[0] != "qa":
        raise NotMeasured(f"no margin of {score_name(table)} is set within which rows count as equal")


def by_seed(runs: pd.DataFrame, column: str = METRICS[0]) -> pd.DataFrame:
    """F1 of the runs that ended ok: a line for each seed, a column for each row that has any."""
    scored = runs[(runs["status"] == "ok") & runs[column].notna()]
    # A seed may have run at several micro-batches, of one effective batch.
    return scored[column].astype(float).groupby([scored["spec.seed"], scored["spec.variant"]]).mean().unstack()


def differences(runs: pd.DataFrame, variant: str, base: str = BASELINE, column: str = METRICS[0]) -> pd.Series:
    """F1 of a row minus another's, for each seed that both have. Raises NotMeasured where there is none."""
    rows = by_seed(runs, column)
    if absent := [name for name in (variant, base) if name not in rows]:
        raise NotMeasured(f"{absent[0]} has no F1")
    found = (rows[variant] - rows[base]).dropna()
    if found.empty:
        raise NotMeasured(f"{variant} and {base} have no seed in common")
    return found


def compare(runs: pd.DataFrame, variant: str, base: str = BASELINE, column: str = METRICS[0]) -> tuple[float, float]:
    """The mean of `differences` and half its t-based 90 % interval, NaN below three seeds."""
    found = differences(runs, variant, base, column)
    return float(found.mean()), float(interval(found))


def verdict(difference: tuple[float, float]) -> str:
    """What an interval says: "within" where all of it lies inside ± MARGIN, "no worse" where it lies above the lower
    bound, "beyond" where it lies below it, else "open", as without an interval."""
    delta, half = difference
    if delta + half < -MARGIN:
        return "beyond"
    if not delta - half > -MARGIN:
        return "open"
    return "within" if delta + half < MARGIN else "no worse"


def equivalence(runs: pd.DataFrame) -> pd.DataFrame:
    """Each row's F1 against the baseline's, in table order: variant, n (seeds that both have); delta, half at threshold
    0; best_delta, best_half at the best one; verdict. `runs` are alike in all axes but the micro-batch.

    The verdict is on both, since a model that never answers can have a passable F1 at threshold 0. A row with a fault
    in its scoring (A4-b) is no training of its own and left out. Raises NotMeasured where no row has an interval.
    """
    require_answers(runs)
    columns = {}
    for at, column in zip(("", "best_"), METRICS, strict=True):
        rows = by_seed(runs, column)
        if BASELINE not in rows:
            raise NotMeasured(f"{BASELINE} has no F1")
        found = rows.sub(rows[BASELINE], axis="index")
        columns |= {f"{at}n": found.count(), f"{at}delta": found.mean(), f"{at}half": interval(found)}
    table = pd.DataFrame(columns).query("n > 0 and best_n > 0")
    table = table.loc[[name for name in VARIANTS if name in table.index and name not in FAULTY | {BASELINE}]]
    told = []
    for row in table.itertuples():
        both = {verdict((row.delta, row.half)), verdict((row.best_delta, row.best_half))}
        told.append(next(word for word in VERDICTS if word in both))
    table = table.drop(columns="best_n").assign(verdict=told).rename_axis("variant").reset_index()
    if table["half"].isna().all():
        raise NotMeasured(f"no row has an F1 of three seeds in common with {BASELINE}, which an interval takes")
    return table


def as_text(tested: pd.DataFrame, at: str = "") -> pd.Series:
    """The differences of `equivalence` by variant, at threshold 0 or, `at` being "best_", at the best one."""
    return tested.set_index("variant").apply(lambda row: gain(row[f"{at}delta"], row[f"{at}half"]), axis=1)


def equivalence_table(runs: pd.DataFrame) -> pd.DataFrame:
    """`equivalence` as text, with the scores by kind of question beside it; cell by cell."""
    tables = in_cells(beside_baseline(runs).drop(columns="micro_batch"), _equivalence_table)
    for label, table in tables:
        table["row"] = [", ".join(filter(None, [name, label])) for name in table["row"]]
    return pd.concat([table for _, table in tables])


def _equivalence_table(runs: pd.DataFrame) -> pd.DataFrame:
    tested = equivalence(runs)
    done = runs[runs["status"] == "ok"].groupby("spec.variant")
    rows = [name for name in VARIANTS if name in done.groups]
    table = pd.DataFrame({"n": done.size()[rows].astype(str)})
    for head, column in (HEADS | {"HasAns F1": "quality.has_answer_f1", "NoAns F1": "quality.no_answer_f1"}).items():
        table[head] = done[column].mean().map(points)
    table[f"ΔF1 vs {BASELINE}"] = as_text(tested)
    table["at best threshold: ΔF1"] = as_text(tested, "best_")
    table[f"within {MARGIN:g} F1"] = tested.set_index("variant")["verdict"].map(VERDICTS)
    null = points(runs["quality.always_null_f1"].astype(float).mean())
    never = pd.DataFrame(dict.fromkeys(HEADS, null), index=["never answers"])
    return pd.concat([never, table])[list(table)].fillna(MISSING).rename_axis("row").reset_index()


def largest_batch(table: pd.DataFrame) -> pd.DataFrame:
    """Of runs or lines, those of the usual conditions at the largest micro-batch, which keeps the GPU busiest."""
    table = usual(table)
    return table[table["micro_batch"] == table["micro_batch"].max()]


def overview(runs: pd.DataFrame, judged: pd.DataFrame) -> pd.DataFrame:
    """Rows of a group at its largest micro-batch as text: what they change, speed, memory (the most of all seeds), and
    by the runs `judged` the score at the best threshold against the baseline's.

    Where such scores are known, these are the rows of three seeds or more, the baseline and transformers.Trainer's.
    """
    lines = largest_batch(summarise(runs)).set_index("variant")
    reserved = largest_batch(runs).groupby("spec.variant")["memory.peak_reserved_mib"].max().astype(float) / 1024
    table = lines[["change"]].set_axis(["what it changes"], axis="columns")
    table["n"] = lines["n"].astype(str)
    table["features/s"] = list(map(number, lines["samples_per_s"], lines["samples_per_s±"]))
    table[f"× {BASELINE}"] = lines["ratio"].map(number)
    table["GiB reserved"] = reserved.map(number)
    try:
        tested = equivalence(usual(judged)).dropna(subset="half")
    except NotMeasured:  # the columns are left out, and the table of quality says why
        pass
    else:
        table[f"Δ{score_name(judged)}"] = as_text(tested, "best_")
        table[f"within {MARGIN:g} F1"] = tested.set_index("variant")["verdict"].map(VERDICTS)
        trainer = [name for name, row in VARIANTS.items() if row.settings.engine == "trainer"]
        table = table[table.index.isin([BASELINE, *trainer, *tested["variant"]])]
    table = table.fillna(MISSING).rename_axis("row").reset_index()
    return table.loc[:, (table != MISSING).any()]


def time_to_quality(runs: pd.DataFrame) -> pd.DataFrame:
    """Seconds from raw data to a scored model, without the imports of their process, of runs that had a GPU to
    themselves and found no compiled code.

    Raises NotMeasured.
    """
    runs = usual(runs)
    whole = runs[(runs["status"] == "ok") & runs["time.eval_s"].notna() & runs["time.resumed_from_step"].isna()]
    whole = whole[~found_compiled(whole)].drop_duplicates("spec.variant").set_index("spec.variant")
    whole = whole.loc[[name for name in TIMED if name in whole.index]]
    if whole.empty:
        raise NotMeasured(f"none of {', '.join(TIMED)} was timed from beginning to end in this group")
    compile_s = whole["time.compile_s"].astype(float).fillna(0.0)
    seconds = {
        "features and model, s": whole["time.prepare_s"],
        "compile, s": compile_s,
        "train, s": whole["time.train_s"] - compile_s,
        "answer and score, s": whole["time.eval_s"],
        "in all but imports, s": whole["time.wall_s"],
    }
    table = pd.DataFrame(seconds).astype(float).map(number)
    table[f"{score_name(whole)} of this run"] = whole[f"quality.{whole['task.metric'].iloc[0]}"].map(points)
    return table.rename_axis("row").reset_index()


def projected(lines: pd.DataFrame, rows=TIMED) -> pd.DataFrame:
    """Minutes of training on the full data set at a bench group's speeds, a line for each of `rows` that has one.

    Columns: speed (features/s); compile_s, NaN where it was not measured; cold, whether compile_s is of runs that found
    nothing compiled; minutes of training and compilation. Data and scoring are not part of that preset. `lines` of
    tables.summarise. Raises NotMeasured.
    """
    if lines["task.name"].iloc[0] != "qa":
        raise NotMeasured("the projection is to SQuAD v2's training questions, and this is another task")
    part = usual(lines)
    part = part[(part["micro_batch"] == PROJECTED) & part["samples_per_s"].notna()].set_index("variant")
    if BASELINE not in part.index:
        raise NotMeasured(f"no row has a measured speed at micro-batch {PROJECTED} to project from")
    part = part.loc[[name for name in rows if name in part.index]]
    cold = part["compile_s"].astype(float)
    eager = pd.Series([VARIANTS[name].settings.compile == "none" for name in part.index], part.index)
    compile_s = cold.fillna(part["warm_compile_s"].astype(float)).mask(eager, 0.0)
    table = pd.DataFrame({"speed": part["samples_per_s"], "compile_s": compile_s, "cold": eager | cold.notna()})
    table["minutes"] = (FULL_FEATURES * FULL_EPOCHS / table["speed"] + compile_s.fillna(0.0)) / 60
    return table


def projection(lines: pd.DataFrame) -> pd.DataFrame:
    """`projected` as text, with the arithmetic. Raises NotMeasured."""
    found, table = projected(lines), []
    for row in found.itertuples():
        arithmetic = f"{FULL_FEATURES:,} × {FULL_EPOCHS} ÷ {number(row.speed)}/s"
        if pd.isna(row.compile_s):
            arithmetic += " + compilation, not measured"
        elif row.compile_s:
            arithmetic += f" + {number(row.compile_s)} s" + ("" if row.cold else ", a part of the code from a cache")
        of_base = share(row.minutes / found.loc[BASELINE, "minutes"])
        table.append((row.Index, arithmetic, number(row.minutes), of_base))
    return pd.DataFrame(table, columns=["row", "arithmetic", "minutes", f"of {BASELINE}'s time"])


def losses_table(runs: pd.DataFrame) -> pd.DataFrame:
    """The first COMPARED training losses of each row beside those of the row it was made from, of equal seeds, at the
    largest micro-batch: as text, the means of both, and the mean of what they differ by step by step.

    Raises NotMeasured where no row has such a log beside that of the row it was made from, and RecordError for a log
    that is broken.
    """
    found = largest_batch(runs)
    logs = {
        (run["spec.variant"], run["spec.seed"]): log["loss"].iloc[:COMPARED].to_numpy()
        for run in found[found["status"] == "ok"].to_dict("records")
        if len(log := run["run"].steps().dropna(subset="loss")) >= COMPARED
    }
    lines = []
    for name, row in VARIANTS.items():
        seeds = [seed for variant, seed in logs if variant == name and (row.parent, seed) in logs]
        if seeds:
            own, before = (np.array([logs[of, seed] for seed in seeds]) for of in (name, row.parent))
            losses = [f"{value:.4f}" for value in (own.mean(), before.mean(), np.abs(own - before).mean())]
            lines.append((name, row.parent, str(len(seeds)), *losses))
    if not lines:
        raise NotMeasured(f"no row has a log of {COMPARED} steps beside that of the row it was made from")
    columns = ["row", "made from", "n", "mean loss", "mean loss before", "mean difference of a step"]
    return pd.DataFrame(lines, columns=columns)


def tries_table(runs: pd.DataFrame, quality: pd.DataFrame) -> pd.DataFrame:
    """The points of `python -m qa_lib tune`, the best of each row first by the last difference.

    Points may have been tried with different seeds, so each is compared with the baseline's runs of its own seeds at
    the rate of preset `quality`, be they tries too or in `quality`. Raises NotMeasured.
    """
    require_answers(runs)
    runs, quality = usual(runs), usual(quality)
    runs = runs[runs[METRICS[0]].notna()] if len(runs) else runs
    if runs.empty:
        raise NotMeasured("no try of python -m qa_lib tune has an F1 on this hardware")
    rate, trainable = runs["spec.preset.learning_rate"], runs["spec.settings.trainable"]
    factors = trainable.map(lambda name: find_recipe(name).lr_factor)
    runs = runs.assign(rate=(rate * factors).map("{:g}".format)).sort_values("time.started")
    default = (rate == PRESETS["quality"].learning_rate) & (trainable == VARIANTS[BASELINE].settings.trainable)
    base = pd.concat([quality, runs[default]]).query(f"`spec.variant` == '{BASELINE}'").drop_duplicates("spec.seed")
    lines = []
    point = ["spec.variant", "spec.settings.trainable", "rate"]
    for names, part in runs.drop_duplicates([*point, "spec.seed"], keep="last").groupby(point):
        line = dict(zip(("row", "trainable", "learning rate"), names, strict=True))
        line |= {head: points(part[column].astype(float).mean()) for head, column in HEADS.items()}
        both = pd.concat([part.assign(**{"spec.variant": "try"}), base])
        for head, column in zip((f"ΔF1 vs {BASELINE}", "at best threshold: ΔF1"), METRICS, strict=True):
            try:
                found = compare(both, "try", column=column)
            except NotMeasured:  # the baseline has none of these seeds
                found = math.nan, math.nan
            line |= {head: gain(*found), "merit": found[0]}
        lines.append(line | {"seeds": " · ".join(map(str, sorted(part["spec.seed"])))})
    table = pd.DataFrame(lines).sort_values(["row", "merit"], ascending=[True, False])
    return table.drop(columns="merit").reset_index(drop=True)
