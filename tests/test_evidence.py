"""What a number of the report rests on: loading and choice of runs, lines of means, verdicts, text.

Records are made by the real record functions, so that a change of the schema breaks these tests.
"""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from qa_lib.lab.report import curves, evidence, facts, format, own, scaling, stats, summary, tables
from qa_lib.lab.report.evidence import AXES, NotMeasured, load_runs, select
from qa_lib.records.archive import Run
from qa_lib.spec.presets import PRESETS
from qa_lib.spec.variants import RECOMMENDED, VARIANTS
from tests.material import change_record, committed, edited, refused
from tests.report_runs import make
from tests.tiny import H200

GROUP = "cpu-smoke"


def lines_of(runs, micro_batch=8):
    """The lines of the smoke runs below a folder, by variant."""
    lines = summary.summary(select(load_runs(runs), GROUP))
    return lines[lines["micro_batch"] == micro_batch].set_index("variant")


def table_of(runs):
    """The table of the smoke runs below a folder, by variant."""
    lines = summary.summary(select(load_runs(runs), GROUP))
    return summary.result_table(lines).set_index("variant")


# Loading.


def test_a_folder_without_records_is_a_table_without_rows(tmp_path):
    assert load_runs(tmp_path).empty


def test_a_table_without_rows_has_columns_of_a_table_with_runs(tmp_path):
    empty = load_runs(tmp_path)
    make(tmp_path, "A1")
    assert set(empty) == set(evidence.COLUMNS) <= set(load_runs(tmp_path))


@pytest.mark.parametrize("choose", [evidence.runs_at_preset, evidence.nearest_runs_at_preset])
def test_without_records_there_are_no_runs_at_a_preset(choose, tmp_path):
    assert choose(load_runs(tmp_path), GROUP, "bench").empty


def test_a_record_that_cannot_be_trusted_is_left_out_by_name(tmp_path, capsys):
    make(tmp_path, "A1")
    edited(make(tmp_path, "A2") / "record.json", group="other")
    assert load_runs(tmp_path)["spec.variant"].tolist() == ["A1"]
    assert "left out: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "axis", "value"),
    [
        ({"length": 64}, "length", 64),
        ({"world": 2}, "world", 2),
        ({"precision": "bf16"}, "precision", "bf16"),
        ({"precision": "fp16"}, "precision", "own"),
        ({"micro_batch": 4}, "micro_batch", 4),
        ({"world": 1, "batch": 64}, "batch", 64),
    ],
)
def test_a_runs_axes_say_what_was_asked_for(tmp_path, asked, axis, value):
    make(tmp_path, "A4", **asked)
    assert load_runs(tmp_path)[axis].item() == value


@pytest.mark.parametrize(
    ("epochs", "words"),
    [(3.0, "3 epochs at 0.0002"), (1.0, "1 epoch at 0.0002"), (0.5, "0.5 epochs at 0.0002")],
)
def test_the_axis_training_is_epochs_and_learning_rate(tmp_path, epochs, words):
    make(tmp_path, "A1")
    runs = load_runs(tmp_path).assign(**{evidence.EPOCHS: epochs, evidence.RATE: 2e-4})
    assert evidence.with_axes(runs)["training"].item() == words


def test_a_batch_in_tokens_counts_as_samples_of_full_length(tmp_path):
    make(tmp_path, "A1", length=64)
    runs = load_runs(tmp_path).assign(**{evidence.BATCH_TOKENS: 640})
    assert evidence.with_axes(runs)["batch"].item() == 10


def test_models_are_told_apart_by_revision_where_they_are_scored(tmp_path):
    make(tmp_path, "A1", revision="1")
    make(tmp_path, "A1", revision="2")
    assert sorted(load_runs(tmp_path)["model"]) == ["tiny 1", "tiny 2"]


def test_models_are_told_apart_by_size_where_nothing_is_scored(tmp_path):
    make(tmp_path, "A1", preset="bench", revision="1", params=75_000)
    make(tmp_path, "A1", preset="bench", revision="2", params=75_000)
    make(tmp_path, "B1", preset="bench", revision="2", params=80_000)  # with adapters
    make(tmp_path, "A4", preset="bench", revision="3", params=76_000)
    models = select(load_runs(tmp_path), "cpu-bench").set_index("spec.variant")["model"]
    assert models["A1"] == models["B1"]
    assert models["A1"] != models["A4"]


# Which runs count.


def ended(runs, status, started, **values):
    """The runs with another status, and another time at which they began."""
    return runs.assign(status=status, **{"time.started": started}, **values)


def test_the_newest_of_two_good_runs_counts(tmp_path):
    make(tmp_path, "A1")
    run = load_runs(tmp_path)
    both = [ended(run, "ok", "2026-02", run_id="new"), ended(run, "ok", "2026-01", run_id="old")]
    assert select(pd.concat(both), GROUP)["run_id"].tolist() == ["new"]


def test_a_good_run_is_not_replaced_by_a_failed_one(tmp_path):
    make(tmp_path, "A1")
    run = load_runs(tmp_path)
    both = [ended(run, "ok", "2026-01"), ended(run, "killed", "2026-02")]
    assert select(pd.concat(both), GROUP)["status"].tolist() == ["ok"]


def on_two_data_sets(tmp_path, other: str):
    """A run of A1 on the usual data, and the same again on data of another digest and this name."""
    make(tmp_path, "A1")
    run = load_runs(tmp_path)
    moved = run.assign(**{"data.sha256": "cd" * 32, "data.name": other})
    return evidence.with_axes(pd.concat([run, moved], ignore_index=True))


def test_runs_of_one_variant_and_seed_on_other_data_do_not_replace_each_other(tmp_path):
    both = select(on_two_data_sets(tmp_path, "other"), GROUP)
    assert both["data"].tolist() == ["synthetic:1600", "other"]
    assert len(evidence.usual_conditions(both)) == 1


