"""The rivals' options at a tiny size: each gives the loss of the plain fp32 step, packing leaves hardly any padding,
and the search writes a line for each setting."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qa_lib.peers import gpt2, packing, search
from qa_lib.peers.adamw import CompiledAdamW, _round_stochastically
from qa_lib.peers.bert import Bert
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
OWN = {"precision": "bf16", "optimizer": "own", "optimizer_options": {"compiled": False}}
PLAIN = {"precision": "fp32", "compile": "none", "graph": False}
LENGTHS = np.random.default_rng(0).integers(20, 60, 400)


@pytest.fixture(autouse=True)
def on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(peer: str, *changes: dict, parts: int = 1, steps: int = 4) -> list[float]:
    """Of the first steps, without dropout, of a setting that nothing compiles."""
    setting = search.merged(PLAIN, *changes)
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
        pytest.param(
            OWN | {"optimizer_options": {"compiled": False, "hashed": True}}, id="hashed rounding"
        ),
        pytest.param(
            OWN | {"optimizer_options": {"compiled": False, "masters": True}}, id="masters"
        ),
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
    # The padded vocabulary draws more random weights, so that other weights follow: from the loss of chance, too.
    wanted = losses("gpt2")
    assert wanted[-1] < wanted[0]
    assert losses("gpt2", changes) == pytest.approx(wanted, abs=0.05)


def test_own_adamw_is_pytorchs_in_fp32():
    fused = losses("bert", {"optimizer": "fused"})
    own = losses("bert", {"optimizer": "own", "optimizer_options": OWN["optimizer_options"]})
    assert own != fused  # its moments are in bf16
    wide = {"compiled": False, "moments": "float32"}
    assert losses("bert", {"optimizer": "own", "optimizer_options": wide}) == pytest.approx(
        fused, rel=1e-5
    )


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
    one = losses("gpt2", steps=2)
    shape, setting = LM, search.merged(PLAIN)
    data = search.Data("gpt2", shape, 4, 1, setting, None)
    batches = data.steps(2)
    halves = [
        [
            {name: t[:2] for name, t in batch[0].items()},
            {name: t[2:] for name, t in batch[0].items()},
        ]
        for batch in batches
    ]
    step = search.build("gpt2", shape, setting, data, halves[0], dropout=0.0, rate=1e-3)
    assert [step(batch).item() for batch in halves] == pytest.approx(one, rel=1e-4)


def test_the_chunked_loss_has_the_whole_ones_gradients(monkeypatch):
    monkeypatch.setattr(gpt2, "CHUNK", 16)
    torch.manual_seed(0)
    x = torch.randn(50, 8, requires_grad=True)
    weight = torch.randn(104, 8, requires_grad=True)
    targets = torch.randint(97, (50,))
    targets[::7] = -100
    found, wanted = [
        (loss, *torch.autograd.grad(loss / 2, (x, weight)))
        for loss in (form(x, weight, targets, 97) for form in (gpt2.chunked_loss, gpt2.whole_loss))
    ]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_samples_that_lack_have_no_part_in_the_loss():
    torch.manual_seed(0)
    like = SimpleNamespace(config=SimpleNamespace(**BERT))
    model = Bert(like, 0.0, 64)
    lengths = np.array([9, 5])
    tokens = torch.randint(100, (1, 20))
    found = []
    for most in (2, 4):
        arrays = packing.sequence(lengths, 20, most)
        answers = torch.full((most,), -100)
        answers[:2] = torch.tensor([3, 4])
        placed = {name: torch.from_numpy(array) for name, array in arrays.items()}
        placed |= {"start_positions": answers, "end_positions": answers}
        loss = model(tokens, token_type_ids=tokens * 0, **placed)
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("drawn_at_once", [False, True])
def test_dropout_drops_about_a_tenth_and_keeps_the_mean(drawn_at_once):
    torch.manual_seed(0)
    noise = torch.randint(256, (100_000,), dtype=torch.uint8) if drawn_at_once else None
    dropped = gpt2.dropout(torch.ones(100_000), 0.1, noise)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.005)
    assert dropped.mean().item() == pytest.approx(1, abs=0.005)


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    """Like SQuAD's: 171 tokens in the mean, at most 384."""
    return np.random.default_rng(0).gamma(7, 24.5, 20_000).clip(35, 384).astype(np.int64)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_dealt_sequences_have_under_one_percent_of_padding(lengths, size):
    groups = packing.deal(lengths, size)
    totals = np.array([lengths[group].sum() for group in groups])
    assert len(np.unique(np.concatenate(groups))) == size * len(groups) > len(lengths) - size
    assert 1 - totals.mean() / packing.tile(totals.max(), 16) < 0.01


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
        search.merged({"optimiser": "own"})


def test_a_search_adds_what_pays_and_leaves_what_does_not():
    gains = {"a": 1.1, "b": 1.05, "c": 0.5, "d": 1.2}

    def run(name, *changes, **task):
        speed = 100.0
        for change in changes:
            speed *= gains[change["compile"]]
        return speed * (0.5 if {"a", "b"} <= {change["compile"] for change in changes} else 1)

    groups = {"first": {"a": {"compile": "a"}}, "second": {"b": {"compile": "b"}}}
    groups["third"] = {"c": {"compile": "c"}, "d": {"compile": "d"}}
    assert search.search(run, groups, {}, [], 0.01) == [{"compile": "d"}, {"compile": "a"}]
