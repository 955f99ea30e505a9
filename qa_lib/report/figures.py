"""The figures of the report: `fig_*(runs) -> Figure`, each from the runs of one group: of the largest micro-batch that
the baseline has, with a panel for each length, model and so on. The tables have the rest.

Titles are sentences computed by sentences.py; a figure whose values no record holds raises NotMeasured. Drawing the
same records twice gives the same bytes.
"""

import math
import textwrap
from itertools import pairwise
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.report import profiles, quality, sentences, style
from qa_lib.report.runs import (
    AXIS_NAMES,
    BASELINE,
    NotMeasured,
    ReportError,
    baseline,
    beside_baseline,
    cells,
    in_cells,
    on_cpu,
    score_name,
)
from qa_lib.report.sentences import LADDER, PEERS
from qa_lib.report.style import BLUE, GREEN, GREY, ORANGE, RED
from qa_lib.report.tables import cost_table, summarise
from qa_lib.report.text import MISSING, gain, number, points, share
from qa_lib.variants import VARIANTS


@style.style()
def fig_ladder(runs: pd.DataFrame) -> Figure:
    """Training speed rung by rung, with its factors to A1 and to the row that it changes; then the Trainer's."""
    lines, order = _timed(runs), [*LADDER, *PEERS]
    shown = lines[lines["variant"].isin(order)].sort_values("variant", key=lambda names: names.map(order.index))
    if shown["variant"].nunique() < 2:
        raise NotMeasured("the ladder has one rung")
    parts = [(label, part.reset_index(drop=True)) for label, part in cells(shown)]
    titles = in_cells(shown, sentences.speed_finding)
    figure, panels = _panels(runs, shown, titles, parts, lambda rows: 0.34 * len(rows))
    for axis, part in panels:
        speed, half = part["samples_per_s"], part["samples_per_s±"]
        trainer = part["variant"].isin(PEERS)
        for chosen, color, label in ((~trainer, BLUE, "this library"), (trainer, GREY, "transformers.Trainer")):
            if chosen.any():  # the legend gives bars that are none a colour of their own
                axis.barh(part.index[chosen], speed[chosen], color=color, label=label, height=0.7)
        axis.errorbar(speed, part.index, xerr=half, fmt="none", color="black", capsize=3, linewidth=1)
        for height, note in part.loc[speed.isna(), "note"].items():
            axis.text(0, height, " " + textwrap.shorten(note or "not measured", 60), va="center", fontsize=8)
        factors = {f"× {baseline(runs)}": part["ratio"].map(number), "× row above": _gains(part)}
        style.columns(axis, {"features/s": speed.map(number)} | factors | {"n": part["n"].map(str)})
        style.name_rows(axis, _in_words(part["variant"]))
        end = (shown["samples_per_s"] + shown["samples_per_s±"].fillna(0)).max()  # one preset for all panels
        axis.set(xlabel="features/s in training (longer is faster)", xlim=(0, 1.05 * end))
    style.legend(figure.axes[0])
    return figure


def _gains(part: pd.DataFrame) -> list[str]:
    """The speed of each line over that of the row which it changes; this is named where it does not stand above."""
    speed, said = part.set_index("variant")["samples_per_s"], []
    for above, name in pairwise(["", *speed.index]):
        parent = VARIANTS[name].parent
        ratio = number(speed[name] / speed.get(parent, math.nan))
        said.append(ratio if parent == above or ratio == MISSING else f"{ratio} ({parent})")
    return said


def _in_words(names) -> list[str]:
    return [style.wrap(f"{name}: {VARIANTS[name].why}", 48) for name in names]


@style.style()
def fig_memory(runs: pd.DataFrame) -> Figure:
    """Peak GPU memory against training speed of full fine-tunes, a point a row. Named are those that none beats in
    both, the baseline and the quickest Trainer. Raises NotMeasured where no GPU was used."""
    lines = _timed(runs)
    titles = in_cells(lines, sentences.memory_finding)
    figure, panels = _panels(runs, lines, titles, cells(lines), lambda _: 4.0)
    for axis, part in panels:
        part = part.assign(gib=part["peak_mib"] / 1024).dropna(subset=["gib", "samples_per_s"])
        part = part.sort_values("samples_per_s", ascending=False)
        part = part[sentences.trains_all(part)]  # how much less a part takes is told beside what it costs in F1
        trainer = part["variant"].str.startswith(sentences.PLAIN)
        front = part[part["gib"] < part["gib"].cummin().shift(fill_value=math.inf)]
        for chosen, label, look in (
            (trainer, "transformers.Trainer", {"color": GREY, "marker": "s"}),
            (~trainer, "this library", {"color": BLUE}),
        ):
            axis.scatter(part["samples_per_s"][chosen], part["gib"][chosen], s=40, label=label, **look)
        look = {"color": BLUE, "zorder": 1, "linewidth": 1, "label": "none is both leaner and faster"}
        axis.step(front["samples_per_s"], front["gib"], where="post", **look)
        axis.set(xlabel="features/s in training (further right is faster)", ylabel="peak GPU memory, allocated, in GiB")
        axis.set(xlim=(0, None), ylim=(0, None))
        named = pd.concat([front, part[part["variant"] == baseline(runs)], part[trainer][:1]]).drop_duplicates(
            "variant"
        )
        said = [f"{row.variant}: {number(row.gib)} GiB, {number(row.samples_per_s)}/s" for row in named.itertuples()]
        style.name_points(axis, zip(named["samples_per_s"], named["gib"], said, strict=True))
    style.legend(figure.axes[0])
    return figure


