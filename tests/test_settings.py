"""Settings cannot lie: every value, and every two values that go together, are seen at work.

A step is trained on the CPU with a tiny BERT, for each of a few combinations in which every two
values of different settings occur together. What would be compiled runs as it is: which code
Inductor makes is seen in the sweeps at preset smoke. What only a GPU can do is skipped with its
reason, or adjusted and said. DeepSpeed needs a launcher and trains in test_parallel.py. The fault
`positional-join` acts on predictions alone: see test_decode.py.
"""

import copy
import dataclasses
import itertools
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch._functorch import config as functorch_config
from transformers import Trainer

from qa_lib.data.load import batches_of, load_data
from qa_lib.errors import SpecError
from qa_lib.model.build import DTYPES as DTYPES_OF
from qa_lib.model.build import build_model
from qa_lib.model.fused_gelu import FusedIntermediate
from qa_lib.model.fused_norms import FusedOutput
from qa_lib.model.fused_projections import FusedSelfAttention
from qa_lib.model.hash_dropout import HashDropout
from qa_lib.model.nf4 import NF4Linear
from qa_lib.model.qat import is_rounding
from qa_lib.spec.recipes import find_recipe
from qa_lib.spec.rules import adjust, missing
from qa_lib.spec.settings import Settings, choices
from qa_lib.spec.variants import VARIANTS
from qa_lib.train import loop, optim, trainer
from qa_lib.train.compile import MaskedLossOf
from qa_lib.train.master_adamw import MasterAdamW
from qa_lib.train.parallel import data_parallel, overlap, peer_memory, pipeline, tensor, zero1
from tests import tiny
from tests.pairs import clash, combinations, pairs_of
from tests.tiny import planned, trained

CPU = dataclasses.replace(tiny.CPU, torchao=find_spec("torchao") is not None)
RECIPES = ("all", "lora-qv", "lora-all-r4", "bitfit", "freeze-bottom-10", "freeze-last-4")
# What rivals, the tuned Trainer and language models alone have: see test_train.py, test_trainer.py
# and test_lm.py.
ELSEWHERE = {
    "plain",
    "searched",
    "trainer-tuned",
    "pure-bf16",
    "reduce-overhead",
    "triton-causal",
    "chunked",
    "chunked-fp8",
}
VALUES = {
    name: tuple(value for value in values if value not in ELSEWHERE)
    for name, values in choices().items()
}
VALUES |= {"trainable": RECIPES, "micro_batch": (8, 4)}
PIPELINE = {"padding": "packed", "attention": "sdpa", "precision": "bf16"}
# What a value needs of other settings, where the pair under test does not set them itself. Masters
# go with bf16: in fp16 the first step may find the loss scaled too much.
COMPANIONS = {
    ("schedule", "1f1b"): PIPELINE | {"parallel": "pipeline"},
    ("schedule", "interleaved"): PIPELINE | {"parallel": "pipeline"},
    ("qat", "int8"): {"precision": "fp32"},
    ("qat", "int4"): {"precision": "fp32"},
    ("attention", "flash"): {"padding": "packed"},
    ("attention", "efficient"): {"padding": "packed"},
    ("attention", "block-diagonal"): {"padding": "packed"},
    ("attention", "triton-varlen"): {"padding": "packed"},
    ("optimizer", "adamw-master"): {"precision": "bf16"},
    ("optimizer", "adamw-master-bf16"): {"precision": "bf16"},
    ("optimizer", "adamw-master-8bit"): {"precision": "bf16"},
    ("optimizer", "adamw-rounded-bf16"): {"precision": "bf16"},
    ("optimizer", "adamw-rounded-8bit"): {"precision": "bf16"},
    ("padding", "packed"): {"attention": "sdpa"},
    ("norms", "fused"): {"dropout": "hash"},
    ("compile", "regional"): {"padding": "packed", "attention": "sdpa"},
    ("activation_checkpointing", "elementwise"): {"compile": "inductor"},
    ("feed_forward", "fp8"): {"precision": "bf16", "optimizer": "adamw-master"},
    ("attention_projections", "fp8"): {
        "precision": "bf16",
        "optimizer": "adamw-master",
        "qkv": "fused",
        "attention": "triton-varlen",
        "padding": "packed",
    },
    ("weight_gradients", "fp8"): {
        "precision": "bf16",
        "optimizer": "adamw-master",
        "feed_forward": "fp8",
    },
    ("base_quantization", "nf4"): {"trainable": "lora-all-r4"},
    ("cuda_graph", True): {"optimizer": "adamw-fused", "padding": "packed", "attention": "sdpa"},
    ("parallel", "peers"): {"precision": "bf16"},
    ("parallel", "pipeline"): PIPELINE,
    ("parallel", "deepspeed"): {"engine": "trainer"},
    ("fault", "nvidia-smi-polling"): {"engine": "trainer"},
}
# What else does not go together here: the first step may find the loss scaled too much, so that no
# weight moves; and a task of questions takes no graph of padded sequences (`task_conflicts`).
NOT_HERE = [
    {("optimizer", "adamw-master"), ("precision", "fp16")},
    {("optimizer", "adamw-master-8bit"), ("precision", "fp16")},
    {("cuda_graph", True), ("padding", "max_length")},
    {("cuda_graph", True), ("padding", "longest")},
]


