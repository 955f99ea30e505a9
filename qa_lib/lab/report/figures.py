"""The figures that several pages draw: the ladder of speeds, and a run as it went.

What profiles show is drawn in profile_figures.py, the rivals in rivals.py, and what one page alone
shows in report_figures.py, curve_figures.py, tradeoffs.py, parallel_figures.py, batch_figures.py.
A `fig_*(runs)` takes the runs of one group. Titles say the finding; a figure whose values no record
holds raises NotMeasured.
"""

import os
import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from qa_lib.lab.report import spoken, style
from qa_lib.lab.report.evidence import (
    NotMeasured,
    baseline,
    commits,
    largest_micro_batch,
    on_other_data,
    share_a_sitting,
    usual_conditions,
)
from qa_lib.lab.report.format import MISSING, number, percent
from qa_lib.lab.report.stats import LEVEL
from qa_lib.lab.report.summary import summary
from qa_lib.records.archive import Run
from qa_lib.spec.variants import BASELINES, RECOMMENDED, VARIANTS, tagged


def timed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of `summary` that the speeds of a group's variants are compared by.

    They are those of the usual conditions at the largest micro-batch at which the baseline has a
    speed.

    Raises NotMeasured where there is none, and where most runs shared the GPU: a few that did not
    must not stand for the group.
    """
    done = runs[runs["status"] == "ok"]
    if len(done) and done["time.wall_s"].notna().mean() < 0.5:
        raise NotMeasured("most runs of this group shared the GPU, and such runs record no times")
    lines = usual_conditions(summary(runs))
    of_baseline = lines[(lines["variant"] == baseline(runs)) & lines["samples_per_s"].notna()]
    if of_baseline.empty:
        raise NotMeasured(
            f"the baseline {baseline(runs)} has no measured speed in this group, and ratios need it"
        )
    return lines[lines["micro_batch"] == of_baseline["micro_batch"].max()]


def speed_finding(lines: pd.DataFrame) -> str:
    """Return how far the ladder reaches, as 'E-norm trains 11.5× as fast as A1, ...'.

    It is compared with the baseline, and with the quicker of the Trainer and plain PyTorch, where
    they share a sitting with it. `lines` are those of `summary` at one micro-batch.
    """
    base = baseline(lines)
    top, rival = _top_and_rival(lines)
    if top is None:
        return f"No variant beside {base} has a speed here"
    by_variant = lines.set_index("variant")
    speed = by_variant["samples_per_s"]
    findings = []
    if pd.notna(by_variant.loc[top, "ratio"]):
        findings.append(f"{number(by_variant.loc[top, 'ratio'])}× as fast as {base}")
    if rival is not None:
        faster = number(speed[top] / speed[rival])
        findings.append(f"{faster}× as fast as {_what_it_is(rival)} ({rival})")
    if not findings:
        findings = [f"{number(speed[top])} samples/s"]
    return f"{top} trains {', '.join(findings)}"


def _what_it_is(rival: str) -> str:
    """Return which of the rivals a variant is, in words."""
    if VARIANTS[rival].change == {"engine": "trainer"}:
        return "the plain Trainer"
    return "plain PyTorch" if rival in tagged("plain") else "the best Trainer"


def _top_and_rival(lines: pd.DataFrame) -> tuple[str | None, str | None]:
    """Return the variant that the ladder reaches, and the quicker of the Trainer and plain PyTorch.

    Each is None where no such variant has a speed in `lines`, which are those of `summary`, and the
    rival where it shares no sitting with the other.
    """
    timed_lines = lines.dropna(subset="samples_per_s").set_index("variant")
    rungs = [name for name in tagged("ladder") if name in timed_lines.index]
    rungs = [name for name in rungs if name != baseline(lines)]
    if not rungs:
        return None, None
    top = RECOMMENDED if RECOMMENDED in rungs else rungs[-1]
    is_rival = timed_lines.index.isin([*tagged("trainer"), *tagged("plain")])
    rivals = timed_lines[is_rival & share_a_sitting(timed_lines["sittings"], top)]
    return top, None if rivals.empty else rivals["samples_per_s"].idxmax()


def picture_link(path: Path) -> str:
    """Return a figure as Markdown with its title in words; an empty text if it was not drawn."""
    if not path.is_file():
        return ""
    with Image.open(path) as image:
        title = image.text.get("Title", path.stem)
    return f"![{title}]({Path(os.path.relpath(path)).as_posix()})"


# The ladder.


MOST = 14  # bars of a ladder, above which small gains are left out
LARGE = 1.10  # a gain over the variant that a rung changes, from which on it stays
LETTERS = 42  # of a line of a bar's name


def fig_ladder(runs: pd.DataFrame) -> Figure:
    """Draw the training speed rung by rung, then that of the Trainer and of plain PyTorch.

    Beside each bar stand its factors to the baseline, by samples/s and by kernel time, each where
    most have one, and to the nearest ancestor that is shown. None stands there between variants
    that share no sitting. A long ladder has its `_large_rungs` alone.

    Raises NotMeasured where there are fewer than two rungs.
    """
    base = baseline(runs)
    lines = timed(runs)
    order = list(dict.fromkeys([base, *tagged("ladder"), *tagged("trainer"), *tagged("plain")]))
    every = lines[lines["variant"].isin(order)]
    every = every.sort_values("variant", key=lambda names: names.map(order.index))
    if len(every) < 2:
        raise NotMeasured("the ladder has one rung")
    shown = _large_rungs(every, base).reset_index(drop=True)
    has_ratios = shown["ratio"].notna().mean() > 0.5
    has_kernels = shown["kernel_ratio"].notna().mean() > 0.5
    notes = [
        f"{shown['micro_batch'].iloc[0]} samples in a forward pass",
        f"Whiskers: {LEVEL} % intervals, of three runs or more",
        "In brackets: compared with that, and not with the one above",
        style.code(commits(largest_micro_batch(runs))),
    ]
    if has_kernels:
        notes.insert(2, "By kernels: the ratio of GPU time alone")
    if (shown["samples_per_s"].notna() & shown["ratio"].isna()).any():
        notes.append("No ratios between sittings")
    if on_other_data(runs):
        notes.append(on_other_data(runs))
    if len(shown) < len(every):
        left_out = len(every) - len(shown)
        notes.insert(1, f"{left_out} steps that gain less than {percent(LARGE - 1)} are not drawn")
    figure = style.group_figure(
        runs, title=speed_finding(lines), note=". ".join(notes), height=0.34 * len(shown) + 1.75
    )
    axis = figure.subplots()
    _draw_speeds(axis, shown, base)
    speed = shown["samples_per_s"]
    columns = {"samples/s": speed.map(number)}
    if has_ratios:
        columns[f"× {base}"] = shown["ratio"].map(number)
    if has_kernels:
        columns["by kernels"] = shown["kernel_ratio"].map(number)
    columns["× variant above"] = _gains(shown)
    columns["n"] = shown["n"].map(str)
    style.columns(axis, columns)
    style.name_bars(axis, [style.wrap(spoken.rung(name), LETTERS) for name in shown["variant"]])
    axis.set(xlabel="samples/s in training (longer is faster)", xlim=(0, 1.05 * speed.max()))
    axis.locator_params(axis="x", nbins=5)
    style.legend(axis)
    return figure


def _large_rungs(lines: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return the lines of a ladder that are drawn, all of them where they are at most MOST.

    Where there are more, three kinds stay: those that train LARGE times as fast as the nearest
    ancestor with a speed, those with the tag `headline`, and those that the title speaks of.
    """
    if len(lines) <= MOST:
        return lines
    stay = {base, *_top_and_rival(lines), *tagged("headline")}
    speed = lines.set_index("variant")["samples_per_s"].dropna()
    for name in speed.index:
        ancestor = _nearest_ancestor(name, speed.index)
        if ancestor is not None and speed[name] >= LARGE * speed[ancestor]:
            stay.add(name)
    return lines[lines["variant"].isin(stay)]


