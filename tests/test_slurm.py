"""Runs as jobs of Slurm, against a stand-in for its commands: nobody has Slurm itself here."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from qa_lib.lab.cli.verbs import parser_of
from qa_lib.lab.launch import slurm
from qa_lib.lab.search.plan import plan
from qa_lib.spec.machine import Machine
from qa_lib.spec.variants import find_family
from tests.material import ROOT, end_of, refused
from tests.tiny import CPU

# What a run leaves, without one and its lock: `python -c RUN FOLDER SECONDS` goes on for that long.
RUN = """
import sys, time
from pathlib import Path
from qa_lib.records import record
run_dir = Path(sys.argv[1])
entry = record.read_record(run_dir)
record.write_record(run_dir, entry | {"status": "running"})
time.sleep(float(sys.argv[2]))
entry["time"]["steps"] = entry["spec"]["planned_steps"]
record.finish(run_dir, entry, "ok")
print("the last word")
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """The folder of a stand-in for Slurm, whose commands are found before the system's."""
    folder = shutil.copytree(ROOT / "tests" / "slurm", tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def launcher(runs, seconds=0.0, **more):
    def command(spec, runs):
        return [sys.executable, "-c", RUN, str(runs / spec.run_path), str(seconds)]

    return slurm.SlurmLauncher(runs, CPU, {}, command=command, **more)


def specs(*rows, **changes):
    return [
        dataclasses.replace(spec, **changes)
        for spec in plan(rows, "smoke", data="synthetic:40", machine=CPU)
    ]


def asked(cluster):
    """What each sbatch was asked for."""
    lines = (cluster / "asked").read_text().splitlines()
    return [line for line in lines if line.startswith("--wait")]


@pytest.fixture
def two_runs(cluster, tmp_path):
    """The records of two runs that were jobs: of one process, and of two."""
    return launcher(tmp_path / "runs").run_all(specs("A1", "P1"))


def test_a_job_is_judged_as_a_run_here(two_runs, tmp_path):
    assert [entry["status"] for entry in two_runs] == ["ok", "ok"]
    log = tmp_path / "runs" / specs("A1")[0].run_path / "log.txt"
    assert log.read_text() == "Submitted batch job 1\nthe last word\n"


def test_a_job_asks_for_what_its_run_takes(two_runs, cluster):
    one, two = sorted(asked(cluster), key=lambda line: "P1" in line)
    assert "--cpus-per-task=1 " in one
    assert "--cpus-per-task=2 " in two
    assert "--time=15 " in one
    assert "--gpus" not in one + two, "these are runs on CPUs"


def test_a_jobs_minutes_are_those_of_its_limit_rounded_up_and_some_to_spare(tmp_path, monkeypatch):
    started = Mock()
    monkeypatch.setattr(slurm, "subprocess", started)
    launcher(tmp_path, time_limit_s=61)._start(specs("A1")[0], tmp_path, {}, None)
    (words,) = started.Popen.call_args.args
    assert "--time=12" in words


def test_ctrl_c_does_not_reach_what_waits_for_a_job(tmp_path, monkeypatch):
    """It would be gone before the job is."""
    started = Mock()
    monkeypatch.setattr(slurm, "subprocess", started)
    launcher(tmp_path)._start(specs("A1")[0], tmp_path, {}, None)
    assert started.Popen.call_args.kwargs["start_new_session"]


def test_a_jobs_log_is_where_its_driver_reads_it(tmp_path, monkeypatch):
    """A site may have jobs begin in another folder than that of sbatch."""
    monkeypatch.chdir(tmp_path)
    assert f"--output={tmp_path}/runs/log.txt" in slurm.sbatch(["true"], Path("runs/log.txt"))


def test_a_run_is_the_same_job_however_its_folder_is_named(tmp_path, monkeypatch):
    """A driver cancels what one before it has left, which may have been started elsewhere."""
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("runs")
    paths = (tmp_path / "runs" / "A1", Path("runs/A1"), Path("link/A1"))
    assert len({slurm.job_name(path) for path in paths}) == 1


def test_runs_of_the_same_name_in_other_folders_are_other_jobs(tmp_path):
    names = {slurm.job_name(tmp_path / runs / "A1-s0-000000") for runs in ("a", "b")}
    assert len(names) == 2
    assert all(re.fullmatch(r"A1-s0-000000-[0-9a-f]{8}", name) for name in names)


def test_no_more_than_64_jobs_are_in_the_queue(tmp_path):
    places = [len(launcher(tmp_path)._cards([None] * count)) for count in (0, 3, 64, 200)]
    assert places == [1, 3, 64, 64]


@pytest.mark.parametrize(
    ("listed", "found", "world", "gpus"),
    [("gpu:8", 1, None, 2), ("gpu:8", 1, 4, 4), ("(null)", 0, 4, 0)],
)
def test_a_node_counts_as_many_gpus_as_a_run_takes_if_it_has_any(
    listed, found, world, gpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("SBATCH_PARTITION", "short")
    commands = []

    environments = []

    def answer(*words, env=None, **_):
        commands.append(words)
        environments.append(env)
        (output,) = [word.partition("=")[2] for word in words if word.startswith("--output")] or [0]
        if output:
            said = dataclasses.asdict(Machine("h100", gpus=found, sm=90)), {}
            Path(output).write_text(json.dumps(said))
        return Mock(returncode=0, stdout=listed)

    monkeypatch.setattr(slurm, "slurm", answer)
    machine, _ = slurm.probe_node(tmp_path, world)
    assert machine.gpus == gpus
    sinfo, sbatch = commands
    assert sinfo[-2:] == ("--partition", "short")
    assert (f"--gpus={world or 1}" in sbatch) == (listed == "gpu:8")
    assert str(ROOT) in environments[1]["PYTHONPATH"]


def test_what_is_finished_is_no_job_again(two_runs, cluster, tmp_path):
    assert launcher(tmp_path / "runs").run_all(specs("A1", "P1")) == two_runs
    assert len(asked(cluster)) == 2


def test_what_slurm_refuses_is_in_the_record(cluster, tmp_path):
    (entry,) = launcher(tmp_path).run_all(specs("P1", hardware="h100", world=9))
    assert entry["status"] == "killed"
    assert entry["error"]["message"].endswith(
        "sbatch: error: Requested node configuration is not available"
    )


def test_a_job_over_its_limit_is_cancelled(cluster, tmp_path):
    launcher(tmp_path, seconds=30, time_limit_s=1).run_all(specs("A1"))
    assert end_of(tmp_path / specs("A1")[0].run_path) == ("killed", "over its time limit of 1 s")
    cancelled = (cluster / "cancelled").read_text().splitlines()
    assert len(cancelled) == 2, "before it began, and at its end"


def test_the_time_in_the_queue_does_not_count(cluster, tmp_path):
    """The record of this job says `starting` until its end."""
    patient = launcher(tmp_path, time_limit_s=1)
    patient.command = lambda spec, runs: ["sh", "-c", "sleep 2"]
    (entry,) = patient.run_all(specs("A2"))
    assert "before the run did" in entry["error"]["message"]


def test_a_driver_that_is_stopped_cancels_its_job(cluster, tmp_path):
    def look():
        for path in tmp_path.glob("*/*/record.json"):
            if json.loads(path.read_text())["status"] == "running":
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launcher(tmp_path, seconds=30).run_all(specs("A1"), look=look)
    end = end_of(tmp_path / specs("A1")[0].run_path)
    assert end == ("killed", "the driver was stopped by ZeroDivisionError")
    assert not list(cluster.glob("job-*"))


def test_two_drivers_of_one_folder_submit_each_run_once(cluster, tmp_path):
    rows = specs("A1", "A2", "A3")
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: launcher(tmp_path, 0.5).run_all(rows), range(2))]
    assert found[0] == found[1] and [entry["status"] for entry in found[0]] == ["ok"] * 3
    assert len(asked(cluster)) == 3