def test_two_data_sets_of_one_name_are_told_apart_by_their_digests(tmp_path):
    both = on_two_data_sets(tmp_path, "synthetic:1600")
    assert both["data"].iloc[1] == "synthetic:1600 cdcdcdc"
    assert both["data"].nunique() == 2


def test_runs_on_other_data_are_no_mean_with_the_usual_ones(tmp_path):
    lines = summary.summary(select(on_two_data_sets(tmp_path, "other"), GROUP))
    assert sorted(lines["data"]) == ["other", "synthetic:1600"]
    assert lines["n"].tolist() == [1, 1]


@pytest.mark.parametrize(("preset", "is_compared"), [("bench", True), ("quality", False)])
def test_only_runs_without_a_score_may_have_been_timed_for_other_numbers_of_steps(
    preset, is_compared, tmp_path
):
    make(tmp_path, "A1", preset=preset)
    run = load_runs(tmp_path)
    group = run["group"].iloc[0]
    other = run.assign(**{"spec.preset.steps": 77, "spec.variant": "A2"})
    both = pd.concat([run, other], ignore_index=True)
    if is_compared:
        assert len(select(both, group)) == 2
    else:
        refused("mixes runs that cannot be compared: spec.preset.steps", select, both, group)


def test_where_nothing_has_records_it_is_said_how_to_make_some():
    refused("no records.*: none; make quickstart makes", select, evidence.as_frame([]), GROUP)


def test_a_group_without_records_is_refused_with_those_that_have_some(tmp_path):
    make(tmp_path, "A1")
    said = r"group 'other' has no records \(groups with records: cpu-smoke"
    refused(said, select, load_runs(tmp_path), "other")


def test_a_group_without_records_may_be_asked_for_as_none(tmp_path):
    make(tmp_path, "A1")
    assert evidence.select_or_empty(load_runs(tmp_path), "other").empty
    assert len(evidence.select_or_empty(load_runs(tmp_path), GROUP)) == 1


def test_groups_by_age_end_with_the_newest_and_leave_searches_out():
    began = {"old": "2026-01", "new": "2026-03", "middle": "2026-02", "tries": "2026-04"}
    runs = pd.DataFrame({"group": [*began], "time.started": [*began.values()], "spec.search": ""})
    runs.loc[runs["group"] == "tries", "spec.search"] = "tune"
    first_of_new = runs[runs["group"] == "new"].assign(**{"time.started": "2025-12"})
    runs = pd.concat([first_of_new, runs], ignore_index=True)
    assert evidence.groups_by_age(runs) == ["old", "middle", "new"]


def test_each_preset_says_what_its_runs_are_evidence_for():
    assert set(PRESETS) - {"test"} <= set(evidence.PURPOSES)


def test_a_search_is_evidence_for_another_thing_than_its_preset():
    runs = pd.DataFrame({"spec.search": ["", "tune"], "spec.preset.name": "quality"})
    assert evidence.purpose(runs) == "F1, and seconds to a score"
    assert evidence.purpose(runs[1:]) == "which learning rate to take, not F1"


def test_a_table_without_rows_has_no_groups_no_cpu_and_the_baseline_of_questions():
    assert evidence.groups_by_age(pd.DataFrame()) == []
    assert not evidence.on_cpu(evidence.as_frame([]))
    assert evidence.baseline(evidence.as_frame([])) == "A1"


def test_ones_own_runs_are_those_in_folders_and_all_where_none_is():
    archived = pd.DataFrame({"run": [Run({}, archive="a.jsonl"), Run({}, archive="b.jsonl")]})
    own = pd.DataFrame({"run": [Run({}, folder="cpu-smoke/A1")]})
    assert len(evidence.own_or_all(archived)) == 2
    (run,) = evidence.own_or_all(pd.concat([archived, own]))["run"]
    assert run.folder
    assert evidence.own_or_all(archived[:0]).empty


def test_committed_groups_are_not_known_without_git(tmp_path):
    refused(r"cannot ask git which groups of .* are committed", evidence.committed_groups, tmp_path)


def test_committed_groups_are_not_known_where_git_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(r"cannot ask git which groups of .* are committed", evidence.committed_groups, tmp_path)


# Which runs speak for a group.


def test_a_group_of_another_task_than_qa_is_judged_by_its_own_runs():
    judging = evidence.judging_runs(committed(), "h100-80gb-hbm3-lm-bench")
    assert set(judging["group"]) == {"h100-80gb-hbm3-lm-bench"}


def test_a_bench_group_is_judged_by_the_runs_of_quality_on_its_hardware():
    every = committed()
    judging = evidence.judging_runs(every, evidence.REFERENCE)
    assert set(judging["spec.preset.name"]) == {"quality"}
    hardware = evidence.REFERENCE.removesuffix("-bench")
    scored_there = every.loc[every["group"] == f"{hardware}-quality", "spec.variant"]
    of_those = judging[judging["spec.variant"].isin(scored_there)]
    assert set(of_those["spec.hardware"]) == {hardware}


def test_a_variant_without_a_score_on_the_card_is_judged_by_the_same_training_on_another():
    every = committed()
    judging = evidence.judging_runs(every, evidence.REFERENCE)
    moved = every.copy()
    is_a4 = moved["group"].eq(judging["group"].iloc[0]) & moved["spec.variant"].eq("A4")
    moved.loc[is_a4, ["group", "spec.hardware"]] = "new"
    scores = evidence.judging_runs(moved, evidence.REFERENCE)
    assert set(scores.loc[scores["spec.variant"] == "A4", "group"]) == {"new"}
    assert "new" not in set(scores.loc[scores["spec.variant"] != "A4", "group"])
    # Another model's score says nothing about this one.
    moved.loc[moved["group"] == "new", "model.revision"] = "other"
    assert "A4" not in set(evidence.judging_runs(moved, evidence.REFERENCE)["spec.variant"])