# Combinations in which every two values occur.


def asked_for(**values) -> Settings:
    """Return Settings with these values and the companions that they need. Raises SpecError."""
    needed = {}
    for pair in values.items():
        needed |= COMPANIONS.get(pair, {})
    return Settings(**needed | values)


def here(asked: Settings) -> tuple[Settings, str | None]:
    """Return what this CPU makes of the settings, and why it cannot run them; None if it can.

    Half precision is adjusted away on a CPU, which can do bf16 and weights in fp16 all the same.
    """
    settings, _ = adjust(asked, CPU)
    skip = missing(settings, CPU)
    if (asked.precision == "bf16" or asked.half_weights) and not skip:
        optimizer = asked.optimizer if asked.half_weights else settings.optimizer
        settings = dataclasses.replace(settings, precision=asked.precision, optimizer=optimizer)
    return settings, skip


def runs_here(**values) -> bool:
    """Return whether Settings take these values and this machine can train them."""
    try:
        _, skip = here(asked_for(**values))
    except SpecError as refusal:
        assert "do not go together" in str(refusal)
        return False
    return skip is None


def clash_here(one: tuple, other: tuple) -> bool:
    """Return whether two (name, value) do not go together, anywhere or in these tests."""
    return {one, other} in NOT_HERE or clash(one, other)


HERE_ALONE = {
    name: tuple(value for value in values if runs_here(**{name: value}))
    for name, values in VALUES.items()
}
COMBINATIONS = combinations(HERE_ALONE, clash_here)


def test_every_two_values_that_go_together_occur_in_a_combination():
    """By what Settings themselves refuse, and not by how the combinations were made."""
    covered = set.union(*map(pairs_of, COMBINATIONS))
    for one, other in itertools.combinations(VALUES, 2):
        for values in itertools.product(VALUES[one], VALUES[other]):
            pair = dict(zip((one, other), values, strict=True))
            if set(pair.items()) not in NOT_HERE and runs_here(**pair):
                assert frozenset(pair.items()) in covered, pair


def test_the_combinations_are_few():
    assert len(COMBINATIONS) < 100


def test_every_setting_trains_here_with_some_value():
    for name, values in HERE_ALONE.items():
        assert values, name


def test_a_value_that_does_not_train_here_says_why():
    for name, values in VALUES.items():
        for value in set(values) - set(HERE_ALONE[name]):
            _, why = here(asked_for(**{name: value}))
            assert re.match("needs |.*no torch.compile backend", why), (name, value)


# What is seen of a step.

SHARING = (
    (data_parallel, "DistributedDataParallel"),
    (data_parallel, "bf16_compress_hook"),
    (data_parallel, "fully_shard"),
    (data_parallel.OneBucketDDP, "reduce_grads"),
    (zero1, "reduce_scatter"),
    (zero1.FlatShard, "all_gather_params"),
    (peer_memory.MessageMemory, "send_gradients"),
    (overlap, "regions_of"),
    (pipeline.Pipeline, "forward_backward"),
    (tensor, "parallelize_module"),
)


def noting(note, name: str, real):
    """Return a function that does what `real` does, and notes each call by that name."""

    def call(*args, **kwargs):
        note(name)
        return real(*args, **kwargs)

    return call


