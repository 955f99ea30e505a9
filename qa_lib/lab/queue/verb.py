"""`python -m qa_lib queue`: makes the runs of a plan of evidence that have no record yet.

The plan is a file that is committed before its results are seen (plan_file.py). What is recorded is
found in folders and archives (units.py), so that a host that begins bare goes on where another one
has stopped, once it has the archives that the other one left.
"""

import argparse
import math
import sys
import textwrap
import time
from collections import Counter, defaultdict
from pathlib import Path

from qa_lib.errors import UserError, find, one_line
from qa_lib.lab.launch.probe import probe
from qa_lib.lab.launch.warm import start_server
from qa_lib.lab.queue.plan_file import EvidencePlan, Group, Sizes, read_plan
from qa_lib.lab.queue.runner import Archives, TimedLauncher, run_units
from qa_lib.lab.queue.units import Recorded, Unit, next_units, units_of
from qa_lib.lab.search.plan import plan as plan_specs
from qa_lib.lab.sweep import outcome_line
from qa_lib.loaded import CODE
from qa_lib.run.identity import without_folders
from qa_lib.spec.machine import Machine
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.spec import Spec

MOST_CHARACTERS = 50  # of the list of missing runs in a line of the status
# Single runs at work on one GPU: they take turns in training, and one is prepared or scored
# meanwhile.
RUNS_PER_GPU = 2


def main(args: argparse.Namespace) -> int:
    """Run what is missing of a plan, or print how the plan stands; 1 when a run failed.

    Raises UserError for a plan that cannot be, and for a machine of a card that it does not name.
    """
    end = time.monotonic() + (args.within or math.inf)
    plan = read_plan(args.plan)
    groups = _groups_asked(plan, args.groups)
    if args.status:
        for card in plan.cards:
            print_status(_title(args.plan, card), groups, Recorded(plan, card, args.runs))
        return 0

    if not all(group.cold for group in groups):
        start_server()  # it imports while the machine is probed
    machine, env = probe()
    card = machine.hardware
    if card not in plan.cards:
        raise UserError(f"{args.plan} is a plan for {' and '.join(plan.cards)}, and this is {card}")
    archives = Archives(plan, card, args.runs, args.copy_to)
    archives.keep_all()
    recorded = Recorded(plan, card, args.runs)
    specs = Specs(args.data, args.model, machine, args.runs)
    missing = [
        unit
        for unit in units_of([group for group in groups if specs.has_sources(group)])
        if not recorded.results(unit)
    ]

    failed = 0
    while True:
        # Counted as if each GPU had one at a time, which two that take turns never exceed.
        chosen = next_units(missing, recorded, end - time.monotonic(), max(1, machine.gpus))
        if not chosen:
            break
        missing = [unit for unit in missing if unit not in chosen]
        units = [unit for unit in chosen if specs.of(unit)]
        if not units:  # this machine lacks something
            continue
        launcher = TimedLauncher(
            runs=args.runs,
            machine=machine,
            env=env,
            gpus=_gpus_for(machine, units[0].group),
            # A run in a folder that does not count is of other code, or of a broken block.
            force=True,
            end=end,
            cold=units[0].group.cold,
            warm=not units[0].group.cold,
        )
        specs_of_units = {unit: specs.of(unit) for unit in units}
        entries = run_units(specs_of_units, launcher, archives, _tell)
        failed += sum(entry["status"] in ("error", "killed") for entry in entries)
        recorded = Recorded(plan, card, args.runs)
    if missing:
        print(f"not begun: {len(missing)} blocks and runs that would not end in time")
    print_status(_title(args.plan, card), groups, recorded)
    return 1 if failed else 0


def _groups_asked(plan: EvidencePlan, names: list[str] | None) -> list[Group]:
    """Return the groups that were named, in that order; all of the plan's where none was.

    Raises UnknownName.
    """
    by_name = {group.name: group for group in plan.groups}
    return [find("group", name, by_name) for name in dict.fromkeys(names or by_name)]


def _gpus_for(machine: Machine, group: Group) -> list[int] | None:
    """Return the GPUs that runs of a group use, each as often as it has runs at work.

    None without a GPU.
    """
    if not machine.gpus:
        return None
    if group.alone:
        return list(range(group.world or 1))
    return list(range(machine.gpus)) * RUNS_PER_GPU


def _tell(spec: Spec, entry: dict) -> None:
    """Print how a run has ended, and how fast it was."""
    line = f"{time.strftime('%H:%M')} {outcome_line(spec, entry)}"
    speed = entry["speed"]["samples_per_s"]
    if speed is not None:
        line += f", {speed:,.0f} samples/s"
    print(line, flush=True)


# Specs of what is planned.


