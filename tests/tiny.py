"""Tiny checkpoints of every encoder, with random weights and a fitting tokenizer; short runs."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import (
    ByteLevelBPETokenizer,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    MPNetTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
)

from qa_lib.data.load import batches_of, load_data
from qa_lib.data.squad import open_source
from qa_lib.data.synthetic import TINY_CONFIG, vocabulary
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.data.windows import Samples, build_samples
from qa_lib.lab.search.plan import plan
from qa_lib.model.architectures import ENCODERS
from qa_lib.model.build import build_model
from qa_lib.model.hash_dropout import HashDropout
from qa_lib.model.packed import Packed
from qa_lib.run.fit import train
from qa_lib.spec.machine import Machine
from qa_lib.spec.rules import lacking
from qa_lib.spec.spec import Spec
from qa_lib.spec.variants import find_variant

CPU = Machine(bitsandbytes=True, peft=True, compiler=True)
H200 = dataclasses.replace(CPU, hardware="h200", gpus=1, sm=90)

# What differs between the encoders: ELECTRA's embeddings may be narrower than its layers, and
# ModernBERT's second layer looks at a window narrower than most samples.
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}
SHAPES = {
    "bert": {},
    "roberta": ROBERTA,
    "electra": {"embedding_size": 32},
    "distilbert": {"hidden_dim": 128},
    "modernbert": {"local_attention": 16},
    "mpnet": {"max_position_embeddings": 514},
}
BYTE_LEVEL = {"roberta", "modernbert"}  # those whose tokenizers split bytes


def having(variant: str) -> list[str]:
    """The encoders of the table that can have a variant's settings."""
    return [kind for kind in ENCODERS if not lacking(find_variant(variant).settings, kind)]


def learnt(texts, size: int, special: list[str]) -> dict:
    """The vocabulary and merges that byte-level BPE learns from `texts`."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(texts, vocab_size=size, special_tokens=special, show_progress=False)
    model = json.loads(learner.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


def byte_level_tokenizer(texts, size: int = 400, **options) -> RobertaTokenizer:
    """A RoBERTa tokenizer learnt from `texts`.

    It makes <s> question </s></s> context </s>, and blanks belong to words.
    """
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    return RobertaTokenizer(**learnt(texts, size, special), **options)


def modern_tokenizer(texts, size: int = 400) -> PreTrainedTokenizerFast:
    """A tokenizer in the parts of ModernBERT's, learnt from `texts`.

    It makes [CLS] question [SEP] context [SEP] and no token types; blanks are in words and in their
    offsets.
    """
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    vocabulary = learnt(texts, size, list(special.values()))
    backend = Tokenizer(models.BPE(**vocabulary))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **special)


def mpnet_tokenizer(pieces) -> MPNetTokenizer:
    """MPNet's tokenizer with the WordPieces of a BERT.

    It makes <s> question </s></s> context </s>, and no token types.
    """
    special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    own = [piece for piece in pieces if not piece.startswith("[")]
    return MPNetTokenizer(vocab={piece: index for index, piece in enumerate([*special, *own])})


def checkpoint(model_type: str, folder: Path) -> str:
    """Write a tiny model of that type and a tokenizer for the synthetic text; return the folder."""
    tokenizer = build_tokenizer("tiny")
    if model_type == "mpnet":
        tokenizer = mpnet_tokenizer(vocabulary())
    if model_type in BYTE_LEVEL:
        learn = byte_level_tokenizer if model_type == "roberta" else modern_tokenizer
        examples = open_source("synthetic:60", "train").examples
        tokenizer = learn(example.context for example in examples)
    config = AutoConfig.for_model(
        model_type,
        **TINY_CONFIG | SHAPES[model_type],
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForQuestionAnswering.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def samples_of(source: str) -> Samples:
    """Short windows of synthetic questions."""
    return build_samples(open_source(source, "train"), build_tokenizer("tiny"), 96, 32)


def quiet(_) -> None:
    """Say nothing."""


def resized(spec: Spec, settings: dict | None = None, **preset) -> Spec:
    """The spec with other settings, and with these values of its preset."""
    settings = dataclasses.replace(spec.settings, **settings or {})
    preset = dataclasses.replace(spec.preset, **preset)
    return dataclasses.replace(spec, settings=settings, preset=preset)


def planned(
    row: str = "A1",
    preset: str = "smoke",
    settings: dict | None = None,
    sizes: dict | None = None,
    **words,
):
    """The spec of a variant over few questions on this CPU.

    It has other `settings` than the variant's, and `sizes` as values of its preset; `words` go to
    plan.
    """
    (spec,) = plan([row], preset, **{"data": "synthetic:40", "machine": CPU} | words)
    return resized(spec, settings, **sizes or {})


def trained(spec: Spec, samples: Samples, run_dir: Path, model=None) -> tuple:
    """A model that was trained, and what `train` returns."""
    run_dir.mkdir(exist_ok=True)
    model = model or build_model(spec)
    batches = batches_of(samples, spec)
    return model, *train(model, batches, spec, torch.device("cpu"), run_dir, quiet)


def packed_model(spec: Spec) -> tuple:
    """A model in training mode, the same for packed rows, and the first of its micro-batches."""
    batches = batches_of(load_data(spec).samples, spec)
    model = build_model(spec).train()
    first_samples = batches.step(0)[0]
    inputs = batches.collate(first_samples, torch.device("cpu"))
    return model, Packed(model, batches.limits), inputs


def without_dropout(model):
    """The model itself, whose dropouts drop nothing any more."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | HashDropout):
            module.p = 0.0
    return model


def steps_of(run_dir: Path) -> list[dict]:
    """What a run has logged of each step."""
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]


def losses_of(run_dir: Path) -> list[float | None]:
    """The loss of each step; None where it is not finite."""
    return [step["loss"] for step in steps_of(run_dir)]


def stop_after(batches, steps: int):
    """Let the batches stop the run when the step after `steps` asks for its micro-batches."""
    real_step = batches.step

    def step(number):
        if number == steps:
            raise KeyboardInterrupt
        return real_step(number)

    batches.step = step
    return batches


@dataclasses.dataclass
class OfLengths:
    """Samples of which only the lengths are known."""

    lengths: np.ndarray  # int [n]

    def __len__(self) -> int:
        return len(self.lengths)
