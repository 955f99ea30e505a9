"""How speed, memory and what a sample teaches change with GPUs, batch and length."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from qa_lib.lab.report import (
    curves,
    evidence,
    noise_scale,
    scaling,
    tradeoffs,
)
from qa_lib.lab.report.evidence import NotMeasured, load_runs, select
from qa_lib.lab.report.stats import interval
from qa_lib.lab.report.variants_table import lead
from qa_lib.spec.variants import RECOMMENDED
from tests.material import refused
from tests.report_runs import gpu_runs, make
from tests.tiny import H200

# Several GPUs.

SEEDS = range(3)
BENCH = "h200-bench"  # the group of runs at preset `bench` here


@pytest.fixture
def several(tmp_path):
    """Runs of four GPUs and of one, three seeds each.

    Four GPUs train 160, 161 and 162 samples/s, and one 100 to 102 at the same batch and 50 to 52 at
    a GPU's share of it. A peak is as many MiB as the speed is, and twice that in the last of four
    processes.
    """
    machine = dataclasses.replace(H200, gpus=4)
    for variant, world, batch, speed in (
        ("E-dropout", 1, 32, 100),
        ("E-dropout", 1, 8, 50),
        ("P-one-bucket", 4, 32, 160),
    ):
        for seed in SEEDS:
            make(
                tmp_path,
                variant,
                seed,
                machine=machine,
                preset="parallel",
                world=world,
                batch=batch,
                speed=speed + seed,
                peak=speed + seed,
            )
    runs = select(load_runs(tmp_path), "h200-parallel")
    of_four = runs["memory.peak_alloc_mib"].where(runs["world"] == 4)
    return runs.assign(**{"parallel.rank_peak_mib.3": 2 * of_four})


def test_the_peak_is_that_of_the_process_with_the_most(several):
    assert scaling.scaling(several)["peak_mib"].tolist() == [51.0, 101.0, 2 * 161.0]


def test_efficiencies_are_against_the_variant_that_shares_nothing(several):
    lines = scaling.scaling(several).set_index("variant")
    line = lines.loc["P-one-bucket"]
    assert line["reference"] == "E-dropout"
    assert line["strong"] == pytest.approx(161 / 4 / 101)
    assert line["weak"] == pytest.approx(161 / 4 / 51)


def test_an_efficiency_has_an_interval_over_equal_seeds(several):
    line = scaling.scaling(several).set_index("variant").loc["P-one-bucket"]
    assert line["strong±"] > 0
    assert line["weak±"] > 0


def test_an_efficiency_against_other_code_has_no_interval_and_says_so(several):
    is_alone = several["world"] == 1
    code = several["code"].mask(is_alone, "f" * 40)
    line = scaling.scaling(several.assign(**{"code": code})).iloc[-1]
    assert line["reference"] == "E-dropout of another day"
    assert math.isnan(line["strong±"])


def test_a_sentence_says_how_much_quicker_several_gpus_are(several):
    assert scaling.speed_finding(scaling.scaling(several)) == (
        "4 GPUs train ×3.16 as fast as one at 8 samples each, ×1.59 at 32 in all (P-one-bucket)"
    )


def test_a_sentence_says_by_how_much_longer_a_step_takes_than_on_one_gpu():
    def at_ms(milliseconds):
        return {"time.step_ms.median": milliseconds}

    lines = scaling.scaling(
        gpu_runs(
            ("E-uncompiled", 1, 32, 32, 4000, at_ms(8.0)),
            ("P-peers", 2, 64, 32, 7800, at_ms(8.25)),
            ("P-peers", 4, 128, 32, 15000, at_ms(8.5)),
            ("P-nccl", 2, 64, 32, 7000, at_ms(9.1)),
        )
    )
    assert lines.set_index("variant").loc["P-nccl", "lost_ms"] == pytest.approx(1.1)
    assert scaling.lost_sentence(lines) == (
        "By median steps, at 32 samples each, P-peers takes 8.25 ms on 2 GPUs, 0.25 more than on "
        "one; P-peers takes 8.50 ms on 4 GPUs, 0.50 more than on one."
    )


def test_nothing_is_said_of_a_loss_where_one_gpu_was_not_timed_at_as_many_samples():
    lines = scaling.scaling(gpu_runs(("P-peers", 2, 64, 32, 7800, {})))
    assert scaling.lost_sentence(lines) == ""


# What a step consists of.


def waiting_lines(*rows):
    """Lines of (variant, GPUs, batch, speed, computing ms, waiting ms) whose steps take 10 ms."""
    names = ["variant", "world", "batch", "speed", "busy_ms", "waiting_ms"]
    return pd.DataFrame(rows, columns=names).assign(stages=1, step_ms=10.0)


def test_variants_are_compared_at_one_batch_on_as_many_gpus_the_busiest_first():
    shares = scaling.step_shares(
        waiting_lines(
            ("P-one-bucket", 2, 32, 1.0, 6.0, 3.0),
            ("P-overlap", 2, 32, 1.0, 9.0, 1.0),
            ("P-overlap", 4, 32, 1.0, 9.0, 1.0),
        )
    )
    assert shares["variant"].tolist() == ["P-overlap", "P-one-bucket"]
    assert shares["computing"].tolist() == [0.9, 0.6]
    assert shares["idle"].tolist() == pytest.approx([0.0, 0.1])


def test_a_pipeline_computes_where_it_has_no_bubble():
    shares = scaling.step_shares(
        waiting_lines(("P-gpipe", 2, 512, 1.0, 3.0, 2.0), ("P-1f1b", 2, 512, 1.0, math.nan, 1.0))
    )
    assert shares["bubble"].tolist() == [0.1, 0.2]
    assert shares["computing"].tolist() == [0.9, 0.8]


def test_a_variant_is_compared_at_the_micro_batch_at_which_it_is_quickest():
    shares = scaling.step_shares(
        waiting_lines(
            ("P-one-bucket", 2, 32, 1.0, 6.0, 4.0),
            ("P-one-bucket", 2, 32, 2.0, 8.0, 2.0),
            ("P-overlap", 2, 32, 1.0, 9.0, 1.0),
        )
    )
    assert shares["computing"].tolist() == [0.9, 0.8]


def test_the_shares_of_a_line_without_its_waiting_are_not_known():
    lines = waiting_lines(("P-one-bucket", 2, 32, 1.0, 6.0, 4.0), ("P1", 2, 32, 1.0, 6.0, math.nan))
    shares = scaling.shares_of(lines)
    assert shares["computing"].iloc[0] == 0.6
    assert shares.iloc[1].isna().all()


def test_a_variant_alone_at_its_batch_is_compared_with_nobody():
    alone = waiting_lines(("P-one-bucket", 2, 32, 1.0, 6.0, 4.0))
    refused("no two variants for several GPUs", scaling.step_shares, alone)


def test_a_sentence_says_for_how_much_of_a_step_a_gpu_computes():
    shares = scaling.step_shares(
        waiting_lines(
            ("P-one-bucket", 2, 1024, 1.0, 6.0, 4.0), ("P-overlap", 2, 1024, 1.0, 9.0, 1.0)
        )
    )
    assert scaling.waiting_finding(shares) == (
        "With 1,024 samples a step on 2 GPUs, a GPU computes for 60.0 % (P-one-bucket) to "
        "90.0 % (P-overlap) of it"
    )


def test_a_table_has_a_line_a_variant_the_quickest_first_at_equal_samples_a_gpu():
    exposed = {"parallel.exposed_ms": 3.0, "memory.peak_alloc_mib": 2048.0}
    runs = gpu_runs(
        ("E-dropout", 1, 8, 8, 100, {}),
        ("P-one-bucket", 2, 16, 8, 190, {}),
        ("P-one-bucket", 4, 32, 8, 360, exposed),
        ("P-zero1", 4, 32, 8, 380, exposed),
        ("P-zero1", 4, 64, 8, 500, exposed),
    )
    table = scaling.speed_table(scaling.scaling(runs))
    assert table["variant"].tolist() == ["P-zero1", "P-one-bucket"]
    assert table["samples/s on 2"].tolist() == ["–", "190"]
    assert table["samples/s on 4"].tolist() == ["380", "360"]
    assert table["× one GPU, on 2"].tolist() == ["–", "×1.90"]
    assert table["× one GPU, on 4"].tolist() == ["×3.80", "×3.60"]
    assert table["peak GiB a GPU, on the most"].tolist() == ["2.00", "2.00"]


def test_a_table_of_several_gpus_is_sorted_by_speed_on_as_many_as_most_have_run_on():
    runs = gpu_runs(
        ("E-dropout", 1, 8, 8, 100, {}),
        ("E-regions", 1, 8, 8, 100, {}),
        ("P-one-bucket", 2, 16, 8, 190, {}),
        ("P-one-bucket", 4, 32, 8, 360, {}),
        ("P-zero1", 2, 16, 8, 180, {}),
        ("P-zero1", 4, 32, 8, 380, {}),
        ("P-overlap", 2, 16, 8, 200, {}),
    )
    table = scaling.speed_table(scaling.scaling(runs))
    assert table["variant"].tolist() == ["P-overlap", "P-one-bucket", "P-zero1"]


def test_a_table_of_several_gpus_takes_a_speed_on_one(several):
    of_four = scaling.scaling(several[several["world"] == 4])
    refused("no variant has a speed on several GPUs beside", scaling.speed_table, of_four)


# What a sample teaches.


@pytest.fixture
def logs():
    """The logs of a batch of 32 and one of 64, whose losses fall alike by steps."""
    steps = pd.DataFrame({"step": range(1, 201), "loss": np.linspace(4, 1, 200), "phi": 96.0})
    return pd.DataFrame(
        {"variant": "P-one-bucket", "seed": 0, "world": 1, "batch": [32, 64], "log": [steps, steps]}
    )


def test_the_noise_scale_predicts_what_a_batch_teaches(logs):
    worth, _ = noise_scale.batch_worth(logs)
    assert worth.loc[64, "predicted"] == pytest.approx((96 + 32) / (96 + 64))


def test_what_a_batch_teaches_is_measured_by_the_samples_to_one_loss(logs):
    worth, loss = noise_scale.batch_worth(logs)
    assert worth.loc[64, "measured"] == pytest.approx(0.5)
    assert loss > 1


def test_what_a_batch_teaches_is_the_same_by_a_log_that_lacks_steps(logs):
    whole = log_of(96.0)
    worth, _ = noise_scale.batch_worth(logs.assign(log=[whole, whole[whole["step"] % 2 == 0]]))
    assert worth.loc[64, "measured"] == pytest.approx(0.5, rel=0.05)


def test_what_a_batch_teaches_has_the_interval_of_its_seeds_and_none_of_one(logs):
    of_seeds = []
    for seed, steps in enumerate((200, 250, 300)):
        of_seeds.append(logs.assign(seed=seed, log=[log_of(96.0), log_of(96.0, steps)]))
    alone = [noise_scale.batch_worth(of_seed)[0].loc[64] for of_seed in of_seeds]
    together = noise_scale.batch_worth(pd.concat(of_seeds, ignore_index=True))[0].loc[64]
    expected = interval(pd.Series([worth["measured"] for worth in alone]))
    assert together["measured±"] == pytest.approx(expected, rel=0.05)
    assert math.isnan(alone[0]["measured±"])


def test_what_a_batch_teaches_takes_two_batches(logs):
    with pytest.raises(NotMeasured, match="at batch 32 and at a larger one"):
        noise_scale.batch_worth(logs[:1])


# Length and batch.


def test_memory_is_a_fixed_cost_and_one_a_token():
    part = pd.DataFrame({"gib": [1.5, 2.0, 3.0], "tokens": [1024, 2048, 4096]})
    assert curves.fit(part) == pytest.approx((1.0, 512.0, 0.0), abs=1e-9)


def test_two_points_make_no_line():
    part = pd.DataFrame({"gib": [1.5, 2.0], "tokens": [1024, 2048]})
    assert all(math.isnan(value) for value in curves.fit(part))


@pytest.fixture
def speeds():
    """Speeds of the visible loop, of the Trainer with its compiler, and of the Trainer without."""
    lines = [
        ("A0-compile", 8, 10),
        ("A0-compile", 32, 20),
        ("E-uncompiled", 8, 40),
        ("E-uncompiled", 32, 60),
        ("A0", 8, 1),
    ]
    table = pd.DataFrame(lines, columns=["variant", "micro_batch", "speed"])
    return table.assign(sittings=[frozenset("a")] * len(table))


def test_a_lead_is_within_a_sitting(speeds):
    speeds.at[0, "sittings"] = frozenset("b")
    _, _, factors = curves.lead(speeds)
    assert factors.to_dict() == {32: 3.0}


def test_the_lead_is_over_the_compiled_trainer_at_equal_batches(speeds):
    variant, rival, factors = curves.lead(speeds)
    assert variant == "E-uncompiled"
    assert rival == "A0-compile"
    assert factors.to_dict() == {8: 4.0, 32: 3.0}


def test_there_is_no_lead_over_the_trainer_as_it_comes(speeds):
    with pytest.raises(NotMeasured):
        curves.lead(speeds[speeds["variant"] != "A0-compile"])


def test_a_speed_that_scatters_has_no_part_in_the_lead(tmp_path):
    speeds = {"E-uncompiled": 200.0, "E-searched": 100.0}
    for seed, size, variant in itertools.product(SEEDS, (8, 32, 64), speeds):
        scatter = 40.0 * seed if size == 8 else 0.0
        make(
            tmp_path,
            variant,
            seed,
            machine=H200,
            preset="bench",
            micro_batch=size,
            batch=max(size, 32),
            speed=speeds[variant] + scatter,
        )
    sentence = lead(load_runs(tmp_path), "h200-bench")
    assert sentence.endswith(" by ×2.00 at 32, ×2.00 at 64 samples in a forward pass.")


# The laws of a score.


@pytest.mark.parametrize(("constants", "rest"), [(2, 0.0), (3, 0.7)])
def test_the_fitted_law_is_the_one_that_made_the_losses(constants, rest):
    sizes = np.array([1e6, 4e6, 1.6e7, 6.4e7, 2.56e8])
    law = tradeoffs.fit(sizes, 30 * sizes**-0.25 + rest, constants)
    assert (law.b, law.c) == pytest.approx((0.25, rest), rel=1e-3)
    assert law(1e9) == pytest.approx(30 * 1e9**-0.25 + rest, rel=1e-3)


# Lines of several GPUs, of runs that are columns alone.


def line_of(runs, variant):
    """The only line of a variant in `scaling`."""
    return scaling.scaling(runs).set_index("variant").loc[variant]


def test_a_gpu_waits_for_others_or_for_its_turn_in_a_pipeline():
    exposed = {"parallel.exposed_ms": 3.0, "time.step_ms.median": 40.0}
    runs = gpu_runs(
        ("E-dropout", 1, 32, 8, 100, exposed),
        ("P-one-bucket", 4, 32, 8, 160, exposed),
        ("P-gpipe", 4, 32, 8, 160, exposed | {"parallel.bubble": 0.25}),
    )
    waiting_ms = scaling.scaling(runs).set_index("variant")["waiting_ms"]
    assert waiting_ms.to_dict() == {"E-dropout": 0.0, "P-one-bucket": 3.0, "P-gpipe": 10.0}


def test_processes_lie_apart_by_the_share_that_the_slowest_takes_longer():
    of_processes = {
        "parallel.rank_step_ms.0": 10.0,
        "parallel.rank_step_ms.1": 12.0,
        "parallel.rank_computing_ms.0": 8.0,
        "parallel.rank_computing_ms.1": 4.0,
    }
    line = line_of(gpu_runs(("P-gpipe", 2, 32, 8, 160, of_processes)), "P-gpipe")
    assert line["apart"] == pytest.approx(0.2)
    assert line["unbalanced"] == pytest.approx(1.0)


def test_the_one_gpu_works_at_the_micro_batch_at_which_it_is_quickest():
    runs = gpu_runs(
        ("E-dropout", 1, 32, 8, 100, {}),
        ("E-dropout", 1, 32, 16, 80, {}),
        ("P-zero1", 4, 32, 8, 160, {}),
    )
    line = line_of(runs, "P-zero1")
    assert line["strong"] == pytest.approx(160 / 4 / 100)
    assert math.isnan(line["weak"])


@pytest.mark.parametrize(
    ("alone", "reference"),
    [(["E-dropout", "P-one-bucket"], "E-dropout"), (["P-one-bucket"], "P-one-bucket")],
)
def test_the_one_gpu_runs_the_variant_itself_only_where_its_ancestor_has_not_run(alone, reference):
    of_one = [(name, 1, 32, 8, 100, {}) for name in alone]
    runs = gpu_runs(*of_one, ("P-one-bucket", 4, 32, 8, 160, {}))
    line = scaling.scaling(runs).query("world == 4").iloc[0]
    assert line["reference"] == reference


def test_only_runs_count_that_agree_with_most():
    others = {"length": 128}
    runs = gpu_runs(
        ("E-dropout", 1, 32, 8, 100, {}),
        ("P-one-bucket", 4, 32, 8, 160, {}),
        ("P-one-bucket", 4, 64, 8, 500, others),
    )
    assert scaling.scaling(runs)["batch"].tolist() == [32, 32]


SIZES = pd.DataFrame({
    "variant": ["P1", "P1", "P1", "P-overlap"],
    "world": [4, 4, 2, 4],
    "stages": 1,
    "batch": [32, 64, 32, 32],
    "micro_batch": 8,
    "speed": [10.0, 20.0, 30.0, 40.0],
    "strong": [0.5, 0.5, 0.5, 0.5],
    "weak": [math.nan, 0.5, 0.5, math.nan],
})  # fmt: skip


def test_runs_on_one_gpu_alone_have_no_scaling(several):
    refused("no run of a variant for several GPUs", scaling.scaling, several[several["world"] == 1])


def test_a_finding_tells_each_size_that_is_drawn_on_as_many_gpus():
    runs = gpu_runs(
        ("E-uncompiled", 1, 8, 8, 100, {}),
        ("E-uncompiled", 1, 16, 8, 110, {}),
        ("E-uncompiled", 1, 32, 8, 120, {}),
        ("P-peers", 2, 8, 8, 120, {}),
        ("P-peers", 2, 16, 8, 198, {}),
        ("P-peers", 2, 32, 8, 216, {}),
        ("P-peers", 4, 32, 8, 180, {}),
    )
    assert scaling.speed_finding(scaling.scaling(runs)) == (
        "2 GPUs train ×1.98 as fast as one at 8 samples each, ×1.80 at 32 in all, ×1.20 at 8 in "
        "all (P-peers)"
    )


def test_a_speed_on_several_gpus_alone_is_no_finding(several):
    of_four = scaling.scaling(several[several["world"] == 4])
    refused("no variant was run on one GPU and on several", scaling.speed_finding, of_four)


def test_a_training_is_projected_only_from_a_speed_beside_that_on_one_gpu(several):
    of_four = several[several["world"] == 4]
    refused("no variant has a speed on several GPUs beside", scaling.projection, of_four)


def test_the_size_with_the_most_efficiencies_comes_first():
    assert scaling.common(SIZES, "strong") == [32, 64]
    assert scaling.common(SIZES, "weak") == [16]


def test_lines_of_a_size_are_those_of_so_many_samples_in_all_or_a_gpu():
    assert scaling.at(SIZES, "strong", 32)["speed"].tolist() == [10.0, 30.0, 40.0]
    assert scaling.at(SIZES, "weak", 16)["speed"].tolist() == [20.0, 30.0]


def test_of_lines_of_one_size_the_quickest_micro_batch_stands():
    slower = SIZES.assign(micro_batch=4, speed=1.0)
    both = pd.concat([SIZES, slower], ignore_index=True)
    assert scaling.at(both, "strong", 32)["micro_batch"].eq(8).all()


@pytest.mark.parametrize(("cached", "told"), [(False, ""), (True, ", which found a part of")])
def test_a_whole_training_is_projected_with_the_longest_compilation(cached, told):
    compiled = {"time.compile_s": 50.0, "time.compile_cached": cached}
    runs = gpu_runs(
        ("E-dropout", 1, 8, 8, 100, compiled), ("P-one-bucket", 4, 32, 8, 395.262, compiled)
    )
    projected = scaling.projection(runs)
    assert projected["seconds"] == pytest.approx(1000 + 50)
    assert projected["cold"] is not cached
    words = scaling.projected_words(projected)
    assert words.startswith("Three epochs of SQuAD v2 on 4 GPUs would take 1,050 s with P-one-")
    assert f"395,262 samples ÷ 395/s + 50.0 s of compilation{told}" in words


def test_a_text_about_gpus_is_one_about_processes_on_a_cpu():
    runs = gpu_runs(("P1", 4, 32, 8, 160, {}))
    assert scaling.worded("4 GPUs, one GPU", runs) == "4 GPUs, one GPU"
    on_cpu = runs.assign(**{"spec.hardware": "cpu"})
    assert scaling.worded("4 GPUs, one GPU", on_cpu) == "4 processes, one process"


# Points of length and batch, of runs that are columns alone.


def sized_runs(*rows):
    """Runs of A1 at length 64 and micro-batch 8, each with other columns."""
    usual = {
        "spec.variant": "A1",
        "spec.settings.padding": "max_length",
        "status": "ok",
        "length": 64,
        "batch": 32,
        "micro_batch": 8,
        "memory.peak_alloc_mib": 2048.0,
        "memory.params_mib": 1024.0,
        "memory.grads_mib": 512.0,
        "memory.optimizer_mib": 1536.0,
        "speed.samples_per_s": 10.0,
        "speed.tokens_per_s_padded": 500.0,
        "code.commit": "a",
        "code.dirty": False,
        "sitting": "a",
    }
    return pd.DataFrame([usual | row for row in rows])


def test_a_point_has_its_memory_in_gib():
    (line,) = curves.points(sized_runs({}), predicted=3072.0).to_dict("records")
    assert [line[name] for name in ("gib", "states", "predicted")] == [2.0, 3.0, 3.0]


def test_a_point_has_the_tokens_that_a_micro_batch_computes():
    packed = {"spec.variant": "E-packed", "spec.settings.padding": "packed"}
    lines = curves.points(sized_runs({}, packed)).set_index("variant")
    assert lines["tokens"].to_dict() == {"A1": 8 * 64, "E-packed": 8 * 500 / 10}


def test_the_batch_of_a_point_is_0_where_it_was_not_asked_for_in_samples():
    runs = sized_runs({}, {"batch": 8}, {"batch": 16, "spec.preset.batch_tokens": 1024.0})
    assert sorted(curves.points(runs)["batch"]) == [0, 32]


def test_a_point_is_out_of_memory_where_every_seed_was():
    oom = {"status": "oom"}
    runs = sized_runs({}, oom, {"length": 128} | oom, {"length": 256, "status": "error"})
    points = curves.points(runs).set_index("length")["oom"]
    assert points.to_dict() == {64: False, 128: True}


def test_a_point_has_the_sittings_in_which_it_was_timed():
    untimed = {"length": 128, "speed.samples_per_s": None}
    points = curves.points(sized_runs({}, {"sitting": "b"}, untimed)).set_index("length")
    assert points["sittings"][64] == {"a", "b"}
    assert math.isnan(points["sittings"][128])
    assert curves.points(sized_runs(untimed))["sittings"].isna().all()


def test_points_of_runs_that_failed_otherwise_are_not_measured():
    refused("ended ok or out of memory", curves.points, sized_runs({"status": "error"}))


def test_a_curve_is_over_the_lines_in_which_its_size_varies_most():
    lengths = [(64, 32, 4), (128, 32, 4), (256, 32, 4), (64, 0, 2000), (128, 0, 2000)]
    repeated = [(64, 16, 8)] * 4
    table = pd.DataFrame(lengths + repeated, columns=["length", "batch", "micro_batch"])
    words, lines = curves.along(table, "length")
    assert words == "batch 32, micro-batch 4"
    assert lines["length"].tolist() == [64, 128, 256]
    assert curves.along(table[3:5], "length")[0] == "micro-batch 2,000"
    refused("no two runs differ in length alone", curves.along, table[5:], "length")


def test_there_is_no_curve_without_runs():
    empty = pd.DataFrame(columns=["length", "batch", "micro_batch"])
    refused("the group has no runs of these variants", curves.along, empty, "length")


def test_a_fit_minimizes_the_relative_misses_and_tells_the_largest():
    tokens = np.array([1024.0, 2048.0, 4096.0, 8192.0])
    gib = np.array([1.0, 3.0, 4.0, 8.0])  # of which one is far above any line
    fixed, kib, miss = curves.fit(pd.DataFrame({"gib": gib, "tokens": tokens}))

    def misses(fixed, gib_per_token):
        return (fixed + gib_per_token * tokens) / gib - 1

    least = (misses(fixed, kib / 2**20) ** 2).sum()
    for others in ((1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99)):
        moved = misses(fixed * others[0], kib / 2**20 * others[1])
        assert (moved**2).sum() > least
    assert miss == pytest.approx(np.abs(misses(fixed, kib / 2**20)).max())


def test_a_pass_of_one_sample_is_no_lead(speeds):
    _, _, factors = curves.lead(speeds.assign(micro_batch=speeds["micro_batch"].replace(8, 1)))
    assert factors.to_dict() == {32: 3.0}


def test_speeds_at_other_micro_batches_are_no_lead(speeds):
    apart = speeds[speeds["variant"].isin(["A0-compile", "E-uncompiled"])].iloc[[0, 3]]
    refused("E-uncompiled and A0-compile have no micro-batch in common", curves.lead, apart)


def test_a_speed_at_one_micro_batch_alone_is_no_finding_about_batches(tmp_path):
    for variant in (RECOMMENDED, "A0-compile"):
        make(tmp_path, variant, machine=H200, preset="bench")
    refused("A0-compile has a speed at one micro-batch alone", lead, load_runs(tmp_path), BENCH)


# The noise scale.


def log_of(phi, steps=200, least=1.0):
    """A run's log whose loss falls from 4 to `least`."""
    return pd.DataFrame({"step": range(1, steps + 1), "loss": np.linspace(4, least, steps)}).assign(
        phi=phi
    )


