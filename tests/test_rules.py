"""The rules of what may be trained with what: each is about things that exist, and is reached."""

import ast
import dataclasses
import itertools
import re
import types
from pathlib import Path

import pytest

from qa_lib.model.architectures import ARCHITECTURES
from qa_lib.spec import rules
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import Preset
from qa_lib.spec.settings import Settings, choices
from qa_lib.spec.variants import VARIANTS
from tests.material import refused
from tests.pairs import clash, unchecked
from tests.tiny import CPU, H200

FIELDS = {field.name for field in dataclasses.fields(Settings)}
TRAINABLE = ("all", "lora-qv", "bitfit", "freeze-bottom-10")
VALUES = choices() | {"trainable": TRAINABLE, "micro_batch": (8,)}
RULES = ast.parse(Path(rules.__file__).read_text(encoding="utf-8"))


def constants_of(node: ast.AST) -> set:
    """Return the constants in an expression."""
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


# What the rules speak of.

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
    properties = {name for name, value in vars(Settings).items() if isinstance(value, property)}
    known = {*FIELDS, *properties}
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


ROUNDED = "adamw-rounded-bf16 adamw-rounded-8bit"
MASTERS = f"adamw-master adamw-master-bf16 adamw-master-8bit {ROUNDED}"
NO_MASTERS = "adamw adamw-fused adamw-8bit"
OF_THE_LOOP = "ddp-bf16 ddp-one-bucket ddp-overlap zero1 zero1-overlap peers fsdp2 pipeline tensor"
SHARED = f"ddp {OF_THE_LOOP} deepspeed"  # whatever takes several processes
NO_OWN = "eager sdpa flash efficient block-diagonal"  # attention but by our own kernel
NO_PIPELINE = SHARED.replace("pipeline ", "none ")
SOME_TRAIN = "lora-qv bitfit freeze-bottom-10"
# Two settings, and the values of the one that do not go with these values of the other.
CLASHES = [
    ("engine", "loop trainer trainer-tuned", "precision", "pure-bf16"),
    ("engine", "loop trainer trainer-tuned", "compile", "reduce-overhead"),
    ("engine", "loop", "parallel", "deepspeed"),
    ("engine", "loop", "fault", "nvidia-smi-polling"),
    ("engine", "trainer trainer-tuned", "dropout", "hash"),
    ("engine", "trainer trainer-tuned", "loss", "chunked chunked-fp8"),
    ("engine", "trainer trainer-tuned", "compile", "cudagraphs"),
    ("engine", "trainer trainer-tuned", "padding", "packed"),
    ("engine", "trainer trainer-tuned", "optimizer", f"adamw-8bit {MASTERS}"),
    ("engine", "trainer trainer-tuned", "cuda_graph", "True"),
    ("engine", "trainer trainer-tuned", "activation_checkpointing", "elementwise"),
    ("engine", "trainer trainer-tuned", "parallel", OF_THE_LOOP),
    ("engine", "plain searched", "attention", "eager efficient triton-varlen triton-causal"),
    ("engine", "plain searched", "qkv", "fused"),
    ("engine", "plain searched", "dropout", "hash"),
    ("engine", "plain searched", "norms", "fused"),
    ("engine", "plain searched", "loss", "chunked chunked-fp8"),
    ("engine", "plain searched", "feed_forward", "fp8"),
    ("engine", "plain searched", "attention_projections", "fp8"),
    ("engine", "plain searched", "weight_gradients", "fp8"),
    ("engine", "plain searched", "gelu", "sigmoid"),
    ("engine", "plain searched", "qat", "int8 int4"),
    ("engine", "plain searched", "compile", "regional aot_eager cudagraphs nvfuser"),
    ("engine", "searched", "compile", "reduce-overhead"),
    ("engine", "searched", "precision", "fp16 bf16"),
    ("engine", "plain searched", "padding", "longest"),
    ("engine", "plain searched", "base_quantization", "nf4"),
    ("engine", "plain searched", "optimizer", f"adamw-fused adamw-8bit {MASTERS}"),
    ("engine", "plain", "cuda_graph", "True"),
    ("engine", "plain searched", "activation_checkpointing", "elementwise True"),
    ("engine", "plain searched", "parallel", SHARED),
    ("engine", "plain searched", "trainable", SOME_TRAIN),
    ("precision", "fp32", "attention", "flash"),
    ("precision", "fp16 fp32 pure-bf16", "loss", "chunked-fp8"),
    ("precision", "fp16 fp32 pure-bf16", "feed_forward", "fp8"),
    ("precision", "fp16 fp32 pure-bf16", "attention_projections", "fp8"),
    ("precision", "fp16 bf16 pure-bf16", "qat", "int8 int4"),
    ("precision", "fp16 fp32 pure-bf16", "optimizer", f"adamw-master-bf16 {ROUNDED}"),
    ("precision", "fp32", "optimizer", "adamw-master adamw-master-8bit"),
    ("precision", "fp16", "parallel", "peers pipeline"),
    ("attention", "triton-causal", "norms", "native"),
    ("attention", "eager triton-causal", "padding", "packed"),
    ("attention", "flash efficient block-diagonal triton-varlen", "padding", "max_length longest"),
    ("attention", "triton-varlen", "parallel", "pipeline tensor"),
    ("qkv", "fused", "parallel", "tensor"),
    ("qkv", "fused", "trainable", "lora-qv"),
    ("dropout", "philox", "norms", "fused"),
    ("dropout", "hash", "parallel", "pipeline"),
    ("norms", "fused", "qat", "int8 int4"),
    ("norms", "fused", "base_quantization", "nf4"),
    ("norms", "fused", "parallel", "tensor"),
    ("loss", "chunked chunked-fp8", "padding", "packed"),
    ("loss", "chunked chunked-fp8", "optimizer", NO_MASTERS),
    ("feed_forward", "fp8", "base_quantization", "nf4"),
    ("feed_forward", "fp8", "optimizer", NO_MASTERS),
    ("feed_forward", "fp8", "parallel", "tensor"),
    ("attention_projections", "fp8", "attention", NO_OWN),
    ("attention_projections", "fp8", "base_quantization", "nf4"),
    ("attention_projections", "fp8", "optimizer", NO_MASTERS),
    ("attention_projections", "fp8", "parallel", "tensor"),
    ("weight_gradients", "fp8", "feed_forward", "native"),
    ("gelu", "sigmoid", "qat", "int8 int4"),
    ("gelu", "sigmoid", "base_quantization", "nf4"),
    ("gelu", "sigmoid", "parallel", "tensor"),
    ("qat", "int8 int4", "base_quantization", "nf4"),
    ("qat", "int8 int4", "parallel", "tensor"),
    ("qat", "int8 int4", "trainable", "lora-qv"),
    ("compile", "regional", "padding", "max_length longest"),
    ("compile", "regional", "parallel", "ddp ddp-bf16 pipeline"),
    ("compile", "cudagraphs", "padding", "longest"),
    ("compile", "cudagraphs", "cuda_graph", "True"),
    ("compile", "cudagraphs", "parallel", SHARED),
    ("compile", "inductor regional aot_eager nvfuser reduce-overhead", "parallel", "fsdp2"),
    (
        "compile",
        "none aot_eager cudagraphs nvfuser reduce-overhead",
        "activation_checkpointing",
        "elementwise",
    ),
    ("padding", "packed", "group_by_length", "True"),
    ("padding", "packed", "loss_padding", "masked"),
    ("engine", "trainer trainer-tuned", "loss_padding", "masked"),
    ("padding", "longest", "cuda_graph", "True"),
    ("padding", "max_length longest", "parallel", "pipeline"),
    ("base_quantization", "nf4", "parallel", "fsdp2 pipeline tensor"),
    ("base_quantization", "nf4", "trainable", "all bitfit freeze-bottom-10"),
    ("optimizer", "adamw adamw-8bit", "cuda_graph", "True"),
    (
        "optimizer",
        "adamw-8bit adamw-master-8bit adamw-rounded-8bit",
        "parallel",
        "zero1 zero1-overlap peers fsdp2 tensor",
    ),
    ("optimizer", "adamw-master adamw-master-bf16 adamw-rounded-bf16", "parallel", "fsdp2"),
    ("cuda_graph", "True", "parallel", "ddp ddp-bf16 fsdp2 pipeline tensor"),
    ("schedule", "1f1b interleaved", "parallel", NO_PIPELINE),
    ("trainable", SOME_TRAIN, "parallel", "pipeline tensor"),
]


