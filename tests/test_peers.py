"""The rivals at a tiny size, and the search for the quickest of them.

Each option trains as the plain fp32 step does, and packing leaves hardly any padding.
"""

import itertools
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from qa_lib.peers import gpt2, packing, processes, search, search_trainer
from qa_lib.peers.adamw import CompiledAdamW, _round_stochastically
from qa_lib.peers.bert import Bert
from qa_lib.peers.processes import Measurements
from qa_lib.peers.search_options import merged
from qa_lib.peers.step import compile_parts

BERT = {
    "hidden_size": 32,
    "layer_norm_eps": 1e-12,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "type_vocab_size": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
LM = {"vocab_size": 97, "n_embd": 32, "n_positions": 16, "n_layer": 2, "n_head": 2}
EAGER = {"compiled": False}  # of CompiledAdamW, as compiling takes long
OWN = {"precision": "bf16", "optimizer": "own", "optimizer_options": EAGER}
PLAIN = {"precision": "fp32", "compile": "none", "graph": False}
LENGTHS = np.random.default_rng(0).integers(20, 60, 400)


@pytest.fixture(autouse=True)
def on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(peer: str, *changes: dict, parts: int = 1, steps: int = 4) -> list[float]:
    """Return the losses of the first steps of PLAIN with these changes, without dropout."""
    setting = merged(PLAIN, *changes)
    shape = BERT if peer == "bert" else LM
    data = search.Data(peer, shape, 4, parts, setting, LENGTHS)
    batches = data.steps(steps)
    step = search.build(peer, shape, setting, data, batches[0], dropout=0.0, rate=1e-3)
    return [step(batch).item() for batch in batches]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": {"blend_types": True}}, id="types blended"),
        pytest.param({"model": {"gelu": "tanh"}}, id="tanh GELU"),
        pytest.param({"model": {"attention": "cudnn"}}, id="cuDNN attention"),
        pytest.param({"model": {"drawn_at_once": True}}, id="dropout drawn at once"),
        pytest.param({"precision": "autocast"}, id="autocast"),
        pytest.param({"precision": "bf16"}, id="weights in bf16"),
        pytest.param(OWN, id="stochastic rounding"),
        pytest.param(OWN | {"optimizer_options": EAGER | {"hashed": True}}, id="hashed rounding"),
        pytest.param(OWN | {"optimizer_options": EAGER | {"masters": True}}, id="masters"),
    ],
)
def test_an_option_of_bert_trains_as_plain_fp32_does(changes):
    wanted = losses("bert")
    assert wanted[-1] < wanted[0]
    assert losses("bert", changes) == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": {"align": 64}}, id="aligned vocabulary"),
        pytest.param({"model": {"align": 64, "loss": "chunked"}}, id="loss in chunks"),
        pytest.param({"model": {"drawn_at_once": True}}, id="dropout drawn at once"),
        pytest.param(OWN, id="stochastic rounding"),
    ],
)
def test_an_option_of_gpt2_trains_as_plain_fp32_does(changes):
    # An aligned vocabulary draws more random weights, and all that follow are others: the losses
    # are only near each other.
    wanted = losses("gpt2")
    assert wanted[-1] < wanted[0]
    assert losses("gpt2", changes) == pytest.approx(wanted, abs=0.05)


def test_own_adamw_with_moments_in_fp32_is_pytorchs():
    wide = EAGER | {"moments": "float32"}
    own = losses("bert", {"optimizer": "own", "optimizer_options": wide})
    assert own == pytest.approx(losses("bert", {"optimizer": "fused"}), rel=1e-5)


def test_own_adamw_has_moments_in_bf16_by_default():
    own = losses("bert", {"optimizer": "own", "optimizer_options": EAGER})
    assert own != losses("bert", {"optimizer": "fused"})


