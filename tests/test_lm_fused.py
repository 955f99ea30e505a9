"""A decoder's fused training pass, its loss in parts, and the plain rivals.

transformers' own model is the reference.
"""

import dataclasses
import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering, BertConfig, GPT2Config

from qa_lib.kernels import fp8
from qa_lib.kernels import linear_cross_entropy as lce
from qa_lib.model import build, fused_decoder
from qa_lib.model.build import build_model
from qa_lib.model.fused_decoder import use_causal_attention, use_fused_decoder
from qa_lib.model.fused_gelu import use_sigmoid_gelu
from qa_lib.model.hash_dropout import HashDropout, renew, use_hash_dropout
from qa_lib.peers.bert import Bert
from qa_lib.peers.gpt2 import GPT2
from qa_lib.spec.variants import VARIANTS
from qa_lib.train.compile import ChunkedLossOf, LossOf
from qa_lib.train.plain import PlainStep
from tests.kernels import (
    DEVICE,
    Handed,
    attention_with_copies,
    copy_of,
    relative,
    with_gradients,
)
from tests.material import refused
from tests.tiny import H200, TINY_CONFIG, checkpoint, planned, without_dropout


def decoder(dropout=0.0, seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=96,
        n_layer=2,
        n_embd=32,
        n_head=2,
        n_positions=24,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.update(
        dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout) | {"use_cache": False}
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="unmasked")
    model.loss_type = "ForCausalLM"
    return model.train()


def with_fused_pass(model, variant):
    use_hash_dropout(model)
    use_fused_decoder(model)
    if VARIANTS[variant].settings.attention == "triton-causal":
        use_causal_attention(model)
    return model


def losses_and_gradients(run, model, inputs):
    loss = run(**inputs)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters()
    }


def assert_same(found: dict, wanted: dict) -> None:
    """Hold a loss and gradients to others, which may have more of them."""
    torch.testing.assert_close(found.pop("loss"), wanted["loss"], rtol=1e-6, atol=0)
    shared = {name: wanted[name] for name in found}
    torch.testing.assert_close(found, shared, rtol=1e-4, atol=1e-6)


