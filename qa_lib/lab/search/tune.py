"""Runs of a variant at other learning rates and with other recipes (what trains).

Each run is in the group `*-tune`. So the learning rate of preset `quality` and the recipes of the
LoRA variants were found; the points that lost are kept. Points share a GPU and record no times.
Where times matter, or several sizes are to be compared at a rate of each one's own,
`sweep --learning-rate` leaves all of it in one group (notebooks/scaling.ipynb).
"""

import argparse
import dataclasses
import itertools

import pandas as pd

from qa_lib.errors import UserError, one_line, wrapped
from qa_lib.lab.cli.options import variants_of
from qa_lib.lab.launch.local import Launcher, say_idle
from qa_lib.lab.launch.probe import probe
from qa_lib.lab.search.plan import plan
from qa_lib.records.record import FINISHED, SCORING
from qa_lib.spec.spec import Spec
from qa_lib.spec.tasks import TASKS


def main(args: argparse.Namespace) -> int:
    """Run every point, print each as it ends, and then each variant's best.

    The exit code is 1 when a point failed.
    """
    variants = variants_of(args)
    machine, env = probe()
    say_idle(machine, args.gpus)
    specs = plan(
        variants=variants,
        preset=args.preset,
        seeds=args.seeds,
        data=args.data,
        model=args.model,
        micro_batch=args.micro_batch,
        machine=machine,
        batch=args.batch,
        max_answer_length=args.max_answer_length,
        runs=args.runs,
    )
    for choice in dict.fromkeys(spec.adjusted[0] for spec in specs if spec.chosen):
        print(wrapped(choice))
    if not specs[0].preset.quality:
        raise UserError(f"preset {args.preset!r} measures no quality, by which points are compared")
    trials = points(specs, args.learning_rate, args.trainable)
    launcher = Launcher(
        runs=args.runs,
        machine=machine,
        env=env,
        gpus=args.gpus,
        share=True,
        time_limit_s=args.time_limit,
    )
    entries = launcher.run_all(trials, ended=_print_point)
    _print_best(trials, entries)
    # A rate too high for one point says nothing about the others.
    return 0 if all(entry["status"] in FINISHED for entry in entries) else 1


def points(specs: list[Spec], rates: list[float], trainables: list[str]) -> list[Spec]:
    """Return every spec with every learning rate and every recipe, which goes by its name.

    An empty list stands for the spec's own. Raises UnknownName for a recipe that does not exist.
    """
    trials = []
    for rate, trainable, spec in itertools.product(rates or [None], trainables or [None], specs):
        recipe = trainable or spec.asked.trainable
        trial = dataclasses.replace(
            spec,
            preset=dataclasses.replace(
                spec.preset, name="tune", learning_rate=rate or spec.preset.learning_rate
            ),
            asked=dataclasses.replace(spec.asked, trainable=recipe),
            settings=dataclasses.replace(spec.settings, trainable=recipe),
            search="tune",
        )
        trials.append(trial)
    return trials


def point_name(trial: Spec) -> str:
    """Return what the runs of a point have in common, whatever their seed."""
    factor = trial.recipe.lr_factor if trial.preset.recipe_rates else 1
    rate = trial.preset.learning_rate * factor
    return f"{trial.settings.trainable}, learning rate {rate:g}"


def _score(trial: Spec, entry: dict) -> float | None:
    """Return the score that points are compared by; None for a run that did not end ok."""
    if entry["status"] != "ok":
        return None
    return entry["quality"][TASKS[trial.preset.task].tuned_by]


def _score_label(trial: Spec) -> str:
    return TASKS[trial.preset.task].tuned_label


def _print_point(trial: Spec, entry: dict) -> None:
    """Print how a run of a point ended."""
    if entry["status"] == "ok":
        result = f"{_score_label(trial)} {_score(trial, entry):.2f}"
    else:
        result = f"{entry['status']}, {entry['error']['message']}"
    print(f"  {one_line(f'{trial.run_id} {point_name(trial)}: {result}')}", flush=True)


def _print_best(trials: list[Spec], entries: list[dict]) -> None:
    """Print each variant's best point, by the mean over seeds of points that have them all."""
    scores = [_score(trial, entry) for trial, entry in zip(trials, entries, strict=True)]
    table = pd.DataFrame({
        "variant": [trial.variant for trial in trials],
        "point": [point_name(trial) for trial in trials],
        "score": pd.Series(scores, dtype=float),
    })  # fmt: skip
    label = _score_label(trials[0])
    higher_is_better = SCORING[trials[0].preset.task]["higher_is_better"]
    for variant, of_variant in table.groupby("variant", sort=False):
        by_point = of_variant.groupby("point")["score"]
        means = by_point.agg(lambda scores: scores.mean(skipna=False)).dropna()
        if means.empty:
            print(f"{variant}: no point was measured with every seed")
        else:
            best = means.idxmax() if higher_is_better else means.idxmin()
            print(f"{variant}, best: {best}, {label} {means[best]:.2f}")
