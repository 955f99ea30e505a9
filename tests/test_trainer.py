"""The variants through transformers.Trainer that imitate the slides: DeepSpeed, and nvidia-smi after every step.

How DeepSpeed trains is in test_parallel.py, where the package is installed.
"""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from qa_lib.data.load import batches_of, load_data
from qa_lib.lab.launch import anywhere
from qa_lib.measure import hardware
from qa_lib.measure.meter import StepFlops
from qa_lib.model.build import build_model
from qa_lib.run import fit as fitting
from qa_lib.spec.spec import Machine
from qa_lib.train import trainer
from tests.material import refused
from tests.tiny import planned, quiet, trained

STEPS, WARM_UP = 5, 2


def spec_of(variant: str):
    """A variant at preset smoke, made smaller, in one process of a machine that has all it needs but a GPU."""
    sizes = {
        "steps": STEPS,
        "measure_from": WARM_UP,
        "effective_batch": 16,
        "warmup": 0.4,
        "quality": False,
    }
    return planned(
        variant, sizes=sizes, data="synthetic:60", machine=Machine(deepspeed=True), world=1
    )


@pytest.fixture(scope="module")
def samples():
    return load_data(spec_of("P0")).samples


@pytest.fixture
def said(monkeypatch):
    """nvidia-smi of a host with two GPUs, which answers at each step and then no more: the mean is 0.2, 0.4, ..."""
    lines, asked = [f"{10 * step}\n{30 * step}\n" for step in range(1, STEPS + 1)], []
    monkeypatch.setattr(
        hardware,
        "_nvidia_smi",
        lambda *words: (asked.append(words), lines.pop(0) if lines else "")[1],
    )
    monkeypatch.setattr(
        fitting.ProcessGroup, "join", lambda self, spec: None
    )  # or else a process group is left behind
    return asked


def test_nvidia_smi_is_asked_once_a_step_and_its_mean_over_all_gpus_kept(said, samples, tmp_path):
    model, _, meter, *_ = trained(spec_of("P0-polled"), samples, tmp_path)
    assert meter.polled == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert [words[0] for words in said] == ["--query-gpu=utilization.gpu"] * STEPS
    assert meter.speed(StepFlops(model), 1.0).gpu_busy_polled == pytest.approx(0.8), (
        "of the measured steps"
    )
    assert meter.data_ms() is None, "the Trainer fetches them"


def test_without_the_setting_nobody_asks_and_the_steps_are_trained(said, samples, tmp_path):
    model, _, meter, *_ = trained(spec_of("P0"), samples, tmp_path)
    assert (
        said == []
        and len((tmp_path / "steps.jsonl").read_text().splitlines()) == len(meter.times) == STEPS
    )
    assert not torch.equal(model.qa_outputs.weight, build_model(spec_of("P0")).qa_outputs.weight)
    assert meter.speed(StepFlops(model), 1.0).gpu_busy_polled is None


@pytest.mark.parametrize("words", ["", "[N/A]\n"])
def test_a_silent_nvidia_smi_is_named(words, monkeypatch):
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda *_: words)
    refused("nvidia-smi does not tell the GPUs' utilization", hardware.polled_utilization)


@pytest.mark.parametrize("variant", ["P0", "P0-deepspeed"])
def test_deepspeed_is_asked_for_zero_1_and_else_takes_the_arguments(
    variant, said, samples, tmp_path, monkeypatch
):
    arguments, spec = Mock(side_effect=ZeroDivisionError), spec_of(variant)
    monkeypatch.setattr(trainer, "TrainingArguments", arguments)
    with pytest.raises(ZeroDivisionError):
        trained(spec, samples, tmp_path)
    asked = arguments.call_args.kwargs
    wanted = {
        "optim": "adamw_torch_fused",
        "max_grad_norm": 1.0,
        "gradient_accumulation_steps": spec.accumulation,
    }
    wanted |= {"learning_rate": spec.preset.learning_rate, "warmup_steps": 2}  # of five, at 0.4
    assert asked | wanted == asked and bool(asked["deepspeed"]) == (variant == "P0-deepspeed")
    if asked["deepspeed"]:
        config = json.loads(Path(asked["deepspeed"]).read_text())
        assert config.pop("zero_optimization") == {"stage": 1}
        assert "optimizer" not in config, "DeepSpeed's own would have to be compiled"
        assert all(value in ("auto", {"enabled": "auto"}) for value in config.values())


class Engine(torch.nn.Sequential):
    """Around a model, as DeepSpeed's."""

    def forward(self, **inputs):
        return self[0](**inputs)


@pytest.mark.parametrize(
    "wrapped", [Engine, lambda engine: torch.compile(Engine(engine), backend="eager"), None]
)
def test_the_class_that_trained_is_what_the_trainer_has_called(
    wrapped, said, samples, tmp_path, monkeypatch
):
    if wrapped:
        monkeypatch.setattr(trainer.Trainer, "_wrap_model", lambda self, model, *_: wrapped(model))
    ranks, spec = fitting.ProcessGroup(torch.device("cpu")), spec_of("P0")
    given = build_model(spec), batches_of(samples, spec), spec
    fitting.train(*given, ranks.device, tmp_path, quiet, ranks=ranks)
    assert ranks.wrapper == ("Engine" if wrapped else None)


def test_deepspeed_is_launched_in_one_process_too(tmp_path, monkeypatch):
    launched, spec = Mock(), spec_of("P0-deepspeed")
    monkeypatch.setattr(anywhere, "run_processes", launched)
    anywhere.fit(spec, tmp_path, say=quiet)
    launched.assert_called_once_with(spec, tmp_path, quiet)
