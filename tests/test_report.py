"""`python -m qa_lib report`: the table that it prints, and the page that it makes."""

import re
from pathlib import Path

import pandas as pd
import pytest

from qa_lib.__main__ import main
from qa_lib.lab.report import cli, evidence, figures
from qa_lib.lab.report.evidence import load_runs, select
from qa_lib.lab.report.notebook import family_table
from qa_lib.spec.variants import RECOMMENDED, VARIANTS
from tests.material import committed
from tests.report_runs import make, make_one_of_each_kind


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Make runs of one variant of each kind, in a folder that the test works in."""
    monkeypatch.chdir(tmp_path)
    make_one_of_each_kind(Path("runs"))
    return Path("runs")


@pytest.fixture
def archived(runs, typed):
    """The same runs, archived, so that none is the user's own."""
    typed("archive cpu-smoke --runs", runs)
    (runs / "cpu-smoke").rename("away")
    return runs


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Make the report of runs of one variant of each kind, and return its page."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_one_of_each_kind(Path("runs"))
        assert main(["report"]) == 0
    return folder / "figures" / "cpu-smoke" / "report.md"


def page_of(group):
    return Path("figures", group, "report.md").read_text(encoding="utf-8")


# What is printed.


def test_the_report_of_a_small_group_fits_a_terminal(runs, typed):
    lines = typed("report").splitlines()
    assert lines[0] == "Group cpu-smoke: 11 runs, micro-batch 8"
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


def test_the_report_of_many_variants_fits_a_terminal():
    of_reference = select(committed(), evidence.REFERENCE)
    assert len(cli.overview(of_reference, committed()).splitlines()) <= 26


def test_the_speeds_of_a_cpu_give_way_to_those_of_the_reference_group(runs):
    every = committed()
    of_reference = every[every["group"] == evidence.REFERENCE]
    own = load_runs(runs)
    text = cli.overview(select(own, "cpu-smoke"), pd.concat([own, of_reference]))
    lines = figures.timed(select(every, evidence.REFERENCE)).set_index("variant")
    assert " samples/s" not in text
    assert "speed × A1 on one NVIDIA H100" in text
    assert f"{lines.loc['A3', 'ratio']:.2f}" in text


def test_a_group_without_records_is_an_error_that_names_those_there_are(runs, typed):
    assert "no group 'x' below runs; there are cpu-smoke" in typed("report --group x", code=2)


# Which group and which runs.


def test_ones_own_runs_are_shown_before_newer_ones_that_are_archived(archived, typed):
    archive = archived / "cpu-smoke.jsonl"
    archive.write_text(archive.read_text().replace('"started":"2', '"started":"3'))
    for variant in ("A1", "A2"):
        make(archived, variant, preset="local")
    text = typed("report")
    assert text.startswith("Group cpu-local: 2 runs, ")
    assert "cpu-smoke" not in text
    assert "cpu-smoke" not in page_of("cpu-local")


def test_a_group_of_ones_own_is_shown_without_what_is_archived_of_it(archived, typed):
    for variant in ("A1", "A2"):
        make(archived, variant, seed=7)
    assert typed("report").startswith("Group cpu-smoke: 2 runs, ")


def test_a_familys_table_is_made_without_what_is_archived(archived):
    for variant in ("A1", "A2"):
        make(archived, variant, seed=7)
    every = load_runs(archived)
    record = every[every["spec.seed"] == 7]["run"].iloc[0].record
    assert list(family_table(every, [record])["variant"]) == ["A1", "A2"]


# The page of one's own runs.


@pytest.mark.parametrize(
    "words",
    [
        "![On a CPU: A4 trains",
        "| A1 |",
        "| D1-nvfuser |",
        "no backend named 'nvfuser'",
        "CUDA out of memory",
    ],
)
def test_the_page_shows_what_ended_well_and_why_other_runs_did_not(page, words):
    assert words in page.read_text(encoding="utf-8")


def test_the_page_takes_three_screens_and_no_notebook(page):
    assert len(page.read_text(encoding="utf-8").split()) < 650
    assert page.with_name("ladder.png").is_file()
    assert not page.with_suffix(".ipynb").exists()


def test_the_page_says_what_three_seeds_show(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        make(Path("runs"), "A1", seed, f1=80 + seed)
        make(Path("runs"), "A2", seed, f1=80.1 + 1.01 * seed)
        make(Path("runs"), "B1", seed, f1=60 + seed)
    typed("report")
    text = page_of("cpu-smoke")
    assert re.search(r"(?m)^\| A2 \|.*\+0\.11.±.0\.02 \| ✓ \|$", text)
    assert re.search(r"(?m)^\| B1 \|.*−20\.00.±.0\.00 \| ✗ \|$", text)


def test_figures_are_not_drawn_into_a_folder_that_is_a_link(runs, typed):
    Path("figures").mkdir()
    Path("theirs").mkdir()
    Path("figures/cpu-smoke").symlink_to("../theirs")
    assert "cpu-smoke: a link" in typed("report", code=2)
    assert list(Path("theirs").iterdir()) == []


def test_an_errors_words_are_shown_as_words(tmp_path, monkeypatch, typed):
    """Without escapes; dollars are no formula."""
    monkeypatch.chdir(tmp_path)
    make(Path("runs"), "A1")
    error = {"kind": "E", "message": "\x1b[2Jodd $\\bad{ é"}
    make(Path("runs"), "A2", status="error", error=error)
    assert "[2Jodd $\\bad{ é" in typed("report")
    text = page_of("cpu-smoke")
    assert "error: [2Jodd $\\bad{ é" in text
    assert "\x1b" not in text
    assert "Not shown" not in text


# Tags, by which the report chooses variants.


def test_every_tag_is_one_that_the_report_knows():
    tags = {tag for variant in VARIANTS.values() for tag in variant.tags}
    assert tags == {"ladder", "trainer", "plain", "default", "headline", "quickstart"}


def test_the_recommended_variant_is_in_the_ladder_and_the_headline():
    assert {"ladder", "headline"} <= set(VARIANTS[RECOMMENDED].tags)
