"""The compilers' files are taken only from a folder that no other user can have written to.

Nor can another user have led there by a link.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from qa_lib import private
from qa_lib.lab.launch.compile_cache import PARTS, use_compile_cache
from qa_lib.private import check_private, check_way, plain_path
from qa_lib.train.compile import use_plain_paths
from tests.material import ROOT, refused

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """Restore the environment and the mask of new files after a test."""
    for name in PARTS:
        monkeypatch.setenv(name, "elsewhere")
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def kept(tmp_path):
    """A cache that has been used, with a file in each of its parts."""
    folder = tmp_path / "above" / "cache"
    use_compile_cache(folder)
    for name in PARTS.values():
        (folder / name / "ab").mkdir()
        (folder / name / "ab" / "kernel.py").write_text("")
    return folder


def test_without_a_cache_compilers_keep_their_files_where_they_did():
    use_compile_cache(None)
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"


def test_compilers_keep_their_files_in_a_folder_that_nobody_else_may_enter(tmp_path):
    folder = tmp_path / "a" / "b"
    use_compile_cache(folder)
    for variable, name in PARTS.items():
        assert os.environ[variable] == str(folder / name)
        assert (folder / name).stat().st_mode & 0o777 == 0o700


def test_compilers_find_a_relative_folder_from_wherever_they_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    use_compile_cache(Path("cache"))
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


def test_a_cache_is_used_again_whatever_the_mask_of_new_files_was(tmp_path):
    os.umask(0o002)
    use_compile_cache(tmp_path / "cache")
    file = tmp_path / "cache" / "inductor" / "ab" / "kernel.py"
    file.parent.mkdir()
    file.write_text("")
    use_compile_cache(tmp_path / "cache")


def for_all(path: Path) -> None:
    """Let everybody write to a path."""
    path.chmod(path.stat().st_mode | 0o002)


def for_a_group(path: Path) -> None:
    """Let a group of others write to a path."""
    os.chown(path, -1, NOBODY)
    path.chmod(path.stat().st_mode | 0o020)


def anothers(path: Path) -> None:
    """Give a path to another user."""
    os.chown(path, NOBODY, -1)


WAYS = [for_all, pytest.param(for_a_group, marks=as_root), pytest.param(anothers, marks=as_root)]
PLACES = [".", "inductor", "triton", "inductor/ab", "triton/ab/kernel.py"]


@pytest.mark.parametrize("open_to_others", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_what_others_could_have_written_is_to_be_removed(kept, place, open_to_others):
    offending = kept / place
    open_to_others(offending)
    said = refused("is not yours alone to write to", use_compile_cache, kept)
    removed = kept
    if place != ".":
        removed = kept / Path(place).parts[0]  # the part of the cache
    assert said.startswith(f"{offending} ")
    assert said.endswith(f"remove it: rm -r {removed}")
    assert "chmod" not in said
    shutil.rmtree(removed)
    use_compile_cache(kept)


def test_a_folder_that_holds_more_than_the_cache_is_not_to_be_removed(kept):
    (kept / "thesis.tex").write_text("")
    for_all(kept)
    said = refused("not yours alone to write to", use_compile_cache, kept)
    assert said.endswith("name another folder")
    assert "rm -r" not in said


@pytest.mark.parametrize("open_to_others", WAYS)
def test_a_parent_that_others_can_change_is_named(kept, open_to_others):
    open_to_others(kept.parent)
    said = refused("is for others to change: name a folder below", use_compile_cache, kept)
    assert said.startswith(f"{kept.parent}, on the way to {kept}, ")


def test_a_parent_that_others_can_change_is_refused_before_anything_is_made_there(tmp_path):
    for_all(tmp_path)
    refused("is for others to change", use_compile_cache, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_parent_where_each_removes_their_own_alone_is_none_that_others_can_change(kept):
    kept.parent.chmod(0o1777)
    use_compile_cache(kept)


@as_root
def test_a_link_of_another_user_on_the_way_is_refused_and_ones_own_is_not(kept, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(kept.parent)
    use_compile_cache(link / "cache")
    os.chown(link, NOBODY, -1, follow_symlinks=False)
    said = refused("is for others to change", use_compile_cache, link / "cache")
    assert said.startswith(f"{link}, on the way to ")


def test_what_a_link_on_the_way_leads_through_is_looked_at(kept, tmp_path):
    (tmp_path / "link").symlink_to("above/cache")
    (tmp_path / "link to a link").symlink_to(tmp_path / "link")
    use_compile_cache(tmp_path / "link to a link")
    for_all(kept.parent)
    refused("above, on the way to", use_compile_cache, tmp_path / "link to a link")


@pytest.mark.parametrize("target", ["../../../outside", "/etc/passwd", "nowhere/../../../gone"])
def test_a_link_that_leads_out_of_the_cache_is_refused_and_one_within_is_not(
    kept, target, tmp_path
):
    (tmp_path / "outside").mkdir()
    (kept / "inductor" / "within").symlink_to("ab")
    use_compile_cache(kept)
    link = kept / "inductor" / "ab" / "link"
    link.symlink_to(target)
    assert refused("remove it", use_compile_cache, kept).startswith(f"{link} ")


def test_a_part_of_the_cache_that_is_a_link_is_refused(kept, tmp_path):
    shutil.move(kept / "triton", tmp_path / "triton")
    (kept / "triton").symlink_to(tmp_path / "triton")
    refused(r"triton is no folder: remove it: rm /", use_compile_cache, kept)


@pytest.mark.parametrize("odd", ["a\nb", "a\tb", "a\x1b[2Jb", "a\x7fb"])
def test_a_name_that_does_not_print_is_one_line(tmp_path, odd):
    said = refused("does not print", use_compile_cache, tmp_path / odd)
    assert said.isprintable()
    assert not list(tmp_path.iterdir())


def test_many_files_are_looked_at_in_a_moment(kept):
    for number in range(20_000):
        os.close(os.open(kept / "triton" / "ab" / str(number), os.O_CREAT | os.O_WRONLY))
    begin = time.process_time()
    use_compile_cache(kept)
    assert time.process_time() - begin < 3


def test_a_path_that_a_command_can_have_is_itself(tmp_path):
    for path in (str(tmp_path), "/a/ü$;&*(x)"):
        assert plain_path(path) == path


@pytest.mark.parametrize("odd", ["a b", "it's", 'a"b', "a\\b", "a\nb"])
def test_another_path_is_led_to_by_a_link_which_stays_the_same(tmp_path, odd):
    folder = tmp_path / odd
    folder.mkdir()
    (folder / "x").touch()
    plain = plain_path(str(folder))
    assert plain == plain_path(str(folder))
    assert Path(plain, "x").exists()
    assert not set(plain) & set(" '\"\\\n")


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """A temporary folder with a blank and a quote in its name, for the time of a test."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setitem(sysconfig.get_config_vars(), "LIBDIR", str(folder))
    return folder


