"""What is installed, what is missing, and what pip is asked for.

The distributions and wheels are these tests' own.
"""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools import find_packages

from qa_lib import packages
from qa_lib.lab.search.plan import plan
from qa_lib.model import build, qat
from qa_lib.paths import importing
from qa_lib.spec.machine import Machine
from qa_lib.spec.tasks import TASKS
from tests.material import ROOT, python, refused
from tests.tiny import planned

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINES = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
NAMES = [Requirement(line).name for line in LINES]


def metadata_of(name: str, version: str, requires=()) -> str:
    """Return the file METADATA of a distribution that requires these lines."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires), ""])


def make_installed(folder: Path, name: str, version: str, requires=(), source: str = "") -> None:
    """Make an installed distribution in a folder, with a module of its name."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(metadata_of(name, version, requires))
    (info / "INSTALLER").write_text("pip\n")
    module = f"{name.replace('-', '_')}.py"
    (folder / module).write_text(source)
    files = [module]
    for file in ("METADATA", "INSTALLER", "RECORD"):
        files.append(f"{info.name}/{file}")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def make_wheel(folder: Path, name: str, version: str, requires=(), source: str = "") -> None:
    """Make a wheel in a folder, with a module of its name."""
    stem = f"{name.replace('-', '_')}-{version}"
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        f"{name.replace('-', '_')}.py": source,
        f"{stem}.dist-info/METADATA": metadata_of(name, version, requires),
        f"{stem}.dist-info/WHEEL": tags,
    }
    record = f"{stem}.dist-info/RECORD"
    files[record] = "".join(f"{path},,\n" for path in [*files, record])
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


# What pyproject.toml says.


EXTRAS = PROJECT["project"]["optional-dependencies"]


def test_the_requirements_are_the_package_and_its_extras():
    lines = list(PROJECT["project"]["dependencies"])
    for use in packages.USES:
        lines += EXTRAS[use]
    assert sorted(lines) == sorted(LINES)


@pytest.mark.parametrize("use", packages.USES)
def test_an_extra_has_the_packages_of_its_use(use):
    names = [Requirement(line).name for line in EXTRAS[use]]
    assert sorted(names) == sorted(packages.USES[use])


def test_the_extra_of_developers_is_what_tests_take():
    for_tests = (ROOT / "tests" / "requirements.txt").read_text(encoding="utf-8").split()
    assert sorted(EXTRAS["dev"]) == sorted(for_tests)


def test_the_package_has_all_its_folders():
    listed = PROJECT["tool"]["setuptools"]["packages"]
    folders = find_packages(str(ROOT), include=["qa_lib*"])
    assert sorted(listed) == sorted([*folders, "qa_lib.files"])


PACKED_FILES = PROJECT["tool"]["setuptools"]["package-data"]["qa_lib.files"]


def test_the_package_has_the_reference_records_and_their_picture():
    groups = {task.reference for task in TASKS.values()}
    assert {f"runs/{group}.jsonl" for group in groups} <= set(PACKED_FILES)
    assert f"figures/{TASKS['qa'].reference}/ladder.png" in PACKED_FILES


@pytest.mark.parametrize("pattern", PACKED_FILES)
def test_a_file_that_the_package_is_to_have_exists(pattern):
    assert list(ROOT.glob(pattern))


# What is missing, and what does not fit.


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """Two installed packages that do not fit each other."""
    needs = ["stub-hub>=1.5,<2", "stub-gpu; extra == 'gpu'"]
    make_installed(tmp_path, "stub-models", "5.15", needs)
    make_installed(tmp_path, "stub-hub", "2.4")
    monkeypatch.syspath_prepend(tmp_path)


def test_what_is_missing_and_what_does_not_fit_another_package_is_found(stubs):
    lines = ("stub-models>=5", "stub-hub>=1.31,<3", "stub-none>=1")
    assert packages.misfits([Requirement(line) for line in lines]) == [
        "stub-none is missing",
        "stub-hub 2.4 is not <2,>=1.5, which stub-models 5.15 takes",
    ]


