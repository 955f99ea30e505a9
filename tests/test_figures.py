"""The figures of the report, their parts, and their way into files and notebooks."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from qa_lib.lab.report import figures, profile_figures, report_figures, spoken, style
from qa_lib.lab.report.evidence import load_runs, select
from qa_lib.records.archive import read_runs
from qa_lib.records.files import RecordError
from qa_lib.spec.variants import RECOMMENDED, tagged
from tests.material import ROOT, refused, write
from tests.report_runs import make, make_one_of_each_kind
from tests.tiny import H200


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Runs with one variant of each kind, as the report reads them, in the current folder."""
    monkeypatch.chdir(tmp_path)
    make_one_of_each_kind(Path("runs"))
    return select(load_runs("runs"), "cpu-smoke")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A folder in which the ladder of the same runs is kept, these runs, and what was shown."""
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_one_of_each_kind(Path("runs"))
        runs = select(load_runs("runs"), "cpu-smoke")
        return folder, runs, style.show(figures.fig_ladder, runs, save="figures")


@pytest.fixture
def kept(drawn, tmp_path, monkeypatch):
    """Work in a copy of that folder; return the runs and what was shown."""
    folder, runs, shown = drawn
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "copy"))
    return runs, shown


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
    assert "by kernels" not in texts, "no run on a CPU has kernel time"


def texts_of_the_ladder(runs, **kernel_ms):
    """The texts beside the bars, where variants have these kernel times and others have none."""
    with_kernels = runs.assign(**{"time.kernel_ms": runs["spec.variant"].map(kernel_ms)})
    return [text.get_text() for text in figures.fig_ladder(with_kernels).axes[0].texts]


def test_ratios_of_kernel_times_stand_beside_those_of_speeds_where_most_have_some(own):
    shown = own[own["spec.variant"].isin(["A1", "A2", "A3"])]
    texts = texts_of_the_ladder(shown, A1=50.0, A2=20.0)
    at = texts.index("by kernels")
    assert texts[at + 1 : at + 4] == ["1.00", "2.50", "–"]
    assert "by kernels" not in texts_of_the_ladder(shown, A1=50.0)


def test_a_rung_is_compared_with_what_it_changes_which_is_named_where_it_is_not_above(own):
    texts = {text.get_text() for text in figures.fig_ladder(own).axes[0].texts}
    assert texts >= {"1.25", "0.95 (A1)"}


def test_a_rung_is_compared_with_the_nearest_ancestor_that_is_shown_with_a_speed():
    lines = pd.DataFrame({
        "variant": ["A1", "A2", "A3", "A4"],
        "samples_per_s": [100.0, math.nan, 150.0, 180.0],
        "sittings": [frozenset("a")] * 4,
    })  # fmt: skip
    assert figures._gains(lines) == ["–", "–", "1.50 (A1)", "1.20"]


def test_a_rung_is_not_compared_with_a_variant_of_another_sitting():
    lines = pd.DataFrame({
        "variant": ["A1", "A2", "A3"],
        "samples_per_s": [100.0, 120.0, 180.0],
        "sittings": [frozenset("a"), frozenset("ab"), frozenset("b")],
    })  # fmt: skip
    assert figures._gains(lines) == ["–", "1.20", "1.50"]
    assert figures._gains(lines[lines["variant"] != "A2"]) == ["–", "–"]


def test_a_ladder_says_nothing_of_two_sittings(own):
    is_a4 = own["spec.variant"] == "A4"
    figure = figures.fig_ladder(own.assign(sitting=is_a4.map({True: "b", False: "a"})))
    assert style.title_of(figure).startswith("On a CPU: A4 trains ")
    assert "as fast as" not in style.title_of(figure)
    assert "No ratios between sittings" in figure.get_supxlabel()


def ladder_of(**speeds):
    """Lines of the ladder with these samples/s."""
    names = [name.replace("_", "-") for name in speeds]
    columns = {"variant": names, "samples_per_s": [*speeds.values()], "task.name": "qa"}
    columns["sittings"] = [frozenset("a")] * len(names)
    return pd.DataFrame(columns).assign(ratio=lambda lines: lines["samples_per_s"] / 100)


def test_a_short_ladder_is_drawn_whole(monkeypatch):
    lines = ladder_of(A1=100.0, A2=101.0, A3=150.0)
    assert len(figures._large_rungs(lines, "A1")) == 3
    monkeypatch.setattr(figures, "MOST", 2)
    assert figures._large_rungs(lines, "A1")["variant"].tolist() == ["A1", "A3"]


def test_of_a_long_ladder_what_the_title_and_other_tables_speak_of_stays(monkeypatch):
    monkeypatch.setattr(figures, "MOST", 2)
    lines = ladder_of(A1=100.0, A2=50.0, A3=40.0, A0=30.0, A0_grouped=31.0, A0_compile=20.0)
    shown = figures._large_rungs(lines, "A1")["variant"].tolist()
    assert shown == ["A1", "A3", "A0-grouped", "A0-compile"]


@pytest.mark.parametrize("tag", ["ladder", "trainer", "plain"])
def test_every_bar_of_a_ladder_has_a_name_of_few_words(tag):
    for name in tagged(tag):
        assert len(spoken.rung(name)) > len(name), f"{name} has words"
        assert len(spoken.rung(name)) <= 2 * figures.LETTERS


def test_a_few_timed_runs_do_not_stand_for_a_group_that_shared_the_gpu(own):
    refused("shared the GPU", figures.timed, own.assign(**{"time.wall_s": math.nan}))


def test_one_variant_is_no_ladder(own):
    alone = own[own["spec.variant"] == "A1"]
    refused("the ladder has one rung", figures.fig_ladder, alone)


def test_ratios_take_a_speed_of_the_baseline(own):
    unknown = own["speed.samples_per_s"].mask(own["spec.variant"] == "A1")
    untimed = own.assign(**{"speed.samples_per_s": unknown})
    refused("the baseline A1 has no measured speed in this group", figures.timed, untimed)


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
    assert title == "A step takes 7.50 ms in A1 and 7.50 ms in A3"


def test_a_baselines_profile_alone_is_not_drawn(profiled):
    alone = profiled[profiled["spec.variant"] == "A1"]
    refused("no profile of A1 beside another variant's", profile_figures.fig_step, alone)


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
        "A step takes 16.0 ms in A1 and 5.50 ms in A3; "
        "9.00 and 0.50 ms go to norms and elementwise work"
    )


def test_a_part_that_a_shorter_step_has_no_more_has_shrunk_by_all_of_it(profile):
    before = with_parts(profile, attention=4.0, copies=9.0, norms_and_elementwise=3.0)
    after = with_parts(profile, attention=4.0, norms_and_elementwise=2.0)
    assert style.title_of(profile_figures.step({"A1": before, "A3": after})).endswith(
        "; 9.00 and 0.00 ms go to copies"
    )


def test_the_numbers_of_the_title_stand_above_the_bars(profile):
    before = with_parts(profile, attention=4.0, norms_and_elementwise=9.0)
    after = with_parts(profile, attention=4.0, norms_and_elementwise=0.5)
    titles = [
        axis.get_title(loc="left")
        for axis in profile_figures.step({"A1": before, "A3": after}).axes
    ]
    assert titles[0].startswith("A1: 13.0 ms a step (norms and elementwise 9.00), the GPU busy for")
    assert titles[1].startswith("A3: 4.50 ms a step (norms and elementwise 0.50), the GPU busy for")


@pytest.mark.parametrize(
    ("ms_by_part", "texts"),
    [
        ({"attention": 10.0, "copies": 20.0}, ["10.0", "20.0"]),
        ({"attention": 10.0, "copies": 1.0}, ["attention 10.0, copies 1.00"]),
        ({"attention": 60.0, "copies": 1.0}, ["60.0"]),
        ({"attention": 3.0, "copies": 0.001}, ["attention 3.00"]),
        ({"attention": 0.0}, []),
    ],
)
def test_a_block_has_its_number_and_those_of_a_short_bar_stand_beside_it(ms_by_part, texts):
    axis = Figure().subplots()
    profile_figures._number_blocks(axis, pd.DataFrame([ms_by_part]), widest=100.0)
    assert [text.get_text() for text in axis.texts] == texts


def test_a_step_alone_says_how_long_it_takes(profile):
    only = with_parts(profile, attention=4.0, copies=3.0, norms_and_elementwise=9.0)
    assert style.title_of(profile_figures.step({"A1": only})) == "A step takes 16.0 ms in A1"


# Files.


def test_a_figure_is_kept_with_its_title_and_what_it_was_drawn_from(kept):
    runs, shown = kept
    with Image.open("figures/cpu-smoke/ladder.png") as image:
        assert image.text["Title"] == shown.alt
        assert image.text["Records"] == style.digest(runs)


def test_a_kept_figure_is_linked_with_its_title(kept):
    link = figures.picture_link(Path("figures/cpu-smoke/ladder.png"))
    assert link.startswith("![On a CPU: A4 trains ")
    assert link.endswith("](figures/cpu-smoke/ladder.png)")


def test_a_picture_without_a_title_is_linked_by_its_name_from_the_current_folder(
    tmp_path, monkeypatch
):
    for folder in ("figures", "notebooks"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "figures" / "ladder.png"
    Image.new("RGB", (2, 2)).save(path)
    monkeypatch.chdir(tmp_path / "notebooks")
    assert figures.picture_link(path) == "![ladder](../figures/ladder.png)"


def test_a_figure_that_was_not_drawn_is_not_linked(tmp_path):
    assert figures.picture_link(tmp_path / "ladder.png") == ""


def test_equal_figures_are_equal_bytes(kept):
    runs, _ = kept
    first = Path("figures/cpu-smoke/ladder.png").read_bytes()
    style.show(figures.fig_ladder, runs, save="figures")
    assert Path("figures/cpu-smoke/ladder.png").read_bytes() == first


def test_a_figure_of_several_groups_names_them_and_is_of_the_records_of_all(own):
    other = own.assign(group="h200-smoke", **{"spec.seed": 1})
    runs = pd.concat([own, other], ignore_index=True)
    shown = style.show(figures.fig_ladder, runs, save="figures")
    with Image.open("figures/cpu-smoke/ladder.png") as image:
        assert image.text["Groups"] == "cpu-smoke, h200-smoke"
        assert image.text["Records"] == style.digest(runs) != style.digest(own)
    assert shown.metadata["group"] == "cpu-smoke, h200-smoke"
    caption = style.group_figure(runs, "", "", 1.0).get_supxlabel()
    assert caption.startswith("Groups cpu-smoke and h200-smoke. ")


def test_figures_of_other_records_have_another_digest(own):
    assert style.digest(own[1:]) != style.digest(own)


@pytest.mark.parametrize("status", ["error", "oom", "skipped"])
def test_a_run_that_did_not_end_well_changes_a_digest_as_well(status, own):
    before = style.digest(own)
    own["run"].iloc[0].record["status"] = status
    own.loc[own.index[0], "status"] = status
    with_failed = style.digest(own)
    assert with_failed not in (before, style.digest(own[1:]))


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, later in style.LATER.items() for name in later]
)
def test_a_digest_counts_a_later_field_only_where_it_is_not_the_default(part, name, own):
    before = style.digest(own)
    default = style.LATER[part][name]
    for run in own["run"]:
        assert run.record["spec"][part].pop(name) == default
    assert style.digest(own) == before
    own["run"].iloc[0].record["spec"][part][name] = 7
    assert style.digest(own) != before


def test_links_and_files_that_are_no_pictures_are_no_figures(kept):
    folder = Path("figures/cpu-smoke")
    figure = folder / "ladder.png"
    (folder / "link.png").symlink_to(figure.absolute())
    (folder / "text.png").write_text("no picture")
    ((title, png),) = style.figures_of(folder)
    assert title.startswith("On a CPU: ")
    assert png == figure.read_bytes()


def test_a_picture_without_a_title_is_called_by_its_file(tmp_path):
    Image.new("RGB", (1, 1)).save(tmp_path / "plain.png")
    ((title, _),) = style.figures_of(tmp_path)
    assert title == "plain"


def test_a_figure_of_a_table_without_runs_is_shown():
    shown = style.show(lambda _: style.new_figure("Nothing", "", 1.0), pd.DataFrame({"group": []}))
    assert shown.alt == "Nothing"


def test_why_nothing_is_shown_is_told_without_the_class_of_an_error_with_words_of_ours():
    assert style.reason(RecordError("a.json: broken")) == "a.json: broken"
    assert style.reason(KeyError("f1")) == "KeyError, 'f1'"


# F1, and memory against speed.


def scored(**columns):
    """Runs of two models' worth of columns, with a score each."""
    return pd.DataFrame({"model.name": ["minilm"], "data.name": "squad-large", **columns})


