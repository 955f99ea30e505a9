"""`recommended`: what is chosen for made-up machines, and what replaces a choice that fails."""

import dataclasses
import importlib
import math
import pkgutil
from functools import cache, partial
from unittest.mock import Mock

import pytest
import torch
from transformers import BertConfig, DistilBertConfig

import qa_lib
from qa_lib.__main__ import main
from qa_lib.data.files import DataError
from qa_lib.errors import UserError
from qa_lib.lab import sweep
from qa_lib.lab.launch import anywhere
from qa_lib.lab.launch import local as launch
from qa_lib.lab.launch.recommended import run_in_turn
from qa_lib.lab.report import evidence
from qa_lib.lab.report.stats import BASELINE, MARGIN, equivalence
from qa_lib.lab.search import history, recommend
from qa_lib.lab.search.memory_estimate import MemoryNeeds
from qa_lib.lab.search.plan import plan
from qa_lib.lab.search.recommend import choose, open_sizes
from qa_lib.measure import hardware
from qa_lib.records import record
from qa_lib.run import recording
from qa_lib.run.plan import make_request
from qa_lib.run.plan import plan as plan_request
from qa_lib.spec.machine import Machine
from qa_lib.spec.recipes import find_recipe
from qa_lib.spec.resolve import resolve
from qa_lib.spec.settings import Settings
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import VARIANTS, Variant
from qa_lib.train.step_log import StepFailed
from tests import faulty, small  # noqa: F401, which has the preset
from tests.conftest import slow
from tests.material import committed, leave, refused, write
from tests.tiny import CPU, checkpoint, planned


def card(name: str, sm: int, gib: float, gpus: int = 1, **more) -> Machine:
    """A machine with a GPU of which so much memory is free."""
    return dataclasses.replace(
        CPU, hardware=name, gpus=gpus, sm=sm, free_mib=int(1024 * gib), **more
    )


T4 = card("t4", 75, 14.6)
V100 = card("v100", 70, 15.7)
P100_WITHOUT_COMPILER = card("p100", 60, 15.9, compiler=False)
A100 = card("a100-sxm4-40gb", 80, 39)
RTX_3050 = card("rtx-3050", 86, 2.5)
L4 = card("l4", 89, 22)
RTX_4090 = card("rtx-4090", 89, 23.5)
H100 = card("h100-80gb-hbm3", 90, 79)
H100_UNKNOWN_MEMORY = card("h100-80gb-hbm3", 90, 0)
H100_WITHOUT_COMPILER = card("h100", 90, 79, compiler=False)
CPU_WITHOUT_COMPILER = dataclasses.replace(CPU, compiler=False)

CONFIGS = {
    "large": BertConfig(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
    ),
    "minilm": BertConfig(
        num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536
    ),
    "distilbert": DistilBertConfig(),
}


@cache
def committed_in(folder, task, group):
    """The committed records of a folder by variant, read once."""
    return history.committed_records(task, group)


@pytest.fixture(autouse=True)
def reads_committed_records_once(monkeypatch):
    """Keep the committed records, which each choice would read for a fifth of a second."""

    def committed_records(task, group=None):
        return committed_in(history.COMMITTED, task, group)

    monkeypatch.setattr(recommend, "committed_records", committed_records)


@pytest.fixture
def models(tmp_path):
    """The models' folders, by name."""
    folders = {"base": "bert-base-uncased"}
    for name, config in CONFIGS.items():
        folders[name] = str(tmp_path / name)
        config.save_pretrained(folders[name])
    return folders


def unchosen(machine, model="bert-base-uncased", preset="full", **own):
    """What `plan` hands on, without asking the hub for SQuAD."""
    return resolve(
        variant="recommended",
        preset=preset,
        seed=0,
        machine=machine,
        data={"name": "squad_v2", "sha256": "0"},
        model={"name": model, "revision": "0"},
        data_source="squad_v2",
        model_source=model,
        **own,
    )


def chosen(machine, runs, *model, **own):
    """The variant, the micro-batch and the sentence of a choice."""
    spec = choose(unchosen(machine, *model, **own), machine, runs)
    return spec.variant, spec.settings.micro_batch, spec.adjusted[0]


def leave_end(spec, runs, status, kind=None, step=None):
    """A record of a run of that spec that ended so."""
    error = {"kind": kind, "message": f"what {kind} says", "step": step}
    return record.read_record(leave(runs, spec, status, error))


# What is chosen.

