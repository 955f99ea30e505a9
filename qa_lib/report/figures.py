"""The figures of the report: `fig_*(runs) -> Figure`, each from the runs of one group, with a panel for each cell.

Titles are sentences computed by sentences.py; a figure whose values no record holds raises NotMeasured. Drawing the
same records twice gives the same bytes.
"""

from pathlib import Path

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from qa_lib.report import profiles, quality, sentences
from qa_lib.report.runs import BASELINE, NotMeasured, ReportError, baseline, cells, in_cells, on_cpu, score_name
from qa_lib.report.sentences import LADDER, PEERS
from qa_lib.report.style import COLORS, GREY, MARKERS, bars, new_figure, show, style, wrap
from qa_lib.report.tables import cost_table, family_lines, summarise
from qa_lib.report.text import factor, gain, number, share
from qa_lib.variants import FAMILIES, VARIANTS

# Labels are tried at these offsets from their point, in points, nearest first; the first NEAR need no line to it.
_AROUND = ((8, 0), (-8, 0), (6, 9), (6, -9), (-6, 9), (-6, -9))
OFFSETS = [(x * r, y * r) for r in (1, 2, 3, 4.5, 6) for x, y in _AROUND]
NEAR = len(_AROUND)


@style()
def fig_ladder(runs: pd.DataFrame) -> Figure:
    """Training speed rung by rung, each with its factor to A1 and to the row it changes; the Trainer beside."""
    lines, first = _timed(runs), baseline(runs)
    shown = lines[lines["variant"].isin([*PEERS, *LADDER])]
    parts = cells(shown)
    figure, axes = _panels(runs, shown, sentences.speed_finding(lines), parts, lambda part: 0.36 * len(part))
    end = (shown["features_per_s"] + shown["features_per_s±"].fillna(0)).max()
    for axis, (_, part) in zip(axes, parts, strict=True):
        rows = part.set_index("variant").reindex([name for name in (*PEERS, *LADDER) if name in set(part["variant"])])
        rows["label"] = [f"{name}   {wrap(text, 28)}" for name, text in rows["change"].items()]
        colors = {line["label"]: GREY if name in PEERS else COLORS[line["family"]] for name, line in rows.iterrows()}
        bars(axis, rows, "features_per_s", "label", hue="label", palette=colors)
        for height, (name, line) in enumerate(rows.iterrows()):
            speed, half = line["features_per_s"], line["features_per_s±"]
            if pd.isna(speed):
                _say(axis, 0, height, line["note"] or "not measured")
                continue
            said = f"{number(speed)}/s"
            if name != first:
                said += f"   {factor(line['ratio'])} vs {first}"
            parent = VARIANTS[name].parent
            if parent != first and parent in rows.index and pd.notna(rows.loc[parent, "features_per_s"]):
                said += f"   {factor(speed / rows.loc[parent, 'features_per_s'])} vs {parent}"
            if pd.notna(half):
                axis.errorbar(speed, height, xerr=half, color="black", capsize=3, linewidth=1)
            _say(axis, speed + (0 if pd.isna(half) else half), height, said)
        # One scale for all panels, with room for the words behind the longest bar and its whisker.
        axis.set(xlabel="features/s in training (longer is faster)", ylabel="row and its change", xlim=(0, 1.9 * end))
    return figure


@style()
def fig_f1_time(runs: pd.DataFrame) -> Figure:
    """The score against training time, a point a row."""
    lines = _lines(runs)
    time = ("train_s", "training time in s (compilation included)")
    return _scatter(runs, lines, sentences.quality_finding(lines), time, ("score", score_name(lines)))


@style()
def fig_memory(runs: pd.DataFrame) -> Figure:
    """Peak GPU memory against step time, a point a row. Raises NotMeasured where no GPU was used."""
    lines = _timed(runs)
    time, peak = ("step_ms", "median step in ms"), ("peak_mib", "peak GPU memory in MiB")
    return _scatter(runs, lines, sentences.memory_finding(lines), time, peak)


@style()
def fig_peft(runs: pd.DataFrame) -> Figure:
    """The score against the share of parameters that train, for the PEFT rows; A1 and A3 to compare."""
    lines = _lines(runs)
    title = sentences.peft_finding(lines)
    rows = family_lines(lines, "B").copy()
    rows["share"] = 100 * rows["trainable"] / rows["params"]
    rows["text"] = rows["variant"] + " (" + (rows["share"] / 100).map(share) + ")"
    part_of = ("share", "parameters that train, in % of all (log)")
    return _scatter(runs, rows, title, part_of, ("score", score_name(lines)), log=True)


