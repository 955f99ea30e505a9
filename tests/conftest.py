import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Features are cached in a folder of the test session's own."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("QA_LIB_CACHE", str(folder))
    return folder
