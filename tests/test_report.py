"""The report against records made by the real record functions, so that a change of the schema breaks these tests."""

import dataclasses
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
from qa_lib.report.runs import ReportError, found_compiled, load_runs, published, select

from qa_lib import record
from qa_lib.cli import Parser
from qa_lib.report import cards, claims, figures, gallery, publish, quality, sentences, tables, text
from qa_lib.report import readme as front
from qa_lib.spec import Machine, resolve
from qa_lib.variants import VARIANTS

ROOT = Path(__file__).parents[1]
GPU = Machine("h200", gpus=1, sm=90, backends=("inductor", "aot_eager", "cudagraphs"), bitsandbytes=True, compiler=True)
CPU = Machine("cpu", backends=("inductor", "aot_eager", "cudagraphs"), bitsandbytes=True, compiler=True)
SPEEDS = {"A0": 95.0, "A1": 100.0, "A2": 120.0, "A3": 150.0, "A4-nb": 160.0, "A4": 200.0, "B1": 300.0, "C2": 80.0}


def make(
    runs, variant, seed=0, *, machine=CPU, preset="smoke", status="ok", error=None, micro_batch=8, model="tiny",
    length=None, world=1, precision=None, task="qa", **values,
):  # fmt: skip
    """Write one record as fit would; `values` replace numbers by name, None for not measured. Returns its folder."""
    data, identity = {"name": "synthetic:1600", "sha256": "ab" * 32}, {"name": model, "revision": "1"}
    spec = resolve(variant, scale, seed, machine, data, identity, "synthetic:1600", "tiny", micro_batch)
    size = dataclasses.replace(spec.preset, task=task, max_length=length or spec.preset.max_length)
    asked = dataclasses.replace(spec.asked, precision=precision or spec.asked.precision)
    spec = dataclasses.replace(spec, preset=size, asked=asked, world=world)
    entry = record.new_record(spec, {"python": "3.11", "gpu": None})
    entry["code"] = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}
    if status == "ok":
        speed = values.get("speed", SPEEDS.get(variant, 110.0))
        step = 32e3 / speed
        entry["speed"]["samples_per_s"] = speed
        entry["time"] |= {"train_s": values.get("train_s", 9600 / speed), "compile_s": 1.5, "eval_s": 1.0}
        entry["time"] |= {"wall_s": 9600 / speed + 4.0, "resumed_from_step": values.get("resumed")}
        entry["time"]["step_ms"] = {"n": 270, "median": step, "p10": 0.9 * step, "p90": 1.2 * step}
        f1 = values.get("f1", 30.0 if variant == "A4-b" else 95.0)
        if task == "qa":
            entry["quality"] |= {"f1": f1, "best_f1": f1, "exact": f1, "n": 400}
        else:
            entry["quality"] |= {"perplexity": values.get("perplexity", 20.0)}
        entry["memory"]["peak_alloc_mib"] = values.get("peak", 2000.0 if machine is GPU else None)
        entry["model"] |= {"params_total": 75_000, "params_trainable": 750 if variant == "B1" else 75_000}
    folder = runs / spec.run_path
    record.finish(folder, entry, status, error)
    return folder


def lines_of(runs, group="cpu-smoke"):
    return tables.summarise(select(load_runs(runs), group)).set_index(["micro_batch", "variant"])


def call(*words):
    parser = Parser()
    publish.add_arguments(parser)
    return publish.main(parser.parse_args(list(words)))


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
def readme(runs, quick, monkeypatch):
    """README.md with empty blocks, and the runs in git's index."""
    monkeypatch.setitem(figures.FIGURES, "ladder", figures.fig_cost)
    blocks = "\n\n".join(f"<!-- {name} -->\n<!-- /{name} -->" for name in front.BLOCKS)
    Path("README.md").write_text(f"# Title\n\n{blocks}\n\ntail\n")
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
    assert line["n"] == 2 and line["samples_per_s"] == 250.0
    assert line["ratio"] == 2.5
    assert line["score"] == 96.0 and line["delta"] == 0.0, "A1 has the first seed alone"


@pytest.mark.parametrize("status", [None, "error", "running"])
def test_a_missing_baseline_is_an_error_that_names_group_and_baseline(tmp_path, status):
    make(tmp_path, "A4")
    if status:
        make(tmp_path, "A1", status=status)
    with pytest.raises(ReportError, match=r"cpu-smoke.*micro-batch 8.*A1"):
        lines_of(tmp_path)


