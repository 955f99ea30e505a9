"""`python -m qa_lib variants`: lists the variants, as a table or as JSON."""

import argparse
import dataclasses
import json

from qa_lib.spec.rules import requirements, since
from qa_lib.spec.variants import VARIANTS, Variant


def main(args: argparse.Namespace) -> int:
    """Print the table of variants, or all their settings as JSON."""
    if args.json:
        print(json.dumps([as_json(variant) for variant in VARIANTS.values()], indent=1))
        return 0
    print(f"{'variant':25}{'parent':25}{'GPU':5}change, and why below it")
    for variant in VARIANTS.values():
        print(two_lines(variant))
    print(
        "GPU: the compute capability from which GPUs run it: "
        "a T4 has 7.5, an A100 8.0, an H100 9.0."
    )
    return 0


def two_lines(variant: Variant) -> str:
    """Return a variant's line of the table, and below it the reason for its change."""
    changes = [f"{setting} = {value}" for setting, value in variant.change.items()]
    change = ", ".join(changes) or "baseline"
    capability = since(variant.settings)
    gpu = f"{capability / 10}" if capability else "-"
    return f"{variant.name:25}{variant.parent or '-':25}{gpu:5}{change}\n    {variant.why}"


def as_json(variant: Variant) -> dict:
    """Return a variant with its family, all its settings, and what a GPU needs for them."""
    settings = variant.settings
    return {
        **dataclasses.asdict(variant),
        "family": variant.family,
        "settings": dataclasses.asdict(settings),
        "needs": [requirement.sentence for requirement in requirements(settings)],
        "since": since(settings),
    }
