"""What notebooks say to their reader: misspelt parameters, a row for the card, the result of a run."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from qa_lib.report import notebook
from qa_lib.variants import UnknownName

ROOT = Path(__file__).parent.parent


def test_a_misspelt_parameter_stops_the_run():
    cells = ["", "import os", 'variant = "A1"\nseed = 0', '# Parameters\nvarient = "A3"\n', "check_parameters(In)"]
    with pytest.raises(UnknownName, match="unknown parameter 'varient'; did you mean 'variant'"):
        notebook.check_parameters(cells)
    notebook.check_parameters([*cells[:3], '# Parameters\nvariant = "A3"\n', "check_parameters(In)"])
    notebook.check_parameters([*cells[:3], "check_parameters(In)"])


def test_a_card_is_named_with_a_row_and_a_time():
    def said(gpu, gib, sm):
        return notebook.advice({"gpu": gpu, "gpu_mem_mib": gib * 1024, "sm": sm}, ROOT / "runs")

    t4 = said("Tesla T4", 14.6, 75)
    assert 'Tesla T4, 14.6 GiB. Take `variant = "E-t4-norm"` and `micro_batch = 32`' in t4 and "an estimate" in t4
    assert "projected from its measured speed" in said("NVIDIA H200", 140, 90)
    assert 'variant = "E-moments"' in said("NVIDIA RTX A2000", 12, 86) and "not known" in said(
        "NVIDIA RTX A2000", 12, 86
    )
    assert "not known: no row is known to fit" in said("Tesla T4", 1, 75)
    assert "No GPU here" in notebook.advice({"gpu": None})


def test_without_reference_runs_there_is_no_advice(tmp_path):
    assert "is not known: group" in notebook.advice({"gpu": "Tesla T4", "gpu_mem_mib": 15000, "sm": 75}, tmp_path)


@dataclass
class Example:
    id: str
    question: str
    answers: tuple = ()


def test_a_result_shows_what_was_measured_and_five_answers(tmp_path):
    record = {
        "run_id": "A1-s0-x", "group": "cpu-smoke", "status": "ok",
        "task": {"name": "qa", "label": "F1", "metric": "f1"},
        "quality": {"f1": 98.5}, "speed": {"samples_per_s": 120.0}, "memory": {"peak_alloc_mib": None},
        "time": {"step_ms": {"median": None}, "wall_s": 9.0},
    }  # fmt: skip
    examples = [Example("a", "who ?", (("alice", 3),)), *(Example(str(n), f"q{n}") for n in range(9))]
    assert notebook.result(record, tmp_path, examples) == "**98.50** F1 · **120** features/s · **9.00** s in all"
    folder = tmp_path / "cpu-smoke" / "A1-s0-x" / "answers"
    folder.mkdir(parents=True)
    answers = {example.id: "" for example in examples} | {"a": "bob"}
    (folder / "predictions.json").write_text(json.dumps(answers))
    text = notebook.result(record, tmp_path, examples)
    assert "| who ? | bob | alice |" in text and text.count("| (no answer) | (no answer) |") == 4
    oom = record | {"status": "oom", "error": {"message": "out of memory"}}
    assert notebook.result(oom, tmp_path, examples) == "*A1-s0-x is oom: out of memory.*"
