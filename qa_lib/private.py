"""Folders whose content this process runs: they must be this user's, and nobody else's to write to.

What compilers keep on the disk is loaded and run as it is. Whoever can put a file there, or another
folder in its place, can so run code as this user. root can do that anyway, and is trusted.
"""

import contextlib
import grp
import hashlib
import os
import pwd
import re
import shlex
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from qa_lib.errors import UserError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Characters that a command line takes apart or drops where a path has them and nobody quotes it.
BREAKS_A_COMMAND = re.compile(r"[\s'\"\\]")


# A folder and all that is in it


def check_private(folder: Path) -> None:
    """Check that a folder, all that is in it and the way to it are nobody else's to change.

    The folder is an absolute path. Raises UserError, which names the first offending path and what
    to type.
    """
    check_way(folder)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):  # a link to a folder is none either
        raise UserError(f"{folder} is no folder: remove it: rm {shlex.quote(str(folder))}")
    offending = next(_offending(folder), None) if is_ours(status) else folder
    if offending is not None:
        raise UserError(
            f"{offending} is not yours alone to write to, and what is kept there is run: "
            f"remove it: rm -r {shlex.quote(str(folder))}"
        )


def is_ours(status: os.stat_result) -> bool:
    """Tell whether a file or folder is this user's and for nobody else to write."""
    return status.st_uid == os.getuid() and not status.st_mode & OTHERS_WRITE


def _offending(folder: Path) -> Iterator[str]:
    """Yield the paths in a folder, at any depth, whose content others may decide.

    They belong to others, are for others to write, or are links that lead out of the folder. What
    an offending folder holds is not looked at.
    """
    inside = os.path.realpath(folder) + os.sep
    unread_folders = [os.fspath(folder)]
    while unread_folders:
        with os.scandir(unread_folders.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if entry.is_symlink():
                    leads_out = not os.path.realpath(entry.path).startswith(inside)
                    if status.st_uid != os.getuid() or leads_out:
                        yield entry.path
                elif not is_ours(status):
                    yield entry.path
                elif entry.is_dir(follow_symlinks=False):
                    unread_folders.append(entry.path)


# The way to a folder


def check_way(folder: Path) -> None:
    """Check the way to a folder: all folders above it, from the root down.

    Only this user and root may be able to put another folder in the place of one of them, or of
    this one. The folder is an absolute path. Folders that are not there yet are passed over. Raises
    UserError, which names the offending path.
    """
    for place in reversed(folder.parents):
        if not place.exists():
            return
        _check_place(place, folder)


def _check_place(place: Path, folder: Path) -> None:
    """Check one `place` on the way to a folder; of a link, also what it leads to and the way there.

    Raises UserError, which names the place and the folder.
    """
    status = place.lstat()
    is_link = stat.S_ISLNK(status.st_mode)
    # In a sticky folder, such as /tmp, nobody can remove or rename what belongs to somebody else.
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    # The mode of a link says nothing: who may replace it is decided by the folder that it is in.
    is_open = not is_link and not is_sticky and _others_can_write(status, place)
    if status.st_uid not in (0, os.getuid()) or is_open:
        raise UserError(
            f"{place}, on the way to {folder}, is for others to change: "
            "name a folder below one that only you can write to"
        )
    if is_link:
        target = place.parent / place.readlink()
        check_way(target)
        _check_place(target, folder)


def _others_can_write(status: os.stat_result, place: Path) -> bool:
    """Tell whether others may write to a folder, of which `status` is the status.

    A group that only this user is in does not count as others: many systems give each user one.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    if status.st_mode & stat.S_IWGRP:
        return not _is_private_group(status.st_gid, place)
    return False


def _is_private_group(group_id: int, place: Path) -> bool:
    """Tell whether a group is this user's alone: it has their name, and no further member.

    The answer is no where the `place` has an access list: the group's bits of its mode then stand
    for all who are on the list. It is no as well where nothing can be found out.
    """
    try:
        group = grp.getgrgid(group_id)
        user = pwd.getpwuid(os.getuid())
        attributes = os.listxattr(place) if hasattr(os, "listxattr") else []
    except (KeyError, OSError):
        return False
    if "system.posix_acl_access" in attributes:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


# Paths for compilers


def plain_path(path: str) -> str:
    """Return a path to the same file or folder that may stand in a command line without quotes.

    It is the path itself, or a link to it below a temporary folder, which is made. Raises UserError
    where no temporary folder can have such links, or where others can write to the links' folder.
    """
    if not BREAKS_A_COMMAND.search(path):
        return path
    links = _folder_of_links(path)
    link = links / hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another process was quicker
            link.symlink_to(path)
    return str(link)


def _folder_of_links(path: str) -> Path:
    """Return this user's folder of links below a temporary folder, after making it.

    Raises UserError where no temporary folder can have it, which names the `path` that needs a
    link, and where others can write to it.
    """
    places = list(dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]))  # each once
    usable = [place for place in places if _takes_links(place)]
    if not usable:
        raise UserError(
            f"{path!r}: compilers take no path with blanks or quotes, and {' and '.join(places)} "
            "have no room for a link to it: set TMPDIR to a folder without them"
        )
    links = Path(usable[0], f"qa_lib-{os.getuid()}-paths")
    links.mkdir(mode=0o700, exist_ok=True)
    check_way(links)
    status = links.lstat()
    if not stat.S_ISDIR(status.st_mode) or not is_ours(status):
        raise UserError(f"{links} is not yours alone to write to: remove it: rm -r {links}")
    return links


def _takes_links(place: str) -> bool:
    """Tell whether this user can make links in a folder, and its path needs none itself."""
    return not BREAKS_A_COMMAND.search(place) and os.access(place, os.W_OK | os.X_OK)
