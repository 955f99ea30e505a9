"""Variants by transformers.Trainer that imitate the slides: DeepSpeed, nvidia-smi after every step.

How DeepSpeed trains is in test_parallel.py, where the package is installed.
"""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from qa_lib.data.load import batches_of, load_data
from qa_lib.lab.launch import anywhere
from qa_lib.measure import hardware
from qa_lib.measure.meter import StepFlops
from qa_lib.model.build import build_model
from qa_lib.peers import search_trainer
from qa_lib.run import fit as fitting
from qa_lib.spec.machine import Machine
from qa_lib.train import trainer
from tests.material import refused
from tests.tiny import planned, quiet, resized, steps_of, trained

STEPS = 5
WARM_UP = 2


def spec_of(variant: str):
    """A variant at preset smoke, made smaller, in one process of a machine that lacks but a GPU."""
    sizes = {
        "steps": STEPS,
        "measure_from": WARM_UP,
        "effective_batch": 16,
        "warmup": 0.4,
        "quality": False,
    }
    machine = Machine(deepspeed=True)
    return planned(variant, sizes=sizes, data="synthetic:60", machine=machine, world=1)


@pytest.fixture(scope="module")
def samples():
    return load_data(spec_of("P0")).samples


@pytest.fixture
def asked(monkeypatch):
    """The command lines of nvidia-smi, on a host with two GPUs.

    It answers once a step and then no more. The mean of both GPUs is 0.2, 0.4, ...
    """
    answers = [f"{10 * step}\n{30 * step}\n" for step in range(1, STEPS + 1)]
    command_lines = []

    def nvidia_smi(*words):
        command_lines.append(words)
        return answers.pop(0) if answers else ""

    monkeypatch.setattr(hardware, "_nvidia_smi", nvidia_smi)
    return command_lines


@pytest.fixture(autouse=True)
def no_process_group(monkeypatch):
    """Keeps runs from making a process group, which would be left behind."""
    monkeypatch.setattr(fitting.ProcessGroup, "join", lambda self, spec: None)


# nvidia-smi after every step.


def test_nvidia_smi_is_asked_once_a_step_and_its_mean_over_all_gpus_kept(asked, samples, tmp_path):
    _, _, meter, *_ = trained(spec_of("P0-polled"), samples, tmp_path)
    assert meter.polled_busy_shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [words[0] for words in asked] == ["--query-gpu=utilization.gpu"] * STEPS


def test_the_utilization_of_a_run_is_that_of_its_measured_steps(asked, samples, tmp_path):
    model, _, meter, *_ = trained(spec_of("P0-polled"), samples, tmp_path)
    assert meter.speed(StepFlops(model), 1.0).gpu_busy_polled == pytest.approx(0.8)


def test_without_the_setting_nobody_asks_nvidia_smi(asked, samples, tmp_path):
    model, _, meter, *_ = trained(spec_of("P0"), samples, tmp_path)
    assert asked == []
    assert meter.speed(StepFlops(model), 1.0).gpu_busy_polled is None


@pytest.mark.parametrize("answer", ["", "[N/A]\n"])
def test_a_silent_nvidia_smi_is_named(answer, monkeypatch):
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda *_: answer)
    refused("nvidia-smi does not tell the GPUs' utilization", hardware.polled_utilization)


# Training.


def test_the_trainer_trains_and_every_step_is_noted(samples, tmp_path):
    spec = spec_of("P0")
    model, _, meter, *_ = trained(spec, samples, tmp_path)
    assert len(steps_of(tmp_path)) == STEPS
    assert len(meter.times) == STEPS
    assert not torch.equal(model.qa_outputs.weight, build_model(spec).qa_outputs.weight)


def test_the_time_for_inputs_is_not_measured_since_the_trainer_fetches_them(samples, tmp_path):
    _, _, meter, *_ = trained(spec_of("P0"), samples, tmp_path)
    assert meter.data_ms() is None


