"""Rendered pages: which records they are of, and what becomes of them when a record changes."""

import copy
import json
import subprocess
from pathlib import Path

import nbformat
import pytest

from qa_lib.lab.report import cli, pages
from qa_lib.lab.report.evidence import load_runs
from qa_lib.records.archive import read_runs, write_archive
from tests.material import ROOT
from tests.report_runs import make

LINK = "[Open](https://colab.research.google.com/github/YOUR-FORK/blob/main/notebooks/report.ipynb)"


def notebook_of(*cells):
    """A notebook of these cells."""
    return nbformat.v4.new_notebook(cells=list(cells))


def code(source, output="", **metadata):
    """A cell of code whose output is Markdown."""
    cell = nbformat.v4.new_code_cell(source, metadata=metadata)
    cell.outputs = [nbformat.v4.new_output("display_data", {"text/markdown": output})]
    return cell


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A page of the archived group cpu-smoke, which git tracks, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(cli, "PAGES", {"runs/report.ipynb": ("notebooks/report.ipynb", {})})
    monkeypatch.setattr(cli, "TRAINED", {})
    for variant in ("A1", "A2"):
        make(Path("away"), variant)
    Path("runs").mkdir()
    write_archive(Path("runs/cpu-smoke.jsonl"), read_runs("away", "cpu-smoke"), [])
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "runs"], check=True)
    path = Path("runs/report.ipynb")
    text = nbformat.v4.new_markdown_cell(LINK)
    nbformat.write(notebook_of(text, code("show()", "Speed: group cpu-smoke, code 1b427bf")), path)
    path.with_suffix(".md").touch()
    cli.stamp(path, cli._committed_digests(load_runs("runs"), Path("runs")))
    return path


def problems():
    """What `report --check` says of the pages' records."""
    return cli._pages_of_other_records(cli._committed_digests(load_runs("runs"), Path("runs")))


def test_a_page_that_was_just_made_is_of_todays_records(page):
    assert problems() == []


def test_a_page_is_old_where_a_record_of_a_group_that_it_names_was_edited(page):
    archive = Path("runs/cpu-smoke.jsonl")
    first, *rest = archive.read_text(encoding="utf-8").splitlines()
    record = json.loads(first)
    record["speed"]["samples_per_s"] += 1
    archive.write_text("\n".join([json.dumps(record), *rest]) + "\n", encoding="utf-8")
    (problem,) = problems()
    assert problem.startswith("runs/report.ipynb is of other records of cpu-smoke:")


def test_a_page_is_old_where_a_group_that_it_names_is_gone(page):
    Path("runs/cpu-smoke.jsonl").unlink()
    subprocess.run(["git", "rm", "-q", "--cached", "runs/cpu-smoke.jsonl"], check=True)
    (problem,) = problems()
    assert "records of cpu-smoke" in problem


def test_a_page_without_digests_is_old(page):
    content = nbformat.read(page, as_version=4)
    del content.metadata["records"]
    nbformat.write(content, page)
    page.with_suffix(".md").unlink()
    (problem,) = problems()
    assert "records of cpu-smoke" in problem


def test_a_page_in_markdown_ends_with_its_records(page):
    digest = nbformat.read(page, as_version=4).metadata["records"]["cpu-smoke"]
    text = page.with_suffix(".md").read_text(encoding="utf-8")
    assert text.endswith(f"Records, with their digests: `cpu-smoke` ({digest}).\n")


def test_a_page_in_markdown_that_was_edited_is_not_that_of_its_notebook(page):
    text = page.with_suffix(".md")
    text.write_text(text.read_text(encoding="utf-8").replace("1b427bf", "93bfab3"))
    assert problems() == [
        "runs/report.md is not what runs/report.ipynb says: run python -m qa_lib report --pages"
    ]


def test_links_to_another_repository_make_no_page_old(page):
    for path in (page, page.with_suffix(".md")):
        path.write_text(path.read_text(encoding="utf-8").replace("YOUR-FORK", "owner/name"))
    assert problems() == []


def test_a_page_has_the_digests_of_the_groups_that_it_names_whole():
    picture = code("draw()")
    picture.outputs[0].metadata = {"image/png": {"file": "figures/gpu-bench/ladder.png"}}
    page = notebook_of(code("show()", "group gpu-lm-bench, `gpu-quality-2`"), picture)
    digests = dict.fromkeys(["bench", "gpu-bench", "gpu-lm-bench", "gpu-quality", "lm-bench"], "0")
    assert pages.shown_digests(page, digests) == {"gpu-bench": "0", "gpu-lm-bench": "0"}


