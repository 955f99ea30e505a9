"""Runs of several processes, through torchrun and gloo: how they begin, fail, stop and go on."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import psutil
import pytest
import torch

from qa_lib.errors import UserError
from qa_lib.lab.launch import anywhere, child, torchrun
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.launch.driver import START, WARM
from qa_lib.lab.launch.process import Work, child_command, kill
from qa_lib.measure import hardware
from qa_lib.records import record
from qa_lib.run.recording import fault_path, first_fault, noting_faults, recording
from qa_lib.signals import Stopped
from qa_lib.train.checkpoint import CHECKPOINT
from qa_lib.train.parallel.process_group import ProcessGroup
from tests import faulty, small, warm
from tests.material import ROOT, end_of, leave, python, refused, wait_for, write
from tests.tiny import H200, losses_of, planned, quiet, steps_of

PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
LIMIT_S = 120  # in which a failed run must have ended; 15 s on two free cores


def short(variant="P1", **sizes):
    sizes = {"steps": 30, "measure_from": 5, "checkpoint_every": 10, "quality": False} | sizes
    return planned(variant, sizes=sizes, data="synthetic:120")


def left_of(runs) -> list[int]:
    """Return the processes at work for a runs folder, which have it in their command.

    Those whose torchrun has gone, and which are no longer below this process, are among them.
    """
    left = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        if str(runs) in command:
            left.append(process.info["pid"])
    return left


def fit_warm(spec, runs, **fault) -> dict:
    """Train a run in its processes, without torchrun; return its record.

    A process may fail by a fault, see faulty.py.
    """
    words = faulty.child_command(Work.RANK, spec, runs, fault)[2:]
    warm.together(runs, spec.world, *words, TORCHELASTIC_RESTART_COUNT="0")
    return record.read_record(runs / spec.run_path)


# A run that comes to its end.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run's folder, and its record."""
    spec = short(quality=True)
    runs = tmp_path_factory.mktemp("whole")
    return runs / spec.run_path, fit_warm(spec, runs)


def test_the_record_is_of_all_processes(whole):
    _, entry = whole
    assert entry["status"] == "ok"
    assert entry["spec"]["world"] == 2
    parallel = entry["parallel"]
    assert parallel["world"] == 2
    assert parallel["weights_equal"] is True
    assert parallel["backend"] == "gloo"
    assert parallel["wrapper"] == "DistributedDataParallel"
    assert parallel["rank_peak_mib"] is None, "which is not measured on a CPU"
    assert set(parallel["rank_step_ms"]) == {"0", "1"}


def test_the_speed_is_that_of_all_processes_together(whole):
    run_dir, entry = whole
    timed_ms = [step["ms"] for step in steps_of(run_dir)][5:]
    samples = 16 * len(timed_ms)
    per_s = samples / sum(timed_ms) * 1e3
    assert entry["speed"]["samples_per_s"] == pytest.approx(per_s, rel=0.4)


def test_the_first_process_logs_every_step_once_and_keeps_the_model(whole):
    run_dir, _ = whole
    assert [step["step"] for step in steps_of(run_dir)] == list(range(1, 31))
    assert (run_dir / "model" / "model.safetensors").exists()
    assert not list(run_dir.glob("fault*"))


# How torchrun is started and supervised.


def test_torchrun_is_asked_for_as_many_processes(tmp_path, monkeypatch):
    """How the real torchrun ends is in the slow tests below."""
    spec = short()
    asked = []
    monkeypatch.setattr("torch.distributed.run.main", asked.extend)
    (tmp_path / spec.run_path).mkdir(parents=True)
    torchrun.supervise(spec, str(tmp_path))
    assert asked[:3] == ["--standalone", "--nproc-per-node", "2"]
    assert asked[3:6] == ["-m", "qa_lib.lab.launch.child", "rank"]


def test_faults_of_before_are_gone_when_torchrun_starts(tmp_path, monkeypatch):
    spec = short()
    run_dir = tmp_path / spec.run_path
    monkeypatch.setattr("torch.distributed.run.main", lambda words: None)
    run_dir.mkdir(parents=True)
    fault_path(run_dir, 1).write_text("{}")
    torchrun.supervise(spec, str(tmp_path))
    assert first_fault(run_dir) is None


