"""A group's figures as files, and the manifest that says what they show.

Figures are drawn again when what they would show differs: the records, the tables or the sentences, among them titles
and captions. They are not when only the code does.
"""

import hashlib
import json
import re
from pathlib import Path

import pandas as pd

from qa_lib.errors import first_line
from qa_lib.record import strict_json, write_atomically
from qa_lib.report.runs import NotMeasured, several
from qa_lib.report.sentences import caption, findings
from qa_lib.report.tables import result_table, summarise

MANIFEST = "manifest.json"
PROFILES = ("fit", "lm-fit")  # scales whose runs are points of curves
Pictures = tuple[dict[str, tuple[str, bytes]], dict[str, str]]  # {name: (title, PNG)}, {name: why it is not drawn}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def manifest(runs: pd.DataFrame) -> dict:
    """Of a group's runs, all that its figures show, and the table of its rows; not yet the figures."""
    lines = summarise(runs)
    return {
        "group": runs["group"].iloc[0],
        "caption": caption(runs, lines),
        "findings": findings(runs).splitlines(),
        "records": _records(runs),
        "results": result_table(lines).to_dict("records"),
    }


def _records(runs: pd.DataFrame) -> dict[str, str]:
    """By run id, the digest of all that is drawn of the run."""
    return {
        run_id: sha256(json.dumps([run.record, run.profile()]).encode())
        for run_id, run in sorted(zip(runs["run_id"], runs["run"], strict=True))
    }


def read_manifest(folder: Path) -> dict:
    """The folder's manifest; empty if there is none that can be read, since drawing again mends that.

    Its figures are PNG files in the folder itself: a name that leads elsewhere is left out, so that nothing there is
    read or deleted.
    """
    try:
        found = strict_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    parts = ("records", "figures", "not_drawn")
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in parts):
        return {}
    inside = {
        name: entry
        for name, entry in found["figures"].items()
        if re.fullmatch(r"[\w-]{1,80}\.png", name) and isinstance(entry, dict) and {"title", "sha256"} <= entry.keys()
    }
    return found | {"figures": inside}


def outdated(runs: pd.DataFrame, folder: Path) -> str | None:
    """Why the figures in `folder` do not show these runs, in a few words; None if they do."""
    old, new = read_manifest(folder), json.loads(json.dumps(manifest(runs)))
    if not old:
        return "no manifest"
    names = old["records"].keys() | new["records"].keys()
    records = sorted(name for name in names if old["records"].get(name) != new["records"].get(name))
    if records:
        return f"other records: {', '.join(records[:3])}{' …' if len(records) > 3 else ''}"
    if differing := [key for key, value in new.items() if old.get(key) != value]:
        return f"other {', '.join(differing)}"
    return _spoilt(old, folder)


def _spoilt(old: dict, folder: Path) -> str | None:
    for name, figure in old["figures"].items():
        if sha256(_bytes(folder / name)) != figure["sha256"]:
            return f"{name} is absent or not the one that was drawn"
    return None


def _drawn(runs: pd.DataFrame) -> Pictures:
    # Seaborn takes a second, which an up-to-date report need not wait for.
    from qa_lib.report import curves, figures, scaling_figures, style

    drawn, not_drawn = {}, {}
    if runs["spec.preset.name"].iloc[0] in PROFILES:
        kinds = curves.FIGURES
    else:
        kinds = figures.FIGURES | (scaling_figures.FIGURES if several(runs).any() else {})
    for name, figure_of in kinds.items():
        try:
            figure = figure_of(runs)
        except NotMeasured as reason:
            not_drawn[name] = str(reason)
            continue
        except (LookupError, TypeError, ValueError, AttributeError) as problem:  # whatever a spoilt profile leads to
            not_drawn[name] = f"{type(problem).__name__}: {first_line(problem)}"
            continue
        drawn[name] = " ".join(figure.get_suptitle().split()), style.png(figure)
    return drawn, not_drawn


def pictures(runs: pd.DataFrame, folder: Path) -> Pictures:
    """Title and PNG of each figure of a group, and for each that no record supports the reason; both by name. Read from
    `folder` if its figures are of these records; nothing is written."""
    found = read_manifest(folder)
    if not found or found["records"] != _records(runs) or _spoilt(found, folder):
        return _drawn(runs)
    drawn = {name: (figure["title"], (folder / name).read_bytes()) for name, figure in found["figures"].items()}
    return {name.removesuffix(".png"): picture for name, picture in drawn.items()}, found["not_drawn"]


def draw(runs: pd.DataFrame, folder: Path) -> bool:
    """Draw a group's figures and manifest into `folder` unless they show these runs already; whether it drew."""
    if outdated(runs, folder) is None:
        return False
    drawn, not_drawn = _drawn(runs)
    new = manifest(runs) | {"figures": {}, "not_drawn": not_drawn}
    for name, (title, content) in drawn.items():
        write_atomically(folder / f"{name}.png", content)
        new["figures"][f"{name}.png"] = {"title": title, "sha256": sha256(content)}
    for name in read_manifest(folder).get("figures", {}).keys() - new["figures"].keys():
        (folder / name).unlink(missing_ok=True)
    # Last, so that a manifest never vouches for a figure that was not written.
    write_atomically(folder / MANIFEST, json.dumps(new, indent=1, ensure_ascii=False) + "\n")
    return True
