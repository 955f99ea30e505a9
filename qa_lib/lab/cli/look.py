"""The verbs that look at variants and records: variants, report, export.

Each function returns the parser of one.
"""

from qa_lib.lab.cli import options, values
from qa_lib.lab.cli.parser import Main, Parser


def variants_parser() -> Parser:
    """Return the parser of `variants`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.variants import main

        return main

    parser = Parser(
        verb="variants",
        summary="list the variants: what each changes, and why",
        examples=["""python -m qa_lib variants --json | jq '.[] | select(.family == "B")'"""],
        load_main=load_main,
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print every variant with all its settings as JSON",
    )
    return parser


def report_parser() -> Parser:
    """Return the parser of `report`."""

    def load_main() -> Main:
        from qa_lib.lab.report.cli import main

        return main

    parser = Parser(
        verb="report",
        summary="draw tables and figures from the records",
        examples=["python -m qa_lib report --group cpu-smoke"],
        load_main=load_main,
    )
    options.add_runs_to_read(parser)
    options.add_figures(parser)
    parser.add_argument(
        "--group",
        type=values.text,
        metavar="G",
        help="group of runs to show (default: the newest of your own, or of all)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--readme",
        action="store_true",
        help="only put the committed groups' results into README.md",
    )
    instead.add_argument(
        "--pages",
        action="store_true",
        help="only make the executed pages of the repository again",
    )
    instead.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if figures, pages or README.md are old",
    )
    return parser


def export_parser() -> Parser:
    """Return the parser of `export`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.export import main

        return main

    parser = Parser(
        verb="export",
        summary="bring records into a CSV, or runs, also while they train, into a tracker",
        examples=[
            "python -m qa_lib export --csv runs.csv",
            "python -m qa_lib export --tensorboard logs/   # then: tensorboard --logdir logs/",
            "python -m qa_lib export --wandb logs/   # then: wandb sync logs/wandb/offline-run-*",
            "python -m qa_lib export --trackio logs/ --follow",
            "In a second terminal: TRACKIO_DIR=logs/ trackio show",
            "With WANDB_MODE=online, --wandb goes to your account at once.",
        ],
        load_main=load_main,
    )
    options.add_runs_to_read(parser)
    parser.add_argument(
        "--group",
        type=values.text,
        metavar="G",
        help="this group alone (default: your own groups, those in folders below --runs; all "
        "where there is none)",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="go on with what is new, every 2 s, until Ctrl-C; not for --csv",
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--csv",
        type=values.path,
        metavar="OUT.csv",
        help="a line a run, a column a value of its record",
    )
    target.add_argument(
        "--tensorboard",
        type=values.folder,
        metavar="DIR",
        help="event files; needs the package tensorboard",
    )
    target.add_argument(
        "--wandb",
        type=values.folder,
        metavar="DIR",
        help="offline runs; needs the package wandb, and no account",
    )
    target.add_argument(
        "--trackio",
        type=values.folder,
        metavar="DIR",
        help="trackio's runs, for $TRACKIO_DIR; needs the package trackio",
    )
    return parser