def test_a_node_is_asked_what_it_is_in_a_job_of_its_kind(cluster, tmp_path, monkeypatch):
    said = dataclasses.asdict(Machine("h100", gpus=1, sm=90)), {"gpu": "NVIDIA H100"}
    monkeypatch.setattr(slurm, "PROBE", f"print({json.dumps(said)!r})")
    machine, environment = slurm.probe_node(tmp_path / "runs", 4)
    assert machine == Machine("h100", gpus=4, sm=90)
    assert environment == {"gpu": "NVIDIA H100"}
    assert "--gpus=4 " in asked(cluster)[0]
    assert not list((tmp_path / "runs").iterdir())


def test_a_node_that_cannot_load_the_lab_is_one_line(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "PROBE", "import nothing")
    said = "a node cannot load the lab: ModuleNotFoundError.*'nothing'"
    refused(said, slurm.probe_node, tmp_path / "runs", None)


def test_why_slurm_refuses_to_ask_a_node_is_told(tmp_path, monkeypatch):
    answer = Mock(returncode=1, stdout="", stderr="sbatch: error: invalid partition\n")
    monkeypatch.setattr(slurm, "slurm", lambda *_, **__: answer)
    refused("sbatch: error: invalid partition$", slurm.probe_node, tmp_path / "runs", None)


