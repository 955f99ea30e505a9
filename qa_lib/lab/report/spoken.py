"""What people say for variants, models and cards.

README.md and its first picture have these words, with a variant's name in brackets behind them.
"""

from qa_lib.lab.report.facts import cards

VARIANTS = {
    "A1": "the unoptimized loop",
    "A0-longest": "the Trainer as most use it",
    "A0-defaults": "the Trainer with its defaults",
    "A0-compile": "the compiled Trainer",
    "A0-tuned": "the tuned Trainer",
    "E-searched": "plain PyTorch at its best",
    "E-recompute-8bit": "the leanest full training",
    "E-uncompiled": "the full stack in 16 bits",
    "E-fp8-uncompiled": "the full stack, partly in 8 bits",
    "E-fp8-gradients": "the full stack in 8 bits",
    "E-t4-norm": "the stack for a T4, timed on another card",
}

MODELS = {
    "bert-base": "BERT-base",
    "bert-base-uncased": "BERT-base",
    "all-mpnet-base-v2": "MPNet-base",
    "minilm": "MiniLM",
}


def variant(name: str) -> str:
    """Return a variant as 'the full stack in 16 bits (E-uncompiled)', or its name alone."""
    return f"{VARIANTS[name]} ({name})" if name in VARIANTS else name


def model(name: str) -> str:
    """Return a model as people write it, or its name in records."""
    return MODELS.get(name, name)


def card(gpu: str) -> str:
    """Return the short name of a card that PyTorch names `gpu`: 'H100'."""
    known = cards().dropna(subset=["card", "gpu"]).set_index("gpu")["card"]
    return known.get(gpu, gpu.removeprefix("NVIDIA "))


def capital(words: str) -> str:
    """Return words with a capital at the beginning of a sentence."""
    return words[:1].upper() + words[1:]
