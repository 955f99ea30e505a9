"""Trade-offs: what a larger model, or a longer context, is worth in quality, at equal training data.

Loss falls with the size of a model about as a power of it: a straight line where both axes are logarithmic (Kaplan et
al. 2020). Such a law is tested by what it was not fitted to. So the largest model is kept out, and the law through the
others predicts it. Two laws compete: L = a N^-b, which few sizes can carry and which would fall to zero, and
L = a N^-b + c, whose c is the loss that no size removes (Hoffmann et al. 2022). Each is fitted where there are more
sizes than it has constants.

All runs see as many tokens of the same text, so that these are laws of size at equal data. Larger models take more
FLOPs and seconds for it: a point says what its training cost, not the least that its loss could have cost.
"""

import contextlib
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy.optimize import curve_fit

from qa_lib.presets import find_shape
from qa_lib.report.runs import EPOCHS, RATE, NotMeasured, select
from qa_lib.report.tables import interval
from qa_lib.report.text import FILTERS, MISSING, count, number, points, say

SCORES = {  # task -> value of a record, its name; by bytes, tokenizers may differ
    "lm": ("quality.bits_per_byte", "bits per byte"),
    "qa": ("quality.best_f1", "F1 at the best threshold"),
}
PERPLEXITY = "quality.word_perplexity"
SIZES = {  # what a model's score is held against
    "without_embeddings": "parameters without embeddings",
    "parameters": "parameters",
    "flops": "FLOPs of training",
    "seconds": "seconds of training",
}
PETA = 1e15
LAWS = {2: "a·N⁻ᵇ", 3: "a·N⁻ᵇ + c"}  # by how many constants
# Depth is for question answering: the GPT-2s here grow in width as well.
AXES = {**SIZES, "depth": "layers", "length": "tokens of a window or feature"}


def measured(every: pd.DataFrame, group: str, row: str) -> pd.DataFrame:
    """Of all records the runs of a group and row that show a trade-off, a line a run: of equal training data, and of
    each model and length at one learning rate, that of the most seeds and among these the best mean.

    Columns beside those of `every`: score, rates (those that were tried), and perplexity (per word of the original
    text), depth and those of SIZES, NaN where they are not known. Raises NotMeasured where the group has none.
    """
    runs = select(every, group)
    task = runs["task.name"].iloc[0]
    column, label = SCORES[task]
    runs = runs[(runs["status"] == "ok") & (runs["spec.variant"] == row) & runs[column].notna()]
    if runs.empty:
        raise NotMeasured(f"no run of {row} in group {group} has ended ok with {label}")
    a_step = runs["batch"] * (runs["length"] if task == "lm" else 1)
    alike = [runs[EPOCHS], a_step.rename("a step"), runs["precision"], runs["world"]]
    parts = [part for _, part in runs.groupby(alike, dropna=False)]
    runs = max(parts, key=lambda part: (len(part[["model", "length"]].drop_duplicates()), len(part)))
    if "model.layers" in every:  # older records do not tell them, but others of the same model may
        runs = runs.assign(**{"model.layers": runs["model"].map(every.groupby("model")["model.layers"].max())})
    perplexity = runs.reindex(columns=[PERPLEXITY])[PERPLEXITY].astype(float)
    runs = runs.assign(score=runs[column].astype(float), perplexity=perplexity, **_sizes(runs, task))
    return pd.concat([_tuned(part) for _, part in runs.groupby(["model", "length"])])


def _sizes(runs: pd.DataFrame, task: str) -> dict[str, pd.Series]:
    """The columns of SIZES, and depth. FLOPs are counted as in measure/flops.py, for rows that train all of the model:
    for each token 6 for each weight of layers and head, 4 for each bias and norm, and 6 x layers x hidden x length for
    the half of attention that is not masked."""
    parameters = runs["model.params_total"].astype(float)
    alone = runs["time.train_s"].astype(float) - runs["time.compile_s"].astype(float).fillna(0.0)
    found = {"parameters": parameters, "seconds": alone.where(runs["time.resumed_from_step"].isna())}
    if task == "qa":
        depth = runs.reindex(columns=["model.layers"])["model.layers"].astype(float)
        return found | {"without_embeddings": math.nan, "flops": math.nan, "depth": depth}
    found["depth"] = math.nan
    shapes = runs["model.name"].map(find_shape)
    if shapes.isna().any():
        return found | {"without_embeddings": math.nan, "flops": math.nan}
    layers, hidden, positions = (
        shapes.map(lambda shape, name=name: getattr(shape, name)) for name in ("layers", "hidden", "positions")
    )
    weights, others = 12 * layers * hidden**2, 13 * layers * hidden  # of a GPT-2's layers; others: biases and norms
    without = weights + others + 2 * hidden
    head = parameters - without - positions * hidden
    each = 6 * (weights + head) + 4 * others + 6 * layers * hidden * runs["length"]
    tokens = runs["time.steps"].astype(float) * runs["batch"] * runs["length"]
    return found | {"without_embeddings": without, "flops": each * tokens}


