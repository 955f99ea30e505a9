"""Variants, presets and specs: what a run is, what names it, and what a machine makes of it."""

import dataclasses
import hashlib
import itertools
import json
import re
from unittest.mock import Mock

import numpy as np
import pytest

from qa_lib.errors import SpecError
from qa_lib.lab import sweep
from qa_lib.lab.report.evidence import load_runs, select
from qa_lib.lab.report.figures import fig_ladder
from qa_lib.lab.report.notebook import describe
from qa_lib.lab.report.variants_table import headline_table
from qa_lib.lab.search.plan import plan
from qa_lib.paths import PACKAGE
from qa_lib.records.archive import read_runs
from qa_lib.run import plan as run_plan
from qa_lib.spec import variants as table_of_variants
from qa_lib.spec.machine import Machine, hardware_name
from qa_lib.spec.presets import PRESETS, Preset, named_or_own, sized, stride_of, whole_number
from qa_lib.spec.recipes import RECIPES, find_recipe
from qa_lib.spec.resolve import resolve
from qa_lib.spec.rules import missing, since
from qa_lib.spec.settings import Settings
from qa_lib.spec.shapes import check_positions, find_shape
from qa_lib.spec.spec import Spec, group_name, sha256_of_json
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import FAMILIES, VARIANTS, Variant, find_family, find_variant, tagged
from tests.material import refused
from tests.report_runs import make
from tests.tiny import CPU, H200, planned

BARE = Machine()
PAIR = dataclasses.replace(H200, gpus=2)

# The table of variants.


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda variant: variant.name)
def test_a_variant_is_its_parent_and_one_change(variant):
    if variant.parent is None:
        assert variant.name == "A1"
        assert variant.settings == Settings()
        return
    own = dataclasses.asdict(variant.settings)
    parents = dataclasses.asdict(VARIANTS[variant.parent].settings)
    assert {name for name in own if own[name] != parents[name]} == variant.change.keys()
    assert len(variant.change) == 1
    assert own["trainable"] in RECIPES


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda variant: variant.name)
def test_a_variant_has_a_family_and_says_why_in_a_sentence(variant):
    assert variant.family in FAMILIES
    assert variant.why.endswith((".", "?"))
    assert "\n" not in variant.why


def test_no_two_variants_are_the_same_run():
    runs = {(variant.task, variant.settings) for variant in VARIANTS.values()}
    assert len(runs) == len(VARIANTS)


MISSPELT = [
    ({"atention": "sdpa"}, "variant X: .*atention"),
    ({"attention": "sdap"}, "unknown attention 'sdap'; did you mean 'sdpa'?"),
    ({"padding": "packed"}, "padding 'packed' and attention 'eager' do not go together"),
]


@pytest.mark.parametrize(("change", "message"), MISSPELT)
def test_a_line_with_a_change_that_cannot_be_is_an_error(change, message):
    variant = Variant("X", parent="A1", why="?", **change)
    with pytest.raises(SpecError, match=message):
        _ = variant.settings


def test_a_line_with_a_tag_that_does_not_exist_is_an_error():
    refused("variant X: unknown tag 'laddder'", Variant, "X", why="?", tags=("laddder",))


def test_of_several_tags_that_do_not_exist_the_first_is_named():
    tags = ("trainer", "zzz", "aaa")
    refused("variant X: unknown tag 'aaa'$", Variant, "X", why="?", tags=tags)


def test_a_line_that_cannot_be_is_an_error_as_soon_as_the_table_is_read(monkeypatch):
    wrong = Variant("X", why="?", attention="sdap")
    monkeypatch.setattr(table_of_variants, "_TABLE", [wrong])
    monkeypatch.setitem(VARIANTS, "X", wrong)
    refused("unknown attention 'sdap'", table_of_variants._check_table)


def test_recommended_is_the_tasks_baseline_until_it_is_chosen():
    assert find_variant("recommended").name == "A1"
    assert find_variant("recommended", "lm").name == "L1"
    assert find_variant("recommended", several=True).name == "P1"
    assert find_variant("recommended", "lm", several=True).name == "L-ddp"
    refused("unknown variant 'A11'; did you mean 'A1'", find_variant, "A11")


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_a_task_speaks_of_variants_and_scores_that_exist(task):
    for name in [task.baseline, *task.on_gpu, *task.on_cpu]:
        assert VARIANTS[name].task == task.name
    scores = set(task.scoring.scores)
    assert {task.scoring.metric, task.tuned_by, *task.card.metrics, *task.official} <= scores


