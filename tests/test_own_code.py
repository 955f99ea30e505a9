"""Whoever uses the techniques in their own code: the page, the notebook, docstrings."""

import inspect
import re
import textwrap

import pytest
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import qa_lib
from qa_lib.own import bench_ways
from qa_lib.own.packing import PackedCollator, pack
from tests.material import ROOT
from tests.own import drawn_samples, quiet, tiny_model
from tests.test_notebooks import names, run_here
from tests.tiny import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
PAGE = (ROOT / "docs" / "own-code.md").read_text(encoding="utf-8")
OWN = ("speed_up", "pack", "PackedCollator", "MasterAdamW", "GraphedStep", "FastTrainer")


@pytest.fixture
def beside_a_model(tmp_path, monkeypatch):
    """A current folder that has a model in `my-bert`."""
    checkpoint("bert", tmp_path / "my-bert")
    monkeypatch.chdir(tmp_path)


def examples_of_the_page() -> list[str]:
    """Your own loop, the Trainer, and similarity, with a tiny model that lies beside them."""
    page = PAGE.replace("bert-base-uncased", "my-bert")
    page = page.replace("lr=2e-5", "lr=1e-3")  # its weights are random
    return re.findall(r"```python\n(.*?)```", page, re.S)


@pytest.mark.usefixtures("beside_a_model")
def test_the_pages_loop_runs_and_learns(capsys):
    loop, _, _ = examples_of_the_page()
    exec(loop, {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("BertForSequenceClassification: fused QKV")
    *losses, accuracy = [float(line.split()[1]) for line in said[-4:]]
    assert losses[2] < losses[0]
    assert accuracy > 0.9
    AutoModelForSequenceClassification.from_pretrained("my-classifier")


@pytest.mark.usefixtures("beside_a_model")
def test_the_pages_trainer_runs(capsys):
    _, trainer, _ = examples_of_the_page()
    exec(trainer, {})
    assert float(capsys.readouterr().out.splitlines()[-1]) < 1  # the loss of an evaluation
    AutoModelForTokenClassification.from_pretrained("my-labels/last")


@pytest.mark.usefixtures("beside_a_model")
def test_the_pages_similarity_runs():
    _, _, similarity = examples_of_the_page()
    shown = {}
    exec(similarity, shown)
    assert shown["similarities"].shape == (2, 2)
    assert all(p.grad.isfinite().all() for p in shown["model"].encoder.parameters())


def test_the_page_names_every_piece():
    for name in OWN:
        assert f"`{name}" in PAGE


def example_of(name: str) -> str:
    """The lines of a docstring from its first import on."""
    text = inspect.getdoc(getattr(qa_lib, name))
    return textwrap.dedent(re.search(r"\n\n((?:    .*\n?|\n)+)$", text)[1])


@pytest.mark.usefixtures("beside_a_model")
@pytest.mark.parametrize("name", OWN)
def test_a_docstrings_example_runs(name):
    samples = drawn_samples("sequences", 8)
    model = tiny_model()
    if name != "FastTrainer":
        qa_lib.speed_up(model, say=quiet)
    rows = pack(samples, samples=4, say=quiet)
    loader = [PackedCollator()(rows[number]) for number in range(2)]
    exec(example_of(name), {"model": model, "tokenized": samples, "loader": loader})


def test_the_notebook_adds_one_technique_after_the_other(monkeypatch):
    monkeypatch.chdir(ROOT)
    drawn = bench_ways.drawn_samples
    # Of 64 batches eight.
    monkeypatch.setattr(
        bench_ways, "drawn_samples", lambda task, count, config: drawn(task, count // 8, config)
    )
    run_here("notebooks/own_loop.ipynb", batch=8, steps=2, warm_up=1)
    results = names()["results"]
    ways = ["plain loop", "speed_up", "and packed", "and masters", "and a graph"]
    assert list(results) == ways
    assert results["plain loop"]["padding"] > results["and packed"]["padding"]
    assert all(0.5 < result["last_loss"] < 0.9 for result in results.values())
    losses = names()["losses"]
    assert losses["FastTrainer"] == pytest.approx(losses["Trainer"], abs=0.05)
    assert list(names()["table"].columns)[:3] == ["padding", "loss at first", "loss at the end"]
