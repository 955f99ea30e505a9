"""Equivalence, claims, projections and tries from made-up runs whose answers are known."""

import math

import pandas as pd
import pytest

from qa_lib.record import RecordError
from qa_lib.report import claims, text
from qa_lib.report import quality as judge
from qa_lib.report.claims import FAILS, HOLDS, OPEN, Facts
from qa_lib.report.runs import NotMeasured, load_runs, measured_apart
from qa_lib.report.sentences import equivalence_finding
from qa_lib.variants import VARIANTS, find_recipe
from tests import several

AXES = {"model": "tiny 1", "world": 1, "precision": "own", "length": 384, "micro_batch": 32}
QA = {"task.name": "qa", "task.metric": "f1", "task.label": "F1", "task.higher_is_better": True}


def quality(**f1):
    """Runs of rows ('A4_b' is A4-b) with these F1, one a seed; the score at the best threshold is 5 higher."""
    rows = [(name.replace("_", "-"), seed, value) for name, values in f1.items() for seed, value in enumerate(values)]
    frame = pd.DataFrame(rows, columns=["spec.variant", "spec.seed", "quality.f1"]).assign(
        status="ok", group="h-quality", **AXES, **QA
    )
    for name in ("exact", "best_f1", "has_answer_f1", "no_answer_f1", "always_null_f1"):
        frame[f"quality.{name}"] = frame["quality.f1"] + 5 * (name == "best_f1")
    return frame


def bench(**speeds):
    """Lines of a bench group: features/s of each row at micro-batches 8 and 32, and 1,000 MiB but for PEFT rows."""
    rows = [
        {"variant": name.replace("_", "-"), "micro_batch": size, "samples_per_s": speed, "compile_s": 30.0,
         "warm_compile_s": None, "peak_mib": 500.0 if name.startswith("EB") else 1000.0} | QA
        for name, speed in speeds.items() for size in (8, 32)
    ]  # fmt: skip
    return pd.DataFrame(rows)


NO_VRAM = pd.DataFrame(columns=["spec.variant", "micro_batch", "memory.peak_alloc_mib"])
NO_TRIES = pd.DataFrame(columns=["spec.variant", "spec.seed"])


def test_a_difference_is_the_mean_over_equal_seeds():
    # Seeds differ by 10, which says nothing about rows; A1's fourth has no partner.
    runs = quality(A1=(50.0, 60.0, 70.0, 99.0), A2=(51.1, 60.9, 71.0))
    delta, half = judge.compare(runs, "A2")
    assert delta == pytest.approx(1.0)
    assert half == pytest.approx(2.919986 * 0.1 / math.sqrt(3)), "of 1.1, 0.9 and 1.0 by Student's t at 2 degrees"


def test_a_seed_counts_once_however_many_micro_batches_it_ran_at():
    runs = quality(A1=(50.0, 60.0, 70.0), A2=(51.1, 60.9, 71.0))
    assert judge.compare(pd.concat([runs, runs]), "A2") == pytest.approx(judge.compare(runs, "A2"))


def test_fewer_than_three_seeds_give_a_difference_without_an_interval():
    runs = quality(A1=(50.0, 60.0, 70.0), B1=(48.0,))
    delta, half = judge.compare(runs, "B1")
    assert delta == -2.0 and math.isnan(half), "the mean of A1 is 12 above B1"
    assert judge.verdict((delta, half)) == "open"
    with pytest.raises(NotMeasured, match="E-masters-lora-qv has no F1"):
        judge.compare(runs, "E-masters-lora-qv")
    with pytest.raises(NotMeasured, match="no seed in common"):
        judge.compare(runs.assign(**{"spec.seed": range(4)}), "B1")


@pytest.mark.parametrize("f1", [{"A1": (50.0,)}, {"A1": (50.0, 52.0), "A2": (50.0, 52.0), "A3": (50.0, 52.0)}])
def test_too_few_runs_tell_no_spread(f1):
    with pytest.raises(NotMeasured, match="three seeds"):
        judge.equivalence(quality(**f1))


@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ((0.2, 0.7), "within"),
        ((0.2, 0.9), "no worse"),
        ((-0.2, 0.9), "open"),
        ((0.0, 3.0), "open"),
        ((-3.0, 1.5), "beyond"),
        ((1.5, 0.4), "no worse"),
        ((1.5, 0.6), "no worse"),
    ],
)
def test_no_difference_found_is_not_equality_shown(difference, told):
    assert judge.verdict(difference) == told


