"""The rules of what may be trained with what: each is about things that exist, and is reached."""

import ast
import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from qa_lib.model.architectures import ARCHITECTURES
from qa_lib.spec import rules
from qa_lib.spec.machine import Machine
from qa_lib.spec.settings import Settings, choices
from qa_lib.spec.variants import VARIANTS
from tests.material import refused
from tests.pairs import unchecked
from tests.tiny import CPU, H200

FIELDS = {field.name for field in dataclasses.fields(Settings)}
TRAINABLE = ("all", "lora-qv", "bitfit", "freeze-bottom-10")
VALUES = choices() | {"trainable": TRAINABLE, "micro_batch": (8,)}
RULES = ast.parse(Path(rules.__file__).read_text(encoding="utf-8"))


def constants_of(node: ast.AST) -> set:
    """Return the constants in an expression."""
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


# Of what the rules speak.

# Local names in rules.py that stand for a setting.
LOCAL_NAMES = {"kernel": "attention", "precision": "precision", "optimizer": "optimizer",
               "parallel": "parallel"}  # fmt: skip


def compared_values() -> list[tuple[int, str, object]]:
    """Return (line, setting, value) for every value that a rule compares a setting with."""
    found = []
    for node in ast.walk(RULES):
        if not isinstance(node, ast.Compare):
            continue
        left = node.left
        if isinstance(left, ast.Attribute):
            setting = (
                left.attr if ast.unparse(left.value) in ("settings", "spec.settings") else None
            )
        else:
            setting = LOCAL_NAMES.get(ast.unparse(left))
        if setting:
            found += [(node.lineno, setting, v) for v in constants_of(node.comparators[0])]
    return found


def test_every_value_that_a_rule_compares_exists():
    compared = compared_values()
    assert len(compared) > 100
    unknown = [
        f"line {line}: {setting} {value!r}"
        for line, setting, value in compared
        if value not in VALUES[setting]
    ]
    assert unknown == []


def test_every_setting_that_a_rule_reads_exists():
    known = {*FIELDS, "by_rival", "by_trainer", "half_weights", "has_adapters", "chunks"}
    read = {
        node.attr
        for node in ast.walk(RULES)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("settings", "spec.settings")
    }
    assert len(read) > 20
    assert read <= known


def test_every_setting_that_a_refusal_names_exists():
    calls = [
        node
        for node in ast.walk(RULES)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_clash"
    ]
    assert len(calls) > 60
    for call in calls:
        named = {part.value for part in call.args[1:3] if isinstance(part, ast.Constant)}
        assert named <= FIELDS, f"line {call.lineno}"


@pytest.mark.parametrize(
    "takes", [rules.PLAIN_TAKES, rules.SEARCHED_TAKES, rules.FUSED_DECODER_TAKES]
)
def test_an_allow_list_has_values_that_exist(takes):
    for name, values in takes.items():
        assert set(values) < set(VALUES[name]), name


def reasons_of(settings: Settings) -> set[str]:
    return {sentence.partition(": ")[2] for sentence in rules.conflicts(settings)}


def test_every_conflict_is_reached_by_two_settings():
    """And by no more: each is a matter of the two that it names."""
    reached = set()
    for one, other in itertools.combinations(VALUES, 2):
        for values in itertools.product(VALUES[one], VALUES[other]):
            reached |= reasons_of(unchecked(**dict(zip((one, other), values, strict=True))))
    written = set()
    for node in ast.walk(RULES):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "why":
            written |= constants_of(node.value)
    assert len(written) > 40
    assert written <= reached


@pytest.mark.parametrize("settings", [unchecked(engine="plain"), unchecked(padding="packed")])
def test_a_reason_is_no_sentence_of_its_own(settings):
    for reason in reasons_of(settings):
        assert not reason.endswith(".")


# Conflicts.

