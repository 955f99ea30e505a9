"""The tables of notebooks/report.ipynb: F1, time and memory, from runs that are columns alone."""

import math

import pandas as pd
import pytest

from qa_lib.lab.report import evidence, headline, report_tables
from qa_lib.lab.report.facts import published
from qa_lib.lab.report.format import gain
from qa_lib.lab.report.stats import BEST_EXACT, BEST_F1, EXACT, F1, compare
from tests.material import committed, refused


def run(variant, seed=0, **more):
    """A run that ended ok: its columns."""
    return {
        "run_id": f"{variant}-{seed}",
        "group": "g",
        "status": "ok",
        "spec.variant": variant,
        "spec.seed": seed,
        "spec.hardware": "h200",
        "spec.search": "",
        "spec.preset.name": "quality",
        "spec.preset.quality": True,
        evidence.EPOCHS: 3.0,
        "task.name": "qa",
        "code.commit": "aaaaaaaaaa",
        "code.dirty": False,
        "model": "minilm",
        "data": "squad",
        "data.sha256": "ab",
        "world": 1,
        "stages": 1,
        "batch": 32,
        "precision": "own",
        "length": 384,
        "training": "3 epochs at 0.0001",
        "micro_batch": 32,
        "time.started": f"2026-12-01T00:00:0{seed}",
    } | more


def table_of(make, *sources):
    """A table of text, indexed by variant."""
    return make(*sources).set_index("variant")


# F1.


def scored(variant, f1, seeds=3, **more):
    """Runs of some seeds, whose F1 grows by the seed; each other score has its own distance."""
    runs = []
    for seed in range(seeds):
        scores = {
            F1: f1 + seed,
            BEST_F1: f1 + seed + 2,
            EXACT: f1 + seed - 3,
            BEST_EXACT: f1 + seed - 1,
            "quality.has_answer_f1": f1 + seed - 10,
            "quality.no_answer_f1": f1 + seed + 10,
            "quality.always_null_f1": 50.0,
        }
        sizes = {"model.params_total": 200.0, "model.params_trainable": 200.0}
        runs.append(run(variant, seed, **(scores | sizes | more)))
    return runs


SCORED = [*scored("A2", 70.2), *scored("A1", 70.0), *scored("A4-b", 40.0)]


def test_each_score_stands_in_its_column():
    table = table_of(report_tables.score_table, pd.DataFrame(SCORED))
    assert list(table.index) == ["never answers", "A1", "A2", "A4-b"]
    assert dict(table.loc["A2"]) == {
        "n": "3",
        "F1": "71.20",
        "EM": "68.20",
        "F1 at best threshold": "73.20",
        "EM at best": "70.20",
        "HasAns F1": "61.20",
        "NoAns F1": "81.20",
        "ΔF1": "+0.20 ± 0.00",
        "ΔEM": "+0.20 ± 0.00",
        "ΔF1 at best": "+0.20 ± 0.00",
        "ΔEM at best": "+0.20 ± 0.00",
        "within 1 F1": "✓",
    }


def test_exact_match_may_fall_where_f1_does_not():
    worse = scored("A2", 70.0)
    for line in worse:
        line[EXACT] -= 1.0
        line[BEST_EXACT] -= 2.0
    table = table_of(report_tables.score_table, pd.DataFrame([*SCORED[3:], *worse]))
    assert table.loc["A2", "ΔF1"] == "+0.00 ± 0.00"
    assert table.loc["A2", "ΔEM"] == "−1.00 ± 0.00"
    assert table.loc["A2", "ΔEM at best"] == "−2.00 ± 0.00"


def test_a_model_that_never_answers_has_the_same_score_by_all_measures():
    line = table_of(report_tables.score_table, pd.DataFrame(SCORED)).loc["never answers"]
    alike = ["F1", "EM", "F1 at best threshold", "EM at best"]
    assert line["n"] == "0"
    assert set(line[alike]) == {"50.00"}
    assert set(line.drop(["n", *alike])) == {"–"}


def test_a_fault_in_the_scoring_is_shown_and_not_compared():
    line = table_of(report_tables.score_table, pd.DataFrame(SCORED)).loc["A4-b"]
    assert line["F1"] == "41.00"
    assert set(line[["ΔF1", "ΔEM", "ΔF1 at best", "ΔEM at best", "within 1 F1"]]) == {"–"}


def test_runs_that_failed_have_no_score():
    failed = scored("A2", 0.0, status="error")
    table = table_of(report_tables.score_table, pd.DataFrame([*SCORED, *failed]))
    assert table.loc["A2", "n"] == "3"
    assert table.loc["A2", "F1"] == "71.20"


