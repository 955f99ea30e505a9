"""What people say for variants, models, data and cards.

README.md and its first picture have these words, with a variant's name in brackets behind them.
"""

import textwrap

from qa_lib.lab.report.facts import cards
from qa_lib.spec import variants

RUNG_LETTERS = 45  # of a bar's label, at most, where they are a variant's own sentence

VARIANTS = {
    "A1": "the unoptimized loop",
    "A0-longest": "the Trainer as most use it",
    "A0-defaults": "the Trainer with its defaults",
    "A0-compile": "the compiled Trainer",
    "A0-tuned": "the tuned Trainer",
    "E-searched": "the quickest plain PyTorch found",
    "E-recompute-8bit": "the leanest full training",
    "E-uncompiled": "the full stack in 16 bits",
    "E-fp8-uncompiled": "the full stack, partly in 8 bits",
    "E-fp8-gradients": "the full stack in 8 bits",
    "E-fp8-rounded": "the same without masters, moments in 8 bits",
    "E-t4-norm": "the stack for a T4, timed on another card",
    "L-searched": "the quickest plain PyTorch found",
    "L-searched-nodropout": "the quickest plain PyTorch, no dropout",
    "L-moments": "the full stack in 16 bits",
    "L-fp8-head": "8 bits, in the head too",
    "L-fp8-gradients": "8 bits, weights' gradients too",
    "L-fp8-all": "the full stack in 8 bits",
    "L-fp8-all-nodropout": "the full stack in 8 bits, no dropout",
}

# What other rungs of a ladder, and other Trainers, add to what they begin from. A picture has a
# line for each, which is too short for the sentence of the variants table.
RUNGS = {
    "A0": "the Trainer, else as A1",
    "A0-grouped": "the Trainer, samples by length",
    "A2": "fused attention",
    "A3": "torch.compile",
    "A4-nb": "padding to the longest of a batch",
    "A4": "samples by length",
    "E-packed": "samples packed, no padding",
    "E-adamw": "AdamW as one kernel",
    "E-graph": "the step is one CUDA graph",
    "E-bf16": "bf16, no loss scaling",
    "E-masters": "bf16 over fp32 masters",
    "E-qkv": "query, key, value together",
    "E-dropout": "cheaper random bits",
    "E-regions": "three layers compiled for all",
    "E-varlen": "attention of our own",
    "E-norm": "norms of our own",
    "E-gelu": "GELU in fewer instructions",
    "E-moments": "Adam's moments in bf16",
    "E-fp8-all": "8 bits, gradients in 16",
    "L1": "the unoptimized loop",
    "L0": "the Trainer, else as L1",
    "L0-sdpa": "the Trainer as most use it",
    "L0-compile": "the compiled Trainer",
    "L-bf16": "mixed precision",
    "L-sdpa": "fused attention",
    "L-compile": "torch.compile",
    "L-adamw": "AdamW as one kernel",
    "L-graph": "the step is one CUDA graph",
    "L-masters": "bf16 over fp32 masters",
    "L-dropout": "cheaper random bits",
    "L-norm": "norms of our own",
    "L-gelu": "GELU in fewer instructions",
    "L-attention": "attention of our own",
    "L-loss": "head and loss in parts",
    "L-fp8": "8 bits in feed-forward blocks",
    "L-fp8-uncompiled": "8 bits without the compiler",
    "L-plain": "an afternoon's plain PyTorch",
    "L-plain-bf16": "plain PyTorch, all in bf16",
}

MODELS = {
    "bert-base": "BERT-base",
    "bert-base-uncased": "BERT-base",
    "all-mpnet-base-v2": "MPNet-base",
    "minilm": "MiniLM",
}

# The folders of SQuAD v2 that records name.
DATA = {
    "squad": "SQuAD v2",
    "squad-large": "SQuAD v2",
    "squad_v2": "SQuAD v2",
}

# Training sets that are a part of SQuAD v2, where a sentence says of what a run's samples are.
PARTS = {
    "squad-large": "half of SQuAD v2's training set (squad-large)",
    "half-of-squad-v2-repeated": "half of SQuAD v2's training set, repeated to the whole's number",
}


def variant(name: str) -> str:
    """Return a variant as 'the full stack in 16 bits (E-uncompiled)', or its name alone."""
    return f"{VARIANTS[name]} ({name})" if name in VARIANTS else name


def rung(name: str) -> str:
    """Return the label of a variant's bar: 'A2: fused attention'.

    One without words here has those of its own `why`.
    """
    words = VARIANTS.get(name) or RUNGS.get(name)
    if not words and name in variants.VARIANTS:
        words = textwrap.shorten(variants.VARIANTS[name].why, RUNG_LETTERS, placeholder=" ...")
    return f"{name}: {words}" if words else name


def model(name: str) -> str:
    """Return a model as people write it, or its name in records."""
    return MODELS.get(name, name)


def data(name: str) -> str:
    """Return data as people call them, or their name in records."""
    return DATA.get(name, name)


def training_set(name: str) -> str:
    """Return training data with what they are a part of, or their name in records."""
    return PARTS.get(name, name)


def card(gpu: str) -> str:
    """Return the short name of a card that PyTorch names `gpu`: 'H100'."""
    known = cards().dropna(subset=["card", "gpu"]).set_index("gpu")["card"]
    return known.get(gpu, gpu.removeprefix("NVIDIA "))


def capital(words: str) -> str:
    """Return words with a capital at the beginning of a sentence."""
    return words[:1].upper() + words[1:]
