"""The figures of the report, their parts, and their way into files and notebooks."""

import math
from pathlib import Path

import pytest
from PIL import Image

from qa_lib.lab.report import figures, profile_figures, style
from qa_lib.lab.report.evidence import load_runs, select
from qa_lib.records.archive import read_runs
from tests.material import ROOT, refused, write
from tests.report_runs import make, make_one_of_each_kind
from tests.tiny import H200


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Runs with one variant of each kind, as the report reads them, in the current folder."""
    monkeypatch.chdir(tmp_path)
    make_one_of_each_kind(Path("runs"))
    return select(load_runs("runs"), "cpu-smoke")


@pytest.fixture
def profile():
    """The first of the committed profiles."""
    profiles = (run.profile() for run in read_runs(ROOT / "runs", "h200-bench"))
    return next(found for found in profiles if found)


# The ladder.


def test_the_title_of_the_ladder_says_how_far_it_reaches(own):
    title = style.title_of(figures.fig_ladder(own))
    assert (
        title == "On a CPU: A4 trains 2.00× as fast as A1, 2.11× as fast as the plain Trainer (A0)"
    )


def test_the_ladder_has_columns_of_numbers_beside_its_bars(own):
    texts = {text.get_text() for text in figures.fig_ladder(own).axes[0].texts}
    assert texts >= {"samples/s", "× A1", "× variant above"}


def test_a_rung_is_compared_with_what_it_changes_which_is_named_where_it_is_not_above(own):
    texts = {text.get_text() for text in figures.fig_ladder(own).axes[0].texts}
    assert texts >= {"1.25", "0.95 (A1)"}


def test_a_few_timed_runs_do_not_stand_for_a_group_that_shared_the_gpu(own):
    refused("shared the GPU", figures.timed, own.assign(**{"time.wall_s": math.nan}))


# Profiles.


@pytest.fixture
def profiled(tmp_path, profile):
    """Three runs with a profile beside each, where C2's took four times the memory of the run."""
    profile["time"]["step_ms"] = 7.5
    for variant, peak_mib in (("A1", 23.0), ("A3", 23.0), ("C2", 90.0)):
        folder = make(tmp_path, variant, machine=H200, peak=23.0)
        profile["spec"] |= {"variant": variant, "micro_batch": 8}
        profile["memory"]["peak_mib"] = peak_mib
        names = {"run_id": folder.name, "group": folder.parent.name}
        write(folder / "profile.json", profile | names)
    return select(load_runs(tmp_path), "h200-smoke")


def test_a_step_of_the_quickest_variant_stands_beside_the_baselines(profiled):
    title = style.title_of(profile_figures.fig_step(profiled))
    assert title == "A step takes 7.50 ms in A1, 7.50 ms in A3"


def test_memory_is_drawn_without_profiles_of_code_that_took_other_memory(profiled):
    axis = profile_figures.fig_phases(profiled).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["A1", "A3"]


def with_parts(profile, **ms_by_part):
    """A profile whose step takes the sum of these milliseconds."""
    parts = {name.replace("_", " "): ms for name, ms in ms_by_part.items()}
    times = {"step_ms": sum(parts.values()), "parts": {"forward": parts}}
    return profile | {"time": profile["time"] | times}


def test_a_step_that_got_shorter_says_what_shrank(profile):
    before = with_parts(profile, attention=4.0, copies=3.0, norms_and_elementwise=9.0)
    after = with_parts(profile, attention=4.0, copies=1.0, norms_and_elementwise=0.5)
    assert style.title_of(profile_figures.step({"A1": before, "A3": after})) == (
        "A step takes 16.0 ms in A1, 5.50 ms in A3; norms and elementwise + copies: 12.0 → 1.50 ms"
    )


def test_a_step_alone_says_how_long_it_takes(profile):
    only = with_parts(profile, attention=4.0, copies=3.0, norms_and_elementwise=9.0)
    assert style.title_of(profile_figures.step({"A1": only})) == "A step takes 16.0 ms in A1"


# Files.


def test_a_figure_is_kept_with_its_title_and_what_it_was_drawn_from(own):
    shown = style.show(figures.fig_ladder, own, save="figures")
    with Image.open("figures/cpu-smoke/ladder.png") as image:
        assert image.text["Title"] == shown.alt
        assert image.text["Records"] == style.digest(own)


def test_a_kept_figure_is_linked_with_its_title(own):
    style.show(figures.fig_ladder, own, save="figures")
    link = figures.picture_link(Path("figures/cpu-smoke/ladder.png"))
    assert link.startswith("![On a CPU: A4 trains ")
    assert link.endswith("](figures/cpu-smoke/ladder.png)")


def test_a_figure_that_was_not_drawn_is_not_linked(tmp_path):
    assert figures.picture_link(tmp_path / "ladder.png") == ""


def test_equal_figures_are_equal_bytes(own):
    style.show(figures.fig_ladder, own, save="figures")
    first = Path("figures/cpu-smoke/ladder.png").read_bytes()
    style.show(figures.fig_ladder, own, save="figures")
    assert Path("figures/cpu-smoke/ladder.png").read_bytes() == first


def test_figures_of_other_records_have_another_digest(own):
    assert style.digest(own[1:]) != style.digest(own)


@pytest.mark.parametrize("part", style.LATER)
def test_a_digest_counts_a_later_field_only_where_it_is_not_the_default(part, own):
    before = style.digest(own)
    ((name, default),) = style.LATER[part].items()
    for run in own["run"]:
        assert run.record["spec"][part].pop(name) == default
    assert style.digest(own) == before
    own["run"].iloc[0].record["spec"][part][name] = 7
    assert style.digest(own) != before


def test_links_and_files_that_are_no_pictures_are_no_figures(own, tmp_path):
    style.show(figures.fig_ladder, own, save="figures")
    folder = Path("figures/cpu-smoke")
    figure = folder / "ladder.png"
    (folder / "link.png").symlink_to(tmp_path / figure)
    (folder / "text.png").write_text("no picture")
    ((title, png),) = style.figures_of(folder)
    assert title.startswith("On a CPU: ")
    assert png == figure.read_bytes()


# Parts.


def test_axes_write_thousands_as_tables_do():
    figure = style.new_figure("Title", "", 3.0)
    axis = figure.subplots()
    axis.set(xlim=(0, 12_000), ylim=(0, 1.2))
    style.png(figure)
    assert "12,000" in [label.get_text() for label in axis.get_xticklabels()]
    assert "1.0" in [label.get_text() for label in axis.get_yticklabels()]


@pytest.mark.parametrize(
    ("versions", "words"), [("a, b", "Code a, b"), ("a, b, c, d", "Code a, b, and 2 more")]
)
def test_a_caption_names_two_versions_of_the_code(versions, words):
    assert style.code(versions) == words


def test_texts_beside_an_axis_are_apart_and_inside():
    axis = style.new_figure("Title", "", 3.0).subplots()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    style.name_points(axis, [(1, 0.99, "top"), (1, 0.98, "next"), (1, 0.1, "low")])
    low, second, top = [text.get_position()[1] for text in axis.texts]
    assert low == pytest.approx(0.1)
    assert top - second >= 0.07 - 1e-9
    assert top <= 1


def test_a_figure_that_cannot_be_drawn_is_a_sentence(own):
    shown = style.show(profile_figures.fig_step, own)
    assert shown.data.startswith("*Not shown: no run of this group has a profile")


def test_a_spoilt_record_is_a_sentence_that_names_the_error():
    assert style.show(lambda: {}["x"]).data.startswith("*Not shown: KeyError")
