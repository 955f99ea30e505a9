"""Each setting does what its variant says: seen at the effect, not at the setting."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import BertConfig, BertForQuestionAnswering

from qa_lib.data.load import load_data
from qa_lib.model.build import apply_recipe, build_model
from qa_lib.spec.recipes import RECIPES
from tests.tiny import planned, trained


@pytest.fixture
def inputs():
    """Two questions of 32 tokens and their answers."""
    torch.manual_seed(0)
    ids = torch.randint(5, 100, (2, 32))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "start_positions": torch.tensor([3, 4]),
        "end_positions": torch.tensor([5, 6]),
    }


@pytest.mark.parametrize(
    ("recipe", "layers"), [("freeze-bottom-10", {10, 11}), ("freeze-last-4", set(range(8)))]
)
def test_frozen_layers_of_bert_base_are_the_reference_projects_numbers(recipe, layers):
    config = BertConfig(
        num_hidden_layers=12, hidden_size=16, num_attention_heads=2, intermediate_size=16
    )
    model = apply_recipe(BertForQuestionAnswering(config), RECIPES[recipe])
    trained_layers = {
        int(name.split(".")[3])
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".layer." in name
    }
    assert trained_layers == layers


def test_checkpointing_recomputes_and_changes_no_gradient_with_dropout_on(inputs):
    calls = []
    gradients = []
    for name in ("A2", "C2"):
        model = build_model(planned(name)).train()
        first_layer = model.bert.encoder.layer[0]
        first_layer.attention.register_forward_hook(lambda *_, name=name: calls.append(name))
        torch.manual_seed(1)
        model(**inputs).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert calls == ["A2", "C2", "C2"]
    assert all(map(torch.equal, *gradients))


def test_dynamic_padding_compiles_symbolic_shapes_once(tmp_path, monkeypatch):
    """Other lengths than the first one must not compile again: seen at the compiler's counter."""
    counter = CompileCounter()
    compile_ = torch.compile

    def counted(model, **options):
        return compile_(model, **options | {"backend": counter})

    monkeypatch.setattr(torch, "compile", counted)
    spec = planned("A4", sizes={"steps": 6, "checkpoint_every": 0})
    trained(spec, load_data(spec).samples, tmp_path)
    assert counter.frame_count == 1


@pytest.mark.parametrize("variant", ["A1", "B1", "B1-all", "B2", "B3"])
def test_token_types_reach_the_model(variant, inputs):
    """peft's wrapper for question answering drops them without a word (0.21)."""
    model = build_model(planned(variant)).eval()
    other = inputs | {"token_type_ids": torch.ones_like(inputs["token_type_ids"])}
    with torch.no_grad():
        logits = model(**inputs).start_logits
        assert not torch.equal(logits, model(**other).start_logits)
