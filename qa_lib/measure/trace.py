"""What a profiler's trace says about a training step: each piece of work, with its phase and part.

A trace is the JSON of torch.profiler, which Perfetto opens as well. On a GPU the work is its
kernels and copies, on a CPU the operators' own time. Reading one needs no torch.

lab/tools/profile.py reads a run's trace with it: `work` makes a table, and `step_means` sums it up.
"""

import bisect
import difflib
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

PHASES = ("forward", "backward", "optimizer")
PARTS = (
    "embeddings",
    "attention",
    "feed-forward",
    "norms and elementwise",
    "loss",
    "optimizer",
    "copies",
)
KERNELS_LISTED = 25  # by `step_means`, the heaviest first
KERNEL_NAME_LENGTH = 160  # names of C++ templates run to thousands of characters

# What a range's name begins with -> the range's label.
STEPS_OF_THE_PROFILER = {"ProfilerStep#": "step"}
# Ranges of train/loop.py. "reduce" is what several processes do between backward pass and update;
# like the update it comes once a step, and it counts as the optimizer's.
_PHASES_OF_THE_LOOP = {name: name for name in PHASES} | {"reduce": "optimizer"}
_PHASES_OF_PYTORCH = {
    "Optimizer.step": "optimizer",
    "autograd::engine::evaluate_function": "backward",
}

# Categories of events.
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
BY_HOST = {"cuda_runtime", "cuda_driver"}
# What the names of the host's calls that launch work begin with.
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
# Words in the names of operators and kernels.
_GEMM_OPS = ("mm", "linear", "matmul", "dot")
_GEMM_KERNELS = ("gemm", "nvjet", "splitkreduce", "cublas", "cutlass")
_LOSS = ("nll_loss", "log_softmax", "cross_entropy")
_ATTENTION = ("flash", "fmha", "attention", "softmax", "bmm")
# Whole names of operators.
_LOOKUP = "aten::embedding"
_COPIES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::to",
    "aten::clone",
    "aten::contiguous",
    "aten::fill_",
    "aten::zero_",
}


class Widths(NamedTuple):
    """The widths by which a model's GEMMs are told apart."""

    hidden: int  # of hidden states
    intermediate: int  # within feed-forward blocks
    outputs: int  # logits of a token: 2 where answers are found, the vocabulary in language models


class Work(NamedTuple):
    """A kernel or a copy on the GPU; on a CPU an operator, less the operators that it calls."""

    begin_us: float
    ms: float
    name: str
    caller: str  # the operator that launched it, or the runtime call that launched a CUDA graph
    sizes: list[tuple[int, ...]]  # shapes of the operator's inputs; none for a graph's work
    launched_us: float  # when the host launched it, which says its step and phase


