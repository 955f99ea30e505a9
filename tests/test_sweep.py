"""The driver under faults, each with real processes.

Where a fault does not depend on training, the kernel only writes a run's files (small.pretend) and
imports no torch; where it does not depend on papermill either, a plain Python takes the place of
papermill and kernel, which have the same faults in the slow tier.
"""

import dataclasses
import json
import os
import re
import signal
import textwrap
import threading
import time
import types
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from qa_lib.__main__ import main
from qa_lib.lab import sweep
from qa_lib.lab.launch import local as launch
from qa_lib.lab.launch.driver import DRIVER, SHARE
from qa_lib.lab.launch.judge import NEVER_BEGAN, FirstSteps, steps_logged
from qa_lib.lab.launch.probe import read_probe
from qa_lib.lab.launch.process import child_env, spec_from
from qa_lib.lab.search.plan import plan
from qa_lib.measure.hardware import this_machine
from qa_lib.records import record
from qa_lib.records.files import RecordError
from qa_lib.spec.machine import Machine
from qa_lib.spec.variants import VARIANTS
from tests import small, warm
from tests.conftest import slow
from tests.material import ROOT, change_record, edited, leave, python, refused, wait_for
from tests.small import FIT, PRETEND, STEPS, write_notebook
from tests.tiny import planned, steps_of


@pytest.fixture(params=["plain", slow("papermill")])
def lab(request, tmp_path, monkeypatch, capfd):
    return Lab(tmp_path, monkeypatch, capfd, request.param == "plain")


by_papermill = pytest.mark.parametrize("lab", ["papermill"], indirect=True)


class Lab:
    """A runs folder, a notebook to spoil, and drivers that run it."""

    def __init__(self, folder, patch, output, plain):
        self.runs = folder / "runs {seed}"
        self.notebook = folder / "notebook.ipynb"
        self.patch = patch
        self.output = output
        for name, value in small.environment(self.notebook, this_machine(), plain).items():
            patch.setenv(name, value)
        write_notebook(self.notebook)

    def start(self, *words):
        """A driver in a session of its own, so that Ctrl-C can reach all of it and nothing else."""
        self.runs.mkdir(exist_ok=True)
        return warm.python(
            self.runs / f"log-{time.monotonic_ns()}", "tests.small", *self.command(*words)
        )

    def said(self):
        """What the drivers have said."""
        return "".join(path.read_text() for path in self.runs.glob("log-*"))

    def command(self, *words):
        return ["sweep", *words, "--preset", "test", "--runs", str(self.runs)]

    def run(self, *words):
        """A driver in this process: its exit code, and what it prints on both streams."""
        self.patch.chdir(ROOT)
        small.stand_in(self.patch.setattr)
        self.output.readouterr()
        code = main(self.command(*words))
        out, err = self.output.readouterr()
        return code, out, err

    def records(self):
        folders = [path.parent for path in self.runs.glob("*/*/record.json")]
        return {entry["spec"]["variant"]: entry for entry in map(record.read_record, folders)}

    def statuses(self):
        return {name: entry["status"] for name, entry in self.records().items()}

    def wait_for_step(self, variant, step):
        """Wait for so many lines of that variant's steps.jsonl; the process that holds its lock."""
        logs = partial(self.runs.glob, f"*/{variant}-s0-*/steps.jsonl")
        wait_for(lambda: any(log.read_bytes().count(b"\n") >= step for log in logs()))
        (process,) = small.holders(self.runs)
        return process


def kill_and_run_again(lab, hang, work, after):
    """A1 hangs and is killed; the next sweep takes up that alone."""
    write_notebook(lab.notebook, before=hang, work=work)
    process = lab.start("--variants", "A1,A2")
    os.kill(lab.wait_for_step("A1", after), signal.SIGKILL)
    process.join(120)
    assert process.exitcode == 1
    assert lab.statuses() == {"A1": "killed", "A2": "ok"}
    assert re.search(r"A1-s0-\w+: killed, its process ended", lab.said())
    kept = lab.records()["A2"]
    write_notebook(lab.notebook, work=PRETEND if work == PRETEND else FIT)
    code, out, _ = lab.run("--variants", "A1,A2")
    assert code == 0
    assert lab.statuses() == {"A1": "ok", "A2": "ok"}
    assert out.count("seed 0: ok") == 1
    assert lab.records()["A2"] == kept


def test_a_killed_kernel_is_a_row_and_only_it_runs_again(lab):
    kill_and_run_again(lab, "pause = 30 if variant == 'A1' else 0", PRETEND, 1)


@pytest.mark.slow
@by_papermill
def test_a_killed_kernel_goes_on_from_its_checkpoint(lab):
    hang = """
if variant == 'A1':
    import time
    say = lambda line: time.sleep(600) if ' 20/' in line else None
"""
    work = f"if variant == 'A1':\n{textwrap.indent(FIT, '    ')}\nelse:\n    {PRETEND}"
    kill_and_run_again(lab, hang, work, 20)
    time = lab.records()["A1"]["time"]
    assert time["steps"] == STEPS
    assert time["resumed_from_step"] in (10, 20)  # the second may have been written by then


