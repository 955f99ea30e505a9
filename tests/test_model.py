"""Each knob does what its row says: seen at the effect, not at the setting."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import BertConfig, BertForQuestionAnswering

from qa_lib.data.batches import Batches
from qa_lib.data.load import load_data
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.model.build import apply_recipe, build_model, save_model
from qa_lib.run.fit import train
from qa_lib.run.plan import plan
from qa_lib.spec import Machine
from qa_lib.variants import RECIPES
from tests.material import refused

CPU = Machine(backends=("inductor", "aot_eager"), bitsandbytes=True, compiler=True)


def spec_of(variant):
    return plan([variant], "smoke", data="synthetic:40", machine=CPU)[0]


def inputs():
    torch.manual_seed(0)
    ids = torch.randint(5, 100, (2, 32))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "start_positions": torch.tensor([3, 4]),
        "end_positions": torch.tensor([5, 6]),
    }


def with_gradient(variant):
    """Names of the parameters that hold a gradient after a backward pass."""
    model = build_model(spec_of(variant)).train()
    model(**inputs()).loss.backward()
    return {name for name, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.parametrize(("variant", "modules", "rank"), [("B1", 2, 8), ("B1-all", 6, 32)])
def test_lora_trains_its_factors_and_the_head(variant, modules, rank):
    names, _ = with_gradient(variant)
    factors = {name for name in names if ".lora_" in name}
    assert names - factors == {"qa_outputs.weight", "qa_outputs.bias"}
    assert len(factors) == 2 * modules * 2  # two factors a module, two layers
    if variant == "B1":
        assert all(".query." in name or ".value." in name for name in factors)
    shapes = {p.shape[0] for name, p in with_gradient(variant)[1].named_parameters() if ".lora_A" in name}
    assert shapes == {rank}


def test_frozen_layers_of_bert_base_are_the_seeds_numbers():
    def trained_layers(recipe):
        config = BertConfig(num_hidden_layers=12, hidden_size=16, num_attention_heads=2, intermediate_size=16)
        model = apply_recipe(BertForQuestionAnswering(config), RECIPES[recipe])
        names = [name for name, p in model.named_parameters() if p.requires_grad and ".layer." in name]
        return sorted({int(name.split(".")[3]) for name in names})

    assert trained_layers("freeze-bottom-10") == [10, 11]
    assert trained_layers("freeze-last-4") == list(range(8))


def gradients(model):
    torch.manual_seed(1)
    model.zero_grad()
    model(**inputs()).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_checkpointing_recomputes_and_changes_no_gradient_with_dropout_on():
    calls = {}

    def counted(name):
        model = build_model(spec_of(name)).train()
        calls[name] = 0

        def count(*_):
            calls[name] += 1

        model.bert.encoder.layer[0].attention.register_forward_hook(count)
        return gradients(model)

    plain, recomputed = counted("A2"), counted("C2")
    assert calls == {"A2": 1, "C2": 2}
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_dynamic_padding_compiles_symbolic_shapes_once(tmp_path, monkeypatch):
    """Other lengths than the first one must not compile again: seen at the compiler's own counter."""
    counter, compile_ = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, **options | {"backend": counter}))
    spec = spec_of("A4")
    spec = dataclasses.replace(spec, preset=dataclasses.replace(spec.preset, steps=6, checkpoint_every=0))
    batches = Batches(load_data(spec).samples, spec)
    train(build_model(spec), batches, spec, torch.device("cpu"), tmp_path, lambda _: None)
    assert counter.frame_count == 1


@pytest.mark.parametrize("variant", ["A1", "B1", "B1-all", "B2", "B3"])
def test_token_types_reach_the_model(variant):
    """peft's wrapper for question answering drops them without a word (0.21)."""
    model, one = build_model(spec_of(variant)).eval(), inputs()
    other = one | {"token_type_ids": torch.ones_like(one["token_type_ids"])}
    with torch.no_grad():
        assert not torch.equal(model(**one).start_logits, model(**other).start_logits)


def test_a_folder_without_weights_is_random_for_speed_and_refused_for_quality(tmp_path):
    model = build_model(spec_of("A1"))
    save_model(model, build_tokenizer("tiny"), tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()

    def spec(scale):
        return plan(["A2"], scale, data="synthetic:40", model=str(tmp_path / "bare"), machine=CPU)[0]

    assert build_model(spec("bench")).config.hidden_size == 64
    refused(r"no model\.safetensors", build_model, spec("local"))
