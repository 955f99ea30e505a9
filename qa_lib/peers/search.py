"""Search for the quickest rival: `python -m qa_lib.peers.search bert --lengths FILE`.

`mpnet` takes such a file as well; `gpt2` takes none.

Each setting is built, compiled and timed in a process of its own and gives a line of JSON: samples
and tokens a second, milliseconds a step, peak memory, the share of padding, and the loss after some
steps, to be held against that of plain fp32. Building and compiling take most of the time, so that
several settings do that at once (`--at-once`); each is timed while all others wait. The search
measures each option alone, then adds those that pay, the best first, as long as they still do.
Weights are random, and so are samples, but for their lengths. Where an answer begins and ends, a
token says so: the loss falls, unless a setting is broken. This file imports nothing of the library
but its neighbours.

The compiler chooses some kernels by timing them, and what is compiled beside it disturbs that:
`--at-once 1` measures settings that live by such a choice ("max-autotune", "coordinate descent")
without others.
"""

import argparse
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from qa_lib.peers import packing
from qa_lib.peers.adamw import CompiledAdamW, PublicAdamW
from qa_lib.peers.bert import Bert
from qa_lib.peers.gpt2 import GPT2
from qa_lib.peers.mpnet import MPNet
from qa_lib.peers.processes import Measurements, exit_on_sigterm
from qa_lib.peers.search_options import ALONE, OPTIONS, START, merged, without_defaults
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
MPNET_BASE = {
    "hidden_size": 768,
    "layer_norm_eps": 1e-5,
    "vocab_size": 30527,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
}
GPT2_SMALL = {"vocab_size": 50257, "n_embd": 768, "n_positions": 1024, "n_layer": 12, "n_head": 12}
SHAPES = {"bert": BERT_BASE, "mpnet": MPNET_BASE, "gpt2": GPT2_SMALL}
# For tests on a CPU: these sizes in place of those above.
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
}
DROPOUT = 0.1
WORTH_A_TRY = -0.02  # an option that loses more than that alone is not added to others
BATCHES = 40  # different steps of data, which are repeated
# The last of the steps before the timed ones, done when others wait: the card's clocks rise, and
# memory is taken again that a setting gave back while it waited.
LEAD_IN = 20
FIRST_CONTEXT_TOKEN = 14  # of a sample: about where SQuAD's questions end
START_TOKEN = 1
END_TOKEN = 2
FIRST_RANDOM_TOKEN = 10


class Data:
    """Counts what training steps of random text hold; its subclasses make them.

    A step is a list of `parts` micro-batches in pinned memory. `shape` is the model's config.
    """

    def __init__(self, shape: dict, parts: int):
        self.draw = np.random.default_rng(0)
        self.shape = shape
        self.parts = parts
        # Totals of all steps that were made.
        self.samples = 0
        self.tokens = 0  # without padding
        self.padded = 0  # with padding

    def steps(self, count: int) -> list[list[dict[str, torch.Tensor]]]:
        """Return the first `count` steps, or as many as there are samples for."""
        raise NotImplementedError

    def _count(self, samples: int, tokens: int, padded: int) -> None:
        """Add a micro-batch to the totals."""
        self.samples += samples
        self.tokens += tokens
        self.padded += padded


class Windows(Data):
    """Makes steps for "gpt2": a micro-batch is `size` windows of text."""

    def __init__(self, shape: dict, parts: int, size: int):
        super().__init__(shape, parts)
        self.size = size

    def steps(self, count: int) -> list[list[dict[str, torch.Tensor]]]:
        return [[self._micro_batch() for _ in range(self.parts)] for _ in range(count)]

    def _micro_batch(self) -> dict[str, torch.Tensor]:
        """Return windows whose words are as unequally frequent as in a text."""
        tokens = self.shape["n_positions"]
        ids = self.draw.zipf(1.3, (self.size, tokens)) % self.shape["vocab_size"]
        self._count(self.size, ids.size, ids.size)
        return _pinned({"input_ids": ids, "labels": ids})


