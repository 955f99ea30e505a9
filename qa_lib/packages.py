"""Which packages are here, which are missing for what, and how a notebook in Colab gets them.

Nothing is installed but by `prepare_notebook`, in Colab or when it is asked to, and never in a
notebook that a driver executes. This module imports the standard library alone, and `packaging`
where versions are compared: it has to work where nothing else is installed.
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

from qa_lib.cell_clock import show_cell_clock
from qa_lib.errors import UserError
from qa_lib.paths import IS_CHECKOUT, PACKAGE, ROOT, importing

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Packages of requirements.txt by what takes them; training and scoring take the rest.
# pyproject.toml has them as extras.
USES = {
    "notebooks": ("evaluate", "ipykernel", "ipywidgets", "papermill", "scipy", "seaborn"),
    "app": ("gradio", "starlette", "uvicorn"),
    "adapters": ("bitsandbytes", "peft"),
}
RUNNER = ("papermill", "ipykernel", "seaborn", "scipy")  # what a notebook is executed with
TORCHAO = "0.16"  # the oldest that peft bears beside itself, and that quantizes here


# What is installed


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_importable(module: str) -> bool:
    """Tell whether Python finds a module of that name; it is not imported."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def is_torchao_usable() -> bool:
    """Tell whether torchao is here, and new enough."""
    from packaging.version import Version

    version = version_of("torchao")
    return version is not None and Version(version) >= Version(TORCHAO)


def adapters_fault() -> str:
    """Return why adapters cannot be used although peft is here, and what to type; "" if they can.

    peft 0.19 and newer raise an error where a model gets an adapter beside a torchao that they find
    too old.
    """
    peft = version_of("peft")
    torchao = version_of("torchao")
    if peft is None or torchao is None or is_torchao_usable():
        return ""
    return (
        f"peft {peft} refuses torchao {torchao}: "
        "type pip install -U torchao, or pip uninstall torchao"
    )


# What is required


def requirements(uses: Iterable[str] = USES) -> list[Requirement]:
    """Return what training, scoring and some further uses take, as requirements.txt has it."""
    from packaging.requirements import Requirement

    left_out = set()
    for use, packages in USES.items():
        if use not in uses:
            left_out.update(packages)
    return [
        Requirement(line) for name, line in _requirement_lines().items() if name not in left_out
    ]


def _requirement_lines() -> dict[str, str]:
    """Return the lines of requirements.txt by the name of their package."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    return {re.match(r"[\w.-]+", line).group(): line for line in lines}


def how_to_install(packages: Iterable[str]) -> str:
    """Return the command that installs some packages.

    In a checkout it installs all that there are, of the versions that were tested.
    """
    if IS_CHECKOUT:
        path = os.path.relpath(ROOT / "requirements.txt")
        return f"pip install -r {shlex.quote(path)}"
    lines = _requirement_lines()
    return f"pip install {shlex.join(lines.get(name, name) for name in packages)}"


def how_to_get_module(module: str) -> str:
    """Return what to type where a module was not found: it installs all packages of its use.

    Modules that USES does not name, such as Pillow's, come with those that notebooks take.
    """
    packages = USES["notebooks"]
    for names in USES.values():
        if module in names:
            packages = names
    activate = "type . .venv/bin/activate, or " if IS_CHECKOUT else "type "
    return activate + how_to_install(packages)


def misfits(needs: Iterable[Requirement]) -> list[str]:
    """Return a phrase for each package that is missing or of a version that is not wanted.

    It looks at `needs`, at what these need, and so on: packages that fit one by one may not fit
    each other. transformers 5.15 takes huggingface_hub below 2 alone.
    """
    from packaging.utils import canonicalize_name

    phrases = []
    seen = set()  # (package, extra) whose own needs are looked at already
    waiting = [("this project", requirement) for requirement in needs]
    while waiting:
        needed_by, requirement = waiting.pop(0)
        name = requirement.name
        version = version_of(name)
        if version is None:
            phrases.append(f"{name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            phrases.append(
                f"{name} {version} is not {requirement.specifier}, which {needed_by} takes"
            )
        for extra in ["", *requirement.extras]:
            key = (canonicalize_name(name), extra)
            if key not in seen:
                seen.add(key)
                waiting += [(f"{name} {version}", need) for need in _needs_of(name, extra)]
    return list(dict.fromkeys(phrases))


def _needs_of(package: str, extra: str) -> Iterator[Requirement]:
    """Yield what an installed package needs here, with one of its extras or with none ("")."""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in metadata.requires(package) or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # of a package of long ago
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


# What executes notebooks

# A sweep and a report set this in the kernels that execute notebooks: they have looked already, so
# that `prepare_notebook` does nothing there.
PREPARED = "QA_LIB_PREPARED"
# Where Jupyter looks first for the kernel `python3`. The one here is of the Python that asks for
# it; one that is installed for a user may be of an environment that is gone.
JUPYTER_KERNELS = PACKAGE / "lab" / "launch" / "jupyter"


def check_runner() -> None:
    """Check that this Python can execute notebooks.

    Raises UserError, which names the packages that are missing and what to type.
    """
    missing = [name for name in RUNNER if not is_importable(name)]
    if missing:
        raise UserError(
            f"notebooks cannot be executed here: {', '.join(missing)} missing; "
            f"type {how_to_install(missing)} (`run` trains without a notebook)"
        )


def jupyter_path() -> str:
    """Return the JUPYTER_PATH by which notebooks run in this Python.

    It comes before whatever kernels are installed, and keeps what the user has set.
    """
    paths_before = os.environ.get("JUPYTER_PATH", "").split(os.pathsep)
    others = [path for path in paths_before if path not in ("", str(JUPYTER_KERNELS))]
    return os.pathsep.join([str(JUPYTER_KERNELS), *others])


@contextlib.contextmanager
def environment_of_jupyter_kernels() -> Iterator[None]:
    """Change this process's environment, inside the block, to that of the kernels that it starts.

    They are of this Python, have PREPARED, and import this library.
    """
    before = dict(os.environ)
    os.environ.update(importing(os.environ))
    os.environ[PREPARED] = "1"
    os.environ["JUPYTER_PATH"] = jupyter_path()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# The first cell of a notebook

# What notebooks import. Some packages import modules only when they are used, so that a wrong
# version may show here and not before.
PARTS = (
    "qa_lib.run.fit",
    "qa_lib.train.trainer",
    "qa_lib.lab.report.figures",
    "qa_lib.lab.app.page",
)
# A program that imports the modules which its arguments name, and ends with one line for the first
# that cannot be imported.
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as problem:
        lines = str(problem).strip().splitlines() or [type(problem).__name__]
        sys.exit(f"{name} cannot be imported: {lines[0]}")
"""


