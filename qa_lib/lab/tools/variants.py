"""`python -m qa_lib variants`: lists the variants, as a table or as JSON."""

import argparse
import dataclasses
import json

from qa_lib.spec.rules import requirements, since
from qa_lib.spec.variants import VARIANTS, Variant


def main(args: argparse.Namespace) -> int:
    """Print the table of variants, or with --json all that is known of them."""
    if args.json:
        print(json.dumps([_all_of(variant) for variant in VARIANTS.values()], indent=1))
        return 0
    print(_line("variant", "parent", "GPU", "change, and why below it"))
    for variant in VARIANTS.values():
        print(_two_lines(variant))
    print(
        "GPU: the compute capability from which GPUs run it: "
        "a T4 has 7.5, an A100 8.0, an H100 9.0."
    )
    return 0


def _line(name: str, parent: str, gpu: str, change: str) -> str:
    """Return a line of the table, its columns at their places."""
    return f"{name:25}{parent:25}{gpu:5}{change}"


def _two_lines(variant: Variant) -> str:
    """Return a variant's line of the table, and below it the reason for its change."""
    changes = [f"{setting} = {value}" for setting, value in variant.change.items()]
    change = ", ".join(changes) or "baseline"
    capability = since(variant.settings)
    gpu = f"{capability / 10}" if capability else "-"
    line = _line(variant.name, variant.parent or "-", gpu, change)
    return f"{line}\n    {variant.why}"


def _all_of(variant: Variant) -> dict:
    """Return what JSON shows of a variant.

    Beside its own fields these are its family, all its settings, what they need, in sentences, and
    since which compute capability (times 10) a GPU runs them.
    """
    settings = variant.settings
    return {
        **dataclasses.asdict(variant),
        "family": variant.family,
        "settings": dataclasses.asdict(settings),
        "needs": [requirement.sentence for requirement in requirements(settings)],
        "since": since(settings),
    }