@pytest.mark.parametrize(
    ("never_answering", "words"),
    [
        (50.0, "MiniLM, SQuAD v2"),
        (0.0, "MiniLM, questions that all have an answer"),
        (None, "MiniLM, SQuAD v2"),
    ],
)
def test_a_figure_of_f1_says_which_model_and_questions_it_is_of(never_answering, words):
    runs = scored(**{"quality.always_null_f1": [never_answering]})
    assert report_figures._trained_on(runs) == words


def test_data_that_nobody_has_a_word_for_are_called_by_their_name():
    runs = scored(**{"quality.always_null_f1": [50.0]}).assign(**{"data.name": "my-data"})
    assert report_figures._trained_on(runs) == "MiniLM, my-data"


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(1.2, 13.0, [1.5, 3, 6, 12]), (0.3, 0.8, [0.375, 0.75])]
)
def test_memory_has_ticks_that_double(low, high, ticks):
    assert report_figures._doubling(low, high) == ticks


def memory_axis(shown):
    """The axis of a figure of memory on which points (variant, samples/s, GiB) are drawn."""
    axis = style.new_figure("Title", "", 6.0).subplots()
    axis.set(xlim=(0, 120), ylim=(2, 12))
    report_figures._draw_memory(axis, shown, "A1")
    return axis


