"""ModernBERT by itself: windows and angles in packed sequences, what it lacks, what it costs."""

import copy
import dataclasses
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering, ModernBertForMaskedLM

from qa_lib.data.load import load_data
from qa_lib.lab.search.memory_estimate import estimate
from qa_lib.lab.search.plan import plan
from qa_lib.measure.meter import StepFlops
from qa_lib.model.architectures import ENCODERS, heads_of
from qa_lib.model.build import build_model, save_model
from qa_lib.model.packed import Packed
from qa_lib.model.packed_attention import Segments, attention_name, blockmask, flash
from qa_lib.score.predict import ask
from qa_lib.spec.machine import gpu_of
from qa_lib.spec.rules import lacking
from qa_lib.spec.variants import VARIANTS
from tests.conftest import slow
from tests.kernels import with_gradients
from tests.material import refused
from tests.tiny import checkpoint, losses_of, planned, trained

# The lengths of samples: within the window of a token, around it and several times as long.
LENGTHS = (50, 7, 33, 80)
CU_SEQLENS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
LIMITS = [max(LENGTHS)] * len(LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint("modernbert", tmp_path_factory.mktemp("modernbert"))


def built(folder, attention: str, **changes):
    """The model of a folder with more layers than it has, of every kind; its weights are random."""
    config = AutoConfig.from_pretrained(folder)
    config.layer_types = [
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    config.num_hidden_layers = len(config.layer_types)
    config.update(changes)
    torch.manual_seed(1)
    return AutoModelForQuestionAnswering.from_config(config, attn_implementation=attention).eval()


def packed_logits(model, samples):
    """Start and end logits [2, tokens] of samples in one sequence."""
    any_answers = torch.ones(len(LENGTHS), dtype=torch.int64)
    output = Packed(model, LIMITS)(
        input_ids=torch.cat(samples)[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        cu_seqlens=CU_SEQLENS,
        start_positions=any_answers,
        end_positions=any_answers,
    )
    return torch.cat([output.start_logits, output.end_logits])


@pytest.fixture(scope="module")
def samples():
    torch.manual_seed(0)
    return [torch.randint(5, 100, (length,)) for length in LENGTHS]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_logits_are_those_of_transformers_own_for_each_sample(attention, folder, samples):
    packed = packed_logits(built(folder, attention_name("block-diagonal")), samples)
    assert packed.std() > 0.1
    model = built(folder, attention)
    outputs = [model(sample[None]) for sample in samples]
    start_logits = torch.cat([output.start_logits[0] for output in outputs])
    end_logits = torch.cat([output.end_logits[0] for output in outputs])
    expected = torch.stack([start_logits, end_logits])
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)


def with_other_angles(folder) -> dict:
    """The rotary embeddings of a config, with other angles in layers that look at a window."""
    angles = copy.deepcopy(AutoConfig.from_pretrained(folder).rope_parameters)
    angles["sliding_attention"]["rope_theta"] *= 4
    return {"rope_parameters": angles}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(lambda _: {"local_attention": 18}, id="a wider window"),
        pytest.param(lambda _: {"local_attention": 1024}, id="no window"),
        pytest.param(with_other_angles, id="other angles"),
    ],
)
def test_another_window_and_other_angles_would_be_seen(changes, folder, samples):
    attention = attention_name("block-diagonal")
    with torch.no_grad():
        packed = packed_logits(built(folder, attention), samples)
        changed = packed_logits(built(folder, attention, **changes(folder)), samples)
    assert (changed - packed).abs().max() > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention takes a GPU")
def test_flash_has_the_window_of_the_mask_in_both_passes():
    segments = Segments(CU_SEQLENS.cuda(), LIMITS)
    *qkv, grad = torch.randn(4, sum(LENGTHS), 2, 64, device="cuda", dtype=torch.bfloat16)
    options = {"segments": segments, "dropout": 0.0, "scale": 0.125}

    def by_flash(*qkv):
        return flash(*qkv, window=8, **options)

    def by_mask(*qkv):
        return blockmask(*qkv, window=8, **options)

    results = with_gradients(by_flash, qkv, grad)
    expected = with_gradients(by_mask, qkv, grad)
    torch.testing.assert_close(results, expected, atol=2e-2, rtol=2e-2)
    assert (flash(*qkv, **options) - results[0]).abs().max() > 0.1


# A model with bf16 weights over masters.


@pytest.fixture(scope="module")
def data_and_model(folder, tmp_path_factory):
    """The data and the model of three steps as a GPU has them, but for the graph and Inductor."""
    changes = {"precision": "bf16", "optimizer": "adamw-master", "compile": "none"}
    sizes = {"steps": 3, "measure_from": 1, "checkpoint_every": 0}
    spec = planned("E-masters", settings=changes, sizes=sizes, model=folder)
    data = load_data(spec)
    model = build_model(spec)
    model.exact_frequencies = copy.deepcopy(frequencies_of(model))
    run_dir = tmp_path_factory.mktemp("run")
    trained(spec, data.samples, run_dir, model)
    losses = losses_of(run_dir)
    assert len(set(losses)) == 3
    assert torch.tensor(losses).isfinite().all()
    return data, model


