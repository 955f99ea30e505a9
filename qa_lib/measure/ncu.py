"""Hardware counters of one step's kernels by Nsight Compute, where it is installed and may read them."""

import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from qa_lib.measure.meter import Watch
from qa_lib.spec import Spec

SETTLE = 5  # steps before the one whose kernels are counted
HOW = "Nsight Compute is part of the CUDA toolkit (https://developer.nvidia.com/nsight-compute); put `ncu` on the PATH"
METRICS = {  # our name -> Nsight Compute's
    "us": "gpu__time_duration.sum",
    "sm_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes": "dram__bytes.sum",
    "fp16_ops": "sm__ops_path_tensor_src_fp16.sum",
    "bf16_ops": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp8_ops": "sm__ops_path_tensor_src_fp8.sum",
}
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "Kbyte": 1e3, "Mbyte": 1e6,
         "Gbyte": 1e9}  # fmt: skip


class OneStep(Watch):
    """Opens the profiler's window for the step after SETTLE others."""

    at = SETTLE + 1

    def finished(self, steps: int) -> None:
        torch.cuda.synchronize()
        if steps == SETTLE:
            torch.cuda.cudart().cudaProfilerStart()
        elif steps == self.at:
            torch.cuda.cudart().cudaProfilerStop()


def one_step(run) -> None:
    """What Nsight Compute runs: `run(watch)` trains `watch.at` steps."""
    run(OneStep())


def measure(spec: Spec, runs: Path, say) -> list[dict] | None:
    """The heaviest kernels of one step with METRICS, the longest in sum first; None, with a line why, where the
    counters cannot be read. A graph's kernels are counted one by one."""
    if not torch.cuda.is_available():
        say("no GPU here, so no hardware counters")
        return None
    tool = shutil.which("ncu")
    if not tool:
        say(f"no `ncu` here, so no hardware counters. {HOW}")
        return None
    command = [tool, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--target-processes", "application-only", "--graph-profiling", "node"]
    command += ["--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", "qa_lib", "profile", spec.variant, "--one-step", "--scale", spec.scale.name]
    command += ["--data", spec.data_source, "--model", spec.model_source, "--runs", str(runs)]
    command += ["--micro-batch", str(spec.settings.micro_batch)]
    say(f"{spec.variant}: Nsight Compute runs every kernel of a step several times; this takes minutes")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TQDM_DISABLE": "1"})
    kernels = parse(done.stdout)
    if not kernels:
        words = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or "Error" in line]
        say(f"Nsight Compute read no counters: {(words or ['it saw no kernel'])[-1].strip()[:200]}")
        return None
    return kernels


def parse(text: str) -> list[dict]:
    """Nsight Compute's raw CSV page to a dict a kernel name: count, and METRICS summed (time, bytes, operations) or
    averaged by time (shares, in percent); the longest in sum first. A metric that was not read is None."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return []
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[begin:]))))
    units, found = rows[0], {}
    for row in rows[1:]:
        values = {name: _number(row.get(metric), units.get(metric, "")) for name, metric in METRICS.items()}
        found.setdefault(row["Kernel Name"][:160], []).append(values)
    kernels = [{"name": name, "count": len(each)} | _combined(each) for name, each in found.items()]
    return sorted(kernels, key=lambda kernel: -(kernel["us"] or 0.0))[:40]


def _number(text: str | None, unit: str) -> float | None:
    try:
        return float((text or "").replace(",", "")) * UNITS.get(unit, 1.0)
    except ValueError:
        return None


def _combined(each: list[dict]) -> dict:
    total = sum(values["us"] or 0.0 for values in each)
    combined = {}
    for name in METRICS:
        known = [values for values in each if values[name] is not None]
        if not known:
            combined[name] = None
        elif name.endswith(("share", "occupancy")):
            combined[name] = sum(values[name] * (values["us"] or 0.0) for values in known) / total if total else None
        else:
            combined[name] = sum(values[name] for values in known)
    return combined