def test_the_rate_that_is_noted_is_that_of_the_step(samples, tmp_path):
    """It warms up over two steps of five, from 0, and decays over the others."""
    spec = spec_of("P0")
    trained(spec, samples, tmp_path)
    shares = [line["lr"] / spec.preset.learning_rate for line in steps_of(tmp_path)]
    assert shares == pytest.approx([0, 1 / 2, 1, 2 / 3, 1 / 3])


def arguments_of(variant, samples, folder, monkeypatch) -> dict:
    """What the Trainer is asked for."""
    arguments = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(trainer, "TrainingArguments", arguments)
    with pytest.raises(ZeroDivisionError):
        trained(spec_of(variant), samples, folder)
    return arguments.call_args.kwargs


@pytest.mark.parametrize("variant", ["P0", "P0-deepspeed"])
def test_the_trainer_is_asked_for_what_the_spec_says(variant, samples, tmp_path, monkeypatch):
    spec = spec_of(variant)
    arguments = arguments_of(variant, samples, tmp_path, monkeypatch)
    assert arguments["optim"] == "adamw_torch_fused"
    assert arguments["max_grad_norm"] == 1.0
    assert arguments["gradient_accumulation_steps"] == spec.accumulation
    assert arguments["learning_rate"] == spec.preset.learning_rate
    assert arguments["warmup_steps"] == 2, "of five, at 0.4"


def test_the_tuned_trainer_has_workers_and_does_not_wait_for_the_loss(
    samples, tmp_path, monkeypatch
):
    arguments = arguments_of("A0-tuned", samples, tmp_path, monkeypatch)
    assert arguments["dataloader_num_workers"] > 0
    assert arguments["dataloader_persistent_workers"]
    assert not arguments["logging_nan_inf_filter"]
    assert arguments["train_sampling_strategy"] == "group_by_length"


def test_the_tuned_trainer_has_what_a_search_found_to_pay():
    found = search_trainer.CHANGES["workers"] | {
        "logging_nan_inf_filter": search_trainer.TUNED["logging_nan_inf_filter"]
    }
    workers = min(found["dataloader_num_workers"], os.cpu_count())
    assert found | {"dataloader_num_workers": workers} == trainer.TUNED


def test_the_tuned_trainer_has_the_optimizer_of_the_search(samples, tmp_path, monkeypatch):
    arguments = arguments_of("A0-tuned", samples, tmp_path, monkeypatch)
    assert arguments["optim"] == search_trainer.TUNED["optim"]


def test_other_trainers_have_the_defaults_of_transformers(samples, tmp_path, monkeypatch):
    arguments = arguments_of("A0-compile", samples, tmp_path, monkeypatch)
    assert not arguments.keys() & trainer.TUNED.keys()


def test_the_tuned_trainer_pads_to_multiples_of_64(samples):
    batches = batches_of(samples, spec_of("A0-tuned"))
    lengths = {batches.padded_length(micro_batch) for micro_batch in batches.step(0)}
    assert lengths <= {64, batches.spec.preset.max_length}


