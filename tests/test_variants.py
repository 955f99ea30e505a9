import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qa_lib import variants
from qa_lib.run.plan import plan
from qa_lib.variants import FAMILIES, RECIPES, SCALES, VARIANTS, Machine, Settings, SpecError, UnknownName

PACKAGE = Path(variants.__file__).parent
CPU = Machine(backends=("inductor", "aot_eager", "cudagraphs"), bitsandbytes=True, compiler=True)
GPU = dataclasses.replace(CPU, hardware="h200", gpus=1, sm=90)
SEEDS_MATRIX = "A0 A1 A2 A3 A4 A4-b A4-nb B1 B1-all B2 B3 B3-last4 C1 C2 C2-8 D1 D1-cudagraphs D1-nvfuser".split()


def test_every_row_of_the_seeds_is_there():
    assert set(SEEDS_MATRIX) <= set(VARIANTS)


@pytest.mark.parametrize("row", VARIANTS.values(), ids=lambda row: row.name)
def test_a_row_is_its_parent_and_one_change(row):
    assert row.family in FAMILIES
    assert row.why.endswith((".", "?"))
    assert "\n" not in row.why
    if row.parent is None:
        assert row.name == "A1"
        assert row.settings == Settings()
        return
    parent, own = (dataclasses.asdict(VARIANTS[name].settings) for name in (row.parent, row.name))
    assert {key for key in own if own[key] != parent[key]} == set(row.change)
    assert len(row.change) == 1
    assert own["trainable"] in RECIPES


def test_no_two_rows_are_the_same_run():
    assert len({row.settings for row in VARIANTS.values()}) == len(VARIANTS)


def test_hash_follows_everything_that_defines_a_run_and_nothing_else(monkeypatch):
    def spec(variant="A1", scale="smoke", seed=0, machine=CPU, **more):
        return plan([variant], scale, [seed], machine=machine, **more)[0]

    base = spec()
    assert spec().hash == base.hash
    assert spec(machine=GPU).hash == base.hash
    assert len({s.hash for s in (base, spec("A2"), spec(seed=1), spec(micro_batch=16), spec(data="synthetic:40"))}) == 5
    assert base.run_id == f"A1-s0-{base.hash[:6]}"
    before = spec("B1").hash
    monkeypatch.setitem(RECIPES, "lora-qv", dataclasses.replace(RECIPES["lora-qv"], rank=9))
    assert spec("B1").hash != before, "the same name for another recipe"
    assert (base.group, spec(machine=GPU).group) == ("cpu-smoke", "h200-smoke")


def test_a_cpu_cannot_do_fp16_and_says_so():
    (spec,) = plan(["A1"], "smoke", machine=CPU)
    assert (spec.asked.precision, spec.settings.precision) == ("fp16", "fp32")
    assert "fp16" in spec.adjusted[0]
    (spec,) = plan(["A1"], "smoke", machine=GPU)
    assert spec.settings == spec.asked
    assert spec.adjusted == []


@pytest.mark.parametrize(
    ("variant", "machine", "reason"),
    [
        ("D1-cudagraphs", CPU, "CUDA"),
        ("D1-cudagraphs", GPU, None),
        ("D1-nvfuser", GPU, "nvfuser"),
        ("D1", CPU, None),
        ("A4", dataclasses.replace(CPU, compiler=False), "C++ compiler"),
        ("C1", dataclasses.replace(CPU, bitsandbytes=False), "bitsandbytes"),
        ("A2", Machine(), None),
    ],
)
def test_what_a_machine_lacks_skips_the_row_with_the_reason(variant, machine, reason):
    (spec,) = plan([variant], "smoke", machine=machine)
    assert spec.skip is None if reason is None else reason in spec.skip


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownName, match=r"'A4-nbb'.*did you mean 'A4-nb'"):
        plan(["A4-nbb"], "smoke", machine=CPU)
    with pytest.raises(UnknownName, match="did you mean 'smoke'"):
        plan(["A1"], "smok", machine=CPU)
    with pytest.raises(SpecError, match="micro-batch 5 does not divide"):
        plan(["A1"], "smoke", machine=CPU, micro_batch=5)


def test_scales_are_sound():
    for scale in SCALES.values():
        assert (scale.steps is None) != (scale.epochs is None)
        assert (scale.effective_batch or Settings().micro_batch) % Settings().micro_batch == 0
        assert 0 < scale.stride < scale.max_length <= 512


def test_variants_verb_prints_every_row_as_json():
    done = subprocess.run([sys.executable, "-m", "qa_lib", "variants", "--json"], capture_output=True, text=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == list(VARIANTS)
    assert rows["C1"]["settings"]["optimizer"] == "adamw8bit"


def imports_of(module: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# Which of our packages and root modules a package may import; a rule a line, in the order of the data's way.
RULES = {
    "variants": "",
    "record": "variants data",
    "data": "variants model data",
    "model": "variants data model",
    "measure": "variants record measure",
    "train": "variants record data model measure train",
    "score": "variants record data model score",
    "run": "variants record data model measure train score run",
    "report": "variants record data measure report",
    "app": "record data score report",
    "__main__": "variants data",
}


def test_imports_point_one_way():
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        used = {name.split(".")[1] for name in imports_of(path) if name.startswith("qa_lib.")} - {room}
        wrong = used & RULES.keys() - set(RULES.get(room, "").split())
        assert not wrong, f"{path}: {room} may import {RULES[room]}, not {wrong}"


def test_variants_needs_the_standard_library_alone():
    roots = {name.split(".")[0] for name in imports_of(PACKAGE / "variants.py")}
    assert roots <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("module", ["run.sweep", "report.publish"])
def test_driver_and_report_do_without_torch(module):
    code = f"import sys, qa_lib.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