def test_a_group_with_scores_is_not_judged_by_other_hardware():
    every = committed()
    reference = every[every["group"] == evidence.REFERENCE]
    metric = f"quality.{reference['task.metric'].iloc[0]}"
    scored = reference.assign(**{"group": "new-bench", "spec.hardware": "new", metric: 80.0})
    judging = evidence.judging_runs(pd.concat([every, scored], ignore_index=True), "new-bench")
    assert set(judging["group"]) == {"new-bench"}


def test_a_group_without_scores_is_judged_by_other_hardware():
    every = committed()
    reference = every[every["group"] == evidence.REFERENCE]
    unscored = reference.assign(**{"group": "new-bench", "spec.hardware": "new"})
    judging = evidence.judging_runs(pd.concat([every, unscored], ignore_index=True), "new-bench")
    assert set(judging["spec.preset.name"]) == {"quality"}


def test_a_group_with_scores_is_judged_by_the_runs_of_quality_on_its_hardware(tmp_path):
    make(tmp_path, "A1")
    make(tmp_path, "A1", preset="quality")
    judging = evidence.judging_runs(load_runs(tmp_path), GROUP)
    assert set(judging["group"]) == {"cpu-quality"}


def test_the_nearest_runs_are_of_a_group_whose_baseline_has_run():
    every = committed()
    found = evidence.nearest_runs_at_preset(every, evidence.REFERENCE, "lm-bench")
    assert "L1" in set(found["spec.variant"])
    without_baseline = every[every["spec.variant"] != "L1"]
    assert evidence.nearest_runs_at_preset(without_baseline, evidence.REFERENCE, "lm-bench").empty


def test_runs_at_a_preset_are_no_tries_of_a_search(tmp_path):
    make(tmp_path, "A1")
    runs = load_runs(tmp_path)
    assert len(evidence.runs_at_preset(runs, GROUP, "smoke")) == 1
    tries = runs.assign(**{"spec.search": "tune"})
    assert evidence.runs_at_preset(tries, GROUP, "smoke").empty


# Which runs may be compared.


def test_the_usual_conditions_are_those_of_most_runs_at_any_micro_batch():
    runs = pd.DataFrame({"length": [64, 96, 96, 96], "micro_batch": [8, 8, 16, 32]})
    assert evidence.usual_conditions(runs).index.tolist() == [1, 2, 3]


def runs_on(data, *variants):
    """Runs of variants on some data."""
    return pd.DataFrame({"spec.variant": variants, "data": data, "task.name": "qa", "status": "ok"})


def test_a_group_is_told_by_the_data_of_the_baseline_and_the_recommended_variant():
    old = runs_on("old", "A1", "A2", "A3")
    new = runs_on("new", "A1", RECOMMENDED)
    usual = evidence.usual_conditions(pd.concat([old, new], ignore_index=True))
    assert set(usual["data"]) == {"new"}
    lines = pd.concat([old, new], ignore_index=True).rename(columns={"spec.variant": "variant"})
    assert set(evidence.usual_conditions(lines)["data"]) == {"new"}


def test_of_several_data_with_both_or_of_those_without_them_the_most_runs_tell_a_group():
    with_both = [runs_on("old", "A1", RECOMMENDED, "A2"), runs_on("new", "A1", RECOMMENDED)]
    assert set(evidence.usual_conditions(pd.concat(with_both))["data"]) == {"old"}
    without = [runs_on("old", "A1", "A3"), runs_on("new", RECOMMENDED, "A2", "A4")]
    assert set(evidence.usual_conditions(pd.concat(without))["data"]) == {"new"}


def test_no_other_axis_than_the_data_is_chosen_by_what_ran():
    one = runs_on("d", "A1", RECOMMENDED).assign(world=1)
    two = runs_on("d", "A1", "A2", "A3").assign(world=2)
    assert set(evidence.usual_conditions(pd.concat([one, two]))["world"]) == {2}


def test_what_ran_on_other_data_is_said_with_its_last_day():
    days = {"time.started": "2026-11-23T10:00:00+00:00"}
    old = runs_on("squad", "A1", "A2", "A3").assign(**days)
    new = runs_on("squad-large", "A1", RECOMMENDED).assign(**days)
    said = "Not counted here: 3 runs on other data (squad), the last of 2026-11-23"
    assert evidence.on_other_data(pd.concat([old, new], ignore_index=True)) == said
    assert evidence.on_other_data(new) == ""


def test_runs_that_lack_a_value_of_an_axis_are_alike_in_it():
    runs = pd.DataFrame({"length": [64, math.nan, math.nan], "micro_batch": [8, 8, 16]})
    assert evidence.usual_conditions(runs).index.tolist() == [1, 2]


@pytest.mark.parametrize("choose", [evidence.most_alike, evidence.usual_conditions])
def test_of_as_many_runs_the_first_by_the_axes_are_taken_for_runs_and_lines_alike(choose, tmp_path):
    """The newest would be those of length 64."""
    for length in (32, 64):
        make(tmp_path, "A1", length=length)
    runs = select(load_runs(tmp_path), GROUP)
    assert set(choose(runs)["length"]) == {32}
    assert set(choose(summary.summary(runs))["length"]) == {32}


def test_the_largest_micro_batch_is_of_the_usual_conditions():
    runs = pd.DataFrame({"length": [64, 96, 96], "micro_batch": [64, 8, 16]})
    assert evidence.largest_micro_batch(runs).index.tolist() == [2]


@pytest.mark.parametrize(
    ("cached", "compile_s", "found"),
    [
        (True, 20.0, True),
        (False, 20.0, False),
        (None, 20.0, False),
        (None, 0.9, True),
        (None, 1.0, False),
        (None, None, False),
    ],
)
def test_code_was_found_compiled_by_the_caches_word_or_within_a_second(cached, compile_s, found):
    run = pd.DataFrame({"time.compile_cached": [cached], "time.compile_s": [compile_s]})
    assert evidence.found_compiled(run).tolist() == [found]


