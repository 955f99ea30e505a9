"""A checkpoint is gone on from by the code and the settings that it is of, and by no others."""

import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from qa_lib import loaded
from qa_lib.lab.launch.anywhere import fit
from qa_lib.loaded import APART, CODE, LoadedCode, file_digests, said_of_changes
from qa_lib.paths import PACKAGE
from qa_lib.records.record import read_record
from qa_lib.run import notes
from qa_lib.run.recording import recording
from qa_lib.train import checkpoint as checkpoints
from qa_lib.train.checkpoint import CHECKPOINT, Checkpoint
from qa_lib.train.parallel.data_parallel import NoParallel
from qa_lib.train.parallel.process_group import ProcessGroup
from tests.conftest import slow
from tests.material import ROOT, python, wait_for
from tests.tiny import planned, quiet

PLACES = sorted(CODE.files)
SPEC = planned()


def copied_package(place: Path) -> Path:
    """A copy of the package, which tests may edit; each leaves it as it was."""
    left_out = shutil.ignore_patterns("__pycache__", ".*")
    return shutil.copytree(ROOT / "qa_lib", place / "qa_lib", ignore=left_out)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return copied_package(tmp_path_factory.mktemp("code"))


def edit(path: Path) -> bytes:
    """Change one byte of a file, or give an empty one a byte; what it was before."""
    before = path.read_bytes()
    path.write_bytes(bytes([before[0] ^ 1]) + before[1:] if before else b"#")
    return before


class Run:
    """A run of a model of two weights, whose processes have loaded the code of `package`."""

    def __init__(self, folder: Path, package: Path):
        self.folder, self.package = folder, package

    def begin(self, **settings) -> Checkpoint:
        """A new process of the run, at its start, on a machine that makes these of its settings."""
        spec = dataclasses.replace(SPEC, settings=dataclasses.replace(SPEC.settings, **settings))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        alone = NoParallel(model, ProcessGroup(torch.device("cpu")), spec.settings)
        code = LoadedCode(self.package)
        return Checkpoint(self.folder, spec, model, optimizer, scaler, alone, code)


@pytest.fixture
def run(tmp_path, package, monkeypatch):
    monkeypatch.setattr(checkpoints, "code_version", lambda: {"commit": "a1" * 20})  # asks git
    return Run(tmp_path, package)


def test_a_run_of_the_same_code_goes_on(run):
    run.begin().save(7)
    assert run.begin().load() == (7, None)


def refused(loaded: tuple[int, str | None]) -> str:
    """Why a run did not go on from its checkpoint."""
    step, note = loaded
    assert step == 0 and note.startswith("began anew, since its checkpoint ") and "\n" not in note
    return note


@pytest.fixture
def edited(package):
    """Edits a file of the package, which is as it was after the test."""
    before = {}

    def call(place: str) -> Path:
        before.setdefault(place, (package / place).read_bytes())
        edit(package / place)
        return package / place

    yield call
    for place, content in before.items():
        (package / place).write_bytes(content)


# A file of code, one of data, and one of no bytes; any other only in `make test-all`.
FEW = ("train/loop.py", "train/deepspeed.json", "run/__init__.py")
ANY = [*FEW, *(slow(place) for place in PLACES if place not in FEW)]


def test_one_changed_byte_of_any_file_is_another_digest(package, edited):
    before = LoadedCode(package)
    digests = set()
    for place in PLACES:
        edited(place)
        digests.add(LoadedCode(package).digest)
    assert before.changed() == PLACES
    assert len(digests - {before.digest}) == len(PLACES)


@pytest.mark.parametrize("place", ANY)
def test_one_changed_byte_of_any_file_is_other_code(run, package, edited, place):
    before = LoadedCode(package)
    run.begin().save(7)
    edited(place)
    assert before.changed() == [place]
    assert "is of other code (commit" in refused(run.begin().load())


@pytest.mark.parametrize("place", ANY)
def test_a_file_that_changes_in_a_process_that_resumes_is_named(run, edited, place):
    run.begin().save(7)
    process = run.begin()
    edited(place)
    said = f"needs code that has changed since this process began ({place})"
    assert said in refused(process.load())


# The moments of an edit, each with a module and with a file of data.
KINDS = pytest.mark.parametrize("place", ["train/loop.py", "train/deepspeed.json"])


@KINDS
def test_an_edit_that_is_undone_before_a_run_is_resumed_counts(run, package, edited, place):
    before = (package / place).read_bytes()
    edited(place)
    run.begin().save(7)
    (package / place).write_bytes(before)
    assert "is of other code (commit" in refused(run.begin().load())


