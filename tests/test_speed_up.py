"""A sped-up model is the same model: its training, its checkpoints, and how it may be called."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    BertForSequenceClassification,
    BertModel,
    BertPreTrainedModel,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from qa_lib.model.hash_dropout import HashDropout
from qa_lib.model.packed_attention import quickest_kernel
from qa_lib.own import speed_up as sped_up
from qa_lib.own.graphed_step import GraphedStep
from qa_lib.own.packing import PackedCollator, pack
from qa_lib.own.speed_up import KINDS, speed_up
from qa_lib.own.trainer import FastTrainer
from qa_lib.train.master_adamw import MasterAdamW
from tests.conftest import slow
from tests.kernels import DEVICE
from tests.material import refused
from tests.own import HEADS, SIZES, drawn_samples, padded_batch, quiet, tiny_model
from tests.pairs import combinations

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8  # each of four batches twice
VALUES = {
    "kind": KINDS,
    "head": tuple(HEADS),
    "layout": ("padded", "packed"),
    "checkpointing": (False, True),
}
COMBINATIONS = combinations(VALUES, lambda one, other: False)


def similarity(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A loss of mean-pooled embeddings: how unlike the samples' neighbours are."""
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return 1 - F.cosine_similarity(pooled[1:], pooled[:-1]).mean()


def loss_of(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    if "loss" in output:
        return output.loss
    return similarity(output.last_hidden_state, batch["attention_mask"])


def checkpointed(model, reentrant: bool = False):
    """The model, whose layers are computed again in the backward pass."""
    # transformers 5.23 renames it, and warns of the old name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    return model


def loss_by_sample(model, samples: list[dict]) -> torch.Tensor:
    """The mean loss of questions that are padded by nothing."""
    return torch.stack([model(**padded_batch([sample])).loss for sample in samples]).mean()


def trained(model, losses) -> list[float]:
    """Train a model on what `losses` yields for it; return each step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    seen = []
    for loss in losses(model.train()):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda case: "-".join(map(str, case.values())))
def test_eight_steps_are_those_of_the_plain_model(case):
    samples = drawn_samples(case["head"])
    groups = [samples[begin : begin + 6] for begin in range(0, 24, 6)]
    plain = tiny_model(case["kind"], case["head"])
    model = speed_up(tiny_model(case["kind"], case["head"]), say=quiet)
    if case["checkpointing"]:
        checkpointed(model)
    collate = PackedCollator() if case["layout"] == "packed" else padded_batch

    def quick_losses(model):
        for step in range(STEPS):
            yield loss_of(model, collate(groups[step % 4]))

    def plain_losses(model):
        for step in range(STEPS):
            group = groups[step % 4]
            if case["head"] == "questions" and case["layout"] == "packed":
                yield loss_by_sample(model, group)
            else:
                yield loss_of(model, padded_batch(group))

    expected = trained(plain, plain_losses)
    assert trained(model, quick_losses) == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[-4]) > 1e-3, "it has learnt something"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_packed_sequences_add_up_to_those_of_one_batch(kind):
    """The lines of one's own loop: packed sequences have as many samples, and so equal shares."""
    samples = drawn_samples("sequences")
    plain = tiny_model(kind).train()
    plain(**padded_batch(samples)).loss.backward()
    model = speed_up(tiny_model(kind), say=quiet).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = pack(samples, samples=6, drop_last=True, say=quiet)

    accumulation = 4
    loader = DataLoader(rows, batch_size=None, collate_fn=PackedCollator())
    for number, batch in enumerate(loader, 1):
        loss = model(**batch).loss / accumulation
        loss.backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()

    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), atol=1e-6, rtol=1e-5)
    start = tiny_model(kind).state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_gives_the_logits_of_padded_batches_in_the_order_of_the_samples(kind):
    """The lines of one's own loop."""
    samples = drawn_samples("sequences", 21)
    expected = tiny_model(kind)(**padded_batch(samples)).logits
    model = speed_up(tiny_model(kind, drops=True), say=quiet).train()

    model.eval()
    logits = []
    with torch.no_grad():
        for batch in DataLoader(samples, batch_size=8, collate_fn=PackedCollator()):
            logits.append(model(**batch).logits)
    logits = torch.cat(logits)  # [samples, labels]
    model.train()

    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", HEADS)
