"""Answer the validation questions and score the answers: the record's `quality` for the task "qa"."""

import math
from pathlib import Path

import torch

from qa_lib.data.load import Data
from qa_lib.data.windows import Samples
from qa_lib.model.build import DTYPES
from qa_lib.record import SCORING
from qa_lib.score.decode import decode
from qa_lib.score.f1 import score
from qa_lib.score.predict import predict_logits
from qa_lib.spec import Spec
from qa_lib.variants import TASKS


def evaluate(model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path) -> dict:
    """Answer the validation questions with a model on `device`; the record's `quality`, and the four answer files.

    A score that these questions do not have, such as that of unanswerable ones where there are none, is None.
    """
    model.eval()
    rows = predict_logits(model, data.validation_samples, device, dtype=DTYPES[spec.settings.precision])
    loss = span_loss(data.validation_samples, *rows)
    if spec.settings.fault == "positional-join":
        rows = joined_by_position(*rows)
    examples = data.validation.examples
    answers = decode(data.validation_samples, examples, *rows)
    answers.write(run_dir / "answers")
    found = score(examples, answers.texts, answers.null_odds, 0.0) | {"loss": loss}
    found["always_null_f1"] = score(examples, dict.fromkeys(answers.texts, ""))["f1"]
    official = TASKS["qa"]["official"]
    return {name: found.get(official.get(name, name)) for name in SCORING["qa"]["scores"]}


def span_loss(samples: Samples, ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> float | None:
    """The held-out loss: what training minimises, in nats, as the mean over all windows; None if it is not finite.

    `ids`, `start` and `end` are what predict_logits gives. As in training a window's loss is the mean of two cross
    entropies, of the first gold answer's first and last token, or of [CLS] where it holds none; over the window's own
    tokens, so that it does not depend on padding.
    """
    parts = []
    for logits, positions in ((start, samples.start_positions), (end, samples.end_positions)):
        target = torch.from_numpy(positions[ids.cpu().numpy()]).to(logits.device)
        scores = logits.masked_fill(logits.isnan(), -torch.inf)
        parts.append(torch.nn.functional.cross_entropy(scores, target))
    loss = sum(parts).item() / 2
    return loss if math.isfinite(loss) else None


def joined_by_position(ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The fault of variant A4-b, kept on purpose: row r of logits that are sorted by length goes to window r of the
    data.

    The seeds' Trainer returned its predictions in the order in which it had grouped them by length, and the notebook
    read them in the order of the questions. What lies beyond a row's own window is -100, the Trainer's filling of
    batches of unequal width, since the NaN that stands there otherwise would give the fault away.
    """
    return torch.arange(len(ids)), start.nan_to_num(-100.0), end.nan_to_num(-100.0)
