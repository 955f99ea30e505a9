"""Kernel time: for how long a GPU works in a training step, whatever the host does meanwhile.

A step that waits for the host takes longer than its kernels do, and longer still on a slower host.
The ratio of two kernel times says what a technique gives the GPU; that of two step times adds what
it saves the host. The time is read from a profiler's trace, over the last steps of a run.
"""

import torch
from torch.profiler import ProfilerActivity

from qa_lib.measure.meter import Hooks


class KernelTime(Hooks):
    """Profiles the last steps of a training on a GPU, which has `steps` in all.

    The profiler slows the host, so that these `untimed_steps` are not timed. `kernel_ms` is their
    mean, in milliseconds a step, and None until they are done.
    """

    def __init__(self, steps: int, untimed_steps: int):
        self.untimed_steps = untimed_steps
        self.begin = steps - untimed_steps
        self.end = steps
        self.kernel_ms: float | None = None
        self.profiler = None  # until `begin`, or for good where a run is resumed after it

    def finished(self, steps: int) -> None:
        if steps == self.begin:
            torch.cuda.synchronize()  # so that what the steps before it launched is not seen
            self.profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
        elif steps == self.end and self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.kernel_ms = self._read()

    def _read(self) -> float:
        """Return the milliseconds of a step in which kernels or copies ran."""
        # These import pandas, which other runs do without.
        from qa_lib.measure import trace
        from qa_lib.measure.communication import busy_and_exposed

        busy_ms, _ = busy_and_exposed(trace.read(trace.export(self.profiler)))
        return busy_ms / self.untimed_steps