def test_a_baseline_at_another_micro_batch_is_none(runs):
    make(runs, "A4", micro_batch=2, speed=70.0)
    line = lines_of(runs).loc[2, "A4"]
    assert line["samples_per_s"] == 70.0 and "A1 has no result under these conditions" in line["note"]
    assert line[["ratio", "delta", "break_even"]].isna().all()
    assert lines_of(runs).loc[8, "A4"]["ratio"] == 2.0 and not lines_of(runs).loc[8, "A4"]["note"]
    said = sentences.findings(select(load_runs(runs), "cpu-smoke"))
    assert "- Micro-batch 8: A4 trains 2.00× as fast" in said and "- A4: no ratio" in said


def test_a_profile_over_lengths_compares_rows_of_one_length(runs):
    for length, base, other in ((48, 400.0, 500.0), (192, 50.0, 200.0)):
        make(runs, "A1", length=length, speed=base)
        make(runs, "A4", length=length, speed=other)
    chosen = select(load_runs(runs), "cpu-smoke")
    lines = tables.summarise(chosen).set_index(["length", "variant"])
    assert (lines["ratio"][48, "A4"], lines["ratio"][96, "A4"], lines["ratio"][192, "A4"]) == (1.25, 2.0, 4.0)
    table = tables.result_table(lines.reset_index())
    assert list(table["length"].unique()) == ["48", "96", "192"] and "micro-batch" not in table
    figure = figures.fig_ladder(chosen)
    assert [axis.get_title("right") for axis in figure.axes] == ["length 192", "length 96", "length 48"]
    assert "length 48, 96, 192 · micro-batch 8" in " ".join(figure.get_supxlabel().split())
    make(runs, "A1", length=48, micro_batch=4)
    chosen = select(load_runs(runs), "cpu-smoke")
    assert "- Length 48, micro-batch 4: A1 trains" in sentences.findings(chosen)
    labels = [axis.get_title("right") for axis in figures.fig_ladder(chosen).axes]
    assert labels == ["length 192", "length 96", "length 48"], "of each length the largest micro-batch alone"
    assert call() == 0


def test_a_second_model_of_a_group_adds_rows_and_changes_none(runs):
    for seed in range(3):
        for variant, f1 in (("A1", 90.0), ("A2", 90.1)):
            make(runs, variant, seed, f1=f1 + seed)
    before = lines_of(runs)
    for seed in range(3):
        for variant, f1 in (("A1", 60.0), ("A2", 58.0)):
            make(runs, variant, seed, model="other", f1=f1 + seed / 10, speed=10.0)
    chosen = select(load_runs(runs), "cpu-smoke")
    lines = tables.summarise(chosen)
    assert set(lines["model"]) == {"tiny 1", "other 1"}
    of_first = lines[lines["model"] == "tiny 1"].set_index(["micro_batch", "variant"])
    pd.testing.assert_frame_equal(of_first, before)
    assert list(lines.loc[lines["model"] == "other 1", "ratio"]) == [1.0, 1.0]
    assert lines.loc[lines["model"] == "other 1", "delta"].tolist() == pytest.approx([0.0, -2.0])
    said = sentences.findings(chosen)
    assert re.search(r"- Model tiny 1: Within 1 F1 of A1 .*seeds: A2; worse", said)
    assert re.search(r"- Model other 1: Within 1 F1 of A1 .*no row yet; worse at one or both: A2", said)
    table = quality.equivalence_table(chosen).set_index("row")
    assert table.loc["A2, model other 1", "within 1 F1"] == "✗" and table.loc["A2, model tiny 1", "within 1 F1"] == "✓"
    assert [axis.get_title("right") for axis in figures.fig_equivalence(chosen).axes] == [
        "model tiny 1",
        "model other 1",
    ]
    assert call() == 0
    assert cards.which_row(load_runs(runs), "cpu-smoke") and claims.facts_of(load_runs(runs), "cpu-smoke")


def test_equality_is_told_of_models_whose_baseline_ran(runs):
    for seed in range(3):
        for variant in ("A1", "A2"):
            make(runs, variant, seed, f1=90.0 + seed)
        make(runs, "A2", seed, model="other", f1=50.0)
    chosen = select(load_runs(runs), "cpu-smoke")
    assert "A2" in set(quality.equivalence_table(chosen)["row"]), "without the name of its model, the only one"
    figure = figures.fig_equivalence(chosen)
    assert "other" not in figure.get_supxlabel() and [axis.get_title("right") for axis in figure.axes] == [""]