def test_two_values_clash_where_the_table_says_so_and_nowhere_else():
    expected = set()
    for one, values, other, other_values in CLASHES:
        for pair in itertools.product(values.split(), other_values.split()):
            expected.add(frozenset(zip((one, other), pair, strict=True)))
    found = set()
    for one, other in itertools.combinations(VALUES, 2):
        for pair in itertools.product(VALUES[one], VALUES[other]):
            chosen = list(zip((one, other), pair, strict=True))
            if clash(*chosen):
                found.add(frozenset((name, str(value)) for name, value in chosen))
    assert found == expected


# Tasks and models.

OF_A_TASK = [
    ({"cuda_graph": True, "optimizer": "adamw-fused"}, "a graph has no host"),
    ({"engine": "plain", "attention": "sdpa"}, "the rivals take packed sequences"),
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


OF_SEPARATE = {"attention_projections": "fp8"}  # query, key and value, as the baseline has them
LACKS = {
    "bert": OF_SEPARATE,
    "mpnet": OF_SEPARATE | {"attention": "flash efficient", "parallel": "pipeline tensor"},
    "roberta": OF_SEPARATE | {"engine": "plain searched"},
    "electra": OF_SEPARATE | {"engine": "plain searched"},
    "distilbert": OF_SEPARATE | {"engine": "plain searched"},
    "modernbert": OF_SEPARATE
    | {
        "engine": "plain searched",
        "attention": "efficient triton-varlen",
        "qkv": "fused",
        "dropout": "hash none",
        "norms": "fused",
        "gelu": "sigmoid",
        "compile": "regional",
        "parallel": "pipeline tensor",
        "trainable": "bitfit",
    },
    "gpt2": {"norms": "fused"},  # with the other settings of the baseline
}


@pytest.mark.parametrize("architecture", LACKS)
def test_an_architecture_lacks_these_values_and_no_others(architecture):
    found = {}
    for name, values in VALUES.items():
        lacked = [v for v in values if rules.lacking(unchecked(**{name: v}), architecture)]
        if lacked:
            found[name] = " ".join(map(str, lacked))
    assert found == LACKS[architecture]


def test_every_variant_fits_the_model_that_its_task_begins_with():
    for name, variant in VARIANTS.items():
        architecture = {"qa": "bert", "lm": "gpt2"}[variant.task]
        assert rules.lacking(variant.settings, architecture) is None, name


def test_architectures_that_rules_name_are_in_the_table():
    compared = set()
    for node in ast.walk(RULES):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "architecture":
            compared |= constants_of(node.comparators[0])
    assert compared - {""} <= ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("architecture", "has_rival"),
    [("bert", True), ("mpnet", True), ("gpt2", True), ("", True), ("deberta-v2", False)],
)
def test_an_architecture_has_a_rival_where_there_is_one_of_its_name(architecture, has_rival):
    settings = unchecked(engine="plain")
    assert (rules.lacking(settings, architecture) is None) == has_rival


