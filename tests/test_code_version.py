"""The code that a record comes from, and links to the repository, which make no checkout dirty."""

import re
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from qa_lib.loaded import CODE
from qa_lib.records import code
from qa_lib.records.code import code_version
from tests.material import ROOT, python, refused

GITHUB = "https://github.com/some-one/lab"


def test_records_name_the_commit_that_they_come_from(monkeypatch):
    monkeypatch.delenv("QA_LIB_COMMIT", raising=False)
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    is_checkout = done.returncode == 0
    assert code_version()["commit"] == (done.stdout.strip() if is_checkout else None)


def test_a_commit_may_be_named_by_its_whole_hash(monkeypatch):
    commit = "6a62aa811ff8dd3949b38cfc2455a4701afa452b"
    monkeypatch.setenv("QA_LIB_COMMIT", commit)
    assert code_version() == {"commit": commit, "dirty": None, "digest": CODE.digest}


@pytest.mark.parametrize("name", ["6a62aa8", "main", "$(rm -rf)"])
def test_what_is_no_whole_hash_names_no_commit(monkeypatch, name):
    monkeypatch.setenv("QA_LIB_COMMIT", name)
    refused(r"QA_LIB_COMMIT=.*whole hash", code_version)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A commit of a few of this repository's files, which `code_version` takes for its own."""
    monkeypatch.delenv("QA_LIB_COMMIT", raising=False)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    (tmp_path / "qa_lib" / "records").mkdir(parents=True)
    for name in ("CITATION.cff", "README.md", "requirements.txt", "qa_lib/records/code.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(code, "__file__", str(tmp_path / "qa_lib" / "records" / "code.py"))
    return tmp_path


CODE_FILES = [
    "qa_lib/records/code.py",
    "qa_lib/new.py",
    "notebooks/systems.ipynb",
    "notebooks/links.py",
    "notebooks/new.ipynb",
    "requirements.txt",
]


def test_a_new_checkout_is_not_dirty(checkout):
    assert code_version()["dirty"] is False


@pytest.mark.parametrize("name", CODE_FILES)
def test_a_change_or_a_new_file_of_the_code_makes_a_checkout_dirty(checkout, name):
    with open(checkout / name, "a") as stream:
        stream.write("x = 1\n")
    assert code_version()["dirty"] is True


@pytest.mark.parametrize("name", ["README.md", "runs.jsonl"])
def test_what_is_no_code_makes_no_checkout_dirty(checkout, name):
    with open(checkout / name, "a") as stream:
        stream.write("x = 1\n")
    assert code_version()["dirty"] is False


# Links, by notebooks/links.py, which `make links` runs.


def links(folder: Path, remote: str, *words: str, code: int = 0) -> subprocess.CompletedProcess:
    """What `make links` does in a checkout of that remote; no remote where it is empty."""
    subprocess.run(["git", "remote", "remove", "origin"], cwd=folder, capture_output=True)
    if remote:
        subprocess.run(["git", "remote", "add", "origin", remote], cwd=folder, check=True)
    return python("notebooks/links.py", *words, cwd=folder, code=code)


def linked_repositories(notebook: Path) -> set[str]:
    """The repositories on GitHub, OWNER/NAME, that a notebook links to."""
    return set(re.findall(r"github(?:\.com)?/([\w-]+/[\w.-]*\w)", notebook.read_text()))


REMOTES = [
    ("https://github.com/some-one/a.lab.git", "some-one/a.lab"),
    ("git@github.com:another/lab", "another/lab"),
    ("https://github.com/b/lab/", "b/lab"),
]


@pytest.mark.parametrize(("remote", "name"), REMOTES)
def test_links_lead_to_the_remote_and_make_no_checkout_dirty(checkout, remote, name):
    assert name in links(checkout, remote).stdout
    citation = (checkout / "CITATION.cff").read_text()
    assert f"repository-code: https://github.com/{name}\n" in citation
    for path in checkout.glob("notebooks/*.ipynb"):
        assert linked_repositories(path) == {name}, path
    assert code_version()["dirty"] is False


def test_links_that_were_made_are_made_again_for_another_remote(checkout):
    links(checkout, GITHUB)
    links(checkout, "https://github.com/another/one")
    assert linked_repositories(checkout / "notebooks" / "systems.ipynb") == {"another/one"}


def test_a_change_beside_new_links_makes_a_checkout_dirty(checkout):
    links(checkout, GITHUB)
    with open(checkout / "notebooks" / "systems.ipynb", "a") as stream:
        stream.write("x = 1\n")
    assert code_version()["dirty"] is True


NOT_ON_GITHUB = ["", "https://example.org/a/b"]


@pytest.mark.parametrize("remote", NOT_ON_GITHUB)
def test_links_without_a_remote_on_github_say_what_to_type(checkout, remote):
    message = links(checkout, remote, code=1).stderr
    assert "git remote add origin" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("remote", NOT_ON_GITHUB)
def test_a_placeholder_passes_the_check_where_no_remote_is_on_github(checkout, remote):
    assert links(checkout, remote, "--check").stderr == ""


def test_a_placeholder_beside_a_remote_on_github_fails_the_check(checkout):
    message = links(checkout, GITHUB, "--check", code=1).stderr
    assert re.fullmatch(
        r"links: \d+ files, .* link to \S+ and not to some-one/lab: type.*\n", message
    )


def test_links_that_were_made_pass_the_check(checkout):
    links(checkout, GITHUB)
    assert links(checkout, GITHUB, "--check").stderr == ""


def test_links_mend_a_placeholder_that_came_after_the_first_time(checkout):
    """With a merge, say, of a notebook that was written elsewhere."""
    links(checkout, GITHUB)
    shutil.copy(ROOT / "notebooks" / "systems.ipynb", checkout / "notebooks")
    links(checkout, GITHUB, "--check", code=1)
    links(checkout, GITHUB)
    assert links(checkout, GITHUB, "--check").stderr == ""


@pytest.mark.parametrize("name", ["a1" * 20 + "0", "a1" * 20 + "\n", "A1" * 20, "g1" * 20])
def test_a_hash_has_40_hexadecimal_digits_and_nothing_else(monkeypatch, name):
    monkeypatch.setenv("QA_LIB_COMMIT", name)
    refused("QA_LIB_COMMIT=", code_version)


@pytest.mark.parametrize(
    "fault",
    [
        FileNotFoundError("git"),
        subprocess.CalledProcessError(128, "git"),
        subprocess.TimeoutExpired("git", 20),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_where_git_does_not_tell_neither_commit_nor_changes_are_known(monkeypatch, fault):
    monkeypatch.setenv("QA_LIB_COMMIT", "")
    monkeypatch.setattr(code.subprocess, "run", Mock(side_effect=fault))
    assert code_version() == {"commit": None, "dirty": None, "digest": CODE.digest}
