"""The search for the quickest rival: `python -m qa_lib.peers.search`. Nothing of the library is used but this package.

Each setting is built, compiled and timed in a process of its own and gives one line of JSON: samples and tokens a
second, milliseconds of a step, peak memory, the share of padding, and the loss after some steps beside that of plain
fp32. A search takes each option alone, then adds those that pay, the best first, as long as they still do. Samples are
random tokens of real lengths (`--lengths`, a number a line); where the answer begins and ends, a token says so, so that
the loss falls and a broken setting is seen.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from qa_lib.peers import packing
from qa_lib.peers.adamw import CompiledAdamW, PublicAdamW
from qa_lib.peers.bert import Bert
from qa_lib.peers.gpt2 import GPT2
from qa_lib.peers.step import Step, compile_parts

BERT_BASE = {
    "hidden_size": 768,
    "layer_norm_eps": 1e-12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
}
GPT2_SMALL = {"vocab_size": 50257, "n_embd": 768, "n_positions": 1024, "n_layer": 12, "n_head": 12}

# What a setting is where it says nothing: an autocast step with fp32 weights, as one CUDA graph.
BASE = {
    "precision": "autocast",  # autocast | bf16: of weights | fp32
    "optimizer": "fused",  # a name of OPTIMIZERS
    "compile": "layers",  # whole | layers | none
    "mode": None,  # of torch.compile
    "inductor": {},  # options of torch.compile
    "graph": True,
    "fp8": None,  # a recipe of torchao's float8 training, and what is converted: "tensorwise all"
    "sdpa": None,  # kernels that PyTorch may take: "cudnn", "flash"
    "blas": None,  # "cublaslt"
    "packing": "deal",  # deal | fill
    "budget": None,  # tokens of a packed sequence; None: up to the next tile's border
    "model": {},  # options of Bert or GPT2
    "optimizer_options": {},
}
OPTIMIZERS = {"fused": PublicAdamW, "own": CompiledAdamW}
OPTIMIZERS["torchao"] = lambda model, rate: PublicAdamW(model, rate, stochastic=True)

SR = {"precision": "bf16", "optimizer": "own"}
# Options of the search, with what was expected of each before it was measured (ms of a BERT step of 32 samples, about
# 11.5 on an H100). One group's options exclude one another.
OPTIONS = {
    "bert": {
        "weights": {
            "bf16 weights, PyTorch's AdamW": {"precision": "bf16"},  # -0.7: no casts, fewer bytes
            "torchao's AdamW": {"precision": "bf16", "optimizer": "torchao"},  # -0.5
            "own AdamW": SR,  # -1.0: one kernel for all small parameters, clipping in it
            "own AdamW, hashed": SR | {"optimizer_options": {"hashed": True}},  # -1.1
            "own AdamW, hashed, together": SR
            | {"optimizer_options": {"hashed": True, "together": True}},  # -1.15
            "own AdamW, masters": SR
            | {"optimizer_options": {"masters": True, "moments": "float32"}},  # -0.3
        },
        "compile": {
            "compiled whole": {"compile": "whole"},  # -0.1: embeddings and loss fuse
            "compiled whole, max-autotune": {
                "compile": "whole",
                "mode": "max-autotune-no-cudagraphs",
            },  # -0.2
            "layers, max-autotune": {"mode": "max-autotune-no-cudagraphs"},  # -0.1
            "coordinate descent": {"inductor": {"coordinate_descent_tuning": True}},  # -0.15
            "combo kernels": {"inductor": {"combo_kernels": True}},  # -0.05
            "fast math": {"inductor": {"use_fast_math": True}},  # -0.1
        },
        "types": {"types blended": {"model": {"blend_types": True}}},  # -0.05: no contended scatter
        "dropout": {"dropout drawn at once": {"model": {"drawn_at_once": True}}},  # -0.2
        "gelu": {"tanh GELU": {"model": {"gelu": "tanh"}}},  # -0.05
        "attention": {"cuDNN attention": {"model": {"attention": "cudnn"}}},  # fails, or +-0.3
        "blas": {"cublasLt": {"blas": "cublaslt"}},  # 0
        "fp8": {
            "FP8 tensorwise": {"fp8": "tensorwise all"},  # +2: casts are kernels of their own
            "FP8 tensorwise, feed-forward": {"fp8": "tensorwise up down"},  # +1
            "FP8 rowwise": {"fp8": "rowwise all"},  # +1.5
        },
        "packing": {
            "5,488 tokens": {"budget": 5488},  # 0: the last tile is computed anyway
            "filled to 5,632 tokens": {
                "packing": "fill",
                "budget": 5632,
            },  # +2 % samples/s: whole waves
        },
    },
    "gpt2": {
        "weights": {
            "bf16 weights, PyTorch's AdamW": {"precision": "bf16"},  # -4 % of the step
            "torchao's AdamW": {"precision": "bf16", "optimizer": "torchao"},  # -4 %
            "own AdamW, hashed": SR | {"optimizer_options": {"hashed": True}},  # -5 %
        },
        "compile": {
            "compiled whole": {"compile": "whole"},  # -0.5 %
            "layers, max-autotune": {"mode": "max-autotune-no-cudagraphs"},  # -1 %
            "coordinate descent": {"inductor": {"coordinate_descent_tuning": True}},  # -1 %
            "fast math": {"inductor": {"use_fast_math": True}},  # -0.5 %
        },
        "dropout": {"dropout drawn at once": {"model": {"drawn_at_once": True}}},  # -2 %
        "attention": {
            "cuDNN attention": {"sdpa": "cudnn"},  # -5 %: Hopper's own instructions
        },
        "loss": {
            "vocabulary of 50,304": {"model": {"align": 64}},  # -1 %
            "50,304, loss in chunks": {"model": {"align": 64, "loss": "chunked"}},  # 0, -4 GiB
            "Liger's loss": {"graph": False, "model": {"loss": "liger"}},  # +5 %, -4 GiB
        },
        "blas": {"cublasLt": {"blas": "cublaslt"}},  # 0
        "fp8": {
            "FP8 tensorwise": {"fp8": "tensorwise all"},  # +-3 %
            "FP8 rowwise": {"fp8": "rowwise all"},  # +5 %
            "FP8 rowwise, wgrad in bf16": {"fp8": "rowwise_with_gw_hp all"},  # +3 %
        },
    },
}
# Measured alone and never added: they show what a part costs, or do less work.
ALONE = {
    "bert": {
        "no graph": {"graph": False},
        "not compiled": {"compile": "none"},
        "neither": {"compile": "none", "graph": False},
        "FlexAttention, without its dropout": {
            "compile": "whole",
            "model": {"attention": "flex", "attention_dropout": 0.0},
        },
        "no dropout in attention": {"model": {"attention_dropout": 0.0}},
    },
    "gpt2": {
        "no graph": {"graph": False},
        "FlexAttention, without its dropout": {
            "compile": "whole",
            "model": {"attention": "flex", "attention_dropout": 0.0},
        },
        "no dropout in attention": {"model": {"attention_dropout": 0.0}},
    },
}


def merged(*changes: dict) -> dict:
    """BASE with `changes`, the later over the earlier; options of models, compilers and optimizers are added up."""
    setting = dict(BASE)
    for change in changes:
        for name, value in change.items():
            if name not in BASE:
                raise ValueError(f"a setting has no {name!r}; it has {', '.join(BASE)}")
            setting[name] = setting[name] | value if isinstance(value, dict) else value
    return setting


class Data:
    """Steps of random text, each a list of `parts` micro-batches of `size` samples or windows, in pinned memory."""

    def __init__(self, peer: str, shape: dict, size: int, parts: int, setting: dict, lengths):
        self.draw = np.random.default_rng(0)
        self.peer, self.shape, self.size, self.parts = peer, shape, size, parts
        if peer == "bert":
            lengths = self.draw.permutation(lengths)
            budget = setting["budget"]
            if setting["packing"] == "fill":
                groups = packing.fill(lengths, budget)
            else:
                groups = packing.deal(lengths, size)
                fullest = max(int(lengths[group].sum()) for group in groups)
                budget = budget or packing.tile(fullest)
            order = self.draw.permutation(len(groups))
            self.groups = [lengths[groups[i]] for i in order]
            self.budget, self.longest = budget, int(packing.tile(lengths.max(), 64))
            self.most = max(len(group) for group in self.groups)
        self.samples = self.tokens = self.padded = 0  # of all steps that were made

    def steps(self, count: int) -> list[list[dict[str, torch.Tensor]]]:
        """The first `count` steps, or as many as there are."""
        if self.peer == "gpt2":
            return [[self._windows() for _ in range(self.parts)] for _ in range(count)]
        count = min(count, len(self.groups) // self.parts)
        groups = iter(self.groups)
        return [[self._packed(next(groups)) for _ in range(self.parts)] for _ in range(count)]

    def _windows(self) -> dict[str, torch.Tensor]:
        tokens = self.shape["n_positions"]
        ids = self.draw.zipf(1.3, (self.size, tokens)) % self.shape["vocab_size"]
        self.samples += self.size
        self.tokens += ids.size
        self.padded += ids.size
        return _pinned({"input_ids": ids, "labels": ids})

    def _packed(self, lengths: np.ndarray) -> dict[str, torch.Tensor]:
        arrays = packing.sequence(lengths, self.budget, self.most)
        begins = arrays["cu_seqlens"][: len(lengths)]
        answers = np.sort(self.draw.integers(0, lengths[:, None], (len(lengths), 2)), axis=1)
        ids = self.draw.integers(10, self.shape["vocab_size"], self.budget)
        ids[begins + answers[:, 0]], ids[begins + answers[:, 1]] = 1, 2
        filled = np.full((2, self.most), -100)
        filled[:, : len(lengths)] = answers.T
        self.samples += len(lengths)
        self.tokens += int(lengths.sum())
        self.padded += self.budget
        arrays |= {
            "input_ids": ids[None],
            "token_type_ids": (arrays["position_ids"] >= 14).astype(np.int64),
            "start_positions": filled[0],
            "end_positions": filled[1],
        }
        return _pinned(arrays)


def _pinned(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
    if torch.cuda.is_available():
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return tensors


def build(
    peer: str,
    shape: dict,
    setting: dict,
    data: Data,
    example: list[dict],
    dropout: float,
    rate: float,
) -> Step:
    """A step of these settings over a model with random weights, the same for all settings."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    like = SimpleNamespace(config=SimpleNamespace(**shape))
    if peer == "bert":
        model = Bert(like, dropout, data.longest, **setting["model"])
    else:
        model = GPT2(like, dropout, **setting["model"])
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.normal_(std=0.02)
            if isinstance(module, torch.nn.Linear):
                module.bias.zero_()
    model.to(device, torch.bfloat16 if setting["precision"] == "bf16" else None).train()
    if setting["fp8"]:
        _to_float8(model, *setting["fp8"].split())
    if setting["blas"]:
        torch.backends.cuda.preferred_blas_library(setting["blas"])
    if setting["sdpa"]:
        _only_sdpa(setting["sdpa"])
    options = dict(setting["optimizer_options"])
    if "moments" in options:
        options["moments"] = getattr(torch, options["moments"])
    optimizer = OPTIMIZERS[setting["optimizer"]](model, rate, **options)
    chosen = {"dynamic": False}
    if setting["mode"]:
        chosen["mode"] = setting["mode"]
    elif setting["inductor"]:
        chosen["options"] = setting["inductor"]
    compile_parts(model, setting["compile"], **chosen)
    autocast = setting["precision"] == "autocast"
    return Step(model, optimizer, example, autocast, setting["graph"] and device.type == "cuda")


