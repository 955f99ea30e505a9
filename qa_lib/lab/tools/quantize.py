"""A trained run's model with weights in 8 or 4 bits, beside the run, and what that changes.

What changes is F1, the size of the weights and the time to answer. Both models answer the same
questions. Time is that of a CPU, which such a model is for. F1 is computed on a GPU where there is
one, since the same whole numbers are multiplied there, in seconds instead of minutes. The run may
have trained for it (variants A1-int8 and A1-int4) or not: that is the comparison.
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
from qa_lib.records.files import write_atomically
from qa_lib.records.schema import QUANTIZED_SCHEMA
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

TIMED_QUESTIONS = 10  # they are asked one at a time
REPEATS = 5  # of each timed question
# What `main` prints of both models: a name of `before` and `after` -> (unit, divisor).
PRINTED = {
    "f1": ("F1", 1),
    "weights_bytes": ("MB", 1e6),
    "latency_ms": ("ms a question on a thread", 1),
}


def main(args: argparse.Namespace) -> int:
    """Quantize one run's model, and print what it came to."""
    comparison = quantize_run(args.run, args.weights, args.data, args.max_answer_length)
    before = comparison["before"]
    after = comparison["after"]
    print(f"{args.run / f'model-{args.weights}'}:")
    for name, (unit, divisor) in PRINTED.items():
        print(f"  {before[name] / divisor:.2f} -> {after[name] / divisor:.2f} {unit}")
    return 0


def quantize_run(
    run_dir: Path,
    width: str,
    data: str | None = None,
    max_answer_length: int | None = None,
    say=print,
) -> dict:
    """Write a run's model with weights of `width` to its folder model-<width>/, and compare both.

    Returns what it writes to quantized.json there. `before` and `after` have the bytes of the
    weights on disk, F1 as the model answers and at the best threshold for "no answer", and
    `latency_ms`, the median time from a question to its answer on one thread.

    `data` are the validation questions, by default the run's own. Answers have at most
    `max_answer_length` tokens, by default as many as the run's.

    Raises UserError for a run that has no model, answers no questions or has its own elsewhere, for
    a width that there is not, and without torchao; RunTaken while another process works on the run.
    """
    entry = record.read_record(run_dir)
    folder = run_dir / "model"
    quantized_folder = run_dir / f"model-{width}"
    if entry["task"]["name"] != "qa":
        raise UserError(f"{run_dir}: its task is {entry['task']['name']!r} and not 'qa'")
    if not folder.is_dir():
        raise UserError(
            f"{run_dir}: no model/ in it; a run keeps its model at a preset that measures quality"
        )
    source = open_source(data, "validation") if data else _own_questions(entry)
    with record.lock(run_dir):
        model, tokenizer = load_qa_model(folder)
        quantize(model, width)
        save_quantized(model, tokenizer, quantized_folder)
        # What is measured is what was saved.
        before = _load(folder, max_answer_length)
        after = _load(quantized_folder, max_answer_length)
        say(f"{entry['run_id']}: {len(source.examples)} questions, twice")
        scores_before = scored(before, folder, source)
        scores_after = scored(after, quantized_folder, source)
        latency_before, latency_after = latencies([before, after], source)
        comparison = {
            **record.document_header(QUANTIZED_SCHEMA, entry["run_id"], entry["group"]),
            "width": width,
            "env": environment(),
            "data": {
                "name": without_folders(source.name),
                "sha256": source.sha256,
                "n": len(source.examples),
            },
            "before": {**scores_before, "latency_ms": latency_before},
            "after": {**scores_after, "latency_ms": latency_after},
        }
        text = json.dumps(comparison, indent=1, allow_nan=False) + "\n"
        write_atomically(quantized_folder / "quantized.json", text)
    return comparison


def _load(folder: Path, max_answer_length: int | None) -> Model:
    """Return the model of a folder on the CPU, ready to answer."""
    model, tokenizer = load_qa_model(folder)
    max_length, stride = window_lengths(model)
    return Model(
        model=model,
        tokenizer=tokenizer,
        max_length=max_length,
        stride=stride,
        max_answer_length=answer_tokens(model, max_answer_length),
    )


def _own_questions(entry: dict) -> Source:
    """Return a run's validation questions.

    Its record has the name of its data without the folders above it. Raises UserError where
    something else has that name here.
    """
    name = entry["data"]["name"]
    go_offline_without_network(name)
    if identify_data(name, with_validation=True)["sha256"] != entry["data"]["sha256"]:
        raise UserError(
            f"{name!r} is not the data of {entry['run_id']} here: give --data, the folder of its "
            "own"
        )
    return open_source(name, "validation")


def scored(loaded: Model, folder: Path, source: Source) -> dict[str, float]:
    """Return F1 of a model's answers, the best F1 of a threshold, and the bytes of its weights.

    `folder` is the model's. The model is on the CPU, before and after.
    """
    loaded.model.to("cuda" if torch.cuda.is_available() else "cpu")
    answers = answers_to(source, loaded)
    loaded.model.to("cpu")
    scores = score(source.examples, answers.texts, answers.null_odds, 0.0)
    weights = inspect_checkpoint(folder).weights
    return {
        "f1": scores["f1"],
        "best_f1": scores["best_f1"],
        "best_f1_threshold": scores["best_f1_thresh"],
        "weights_bytes": sum(path.stat().st_size for path in weights),
    }


def latencies(models: list[Model], source: Source) -> list[float]:
    """Return each model's median time for a question, in milliseconds.

    Models take turns, so that what else the machine does meets all alike. They have one thread, on
    which they do not wait for busy cores.
    """
    milliseconds = [[] for _ in models]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            for example in source.examples[:TIMED_QUESTIONS]:
                for model, times in zip(models, milliseconds, strict=True):
                    result = answer(model, example.question, example.context)
                    times.append(sum(result["ms"].values()))
    finally:
        torch.set_num_threads(threads)
    return [statistics.median(times) for times in milliseconds]
