"""The largest micro-batch of a row under a cap on GPU memory, found by trying; each try is a run of its own."""

import argparse
import dataclasses
from collections.abc import Callable

from qa_lib.errors import UserError
from qa_lib.measure.machine import NEWER_ATTENTION, this_machine, train_device
from qa_lib.run.budget import estimate
from qa_lib.run.launch import attempt
from qa_lib.run.plan import add_source_arguments, plan
from qa_lib.spec import SCALES, Spec

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


def specs_for(variant: str, limit_gib: float, sm: int, data: str, model: str) -> Callable[[int], Spec]:
    """micro-batch -> the spec of a try, as a GPU of capability `sm` (at most this one's) would run it."""
    here = this_machine()
    machine = dataclasses.replace(here, sm=min(sm, here.sm))
    scale = dataclasses.replace(SCALES["fit"], name=f"fit-{limit_gib:g}gib-sm{machine.sm}", limit_gib=limit_gib)

    def spec_of(micro_batch: int) -> Spec:
        (spec,) = plan([variant], "fit", [0], data, model, micro_batch, machine)
        limits = [f"attention kernels: those of compute capability {sm / 10:g}"] if sm < NEWER_ATTENTION else []
        return dataclasses.replace(spec, scale=scale, adjusted=spec.adjusted + limits)

    return spec_of


EXAMPLE = "example: python -m qa_lib fit-batch A3 --limit-gib 14.9 --sm 75 --data squad/ --model bert/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib fit-batch`."""
    parser.add_argument("variants", metavar="VARIANT", nargs="+", help="rows of `python -m qa_lib variants`")
    parser.add_argument("--limit-gib", type=float, required=True, metavar="G", help="GPU memory to stay within")
    parser.add_argument("--sm", type=int, default=90, metavar="N", help="use only what such a GPU has (a T4: 75)")
    add_source_arguments(parser, scale=False)


def main(args: argparse.Namespace) -> int:
    """Search each row's largest micro-batch and print every try."""
    if train_device().type != "cuda":
        raise UserError("fit-batch tries on a GPU, and there is none here; `python -m qa_lib memory` predicts without")
    for variant in args.variants:
        spec_of = specs_for(variant, args.limit_gib, args.sm, args.data, args.model)
        if skip := spec_of(STEP).skip:
            attempt(spec_of(STEP), args.runs, sm=args.sm)  # for the record
            print(f"{variant}: skipped, {skip}", flush=True)
            continue
        tries = {}

        def fits(size: int, variant=variant, spec_of=spec_of, tries=tries) -> bool:
            entry = tries[size] = attempt(spec_of(size), args.runs, sm=args.sm)
            speed, reserved = entry["speed"]["features_per_s"], entry["memory"]["peak_reserved_mib"]
            ok = entry["status"] == "ok"
            print(f"  {variant} micro-batch {size}: " + (f"{speed:.0f} features/s, {reserved:.0f} MiB reserved"
                  if ok else "out of memory"), flush=True)  # fmt: skip
            return ok

        best = largest(_guess(spec_of, args.limit_gib), fits)
        if best > STEP:
            fits(max(STEP, int(ROOM * best) // STEP * STEP))
        speeds = [entry["speed"]["features_per_s"] for entry in tries.values() if entry["status"] == "ok"]
        print(f"{variant}: " + (f"largest micro-batch {best}, best {max(speeds):.0f} features/s" if best
              else f"does not fit into {args.limit_gib:g} GiB"), flush=True)  # fmt: skip
    return 0


def _guess(spec_of: Callable[[int], Spec], limit_gib: float) -> int:
    """The micro-batch whose estimated budget fills the limit, which grows with it in a straight line."""
    low, high = (estimate(spec_of(size))["reserved_mib"] for size in (32, 64))
    return int(32 + 32 * (1024 * limit_gib - low) / (high - low))