def test_gpus_and_a_precision_beyond_the_rows_own_are_axes(runs):
    make(runs, "A1", precision="bf16", speed=50.0)
    make(runs, "A4", precision="bf16", speed=150.0)
    make(runs, "A1", world=2, speed=180.0)
    make(runs, "A4", world=2, speed=270.0)
    lines = tables.summarise(select(load_runs(runs), "cpu-smoke")).set_index(["world", "precision", "variant"])
    ratio = lines["ratio"]
    assert (ratio[1, "own", "A4"], ratio[1, "bf16", "A4"], ratio[2, "own", "A4"]) == (2.0, 3.0, 1.5)
    make(runs, "E-bf16")  # bf16 is its own
    assert "E-bf16" in set(lines_of(runs).query("precision == 'own'").reset_index()["variant"])


def test_the_score_is_the_one_that_the_task_names(tmp_path, monkeypatch):
    task = record.Scoring("toy", "perplexity", "Perplexity", higher_is_better=False, scores=["perplexity"])
    monkeypatch.setitem(record.SCORING, "toy", task)
    monkeypatch.chdir(tmp_path)
    for variant, perplexity in (("A1", 20.0), ("A2", 21.5), ("A3", 20.0), ("B1", 25.0), ("B2", 22.0)):
        make(tmp_path / "runs", variant, machine=GPU, preset="bench", task="toy", perplexity=perplexity)
    every = load_runs(tmp_path / "runs")
    chosen = select(every, "h200-bench-toy")
    table = tables.result_table(tables.summarise(chosen)).set_index("row")
    assert table.loc["A2", ["Perplexity", "ΔPerplexity vs A1"]].tolist() == ["21.50", "+1.50"]
    assert not [name for name in table if "F1" in name]
    assert figures.fig_ladder(chosen).get_suptitle() and figures.fig_memory(chosen).get_suptitle()
    figure = figures.fig_peft(chosen)
    assert figure.axes[0].get_xlabel() == "Perplexity"
    assert "The best PEFT row, B2, has +2.00 Perplexity against A1" in " ".join(figure.get_suptitle().split())
    said = sentences.findings(chosen)
    assert "F1" not in said and "no margin of Perplexity" in said
    assert call("--figures", "figures") == 0
    assert "about question answering" in text.or_why(claims.claims_table, claims.facts_of(every, "h200-bench-toy"))
    for made in (quality.equivalence_table, quality.time_to_quality):
        assert "No table" in text.or_why(made, chosen) or "Perplexity" in text.or_why(made, chosen)
    assert "1 Perplexity in the mean" in cards.which_row(every, "h200-bench-toy")
    assert not {"ΔF1", "ΔPerplexity"} & set(quality.overview(chosen, chosen)), "of which no margin is set"


@pytest.mark.parametrize("key", ["group", "run_id"])
def test_a_record_that_names_another_folder_than_its_own_is_refused(runs, key, quick, capsys):
    path = make(runs, "A4") / "record.json"
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {key: "../web"}))
    assert call() == 0 and re.search(r"left out.*/A4-s0-.*its record is that of .*\.\./web", capsys.readouterr().err)
    assert not Path("web").exists() and [path.name for path in Path("figures").iterdir()] == ["cpu-smoke"]
    broken = {}
    load_runs(runs, broken)
    assert list(broken) == [path.parent]


def test_a_manifest_leads_to_no_file_outside_its_folder(runs, quick):
    call()
    path = Path("figures/cpu-smoke/manifest.json")
    manifest = json.loads(path.read_text())
    kept = [Path("keep.txt"), Path("keep.png"), Path("figures/cpu-smoke/keep.txt")]
    for file in kept:
        file.write_text("mine")
    Path("figures/cpu-smoke/old.png").write_text("an old figure")
    entry = {"title": "", "sha256": gallery.sha256(b"mine"), "runs": []}
    names = ["../../keep.txt", "../../keep.png", str(Path("keep.png").resolve()), "keep.txt", "old.png"]
    path.write_text(json.dumps(manifest | {"figures": dict.fromkeys(names, entry)}))
    drawn, _ = gallery.pictures(select(load_runs(runs), "cpu-smoke"), path.parent)
    assert set(drawn) == {"cost"}, "nothing is shown that is not a figure"
    call()
    assert all(file.read_text() == "mine" for file in kept) and not Path("figures/cpu-smoke/old.png").exists()


def test_a_baseline_out_of_memory_leaves_ratios_open(tmp_path):
    make(tmp_path, "A1", status="oom", error={"kind": "OutOfMemoryError", "message": "too large"})
    make(tmp_path, "A4")
    line = lines_of(tmp_path).loc[8, "A4"]
    assert math.isnan(line["ratio"]) and line["samples_per_s"] == 200.0


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
    assert lines_of(runs).loc[8, "A2"]["score"] == 94.0


