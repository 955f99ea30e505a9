"""A trained run's model with weights in 8 or 4 bits, beside the run, and what that changes: F1, size, time to answer.

Both models answer the same questions. Time is that of a CPU, which such a model is for. F1 is computed on a GPU where
there is one, since the same whole numbers are multiplied there, in seconds instead of minutes. The run may have trained
for it (variants A1-int8 and A1-int4) or not: that is the comparison.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from qa_lib.data.squad import Source, open_source
from qa_lib.errors import UserError
from qa_lib.measure.hardware import environment
from qa_lib.model.hf_checkpoint import inspect_checkpoint
from qa_lib.model.qat import quantize, save_quantized
from qa_lib.records import record
from qa_lib.run.identity import go_offline_without_network, identify_data, without_folders
from qa_lib.score.f1 import score
from qa_lib.score.predict import (
    Model,
    answer,
    answer_tokens,
    answers_to,
    load_qa_model,
    window_lengths,
)

ASKED, REPEATS = 10, 5  # questions that are timed, one at a time, and how often


def quantize_run(
    run_dir: Path,
    width: str,
    data: str | None = None,
    max_answer_length: int | None = None,
    say=print,
) -> dict:
    """Write the run's model with weights of `width` to model-<width>/ in its folder, and quantized.json there: what
    this returns. `before` and `after` have the bytes of the weights on disk, F1 as the model answers and at the best
    threshold for "no answer", and `latency_ms`, from a question to its answer on one thread, the median.

    `data` are the validation questions, by default the run's own; answers have at most `max_answer_length` tokens, by
    default as many as the run's. Raises UserError for a run that has no model, answers
    no questions or has its own elsewhere, for a width that there is not, and without torchao; RunTaken while another
    process works on the run.
    """
    entry, plain, folder = (
        record.read_record(run_dir),
        run_dir / "model",
        run_dir / f"model-{width}",
    )
    if entry["task"]["name"] != "qa":
        raise UserError(f"{run_dir}: its task is {entry['task']['name']!r} and not 'qa'")
    if not plain.is_dir():
        raise UserError(
            f"{run_dir}: no model/ in it; a run keeps its model at a preset that measures quality"
        )
    source = open_source(data, "validation") if data else _own_questions(entry)
    with record.lock(run_dir):
        small, tokenizer = load_qa_model(plain)
        quantize(small, width)
        save_quantized(small, tokenizer, folder)
        # What is measured is what was saved.
        (model, _), (small, _) = load_qa_model(plain), load_qa_model(folder)
        lengths = (*window_lengths(model), answer_tokens(model, max_answer_length))
        before, after = (Model(each, tokenizer, *lengths) for each in (model, small))
        say(f"{entry['run_id']}: {len(source.examples)} questions, twice")
        found = {
            **record.beside(record.QUANTIZED_SCHEMA, entry["run_id"], entry["group"]),
            "width": width,
            "env": environment(),
            "data": {
                "name": without_folders(source.name),
                "sha256": source.sha256,
                "n": len(source.examples),
            },
            "before": scored(before, plain, source),
            "after": scored(after, folder, source),
        }
        found["before"]["latency_ms"], found["after"]["latency_ms"] = latencies(
            [before, after], source
        )
        record.write_atomically(
            folder / "quantized.json", json.dumps(found, indent=1, allow_nan=False) + "\n"
        )
    return found


def _own_questions(entry: dict) -> Source:
    """The validation questions of a run, whose record has the name of its data without the folders above it. Raises
    UserError where something else has that name here."""
    name = entry["data"]["name"]
    go_offline_without_network(name)
    if identify_data(name, with_validation=True)["sha256"] != entry["data"]["sha256"]:
        raise UserError(
            f"{name!r} is not the data of {entry['run_id']} here: give --data, the folder of its own"
        )
    return open_source(name, "validation")


def scored(loaded: Model, folder: Path, source: Source) -> dict[str, float]:
    """F1 of the answers of a folder's model, the best that a threshold gives, and the bytes of its weights. The model
    is on the CPU, before and after."""
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    answers = answers_to(source, loaded)
    loaded.model.to("cpu")
    found = score(source.examples, answers.texts, answers.null_odds, 0.0)
    scores = {
        "f1": found["f1"],
        "best_f1": found["best_f1"],
        "best_f1_threshold": found["best_f1_thresh"],
    }
    return scores | {
        "weights_bytes": sum(path.stat().st_size for path in inspect_checkpoint(folder).weights)
    }


def latencies(models: list[Model], source: Source) -> list[float]:
    """Each model's milliseconds for a question. They take turns, so that what else the machine does meets both alike,
    and have one thread, on which they do not wait for busy cores."""
    asked = [(example.question, example.context) for example in source.examples[:ASKED]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [
            [sum(answer(m, *one)["ms"].values()) for m in models]
            for _ in range(REPEATS)
            for one in asked
        ]
    finally:
        torch.set_num_threads(threads)
    return [statistics.median(each) for each in zip(*times, strict=True)]


def main(args: argparse.Namespace) -> int:
    """Quantize one run's model, and say what it came to."""
    found = quantize_run(args.run, args.weights, args.data, args.max_answer_length)
    print(f"{args.run / f'model-{args.weights}'}:")
    units = {
        "f1": ("F1", 1),
        "weights_bytes": ("MB", 1e6),
        "latency_ms": ("ms a question on a thread", 1),
    }
    for name, (unit, each) in units.items():
        print(f"  {found['before'][name] / each:.2f} -> {found['after'][name] / each:.2f} {unit}")
    return 0