def test_what_an_extra_needs_is_found(stubs):
    assert "stub-gpu is missing" in packages.misfits([Requirement("stub-models[gpu]")])


@pytest.mark.parametrize("torchao", ["0.10.0", "0.9.0"])
def test_a_torchao_that_peft_refuses_is_named(monkeypatch, torchao):
    versions = {"peft": "0.20.0", "torchao": torchao}
    monkeypatch.setattr(packages, "version_of", versions.get)
    fault = f"peft 0.20.0 refuses torchao {torchao}: type pip install -U"
    assert packages.adapters_fault().startswith(fault)


@pytest.mark.parametrize(
    "versions",
    [
        {"peft": "0.20.0", "torchao": "0.16.0"},
        {"peft": "0.20.0", "torchao": "1.0.0"},
        {"peft": "0.20.0"},
        {"torchao": "0.10.0"},
    ],
)
def test_a_torchao_that_peft_takes_or_that_is_not_beside_it_is_no_fault(monkeypatch, versions):
    monkeypatch.setattr(packages, "version_of", versions.get)
    assert packages.adapters_fault() == ""


@pytest.fixture
def old_torchao(monkeypatch):
    """A torchao that is too old to quantize, and can be imported."""
    module = types.ModuleType("torchao")
    module.quantization = module
    module.qat = module
    for name in ("torchao", "torchao.quantization", "torchao.quantization.qat"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(qat, "version_of", {"torchao": "0.10.0"}.get)
    monkeypatch.setattr(packages, "version_of", {"torchao": "0.10.0"}.get)


def test_a_torchao_that_cannot_quantize_is_named(old_torchao):
    refused("need torchao 0.16 or newer, here 0.10.0: pip install -U torchao", qat._torchao)


def test_quantized_weights_without_torchao_are_skipped():
    (spec,) = plan(["A1-int8"], "smoke", data="synthetic:40", machine=Machine(compiler=True))
    assert spec.skip == "needs the package torchao, 0.16 or newer: type pip install -U torchao"


FAULT = "peft 0.20.0 refuses torchao 0.10.0: type pip install -U torchao"


def test_lora_beside_such_a_torchao_is_skipped_and_other_variants_are_not():
    machine = Machine(peft=True, compiler=True, adapters_fault=FAULT)
    specs = plan(["A1", "B1", "B2"], "smoke", data="synthetic:40", machine=machine)
    assert [spec.skip for spec in specs] == [None, FAULT, None]


def test_lora_beside_such_a_torchao_is_one_line_where_the_model_is_built(monkeypatch):
    monkeypatch.setattr(build, "adapters_fault", lambda: FAULT)
    refused("peft 0.20.0 refuses torchao", build.build_model, planned("B1"))


def test_lora_without_peft_is_one_line_where_the_model_is_built(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("pip install peft", build.build_model, planned("B1"))


def test_lora_without_peft_is_skipped():
    (spec,) = plan(["B1"], "smoke", data="synthetic:40", machine=Machine(compiler=True))
    assert spec.skip == "needs the package peft: type pip install peft"


def test_a_python_without_papermill_says_what_to_type(monkeypatch):
    monkeypatch.setattr(packages, "is_importable", lambda name: name != "papermill")
    said = refused("papermill missing; type pip install", packages.check_runner)
    assert "`run` trains without a notebook" in said


def test_a_sweep_without_papermill_starts_nothing(tmp_path, monkeypatch, typed):
    monkeypatch.setattr(packages, "is_importable", lambda name: name != "papermill")
    said = typed(f"sweep --preset smoke --variants A1 --runs {tmp_path}", code=2)
    assert "papermill missing" in said
    assert list(tmp_path.iterdir()) == []


# Installing, in Colab: an environment of stub distributions, and pip without a network.

MODELS = """from importlib.metadata import version
if int(version("huggingface_hub").split(".")[0]) >= 2:
    raise ImportError("huggingface-hub>=1.5.0,<2.0 is required")
"""
HUB_1, HUB_2 = ["huggingface_hub>=1.5,<2"], ["huggingface_hub>=2.1,<3"]


PURELIB = Path(sysconfig.get_path("purelib"))


class Colab:
    """A Python with what Colab has, as far as that matters here, and an index of a few wheels."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = folder / "index"
        self.checkout = folder / "lab"
        self.tools = folder / "tools"
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("*/site-packages"))
        self._install_what_colab_has()
        self._fill_index()
        self._make_checkout()
        self._link_tools()
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{self.checkout}:{self.tools}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def _install_what_colab_has(self) -> None:
        make_installed(self.site, "torch", "2.11.0+cu128")
        make_installed(self.site, "transformers", "5.15.0", HUB_1, MODELS)
        make_installed(self.site, "huggingface_hub", "1.27.0")
        make_installed(self.site, "peft", "0.20.0", ["transformers"])
        make_installed(self.site, "torchao", "0.10.0")
        make_installed(self.site, "google-colab", "1.0.0")

    def _fill_index(self) -> None:
        make_wheel(self.index, "transformers", "5.23.0", HUB_2)
        make_wheel(self.index, "transformers", "5.15.0", HUB_1, MODELS)
        make_wheel(self.index, "huggingface_hub", "2.4.0")
        make_wheel(self.index, "huggingface_hub", "1.40.0")
        make_wheel(self.index, "torchao", "0.18.0")
        make_wheel(self.index, "torch", "2.13.0")
        for line in LINES:
            requirement = Requirement(line)
            name = requirement.name
            if name not in ("torch", "transformers", "huggingface_hub"):
                least = next(s.version for s in requirement.specifier if s.operator == ">=")
                requires = ["transformers"] if name == "peft" else []
                make_wheel(self.index, name, least, requires)

    def _make_checkout(self) -> None:
        """Make what the setup cell needs of a checkout; modules that it imports last are empty."""
        for part in packages.PARTS:
            path = self.checkout / f"{part.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        for name in ("__init__", "loaded", "packages", "paths", "errors", "cell_clock"):
            shutil.copy(ROOT / "qa_lib" / f"{name}.py", self.checkout / "qa_lib")
        (self.checkout / "requirements.txt").write_text("\n".join(LINES))

    def _link_tools(self) -> None:
        """Lend it pip and packaging of the tests' Python, without their being installed there."""
        self.tools.mkdir()
        for name in ("pip", "packaging"):
            (self.tools / name).symlink_to(PURELIB / name)

    def run(self, program: str, **more: str) -> subprocess.CompletedProcess:
        command = [self.python, "-c", program]
        environment = self.environment | more
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )

    def prepare(self, **more: str) -> subprocess.CompletedProcess:
        """What the setup cell does."""
        return self.run("from qa_lib.packages import prepare_notebook; prepare_notebook()", **more)

    def version(self, name: str) -> str | None:
        """Return the version of a package that is installed once; None where it is not."""
        stem = name.replace("-", "_")
        versions = [path.name.split("-")[1] for path in self.site.glob(f"{stem}-*.dist-info")]
        assert len(versions) < 2
        return versions[0].removesuffix(".dist") if versions else None


needs_pip = pytest.mark.skipif(not (PURELIB / "pip").is_dir(), reason="no pip here")


@pytest.fixture
def colab(tmp_path):
    return Colab(tmp_path)


@needs_pip
def test_the_setup_cell_leaves_colab_with_packages_that_go_together(colab):
    done = colab.prepare()
    assert (done.returncode, done.stderr) == (0, "")
    assert colab.version("torch") == "2.11.0+cu128"
    assert colab.version("transformers") == "5.15.0"
    assert colab.version("huggingface_hub") == "1.40.0"
    assert colab.version("torchao") == "0.18.0", "peft refuses the one that was there"
    assert [name for name in NAMES if colab.version(name) is None] == []
    again = colab.prepare(PIP_FIND_LINKS="/nowhere")
    assert (again.returncode, again.stderr) == (0, ""), "nothing is missing, so pip is not asked"


@needs_pip
def test_packages_that_fit_one_by_one_and_not_each_other_are_mended(colab):
    """Every line of the requirements is met here, and transformers cannot be imported."""
    assert colab.prepare().returncode == 0
    hub = "huggingface_hub==2.4.0"
    assert colab.run(f"from pip import main; main(['install', '-q', '{hub}'])").returncode == 0
    assert colab.version("huggingface_hub") == "2.4.0"
    done = colab.prepare()
    assert (done.returncode, done.stderr) == (0, "")
    assert colab.version("huggingface_hub") == "1.40.0"


@needs_pip
def test_two_setup_cells_at_once_install_once(colab):
    log = colab.folder / "calls"
    pip = colab.tools / "pip"
    real = pip.readlink()
    pip.unlink()
    pip.mkdir()
    for path in real.iterdir():  # all of pip but its beginning, which notes that it was called
        if path.name != "__main__.py":
            (pip / path.name).symlink_to(path)
    noted = f"open({str(log)!r}, 'a').write('called\\n')"
    start = f"{noted}\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n"
    (pip / "__main__.py").write_text(start)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: colab.prepare(), range(2)))
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert log.read_text() == "called\n"