def test_rows_without_a_result_are_shown_with_their_reason(runs):
    make(runs, "B2", status="killed", error={"kind": "timeout", "message": "over its limit of 300 s"})
    table = tables.result_table(lines_of(runs).reset_index()).set_index("row")
    assert table.loc["D1-nvfuser", ["status", "note"]].tolist() == ["skipped", "skipped: no backend named 'nvfuser'"]
    assert table.loc["C1", "note"] == "oom: CUDA out of memory (after step 3)"
    assert table.loc["B2", "note"] == "killed: over its limit of 300 s"
    assert "no backend named" in text.terminal(table.reset_index()) and "no backend" in text.markdown(table)


def test_the_share_of_a_step_for_data_is_told_where_it_was_measured(runs):
    heading = "waits for data, at most"
    assert heading not in tables.result_table(lines_of(runs).reset_index()), "as in all earlier records"
    folder = make(runs, "A4")
    entry = record.read_record(folder)
    entry["time"]["data_ms"] = 0.05 * entry["time"]["step_ms"]["median"]
    record.write_record(folder, entry)
    table = tables.result_table(lines_of(runs).reset_index()).set_index("row")
    assert table.loc["A4", heading].startswith("5") and table.loc["A1", heading] == "–"
    assert heading in tables.result_table(lines_of(runs).reset_index(), tables.COSTS)


def test_of_several_seeds_the_one_that_failed_is_named(runs):
    make(runs, "A4", seed=1, status="error", error={"kind": "NonFiniteLoss", "message": "loss is nan at step 7"})
    line = lines_of(runs).loc[8, "A4"]
    assert line["status"] == "1 ok, 1 error" and line["note"] == "seed 1 error: loss is nan at step 7"
    assert line["n"] == 1 and line["ratio"] == 2.0


def test_intervals_need_three_seeds_and_are_those_of_students_t(runs):
    make(runs, "A4", seed=1, speed=210.0)
    assert math.isnan(lines_of(runs).loc[8, "A4"]["samples_per_s±"])
    make(runs, "A4", seed=2, speed=220.0)
    # Mean 210, standard deviation 10, t(2 degrees of freedom, 95 %) 2.920: 2.920 * 10 / sqrt(3) = 16.86.
    line = lines_of(runs).loc[8, "A4"]
    assert line["samples_per_s±"] == pytest.approx(16.86, abs=0.01)
    assert tables.result_table(lines_of(runs).reset_index()).set_index("row").loc["A4", "features/s"] == "210 ± 17"
    four = pd.Series([1.0, 2.0, 3.0, 4.0])  # standard deviation 1.2910, t(3) 2.353
    assert tables.interval(four) == pytest.approx(2.353 * 1.2910 / 2, abs=1e-3)


def test_the_difference_in_f1_has_an_interval_over_equal_seeds(runs):
    for seed, (base, other) in enumerate([(90.0, 91.0), (92.0, 94.0), (94.0, 97.0)]):
        make(runs, "A1", seed=seed, f1=base)
        make(runs, "A4", seed=seed, f1=other)
    line = lines_of(runs).loc[8, "A4"]  # differences 1, 2, 3
    assert line["delta"] == 2.0 and line["delta±"] == pytest.approx(2.920 / math.sqrt(3), abs=1e-3)
    make(runs, "A4", seed=3, f1=0.0)
    assert lines_of(runs).loc[8, "A4"]["delta"] == 2.0, "a seed that the baseline has not says nothing"


def test_a_resumed_run_has_no_time_of_the_whole(runs):
    make(runs, "A4", resumed=100)
    line = lines_of(runs).loc[8, "A4"]
    assert math.isnan(line["train_s"]) and math.isnan(line["wall_s"]) and line["samples_per_s"] == 200.0
    assert "resumed at step 100" in line["note"]
    assert "A4" not in tables.cost_table(select(load_runs(runs), "cpu-smoke")).index


def test_the_newest_of_two_runs_of_one_row_and_seed_counts(runs):
    old = make(runs, "A4", speed=1.0)
    entry = json.loads((old / "record.json").read_text())
    entry["run_id"], entry["time"]["started"] = "A4-s0-older0", "2020-01-01T00:00:00+00:00"
    (old.parent / "A4-s0-older0").mkdir()
    record.write_record(old.parent / "A4-s0-older0", entry)
    make(runs, "A4", speed=250.0)
    assert lines_of(runs).loc[8, "A4"]["ratio"] == 2.5


