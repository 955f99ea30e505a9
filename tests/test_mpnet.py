"""MPNet by itself: its bias by distance in padded and packed samples, its folder, its variants."""

import copy
import dataclasses
import shutil
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.mpnet.modeling_mpnet import MPNetForQuestionAnswering

from qa_lib.data.load import load_data
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.lab.search.memory_estimate import estimate
from qa_lib.lab.search.plan import plan
from qa_lib.lab.search.step_memory import StepMemory
from qa_lib.measure.meter import MIB
from qa_lib.model import mpnet
from qa_lib.model.bert_layers import original_name
from qa_lib.model.build import build_model
from qa_lib.model.load import read_config
from qa_lib.model.packed import Packed
from qa_lib.model.packed_attention import attention_name
from qa_lib.model.varlen_attention import use_varlen_attention
from qa_lib.peers import mpnet as rival
from qa_lib.peers.mpnet import MPNet, bucket_of
from qa_lib.score.predict import ask, load_qa_model
from qa_lib.spec.machine import gpu_of
from qa_lib.spec.rules import lacking
from qa_lib.spec.settings import Settings
from qa_lib.spec.variants import VARIANTS
from tests.kernels import DEVICE
from tests.material import edited, refused
from tests.tiny import checkpoint, losses_of, planned, trained

# Samples of one token, shorter than the distances that have a bucket each, and beyond the last.
LENGTHS = (1, 6, 150, 40)
LIMITS = [max(LENGTHS)] * len(LENGTHS)
CU_SEQLENS = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
ANSWERS = torch.tensor([0, 5, 77, 3])
PADDING = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint("mpnet", tmp_path_factory.mktemp("mpnet"))


@pytest.fixture(scope="module")
def original(folder):
    """transformers' own model with weights so large that each is seen in the logits."""
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(1)
    model = MPNetForQuestionAnswering(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.fixture(scope="module")
def samples():
    torch.manual_seed(0)
    return [torch.randint(5, 100, (length,)) for length in LENGTHS]


def ours(original, attention: str):
    """The same model with BERT's layers and that attention."""
    model = MPNetForQuestionAnswering(copy.deepcopy(original.config)).eval()
    model.load_state_dict(original.state_dict())
    mpnet.use_bert_layers(model, attention)
    return model


def gradients(model) -> dict[str, torch.Tensor]:
    """The gradient of every parameter by the name that transformers' MPNet has for it."""
    return {
        original_name(model, name): parameter.grad for name, parameter in model.named_parameters()
    }


def assert_same_gradients(model, expected) -> None:
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def padded(samples) -> dict[str, torch.Tensor]:
    rows = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PADDING)
    return {
        "input_ids": rows,
        "attention_mask": (rows != PADDING).long(),
        "start_positions": ANSWERS,
        "end_positions": ANSWERS,
    }


@pytest.fixture(scope="module")
def of_rows(original, samples):
    """The loss, the logits and the gradients of transformers' own model for padded samples."""
    original.zero_grad()
    output = original(**padded(samples))
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in original.named_parameters()}
    return output.loss.detach(), output.start_logits.detach(), gradients


def test_all_buckets_are_met_but_that_of_distance_0_to_the_right(of_rows):
    *_, gradients = of_rows
    is_met = gradients["mpnet.encoder.relative_attention_bias.weight"].abs().amin(1) > 0
    assert [number for number in range(32) if not is_met[number]] == [16]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padded_samples_have_the_logits_and_gradients_of_transformers_own(
    attention, original, samples, of_rows
):
    loss, start_logits, expected = of_rows
    model = ours(original, attention)
    output = model(**padded(samples))
    output.loss.backward()
    torch.testing.assert_close(output.loss, loss, atol=1e-5, rtol=1e-5)
    is_token = padded(samples)["attention_mask"] == 1
    torch.testing.assert_close(
        output.start_logits[is_token], start_logits[is_token], atol=1e-4, rtol=1e-4
    )
    assert_same_gradients(model, expected)


@pytest.fixture(scope="module")
def of_samples(original, samples):
    """The logits and the gradients of transformers' own model for one sample after the other."""
    original.zero_grad()
    logits = []
    for sample, answer in zip(samples, ANSWERS, strict=True):
        output = original(sample[None], start_positions=answer[None], end_positions=answer[None])
        (output.loss / len(samples)).backward()
        logits.append(torch.cat([output.start_logits, output.end_logits]))
    gradients = {name: p.grad.clone() for name, p in original.named_parameters()}
    return torch.cat(logits, 1).detach(), gradients


