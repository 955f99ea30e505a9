"""FastTrainer trains as Trainer does, with the techniques, and leaves all else to Trainer."""

import os

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DefaultDataCollator,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from qa_lib.own import trainer as own_trainer
from qa_lib.own.packing import PackedCollator, PackedDataset, pack
from qa_lib.own.speed_up import speed_up
from qa_lib.own.trainer import CapturedBackward, FastTrainer
from qa_lib.own.trainer_checks import check_padding
from qa_lib.train.master_adamw import MasterAdamW
from tests.material import refused
from tests.own import (
    HEADS,
    SIZES,
    drawn_samples,
    padded_batch,
    quiet,
    tiny_model,
    tiny_tokenizer,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES = 16
TOKENIZER = tiny_tokenizer()


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
    own = ("packed", "half_weights", "cuda_graph", "optimizers", "optimizer_cls_and_kwargs", "say")
    mine = {name: options.pop(name) for name in own if name in options}
    encoder = options.pop("encoder", "bert")
    model = options.pop("model", None) or tiny_model(encoder, head)
    collator = DataCollatorWithPadding(TOKENIZER)
    if head == "tokens":
        collator = DataCollatorForTokenClassification(TOKENIZER)
    if issubclass(kind, FastTrainer):
        mine = {"say": quiet} | mine
    return kind(
        model,
        arguments(folder, **options),
        data_collator=collator,
        train_dataset=data_of(head, count),
        eval_dataset=data_of(head, 10),
        **mine,
    )


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


LAST_LAYER = SIZES["num_hidden_layers"] - 1
ADDED_TO_ALL = ("qa_outputs.bias", f"layer.{LAST_LAYER}.output.LayerNorm.bias")


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
        # A span's softmax does not see what is added to all tokens: these gradients are 0 but for
        # rounding, which Adam scales up.
        if head != "questions" or not name.endswith(ADDED_TO_ALL):
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


class WeightedTrainer(FastTrainer):
    """A trainer whose loss has weights of classes, in fp32, and of samples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = inputs.pop("weight")
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = torch.nn.functional.cross_entropy(
            outputs.logits, labels, weight=torch.tensor([1.0, 3.0]), reduction="none"
        )
        loss = (weights * losses).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("bf16", [False, True])
def test_a_loss_has_weights_of_classes_and_of_samples(bf16, tmp_path):
    """Samples of weight 0 teach nothing: training is that of the others alone."""
    samples = drawn_samples("sequences", 16)
    weighted = [sample | {"weight": float(number % 2)} for number, sample in enumerate(samples)]
    trainer = WeightedTrainer(
        tiny_model(),
        arguments(tmp_path, bf16=bf16, remove_unused_columns=False, max_steps=1),
        data_collator=PackedCollator(keep=["weight"]),
        train_dataset=weighted,
        eval_dataset=weighted,
        say=quiet,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    gradient = trainer.model.classifier.weight.grad.clone()
    trainer.model.zero_grad()
    taught = PackedCollator(keep=["weight"])([s for s in weighted if s["weight"]])
    (trainer.compute_loss(trainer.model, dict(taught)) / 2).backward()
    torch.testing.assert_close(gradient, trainer.model.classifier.weight.grad, atol=2e-2, rtol=0)
    assert loss.dtype == torch.float32
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0


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
    are those of the model that was captured. So is the norm of gradients.
    """
    models = []
    static = []
    norms = []
    captured = function.__self__

    def call(batches, model):
        models.append(model)
        if len(models) > 2:
            model = models[1]
        loss = function(batches, model)
        parameters = list(model.parameters())
        if len(models) == 2:  # the capture
            static.extend(p.grad for p in parameters)
            norms.append(captured.norm_in_graph)
        elif len(models) > 2:
            for memory, parameter in zip(static, parameters, strict=True):
                if memory is not None:
                    memory.copy_(parameter.grad)
                parameter.grad = None
            if norms[0] is not None:
                captured.norm_in_graph = norms[0].copy_(captured.norm_in_graph)
        return loss

    return call


def trained_plainly_and_captured(folder, **options) -> list[FastTrainer]:
    """Two trainers of seven micro-batches an epoch, the last one smaller, that have trained.

    The second one's passes were captured.
    """
    sizes = {"count": 75, "per_device_train_batch_size": 12, "num_train_epochs": 2}
    trainers = [trainer_of(FastTrainer, "tokens", folder, **sizes, **options) for _ in range(2)]
    trainers[1].captured = CapturedBackward(trainers[1], capture=replays)
    for trainer in trainers:
        trainer.train()
    return trainers


def assert_equal_weights(one, other) -> None:
    expected = weights_of(one)
    for name, value in weights_of(other).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_replays_are_those_of_the_backward_pass(accumulation, tmp_path):
    """With two micro-batches a step, the last step of an epoch has one alone."""
    options = {"gradient_accumulation_steps": accumulation}
    assert_equal_weights(*trained_plainly_and_captured(tmp_path, **options))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_norms_and_clipping_are_those_of_the_trainer(accumulation, tmp_path):
    """The graph clips where a step has one micro-batch; the smaller one runs without it."""
    options = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.05}
    trainers = trained_plainly_and_captured(tmp_path, **options, logging_steps=1)
    norms = []
    for trainer in trainers:
        norms.append([line["grad_norm"] for line in trainer.state.log_history if "loss" in line])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert min(norms[0]) > 0.05  # clipped in all steps
    assert_equal_weights(*trainers)


