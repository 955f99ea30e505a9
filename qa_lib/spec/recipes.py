"""Which parameters of a model train, by name. Standard library only."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from qa_lib.errors import find


@dataclass(frozen=True)
class Recipe:
    """Which parameters train. All fields are part of a run's hash."""

    kind: Literal["all", "lora", "bitfit", "top"]
    """All parameters | adapters of low rank (LoRA) | biases alone | some of the layers alone."""
    lr_factor: float = 1.0
    """Factor of the preset's learning rate: what trains few parameters takes a larger one."""
    targets: Sequence[str] = ()
    """lora: the linear layers that get adapters, by BERT's names (peft's `target_modules`)."""
    rank: int = 8
    """lora: the rank r; alpha is 2 r."""
    frozen: Sequence[int] = (0, 12)
    """top: the share of the layers that is frozen, as numerator and denominator."""
    frozen_side: str = "bottom"
    """top: from where frozen layers are counted, the "bottom" (with embeddings) or the "top"."""


RECIPES = {
    "all": Recipe("all"),
    "lora-qv": Recipe("lora", targets=("query", "value")),
    # Rank and rate were found by `tune`: rank 8 at this rate, and ranks above 32, end one to three
    # F1 lower (docs/log/).
    "lora-all": Recipe("lora", lr_factor=5.0, targets=("query", "key", "value", "dense"), rank=32),
    "bitfit": Recipe("bitfit", lr_factor=30.0),
    "freeze-bottom-10": Recipe("top", frozen=(10, 12)),
    "freeze-last-4": Recipe("top", frozen=(4, 12), frozen_side="top"),
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name.

    A name like 'lora-all-r32' stands for the adapters of 'lora-all' with another rank, at the
    preset's own learning rate. Raises UnknownName for any other name.
    """
    with_rank = re.fullmatch(r"(lora-[a-z]+)-r([1-9]\d*)", name)
    if with_rank and with_rank[1] in RECIPES:
        return replace(RECIPES[with_rank[1]], rank=int(with_rank[2]), lr_factor=1.0)
    return find("trainable", name, RECIPES)
