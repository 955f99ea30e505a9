"""The figures that several pages draw: the ladder of speeds, one run as it went, and profiles: a step by phase and
part, memory by what fills it. What one page alone shows is drawn in its notebook.

A `fig_*(runs)` takes the runs of one group. Titles say the finding; a figure whose values no record holds raises
NotMeasured.
"""

import textwrap
from pathlib import Path

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from qa_lib.lab.report import style
from qa_lib.lab.report.evidence import (
    NotMeasured,
    baseline,
    commits,
    largest_micro_batch,
    table_order,
    usual_conditions,
)
from qa_lib.lab.report.format import MISSING, number, percent
from qa_lib.lab.report.stats import LEVEL
from qa_lib.lab.report.summary import summary
from qa_lib.measure.trace import PARTS, PHASES
from qa_lib.records.archive import Run
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged

PART_COLORS = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True)) | {
    "waiting": "0.9"
}
# What fills memory: words for it, and the keys of a profile.
HELD = {"parameters": "params", "optimizer state": "optimizer", "activations": "activations",
        "gradients and workspace": "workspace", "reserved, not used": "fragmentation"}  # fmt: skip
SAME = 0.05  # by so much the peaks of a profile and of a run of the same code may differ: they draw other batches
HELD_COLORS = dict(zip(HELD, [*style.COLORBLIND[:4], "0.85"], strict=True))


def timed(runs: pd.DataFrame) -> pd.DataFrame:
    """The lines of a group's usual conditions at the largest micro-batch at which the baseline has a speed.

    Raises NotMeasured where there is none, and where most runs shared the GPU: a few that did not must not stand for
    the group.
    """
    done = runs[runs["status"] == "ok"]
    if len(done) and done["time.wall_s"].notna().mean() < 0.5:
        raise NotMeasured("most runs of this group shared the GPU, and such runs record no times")
    lines = usual_conditions(summary(runs))
    base = lines[(lines["variant"] == baseline(runs)) & lines["samples_per_s"].notna()]
    if base.empty:
        raise NotMeasured(
            f"the baseline {baseline(runs)} has no measured speed in this group, and ratios need it"
        )
    return lines[lines["micro_batch"] == base["micro_batch"].max()]


def speed_finding(lines: pd.DataFrame) -> str:
    """How far the ladder reaches in lines of one micro-batch that have the baseline's, and the quickest of the Trainer
    and plain PyTorch beside it."""
    base = baseline(lines)
    ratios = lines.set_index("variant")["ratio"].dropna()
    climbed = [name for name in tagged("ladder") if name in ratios and name != base]
    if not climbed:
        return f"No variant beside {base} has a speed here"
    top = RECOMMENDED if RECOMMENDED in climbed else climbed[-1]
    said = f"{top} trains {number(ratios[top])}× as fast as {base}"
    rivals = ratios[ratios.index.isin([*tagged("trainer"), *tagged("plain")])]
    if len(rivals):
        rival = rivals.idxmax()
        whose = "plain PyTorch" if rival in tagged("plain") else "the best Trainer"
        whose = "the plain Trainer" if VARIANTS[rival].change == {"engine": "trainer"} else whose
        said += f", {number(ratios[top] / rivals[rival])}× as fast as {whose} ({rival})"
    return said


def fig_ladder(runs: pd.DataFrame) -> Figure:
    """Training speed rung by rung, with its factors to the baseline and to the variant that it changes; then that of
    the Trainer and of plain PyTorch."""
    base, lines = baseline(runs), timed(runs)
    order = [*dict.fromkeys([base, *tagged("ladder"), *tagged("trainer"), *tagged("plain")])]
    shown = lines[lines["variant"].isin(order)]
    shown = shown.sort_values(
        "variant", key=lambda names: names.map(order.index), ignore_index=True
    )
    if len(shown) < 2:
        raise NotMeasured("the ladder has one rung")
    code = style.code(commits(largest_micro_batch(runs)))
    note = f"Micro-batch {shown['micro_batch'].iloc[0]}. Whiskers are {LEVEL} % intervals. {code}"
    figure = style.group_figure(runs, speed_finding(lines), note, 0.34 * len(shown) + 1.75)
    axis, speed = figure.subplots(), shown["samples_per_s"]
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
    for height, note in shown.loc[speed.isna(), "note"].items():
        axis.text(
            0,
            height,
            " " + textwrap.shorten(note or "not measured", 60),
            va="center",
            fontsize=8,
            parse_math=False,
        )
    factors = {f"× {base}": shown["ratio"].map(number), "× variant above": _gains(shown)}
    style.columns(axis, {"samples/s": speed.map(number)} | factors | {"n": shown["n"].map(str)})
    style.name_bars(
        axis, [style.wrap(f"{name}: {VARIANTS[name].why}", 48) for name in shown["variant"]]
    )
    axis.set(xlabel="samples/s in training (longer is faster)", xlim=(0, 1.05 * speed.max()))
    style.legend(axis)
    return figure


