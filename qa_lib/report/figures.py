"""The figures that several pages draw: the ladder of speeds, and one run as it went. What one page alone shows is drawn
in its notebook.

A `fig_*(runs)` takes the runs of one group. Titles say the finding; a figure whose values no record holds raises
NotMeasured.
"""

import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from qa_lib.archive import Run
from qa_lib.report import style
from qa_lib.report.format import MISSING, number
from qa_lib.report.load import NotMeasured, baseline, commits, usual
from qa_lib.report.stats import LEVEL
from qa_lib.report.style import BLUE, GREY
from qa_lib.report.summary import summary
from qa_lib.variants import RECOMMENDED, VARIANTS, tagged


def timed(runs: pd.DataFrame) -> pd.DataFrame:
    """The lines of a group's usual conditions at the largest micro-batch at which the baseline has a speed.

    Raises NotMeasured where there is none, and where most runs shared the GPU: a few that did not must not stand for
    the group.
    """
    done = runs[runs["status"] == "ok"]
    if len(done) and done["time.wall_s"].notna().mean() < 0.5:
        raise NotMeasured("most runs of this group shared the GPU, and such runs record no times")
    lines = usual(summary(runs))
    base = lines[(lines["variant"] == baseline(runs)) & lines["samples_per_s"].notna()]
    if base.empty:
        raise NotMeasured(f"the baseline {baseline(runs)} has no measured speed in this group, and ratios need it")
    return lines[lines["micro_batch"] == base["micro_batch"].max()]


def speed_finding(lines: pd.DataFrame) -> str:
    """How far the ladder reaches in lines of one micro-batch, and the quickest Trainer beside it.
    Raises NotMeasured."""
    base = baseline(lines)
    ratios = lines.set_index("variant")["ratio"].dropna()
    if base not in ratios:
        raise NotMeasured(f"{base} has no measured speed")
    climbed = [name for name in tagged("ladder") if name in ratios and name != base]
    if not climbed:
        return f"No variant beside {base} has a speed here"
    top = RECOMMENDED if RECOMMENDED in climbed else climbed[-1]
    said = f"{top} trains {number(ratios[top])}× as fast as {base}"
    peers = ratios[ratios.index.isin(tagged("peer"))]
    if len(peers):
        peer = peers.idxmax()
        plain = "plain" if VARIANTS[peer].change == {"engine": "trainer"} else "best"
        said += f", {number(ratios[top] / peers[peer])}× as fast as the {plain} Trainer ({peer})"
    return said


def in_words(names) -> list[str]:
    """Names of variants with what each is for, as the labels of bars."""
    return [style.wrap(f"{name}: {VARIANTS[name].why}" if name in VARIANTS else name, 48) for name in names]


def fig_ladder(runs: pd.DataFrame) -> Figure:
    """Training speed rung by rung, with its factors to the baseline and to the variant that it changes; then the
    Trainer's."""
    order, lines = [*tagged("ladder"), *tagged("peer")], timed(runs)
    shown = lines[lines["variant"].isin(order)].sort_values("variant", key=lambda names: names.map(order.index))
    if len(shown) < 2:
        raise NotMeasured("the ladder has one rung")
    shown = shown.reset_index(drop=True)
    note = (
        f"micro-batch {shown['micro_batch'].iloc[0]} · whiskers: {LEVEL} % intervals where n ≥ 3 · code {commits(runs)}"
    )
    figure = style.group_figure(runs, speed_finding(lines), note, 0.34 * len(shown) + 1.75)
    axis, speed = figure.subplots(), shown["samples_per_s"]
    trainer = shown["variant"].isin(tagged("peer"))
    for chosen, color, label in ((~trainer, BLUE, "this library"), (trainer, GREY, "transformers.Trainer")):
        if chosen.any():  # the legend gives bars that are none a colour of their own
            axis.barh(shown.index[chosen], speed[chosen], color=color, label=label, height=0.7)
    axis.errorbar(speed, shown.index, xerr=shown["samples_per_s±"], fmt="none", color="black", capsize=3, linewidth=1)
    for height, note in shown.loc[speed.isna(), "note"].items():
        axis.text(0, height, " " + textwrap.shorten(note or "not measured", 60), va="center", fontsize=8)
    factors = {f"× {baseline(runs)}": shown["ratio"].map(number), "× row above": _gains(shown)}
    style.columns(axis, {"samples/s": speed.map(number)} | factors | {"n": shown["n"].map(str)})
    style.name_bars(axis, in_words(shown["variant"]))
    axis.set(xlabel="samples/s in training (longer is faster)", xlim=(0, 1.05 * speed.max()))
    style.legend(axis)
    return figure


def _gains(shown: pd.DataFrame) -> list[str]:
    """The speed of each line over that of the variant which it changes; this is named where it does not stand above."""
    speed = shown.set_index("variant")["samples_per_s"]
    parents = [VARIANTS[name].parent for name in speed.index]
    ratios = map(number, speed / speed.reindex(parents).to_numpy())
    found = zip(ratios, parents, ["", *speed.index[:-1]], strict=True)
    return [ratio if parent == above or ratio == MISSING else f"{ratio} ({parent})" for ratio, parent, above in found]


def fig_run(record: dict, runs: str | Path) -> Figure:
    """One run below the folder `runs` as it went: loss and duration of each optimizer step, with the step from which it
    was timed. Raises NotMeasured for a run that took no step."""
    steps = Run(record, Path(runs, record["group"], record["run_id"])).steps().dropna(subset="loss")
    if record["status"] != "ok" or steps.empty:
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