# What names a run.


def test_the_same_run_by_other_words_has_the_same_hash():
    base = planned()
    usual_rate = PRESETS["smoke"].learning_rate
    same = [
        planned(machine=H200),
        planned(learning_rate=usual_rate),
        planned(epochs=0, learning_rate=0.0),
    ]
    assert {spec.hash for spec in same} == {base.hash}


def test_everything_that_defines_a_run_is_in_its_hash():
    changes = [
        {},
        {"seeds": [1]},
        {"micro_batch": 16},
        {"data": "synthetic:80"},
        {"epochs": 2},
        {"learning_rate": 1e-3},
        {"epochs": 2, "learning_rate": 1e-3},
    ]
    specs = [planned(**change) for change in changes]
    specs += map(planned, ("A2", "E-dropout", "E-dropout-moments", "E-recompute-elementwise"))
    assert len({spec.hash for spec in specs}) == len(specs)


def test_a_recipes_numbers_are_in_the_hash_and_not_its_name_alone(monkeypatch):
    before = planned("B1").hash
    monkeypatch.setitem(RECIPES, "lora-qv", dataclasses.replace(RECIPES["lora-qv"], rank=9))
    assert planned("B1").hash != before


def test_a_run_is_named_by_variant_seed_and_hash_and_its_group_by_hardware_and_preset():
    spec = planned()
    assert spec.run_id == f"A1-s0-{spec.hash[:6]}"
    assert spec.group == "cpu-smoke"
    assert planned(machine=H200).group == "h200-smoke"


def test_a_number_of_epochs_of_ones_own_takes_the_place_of_steps():
    preset = planned(epochs=2).preset
    assert (preset.steps, preset.epochs) == (None, 2)


@pytest.mark.parametrize("rate", [-1.0, 1.0, float("nan")])
def test_a_learning_rate_is_between_0_and_1(rate):
    refused("is not between 0 and 1", planned, learning_rate=rate)


def spec_of_record(entry: dict) -> Spec:
    """Return the spec that a committed run's record was made of, by the variants of today."""
    kept = entry["spec"]
    searched = ("micro_batch", "trainable") if kept["search"] == "tune" else ("micro_batch",)
    own = {name: kept["settings"][name] for name in searched}
    settings = dataclasses.replace(VARIANTS[kept["variant"]].settings, **own)
    return Spec(
        variant=kept["variant"],
        preset=Preset(**kept["preset"]),
        seed=kept["seed"],
        asked=settings,
        settings=settings,
        adjusted=[],
        skip=None,
        hardware=kept["hardware"],
        data={key: entry["data"][key] for key in ("name", "sha256")},
        model={key: entry["model"][key] for key in ("name", "revision")},
        data_source="",
        model_source="",
        world=kept["world"],
        stages=kept["stages"] or 1,
    )


@pytest.fixture(scope="module")
def evidence():
    """The committed runs, none of which may be broken; a test fails where there are none."""
    broken = []
    runs = read_runs(PACKAGE.parent / "runs", left_out=lambda *problem: broken.append(problem))
    committed = [run.record for run in runs if run.archive]
    assert broken == []
    assert len(committed) >= 1_200
    return committed


def test_every_committed_run_keeps_its_name(evidence):
    """Each committed record is read, and its run's id made anew from the table of variants."""
    names = set()
    for entry in evidence:
        spec = spec_of_record(entry)
        assert (spec.group, spec.run_id) == (entry["group"], entry["run_id"])
        names.add((spec.group, spec.run_id))
    assert len(names) == len(evidence)


# The dataclasses of tomorrow: one more field each, whose default means what was so before.
WiderSettings = dataclasses.make_dataclass(
    "Settings", [("offload", str, "none")], bases=(Settings,), frozen=True
)
WiderPreset = dataclasses.make_dataclass(
    "Preset", [("replicas", int, 1)], bases=(Preset,), frozen=True, kw_only=True
)