def export(profiler) -> bytes:
    """Return the trace of a torch.profiler as the content of a file, gzipped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def read(packed: bytes) -> list[dict]:
    """Return the events of a trace, from the content of its file."""
    return json.loads(gzip.decompress(packed))["traceEvents"]


def part_of(kernel: str, op: str, sizes: list[tuple[int, ...]], phase: str, widths: Widths) -> str:
    """Return the part of the model that a piece of work belongs to, one of PARTS.

    `kernel` is the name of the work, `op` that of the operator that launched it, and `sizes` are
    the shapes of that operator's inputs. Matrix products are told apart by the model's `widths`
    alone, whichever kernel ran them.

    The first test that fits decides, so that their order matters: a softmax is the loss's before it
    is attention's, the batched products of attention are its before they are GEMMs, and a layer
    norm that the compiler fused with the lookups before it counts as embeddings.
    """
    kernel_name = kernel.lower()
    op_name = op.lower()
    both_names = f"{kernel_name} {op_name}"
    if phase == "optimizer":
        return "optimizer"
    if kernel_name.startswith(("memcpy", "memset")):
        return "copies"
    if any(word in both_names for word in _LOSS):
        return "loss"
    if any(word in both_names for word in _ATTENTION):
        return "attention"
    if "embedding" in both_names:
        return "embeddings"
    is_gemm_kernel = any(word in kernel_name for word in _GEMM_KERNELS)
    is_gemm_op = any(word in op_name.split("::")[-1] for word in _GEMM_OPS)
    # The compiler names an elementwise kernel after all that it fuses, GEMMs before it included.
    is_fused = kernel_name.startswith("triton")
    if (is_gemm_kernel or is_gemm_op) and not is_fused:
        return _part_of_gemm(sizes, widths)
    if op in _COPIES:
        return "copies"
    return "norms and elementwise"


def _part_of_gemm(sizes: list[tuple[int, ...]], widths: Widths) -> str:
    """Return the part that a matrix product belongs to, by the shapes of its inputs."""
    dimensions = {size for shape in sizes for size in shape}
    if widths.intermediate in dimensions:
        return "feed-forward"
    if widths.hidden in dimensions and widths.outputs in dimensions:
        return "loss"  # the head, which makes logits of hidden states
    return "attention"  # its projections, from hidden states to hidden states


def work(events: list[dict], widths: Widths) -> pd.DataFrame:
    """Return a row for each piece of work of a trace, in order of time.

    Columns are step, start_ms (within the step), ms, name, phase and part. Steps are the profiler's
    own ranges, phases those in PHASES; work outside of steps is left out.

    What a CUDA graph launches has no operator, and its part is a guess by its name. A graph that is
    launched outside of all phases, as that of a whole step is (train/cuda_graph.py), has the phase
    "" for all its work. `label_like` replaces both. Graphs of torch.compile are launched within the
    phases of train/loop.py, and have these.
    """
    steps = _spans(events, STEPS_OF_THE_PROFILER)
    # The Trainer's loop has no ranges of ours, but PyTorch names its own.
    phases = _spans(events, _PHASES_OF_THE_LOOP) or _spans(events, _PHASES_OF_PYTORCH)
    ops = [e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
    lookups = sorted((e["ts"], e["ts"] + e["dur"]) for e in ops if e["name"] == _LOOKUP)
    pieces = _gpu_work(events, ops) if _has_gpu_work(events) else _cpu_work(ops)
    rows = []
    for piece in pieces:
        step = _span_at(steps, piece.launched_us)
        if step is None:
            continue
        phase = _phase_of(piece, phases)
        # Which operators a lookup calls in turn differs between versions of PyTorch.
        is_in_lookup = _span_at(lookups, piece.launched_us) is not None
        op = _LOOKUP if is_in_lookup else piece.caller
        part = part_of(piece.name, op, piece.sizes, phase, widths)
        rows.append((step, piece.begin_us / 1e3, piece.ms, piece.name, phase, part))
    table = pd.DataFrame(rows, columns=["step", "start_ms", "ms", "name", "phase", "part"])
    table["start_ms"] -= table.groupby("step")["start_ms"].transform("min")
    return table


def _phase_of(piece: Work, phases: list[tuple[float, float, str]]) -> str:
    """Return the phase of a piece of work by the spans of the phases; "" for that of a graph."""
    index = _span_at(phases, piece.launched_us)
    if index is not None:
        _, _, phase = phases[index]
        return phase
    if "GraphLaunch" in piece.caller:
        return ""
    return "forward"  # PyTorch names no range of its own there


def _spans(events: list[dict], labels: dict[str, str]) -> list[tuple[float, float, str]]:
    """Return (begin, end, label) of some ranges and operators on the CPU, in order of time.

    `labels` says which: those whose name begins with one of its keys, and the label of each. A
    range has a copy on the GPU's side of the trace, which is left out.
    """
    spans = []
    for e in events:
        if e.get("ph") != "X" or e.get("cat") not in ("user_annotation", "cpu_op"):
            continue
        for prefix, label in labels.items():
            if e["name"].startswith(prefix):
                spans.append((e["ts"], e["ts"] + e["dur"], label))
    return sorted(spans)


def _span_at(spans: list[tuple], moment: float) -> int | None:
    """Return the index of the span that began last before a moment, or None if it has ended.

    `spans` are (begin, end, ...) in order of time. Those that began earlier are not looked at, even
    if they last until then: steps and phases follow each other, and do not enclose others.
    """
    # A span that begins at this very moment has begun: infinity is later than any end.
    index = bisect.bisect_right(spans, (moment, float("inf"))) - 1
    if index < 0:
        return None
    end = spans[index][1]
    return index if moment < end else None


def _has_gpu_work(events: list[dict]) -> bool:
    """Return whether a trace has work on a GPU."""
    return any(e.get("cat") == "kernel" for e in events)


def _gpu_work(events: list[dict], ops: list[dict]) -> Iterator[Work]:
    """Yield the work on the GPU, in order of time; `ops` are the operators among the events."""
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in BY_HOST and "args" in e}
    op_by_id = {e["args"]["External id"]: e for e in ops if "External id" in e.get("args", {})}
    on_gpu = [e for e in events if e.get("cat") in ON_GPU]
    for e in sorted(on_gpu, key=lambda e: e["ts"]):
        call = calls.get(e["args"].get("correlation"))
        if call is None:
            continue  # its launch is not in the trace, and so its step is not known
        op = op_by_id.get(e["args"].get("External id"), {})
        is_graph = "GraphLaunch" in call["name"]
        yield Work(
            begin_us=e["ts"],
            ms=e["dur"] / 1e3,
            name=e["name"],
            caller=call["name"] if is_graph else op.get("name", ""),
            sizes=_sizes(op),
            launched_us=call["ts"],
        )


def _cpu_work(ops: list[dict]) -> Iterator[Work]:
    """Yield each operator, less the time of the operators that it calls."""
    ops = sorted(ops, key=lambda e: (e["ts"], -e["dur"]))
    own_us = [e["dur"] for e in ops]
    # The operators of each thread that have begun and not ended; each has called the next.
    stacks: dict[int, list[int]] = {}
    for index, e in enumerate(ops):
        stack = stacks.setdefault(e["tid"], [])
        while stack and ops[stack[-1]]["ts"] + ops[stack[-1]]["dur"] <= e["ts"]:
            stack.pop()
        if stack:
            own_us[stack[-1]] -= e["dur"]
        stack.append(index)
    for e, us in zip(ops, own_us, strict=True):
        yield Work(
            begin_us=e["ts"],
            ms=max(0.0, us) / 1e3,  # one that seems to end after its caller leaves that less than 0
            name=e["name"],
            caller=e["name"],
            sizes=_sizes(e),
            launched_us=e["ts"],
        )


def _sizes(op: dict) -> list[tuple[int, ...]]:
    """Return the shapes of those of an operator's inputs that are tensors."""
    sizes = []
    for shape in op.get("args", {}).get("Input Dims", []):
        # A number has an empty shape, a list of tensors a list of shapes.
        if shape and all(isinstance(size, int) for size in shape):
            sizes.append(tuple(shape))
    return sizes


