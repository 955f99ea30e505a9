"""What the records of earlier runs tell a choice: what failed here, what is trained, what is quick.

The records below a user's `runs` folder say what this kind of card could not do and what it has
done. The committed records of a task's reference group say how fast a variant trains at each
micro-batch.
"""

from collections import defaultdict
from pathlib import Path

from qa_lib.paths import ROOT
from qa_lib.records import record
from qa_lib.records.archive import read_runs
from qa_lib.records.files import RecordError
from qa_lib.spec.spec import Spec
from qa_lib.spec.tasks import TASKS

COMMITTED = ROOT / "runs"  # an installed package has those of the reference groups alone


def committed_records(task: str, group: str | None = None) -> dict[str, list[dict]]:
    """Return the committed records of a group, by default the task's reference, by variant."""
    by_variant = defaultdict(list)
    for run in read_runs(COMMITTED, group or TASKS[task].reference, left_out=_ignore):
        by_variant[run.record["spec"]["variant"]].append(run.record)
    return dict(by_variant)


def failed_records(spec: Spec, runs: str | Path) -> list[dict]:
    """Return the records of what this kind of card could not do with the spec's model and length.

    Their preset and code do not matter. A search's tries are not among them, since they go up to a
    limit. A model is known by name and revision: every model that a run keeps lies in a folder
    called `model`.
    """
    return [
        run.record for run in read_runs(runs, left_out=_ignore) if _failed_like(run.record, spec)
    ]


def _failed_like(entry: dict, spec: Spec) -> bool:
    """Return whether a record is of a run like the spec that its machine could not do."""
    recorded = entry["spec"]
    return (
        recorded["hardware"] == spec.hardware
        and recorded["search"] == ""
        and entry["model"]["name"] == spec.model["name"]
        and entry["model"]["revision"] == spec.model["revision"]
        and recorded["preset"]["max_length"] == spec.preset.max_length
        and record.unable(entry)
    )


def failure_of(option: Spec, failed: list[dict]) -> str | None:
    """Return why this card cannot do an option, by the records of what it could not do.

    It cannot after an error of the variant, or after memory ran out at the option's micro-batch or
    a smaller one. Returns None where no record speaks against the option.
    """
    for entry in failed:
        if entry["spec"]["variant"] != option.variant:
            continue
        size = entry["spec"]["settings"]["micro_batch"]
        is_smaller = option.settings.micro_batch < size
        if entry["status"] == "oom" and is_smaller:
            continue
        message = entry["error"]["message"] or entry["error"]["kind"]
        path = f"{entry['group']}/{entry['run_id']}"
        return f"failed here at micro-batch {size} ({message[:80]}; {path})"
    return None


def is_trained(spec: Spec, runs: str | Path) -> bool:
    """Return whether the spec's run has ended ok, so that its result takes no memory any more."""
    try:
        entry = record.read_record(Path(runs, spec.run_path))
    except RecordError:
        return False
    return entry["status"] == "ok" and entry["spec"]["hash"] == spec.hash


def _ignore(*_) -> None:
    """Say nothing of records that cannot be trusted: a choice goes by the others."""