def test_what_a_sweep_writes_into_a_file_can_be_read_the_next_morning(lab):
    write_notebook(lab.notebook, before="pause = 0.03")
    assert lab.run("--variants", "A2")[0] == 0
    code, out, _ = lab.run("--variants", "A1,A2,D1-nvfuser", "--seeds", "0")
    lines = out.splitlines()
    assert lines[0] == "sweep: 3 runs, 1 finished, 2 to run"
    progress = "\n".join(line for line in lines if re.match(r"\d\d:\d\d ", line))
    assert progress.count("A1 seed 0 starts") == 1
    assert len(re.findall(r"\[\d/3\] A1 seed 0: ok, \d+ s", progress)) == 1
    assert progress.count("left") == 1, "after the first of two"
    rows = [" ".join(line.split()[:3]) for line in lines[lines.index("") + 1 :]]
    assert rows == [
        "variant seed status",
        "A1 0 ok",
        "A2 0 ok",
        "D1-nvfuser 0 skipped",
        "sweep: 2 ok,",
    ]
    assert lines[-1] == "sweep: 2 ok, 1 skipped"
    assert code == 0


def test_two_sweeps_share_the_work(lab):
    write_notebook(lab.notebook, before="pause = 0.03")
    sweeps = [lab.start("--variants", "A1,A2,D1-nvfuser") for _ in range(2)]
    for process in sweeps:
        process.join(240)
    assert [process.exitcode for process in sweeps] == [0, 0], lab.said()
    assert lab.statuses() == {"A1": "ok", "A2": "ok", "D1-nvfuser": "skipped"}
    logs = list(lab.runs.glob("*/*/steps.jsonl"))
    assert len(logs) == 2
    for log in logs:
        assert [line["step"] for line in steps_of(log.parent)] == list(range(1, STEPS + 1))


def test_all_runs_are_ended_even_where_one_cannot_be_judged(tmp_path, monkeypatch):
    """A1's process ends at once and its record cannot be written; A2's goes on until killed."""
    done = []

    def start(command, **_):
        variant = spec_from(command[4]).variant
        return Mock(variant=variant, poll=lambda: 1 if variant == "A1" else None, returncode=1)

    def judge(spec, run_dir, reason, *_):
        if spec.variant == "A1":
            raise OSError(28, "No space left on device")
        done.append(f"judge {spec.variant}: {reason}")
        return record.read_record(run_dir)

    monkeypatch.setattr(launch, "subprocess", Mock(Popen=start))
    monkeypatch.setattr(launch, "kill", lambda process: done.append(f"kill {process.variant}"))
    monkeypatch.setattr(launch, "judge", judge)
    machine = Machine(gpus=2, sm=90, compiler=True)
    with pytest.raises(OSError, match="No space"):
        launch.Launcher(tmp_path, machine, {}, [0, 1]).run_all(
            plan(["A1", "A2"], "smoke", machine=machine)
        )
    assert done == ["kill A1", "kill A2", "judge A2: the driver was stopped by OSError"]


def test_a_run_over_its_time_limit_is_killed_with_the_limit_named(lab):
    write_notebook(lab.notebook, before="import time\ntime.sleep(300)")
    begin = time.monotonic()
    code, _, _ = lab.run("--variants", "A1", "--time-limit", "3")
    assert code == 1
    assert time.monotonic() - begin < 60
    assert lab.records()["A1"]["error"]["message"] == "over its time limit of 3 s"


@pytest.mark.parametrize(
    ("first_statuses", "looks"),
    [(["starting"] * 2, 7), (["running"] * 3 + ["waiting"] * 50, 57)],
)
def test_what_is_waited_for_the_gpu_is_no_part_of_the_limit(
    first_statuses, looks, tmp_path, monkeypatch
):
    """The clock goes on by 50 s a look.

    A run of 300 s may be running for six looks, and waiting for any number.
    """
    spec = planned()
    monkeypatch.setattr(launch.time, "monotonic", iter(range(0, 100_000, 50)).__next__)
    monkeypatch.setattr(launch, "POLL_S", 0)
    entry = record.new_record(spec, {})
    entries = [entry | {"status": status} for status in [*first_statuses, *["running"] * 9]]
    monkeypatch.setattr(record, "read_record", Mock(side_effect=entries))
    process = Mock(poll=Mock(return_value=None))
    reason = launch.Launcher(tmp_path, Machine(), {})._watch(process, spec)
    assert reason == "over its time limit of 300 s"
    assert process.poll.call_count == looks


def test_what_was_skipped_is_run_once_the_machine_can(tmp_path):
    without = planned("C2-8", machine=Machine(bitsandbytes=False))
    able = planned("C2-8", machine=Machine(bitsandbytes=True))
    leave(tmp_path, without, "skipped", {"kind": "skipped", "message": without.skip})
    launcher = launch.Launcher(tmp_path, Machine(), {})
    assert without.hash == able.hash
    assert launcher.is_finished(without)
    assert not launcher.is_finished(able)


def test_plan_says_what_would_run_and_runs_nothing(lab):
    code, out, _ = lab.run(
        "--plan", "--variants", "A1,D1-nvfuser,A1", "--seeds", "0", "1", "--seeds", "0"
    )
    states = [line.split(maxsplit=1)[1].strip() for line in out.splitlines()]
    assert states == ["run", "skip: this PyTorch has no torch.compile backend named 'nvfuser'"] * 2
    assert code == 0
    assert not lab.runs.exists()


