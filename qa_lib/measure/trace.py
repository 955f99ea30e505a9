"""What a profiler's trace says about a training step: every piece of work with its phase and its part of the model.

A trace is the JSON of torch.profiler, which Perfetto opens as well. On a GPU the work is its kernels and copies, on a
CPU the operators' own time. Reading one needs no torch.

It also says what communication costs a step (variants of family P). A reduction that runs beside the backward pass
costs nothing but the memory bandwidth it takes; what counts is the rest, the exposed part, in which a GPU runs nothing
else. A GPU that waits for another one counts as communicating, since NCCL's kernels wait by spinning.
"""

import bisect
import difflib
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

PHASES = ("forward", "backward", "optimizer")
STEP = {"ProfilerStep#": "step"}
# Ranges of train/loop.py; what several processes do between backward pass and update counts as the optimizer's.
_PHASES_OF_THE_LOOP = {name: name for name in PHASES} | {"reduce": "optimizer"}
_PHASES_OF_PYTORCH = {
    "Optimizer.step": "optimizer",
    "autograd::engine::evaluate_function": "backward",
}
PARTS = (
    "embeddings",
    "attention",
    "feed-forward",
    "norms and elementwise",
    "loss",
    "optimizer",
    "copies",
)
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
BY_HOST = {"cuda_runtime", "cuda_driver"}
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
_GEMM_OPS = ("mm", "linear", "matmul", "dot")  # in operators' names
_GEMM_KERNELS = ("gemm", "nvjet", "splitkreduce", "cublas", "cutlass")
_COPIES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::to",
    "aten::clone",
    "aten::contiguous",
    "aten::fill_",
    "aten::zero_",
}
OVERLAP_STEPS = (
    3  # that `overlap` profiles, after one in which the processes wait for each other's profiler
)


class Widths(NamedTuple):
    """By which a model's GEMMs are told apart: its hidden states, within its feed-forward blocks, and what
    its head gives for each token, two logits of an answer or as many as there are words."""

    hidden: int
    intermediate: int
    outputs: int


def export(profiler) -> bytes:
    """The trace of a torch.profiler as a file, gzipped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()


def read(packed: bytes) -> list[dict]:
    """The events of a trace file."""
    return json.loads(gzip.decompress(packed))["traceEvents"]


def part_of(kernel: str, op: str, sizes: list[tuple[int, ...]], phase: str, widths: Widths) -> str:
    """The part of the model that a piece of work belongs to, one of PARTS.

    `kernel` is its name, `op` the operator that launched it and `sizes` the shapes of that operator's inputs: matrix
    products are told apart by the model's `widths` alone, whichever kernel ran them. A layer norm that the compiler
    fused with the lookups before it counts as embeddings.
    """
    name, caller = kernel.lower(), op.lower()
    found = {size for shape in sizes for size in shape}
    if phase == "optimizer":
        return "optimizer"
    if name.startswith(("memcpy", "memset")):
        return "copies"
    if any(word in name + caller for word in ("nll_loss", "log_softmax", "cross_entropy")):
        return "loss"
    if any(word in name + caller for word in ("flash", "fmha", "attention", "softmax", "bmm")):
        return "attention"
    if "embedding" in name + caller:
        return "embeddings"
    # What the compiler fused bears the names of GEMMs it follows.
    gemm = any(word in name for word in _GEMM_KERNELS) or any(
        word in caller.split("::")[-1] for word in _GEMM_OPS
    )
    if gemm and not name.startswith("triton"):
        if widths.intermediate in found:
            return "feed-forward"
        return "loss" if {widths.hidden, widths.outputs} <= found else "attention"
    return "copies" if op in _COPIES else "norms and elementwise"


def work(events: list[dict], widths: Widths) -> pd.DataFrame:
    """A line for each piece of work in order of time: step, start_ms (within its step), ms, name, phase, part.

    Steps are the profiler's own ranges, phases those in PHASES; work outside of steps is left out. What a CUDA graph
    launches has no operator and no phase: its phase is "" and its part a guess by name; see `label_like`.
    """
    steps = _spans(events, STEP)
    # The Trainer's loop has no ranges of ours, but PyTorch names its own.
    phases = _spans(events, _PHASES_OF_THE_LOOP) or _spans(events, _PHASES_OF_PYTORCH)
    ops = [e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
    # Which operators a lookup calls in turn differs between versions of PyTorch.
    lookups = sorted((e["ts"], e["ts"] + e["dur"]) for e in ops if e["name"] == "aten::embedding")
    rows = []
    for begin, ms, name, caller, sizes, launched in (
        _kernels(events, ops) if _on_gpu(events) else _own_times(ops)
    ):
        step, at = _inside(steps, launched), _inside(phases, launched)
        if step is None:
            continue
        phase = "" if "GraphLaunch" in caller else "forward"
        if at is not None:
            phase = phases[at][2]
        op = caller if _inside(lookups, launched) is None else "aten::embedding"
        rows.append((step, begin / 1e3, ms, name, phase, part_of(name, op, sizes, phase, widths)))
    table = pd.DataFrame(rows, columns=["step", "start_ms", "ms", "name", "phase", "part"])
    table["start_ms"] -= table.groupby("step")["start_ms"].transform("min")
    return table


def _spans(events: list[dict], labels: dict[str, str]) -> list[tuple[float, float, str]]:
    """(begin, end, label) of the ranges and operators on the CPU whose names begin like a key of `labels`, in order of
    time. A range has a copy on the GPU's side of the trace, which is left out."""
    return sorted(
        (e["ts"], e["ts"] + e["dur"], label)
        for e in events
        if e.get("ph") == "X" and e.get("cat") in ("user_annotation", "cpu_op")
        for name, label in labels.items()
        if e["name"].startswith(name)
    )


