"""Questions in SQuAD v2's shape that a tiny BERT can learn in the 400 steps of preset smoke.

With them everything runs offline. The question's first word names a kind of phrase (who, where,
when, what). A paragraph holds at most one phrase of each kind between filler words, and a third of
the questions ask for a kind that is absent. This can be learnt, and not by position.
"""

import json
import random
from pathlib import Path

_TEXT = json.loads(Path(__file__).with_name("synthetic.json").read_text())
# For each kind of phrase, the words for its first place and those for its second.
_PHRASES = {kind: [words.split() for words in places] for kind, places in _TEXT["phrases"].items()}
_QUESTIONS = _TEXT["questions"]
_FILLER = _TEXT["filler"].split()
_PUNCTUATION = _TEXT["punctuation"].split()
# A BERT of 109 thousand parameters, enough for this text. Its initializer_range is not the usual
# 0.02, which is for wider layers: this one would not start to learn in 300 steps.
TINY_CONFIG = _TEXT["model"]


def vocabulary() -> list[str]:
    """Return every WordPiece that the generator needs, special tokens first, in a fixed order."""
    words = {*_FILLER, *_PUNCTUATION}
    for first_words, second_words in _PHRASES.values():
        words.update(first_words, second_words)
    for question in _QUESTIONS.values():
        words.update(question.split())
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)]


def synthetic_squad(n: int, seed: int) -> dict:
    """Return a data set of `n` questions, two to a paragraph, in the official layout."""
    draw = random.Random(seed)
    paragraphs = []
    for number, first_question in enumerate(range(0, n, 2)):
        paragraphs.append(_paragraph(draw, f"{seed}-{number}", min(2, n - first_question)))
    return {"version": "v2.0", "data": [{"title": f"Synthetic {seed}", "paragraphs": paragraphs}]}


def _paragraph(draw: random.Random, name: str, n_questions: int) -> dict:
    """Draw a paragraph and its questions, whose ids begin with `name`.

    The order of the draws decides the text: another order is another data set.
    """
    kinds = list(_PHRASES)
    draw.shuffle(kinds)
    asked = kinds[:n_questions]
    absent = {kind for kind in asked if draw.random() < 1 / 3}
    # Lengths are skewed as in real text: most paragraphs short, a few longer than one window.
    slots = min(120, int(draw.lognormvariate(3.1, 0.6)) + 8)
    present = [kind for kind in kinds if kind not in absent]
    kind_at = dict(zip(sorted(draw.sample(range(slots), len(present))), present, strict=True))

    text = ""
    answers = {}
    for slot in range(slots):
        if slot in kind_at:
            words = " ".join(draw.choice(pool) for pool in _PHRASES[kind_at[slot]])
            answers[kind_at[slot]] = [{"text": words, "answer_start": len(text)}]
        else:
            words = draw.choice(_FILLER)
        text += words
        if draw.random() < 0.12:
            text += draw.choice([". ", ", "])
        else:
            text += " "

    questions = []
    for kind in asked:
        golds = answers.get(kind, [])
        questions.append(
            {
                "id": f"{name}-{kind}",
                "question": _QUESTIONS[kind],
                "answers": golds,
                "is_impossible": not golds,
            }
        )
    return {"context": text.rstrip(), "qas": questions}
