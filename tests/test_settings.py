"""Settings cannot lie: every value, and every two values of different settings, are refused or their effect is seen.

A step is trained on the CPU with a tiny BERT, for each of a few combinations in which every two values occur together.
What would be compiled runs as it is: which code Inductor makes is seen in the sweeps at preset smoke. What only a GPU
can do is skipped with its reason, or adjusted and said. DeepSpeed needs a launcher and trains in test_parallel.py. The
fault `positional-join` acts on predictions alone: see test_decode.py.
"""

import dataclasses
import itertools
import re
import types
from fnmatch import fnmatchcase
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch._functorch import config as functorch_config
from transformers import Trainer

from qa_lib.data.load import batches_of, load_data
from qa_lib.errors import SpecError
from qa_lib.model.attention import FusedSelfAttention
from qa_lib.model.build import DTYPES as DTYPES_OF
from qa_lib.model.build import build_model
from qa_lib.model.fused_blocks import FusedIntermediate, FusedOutput, HashDropout
from qa_lib.model.nf4 import NF4Linear
from qa_lib.model.qat import is_rounding
from qa_lib.spec.spec import adjust, missing
from qa_lib.spec.variants import CONFLICTS, VARIANTS, Settings, _matches, choices, find_recipe
from qa_lib.train import loop, optim, trainer
from qa_lib.train.master_adamw import MasterAdamW
from qa_lib.train.parallel import data_parallel, overlap, pipeline, tensor, zero1
from tests import tiny
from tests.material import cases, refused
from tests.pairs import combinations, pairs_of
from tests.tiny import planned, trained

CPU = dataclasses.replace(tiny.CPU, torchao=find_spec("torchao") is not None)
RECIPES = ("all", "lora-qv", "lora-all-r4", "bitfit", "freeze-bottom-10", "freeze-last-4")
# What rivals and language models alone have: see test_lm_fused.py.
ELSEWHERE = {"plain", "pure-bf16", "reduce-overhead", "triton-causal", "chunked", "chunked-fp8"}
VALUES = {
    name: tuple(value for value in values if value not in ELSEWHERE)
    for name, values in choices().items()
}
VALUES |= {"trainable": RECIPES, "micro_batch": (8, 4)}
# What a value needs of other settings; where the pair under test does not set them itself, these are set with it.
# Of optimizers that hold masters: in fp16 the first step may find the loss scaled too much.
COMPANIONS = {(name, value): needed for name, value, needed in cases("companions of a setting")}


def asked_for(**values) -> Settings:
    """Settings with these values and the companions that they need. Raises SpecError."""
    needed = {}
    for pair in values.items():
        needed |= COMPANIONS.get(pair, {})
    return Settings(**needed | values)


@pytest.fixture(scope="module")
def data():
    return load_data(planned(data="synthetic:60"))


def here(asked: Settings) -> tuple[Settings, str | None]:
    """What this CPU makes of the settings, and why it cannot run them. Half precision it leaves to GPUs, but it can do
    bf16, and weights in fp16."""
    settings, _ = adjust(asked, CPU)
    skip = missing(settings, CPU)
    if (asked.precision == "bf16" or asked.half_weights) and not skip:
        optimizer = asked.optimizer if asked.half_weights else settings.optimizer
        settings = dataclasses.replace(settings, precision=asked.precision, optimizer=optimizer)
    return settings, skip


def noting(note, name: str, real):
    """Does what `real` does, and notes each call by that name."""
    return lambda *words, **more: (note(name), real(*words, **more))[1]


SHARING = (
    (data_parallel, "DistributedDataParallel"), (data_parallel, "bf16_compress_hook"), (data_parallel, "fully_shard"),
    (data_parallel.OneBucketDDP, "reduce_grads"), (zero1, "reduce_scatter"), (pipeline.Pipeline, "forward_backward"),
    (overlap, "regions_of"), (zero1.FlatShard, "all_gather_params"), (tensor, "parallelize_module"),
)  # fmt: skip


