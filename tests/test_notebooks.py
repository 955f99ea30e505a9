"""The notebooks are clean as files, and right when they are executed.

They are executed at preset smoke, by a sweep and in this process.
"""

import ast
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import select_figure_formats
from IPython.display import display
from IPython.utils.capture import capture_output
from matplotlib import pyplot as plt
from nbconvert import HTMLExporter
from papermill import inspect_notebook
from traitlets.config import PyFileConfigLoader

from qa_lib.data.squad import open_source
from qa_lib.lab.report import cli
from qa_lib.lab.search.plan import plan
from qa_lib.records import record
from qa_lib.spec.presets import PRESETS
from qa_lib.spec.variants import FAMILIES, VARIANTS, find_variant
from tests.conftest import slow
from tests.material import ROOT, document, question, write
from tests.report_runs import make
from tests.tiny import steps_of

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ROWS = ("A1", "B3", "C2-8", "D1", "E-packed")  # a quick variant of each family
MAX_BYTES = 500_000
FAMILY_NOTEBOOKS = {*FAMILIES.values(), "profiling"}


def read(path):
    """Return the notebook of a file."""
    return nbformat.read(path, as_version=4)


def code_cells(path, without=()):
    """Return the cells of code that have none of these tags."""
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    return [cell for cell in cells if not set(tags(cell)) & set(without)]


def tags(cell):
    """Return the tags of a cell."""
    return cell.metadata.get("tags", [])


def tagged(path, tag):
    """Return the sources of the cells with that tag."""
    return [cell.source for cell in code_cells(path) if tag in tags(cell)]


def outputs_of(path):
    """Return the outputs of all cells."""
    return [output for cell in code_cells(path) for output in cell.outputs]


def images(path):
    """Return how many pictures a notebook shows."""
    return sum("image/png" in output.get("data", {}) for output in outputs_of(path))


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


WITHOUT_TRAINING = ("explore", "report", "scaling", "multi_gpu")