def packed(model, samples):
    """The output of a model for samples in one sequence."""
    return Packed(model, LIMITS)(
        input_ids=torch.cat(samples)[None],
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS])[None],
        cu_seqlens=CU_SEQLENS,
        start_positions=ANSWERS,
        end_positions=ANSWERS,
    )


@pytest.mark.parametrize("attention", ["block-diagonal", "triton-varlen"])
def test_packed_samples_have_the_logits_and_gradients_of_transformers_own(
    attention, original, samples, of_samples
):
    logits, expected = of_samples
    model = ours(original, attention_name(attention))
    if attention == "triton-varlen":
        use_varlen_attention(model)
    output = packed(model, samples)
    output.loss.backward()
    found = torch.cat([output.start_logits, output.end_logits])
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
    assert_same_gradients(model, expected)


def test_layers_that_are_computed_again_give_the_same_gradients(original, samples):
    found = []
    for again in (False, True):
        model = ours(original, attention_name("block-diagonal")).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        packed(model, samples).loss.backward()
        found.append(gradients(model))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("padding", ["max_length", "packed"])
def test_half_precision_is_near_to_whole(padding, original, samples):
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        name = attention_name("block-diagonal") if padding == "packed" else "sdpa"
        model = ours(original, name).to(dtype)
        output = packed(model, samples) if padding == "packed" else model(**padded(samples))
        losses.append(output.loss.float())
    torch.testing.assert_close(*losses, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("autocasts", [False, True])
def test_the_bias_has_the_type_that_attention_computes_in(autocasts, original):
    bias = ours(original, "sdpa").mpnet.encoder.relative_attention_bias
    hidden = torch.zeros(1, 4, original.config.hidden_size)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        mask = bias.mask(hidden, None)
    assert mask.dtype == (torch.bfloat16 if autocasts else torch.float32)
    assert bias.mask(hidden.bfloat16(), None).dtype == torch.bfloat16


# The rival.


def rival_of(original, model, limits=LENGTHS, **options) -> MPNet:
    """The rival without dropout and with the weights of `model`, which has BERT's layers."""
    peer = MPNet(original, dropout=0.0, limits=list(limits), **options)
    with torch.no_grad():
        for weight, like in peer.pairs(model):
            weight.copy_(like)
    return peer


def packed_inputs(samples) -> dict[str, torch.Tensor]:
    """The samples in one sequence, then two tokens of padding and a segment without any."""
    ends = [*CU_SEQLENS.tolist(), sum(LENGTHS) + 2, sum(LENGTHS) + 2]
    return {
        "input_ids": torch.cat([*samples, torch.tensor([7, 8])])[None],
        "position_ids": torch.cat([torch.arange(length) for length in (*LENGTHS, 2)])[None],
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
        "start_positions": ANSWERS,
        "end_positions": ANSWERS,
    }


def assert_rivals_gradients(peer, model, expected, atol: float = 1e-5) -> None:
    # A peer that has the gradients in its weights' place tells whose they are.
    of_gradients = copy.deepcopy(peer)
    for parameter, weight in zip(of_gradients.parameters(), peer.parameters(), strict=True):
        parameter.data = weight.grad
    names = {id(p): name for name, p in model.named_parameters()}
    for gradient, like in of_gradients.pairs(model):
        name = original_name(model, names[id(like)])
        torch.testing.assert_close(gradient, expected[name], atol=atol, rtol=1e-3, msg=name)


def dense(query, key, value, score_mod, block_mask):
    """FlexAttention by its definition, which a CPU can differentiate, too."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    batch, head, i, j = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = score_mod(scores, batch, head, i, j)
    scores = scores.masked_fill(~block_mask.mask_mod(batch, head, i, j), -torch.inf)
    return scores.softmax(-1) @ value


@pytest.fixture
def noted_logits(monkeypatch):
    """The logits [tokens, 2] of each loss that the rival computes."""
    logits = []
    loss = rival.answer_loss

    def noting(of_tokens, *words):
        logits.append(of_tokens.detach())
        return loss(of_tokens, *words)

    monkeypatch.setattr(rival, "answer_loss", noting)
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"calls": 3},
        {"calls": 9},
        {"attention": "eager"},
        {"attention": "eager", "calls": 2},
        {"attention": "flex"},
    ],
    ids=str,
)
def test_the_rivals_attention_has_the_logits_and_gradients_of_transformers_own(
    options, original, samples, of_samples, noted_logits, monkeypatch
):
    monkeypatch.setattr(rival, "flex_attention", dense)
    logits, expected = of_samples
    model = ours(original, "eager")
    peer = rival_of(original, model, **options)
    peer(**packed_inputs(samples)).backward()
    (found,) = noted_logits
    torch.testing.assert_close(found[: sum(LENGTHS)].t(), logits, atol=1e-4, rtol=1e-4)
    assert_rivals_gradients(peer, model, expected)


def test_the_rivals_logits_are_those_of_transformers_own_for_padded_samples(
    original, samples, of_rows, noted_logits
):
    _, start_logits, _ = of_rows
    peer = rival_of(original, ours(original, "eager"), calls=2)
    peer(**packed_inputs(samples))
    is_token = padded(samples)["attention_mask"] == 1
    found = noted_logits[0][: sum(LENGTHS), 0]
    torch.testing.assert_close(found, start_logits[is_token], atol=1e-4, rtol=1e-4)


def test_flex_attention_itself_gives_the_rivals_logits(original, samples, of_samples, noted_logits):
    """Its gradients need a GPU."""
    logits, _ = of_samples
    peer = rival_of(original, ours(original, "eager"), attention="flex")
    with torch.no_grad():
        peer(**packed_inputs(samples))
    torch.testing.assert_close(noted_logits[0][: sum(LENGTHS)].t(), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize("attention", rival.ATTENTION)
def test_the_rivals_compiled_attention_has_transformers_gradients_on_a_gpu(
    attention, original, samples, of_samples
):
    _, expected = of_samples
    model = ours(original, "eager")
    peer = rival_of(original, model, attention=attention).to(DEVICE)
    peer.compile(dynamic=False)
    inputs = {name: t.to(DEVICE) for name, t in packed_inputs(samples).items()}
    peer(**inputs).backward()
    for parameter in peer.parameters():
        parameter.grad = parameter.grad.cpu()
    assert_rivals_gradients(peer.cpu(), model, expected, atol=1e-3)


def test_a_row_without_a_token_changes_no_gradient(original, samples, of_samples):
    """A sequence may have fewer samples than rows."""
    _, expected = of_samples
    model = ours(original, "eager")
    peer = rival_of(original, model, limits=[*LENGTHS, 20])
    inputs = packed_inputs(samples)
    inputs["cu_seqlens"] = torch.cat([CU_SEQLENS, CU_SEQLENS[-1:], CU_SEQLENS[-1:] + 2])
    for name in ("start_positions", "end_positions"):
        inputs[name] = torch.cat([ANSWERS, torch.tensor([-100])])
    peer(**inputs).backward()
    assert_rivals_gradients(peer, model, expected)


def test_the_rivals_flex_attention_refuses_dropout():
    with pytest.raises(ValueError, match="no dropout"):
        rival.flex(None, None, None, None, 1, 0.1)


def test_the_rivals_buckets_are_transformers_own():
    distances = torch.arange(-200, 201)
    expected = mpnet.MPNetEncoder.relative_position_bucket(distances)
    assert torch.equal(bucket_of(distances), expected)


@pytest.mark.parametrize("variant", ["E-plain", "E-searched-launched", "E-searched"])
def test_the_rival_trains(variant, folder, tmp_path):
    """A CPU captures no graph."""
    sizes = {"steps": 3, "measure_from": 1, "checkpoint_every": 0}
    settings = {"attention": "block-diagonal", "compile": "none", "precision": "fp32"}
    spec = planned(variant, settings=settings, sizes=sizes, model=folder)
    trained(spec, load_data(spec).samples, tmp_path)
    assert len(set(losses_of(tmp_path))) == 3


# Folders.


@pytest.fixture
def copied(folder, tmp_path):
    """A folder of one's own, which a test may damage."""
    path = tmp_path / "own"
    shutil.copytree(folder, path)
    return path


def renamed(path, change) -> None:
    """Give the weights of a folder other names; those whose name becomes "" are left out."""
    file = path / "model.safetensors"
    weights = {change(name): weight for name, weight in load_file(file).items()}
    weights.pop("", None)
    save_file(weights, file, metadata={"format": "pt"})


BIAS = "mpnet.encoder.relative_attention_bias.weight"


def test_weights_without_the_bias_are_refused(copied):
    renamed(copied, lambda name: "" if name == BIAS else name)
    for load in (load_qa_model, lambda path: build_model(planned(model=str(path)))):
        refused(f"the weights lack {BIAS}, which would be left random", load, copied)


def test_weights_of_the_encoder_alone_have_the_bias_by_its_old_name(copied):
    bias = load_file(copied / "model.safetensors")[BIAS]
    renamed(copied, lambda name: "" if "qa_outputs" in name else name.removeprefix("mpnet."))
    model = build_model(planned(model=str(copied)))
    assert torch.equal(model.mpnet.encoder.relative_attention_bias.weight, bias)


def test_another_models_tokenizer_is_refused(copied):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / name).unlink()
    build_tokenizer("tiny").save_pretrained(copied)
    message = "the tokenizer pads with token 0, pad_token_id in config.json is 1"
    refused(message, load_qa_model, copied)


