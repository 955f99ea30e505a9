"""The report against records made by the real record functions, so that a change of the schema breaks these tests."""

import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import papermill
import pytest

from qa_lib import record
from qa_lib.report import figures, tables
from qa_lib.report import profiles as anatomy
from qa_lib.report import publish as report
from qa_lib.report import sentences as findings
from qa_lib.report import style as canvas
from qa_lib.report.runs import load_runs
from qa_lib.spec import Machine, resolve
from qa_lib.variants import FAMILIES, VARIANTS

ROOT = Path(__file__).parents[1]
GPU = Machine("h200", gpus=1, sm=90, backends=("inductor", "aot_eager", "cudagraphs"), bitsandbytes=True, compiler=True)
CPU = Machine("cpu", backends=("inductor", "aot_eager", "cudagraphs"), bitsandbytes=True, compiler=True)
SPEEDS = {"A0": 95.0, "A1": 100.0, "A2": 120.0, "A3": 150.0, "A4-nb": 160.0, "A4": 200.0, "B1": 300.0, "C2": 80.0}


def make(runs, variant, seed=0, *, machine=CPU, scale="smoke", status="ok", error=None, micro_batch=8, **values):
    """Write one record as fit would; `values` replace numbers by name, None for not measured. Returns its folder."""
    data, model = {"name": "synthetic:1600", "sha256": "ab" * 32}, {"name": "tiny", "revision": "1"}
    spec = resolve(variant, scale, seed, machine, data, model, "synthetic:1600", "tiny", micro_batch)
    entry = record.new_record(spec, {"python": "3.11", "gpu": None})
    entry["code"] = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}
    if status == "ok":
        speed = values.get("speed", SPEEDS.get(variant, 110.0))
        step = 32e3 / speed
        entry["speed"]["features_per_s"] = speed
        entry["time"] |= {"train_s": values.get("train_s", 9600 / speed), "compile_s": 1.5, "eval_s": 1.0}
        entry["time"] |= {"wall_s": 9600 / speed + 4.0, "resumed_from_step": values.get("resumed")}
        entry["time"]["step_ms"] = {"n": 270, "median": step, "p10": 0.9 * step, "p90": 1.2 * step}
        f1 = values.get("f1", 30.0 if variant == "A4-b" else 95.0)
        entry["quality"] |= {"f1": f1, "best_f1": f1, "exact": f1, "n": 400}
        entry["memory"]["peak_alloc_mib"] = values.get("peak", 2000.0 if machine is GPU else None)
        entry["model"] |= {"params_total": 75_000, "params_trainable": 750 if variant == "B1" else 75_000}
    folder = runs / spec.run_path
    record.finish(folder, entry, status, error)
    return folder


def lines_of(runs, group="cpu-smoke"):
    return tables.summarise(tables.select(load_runs(runs), group)).set_index(["micro_batch", "variant"])


def call(*words):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.main(parser.parse_args(list(words)))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A runs folder with one row of each kind, in a folder of its own that the test works in."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs")
    for variant in ("A0", "A1", "A2", "A3", "A4-nb", "A4", "A4-b", "B1", "C2"):
        make(folder, variant)
    make(folder, "D1-nvfuser", status="skipped", error={"kind": "skipped", "message": "no backend named 'nvfuser'"})
    make(folder, "C1", status="oom", error={"kind": "OutOfMemoryError", "message": "CUDA out of memory", "step": 3})
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Draw one figure only, and note that another cannot be drawn: for tests that are not about figures."""
    monkeypatch.setattr(figures, "FIGURES", {"cost": figures.fig_cost, "memory": figures.fig_memory})


@pytest.fixture
def readme(runs, quick):
    """README.md with an empty block, and the runs in git's index."""
    Path("README.md").write_text(f"# Title\n\n{report.BEGIN}\n{report.END}\n\ntail\n")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "runs"], check=True)
    return Path("README.md")


def test_ratios_are_against_the_baseline_of_the_same_micro_batch(runs):
    make(runs, "A1", micro_batch=4, speed=400.0)
    make(runs, "A4", micro_batch=4, speed=500.0)
    ratio = lines_of(runs)["ratio"]
    assert ratio[8, "A4"] == 2.0 and ratio[8, "C2"] == 0.8 and ratio[8, "A1"] == 1.0
    assert ratio[4, "A4"] == 1.25