def test_gradients_are_not_clipped_where_the_arguments_say_so(tmp_path):
    trainer = trainer_of(FastTrainer, "tokens", tmp_path, max_grad_norm=0.0)
    trainer.captured = CapturedBackward(trainer, capture=replays)
    trainer.train()
    assert trainer.captured.norm is None


def test_operations_are_counted_as_the_trainer_counts_them(tmp_path):
    trainer = trainer_of(FastTrainer, "tokens", tmp_path)
    for tokens in (10, 30):
        inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.long)}
        expected = Trainer.floating_point_ops(trainer, inputs)
        assert trainer.floating_point_ops(inputs) == expected > 0
    assert trainer.floating_point_ops({"embeds": torch.zeros(3)}) == 0
    trainer.train()
    assert trainer.state.total_flos > 0


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
        r"a step is captured on CUDA alone, .*\(cuda_graph=False\)",
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
    options = {
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 5,
        "dataloader_persistent_workers": True,
    }
    loader = trainer_of(FastTrainer, "sequences", tmp_path, **options).get_train_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 5)
    assert loader.persistent_workers


def test_a_graph_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(own_trainer, "check_capture", lambda *args, **more: None)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    said = "cuda_graph is for one process"
    refused(said, trainer_of, FastTrainer, "sequences", tmp_path, cuda_graph=True)


# Where MasterAdamW is not the optimizer, weights stay in fp32.


class OfItsOwn(FastTrainer):
    """A trainer that makes its optimizer itself."""

    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        return self.optimizer


def in_fp32(trainer, said: list[str], why: str) -> None:
    """Check that a trainer has told why its weights stay in fp32, and that each update counts."""
    lines = [line for line in said if line.startswith("weights ")]
    assert lines == [f"weights stay in fp32, under the Trainer's autocast: {why}"]
    assert trainer.accelerator.mixed_precision == "bf16"
    before = weights_of(trainer)
    trainer.train()
    assert not isinstance(trainer.optimizer.optimizer, MasterAdamW)
    after = weights_of(trainer)
    assert {value.dtype for value in after.values() if value.is_floating_point()} == {torch.float32}
    changed = [(after[name] != before[name]).float().mean() for name in after]
    assert max(changed) > 0.9, "an update by 1e-4 of a gradient is lost in bf16"


@pytest.mark.parametrize("optim", ["sgd", "adafactor"])
def test_another_optimizer_of_the_arguments_has_weights_in_fp32(optim, tmp_path):
    said = []
    options = {"optim": optim, "bf16": True, "learning_rate": 1e-4, "say": said.append}
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, **options)
    in_fp32(trainer, said, f"optim is {optim}, which keeps no fp32 masters")


def test_an_optimizer_that_is_given_has_weights_in_fp32(tmp_path):
    said = []
    model = speed_up(tiny_model(), say=quiet)
    optimizers = (torch.optim.AdamW(model.parameters(), lr=1e-4), None)
    options = {"bf16": True, "model": model, "optimizers": optimizers, "say": said.append}
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, **options)
    in_fp32(trainer, said, "the AdamW that was given keeps no fp32 masters")


def test_the_class_of_an_optimizer_that_is_given_has_weights_in_fp32(tmp_path):
    said = []
    given = (torch.optim.AdamW, {"lr": 1e-4})
    options = {"bf16": True, "optimizer_cls_and_kwargs": given, "say": said.append}
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, **options)
    in_fp32(trainer, said, "the AdamW that was given keeps no fp32 masters")


