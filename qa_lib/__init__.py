"""Fine-tuning for question answering, fast and lean: one change at a time, each measured.

`plan` makes specs of runs, `load_data` reads what one trains on, `fit` trains and scores it, `ask`
puts a question to what it has kept (docs/own-model.md), and `app` opens a page of the runs.

The techniques by themselves, for one's own training of any encoder and any head
(docs/own-code.md): `speed_up`, `pack` with `PackedCollator`, `MasterAdamW`, `GraphedStep`, and all
of them in `FastTrainer`.
"""

import importlib
import logging

import qa_lib.loaded  # noqa: F401 (before all other modules, whose digests it takes)

# Whichever library imports them, on some machines they warn of kernels that nothing here uses.
for package in ("bitsandbytes", "torchao"):
    logging.getLogger(package).setLevel(logging.ERROR)

# The public names, and the module of each. Those of lab add to the library what starts and chooses.
_HOMES = {
    "plan": "lab.search.plan",
    "fit": "lab.launch.anywhere",
    "ask": "score.predict",
    "load_data": "data.load",
    "app": "lab.app.page",
    "speed_up": "own.speed_up",
    "pack": "own.packing",
    "PackedCollator": "own.packing",
    "MasterAdamW": "train.master_adamw",
    "GraphedStep": "own.graphed_step",
    "FastTrainer": "own.trainer",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Return a name of __all__, imported when it is asked for: PyTorch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOMES)}"
        )
    # Not earlier: the setup cell of a notebook imports this package to mend such an environment.
    from qa_lib.versions import check_versions

    check_versions()
    return getattr(importlib.import_module(f"qa_lib.{_HOMES[name]}"), name)
