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
    """Write the prediction files (`Answers.write`), or print the answer to one question as JSON.

    Raises UserError unless exactly one pair of options is there: DATA.json and --out, or --question
    and --context.
    """
    of_file = [args.data is not None, args.out is not None]
    of_question = [args.question is not None, args.context is not None]
    if all(of_file) and not any(of_question):
        answer_file(args)
    elif all(of_question) and not any(of_file):
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
    # The best answers are listed with "no answer", whose text is empty, and so have what was given.
    probability = next(entry["probability"] for entry in nbest if entry["text"] == answer)
    line = {"answer": answer, "probability": probability, "null_odds": null_odds}
    print(json.dumps(line, ensure_ascii=False))


def answers_of(
    args: argparse.Namespace, source: Source, cache: Literal[False] | None, progress: bool
) -> Answers:
    """Return the model's answers.

    `cache` False keeps no tokenized samples; None keeps them in the usual folder.
    """
    _ = source.examples  # bad data is told before the model takes its seconds to load
    model = load_answerer(find_folder(args.model), args.max_answer_length)
    return answers_to(source, model, cache, progress=progress)