def test_a_variant_of_another_day_has_no_timed_run_of_the_baselines_code():
    columns = ["spec.variant", "sitting", "speed.samples_per_s"]
    rows = [
        ("A1", "a", 1.0),
        ("A2", "a", 1.0),
        ("A2", "b", 1.0),
        ("A3", "b", 1.0),
        ("A4", "b", math.nan),
    ]
    runs = pd.DataFrame(rows, columns=columns).assign(**{"task.name": "qa"})
    assert evidence.timed_in_other_sittings(runs) == ["A3"]
    without_baseline = runs[runs["spec.variant"] != "A1"]
    assert evidence.timed_in_other_sittings(without_baseline) == []


def test_versions_of_the_code_are_named_once_and_with_their_changes():
    runs = pd.DataFrame({
        "code.commit": ["b" * 40, "a" * 40, "a" * 40, None, "a" * 40],
        "code.dirty": [False, False, True, None, False],
    })  # fmt: skip
    assert evidence.commits(runs) == "aaaaaaa, aaaaaaa with changes, bbbbbbb, unknown"


def test_commits_between_which_the_code_is_equal_are_one_version():
    runs = pd.DataFrame({
        "code.commit": ["b" * 40, "a" * 40, "c" * 40, "d" * 40],
        "code.dirty": [None, None, None, False],
        "code.digest": ["1" * 64, "1" * 64, "2" * 64, None],
    })  # fmt: skip
    assert evidence.commits(runs) == "aaaaaaa, ccccccc, ddddddd"


def test_runs_are_of_one_code_by_its_digest_and_without_one_by_the_commit(tmp_path):
    codes = [("a", "1"), ("b", "1"), ("b", None), ("b", "2")]
    for seed, (commit, digest) in enumerate(codes):
        code = {"commit": 40 * commit, "dirty": None, "digest": digest and 64 * digest}
        edited(make(tmp_path, "A1", seed) / "record.json", code=code)
    assert evidence.load_runs(tmp_path)["code"].tolist() == [
        64 * "1",
        64 * "1",
        40 * "b",
        64 * "2",
    ]


def test_parallel_variants_and_those_that_train_all_are_known_by_name():
    names = pd.Series(["A1", "P-one-bucket", "B1", "no such variant"])
    assert evidence.is_parallel(names).tolist() == [False, True, False, False]
    assert evidence.trains_all(names).tolist() == [True, True, False, False]


def test_tables_are_in_the_order_of_the_variants_table():
    names = [*VARIANTS]
    table = pd.DataFrame(index=["unknown", names[3], names[0]])
    assert evidence.in_table_order(table).index.tolist() == [names[0], names[3], "unknown"]


# Lines of means.


def test_ratios_are_against_the_baseline_of_the_same_micro_batch(tmp_path):
    for micro_batch, variant, speed in [(8, "A1", 100), (8, "A4", 200), (8, "C2", 80)]:
        make(tmp_path, variant, micro_batch=micro_batch, speed=speed)
    make(tmp_path, "A1", micro_batch=4, speed=400)
    make(tmp_path, "A4", micro_batch=4, speed=500)
    assert lines_of(tmp_path)["ratio"].to_dict() == {"A1": 1.0, "A4": 2.0, "C2": 0.8}
    assert lines_of(tmp_path, micro_batch=4)["ratio"].to_dict() == {"A1": 1.0, "A4": 1.25}


def test_a_line_is_the_mean_over_seeds(tmp_path):
    make(tmp_path, "A1", speed=100.0, f1=95.0)
    make(tmp_path, "A4", speed=200.0, f1=95.0)
    make(tmp_path, "A4", seed=1, speed=300.0, f1=97.0)
    line = lines_of(tmp_path).loc["A4"]
    assert line[["n", "samples_per_s", "score"]].tolist() == [2, 250.0, 96.0]
    assert line["ratio"] == 2.5
    assert line["delta"] == 0.0, "of the seed that the baseline has too"


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory):
    """The lines of A1 and A2 with three seeds, and of A4 with one."""
    runs = tmp_path_factory.mktemp("three_seeds")
    for seed, speed, f1, other_f1 in [(0, 100, 95, 95), (1, 110, 90, 91), (2, 130, 80, 83)]:
        make(runs, "A1", seed, speed=speed, f1=f1)
        make(runs, "A2", seed, speed=2 * speed, f1=other_f1)
    make(runs, "A4")
    return lines_of(runs)


def half_interval(values):
    """Half the 90 % interval of a mean by its textbook formula."""
    n = len(values)
    return student.ppf(0.95, n - 1) * np.std(values, ddof=1) / math.sqrt(n)


def test_an_interval_is_students_of_three_seeds(three_seeds):
    assert three_seeds.loc["A1", "samples_per_s±"] == pytest.approx(half_interval([100, 110, 130]))


def test_one_seed_has_no_interval(three_seeds):
    assert math.isnan(three_seeds.loc["A4", "samples_per_s±"])
    assert math.isnan(three_seeds.loc["A4", "ratio±"])


def test_a_difference_of_scores_and_its_interval_are_over_equal_seeds(three_seeds):
    assert three_seeds.loc["A2", "delta"] == pytest.approx(4 / 3)
    assert three_seeds.loc["A2", "delta±"] == pytest.approx(half_interval([0, 1, 3]))


def test_a_ratio_of_equal_seeds_has_their_interval(three_seeds):
    assert three_seeds.loc["A2", "ratio±"] == pytest.approx(0.0, abs=1e-9)


def test_the_baseline_has_no_interval_against_itself(three_seeds):
    assert three_seeds.loc["A1", ["ratio±", "delta±"]].isna().all()