def frequencies_of(model) -> dict[str, torch.Tensor]:
    return dict(model.model.rotary_emb.named_buffers())


def test_frequencies_stay_exact_under_bf16_weights(data_and_model):
    _, model = data_and_model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(frequencies_of(model), model.exact_frequencies, atol=0, rtol=0)


def test_a_model_with_bf16_weights_is_saved_as_it_is(data_and_model, tmp_path):
    data, model = data_and_model
    save_model(model, data.tokenizer, tmp_path / "model")
    saved = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "model").eval()
    ids = torch.randint(5, 100, (2, 60))
    expected = model.eval()(ids).start_logits
    torch.testing.assert_close(saved(ids).start_logits, expected, atol=1e-5, rtol=1e-5)
    assert ask(tmp_path / "model", "who came ?", "then alice baker came .")["nbest"]


# Adapters on a pretrained model.


@pytest.fixture
def pretrained(folder, tmp_path):
    """A pretrained model, which lies in `tmp_path`."""
    model = ModernBertForMaskedLM(AutoConfig.from_pretrained(folder))
    model.save_pretrained(tmp_path)
    return model


def test_the_head_that_pretraining_has_left_is_kept_without_a_word(pretrained, tmp_path, caplog):
    model = build_model(planned("B1", model=str(tmp_path)))
    assert torch.equal(model.head.dense.weight, pretrained.head.dense.weight)
    assert not caplog.messages


def test_adapters_train_and_so_does_what_is_above_the_layers(pretrained, tmp_path):
    model = build_model(planned("B1", model=str(tmp_path)))
    heads = [parameter for module in heads_of(model) for parameter in module.parameters()]
    assert all(parameter.requires_grad for parameter in heads)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}
    assert adapted == {"Wqkv"}
    others = {name.rpartition(".")[2] for name in names if ".lora_" not in name}
    assert others == {"weight", "bias"}


GPU = dataclasses.replace(gpu_of(90), gpus=2, torchao=bool(find_spec("torchao")))
# What neither may lack.
NEEDED = "A0 A1 A2 A3 A4 B1 B1-all C1 C2 D1 E-packed E-adamw E-graph E-masters P1 P-fsdp".split()


@pytest.mark.parametrize("kind", [slow("distilbert"), "modernbert"])
def test_every_variant_is_built_or_skipped_for_a_reason(kind, tmp_path):
    names = [name for name, variant in VARIANTS.items() if variant.task == "qa"]
    specs = plan(names, "smoke", data="synthetic:40", model=checkpoint(kind, tmp_path), machine=GPU)
    for spec in specs:
        if spec.skip is None:
            build_model(spec)
    skipped = {spec.variant: spec.skip or "" for spec in specs}
    assert not any(skipped[name] for name in NEEDED)
    if kind == "modernbert":
        assert skipped["B2"] == "does not fit modernbert: it has no biases to train"
        assert (
            skipped["E-qkv"]
            == "does not fit modernbert: its query, key and value are one linear layer already"
        )
        assert "a window around each token" in skipped["E-packed-efficient"]
    else:
        assert skipped["B2"] == skipped["E-packed-efficient"] == ""
    assert "the rivals are a BERT" in skipped["E-plain"]


def test_a_model_that_was_not_here_when_it_was_planned_is_held_to_the_same(folder):
    spec = dataclasses.replace(planned("B2"), model_source=folder)
    refused("B2 does not fit modernbert: it has no biases to train", build_model, spec)


def test_every_encoder_but_bert_lacks_something_that_a_variant_has():
    for kind in ENCODERS:
        of_readers = {name: row.settings for name, row in VARIANTS.items() if row.task == "qa"}
        lacks = [name for name, settings in of_readers.items() if lacking(settings, kind)]
        assert (lacks != []) == (kind != "bert"), kind


def test_its_memory_is_said_to_be_unknown_and_distilberts_is_known(folder, tmp_path):
    known = planned("A3", model=checkpoint("distilbert", tmp_path), machine=gpu_of(80))
    unknown = planned("A3", model=folder, machine=gpu_of(80))
    assert estimate(known)["peak_mib"] > 0
    refused("A3: what modernbert keeps for its backward pass is not predicted", estimate, unknown)


def flops_of(folder, tokens, local_attention):
    """The operations of a step on one sample, for a window of that size."""
    model = built(folder, "sdpa", local_attention=local_attention)
    return StepFlops(model).flops(tokens, tokens**2)


def test_arithmetic_of_attention_counts_a_window_where_there_is_one(folder):
    tokens = 300
    place = torch.arange(tokens)
    pairs = ((place[:, None] - place).abs() <= 8).sum().item()
    # For two layers of width 64, and twice as much in the backward pass.
    saved = 3 * 4 * 2 * 64 * (tokens**2 - pairs)
    difference = flops_of(folder, tokens, 1024) - flops_of(folder, tokens, 16)
    assert difference == pytest.approx(saved, rel=0.01)


def test_a_window_saves_nothing_for_samples_that_fit_into_it(folder):
    assert flops_of(folder, 8, 1024) == flops_of(folder, 8, 16)
