"""Recommended runs: where one is more than its machine can do, another takes its place.

A sweep runs its specs by this, and `qa_lib.fit` a recommended one.
"""

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
    """Run what is not finished (Launcher.run_all), and return the specs, replacements included.

    Where a `recommended` run was more than its machine can do, the next choice takes its place,
    until one works. Each choice is told by `say`. Raises UserError where no choice is left.
    """
    todo = [spec for spec in specs if not launcher.is_finished(spec)]
    while todo:
        _say_choices(todo, say)
        entries = launcher.run_all(todo, ended, look)
        replacements = {}  # by the run_path of the run that failed
        for spec, entry in zip(todo, entries, strict=True):
            if spec.recommended and record.unable(entry):
                replacements[spec.run_path] = _next_choice(spec, launcher)
        specs = [replacements.get(spec.run_path, spec) for spec in specs]
        # A replacement may be one of the other specs: each run is there once.
        specs = list({spec.run_path: spec for spec in specs}.values())
        todo = [spec for spec in replacements.values() if not launcher.is_finished(spec)]
    return specs


def _say_choices(specs: list[Spec], say: Callable[[str], None]) -> None:
    """Say what was chosen for specs that left something to the machine, each sentence once."""
    # The first line of `adjusted` says what was chosen.
    sentences = [spec.adjusted[0] for spec in specs if spec.chosen]
    for sentence in dict.fromkeys(sentences):
        say(wrapped(sentence))


def _next_choice(spec: Spec, launcher: Launcher) -> Spec:
    """Return the choice after a recommended run, which failed and whose record says so."""
    from qa_lib.lab.search.recommend import choose  # imports torch, and few runs need it

    return choose(spec, launcher.machine, launcher.runs)
