"""Hardware counters of one step's kernels by Nsight Compute, where it is installed and may read them."""

import io
import re
import shutil
import subprocess

import pandas as pd
import torch

from qa_lib.measure.meter import Hooks

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
MICRO = {"nsecond": 1e-3, "ns": 1e-3}  # time comes in nanoseconds, for which versions have different names


class OneStep(Hooks):
    """Opens the profiler's window for the step after SETTLE others."""

    at = SETTLE + 1

    def finished(self, steps: int) -> None:
        torch.cuda.synchronize()
        if steps == SETTLE:
            torch.cuda.cudart().cudaProfilerStart()
        elif steps == self.at:
            torch.cuda.cudart().cudaProfilerStop()


def measure(command: list[str], environment: dict[str, str], say=print) -> list[dict] | None:
    """The heaviest kernels of one step with METRICS, the longest in sum first; None, with a line why, where the
    counters cannot be read.

    `command` trains OneStep.at steps under a OneStep. A graph's kernels are counted one by one.
    """
    if not torch.cuda.is_available():
        say("no GPU here, so no hardware counters")
        return None
    tool = shutil.which("ncu")
    if not tool:
        say(f"no `ncu` here, so no hardware counters. {HOW}")
        return None
    options = f"--csv --page raw --print-units base --clock-control none --metrics {','.join(METRICS.values())}"
    options += " --profile-from-start off --target-processes application-only --graph-profiling node"
    say("Nsight Compute runs every kernel of a step several times; this takes minutes")
    done = subprocess.run([tool, *options.split(), *command], capture_output=True, text=True, env=environment)
    kernels = parse(done.stdout)
    if not kernels:
        words = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or "Error" in line]
        say(f"Nsight Compute read no counters: {(words or ['it saw no kernel'])[-1].strip()[:200]}")
        return None
    return kernels


def parse(text: str) -> list[dict]:
    """Nsight Compute's raw CSV page to a dict a kernel name: count, and METRICS summed (time, bytes, operations) or
    averaged by time (shares, in percent); the longest in sum first. A metric that was not read is None."""
    begin = re.search('^"ID"', text, re.MULTILINE)
    if not begin:
        return []
    page = pd.read_csv(io.StringIO(text[begin.start() :]), dtype=str)
    units, rows = page.iloc[0], page.iloc[1:]
    read = pd.DataFrame(index=rows.index, columns=[*METRICS], dtype=float)
    for name, metric in METRICS.items():
        if metric in page:
            numbers = pd.to_numeric(rows[metric].str.replace(",", ""), errors="coerce")
            read[name] = numbers * MICRO.get(units[metric], 1.0)
    us = read["us"].fillna(0.0)
    shares = [name for name in METRICS if name.endswith(("share", "occupancy"))]
    read[shares] = read[shares].mul(us, axis=0)
    by_name = rows["Kernel Name"].str[:160]
    found = read.groupby(by_name, sort=False).sum(min_count=1)
    found[shares] = found[shares].div(us.groupby(by_name, sort=False).sum(), axis=0)
    found.insert(0, "count", by_name.value_counts())
    found = found.sort_values("us", ascending=False, kind="stable").head(40)
    return found.astype(object).where(found.notna(), None).rename_axis("name").reset_index().to_dict("records")