def _tuned(part: pd.DataFrame) -> pd.DataFrame:
    """Of one model's runs at one length those at its learning rate."""
    sign = 1 if part["task.higher_is_better"].iloc[0] else -1
    tries = part.groupby(RATE).agg(seeds=("spec.seed", "nunique"), score=("score", "mean"))
    best = max(tries.itertuples(), key=lambda tried: (tried.seeds, sign * tried.score)).Index
    chosen = part[part[RATE] == best].drop_duplicates("spec.seed")
    at_end = len(tries) > 1 and best in (tries.index[0], tries.index[-1])
    tried = ", ".join(map("{:g}".format, tries.index))
    if len(tries) > 3:
        tried = f"{tries.index[0]:g}–{tries.index[-1]:g} ({len(tries)})"
    return chosen.assign(rates=tried + (": at the end" if at_end else ""))


def along(runs: pd.DataFrame, what: str) -> pd.DataFrame:
    """Of `measured` what a curve over lengths or models shows, in that order: the model of most lengths, or the length
    of most models."""
    by, other = ("length", "model") if what == "length" else ("model", "length")
    part = max((part for _, part in runs.groupby(other)), key=lambda part: (part[by].nunique(), len(part)))
    return part.sort_values(["length" if what == "length" else "parameters", "spec.seed"], kind="stable")


def means(part: pd.DataFrame) -> pd.DataFrame:
    """A line a model and length, in their order: means over seeds of score, perplexity and sizes, `score±`, n, timed,
    rate, rates."""
    seeds = part.groupby(["model", "length"], sort=False)
    lines = seeds[["score", "perplexity", *SIZES, "depth", RATE]].mean().rename(columns={RATE: "rate"})
    lines["score±"] = interval(seeds["score"])
    lines["timed"] = seeds["seconds"].count()  # seeds that have seconds
    return lines.assign(n=seeds.size(), rates=seeds["rates"].first()).reset_index()


def fit(sizes: np.ndarray, scores: np.ndarray, constants: int) -> tuple[float, float, float, float]:
    """(unit, a, b, c) of the law a (N / unit)^-b + c of so many constants, 2 without c, by least squares of relative
    misses. The unit is the geometric mean of the sizes, which tells a and b apart."""
    logs, unit = np.log(scores), math.exp(np.log(sizes).mean())

    def log_law(size, log_a, b, c=0.0):
        return np.log(np.exp(log_a) * size**-b + c)

    low, high = [-np.inf, -5.0, 0.0], [np.inf, 5.0, scores.min()]
    begin = [logs.mean() - math.log(2), 0.3, scores.min() / 2] if constants == 3 else [logs.mean(), 0.1]
    bounds = (low[:constants], high[:constants])
    (log_a, b, *c), _ = curve_fit(log_law, sizes / unit, logs, begin, bounds=bounds, max_nfev=10_000)
    return unit, math.exp(log_a), float(b), float(c[0]) if c else 0.0


def value(law: tuple[float, float, float, float], sizes: np.ndarray) -> np.ndarray:
    """What a law of `fit` says of some sizes."""
    unit, a, b, c = law
    return a * (sizes / unit) ** -b + c


def laws(runs: pd.DataFrame, size: str) -> pd.DataFrame:
    """The laws of loss over one of SIZES, a line for each of LAWS that has more models than constants beside the
    largest, which is kept out: constants, law (of the means over seeds), its b and c, predicted and came, each with
    half its t-based interval (b±, ...; of the first three over fits to one seed each), and the model kept_out.

    That is no bootstrap: three seeds, drawn again and again, never leave their own range, and the interval would be too
    narrow. Raises NotMeasured.
    """
    part = along(runs, size)
    if runs["task.name"].iloc[0] != "lm":
        raise NotMeasured("laws are fitted to the loss of language models, and this is another task")
    lines = means(part).dropna(subset=["score", size])
    fitted, last = lines.iloc[:-1], lines.iloc[-1] if len(lines) else None
    if len(fitted) <= min(LAWS):
        raise NotMeasured(
            f"a law takes {min(LAWS) + 1} models with {SIZES[size]} and a larger one that is kept out; "
            f"there are {len(lines)} in all"
        )
    by_seed = part.pivot(index="spec.seed", columns="model", values="score")[[*fitted["model"]]].dropna()
    found = []
    for constants in (number_of for number_of in LAWS if len(fitted) > number_of):
        law, *each = (
            fit(fitted[size].to_numpy(), scores, constants)
            for scores in [fitted["score"].to_numpy(), *by_seed.to_numpy()]
        )
        tried = pd.DataFrame([(b, c, value((unit, a, b, c), last[size])) for unit, a, b, c in each], dtype=float)
        halves = dict(zip(("b±", "c±", "predicted±"), interval(tried.reindex(columns=range(3))), strict=True))
        found.append({
            "constants": constants, "law": law, "b": law[2], "c": law[3], "predicted": value(law, last[size]), **halves,
            "came": last["score"], "came±": last["score±"], "kept_out": last["model"],
        })  # fmt: skip
    return pd.DataFrame(found)


