"""ModernBERT by itself: windows and angles in packed sequences, what it lacks, and what it is said to cost."""

import copy
import dataclasses
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering, ModernBertForMaskedLM

from qa_lib.data.load import load_data
from qa_lib.lab.search.memory_estimate import estimate, gpu_of
from qa_lib.lab.search.plan import plan
from qa_lib.measure.meter import StepFlops
from qa_lib.model.architectures import ENCODERS, heads_of
from qa_lib.model.attention import Segments, attention_name, blockmask, flash
from qa_lib.model.build import build_model, save_model
from qa_lib.model.packed import Packed
from qa_lib.score.predict import ask
from qa_lib.spec.variants import LACKS, VARIANTS, lacking
from tests.kernels import with_gradients
from tests.material import refused
from tests.tiny import checkpoint, losses_of, planned, trained

LENGTHS = (
    50,
    7,
    33,
    80,
)  # of samples: within the window of a token, around it and several times as long
ENDS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint("modernbert", tmp_path_factory.mktemp("modernbert"))


def built(folder, attention: str, **changes):
    """The model of a folder with more layers than it has, of every kind; its weights are random."""
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = (
        4,
        ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    )
    config.update(changes)
    torch.manual_seed(1)
    return AutoModelForQuestionAnswering.from_config(config, attn_implementation=attention).eval()


def packed_logits(model, samples):
    """Start and end logits [2, tokens] of samples in one sequence."""
    inputs = torch.cat(samples)[None], torch.cat([torch.arange(n) for n in LENGTHS])[None], ENDS
    found = Packed(model, [max(LENGTHS)] * len(LENGTHS))(
        *inputs, *torch.ones(2, len(LENGTHS), dtype=torch.int64)
    )
    return torch.cat([found.start_logits, found.end_logits])


@pytest.mark.parametrize("other", ["eager", "sdpa"])
def test_packed_logits_are_those_of_transformers_own_for_each_sample(other, folder):
    samples, own = [torch.randint(5, 100, (n,)) for n in LENGTHS], built(folder, other)
    packed = packed_logits(built(folder, attention_name("block-diagonal")), samples)
    alone = [own(sample[None]) for sample in samples]
    wanted = torch.stack(
        [torch.cat([one[name][0] for one in alone]) for name in ("start_logits", "end_logits")]
    )
    assert packed.std() > 0.1
    torch.testing.assert_close(packed, wanted, atol=1e-5, rtol=0)
    # A window of another size, other angles in either kind of layer, or none of both would have been seen.
    angles = copy.deepcopy(own.config.rope_parameters)
    angles["sliding_attention"]["rope_theta"] *= 4
    for changes in (
        {"local_attention": 18},
        {"local_attention": 1024},
        {"rope_parameters": angles},
    ):
        with torch.no_grad():
            changed = packed_logits(
                built(folder, attention_name("block-diagonal"), **changes), samples
            )
        assert (changed - packed).abs().max() > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention takes a GPU")
def test_flash_has_the_window_of_the_mask_in_both_passes():
    segments = Segments(ENDS.cuda(), [max(LENGTHS)] * len(LENGTHS))
    *parts, grad = torch.randn(4, sum(LENGTHS), 2, 64, device="cuda", dtype=torch.bfloat16)
    found = with_gradients(lambda *own: flash(*own, segments, 0.0, 0.125, 8), parts, grad)
    wanted = with_gradients(lambda *own: blockmask(*own, segments, 0.0, 0.125, 8), parts, grad)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert (flash(*parts, segments, 0.0, 0.125) - found[0]).abs().max() > 0.1


def test_frequencies_stay_exact_under_bf16_weights_over_masters(folder, tmp_path):
    # As a GPU has them, but for the graph and Inductor.
    changes = {"precision": "bf16", "optimizer": "adamw-master", "compile": "none"}
    sizes = {"steps": 3, "measure_from": 1, "checkpoint_every": 0}
    spec = planned("E-masters", settings=changes, sizes=sizes, model=folder)
    data, model = load_data(spec), build_model(spec)
    exact = copy.deepcopy(dict(model.model.rotary_emb.named_buffers()))
    trained(spec, data.samples, tmp_path, model)
    assert len(set(losses_of(tmp_path))) == 3 and torch.tensor(losses_of(tmp_path)).isfinite().all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(dict(model.model.rotary_emb.named_buffers()), exact, atol=0, rtol=0)
    save_model(model, data.tokenizer, tmp_path / "model")
    again = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "model").eval()
    ids = torch.randint(5, 100, (2, 60))
    torch.testing.assert_close(
        again(ids).start_logits, model.eval()(ids).start_logits, atol=1e-5, rtol=1e-5
    )
    assert ask(tmp_path / "model", "who came ?", "then alice baker came .")["nbest"]


def test_what_pretraining_has_left_is_its_head_and_what_it_lacks_is_new(folder, tmp_path, caplog):
    pretrained = ModernBertForMaskedLM(AutoConfig.from_pretrained(folder))
    pretrained.save_pretrained(tmp_path)
    model = build_model(planned("B1", model=str(tmp_path)))
    assert torch.equal(model.head.dense.weight, pretrained.head.dense.weight)
    assert not caplog.messages
    assert all(
        parameter.requires_grad for module in heads_of(model) for parameter in module.parameters()
    )
    trained = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert trained == {"Wqkv", "weight", "bias"}, "adapters, and what is above the layers"


GPU = dataclasses.replace(gpu_of(90), gpus=2, torchao=bool(find_spec("torchao")))
# What neither may lack.
NEEDED = "A0 A1 A2 A3 A4 B1 B1-all C1 C2 D1 E-packed E-adamw E-graph E-masters P1 P-fsdp".split()


@pytest.mark.parametrize("kind", ["distilbert", "modernbert"])
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


def test_what_architectures_lack_is_of_those_in_the_table_and_of_settings_that_variants_have():
    named = {kind for lack in LACKS for kind in lack["architectures"].split()}
    assert named == {
        kind for kind in ENCODERS if any(lacking(row.settings, kind) for row in VARIANTS.values())
    }
    assert all(lack["architectures"] for lack in LACKS) and "bert" not in named


def test_its_memory_is_said_to_be_unknown_and_distilberts_is_known(folder, tmp_path):
    known = planned("A3", model=checkpoint("distilbert", tmp_path), machine=gpu_of(80))
    unknown = planned("A3", model=folder, machine=gpu_of(80))
    assert estimate(known)["peak_mib"] > 0
    refused("A3: what modernbert keeps for its backward pass is not predicted", estimate, unknown)


def test_arithmetic_of_attention_counts_a_window_where_there_is_one(folder):
    whole, local = (built(folder, "sdpa", local_attention=around) for around in (1024, 16))
    for n in (8, 300):
        place = torch.arange(n)
        pairs = ((place[:, None] - place).abs() <= 8).sum().item()
        full, seen = (StepFlops(model).flops(n, n**2) for model in (whole, local))
        saved = (
            3 * 4 * 2 * 64 * (n**2 - pairs)
        )  # of two layers of width 64, and twice as much in the backward pass
        assert full - seen == pytest.approx(saved if n > 17 else 0, rel=0.01)
