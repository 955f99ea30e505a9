"""`python -m qa_lib predict`: answers a file of questions, or one question, with a checkpoint."""

import argparse
import json
import sys
from typing import Literal

from qa_lib.data.squad import Source, open_source
from qa_lib.errors import UserError
from qa_lib.model.hf_checkpoint import find_folder
from qa_lib.score.decode import Answers
from qa_lib.score.predict import answers_to, asked, load_answerer


def main(args: argparse.Namespace) -> int:
    """Write the four prediction files, or print the answer to one question as JSON.

    Raises UserError where a file and a question are given, or not all that one of them takes.
    """
    file_options = [args.data, args.out]
    question_options = [args.question, args.context]
    if None not in file_options and question_options == [None, None]:
        answer_file(args)
    elif None not in question_options and file_options == [None, None]:
        answer_question(args)
    else:
        raise UserError("predict takes either DATA.json and --out, or --question and --context")
    return 0


def answer_file(args: argparse.Namespace) -> None:
    """Answer a file's questions, write the prediction files and print their paths."""
    source = open_source(args.data, "validation", labelled=False)
    answers = answers_of(args, source, cache=None, progress=sys.stderr.isatty())
    for path in answers.write(args.out):
        print(path)


def answer_question(args: argparse.Namespace) -> None:
    """Print the answer to one question, an empty text for none, with its probability."""
    source = asked(args.question, args.context)
    answers = answers_of(args, source, cache=False, progress=False)
    (answer,) = answers.predictions.values()
    (null_odds,) = answers.null_odds.values()
    (nbest,) = answers.nbest.values()
    probability = next(entry["probability"] for entry in nbest if entry["text"] == answer)
    line = {"answer": answer, "probability": probability, "null_odds": null_odds}
    print(json.dumps(line, ensure_ascii=False))


def answers_of(
    args: argparse.Namespace, source: Source, cache: Literal[False] | None, progress: bool
) -> Answers:
    """Return the model's answers; `cache` and `progress` are those of `answers_to`."""
    _ = source.examples  # bad data is told before the model takes its seconds to load
    model = load_answerer(find_folder(args.model), args.max_answer_length)
    return answers_to(source, model, cache, progress=progress)