def test_a_checkpoint_is_that_of_transformers(kind, head, tmp_path):
    plain = tiny_model(kind, head)
    model = speed_up(tiny_model(kind, head), say=quiet)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    batch = padded_batch(drawn_samples("none", 4))
    expected = model(**batch)[0]
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path)
    again, loading = HEADS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values())
    assert again.config.architectures == [type(plain).__name__]
    torch.testing.assert_close(again.eval()(**batch)[0], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_the_hub_gets_the_checkpoint_of_transformers(kind, monkeypatch):
    """The upload is replaced by a look at the files that would go up."""
    hub = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: hub)
    monkeypatch.setattr(
        "transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: ModelCard("")
    )
    uploaded = {}

    def upload(_model, folder, _name, **_options):
        uploaded["files"] = {path.name for path in Path(folder).iterdir()}
        uploaded["model"] = HEADS["sequences"].from_pretrained(folder, output_loading_info=True)

    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    plain = tiny_model(kind)
    speed_up(tiny_model(kind), say=quiet).push_to_hub("someone/theirs")
    assert uploaded["files"] == {"config.json", "model.safetensors", "README.md"}
    again, loading = uploaded["model"]
    assert not any(loading.values())
    assert type(again) is type(plain)
    for name, value in again.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("bert", "bert.encoder.layer.0.attention.self.key.weight"),
        ("mpnet", "mpnet.encoder.layer.0.attention.attn.k.weight"),
    ],
)
def test_a_state_of_the_plain_model_is_loaded(kind, key):
    plain = tiny_model(kind, drops=True)
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    model = speed_up(tiny_model(kind, drops=True), say=quiet)
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    del state[key]
    with pytest.raises(RuntimeError, match=r"layer\.0\.attention\.self\.qkv\.weight"):
        model.load_state_dict(state)


# Dropout.


@pytest.fixture
def model():
    return speed_up(tiny_model(drops=True), say=quiet).train()


@pytest.fixture
def batch():
    return padded_batch(drawn_samples("sequences", 5))


@pytest.mark.parametrize("collate", [padded_batch, PackedCollator()], ids=["padded", "packed"])
def test_each_call_in_training_drops_otherwise(model, collate):
    batch = collate(drawn_samples("sequences", 5))
    outputs = [model(**batch).logits for _ in range(3)]
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])


def test_equal_seeds_drop_alike(model, batch):
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(model(**batch).logits)
    assert torch.equal(*outputs)


def test_evaluation_drops_nothing_and_draws_nothing(model, batch):
    model.eval()
    before = torch.random.get_rng_state()
    assert torch.equal(model(**batch).logits, model(**batch).logits)
    assert torch.equal(torch.random.get_rng_state(), before)


DROPPED = combinations(
    {
        "kind": ("bert", "mpnet"),  # whose bias by distance has a gradient of its own
        "layout": ("padded", "packed"),
        "checkpointing": (None, False, True),  # True is by the reentrant way
    },
    lambda one, other: False,
)


@pytest.mark.parametrize("case", DROPPED, ids=lambda case: "-".join(map(str, case.values())))
def test_gradients_are_of_what_was_dropped_in_two_calls_before_a_backward_pass(case):
    """The derivative along a direction is the gradient's product with it: masks are the same."""
    collate = PackedCollator() if case["layout"] == "packed" else padded_batch
    checkpointing = case["checkpointing"]
    model = speed_up(tiny_model(case["kind"], drops=True), say=quiet).double().train()
    if checkpointing is not None:
        checkpointed(model, reentrant=checkpointing)
    one, other = (collate(drawn_samples("sequences", count)) for count in (5, 4))

    def loss():
        torch.manual_seed(1)
        return model(**one).loss + model(**other).loss ** 2

    if checkpointing:  # which wants an input that has a gradient
        model.enable_input_require_grads()
    loss().backward()
    parameters = [p for p in model.parameters() if p.grad is not None]
    torch.manual_seed(5)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, direction, strict=True))
    values = []
    with torch.no_grad():
        for factor in (1e-6, -2e-6):
            for parameter, along in zip(parameters, direction, strict=True):
                parameter.add_(along, alpha=factor)
            values.append(loss())
    assert ((values[0] - values[1]) / 2e-6).item() == pytest.approx(slope.item(), rel=1e-6)