def label_like(replayed: pd.DataFrame, launched: pd.DataFrame) -> pd.DataFrame:
    """Return the `replayed` work of a CUDA graph with the phases and parts of the `launched` work.

    Both are tables by `work`, of the same training with and without the graph. A graph replays its
    kernels in the order in which they were launched, so that equal sequences of names belong
    together. A kernel without a counterpart keeps its part, and takes the phase of the one before.
    """
    # One step serves all, since the graph is the same in each.
    known = launched[launched["step"] == launched["step"].max()]
    known_names = list(known["name"])
    known_phases = list(known["phase"])
    known_parts = list(known["part"])
    labelled = []
    for _, step in replayed.groupby("step"):
        names = list(step["name"])
        phases = [None] * len(step)
        parts = list(step["part"])
        matcher = difflib.SequenceMatcher(None, names, known_names, autojunk=False)
        for begin, known_begin, length in matcher.get_matching_blocks():
            here = slice(begin, begin + length)
            there = slice(known_begin, known_begin + length)
            phases[here] = known_phases[there]
            parts[here] = known_parts[there]
        phase = pd.Series(phases, step.index, dtype=object).ffill().fillna("forward")
        labelled.append(step.assign(phase=phase, part=parts))
    return pd.concat(labelled) if labelled else replayed


def step_means(table: pd.DataFrame, events: list[dict], step_ms: float) -> dict:
    """Return means over the steps of a trace, whose work is the `table`.

    `step_ms` is the length of a step that was timed without a profiler. The keys are

    - step_ms, as it was given; busy_ms, and the share of step_ms that it is, busy_share;
    - launches_per_step, calls by the host, and kernels_per_step, both None on a CPU;
    - parts, {phase: {part: ms}} without parts that took no time;
    - kernels, the heaviest ones: each a name, phase and part with its ms and count in a step.
    """
    steps = max(1, table["step"].nunique())
    has_gpu_work = _has_gpu_work(events)
    parts = (table.groupby(["phase", "part"])["ms"].sum() / steps).to_dict()
    spans = _spans(events, STEPS_OF_THE_PROFILER)
    calls = [e for e in events if e.get("cat") in BY_HOST and e["name"].startswith(_LAUNCHES)]
    launches = sum(_span_at(spans, e["ts"]) is not None for e in calls)
    busy_ms = float(table["ms"].sum() / steps)
    parts_by_phase = {
        phase: {part: parts[phase, part] for part in PARTS if parts.get((phase, part))}
        for phase in PHASES
    }
    return {
        "step_ms": step_ms,
        "busy_ms": busy_ms,
        "busy_share": min(1.0, busy_ms / step_ms),
        "launches_per_step": launches / steps if has_gpu_work else None,
        "kernels_per_step": len(table) / steps if has_gpu_work else None,
        "parts": parts_by_phase,
        "kernels": _heaviest_kernels(table, steps),
    }


def _heaviest_kernels(table: pd.DataFrame, steps: int) -> list[dict]:
    """Return the KERNELS_LISTED kernels that take most of the time, with means over `steps`."""
    kernels = (
        table.groupby(["name", "phase", "part"])["ms"]
        .agg(["sum", "count"])
        .sort_values("sum", ascending=False)
    )
    return [
        {
            "name": name[:KERNEL_NAME_LENGTH],
            "phase": phase,
            "part": part,
            "ms": total / steps,
            "count": count / steps,
        }
        for (name, phase, part), total, count in kernels.head(KERNELS_LISTED).itertuples()
    ]