def test_memory_names_the_reference_projects_variants_and_those_of_the_line():
    shown = pd.DataFrame({
        "variant": ["A1", "E-adamw", "C1", "C2", "E-gelu"],
        "samples_per_s": [100.0, 90.0, 60.0, 50.0, 110.0],
        "gib": [8.0, 9.0, 6.0, 4.0, 10.0],
    })  # fmt: skip
    axis = memory_axis(shown)
    assert {text.get_text() for text in axis.texts} == {"A1", "C1", "C2", "E-gelu"}


def test_memory_without_a_name_is_named_in_the_caption(own):
    # A4 is the leanest and the fastest.
    mib = 2048.0 - 1024.0 * (own["spec.variant"] == "A4")
    runs = own.assign(**{"memory.peak_reserved_mib": mib})
    figure = report_figures.fig_memory(runs)
    axis = figure.axes[0]
    caption = figure.get_supxlabel().replace("\n", " ")
    named = {text.get_text() for text in axis.texts}
    (told,) = re.findall(r"Small, from slow to fast: (.*?)\. ", caption)
    # B1 trains too little to be drawn, and C1 and D1-nvfuser have no speed.
    assert named == {"A1", "A2", "A3", "A4", "C2"}
    assert set(told.split(", ")) == {"A0", "A4-nb", "A4-b"}


