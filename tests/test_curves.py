"""Scaling profiles from records made by the real record functions: lines, fits, out of memory, the lead's size."""

import math
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from IPython.display import Image, Markdown
from qa_lib.report.runs import RECOMMENDED, NotMeasured, ReportError, load_runs, select

from qa_lib.report import curve_tables, curves, gallery, readme, tables
from qa_lib.variants import VARIANTS, UnknownName
from tests.test_figures import faults
from tests.test_report import CPU, GPU, make

ROOT = Path(__file__).parents[1]
FIXED, KIB = 1.5, 300  # GiB, and KiB a token, of A3
OOM = {"kind": "OutOfMemoryError", "message": "CUDA out of memory"}
GROUP = "h200-sizing"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """A1, A3 and the Trainer over micro-batches, A3 and the Trainer over lengths; A1 runs out of memory."""
    folder = tmp_path_factory.mktemp("runs")
    for size in (8, 16, 32, 64):
        more = {"machine": GPU, "preset": "fit", "micro_batch": size}
        make(folder, "A3", **more, peak=1024 * FIXED + KIB * size * 384 / 1024, speed=800.0)
        make(folder, "A0-compile", **more, peak=2000.0 + 100 * size, speed=200.0 * math.log2(size) / 3)
        failed = {"status": "oom", "error": OOM} if size > 16 else {}
        make(folder, "A1", **more, peak=2000.0 + 150 * size, speed=100.0, **failed)
    for length in (128, 512):
        for row, peak, speed in (
            ("A3", 1024 * FIXED + KIB * 8 * length / 1024, 102_400),
            ("A0-compile", 2800.0, 51_200),
        ):
            make(folder, row, machine=GPU, preset="sizing", length=length, peak=peak, speed=speed / length)
    every = load_runs(folder)
    return curves.profile(every, GROUP, "", lambda runs: runs["memory.peak_alloc_mib"].astype(float) * 1.05)


def test_a_fit_tells_fixed_cost_and_cost_of_a_token(profile):
    fixed, each, miss = curves.fit(profile.points.query("variant == 'A3'"))
    assert (fixed, each) == (pytest.approx(FIXED), pytest.approx(KIB)) and miss < 1e-9
    bent = profile.points.query("variant == 'A3'").assign(gib=lambda row: (row["tokens"] / 1000) ** 2)
    assert curves.fit(bent)[2] > curves.STRAIGHT
    assert math.isnan(curves.fit(bent[:2])[0])


def test_a_table_has_costs_the_largest_size_and_the_first_too_large(profile):
    table = curve_tables.cost_table(profile.points).set_index("row")
    assert (table.loc["A3", "fixed GiB"], table.loc["A3", "KiB a token"]) == ("1.50", "300")
    assert (table.loc["A1", "largest that ran"], table.loc["A1", "too large"]) == ("16", "32")
    assert table.loc["A3", "too large"] == "–" and table.loc["A3", "prediction misses by"] == "5.00 %"


def test_costs_are_those_of_the_straightest_line_through_a_rows_points(profile):
    known = profile.points
    lengths = known[(known["variant"] != "A3") | (known["micro_batch"] == 8)].copy()
    off = (lengths["variant"] == "A3") & (lengths["length"] == 512)
    lengths.loc[off, "predicted"] *= 2
    line = curve_tables.cost_table(lengths).set_index("row").loc["A3"]
    assert (line["fixed GiB"], line["KiB a token"], line["prediction misses by"]) == ("1.50", "300", "110 %")
    bent = lengths.assign(gib=lengths["gib"].where(lengths["variant"] != "A3", (lengths["tokens"] / 1000) ** 2))
    line = curve_tables.cost_table(bent).set_index("row").loc["A3"]
    assert (line["fixed GiB"], line["KiB a token"]) == ("–", "–") and line["line misses by"] != "–"


def test_before_and_after_are_taken_at_the_largest_size_of_both(profile):
    line = curve_tables.steps_table(profile.points).set_index("row").loc["A0-compile"]
    assert (line["micro-batch"], line["memory"]) == ("16", f"×{3600 / 4400:.2f}")


