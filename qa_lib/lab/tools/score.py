"""`python -m qa_lib score`: scores files of predictions by the official SQuAD v2 rules."""

import argparse
import json

from qa_lib.data.files import DataError, read_json
from qa_lib.data.squad import open_source
from qa_lib.errors import UserError
from qa_lib.score.f1 import score


def main(args: argparse.Namespace) -> int:
    """Print the official script's keys as JSON.

    Raises UserError for a threshold without probabilities, and DataError for what cannot be scored.
    """
    if args.na_threshold is not None and not args.na_prob:
        raise UserError("--na-threshold is for the probabilities of --na-prob, and none are given")
    threshold = 1.0 if args.na_threshold is None else args.na_threshold
    examples = open_source(args.data, "validation").golds
    predictions = read_object(args.predictions)
    na_probs = read_object(args.na_prob) if args.na_prob else None
    try:
        scores = score(examples, predictions, na_probs, threshold)
    except DataError as error:
        names = ", ".join(filter(None, (args.predictions, args.na_prob)))
        raise DataError(f"{names} for {args.data}: {error}") from None
    print(json.dumps(scores, indent=2))
    return 0


def read_object(path: str) -> dict:
    """Return the values by question id that a file holds. Raises DataError for any other file."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise DataError(f"{path}: not an object of question id -> value")
    return values