# Ways to call it.


def test_a_copy_draws_for_itself(model, batch):
    twin = copy.deepcopy(model)
    twin(**batch)
    theirs = {id(module) for module in model.modules()}
    for module in twin.modules():
        for dropout in getattr(module, "layer_dropouts", []):
            assert id(dropout) not in theirs
    seeds = [module.seed.item() for module in twin.modules() if isinstance(module, HashDropout)]
    assert len(set(seeds)) == len(seeds) == 7


def test_mpnets_hidden_states_and_tuples_are_those_of_transformers(batch):
    plain = tiny_model("mpnet", "none")
    model = speed_up(tiny_model("mpnet", "none"), say=quiet)
    inputs = {
        "inputs_embeds": plain.get_input_embeddings()(batch["input_ids"]),
        "attention_mask": batch["attention_mask"],
        "output_hidden_states": True,
        "return_dict": False,
    }
    hidden, pooled, between = model(**inputs)
    expected_hidden, expected_pooled, expected_between = plain(**inputs)
    is_token = batch["attention_mask"] == 1
    torch.testing.assert_close(pooled, expected_pooled)
    for found, expected in zip(
        (hidden, *between), (expected_hidden, *expected_between), strict=True
    ):
        torch.testing.assert_close(found[is_token], expected[is_token])


def test_an_mpnet_has_the_activation_and_the_norms_of_its_configuration(batch):
    changes = {"layer_norm_eps": 0.1, "hidden_act": "relu"}
    plain = tiny_model("mpnet", "none", **changes)
    model = speed_up(tiny_model("mpnet", "none", **changes), say=quiet)
    is_token = batch["attention_mask"] == 1
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = plain(**inputs).last_hidden_state
    torch.testing.assert_close(model(**inputs).last_hidden_state[is_token], expected[is_token])


def test_an_mpnets_layers_drop_out_at_the_rates_of_its_configuration():
    rates = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    model = speed_up(tiny_model("mpnet", "none", drops=True, **rates), say=quiet)
    for layer in model.encoder.layer:
        assert layer.attention.self.dropout.p == 0.2
        assert layer.attention.output.dropout.p == layer.output.dropout.p == 0.3


def test_an_mpnet_returns_what_its_configuration_says_where_the_call_does_not(batch):
    model = speed_up(tiny_model("mpnet", "none"), say=quiet)
    assert model(input_ids=batch["input_ids"]).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(input_ids=batch["input_ids"]).hidden_states) == 1 + 2
    model.config.return_dict = False
    assert isinstance(model(input_ids=batch["input_ids"]), tuple)


def test_mpnets_weights_of_attention_are_refused(batch):
    model = speed_up(tiny_model("mpnet", "none"), say=quiet)
    refused(
        "output_attentions: the kernels of attention here return no weights",
        model,
        input_ids=batch["input_ids"],
        output_attentions=True,
    )
    model.config._output_attentions = True
    refused("output_attentions: the kernels", model, input_ids=batch["input_ids"])
    model(input_ids=batch["input_ids"], output_attentions=False)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "distilbert"])
def test_weights_of_attention_are_refused_where_projections_are_fused(kind, batch):
    model = speed_up(tiny_model(kind, "none", attn_implementation="eager"), say=quiet)
    refused("output_attentions: the kernels", model, **batch, output_attentions=True)
    model(**batch)
    model.config._output_attentions = True
    refused("output_attentions: the kernels", model, **batch)


def test_an_encoder_within_another_module_is_named():
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = tiny_model(head="none")

    refused(r"speed_up\(model.encoder\)", speed_up, Pooled())


