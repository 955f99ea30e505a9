"""Write this checkout's `owner/name` on GitHub into the links that lead there: `make links`.

The name comes from the git remote `origin`. CITATION.cff says which name the links have now, so
that this works again after a fork of a fork or a change of name.

With `--check` nothing is written. It fails where the remote is on GitHub and links still have
PLACEHOLDER; `make lint`, and with it CI, runs it.
"""

import re
import subprocess
import sys
from pathlib import Path

PLACEHOLDER = "YOUR-FORK"


def git(*words: str) -> str:
    """Return what git prints, or nothing where it fails."""
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


def address_of(name: str) -> re.Pattern:
    """Return the pattern of addresses that lead to `name` on GitHub, or in Colab to what is there.

    It does not match where a longer name begins with the same letters.
    """
    return re.compile(rf"(github\.com/|google\.com/github/){re.escape(name)}(?![\w-]|\.\w)")


def files_with(name: str) -> dict[Path, str]:
    """Return the text of each tracked file that has a link to `name`."""
    address = address_of(name)
    texts = {}
    for line in git("grep", "-lF", f"/{name}").splitlines():
        text = Path(line).read_text(encoding="utf-8")
        if address.search(text):
            texts[Path(line)] = text
    return texts


def repository_of(remote: str) -> str | None:
    """Return the `owner/name` that a remote's address has on GitHub, or None."""
    match = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$", remote)
    return match[1] if match else None


def check(repository: str | None) -> None:
    """Exit with a message where links of a checkout from GitHub still have PLACEHOLDER."""
    files = files_with(PLACEHOLDER) if repository else {}
    if files:
        sys.exit(
            f"links: {len(files)} files, {min(files)} among them, link to {PLACEHOLDER} and not to "
            f"{repository}: type make links, and commit what it writes"
        )


def write(remote: str, repository: str | None) -> None:
    """Replace the name that links have now, and PLACEHOLDER, by that of the repository."""
    if not repository:
        reason = f"git's remote origin is {remote!r}" if remote else "git has no remote origin"
        sys.exit(
            f"links: {reason}; name a repository on GitHub: "
            "git remote add origin https://github.com/OWNER/NAME"
        )
    citation = Path("CITATION.cff").read_text(encoding="utf-8")
    present = re.search(r"(?m)^repository-code: https://github\.com/(\S+)$", citation)[1]
    for name in (present, PLACEHOLDER):
        for path, text in files_with(name).items():
            linked = address_of(name).sub(rf"\g<1>{repository}", text)
            path.write_text(linked, encoding="utf-8")
    print(f"The links lead to https://github.com/{repository}")


if __name__ == "__main__":
    remote = git("remote", "get-url", "origin")
    if "--check" in sys.argv:
        check(repository_of(remote))
    else:
        write(remote, repository_of(remote))