# F1.


@pytest.fixture
def tested(monkeypatch):
    """Lines of `equivalence`: the reference project's variants, of which B1 is far, and others."""
    names = ["A2", "A3", "B1", "C1", "D1", "E-plain", "E-graph", "E-fp8", "E-uncompiled", "E-t4"]
    rows = pd.DataFrame({"n": 3, "delta": -0.5, "delta±": 0.4, "best_delta": 0.1}, names)
    rows = rows.assign(**{"best_delta±": 0.4, "verdict": "within"})
    rows.loc["B1", ["delta", "best_delta", "verdict"]] = [-17.7, -15.0, "beyond"]
    monkeypatch.setattr(report_figures, "equivalence", lambda runs: rows)
    return rows


def test_f1_is_drawn_of_the_reference_projects_variants_before_others(own, tested):
    axis = report_figures.fig_equivalence(own).axes[0]
    drawn = [label.get_text() for label in axis.get_yticklabels()]
    assert len(drawn) == report_figures.MOST
    assert {"A2", "A3", "B1", "C1", "D1", "E-uncompiled"} < set(drawn)


def test_f1_that_is_far_from_the_baselines_is_a_number_at_the_edge(own, tested):
    figure = report_figures.fig_equivalence(own)
    axis = figure.axes[0]
    assert "−15.00, −17.70" in {text.get_text() for text in axis.texts}
    assert max(map(abs, axis.get_xlim())) < 2
    triangles = [line for line in axis.lines if line.get_marker() == "<"]
    assert len(triangles) == 2
    assert "refuted" in {text.get_text() for text in axis.texts}
    assert "Triangles: beyond the axis" in figure.get_supxlabel()


def test_f1_has_no_triangles_where_none_is_far(own, tested):
    tested.loc["B1", ["delta", "best_delta"]] = -4.0
    figure = report_figures.fig_equivalence(own)
    assert "Triangles" not in figure.get_supxlabel()


# Parts.


def test_every_axis_writes_thousands_unless_it_has_a_format_of_its_own():
    figure = style.new_figure("Title", "", 3.0)
    axes = figure.subplots(1, 3)
    for axis in axes[1:]:
        axis.set_xlim(0, 12_000)
    axes[2].xaxis.set_major_formatter("{x:.0f} s")
    style.png(figure)
    labels = [{label.get_text() for label in axis.get_xticklabels()} for axis in axes[1:]]
    assert "10,000" in labels[0]
    assert "10000 s" in labels[1]


def test_dollars_in_a_title_and_a_caption_are_no_formula():
    figure = style.new_figure("From $5 to $6", "a $ and a $", 2.0)
    texts = [text for text in figure.findobj(Text) if "$" in text.get_text()]
    assert [text.get_parse_math() for text in texts] == [False, False]


def test_axes_write_thousands_as_tables_do():
    figure = style.new_figure("Title", "", 3.0)
    axis = figure.subplots()
    axis.set(xlim=(0, 12_000), ylim=(0, 1.2))
    style.png(figure)
    assert "12,000" in [label.get_text() for label in axis.get_xticklabels()]
    assert "1.0" in [label.get_text() for label in axis.get_yticklabels()]


@pytest.mark.parametrize(
    ("versions", "words"), [("a, b", "Code a, b"), ("a, b, c, d", "Code of 4 commits")]
)
def test_a_caption_names_two_versions_of_the_code_and_counts_more(versions, words):
    assert style.code(versions) == words


def test_a_figure_that_cannot_be_drawn_is_a_sentence(own):
    shown = style.show(profile_figures.fig_step, own)
    assert shown.data.startswith("*Not shown: no run of this group has a profile")