def test_a_mean_over_seeds_is_what_ratios_compare(runs):
    make(runs, "A4", seed=1, speed=300.0, f1=97.0)
    line = lines_of(runs).loc[8, "A4"]
    assert line["n"] == 2 and line["features_per_s"] == 250.0
    assert line["ratio"] == 2.5
    assert line["f1"] == 96.0 and line["delta_f1"] == 0.0, "A1 has the first seed alone"


@pytest.mark.parametrize("status", [None, "error", "running"])
def test_a_missing_baseline_is_an_error_that_names_group_and_baseline(tmp_path, status):
    make(tmp_path, "A4")
    if status:
        make(tmp_path, "A1", status=status)
    with pytest.raises(tables.ReportError, match=r"cpu-smoke.*micro-batch 8.*A1"):
        lines_of(tmp_path)


def test_a_baseline_at_another_micro_batch_is_none(runs):
    make(runs, "A4", micro_batch=2)
    with pytest.raises(tables.ReportError, match="micro-batch 2"):
        lines_of(runs)


def test_a_baseline_out_of_memory_leaves_ratios_open(tmp_path):
    make(tmp_path, "A1", status="oom", error={"kind": "OutOfMemoryError", "message": "too large"})
    make(tmp_path, "A4")
    line = lines_of(tmp_path).loc[8, "A4"]
    assert math.isnan(line["ratio"]) and line["features_per_s"] == 200.0


def test_what_was_not_measured_is_a_dash_and_never_zero(runs):
    make(runs, "A2", f1=None, peak=None)
    lines = lines_of(runs).reset_index()
    table = tables.result_table(lines).set_index("row")
    assert table.loc["A2", "F1"] == table.loc["A2", "ΔF1 vs A1"] == "–"
    assert "peak MiB" not in table, "a column without any value is left out"
    assert not (table == "0").to_numpy()[:, table.columns != "n"].any()


def test_nulls_do_not_pull_a_mean_down(runs):
    make(runs, "A2", seed=1, f1=None)
    make(runs, "A2", seed=2, f1=93.0)
    assert lines_of(runs).loc[8, "A2"]["f1"] == 94.0


def test_rows_without_a_result_are_shown_with_their_reason(runs):
    make(runs, "B2", status="killed", error={"kind": "timeout", "message": "over its limit of 300 s"})
    table = tables.result_table(lines_of(runs).reset_index()).set_index("row")
    assert table.loc["D1-nvfuser", ["status", "note"]].tolist() == ["skipped", "skipped: no backend named 'nvfuser'"]
    assert table.loc["C1", "note"] == "oom: CUDA out of memory (after step 3)"
    assert table.loc["B2", "note"] == "killed: over its limit of 300 s"
    assert "no backend named" in tables.terminal(table.reset_index()) and "no backend" in tables.markdown(table)


def test_of_several_seeds_the_one_that_failed_is_named(runs):
    make(runs, "A4", seed=1, status="error", error={"kind": "NonFiniteLoss", "message": "loss is nan at step 7"})
    line = lines_of(runs).loc[8, "A4"]
    assert line["status"] == "1 ok, 1 error" and line["note"] == "seed 1 error: loss is nan at step 7"
    assert line["n"] == 1 and line["ratio"] == 2.0


def test_intervals_need_three_seeds_and_are_those_of_students_t(runs):
    make(runs, "A4", seed=1, speed=210.0)
    assert math.isnan(lines_of(runs).loc[8, "A4"]["features_per_s±"])
    make(runs, "A4", seed=2, speed=220.0)
    # Mean 210, standard deviation 10, t(2 degrees of freedom, 97.5 %) 4.303: 4.303 * 10 / sqrt(3) = 24.84.
    line = lines_of(runs).loc[8, "A4"]
    assert line["features_per_s±"] == pytest.approx(24.84, abs=0.01)
    assert tables.result_table(lines_of(runs).reset_index()).set_index("row").loc["A4", "features/s"] == "210 ± 25"
    four = pd.Series([1.0, 2.0, 3.0, 4.0])  # standard deviation 1.2910, t(3) 3.182
    assert tables.interval(four) == pytest.approx(3.182 * 1.2910 / 2, abs=1e-3)