class Specs:
    """The specs of units on this machine.

    They are made a group at a time, once the group has its turn: to identify a model takes as long
    as to read it.
    """

    def __init__(
        self,
        data: list[str] | None,
        models: list[str] | None,
        machine: Machine,
        runs: Path,
    ):
        """`data` and `models` are paths. Raises UserError for one that does not exist."""
        self.data = _by_name("--data", data or [])
        self.models = _by_name("--model", models or [])
        self.machine = machine
        self.runs = runs
        self._by_group: dict[Group, dict[tuple[str, int], Spec]] = {}

    def has_sources(self, group: Group) -> bool:
        """Return whether a group's data and model are given, or generated; say what is not."""
        needed = (("--data", group.data, self.data), ("--model", group.model, self.models))
        absent = [
            f"{option} .../{name}"
            for option, name, given in needed
            if name not in given and not _is_generated(name)
        ]
        if absent:
            _leave_out(group, f"give {' and '.join(absent)}")
        return not absent

    def of(self, unit: Unit) -> list[Spec]:
        """Return the specs of a unit, in order; none where this machine cannot run all of them."""
        if unit.group not in self._by_group:
            self._by_group[unit.group] = self._of_group(unit.group)
        by_run = self._by_group[unit.group]
        specs = [by_run.get((variant, unit.seed)) for variant in unit.variants]
        return specs if all(specs) else []

    def _of_group(self, group: Group) -> dict[tuple[str, int], Spec]:
        """Return the specs that can run here, by variant and seed; say why others cannot."""
        by_sizes: dict[Sizes, list[str]] = defaultdict(list)
        for variant in group.variants:
            by_sizes[group.sizes(variant)].append(variant)
        specs = []
        for sizes, variants in by_sizes.items():
            specs += self._of_sizes(group, sizes, variants)
        unable = [(spec.variant, spec.skip) for spec in specs if spec.skip]
        for variant, reason in dict.fromkeys(unable):
            _leave_out(group, f"{variant}: {reason}")
        return {(spec.variant, spec.seed): spec for spec in specs if not spec.skip}

    def _of_sizes(self, group: Group, sizes: Sizes, variants: list[str]) -> list[Spec]:
        """Return the specs of those variants of a group that have these sizes."""
        return plan_specs(
            variants=variants,
            preset=group.preset,
            seeds=group.seeds,
            data=self.data.get(group.data, group.data),
            model=self.models.get(group.model, group.model),
            micro_batch=sizes.micro_batch,
            batch=sizes.batch,
            world=sizes.world,
            learning_rate=group.learning_rate,
            machine=self.machine,
            runs=self.runs,
        )


def _by_name(option: str, paths: list[str]) -> dict[str, str]:
    """Return paths of data or models by the names that records have for them.

    Raises UserError for one that does not exist.
    """
    for path in paths:
        if not Path(path).exists():
            raise UserError(f"{option} {path}: it does not exist")
    return {without_folders(path): path for path in paths}


def _is_generated(name: str) -> bool:
    """Return whether data or a model of that name is in no folder."""
    return name == "tiny" or name.startswith("synthetic:") or find_shape(name) is not None


def _leave_out(group: Group, reason: str) -> None:
    """Say that something of a group is not run, and why."""
    print(one_line(f"left out of {group.name}: {reason}"), file=sys.stderr, flush=True)


# How a plan stands.


def _title(path: Path, card: str) -> str:
    """Return the line above the state of a plan on a card."""
    return f"{path}: {card}, code {CODE.digest[:7]}"


def print_status(title: str, groups: list[Group], recorded: Recorded) -> None:
    """Print a line for each group: what of it is done, what is missing, and for how many minutes.

    A group's minutes are those of its units one after the other. Those in all are of one GPU, so
    that a group on two of them counts twice.
    """
    print(title)
    width = max(len(group.name) for group in groups)
    total_s = 0.0
    for group in groups:
        units = units_of([group])
        missing = [unit for unit in units if not recorded.results(unit)]
        seconds = sum(recorded.seconds(unit) for unit in missing)
        total_s += seconds * (group.world or 1)
        kind = "blocks" if group.alone else "runs"
        line = f"{group.name:{width}}  {len(units) - len(missing):3}/{len(units):<3}{kind:7}"
        if missing:
            gpus = f" on {group.world} GPUs" if group.world else ""
            line += f"{seconds / 60:4.0f} min{gpus}: {_in_words(group, missing)}"
        print(line.rstrip())
    print(f"about {total_s / 60:.0f} minutes of a GPU are missing")


def _in_words(group: Group, missing: list[Unit]) -> str:
    """Return which units of a group are missing, such as 'seeds 1 2' or 'A1 ×8, A4 ×3'."""
    if group.alone:
        return f"seeds {' '.join(str(unit.seed) for unit in missing)}"
    counts = Counter(unit.variants[0] for unit in missing)
    words = ", ".join(f"{variant} ×{count}" for variant, count in counts.items())
    return textwrap.shorten(words, MOST_CHARACTERS, placeholder=" ...")
