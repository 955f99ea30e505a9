"""What a larger model or a longer context is worth: scores against size, and the laws of it.

notebooks/scaling.ipynb shows all of it. Models are compared that saw equal data, each at the
learning rate that suits it best among those tried (`trained_alike`).

The laws are L = a (N / unit)^-b and L = a (N / unit)^-b + c (Kaplan et al. 2020, Hoffmann et al.
2022), fitted without the largest model, which they then predict. The unit is the geometric mean of
the sizes, which tells a and b apart.
"""

import math
import operator
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.optimize import curve_fit

from qa_lib.lab.report import evidence, style
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import MISSING, count, number, points, three_decimals
from qa_lib.lab.report.stats import BEST_F1, LEVEL, interval
from qa_lib.lab.report.summary import average
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.variants import find_variant

# Each task -> the column of its score, and the score in words.
SCORES = {
    "lm": ("quality.bits_per_byte", "bits per byte"),
    "qa": (BEST_F1, "F1 at the best threshold"),
}
SIZES = {
    "without_embeddings": "parameters without embeddings",
    "parameters": "parameters",
    "flops": "FLOPs of training",
    "seconds": "seconds of training",
}
AXES = SIZES | {"depth": "layers", "length": "tokens of a window or sample"}
# How sizes are written that `format.count` does not suit.
FORMS = {
    "depth": "{:,.0f}".format,
    "length": "{:,.0f}".format,
    "seconds": number,
    "flops": lambda flops: f"{number(flops / 1e15)} P",
}
# Constants of a law -> the law in words, and how it is drawn.
LAWS = {2: "a·N⁻ᵇ", 3: "a·N⁻ᵇ + c"}
LOOKS = {2: (style.ORANGE, "--"), 3: (style.GREEN, ":")}


# Which runs are compared.


def trained_alike(every: pd.DataFrame, group: str, variant: str) -> pd.DataFrame:
    """Return a group's runs of a variant on equal data, of each model and length at its best rate.

    `every` are the runs of all groups. Columns beside theirs: score, SIZES, depth, perplexity and
    rates, the learning rates that were tried.
    """
    own = evidence.select_or_empty(every, group)
    task = own["task.name"].iloc[0] if len(own) else "lm"
    column, _ = SCORES[task]
    is_scored = own["status"].eq("ok") & own[column].notna()
    own = own[is_scored & own["spec.variant"].eq(find_variant(variant).name)]
    samples = own["batch"] * (own["length"] if task == "lm" else 1)
    of_equal_data = own.groupby(
        [own[evidence.EPOCHS], samples, own["precision"], own["world"]], dropna=False
    )

    def kinds(part: pd.DataFrame) -> tuple[int, int]:
        """Return how many models and lengths a part has, and how many runs."""
        return len(part[["model", "length"]].drop_duplicates()), len(part)

    own = max((part for _, part in of_equal_data), key=kinds, default=own)
    own = own.assign(score=own[column].astype(float), **_sizes(every, own, task))
    tuned = [_tuned(part) for _, part in own.groupby(["model", "length"])]
    return pd.concat([own[:0], *tuned])


def _tuned(part: pd.DataFrame) -> pd.DataFrame:
    """Return one model's runs at one length: those at the rate of the most seeds, and among such
    rates at that of the best mean."""
    sign = 1 if part["task.higher_is_better"].iloc[0] else -1
    tries = part.groupby(evidence.RATE).agg(seeds=("spec.seed", "nunique"), score=("score", "mean"))
    best = max(tries.itertuples(), key=lambda tried: (tried.seeds, sign * tried.score)).Index
    rates = ", ".join(map("{:g}".format, tries.index))
    if len(tries) > 3:
        rates = f"{tries.index[0]:g}–{tries.index[-1]:g} ({len(tries)})"
    if len(tries) > 1 and best in (tries.index[0], tries.index[-1]):
        rates += ": at the end"
    chosen = part[part[evidence.RATE] == best].drop_duplicates("spec.seed")
    return chosen.assign(rates=rates)