@pytest.fixture
def tomorrow(monkeypatch):
    """A function from a spec to the same one with the dataclasses of tomorrow, and new fields."""
    monkeypatch.setattr("qa_lib.spec.spec.Settings", WiderSettings)
    monkeypatch.setattr("qa_lib.spec.spec.Preset", WiderPreset)

    def of(today: Spec, settings: dict | None = None, preset: dict | None = None) -> Spec:
        asked = WiderSettings(**dataclasses.asdict(today.asked), **settings or {})
        wider = WiderPreset(**dataclasses.asdict(today.preset), **preset or {})
        return dataclasses.replace(today, asked=asked, preset=wider)

    return of


def test_a_new_field_whose_default_means_what_was_before_renames_no_committed_run(
    evidence, tomorrow
):
    for entry in evidence[::10]:
        assert tomorrow(spec_of_record(entry)).run_id == entry["run_id"]


def test_a_new_field_with_another_value_renames_a_run(evidence, tomorrow):
    today = spec_of_record(evidence[0])
    specs = [
        today,
        tomorrow(today, settings={"offload": "cpu"}),
        tomorrow(today, preset={"replicas": 2}),
        dataclasses.replace(today, world=2),
    ]
    assert len({spec.hash for spec in specs}) == len(specs)


# What a machine makes of a variant.

SKIPPED = [
    ("D1-cudagraphs", CPU, {}, "CUDA"),
    ("D1-cudagraphs", H200, {}, None),
    ("D1-nvfuser", H200, {}, "nvfuser"),
    ("D1", CPU, {}, None),
    ("A4", CPU, {"compiler": False}, "C++ compiler"),
    ("C1", CPU, {"bitsandbytes": False}, "bitsandbytes"),
    ("P0-deepspeed", PAIR, {}, "needs the package deepspeed"),
    ("P0-deepspeed", PAIR, {"deepspeed": True}, None),
    ("P0-polled", CPU, {}, "CUDA"),
    ("P0-polled", PAIR, {}, None),
    ("A2", BARE, {}, None),
    ("E-varlen", H200, {"sm": 75}, "8.0 or newer"),
    ("E-norm", H200, {"compiler": False}, "Triton"),
    ("E-t4-norm", H200, {"sm": 70}, "7.5 or newer"),
    ("E-t4-norm", H200, {"sm": 75}, None),
    ("E-packed-efficient", CPU, {}, "CUDA"),
    ("E-graph", CPU, {}, None),
]


@pytest.mark.parametrize(("variant", "machine", "changes", "reason"), SKIPPED)
def test_what_a_machine_lacks_skips_the_variant_with_the_reason(variant, machine, changes, reason):
    skip = planned(variant, machine=dataclasses.replace(machine, **changes)).skip
    if reason is None:
        assert skip is None
    else:
        assert reason in skip


SINCE = {"A1": None, "A3": 70, "E-t4-masters": 75, "E-dropout": 80, "E-dropout-fp8": 89}


@pytest.mark.parametrize("name", SINCE)
def test_a_variant_says_from_which_generation_it_runs(name):
    settings = VARIANTS[name].settings
    assert since(settings) == SINCE[name]
    capability = (SINCE[name] or 80) - 1
    older = dataclasses.replace(H200, sm=capability, compiler=capability >= 70)
    assert (missing(settings, older) is None) == (SINCE[name] is None)


def test_our_attention_takes_a_newer_gpu_than_our_other_kernels():
    in_fp16 = dataclasses.replace(VARIANTS["E-norm"].settings, precision="fp16")
    assert "GEMMs in Triton" in missing(in_fp16, dataclasses.replace(H200, sm=75))


def test_a_notebook_says_which_generation_a_variant_takes():
    said = describe(planned("E-varlen", machine=H200))
    assert "On a GPU it needs compute capability 8.0 or newer." in said


# Presets.


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_is_sound(preset):
    assert (preset.steps is None) != (preset.epochs is None)
    micro_batch = Settings().micro_batch
    assert (preset.batch or micro_batch) % micro_batch == 0
    longest = {"qa": 512, "lm": 1024}[preset.task]
    assert 0 < preset.stride < preset.max_length <= longest


WRONG_VALUES = [
    ({"steps": 1.5}, "steps is '1.5', and not a whole number"),
    ({"stride": -1}, "stride is '-1', and not a whole number from 0"),
    ({"max_length": None}, "max_length is 'None', and not a whole number"),
    ({"learning_rate": "fast"}, "learning_rate is 'fast', and not a number"),
    ({"learning_rate": True}, "learning_rate is 'True', and not a number"),
    ({"quality": 1}, "quality is '1', and not True or False"),
    ({"model": 3}, "model is '3', and not a text"),
]


