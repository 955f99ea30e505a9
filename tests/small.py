"""A lab small enough for tests of the driver: a scale of 40 steps, and a notebook that a test may spoil.

`python -m tests.small VERB ...` is `python -m qa_lib VERB ...` with both in place; the notebook is $SMALL_NOTEBOOK.
"""

import dataclasses
import os
import sys
from pathlib import Path

import nbformat

from qa_lib import sweep, variants
from qa_lib.__main__ import main

variants.SCALES["test"] = dataclasses.replace(
    variants.SCALES["smoke"], name="test", data="synthetic:80", steps=40, measure_from=5, checkpoint_every=10
)

PARAMETERS = 'variant = "A1"\nscale = "test"\nseed = 0\ndata = ""\nmodel = ""\nmicro_batch = 0\nruns = "runs"'
FIT = """
import tests.small
from qa_lib.fit import fit
from qa_lib.plan import plan

(spec,) = plan([variant], scale, [seed], data, model, micro_batch)
fit(spec, runs=runs)
"""


def write_notebook(path: Path, before: str = "", tag: str = "parameters", parameters: str = PARAMETERS) -> Path:
    """A notebook with a parameters cell, a cell that runs `before`, and one that fits."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (parameters, before, FIT)]
    notebook.cells[0].metadata["tags"] = [tag]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    sweep.notebook_of = lambda variant: Path(os.environ["SMALL_NOTEBOOK"])
    if "SMALL_TIME_LIMIT" in os.environ:
        limited = dataclasses.replace(variants.SCALES["test"], time_limit_s=int(os.environ["SMALL_TIME_LIMIT"]))
        variants.SCALES["test"] = limited
    sys.exit(main(sys.argv[1:]))
