"""What the notebooks say to their reader: a misspelt parameter, which row suits this card, what a run came to."""

import ast
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd

from qa_lib.report import cards
from qa_lib.report.quality import projected, quality_runs
from qa_lib.report.readme import REFERENCE, facts
from qa_lib.report.runs import NotMeasured, ReportError, load_runs, select
from qa_lib.report.tables import summarise
from qa_lib.report.text import MISSING, markdown, number, points, say
from qa_lib.variants import UnknownName, nearest

SUMMARY = ("memory", "quality", "take", "costs")  # macros of texts/notebook.md.j2
SQUAD = Path("squad")  # where a look at text finds SQuAD's files, if they are there


def check_parameters(cells: Sequence[str]) -> None:
    """Raises UnknownName for a parameter that papermill was given and the notebook does not have, of which papermill
    only warns. `cells` are those run so far, IPython's `In`: papermill puts its own right after the parameters."""
    for parameters, injected in pairwise(cells):
        if injected.startswith("# Parameters\n"):
            known, given = (
                [target.id for line in ast.parse(cell).body for target in line.targets]
                for cell in (parameters, injected)
            )
            for name in given:
                if name not in known:
                    raise UnknownName(nearest("parameter", name, known))


def advice(env: dict, runs: str | Path = "runs") -> str:
    """As Markdown: which card this is, which row to take on it, and about how long three epochs take; by the reference
    group's records below `runs`. `env` is a record's."""
    if not env["gpu"]:
        return say("notebook.no_gpu")
    gib = env["gpu_mem_mib"] / 1024
    try:
        every = load_runs(runs)
        own = select(every, REFERENCE)
        row = cards.quickest_on(cards.best_first(own, cards.worth(quality_runs(every, REFERENCE))), gib, env["sm"])
        if row is None:
            raise NotMeasured("no row is known to fit")
    except ReportError as reason:
        return say("notebook.no_advice", gpu=env["gpu"], gib=gib, reason=reason)
    gpu, lines = own["env.gpu"].iloc[0], summarise(own)
    minutes = None
    try:
        if env["gpu"] == gpu:
            minutes = projected(lines, [row.variant])["minutes"].get(row.variant)
        else:
            minutes = cards.estimated_minutes(every, REFERENCE, row.variant, env["gpu"], env["sm"])
    except NotMeasured:
        pass
    return say("notebook.advice", gpu=env["gpu"], gib=gib, row=row, minutes=minutes, measured=env["gpu"] == gpu)


def summary(runs: pd.DataFrame, group: str) -> str:
    """For the report, as Markdown: what was found, which row to take, what it costs and what no run has shown; or why
    the records of this group do not tell. `runs` are all records."""
    try:
        said = facts(runs, group)
        table = cards.generation_table(select(runs, group), cards.worth(quality_runs(runs, group)))
    except NotMeasured as reason:
        return say("readme.unknown", reason=reason)
    enough, *rows = table.iloc[-1]  # of the largest card
    cards_of = pd.Series(table.columns[1:]).groupby(rows, sort=False).agg(" or ".join).to_dict()
    found = [say(f"notebook.{name}", enough=enough, cards_of=cards_of, **said) for name in SUMMARY]
    listed = "\n".join(f"- {line}" for line in [*found, say("readme.not_shown", **said)])
    return f"{say('readme.headline', **said)}\n\n{listed}"


def text_in_reach(preset: str, data: str, model: str) -> tuple[str, str, str, str]:
    """Preset, data and model for a look at text, those that are given, and as Markdown what is looked at: else SQuAD v2
    where a folder or Colab's network has it, or generated text. Without BERT's vocabulary a word counts as a token."""
    from huggingface_hub import try_to_load_from_cache  # takes a while, and only this needs it

    online = "google.colab" in sys.modules
    found = data or (str(SQUAD) if SQUAD.is_dir() else "squad_v2" if online else "")
    preset = preset or ("full" if found else "smoke")
    whole_words = found and not (model or online or try_to_load_from_cache("bert-base-uncased", "vocab.txt"))
    said = say("notebook.text", data=Path(found).name, whole_words=whole_words)
    return preset, found, "tiny" if whole_words else model, said


def result(record: dict, runs: str | Path, examples: Sequence = (), count: int = 5) -> str:
    """As Markdown: the score, speed and memory of the run that `record` is of, below the folder `runs`; and its answers
    to the first of the validation questions `examples`, where it answered any, or how it continued a text."""
    if record["status"] != "ok":
        return f"*{record['run_id']} is {record['status']}: {record['error']['message']}.*"
    task, quality, time = record["task"], record["quality"], record["time"]
    measured = {
        task["label"]: points(quality[task["metric"]]),
        "features/s": number(record["speed"]["samples_per_s"]),
        "tokens/s": number(record["speed"]["tokens_per_s_padded"] if task["name"] == "lm" else None),
        "ms a step": number(time["step_ms"]["median"]),
        "MiB of GPU memory at the peak": number(record["memory"]["peak_alloc_mib"]),
        "s in all": number(time["wall_s"]),
    }
    said = " · ".join(f"**{value}** {name}" for name, value in measured.items() if value != MISSING)
    folder = Path(runs, record["group"], record["run_id"], "answers")
    answers, written = folder / "predictions.json", folder / "continuations.json"
    if written.exists():
        return f"{said}\n\n{markdown(pd.DataFrame(json.loads(written.read_text(encoding='utf-8'))))}"
    if not examples or not answers.exists():
        return said
    given = json.loads(answers.read_text(encoding="utf-8"))
    table = pd.DataFrame([
        {
            "question": example.question,
            "answer": given[example.id] or "(no answer)",
            "gold": example.answers[0][0] if example.answers else "(no answer)",
        }
        for example in examples[:count]
    ])  # fmt: skip
    return f"{said}\n\n{markdown(table)}"
