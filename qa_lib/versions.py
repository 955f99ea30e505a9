"""The versions that the package needs of the two libraries that it cannot do without.

`qa_lib.data` asks their metadata before anything imports either: an older transformers would end in an ImportError of
some name within it.
"""

import contextlib
import importlib.metadata
import re

from qa_lib.errors import UserError

# As in requirements.txt, which has upper bounds as well: those are what was tested, and no reason to refuse.
LEAST = {"torch": (2, 11), "transformers": (5, 10)}


def check_versions() -> None:
    """Raises UserError where one of them is too old. One that is not there is for whoever imports it to say."""
    for package, least in LEAST.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(package)
            numbers = re.match(r"(\d+)\.(\d+)", found or "")
            if numbers and tuple(map(int, numbers.groups())) < least:
                needed = ".".join(map(str, least))
                raise UserError(
                    f"qa_lib needs {package} {needed} or newer, here {found}: "
                    f'pip install -U "{package}>={needed}", then start Python anew'
                )