def test_a_spoilt_record_is_a_sentence_that_names_the_error():
    assert style.show(lambda: {}["x"]).data.startswith("*Not shown: KeyError")


# Titles, of lines that are columns alone.


@pytest.mark.parametrize(
    ("ratios", "title"),
    [
        ({"A1": 1.0}, "No variant beside A1 has a speed here"),
        ({"A1": 1.0, "A3": 3.0, "A2": 2.0}, "A3 trains 3.00× as fast as A1"),
        ({"A1": 1.0, RECOMMENDED: 8.0, "E-fp8-uncompiled": 9.0}, f"{RECOMMENDED} trains 8.00× as"),
        (
            {"A1": 1.0, "A2": 6.0, "A0": 0.5, "E-searched": 3.0},
            "A2 trains 6.00× as fast as A1, 2.00× as fast as plain PyTorch (E-searched)",
        ),
        (
            {"A1": 1.0, "A2": 6.0, "A0": 0.5, "A0-compile": 3.0},
            "A2 trains 6.00× as fast as A1, 2.00× as fast as the best Trainer (A0-compile)",
        ),
        (
            {"A1": 1.0, "A2": 6.0, "A3": math.nan, "A0": 0.5, "E-searched": math.nan},
            "A2 trains 6.00× as fast as A1, 12.0× as fast as the plain Trainer (A0)",
        ),
    ],
)
def test_the_finding_of_speeds_names_the_top_and_its_best_rival(ratios, title):
    assert figures.speed_finding(lines_of(ratios)).startswith(title)


def lines_of(ratios):
    """Lines of one sitting with these ratios to a baseline of 100 samples/s."""
    columns = {"variant": [*ratios], "ratio": [*ratios.values()], "task.name": "qa"}
    lines = pd.DataFrame(columns).assign(sittings=[frozenset("a")] * len(ratios))
    return lines.assign(samples_per_s=100 * lines["ratio"])


@pytest.mark.parametrize(
    ("apart", "title"),
    [
        ({"A1"}, "A2 trains 2.00× as fast as plain PyTorch (E-searched)"),
        ({"E-searched"}, "A2 trains 6.00× as fast as A1, 12.0× as fast as the plain Trainer (A0)"),
        ({"A1", "A0", "E-searched"}, "A2 trains 600 samples/s"),
    ],
)
def test_the_finding_of_speeds_compares_within_a_sitting(apart, title):
    lines = lines_of({"A1": 1.0, "A2": 6.0, "A0": 0.5, "E-searched": 3.0})
    is_apart = lines["variant"].isin(apart)
    lines["sittings"] = is_apart.map({True: frozenset("b"), False: frozenset("a")})
    if "A1" in apart:
        lines["ratio"] = math.nan
    assert figures.speed_finding(lines) == title


def test_the_lines_of_speeds_are_at_the_largest_micro_batch_of_the_baseline(monkeypatch):
    rows = [("A1", 8, 10.0), ("A1", 16, 20.0), ("A1", 32, math.nan), ("A3", 16, 5.0), ("A3", 32, 9)]
    lines = pd.DataFrame(rows, columns=["variant", "micro_batch", "samples_per_s"])
    monkeypatch.setattr(figures, "summary", lambda runs: lines.assign(length=384))
    runs = pd.DataFrame({"status": ["ok"], "time.wall_s": [1.0], "task.name": ["qa"]})
    assert figures.timed(runs)["variant"].tolist() == ["A1", "A3"]
    assert figures.timed(runs)["micro_batch"].eq(16).all()


def test_a_variant_without_a_speed_has_its_reason_in_place_of_a_bar_as_it_is_written():
    shown = pd.DataFrame({
        "variant": ["A1", "A2", "A3"],
        "samples_per_s": [10.0, math.nan, math.nan],
        "samples_per_s±": math.nan,
        "note": ["", "", "error: $x_{ of y$"],
    })  # fmt: skip
    axis = Figure().subplots()
    figures._draw_speeds(axis, shown, "A1")
    texts = {text.get_position()[1]: text for text in axis.texts}
    assert {bar: text.get_text() for bar, text in texts.items()} == {
        1: " not measured",
        2: " error: $x_{ of y$",
    }
    assert not any(text.get_parse_math() for text in texts.values())


def test_the_caption_of_the_ladder_names_the_code_of_the_runs_that_it_shows(drawn):
    _, runs, _ = drawn
    other_code = {"code": "f" * 40, "code.commit": "f" * 40, "code.digest": "f" * 64}
    smaller = runs.assign(micro_batch=1, **other_code)
    figure = figures.fig_ladder(pd.concat([runs, smaller], ignore_index=True))
    caption = " ".join(text.get_text() for text in figure.texts)
    assert "8 samples in a forward pass." in caption
    assert "fffffff" not in caption


