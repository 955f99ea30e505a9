"""The folder of --compile-cache: what compilers leave there, later runs load and run."""

import os
import shlex
from pathlib import Path

from qa_lib.errors import UserError
from qa_lib.private import OTHERS_WRITE, check_private, check_way, is_ours

PARTS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def use_compile_cache(folder: Path | None) -> None:
    """Let this process, and those that it starts, keep what they compile in a folder, and reuse it.

    Compilers know by themselves for which GPU, version and code it was made. From then on nothing
    that these processes write is for others to write. Raises UserError for a folder that somebody
    else could have written to, and for one whose name does not print.
    """
    if folder is None:
        return
    if not str(folder).isprintable():
        raise UserError(
            f"--compile-cache {str(folder)!a}: its name has a line break or another character that "
            "does not print: name another folder"
        )
    folder = folder.absolute()
    check_way(folder)
    os.umask(os.umask(OTHERS_WRITE) | OTHERS_WRITE)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(folder.stat()):
        others = set(os.listdir(folder)) - {*PARTS.values()}
        cure = "name another folder" if others else f"remove it: rm -r {shlex.quote(str(folder))}"
        raise UserError(
            f"{folder} is not yours alone to write to, and what is in it is run: {cure}"
        )
    for variable, name in PARTS.items():
        part = folder / name
        part.mkdir(mode=0o700, exist_ok=True)
        check_private(part)
        os.environ[variable] = str(part)
