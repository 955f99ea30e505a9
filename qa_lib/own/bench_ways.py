"""The ways to train that bench.py times, and what they train on.

A way is a function of `WAYS`, called with the `Work` that it is to do. They are, in BF16 where the
device is a GPU:

- loop: a plain loop, autocast, padded to the longest sample of the batch, PyTorch's fused AdamW;
- trainer: transformers.Trainer as it comes, in fp32;
- trainer-tuned: the Trainer with what a search found to pay (peers/search_trainer.py): bf16,
  workers, batches of like lengths, padding to few lengths, torch.compile, no filter for NaN; its
  warm-up begins with a batch of each padded length, so that none is new to the compiler later;
- speed_up: the plain loop on a model that was sped up;
- packing: the plain loop on packed sequences, on a model that only takes them;
- masters: both, with weights in bf16 and MasterAdamW;
- all: that, as one CUDA graph;
- fast-trainer: FastTrainer with all of it.

Weights and tokens are random; the lengths are like those of the task's data, and a label is what a
sample's first token says, so that losses fall.
"""

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from qa_lib.data.batches import ROUND_TUNED, round_up
from qa_lib.own.bench_turns import DEVICE, Measured
from qa_lib.own.graphed_step import GraphedStep
from qa_lib.own.packed_model import Rooted, take_packed
from qa_lib.own.packing import IGNORED, PackedCollator, pack
from qa_lib.own.speed_up import speed_up
from qa_lib.own.trainer import FastTrainer
from qa_lib.train.master_adamw import MasterAdamW
from qa_lib.train.trainer import TUNED


class Task(NamedTuple):
    """What is learnt, and how long its samples are: lengths are drawn from a log-normal."""

    model_class: type
    median: int
    """Tokens of a sample."""
    spread: float
    """The standard deviation of the logarithm of the lengths."""
    longest: int


# Like MNLI's pairs of sentences, SQuAD's questions with their paragraphs, and the sentences of
# CoNLL-2003.
TASKS = {
    "pairs": Task(AutoModelForSequenceClassification, 36, 0.45, 128),
    "paragraphs": Task(AutoModelForSequenceClassification, 160, 0.35, 384),
    "labels": Task(AutoModelForTokenClassification, 22, 0.6, 128),
}
SIZES = {
    "base": BertConfig(num_labels=2),
    "modernbert": ModernBertConfig(num_labels=2),
    "tiny": BertConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=2,
    ),
}
ON_GPU = DEVICE.type == "cuda"
LOADER_OPTIONS = {"pin_memory": ON_GPU, "num_workers": 2 if ON_GPU else 0}
TRAINER_EXTRAS = TUNED if ON_GPU else {}
RATE = 5e-5
CLIP = 1.0
FIRST_TOKEN = 10  # of random ones


class Work(NamedTuple):
    """What a way does: a warm-up and so many steps of `batch` samples, which `measured` counts."""

    model: PreTrainedModel
    samples: list[dict]
    batch: int
    steps: int
    measured: Measured


def work_of(task: str, size: str, samples: int, batch: int, steps: int, measured: Measured) -> Work:
    """Return the work of a task on a new model of that size, the same in each call."""
    torch.manual_seed(0)
    config = copy.deepcopy(SIZES[size])
    model = TASKS[task].model_class.from_config(config, attn_implementation="sdpa")
    drawn = drawn_samples(task, samples, config)
    return Work(model.to(DEVICE).train(), drawn, batch, steps, measured)


def drawn_samples(task: str, count: int, config: PreTrainedConfig) -> list[dict]:
    """Return samples of a task for a model of `config`, random but for lengths and labels."""
    meant = TASKS[task]
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(np.log(meant.median), meant.spread, count))
    lengths = lengths.clip(3, meant.longest).astype(int)
    samples = []
    for length in lengths:
        ids = draw.integers(FIRST_TOKEN, config.vocab_size, length)
        ids[ids == config.pad_token_id] = FIRST_TOKEN  # a sample that ends in padding is refused
        has_token_labels = meant.model_class is AutoModelForTokenClassification
        labels = ids % 2 if has_token_labels else ids[0] % 2
        samples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return samples


def padded(samples: list[dict], multiple: int = 1) -> dict[str, torch.Tensor]:
    """Return samples as a batch that is padded to the longest of them, as most collators do.

    It has a multiple of `multiple` tokens.
    """
    longest = round_up(max(len(sample["input_ids"]) for sample in samples), multiple)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for sample in samples:
        length = len(sample["input_ids"])
        missing = longest - length
        labels = sample["labels"]
        batch["input_ids"].append(sample["input_ids"] + [0] * missing)
        batch["attention_mask"].append([1] * length + [0] * missing)
        batch["labels"].append(labels + [IGNORED] * missing if isinstance(labels, list) else labels)
    return {name: torch.tensor(rows) for name, rows in batch.items()}


# Loops of one's own.


