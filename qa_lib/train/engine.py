"""Which engine trains a run: the visible loop, or transformers.Trainer."""

import importlib

from qa_lib.train.compilation import forget_compiled
from qa_lib.train.ranks import Ranks

# Imported when it is used: that of the Trainer takes seconds, and only the A0 rows need it.
ENGINES = {"loop": "qa_lib.train.loop", "trainer": "qa_lib.train.trainer"}


def train(model, batches, spec, device, run_dir, say=print, watch=None, ranks=None) -> tuple:
    """Forget what an earlier run of this process has compiled, then train with the spec's engine; see loop.train."""
    forget_compiled()
    engine = importlib.import_module(ENGINES[spec.settings.engine])
    if ranks:
        return engine.train(model, batches, spec, device, run_dir, say, watch, ranks)
    with Ranks(device) as ranks:
        return engine.train(model, batches, spec, device, run_dir, say, watch, ranks)
