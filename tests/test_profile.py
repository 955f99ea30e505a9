"""Profiles: a trace's events to phases and parts, Nsight Compute's pages, and a whole profile."""

import dataclasses
import gzip
import json
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from qa_lib.lab.tools import profile
from qa_lib.measure import communication, trace
from qa_lib.measure.meter import Memory
from qa_lib.records.archive import Run
from qa_lib.run import fit
from tests.kernels import DEVICE
from tests.material import leave, refused, write
from tests.tiny import planned, quiet

HIDDEN = 768
WIDE = 3072
WIDTHS = trace.Widths(HIDDEN, WIDE, outputs=2)


def cpu(name, ts, dur, sizes=(), number=None, cat="cpu_op"):
    args = {"Input Dims": [list(size) for size in sizes], "External id": number}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def launched(name, ts, dur, at, call, number=None, runtime="cudaLaunchKernel"):
    """A runtime call at time `at` and the kernel that it launched, which ran from ts on."""
    begin = {"ph": "X", "cat": "cuda_runtime", "name": runtime, "ts": at, "dur": 1, "tid": 1}
    yield begin | {"args": {"correlation": call}}
    kernel = {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": 7}
    yield kernel | {"args": {"correlation": call, "External id": number}}


# Kernel, when it is launched (us), operator, sizes of its inputs -> phase, part.
KERNELS = [
    ("nvjet_tst", 25, "aten::addmm", [[768], [64, 3072], [3072, 768]], "forward", "feed-forward"),
    ("nvjet_ntt", 1025, "aten::mm", [[64, 768], [768, 768]], "backward", "attention"),
    ("norm_kernel", 45, "aten::native_layer_norm", [[64, 768]],
     "forward", "norms and elementwise"),
    ("adam", 2025, "aten::mul", [[768, 3072, 2]], "optimizer", "optimizer"),
]  # fmt: skip


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
    labels = {(row.name, row.phase, row.part) for row in work.itertuples()}
    assert labels == {(kernel, phase, part) for kernel, *_, phase, part in KERNELS}


def test_a_kernel_has_its_step_and_when_it_began_in_it():
    work = trace.work(gpu_trace(), WIDTHS)
    assert list(work["step"]) == [0] * 4 + [1] * 4
    assert work["start_ms"].tolist()[:2] == pytest.approx([0.0, 0.02])


def test_a_summary_has_means_over_steps():
    summary = trace.step_means(trace.work(gpu_trace(), WIDTHS), gpu_trace(), step_ms=0.5)
    expected = {"launches_per_step": 4, "kernels_per_step": 4, "busy_ms": 0.4, "busy_share": 0.8}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert summary["parts"]["forward"] == pytest.approx(
        {"feed-forward": 0.1, "norms and elementwise": 0.1}
    )


def test_kernels_of_a_graph_take_the_labels_of_those_launched_one_by_one():
    known = trace.work(gpu_trace(), WIDTHS)
    events = [cpu("ProfilerStep#5", 0, 4000, cat="user_annotation")]
    for index, name in enumerate([*known["name"][:4], "unknown"]):
        events += launched(name, 1000 + 100 * index, 50, 100, 1, runtime="cudaGraphLaunch")
    replayed = trace.work(events, WIDTHS)
    assert set(replayed["phase"]) == {""}
    labelled = trace.label_like(replayed, known)
    assert labelled["part"].tolist()[:4] == known["part"].tolist()[:4]
    assert labelled["phase"].tolist() == [*known["phase"][:4], "optimizer"]
    # One call each, in this made-up trace.
    assert trace.step_means(labelled, events, 1.0)["launches_per_step"] == 5


# Kernel, operator, sizes of its inputs, phase -> part.
PARTS = [
    ("void pytorch_flash::flash_fwd_kernel", "aten::_flash_attention_forward", [],
     "forward", "attention"),
    ("cutlass_80_gemm", "aten::bmm", [(96, 384, 64), (96, 64, 384)], "backward", "attention"),
    ("triton_per_fused_add_native_dropout_native_layer_norm_5", "", [],
     "forward", "norms and elementwise"),
    ("triton_poi_fused_gelu_2", "", [], "forward", "norms and elementwise"),
    ("triton_poi_fused_addmm_gelu_2", "triton_poi_fused_addmm_gelu_2", [(64, WIDE)],
     "forward", "norms and elementwise"),
    ("vectorized_elementwise_kernel", "aten::copy_", [(WIDE, HIDDEN)], "forward", "copies"),
    ("Memcpy HtoD", "", [], "forward", "copies"),
    ("triton_per_fused_add_embedding_native_layer_norm_0", "", [], "forward", "embeddings"),
    ("GammaBetaBackwardCUDAKernel", "aten::native_layer_norm_backward", [],
     "backward", "norms and elementwise"),
    ("sort", "aten::embedding_dense_backward", [(64, HIDDEN)], "backward", "embeddings"),
    ("nll_loss_forward", "aten::nll_loss_forward", [(8, 384)], "forward", "loss"),
    ("splitKreduce_kernel", "aten::addmm", [(2,), (64, HIDDEN), (HIDDEN, 2)], "forward", "loss"),
    ("multi_tensor_apply_kernel", "aten::_foreach_norm", [], "optimizer", "optimizer"),
    ("Memcpy DtoD", "aten::copy_", [(WIDE, HIDDEN)], "optimizer", "optimizer"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "op", "sizes", "phase", "part"), PARTS)
def test_a_kernel_has_a_part_by_its_name_operator_and_sizes(kernel, op, sizes, phase, part):
    assert trace.part_of(kernel, op, sizes, phase, WIDTHS) == part


def test_on_a_cpu_an_operator_is_charged_its_own_time_alone():
    events = [cpu(name, 0, 1000, cat="user_annotation") for name in ("ProfilerStep#5", "forward")]
    for name, ts, dur in (("aten::linear", 100, 300), ("aten::addmm", 150, 200)):
        events.append(cpu(name, ts, dur, [(64, HIDDEN), (HIDDEN, HIDDEN)]))
    assert trace.work(events, WIDTHS)["ms"].tolist() == pytest.approx([0.1, 0.2])


NSIGHT_PAGE = """\
==PROF== Connected to process 7
"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum",\
"sm__throughput.avg.pct_of_peak_sustained_elapsed","another"
"","","","nsecond","byte","%",""
"0","7","gemm","2,000","1,000,000","90.0","1"
"1","7","gemm","6,000","3,000,000","50.0","1"
"2","7","norm","1,000","n/a","10.0","1"
"3","7","norm","3,000","n/a","n/a","1"
"""


def test_nsight_computes_page_is_summed_by_kernel():
    gemm, norm = profile.parse_counters(NSIGHT_PAGE)
    assert gemm["name"] == "gemm"
    assert gemm["count"] == 2
    assert gemm["us"] == 8.0
    assert gemm["dram_bytes"] == 4e6
    assert norm["name"] == "norm"


def test_percentages_are_means_by_time_over_the_launches_that_have_them():
    gemm, norm = profile.parse_counters(NSIGHT_PAGE)
    assert gemm["sm_percent"] == pytest.approx((90 * 2 + 50 * 6) / 8)
    assert norm["sm_percent"] == 10.0


def test_a_metric_that_was_not_read_is_none():
    gemm, norm = profile.parse_counters(NSIGHT_PAGE)
    assert norm["dram_bytes"] is None
    assert gemm["fp8_ops"] is None
    assert gemm["warps_active_percent"] is None


def test_a_page_that_is_an_error_has_no_kernels():
    assert profile.parse_counters("==ERROR== ERR_NVGPUCTRPERM\n") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_counters_are_refused_in_one_line():
    printed = []
    assert profile.counters(planned(), printed.append) is None
    (line,) = printed
    assert "no GPU" in line


def test_what_gradients_take_is_not_taken_for_activations(tmp_path, monkeypatch):
    held = (100, 160, 160, 575, 575, 635, 635, 540)  # MiB before and after: two micro-batches
    monkeypatch.setattr(torch.cuda, "memory_allocated", Mock(side_effect=held))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 600)
    hooks = profile.MemoryHooks(1, tmp_path)
    for phase in ("forward", "backward") * 2:
        with hooks.phase(phase):
            pass
    assert hooks.kept == 60
    assert hooks.peaks == {"forward": 600, "backward": 600}


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The folder of a profile of a variant on this machine, and what was printed meanwhile."""
    runs = tmp_path_factory.mktemp("runs")
    variant = "E-packed-efficient" if DEVICE.type == "cuda" else "A2"
    spec = planned(variant, data="synthetic:200", machine=None)
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "WARM", 2)
        patch.setattr(profile, "TIMED", 3)
        profile.profile(spec, runs, printed.append)
    return runs / spec.run_path, printed


def test_a_profile_has_the_time_of_each_part_of_each_phase(profiled):
    folder, _ = profiled
    time = Run({}, folder).profile()["time"]
    assert time["parts"]["forward"]["attention"] > 0
    assert time["parts"]["backward"]["feed-forward"] > 0
    assert time["parts"]["optimizer"]["optimizer"] > 0
    in_parts = sum(sum(parts.values()) for parts in time["parts"].values())
    assert time["busy_ms"] == pytest.approx(in_parts)


def test_a_trace_has_the_profiled_steps_alone(profiled):
    folder, _ = profiled
    events = trace.read((folder / "trace.json.gz").read_bytes())
    names = {event.get("name", "") for event in events}
    steps = [name for name in names if name.startswith("ProfilerStep#")]
    assert len(steps) == profile.PROFILED
    assert trace.work(events, trace.Widths(1, 2, 3))["step"].nunique() == profile.PROFILED


@pytest.mark.skipif(DEVICE.type == "cuda", reason="is about machines without a GPU")
def test_without_a_gpu_there_is_no_memory_snapshot(profiled):
    folder, printed = profiled
    assert not (folder / profile.SNAPSHOT).exists()
    assert "A2: no memory snapshot, which is of a GPU" in printed[0]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="is about a GPU")
def test_a_memory_snapshot_names_the_lines_that_allocate(profiled):
    folder, _ = profiled
    snapshot = (folder / profile.SNAPSHOT).read_bytes()
    assert b"train/loop.py" in snapshot
    assert b"device_traces" in snapshot


def test_a_profile_that_fails_leaves_the_older_one_whole(tmp_path, monkeypatch):
    spec = planned("A2")
    folder = tmp_path / spec.run_path
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text("older")
    monkeypatch.setattr(fit, "build_model", Mock(side_effect=RuntimeError("no model")))
    with pytest.raises(RuntimeError, match="no model"):
        profile.profile(spec, tmp_path, quiet)
    (file,) = folder.iterdir()
    assert file.name == "profile.json"
    assert file.read_text() == "older"


def test_a_profile_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "profile.json").write_text("older")
    refused(r"profile\.json: not readable", Run({}, tmp_path).profile)


def test_a_profile_of_another_schema_is_refused(tmp_path):
    write(tmp_path / "profile.json", {"schema": "other"})
    refused("schema 'other' is not known", Run({}, tmp_path).profile)


# What traces hold beside the usual.


def in_one_step(*events) -> list[dict]:
    """A trace of a step of 4,000 us with these events."""
    return [cpu("ProfilerStep#5", 0, 4000, cat="user_annotation"), *events]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("autograd::engine::evaluate_function: MmBackward0", "backward"),
    ],
)
def test_without_ranges_of_ours_phases_are_those_that_pytorch_names(name, phase):
    named = cpu(name, 1000, 500)
    events = [*launched("gemm", 100, 10, 90, 1), *launched("gemm", 1200, 10, 1100, 2)]
    work = trace.work(in_one_step(named, *events), WIDTHS)
    assert work["phase"].tolist() == ["forward", phase]


def test_what_processes_do_between_backward_pass_and_update_counts_as_the_update():
    reduce = cpu("reduce", 1000, 500, cat="user_annotation")
    work = trace.work(in_one_step(reduce, *launched("nccl", 1200, 10, 1100, 2)), WIDTHS)
    assert work[["phase", "part"]].to_numpy().tolist() == [["optimizer", "optimizer"]]


def test_work_is_left_out_before_after_and_between_steps_and_without_its_launch():
    events = [cpu("ProfilerStep#5", 1000, 1000, cat="user_annotation")]
    events += [cpu("ProfilerStep#6", 3000, 1000, cat="user_annotation")]
    for number, at in enumerate((900, 1000, 1999, 2000, 3500, 4000)):
        events += launched(f"at {at}", at + 50, 10, at, number)
    _, without_launch = launched("unknown", 1500, 10, 1500, 99)
    work = trace.work([*events, without_launch], WIDTHS)
    assert list(zip(work["name"], work["step"], strict=True)) == [
        ("at 1000", 0),
        ("at 1999", 0),
        ("at 3500", 1),
    ]


def test_what_a_lookup_calls_counts_as_embeddings():
    events = [cpu("aten::embedding", 100, 50), cpu("aten::index_select", 110, 20)]
    work = trace.work(in_one_step(*events), WIDTHS)
    assert work["part"].tolist() == ["embeddings", "embeddings"]


def test_operators_of_two_threads_do_not_call_each_other():
    backward = cpu("aten::mm", 150, 200) | {"tid": 2}
    work = trace.work(in_one_step(cpu("aten::linear", 100, 300), backward), WIDTHS)
    assert work["ms"].tolist() == pytest.approx([0.3, 0.2])


def test_an_operator_that_follows_another_is_not_called_by_it():
    events = [cpu("aten::add", 100, 50), cpu("aten::mul", 150, 30)]
    work = trace.work(in_one_step(*events), WIDTHS)
    assert work["ms"].tolist() == pytest.approx([0.05, 0.03])


def test_an_operator_takes_no_less_than_no_time():
    events = [cpu("aten::add", 100, 50), cpu("aten::mul", 140, 70)]
    work = trace.work(in_one_step(*events), WIDTHS)
    assert work["ms"].tolist() == pytest.approx([0.0, 0.07])


def test_shapes_are_those_of_inputs_that_are_tensors():
    op = {"args": {"Input Dims": [[2, 3], [], [[4, 5], [6]], [7]]}}
    assert trace._sizes(op) == [(2, 3), (7,)]
    assert trace._sizes({}) == []


MORE_PARTS = [
    ("softmax_warp_forward", "aten::_log_softmax", [(8, 384)], "forward", "loss"),
    ("softmax_warp_forward", "aten::_softmax", [(8, 384)], "forward", "attention"),
    ("Memset (Device)", "aten::zero_", [], "forward", "copies"),
    ("aten::linear", "aten::linear", [(64, HIDDEN), (WIDE, HIDDEN)], "forward", "feed-forward"),
    ("aten::add", "aten::add", [(64, WIDE)], "backward", "norms and elementwise"),
]


@pytest.mark.parametrize(("kernel", "op", "sizes", "phase", "part"), MORE_PARTS)
def test_more_kernels_have_their_parts(kernel, op, sizes, phase, part):
    assert trace.part_of(kernel, op, sizes, phase, WIDTHS) == part


def test_a_summary_lists_the_heaviest_kernels_with_their_means(monkeypatch):
    monkeypatch.setattr(trace, "KERNELS_LISTED", 2)
    monkeypatch.setattr(trace, "KERNEL_NAME_LENGTH", 6)
    events = gpu_trace()
    events += launched("norm_kernel", 1500, 50, 46, 97)  # a second time in one of the two steps
    events += launched("heaviest", 1600, 500, 47, 98)
    summary = trace.step_means(trace.work(events, WIDTHS), events, step_ms=0.1)
    heaviest, norm = summary["kernels"]
    assert heaviest["name"] == "heavie"
    assert [heaviest["ms"], heaviest["count"]] == pytest.approx([0.25, 0.5])
    assert norm["name"] == "norm_k"
    assert [norm["ms"], norm["count"]] == pytest.approx([0.125, 1.5])
    assert (norm["phase"], norm["part"]) == ("forward", "norms and elementwise")
    assert summary["step_ms"] == 0.1
    assert summary["busy_share"] == 1.0, "no more than all of the time"


def test_launches_outside_of_steps_are_not_counted():
    events = [*gpu_trace(), *launched("late", 90_000, 10, 80_000, 99)]
    summary = trace.step_means(trace.work(events, WIDTHS), events, step_ms=0.5)
    assert summary["launches_per_step"] == 4


def test_a_summary_of_a_cpu_counts_no_launches():
    events = in_one_step(cpu("aten::mm", 100, 50))
    summary = trace.step_means(trace.work(events, WIDTHS), events, step_ms=1.0)
    assert summary["launches_per_step"] is summary["kernels_per_step"] is None
    assert summary["busy_share"] == pytest.approx(0.05)


def test_a_trace_without_work_has_a_summary_of_nothing():
    table = trace.label_like(trace.work([], WIDTHS), trace.work(gpu_trace(), WIDTHS))
    summary = trace.step_means(table, [], step_ms=1.0)
    assert (summary["busy_ms"], summary["busy_share"], summary["kernels"]) == (0.0, 0.0, [])


def test_a_replayed_kernel_without_a_counterpart_keeps_its_part_and_comes_first_in_the_forward():
    known = trace.work(gpu_trace(), WIDTHS)
    events = in_one_step()
    for index, name in enumerate(["unknown flash", *known["name"][:4]]):
        events += launched(name, 1000 + 100 * index, 50, 100, 1, runtime="cudaGraphLaunch")
    labelled = trace.label_like(trace.work(events, WIDTHS), known)
    assert labelled["phase"].tolist() == ["forward", *known["phase"][:4]]
    assert labelled["part"].tolist() == ["attention", *known["part"][:4]]


class Profiler:
    """A profiler of nothing, which notes the steps and what schedule it was given."""

    def __init__(self, activities, schedule, acc_events):
        self.schedule = schedule
        self.steps = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def step(self):
        self.steps += 1

    def export_chrome_trace(self, path):
        """Write a trace in which each profiled step computes 300 us and communicates 600 us."""
        events = [
            {"cat": "kernel", "name": name, "ts": 0, "dur": us * communication.OVERLAP_STEPS}
            for name, us in (("gemm", 300), ("ncclAllReduce", 900))
        ]
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": events}, file)


def test_the_overlap_is_the_mean_of_steps_after_one_to_warm_up(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    step = Mock()
    found = communication.overlap(step, Mock(type="cuda"))
    assert found == pytest.approx({"busy_ms": 0.3, "exposed_ms": 0.6})
    assert step.call_count == 1 + communication.OVERLAP_STEPS


def test_on_a_cpu_there_is_no_overlap():
    step = Mock()
    found = communication.overlap(step, torch.device("cpu"))
    assert found == {"busy_ms": None, "exposed_ms": None}
    step.assert_not_called()


# The numbers of a profile, by themselves.


def test_a_step_lasts_the_median_of_the_last_timed_steps_before_the_profiler():
    of_start = [9.0] * profile.WARM
    timed = [0.010] * 9 + [0.090] * 9 + [0.015] * (profile.TIMED - 18)
    of_profiler = [7.0] * 4
    meter = SimpleNamespace(times=[*of_start, *timed, *of_profiler])
    assert profile._median_step_ms(meter, profile.WARM + profile.TIMED) == pytest.approx(15.0)
    assert profile._median_step_ms(SimpleNamespace(times=[0.5, 0.1, 0.1, 9]), 2) == 300.0


def test_the_profiler_starts_one_step_before_those_that_it_records():
    hooks = profile.TimeHooks(warm=5)
    assert hooks.steps == 5 + 1 + profile.PROFILED
    actions = [hooks.profiler.schedule(step) for step in range(hooks.steps)]
    action = torch.profiler.ProfilerAction
    recorded = [action.RECORD] * (profile.PROFILED - 1) + [action.RECORD_AND_SAVE]
    assert actions == [action.NONE] * 5 + [action.WARMUP, *recorded]


def test_a_timeline_adds_what_is_taken_and_subtracts_what_is_given_back():
    changes = [
        {"action": "alloc", "size": 3 * 2**20, "time_us": 1000},
        {"action": "free_requested", "size": 2**20, "time_us": 1500},
        {"action": "free_completed", "size": 2**20, "time_us": 2000},
    ]
    assert profile._timeline(changes, base=5 * 2**20) == [(0.0, 8.0), (1.0, 7.0)]


def test_a_long_timeline_keeps_the_highest_of_the_changes_that_a_point_stands_for():
    changes = []
    for number in range(2 * profile.POINTS + 1):
        action = "free_completed" if number % 2 else "alloc"
        changes.append({"action": action, "size": 2**20, "time_us": number})
    points = profile._timeline(changes, base=0)
    assert len(points) <= profile.POINTS
    assert {mib for _, mib in points} == {1.0}


@pytest.mark.parametrize(
    ("config", "causal", "widths"),
    [
        ({"hidden_size": 8, "intermediate_size": 24}, False, (8, 24, 2)),
        ({"hidden_size": 8, "vocab_size": 50}, True, (8, 32, 50)),
    ],
)
def test_a_models_widths_are_of_its_layers_and_of_what_it_returns(
    config, causal, widths, monkeypatch
):
    monkeypatch.setattr(profile, "encoder_of", lambda model: SimpleNamespace(causal=causal))
    model = SimpleNamespace(config=SimpleNamespace(**config))
    assert profile._widths_of(model) == trace.Widths(*widths)


class RecordedHooks:
    """What `MemoryHooks` has after a step: 600 MiB at the peak, 900 held."""

    def __init__(self, at, snapshot):
        self.at = at
        self.snapshot = snapshot
        self.kept = 250 * 2**20
        self.peaks = {"forward": 500 * 2**20, "backward": 600 * 2**20, "optimizer": 450 * 2**20}
        self.reserved = 900 * 2**20
        self.timeline = [(0.0, 1.0)]


@pytest.fixture
def memory_of(monkeypatch):
    """Return a function that profiles the memory of a step with these peaks (MiB by phase)."""
    lasting = Memory(params_mib=100.0, grads_mib=100.0, optimizer_mib=200.0)

    def trained(spec, steps, data, device, hooks):
        assert steps == profile.BEFORE_MEMORY + 1
        hooks.peaks |= peaks
        hooks.snapshot.write_bytes(b"changes")
        return None, None, None

    monkeypatch.setattr(profile.gc, "collect", lambda: None)  # which takes a second after tests
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(profile, "MemoryHooks", RecordedHooks)
    monkeypatch.setattr(profile, "_train", trained)
    monkeypatch.setattr(profile, "memory_use", lambda *_: lasting)
    peaks = {}

    def profiled_memory(**mib):
        peaks.update({phase: size * 2**20 for phase, size in mib.items()})
        memory, snapshot = profile._profile_memory(None, None, None)
        assert snapshot == b"changes"
        return memory

    return profiled_memory


def test_the_peak_of_memory_is_divided_into_what_it_is_for(memory_of):
    assert memory_of() == {
        "params_mib": 100.0,
        "optimizer_mib": 200.0,
        "grads_mib": 100.0,
        "activations_mib": 250.0,
        "workspace_mib": 50.0,
        "peak_mib": 600.0,
        "peak_phase": "backward",
        "reserved_mib": 900.0,
        "fragmentation_mib": 300.0,
        "phases": {"forward": 500.0, "backward": 600.0, "optimizer": 450.0},
        "timeline": [(0.0, 1.0)],
    }


def test_at_a_peak_in_the_optimizers_phase_gradients_are_held_and_no_activations(memory_of):
    memory = memory_of(optimizer=700)
    assert memory["peak_phase"] == "optimizer"
    assert memory["workspace_mib"] == 700.0 - 100.0 - 200.0 - 100.0


def test_the_memory_of_the_wanted_step_alone_is_recorded(tmp_path, monkeypatch):
    recorded = []
    changes = [{"action": "alloc", "size": 2**20, "time_us": 5}]
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: 4 * 2**20)
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 9 * 2**20)
    monkeypatch.setattr(cuda.memory, "_snapshot", lambda: {"device_traces": [changes]})
    monkeypatch.setattr(cuda.memory, "_dump_snapshot", lambda path: recorded.append(path))
    monkeypatch.setattr(
        cuda.memory, "_record_memory_history", lambda **named: recorded.append(named)
    )
    hooks = profile.MemoryHooks(3, tmp_path / "snapshot")
    for step in (1, 2, 3, 4):
        hooks.finished(step)
    begun, path, ended = recorded
    assert begun["stacks"] == "python"
    assert path == str(tmp_path / "snapshot")
    assert ended == {"enabled": None}
    assert hooks.timeline == [(0.0, 5.0)]
    assert hooks.reserved == 9 * 2**20


def test_nsight_computes_window_is_open_for_one_step(monkeypatch):
    calls = []
    cudart = SimpleNamespace(
        cudaProfilerStart=lambda: calls.append("start"),
        cudaProfilerStop=lambda: calls.append("stop"),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    hooks = profile.CounterHooks()
    for step in range(1, hooks.at + 2):
        hooks.finished(step)
        calls.append(step)
    before = [*range(1, profile.UNCOUNTED)]
    last = profile.UNCOUNTED
    assert calls == [*before, "start", last, "stop", last + 1, last + 2]


# Nsight Compute in a process of its own.


@pytest.fixture
def nsight(tmp_path, monkeypatch):
    """Return a function that puts a program in place of Nsight Compute, which prints this.

    It returns the file in which the program leaves the words of its command, one a line.
    """

    def plays(stdout="", stderr=""):
        (tmp_path / "stdout").write_text(stdout)
        (tmp_path / "stderr").write_text(stderr)
        program = tmp_path / "ncu"
        program.write_text(
            '#!/bin/sh\ncd "$(dirname "$0")"\nprintf "%s\\n" "$@" > words\n'
            "cat stdout\ncat stderr >&2\n"
        )
        program.chmod(0o755)
        return tmp_path / "words"

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile, "child_command", lambda work, spec: ["python", work.name])
    return plays


def test_nsight_compute_counts_the_kernels_of_a_process_of_its_own(nsight):
    words = nsight(stdout=NSIGHT_PAGE)
    kernels = profile.counters(None, quiet)
    command = words.read_text().splitlines()
    assert [kernel["name"] for kernel in kernels] == ["gemm", "norm"]
    assert command[-2:] == ["python", "COUNT"]
    assert command[command.index("--metrics") + 1] == ",".join(profile.METRICS.values())
    assert command[command.index("--profile-from-start") + 1] == "off"


def test_it_is_said_how_many_kernels_are_counted(nsight, monkeypatch):
    monkeypatch.setattr(profile, "PROGRESS", 2)
    lines = [f'==PROF== Profiling "gemm" - {n}: 0%....50%....100% - 9 passes\n' for n in range(5)]
    nsight(stdout="".join(lines) + NSIGHT_PAGE)
    printed = []
    assert len(profile.counters(None, printed.append)) == 2
    assert printed[1:] == ["2 kernels are counted", "4 kernels are counted"]


@pytest.mark.parametrize(
    ("stdout", "stderr", "reason"),
    [
        ("", "", "it saw no kernel"),
        ("==ERROR== first\n", "==PROF== x\n==ERROR== ERR_NVGPUCTRPERM\n", "==ERROR== ERR_NVGPU"),
    ],
)
def test_why_no_counters_were_read_is_one_line(nsight, stdout, stderr, reason):
    nsight(stdout, stderr)
    printed = []
    assert profile.counters(None, printed.append) is None
    assert printed[-1].startswith(f"Nsight Compute read no counters: {reason}")


def test_without_nsight_compute_there_are_no_counters(nsight, monkeypatch):
    nsight(stdout=NSIGHT_PAGE)
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    printed = []
    assert profile.counters(None, printed.append) is None
    assert "no `ncu` here" in printed[0]


def test_the_longest_kernels_come_first_and_few_are_kept():
    page = NSIGHT_PAGE.split("\n")
    lines = [f'"{n}","7","k{n}","{n},000","1","1","1"' for n in range(1, profile.KERNELS + 3)]
    kernels = profile.parse_counters("\n".join([*page[:3], *lines]))
    assert len(kernels) == profile.KERNELS
    assert kernels[0]["name"] == f"k{profile.KERNELS + 2}"


# What may be profiled, and what the verb prints.


def test_what_cannot_run_here_or_takes_several_processes_is_not_profiled(tmp_path):
    spec = planned("A2")
    skipped = dataclasses.replace(spec, skip="no such kernel")
    refused("A2 cannot run here: no such kernel", profile.profile, skipped, tmp_path)
    several = dataclasses.replace(spec, world=2)
    refused("A2 runs in 2 processes", profile.profile, several, tmp_path)


PRINTED_PROFILE = {
    "time": {
        "step_ms": 12.345,
        "busy_share": 0.5,
        "launches_per_step": 99.6,
        "parts": {"forward": {"attention": 1.234}},
    },
    "memory": {"phases": {"forward": 1234.5}},
}


def test_the_verb_profiles_what_was_asked_for_and_prints_where_the_step_goes(
    tmp_path, monkeypatch, typed
):
    profiled = Mock(return_value=PRINTED_PROFILE)
    monkeypatch.setattr(profile, "profile", profiled)
    words = "--preset smoke --data synthetic:40 --micro-batch 4 --batch 16 --seed 3 --ncu --runs"
    lines = typed(f"profile A2 {words}", tmp_path).splitlines()
    spec, runs = profiled.call_args.args
    assert (spec.variant, spec.seed) == ("A2", 3)
    assert (spec.settings.micro_batch, spec.preset.batch) == (4, 16)
    assert spec.data_source == "synthetic:40"
    assert profiled.call_args.kwargs == {"count": True}
    assert runs == tmp_path
    folder = tmp_path / spec.run_path
    *lines, last, _ = lines
    assert "no record of a run, and `archive` takes a profile with its record" in last
    assert lines == [
        "step 12.35 ms, busy 50 %, 100 launches",
        "  forward   attention 1.23 ms",
        "  peak MiB  forward 1234",
        f"{folder}/memory_snapshot.pickle is for https://docs.pytorch.org/memory_viz",
        f"{folder}/profile.json",
    ]


def test_beside_a_record_nothing_is_said_of_one(tmp_path, monkeypatch, typed):
    profiled = Mock(return_value=PRINTED_PROFILE)
    monkeypatch.setattr(profile, "profile", profiled)
    words = "profile A2 --preset smoke --data synthetic:40 --runs"
    assert "has no record" in typed(words, tmp_path)
    leave(tmp_path, profiled.call_args.args[0])
    assert "no record" not in typed(words, tmp_path)


def test_a_profile_says_of_which_run_it_is_and_what_the_machine_can_do(profiled):
    folder, _ = profiled
    entry = Run({}, folder).profile()
    assert entry["run_id"] == folder.name
    assert entry["group"] == folder.parent.name
    assert entry["spec"]["micro_batch"] == 8
    assert entry["spec"]["hash"].startswith(folder.name.rpartition("-")[2])
    assert entry["time"]["step_ms"] > 0
    assert set(entry["ceilings"]) == {"matrix_tflops", "copy_gb_per_s"}
    assert entry["ncu"] is None
