"""Runs of several processes, through torchrun and over gloo: how they begin, fail, stop and go on."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
import torch

from qa_lib.errors import UserError
from qa_lib.lab.launch import torchrun
from qa_lib.lab.launch.process import call, kill
from qa_lib.measure import hardware
from qa_lib.records import record
from qa_lib.run.fit import fit, noting_faults, recording
from qa_lib.signals import Stopped
from qa_lib.train.checkpoint import CHECKPOINT
from qa_lib.train.parallel.process_group import ProcessGroup
from tests import faulty, warm
from tests.material import ROOT, cases, end_of, python, refused, wait_for, write
from tests.tiny import H200, losses_of, planned, quiet, steps_of

PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
LIMIT_S = 120  # in which a failed run must have ended; 15 s on two free cores


def short(variant="P1", **sizes):
    sizes = {"steps": 30, "measure_from": 5, "checkpoint_every": 10, "quality": False} | sizes
    return planned(variant, sizes=sizes, data="synthetic:120")


def left_of(runs) -> list[int]:
    """The processes at work for a runs folder, which their commands name: also those whose torchrun has gone, and which
    are below this process no more."""
    found = [process.info for process in psutil.process_iter(["pid", "cmdline"])]
    return [info["pid"] for info in found if str(runs) in (info["cmdline"] or [])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's folder, and its record."""
    spec, runs = short(quality=True), tmp_path_factory.mktemp("whole")
    return runs / spec.run_path, fit_warm(spec, runs)


def test_the_record_is_of_all_processes_and_the_model_of_the_first(whole):
    run_dir, entry = whole
    assert (entry["status"], entry["spec"]["world"]) == ("ok", 2)
    wanted = {
        "world": 2,
        "weights_equal": True,
        "backend": "gloo",
        "wrapper": "DistributedDataParallel",
    }
    wanted |= {"rank_peak_mib": None}  # which is not measured on a CPU
    assert entry["parallel"] | wanted == entry["parallel"] and set(
        entry["parallel"]["rank_step_ms"]
    ) == {"0", "1"}
    assert [step["step"] for step in steps_of(run_dir)] == list(range(1, 31))
    # Samples of all processes in the time of a step.
    timed = [step["ms"] for step in steps_of(run_dir)][5:]
    assert entry["speed"]["samples_per_s"] == pytest.approx(
        16 * len(timed) / sum(timed) * 1e3, rel=0.4
    )
    assert (run_dir / "model" / "model.safetensors").exists() and not list(run_dir.glob("fault*"))


def fit_warm(spec, runs, **fault) -> dict:
    """The record of a run in its processes, which one ends or spoils by a fault; without torchrun."""
    words = faulty.call("qa_lib.run.fit:work_as_one", spec, runs, fault)[2:]
    warm.together(runs, spec.world, *words, TORCHELASTIC_RESTART_COUNT="0")
    return record.read_record(runs / spec.run_path)


def test_torchrun_is_asked_for_as_many_processes_and_older_faults_are_gone(tmp_path, monkeypatch):
    """By a torchrun of our own; how the real one ends is in the test after the next."""
    spec, asked = short(), []
    monkeypatch.setattr("torch.distributed.run.main", asked.extend)
    (tmp_path / spec.run_path).mkdir(parents=True)
    torchrun.fault_path(tmp_path / spec.run_path, 1).write_text("{}")
    torchrun.supervise(spec, str(tmp_path))
    assert (
        asked[:3] == ["--standalone", "--nproc-per-node", "2"]
        and "qa_lib.run.fit:work_as_one" in asked
    )
    assert torchrun.first_fault(tmp_path / spec.run_path) is None


def test_a_run_of_several_processes_returns_its_record_or_the_reason_why_there_is_none(
    tmp_path, monkeypatch
):
    spec, said = short(), []
    run_dir = tmp_path / spec.run_path
    commands = iter([call("tests.small:pretend", spec, tmp_path), ["true"]])
    monkeypatch.setattr(torchrun, "call", lambda *_: next(commands))
    entry = fit(spec, tmp_path, say=said.append)
    assert entry == record.read_record(run_dir) and (entry["status"], said) == (
        "ok",
        ["the last word"],
    )
    refused("its processes ended before the run did", fit, spec, tmp_path, say=quiet, force=True)