def _gains(shown: pd.DataFrame) -> list[str]:
    """The speed of each line over that of the variant which it changes; this is named where it does not stand above."""
    speed = shown.set_index("variant")["samples_per_s"]
    parents = [VARIANTS[name].parent for name in speed.index]
    ratios = map(number, speed / speed.reindex(parents).to_numpy())
    found = zip(ratios, parents, ["", *speed.index[:-1]], strict=True)
    return [
        ratio if parent == above or ratio == MISSING else f"{ratio} ({parent})"
        for ratio, parent, above in found
    ]


def fig_run(records: list[dict], runs: str | Path) -> Figure:
    """Runs below the folder `runs` as they went: loss, its mean over 20 optimizer steps, and duration of each step,
    with the step from which it was timed. Raises NotMeasured for runs that took no step."""
    logs = {
        record["spec"]["variant"]: Run(record, Path(runs, record["group"], record["run_id"]))
        for record in records
    }
    steps = {
        name: run.steps().dropna(subset="loss")
        for name, run in logs.items()
        if run.record["status"] == "ok"
    }
    if not steps or any(log.empty for log in steps.values()):
        raise NotMeasured(
            "; ".join(f"{record['run_id']} is {record['status']}" for record in records)
        )
    ends = [f"{log['loss'].iloc[-20:].mean():.2f} in {name}" for name, log in steps.items()]
    figure = style.new_figure(f"Training loss at the end: {', '.join(ends)}", "", 3.2)
    left, right = figure.subplots(1, 2)
    for name, log in steps.items():
        left.plot(
            log["step"], log["loss"].rolling(20, min_periods=1).mean(), linewidth=1, label=name
        )
        right.plot(log["step"], log["ms"], linewidth=1)
    right.axvline(
        records[0]["spec"]["preset"]["measure_from"], color="0.4", linestyle="--", linewidth=1
    )
    left.set(xlabel="optimizer step", ylabel="training loss, mean of 20 steps")
    right.set(
        xlabel="optimizer step (timed right of the dashed line)", ylabel="step in ms", yscale="log"
    )
    left.legend(fontsize=8)
    return figure


def profiles(runs: pd.DataFrame) -> pd.DataFrame:
    """The profiles beside the runs of a group, in table order: variant, micro_batch, name, profile, and the peak of its
    memory beside the run's, peak_mib and recorded_mib. Raises NotMeasured if there is none."""
    found = runs.rename(
        columns={"spec.variant": "variant", "memory.peak_alloc_mib": "recorded_mib"}
    )
    found = found.assign(profile=[run.profile() for run in runs["run"]]).dropna(subset="profile")
    if found.empty:
        raise NotMeasured(
            "no run of this group has a profile: python -m qa_lib profile VARIANT --preset S makes one"
        )
    found = found.sort_values("variant", key=table_order, kind="stable").reset_index(drop=True)
    found["peak_mib"] = [(profile["memory"] or {}).get("peak_mib") for profile in found["profile"]]
    several = found["micro_batch"].nunique() > 1
    sizes = found["micro_batch"].map(", micro-batch {}".format) if several else ""
    return found.assign(name=found["variant"] + sizes)


def with_memory(profiles: dict[str, dict]) -> dict[str, dict]:
    """Those of some profiles that have memory. Raises NotMeasured if none has."""
    if not (found := {name: profile for name, profile in profiles.items() if profile["memory"]}):
        raise NotMeasured("GPU memory is counted by the GPU's allocator, which a CPU has not")
    return found


def profile_figure(title: str, shown: dict[str, dict], height: float) -> Figure:
    """An empty figure of profiles with title and caption."""
    code = sorted({str(profile["code"]["commit"])[:7] for profile in shown.values()})
    sizes = sorted({profile["spec"]["micro_batch"] for profile in shown.values()})
    profile = next(iter(shown.values()))
    env = profile["env"]
    note = f"Group {profile['group']}, profiled apart from its timed runs, micro-batch {', '.join(map(str, sizes))}. "
    note += f"{style.code(', '.join(code))}. "
    note += (
        f"{env['gpu']}, host {env['cpu']}."
        if env["gpu"]
        else f"Operators' own times. {style.CPU_CAVEAT}."
    )
    return style.new_figure(title, note, height)


