import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from qa_lib import record, variants
from qa_lib.presets import PRESETS, Preset
from qa_lib.record import read_record
from qa_lib.run.plan import plan
from qa_lib.spec import Machine, Spec, describe, missing
from qa_lib.variants import FAMILIES, RECIPES, VARIANTS, Settings, SpecError, UnknownName

PACKAGE = Path(variants.__file__).parent
CPU = Machine(backends=("inductor", "aot_eager", "cudagraphs"), bitsandbytes=True, compiler=True)
GPU = dataclasses.replace(CPU, hardware="h200", gpus=1, sm=90)
GPU_PAIR = dataclasses.replace(GPU, gpus=2)
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
    assert len({(row.task, row.settings) for row in VARIANTS.values()}) == len(VARIANTS)


def test_hash_follows_everything_that_defines_a_run_and_nothing_else(monkeypatch):
    def spec(variant="A1", preset="smoke", seed=0, machine=CPU, **more):
        return plan([variant], preset, [seed], machine=machine, **more)[0]

    base = spec()
    assert spec().hash == base.hash
    assert spec(machine=GPU).hash == base.hash
    assert len({s.hash for s in (base, spec("A2"), spec(seed=1), spec(micro_batch=16), spec(data="synthetic:40"))}) == 5
    assert len({spec(row).hash for row in ("E-dropout", "E-dropout-moments", "E-recompute-elementwise")}) == 3
    assert base.run_id == f"A1-s0-{base.hash[:6]}"
    before = spec("B1").hash
    monkeypatch.setitem(RECIPES, "lora-qv", dataclasses.replace(RECIPES["lora-qv"], rank=9))
    assert spec("B1").hash != before, "the same name for another recipe"
    assert (base.group, spec(machine=GPU).group) == ("cpu-smoke", "h200-smoke")


def test_a_rate_and_a_number_of_epochs_of_ones_own_are_part_of_the_run(tmp_path):
    def spec(**own):
        return plan(["A1"], "smoke", machine=CPU, **own)[0]

    assert (
        spec(epochs=0, learning_rate=0.0).hash == spec(learning_rate=PRESETS["smoke"].learning_rate).hash == spec().hash
    )
    own = [spec(), spec(epochs=2), spec(learning_rate=1e-3), spec(epochs=2, learning_rate=1e-3)]
    assert len({each.hash for each in own}) == 4
    assert (own[1].preset.steps, own[1].preset.epochs) == (None, 2)
    for rate in (-1.0, 1.0, float("nan")):
        with pytest.raises(SpecError, match="is not between 0 and 1"):
            spec(learning_rate=rate)
    for rate in (1e-4, 2e-4):
        (one,) = plan(["A1"], "local", data="synthetic:40", model="tiny", machine=CPU, learning_rate=rate)
        record.finish(tmp_path / one.run_path, record.new_record(one, {"gpu": None}), "ok")
    chosen = select(load_runs(tmp_path), "cpu-local")
    assert [label for label, _ in cells(chosen)] == ["training 3 epochs at 0.0002", "training 3 epochs at 0.0001"]


RUNS = PACKAGE.parent / "runs"


def spec_of_record(entry: dict) -> Spec:
    """The spec that a committed run's record was made of, its settings from the table of today."""
    asked, scale = entry["spec"]["settings"], entry["spec"]["preset"]
    row = dataclasses.replace(VARIANTS[entry["spec"]["variant"]].settings, micro_batch=asked["micro_batch"])
    if entry["spec"]["search"] == "tune":
        row = dataclasses.replace(row, trainable=asked["trainable"])
    return Spec(
        variant=entry["spec"]["variant"], preset=Preset(**scale), seed=entry["spec"]["seed"], asked=row, settings=row,
        adjusted=[], skip=None, hardware=entry["spec"]["hardware"], world=entry["spec"]["world"],
        stages=entry["spec"]["stages"] or 1,
        data={key: entry["data"][key] for key in ("name", "sha256")},
        model={key: entry["model"][key] for key in ("name", "revision")}, data_source="", model_source="",
    )  # fmt: skip


def test_every_committed_run_keeps_its_name():
    """Each committed record is read, and its run's id made anew from the table of rows."""
    folders = [path.parent for path in sorted(RUNS.glob("h200-*/*/record.json"))]
    if not folders:
        pytest.skip("no committed runs beside the package")
    assert len(folders) >= 587
    for folder in folders:
        spec = spec_of_record(read_record(folder))
        assert (spec.group, spec.run_id) == (folder.parent.name, folder.name)