FAULTS = [("killed", "SIGKILL", " was ended by SIGKILL"), ("error", "ValueError", ": a fault")]
FAULTS += [("oom", "OutOfMemoryError", ": CUDA out of memory")]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "kind", "said"), FAULTS)
def test_one_process_fails_and_all_end_with_its_fault_told(
    status, kind, said, whole, tmp_path, monkeypatch
):
    spec, fault, message = short(), {"rank": 1, "step": 15, "kind": status}, f"process 1 of 2{said}"
    with monkeypatch.context() as patch:
        patch.setattr(torchrun, "call", lambda *words: faulty.call(*words, fault))
        begin = time.monotonic()
        with (
            contextlib.nullcontext() if status == "oom" else pytest.raises(UserError, match=message)
        ):
            fit(spec, tmp_path, say=quiet)
        assert time.monotonic() - begin < LIMIT_S
    assert left_of(tmp_path) == []
    entry = record.read_record(tmp_path / spec.run_path)
    step = None if kind == "SIGKILL" else 15
    assert (entry["status"], entry["error"]) == (
        status,
        {"kind": kind, "message": message, "step": step},
    )
    assert list((tmp_path / spec.run_path).glob("fault*")) == []
    if (
        kind == "SIGKILL"
    ):  # the next call goes on from the last checkpoint, and makes the steps of a run left alone
        entry = fit_warm(spec, tmp_path)
        assert (entry["status"], entry["time"]["resumed_from_step"], entry["time"]["steps"]) == (
            "ok",
            10,
            30,
        )
        assert losses_of(tmp_path / spec.run_path) == losses_of(whole[0])


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(tmp_path):
    """From a terminal it comes to torchrun as well."""
    spec = short(steps=100_000)
    process = subprocess.Popen(
        torchrun.call("qa_lib.run.fit:fit", spec, tmp_path), start_new_session=True, **PIPED
    )
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("*/*/steps.jsonl")))
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert len(family) >= 3 and psutil.wait_procs(family, timeout=10)[1] == [], (
        "torchrun and its two"
    )
    assert end_of(tmp_path / spec.run_path) == ("killed", "stopped by SIGINT (Ctrl-C)")


def test_copies_that_drift_apart_are_told_in_the_record(tmp_path):
    entry = fit_warm(short(), tmp_path, rank=1, step=15, kind="drift")
    assert (entry["status"], entry["parallel"]["weights_equal"]) == ("ok", False)


def test_a_variant_of_one_process_is_refused_by_several(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    refused(
        "A1 trains in one process, and torchrun has started 2", fit, planned(), tmp_path, say=quiet
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("faults", "codes", "status", "said"), cases("causes of a failed run"))
def test_the_first_fault_is_the_cause(faults, codes, status, said, tmp_path):
    """By when each process has failed, by what and with which status, and by their exit codes: SIGTERM is -15, SIGSEGV
    -11, and SIGKILL, -9, is what torchrun sends to one that waits in a kernel."""
    spec = short()
    record.write_record(tmp_path, record.new_record(spec, {}))
    for rank, (at, kind, each) in enumerate(faults):
        error = {"kind": kind, "message": f"process {rank} of 2: {kind}", "step": 3}
        write(torchrun.fault_path(tmp_path, rank), {"at": at, "status": each, "error": error})
    torchrun.record_fault(spec, tmp_path, dict(enumerate(codes)))
    assert end_of(tmp_path) == (status, f"process {said}")


@pytest.mark.parametrize(
    ("age", "end"), [(0, ("error", "a fault")), (1e6, ("killed", "stopped by SIGTERM"))]
)
def test_a_process_that_torchrun_stops_tells_the_others_fault_and_no_older_one(age, end, tmp_path):
    error = {"kind": "ValueError", "message": "a fault", "step": 3}
    with pytest.raises(Stopped), recording(short(), tmp_path, quiet):
        write(
            torchrun.fault_path(tmp_path, 1),
            {"at": time.time() - age, "status": "error", "error": error},
        )
        raise Stopped("SIGTERM")
    assert end_of(tmp_path) == end


@pytest.mark.parametrize(("shared", "status"), [(False, "oom"), (True, "error")])
def test_memory_that_other_runs_may_have_filled_is_an_error_of_any_process(
    shared, status, tmp_path, monkeypatch
):
    monkeypatch.setattr("qa_lib.run.fit.shares_gpu", lambda device: shared)
    second = types.SimpleNamespace(store=True, rank=1, world=2)
    with pytest.raises(MemoryError), noting_faults(tmp_path, second):
        raise MemoryError
    assert torchrun.first_fault(tmp_path)["status"] == status


def test_more_gpus_than_there_are_skip_the_variant_with_the_reason(tmp_path):
    pair, row = dataclasses.replace(H200, gpus=2), partial(planned, "P-one-bucket")
    assert row(machine=H200).skip == "needs 2 GPUs, and this machine has 1"
    assert (row(machine=H200, world=1).skip, row(machine=pair).skip) == (None, None)
    assert fit(row(machine=H200), tmp_path, say=quiet)["status"] == "skipped"


@pytest.mark.parametrize(("row", "counts", "said"), cases("processes that cannot share a step"))
def test_processes_that_cannot_share_a_step_are_refused_before_anything_starts(row, counts, said):
    refused(said, planned, row, **counts)


@pytest.mark.parametrize(("row", "world", "said"), cases("models that cannot be divided"))
def test_a_model_that_cannot_be_divided_skips_the_variant_with_the_reason(row, world, said):
    assert planned(row, world=world).skip == said


def test_stages_are_part_of_the_identity():
    """Two pipelines of two, and one of four, whatever was asked for by a number and what by its absence."""
    two, four, same = (
        planned("P-gpipe", micro_batch=2, world=4, stages=stages) for stages in (2, 4, None)
    )
    assert (two.stages, two.accumulation, four.accumulation) == (2, 4, 8)
    assert two.hash != four.hash == same.hash == planned("P-gpipe", micro_batch=2, stages=4).hash


LINKS = {"abc": "PIX", "cb": "NV18", "ca": "SYS", "b": None, "ax": None}


@pytest.mark.parametrize(("visible", "said"), LINKS.items())
def test_the_link_is_that_of_the_first_two_gpus_that_the_process_sees(visible, said, monkeypatch):
    topology = (ROOT / "tests" / "topology.txt").read_text()
    answers = {"--query-gpu=uuid": "GPU-a\nGPU-b\nGPU-c\n", "topo": topology}
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda first, *_: answers[first])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda card: types.SimpleNamespace(uuid=visible[card])
    )
    assert hardware.interconnect() == said
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda *_: "")
    assert hardware.interconnect() is None


