import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest

from qa_lib.lab import sweep
from qa_lib.lab.report.evidence import load_runs, select
from qa_lib.lab.report.figures import fig_ladder
from qa_lib.lab.report.notebook import describe
from qa_lib.lab.report.variants_table import headline_table
from qa_lib.records.archive import read_runs
from qa_lib.run.plan import plan
from qa_lib.spec import variants
from qa_lib.spec.presets import PRESETS, Preset
from qa_lib.spec.spec import Machine, Spec, missing
from qa_lib.spec.variants import FAMILIES, RECIPES, VARIANTS, Settings, Variant
from tests.material import refused, table
from tests.report_runs import make
from tests.tiny import CPU, H200, planned

PACKAGE = Path(variants.__file__).parent.parent
PAIR = dataclasses.replace(H200, gpus=2)
MACHINES = {
    "cpu": CPU,
    "gpu": H200,
    "pair": PAIR,
    "deepspeed": dataclasses.replace(PAIR, deepspeed=True),
}
MACHINES["bare"] = Machine()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda variant: variant.name)
def test_a_variant_is_its_parent_and_one_change(variant):
    assert (
        variant.family in FAMILIES and variant.why.endswith((".", "?")) and "\n" not in variant.why
    )
    if variant.parent is None:
        assert (variant.name, variant.settings) == ("A1", Settings())
        return
    parent, own = (
        dataclasses.asdict(VARIANTS[name].settings) for name in (variant.parent, variant.name)
    )
    assert {key for key in own if own[key] != parent[key]} == set(variant.change) and len(
        variant.change
    ) == 1
    assert own["trainable"] in RECIPES


def test_no_two_variants_are_the_same_run():
    assert len({(variant.task, variant.settings) for variant in VARIANTS.values()}) == len(VARIANTS)


def test_hash_follows_everything_that_defines_a_run_and_nothing_else(monkeypatch):
    base, gpu, before = planned(), planned(machine=H200), planned("B1").hash
    usual = planned(learning_rate=PRESETS["smoke"].learning_rate)
    same = base, planned(), gpu, usual, planned(epochs=0, learning_rate=0.0)
    assert {spec.hash for spec in same} == {base.hash}
    words = (
        {"seeds": [1]},
        {"micro_batch": 16},
        {"data": "synthetic:80"},
        {"epochs": 2},
        {"learning_rate": 1e-3},
    )
    others = [planned(**more) for more in (*words, {"epochs": 2, "learning_rate": 1e-3})]
    others += map(planned, ("A2", "E-dropout", "E-dropout-moments", "E-recompute-elementwise"))
    assert len({spec.hash for spec in (base, *others)}) == 1 + len(others)
    assert (base.run_id, base.group, gpu.group) == (
        f"A1-s0-{base.hash[:6]}",
        "cpu-smoke",
        "h200-smoke",
    )
    monkeypatch.setitem(RECIPES, "lora-qv", dataclasses.replace(RECIPES["lora-qv"], rank=9))
    assert planned("B1").hash != before, "the same name for another recipe"


def test_a_number_of_epochs_of_ones_own_takes_the_place_of_steps_and_a_rate_is_below_1():
    own = planned(epochs=2).preset
    assert (own.steps, own.epochs) == (None, 2)
    for rate in (-1.0, 1.0, float("nan")):
        refused("is not between 0 and 1", planned, learning_rate=rate)


def spec_of_record(entry: dict) -> Spec:
    """The spec that a committed run's record was made of, its settings from the table of today."""
    kept = entry["spec"]
    chosen = ("micro_batch", "trainable") if kept["search"] == "tune" else ("micro_batch",)
    row = dataclasses.replace(
        VARIANTS[kept["variant"]].settings, **{name: kept["settings"][name] for name in chosen}
    )
    same = {name: kept[name] for name in ("variant", "seed", "hardware", "world")} | {
        "stages": kept["stages"] or 1
    }
    same |= {
        "data": {key: entry["data"][key] for key in ("name", "sha256")},
        "data_source": "",
        "model_source": "",
    }
    same |= {"model": {key: entry["model"][key] for key in ("name", "revision")}}
    return Spec(
        **same, asked=row, settings=row, adjusted=[], skip=None, preset=Preset(**kept["preset"])
    )


@pytest.fixture(scope="module")
def evidence():
    """The committed runs, none of which may be broken; a test fails where there are none."""
    broken = []
    found = read_runs(PACKAGE.parent / "runs", left_out=lambda *problem: broken.append(problem))
    committed = [run.record for run in found if run.archive]
    assert len(committed) >= 1_200 and not broken
    return committed


def test_every_committed_run_keeps_its_name(evidence):
    """Each committed record is read, and its run's id made anew from the table of variants."""
    for entry in evidence:
        spec = spec_of_record(entry)
        assert (spec.group, spec.run_id) == (entry["group"], entry["run_id"])
    assert len({(entry["group"], entry["run_id"]) for entry in evidence}) == len(evidence)


