"""What the techniques give in one's own training: `python -m qa_lib.own.bench --task pairs`.

Ways to train the same model on the same samples are timed in turns, round after round, each in a
process of its own (bench_turns.py). Each measurement prints a line of JSON, and a table of medians
comes last; stderr says which way is at work. With `--out FILE` the lines are appended to a file as
well, and what it has of this card, code and these settings is not measured again. `--within` is a
limit in seconds, of which setups may take half: what would not end in time is not begun, and what
has not ended by then is stopped. Ctrl-C ends it with what has been measured, and a way that fails
leaves the others their turns.

The ways and the tasks are in bench_ways.py.

Beside the library's own training of answers (E-uncompiled) a fair comparison is of tokens a second
without padding, at paragraphs, BERT-base and 32 samples: lengths are alike, but not equal, and so
is the work, but for the head. docs/own-code.md has it where both were measured on one card.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers

from qa_lib.errors import UserError
from qa_lib.loaded import CODE
from qa_lib.own.bench_turns import (
    DEVICE,
    LEAD_IN,
    PROFILED,
    Measured,
    TimeIsUp,
    Turns,
    Way,
    WayFailed,
    append_line,
    expected_setup_s,
    lines_of,
    matching,
)
from qa_lib.own.bench_ways import SIZES, TASKS, WAYS, drawn_samples, work_of

TOO_LATE = "{} would not end in time, and is left out from here on"
EXAMPLE = """\
examples, which take a BERT-base where there is a GPU: all ways, and two of them in one round
  python -m qa_lib.own.bench --task paragraphs
  python -m qa_lib.own.bench --task pairs --ways loop all --rounds 1
within ten minutes, into a file; the same line again goes on where this one stopped
  python -m qa_lib.own.bench --task pairs --out own-bench.jsonl --within 570
