"""The decoder beside the plain double loop, its guards, and its files."""

import json
import os

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qa_lib.data.load import load_data
from qa_lib.data.squad import DataError, Example, open_source
from qa_lib.data.windows import build_samples
from qa_lib.errors import UserError
from qa_lib.run.plan import plan
from qa_lib.score.decode import decode
from qa_lib.score.evaluate import evaluate
from qa_lib.spec import Machine
from tests.material import SQUAD, best_of, needs_squad, trained_tokenizer
from tests.plain import plain_answers
from tests.test_windows import EDGES, TEXT, Given

EXAMPLES = [Example(f"q{i}", "Rivers", "where is it", (TEXT * 2)[i : 9 * i + 3]) for i in range(40)]
EXAMPLES += [Example(f"e{i}", "Rivers", "x", text) for i, text in enumerate(EDGES)]


@pytest.fixture(scope="module")
def samples():
    built = build_samples(Given(EXAMPLES), trained_tokenizer([TEXT] * 3, 300), 24, 6, cache=False)
    assert len(built) > len(EXAMPLES) + 20
    return built


def logits(samples, seed=0, width=0, kind=torch.float32, scale=3.0):
    """Random start and end logits [n, longest window + width]."""
    draw = torch.Generator().manual_seed(seed)
    shape = (2, len(samples), int(samples.lengths.max()) + width)
    return (torch.randn(shape, generator=draw) * scale).to(kind)


def assert_same_as_the_loop(samples, examples, start, end, **options):
    found = decode(samples, examples, torch.arange(len(samples)), start, end, **options)
    plain = plain_answers(samples, examples, start.float().numpy(), end.float().numpy(), **options)
    assert found.predictions == plain[0]
    assert found.null_odds == plain[1]
    assert list(found.nbest) == list(plain[2])
    for key, wanted in plain[2].items():
        got = [entry | {"probability": pytest.approx(entry["probability"], abs=1e-6)} for entry in found.nbest[key]]
        assert wanted == got, key
    return found


# Half precision and whole numbers give equal logits, and equal sums of unequal ones, by the dozen: ties go to what the
# loop finds first.
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.int8, "zeros"]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(KINDS), st.integers(1, 50), st.integers(1, 50), st.floats(-4, 4))
@example(0, torch.float32, 20, 30, 0.0)
@example(1, "zeros", 4, 30, 0.0)
def test_same_as_the_double_loop(samples, seed, kind, n_best, longest, threshold):
    if kind == "zeros":
        start = end = torch.zeros_like(logits(samples)[0])
        start[::2] = -0.0
    else:
        start, end = logits(samples, seed, kind=kind, scale=2.0)
        start, end = (start.float(), end.float()) if kind == torch.int8 else (start, end)
    options = {"n_best": n_best, "max_answer_length": longest, "null_threshold": threshold}
    found = assert_same_as_the_loop(samples, EXAMPLES, start, end, **options)
    if kind == torch.float32 and threshold == 0:
        assert 0 < sum(text == "" for text in found.predictions.values()) < len(EXAMPLES)


@needs_squad
def test_same_as_the_double_loop_on_real_paragraphs():
    examples = open_source(SQUAD, "validation").examples[:1500]
    tokenizer = trained_tokenizer({example.context for example in examples}, 3000)
    samples = build_samples(Given(examples), tokenizer, 200, 64, cache=False)
    assert_same_as_the_loop(samples, examples, *logits(samples))


def peaked(samples, seed=0):
    """Logits as of a model: low everywhere, high around the first gold answer or at [CLS]."""
    start, end = logits(samples, seed, scale=0.5) - 6
    rows = torch.arange(len(samples))
    start[rows, torch.tensor(samples.start_positions).long()] += 10
    end[rows, torch.tensor(samples.end_positions).long()] += 10
    return start, end


def test_a_model_that_answers_too_rarely_has_a_better_threshold_above_zero(monkeypatch, tmp_path):
    (spec,) = plan(["A1"], "smoke", data="synthetic:200", machine=Machine())
    questions = load_data(spec)
    samples = questions.validation_samples
    start, end = peaked(samples)
    start[:, 0] += 30
    rows = torch.arange(len(samples)), start, end
    monkeypatch.setattr("qa_lib.score.evaluate.predict_logits", lambda *_, **__: rows)
    found = evaluate(torch.nn.Identity(), questions, spec, torch.device("cpu"), tmp_path)
    assert found["f1"] == found["always_null_f1"] < found["best_f1"] and found["best_f1_threshold"] > 0


