"""What the techniques give in one's own training: `python -m qa_lib.own.bench --task pairs`.

Ways to train the same model on the same samples are timed in turns, round after round, so that a
card that grows warm or is shared with others does not favour one of them. Each measurement prints a
line of JSON, and a table of medians comes last; stderr says which way is at work. Ctrl-C ends it
with what has been measured, and a way that fails leaves the others their turns. Weights and tokens
are random; the lengths are like those of the task's data, and a label is what a sample's first
token says, so that losses fall.

The ways, in BF16 where the device is a GPU:

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
"""

import argparse
import functools
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    ModernBertConfig,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from qa_lib.data.batches import ROUND_TUNED, round_up
from qa_lib.own.graphed_step import GraphedStep
from qa_lib.own.packed_model import Rooted, take_packed
from qa_lib.own.packing import IGNORED, PackedCollator, pack
from qa_lib.own.speed_up import speed_up
from qa_lib.own.trainer import FastTrainer
from qa_lib.train.master_adamw import MasterAdamW
from qa_lib.train.trainer import TUNED

# The class of a task's models; median and spread of the logarithm of its samples' lengths, and the
# longest: like MNLI's pairs of sentences, SQuAD's questions with their paragraphs, and the
# sentences of CoNLL-2003.
TASKS = {
    "pairs": (AutoModelForSequenceClassification, 36, 0.45, 128),
    "paragraphs": (AutoModelForSequenceClassification, 160, 0.35, 384),
    "labels": (AutoModelForTokenClassification, 22, 0.6, 128),
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
RATE = 5e-5
CLIP = 1.0
FIRST_TOKEN = 10  # of random ones
EXAMPLE = """\
examples, which take a BERT-base where there is a GPU: all ways, and two of them in one round
  python -m qa_lib.own.bench --task paragraphs
  python -m qa_lib.own.bench --task pairs --ways loop all --rounds 1
"""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def drawn_samples(task: str, count: int, words: int) -> list[dict]:
    """Return samples of a task, random but for lengths and labels."""
    model_class, median, spread, longest = TASKS[task]
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(np.log(median), spread, count)).clip(3, longest).astype(int)
    samples = []
    for length in lengths:
        ids = draw.integers(FIRST_TOKEN, words, length)
        labels = ids % 2 if model_class is AutoModelForTokenClassification else ids[0] % 2
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


class Measured:
    """The speed and the losses of a training from the step after `warm_up` on."""

    def __init__(self, warm_up: int, batch: int):
        self.warm_up = warm_up
        self.batch = batch
        self.steps = 0
        self.losses = []
        self.mean_loss: float | None = None
        self.begun = self._now()  # where there is no warm-up

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Count a step that has been done."""
        self.steps += 1
        if loss is not None:
            self.losses.append(loss)
        if self.steps == self.warm_up:
            self.begun = self._now()

    @property
    def timed_steps(self) -> int:
        """How many steps have been timed."""
        return max(0, self.steps - self.warm_up)

    def result(self) -> dict:
        """Return samples a second, the peak of memory, and what is known of the losses.

        That is their means at both ends of a loop, or the mean of all of a Trainer's.
        """
        seconds = self._now() - self.begun
        on_gpu = DEVICE.type == "cuda"
        peak = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None
        result = {
            "samples_per_s": self.timed_steps * self.batch / seconds,
            "steps": self.timed_steps,
            "reserved_gib": peak,
        }
        if self.mean_loss is not None:
            result["mean_loss"] = self.mean_loss
        if self.losses:
            losses = torch.stack(self.losses).float()
            result["first_loss"] = losses[:10].mean().item()
            result["last_loss"] = losses[-10:].mean().item()
        return result

    def _now(self) -> float:
        """Return the time when the device has done all that it was given."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# Loops of one's own.


def plain_step(model: PreTrainedModel) -> Callable[[dict], torch.Tensor]:
    """Return the step of the plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=DEVICE.type == "cuda")

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


def time_loop(step, loader: DataLoader, steps: int, measured: Measured) -> None:
    """Train by a loop, for a warm-up and so many steps, which `measured` counts."""
    for batch in repeated(loader, measured.warm_up + steps):
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


def loader_of(samples: list[dict], batch: int, is_packed: bool) -> DataLoader:
    """Return the batches of an epoch after the other."""
    options = {"pin_memory": DEVICE.type == "cuda", "num_workers": 2 * (DEVICE.type == "cuda")}
    if is_packed:
        rows = pack(samples, samples=batch, drop_last=True, say=quiet)
        return DataLoader(rows, batch_size=None, collate_fn=PackedCollator(), **options)
    return DataLoader(
        samples, batch_size=batch, shuffle=True, drop_last=True, collate_fn=padded, **options
    )


def quiet(_: str) -> None:
    """Say nothing."""


# Trainers.


class _Steps(TrainerCallback):
    """Tells `measured` of each step."""

    def __init__(self, measured: Measured):
        self.measured = measured

    def on_step_end(self, args, state, control, **kwargs):
        self.measured.step()


def time_trainer(
    make: Callable,
    model: PreTrainedModel,
    samples: list[dict],
    arguments: argparse.Namespace,
    measured: Measured,
    collator: Callable = padded,
    **options,
) -> None:
    """Train by a Trainer that `make` makes, which `measured` counts.

    `options` are of the Trainer's arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder,
            max_steps=measured.warm_up + arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=RATE,
            max_grad_norm=CLIP,
            use_cpu=DEVICE.type == "cpu",
            dataloader_drop_last=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        trainer = make(
            model,
            training,
            data_collator=collator,
            train_dataset=samples,
            callbacks=[_Steps(measured)],
        )
        trainer.remove_callback(PrinterCallback)
        measured.mean_loss = trainer.train().training_loss


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