def noted_sharing(monkeypatch) -> set[str]:
    """The calls by which processes share a step, as they are made."""
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
        self.spec = spec = dataclasses.replace(planned(sizes=sizes), asked=asked, settings=settings)
        self.compiled, self.shapes, self.autocast, self.trainer_order = [], [], set(), None
        self.engines, self.repeats = [], []
        train_ = Trainer.train

        def spy_compile(model, **options):
            self.compiled.append(options["backend"])
            self.repeats.append(not functorch_config.ban_recompute_materialized_backward)
            return model

        def spy_train(trainer):
            self.trainer_order = trainer.args.train_sampling_strategy
            return train_(trainer)

        monkeypatch.setattr(torch, "compile", spy_compile)
        monkeypatch.setattr(Trainer, "train", spy_train)
        self.shared = noted_sharing(monkeypatch)
        for name, module in (("loop", loop), ("trainer", trainer)):
            monkeypatch.setattr(module, "train", noting(self.engines.append, name, module.train))
        # Weights are rounded to 4 bits when they are moved.
        before = {
            name: p.detach().clone() for name, p in build_model(spec).to("cpu").named_parameters()
        }
        self.model, self.batches = build_model(spec), batches_of(data.samples, spec)
        self.model.get_input_embeddings().register_forward_hook(self._look)
        _, self.optimizer, *_ = trained(spec, data.samples, folder, self.model)
        after = dict(self.model.named_parameters())
        now = {name: data_parallel.gather(p.detach()) for name, p in after.items()}
        self.moved = {
            name for name, p in now.items() if not torch.equal(p, before[name].to(p.dtype))
        }
        self.trains = {name for name, p in after.items() if p.requires_grad}

    def _look(self, module, inputs, output):
        self.shapes.append(tuple(inputs[0].shape))
        self.autocast.add(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        )

    def has(self, kind) -> bool:
        return any(isinstance(module, kind) for module in self.model.modules())


def trains_as_named(seen: Seen, recipe: str) -> bool:
    names = seen.trains
    head = {name for name in names if name.startswith("qa_outputs")}
    every = {name for name, _ in seen.model.named_parameters()}
    expected = {
        "all": every,
        "lora-qv": {
            name for name in every if ".lora_" in name and ("query" in name or "value" in name)
        }
        | head,
        "lora-all-r4": {name for name in every if ".lora_" in name} | head,
        "bitfit": {name for name in every if name.endswith(".bias")} | head,
        "freeze-bottom-10": {
            name for name in every if "embeddings" not in name and ".layer.0." not in name
        },
        "freeze-last-4": {name for name in every if ".layer.1." not in name},
    }[recipe]
    return (
        bool(head)
        and names == expected
        and seen.moved <= names
        and len(seen.moved) > len(names) / 3
    )


def attends(seen: Seen, kernel: str) -> bool:
    return (
        seen.model.config._attn_implementation
        == ("packed-" * (seen.spec.settings.padding == "packed")) + kernel
    )


def pads(seen: Seen, padding: str) -> bool:
    (rows, width), limit = seen.shapes[0], seen.spec.preset.max_length
    if padding == "packed":
        return rows == 1 and width == seen.batches.budget
    shorter = width < limit or seen.batches.samples.lengths.max() > limit - 32
    return width == limit if padding == "max_length" else shorter


