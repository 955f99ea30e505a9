"""Runs of a variant with other learning rates and other recipes (what trains), each in the group `*-tune`.

How the learning rate of preset `quality` and the recipes of the LoRA variants were found. The points that lost are
kept. Points share a GPU and record no times. Where times matter, or several sizes are to be compared at a rate of each
one's own, `sweep --learning-rate` leaves all of it in one group (notebooks/scaling.ipynb).
"""

import argparse
import dataclasses
import itertools

import pandas as pd

from qa_lib.errors import UserError, one_line, wrapped
from qa_lib.lab.cli import variants_of
from qa_lib.lab.launch.local import Launcher, say_idle
from qa_lib.lab.launch.probe import probe
from qa_lib.lab.search.plan import plan
from qa_lib.records.record import FINISHED, SCORING
from qa_lib.spec.spec import Spec
from qa_lib.spec.variants import TASKS


def points(specs: list[Spec], rates: list[float], trainables: list[str]) -> list[Spec]:
    """Every spec with every learning rate and recipe (its name); an empty list stands for the spec's own.

    Raises UnknownName for a recipe that does not exist.
    """
    found = []
    for peak, trainable, spec in itertools.product(rates or [None], trainables or [None], specs):
        preset = dataclasses.replace(
            spec.preset, name="tune", learning_rate=peak or spec.preset.learning_rate
        )
        recipe = trainable or spec.asked.trainable
        asked, settings = (
            dataclasses.replace(each, trainable=recipe) for each in (spec.asked, spec.settings)
        )
        found.append(
            dataclasses.replace(spec, preset=preset, asked=asked, settings=settings, search="tune")
        )
    return found


def name_of(point: Spec) -> str:
    """What the runs of a point have in common, whatever their seed."""
    factor = point.recipe.lr_factor if point.preset.recipe_rates else 1
    return f"{point.settings.trainable}, learning rate {point.preset.learning_rate * factor:g}"


def main(args: argparse.Namespace) -> int:
    """Run every point, print each as it ends, and then each variant's best; exit code 1 when one failed."""
    variants = variants_of(args)
    machine, env = probe()
    say_idle(machine, args.gpus)
    specs = plan(
        variants,
        args.preset,
        args.seeds,
        args.data,
        args.model,
        args.micro_batch,
        machine,
        batch=args.batch,
        max_answer_length=args.max_answer_length,
        runs=args.runs,
    )
    for said in dict.fromkeys(spec.adjusted[0] for spec in specs if spec.chosen):
        print(wrapped(said))
    preset = specs[0].preset
    if not preset.quality:
        raise UserError(f"preset {args.preset!r} measures no quality, by which points are compared")
    metric, label = TASKS[preset.task]["tuned_by"], TASKS[preset.task]["tuned_label"]

    def report(point: Spec, entry: dict) -> None:
        result = f"{entry['status']}, {entry['error']['message']}"
        if entry["status"] == "ok":
            result = f"{label} {entry['quality'][metric]:.2f}"
        print(f"  {one_line(f'{point.run_id} {name_of(point)}: {result}')}", flush=True)

    trials = points(specs, args.learning_rate, args.trainable)
    launcher = Launcher(
        args.runs, machine, env, args.gpus, share=True, time_limit_s=args.time_limit
    )
    entries = launcher.run_all(trials, report)
    scores = [entry["quality"][metric] if entry["status"] == "ok" else None for entry in entries]
    found = pd.DataFrame(
        {
            "variant": [each.variant for each in trials],
            "point": map(name_of, trials),
            "score": scores,
        }
    )
    for variant, own in found.astype({"score": float}).groupby("variant", sort=False):
        # Over seeds, of points that have them all.
        means = own.groupby("point")["score"].agg(lambda seeds: seeds.mean(skipna=False)).dropna()
        if means.empty:
            print(f"{variant}: no point was measured with every seed")
        else:
            best = means.idxmax() if SCORING[preset.task]["higher_is_better"] else means.idxmin()
            print(f"{variant}, best: {best}, {label} {means[best]:.2f}")
    # A rate too high for one point says nothing about the others.
    return 0 if all(entry["status"] in FINISHED for entry in entries) else 1