def test_the_difference_in_f1_has_an_interval_over_equal_seeds(runs):
    for seed, (base, other) in enumerate([(90.0, 91.0), (92.0, 94.0), (94.0, 97.0)]):
        make(runs, "A1", seed=seed, f1=base)
        make(runs, "A4", seed=seed, f1=other)
    line = lines_of(runs).loc[8, "A4"]  # differences 1, 2, 3
    assert line["delta_f1"] == 2.0 and line["delta_f1±"] == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    make(runs, "A4", seed=3, f1=0.0)
    assert lines_of(runs).loc[8, "A4"]["delta_f1"] == 2.0, "a seed that the baseline has not says nothing"


def test_a_resumed_run_has_no_time_of_the_whole(runs):
    make(runs, "A4", resumed=100)
    line = lines_of(runs).loc[8, "A4"]
    assert math.isnan(line["train_s"]) and math.isnan(line["wall_s"]) and line["features_per_s"] == 200.0
    assert "resumed at step 100" in line["note"]
    assert "A4" not in set(tables.cost_table(tables.select(load_runs(runs), "cpu-smoke"))["row"])


def test_the_newest_of_two_runs_of_one_row_and_seed_counts(runs):
    old = make(runs, "A4", speed=1.0)
    entry = json.loads((old / "record.json").read_text())
    entry["run_id"], entry["time"]["started"] = "A4-s0-older0", "2020-01-01T00:00:00+00:00"
    (old.parent / "A4-s0-older0").mkdir()
    record.write_record(old.parent / "A4-s0-older0", entry)
    make(runs, "A4", speed=250.0)
    assert lines_of(runs).loc[8, "A4"]["ratio"] == 2.5


@pytest.mark.parametrize(("section", "key"), [("model", "revision"), ("data", "sha256"), ("scale", "steps")])
def test_a_group_that_mixes_models_data_or_scales_is_refused(runs, section, key):
    path = make(runs, "A4") / "record.json"
    entry = json.loads(path.read_text())
    (entry["spec"]["scale"] if section == "scale" else entry[section])[key] = 7
    path.write_text(json.dumps(entry))
    with pytest.raises(tables.ReportError, match=rf"cpu-smoke.*{section}\.{key} is .*A4-s0|A4-s0.*{section}\.{key}"):
        lines_of(runs)


def test_a_record_of_an_unknown_schema_is_refused_by_name(runs):
    path = make(runs, "A4") / "record.json"
    path.write_text(path.read_text().replace(record.SCHEMA, "qa_lib/99"))
    with pytest.raises(record.RecordError, match=r"A4-s0-.*record\.json.*qa_lib/99"):
        call()


def test_an_unknown_group_and_no_records_at_all_are_clear_errors(runs, tmp_path):
    with pytest.raises(tables.ReportError, match=r"'gpu'.*cpu-smoke"):
        tables.select(load_runs(runs), "gpu")
    with pytest.raises(tables.ReportError, match="no record below"):
        call("--runs", str(tmp_path / "nowhere"))


def test_a_row_that_this_version_does_not_know_is_shown(runs):
    path = make(runs, "C2") / "record.json"
    entry = json.loads(path.read_text())
    entry["spec"]["variant"] = "Z9"
    path.write_text(json.dumps(entry))
    table = tables.result_table(lines_of(runs).reset_index()).set_index("row")
    assert table.index[-1] == "Z9" and table.loc["Z9", "what it changes"] == "–"
    figure = figures.fig_f1_time(tables.select(load_runs(runs), "cpu-smoke"))
    assert "Z9" in {text.get_text() for text in figure.axes[0].texts}


def test_family_tables_hold_the_family_the_baseline_and_the_parents(runs):
    found = tables.family_tables(lines_of(runs).reset_index())
    assert set(found) == set(FAMILIES.values()) - {"beyond"}  # none of whose rows is among these runs
    assert found["peft"]["row"].tolist() == ["A1", "A3", "B1"]
    assert found["systems"]["row"].tolist() == ["A1", "A0", "A2", "A3", "A4-nb", "A4", "A4-b"]
    nothing = tables.family_lines(lines_of(runs).reset_index(), "E")
    assert tables.markdown(nothing) == "*No row of this table has been run.*"