class PackedSamples(Data):
    """Makes steps for "bert" and "mpnet": a micro-batch is a packed sequence of about `size`
    samples with these `lengths`.

    `setting` says how they are packed. With `has_types` a micro-batch has token types as well.
    """

    def __init__(
        self,
        shape: dict,
        parts: int,
        size: int,
        lengths: np.ndarray,
        setting: dict,
        has_types: bool,
    ):
        super().__init__(shape, parts)
        self.has_types = has_types
        lengths = self.draw.permutation(lengths)
        budget = setting["budget"]
        if setting["packing"] == "fill":
            groups = packing.fill(lengths, budget)
        else:
            groups = packing.deal(lengths, size)
            fullest = max(int(lengths[group].sum()) for group in groups)
            budget = budget or packing.tile(fullest)
        order = self.draw.permutation(len(groups))
        self.groups = [lengths[groups[i]] for i in order]  # lengths of each sequence's samples
        self.budget = budget  # tokens of a sequence
        self.longest = int(packing.tile(lengths.max(), 64))
        self.most = max(len(group) for group in self.groups)  # samples of a sequence
        # Tokens of the longest sample at each place of a sequence.
        places = itertools.zip_longest(*self.groups, fillvalue=0)
        self.limits = [int(max(of_place)) for of_place in places]

    def steps(self, count: int) -> list[list[dict[str, torch.Tensor]]]:
        count = min(count, len(self.groups) // self.parts)
        groups = iter(self.groups)
        return [[self._micro_batch(next(groups)) for _ in range(self.parts)] for _ in range(count)]

    def _micro_batch(self, lengths: np.ndarray) -> dict[str, torch.Tensor]:
        """Return one sequence, packed with samples of these lengths."""
        arrays = packing.sequence(lengths, self.budget, self.most)
        begins = arrays["cu_seqlens"][: len(lengths)]
        answers = np.sort(self.draw.integers(0, lengths[:, None], (len(lengths), 2)), axis=1)
        ids = self.draw.integers(FIRST_RANDOM_TOKEN, self.shape["vocab_size"], self.budget)
        ids[begins + answers[:, 0]] = START_TOKEN
        ids[begins + answers[:, 1]] = END_TOKEN
        positions = np.full((2, self.most), -100)  # those of answers; -100: no sample
        positions[:, : len(lengths)] = answers.T
        self._count(len(lengths), int(lengths.sum()), self.budget)
        arrays |= {
            "input_ids": ids[None],
            "start_positions": positions[0],
            "end_positions": positions[1],
        }
        if self.has_types:
            is_context = arrays["position_ids"] >= FIRST_CONTEXT_TOKEN
            arrays["token_type_ids"] = is_context.astype(np.int64)
        return _pinned(arrays)


def data_for(
    peer: str, shape: dict, size: int, parts: int, setting: dict, lengths: np.ndarray | None
) -> Data:
    """Return what makes the steps of a peer; "gpt2" has no `lengths`."""
    if peer == "gpt2":
        return Windows(shape, parts, size)
    return PackedSamples(shape, parts, size, lengths, setting, has_types=peer == "bert")


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
    """Return a Step of this setting over a model with random weights, the same for all settings.

    `shape` is the model's config; `example` has the micro-batches of a step. `data` made them.

    A setting's `blas` and `sdpa` are switches of the whole process, and `sdpa` turns the compiler's
    caches off as well: a process builds one setting alone.

    Raises ValueError: the setting names an optimizer or a way to compile that does not exist.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    like = SimpleNamespace(config=SimpleNamespace(**shape))
    if peer == "bert":
        model = Bert(like, dropout, data.longest, **setting["model"])
    elif peer == "mpnet":
        model = MPNet(like, dropout, data.limits, **setting["model"])
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
    match setting["optimizer"]:
        case "fused":
            optimizer = PublicAdamW(model, rate)
        case "torchao":
            optimizer = PublicAdamW(model, rate, stochastic=True)
        case "own":
            optimizer = CompiledAdamW(model, rate, **options)
        case unknown:
            raise ValueError(f"optimizer {unknown!r} is none of fused, torchao, own")
    compiler = {"dynamic": False}
    if setting["mode"]:
        compiler["mode"] = setting["mode"]
    elif setting["inductor"]:
        compiler["options"] = setting["inductor"]
    compile_parts(model, setting["compile"], **compiler)
    return Step(
        model,
        optimizer,
        example,
        autocast=setting["precision"] == "autocast",
        graph=setting["graph"] and device.type == "cuda",
    )


def _to_float8(model, recipe: str, *parts: str) -> None:
    """Convert linear layers to torchao's FP8 training: those that `parts` name, or "all".

    The head is never converted.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def wanted(module, name: str) -> bool:
        last = name.rpartition(".")[2]
        return last != "head" and (parts == ("all",) or last in parts)

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, module_filter_fn=wanted, config=config)


