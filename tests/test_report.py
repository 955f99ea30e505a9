"""`python -m qa_lib report`: the table that it prints, and the page that it makes."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qa_lib.__main__ import main
from qa_lib.lab.report import cli, evidence, figures, own, variants_table
from qa_lib.lab.report.evidence import load_runs, select
from qa_lib.lab.report.format import MISSING
from qa_lib.lab.report.notebook import family_table
from qa_lib.lab.report.variants_table import headline_table
from qa_lib.spec.variants import RECOMMENDED, VARIANTS
from tests.material import committed, refused
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


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory):
    """Runs of A1 and A2 with three seeds, and of A3 with one."""
    folder = tmp_path_factory.mktemp("three_seeds")
    for seed, speed, f1 in [(0, 100, 90), (1, 110, 91), (2, 130, 92)]:
        make(folder, "A1", seed, speed=speed, f1=f1)
        make(folder, "A2", seed, speed=3 * speed - seed, f1=f1 + 0.1 * seed)
    make(folder, "A3", f1=90.5)
    return select(load_runs(folder), "cpu-smoke")


# What has an interval and what has none.


def test_variants_of_fewer_than_three_seeds_have_no_verdict(three_seeds):
    table, _ = own._verdicts(three_seeds)
    assert re.findall("^\\| (A\\d) ", table, re.MULTILINE) == ["A2"]


def test_the_table_of_variants_has_differences_of_three_seeds_alone_and_ratios_without_intervals(
    three_seeds,
):
    table = headline_table(three_seeds, three_seeds, ["A1", "A2", "A3"]).set_index("variant")
    assert table["ΔF1 to A1"].str.contains("±").to_dict() == {"A1": False, "A2": True, "A3": False}
    assert table.loc["A3", "ΔF1 to A1"] == MISSING
    assert table["samples/s"].str.contains("±").tolist() == [True, True, False]
    assert not table["× A1"].str.contains("±").any()


def test_the_table_of_variants_has_all_where_none_of_those_asked_for_ran(three_seeds):
    runs = three_seeds.assign(**{"memory.peak_reserved_mib": 2048.0})
    table = headline_table(runs, runs, ["no such variant"])
    assert [*table["variant"]] == ["A1", "A2", "A3"]
    assert set(table["GiB reserved"]) == {"2.00"}


@pytest.mark.parametrize(
    ("hardware", "world", "words"),
    [("cpu", 1, "a CPU"), ("h200", 1, "one NVIDIA H200"), ("h200", 4, "4 NVIDIA H200")],
)
def test_the_caption_of_a_table_says_on_what_it_was_measured(hardware, world, words, three_seeds):
    columns = {"spec.hardware": hardware, "env.gpu": "NVIDIA H200", "world": world}
    sentence = variants_table.source(three_seeds.assign(**columns))
    assert f", on {words}, 8 samples in a forward pass, means over the timed runs; " in sentence


def test_the_caption_of_a_table_names_variants_in_it_that_ran_in_another_sitting(
    three_seeds, monkeypatch
):
    monkeypatch.setattr(variants_table, "tagged", lambda _: ["A1", "A2"])
    sitting = three_seeds["spec.variant"].map({"A1": "a", "A2": "b", "A3": "b"})
    sentence = variants_table.source(three_seeds.assign(sitting=sitting))
    said = " interval. A2 ran in another sitting than A1, so that no ratio is shown."
    assert sentence.endswith(said)


def test_the_caption_of_a_table_says_which_scores_are_of_another_card_and_group(three_seeds):
    scores = {"quality.best_f1": 80.0, "quality.always_null_f1": 50.0, "quality.n": 400}
    judged = three_seeds.assign(**scores, group="cpu-quality", code="a")
    is_a2 = judged["spec.variant"] == "A2"
    judged.loc[is_a2, ["group", "spec.hardware", "code"]] = ["h200-quality", "h200", "b"]
    text = variants_table.caption(three_seeds, judged)
    assert "scored on 400 questions (groups cpu-quality and h200-quality). " in text
    said = "Scored on another card and with other code than A1: A2 (group h200-quality)."
    assert text.endswith(said)
    judged["code"] = "a"
    assert "another card than A1: A2" in variants_table.across_cards(judged)
    assert variants_table.across_cards(judged[~is_a2]) == ""


def test_the_caption_of_a_table_says_where_its_scores_are_from(three_seeds):
    scores = {"quality.best_f1": 80.0, "quality.always_null_f1": 50.0, "quality.n": 400}
    judged = three_seeds.assign(**scores, group="cpu-quality")
    judged["spec.n_train"] = range(1000, 1000 + len(judged))
    said = (
        f"tiny on {999 + len(judged):,} samples, scored on 400 questions (group cpu-quality). "
        "A1 scores 80.00 there, which is 30.0 above never answering (50.00); "
        "1 F1 is 3.33 % of that difference."
    )
    assert said in variants_table.caption(three_seeds, judged)


def test_a_bar_has_a_whisker_as_long_as_its_interval_and_none_without_one():
    axis = Figure().subplots()
    lines = pd.DataFrame({
        "variant": ["A1", "A2"],
        "samples_per_s": [100.0, 200.0],
        "samples_per_s±": [15.0, math.nan],
        "note": "",
    })  # fmt: skip
    figures._draw_speeds(axis, lines, "A1")
    (whiskers,) = (each for each in axis.containers if isinstance(each, ErrorbarContainer))
    _, _, (bars,) = whiskers
    (segment,) = filter(len, bars.get_segments())
    assert segment.tolist() == [[85.0, 0.0], [115.0, 0.0]]


# What is printed.


def test_the_report_of_a_small_group_fits_a_terminal(runs, typed):
    lines = typed("report").splitlines()
    assert lines[0] == "Group cpu-smoke, evidence for: that everything runs, not speed or F1"
    assert lines[1] == "11 runs, micro-batch 8"
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
    assert text.startswith("Group cpu-local, ")
    assert text.splitlines()[1].startswith("2 runs, ")
    assert "cpu-smoke" not in text
    assert "cpu-smoke" not in page_of("cpu-local")


def test_a_group_of_ones_own_is_shown_without_what_is_archived_of_it(archived, typed):
    for variant in ("A1", "A2"):
        make(archived, variant, seed=7)
    assert typed("report").splitlines()[1].startswith("2 runs, ")


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


# Which group is shown, of columns alone.


def groups_of(*rows):
    """Runs of (group, when they began, whether they lie in a folder of one's own)."""
    table = [
        (group, began, "", SimpleNamespace(folder=Path(group) if own else None))
        for group, began, own in rows
    ]
    return pd.DataFrame(table, columns=["group", "time.started", "spec.search", "run"])


def test_the_group_that_is_shown_is_the_newest_of_ones_own_or_of_all():
    archived = [("old", "1", False), ("new", "9", False)]
    assert cli.default_group(groups_of(*archived)) == "new"
    assert cli.default_group(groups_of(("a", "5", True), ("b", "4", True), *archived)) == "a"
    assert cli.default_group(groups_of()[:0]) is None


def test_a_search_of_ones_own_leaves_the_newest_archived_group():
    runs = groups_of(("new", "1", False), ("tries", "2", True))
    runs.loc[runs["group"] == "tries", "spec.search"] = "tune"
    assert cli.default_group(runs) == "new"


def test_what_was_trained_is_said_with_its_samples_and_questions():
    columns = {"model.name": "bert", "data.name": "squad", "length": 384}
    runs = pd.DataFrame({"spec.n_train": [None, 1600.0], "spec.n_eval": [None, 400.0], **columns})
    assert own._about(runs) == "bert on squad, 1,600 samples, scored on 400"
    assert own._about(runs[:1]) == "bert on squad"


# Pages that are notebooks.


def executed_notebook():
    """A notebook of text, of what only prepares, and of code with a picture and a table."""
    picture = nbformat.v4.new_output("display_data", {"image/png": "aGk="})
    picture.metadata = {"image/png": {"file": "figures/g/ladder.png", "alt": "The ladder"}}
    unkept = nbformat.v4.new_output("display_data", {"image/png": "aGk="})
    table = nbformat.v4.new_output("display_data", {"text/markdown": "| a |"})
    notebook = nbformat.v4.new_notebook(metadata={"papermill": {"duration": 9}})
    prepares = nbformat.v4.new_markdown_cell("Setting up:", metadata={"tags": ["setup"]})
    injected = nbformat.v4.new_code_cell("# Parameters", metadata={"tags": ["injected-parameters"]})
    code = nbformat.v4.new_code_cell("draw()", metadata={"papermill": {"duration": 1}})
    code.outputs = [picture, unkept, table]
    notebook.cells = [nbformat.v4.new_markdown_cell("# Title"), prepares, injected, code]
    return notebook


def test_a_page_in_markdown_has_texts_tables_and_links_to_pictures_from_its_folder():
    text = cli.as_markdown(executed_notebook(), Path("runs/report.ipynb"))
    assert text == "# Title\n\n![The ladder](../figures/g/ladder.png)\n\n| a |\n"


def test_a_page_has_no_traces_of_its_execution():
    executed = executed_notebook()
    cli._remove_traces(executed, nbformat.v4.new_notebook(metadata={"title": "own"}))
    assert executed.metadata == {"title": "own"}
    assert [cell.metadata for cell in executed.cells] == [
        {},
        {"tags": ["setup"]},
        {"tags": ["injected-parameters"]},
        {},
    ]
    assert executed.cells[2].id == "injected-parameters"
    assert executed.cells[3].id != "injected-parameters"


def test_a_page_is_old_where_its_cells_are_not_those_of_its_notebook(tmp_path, monkeypatch):
    notebook = executed_notebook()
    del notebook.cells[2]
    page = executed_notebook()
    page.cells[2].id = "injected-parameters"
    nbformat.write(notebook, tmp_path / "notebook.ipynb")
    nbformat.write(page, tmp_path / "page.ipynb")
    pages = {"page.ipynb": ("notebook.ipynb", {}), "gone.ipynb": ("notebook.ipynb", {})}
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    monkeypatch.setattr(cli, "PAGES", pages)
    monkeypatch.setattr(cli, "TRAINED", {})
    assert cli._old_pages() == []
    page.cells[3].source = "other()"
    nbformat.write(page, tmp_path / "page.ipynb")
    (problem,) = cli._old_pages()
    assert problem.startswith("page.ipynb is not of today's notebook.ipynb")


def test_a_figure_is_old_where_it_was_drawn_from_other_records(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "digest", lambda chosen: "today")
    for name, drawn_from in (("new", "today"), ("old", "yesterday")):
        info = PngInfo()
        info.add_text("Records", drawn_from)
        Image.new("RGB", (1, 1)).save(tmp_path / f"{name}.png", pnginfo=info)
    Image.new("RGB", (1, 1)).save(tmp_path / "unknown.png")
    monkeypatch.setattr(evidence, "select", lambda runs, group: None)
    problems = cli._old_figures(None, "g", tmp_path)
    assert [problem.partition(".png")[0] for problem in problems] == [
        f"{tmp_path}/old",
        f"{tmp_path}/unknown",
    ]


def test_a_figure_of_several_groups_is_old_where_the_scores_of_another_changed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(cli, "digest", lambda chosen: chosen)
    monkeypatch.setattr(evidence, "select", lambda runs, group: f"own of {group}")
    monkeypatch.setattr(evidence, "judging_runs", lambda runs, group: runs)
    info = PngInfo()
    info.add_text("Records", "scores of today")
    info.add_text("Groups", "g, other")
    Image.new("RGB", (1, 1)).save(tmp_path / "equivalence.png", pnginfo=info)
    assert cli._old_figures("scores of today", "g", tmp_path) == []
    assert len(cli._old_figures("scores of tomorrow", "g", tmp_path)) == 1


def test_pages_are_made_in_the_root_of_a_checkout_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "execute", lambda *_: pytest.fail("executed"))
    refused("type it in its root", cli.execute_pages)


def test_the_page_of_a_group_is_executed_over_its_records_into_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    monkeypatch.setattr(cli, "execute", lambda *words: calls.append(words))
    page = cli.execute_report(tmp_path / "runs", tmp_path / "figures", "g")
    parameters = {"group": "g", "runs": "runs", "figures": "figures"}
    assert page == tmp_path / "figures" / "g" / "report.ipynb"
    assert calls == [(cli.NOTEBOOK, page, parameters)]
