"""Runs as jobs of Slurm: against a stand-in for its commands, and never against Slurm itself, which nobody has here."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from qa_lib.lab.cli import parser_of
from qa_lib.lab.launch import local as launch
from qa_lib.lab.search.plan import plan
from qa_lib.spec.spec import Machine
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
    """The folder of a stand-in for Slurm, whose commands are the only ones found before the system's."""
    folder = shutil.copytree(ROOT / "tests" / "slurm", tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def launcher(runs, seconds=0.0, **more):
    def command(spec, runs):
        return [sys.executable, "-c", RUN, str(runs / spec.run_path), str(seconds)]

    return launch.SlurmLauncher(runs, CPU, {}, command=command, **more)


def specs(*rows, **changes):
    return [
        dataclasses.replace(spec, **changes)
        for spec in plan(rows, "smoke", data="synthetic:40", machine=CPU)
    ]


def asked(cluster):
    """What each sbatch was asked for."""
    return [
        line for line in (cluster / "asked").read_text().splitlines() if line.startswith("--wait")
    ]


def test_a_job_asks_for_what_its_run_takes_and_is_judged_as_a_run_here(cluster, tmp_path):
    entries = launcher(tmp_path / "runs").run_all(specs("A1", "P1"))
    assert [entry["status"] for entry in entries] == ["ok", "ok"]
    one, two = sorted(asked(cluster), key=lambda line: "P1" in line)
    assert "--cpus-per-task=1 " in one and "--cpus-per-task=2 " in two and "--time=15 " in one
    assert "--gpus" not in one + two, "these are runs on CPUs"
    log = (tmp_path / "runs" / specs("A1")[0].run_path / "log.txt").read_text()
    assert log == "Submitted batch job 1\nthe last word\n"
    assert launcher(tmp_path / "runs").run_all(specs("A1", "P1")) == entries
    assert len(asked(cluster)) == 2, "what is finished is no job again"


def test_what_slurm_refuses_is_in_the_record(cluster, tmp_path):
    (entry,) = launcher(tmp_path).run_all(specs("P1", hardware="h100", world=9))
    assert entry["status"] == "killed"
    assert entry["error"]["message"].endswith(
        "sbatch: error: Requested node configuration is not available"
    )


def test_a_job_over_its_limit_is_cancelled_and_the_queue_does_not_count(cluster, tmp_path):
    launcher(tmp_path, seconds=30, time_limit_s=1).run_all(specs("A1"))
    assert end_of(tmp_path / specs("A1")[0].run_path) == ("killed", "over its time limit of 1 s")
    assert len((cluster / "cancelled").read_text().splitlines()) == 2, (
        "before it began, and at its end"
    )
    patient = launcher(tmp_path, time_limit_s=1)
    patient.command = lambda spec, runs: [
        "sh",
        "-c",
        "sleep 2",
    ]  # its record says `starting` all the while
    assert "before the run did" in patient.run_all(specs("A2"))[0]["error"]["message"]


def test_a_driver_that_is_stopped_cancels_its_job(cluster, tmp_path):
    def look():
        if any(
            json.loads(path.read_text())["status"] == "running"
            for path in tmp_path.glob("*/*/record.json")
        ):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launcher(tmp_path, seconds=30).run_all(specs("A1"), look=look)
    assert end_of(tmp_path / specs("A1")[0].run_path) == (
        "killed",
        "the driver was stopped by ZeroDivisionError",
    )
    assert not list(cluster.glob("job-*"))


def test_two_drivers_of_one_folder_submit_each_run_once(cluster, tmp_path):
    rows = specs("A1", "A2", "A3")
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda _: launcher(tmp_path, 0.5).run_all(rows), range(2))]
    assert found[0] == found[1] and [entry["status"] for entry in found[0]] == ["ok"] * 3
    assert len(asked(cluster)) == 3


def test_a_node_is_asked_what_it_is_in_a_job_of_its_kind(cluster, tmp_path, monkeypatch):
    said = dataclasses.asdict(Machine("h100", gpus=1, sm=90)), {"gpu": "NVIDIA H100"}
    monkeypatch.setattr(launch, "PROBE", f"print({json.dumps(said)!r})")
    assert launch.probe_node(tmp_path / "runs", 4) == (
        Machine("h100", gpus=4, sm=90),
        {"gpu": "NVIDIA H100"},
    )
    assert "--gpus=1 " in asked(cluster)[0] and not list((tmp_path / "runs").iterdir())
    monkeypatch.setattr(launch, "PROBE", "import nothing")
    refused(
        "a node cannot load the lab: ModuleNotFoundError.*'nothing'",
        launch.probe_node,
        tmp_path / "runs",
        None,
    )


def test_a_host_without_slurm_and_cards_of_this_machine_are_refused_in_one_line(
    tmp_path, monkeypatch, typed
):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = f"sweep --launcher slurm --preset smoke --runs {tmp_path}"
    said = "error: --launcher slurm: this host has no Slurm, whose command sinfo was not found; "
    assert typed(words, code=2).startswith(said)
    assert typed(f"{words} --gpus 0", code=2).startswith("error: --gpus and --shared-gpu are")


PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
EXAMPLES = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)]
SHOWN = re.search(r"```text\nsbatch (.*)\n```", PAGE)[1]


def specs_of(line):
    """The runs of a documented command on a host with H100s, of generated questions in place of one's own."""
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
    entries = launcher(tmp_path, time_limit_s=args.time_limit).run_all(rows[:2])
    assert [entry["status"] for entry in entries] == ["ok", "ok"]
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