def test_scores_are_not_compared_without_three_seeds_of_the_baseline():
    few = pd.DataFrame([*scored("A1", 70.0, seeds=2), *scored("A2", 70.0)])
    refused("shares three seeds with A1", report_tables.score_table, few)
    refused("shares three seeds with A1", report_tables.peft_table, few)


def test_the_committed_scores_of_answerable_questions():
    runs = evidence.select(committed(), "h100-80gb-hbm3-answerable")
    table = table_of(report_tables.score_table, runs)
    assert table.loc["never answers", "EM"] == "0.00"
    for heading, score in {"ΔEM": EXACT, "ΔEM at best": BEST_EXACT}.items():
        assert table.loc["A4", heading] == gain(*compare(runs, "A4", column=score))


def test_variants_that_train_a_part_stand_beside_the_two_that_they_start_from():
    runs = [
        *scored("B1", 60.0, **{"model.params_trainable": 5.0}),
        *scored("A4", 70.0),
        *scored("A3", 70.0),
        *scored("A1", 70.0),
        *scored("B2", 0.0, status="oom"),
    ]
    table = table_of(report_tables.peft_table, pd.DataFrame(runs))
    assert list(table.index) == ["A1", "A3", "B1"]
    assert dict(table.loc["B1"]) == {
        "trains": "2.50 %",
        "n": "3",
        "F1 at best": "63.00 ± 1.69",
        "against A1": "−10.00 ± 0.00",
    }
    assert table.loc["A1", "against A1"] == "–"


# Searches.


def test_tries_are_of_the_groups_hardware_and_task():
    rows = {
        "near": run("A1", **{"spec.search": "tune"}),
        "another search": run("A1", **{"spec.search": "max-batch"}),
        "no search": run("A1"),
        "another card": run("A1", **{"spec.search": "tune", "spec.hardware": "t4"}),
        "another task": run("A1", **{"spec.search": "tune", "task.name": "lm"}),
    }
    runs = pd.DataFrame(rows.values(), index=list(rows))
    found = report_tables.tries_of_search(runs, pd.DataFrame([run("A2")]), "tune")
    assert list(found.index) == ["near"]


def tried(variant, trainable, rate, f1, seed=0, **more):
    """A try of search `tune`, at this learning rate of the preset."""
    return run(
        variant,
        seed,
        **{
            "spec.search": "tune",
            "spec.settings.trainable": trainable,
            evidence.RATE: rate,
            F1: f1,
            BEST_F1: None if f1 is None else f1 + 1,
        }
        | more,
    )


def test_the_learning_rate_of_a_try_is_that_of_what_it_trains():
    runs = [tried("A1", "all", 1e-4, 70.0), tried("B2", "bitfit", 1e-4, 60.0)]
    table = table_of(report_tables.tries_table, pd.DataFrame(runs))
    assert dict(table["trainable"]) == {"A1": "all", "B2": "bitfit"}
    # Biases train at 30 times the rate of the preset.
    assert dict(table["learning rate"]) == {"A1": "0.0001", "B2": "0.003"}


def test_the_best_try_of_a_variant_comes_first():
    runs = [
        tried("B1", "lora-qv", 1e-4, 65.0),
        tried("A1", "all", 1e-4, 60.0),
        tried("A1", "all", 2e-4, 70.0, seed=0),
        tried("A1", "all", 2e-4, 72.0, seed=1),
        tried("A1", "all", 3e-4, None),
    ]
    table = report_tables.tries_table(pd.DataFrame(runs))
    assert table.drop(columns="trainable").to_numpy().tolist() == [
        ["A1", "0.0002", "2", "71.00", "72.00"],
        ["A1", "0.0001", "1", "60.00", "61.00"],
        ["B1", "0.0001", "1", "65.00", "66.00"],
    ]


def test_of_a_try_that_was_repeated_the_newest_counts():
    again = tried("A1", "all", 1e-4, 70.0, **{"time.started": "2026-12-02"})
    before = tried("A1", "all", 1e-4, 60.0, **{"time.started": "2026-12-01"})
    table = report_tables.tries_table(pd.DataFrame([again, before]))
    assert list(table["F1"]) == ["70.00"]
    assert list(table["n"]) == ["1"]


def test_tries_without_a_score_are_not_ranked():
    unscored = pd.DataFrame([tried("A1", "all", 1e-4, None)])
    refused("no try of .* has an F1", report_tables.tries_table, unscored)
    refused("no try of .* has an F1", report_tables.tries_table, unscored[:0])
    without_scores = unscored.drop(columns=[F1, BEST_F1])
    refused("no try of .* has an F1", report_tables.tries_table, without_scores)


# Time.


