"""The verb that tidies up records: archive.

The function returns the verb's parser. What the verb runs is imported in `load_main`, and only
after its options are found right (parser.py).
"""

from qa_lib.lab.cli import options, values
from qa_lib.lab.cli.parser import Main, Parser


def archive_parser() -> Parser:
    """Return the parser of `archive`."""

    def load_main() -> Main:
        from qa_lib.lab.tools.archive import main

        return main

    parser = Parser(
        verb="archive",
        summary="put a group's records into one file, and its training steps into another",
        examples=[
            "python -m qa_lib archive h200-bench   # then, if you like: rm -r runs/h200-bench"
        ],
        load_main=load_main,
    )
    parser.add_argument(
        "group", type=values.text, metavar="GROUP", help="the name of a folder of runs below --runs"
    )
    options.add_runs(parser)
    return parser