def test_a_host_without_slurm_is_told_in_one_line(tmp_path, monkeypatch, typed):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = f"sweep --launcher slurm --preset smoke --runs {tmp_path}"
    said = "error: --launcher slurm: this host has no Slurm, whose command sinfo was not found; "
    assert typed(words, code=2).startswith(said)


@pytest.mark.parametrize("option", ["--gpus 0", "--shared-gpu"])
def test_cards_of_this_machine_are_not_for_slurm(option, tmp_path, typed):
    words = f"sweep --launcher slurm --preset smoke --runs {tmp_path} {option}"
    assert typed(words, code=2).startswith("error: --gpus and --shared-gpu are")


PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
EXAMPLES = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)]
SHOWN = re.search(r"```text\nsbatch (.*)\n```", PAGE)[1]


def specs_of(line):
    """The runs of a documented command on a host with H100s, of generated questions."""
    words = shlex.split(line)
    assert words[:4] == ["python", "-m", "qa_lib", "sweep"]
    args = parser_of("sweep").parse_args(words[4:])
    names = args.variants or find_family(args.family)
    sources = ("synthetic:40", "tiny", args.micro_batch, Machine("h100", gpus=8, sm=90))
    rows = plan(names, args.preset, args.seeds, *sources, world=args.world, left_out=[])
    return args, [dataclasses.replace(spec, skip=None) for spec in rows]


def test_the_example_of_the_page_submits_the_job_that_the_page_shows(
    cluster, tmp_path, monkeypatch
):
    *variables, command = EXAMPLES[0]
    for line in variables:
        monkeypatch.setenv(*re.fullmatch(r"export (\w+)=(\S+)", line).groups())
    args, rows = specs_of(command)
    assert args.launcher == "slurm" and len(rows) == 9
    launcher(tmp_path, time_limit_s=args.time_limit).run_all(rows[:2])
    for line in asked(cluster):
        for name, word in (("job-name", "RUN"), ("output", "LOG"), ("wrap", "COMMAND")):
            line = re.sub(rf"--{name}=.*?(?= --\w|$)", f"--{name}={word}", line)
        assert line == SHOWN
    assert {*(cluster / "charged").read_text().splitlines()} == {"gpu my-project"}


def test_the_cards_of_a_parallel_variant_are_those_that_the_page_says(cluster, tmp_path):
    args, rows = specs_of(EXAMPLES[1][0])
    parallel = next(spec for spec in rows if spec.variant == "P1")
    launcher(tmp_path).run_all([parallel])
    assert "--gpus=4 " in asked(cluster)[0] and args.world == [4]
