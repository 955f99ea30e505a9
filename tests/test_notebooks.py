"""The notebooks: clean as files, and right when they are executed at preset smoke, by the sweep and by hand."""

import ast
import dataclasses
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
    return nbformat.read(path, as_version=4)


def code_cells(path, without=()):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    return [cell for cell in cells if not set(tags(cell)) & set(without)]


def tags(cell):
    return cell.metadata.get("tags", [])


def tagged(path, tag):
    return [cell.source for cell in code_cells(path) if tag in tags(cell)]


def outputs_of(path):
    return [output for cell in code_cells(path) for output in cell.outputs]


def images(path):
    return sum("image/png" in output.get("data", {}) for output in outputs_of(path))


every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_a_notebook_is_stored_clean(path):
    """No outputs, no traces of a run, ids that do not change when the notebook is written again."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    # In Colab, a GPU is asked for where something trains.
    colab = (
        set()
        if path.stem in ("explore", "report", "scaling", "multi_gpu")
        else {"accelerator", "colab"}
    )
    assert set(notebook.metadata) == {"kernelspec", "language_info"} | colab
    own = {
        cell.id for cell in notebook.cells if not re.fullmatch("[0-9a-f]{8}", cell.id)
    }  # as nbformat draws them
    assert len(own) == len(notebook.cells)
    # Colab and Jupyter fold away what only prepares; a plain renderer shows it.
    folded = {"cellView": "form", "jupyter": {"source_hidden": True}}
    assert all(
        {**cell.metadata, "tags": []} in ({"tags": []}, {"tags": [], **folded})
        for cell in notebook.cells
    )
    assert all((cell.execution_count, cell.outputs) == (None, []) for cell in code_cells(path))


def lines_of(cell):
    """The lines of a cell's code, without blanks, comments and docstrings."""
    return [
        line
        for line in cell.source.splitlines()
        if line.strip() and not line.strip().startswith(("#", '"""'))
    ]


@every_notebook
def test_a_notebook_reads_as_prose(path):
    cells = read(path).cells
    assert cells[0].source.startswith("# ")
    for before, cell in zip([None, *cells], cells, strict=False):
        if cell.cell_type == "code":
            prose = [line for line in before.source.splitlines() if not line.startswith("#")]
            assert before.cell_type == "markdown" and re.search(
                r"\w+ \w+.*[.:]$", "\n".join(prose), re.S
            ), cell.source


@every_notebook
def test_a_notebook_has_one_bootstrap_and_one_cell_of_plain_parameters(path):
    assert tags(code_cells(path)[0]) == ["bootstrap"] and tagged(path, "bootstrap") == tagged(
        NOTEBOOKS[0], "bootstrap"
    )
    assert not re.search(r"plan\((?!.*(\*\*own|batch=batch)).*, micro_batch", path.read_text()), (
        "a size is not taken"
    )
    (parameters,) = tagged(path, "parameters")
    for line in ast.parse(parameters).body:
        assert isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant), ast.unparse(
            line
        )


@pytest.mark.parametrize("name", ["scaling", "language"])
def test_pages_have_no_code_and_nothing_that_only_prepares(name):
    """As HTML; the PDF is the same, printed by a browser."""
    config = PyFileConfigLoader("config.py", str(ROOT / "notebooks" / "pages")).load_config()
    notebook = read(ROOT / "notebooks" / f"{name}.ipynb")
    picture = nbformat.v4.new_output("display_data", {"image/png": "aGk="})
    picture.metadata = {"image/png": {"alt": "The <lead>"}}
    next(cell for cell in notebook.cells[::-1] if cell.cell_type == "code").outputs = [picture]
    html, _ = HTMLExporter(config=config).from_notebook_node(notebook)
    for words in (
        'alt="The &lt;lead&gt;" src="data:image/png;base64,aGk="',
        "@page",
        "How the optimizations work",
    ):
        assert words in html
    assert [
        words
        for words in ("Setting up:", "check_parameters", "nbconvert --config")
        if words in html
    ] == []