def test_a_trainer_that_makes_its_optimizer_itself_has_weights_in_fp32(tmp_path):
    said = []
    trainer = trainer_of(OfItsOwn, "sequences", tmp_path, bf16=True, say=said.append)
    in_fp32(trainer, said, "OfItsOwn has create_optimizer of its own, which may keep no masters")


def test_masters_that_are_given_have_weights_in_bf16(tmp_path):
    options = {"bf16": True, "optimizer_cls_and_kwargs": (MasterAdamW, {"lr": 1e-4})}
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, **options)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def test_an_optimizer_that_is_set_after_the_weights_were_cast_is_refused(tmp_path):
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, bf16=True)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters())
    refused("weights are in bf16, of which SGD keeps no masters: ", trainer.train)


def test_each_training_has_the_arguments_of_its_own_time(tmp_path):
    """A search for hyperparameters changes them between trainings."""
    trainer = trainer_of(FastTrainer, "sequences", tmp_path, bf16=True)
    trainer.create_optimizer()
    trainer.optimizer = None
    trainer.args.learning_rate = 0.5
    assert trainer.create_optimizer().param_groups[0]["lr"] == 0.5


# Collators.


class Padding(DataCollatorWithPadding):
    """It may do more than pad."""


PADDING = [
    None,
    default_data_collator,
    DefaultDataCollator(),
    DataCollatorWithPadding(TOKENIZER),
    DataCollatorForTokenClassification(TOKENIZER),
    PackedCollator(),
]
MORE = [
    (padded_batch, "padded_batch"),
    (Padding(TOKENIZER), "Padding"),
    (DataCollatorForLanguageModeling(TOKENIZER, mlm=False), "DataCollatorForLanguageModeling"),
]


@pytest.mark.parametrize("collator", PADDING)
def test_packing_takes_the_place_of_a_collator_that_pads(collator, tmp_path):
    args = arguments(tmp_path)
    trainer = FastTrainer(tiny_model(), args, collator, data_of("sequences"), say=quiet)
    trainer.train()


@pytest.mark.parametrize(("collator", "name"), MORE)
def test_packing_refuses_to_leave_out_a_collator_that_may_do_more(collator, name, tmp_path):
    said = (
        f"packing replaces data_collator, and this {name} may do more than pad: "
        r"FastTrainer\(\.\.\., packed=False\) keeps it"
    )
    args = arguments(tmp_path)
    model = tiny_model()
    refused(said, FastTrainer, model, args, collator, data_of("sequences"), say=quiet)
    refused(said, FastTrainer, model, args, data_collator=collator, say=quiet)
    trainer = FastTrainer(model, args, train_dataset=data_of("sequences"), say=quiet)
    trainer.data_collator = collator
    refused(said, trainer.train)


def test_without_packing_the_scripts_collator_trains(tmp_path):
    calls = []

    def collate(samples):
        calls.append(len(samples))
        return padded_batch(samples)

    data = data_of("sequences")
    args = arguments(tmp_path, num_train_epochs=1)
    trainer = FastTrainer(tiny_model(), args, collate, data, packed=False, say=quiet)
    trainer.train()
    assert calls == [SAMPLES]


@pytest.mark.parametrize("name", ["labels", "label"])
@pytest.mark.parametrize("head", ["sequences", "tokens"])
def test_evaluation_pads_as_the_labels_need_it(head, name, tmp_path):
    samples = data_of(head).rename_column("labels", name) if name != "labels" else data_of(head)
    trainer = FastTrainer(
        tiny_model(head=head),
        arguments(tmp_path),
        eval_dataset=samples,
        processing_class=TOKENIZER,
        say=quiet,
    )
    expected = trainer_of(Trainer, head, tmp_path).predict(data_of(head))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.metrics["test_loss"], abs=1e-5)
    found = trainer.predict(samples)
    assert np.array_equal(found.label_ids, expected.label_ids)
    np.testing.assert_allclose(found.predictions, expected.predictions, atol=1e-4)