@pytest.mark.parametrize(("values", "message"), WRONG_VALUES)
def test_a_preset_has_values_of_its_types(values, message):
    refused(message, Preset, name="own", **values)


# A new variant.


@pytest.fixture
def mine(monkeypatch):
    """A new line of the table."""
    variant = Variant(
        "E-mine",
        parent="E-moments",
        activation_checkpointing=True,
        why="Least memory.",
        tags=("ladder", "headline"),
    )
    monkeypatch.setitem(VARIANTS, variant.name, variant)
    return variant


def test_a_new_variant_is_listed(mine, typed):
    row = r"\nE-mine +E-moments +8.0 +activation_checkpointing = True\n    Least memory"
    assert re.search(row, typed("variants"))
    listed = {row["name"]: row for row in json.loads(typed("variants --json"))}
    assert list(listed) == list(VARIANTS)
    assert listed["E-mine"]["change"] == {"activation_checkpointing": True}
    assert listed["E-mine"]["settings"]["optimizer"] == "adamw-master-bf16"
    assert listed["E-mine"]["family"] == "E"
    assert listed["E-mine"]["since"] == 80
    assert listed["E-mine"]["needs"]


def test_the_list_of_variants_says_what_its_columns_are(typed):
    first, *_, last = typed("variants").splitlines()
    assert first.split() == "variant parent GPU change, and why below it".split()
    assert last.startswith("GPU: the compute capability from which GPUs run it")


@pytest.mark.parametrize("words", ["", "--family E"])
def test_a_new_variant_is_swept(words, mine, monkeypatch, tmp_path, typed):
    monkeypatch.setattr(sweep, "probe", lambda: (H200, {}))
    said = typed(f"sweep --plan --preset smoke --runs {tmp_path} {words}")
    assert re.search(r"\nh200-smoke/E-mine-s0-\w{6} +run\n", said)


def test_a_new_variant_is_shown_where_its_tags_say(mine, tmp_path):
    for name in ("A1", "A2", mine.name):
        make(tmp_path, name)
    runs = select(load_runs(tmp_path), "cpu-smoke")
    bars = [label.get_text() for label in fig_ladder(runs).axes[0].get_yticklabels()]
    assert bars[-1] == "E-mine: Least memory."
    assert list(headline_table(runs, runs)["variant"]) == ["A1", "E-mine"]


# Several sizes of a variant, as a sweep takes them.


def test_lists_of_sizes_are_tried_in_every_combination():
    sizes = {"max_length": [128, 384, 128], "micro_batch": [8, 32]}
    specs = plan(["A1", "A2"], "sizing", data="synthetic:40", model="tiny", machine=H200, **sizes)
    tried = [(spec.preset.max_length, spec.asked.micro_batch, spec.variant) for spec in specs]
    assert tried == [*itertools.product((128, 384), (8, 32), ("A1", "A2"))]
    assert len({spec.hash for spec in specs}) == 8


def test_all_variants_with_the_first_seed_come_first_and_each_run_once():
    specs = plan(["A2", "A1", "A2"], "smoke", [3, 0, 3], data="synthetic:40", machine=CPU)
    planned = [(spec.seed, spec.variant) for spec in specs]
    assert planned == [(3, "A2"), (3, "A1"), (0, "A2"), (0, "A1")]


def test_a_size_in_a_list_is_the_same_run_as_the_size_alone():
    words = {"data": "synthetic:40", "model": "tiny", "machine": H200}
    listed = plan(["A1"], "sizing", micro_batch=[8, 32], **words)
    (alone,) = plan(["A1"], "sizing", micro_batch=32, **words)
    assert alone.hash in {spec.hash for spec in listed}


def test_sizes_that_do_not_go_together_are_left_out_where_others_remain():
    left_out = []
    sizes = {"micro_batch": [8, 16], "batch": [8, 32], "world": [1, 2]}
    specs = plan(["A1"], "smoke", machine=CPU, left_out=left_out, **sizes)
    planned_sizes = [(spec.asked.micro_batch, spec.preset.batch) for spec in specs]
    assert planned_sizes == [(8, 8), (8, 32), (16, 32)]
    assert len(left_out) == 2
    assert "A1: micro-batch 16 does not divide the effective batch 8" in left_out[1]


