"""The driver under faults, each with real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qa_lib import record
from tests.small import PARAMETERS, write_notebook

ROOT = Path(__file__).parent.parent


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


class Lab:
    def __init__(self, folder):
        self.runs, self.notebook = folder / "runs", folder / "notebook.ipynb"
        write_notebook(self.notebook)

    def start(self, *words, verb="sweep", **environment):
        command = [sys.executable, "-m", "tests.small", verb, *words, "--scale", "test", "--runs", str(self.runs)]
        environment = os.environ | {"SMALL_NOTEBOOK": str(self.notebook)} | environment
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *words, **more):
        process = self.start(*words, **more)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err

    def records(self):
        folders = [path.parent for path in self.runs.glob("*/*/record.json")]
        return {entry["spec"]["variant"]: entry for entry in map(record.read_record, folders)}

    def statuses(self):
        return {name: entry["status"] for name, entry in self.records().items()}

    def wait_for(self, condition, timeout=90):
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.05)

    def running(self, variant):
        """Wait until that row's kernel has begun to train; its process id."""

        def trains():
            return [p for p in self.runs.glob(f"*/{variant}-s0-*/steps.jsonl") if p.stat().st_size]

        self.wait_for(trains)
        return self.kernel()

    def kernel(self):
        """The process that holds a run's lock."""
        for path in self.runs.glob("*/*/.lock"):
            for fd in Path("/proc").glob("[0-9]*/fd/*"):
                try:
                    if os.path.samefile(fd, path):
                        return int(fd.parts[2])
                except OSError:
                    continue
        raise AssertionError("no kernel holds a lock")


SLOW = (
    "import time, qa_lib.batches as b; real = b.Batches.step; "
    "b.Batches.step = lambda self, n: (time.sleep({}), real(self, n))[1]"
)