@pytest.mark.parametrize("status", [None, "error", "oom"])
def test_without_a_baseline_ratios_are_open_and_the_rest_is_shown(tmp_path, status):
    make(tmp_path, "A4", speed=200.0, f1=95.0)
    if status:
        make(tmp_path, "A1", status=status, error={"kind": "E", "message": "boom"})
    line = lines_of(tmp_path).loc["A4"]
    assert math.isnan(line["ratio"])
    assert line["samples_per_s"] == 200.0
    assert line["score"] == 95.0


@pytest.mark.parametrize(
    "other", [{"length": 64}, {"world": 2}, {"precision": "bf16"}, {"model": "small"}]
)
def test_runs_that_differ_in_an_axis_are_other_lines_without_the_baseline(tmp_path, other):
    make(tmp_path, "A1")
    make(tmp_path, "A4", speed=200.0)
    make(tmp_path, "A4", speed=400.0, **other)
    lines = summary.summary(select(load_runs(tmp_path), GROUP)).query("variant == 'A4'")
    assert len(lines) == 2
    assert lines["ratio"].dropna().tolist() == [2.0]


def test_the_price_of_compiling_is_that_of_runs_that_found_nothing_compiled(tmp_path):
    make(tmp_path, "A3")
    change_record(make(tmp_path, "A3", seed=1), time={"compile_s": 0.1})
    line = lines_of(tmp_path).loc["A3"]
    assert line["compile_s"] == 1.5
    assert line["warm_compile_s"] == 0.1


def test_a_resumed_run_has_no_price_and_says_so(tmp_path):
    make(tmp_path, "A4", resumed=100)
    line = lines_of(tmp_path).loc["A4"]
    assert line["note"] == "resumed at step 100, so no time of the whole run"
    assert line[["compile_s", "wall_s"]].isna().all()


def test_compilation_is_made_up_for_after_its_seconds_over_those_saved_a_step(tmp_path):
    make(tmp_path, "A1", speed=100.0)  # 320 ms a step
    make(tmp_path, "A3", speed=200.0)  # 160 ms, after 1.5 s of compilation
    make(tmp_path, "C2", speed=80.0)
    steps = lines_of(tmp_path)["break_even"]
    assert steps["A3"] == pytest.approx(1.5 / 0.16)
    assert steps["C2"] == math.inf


def test_a_compilation_whose_price_is_not_known_is_not_said_to_be_made_up_for_never(tmp_path):
    make(tmp_path, "A1", speed=100.0)
    change_record(make(tmp_path, "C2", speed=80.0), time={"compile_s": 0.3})  # it found some code
    assert math.isnan(lines_of(tmp_path)["break_even"]["C2"])


def test_speeds_of_two_sittings_have_no_ratio(tmp_path):
    for seed in range(3):
        make(tmp_path, "A1", seed)
        make(tmp_path, "A3", seed)
    runs = select(load_runs(tmp_path), GROUP)
    sitting = runs["spec.variant"].map({"A1": "a", "A3": "b"})
    line = summary.summary(runs.assign(sitting=sitting)).set_index("variant").loc["A3"]
    compared = ["ratio", "ratio±", "kernel_ratio", "break_even"]
    assert line[compared].isna().all()
    assert line["samples_per_s"] > 0
    assert line["delta"] == 0.0, "a score is compared by its seed"


def test_ones_own_runs_are_one_sitting_and_archived_ones_that_of_their_code(tmp_path):
    for variant, commit in (("A1", "a" * 40), ("A3", "b" * 40)):
        change_record(make(tmp_path, variant), code={"commit": commit, "digest": None})
    own_runs = load_runs(tmp_path)
    assert own_runs["code"].nunique() == 2
    assert own_runs["sitting"].nunique() == 1
    archived = [Run(run.record, archive="a.jsonl") for run in own_runs["run"]]
    assert evidence.as_frame(archived)["sitting"].tolist() == own_runs["code"].tolist()


def test_mfu_is_of_the_cards_data_sheet(tmp_path):
    make(tmp_path, "A4", machine=H200, peak=20.0)
    runs = load_runs(tmp_path).assign(**{
        "env.gpu": "NVIDIA H200",
        "speed.gemm_utilization": 0.8,
        "speed.gemm_tflops_measured": 989 / 2,
    })  # fmt: skip
    line = summary.summary(select(runs, "h200-smoke")).iloc[0]
    assert line["mfu"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    "path",
    [
        *summary.MEASURES.values(),
        *scaling.MEASURES.values(),
        *curves.MEASURES.values(),
    ],
)
def test_what_is_measured_is_in_the_committed_records(path):
    assert committed()[path].notna().any()


@pytest.mark.parametrize(
    ("variant", "ancestor", "words"),
    [
        ("A1", None, "baseline"),
        ("A2", None, "A1 + attention: sdpa"),
        ("A4", None, "A4-nb + group_by_length: True"),
        ("A4", "A2", "A2 + compile: inductor + padding: longest + group_by_length: True"),
        ("no such variant", None, "–"),
    ],
)
def test_a_change_is_named_against_the_parent_or_an_ancestor(variant, ancestor, words):
    assert summary.change(variant, ancestor) == words


# Tables.


def test_a_variant_that_failed_stands_with_its_reason(tmp_path):
    make(tmp_path, "A1")
    error = {"kind": "skipped", "message": "no backend named 'nvfuser'"}
    make(tmp_path, "D1-nvfuser", status="skipped", error=error)
    table = table_of(tmp_path)
    assert table.loc["D1-nvfuser", "note"] == "skipped: no backend named 'nvfuser'"
    assert table.loc["D1-nvfuser", "samples/s"] == "–"
    assert table.loc["A1", "note"] == "–"


def test_a_seed_that_failed_is_named_beside_one_that_did_not(tmp_path):
    make(tmp_path, "A3")
    error = {"kind": "ValueError", "message": "no luck"}
    make(tmp_path, "A3", seed=1, status="error", error=error)
    table = table_of(tmp_path)
    assert table.loc["A3", "status"] == "1 ok, 1 error"
    assert table.loc["A3", "note"] == "seed 1 error: no luck"


