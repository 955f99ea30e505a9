"""The dashboard: which group it opens on, and what is left of it where records are spoilt."""

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pandas as pd
import pytest

from qa_lib.lab.app.choices import Choices
from qa_lib.lab.app.dashboard import _progress_html, dashboard, groups_of, running
from qa_lib.lab.app.markup import picture_html, table_html, without_paths
from qa_lib.lab.search.plan import plan
from qa_lib.spec.machine import Machine
from tests.app.server import folder_of
from tests.material import change_record, edited, leave


def spec_on(hardware: str):
    """Return the spec of A1 on such a machine; its group is `HARDWARE-smoke`."""
    (spec,) = plan(["A1"], "smoke", machine=Machine(hardware))
    return spec


def started_on(day: int) -> dict:
    """Return the section `time` of a run that began on a day of January 2026."""
    return {"started": f"2026-01-0{day}T00:00:00+00:00"}


def leave_archived(runs, spec, **sections) -> None:
    """Leave an archive of one run, as the committed groups are."""
    folder = leave(runs, spec, **sections)
    record = json.loads((folder / "record.json").read_text())
    (runs / f"{spec.group}.jsonl").write_text(json.dumps(record) + "\n")
    shutil.rmtree(folder.parent)


# Which group


def test_without_records_it_says_how_to_make_some(tmp_path):
    report = dashboard(tmp_path / "none", tmp_path).report
    assert report.startswith("<p>There are no records yet")


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [("", "h200-smoke"), ("cpu-smoke", "cpu-smoke"), ("../..", "h200-smoke")],
    ids=["none is wanted", "one is", "it does not exist"],
)
def test_it_opens_on_the_wanted_group_or_else_on_the_newest(tmp_path, wanted, shown):
    leave(tmp_path, spec_on("cpu"), time=started_on(1))
    leave(tmp_path, spec_on("h200"), time=started_on(2))
    found = dashboard(tmp_path, tmp_path, wanted)
    assert found.groups == ["h200-smoke", "cpu-smoke"]
    assert found.group == shown


@pytest.fixture
def archives(tmp_path):
    """A runs folder with two archived groups, that of h200 newer than that of h100."""
    leave_archived(tmp_path, spec_on("h100"), time=started_on(8))
    leave_archived(tmp_path, spec_on("h200"), time=started_on(9))
    return tmp_path


def test_it_opens_on_the_newest_archive_where_nothing_was_run(archives):
    found = dashboard(archives, archives)
    assert found.groups == ["h200-smoke", "h100-smoke"]
    assert found.group == "h200-smoke"


@pytest.mark.parametrize(("wanted", "shown"), [("", "cpu-smoke"), ("h100-smoke", "h100-smoke")])
def test_the_users_own_groups_come_before_all_that_are_archived(archives, wanted, shown):
    leave(archives, spec_on("cpu"), time=started_on(2))
    leave(archives, spec_on("t4"), time=started_on(1))
    found = dashboard(archives, archives, wanted)
    assert found.groups == ["cpu-smoke", "t4-smoke", "h200-smoke", "h100-smoke"]
    assert found.group == shown


def test_it_opens_on_ones_own_group_where_its_records_cannot_be_read(archives):
    folder = leave(archives, spec_on("cpu"))
    (folder / "record.json").write_text("{")
    found = dashboard(archives, archives)
    assert found.group == "cpu-smoke"
    assert "not readable as JSON" in found.report


# Spoilt records


def test_a_corrupt_record_costs_a_sentence(runs, tmp_path):
    report = dashboard(runs, tmp_path, "cpu-smoke").report
    assert "A3-s0-abcdef" in report
    assert "not readable as JSON" in report
    assert str(runs) not in report
    assert "<td>A1</td>" in report
    assert "<td>A2</td>" in report


def test_a_table_names_no_folder_of_this_machine(tmp_path):
    leave(tmp_path, spec_on("cpu"), "error", {"message": "/home/me/lab/data.json: no such file"})
    report = dashboard(tmp_path, tmp_path).report
    assert "data.json: no such file" in report
    assert "/home/me" not in report


def test_a_group_without_figures_says_how_to_draw_them(runs, tmp_path):
    assert "No figures yet" in dashboard(runs, tmp_path, "cpu-smoke").report


@pytest.fixture(
    params=[
        pytest.param({"error": {"message": "\ud800"}}, id="half a character"),
        pytest.param({"model": {"name": "\udcff"}}, id="half a character in a name"),
        pytest.param({"task": {"name": "poetry"}}, id="an unknown task"),
        pytest.param({"task": {"metric": "rhyme"}}, id="a task's metric"),
        pytest.param({"env": {"gpu": ["\ud800"]}}, id="a gpu that is none"),
        pytest.param({"time": {"started": "\ud800"}}, id="an odd time"),
    ]
)
def one_spoilt(request, tmp_path):
    """A runs folder with two groups. The record of h100-smoke holds what spoils what is made of it,
    whether reading refuses it or not."""
    change_record(leave(tmp_path, spec_on("h100")), **request.param)
    leave(tmp_path, spec_on("cpu"))
    return tmp_path