def test_the_published_numbers_stand_beside_ours_each_against_its_own_baseline(runs):
    table = tables.published_table(lines_of(runs).reset_index(), "cpu-smoke").set_index("row")
    assert set(table.index) <= set(VARIANTS)
    assert table.loc["A4-nb", ["T4: samples/s", "T4: × A1", "T4: F1", "T4: ΔF1"]].tolist() == [
        "51.6", "1.17", "77.23", "+0.61",
    ]  # fmt: skip
    assert table.loc["A4-nb", ["cpu-smoke: features/s", "cpu-smoke: × A1"]].tolist() == ["160", "1.60"]
    assert table.loc["C2-8", "T4: samples/s"] == "–" and table.loc["B3", "cpu-smoke: features/s"] == "–"


def test_published_training_times_agree_with_published_throughput():
    """Three epochs of 131,754 features: each transcribed pair has to give that number again."""
    rows = pd.read_csv(tables.PUBLISHED, comment="#").dropna(subset=["train_samples_per_s"])
    features = rows["train_s"] * rows["train_samples_per_s"]
    assert len(rows) == 11 and features.between(0.995 * 3 * 131_754, 1.005 * 3 * 131_754).all()


def test_the_cost_is_what_all_runs_took(runs):
    make(runs, "A1", seed=1)
    chosen = tables.select(load_runs(runs), "cpu-smoke")
    costs = tables.cost_table(chosen).set_index("row")
    assert costs.loc["A1"].tolist() == [2, 200.0]
    assert costs.loc["total", "runs"] == 10 and costs.loc["total", "wall_s"] == costs["wall_s"].iloc[:-1].sum()


def test_numbers_are_written_with_three_digits():
    written = [tables.number(value) for value in (1234.5, 123.4, 99.96, 12.34, 9.996, 1.234, float("nan"))]
    assert written == ["1,234", "123", "100", "12.3", "10.0", "1.23", "–"]
    assert [tables.count(value) for value in (70, 75_330, 999_600, 108_893_186)] == ["70", "75.3 k", "1 M", "109 M"]


NEEDS_GPU = {"memory", "timeline", "phases", "roofline"}


def made_profile(run):
    """What `profile` writes beside a run, with numbers of no meaning."""
    spans = [[0.0, 2.0, "forward", "attention"], [2.5, 3.0, "backward", "loss"], [6.0, 1.0, "optimizer", "optimizer"]]
    kernel = {"name": "gemm", "count": 2, "us": 9.0, "sm_share": 70.0, "occupancy": 20.0, "tensor_share": 60.0}
    parts = {phase: {part: ms} for _, ms, phase, part in spans}
    memory = {
        "params_mib": 4.0,
        "optimizer_mib": 8.0,
        "grads_mib": 4.0,
        "activations_mib": 9.0,
        "workspace_mib": 2.0,
        "peak_mib": 23.0,
        "peak_phase": "backward",
        "reserved_mib": 25.0,
        "fragmentation_mib": 2.0,
        "phases": {"forward": 22.0, "backward": 23.0, "optimizer": 16.0},
        "timeline": [[0.0, 12.0], [1.0, 23.0]],
    }
    return {
        "schema": record.PROFILE_SCHEMA, "run_id": run["run_id"], "group": run["group"],
        "spec": {"variant": run["spec.variant"]}, "code": {"commit": "0123456", "dirty": False},
        "env": {"gpu": "A GPU", "cpu": "a CPU"},
        "time": {"step_ms": 7.5, "busy_ms": 6.0, "busy_share": 0.8, "launches_per_step": 900.0, "parts": parts},
        "timeline": spans, "memory": memory, "ceilings": {"matrix_tflops": 700.0, "copy_gb_per_s": 4000.0},
        "ncu": [kernel | {"dram_bytes": 1e6, "fp16_ops": 4e9, "bf16_ops": 0.0, "fp8_ops": None},
                kernel | {"name": "norm", "dram_bytes": 2e6, "fp16_ops": 0.0, "bf16_ops": 0.0, "fp8_ops": 0.0}],
    }  # fmt: skip