def grouped(seen: Seen, value: bool) -> bool:
    if seen.spec.settings.engine == "trainer":
        return seen.trainer_order == ("group_by_length" if value else "random")
    lengths, steps = (
        seen.batches.samples.lengths,
        range(seen.batches.per_epoch // seen.spec.accumulation),
    )
    spread = np.mean([np.ptp(lengths[m]) for step in steps for m in seen.batches.step(step)])
    return (spread < 15) == value


def rounds(seen: Seen, width: str) -> bool:
    types = {
        module.weight_fake_quantizer.config.dtype
        for module in seen.model.modules()
        if is_rounding(module)
    }
    return types == (set() if width == "none" else {getattr(torch, width)})


def moments_of(optimizer) -> torch.dtype | None:
    """The type of both moments beside masters."""
    states = optimizer.state.values() if isinstance(optimizer, MasterAdamW) else ()
    types = {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")}
    return types.pop() if len(types) == 1 else None


OPTIMIZERS = {
    "adamw": lambda optimizer: (
        type(optimizer) is torch.optim.AdamW and not optimizer.defaults["fused"]
    ),
    "adamw-fused": lambda optimizer: "AdamW" in repr(optimizer) and optimizer.defaults["fused"],
    "adamw-8bit": lambda optimizer: type(optimizer).__name__ == "AdamW8bit",
    "adamw-master": lambda optimizer: moments_of(optimizer) == torch.float32,
    "adamw-master-bf16": lambda optimizer: moments_of(optimizer) == torch.bfloat16,
    "adamw-master-8bit": lambda optimizer: moments_of(optimizer) == torch.uint8,
}


def compiles(seen, value: str) -> bool:
    """By the backend, once for each part that is compiled by itself."""
    parts = 3 if value == "regional" else seen.spec.settings.chunks
    return seen.compiled == [value.replace("regional", "inductor")] * parts * (value != "none")


SHARED = {name: set(calls) for name, calls in cases("calls of a shared step").items()}
DTYPES = {"bf16": torch.bfloat16, "fp32": None}
DROPOUTS = (torch.nn.Dropout, HashDropout)
EFFECTS = {  # setting -> whether its value was seen at work
    "engine": lambda seen, value: seen.engines == [value],
    "precision": lambda seen, value: (
        seen.autocast == {None if seen.spec.settings.half_weights else DTYPES[value]}
    ),
    "attention": attends,
    "qkv": lambda seen, value: seen.has(FusedSelfAttention) == (value == "fused"),
    "dropout": lambda seen, value: (
        seen.has(HashDropout)
        == (value != "philox" or seen.spec.settings.attention == "triton-varlen")
        and (
            value != "hash"
            or any(m.seed for m in seen.model.modules() if isinstance(m, HashDropout))
        )
        and (value == "none")
        == all(m.p == 0 for m in seen.model.modules() if isinstance(m, DROPOUTS))
    ),
    **dict.fromkeys(("loss", "feed_forward"), lambda seen, value: value == "native"),
    "norms": lambda seen, value: seen.has(FusedOutput) == (value == "fused"),
    "gelu": lambda seen, value: seen.has(FusedIntermediate) == (value == "sigmoid"),
    "qat": rounds,
    "compile": compiles,
    "padding": pads,
    "group_by_length": grouped,
    "trainable": trains_as_named,
    "base_quantization": lambda seen, value: seen.has(NF4Linear) == (value == "nf4"),
    "optimizer": lambda seen, value: OPTIMIZERS[value](
        getattr(seen.optimizer, "optimizer", seen.optimizer)
    ),
    "cuda_graph": lambda seen, value: not value,
    "activation_checkpointing": lambda seen, value: (
        any(getattr(module, "gradient_checkpointing", False) for module in seen.model.modules())
        is (value is True)
        and all(repeats is (value == "elementwise") for repeats in seen.repeats)
    ),
    "parallel": lambda seen, value: (
        seen.shared - {*pipeline.SCHEDULES} == SHARED[value] or seen.engines == ["trainer"]
    ),
    "schedule": lambda seen, value: (
        value in seen.shared or seen.spec.settings.parallel != "pipeline"
    ),
    "fault": lambda seen, value: value != "nvidia-smi-polling",
    "micro_batch": lambda seen, value: (
        len(seen.batches.step(0)[0]) == value and len(seen.shapes) == 8 // value
    ),
}


def test_every_setting_has_values_and_an_effect_to_look_for():
    assert set(VALUES) == set(EFFECTS) == {field.name for field in dataclasses.fields(Settings)}


def test_tables_of_the_code_have_every_value_of_their_setting():
    tables = {"optimizer": optim.OPTIMIZERS, "schedule": pipeline.SCHEDULES}
    tables |= {
        "precision": DTYPES_OF,
        "parallel": [*loop.STRATEGIES, "deepspeed"],
    }  # which transformers.Trainer has
    assert {name: {*table} for name, table in tables.items()} == {
        name: {*choices()[name]} for name in tables
    }


def test_a_variant_is_of_values_that_the_combinations_hold():
    """So that a new variant takes no test of its own; of recipes its kind."""
    kinds = {find_recipe(name).kind for name in RECIPES}
    for name, variant in VARIANTS.items():
        asked = dataclasses.asdict(variant.settings)
        assert find_recipe(asked.pop("trainable")).kind in kinds
        assert all(
            value in VALUES[setting] or value in ELSEWHERE for setting, value in asked.items()
        ), name


def says(pair: tuple, condition: str) -> bool:
    """Whether a (name, value) meets a condition of CONFLICTS."""
    return pair[0] == re.match(r"\w+", condition).group() and _matches(
        types.SimpleNamespace(**dict([pair])), condition
    )


# What else does not go together here: the first step may find the loss scaled too much, so that no weight moves; and
# what spec.resolve refuses.
HERE = (
    ("optimizer=adamw-master|adamw-master-8bit", "precision=fp16"),
    ("cuda_graph=True", "padding!=packed"),
)


def clash(one: tuple, other: tuple) -> bool:
    """Whether two (name, value) do not go together."""
    conflicts = [conditions for *conditions, _ in CONFLICTS] + [*HERE]
    return any(
        says(x, a) and says(y, b) for a, b in conflicts for x, y in ((one, other), (other, one))
    )


def runs_here(**values) -> bool:
    """Whether Settings take these values and this machine can train them."""
    try:
        return here(asked_for(**values))[1] is None
    except SpecError as refusal:
        assert "do not go together" in str(refusal)
        return False


HERE_ALONE = {
    name: tuple(value for value in values if runs_here(**{name: value}))
    for name, values in VALUES.items()
}
COMBINATIONS = combinations(HERE_ALONE, clash)


def test_every_two_values_that_go_together_occur_in_a_combination():
    """By what Settings themselves refuse, and not by how the combinations were made."""
    found = set.union(*map(pairs_of, COMBINATIONS))
    for one, other in itertools.combinations(VALUES, 2):
        for a, b in itertools.product(VALUES[one], VALUES[other]):
            pair = (one, a), (other, b)
            known = any(
                says(x, first) and says(y, last)
                for first, last in HERE
                for x, y in (pair, pair[::-1])
            )
            assert frozenset(pair) in found or known or not runs_here(**dict(pair)), pair
    assert len(COMBINATIONS) < 80


@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_all_settings_of_a_combination_are_seen_at_work(number, data, tmp_path, monkeypatch):
    """So that a value has its effect beside every other one."""
    asked = Settings(**COMBINATIONS[number])
    settings, skip = here(asked)
    assert skip is None
    with functorch_config.patch(
        ban_recompute_materialized_backward=True
    ):  # a run sets it for those after it
        seen = Seen(settings, asked, data, tmp_path, monkeypatch)
    for name in VALUES:
        assert EFFECTS[name](seen, getattr(settings, name)), (
            f"{name} {getattr(settings, name)!r} had no effect"
        )


def test_a_value_that_does_not_train_here_says_why():
    for name in VALUES:
        skipped = [
            here(asked_for(**{name: value}))[1]
            for value in VALUES[name]
            if value not in HERE_ALONE[name]
        ]
        assert HERE_ALONE[name] and all(
            re.match("needs |.*no torch.compile backend", why) for why in skipped
        )


@pytest.mark.parametrize(("change", "words"), cases("refused settings"))
def test_an_unknown_value_or_a_conflict_is_refused_with_the_nearest_or_the_reason(change, words):
    said = refused(re.escape(words[0]), Settings, **change)
    assert all(word in said for word in words), said


def test_every_conflict_is_about_settings_and_values_that_exist():
    for *conditions, why in CONFLICTS:
        assert why and not why.endswith(".")
        for name, patterns in (re.split("!?=", condition) for condition in conditions):
            for part in patterns.split("|"):
                known = map(str, choices().get(name, VALUES[name]))
                assert any(fnmatchcase(value, part) for value in known), (name, part)


def test_what_the_machine_changes_is_said():
    said = adjust(VARIANTS["A0"].settings, dataclasses.replace(CPU, gpus=1, sm=90))[1]
    assert said == ["optimizer: adamw-fused, which transformers.Trainer takes by itself"]
    settings, said = adjust(VARIANTS["E-dropout"].settings, CPU)
    assert (settings.precision, settings.optimizer, settings.cuda_graph) == (
        "fp32",
        "adamw-fused",
        False,
    )
    assert [note.split(":")[0] for note in said] == [
        "precision",
        "optimizer",
        "cuda_graph",
        "attention",
    ]