def test_a_table_has_no_column_that_says_nothing(tmp_path):
    make(tmp_path, "A1")
    make(tmp_path, "A2")
    table = table_of(tmp_path)
    assert "samples/s" in table
    assert not {"peak MiB", "status", "note", *AXES.values()} & {*table}


def test_a_table_has_the_columns_that_were_asked_for_in_their_order(tmp_path):
    make(tmp_path, "A1")
    make(tmp_path, "A2", f1=96.0)
    lines = summary.summary(select(load_runs(tmp_path), GROUP))
    table = summary.result_table(lines, ["delta", "variant"])
    assert table.to_dict("list") == {"ΔF1 vs A1": ["+0.00", "+1.00"], "variant": ["A1", "A2"]}


def test_the_page_of_a_group_shows_columns_that_exist():
    known = {column.name for column in summary.columns("F1", "A1")}
    assert {*own.RESULTS, *own.COSTS} <= known


def test_a_column_is_written_by_its_form_and_with_its_interval():
    table = pd.DataFrame({"share": [0.5, 0.25], "share±": [0.125, math.nan], "n": [3, 1]})
    columns = [tables.Column("share", "of all", format.percent), tables.Column("n")]
    rendered = tables.render(table, columns)
    assert rendered.to_dict("list") == {"of all": ["50.0 ± 12.5 %", "25.0 %"], "n": ["3", "1"]}


def test_a_value_without_an_interval_is_written_as_where_no_value_has_one():
    """A column's form need not take what is no number for an interval."""
    table = pd.DataFrame({"mib": [1.0, 2.0, math.nan], "mib±": [0.5, math.nan, math.nan]})
    texts = tables.column_text(table, "mib", lambda value, *half: f"{value} {half}")
    assert texts == ["1.0 (0.5,)", "2.0 ()", "nan ()"]


def test_a_column_may_be_written_without_its_interval():
    table = pd.DataFrame({"mib": [1000.0], "mib±": [10.0]})
    rendered = tables.render(table, [tables.Column("mib", interval=False)])
    assert rendered.to_dict("list") == {"mib": ["1,000"]}


def test_markdown_sets_words_to_the_left_and_numbers_to_the_right():
    table = pd.DataFrame({"variant": ["A1"], "samples/s": ["609 ± 6"], "note": ["a|b\nc"]})
    assert tables.markdown(table).split("\n") == [
        "| variant | samples/s | note |",
        "| --- | ---: | --- |",
        "| A1 | 609\u00a0±\u00a06 | a\\|b↵c |",
    ]


def test_a_table_without_lines_is_a_sentence():
    assert tables.markdown(pd.DataFrame()) == "*Nothing of this table was measured.*"


def test_a_terminals_table_is_aligned_and_cut():
    table = pd.DataFrame(
        {"variant": ["A1", "A4-nb"], "samples/s": ["1", "20"], "note": ["", "x" * 9]}
    )
    assert tables.terminal(table, width=24).split("\n") == [
        "variant  samples/s  note",
        "A1               1",
        "A4-nb           20  xxxx",
    ]


# Text.


@pytest.mark.parametrize(
    ("form", "values", "text"),
    [
        (format.number, [1.234], "1.23"),
        (format.number, [9.995], "10.0"),
        (format.number, [99.95], "100"),
        (format.number, [12345.6], "12,346"),
        (format.number, [12.34, 0.5], "12.3 ± 0.5"),
        (format.number, [0.0123], "0.01"),
        (format.number, [-1234.5, 20.4], "-1,234 ± 20"),
        (format.number, [math.nan], "–"),
        (format.factor, [1.52], "×1.52"),
        (format.factor, [1.412, 0.09], "×1.41 ± 0.09"),
        (format.factor, [math.nan], "–"),
        (format.count, [750], "750"),
        (format.count, [75_300], "75.3 k"),
        (format.count, [999_499], "999 k"),
        (format.count, [109_482_240], "109 M"),
        (format.count, [999_499_999], "999 M"),
        (format.count, [999_500_000], "1 B"),
        (format.count, [1_557_611_200], "1.56 B"),
        (format.count, [math.nan], "–"),
        (format.percent, [0.123], "12.3 %"),
        (format.percent, [0.5, 0.01], "50.0 ± 1.0 %"),
        (format.percent, [math.nan], "–"),
        (format.points, [75.0], "75.00"),
        (format.points, [-1.5, 0.25], "−1.50 ± 0.25"),
        (format.points, [math.nan], "–"),
        (format.gain, [1.5], "+1.50"),
        (format.three_decimals, [0.25], "0.250"),
    ],
)
def test_a_value_is_written_in_the_digits_that_count(form, values, text):
    assert form(*values) == text


# Facts.


def test_published_training_times_agree_with_published_throughput():
    """The reference project trained 3 epochs of 131,754 samples, which agrees within 1 %."""
    theirs = facts.published().dropna(subset=["train_s", "samples_per_s"])
    samples = theirs["samples_per_s"] * theirs["train_s"]
    assert (samples / (131_754 * 3)).between(0.99, 1.01).all()


def test_a_speed_that_was_not_published_follows_from_the_time_of_training():
    theirs = facts.published()
    base, unmeasured = theirs.loc["A1"], theirs.loc["C2-8"]
    expected = base["samples_per_s"] * base["train_s"] / unmeasured["train_s"]
    assert unmeasured["speed"] == pytest.approx(expected)
    assert unmeasured["speed"] < base["speed"]  # which was done sooner


def test_published_ratios_are_to_the_baseline():
    theirs = facts.published()
    assert theirs.loc["A1", ["ratio", "delta"]].tolist() == [1.0, 0.0]


def test_cards_have_what_is_asked_of_them():
    cards = facts.cards()
    assert cards.dropna(subset="card")[["sm", "gib"]].notna().all(axis=None)
    assert cards.dropna(subset="gpu")["tflops"].notna().all()


# Verdicts.