def test_profiles_are_drawn_as_they_were_measured():
    profiles = {name: made_profile({"run_id": name, "group": "g", "spec.variant": name}) for name in ("A1", "E1")}
    profiles["E1"]["time"] |= {"step_ms": 2.5, "busy_ms": 2.5, "busy_share": 1.0, "launches_per_step": 40.0}
    said = {make.__name__: " ".join(make(profiles).get_suptitle().split()) for make in
            (anatomy.timeline, anatomy.fig_parts, anatomy.phases, anatomy.fig_allocator, anatomy.roofline)}  # fmt: skip
    first, second = said["timeline"].split("; ")
    assert first == "A step of A1: 7.50 ms, 80.0 % busy, 900 launches"
    assert second == "a step of E1: 2.50 ms, 100 % busy, 40 launches"
    assert "×3.00 as fast as A1's" in said["fig_parts"]
    assert said["phases"] == "A1 peaks at 23.0 MiB, in its backward pass"
    # 4e9 operations in 9 us are 444 TFLOP/s of 700; 2e6 bytes in 9 us are 222 GB/s of 4,000.
    assert "63.5 % of the matrix rate" in said["roofline"] and "5.56 % of the copy bandwidth" in said["roofline"]
    for profile in profiles.values():
        profile |= {"memory": None, "ncu": None}
    for make_figure in (anatomy.phases, anatomy.fig_allocator, anatomy.roofline):
        with pytest.raises(tables.NotMeasured):
            make_figure(profiles)


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_every_figure_has_a_title_axis_labels_and_a_caption_or_a_reason(runs, machine):
    for variant in ("A0", "A1", "A3", "A4", "B1", "C2"):
        for seed in range(3):
            make(runs, variant, seed, machine=machine, micro_batch=4, speed=100.0 + seed + len(variant))
    group = f"{machine.hardware}-smoke"
    chosen = tables.select(load_runs(runs), group)
    for run in chosen.to_dict("records"):
        if machine is GPU and run["spec.variant"] in ("A1", "A3"):
            (run["path"] / "profile.json").write_text(json.dumps(made_profile(run)))
    for name, figure_of in figures.FIGURES.items():
        if machine is CPU and name in NEEDS_GPU:
            with pytest.raises(tables.NotMeasured, match=r"no GPU|no run of this group has a profile"):
                figure_of(chosen)
            continue
        figure = figure_of(chosen)
        if name in NEEDS_GPU - {"memory"}:
            assert len(figure.get_suptitle()) > 10 and group in figure.get_supxlabel()
            assert canvas.png(figure_of(chosen)) == canvas.png(figure), "equal records are equal bytes"
            continue
        assert len(figure.get_suptitle()) > 10 and group in figure.get_supxlabel()
        assert (findings.CPU_CAVEAT in " ".join(figure.get_supxlabel().split())) is (machine is CPU)
        for axis in figure.axes:
            assert axis.get_xlabel() and axis.get_ylabel(), name
        if name in ("ladder", "cost"):
            assert all(axis.get_xlim()[0] == 0 for axis in figure.axes), "bars start at 0"
        if machine is GPU:
            assert canvas.png(figure_of(chosen)) == canvas.png(figure), "equal records are equal bytes"


def test_a_figure_of_several_groups_is_refused(runs):
    make(runs, "A1", machine=GPU)
    with pytest.raises(tables.ReportError, match="cpu-smoke, h200-smoke"):
        figures.fig_ladder(load_runs(runs))


def test_a_micro_batch_without_any_speed_does_not_break_the_ladder(runs):
    make(runs, "A1", micro_batch=4, status="oom", error={"kind": "OutOfMemoryError", "message": "too large"})
    figure = figures.fig_ladder(tables.select(load_runs(runs), "cpu-smoke"))
    assert [text.get_text() for text in figure.axes[1].texts] == ["oom: too large"]
    assert figure.axes[1].get_xlim() == figure.axes[0].get_xlim() == (0, 380)