def test_an_mpnet_of_another_padding_token_counts_positions_as_transformers_does():
    """transformers takes token 1 for the padding, whatever the configuration says."""
    samples = drawn_samples("none", 5)
    plain = tiny_model("mpnet", "none", pad_token_id=0)
    model = speed_up(tiny_model("mpnet", "none", pad_token_id=0), say=quiet)
    batch = PackedCollator()(samples)
    is_token = batch["attention_mask"] == 1
    expected = plain(**padded_batch(samples)).last_hidden_state
    torch.testing.assert_close(model(**batch).last_hidden_state[is_token], expected[is_token])


def test_autocast_is_near_to_fp32(batch):
    model = speed_up(tiny_model(), say=quiet).train()
    expected = model(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=0.01)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("collate", [padded_batch, PackedCollator()], ids=["padded", "packed"])
def test_bf16_weights_are_near_to_fp32(collate):
    batch = collate(drawn_samples("sequences", 5))
    model = speed_up(tiny_model(), say=quiet)
    expected = model(**batch).logits
    torch.testing.assert_close(model.bfloat16()(**batch).logits, expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["questions", "sequences", "tokens"])
def test_logits_and_losses_are_in_fp32_with_weights_in_bf16(kind, head):
    batch = PackedCollator()(drawn_samples(head, 5))
    output = speed_up(tiny_model(kind, head), say=quiet).bfloat16()(**batch)
    logits = output.start_logits if head == "questions" else output.logits
    assert logits.dtype == torch.float32
    assert output.loss.dtype == torch.float32
    output.loss.backward()


def test_a_class_of_ones_own_hands_its_logits_on_as_they_are(batch):
    class Scored(BertForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            self.scale = torch.nn.Linear(2, 1)

        def forward(self, labels=None, **kwargs):
            return self.scale(super().forward(**kwargs).logits)

    model = speed_up(Scored(tiny_model().config), say=quiet).bfloat16()
    assert model(**batch).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        slow("bert", padded_batch, id="padded"),
        pytest.param("bert", PackedCollator(), id="packed"),
        slow("mpnet", padded_batch, id="mpnet-padded"),
        slow("mpnet", PackedCollator(), id="mpnet-packed"),
    ],
)
def test_a_compiled_model_is_the_same_without_dropout_and_drops_otherwise_in_each_call(
    kind, collate
):
    batch = collate(drawn_samples("sequences", 5))
    model = speed_up(tiny_model(kind, drops=True, num_hidden_layers=1), say=quiet)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)
    model.train()
    outputs = [compiled(**batch) for _ in range(3)]
    assert len({output.loss.item() for output in outputs}) == 3
    outputs[0].loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    destroy_process_group()


def test_under_ddp_it_is_the_same(alone, batch):
    model = speed_up(tiny_model(), say=quiet).train()
    twin = copy.deepcopy(model)
    model(**batch).loss.backward()
    DistributedDataParallel(twin)(**batch).loss.backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_new_is_on_the_device_of_the_model(kind):
    """A kernel cannot read a seed in the CPU's memory, and models are sped up where they train."""
    there = torch.device("meta")  # a device that every machine has
    model = speed_up(tiny_model(kind, hidden_size=64, drops=True).to(there), say=quiet)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert any(name.endswith("seed") for name in tensors) or kind == "modernbert"
    assert [name for name, tensor in tensors.items() if tensor.device != there] == []