def test_a_spoilt_record_leaves_the_other_groups_their_tables(one_spoilt):
    found = dashboard(one_spoilt, one_spoilt, "cpu-smoke")
    assert sorted(found.groups) == ["cpu-smoke", "h100-smoke"]
    assert found.group == "cpu-smoke"
    assert "<td>A1</td>" in found.report
    assert "annot be" not in found.report


def test_the_group_of_a_spoilt_record_is_shown_with_a_sentence(one_spoilt):
    found = dashboard(one_spoilt, one_spoilt, "h100-smoke")
    assert found.group == "h100-smoke"
    assert found.report.startswith("<p>")
    json.dumps([found, running(one_spoilt)], ensure_ascii=False).encode()


@pytest.fixture
def no_text(runs, tmp_path):
    """A runs folder in which a group's name is no text: a file system takes any bytes."""
    run = folder_of(runs).parent
    for name in (b"A1-s0-\xff", b"A1-s0-b50f84"):
        folder = os.path.join(os.fsencode(tmp_path), b"cpu-\xff", name)
        shutil.copytree(os.fsencode(run), folder)
    shutil.copytree(run, tmp_path / "cpu-smoke" / run.name)
    return tmp_path


def test_a_folder_whose_name_is_no_text_leaves_the_other_groups_their_tables(no_text):
    found = dashboard(no_text, no_text)
    assert found.group == "cpu-smoke"
    assert len(found.groups) == 2
    assert "<td>A1</td>" in found.report


def test_a_group_whose_name_is_no_text_can_be_sent(no_text):
    other = dashboard(no_text, no_text).groups[1]
    json.dumps(dashboard(no_text, no_text, other), ensure_ascii=False).encode()


def test_a_model_whose_folder_is_no_text_is_not_offered(no_text):
    (choice,) = Choices([], no_text).listed()
    assert choice.key.startswith("cpu-smoke/A1-s0-")


# Runs that are at work


def test_a_running_run_says_how_far_it_is(runs):
    paragraph = running(runs)
    assert "is running" in paragraph
    assert "step 7 of 400" in paragraph


def test_a_run_whose_host_has_a_later_clock_was_last_written_just_now(tmp_path):
    path = leave(tmp_path, spec_on("cpu")) / "record.json"
    edited(path, status="running")
    os.utime(path, (time.time() + 3600,) * 2)
    assert "is running" in running(tmp_path)
    assert running(tmp_path).endswith(", last written 00:00 ago</p>")


def test_an_archive_that_cannot_be_read_is_none_of_ones_own_groups_and_comes_last(archives):
    (archives / "h200-smoke.jsonl").write_text("{")
    leave(archives, spec_on("cpu"), time=started_on(2))
    groups = dashboard(archives, archives).groups
    assert groups == ["cpu-smoke", "h100-smoke", "h200-smoke"]


def test_runs_may_come_and_go_while_they_are_looked_at(runs, tmp_path):
    record = (folder_of(runs).parent / "record.json").read_text()
    folder = tmp_path / "group" / "A1-s0-aaaaaa"

    def look():
        for _ in range(50):
            running(tmp_path)
            dashboard(tmp_path, tmp_path)

    with ThreadPoolExecutor() as pool:
        looking = pool.submit(look)
        while not looking.done():
            folder.mkdir(parents=True)
            unfinished = record.replace('"status": "ok"', '"status": "running"')
            (folder / "record.json").write_text(unfinished)
            shutil.rmtree(folder.parent)
    looking.result()


@pytest.mark.parametrize(
    ("step", "planned", "shown"),
    [
        (7, 400, '<progress value="7" max="400"></progress>step 7 of 400'),
        (7, None, ""),
        (0, 0, ""),
    ],
)
def test_a_bar_is_shown_where_the_steps_are_known(step, planned, shown):
    assert _progress_html(step, planned) == shown


def test_groups_of_a_search_are_not_offered():
    def run(group, started, search=""):
        record = {"group": group, "time": {"started": started}, "spec": {"search": search}}
        return SimpleNamespace(record=record)

    runs = [run("old", "1"), run("new", None), run("new", "3"), run("tries", "9", "tune")]
    assert groups_of(runs, own=set(), broken=["broken"]) == ["new", "old", "broken"]
    assert groups_of(runs, own={"old"}, broken=[]) == ["old", "new"]


# What the page shows


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no /srv/runs/a.json and no /opt/b/", "no …/a.json and no …/"),
        ("see https://docs.example/a/b and <b>/</b>", "see https://docs.example/a/b and <b>/</b>"),
        ("3/4 of and/or", "3/4 of and/or"),
    ],
)
def test_no_folder_of_this_machine_is_shown(text, shown):
    assert without_paths(text) == shown


def test_a_table_has_all_of_a_long_text_as_text_and_no_numbers_of_rows():
    long = "word " * 40 + "<b>"
    page = table_html(pd.DataFrame({"a": [long]}, index=[77]), "small")
    assert page.startswith('<div class="wide small"><table')
    assert "word " * 40 + "&lt;b&gt;" in page
    assert "77" not in page


def test_a_pictures_title_is_text_and_its_content_is_in_the_page():
    page = picture_html('2" <i>', b"png")
    assert page == '<img alt="2&quot; &lt;i&gt;" src="data:image/png;base64,cG5n">'
