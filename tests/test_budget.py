"""The predicted budget against peaks that were measured, and the search that starts from it."""

import pytest
from transformers import BertConfig

from qa_lib.__main__ import main
from qa_lib.budget import gpu_of, predict
from qa_lib.data import UserError
from qa_lib.fitbatch import CLOSE, STEP, largest
from qa_lib.plan import plan
from qa_lib.variants import Machine

# Peak allocated MiB of BERT-base at 384 tokens, effective batch 32; one NVIDIA H200, torch 2.11, November 2026.
MEASURED = {
    8: {"A1": 4320, "A2": 3166, "A3": 2996, "C1": 2510, "C2": 2199, "C2-8": 2683, "B1": 1570, "B1-all": 2182,
        "B2": 1414, "D1": 3033},
    32: {"A1": 11008, "A2": 6372, "A3": 5755, "C1": 5266, "C2": 2308, "C2-8": 5888, "B1": 4214, "B1-all": 6617,
         "B2": 3587, "B3": 1389, "D1": 5753},
}  # fmt: skip
# With the tokens of their packed rows, which the data's lengths decided.
PACKED = {
    (8, 1472): {"E1": 2477, "E-best": 2249, "EC1": 1967, "EC2": 1688, "EB1-lean": 711},
    (32, 5632): {"E1": 3466, "E5": 3302, "E-best": 3301, "EC1": 2987, "EC2": 1454, "EB1": 1776, "EB3": 778},
}


@pytest.fixture(scope="module")
def bert_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert-base")
    BertConfig().save_pretrained(folder)
    return str(folder)


def spec_of(variant, bert_base, micro_batch):
    (spec,) = plan([variant], "bench", [0], "synthetic:100", bert_base, micro_batch, gpu_of(90))
    return spec


@pytest.mark.parametrize(("size", "variant"), [(size, name) for size, rows in MEASURED.items() for name in rows])
def test_within_a_tenth_of_the_measured_peak(size, variant, bert_base):
    found = predict(spec_of(variant, bert_base, size))
    assert found["peak_mib"] == pytest.approx(MEASURED[size][variant], rel=0.10)


@pytest.mark.parametrize(("size", "variant"), [(key, name) for key, rows in PACKED.items() for name in rows])
def test_packed_rows_too(size, variant, bert_base, monkeypatch):
    monkeypatch.setattr("qa_lib.budget._tokens", lambda _: size[1])
    found = predict(spec_of(variant, bert_base, size[0]))
    assert found["peak_mib"] == pytest.approx(PACKED[size][variant], rel=0.10)


def test_optimizer_state_is_that_of_the_shapes(bert_base):
    state = {name: predict(spec_of(name, bert_base, 8))["optimizer_mib"] for name in ("A1", "C1", "B1")}
    assert state["A1"] == pytest.approx(831, abs=1) and state["C1"] == pytest.approx(347, abs=3) and state["B1"] < 3


def test_the_verb_prints_rows_and_skips_and_refuses_a_cpu(bert_base, capsys):
    words = [
        "memory",
        "A1",
        "E-best",
        "--scale",
        "bench",
        "--data",
        "synthetic:100",
        "--model",
        bert_base,
        "--sm",
        "75",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "A1" in printed and "forward and backward" in printed and "8.0 or newer" in printed
    (spec,) = plan(["A1"], "bench", [0], "synthetic:100", bert_base, machine=Machine())
    with pytest.raises(UserError, match="planned for a CPU"):
        predict(spec)


@pytest.mark.parametrize("limit", [0, 7, 8, 20, 100, 333, 1000, 4096, 9000])
@pytest.mark.parametrize("first", [1, 96, 100_000])
def test_the_search_finds_the_largest_that_fits_in_few_tries(limit, first):
    tries = []

    def fits(size):
        tries.append(size)
        return size <= limit

    found = largest(first, fits)
    best = min(limit // STEP * STEP, 4096)
    assert found <= best and best - found <= max(STEP, CLOSE * found)
    assert len(tries) == len(set(tries)) and len(tries) <= 20
    assert found == 0 or found in tries
