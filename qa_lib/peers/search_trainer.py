"""Search for the quickest Trainer: `python -m qa_lib.peers.search_trainer --lengths FILE`.

BERT-base with random weights is trained on random tokens of real lengths, and samples a second are
measured. First comes the Trainer as it comes, with what transformers' own script for question
answering does: fp32, and every sample padded to 384 tokens. Then come all sets of four options over
bf16, fused AdamW, pinned memory and no filter for NaN, which would wait for the GPU in each step.
The four are workers, length grouping, torch.compile, and padding to few lengths. This file imports
nothing of the library but processes.py.

With length grouping, the Trainer's sampler shuffles the samples, cuts them into spans of up to 50
batches and sorts each span from long samples to short ones. A block of steps therefore has to be as
long as a span, or its figure is that of long samples or of short ones alone. `--block` is a span of
the sampler by default.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from qa_lib.peers.processes import Measurements, exit_on_sigterm

SAMPLES = 8000  # at most
MAX_LENGTH = 384  # tokens of a sample
QUESTION_LENGTH = 14  # tokens of a sample that are its question: about as many as SQuAD's
OPTIONS = ("workers", "grouped", "compiled", "few lengths")
# The arguments of the Trainer in all sets of options.
TUNED = {"bf16": True, "optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
# The arguments that each option adds. What was found to pay stands in train/trainer.py as well,
# which this file does not import (tests/test_trainer.py holds both together).
CHANGES = {
    "workers": {
        "dataloader_num_workers": 4,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 4,
    },
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "compiled": {"torch_compile": True},
    "few lengths": {},  # a matter of the collator
    # Beyond the four: torch.compile with CUDA graphs, which have to be few, and without dynamic
    # shapes, so that each length has code of its own.
    "graphs": {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
    "static": {},  # a matter of torch.compile's config
}
# BERT's config in place of that of BERT-base, for a CPU.
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


class Samples(torch.utils.data.Dataset):
    """Samples of random tokens with these lengths, as lists, as in transformers' own script.

    With `padded`, each is filled up to MAX_LENGTH.
    """

    def __init__(self, lengths: np.ndarray, padded: bool, vocabulary: int):
        draw = np.random.default_rng(0)
        self.samples = []
        for length in lengths.tolist():
            sample = {
                "input_ids": draw.integers(1, vocabulary, length).tolist(),
                "token_type_ids": [0] * QUESTION_LENGTH + [1] * (length - QUESTION_LENGTH),
                "attention_mask": [1] * length,
            }
            if padded:
                for tokens in sample.values():
                    tokens.extend([0] * (MAX_LENGTH - length))
            start, end = sorted(draw.integers(0, length, 2).tolist())
            self.samples.append(sample | {"start_positions": start, "end_positions": end})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        return self.samples[index]


class Collator:
    """Pads samples to the longest of them, rounded up to a multiple of `multiple`."""

    def __init__(self, multiple: int):
        self.multiple = multiple

    def __call__(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        rounded = math.ceil(longest / self.multiple) * self.multiple
        length = min(MAX_LENGTH, rounded)
        batch = {}
        for name in ("input_ids", "token_type_ids", "attention_mask"):
            rows = np.zeros((len(samples), length), dtype=np.int64)
            for row, sample in zip(rows, samples, strict=True):
                row[: len(sample[name])] = sample[name]
            batch[name] = torch.from_numpy(rows)
        for name in ("start_positions", "end_positions"):
            batch[name] = torch.tensor([sample[name] for sample in samples])
        return batch


class Clock(TrainerCallback):
    """Notes the time after the warm-up and after each block of steps, once the device is done."""

    def __init__(self, warm_up: int, block: int):
        self.warm_up = warm_up
        self.block = block
        self.times = []

    def on_step_end(self, args, state, control, **kwargs):
        timed_steps = state.global_step - self.warm_up
        if timed_steps >= 0 and timed_steps % self.block == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())


def span_of(samples: int, size: int) -> int:
    """Return how many batches the Trainer's sampler sorts by length at a time.

    This is the rule of transformers' get_length_grouped_indices: 50 batches, or fewer, so that an
    epoch has four spans.
    """
    return max(1, min(50, samples // (4 * size)))


def measure(task: dict, await_turn: Callable[[], None]) -> dict:
    """Train by one set of options and return its figures.

    `task` has the options of the command line, and the samples' `lengths`, the `options` (None for
    the Trainer as it comes) and the model's `config`. `await_turn` is called before anything else:
    a set is built, compiled and timed in its turn, as workers of its loader would not wait.
    """
    await_turn()
    began = time.perf_counter()
    multiprocessing.set_start_method("fork", force=True)  # of the data loader's, as in a script
    config = BertConfig(**task["config"])
    torch.manual_seed(0)
    model = BertForQuestionAnswering(config)
    options = task["options"]
    as_it_comes = options is None
    if as_it_comes:
        changes = {}
        collator = default_data_collator
    else:
        changes = dict(TUNED)
        for name in options:
            changes |= CHANGES[name]
        collator = Collator(multiple=64 if "few lengths" in options else 8)
        if "static" in options:
            torch._dynamo.config.automatic_dynamic_shapes = False
    clock = Clock(task["warm_up"], task["block"])
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=task["warm_up"] + task["block"] * task["blocks"],
            per_device_train_batch_size=task["size"],
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
            use_cpu=not cuda,
            **changes,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Samples(task["lengths"], as_it_comes, config.vocab_size),
            data_collator=collator,
            callbacks=[clock],
        )
        result = trainer.train()
    blocks = []  # milliseconds a step
    for begin, end in itertools.pairwise(clock.times):
        blocks.append(1000 * (end - begin) / task["block"])
    ms = statistics.median(blocks)
    return {
        "ms": round(ms, 2),
        "ms_blocks": [round(block, 2) for block in blocks],
        "samples_s": round(1000 * task["size"] / ms, 1),
        "loss": round(result.training_loss, 4),
        "peak_mib": torch.cuda.max_memory_allocated() // 2**20 if cuda else None,
        "all_s": round(time.perf_counter() - began, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "card": torch.cuda.get_device_name() if cuda else "cpu",
    }


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="qa_lib.peers.search_trainer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", type=Path, required=True, help="a file of samples' lengths, one a line"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("search.jsonl"),
        help="the file to which a line for each set is appended (%(default)s)",
    )
    parser.add_argument(
        "--size",
        type=int,
        default=32,
        help="samples of a batch; the Trainer's own is 8 (%(default)s)",
    )
    parser.add_argument(
        "--warm-up", type=int, default=25, help="steps before the timed ones (%(default)s)"
    )
    parser.add_argument(
        "--block",
        type=int,
        help="steps of a block; with length grouping, another number than a span of the sampler "
        f"times long or short samples alone (a span: {span_of(SAMPLES, 32)} at --size 32, "
        f"{span_of(SAMPLES, 128)} at 128)",
    )
    parser.add_argument(
        "--blocks", type=int, default=4, help="timed blocks, whose median counts (%(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=240, help="seconds that a set may take (%(default)s)"
    )
    parser.add_argument(
        "--within", type=float, default=560, help="seconds for all sets (%(default)s)"
    )
    parser.add_argument(
        "--sets", help='JSON: a list of sets of options, null for the Trainer "as it comes"'
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    return parser.parse_args(argv)


def all_sets() -> list[list[str] | None]:
    """Return every set of the four options, after None for the Trainer as it comes."""
    sets = [None]
    for count in range(len(OPTIONS) + 1):
        sets += [list(options) for options in itertools.combinations(OPTIONS, count)]
    return sets


def name_of(options: list[str] | None) -> str:
    """Return what a set of options is called in its line."""
    if options is None:
        return "as it comes"
    return " + ".join(options) or "none of the four"


def main(argv: list[str]) -> None:
    args = parse(argv)
    lengths = np.loadtxt(args.lengths).astype(np.int64)
    lengths = np.random.default_rng(0).permutation(lengths)[:SAMPLES]
    if args.block is None:
        args.block = span_of(len(lengths), args.size)
    measurements = Measurements(measure, args.out, timeout_s=args.timeout, within_s=args.within)
    for options in json.loads(args.sets) if args.sets else all_sets():
        line = {"peer": "trainer", "size": args.size, "name": name_of(options)}
        task = {"lengths": lengths, "options": options, "config": TINY if args.tiny else {}}
        measurements(line, vars(args) | task)


if __name__ == "__main__":
    exit_on_sigterm()
    main(sys.argv[1:])
