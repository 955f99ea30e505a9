import functools
import json
import operator
import os
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from qa_lib.lab.launch.warm import SERVER
from qa_lib.records import record
from qa_lib.records.archive import read_runs
from qa_lib.records.code import code_version
from qa_lib.records.files import check_folder, empty_folder, open_to_write, write_atomically
from tests.material import ROOT, cases, leave, python, refused
from tests.tiny import planned

ENV = {"python": "3", "gpu": None}


@pytest.fixture
def spec():
    return planned()


def test_an_older_record_has_null_for_a_score_that_came_later(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["task"]["scores"].remove("loss")
    del (
        entry["quality"]["loss"],
        entry["speed"]["mfu"],
        entry["speed"]["gpu_busy_polled"],
        entry["parallel"]["wrapper"],
    )
    record.write_record(tmp_path, entry)
    again = record.read_record(tmp_path)
    assert (again["quality"]["loss"], again["speed"]["mfu"], again["parallel"]["wrapper"]) == (
        None,
        None,
        None,
    )
    record.write_record(tmp_path, entry | {"quality": {"loss": "low"}})
    refused(r"quality\.loss is 'low'", record.read_record, tmp_path)


def test_an_older_record_has_the_default_of_what_could_be_chosen_later(spec, tmp_path):
    entry = record.read_record(leave(tmp_path, spec))
    del entry["spec"]["settings"]["norms"], entry["spec"]["preset"]["warmup"]
    record.write_record(tmp_path / spec.run_path, entry)
    (found,) = (run.record["spec"] for run in read_runs(tmp_path))
    assert (found["settings"]["norms"], found["preset"]["warmup"]) == ("native", 0.1)


NO_RECORDS = [
    ("{}", "schema None is not"),
    ("[]", "schema None is not"),
    ('{"schema": "qa_li', "not readable as JSON"),
]


@pytest.mark.parametrize(
    ("content", "message"), [*NO_RECORDS, ('{"schema": "other/9"}', "schema 'other/9' is not")]
)
def test_a_record_that_cannot_be_trusted_is_refused_by_name(content, message, tmp_path, capsys):
    folder = tmp_path / "cpu-smoke" / "A1-s0-abcdef"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(content)
    refused(f"A1-s0-abcdef/record.json.*{message}", record.read_record, folder)
    assert not read_runs(tmp_path) and re.search(f"left out: .*{message}", capsys.readouterr().err)


def test_a_full_disk_keeps_the_old_record_and_says_so(spec, tmp_path):
    """By a limit of 4 KiB for every file: the kernel refuses the write as a full disk does."""
    entry, (own, most) = record.new_record(spec, ENV), resource.getrlimit(resource.RLIMIT_FSIZE)
    record.write_record(tmp_path, entry)
    before = (tmp_path / "record.json").read_bytes()
    entry["error"]["message"] = "x" * 100_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        refused(
            "cannot write.*what was there before is intact", record.write_record, tmp_path, entry
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (own, most))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"record.json": before}


def rewrite(folder: Path) -> None:
    """Replace the record in a folder without pause for two seconds."""
    entry, end = record.read_record(folder), time.monotonic() + 2
    while time.monotonic() < end:
        for length in (10, 100_000):
            entry["error"]["message"] = "x" * length
            record.write_record(folder, entry)


def test_a_reader_never_sees_a_torn_record(spec, tmp_path):
    """A writer in another process replaces the record while this one reads."""
    record.write_record(tmp_path, record.new_record(spec, ENV))
    writer, lengths = SERVER.Process(target=rewrite, args=(tmp_path,)), set()
    writer.start()
    while writer.is_alive():
        lengths.add(len(record.read_record(tmp_path)["error"]["message"] or ""))
    assert writer.exitcode == 0 and {10, 100_000} <= lengths <= {0, 10, 100_000}


