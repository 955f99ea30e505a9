"""Which engine trains a run: the visible loop, or transformers.Trainer."""

from qa_lib.train import loop, trainer
from qa_lib.train.compilation import forget_compiled

ENGINES = {"loop": loop.train, "trainer": trainer.train}


def train(model, batches, spec, device, run_dir, say=print, watch=None) -> tuple:
    """What the `train` of the spec's engine returns (see loop.train), as the first of its process: nothing is compiled
    yet, nothing counted."""
    forget_compiled()
    return ENGINES[spec.settings.engine](model, batches, spec, device, run_dir, say, watch)
