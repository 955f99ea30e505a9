"""FastTrainer trains as Trainer does, with the techniques, and leaves all else to Trainer."""

import os

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from qa_lib.own import trainer as own_trainer
from qa_lib.own.packing import PackedDataset
from qa_lib.own.trainer import CapturedBackward, FastTrainer
from qa_lib.train.master_adamw import MasterAdamW
from tests.material import refused
from tests.own import HEADS, drawn_samples, padded_batch, quiet, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES = 16


def arguments(folder, **options) -> TrainingArguments:
    standard = {
        "per_device_train_batch_size": SAMPLES,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "num_train_epochs": 4,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **standard | options)


def data_of(head: str, count: int = SAMPLES) -> Dataset:
    """Samples of a head; those for questions are of one length, since Trainer counts padding."""
    lengths = (12,) if head == "questions" else (1, 3, 7, 20, 41)
    return Dataset.from_list(drawn_samples(head, count, lengths))


def trainer_of(kind, head, folder, count=SAMPLES, **options):
    """A trainer of that class; `options` are its own, and those of its arguments."""
    own = ("packed", "half_weights", "cuda_graph", "compute_metrics", "say")
    mine = {name: options.pop(name) for name in own if name in options}
    encoder = options.pop("encoder", "bert")
    if kind is FastTrainer:
        mine = {"say": quiet} | mine
    return kind(
        tiny_model(encoder, head),
        arguments(folder, **options),
        data_collator=padded_batch,
        train_dataset=data_of(head, count),
        eval_dataset=data_of(head, 10),
        **mine,
    )


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("head", ["questions", "sequences", "tokens"])
@pytest.mark.parametrize("packed", [True, False])
def test_in_fp32_it_trains_as_trainer_does(head, packed, tmp_path):
    """Each step has all samples, so that their order does not matter."""
    trainers = [
        trainer_of(Trainer, head, tmp_path),
        trainer_of(FastTrainer, head, tmp_path, packed=packed),
    ]
    for trainer in trainers:
        trainer.train()
    expected, weights = map(weights_of, trainers)
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        # A span's softmax does not see the last bias: its gradient is 0 but for rounding.
        if head != "questions":
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=0, msg=name)
    start = tiny_model(head=head).state_dict()
    assert any((weights[name].cpu() - value).abs().max() > 1e-3 for name, value in start.items())
    losses = [trainer.evaluate()["eval_loss"] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_with_bf16_weights_are_in_bf16_over_masters(tmp_path):
    said = []
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, bf16=True, say=said.append)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, MasterAdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert trainer.accelerator.mixed_precision == "no"
    assert said[1] == "weights in bf16, with fp32 masters in the optimizer"
    expected = trainer_of(Trainer, "sequences", tmp_path)
    expected.train()
    losses = [one.state.log_history[-1]["train_loss"] for one in (trainer, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)


def test_the_arguments_that_it_was_given_stay_as_they_were(tmp_path):
    args = arguments(tmp_path, bf16=True)
    trainer = FastTrainer(tiny_model(head="sequences"), args, say=quiet)
    assert args.bf16
    assert not trainer.args.bf16


def test_masters_are_updated_as_the_arguments_say(tmp_path):
    options = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-4, "bf16": True}
    optimizer = trainer_of(FastTrainer, "sequences", tmp_path, **options).create_optimizer()
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.8, 0.9), 1e-4)


@pytest.mark.parametrize(("options", "seed"), [({"seed": 5}, 5), ({"seed": 5, "data_seed": 0}, 0)])
def test_samples_are_dealt_by_the_seed_of_the_data_where_it_has_its_own(options, seed, tmp_path):
    loader = trainer_of(FastTrainer, "sequences", tmp_path, **options).get_train_dataloader()
    assert loader.dataset.seed == seed


@pytest.mark.parametrize("value", ["fp16", None])
def test_the_variable_that_asks_for_autocast_is_afterwards_as_it_was(value, tmp_path, monkeypatch):
    name = "ACCELERATE_MIXED_PRECISION"
    args = arguments(tmp_path, bf16=True)
    if value is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, value)
    FastTrainer(tiny_model(head="sequences"), args, say=quiet)
    assert os.environ.get(name) == value