def noted_sharing(monkeypatch) -> set[str]:
    """Return a set of the calls by which processes share a step, which grows as they are made."""
    calls = set()
    for owner, name in SHARING:
        monkeypatch.setattr(owner, name, noting(calls.add, name, getattr(owner, name)))
    for name, real in pipeline.SCHEDULES.items():
        monkeypatch.setitem(pipeline.SCHEDULES, name, noting(calls.add, name, real))
    return calls


class Seen:
    """One training step under these settings, and what was seen of it."""

    def __init__(self, settings: Settings, asked: Settings, data, folder, monkeypatch):
        sizes = {"steps": 1, "effective_batch": 8, "measure_from": 0, "checkpoint_every": 0}
        self.spec = dataclasses.replace(planned(sizes=sizes), asked=asked, settings=settings)
        self.settings = settings
        self.backends = []  # of torch.compile, one for each part that is compiled
        self.repeats = []  # whether elementwise work was to be computed again, for each part
        self.masked_losses = []  # one for each loss without padding
        self.shapes = []  # of token ids, one for each micro-batch
        self.autocast = set()
        self.trainer_order = None
        self.engines = []
        self._watch(monkeypatch)
        # Weights are rounded to 4 bits when they are moved.
        self.model = build_model(self.spec)
        before = dict(copy.deepcopy(self.model).to("cpu").named_parameters())
        self.batches = batches_of(data.samples, self.spec)
        self.model.get_input_embeddings().register_forward_hook(self._look)
        _, self.optimizer, *_ = trained(self.spec, data.samples, folder, self.model)
        self.moved = set()
        self.trains = set()
        for name, parameter in self.model.named_parameters():
            now = data_parallel.gather(parameter.detach())
            if not torch.equal(now, before[name].to(now.dtype)):
                self.moved.add(name)
            if parameter.requires_grad:
                self.trains.add(name)

    def _watch(self, monkeypatch):
        """Note what is called while the step is made."""
        train = Trainer.train

        def spy_compile(model, **options):
            self.backends.append(options["backend"])
            self.repeats.append(not functorch_config.ban_recompute_materialized_backward)
            return model

        def spy_train(trainer):
            self.trainer_order = trainer.args.train_sampling_strategy
            return train(trainer)

        monkeypatch.setattr(torch, "compile", spy_compile)
        monkeypatch.setattr(Trainer, "train", spy_train)
        note_masked = noting(self.masked_losses.append, "masked", MaskedLossOf.forward)
        monkeypatch.setattr(MaskedLossOf, "forward", note_masked)
        self.shared = noted_sharing(monkeypatch)
        for name, module in (("loop", loop), ("trainer", trainer)):
            monkeypatch.setattr(module, "train", noting(self.engines.append, name, module.train))

    def _look(self, module, inputs, output):
        self.shapes.append(tuple(inputs[0].shape))
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self.autocast.add(dtype)

    def modules(self, kind) -> list:
        return [module for module in self.model.modules() if isinstance(module, kind)]

    def has(self, kind) -> bool:
        return len(self.modules(kind)) > 0


# Whether a value was seen at work, for each setting.


def sees_engine(seen: Seen, engine: str) -> bool:
    return seen.engines == [engine]


def sees_precision(seen: Seen, precision: str) -> bool:
    if seen.settings.half_weights:
        return seen.autocast == {None}
    return seen.autocast == {{"bf16": torch.bfloat16, "fp32": None}[precision]}


def sees_attention(seen: Seen, kernel: str) -> bool:
    name = f"packed-{kernel}" if seen.settings.padding == "packed" else kernel
    return seen.model.config._attn_implementation == name


def sees_qkv(seen: Seen, value: str) -> bool:
    return seen.has(FusedSelfAttention) == (value == "fused")


def sees_dropout(seen: Seen, value: str) -> bool:
    hashed = seen.modules(HashDropout)
    dropouts = seen.modules((torch.nn.Dropout, HashDropout))
    takes_hashes = value != "philox" or seen.settings.attention == "triton-varlen"
    if (len(hashed) > 0) != takes_hashes:
        return False
    if value == "hash" and not any(module.seed for module in hashed):
        return False
    return all(module.p == 0 for module in dropouts) == (value == "none")


def sees_native(seen: Seen, value: str) -> bool:
    """What is not native takes a GPU or a language model."""
    return value == "native"