def _to_float8(model, recipe: str, *parts: str) -> None:
    """Linear layers in FP8 by torchao: those that `parts` name, or "all" but the head."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def wanted(module, name: str) -> bool:
        last = name.rpartition(".")[2]
        return last != "head" and (parts == ("all",) or last in parts)

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, module_filter_fn=wanted, config=config)


def _only_sdpa(name: str) -> None:
    # The choice is made while the model is traced, and no key of the compiler's caches has it.
    torch._inductor.config.force_disable_caches = True
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(name == "cudnn")
    cuda.enable_flash_sdp(name == "flash")
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_math_sdp(False)


def measure(task: dict) -> dict:
    """What one setting gives: the task's own entries, and figures or an error."""
    cuda = torch.cuda.is_available()
    began = time.perf_counter()
    setting, peer, parts = task["setting"], task["peer"], task["parts"]
    data = Data(peer, task["shape"], task["size"], parts, setting, task["lengths"])
    batches = data.steps(task["batches"])
    step = build(peer, task["shape"], setting, data, batches[0], task["dropout"], task["rate"])
    losses = []
    while step.steps < task["steps"]:
        losses.append(step(batches[step.steps % len(batches)]))
    _wait()
    ready = time.perf_counter() - began
    blocks = []
    for _ in range(task["blocks"]):
        blocks.append(_timed(step, batches, task["block"]))
    ms = statistics.median(blocks)
    each = len(batches)
    tail = torch.stack(losses[-20:]).float().mean().item()
    found = {
        "ms": round(ms, 3),
        "ms_blocks": [round(block, 3) for block in blocks],
        "samples_s": round(1000 * data.samples / each / ms, 1),
        "tokens_s": round(1000 * data.tokens / each / ms),
        "padding": round(1 - data.tokens / data.padded, 5),
        "padded_tokens": data.padded // each,
        "samples_a_step": round(data.samples / each, 2),
        "loss": round(tail, 4),
        "first_loss": round(losses[0].item(), 4),
        "peak_mib": torch.cuda.max_memory_allocated() // 2**20 if cuda else None,
        "ready_s": round(ready, 1),
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name() if cuda else "cpu",
    }
    if task["profile"]:
        found["kernels"] = kernels(step, batches)
    return found


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _timed(step: Step, batches: list, count: int) -> float:
    """Milliseconds of a step, the mean of `count`."""
    _wait()
    began = time.perf_counter()
    for _ in range(count):
        step(batches[step.steps % len(batches)])
    _wait()
    return 1000 * (time.perf_counter() - began) / count