@style()
def fig_equivalence(runs: pd.DataFrame) -> Figure:
    """F1 of each row minus the baseline's with its 90 % interval over seeds, at threshold 0 and below it at the best
    threshold, and the margin that counts as equal.

    Rows far off, and those without an interval, are left to the table. Raises NotMeasured where none has one.
    """
    title = sentences.equivalence_finding(runs)
    whiskers = "whiskers: t-based 90 % interval over equal seeds; within the band counts as equal"
    parts = in_cells(runs.drop(columns="micro_batch"), _near)
    figure, axes = _panels(runs, _lines(runs), title, parts, lambda rows: 0.3 * len(rows) + 0.3, whiskers)
    color = {"within": COLORS["A"], "no worse": COLORS["A"], "open": GREY, "beyond": COLORS["B"]}
    margin = quality.MARGIN
    for axis, (_, rows) in zip(axes, parts, strict=True):
        for height, row in rows.iterrows():
            ink = color[row["verdict"]]
            axis.errorbar(row["delta"], height - 0.15, xerr=row["half"], fmt="o", color=ink, capsize=2, markersize=5)
            axis.errorbar(row["best_delta"], height + 0.2, xerr=row["best_half"], fmt="o", color=ink, capsize=2,
                          markersize=4, markerfacecolor="white", linewidth=1)  # fmt: skip
            said = f"{gain(row['delta'], row['half'])} (n = {row['n']})"
            _say(axis, max(row["delta"] + row["half"], row["best_delta"] + row["best_half"]), height, said)
        axis.axvspan(-margin, margin, color="0.92", zorder=0)
        axis.axvline(0, color="0.4", linewidth=1)
        axis.set_yticks(range(len(rows)), rows["variant"])
        label = f"F1 minus {BASELINE}'s at threshold 0 (filled) and at the best one (hollow); band: ± {margin:g}"
        axis.set(xlabel=label, ylabel="row", ylim=(-0.7, len(rows) - 0.3))
        spans = [rows[f"{at}delta"].abs() + rows[f"{at}half"] for at in ("", "best_")]
        reach = max(margin, *(span.max() for span in spans))
        axis.set_xlim(-1.1 * reach, 1.7 * reach)
        axis.invert_yaxis()
        axis.grid(False, axis="y")
    return figure


def _near(runs: pd.DataFrame) -> pd.DataFrame:
    """Of quality.equivalence the rows with an interval, and a difference that a figure has room for."""
    rows = quality.equivalence(runs).dropna(subset=["half", "best_half"])
    return rows[rows["delta"].abs() < 4 * quality.MARGIN].reset_index(drop=True)


@style()
def fig_cost(runs: pd.DataFrame) -> Figure:
    """What each row took from start to record, all its runs together."""
    lines, title = _timed(runs), sentences.cost_finding(runs)
    rows = cost_table(runs).iloc[:-1]
    figure, (axis,) = _panels(runs, lines, title, [("", rows)], lambda rows: 0.26 * len(rows))
    bars(axis, rows, "wall_s", "row", color=COLORS["A"])
    for height, row in enumerate(rows.itertuples()):
        _say(axis, row.wall_s, height, f"{number(row.wall_s)} s" + (f" ({row.runs} runs)" if row.runs > 1 else ""))
    limits = (0, 1.18 * rows["wall_s"].max())
    axis.set(xlabel="wall time in s: data, training, evaluation", ylabel="row", xlim=limits)
    return figure


FIGURES = {
    "ladder": fig_ladder,
    "equivalence": fig_equivalence,
    "f1-time": fig_f1_time,
    "memory": fig_memory,
    "peft": fig_peft,
    "timeline": profiles.fig_timeline,
    "phases": profiles.fig_phases,
    "roofline": profiles.fig_roofline,
    "cost": fig_cost,
}


@style()
def fig_run(record: dict, run_dir: Path) -> Figure:
    """One run as it went: loss and duration of each optimizer step, with the step from which it was timed.

    Raises NotMeasured for a run that took no step.
    """
    path = run_dir / "steps.jsonl"
    steps = pd.read_json(path, lines=True) if record["status"] == "ok" else pd.DataFrame()
    if steps.empty:
        raise NotMeasured(f"{record['run_id']} is {record['status']}: {record['error']['message']}")
    title = f"{record['run_id']}: loss {steps['loss'].iloc[-20:].mean():.2f} at the end"
    figure = new_figure(title, "", 3.2)
    begin = record["spec"]["scale"]["measure_from"]
    for axis, column, name in zip(figure.subplots(1, 2), ("loss", "ms"), ("training loss", "step in ms"), strict=True):
        sns.lineplot(steps, x="step", y=column, color=COLORS["A"], linewidth=1, ax=axis)
        axis.axvline(begin, color="0.4", linestyle="--", linewidth=1)
        axis.set(xlabel="optimizer step (timed right of the dashed line)", ylabel=name)
    axis.set_yscale("log")
    return figure


def show_run(record: dict, runs: str | Path):
    """For a notebook: fig_run of the run that `record` is of, below the folder `runs`."""
    return show(lambda _: fig_run(record, Path(runs, record["group"], record["run_id"])), None)


def _lines(runs: pd.DataFrame) -> pd.DataFrame:
    groups = sorted(set(runs["group"]))
    if len(groups) != 1:
        raise ReportError(f"a figure shows one group, not {', '.join(groups) or 'none'}")
    return summarise(runs)