def judged(**scores):
    """Runs of some variants with F1 by seed, at both thresholds."""
    rows = []
    for variant, of_seeds in scores.items():
        for seed, f1 in enumerate(of_seeds):
            rows.append({
                "spec.variant": variant,
                "spec.seed": seed,
                "quality.f1": f1,
                "quality.best_f1": f1,
                "status": "ok",
                "task.name": "qa",
                "group": "h100-80gb-hbm3-quality",
            })  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ([60, 61, 62], "within"),
        ([57, 58, 59.5], "beyond"),
        ([61.9, 62.4, 63], "no worse"),
        ([58, 61.5, 64], "open"),
        ([60], "open"),
    ],
)
def test_a_variant_is_equal_where_its_whole_interval_lies_within_the_margin(scores, verdict):
    runs = judged(A1=[60, 61, 62], A2=[60, 61, 62], A3=scores)
    assert stats.equivalence(runs).loc["A3", "verdict"] == verdict


@pytest.mark.parametrize(
    ("difference", "verdict"),
    [
        ((0.0, 0.75), "within"),
        ((0.5, 0.5), "no worse"),
        ((-0.5, 0.5), "open"),
        ((-1.5, 0.5), "open"),
        ((-1.75, 0.5), "beyond"),
    ],
)
def test_an_interval_that_ends_at_the_margin_does_not_lie_within_it_nor_beyond(difference, verdict):
    assert stats.MARGIN == 1.0
    assert stats.verdict(difference) == verdict


def test_a_verdict_is_the_worse_of_both_thresholds():
    runs = judged(A1=[60, 61, 62], A2=[60, 61, 62])
    runs.loc[runs["spec.variant"] == "A2", "quality.best_f1"] -= 5
    assert stats.equivalence(runs).loc["A2", "verdict"] == "beyond"


def test_a_variant_with_a_fault_in_its_scoring_gets_no_verdict():
    runs = judged(A1=[60, 61, 62], A2=[60, 61, 62], **{"A4-b": [20, 21, 22]})
    assert stats.equivalence(runs).index.tolist() == ["A2"]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (judged(A1=[60, 61], A2=[60, 61]), "hbm3-quality shares three seeds"),
        (judged(A2=[60, 61, 62]), "A1 has no F1"),
        (judged(A1=[60, 61]).assign(**{"task.name": "lm"}), "no margin of this task's score"),
    ],
)
def test_there_is_no_verdict_without_three_seeds_of_both_and_a_margin(runs, said):
    refused(said, stats.equivalence, runs)


def test_two_variants_are_compared_over_the_seeds_of_both():
    runs = judged(A2=[60, 61, 62], A3=[61, 63])
    mean, half = stats.compare(runs, "A3", "A2")
    assert mean == 1.5
    assert math.isnan(half)


def test_variants_without_a_seed_in_common_are_not_compared():
    with pytest.raises(NotMeasured, match="no seed has the score of both A3 and A2"):
        stats.compare(judged(A2=[60]), "A3", "A2")


@pytest.mark.parametrize(
    ("difference", "sign"),
    [
        ((1.0, 0.5), stats.HOLDS),
        ((1.0, 1.5), stats.OPEN),
        ((0.5, 0.5), stats.OPEN),  # which begins at a bound
        ((-0.5, 0.5), stats.OPEN),  # which ends there
        ((1.5, 0.5), stats.OPEN),
        ((2.5, 0.5), stats.OPEN),
        ((3.0, 0.5), stats.FAILS),
        ((-1.0, 0.5), stats.FAILS),
        ((1.0, math.nan), stats.OPEN),
    ],
)
def test_a_claim_holds_where_the_whole_interval_lies_between_its_bounds(difference, sign):
    assert stats.between(difference, low=0, high=2) == sign


def test_scores_of_one_seed_at_several_micro_batches_are_averaged():
    runs = pd.concat([judged(A1=[60, 70]), judged(A1=[62])])
    assert stats.by_seed(runs)["A1"].tolist() == [61.0, 70.0]


# Numbers and words of a line, each by itself.


def test_a_run_whose_record_has_no_stages_has_one():
    every = committed()
    has_none = every["spec.stages"].isna()
    assert has_none.any()
    assert every.loc[has_none, "stages"].eq(1).all()


@pytest.fixture(scope="module")
def many_kinds(tmp_path_factory):
    """The lines of runs on an H200, by variant.

    The baseline lacks a seed of A2; A3 found code compiled; A4 failed and B1 was killed.
    """
    runs = tmp_path_factory.mktemp("many_kinds")
    for seed in range(4):
        make(runs, "A2", seed)
    for seed in (1, 2, 3):
        make(runs, "A1", seed)
    for seed, compile_s in enumerate((0.1, 0.5, 0.3)):
        change_record(make(runs, "A3", seed), time={"compile_s": compile_s})
    make(runs, "A1-fp32")
    make(runs, "A4", status="error", error={"kind": "E", "message": "no luck " * 50})
    make(runs, "B1", status="killed")
    columns = {
        "env.gpu": "NVIDIA H200",
        "speed.gemm_utilization": 0.8,
        "speed.gemm_tflops_measured": 98.9,
    }
    loaded = load_runs(runs).assign(**columns)
    return summary.summary(select(loaded, GROUP)).set_index("variant")


def test_a_ratio_to_a_baseline_that_lacks_a_seed_has_no_interval(many_kinds):
    assert math.isnan(many_kinds.loc["A2", "ratio±"])
    assert many_kinds.loc["A2", "delta±"] == 0.0


def test_of_runs_that_found_code_compiled_the_longest_compilation_counts(many_kinds):
    assert many_kinds.loc["A3", "warm_compile_s"] == 0.5
    assert math.isnan(many_kinds.loc["A3", "compile_s"])


def test_a_run_in_fp32_has_no_mfu(many_kinds):
    assert math.isnan(many_kinds.loc["A1-fp32", "mfu"])
    assert many_kinds.loc["A2", "mfu"] == pytest.approx(0.08)