def test_a_model_that_never_answers_is_not_as_good_as_one_that_does():
    runs = quality(A1=(60.0, 60.2, 60.1), A2=(60.1, 60.0, 60.2), A3=(60.0, 60.1, 60.2))
    runs.loc[runs["spec.variant"] == "A3", "quality.best_f1"] = 60.1  # threshold 0 by chance, and nothing to gain
    found = judge.equivalence(runs)
    assert list(found["verdict"]) == ["within", "beyond"]
    assert "lose less" not in equivalence_finding(runs)
    better = quality(A1=(60.0, 60.2, 60.1), A2=(61.0, 61.3, 60.9))
    found = judge.equivalence(better)
    assert list(found["verdict"]) == ["no worse"]
    assert (
        "no row yet; shown to lose less than that, and perhaps better: A2; worse at one or both: none"
        in equivalence_finding(better)
    )


def test_rows_are_judged_against_the_baseline_and_shown_in_table_order():
    runs = quality(
        E-packed=(60.1, 60.0, 59.9), A4_b=(1.0, 9.0, 5.0), A1=(60.0, 60.2, 59.8), A2=(60.5,), B2=(20.0, 20.1, 20.2),
        A0=(90.0, 90.0), A3=(60.0, 60.1, 59.9), B1=(58.0, 62.0, 60.0), B3=(30.0, 34.0, 28.0),
    )  # fmt: skip
    found = judge.equivalence(runs)
    assert list(found["variant"]) == [name for name in VARIANTS if name in set(runs["spec.variant"]) - {"A1", "A4-b"}]
    assert dict(zip(found["variant"], found["verdict"], strict=True)) == {
        "A0": "open",
        "A2": "open",
        "A3": "within",
        "B1": "open",
        "B2": "beyond",
        "B3": "beyond",
        "E-packed": "within",
    }
    said = "90 % interval over 3 seeds: A3, E-packed; cannot be told: B1; worse at one or both: B2, B3"
    assert said in equivalence_finding(runs)
    table = judge.equivalence_table(runs).set_index("row")
    told = ["–", "–", "?", "?", "✓", "–", "?", "✗", "✗", "✓"]
    assert list(table["within 1 F1"]) == told and table.loc["A2", "ΔF1 vs A1"] == "+0.50"
    assert table.index[0] == "never answers"
    assert table.loc["E-packed", "F1 at best threshold"] == "65.00"
    without = quality(A2=(60.0, 60.2, 59.8), A3=(60.0, 60.1, 59.8), A4=(60.0, 60.2, 59.9))
    with pytest.raises(NotMeasured, match="A1 has no F1"):
        judge.equivalence(without)


def test_a_projection_shows_its_arithmetic():
    table = judge.projection(bench(A1=100.0, E_best=500.0)).set_index("row")
    seconds = 131_754 * 3 / 500 + 30
    assert table.loc["E-dropout", "arithmetic"] == "131,754 × 3 ÷ 500/s + 30.0 s"
    assert table.loc["E-dropout", "minutes"] == text.number(seconds / 60)
    assert table.loc["E-dropout", "of A1's time"] == text.share(seconds / (131_754 * 3 / 100))
    unknown = bench(A1=100.0, E_best=500.0).assign(compile_s=None)
    said = judge.projection(unknown).set_index("row")["arithmetic"]
    assert said["E-dropout"].endswith("÷ 500/s + compilation, not measured") and said["A1"].endswith("÷ 100/s")
    warm = judge.projection(unknown.assign(warm_compile_s=9.0)).set_index("row")
    assert warm.loc["E-dropout", "arithmetic"].endswith("÷ 500/s + 9.00 s, a part of the code from a cache")
    assert warm.loc["E-dropout", "minutes"] == text.number((seconds - 21) / 60)
    assert list(judge.projected(unknown.assign(warm_compile_s=9.0))["cold"]) == [True, False]
    with pytest.raises(NotMeasured):
        judge.projection(bench(E-packed=1.0))


def test_only_runs_that_were_alone_on_the_gpu_have_a_time_to_quality():
    runs = quality(A1=(50.0, 51.0), A4=(50.0,)).assign(**{
        "time.eval_s": [None, 4.0, 4.0], "time.resumed_from_step": [None, None, 7.0], "time.prepare_s": 2.0,
        "time.compile_s": None, "time.compile_cached": None, "time.train_s": 20.0, "time.wall_s": 26.0,
    })  # fmt: skip
    (line,) = judge.time_to_quality(runs).to_dict("records")
    told = ("row", "train, s", "compile, s", "in all but imports, s", "F1 of this run")
    assert [line[name] for name in told] == ["A1", "20.0", "0.00", "26.0", "51.00"]


