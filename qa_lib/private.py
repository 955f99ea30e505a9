"""Folders whose content this process runs: they must be this user's, and nobody else's to write to.

What compilers keep is loaded without a further look, so that whoever can put a file there, or can put another folder in
its place, can run code as this user. root can do so anyway.
"""

import contextlib
import grp
import os
import pwd
import re
import shlex
import stat
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from qa_lib.errors import UserError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# What a command line that nobody quotes takes apart.
BREAKS_A_COMMAND = re.compile(r"[\s'\"\\]")


def check_private(folder: Path) -> None:
    """Raises UserError, which names the first offending path and what to do, unless a folder, all that is in it and the
    way to it are nobody else's to change. The folder is an absolute path."""
    check_way(folder)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{folder} is no folder: remove it: rm {shlex.quote(str(folder))}")
    offending = next(_offending(folder), None) if is_ours(found) else folder
    if offending:
        raise UserError(
            f"{offending} is not yours alone to write to, and what is kept there is run: "
            f"remove it: rm -r {shlex.quote(str(folder))}"
        )


def check_way(folder: Path) -> None:
    """Raises UserError, which names the path, where others than this user and root could put another folder in the
    place of one that is passed on the way to `folder`, an absolute path. What is not there yet is passed over."""
    for place in reversed(folder.parents):
        if not place.exists():
            return
        _check_passed(place, folder)


def _check_passed(place: Path, folder: Path) -> None:
    """`check_way` of one folder, or of a link and what it leads to."""
    found = place.lstat()
    others_write = _others_write(found, place) and not found.st_mode & stat.S_ISVTX
    if stat.S_ISLNK(found.st_mode):  # whose mode says nothing
        others_write = False
    if found.st_uid not in (0, os.getuid()) or others_write:
        raise UserError(
            f"{place}, on the way to {folder}, is for others to change: "
            "name a folder below one that only you can write to"
        )
    if stat.S_ISLNK(found.st_mode):
        target = place.parent / place.readlink()
        check_way(target)
        _check_passed(target, folder)


def _others_write(found: os.stat_result, place: Path) -> bool:
    """Whether others may write to a folder; the group that many systems give to each user alone is nobody else."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own_group(found.st_gid, place)


def _is_own_group(number: int, place: Path) -> bool:
    """Whether a group is this user's alone: it has the user's name and no further member. Where access lists are set,
    the group's bits speak of others as well."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.getuid())
        lists = os.listxattr(place) if hasattr(os, "listxattr") else []
    except (KeyError, OSError):
        return False
    alone = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return alone and "system.posix_acl_access" not in lists


def is_ours(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's and for nobody else to write."""
    return found.st_uid == os.getuid() and not found.st_mode & OTHERS_WRITE


def _offending(folder: Path) -> Iterator[str]:
    """What is in a folder, at any depth, and belongs to others, is for others to write, or is a link to elsewhere."""
    within = os.path.realpath(folder) + os.sep
    waiting = [os.fspath(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                if entry.is_symlink():
                    if found.st_uid != os.getuid() or not _leads_into(entry.path, within):
                        yield entry.path
                elif not is_ours(found):
                    yield entry.path
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _leads_into(link: str, within: str) -> bool:
    return os.path.realpath(link).startswith(within)


def plain_path(path: str) -> str:
    """A path to the same file or folder that an unquoted command line can have: itself, or a link to it below a
    temporary folder. Raises UserError where there is no such folder, or others can write to it."""
    if not BREAKS_A_COMMAND.search(path):
        return path
    places = dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"])
    usable = [
        place
        for place in places
        if not BREAKS_A_COMMAND.search(place) and os.access(place, os.W_OK | os.X_OK)
    ]
    if not usable:
        raise UserError(
            f"{path!r}: compilers take no path with blanks or quotes, and {' and '.join(places)} "
            "have no room for a link to it: set TMPDIR to a folder without them"
        )
    links = Path(usable[0], f"qa_lib-{os.getuid()}-paths")
    links.mkdir(mode=0o700, exist_ok=True)
    check_way(links)
    found = links.lstat()
    if not stat.S_ISDIR(found.st_mode) or not is_ours(found):
        raise UserError(f"{links} is not yours alone to write to: remove it: rm -r {links}")
    link = links / sha256(os.fsencode(path)).hexdigest()[:16]
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another process was quicker
            link.symlink_to(path)
    return str(link)
