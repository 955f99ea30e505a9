"""Which engine trains a run: the visible loop, or transformers.Trainer."""

import importlib

from qa_lib.train.compilation import forget_compiled

# Imported when it is used: that of the Trainer takes seconds, and only the A0 rows need it.
ENGINES = {"loop": "qa_lib.train.loop", "trainer": "qa_lib.train.trainer"}


def train(model, batches, spec, device, run_dir, say=print, watch=None) -> tuple:
    """What the `train` of the spec's engine returns (see loop.train), as the first of its process: nothing is compiled
    yet, nothing counted."""
    forget_compiled()
    return importlib.import_module(ENGINES[spec.settings.engine]).train(
        model, batches, spec, device, run_dir, say, watch
    )
