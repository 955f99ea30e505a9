"""The largest micro-batch of a variant under a cap on GPU memory, found by trials.

Each trial is a run of its own.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable

from qa_lib.errors import UserError
from qa_lib.lab.cli.options import variants_of
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.launch.probe import probe
from qa_lib.lab.search.plan import plan
from qa_lib.records.record import with_result
from qa_lib.spec.machine import AMPERE, Machine
from qa_lib.spec.spec import Spec

STEP = 8  # samples: sizes are multiples of this
MOST = 4096  # samples: no larger size is tried
CLOSE = 0.06  # the search ends when the next size up is larger by at most this share
# Share of the largest size that is tried for speed: close to the limit the allocator frees and asks
# again, and a smaller size is quicker.
ROOMY = 0.8


def main(args: argparse.Namespace) -> int:
    """Search each variant's largest micro-batch and print every trial."""
    variants = variants_of(args)
    machine, env = probe()
    if not machine.gpus:
        raise UserError(
            "max-batch needs a GPU, and there is none here; `python -m qa_lib memory` predicts "
            "without"
        )
    launcher = Launcher(args.runs, machine, env)
    for variant in variants:
        first = first_trial(
            variant=variant,
            data=args.data,
            model=args.model,
            limit_gib=args.limit_gib,
            capability=args.compute_capability,
            machine=machine,
        )
        print(f"{variant}: {search(first, launcher)}", flush=True)
    return 0


def first_trial(
    variant: str,
    data: str | None,
    model: str | None,
    limit_gib: float,
    capability: int,
    machine: Machine,
) -> Spec:
    """Return the spec of the smallest micro-batch on a GPU of at most `limit_gib` GiB.

    The run takes the kernels of compute capability `capability` / 10, or of this machine's where
    that is older.
    """
    older = dataclasses.replace(machine, sm=min(capability, machine.sm))
    (spec,) = plan([variant], "sizing", [0], data, model, micro_batch=STEP, machine=older)
    if capability < AMPERE:
        spec.adjusted.append(f"attention kernels: those of compute capability {capability / 10:g}")
    name = f"max-batch-{limit_gib:g}gib-sm{older.sm}"
    preset = dataclasses.replace(spec.preset, name=name, limit_gib=limit_gib)
    return dataclasses.replace(spec, preset=preset, search="max-batch", sm=older.sm)


def search(first: Spec, launcher: Launcher) -> str:
    """Run trials until the largest micro-batch is known, and return a sentence that says it.

    Raises UserError for a trial that failed otherwise than by running out of memory.
    """
    if first.skip:
        launcher.run_all([first])  # for the record
        return f"skipped, {first.skip}"
    speeds = []  # samples/s of the trials that fitted

    def fits(size: int) -> bool:
        spec = _at_size(first, size)
        (entry,) = launcher.run_all([spec])
        with_result(entry)
        has_fitted = entry["status"] == "ok"
        if has_fitted:
            speed = entry["speed"]["samples_per_s"]
            reserved = entry["memory"]["peak_reserved_mib"]
            speeds.append(speed)
            result = f"{speed:.0f} samples/s, {reserved:.0f} MiB reserved"
        else:
            result = "out of memory"
        print(f"  {spec.variant} micro-batch {size}: {result}", flush=True)
        return has_fitted

    best = largest(fits)
    if best > STEP:
        fits(max(STEP, _multiple(ROOMY * best)))
    if not best:
        return f"does not fit into {first.preset.limit_gib:g} GiB"
    return f"largest micro-batch {best}, best {max(speeds):.0f} samples/s"


def _at_size(spec: Spec, size: int) -> Spec:
    """Return a trial at another micro-batch."""
    asked = dataclasses.replace(spec.asked, micro_batch=size)
    settings = dataclasses.replace(spec.settings, micro_batch=size)
    return dataclasses.replace(spec, asked=asked, settings=settings)


def largest(fits: Callable[[int], bool], most: int = MOST) -> int:
    """Return the largest multiple of STEP, up to `most`, for which `fits` holds; 0 if none does.

    It is exact to within CLOSE, by bisection on a logarithmic scale. `fits` must hold for every
    size below one for which it holds.
    """
    good = 0
    bad = most + STEP
    while bad - good > max(STEP, CLOSE * good):
        middle = _multiple(int(math.sqrt(max(1, good) * bad)))
        size = min(max(middle, good + STEP), bad - STEP)
        if fits(size):
            good = size
        else:
            bad = size
    return good


def _multiple(size: float) -> int:
    """Return the largest multiple of STEP that is at most `size`."""
    return int(size) // STEP * STEP
