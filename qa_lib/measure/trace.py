"""What a profiler's trace says about a training step: each piece of work, with its phase and part.

A trace is the JSON of torch.profiler, which Perfetto opens as well. On a GPU the work is its
kernels and copies, on a CPU the operators' own time. Reading one needs no torch.

It also says what communication costs a step (variants of family P). A reduction that runs beside
the backward pass costs nothing but the memory bandwidth it takes; what counts is the rest, the
exposed part, in which a GPU runs nothing else. A GPU that waits for another one counts as
communicating, since NCCL's kernels wait by spinning.
"""

import bisect
import difflib
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
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
OVERLAP_STEPS = 3  # steps that `overlap` profiles

# The begin of a range's name -> its label.
STEP = {"ProfilerStep#": "step"}
# Ranges of train/loop.py. What several processes do between backward pass and update counts as the
# optimizer's.
_PHASES_OF_THE_LOOP = {name: name for name in PHASES} | {"reduce": "optimizer"}
_PHASES_OF_PYTORCH = {
    "Optimizer.step": "optimizer",
    "autograd::engine::evaluate_function": "backward",
}

# Categories of events.
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
BY_HOST = {"cuda_runtime", "cuda_driver"}
# Begins of the names of calls by the host that launch work.
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
# Words in the names of operators and kernels.
_GEMM_OPS = ("mm", "linear", "matmul", "dot")
_GEMM_KERNELS = ("gemm", "nvjet", "splitkreduce", "cublas", "cutlass")
_LOSS = ("nll_loss", "log_softmax", "cross_entropy")
_ATTENTION = ("flash", "fmha", "attention", "softmax", "bmm")
# Operators.
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
    outputs: int  # of the head for each token: two logits of an answer, or one for each word