@pytest.fixture
def windows():
    ids = torch.randint(96, (3, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("variant", ["L-norm", "L-attention"])
def test_the_fused_pass_is_transformers_own(windows, variant):
    native, fused = decoder(), with_fused_pass(decoder(), variant)
    use_sigmoid_gelu(fused)
    wanted = losses_and_gradients(LossOf(native), native, windows)
    found = losses_and_gradients(LossOf(fused), fused, windows)
    assert_same(found, wanted)
    native.eval()
    fused.eval()
    assert fused.state_dict().keys() >= native.state_dict().keys()
    torch.testing.assert_close(
        fused(windows["input_ids"]).logits, native(windows["input_ids"]).logits
    )


def test_the_loss_in_parts_is_transformers_own(windows):
    native = decoder()
    in_parts = decoder()
    wanted = losses_and_gradients(LossOf(native), native, windows)
    found = losses_and_gradients(ChunkedLossOf(in_parts), in_parts, windows)
    assert_same(found, wanted)


@pytest.mark.parametrize("variant", ["L-norm", "L-attention"])
def test_the_fused_pass_drops_out_and_by_new_bits_of_another_seed(windows, variant):
    fused = with_fused_pass(decoder(0.5), variant)
    losses = []
    for added in (0, 0, 1):
        for module in fused.modules():
            if hasattr(module, "seed"):
                module.seed += added
        torch.manual_seed(0)
        losses.append(LossOf(fused)(**windows).item())
    assert losses[0] == losses[1] != losses[2]


# Linear layers in 8 bits.


def in_8_bits(variant, dropout=0.25):
    """A decoder in bf16 as a variant has it, with equal weights and seeds in each call."""
    model = decoder(dropout)
    build._transform(model, VARIANTS[variant].settings)
    model = model.bfloat16()
    torch.manual_seed(5)
    renew(model)
    return model


@pytest.fixture
def copies_as_on_a_gpu(monkeypatch):
    """Norms and attention whose copies in 8 bits are made, too, by plain PyTorch."""
    plain_norm = fused_decoder.fused_add_norm
    attend = attention_with_copies(fused_decoder.varlen_attention_and_copy)

    def norm(x, *rest, placeholder, copies, grad8_alone, **words):
        x = x if placeholder is None else Handed.apply(x, placeholder, grad8_alone)
        total, output, _ = plain_norm(x, *rest, **words)
        return total, output, copy_of(output) if copies else None

    monkeypatch.setattr(fused_decoder, "fused_add_norm", norm)
    monkeypatch.setattr(fused_decoder, "varlen_attention_and_copy", attend)


@pytest.mark.parametrize("variant", ["L-fp8-uncompiled", "L-fp8-all"])
def test_operands_that_a_decoder_hands_on_are_those_that_a_cast_would_make(
    variant, windows, request
):
    by_casts = losses_and_gradients(LossOf(model := in_8_bits(variant)), model, windows)
    request.getfixturevalue("copies_as_on_a_gpu")
    found = losses_and_gradients(LossOf(model := in_8_bits(variant)), model, windows)
    torch.testing.assert_close(found, by_casts, rtol=0, atol=0)


def test_a_decoder_in_8_bits_casts_its_first_layers_input_alone(
    windows, copies_as_on_a_gpu, monkeypatch
):
    """GELU casts on a CPU, and its kernel writes 8 bits by itself; weights are cast by others."""
    model = in_8_bits("L-fp8-all")
    noted = []
    for name in ("in_e4m3", "in_e5m2"):
        cast = getattr(fp8, name)

        def noting(x, factor, name=name, cast=cast):
            if factor != fp8.WEIGHT and x.shape[-1] != 4 * model.config.n_embd:
                noted.append(name)
            return cast(x, factor)

        monkeypatch.setattr(fp8, name, noting)
    losses_and_gradients(LossOf(model), model, windows)
    assert noted == ["in_e4m3"]


def test_a_decoder_whose_linear_layers_all_have_8_bits_is_close_to_one_with_none(windows):
    found = losses_and_gradients(LossOf(model := in_8_bits("L-fp8-all")), model, windows)
    native = losses_and_gradients(LossOf(model := in_8_bits("L-moments")), model, windows)
    assert None not in found.values()
    in_layers = [name for name in native if ".c_" in name and name.endswith("weight")]
    errors = [relative(found[name], native[name]) for name in in_layers]
    assert len(errors) == 8
    assert 0 < max(errors) < 0.2
    torch.testing.assert_close(found["loss"], native["loss"], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attention": "eager"}, "norms 'fused' of a decoder take attention 'sdpa' or"),
        ({"parallel": "zero1-overlap"}, "norms 'fused' of a decoder take parallel 'none', "),
        ({"trainable": "lora-all"}, "adapters of a decoder take norms 'native' and gelu 'exact'"),
    ],
)
def test_what_calls_or_adapts_layers_one_by_one_is_refused_with_fused_ones(change, why):
    spec = planned("L-norm", "lm-smoke", settings={"precision": "bf16"} | change)
    refused(f"L-norm does not fit gpt2: {why}", build_model, spec)


@pytest.mark.triton
@pytest.mark.parametrize(("tokens", "words", "block"), [(5, 7, 16), (4, 64, 16), (6, 100, 32)])
def test_the_kernel_leaves_the_gradient_in_place_of_the_logits(tokens, words, block):
    torch.manual_seed(0)
    targets = torch.randint(words, (tokens,), device=DEVICE)
    targets[::3] = lce.IGNORED
    targets[1], targets[-1] = 0, words - 1
    logits = 3 * torch.randn(tokens, words, device=DEVICE)
    wide = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        wide, targets, ignore_index=lce.IGNORED, reduction="none"
    )
    (wanted,) = torch.autograd.grad(loss.sum() * 0.25, wide)
    losses, scale = torch.empty(tokens, device=DEVICE), torch.tensor(0.25, device=DEVICE)
    scaled = torch.empty_like(logits)  # in place of what is in 8-bit floats
    lce.loss_kernel[(tokens,)](
        logits,
        scaled,
        targets,
        scale,
        losses,
        WORDS=words,
        IGNORED=lce.IGNORED,
        FACTOR=8.0,
        BLOCK=block,
        num_warps=1,
    )
    torch.testing.assert_close(losses.double(), loss.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scaled * 0.25, 8 * logits, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(
    DEVICE.type == "cpu" or torch.cuda.get_device_capability() < (8, 9), reason="no GPU with 8 bits"
)
def test_in_8_bits_the_small_terms_of_a_hidden_states_gradient_are_not_lost():
    torch.manual_seed(0)
    weight = torch.randn(16384, 64, device=DEVICE).mul(0.02).add(0.01).bfloat16()
    hidden, targets = (
        torch.randn(256, 64, device=DEVICE).bfloat16() / 64,
        torch.randint(16384, (256,), device=DEVICE),
    )

    def mean_gradient(in_fp8):
        _, grad = with_gradients(
            lambda x: lce.linear_cross_entropy(x, weight, targets, in_fp8), [hidden], None
        )
        return grad.float().mean(0)

    assert relative(mean_gradient(True), mean_gradient(False)) < 0.2  # of fast sums it is about 1


@torch.no_grad()
def copied(pairs):
    for to, source in pairs:
        to.copy_(source)


def round_trip(peer, native, like):
    """Copy a rival's weights into a second model: it must be the first again."""
    copied((other, own) for own, other in peer.pairs(like))
    torch.testing.assert_close(like.state_dict(), native.state_dict(), rtol=0, atol=0)


def test_the_plain_gpt2_is_transformers_own(windows):
    native = decoder()
    peer = GPT2(native, 0.0)
    copied(peer.pairs(native))
    assert peer(**windows).item() == pytest.approx(native(**windows).loss.item(), rel=1e-5)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in native.parameters())
    round_trip(peer, native, decoder(seed=1))


