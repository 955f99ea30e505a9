"""Kernel time: for how long a GPU works in a training step, whatever the host does meanwhile.

A step that waits for the host takes longer than its kernels do, and longer still on a slower host.
The ratio of two kernel times says what a technique gives the GPU; that of two step times adds what
it saves the host. The time is read from a profiler's trace, over the last steps of a run.
"""

import torch
from torch.profiler import ProfilerActivity

from qa_lib.measure.meter import Hooks

PROFILED = 3  # steps that are read
STARTING = 1  # steps before these, which pay for the profiler's start


class KernelTime(Hooks):
    """Profiles the last steps of a training on a GPU, which has `steps` in all.

    The profiler slows the host, so that these steps are not timed. `kernel_ms` is None until they
    are done.
    """

    untimed_steps = STARTING + PROFILED

    def __init__(self, steps: int):
        self.begin = steps - self.untimed_steps
        self.steps = steps
        self.kernel_ms: float | None = None
        self.profiler = None

    def finished(self, steps: int) -> None:
        if steps < self.begin:
            return
        torch.cuda.synchronize()  # so that a step's kernels run before the next one begins
        if steps == self.begin:
            schedule = torch.profiler.schedule(wait=0, warmup=STARTING, active=PROFILED, repeat=1)
            self.profiler = torch.profiler.profile(
                activities=[ProfilerActivity.CUDA], schedule=schedule
            )
            self.profiler.start()
            return
        if self.profiler is None:  # it was resumed behind the begin
            return
        self.profiler.step()
        if steps == self.steps:
            self.profiler.stop()
            self.kernel_ms = self._read()

    def _read(self) -> float:
        """Return the milliseconds of a step in which kernels or copies ran."""
        from qa_lib.measure import trace  # which imports pandas, and other runs do without

        busy_ms, _ = trace.busy_and_exposed(trace.read(trace.export(self.profiler)))
        return busy_ms / PROFILED
