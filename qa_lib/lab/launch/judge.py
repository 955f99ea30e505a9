"""What has become of a run, by its record and its steps.

Neither an exit code nor papermill's metadata can tell a dead kernel, or a notebook that ran another
variant, from success. A run counts when its record is where it must be, has the asked hash, is
terminal and complete.

This module never imports torch.
"""

import time
from pathlib import Path

from qa_lib.records import record
from qa_lib.records.files import regular
from qa_lib.spec.spec import Spec

NEVER_BEGAN = "NeverBegan"  # kind of the error where a process ended before its run began


def is_finished(runs: Path, spec: Spec) -> bool:
    """Return whether a run's record has its result.

    One that was skipped is not finished once the machine can do it. Raises RecordError for a record
    that cannot be read.
    """
    run_dir = runs / spec.run_path
    if not (run_dir / "record.json").exists():
        return False
    entry = record.read_record(run_dir)
    if entry["status"] not in record.FINISHED:
        return False
    if entry["status"] == "skipped" and not spec.skip:
        return False
    return _fault(entry, spec) is None


def judge(
    spec: Spec,
    run_dir: Path,
    reason: str | None,
    code: int,
    seconds: float,
    over_limit: bool = False,
) -> dict:
    """Return the record of a run whose process has ended, and finish it if need be.

    The process has taken some `seconds`, and has ended with the exit code `code`. `reason` says why
    the driver ended it, which the driver did by itself where the run was `over_limit`.
    """
    entry = record.read_record(run_dir)
    if (run_dir / "notebook.ipynb").exists():
        entry["time"]["notebook_s"] = round(seconds, 3)
    if spec.chosen:  # a notebook is told the variant alone
        adjusted = dict.fromkeys([*spec.adjusted, *entry["spec"]["adjusted"]])
        entry["spec"]["adjusted"] = list(adjusted)
    if entry["status"] not in record.TERMINAL:  # else it had its result before it was ended
        return _end_unfinished(spec, run_dir, entry, reason, code, over_limit)
    fault = _fault(entry, spec)
    if fault:
        return record.finish(run_dir, entry, "error", {"kind": "IncompleteRun", "message": fault})
    record.write_record(run_dir, entry)
    return entry


def _end_unfinished(
    spec: Spec, run_dir: Path, entry: dict, reason: str | None, code: int, over_limit: bool
) -> dict:
    """Finish the record of a run whose process has ended before the run did; see judge.

    A compiler that crashes takes the process with it, and one that hangs keeps it for ever. In a
    run that was recommended this is an error of the variant: a process that ended by itself in the
    first steps, or that was over its limit after training had begun. A driver that was stopped, and
    a limit that was over before training began, say nothing about the variant.
    """
    kind = "killed"
    if entry["status"] == record.STARTING and not reason:
        kind = NEVER_BEGAN
    steps = steps_logged(run_dir / "steps.jsonl")
    in_first_steps = (steps or 0) < record.FIRST_STEPS
    hung = over_limit and steps is not None
    crashed = not reason
    is_unable = spec.recommended and kind == "killed" and in_first_steps and (hung or crashed)
    message = reason
    if not message:
        message = f"its process ended (exit code {code}) before the run did: {_last_words(run_dir)}"
    status = "error" if is_unable else "killed"
    return record.finish(run_dir, entry, status, {"kind": kind, "message": message})


def _last_words(run_dir: Path) -> str:
    """Return the last line of a run's log.txt that is not empty."""
    lines = regular(run_dir / "log.txt").read_text(errors="replace").split("\n")
    for line in reversed(lines):
        if line.strip():
            return line.strip()[:200]
    return "no word in log.txt"


def _fault(entry: dict, spec: Spec) -> str | None:
    """Return what is wrong with a terminal record, if anything."""
    if entry["spec"]["hash"] != spec.hash:
        return f"the record is of another run ({entry['run_id']})"
    if entry["status"] != "ok":
        return None
    steps = entry["time"]["steps"]
    planned = entry["spec"]["planned_steps"]
    if steps != planned:
        return f"{steps} of {planned} steps were trained"
    answered = entry["quality"].get("n")
    asked = entry["spec"]["n_eval"]
    if answered != asked:
        return f"{answered} of {asked} questions were answered"
    return None


class FirstSteps:
    """Watches how long a run is at work on the step that it is in, one of the first."""

    def __init__(self, run_dir: Path, since: float):
        """`since` is when the run began (s since 1970)."""
        self.path = run_dir / "steps.jsonl"
        self.since = since
        # Steps done; None before training begins, which makes the file anew.
        self.done = None
        self.last = 0.0  # when the last of them was done, by the monotonic clock

    def seconds(self) -> float:
        """Return the seconds since the last step was logged, or since training began.

        They are 0 before training, and after the first steps.
        """
        if self.done is not None and self.done >= record.FIRST_STEPS:
            return 0.0
        done = steps_logged(self.path, self.since)
        if done != self.done:
            self.done = done
            self.last = time.monotonic()
        return 0.0 if done is None else time.monotonic() - self.last


def steps_logged(path: Path, since: float = 0.0) -> int | None:
    """Return how many steps a run has done by its steps.jsonl.

    None where that was not written since then (s since 1970).
    """
    try:
        if path.stat().st_mtime < since:
            return None
        return max((line["step"] for line in record.read_steps(path)), default=0)
    except OSError:
        return None
