"""Which packages are here, which are missing for what, and how a notebook in Colab gets them.

Nothing is installed but by `prepare_notebook`, in Colab or when it is asked to, and never in a notebook that a driver
executes. This imports the standard library alone, and `packaging` where versions are compared: it has to work where
nothing else is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from qa_lib.errors import UserError
from qa_lib.paths import IS_CHECKOUT, PACKAGE, ROOT, importing

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Set by what executes notebooks, a sweep or a report, for their kernels: it has looked already.
PREPARED = "QA_LIB_PREPARED"
# Names of requirements.txt by what takes them; training and scoring take the rest. pyproject.toml has them as extras.
USES = {
    "notebooks": ("evaluate", "ipykernel", "ipywidgets", "papermill", "scipy", "seaborn"),
    "app": ("gradio", "starlette", "uvicorn"),
    "adapters": ("bitsandbytes", "peft"),
}
RUNNER = ("papermill", "ipykernel", "seaborn", "scipy")  # what a notebook is executed with
# Where Jupyter looks first for the kernel `python3`. The one here is of the Python that asks for it; one that is
# installed for a user may be of an environment that is gone.
KERNELS = PACKAGE / "lab" / "launch" / "jupyter"
TORCHAO = "0.16"  # the oldest that peft bears beside itself, and that quantizes here
# What a notebook imports, and what packages import late: a wrong version may show there alone.
PARTS = (
    "qa_lib.run.fit",
    "qa_lib.train.trainer",
    "qa_lib.lab.report.figures",
    "qa_lib.lab.app.page",
)
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as problem:
        said = str(problem).strip().splitlines() or [type(problem).__name__]
        sys.exit(f"{name} cannot be imported: {said[0]}")
"""


class NotReady(RuntimeError):
    """A notebook cannot go on; IPython shows the one line, and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)


def is_importable(module: str) -> bool:
    """Whether Python finds a module of that name; it is not imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _lines() -> dict[str, str]:
    """The lines of requirements.txt by the name of their package."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    return {re.match(r"[\w.-]+", line).group(): line for line in lines}


def requirements(uses: Iterable[str] = USES) -> list[Requirement]:
    """What training and scoring take, and some uses, by requirements.txt."""
    from packaging.requirements import Requirement

    left_out = {name for use in USES if use not in uses for name in USES[use]}
    return [Requirement(line) for name, line in _lines().items() if name not in left_out]


def how_to_install(packages: Iterable[str]) -> str:
    """The command that installs some packages: in a checkout all that there are, of the versions that were tested."""
    if IS_CHECKOUT:
        return f"pip install -r {os.path.relpath(ROOT / 'requirements.txt')}"
    lines = _lines()
    return f"pip install {shlex.join(lines.get(name, name) for name in packages)}"


def how_to_have(module: str) -> str:
    """What to type where a module was not found: what installs all that its use takes. Modules of no use's own, such as
    Pillow's, come with those that notebooks take."""
    use = next((use for use, names in USES.items() if module in names), "notebooks")
    activate = "type . .venv/bin/activate, or " if IS_CHECKOUT else "type "
    return activate + how_to_install(USES[use])


def misfits(needs: Iterable[Requirement]) -> list[str]:
    """What is missing or of a version that is not wanted, a phrase each: of `needs`, of what these need, and so on.

    Packages that fit one by one may not fit each other: transformers 5.15 takes huggingface_hub below 2 alone.
    """
    from packaging.utils import canonicalize_name

    found, expanded = [], set()
    waiting = [("this project", needed) for needed in needs]
    while waiting:
        who, needed = waiting.pop(0)
        there = version_of(needed.name)
        if there is None:
            found.append(f"{needed.name} is missing")
            continue
        if not needed.specifier.contains(there, prereleases=True):
            found.append(f"{needed.name} {there} is not {needed.specifier}, which {who} takes")
        for extra in ["", *needed.extras]:
            key = canonicalize_name(needed.name), extra
            if key not in expanded:
                expanded.add(key)
                asker = f"{needed.name} {there}"
                waiting += [(asker, each) for each in _needs_of(needed.name, extra)]
    return list(dict.fromkeys(found))


def _needs_of(package: str, extra: str) -> Iterator[Requirement]:
    """What an installed package needs here, with one of its extras or with none ("")."""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in metadata.requires(package) or []:
        with contextlib.suppress(InvalidRequirement):  # of a package of long ago
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                needed.marker = None
                yield needed


def is_torchao_usable() -> bool:
    """Whether torchao is here, and new enough."""
    from packaging.version import Version

    there = version_of("torchao")
    return there is not None and Version(there) >= Version(TORCHAO)


def adapters_fault() -> str:
    """Why adapters cannot be used although peft is here, and what to type; "" where nothing is known.

    peft 0.19 and newer raise an error where a model gets an adapter beside a torchao that they find too old.
    """
    peft, torchao = version_of("peft"), version_of("torchao")
    if None in (peft, torchao) or is_torchao_usable():
        return ""
    return (
        f"peft {peft} refuses torchao {torchao}: "
        "type pip install -U torchao, or pip uninstall torchao"
    )