def test_small_parameters_are_views_of_one_piece_and_train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = CompiledAdamW(model, 0.1, compiled=False)
    optimizer.step([torch.ones_like(parameter) for parameter in model.parameters()])
    pieces = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(pieces) == 1
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hashed", [False, True])
def test_stochastic_rounding_is_right_in_the_mean(hashed):
    torch.manual_seed(0)
    wide = torch.full((20_000,), 1 + 2**-10)  # an eighth of the way from 1 to its neighbour
    rounded = _round_stochastically(wide, torch.tensor(7, dtype=torch.int32) if hashed else None)
    assert sorted(rounded.unique().tolist()) == [1.0, 1 + 2**-7]
    assert (rounded > 1).float().mean().item() == pytest.approx(1 / 8, abs=0.01)


def test_micro_batches_give_the_step_of_all_samples():
    setting = merged(PLAIN)
    data = search.Data("gpt2", LM, 4, 1, setting, None)
    halves = []
    for (batch,) in data.steps(2):
        first = {name: tensor[:2] for name, tensor in batch.items()}
        second = {name: tensor[2:] for name, tensor in batch.items()}
        halves.append([first, second])
    step = search.build("gpt2", LM, setting, data, halves[0], dropout=0.0, rate=1e-3)
    of_halves = [step(batches).item() for batches in halves]
    assert of_halves == pytest.approx(losses("gpt2", steps=2), rel=1e-4)


def test_the_chunked_loss_has_the_whole_ones_gradients(monkeypatch):
    monkeypatch.setattr(gpt2, "CHUNK", 16)
    torch.manual_seed(0)
    x = torch.randn(50, 8, requires_grad=True)
    weight = torch.randn(104, 8, requires_grad=True)
    targets = torch.randint(97, (50,))
    targets[::7] = -100

    def with_gradients(form):
        loss = form(x, weight, targets, 97)
        return (loss, *torch.autograd.grad(loss / 2, (x, weight)))

    chunked = with_gradients(gpt2.chunked_loss)
    whole = with_gradients(gpt2.whole_loss)
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)


def test_empty_segments_have_no_part_in_the_loss():
    torch.manual_seed(0)
    like = SimpleNamespace(config=SimpleNamespace(**BERT))
    model = Bert(like, 0.0, 64)
    lengths = np.array([9, 5])
    tokens = torch.randint(100, (1, 20))

    def with_gradients(segments):
        arrays = packing.sequence(lengths, 20, segments)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        answers = torch.full((segments,), -100)
        answers[:2] = torch.tensor([3, 4])
        loss = model(
            tokens,
            token_type_ids=torch.zeros_like(tokens),
            start_positions=answers,
            end_positions=answers,
            **inputs,
        )
        return (loss, *torch.autograd.grad(loss, list(model.parameters())))

    torch.testing.assert_close(with_gradients(segments=4), with_gradients(segments=2))


@pytest.mark.parametrize("drawn_at_once", [False, True])
def test_dropout_drops_about_a_tenth_and_keeps_the_mean(drawn_at_once):
    torch.manual_seed(0)
    noise = torch.randint(256, (100_000,), dtype=torch.uint8) if drawn_at_once else None
    dropped = gpt2.dropout(torch.ones(100_000), 0.1, noise)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.005)
    assert dropped.mean().item() == pytest.approx(1, abs=0.005)


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    """Lengths like those of SQuAD's samples: 171 tokens in the mean, at most 384."""
    return np.random.default_rng(0).gamma(7, 24.5, 20_000).clip(35, 384).astype(np.int64)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_dealt_sequences_have_under_one_percent_of_padding(lengths, size):
    groups = packing.deal(lengths, size)
    totals = np.array([lengths[group].sum() for group in groups])
    assert 1 - totals.mean() / packing.tile(totals.max(), 16) < 0.01


@pytest.mark.parametrize("size", [8, 32, 128])
def test_dealt_sequences_have_each_sample_once_and_leave_out_less_than_a_sequence(lengths, size):
    groups = packing.deal(lengths, size)
    dealt = np.concatenate(groups)
    assert {len(group) for group in groups} == {size}
    assert len(np.unique(dealt)) == len(dealt)
    assert len(dealt) > len(lengths) - size


def test_filled_sequences_have_under_one_percent_of_padding_and_every_sample(lengths):
    groups = packing.fill(lengths, 5632)
    totals = np.array([lengths[group].sum() for group in groups])
    assert sorted(np.concatenate(groups)) == list(range(len(lengths)))
    assert totals.max() <= 5632
    assert 1 - totals.mean() / 5632 < 0.01