"""


def train_in_turns(
    connection: Connection, way: str, arguments: argparse.Namespace, turns: int
) -> None:
    """Train by a way for so many turns, each when the connection says so."""
    measured = Turns(arguments.warm_up, arguments.batch, arguments.steps, turns, connection)
    train_by(way, arguments, measured.further_steps, measured)


def train_by(way: str, arguments: argparse.Namespace, steps: int, measured: Measured) -> None:
    """Train by a way, for a warm-up and so many steps, which `measured` counts."""
    work = work_of(
        arguments.task, arguments.size, arguments.samples, arguments.batch, steps, measured
    )
    WAYS[way](work)


def parsed(words: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    on_gpu = DEVICE.type == "cuda"
    parser = argparse.ArgumentParser(
        prog="python -m qa_lib.own.bench",
        description="Time ways to train a classifier, in turns. All are in memory at once.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", choices=TASKS, default="pairs")
    parser.add_argument("--size", choices=SIZES, default="base" if on_gpu else "tiny")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", type=int, default=32, help="samples in a step")
    parser.add_argument("--samples", type=int, help="in an epoch; by default those of 512 steps")
    parser.add_argument("--steps", type=int, default=100, help="that are timed, in a turn")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before all turns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE", help="to append to, and to go on from")
    parser.add_argument("--within", type=float, metavar="SECONDS", default=float("inf"))
    arguments = parser.parse_args(words)
    if arguments.samples is None:
        # Enough for all turns: an epoch's end, where loaders begin anew, is rare in real trainings.
        arguments.samples = 512 * arguments.batch
    if arguments.warm_up < 1:
        parser.error("--warm-up: a way is set up when its first step has been done, so 1 at least")
    return arguments


def settings_of(arguments: argparse.Namespace) -> dict:
    """Return what tells measurements apart, but for way and round: machine, code, settings."""
    names = ("task", "size", "batch", "samples", "steps", "warm_up")
    return {
        "card": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "code": CODE.digest,
    } | {name: getattr(arguments, name) for name in names}


class Bench:
    """The measurements of a call, in turns, and those that its file had before.

    `deadline` is a time of `time.monotonic` in seconds. Ways that are not set up in half of the
    time until then are left out.

    Raises UserError for a file that cannot be read.
    """

    def __init__(self, arguments: argparse.Namespace, deadline: float):
        self.arguments = arguments
        self.deadline = deadline
        # Turns begin when the last way is set up, so that one that compiles for long would leave
        # the others none.
        self.setup_deadline = (time.monotonic() + deadline) / 2
        self.settings = settings_of(arguments)
        self.earlier = lines_of(arguments.out) if arguments.out else []
        self.known = matching(self.earlier, self.settings)
        samples = drawn_samples(arguments.task, arguments.samples, SIZES[arguments.size])
        self.tokens = statistics.mean(len(sample["input_ids"]) for sample in samples)
        self.sitting = datetime.now(UTC).isoformat(timespec="seconds")
        self.failed: list[str] = []

    def measure(self) -> None:
        """Measure what the file does not have, in turns."""
        missing = {name: self._missing(name) for name in self.arguments.ways}
        running: dict[str, Way] = {}
        try:
            self._begin(running, missing)
            self._await_setups(running, missing)
            self._take_turns(running, missing)
        finally:
            for way in running.values():
                way.stop()

    def _begin(self, running: dict[str, Way], missing: dict[str, list[int]]) -> None:
        """Have all ways that miss rounds, and that have the time, set themselves up."""
        for name, rounds in missing.items():
            if rounds and self._can_set_up(name):
                running[name] = self._begun(name, rounds)
        if running:
            say(f"set up at the same time: {', '.join(running)}")

    def _await_setups(self, running: dict[str, Way], missing: dict[str, list[int]]) -> None:
        """Wait for all; what ran out of memory beside the others is set up again, alone."""
        crowded: list[str] = []
        for name in list(running):
            self._do_or_leave_out(running, name, self._await_setup, self.setup_deadline, crowded)
        for name in crowded:
            say(f"{name} ran out of memory beside the others, and is set up again")
            running[name].stop()
            running[name] = self._begun(name, missing[name])
            self._do_or_leave_out(running, name, self._await_setup, self.deadline)

    def _take_turns(self, running: dict[str, Way], missing: dict[str, list[int]]) -> None:
        """Measure all ways in each round that they miss."""
        for number in range(self.arguments.rounds):
            for name in list(running):
                if number in missing[name]:
                    self._do_or_leave_out(running, name, self._turn, number)

    def _missing(self, name: str) -> list[int]:
        """Return the rounds of a way that have not been measured."""
        measured = {line["round"] for line in matching(self.known, {"way": name})}
        return [number for number in range(self.arguments.rounds) if number not in measured]

    def _do_or_leave_out(
        self, running: dict[str, Way], name: str, do: Callable, *arguments
    ) -> None:
        """Do something with a way, which is left out where it fails or has too little time."""
        try:
            do(running[name], *arguments)
        except WayFailed as problem:
            self.failed.append(name)
            say(f"{name} failed, and is left out from here on: {problem}")
        except TimeIsUp:
            say(TOO_LATE.format(name))
        else:
            return
        running.pop(name).stop()

    def _can_set_up(self, name: str) -> bool:
        """Return whether a way's setup will probably end in half of the time; say so if not."""
        card = self.settings["card"]
        seconds = expected_setup_s(name, self.earlier, card, self.arguments.size)
        if time.monotonic() + seconds <= self.setup_deadline:
            return True
        say(TOO_LATE.format(name))
        return False

    def _begun(self, name: str, rounds: list[int]) -> Way:
        """Return a way that has begun to set itself up for turns in these rounds."""
        return Way(name, train_in_turns, (name, self.arguments, len(rounds)))

    def _await_setup(self, way: Way, end: float, crowded: list[str] | None = None) -> None:
        """Wait for a way; note it in `crowded`, where that is given, if it lacks memory.

        Raises TimeIsUp where it is not set up at the time `end`.
        """
        try:
            way.await_setup(end)
        except WayFailed as problem:
            if crowded is None or not problem.lacks_memory:
                raise
            crowded.append(way.name)

    def _turn(self, way: Way, number: int) -> None:
        """Measure a way in a round; print and keep the line.

        Raises TimeIsUp where that would end, or has ended, after the deadline.
        """
        steps = LEAD_IN + self.arguments.steps + PROFILED
        if time.monotonic() + steps * self._expected_step_s(way) > self.deadline:
            raise TimeIsUp
        say(f"round {number + 1} of {self.arguments.rounds}: {way.name}")
        result = way.take_turn(self.deadline)
        line = self.settings | {
            "way": way.name,
            "round": number,
            "step_ms": 1e3 * self.arguments.batch / result["samples_per_s"],
            "samples_timed": result["steps"] * self.arguments.batch,
            "tokens_a_sample": self.tokens,
            "setup_s": way.setup["setup_s"],
            "sitting": self.sitting,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        line |= result
        print(json.dumps(line), flush=True)
        if self.arguments.out:
            append_line(self.arguments.out, line)
        self.known.append(line)

    def _expected_step_s(self, way: Way) -> float:
        """Return the seconds of a step: the last turn's, or the warm-up's, which others slowed."""
        turns = matching(self.known, {"way": way.name, "sitting": self.sitting})
        return turns[-1]["step_ms"] / 1e3 if turns else way.setup["step_s"]

    def print_medians(self) -> None:
        """Print a table of the ways that were measured, in this call or before."""
        medians = {}
        for way in self.arguments.ways:
            speeds = [line["samples_per_s"] for line in matching(self.known, {"way": way})]
            if speeds:
                medians[way] = statistics.median(speeds)
        if not medians:
            return
        first = next(iter(medians))
        print(f"\n| way | samples/s | × {first} |\n| --- | ---: | ---: |")
        for way, median in medians.items():
            print(f"| {way} | {median:,.0f} | {median / medians[first]:.2f} |")


def main(words: list[str] | None = None) -> int:
    """Measure all ways in turns, and print each measurement and the medians.

    Returns the exit status: 0, 1 where a way failed, 2 for a file that cannot be used, 130 where it
    was stopped.
    """
    began = time.monotonic()
    arguments = parsed(words)
    try:
        bench = Bench(arguments, began + arguments.within)
    except UserError as problem:
        say(str(problem))
        return 2
    try:
        bench.measure()
    except UserError as problem:
        say(str(problem))
        return 2
    except KeyboardInterrupt:
        say("stopped: the medians are of the measurements that ended")
        bench.print_medians()
        return 130
    bench.print_medians()
    return 1 if bench.failed else 0


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a time limit stops it
    sys.exit(main())