def test_the_ladder_says_the_factors_and_why_a_rung_is_empty(runs):
    make(runs, "A3", status="skipped", error={"kind": "skipped", "message": "needs a compiler"})
    figure = figures.fig_ladder(tables.select(load_runs(runs), "cpu-smoke"))
    said = [text.get_text() for text in figure.axes[0].texts]
    title = "On a CPU: A4 trains ×2.00 the features/s of A1, plain transformers.Trainer (A0) ×0.95"
    assert " ".join(figure.get_suptitle().split()) == title
    assert "160/s   ×1.60 vs A1" in said and "200/s   ×2.00 vs A1   ×1.25 vs A4-nb" in said
    assert "skipped: needs a compiler" in said


def test_a_few_timed_runs_do_not_stand_for_a_group_that_shared_the_gpu(runs):
    group = tables.select(load_runs(runs), "cpu-smoke")
    group.loc[group["spec.variant"] != "A1", "time.wall_s"] = None
    for figure_of in (figures.fig_ladder, figures.fig_memory, figures.fig_cost):
        with pytest.raises(tables.NotMeasured, match="shared the GPU"):
            figure_of(group)


def test_findings_name_what_is_known_and_what_is_not(runs):
    make(runs, "B3", speed=900.0, f1=93.9)  # quicker still, but more than 1 F1 below
    text = findings.findings(tables.select(load_runs(runs), "cpu-smoke"))
    assert "rows with a mean F1 within 1 of A1's or above it, B1 is the quickest: 33.3 % of A1's" in text
    assert "Joining sorted predictions by position (A4-b) gives F1 30.00 where A4 has 95.00" in text
    assert "Not known here: peak GPU memory" in text and "C1: oom: CUDA out of memory" in text
    assert findings.CPU_CAVEAT in text and "n = 1 seed" in text


def test_the_manifest_ties_every_figure_to_records_and_code(runs):
    assert call() == 0
    folder = Path("figures/cpu-smoke")
    manifest = json.loads((folder / "manifest.json").read_text())
    for run_id, entry in manifest["records"].items():
        content = (runs / "cpu-smoke" / run_id / "record.json").read_bytes()
        assert entry["sha256"] == report._sha256(content) and entry["commit"].startswith("0123456")
    assert set(manifest["figures"]) == {path.name for path in folder.glob("*.png")} == {
        "ladder.png", "f1-time.png", "peft.png", "cost.png",
    }  # fmt: skip
    for name, figure in manifest["figures"].items():
        assert figure["sha256"] == report._sha256((folder / name).read_bytes())
        assert set(figure["runs"]) == set(manifest["records"]) and figure["title"]
    assert "no GPU" in manifest["not_drawn"]["memory"]
    assert manifest["tables"]["results"][1]["row"] == "A0"


def test_nothing_is_redrawn_unless_records_or_figures_changed(runs, quick, capsys):
    path = make(runs, "C2") / "record.json"
    entry = json.loads(path.read_text())
    entry["code"] = {"commit": None, "dirty": None}  # a null among texts becomes NaN in a DataFrame, unequal to itself
    path.write_text(json.dumps(entry))
    Path("figures/cpu-smoke").mkdir(parents=True)
    Path("figures/cpu-smoke/manifest.json").write_text("[]")
    call()
    before = {path: path.stat().st_mtime_ns for path in Path("figures").rglob("*.*")}
    capsys.readouterr()
    assert call() == 0
    out = capsys.readouterr().out
    assert "up to date" in out and "D1-nvfuser" in out and findings.CPU_CAVEAT in out
    assert {path: path.stat().st_mtime_ns for path in Path("figures").rglob("*.*")} == before
    Path("figures/cpu-smoke/cost.png").write_bytes(b"other")
    call()
    assert "(drawn)" in capsys.readouterr().out and Path("figures/cpu-smoke/cost.png").stat().st_size > 1000
    make(runs, "A4", speed=222.0)
    call()
    assert "(drawn)" in capsys.readouterr().out


def test_a_group_without_a_baseline_does_not_hide_the_others(runs, quick, capsys):
    make(runs, "A4", machine=GPU)
    with pytest.raises(tables.ReportError, match="h200-smoke"):
        call()
    assert "cpu-smoke" in capsys.readouterr().out and Path("figures/cpu-smoke/cost.png").exists()


