"""The hypotheses on a student's slides, on made-up logs and runs that agree with them or do not."""

import math

import numpy as np
import pandas as pd
import pytest

from qa_lib.lab.report import evidence, hypotheses
from qa_lib.lab.report.hypotheses import DDP, DEEPSPEED, POLLED
from qa_lib.lab.report.stats import FAILS, HOLDS, OPEN
from tests.material import committed, refused
from tests.report_runs import gpu_runs

# The slides' formula.


def test_the_slides_efficiency_is_the_mean_difference_of_losses_over_the_batch():
    loss = pd.Series([1.0, 2.0, 4.0, 3.0])
    assert hypotheses.slides_efficiency(loss, 10) == pytest.approx((1 + 2 + 1) / 3 / 10)


def test_a_mean_of_steps_is_told_again_in_those_that_follow():
    loss = pd.Series([1.0, 3.0, 5.0, 7.0, 9.0])
    assert hypotheses.told_again(loss, noted=2).tolist() == [2.0, 2.0, 6.0]


def test_the_slides_efficiency_falls_where_losses_are_told_again():
    loss = pd.Series(np.tile([1.0, 2.0], 100))
    logs = pd.DataFrame({"log": [pd.DataFrame({"loss": loss})], "batch": 10})
    (log,) = hypotheses.with_slides_efficiency(logs).to_dict("records")
    assert log["by_steps"] == pytest.approx(0.1)
    assert log["by_means"] == 0.0


def test_no_logs_have_no_efficiency_of_the_slides():
    logs = hypotheses.with_slides_efficiency(pd.DataFrame({"log": [], "batch": []}))
    assert logs[["by_steps", "by_means"]].dtypes.tolist() == [float, float]


# H1: steps times GPUs.


def planned(variant, world, batch, steps):
    """A run of so many planned steps."""
    return variant, world, batch, 16, 100, {"spec.planned_steps": steps}


def signs_of(parts):
    """The signs of a hypothesis' parts, in their order."""
    return [found.sign for found in parts.values()]


def test_steps_halve_where_each_gpu_has_as_many_samples():
    runs = gpu_runs(
        planned(DDP, 1, 16, 4000),
        planned(DDP, 2, 32, 2000),
        planned(DDP, 4, 64, 1001),
        planned(DEEPSPEED, 2, 32, 2000),
        planned(DEEPSPEED, 4, 64, 2000),
    )
    parts = hypotheses.steps_halve(runs)
    assert signs_of(parts) == [HOLDS, FAILS]
    first = next(iter(parts.values()))
    assert first.text == "P0: 4,000 on 1, 2,000 on 2, 1,001 on 4 GPUs"


@pytest.mark.parametrize("batch", [32, 512])
def test_only_runs_count_of_as_many_samples_a_gpu_as_most_have(batch):
    usual = [
        planned(name, world, 16 * world, 4000 / world)
        for name in (DDP, DEEPSPEED)
        for world in (1, 2)
    ]
    other = planned(DDP, 4, batch, 125)
    parts = hypotheses.steps_halve(gpu_runs(*usual, other))
    assert signs_of(parts) == [HOLDS, HOLDS]
    assert "on 4" not in parts["P0: steps × GPUs within 1 %"].text


def test_a_variant_that_did_not_run_is_named():
    refused("no run of P0-deepspeed", hypotheses.steps_halve, gpu_runs(planned(DDP, 1, 16, 9)))


# H2: logging.


def logs_of(*lines):
    """Logs of (variant, GPUs, batch, seed, by_steps, by_means), of 200 steps each."""
    columns = ["variant", "world", "batch", "seed", "by_steps", "by_means"]
    logs = pd.DataFrame(lines, columns=columns)
    names = [f"run-{number}" for number in range(len(logs))]
    return logs.assign(group="g", run_id=names, log=[pd.DataFrame(index=range(200))] * len(logs))


LOGGED = [
    (DDP, 1, 16, 0, 0.0230, 0.000230),
    (DDP, 1, 64, 0, 9.0, 1.0),
    (DDP, 4, 16, 0, 9.0, 1.0),
    (DEEPSPEED, 2, 32, 0, 9.0, 0.000100),
    (DEEPSPEED, 4, 64, 0, 9.0, 0.000010),
]


def test_scripts_are_compared_as_the_slides_compare_their_experiments():
    parts = hypotheses.logging_lowers_it(logs_of(*LOGGED))
    on_two = parts["as theirs on 2 GPUs, within a factor of 2"]
    on_four = parts["as theirs on 4 GPUs, within a factor of 2"]
    assert on_two == ("230-fold, theirs 230", HOLDS)
    assert on_four == ("2,300-fold, theirs 146", FAILS)


