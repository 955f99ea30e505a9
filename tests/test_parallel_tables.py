"""The tables and conclusions of several GPUs, on made-up runs."""

import math

import pandas as pd
import pytest

from qa_lib.lab.report import noise_scale, one_stack, parallel_tables, scaling
from tests.material import refused
from tests.report_runs import gpu_runs
from tests.test_one_stack import STACK, line


def conclude(runs, monkeypatch):
    """The four rules of the conclusions on runs; of batch 64 a sample teaches three quarters."""
    worth = pd.DataFrame({"measured": 0.75, "measured±": [math.nan], "predicted": 0.8}, index=[64])
    monkeypatch.setattr(noise_scale, "logs_of", lambda runs: runs)
    monkeypatch.setattr(noise_scale, "batch_worth", lambda logs: (worth, 1.0))
    text = parallel_tables.conclusions(runs, runs)
    return text.split("\n- ")


# Tables.


def test_variants_stand_in_the_order_of_their_table_with_what_they_change():
    runs = gpu_runs(line("P-1f1b", 2, 64, 1), line("P-ddp", 2, 64, 1), line("P-ddp", 4, 64, 1))
    table = parallel_tables.variants_table(runs)
    assert table["variant"].tolist() == ["P-ddp", "P-1f1b"]
    assert table["what it changes"].tolist()[1] == "P-gpipe + schedule: 1f1b"


@pytest.fixture
def three_seeds():
    """Three seeds of one GPU and of two, which have a step and a peak each."""
    runs = []
    for seed in range(3):
        columns = {
            "time.step_ms.median": 10.0 + seed,
            "memory.peak_alloc_mib": 2048.0,
            "parallel.allreduce_gbs": 300.0,
        }
        runs.append(line(STACK, 1, 512, 1000 + seed, batch=1024, seed=seed, **columns))
        runs.append(line("P-ddp", 2, 512, 1900 + 2 * seed, batch=1024, seed=seed, **columns))
    return gpu_runs(*runs)


def test_speed_and_efficiency_have_intervals_and_a_steps_duration_has_none(three_seeds):
    one, two = parallel_tables.speed_table(three_seeds).to_dict("records")
    assert two["samples/s"] == "1,902 ± 3"
    assert two["strong"] == "95.0 ± 0.0 %"
    assert two["step ms"] == "11.0"
    assert two["batch"] == "1,024"
    assert (one["one GPU"], two["one GPU"]) == ("–", STACK)


def test_only_a_pipeline_has_stages():
    runs = gpu_runs(line("P-ddp", 2, 64, 2000), line("P-1f1b", 2, 64, 1800))
    table = parallel_tables.speed_table(runs).set_index("variant")
    assert table["stages"].to_dict() == {"P-ddp": "–", "P-1f1b": "2"}


def test_memory_stands_in_gib_and_without_an_interval(three_seeds):
    table = parallel_tables.costs_table(three_seeds)
    assert table["peak GiB a GPU"].tolist() == ["2.00", "2.00"]
    assert table["all-reduce GB/s"].tolist() == ["300", "300"]
    assert "bubble" not in table, "which nothing here has"


def test_headings_on_a_cpu_are_about_processes(three_seeds):
    on_cpu = three_seeds.assign(**{"spec.hardware": "cpu"})
    table = parallel_tables.costs_table(on_cpu)
    assert "processes" in table
    assert "peak GiB a process" in table


# Conclusions.


def kinds(*runs):
    """The names and places of the two lines that are compared."""
    found = parallel_tables.quickest_of_each_kind(scaling.scaling(gpu_runs(*runs)))
    return [(one["variant"], one["world"], one["batch"]) for one in found]


def test_both_kinds_are_compared_on_the_most_gpus_at_the_smallest_batch():
    runs = []
    for world, batch in ((2, 64), (4, 128), (4, 512)):
        runs.append(line("P-ddp", world, 32, 2000, batch=batch))
        runs.append(line("P-1f1b", world, 32, 1800, batch=batch))
    assert kinds(*runs) == [("P-ddp", 4, 128), ("P-1f1b", 4, 128)]