@pytest.mark.parametrize(
    ("compile_s", "cold", "words"),
    [
        (0.0, True, ""),
        (30.04, True, " + 30.0 s"),
        (30.04, False, " + 30.0 s, a part of the code from a cache"),
        (math.nan, False, " + compilation, not measured"),
    ],
)
def test_the_arithmetic_of_a_projection_says_what_is_known_of_compilation(
    compile_s, cold, words, monkeypatch
):
    line = {"speed": 1234.5, "compile_s": compile_s, "cold": cold, "minutes": 5.04, "share": 0.5}
    monkeypatch.setattr(headline, "projected", lambda _: pd.DataFrame([line], index=["A3"]))
    lines = pd.DataFrame({"task.name": ["qa"]})
    assert report_tables.projection_table(lines).to_dict("records") == [
        {
            "variant": "A3",
            "arithmetic": f"131,754 × 3 ÷ 1,234/s{words}",
            "minutes": "5.0",
            "of A1's time": "50.0 %",
        }
    ]


def trained(variant, seed=0, train_s=100.0, **more):
    """A whole training that found nothing compiled."""
    times = {
        "time.prepare_s": 5.0,
        "time.compile_s": 20.0,
        "time.compile_cached": False,
        "time.train_s": train_s,
        "time.eval_s": 7.0,
        "time.wall_s": train_s + 12.0,
        "time.notebook_s": train_s + 30.0,
        "time.resumed_from_step": None,
    }
    return run(variant, seed, **(times | more))


def test_compilation_is_no_part_of_the_seconds_of_training():
    eager = trained("A1", **{"time.compile_s": None})
    table = table_of(report_tables.time_table, pd.DataFrame([trained("A3"), eager]))
    assert dict(table.loc["A3"]) == {
        "prepare s": "5.00",
        "compile s": "20.0",
        "train s": "80.0",
        "score s": "7.00",
        "all but imports s": "112",
        "from the command to the end s": "130",
    }
    assert table.loc["A1", "compile s"] == "–"
    assert table.loc["A1", "train s"] == "100"


def test_seconds_are_means_over_trainings_that_began_with_nothing():
    runs = [
        trained("A3", 0, 100.0),
        trained("A3", 1, 110.0),
        trained("A3", 2, 500.0, **{"time.compile_s": 0.4}),
        trained("A3", 3, 500.0, **{"time.compile_cached": True}),
        trained("A3", 4, 500.0, **{"time.resumed_from_step": 30.0}),
        trained("A3", 5, 500.0, **{"time.wall_s": None}),
    ]
    table = table_of(report_tables.time_table, pd.DataFrame(runs))
    assert table.loc["A3", "train s"] == "85.0"


def test_a_variant_that_trained_one_epoch_alone_is_marked_and_last():
    one_epoch = {evidence.EPOCHS: 1.0, "training": "1 epoch at 0.0001"}
    runs = [
        trained("A1", train_s=60.0, **one_epoch),
        trained("A0", train_s=90.0, **one_epoch),
        *(trained(name) for name in ("A3", "A1", "A2")),
    ]
    table = table_of(report_tables.time_table, pd.DataFrame(runs))
    assert list(table.index) == ["A1", "A2", "A3", "A0, one epoch"]
    assert table.loc["A1", "train s"] == "80.0"
    assert table.loc["A0, one epoch", "train s"] == "70.0"


def test_measured_trainings_name_the_groups_that_they_are_of():
    own = {"group": "h200-bench", "spec.preset.name": "bench"}
    runs = pd.DataFrame([
        trained("A1", **own),
        trained("A1", **own, micro_batch=8),
        trained("A1", group="h200-quality"),
        trained("A1", group="t4-minutes", **{"spec.preset.name": "minutes", "spec.hardware": "t4"}),
    ])  # fmt: skip
    found = report_tables.measured_trainings(runs, runs[runs["group"] == "h200-bench"])
    assert {heading: len(part) for heading, part in found.items()} == {
        "Measured, the model for F1, group h200-quality": 1,
        "Measured, three epochs": 0,
        "Measured, this group, group h200-bench": 1,
    }
    of_score, of_three_epochs, of_group = found.values()
    # Pictures were drawn in the notebooks of the group's own runs alone.
    assert of_score["time.notebook_s"].notna().all()
    assert of_group["time.notebook_s"].isna().all()
    assert report_tables.time_table(of_three_epochs).empty


# Memory.


def measured(variant, allocated, reserved, seed=0, **more):
    """A run at preset `vram`."""
    memory = {"memory.peak_alloc_mib": allocated, "memory.peak_reserved_mib": reserved}
    columns = {"spec.preset.name": "vram", "spec.preset.quality": False, "micro_batch": 8}
    return run(variant, seed, **(memory | columns | more))


