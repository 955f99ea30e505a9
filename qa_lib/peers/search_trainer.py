"""The search for the quickest transformers.Trainer: `python -m qa_lib.peers.search_trainer`. Nothing of the library is
used but peers/search.py.

BERT-base with random weights is trained on random tokens of real lengths. First the Trainer as it comes, with what
transformers' own script for question answering does: fp32, batches of 8 by the Trainer's own default, every sample
padded to 384 tokens. Then all sets of four options over bf16, fused AdamW, pinned memory and no filter for NaN, which
waits for the GPU in each step: workers, length grouping, torch.compile, and padding to few lengths.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
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

MOST = 384  # tokens of a sample
OPTIONS = ("workers", "grouped", "compiled", "few lengths")
TUNED = {"bf16": True, "optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
CHANGES = {
    "workers": {
        "dataloader_num_workers": 4,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 4,
    },
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "compiled": {"torch_compile": True},
    "few lengths": {},  # the collator's
    # Beyond the four: CUDA graphs by torch.compile, a code for each of few lengths, and no dynamic shapes.
    "graphs": {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
    "static": {},
}


class Samples(torch.utils.data.Dataset):
    """Random tokens of these lengths, as lists, which data sets of transformers' script give; `padded`: all to MOST."""

    def __init__(self, lengths: np.ndarray, padded: bool, vocabulary: int):
        draw = np.random.default_rng(0)
        self.samples = []
        for length in lengths.tolist():
            sample = {
                "input_ids": draw.integers(1, vocabulary, length).tolist(),
                "token_type_ids": [0] * 14 + [1] * (length - 14),
                "attention_mask": [1] * length,
            }
            if padded:
                for tokens in sample.values():
                    tokens.extend([0] * (MOST - length))
            start, end = sorted(draw.integers(0, length, 2).tolist())
            self.samples.append(sample | {"start_positions": start, "end_positions": end})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict:
        return self.samples[index]


class Collator:
    """Samples to tensors, padded to the longest, rounded up to a multiple of `multiple`."""

    def __init__(self, multiple: int):
        self.multiple = multiple

    def __call__(self, samples: list[dict]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        length = min(MOST, -(-longest // self.multiple) * self.multiple)
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
    """Times of the steps' ends, by blocks whose ends wait for the device."""

    def __init__(self, warm_up: int, block: int):
        self.warm_up, self.block, self.times = warm_up, block, []

    def on_step_end(self, args, state, control, **kwargs):
        since = state.global_step - self.warm_up
        if since >= 0 and since % self.block == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())


def measure(task: dict) -> dict:
    """Samples a second and more of one set of options."""
    began = time.perf_counter()
    config = BertConfig(**task["shape"])
    torch.manual_seed(0)
    model = BertForQuestionAnswering(config)
    as_it_comes = task["options"] is None
    options = task["options"] or ()
    given = {} if as_it_comes else dict(TUNED)
    for name in options:
        given |= CHANGES[name]
    if "static" in options:
        torch._dynamo.config.automatic_dynamic_shapes = False
    collator = default_data_collator
    if not as_it_comes:
        collator = Collator(64 if "few lengths" in options else 8)
    clock = Clock(task["warm_up"], task["block"])
    steps = task["warm_up"] + task["block"] * task["blocks"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=task["size"],
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            **given,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Samples(task["lengths"], as_it_comes, config.vocab_size),
            data_collator=collator,
            callbacks=[clock],
        )
        result = trainer.train()
    blocks = [1000 * (b - a) / task["block"] for a, b in itertools.pairwise(clock.times)]
    ms = statistics.median(blocks)
    cuda = torch.cuda.is_available()
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


def _end(process) -> None:
    """End a child and all that it has started; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _child(task: dict, pipe) -> None:
    os.setsid()  # so that what it starts ends with it
    multiprocessing.set_start_method("fork", force=True)  # of workers, as in a script
    try:
        pipe.send(measure(task))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"[:400]})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="qa_lib.peers.search_trainer", description=__doc__)
    parser.add_argument("--lengths", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("search.jsonl"))
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=25, help="steps before the timed ones")
    parser.add_argument("--block", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--within", type=float, default=560)
    parser.add_argument("--sets", help='JSON: a list of sets of options, null for "as it comes"')
    parser.add_argument("--tiny", action="store_true")
    own = parser.parse_args(argv)
    lengths = np.random.default_rng(0).permutation(np.loadtxt(own.lengths).astype(np.int64))[:8000]
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape = small | {"num_attention_heads": 2, "vocab_size": 100} if own.tiny else {}
    sets = [None]
    for count in range(len(OPTIONS) + 1):
        sets += [list(chosen) for chosen in itertools.combinations(OPTIONS, count)]
    if own.sets:
        sets = json.loads(own.sets)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    deadline = time.monotonic() + own.within
    for options in sets:
        task = vars(own) | {"lengths": lengths, "options": options, "shape": shape}
        here, there = context.Pipe()
        process = context.Process(target=_child, args=(task, there))
        process.start()
        there.close()
        left = min(own.timeout, deadline - time.monotonic())
        try:
            found = here.recv() if left > 0 and here.poll(left) else {"error": "time is up"}
        except EOFError:
            found = {"error": "the process ended"}
        _end(process)
        process.join()
        name = "as it comes" if options is None else " + ".join(options) or "none of the four"
        line = {"peer": "trainer", "size": own.size, "name": name} | found
        print(json.dumps(line), flush=True)
        with own.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
