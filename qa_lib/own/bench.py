"""What the techniques give in one's own training: `python -m qa_lib.own.bench --task pairs`.

Ways to train the same model on the same samples are timed in turns, round after round, each in a
process of its own (bench_turns.py). Each measurement prints a line of JSON, and a table of medians
comes last; stderr says which way is at work. With `--out FILE` the lines are appended to a file as
well, and what it has of this card, code and these settings is not measured again. `--within` is a
limit in seconds, of which setups may take half: what would not end in time is not begun, and what
has not ended by then is stopped. Ctrl-C ends it with what has been measured, and a way that fails
leaves the others their turns. Weights and tokens are random; the lengths are like those of the
task's data, and a label is what a sample's first token says, so that losses fall.

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

Beside the library's own training of answers (E-uncompiled) a fair comparison is of tokens a second
without padding, at paragraphs, BERT-base and 32 samples: lengths are alike, but not equal, and so
is the work, but for the head. docs/own-code.md has it where both were measured on one card.
"""

import argparse
import functools
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import transformers
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
from qa_lib.errors import UserError
from qa_lib.loaded import CODE
from qa_lib.own.bench_turns import (
    DEVICE,
    LEAD_IN,
    PROFILED,
    Measured,
    TimeIsUp,
    Turns,
    Way,
    WayFailed,
    append_line,
    expected_setup_s,
    lines_of,
    matching,
)
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
TOO_LATE = "{} would not end in time, and is left out from here on"
EXAMPLE = """\
examples, which take a BERT-base where there is a GPU: all ways, and two of them in one round
  python -m qa_lib.own.bench --task paragraphs
  python -m qa_lib.own.bench --task pairs --ways loop all --rounds 1
within ten minutes, into a file; the same line again goes on where this one stopped
  python -m qa_lib.own.bench --task pairs --out own-bench.jsonl --within 570
"""


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
    batch: int,
    steps: int,
    measured: Measured,
    collator: Callable | None = padded,
    **options,
) -> None:
    """Train by a Trainer that `make` makes, for a warm-up and so many steps.

    `measured` counts them. `options` are of the Trainer's arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder,
            max_steps=measured.warm_up + steps,
            per_device_train_batch_size=batch,
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


def time_tuned_trainer(
    model: PreTrainedModel,
    samples: list[dict],
    batch: int,
    steps: int,
    measured: Measured,
    **options,
) -> None:
    """Train by the tuned Trainer, with all padded lengths in the warm-up, and so many steps.

    `measured` counts them.
    """
    first = batches_of_each_length(samples, batch)
    measured.warm_up += len(first) // batch

    def make(*args, **more):
        trainer = _WarmTrainer(*args, **more)
        trainer.first = first
        return trainer

    time_trainer(
        make,
        model,
        samples,
        batch,
        steps,
        measured,
        functools.partial(padded, multiple=ROUND_TUNED),
        bf16=True,
        optim="adamw_torch_fused",
        train_sampling_strategy="group_by_length",
        torch_compile=DEVICE.type == "cuda",
        **options,
    )


# The ways.


def train_by(way: str, arguments: argparse.Namespace, steps: int, measured: Measured) -> None:
    """Train by a way, for a warm-up and so many steps, which `measured` counts."""
    torch.manual_seed(0)
    config = SIZES[arguments.size]
    config._attn_implementation = "sdpa"  # which another way in this process has changed
    samples = drawn_samples(arguments.task, arguments.samples, config.vocab_size)
    model = TASKS[arguments.task][0].from_config(config).to(DEVICE).train()
    capture = DEVICE.type == "cuda"
    workers = TUNED if DEVICE.type == "cuda" else {}
    work = (model, samples, arguments.batch, steps, measured)
    if way == "trainer":
        time_trainer(Trainer, *work)
        return
    if way == "trainer-tuned":
        time_tuned_trainer(*work, **workers)
        return
    if way == "fast-trainer":
        make = functools.partial(FastTrainer, cuda_graph=capture, say=quiet)
        time_trainer(make, *work, collator=None, bf16=True, **workers)  # it packs
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
    time_loop(step, loader, steps, measured)


def train_in_turns(
    connection: Connection, way: str, arguments: argparse.Namespace, turns: int
) -> None:
    """Train by a way for so many turns, each when the connection says so."""
    measured = Turns(arguments.warm_up, arguments.batch, arguments.steps, turns, connection)
    train_by(way, arguments, measured.further_steps, measured)


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
        description="Time ways to train a classifier, in turns. All are in memory at once.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, default="pairs")
    parser.add_argument("--size", choices=SIZES, default="base" if on_gpu else "tiny")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--batch", type=int, default=32, help="samples in a step")
    parser.add_argument("--samples", type=int, help="in an epoch; by default those of 512 steps")
    parser.add_argument("--steps", type=int, default=100, help="that are timed, in a turn")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before all turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE", help="to append to, and to go on from")
    parser.add_argument("--within", type=float, metavar="SECONDS", default=float("inf"))
    arguments = parser.parse_args(words)
    if arguments.samples is None:
        # Enough for all turns: an epoch's end, where loaders begin anew, is rare in real trainings.
        arguments.samples = 512 * arguments.batch
    if arguments.warm_up < 1:
        parser.error("--warm-up: a way is set up when its first step has been done, so 1 at least")
    return arguments


def settings_of(arguments: argparse.Namespace) -> dict:
    """Return what tells measurements apart, but for way and round: machine, code, settings."""
    names = ("task", "size", "batch", "samples", "steps", "warm_up")
    return {
        "card": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code": CODE.digest,
    } | {name: getattr(arguments, name) for name in names}


class Bench:
    """The measurements of a call, in turns, and those that its file had before.

    `deadline` is a time of `time.monotonic` in seconds. Ways that are not set up in half of the
    time until then are left out.

    Raises UserError for a file that cannot be read.
    """

    def __init__(self, arguments: argparse.Namespace, deadline: float):
        self.arguments = arguments
        self.deadline = deadline
        # Turns begin when the last way is set up, so that one that compiles for long would leave
        # the others none.
        self.setup_deadline = (time.monotonic() + deadline) / 2
        self.settings = settings_of(arguments)
        self.earlier = lines_of(arguments.out) if arguments.out else []
        self.known = matching(self.earlier, self.settings)
        words = SIZES[arguments.size].vocab_size
        samples = drawn_samples(arguments.task, arguments.samples, words)
        self.tokens = statistics.mean(len(sample["input_ids"]) for sample in samples)
        self.sitting = datetime.now(UTC).isoformat(timespec="seconds")
        self.failed: list[str] = []

    def measure(self) -> None:
        """Measure what the file does not have, in turns."""
        missing = {way: self._missing(way) for way in self.arguments.ways}
        ways = {}
        try:
            for way, rounds in missing.items():
                if rounds and self._can_set_up(way):
                    ways[way] = self._begun(way, rounds)
            if ways:
                say(f"set up at the same time: {', '.join(ways)}")
            crowded = []
            for way in list(ways):
                self._if_it_can(ways, way, self._await_setup, self.setup_deadline, crowded)
            for way in crowded:
                say(f"{way} ran out of memory beside the others, and is set up again")
                ways[way].stop()
                ways[way] = self._begun(way, missing[way])
                self._if_it_can(ways, way, self._await_setup, self.deadline)
            for number in range(self.arguments.rounds):
                for way in list(ways):
                    if number in missing[way]:
                        self._if_it_can(ways, way, self._turn, number)
        finally:
            for way in ways.values():
                way.stop()

    def _missing(self, way: str) -> list[int]:
        """Return the rounds of a way that have not been measured."""
        measured = {line["round"] for line in matching(self.known, {"way": way})}
        return [number for number in range(self.arguments.rounds) if number not in measured]

    def _if_it_can(self, ways: dict[str, Way], name: str, do: Callable, *arguments) -> None:
        """Do something with a way, which is left out where it fails or has too little time."""
        try:
            do(ways[name], *arguments)
        except WayFailed as problem:
            self.failed.append(name)
            say(f"{name} failed, and is left out from here on: {problem}")
        except TimeIsUp:
            say(TOO_LATE.format(name))
        else:
            return
        ways.pop(name).stop()

    def _can_set_up(self, way: str) -> bool:
        """Return whether a way's setup will probably end in half of the time; say so if not."""
        card = self.settings["card"]
        seconds = expected_setup_s(way, self.earlier, card, self.arguments.size)
        if time.monotonic() + seconds <= self.setup_deadline:
            return True
        say(TOO_LATE.format(way))
        return False

    def _begun(self, way: str, rounds: list[int]) -> Way:
        """Return a way that has begun to set itself up for turns in these rounds."""
        return Way(way, train_in_turns, (way, self.arguments, len(rounds)))

    def _await_setup(self, way: Way, end: float, crowded: list[str] | None = None) -> None:
        """Wait for a way; note it in `crowded`, where that is given, if it lacks memory.

        Raises TimeIsUp where it is not set up at the time `end`.
        """
        try:
            way.await_setup(end)
        except WayFailed as problem:
            if crowded is None or not problem.lacks_memory:
                raise
            crowded.append(way.name)

    def _turn(self, way: Way, number: int) -> None:
        """Measure a way in a round; print and keep the line.

        Raises TimeIsUp where that would end, or has ended, after the deadline.
        """
        steps = LEAD_IN + self.arguments.steps + PROFILED
        if time.monotonic() + steps * self._expected_step_s(way) > self.deadline:
            raise TimeIsUp
        say(f"round {number + 1} of {self.arguments.rounds}: {way.name}")
        result = way.take_turn(self.deadline)
        line = self.settings | {
            "way": way.name,
            "round": number,
            "step_ms": 1e3 * self.arguments.batch / result["samples_per_s"],
            "samples_timed": result["steps"] * self.arguments.batch,
            "tokens_a_sample": self.tokens,
            "setup_s": way.setup["setup_s"],
            "sitting": self.sitting,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        line |= result
        print(json.dumps(line), flush=True)
        if self.arguments.out:
            append_line(self.arguments.out, line)
        self.known.append(line)

    def _expected_step_s(self, way: Way) -> float:
        """Return the seconds of a step: the last turn's, or the warm-up's, which others slowed."""
        turns = matching(self.known, {"way": way.name, "sitting": self.sitting})
        return turns[-1]["step_ms"] / 1e3 if turns else way.setup["step_s"]

    def print_medians(self) -> None:
        """Print a table of the ways that were measured, in this call or before."""
        medians = {}
        for way in self.arguments.ways:
            speeds = [line["samples_per_s"] for line in matching(self.known, {"way": way})]
            if speeds:
                medians[way] = statistics.median(speeds)
        if not medians:
            return
        first = next(iter(medians))
        print(f"\n| way | samples/s | × {first} |\n| --- | ---: | ---: |")
        for way, median in medians.items():
            print(f"| {way} | {median:,.0f} | {median / medians[first]:.2f} |")


def main(words: list[str] | None = None) -> int:
    """Measure all ways in turns, and print each measurement and the medians.

    Returns the exit status: 0, 1 where a way failed, 2 for a file that cannot be used, 130 where it
    was stopped.
    """
    began = time.monotonic()
    arguments = parsed(words)
    try:
        bench = Bench(arguments, began + arguments.within)
    except UserError as problem:
        say(str(problem))
        return 2
    try:
        bench.measure()
    except UserError as problem:
        say(str(problem))
        return 2
    except KeyboardInterrupt:
        say("stopped: the medians are of the measurements that ended")
        bench.print_medians()
        return 130
    bench.print_medians()
    return 1 if bench.failed else 0


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a time limit stops it
    sys.exit(main())
