"""Records as the report reads them: a row a run, in one DataFrame."""

import json
from pathlib import Path

import pandas as pd

from qa_lib.record import _SECTIONS, PROFILE_SCHEMA, RecordError, read_record

# The kinds of values that tables and figures take for granted.
_KINDS = {f"{section}.{name}": int | float | None for section, names in _SECTIONS.items() for name in names}
_KINDS |= {f"time.step_ms.{name}": int | float | None for name in ("n", "median", "p10", "p90")}
_KINDS |= dict.fromkeys(("error.kind", "error.message", "time.ended"), str | None)
_KINDS |= dict.fromkeys(("group", "run_id", "status", "spec.variant", "time.started"), str)
_KINDS |= {"spec.seed": int, "spec.settings.micro_batch": int, "spec.adjusted": list}
_KINDS |= dict.fromkeys(("model.name", "model.revision"), object)  # an identity: compared, never read


def load_runs(runs: str | Path = "runs", broken: dict[Path, str] | None = None) -> pd.DataFrame:
    """Every record below `runs`, a row a run, a column a value named by its path ('speed.features_per_s').

    Sorted by group, variant and seed. Raises RecordError for a record that cannot be trusted; where `broken` is given,
    puts the folder and the message there instead and goes on.
    """
    rows = []
    for folder in sorted(path.parent for path in Path(runs).glob("*/*/record.json")):
        try:
            rows.append(_checked(_flat(read_record(folder)), folder) | {"path": folder})
        except RecordError as problem:
            if broken is None:
                raise
            broken[folder] = str(problem)
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["group", "status", "spec.variant", "spec.seed"])


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


def _checked(row: dict, folder: Path) -> dict:
    """A flat record whose values are of the kinds that tables and figures take for granted. Raises RecordError."""
    for key, kind in _KINDS.items():
        if not isinstance(row.get(key), kind):
            raise RecordError(f"{folder / 'record.json'}: {key} is {str(row.get(key))[:40]!r}")
    return row


def _flat(value: dict, prefix: str = "") -> dict:
    flat = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = inner
    return flat
