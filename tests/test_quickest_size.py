"""The micro-batch that `plan` chooses for one's own trainings, on made-up machines."""

import dataclasses
import math
from unittest.mock import Mock

import pytest
from transformers import BertConfig

from qa_lib.data.tokenize import build_tokenizer
from qa_lib.lab import sweep
from qa_lib.lab.search import sizes as search_sizes
from qa_lib.lab.search.memory_estimate import MemoryNeeds
from qa_lib.lab.search.plan import plan
from qa_lib.lab.search.sizes import (
    CardMemory,
    at_micro_batch,
    kept_micro_batch,
    quickest_first,
    shared_size,
)
from qa_lib.lab.sweep import notebook_parameters
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import QUICKEST
from tests.material import leave, refused
from tests.tiny import CPU, checkpoint


def card(name: str, sm: int, gib: float, free: float = 0.1, gpus: int = 1) -> Machine:
    """A machine whose first card has so much memory, of which a share is free."""
    sizes = {"total_mib": int(1024 * gib), "free_mib": int(1024 * gib * free)}
    return dataclasses.replace(CPU, hardware=name, gpus=gpus, sm=sm, **sizes)


T4 = card("t4", 75, 14.6)
H100 = card("h100-80gb-hbm3", 90, 79)
SMALL = card("rtx-3050", 86, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of BERT-base and BERT-large, without weights, which no plan reads."""
    large = BertConfig(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    )
    configs = {"base": BertConfig(), "large": large}
    folders = {}
    for name, config in configs.items():
        folders[name] = str(tmp_path_factory.mktemp(name))
        config.save_pretrained(folders[name])
        build_tokenizer("tiny").save_pretrained(folders[name])
    return folders


@pytest.fixture
def planned(models, tmp_path):
    """`plan` of one's own training, with a runs folder of this test."""

    def call(variants, machine, preset="local", model="base", **own):
        return plan(
            variants,
            preset,
            data="synthetic:400",
            model=models[model],
            machine=machine,
            runs=tmp_path,
            **own,
        )

    return call


def sizes(specs):
    return [spec.asked.micro_batch for spec in specs]


@pytest.mark.parametrize("preset", QUICKEST)
@pytest.mark.parametrize(
    ("variant", "machine"), [("E-uncompiled", H100), ("E-t4-norm", T4), ("A1", T4)]
)
def test_a_variant_that_is_named_takes_the_quickest_size_that_fits(
    variant, machine, preset, planned
):
    """By the whole memory, though next to nothing is free; and the effective batch stays."""
    (spec,) = planned([variant], machine, preset)
    assert (spec.asked.micro_batch, spec.settings.micro_batch) == (32, 32)
    assert spec.preset.batch == 32
    assert spec.adjusted[0].startswith(
        f"micro-batch 32: the quickest that fits on {machine.hardware} ({variant}: "
    )
    assert len(spec.adjusted[0]) <= 94


def test_the_size_is_as_one_that_was_asked_for(planned, tmp_path):
    """The id holds it, and a sweep's notebook is told it."""
    (chosen,) = planned(["A1"], H100)
    (asked,) = planned(["A1"], H100, micro_batch=32)
    assert chosen.hash == asked.hash
    assert chosen.own == {"micro_batch": 32}
    assert notebook_parameters(chosen, tmp_path)["micro_batch"] == 32


def test_a_spec_says_that_its_size_was_chosen(planned):
    (chosen,) = planned(["A1"], H100)
    (asked,) = planned(["A1"], H100, micro_batch=32)
    assert chosen.chosen == ["micro_batch"]
    assert not chosen.recommended
    assert asked.chosen == []


def test_the_size_does_not_depend_on_what_is_free(planned):
    (on_busy,) = planned(["A1"], card("t4", 75, 14.6, free=0.01))
    (on_idle,) = planned(["A1"], card("t4", 75, 14.6, free=1.0))
    assert on_busy.hash == on_idle.hash


def test_a_larger_model_gets_a_smaller_size(planned):
    assert sizes(planned(["A1"], T4, model="large")) == [8]


def test_where_not_even_the_smallest_size_fits_it_is_taken_with_a_warning(planned):
    (spec,) = planned(["A1"], card("gt-1030", 75, 1), model="large")
    assert spec.asked.micro_batch == 1
    assert spec.adjusted[0] == "micro-batch 1: even that may not fit on gt-1030"


def test_all_variants_of_a_plan_get_one_size(planned):
    """A1 writes the scores of attention to memory, and so decides."""
    assert sizes(planned(["A4"], SMALL)) > sizes(planned(["A1"], SMALL))
    together = planned(["A4", "A1"], SMALL, seeds=[0, 1])
    assert sizes(together) == 4 * sizes(planned(["A1"], SMALL))
    assert len({spec.adjusted[0] for spec in together}) == 1


def test_a_variant_that_fits_at_no_size_does_not_slow_the_others(planned, monkeypatch):
    predicted = MemoryNeeds.gib

    def gib(self, spec):
        return 99.0 if spec.variant == "A1" else predicted(self, spec)

    monkeypatch.setattr(MemoryNeeds, "gib", gib)
    assert sizes(planned(["A1", "A4"], SMALL)) == 2 * sizes(planned(["A4"], SMALL))


def test_parallel_variants_divide_the_batch_by_their_processes(planned):
    several = card("h100-80gb-hbm3", 90, 79, gpus=8)
    assert sizes(planned(["P1"], several)) == [16]
    assert sizes(planned(["P1"], several, world=8)) == [4]
    assert sizes(planned(["A1", "P1"], several)) == [16, 16]
    assert sizes(planned(["A1", "P1"], H100)) == [32, 8], "P1, which is skipped, decides nothing"


@pytest.mark.parametrize(
    ("batch", "size"), [(4, 4), (12, 12), (64, 64), (48, 48), ([8, 32], 8), ([32, 48], 16)]
)
def test_a_batch_of_ones_own_is_divided(batch, size, planned):
    specs = planned(["A1"], H100, batch=batch)
    assert set(sizes(specs)) == {size}


def test_a_size_that_was_asked_for_stays(planned):
    (spec,) = planned(["A1"], H100, micro_batch=4)
    assert spec.asked.micro_batch == 4
    assert not spec.chosen
    assert sizes(planned(["A1"], H100, micro_batch=[8, 16])) == [8, 16]


def test_a_size_that_does_not_divide_the_batch_is_refused(planned):
    refused("does not divide", planned, ["A1"], H100, micro_batch=24)


@pytest.mark.parametrize("preset", ["smoke", "bench", "sizing", "vram", "speedrun", "minutes"])
def test_presets_of_the_reference_project_keep_its_size(preset, planned):
    (spec,) = planned(["A1"], H100, preset)
    assert spec.asked.micro_batch == 8
    assert not spec.chosen
    assert not spec.adjusted


@pytest.mark.parametrize("machine", [CPU, dataclasses.replace(T4, total_mib=0, free_mib=0)])
def test_where_memory_is_not_known_the_size_stays(machine, planned):
    (spec,) = planned(["A1"], machine)
    assert spec.asked.micro_batch == 8
    assert spec.own == {}
    assert not spec.chosen


def test_where_memory_is_not_predicted_the_size_stays_and_one_line_says_why(planned, tmp_path):
    model = checkpoint("modernbert", tmp_path / "modern")
    (spec,) = plan(["A1"], "local", data="synthetic:80", model=model, machine=H100, runs=tmp_path)
    assert spec.asked.micro_batch == 8
    assert "modernbert" in spec.adjusted[0]
    assert "--micro-batch" in spec.adjusted[0]


def test_on_a_cpu_a_batch_that_8_does_not_divide_is_divided(planned):
    (spec,) = planned(["A1"], CPU, batch=12)
    assert spec.asked.micro_batch == 6
    assert "micro-batch 6: the largest up to 8" in spec.adjusted[0]


@pytest.mark.parametrize("status", ["ok", "killed", "error", "running"])
@pytest.mark.parametrize("machine", [H100, CPU])
def test_a_run_that_is_there_keeps_its_size(status, machine, planned, tmp_path):
    (there,) = planned(["A1"], machine, micro_batch=4, epochs=1)
    leave(tmp_path, there, status)
    (same,) = planned(["A1"], machine, epochs=1)
    assert same.run_path == there.run_path
    assert same.adjusted[0].startswith("micro-batch 4: that of ")


@pytest.mark.parametrize(
    "other", [{"epochs": 2}, {"epochs": 1, "seeds": [1]}, {"epochs": 1, "model": "large"}]
)
@pytest.mark.parametrize(("machine", "usual"), [(H100, 32), (CPU, 8)])
def test_a_run_that_is_there_decides_for_no_other(machine, usual, other, planned, tmp_path):
    (there,) = planned(["A1"], machine, micro_batch=4, epochs=1)
    leave(tmp_path, there)
    assert sizes(planned(["A1"], machine, **other)) == [usual]


def test_a_run_at_the_usual_size_is_nothing_to_speak_of_on_a_cpu(planned, tmp_path):
    leave(tmp_path, planned(["A1"], CPU)[0])
    (spec,) = planned(["A1"], CPU)
    assert spec.own == {}
    assert not spec.chosen
    assert not any(line.startswith("micro-batch") for line in spec.adjusted)


def test_the_variants_beside_a_run_that_is_there_take_its_size(planned, tmp_path):
    leave(tmp_path, planned(["A1"], H100, micro_batch=16)[0])
    assert sizes(planned(["A1", "A4"], H100, seeds=[0, 1])) == [16] * 4


def test_of_several_runs_one_that_ended_ok_keeps_its_size_and_else_the_last(planned, tmp_path):
    def leave_at(size, status, day):
        (spec,) = planned(["A1"], CPU, micro_batch=size)
        leave(tmp_path, spec, status, time={"started": f"2026-01-0{day}T00:00:00+00:00"})

    leave_at(4, "killed", day=2)
    leave_at(16, "error", day=1)
    assert sizes(planned(["A1"], CPU)) == [4]
    leave_at(2, "ok", day=1)
    assert sizes(planned(["A1"], CPU)) == [2]
    leave_at(1, "killed", day=3)
    assert sizes(planned(["A1"], CPU)) == [2]


def test_the_size_that_most_runs_have_already_is_taken(planned, tmp_path):
    for variant, size in {"A1": 4, "A2": 8, "A3": 8}.items():
        leave(tmp_path, planned([variant], H100, micro_batch=size)[0])
    (new,) = (spec for spec in planned(["A1", "A2", "A3", "A4"], H100) if spec.variant == "A4")
    assert new.asked.micro_batch == 8


def test_a_run_is_found_in_a_folder_whose_name_has_signs_of_patterns(planned, tmp_path):
    (spec,) = planned(["A1"], H100, micro_batch=4)
    runs = tmp_path / "runs [1]*"
    leave(runs, spec)
    assert kept_micro_batch(spec, H100, runs) == 4


def test_a_run_that_its_model_cannot_have_is_skipped_at_every_size(planned):
    (spec,) = planned(["A1"], H100, micro_batch=4)
    spec = dataclasses.replace(spec, skip="does not fit")
    assert at_micro_batch(spec, 8, H100).skip == "does not fit"


def test_a_size_of_runs_that_no_variant_can_have_here_is_not_taken(planned, tmp_path):
    (spec,) = planned(["A1"], H100, micro_batch=4)
    shared = shared_size([spec], [5], math.inf, H100, tmp_path)
    assert 32 % shared.micro_batch == 0


def test_memory_that_ran_out_at_one_length_says_nothing_of_another(planned, tmp_path, monkeypatch):
    long, short = (planned(["A1"], H100, micro_batch=4, max_length=n)[0] for n in (384, 128))
    ran_out = {"status": "oom"}
    monkeypatch.setattr(search_sizes, "failure_of", lambda spec, failed: failed and "ran out")
    monkeypatch.setattr(
        search_sizes, "failed_records", lambda spec, _: [ran_out] if spec == long else []
    )
    memory = CardMemory(H100, tmp_path)
    memory._needs = Mock(gib=lambda spec: 1.0)
    assert [memory.needed(spec) for spec in (long, short, long)] == [math.inf, 1.0, math.inf]


def test_a_card_whose_whole_memory_is_not_known_has_at_least_what_is_free(tmp_path):
    known = CardMemory(dataclasses.replace(T4, total_mib=4096, free_mib=1024), tmp_path)
    unknown = CardMemory(dataclasses.replace(T4, total_mib=0, free_mib=1024), tmp_path)
    assert (known.gib, unknown.gib) == (4.0, 1.0)


def test_a_tenth_of_a_card_is_left_for_errors_of_the_estimate(tmp_path):
    memory = CardMemory(dataclasses.replace(T4, total_mib=10 * 1024), tmp_path)
    assert memory.holds(9.0)
    assert not memory.holds(9.01)


def speeds(by_size):
    """Records of runs at these micro-batches, each with its samples/s."""
    return [
        {"spec": {"settings": {"micro_batch": size}}, "speed": {"samples_per_s": speed}}
        for size, speed in by_size.items()
    ]


@pytest.mark.parametrize(
    ("by_variant", "order"),
    [
        ([{8: 10.0}], [32, 16, 8, 4]),
        ([{16: 10.0}, {8: None}], [32, 16, 8, 4]),
        ([{8: 10.0, 32: 8.0}], [8, 16, 32, 4]),
        # The slow variant decides, whose times are the longer ones.
        ([{8: 100.0, 32: 200.0}, {8: 2.0, 32: 1.0}], [8, 16, 32, 4]),
        ([{8: 2.0, 32: 1.0}, {8: 100.0, 32: 200.0}], [8, 16, 32, 4]),
    ],
)
def test_sizes_are_in_the_order_of_the_seconds_that_all_variants_take(by_variant, order):
    assert quickest_first([32, 16, 8, 4], [speeds(by_size) for by_size in by_variant]) == order


def test_sizes_that_do_not_go_together_are_told_where_a_list_is_given(planned):
    told = ["before"]
    specs = planned(["A1"], CPU, batch=[8, 12], micro_batch=[8, 6], left_out=told)
    assert [(spec.preset.batch, spec.asked.micro_batch) for spec in specs] == [(8, 8), (12, 6)]
    assert told[0] == "before"
    assert len(told) > 1
    assert all("does not divide" in sentence for sentence in told[1:])


def test_a_run_that_ran_out_of_memory_gives_way_to_a_smaller_size(planned, tmp_path):
    leave(tmp_path, planned(["A1"], H100)[0], "oom", {"kind": "OutOfMemoryError", "step": 2})
    assert sizes(planned(["A1"], H100)) == [16]
    assert sizes(planned(["A1"], card("h200", 90, 140))) == [32], "nothing is known of that card"


@pytest.fixture
def by_samples(monkeypatch):
    """Every variant takes 1 GiB, and 0.1 GiB a sample."""

    def gib(self, spec):
        return 1 + 0.1 * spec.asked.micro_batch

    monkeypatch.setattr(MemoryNeeds, "gib", gib)


def test_variants_beside_a_recommended_one_take_no_larger_size(planned, by_samples):
    """The recommended one is chosen by what is free."""
    tight = dataclasses.replace(H100, free_mib=3 * 1024)
    assert sizes(planned(["A1"], tight)) == [32]
    assert sizes(planned(["A1", "recommended"], tight)) == [16, 16]


def test_a_recommended_run_takes_the_size_of_the_variants_beside_it(planned):
    idle = dataclasses.replace(SMALL, free_mib=SMALL.total_mib)
    (named,) = planned(["A1"], idle)
    first, second = planned(["A1", "recommended"], idle)
    assert sizes(planned(["recommended"], idle))[0] > named.asked.micro_batch
    assert sizes([first, second]) == 2 * sizes([named])
    assert second.chosen == ["variant", "micro_batch"]


def test_a_recommended_run_that_is_finished_stays_the_choice_on_a_busy_card(
    planned, by_samples, tmp_path
):
    idle = dataclasses.replace(H100, free_mib=1024 * 79)
    busy = dataclasses.replace(H100, free_mib=1024 * 3)
    (there,) = planned(["recommended"], idle)
    assert planned(["recommended"], busy)[0].run_path != there.run_path
    leave(tmp_path, there)
    (same,) = planned(["recommended"], busy)
    assert same.run_path == there.run_path
    assert "which is finished" in same.adjusted[0]


IDLE_H100 = dataclasses.replace(H100, free_mib=H100.total_mib)


@pytest.mark.parametrize(("machine", "choice"), [(IDLE_H100, "E-fp8-gradients"), (CPU, "A4")])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_choice_that_is_named_as_well_stays_a_choice(machine, choice, is_first, planned):
    """Else nothing would take its place where it fails."""
    names = ["recommended", choice] if is_first else [choice, "recommended"]
    (spec,) = planned(names, machine)
    assert spec.variant == choice
    assert spec.recommended
    assert spec.adjusted[0].startswith("recommended: ")


@pytest.mark.parametrize(("launcher", "probe"), [("local", "probe"), ("slurm", "probe_node")])
def test_a_sweep_says_its_size_once_within_100_columns(
    launcher, probe, models, tmp_path, monkeypatch, typed
):
    """Slurm's probe gives a machine as the local one does."""
    monkeypatch.setattr(sweep, probe, lambda *_: (H100, {}))
    words = f"--variants A1,A4 --seeds 0,1 --data synthetic:400 --model {models['base']}"
    out = typed(f"sweep --plan --launcher {launcher} --runs {tmp_path} {words}")
    assert out.startswith("micro-batch 32: ")
    assert out.count("the quickest that fits") == 1
    assert out.count("run, micro-batch 32\n") == 4
    assert max(map(len, out.splitlines())) <= 100


def test_a_node_that_was_probed_has_its_whole_memory():
    """The probe hands a machine on as JSON."""
    fields = dataclasses.asdict(T4)
    assert fields["total_mib"] == 14950
    assert Machine(**fields) == T4
