"""Runs that were recommended: where one is more than its machine can do, the next choice comes."""

from collections.abc import Callable

from qa_lib.errors import wrapped
from qa_lib.lab.launch.local import Ended, Launcher, Look, ignore_end, ignore_look
from qa_lib.records import record
from qa_lib.spec.spec import Spec


def run_in_turn(
    launcher: Launcher,
    specs: list[Spec],
    say: Callable[[str], None],
    ended: Ended = ignore_end,
    look: Look = ignore_look,
) -> list[Spec]:
    """Run what is not finished, and return the specs that stand in the end; see Launcher.run_all.

    Where a run that was `recommended` was more than its machine can do, the next choice takes its
    place, until one works; `say` is told each choice. Raises UserError where none is left.
    """
    todo = [spec for spec in specs if not launcher.is_finished(spec)]
    while todo:
        for choice in dict.fromkeys(spec.adjusted[0] for spec in todo if spec.chosen):
            say(wrapped(choice))
        replaced = {}  # run_path of what failed -> the next choice
        for spec, entry in zip(todo, launcher.run_all(todo, ended, look), strict=True):
            if spec.recommended and record.unable(entry):
                from qa_lib.lab.search.recommend import choose  # imports torch

                replaced[spec.run_path] = choose(spec, launcher.machine, launcher.runs)
        standing = [replaced.get(spec.run_path, spec) for spec in specs]
        # The next choice may be one of the others.
        specs = list({spec.run_path: spec for spec in standing}.values())
        todo = [spec for spec in replaced.values() if not launcher.is_finished(spec)]
    return specs