# Machines.


def test_a_machine_that_has_everything_lacks_nothing_but_a_backend_that_is_gone():
    machine = dataclasses.replace(H200, gpus=8, linked=True, deepspeed=True, torchao=True)
    for name, variant in VARIANTS.items():
        lacks = rules.missing(variant.settings, machine)
        assert (lacks is None) == (variant.settings.compile != "nvfuser"), name


# Values, by what the package or the tool they need is called in a machine that lacks it.
TRITON = {
    "attention": "triton-varlen triton-causal",
    "norms": "fused",
    "loss": "chunked chunked-fp8",
    "gelu": "sigmoid",
    "optimizer": MASTERS,
}
NEEDED = {
    "compiler": TRITON | {"compile": "inductor regional reduce-overhead"},
    "bitsandbytes": {"base_quantization": "nf4", "optimizer": "adamw-8bit"},
    "deepspeed": {"parallel": "deepspeed"},
    "torchao": {"qat": "int8 int4"},
    "peft": {"trainable": "lora-qv"},
}
ALL_THERE = dataclasses.replace(H200, deepspeed=True, torchao=True)


def needing(machine: Machine) -> dict[str, str]:
    """Return the values that a machine cannot run though one that has everything can."""
    found = {}
    for name, values in VALUES.items():
        refused_here = []
        for value in values:
            settings = unchecked(**{name: value})
            if rules.missing(settings, machine) and not rules.missing(settings, ALL_THERE):
                refused_here.append(str(value))
        if refused_here:
            found[name] = " ".join(refused_here)
    return found