def _inside(spans: list[tuple], moment: float) -> int | None:
    """The index of the latest begun span that holds a moment."""
    index = bisect.bisect_right(spans, (moment, float("inf"))) - 1
    return index if index >= 0 and moment < spans[index][1] else None


def _on_gpu(events: list[dict]) -> bool:
    return any(e.get("cat") == "kernel" for e in events)


def _kernels(events, ops):
    """Of all work on the GPU: begin in us, ms, name, the launching operator's name and input shapes (of a graph's the
    runtime call and none), and when it was launched."""
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in BY_HOST and "args" in e}
    by_id = {e["args"]["External id"]: e for e in ops if "External id" in e.get("args", {})}
    for e in sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: e["ts"]):
        call = calls.get(e["args"].get("correlation"))
        if call is None:
            continue
        op = by_id.get(e["args"].get("External id"), {})
        caller = call["name"] if "GraphLaunch" in call["name"] else op.get("name", "")
        yield e["ts"], e["dur"] / 1e3, e["name"], caller, _sizes(op), call["ts"]


def _own_times(ops):
    """As `_kernels` for a CPU: each operator without the time of those that it calls."""
    ops = sorted(ops, key=lambda e: (e["ts"], -e["dur"]))
    own = [e["dur"] for e in ops]
    stacks: dict[int, list[int]] = {}
    for index, e in enumerate(ops):
        stack = stacks.setdefault(e["tid"], [])
        while stack and ops[stack[-1]]["ts"] + ops[stack[-1]]["dur"] <= e["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= e["dur"]
        stack.append(index)
    for e, us in zip(ops, own, strict=True):
        yield e["ts"], max(0.0, us) / 1e3, e["name"], e["name"], _sizes(e), e["ts"]


def _sizes(op: dict) -> list[tuple[int, ...]]:
    shapes = op.get("args", {}).get("Input Dims", [])
    return [
        tuple(shape) for shape in shapes if shape and all(isinstance(size, int) for size in shape)
    ]


def label_like(replayed: pd.DataFrame, launched: pd.DataFrame) -> pd.DataFrame:
    """`replayed` work of a CUDA graph with the phases and parts of the same kernels `launched` one by one.

    The graph replays what was launched in the same order, so that equal runs of names belong together; a kernel
    without a counterpart takes the phase of the one before it.
    """
    known = launched[launched["step"] == launched["step"].max()]
    replayed = replayed.assign(phase=None)
    columns = [replayed.columns.get_loc(name) for name in ("phase", "part")]
    labelled = []
    for _, step in replayed.groupby("step"):
        matcher = difflib.SequenceMatcher(
            None, list(step["name"]), list(known["name"]), autojunk=False
        )
        for mine, theirs, size in matcher.get_matching_blocks():
            step.iloc[mine : mine + size, columns] = known.iloc[theirs : theirs + size, columns]
        labelled.append(step.assign(phase=step["phase"].ffill().fillna("forward")))
    return pd.concat(labelled) if labelled else replayed


def summary(work: pd.DataFrame, events: list[dict], step_ms: float) -> dict:
    """Means over the steps: busy_ms, busy_share of `step_ms` (which was timed without a profiler), launches_per_step
    (calls by the host, None on a CPU), kernels_per_step, parts {phase: {part: ms}} and the heaviest kernels."""
    steps, gpu = max(1, work["step"].nunique()), _on_gpu(events)
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
    return {
        "step_ms": step_ms,
        "busy_ms": busy,
        "busy_share": min(1.0, busy / step_ms),
        "launches_per_step": launches / steps if gpu else None,
        "kernels_per_step": len(work) / steps if gpu else None,
        "parts": {
            phase: {part: parts[phase, part] for part in PARTS if parts.get((phase, part))}
            for phase in PHASES
        },
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
    """Milliseconds of a step in which the GPU computes (`busy_ms`) and in which it only communicates (`exposed_ms`), by
    the profiler; None on a CPU, as `device` (torch.device) says. The processes call this together, with a `step` that
    they make together."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    if device.type != "cuda":
        return {"busy_ms": None, "exposed_ms": None}
    steps = schedule(wait=0, warmup=1, active=OVERLAP_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=steps) as profiler:
        for _ in range(1 + OVERLAP_STEPS):
            step()
            torch.cuda.synchronize()
            profiler.step()
    busy, exposed = busy_and_exposed(read(export(profiler)))
    return {"busy_ms": busy / OVERLAP_STEPS, "exposed_ms": exposed / OVERLAP_STEPS}


def busy_and_exposed(events: list[dict]) -> tuple[float, float]:
    """Milliseconds of a trace in which any kernel or copy ran that does not communicate, and in which only those did
    that do."""
    every = [e for e in events if e.get("cat") in ON_GPU]
    busy = _covered([e for e in every if not e["name"].lower().startswith("nccl")])
    return busy / 1e3, (_covered(every) - busy) / 1e3


def _covered(events: list[dict]) -> float:
    """Microseconds in which at least one of some events ran."""
    covered, last = 0.0, 0.0
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        covered += max(0.0, end - max(begin, last))
        last = max(last, end)
    return covered