def test_a_new_field_whose_default_means_what_was_before_renames_no_committed_run(
    evidence, monkeypatch
):
    """The dataclasses of tomorrow: one more field each."""
    wider = dataclasses.make_dataclass(
        "Settings", [("offload", str, "none")], bases=(Settings,), frozen=True
    )
    grown = dataclasses.make_dataclass(
        "Preset", [("replicas", int, 1)], bases=(Preset,), frozen=True, kw_only=True
    )
    monkeypatch.setattr("qa_lib.spec.spec.Settings", wider)
    monkeypatch.setattr("qa_lib.spec.spec.Preset", grown)

    def tomorrow(today, settings=None, preset=None):
        asked = wider(**dataclasses.asdict(today.asked), **settings or {})
        return dataclasses.replace(
            today, asked=asked, preset=grown(**dataclasses.asdict(today.preset), **preset or {})
        )

    for entry in evidence[::10]:
        assert tomorrow(spec_of_record(entry)).run_id == entry["run_id"]
    today = spec_of_record(evidence[0])
    others = [tomorrow(today, {"offload": "cpu"}), tomorrow(today, None, {"replicas": 2})]
    assert (
        len(
            {
                today.hash,
                *(other.hash for other in others),
                dataclasses.replace(today, world=2).hash,
            }
        )
        == 4
    )


@pytest.mark.parametrize(
    ("variant", "machine", "without", "capability", "reason"), table("skipped")
)
def test_what_a_machine_lacks_skips_the_variant_with_the_reason(
    variant, machine, without, capability, reason
):
    changes = dict.fromkeys(without.split(), False) | (
        {"sm": int(capability)} if capability else {}
    )
    said = planned(variant, machine=dataclasses.replace(MACHINES[machine], **changes)).skip
    assert reason in said if reason else said is None


def test_a_variant_says_from_which_generation_it_runs():
    assert "On a GPU it takes compute capability 8.0 or newer." in describe(
        planned("E-varlen", machine=H200)
    )
    for name, since in {
        "A1": None,
        "A3": 70,
        "E-t4-masters": 75,
        "E-dropout": 80,
        "E-dropout-fp8": 89,
    }.items():
        older = dataclasses.replace(H200, sm=(since or 80) - 1, compiler=(since or 80) > 70)
        assert variants.since(VARIANTS[name].settings) == since, name
        assert bool(missing(VARIANTS[name].settings, older)) == bool(since), name
    in_fp16 = dataclasses.replace(VARIANTS["E-norm"].settings, precision="fp16")
    assert "GEMMs in Triton" in missing(in_fp16, dataclasses.replace(H200, sm=75))


def test_presets_are_sound():
    for preset in PRESETS.values():
        assert (preset.steps is None) != (preset.epochs is None)
        assert (preset.batch or Settings().micro_batch) % Settings().micro_batch == 0
        assert 0 < preset.stride < preset.max_length <= {"qa": 512, "lm": 1024}[preset.task]


def test_a_new_variant_is_a_line_of_the_table(monkeypatch, tmp_path, typed):
    """It is listed, planned, swept and, by its tags, shown; what a test of settings makes of its values, test_settings
    says."""
    mine = Variant(
        "E-mine",
        "E-moments",
        {"activation_checkpointing": True},
        "Least memory.",
        ("ladder", "headline"),
    )
    monkeypatch.setitem(VARIANTS, mine.name, mine)
    monkeypatch.setattr(sweep, "probe", lambda: (H200, {}))
    assert re.search(
        r"\nE-mine +E-moments +8.0 +activation_.* = True\n    Least memory", typed("variants")
    )
    listed = {row["name"]: row for row in json.loads(typed("variants --json"))}
    assert (
        list(listed) == list(VARIANTS)
        and listed["E-mine"]["settings"]["optimizer"] == "adamw-master-bf16"
    )
    for words in ("", "--family E"):
        said = typed(f"sweep --plan --preset smoke --runs {tmp_path} {words}")
        assert re.search(r"\nh200-smoke/E-mine-s0-\w{6} +run\n", said)
    for name in ("A1", "A2", mine.name):
        make(tmp_path, name)
    runs = select(load_runs(tmp_path), "cpu-smoke")
    bars = [label.get_text() for label in fig_ladder(runs).axes[0].get_yticklabels()]
    assert bars[-1] == "E-mine: Least memory." and list(headline_table(runs, runs)["variant"]) == [
        "A1",
        "E-mine",
    ]


# Several sizes of a variant, as a sweep takes them.


def test_lists_of_sizes_are_tried_in_every_combination():
    specs = plan(
        ["A1", "A2"],
        "sizing",
        [0],
        "synthetic:40",
        "tiny",
        [8, 32],
        H200,
        max_length=[128, 384, 128],
    )
    found = [(spec.preset.max_length, spec.asked.micro_batch, spec.variant) for spec in specs]
    assert found == [*itertools.product((128, 384), (8, 32), ("A1", "A2"))]
    (one,) = plan(["A1"], "sizing", [0], "synthetic:40", "tiny", 32, H200)
    assert one.hash in {spec.hash for spec in specs} and len({spec.hash for spec in specs}) == 8


def test_sizes_that_do_not_go_together_are_left_out_where_others_remain():
    left_out = []
    sizes = {
        "micro_batch": [8, 16],
        "batch": [8, 32],
        "world": [1, 2],
        "machine": CPU,
        "left_out": left_out,
    }
    found = plan(["A1"], "smoke", **sizes)
    assert [(spec.asked.micro_batch, spec.preset.batch) for spec in found] == [
        (8, 8),
        (8, 32),
        (16, 32),
    ]
    assert (
        len(left_out) == 2
        and "A1: micro-batch 16 does not divide the effective batch 8" in left_out[1]
    )
    refused(
        "micro-batch 5 does not divide",
        plan,
        ["A1", "A2"],
        "smoke",
        micro_batch=[5, 7],
        machine=CPU,
        left_out=[],
    )
    refused("micro-batch 5 does not divide", plan, ["A1"], "smoke", micro_batch=[5, 8], machine=CPU)