CHOICES = [
    (T4, "base", "E-t4-norm", 32,
     "on t4, since E-uncompiled needs a GPU of compute capability 8.0 or newer"),
    (T4, "large", "E-t4-norm", 32, "of 14.6 GiB that are free"),
    (T4, "minilm", "E-t4-norm", 32, "predicted: 1."),
    (T4, "distilbert", "E-t4-norm", 32, "predicted: 2.4 of 14.6 GiB"),
    (A100, "base", "E-uncompiled", 32,
     "on a100-sxm4-40gb, since E-fp8-gradients needs a GPU of compute capability 8.9"),
    (A100, "large", "E-uncompiled", 32, "of 39.0 GiB"),
    (L4, "base", "E-fp8-gradients", 32, "on l4, the quickest known; predicted: 2.9"),
    (RTX_4090, "large", "E-fp8-gradients", 32, "on rtx-4090, the quickest known"),
    (H100, "base", "E-fp8-gradients", 32, "the quickest known"),
    (H100_UNKNOWN_MEMORY, "base", "E-fp8-gradients", 32, "on h100-80gb-hbm3, the quickest known"),
    (V100, "base", "E-t4", 32, "since E-masters needs"),
    (H100_WITHOUT_COMPILER, "base", "A2", 32, "since A4 torch.compile needs"),
    (P100_WITHOUT_COMPILER, "large", "A2", 16, "A2 at micro-batch 32 would take 18.0 of 15.9"),
    (RTX_3050, "base", "E-uncompiled", 8, "since E-uncompiled at micro-batch 16 would take 2."),
    (CPU, "large", "A4", 8, "on cpu, the first of a list for CPUs"),
    (CPU_WITHOUT_COMPILER, "base", "A2", 8, "since A4 torch.compile needs a C++ compiler"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "model", "variant", "size", "why"), CHOICES)
def test_a_machine_gets_the_quickest_that_it_runs_and_that_fits(
    machine, model, variant, size, why, models, tmp_path
):
    *choice, sentence = chosen(machine, tmp_path, models[model])
    assert choice == [variant, size]
    start = f"recommended: {variant} at micro-batch {size} on {machine.hardware}, "
    assert sentence.startswith(start)
    assert why in sentence
    assert "\n" not in sentence


def test_a_size_that_was_asked_for_stays(tmp_path):
    assert chosen(T4, tmp_path, micro_batch=8)[:2] == ("E-t4-norm", 8)


@pytest.mark.parametrize(
    ("free_mib", "choice"), [(T4.free_mib, ("E-uncompiled", 48)), (2900, ("E-uncompiled", 12))]
)
def test_a_batch_of_ones_own_is_divided(free_mib, choice, tmp_path):
    machine = dataclasses.replace(A100, free_mib=free_mib)
    assert chosen(machine, tmp_path, batch=48)[:2] == choice


def test_a_size_that_was_asked_for_and_does_not_fit_is_refused(tmp_path):
    tight = dataclasses.replace(A100, free_mib=2900)
    refused("E-uncompiled at micro-batch 32 would take 3", chosen, tight, tmp_path, micro_batch=32)


def test_without_records_the_largest_size_comes_first():
    assert open_sizes(unchosen(H100), []) == [32, 16, 8, 4, 2, 1]


def test_the_size_that_was_measured_to_be_quickest_comes_first():
    def entry(size, speed):
        return {"spec": {"settings": {"micro_batch": size}}, "speed": {"samples_per_s": speed}}

    records = [entry(8, 100.0), entry(32, 90.0)]
    assert open_sizes(unchosen(H100), records) == [8, 16, 32, 4, 2, 1]


def test_where_nothing_fits_one_line_says_what_to_do(models, tmp_path):
    tiny_card = card("gtx-1050", 61, 2, compiler=False)
    start = "on gtx-1050: A2 at micro-batch 1 would take"
    message = refused(start, chosen, tiny_card, tmp_path, models["large"])
    assert "of 2.0 GiB that are free" in message
    assert "--max-length" in message
    assert "nvidia-smi" in message


def test_a_checkout_without_records_takes_the_largest_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "COMMITTED", tmp_path / "no")
    assert chosen(T4, tmp_path / "none")[:2] == ("E-t4-norm", 32)


def test_an_encoder_gets_what_its_layers_allow(tmp_path):
    model = checkpoint("modernbert", tmp_path)
    (spec,) = plan(["recommended"], "smoke", model=model, machine=H100, runs=tmp_path)
    assert spec.variant == "E-masters"
    assert "since E-t4-norm" in spec.adjusted[0]
    assert "predicted" not in spec.adjusted[0]


def test_memory_predicts_what_would_be_taken_on_such_a_card(tmp_path, typed):
    BertConfig().save_pretrained(tmp_path)
    command = f"memory recommended --preset bench --compute-capability 7.5 --model {tmp_path}"
    sentence, _, row = typed(command).splitlines()[:3]
    assert sentence.startswith("recommended: E-t4-norm")
    assert row.split()[:3] == ["E-t4-norm", "384", "32"]


def test_what_a_choice_needs_of_a_card_is_predicted():
    assert 1 < MemoryNeeds().gib(unchosen(T4)) < 14.6


def test_free_memory_is_what_nvml_says_of_the_first_card(monkeypatch):
    free_bytes = Mock(return_value=15 * 2**30)
    monkeypatch.setattr(hardware.nvml, "free_bytes", free_bytes)
    assert hardware._free_mib() == 15 * 1024
    free_bytes.assert_called_with(torch.device("cuda", 0))