def test_a_killed_kernel_is_a_row_and_only_it_runs_again(lab):
    write_notebook(lab.notebook, before=SLOW.format(0.15))
    process = lab.start("--variants", "A1,A2")
    os.kill(lab.running("A1"), signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert lab.statuses() == {"A1": "killed", "A2": "ok"}
    assert "killed" in err
    assert "ended" in lab.records()["A1"]["error"]["message"]
    kept = lab.records()["A2"]
    write_notebook(lab.notebook)
    code, out, _ = lab.run("--variants", "A1,A2")
    assert code == 0
    assert lab.statuses() == {"A1": "ok", "A2": "ok"}
    assert lab.records()["A2"] == kept
    assert out.count("seed 0: ok") == 1
    assert lab.records()["A1"]["time"]["steps"] == 40


def test_a_notebook_without_its_parameters_tag_is_refused_by_name(lab):
    write_notebook(lab.notebook, tag="other")
    code, _, err = lab.run("--variants", "A2")
    assert code == 2
    assert re.search(r"notebook\.ipynb: 0 cells are tagged 'parameters'", err)
    assert "Traceback" not in err
    assert not lab.records()
    write_notebook(lab.notebook, parameters=PARAMETERS.replace("seed = 0\n", ""))
    code, _, err = lab.run("--variants", "A2")
    assert code == 2
    assert "notebook.ipynb: its parameters cell does not set seed" in err


def test_a_notebook_that_runs_another_row_is_not_believed(lab):
    write_notebook(lab.notebook, before='variant = "A1"')
    code, _, _ = lab.run("--variants", "A2")
    assert code == 1
    assert lab.statuses()["A2"] == "killed"


def test_two_sweeps_share_the_work(lab):
    sweeps = [lab.start("--variants", "A1,A2,D1-nvfuser") for _ in range(2)]
    outputs = [process.communicate(timeout=240) for process in sweeps]
    assert [process.returncode for process in sweeps] == [0, 0], outputs
    assert lab.statuses() == {"A1": "ok", "A2": "ok", "D1-nvfuser": "skipped"}
    logs = "".join(path.read_text() for path in lab.runs.glob("*/*/steps.jsonl"))
    steps = [json.loads(line)["step"] for line in logs.splitlines()]
    assert sorted(steps) == sorted([*range(1, 41)] * 2)


def test_ctrl_c_keeps_what_is_finished(lab):
    write_notebook(
        lab.notebook, before="if variant == 'A2': " + SLOW.format(0.5).replace("; ", "\nif variant == 'A2': ")
    )
    process = lab.start("--variants", "A1,A2")
    kernel = lab.running("A2")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finished runs are kept" in err
    assert "Traceback" not in err
    assert lab.statuses() == {"A1": "ok", "A2": "killed"}
    assert not Path(f"/proc/{kernel}").exists()
    first = lab.records()["A1"]
    write_notebook(lab.notebook)
    assert lab.run("--variants", "A1,A2")[0] == 0
    assert lab.statuses() == {"A1": "ok", "A2": "ok"}
    assert lab.records()["A1"] == first


def test_a_run_over_its_time_limit_is_killed_with_the_limit_named(lab):
    write_notebook(lab.notebook, before="import time; time.sleep(300)")
    begin = time.monotonic()
    code, _, _ = lab.run("--variants", "A1", SMALL_TIME_LIMIT="4")
    assert code == 1
    assert time.monotonic() - begin < 60
    assert lab.records()["A1"]["error"]["message"] == "over its time limit of 4 s"


def test_out_of_memory_is_a_result(lab):
    """The kernel itself limits its address space, so that a real allocation fails in the middle of training."""
    limit = (
        "import resource, tests.small, qa_lib.fit, qa_lib.train as t\n"
        "import torch\n"
        "real = t.learning_rate\n"
        "def late(spec, step, steps):\n"
        "    if step == 3:\n"
        "        torch.zeros(2**50)\n"
        "    return real(spec, step, steps)\n"
        "t.learning_rate = late"
    )
    write_notebook(lab.notebook, before=limit)
    code, _, _ = lab.run("--variants", "A1")
    entry = lab.records()["A1"]
    assert (code, entry["status"]) == (0, "oom")
    assert "allocate" in entry["error"]["message"]
    write_notebook(lab.notebook)
    assert lab.run("--variants", "A1")[0] == 0
    assert lab.statuses() == {"A1": "oom"}  # a result, not run again ...
    assert lab.run("--variants", "A1", "--retry", "oom")[0] == 0
    assert lab.statuses() == {"A1": "ok"}  # ... unless asked


def test_an_error_in_a_run_is_recorded_with_its_step_and_resumes_nothing_broken(lab):
    nan = (
        "import qa_lib.train as t, tests.small\n"
        "real = t.learning_rate\n"
        "t.learning_rate = lambda spec, step, steps: float('nan') if step == 12 else real(spec, step, steps)"
    )
    write_notebook(lab.notebook, before=nan)
    code, _, _ = lab.run("--variants", "A1")
    entry = lab.records()["A1"]
    assert (code, entry["status"], entry["error"]["kind"]) == (1, "error", "NonFiniteLoss")
    assert "at step 14" in entry["error"]["message"]
    assert "NonFiniteLoss" in (lab.runs / entry["group"] / entry["run_id"] / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--variants", "A9"), "unknown variant 'A9'; did you mean 'A"),
        (("--family", "Z"), "unknown family 'Z'"),
        (("--data", "/nowhere/squad.json"), "squad.json"),
        (("--model", "./nowhere"), "does not exist"),
    ],
)
def test_a_wrong_word_is_one_clear_line(lab, words, message):
    code, _, err = lab.run(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_an_unknown_scale_suggests_the_nearest():
    command = [sys.executable, "-m", "qa_lib", "sweep", "--scale", "smok"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown scale 'smok'; did you mean 'smoke'?" in done.stderr


def test_plan_says_what_would_run_and_runs_nothing(lab):
    code, out, _ = lab.run("--plan", "--variants", "A1,D1-nvfuser", "--seeds", "0", "1")
    assert code == 0
    assert out.splitlines()[0].split()[1] == "run"
    assert out.count("skip: this PyTorch has no torch.compile backend named 'nvfuser'") == 2
    assert len(out.splitlines()) == 4
    assert not lab.runs.exists()


def test_overhead_of_a_run_beyond_imports_is_small(lab):
    """Kernel start, papermill and record together: what the notebook took beyond the run and the imports."""
    assert lab.run("--variants", "A1")[0] == 0
    done = lab.records()["A1"]["time"]
    begin = time.monotonic()
    imports = "import papermill.cli; import qa_lib.fit"
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)
    assert done["notebook_s"] - done["wall_s"] - (time.monotonic() - begin) < 3.0
