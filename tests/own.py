"""Tiny models with each head, as transformers has them, and data for them without a tokenizer."""

import random

import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from tests.tiny import SHAPES

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
# Where these differ from SIZES and from SHAPES of tests/tiny.py.
NARROW = {
    "roberta": {"max_position_embeddings": 66},
    "electra": {"embedding_size": 16},
    "distilbert": {"hidden_dim": 64},
    "mpnet": {"max_position_embeddings": 66, "pad_token_id": 1},
}
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
    "qa_dropout": 0.0,
}
HEADS = {
    "questions": AutoModelForQuestionAnswering,
    "sequences": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "none": AutoModel,
}
LENGTHS = (1, 3, 7, 20, 41)  # of samples


def tiny_model(kind: str = "bert", head: str = "sequences", drops: bool = False, **changes):
    """A model with random weights, the same in each call, in evaluation mode."""
    sizes = SIZES | SHAPES[kind] | NARROW.get(kind, {}) | ({} if drops else NO_DROPOUT) | changes
    config = AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    return HEADS[head].from_config(config).eval()


def drawn_samples(head: str, count: int = 24, lengths=LENGTHS) -> list[dict]:
    """Samples of these lengths in turn, with the labels of a head; that for none has no labels."""
    draw = random.Random(0)
    samples = []
    for number in range(count):
        length = lengths[number % len(lengths)]
        ids = [draw.randrange(5, 100) for _ in range(length)]
        sample = {"input_ids": ids}
        if head == "questions":
            start = draw.randrange(length)
            sample |= {"start_positions": start, "end_positions": draw.randrange(start, length)}
        elif head == "sequences":
            sample["labels"] = ids[0] % 2
        elif head == "tokens":
            sample["labels"] = [token % 2 for token in ids]
        samples.append(sample)
    return samples


def padded_batch(samples: list[dict]) -> dict[str, torch.Tensor]:
    """What a collator of transformers makes of samples: a batch padded to the longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {"attention_mask": []}
    for sample in samples:
        missing = longest - len(sample["input_ids"])
        batch["attention_mask"].append([1] * (longest - missing) + [0] * missing)
        for name, value in sample.items():
            if isinstance(value, list):
                value = value + [-100 if name == "labels" else 0] * missing
            batch.setdefault(name, []).append(value)
    return {name: torch.tensor(value) for name, value in batch.items()}


def quiet(_) -> None:
    """Say nothing."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the numbers below 100. It pads with token 0."""
    vocabulary = {str(number): number for number in range(100)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="3"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="0")
