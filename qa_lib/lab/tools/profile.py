"""Where one variant's step spends its time and memory: a profile of a few steady steps, kept beside the run's record.

A run that is timed is not profiled and a profile is not timed, so that neither disturbs the other: the profile trains
a few steps of its own, and takes the step's length from those before the profiler starts. Hardware counters are read by
Nsight Compute, of one step more, where it is installed and may read them.
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

import numpy as np
import pandas as pd
import torch

from qa_lib.errors import UserError, wrapped
from qa_lib.lab.launch.driver import surroundings
from qa_lib.lab.launch.process import Work, child_command, child_env
from qa_lib.lab.search.plan import plan
from qa_lib.measure import hardware, trace
from qa_lib.measure.meter import MIB, Hooks, memory_use
from qa_lib.model.architectures import encoder_of
from qa_lib.model.build import DTYPES
from qa_lib.records import record
from qa_lib.run.fit import prepare, train
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.spec.spec import Spec

WARM, TIMED, PROFILED = 12, 20, 3  # steps: to settle, for the step's length, under the profiler
os.environ.setdefault(
    "KINETO_LOG_LEVEL", "9"
)  # or the profiler writes a line when it starts and one when it stops
SNAPSHOT = "memory_snapshot.pickle"
POINTS = 400  # of the allocator's timeline
SETTLED = (
    5  # steps before those that a notebook looks at: it is a picture, and nothing is timed by it
)
UNCOUNTED = 5  # steps before the one whose kernels Nsight Compute counts
METRICS = {  # our name -> Nsight Compute's
    "us": "gpu__time_duration.sum",
    "dram_bytes": "dram__bytes.sum",
    "fp16_ops": "sm__ops_path_tensor_src_fp16.sum",
    "bf16_ops": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp8_ops": "sm__ops_path_tensor_src_fp8.sum",
}


class TimeHooks(Hooks):
    """Profiles PROFILED steps after `warm` others and one more, which pays for the profiler's start."""

    def __init__(self, warm: int):
        self.warm, self.steps = warm, warm + 1 + PROFILED
        schedule = torch.profiler.schedule(
            skip_first=warm, wait=0, warmup=1, active=PROFILED, repeat=1
        )
        self.profiler = torch.profiler.profile(schedule=schedule, record_shapes=True)

    def finished(self, steps: int) -> None:
        if torch.cuda.is_available() and steps >= self.warm:
            torch.cuda.synchronize()  # so that a step's kernels run within its range
        self.profiler.step()