def test_a_rivals_step_takes_the_mean_of_its_micro_batches(windows, monkeypatch):
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *_: None
    )  # it would hide a factor
    peer = GPT2(decoder(), 0.0)
    wanted = losses_and_gradients(peer, peer, windows)
    peer.zero_grad()
    step = PlainStep(peer, "fp32", "none", rate=0.0)
    monkeypatch.setattr(step.optimizer, "zero_grad", lambda **_: None)
    parts = [{name: ids[row : row + 1] for name, ids in windows.items()} for row in range(3)]
    found = {"loss": step(parts)} | {
        name: parameter.grad for name, parameter in peer.named_parameters()
    }
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_rivals_gradients_of_several_micro_batches_have_memory_of_their_own(windows):
    """No replay of a CUDA graph writes over it; a micro-batch gives its own back each step."""
    peer = GPT2(decoder(), 0.0)
    step = PlainStep(peer, "fp32", "none", rate=0.0)
    step([windows])
    assert all(weight.grad is None for weight in peer.parameters())
    step([windows, windows])
    kept = [weight.grad.data_ptr() for weight in peer.parameters()]
    step([windows, windows])
    assert [weight.grad.data_ptr() for weight in peer.parameters()] == kept


def reader(seed=0):
    torch.manual_seed(seed)
    return without_dropout(
        AutoModelForQuestionAnswering.from_config(BertConfig(**TINY_CONFIG, vocab_size=50))
    )


def test_the_plain_bert_is_transformers_own_one_sample_at_a_time():
    native = reader()
    peer = Bert(native, 0.0, longest=9)
    copied(peer.pairs(native))
    lengths = torch.tensor([9, 5, 7])
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids, types = torch.randint(50, (1, 21)), torch.randint(2, (1, 21))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts, stops = torch.tensor([0, 4, 6]), torch.tensor([8, 0, 6])
    found = peer(ids, positions, types, ends, starts, stops)
    one_by_one = []
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        own = {"start_positions": starts[i : i + 1], "end_positions": stops[i : i + 1]}
        one_by_one.append(native(ids[:, begin:end], token_type_ids=types[:, begin:end], **own).loss)
    torch.testing.assert_close(found, torch.stack(one_by_one).mean(), rtol=1e-5, atol=1e-6)
    round_trip(peer, native, reader(1))


def test_a_width_of_heads_that_our_kernel_does_not_take_is_told():
    model = decoder()
    model.config.n_head = 1
    model.config.n_embd = 48
    said = "attention 'triton-causal' takes heads as wide as a power of 2, 16 or more, and not 48"
    refused(said, use_causal_attention, model)


def test_a_model_without_a_rival_is_told(tmp_path):
    spec = dataclasses.replace(
        planned("E-plain", machine=H200), model_source=checkpoint("roberta", tmp_path)
    )
    refused("roberta: the rivals are a BERT, an MPNet and a GPT-2", build_model, spec)


# What surrounds the kernel of the loss, with plain PyTorch in its place.


def loss_in_pytorch(kernel, grid, /, logits, grads8, targets, scale, losses, **words) -> None:
    """Do what the kernel does, with the arguments that it would get."""
    assert grid == (len(logits),) == (len(losses),) == (len(targets),)
    assert words["WORDS"] == logits.shape[1]
    counts = (targets != words["IGNORED"]).float()[:, None]
    wide = logits.float()
    chosen = targets.clamp(min=0)[:, None]
    losses.copy_((wide.logsumexp(1) - wide.gather(1, chosen)[:, 0]) * counts[:, 0])
    grads = wide.softmax(1).scatter_add(1, chosen, -torch.ones(chosen.shape)) * counts
    logits.copy_(grads * scale)
    if words["FACTOR"]:
        grads8[: len(logits)].copy_((grads * words["FACTOR"]).to(grads8.dtype))