def test_labels_of_a_sample_are_not_taken_for_those_of_its_tokens(tmp_path):
    """Two labels of two tokens, in real numbers: as transformers wants them for several labels."""
    samples = [{"input_ids": [5, 6], "labels": [0.0, 1.0]}, {"input_ids": [7, 8], "labels": [1, 0]}]
    trainer = FastTrainer(
        tiny_model(problem_type="multi_label_classification"),
        arguments(tmp_path),
        eval_dataset=samples,
        processing_class=TOKENIZER,
        say=quiet,
    )
    assert trainer.predict(samples[:1]).label_ids.dtype == np.float32


@pytest.mark.parametrize("head", ["sequences", "tokens"])
def test_samples_that_nothing_pads_are_refused_in_one_line(head, tmp_path):
    data = data_of(head)
    trainer = FastTrainer(tiny_model(head=head), arguments(tmp_path), eval_dataset=data, say=quiet)
    said = r"a batch has samples of 1 to 41 tokens, and nothing pads them: .*processing_class"
    refused(said, trainer.evaluate)
    refused(said, trainer.predict, data)


def test_samples_of_one_length_need_no_tokenizer(tmp_path):
    data = Dataset.from_list(drawn_samples("tokens", 8, lengths=(7,)))
    trainer = FastTrainer(tiny_model(head="tokens"), arguments(tmp_path), say=quiet)
    assert trainer.evaluate(data)["eval_loss"] > 0


# Data that packing cannot take.


def test_samples_that_are_packed_already_are_refused(tmp_path):
    rows = pack(drawn_samples("sequences"), samples=8, say=quiet)
    args = arguments(tmp_path)
    model = tiny_model()
    said = "these samples are packed already: give FastTrainer the samples themselves"
    refused(said, FastTrainer, model, args, train_dataset=rows, say=quiet)
    trainer = FastTrainer(model, args, say=quiet)
    refused(said, trainer.evaluate, rows)
    trainer.train_dataset = rows
    refused(said, trainer.train)


class Mapped(TorchDataset):
    """A dataset of one's own."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples[number]


def backwards(samples) -> Dataset:
    """A dataset whose rows lie in memory in another order than it gives them."""
    return Dataset.from_list(samples[::-1]).select(range(len(samples) - 1, -1, -1))


@pytest.mark.parametrize("kind", [list, Mapped, Dataset.from_list, backwards])
@pytest.mark.parametrize(("ids", "what"), [([5, 6, 0], "ends in"), ([0, 5, 6], "begins with")])
def test_padding_without_a_mask_is_refused(kind, ids, what, tmp_path):
    samples = drawn_samples("sequences", 8)
    samples[5]["input_ids"] = ids
    args = arguments(tmp_path)
    trainer = FastTrainer(tiny_model(), args, train_dataset=kind(samples), say=quiet)
    refused(
        f"sample 5 {what} token 0, by which the model's configuration pads: "
        r"tokenize without padding=",
        trainer.train,
    )


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_a_mask_says_that_such_a_token_is_text(kind, tmp_path):
    samples = [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 1], "labels": 1}] * 4
    args = arguments(tmp_path, num_train_epochs=1)
    FastTrainer(tiny_model(), args, train_dataset=kind(samples), say=quiet).train()


@pytest.mark.parametrize("pad", [{"pad_token_id": None}, {"eos_token_id": 0, "cls_token_id": 0}])
def test_a_model_whose_padding_may_be_text_takes_such_samples(pad, tmp_path):
    samples = [{"input_ids": [0, 5, 6, 0], "labels": 1}] * 4
    model = tiny_model()
    for name, value in pad.items():
        setattr(model.config, name, value)
    args = arguments(tmp_path, num_train_epochs=1)
    FastTrainer(model, args, train_dataset=samples, say=quiet).train()


def test_padding_is_looked_for_by_columns(monkeypatch):
    """One by one, 100,000 samples would take seconds."""
    samples = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 100_000})
    monkeypatch.delattr(Dataset, "__getitem__")
    monkeypatch.delattr(Dataset, "__iter__")
    check_padding(samples, tiny_model().config)


# Checkpoints of another training.


def written_by(kind, folder, **options) -> str:
    """The checkpoint that a training of two steps has written."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2} | options
    trainer_of(kind, "sequences", folder, **options).train()
    return str(folder / "checkpoint-2")