def test_a_row_whose_parent_did_not_run_stands_beside_the_nearest_that_did(profile):
    table = curve_tables.steps_table(profile.points).set_index("row")
    assert list(table.index) == ["A0-compile", "A3"]
    line = table.loc["A3"]
    assert (line["what it changes"], line["speed"]) == ("A1 + attention: sdpa + compile: inductor", "×8.00")
    elsewhere = profile.points.query("variant != 'A1' or micro_batch == 32")
    with pytest.raises(NotMeasured, match="at the same size as a row that it was made from"):
        curve_tables.steps_table(elsewhere)


def test_speeds_of_other_code_are_marked_as_of_another_day(profile):
    code = profile.runs["code.commit"].mask(profile.runs["spec.variant"] == "A3", "f" * 40)
    runs = profile.runs.assign(**{"code.commit": code})
    table = curve_tables.steps_table(curves.points(runs)).set_index("row")
    assert table.loc["A3", "speed"].endswith(" of another day") and "day" not in table.loc["A0-compile", "speed"]
    notes = [
        curves.fig_curve(of, curves.points(of), "micro_batch", measure).get_supxlabel().replace("\n", " ")
        for of, measure in ((runs, "speed"), (profile.runs, "speed"), (runs, "gib"))
    ]
    assert ["of different days" in note for note in notes] == [True, False, False]
    assert set(curves.points(runs.assign(**{"code.commit": None}))["code"]) == {"unknown"}, "where git was not at hand"


def test_changes_since_an_earlier_row_are_all_told_once():
    assert tables.change("E-masters", "E-adamw") == "E-adamw + step: graph + precision: bf16 + optimizer: master"
    assert tables.change("E-masters-eager", "E-adamw") == "E-adamw + precision: bf16 + optimizer: master", (
        "captured, and not any more"
    )


def test_a_tasks_baseline_is_called_one():
    assert [tables.change(name) for name in ("A1", "L1", "A2")] == [
        "baseline", "baseline (A1 + precision: fp32)", "A1 + attention: sdpa"]  # fmt: skip


def test_the_fixed_cost_stands_beside_what_explains_it(profile):
    sizes = {"memory.params_mib": 400.0, "memory.grads_mib": 300.0, "memory.optimizer_mib": 836.0}
    table = curve_tables.cost_table(curves.points(profile.runs.assign(**sizes))).set_index("row")
    assert set(table[curve_tables.STATES]) == {"1.50"} and table.loc["A3", "fixed GiB"] == "1.50"
    unknown = profile.runs.assign(**sizes | {"memory.grads_mib": None})
    assert curve_tables.STATES not in curve_tables.cost_table(curves.points(unknown)), "a part is no sum"


def test_the_setup_says_what_a_group_trained_on_and_was_scored_on(profile, tmp_path):
    for model, size in (("gpt2:L2H128V1000", 512), ("gpt2:L4H128V1000", 128)):
        make(tmp_path, "L1", machine=GPU, preset="lm-quality", task="lm", model=model, length=size)
    text = load_runs(tmp_path)
    text = text.assign(**{
        "spec.n_train": text["length"].map({512: 100, 128: 401}), "spec.n_eval": 5000,
        "data.name": "text", "data.n": 40_000, "env.torch": "2.11.0", "model.params_total": [2e6, 3e6],
    })  # fmt: skip
    every = pd.concat([text, profile.runs.assign(**{"data.n": 1600})])
    table = curve_tables.setup_table(every, [GROUP, "nowhere", "h200-lm-quality", GROUP]).set_index("group")
    assert list(table.index) == [GROUP, "h200-lm-quality"] and len(table.columns) <= 10
    line = table.loc["h200-lm-quality"]
    assert (line["model"], line["parameters"], line["torch"]) == ("2 models", "2 M–3 M", "2.11.0")
    assert (line["training data"], line["validation data"]) == ("text, 51,328 tokens", "5,000 tokens")
    assert (table.loc[GROUP, "training data"], table.loc[GROUP, "lengths"]) == (
        "synthetic:1600, 1,600 questions", "128–512")  # fmt: skip