class Work(NamedTuple):
    """A kernel or a copy on the GPU, or on a CPU an operator without those that it calls."""

    begin_us: float
    ms: float
    name: str
    caller: str  # the operator that launched it, or the runtime call that launched a CUDA graph
    sizes: list[tuple[int, ...]]  # shapes of the operator's inputs; none for a graph's work
    launched_us: float


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

    `kernel` is its name, `op` the operator that launched it and `sizes` the shapes of that
    operator's inputs: matrix products are told apart by the model's `widths` alone, whichever
    kernel ran them. A layer norm that the compiler fused with the lookups before it counts as
    embeddings.
    """
    name = kernel.lower()
    caller = op.lower()
    names = name + caller
    if phase == "optimizer":
        return "optimizer"
    if name.startswith(("memcpy", "memset")):
        return "copies"
    if any(word in names for word in _LOSS):
        return "loss"
    if any(word in names for word in _ATTENTION):
        return "attention"
    if "embedding" in names:
        return "embeddings"
    is_gemm_kernel = any(word in name for word in _GEMM_KERNELS)
    is_gemm_op = any(word in caller.split("::")[-1] for word in _GEMM_OPS)
    # What the compiler fused bears the names of GEMMs it follows.
    is_fused = name.startswith("triton")
    if (is_gemm_kernel or is_gemm_op) and not is_fused:
        dimensions = {size for shape in sizes for size in shape}
        if widths.intermediate in dimensions:
            return "feed-forward"
        return "loss" if {widths.hidden, widths.outputs} <= dimensions else "attention"
    return "copies" if op in _COPIES else "norms and elementwise"


def work(events: list[dict], widths: Widths) -> pd.DataFrame:
    """Return a line for each piece of work of a trace, in order of time.

    Columns are step, start_ms (within the step), ms, name, phase and part. Steps are the profiler's
    own ranges, phases those in PHASES; work outside of steps is left out. What a CUDA graph
    launches has no operator and no phase: its phase is "" and its part a guess by name; see
    `label_like`.
    """
    steps = _spans(events, STEP)
    # The Trainer's loop has no ranges of ours, but PyTorch names its own.
    phases = _spans(events, _PHASES_OF_THE_LOOP) or _spans(events, _PHASES_OF_PYTORCH)
    ops = [e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
    # Which operators a lookup calls in turn differs between versions of PyTorch.
    lookups = sorted((e["ts"], e["ts"] + e["dur"]) for e in ops if e["name"] == _LOOKUP)
    pieces = _gpu_work(events, ops) if _on_gpu(events) else _cpu_work(ops)
    rows = []
    for piece in pieces:
        step = _inside(steps, piece.launched_us)
        if step is None:
            continue
        phase_index = _inside(phases, piece.launched_us)
        if phase_index is not None:
            _, _, phase = phases[phase_index]
        else:
            phase = "" if "GraphLaunch" in piece.caller else "forward"
        in_lookup = _inside(lookups, piece.launched_us) is not None
        op = _LOOKUP if in_lookup else piece.caller
        part = part_of(piece.name, op, piece.sizes, phase, widths)
        rows.append((step, piece.begin_us / 1e3, piece.ms, piece.name, phase, part))
    table = pd.DataFrame(rows, columns=["step", "start_ms", "ms", "name", "phase", "part"])
    table["start_ms"] -= table.groupby("step")["start_ms"].transform("min")
    return table


def _spans(events: list[dict], labels: dict[str, str]) -> list[tuple[float, float, str]]:
    """Return (begin, end, label) of ranges and operators on the CPU, in order of time.

    `labels` has the begin of the names of those that are wanted, and the label for each. A range
    has a copy on the GPU's side of the trace, which is left out.
    """
    spans = []
    for e in events:
        if e.get("ph") != "X" or e.get("cat") not in ("user_annotation", "cpu_op"):
            continue
        for prefix, label in labels.items():
            if e["name"].startswith(prefix):
                spans.append((e["ts"], e["ts"] + e["dur"], label))
    return sorted(spans)


def _inside(spans: list[tuple], moment: float) -> int | None:
    """Return the index of the span that began last before a moment.

    Returns None where it has ended by then, and where none has begun.
    """
    index = bisect.bisect_right(spans, (moment, float("inf"))) - 1
    return index if index >= 0 and moment < spans[index][1] else None


def _on_gpu(events: list[dict]) -> bool:
    """Return whether a trace has work on a GPU."""
    return any(e.get("cat") == "kernel" for e in events)


def _gpu_work(events: list[dict], ops: list[dict]) -> Iterator[Work]:
    """Yield all work on the GPU, in order of time; `ops` are the operators among the events."""
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in BY_HOST and "args" in e}
    op_by_id = {e["args"]["External id"]: e for e in ops if "External id" in e.get("args", {})}
    on_gpu = [e for e in events if e.get("cat") in ON_GPU]
    for e in sorted(on_gpu, key=lambda e: e["ts"]):
        call = calls.get(e["args"].get("correlation"))
        if call is None:
            continue
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
    """Yield each operator without the time of those that it calls."""
    ops = sorted(ops, key=lambda e: (e["ts"], -e["dur"]))
    own_us = [e["dur"] for e in ops]
    # For each thread the operators that have begun and not ended, each called by the one before.
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
            ms=max(0.0, us) / 1e3,
            name=e["name"],
            caller=e["name"],
            sizes=_sizes(e),
            launched_us=e["ts"],
        )


def _sizes(op: dict) -> list[tuple[int, ...]]:
    """Return the shapes of an operator's inputs, without those that are no tensors."""
    shapes = op.get("args", {}).get("Input Dims", [])
    return [
        tuple(shape) for shape in shapes if shape and all(isinstance(size, int) for size in shape)
    ]