# A run as it went.


def test_a_run_is_drawn_with_its_loss_its_steps_and_where_timing_begins(tmp_path):
    folder = tmp_path / "g" / "A1-s0-x"
    folder.mkdir(parents=True)
    steps = [{"step": n, "loss": float(n), "lr": 0.1, "ms": 5.0 + n} for n in range(1, 41)]
    steps.append({"step": 41, "loss": None, "lr": 0.1, "ms": 5.0})  # is not drawn
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    spec = {"variant": "A1", "hardware": "h100", "preset": {"measure_from": 7}}
    record = {"run_id": "A1-s0-x", "group": "g", "status": "ok", "spec": spec}
    failed = record | {"status": "oom", "spec": {**spec, "variant": "A2"}}
    figure = figures.fig_run([record, failed], tmp_path)
    left, right = figure.axes
    assert style.title_of(figure) == "Loss of the last 20 steps: A1 30.50"
    assert left.lines[0].get_ydata()[[0, 1, 39]].tolist() == [1.0, 1.5, 30.5]
    assert right.lines[0].get_ydata()[0] == 6.0
    assert right.lines[1].get_xdata() == [7, 7]
    refused("A1-s0-x is oom", figures.fig_run, [failed], tmp_path)


def test_of_one_run_each_no_figure_says_whose_loss_is_lower(tmp_path):
    records = []
    for variant in ("A3", "D1"):
        folder = tmp_path / "g" / f"{variant}-s0-x"
        folder.mkdir(parents=True)
        (folder / "steps.jsonl").write_text('{"step": 1, "loss": 1.0, "ms": 5.0}\n')
        spec = {"variant": variant, "hardware": "cpu", "preset": {"measure_from": 7}}
        records.append({"run_id": folder.name, "group": "g", "status": "ok", "spec": spec})
    figure = figures.fig_run(records, tmp_path)
    assert style.title_of(figure) == "Loss of the last 20 steps: A3 1.00, D1 1.00"
    assert "shows nothing" in figure.get_supxlabel()
    assert len(figure.axes) == 1, "a CPU's durations are not drawn"


# Profiles, by their numbers alone.


def profile_of(step_ms=10.0, busy_ms=8.0, **memory):
    """A profile with these numbers, whose memory is at its peak in the backward pass."""
    held = {
        "params_mib": 100.0,
        "optimizer_mib": 200.0,
        "activations_mib": 600.0,
        "grads_mib": 50.0,
        "workspace_mib": 100.0,
        "fragmentation_mib": 24.0,
        "peak_mib": 1000.0,
        "peak_phase": "backward",
    }
    return {
        "group": "h200-bench",
        "code": {"commit": "a" * 40},
        "spec": {"micro_batch": 8},
        "env": {"gpu": "NVIDIA H200", "cpu": "a host"},
        "time": {
            "step_ms": step_ms,
            "busy_ms": busy_ms,
            "busy_share": busy_ms / step_ms,
            "launches_per_step": 1234,
            "parts": {"forward": {"attention": 3.0}, "optimizer": {"optimizer": 5.0}},
        },
        "memory": held | memory,
    }


def test_a_gpu_that_seems_busy_for_longer_than_the_step_waits_for_no_time():
    (axis,) = profile_figures.step({"A1": profile_of(step_ms=10.0, busy_ms=12.0)}).axes
    widths = {blocks.get_label(): blocks.datavalues for blocks in axis.containers}
    assert set(widths["waiting"]) == {0.0}


def test_a_step_is_drawn_with_the_time_in_which_the_gpu_waits():
    (axis,) = profile_figures.step({"A1": profile_of()}).axes
    title = axis.get_title(loc="left")
    assert title == "A1: 10.0 ms a step, the GPU busy for 80.0 %, 1,234 launches"
    widths = {blocks.get_label(): max(blocks.datavalues) for blocks in axis.containers}
    assert widths["attention"] == 3.0
    assert widths["optimizer"] == 5.0
    assert widths["waiting"] == 2.0


def test_the_caption_of_a_profile_says_on_what_it_was_made():
    figure = profile_figures.profile_figure("Title", {"A1": profile_of(), "A3": profile_of()}, 2.0)
    assert figure.get_supxlabel().replace("\n", " ") == (
        "Group h200-bench, profiled apart from its timed runs, micro-batch 8. Code aaaaaaa. "
        "NVIDIA H200, host a host."
    )


def test_the_caption_of_profiles_names_each_micro_batch_and_each_commit():
    small, large = profile_of(), profile_of()
    small["spec"] = {"micro_batch": 8}
    large["spec"] = {"micro_batch": 32}
    large["code"] = {"commit": "b" * 40}
    figure = profile_figures.profile_figure("Title", {"A1": large, "A3": small}, 2.0)
    caption = figure.get_supxlabel().replace("\n", " ")
    assert "micro-batch 8, 32. Code aaaaaaa, bbbbbbb." in caption