@pytest.mark.parametrize(("size", "measure", "said"), [
    ("micro_batch", "gib", "From 8 to 16 features, memory grows"), ("length", "gib", "From 128 to 512 tokens"),
    ("micro_batch", "speed", "A3 over the Trainer, A0-compile: ×4.00 at 8, ×3.00 at 16, ×2.40 at 32, ×2.00 at 64"),
    ("length", "speed", "From 128 to 512 tokens, A3 goes from 800 to 200 features/s (micro-batch 8)"),
])  # fmt: skip
def test_a_curve_can_be_read(profile, size, measure, said):
    figure = curves.fig_curve(profile.runs, profile.points, size, measure)
    assert said in " ".join(figure.get_suptitle().split())
    assert not faults(figure)


def test_a_packed_row_has_the_tokens_that_it_computes(profile):
    speed = profile.runs["speed.samples_per_s"].astype(float)
    packed = profile.runs.assign(**{"spec.settings.padding": "packed", "speed.tokens_per_s_padded": 176 * speed})
    known = curves.points(packed).dropna(subset="speed")
    assert len(known) and (known["tokens"] / known["micro_batch"]).tolist() == pytest.approx([176] * len(known))


def test_one_row_alone_has_a_curve_of_its_own_in_the_title(profile):
    batches = profile.points.query("length == 384")
    alone = batches.query("variant == 'A3' or (variant == 'A1' and micro_batch == 8)").copy()
    alone.loc[alone["variant"] == "A3", "speed"] = [500.0, 600.0, 700.0, 800.0]
    said = curves.speed_finding(alone, "micro_batch", "length 384")
    assert said == "From 8 to 64 features, A3 goes from 500 to 800 features/s (length 384)"
    several = batches.query("variant != 'A0-compile'")
    assert curves.speed_finding(several, "micro_batch", "length 384").startswith("Of these rows A3 is quickest")


def test_the_lead_is_not_told_of_one_feature_in_a_pass(profile):
    sizes = {"micro_batch": [1, 1, 8, 8], "variant": ["A3", "A0-compile"] * 2, "speed": [90.0, 10.0, 40.0, 20.0]}
    assert curves.lead(pd.DataFrame(sizes))[2].to_dict() == {8: 2.0}


def test_no_two_of_many_rows_look_alike(profile):
    one = profile.points.query("variant == 'A3'")
    many = pd.concat([one.assign(variant=name) for name in list(VARIANTS)[:25]])
    (axis,) = curves.fig_curve(profile.runs, many, "micro_batch", "speed").axes
    assert len({(line.get_color(), line.get_marker()) for line in axis.lines}) == 25


