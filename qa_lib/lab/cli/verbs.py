"""All verbs of `python -m qa_lib`, in the groups and the order in which its help lists them.

To add a verb: write a module of `qa_lib.lab` with a function `main`, a function here beside others
of its group that declares its options, and its line below.
"""

from collections.abc import Callable

from qa_lib.lab.cli.look import export_parser, report_parser, variants_parser
from qa_lib.lab.cli.maintain import archive_parser
from qa_lib.lab.cli.measure import max_batch_parser, memory_parser, profile_parser
from qa_lib.lab.cli.parser import Parser
from qa_lib.lab.cli.train import (
    queue_parser,
    quickstart_parser,
    run_parser,
    sweep_parser,
    tune_parser,
)
from qa_lib.lab.cli.use import (
    app_parser,
    predict_parser,
    push_parser,
    quantize_parser,
    score_parser,
)

# Group -> verb -> the function that returns the verb's parser.
GROUPS: dict[str, dict[str, Callable[[], Parser]]] = {
    "train": {
        "quickstart": quickstart_parser,
        "run": run_parser,
        "sweep": sweep_parser,
        "queue": queue_parser,
        "tune": tune_parser,
    },
    "use": {
        "predict": predict_parser,
        "app": app_parser,
        "score": score_parser,
        "quantize": quantize_parser,
        "push": push_parser,
    },
    "measure": {
        "profile": profile_parser,
        "memory": memory_parser,
        "max-batch": max_batch_parser,
    },
    "look": {
        "variants": variants_parser,
        "report": report_parser,
        "export": export_parser,
    },
    "maintain": {
        "archive": archive_parser,
    },
}
VERBS = {verb: parser for verbs in GROUPS.values() for verb, parser in verbs.items()}


def parser_of(verb: str) -> Parser:
    """Return the parser of a verb's options."""
    return VERBS[verb]()


def help_text() -> str:
    """Return the help of the whole command: every verb, a line each, in groups."""
    lines = ["usage: python -m qa_lib VERB ..."]
    for group, verbs in GROUPS.items():
        lines += ["", f"{group}:"]
        for verb, parser in verbs.items():
            lines.append(f"  {verb:12}{parser().summary}")
    lines += ["", "example: python -m qa_lib sweep --help"]
    return "\n".join(lines)
