import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: threads of several workers wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Features are cached in a folder of the test session's own."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("QA_LIB_CACHE", str(folder))
    return folder