@KINDS
def test_an_edit_before_the_first_checkpoint_counts(run, edited, place):
    """What was edited may have been imported, or not."""
    process = run.begin()
    edited(place)
    process.save(7)
    assert "is of other code (commit" in refused(run.begin().load())


@KINDS
def test_an_edit_that_is_undone_before_the_checkpoint_counts(run, package, edited, place):
    before = (package / place).read_bytes()
    process = run.begin()
    edited(place)
    process.save(7)
    (package / place).write_bytes(before)
    process.save(8)
    said = f"is of a process whose code changed while it ran ({place})"
    assert said in refused(run.begin().load())


def test_a_file_that_is_new_is_an_edit(run, package):
    new = package / "train" / "loops.py"
    run.begin().save(7)
    new.write_text("")
    try:
        refused(run.begin().load())
    finally:
        new.unlink()


def test_a_file_that_has_another_name_is_an_edit(run, package):
    old = package / "train" / "loop.py"
    new = package / "train" / "loops.py"
    run.begin().save(7)
    old.rename(new)
    try:
        refused(run.begin().load())
    finally:
        new.rename(old)


def test_every_file_of_the_library_is_code_and_none_of_the_lab():
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    written_for_people = {"run/model_card.md"}
    expected = {place for place in files if "__pycache__" not in place and place[0] != "."}
    expected -= {place for place in files if place.startswith("lab/")} | written_for_people
    assert CODE.files.keys() == expected


def test_data_files_beside_code_are_code():
    assert {"train/deepspeed.json", "data/english.json"} <= CODE.files.keys()


NO_CODE = [
    ".ipynb_checkpoints/loop-checkpoint.py",
    ".loop.py.swp",
    ".#loop.py",
    "loop.py~",
    "#loop.py#",
    "loop.py.orig",
    "loop.py.rej",
    "4913",
    "__pycache__/loop.cpython-311.pyc",
    ".DS_Store",
    ".idea/x/y.py",
    "Untitled.ipynb",
]


@pytest.mark.parametrize("name", NO_CODE)
@pytest.mark.parametrize("below", [".", "train", "kernels"])
def test_what_editors_and_jupyter_leave_is_no_code(run, package, below, name):
    path = package / below / name
    process = run.begin()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    try:
        process.save(7)
        assert run.begin().load() == (7, None)
    finally:
        path.unlink()
        if path.parent.name.startswith((".", "__")):
            shutil.rmtree(package / below / Path(name).parts[0])