def check_runner() -> None:
    """Raises UserError where this Python cannot execute notebooks, which says what is missing."""
    missing = [name for name in RUNNER if not is_importable(name)]
    if missing:
        raise UserError(
            f"notebooks cannot be executed here: {', '.join(missing)} missing; "
            f"type {how_to_install(missing)} (`run` trains without a notebook)"
        )


def jupyter_path() -> str:
    """The value of JUPYTER_PATH by which notebooks run in this Python, whatever kernels are installed beside it."""
    before = os.environ.get("JUPYTER_PATH", "").split(os.pathsep)
    return os.pathsep.join(
        [str(KERNELS), *(path for path in before if path and path != str(KERNELS))]
    )


@contextlib.contextmanager
def environment_of_kernels() -> Iterator[None]:
    """Inside, kernels that this process starts are of this Python, have PREPARED, and import this library."""
    before = dict(os.environ)
    os.environ.update(importing(os.environ) | {PREPARED: "1", "JUPYTER_PATH": jupyter_path()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def prepare_notebook(install: bool | None = None) -> None:
    """What the first cell of each notebook does: see that what the notebook imports is here.

    In Colab, or with `install`, pip installs what is missing or does not fit; elsewhere one line says what that is, and
    what to type. In a checkout it goes to its root, where runs/ and figures/ are. Raises NotReady where pip fails, or
    where something cannot be imported all the same. Does nothing where a driver executes the notebook.
    """
    if PREPARED in os.environ:
        return
    _go_to_the_checkout()
    if install is None:
        install = version_of("google-colab") is not None
    if not install:
        if faults := misfits(requirements(["notebooks"])):
            packages = [said.split()[0] for said in faults]
            print(f"{'; '.join(faults)}: type %{how_to_install(packages)}", file=sys.stderr)
        return
    with _alone():  # the same look behind the lock: another process may have just installed it
        if misfits(_without_torch()) or adapters_fault():
            loaded = _versions_loaded()
            _install()
            _check_imports()
            _check_loaded(loaded)


def _go_to_the_checkout() -> None:
    """Go to the root of a checkout from its notebooks, or from the folder into which a notebook has cloned it."""
    if IS_CHECKOUT and Path.cwd() in (ROOT / "notebooks", ROOT.parent):
        os.chdir(ROOT)
    # By which the first cell has found the library; they lead elsewhere from here.
    sys.path[:] = [folder for folder in sys.path if folder not in ("..", "lab")]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold this Python's environment: two processes must not install into it at once."""
    folder = os.open(sys.prefix, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _without_torch() -> list[Requirement]:
    """All requirements but torch, where there is one: it was built for the machine's driver. Says so if it is of a
    version that was not tested."""
    there, every = version_of("torch"), requirements()
    if there is None:
        return every
    (torch,) = [needed for needed in every if needed.name == "torch"]
    if not torch.specifier.contains(there, prereleases=True):
        said = f"torch {there} is left alone, but this was tested with {torch.specifier}"
        print(said, file=sys.stderr)
    return [needed for needed in every if needed.name != "torch"]


def _install() -> None:
    """Have pip install all requirements, so that it finds versions that go together; torch stays as it is. A torchao
    that peft refuses is upgraded, and not removed: others may import it. Raises NotReady."""
    words = [str(needed) for needed in _without_torch()]
    if there := version_of("torch"):
        words.append(f"torch=={there}")
    if adapters_fault():
        words.append(f"torchao>={TORCHAO}")
    command = [sys.executable, "-m", "pip", "install", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = re.findall(r"(?m)^ERROR: (.*)$", done.stderr) or done.stderr.splitlines() or ["it"]
        raise NotReady(f"pip could not install what this notebook needs: {said[-1].strip()}")


def _check_imports() -> None:
    """Raises NotReady where a package that is here now cannot be imported, in a process that has not imported any."""
    names = [needed.name for needed in requirements()]
    names += ["torchao"] * (version_of("torchao") is not None)
    command = [sys.executable, "-c", IMPORT_ALL, *names, *PARTS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotReady((done.stderr.strip().splitlines() or ["Python ended"])[-1])


def _versions_loaded() -> dict[str, str]:
    """The version of each installed package of which this process has imported something."""
    owners = metadata.packages_distributions()
    loaded = {name.partition(".")[0] for name in sys.modules}
    packages = {package for name in loaded for package in owners.get(name, ())}
    return {package: version_of(package) for package in packages - {"packaging"}}


def _check_loaded(before: dict[str, str]) -> None:
    """Raises NotReady where a package was replaced that this process had imported: it would mix both versions."""
    replaced = [name for name, version in before.items() if version_of(name) != version]
    if replaced:
        raise NotReady(
            f"{', '.join(sorted(replaced))} was replaced while in use: restart the session "
            "(Runtime, Restart session), then run all cells again"
        )
