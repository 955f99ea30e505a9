"""Whoever uses the techniques in their own code: the page, the notebook, docstrings, the bench."""

import inspect
import json
import math
import re
import statistics
import textwrap
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import qa_lib
from qa_lib.own import bench
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
    losses = [float(line.split()[1]) for line in said[-3:]]
    assert losses[2] < losses[0]
    AutoModelForSequenceClassification.from_pretrained("my-classifier")


@pytest.mark.usefixtures("beside_a_model")
def test_the_pages_trainer_runs():
    _, trainer, _ = examples_of_the_page()
    exec(trainer, {})
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
    drawn = bench.drawn_samples
    # Of 64 batches eight.
    monkeypatch.setattr(
        bench, "drawn_samples", lambda task, count, words: drawn(task, count // 8, words)
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


# The bench.

BRIEF = "--task labels --batch 4 --samples 16 --steps 1 --warm-up 1 --rounds 2 --ways".split()


def test_the_bench_times_every_way_in_turns_and_says_which(capsys):
    assert bench.main([*BRIEF, "all", "loop"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "round 1 of 2: all",
        "round 1 of 2: loop",
        "round 2 of 2: all",
        "round 2 of 2: loop",
    ]
    lines = out.splitlines()
    measured = [json.loads(line) for line in lines[:4]]
    assert [(line["round"], line["way"]) for line in measured] == [
        (0, "all"),
        (0, "loop"),
        (1, "all"),
        (1, "loop"),
    ]
    assert all(line["samples_per_s"] > 0 for line in measured)
    assert lines[-2].startswith("| all | ")


@pytest.mark.parametrize("way", ["trainer", "trainer-tuned", "fast-trainer"])
def test_the_bench_times_trainers(way):
    assert bench.measure(way, 0, bench.parsed([*BRIEF, way])) > 0


@pytest.mark.parametrize(
    ("way", "is_sped_up", "takes_packed", "dtype", "is_packed"),
    [
        ("loop", False, False, torch.float32, False),
        ("speed_up", True, False, torch.float32, False),
        ("packing", False, True, torch.float32, True),
        ("masters", True, False, torch.bfloat16, True),
        ("all", True, False, torch.bfloat16, True),
    ],
)
def test_a_way_of_the_bench_has_these_techniques(
    way, is_sped_up, takes_packed, dtype, is_packed, monkeypatch
):
    seen = Mock()
    for name in ("speed_up", "take_packed", "time_loop", "loader_of", "plain_step", "master_step"):
        monkeypatch.setattr(bench, name, getattr(seen, name))
    bench.train_by(way, bench.parsed([*BRIEF, way]), bench.Measured(1, 4))
    make = seen.master_step if dtype == torch.bfloat16 else seen.plain_step
    model = make.call_args.args[0]
    assert model.dtype == dtype
    assert (seen.speed_up.called, seen.take_packed.called) == (is_sped_up, takes_packed)
    assert seen.loader_of.call_args.args[1:] == (4, is_packed)
    assert seen.time_loop.call_args.args[0] is make.return_value


def test_a_stopped_bench_prints_what_was_measured(capsys, monkeypatch):
    """The second way is stopped in the second of its three steps that are timed."""
    real_step = bench.plain_step
    models = []

    def stopping_step(model):
        models.append(model)
        step = real_step(model)
        calls = []

        def call(batch):
            calls.append(batch)
            if len(models) == 2 and len(calls) == 3:
                raise KeyboardInterrupt
            return step(batch)

        return call

    monkeypatch.setattr(bench, "plain_step", stopping_step)
    assert bench.main([*BRIEF, "loop", "speed_up", "--steps", "3"]) == 130
    out, err = capsys.readouterr()
    whole, part, *table = out.splitlines()
    assert json.loads(whole)["steps"] == 3
    assert json.loads(part)["steps"] == 1
    assert json.loads(part)["stopped"] is True
    assert [line for line in table if line.startswith("| loop | ")]
    assert not [line for line in table if line.startswith("| speed_up | ")]
    assert err.endswith("stopped: the medians are of the measurements that ended\n")


def test_a_way_that_fails_leaves_the_others_their_turns(capsys, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "master_step", fail)
    assert bench.main([*BRIEF, "masters", "loop"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["way"] for line in out.splitlines()[:2]] == ["loop", "loop"]
    assert err.count("OutOfMemoryError: CUDA out of memory") == 1
    assert "masters failed, and is left out from here on" in err


def test_the_benchs_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        bench.parsed(["--help"])
    help_text = capsys.readouterr().out
    examples = re.findall(r"^  python -m qa_lib.own.bench (.*)$", help_text, re.M)
    assert all(bench.parsed(words.split()) for words in examples)
    assert examples


def test_the_bench_takes_all_ways_at_pairs_of_sentences_where_nothing_else_is_said():
    assert vars(bench.parsed([])) == {
        "task": "pairs",
        "size": "tiny",
        "ways": bench.WAYS,
        "batch": 32,
        "samples": 4096,
        "steps": 100,
        "warm_up": 20,
        "rounds": 3,
    }


def test_no_step_of_a_warm_up_that_was_stopped_has_been_timed():
    measured = bench.Measured(warm_up=3, batch=4)
    measured.step()
    assert measured.timed_steps == 0


def test_a_loops_result_has_the_mean_of_its_first_and_of_its_last_ten_losses():
    measured = bench.Measured(warm_up=0, batch=4)
    for loss in range(25):
        measured.step(torch.tensor(loss))
    result = measured.result()
    assert (result["first_loss"], result["last_loss"]) == (4.5, 19.5)
    assert result["steps"] == 25


def test_the_benchs_plain_batches_are_whole_and_in_another_order_in_each_epoch():
    samples = [{"input_ids": [number], "labels": 0} for number in range(10)]
    torch.manual_seed(0)
    batches = list(bench.repeated(bench.loader_of(samples, 4, is_packed=False), 4))
    ids = [batch["input_ids"] for batch in batches]
    epochs = torch.cat(ids[:2]), torch.cat(ids[2:])
    assert [len(rows) for rows in ids] == [4, 4, 4, 4]
    assert not torch.equal(*epochs)
    assert len(set(epochs[0].flatten().tolist())) == 8


@pytest.mark.parametrize(
    ("task", "median", "spread", "longest"),
    [("pairs", 36, 0.45, 128), ("paragraphs", 160, 0.35, 384), ("labels", 22, 0.6, 128)],
)
def test_the_benchs_samples_are_as_long_as_those_of_the_data_sets(task, median, spread, longest):
    lengths = [len(sample["input_ids"]) for sample in bench.drawn_samples(task, 4000, 100)]
    assert statistics.median(lengths) == pytest.approx(median, abs=3)
    assert longest / 1.2 < max(lengths) <= longest
    # The spread is that of the lengths' logarithms: 68 % lie within it of the median.
    within = [abs(math.log(length / median)) < spread for length in lengths]
    assert statistics.mean(within) == pytest.approx(0.68, abs=0.03)


def test_the_tuned_trainers_warm_up_visits_every_padded_length(monkeypatch):
    real_padded = bench.padded
    seen = []

    def seeing(samples, multiple=1):
        batch = real_padded(samples, multiple)
        seen.append(batch["input_ids"].shape)
        return batch

    monkeypatch.setattr(bench, "padded", seeing)
    words = "--task paragraphs --batch 4 --samples 64 --steps 20 --warm-up 1 --ways trainer-tuned"
    arguments = bench.parsed(words.split())
    measured = bench.Measured(arguments.warm_up, arguments.batch)
    bench.train_by("trainer-tuned", arguments, measured)
    lengths = [length for count, length in seen if count == 4]
    visited = measured.warm_up - arguments.warm_up
    assert lengths[:visited] == sorted(set(lengths), reverse=True)
    assert visited > 3


def test_a_length_that_no_batch_can_have_is_not_visited():
    """The two shortest samples are never in a batch of three without a longer one."""
    samples = [{"input_ids": [5] * length} for length in (130, 10, 100, 20, 140)]
    assert bench.batches_of_each_length(samples, 3) == [2, 0, 4, 1, 3, 2]


@pytest.mark.parametrize("task", bench.TASKS)
def test_the_benchs_samples_have_labels_that_can_be_learnt(task):
    samples = bench.drawn_samples(task, 20, 100)
    for sample in samples:
        first = sample["labels"][0] if task == "labels" else sample["labels"]
        assert first == sample["input_ids"][0] % 2
    assert torch.equal(
        bench.padded(samples)["input_ids"][0][:3], torch.tensor(samples[0]["input_ids"][:3])
    )