def _timed(runs: pd.DataFrame) -> pd.DataFrame:
    """_lines() of a group that is about time. Raises NotMeasured where most runs shared the GPU: a few that did not
    must not stand for it."""
    lines, done = _lines(runs), runs[runs["status"] == "ok"]
    if len(done) and done["time.wall_s"].notna().mean() < 0.5:
        raise NotMeasured("most runs of this group shared the GPU, and such runs record no times")
    return lines


def _panels(runs, lines, title, parts, height, whiskers=sentences.WHISKERS) -> tuple[Figure, list[Axes]]:
    """A figure with title and caption, and the axes of a panel for each (label, content) of `parts`.

    `height(content)` is that of a panel's content in inches.
    """
    heights = [height(content) for _, content in parts]
    if on_cpu(runs):
        title = f"On a CPU: {title}"
    note = sentences.caption(runs, lines, whiskers)
    figure = new_figure(title, note, sum(heights) + 0.75 * len(parts) + 1.0)
    axes = figure.subplots(len(parts), squeeze=False, height_ratios=heights)[:, 0]
    for axis, (label, _) in zip(axes, parts, strict=True):
        axis.set_title(label, loc="left", fontsize=10)
    return figure, list(axes)


def _scatter(runs, lines, title, x: tuple[str, str], y: tuple[str, str], log: bool = False) -> Figure:
    """Points (column, axis label) of all lines that have both, labelled by `text` or else the row's name."""
    points = lines.dropna(subset=[x[0], y[0]]).reset_index(drop=True)
    # The half lengths of a point's whiskers, 0 where it has none.
    for name, (column, _) in (("across", x), ("up", y)):
        points[name] = points[f"{column}±"].fillna(0.0) if f"{column}±" in points else 0.0
    parts = cells(points)
    figure, axes = _panels(runs, points, title, parts, lambda _: 4.2)
    for axis, (_, part) in zip(axes, parts, strict=True):
        families = sorted(set(part["family"]))
        sns.scatterplot(
            part, x=x[0], y=y[0], hue="family", style="family", hue_order=families, style_order=families,
            palette=[COLORS[name] for name in families], markers=[MARKERS[name] for name in families], s=70, ax=axis,
        )  # fmt: skip
        for line in part.to_dict("records"):
            color = COLORS[line["family"]]
            whiskers = line["up"] or None, line["across"] or None
            axis.errorbar(line[x[0]], line[y[0]], *whiskers, color=color, capsize=2, linewidth=1)
        axis.set(xlabel=x[1], ylabel=y[1], xscale="log" if log else "linear")
        axis.margins(0.1)
        handles, names = axis.get_legend_handles_labels()
        axis.legend(handles, [f"{name}: {FAMILIES.get(name, name)}" for name in names], fontsize=8)
    figure.canvas.draw()  # the layout is settled by drawing, and only then do data have places in pixels
    for axis, (_, part) in zip(axes, parts, strict=True):
        texts = part["text"] if "text" in part else part["variant"]
        _label(axis, list(zip(part[x[0]], part[y[0]], part["across"], part["up"], texts, strict=True)))
    return figure


def _label(axis: Axes, points: list[tuple]) -> None:
    """Write the text of each (x, y, across, up, text) beside its point at the first free place; with a line to it if
    further off."""
    renderer, pixel = axis.figure.canvas.get_renderer(), axis.figure.dpi / 72
    taken = [axis.get_legend().get_window_extent(renderer)]
    for x, y, across, up, _ in points:
        for dx, dy, pad in ((0, 0, 5), (across, 0, 2), (0, up, 2)):
            ends = axis.transData.transform([(x - dx, y - dy), (x + dx, y + dy)])
            taken.append(Bbox(ends).padded(pad * pixel))
    for x, y, *_, text in sorted(points):
        px, py = axis.transData.transform((x, y))
        note = axis.annotate(
            text, (x, y), (0, 0), textcoords="offset points", fontsize=9, va="center",
            arrowprops={"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
        )  # fmt: skip
        note.set_in_layout(False)
        size = note.get_window_extent(renderer)
        boxes = []
        for dx, dy in OFFSETS:
            left = px + dx * pixel - (size.width if dx < 0 else 0)
            boxes.append(Bbox.from_bounds(left, py + dy * pixel - size.height / 2, size.width, size.height))
        crowds = [sum(map(box.overlaps, taken)) + (0 if _inside(box, axis.bbox) else 10) for box in boxes]
        best = crowds.index(min(crowds))  # the nearest of the free places, or else the least crowded
        note.set_position(OFFSETS[best])
        note.set_ha("right" if OFFSETS[best][0] < 0 else "left")
        note.arrow_patch.set_visible(best >= NEAR)
        taken.append(boxes[best])


def _inside(box: Bbox, frame: Bbox) -> bool:
    return frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1


def _say(axis: Axes, x: float, y: float, text: str) -> None:
    note = axis.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
    note.set_in_layout(False)
    note.set_path_effects([withStroke(linewidth=3, foreground="white")])  # legible across grid lines