def request(**config):
    """The request for a recommended run of a model, and the stand-in for its inspection."""
    sizes = dict.fromkeys(("max_length", "batch", "micro_batch", "world"))
    words = {"data": None, "model": None, "machine": CPU, "sizes": sizes, "own": {}}
    identity = {"name": "a-model", "revision": "1"}
    asked = run_plan.make_request(["recommended"], "smoke", [0], **words)
    return asked, lambda _: (identity, config)


@pytest.mark.parametrize("config", [{}, {"model_type": "bert"}])
def test_who_chooses_is_told_whether_the_models_configuration_is_known(config, monkeypatch):
    """That of a model of the hub may not be here yet."""
    asked, inspect = request(**config)
    monkeypatch.setattr(run_plan, "inspect_model", inspect)
    choose = Mock(side_effect=lambda specs, *_: specs)
    (spec,) = run_plan.plan(asked, choose).specs
    assert spec.model["name"] == "a-model"
    assert choose.call_args.args[1:] == (CPU, bool(config))


def test_a_model_without_a_position_is_refused_by_a_plan(monkeypatch):
    asked, inspect = request(model_type="bert", max_position_embeddings=0)
    monkeypatch.setattr(run_plan, "inspect_model", inspect)
    refused("has no position for a token", run_plan.plan, asked)


def test_an_open_size_is_refused_by_the_reason_of_the_usual_one():
    words = {"data": "synthetic:40", "model": "tiny", "machine": CPU, "world": 3}
    refused("which are 32 samples by 8$", plan, ["recommended"], "local", **words)


def test_sizes_that_do_not_go_together_are_refused_where_none_remains():
    words = {"micro_batch": [5, 7], "machine": CPU, "left_out": []}
    refused("micro-batch 5 does not divide", plan, ["A1", "A2"], "smoke", **words)


def test_sizes_that_do_not_go_together_are_refused_where_nobody_is_told_of_them():
    words = {"micro_batch": [5, 8], "machine": CPU}
    refused("micro-batch 5 does not divide", plan, ["A1"], "smoke", **words)


# The presets' numbers.

SIZES = {"steps", "epochs", "effective_batch", "batch_tokens", "learning_rate", "max_length"}
SIZES |= {"stride", "max_answer_length"}


def test_committed_runs_were_of_the_presets_of_today(evidence):
    """Apart from sizes that were asked for."""
    exact = set()
    ran = set()
    for entry in evidence:
        preset = entry["spec"]["preset"]
        if preset["name"] not in PRESETS:  # of a search
            continue
        today = dataclasses.asdict(PRESETS[preset["name"]])
        differing = {name for name in today if today[name] != preset[name]}
        assert differing <= SIZES, preset["name"]
        ran.add(preset["name"])
        if not differing:
            exact.add(preset["name"])
    assert len(ran) >= 12
    assert ran - exact <= {"speedrun"}, "of which all had a larger batch"


@pytest.mark.parametrize("name", ["local", "full", "lm-full"])
def test_a_whole_training_is_scored_goes_on_from_checkpoints_and_may_take_hours(name):
    preset = PRESETS[name]
    assert (preset.epochs, preset.quality) == (3, True)
    assert (preset.checkpoint_every, preset.time_limit_s) == (500, 6 * 3600)


@pytest.mark.parametrize(
    ("name", "steps", "rate", "batch"), [("smoke", 400, 4e-3, 16), ("lm-smoke", 120, 5e-3, 16)]
)
def test_a_trial_on_a_cpu_takes_one_thread_and_minutes_at_most(name, steps, rate, batch):
    preset = PRESETS[name]
    assert (preset.learning_rate, preset.batch) == (rate, batch)
    assert (preset.steps, preset.threads, preset.time_limit_s) == (steps, 1, 300)
    assert (preset.quality, preset.recipe_rates) == (True, False)
    assert 0 < preset.measure_from < preset.checkpoint_every < steps


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_without_epochs_has_steps_to_measure_after_its_warm_up(preset):
    assert preset.steps is None or preset.measure_from < preset.steps


@pytest.mark.parametrize("value", [0, 1, 2**31 - 1, np.int64(3)])
def test_a_whole_number_in_its_bounds_is_pythons_own(value):
    assert type(whole_number("n", value, 0)) is int
    assert whole_number("n", value, 0) == value