def sees_loss_padding(seen: Seen, value: str) -> bool:
    return (len(seen.masked_losses) > 0) == (value == "masked")


def sees_norms(seen: Seen, value: str) -> bool:
    return seen.has(FusedOutput) == (value == "fused")


def sees_gelu(seen: Seen, value: str) -> bool:
    return seen.has(FusedIntermediate) == (value == "sigmoid")


def sees_qat(seen: Seen, width: str) -> bool:
    rounded = [module for module in seen.model.modules() if is_rounding(module)]
    types = {module.weight_fake_quantizer.config.dtype for module in rounded}
    return types == (set() if width == "none" else {getattr(torch, width)})


def sees_compile(seen: Seen, value: str) -> bool:
    """By the backend, once for each part that is compiled by itself."""
    if value == "none":
        return seen.backends == []
    if value == "regional":
        return seen.backends == ["inductor"] * 3
    return seen.backends == [value] * seen.settings.chunks


def sees_padding(seen: Seen, padding: str) -> bool:
    rows, width = seen.shapes[0]
    limit = seen.spec.preset.max_length
    if padding == "packed":
        return rows == 1 and width == seen.batches.budget
    if padding == "max_length":
        return width == limit
    return width < limit or seen.batches.samples.lengths.max() > limit - 32