@style.style()
def fig_peft(runs: pd.DataFrame) -> Figure:
    """The score of the PEFT rows, A1 and A3 to compare, with the share of parameters that train."""
    runs = beside_baseline(runs)
    whole = runs.drop(columns="micro_batch")
    titles, parts = in_cells(whole, sentences.peft_finding), in_cells(whole, sentences.peft_scores)
    figure, panels = _panels(runs, _lines(runs), titles, parts, lambda rows: 0.34 * len(rows))
    name = score_name(runs)
    for axis, rows in panels:
        axis.errorbar(rows["score"], range(len(rows)), xerr=rows["half"], fmt="o", color=BLUE, capsize=3)
        if name == "F1":
            silent = runs["quality.always_null_f1"].astype(float).mean()
            axis.axvline(silent, color=RED, linestyle="--", label=f"a model that never answers: {points(silent)}")
            style.legend(axis)
        style.columns(axis, {
            name: map(points, rows["score"], rows["half"]),
            f"against {BASELINE}": map(gain, rows["delta"], rows["delta_half"]),
            "trains": rows["share"].map(share),
            "n": rows["n"].map(str),
        })  # fmt: skip
        style.name_rows(axis, _in_words(rows.index))
        axis.set_xlabel(f"{name} at the best threshold for “no answer”" if name == "F1" else name)
    return figure


@style.style()
def fig_equivalence(runs: pd.DataFrame) -> Figure:
    """F1 of each row minus the baseline's with its interval over seeds, at threshold 0 and at the best one, and the
    margin that counts as equal.

    Rows far off are named below, those without an interval are left to the table. Raises NotMeasured where none has
    one.
    """
    runs = beside_baseline(runs)
    whole, margin = runs.drop(columns="micro_batch"), quality.MARGIN
    parts = [(label, rows.dropna(subset=["half", "best_half"])) for label, rows in in_cells(whole, quality.equivalence)]
    titles = in_cells(whole, sentences.equivalence_counts)
    figure, panels = _panels(runs, _lines(runs), titles, parts, lambda rows: 0.25 * len(rows))
    colors = {"within": BLUE, "no worse": GREEN, "open": ORANGE, "beyond": RED}
    for axis, tested in panels:
        near = tested["delta"].abs() < 4 * margin
        rows, far = tested[near].reset_index(drop=True), tested[~near]
        axis.axvspan(-margin, margin, color="0.92", zorder=0, label=f"± {margin:g} F1")
        axis.axvline(0, color="0.4", linewidth=1)
        table = {}
        for at, shift, fill, head in (("", -0.16, None, "at threshold 0"), ("best_", 0.16, "white", "at the best one")):
            table[head] = map(gain, rows[f"{at}delta"], rows[f"{at}half"])
            look = {"marker": "o", "markersize": 4, "markerfacecolor": fill}
            for verdict, part in rows.groupby("verdict"):
                axis.errorbar(part[f"{at}delta"], part.index + shift, xerr=part[f"{at}half"], color=colors[verdict],
                              linestyle="", capsize=2, elinewidth=1, **look)  # fmt: skip
            axis.plot([], [], color=BLUE, linestyle="", label=head, **look)
        axis.plot([], [], "o", color=GREEN, label="loses less")
        axis.plot([], [], "o", color=ORANGE, label="cannot be told")
        style.columns(axis, table | {"n": rows["n"].map(str)})
        style.name_rows(axis, rows["variant"])
        said = f"F1 minus {BASELINE}'s"
        if len(far):
            said += f"\nnot drawn, too far off: {', '.join(far['variant'] + ' ' + far['delta'].map(gain))}"
        axis.set_xlabel(said)
    style.legend(figure.axes[0])
    return figure