def time_tuned_trainer(
    model: PreTrainedModel,
    samples: list[dict],
    arguments: argparse.Namespace,
    measured: Measured,
    **options,
) -> None:
    """Train by the tuned Trainer, which `measured` counts, all padded lengths in the warm-up."""
    first = batches_of_each_length(samples, arguments.batch)
    measured.warm_up += len(first) // arguments.batch

    def make(*args, **more):
        trainer = _WarmTrainer(*args, **more)
        trainer.first = first
        return trainer

    time_trainer(
        make,
        model,
        samples,
        arguments,
        measured,
        functools.partial(padded, multiple=ROUND_TUNED),
        bf16=True,
        optim="adamw_torch_fused",
        train_sampling_strategy="group_by_length",
        torch_compile=DEVICE.type == "cuda",
        **options,
    )


# The ways.


def train_by(way: str, arguments: argparse.Namespace, measured: Measured) -> None:
    """Train by a way, which `measured` counts."""
    torch.manual_seed(0)
    config = SIZES[arguments.size]
    config._attn_implementation = "sdpa"  # which an earlier way has changed
    samples = drawn_samples(arguments.task, arguments.samples, config.vocab_size)
    model = TASKS[arguments.task][0].from_config(config).to(DEVICE).train()
    capture = DEVICE.type == "cuda"
    workers = TUNED if DEVICE.type == "cuda" else {}
    if way == "trainer":
        time_trainer(Trainer, model, samples, arguments, measured)
        return
    if way == "trainer-tuned":
        time_tuned_trainer(model, samples, arguments, measured, **workers)
        return
    if way == "fast-trainer":
        make = functools.partial(FastTrainer, cuda_graph=capture, say=quiet)
        time_trainer(make, model, samples, arguments, measured, bf16=True, **workers)
        return
    if way == "packing":
        take_packed(model, Rooted(model))
    elif way != "loop":
        speed_up(model, say=quiet)
    if way in ("masters", "all"):
        model.to(torch.bfloat16)
        step = master_step(model, capture=capture and way == "all")
    else:
        step = plain_step(model)
    is_packed = way not in ("loop", "speed_up")
    loader = loader_of(samples, arguments.batch, is_packed)
    time_loop(step, loader, arguments.steps, measured)


WAYS = (
    "loop",
    "trainer",
    "trainer-tuned",
    "speed_up",
    "packing",
    "masters",
    "all",
    "fast-trainer",
)


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    on_gpu = DEVICE.type == "cuda"
    parser = argparse.ArgumentParser(
        prog="python -m qa_lib.own.bench",
        description="Time ways to train a classifier, in turns.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, default="pairs")
    parser.add_argument("--size", choices=SIZES, default="base" if on_gpu else "tiny")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--batch", type=int, default=32, help="samples in a step")
    parser.add_argument("--samples", type=int, default=4096, help="in an epoch")
    parser.add_argument("--steps", type=int, default=100, help="that are timed")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before these")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(words)


def measure(way: str, number: int, arguments: argparse.Namespace) -> float:
    """Measure a way in a round, and print a line of JSON; return samples a second.

    One that is stopped by KeyboardInterrupt prints what it has timed.
    """
    torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    measured = Measured(arguments.warm_up, arguments.batch)
    shown = {
        "task": arguments.task,
        "size": arguments.size,
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "way": way,
        "round": number,
    }
    try:
        train_by(way, arguments, measured)
    except KeyboardInterrupt:
        if measured.timed_steps:
            print(json.dumps(shown | measured.result() | {"stopped": True}), flush=True)
        raise
    result = measured.result()
    print(json.dumps(shown | result), flush=True)
    return result["samples_per_s"]


def print_medians(speeds: dict[str, list[float]]) -> None:
    """Print a table of the ways that were measured."""
    medians = {way: statistics.median(found) for way, found in speeds.items() if found}
    if not medians:
        return
    first = next(iter(medians))
    print(f"\n| way | samples/s | × {first} |\n| --- | ---: | ---: |")
    for way, median in medians.items():
        print(f"| {way} | {median:,.0f} | {median / medians[first]:.2f} |")


def main(words: list[str] | None = None) -> int:
    """Measure all ways in turns, and print each measurement and the medians.

    Returns the exit status: 0, 1 where a way failed, 130 where it was stopped.
    """
    arguments = parsed(words)
    speeds: dict[str, list[float]] = {way: [] for way in arguments.ways}
    failed = []
    turns = [(number, way) for number in range(arguments.rounds) for way in arguments.ways]
    try:
        for number, way in turns:
            if way in failed:
                continue
            note = ", whose first steps may take minutes" if way == "trainer-tuned" else ""
            say(f"round {number + 1} of {arguments.rounds}: {way}{note}")
            try:
                speeds[way].append(measure(way, number, arguments))
            except Exception:
                failed.append(way)
                traceback.print_exc()
                say(f"{way} failed, and is left out from here on")
    except KeyboardInterrupt:
        say("stopped: the medians are of the measurements that ended")
        print_medians(speeds)
        return 130
    print_medians(speeds)
    return 1 if failed else 0


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a time limit stops it
    sys.exit(main())
