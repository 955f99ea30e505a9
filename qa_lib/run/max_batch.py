"""The largest micro-batch of a variant under a cap on GPU memory, found by trials; each is a run of its own."""

import argparse
import dataclasses
from collections.abc import Callable

from qa_lib.cli import variants_of
from qa_lib.errors import UserError
from qa_lib.record import FINISHED
from qa_lib.run.launch import Launcher, probe
from qa_lib.run.memory_estimate import estimate
from qa_lib.run.plan import plan
from qa_lib.spec import Machine, Spec
from qa_lib.variants import AMPERE

STEP = 8  # samples: sizes are multiples of this
CLOSE = 0.06  # the search ends when the next size up is at most this much larger
ROOM = 0.8  # of the largest size: close to the limit the allocator frees and asks again, and a smaller one is quicker


def largest(first: int, fits: Callable[[int], bool], most: int = 4096) -> int:
    """The largest multiple of STEP, at most `most`, for which `fits` holds, to within CLOSE; 0 if none does.

    Begins at `first`, which should be near, and goes up or down in steps that double until sizes that fit and that do
    not enclose the answer; then bisects. `fits` must hold for every size below one for which it holds.
    """
    size, stride = max(STEP, min(most, first // STEP * STEP)), CLOSE
    good, bad = 0, most + STEP
    while bad - good > max(STEP, CLOSE * good):
        if fits(size):
            good = size
        else:
            bad = size
        if good and bad <= most:
            size = (good + bad) // 2
        else:
            size = size * (1 + stride) if good else size / (1 + stride)
            stride *= 2
        # A multiple of STEP strictly between what is known.
        size = min(max(int(size) // STEP * STEP, good + STEP), bad - STEP)
    return good


def first_trial(variant: str, args: argparse.Namespace, machine: Machine) -> Spec:
    """The spec of the least micro-batch, as a GPU of --compute-capability (at most this one's) would run it."""
    older = dataclasses.replace(machine, sm=min(args.compute_capability, machine.sm))
    name = f"max-batch-{args.limit_gib:g}gib-sm{older.sm}"
    (spec,) = plan([variant], "sizing", [0], args.data, args.model, STEP, older)
    if args.compute_capability < AMPERE:
        spec.adjusted.append(f"attention kernels: those of compute capability {args.compute_capability / 10:g}")
    preset = dataclasses.replace(spec.preset, name=name, limit_gib=args.limit_gib)
    return dataclasses.replace(spec, preset=preset, search="max-batch", sm=older.sm)


def sized(spec: Spec, micro_batch: int) -> Spec:
    """The spec with another micro-batch."""
    asked, settings = (dataclasses.replace(each, micro_batch=micro_batch) for each in (spec.asked, spec.settings))
    return dataclasses.replace(spec, asked=asked, settings=settings)


def main(args: argparse.Namespace) -> int:
    """Search each variant's largest micro-batch and print every trial."""
    variants = variants_of(args)
    machine, env = probe()
    if not machine.gpus:
        raise UserError(
            "max-batch runs trials on a GPU, and there is none here; `python -m qa_lib memory` predicts without"
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
        spec = sized(first, size)
        (entry,) = launcher.run_all([spec])
        if entry["status"] not in FINISHED:
            raise UserError(f"{spec.run_id}: {entry['status']}, {entry['error']['message']}")
        result = "out of memory"
        if entry["status"] == "ok":
            speeds.append(entry["speed"]["samples_per_s"])
            result = f"{speeds[-1]:.0f} samples/s, {entry['memory']['peak_reserved_mib']:.0f} MiB reserved"
        print(f"  {spec.variant} micro-batch {size}: {result}", flush=True)
        return entry["status"] == "ok"

    best = largest(_guess(first), fits)
    if best > STEP:
        fits(max(STEP, int(ROOM * best) // STEP * STEP))
    if not best:
        return f"does not fit into {first.preset.limit_gib:g} GiB"
    return f"largest micro-batch {best}, best {max(speeds):.0f} samples/s"


def _guess(spec: Spec) -> int:
    """The micro-batch whose estimated memory fills the limit, which it does in a straight line."""
    low, high = (estimate(sized(spec, size))["reserved_mib"] for size in (32, 64))
    return int(32 + 32 * (1024 * spec.preset.limit_gib - low) / (high - low))
