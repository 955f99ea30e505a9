"""What communication costs a step of several GPUs (family P, `parallel`), by a profiler's trace.

A reduction that runs beside the backward pass costs nothing but the memory bandwidth that it takes.
What counts is exposed communication: the time in which a GPU communicates and does nothing else. A
GPU that waits for another one counts as communicating, since NCCL's kernels wait by spinning.
"""

from collections.abc import Callable

from qa_lib.measure.trace import ON_GPU, export, read

OVERLAP_STEPS = 3  # `overlap` profiles so many
# Parts of the names of kernels that communicate: NCCL's, and those of the exchange by pointers
# (kernels/peer_gradients.py, and the barrier of PyTorch's symmetric memory).
COMMUNICATES = ("nccl", "send_kernel", "spread_kernel", "barrier_kernel")


def overlap(step: Callable[[], object], device) -> dict[str, float | None]:
    """Make some steps under a profiler; return the `busy_ms` and `exposed_ms` of one on average.

    busy_and_exposed says what they are. Both are None on a CPU, where no step is made. `device` is
    a torch.device. All processes of a run call this at the same time, each with its part of the
    `step` that they make together.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    if device.type != "cuda":
        return {"busy_ms": None, "exposed_ms": None}
    # A profiler takes long to start: in the warm-up the processes wait for each other's.
    steps = schedule(wait=0, warmup=1, active=OVERLAP_STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=steps, acc_events=True) as profiler:
        for _ in range(1 + OVERLAP_STEPS):
            step()
            torch.cuda.synchronize()
            profiler.step()
    busy_ms, exposed_ms = busy_and_exposed(read(export(profiler)))
    return {"busy_ms": busy_ms / OVERLAP_STEPS, "exposed_ms": exposed_ms / OVERLAP_STEPS}


def busy_and_exposed(events: list[dict]) -> tuple[float, float]:
    """Return a trace's busy and its exposed milliseconds.

    The GPU is busy while it computes or copies. Communication is exposed while the GPU does nothing
    else.
    """
    on_gpu = [e for e in events if e.get("cat") in ON_GPU]
    busy_us = _covered([e for e in on_gpu if not communicates(e["name"])])
    return busy_us / 1e3, (_covered(on_gpu) - busy_us) / 1e3


def communicates(kernel: str) -> bool:
    """Return whether a kernel of that name exchanges something with other GPUs."""
    name = kernel.lower()
    return any(part in name for part in COMMUNICATES)


def _covered(events: list[dict]) -> float:
    """Return the microseconds in which at least one of the events ran.

    Two that ran at once, on two streams, are not counted twice.
    """
    covered = 0.0
    last_end = 0.0
    for begin, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        covered += max(0.0, end - max(begin, last_end))
        last_end = max(last_end, end)
    return covered