def test_tries_that_lost_are_kept_and_the_best_stands_first():
    runs = quality(A1=(50.0, 52.0), B1_all=(40.0,)).assign(**{
        "spec.settings.trainable": ["all", "all", "lora-all"], "spec.preset.learning_rate": [1e-4, 2e-4, 2e-4],
        "time.started": "2026-01-02",
    })  # fmt: skip
    again = runs[:1].assign(**{"spec.seed": 1, "quality.f1": 51.0, "quality.best_f1": 56.0})
    table = judge.tries_table(pd.concat([runs, again]), quality(A1=(54.0,)))
    assert list(table["learning rate"]) == ["0.0002", "0.0001", f"{2e-4 * find_recipe('lora-all').lr_factor:g}"]
    assert list(table["F1"]) == ["52.00", "50.50", "40.00"], "means over seeds"
    assert list(table["F1 at best threshold"]) == ["57.00", "55.50", "45.00"]
    # Seed 0 of the baseline at the default rate is among the runs for quality, seed 1 among the tries.
    assert list(table["ΔF1 vs A1"]) == ["+0.00", "−2.50", "−14.00"] and table["seeds"][1] == "0 · 1"
    assert list(judge.tries_table(runs, quality())["ΔF1 vs A1"]) == ["+0.00", "–", "–"], "no seed in common"
    older = runs.assign(**{"quality.f1": 1.0, "time.started": "2026-01-01"})
    near = runs[:1].assign(**{"spec.preset.learning_rate": 1.04e-4})
    table = judge.tries_table(pd.concat([older, runs, near]), quality(A1=(54.0,)))
    assert sorted(table["F1"]) == ["40.00", "50.00", "50.00", "52.00"], "the newest counts, and each rate is a point"
    with pytest.raises(NotMeasured):
        judge.tries_table(runs.assign(**{"quality.f1": None}), quality())


def verdicts(*facts):
    """{(claim, part of it): verdict}"""
    table = claims.claims_table(Facts(*facts))
    claim = table["claim of the seeds"].where(table["claim of the seeds"] != "").ffill()
    return dict(zip(zip(claim, table["of it"], strict=True), table["holds"], strict=True))


def test_every_claim_gets_a_verdict_that_follows_the_records():
    speeds = {name.replace("-", "_"): 100.0 for name in VARIANTS} | {"A4": 150.0, "E_best": 300.0, "E-masters-lora-qv": 310.0,
              "EB1_all": 200.0, "E-masters": 300.0, "E-dropout-bitfit": 400.0, "E-dropout-freeze": 900.0, "D1": 80.0}  # fmt: skip
    alike = dict.fromkeys(("A1", "A4", "C1", "D1"), (60.0, 60.2, 60.1)) | dict.fromkeys(
        ("A3", "B1_all", "C2"), (60.1, 60.0, 60.2)
    )
    runs = quality(**alike, B1=(38.0, 38.2, 38.1), B2=(41.0, 41.2, 41.1), A4_b=(25.0, 25.2, 25.1))
    runs["quality.always_null_f1"] = 34.0  # of which the baseline has 65.1 at the best threshold
    told = verdicts(bench(**speeds), runs, NO_VRAM, NO_TRIES)
    parts = {part: found for (_, part), found in told.items()}
    assert {claim for claim, _ in told} == set(claims.CLAIMS.values())
    assert parts["faster by 17 % at both"] == HOLDS and parts["better F1"] == OPEN, "equal is no better"
    assert parts["LoRA as they set it loses more than 2"] == parts["LoRA as they set it loses about 22"] == HOLDS
    assert parts["LoRA on every layer loses more than 2"] == FAILS and parts["BitFit loses more than 2"] == HOLDS
    assert parts["speed, LoRA on query and value"] == HOLDS and parts["speed, LoRA on every linear layer"] == FAILS
    assert parts["a wrong join suffices"] == HOLDS
    floor = verdicts(bench(**speeds), runs.assign(**{"quality.always_null_f1": 60.0}), NO_VRAM, NO_TRIES)
    about = [found for (_, part), found in floor.items() if "loses about" in part]
    assert about == [OPEN, OPEN], "there was not so much to lose"
    backends = "aot_eager equals Inductor"
    assert told[backends, "at least 95 % of the speed"] == FAILS and told[backends, "within 1 F1"] == HOLDS
    adam = "8-bit AdamW keeps accuracy at 20 % less memory"
    assert told[adam, "all of it"] == OPEN, "no run at scale vram"
    vram = pd.DataFrame([("A3", 8, 1000.0), ("C1", 8, 800.0), ("C2", 8, 640.0)], columns=list(NO_VRAM))
    slower = bench(**speeds).assign(peak_mib=lambda lines: lines["variant"].map({"C2": 600.0}).fillna(1000.0))
    told = verdicts(slower, runs, vram, NO_TRIES)
    assert told[adam, "at least 15 % less memory, by their protocol"] == told[adam, "within 1 F1"] == HOLDS
    checkpointing = [found for (claim, _), found in told.items() if claim.startswith("Gradient checkpointing")]
    assert checkpointing == [HOLDS, HOLDS, FAILS]