@pytest.mark.parametrize(("section", "key"), [("scale", "stride"), ("data", "sha256"), ("scale", "steps")])
def test_a_group_that_mixes_data_or_scales_is_refused(runs, section, key):
    path = make(runs, "A4") / "record.json"
    entry = json.loads(path.read_text())
    (entry["spec"]["preset"] if section == "scale" else entry[section])[key] = "7" if key == "sha256" else 7
    path.write_text(json.dumps(entry))
    with pytest.raises(ReportError, match=rf"cpu-smoke.*{section}\.{key} is .*A4-s0|A4-s0.*{section}\.{key}"):
        lines_of(runs)


def test_a_record_of_an_unknown_schema_is_refused_by_name(runs, quick, capsys):
    path = make(runs, "A4") / "record.json"
    path.write_text(path.read_text().replace(record.SCHEMA, "qa_lib/99"))
    assert call() == 0 and re.search(r"left out: .*A4-s0-.*record\.json.*qa_lib/99", capsys.readouterr().err)


def test_an_unknown_group_and_no_records_at_all_are_clear_errors(runs, tmp_path):
    with pytest.raises(ReportError, match=r"'gpu'.*cpu-smoke"):
        select(load_runs(runs), "gpu")
    with pytest.raises(ReportError, match="no record below"):
        call("--runs", str(tmp_path / "nowhere"))


def test_a_row_that_this_version_does_not_know_is_shown(runs):
    path = make(runs, "C2") / "record.json"
    entry = json.loads(path.read_text())
    entry["spec"]["variant"] = "Z9"
    path.write_text(json.dumps(entry))
    table = tables.result_table(lines_of(runs).reset_index()).set_index("row")
    assert table.index[-1] == "Z9" and table.loc["Z9", "what it changes"] == "–"
    figure = figures.fig_cost(select(load_runs(runs), "cpu-smoke"))
    assert "Z9" in {text.get_text() for text in figure.axes[0].get_yticklabels()}


def test_a_familys_lines_are_those_of_the_family_the_baseline_and_the_parents(runs):
    lines = lines_of(runs).reset_index()
    assert tables.family_lines(lines, "B")["variant"].tolist() == ["A1", "A3", "B1"]
    assert tables.family_lines(lines, "A")["variant"].tolist() == ["A1", "A0", "A2", "A3", "A4-nb", "A4", "A4-b"]
    assert text.markdown(tables.family_lines(lines, "E")) == "*No row of this table has been run.*"


def test_the_overview_is_of_the_largest_micro_batch_and_of_rows_that_are_judged(runs):
    for seed in range(3):
        make(runs, "A1", seed, f1=90.0 + seed, micro_batch=16, speed=400.0)
        make(runs, "A4", seed, f1=90.1 + seed, micro_batch=16, speed=800.0)
    make(runs, "A3", micro_batch=16, f1=90.0)
    make(runs, "A0", micro_batch=16, f1=90.0)
    chosen = select(load_runs(runs), "cpu-smoke")
    chosen["memory.peak_reserved_mib"] = 2048.0 + 1024 * (chosen["spec.seed"] == 2)
    table = quality.overview(chosen, chosen).set_index("row")
    assert list(table.index) == ["A1", "A0", "A4"], "A3 has one seed, and so no interval"
    assert table.loc["A4", ["n", "features/s", "× A1", "GiB reserved", "within 1 F1"]].tolist() == [
        "3", "800 ± 0", "2.00", "3.00", "✓",
    ]  # fmt: skip
    assert table.loc["A4", "ΔF1"].startswith("+0.08 ±") and table.loc["A0", "ΔF1"] == "–"
    alone = quality.overview(chosen, chosen[chosen["spec.seed"] == 0])
    assert "A3" in set(alone["row"]) and "ΔF1" not in alone, "without scores all rows are shown"


def test_mfu_is_of_the_data_sheet_and_unknown_for_a_card_without_one(runs):
    measured = {"speed.gemm_utilization": 0.4, "speed.gemm_tflops_measured": 700.0, "spec.settings.precision": "fp16"}
    chosen = select(load_runs(runs), "cpu-smoke").assign(**measured)
    lines = tables.summarise(chosen.assign(**{"env.gpu": "NVIDIA H200"})).set_index("variant")
    assert lines.loc["A1", "mfu"] == pytest.approx(0.4 * 700 / 989) and lines.loc["A1", "matrix_share"] == 0.4
    assert tables.summarise(chosen.assign(**{"env.gpu": "Some Card"}))["mfu"].isna().all()


