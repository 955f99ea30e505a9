"""Files of a run: replaced in one step, and never through a link or at a pipe."""

import os
import resource
from pathlib import Path

import pytest

from qa_lib.records import files, record
from qa_lib.records.files import (
    check_folder,
    empty_folder,
    open_to_write,
    regular,
    write_atomically,
)
from tests.material import refused


def contents(folder: Path) -> dict[str, bytes]:
    """The content of each file in a folder, by its name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_files():
    """Let no file grow beyond 4 KiB: the kernel refuses the write as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_file_and_says_so(tmp_path, small_files):
    write_atomically(tmp_path / "file", "old")
    refused(
        "cannot write.*what was there before is intact",
        write_atomically,
        tmp_path / "file",
        "x" * 100_000,
    )
    assert contents(tmp_path) == {"file": b"old"}


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    write_atomically(tmp_path / "file", "old")
    (tmp_path / "file").chmod(0o600)
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [link_to_a_device, os.mkfifo, Path.mkdir])
def test_only_regular_files_are_ever_replaced(make, tmp_path, monkeypatch):
    # For where they are not refused: /dev/null is the whole machine's.
    monkeypatch.delattr(os, "replace")
    make(tmp_path / "there")
    before = (tmp_path / "there").lstat().st_mode
    refused("not a regular file", write_atomically, tmp_path / "there", "text")
    assert [path.lstat().st_mode for path in tmp_path.iterdir()] == [before]


def test_a_device_is_not_replaced(monkeypatch):
    monkeypatch.delattr(os, "replace")
    refused("not a regular file", write_atomically, Path("/dev/null"), "text")


