"""The layout of the package: which part may import which, and what does without PyTorch."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from qa_lib.paths import PACKAGE
from tests.material import without_torch

# Each part of the package imports itself and what stands before it. `lab` is last: it starts,
# searches, shows and tells, and the library below it works without it.
ORDER = [
    "loaded",
    "errors",
    "signals",
    "calls",
    "private",
    "paths",
    "cell_clock",
    "packages",
    "versions",
    "spec",
    "records",
    "peers",
    "data",
    "kernels",
    "model",
    "measure",
    "train",
    "own",
    "score",
    "run",
    "lab",
    "__main__",
]
# These could be taken out of the package as they are: they import nothing else of it.
BY_THEMSELVES = ["peers", "kernels"]
# A driver starts runs, and a report shows them, without PyTorch: it takes seconds, and a GPU.
WITHOUT_TORCH = [
    "loaded",
    "errors",
    "signals",
    "calls",
    "paths",
    "cell_clock",
    "packages",
    "versions",
    "spec",
    "records",
    "measure.communication",
    "measure.trace",
    "run.identity",
    "run.plan",
    "run.surroundings",
    "run.tasks",
    "lab.cli",
    "lab.sweep",
    "lab.launch.child",
    "lab.launch.cold",
    "lab.launch.compile_cache",
    "lab.launch.driver",
    "lab.launch.judge",
    "lab.launch.local",
    "lab.launch.probe",
    "lab.launch.process",
    "lab.launch.recommended",
    "lab.launch.slurm",
    "lab.launch.warm",
    "lab.queue",
    "lab.report",
    "lab.search.plan",
    "lab.tools.push",
]
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports_of(module: Path) -> list[tuple[int, str]]:
    """(line, name) of everything that a file imports from the package, also inside functions.

    Imports for type checkers alone are not among them.
    """
    tree = ast.parse(module.read_text(encoding="utf-8"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    blocks = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    for_checkers = {node for block in blocks for node in ast.walk(block)}
    found = []
    for node in ast.walk(tree):
        if node in for_checkers:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.startswith("qa_lib")]


def part_of(module: Path) -> str:
    """The part of the package that a file is, or lies in."""
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def allowed_imports(part: str) -> list[str]:
    """The parts that a part may import."""
    if part in BY_THEMSELVES:
        return [part]
    return ORDER[: ORDER.index(part) + 1]


@pytest.mark.parametrize(
    "module", [name for name, path in MODULES.items() if path.name != "__init__.py"]
)
def test_a_module_imports_only_what_stands_before_it(module):
    allowed = allowed_imports(part_of(MODULES[module]))
    wrong = [
        f"line {line} imports {name}"
        for line, name in imports_of(MODULES[module])
        if name.split(".")[1] not in allowed
    ]
    assert not wrong


def test_the_library_works_without_the_lab():
    """The command line and the public names of the package alone lead there."""
    outside = {name: path for name, path in MODULES.items() if part_of(path) != "lab"}
    lab_users = set()
    for module, path in outside.items():
        if any(name.startswith("qa_lib.lab") for _, name in imports_of(path)):
            lab_users.add(module)
    assert lab_users == {"qa_lib.__main__"}


def test_packages_hold_nothing_themselves():
    # The package's own face hands on names, and that of `data` asks the versions of libraries
    # before its modules import them.
    faces = [PACKAGE / "__init__.py", PACKAGE / "data" / "__init__.py"]
    others = [path for path in PACKAGE.rglob("__init__.py") if path not in faces]
    assert len(others) > 10
    assert [path for path in others if path.read_text(encoding="utf-8")] == []


def test_no_module_imports_itself_by_a_detour():
    wanted = {}
    for module, path in MODULES.items():
        names = [name for _, name in imports_of(path)]
        names += [name.rpartition(".")[0] for name in names]
        wanted[module] = set(names) & MODULES.keys() - {module}
    # This raises CycleError, which names those that import each other.
    TopologicalSorter(wanted).prepare()


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name == "qa_lib.errors" or ".spec." in name]
)
def test_what_a_run_is_needs_the_standard_library_alone(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add(node.module.split(".")[0])
    assert roots - {"qa_lib"} <= set(sys.stdlib_module_names)


def test_specs_driver_and_report_do_without_torch(tmp_path):
    parts = tuple(f"qa_lib.{name}." for name in WITHOUT_TORCH)
    names = [name for name in MODULES if f"{name}.".startswith(parts)]
    assert len(names) > 15
    without_torch(tmp_path, "-c", f"import {', '.join(names)}")