def label_like(replayed: pd.DataFrame, launched: pd.DataFrame) -> pd.DataFrame:
    """Return the `replayed` work of a CUDA graph with phases and parts.

    These are those of the same kernels `launched` one by one. The graph replays what was launched
    in the same order, so that equal runs of names belong together; a kernel without a counterpart
    takes the phase of the one before it.
    """
    known = launched[launched["step"] == launched["step"].max()]
    replayed = replayed.assign(phase=None)
    columns = [replayed.columns.get_loc(name) for name in ("phase", "part")]
    labelled = []
    for _, step in replayed.groupby("step"):
        names = list(step["name"])
        known_names = list(known["name"])
        matcher = difflib.SequenceMatcher(None, names, known_names, autojunk=False)
        for at, known_at, size in matcher.get_matching_blocks():
            step.iloc[at : at + size, columns] = known.iloc[known_at : known_at + size, columns]
        labelled.append(step.assign(phase=step["phase"].ffill().fillna("forward")))
    return pd.concat(labelled) if labelled else replayed


def summary(work: pd.DataFrame, events: list[dict], step_ms: float) -> dict:
    """Return means over the steps of a trace.

    They are busy_ms, busy_share of `step_ms` (which was timed without a profiler),
    launches_per_step (calls by the host, None on a CPU), kernels_per_step (None there, too), parts
    {phase: {part: ms}} and the heaviest kernels.
    """
    steps = max(1, work["step"].nunique())
    gpu = _on_gpu(events)
    parts = (work.groupby(["phase", "part"])["ms"].sum() / steps).to_dict()
    kernels = (
        work.groupby(["name", "phase", "part"])["ms"]
        .agg(["sum", "count"])
        .sort_values("sum", ascending=False)
    )
    spans = _spans(events, STEP)
    calls = [e for e in events if e.get("cat") in BY_HOST and e["name"].startswith(_LAUNCHES)]
    launches = sum(_inside(spans, e["ts"]) is not None for e in calls)
    busy = float(work["ms"].sum() / steps)
    parts_by_phase = {
        phase: {part: parts[phase, part] for part in PARTS if parts.get((phase, part))}
        for phase in PHASES
    }
    return {
        "step_ms": step_ms,
        "busy_ms": busy,
        "busy_share": min(1.0, busy / step_ms),
        "launches_per_step": launches / steps if gpu else None,
        "kernels_per_step": len(work) / steps if gpu else None,
        "parts": parts_by_phase,
        "kernels": [
            {
                "name": name[:160],
                "phase": phase,
                "part": part,
                "ms": total / steps,
                "count": count / steps,
            }
            for (name, phase, part), total, count in kernels.head(25).itertuples()
        ],
    }


def overlap(step: Callable[[], object], device) -> dict[str, float | None]:
    """Return the milliseconds of a step in which the GPU computes, or only communicates.

    They are `busy_ms` and `exposed_ms`, by the profiler; None on a CPU. `device` is a torch.device.
    The processes call this together, with a `step` that they make together.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    if device.type != "cuda":
        return {"busy_ms": None, "exposed_ms": None}
    # In the warm-up the processes wait for each other's profiler.
    steps = schedule(wait=0, warmup=1, active=OVERLAP_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=steps) as profiler:
        for _ in range(1 + OVERLAP_STEPS):
            step()
            torch.cuda.synchronize()
            profiler.step()
    busy, exposed = busy_and_exposed(read(export(profiler)))
    return {"busy_ms": busy / OVERLAP_STEPS, "exposed_ms": exposed / OVERLAP_STEPS}


def busy_and_exposed(events: list[dict]) -> tuple[float, float]:
    """Return the milliseconds of a trace in which the GPU computes or copies, and its exposed ones.

    Exposed are those in which only work runs that communicates.
    """
    on_gpu = [e for e in events if e.get("cat") in ON_GPU]
    busy_us = _covered([e for e in on_gpu if not e["name"].lower().startswith("nccl")])
    return busy_us / 1e3, (_covered(on_gpu) - busy_us) / 1e3


def _covered(events: list[dict]) -> float:
    """Return the microseconds in which at least one of some events ran."""
    covered = 0.0
    last_end = 0.0
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        covered += max(0.0, end - max(begin, last_end))
        last_end = max(last_end, end)
    return covered