@pytest.mark.parametrize("value", [-1, 2**31, 1.0, "1", True, None])
def test_another_value_is_no_whole_number(value):
    refused("n is .*, and not a whole number from 0 to 2147483647", whole_number, "n", value, 0)


@pytest.mark.parametrize(
    ("max_length", "stride"), [(96, 32), (128, 42), (255, 85), (256, 128), (512, 128)]
)
def test_windows_share_the_usual_tokens_or_a_third_of_a_short_one(max_length, stride):
    assert stride_of(max_length, 128) == stride
    assert sized(PRESETS["bench"], max_length=max_length).stride == stride


def test_a_batch_in_tokens_is_as_many_samples_as_they_make():
    assert PRESETS["lm-bench"].batch == 32
    assert PRESETS["bench"].batch == 32
    assert PRESETS["vram"].batch is None


def test_a_batch_of_ones_own_takes_the_place_of_one_in_tokens():
    preset = sized(PRESETS["lm-bench"], batch=5)
    assert (preset.effective_batch, preset.batch_tokens, preset.batch) == (5, None, 5)


def test_a_rate_of_numpys_is_pythons_number_in_a_preset():
    rate = sized(PRESETS["bench"], learning_rate=np.float32(0.5)).learning_rate
    assert type(rate) is float and rate == 0.5


def test_samples_may_be_as_long_as_a_model_takes_and_no_longer():
    bench = PRESETS["bench"]
    bench.check_length("bert", 384)
    said = "bert takes 383 tokens, and samples of preset bench have 384"
    refused(said, bench.check_length, "bert", 383)


def test_a_preset_may_have_zero_where_that_means_none():
    for name in ("stride", "measure_from", "checkpoint_every"):
        Preset(name="own", epochs=1, **{name: 0})
    for name in ("max_length", "effective_batch", "steps", "epochs", "threads", "time_limit_s"):
        refused(f"{name} is '0', and not a whole number from 1", Preset, name="own", **{name: 0})


@pytest.mark.parametrize(
    ("preset", "data", "model", "name"),
    [("bench", None, None, "bench"), ("bench", "d", "m", "bench"), (None, "d", "m", "local")],
)
def test_data_and_a_model_alone_mean_the_preset_for_ones_own(preset, data, model, name):
    assert named_or_own(preset, data, model) == name


@pytest.mark.parametrize(("data", "model"), [(None, "m"), ("d", None), (None, None)])
def test_without_a_preset_both_data_and_a_model_are_needed(data, model):
    refused("no preset is named", named_or_own, None, data, model)


# Recipes, shapes, machines and tasks.


def test_adapters_of_another_rank_train_at_the_presets_own_rate():
    recipe = find_recipe("lora-all-r4")
    assert (recipe.rank, recipe.lr_factor) == (4, 1.0)
    assert recipe.targets == RECIPES["lora-all"].targets


@pytest.mark.parametrize("name", ["lora-all-r0", "lora-all-r04", "bitfit-r4", "lora-x-r4", "r4"])
def test_a_rank_that_cannot_be_is_no_recipe(name):
    refused("unknown trainable", find_recipe, name)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        (None, "cpu"),
        ("", "cpu"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3050", "rtx-3050"),
        ("NVIDIA A100-SXM4-40GB (MIG 3g.20gb)", "a100-sxm4-40gb-mig-3g-20gb"),
    ],
)
def test_a_gpus_name_is_part_of_a_folders(gpu, name):
    assert hardware_name(gpu) == name


def test_a_shape_has_the_sizes_of_its_name_and_heads_as_wide_as_gpt_2s():
    shape = find_shape("gpt2:L3H128V512P96")
    assert (shape.layers, shape.hidden, shape.vocabulary, shape.positions) == (3, 128, 512, 96)
    assert shape.heads == 2
    usual = find_shape("gpt2:L12H768")
    assert (usual.vocabulary, usual.positions, usual.heads) == (50_257, 1024, 12)


def test_the_smallest_vocabulary_has_a_token_beside_all_bytes():
    assert find_shape("gpt2:L1H64V257").vocabulary == 257
    refused("a shape is written like", find_shape, "gpt2:L1H64V256")


