"""What communication costs a step: the time in which a GPU runs nothing else (variants of family P).

A reduction that runs beside the backward pass costs nothing but the memory bandwidth it takes; what counts is the rest,
the exposed part. A GPU that waits for another one counts as communicating, since NCCL's kernels wait by spinning.
"""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from qa_lib.measure import trace

STEPS = 3  # that are profiled, after one in which the processes wait for each other's profiler


def overlap(step: Callable[[], object], device: torch.device) -> dict[str, float | None]:
    """Milliseconds of a step in which the GPU computes (`busy_ms`) and in which it only communicates (`exposed_ms`), by
    the profiler; None on a CPU. The processes call this together, with a `step` that they make together."""
    if device.type != "cuda":
        return {"busy_ms": None, "exposed_ms": None}
    steps = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=steps) as profiler:
        for _ in range(1 + STEPS):
            step()
            torch.cuda.synchronize()
            profiler.step()
    busy, exposed = busy_and_exposed(trace.read(trace.export(profiler)))
    return {"busy_ms": busy / STEPS, "exposed_ms": exposed / STEPS}


def busy_and_exposed(events: list[dict]) -> tuple[float, float]:
    """Milliseconds of a trace in which any kernel or copy ran that does not communicate, and in which only those did
    that do."""
    every = [e for e in events if e.get("cat") in trace.ON_GPU]
    busy = _covered([e for e in every if not e["name"].lower().startswith("nccl")])
    return busy / 1e3, (_covered(every) - busy) / 1e3


def _covered(events: list[dict]) -> float:
    """Microseconds in which at least one of some events ran."""
    covered, last = 0.0, 0.0
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        covered += max(0.0, end - max(begin, last))
        last = max(last, end)
    return covered
