"""What the notebooks over one run say: a misspelt parameter, and what the run came to."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd

from qa_lib.report.format import MISSING, markdown, number, points
from qa_lib.variants import UnknownName, nearest

SHOWN = 5  # questions


def check_parameters(cells: Sequence[str]) -> None:
    """Raises UnknownName for a parameter that papermill was given and the notebook does not have, of which papermill
    only warns. `cells` are those run so far, IPython's `In`: papermill puts its own right after the parameters."""
    for parameters, injected in pairwise(cells):
        if injected.startswith("# Parameters\n"):
            known, given = (re.findall(r"(?m)^(\w+) = ", cell) for cell in (parameters, injected))
            for name in given:
                if name not in known:
                    raise UnknownName(nearest("parameter", name, known))


def result(record: dict, runs: str | Path, examples: Sequence = ()) -> str:
    """As Markdown: the score, speed and memory of the run that `record` is of, below the folder `runs`; and its answers
    to the first of the validation questions `examples`, where it answered any, or how it continued a text."""
    if record["status"] != "ok":
        return f"*{record['run_id']} is {record['status']}: {record['error']['message']}.*"
    task, quality, time = record["task"], record["quality"], record["time"]
    measured = {
        task["label"]: points(quality[task["metric"]]),
        "samples/s": number(record["speed"]["samples_per_s"]),
        "tokens/s": number(record["speed"]["tokens_per_s"] if task["name"] == "lm" else None),
        "ms a step": number(time["step_ms"]["median"]),
        "MiB of GPU memory at the peak": number(record["memory"]["peak_alloc_mib"]),
        "s in all": number(time["wall_s"]),
    }
    said = f"{record['run_id']}: "
    said += " · ".join(f"**{value}** {name}" for name, value in measured.items() if value != MISSING)
    folder = Path(runs, record["group"], record["run_id"], "answers")
    answers, written = folder / "predictions.json", folder / "continuations.json"
    if written.exists():
        return f"{said}\n\n{markdown(pd.DataFrame(json.loads(written.read_text(encoding='utf-8'))))}"
    if not examples or not answers.exists():
        return said
    given = json.loads(answers.read_text(encoding="utf-8"))
    shown, none = examples[:SHOWN], "(no answer)"
    table = pd.DataFrame({"question": [example.question for example in shown]})
    table["answer"] = [given[example.id] or none for example in shown]
    table["gold"] = [example.answers[0][0] if example.answers else none for example in shown]
    return f"{said}\n\n{markdown(table)}"


def first_window(questions) -> str:
    """As text: how many training windows there are, and the first that holds its answer, with it."""
    samples = questions.samples
    first = (samples.end_positions > 0).argmax()
    sample = samples.batch([first], samples.lengths[first])
    tokens = questions.tokenizer.convert_ids_to_tokens(sample["input_ids"][0])
    answer = tokens[sample["start_positions"][0] : sample["end_positions"][0] + 1]
    count = f"{len(samples)} training windows, mean length {samples.lengths.mean():.0f} tokens"
    return f"{count}\n{' '.join(tokens)}\nanswer: {' '.join(answer)}"