def _nearest_ancestor(variant: str, names: pd.Index) -> str | None:
    """Return the nearest ancestor of a variant that is among some names, None without any."""
    ancestor = VARIANTS[variant].parent
    while ancestor is not None and ancestor not in names:
        ancestor = VARIANTS[ancestor].parent
    return ancestor


def _draw_speeds(axis: Axes, shown: pd.DataFrame, base: str) -> None:
    """Draw a bar with its interval for each line, and where there is no speed, the reason."""
    speed = shown["samples_per_s"]
    for kind, part in speed.groupby(style.kinds(shown["variant"], base), sort=False):
        axis.barh(part.index, part, color=style.KINDS[kind], label=kind, height=0.7)
    axis.errorbar(
        speed,
        shown.index,
        xerr=shown["samples_per_s±"],
        fmt="none",
        color="black",
        capsize=3,
        linewidth=1,
    )
    for bar, note in shown.loc[speed.isna(), "note"].items():
        reason = textwrap.shorten(note or "not measured", 60)
        axis.text(0, bar, f" {reason}", va="center", fontsize=8, parse_math=False)


def _gains(shown: pd.DataFrame) -> list[str]:
    """Return the speed of each line over that of its nearest ancestor among them, as text.

    The ancestor is named where it is not the variant of the line above. There is no text for two
    that share no sitting.
    """
    timed_lines = shown.set_index("variant").dropna(subset="samples_per_s")
    speed = timed_lines["samples_per_s"]
    sittings = timed_lines["sittings"]
    gains = []
    above = None
    for name in shown["variant"]:
        ancestor = _nearest_ancestor(name, speed.index)
        text = MISSING
        is_told = ancestor is not None and name in speed
        if is_told and not sittings[name].isdisjoint(sittings[ancestor]):
            text = number(speed[name] / speed[ancestor])
            if ancestor != above:
                text += f" ({ancestor})"
        gains.append(text)
        above = name
    return gains