def test_a_noise_scale_has_its_share_of_the_training_and_is_above_0(logs):
    phi = [math.nan, 0.0, -5.0, *[7.0] * 197]
    scales = noise_scale.noise_scales(logs.assign(log=[log_of(phi), log_of(math.nan)]))
    assert len(scales) == 197
    assert scales.iloc[0].to_dict() == {
        "step": 4.0,
        "phi": 7.0,
        "batch": 32.0,
        "seed": 0.0,
        "done": 4 / 200,
    }


def test_a_log_that_lacks_steps_ends_when_all_of_the_training_is_done(logs):
    whole = log_of(7.0)
    lacking = whole[whole["step"] % 10 == 0]
    scales = noise_scale.noise_scales(logs.assign(log=[lacking, whole]))
    done = scales[scales["batch"] == 32]["done"]
    assert done.tolist() == pytest.approx([tenth / 20 for tenth in range(1, 21)])


def test_without_logs_there_is_no_noise_scale(logs):
    refused("no run has a steps.jsonl of more than 100", noise_scale.noise_scales, logs[:0])


def test_logs_without_a_noise_scale_are_told(logs):
    unknown = logs.assign(log=[log_of(math.nan)] * 2)
    refused(r"no log has a noise scale \(phi\)", noise_scale.noise_scales, unknown)