def test_samples_may_be_as_long_as_a_shape_has_positions():
    check_positions("gpt2:L1H64P96", 96)
    check_positions("bert-base-uncased", 9999)
    refused("give --model gpt2:L1H64P97", check_positions, "gpt2:L1H64P96", 97)
    refused("give --model gpt2:L1H64P1025", check_positions, "gpt2:L1H64", 1025)


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (("cpu", "smoke", "qa"), "cpu-smoke"),
        (("h200", "lm-bench", "lm"), "h200-lm-bench"),
        (("h200", "tune", "lm"), "h200-tune-lm"),
        (("h200", "lmx", "lm"), "h200-lmx-lm"),
    ],
)
def test_a_group_names_its_task_once_unless_it_is_questions(names, group):
    assert group_name(*names) == group


def test_a_digest_does_not_depend_on_the_order_of_names():
    assert sha256_of_json({"a": 1, "b": [2]}) == sha256_of_json({"b": [2], "a": 1})
    expected = hashlib.sha256(b'{"a":1,"b":[2]}').hexdigest()
    assert sha256_of_json({"b": [2], "a": 1}) == expected


@pytest.mark.parametrize(
    ("variant", "preset", "words", "expected"),
    [
        ("A1", "smoke", {}, (2, 2)),
        ("A1", "bench", {"micro_batch": 32}, (1, 1)),
        ("A1", "vram", {"model": "tiny"}, (1, 1)),
        ("P1", "smoke", {"world": 2}, (2, 1)),
        ("P1", "vram", {"world": 4, "model": "tiny"}, (4, 1)),
        ("P-tensor", "vram", {"world": 2, "model": "tiny"}, (1, 1)),
        ("P-gpipe", "smoke", {"world": 2}, (2, 2)),
        ("P-gpipe", "smoke", {"world": 4, "stages": 2}, (2, 1)),
    ],
)
def test_micro_batches_of_a_step_and_of_each_process(variant, preset, words, expected):
    spec = planned(variant, preset, **{"model": "tiny"} | words)
    assert (spec.micro_batches, spec.accumulation) == expected


@pytest.mark.parametrize(
    ("variant", "words", "expected"),
    [
        ("A1", {}, (1, 1)),
        ("P1", {}, (2, 1)),
        ("P1", {"world": 1}, (1, 1)),
        ("P-gpipe", {}, (2, 2)),
        ("P-gpipe", {"stages": 2, "world": 4}, (4, 2)),
        ("P-gpipe", {"stages": 1}, (2, 1)),
    ],
)
def test_without_a_number_a_parallel_run_has_two_processes_in_one_pipeline(
    variant, words, expected
):
    spec = planned(variant, **words)
    assert (spec.world, spec.stages) == expected


def test_a_pipeline_has_at_least_as_many_processes_as_stages():
    spec = planned("P-gpipe", "critical-batch", stages=4, model="tiny")
    assert (spec.world, spec.stages) == (4, 4)


def test_what_was_asked_for_is_noted_as_the_preset_has_it_and_what_cannot_differ_is_not():
    sizes = {"epochs": 2, "learning_rate": 1e-3, "max_length": 64, "batch": 8, "world": 1}
    spec = planned(**sizes, stages=1, micro_batch=4)
    expected = {"epochs": 2, "learning_rate": 1e-3, "max_length": 64, "batch": 8, "micro_batch": 4}
    assert spec.own == expected
    assert planned("P-gpipe", world=2, stages=2).own == {"world": 2, "stages": 2}
    assert planned("P1", world=2, stages=1).own == {"world": 2}


@pytest.mark.parametrize(
    ("micro_batch", "chosen"), [(None, {"variant", "micro_batch"}), (8, {"variant"})]
)
def test_recommended_leaves_the_micro_batch_to_the_machine_unless_it_is_given(micro_batch, chosen):
    sources = {"data": {"name": "d", "sha256": ""}, "model": {"name": "m", "revision": ""}}
    words = {**sources, "data_source": "d", "model_source": "tiny"}
    spec = resolve("recommended", "smoke", 0, CPU, **words, micro_batch=micro_batch)
    assert set(spec.chosen) == chosen
    assert spec.recommended
    named = resolve("A1", "smoke", 0, CPU, **words)
    assert (named.chosen, named.recommended) == ([], False)


def test_pipelines_and_several_processes_are_other_runs():
    counts = [{"world": 2}, {"world": 2, "stages": 1}, {"world": 4, "stages": 2}]
    specs = [planned("P-gpipe", micro_batch=2, **each) for each in counts]
    assert len({spec.hash for spec in specs}) == 3