def test_a_figure_that_cannot_be_written_leaves_the_old_one(runs, quick):
    path = Path("figures/cpu-smoke/cost.png")
    call()
    with pytest.raises(record.RecordError, match=r"cannot write .*intact"):
        record.write_atomically(path / "below-a-file.png", b"new")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_readme_block_is_generated_and_checked(readme, runs, capsys):
    assert call("--check") == 1
    assert call("--readme") == 0
    text = readme.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\ntail\n")
    assert "](figures/cpu-smoke/ladder.png)" in text and "| A4 | A4-nb + order: bucketed | 200 | 2.00 |" in text
    assert findings.CPU_CAVEAT in text and "D1-nvfuser" not in text, "of the rows a selection"
    assert call("--check") == 0
    assert call("--readme") == 0 and readme.read_text() == text
    make(runs, "A4", speed=250.0)
    before = {path: path.read_bytes() for path in [readme, *Path("figures").rglob("*.*")]}
    capsys.readouterr()
    assert call("--check") == 1
    out = capsys.readouterr().out
    assert re.search(r"figures/cpu-smoke is not up to date \(other records: A4-s0-", out) and "README.md is not" in out
    assert {path: path.read_bytes() for path in before} == before, "a check writes nothing"


def test_the_readme_shows_committed_groups_only_and_the_gpu_before_the_cpu(readme, runs):
    for variant in ("A1", "A4"):
        make(runs, variant, machine=GPU, scale="bench")
    call("--readme")
    assert "h200-bench" not in readme.read_text()
    subprocess.run(["git", "add", "runs"], check=True)
    call("--readme")
    assert "figures/h200-bench/ladder.png" in readme.read_text() and "cpu-smoke" not in readme.read_text()


def test_without_committed_runs_the_readme_says_so(readme):
    subprocess.run(["git", "rm", "-rq", "--cached", "runs"], check=True)
    assert call("--readme") == 0
    assert "No reference runs are committed yet" in readme.read_text()
    assert call("--check") == 0


def test_a_readme_without_markers_and_a_folder_without_git_are_clear_errors(readme, runs):
    readme.write_text("# Title\n")
    with pytest.raises(tables.ReportError, match="no block between"):
        call("--readme")
    readme.unlink()
    with pytest.raises(tables.ReportError, match=r"cannot read README\.md"):
        call("--check")
    subprocess.run(["rm", "-rf", ".git"], check=True)
    with pytest.raises(tables.ReportError, match="cannot ask git"):
        call("--check")


def test_a_whole_report_never_imports_torch(runs):
    program = (
        "import argparse, sys; from qa_lib.report import publish as report; parser = argparse.ArgumentParser(); "
        "report.add_arguments(parser); report.main(parser.parse_args([])); import qa_lib.report.figures; "
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'transformers', 'datasets')))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_the_notebook_runs_and_shows_the_figures_and_tables(runs, tmp_path):
    papermill.execute_notebook(
        ROOT / "notebooks" / "report.ipynb",
        tmp_path / "out.ipynb",
        {"runs": str(tmp_path / "runs"), "group": "cpu-smoke"},
        cwd=ROOT,
        progress_bar=False,
    )
    cells = nbformat.read(tmp_path / "out.ipynb", 4).cells
    shown = {cell.id: [output.get("data", {}) for output in cell.get("outputs", [])] for cell in cells}
    assert all("image/png" in shown[name][0] for name in ("systems", "time", "peft"))
    assert "three seeds" in shown["quality"][0]["text/markdown"], "one seed tells no spread"
    assert "image/png" in shown["published"][2] and "cannot be told" in shown["published"][0]["text/markdown"]
    assert "× 3 ÷" not in shown["time"][2]["text/markdown"], "no projection from micro-batch 8"
    assert "no run of this group has a profile" in shown["anatomy"][0]["text/markdown"]
    assert "seeds' protocol" in shown["memory"][2]["text/markdown"]
    assert "no GPU" in shown["memory"][0]["text/markdown"]
    assert "A4 trains ×2.00" in shown["findings"][0]["text/markdown"]
    assert "no backend named" in shown["systems"][2]["text/markdown"]
    assert "T4: samples/s" in shown["published"][1]["text/markdown"]
    assert (tmp_path / "out.ipynb").stat().st_size < 500_000