def test_the_noise_scale_is_that_of_the_smallest_batch_without_the_reference(logs):
    of_others = logs.assign(batch=[128, 64])
    assert noise_scale.reference_phi(of_others)["batch"].unique().tolist() == [64]
    assert noise_scale.reference_phi(logs)["batch"].unique().tolist() == [32]


def test_the_predicted_progress_is_the_mean_over_the_training(logs):
    changing = logs.assign(log=[log_of([32.0, 96.0] * 100), log_of(1.0)])
    predicted = noise_scale.efficiencies(changing, [64])
    assert predicted[64] == pytest.approx((64 / 96 + 128 / 160) / 2)


def test_the_noise_scale_is_of_the_variant_at_the_most_batches(logs):
    alone = logs[:1].assign(variant="P-overlap")
    both = pd.concat([alone, logs], ignore_index=True)
    assert noise_scale.most_batches(both)["variant"].unique().tolist() == ["P-one-bucket"]


def test_the_most_batches_are_different_ones(logs):
    often = pd.concat([logs[:1].assign(variant="P-overlap", seed=seed) for seed in range(3)])
    both = pd.concat([often, logs], ignore_index=True)
    assert noise_scale.most_batches(both)["variant"].unique().tolist() == ["P-one-bucket"]


def test_samples_are_counted_to_the_loss_that_the_worst_run_ends_with(logs):
    _, loss = noise_scale.batch_worth(logs.assign(log=[log_of(96.0), log_of(96.0, least=2.0)]))
    assert loss == pytest.approx(np.linspace(4, 2, 200)[-20:].mean())


def test_a_run_of_so_many_steps_is_no_training_by_epochs():
    runs = pd.DataFrame({"run_id": ["speed", "whole"], evidence.EPOCHS: [None, 2.0]})
    assert noise_scale.trained_by_epochs(runs)["run_id"].tolist() == ["whole"]


def test_logs_are_of_runs_that_ended_ok_at_a_batch_and_took_more_than_100_steps():
    def run(steps):
        return SimpleNamespace(steps=lambda: log_of(1.0, steps))

    rows = [
        ("ok", 32, run(101)),
        ("ok", 32, run(100)),
        ("ok", 0, run(200)),
        ("killed", 32, run(200)),
    ]
    columns = {"spec.variant": "P1", "spec.seed": 0, "world": 1, "group": "g", "run_id": "r"}
    runs = pd.DataFrame(rows, columns=["status", "batch", "run"]).assign(**columns)
    (line,) = noise_scale.logs_of(runs).to_dict("records")
    assert len(line["log"]) == 101
    assert line["loss"] == pytest.approx(2.5)
