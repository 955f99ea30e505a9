"""A small lab for tests of the driver: a preset of 40 steps, runs without a model, a notebook.

`python -m tests.small VERB ...` is `python -m qa_lib VERB ...`, but for environment variables:

- $SMALL_NOTEBOOK stands for every family's notebook;
- $SMALL_MACHINE is what the driver's probe finds;
- $SMALL_SERVER is where a server listens that has imported all before, and from which runs are
  forked;
- with $SMALL_PLAIN the notebook's cells are run by a plain Python, as
  `python -m tests.small cells PARAMETERS`, and not by papermill and a kernel.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from qa_lib.__main__ import STOPPED, main
from qa_lib.lab.launch.process import spec_from
from qa_lib.lab.search.plan import plan
from qa_lib.records import record
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import PRESETS
from qa_lib.spec.spec import Spec
from tests import warm

STEPS = 40
PRESETS["test"] = dataclasses.replace(
    PRESETS["smoke"],
    name="test",
    threads=None,
    data="synthetic:80",
    steps=STEPS,
    measure_from=5,
    checkpoint_every=10,
)

# The cells of a notebook: its parameters, what makes the spec, and two ways to do the work.
PARAMETERS = """variant = "A1"
preset = "test"
seed = 0
data = ""
model = ""
micro_batch = 0
runs = "runs\""""
SPEC = """from tests import small
spec, pause, say = small.spec(variant, preset, seed, data, model, micro_batch), 0, print
"""
PRETEND = "small.pretend(spec, runs, pause)"
FIT = """from qa_lib import fit
fit(spec, runs=runs, say=say)"""


def probed() -> tuple[Machine, dict]:
    """What the driver's probe found, without asking again: it would import torch."""
    return Machine(**json.loads(os.environ["SMALL_MACHINE"])), {}


def spec(variant, preset, seed, data, model, micro_batch) -> Spec:
    """The spec that the driver made of the same words."""
    (found,) = plan([variant], preset, [seed], data, model, micro_batch, probed()[0])
    return found


def plain_command(spec: Spec, runs: Path) -> list[str]:
    """Do what sweep.notebook_command does, without papermill."""
    from qa_lib.lab.sweep import notebook_parameters

    parameters = json.dumps(notebook_parameters(spec, runs))
    return [sys.executable, "-m", "tests.small", "cells", parameters]


def run_cells(parameters: str) -> None:
    """Run the cells of the notebook, with these parameters after its own."""
    cells = json.loads(Path(os.environ["SMALL_NOTEBOOK"]).read_text())["cells"]
    own_parameters, *others = ("".join(cell["source"]) for cell in cells)
    namespace = {}
    exec(own_parameters, namespace)
    namespace |= json.loads(parameters)
    for source in others:
        exec(source, namespace)


def pretend(spec: Spec, runs: str, pause: float = 0.0, status: str = "ok") -> None:
    """Do what fit does to a run's folder, without a model.

    It is for faults that do not depend on training. Each step takes `pause` seconds. steps.jsonl is
    only ever added to, so that a run that was done twice shows.
    """
    run_dir = Path(runs, spec.run_path)
    begin = time.perf_counter()
    with record.lock(run_dir):
        entry = record.new_record(spec, {})
        entry["spec"] |= {"planned_steps": STEPS, "n_train": 80, "n_eval": 80}
        record.write_record(run_dir, entry)
        for step in range(1, STEPS + 1):
            with (run_dir / "steps.jsonl").open("a") as stream:
                stream.write(json.dumps({"step": step}) + "\n")
            time.sleep(float(pause))
        entry["time"] |= {"steps": STEPS, "wall_s": time.perf_counter() - begin}
        entry["quality"]["n"] = 80
        record.finish(run_dir, entry, status)
    print("the last word")


def pretend_command(spec: Spec, runs: Path, pause: float = 0.0) -> list[str]:
    """The command of a process that does so."""
    written = json.dumps(dataclasses.asdict(spec))
    return [sys.executable, "-m", "tests.small", "pretend", written, str(runs), str(pause)]


def holders(runs: Path) -> set[int]:
    """The ids of the processes that have the lock of a run below that folder."""
    locks = [path.stat() for path in runs.glob("*/*/.lock")]
    processes = set()
    for open_file in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            opened = open_file.stat()
            if any(os.path.samestat(opened, lock) for lock in locks):
                processes.add(int(open_file.parts[2]))
    return processes


def write_notebook(path: Path, before: str = "", work: str = PRETEND) -> None:
    """Write a notebook of three cells: parameters, the spec and then `before`, and `work`."""
    import nbformat  # slow, and of no use in a kernel

    notebook = nbformat.v4.new_notebook()
    sources = (PARAMETERS, SPEC + before, work)
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(notebook, path)


def environment(notebook: Path, machine: Machine, plain: bool) -> dict[str, str]:
    """The environment variables of a driver in this lab."""
    variables = {
        "SMALL_NOTEBOOK": str(notebook),
        "SMALL_SERVER": warm.address(),
        "SMALL_MACHINE": json.dumps(dataclasses.asdict(machine)),
        "OMP_NUM_THREADS": "1",  # two threads wait for each other on a busy machine
    }
    if plain:
        variables["SMALL_PLAIN"] = "1"
    return variables


def stand_in(put=setattr) -> None:
    """Put this lab in the place of the repository's notebooks and of the driver's probe."""
    from qa_lib.lab import sweep
    from qa_lib.lab.search import max_batch, tune

    put(sweep, "notebook_of", lambda variant: Path(os.environ["SMALL_NOTEBOOK"]))
    for verb in (sweep, tune, max_batch):
        put(verb, "probe", probed)
    if "SMALL_PLAIN" in os.environ:
        put(sweep, "notebook_command", plain_command)


if __name__ == "__main__":
    if sys.argv[1] == "cells":
        sys.exit(run_cells(sys.argv[2]))
    if sys.argv[1] == "pretend":
        sys.exit(pretend(spec_from(sys.argv[2]), *sys.argv[3:]))
    stand_in()
    if sys.version_info < (3, 14):  # whose servers ask for a key
        warm.share(os.environ["SMALL_SERVER"])
    code = main(sys.argv[1:])
    if code == STOPPED:
        # As `python -m qa_lib` ends: Python's own way out fails where the terminal is gone.
        os._exit(code)
    sys.exit(code)
