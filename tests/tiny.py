"""Tiny checkpoints of every encoder in the table, with random weights and a tokenizer of their own kind; short runs."""

import dataclasses
import json
from pathlib import Path

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
    PreTrainedTokenizerFast,
    RobertaTokenizer,
)

from qa_lib.data.load import batches_of, load_data
from qa_lib.data.squad import open_source
from qa_lib.data.synthetic import TINY_CONFIG
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.data.windows import Samples, build_samples
from qa_lib.lab.search.plan import plan
from qa_lib.model.architectures import ENCODERS
from qa_lib.model.build import build_model
from qa_lib.model.fused_blocks import HashDropout
from qa_lib.model.packed import Packed
from qa_lib.run.fit import train
from qa_lib.spec.spec import Machine, Spec
from qa_lib.spec.variants import find_variant, lacking

CPU = Machine(bitsandbytes=True, peft=True, compiler=True)
H200 = dataclasses.replace(CPU, hardware="h200", gpus=1, sm=90)

# What differs between the encoders: ELECTRA's embeddings may be narrower than its layers, and ModernBERT's second layer
# looks at a window narrower than most samples.
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1}
SHAPES = {
    "bert": {},
    "roberta": ROBERTA,
    "electra": {"embedding_size": 32},
    "distilbert": {"hidden_dim": 128},
}
SHAPES |= {"modernbert": {"local_attention": 16}}
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
    """A RoBERTa tokenizer (`<s> question </s></s> context </s>`, blanks belong to words) learnt from `texts`."""
    return RobertaTokenizer(
        **learnt(texts, size, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]), **options
    )


def modern_tokenizer(texts, size: int = 400) -> PreTrainedTokenizerFast:
    """A tokenizer in the parts of ModernBERT's (`[CLS] question [SEP] context [SEP]`, no token types, blanks that are
    in words and in their offsets) learnt from `texts`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.BPE(**learnt(texts, size, special)))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.NFC(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends
    )
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True
        )
    )
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names)


def checkpoint(model_type: str, folder: Path) -> str:
    """Write the checkpoint of a tiny model of that type, with a tokenizer for the synthetic text; its folder."""
    tokenizer = build_tokenizer("tiny")
    if model_type in BYTE_LEVEL:
        learn = byte_level_tokenizer if model_type == "roberta" else modern_tokenizer
        tokenizer = learn(
            example.context for example in open_source("synthetic:60", "train").examples
        )
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
    return dataclasses.replace(
        spec, settings=settings, preset=dataclasses.replace(spec.preset, **preset)
    )


def planned(
    row: str = "A1",
    preset: str = "smoke",
    settings: dict | None = None,
    sizes: dict | None = None,
    **words,
):
    """The spec of a variant over few questions on this CPU, with other settings and these values of its preset."""
    (spec,) = plan([row], preset, **{"data": "synthetic:40", "machine": CPU} | words)
    return resized(spec, settings, **sizes or {})


def trained(spec: Spec, samples: Samples, run_dir: Path, model=None) -> tuple:
    """A model that was trained, and what `train` returns."""
    run_dir.mkdir(exist_ok=True)
    model = model or build_model(spec)
    return model, *train(
        model, batches_of(samples, spec), spec, torch.device("cpu"), run_dir, quiet
    )


def packed_model(spec: Spec) -> tuple:
    """A model in training mode, the same for packed rows, and the first of its micro-batches."""
    batches, model = batches_of(load_data(spec).samples, spec), build_model(spec).train()
    return (
        model,
        Packed(model, batches.limits),
        batches.collate(batches.step(0)[0], torch.device("cpu")),
    )


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | HashDropout):
            module.p = 0.0
    return model


def steps_of(run_dir: Path) -> list[dict]:
    """What a run has logged of each step."""
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]


def losses_of(run_dir: Path) -> list[float]:
    return [step["loss"] for step in steps_of(run_dir)]


def stop_after(batches, steps: int):
    """Let the batches stop the run when the step after `steps` asks for its micro-batches."""
    real = batches.step

    def step(number):
        if number == steps:
            raise KeyboardInterrupt
        return real(number)

    batches.step = step
    return batches
