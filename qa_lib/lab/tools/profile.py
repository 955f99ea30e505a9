"""Where one variant's step spends its time and memory: a profile of a few steady steps.

It is kept beside the run's record. A run that is timed is not profiled and a profile is not timed,
so that neither disturbs the other: the profile trains a few steps of its own, and takes the step's
length from those before the profiler starts. Hardware counters are read by Nsight Compute, of one
step more, where it is installed and may read them.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from qa_lib.errors import UserError, wrapped
from qa_lib.lab.launch.driver import surroundings
from qa_lib.lab.launch.process import Work, child_command, child_env, kill
from qa_lib.lab.search.plan import plan
from qa_lib.measure import hardware, trace
from qa_lib.measure.meter import MIB, Hooks, Meter, memory_use
from qa_lib.model.architectures import encoder_of
from qa_lib.model.build import DTYPES
from qa_lib.records import record
from qa_lib.records.files import check_folder, write_atomically
from qa_lib.records.schema import PROFILE_SCHEMA
from qa_lib.run.fit import prepare, train
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.spec.spec import Spec

# Numbers of steps.
WARM = 12  # until a step's length has settled
TIMED = 20  # for the step's length
PROFILED = 3  # under the profiler
SETTLED = 5  # before those of a notebook's picture, by which nothing is timed
BEFORE_MEMORY = 5  # before the step whose memory is recorded
UNCOUNTED = 5  # before the step whose kernels Nsight Compute counts

SNAPSHOT = "memory_snapshot.pickle"  # a file of the run's folder
POINTS = 400  # of the allocator's timeline, at most
KERNELS = 40  # that the counters are kept of
PROGRESS = 200  # kernels after which a line is printed while they are counted
# Our names -> Nsight Compute's, of what is summed over the launches of a kernel.
SUMS = {
    "us": "gpu__time_duration.sum",
    "dram_bytes": "dram__bytes.sum",
    "fp16_ops": "sm__ops_path_tensor_src_fp16.sum",
    "bf16_ops": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp8_ops": "sm__ops_path_tensor_src_fp8.sum",
}
# The same of percentages, whose mean over the launches is weighted by their time. Warps count while
# an SM has any, which is the occupancy that was achieved; throughputs count over all of a launch.
PERCENTAGES = {
    "warps_active_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
METRICS = SUMS | PERCENTAGES
# Else the profiler writes a line when it starts and one when it stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "9")


def main(args: argparse.Namespace) -> int:
    """Profile one variant here, print where its step goes and where the files are."""
    (spec,) = plan(
        variants=[args.variant],
        preset=args.preset,
        seeds=[args.seed],
        data=args.data,
        model=args.model,
        micro_batch=args.micro_batch,
        batch=args.batch,
        runs=args.runs,
    )
    if spec.chosen:
        print(wrapped(spec.adjusted[0]))
    with hardware.gpu_lock(hardware.train_device()):  # other runs may be timed on this GPU
        entry = profile(spec, args.runs, count=args.ncu)
    folder = args.runs / spec.run_path
    time = entry["time"]
    launches = ""
    if time["launches_per_step"] is not None:
        launches = f", {time['launches_per_step']:.0f} launches"
    print(f"step {time['step_ms']:.2f} ms, busy {100 * time['busy_share']:.0f} %{launches}")
    for phase, parts in time["parts"].items():
        print(f"  {phase:10}" + ", ".join(f"{part} {ms:.2f} ms" for part, ms in parts.items()))
    if entry["memory"]:
        peaks = entry["memory"]["phases"]
        print("  peak MiB  " + ", ".join(f"{phase} {mib:.0f}" for phase, mib in peaks.items()))
        print(folder / SNAPSHOT, "is for https://docs.pytorch.org/memory_viz")
    print(folder / "profile.json")
    if not (folder / "record.json").exists():
        print(
            wrapped(
                "The folder has no record of a run, and `archive` takes a profile with its record. "
                "`python -m qa_lib run` makes one there, with the same options but --ncu."
            )
        )
    return 0


def profile(spec: Spec, runs: str | Path, say=print, count: bool = False) -> dict:
    """Profile a spec, write the profile into its run's folder, and return it.

    The files are profile.json, trace.json.gz and, of a GPU, memory_snapshot.pickle, which is for
    https://docs.pytorch.org/memory_viz. `count` asks for the GPU's counters as well, which take
    minutes (see `counters`). On failure nothing is written: an earlier profile stays whole.

    Raises UserError for a spec that cannot run here or takes several processes.
    """
    if spec.skip:
        raise UserError(f"{spec.variant} cannot run here: {spec.skip}")
    if spec.world > 1:
        raise UserError(f"{spec.variant} runs in {spec.world} processes, and a profile is of one")
    if spec.preset.threads:
        torch.set_num_threads(spec.preset.threads)
    device = hardware.train_device()
    run_dir = Path(runs) / spec.run_path
    check_folder(run_dir)
    data = _load(spec)
    # The same kernels one by one, for what a graph hides: who launched them, and when memory was
    # taken.
    eager_settings = dataclasses.replace(spec.settings, cuda_graph=False)
    without_graph = dataclasses.replace(spec, settings=eager_settings)

    memory = None
    snapshot = None
    if device.type == "cuda" and spec.settings.engine == "loop":
        say(f"{spec.variant}: one step under the allocator's eyes")
        # First, while nothing else is allocated.
        memory, snapshot = _profile_memory(without_graph, data, device)
    else:
        say(f"{spec.variant}: no memory snapshot, which is of a GPU and of a step of train/loop.py")

    say(f"{spec.variant}: {WARM + TIMED} steps, then {PROFILED} under the profiler")
    steps = _profile_time(spec, data, device, warm=WARM + TIMED)
    work = steps.work
    if spec.settings.cuda_graph:
        say(f"{spec.variant}: the same kernels one by one, to name them")
        work = trace.label_like(work, _profile_time(without_graph, data, device, warm=4).work)

    entry = {
        **record.document_header(PROFILE_SCHEMA, spec.run_id, spec.group),
        "spec": {
            "variant": spec.variant,
            "preset": spec.preset.name,
            "seed": spec.seed,
            "hash": spec.hash,
            "micro_batch": spec.settings.micro_batch,
            "adjusted": spec.adjusted,
        },
        "env": hardware.environment(),
        "time": trace.step_means(work, steps.events, steps.step_ms),
        "memory": memory,
        "ceilings": {
            "matrix_tflops": hardware.matrix_rate(device, DTYPES[spec.settings.precision]),
            "copy_gb_per_s": hardware.copy_rate(device),
        },
        "ncu": counters(spec, say) if count else None,
    }
    if snapshot:
        write_atomically(run_dir / SNAPSHOT, snapshot)
    write_atomically(run_dir / "trace.json.gz", steps.packed_trace)
    write_atomically(run_dir / "profile.json", json.dumps(entry, allow_nan=False) + "\n")
    return entry


def steady_step(spec: Spec, data) -> tuple[dict, pd.DataFrame]:
    """Return trace.step_means of a few steady steps, and trace.work of the last of them.

    It is for a picture in a notebook. It holds the GPU meanwhile, since other runs may be timed
    there.
    """
    device = hardware.train_device()
    with hardware.gpu_lock(device, surroundings().shares(device)):
        steps = _profile_time(spec, data, device, warm=SETTLED)
    last_step = steps.work[steps.work["step"] == steps.work["step"].max()]
    return trace.step_means(steps.work, steps.events, steps.step_ms), last_step


# Training under hooks.


def _load(spec: Spec):
    """Return a run's data."""
    return WORKFLOWS[spec.preset.task].load(spec)


