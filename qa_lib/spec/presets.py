"""How much work a run is, on what: the presets (presets.toml), and GPT-2s of one's own size. Standard library only."""

import dataclasses
import numbers
import re
from typing import get_type_hints

from qa_lib.errors import SpecError, find
from qa_lib.spec.variants import read_toml

MOST = 2**31 - 1  # of what is counted here
# Tokens of an answer at most where nothing else is said, as in run_qa of transformers.
ANSWER_TOKENS = 30
OWN = "local"  # the preset of who gives data and a model, and names none
# The presets for one's own training, at which `plan` chooses the micro-batch (lab/search/recommend.py). All others compare
# what the reference project compared, at its micro-batch.
QUICKEST = (OWN, "full", "quality")


def whole_number(name: str, value: object, least: int, most: int = MOST) -> int:
    """The value, NumPy's as well, as a whole number in these bounds. Raises SpecError for any other."""
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or not least <= value <= most
    ):
        raise SpecError(
            f"{name} is {str(value)[:40]!r}, and not a whole number from {least} to {most}"
        )
    return int(value)


def stride_of(max_length: int, usual: int) -> int:
    """Tokens that neighbouring windows of `max_length` share: the usual number, but a third of the window where that
    would be more than half of it, which would leave a question and new tokens too little room. For the usual 128: 42
    at 128 tokens, 85 at 255, 128 from 256 on."""
    return usual if 2 * usual <= max_length else max_length // 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """How much work, on what. Learning-rate schedule and effective batch belong here, so that variants stay
    comparable."""

    name: str
    task: str = "qa"  # a name of run/tasks.py
    model: str = "bert-base-uncased"  # tiny | a hub name | "" where --model must name a folder
    data: str = "squad_v2"  # synthetic:N | a hub name | "" where --data must name a file or folder
    max_length: int = 384  # tokens of a sample, at most
    stride: int = 128  # tokens that neighbouring samples of a paragraph share
    # Tokens of an answer, at most; None: as many as the training answers need (data/windows.py, answer_limit).
    max_answer_length: int | None = ANSWER_TOKENS
    effective_batch: int | None = (
        32  # samples per optimizer step; None: one micro-batch, however large
    )
    batch_tokens: int | None = (
        None  # tokens per optimizer step, in place of effective_batch where samples are full
    )
    learning_rate: float = 3e-5
    recipe_rates: bool = (
        True  # recipes multiply the rate; not for a model that starts from random weights
    )
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    steps: int | None = None  # optimizer steps ...
    epochs: int | None = None  # ... or passes over the training samples
    measure_from: int = 100  # steps before this one are warm-up and not timed
    quality: bool = False  # evaluate, and keep the model; without it random initialisation will do
    checkpoint_every: int = 0  # optimizer steps; 0: never
    time_limit_s: int = 3600
    threads: int | None = None  # of a run on a CPU; None: all of them
    limit_gib: float | None = None  # GPU memory that the run may take; None: all there is

    def __post_init__(self):
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            fits = kind | int if kind in (float, float | None) else kind
            if kind in (int, int | None) and value is not None:
                whole_number(
                    name, value, 0 if name in ("stride", "measure_from", "checkpoint_every") else 1
                )
            elif not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
                wanted = {float: "a number", bool: "True or False"}.get(kind, "a text")
                raise SpecError(f"{name} is {str(value)[:40]!r}, and not {wanted}")
        if not 0 < self.learning_rate < 1:
            raise SpecError(f"learning rate {self.learning_rate:g} is not between 0 and 1")

    @property
    def batch(self) -> int | None:
        """Samples per optimizer step; None: one micro-batch."""
        return self.batch_tokens // self.max_length if self.batch_tokens else self.effective_batch

    def check_length(self, model: str, most: int) -> None:
        """Raise SpecError where samples are longer than the `most` tokens that the model takes, or it takes none."""
        if most < 1:
            raise SpecError(
                f"{model} has no position for a token: its config.json gives max_position_embeddings "
                "or pad_token_id wrongly"
            )
        if self.max_length > most:
            raise SpecError(
                f"{model} takes {most} tokens, and samples of preset {self.name} have {self.max_length}"
            )


_TYPES = get_type_hints(Preset)


def _preset(name: str, values: dict) -> Preset:
    """A table of presets.toml."""
    return Preset(
        name=name, **{key: None if value == "none" else value for key, value in values.items()}
    )


PRESETS = {name: _preset(name, values) for name, values in read_toml("presets.toml").items()}


def find_preset(name: str) -> Preset:
    """The preset of that name; UnknownName otherwise."""
    return find("preset", name, PRESETS)


def named_or_own(preset: str | None, data: object, model: object) -> str:
    """The name of the preset that is meant: OWN where none is given beside data and a model. Raises SpecError where
    one of these lacks."""
    if preset is not None:
        return preset
    if data and model:
        return OWN
    raise SpecError(
        f"no preset is named: give --preset ({', '.join(PRESETS)}), or --data and --model for {OWN!r}"
    )


def sized(
    preset: Preset,
    epochs: int | None = None,
    learning_rate: float | None = None,
    max_length: int | None = None,
    batch: int | None = None,
    max_answer_length: int | None = None,
) -> Preset:
    """The preset with these in place of its own, unless they are 0 or None; `batch` is in samples of an optimizer step.
    Raises SpecError for numbers that cannot be, and for windows that do not make up the tokens of a step."""
    changes = {"steps": None, "epochs": epochs} if epochs else {}
    if learning_rate:
        number = isinstance(learning_rate, numbers.Real) and not isinstance(learning_rate, bool)
        changes["learning_rate"] = float(learning_rate) if number else learning_rate
    if max_length:
        changes |= {"max_length": max_length, "stride": stride_of(max_length, preset.stride)}
    if batch:
        changes |= {"effective_batch": batch, "batch_tokens": None}
    if max_answer_length:
        if preset.task != "qa":
            raise SpecError(
                f"preset {preset.name!r} gives no answers, whose length could be bounded"
            )
        changes["max_answer_length"] = max_answer_length
    found = dataclasses.replace(preset, **changes)
    length, tokens = found.max_length, found.batch_tokens
    if not 0 < found.stride < length <= (tokens or length):
        raise SpecError(
            f"{length} tokens are too few or too many: a sample of preset {found.name!r} has at least 3, and at most "
            f"{tokens or 'what the model takes'}"
        )
    if tokens and tokens % length:
        whole = [n for n in range(3, tokens + 1) if tokens % n == 0]
        near = [n for n in whole if n < length][-1:] + [n for n in whole if n > length][:1]
        raise SpecError(
            f"samples of {length} tokens do not make up the {tokens:,} tokens of a step at preset {found.name!r}: take "
            f"{' or '.join(map(str, near))} tokens, or give --batch"
        )
    return found


HEAD, BYTES = (
    64,
    256,
)  # width of a head; tokens that a byte-level vocabulary has before it merges any


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT-2 of one's own size, with random weights: heads are 64 wide, as in GPT-2 itself, whose small model is
    'gpt2:L12H768' and whose vocabulary and positions are the defaults."""

    layers: int
    hidden: int
    vocabulary: int = 50_257
    positions: int = 1024


def find_shape(model: str) -> Shape | None:
    """The shape that a name like 'gpt2:L12H768' or 'gpt2:L2H64V512P128' gives: layers, hidden width, tokens of the
    vocabulary, positions. None for another name, SpecError for a shape that cannot be."""
    if not model.startswith("gpt2:"):
        return None
    pattern = r"gpt2:L(?P<layers>\d{1,9})H(?P<hidden>\d{1,9})(V(?P<vocabulary>\d{1,9}))?(P(?P<positions>\d{1,9}))?"
    found = re.fullmatch(pattern, model, re.ASCII)
    shape = (
        Shape(**{name: int(size) for name, size in found.groupdict().items() if size})
        if found
        else Shape(0, 0)
    )
    if (
        not (shape.layers and shape.hidden and shape.positions)
        or shape.hidden % HEAD
        or shape.vocabulary <= BYTES
    ):
        raise SpecError(
            f"model {model!r}: a shape is written like gpt2:L12H768V50257P1024, layers, width (a multiple of {HEAD}), "
            f"vocabulary (more than {BYTES}) and positions, of which the last two may be left out"
        )
    return shape