@style.style()
def fig_cost(runs: pd.DataFrame) -> Figure:
    """What a run of each row takes that finds nothing compiled, by part."""
    lines = _timed(runs)
    shown = runs.merge(lines[AXIS_NAMES].drop_duplicates())
    titles, parts = in_cells(shown, sentences.cost_finding), in_cells(shown, cost_table)
    figure, panels = _panels(runs, lines, titles, parts, lambda rows: 0.2 * len(rows))
    colors = {"preparing": GREY, "compiling": ORANGE, "training": BLUE, "scoring": GREEN}
    for axis, rows in panels:
        style.stack(axis, rows[[part for part in colors if rows[part].any()]], colors)
        style.columns(axis, {"s in all": rows["wall"].map(number), "n": rows["n"].map(str)})
        axis.set_xlabel("wall time of a run in s; rows of which every run found compiled code are not drawn")
    style.legend(figure.axes[0])
    return figure


FIGURES = {
    "ladder": fig_ladder,
    "equivalence": fig_equivalence,
    "memory": fig_memory,
    "peft": fig_peft,
    "timeline": profiles.fig_timeline,
    "phases": profiles.fig_phases,
    "roofline": profiles.fig_roofline,
    "cost": fig_cost,
}


@style.style()
def fig_run(record: dict, run_dir: Path) -> Figure:
    """One run as it went: loss and duration of each optimizer step, with the step from which it was timed.

    Raises NotMeasured for a run that took no step.
    """
    path = run_dir / "steps.jsonl"
    steps = pd.read_json(path, lines=True) if record["status"] == "ok" else pd.DataFrame()
    if steps.empty:
        raise NotMeasured(f"{record['run_id']} is {record['status']}: {record['error']['message']}")
    title = f"{record['run_id']}: loss {steps['loss'].iloc[-20:].mean():.2f} at the end"
    figure = style.new_figure(title, "", 3.2)
    begin = record["spec"]["preset"]["measure_from"]
    for axis, column, name in zip(figure.subplots(1, 2), ("loss", "ms"), ("training loss", "step in ms"), strict=True):
        axis.plot(steps["step"], steps[column], color=BLUE, linewidth=1)
        axis.axvline(begin, color="0.4", linestyle="--", linewidth=1)
        axis.set(xlabel="optimizer step (timed right of the dashed line)", ylabel=name)
    axis.set_yscale("log")
    return figure


def show_run(record: dict, runs: str | Path):
    """For a notebook: fig_run of the run that `record` is of, below the folder `runs`."""
    return style.show(lambda _: fig_run(record, Path(runs, record["group"], record["run_id"])), None)


def _lines(runs: pd.DataFrame) -> pd.DataFrame:
    groups = sorted(set(runs["group"]))
    if len(groups) != 1:
        raise ReportError(f"a figure shows one group, not {', '.join(groups) or 'none'}")
    return summarise(runs)


def _timed(runs: pd.DataFrame) -> pd.DataFrame:
    """The lines of the largest micro-batch at which the baseline has a speed, for each length, model and so on.

    Raises NotMeasured where there is none, and where most runs shared the GPU: a few that did not must not stand for
    the group.
    """
    lines, done = _lines(runs), runs[runs["status"] == "ok"]
    if len(done) and done["time.wall_s"].notna().mean() < 0.5:
        raise NotMeasured("most runs of this group shared the GPU, and such runs record no times")
    first = baseline(runs)
    base = lines[(lines["variant"] == first) & lines["samples_per_s"].notna()].sort_values("micro_batch")
    if base.empty:
        raise NotMeasured(f"{first} has no measured samples_per_s")
    others = [name for name in AXIS_NAMES if name != "micro_batch"]
    return lines.merge(base.drop_duplicates(others, keep="last")[AXIS_NAMES])


def _panels(runs, lines, titles, parts, height) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """A figure with caption, and (axis, content) of a panel for each (label, content) of `parts`.

    Of `titles`, (label, sentence) of each cell, the first is the figure's, with its label where there are several
    panels; `height(content)` is in inches.
    """
    label, title = titles[0]
    title = ("On a CPU: " if on_cpu(runs) else "") + title + (f" ({label})" if label and len(parts) > 1 else "")
    heights = [height(content) for _, content in parts]
    figure = style.new_figure(title, sentences.caption(runs, lines), sum(heights) + 0.75 * len(parts) + 1.0)
    panels = []
    for axis, (name, content) in zip(
        figure.subplots(len(parts), height_ratios=heights, squeeze=False).flat, parts, strict=True
    ):
        axis.set_title(name, loc="right", fontsize=10, pad=22)  # above the legend, which is in line with the columns
        panels.append((axis, content))
    return figure, panels
