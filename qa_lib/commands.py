"""The verbs of `python -m qa_lib`: their options, help and examples. The module of a verb has its `main`.

Nothing here imports what a verb needs to work, so that every --help answers at once.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from qa_lib.cli import (
    Joined,
    Parser,
    above_0,
    capability,
    folder,
    given,
    number,
    one_or_more,
    path,
    rate,
    seed,
    several,
    whole,
)
from qa_lib.presets import PRESETS


@dataclass(frozen=True)
class Option:
    """An argument of a verb: its name, the kind of its value (see cli.py), and what argparse shows."""

    name: str
    kind: Callable | None
    metavar: str | None
    help: str
    more: dict

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        shown = {"type": self.kind, "metavar": self.metavar} if self.kind else {}
        parser.add_argument(self.name, help=self.help, **shown, **self.more)


def option(name: str, kind: Callable | None, metavar: str | None, help: str, **more) -> Option:
    return Option(name, kind, metavar, help, more)


def flag(name: str, help: str) -> Option:
    return Option(name, None, None, help, {"action": "store_true"})


def each(name: str, kind: Callable, metavar: str, help: str, **more) -> Option:
    """An option that takes several values, with commas or spaces between them."""
    return Option(name, several(kind), metavar, help, {"nargs": "+", "action": Joined} | more)


RUNS = option("--runs", folder, "DIR", "where records go (runs)", default="runs")
READ_RUNS = option("--runs", path, "DIR", "folder of the records (runs)", default="runs")
SOURCES = (
    option("--data", given, "DIR", "questions or text: a folder, a file, or a hub name"),
    option("--model", given, "DIR", "a folder, a hub name, or a shape: gpt2:L12H768"),
)
PRESET = option("--preset", given, "P", ", ".join(PRESETS), required=True)
VARIANT = option("variant", given, "VARIANT", "one of `python -m qa_lib variants`")
FAMILY = option("--family", given, "A", "the variants of one family, by its letter")
NAMED = (each("variants", given, "VARIANT", "of `python -m qa_lib variants`", nargs="*"), FAMILY)
SIZES = {
    "--micro-batch": "samples in one forward pass (variants: 8)",
    "--batch": "samples in an optimizer step (its preset's)",
    "--max-length": "tokens of a sample (its preset's); neighbours of fewer than 256 share a third",
    "--world": "processes of a variant of family P, one a GPU (2)",
}
OWN = (
    option("--stages", one_or_more, "N", "processes in one pipeline (all of them)"),
    option("--epochs", one_or_more, "N", "passes over the data (its preset's)"),
    option("--learning-rate", rate, "X", "its peak, before a recipe's factor (its preset's)"),
)
LAUNCH = (
    each("--gpus", whole(0, 1023), "N", "cards to use; one that is named twice has two runs at a time"),
    option("--time-limit", one_or_more, "SECONDS", "for each run (its preset's)"),
)
SEEDS = each("--seeds", seed, "N", "a run of every variant for each (0)", default=[0])


def size(name: str) -> Option:
    return option(name, one_or_more, "N", SIZES[name])


def sizes(*names: str) -> tuple[Option, ...]:
    """Options of sizes that take several numbers, each of which is tried."""
    return tuple(each(name, one_or_more, "N", f"{SIZES[name]}; several: each") for name in names)


@dataclass(frozen=True)
class Verb:
    """What `python -m qa_lib NAME` does: the module that has its `main`, its options, and examples. Of `either`, one
    option at most may be given, or exactly one where `required`."""

    module: str
    text: str
    options: tuple[Option, ...]
    examples: str
    either: tuple[Option, ...] = ()
    required: bool = False


VERBS = {
    "quickstart": Verb(
        "qa_lib.quickstart",
        "train a few variants here, in minutes and offline, and see what comes of it",
        (RUNS, option("--figures", folder, "DIR", "drawn into (figures)", default="figures")),
        "quickstart",
    ),
    "variants": Verb(
        "qa_lib.variants",
        "list the variants: what each changes, and why",
        (flag("--json", "print every variant with all its settings as JSON"),),
        "variants --json | jq '.[] | select(.family == \"B\")'",
    ),
    "run": Verb(
        "qa_lib.run.fit",
        "train, measure and evaluate one variant in this process",
        (
            VARIANT,
            option("--seed", seed, "N", "of new weights, order and dropout (0)", default=0),
            PRESET,
            *map(size, SIZES),
            *SOURCES,
            RUNS,
            *OWN,
        ),
        "run A3 --preset smoke --seed 0",
    ),
    "sweep": Verb(
        "qa_lib.run.sweep",
        "run many variants, each through its notebook, one process a run",
        (
            each("--variants", given, "VARIANT", "these alone (default: all)"),
            FAMILY,
            SEEDS,
            PRESET,
            *sizes(*SIZES),
            *SOURCES,
            RUNS,
            *OWN,
            *LAUNCH,
            option("--launcher", None, None, "where runs go (local)", choices=["local", "slurm"], default="local"),
            flag("--shared-gpu", "runs on one card train at once; records no times"),
            flag("--plan", "say what would run, and run nothing"),
            flag("--force", "run again what is finished, too"),
            option("--on-finish", given, "COMMAND", "run by the shell at the end, however it ends"),
        ),
        "sweep --preset smoke                     every variant, offline, on a CPU\n"
        "sweep --family A --preset bench --seeds 0 1 2 --gpus 0 1\n"
        "sweep --variants A1,A4 --preset local --data squad/ --model bert/ --plan\n"
        "sweep --variants A1,A3 --preset sizing --micro-batch 8 32 --max-length 128 256",
    ),
    "profile": Verb(
        "qa_lib.run.profile",
        "where a variant's step spends its time and memory",
        (
            VARIANT,
            flag("--ncu", "also read the GPU's counters, with Nsight Compute"),
            PRESET,
            size("--micro-batch"),
            *SOURCES,
            RUNS,
        ),
        "profile A1 --preset smoke\nprofile recommended --preset bench --data squad/ --micro-batch 32 --ncu",
    ),
    "memory": Verb(
        "qa_lib.run.memory_estimate",
        "predict a variant's GPU memory, without a GPU",
        (
            *NAMED,
            option("--compute-capability", capability, "X.Y", "of the GPU (9.0)", default=90),
            PRESET,
            *sizes("--micro-batch", "--max-length"),
            *SOURCES,
        ),
        "memory A1 C1 recommended --preset bench --model bert/ --micro-batch 32\n"
        "memory L1 L-dropout --preset lm-sizing --max-length 1024 16384",
    ),
    "max-batch": Verb(
        "qa_lib.run.max_batch",
        "find a variant's largest micro-batch under a cap on GPU memory",
        (
            *NAMED,
            option("--limit-gib", above_0, "G", "GPU memory to stay within", required=True),
            option("--compute-capability", capability, "X.Y", "use what such a GPU has (T4: 7.5)", default=90),
            *SOURCES,
            RUNS,
        ),
        "max-batch A3 --limit-gib 14.9 --compute-capability 7.5 --model bert/",
    ),
    "tune": Verb(
        "qa_lib.run.tune",
        "try other learning rates, or other parameters to train, for a variant",
        (
            *NAMED,
            each("--learning-rate", rate, "X", "of the preset (its own)", default=[]),
            each("--trainable", given, "NAME", "such as lora-all-r32 (the variant's own)", default=[]),
            SEEDS,
            PRESET,
            size("--micro-batch"),
            *SOURCES,
            RUNS,
            *LAUNCH,
        ),
        "tune L-dropout --preset lm-quality --learning-rate 5e-4,1e-3 --data wikitext/\n"
        "tune A1 --preset quality --learning-rate 1e-4,2e-4 --data squad/ --model bert/\n"
        "tune B1-all --preset local --trainable lora-all-r8 --data squad/ --model bert/",
    ),
    "quantize": Verb(
        "qa_lib.run.quantize",
        "a run's model in 8 or 4 bits: its F1, size and time to answer",
        (
            option("run", path, "RUN", "folder of a run that has its model"),
            option("--weights", None, None, "bits of a weight (int8)", choices=["int8", "int4"], default="int8"),
            option("--data", given, "D", "questions to score by (default: the run's own)"),
        ),
        "quantize runs/cpu-smoke/A1-int8-s0-1a2b3c --weights int8\n"
        "predict --model runs/cpu-smoke/A1-int8-s0-1a2b3c/model-int8 ...",
    ),
    "export": Verb(
        "qa_lib.run.export",
        "records as CSV, runs for TensorBoard or Weights & Biases",
        (READ_RUNS, option("--group", given, "G", "this group alone (default: all)")),
        "export --csv runs.csv\n"
        "export --tensorboard logs/      then: tensorboard --logdir logs/\n"
        "export --wandb logs/            then: wandb sync logs/wandb/offline-run-*",
        (
            option("--csv", path, "OUT.csv", "a line a run, a column a value of its record"),
            option("--tensorboard", folder, "DIR", "event files; needs the package tensorboard"),
            option("--wandb", folder, "DIR", "offline runs; needs the package wandb, and no account"),
        ),
        required=True,
    ),
    "archive": Verb(
        "qa_lib.archive",
        "put a group's records and steps into two files",
        (option("group", given, "GROUP", "a folder of runs below --runs"), RUNS),
        "archive h200-bench    then, if you like: rm -r runs/h200-bench",
    ),
    "report": Verb(
        "qa_lib.report.cli",
        "draw tables and figures from the records",
        (
            READ_RUNS,
            option("--figures", folder, "DIR", "drawn into (figures)", default="figures"),
            option("--group", given, "G", "of runs (default: the newest)"),
        ),
        "report --group cpu-smoke",
        (
            flag("--readme", "only put the committed groups' results into README.md"),
            flag("--pages", "only make the executed pages of the repository again"),
            flag("--check", "write nothing; fail if figures, pages or README.md are old"),
        ),
    ),
    "app": Verb(
        "qa_lib.app",
        "ask checkpoints in the browser, and read the dashboard",
        (
            option("--model", given, "M", "folder or hub name; repeatable", action="append", default=[]),
            READ_RUNS,
            option("--figures", path, "DIR", "of reports (figures)", default="figures"),
            option("--host", str, "H", "address to listen on (127.0.0.1: this machine alone)", default="127.0.0.1"),
            option("--port", whole(0, 65535), "N", "0 takes a free one (8600)", default=8600),
        ),
        "app --model deepset/minilm-uncased-squad2    # of the hub: safetensors, no code\n"
        "app --model my-bert/ --model runs/h200-local/A3-s0-1a2b3c/   # two side by side\n"
        "On another machine: ssh -L 8600:localhost:8600 MACHINE, start it there, and open\n"
        "http://localhost:8600 here. In a notebook, and in Colab: from qa_lib.app import app; app()",
    ),
    "predict": Verb(
        "qa_lib.score.predict",
        "answer a file of questions, or one, with a checkpoint",
        (
            option("data", given, "DATA.json", "a file or other source to answer", nargs="?"),
            option("--model", given, "M", "a model's or run's folder, or a hub name", required=True),
            option("--out", folder, "DIR", "for predictions, spans, n-best lists, null odds"),
            option("--question", str, "TEXT", "one question, answered on the terminal"),
            option("--context", str, "TEXT", "the paragraph that the one question is about"),
        ),
        'predict --model my-bert/ --question "Who wrote it?" --context "By Ada."\n'
        "predict --model runs/h200-local/A3-s0-1a2b3c/ dev-v2.0.json --out answers/\n"
        "predict --model deepset/bert-base-cased-squad2 dev-v2.0.json --out answers/",
    ),
    "score": Verb(
        "qa_lib.score.f1",
        "score predictions by the official SQuAD v2 rules",
        (
            option("data", given, "DATA.json", "questions with gold answers, SQuAD v1.1 or v2.0"),
            option("predictions", given, "PREDICTIONS.json", "question id -> answer, '' for none"),
            option("--na-prob", given, "FILE", "question id -> how sure of no answer"),
            option("--na-threshold", number, "X", "above it, no answer (1.0)", default=1.0),
            flag("--fix-spans", "move misplaced gold answers to their only occurrence"),
        ),
        "score validation.json answers/predictions.json\n"
        "score dev.json texts.json --na-prob answers/null_odds.json --na-threshold 0",
    ),
}


def parser_of(name: str) -> Parser:
    """The parser of a verb's options."""
    verb = VERBS[name]
    lines = [f"  python -m qa_lib {line}" if line.split()[0] in VERBS else f"  {line}"
             for line in verb.examples.splitlines()]  # fmt: skip
    parser = Parser(
        prog=f"python -m qa_lib {name}",
        description=f"{verb.text[0].upper()}{verb.text[1:]}.",
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for one in verb.options:
        one.add_to(parser)
    if verb.either:
        either = parser.add_mutually_exclusive_group(required=verb.required)
        for one in verb.either:
            one.add_to(either)
    return parser