def test_a_sample_longer_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="61 tokens is longer than 60"):
        packing.fill(np.array([5, 61]), 60)


def test_flex_attention_refuses_a_dropout_that_it_has_not():
    with pytest.raises(ValueError, match="no dropout"):
        gpt2.flex(None, None, None, None, 0.1)


def test_a_misspelt_way_to_compile_is_refused():
    with pytest.raises(ValueError, match="none of whole, layers, none"):
        compile_parts(torch.nn.Linear(1, 1), "all")


def test_a_setting_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no 'optimiser'"):
        merged({"optimiser": "own"})


def test_a_misspelt_optimizer_is_refused():
    with pytest.raises(ValueError, match="none of fused, torchao, own"):
        losses("gpt2", {"optimizer": "adam"})


# The search, and its measuring in processes of their own.


def test_a_search_adds_what_pays_and_leaves_what_does_not():
    """Here b pays alone but not beside a, c does not pay, and d is the best of its group."""
    gains = {"a": 1.1, "b": 1.05, "c": 0.5, "d": 1.2}

    def run(name, *changes, **task):
        names = [change["compile"] for change in changes]
        speed = 100.0
        for option in names:
            speed *= gains[option]
        return speed / 2 if "a" in names and "b" in names else speed

    groups = {
        "first": {"a": {"compile": "a"}},
        "second": {"b": {"compile": "b"}},
        "third": {"c": {"compile": "c"}, "d": {"compile": "d"}},
    }
    found = search.search(run, groups, alone={}, start=[], least_gain=0.01)
    assert found == [{"compile": "d"}, {"compile": "a"}]


def measured(measure, task, out, timeout_s=60.0, within_s=120.0) -> dict:
    """Return the result of a task in a process that imports only what `measure` needs."""
    measurements = Measurements(measure, out, timeout_s, within_s, start_method="spawn")
    return measurements({"name": "x"}, task)


def test_a_result_of_another_process_is_appended_as_a_line(tmp_path):
    out = tmp_path / "lines.jsonl"
    out.write_text("before\n")
    assert measured(dict, {"ms": 1.5}, out) == {"ms": 1.5}
    before, text = out.read_text().splitlines()
    assert before == "before"
    line = json.loads(text)
    assert line["name"] == "x"
    assert line["ms"] == 1.5


def test_a_measurement_that_fails_is_a_line_with_its_error(tmp_path):
    result = measured(int, "no number", tmp_path / "lines.jsonl")
    assert result["error"].startswith("ValueError: invalid literal")
    assert json.loads((tmp_path / "lines.jsonl").read_text())["error"] == result["error"]


def test_a_measurement_that_takes_too_long_is_ended(tmp_path):
    begin = time.monotonic()
    result = measured(time.sleep, 600, tmp_path / "lines.jsonl", timeout_s=0.1)
    assert result == {"error": "time is up"}
    assert time.monotonic() - begin < 60


def test_no_measurement_begins_without_time_left(tmp_path):
    result = measured(dict, {}, tmp_path / "lines.jsonl", within_s=processes.LEAST_S - 1)
    assert result == {"error": "no time left"}
    assert not (tmp_path / "lines.jsonl").exists()


@pytest.mark.parametrize(
    ("samples", "size", "span"), [(8000, 32, 50), (8000, 128, 15), (8000, 8, 50), (100, 32, 1)]
)
def test_a_block_of_the_trainer_is_a_span_of_its_sampler(samples, size, span):
    """Within a span lengths fall, and the next span begins with long samples again."""
    lengths = np.random.default_rng(0).integers(30, 384, samples).tolist()
    order = get_length_grouped_indices(lengths, size)
    # The first sample of all is swapped with the longest, wherever that is.
    borders = []
    for place, (index, following) in enumerate(itertools.pairwise(order), start=1):
        if lengths[following] > lengths[index]:
            borders.append(place)
    assert search_trainer.span_of(samples, size) == span
    assert span * size in borders
    assert [place for place in borders if place % (span * size) > 1] == []