def test_the_published_numbers_stand_beside_ours_each_against_its_own_baseline(runs):
    make(runs, "A1", micro_batch=4)
    table = tables.published_table(lines_of(runs).reset_index()).set_index("row")
    assert set(table.index) <= set(VARIANTS)
    assert table.loc["A4-nb", ["T4: samples/s", "T4: × A1", "T4: F1", "T4: ΔF1"]].tolist() == [
        "51.6", "1.17", "77.23", "+0.61",
    ]  # fmt: skip
    ours = ["ours at micro-batch 4: × A1", "ours at micro-batch 8: × A1"]
    assert table.loc["A4-nb", ours].tolist() == ["–", "1.60"]
    assert table.loc["C2-8", "T4: samples/s"] == "–" and table.loc["B3", ours[1]] == "–"


def test_published_training_times_agree_with_published_throughput():
    """Three epochs of 131,754 features: each transcribed pair has to give that number again."""
    rows = published().dropna(subset=["samples_per_s"])
    features = rows["train_s"] * rows["samples_per_s"]
    assert len(rows) == 11 and features.between(0.995 * 3 * 131_754, 1.005 * 3 * 131_754).all()


def test_the_cost_is_that_of_a_run_which_found_nothing_compiled(runs):
    make(runs, "A1", seed=1, speed=50.0)
    path = make(runs, "A3", seed=1, speed=1.0) / "record.json"
    entry = json.loads(path.read_text())
    entry["time"]["compile_cached"] = True
    path.write_text(json.dumps(entry))
    costs = tables.cost_table(select(load_runs(runs), "cpu-smoke"))
    parts = ["preparing", "compiling", "training", "scoring", "wall", "n"]
    assert costs.loc["A1", parts].tolist() == [0.0, 1.5, 142.5, 1.0, 148.0, 2]  # 96 and 192 s of training
    assert costs.loc["A3", ["wall", "n"]].tolist() == [68.0, 1]
    assert list(costs.index[:3]) == ["A1", "A0", "A2"] and "C1" not in costs.index


def test_numbers_are_written_with_three_digits():
    written = [text.number(value) for value in (1234.5, 123.4, 99.96, 12.34, 9.996, 1.234, float("nan"))]
    assert written == ["1,234", "123", "100", "12.3", "10.0", "1.23", "–"]
    assert [text.count(value) for value in (70, 75_330, 999_600, 108_893_186)] == ["70", "75.3 k", "1 M", "109 M"]


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
        "spec": {"variant": run["spec.variant"], "micro_batch": 8}, "code": {"commit": "0123456", "dirty": False},
        "env": {"gpu": "A GPU", "cpu": "a CPU"},
        "time": {"step_ms": 7.5, "busy_ms": 6.0, "busy_share": 0.8, "launches_per_step": 900.0, "parts": parts,
                 "kernels": []},
        "timeline": spans, "memory": memory, "ceilings": {"matrix_tflops": 700.0, "copy_gb_per_s": 4000.0},
        "ncu": [kernel | {"dram_bytes": 1e6, "fp16_ops": 4e9, "bf16_ops": 0.0, "fp8_ops": None},
                kernel | {"name": "norm", "dram_bytes": 2e6, "fp16_ops": 0.0, "bf16_ops": 0.0, "fp8_ops": 0.0}],
    }  # fmt: skip


def test_findings_name_what_is_known_and_what_is_not(runs):
    text = sentences.findings(select(load_runs(runs), "cpu-smoke"))
    assert "The best PEFT row, B1, has +0.00 F1 against A1." in text
    assert "Joining sorted predictions by position (A4-b) gives F1 30.00 where A4 has 95.00" in text
    assert "Not known here: peak GPU memory" in text and "C1: oom: CUDA out of memory" in text
    assert sentences.CPU_CAVEAT in text and "n = 1 seed" in text


def test_the_manifest_ties_every_figure_to_records(runs):
    assert call() == 0
    folder = Path("figures/cpu-smoke")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "report" not in manifest, "what the code looks like is not shown"
    for run_id, digest in manifest["records"].items():
        content = (runs / "cpu-smoke" / run_id / "record.json").read_bytes()
        assert digest == gallery.sha256(content)
    assert set(manifest["figures"]) == {path.name for path in folder.glob("*.png")} == {
        "ladder.png", "peft.png", "cost.png",
    }  # fmt: skip
    for name, figure in manifest["figures"].items():
        assert figure["sha256"] == gallery.sha256((folder / name).read_bytes())
        assert figure["title"]
    assert "no GPU" in manifest["not_drawn"]["memory"]
    assert manifest["results"][1]["row"] == "A0"