def test_padding_is_never_looked_at_rows_are_joined_by_id_and_the_callers_logits_left_alone(samples):
    start, end = logits(samples)
    before, threads = (start.clone(), end.clone()), torch.get_num_threads()
    wanted = decode(samples, EXAMPLES, torch.arange(len(samples)), start, end)
    assert torch.equal(before[0], start) and torch.equal(before[1], end) and torch.get_num_threads() == threads
    for seed, junk in enumerate((float("nan"), float("inf"), 1e9, -100.0)):
        wide = logits(samples, width=9)
        wide[:] = junk
        for row, length in enumerate(samples.lengths):
            wide[0, row, :length], wide[1, row, :length] = start[row, :length], end[row, :length]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
        found = decode(samples, EXAMPLES, order, *wide[:, order])
        assert (found.predictions, found.null_odds) == (wanted.predictions, wanted.null_odds)
        assert found.nbest == wanted.nbest


@pytest.mark.parametrize("spoil", ["missing", "double", "unknown", "negative", "shape"])
def test_ids_that_are_not_each_window_once_are_refused(samples, spoil):
    start, end = logits(samples)
    ids = torch.arange(len(samples))
    if spoil == "missing":
        ids, start, end = ids[1:], start[1:], end[1:]
    elif spoil == "shape":
        ids = ids[:, None]
    else:
        ids[3] = {"double": 4, "unknown": len(samples), "negative": -1}[spoil]
    with pytest.raises(ValueError):
        decode(samples, EXAMPLES, ids, start, end)
    with pytest.raises(ValueError, match="logits of shape"):
        decode(samples, EXAMPLES, torch.arange(len(samples)), *logits(samples)[:, :, :-1])


def test_other_examples_than_the_features_are_refused(samples):
    rows = torch.arange(len(samples)), *logits(samples)
    for wrong in (EXAMPLES[::-1], EXAMPLES[1:], [*EXAMPLES[:-1], Example("other", "", "x", EDGES[-1])]):
        with pytest.raises(ValueError, match="these examples are not the ones"):
            decode(samples, wrong, *rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_inside_a_window_names_the_question(samples, value):
    start, end = logits(samples)
    row = len(samples) // 2
    end[row, samples.lengths[row] - 1] = value
    key = EXAMPLES[samples.example[row]].id
    said = f"^article 'Rivers', question '{key}': NaN or infinite logits in window {row} "
    with pytest.raises(DataError, match=said):
        decode(samples, EXAMPLES, torch.arange(len(samples)), start, end)


def test_minus_infinity_is_a_logit_like_any_other(samples):
    start, end = logits(samples)
    start[:, 1::2] = -torch.inf
    start[::3] = -torch.inf
    found = decode(samples, EXAMPLES, torch.arange(len(samples)), start, end)
    assert np.isfinite(list(found.null_odds.values())).all()
    json.dumps(found.nbest, allow_nan=False)


def test_files(samples, tmp_path):
    found = decode(samples, EXAMPLES, torch.arange(len(samples)), *logits(samples))
    paths = found.write(tmp_path / "new" / "out")
    names = "predictions texts nbest_predictions null_odds".split()
    assert [path.stem for path in paths] == names and {path.suffix for path in paths} == {".json"}
    assert sorted(os.listdir(tmp_path / "new" / "out")) == sorted(path.name for path in paths)
    read = [json.loads(path.read_text()) for path in paths]
    assert read == [found.predictions, found.texts, found.nbest, found.null_odds]
    assert list(read[2]["q9"][0]) == ["text", "probability", "start_logit", "end_logit"]
    for entries in read[2].values():
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1)
    before = [path.read_bytes() for path in paths]
    found.write(tmp_path / "new" / "out")
    assert [path.read_bytes() for path in paths] == before


def test_where_nothing_can_be_written_is_named(samples, tmp_path):
    found = decode(samples, EXAMPLES, torch.arange(len(samples)), *logits(samples))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file"):
        found.write(tmp_path / "file")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_same_on_the_gpu(samples):
    for kind in (torch.float32, torch.bfloat16):
        start, end = logits(samples, kind=kind)
        here = decode(samples, EXAMPLES, torch.arange(len(samples)), start, end)
        there = decode(samples, EXAMPLES, torch.arange(len(samples)).cuda(), start.cuda(), end.cuda())
        assert (here.predictions, here.null_odds, here.nbest) == (there.predictions, there.null_odds, there.nbest)


@pytest.mark.slow
def test_as_many_windows_as_squads_validation_set_has_take_a_second():
    words = TEXT.split()
    contexts = [" ".join(words[(i + k) % len(words)] for k in range(100)) for i in range(len(words))]
    examples = [Example(str(i), "", "where is it", contexts[i % len(contexts)]) for i in range(3000)]
    samples = build_samples(Given(examples), trained_tokenizer([TEXT] * 3, 300), cache=False)
    start, end = logits(samples)
    ours, _ = best_of(7, lambda: decode(samples, examples, torch.arange(len(samples)), start, end))
    assert ours * 12_000 / len(samples) < 1.5
