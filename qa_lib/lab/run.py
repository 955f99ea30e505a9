"""`python -m qa_lib run`: trains one variant in this process and says what was measured."""

import argparse

from qa_lib.lab.cli.options import overrides_of
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.launch.compile_cache import use_compile_cache
from qa_lib.lab.search.plan import plan


def main(args: argparse.Namespace) -> int:
    """Train one variant, unless it is finished and not forced; print its result and its record."""
    use_compile_cache(args.compile_cache)
    (spec,) = plan(
        [args.variant],
        args.preset,
        [args.seed],
        data=args.data,
        model=args.model,
        micro_batch=args.micro_batch,
        runs=args.runs,
        **overrides_of(args),
    )
    record = fit(spec, args.runs, force=args.force)
    if record["status"] == "running":  # one of torchrun's processes, and not the first
        return 0
    print(summary_of(record))
    print(args.runs / record["group"] / record["run_id"] / "record.json")
    return 0


def summary_of(record: dict) -> str:
    """Return what a run measured, in a line: "A1: ok, samples/s 80.25, F1 81.50".

    The F1 of never answering is beside an F1 that is below it.
    """
    parts = [f"{record['spec']['variant']}: {record['status']}"]
    speed = record["speed"]["samples_per_s"]
    if speed is not None:
        parts.append(f"samples/s {speed:.2f}")
    task, quality = record["task"], record["quality"]
    score = quality[task["metric"]]
    if score is not None:
        parts.append(f"{task['label']} {score:.2f}")
    f1 = quality.get("f1")
    never_answering = quality.get("always_null_f1")
    if f1 is not None and never_answering is not None and f1 < never_answering:
        parts.append(f"never answering {never_answering:.2f}")
    return ", ".join(parts)
