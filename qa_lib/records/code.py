"""Which code a record comes from: the commit of the checkout, and whether its code was changed."""

import os
import re
import subprocess
from pathlib import Path

from qa_lib.records.files import RecordError

# A line of a notebook that `make links` writes: the address to clone from, or a link to Colab or
# GitHub.
LINK = r"(git clone .*|\]\()https://([a-z.]+/)?github"


def code_version() -> dict:
    """Return the `commit` and `dirty` of the checkout that this package lies in.

    Where $QA_LIB_COMMIT names a commit it is that one: for code that was copied without its
    history, or onto an older one. Both are None where git does not tell. Raises RecordError for a
    name that is no hash.
    """
    named = os.environ.get("QA_LIB_COMMIT")
    if named:
        if not re.fullmatch(r"[0-9a-f]{40}", named):
            raise RecordError(
                f"QA_LIB_COMMIT={named!r} is not a commit's whole hash, 40 hexadecimal digits"
            )
        return {"commit": named, "dirty": None}
    try:
        return {"commit": _git("rev-parse", "HEAD"), "dirty": _is_code_changed()}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def _is_code_changed() -> bool:
    """Return whether the checkout's code differs from its commit.

    Runs and figures are what the code writes, and links in notebooks are those of a fork: neither
    makes a checkout dirty.
    """
    package = _git("status", "--porcelain", "--", ":/qa_lib", ":/requirements.txt")
    but_links = ("--no-ext-diff", "--ignore-matching-lines", LINK)
    notebooks = _git("diff", *but_links, "HEAD", "--", ":/notebooks")
    new_notebooks = _git("ls-files", "--others", "--exclude-standard", ":/notebooks")
    return any((package, notebooks, new_notebooks))


def _git(*words: str) -> str:
    """Return what a command of git prints about the checkout; raises OSError, SubprocessError."""
    command = ["git", "-C", str(Path(__file__).parent), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