@pytest.mark.triton
@pytest.mark.parametrize("collate", [padded_batch, PackedCollator()], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_sped_up_on_its_device_is_near_to_the_plain_one(kind, collate):
    """Where there is a GPU, this runs our kernels there, for heads that they take."""
    samples = drawn_samples("sequences", 5)
    expected = tiny_model(kind, hidden_size=64).train()(**padded_batch(samples)).loss.item()
    model = speed_up(tiny_model(kind, hidden_size=64).to(DEVICE), say=quiet).train()
    batch = {name: tensor.to(DEVICE) for name, tensor in collate(samples).items()}
    with torch.autocast(DEVICE.type, torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=0.01)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_layers_that_were_to_be_computed_again_still_are(kind, batch):
    model = tiny_model(kind).train()
    checkpointed(model, reentrant=False)
    speed_up(model, say=quiet)
    calls = []
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    layers[0].attention.register_forward_hook(lambda *_: calls.append(None))
    model(**batch).loss.backward()
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_frozen_parts_stay_frozen(kind):
    model = tiny_model(kind)
    model.base_model.encoder.layer[0].requires_grad_(False)
    speed_up(model, say=quiet)
    assert not any(p.requires_grad for p in model.base_model.encoder.layer[0].parameters())
    assert all(p.requires_grad for p in model.base_model.encoder.layer[1].parameters())


@pytest.mark.parametrize(("kind", "kernel"), [("bert", "flash"), ("mpnet", "block-diagonal")])
def test_flash_attention_gets_no_bias_by_distance(kind, kernel, monkeypatch):
    """Neither has heads that our own kernel takes, and the query is on a GPU that has both."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9, minor=0)
    )
    query = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda")
    asked = []

    def asks(module, _query, segments):
        asked.append(quickest_kernel(module, query, segments))
        return "block-diagonal"

    monkeypatch.setattr("qa_lib.model.packed_attention.quickest_kernel", asks)
    model = speed_up(tiny_model(kind, hidden_size=16), say=quiet)
    model(**PackedCollator()(drawn_samples("sequences", 3)))
    assert asked == [kernel] * 2


# Optimizers.

MADE_BEFORE = "the optimizer was made before speed_up, which replaced {} of its parameters: make it"


def stepped(optimizer, model) -> None:
    """Do a step on a batch of sequences."""
    model(**padded_batch(drawn_samples("sequences", 5))).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, MasterAdamW])
def test_an_optimizer_that_was_made_before_is_refused_or_trains_all_that_there_is(kind, make):
    """Each of two layers has three projections of a weight and a bias, of which two are new."""
    model = tiny_model(kind).train()
    if make is MasterAdamW:
        model.to(torch.bfloat16)
    optimizer = make(model.parameters(), lr=0.1)
    speed_up(model, say=quiet)
    if kind == "modernbert":
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {
            id(p) for p in model.parameters()
        }
        stepped(optimizer, model)
    else:
        refused(MADE_BEFORE.format(2 * 3 * 2), stepped, optimizer, model)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_of_the_head_alone_may_be_made_before(make):
    model = tiny_model().train()
    optimizer = make(model.classifier.parameters(), lr=0.1)
    speed_up(model, say=quiet)
    before = model.classifier.weight.detach().clone()
    stepped(optimizer, model)
    assert not torch.equal(model.classifier.weight, before)


def test_a_step_of_one_launch_refuses_an_optimizer_that_was_made_before():
    model = tiny_model().train()
    optimizer = torch.optim.AdamW(model.parameters())
    speed_up(model, say=quiet)
    step = GraphedStep(model, optimizer, capture=False)
    refused(MADE_BEFORE.format(12), step, padded_batch(drawn_samples("sequences", 5)))


def test_a_trainer_refuses_an_optimizer_that_was_made_before(tmp_path):
    """There it is within accelerate's."""
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = FastTrainer(
        model,
        TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, disable_tqdm=True),
        train_dataset=drawn_samples("sequences", 8),
        optimizers=(optimizer, scheduler),
        say=quiet,
    )
    refused(MADE_BEFORE.format(12), trainer.train)


def test_a_compiled_step_refuses_an_optimizer_that_was_made_before():
    model = tiny_model().train()
    optimizer = torch.optim.SGD(model.parameters())
    speed_up(model, say=quiet)
    compiled = torch.compile(optimizer.step, backend="eager")
    refused(MADE_BEFORE.format(12), compiled)


# What is said.


def test_a_line_says_what_was_taken():
    said = []
    speed_up(tiny_model(), say=said.append)
    assert said == [
        "BertForSequenceClassification: fused QKV, hash dropout, fused norms, fused GELU, "
        "packed sequences"
    ]