@every_notebook
def test_what_only_prepares_is_folded(path):
    """In notebooks that train; those of pages are read without their code."""
    if path.stem in FAMILY_NOTEBOOKS:
        folded = [cell for cell in code_cells(path) if cell.metadata.get("cellView") == "form"]
        assert [cell.source.splitlines()[0] for cell in folded] == [
            "# @title Setup",
            "# @title Imports",
        ]


@every_notebook
def test_a_notebooks_links_into_the_repository_are_relative(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    targets = [
        target
        for target in re.findall(r"\]\((.*?)\)", text)
        if "colab.research.google.com" not in target
    ]
    assert [target for target in targets if "github.com" in target] == []
    files = [target.partition("#")[0] for target in targets if not target.startswith("https://")]
    assert [target for target in files if not (path.parent / target).is_file()] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_notebook_begins_with_a_variant_of_its_family(family):
    values = {}
    path = ROOT / "notebooks" / f"{FAMILIES[family]}.ipynb"
    exec(*tagged(path, "parameters"), values)
    variant = find_variant(values["variant"])
    assert variant.family == family and values["compare_with"] in VARIANTS and variant.change
    driven = "variant preset seed data model runs micro_batch batch epochs learning_rate max_length compare_with"
    assert {*driven.split()} <= values.keys(), (
        "what a sweep passes; papermill would only warn, and run defaults"
    )
    assert values["preset"] == {"qa": "smoke", "lm": "lm-smoke"}[variant.task]
    helps = {name: parameter["help"] for name, parameter in inspect_notebook(str(path)).items()}
    assert [name for name in values if name != "__builtins__" and not helps[name]] == [], (
        "what papermill shows"
    )
    of_texts = {name for name, preset in PRESETS.items() if preset.task == "lm"}
    told = of_texts if variant.task == "lm" else {"smoke", "local", "bench", "quality", "full"}
    assert set(PRESETS) & set(re.findall(r"[\w-]+", helps["preset"])) == told
    assert f'notebook.family, "{family}"' in "".join(cell.source for cell in code_cells(path))


# The bootstrap cell, as a program in folders of its own.


def bootstrap(folder, **environment):
    program = f"{tagged(NOTEBOOKS[0], 'bootstrap')[0]}\nimport os\nprint(os.getcwd())"
    command = [
        sys.executable,
        "-m",
        "IPython",
        "--no-banner",
        "--simple-prompt",
        "--colors=NoColor",
        "-c",
        program,
    ]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )


def own_git(folder, script):
    """The PATH with a git of our own in front."""
    program = folder / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


def test_the_bootstrap_finds_the_repository(tmp_path):
    path = own_git(tmp_path, 'echo git "$@"')
    for folder in (ROOT, ROOT / "notebooks"):
        assert bootstrap(folder, PATH=path).stdout == f"{ROOT}\n"


def test_the_bootstrap_outside_the_repository_clones(tmp_path):
    """As in Colab, with a git of our own that only makes the folder."""
    files = f"mkdir lab; cp '{ROOT}/requirements.txt' lab; cp -r '{ROOT}/qa_lib' lab"
    done = bootstrap(tmp_path, PATH=own_git(tmp_path, f'echo "$@"; {files}'))
    address, folder = re.fullmatch(
        r"clone -q --depth 1 (https://github\.com/\S+) lab\n(.*)\n", done.stdout
    ).groups()
    assert folder == str(tmp_path / "lab") and address in tagged(NOTEBOOKS[0], "bootstrap")[0]


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
    assert (
        done.returncode == 1 and "no network" in said and "Open this notebook in a checkout" in said
    )


# Executed, at preset smoke.


@pytest.fixture(scope="session")
def every(swept):
    """And a variant of each other family."""
    swept.sweep(ROWS)
    return swept


OTHERS = [slow(variant, "every") for variant in ROWS if variant != "A1"]
every_variant = pytest.mark.parametrize(("variant", "lab"), [("A1", "swept"), *OTHERS])


def run_here(path, **parameters):
    """The rich outputs of a notebook's code cells with these parameters, run in this process."""
    shell = InteractiveShell.instance()
    select_figure_formats(shell, {"png"})
    with capture_output() as captured:
        for cell in code_cells(path, without=["bootstrap"]):
            own = "".join(
                f"\n{name} = {value!r}"
                for name, value in parameters.items()
                if "parameters" in tags(cell)
            )
            done = shell.run_cell(cell.source + own)
            done.raise_error()
            if done.result is not None:
                display(done.result)
            for number in (
                plt.get_fignums()
            ):  # as a notebook shows what a cell has drawn, whatever backend is here
                display(plt.figure(number))
                plt.close(number)
    return [output.data for output in captured.outputs]