def test_one_log_is_told_by_both_formulas_and_it_is_the_longest():
    logs = logs_of(*LOGGED)
    logs.at[1, "log"] = pd.DataFrame(index=range(201))
    found = hypotheses.logging_lowers_it(logs)["one log gives two values 100- to 250-fold apart"]
    assert found.text.startswith("One log, two formulas: 9 from each step, 1 from 50-step means (9")
    assert found.text.endswith("900,000 over all logs)")
    assert found.sign == FAILS


def test_logs_of_one_variant_alone_tell_nothing_of_logging():
    logs = logs_of(*LOGGED[:2])
    refused("no run of P0-deepspeed has a log", hypotheses.logging_lowers_it, logs)


# H3: the formula is noise.


def test_the_formula_is_compared_where_most_seeds_ran_on_two_numbers_of_gpus():
    often = [("P0", world, 64, seed, 1.0, 1.0) for world in (1, 2) for seed in range(4)]
    rarely = [("P0", world, 32, 0, float(world), 1.0) for world in (1, 2)]
    (found,) = hypotheses.same_on_other_gpus(logs_of(*often, *rarely)).values()
    assert found.text == "P0 at batch 64 on 1, 2 GPUs: +0.0 ± 0.0 % (4 pairs of equal seed)"
    assert found.sign == HOLDS


def test_seeds_that_ran_on_one_number_of_gpus_make_no_pair():
    paired = [("P0", world, 64, 0, 1.5 if world == 2 else 1.0, 1.0) for world in (1, 2)]
    alone = [("P0", 1, 64, seed, 7.0, 1.0) for seed in (1, 2)]
    (found,) = hypotheses.same_on_other_gpus(logs_of(*paired, *alone)).values()
    assert found.text == "P0 at batch 64 on 1, 2 GPUs: +40.5 % (1 pairs of equal seed)"
    assert found.sign == OPEN
    refused("on two numbers of GPUs", hypotheses.same_on_other_gpus, logs_of(*alone))


def test_logs_of_two_groups_make_no_pair():
    logs = logs_of(("P0", 1, 64, 0, 1.0, 1.0), ("P0", 2, 64, 0, 1.0, 1.0)).assign(group=["a", "b"])
    refused("on two numbers of GPUs", hypotheses.same_on_other_gpus, logs)


@pytest.mark.parametrize(("power", "sign"), [(-1.5, HOLDS), (-1.0, FAILS)])
def test_the_power_of_the_batch_is_found(power, sign):
    lines = [
        ("P0", 1, batch, seed, (1 + seed) * batch**power, 1.0)
        for batch in (16, 32, 64)
        for seed in range(3)
    ]
    (found,) = hypotheses.falls_as_noise(logs_of(*lines)).values()
    assert found.text == f"batches 16, 32, 64: −{-power:.2f} ± 0.00"
    assert found.sign == sign


# H4: the mean training loss.


def trainings(held_out_rise):
    """Runs of three seeds at three batches, and their logs.

    The mean training loss is 1.5 + 100 / steps, and held-out loss rises by so much in all.
    """
    runs = []
    logs = []
    for seed in range(3):
        for place, batch in enumerate((16, 32, 64)):
            steps = 16_000 / batch
            columns = {
                "spec.seed": seed,
                "spec.planned_steps": steps,
                "quality.loss": 2.0 + held_out_rise * place / 2,
            }
            runs.append((DDP, 1, batch, 16, 100, columns))
            logs.append(1.5 + 100 / steps + 0.1 * seed)
    runs = gpu_runs(*runs)
    return runs, pd.DataFrame({"variant": DDP, "run_id": runs["run_id"], "loss": logs})


@pytest.mark.parametrize(("held_out_rise", "sign"), [(-0.3, HOLDS), (0.1, HOLDS), (0.3, FAILS)])
def test_the_mean_training_loss_rises_as_steps_get_fewer_and_held_out_loss_need_not(
    held_out_rise, sign
):
    fitted, rise, held_out = hypotheses.mean_training_loss(*trainings(held_out_rise)).values()
    assert fitted.text == (
        "1.700 at batch 16, 1.800 at batch 32, 2.000 at batch 64: 1.60 + 100 / steps, off by "
        "0.00 ± 0.00 %"
    )
    assert fitted.sign == HOLDS
    assert rise == ("+0.30 ± 0.00", HOLDS)
    assert held_out.sign == sign


def test_a_seed_that_lacks_a_batch_does_not_count():
    runs, logs = trainings(0.0)
    fitted, *_ = hypotheses.mean_training_loss(runs[:-1], logs[:-1]).values()
    assert fitted.text.startswith("1.650 at batch 16"), "of the first two seeds"


def test_a_loss_that_does_not_follow_the_steps_is_off():
    runs, logs = trainings(0.0)
    bent = logs["loss"].where(runs["batch"] != 32, 2.2)
    fitted, *_ = hypotheses.mean_training_loss(runs, logs.assign(loss=bent)).values()
    assert fitted.sign == FAILS


# H5: polling.


