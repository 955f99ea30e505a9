import os
import shutil
import signal

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if shutil.which("nvidia-smi") is None:  # read when Triton is imported, which libraries do on their own
    os.environ.setdefault("TRITON_INTERPRET", "1")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup all that tests start would ignore it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of several workers would wait for each other
    # pytest-xdist lets its workers ignore Ctrl-C, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Features are cached in a folder of the test session's own."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("QA_LIB_CACHE", str(folder))
    return folder