@by_papermill
@pytest.mark.slow
def test_a_run_costs_little_beyond_imports_and_a_record_of_an_unknown_schema_is_refused(lab):
    """Kernel start, papermill and record together take 0.8 s, where nothing else is at work.

    That is what the notebook took beyond the run, the quicker of two times, the first of which
    waits for imports.
    """
    assert lab.run("--variants", "A1", "--seeds", "0", "1")[0] == 0
    runs = [record.read_record(path.parent) for path in lab.runs.glob("*/*/record.json")]
    assert min(run["time"]["notebook_s"] - run["time"]["wall_s"] for run in runs) < 5.0
    (folder,) = lab.runs.glob("*/A1-s0-*")
    before = edited(folder / "record.json", schema="qa_lib/99").read_bytes()
    code, _, err = lab.run("--variants", "A1")
    message = r"cpu-test/A1-s0-\w+: error, .*/record\.json: schema 'qa_lib/99' is not known .*\n"
    assert re.fullmatch(message, err)
    assert code == 1
    assert (folder / "record.json").read_bytes() == before


@pytest.mark.parametrize(
    ("visible", "card", "named"), [(None, 1, "1"), ("2,3", 1, "3"), ("GPU-5c", 0, "GPU-5c")]
)
def test_a_card_is_counted_among_the_visible_ones(visible, card, named, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert child_env((card,))["CUDA_VISIBLE_DEVICES"] == named


FOUR_CARDS = Machine(gpus=4, sm=90, compiler=True)


def specs_of_worlds(*worlds):
    """A spec for each number of processes."""
    specs = plan(["A1", "A2", "A3"][: len(worlds)], "smoke", machine=FOUR_CARDS)
    return [
        dataclasses.replace(spec, world=world) for spec, world in zip(specs, worlds, strict=True)
    ]


@pytest.fixture
def cards_of(tmp_path):
    """The cards that each run gets, in the order in which they begin."""

    def run(specs, gpus, at_once=1):
        seen = []
        together = threading.Barrier(at_once, timeout=30)

        class Noted(launch.Launcher):
            def _work(self, spec, run_dir, cards):
                seen.append(cards)
                together.wait()  # until so many are at work
                return record.finish(run_dir, record.new_record(spec, {}), "oom")

        entries = Noted(tmp_path, FOUR_CARDS, {}, gpus).run_all(specs)
        assert [entry["status"] for entry in entries] == ["oom"] * len(specs)
        return seen

    return run


def test_runs_of_two_cards_get_pairs(cards_of):
    pairs = cards_of(specs_of_worlds(2, 2, 2), [0, 1, 2, 3])
    assert set(pairs) <= {(0, 1), (2, 3)}
    assert len(pairs) == 3


def test_runs_of_one_and_of_two_cards_work_side_by_side(cards_of):
    assert sorted(cards_of(specs_of_worlds(1, 2), [0, 1, 2], at_once=2)) == [(0,), (1, 2)]


def test_a_run_of_many_cards_waits_for_them_and_others_with_it(cards_of):
    first, second, third = cards_of(specs_of_worlds(3, 1, 2), [0, 1, 2])
    assert sorted(first) == [0, 1, 2]
    assert sorted(second + third) == [0, 1, 2]


BAD_CARDS = [
    ([0], "a run takes 2 different cards"),
    ([0, 0], "a run takes 2 different cards"),
    ([4], "--gpus 4: this machine has 4 GPUs"),
]


@pytest.mark.parametrize(("gpus", "message"), BAD_CARDS)
def test_cards_that_do_not_do_are_refused(gpus, message, cards_of):
    refused(message, cards_of, specs_of_worlds(2, 2, 2), gpus)


UNFINISHED = [
    ({"time": {"steps": 399}}, "399 of 400 steps were trained"),
    ({"quality": {"n": 39}}, "39 of 40 questions were answered"),
    ({"spec": {"hash": "0" * 64}}, "the record is of another run"),
]


@pytest.mark.parametrize(("changes", "message"), UNFINISHED)
def test_a_run_counts_when_its_record_is_whole(tmp_path, changes, message):
    spec = planned()
    launcher = launch.Launcher(tmp_path, Machine(), {})
    whole = {
        "spec": {"planned_steps": 400, "n_eval": 40},
        "time": {"steps": 400},
        "quality": {"n": 40},
    }
    folder = leave(tmp_path, spec, **whole)
    assert launcher.is_finished(spec)
    change_record(folder, **changes)
    assert not launcher.is_finished(spec)
    judged = launch.judge(spec, folder, None, 0, 1.0)
    assert judged["status"] == "error"
    assert judged["error"]["kind"] == "IncompleteRun"
    assert message in judged["error"]["message"]


def test_the_command_at_the_end_is_told_the_counts_and_its_failure_is_said(tmp_path, capfd):
    specs = plan(["A1", "D1-nvfuser"], "smoke", data="synthetic:40", machine=Machine())
    leave(tmp_path, specs[0], "oom")
    command = "echo told $QA_LIB_OOM $QA_LIB_SKIPPED $QA_LIB_OK $QA_LIB_UNFINISHED; exit 3"
    entries = sweep.sweep(specs, launch.Launcher(tmp_path, Machine(), {}), command)
    assert [entry["status"] for entry in entries] == ["oom", "skipped"]
    out, err = capfd.readouterr()
    assert out.endswith("told 1 1 0 0\n")
    assert err.endswith("ended with exit code 3\n")


def test_runs_that_have_not_ended_are_unfinished_to_the_command_at_the_end(capfd):
    counts = {"ok": 2, record.STARTING: 1, sweep.NOT_BEGUN: 3}
    sweep.run_on_finish("echo $QA_LIB_OK $QA_LIB_UNFINISHED", counts)
    assert capfd.readouterr().out == "2 4\n"


def test_gpus_that_stay_idle_are_named(capsys):
    launch.say_idle(Machine(gpus=3), None)
    assert re.fullmatch("one of 3 GPUs .*--gpus 0 1 2 uses all\n", capsys.readouterr().out)


@pytest.mark.parametrize(("gpus", "named"), [(3, [0]), (1, None)])
def test_gpus_that_were_spoken_of_are_not_called_idle(gpus, named, capsys):
    launch.say_idle(Machine(gpus=gpus), named)
    assert capsys.readouterr().out == ""


def test_a_rate_of_ones_own_reaches_the_notebook(tmp_path):
    usual = sweep.notebook_parameters(planned(), tmp_path)
    own = sweep.notebook_parameters(planned(learning_rate=1e-3), tmp_path)
    assert "learning_rate" not in usual
    assert own == {**usual, "learning_rate": 1e-3}


@pytest.mark.parametrize(("deaths", "status"), [(1, "ok"), (2, "killed")])
def test_a_kernel_that_dies_before_its_run_begins_is_given_one_more_life(
    lab, tmp_path, deaths, status
):
    lives = tmp_path / "lives"
    die = f"""
from pathlib import Path
import os
lives = Path({str(lives)!r})
lives.open('a').write('1')
if lives.stat().st_size <= {deaths}:
    os.kill(os.getpid(), 9)
"""
    write_notebook(lab.notebook, before=die)
    code, _, _ = lab.run("--variants", "A1")
    assert code == (0 if status == "ok" else 1)
    assert lab.statuses() == {"A1": status}
    assert lives.read_text() == "11"


def test_a_line_of_the_sweep_says_what_became_of_a_checkpoint_and_holds_no_escapes():
    spec = planned()
    entry = record.new_record(spec, {}) | {"status": "ok", "error": {"message": "\x1b[2Jodd"}}
    anew = "checkpoint: began anew, since its checkpoint is damaged"
    entry["spec"]["adjusted"] = ["precision: fp32", anew]
    assert sweep.outcome_line(spec, entry) == f"A1 seed 0: ok, {anew}, [2Jodd"


FAULTS = [("removed", "RecordLost"), ("spoilt", "RecordLost"), ("no process", "killed")]


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_what_befalls_one_run_costs_that_run_alone(tmp_path, monkeypatch, fault, kind):
    """The second of three at a time loses its record while it runs, or finds no server."""
    monkeypatch.setattr(launch, "side_by_side", lambda specs: len(specs))
    specs = plan(["A1", "A2", "A0"], "test", data="synthetic:80", machine=Machine())
    lost = tmp_path / specs[1].run_path
    planted = []

    def look():
        if planted or not (lost / "steps.jsonl").exists():
            return
        planted.append(fault)
        if fault == "removed":
            # At once: the run writes on, and a folder is emptied file by file.
            lost.rename(tmp_path / "moved")
        else:
            (lost / "record.json").write_text("{x")

    def command(spec, runs):
        if fault == "no process" and tmp_path / spec.run_path == lost:
            raise EOFError
        return small.pretend_command(spec, runs, 0.05)

    entries = launch.Launcher(tmp_path, Machine(), {}, command=command).run_all(specs, look=look)
    assert [entry["status"] for entry in entries] == ["ok", "killed", "ok"]
    assert entries[1]["error"]["kind"] == kind


@pytest.mark.slow
def test_a_sweep_from_outside_the_checkout_runs_its_notebooks(tmp_path):
    words = "-m qa_lib sweep --preset smoke --variants A1".split()
    assert "sweep: 1 ok" in python(*words, cwd=tmp_path, PYTHONPATH=str(ROOT)).stdout


def test_the_time_left_counts_the_parts_of_runs_at_work(tmp_path, monkeypatch, capsys):
    """After three minutes one run of three has ended and another is half done.

    Three more minutes are left, and not six. A fourth run was finished before.
    """
    specs = plan(["A1"], "smoke", [0, 1, 2, 3], machine=Machine())
    leave(tmp_path, specs[3], "oom")

    def run_all(launcher, specs, ended, look):
        folders = [leave(tmp_path, spec, spec={"planned_steps": 100}) for spec in specs]
        (folders[1] / "steps.jsonl").write_text('{"step": 50}\n')
        launcher.active = specs[1:]
        entries = [*map(record.read_record, folders)]
        ended(specs[0], entries[0])
        return entries

    monkeypatch.setattr(launch.Launcher, "run_all", run_all)
    monkeypatch.setattr(sweep.time, "monotonic", Mock(side_effect=[0.0, 180.0]))
    sweep.sweep(specs, launch.Launcher(tmp_path, Machine(), {}))
    assert "[2/4] A1 seed 0: ok; about 3 min left" in capsys.readouterr().out


def pretend(spec, runs):
    """The command of a run that writes its files and trains nothing."""
    return small.pretend_command(spec, runs, 0.0)


def bad_record(folder: Path, _) -> None:
    (folder / "record.json").write_text('{"schema": "qa_lib/99"}')


def linked_record(folder: Path, theirs: Path) -> None:
    (folder / "record.json").symlink_to(theirs / "file")


def linked_log(folder: Path, theirs: Path) -> None:
    (folder / "log.txt").symlink_to(theirs / "file")


def linked_folder(folder: Path, theirs: Path) -> None:
    folder.rmdir()
    folder.symlink_to(theirs)


def pipes(folder: Path, _) -> None:
    for name in ("log.txt", "steps.jsonl"):
        os.mkfifo(folder / name)


def pipe_as_lock(folder: Path, _) -> None:
    os.mkfifo(folder / ".lock")


def pipe_as_record(folder: Path, _) -> None:
    os.mkfifo(folder / "record.json")


SPOILS = [bad_record, linked_record, linked_log, linked_folder, pipes, pipe_as_lock, pipe_as_record]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_folder_that_no_run_may_have_costs_that_run_alone(tmp_path, spoil, capsys):
    """The others run, the sweep says why it did not, and its folder is as it was."""
    specs = plan(["A1", "A2"], "test", data="synthetic:80", machine=Machine())
    folder = tmp_path / "runs" / specs[0].run_path
    theirs = tmp_path / "theirs"
    folder.mkdir(parents=True)
    theirs.mkdir()
    (theirs / "file").write_text("mine")
    spoil(folder, theirs)
    before = sorted(path.name for path in folder.iterdir())

    launcher = launch.Launcher(tmp_path / "runs", Machine(), {}, command=pretend)
    entries = sweep.sweep(specs, launcher)
    assert [entry["status"] for entry in entries] == ["error", "ok"]
    assert entries[0]["error"]["kind"] == "RecordError"
    assert str(folder) in entries[0]["error"]["message"]
    assert "1 error, 1 ok" in capsys.readouterr().out
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {"file": "mine"}
    assert {*before} <= {path.name for path in folder.iterdir()} <= {*before, *LOCKS}


LOCKS = (".lock", ".driver.lock")


def test_force_empties_a_folder_and_nothing_that_its_links_lead_to(tmp_path):
    specs = plan(["A1", "A2"], "test", data="synthetic:80", machine=Machine())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("mine")
    own = leave(tmp_path, specs[0])
    (own / "answers").symlink_to(theirs)
    (own / "log.txt").symlink_to(theirs / "file")
    (own / "old").write_text("old")
    (tmp_path / specs[1].run_path).symlink_to(theirs)

    launcher = launch.Launcher(tmp_path, Machine(), {}, force=True, command=pretend)
    assert [entry["status"] for entry in launcher.run_all(specs)] == ["ok", "error"]
    assert not (own / "old").exists()
    assert not (own / "log.txt").is_symlink()
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {"file": "mine"}


VERBS = ["run A1 --preset smoke", "sweep --variants A1 --preset smoke", "archive g", "report"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_runs_folder_that_leads_nowhere_is_one_line(verb, tmp_path, typed):
    (tmp_path / "loop").symlink_to("loop")
    printed = typed(f"{verb} --runs", tmp_path / "loop", code=2)
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1


def test_runs_may_lie_on_another_disk(tmp_path, typed):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    (spec,) = plan(["A1"], "test", data="synthetic:80", machine=Machine())

    launcher = launch.Launcher(tmp_path / "runs", Machine(), {}, command=pretend)
    assert launcher.run_all([spec])[0]["status"] == "ok"
    assert "1 runs" in typed("archive", spec.group, "--runs", tmp_path / "runs")
    assert (tmp_path / "disk" / f"{spec.group}.jsonl").is_file()


# What a run's process is given.


def test_a_process_has_the_threads_of_its_run_and_is_told_of_others_on_its_card(monkeypatch):
    monkeypatch.delenv(SHARE, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert child_env((0,), shared=True)[SHARE] == "1"
    assert SHARE not in child_env((0,))
    assert child_env(threads=3)["OMP_NUM_THREADS"] == "3"
    assert child_env()["OMP_NUM_THREADS"] == "7"
    assert child_env()["PYTHONUNBUFFERED"] == "1"


def test_without_cards_a_process_sees_all(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert child_env()["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_cards_are_named_in_the_order_in_which_they_were_given(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 6, 7")
    assert child_env((2, 0))["CUDA_VISIBLE_DEVICES"] == "7,5"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The processes that a launcher has started: (command, options), each of which ends at once."""
    calls = []

    def start(command, **options):
        calls.append((command, options))
        return Mock(poll=lambda: 3, returncode=3)

    monkeypatch.setattr(launch, "subprocess", Mock(Popen=start))
    monkeypatch.setattr(launch, "kill", lambda process: None)
    return calls


@pytest.mark.parametrize("aloud", [False, True])
def test_a_process_knows_its_driver_and_prints_into_its_log_unless_it_is_aloud(
    aloud, started, tmp_path
):
    spec = planned(sizes={"threads": 3})
    launch.Launcher(tmp_path, Machine(), {}, aloud=aloud).run_all([spec])
    run_dir = tmp_path / spec.run_path
    assert len(started) == 2, "it is started once more, since it never began"
    command, options = started[0]
    assert spec_from(command[4]) == spec
    assert options["env"][DRIVER] == str(run_dir / ".driver.lock")
    assert options["env"]["OMP_NUM_THREADS"] == "3"
    assert options["stderr"].name == str(run_dir / "log.txt")
    assert options["stdout"] is (None if aloud else options["stderr"])


def test_a_process_finds_its_drivers_lock_from_any_folder(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = planned()
    launch.Launcher(Path("runs"), Machine(), {}).run_all([spec])
    lock = tmp_path / "runs" / spec.run_path / ".driver.lock"
    assert started[0][1]["env"][DRIVER] == str(lock)


@pytest.mark.parametrize(("gpus", "is_told"), [([0], False), ([0, 1], False), ([0, 0], True)])
def test_a_run_is_told_of_others_where_its_card_is_named_twice(gpus, is_told, started, tmp_path):
    machine = Machine(hardware="h200", gpus=2, sm=90)
    launcher = launch.Launcher(tmp_path, machine, {}, gpus=gpus, share=True)
    launcher.run_all([planned()])
    assert (SHARE in started[0][1]["env"]) is is_told


def test_a_run_that_has_ended_is_at_work_no_more(started, tmp_path):
    launcher = launch.Launcher(tmp_path, Machine(), {})
    launcher.run_all([planned()])
    assert launcher.active == []


def test_a_process_that_is_started_once_more_finds_a_run_that_has_not_begun(started, tmp_path):
    """What became of the first one would otherwise be taken for what becomes of the second."""
    statuses = []

    def command(spec, runs):
        statuses.append(record.read_record(runs / spec.run_path)["status"])
        return ["true"]

    launch.Launcher(tmp_path, Machine(), {}, command=command).run_all([planned()])
    assert statuses == ["starting", "starting"]


@pytest.mark.parametrize("problem", [EOFError(), ConnectionRefusedError()])
def test_a_run_for_which_no_process_could_be_forked_says_so(problem, tmp_path):
    launcher = launch.Launcher(tmp_path, Machine(), {}, command=Mock(side_effect=problem))
    (entry,) = launcher.run_all([planned()])
    assert entry["status"] == "killed"
    assert entry["error"]["message"] == "it had no process"


def test_a_driver_that_is_stopped_writes_nothing_into_a_folder_that_was_removed(tmp_path):
    launcher = launch.Launcher(tmp_path, Machine(), {})
    launcher.stopped.set()
    with pytest.raises(RecordError):
        launcher._lose(planned(), tmp_path / "removed", RecordError("gone"))
    assert not (tmp_path / "removed").exists()


def test_a_log_of_before_is_emptied_when_a_run_begins(started, tmp_path):
    spec = planned()
    (tmp_path / spec.run_path).mkdir(parents=True)
    (tmp_path / spec.run_path / "log.txt").write_text("old words")
    (entry,) = launch.Launcher(tmp_path, Machine(), {}).run_all([spec])
    assert entry["error"]["message"].endswith(
        "(exit code 3) before the run did: no word in log.txt"
    )


def test_a_limit_of_ones_own_takes_the_place_of_the_presets(tmp_path):
    spec = planned(sizes={"time_limit_s": 120})
    assert launch.Launcher(tmp_path, Machine(), {}).limit_of(spec) == 120
    assert launch.Launcher(tmp_path, Machine(), {}, time_limit_s=7.0).limit_of(spec) == 7


@pytest.mark.parametrize(
    ("runs", "cores", "expected"),
    [
        ([(2, 1, "cpu")], 8, 4),
        ([(1, 1, "cpu"), (3, 1, "cpu")], 8, 2),
        ([(1, 2, "cpu")], 8, 4),
        ([(1, 1, "cpu")], 64, 8),
        ([(4, 1, "cpu")], 2, 1),
        ([(1, 1, "cpu")], None, 1),
        ([(1, 1, "cpu"), (None, 1, "cpu")], 8, 1),
        ([(1, 1, "h200")], 8, 1),
        ([(1, 1, "cpu"), (None, 1, "h200")], 8, 8),
        ([], 8, 1),
    ],
)
def test_as_many_runs_are_at_work_on_a_cpu_as_its_cores_have_threads_for(
    runs, cores, expected, monkeypatch
):
    """Each run is (threads of a process, processes, hardware)."""
    specs = [
        types.SimpleNamespace(
            preset=types.SimpleNamespace(threads=threads), world=world, hardware=hardware
        )
        for threads, world, hardware in runs
    ]
    monkeypatch.setattr(launch.os, "cpu_count", lambda: cores)
    assert launch.side_by_side(specs) == expected


def test_the_cards_of_a_run_differ_even_where_one_has_two_places():
    free = [0, 0, 1]
    assert launch.take_cards(free, 2) == [0, 1]
    assert free == [0]


@pytest.mark.parametrize(
    ("exit_code", "output", "reason"),
    [
        (1, "a line\nImportError: no torch\n", "ImportError: no torch"),
        (1, " \n", "it says nothing"),
    ],
)
def test_a_probe_that_fails_is_one_line(exit_code, output, reason):
    said = f"^this Python cannot load the lab: {reason}$"
    refused(said, read_probe, "this Python", exit_code, output)


def test_a_probe_tells_a_machine_whatever_was_printed_before():
    said = dataclasses.asdict(Machine("h100", gpus=2, sm=90)), {"gpu": "NVIDIA H100"}
    found = read_probe("this Python", 0, f"a warning\n{json.dumps(said)}\n")
    assert found == (Machine("h100", gpus=2, sm=90), {"gpu": "NVIDIA H100"})


# How a run is judged whose process has ended.


@pytest.fixture
def judged(tmp_path):
    """Judges a run that had this status; the log of its process is `log`."""
    spec = planned()
    entry = record.new_record(spec, {})

    def call(status, reason=None, code=9, log="", seconds=1.0, files=(), **sections):
        for name, values in sections.items():
            entry[name] |= values
        record.write_record(tmp_path, entry | {"status": status})
        (tmp_path / "log.txt").write_text(log)
        for name in files:
            (tmp_path / name).touch()
        found = launch.judge(spec, tmp_path, reason, code, seconds)
        assert found == record.read_record(tmp_path)
        return found

    return call


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("first\n  the last  \n\n \n", "the last"),
        ("", "no word in log.txt"),
        ("x" * 300, "x" * 200),
    ],
    ids=["last line", "none", "long"],
)
def test_a_process_that_ends_early_is_told_with_its_exit_code_and_last_words(log, words, judged):
    entry = judged("running", log=log)
    assert entry["status"] == "killed"
    said = f"its process ended (exit code 9) before the run did: {words}"
    assert entry["error"] == {"kind": "killed", "message": said, "step": None}


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        ("starting", None, NEVER_BEGAN),
        ("starting", "the driver was stopped", "killed"),
        ("running", None, "killed"),
    ],
)
def test_a_run_never_began_where_its_process_ended_by_itself_before(status, reason, kind, judged):
    error = judged(status, reason)["error"]
    assert error["kind"] == kind
    assert reason is None or error["message"] == reason


def test_a_run_that_had_its_result_before_it_was_ended_keeps_it(judged):
    whole = {"time": {"steps": 4}, "spec": {"planned_steps": 4, "n_eval": 2}, "quality": {"n": 2}}
    assert judged("ok", "the driver was stopped", **whole)["status"] == "ok"


@pytest.mark.parametrize(("files", "seconds"), [(["notebook.ipynb"], 12.346), ([], None)])
def test_the_time_of_a_process_is_noted_where_it_was_a_notebooks(files, seconds, judged):
    assert judged("oom", seconds=12.3456, files=files)["time"]["notebook_s"] == seconds


def test_steps_count_where_they_were_logged_by_this_run(tmp_path):
    path = tmp_path / "steps.jsonl"
    assert steps_logged(path) is None
    path.touch()
    assert steps_logged(path) == 0
    path.write_text('{"step": 1}\n{"step": 2}\n')
    os.utime(path, (100.0, 100.0))
    assert steps_logged(path, since=100.0) == 2
    assert steps_logged(path, since=100.5) is None


def test_the_first_steps_are_watched_each_by_itself(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("qa_lib.lab.launch.judge.time.monotonic", lambda: now)
    first_steps = FirstSteps(tmp_path, since=0.0)
    seen = []
    logged = [(5, None), (7, 0), (9, 0), (10, 1), (14, 1), (15, 3), (99, 3)]
    for moment, steps in logged:
        now = float(moment)
        if steps is not None:
            lines = [f'{{"step": {step}}}\n' for step in range(1, steps + 1)]
            (tmp_path / "steps.jsonl").write_text("".join(lines))
        seen.append(first_steps.seconds())
    assert seen == [0.0, 0.0, 2.0, 0.0, 4.0, 0.0, 0.0]


# The words of a sweep.


def test_a_notebook_is_given_texts_as_texts_and_paths_whose_braces_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "1e3").mkdir()
    spec = dataclasses.replace(planned(learning_rate=1e-3), model_source=str(tmp_path / "1e3"))
    command = sweep.notebook_command(spec, tmp_path / "runs {seed}")
    assert command[1:3] == ["-m", "papermill"]
    source, executed = command[3:5]
    assert Path(source).resolve() == ROOT / "notebooks" / "systems.ipynb"
    assert executed == f"runs {{{{seed}}}}/{spec.run_path}/notebook.ipynb"
    options = {
        command[place + 1]: command[place : place + 3 : 2] for place in range(11, len(command), 3)
    }
    assert options["model"] == ["-r", "1e3"]
    assert options["variant"] == ["-r", "A1"]
    assert options["seed"] == ["-p", "0"]
    assert options["learning_rate"] == ["-p", "0.001"]
    assert options["runs"] == ["-r", "runs {seed}"]


def test_progress_is_the_last_step_of_those_that_are_planned(tmp_path):
    spec = planned()
    assert sweep.progress_of(tmp_path) == (0, None)
    folder = leave(tmp_path, spec, "running", spec={"planned_steps": 40})
    assert sweep.progress_of(folder) == (0, None)
    lines = [f'{{"step": {step}, "loss": {"1" * 60}}}\n' for step in range(1, 30)]
    (folder / "steps.jsonl").write_text("".join(lines))
    assert sweep.progress_of(folder) == (29, 40)


def test_a_run_that_has_ended_is_told_with_its_sizes_time_and_score():
    spec = planned(micro_batch=4)
    entry = record.new_record(spec, {}) | {"status": "ok"}
    entry["time"]["wall_s"] = 12.6
    entry["quality"]["f1"] = 81.26
    entry["spec"]["adjusted"] = ["code: train/loop.py changed"]
    entry["error"]["message"] = "two\nlines"
    said = "A1 seed 0, micro-batch 4: ok, 13 s, F1 81.3, code: train/loop.py changed, two lines"
    assert sweep.outcome_line(spec, entry) == said


def test_the_table_at_the_end_has_a_row_a_run_and_what_differs_between_them(tmp_path):
    specs = [planned(), planned("A2", micro_batch=4), planned("A3")]
    leave(tmp_path, specs[0], time={"wall_s": 7.0}, quality={"f1": 81.25})
    change_record(tmp_path / specs[0].run_path, speed={"samples_per_s": 99.0})
    leave(tmp_path, specs[1], "oom")
    table = sweep.status_table(specs, launch.Launcher(tmp_path, Machine(), {}))
    assert table.columns.tolist() == ["variant", "seed", "micro-batch", "status", "seconds", "F1"]
    assert table["micro-batch"].tolist() == [8, 4, 8]
    assert table["status"].tolist() == ["ok", "oom", "not begun"]
    assert table.iloc[0, -2:].tolist() == [7.0, 81.25]


def test_the_table_of_runs_on_a_gpu_has_their_speeds(tmp_path):
    spec = dataclasses.replace(planned(), hardware="h200")
    leave(tmp_path, spec, speed={"samples_per_s": 99.0})
    table = sweep.status_table([spec], launch.Launcher(tmp_path, Machine(), {}))
    assert table["samples/s"].tolist() == [99.0]


@pytest.fixture
def typed_sweep(typed, monkeypatch, tmp_path):
    """Types a sweep whose runs end with these statuses.

    Returns what it says, and with which specs, launcher and command at the end it is made.
    """
    asked = []
    monkeypatch.setattr(sweep, "probe", lambda: (FOUR_CARDS, {"gpu": "H100"}))
    monkeypatch.setattr(sweep, "check_runner", lambda: None)

    def call(words, *statuses, code=0):
        def pretend(specs, launcher, on_finish):
            asked[:] = [specs, launcher, on_finish]
            entries = [record.new_record(spec, {}) for spec in specs]
            for entry, status in zip(entries, statuses, strict=False):
                entry |= {"status": status, "error": {"message": f"it is {status}"}}
            return entries

        monkeypatch.setattr(sweep, "sweep", pretend)
        said = typed(f"sweep --preset smoke --runs {tmp_path} {words}", code=code)
        return said, *asked

    return call


@pytest.mark.parametrize(("status", "code"), [("oom", 0), ("error", 1), ("killed", 1)])
def test_a_sweep_fails_where_a_run_has_failed_and_names_it(status, code, typed_sweep):
    said, specs, *_ = typed_sweep("--variants A1,A2", "ok", status, code=code)
    path = f"{specs[1].group}/{specs[1].run_id}"
    assert (f"{path}: {status}, it is {status}\n" in said) == (code == 1)


@pytest.mark.parametrize(("preset", "task"), [("smoke", "qa"), ("lm-smoke", "lm")])
def test_a_sweep_without_names_is_of_all_variants_of_the_presets_task(preset, task):
    words = types.SimpleNamespace(variants=None, family=None, preset=preset)
    asked = sweep._variants_asked(words)
    assert asked == [name for name, variant in VARIANTS.items() if variant.task == task]


def test_a_plan_needs_nothing_that_runs_notebooks(typed_sweep, monkeypatch):
    monkeypatch.setattr(sweep, "check_runner", Mock(side_effect=ZeroDivisionError))
    said, *_ = typed_sweep("--plan --variants A1")
    assert "A1-s0-" in said


def test_a_plan_tells_which_runs_are_finished(typed_sweep, tmp_path):
    _, specs, *_ = typed_sweep("--variants A1,A2")
    leave(tmp_path, specs[0], "oom")
    said, *_ = typed_sweep("--plan --variants A1,A2")
    assert [line.split()[1] for line in said.splitlines()[-2:]] == ["finished", "run"]


def test_a_sweep_names_the_gpus_that_stay_idle(typed_sweep):
    said, *_ = typed_sweep("--variants A1")
    assert "--gpus 0 1 2 3 uses all" in said


def test_a_sweeps_launcher_is_as_the_options_say(typed_sweep, tmp_path):
    words = "--variants A1 --gpus 1 2 --shared-gpu --force --time-limit 60 --on-finish ls"
    _, _, launcher, on_finish = typed_sweep(words)
    assert type(launcher) is launch.Launcher
    assert (launcher.runs, launcher.gpus, launcher.time_limit_s) == (tmp_path, [1, 2], 60)
    assert (launcher.share, launcher.force, launcher.warm) == (True, True, True)
    assert launcher.command is sweep.notebook_command
    assert launcher.machine == FOUR_CARDS
    assert launcher.env == {"gpu": "H100"}
    assert on_finish == "ls"


def test_a_sweeps_launcher_is_plain_without_options(typed_sweep):
    _, _, launcher, on_finish = typed_sweep("--variants A1")
    assert (launcher.gpus, launcher.time_limit_s, on_finish) == (None, None, None)
    assert (launcher.share, launcher.force, launcher.aloud) == (False, False, False)


def test_a_run_that_another_takes_the_place_of_counts_once_more(tmp_path, capsys):
    (spec,) = plan(["recommended"], "smoke", machine=FOUR_CARDS, runs=tmp_path)
    progress = sweep.Progress([spec], launch.Launcher(tmp_path, FOUR_CARDS, {}))
    entry = record.new_record(spec, {}) | {"status": "oom"}
    progress.ended(spec, entry)
    progress.ended(spec, entry | {"status": "ok"})
    first, second = capsys.readouterr().out.splitlines()
    assert "[1/2]" in first and first.endswith("; about 1 min left")
    assert "[2/2]" in second and "left" not in second
