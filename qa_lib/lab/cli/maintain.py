"""The verb that maintains records: archive."""

from qa_lib.lab.cli import options, values
from qa_lib.lab.cli.parser import Main, Parser


def archive_parser() -> Parser:
    """Return the parser of `archive`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.archive import main

        return main

    parser = Parser(
        verb="archive",
        summary="put a group's records and steps into two files",
        examples=[
            "python -m qa_lib archive h200-bench   # then, if you like: rm -r runs/h200-bench"
        ],
        load_main=load_main,
    )
    parser.add_argument(
        "group", type=values.text, metavar="GROUP", help="a folder of runs below --runs"
    )
    options.add_runs(parser)
    return parser