@pytest.mark.parametrize("lacked", NEEDED)
def test_a_machine_that_lacks_one_thing_cannot_run_what_needs_it_and_nothing_else(lacked):
    assert needing(dataclasses.replace(ALL_THERE, **{lacked: False})) == NEEDED[lacked]


def test_without_a_gpu_it_is_what_runs_on_one_alone_that_cannot_run():
    without = dataclasses.replace(ALL_THERE, gpus=0, sm=0)
    assert needing(without) == {
        "precision": "bf16 pure-bf16",
        "attention": "flash efficient",
        "loss": "chunked-fp8",
        "feed_forward": "fp8",
        "attention_projections": "fp8",
        "compile": "cudagraphs reduce-overhead",
        "fault": "nvidia-smi-polling",
    }


# Values, by the compute capability x 10 from which a GPU runs them.
NEWER = {
    70: {"compile": "inductor regional reduce-overhead"},
    75: {
        "norms": "fused",
        "loss": "chunked",
        "gelu": "sigmoid",
        "optimizer": MASTERS,
    },
    80: {"precision": "bf16 pure-bf16", "attention": "flash triton-varlen triton-causal"},
    89: {"loss": "chunked-fp8", "feed_forward": "fp8", "attention_projections": "fp8"},
}


def test_a_value_says_from_which_generation_of_gpus_it_runs():
    found = {}
    for name, values in VALUES.items():
        for value in values:
            capability = rules.since(unchecked(**{name: value}))
            if capability:
                found.setdefault(capability, {}).setdefault(name, []).append(str(value))
    in_words = {
        capability: {name: " ".join(values) for name, values in of_capability.items()}
        for capability, of_capability in found.items()
    }
    assert in_words == NEWER


@pytest.mark.parametrize("capability", NEWER)
def test_a_gpu_of_that_generation_runs_what_an_older_one_does_not(capability):
    for name, values in NEWER[capability].items():
        for value in values.split():
            settings = unchecked(**{name: value})
            assert rules.missing(settings, dataclasses.replace(ALL_THERE, sm=capability)) is None
            assert rules.missing(settings, dataclasses.replace(ALL_THERE, sm=capability - 1))


def test_a_machine_with_too_few_gpus_says_how_many_it_has():
    said = rules.missing(Settings(), dataclasses.replace(H200, gpus=2), world=4)
    assert said == "needs 4 GPUs, and this machine has 2"


@pytest.mark.parametrize(("world", "said"), [(1, None), (2, "takes GPUs of one kind")])
def test_gpus_of_two_kinds_are_refused_to_several_processes_alone(world, said):
    machine = dataclasses.replace(H200, gpus=2, unlike="NVIDIA L4 and NVIDIA A10")
    why = rules.missing(Settings(), machine, world)
    assert why is said or why.startswith(said)


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


@pytest.mark.parametrize("attention", ["triton-varlen", "triton-causal"])
def test_a_width_of_heads_is_refused_by_the_name_of_the_setting(attention):
    assert rules.unfit_heads(48, attention).startswith(f"attention {attention!r} takes heads")


def test_a_cpu_takes_the_whole_loss_of_a_language_model():
    settings, sentences = rules.adjust(VARIANTS["L-loss"].settings, CPU)
    assert settings.loss == "native"
    assert "loss: native, since chunks of logits are for weights in half precision" in sentences


def test_a_machine_with_as_many_gpus_as_processes_has_enough():
    assert rules.missing(Settings(), dataclasses.replace(H200, gpus=4), world=4) is None