ODD = {
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_ends_no_run(run, package, kind):
    path = package / "train" / "odd.py"
    ODD[kind](path)
    try:
        run.begin().save(7)
        assert run.begin().load() == (7, None)
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_name_that_is_no_utf_8_and_a_link_to_its_own_folder_are_borne(run, package):
    odd, loop = package / os.fsdecode(b"\xff.py"), package / "train" / "self"
    process = run.begin()
    odd.write_text("x")
    loop.symlink_to(".")
    try:
        process.save(7)
        assert "\ufffd" not in refused(run.begin().load())
        run.begin().save(7)
        assert run.begin().load() == (7, None)
    finally:
        odd.unlink()
        loop.unlink()


def test_code_in_a_linked_folder_is_code(package, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.py").write_text("")
    link = package / "linked"
    link.symlink_to(tmp_path / "elsewhere")
    try:
        assert "linked/x.py" in file_digests(package)
    finally:
        link.unlink()


def test_what_a_machine_makes_of_the_settings_is_compared(run):
    run.begin().save(7)
    note = refused(run.begin(dropout="none", micro_batch=4).load())
    assert "is of other settings: dropout is none on this machine (it began with philox)" in note
    assert "micro_batch is 4" in note


def test_processes_of_other_code_leave_no_checkpoint_that_is_believed(run, monkeypatch):
    process = run.begin()
    gather = process.ranks.gather
    monkeypatch.setattr(
        process.ranks,
        "gather",
        lambda own: [own, ("of another host", [])] if isinstance(own, tuple) else gather(own),
    )
    process.save(7)
    assert "is of other code" in refused(run.begin().load())


def test_a_checkpoint_that_one_process_does_not_believe_is_gone_on_from_by_none(run, monkeypatch):
    run.begin().save(7)
    process = run.begin()
    monkeypatch.setattr(process.ranks, "gather", lambda own: [own, (True, "is of other code")])
    assert "is of other code" in refused(process.load())


def test_a_checkpoint_that_one_process_does_not_see_is_gone_on_from_by_none(run, monkeypatch):
    run.begin().save(7)
    process = run.begin()
    monkeypatch.setattr(process.ranks, "gather", lambda own: [own, (False, None)])
    assert "is not there for all processes of the run" in refused(process.load())


def test_a_checkpoint_that_another_process_alone_sees_is_gone_on_from_by_none(run, monkeypatch):
    process = run.begin()
    monkeypatch.setattr(process.ranks, "gather", lambda own: [own, (True, None)])
    assert "is not there for all processes of the run" in refused(process.load())


def test_a_refused_checkpoint_is_set_aside_by_the_first_process_alone(run):
    run.begin().save(7)
    for is_first in (False, True):
        process = run.begin(dropout="none")
        process.ranks.first = is_first
        refused(process.load())
        assert (run.folder / CHECKPOINT).exists() is not is_first
    assert (run.folder / "checkpoint.refused").exists()


@pytest.mark.parametrize(("alike", "drawn_by"), [(False, 1), (True, 0)])
def test_a_process_draws_on_from_its_own_random_numbers_unless_all_draw_alike(
    alike, drawn_by, run, monkeypatch
):
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (3, 4)]
    first = run.begin()
    gather = first.ranks.gather

    def gather_states(own):
        return [{"cpu": state} for state in states] if "cpu" in own else gather(own)

    monkeypatch.setattr(first.ranks, "gather", gather_states)
    first.save(7)
    second = run.begin()
    second.ranks.rank = 1
    second.strategy.draws_alike = alike
    with torch.random.fork_rng(devices=[]):
        second.load()
        assert torch.equal(torch.get_rng_state(), states[drawn_by])


def test_a_library_that_an_older_checkpoint_does_not_name_is_told(run, monkeypatch):
    run.begin().save(7)
    now = checkpoints.libraries() | {"new": "1.0"}
    monkeypatch.setattr(checkpoints, "libraries", lambda: now)
    assert run.begin().load() == (7, "went on under new 1.0 (it began with None)")


def test_a_checkpoint_has_all_that_the_rest_of_the_run_depends_on(run):
    """The scale of the loss, and what an optimizer keeps in numbers, are no tensors."""
    first = run.begin()
    first.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    first.scaler.scale(torch.ones(1))
    for parameter in first.model.parameters():
        first.optimizer.state[parameter] |= {"count": 5, "mean": torch.full((1,), 0.25)}
    first.save(7)
    second = run.begin()
    second.scaler = torch.amp.GradScaler("cpu")
    assert second.load() == (7, None)
    assert second.scaler.get_scale() == 64.0
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert second.optimizer.state[theirs] == {"count": 5, "mean": torch.tensor([0.25])}


def test_a_checkpoint_has_no_frozen_weights(run):
    process = run.begin()
    process.model.weight.requires_grad_(False)
    process.save(7)
    with safe_open(run.folder / CHECKPOINT, "pt") as stored:
        assert {name for name in stored.keys() if "model" in name} == {"model.bias"}  # noqa: SIM118


def test_the_record_says_which_code_changed_while_the_run_was_at_work(
    package, tmp_path, monkeypatch
):
    code = LoadedCode(package)
    before = edit(package / "train" / "optim.py")
    monkeypatch.setattr(notes, "CODE", code)
    spec = planned(sizes={"steps": 2, "epochs": None, "measure_from": 1})
    entry = fit(spec, tmp_path / "runs", say=quiet)
    (package / "train" / "optim.py").write_bytes(before)
    said = "code: train/optim.py changed on disk since this process began"
    assert entry["status"] == "ok" and said in entry["spec"]["adjusted"]


def test_the_record_of_a_run_that_failed_says_as_well_which_code_changed(
    package, tmp_path, monkeypatch
):
    monkeypatch.setattr(notes, "CODE", LoadedCode(package))
    before = edit(package / "train" / "optim.py")
    with pytest.raises(ZeroDivisionError), recording(planned(), tmp_path, quiet):
        raise ZeroDivisionError
    (package / "train" / "optim.py").write_bytes(before)
    said = "code: train/optim.py changed on disk since this process began"
    assert said in read_record(tmp_path)["spec"]["adjusted"]


@pytest.mark.slow
def test_what_trains_imports_nothing_of_the_lab():
    """Also by a name that is made as it runs; test_layout.py reads what is written."""
    assert {"lab"} == APART
    engines = ", ".join(f"qa_lib.train.{name}" for name in ("loop", "trainer", "plain"))
    done = python("-c", f"import sys, qa_lib.run.fit, {engines}; print(*sys.modules)")
    loaded = done.stdout.split()
    assert "qa_lib.train.loop" in loaded
    assert [name for name in loaded if name.startswith("qa_lib.lab")] == []


def test_the_digests_are_taken_before_any_other_module_is_imported():
    done = python(
        "-c", "import sys, qa_lib; print(*(name for name in sys.modules if 'qa_lib' in name))"
    )
    assert sorted(done.stdout.split()) == ["qa_lib", "qa_lib.loaded"]


CLIP = ("train/optim.py", "CLIP = 1.0", "CLIP = 0.001")
TRAINER = '    if settings.by_trainer and settings.optimizer != "adamw-fused":\n'
NO_DROPOUT = '    yield "dropout", "none", "for a trial"\n'
DROPOUT = ("spec/rules.py", TRAINER, NO_DROPOUT + TRAINER)
EDITS = {  # the file, what of it is changed, and after how many steps of the run
    "after its begin": (*CLIP, 1),
    "after its checkpoint": (*CLIP, 150),
    "in a rule after its checkpoint": (*DROPOUT, 150),
}


def steps_logged(runs: Path) -> int:
    """How many steps the runs of a folder have logged."""
    return sum(log.read_bytes().count(b"\n") for log in runs.glob("*/*/steps.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("when", EDITS)
def test_a_killed_run_whose_code_is_edited_begins_anew(when, tmp_path):
    """A run of A1 with a checkpoint every 100 of its 400 steps, killed after the first of them."""
    place, old, new, steps = EDITS[when]
    lab = tmp_path / "lab"
    shutil.copytree(ROOT / "qa_lib", lab / "qa_lib")
    words = ["-m", "qa_lib", "run", "A1", "--preset", "smoke", "--runs", str(tmp_path / "runs")]
    process = subprocess.Popen([sys.executable, *words], cwd=lab)
    wait_for(lambda: steps_logged(tmp_path / "runs") >= steps)
    path = lab / "qa_lib" / place
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    wait_for(lambda: list((tmp_path / "runs").glob(f"*/A1-*/{CHECKPOINT}")))
    process.kill()
    process.wait()
    python(*words, cwd=lab)
    (record,) = (tmp_path / "runs").glob("*/A1-*/record.json")
    entry = read_record(record.parent)
    assert entry["status"] == "ok" and entry["time"]["resumed_from_step"] is None
    assert any("its checkpoint is of other code" in said for said in entry["spec"]["adjusted"])


IS_CODE = ["a.py", "b.json", "tests.tmpl", "4913.py", "bak", "~", "sub/lab/c.py", "sub/d.pyx"]
IS_NO_CODE = [
    *(f"a.{end}" for end in ("swp", "swa", "bak", "orig", "rej", "tmp", "save", "pyc")),
    *(f"a.{end}" for end in ("md", "rst", "css", "ipynb", "png", "svg")),
    "lab/c.py",
    "__pycache__/a.py",
    "sub/__pycache__/a.py",
]


def test_the_code_is_all_but_what_is_for_people_or_left_by_editors(tmp_path):
    for name in IS_CODE + IS_NO_CODE:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert file_digests(tmp_path).keys() == set(IS_CODE) - {"~"}


def test_a_digest_is_the_sha_256_of_what_a_file_holds(tmp_path):
    content = b"x = 1\n" * 100_000
    (tmp_path / "a.py").write_bytes(content)
    expected = hashlib.sha256(content).hexdigest()
    assert file_digests(tmp_path) == {"a.py": expected}


def test_the_order_in_which_files_are_found_is_not_in_the_digest(tmp_path):
    code = LoadedCode(tmp_path)
    code.files = {"a.py": "1", "b.py": "2"}
    digest = code.digest
    code.files = {"b.py": "2", "a.py": "1"}
    assert code.digest == digest


def test_several_files_that_have_changed_are_sorted_and_counted(tmp_path):
    for name in ("b.py", "a.py", "c.py"):
        (tmp_path / name).write_text("")
    code = LoadedCode(tmp_path)
    for name in ("c.py", "b.py", "a.py"):
        (tmp_path / name).unlink()
    assert code.changed() == ["a.py", "b.py", "c.py"]
    assert said_of_changes(code.changed()) == "a.py and 2 more"
    assert said_of_changes(["a.py", "b.py"]) == "a.py and 1 more"
    assert said_of_changes(["a.py"]) == "a.py"
    assert said_of_changes(["a\udc80.py"]) == "a?.py"


def test_a_file_that_vanishes_or_cannot_be_read_while_digests_are_taken_is_left_out(
    tmp_path, monkeypatch
):
    found = {name: str(tmp_path / name) for name in ("gone.py", "folder.py", "a.py")}
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "a.py").touch()
    monkeypatch.setattr(loaded, "code_files", lambda package: found)
    assert file_digests(tmp_path).keys() == {"a.py"}
