"""The verb `memory`: the estimate of memory_estimate.py for variants at a preset, as a table."""

import argparse

import pandas as pd

from qa_lib.lab.cli.options import variants_of
from qa_lib.lab.search.memory_estimate import estimate, why_unpredicted
from qa_lib.lab.search.plan import plan
from qa_lib.lab.search.squad_lengths import SquadLengths
from qa_lib.spec.machine import gpu_of
from qa_lib.spec.presets import find_preset
from qa_lib.spec.spec import Spec

# Names of columns that would not fit into 100 characters.
SHORT_NAMES = {"optimizer": "optim.", "activations": "activ.", "workspace": "rest"}


def main(args: argparse.Namespace) -> int:
    """Print the estimate of each variant for a GPU of that kind."""
    preset = find_preset(args.preset)
    has_known_lengths = not args.data and preset.data == "squad_v2"
    data = args.data
    if has_known_lengths or preset.task == "lm":
        data = "synthetic:1"  # nothing is fetched that is not asked for
    specs = plan(
        variants=variants_of(args),
        preset=args.preset,
        data=data,
        model=args.model,
        machine=gpu_of(args.compute_capability),
        micro_batch=args.micro_batch,
        max_length=args.max_length,
        batch=args.batch,
    )
    rows = []
    for spec in specs:
        if spec.chosen:
            print(spec.adjusted[0])
        why_not = spec.skip or why_unpredicted(spec)
        if why_not:
            print(f"{spec.variant}: {why_not}")
        else:
            rows.append(_row(spec, has_known_lengths))
    if rows:
        _print_table(pd.DataFrame(rows))
    return 0


def _row(spec: Spec, has_known_lengths: bool) -> dict:
    """Return a line of the table: the run, and its estimate in MiB."""
    samples = None
    if has_known_lengths:
        samples = SquadLengths(spec.preset.max_length, spec.preset.stride)
    row = {
        "variant": spec.variant,
        "length": spec.preset.max_length,
        "micro-batch": spec.settings.micro_batch,
    }
    for name, size in estimate(spec, samples).items():
        row[name.removesuffix("_mib")] = size
    return row


def _print_table(table: pd.DataFrame) -> None:
    """Print the estimates, and below them which variants have their peak in which phase."""
    phases = table["phase"]
    shown = table.drop(columns="phase").rename(columns=SHORT_NAMES)
    print(shown.to_string(index=False, float_format="{:,.0f}".format))
    for phase in phases.unique():
        variants = table.loc[phases == phase, "variant"].unique()
        print(f"peak in {phase}: {', '.join(variants)}")
    print("MiB of GPU memory; beside it a process has a CUDA context of 300 to 600 MiB.")