def test_the_first_process_takes_all_cards_in_one_order_whatever_order_they_are_seen_in(
    monkeypatch, tmp_path
):
    """Two runs on two cards, seen in opposite orders, would each hold what the other waits for."""
    monkeypatch.setattr(hardware.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    seen = threading.local()
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda card: types.SimpleNamespace(uuid=seen.order[card]),
    )
    gpu, holders, most = types.SimpleNamespace(type="cuda"), [], []

    def run(*order):
        seen.order = order
        for _ in range(20):
            with hardware.gpu_lock(gpu):
                holders.append(order)
                most.append(len(holders))
                time.sleep(0.001)
                holders.remove(order)

    threads = [threading.Thread(target=run, args=order, daemon=True) for order in ("ab", "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(most) == 40 and max(most) == 1


def test_the_others_wait_until_the_first_has_its_turn():
    first, second = ProcessGroup(torch.device("cpu")), ProcessGroup(torch.device("cpu"))
    first.store = second.store = torch.distributed.HashStore()
    second.rank, second.first = 1, False
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.start)
        time.sleep(0.3)
        assert not waiting.done()
        first.start()
        waiting.result(timeout=10)


@pytest.fixture
def port() -> int:
    """One that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def agent(port: int, *options) -> subprocess.Popen:
    """torchrun on one host of two, as torchrun.py documents it, which both are this machine."""
    endpoint = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id test --max-restarts 1"
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *endpoint.split(), *options]
    return subprocess.Popen(command, env=env, **PIPED)


@pytest.mark.slow
def test_two_hosts_go_on_together_when_one_has_lost_its_process(port, tmp_path):
    spec, fault = short(), {"rank": 1, "step": 15, "kind": "killed"}
    work = faulty.call("qa_lib.run.fit:work_as_one", spec, tmp_path, fault)[1:]
    both = [agent(port, "--rdzv-conf", "join_timeout=40", *work) for _ in range(2)]
    said = [host.communicate(timeout=LIMIT_S)[0] for host in both]
    assert [host.returncode for host in both] == [0, 0], said
    entry = record.read_record(tmp_path / spec.run_path)
    assert (entry["status"], entry["time"]["resumed_from_step"], entry["time"]["steps"]) == (
        "ok",
        10,
        30,
    )
    assert (entry["parallel"]["world"], entry["parallel"]["weights_equal"]) == (2, True)
    assert list((tmp_path / spec.run_path).glob("fault*")) == []


@pytest.mark.slow
def test_run_starts_the_processes_by_itself(tmp_path):
    words = f"run P1 --preset smoke --world 2 --data synthetic:80 --runs {tmp_path}".split()
    assert "P1: ok, samples/s" in python("-m", "qa_lib", *words).stdout
    (path,) = tmp_path.glob("cpu-smoke/P1-*/record.json")
    assert record.read_record(path.parent)["parallel"]["weights_equal"] is True


@pytest.mark.slow
def test_a_host_goes_on_alone_when_the_other_is_lost(port, tmp_path):
    """It takes the micro-batches of both from the last checkpoint on; here it notices sooner than by torchrun's own
    settings."""
    spec = short(steps=200)
    work = torchrun.call("qa_lib.run.fit:work_as_one", spec, tmp_path)[1:]
    conf = "join_timeout=40,last_call_timeout=3,keep_alive_interval=1"
    options = ("--nnodes", "1:2", "--rdzv-conf", conf, *work)
    head = agent(port, *options)
    wait_for(lambda: answers(port))
    other = agent(port, *options)
    wait_for((tmp_path / spec.run_path / CHECKPOINT).exists)
    kill(other)
    said = head.communicate(timeout=LIMIT_S)[0]
    assert head.returncode == 0, said
    entry = record.read_record(tmp_path / spec.run_path)
    assert (entry["status"], entry["time"]["steps"]) == ("ok", 200) and entry["time"][
        "resumed_from_step"
    ] >= 10
    assert (
        entry["parallel"]["world"] == 1
        and "world: 1 processes at the end" in entry["spec"]["adjusted"]
    )
    assert len(losses_of(tmp_path / spec.run_path)) == 200 and left_of(tmp_path) == []