def points_table(runs: pd.DataFrame) -> pd.DataFrame:
    """`measured` as text: a line a model and length, with what its training took."""
    lines = means(runs.sort_values(["parameters", "length"], kind="stable"))
    label = SCORES[runs["task.name"].iloc[0]][1]
    table = pd.DataFrame({
        "model": [name.split()[0] for name in lines["model"]],
        "layers": lines["depth"].map("{:.0f}".format).where(lines["depth"].notna(), MISSING),
        "length": lines["length"].map("{:,}".format),
        "n": lines["n"].map(str),
        label: list(map(scored(runs), lines["score"], lines["score±"])),
        "perplexity per word": lines["perplexity"].map(number),
        "without embeddings": lines["without_embeddings"].map(count),
        "parameters": lines["parameters"].map(count),
        "PFLOP": (lines["flops"] / PETA).map(number),
        "seconds": list(map(_seconds, lines["seconds"], lines["timed"], lines["n"])),
        "learning rate": lines["rate"].map("{:g}".format),
        "of those tried": lines["rates"],
    })  # fmt: skip
    return table.loc[:, (table != MISSING).any()]


def _seconds(seconds: float, timed: int, n: int) -> str:
    """With how many runs were timed, where those are not all that were scored."""
    return number(seconds) + (f" (n = {timed})" if 0 < timed < n else "")


def law_table(runs: pd.DataFrame) -> pd.DataFrame:
    """`laws` over each of SIZES as text. Raises NotMeasured where there is none over any."""
    table, unknown = [], None
    for size, label in SIZES.items():
        try:
            found = laws(runs, size)
        except NotMeasured as reason:
            unknown = unknown or reason
            continue
        for line in found.to_dict("records"):
            unit, a, *_ = line["law"]
            table.append({
                "N is": label,
                "law": LAWS[line["constants"]],
                "a, at N": f"{digits(a)} at {in_words(size)(unit)}",
                "b": digits(line["b"], line["b±"]),
                "c": digits(line["c"], line["c±"]) if line["constants"] == 3 else MISSING,
                "predicted": digits(line["predicted"], line["predicted±"]),
                "came to": digits(line["came"], line["came±"]),
                "off by": off_by(line["predicted"] / line["came"] - 1),
            })  # fmt: skip
    if not table:
        raise unknown
    return pd.DataFrame(table)


def scored(runs: pd.DataFrame) -> Callable:
    """How a score of the runs' task is written."""
    return digits if runs["task.name"].iloc[0] == "lm" else points


def misses(runs: pd.DataFrame) -> str:
    """How far each law over parameters without embeddings misses the model that was kept out, and between which bounds
    over the other sizes, in sentences. Raises NotMeasured."""
    off = {}
    for size in SIZES:
        with contextlib.suppress(NotMeasured):
            found = laws(runs, size).set_index("constants")
            off[size] = (found["predicted"] / found["came"] - 1).to_dict()
    first, *others = SIZES
    if first not in off or len(off) == 1:
        raise NotMeasured(f"no law is there over {SIZES[first]} and over another size to compare")
    told = []
    for constants, miss in off[first].items():
        elsewhere = [off[size][constants] for size in others if size in off]
        told.append({"form": LAWS[constants], "off": miss, "low": min(elsewhere), "high": max(elsewhere)})
    return say("tradeoffs.misses", laws=told, size=SIZES[first])


def digits(value: float, half: float = math.nan) -> str:
    """A loss or an exponent, whose third decimal counts."""
    if pd.isna(value):
        return MISSING
    return f"{value:.3f}".replace("-", "−") + (f" ± {half:.3f}" if pd.notna(half) else "")


def off_by(miss: float) -> str:
    """A relative miss in percent, with its sign."""
    return f"{100 * miss:+.2f} %".replace("-", "−")


FILTERS |= {"digits": digits, "millions": count, "off_by": off_by}


def training(runs: pd.DataFrame) -> str:
    """What every run of a language model was trained on, in a sentence."""
    one = runs.iloc[0]
    return say("tradeoffs.training", data=one["data.name"], words=one["data.n"], epochs=one[EPOCHS],
               steps=one["time.steps"], a_step=one["batch"] * one["length"],
               stride=one["spec.preset.stride"])  # fmt: skip


def in_words(what: str) -> Callable[[float], str]:
    """How a value of one of AXES is written below its axis."""
    whole = "{:,.0f}".format
    own = {"flops": lambda flops: f"{number(flops / PETA)} P", "seconds": number, "depth": whole, "length": whole}
    return own.get(what, count)
