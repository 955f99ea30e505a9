"""Writes this checkout's `owner/name` on GitHub into its links, from its git remote `origin`: `make links`.

CITATION.cff says which name they have now, so that it works again after a fork of a fork, or a change of name.
With `--check` it writes nothing, and fails where there is a remote on GitHub and the links still have PLACEHOLDER:
`make lint` and with it CI do that.
"""

import re
import subprocess
import sys
from pathlib import Path

PLACEHOLDER = "YOUR-FORK"


def git(*words: str) -> str:
    """What git prints, or nothing where it fails."""
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


def files_with(name: str) -> dict[Path, str]:
    """The text of each file with a link to what has that name on GitHub."""
    paths = map(Path, git("grep", "-lF", f"/{name}").splitlines())
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {path: text for path, text in texts.items() if address_of(name).search(text)}


def address_of(name: str) -> re.Pattern:
    """In addresses of GitHub, and in Colab's of what lies on GitHub; not where a longer name begins with the same
    letters."""
    return re.compile(rf"(github\.com/|google\.com/github/){re.escape(name)}(?![\w-]|\.\w)")


remote = git("remote", "get-url", "origin")
found = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$", remote)
if "--check" in sys.argv:
    left = files_with(PLACEHOLDER) if found else {}
    if left:
        sys.exit(
            f"links: {len(left)} files, {min(left)} among them, link to {PLACEHOLDER} and not to {found[1]}: "
            "type make links, and commit what it writes"
        )
    sys.exit()
if not found:
    said = f"git's remote origin is {remote!r}" if remote else "git has no remote origin"
    sys.exit(
        f"links: {said}; name a repository on GitHub: git remote add origin https://github.com/OWNER/NAME"
    )

citation = Path("CITATION.cff").read_text(encoding="utf-8")
old = re.search(r"(?m)^repository-code: https://github\.com/(\S+)$", citation)[1]
for name in (old, PLACEHOLDER):
    for path, text in files_with(name).items():
        path.write_text(address_of(name).sub(rf"\g<1>{found[1]}", text), encoding="utf-8")
print(f"The links lead to https://github.com/{found[1]}")
