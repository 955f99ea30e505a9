"""Fixtures that several test files share, and the environment of all tests."""

import fcntl
import gc
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
HAS_GPU = shutil.which("nvidia-smi") is not None
if not HAS_GPU:
    # Set before Triton is imported, which reads it; libraries import Triton on their own.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Else each new record asks git four times, which takes longer than most tests; test_code_version.py
# and the run of `swept` ask it.
os.environ["QA_LIB_COMMIT"] = "a1" * 20
# Images of containers set it, and each of the many processes of the tests would compile all that it
# imports anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# All that tests start would ignore the signals that are ignored here: SIGHUP under nohup, and
# Ctrl-C in the background of a shell and in workers of pytest-xdist.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads of several workers would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# jsonschema, which nbformat imports, does without it. It makes 38 grammars, which takes a second.
sys.modules["rfc3987_syntax"] = None


def pytest_configure(config):
    """Fork the workers of pytest-xdist, and what they fork, from one server that has imported."""
    if sys.version_info >= (3, 14):  # whose servers ask for a key
        return
    from tests import warm

    if "PYTEST_XDIST_WORKER" in os.environ:
        warm.share(os.environ["WARM_SERVER"])
    elif config.getoption("numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["WARM_SERVER"] = warm.address()
        if not HAS_GPU:  # no process forked from one that has touched a GPU can use it
            config.option.tx = [f"popen//python={warm.worker_command()}" for _ in config.option.tx]


def slow(*values, **more):
    """Return a case of a parametrized test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Let features be cached in a folder of the test session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QA_LIB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(scope="module")
def one_thread():
    """Let PyTorch take one thread, for models so small that they only wait for a second one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def typed(capsys):
    """Return a function that runs a command line in this process.

    It checks the exit code, and returns what was printed to stdout, or to stderr after a failure.
    """
    from qa_lib.__main__ import main

    def call(words: str, *more, code: int = 0) -> str:
        assert main([*words.split(), *map(str, more)]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return call


class Swept:
    """A runs folder, and sweeps on it by the command line, offline."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs = folder / "runs"
        # One thread is as quick for so small a model, and on a busy machine many times quicker than
        # two that wait for each other.
        fixed = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "QA_LIB_CACHE": str(folder / "cache"),
            "SWEPT": "1",
        }
        self.environment = os.environ | fixed
        del self.environment["QA_LIB_COMMIT"]

    def sweep(self, rows) -> str:
        """Run a sweep of these variants at preset smoke, which must succeed; return its output."""
        words = ["sweep", "--preset", "smoke", "--variants", ",".join(rows), "--runs", self.runs]
        done = subprocess.run(
            [sys.executable, "-m", "qa_lib", *words],
            cwd=Path(__file__).parent.parent,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def folder_of(self, variant) -> Path:
        """Return the folder of that variant's only run."""
        (folder,) = self.runs.glob(f"*/{variant}-s0-*")
        return folder


@pytest.fixture(scope="session")
def swept(tmp_path_factory):
    """A1 at preset smoke, trained through its notebook: once, by whichever worker asks first."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers
    folder = shared / "swept"
    folder.mkdir(exist_ok=True)
    lab = Swept(folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lab.runs.exists():
            assert lab.sweep(["A1"]).count(": ok, ") == 1
    return lab


# The files that take longest come first, so that workers end together. Those of the app come before
# front_door, which waits for their run.
LONGEST = [
    "test_asking",
    "test_fp8",
    "test_sweep",
    "test_parallel",
    "test_together",
    "test_serving",
    "test_train",
    "test_fit",
    "test_queue",
    "test_packages",
    "test_speed_up",
    "test_recommend",
    "test_front_door",
    "test_dashboard",
    "test_lm",
    "test_trainer",
    "test_readme",
    "test_architectures",
    "test_gate",
    "test_kills",
    "test_settings",
    "test_readme_results",
    "test_quickest_size",
    "test_own_code",
    "test_slurm",
    "test_report",
    "test_signals",
    "test_packing",
]


def place(item) -> int:
    """Return the place of a test's file among all files."""
    name = item.path.stem
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def pytest_collection_finish():
    """Let the garbage collector pass over what was imported and collected.

    These are about a million objects, which live as long as the process. Each run begins with a
    collection, which would take half a second to look at them.
    """
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items):
    """Sort the tests, and skip those whose optional package is not installed."""
    items.sort(key=place)
    for item in items:
        for package in ("triton", "torchao"):
            if item.get_closest_marker(package) and find_spec(package) is None:
                reason = f"{package} is not installed; see `make extras`"
                item.add_marker(pytest.mark.skip(reason=reason))