@pytest.mark.parametrize(("encoder", "bf16"), [("bert", True), ("bert", False), ("mpnet", False)])
def test_a_stopped_training_goes_on_as_if_it_had_not_stopped(encoder, bf16, tmp_path):
    """In the middle of an epoch of five micro-batches, two in a step; another in each epoch."""
    options = {
        "encoder": encoder,
        "count": 75,
        "bf16": bf16,
        "per_device_train_batch_size": 15,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    whole = trainer_of(FastTrainer, "tokens", tmp_path / "whole", **options)
    whole.train()
    again = trainer_of(FastTrainer, "tokens", tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert whole.state.global_step == again.state.global_step == 9
    expected = weights_of(whole)
    # In fp32 attention is PyTorch's, which may add up in an order of its own on a GPU.
    rounding = 1e-5 if torch.cuda.is_available() and not bf16 else 0.0
    for name, value in weights_of(again).items():
        torch.testing.assert_close(value, expected[name], atol=rounding, rtol=0, msg=name)


def test_each_epoch_deals_the_samples_otherwise(tmp_path, monkeypatch):
    epochs = []
    monkeypatch.setattr(PackedDataset, "set_epoch", lambda self, epoch: epochs.append(int(epoch)))
    trainer_of(FastTrainer, "sequences", tmp_path, num_train_epochs=3).train()
    assert sorted(set(epochs)) == [0, 1, 2]


def test_a_saved_model_is_one_of_transformers(tmp_path):
    trainer = trainer_of(FastTrainer, "tokens", tmp_path, num_train_epochs=1)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    again, loading = HEADS["tokens"].from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading.values())
    batch = padded_batch(drawn_samples("tokens", 4))
    expected = trainer.model.eval()(**{k: v.to(trainer.args.device) for k, v in batch.items()})
    torch.testing.assert_close(again.eval()(**batch).logits, expected.logits.cpu())


def test_predictions_are_in_the_order_of_the_dataset(tmp_path):
    trainer = trainer_of(FastTrainer, "sequences", tmp_path)
    predictions = trainer.predict(trainer.eval_dataset)
    assert predictions.label_ids.tolist() == trainer.eval_dataset["labels"]
    assert np.isfinite(predictions.predictions).all()


def test_a_model_may_come_from_a_function(tmp_path):
    said = []
    trainer = FastTrainer(
        model_init=lambda: tiny_model(head="sequences"),
        args=arguments(tmp_path),
        train_dataset=data_of("sequences"),
        say=said.append,
    )
    trainer.train()
    assert any(line.startswith("BertForSequenceClassification: fused QKV") for line in said)
    assert trainer.state.global_step == 4


# The graph. On a CPU the function that would be captured is called.


def replays(function):
    """Stand in for CapturedStep on a CPU: from the third call on gradients come as in a replay.

    They are in memory of its own, which each replay overwrites, and not with the parameters. They
    are those of the model that was captured.
    """
    models = []
    static = []

    def call(batches, model):
        models.append(model)
        if len(models) > 2:
            model = models[1]
        loss = function(batches, model)
        parameters = list(model.parameters())
        if len(models) == 2:  # the capture
            static.extend(p.grad for p in parameters)
        elif len(models) > 2:
            for memory, parameter in zip(static, parameters, strict=True):
                if memory is not None:
                    memory.copy_(parameter.grad)
                parameter.grad = None
        return loss

    return call


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_replays_are_those_of_the_backward_pass(accumulation, tmp_path):
    """One micro-batch of seven is smaller, and the last step has one micro-batch alone."""
    options = {
        "count": 75,
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
    }
    plain = trainer_of(FastTrainer, "tokens", tmp_path, **options)
    captured = trainer_of(FastTrainer, "tokens", tmp_path, **options)
    captured.captured = CapturedBackward(captured, capture=replays)
    plain.train()
    captured.train()
    expected = weights_of(plain)
    for name, value in weights_of(captured).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)


def test_a_second_training_captures_its_own_model(tmp_path):
    """A function gives each training a model, and a graph is that of the first one's weights."""
    trainer = FastTrainer(
        model_init=lambda: tiny_model(head="tokens"),
        args=arguments(tmp_path, per_device_train_batch_size=4),
        train_dataset=data_of("tokens"),
        say=quiet,
    )
    trainer.train()
    expected = weights_of(trainer)
    trainer.captured = CapturedBackward(trainer, capture=replays)
    for _ in range(2):
        trainer.train()
        for name, value in weights_of(trainer).items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU captures no graph")
def test_a_captured_training_is_the_uncaptured_one(tmp_path):
    options = {"count": 90, "per_device_train_batch_size": 15, "num_train_epochs": 3, "bf16": True}
    plain = trainer_of(FastTrainer, "tokens", tmp_path, **options)
    captured = trainer_of(FastTrainer, "tokens", tmp_path, cuda_graph=True, **options)
    plain.train()
    captured.train()
    losses = [one.state.log_history[-1]["train_loss"] for one in (plain, captured)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU captures it")
def test_a_graph_on_a_cpu_is_refused_in_one_line(tmp_path):
    refused(
        "a step is captured on CUDA alone",
        trainer_of,
        FastTrainer,
        "sequences",
        tmp_path,
        cuda_graph=True,
    )


def test_padded_samples_are_refused_in_one_line(tmp_path):
    padded = [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": 1}] * 4
    trainer = FastTrainer(
        tiny_model(), arguments(tmp_path), train_dataset=Dataset.from_list(padded), say=quiet
    )
    refused("is padded: tokenize without padding", trainer.train)


def test_several_gpus_of_one_process_are_refused(tmp_path):
    several = arguments(tmp_path)
    several._n_gpu = 2
    refused("one process sees 2 GPUs: torchrun", FastTrainer, tiny_model(), several)


def test_an_epoch_has_as_many_examples_as_the_dataset(tmp_path):
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, count=21)
    assert trainer.num_examples(trainer.get_train_dataloader()) == 21


def test_a_line_says_how_the_training_data_was_packed(tmp_path):
    said = []
    trainer_of(FastTrainer, "sequences", tmp_path, say=said.append).get_train_dataloader()
    assert said[-1].startswith("16 samples in 1 packed sequences of ")


def test_the_loader_takes_what_the_arguments_say_of_workers(tmp_path):
    options = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 5}
    loader = trainer_of(FastTrainer, "sequences", tmp_path, **options).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 5)


def test_a_graph_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(own_trainer, "check_capture", lambda device: None)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    said = "cuda_graph is for one process"
    refused(said, trainer_of, FastTrainer, "sequences", tmp_path, cuda_graph=True)
