"""Compare two checkouts: specs, names and losses have to be equal before and after a change.

    python tests/same_results.py OLD NEW                    # everything, about 30 minutes
    python tests/same_results.py OLD NEW --only specs       # every resolved spec, in minutes
    python tests/same_results.py OLD NEW --variants A1 E-packed

The same probe runs in both checkouts, with the same Python, on the same machine:

- specs: every variant at every preset, on seven kinds of machine, at several sizes. What is
  computed (hash, run id, group, settings, skipped or not, refused or not) has to be equal;
  sentences may differ, and are counted.
- losses: every variant that a CPU can train, 50 steps of its smoke preset. Losses have to be equal
  bit for bit.

A line is printed for each comparison, with at most ten differences of a kind. The exit code is 1
where there is any.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SHOWN = 10  # differences that are printed of each kind
STEPS = 50
MICRO_BATCHES = (None, 32)
LENGTHS = (None, 128)
BATCHES = (None, 128)
WORLDS = (None, 4)
# Modules that have a name, in checkouts of today and of before.
PLACES = {
    "PRESETS": ("qa_lib.spec.presets", "qa_lib.presets"),
    "VARIANTS": ("qa_lib.spec.variants", "qa_lib.variants"),
    "Machine": ("qa_lib.spec.machine", "qa_lib.spec.spec", "qa_lib.spec"),
    "resolve": ("qa_lib.spec.resolve", "qa_lib.spec.spec", "qa_lib.spec"),
}
SENTENCES = ("adjusted", "skip_reason", "message")  # words that a change may improve


# What runs inside a checkout. It imports the library of the folder that it is started in.


def find_name(name: str) -> object:
    """Return what a checkout calls by that name, in whichever of these modules it has it."""
    places = PLACES[name]
    for place in places:
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(place), name)
    raise ImportError(f"{name} is in none of {', '.join(places)}")


def probe_specs() -> Iterator[dict]:
    """Yield a row for each spec that can be asked for: its identity, and what it resolves to."""
    from qa_lib.errors import UserError

    PRESETS = find_name("PRESETS")
    VARIANTS = find_name("VARIANTS")
    Machine = find_name("Machine")
    resolve = find_name("resolve")
    installed = {"bitsandbytes": True, "deepspeed": True, "torchao": True, "compiler": True}
    machines = {"cpu": Machine(**installed), "bare-cpu": Machine()}
    for name, sm in (("t4", 75), ("a100", 80), ("l4", 89), ("h100", 90)):
        machines[name] = Machine(hardware=name, gpus=1, sm=sm, **installed)
    machines["h100-x4"] = Machine(hardware="h100", gpus=4, sm=90, **installed)

    names = ("micro_batch", "max_length", "batch", "world")
    sizes = []
    for values in itertools.product(MICRO_BATCHES, LENGTHS, BATCHES, WORLDS):
        sizes.append(dict(zip(names, values, strict=True)))
    for variant, preset, machine in itertools.product(VARIANTS, PRESETS, machines):
        for size in sizes:
            row = {"asked": [variant, preset, machine, size]}
            model = PRESETS[preset].model or "my-model"
            try:
                spec = resolve(variant, preset, 0, machines[machine], {}, {}, "data", model, **size)
            except UserError as problem:
                yield row | {"refused": True, "message": str(problem)}
                continue
            yield row | {
                "hash": spec.hash,
                "run_path": str(spec.run_path),
                "settings": dataclasses.asdict(spec.settings),
                "adjusted": spec.adjusted,
                "skipped": spec.skip is not None,
                "skip_reason": spec.skip,
                "accumulation": spec.accumulation,
                "own": spec.own,
                "chosen": spec.chosen,
            }


def probe_losses(variants: list[str]) -> Iterator[dict]:
    """Train each variant for STEPS steps on this CPU, and yield its losses."""
    from qa_lib import fit, plan
    from qa_lib.errors import UserError

    VARIANTS = find_name("VARIANTS")
    for name in variants or VARIANTS:
        preset = "lm-smoke" if VARIANTS[name].task == "lm" else "smoke"
        (spec,) = plan([name], preset)
        if spec.skip:
            yield {"asked": name, "skipped": True, "skip_reason": spec.skip}
            continue
        short = dataclasses.replace(spec.preset, steps=STEPS, quality=False, checkpoint_every=0)
        spec = dataclasses.replace(spec, preset=short)
        with tempfile.TemporaryDirectory() as runs:
            try:
                fit(spec, runs, say=lambda *_: None)
            except (UserError, RuntimeError) as problem:
                yield {"asked": name, "failed": type(problem).__name__, "message": str(problem)}
                continue
            lines = Path(runs, spec.run_path, "steps.jsonl").read_text().splitlines()
        yield {"asked": name, "losses": [json.loads(line)["loss"] for line in lines]}


# What starts the probes and compares their rows.


def rows_of(checkout: Path, kind: str, variants: list[str]) -> dict[str, dict]:
    """Run a probe in a checkout; return its rows by what they were asked."""
    command = [sys.executable, str(Path(__file__).resolve()), "--probe", kind]
    if variants:
        command += ["--variants", *variants]
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    rows = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[json.dumps(row.pop("asked"))] = row
    return rows


def compare(kind: str, old: dict[str, dict], new: dict[str, dict]) -> bool:
    """Print how the rows of two checkouts differ; return whether what is computed is equal."""
    different = []
    reworded = []
    for asked in old.keys() | new.keys():
        before = old.get(asked, {})
        after = new.get(asked, {})
        fields = before.keys() | after.keys()
        changed = sorted(field for field in fields if before.get(field) != after.get(field))
        if any(field not in SENTENCES for field in changed):
            different.append((asked, changed, before, after))
        elif changed:
            reworded.append((asked, changed, before, after))
    print(
        f"{kind}: {len(old):,} before, {len(new):,} after, {len(different):,} differ, "
        f"{len(reworded):,} are worded otherwise"
    )
    for asked, changed, before, after in (different + reworded[:1])[:SHOWN]:
        print(f"  {asked}")
        for field in changed:
            print(f"    {field}: {before.get(field)!s:.90} -> {after.get(field)!s:.90}")
    return not different


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, nargs="?", help="the checkout before the change")
    parser.add_argument("new", type=Path, nargs="?", help="the checkout after it")
    parser.add_argument("--only", choices=["specs", "losses"], help="one comparison alone")
    parser.add_argument("--variants", nargs="+", default=[], help="whose losses (all)")
    parser.add_argument("--probe", choices=["specs", "losses"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        rows = probe_specs() if args.probe == "specs" else probe_losses(args.variants)
        for row in rows:
            print(json.dumps(row), flush=True)
        return 0
    if not (args.old and args.new):
        parser.error("two checkouts are compared: OLD NEW")
    kinds = [args.only] if args.only else ["specs", "losses"]
    all_equal = True
    for kind in kinds:
        old = rows_of(args.old.resolve(), kind, args.variants)
        new = rows_of(args.new.resolve(), kind, args.variants)
        if not compare(kind, old, new):
            all_equal = False
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