def sees_group_by_length(seen: Seen, is_grouped: bool) -> bool:
    if seen.settings.engine == "trainer":
        return seen.trainer_order == ("group_by_length" if is_grouped else "random")
    lengths = seen.batches.samples.lengths
    steps = range(seen.batches.per_epoch // seen.spec.accumulation)
    micro_batches = [samples for step in steps for samples in seen.batches.step(step)]
    mean_spread = np.mean([np.ptp(lengths[samples]) for samples in micro_batches])
    return (mean_spread < 15) == is_grouped


def sees_trainable(seen: Seen, recipe: str) -> bool:
    """Its parameters and the head's, no more and no less, train, and some of them moved."""
    every = {name for name, _ in seen.model.named_parameters()}
    head = {name for name in seen.trains if name.startswith("qa_outputs")}
    adapters = {name for name in every if ".lora_" in name}
    expected = {
        "all": every,
        "lora-qv": {name for name in adapters if "query" in name or "value" in name} | head,
        "lora-all-r4": adapters | head,
        "bitfit": {name for name in every if name.endswith(".bias")} | head,
        "freeze-bottom-10": {
            name for name in every if "embeddings" not in name and ".layer.0." not in name
        },
        "freeze-last-4": {name for name in every if ".layer.1." not in name},
    }[recipe]
    if not head or seen.trains != expected:
        return False
    return seen.moved <= seen.trains and len(seen.moved) > len(seen.trains) / 3


def sees_base_quantization(seen: Seen, value: str) -> bool:
    return seen.has(NF4Linear) == (value == "nf4")


def moments_of(optimizer) -> torch.dtype | None:
    """Return the type of both moments of a MasterAdamW; None for another optimizer."""
    states = optimizer.state.values() if isinstance(optimizer, MasterAdamW) else ()
    types = {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")}
    return types.pop() if len(types) == 1 else None


MOMENTS = {
    "adamw-master": torch.float32,
    "adamw-master-bf16": torch.bfloat16,
    "adamw-master-8bit": torch.uint8,
    "adamw-rounded-bf16": torch.bfloat16,
    "adamw-rounded-8bit": torch.uint8,
}


def sees_optimizer(seen: Seen, value: str) -> bool:
    optimizer = getattr(seen.optimizer, "optimizer", seen.optimizer)  # within accelerate's
    if value == "adamw":
        return type(optimizer) is torch.optim.AdamW and not optimizer.defaults["fused"]
    if value == "adamw-fused":
        return "AdamW" in repr(optimizer) and optimizer.defaults["fused"]
    if value == "adamw-8bit":
        return type(optimizer).__name__ == "AdamW8bit"
    return moments_of(optimizer) == MOMENTS[value] and optimizer.masters == ("master" in value)


def sees_cuda_graph(seen: Seen, value: bool) -> bool:
    """A CPU has none."""
    return not value


def sees_activation_checkpointing(seen: Seen, value: bool | str) -> bool:
    modules = seen.model.modules()
    recomputes_layers = any(getattr(m, "gradient_checkpointing", False) for m in modules)
    if recomputes_layers != (value is True):
        return False
    return all(repeats == (value == "elementwise") for repeats in seen.repeats)


SHARED_BY = {
    "none": set(),
    "ddp": {"DistributedDataParallel"},
    "ddp-bf16": {"DistributedDataParallel", "bf16_compress_hook"},
    "ddp-one-bucket": {"reduce_grads"},
    "ddp-overlap": {"reduce_grads", "regions_of"},
    "zero1": {"all_gather_params", "reduce_scatter"},
    "zero1-overlap": {"all_gather_params", "reduce_scatter", "regions_of"},
    "peers": {"send_gradients"},
    "fsdp2": {"fully_shard"},
    "pipeline": {"forward_backward"},
    "tensor": {"parallelize_module"},
}


def sees_parallel(seen: Seen, value: str) -> bool:
    """By the calls of the loop; the Trainer's are its own."""
    calls = seen.shared - pipeline.SCHEDULES.keys()
    return seen.engines == ["trainer"] or calls == SHARED_BY[value]


def sees_schedule(seen: Seen, value: str) -> bool:
    return value in seen.shared or seen.settings.parallel != "pipeline"


def sees_fault(seen: Seen, value: str) -> bool:
    """The polling takes a GPU; the other acts on predictions alone."""
    return value != "nvidia-smi-polling"


def sees_micro_batch(seen: Seen, value: int) -> bool:
    return len(seen.batches.step(0)[0]) == value and len(seen.shapes) == 8 // value


EFFECTS = {
    "engine": sees_engine,
    "precision": sees_precision,
    "attention": sees_attention,
    "qkv": sees_qkv,
    "dropout": sees_dropout,
    "norms": sees_norms,
    "loss": sees_native,
    "loss_padding": sees_loss_padding,
    "feed_forward": sees_native,
    "attention_projections": sees_native,
    "weight_gradients": sees_native,
    "gelu": sees_gelu,
    "qat": sees_qat,
    "compile": sees_compile,
    "padding": sees_padding,
    "group_by_length": sees_group_by_length,
    "trainable": sees_trainable,
    "base_quantization": sees_base_quantization,
    "optimizer": sees_optimizer,
    "cuda_graph": sees_cuda_graph,
    "activation_checkpointing": sees_activation_checkpointing,
    "parallel": sees_parallel,
    "schedule": sees_schedule,
    "fault": sees_fault,
    "micro_batch": sees_micro_batch,
}


@pytest.fixture(scope="module")
def data():
    return load_data(planned(data="synthetic:60"))


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_all_settings_of_a_combination_are_seen_at_work(number, data, tmp_path, monkeypatch):
    """So that a value has its effect beside every other one."""
    asked = Settings(**COMBINATIONS[number])
    settings, skip = here(asked)
    assert skip is None
    # A run sets this option of the compiler for those after it.
    with functorch_config.patch(ban_recompute_materialized_backward=True):
        seen = Seen(settings, asked, data, tmp_path, monkeypatch)
    for name, sees in EFFECTS.items():
        value = getattr(settings, name)
        assert sees(seen, value), f"{name} {value!r} had no effect"


# That nothing is left out.


def test_every_setting_has_values_and_an_effect_to_look_for():
    names = {field.name for field in dataclasses.fields(Settings)}
    assert VALUES.keys() == names
    assert EFFECTS.keys() == names


@pytest.mark.parametrize(
    ("setting", "table"),
    [
        ("optimizer", optim.OPTIMIZERS),
        ("schedule", pipeline.SCHEDULES),
        ("precision", DTYPES_OF),
        ("parallel", [*loop.STRATEGIES, "deepspeed"]),  # which transformers.Trainer has
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_of_the_code_has_every_value_of_its_setting(setting, table):
    assert set(table) == set(choices()[setting])


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_of_values_that_the_combinations_hold(name):
    """So that a new variant takes no test of its own; recipes are held to their kinds."""
    asked = dataclasses.asdict(VARIANTS[name].settings)
    kind = find_recipe(asked.pop("trainable")).kind
    assert kind in {find_recipe(recipe).kind for recipe in RECIPES}
    for setting, value in asked.items():
        assert value in VALUES[setting] or value in ELSEWHERE, setting