@every_notebook
def test_a_notebook_has_the_metadata_of_one_that_never_ran(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    names = {"kernelspec", "language_info"}
    if path.stem not in WITHOUT_TRAINING:
        names |= {"accelerator", "colab"}  # by which a GPU is asked for in Colab
    assert set(notebook.metadata) == names


@every_notebook
def test_a_notebooks_cells_have_no_traces_of_a_run(path):
    # Colab and Jupyter fold away what only prepares; a plain renderer shows it.
    folded = {"cellView": "form", "jupyter": {"source_hidden": True}}
    for cell in read(path).cells:
        metadata = {name: value for name, value in cell.metadata.items() if name != "tags"}
        assert metadata in ({}, folded)
    for cell in code_cells(path):
        assert cell.execution_count is None
        assert cell.outputs == []


@every_notebook
def test_a_notebooks_cells_have_ids_that_stay_when_it_is_written_again(path):
    ids = [cell.id for cell in read(path).cells]
    assert len(set(ids)) == len(ids)
    drawn_by_nbformat = [name for name in ids if re.fullmatch("[0-9a-f]{8}", name)]
    assert drawn_by_nbformat == []


@every_notebook
def test_a_notebook_begins_with_a_title(path):
    assert read(path).cells[0].source.startswith("# ")


@every_notebook
def test_a_sentence_stands_before_each_cell_of_code(path):
    cells = read(path).cells
    for before, cell in itertools.pairwise(cells):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown", cell.source
            lines = [line for line in before.source.splitlines() if not line.startswith("#")]
            assert re.search(r"\w+ \w+.*[.:]$", "\n".join(lines), re.S), cell.source


@every_notebook
def test_all_notebooks_begin_with_the_same_bootstrap(path):
    assert tags(code_cells(path)[0]) == ["bootstrap"]
    assert tagged(path, "bootstrap") == tagged(NOTEBOOKS[0], "bootstrap")


@every_notebook
def test_a_notebook_that_takes_sizes_takes_all_of_them(path):
    without_the_batch = r"plan\((?!.*(\*\*own|batch=batch)).*, micro_batch"
    assert not re.search(without_the_batch, path.read_text())


@every_notebook
def test_a_notebook_has_one_cell_of_plain_parameters(path):
    (parameters,) = tagged(path, "parameters")
    for statement in ast.parse(parameters).body:
        assert isinstance(statement, ast.Assign), ast.unparse(statement)
        assert isinstance(statement.value, ast.Constant), ast.unparse(statement)


@pytest.mark.parametrize("name", ["scaling", "language"])
def test_pages_have_no_code_and_nothing_that_only_prepares(name):
    """This looks at HTML; the PDF is the same, printed by a browser."""
    config = PyFileConfigLoader("config.py", str(ROOT / "notebooks" / "pages")).load_config()
    notebook = read(ROOT / "notebooks" / f"{name}.ipynb")
    picture = nbformat.v4.new_output("display_data", {"image/png": "aGk="})
    picture.metadata = {"image/png": {"alt": "The <lead>"}}
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    last.outputs = [picture]
    html, _ = HTMLExporter(config=config).from_notebook_node(notebook)
    assert 'alt="The &lt;lead&gt;" src="data:image/png;base64,aGk="' in html
    assert "@page" in html
    assert "How the optimizations work" in html
    for words in ("Setting up:", "check_parameters", "nbconvert --config"):
        assert words not in html


@pytest.mark.parametrize("name", sorted(FAMILY_NOTEBOOKS))
def test_a_notebook_that_trains_folds_what_only_prepares(name):
    """The pages' notebooks are read without their code."""
    cells = code_cells(ROOT / "notebooks" / f"{name}.ipynb")
    folded = [cell for cell in cells if cell.metadata.get("cellView") == "form"]
    titles = [cell.source.splitlines()[0] for cell in folded]
    assert titles == ["# @title Setup", "# @title Imports"]


@every_notebook
def test_a_notebooks_links_into_the_repository_are_relative(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    targets = []
    for target in re.findall(r"\]\((.*?)\)", text):
        if "colab.research.google.com" not in target:
            targets.append(target)
    assert [target for target in targets if "github.com" in target] == []
    files = [target.partition("#")[0] for target in targets if not target.startswith("https://")]
    assert [file for file in files if not (path.parent / file).is_file()] == []


@every_notebook
def test_a_notebooks_first_cell_links_to_its_executed_page_where_there_is_one(path):
    page = f"{path.stem.replace('_', '-')}.ipynb"
    links = re.findall(r"\]\(\.\./runs/([^)]*\.ipynb)\)", read(path).cells[0].source)
    assert links == ([page] if (ROOT / "runs" / page).exists() else [])


# The parameters of a family's notebook.

# What a sweep passes; of one that a notebook has not papermill would only warn, and run defaults.
SWEPT = {
    "variant",
    "preset",
    "seed",
    "data",
    "model",
    "runs",
    "micro_batch",
    "batch",
    "epochs",
    "learning_rate",
    "max_length",
    "compare_with",
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def notebook_of(family):
    """Return the path of a family's notebook."""
    return ROOT / "notebooks" / f"{FAMILIES[family]}.ipynb"


def parameters_of(family) -> dict:
    """Return the values of the parameters in a family's notebook, by name."""
    (source,) = tagged(notebook_of(family), "parameters")
    values = {}
    exec(source, {}, values)
    return values


@every_family
def test_a_family_notebook_begins_with_a_variant_of_its_family(family):
    values = parameters_of(family)
    variant = find_variant(values["variant"])
    assert variant.family == family
    assert variant.change
    assert values["compare_with"] in VARIANTS
    sources = "".join(cell.source for cell in code_cells(notebook_of(family)))
    assert f'notebook.family, "{family}"' in sources


@every_family
def test_a_family_notebook_has_every_parameter_that_a_sweep_passes(family):
    assert parameters_of(family).keys() >= SWEPT


@every_family
def test_papermill_shows_a_help_for_each_parameter_of_a_family_notebook(family):
    shown = inspect_notebook(str(notebook_of(family)))
    assert [name for name in parameters_of(family) if not shown[name]["help"]] == []


@every_family
def test_a_family_notebook_begins_with_the_smallest_preset_and_names_those_of_its_task(family):
    values = parameters_of(family)
    if find_variant(values["variant"]).task == "lm":
        smallest = "lm-smoke"
        named = {name for name, preset in PRESETS.items() if preset.task == "lm"}
    else:
        smallest = "smoke"
        named = {"smoke", "local", "bench", "quality", "full"}
    assert values["preset"] == smallest
    help_text = inspect_notebook(str(notebook_of(family)))["preset"]["help"]
    assert set(PRESETS) & set(re.findall(r"[\w-]+", help_text)) == named


# The bootstrap cell, as a program in folders of its own.


def bootstrap(folder, **environment):
    """Run the bootstrap cell in a folder, and print where it leaves; return the ended process."""
    program = f"{tagged(NOTEBOOKS[0], 'bootstrap')[0]}\nimport os\nprint(os.getcwd())"
    words = ["--no-banner", "--simple-prompt", "--colors=NoColor", "-c", program]
    return subprocess.run(
        [sys.executable, "-m", "IPython", *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def own_git(folder, script):
    """Make a program `git` of that script; return the PATH with it in front."""
    program = folder / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("folder", [ROOT, ROOT / "notebooks"], ids=["root", "notebooks"])
def test_the_bootstrap_finds_the_repository(folder, tmp_path):
    path = own_git(tmp_path, 'echo git "$@"')
    assert bootstrap(folder, PATH=path).stdout == f"{ROOT}\n"


def test_the_bootstrap_outside_the_repository_clones(tmp_path):
    """This is what happens in Colab; the git here only makes the folder."""
    files = f"mkdir lab; cp '{ROOT}/requirements.txt' lab; cp -r '{ROOT}/qa_lib' lab"
    done = bootstrap(tmp_path, PATH=own_git(tmp_path, f'echo "$@"; {files}'))
    said = re.fullmatch(r"clone -q --depth 1 (https://github\.com/\S+) lab\n(.*)\n", done.stdout)
    address, folder = said.groups()
    assert folder == str(tmp_path / "lab")
    assert address in tagged(NOTEBOOKS[0], "bootstrap")[0]


def test_the_bootstrap_takes_an_installed_library_and_stays_where_it_is(tmp_path):
    """In a wheel the library has files/ beside it."""
    shutil.copytree(ROOT / "qa_lib", tmp_path / "site" / "qa_lib")
    (tmp_path / "site" / "qa_lib" / "files").mkdir()
    shutil.copy(ROOT / "requirements.txt", tmp_path / "site" / "qa_lib" / "files")
    path = own_git(tmp_path, 'echo git "$@"')
    done = bootstrap(tmp_path, PATH=path, PYTHONPATH=str(tmp_path / "site"))
    assert done.stdout == f"{tmp_path}\n"


def test_the_bootstrap_under_a_driver_stays_where_it_is():
    done = bootstrap(ROOT / "notebooks", QA_LIB_PREPARED="1")
    assert done.stdout == f"{ROOT / 'notebooks'}\n"


def test_the_bootstrap_that_cannot_clone_says_what_to_do(tmp_path):
    done = bootstrap(tmp_path, PATH=own_git(tmp_path, "echo no network >&2; exit 128"))
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "no network" in said
    assert "Open this notebook in a checkout" in said


# Executed, at preset smoke.


@pytest.fixture(scope="session")
def every(swept):
    """The runs of `swept`, and of a variant of each other family."""
    swept.sweep(ROWS)
    return swept


OTHERS = [slow(variant, "every") for variant in ROWS if variant != "A1"]
every_variant = pytest.mark.parametrize(("variant", "lab"), [("A1", "swept"), *OTHERS])


def run_here(path, **parameters):
    """Run a notebook's cells in this process with these parameters; return their rich outputs."""
    shell = InteractiveShell.instance()
    select_figure_formats(shell, {"png"})
    assignments = "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    with capture_output() as captured:
        for cell in code_cells(path, without=["bootstrap"]):
            source = cell.source
            if "parameters" in tags(cell):
                source += assignments
            done = shell.run_cell(source)
            done.raise_error()
            if done.result is not None:
                display(done.result)
            # A notebook shows what a cell has drawn; the backend here need not.
            for number in plt.get_fignums():
                display(plt.figure(number))
                plt.close(number)
    return [output.data for output in captured.outputs]


def names() -> dict:
    """Return the variables that the notebooks that ran in this process have left."""
    return InteractiveShell.instance().user_ns


@every_variant
def test_a_variant_through_its_notebook_leaves_the_record_that_was_asked_for(variant, lab, request):
    swept = request.getfixturevalue(lab)
    (spec,) = plan([variant], "smoke")
    folder = swept.folder_of(variant)
    entry = record.read_record(folder)
    assert folder == swept.runs / spec.run_path
    assert entry["run_id"] == spec.run_id
    assert entry["group"] == spec.group
    assert entry["status"] == "ok"
    assert entry["error"] == {"kind": None, "message": None, "step": None}
    assert entry["spec"]["hash"] == spec.hash
    assert entry["spec"]["settings"] == dataclasses.asdict(spec.asked)
    assert entry["spec"]["adjusted"] == spec.adjusted


@every_variant
def test_a_variant_through_its_notebook_does_all_steps(variant, lab, request):
    folder = request.getfixturevalue(lab).folder_of(variant)
    entry = record.read_record(folder)
    steps = PRESETS["smoke"].steps
    assert entry["spec"]["planned_steps"] == steps
    assert entry["time"]["steps"] == steps
    assert [step["step"] for step in steps_of(folder)] == list(range(1, steps + 1))


@every_variant
def test_a_variant_through_its_notebook_answers_every_question(variant, lab, request):
    folder = request.getfixturevalue(lab).folder_of(variant)
    entry = record.read_record(folder)
    (spec,) = plan([variant], "smoke")
    questions = len(open_source(spec.data_source, "validation").examples)
    assert entry["spec"]["n_eval"] == questions
    assert entry["quality"]["n"] == questions
    assert len(json.loads((folder / "answers" / "predictions.json").read_text())) == questions


@every_variant
def test_an_executed_notebook_is_small_and_names_no_machine(variant, lab, request):
    path = request.getfixturevalue(lab).folder_of(variant) / "notebook.ipynb"
    assert path.stat().st_size < MAX_BYTES
    assert images(path) == 2
    text = path.read_text()
    assert re.findall(r"(?<![\w.<])/(?:home|root|tmp|usr|opt|Users|work)/[^\"\\ ]*", text) == []
    assert str(ROOT) not in text
    assert os.path.expanduser("~") not in text


def test_the_baseline_learns_the_smoke_task(swept):
    quality = record.read_record(swept.folder_of("A1"))["quality"]
    assert quality["f1"] >= 90
    assert 30 <= quality["always_null_f1"] <= 50


# Pages are committed executed notebooks. That they are of today's notebooks, `report --check` says.
every_page = pytest.mark.parametrize("page", cli.PAGES)


@pytest.mark.parametrize("page", [*cli.PAGES, *cli.TWINS])
def test_a_page_is_of_moderate_size_and_names_no_machine(page):
    path = ROOT / page
    assert path.stat().st_size < 3 * MAX_BYTES
    assert str(ROOT) not in path.read_text()


@every_page
def test_a_page_shows_pictures_and_no_error(page):
    path = ROOT / page
    assert images(path) > 0
    outputs = outputs_of(path)
    assert [output for output in outputs if output.output_type in ("error", "stream")] == []
    shown = [output.data.get("text/markdown", "") for output in outputs]
    assert [text for text in shown if re.match(r"\*No (figure|table): \w+Error", text)] == []


@every_page
def test_the_pictures_of_a_page_in_markdown_are_there(page):
    path = ROOT / page
    links = re.findall(r"!\[.*?\]\((.*?)\)", path.with_suffix(".md").read_text())
    assert [link for link in links if not path.parent.joinpath(link).is_file()] == []


def test_the_report_notebook_runs_in_any_process(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for variant in ROWS:
        make(tmp_path, variant)
    report = run_here(
        "notebooks/report.ipynb",
        group="cpu-smoke",
        runs=str(tmp_path),
        figures=str(tmp_path / "drawn"),
    )
    shown = "".join(data.get("text/markdown", "") for data in report)
    for variant in ROWS:
        assert variant in shown
    assert sum("image/png" in data for data in report) == 1, "of one seed without a GPU: the ladder"


def test_the_explore_notebook_runs_in_any_process(monkeypatch):
    monkeypatch.chdir(ROOT)
    explored = run_here(
        "notebooks/explore.ipynb", data="synthetic:400", preset="smoke", micro_batch=32, batch=32
    )
    assert sum("image/png" in data for data in explored) == 1


# `explore` on data that lacks one kind of question.


def entries(split, kind):
    """Return 200 questions of one kind: "unanswerable", "answerable" or "v1.1".

    SQuAD 1.1 has no unanswerable questions, and no field that says so.
    """
    gold = [] if kind == "unanswerable" else [("Rhine", 0)]
    asked = [question(f"{split}{i}", f"who {i}", *gold) for i in range(200)]
    if kind == "v1.1":
        for entry in asked:
            del entry["is_impossible"]
    return asked


NONE = "F1 where there is none"
KINDS = [
    ("unanswerable", "F1 where there is an answer"),
    slow("answerable", NONE),
    slow("v1.1", NONE),
]


@pytest.mark.parametrize(("kind", "absent"), KINDS)
def test_explore_takes_questions_of_one_kind_alone(tmp_path, monkeypatch, kind, absent):
    for split in ("train", "validation"):
        text = f"Rhine and Alps {split}"
        write(tmp_path / f"{split}.json", document((text, entries(split, kind))))
    monkeypatch.chdir(ROOT)
    run_here("notebooks/explore.ipynb", preset="smoke", data=str(tmp_path), model="tiny")
    scores = names()["scores"]
    assert scores[absent].isna().all()
    assert scores.loc["the gold answers", "F1"] == 100
