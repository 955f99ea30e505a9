"""The dashboard as one self-contained page: every group's tables and figures, and a panel for each of its rows.

The app serves it and `report --html` writes it. What it shows comes from tables, sentences and the report's figures.
"""

import base64
import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from qa_lib.report.gallery import Pictures
from qa_lib.report.runs import NotMeasured, baseline, cells, load_runs, newest, score_name, searches, select
from qa_lib.report.scaling import speed_table
from qa_lib.report.sentences import LADDER, PEERS, caption
from qa_lib.report.tables import family_lines, result_table, summarise
from qa_lib.report.text import LEFT, MISSING, count, number, points
from qa_lib.variants import FAMILIES, VARIANTS

WEB = Path(__file__).with_name("web")
# Columns, and when they are shown: always, where there is room (wide), or if all are asked for (more).
COLUMNS = {"row": "", "what it changes": "wide", "features/s": "", "tokens/s": "", "× {base}": "",
           "step ms [p10–p90]": "wide", "MFU": "wide", "peak MiB": "wide", "{score}": "wide", "Δ{score} vs {base}": "",
           "trainable": "more", "n": "wide", "status": "wide", "note": "more"}  # fmt: skip
SMALL = 100e6  # parameters: of fewer than BERT-base has, the page says so
# What the panel of a row shows of its runs, beside their scores.
PANEL = {"path", "status", "micro_batch", "spec.variant", "spec.seed", "task.metric", "task.label", "code.commit",
         "error.message", "speed.real_tokens_per_s", "speed.features_per_s", "time.step_ms.median", "time.wall_s",
         "memory.peak_alloc_mib"}  # fmt: skip
_TEMPLATES = Environment(
    loader=FileSystemLoader(WEB), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def render(name: str, connect: str = "'none'", **values) -> tuple[str, str]:
    """The page `name`.html with its style and script inside, and the Content-Security-Policy that allows just these."""
    style, script = ((WEB / file).read_text(encoding="utf-8") for file in ("style.css", f"{name}.js"))
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    policy = (
        "default-src 'none'; img-src data:; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src {}; "
        "base-uri 'none'; form-action 'none'"
    ).format(*hashes, connect)
    html = _TEMPLATES.get_template(f"{name}.html").render(style=style, script=script, policy=policy, **values)
    return html, policy


def without_paths(text: str) -> str:
    """Text with each absolute path cut down to its last part: where things lie on this machine is nobody's business."""
    return re.sub(r"(?<![\w/:.<])/(?:[\w.+@~-]+/)+([\w.+@~-]*)", r"…/\1", text)


def static(runs_dir: Path, out: Path, pictures: Callable[..., Pictures]) -> str:
    """The dashboard for a file `out`, with links to the runs' notebooks if they lie below its folder."""
    runs, here = runs_dir.resolve(), out.resolve().parent
    return dashboard(runs_dir, pictures, runs.relative_to(here).as_posix() if runs.is_relative_to(here) else None)[0]


def dashboard(
    runs_dir: Path,
    pictures: Callable[..., Pictures],
    address: str | None,
    app: bool = False,
    wanted: str = "",
) -> tuple[str, str]:
    """The dashboard of the records below `runs_dir`, newest group first, and its policy, see `render`.

    A file has all groups; the `app` sends one at a time, which takes a fiftieth of the time where there are fifty: the
    `wanted` one, or else the newest.
    `pictures(runs, group)` is what gallery.pictures gives; `address` that of `runs_dir`, for links to the notebooks, or
    None where the page cannot reach it. A record that cannot be read is marked, and a group that cannot be shown says
    why.
    """
    broken: dict[Path, str] = {}
    runs = load_runs(runs_dir, broken)
    began = newest(runs)
    names = {*began, *(folder.parent.name for folder in broken)} - searches(runs)
    names = sorted(sorted(names), key=lambda name: began.get(name, ""), reverse=True)
    shown = [wanted if wanted in names else names[0]] if app and names else names
    groups = []
    for name in shown:
        bad = {folder: text for folder, text in broken.items() if folder.parent.name == name}
        group = {"name": name, "problem": None, "broken": bad}
        try:
            group["content"] = _group(group, runs, pictures, address)
        except Exception as problem:  # whatever a spoilt record leads to: the other groups are to be seen
            group["problem"] = str(problem) or type(problem).__name__
        groups.append(group)
    return render("dashboard", names=names, groups=groups, families=FAMILIES, app=app)


def _group(group: dict, runs: pd.DataFrame, pictures: Callable[..., Pictures], address: str | None) -> str:
    """A group's part of the page (HTML), without what is broken. Raises ReportError if its runs do not go together."""
    chosen = select(runs, group["name"])
    lines = summarise(chosen)
    drawn, absent = pictures(chosen, group["name"])
    columns = [name for name in chosen if name in PANEL or name.startswith("quality.")]
    panels: dict[str, list[dict]] = {}
    for run in chosen[columns].to_dict("records"):  # of few columns: pandas takes its time for each value
        panels.setdefault(run["spec.variant"], []).append(run)
    tables = {"table": _table(lines), "peft": _table(family_lines(lines, "B")), "scaling": _scaling(chosen)}
    models = chosen.loc[chosen["model.params_total"].astype(float) < SMALL].groupby("model.name")["model.params_total"]
    small = ", ".join(f"{name} ({count(parameters)} parameters)" for name, parameters in models.min().items())
    names = {"ladder": (*PEERS, *LADDER), "variants": VARIANTS, "address": address, "small": small}
    return _TEMPLATES.get_template("group.html").render(
        group=group, drawn=drawn, absent=absent, panels=panels, caption=caption(chosen, lines), **tables, **names
    )


def _table(lines: pd.DataFrame) -> dict:
    """{headings: (text, its CSS classes), parts: (label of the cell, its rows: (variant, texts))} of the lines."""
    if lines.empty:
        return {"headings": [], "parts": []}
    text = result_table(lines, COLUMNS).astype(str).set_axis(lines.index)
    names = {"score": score_name(lines), "base": baseline(lines)}
    shown = {name.format(**names): when for name, when in COLUMNS.items()}
    parts = [
        (label, list(zip(part["variant"], text.loc[part.index].to_numpy().tolist(), strict=True)))
        for label, part in cells(lines)
    ]
    return {"headings": [(name, _style(name, shown[name])) for name in text], "parts": parts}


def _scaling(runs: pd.DataFrame) -> dict:
    """The same of a group's rows on one GPU and on several; without parts where there are none."""
    try:
        text = speed_table(runs)
    except NotMeasured:
        return {"headings": [], "parts": []}
    return {
        "headings": [(name, _style(name)) for name in text],
        "parts": [("", list(zip(text["row"], text.to_numpy().tolist(), strict=True)))],
    }


def _style(heading: str, shown: str = "") -> str:
    """The CSS classes of a column: when it is shown, and that it holds numbers."""
    return shown if heading in LEFT else f"{shown} number".strip()


_TEMPLATES.filters |= {
    "number": number,
    "points": points,
    "or_dash": lambda value: MISSING if pd.isna(value) else str(value),
    "variant_of": lambda folder: re.sub(r"-s\d+-[0-9a-f]+$", "", folder.name),  # the row that it is named for
    "without_paths": without_paths,
    "settings": lambda row: dataclasses.asdict(row.settings),
    "base64": lambda content: base64.b64encode(content).decode(),
}
