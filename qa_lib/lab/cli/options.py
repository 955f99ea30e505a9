"""Options that several verbs share: each `add_...` adds some to a parser.

The last two functions turn parsed options into what `plan` takes.
"""

import argparse
from collections.abc import Callable

from qa_lib.errors import UserError
from qa_lib.lab.cli import values
from qa_lib.lab.cli.parser import Parser
from qa_lib.spec.presets import OWN
from qa_lib.spec.variants import find_family

# Presets that --preset's help names: a first try, speed, a whole training, and one's own data.
SHOWN_PRESETS = ("smoke", "bench", "full", OWN)


def add_list(
    parser: Parser,
    name: str,
    kind: Callable[[str], object],
    metavar: str,
    help: str,
    default: list | None = None,
) -> None:
    """Add an option that takes several values, with spaces or commas between them."""
    parser.add_argument(
        name,
        type=values.list_of(kind),
        nargs="+",
        action=values.JoinLists,
        default=default,
        metavar=metavar,
        help=help,
    )


def add_count(
    parser: Parser, name: str, help: str, several: bool, type: Callable = values.count
) -> None:
    """Add an option that takes a whole number from 1, or `several`, each for runs of its own.

    `type` makes a value of what is typed.
    """
    if several:
        add_list(parser, name, type, metavar="N", help=f"{help}; several: each")
    else:
        parser.add_argument(name, type=type, metavar="N", help=help)


def add_variant(parser: Parser) -> None:
    """Add the one variant that a verb is about."""
    parser.add_argument(
        "variant",
        type=values.variant,
        metavar="VARIANT",
        help="one of `python -m qa_lib variants`, or recommended",
    )


def add_variants(parser: Parser) -> None:
    """Add the variants that a verb is about, by their names or by the letter of their family."""
    parser.add_argument(
        "variants",
        type=values.list_of(values.variant),
        nargs="*",
        action=values.JoinLists,
        metavar="VARIANT",
        help="some of `python -m qa_lib variants`, or recommended",
    )
    add_family(parser)


def add_family(parser: Parser) -> None:
    """Add --family."""
    parser.add_argument(
        "--family",
        type=values.text,
        metavar="A",
        help="the variants of one family, by its letter",
    )


def add_preset(parser: Parser) -> None:
    """Add --preset: how much work a run is, and on what."""
    parser.add_argument(
        "--preset",
        type=values.preset,
        metavar="P",
        help=f"how much work, on what: {', '.join(SHOWN_PRESETS)} (the default where --data and "
        "--model are given), or another of docs/presets.md; a command without a preset lists all",
    )


def add_sources(parser: Parser) -> None:
    """Add --data and --model: what is trained on, and what is trained."""
    parser.add_argument(
        "--data",
        type=values.text,
        metavar="DIR",
        help="questions or text: a folder, a file, or a hub name (default: the preset's)",
    )
    parser.add_argument(
        "--model",
        type=values.text,
        metavar="DIR",
        help="a folder, a hub name, or a shape such as gpt2:L12H768 (default: the preset's)",
    )


def add_seed(parser: Parser) -> None:
    """Add --seed."""
    parser.add_argument(
        "--seed",
        type=values.seed,
        default=0,
        metavar="N",
        help="random seed of new weights, order and dropout (default: 0)",
    )


def add_seeds(parser: Parser) -> None:
    """Add --seeds."""
    add_list(
        parser,
        "--seeds",
        values.seed,
        metavar="N",
        help="a run of every variant for each (default: 0)",
        default=[0],
    )


def add_batch_sizes(parser: Parser, several: bool = False) -> None:
    """Add --micro-batch and --batch; `several`: lists of them."""
    add_count(
        parser,
        "--micro-batch",
        help="samples in one forward pass (default: 8; at presets local, full and quality the "
        "quickest that fits the GPU)",
        several=several,
    )
    add_count(
        parser,
        "--batch",
        help="samples in an optimizer step (default: the preset's)",
        several=several,
    )


def add_sizes(parser: Parser, several: bool = False) -> None:
    """Add --micro-batch, --batch and --max-length; `several`: lists of sizes."""
    add_batch_sizes(parser, several)
    add_count(
        parser,
        "--max-length",
        help="tokens of a sample (default: the preset's); below 256 tokens, neighbouring windows "
        "overlap by a third",
        several=several,
    )