def test_a_new_setting_or_scale_field_at_its_default_moves_no_hash(monkeypatch):
    """The dataclasses of tomorrow: one more field each, whose default means "as before"."""
    (today,) = plan(["E-dropout"], "smoke", machine=CPU)
    wider = dataclasses.make_dataclass("Settings", [("offload", str, "none")], bases=(Settings,), frozen=True)
    scale = dataclasses.make_dataclass("Scale", [("replicas", int, 1)], bases=(Preset,), frozen=True, kw_only=True)
    monkeypatch.setattr("qa_lib.spec.Settings", wider)
    monkeypatch.setattr("qa_lib.spec.Scale", scale)

    def tomorrow(settings=None, scales=None):
        asked = wider(**dataclasses.asdict(today.asked), **settings or {})
        grown = scale(**dataclasses.asdict(today.scale), **scales or {})
        return dataclasses.replace(today, asked=asked, preset=grown).hash

    assert tomorrow() == today.hash
    assert len({today.hash, tomorrow({"offload": "cpu"}), tomorrow(scales={"replicas": 2})}) == 3
    assert dataclasses.replace(today, world=2).hash != today.hash


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
        ("P0-deepspeed", GPU_PAIR, "needs the package deepspeed"),
        ("P0-deepspeed", dataclasses.replace(GPU_PAIR, deepspeed=True), None),
        ("P0-polled", CPU, "CUDA"),
        ("P0-polled", GPU_PAIR, None),
        ("A2", Machine(), None),
    ],
)
def test_what_a_machine_lacks_skips_the_row_with_the_reason(variant, machine, reason):
    (spec,) = plan([variant], "smoke", machine=machine)
    assert spec.skip is None if reason is None else reason in spec.skip


def test_a_row_says_from_which_generation_it_runs():
    found = {
        name: variants.since(VARIANTS[name].settings)
        for name in ("A1", "A3", "E-t4-masters", "E-dropout", "E-dropout-fp8")
    }
    assert found == {"A1": None, "A3": 70, "E-t4-masters": 75, "E-dropout": 80, "E-dropout-fp8": 89}
    (spec,) = plan(["E-varlen"], "smoke", machine=GPU)
    assert "On a GPU it takes compute capability 8.0 or newer." in describe(spec)
    for name, since in found.items():
        older = dataclasses.replace(GPU, sm=(since or 80) - 1, compiler=(since or 80) > 70)
        assert bool(missing(VARIANTS[name].settings, older)) == bool(since), name


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownName, match=r"'A4-nbb'.*did you mean 'A4-nb'"):
        plan(["A4-nbb"], "smoke", machine=CPU)
    with pytest.raises(UnknownName, match="did you mean 'smoke'"):
        plan(["A1"], "smok", machine=CPU)
    with pytest.raises(SpecError, match="micro-batch 5 does not divide"):
        plan(["A1"], "smoke", machine=CPU, micro_batch=5)


def test_scales_are_sound():
    for scale in PRESETS.values():
        assert (scale.steps is None) != (scale.epochs is None)
        assert (scale.batch or Settings().micro_batch) % Settings().micro_batch == 0
        assert 0 < scale.stride < scale.max_length <= {"qa": 512, "lm": 1024}[scale.task]


