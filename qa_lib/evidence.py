"""Whether rows keep the baseline's quality, how long that takes, and which tries led to the learning rates.

`runs` are those of one group at a scale that measures quality, as record.load_runs() gives them.
"""

import math

import numpy as np
import pandas as pd

from qa_lib import tables
from qa_lib.tables import BASELINE, MISSING, NotMeasured, number, points
from qa_lib.variants import VARIANTS, find_recipe

MARGIN = 1.0  # points of F1 within which a row counts as good as the baseline
FAULTY = {name for name, row in VARIANTS.items() if row.settings.join != "id"}
# Student's t at 95 % for 4, 5, ... 30 degrees of freedom (any table of the distribution); more use the last one.
T_95 = (2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734,
        1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697)  # fmt: skip
METRICS = ("quality.f1", "quality.best_f1")  # at threshold 0, and at the best one
FULL_FEATURES, FULL_EPOCHS = 131_754, 3  # of all of SQuAD v2's training questions at 384/128, and the seeds' epochs
TIMED = ("A0", "A1", "A4", "E-best")


def quality_runs(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Of all records, those that say what the rows of a group are worth: of scale `quality` on the same hardware, or
    else the group's own."""
    found = tables.sibling(runs, group, "quality")
    return tables.select(runs, group) if found.empty else found


class Scores:
    """F1 as the sum of a row's part, a seed's part and noise, fitted by least squares: a randomised block design.

    A seed sets the new answer head and the order of the data, and is assumed to move all rows alike. The noise is
    pooled over the rows given, since a few seeds tell little about one row's own. With the same seeds in every row, a
    difference is the mean of those of equal seeds. Rows with a fault in their scoring (A4-b) are left out: they are no
    trainings of their own.
    """

    def __init__(self, runs: pd.DataFrame, column: str = "quality.f1"):
        """Raises NotMeasured where too few runs are repeated to tell the noise."""
        runs = runs[(runs["status"] == "ok") & runs[column].notna() & ~runs["spec.variant"].isin(FAULTY)]
        self.rows = {name: part[column].astype(float) for name, part in runs.groupby("spec.variant")}
        self._place = {name: place for place, name in enumerate(self.rows)}
        seeds = pd.get_dummies(runs["spec.seed"], drop_first=True)
        design = np.hstack([pd.get_dummies(runs["spec.variant"])[list(self.rows)], seeds]).astype(float)
        values = runs[column].to_numpy(float)
        freedom = len(runs) - int(np.linalg.matrix_rank(design)) if len(runs) else 0
        if freedom < 4:
            raise NotMeasured("too few rows have an F1 of several seeds to tell its spread")
        self._gram = design.T @ design
        self._inverse = np.linalg.pinv(self._gram)
        self._parts = self._inverse @ design.T @ values
        self.noise = math.sqrt(((values - design @ self._parts) ** 2).sum() / freedom)
        self.t = T_95[min(freedom - 4, len(T_95) - 1)]

    def difference(self, variant: str, base: str = BASELINE) -> tuple[float, float]:
        """F1 of a row minus another's, and half the 90 % interval. Raises NotMeasured for a row without F1."""
        contrast = np.zeros(len(self._parts))
        for name, sign in ((variant, 1.0), (base, -1.0)):
            if name not in self.rows:
                raise NotMeasured(f"{name} has no F1")
            contrast[self._place[name]] += sign
        if not np.allclose(contrast @ self._inverse @ self._gram, contrast):
            raise NotMeasured(f"{variant} and {base} share no seed, directly or through other rows")
        return float(contrast @ self._parts), self.t * self.noise * math.sqrt(contrast @ self._inverse @ contrast)


def compare(runs: pd.DataFrame, variant: str, base: str = BASELINE, column: str = "quality.f1") -> tuple[float, float]:
    """F1 of a row minus another's, and half the 90 % interval, its noise pooled over rows of its kind: those that train
    a part of the model vary more than full fine-tunes. Raises NotMeasured."""
    part = {name: find_recipe(row.settings.trainable).kind != "all" for name, row in VARIANTS.items()}
    alike = (runs["spec.variant"].map(part) == part[variant]) | (runs["spec.variant"] == base)
    return Scores(runs[alike], column).difference(variant, base)


def verdict(difference: tuple[float, float], margin: float = MARGIN) -> str:
    """Two one-sided t-tests at 5 % each (Schuirmann 1987): "within" where the whole interval lies inside ± margin,
    "beyond" where all of it lies outside, else "open"."""
    delta, half = difference
    return "within" if abs(delta) + half < margin else "beyond" if abs(delta) - half > margin else "open"


def equivalence(runs: pd.DataFrame) -> pd.DataFrame:
    """Each row's F1 against the baseline's, in table order: variant, n; f1, delta, half at threshold 0; best_delta,
    best_half at the best one; verdict.

    The verdict is on both, since a model that never answers can have a passable F1 at threshold 0. Rows whose kind is
    not repeated often enough are left out. Raises NotMeasured where none is left.
    """
    scored, lines, reason = runs[(runs["status"] == "ok") & runs["quality.f1"].notna()], [], f"{BASELINE} has no F1"
    for name in (name for name in VARIANTS if name in set(scored["spec.variant"]) - FAULTY - {BASELINE}):
        try:
            both = [compare(runs, name, column=column) for column in METRICS]
        except NotMeasured as problem:
            reason = problem
            continue
        told = {verdict(difference) for difference in both}
        f1 = scored.loc[scored["spec.variant"] == name, "quality.f1"].astype(float)
        line = {"variant": name, "n": len(f1), "f1": f1.mean()}
        line |= dict(zip(("delta", "half", "best_delta", "best_half"), (*both[0], *both[1]), strict=True))
        lines.append(line | {"verdict": next(v for v in ("beyond", "open", "within") if v in told)})
    if not lines:
        raise NotMeasured(str(reason))
    return pd.DataFrame(lines)


def equivalence_finding(runs: pd.DataFrame) -> str:
    """How many rows are shown to be as good as the baseline."""
    rows = equivalence(runs).set_index("variant")["verdict"]
    within = rows[rows == "within"].index
    said = f"Within {MARGIN:g} F1 of {BASELINE}, shown by 90 % intervals: {', '.join(within) or 'no row yet'}"
    return f"{said}; beyond: {', '.join(rows[rows == 'beyond'].index) or 'none'}"


def equivalence_table(runs: pd.DataFrame) -> pd.DataFrame:
    """`equivalence` as text, with the scores by kind of question beside it."""
    tested = equivalence(runs).set_index("variant")
    done = runs[runs["status"] == "ok"].groupby("spec.variant")
    columns = {"exact": "exact", "F1": "f1", "F1 at best threshold": "best_f1", "HasAns F1": "has_answer_f1",
               "NoAns F1": "no_answer_f1"}  # fmt: skip
    told = {"within": "yes", "beyond": "no", "open": "cannot be told"}
    lines = []
    for name in (name for name in VARIANTS if name in done.groups):
        part, known = done.get_group(name), name in tested.index
        line = {"row": name, "what it changes": tables.change(name), "n": str(len(part))}
        line |= {head: points(part[f"quality.{key}"].astype(float).mean()) for head, key in columns.items()}
        for head, which in (("ΔF1 vs A1", ["delta", "half"]), ("at best threshold: ΔF1", ["best_delta", "best_half"])):
            line[head] = points(*tested.loc[name, which], "+") if known else MISSING
        lines.append(line | {f"within {MARGIN:g} F1": told[tested.loc[name, "verdict"]] if known else MISSING})
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
        lines.append(line | {"F1": points(run["quality.f1"])})
    return pd.DataFrame(lines)


def projection(lines: pd.DataFrame, micro_batch: int = 32) -> pd.DataFrame:
    """Training time on the full data set from a bench group's speeds, with the arithmetic; data and scoring are not
    part of that scale. `lines` of tables.summarise. Raises NotMeasured."""
    part = lines[(lines["micro_batch"] == micro_batch) & lines["features_per_s"].notna()].set_index("variant")
    rows = [name for name in TIMED if name in part.index and BASELINE in part.index]
    if not rows:
        raise NotMeasured(f"no row has a measured speed at micro-batch {micro_batch} to project from")
    features, table = FULL_FEATURES * FULL_EPOCHS, []
    for name in rows:
        speed, compile_s = part.loc[name, ["features_per_s", "compile_s"]].fillna(0.0)
        seconds = features / speed + compile_s
        table.append({
            "row": name,
            "arithmetic": f"{FULL_FEATURES:,} × {FULL_EPOCHS} ÷ {number(speed)}/s"
                          + (f" + {number(compile_s)} s" if compile_s else ""),
            "minutes": number(seconds / 60),
            "of A1's time": tables.share(seconds * part.loc[BASELINE, "features_per_s"] / features),
        })  # fmt: skip
    return pd.DataFrame(table)


def tries_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Every try of `python -m qa_lib tune`, the best of each row first. Raises NotMeasured."""
    if runs.empty:
        raise NotMeasured("no try of python -m qa_lib tune is recorded on this hardware")
    rates = [f"{rate * find_recipe(name).lr_factor:.2g}" for rate, name in
             zip(runs["spec.scale.learning_rate"], runs["spec.settings.trainable"], strict=True)]  # fmt: skip
    tries = runs.assign(rate=rates, f1=runs["quality.f1"].astype(float)).dropna(subset="f1")
    lines = []
    for (row, trainable, rate), part in tries.groupby(["spec.variant", "spec.settings.trainable", "rate"]):
        part = part.sort_values("spec.seed")
        line = {"row": row, "trainable": trainable, "learning rate": rate, "mean": part["f1"].mean()}
        line["F1 of each seed"] = " · ".join(map(points, part["f1"]))
        lines.append(line | {"seeds": " · ".join(map(str, part["spec.seed"]))})
    table = pd.DataFrame(lines).sort_values(["row", "mean"], ascending=[True, False]).reset_index(drop=True)
    return table.rename(columns={"mean": "F1"}).assign(F1=table["mean"].map(points))
