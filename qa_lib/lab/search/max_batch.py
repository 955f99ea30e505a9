"""The largest micro-batch of a variant under a cap on GPU memory, found by trials; each is a run of its own."""

import argparse
import dataclasses
import math
from collections.abc import Callable

from qa_lib.errors import UserError
from qa_lib.lab.cli import variants_of
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.launch.probe import probe
from qa_lib.lab.search.plan import plan
from qa_lib.records.record import with_result
from qa_lib.spec.spec import Machine, Spec
from qa_lib.spec.variants import AMPERE

STEP = 8  # samples: sizes are multiples of this
CLOSE = 0.06  # the search ends when the next size up is at most this much larger
ROOM = 0.8  # of the largest size: close to the limit the allocator frees and asks again, and a smaller one is quicker


def largest(fits: Callable[[int], bool], most: int = 4096) -> int:
    """The largest multiple of STEP, at most `most`, for which `fits` holds, to within CLOSE; 0 if none does.

    Bisects on a logarithmic scale. `fits` must hold for every size below one for which it holds.
    """
    good, bad = 0, most + STEP
    while bad - good > max(STEP, CLOSE * good):
        size = int(math.sqrt(max(1, good) * bad)) // STEP * STEP
        size = min(max(size, good + STEP), bad - STEP)
        if fits(size):
            good = size
        else:
            bad = size
    return good


def first_trial(variant: str, args: argparse.Namespace, machine: Machine) -> Spec:
    """The spec of the least micro-batch, as a GPU of --compute-capability (at most this one's) would run it."""
    older = dataclasses.replace(machine, sm=min(args.compute_capability, machine.sm))
    name = f"max-batch-{args.limit_gib:g}gib-sm{older.sm}"
    (spec,) = plan([variant], "sizing", [0], args.data, args.model, STEP, older)
    if args.compute_capability < AMPERE:
        spec.adjusted.append(
            f"attention kernels: those of compute capability {args.compute_capability / 10:g}"
        )
    preset = dataclasses.replace(spec.preset, name=name, limit_gib=args.limit_gib)
    return dataclasses.replace(spec, preset=preset, search="max-batch", sm=older.sm)


def main(args: argparse.Namespace) -> int:
    """Search each variant's largest micro-batch and print every trial."""
    variants = variants_of(args)
    machine, env = probe()
    if not machine.gpus:
        raise UserError(
            "max-batch needs a GPU, and there is none here; `python -m qa_lib memory` predicts without"
        )
    launcher = Launcher(args.runs, machine, env)
    for variant in variants:
        print(f"{variant}: {search(first_trial(variant, args, machine), launcher)}", flush=True)
    return 0


def search(first: Spec, launcher: Launcher) -> str:
    """Run trials until the largest micro-batch is known, and say it. Raises UserError for a trial that failed."""
    if first.skip:
        launcher.run_all([first])  # for the record
        return f"skipped, {first.skip}"
    speeds = []

    def fits(size: int) -> bool:
        asked, settings = (
            dataclasses.replace(each, micro_batch=size) for each in (first.asked, first.settings)
        )
        spec = dataclasses.replace(first, asked=asked, settings=settings)
        (entry,) = launcher.run_all([spec])
        with_result(entry)
        result = "out of memory"
        if entry["status"] == "ok":
            speeds.append(entry["speed"]["samples_per_s"])
            result = f"{speeds[-1]:.0f} samples/s, {entry['memory']['peak_reserved_mib']:.0f} MiB reserved"
        print(f"  {spec.variant} micro-batch {size}: {result}", flush=True)
        return entry["status"] == "ok"

    best = largest(fits)
    if best > STEP:
        fits(max(STEP, int(ROOM * best) // STEP * STEP))
    if not best:
        return f"does not fit into {first.preset.limit_gib:g} GiB"
    return f"largest micro-batch {best}, best {max(speeds):.0f} samples/s"