def test_a_row_is_not_judged_on_the_seeds_by_which_it_was_chosen():
    runs = quality(A1=(60.0, 60.0, 60.0, 60.0, 60.0), B1_all=(66.0, 66.0, 57.0, 57.1, 57.2))
    tries = pd.DataFrame([("B1-all", 0), ("B1-all", 1), ("A1", 2)], columns=list(NO_TRIES))
    facts = Facts(bench(A1=1.0), runs, NO_VRAM, tries)
    assert facts.f1("B1-all")[0] == pytest.approx(0.66) and facts.fresh("B1-all")[0] == pytest.approx(-2.9)


@pytest.mark.parametrize(
    ("difference", "told"),
    [((-0.4, 0.6), FAILS), ((-1.5, 0.7), HOLDS), ((-1.5, 2.0), OPEN), ((-4.0, 1.0), FAILS), ((math.nan,) * 2, OPEN)],
)
def test_a_loss_is_shown_where_its_size_is_in_the_interval_and_none_is_not(difference, told):
    assert claims.costs(difference, 2) == told


def test_a_claim_without_records_cannot_be_told():
    nothing = bench(A1=1.0), quality(), NO_VRAM, NO_TRIES
    assert set(verdicts(*nothing).values()) == {OPEN}
    reasons = claims.reasons_table(Facts(*nothing))
    assert list(reasons["claim of the seeds"]) == list(claims.CLAIMS.values())
    assert "Not measured: A4 has no measured speed at micro-batch 8." in set(reasons["why"])


def test_losses_stand_beside_those_of_the_row_before(tmp_path):
    for variant, seed, loss in (("A1", 0, 2.0), ("A1", 1, 3.0), ("A2", 0, 2.5), ("A2", 1, 2.7), ("A3", 2, 1.0)):
        log = [{"step": step, "loss": loss + step / 1000} for step in range(1, judge.COMPARED + 11)]
        several.write(tmp_path, variant, "bench", seed, micro_batch=32, log=log)
    several.write(tmp_path, "C1", "bench", micro_batch=32, log=[{"step": 1, "loss": 2.0}])  # too short to compare
    several.write(tmp_path, "B1", "bench", micro_batch=32)  # without a log
    runs = load_runs(tmp_path)
    (line,) = judge.losses_table(runs).to_dict("records")
    assert (line["row"], line["made from"], line["n"]) == ("A2", "A1", "2"), "A3's seed ran for no row before it"
    mean = (judge.COMPARED + 1) / 2000
    assert (line["mean loss"], line["mean loss before"]) == (f"{2.6 + mean:.4f}", f"{2.5 + mean:.4f}")
    assert line["mean difference of a step"] == "0.4000", "of 0.5 and 0.3, whatever their signs"
    with pytest.raises(NotMeasured, match="no row has a log of 200 steps"):
        judge.losses_table(runs[runs["spec.variant"] != "A1"])


def test_rows_of_another_day_than_the_baseline_are_named(tmp_path):
    for variant, code in (("A1", "a" * 40), ("A2", "a" * 40), ("A3", "b" * 40), ("C1", "b" * 40)):
        several.write(tmp_path, variant, "bench", micro_batch=32, **{"speed.samples_per_s": 9.0, "code.commit": code})
    several.write(tmp_path, "C1", "bench", 1, micro_batch=32, **{"speed.samples_per_s": 9.0, "code.commit": "a" * 40})
    several.write(tmp_path, "C2", "bench", micro_batch=32, **{"code.commit": "b" * 40})  # has no speed to compare
    runs = load_runs(tmp_path)
    assert measured_apart(runs) == ["A3"]
    assert measured_apart(runs[runs["spec.variant"] != "A1"]) == []


@pytest.mark.parametrize("log", ['{"step": 1, "loss": 2.0}\n{"step"', '{"step": 1}\n', "[1]\n"])
def test_a_broken_log_is_named(tmp_path, log):
    folder = several.write(tmp_path, "A1", "bench", micro_batch=32)
    (folder / "steps.jsonl").write_text(log)
    with pytest.raises(RecordError, match=r"A1-s0-\w+/steps.jsonl: not readable as a log of steps"):
        judge.losses_table(load_runs(tmp_path))