def _sizes(every: pd.DataFrame, own: pd.DataFrame, task: str) -> pd.DataFrame:
    """Return the sizes that a score is held against, with depth and perplexity.

    FLOPs are those of variants that train all of a model. A token takes

    - 6 for each weight of the layers and of the head,
    - 4 for each bias and each weight of a norm,
    - 6 × layers × hidden × length in attention, of which half is masked.
    """
    columns = {
        "parameters": "model.params_total",
        "perplexity": "quality.word_perplexity",
        "train": "time.train_s",
        "compile": "time.compile_s",
        "resumed": "time.resumed_from_step",
    }
    found = evidence.numbers(own, columns)
    seconds = found["train"] - found["compile"].fillna(0.0)
    found["seconds"] = seconds.where(found["resumed"].isna())
    found["depth"] = math.nan
    # The GPT-2s here grow in width as well.
    if task == "qa":
        # Older records do not tell the layers, but others of the same model may.
        layers = evidence.numbers(every, {"layers": "model.layers"})["layers"]
        found["depth"] = own["model"].map(layers.groupby(every["model"]).max())
    found["without_embeddings"] = found["flops"] = math.nan
    shapes = own["model.name"].map(find_shape)
    if task == "lm" and shapes.notna().all():
        layers, hidden, positions = (
            shapes.map(operator.attrgetter(name)) for name in ("layers", "hidden", "positions")
        )
        weights = 12 * layers * hidden**2
        biases_and_norms = 13 * layers * hidden
        found["without_embeddings"] = weights + biases_and_norms + 2 * hidden
        head = found["parameters"] - found["without_embeddings"] - positions * hidden
        of_attention = 6 * layers * hidden * own["length"]
        of_token = 6 * (weights + head) + 4 * biases_and_norms + of_attention
        steps = own["time.steps"].astype(float)
        found["flops"] = of_token * steps * own["batch"] * own["length"]
    return found[[*SIZES, "depth", "perplexity"]]