def _only_sdpa(name: str) -> None:
    """Let scaled_dot_product_attention take one kernel alone: "cudnn" or "flash"."""
    # The choice is made while the model is traced, and no key of the compiler's caches has it.
    torch._inductor.config.force_disable_caches = True
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(name == "cudnn")
    cuda.enable_flash_sdp(name == "flash")
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_math_sdp(False)


def measure(task: dict, await_turn: Callable[[], None]) -> dict:
    """Measure a setting and return its figures; `task` is what Runner makes.

    `await_turn` is called when all is built, compiled and warm; nothing else runs when it returns.
    """
    cuda = torch.cuda.is_available()
    began = time.perf_counter()
    peer = task["peer"]
    shape = task["shape"]
    setting = task["setting"]
    data = data_for(peer, shape, task["size"], task["parts"], setting, task["lengths"])
    batches = data.steps(BATCHES)
    step = build(peer, shape, setting, data, batches[0], dropout=DROPOUT, rate=task["rate"])
    losses = []

    def train(steps: int) -> None:
        """Train until so many steps have been done."""
        while step.steps < steps:
            losses.append(step(batches[step.steps % len(batches)]))
        _wait()

    # Where no graph was captured, the first steps compile: they are never of the lead-in.
    train(max(task["steps"] - LEAD_IN, min(task["steps"], Step.WARM_UP)))
    ready = time.perf_counter() - began
    if cuda:
        torch.cuda.empty_cache()  # others need it
    await_turn()
    train(task["steps"])
    blocks = [_step_ms(step, batches, task["block"]) for _ in range(task["blocks"])]
    ms = statistics.median(blocks)
    last_losses = torch.stack(losses[-20:]).float()
    figures = {
        "ms": round(ms, 3),
        "ms_blocks": [round(block, 3) for block in blocks],
        "samples_s": round(1000 * data.samples / len(batches) / ms, 1),
        "tokens_s": round(1000 * data.tokens / len(batches) / ms),
        "padding": round(1 - data.tokens / data.padded, 5),
        "padded_tokens": data.padded // len(batches),
        "samples_a_step": round(data.samples / len(batches), 2),
        "loss": round(last_losses.mean().item(), 4),
        "first_loss": round(losses[0].item(), 4),
        "peak_mib": torch.cuda.max_memory_allocated() // 2**20 if cuda else None,
        "ready_s": round(ready, 1),
    }
    if task["profile"]:
        figures["kernels"] = kernels(step, batches)
    return figures


def _wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _step_ms(step: Step, batches: list, count: int) -> float:
    """Return the milliseconds of a step, the mean of `count` steps."""
    _wait()
    began = time.perf_counter()
    for _ in range(count):
        step(batches[step.steps % len(batches)])
    _wait()
    return 1000 * (time.perf_counter() - began) / count


