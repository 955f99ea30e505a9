"""The verbs that train: quickstart, run, sweep, queue, tune.

Each function returns the parser of one verb. What a verb runs is imported in `load_main`, and only
after its options are found right (parser.py).
"""

from qa_lib.lab.cli import options, values
from qa_lib.lab.cli.parser import Main, Parser


def quickstart_parser() -> Parser:
    """Return the parser of `quickstart`."""

    def load_main() -> Main:
        from qa_lib.lab.quickstart import main

        return main

    parser = Parser(
        verb="quickstart",
        summary="train a few variants here, in minutes and offline, and see what comes of it",
        examples=["python -m qa_lib quickstart --runs runs --figures figures"],
        load_main=load_main,
    )
    options.add_runs(parser)
    options.add_figures(parser)
    return parser


def run_parser() -> Parser:
    """Return the parser of `run`."""

    def load_main() -> Main:
        from qa_lib.lab.run import main

        return main

    parser = Parser(
        verb="run",
        summary="train, measure and evaluate one variant in this process",
        examples=[
            "python -m qa_lib run A3 --preset smoke --seed 0",
            "python -m qa_lib run recommended --preset full   # what suits this machine's GPU",
            "python -m qa_lib run recommended --data squad/ --model bert/ --epochs 2   # your own",
        ],
        load_main=load_main,
    )
    options.add_variant(parser)
    options.add_preset(parser)
    options.add_sources(parser)
    options.add_seed(parser)
    options.add_overrides(parser)
    options.add_runs(parser)
    options.add_force(parser)
    options.add_compile_cache(parser)
    return parser


def sweep_parser() -> Parser:
    """Return the parser of `sweep`."""

    def load_main() -> Main:
        from qa_lib.lab.sweep import main

        return main

    parser = Parser(
        verb="sweep",
        summary="run many variants, each through its notebook, one process a run",
        examples=[
            "python -m qa_lib sweep --preset smoke   # every variant, offline, on a CPU",
            "python -m qa_lib sweep --family A --preset bench --seeds 0 1 2 --gpus 0 1",
            "python -m qa_lib sweep --variants A1 A4 --data squad/ --model bert/ --plan",
            "python -m qa_lib sweep --variants A1 A3 --preset sizing --micro-batch 8 32",
        ],
        load_main=load_main,
    )
    # An option and not positional, as in `tune`: without it, a sweep runs all variants.
    options.add_list(
        parser,
        "--variants",
        values.variant,
        metavar="VARIANT",
        help="run only these (default: all of the preset's task)",
    )
    options.add_family(parser)
    options.add_preset(parser)
    options.add_sources(parser)
    options.add_seeds(parser)
    options.add_overrides(parser, several=True)
    options.add_runs(parser)
    options.add_gpus(parser)
    options.add_time_limit(parser)
    parser.add_argument(
        "--launcher",
        choices=["local", "slurm"],
        default="local",
        help="run on this machine or by Slurm (default: local)",
    )
    parser.add_argument(
        "--shared-gpu",
        action="store_true",
        help="runs on one GPU train at once, and record no times",
    )
    parser.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    options.add_force(parser)
    parser.add_argument(
        "--on-finish",
        type=values.text,
        metavar="COMMAND",
        help="what the shell runs at the end, however the sweep ends",
    )
    options.add_compile_cache(parser)
    return parser


def queue_parser() -> Parser:
    """Return the parser of `queue`."""

    def load_main() -> Main:
        from qa_lib.lab.queue.verb import main

        return main

    parser = Parser(
        verb="queue",
        summary="make the runs of a plan of evidence that have no record yet, in its order",
        examples=[
            "python -m qa_lib queue docs/evidence.toml --status   # done and missing; needs no GPU",
            "python -m qa_lib queue docs/evidence.toml --within 500 --data squad-large/ \\",
            "    --model all-mpnet-base-v2/ --copy-to results/",
        ],
        load_main=load_main,
    )
    parser.add_argument(
        "plan",
        type=values.path,
        metavar="PLAN",
        help="a file such as docs/evidence.toml: what is run, with which seeds, in which order",
    )
    parser.add_argument(
        "--status",
        action="store_true",
        help="print what is done and what is missing, and run nothing",
    )
    options.add_list(
        parser,
        "--groups",
        values.text,
        metavar="NAME",
        help="only these groups of the plan (default: all)",
    )
    parser.add_argument(
        "--within",
        type=values.count,
        metavar="SECONDS",
        help="begin nothing that would not end in so many seconds, by what like runs took, and end "
        "what is still at work then (default: until all is done)",
    )
    parser.add_argument(
        "--data",
        type=values.text,
        nargs="+",
        metavar="DIR",
        help="folders of the data that the plan names, by their own names",
    )
    parser.add_argument(
        "--model",
        type=values.text,
        nargs="+",
        metavar="DIR",
        help="folders of the models that the plan names, by their own names",
    )
    options.add_runs(parser)
    parser.add_argument(
        "--copy-to",
        type=values.folder,
        metavar="DIR",
        help="copy an archive there each time that it has grown",
    )
    return parser


def tune_parser() -> Parser:
    """Return the parser of `tune`."""

    def load_main() -> Main:
        from qa_lib.lab.search.tune import main

        return main

    parser = Parser(
        verb="tune",
        summary="try other learning rates, or other parameters to train, for a variant",
        examples=[
            "python -m qa_lib tune L-dropout --preset lm-quality --learning-rate 5e-4 1e-3 \\",
            "    --data wikitext/",
            "python -m qa_lib tune A1 --preset quality --learning-rate 1e-4 2e-4 \\",
            "    --data squad/ --model bert/",
            "python -m qa_lib tune B1-all --trainable lora-all-r8 --data squad/ --model bert/",
        ],
        load_main=load_main,
    )
    options.add_variants(parser)
    options.add_preset(parser)
    options.add_sources(parser)
    options.add_seeds(parser)
    options.add_list(
        parser,
        "--learning-rate",
        values.learning_rate,
        metavar="X",
        help="rates to try; a recipe may multiply them (default: the preset's)",
        default=[],
    )
    options.add_list(
        parser,
        "--trainable",
        values.text,
        metavar="NAME",
        help="recipes to try, such as lora-all-r32 (default: the variant's own)",
        default=[],
    )
    options.add_batch_sizes(parser)
    options.add_trained_answer_length(parser)
    options.add_runs(parser)
    options.add_gpus(parser)
    options.add_time_limit(parser)
    return parser