def test_a_run_of_several_processes_returns_its_record_and_says_what_they_print(
    tmp_path, monkeypatch
):
    spec = short()
    said = []
    command = small.pretend_command(spec, tmp_path)
    monkeypatch.setattr(torchrun, "child_command", lambda *_: command)
    entry = fit(spec, tmp_path, say=said.append)
    assert entry == record.read_record(tmp_path / spec.run_path)
    assert entry["status"] == "ok"
    assert said == ["the last word"]


def test_processes_that_end_before_the_run_did_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun, "child_command", lambda *_: ["true"])
    refused("its processes ended before the run did", fit, short(), tmp_path, say=quiet)


@pytest.mark.parametrize(("threads", "each"), [(3, "3"), (None, "4")])
def test_each_process_has_its_threads_and_no_older_result_stands_meanwhile(
    threads, each, tmp_path, monkeypatch
):
    """Two processes of a host with eight cores."""
    spec = short(threads=threads)
    started = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr(torchrun.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torchrun, "subprocess", Mock(Popen=started))
    leave(tmp_path, spec)
    with pytest.raises(ZeroDivisionError):
        torchrun.run_processes(spec, tmp_path, quiet)
    assert started.call_args.kwargs["env"]["OMP_NUM_THREADS"] == each
    assert record.read_record(tmp_path / spec.run_path)["status"] == "starting"


def test_torchrun_is_forked_from_a_process_that_may_be(tmp_path, monkeypatch):
    spec = short()
    said = []
    command = small.pretend_command(spec, tmp_path)
    monkeypatch.setattr(torchrun, "child_command", lambda *_: command)
    monkeypatch.setattr(torchrun, "subprocess", None)
    entry = torchrun.watch_processes(spec, tmp_path, said.append, is_forkable=True)
    assert entry["status"] == "ok"
    assert said == ["the last word"]


@pytest.mark.parametrize(
    ("start", "is_forkable"), [(WARM, True), ("cold, since it is so", False), (None, False)]
)
def test_a_run_of_a_driver_forks_torchrun_where_it_is_warm(start, is_forkable, monkeypatch):
    monkeypatch.delenv(START, raising=False)
    if start:
        monkeypatch.setenv(START, start)
    watch = Mock()
    monkeypatch.setattr(torchrun, "watch_processes", watch)
    child.train(short(), "runs")
    assert watch.call_args.kwargs["is_forkable"] is is_forkable


