"""The verb `memory`: what lab/search/memory_estimate.py has for variants at a preset, as a table."""

import argparse

import pandas as pd

from qa_lib.lab.cli import variants_of
from qa_lib.lab.search.memory_estimate import SquadLengths, estimate, gpu_of, unpredicted
from qa_lib.lab.search.plan import plan
from qa_lib.spec.presets import find_preset


def main(args: argparse.Namespace) -> int:
    """Print the estimate of each variant for a GPU of that kind."""
    preset = find_preset(args.preset)
    known = not args.data and preset.data == "squad_v2"
    data = (
        "synthetic:1" if known or preset.task == "lm" else args.data
    )  # nothing is fetched that is not asked for
    gpu = gpu_of(args.compute_capability)
    sources, sizes = (
        (data, args.model, args.micro_batch, gpu),
        {"max_length": args.max_length, "batch": args.batch},
    )
    specs = plan(variants_of(args), args.preset, [0], *sources, **sizes)
    lines = []
    for spec in specs:
        line = {
            "variant": spec.variant,
            "length": spec.preset.max_length,
            "micro-batch": spec.settings.micro_batch,
        }
        if spec.chosen:
            print(spec.adjusted[0])
        if why := spec.skip or unpredicted(spec):
            print(f"{spec.variant}: {why}")
            continue
        found = estimate(
            spec, SquadLengths(spec.preset.max_length, spec.preset.stride) if known else None
        )
        lines.append(line | {name.removesuffix("_mib"): size for name, size in found.items()})
    if lines:
        short = {
            "optimizer": "optim.",
            "activations": "activ.",
            "workspace": "rest",
        }  # to fit 100 columns
        table = pd.DataFrame(lines).rename(columns=short)
        phases = table.pop("phase")
        print(table.to_string(index=False, float_format="{:,.0f}".format))
        for phase in phases.unique():
            print(f"peak in {phase}: {', '.join(table.loc[phases == phase, 'variant'].unique())}")
        print("MiB of GPU memory; beside it a process has a CUDA context of 300 to 600 MiB.")
    return 0