@pytest.mark.parametrize(
    ("name", "value", "built"),
    [("relative_attention_num_buckets", 16, 32), ("pad_token_id", 0, 1)],
)
def test_a_config_that_transformers_does_not_build_is_refused(name, value, built, copied):
    edited(copied / "config.json", **{name: value})
    refused(f"{name} is '{value}' in config.json, and {built} alone is built", read_config, copied)


def test_samples_longer_than_512_tokens_are_refused(folder):
    assert planned(model=folder, max_length=512).preset.max_length == 512
    message = "takes 512 tokens, and samples of preset smoke have 513"
    refused(message, planned, model=folder, max_length=513)


def test_a_saved_model_answers_a_question(folder):
    assert ask(folder, "who came ?", "then alice baker came .")["nbest"]


# Variants.

WANTED = (
    "A0 A1 A1-masked A2 A3 A4 B1 B1-all B2 B3 C1 C2 D1 E-plain E-searched E-searched-launched "
    "E-varlen E-norm E-gelu E-moments E-fp8 E-uncompiled E-fp8-uncompiled E-fp8-all "
    "E-recompute-8bit P1 P-fsdp"
).split()
WITHOUT_BIAS = "its scores have a bias by distance, which this kernel of packed sequences has not"
LACKED = {
    "E-packed": WITHOUT_BIAS,
    "E-masters": WITHOUT_BIAS,
    "E-t4-norm": WITHOUT_BIAS,
    "P-gpipe": WITHOUT_BIAS,
}
GPU = dataclasses.replace(gpu_of(90), gpus=2, torchao=bool(find_spec("torchao")))