def test_nothing_is_redrawn_unless_what_is_shown_changed(runs, quick, capsys, monkeypatch):
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
    assert "up to date" in out and "D1-nvfuser" in out and sentences.CPU_CAVEAT in out
    assert {path: path.stat().st_mtime_ns for path in Path("figures").rglob("*.*")} == before
    Path("figures/cpu-smoke/cost.png").write_bytes(b"other")
    call()
    assert "(drawn)" in capsys.readouterr().out and Path("figures/cpu-smoke/cost.png").stat().st_size > 1000
    make(runs, "A4", speed=222.0)
    call()
    assert "(drawn)" in capsys.readouterr().out
    monkeypatch.setattr(gallery, "findings", lambda runs: "another sentence")
    call()
    assert "(drawn)" in capsys.readouterr().out, "titles are sentences, and these have changed"


def test_of_many_groups_without_figures_the_newest_get_them_at_once(runs, quick, capsys):
    """Fifty would take minutes; each can be asked for, and keeps its figures up to date from then on."""
    for path in list(runs.glob("cpu-smoke/*/record.json")):
        entry = json.loads(path.read_text())
        for day, group in enumerate(("old", "older", "oldest"), 1):
            entry |= {"group": group}
            entry["time"]["started"] = f"2026-01-0{5 - day}T00:00:00+00:00"
            copy = runs / group / path.parent.name / "record.json"
            copy.parent.mkdir(parents=True)
            copy.write_text(json.dumps(entry))
    call()
    assert sorted(path.parent.name for path in Path("figures").glob("*/manifest.json")) == ["cpu-smoke", "old"]
    assert "report --group oldest draws them" in capsys.readouterr().out
    call("--group", "oldest")
    assert Path("figures/oldest/manifest.json").exists()


def test_the_newest_group_comes_last_and_one_can_be_asked_for(runs, quick, capsys):
    make(runs, "A1", machine=GPU)
    make(runs, "A2", machine=GPU)
    for path in runs.glob("cpu-smoke/*/record.json"):
        entry = json.loads(path.read_text())
        entry["time"]["started"] = "2999-01-01T00:00:00+00:00"
        path.write_text(json.dumps(entry))
    call()
    out = capsys.readouterr().out
    assert out.index("figures/h200-smoke") < out.index("figures/cpu-smoke")
    call("--group", "h200-smoke")
    assert "figures/cpu-smoke" not in capsys.readouterr().out
    with pytest.raises(ReportError, match=r"no group 'h100' below runs; there are h200-smoke, cpu-smoke"):
        call("--group", "h100")


def test_a_group_without_a_baseline_does_not_hide_the_others(runs, quick, capsys):
    make(runs, "A4", machine=GPU)
    with pytest.raises(ReportError, match="h200-smoke"):
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
    assert "](figures/cpu-smoke/ladder.png)" in text and "| 100 | 1.00 |" in text
    assert "A4 trains 2.00× as fast" in text and "not known: no row has a measured speed at micro-batch 32" in text
    assert sentences.CPU_CAVEAT in text and "\n| A4 |" not in text, "of the rows a selection"
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
        make(runs, variant, machine=GPU, preset="bench")
    call("--readme")
    assert "h200-bench" not in readme.read_text()
    subprocess.run(["git", "add", "runs"], check=True)
    call("--readme")
    assert "figures/h200-bench/ladder.png" in readme.read_text() and "figures/cpu-smoke" not in readme.read_text()


def test_one_call_writes_the_readme_with_its_pictures(readme, runs, quick):
    """Though newer groups wait for their figures, too."""
    for scale in ("bench", "smoke", "sizing", "quality"):
        make(runs, "A1", machine=GPU, scale=scale)
        make(runs, "A4", machine=GPU, scale=scale)
    subprocess.run(["git", "add", "runs"], check=True)
    with pytest.raises(ReportError, match="give one of the two"):
        call("--readme", "--group", "h200-smoke")
    assert call("--readme") == 0
    assert {path.parent.name for path in Path("figures").rglob("manifest.json")} == {
        "cpu-smoke", "h200-bench", "h200-smoke", "h200-sizing", "h200-quality"
    }  # fmt: skip


def test_without_committed_runs_the_readme_says_so(readme):
    subprocess.run(["git", "rm", "-rq", "--cached", "runs"], check=True)
    assert call("--readme") == 0
    assert "No reference runs are committed yet" in readme.read_text()
    assert call("--check") == 0


