"""Records as the report reads them: a row a run, in one DataFrame."""

import json
from pathlib import Path

import pandas as pd

from qa_lib.record import PROFILE_SCHEMA, RecordError, read_record


def load_runs(runs: str | Path = "runs", broken: dict[Path, str] | None = None) -> pd.DataFrame:
    """Every record below `runs`, a row a run, a column a value named by its path ('speed.features_per_s').

    Sorted by group, variant and seed. Raises RecordError for a record that cannot be trusted; where `broken` is given,
    puts the folder and the message there instead and goes on.
    """
    rows = []
    for folder in sorted(path.parent for path in Path(runs).glob("*/*/record.json")):
        try:
            rows.append(read_record(folder) | {"path": folder})
        except RecordError as problem:
            if broken is None:
                raise
            broken[folder] = str(problem)
    return pd.json_normalize(rows) if rows else pd.DataFrame(columns=["group", "status", "spec.variant", "spec.seed"])


def read_profile(run_dir: Path) -> dict | None:
    """The profile beside a run's record; None if it was never profiled. Raises RecordError for one that is broken."""
    path = run_dir / "profile.json"
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:
        raise RecordError(f"{path}: not readable as JSON ({problem})") from problem
    if not isinstance(profile, dict) or profile.get("schema") != PROFILE_SCHEMA:
        raise RecordError(f"{path}: not a profile of this version, which reads {PROFILE_SCHEMA!r}")
    return profile
