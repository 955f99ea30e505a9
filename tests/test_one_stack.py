"""Pipelines beside data parallelism of one stack, and the slides' claim, on made-up records."""

import dataclasses
import itertools
import math
import types

import pandas as pd
import pytest

from qa_lib.data.synthetic import TINY_CONFIG
from qa_lib.lab.report import one_stack, style
from qa_lib.lab.report.stats import FAILS, HOLDS, OPEN
from qa_lib.lab.search.plan import plan
from tests.material import refused
from tests.report_runs import gpu_runs
from tests.tiny import H200

STACK = "E-masters-eager"  # of pipelines


def log_to(loss: float):
    """A run whose last 20 of 40 steps have that loss."""
    steps = pd.DataFrame({"step": range(1, 41), "loss": [9.0] * 20 + [loss] * 20})
    return types.SimpleNamespace(steps=lambda: steps)


def line(variant, world, micro_batch, speed, *, seed=0, batch=512, loss=2.0, **more):
    """A run of `gpu_runs`; a pipeline goes through all GPUs."""
    is_pipeline = variant in ("P-gpipe", "P-1f1b", "P-interleaved")
    columns = {
        "group": "h200-parallel",
        "task.name": "qa",
        "env.gpu": "NVIDIA H200",
        "code.dirty": False,
        "spec.seed": seed,
        "stages": world if is_pipeline else 1,
        "run": log_to(loss),
        **more,
    }
    return variant, world, batch, micro_batch, speed, columns


@pytest.fixture
def runs():
    """On two GPUs P-1f1b trains 0.9 times as fast as P-ddp, and 1.8 times as fast as one."""
    step = {"time.step_ms.median": 100.0}
    return gpu_runs(
        line(STACK, 1, 128, 1000),
        line("P-ddp", 2, 64, 1500, **{"memory.peak_alloc_mib": 6000.0}),
        line("P-ddp", 2, 128, 2000, **step, **{"parallel.exposed_ms": 5.0}),
        line("P-1f1b", 2, 32, 1700),
        line(
            "P-1f1b",
            2,
            64,
            1800,
            loss=2.5,
            **step,
            **{"parallel.bubble": 0.2, "memory.peak_alloc_mib": 4500.0},
        ),
    )


def test_each_variant_stands_at_its_quickest_micro_batch(runs):
    lines = one_stack.side_by_side(runs)
    assert lines["variant"].tolist() == ["P-ddp", "P-1f1b"]
    assert lines["micro_batch"].tolist() == [128, 64]


def test_a_pipelines_gain_is_over_data_parallelism_and_over_one_gpu(runs):
    line = one_stack.side_by_side(runs).set_index("variant").loc["P-1f1b"]
    assert line["gain"] == pytest.approx(0.9)
    assert line["over_one"] == pytest.approx(1.8)


def test_memory_is_compared_at_one_micro_batch(runs):
    """Data parallelism is quickest at another one."""
    line = one_stack.side_by_side(runs).set_index("variant").loc["P-1f1b"]
    assert line["memory"] == pytest.approx(4500 / 6000)
    said = one_stack.memory_finding(runs)
    assert said.startswith("P-1f1b on 2 GPUs takes 4.39 GiB a GPU at batch 512 and micro-batch 64")
    assert said.endswith("and data parallelism 5.86 (model: bert)")


def test_of_several_models_the_one_is_told_for_which_a_pipeline_saves_most(runs):
    longer = runs.assign(**{"model": "bert-of-48-layers", "run_id": runs["run_id"] + "-long"})
    is_pipeline = longer["spec.variant"] == "P-1f1b"
    peak = longer["memory.peak_alloc_mib"]
    longer["memory.peak_alloc_mib"] = peak.mask(is_pipeline, peak / 2)
    said = one_stack.memory_finding(pd.concat([runs, longer], ignore_index=True))
    assert said.endswith("data parallelism 5.86 (model: bert-of-48-layers)")


def test_memory_without_records_is_not_told():
    refused("no pipeline ran", one_stack.memory_finding, gpu_runs(line("P-ddp", 2, 64, 2000)))


def test_runs_of_another_stack_with_another_model_do_not_hide_those_of_pipelines(runs):
    others = [line("P-one-bucket", 2, 32, 100, seed=n, model="another") for n in range(9)]
    every = pd.concat([gpu_runs(*others), runs], ignore_index=True)
    every["run_id"] = every.index.map(str)
    assert one_stack.side_by_side(every)["variant"].tolist() == ["P-ddp", "P-1f1b"]


def test_what_a_gpu_computes_is_told_of_both(runs):
    computes = one_stack.side_by_side(runs).set_index("variant")["computes"]
    assert computes.to_dict() == {"P-ddp": pytest.approx(0.95), "P-1f1b": pytest.approx(0.8)}


def test_a_gpu_that_idles_is_told_to_compute_no_longer_than_it_was_seen_to():
    step = {"time.step_ms.median": 100.0, "parallel.exposed_ms": 5.0, "parallel.busy_ms": 80.0}
    runs = gpu_runs(line("P-ddp", 2, 64, 2000, **step), line("P-1f1b", 2, 64, 1800))
    computes = one_stack.side_by_side(runs).set_index("variant")["computes"]
    assert computes["P-ddp"] == pytest.approx(0.80)