def test_without_nvml_all_memory_counts_as_free(monkeypatch):
    properties = Mock(return_value=Mock(total_memory=16 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(hardware.nvml, "free_bytes", lambda *_: None)
    assert hardware._free_mib() == 16 * 1024


# What may be chosen is held against the committed records.


def test_variants_to_choose_from_are_in_the_order_of_their_speeds():
    names = TASKS["qa"].on_gpu
    usual = evidence.usual_conditions(evidence.select(committed(), evidence.REFERENCE))
    of_one_size = usual[usual["micro_batch"] == 32]
    speeds = of_one_size.groupby("spec.variant")["speed.samples_per_s"].mean()
    assert speeds[names].is_monotonic_decreasing


def test_variants_to_choose_from_score_as_the_baseline_does():
    judged = evidence.usual_conditions(evidence.judging_runs(committed(), evidence.REFERENCE))
    tested = equivalence(judged).reindex(TASKS["qa"].on_gpu).drop(index=BASELINE)
    assert (tested["best_delta"] >= -MARGIN).all()


def test_variants_of_a_language_model_are_in_the_order_of_their_speeds():
    """Those that any GPU runs, and then those for the older ones."""
    runs = evidence.select(committed(), TASKS["lm"].reference)
    speeds = runs.groupby("spec.variant")["speed.samples_per_s"].mean()
    names = TASKS["lm"].on_gpu
    assert speeds[names[:3]].is_monotonic_decreasing
    assert speeds[names[3:]].is_monotonic_decreasing


@pytest.mark.parametrize("task", TASKS)
def test_variants_to_choose_from_are_of_their_task_and_train_all_weights(task):
    for name in {*TASKS[task].on_gpu, *TASKS[task].on_cpu}:
        assert VARIANTS[name].task == task
        assert find_recipe(VARIANTS[name].settings.trainable).kind == "all"


# The choice in a plan.


@pytest.fixture
def plan_on_a_t4(tmp_path):
    return partial(plan, data="synthetic:80", machine=T4, runs=tmp_path)


def test_plan_puts_the_choice_in_the_place_of_the_name(plan_on_a_t4):
    specs = plan_on_a_t4(["A1", "recommended"], "smoke", [0, 1])
    names = [(spec.variant, spec.seed) for spec in specs]
    assert names == [("A1", 0), ("E-t4-norm", 0), ("A1", 1), ("E-t4-norm", 1)]


def test_a_choice_says_what_was_left_to_the_machine(plan_on_a_t4):
    usual, spec = plan_on_a_t4(["A1", "recommended"], "smoke")
    assert spec.chosen == ["variant", "micro_batch"]
    assert spec.own == {"micro_batch": 16}
    assert usual.chosen == []


def test_a_recommended_run_is_the_run_of_the_variant(plan_on_a_t4):
    (spec,) = plan_on_a_t4(["recommended"], "smoke")
    (named,) = plan_on_a_t4(["E-t4-norm"], "smoke", micro_batch=16)
    assert spec == named
    assert spec.run_path == named.run_path
    assert len(plan_on_a_t4(["recommended", "E-t4-norm"], "smoke", micro_batch=16)) == 1


def test_of_several_sizes_that_were_asked_for_each_gets_a_choice(plan_on_a_t4):
    specs = plan_on_a_t4(["recommended"], "smoke", micro_batch=[8, 16])
    assert [spec.settings.micro_batch for spec in specs] == [8, 16]
    assert [spec.chosen for spec in specs] == [["variant"], ["variant"]]


def test_a_size_that_does_not_divide_the_batch_is_refused(plan_on_a_t4):
    refused("does not divide", plan_on_a_t4, ["recommended"], "smoke", micro_batch=5)


@pytest.mark.parametrize(("batch", "size"), [(32, 16), (12, 12), (10, 10), (34, 2), (7, 7)])
def test_an_open_size_begins_at_the_variants_own_or_the_largest_below_that_divides(
    batch, size, monkeypatch
):
    large = Variant("A1-large", parent="A1", why="More samples in a forward pass.", micro_batch=16)
    monkeypatch.setitem(VARIANTS, "A1-large", large)
    request = make_request(
        ["A1-large"], "quality", [0], "synthetic:80", "tiny", T4, {"batch": batch}, {}
    )
    (spec,) = plan_request(request).specs
    assert spec.settings.micro_batch == size
    assert spec.chosen == ["micro_batch"]


def test_a_language_model_gets_a_variant_of_its_task(plan_on_a_t4):
    (spec,) = plan_on_a_t4(["recommended"], "lm-smoke")
    assert (spec.variant, spec.settings.micro_batch) == ("L-fp16", 16)


# What a card could not do before.


def test_what_ran_out_of_memory_gets_a_smaller_size(tmp_path):
    spec = choose(unchosen(H100), H100, tmp_path)
    leave_end(spec, tmp_path, "oom", "OutOfMemoryError", step=7)
    variant, size, sentence = chosen(H100, tmp_path)
    assert (variant, size) == ("E-fp8-gradients", 16)
    path = f"{spec.group}/{spec.run_id}"
    assert f"failed here at micro-batch 32 (what OutOfMemoryError says; {path})" in sentence


@pytest.fixture
def failed_twice(tmp_path):
    """A runs folder in which the first choice of an H100 ran out of memory, and then failed."""
    for status, kind in (("oom", "OutOfMemoryError"), ("error", "CompilationError")):
        spec = choose(unchosen(H100), H100, tmp_path)
        leave_end(spec, tmp_path, status, kind, step=1)
    return tmp_path


@pytest.mark.parametrize("preset", ["full", "bench"])
def test_a_variant_that_failed_is_passed_over_at_any_preset(preset, failed_twice):
    assert chosen(H100, failed_twice, preset=preset)[0] == "E-uncompiled"


OTHERS = [
    (dataclasses.replace(H100, hardware="h200"), None),
    (L4, None),
    (H100, 256),
]


@pytest.mark.parametrize(("machine", "max_length"), OTHERS)
def test_a_failure_says_nothing_of_other_cards_and_lengths(machine, max_length, failed_twice):
    choice = chosen(machine, failed_twice, max_length=max_length)
    assert choice[:2] == ("E-fp8-gradients", 32)


def test_where_every_variant_has_failed_none_is_known(failed_twice):
    with pytest.raises(UserError, match="no variant is known"):
        for _ in range(30):
            spec = choose(unchosen(H100), H100, failed_twice)
            leave_end(spec, failed_twice, "error", "RuntimeError")
    of_two_sizes = 1  # of the first
    failed = history.failed_records(unchosen(H100), failed_twice)
    assert len(failed) == len(TASKS["qa"].on_gpu) + of_two_sizes


def test_a_failure_counts_for_the_model_that_had_it(tmp_path):
    """The folder of every model that a run keeps is called `model`."""
    large = dataclasses.replace(unchosen(H100), model={"name": "model", "revision": "large"})
    little = dataclasses.replace(unchosen(H100), model={"name": "model", "revision": "small"})
    spec = choose(large, H100, tmp_path)
    leave_end(spec, tmp_path, "oom", "OutOfMemoryError", step=1)
    assert len(history.failed_records(large, tmp_path)) == 1
    assert history.failed_records(little, tmp_path) == []


def test_records_that_cannot_be_read_keep_nobody_from_a_choice_and_are_not_told(
    failed_twice, capsys
):
    known = history.failed_records(unchosen(H100), failed_twice)
    spoilt = failed_twice / "h100-full" / "A9-s0-000000"
    spoilt.mkdir(parents=True)
    (spoilt / "record.json").write_text("{")
    assert history.failed_records(unchosen(H100), failed_twice) == known
    assert capsys.readouterr().err == ""


def test_what_a_search_tried_is_no_failure(tmp_path):
    tried = dataclasses.replace(unchosen(H100), variant="A1", search="max-batch")
    leave_end(tried, tmp_path, "oom", "OutOfMemoryError", step=1)
    assert history.failed_records(unchosen(H100), tmp_path) == []
    leave_end(dataclasses.replace(tried, search=""), tmp_path, "oom", "OutOfMemoryError", step=1)
    assert len(history.failed_records(unchosen(H100), tmp_path)) == 1


@pytest.mark.parametrize(
    ("status", "size", "option", "is_passed_over"),
    [
        ("oom", 16, ("A1", 16), True),
        ("oom", 16, ("A1", 32), True),
        ("oom", 16, ("A1", 8), False),
        ("oom", 16, ("A2", 16), False),
        ("error", 16, ("A1", 8), True),
    ],
)
def test_memory_that_ran_out_speaks_against_the_same_size_and_larger_ones(
    status, size, option, is_passed_over
):
    failure = {
        "spec": {"variant": "A1", "settings": {"micro_batch": size}},
        "status": status,
        "error": {"message": None, "kind": "SomeError"},
        "group": "h100-full",
        "run_id": "A1-s0-1",
    }
    variant, micro_batch = option
    spec = dataclasses.replace(
        unchosen(H100), variant=variant, settings=Settings(micro_batch=micro_batch)
    )
    why = f"failed here at micro-batch {size} (SomeError; h100-full/A1-s0-1)"
    assert history.failure_of(spec, [failure]) == (why if is_passed_over else None)


def failure(variant, size, status="error", message="broke"):
    """What failure_of reads of a record."""
    return {
        "spec": {"variant": variant, "settings": {"micro_batch": size}},
        "status": status,
        "error": {"message": message, "kind": "SomeError"},
        "group": "h100-full",
        "run_id": f"{variant}-s0-{size}",
    }


def test_a_failure_speaks_against_an_option_whatever_other_failures_there_are():
    failed = [failure("A2", 8), failure("A1", 32, "oom"), failure("A1", 16, message="x" * 100)]
    spec = dataclasses.replace(unchosen(H100), variant="A1", settings=Settings(micro_batch=8))
    said = f"failed here at micro-batch 16 ({'x' * 80}; h100-full/A1-s0-16)"
    assert history.failure_of(spec, failed) == said
    assert history.failure_of(spec, failed[:2]) is None


@pytest.mark.parametrize(
    ("group", "read"), [(None, TASKS["qa"].reference), ("h200-parallel", "h200-parallel")]
)
def test_committed_records_are_those_of_the_tasks_reference_or_of_a_group(group, read, monkeypatch):
    runs = [
        Mock(record={"spec": {"variant": variant}, "number": number})
        for number, variant in enumerate(("A1", "A2", "A1"))
    ]
    read_runs = Mock(return_value=runs)
    monkeypatch.setattr(history, "read_runs", read_runs)
    found = history.committed_records("qa", group)
    assert read_runs.call_args.args == (history.COMMITTED, read)
    numbers = {name: [entry["number"] for entry in entries] for name, entries in found.items()}
    assert numbers == {"A1": [0, 2], "A2": [1]}


def test_a_run_is_trained_where_its_own_record_says_that_it_ended_ok(tmp_path):
    (spec,) = plan(["A1"], "smoke", data="synthetic:40", machine=CPU, runs=tmp_path)
    assert not history.is_trained(spec, tmp_path)
    leave_end(spec, tmp_path, "killed", "killed")
    assert not history.is_trained(spec, tmp_path)
    folder = leave(tmp_path, spec)
    assert history.is_trained(spec, tmp_path)
    other = dataclasses.replace(spec, seed=1)
    folder.rename(tmp_path / other.run_path)
    assert not history.is_trained(other, tmp_path)


# Which ends are the machine's, so that another choice may do better.

# A file that is not found in the first step is a compiler's; what fails after all steps fails in
# scoring.
ENDS = [
    ("error", "CompilationError", 1, None, True),
    ("error", "RuntimeError", None, None, True),
    ("error", "FileNotFoundError", 1, None, True),
    ("oom", "OutOfMemoryError", 90, None, True),
    ("error", "RuntimeError", 2, None, True),
    ("error", "RuntimeError", 3, None, True),
    ("error", "RuntimeError", 4, None, False),
    ("error", "NonFiniteLoss", 1, None, True),
    ("error", "NonFiniteLoss", 2, None, False),
    ("error", "DataError", None, None, False),
    ("error", "DataError", 2, None, False),
    ("killed", "killed", None, None, False),
    ("error", "RuntimeError", None, 400, False),
    ("oom", "OutOfMemoryError", None, 400, False),
    ("ok", None, None, 400, False),
]


@pytest.mark.parametrize(("status", "kind", "step", "trained_steps", "unable"), ENDS)
def test_which_ends_are_the_machines(status, kind, step, trained_steps, unable):
    error = {"kind": kind, "step": step}
    entry = {"status": status, "error": error, "time": {"steps": trained_steps}}
    assert record.unable(entry) is unable


class Unreachable(ConnectionError):
    """An error of the network, as libraries have them."""


def failed_step():
    problem = StepFailed(1)
    problem.__cause__ = FileNotFoundError(2, "no ptxas")
    return problem


PROBLEMS = [
    (Unreachable(), True),
    (DataError("x"), True),
    (failed_step(), False),
    (RuntimeError(), False),
]


@pytest.mark.parametrize(("problem", "is_mistake"), PROBLEMS, ids=repr)
def test_mistakes_are_told_by_their_kind(problem, is_mistake):
    kind = recording.outcome_of(problem, shares_gpu=False)["error"]["kind"]
    assert (kind in record.MISTAKES) is is_mistake


def test_every_error_that_a_user_can_mend_is_a_mistake():
    apart = ("qa_lib.lab.report", "qa_lib.kernels", "qa_lib.__main__", "qa_lib.lab.app.page")
    for module in pkgutil.walk_packages(qa_lib.__path__, "qa_lib."):
        if not module.name.startswith(apart):
            importlib.import_module(module.name)
    kinds = [UserError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    raised_elsewhere = ("qa_lib.lab.report", "qa_lib.train", "tests")
    kinds = [kind for kind in kinds if not kind.__module__.startswith(raised_elsewhere)]
    assert {kind.__name__ for kind in kinds} <= {*record.MISTAKES}


def test_a_compiler_that_takes_the_process_with_it_is_the_machines(ended_process):
    entry = ended_process()
    assert record.unable(entry)
    assert "exit code -6" in entry["error"]["message"]
    assert "LLVM" in entry["error"]["message"]


def test_a_process_that_was_stopped_is_not_the_machines(ended_process):
    assert not record.unable(ended_process(reason="the driver was stopped"))


def test_a_crash_of_a_named_variant_is_nobodys_choice(ended_process):
    assert not record.unable(ended_process(chosen=[]))


@pytest.mark.parametrize(("step", "unable"), [(2, True), (3, False)])
def test_a_crash_is_the_machines_while_it_may_compile(step, unable, ended_process):
    """The second step compiles for another shape."""
    assert record.unable(ended_process(step=step)) is unable


@pytest.fixture
def ended_process(tmp_path):
    """Judges a recommended run whose process has ended by itself, with these changes."""
    (spec,) = plan(["recommended"], "smoke", machine=CPU, runs=tmp_path)
    run_dir = tmp_path / spec.run_path

    def judged(reason=None, step=None, **changes):
        changed = dataclasses.replace(spec, **changes)
        record.write_record(run_dir, record.new_record(changed, {}))
        (run_dir / "log.txt").write_text("LLVM ERROR: Cannot select\n")
        if step is not None:
            write(run_dir / "steps.jsonl", {"step": step})
        return launch.judge(changed, run_dir, reason, -6, 1.0)

    return judged


class Hung:
    """A process that goes on for ever, and trains `steps` steps, or none and does not begin to."""

    def __init__(self, run_dir, steps):
        record.write_record(run_dir, record.read_record(run_dir) | {"status": "running"})
        if steps is not None:
            lines = [f'{{"step": {step}}}\n' for step in range(1, steps + 1)]
            (run_dir / "steps.jsonl").write_text("".join(lines))
        (run_dir / "log.txt").touch()
        self.returncode = -9
        self.pid = 1
        self.poll = Mock(return_value=None)
        self.kill = Mock()


@pytest.fixture
def hung_run(tmp_path, monkeypatch):
    """Runs a variant whose process hangs after some steps; its record."""
    monkeypatch.setattr(launch, "FIRST_STEP_S", 0.2)
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    monkeypatch.setattr(launch, "kill", Mock())

    def run(variant, steps, limit_s):
        (spec,) = plan([variant], "smoke", machine=CPU, runs=tmp_path)
        launcher = launch.Launcher(tmp_path, CPU, {}, time_limit_s=limit_s)
        launcher._start = lambda spec, run_dir, env, log: Hung(run_dir, steps)
        (entry,) = launcher.run_all([spec])
        return entry

    return run


def test_a_recommended_run_that_somebody_waits_for_has_no_limit_of_time(tmp_path, monkeypatch):
    launcher = Mock(side_effect=UserError("no launcher"))
    monkeypatch.setattr(anywhere, "Launcher", launcher)
    spec = dataclasses.replace(planned(), chosen=["variant"], adjusted=["recommended: A1"])
    said = []
    refused("no launcher", anywhere.fit, spec, tmp_path, say=said.append)
    assert launcher.call_args.kwargs["time_limit_s"] == math.inf
    assert launcher.call_args.kwargs["aloud"], "its steps are seen meanwhile"
    assert said == [], "the launcher says what was chosen"


def test_a_run_of_which_the_size_alone_was_chosen_trains_in_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(anywhere, "fit_here", lambda *_: "trained here")
    spec = dataclasses.replace(planned(), chosen=["micro_batch"], adjusted=["micro-batch 8"])
    said = []
    assert anywhere.fit(spec, tmp_path, say=said.append) == "trained here"
    assert said == ["micro-batch 8"]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("limit_s", [0.3, math.inf])
def test_a_first_step_that_hangs_is_ended_and_gives_way(steps, limit_s, hung_run):
    """Under a time limit, as in a sweep, and without one, as under `run`."""
    entry = hung_run("recommended", steps, limit_s)
    assert entry["status"] == "error"
    assert record.unable(entry)
    if limit_s == math.inf:
        assert f"step {steps + 1} was not done after 0.2 s" in entry["error"]["message"]


@pytest.mark.parametrize(
    ("variant", "steps"), [("recommended", 3), ("recommended", None), ("A1", 0)]
)
def test_another_run_that_hangs_is_killed_by_its_time_limit(variant, steps, hung_run):
    entry = hung_run(variant, steps, limit_s=0.3)
    assert entry["status"] == "killed"
    assert not record.unable(entry)


# What takes the place of a choice that fails.


def cold(monkeypatch, folder):
    """The C++ compiler does not work, which only the first step finds out."""
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))


def warm(monkeypatch, folder):
    """Processes are forked, and A4's first step fails by itself."""
    launcher = partial(launch.Launcher, warm=True, command=faulty.command_without_a4)
    monkeypatch.setattr(anywhere, "Launcher", launcher)


@pytest.mark.parametrize("plant", [warm, slow(cold)])
def test_a_first_step_that_fails_gives_way_and_the_next_command_begins_there(
    plant, tmp_path, monkeypatch, capfd
):
    """Each try in a process of its own."""
    plant(monkeypatch, tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    runs = tmp_path / "runs"
    command = ["run", "recommended", "--preset", "test", "--runs", str(runs)]
    assert main(command) == 0
    out, err = capfd.readouterr()
    of_the_command = [line for line in out.splitlines() if str(tmp_path) not in line]
    assert max(map(len, of_the_command)) <= 100
    lines = unwrapped(out).splitlines()
    first, second = (line for line in lines if line.startswith("recommended: "))
    assert first == "recommended: A4 at micro-batch 8 on cpu, the first of a list for CPUs"
    assert second.startswith(
        "recommended: A2 at micro-batch 8 on cpu, since A4 failed here at micro-batch 8 ("
    )
    assert "Traceback" not in out + err
    assert "A2: ok" in out
    if plant is cold:
        assert "step 40/40" in out

    entries = {path.name[:2]: record.read_record(path) for path in runs.glob("cpu-test/*")}
    assert entries.keys() == {"A4", "A2"}
    assert (entries["A4"]["status"], entries["A4"]["error"]["step"]) == ("error", 1)
    assert entries["A4"]["spec"]["adjusted"][0] == first
    assert entries["A2"]["status"] == "ok"
    assert entries["A2"]["spec"]["adjusted"][0] == second
    (log,) = runs.glob("cpu-test/A4-*/log.txt")
    assert "Traceback" in log.read_text()

    assert main(command) == 0
    out = capfd.readouterr().out
    assert unwrapped(out).startswith(second)
    assert "A4 seed" not in out
    assert "\nfinished on " in out
    assert "A2: ok" in out
    assert entries["A4"] == record.read_record(log.parent)


def unwrapped(text):
    """Sentences that were wrapped for the terminal, in a line each."""
    return text.replace("\n    ", " ")


def test_a_run_that_fails_by_a_mistake_is_not_replaced(tmp_path, monkeypatch):
    """`fit` says so in one line; what failed would fail again."""

    def run_all(specs, *_):
        return [leave_end(spec, tmp_path, "error", "DataError") for spec in specs]

    monkeypatch.setattr(launch.Launcher, "run_all", Mock(side_effect=run_all))
    (spec,) = plan(["recommended"], "smoke", runs=tmp_path)
    assert spec.recommended
    refused(f"{spec.run_path}: error, what DataError says ", qa_lib.fit, spec, tmp_path)


@pytest.fixture
def sweep_in_which_a4_fails(tmp_path, monkeypatch, typed):
    """Types the command; its notebooks know the variant alone."""
    monkeypatch.setattr(sweep, "probe", lambda: (CPU, {}))

    def work(self, spec, run_dir, cards):
        named = dataclasses.replace(spec, chosen=[], adjusted=[])
        end = ("error", "CppCompileError", 1) if spec.variant == "A4" else ("ok",)
        entry = leave_end(named, self.runs, *end)
        return launch.judge(spec, run_dir, None, 0, 1.0) | {"time": entry["time"]}

    monkeypatch.setattr(launch.Launcher, "_work", work)
    command = f"sweep --preset smoke --variants recommended,A1 --runs {tmp_path}"
    return partial(typed, command)


def test_a_sweep_goes_on_with_the_next_and_counts_both(sweep_in_which_a4_fails):
    out = sweep_in_which_a4_fails()
    assert "sweep: 2 runs, 0 finished, 2 to run" in out
    assert "[3/3]" in out
    assert "sweep: 2 ok" in out
    assert out.count("recommended: A4 at micro-batch 8") == 1
    assert "recommended: A2 at micro-batch 8" in out
    assert "sweep: 2 runs, 2 finished, 0 to run" in sweep_in_which_a4_fails()


def test_a_record_says_why_its_variant_was_chosen(sweep_in_which_a4_fails, tmp_path):
    sweep_in_which_a4_fails()
    (path,) = tmp_path.glob("cpu-smoke/A2-*")
    assert record.read_record(path)["spec"]["adjusted"][0].startswith("recommended: A2")


def test_a_sweep_in_which_a_choice_becomes_one_of_the_others_has_it_once(tmp_path, monkeypatch):
    specs = plan(["recommended", "A2"], "smoke", machine=CPU, runs=tmp_path)
    assert [spec.variant for spec in specs] == ["A4", "A2"]
    ends = {"A4": ("error", "CppCompileError", 1), "A2": ("ok",)}

    def run_all(self, specs, *_):
        return [leave_end(spec, tmp_path, *ends[spec.variant]) for spec in specs]

    monkeypatch.setattr(launch.Launcher, "run_all", run_all)
    monkeypatch.setattr(launch, "is_finished", lambda runs, spec: (runs / spec.run_path).exists())
    launcher = launch.Launcher(tmp_path, CPU, {})
    left = run_in_turn(launcher, specs, lambda _: None)
    assert [spec.variant for spec in left] == ["A2"]


@pytest.fixture
def finished_run(tmp_path, monkeypatch):
    """A recommended run that is finished: its spec, its record, and what would run it again."""
    (spec,) = plan(["recommended"], "smoke", machine=CPU, runs=tmp_path)
    entry = leave_end(spec, tmp_path, "ok")
    run_again = Mock(
        side_effect=lambda specs, *_: [leave_end(spec, tmp_path, "ok") for spec in specs]
    )
    monkeypatch.setattr(launch.Launcher, "run_all", run_again)
    return spec, entry, run_again


def test_a_recommended_run_that_is_finished_is_returned(finished_run, tmp_path):
    spec, entry, run_again = finished_run
    printed = []
    assert qa_lib.fit(spec, tmp_path, say=printed.append) == entry
    assert printed[0] == spec.adjusted[0]
    assert printed[1].startswith("finished on ")
    run_again.assert_not_called()


def test_a_recommended_run_that_is_forced_runs_again(finished_run, tmp_path):
    spec, _, run_again = finished_run
    qa_lib.fit(spec, tmp_path, say=lambda _: None, force=True)
    run_again.assert_called_once()


# Several processes.

TWO_T4 = dataclasses.replace(T4, gpus=2)
TWO_A100 = dataclasses.replace(A100, gpus=2, linked=True)
TWO_4090 = dataclasses.replace(RTX_4090, gpus=2)
FOUR_H100 = dataclasses.replace(H100, gpus=4, linked=True)
UNLIKE = dataclasses.replace(L4, gpus=2, unlike="NVIDIA L4 and NVIDIA A10")
CHOICES_OF_SEVERAL = [
    (FOUR_H100, 4, "base", "P-peers-fp8", 8),
    (FOUR_H100, 2, "base", "P-peers-fp8", 16),
    (FOUR_H100, 2, "distilbert", "P-peers-fp8", 16),
    (TWO_A100, 2, "base", "P-peers", 16),
    (TWO_4090, 2, "base", "P-nccl-fp8", 16),
    (dataclasses.replace(TWO_A100, linked=False), 2, "base", "P-nccl", 16),
    (TWO_T4, 2, "base", "P-nccl-t4", 16),
    (CPU, 2, "base", "P1", 8),
]


@pytest.mark.parametrize(("machine", "world", "model", "variant", "size"), CHOICES_OF_SEVERAL)
def test_several_processes_get_the_first_variant_that_fits_and_the_batch_of_one(
    machine, world, model, variant, size, models, tmp_path
):
    spec = choose(unchosen(machine, models[model], world=world), machine, tmp_path)
    assert (spec.variant, spec.settings.micro_batch, spec.world) == (variant, size, world)
    assert spec.preset.batch == 32


def test_the_choice_for_several_gpus_says_how_many(tmp_path):
    _, _, sentence = chosen(FOUR_H100, tmp_path, world=4)
    assert sentence.startswith(
        "recommended: P-peers-fp8 at micro-batch 8 on 4 x h100-80gb-hbm3, the quickest known"
    )


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (TWO_A100, "recommended needs 4 GPUs, and this machine has 2"),
        (UNLIKE, "recommended needs 4 GPUs, and this machine has 2"),
        (dataclasses.replace(UNLIKE, gpus=4), "recommended takes GPUs of one kind, and this "),
    ],
)
def test_processes_without_alike_gpus_are_refused_in_a_line(machine, message, tmp_path):
    refused(message, choose, unchosen(machine, world=4), machine, tmp_path)