def test_a_batch_of_one_kind_alone_is_not_compared():
    of_two = [line("P-ddp", 2, 64, 2000), line("P-tensor", 2, 64, 500)]
    alone = [line("P-ddp", 4, 64, 4000), line("P-1f1b", 4, 64, 3500, batch=1024)]
    assert kinds(*of_two, *alone) == [("P-ddp", 2, 512), ("P-tensor", 2, 512)]
    refused("no variant that divides the model ran on as many GPUs", kinds, *alone)


def test_the_quickest_of_each_kind_is_told_whatever_its_micro_batch():
    runs = [
        line("P-ddp", 2, 64, 2000),
        line("P-zero1", 2, 128, 2500),
        line("P-zero1", 2, 32, 1000),
        line("P-1f1b", 2, 64, 1800),
        line("P-tensor", 2, 64, 1900),
    ]
    assert kinds(*runs) == [("P-zero1", 2, 512), ("P-tensor", 2, 512)]


def test_the_pipeline_is_the_quickest_on_the_fewest_gpus_whose_memory_is_known():
    peak = {"memory.peak_alloc_mib": 4096.0}
    runs = gpu_runs(
        line("P-gpipe", 2, 64, 1700, **peak),
        line("P-1f1b", 2, 64, 1800, **peak),
        line("P-interleaved", 2, 64, 1900),
        line("P-1f1b", 4, 64, 3500, **peak),
    )
    found = parallel_tables.quickest_pipeline(scaling.scaling(runs))
    assert (found["variant"], found["world"]) == ("P-1f1b", 2)
    without = scaling.scaling(runs.drop(columns="memory.peak_alloc_mib"))
    refused("no pipeline has both", parallel_tables.quickest_pipeline, without)


def measured_runs(data_parallel_micro_batch):
    """One GPU, data parallelism at two micro-batches of which one is given, and a pipeline."""
    waits = {"parallel.bubble": 0.25, "parallel.bubble_formula": 0.2}

    def peak(gib):
        return {"memory.peak_alloc_mib": 1024.0 * gib}

    return gpu_runs(
        line(STACK, 1, 128, 1000, **peak(8)),
        line(STACK, 1, 128, 1000, batch=256, **peak(5)),
        line("P-ddp", 2, data_parallel_micro_batch, 1900, **peak(6)),
        line("P-1f1b", 2, 64, 1500, **peak(3), **waits),
    )


def test_the_conclusions_have_the_numbers_of_both_kinds(monkeypatch):
    whole, divided, batch, together = conclude(measured_runs(64), monkeypatch)
    assert "On 2 GPUs with 512 samples a step, P-ddp trains 1,900 samples/s,\n" in whole
    assert whole.endswith(
        "and P-1f1b, which divides the model, 1,500: 95.0 % and\n"
        "  75.0 % of what as many GPUs make alone."
    )
    assert "P-1f1b on 2 GPUs takes 3.00 GiB a GPU at batch 512 and micro-batch 64, and" in divided
    assert divided.endswith(
        "With P-1f1b at 512 samples a GPU waits for 25.0 % of a step, 20.0 % by the formula."
    )
    assert batch.endswith("  32 has efficiency 1, batch 64 has 0.75 (0.80 by φ).")
    assert together.endswith("Each step takes 512 samples.")


def test_where_no_memory_can_be_compared_that_of_one_gpu_is_told(monkeypatch):
    runs = measured_runs(128)
    refused("no pipeline ran at a micro-batch", one_stack.memory_finding, runs)
    _, divided, _, _ = conclude(runs, monkeypatch)
    assert (
        "This model fits: P-1f1b on 2 GPUs peaks at 3.00 GiB a GPU, where one takes 8.00 for the "
        "same 512 samples"
    ) in divided


def test_without_trainings_at_several_batches_nothing_is_concluded():
    runs = measured_runs(64)
    refused("more than 100 steps", parallel_tables.conclusions, runs, runs)