def kernels(step: Step, batches: list, count: int = 3) -> list[list]:
    """Return the 45 kernels of a step that take most time, the longest first.

    Each is [name, microseconds a step, launches a step].
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        _step_ms(step, batches, count)
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return [
        [row.key[:90], round(row.device_time_total / count, 1), row.count // count]
        for row in rows[:45]
    ]


def settings_of(
    arguments: argparse.Namespace, lengths: np.ndarray | None, shape: dict
) -> dict[str, object]:
    """Return what tells measurements apart, but for the setting and what changes a single line.

    These are the work, by arguments, lengths and shape, and the card, PyTorch and the code of this
    folder.
    """
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    names = ("peer", "size", "parts", "steps", "block", "blocks", "rate")
    return {name: getattr(arguments, name) for name in names} | {
        "shape": shape,
        "lengths": None if lengths is None else _digest(lengths.tobytes()),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "code": _digest(code),
    }


def _digest(content: bytes) -> str:
    """Return a short digest, which differs where the content does."""
    return hashlib.sha256(content).hexdigest()[:12]


@dataclass
class Wanted:
    """A setting to be measured: BASE with `changes`."""

    name: str  # what its line is called
    changes: list[dict]
    task: dict = field(default_factory=dict)  # what changes how it is measured


class Runner:
    """Measures settings in turns, each in a process of its own.

    `arguments` are those of the command line, `lengths` those of samples or None, `shape` is the
    model's config. What the file `arguments.out` has from a search before is not measured again, if
    it was measured as this search does it (`settings_of`); what failed there is.
    """

    def __init__(self, arguments: argparse.Namespace, lengths: np.ndarray | None, shape: dict):
        self.lengths = lengths
        self.settings = settings_of(arguments, lengths, shape)
        self.measurements = Measurements(
            measure,
            arguments.out,
            timeout_s=arguments.timeout,
            within_s=arguments.within,
            at_once=arguments.at_once,
        )
        self.known = []  # lines of what was measured
        if arguments.out.exists():
            lines = [json.loads(text) for text in arguments.out.read_text().splitlines()]
            self.known = [line for line in lines if "samples_s" in line]

    def __call__(self, settings: list[Wanted]) -> Iterator[dict]:
        """Yield the figures of each setting, or the `error` with which it failed, in their order.

        Each is measured once, and not at all where it was measured before. Where the iterator is
        closed, those that are left are not measured.
        """
        lines = [self._line(wanted) for wanted in settings]
        new = []
        for line in lines:
            if self._known(line) is None and not any(_same(line, other) for other in new):
                new.append(line)
        pairs = [(line, self._task(line)) for line in new]
        with closing(self.measurements.in_turns(pairs)) as results:
            for line in lines:
                figures = self._known(line)
                if figures is None:
                    figures = line | next(results)
                    self.known.append(figures)
                yield figures

    def _line(self, wanted: Wanted) -> dict:
        """Return the line of a setting, without its figures."""
        setting = without_defaults(merged(*wanted.changes))
        return self.settings | {"name": wanted.name, "setting": setting, "task": wanted.task}

    def _task(self, line: dict) -> dict:
        """Return what `measure` takes for a line."""
        # The lengths themselves, where a line has their digest.
        how = self.settings | {"lengths": self.lengths, "profile": False}
        return how | {"setting": merged(line["setting"])} | line["task"]

    def _known(self, line: dict) -> dict | None:
        """Return the line with figures of a setting that was measured before, else None."""
        return next((known for known in self.known if _same(line, known)), None)


def _same(line: dict, other: dict) -> bool:
    """Return whether another line is of the same setting, measured in the same way."""
    return all(other.get(key) == value for key, value in line.items() if key != "name")


class BaseFailed(Exception):
    """The setting that all options are held against cannot be measured; the message says why."""


def samples_s(figures: dict) -> float:
    """Return the speed among what a Runner returns, 0 where the measurement failed."""
    return figures.get("samples_s", 0.0)


class Candidate(NamedTuple):
    """An option that may be added to others; those of a group exclude one another."""

    group: str
    name: str
    change: dict
    gain: float = 0.0  # what it brings alone, as a share of the base's speed


def search(
    run: Callable[[list[Wanted]], Iterator[dict]],
    options: dict[str, dict[str, dict]],
    alone: dict[str, dict],
    start: list[dict],
    least_gain: float,
) -> Wanted:
    """Return the quickest set of options that was found, with `start` among its changes.

    `run` is a Runner. Each of `options` (by group, then by name) is measured over `start`. Then
    they are added to it, the best first, each as long as it still brings at least `least_gain`, a
    share of the speed. One of a group is taken. Those of `alone` are measured and never added.

    Sets are given to `run` many at a time, so that it can set them up at the same time. Which sets
    come next depends on what pays: they are asked for as `foreseen`, until that proves wrong.

    Raises BaseFailed where `start` cannot be measured, since no gain could be told.
    """

    def over_start(chosen: list[Candidate]) -> Wanted:
        """Return the setting that has these options."""
        name = " + ".join(candidate.name for candidate in chosen) or "base"
        return Wanted(name, [*start, *(candidate.change for candidate in chosen)])

    candidates = [
        Candidate(group, name, change)
        for group, alternatives in options.items()
        for name, change in alternatives.items()
    ]
    settings = [over_start([]), *(over_start([candidate]) for candidate in candidates)]
    settings += [Wanted(name, [*start, change]) for name, change in alone.items()]
    with closing(run(settings)) as results:
        base = next(results)
        if "error" in base:
            raise BaseFailed(
                f"the base cannot be measured, and no option without it: {base['error']}"
            )
        best_speed = samples_s(base)
        gains = [samples_s(figures) / best_speed - 1 for figures in results]

    left = []  # candidates that are still to be tried, the best first
    for candidate, gain in zip(candidates, gains, strict=False):  # then come those of `alone`
        if gain >= WORTH_A_TRY:
            left.append(candidate._replace(gain=gain))
    left.sort(key=lambda candidate: -candidate.gain)
    chosen = []
    while sets := foreseen(chosen, left, least_gain):
        with closing(run([over_start(tried) for tried in sets])) as results:
            for tried, figures in zip(sets, results, strict=True):
                candidate = tried[-1]
                left = left[left.index(candidate) + 1 :]
                pays = samples_s(figures) > best_speed * (1 + least_gain)
                if pays:
                    best_speed = samples_s(figures)
                    chosen = tried
                if pays != (candidate.gain > least_gain):
                    break
    return over_start(chosen)


def foreseen(
    chosen: list[Candidate], candidates: list[Candidate], least_gain: float
) -> list[list[Candidate]]:
    """Return the sets that are tried in turn if each candidate pays beside others as it does alone.

    Each set is what is chosen by then, and a candidate, of whose group nothing is chosen.
    """
    sets = []
    for candidate in candidates:
        if candidate.group in [other.group for other in chosen]:
            continue
        tried = [*chosen, candidate]
        sets.append(tried)
        if candidate.gain > least_gain:
            chosen = tried
    return sets


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="qa_lib.peers.search", description=__doc__)
    parser.add_argument("peer", choices=tuple(SHAPES))
    parser.add_argument(
        "--lengths",
        type=Path,
        help="a file of samples' lengths in tokens, one a line; not for gpt2",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("search.jsonl"),
        help="the file to which a line for each setting is appended (%(default)s)",
    )
    parser.add_argument(
        "--size", type=int, default=32, help="samples or windows of a micro-batch (%(default)s)"
    )
    parser.add_argument(
        "--parts", type=int, default=1, help="micro-batches of a step (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=100, help="steps before anything is timed (%(default)s)"
    )
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate (%(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=8, help="timed blocks, whose median counts (%(default)s)"
    )
    parser.add_argument("--block", type=int, default=25, help="steps of a block (%(default)s)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=150,
        help="seconds that a setting may take, without those in which it waits for its turn "
        "(%(default)s)",
    )
    parser.add_argument(
        "--within", type=float, default=560, help="seconds for all settings (%(default)s)"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=4,
        help="settings that are set up at the same time; each is timed alone (%(default)s)",
    )
    parser.add_argument(
        "--pays",
        type=float,
        default=0.002,
        help="the least gain for which an option is added, as a share (%(default)s)",
    )
    parser.add_argument(
        "--start",
        help="JSON: a list of changes that all settings have (none; for mpnet what pays for bert)",
    )
    # Not --only: Inductor writes what follows that into the code that it generates.
    parser.add_argument(
        "--sets",
        help="JSON: {name: [changes]}, to measure in place of a search; those whose names end in "
        "'profiled' are profiled",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a CPU")
    arguments = parser.parse_args(argv)
    if arguments.peer != "gpt2" and arguments.lengths is None:
        parser.error(
            f"{arguments.peer} is trained on samples of given lengths: add --lengths FILE, with "
            "the tokens of a sample in each line"
        )
    if arguments.at_once < 1:
        parser.error(f"--at-once {arguments.at_once}: at least one setting has to be set up")
    return arguments


def main(argv: list[str]) -> None:
    args = parse(argv)
    shape = SHAPES[args.peer]
    if args.tiny:
        shape = {name: TINY.get(name, value) for name, value in shape.items()}
    lengths = None
    if args.peer != "gpt2":
        lengths = np.loadtxt(args.lengths).astype(np.int64)
    run = Runner(args, lengths, shape)
    start = START[args.peer] if args.start is None else json.loads(args.start)
    if args.sets:
        settings = []
        for name, changes in json.loads(args.sets).items():
            task = {"profile": True} if name.endswith("profiled") else {}
            settings.append(Wanted(name, [*start, *changes], task))
        list(run(settings))  # each is measured when it is asked for
        return
    try:
        found = search(run, OPTIONS[args.peer], ALONE[args.peer], start, args.pays)
    except BaseFailed as problem:
        sys.exit(str(problem))
    reference = {"precision": "fp32", "compile": "none", "graph": False}
    profiled = Wanted(f"{found.name}, profiled", found.changes, {"profile": True})
    plain = Wanted("plain fp32", [reference], {"blocks": 1, "block": 3})
    list(run([profiled, plain]))


if __name__ == "__main__":
    exit_on_sigterm()
    main(sys.argv[1:])