def test_what_shows_committed_records_is_made_anew_without_the_training():
    kept = code("committed()", "today", tags=["records"])
    cells = [code("# @title Imports"), code("seed = 0", tags=["parameters"]), code("fit()"), kept]
    notebook = notebook_of(*cells)
    part = pages.without_training(notebook)
    assert [cell.source for cell in part.cells] == ["# @title Imports", "seed = 0", "committed()"]
    trained = code("fit()", "trained once")
    old = code("committed()", "yesterday")
    old.id = kept.id
    page = notebook_of(trained, old)
    pages.take_cells(page, part, pages.cells_of_records(notebook))
    assert page.cells == [trained, kept]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A notebook that trains, and its page, in a folder of their own."""
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(cli, "PAGES", {})
    monkeypatch.setattr(cli, "TWINS", {})
    monkeypatch.setattr(cli, "TRAINED", {"page.ipynb": "notebook.ipynb"})
    cells = [code("seed = 0", tags=["parameters"]), code("fit()"), code("kernels()")]
    cells.append(code("committed()", tags=["records"]))
    notebook = notebook_of(*cells)
    page = copy.deepcopy(notebook)
    for cell in page.cells:
        cell.outputs[0].data["text/markdown"] = f"of {cell.source}"
    for cell in notebook.cells:
        cell.outputs = []
    injected = code("seed = 1", tags=["injected-parameters"])
    page.cells.insert(1, injected)
    return notebook, page


def kept_page(notebook, page):
    """What `report --check` says of a page, and what the page becomes: its cells' (source, output).

    After that `report --check` says nothing of it.
    """
    nbformat.write(notebook, cli.ROOT / "notebook.ipynb")
    nbformat.write(page, cli.ROOT / "page.ipynb")
    found = cli._old_pages()
    page.cells = pages.cells_of_today(page, notebook)
    nbformat.write(page, cli.ROOT / "page.ipynb")
    assert cli._old_pages() == []
    shown = [
        [output.get("data", {}).get("text/markdown", "") for output in cell.get("outputs", [])]
        for cell in page.cells
    ]
    return found, dict(zip([cell.source for cell in page.cells], shown, strict=True))


def test_a_page_that_trained_keeps_what_it_showed(trained):
    assert kept_page(*trained) == (
        [],
        {
            "seed = 0": ["of seed = 0"],
            "seed = 1": [""],
            "fit()": ["of fit()"],
            "kernels()": ["of kernels()"],
            "committed()": ["of committed()"],
        },
    )


def test_a_page_that_trained_keeps_a_cell_that_changed_since_as_it_ran_and_says_so(trained):
    notebook, page = trained
    notebook.cells[2].source = "launches()"
    notebook.cells[3].source = "archived()"
    notebook.cells[1].source = "fit( )  # laid out anew"
    found, shown = kept_page(notebook, page)
    assert found == [
        "page.ipynb is not of today's notebook.ipynb: run python -m qa_lib report --pages"
    ]
    assert shown["fit()"] == ["of fit()"]
    assert shown["kernels()"] == [pages.OLDER, "of kernels()"]
    assert shown["archived()"] == []
    notebook.cells[2].source = "kernels()"
    assert kept_page(notebook, page)[1]["kernels()"] == ["of kernels()"]


def test_a_page_that_trained_has_todays_texts_and_new_cells(trained):
    notebook, page = trained
    notebook.cells.append(nbformat.v4.new_markdown_cell("And its memory:"))
    notebook.cells.append(code("memory()", tags=["records"]))
    notebook.cells[-1].outputs = []
    found, shown = kept_page(notebook, page)
    assert len(found) == 1
    assert [*shown][-2:] == ["And its memory:", "memory()"]
    assert shown["memory()"] == []


def test_a_page_that_trained_shows_no_picture_whose_title_the_code_makes_no_longer(trained):
    notebook, page = trained
    (picture,) = page.cells[2].outputs
    picture.metadata = {"image/png": {"alt": "Training loss at the end: 1.40 in D1, 1.39 in A3"}}
    found, shown = kept_page(notebook, page)
    assert len(found) == 1
    assert shown["fit()"] == [pages.LEFT_OUT]


def test_each_rendered_page_is_known():
    kept = {f"runs/{path.name}" for path in ROOT.glob("runs/*.ipynb")}
    assert kept == {*cli.PAGES, *cli.TWINS, *cli.TRAINED}


@pytest.mark.parametrize("notebook", cli.TRAINED.values())
def test_a_notebook_that_trains_says_which_cells_show_committed_records(notebook):
    assert pages.cells_of_records(nbformat.read(ROOT / notebook, as_version=4))
