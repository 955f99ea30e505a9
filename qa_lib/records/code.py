"""Which code a record comes from: a digest of its files, and the commit of the checkout."""

import os
import re
import subprocess
from pathlib import Path

from qa_lib.loaded import CODE
from qa_lib.records.files import RecordError

# Matches a line of a notebook that `make links` writes: the address to clone from, or a link to
# Colab or GitHub.
LINK = r"(git clone .*|\]\()https://([a-z.]+/)?github"


def code_version() -> dict:
    """Return the `commit` of this package's checkout, whether it is `dirty`, and the `digest`.

    The digest is of the code that this process has loaded. Commit and dirty are None where git does
    not tell. $QA_LIB_COMMIT, where it is set, gives the commit: for code that was copied without
    its history, or into a checkout of an older commit. Whether that code was changed is then not
    known. Raises RecordError for a commit that is no whole hash.
    """
    version = {"commit": None, "dirty": None, "digest": CODE.digest}
    named = os.environ.get("QA_LIB_COMMIT")
    if named:
        if not re.fullmatch(r"[0-9a-f]{40}", named):
            raise RecordError(
                f"QA_LIB_COMMIT={named!r} is not a commit's whole hash, 40 hexadecimal digits"
            )
        return version | {"commit": named}
    try:
        return version | {"commit": _git("rev-parse", "HEAD"), "dirty": _is_code_changed()}
    except (OSError, subprocess.SubprocessError):
        return version


def _is_code_changed() -> bool:
    """Return whether the checkout's code differs from its commit.

    Runs and figures are what the code writes, and links in notebooks are those of a fork: neither
    makes a checkout dirty.
    """
    package = _git("status", "--porcelain", "--", ":/qa_lib", ":/requirements.txt")
    # A program of the user's own that shows differences would not leave the links out.
    ignoring_links = ("--no-ext-diff", "--ignore-matching-lines", LINK)
    notebooks = _git("diff", *ignoring_links, "HEAD", "--", ":/notebooks")
    # `git diff` does not show files that are not tracked.
    new_notebooks = _git("ls-files", "--others", "--exclude-standard", ":/notebooks")
    return any((package, notebooks, new_notebooks))


def _git(*arguments: str) -> str:
    """Return what git prints about the checkout. Raises OSError and SubprocessError."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return process.stdout.strip()
