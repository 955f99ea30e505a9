"""Tries of one row with other learning rates and other trainable parts, each a run of its own in the group `*-tune`.

How the learning rate of scale `quality` and the recipes of the LoRA rows were found. The points that lost are kept.
"""

import argparse
import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pandas as pd

from qa_lib.errors import UserError
from qa_lib.measure.machine import this_machine
from qa_lib.run.launch import attempt
from qa_lib.run.plan import add_source_arguments, plan
from qa_lib.spec import Spec
from qa_lib.variants import find_recipe


def points(specs: list[Spec], rates: list[float], trainables: list[str]) -> list[Spec]:
    """Every spec with every learning rate and trainable part; an empty list stands for the spec's own.

    Raises UnknownName for a trainable part that does not exist.
    """
    found = []
    for rate in rates or [None]:
        for trainable in trainables or [None]:
            for spec in specs:
                scale = dataclasses.replace(spec.scale, name="tune", learning_rate=rate or spec.scale.learning_rate)
                change = {"trainable": trainable} if trainable else {}
                if trainable:
                    find_recipe(trainable)
                asked, settings = (dataclasses.replace(s, **change) for s in (spec.asked, spec.settings))
                found.append(dataclasses.replace(spec, scale=scale, asked=asked, settings=settings))
    return found


EXAMPLE = """examples:
  python -m qa_lib tune A1 --scale quality --learning-rate 5e-5 1e-4 2e-4 --data squad/ --model minilm/
  python -m qa_lib tune B1-all --scale quality --trainable lora-all-r8 lora-qv-r32 --learning-rate 1e-3 3e-3 \\
      --data squad/ --model minilm/ --gpus 0 1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib tune`."""
    parser.add_argument("variant", metavar="VARIANT", help="a row of `python -m qa_lib variants`")
    parser.add_argument(
        "--learning-rate", type=float, nargs="+", default=[], metavar="X", help="of the scale (its own)"
    )
    parser.add_argument(
        "--trainable", nargs="+", default=[], metavar="NAME", help="such as lora-all-r32 (the row's own)"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="N", help="a run of every point for each (0)"
    )
    parser.add_argument(
        "--gpus", type=int, nargs="+", metavar="N", help="cards to use, as often at once as it is named"
    )
    add_source_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run every point, print each as it ends, and then the best."""
    if bad := [rate for rate in args.learning_rate if not 0 < rate < 1]:
        raise UserError(f"--learning-rate {bad[0]:g} is not between 0 and 1")
    machine = this_machine()
    if absent := [gpu for gpu in args.gpus or [] if not 0 <= gpu < machine.gpus]:
        raise UserError(f"--gpus {absent[0]}: this machine has {machine.gpus} GPUs")
    specs = plan([args.variant], args.scale, args.seeds, args.data, args.model, args.micro_batch, machine)
    if not specs[0].scale.quality:
        raise UserError(f"scale {args.scale!r} measures no quality, by which points are compared")
    slots, names = SimpleQueue(), args.gpus or [None]
    for name in names:
        slots.put(name)

    failed = []

    def run(spec: Spec) -> tuple[str, float]:
        said = f"{spec.settings.trainable}, learning rate {spec.scale.learning_rate * spec.recipe.lr_factor:g}"
        gpu = slots.get()
        try:
            entry = attempt(spec, args.runs, gpu, names.count(gpu) > 1)
        except UserError as problem:  # a rate too high for this point says nothing about the others
            failed.append(spec)
            print(f"  {said}: {problem}", flush=True)
            return said, math.nan
        finally:
            slots.put(gpu)
        f1, best = entry["quality"]["f1"], entry["quality"]["best_f1"]
        result = entry["status"] if f1 is None else f"F1 {f1:.2f}, at the best threshold {best:.2f}"
        print(f"  {spec.run_id} {said}: {result}", flush=True)
        return said, math.nan if f1 is None else best

    with ThreadPoolExecutor(len(names)) as pool:
        found = pd.DataFrame(pool.map(run, points(specs, args.learning_rate, args.trainable)), columns=["point", "f1"])
    # Over seeds, of points that have them all.
    means = found.groupby("point")["f1"].agg(lambda seeds: seeds.mean(skipna=False)).dropna()
    best = "no point was measured with every seed"
    if not means.empty:
        best = f"best: {means.idxmax()}, F1 {means.max():.2f} at the best threshold"
    print(best)
    return 1 if failed else 0
