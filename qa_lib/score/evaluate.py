"""Answer the validation questions and score the answers."""

from pathlib import Path

import torch

from qa_lib.data.load import Data
from qa_lib.model.build import DTYPES
from qa_lib.score.decode import decode
from qa_lib.score.f1 import score
from qa_lib.score.predict import predict_logits
from qa_lib.spec import Spec


def evaluate(model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path) -> dict:
    """Answer the validation questions with a model on `device`; the record's `quality`, and the four answer files."""
    model.eval()
    dtype = DTYPES[spec.settings.precision]
    autocast = None if dtype == torch.float32 else dtype
    rows = predict_logits(model, data.validation_features, device, autocast_dtype=autocast, join=spec.settings.join)
    examples = data.validation.examples
    answers = decode(data.validation_features, examples, *rows)
    answers.write(run_dir / "answers")
    found = score(examples, answers.texts, answers.null_odds, 0.0)
    always_null = score(examples, dict.fromkeys(answers.texts, ""))
    return {
        "exact": found["exact"],
        "f1": found["f1"],
        "has_answer_exact": found.get("HasAns_exact"),
        "has_answer_f1": found.get("HasAns_f1"),
        "no_answer_f1": found.get("NoAns_f1"),
        "best_exact": found["best_exact"],
        "best_exact_threshold": found["best_exact_thresh"],
        "best_f1": found["best_f1"],
        "best_f1_threshold": found["best_f1_thresh"],
        "always_null_f1": always_null["f1"],
        "n": found["total"],
    }