WAITS = """import time
print("a line", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("is_forkable", [False, True])
def test_processes_are_asked_to_end_where_this_one_is_stopped(is_forkable, tmp_path, monkeypatch):
    spec = short()
    leave(tmp_path, spec, status=record.STARTING)
    (tmp_path / "waits.py").write_text(WAITS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ends = []

    def end(process):
        ends.append(process.returncode)
        kill(process)

    command = [sys.executable, "-m", "waits"]
    monkeypatch.setattr(torchrun, "child_command", lambda *_: command)
    monkeypatch.setattr(torchrun, "GRACE_S", 10)
    monkeypatch.setattr(torchrun, "kill", end)
    said = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        torchrun.watch_processes(spec, tmp_path, said, is_forkable)
    said.assert_called_once_with("a line")
    assert ends == [-signal.SIGTERM]
    assert end_of(tmp_path / spec.run_path) == ("killed", "stopped by SIGINT (Ctrl-C)")


@pytest.mark.parametrize(
    ("end", "fails"),
    [({"status": "ok"}, False), ({"status": "skipped"}, False), ({"status": "oom"}, True)],
    ids=["ok", "skipped", "oom"],
)
def test_a_process_that_is_out_of_memory_fails_so_that_torchrun_ends_the_others(
    end, fails, monkeypatch
):
    monkeypatch.setattr(anywhere, "fit_here", lambda *_: end)
    with pytest.raises(SystemExit) if fails else contextlib.nullcontext():
        child.be_rank(None, "runs")


def test_a_process_that_is_stopped_fails_without_a_traceback(monkeypatch):
    monkeypatch.setattr(anywhere, "fit_here", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        child.be_rank(None, "runs")
    assert ended.value.code == 1


def test_a_child_does_the_work_that_its_command_names(monkeypatch):
    spec = planned()
    done = []
    for work in Work:
        monkeypatch.setitem(
            child.FUNCTIONS, work, lambda *words, work=work: done.append((work, *words))
        )
        child.main(*child_command(work, spec, "runs")[3:])
    assert done == [(work, spec, "runs") for work in Work]


def test_each_work_of_a_child_has_its_function():
    names = {work: function.__name__ for work, function in child.FUNCTIONS.items()}
    assert names == {
        Work.TRAIN: "train",
        Work.SUPERVISE: "supervise",
        Work.RANK: "be_rank",
        Work.COUNT: "count_one_step",
    }


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_ends_all_and_is_a_result(tmp_path, monkeypatch):
    spec = short()
    fault = {"rank": 1, "step": 15, "kind": "oom"}
    entry = fit_with_fault(spec, tmp_path, fault, monkeypatch)
    message = "process 1 of 2: CUDA out of memory"
    assert entry["status"] == "oom"
    assert entry["error"] == {"kind": "OutOfMemoryError", "message": message, "step": 15}


@pytest.mark.slow
def test_a_process_that_raises_ends_all_with_its_fault_told(tmp_path, monkeypatch):
    spec = short()
    fault = {"rank": 1, "step": 15, "kind": "error"}
    with pytest.raises(UserError, match="process 1 of 2: a fault"):
        fit_with_fault(spec, tmp_path, fault, monkeypatch)
    entry = record.read_record(tmp_path / spec.run_path)
    message = "process 1 of 2: a fault"
    assert entry["status"] == "error"
    assert entry["error"] == {"kind": "ValueError", "message": message, "step": 15}


@pytest.mark.slow
def test_a_process_that_is_killed_ends_all_and_the_next_call_goes_on(whole, tmp_path, monkeypatch):
    spec = short()
    fault = {"rank": 1, "step": 15, "kind": "killed"}
    with pytest.raises(UserError, match="process 1 of 2 was ended by SIGKILL"):
        fit_with_fault(spec, tmp_path, fault, monkeypatch)
    entry = record.read_record(tmp_path / spec.run_path)
    message = "process 1 of 2 was ended by SIGKILL"
    assert entry["status"] == "killed"
    assert entry["error"] == {"kind": "SIGKILL", "message": message, "step": None}
    # From the last checkpoint, with the steps of a run that was left alone.
    entry = fit_warm(spec, tmp_path)
    assert entry["status"] == "ok"
    assert entry["time"]["resumed_from_step"] == 10
    assert entry["time"]["steps"] == 30
    assert losses_of(tmp_path / spec.run_path) == losses_of(whole[0])


def fit_with_fault(spec, runs, fault, monkeypatch) -> dict:
    """Return what fit returns for a run under torchrun in which one process fails.

    Check that it ends in time, and that no process and no note of a fault is left.
    """
    begin = time.monotonic()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(
                torchrun, "child_command", lambda *words: faulty.child_command(*words, fault)
            )
            return fit(spec, runs, say=quiet)
    finally:
        assert time.monotonic() - begin < LIMIT_S
        assert left_of(runs) == []
        assert not list((runs / spec.run_path).glob("fault*"))


# The public fit on a spec and a runs folder, in a Python of its own.
FIT = """
import sys

from qa_lib import fit
from qa_lib.lab.launch.process import spec_from

fit(spec_from(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(tmp_path):
    """A terminal sends it to torchrun as well."""
    spec = short(steps=100_000)
    written = json.dumps(dataclasses.asdict(spec))
    command = [sys.executable, "-c", FIT, written, str(tmp_path)]
    process = subprocess.Popen(command, start_new_session=True, cwd=ROOT, **PIPED)
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("*/*/steps.jsonl")))
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert len(family) >= 3, "torchrun and its two"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert end_of(tmp_path / spec.run_path) == ("killed", "stopped by SIGINT (Ctrl-C)")


# Which fault is told.


def test_copies_that_drift_apart_are_told_in_the_record(tmp_path):
    entry = fit_warm(short(), tmp_path, rank=1, step=15, kind="drift")
    assert entry["status"] == "ok"
    assert entry["parallel"]["weights_equal"] is False