class MemoryHooks(Hooks):
    """Of step `at`: the GPU allocator's peak in each phase, the most that a forward pass left, and every change, which
    goes to the file `snapshot` with the lines of Python that have asked for it."""

    def __init__(self, at: int, snapshot: Path):
        self.at, self.snapshot, self.steps = at, snapshot, 0
        self.peaks, self.kept, self.timeline = {}, 0, []

    @contextlib.contextmanager
    def phase(self, name: str):
        seen = self.steps + 1 == self.at
        if seen:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        with super().phase(name):
            yield
        if seen:
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
            snapshot = torch.cuda.memory._snapshot()
            self.timeline = _timeline(
                snapshot["device_traces"][torch.cuda.current_device()], self.base
            )
            # A pickle, as PyTorch's viewer takes it: nothing here ever reads one.
            torch.cuda.memory._dump_snapshot(str(self.snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            self.reserved = torch.cuda.memory_reserved()


class CounterHooks(Hooks):
    """Opens Nsight Compute's window for the step after UNCOUNTED others."""

    at = UNCOUNTED + 1

    def finished(self, steps: int) -> None:
        torch.cuda.synchronize()
        if steps == UNCOUNTED:
            torch.cuda.cudart().cudaProfilerStart()
        elif steps == self.at:
            torch.cuda.cudart().cudaProfilerStop()


def _timeline(entries: list[dict], base: int) -> list[tuple[float, float]]:
    """(ms, MiB allocated) over a step, of at most POINTS points that keep the highest of what they stand for."""
    signs = {"alloc": 1, "free_completed": -1}
    changes = pd.DataFrame([entry for entry in entries if entry["action"] in signs])
    ms = (changes["time_us"] - changes["time_us"].min()) / 1e3
    mib = (base + (changes["action"].map(signs) * changes["size"]).cumsum()) / MIB
    highest = mib.groupby(np.arange(len(mib)) // -(-len(mib) // POINTS)).idxmax()
    return list(zip(ms[highest].round(3), mib[highest].round(1), strict=True))


def _train(spec: Spec, steps: int, data, device, hooks: Hooks):
    """Train so many steps from new weights with hooks, and nothing after them; (model, optimizer, meter)."""
    preset = dataclasses.replace(
        spec.preset, steps=steps, epochs=None, measure_from=WARM, checkpoint_every=0
    )
    spec = dataclasses.replace(spec, preset=preset)
    with tempfile.TemporaryDirectory() as folder:
        data, model, batches = prepare(spec, data)
        optimizer, meter, *_ = train(
            model, batches, spec, device, Path(folder), lambda _: None, hooks
        )
        return model, optimizer, meter


def profile(spec: Spec, runs: str | Path, say=print, count: bool = False) -> dict:
    """Profile a spec and write profile.json and trace.json.gz into its run's folder, with a GPU memory_snapshot.pickle
    as well, which is for https://docs.pytorch.org/memory_viz; returns the profile.

    `count` asks for the GPU's counters as well, which take minutes; see `counters`. On failure nothing is written: an
    earlier profile stays whole. Raises UserError for a spec that cannot run here or takes several processes.
    """
    if spec.skip:
        raise UserError(f"{spec.variant} cannot run here: {spec.skip}")
    if spec.world > 1:
        raise UserError(f"{spec.variant} runs in {spec.world} processes, and a profile is of one")
    if spec.preset.threads:
        torch.set_num_threads(spec.preset.threads)
    device, run_dir = hardware.train_device(), Path(runs) / spec.run_path
    record.check_folder(run_dir)
    data = WORKFLOWS[spec.preset.task].load(spec)
    # The same kernels one by one, for what a graph hides: who launched them, and when memory was taken.
    open_spec = dataclasses.replace(
        spec, settings=dataclasses.replace(spec.settings, cuda_graph=False)
    )
    memory = snapshot = None
    if device.type == "cuda" and spec.settings.engine == "loop":
        say(f"{spec.variant}: one step under the allocator's eyes")
        memory, snapshot = _memory(
            open_spec, data, device
        )  # first, while nothing else is allocated
    else:
        say(f"{spec.variant}: no memory snapshot, which is of a GPU and of a step of train/loop.py")
    say(f"{spec.variant}: {WARM + TIMED} steps, then {PROFILED} under the profiler")
    found, events, step_ms, packed = _time(spec, data, device, WARM + TIMED)
    if spec.settings.cuda_graph:
        say(f"{spec.variant}: the same kernels one by one, to name them")
        found = trace.label_like(found, _time(open_spec, data, device, 4)[0])
    entry = {
        **record.beside(record.PROFILE_SCHEMA, spec.run_id, spec.group),
        "spec": {"variant": spec.variant, "preset": spec.preset.name, "seed": spec.seed, "hash": spec.hash,
                 "micro_batch": spec.settings.micro_batch, "adjusted": spec.adjusted},
        "env": hardware.environment(),
        "time": trace.summary(found, events, step_ms),
        "memory": memory,
        "ceilings": {
            "matrix_tflops": hardware.matrix_rate(device, DTYPES[spec.settings.precision]),
            "copy_gb_per_s": hardware.copy_rate(device),
        },
        "ncu": counters(spec, say) if count else None,
    }  # fmt: skip
    if snapshot:
        record.write_atomically(run_dir / SNAPSHOT, snapshot)
    record.write_atomically(run_dir / "trace.json.gz", packed)
    record.write_atomically(run_dir / "profile.json", json.dumps(entry, allow_nan=False) + "\n")
    return entry


def steady_step(spec: Spec, data) -> tuple[dict, pd.DataFrame]:
    """For a picture in a notebook: trace.summary of a few steady steps, and trace.work of the last of them. Holds the
    GPU meanwhile, since other runs may be timed there."""
    device = hardware.train_device()
    with hardware.gpu_lock(device, surroundings().shares(device)):
        found, events, step_ms, _ = _time(spec, data, device, SETTLED)
    return trace.summary(found, events, step_ms), found[found["step"] == found["step"].max()]


def _time(spec: Spec, data, device, warm: int) -> tuple:
    """The work of PROFILED steps after `warm` others, the trace's events, the median length of the last of those
    others in ms, and the trace's file, gzipped."""
    hooks = TimeHooks(warm)
    with hooks.profiler:
        model, _, meter = _train(spec, hooks.steps, data, device, hooks)
    packed = trace.export(hooks.profiler)
    events = trace.read(packed)
    config = model.config
    outputs = config.vocab_size if encoder_of(model).causal else 2
    widths = trace.Widths(
        config.hidden_size, getattr(config, "intermediate_size", 4 * config.hidden_size), outputs
    )
    found = trace.work(events, widths)
    return found, events, 1e3 * statistics.median(meter.times[max(0, warm - TIMED) : warm]), packed


def _memory(spec: Spec, data, device) -> tuple[dict, bytes]:
    """MiB by what it is for and by phase, and the allocator's timeline of a step; and the snapshot at its end.

    `activations` is what the step's forward pass left for its backward pass; `workspace` is the rest of the peak:
    gradients that are there already, buffers, temporaries. `fragmentation` is what is reserved above the peak.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(
        "state", stacks="python"
    )  # who allocates what is there before the step
    with tempfile.TemporaryDirectory() as folder:
        hooks = MemoryHooks(6, Path(folder, SNAPSHOT))
        model, optimizer, _ = _train(spec, hooks.at, data, device, hooks)
        snapshot = hooks.snapshot.read_bytes()
    lasting = dataclasses.asdict(memory_use(model, optimizer, device))
    activations, reserved = hooks.kept / MIB, hooks.reserved / MIB
    at_peak = max(hooks.peaks, key=hooks.peaks.get)
    peak = hooks.peaks[at_peak] / MIB
    # In the optimizer's phase the activations are gone and the gradients complete.
    held = lasting["grads_mib"] if at_peak == "optimizer" else activations
    memory = {name: lasting[name] for name in ("params_mib", "optimizer_mib", "grads_mib")} | {
        "activations_mib": activations,
        "workspace_mib": max(0.0, peak - lasting["params_mib"] - lasting["optimizer_mib"] - held),
        "peak_mib": peak,
        "peak_phase": at_peak,
        "reserved_mib": reserved,
        "fragmentation_mib": max(0.0, reserved - peak),
        "phases": {name: value / MIB for name, value in hooks.peaks.items()},
        "timeline": hooks.timeline,
    }
    return memory, snapshot


def counters(spec: Spec, say=print) -> list[dict] | None:
    """What Nsight Compute reads of one step of the spec, in a process of its own: the heaviest kernels with METRICS,
    the longest in sum first; None, with a line why, where it is not installed or may not read them. A graph's kernels
    are counted one by one."""
    if not torch.cuda.is_available():
        say("no GPU here, so no hardware counters")
        return None
    if not shutil.which("ncu"):
        say(
            "no `ncu` here, so no hardware counters. It is Nsight Compute's, part of the CUDA toolkit"
        )
        return None
    options = f"--csv --page raw --print-units base --clock-control none --metrics {','.join(METRICS.values())}"
    options += (
        " --profile-from-start off --target-processes application-only --graph-profiling node"
    )
    say("Nsight Compute runs every kernel of a step several times; this takes minutes")
    command = child_command(Work.COUNT, spec)
    done = subprocess.run(
        ["ncu", *options.split(), *command], capture_output=True, text=True, env=child_env()
    )
    kernels = parse_counters(done.stdout)
    if not kernels:
        words = [
            line
            for line in (done.stdout + done.stderr).splitlines()
            if "ERROR" in line or "Error" in line
        ]
        say(f"Nsight Compute read no counters: {(words or ['it saw no kernel'])[-1].strip()[:200]}")
        return None
    return kernels


def parse_counters(text: str) -> list[dict]:
    """Nsight Compute's raw CSV page, in base units, to a dict a kernel name: count, and METRICS summed; the longest
    first. A metric that was not read is None."""
    begin = re.search('^"ID"', text, re.MULTILINE)
    if not begin:
        return []
    page = pd.read_csv(
        io.StringIO(text[begin.start() :]), thousands=",", skiprows=[1]
    )  # a line of units
    read = (
        page.reindex(columns=METRICS.values())
        .apply(pd.to_numeric, errors="coerce")
        .set_axis([*METRICS], axis=1)
    )
    read["us"] /= 1e3  # time comes in nanoseconds
    names = page["Kernel Name"].str[:160].rename("name")
    found = read.groupby(names, sort=False).sum(min_count=1)
    found.insert(0, "count", names.value_counts())
    found = found.sort_values("us", ascending=False, kind="stable").head(40)
    return found.astype(object).where(found.notna(), None).reset_index().to_dict("records")


def count_one_step(spec: Spec) -> None:
    """What runs under Nsight Compute."""
    hooks = CounterHooks()
    _train(spec, hooks.at, WORKFLOWS[spec.preset.task].load(spec), hardware.train_device(), hooks)


def main(args: argparse.Namespace) -> int:
    """Profile one variant here, print where its step goes and where the files are."""
    sources = (args.data, args.model, args.micro_batch)
    (spec,) = plan([args.variant], args.preset, [0], *sources, batch=args.batch, runs=args.runs)
    if spec.chosen:
        print(wrapped(spec.adjusted[0]))
    with hardware.gpu_lock(hardware.train_device()):  # other runs may be timed on this GPU
        entry = profile(spec, args.runs, count=args.ncu)
    time = entry["time"]
    print(f"step {time['step_ms']:.2f} ms, busy {100 * time['busy_share']:.0f} %", end="")
    print(
        f", {time['launches_per_step']:.0f} launches"
        if time["launches_per_step"] is not None
        else ""
    )
    for phase, parts in time["parts"].items():
        print(f"  {phase:10}" + ", ".join(f"{part} {ms:.2f} ms" for part, ms in parts.items()))
    if entry["memory"]:
        print(
            "  peak MiB  "
            + ", ".join(f"{name} {mib:.0f}" for name, mib in entry["memory"]["phases"].items())
        )
        print(args.runs / spec.run_path / SNAPSHOT, "is for https://docs.pytorch.org/memory_viz")
    print(args.runs / spec.run_path / "profile.json")
    return 0
