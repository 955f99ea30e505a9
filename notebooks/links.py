"""Writes this checkout's `owner/name` on GitHub into its links, from its git remote `origin`: `make links`.

CITATION.cff says which name they have now, so that it works again after a fork of a fork, or a change of name.
"""

import re
import subprocess
import sys
from pathlib import Path


def git(*words: str) -> str:
    """What git prints, or nothing where it fails."""
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()


remote = git("remote", "get-url", "origin")
found = re.search(r"github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?$", remote)
if not found:
    said = f"git's remote origin is {remote!r}" if remote else "git has no remote origin"
    sys.exit(
        f"links: {said}; name a repository on GitHub: git remote add origin https://github.com/OWNER/NAME"
    )

old = re.search(
    r"(?m)^repository-code: https://github\.com/(\S+)$", Path("CITATION.cff").read_text()
)[1]
# In addresses of GitHub, and in Colab's of what lies on GitHub; not where a longer name begins with the same letters.
address = re.compile(rf"(github\.com/|google\.com/github/){re.escape(old)}(?![\w-]|\.\w)")
for name in git("grep", "-lF", f"/{old}").splitlines():
    text = Path(name).read_text(encoding="utf-8")
    Path(name).write_text(address.sub(rf"\g<1>{found[1]}", text), encoding="utf-8")
print(f"The links lead to https://github.com/{found[1]}")