def test_inductor_finds_all_its_files_by_paths_that_a_command_can_have(odd, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(odd / "cache"))
    monkeypatch.setattr(torch, "__file__", str(odd / "torch" / "__init__.py"))
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(odd / "torch" / "lib"))
    use_plain_paths()
    places = {
        tempfile.gettempdir(): odd,
        os.environ["TMPDIR"]: odd,
        os.environ["TORCHINDUCTOR_CACHE_DIR"]: odd / "cache",
        cpp_extension.TORCH_LIB_PATH: odd / "torch" / "lib",
        sysconfig.get_config_var("LIBDIR"): odd,
    }
    for path, place in places.items():
        assert os.path.realpath(path) == str(place)
        assert shlex.split(path) == [path]


def test_paths_that_a_command_can_have_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", "/usr/lib/torch/lib")
    temporary = tempfile.gettempdir()
    use_plain_paths()
    assert tempfile.gettempdir() == temporary
    assert cpp_extension.TORCH_LIB_PATH == "/usr/lib/torch/lib"


@pytest.mark.parametrize("cache", ["cache", "my cache"])
def test_a_compile_cache_stays_where_it_is_whatever_folder_a_process_goes_to(
    cache, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
    use_plain_paths()
    path = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert os.path.isabs(path)
    assert os.path.realpath(path) == str(tmp_path / cache)


@pytest.mark.parametrize("folder", [None, ""])
def test_a_python_that_names_no_folder_of_its_libraries_is_left_alone(folder, monkeypatch):
    monkeypatch.setitem(sysconfig.get_config_vars(), "LIBDIR", folder)
    use_plain_paths()
    assert sysconfig.get_config_var("LIBDIR") == folder


def test_a_temporary_folder_for_which_no_link_can_stand_is_one_line(odd, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    refused("compilers take no path with blanks or quotes.*: set TMPDIR", use_plain_paths)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["A3", "A0-compile", "E-plain"])  # one of each engine
def test_a_compiled_run_works_where_all_its_paths_have_blanks_and_quotes(variant, tmp_path):
    """These are the checkout, the environment, temporary files, the compile cache and the runs."""
    place = tmp_path / 'it\'s "my" lab'
    shutil.copytree(ROOT / "qa_lib", place / "lab" / "qa_lib")
    environment = place / "an environment"
    environment.symlink_to(sys.prefix)
    (place / "temporary files").mkdir()
    words = ["-m", "qa_lib", "run", variant, "--preset", "smoke"]
    words += ["--compile-cache", str(place / "my cache"), "--runs", str(place / "my runs")]
    done = subprocess.run(
        [environment / "bin" / "python", *words],
        cwd=place / "lab",
        env=os.environ | {"TMPDIR": str(place / "temporary files")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{variant}: ok" in done.stdout


# Whose a group is, and a folder of links.


@pytest.fixture
def group(monkeypatch):
    """The group of a folder and this user, for tests to set: at first the user's alone."""
    found = types.SimpleNamespace(name="ada", members=[], attributes=[])
    as_group = types.SimpleNamespace
    monkeypatch.setattr(
        private.grp, "getgrgid", lambda _: as_group(gr_name=found.name, gr_mem=found.members)
    )
    monkeypatch.setattr(private.pwd, "getpwuid", lambda _: as_group(pw_name="ada"))
    monkeypatch.setattr(os, "listxattr", lambda _: found.attributes, raising=False)
    return found


@pytest.fixture
def of_the_group(tmp_path):
    """A folder below one that its group may write to."""
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(0o775)
    return tmp_path / "above" / "folder"


@pytest.mark.parametrize("members", [[], ["ada"]])
def test_the_group_that_is_a_users_alone_is_nobody_else(group, of_the_group, members):
    group.members = members
    check_way(of_the_group)


@pytest.mark.parametrize(
    "others",
    [
        {"name": "staff"},
        {"members": ["ada", "bob"]},
        {"attributes": ["system.posix_acl_access"]},
    ],
    ids=str,
)
def test_a_group_with_others_in_it_is_others(group, of_the_group, others):
    vars(group).update(others)
    refused("above, on the way to .* is for others to change", check_way, of_the_group)


def test_a_group_that_nobody_knows_is_others(group, of_the_group, monkeypatch):
    monkeypatch.setattr(private.grp, "getgrgid", {}.__getitem__)
    refused("is for others to change", check_way, of_the_group)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary folder whose path has no blank, for links."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_links_are_in_a_folder_that_nobody_else_may_enter(temporary):
    link = Path(plain_path("/a b"))
    assert link.parent.parent == temporary
    assert link.parent.stat().st_mode & 0o777 == 0o700
    assert os.readlink(link) == "/a b"


def test_every_path_has_a_link_of_its_own(temporary):
    assert plain_path("/a b") != plain_path("/a c")


def test_a_folder_of_links_that_others_may_write_to_is_refused(temporary):
    folder = Path(plain_path("/a b")).parent
    for_all(folder)
    refused(f"{folder} is not yours alone to write to: remove it: rm -r", plain_path, "/a b")


def test_a_link_into_a_folder_whose_name_only_begins_alike_leads_out(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache-of-others").mkdir()
    link = tmp_path / "cache" / "link"
    link.symlink_to("../cache-of-others")
    assert refused("not yours alone", check_private, tmp_path / "cache").startswith(f"{link} ")


def test_what_is_to_be_typed_for_a_folder_with_a_blank_can_be_typed(tmp_path):
    folder = tmp_path / "my cache"
    folder.touch()
    assert refused("is no folder", check_private, folder).endswith(f": rm '{folder}'")
    folder.unlink()
    folder.mkdir()
    for_all(folder)
    assert refused("not yours alone", check_private, folder).endswith(f": rm -r '{folder}'")
