"""Profiles: a trace's events to phases and parts, Nsight Compute's pages to numbers, and a whole profile on a CPU."""

from unittest.mock import Mock

import pytest
import torch

from qa_lib.lab.tools import profile
from qa_lib.measure import trace
from qa_lib.records.archive import Run
from qa_lib.run import fit
from tests.kernels import DEVICE
from tests.material import ROOT, cases, refused, table, write
from tests.tiny import planned, quiet

HIDDEN, WIDE = 768, 3072  # as in parts.csv and cases.json
WIDTHS = trace.Widths(HIDDEN, WIDE, outputs=2)


def cpu(name, ts, dur, sizes=(), number=None, cat="cpu_op"):
    args = {"Input Dims": [list(size) for size in sizes], "External id": number}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def launched(name, ts, dur, at, call, number=None, runtime="cudaLaunchKernel"):
    """A runtime call at time `at` and the kernel that it launched, which ran from ts on."""
    own = {"correlation": call}
    yield {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": runtime,
        "ts": at,
        "dur": 1,
        "tid": 1,
        "args": own,
    }
    args = own | {"External id": number}
    yield {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": 7, "args": args}


KERNELS = cases("kernels of a step")


def gpu_trace():
    """Two steps of four kernels each; the device runs 1,000 us behind the host."""
    events = []
    for step in (0, 1):
        base, call = 5000 * step, 10 * step
        events.append(cpu(f"ProfilerStep#{step + 5}", base, 4000, cat="user_annotation"))
        for number, phase in enumerate(("forward", "backward", "optimizer")):
            events.append(cpu(phase, base + max(10, 1000 * number), 900, cat="user_annotation"))
        for number, (kernel, at, op, sizes, *_) in enumerate(KERNELS):
            events.append(cpu(op, base + at - 5, 10, sizes, call + number))
            events += launched(
                kernel, base + at + 1000, 100, base + at, call + number, call + number
            )
    return events


def test_a_kernel_belongs_to_the_phase_and_part_that_launched_it():
    work = trace.work(gpu_trace(), WIDTHS)
    found = {(row.name, row.phase, row.part) for row in work.itertuples()}
    assert found == {(kernel, phase, part) for kernel, *_, phase, part in KERNELS}
    assert list(work["step"]) == [0] * 4 + [1] * 4
    assert work["start_ms"].tolist()[:2] == pytest.approx([0.0, 0.02])
    summary = trace.summary(work, gpu_trace(), step_ms=0.5)
    wanted = {"launches_per_step": 4, "kernels_per_step": 4, "busy_ms": 0.4, "busy_share": 0.8}
    assert {name: summary[name] for name in wanted} == pytest.approx(wanted)
    assert summary["parts"]["forward"] == pytest.approx(
        {"feed-forward": 0.1, "norms and elementwise": 0.1}
    )


def test_kernels_of_a_graph_take_the_labels_of_those_launched_one_by_one():
    known = trace.work(gpu_trace(), WIDTHS)
    events = [cpu("ProfilerStep#5", 0, 4000, cat="user_annotation")]
    for index, name in enumerate([*known["name"][:4], "unknown"]):
        events += launched(name, 1000 + 100 * index, 50, 100, 1, runtime="cudaGraphLaunch")
    replayed = trace.work(events, WIDTHS)
    labelled = trace.label_like(replayed, known)
    assert (
        set(replayed["phase"]) == {""}
        and labelled["part"].tolist()[:4] == known["part"].tolist()[:4]
    )
    assert labelled["phase"].tolist() == [*known["phase"][:4], "optimizer"]
    assert (
        trace.summary(labelled, events, 1.0)["launches_per_step"] == 5
    )  # one call each, in this made-up trace


@pytest.mark.parametrize(("kernel", "op", "sizes", "phase", "part"), table("parts"))
def test_parts(kernel, op, sizes, phase, part):
    sizes = [tuple(map(int, size.split("x"))) for size in sizes.split()]
    assert trace.part_of(kernel, op, sizes, phase, WIDTHS) == part


def test_on_a_cpu_an_operator_is_charged_its_own_time_alone():
    events = [cpu(name, 0, 1000, cat="user_annotation") for name in ("ProfilerStep#5", "forward")]
    for name, ts, dur in (("aten::linear", 100, 300), ("aten::addmm", 150, 200)):
        events.append(cpu(name, ts, dur, [(64, HIDDEN), (HIDDEN, HIDDEN)]))
    assert trace.work(events, WIDTHS)["ms"].tolist() == pytest.approx([0.1, 0.2])


def test_nsight_computes_page_is_summed_by_kernel():
    gemm, norm = profile.parse_counters((ROOT / "tests" / "nsight.csv").read_text())
    assert (gemm["name"], gemm["count"], gemm["us"], gemm["dram_bytes"]) == ("gemm", 2, 8.0, 4e6)
    assert norm["dram_bytes"] is None and gemm["fp8_ops"] is None
    assert profile.parse_counters("==ERROR== ERR_NVGPUCTRPERM\n") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_counters_are_refused_in_one_line():
    said = []
    assert (
        profile.counters(planned(), said.append) is None and len(said) == 1 and "no GPU" in said[0]
    )


def test_what_gradients_take_is_not_taken_for_activations(tmp_path, monkeypatch):
    held = (100, 160, 160, 575, 575, 635, 635, 540)  # MiB before and after: two micro-batches
    monkeypatch.setattr(torch.cuda, "memory_allocated", Mock(side_effect=held))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 600)
    hooks = profile.MemoryHooks(1, tmp_path)
    for phase in ("forward", "backward") * 2:
        with hooks.phase(phase):
            pass
    assert (hooks.kept, hooks.peaks) == (60, {"forward": 600, "backward": 600})


def test_a_profile_of_a_variant_on_this_machine(tmp_path):
    variant = "E-packed-efficient" if DEVICE.type == "cuda" else "A2"
    spec, said = planned(variant, data="synthetic:200", machine=None), []
    profile.profile(spec, tmp_path, said.append)
    folder = tmp_path / spec.run_path
    snapshot, time = folder / profile.SNAPSHOT, Run({}, folder).profile()["time"]
    if DEVICE.type == "cuda":
        assert (
            b"train/loop.py" in snapshot.read_bytes() and b"device_traces" in snapshot.read_bytes()
        )
    else:
        assert not snapshot.exists() and "A2: no memory snapshot, which is of a GPU" in said[0]
    for phase, part in (
        ("forward", "attention"),
        ("backward", "feed-forward"),
        ("optimizer", "optimizer"),
    ):
        assert time["parts"][phase][part] > 0
    assert time["busy_ms"] == pytest.approx(
        sum(sum(parts.values()) for parts in time["parts"].values())
    )
    events = trace.read((folder / "trace.json.gz").read_bytes())
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")}
    assert (
        len(steps)
        == profile.PROFILED
        == trace.work(events, trace.Widths(1, 2, 3))["step"].nunique()
    )


def test_a_profile_that_fails_leaves_the_older_one_whole(tmp_path, monkeypatch):
    spec = planned("A2")
    folder = tmp_path / spec.run_path
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text("older")
    monkeypatch.setattr(fit, "build_model", Mock(side_effect=RuntimeError("no model")))
    with pytest.raises(RuntimeError, match="no model"):
        profile.profile(spec, tmp_path, quiet)
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [("profile.json", "older")]
    refused(r"profile\.json: not readable", Run({}, folder).profile)
    write(folder / "profile.json", {"schema": "other"})
    refused("schema 'other' is not known", Run({}, folder).profile)
