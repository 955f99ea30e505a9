"""Each setting does what its variant says: seen at the effect, not at the setting."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from transformers import BertConfig, BertForQuestionAnswering

from qa_lib.data.load import load_data
from qa_lib.model.build import apply_recipe, build_model, model_config, save_model
from qa_lib.spec.recipes import RECIPES, find_recipe
from tests.material import refused
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


# How a model is built.


def test_another_seed_gives_other_weights_and_the_same_one_the_same():
    heads = [build_model(planned(seeds=[seed])).qa_outputs.weight for seed in (0, 1, 1)]
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[1], heads[2])


def test_adapters_have_their_recipes_rank_twice_the_weight_and_a_tenth_of_dropout():
    recipe = find_recipe("lora-all-r4")
    model = apply_recipe(build_model(planned()), recipe)
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert layers
    for layer in layers:
        assert layer.lora_A["default"].out_features == recipe.rank
        assert layer.scaling == {"default": 2.0}
        assert layer.lora_dropout["default"].p == 0.1


def test_what_adapters_change_below_the_resolution_of_half_precision_is_saved(tmp_path):
    model = build_model(planned("B1")).to(torch.bfloat16)
    query = model.bert.encoder.layer[0].attention.self.query
    with torch.no_grad():
        query.base_layer.weight.fill_(1.0)
        query.lora_A["default"].weight.fill_(1 / 64)
        query.lora_B["default"].weight.fill_(2**-8 / query.r["default"])
    save_model(model, Mock(), tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    weight = saved["bert.encoder.layer.0.attention.self.query.weight"]
    torch.testing.assert_close(weight, torch.full(weight.shape, 1 + 2 * 2**-8 / 64))


def test_a_shapes_vocabulary_is_rounded_up_to_whole_tiles_and_its_sizes_are_kept():
    config = model_config("gpt2:L3H128V500P80", task="lm")
    sizes = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
    assert [getattr(config, name) for name in sizes] == [3, 128, 2, 80, 512]
    assert model_config("gpt2:L3H128V512P80", task="lm").vocab_size == 512


def test_a_model_takes_no_longer_samples_than_it_has_positions():
    """Where the model was not there when the run was planned."""
    spec = planned()
    long = dataclasses.replace(spec, preset=dataclasses.replace(spec.preset, max_length=100_000))
    refused("100,?000", build_model, long)


@pytest.mark.parametrize(("variant", "uses"), [("C2", False), ("A2", None)])
def test_with_checkpointing_there_is_no_cache(variant, uses):
    model = build_model(planned(variant))
    native = BertConfig().to_dict().get("use_cache")
    found = getattr(model.config, "use_cache", None)
    assert found == (native if uses is None else uses)


def test_without_dropout_adapters_drop_nothing_either():
    spec = planned("B1", settings={"dropout": "none"})
    rates = {module.p for module in build_model(spec).modules() if hasattr(module, "p")}
    assert rates == {0.0}