def kernels(step: Step, batches: list, count: int = 3) -> list[list]:
    """The kernels of a step that take most time: name, microseconds a step, launches a step."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _timed(step, batches, count)
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return [
        [row.key[:90], round(row.device_time_total / count, 1), row.count // count]
        for row in rows[:45]
    ]


def _end(process) -> None:
    """End a child and all that it has started; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _child(task: dict, pipe) -> None:
    os.setsid()  # so that what it starts ends with it
    try:
        pipe.send(measure(task))
    except Exception as error:
        gc.collect()
        trace = traceback.format_exc().splitlines()
        pipe.send({"error": f"{type(error).__name__}: {error}"[:400], "trace": trace[-6:]})


class Runner:
    """Measures settings one after the other, each in a process of its own, and appends a line for each to a file.

    What the file has from a search before is not measured again, but failures are."""

    def __init__(self, arguments, lengths, shape: dict):
        self.arguments, self.lengths, self.shape = arguments, lengths, shape
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch"])
        self.deadline = time.monotonic() + arguments.within
        self.known = {}
        if arguments.out.exists():
            for text in arguments.out.read_text().splitlines():
                line = json.loads(text)
                if "samples_s" in line:
                    self.known[self._key(line, line["setting"], line["task"])] = line["samples_s"]

    def _key(self, place: dict, setting: dict, task: dict) -> str:
        where = [place["peer"], place["size"], place["parts"]]
        setting = {key: value for key, value in setting.items() if value != BASE[key]}
        return json.dumps([where, setting, task], sort_keys=True)

    def __call__(self, name: str, *changes: dict, **task) -> float:
        """Samples a second of BASE with `changes`, 0 where it failed; a setting that was measured is not again."""
        setting = merged(*changes)
        key = self._key(vars(self.arguments), setting, task)
        if key not in self.known:
            self.known[key] = self._measured(name, setting, task)
        return self.known[key]

    def _measured(self, name: str, setting: dict, task: dict) -> float:
        own = self.arguments
        left = self.deadline - time.monotonic()
        line = {"peer": own.peer, "size": own.size, "parts": own.parts, "name": name}
        line["setting"] = {key: value for key, value in setting.items() if value != BASE[key]}
        line["task"] = task
        if left < 20:
            print(json.dumps(line | {"error": "no time left"}), flush=True)
            return 0.0
        task = {
            "peer": own.peer,
            "size": own.size,
            "parts": own.parts,
            "shape": self.shape,
            "lengths": self.lengths,
            "setting": setting,
            "steps": own.steps,
            "block": own.block,
            "blocks": own.blocks,
            "batches": 40,
            "dropout": 0.1,
            "rate": own.rate,
            "profile": False,
        } | task
        here, there = self.context.Pipe()
        process = self.context.Process(target=_child, args=(task, there))
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(min(left, own.timeout)) else {"error": "time is up"}
        except EOFError:
            found = {"error": "the process ended"}
        _end(process)
        process.join()
        line |= found
        line["at"] = time.strftime("%H:%M:%S")
        print(json.dumps(line), flush=True)
        with own.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return found.get("samples_s", 0.0)


