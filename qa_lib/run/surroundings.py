"""What a run is told of the process that it is in, by whoever started that. Needs no torch."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Surroundings:
    """What whoever started this process tells a run; as it stands, that there is nobody.

    A program that starts runs hands in a subclass of its own (lab/launch/driver.py).
    """

    # Whether other runs train on the same GPU at the same time. Then no times are recorded, and
    # memory that runs out is an error: the others may have filled it.
    shares_gpu: bool = False
    # Whether the process was started anew for its first run, so that its age at that run's first
    # step is how long one waits for it.
    began_for_run: bool = True
    # A sentence for the record on how the process began.
    start_note: str | None = None

    def shares(self, device: "torch.device") -> bool:
        """Return whether other runs train on this device at the same time."""
        return self.shares_gpu and device.type == "cuda"

    def signals(self) -> AbstractContextManager:
        """Return a context in which signals that ask the process to end raise Stopped."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """Begin to watch whoever started this process: once that is gone, a signal comes."""


ALONE = Surroundings()