def fig_step(runs: pd.DataFrame) -> Figure:
    """A step of the baseline and one of the recommended variant, or else of the quickest profiled one, at the largest
    micro-batch at which both were profiled."""
    first, found = baseline(runs), profiles(runs)
    sizes = found.groupby("micro_batch")["variant"].agg(set)
    both = sizes.index[sizes.map(lambda names: {first} < names)]
    if both.empty:
        raise NotMeasured(f"no profile of {first} beside another variant's at the same micro-batch")
    shown = found[found["micro_batch"] == both.max()].set_index("variant")["profile"].to_dict()
    base = shown.pop(first)
    best = (
        RECOMMENDED
        if RECOMMENDED in shown
        else min(shown, key=lambda name: shown[name]["time"]["step_ms"])
    )
    return step({first: base, best: shown[best]})


def step(shown: dict[str, dict]) -> Figure:
    """What a step of each of some profiles {name: profile} spends its time on: a bar a phase, a block a part of the
    model; as it was without the profiler."""
    times = [profile["time"] for profile in shown.values()]
    title = "A step takes " + ", ".join(
        f"{number(shown[name]['time']['step_ms'])} ms in {name}" for name in shown
    )
    if times[-1]["step_ms"] < times[0]["step_ms"]:
        before, after = (pd.DataFrame(times[at]["parts"]).sum(axis="columns") for at in (0, -1))
        parts = before.sub(after, fill_value=0.0).nlargest(2).index
        title += f"; {' + '.join(parts)}: {number(before[parts].sum())} → {number(after.reindex(parts).sum())} ms"
    figure = profile_figure(title, shown, 1.4 + 1.3 * len(shown))
    axes = figure.subplots(len(shown), squeeze=False)[:, 0]
    for axis, name, time in zip(axes, shown, times, strict=True):
        table = (
            pd.DataFrame(time["parts"])
            .T.reindex([*PHASES, "waiting"], columns=[*PARTS, "waiting"])
            .fillna(0.0)
        )
        table.loc["waiting", "waiting"] = max(0.0, time["step_ms"] - time["busy_ms"])
        style.stack(axis, table, PART_COLORS)
        style.columns(axis, {"ms": table.sum(axis="columns").map(number)})
        said = f"{name}: {number(time['step_ms'])} ms a step, the GPU busy for {percent(time['busy_share'])}"
        if time["launches_per_step"] is not None:
            said += f", {time['launches_per_step']:,.0f} launches"
        axis.set_title(said, loc="left", fontsize=10)
    reach = max(axis.get_xlim()[1] for axis in axes)
    for axis in axes:
        axis.set_xlim(0, reach)
        for bars in axis.containers:  # a wide one has room for its number
            axis.bar_label(
                bars,
                fmt=lambda ms: number(ms) if ms > reach / 25 else "",
                label_type="center",
                fontsize=7,
            )
    axes[-1].set_xlabel("ms")
    style.legend(axes[0], 1.2)
    return figure


def fig_phases(runs: pd.DataFrame) -> Figure:
    """What fills the memory at its peak, a bar a profiled variant; without profiles of older code that took other
    memory than the run they lie beside."""
    found = profiles(runs)
    ours, theirs = (found[name].astype(float) for name in ("peak_mib", "recorded_mib"))
    return phases(
        found[~((ours - theirs).abs() > SAME * theirs)].set_index("name")["profile"].to_dict()
    )


def phases(shown: dict[str, dict]) -> Figure:
    """As fig_phases, for some profiles {name: profile}; those without memory are left out."""
    shown = with_memory(shown)
    memory = pd.DataFrame({name: profile["memory"] for name, profile in shown.items()}).T
    table = (
        memory[[f"{key}_mib" for key in HELD.values()]].astype(float).set_axis([*HELD], axis=1)
        / 1024
    )
    ended = memory["peak_phase"] == "optimizer"  # the activations are gone by then
    table.loc[ended, "gradients and workspace"] += memory["grads_mib"].astype(float) / 1024
    table.loc[ended, "activations"] = 0.0
    peaks = memory["peak_mib"].astype(float)
    most, other = peaks.idxmax(), RECOMMENDED if RECOMMENDED in peaks else peaks.idxmin()
    largest = table.loc[most].idxmax()
    shares = (1024 * table[largest] / peaks).map(percent)
    title = f"{largest.capitalize()} fill {shares[most]} of the peak in {most}"
    title += f", {shares[other]} in {other}" if other != most else ""
    figure = profile_figure(title, shown, 1.4 + 0.3 * len(shown))
    axis = figure.subplots()
    style.stack(axis, table, HELD_COLORS)
    style.columns(axis, {"peaks in": memory["peak_phase"] + " pass"})
    axis.set_xlabel("GPU memory at the peak in GiB")
    style.legend(axis)
    return figure