def _train(
    spec: Spec, steps: int, data, device, hooks: Hooks
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Meter]:
    """Train so many steps from new weights with hooks; return model, optimizer and meter."""
    preset = dataclasses.replace(
        spec.preset, steps=steps, epochs=None, measure_from=WARM, checkpoint_every=0
    )
    spec = dataclasses.replace(spec, preset=preset)
    with tempfile.TemporaryDirectory() as folder:
        data, model, batches = prepare(spec, data)
        done = train(model, batches, spec, device, Path(folder), say=lambda _: None, hooks=hooks)
        return model, done.optimizer, done.meter


# Time.


class TimeHooks(Hooks):
    """Profiles PROFILED steps after `warm` others and one more, which pays for the start."""

    def __init__(self, warm: int):
        self.warm = warm
        self.steps = warm + 1 + PROFILED  # in all
        schedule = torch.profiler.schedule(
            skip_first=warm, wait=0, warmup=1, active=PROFILED, repeat=1
        )
        self.profiler = torch.profiler.profile(
            schedule=schedule,
            record_shapes=True,
            acc_events=True,  # else it warns that it forgets the events of earlier cycles
        )

    def finished(self, steps: int) -> None:
        if torch.cuda.is_available() and steps >= self.warm:
            torch.cuda.synchronize()  # so that a step's kernels run within its range
        self.profiler.step()


class ProfiledSteps(NamedTuple):
    """What the profiler saw of some steps."""

    work: pd.DataFrame  # trace.work: a row for each kernel or operator
    events: list[dict]  # of the trace
    step_ms: float  # the median length of the steps before the profiler started
    packed_trace: bytes  # the trace's file, gzipped


