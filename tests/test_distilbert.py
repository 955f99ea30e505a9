"""DistilBERT with BERT's layers computes, trains and saves what transformers' own does."""

import copy

import pytest
import torch
from transformers import DistilBertConfig, DistilBertForQuestionAnswering

from qa_lib.model import distilbert
from qa_lib.model.bert_layers import original_name, plain_state

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=100, dim=32, n_layers=2, n_heads=2, hidden_dim=48)
    return DistilBertForQuestionAnswering(config).eval()


@pytest.fixture
def ours(original):
    """The same model with BERT's layers."""
    model = copy.deepcopy(original)
    distilbert.use_bert_layers(model.distilbert, "sdpa")
    return model


@pytest.fixture
def inputs():
    """Two samples of 12 and 9 tokens, and their answers."""
    torch.manual_seed(1)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    return {
        "input_ids": torch.randint(5, 100, (2, 12)),
        "attention_mask": mask,
        "start_positions": torch.tensor([3, 4]),
        "end_positions": torch.tensor([5, 6]),
    }


def test_loss_logits_and_all_gradients_are_the_originals(original, ours, inputs):
    plain = copy.deepcopy(original)
    expected = plain(**inputs)
    found = ours(**inputs)
    torch.testing.assert_close(found.start_logits, expected.start_logits, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.loss, expected.loss)
    expected.loss.backward()
    found.loss.backward()
    gradients = {original_name(ours, name): p.grad for name, p in ours.named_parameters()}
    of_plain = {name: p.grad for name, p in plain.named_parameters()}
    assert gradients.keys() == of_plain.keys()
    for name, gradient in of_plain.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


def test_dropout_is_where_the_original_has_it(original, ours):
    def rates(model):
        return sorted(
            module.p
            for module in model.modules()
            if isinstance(module, torch.nn.Dropout) and module.p > 0
        )

    assert rates(ours) == rates(original)
    for layer in ours.distilbert.transformer.layer:
        assert layer.attention.output.dropout.p == 0  # which the original lacks
        assert layer.output.dropout.p == original.config.dropout


def test_the_state_has_the_originals_names_and_values(original, ours):
    state = plain_state(ours)
    expected = original.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_hidden_states_of_all_layers_are_the_originals(original, ours, inputs):
    expected = original(**inputs, output_hidden_states=True).hidden_states
    found = ours(**inputs, output_hidden_states=True).hidden_states
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_what_is_frozen_stays_frozen(original):
    model = copy.deepcopy(original)
    model.distilbert.transformer.layer[0].requires_grad_(False)
    distilbert.use_bert_layers(model.distilbert, "sdpa")
    first, second = model.distilbert.transformer.layer
    assert not any(p.requires_grad for p in first.parameters())
    assert all(p.requires_grad for p in second.parameters())