REFUSED = [
    ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
    ({"attention": "SDPA"}, "unknown attention 'SDPA'; did you mean 'sdpa'?"),
    ({"trainable": "lora-vq"}, "unknown trainable 'lora-vq'; did you mean 'lora-qv'?"),
    ({"cuda_graph": 1}, "unknown cuda_graph '1'"),
    ({"micro_batch": 0}, "micro_batch 0 is not a whole number"),
    (
        {"engine": "trainer", "optimizer": "adamw-8bit"},
        "engine 'trainer' and optimizer 'adamw-8bit' do not go together: "
        "transformers.Trainer builds its own fused AdamW here",
    ),
    (
        {"qkv": "fused", "trainable": "lora-all"},
        "qkv 'fused' and trainable 'lora-all' do not go together: "
        "the adapters' query, key and value are fused away",
    ),
    (
        {"feed_forward": "fp8", "precision": "bf16"},
        "feed_forward 'fp8' and optimizer 'adamw' do not go together: "
        "the 8-bit linear layers take weights in bf16",
    ),
    (
        {"optimizer": "adamw-master-bf16"},
        "optimizer 'adamw-master-bf16' and precision 'fp16' do not go together: ",
    ),
    (
        {"engine": "plain"},
        "engine 'plain' and attention 'eager' do not go together: "
        "the rivals take attention 'sdpa', 'flash' or 'block-diagonal'",
    ),
    (
        {"engine": "plain", "attention": "sdpa", "cuda_graph": True, "optimizer": "adamw-fused"},
        "the rivals take optimizer 'adamw'",
    ),
    (
        {"engine": "searched", "attention": "sdpa", "precision": "bf16"},
        "the rivals take precision 'pure-bf16' or 'fp32'",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_an_unknown_value_or_a_conflict_is_refused_with_the_nearest_or_the_reason(change, message):
    refused(re.escape(message), Settings, **change)


# Tasks and models.

OF_A_TASK = [
    ({"cuda_graph": True, "optimizer": "adamw-fused"}, "a graph has no host"),
    ({"engine": "plain", "attention": "sdpa"}, "the plain BERT takes packed sequences"),
    (
        {"loss": "chunked", "optimizer": "adamw-master"},
        "loss 'chunked' is that of a language model",
    ),
]


@pytest.mark.parametrize(("change", "why"), OF_A_TASK)
def test_what_questions_alone_do_not_go_with_is_for_language_models(change, why):
    (said,) = rules.task_conflicts(Settings(**change), "qa")
    assert why in said
    assert list(rules.task_conflicts(Settings(**change), "lm")) == []


def test_every_variant_goes_with_its_task():
    for name, variant in VARIANTS.items():
        assert list(rules.task_conflicts(variant.settings, variant.task)) == [], name


FUSED_DECODER = {"norms": "fused", "dropout": "hash", "attention": "sdpa"}
LACKS_OF_GPT2 = [
    (FUSED_DECODER | {"attention": "eager"}, "norms 'fused' of a decoder take attention 'sdpa' or"),
    (FUSED_DECODER | {"parallel": "fsdp2"}, "norms 'fused' of a decoder take parallel 'none', "),
    (FUSED_DECODER | {"trainable": "lora-all"}, "adapters of a decoder take norms 'native'"),
    ({"gelu": "sigmoid", "trainable": "lora-all"}, "adapters of a decoder take norms 'native'"),
]


@pytest.mark.parametrize(("change", "why"), LACKS_OF_GPT2)
def test_what_calls_or_adapts_a_decoders_layers_one_by_one_does_not_fit_fused_ones(change, why):
    settings = Settings(**change)
    assert rules.lacking(settings, "gpt2").startswith(f"does not fit gpt2: {why}")
    assert rules.lacking(settings, "bert") is None


def test_every_variant_fits_the_model_that_its_task_begins_with():
    for name, variant in VARIANTS.items():
        architecture = {"qa": "bert", "lm": "gpt2"}[variant.task]
        assert rules.lacking(variant.settings, architecture) is None, name


def test_architectures_that_rules_name_are_in_the_table():
    compared = set()
    for node in ast.walk(RULES):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "architecture":
            compared |= constants_of(node.comparators[0])
    assert compared == ARCHITECTURES.keys() - {"bert"}


# Machines.


def test_a_machine_that_has_everything_lacks_nothing_but_a_backend_that_is_gone():
    machine = dataclasses.replace(H200, gpus=8, deepspeed=True, torchao=True)
    for name, variant in VARIANTS.items():
        lacks = rules.missing(variant.settings, machine)
        assert (lacks is None) == (variant.settings.compile != "nvfuser"), name


def test_a_machine_with_too_few_gpus_says_how_many_it_has():
    said = rules.missing(Settings(), dataclasses.replace(H200, gpus=2), world=4)
    assert said == "needs 4 GPUs, and this machine has 2"


def test_a_fault_of_the_adapters_package_is_told_where_adapters_train():
    machine = dataclasses.replace(CPU, adapters_fault="peft 0.1 is too old")
    assert rules.missing(Settings(trainable="lora-qv"), machine) == "peft 0.1 is too old"
    assert rules.missing(Settings(), machine) is None


def test_what_the_machine_changes_is_said():
    gpu = dataclasses.replace(CPU, gpus=1, sm=90)
    _, sentences = rules.adjust(VARIANTS["A0"].settings, gpu)
    assert sentences == ["optimizer: adamw-fused, which transformers.Trainer takes by itself"]


def test_a_cpu_takes_half_precision_masters_and_graphs_out_and_says_so():
    settings, sentences = rules.adjust(VARIANTS["E-dropout"].settings, CPU)
    changed = (settings.precision, settings.optimizer, settings.cuda_graph, settings.attention)
    assert changed == ("fp32", "adamw-fused", False, "block-diagonal")
    names = [sentence.partition(":")[0] for sentence in sentences]
    assert names == ["precision", "optimizer", "cuda_graph", "attention"]


@pytest.mark.parametrize(
    ("gpus", "sm", "kernel"),
    [(0, 0, "block-diagonal"), (1, 0, "efficient"), (1, 75, "efficient"), (1, 80, "flash")],
)
def test_packed_sequences_take_the_kernel_that_the_machine_has(gpus, sm, kernel):
    settings, _ = rules.adjust(VARIANTS["E-packed"].settings, Machine(gpus=gpus, sm=sm))
    assert settings.attention == kernel


def test_what_takes_a_gpu_alone_stays_as_it_was_asked_for_without_one():
    settings = VARIANTS["E-packed-efficient"].settings
    assert rules.adjust(settings, CPU) == (settings, [])
    assert rules.missing(settings, CPU) == "needs a CUDA GPU"


@pytest.mark.parametrize(("width", "fits"), [(8, False), (16, True), (24, False), (64, True)])
def test_heads_of_the_packed_kernel_are_as_wide_as_a_power_of_2(width, fits):
    assert (rules.unfit_heads(width) is None) == fits
