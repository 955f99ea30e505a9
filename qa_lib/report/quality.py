"""Whether rows keep the baseline's quality, how long that takes, and which tries led to the learning rates.

`runs` are those of one group at a scale that measures quality, as record.load_runs() gives them.
"""

import math

import pandas as pd

from qa_lib.report import tables
from qa_lib.report.tables import BASELINE, MISSING, NotMeasured, number, points
from qa_lib.spec import SCALES
from qa_lib.variants import VARIANTS, find_recipe

MARGIN = 1.0  # points of F1 within which a row counts as good as the baseline
FAULTY = {name for name, row in VARIANTS.items() if row.settings.join != "id"}
VERDICTS = {"beyond": "no", "open": "cannot be told", "no worse": "no worse, perhaps better", "within": "yes"}
METRICS = ("quality.f1", "quality.best_f1")  # at threshold 0, and at the best one
FULL_FEATURES, FULL_EPOCHS = 131_754, 3  # of all of SQuAD v2's training questions at 384/128, and the seeds' epochs
PROJECTED = 32  # micro-batch
TIMED = ("A0", "A1", "A4", "E-best")


def quality_runs(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Of all records, those that say what the rows of a group are worth: of scale `quality` on the same hardware, or
    else the group's own."""
    found = tables.sibling(runs, group, "quality")
    return tables.select(runs, group) if found.empty else found


def tries_of(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Of all records, the tries of `python -m qa_lib tune` on the hardware of a group."""
    return runs[runs["group"] == f"{group.rsplit('-', 1)[0]}-tune"]


def differences(runs: pd.DataFrame, variant: str, base: str = BASELINE, column: str = "quality.f1") -> pd.Series:
    """F1 of a row minus another's, for each seed that both have. Raises NotMeasured where there is none."""
    scored = runs[(runs["status"] == "ok") & runs[column].notna()]
    # A seed may have run at several micro-batches, of one effective batch.
    rows = scored[column].astype(float).groupby([scored["spec.variant"], scored["spec.seed"]]).mean()
    if absent := [name for name in (variant, base) if name not in rows]:
        raise NotMeasured(f"{absent[0]} has no F1")
    found = (rows[variant] - rows[base]).dropna()
    if found.empty:
        raise NotMeasured(f"{variant} and {base} have no seed in common")
    return found


def compare(runs: pd.DataFrame, variant: str, base: str = BASELINE) -> tuple[float, float]:
    """The mean of `differences` and half its t-based 90 % interval, NaN below three seeds."""
    return _mean(differences(runs, variant, base))


def _mean(found: pd.Series) -> tuple[float, float]:
    return float(found.mean()), float(tables.interval(found, 90))


def verdict(difference: tuple[float, float]) -> str:
    """Two one-sided t-tests at 5 % each (Schuirmann 1987): "within" where the whole interval lies inside ± MARGIN, "no
    worse" where it lies above the lower bound, "beyond" where it lies below it, else "open", as without an interval."""
    delta, half = difference
    if delta + half < -MARGIN:
        return "beyond"
    return "open" if not delta - half > -MARGIN else "within" if delta + half < MARGIN else "no worse"


def equivalence(runs: pd.DataFrame) -> pd.DataFrame:
    """Each row's F1 against the baseline's, in table order: variant, n (seeds that both have); delta, half at threshold
    0; best_delta, best_half at the best one; verdict.

    The verdict is on both, since a model that never answers can have a passable F1 at threshold 0. A row with a fault
    in its scoring (A4-b) is no training of its own and left out. Raises NotMeasured where no row has an interval.
    """
    scored = set(runs.loc[(runs["status"] == "ok") & runs["quality.f1"].notna(), "spec.variant"])
    if BASELINE not in scored:
        raise NotMeasured(f"{BASELINE} has no F1")
    lines = []
    for name in (name for name in VARIANTS if name in scored - FAULTY - {BASELINE}):
        try:
            found = [differences(runs, name, column=column) for column in METRICS]
        except NotMeasured:  # no seed in common
            continue
        both = [_mean(part) for part in found]
        told = {verdict(difference) for difference in both}
        line = {"variant": name, "n": len(found[0])}
        line |= dict(zip(("delta", "half", "best_delta", "best_half"), (*both[0], *both[1]), strict=True))
        lines.append(line | {"verdict": next(v for v in VERDICTS if v in told)})
    table = pd.DataFrame(lines)
    if table.empty or table["half"].isna().all():
        raise NotMeasured(f"no row has an F1 of three seeds in common with {BASELINE}, which an interval takes")
    return table


def as_text(tested: pd.DataFrame, at: str = "") -> pd.Series:
    """The differences of `equivalence` by variant, at threshold 0 or, `at` being "best_", at the best one."""
    numbers = tested[["variant", f"{at}delta", f"{at}half"]].itertuples(index=False)
    return pd.Series({name: points(delta, half, "+") for name, delta, half in numbers}, dtype=object)


def equivalence_finding(table: pd.DataFrame) -> str:
    """Which rows of `equivalence` are shown to be as good as the baseline, and which are not."""
    rows = table.dropna(subset="half").set_index("variant")
    named = {told: ", ".join(rows.index[rows["verdict"] == told]) for told in VERDICTS}
    shown = rows[rows["verdict"].isin(["within", "no worse"])]["n"]
    seeds = "–".join(map(str, sorted({shown.min(), shown.max()}))) + " seeds" if len(shown) else "three seeds or more"
    return (
        f"Within {MARGIN:g} F1 of {BASELINE} at threshold 0 and at the best one, each shown by a 90 % interval over "
        f"{seeds}: {named['within'] or 'no row yet'}"
        + f"; no worse, perhaps better: {named['no worse']}" * bool(named["no worse"])
        + f"; cannot be told: {named['open']}" * bool(named["open"])
        + f"; worse at one or both: {named['beyond'] or 'none'}"
    )


def equivalence_table(runs: pd.DataFrame) -> pd.DataFrame:
    """`equivalence` as text, with the scores by kind of question beside it."""
    tested = equivalence(runs)
    told = {f"ΔF1 vs {BASELINE}": as_text(tested), "at best threshold: ΔF1": as_text(tested, "best_")}
    told[f"within {MARGIN:g} F1"] = tested.set_index("variant")["verdict"].map(VERDICTS)
    done = runs[runs["status"] == "ok"].groupby("spec.variant")
    columns = {"exact": "exact", "F1": "f1", "F1 at best threshold": "best_f1", "HasAns F1": "has_answer_f1",
               "NoAns F1": "no_answer_f1"}  # fmt: skip
    lines = []
    for name in (name for name in VARIANTS if name in done.groups):
        part = done.get_group(name)
        line = {"row": name, "what it changes": tables.change(name), "n": str(len(part))}
        line |= {head: points(part[f"quality.{key}"].astype(float).mean()) for head, key in columns.items()}
        lines.append(line | {head: texts.get(name, MISSING) for head, texts in told.items()})
    null = points(runs["quality.always_null_f1"].astype(float).mean())
    blank = dict.fromkeys(lines[0], MISSING) | {"row": "none", "what it changes": "never answers", "F1": null}
    return pd.DataFrame([blank | {"F1 at best threshold": null}, *lines])


def time_to_quality(runs: pd.DataFrame) -> pd.DataFrame:
    """Seconds from raw JSON to a scored model, of runs that had a GPU to themselves and found no compiled code.

    Raises NotMeasured.
    """
    whole = runs[(runs["status"] == "ok") & runs["time.eval_s"].notna() & runs["time.resumed_from_step"].isna()]
    if "time.compile_cached" in whole:
        whole = whole[~whole["time.compile_cached"].eq(True)]
    whole = whole[whole["spec.variant"].isin(TIMED)].drop_duplicates("spec.variant")
    if whole.empty:
        raise NotMeasured(f"none of {', '.join(TIMED)} was timed from beginning to end in this group")
    lines = []
    for run in sorted(whole.to_dict("records"), key=lambda run: TIMED.index(run["spec.variant"])):
        compile_s = run["time.compile_s"] if pd.notna(run["time.compile_s"]) else 0.0
        parts = {
            "features and model": run["time.prepare_s"],
            "compile": compile_s,
            "train": run["time.train_s"] - compile_s,
            "answer and score": run["time.eval_s"],
            "in all": run["time.wall_s"],
        }
        line = {"row": run["spec.variant"]} | {f"{name}, s": number(value) for name, value in parts.items()}
        lines.append(line | {"F1 of this run": points(run["quality.f1"])})
    return pd.DataFrame(lines)


def projection(lines: pd.DataFrame) -> pd.DataFrame:
    """Training time on the full data set from a bench group's speeds, with the arithmetic; data and scoring are not
    part of that scale. `lines` of tables.summarise. Raises NotMeasured."""
    part = lines[(lines["micro_batch"] == PROJECTED) & lines["features_per_s"].notna()].set_index("variant")
    rows = [name for name in TIMED if name in part.index and BASELINE in part.index]
    if not rows:
        raise NotMeasured(f"no row has a measured speed at micro-batch {PROJECTED} to project from")
    features, table = FULL_FEATURES * FULL_EPOCHS, []
    for name in rows:
        speed, compile_s = part.loc[name, ["features_per_s", "compile_s"]].fillna(0.0)
        unknown = not compile_s and VARIANTS[name].settings.compile != "none"
        seconds = features / speed + compile_s
        table.append({
            "row": name,
            "arithmetic": f"{FULL_FEATURES:,} × {FULL_EPOCHS} ÷ {number(speed)}/s"
                          + (f" + {number(compile_s)} s" if compile_s else " + compilation, not measured" * unknown),
            "minutes": number(seconds / 60),
            "of A1's time": tables.share(seconds * part.loc[BASELINE, "features_per_s"] / features),
        })  # fmt: skip
    return pd.DataFrame(table)


def tries_table(runs: pd.DataFrame, quality: pd.DataFrame) -> pd.DataFrame:
    """The points of `python -m qa_lib tune`, the best of each row first by the last difference.

    Points may have been tried with different seeds, so each is compared with the baseline's runs of its own seeds at
    the rate of scale `quality`, be they tries too or in `quality`. Raises NotMeasured.
    """
    runs = runs[runs["quality.f1"].notna()]
    if runs.empty:
        raise NotMeasured("no try of python -m qa_lib tune has an F1 on this hardware")
    rates = [f"{rate * find_recipe(name).lr_factor:g}" for rate, name in
             zip(runs["spec.scale.learning_rate"], runs["spec.settings.trainable"], strict=True)]  # fmt: skip
    default = (runs["spec.scale.learning_rate"] == SCALES["quality"].learning_rate) & (
        runs["spec.settings.trainable"] == VARIANTS[BASELINE].settings.trainable
    )
    base = pd.concat([part[part["spec.variant"] == BASELINE] for part in (quality, runs[default])])
    base = base.drop_duplicates("spec.seed")
    lines = []
    point = ["spec.variant", "spec.settings.trainable", "rate"]
    runs = runs.assign(rate=rates).sort_values("time.started").drop_duplicates([*point, "spec.seed"], keep="last")
    for (row, trainable, rate), part in runs.groupby(point):
        part = part.sort_values("spec.seed")
        line = {"row": row, "trainable": trainable, "learning rate": rate}
        for head, column in zip(("F1", "F1 at best threshold"), METRICS, strict=True):
            line[head] = points(part[column].astype(float).mean())
        both = pd.concat([part.assign(**{"spec.variant": "try"}), base])
        for head, column in zip((f"ΔF1 vs {BASELINE}", "at best threshold: ΔF1"), METRICS, strict=True):
            try:
                found = _mean(differences(both, "try", column=column))
            except NotMeasured:  # the baseline has none of these seeds
                found = math.nan, math.nan
            line |= {head: points(*found, "+"), "merit": found[0]}
        lines.append(line | {"seeds": " · ".join(map(str, part["spec.seed"]))})
    table = pd.DataFrame(lines).sort_values(["row", "merit"], ascending=[True, False]).reset_index(drop=True)
    return table.drop(columns="merit")
