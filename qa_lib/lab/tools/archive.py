"""`python -m qa_lib archive`: puts a group's runs into two files, records and steps."""

import argparse
import re

from qa_lib.errors import UserError, printable
from qa_lib.records.archive import runs_in_folders, say_left_out, steps_path, write_archive
from qa_lib.records.files import RecordError, writable
from qa_lib.records.record import TERMINAL
from qa_lib.records.schema import NAME


def main(args: argparse.Namespace) -> int:
    """Put a group's runs in folders behind those of its archive, and their steps into another
    file; return 1 if a record in a folder cannot be read.

    No line of the archive is ever dropped: not one that cannot be read, which a newer version may
    read, nor one of a run that was done again.

    Raises UserError for what is no group, and where no run has ended.
    """
    if not re.fullmatch(NAME, args.group):
        raise UserError(f"{args.group!r} is not the name of a group")
    path = args.runs / f"{args.group}.jsonl"
    writable(path)
    writable(steps_path(path))

    unread: list[RecordError] = []
    in_folders = list(
        runs_in_folders(args.runs, args.group, left_out=lambda _, problem: unread.append(problem))
    )
    ended = [run for run in in_folders if run.record["status"] in TERMINAL]
    if not ended and not path.exists():
        for problem in unread:
            say_left_out(args.group, problem)
        raise UserError(f"no finished run of group {args.group} below {args.runs}")

    archived = write_archive(path, ended, unread)
    print(printable(f"{path}: {archived} runs, and beside it their steps"))
    unfinished = len(in_folders) - len(ended)
    if unfinished:
        print(f"not finished, and left out: {unfinished}, which are in their folders alone")
    for problem in unread:
        say_left_out(args.group, RecordError(f"{problem} (it is in its folder alone)"))
    return 1 if unread else 0
