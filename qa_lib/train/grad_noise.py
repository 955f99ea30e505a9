"""What a process sees of its steps beside their times: the norms of gradients, how long it waited, what it computed.

All of it is kept without waiting for the device, and read when the run has been timed.
"""

import collections
from collections.abc import Callable

import torch

from qa_lib.measure import goodput
from qa_lib.measure.meter import elapsed
from qa_lib.record import Noise

KEPT = 100  # steps that a pipeline's bubble is measured over, the last
# What a step of REFERENCE samples leaves of the running means of gradient norms before it; one of twice as many leaves
# its square. So the means reach back over as many samples whatever the batch, and noise scales of different batches
# tell of the same part of a training. AdaptDL, the code of Pollux, scales its smoothing by the batch in this way.
SMOOTHING = 0.999


class StepStats:
    """What one process of a run has measured of its steps; `ranks` is the ProcessGroup that owns it.

    `norms` are note_norms' running means, and `waits` the stopwatches of a pipeline: for each step its laps of
    computing, and the passes as a whole. `overlap` is what measure/comm.py has found, empty where nothing was asked.
    """

    def __init__(self, ranks):
        self.ranks, self.overlap = ranks, {}
        self.norms = torch.zeros(2, device=ranks.device)
        self.waits = collections.deque(maxlen=KEPT)

    def note_norms(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """Keep for the gradient noise scale the square norms of the gradient of this process's part of a step and of
        the whole step's (scalars): running means over the last REFERENCE / (1 - SMOOTHING) samples."""
        if self.ranks.parts > 1:
            self.norms.lerp_(torch.stack([own, mean]), 1 - self.kept(1))

    def kept(self, steps: int) -> float:
        """What so many steps leave of the running means before them."""
        return SMOOTHING ** (steps * self.ranks.batch / goodput.REFERENCE)

    def noise(self, steps: int) -> Noise:
        """What the norms of so many steps say (measure/goodput.py), empty where none were noted. All processes call
        this together; it waits for the device."""
        ranks = self.ranks
        norms = ranks.mean(self.norms.clone()) * ranks.stages  # the square norms of a pipeline's stages add up
        if not norms.any() or not norms.isfinite().all():
            return Noise()
        own, mean = (norms / (1 - self.kept(steps))).tolist()  # the running means began at 0
        found = goodput.noise(own, mean, ranks.parts, ranks.batch // ranks.parts)
        found.steps = steps
        return found

    def pipelined(self) -> tuple[float, float] | None:
        """The seconds of a step in which this stage of a pipeline computes, and those from the begin of its passes to
        their end: means over the last KEPT steps. Waits for the device."""
        steps = [(sum(map(elapsed, laps)), elapsed(passes)) for laps, passes in self.waits]
        return tuple(torch.tensor(steps).mean(0).tolist()) if steps else None

    def note_overlap(self, step: Callable[[], object]) -> None:
        """Measure what communication costs a step, by some more of them, which all processes make together."""
        from qa_lib.measure.comm import overlap  # which imports pandas, and no other run needs it

        waits, norms = self.waits.copy(), self.norms.clone()
        self.overlap = overlap(step, self.ranks.device)
        self.waits = waits
        self.norms.copy_(norms)  # in place: a CUDA graph writes there