def add_overrides(parser: Parser, several: bool = False) -> None:
    """Add what a run can have otherwise than its preset: --micro-batch and what `overrides_of`
    reads; `several`: lists of sizes and of numbers of processes."""
    add_sizes(parser, several)
    add_trained_answer_length(parser)
    add_count(
        parser,
        "--world",
        help="processes, one a GPU: a number, or all for all GPUs (default: 1, and 2 for family P)",
        several=several,
        type=values.world,
    )
    parser.add_argument(
        "--stages",
        type=values.count,
        metavar="N",
        help="processes in one pipeline (default: all of them)",
    )
    parser.add_argument(
        "--epochs",
        type=values.count,
        metavar="N",
        help="passes over the data (default: the preset's)",
    )
    parser.add_argument(
        "--learning-rate",
        type=values.learning_rate,
        metavar="X",
        help="peak of the learning rate, before a recipe's factor (default: the preset's)",
    )


def add_trained_answer_length(parser: Parser) -> None:
    """Add --max-answer-length to a verb that trains."""
    parser.add_argument(
        "--max-answer-length",
        type=values.count,
        metavar="N",
        help="tokens of an answer, at most (default: the preset's; at local, what the training "
        "answers need)",
    )


def add_answer_length(parser: Parser) -> None:
    """Add --max-answer-length to a verb that uses a trained model."""
    parser.add_argument(
        "--max-answer-length",
        type=values.count,
        metavar="N",
        help="tokens of an answer, at most (default: as the model was trained, else 30)",
    )


def add_runs(parser: Parser) -> None:
    """Add --runs to a verb that writes records."""
    parser.add_argument(
        "--runs",
        type=values.folder,
        default="runs",
        metavar="DIR",
        help="where records go (default: runs)",
    )


def add_runs_to_read(parser: Parser) -> None:
    """Add --runs to a verb that only reads records."""
    parser.add_argument(
        "--runs",
        type=values.path,
        default="runs",
        metavar="DIR",
        help="folder of the records (default: runs)",
    )


def add_figures(parser: Parser) -> None:
    """Add --figures to a verb that draws."""
    parser.add_argument(
        "--figures",
        type=values.folder,
        default="figures",
        metavar="DIR",
        help="where figures and pages go (default: figures)",
    )


def add_gpus(parser: Parser) -> None:
    """Add --gpus."""
    add_list(
        parser,
        "--gpus",
        values.gpu_index,
        metavar="N",
        help="GPUs to use at once; one that is named twice has two runs at a time (default: one "
        "run at a time)",
    )


def add_time_limit(parser: Parser) -> None:
    """Add --time-limit."""
    parser.add_argument(
        "--time-limit",
        type=values.count,
        metavar="SECONDS",
        help="seconds that each run may take (default: the preset's)",
    )


def add_force(parser: Parser) -> None:
    """Add --force."""
    parser.add_argument("--force", action="store_true", help="train again what is finished")


def add_compile_cache(parser: Parser) -> None:
    """Add --compile-cache."""
    parser.add_argument(
        "--compile-cache",
        type=values.folder,
        metavar="DIR",
        help="keep compiled code in this folder, and take it from there; it has to be yours",
    )


def add_compute_capability(parser: Parser, help: str) -> None:
    """Add --compute-capability, whose value is ten times what is typed."""
    parser.add_argument(
        "--compute-capability",
        type=values.compute_capability,
        default=90,
        metavar="X.Y",
        help=help,
    )


def variants_of(args: argparse.Namespace) -> list[str]:
    """Return the names of the variants that were asked for, `recommended` among them.

    Raises UserError where none was.
    """
    names = list(args.variants or [])
    if args.family:
        names += find_family(args.family)
    if not names:
        raise UserError(
            "no variant is named: give some of `python -m qa_lib variants`, or a --family"
        )
    return names


def overrides_of(args: argparse.Namespace) -> dict:
    """Return what replaces the preset's own values, as keyword arguments of `plan`; None where
    nothing was given."""
    return {
        "world": args.world,
        "stages": args.stages,
        "batch": args.batch,
        "epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "max_length": args.max_length,
        "max_answer_length": args.max_answer_length,
    }