def test_records_name_the_code_they_come_from():
    inside = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    assert code_version()["commit"] == (inside.stdout.strip() if inside.returncode == 0 else None)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A commit of a few of this repository's files, of which `record` takes itself to be one."""
    monkeypatch.delenv("QA_LIB_COMMIT", raising=False)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    (tmp_path / "qa_lib" / "records").mkdir(parents=True)
    for name in ("CITATION.cff", "README.md", "requirements.txt", "qa_lib/records/record.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "qa_lib" / "records" / "record.py"))
    return tmp_path


def links(folder: Path, remote: str, *words, code: int = 0) -> subprocess.CompletedProcess:
    """What `make links` does in a checkout of that remote; no remote where it is empty."""
    subprocess.run(["git", "remote", "remove", "origin"], cwd=folder, capture_output=True)
    if remote:
        subprocess.run(["git", "remote", "add", "origin", remote], cwd=folder, check=True)
    return python("notebooks/links.py", *words, cwd=folder, code=code)


def test_links_lead_to_the_remote_and_make_no_checkout_dirty(checkout):
    for remote in (
        "https://github.com/some-one/a.lab.git",
        "git@github.com:another/lab",
        "https://github.com/b/lab/",
    ):
        name = re.search(r"[\w-]+/[\w.]+?(?=(\.git)?/?$)", remote)[0]
        assert name in links(checkout, remote).stdout
        assert (
            f"repository-code: https://github.com/{name}\n"
            in (checkout / "CITATION.cff").read_text()
        )
        for path in checkout.glob("notebooks/*.ipynb"):
            assert set(re.findall(r"github(?:\.com)?/([\w-]+/[\w.-]*\w)", path.read_text())) == {
                name
            }, path
        assert code_version()["dirty"] is False


def test_links_without_a_remote_on_github_say_what_to_type(checkout):
    for remote in ("", "https://example.org/a/b"):
        said = links(checkout, remote, code=1).stderr
        assert "git remote add origin" in said and "Traceback" not in said


def test_a_placeholder_beside_a_remote_on_github_fails_the_check(checkout):
    for remote in ("", "https://example.org/a/b"):
        assert links(checkout, remote, "--check").stderr == ""
    said = links(checkout, "git@github.com:some-one/lab.git", "--check", code=1).stderr
    assert re.fullmatch(r"links: \d+ files, .* link to \S+ and not to some-one/lab: type.*\n", said)
    links(checkout, "git@github.com:some-one/lab.git")
    assert links(checkout, "git@github.com:some-one/lab.git", "--check").stderr == ""


def test_links_mend_a_placeholder_that_came_after_the_first_time(checkout):
    """With a merge, say, of a notebook that was written elsewhere."""
    links(checkout, "https://github.com/some-one/lab")
    shutil.copy(ROOT / "notebooks" / "systems.ipynb", checkout / "notebooks")
    links(checkout, "https://github.com/some-one/lab", "--check", code=1)
    links(checkout, "https://github.com/some-one/lab")
    assert links(checkout, "https://github.com/some-one/lab", "--check").stderr == ""


CODE = "qa_lib/records/record.py notebooks/systems.ipynb notebooks/links.py qa_lib/new.py"


@pytest.mark.parametrize("name", CODE.split())
def test_a_change_or_a_new_file_of_the_code_makes_a_checkout_dirty(checkout, name):
    links(checkout, "https://github.com/some-one/lab")
    with open(checkout / name, "a") as stream:
        stream.write("x = 1\n")
    assert code_version()["dirty"] is True


def test_a_commit_that_is_named_is_a_whole_hash(monkeypatch):
    monkeypatch.setenv("QA_LIB_COMMIT", "6a62aa811ff8dd3949b38cfc2455a4701afa452b")
    assert code_version() == {
        "commit": "6a62aa811ff8dd3949b38cfc2455a4701afa452b",
        "dirty": None,
    }
    for name in ("6a62aa8", "main", "$(rm -rf)"):
        monkeypatch.setenv("QA_LIB_COMMIT", name)
        refused(r"QA_LIB_COMMIT=.*whole hash", code_version)


OTHERS = {
    "device": lambda path: path.symlink_to("/dev/null"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_only_regular_files_are_ever_replaced(make, tmp_path, monkeypatch):
    monkeypatch.delattr(
        os, "replace"
    )  # for where they are not refused: /dev/null is the whole machine's
    make(tmp_path / "there")
    before = (tmp_path / "there").lstat().st_mode
    refused("not a regular file", write_atomically, tmp_path / "there", "text")
    assert [path.lstat().st_mode for path in tmp_path.iterdir()] == [before]
    refused("not a regular file", write_atomically, Path("/dev/null"), "text")


def test_what_a_link_leads_to_is_not_written_over(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("none")
    for name in ("link", "nowhere"):
        refused(f"{name}: .*a link; .*remove the link", write_atomically, tmp_path / name, "")
        refused(f"{name}: .*a link", open_to_write, tmp_path / name, "w")
    assert (tmp_path / "file").read_text() == "old" and not (tmp_path / "none").exists()


def test_nothing_is_opened_that_a_writer_could_wait_at_for_ever(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused("pipe: not a regular file", open_to_write, tmp_path / "pipe", "a")


@pytest.mark.parametrize("name", ["steps.jsonl", "answers", "answers/texts.json", "model/a.json"])
@pytest.mark.parametrize("make", ["link", "pipe"])
def test_a_run_takes_no_folder_with_links_or_pipes_in_it(spec, name, make, tmp_path):
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    os.mkfifo(place) if make == "pipe" else place.symlink_to(tmp_path / "file")
    refused(f"{name}: not a regular file", check_folder, tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    refused("link: a link", check_folder, tmp_path / "link")


def test_emptying_a_folder_removes_links_and_not_what_they_lead_to(tmp_path):
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    for folder in (run / "answers", theirs):
        folder.mkdir(parents=True)
        (folder / "file").write_text("text")
    (run / "model").symlink_to(theirs)
    (run / ".lock").touch()
    empty_folder(run)
    assert [path.name for path in run.iterdir()] == [".lock"] and (theirs / "file").exists()
    (tmp_path / "link").symlink_to("theirs")
    refused("link: a link", empty_folder, tmp_path / "link")
    assert (theirs / "file").exists()


@pytest.mark.parametrize("make", ["link", "dangling link", "pipe", "folder"])
def test_a_lock_is_a_regular_file_of_the_folder(make, tmp_path):
    (tmp_path / "mine").write_text("text")
    lock = tmp_path / ".lock"
    {
        "link": lambda: lock.symlink_to("mine"),
        "dangling link": lambda: lock.symlink_to("none"),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[make]()
    refused(r"\.lock: not a regular file", record.lock(tmp_path).__enter__)
    assert (tmp_path / "mine").read_text() == "text" and not (tmp_path / "none").exists()


def test_a_folder_that_is_a_link_is_not_held(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").symlink_to("theirs")
    refused("run: a link", record.lock(tmp_path / "run").__enter__)
    assert not list((tmp_path / "theirs").iterdir())


def test_what_no_text_file_can_hold_is_written_as_question_marks(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["error"]["message"] = "odd \udcff\ud800 é 😀"
    record.write_record(tmp_path, entry)
    assert record.read_record(tmp_path)["error"]["message"] == "odd ?? é 😀"


# The way to a value of a record, and what no record may have there.
ODD = [("error.message", "\ud800"), ("task.name", "translation"), ("task.metric", None)]
ODD += [("task.label", 5), ("status", "fine"), ("env.gpu", 5), ("spec.settings.precision", 16)]
ODD += [
    ("spec.settings.cuda_graph", "yes"),
    ("spec.settings.engine", None),
    ("quality.f1", 10**400),
]
NO_NAMES = [
    "../x",
    "/etc",
    "..",
    ".",
    "",
    ".git",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "x" * 300,
    "\x1b[2J",
    "-rf",
    "é",
]
ODD += [(name, value) for name in ("run_id", "group") for value in NO_NAMES]


@pytest.mark.parametrize(("way", "value"), ODD)
def test_a_value_that_a_reader_could_stumble_at_is_one_line(spec, tmp_path, way, value):
    entry, (*above, last) = record.new_record(spec, ENV), way.split(".")
    functools.reduce(operator.getitem, above, entry)[last] = value
    (tmp_path / "record.json").write_text(json.dumps(entry))
    said = refused("record.json: ", record.read_record, tmp_path)
    assert last in said or "half a character" in said or "integer string" in said


@pytest.mark.parametrize(("way", "value"), cases("no numbers"))
def test_a_number_is_no_truth_value_and_a_size_is_above_0(spec, tmp_path, way, value):
    entry, (*above, last) = record.new_record(spec, ENV), way.split(".")
    functools.reduce(operator.getitem, above, entry)[last] = value
    record.write_record(tmp_path, entry)
    refused(last, record.read_record, tmp_path)


OTHER_PLACES = [("spec.hardware", "h200"), ("spec.preset.name", "bench"), ("task.metric", "bleu")]
OTHER_PLACES += [("task.name", "lm"), ("spec.preset.task", "lm"), ("task.label", "x" * 500)]


@pytest.mark.parametrize(("way", "value"), OTHER_PLACES)
def test_a_record_of_another_group_costs_itself_and_not_its_group(spec, tmp_path, way, value):
    folder = leave(tmp_path, spec)
    entry, (*above, last) = record.read_record(folder), way.split(".")
    functools.reduce(operator.getitem, above, entry)[last] = value
    record.write_record(folder, entry)
    said = []
    assert read_runs(tmp_path, left_out=lambda group, problem: said.append(str(problem))) == []
    assert len(said) == 1 and f"{folder.name}/record.json: " in said[0] and len(said[0]) < 400
