"""SQuAD v2-shaped text that a tiny BERT can learn in the 400 steps of preset smoke, so that everything runs offline.

The question's first word names a kind of phrase (who, where, when, what); a paragraph holds at most one phrase of each
kind between filler words, and a third of the questions ask for a kind that is absent. Learnable, and not by position.
"""

import json
import random
from pathlib import Path

_TEXT = json.loads(Path(__file__).with_name("synthetic.json").read_text())
# Of each kind the words that a phrase has at its first and at its second place.
_PHRASES = {kind: [words.split() for words in places] for kind, places in _TEXT["phrases"].items()}
_QUESTIONS, _FILLER, _PUNCTUATION = (
    _TEXT["questions"],
    _TEXT["filler"].split(),
    _TEXT["punctuation"].split(),
)
# A BERT of 109 thousand parameters, enough for this text. Its initializer_range is not the usual 0.02, which is for
# wider layers: this one would not start to learn in 300 steps.
TINY_CONFIG = _TEXT["model"]


def vocabulary() -> list[str]:
    """Every WordPiece the generator needs, special tokens first, in a fixed order."""
    words = {word for pools in _PHRASES.values() for pool in pools for word in pool}
    words.update(_FILLER, " ".join(_QUESTIONS.values()).split(), _PUNCTUATION)
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)]


def synthetic_squad(n: int, seed: int) -> dict:
    """A data set of `n` questions, two to a paragraph, in the official nested JSON layout."""
    draw = random.Random(seed)
    questions, paragraphs = 0, []
    while questions < n:
        paragraphs.append(_paragraph(draw, f"{seed}-{len(paragraphs)}", min(2, n - questions)))
        questions += len(paragraphs[-1]["qas"])
    return {"version": "v2.0", "data": [{"title": f"Synthetic {seed}", "paragraphs": paragraphs}]}


def _paragraph(draw: random.Random, name: str, n_questions: int) -> dict:
    kinds = list(_PHRASES)
    draw.shuffle(kinds)
    asked = kinds[:n_questions]
    absent = {kind for kind in asked if draw.random() < 1 / 3}
    # Lengths are skewed as in real text: most paragraphs short, a few longer than one window.
    slots = min(120, int(draw.lognormvariate(3.1, 0.6)) + 8)
    phrases = [kind for kind in kinds if kind not in absent]
    places = dict(zip(sorted(draw.sample(range(slots), len(phrases))), phrases, strict=True))
    text, answers = "", {}
    for slot in range(slots):
        if slot in places:
            words = " ".join(draw.choice(pool) for pool in _PHRASES[places[slot]])
            answers[places[slot]] = [{"text": words, "answer_start": len(text)}]
        else:
            words = draw.choice(_FILLER)
        text += words + (draw.choice([". ", ", "]) if draw.random() < 0.12 else " ")
    entries = []
    for kind in asked:
        found = answers.get(kind, [])
        question = {"id": f"{name}-{kind}", "question": _QUESTIONS[kind]}
        entries.append(question | {"answers": found, "is_impossible": not found})
    return {"context": text.rstrip(), "qas": entries}