def test_memory_is_of_the_newest_run_at_micro_batch_8():
    runs = pd.DataFrame([
        measured("A1", 1000.0, 1100.0, seed=1),
        measured("A1", 2000.0, 2200.0, seed=0),
        measured("A1", 4000.0, 4400.0, seed=2, micro_batch=32),
        measured("A2", 3000.0, 3300.0, seed=0),
        measured("A3", 9.0, 9.0, **{"spec.hardware": "t4"}, group="t4-vram"),
    ])  # fmt: skip
    found = report_tables.vram_runs(runs, "g")
    peaks = found.set_index("spec.variant")["memory.peak_alloc_mib"]
    assert dict(peaks) == {"A1": 1000.0, "A2": 3000.0}
    assert report_tables.vram_runs(runs, "no such group").empty


def test_memory_stands_beside_what_was_published():
    theirs = published().loc["A3"]
    runs = pd.DataFrame([
        measured("E-fp8", 500.0, 600.0),
        measured("A2", 500.0, None),
        measured("A3", theirs["peak_mib"] / 2, theirs["peak_reserved_mib"] * 3),
    ])  # fmt: skip
    table = table_of(report_tables.vram_table, runs)
    assert list(table.index) == ["A3", "E-fp8"]
    assert table.loc["A3", "ours over theirs"] == "0.50"
    assert table.loc["A3", "reserved: ours over theirs"] == "3.00"
    assert table.loc["E-fp8", "allocated MiB"] == "500"
    assert table.loc["E-fp8", "T4: allocated MiB"] == "–"


def test_memory_that_no_gpu_counted_is_not_shown():
    on_cpu = pd.DataFrame([measured("A1", None, None)])
    refused("no run at preset vram has a peak", report_tables.vram_table, on_cpu)
    refused("no run at preset vram has a peak", report_tables.vram_table, on_cpu[:0])


def test_a_source_names_a_group_where_there_are_runs():
    runs = pd.DataFrame([run("A1"), run("A2", **{"code.commit": "bbbbbbbbbb"})])
    assert report_tables.source(runs) == "Group g, code aaaaaaa, bbbbbbb."
    assert report_tables.source(runs[:0]) == ""


def limited(variant, micro_batch, speed, reserved, seed=0, **more):
    """A try of search `max-batch`."""
    columns = {
        "spec.search": "max-batch",
        "spec.preset.limit_gib": 14.9,
        "spec.sm": 75,
        "speed.samples_per_s": speed,
        "memory.peak_reserved_mib": reserved,
    }
    return run(variant, seed, micro_batch=micro_batch, **(columns | more))


def test_a_limit_is_told_by_memory_and_compute_capability():
    tries = pd.DataFrame([limited("A1", 8, 100.0, 1000.0)])
    assert report_tables.limit_of(tries) == "Within 14.9 GiB, at compute capability 7.5"


def test_the_fastest_micro_batch_need_not_be_the_largest():
    tries = pd.DataFrame([
        limited("A2", 8, 100.0, 1000.0),
        limited("A2", 32, 280.0, 3000.0, seed=0),
        limited("A2", 32, 300.0, 3200.0, seed=1),
        limited("A2", 64, 250.0, 5000.0),
        limited("A2", 128, 400.0, 9000.0, status="oom"),
        limited("A1", 8, 90.0, 2000.0),
    ])  # fmt: skip
    judged = pd.DataFrame([*scored("A1", 70.0), *scored("A2", 70.5)])
    table = table_of(report_tables.limited_table, tries, judged)
    assert list(table.index) == ["A1", "A2"]
    assert dict(table.loc["A2"]) == {
        "largest micro-batch": "64",
        "reserved MiB": "5,000",
        "best samples/s": "290",
        "at micro-batch": "32",
        "ΔF1 at best": "+0.50 ± 0.00",
    }
    assert table.loc["A1", "ΔF1 at best"] == "–"


# Every variant.


def test_every_variant_stands_at_its_largest_micro_batch_first(monkeypatch):
    monkeypatch.setattr(report_tables, "result_table", lambda lines, _: lines)
    lines = pd.DataFrame({"variant": ["A1", "A2", "A1", "A2"], "micro_batch": [8, 8, 32, 32]})
    for make in (report_tables.speed_table, report_tables.cost_table):
        assert make(lines).to_numpy().tolist() == [["A1", 32], ["A2", 32], ["A1", 8], ["A2", 8]]


def test_the_published_table_has_the_differences_that_follow_from_it():
    table = table_of(report_tables.published_table)
    assert table.loc["A1", "T4: × A1"] == "1.00"
    assert table.loc["A1", "T4: ΔF1"] == "+0.00"
    assert table.loc["A1", "T4: F1"] == "76.62"
