"""What a training leaves, whichever engine trained."""

from typing import NamedTuple

import torch

from qa_lib.measure.meter import Meter


class Trained(NamedTuple):
    """What `train` of loop.py, trainer.py and plain.py returns, beside the model in place."""

    optimizer: torch.optim.Optimizer
    meter: Meter
    resumed_from: int = 0
    """Steps that an earlier run had done, from whose checkpoint this one went on."""
    checkpoint_note: str | None = None
    """Why a checkpoint that was there was not taken."""