def of_several(monkeypatch, speeds) -> None:
    """Let committed records say how fast variants are: {(variant, GPUs, batch): samples/s}."""
    records = {}
    for (variant, world, batch), speed in speeds.items():
        entry = {
            "parallel": {"world": world if world > 1 else None},
            "spec": {"preset": {"effective_batch": batch}, "settings": {"micro_batch": batch}},
            "speed": {"samples_per_s": speed},
        }
        records.setdefault(variant, []).append(entry)
    monkeypatch.setattr(recommend, "committed_records", lambda task, group=None: records)


@pytest.mark.parametrize(("speed", "is_said"), [(900, True), (1100, False)])
def test_a_line_says_so_where_one_gpu_is_quicker_at_that_batch(
    speed, is_said, monkeypatch, tmp_path
):
    speeds = {
        ("E-uncompiled", 1, 32): 1000,
        ("E-uncompiled", 1, 8): 5000,
        ("P-peers-fp8", 4, 32): speed,
        ("P-peers-fp8", 2, 32): 500,
    }
    of_several(monkeypatch, speeds)
    _, _, sentence = chosen(FOUR_H100, tmp_path, world=4)
    line = "one GPU is quicker at 32 samples a step (1,000 samples/s instead of 900)"
    assert (line in sentence) == is_said


def test_all_stands_for_the_gpus_that_there_are(tmp_path):
    words = {"preset": "full", "data": "synthetic:40", "model": "tiny", "runs": tmp_path}
    (spec,) = plan(["recommended"], world="all", machine=FOUR_H100, **words)
    assert (spec.variant, spec.world) == ("P-peers-fp8", 4)
    refused(
        "--world all takes all GPUs, and this machine has none",
        plan,
        ["recommended"],
        world="all",
        machine=CPU,
        **words,
    )