def polled(variant, world, milliseconds, busy, answered=math.nan, batch=64):
    """A run whose step takes so long."""
    columns = {
        "time.step_ms.median": milliseconds,
        "speed.gpu_busy": busy,
        "speed.gpu_busy_polled": answered,
    }
    return variant, world, batch, 16, 100, columns


def test_polling_is_judged_on_the_most_gpus_on_which_both_ran():
    runs = gpu_runs(
        polled(DDP, 2, 60.0, 0.9),
        polled(DDP, 4, 70.0, 0.6),
        polled(DDP, 8, 1.0, 0.6),
        polled(POLLED, 2, 61.0, 0.9, 0.9),
        polled(POLLED, 4, 150.0, 0.2, 0.1),
    )
    slower, busy, answer = hypotheses.polling_takes_time(runs).values()
    assert slower == ("70.0 ms without, 150 with it, on 4 GPUs", HOLDS)
    assert busy == ("60.0 % without, 20.0 % with it", HOLDS)
    assert answer == ("10.0 %", HOLDS)


def test_polling_takes_both_at_one_batch():
    runs = gpu_runs(polled(DDP, 4, 70.0, 0.6), polled(POLLED, 4, 150.0, 0.2, 0.1, batch=128))
    refused("ran at no batch on as many GPUs", hypotheses.polling_takes_time, runs)


# H6: the noise scale.


def noisy(variant, seed, phi, commit="a", gradient=2.0, batch=128):
    """A run with that noise scale."""
    columns = {
        "spec.seed": seed,
        "code.commit": commit,
        "parallel.noise.sqr": gradient,
        "parallel.noise.var": gradient * phi,
    }
    return variant, 2, batch, 16, 100, columns


def test_noise_scales_are_compared_over_equal_seeds_of_one_code():
    phis = {"P-one-bucket": 100.0, "P-zero1": 101.0, "P-1f1b": 200.0}
    runs = [noisy(name, seed, (1 + seed) * phis[name]) for name in phis for seed in range(3)]
    of_other_code = noisy("P-zero1", 0, 9000.0, commit="b")
    of_other_batch = noisy("P-zero1", 0, 9000.0, batch=64)
    zero1, pipeline = hypotheses.same_noise_scale(
        gpu_runs(*runs, of_other_code, of_other_batch)
    ).items()
    assert zero1[0] == "P-zero1 within 25 % of P-one-bucket at batch 128"
    assert zero1[1].text.endswith(" against 200 samples: +1.0 ± 0.0 %")
    assert zero1[1].sign == HOLDS
    assert pipeline[1].text == "400 against 200 samples: +69.3 ± 0.0 %"
    assert pipeline[1].sign == FAILS


def test_a_run_whose_noise_hides_the_gradient_has_no_noise_scale():
    names = ("P-one-bucket", "P-zero1", "P-1f1b")
    runs = [noisy(name, seed, 100.0) for name in names for seed in range(3)]
    hidden = noisy("P-one-bucket", 3, 100.0, gradient=-2.0)
    parts = hypotheses.same_noise_scale(gpu_runs(*runs, hidden))
    assert signs_of(parts) == [HOLDS, HOLDS]
    all_hidden = [noisy(name, 0, 100.0, gradient=-2.0) for name in names]
    refused("P-one-bucket has no noise scale", hypotheses.same_noise_scale, gpu_runs(*all_hidden))


# H7: what a batch costs.


def test_a_batch_is_within_a_fifth_of_the_prediction_by_its_interval(monkeypatch):
    worth = pd.DataFrame(
        {
            "measured": [0.9, 0.5, 0.7],
            "measured±": [0.01, 0.01, 0.2],
            "predicted": [0.85, 0.8, 0.7],
        },
        index=[64, 128, 256],
    )
    monkeypatch.setattr(hypotheses.noise_scale, "batch_worth", lambda logs: (worth, 1.0))
    parts = hypotheses.batches_cost_as_predicted(pd.DataFrame())
    assert signs_of(parts) == [HOLDS, FAILS, OPEN]
    assert parts["batch 64 within 20 % of the prediction"].text == (
        "predicted 0.85, measured 0.90 ± 0.01"
    )


# The table.


def test_each_hypothesis_stands_once_before_its_parts_in_the_committed_records():
    groups = ("h200-critical-batch", "h200-parallel")
    table = hypotheses.hypotheses_table(committed(), *groups)
    firsts = [text[:3] for text in table["hypothesis"] if text]
    assert firsts == [f"H{number}:" for number in range(1, 8)]
    assert table["of it"].is_unique
    assert set(table["holds"]) <= {HOLDS, FAILS, OPEN}


def test_a_group_without_records_is_named():
    runs = committed()
    with pytest.raises(evidence.NotMeasured, match="group 'nothing' has no records"):
        hypotheses.hypotheses_table(runs, "h200-critical-batch", "nothing")
