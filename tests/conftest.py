import fcntl
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if (
    shutil.which("nvidia-smi") is None
):  # read when Triton is imported, which libraries do on their own
    os.environ.setdefault("TRITON_INTERPRET", "1")
# What is ignored here, all that tests start would ignore: SIGHUP under nohup, Ctrl-C in the background of a shell and
# in workers of pytest-xdist.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # threads of several workers would wait for each other


def slow(*values, **more):
    """A case of a parametrized test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Features are cached in a folder of the test session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QA_LIB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that they only wait for a second one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def typed(capsys):
    """Types a command line in this process, which ends with that exit code: what it prints, or its error."""
    from qa_lib.__main__ import main

    def call(words: str, *more, code: int = 0) -> str:
        assert main([*words.split(), *map(str, more)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return call


class Swept:
    """A runs folder and how to call the command line on it, offline."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        # One thread: as quick for so small a model, and on a busy machine many times quicker than two that wait.
        fixed = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "QA_LIB_CACHE": str(folder / "cache"),
            "SWEPT": "1",
        }
        self.environment = os.environ | fixed

    def sweep(self, rows) -> str:
        """What a sweep of these variants says; it must succeed."""
        command = [
            sys.executable,
            "-m",
            "qa_lib",
            "sweep",
            "--preset",
            "smoke",
            "--variants",
            ",".join(rows),
        ]
        command += ["--runs", self.runs]
        root = Path(__file__).parent.parent
        done = subprocess.run(
            command, cwd=root, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def folder_of(self, variant) -> Path:
        (found,) = self.runs.glob(f"*/{variant}-s0-*")
        return found


@pytest.fixture(scope="session")
def swept(tmp_path_factory):
    """A1 at preset smoke, trained through its notebook: once, by whichever worker asks first."""
    top = tmp_path_factory.getbasetemp()
    folder = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / "swept"
    folder.mkdir(exist_ok=True)
    lab = Swept(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lab.runs.exists():
            assert lab.sweep(["A1"]).count(": ok, ") == 1
    return lab


# The files that take longest begin, so that workers end together; front_door waits for the run that app makes.
LONGEST = "asking sweep gate together serving front_door dashboard parallel kills train report signals packing architectures lm".split()


def place(item) -> int:
    name = item.path.stem.removeprefix("test_")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(tryfirst=True)  # before what is slow is left out
def pytest_collection_modifyitems(items):
    items.sort(key=place)
    for item in items:
        for package in ("triton", "torchao"):
            if item.get_closest_marker(package) and find_spec(package) is None:
                item.add_marker(
                    pytest.mark.skip(reason=f"{package} is not installed; see `make extras`")
                )