def search(run: Runner, options: dict, alone: dict, start: list[dict], pays: float) -> list[dict]:
    """Each option alone over `start`, then added in the order of their gains while each still brings the part `pays`.
    The changes of the quickest set."""
    best = run("base", *start)
    gains = []
    for group, alternatives in options.items():
        for name, change in alternatives.items():
            gains.append((run(name, *start, change) / best - 1, group, name, change))
    for name, change in alone.items():
        run(name, *start, change)
    chosen, taken = list(start), []
    for gain, group, name, change in sorted(gains, key=lambda row: -row[0]):
        if gain < -0.02 or group in [other for other, _ in taken]:
            continue
        together = " + ".join([*(other for _, other in taken), name])
        speed = run(together, *chosen, change)
        if speed > best * (1 + pays):
            best, chosen = speed, [*chosen, change]
            taken.append((group, name))
    run(" + ".join(name for _, name in taken) + ", profiled", *chosen, profile=True)
    return chosen


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="qa_lib.peers.search", description=__doc__)
    parser.add_argument("peer", choices=("bert", "gpt2"))
    parser.add_argument("--lengths", type=Path, help="a file of samples' lengths, for bert")
    parser.add_argument("--out", type=Path, default=Path("search.jsonl"))
    parser.add_argument("--size", type=int, default=32, help="samples or windows of a micro-batch")
    parser.add_argument("--parts", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=100, help="before anything is timed")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--block", type=int, default=25, help="steps of a block")
    parser.add_argument("--timeout", type=float, default=150, help="seconds of a setting")
    parser.add_argument("--within", type=float, default=560, help="seconds of all settings")
    parser.add_argument("--pays", type=float, default=0.002, help="the least gain that counts")
    parser.add_argument(
        "--start", default="[]", help="JSON: a list of changes that all settings have"
    )
    # Not --only: Inductor writes what follows that into the code that it generates.
    parser.add_argument(
        # Not --only: Inductor writes what follows that into the code that it generates.
        "--sets",
        help="JSON: {name: [changes]} in place of a search; a name that ends in 'profiled' is",
    )
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    arguments = parse(argv)
    shape = dict(BERT_BASE if arguments.peer == "bert" else GPT2_SMALL)
    if arguments.tiny:
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "n_layer": 2}
        small |= {"num_attention_heads": 2, "n_embd": 32, "n_head": 2, "n_positions": 32}
        shape = {name: small.get(name, value) for name, value in shape.items()}
    lengths = None
    if arguments.peer == "bert":
        lengths = np.loadtxt(arguments.lengths).astype(np.int64)
    run = Runner(arguments, lengths, shape)
    start = json.loads(arguments.start)
    if arguments.sets:
        for name, changes in json.loads(arguments.sets).items():
            extra = {"profile": True} if name.endswith("profiled") else {}
            run(name, *start, *changes, **extra)
        return
    reference = {"precision": "fp32", "compile": "none", "graph": False}
    run("plain fp32", reference, blocks=1, block=3)
    search(run, OPTIONS[arguments.peer], ALONE[arguments.peer], start, arguments.pays)


if __name__ == "__main__":
    main(sys.argv[1:])