def test_tokens_are_those_of_the_samples_that_workers_have_collated(samples, tmp_path):
    """The samples' numbers stand beside the inputs, and come to each step in its order."""
    spec = resized(spec_of("A0-tuned"), {"compile": "none"})
    model = build_model(spec)
    ids = []
    model.register_forward_pre_hook(
        lambda module, args, inputs: ids.append(inputs["input_ids"]), with_kwargs=True
    )
    _, _, meter, *_ = trained(spec, samples, tmp_path, model)
    padding = load_data(spec).tokenizer.pad_token_id
    for counts in meter.step_counts:
        step = [ids.pop(0) for _ in range(counts.samples // spec.settings.micro_batch)]
        assert counts.tokens == sum(int((rows != padding).sum()) for rows in step)
    assert ids == []


def test_the_trainer_does_nothing_that_the_loop_does_not(samples, tmp_path, monkeypatch):
    """Its own defaults are other ones."""
    spec = spec_of("P0")
    arguments = arguments_of("P0", samples, tmp_path, monkeypatch)
    expected = {
        "max_steps": STEPS,
        "per_device_train_batch_size": spec.settings.micro_batch,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "fp16": False,
        "bf16": False,
        "seed": spec.seed,
        "use_cpu": True,
        "dataloader_drop_last": True,
        "remove_unused_columns": False,
        "train_sampling_strategy": "random",
        "torch_compile_backend": None,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
    }
    assert {name: arguments[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"precision": "fp16"}, "fp16", True),
        ({"precision": "bf16"}, "bf16", True),
        ({"group_by_length": True}, "train_sampling_strategy", "group_by_length"),
        ({"compile": "inductor"}, "torch_compile_backend", "inductor"),
    ],
)
def test_the_trainer_is_asked_for_a_setting(changes, name, value, samples, tmp_path, monkeypatch):
    arguments = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(trainer, "TrainingArguments", arguments)
    with pytest.raises(ZeroDivisionError):
        trained(resized(spec_of("P0"), changes), samples, tmp_path)
    assert arguments.call_args.kwargs[name] == value


def test_what_is_logged_of_a_step_is_of_its_micro_batches_alone():
    collator = Mock()
    collator.batches.tokens = lambda micro_batches: [list(m) for m in micro_batches]
    metered = Mock(data_collator=collator, micro_batches=[[1], [2]], losses=[0.5, 0.25], rate=0.1)
    log = Mock()
    hooks = Mock()
    steps = trainer._Steps(metered, "meter", log, hooks, polls=False)
    steps.on_step_end(None, Mock(global_step=7), None)
    log.step.assert_called_once_with("meter", [[1], [2]], 0.75, 0.1)
    hooks.finished.assert_called_once_with(7)
    assert metered.micro_batches == []
    assert metered.losses == []


def test_deepspeed_is_not_asked_for_without_the_setting(samples, tmp_path, monkeypatch):
    assert arguments_of("P0", samples, tmp_path, monkeypatch)["deepspeed"] is None


def test_deepspeed_is_asked_for_zero_1_and_else_takes_the_arguments(samples, tmp_path, monkeypatch):
    arguments = arguments_of("P0-deepspeed", samples, tmp_path, monkeypatch)
    config = json.loads(Path(arguments["deepspeed"]).read_text())
    assert config.pop("zero_optimization") == {"stage": 1}
    assert "optimizer" not in config, "DeepSpeed's own would have to be compiled"
    assert all(value in ("auto", {"enabled": "auto"}) for value in config.values())


class Engine(torch.nn.Sequential):
    """Around a model, as DeepSpeed's."""

    def forward(self, **inputs):
        return self[0](**inputs)


def compiled_engine(model):
    return torch.compile(Engine(model), backend="eager")


@pytest.mark.parametrize(
    ("wrap", "name"), [(Engine, "Engine"), (compiled_engine, "Engine"), (None, None)]
)
def test_the_class_that_trained_is_what_the_trainer_has_called(
    wrap, name, samples, tmp_path, monkeypatch
):
    if wrap:
        monkeypatch.setattr(trainer.Trainer, "_wrap_model", lambda self, model, *_: wrap(model))
    spec = spec_of("P0")
    ranks = fitting.ProcessGroup(torch.device("cpu"))
    batches = batches_of(samples, spec)
    fitting.train(build_model(spec), batches, spec, ranks.device, tmp_path, quiet, ranks=ranks)
    assert ranks.wrapper == name


def test_deepspeed_is_launched_in_one_process_too(tmp_path, monkeypatch):
    launched = Mock()
    spec = spec_of("P0-deepspeed")
    monkeypatch.setattr(anywhere, "run_processes", launched)
    anywhere.fit(spec, tmp_path, say=quiet)
    launched.assert_called_once_with(spec, tmp_path, quiet)