def test_a_long_reason_is_cut(many_kinds):
    note = many_kinds.loc["A4", "note"]
    assert note.startswith("error: no luck no luck")
    assert note.endswith(" …")
    assert len(note) <= summary.NOTE_LETTERS


def test_a_run_that_ended_without_a_reason_is_not_finished(many_kinds):
    assert many_kinds.loc["B1", "note"] == "killed: not finished"


@pytest.mark.parametrize(
    ("variant", "ancestor", "words"),
    [
        ("L1", None, "baseline (A1 + precision: fp32)"),
        # What it sets last counts, and what it sets back does not.
        (
            "E-masters",
            "E-packed",
            "E-packed + optimizer: adamw-master + cuda_graph: True + precision: bf16",
        ),
        ("E-masters-eager", "E-adamw", "E-adamw + precision: bf16 + optimizer: adamw-master"),
    ],
)
def test_a_change_over_several_variants_is_what_is_left_of_it(variant, ancestor, words):
    assert summary.change(variant, ancestor) == words


@pytest.fixture
def line(three_seeds):
    """A line in which each measured value is another one."""
    values = {
        "samples_per_s": 11.0,
        "tokens_per_s": 12.0,
        "ratio": 1.3,
        "step_ms": 20.0,
        "step_p10_ms": 18.0,
        "step_p90_ms": 25.0,
        "data_ms": 5.0,
        "busy": 0.95,
        "gemm_utilization": 0.6,
        "mfu": 0.4,
        "peak_mib": 2000.0,
        "joules": 0.7,
        "score": 81.0,
        "delta": -0.5,
        "trainable": 75_300.0,
        "compile_s": 31.0,
        "break_even": math.inf,
        "wall_s": 90.0,
    }
    one = three_seeds.reset_index()[:1]
    without = {name: math.nan for name in one if name.endswith("±")}
    return one.assign(**values, **without)


def test_each_value_stands_under_its_heading(line):
    (row,) = summary.result_table(line).to_dict("records")
    del row["what it changes"]
    assert row == {
        "variant": "A1",
        "n": "3",
        "samples/s": "11.0",
        "× A1": "1.30",
        "step ms [p10–p90]": "20.0 [18.0–25.0]",
        "waits for data, at most": "25.0 %",
        "GPU busy": "95.0 %",
        "GEMM utilization": "60.0 %",
        "MFU": "40.0 %",
        "peak MiB": "2,000",
        "J/sample": "0.70",
        "F1": "81.00",
        "ΔF1 vs A1": "−0.50",
        "trainable": "75.3 k",
        "compile s": "31.0",
        "break-even step": "never",
        "wall s": "90.0",
    }


def test_an_axis_is_shown_where_some_lines_have_no_value_of_it(line):
    lines = pd.concat([line.assign(length=384.0), line.assign(length=math.nan)])
    assert evidence.AXES["length"] in summary.result_table(lines)
    assert evidence.AXES["length"] not in summary.result_table(line.assign(length=384.0))


def test_tokens_a_second_are_shown_of_a_language_model_alone(line):
    of_language = line.assign(**{"task.name": "lm"})
    assert summary.result_table(of_language)["tokens/s"].item() == "12.0"


def test_a_count_from_1000_on_is_in_thousands():
    assert format.count(999) == "999"
    assert format.count(1_000) == "1 k"
    assert format.count(999_500) == "1 M"


def test_what_is_missing_is_a_dash_and_a_column_of_dashes_is_left_out():
    table = pd.DataFrame({"a": ["x", None], "b": ["–", None]})
    assert tables.compact(table).to_dict("list") == {"a": ["x", "–"]}


def test_published_differences_are_a_variants_less_the_baselines():
    theirs = facts.published()
    assert theirs.loc["A4-nb", "delta"] == pytest.approx(0.61)
    assert theirs.loc["A4-nb", "ratio"] == pytest.approx(51.59 / 43.91)
    assert theirs.loc["A3", "peak_mib"] == 3087.0


# Choices among runs, of columns alone.


def test_a_verdict_takes_scores_at_both_thresholds():
    runs = judged(A1=[60, 61, 62], A2=[60, 61, 62], A3=[60, 61, 62])
    runs.loc[runs["spec.variant"] == "A3", "quality.best_f1"] = math.nan
    assert stats.equivalence(runs).index.tolist() == ["A2"]


def test_a_score_of_a_run_that_did_not_end_ok_does_not_count():
    runs = judged(A1=[60, 61], A2=[60, 61])
    runs.loc[runs.index[-1], "status"] = "killed"
    assert stats.by_seed(runs)["A2"].isna().tolist() == [False, True]


def chosen_elsewhere(monkeypatch, *rows):
    """The group of the runs at preset `lm-bench` that are nearest to a group of no such hardware.

    Each row is (group, variant, hardware).
    """
    monkeypatch.setattr(evidence, "select", lambda runs, group: pd.DataFrame({"group": [group]}))
    runs = pd.DataFrame(rows, columns=["group", "spec.variant", "spec.hardware"])
    runs = runs.assign(**{"spec.preset.name": "lm-bench", "spec.search": ""})
    return evidence.nearest_runs_at_preset(runs, "new", "lm-bench")["group"].tolist()


def test_elsewhere_the_group_with_the_most_runs_is_nearest(monkeypatch):
    rows = [("x", "L1", "x"), *[("y", "L1", "y")] * 2, *[("z", "L-bf16", "z")] * 3]
    assert chosen_elsewhere(monkeypatch, *rows) == ["y"], "z has no baseline"


def test_a_groups_own_runs_are_nearest_even_without_a_baseline(monkeypatch):
    rows = [("new", "L-bf16", "new"), *[("y", "L1", "y")] * 2]
    assert chosen_elsewhere(monkeypatch, *rows) == ["new"]