def plain_step(model: PreTrainedModel) -> Callable[[dict], torch.Tensor]:
    """Return the step of the plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=ON_GPU)

    def step(batch):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def master_step(model: PreTrainedModel, capture: bool) -> Callable[[dict], torch.Tensor]:
    """Return the step with masters of the weights, captured if asked."""
    optimizer = MasterAdamW(model.parameters(), lr=RATE, max_norm=CLIP)
    return GraphedStep(model, optimizer, capture=capture)


def time_loop(step: Callable[[dict], torch.Tensor], loader: DataLoader, work: Work) -> None:
    """Train by a loop."""
    measured = work.measured
    for batch in repeated(loader, measured.warm_up + work.steps):
        batch = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in batch.items()}
        measured.step(step(batch))


def repeated(loader: DataLoader, count: int) -> Iterator[dict]:
    """Yield so many batches, over as many epochs as they take."""
    while True:
        for batch in loader:
            if count == 0:
                return
            count -= 1
            yield batch


def padded_loader(work: Work) -> DataLoader:
    """Return the batches of an epoch, padded to their longest samples, in random order."""
    return DataLoader(
        work.samples,
        batch_size=work.batch,
        shuffle=True,
        drop_last=True,
        collate_fn=padded,
        **LOADER_OPTIONS,
    )


def packed_loader(work: Work) -> DataLoader:
    """Return the packed sequences of an epoch, with as many samples in each."""
    rows = pack(work.samples, samples=work.batch, drop_last=True, say=quiet)
    return DataLoader(rows, batch_size=None, collate_fn=PackedCollator(), **LOADER_OPTIONS)


def quiet(_: str) -> None:
    """Say nothing."""


# Trainers.


class _Steps(TrainerCallback):
    """Tells `measured` of each step."""

    def __init__(self, measured: Measured):
        self.measured = measured

    def on_step_end(self, args, state, control, **kwargs):
        self.measured.step()


def time_trainer(make: Callable, work: Work, collator: Callable | None = padded, **options) -> None:
    """Train by a Trainer that `make` makes. `options` are of its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder,
            max_steps=work.measured.warm_up + work.steps,
            per_device_train_batch_size=work.batch,
            learning_rate=RATE,
            max_grad_norm=CLIP,
            use_cpu=not ON_GPU,
            dataloader_drop_last=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        trainer = make(
            work.model,
            training,
            data_collator=collator,
            train_dataset=work.samples,
            callbacks=[_Steps(work.measured)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def batches_of_each_length(samples: list[dict], batch: int) -> list[int]:
    """Return the numbers of samples for a batch of each padded length, the longest first.

    Lengths that no batch can have, since fewer samples than a batch are that short, are left out.
    """
    lengths = round_up(np.array([len(sample["input_ids"]) for sample in samples]), ROUND_TUNED)
    order = lengths.argsort(kind="stable")
    lengths = lengths[order]
    numbers = []
    for length in np.unique(lengths[batch - 1 :])[::-1]:
        end = lengths.searchsorted(length, side="right")
        numbers += order[end - batch : end].tolist()
    return numbers


class _FirstThen(Sampler):
    """Gives the numbers of samples in `first`, once, and then those of a sampler in each epoch."""

    def __init__(self, first: list[int], sampler: Sampler):
        self.first = first
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, []
        yield from first
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


class _WarmTrainer(Trainer):
    """A Trainer that begins with the samples whose numbers are in `first`."""

    first: list[int]

    def _get_train_sampler(self, *args) -> Sampler:
        return _FirstThen(self.first, super()._get_train_sampler(*args))


# The ways.


def loop(work: Work) -> None:
    """Train by a plain loop."""
    time_loop(plain_step(work.model), padded_loader(work), work)


def trainer(work: Work) -> None:
    """Train by the Trainer as it comes."""
    time_trainer(Trainer, work)


def tuned_trainer(work: Work) -> None:
    """Train by the tuned Trainer, with a batch of each padded length in the warm-up."""
    first = batches_of_each_length(work.samples, work.batch)
    work.measured.warm_up += len(first) // work.batch

    def make(*args, **options):
        made = _WarmTrainer(*args, **options)
        made.first = first
        return made

    time_trainer(
        make,
        work,
        functools.partial(padded, multiple=ROUND_TUNED),
        bf16=True,
        optim="adamw_torch_fused",
        train_sampling_strategy="group_by_length",
        torch_compile=ON_GPU,
        **TRAINER_EXTRAS,
    )


def sped_up_loop(work: Work) -> None:
    """Train by the plain loop on a model that was sped up."""
    speed_up(work.model, say=quiet)
    time_loop(plain_step(work.model), padded_loader(work), work)


def packed_loop(work: Work) -> None:
    """Train by the plain loop on packed sequences, on a model that only takes them."""
    take_packed(work.model, Rooted(work.model))
    time_loop(plain_step(work.model), packed_loader(work), work)


def masters_loop(work: Work, capture: bool = False) -> None:
    """Train on packed sequences, sped up, with weights in bf16 and masters."""
    speed_up(work.model, say=quiet)
    work.model.to(torch.bfloat16)
    time_loop(master_step(work.model, capture), packed_loader(work), work)


def graphed_loop(work: Work) -> None:
    """Train as masters_loop does, by a CUDA graph."""
    masters_loop(work, capture=ON_GPU)


def fast_trainer(work: Work) -> None:
    """Train by FastTrainer with all of it; it packs by itself."""
    make = functools.partial(FastTrainer, cuda_graph=ON_GPU, say=quiet)
    time_trainer(make, work, collator=None, bf16=True, **TRAINER_EXTRAS)


WAYS: dict[str, Callable[[Work], None]] = {
    "loop": loop,
    "trainer": trainer,
    "trainer-tuned": tuned_trainer,
    "speed_up": sped_up_loop,
    "packing": packed_loop,
    "masters": masters_loop,
    "all": graphed_loop,
    "fast-trainer": fast_trainer,
}