def test_every_variant_is_built_or_skipped_for_a_reason(folder):
    names = [name for name, variant in VARIANTS.items() if variant.task == "qa"]
    specs = plan(names, "smoke", data="synthetic:40", model=folder, machine=GPU)
    skipped = {spec.variant: spec.skip for spec in specs}
    assert [name for name in WANTED if skipped[name]] == []
    for name, why in LACKED.items():
        assert skipped[name] == f"does not fit mpnet: {why}"
    for spec in specs:
        if spec.skip is None:
            build_model(spec)


@pytest.mark.parametrize("parallel", ["pipeline", "tensor"])
def test_stages_and_shares_of_heads_lack_the_bias(parallel):
    settings = {"padding": "packed", "attention": "block-diagonal", "parallel": parallel}
    assert "bias" in lacking(Settings(precision="bf16", **settings), "mpnet")


@pytest.mark.parametrize(("sm", "variant"), [(90, "E-fp8-gradients"), (80, "E-uncompiled")])
def test_recommended_is_the_quickest_that_has_the_bias(sm, variant, folder, tmp_path):
    machine = dataclasses.replace(gpu_of(sm), total_mib=80_000, free_mib=79_000)
    (spec,) = plan(["recommended"], "smoke", model=folder, machine=machine, runs=tmp_path)
    assert spec.variant == variant


def test_its_memory_is_berts_and_that_of_the_mask(folder, tmp_path):
    bert = checkpoint("bert", tmp_path)
    of_bert, own = [
        estimate(planned("A2", model=model, machine=gpu_of(90)))["activations_mib"]
        for model in (bert, folder)
    ]
    length = planned(model=folder).preset.max_length
    mask_mib = 3 * 2 * 8 * 2 * length**2 / MIB  # of 8 samples and 2 heads
    assert own - of_bert == pytest.approx(mask_mib)


def test_packed_samples_take_no_memory_for_a_mask(folder):
    spec = planned("E-uncompiled", model=folder, machine=gpu_of(90))
    assert StepMemory(spec, tokens=1000).distance_bias_mask() == 0


def test_the_layers_have_the_activation_of_the_configuration(folder):
    model = MPNetForQuestionAnswering(AutoConfig.from_pretrained(folder, hidden_act="relu"))
    mpnet.change_backbone(model.mpnet, "sdpa")
    layer = model.get_submodule("mpnet.encoder.layer.0")
    assert isinstance(layer.intermediate.intermediate_act_fn, torch.nn.ReLU)
