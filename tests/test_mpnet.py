"""MPNet by itself: its bias by distance in padded and packed samples, its folder, its settings."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.mpnet.modeling_mpnet import MPNetForQuestionAnswering

from qa_lib.model import mpnet
from qa_lib.model.attention import attention_name, use_varlen_attention
from qa_lib.model.build import build_model
from qa_lib.model.load import new_model
from qa_lib.model.packed import Packed
from qa_lib.score.predict import ask, load_qa_model
from tests.material import edited, refused
from tests.tiny import checkpoint, planned

# Of samples: one token, shorter than the distances that have a bucket each, and beyond the last.
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
    found = {}
    for name, parameter in model.named_parameters():
        for own, berts in mpnet.NAMES.items():
            name = name.replace(berts, own)
        found[name] = parameter.grad
    return found


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
