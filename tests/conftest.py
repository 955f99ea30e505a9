import os
import shutil
import signal
from importlib.util import find_spec

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if shutil.which("nvidia-smi") is None:  # read when Triton is imported, which libraries do on their own
    os.environ.setdefault("TRITON_INTERPRET", "1")
# What is ignored here, all that tests start would ignore: SIGHUP under nohup, Ctrl-C in the background of a shell and
# in workers of pytest-xdist.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of several workers would wait for each other


def slow(*values, **more):
    """A case of a parametrized test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Features are cached in a folder of the test session's own."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("QA_LIB_CACHE", str(folder))
    return folder


def pytest_collection_modifyitems(items):
    for item in items:
        for package in ("triton", "torchao"):
            if item.get_closest_marker(package) and find_spec(package) is None:
                item.add_marker(pytest.mark.skip(reason=f"{package} is not installed; see `make extras`"))
