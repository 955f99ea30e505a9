"""Every figure as its reader gets it: what it says, and that no text of it covers another."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from qa_lib.report.runs import NotMeasured, ReportError, load_runs, select

from qa_lib.report import figures, profiles, sentences, style
from tests.material import committed
from tests.test_report import CPU, GPU, made_profile, make

ROOT = Path(__file__).parents[1]
PROFILED = ("timeline", "phases", "roofline")
DRAWN = {  # of the committed groups
    "h200-bench": ("ladder", "memory", *PROFILED, "cost"),
    "h200-quality": ("equivalence", "peft"),
}


@pytest.fixture(scope="module")
def every():
    return committed()


def write_group(folder, machine):
    """Three seeds of some rows at two micro-batches and what did not run; on the GPU with two profiles."""
    for variant in ("A0", "A1", "A3", "A4-nb", "A4", "B1", "C2", "E-dropout"):
        for seed in range(3):
            make(folder, variant, seed, machine=machine, micro_batch=4, speed=100.0 + 30 * seed + 9 * len(variant))
    make(folder, "A1", machine=machine, speed=90.0)
    make(folder, "A4", machine=machine, speed=180.0)
    make(folder, "A2", machine=machine, status="skipped", error={"kind": "skipped", "message": "needs a compiler"})
    make(folder, "C1", machine=machine, status="oom", error={"kind": "OutOfMemoryError", "message": "too large"})
    group = select(load_runs(folder), f"{machine.hardware}-smoke")
    for run in group.to_dict("records"):
        if machine is GPU and run["spec.variant"] in ("A1", "A3") and run["spec.seed"] == 0:
            profile_beside(run, run["memory.peak_alloc_mib"])
    return group


def profile_beside(run, peak):
    profile = made_profile(run)
    profile["memory"]["peak_mib"] = peak
    (run["path"] / "profile.json").write_text(json.dumps(profile))


@pytest.fixture(scope="module", params=[CPU, GPU], ids=["cpu", "gpu"])
def small(request, tmp_path_factory):
    return write_group(tmp_path_factory.mktemp("runs"), request.param)


def faults(figure):
    """What is wrong with the layout of a figure, a line each: texts that lie on another or on a marker, or reach
    beyond the figure, and a long title."""
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        draw = Text.draw
        patch.setattr(Text, "draw", lambda text, renderer: (texts.append(text), draw(text, renderer)))
        figure.canvas.draw()  # what is drawn: of an axis's labels, those in its range
    shown = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = {text: Text.get_window_extent(text).padded(-1) for text in shown}
    found = [f"{a} lies on {b}" for a, b in combinations(boxes, 2) if boxes[a].overlaps(boxes[b])]
    markers = [marker for axis in figure.axes for marker in markers_of(axis)]
    found += [f"{text} lies on a marker" for text, box in boxes.items() if any(map(box.overlaps, markers))]
    whole = figure.bbox
    outside = [text for text, box in boxes.items() if Bbox.union([box, whole]).bounds != whole.bounds]
    found += [f"{text} leaves the figure" for text in outside]
    if figure.get_suptitle().count("\n") > 1:
        found.append("the title has more than two lines")
    return found


def markers_of(axis):
    """The boxes in pixels of the markers of an axis."""
    pixel = axis.figure.dpi / 72
    for line in axis.lines:
        if line.get_marker() not in ("", "None", None):
            for x, y in line.get_transform().transform(line.get_xydata()):
                yield Bbox.from_bounds(x, y, 0, 0).padded(line.get_markersize() * pixel / 2)
    for points in axis.collections:
        if isinstance(points, PathCollection):
            places = points.get_offset_transform().transform(points.get_offsets())
            for (x, y), size in zip(places, np.resize(points.get_sizes(), len(places)), strict=True):
                yield Bbox.from_bounds(x, y, 0, 0).padded(np.sqrt(size) * pixel / 2)


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in DRAWN.items() for name in names])
def test_a_committed_figure_can_be_read(every, group, name):
    figure = figures.FIGURES[name](select(every, group))
    assert not faults(figure)
    assert "\n" not in figure.get_suptitle()
    committed = {path.stem for path in (ROOT / "figures" / group).glob("*.png")}
    assert committed == set(DRAWN[group])


def test_faults_of_a_layout_are_found():
    figure = style.new_figure("A title " * 30, "", 3.0)
    axis = figure.subplots()
    axis.scatter([0.5], [0.5])
    assert faults(figure) == ["the title has more than two lines"]
    axis.annotate("on a point", (0.5, 0.5))
    axis.annotate("on a text", (0.5, 0.501))
    axis.annotate("far out " * 9, (1, 0.9), annotation_clip=False).set_in_layout(False)
    said = " ".join(faults(figure))
    assert "'on a point') lies on a marker" in said and "leaves the figure" in said
    assert "'on a point') lies on Annotation(0.5, 0.501" in said


def test_every_figure_has_a_title_axis_labels_and_a_caption_or_a_reason(small):
    on_cpu = small["spec.hardware"].iloc[0] == "cpu"
    for name, figure_of in figures.FIGURES.items():
        if on_cpu and name in ("memory", *PROFILED):
            with pytest.raises(NotMeasured, match=r"no GPU|no run of this group has a profile"):
                figure_of(small)
            continue
        figure = figure_of(small)
        assert len(figure.get_suptitle()) > 10 and small["group"].iloc[0] in figure.get_supxlabel()
        assert style.png(figure_of(small), 40) == style.png(figure, 40), "equal records are equal bytes"
        assert not faults(figure), name
        if name in PROFILED:
            continue
        assert (sentences.CPU_CAVEAT in " ".join(figure.get_supxlabel().split())) is on_cpu
        for axis in figure.axes:
            assert axis.get_xlabel() and (axis.get_ylabel() or axis.get_yticklabels()), name
        if name in ("ladder", "cost"):
            assert all(axis.get_xlim()[0] == 0 for axis in figure.axes), "bars start at 0"


def test_profiles_are_drawn_as_they_were_measured():
    made = {name: made_profile({"run_id": name, "group": "g", "spec.variant": name}) for name in ("A1", "E-packed")}
    made["E-packed"]["time"] |= {"step_ms": 2.5, "busy_ms": 2.5, "busy_share": 1.0, "launches_per_step": 40.0}
    kinds = (profiles.timeline, profiles.phases, profiles.fig_allocator, profiles.roofline)
    drawn = {draw.__name__: draw(made) for draw in kinds}
    said = {name: " ".join(figure.get_suptitle().split()) for name, figure in drawn.items()}
    assert said["timeline"] == "A step takes 7.50 ms in A1, 2.50 ms in E-packed"
    heads = [axis.get_title("left") for axis in drawn["timeline"].axes]
    assert heads == [
        "A1: 7.50 ms a step, 80.0 % busy, 900 launches",
        "E-packed: 2.50 ms a step, 100 % busy, 40 launches",
    ]
    first = [text.get_text().strip() for text in drawn["timeline"].axes[0].texts]
    assert {"2.00", "3.00", "1.00", "1.50"} <= set(first), "attention, loss, optimizer, and waiting for 7.5 - 6"
    assert said["phases"] == "Activations fill 39.1 % of A1's peak"  # 9 of 23 MiB
    # 4e9 operations in 9 us are 444 TFLOP/s of 700; 2e6 bytes in 9 us are 222 GB/s of 4,000.
    assert "63.5 % of its ceiling" in said["roofline"] and "5.6 % of its own" in said["roofline"]
    assert any("9.00 µs, 2 ×: matrix products" in text.get_text() for text in drawn["roofline"].axes[0].texts)
    for profile in made.values():
        profile |= {"memory": None, "ncu": None}
    for make_figure in (profiles.phases, profiles.fig_allocator, profiles.roofline):
        with pytest.raises(NotMeasured):
            make_figure(made)


def test_a_profile_of_code_that_took_other_memory_is_no_bar_beside_the_others(tmp_path):
    for variant in ("A1", "A3"):
        make(tmp_path, variant, machine=GPU, peak=1000.0)
    runs = select(load_runs(tmp_path), "h200-smoke")
    drawn = []
    for peak in (1040.0, 1060.0):
        for run in runs.to_dict("records"):
            profile_beside(run, peak if run["spec.variant"] == "A3" else 1000.0)
        labels = profiles.fig_phases(runs).axes[0].get_yticklabels()
        drawn.append([label.get_text() for label in labels])
    assert drawn == [["A1", "A3"], ["A1"]]


def test_kernels_are_named_by_what_they_do_where_the_trace_tells():
    traced = [
        {"name": "nvjet_bias", "part": "feed-forward", "phase": "forward"},
        {"name": "nvjet_bias", "part": "attention", "phase": "forward"},
        {"name": "void flash_bwd<64, false>", "part": "attention", "phase": "backward"},
        {"name": "triton_fused_gelu_view_2", "part": "norms and elementwise", "phase": "backward"},
        {"name": "triton_for_fused_2", "part": "optimizer", "phase": "optimizer"},
    ]
    said = {
        ("nvjet_bias", "matrix products"): "products of feed-forward and attention, forward",
        ("nvjet_other", "matrix products"): "matrix products",
        ("void flash_bwd<64, 0>", "attention"): "attention, backward",
        ("triton_fused_gelu_view_2", "the rest"): "GELU, backward",
        ("triton_for_fused_2", "the rest"): "optimizer",
    }
    assert {key: profiles.kernel_words(*key, traced) for key in said} == said


def test_a_figure_of_several_groups_is_refused(tmp_path):
    make(tmp_path, "A1")
    make(tmp_path, "A1", machine=GPU)
    with pytest.raises(ReportError, match="cpu-smoke, h200-smoke"):
        figures.fig_ladder(load_runs(tmp_path))


def test_a_micro_batch_without_any_speed_does_not_break_the_ladder(tmp_path):
    make(tmp_path, "A1")
    make(tmp_path, "A4")
    make(tmp_path, "A1", micro_batch=16, status="oom", error={"kind": "OutOfMemoryError", "message": "too large"})
    figure = figures.fig_ladder(select(load_runs(tmp_path), "cpu-smoke"))
    assert len(figure.axes) == 1 and "micro-batch 8" in figure.get_supxlabel(), "the largest that the baseline ran at"
    assert figure.axes[0].get_xlim() == (0, 210)


def test_the_ladder_says_the_factors_and_why_a_rung_is_empty(tmp_path):
    for variant in ("A0", "A1", "A2", "A4-nb", "A4"):
        make(tmp_path, variant)
    make(tmp_path, "A3", status="skipped", error={"kind": "skipped", "message": "needs a compiler"})
    figure = figures.fig_ladder(select(load_runs(tmp_path), "cpu-smoke"))
    title = "On a CPU: A4 trains 2.00× as fast as A1, 2.11× as fast as the plain Trainer (A0)"
    assert " ".join(figure.get_suptitle().split()) == title
    said = [text.get_text().strip() for text in figure.axes[0].texts]
    assert said[0] == "skipped: needs a compiler"
    assert said[1:8] == ["features/s", "100", "120", "–", "160", "200", "95.0"]
    assert said[8:15] == ["× A1", "1.00", "1.20", "–", "1.60", "2.00", "0.95"]
    assert said[15:22] == ["× row above", "–", "1.20", "–", "–", "1.25", "0.95 (A1)"]
    assert said[22:] == ["n", "1", "1", "0", "1", "1", "1"]


def test_the_memory_figure_names_the_front_of_full_fine_tunes(tmp_path):
    points = {"A1": (100, 2048), "A2": (150, 1536), "A3": (200, 1536), "C2": (80, 1024), "C1": (70, 1100),
              "A0": (90, 2048), "B1": (300, 512)}  # fmt: skip
    for variant, (speed, peak) in points.items():
        make(tmp_path, variant, machine=GPU, speed=float(speed), peak=float(peak))
    figure = figures.fig_memory(select(load_runs(tmp_path), "h200-smoke"))
    named = {text.get_text().split(":")[0] for text in figure.axes[0].texts}
    assert named == {"A3", "C2", "A1", "A0"}, "A2 is slower than A3, C1 than C2; B1 trains a part"
    assert figure.get_suptitle() == "Training everything, C2 peaks lowest: 50.0\u00a0% of A1's memory, 0.80× as fast"


def test_the_score_of_peft_is_that_at_the_best_threshold(every):
    judged = select(every, "h200-quality").drop(columns="micro_batch")
    rows = sentences.peft_scores(judged)
    own = judged[(judged["spec.variant"] == "B1") & (judged["status"] == "ok")]
    assert rows.loc["B1", "score"] == pytest.approx(own["quality.best_f1"].astype(float).mean())
    assert rows.loc["B1", "n"] == len(own) == 3 and np.isnan(rows.loc["A1", "delta"])
    figure = figures.fig_peft(select(every, "h200-quality"))
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["a model that never answers: 52.12"]


def test_a_few_timed_runs_do_not_stand_for_a_group_that_shared_the_gpu(tmp_path):
    for variant in ("A0", "A1", "A4"):
        make(tmp_path, variant)
    group = select(load_runs(tmp_path), "cpu-smoke")
    group.loc[group["spec.variant"] != "A1", "time.wall_s"] = None
    for figure_of in (figures.fig_ladder, figures.fig_memory, figures.fig_cost):
        with pytest.raises(NotMeasured, match="shared the GPU"):
            figure_of(group)