PLAIN = (Trainer, {})
FP32 = (FastTrainer, {})
HALF = (FastTrainer, {"bf16": True})
AUTOCAST = (FastTrainer, {"bf16": True, "half_weights": False})
BY_TRAINER = "transformers.Trainer wrote it"
BY_FP32 = "FastTrainer wrote it with weights in fp32"
BY_HALF = "FastTrainer wrote it with weights in bf16 over masters"
HERE_FP32 = "here they are in fp32 without masters"
HERE_HALF = "here they are in bf16 over masters"
STRANGERS = [
    (PLAIN, FP32, BY_TRAINER),
    (PLAIN, AUTOCAST, BY_TRAINER),
    (PLAIN, HALF, BY_TRAINER),
    (HALF, FP32, f"{BY_HALF}, and {HERE_FP32}"),
    (HALF, AUTOCAST, f"{BY_HALF}, and {HERE_FP32}"),
    (FP32, HALF, f"{BY_FP32} without masters, and {HERE_HALF}"),
    (AUTOCAST, HALF, f"{BY_FP32} without masters, and {HERE_HALF}"),
]


@pytest.mark.parametrize(("writer", "reader", "said"), STRANGERS)
def test_a_checkpoint_of_another_kind_is_refused(writer, reader, said, tmp_path):
    checkpoint = written_by(writer[0], tmp_path, **writer[1])
    trainer = trainer_of(reader[0], "sequences", tmp_path, **reader[1])
    message = refused(said, trainer.train, resume_from_checkpoint=checkpoint)
    assert message.startswith(f"{checkpoint} cannot be resumed: ")
    assert message.endswith(
        "resume it by what wrote it, or start from its weights, "
        f"from_pretrained({checkpoint!r}, dtype='float32')"
    )


def test_a_checkpoint_without_an_optimizer_is_told_by_its_weights(tmp_path):
    written_by(FastTrainer, tmp_path, bf16=True, save_only_model=True)
    trainer = trainer_of(FastTrainer, "sequences", tmp_path)
    said = "checkpoint-2 cannot be resumed: its weights are in bf16, and here in fp32; "
    refused(said, trainer.train, resume_from_checkpoint=True)


class OfItsOwnSampler(FastTrainer):
    def _get_train_sampler(self, *args):
        return super()._get_train_sampler(*args)


def test_a_sampler_of_its_own_is_refused_where_packing_would_leave_it_out(tmp_path):
    said = "packing deals the samples itself, and OfItsOwnSampler has _get_train_sampler of its own"
    refused(said, trainer_of, OfItsOwnSampler, "sequences", tmp_path)
    trainer_of(OfItsOwnSampler, "sequences", tmp_path, packed=False).train()


def test_a_strategy_of_sampling_that_packing_leaves_out_is_said(tmp_path):
    said = []
    options = {"train_sampling_strategy": "group_by_length", "say": said.append}
    trainer_of(FastTrainer, "sequences", tmp_path, **options).train()
    assert "train_sampling_strategy='group_by_length' is left out: packing deals at random" in said


def test_a_column_of_numbers_that_was_asked_for_is_not_left_out_in_silence(tmp_path):
    """Text is what no collator makes a tensor of."""
    samples = [sample | {"weight": 2.0, "text": "a"} for sample in drawn_samples("sequences", 16)]
    options = {"remove_unused_columns": False}
    trainer = FastTrainer(
        tiny_model(), arguments(tmp_path, **options), train_dataset=samples, say=quiet
    )
    refused(r"data_collator=PackedCollator\(keep=\['weight'\]\)", trainer.train)
    trainer.data_collator = PackedCollator(keep=["weight"])
    assert "weight" in next(iter(trainer.get_train_dataloader()))


def test_noise_that_is_scaled_by_a_samples_length_is_refused(tmp_path):
    noisy = arguments(tmp_path, neftune_noise_alpha=5.0)
    refused("neftune_noise_alpha", FastTrainer, tiny_model(), noisy, say=quiet)
    FastTrainer(tiny_model(), noisy, packed=False, say=quiet)


def test_a_dataset_that_makes_its_samples_on_the_fly_is_trained_on(tmp_path):
    def tokenized(rows):
        ids = [[7] * len(text) for text in rows["text"]]
        return {"input_ids": ids, "labels": rows["label"]}

    stored = Dataset.from_dict({"text": ["abc", "a", "abcde", "ab"] * 4, "label": [0, 1, 1, 0] * 4})
    trainer = FastTrainer(
        tiny_model(),
        arguments(tmp_path, remove_unused_columns=False, num_train_epochs=1),
        train_dataset=stored.with_transform(tokenized),
        say=quiet,
    )
    trainer.train()
    assert trainer.state.global_step == 1
