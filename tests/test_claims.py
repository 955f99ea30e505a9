"""The reference project's claims: a verdict follows from the records and the bounds alone."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest

from qa_lib.lab.report import claims, evidence, facts
from qa_lib.lab.report.claims import CANNOT_TELL, Found
from qa_lib.lab.report.evidence import load_runs
from qa_lib.lab.report.stats import BEST_F1, FAILS, HOLDS, OPEN
from qa_lib.spec.variants import RECOMMENDED
from tests.material import committed
from tests.report_runs import make
from tests.tiny import H200

GROUP = evidence.REFERENCE


@pytest.fixture
def measured(tmp_path):
    """Return what is measured of runs of preset bench, each (variant, speed, seed, micro-batch)."""

    def measure(*runs):
        for variant, speed, seed, size in runs:
            make(
                tmp_path,
                variant,
                seed,
                machine=H200,
                preset="bench",
                micro_batch=size,
                speed=speed,
            )
        every = load_runs(tmp_path)
        return claims.Measured(every, every["group"].iloc[0])

    return measure


@pytest.fixture(scope="module")
def tables():
    """The two tables of the committed records."""
    every = committed()
    return claims.claims_table(every, GROUP), claims.numbers_table(every, GROUP)


@pytest.mark.parametrize(
    ("signs", "sign"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, OPEN], OPEN),
        ([FAILS, CANNOT_TELL], FAILS),
        ([HOLDS, CANNOT_TELL], OPEN),
        ([CANNOT_TELL, CANNOT_TELL], CANNOT_TELL),
    ],
)
def test_a_claim_fails_where_one_part_does_though_another_was_not_measured(signs, sign):
    assert claims.all_of(signs) == sign


def test_a_speed_at_one_size_refutes_a_claim_about_both(measured):
    found = claims.faster(
        measured(("A3", 100.0, 0, 32), ("D1", 88.0, 0, 32)), ["D1"], "A3", 0.95, sizes=(8, 32)
    )
    assert found == Found("D1 at 8: not measured; at 32: ×0.88 of A3", FAILS)


def test_a_speed_that_was_not_measured_tells_nothing(measured):
    found = claims.faster(measured(("A3", 100.0, 0, 32)), ["D1"], "A3", 0.95)
    assert found == Found("not timed together on this card", CANNOT_TELL)


def test_speeds_of_two_sittings_have_no_ratio_and_their_memory_has_one(measured):
    both = measured(("A1", 100.0, 0, 32), ("A2", 140.0, 0, 32))
    assert both.ratio("A2", "A1")[0] == pytest.approx(1.4)
    both.bench["sitting"] = both.bench["spec.variant"]
    assert math.isnan(both.ratio("A2", "A1")[0])
    assert both.ratio("A2", "A1", column="time.wall_s")[0] > 0


def test_a_ratio_of_three_equal_seeds_has_an_interval(measured):
    runs = [("A1", 100.0, seed, 32) for seed in range(3)]
    runs += [("A2", 140.0 + seed, seed, 32) for seed in range(3)]
    value, half = measured(*runs).ratio("A2", "A1")
    assert value == pytest.approx(1.41)
    assert half == pytest.approx(2.92 * 0.01 / math.sqrt(3), rel=1e-3)


def test_a_ratio_whose_parent_lacks_a_seed_has_no_interval(measured):
    runs = [("A1", 100.0, 0, 32)] + [("A2", 140.0, seed, 32) for seed in range(3)]
    assert math.isnan(measured(*runs).ratio("A2", "A1")[1])


@pytest.mark.parametrize(
    ("speed", "sign"), [(106.0, HOLDS), (96.0, HOLDS), (80.0, FAILS), (120.0, FAILS)]
)
def test_a_published_ratio_of_speeds_agrees_within_ten_percent(measured, speed, sign):
    ratio = measured(("A1", 100.0, 0, 32), ("A3", speed, 0, 32)).ratio("A3", "A1")
    assert claims._near(ratio, 1.03).sign == sign


@pytest.mark.parametrize(
    ("cost", "sign"),
    [
        ((-2.1, 0.5), HOLDS),
        ((-0.4, 0.3), FAILS),
        ((-1.5, 1.9), OPEN),
        ((math.nan, math.nan), CANNOT_TELL),
    ],
)
def test_two_points_are_lost_where_a_loss_is_shown_that_may_be_two(cost, sign):
    assert claims._costs_two(cost) == sign


@pytest.mark.parametrize(
    ("ratios", "text", "sign"),
    [
        ({"C1": 0.8}, "C1 −20 %", HOLDS),
        ({"C1": 0.9}, "C1 −10 %", FAILS),
        ({"C1": 0.8, "C2": math.nan}, "C1 −20 %, C2 not measured", OPEN),
        ({"C2": math.nan}, "not measured on this card", CANNOT_TELL),
        ({"C2": 1.25}, "C2 +25 %", FAILS),
    ],
)
def test_memory_is_told_by_how_much_a_variant_takes_less_or_more(ratios, text, sign):
    assert claims.leaner(ratios, 0.85) == Found(text, sign)


@pytest.mark.parametrize(("room", "sign"), [(18.5, HOLDS), (17.5, CANNOT_TELL)])
def test_a_loss_can_be_told_where_never_answering_loses_the_least_of_it(room, sign):
    """Theirs is 22 points, and 4 more or fewer agree with it."""
    measured = SimpleNamespace(room=lambda _: room, difference=lambda *_: (-20.0, 1.0))
    assert claims.f1_falls_about(measured, "B1", -22, 4).sign == sign


@pytest.mark.parametrize(("room", "sign"), [(21.2, HOLDS), (20.8, CANNOT_TELL)])
def test_a_published_loss_can_be_told_where_never_answering_loses_the_least_of_it(room, sign):
    measured = SimpleNamespace(room=lambda _: room, difference=lambda *_: (-22.0, 0.5))
    assert claims._as_theirs(measured, "B1", -22, "quality.f1").sign == sign


def test_a_score_without_an_interval_is_open_and_one_that_was_not_measured_cannot_be_told():
    assert claims.judge_by_interval((0.0, math.nan), -1, 1) == OPEN
    assert claims.judge_by_interval((math.nan, math.nan), -1, 1) == CANNOT_TELL
    assert claims.judge_by_value(0.0, -1, 1) == HOLDS


def timed(variants, steps):
    """What is measured of runs at micro-batch 32, each of a variant with so many timed steps."""
    bench = pd.DataFrame({
        "micro_batch": 32,
        "spec.variant": variants,
        "speed.samples_per_s": [100.0 + number for number in range(len(variants))],
        "time.step_ms.n": steps,
    })  # fmt: skip
    return SimpleNamespace(bench=bench)


@pytest.mark.parametrize(
    ("steps", "text", "sign"),
    [
        ([600, 500, 700], "500 to 700 steps; mean of 3 runs of A1 ± ", HOLDS),
        ([600, 600, 499], "499 to 600 steps; mean of 3 runs of A1 ± ", FAILS),
        ([500, 500, 500], "500 steps; mean of 3 runs of A1 ± ", HOLDS),
        ([500, 500], "500 steps; 2 runs of A1", FAILS),
        ([], "not measured on this card", CANNOT_TELL),
    ],
)
def test_the_protocol_asks_for_500_steps_and_3_runs(steps, text, sign):
    found = claims._protocol(timed(["A1"] * len(steps), steps))
    assert found.text.startswith(text)
    assert found.sign == sign


def test_the_protocol_asks_for_3_runs_of_the_recommended_variant_as_well():
    found = claims._protocol(timed(["A1", "A1", "A1", RECOMMENDED], [500] * 4))
    assert found.text.endswith(f"; 1 run of {RECOMMENDED}")
    assert found.sign == FAILS


def test_runs_without_the_baseline_do_not_tell_whether_the_protocol_was_kept():
    found = claims._protocol(timed([RECOMMENDED] * 3, [500] * 3))
    assert found == Found("not measured on this card", CANNOT_TELL)


def profiled(**kernels):
    """What is measured of profiles, each with its kernels in a step; None was not profiled."""
    profiles = {
        name: None if count is None else {"time": {"kernels_per_step": count}}
        for name, count in kernels.items()
    }
    return SimpleNamespace(profile=profiles.get)


@pytest.mark.parametrize(
    ("kernels", "text", "sign"),
    [
        ({"D1": None, "A3": 1000.0}, "no D1 was profiled", CANNOT_TELL),
        ({"D1": None, "A3": None}, "no D1 and no A3 was profiled", CANNOT_TELL),
        ({"D1": 1090.4, "A3": 1000.0}, "D1 1,090, A3 1,000", HOLDS),
        ({"D1": 1500.0, "A3": 1000.0}, "D1 1,500, A3 1,000", FAILS),
    ],
)
def test_kernels_are_counted_where_both_variants_were_profiled(kernels, text, sign):
    assert claims._kernel_counts(profiled(**kernels), "D1", "A3") == Found(text, sign)


def with_counters(warps, dram):
    """A profile whose two kernels take equal time, the first without any use of the card."""
    common = {"count": 1, "us": 10.0, "sm_percent": 50.0}
    idle = {"name": "a", "warps_active_percent": 0.0, "dram_percent": 0.0}
    busy = {"name": "b", "warps_active_percent": 2 * warps, "dram_percent": 2 * dram}
    kernels = [{"name": name, "phase": "forward", "part": "attention"} for name in "ab"]
    return {"ncu": [common | idle, common | busy], "time": {"kernels": kernels}}


@pytest.mark.parametrize(("dram", "sign"), [(41.0, HOLDS), (30.0, FAILS)])
def test_counters_of_both_variants_are_compared(dram, sign):
    profiles = {"D1": with_counters(20.0, dram), "A3": with_counters(21.0, 40.0)}
    found = claims._counters(SimpleNamespace(profile=profiles.get), "D1", "A3")
    text = f"D1 warps active %: 20.0, A3 21.0; DRAM %: {dram:.1f}, A3 40.0"
    assert found == Found(text, sign)


def test_counters_that_were_not_read_are_named():
    profiles = {"D1": {"ncu": None}, "A3": with_counters(20.0, 40.0)}
    found = claims._counters(SimpleNamespace(profile=profiles.get), "D1", "A3")
    assert found == Found("no hardware counters of D1 were read", CANNOT_TELL)


def test_a_profile_is_that_of_its_variant_in_the_group():
    measured = claims.Measured(committed(), "h200-bench")
    assert measured.profile("A3")["time"]["kernels_per_step"] > 0
    assert measured.profile("D1") is None


def test_a_backend_that_was_timed_has_a_verdict(measured):
    without = claims._nvfuser(measured(("A3", 100.0, 0, 32)))
    assert without == Found("torch.compile has no NVFuser any more", CANNOT_TELL)


THEIR_SCORING = pd.Series({"A1": 100.0, "A2": 90.0, "A4": 150.0})


def scored_in(*more, **seconds):
    """What is measured of runs that were scored in so many seconds; None shared its GPU."""
    common = {"spec.seed": 0, "status": "ok", "group": "h200-quality", "code": "a"}
    lines = [
        common | {"spec.variant": name, "time.eval_s": value} for name, value in seconds.items()
    ]
    return SimpleNamespace(scored=pd.DataFrame([*lines, *(lines[0] | line for line in more)]))


def test_scoring_speed_is_told_where_the_baseline_was_scored_alone():
    elsewhere = {"spec.variant": "A2", "group": "h100-quality"}
    older = {"spec.variant": "A2", "code": "b"}
    lines = claims._scoring_speeds(scored_in(elsewhere, older, A1=6.0, A4=3.0), THEIR_SCORING)
    assert lines == [
        ("Scoring speed, × A1", "A2", "×0.90", Found("not measured on this card", CANNOT_TELL)),
        ("Scoring speed, × A1", "A4", "×1.50", Found("×2.00", FAILS)),
    ]
    ((_, part, theirs, found),) = claims._scoring_speeds(scored_in(A1=None, A4=3.0), THEIR_SCORING)
    assert (part, theirs) == ("all", "A2 ×0.90, A4 ×1.50")
    assert found == Found("no A1 was scored on a GPU of its own", CANNOT_TELL)


def language(*runs):
    """What is measured of the language model: runs of (variant, tokens/s, GPUs, code)."""
    lines = [
        {
            "spec.variant": variant,
            "spec.seed": 0,
            "status": "ok",
            "micro_batch": 32,
            "world": world,
            "code": code,
            "speed.tokens_per_s": speed,
        }
        for variant, speed, world, code in runs
    ]
    columns = ["spec.variant", "status", "micro_batch"]
    return SimpleNamespace(language=pd.DataFrame(lines, columns=lines[0] if lines else columns))


@pytest.mark.parametrize(
    ("runs", "text", "sign"),
    [
        ([], "not measured on this card", CANNOT_TELL),
        ([("L-compile", 100.0, 1, "a")], "not measured on this card", CANNOT_TELL),
        (
            [("L-compile", 100.0, 1, "a"), ("L-ddp", 190.0, 2, "b")],
            "L-ddp on 2 GPUs ×1.90 of L-compile on one, but of other code",
            CANNOT_TELL,
        ),
        (
            [("L-compile", 9.0, 1, "b"), ("L-compile", 100.0, 1, "a"), ("L-ddp", 190.0, 2, "a")],
            "L-ddp on 2 GPUs ×1.90 of L-compile on one",
            HOLDS,
        ),
        (
            [("L-compile", 100.0, 1, "a"), ("L-ddp", 90.0, 2, "a")],
            "L-ddp on 2 GPUs ×0.90 of L-compile on one",
            FAILS,
        ),
    ],
)
def test_data_parallelism_is_judged_by_runs_of_one_code(runs, text, sign):
    assert claims._data_parallel(language(*runs), "L-ddp") == Found(text, sign)


def test_loading_has_a_reason_and_what_it_could_save():
    bench = pd.DataFrame({
        "micro_batch": 32,
        "spec.variant": ["A1"],
        "time.data_ms": [1.0],
        "time.step_ms.median": [50.0],
        "speed.gpu_busy": [0.9],
    })  # fmt: skip
    text = "not tested: no two variants differ in it alone"
    found = claims._loading(SimpleNamespace(bench=bench))
    assert found == Found(
        f"{text}; the host makes a batch in 2.00 % of a step of A1 (GPU busy 90.0 %)", CANNOT_TELL
    )
    assert claims._loading(SimpleNamespace(bench=bench[:0])) == Found(text, CANNOT_TELL)


def test_peaks_by_the_published_protocol_are_the_last_of_micro_batch_8(tmp_path):
    for variant, seed, size, peak in (
        ("A3", 0, 8, 90),
        ("A3", 1, 8, 100),
        ("A3", 2, 32, 400),
        ("C1", 0, 8, 80),
    ):
        make(tmp_path, variant, seed, machine=H200, preset="vram", micro_batch=size, peak=peak)
    make(tmp_path, "C1", 1, machine=H200, preset="vram", micro_batch=8, peak=1, status="oom")
    measured = claims.Measured(load_runs(tmp_path), "h200-vram")
    assert measured.first_peak("C1", "A3") == pytest.approx(0.8)
    assert math.isnan(measured.first_peak("C2", "A3"))


@pytest.mark.parametrize(
    ("other", "seeds"),
    [
        ({}, [1]),
        ({"spec.search": ""}, [0, 1]),
        ({"spec.variant": "B1"}, [0, 1]),
        ({"spec.hardware": "cpu"}, [0, 1]),
        ({"data.sha256": "other"}, [0, 1]),
    ],
)
def test_seeds_that_chose_a_rate_on_these_data_and_this_card_do_not_speak_for_it(other, seeds):
    common = {"spec.hardware": "h200", "data.sha256": "squad", "spec.variant": "B1-all"}
    scored = pd.DataFrame([common | {"spec.seed": seed} for seed in (0, 1)])
    tries = pd.DataFrame([common | {"spec.search": "tune", "spec.seed": 0} | other])
    measured = SimpleNamespace(bench=scored, scored=scored)
    fresh = claims.Measured._without_seeds_of_a_search(measured, tries, "B1-all")
    assert fresh["spec.seed"].tolist() == seeds


def test_within_one_point_is_at_both_thresholds():
    found = claims.keeps(claims.Measured(committed(), GROUP), "D1", "A3")
    at_best = claims.Measured(committed(), GROUP).difference("D1", "A3", BEST_F1)
    assert claims.judge_by_interval(at_best, -1, 1) == HOLDS
    assert found.sign == OPEN


def test_a_loss_larger_than_that_of_never_answering_cannot_be_told(tables):
    _, numbers = tables
    line = numbers[numbers["of it"].eq("B1") & numbers["theirs"].eq("−21.67")].iloc[0]
    assert "never answering loses" in line["measured here"]
    assert line["holds"] == CANNOT_TELL


def test_each_claim_has_a_verdict_and_each_without_one_its_reason(tables):
    for table in tables:
        assert set(table["holds"]) <= {HOLDS, FAILS, OPEN, CANNOT_TELL}
        assert table["measured here"].str.len().gt(0).all()


def test_each_published_number_has_a_line(tables):
    _, numbers = tables
    published = facts.published().index.drop("A1")
    for label in ("Training speed, × A1", "F1 minus A1's", "Exact match minus A1's"):
        filled = numbers["their claim"].replace("", pd.NA).ffill()
        lines = numbers[filled.str.startswith(label)]
        assert list(lines["of it"]) == list(published)


def test_a_claim_stands_in_its_first_line_alone(tables):
    for table in tables:
        said = table["their claim"][table["their claim"] != ""]
        assert said.is_unique
        assert len(said) < len(table)
