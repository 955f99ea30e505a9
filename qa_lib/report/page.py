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

from qa_lib.report.runs import AXES, AXIS_NAMES, load_runs, on_cpu, searches, select
from qa_lib.report.sentences import LADDER, PEERS, caption
from qa_lib.report.tables import family_lines, result_table, summarise
from qa_lib.report.text import MISSING, number, points
from qa_lib.variants import FAMILIES, VARIANTS

WEB = Path(__file__).with_name("web")
HEADINGS = ("row", "what it changes", *(axis.label for axis in AXES), "features/s", "× A1", "step ms [p10–p90]", "MFU",
            "peak MiB", "{score}", "Δ{score} vs A1", "trainable", "n", "status", "note")  # fmt: skip
# Figures with a section of their own, in this order; what else there is comes after them under its own name.
SECTIONS = {
    "ladder": "Step by step: A1 → A4 → E",
    "peft": "PEFT against full fine-tuning",
    "memory": "GPU memory (VRAM) against step time",
}
NUMBERS = {  # of a run, in its row's panel
    "tokens/s": "speed.real_tokens_per_s",
    "features/s": "speed.features_per_s",
    "step ms": "time.step_ms.median",
    "peak MiB": "memory.peak_alloc_mib",
    "wall s": "time.wall_s",
}
Pictures = Callable[[pd.DataFrame, str], tuple[dict[str, tuple[str, bytes]], dict[str, str]]]

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


def static(runs_dir: Path, out: Path, pictures: Pictures) -> str:
    """The dashboard for a file `out`, with links to those notebooks that lie below its folder."""
    here = out.resolve().parent

    def link(folder: Path) -> str | None:
        notebook = (folder / "notebook.ipynb").resolve()
        return notebook.relative_to(here).as_posix() if notebook.is_relative_to(here) else None

    return dashboard(runs_dir, pictures, link)[0]


def dashboard(
    runs_dir: Path, pictures: Pictures, link: Callable[[Path], str | None], app: bool = False
) -> tuple[str, str]:
    """The dashboard of all records below `runs_dir` and its policy, see `render`.

    `pictures(runs, group)` is what report.pictures gives; `link(run folder)` the address of a run's notebook, or None
    where the page cannot reach it. A record that cannot be read is marked, and a group that cannot be shown says why.
    """
    broken: dict[Path, str] = {}
    runs = load_runs(runs_dir, broken)
    groups = []
    for name in sorted({*runs["group"], *(folder.parent.name for folder in broken)} - searches(runs)):
        bad = {folder: text for folder, text in broken.items() if folder.parent.name == name}
        group = {"name": name, "cpu": False, "problem": None, "broken": bad}
        try:
            group |= _group(runs, name, pictures, link)
        except Exception as problem:  # whatever a spoilt record leads to: the other groups are to be seen
            group["problem"] = str(problem) or type(problem).__name__
        groups.append(group)
    groups.sort(key=lambda group: group["cpu"])
    names = {"families": FAMILIES, "ladder": (*PEERS, *LADDER), "variants": VARIANTS, "sections": SECTIONS}
    return render("dashboard", groups=groups, app=app, **names)


def _group(runs: pd.DataFrame, name: str, pictures: Pictures, link) -> dict:
    """What the template shows of one group. Raises ReportError where its runs do not go together."""
    chosen = select(runs, name)
    lines = summarise(chosen)
    drawn, absent = pictures(chosen, name)
    return {
        "cpu": on_cpu(chosen),
        "caption": caption(chosen, lines),
        "drawn": drawn,
        "absent": absent,
        "images": dict.fromkeys([*SECTIONS, *drawn, *absent]),
        "table": _table(chosen, lines),
        "peft": _table(chosen, family_lines(lines, "B")),
        "panels": {
            variant: [_run(run, link) for run in part.to_dict("records")]
            for variant, part in chosen.groupby("spec.variant", sort=False)
        },
    }


def _table(chosen: pd.DataFrame, lines: pd.DataFrame) -> dict:
    """{headings, rows}: the lines as text with the real tokens per second; each row as its variant and its cells."""
    if lines.empty:
        return {"headings": [], "rows": []}
    text = result_table(lines, HEADINGS)
    if "features/s" in text:
        ok = chosen[chosen["status"] == "ok"].rename(columns={"spec.variant": "variant"})
        key = [*AXIS_NAMES, "variant"]
        tokens = lines[key].join(ok.groupby(key)["speed.real_tokens_per_s"].mean(), on=key)
        text.insert(list(text).index("features/s"), "tokens/s", tokens["speed.real_tokens_per_s"].map(number).to_list())
    rows = zip(lines["variant"], text.astype(str).to_numpy().tolist(), strict=True)
    return {"headings": list(text), "rows": list(rows)}


def _run(run: dict, link: Callable[[Path], str | None]) -> dict:
    """A run's main numbers as text by name, and where its notebook is."""
    message, commit = (run[key] if pd.notna(run[key]) else "" for key in ("error.message", "code.commit"))
    texts = {
        "seed": str(run["spec.seed"]),
        "micro-batch": str(run["micro_batch"]),
        "status": run["status"],
        **{name: number(run.get(key)) for name, key in NUMBERS.items()},
        "exact": points(run.get("quality.exact")),
        run["task.label"]: points(run.get(f"quality.{run['task.metric']}")),
        "code": commit[:7] or MISSING,
        "message": without_paths(message) or MISSING,
    }
    folder: Path = run["path"]
    there = (folder / "notebook.ipynb").is_file()
    texts = {name: text for name, text in texts.items() if text != MISSING}
    return {"folder": folder, "texts": texts, "there": there, "href": link(folder) if there else None}


def variant_of(folder: Path) -> str:
    """The row that a run's folder is named for."""
    return re.sub(r"-s\d+-[0-9a-f]+$", "", folder.name)


_TEMPLATES.filters |= {
    "variant_of": variant_of,
    "without_paths": without_paths,
    "settings": lambda row: dataclasses.asdict(row.settings),
    "base64": lambda content: base64.b64encode(content).decode(),
}