def test_a_trainer_that_was_asked_for_its_own_optimizer_is_not_adjusted():
    gpu = dataclasses.replace(CPU, gpus=1, sm=90)
    assert rules.adjust(Settings(engine="trainer", optimizer="adamw-fused"), gpu)[1] == []


def test_a_step_that_is_not_divisible_says_the_nearest_batch_below_that_is():
    for micro_batch, batch, said in ((24, 100, 96), (24, 16, 24)):
        preset = Preset(name="own", effective_batch=batch, epochs=1)
        (sentence,) = rules.size_conflicts(Settings(micro_batch=micro_batch), preset)
        assert sentence.endswith(f"add --batch {said}")


@pytest.mark.parametrize(
    ("parallel", "schedule", "layers", "heads", "stages", "fits"),
    [
        ("pipeline", "gpipe", 12, 12, 4, True),
        ("pipeline", "gpipe", 12, 12, 5, False),
        ("pipeline", "interleaved", 12, 12, 3, True),
        ("pipeline", "interleaved", 12, 12, 4, False),
        ("tensor", "gpipe", 5, 12, 1, True),
        ("tensor", "gpipe", 12, 6, 1, False),
        ("ddp", "gpipe", 5, 5, 1, True),
    ],
)
def test_a_model_is_shared_by_equal_parts_of_its_layers_or_heads(
    parallel, schedule, layers, heads, stages, fits
):
    settings = unchecked(parallel=parallel, schedule=schedule)
    why = rules.unshared(settings, layers=layers, heads=heads, world=4, stages=stages)
    assert (why is None) == fits


def test_a_decoders_fused_pass_takes_these_values_and_no_others():
    taken = {}
    for name in ("attention", "activation_checkpointing", "parallel"):
        values = []
        for value in VALUES[name]:
            settings = unchecked(**FUSED_DECODER | {name: value})
            if rules.lacking(settings, "gpt2") is None:
                values.append(str(value))
        taken[name] = " ".join(values)
    assert taken == {
        "attention": "sdpa triton-causal",
        "activation_checkpointing": "False elementwise",
        "parallel": "none ddp ddp-bf16 ddp-one-bucket zero1",
    }


def shares(parallel: str, schedule: str, stages: int, world: int, micro_batches: int) -> int:
    """Return into how many shares so many processes divide so many micro-batches."""
    spec = types.SimpleNamespace(
        settings=unchecked(parallel=parallel, schedule=schedule),
        stages=stages,
        micro_batches=micro_batches,
        preset=Preset(name="own", effective_batch=8 * micro_batches, epochs=1),
    )
    return rules.replicas(spec, world)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("none", "gpipe", 1, 1, 4), 1),
        (("ddp", "gpipe", 1, 4, 4), 4),
        (("tensor", "gpipe", 1, 4, 1), 1),
        (("pipeline", "gpipe", 2, 4, 2), 2),
        (("pipeline", "1f1b", 2, 4, 4), 2),
        (("pipeline", "interleaved", 2, 2, 4), 1),
    ],
)
def test_processes_share_micro_batches_unless_they_share_the_model(words, expected):
    assert shares(*words) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ddp", "gpipe", 1, 3, 4), "3 processes do not divide the 4 micro-batches of a step"),
        (("pipeline", "gpipe", 2, 3, 4), "3 processes do not make up pipelines of 2"),
        (("pipeline", "1f1b", 4, 4, 3), "1f1b takes at least .* 4 stages, .* has 3 in a step"),
        (("pipeline", "interleaved", 2, 2, 3), "takes a multiple .* 2 stages, .* has 3 in a step"),
    ],
)
def test_processes_that_do_not_divide_a_step_are_refused(words, said):
    refused(said, shares, *words)


@pytest.mark.parametrize("name", ["E-fp8", "E-packed-efficient"])
def test_settings_for_a_gpu_alone_are_not_adjusted_where_there_is_none(name):
    settings = VARIANTS[name].settings
    assert rules.adjust(settings, CPU) == (settings, [])


def test_packed_sequences_that_were_asked_for_with_flash_stay_so_without_a_gpu():
    settings = Settings(padding="packed", attention="flash")
    assert rules.adjust(settings, CPU) == (settings, [])