def test_out_of_memory_is_a_cross_at_the_top_where_it_happened_first(profile):
    (axis,) = curves.fig_curve(profile.runs, profile.points, "micro_batch", "gib").axes
    crosses = [line for line in axis.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[32]] and crosses[0].get_ydata()[0] > 0.9
    (band,) = axis.patches
    band, whole = band.get_window_extent(), axis.get_window_extent()
    assert (band.x0, band.x1, band.y1) == pytest.approx((whole.x0, whole.x1, whole.y1)) and band.y0 > whole.y0
    dashed = [line for line in axis.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
    assert len(dashed) == 3 and any("1.50 GiB + 300 KiB a token" in line.get_label() for line in axis.lines)


def test_the_lead_by_batch_is_a_sentence(profile):
    said = curves.lead_by_batch(profile.runs)
    assert said.startswith("The lead depends on the batch: A3 trains ×4.00 as fast as A0-compile at 8 features in a ")
    assert said.endswith("×2.40 at 32, ×2.00 at 64 (group h200-sizing, code 0123456).")
    alone = profile.runs[profile.runs["spec.variant"] == "A3"]
    with pytest.raises(NotMeasured, match="a speed of both a row of the visible loop and the Trainer"):
        curves.lead_by_batch(alone)


def test_the_readme_has_the_lead_where_its_rows_ran(profile, tmp_path):
    assert "not measured yet" in readme.lead(profile.runs, GROUP), "neither of its two rows is there"
    for size, ours in ((32, 300.0), (128, 160.0)):
        make(tmp_path, RECOMMENDED, machine=GPU, preset="sizing", micro_batch=size, speed=ours)
        make(tmp_path, "A0-compile", machine=GPU, preset="sizing", micro_batch=size, speed=100.0)
        make(tmp_path, "E-dropout-fp8", machine=GPU, preset="sizing", micro_batch=size, speed=900.0)
    said = readme.lead(load_runs(tmp_path), GROUP)
    assert f"{RECOMMENDED} trains ×3.00 as fast as A0-compile at 32 features in a forward pass, ×1.60 at 128" in said


def test_what_is_not_there_is_told(profile, tmp_path):
    make(tmp_path, "A1", machine=CPU)
    every = load_runs(tmp_path)
    alone = curves.profile(every, "cpu-smoke", "A1", lambda runs: pd.Series(math.nan, runs.index))
    with pytest.raises(NotMeasured, match="no two runs differ in length alone"):
        curves.fig_curve(alone.runs, alone.points, "length", "gib")
    absent = curves.profile(every, "h200-sizing", "A1", None)
    assert absent.lacking.startswith("*Not measured: group 'h200-sizing' has no records")
    assert "--preset lm-sizing" in curve_tables.commands([alone, absent])
    assert list(curve_tables.setup_table(every, ["cpu-smoke", "h200-sizing"])["group"]) == ["cpu-smoke"]
    wider = curves.profile(every, "cpu-smoke", "A1 A2 C2", lambda runs: pd.Series(math.nan, runs.index))
    assert curve_tables.commands([wider]) == "Not run in cpu-smoke: A2, C2."
    for table_of in (curve_tables.cost_table, curve_tables.steps_table):
        with pytest.raises(NotMeasured, match="no runs of these rows"):
            table_of(absent.points)
    with pytest.raises(UnknownName, match="did you mean 'E-dropout'"):
        curves.profile(every, "cpu-smoke", "E-bets", None)


def test_a_stride_may_differ_with_the_length_alone(profile):
    mixed = profile.runs.copy()
    mixed.loc[mixed["length"] == 128, "spec.preset.stride"] = 42
    assert len(select(mixed, GROUP)) == len(mixed)
    mixed.loc[mixed.index[0], "spec.preset.stride"] = 7
    with pytest.raises(ReportError, match=r"spec.preset.stride is"):
        select(mixed, GROUP)


def test_the_figures_of_such_a_group_are_curves(profile, tmp_path):
    drawn, not_drawn = gallery.pictures(profile.runs, tmp_path)
    assert set(drawn) == {"memory_by_length", "memory_by_batch", "speed_by_batch"} and not not_drawn
    assert drawn["memory_by_length"][0].startswith("From 128 to 512 tokens")


def test_the_notebook_shows_the_committed_groups(monkeypatch):
    monkeypatch.chdir(ROOT)
    shown, space = [], {"In": [""]}
    monkeypatch.setattr("IPython.display.display", lambda *objects: shown.extend(objects))
    cells = nbformat.read("notebooks/scaling.ipynb", 4).cells
    for cell in cells:
        if cell.cell_type == "code" and "bootstrap" not in cell.metadata.get("tags", []):
            exec(cell.source, space)
    text = "\n".join(each.data for each in shown if isinstance(each, Markdown))
    assert "| A2 | A1 + attention: sdpa |" in text and "| L-sdpa | L-bf16 + attention: sdpa |" in text
    assert "| baseline (A1 + precision: fp32) |" in text and "The lead depends on the batch: E-moments" in text
    assert "**Goals** for GPT-2 small's shape" in text and text.count("Scores: group h200-") == 2
    assert "| P1 | 4 | 32 |" in text, "DDP on and off"
    assert "Not measured: group" not in text and sum(isinstance(each, Image) for each in shown) >= 11
    rows = [name for key in ("answers_rows", "text_rows") for name in space[key].split()]
    assert all(f"`{name}`" in "".join(cell.source for cell in cells) for name in ("A1-fp32", "C2", "L-sdpa", "L-qlora"))
    assert set(rows) <= set(VARIANTS)