def test_the_line_says_what_was_not_taken_and_why():
    said = []
    speed_up(tiny_model("modernbert"), say=said.append)
    (line,) = said
    assert line.startswith("ModernBertForSequenceClassification: packed sequences; ")
    assert "; not fused QKV: its query, key and value are one linear layer already" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "relu"}, "not fused GELU: the activation is ReLU"),
        ({"attn_implementation": "eager"}, "load the model with attn_implementation='sdpa'"),
    ],
)
def test_what_a_configuration_has_not_is_left_out(changes, said, batch):
    plain = tiny_model(**changes)
    expected = plain(**batch).logits
    lines = []
    model = speed_up(plain, say=lines.append)
    assert said in lines[0]
    torch.testing.assert_close(model(**batch).logits, expected)


def test_projections_of_which_one_is_frozen_are_not_fused(batch):
    model = tiny_model()
    model.bert.encoder.layer[1].attention.self.query.requires_grad_(False)
    said = []
    speed_up(model, say=said.append)
    assert "not fused QKV: some of query, key and value are frozen and others are not" in said[0]


@pytest.mark.parametrize(
    ("capability", "triton", "why"),
    [
        ((7, 0), True, "the kernels are for compute capability 7.5 and newer"),
        ((7, 5), False, "the kernels need the package triton"),
        ((7, 5), True, None),
    ],
)
def test_a_gpu_has_the_kernels_by_its_capability_and_with_triton(
    capability, triton, why, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(sped_up, "find_spec", lambda name: triton or None)
    assert sped_up._card_lacks() == why


def test_a_model_with_its_weights_in_a_language_model_head_is_taken(batch):
    config = AutoConfig.for_model("bert", **SIZES)
    plain = AutoModelForMaskedLM.from_config(config).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = plain(**inputs).logits
    torch.testing.assert_close(speed_up(plain, say=quiet)(**inputs).logits, expected)


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_packed_choices_are_refused(kind):
    model = AutoModelForMultipleChoice.from_config(AutoConfig.for_model(kind, **SIZES))
    speed_up(model, say=quiet)
    batch = PackedCollator()(drawn_samples("sequences", 4))
    refused("takes no packed sequences: a head for multiple choice", model, **batch)


def with_adapters():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_model(), LoraConfig(target_modules=["query"]))


def decoder():
    return tiny_model(is_decoder=True)


def quantized():
    model = tiny_model()
    model.is_quantized = True  # as from_pretrained(quantization_config=...) says
    return model


REFUSED = [
    (with_adapters, "speed_up takes a model without adapters"),
    (lambda: speed_up(tiny_model(), say=quiet), "has been sped up already: call speed_up once"),
    (decoder, "is a decoder, by is_decoder in its configuration, and speed_up takes encoders"),
    (quantized, "the weights of this BertForSequenceClassification are quantized"),
    (lambda: torch.nn.Linear(2, 2), "give a model of transformers, before torch.compile or DDP"),
    (
        lambda: HEADS["none"].from_config(AutoConfig.for_model("albert", **SIZES)),
        "AlbertModel: speed_up takes bert, roberta, .*, and not albert$",
    ),
    (
        lambda: HEADS["none"].from_config(AutoConfig.for_model("deberta-v2", **SIZES)),
        r"and not deberta-v2 \(its disentangled attention",
    ),
]


def test_adapters_in_the_fused_layer_are_refused(batch):
    from peft import LoraConfig, get_peft_model

    model = speed_up(tiny_model(), say=quiet)
    adapted = get_peft_model(model, LoraConfig(target_modules=["qkv"]))
    refused(
        r"was replaced by a peft\..*: adapters and quantization are for a model that was not",
        adapted,
        **batch,
    )


@pytest.mark.parametrize(("make", "said"), REFUSED)
def test_what_cannot_be_sped_up_is_refused_in_one_line(make, said):
    refused(said, speed_up, make())


class OwnHead(BertPreTrainedModel):
    """A classifier as people write it, which names what it takes."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config)
        self.classifier = torch.nn.Linear(config.hidden_size, 2)

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, labels=None):
        hidden = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
        return F.cross_entropy(self.classifier(hidden[:, 0]), labels)


def test_a_class_of_ones_own_that_hands_nothing_on_is_not_packed(batch):
    said = []
    model = speed_up(OwnHead(tiny_model().config), say=said.append).eval()
    assert "not packed sequences: its forward hands no position_ids and **kwargs" in said[0]
    assert model(**batch).isfinite()