def names() -> dict:
    """What the cells of the notebooks that were run here have left."""
    return InteractiveShell.instance().user_ns


@every_variant
def test_a_variant_through_its_notebook_leaves_the_record_that_was_asked_for(variant, lab, request):
    swept = request.getfixturevalue(lab)
    (spec,) = plan([variant], "smoke")
    folder = swept.folder_of(variant)
    entry = record.read_record(folder)
    assert folder == swept.runs / spec.run_path
    said = dict.fromkeys(("kind", "message", "step"))
    whole = {"run_id": spec.run_id, "group": spec.group, "status": "ok", "error": said}
    assert {name: entry[name] for name in whole} == whole
    asked = {
        "hash": spec.hash,
        "settings": dataclasses.asdict(spec.asked),
        "adjusted": spec.adjusted,
    }
    assert entry["spec"] | asked == entry["spec"]
    assert entry["time"]["steps"] == entry["spec"]["planned_steps"] == spec.preset.steps
    assert [step["step"] for step in steps_of(folder)] == [*range(1, spec.preset.steps + 1)]
    questions = len(open_source(spec.data_source, "validation").examples)
    assert entry["quality"]["n"] == entry["spec"]["n_eval"] == questions
    assert len(json.loads((folder / "answers" / "predictions.json").read_text())) == questions


@every_variant
def test_an_executed_notebook_is_small_and_names_no_machine(variant, lab, request):
    path = request.getfixturevalue(lab).folder_of(variant) / "notebook.ipynb"
    assert path.stat().st_size < MAX_BYTES
    assert images(path) == 2
    text = path.read_text()
    assert re.findall(r"(?<![\w.<])/(?:home|root|tmp|usr|opt|Users|work)/[^\"\\ ]*", text) == []
    assert str(ROOT) not in text and os.path.expanduser("~") not in text


def test_the_baseline_learns_the_smoke_task(swept):
    quality = record.read_record(swept.folder_of("A1"))["quality"]
    assert quality["f1"] >= 90 and 30 <= quality["always_null_f1"] <= 50


@pytest.mark.parametrize("page", cli.PAGES)
def test_a_page_is_an_executed_notebook_of_moderate_size(page):
    """That it is of today's notebook, `report --check` says (test_readme)."""
    path = ROOT / page
    assert (
        images(path) > 0
        and path.stat().st_size < 3 * MAX_BYTES
        and str(ROOT) not in path.read_text()
    )
    outputs = outputs_of(path)
    assert [output for output in outputs if output.output_type in ("error", "stream")] == []
    shown = [output.data.get("text/markdown", "") for output in outputs]
    assert [text for text in shown if re.match(r"\*No (figure|table): \w+Error", text)] == []
    links = re.findall(r"!\[.*?\]\((.*?)\)", path.with_suffix(".md").read_text())
    assert [link for link in links if not path.parent.joinpath(link).is_file()] == []


def test_the_report_and_explore_notebooks_run_in_any_process(tmp_path, monkeypatch):
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
    assert all(variant in shown for variant in ROWS)
    assert sum("image/png" in data for data in report) == 1, "of one seed without a GPU: the ladder"
    explored = run_here(
        "notebooks/explore.ipynb", data="synthetic:400", preset="smoke", micro_batch=32, batch=32
    )
    assert sum("image/png" in data for data in explored) == 1


# `explore` on data that lacks one kind of question.


def entries(split, kind):
    """200 questions: the first version of SQuAD knows no unanswerable ones, and has no field that says so."""
    gold = [] if kind == "unanswerable" else [("Rhine", 0)]
    found = [question(f"{split}{i}", f"who {i}", *gold) for i in range(200)]
    return [
        {key: entry[key] for key in entry if kind != "v1.1" or key != "is_impossible"}
        for entry in found
    ]


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
    assert scores[absent].isna().all() and scores.loc["the gold answers", "F1"] == 100