def _means(own: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each model and length: means over seeds with intervals, rate and rates."""
    keys = [own["model"], own["length"]]
    lines = average(own[["score", "perplexity", *SIZES, "depth"]], keys)
    lines = lines.assign(timed=own["seconds"].groupby(keys).count())
    firsts = own.groupby(["model", "length"], sort=False)[[evidence.RATE, "rates"]].first()
    return lines.join(firsts).reset_index()


def _along(own: pd.DataFrame, what: str) -> pd.DataFrame:
    """Return what a curve over one of AXES shows: the model of the most lengths, or else the length
    of the most models."""
    by, other = ("length", "model") if what == "length" else ("model", "length")
    parts = [part for _, part in own.groupby(other)]
    part = max(parts, key=lambda part: (part[by].nunique(), len(part)))
    order = "length" if what == "length" else "parameters"
    return part.sort_values([order, "spec.seed"], kind="stable")


# The laws.


class Law(NamedTuple):
    """A law a (N / unit)^-b + c."""

    unit: float
    a: float
    b: float
    c: float

    def __call__(self, sizes):
        """Return the score of a size, or of an array of them."""
        return self.a * (sizes / self.unit) ** -self.b + self.c


def fit(sizes: np.ndarray, scores: np.ndarray, constants: int) -> Law:
    """Return the law of 2 or 3 constants, by least squares of relative misses."""
    logs = np.log(scores)
    unit = math.exp(np.log(sizes).mean())
    begin = [logs.mean(), 0.1]
    if constants == 3:
        begin = [logs.mean() - math.log(2), 0.3, scores.min() / 2]

    def log_law(size, log_a, b, c=0.0):
        return np.log(np.exp(log_a) * size**-b + c)

    low = [-np.inf, -5.0, 0.0][:constants]
    high = [np.inf, 5.0, scores.min()][:constants]
    (log_a, b, *c), _ = curve_fit(
        log_law, sizes / unit, logs, begin, bounds=(low, high), max_nfev=10_000
    )
    return Law(unit, math.exp(log_a), float(b), float(c[0]) if c else 0.0)


def laws(own: pd.DataFrame, size: str) -> pd.DataFrame:
    """Return the laws that have more models than constants beside the largest, which is kept out.

    Columns: constants, law; b, c and predicted with the intervals of a fit for each seed; out, the
    model that was kept out, and came, the score that it came to.
    """
    columns = ["constants", "law", "b", "c", "predicted", "b±", "c±", "predicted±"]
    columns += ["out", "came", "came±"]
    if own["task.name"].iloc[0] != "lm" or size not in SIZES:
        return pd.DataFrame(columns=columns)
    part = _along(own, size)
    lines = _means(part).dropna(subset=["score", size])
    if lines.empty:
        return pd.DataFrame(columns=columns)
    fitted = lines.iloc[:-1]
    last = lines.iloc[-1]
    by_seed = part.pivot_table("score", "spec.seed", "model")[[*fitted["model"]]].dropna()
    found = []
    for constants in LAWS:
        if len(fitted) <= constants:
            continue
        sizes = fitted[size].to_numpy()
        law = fit(sizes, fitted["score"].to_numpy(), constants)
        each = [fit(sizes, scores, constants) for scores in by_seed.to_numpy()]
        tried = pd.DataFrame([(one.b, one.c, one(last[size])) for one in [law, *each]])
        halves = interval(tried.iloc[1:])
        came = (last["model"], last["score"], last["score±"])
        found.append((constants, law, *tried.iloc[0], *halves, *came))
    return pd.DataFrame(found, columns=columns)


# The figure.


def fig_tradeoffs(own: pd.DataFrame) -> Figure:
    """Draw the score against each of AXES in which models or lengths differ, with the laws.

    `own` are runs of `trained_alike`. The model that the laws were not fitted to is hollow.

    Raises NotMeasured where no two models or lengths were trained alike.
    """
    known = {what: _means(_along(own, what)).dropna(subset=[what]) for what in AXES}
    shown = {what: lines for what, lines in known.items() if lines[what].nunique() > 1}
    if not shown:
        raise NotMeasured("no two models and no two lengths were trained alike")
    task = own["task.name"].iloc[0]
    note = (
        f"{own['spec.variant'].iloc[0]}, on equal data. Bars: {LEVEL} % intervals. "
        f"{style.code(evidence.commits(own))}"
    )
    rows = math.ceil(len(shown) / 3)
    figure = style.group_figure(own, _finding(shown, task), note, 1.2 + 2.7 * rows)
    columns = math.ceil(len(shown) / rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for axis, (what, lines) in zip(axes, shown.items(), strict=False):
        _draw(axis, own, what, lines)
    for axis in figure.axes[len(shown) :]:
        axis.remove()
    first = figure.axes[0]
    first.set_ylabel(SCORES[task][1])
    if first.get_legend_handles_labels()[0]:
        style.legend(first)
    return figure


def _finding(shown: dict[str, pd.DataFrame], task: str) -> str:
    """Return what the score is at the smallest size and at the largest."""
    form = three_decimals if task == "lm" else points
    what = "depth" if "depth" in shown else next(iter(shown))
    first, last = shown[what].iloc[[0, -1]].to_dict("records")
    sizes = " to ".join(FORMS.get(what, count)(line[what]) for line in (first, last))
    goes = "go" if task == "lm" else "goes"
    return (
        f"From {sizes} {AXES[what]}, {SCORES[task][1]} {goes} from {form(first['score'])} to "
        f"{form(last['score'])}"
    )


def _draw(axis: Axes, own: pd.DataFrame, what: str, lines: pd.DataFrame) -> None:
    """Draw the score against one of AXES."""
    found = laws(own, what)
    reach = np.geomspace(lines[what].min(), lines[what].max())
    for constants, law in zip(found["constants"], found["law"], strict=True):
        color, look = LOOKS[constants]
        label = LAWS[constants]
        axis.plot(reach, law(reach), look, color=color, linewidth=1.4, label=label, zorder=1)
    is_out = lines["model"].isin(found["out"])
    for chosen, fill in ((~is_out, style.BLUE), (is_out, "white")):
        axis.errorbar(
            lines.loc[chosen, what],
            lines.loc[chosen, "score"],
            lines.loc[chosen, "score±"],
            fmt="o",
            capsize=3,
            color=style.BLUE,
            markerfacecolor=fill,
            markersize=5,
        )
    axis.set(xscale="log", xlabel=AXES[what])
    axis.margins(x=0.12)
    if own["task.name"].iloc[0] == "qa":
        silent = own["quality.always_null_f1"].astype(float).mean()
        label = f"a model that never answers: {points(silent)}"
        axis.axhline(silent, color=style.RED, linestyle="--", label=label)
    else:
        # A power is a straight line.
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(MaxNLocator(6))
        axis.yaxis.set_major_formatter(style.THOUSANDS)
    ticks = lines[what]
    if what not in ("length", "depth"):
        ticks = ticks.iloc[[0, len(lines) // 2, -1]]
    ticks = ticks.drop_duplicates()
    axis.set_xticks(ticks, ticks.map(FORMS.get(what, count)), fontsize=8)
    axis.minorticks_off()


# The tables.


def points_table(own: pd.DataFrame) -> pd.DataFrame:
    """Return the points of `fig_tradeoffs` as text, with what each training took."""
    lines = _means(own.sort_values(["parameters", "length"], kind="stable"))
    lines = lines.assign(
        model=lines["model"].str.split().str[0],
        depth=_short(lines["depth"]),
        rate=_short(lines[evidence.RATE]),
        flops=lines["flops"] / 1e15,
    )
    task = own["task.name"].iloc[0] if len(own) else "lm"
    columns = [
        Column("model"),
        Column("depth", "layers", interval=False),
        Column("length", interval=False),
        Column("n"),
        Column("score", SCORES[task][1], three_decimals if task == "lm" else points),
        Column("perplexity", "perplexity per word", interval=False),
        Column("without_embeddings", "without embeddings", count, interval=False),
        Column("parameters", form=count, interval=False),
        Column("flops", "PFLOP", interval=False),
        Column("seconds", interval=False),
        Column("timed"),
        Column("rate", "learning rate"),
        Column("rates", "of those tried"),
    ]
    return render(lines, columns)


def _short(values: pd.Series) -> pd.Series:
    """Return numbers without digits that say nothing, '–' for NaN."""
    return values.map("{:g}".format).replace("nan", MISSING)


def law_table(own: pd.DataFrame) -> pd.DataFrame:
    """Return the laws as text, and how far each misses the model that was kept out.

    Raises NotMeasured where no law can be fitted.
    """
    found = pd.concat([laws(own, size).assign(size=size) for size in SIZES])
    if found.empty:
        raise NotMeasured("a law takes three models with sizes and a larger one that is kept out")
    off = (100 * (found["predicted"] / found["came"] - 1)).map("{:+.2f} %".format)
    units = [
        f"{three_decimals(law.a)} at {FORMS.get(size, count)(law.unit)}"
        for law, size in found[["law", "size"]].to_numpy()
    ]
    found = found.assign(
        off=off.str.replace("-", "−"),
        at=units,
        c=found["c"].where(found["constants"] == 3),
        size=found["size"].map(SIZES),
        law=found["constants"].map(LAWS),
    )
    columns = [
        Column("size", "N is"),
        Column("law"),
        Column("at", "a at N"),
        Column("b", form=three_decimals),
        Column("c", form=three_decimals),
        Column("predicted", form=three_decimals),
        Column("came", "came to", three_decimals),
        Column("off", "off by"),
    ]
    return render(found, columns)