class NotReady(RuntimeError):
    """A notebook cannot go on; IPython shows the one line, and no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def prepare_notebook(install: bool | None = None) -> None:
    """See that what a notebook imports is here: its first cell calls this.

    In Colab, or with `install`, pip installs what is missing or does not fit; elsewhere one line
    says what that is, and what to type. In a checkout it goes to its root, where runs/ and figures/
    are. It does nothing where a driver executes the notebook. Raises NotReady where pip fails, or
    where something cannot be imported all the same.

    From the next cell on, a cell that takes seconds says that it is at work.
    """
    if PREPARED in os.environ:
        return
    show_cell_clock()
    _go_to_the_checkout()
    if install is None:
        install = version_of("google-colab") is not None
    if not install:
        _say_what_is_missing()
        return
    _say_if_torch_is_untested()
    with _environment_lock():
        # The look is behind the lock, since another process may have just installed it.
        if misfits(_requirements_to_install()) or adapters_fault():
            loaded = _versions_loaded()
            _install()
            _check_imports()
            _check_not_replaced(loaded)


def _go_to_the_checkout() -> None:
    """Go to the root of a checkout, where a notebook runs in its folder or has just cloned it."""
    if IS_CHECKOUT and Path.cwd() in (ROOT / "notebooks", ROOT.parent):
        os.chdir(ROOT)
    # The first cell found the library by its parent folder, or by the clone `lab` in Colab; from
    # the root these lead elsewhere.
    sys.path[:] = [folder for folder in sys.path if folder not in ("..", "lab")]


def _say_what_is_missing() -> None:
    """Print a line that names what is missing for notebooks or does not fit, and what to type."""
    phrases = misfits(requirements(["notebooks"]))
    if phrases:
        packages = dict.fromkeys(phrase.split()[0] for phrase in phrases)  # each begins with it
        print(f"{'; '.join(phrases)}: type %{how_to_install(packages)}", file=sys.stderr)


@contextlib.contextmanager
def _environment_lock() -> Iterator[None]:
    """Hold this Python's environment: two processes must not install into it at once."""
    folder = os.open(sys.prefix, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _requirements_to_install() -> list[Requirement]:
    """Return all requirements, without torch where it is here: it was built for the driver."""
    has_torch = version_of("torch") is not None
    return [need for need in requirements() if not (has_torch and need.name == "torch")]


def _say_if_torch_is_untested() -> None:
    """Print a line where the torch that is here has a version that this was not tested with."""
    version = version_of("torch")
    (tested,) = (need.specifier for need in requirements() if need.name == "torch")
    if version is not None and not tested.contains(version, prereleases=True):
        print(f"torch {version} is left alone, but this was tested with {tested}", file=sys.stderr)


def _install() -> None:
    """Have pip install all requirements at once, so that it finds versions that go together.

    torch stays as it is. A torchao that peft refuses is upgraded, and not removed: others may
    import it. Raises NotReady.
    """
    packages = [str(requirement) for requirement in _requirements_to_install()]
    torch_version = version_of("torch")
    if torch_version is not None:
        packages.append(f"torch=={torch_version}")
    if adapters_fault():
        packages.append(f"torchao>={TORCHAO}")
    command = [sys.executable, "-m", "pip", "install", "-q", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = re.findall(r"(?m)^ERROR: (.*)$", done.stderr)
        lines = errors or done.stderr.splitlines() or [f"pip ended with {done.returncode}"]
        raise NotReady(f"pip could not install what this notebook needs: {lines[-1].strip()}")


def _check_imports() -> None:
    """Check that packages and PARTS can be imported, in a process that has not imported any.

    Raises NotReady for the first that cannot.
    """
    names = [requirement.name for requirement in requirements()]
    if version_of("torchao") is not None:
        names.append("torchao")
    command = [sys.executable, "-c", IMPORT_ALL, *names, *PARTS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"Python ended with {done.returncode}"]
        raise NotReady(lines[-1])


def _versions_loaded() -> dict[str, str | None]:
    """Return the version of each installed package of which this process has imported something."""
    owners = metadata.packages_distributions()
    packages = set()
    for module in sys.modules:
        packages.update(owners.get(module.partition(".")[0], ()))
    packages.discard("packaging")  # which was imported here, only to compare versions
    return {package: version_of(package) for package in packages}


def _check_not_replaced(versions_before: dict[str, str | None]) -> None:
    """Check that no package was replaced that this process had imported.

    Raises NotReady where one was: the process would mix both versions.
    """
    replaced = [name for name, version in versions_before.items() if version_of(name) != version]
    if replaced:
        raise NotReady(
            f"{', '.join(sorted(replaced))} was replaced while in use: restart the session "
            "(Runtime, Restart session), then run all cells again"
        )