# Faults are (time, kind, status), one for each process that left one; exit codes are those of all
# processes: -15 for SIGTERM, -11 for SIGSEGV, and -9 for SIGKILL, which torchrun sends to one that
# waits in a kernel. The end is a status and what is said of it.
CLOSED = (20.0, "ConnectionClosed", "error")
CAUSES = {
    "the earlier fault": (
        [CLOSED, (19.5, "OutOfMemory", "error")],
        [1, 1],
        ("error", "process 1 of 2: OutOfMemory"),
    ),
    "a process that a signal has ended": (
        [CLOSED],
        [-15, -11],
        ("killed", "process 1 of 2 was ended by SIGSEGV"),
    ),
    "a signal, rather than a peer that ended without a fault": (
        [],
        [1, -11],
        ("killed", "process 1 of 2 was ended by SIGSEGV"),
    ),
    "memory, before a kill by torchrun": (
        [(20.0, "OutOfMemory", "oom")],
        [1, -9],
        ("oom", "process 0 of 2: OutOfMemory"),
    ),
    "a fault, and not the abort that came of it": (
        [CLOSED, (19.5, "AcceleratorError", "error")],
        [-15, -6],
        ("error", "process 1 of 2: AcceleratorError"),
    ),
    "a process that left no fault": (
        [],
        [-15, 3],
        ("killed", "process 1 of 2 ended with exit code 3"),
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_first_fault_is_the_cause(cause, tmp_path):
    faults, exit_codes, end = CAUSES[cause]
    spec = short()
    record.write_record(tmp_path, record.new_record(spec, {}))
    for rank, (at, kind, status) in enumerate(faults):
        error = {"kind": kind, "message": f"process {rank} of 2: {kind}", "step": 3}
        write(fault_path(tmp_path, rank), {"at": at, "status": status, "error": error})
    torchrun.record_fault(spec, tmp_path, dict(enumerate(exit_codes)))
    assert end_of(tmp_path) == end


def test_a_fault_that_is_in_the_record_is_not_told_again(tmp_path):
    record.write_record(tmp_path, record.new_record(short(), {}))
    fault = {"at": 1.0, "status": "error", "error": {"kind": "ValueError", "message": "a fault"}}
    write(fault_path(tmp_path, 0), fault)
    torchrun.record_fault(short(), tmp_path, {0: 1})
    assert first_fault(tmp_path) is None


@pytest.mark.parametrize(
    ("age_s", "end"), [(0, ("error", "a fault")), (1e6, ("killed", "stopped by SIGTERM"))]
)
def test_a_process_that_torchrun_stops_tells_the_others_fault_and_no_older_one(
    age_s, end, tmp_path
):
    error = {"kind": "ValueError", "message": "a fault", "step": 3}
    fault = {"at": time.time() - age_s, "status": "error", "error": error}
    with pytest.raises(Stopped), recording(short(), tmp_path, quiet):
        write(fault_path(tmp_path, 1), fault)
        raise Stopped("SIGTERM")
    assert end_of(tmp_path) == end


def test_memory_that_ran_out_comes_before_faults_and_what_cannot_be_read_is_none(tmp_path):
    """A process whose peer has gone fails by that, and may be the first to say so."""
    assert first_fault(tmp_path) is None
    for rank, (at, status) in enumerate([(1.0, "error"), (3.0, "oom"), (2.0, "oom")]):
        write(fault_path(tmp_path, rank), {"at": at, "status": status})
    fault_path(tmp_path, 3).write_text("{half")
    assert first_fault(tmp_path)["at"] == 2.0
    assert first_fault(tmp_path, since=3.0)["at"] == 3.0
    assert first_fault(tmp_path, since=3.5) is None


def test_a_process_without_others_leaves_no_fault(tmp_path):
    alone = types.SimpleNamespace(store=None, rank=0, world=1)
    with pytest.raises(ZeroDivisionError), noting_faults(tmp_path, alone):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("shared", "status"), [(False, "oom"), (True, "error")])
def test_memory_that_other_runs_may_have_filled_is_an_error_of_any_process(
    shared, status, tmp_path
):
    second = types.SimpleNamespace(store=True, rank=1, world=2)
    with pytest.raises(MemoryError), noting_faults(tmp_path, second, shared):
        raise MemoryError
    assert first_fault(tmp_path)["status"] == status


# What cannot be shared.


def test_deepspeed_is_given_to_torchrun_even_by_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr("qa_lib.lab.launch.anywhere.run_processes", lambda *_: "its record")
    spec = dataclasses.replace(planned("P0-deepspeed", world=1), skip=None)
    assert fit(spec, tmp_path, say=quiet) == "its record"


def test_a_variant_of_one_process_is_refused_by_several(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    said = "A1 trains in one process, and torchrun has started 2"
    refused(said, fit, planned(), tmp_path, say=quiet)
    assert not list(tmp_path.iterdir())


def test_a_variant_of_one_process_is_trained_by_a_torchrun_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    monkeypatch.setattr("qa_lib.lab.launch.anywhere.fit_here", lambda *_: "its record")
    assert fit(planned(), tmp_path, say=quiet) == "its record"


@pytest.mark.parametrize(
    ("gpus", "world", "skip"),
    [
        (1, None, "needs 2 GPUs, and this machine has 1"),
        (1, 1, None),
        (2, None, None),
    ],
)
def test_a_variant_is_skipped_where_there_are_too_few_gpus(gpus, world, skip):
    machine = dataclasses.replace(H200, gpus=gpus)
    assert planned("P-one-bucket", machine=machine, world=world).skip == skip


def test_fit_of_a_variant_that_needs_more_gpus_ends_as_skipped_and_is_never_finished(tmp_path):
    said = []
    for _ in range(2):
        entry = fit(planned("P-one-bucket", machine=H200), tmp_path, say=said.append)
        assert entry["status"] == "skipped"
    assert not any("finished" in line for line in said)


@pytest.mark.parametrize(
    ("variant", "counts", "said"),
    [
        ("A1", {"world": 2}, "A1 trains in one process, not in 2"),
        (
            "P1",
            {"world": 4},
            "4 processes do not divide the 2 micro-batches of a step at preset 'smoke'",
        ),
        ("P1", {"stages": 2}, "P1 is no pipeline"),
        ("P-gpipe", {"world": 1}, "P-gpipe is a pipeline, and one process makes none"),
        ("P-gpipe", {"world": 3, "stages": 2}, "3 processes do not make up pipelines of 2"),
        (
            "P-1f1b",
            {"world": 4},
            "1f1b takes at least as many micro-batches as the 4 stages, and a pipeline has 2",
        ),
        (
            "P-interleaved",
            {"micro_batch": 16},
            "a multiple in micro-batches of the 2 stages, and a pipeline has 1",
        ),
    ],
)
def test_processes_that_cannot_share_a_step_are_refused_before_anything_starts(
    variant, counts, said
):
    refused(said, planned, variant, **counts)


@pytest.mark.parametrize(
    ("variant", "world", "skip"),
    [
        ("P-interleaved", 2, "a model of 2 layers has no 4 equal parts"),
        ("P-tensor", 4, "4 processes do not divide the 2 heads of attention"),
        ("P-gpipe", 2, None),
        ("P-tensor", 2, None),
    ],
)
def test_a_model_that_cannot_be_divided_skips_the_variant_with_the_reason(variant, world, skip):
    assert planned(variant, world=world).skip == skip


def test_stages_are_part_of_the_identity():
    """Two pipelines of two, and one of four."""
    two = planned("P-gpipe", micro_batch=2, world=4, stages=2)
    four = planned("P-gpipe", micro_batch=2, world=4, stages=4)
    assert (two.stages, two.accumulation) == (2, 4)
    assert four.accumulation == 8
    assert two.hash != four.hash


def test_stages_that_are_asked_for_by_a_number_or_by_its_absence_are_the_same():
    four = planned("P-gpipe", micro_batch=2, world=4, stages=4)
    assert planned("P-gpipe", micro_batch=2, world=4).hash == four.hash
    assert planned("P-gpipe", micro_batch=2, stages=4).hash == four.hash


# GPUs, and turns on them.


# What nvidia-smi topo prints of three GPUs and a network card.
TOPOLOGY = "\n".join(
    [
        "\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity",
        "GPU0\t X \tPIX\tSYS\tSYS\t0-31",
        "GPU1\tPIX\t X \tNV18\tSYS\t0-31",
        "GPU2\tSYS\tNV18\t X \tSYS\t0-31",
        "NIC0\tSYS\tSYS\tSYS\t X",
        "",
        "Legend:",
        "",
        "  X    = Self",
    ]
)
LINKS = {"abc": "PIX", "cb": "NV18", "ca": "SYS", "b": None, "ax": None}


@pytest.mark.parametrize(("visible", "link"), LINKS.items())
def test_the_link_is_that_of_the_first_two_gpus_that_the_process_sees(visible, link, monkeypatch):
    outputs = {"--query-gpu=uuid": "GPU-a\nGPU-b\nGPU-c\n", "topo": TOPOLOGY}
    pretend_gpus(visible, lambda first, *_: outputs[first], monkeypatch)
    assert hardware.interconnect() == link


def test_there_is_no_link_where_nvidia_smi_says_nothing(monkeypatch):
    pretend_gpus("abc", lambda *_: "", monkeypatch)
    assert hardware.interconnect() is None


def pretend_gpus(visible: str, nvidia_smi, monkeypatch) -> None:
    """Let this process see GPUs, a letter each, of which `nvidia_smi` tells."""
    monkeypatch.setattr(hardware, "_nvidia_smi", nvidia_smi)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda card: types.SimpleNamespace(uuid=visible[card])
    )


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
    gpu = types.SimpleNamespace(type="cuda")
    holders = []
    at_once = []

    def run(*order):
        seen.order = order
        for _ in range(20):
            with hardware.gpu_lock(gpu):
                holders.append(order)
                at_once.append(len(holders))
                time.sleep(0.001)
                holders.remove(order)

    threads = [threading.Thread(target=run, args=order, daemon=True) for order in ("ab", "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert at_once == [1] * 40


def test_the_others_wait_until_the_first_has_its_turn():
    first = ProcessGroup(torch.device("cpu"))
    second = ProcessGroup(torch.device("cpu"))
    first.store = second.store = torch.distributed.HashStore()
    second.rank = 1
    second.first = False
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.start)
        time.sleep(0.3)
        assert not waiting.done()
        first.start()
        waiting.result(timeout=10)


@pytest.fixture
def port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def answers(port: int) -> bool:
    """Return whether somebody listens at that port."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def agent(port: int, *options) -> subprocess.Popen:
    """Start torchrun as on one host of two, as torchrun.py documents it.

    Both hosts are this machine.
    """
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test", "--max-restarts", "1"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *words, *options]
    return subprocess.Popen(command, env=env, **PIPED)


@pytest.mark.slow
def test_two_hosts_go_on_together_when_one_has_lost_its_process(port, tmp_path):
    spec = short()
    fault = {"rank": 1, "step": 15, "kind": "killed"}
    work = faulty.child_command(Work.RANK, spec, tmp_path, fault)[1:]
    both = [agent(port, "--rdzv-conf", "join_timeout=40", *work) for _ in range(2)]
    said = [host.communicate(timeout=LIMIT_S)[0] for host in both]
    assert [host.returncode for host in both] == [0, 0], said
    entry = record.read_record(tmp_path / spec.run_path)
    assert entry["status"] == "ok"
    assert entry["time"]["resumed_from_step"] == 10
    assert entry["time"]["steps"] == 30
    assert entry["parallel"]["world"] == 2
    assert entry["parallel"]["weights_equal"] is True
    assert list((tmp_path / spec.run_path).glob("fault*")) == []


@pytest.mark.slow
def test_run_starts_the_processes_by_itself(tmp_path):
    words = f"run P1 --preset smoke --world 2 --data synthetic:80 --runs {tmp_path}".split()
    assert "P1: ok, samples/s" in python("-m", "qa_lib", *words).stdout
    (path,) = tmp_path.glob("cpu-smoke/P1-*/record.json")
    assert record.read_record(path.parent)["parallel"]["weights_equal"] is True


@pytest.mark.slow
def test_a_host_goes_on_alone_when_the_other_is_lost(port, tmp_path):
    """It takes the micro-batches of both from the last checkpoint on.

    `conf` lets it notice the loss sooner than torchrun's own settings would.
    """
    spec = short(steps=200)
    work = child_command(Work.RANK, spec, tmp_path)[1:]
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
    assert entry["status"] == "ok"
    assert entry["time"]["steps"] == 200
    assert entry["time"]["resumed_from_step"] >= 10
    assert entry["parallel"]["world"] == 1
    assert "world: 1 processes at the end" in entry["spec"]["adjusted"]
    assert len(losses_of(tmp_path / spec.run_path)) == 200
    assert left_of(tmp_path) == []