@pytest.mark.parametrize("name", ["link", "dangling"])
@pytest.mark.parametrize("write", [write_atomically, open_to_write])
def test_what_a_link_leads_to_is_not_written_over(write, name, tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("none")
    refused(f"{name}: .*a link; .*remove the link", write, tmp_path / name, "w")
    assert (tmp_path / "file").read_text() == "old"
    assert not (tmp_path / "none").exists()


def test_nothing_is_opened_that_a_writer_could_wait_at_for_ever(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused("pipe: not a regular file", open_to_write, tmp_path / "pipe", "a")


def link_to_a_file(path: Path) -> None:
    target = path.parent.parent / "file"
    target.write_text("mine")
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["steps.jsonl", "answers", "answers/texts.json", "model/a.json"])
@pytest.mark.parametrize("make", [link_to_a_file, os.mkfifo])
def test_a_run_takes_no_folder_with_links_or_pipes_in_it(make, name, tmp_path):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    make(path)
    refused(f"{name}: not a regular file", check_folder, tmp_path / "run")


def test_a_run_takes_no_folder_with_a_link_to_a_folder_in_it(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path / "theirs")
    refused("model: not a regular file, but a link", check_folder, tmp_path / "run")


def test_a_run_takes_no_folder_that_is_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    refused("link: a link", check_folder, tmp_path / "link")


def test_emptying_a_folder_removes_files_folders_and_links_but_no_lock(tmp_path):
    run = tmp_path / "run"
    (run / "answers").mkdir(parents=True)
    (run / "answers" / "file").write_text("text")
    (run / "record.json").write_text("{}")
    (run / "model").symlink_to(tmp_path)
    (run / ".lock").touch()
    empty_folder(run)
    assert [path.name for path in run.iterdir()] == [".lock"]


@pytest.fixture
def others_folder(tmp_path):
    """A folder with a file in it, which is somebody else's."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("text")
    return tmp_path / "theirs"


def test_emptying_a_folder_leaves_alone_what_its_links_lead_to(tmp_path, others_folder):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(others_folder)
    empty_folder(tmp_path / "run")
    assert contents(others_folder) == {"file": b"text"}


def test_a_folder_that_is_a_link_is_not_emptied(tmp_path, others_folder):
    (tmp_path / "link").symlink_to("theirs")
    refused("link: a link", empty_folder, tmp_path / "link")
    assert contents(others_folder) == {"file": b"text"}


# Locks.


def make_link(path: Path) -> None:
    path.symlink_to("mine")


def make_dangling_link(path: Path) -> None:
    path.symlink_to("none")


@pytest.mark.parametrize("make", [make_link, make_dangling_link, os.mkfifo, Path.mkdir])
def test_a_lock_is_a_regular_file_of_the_folder(make, tmp_path):
    (tmp_path / "mine").write_text("text")
    make(tmp_path / ".lock")
    refused(r"\.lock: not a regular file", record.lock(tmp_path).__enter__)
    assert (tmp_path / "mine").read_text() == "text"
    assert not (tmp_path / "none").exists()


def test_a_folder_that_is_a_link_is_not_held(tmp_path, others_folder):
    (tmp_path / "run").symlink_to("theirs")
    refused("run: a link", record.lock(tmp_path / "run").__enter__)
    assert contents(others_folder) == {"file": b"text"}


def test_a_folder_is_held_by_one_at_a_time(tmp_path):
    with record.lock(tmp_path):
        said = refused("another process is working on this run", record.lock(tmp_path).__enter__)
        assert said.startswith(f"{tmp_path}: ")
    with record.lock(tmp_path):
        pass


def test_locks_of_other_names_do_not_keep_each_other_out(tmp_path):
    with record.lock(tmp_path), record.lock(tmp_path, ".driver.lock"):
        pass


# Modes, folders and times.


def test_a_new_file_may_be_read_by_all_and_its_folder_is_made(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, "é")
    assert path.read_bytes() == "é".encode()
    assert path.stat().st_mode & 0o777 == 0o644


def test_bytes_are_written_as_they_are(tmp_path):
    write_atomically(tmp_path / "file", b"\xff\n")
    assert contents(tmp_path) == {"file": b"\xff\n"}


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_another(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *words, name=name, real=real: (calls.append(name), real(*words))
        )
    write_atomically(tmp_path / "file", "text")
    assert calls == ["fsync", "replace"]


def test_a_file_that_cannot_take_its_place_leaves_nothing_beside_it(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    refused("cannot write .*file: No space left", write_atomically, tmp_path / "file", "text")
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_file_and_what_is_not_there_may_be_read(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link", "none"):
        assert regular(tmp_path / name) == tmp_path / name
    refused("not a regular file", regular, tmp_path)


def test_what_is_opened_to_write_goes_behind_what_is_there(tmp_path):
    for line in ("one\n", "two\n"):
        with open_to_write(tmp_path / "file", "a") as stream:
            stream.write(line)
    assert (tmp_path / "file").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to("elsewhere"), os.mkfifo], ids=["link", "pipe"]
)
def test_what_is_put_in_the_place_of_a_file_after_the_look_is_not_written_to(
    make, tmp_path, monkeypatch
):
    path = tmp_path / "file"

    def look_and_be_overtaken(path: Path) -> Path:
        monkeypatch.undo()
        make(path)
        return path

    monkeypatch.setattr(files, "writable", look_and_be_overtaken)
    refused("file: not a regular file", open_to_write, path, "a")
    assert not (tmp_path / "elsewhere").exists()


def test_another_fault_of_opening_is_pythons_own(tmp_path):
    with pytest.raises(FileNotFoundError):
        open_to_write(tmp_path / "none" / "file", "a")


def test_emptying_a_folder_keeps_the_locks_of_the_run_and_of_its_driver(tmp_path):
    for name in (".lock", ".driver.lock", "lock", ".lock.json"):
        (tmp_path / name).touch()
    empty_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".driver.lock", ".lock"]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_json(number):
    with pytest.raises(ValueError, match="JSON"):
        files.as_json({"a": number})


def test_json_is_laid_out_as_asked_for():
    assert files.as_json({"b": [1], "a": "é"}, separators=(",", ":")) == '{"b":[1],"a":"\\u00e9"}'
    assert files.as_json({"a": 1}, indent=1) == '{\n "a": 1\n}'


def test_a_folder_that_is_held_is_made(tmp_path):
    with record.lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / ".lock").is_file()


def test_a_folder_that_cannot_be_made_is_not_held(tmp_path):
    (tmp_path / "file").touch()
    refused("cannot write into .*file/run: ", record.lock(tmp_path / "file" / "run").__enter__)