# One run.


def fig_run(records: list[dict], runs: str | Path) -> Figure:
    """Draw the loss and the duration of each optimizer step of runs below the folder `runs`.

    The loss is its mean over 20 steps. A dashed line marks the step from which a run was timed. A
    CPU's durations are those of whatever else it does, and are not drawn.

    Raises NotMeasured for runs that took no step.
    """
    logs = {}
    for record in records:
        if record["status"] == "ok":
            run = Run(record, Path(runs, record["group"], record["run_id"]))
            logs[record["spec"]["variant"]] = run.steps().dropna(subset="loss")
    if not logs or any(log.empty for log in logs.values()):
        raise NotMeasured(
            "; ".join(f"{record['run_id']} is {record['status']}" for record in records)
        )
    losses = {name: log["loss"].rolling(20, min_periods=1).mean() for name, log in logs.items()}
    at_the_end = [f"{name} {loss.iloc[-1]:.2f}" for name, loss in losses.items()]
    title = f"Loss of the last 20 steps: {', '.join(at_the_end)}"
    note = "One run of each: a difference of their losses at the end shows nothing."
    figure = style.new_figure(title, note if len(logs) > 1 else "", height=3.2)
    spec = records[0]["spec"]
    has_times = spec["hardware"] != "cpu"
    axes = figure.subplots(1, 2 if has_times else 1, squeeze=False)[0]
    looks = style.strokes(logs, BASELINES[VARIANTS[next(iter(logs))].task])
    for name, log in logs.items():
        axes[0].plot(log["step"], losses[name], label=name, **looks[name])
    axes[0].set(xlabel="optimizer step", ylabel="training loss, mean of 20 steps")
    axes[0].legend(fontsize=8)
    if has_times:
        _draw_durations(axes[1], logs, looks, spec["preset"]["measure_from"])
    return figure


def _draw_durations(
    axis: Axes, logs: dict[str, pd.DataFrame], looks: dict[str, dict], timed_from: int
) -> None:
    """Draw how long each step of some runs took, and from which step on they were timed."""
    for name, log in logs.items():
        axis.plot(log["step"], log["ms"], **looks[name])
    axis.axvline(timed_from, color="0.4", linestyle="--", linewidth=1)
    axis.set(
        xlabel="optimizer step (timed right of the dashed line)", ylabel="step in ms", yscale="log"
    )
