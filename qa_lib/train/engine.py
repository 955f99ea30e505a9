"""Which engine trains a run: the visible loop, or transformers.Trainer."""

from pathlib import Path

import torch

from qa_lib.spec import Spec
from qa_lib.train.loop import train
from qa_lib.train.trainer import train_with_trainer


def train_afresh(model, batches, spec: Spec, device: torch.device, run_dir: Path, say=print, watch=None) -> tuple:
    """train() of the spec's engine, as the first of its process: nothing is compiled yet, nothing counted."""
    # Dynamo counts what it compiled for all models of a process, and soon leaves the rest uncompiled.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = train_with_trainer if spec.settings.engine == "trainer" else train
    return run(model, batches, spec, device, run_dir, say, watch)