def test_the_loss_is_that_of_the_last_steps(runs):
    losses = one_stack.side_by_side(runs).set_index("variant")["loss"]
    assert losses.to_dict() == {"P-ddp": 2.0, "P-1f1b": 2.5}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(line("P-1f1b", 4, 64, 1800), id="more GPUs"),
        pytest.param(line("P-1f1b", 2, 64, 1800, batch=128), id="another batch"),
        pytest.param(line("P-one-bucket", 2, 64, 1800), id="another stack"),
        pytest.param(line("P-1f1b", 4, 64, 1800, stages=2), id="pipelines beside each other"),
    ],
)
def test_what_differs_in_more_than_the_kind_is_not_compared(other):
    runs = gpu_runs(line("P-ddp", 2, 64, 2000), other)
    if other[0] == "P-one-bucket":
        runs = gpu_runs(line("P-1f1b", 2, 64, 2000), other)
    refused("no data parallelism and pipeline of one stack", one_stack.side_by_side, runs)


def test_the_table_has_a_line_a_variant(runs):
    table = one_stack.table_of(runs).set_index("variant")
    assert table.loc["P-1f1b", "samples/s"] == "1,800"
    assert table.loc["P-1f1b", "× data parallelism"] == "0.90"
    assert table.loc["P-1f1b", "computes"] == "80.0 %"


def test_the_picture_says_how_quick_the_quickest_pipeline_is(runs):
    with style.style():
        figure = one_stack.fig_pipelines(runs)
    assert style.title_of(figure) == "On 2 GPUs at batch 512 P-1f1b trains ×0.90 as fast as P-ddp"
    assert len(figure.axes) == 3
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["P-ddp, 2 GPUs, batch 512, n = 1", "P-1f1b, 2 GPUs, batch 512, n = 1"]
    assert "Fewer than 3 have no interval" in figure.get_supxlabel()


def test_the_picture_has_the_colours_of_all_pages(runs):
    figure = one_stack.fig_pipelines(runs)
    colors = {bar.get_facecolor()[:3] for axis in figure.axes for bar in axis.patches}
    assert colors == {style.BLUE}


# The verdict on the slides' ×1.85 on two GPUs and ×3.06 on four.


def seeds(variant, world, speed):
    """Three runs of one speed."""
    return [line(variant, world, 64, speed + seed, seed=seed) for seed in range(3)]


def found(runs) -> dict:
    """The verdicts, by the part of the claim."""
    return {part: told for _, part, _, told in one_stack.speed_claims(runs)}


def test_without_records_the_claim_cannot_be_told():
    runs = gpu_runs(line("P-ddp", 2, 64, 2000))
    assert {told.text for told in found(runs).values()} == {one_stack.NOTHING}
    assert {told.sign for told in found(runs).values()} == {one_stack.CANNOT_TELL}


@pytest.mark.parametrize(("speed", "sign"), [(1850, HOLDS), (900, FAILS), (1670, OPEN)])
def test_a_pipeline_agrees_with_the_slides_within_a_tenth(speed, sign):
    runs = gpu_runs(
        *seeds(STACK, 1, 1000),
        *seeds("P-ddp", 2, 2000),
        *[line("P-1f1b", 2, 64, speed + 40 * (seed - 1), seed=seed) for seed in range(3)],
    )
    told = found(runs)["2 GPUs, over one GPU"]
    assert told.sign == sign
    assert told.text.startswith(f"P-1f1b ×{speed / 1001:.2f} ±")


def test_over_as_many_gpus_of_data_parallelism_another_ratio_is_judged():
    runs = gpu_runs(*seeds(STACK, 1, 1000), *seeds("P-ddp", 4, 3900), *seeds("P-1f1b", 4, 3060))
    told = found(runs)
    assert told["4 GPUs, over one GPU"].sign == HOLDS
    assert told["4 GPUs, over data parallelism on as many"].sign == FAILS
    assert told["2 GPUs, over one GPU"].sign == one_stack.CANNOT_TELL


def test_theirs_are_ratios_of_the_slides_samples_a_second(runs):
    claims = [theirs for _, _, theirs, _ in one_stack.speed_claims(runs)]
    assert claims == ["×1.85", "×3.06"] * 2


def test_a_gain_over_other_seeds_has_no_interval(runs):
    assert math.isnan(one_stack.side_by_side(runs)["gain±"].iloc[-1])


# The command that makes the records.


def test_one_sweep_plans_both_kinds_at_every_place_and_leaves_out_what_divides_no_step(monkeypatch):
    monkeypatch.setitem(TINY_CONFIG, "num_hidden_layers", 12)
    left_out = []
    specs = plan(
        [STACK, "P-ddp", "P-gpipe", "P-1f1b", "P-interleaved"],
        "parallel",
        data="synthetic:40",
        model="tiny",
        machine=dataclasses.replace(H200, gpus=4),
        world=[1, 2, 4],
        batch=[128, 512],
        micro_batch=[32, 64, 128],
        left_out=left_out,
    )
    runs = [spec for spec in specs if not spec.skip]
    kinds = {(spec.world, spec.preset.batch, one_stack.kind_of(spec.variant)) for spec in runs}
    for world, batch in itertools.product([2, 4], [128, 512]):
        assert {(world, batch, "pipeline"), (world, batch, "data parallelism")} <= kinds
    skipped = {(spec.variant, spec.world) for spec in specs if spec.skip}
    assert skipped == {("P-interleaved", 4)}
    assert any("do not divide" in sentence for sentence in left_out)