def test_tagged_variants_and_those_of_a_family_come_in_the_order_of_the_table():
    assert tagged("plain") == ["E-searched", "L-plain", "L-plain-bf16", "L-searched"]
    assert tagged("quickstart") == ["A1", "A2", "A3", "A4", "A4-b", "B1", "C1", "E-packed"]
    trainers = "A0 A0-longest A0-grouped A0-compile A0-tuned A0-defaults L0 L0-sdpa L0-compile"
    assert tagged("trainer") == trainers.split()
    assert tagged("default") == ["A0-longest", "A0-defaults", "L0-sdpa"]
    assert find_family("C") == ["C1", "C2-8", "C2"]
    refused("unknown family 'Z'", find_family, "Z")


@pytest.mark.parametrize(
    ("tag", "names"),
    [
        (
            "ladder",
            "A1 A2 A3 A4-nb A4 E-packed E-adamw E-graph E-bf16 E-masters E-qkv E-dropout E-regions "
            "E-varlen E-norm E-gelu E-moments E-uncompiled E-fp8-uncompiled E-fp8-all "
            "E-fp8-gradients L1 L-bf16 L-sdpa L-compile L-adamw L-graph L-masters L-dropout "
            "L-norm L-gelu L-attention L-loss L-moments L-fp8 L-fp8-head L-fp8-gradients "
            "L-fp8-uncompiled L-fp8-all",
        ),
        (
            "headline",
            "A1 A0-longest A0-compile A0-tuned E-searched E-recompute-8bit E-uncompiled "
            "E-fp8-gradients E-t4-norm P-peers L1 L0-sdpa L0-compile L-dropout L-moments "
            "L-fp8-head L-fp8-all L-fp8-all-nodropout L-fp8-head-nodropout L-moments-nodropout "
            "L-plain L-plain-bf16 L-plain-bf16-nodropout L-searched L-searched-nodropout",
        ),
    ],
)
def test_the_report_shows_these_variants(tag, names):
    assert tagged(tag) == names.split()


def test_two_lines_of_the_table_may_not_have_one_name(monkeypatch):
    twin = Variant("A2", parent="A1", precision="bf16", why="A twin.")
    monkeypatch.setattr(table_of_variants, "_TABLE", [*table_of_variants._TABLE, twin])
    refused("two variants are named 'A2'", table_of_variants._check_table)


@pytest.mark.parametrize(
    ("optimizer", "has_half_weights"),
    [
        ("adamw", False),
        ("adamw-fused", False),
        ("adamw-8bit", False),
        ("adamw-master", True),
        ("adamw-master-bf16", True),
        ("adamw-master-8bit", True),
        ("adamw-rounded-bf16", True),
        ("adamw-rounded-8bit", True),
    ],
)
def test_weights_in_half_precision_are_rounded_or_have_masters(optimizer, has_half_weights):
    assert Settings(optimizer=optimizer, precision="bf16").half_weights == has_half_weights


@pytest.mark.parametrize(
    "values", [{"cuda_graph": 0}, {"group_by_length": 0}, {"micro_batch": True}, {"qat": None}]
)
def test_a_setting_takes_no_value_that_only_equals_its_own(values):
    refused(next(iter(values)), Settings, **values)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_card_of_a_task_names_transformers_own_class(task):
    loaders = {"qa": "AutoModelForQuestionAnswering", "lm": "AutoModelForCausalLM"}
    tags = {"qa": "question-answering", "lm": "text-generation"}
    assert (task.card.loader, task.card.pipeline_tag) == (loaders[task.name], tags[task.name])


def test_scores_have_the_names_of_the_hub_and_of_the_official_script():
    assert TASKS["qa"].card.metrics == {"exact": "exact_match", "f1": "f1"}
    assert TASKS["lm"].card.metrics == {"word_perplexity": "perplexity"}
    for ours, theirs in TASKS["qa"].official.items():
        words = {"HasAns": "has_answer", "NoAns": "no_answer", "thresh": "threshold", "total": "n"}
        assert ours == "_".join(words.get(word, word) for word in theirs.split("_"))


def test_a_lower_perplexity_and_a_higher_f1_are_better():
    assert TASKS["qa"].scoring.higher_is_better and TASKS["qa"].scoring.metric == "f1"
    lm = TASKS["lm"].scoring
    assert not lm.higher_is_better and lm.metric == "word_perplexity"
