"""The largest micro-batch of a row under a cap on GPU memory, found by trying; each try is a run of its own."""

import argparse
import dataclasses
from collections.abc import Callable

from qa_lib.cli import above_0, add_rows, add_source_arguments, capability, rows_of
from qa_lib.errors import UserError
from qa_lib.presets import PRESETS
from qa_lib.record import FINISHED
from qa_lib.run.launch import Launcher, probe
from qa_lib.run.memory_estimate import estimate
from qa_lib.run.plan import plan
from qa_lib.spec import Machine, Spec
from qa_lib.variants import AMPERE

STEP = 8  # features: sizes are multiples of this
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


def specs_for(variant: str, args: argparse.Namespace, machine: Machine) -> Callable[[int], Spec]:
    """micro-batch -> the spec of a try, as a GPU of capability --compute-capability (at most this one's) would run
    it."""
    older = dataclasses.replace(machine, sm=min(args.compute_capability, machine.sm))
    name = f"max-batch-{args.limit_gib:g}gib-sm{older.sm}"
    preset = dataclasses.replace(PRESETS["sizing"], name=name, limit_gib=args.limit_gib)
    limits = (
        [f"attention kernels: those of compute capability {args.compute_capability / 10:g}"]
        if args.compute_capability < AMPERE
        else []
    )

    (first,) = plan([variant], "sizing", [0], args.data, args.model, STEP, older)
    first = dataclasses.replace(first, preset=preset, adjusted=first.adjusted + limits, search="max-batch", sm=older.sm)

    def spec_of(micro_batch: int) -> Spec:
        asked, settings = (dataclasses.replace(each, micro_batch=micro_batch) for each in (first.asked, first.settings))
        return dataclasses.replace(first, asked=asked, settings=settings)

    return spec_of


EXAMPLE = "example: python -m qa_lib max-batch A3 --limit-gib 14.9 --compute-capability 7.5 --data squad/ --model bert/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib max-batch`."""
    add_rows(parser, "variants")
    parser.add_argument("--limit-gib", type=above_0, required=True, metavar="G", help="GPU memory to stay within")
    parser.add_argument(
        "--compute-capability", type=capability, default=90, metavar="X.Y", help="use what such a GPU has (T4: 7.5)"
    )
    add_source_arguments(parser, preset=False)


def main(args: argparse.Namespace) -> int:
    """Search each row's largest micro-batch and print every try."""
    rows = rows_of(args)
    machine, env = probe()
    if not machine.gpus:
        raise UserError("max-batch tries on a GPU, and there is none here; `python -m qa_lib memory` predicts without")
    launcher = Launcher(args.runs, machine, env)
    for variant in rows:
        print(f"{variant}: {search(variant, specs_for(variant, args, machine), args.limit_gib, launcher)}", flush=True)
    return 0


def search(variant: str, spec_of: Callable[[int], Spec], limit_gib: float, launcher: Launcher) -> str:
    """Try until the largest micro-batch is known, and say what was found. Raises UserError for a try that failed."""
    if skip := spec_of(STEP).skip:
        launcher.run_all([spec_of(STEP)])  # for the record
        return f"skipped, {skip}"
    speeds = []

    def fits(size: int) -> bool:
        spec = spec_of(size)
        (entry,) = launcher.run_all([spec])
        if entry["status"] not in FINISHED:
            raise UserError(f"{spec.run_id}: {entry['status']}, {entry['error']['message']}")
        result = "out of memory"
        if entry["status"] == "ok":
            speeds.append(entry["speed"]["samples_per_s"])
            result = f"{speeds[-1]:.0f} features/s, {entry['memory']['peak_reserved_mib']:.0f} MiB reserved"
        print(f"  {variant} micro-batch {size}: {result}", flush=True)
        return entry["status"] == "ok"

    best = largest(_guess(spec_of, limit_gib), fits)
    if best > STEP:
        fits(max(STEP, int(ROOM * best) // STEP * STEP))
    if not best:
        return f"does not fit into {limit_gib:g} GiB"
    return f"largest micro-batch {best}, best {max(speeds):.0f} features/s"


def _guess(spec_of: Callable[[int], Spec], limit_gib: float) -> int:
    """The micro-batch whose estimated budget fills the limit, which grows with it in a straight line."""
    low, high = (estimate(spec_of(size))["reserved_mib"] for size in (32, 64))
    return int(32 + 32 * (1024 * limit_gib - low) / (high - low))