def test_a_readme_without_markers_and_a_folder_without_git_are_clear_errors(readme, runs):
    readme.write_text("# Title\n")
    with pytest.raises(ReportError, match="no block between"):
        call("--readme")
    readme.unlink()
    with pytest.raises(ReportError, match=r"cannot read README\.md"):
        call("--check")
    subprocess.run(["rm", "-rf", ".git"], check=True)
    with pytest.raises(ReportError, match="cannot ask git"):
        call("--check")


def test_a_whole_report_never_imports_torch(runs):
    program = (
        "import sys; from qa_lib.cli import Parser; from qa_lib.report import publish; parser = Parser(); "
        "publish.add_arguments(parser); publish.main(parser.parse_args([])); import qa_lib.report.figures; "
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
    assert all("image/png" in shown[name][0] for name in ("systems", "peft"))
    assert "three seeds" in shown["quality"][0]["text/markdown"], "one seed tells no spread"
    claimed, why, theirs = (output["text/markdown"] for output in shown["published"])
    assert "| ? |" in claimed and "Not measured" in why and "T4: samples/s" in theirs
    assert "× 3 ÷" not in shown["time"][0]["text/markdown"], "no projection from micro-batch 8"
    assert "no run of this group has a profile" in shown["anatomy"][0]["text/markdown"]
    assert "seeds' protocol" in shown["memory"][1]["text/markdown"]
    assert "no GPU" in shown["memory"][0]["text/markdown"]
    summary, table, source, every, said = (output["text/markdown"] for output in shown["findings"])
    assert "not known: no row has a measured speed at micro-batch 32" in summary and "| A4 |" in table
    assert "on a CPU" in source and "A3 + " in every
    assert "A4 trains 2.00× as fast" in said
    assert "no backend named" in shown["systems"][1]["text/markdown"]
    assert (tmp_path / "out.ipynb").stat().st_size < 500_000


def test_a_page_is_of_its_notebook_until_a_word_or_a_cell_of_that_changes(tmp_path):
    notebook, page = ROOT / "notebooks" / "slides.ipynb", ROOT / publish.RENDERED[Path("notebooks/slides.ipynb")]
    assert publish.is_page_of(page, notebook)
    for change in (lambda cells: cells[0].update(source="Another"), lambda cells: cells.pop()):
        changed = json.loads(notebook.read_text(encoding="utf-8"))
        change(changed["cells"])
        (tmp_path / "changed.ipynb").write_text(json.dumps(changed))
        assert not publish.is_page_of(page, tmp_path / "changed.ipynb")


def test_code_is_found_compiled_by_the_caches_word_or_in_no_time():
    runs = pd.DataFrame({"time.compile_cached": [True, False, False, None], "time.compile_s": [20.0, 30.0, 0.1, None]})
    assert found_compiled(runs).tolist() == [True, False, True, False]


REPORT = ROOT / publish.RENDERED[Path("notebooks/report.ipynb")]


def test_the_rendered_report_is_for_a_page_without_code():
    """In its file; test_notebooks renders it again, which takes a kernel."""
    notebook = nbformat.read(REPORT, 4)
    assert "notebooks/report.ipynb" in notebook.cells[0].source
    assert {cell.cell_type for cell in notebook.cells} == {"markdown"}, "a cell of code leaves an empty box"
    shown = {cell.id: cell.source for cell in notebook.cells}
    summary, table = shown["findings"].split("<details>")[0].split("\n\n| ")
    assert len(summary.splitlines()) <= 12 and "Which row to take" in summary and "Not shown" in summary
    assert 8 <= table.count("\n| ") - 1 <= 10, "the decisions stand first, every row is folded"
    for source in shown.values():
        open_page = re.sub(r"(?s)<details>.*?</details>", "", source)
        for part, most in ((open_page, 8), (source, 11)):
            for header in re.findall(r"^(\|.*)\n\| ---", part, re.M):
                assert header.count("|") - 1 <= most, header


def test_nbconvert_shows_the_rendered_report_with_words_for_its_pictures():
    from nbconvert import HTMLExporter  # takes a while to import

    page, _ = HTMLExporter().from_filename(REPORT)
    pictures = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,', page)
    assert len(pictures) >= 5 and len(pictures) == page.count("<img"), "each an attachment that was found"
    assert all("A1" in words for words in pictures) and "In\xa0[" not in page


def test_what_is_folded_is_a_table_still():
    assert text.folded("More", "| a |\n| --- |") == "<details><summary>More</summary>\n\n| a |\n| --- |\n\n</details>"