@needs_pip
def test_what_cannot_be_imported_afterwards_is_one_line(colab):
    source = "raise ImportError('numpy has no trapz')"
    make_wheel(colab.index, "seaborn", "0.13.9", source=source)
    done = colab.prepare()
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.endswith("NotReady: seaborn cannot be imported: numpy has no trapz")


@needs_pip
def test_what_pip_cannot_find_is_one_line(colab):
    done = colab.prepare(PIP_FIND_LINKS="/nowhere")
    assert "NotReady: pip could not install what this notebook needs: No matching" in done.stderr


@needs_pip
def test_a_package_that_was_replaced_while_in_use_asks_for_a_restart(colab):
    done = colab.run(
        "import huggingface_hub\nfrom qa_lib.packages import prepare_notebook; prepare_notebook()"
    )
    assert "huggingface_hub was replaced while in use: restart the session" in done.stderr


def test_outside_colab_one_line_says_what_is_missing_and_nothing_is_installed(colab):
    before = sorted(path.name for path in colab.site.iterdir())
    done = colab.run(
        "from qa_lib import packages\n"
        "real = packages.version_of\n"
        "packages.version_of = lambda name: None if name == 'google-colab' else real(name)\n"
        "packages.prepare_notebook()"
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0
    assert line.endswith("type %pip install -r requirements.txt")
    assert "papermill is missing" in line
    assert "gradio" not in line
    assert "peft" not in line
    assert sorted(path.name for path in colab.site.iterdir()) == before


def test_a_notebook_that_a_driver_executes_never_calls_pip(colab):
    done = colab.prepare(PIP_FIND_LINKS="/nowhere", QA_LIB_PREPARED="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ipython_shows_the_one_line_of_what_is_not_ready():
    assert packages.NotReady("a line")._render_traceback_() == ["a line"]


def test_children_import_the_library_of_a_checkout_from_any_folder(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from qa_lib.lab.launch.probe import probe; print(probe()[0].hardware)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("module", "use"), [("gradio", "app"), ("peft", "adapters"), ("PIL", "notebooks")]
)
def test_a_wheel_names_all_packages_that_the_use_of_a_module_takes(monkeypatch, module, use):
    monkeypatch.setattr(packages, "IS_CHECKOUT", False)
    said = packages.how_to_get_module(module)
    assert said.startswith("type pip install ")
    names = {Requirement(word).name for word in shlex.split(said)[3:]}
    assert names == set(packages.USES[use])


# A wheel, and a Python that lacks what training does not need.


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """What a wheel of this checkout has, in a folder that nobody may write to.

    The wheel is built without a network.
    """
    if find_spec("setuptools.build_meta") is None:
        pytest.skip("no setuptools here")
    folder = tmp_path_factory.mktemp("wheel")
    source, site = folder / "source", folder / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("qa_lib", "notebooks"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in PACKED_FILES:
        if name.startswith(("runs/", "figures/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    program = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    python("-c", program, cwd=source)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    for path in [site, *site.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    yield site
    for path in [site, *site.rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)


def test_a_wheel_has_its_notebooks_records_and_picture(unpacked, tmp_path):
    program = """
from qa_lib import paths
from qa_lib.lab import quickstart
from qa_lib.records.archive import read_runs
from qa_lib.lab.search.history import COMMITTED
from qa_lib.lab.sweep import notebook_of
from qa_lib.spec.variants import FAMILIES, TASKS, find_family
assert not paths.IS_CHECKOUT
for task in TASKS.values():
    assert read_runs(COMMITTED, task.reference)
for letter in FAMILIES:
    assert (paths.ROOT / notebook_of(find_family(letter)[0])).is_file()
assert (paths.ROOT / "notebooks" / "report.ipynb").is_file()
assert (paths.ROOT / "figures" / quickstart.REFERENCE / "ladder.png").is_file()
print(paths.ROOT)
"""
    done = python("-c", program, cwd=tmp_path, PYTHONPATH=str(unpacked))
    assert done.stdout.strip() == str(unpacked / "qa_lib" / "files")


@pytest.mark.slow
def test_a_wheel_sweeps_through_its_notebooks_and_reports_into_the_current_folder(
    unpacked, tmp_path
):
    environment = {"PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}
    words = "-m qa_lib sweep --preset smoke --variants A1".split()
    assert "sweep: 1 ok" in python(*words, cwd=tmp_path, **environment).stdout
    python("-m", "qa_lib", "report", cwd=tmp_path, **environment)
    assert list(tmp_path.glob("runs/cpu-smoke/A1-*/notebook.ipynb"))
    assert (tmp_path / "figures" / "cpu-smoke" / "report.md").is_file()


# A module that hides some packages from Python, and from whoever asks for their versions.
HIDE_PACKAGES = """
import sys
from importlib import metadata
from importlib.abc import MetaPathFinder

NAMES = {"gradio", "jupyter", "peft", "pip"}

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
found = metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name in NAMES:
        raise metadata.PackageNotFoundError(name)
    return found(cls, name)

metadata.Distribution.from_name = classmethod(from_name)
"""


@pytest.fixture
def lean(tmp_path):
    """The environment variables of a Python without gradio, jupyter, peft and pip.

    It has papermill and ipykernel.
    """
    (tmp_path / "lean").mkdir()
    (tmp_path / "lean" / "sitecustomize.py").write_text(HIDE_PACKAGES)
    return {"PYTHONPATH": str(tmp_path / "lean"), "OMP_NUM_THREADS": "1"}


def test_a_sweep_says_before_its_first_run_what_is_missing(lean, tmp_path):
    words = ["sweep", "--preset", "smoke", "--variants", "B1", "B1-all"]
    done = python("-m", "qa_lib", *words, "--runs", tmp_path / "runs", **lean)
    lines = done.stdout.splitlines()
    reason = "needs the package peft: type pip install peft"
    assert lines[:2] == [
        "sweep: 2 runs, 0 finished, 2 to run",
        f"sweep: B1, B1-all will be skipped: {reason}",
    ]
    assert lines[-1] == "sweep: 2 skipped"
    records = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/record.json")]
    assert [record["error"]["message"] for record in records] == [reason, reason]


@pytest.mark.slow
def test_a_sweep_without_peft_and_an_index_skips_what_needs_it_and_runs_the_rest(lean, tmp_path):
    words = ["sweep", "--preset", "smoke", "--variants", "A1", "B1", "--runs", tmp_path / "runs"]
    done = python("-m", "qa_lib", *words, **lean, PIP_NO_INDEX="1")
    assert done.stdout.splitlines()[-1] == "sweep: 1 ok, 1 skipped"


# Parts of the setup cell by themselves, with versions that these tests say.


@pytest.fixture
def versions(monkeypatch):
    """The version of each installed package, for tests to set."""
    found = {}
    monkeypatch.setattr(packages, "version_of", found.get)
    return found


@pytest.fixture
def commands(monkeypatch):
    """The commands that are run, which do nothing; tests set how they end."""
    done = types.SimpleNamespace(returncode=0, stderr="", commands=[])

    def run(command, **_):
        done.commands.append(command)
        return done

    monkeypatch.setattr(packages.subprocess, "run", run)
    return done


def refused_as_not_ready(call) -> str:
    """Return the message of the NotReady that a call raises."""
    with pytest.raises(packages.NotReady) as caught:
        call()
    return str(caught.value)


def test_a_module_of_a_package_that_is_not_here_cannot_be_imported():
    assert packages.is_importable("json.decoder")
    assert not packages.is_importable("no_such_package")
    assert not packages.is_importable("no_such_package.module")


def test_no_name_of_a_module_is_that_of_one_that_can_be_imported():
    """Python raises ValueError for an empty name, and an ImportError says none at times."""
    assert not packages.is_importable("")


def test_a_version_before_its_release_fits_what_takes_it(versions, monkeypatch):
    versions["stub"] = "2.11.0a0+git1"
    monkeypatch.setattr(packages.metadata, "requires", lambda name: None)
    assert packages.misfits([Requirement("stub>=2.10,<3")]) == []


def test_needs_that_nobody_can_read_any_more_and_those_of_other_machines_are_passed_over(
    versions, monkeypatch
):
    versions["stub"] = "1"
    needs = ["odd (>=1.*dev", "none; sys_platform == 'other'", "missed", "missed"]
    monkeypatch.setattr(packages.metadata, "requires", lambda name: needs)
    assert packages.misfits([Requirement("stub")]) == ["missed is missing"]


def test_packages_that_need_each_other_are_looked_at_once(versions, monkeypatch):
    versions.update({"one-stub": "1", "other_stub": "1"})
    needs = {"one-stub": ["other_stub"], "other_stub": ["one-stub"]}
    monkeypatch.setattr(packages.metadata, "requires", needs.get)
    assert packages.misfits([Requirement("one-stub")]) == []


def test_the_uses_that_are_named_add_their_packages_and_no_others():
    names = {requirement.name for requirement in packages.requirements(["app"])}
    assert set(packages.USES["app"]) <= names
    assert names.isdisjoint({*packages.USES["notebooks"], *packages.USES["adapters"]})
    assert {"torch", "transformers"} <= names


def test_a_torch_that_is_here_is_left_alone(versions):
    versions["torch"] = "9.0"
    names = [requirement.name for requirement in packages._requirements_to_install()]
    assert "torch" not in names
    assert "transformers" in names


def test_a_torch_that_was_not_tested_is_told(versions, capsys):
    versions["torch"] = "9.0"
    packages._say_if_torch_is_untested()
    assert capsys.readouterr().err.startswith("torch 9.0 is left alone, but this was tested with ")


def test_a_torch_that_was_tested_is_left_alone_without_a_word(versions, capsys):
    versions["torch"] = "2.11.0+cu128"
    packages._requirements_to_install()
    assert capsys.readouterr().err == ""


def test_where_there_is_no_torch_it_is_required(versions):
    assert "torch" in [requirement.name for requirement in packages._requirements_to_install()]


def test_pip_keeps_torch_and_upgrades_a_torchao_that_peft_refuses(versions, commands):
    versions.update({"torch": "2.11.0+cu128", "torchao": "0.10.0", "peft": "0.20.0"})
    packages._install()
    (command,) = commands.commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[-2:] == ["torch==2.11.0+cu128", f"torchao>={packages.TORCHAO}"]


def test_of_pips_errors_the_last_is_said(versions, commands):
    commands.returncode, commands.stderr = 1, "x\nERROR: one\nERROR: two\nhint\n"
    assert refused_as_not_ready(packages._install).endswith("this notebook needs: two")


@pytest.mark.parametrize(("stderr", "said"), [("one\n two \n", "two"), ("", "pip ended with 1")])
def test_a_pip_that_names_no_error_is_told_by_its_last_line(stderr, said, versions, commands):
    commands.returncode, commands.stderr = 1, stderr
    assert refused_as_not_ready(packages._install).endswith(f"this notebook needs: {said}")


def test_what_is_imported_in_the_end_is_every_package_and_part_and_a_torchao(versions, commands):
    versions["torchao"] = "0.16"
    packages._check_imports()
    (command,) = commands.commands
    names = command[3:]
    assert set(names) == {*NAMES, "torchao", *packages.PARTS}
    del versions["torchao"]
    packages._check_imports()
    assert "torchao" not in commands.commands[1]


def test_a_part_that_cannot_be_imported_is_said_in_the_last_line(versions, commands):
    commands.returncode, commands.stderr = 1, "a warning\nx cannot be imported: why\n"
    assert refused_as_not_ready(packages._check_imports) == "x cannot be imported: why"


def test_a_python_that_ends_without_a_word_while_it_imports_is_told_so(versions, commands):
    commands.returncode = -11
    assert refused_as_not_ready(packages._check_imports) == "Python ended with -11"


@pytest.fixture
def steps(monkeypatch, versions):
    """The steps that prepare_notebook takes, in order, where nothing is missing."""
    taken = []
    monkeypatch.delenv(packages.PREPARED, raising=False)
    for name in (
        "show_cell_clock",
        "_go_to_the_checkout",
        "_say_what_is_missing",
        "_versions_loaded",
        "_install",
        "_check_imports",
        "_check_not_replaced",
    ):
        monkeypatch.setattr(packages, name, lambda *_, name=name: taken.append(name))
    monkeypatch.setattr(packages, "misfits", lambda needs: [])
    return taken


INSTALLS = ["_versions_loaded", "_install", "_check_imports", "_check_not_replaced"]
BEGINS = ["show_cell_clock", "_go_to_the_checkout"]


@pytest.mark.parametrize(
    ("here", "install", "expected"),
    [
        ({}, None, [*BEGINS, "_say_what_is_missing"]),
        ({}, True, BEGINS),
        ({"google-colab": "1"}, None, BEGINS),
        ({"google-colab": "1"}, False, [*BEGINS, "_say_what_is_missing"]),
        ({"peft": "0.20", "torchao": "0.10"}, True, [*BEGINS, *INSTALLS]),
    ],
)
def test_a_notebook_installs_what_does_not_fit_in_colab_or_when_it_is_asked_to(
    here, install, expected, steps, versions
):
    versions.update(here)
    packages.prepare_notebook(install)
    assert steps == expected


def test_a_python_is_free_for_others_after_an_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(ValueError, match="no pip"), packages._environment_lock():
        raise ValueError("no pip")
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody holds it
    os.close(folder)


def test_nothing_is_done_in_a_notebook_that_a_driver_executes(steps, monkeypatch):
    monkeypatch.setenv(packages.PREPARED, "1")
    packages.prepare_notebook(install=True)
    assert steps == []


def test_what_decides_what_fits_may_be_replaced_while_in_use(monkeypatch):
    owners = {"packaging": ["packaging"], "torch": ["torch"], "not_loaded": ["not-loaded"]}
    monkeypatch.setattr(packages.metadata, "packages_distributions", lambda: owners)
    assert packages._versions_loaded().keys() == {"torch"}


def test_what_was_replaced_while_in_use_is_named_in_order(versions):
    versions.update({"b": "2", "a": "2", "same": "1"})
    before = {"b": "1", "a": "1", "same": "1"}
    said = refused_as_not_ready(lambda: packages._check_not_replaced(before))
    assert said.startswith("a, b was replaced while in use: restart")
    packages._check_not_replaced({"same": "1"})


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A checkout with a folder of notebooks, in which this process works for a test."""
    root = tmp_path / "lab"
    (root / "notebooks").mkdir(parents=True)
    monkeypatch.setattr(packages, "ROOT", root)
    monkeypatch.setattr(packages, "IS_CHECKOUT", True)
    monkeypatch.setattr(sys, "path", ["..", "/elsewhere", "lab"])
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize(
    ("begins", "ends"), [("notebooks", "."), ("..", "."), (".", "."), ("/", "/")]
)
def test_a_notebook_goes_to_the_root_of_its_checkout_and_leaves_other_folders(lab, begins, ends):
    os.chdir(lab / begins)
    packages._go_to_the_checkout()
    assert Path.cwd() == (lab / ends).resolve()
    assert sys.path == ["/elsewhere"]


def test_a_notebook_of_an_installed_package_stays_where_it_is(lab, monkeypatch):
    monkeypatch.setattr(packages, "IS_CHECKOUT", False)
    os.chdir(lab / "notebooks")
    packages._go_to_the_checkout()
    assert Path.cwd() == lab / "notebooks"


def test_a_checkout_installs_all_and_says_how_from_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT / "notebooks")
    assert packages.how_to_install(["peft"]) == "pip install -r ../requirements.txt"


def test_an_installed_package_names_the_versions_and_a_package_of_none(monkeypatch):
    monkeypatch.setattr(packages, "IS_CHECKOUT", False)
    (line,) = (line for line in LINES if line.startswith("peft"))
    assert packages.how_to_install(["peft", "odd"]) == f"pip install {shlex.quote(line)} odd"


def test_kernels_have_an_environment_that_is_this_processes_again_afterwards(monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "/a")
    monkeypatch.delenv(packages.PREPARED, raising=False)
    before = dict(os.environ)
    with packages.environment_of_jupyter_kernels():
        assert os.environ[packages.PREPARED] == "1"
        assert os.environ["JUPYTER_PATH"] == os.pathsep.join([str(packages.JUPYTER_KERNELS), "/a"])
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
        os.environ["LEFT_BEHIND"] = "1"
    assert dict(os.environ) == before


def test_the_environment_comes_back_after_kernels_that_failed(monkeypatch):
    before = dict(os.environ)
    with pytest.raises(ValueError, match="no kernel"), packages.environment_of_jupyter_kernels():
        raise ValueError("no kernel")
    assert dict(os.environ) == before


def test_kernels_within_kernels_name_their_folder_once(monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", "/a")
    with packages.environment_of_jupyter_kernels():
        once = os.environ["JUPYTER_PATH"]
        assert packages.jupyter_path() == once


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, str(ROOT)),
        ({"PYTHONPATH": ""}, str(ROOT)),
        ({"PYTHONPATH": "/a"}, os.pathsep.join([str(ROOT), "/a"])),
    ],
)
def test_a_child_of_a_checkout_looks_there_first_and_then_where_it_did(before, after):
    given = {"X": "1", **before}
    assert importing(given) == {"X": "1", "PYTHONPATH": after}
    assert given == {"X": "1", **before}


def test_the_command_of_a_checkout_whose_path_has_a_blank_can_be_typed(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "ROOT", tmp_path / "my lab")
    assert packages.how_to_install([]) == "pip install -r '../my lab/requirements.txt'"