@pytest.fixture
def kernel_in_pytorch(monkeypatch):
    """Also in place of products whose result is of a wider type, which a CPU has not."""
    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a, b, out_dtype=None, **words):
        return mm(a, b, **words) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

    def wide_addmm(total, a, b, out_dtype, out):
        assert out is total
        return addmm(total, a.to(out_dtype), b.to(out_dtype), out=out)

    monkeypatch.setattr(lce, "launch", loss_in_pytorch)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)


@pytest.mark.parametrize("part", [4, 100])
@pytest.mark.parametrize(
    ("in_fp8", "dtype", "error"),
    [(False, torch.float32, 1e-5), (False, torch.bfloat16, 0.02), (True, torch.bfloat16, 0.1)],
)
def test_a_loss_in_parts_has_the_value_and_gradients_of_the_whole(
    in_fp8, dtype, error, part, kernel_in_pytorch, monkeypatch
):
    monkeypatch.setattr(lce, "PART", part)
    torch.manual_seed(0)
    hidden = torch.randn(10, 16).to(dtype)
    weight = torch.randn(32, 16).to(dtype)
    targets = torch.randint(32, (10,))
    targets[2] = targets[9] = lce.IGNORED

    def by_parts(hidden, weight):
        hidden8 = lce.in_e4m3(hidden.detach(), lce.ACTIVATION) if in_fp8 else None
        return lce._loss(hidden, weight, targets, hidden8)[0]

    grad = torch.tensor(3.0)
    results = with_gradients(by_parts, [hidden, weight], grad)
    assert [tensor.dtype for tensor in results] == [torch.float32, dtype, dtype]
    wide = [hidden.float(), weight.float()]
    expected = with_gradients(lambda *inputs: lce.reference(*inputs, targets), wide, grad)
    for found, wanted in zip(results, expected, strict=True):
        assert relative(found, wanted) < error


def test_the_head_in_8_bits_adds_up_the_gradient_of_hidden_states_without_fast_sums(
    kernel_in_pytorch, monkeypatch
):
    fast_sums = []
    product = lce.scaled_mm

    def noting(*words, fast=True, **more):
        fast_sums.append(fast)
        return product(*words, fast=fast, **more)

    monkeypatch.setattr(lce, "scaled_mm", noting)
    hidden, weight = torch.randn(16, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    hidden8 = lce.in_e4m3(hidden, lce.ACTIVATION)
    lce._loss(hidden, weight, torch.zeros(16, dtype=torch.int64), hidden8)
    assert fast_sums == [True, False], "the logits, and the gradient"


@pytest.mark.parametrize("in_fp8", [False, True])
def test_on_a_cpu_the_loss_is_plain_whether_in_8_bits_or_not(in_fp8):
    hidden, weight = torch.randn(6, 8), torch.randn(10, 8)
    targets = torch.tensor([0, 9, lce.IGNORED, 3, 4, lce.IGNORED])
    rows = (hidden @ weight.T).log_softmax(1)
    expected = -(rows[0, 0] + rows[1, 9] + rows[3, 3] + rows[4, 4]) / 4
    torch.testing.assert_close(lce.linear_cross_entropy(hidden, weight, targets, in_fp8), expected)


# Rates of dropout.


@pytest.mark.parametrize("variant", ["L-norm", "L-attention"])
@pytest.mark.parametrize("rate", ["resid_pdrop", "embd_pdrop", "attn_pdrop"])
def test_each_dropout_of_the_fused_pass_has_its_own_rate(windows, variant, rate):
    """The others have none here: the loss changes if this one drops anything."""
    fused = with_fused_pass(decoder(), variant)
    without = LossOf(fused)(**windows)
    config = fused.config.to_dict() | {rate: 0.3}
    native = AutoModelForCausalLM.from_config(GPT2Config(**config), attn_implementation="unmasked")
    native.loss_type = "ForCausalLM"
    native.load_state_dict(fused.state_dict(), strict=False)
    dropping = with_fused_pass(native.train(), variant)
    torch.manual_seed(0)
    renew(dropping)
    assert abs(LossOf(dropping)(**windows) - without) > 1e-5
    rates = {m.p for m in dropping.modules() if isinstance(m, HashDropout | torch.nn.Dropout)}
    assert rates == {0.0, 0.3}


DROPOUTS = ["drop", "h.0.attn.resid_dropout", "h.0.mlp.dropout", "h.1.mlp.dropout"]


@pytest.mark.parametrize("name", DROPOUTS)
def test_each_dropout_of_the_fused_pass_drops_by_itself(windows, name):
    fused = with_fused_pass(decoder(), "L-norm")
    without = LossOf(fused)(**windows)
    fused.transformer.get_submodule(name).p = 0.3
    assert abs(LossOf(fused)(**windows) - without) > 1e-5