def _profile_time(spec: Spec, data, device, warm: int) -> ProfiledSteps:
    """Profile PROFILED steps after `warm` others, of which the last TIMED give a step's length."""
    hooks = TimeHooks(warm)
    with hooks.profiler:
        model, _, meter = _train(spec, hooks.steps, data, device, hooks)
    packed_trace = trace.export(hooks.profiler)
    events = trace.read(packed_trace)
    return ProfiledSteps(
        work=trace.work(events, _widths_of(model)),
        events=events,
        step_ms=_median_step_ms(meter, warm),
        packed_trace=packed_trace,
    )


def _widths_of(model) -> trace.Widths:
    """Return the widths of a model's layers, by which a GEMM's part is told."""
    config = model.config
    intermediate = getattr(config, "intermediate_size", 4 * config.hidden_size)  # GPT-2 has none
    outputs = config.vocab_size if encoder_of(model).causal else 2
    return trace.Widths(config.hidden_size, intermediate, outputs)


def _median_step_ms(meter: Meter, warm: int) -> float:
    """Return the median length of the last TIMED of the first `warm` steps."""
    seconds = meter.times[max(0, warm - TIMED) : warm]
    return 1e3 * statistics.median(seconds)


# Memory.


class MemoryHooks(Hooks):
    """Records the memory of one step: the allocator's peaks by phase, and every change.

    `peaks` (bytes) has the highest allocation of each phase, and `kept` (bytes) the most that a
    forward pass left. The changes go to the file `snapshot`, with the lines of Python that have
    asked for them.
    """

    def __init__(self, at: int, snapshot: Path):
        self.at = at  # the number of the step, counted from 1
        self.snapshot = snapshot
        self.steps = 0  # that are done
        self.peaks = {}
        self.kept = 0
        self.base = 0  # bytes that were allocated before the step
        self.reserved = 0  # bytes that the allocator held after the step
        self.timeline = []

    @contextlib.contextmanager
    def phase(self, name: str):
        is_recorded = self.steps + 1 == self.at
        if is_recorded:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        with super().phase(name):
            yield
        if is_recorded:
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated())
            if name == "forward":
                self.kept = max(self.kept, torch.cuda.memory_allocated() - before)

    def finished(self, steps: int) -> None:
        self.steps = steps
        if steps == self.at - 1:
            torch.cuda.synchronize()
            self.base = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
        elif steps == self.at:
            changes = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            self.timeline = _timeline(changes, self.base)
            # A pickle, as PyTorch's viewer takes it: nothing here ever reads one.
            torch.cuda.memory._dump_snapshot(str(self.snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            self.reserved = torch.cuda.memory_reserved()


def _timeline(changes: list[dict], base: int) -> list[tuple[float, float]]:
    """Return (ms, MiB allocated) over a step, from `base` bytes on.

    It has at most POINTS points. Each is the highest of those that it stands for.
    """
    signs = {"alloc": 1, "free_completed": -1}
    table = pd.DataFrame([change for change in changes if change["action"] in signs])
    ms = (table["time_us"] - table["time_us"].min()) / 1e3
    allocated = base + (table["action"].map(signs) * table["size"]).cumsum()
    mib = allocated / MIB
    changes_a_point = -(-len(mib) // POINTS)  # rounded up
    highest = mib.groupby(np.arange(len(mib)) // changes_a_point).idxmax()
    return list(zip(ms[highest].round(3), mib[highest].round(1), strict=True))


def _profile_memory(spec: Spec, data, device) -> tuple[dict, bytes]:
    """Return MiB by what it is for and by phase, with a step's timeline; and the snapshot's file.

    `activations` is what the step's forward pass left for its backward pass; `workspace` is the
    rest of the peak: gradients that are there already, buffers, temporaries. `fragmentation` is
    what is reserved above the peak.
    """
    gc.collect()
    torch.cuda.empty_cache()
    # Who allocates what is there before the step is recorded as well.
    torch.cuda.memory._record_memory_history("state", stacks="python")
    with tempfile.TemporaryDirectory() as folder:
        hooks = MemoryHooks(BEFORE_MEMORY + 1, Path(folder, SNAPSHOT))
        model, optimizer, _ = _train(spec, hooks.at, data, device, hooks)
        snapshot = hooks.snapshot.read_bytes()
    lasting = dataclasses.asdict(memory_use(model, optimizer, device))
    params, state, grads = lasting["params_mib"], lasting["optimizer_mib"], lasting["grads_mib"]
    activations = hooks.kept / MIB
    reserved = hooks.reserved / MIB
    peak_phase = max(hooks.peaks, key=hooks.peaks.get)
    peak = hooks.peaks[peak_phase] / MIB
    # In the optimizer's phase the activations are gone and the gradients complete.
    held = grads if peak_phase == "optimizer" else activations
    memory = {
        "params_mib": params,
        "optimizer_mib": state,
        "grads_mib": grads,
        "activations_mib": activations,
        "workspace_mib": max(0.0, peak - params - state - held),
        "peak_mib": peak,
        "peak_phase": peak_phase,
        "reserved_mib": reserved,
        "fragmentation_mib": max(0.0, reserved - peak),
        "phases": {phase: size / MIB for phase, size in hooks.peaks.items()},
        "timeline": hooks.timeline,
    }
    return memory, snapshot


# Hardware counters.


class CounterHooks(Hooks):
    """Opens Nsight Compute's window for the step after UNCOUNTED others."""

    at = UNCOUNTED + 1  # the number of the step, counted from 1

    def finished(self, steps: int) -> None:
        torch.cuda.synchronize()
        if steps == UNCOUNTED:
            torch.cuda.cudart().cudaProfilerStart()
        elif steps == self.at:
            torch.cuda.cudart().cudaProfilerStop()


def counters(spec: Spec, say=print) -> list[dict] | None:
    """Return what Nsight Compute reads of one step of the spec, in a process of its own.

    That is a dict for each of the heaviest kernels with METRICS, the longest in sum first. A
    graph's kernels are counted one by one. Returns None, and says why, where Nsight Compute is not
    installed or may not read counters.
    """
    if not torch.cuda.is_available():
        say("no GPU here, so no hardware counters")
        return None
    if not shutil.which("ncu"):
        say(
            "no `ncu` here, so no hardware counters. It is Nsight Compute's, part of the CUDA "
            "toolkit"
        )
        return None
    options = [
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--clock-control", "none"),
        *("--metrics", ",".join(METRICS.values())),
        *("--profile-from-start", "off"),
        *("--target-processes", "application-only"),
        *("--graph-profiling", "node"),
    ]
    say("Nsight Compute runs every kernel of a step several times; this takes minutes")
    page, messages = _run_nsight(["ncu", *options, *child_command(Work.COUNT, spec)], say)
    kernels = parse_counters(page)
    if not kernels:
        errors = [
            line for line in (page + messages).splitlines() if "ERROR" in line or "Error" in line
        ]
        reason = errors[-1].strip()[:200] if errors else "it saw no kernel"
        say(f"Nsight Compute read no counters: {reason}")
        return None
    return kernels


def _run_nsight(command: list[str], say) -> tuple[str, str]:
    """Run Nsight Compute, say after every PROGRESS kernels how many it has counted, and return
    what it writes to stdout and stderr."""
    lines = []
    counted = 0
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=child_env()
        ) as process,
    ):
        try:
            for line in process.stdout:
                lines.append(line)
                if line.startswith("==PROF== Profiling"):
                    counted += 1
                    if counted % PROGRESS == 0:
                        say(f"{counted:,} kernels are counted")
            process.wait()
        finally:
            kill(process)  # which does nothing to one that has ended
        errors.seek(0)
        return "".join(lines), errors.read()


def count_one_step(spec: Spec) -> None:
    """Train the steps that run under Nsight Compute."""
    hooks = CounterHooks()
    _train(spec, hooks.at, _load(spec), hardware.train_device(), hooks)


def parse_counters(text: str) -> list[dict]:
    """Return Nsight Compute's raw CSV page, in base units, as a dict for each kernel's name.

    Each has the kernel's count, SUMS over its launches, and means of PERCENTAGES over them,
    weighted by their time. One that was not read is None. The longest kernel comes first.
    """
    header = re.search('^"ID"', text, re.MULTILINE)
    if not header:
        return []
    # The second line of the page has the units.
    page = pd.read_csv(io.StringIO(text[header.start() :]), thousands=",", skiprows=[1])
    metrics = page.reindex(columns=METRICS.values()).apply(pd.to_numeric, errors="coerce")
    metrics = metrics.set_axis(list(METRICS), axis=1)
    metrics["us"] /= 1e3  # time comes in nanoseconds
    names = page["Kernel Name"].str[:160].rename("name")
    kernels = metrics[list(SUMS)].groupby(names, sort=False).sum(min_count=1)
    for name in PERCENTAGES:
        weights = metrics["us"].where(metrics[name].notna())
        sums = (metrics[name] * weights).groupby(names).sum(min_count=1)
        kernels[name] = sums / weights.groupby(names).sum(min_count=1)
    kernels.insert(0, "count", names.value_counts())
    kernels = kernels.sort_values("us", ascending=False, kind="stable").head(KERNELS)
    with_none = kernels.astype(object).where(kernels.notna(), None)
    return with_none.reset_index().to_dict("records")
