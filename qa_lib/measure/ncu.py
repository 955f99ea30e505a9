"""Hardware counters of one step's kernels by Nsight Compute, where it is installed and may read them."""

import io
import re
import shutil
import subprocess

import pandas as pd
import torch

from qa_lib.measure.meter import Hooks

SETTLE = 5  # steps before the one whose kernels are counted
METRICS = {  # our name -> Nsight Compute's
    "us": "gpu__time_duration.sum",
    "dram_bytes": "dram__bytes.sum",
    "fp16_ops": "sm__ops_path_tensor_src_fp16.sum",
    "bf16_ops": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "fp8_ops": "sm__ops_path_tensor_src_fp8.sum",
}


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
    if not shutil.which("ncu"):
        say("no `ncu` here, so no hardware counters. It is Nsight Compute's, part of the CUDA toolkit")
        return None
    options = f"--csv --page raw --print-units base --clock-control none --metrics {','.join(METRICS.values())}"
    options += " --profile-from-start off --target-processes application-only --graph-profiling node"
    say("Nsight Compute runs every kernel of a step several times; this takes minutes")
    done = subprocess.run(["ncu", *options.split(), *command], capture_output=True, text=True, env=environment)
    kernels = parse(done.stdout)
    if not kernels:
        words = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line or "Error" in line]
        say(f"Nsight Compute read no counters: {(words or ['it saw no kernel'])[-1].strip()[:200]}")
        return None
    return kernels


def parse(text: str) -> list[dict]:
    """Nsight Compute's raw CSV page, in base units, to a dict a kernel name: count, and METRICS summed; the longest
    first. A metric that was not read is None."""
    begin = re.search('^"ID"', text, re.MULTILINE)
    if not begin:
        return []
    page = pd.read_csv(io.StringIO(text[begin.start() :]), thousands=",", skiprows=[1])  # a line of units
    read = page.reindex(columns=METRICS.values()).apply(pd.to_numeric, errors="coerce").set_axis([*METRICS], axis=1)
    read["us"] /= 1e3  # time comes in nanoseconds
    names = page["Kernel Name"].str[:160].rename("name")
    found = read.groupby(names, sort=False).sum(min_count=1)
    found.insert(0, "count", names.value_counts())
    found = found.sort_values("us", ascending=False, kind="stable").head(40)
    return found.astype(object).where(found.notna(), None).reset_index().to_dict("records")