def test_variants_verb_prints_every_row_as_json():
    done = subprocess.run([sys.executable, "-m", "qa_lib", "variants", "--json"], capture_output=True, text=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == list(VARIANTS)
    assert rows["C1"]["settings"]["optimizer"] == "adamw-8bit"


# What each room of the package may import of ours; whatever is not named here is forbidden.
MAY_IMPORT = {
    "errors": "",
    "variants": "errors",
    "spec": "errors variants",
    "record": "errors variants spec",
    "cli": "errors variants spec",
    "data": "errors variants spec",
    "kernels": "",
    "model": "errors variants spec kernels data.synthetic data.squad",
    "measure": "errors variants spec record model.architectures",
    "train": "errors variants spec record data kernels model measure",
    "score": "cli errors variants spec record data model",
    "run": "cli errors variants spec record data model measure train score",
    "report": "cli errors variants spec record measure.trace measure.goodput",
    "app": "cli errors record data.squad score report run.sweep serving",
    "serving": "errors",
    "__main__": "cli errors variants",
}
TORCH_FREE = (
    "errors variants spec record cli run.plan run.sweep run.slurm run.launch run.process"
    " measure.trace measure.goodput report"
).split()


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch was asked for")
sys.meta_path.insert(0, NoTorch())
"""


def imports_of(module: Path) -> list[tuple[int, str]]:
    """(line, module) of everything that a file imports, also inside functions; names imported from it appended."""
    found = []
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def broken_rules(package: Path) -> list[str]:
    """A line for each import that MAY_IMPORT does not allow: file, line and rule."""
    wrong = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if path.name == "__init__.py":
            wrong += [f"{path}: its package has a file, too"] * (bool(path.read_text()) and path.parent != package)
            continue
        allowed = [f"qa_lib.{name}." for name in [room, *MAY_IMPORT[room].split()]]
        wrong += [
            f"{path.relative_to(package.parent)}:{line} imports {name}, but {room} may import {MAY_IMPORT[room]} alone"
            for line, name in imports_of(path)
            if name.startswith("qa_lib") and not f"{name}.".startswith(tuple(allowed))
        ]
    return wrong


def test_imports_point_one_way():
    assert broken_rules(PACKAGE) == []


def test_no_module_imports_itself_by_a_detour():
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    # Of "qa_lib.a.b.name" the module is qa_lib.a.b; inside functions as well.
    wanted = {name: {known for _, found in imports_of(path) for known in (found, found.rpartition(".")[0])
                     if known in modules and known != name} for name, path in modules.items()}  # fmt: skip
    while leaves := [name for name, needed in wanted.items() if not needed & wanted.keys()]:
        for name in leaves:
            del wanted[name]
    assert not wanted, "these import each other"


def test_a_broken_import_rule_names_file_line_and_rule(tmp_path):
    (tmp_path / "qa_lib" / "report").mkdir(parents=True)
    (tmp_path / "qa_lib" / "report" / "tables.py").write_text(
        "import math\nfrom qa_lib.model.build import build_model\n"
    )
    (line,) = broken_rules(tmp_path / "qa_lib")
    assert "report/tables.py:2" in line and "qa_lib.model.build" in line and "report may import" in line


@pytest.mark.parametrize("module", ["errors", "variants", "spec"])
def test_what_a_run_is_needs_the_standard_library_alone(module):
    roots = {name.split(".")[0] for _, name in imports_of(PACKAGE / f"{module}.py")} - {"qa_lib"}
    assert roots <= set(sys.stdlib_module_names)


def test_specs_driver_and_report_do_without_torch():
    """Every torch-free module, imported where torch cannot be."""
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".").startswith(tuple(TORCH_FREE))
    ]
    assert len(names) > 15
    code = f"{NO_TORCH}\nimport {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Several sizes of a row, as a sweep takes them.


def test_lists_of_sizes_are_tried_in_every_combination():
    specs = plan(["A1", "A2"], "sizing", [0], "synthetic:40", "tiny", [8, 32], GPU, max_length=[128, 384, 128])
    assert [(s.variant, s.preset.max_length, s.asked.micro_batch) for s in specs] == [
        (row, length, size) for length in (128, 384) for size in (8, 32) for row in ("A1", "A2")
    ]
    (one,) = plan(["A1"], "sizing", [0], "synthetic:40", "tiny", 32, GPU)
    assert one.hash in {spec.hash for spec in specs} and len({spec.hash for spec in specs}) == 8


def test_sizes_that_do_not_go_together_are_left_out_where_others_remain():
    left_out = []
    sizes = {"micro_batch": [8, 16], "batch": [8, 32], "world": [1, 2], "machine": CPU, "left_out": left_out}
    found = plan(["A1"], "smoke", **sizes)
    assert [(spec.asked.micro_batch, spec.preset.batch) for spec in found] == [(8, 8), (8, 32), (16, 32)]
    assert len(left_out) == 2 and "A1: micro-batch 16 does not divide the effective batch 8" in left_out[1]
    with pytest.raises(SpecError, match="micro-batch 5 does not divide"):
        plan(["A1", "A2"], "smoke", micro_batch=[5, 7], machine=CPU, left_out=[])
    with pytest.raises(SpecError, match="micro-batch 5 does not divide"):
        plan(["A1"], "smoke", micro_batch=[5, 8], machine=CPU)