def drawn_memory(shown):
    """The title of a figure of memory, and the GiB of each block of its bars, by profile."""
    figure = profile_figures.phases(shown)
    (axis,) = figure.axes
    blocks = {each.get_label(): each.datavalues.tolist() for each in axis.containers}
    return style.title_of(figure), pd.DataFrame(blocks, index=[*shown])


def test_memory_is_drawn_in_gib_by_what_fills_it_at_the_peak():
    title, gib = drawn_memory({"A1": profile_of(), "A3": profile_of(peak_mib=800.0)})
    assert title == "Activations fill 60.0 % of the peak in A1, 75.0 % in A3"
    assert gib.loc["A1"].mul(1024).to_dict() == {
        "parameters": 100.0,
        "optimizer state": 200.0,
        "activations": 600.0,
        "gradients and workspace": 100.0,
        "reserved, not used": 24.0,
    }


def test_in_the_optimizers_phase_gradients_stand_in_place_of_activations():
    shown = {"A1": profile_of(peak_phase="optimizer", optimizer_mib=700.0)}
    title, gib = drawn_memory(shown)
    assert title == "Optimizer state fill 70.0 % of the peak in A1"
    assert gib.loc["A1", "activations"] == 0.0
    assert gib.loc["A1", "gradients and workspace"] == 150.0 / 1024


def test_memory_is_not_drawn_where_no_profile_has_any():
    refused("which a CPU has not", profile_figures.phases, {"A1": profile_of() | {"memory": None}})


def test_allocations_are_drawn_in_their_order_and_not_by_the_hosts_clock():
    late = [(0.0, 1.0), (50.0, 3.0), (57.0, 2.0)]
    figure = profile_figures.allocations({"A1": profile_of(timeline=late)})
    (axis,) = figure.axes
    assert style.title_of(figure) == "A step's allocated memory reaches 3.00 MiB in A1"
    assert axis.lines[0].get_xydata().tolist() == [[0, 1], [50, 3], [100, 2]]
    assert "in their order" in axis.get_xlabel()


def runs_with_profiles(*rows):
    """Runs of (variant, micro-batch, profile) of one group."""
    table = pd.DataFrame(
        [(variant, size, SimpleNamespace(profile=lambda p=p: p)) for variant, size, p in rows],
        columns=["spec.variant", "micro_batch", "run"],
    )
    return table.assign(**{"memory.peak_alloc_mib": 1000.0, "task.name": "qa"})


@pytest.fixture
def steps_drawn(monkeypatch):
    """What is drawn as steps or as memory: {name: profile}."""
    monkeypatch.setattr(profile_figures, "step", lambda shown: shown)
    monkeypatch.setattr(profile_figures, "phases", lambda shown: shown)


def test_profiles_are_in_table_order_and_named_by_their_micro_batches():
    rows = [("A3", 8, profile_of()), ("A1", 32, profile_of()), ("A2", 8, None)]
    table = profile_figures.profiles(runs_with_profiles(*rows))
    assert table["name"].tolist() == ["A1, micro-batch 32", "A3, micro-batch 8"]
    assert table["peak_mib"].tolist() == [1000.0, 1000.0]


def test_a_profile_of_a_cpu_has_no_peak_of_memory():
    rows = [("A1", 8, profile_of()), ("A2", 8, profile_of() | {"memory": None})]
    table = profile_figures.profiles(runs_with_profiles(*rows)).set_index("variant")
    assert table["peak_mib"].notna().to_dict() == {"A1": True, "A2": False}


def test_two_steps_are_drawn_at_the_largest_micro_batch_of_both(steps_drawn):
    rows = [
        ("A1", 8, profile_of(1.0)),
        (RECOMMENDED, 8, profile_of(2.0)),
        ("A1", 16, profile_of(10.0)),
        ("A2", 16, profile_of(6.0)),
        ("A3", 16, profile_of(5.0)),
        ("A1", 32, profile_of(20.0)),
    ]
    shown = profile_figures.fig_step(runs_with_profiles(*rows))
    assert {name: profile["time"]["step_ms"] for name, profile in shown.items()} == {
        "A1": 10.0,
        "A3": 5.0,
    }
    assert [*profile_figures.fig_step(runs_with_profiles(*rows[:2]))] == ["A1", RECOMMENDED]


def test_allocated_memory_is_drawn_as_a_line_for_each_profile_that_has_some():
    shown = {"A1": profile_of(), "A2": profile_of(), "A3": profile_of() | {"memory": None}}
    for name, mib in (("A1", 10.0), ("A2", 20.0)):
        shown[name]["memory"] |= {"timeline": [(0.0, mib), (1.5, 2 * mib)]}
    (axis,) = profile_figures.allocations(shown).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert drawn == {"A1": [[0.0, 10.0], [100.0, 20.0]], "A2": [[0.0, 20.0], [100.0, 40.0]]}


def test_the_memory_of_two_steps_is_drawn_from_records_in_the_colours_of_their_kinds():
    rows = [(name, 8, profile_of()) for name in ("A1", "A2", RECOMMENDED)]
    for _, _, profile in rows:
        profile["memory"] |= {"timeline": [(0.0, 1.0), (56.0, 2.0)]}
    (axis,) = profile_figures.fig_allocations(runs_with_profiles(*rows)).axes
    drawn = {line.get_label(): line.get_color() for line in axis.lines}
    assert drawn == {"A1": style.GREEN, RECOMMENDED: style.BLUE}


def test_a_profile_may_differ_from_its_run_by_the_batches_that_it_drew(steps_drawn):
    rows = [
        (name, 8, profile_of(peak_mib=peak_mib))
        for name, peak_mib in (("A1", 1049.0), ("A2", 1060.0), ("A3", 951.0), ("A4", 940.0))
    ]
    assert [*profile_figures.fig_phases(runs_with_profiles(*rows))] == ["A1", "A3"]


# The frame of a figure.


def test_the_caption_of_a_group_ends_with_the_group_and_its_gpus():
    columns = {"group": "g", "spec.hardware": "h200", "env.gpu": ["NVIDIA H200", None]}
    figure = style.group_figure(pd.DataFrame(columns), "Title", "A note", 2.0)
    assert figure.get_supxlabel() == "A note. Group g. NVIDIA H200."
    assert style.title_of(figure) == "Title"


def test_a_figure_of_a_cpu_says_so_in_title_and_caption():
    columns = {"group": ["g"], "spec.hardware": "cpu", "env.gpu": None}
    figure = style.group_figure(pd.DataFrame(columns), "Title", "", 2.0)
    assert figure.get_supxlabel() == f"Group g. {style.CPU_CAVEAT}."
    assert style.title_of(figure) == "On a CPU: Title"


def test_variants_are_told_apart_by_their_engine_and_the_baseline():
    names = pd.Series(["A1", "A3", "A0", "E-plain"])
    assert style.kinds(names, "A1").tolist() == [
        "baseline",
        "this library",
        "the Trainer",
        "plain PyTorch",
    ]


def test_a_variant_that_the_table_has_no_longer_was_of_this_library():
    assert style.kinds(pd.Series(["E-forgotten"]), "A1").tolist() == ["this library"]


def test_a_curve_has_the_colour_of_its_kind_and_a_marker_of_its_own():
    looks = style.looks(["A1", "A2", "A3", "A0", "E-plain"], "A1", told=["A3"])
    colors = [look["color"] for look in looks.values()]
    kinds = ["baseline", "this library", "this library", "the Trainer", "plain PyTorch"]
    assert colors == [style.KINDS[kind] for kind in kinds]
    assert looks["A2"]["marker"] != looks["A3"]["marker"]
    assert looks["A3"]["linewidth"] > looks["A2"]["linewidth"]


def test_a_dense_line_has_the_colour_of_its_kind_and_a_stroke_of_its_own():
    looks = style.strokes(["A1", "A2", "A3"], "A1")
    assert looks["A1"]["color"] == style.KINDS["baseline"]
    assert looks["A2"]["color"] == looks["A3"]["color"]
    assert looks["A2"]["linestyle"] != looks["A3"]["linestyle"]


def test_a_legend_names_the_kinds_that_are_drawn():
    axis = style.new_figure("Title", "", 3.0).subplots()
    style.legend_of_kinds(axis, ["A1", "A0", "A0-sdpa"], "A1")
    names = [text.get_text() for text in axis.get_legend().get_texts()]
    assert names == ["baseline", "the Trainer"]


def test_a_line_is_not_broken_before_a_percent_sign_nor_within_a_word():
    assert style.wrap("about 90 % of it", 9) == "about\n90\u00a0% of\nit"
    assert style.wrap("take micro-batches", 13) == "take\nmicro-batches"


def test_a_notebook_is_shown_text_as_markdown_and_a_frame_as_a_table():
    assert style.show(lambda: "**text**").data == "**text**"
    assert style.show(lambda: pd.DataFrame({"n": ["1"]})).data == "| n |\n| ---: |\n| 1 |"


def test_bars_are_named_from_the_top_down():
    axis = style.new_figure("Title", "", 3.0).subplots()
    table = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0]}, index=["a", "b"])
    style.stack(axis, table, {"x": "red", "y": "blue"})
    bottom, top = axis.get_ylim()
    assert bottom > top
    assert [label.get_text() for label in axis.get_yticklabels()] == ["a", "b"]
    assert axis.get_xlim() == (0, pytest.approx(1.02 * 6))
