"""How much work a run is, on what: the presets. Standard library only."""

import dataclasses
import numbers
from typing import get_type_hints

from qa_lib.errors import SpecError, find

MOST = 2**31 - 1  # of what is counted here
# Tokens of an answer at most where nothing else is said, as in run_qa of transformers.
ANSWER_TOKENS = 30
OWN = "local"  # the preset of who gives data and a model, and names none
# The presets for one's own training, at which `plan` chooses the micro-batch
# (lab/search/recommend.py). All others compare what the reference project compared, at its
# micro-batch.
QUICKEST = (OWN, "full", "quality")


def whole_number(name: str, value: object, least: int, most: int = MOST) -> int:
    """Return the value as a whole number in these bounds; it may be NumPy's.

    Raises SpecError for any other value.
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise SpecError(
            f"{name} is {str(value)[:40]!r}, and not a whole number from {least} to {most}"
        )
    return int(value)


def stride_of(max_length: int, usual: int) -> int:
    """Return how many tokens neighbouring windows of `max_length` tokens share.

    It is the usual number, but a third of the window where that would be more than half of it,
    which would leave a question and new tokens too little room. For the usual 128: 42 at 128
    tokens, 85 at 255, 128 from 256 on.
    """
    return usual if 2 * usual <= max_length else max_length // 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """How much work, on what. All fields that differ from their defaults are part of a run's hash.

    Learning-rate schedule and effective batch belong here, so that variants stay comparable. Raises
    SpecError for values of another type, and for numbers that cannot be.
    """

    name: str
    task: str = "qa"
    """A name in `TASKS` (spec/tasks.py)."""
    model: str = "bert-base-uncased"
    """"tiny", a name of the hub, or "" where --model must name a folder."""
    data: str = "squad_v2"
    """"synthetic:N", a name of the hub, or "" where --data must name a file or folder."""
    max_length: int = 384
    """Tokens of a sample, at most."""
    stride: int = 128
    """Tokens that neighbouring samples of a paragraph share."""
    max_answer_length: int | None = ANSWER_TOKENS
    """Tokens of an answer, at most; None: as many as the training answers need
    (`answer_limit` in data/labels.py)."""
    effective_batch: int | None = 32
    """Samples per optimizer step; None: one micro-batch, however large."""
    batch_tokens: int | None = None
    """Tokens per optimizer step, in place of effective_batch where samples are full."""
    learning_rate: float = 3e-5
    recipe_rates: bool = True
    """Whether recipes multiply the rate; not for a model that starts from random weights."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises."""
    steps: int | None = None
    """Optimizer steps; None: `epochs` counts."""
    epochs: int | None = None
    """Passes over the training samples; None: `steps` counts."""
    measure_from: int = 100
    """Steps before this one are warm-up and not timed."""
    quality: bool = False
    """Whether the model is scored and kept; without it random weights will do."""
    checkpoint_every: int = 0
    """Optimizer steps from one checkpoint to the next; 0: there are none."""
    time_limit_s: int = 3600
    threads: int | None = None
    """Threads of a run on a CPU; None: one for each core."""
    limit_gib: float | None = None
    """GPU memory that the run may take; None: all there is."""

    def __post_init__(self):
        for name, kind in _TYPES.items():
            _check_type(name, getattr(self, name), kind)
        if not 0 < self.learning_rate < 1:
            raise SpecError(f"learning rate {self.learning_rate:g} is not between 0 and 1")

    @property
    def batch(self) -> int | None:
        """Samples per optimizer step; None: one micro-batch."""
        return self.batch_tokens // self.max_length if self.batch_tokens else self.effective_batch

    def check_length(self, model: str, most: int) -> None:
        """Raise SpecError where samples are longer than the `most` tokens that the model takes.

        It is raised for a model that takes no token, too.
        """
        if most < 1:
            raise SpecError(
                f"{model} has no position for a token: its config.json gives "
                "max_position_embeddings or pad_token_id wrongly"
            )
        if self.max_length > most:
            raise SpecError(
                f"{model} takes {most} tokens, and samples of preset {self.name} have "
                f"{self.max_length}"
            )


_TYPES = get_type_hints(Preset)
MAY_BE_ZERO = ("stride", "measure_from", "checkpoint_every")


def _check_type(name: str, value: object, kind: type) -> None:
    """Raise SpecError where the value of a preset's field is not of its type."""
    if kind in (int, int | None):
        if value is not None or kind is int:
            whole_number(name, value, 0 if name in MAY_BE_ZERO else 1)
        return
    takes_numbers = kind in (float, float | None)
    fits = isinstance(value, kind | int if takes_numbers else kind)
    if isinstance(value, bool) and kind is not bool:
        fits = False
    if not fits:
        wanted = {float: "a number", bool: "True or False"}.get(kind, "a text")
        raise SpecError(f"{name} is {str(value)[:40]!r}, and not {wanted}")


_TABLE = [
    Preset(
        name="smoke",
        model="tiny",
        data="synthetic:1600",
        max_length=96,
        stride=32,
        effective_batch=16,
        learning_rate=4e-3,
        recipe_rates=False,
        steps=400,
        measure_from=30,
        quality=True,
        checkpoint_every=100,
        time_limit_s=300,
        threads=1,
    ),
    Preset(
        name="bench",
        steps=300,
    ),
    # For variants in several processes, which start slowly: enough steps to time.
    Preset(
        name="parallel",
        steps=150,
        measure_from=50,
    ),
    # The reference project's protocol for memory: one step to settle and one to measure, of one
    # micro-batch each.
    Preset(
        name="vram",
        effective_batch=None,
        steps=2,
        measure_from=1,
        time_limit_s=900,
    ),
    # For curves over micro-batch and length, and for the search of the largest micro-batch that
    # memory takes.
    Preset(
        name="sizing",
        effective_batch=None,
        steps=60,
        measure_from=30,
        time_limit_s=900,
    ),
    # For differences between variants with intervals over seeds; 2e-4 was the best rate that was
    # tried for A1 (groups *-tune).
    Preset(
        name="quality",
        model="",
        data="",
        learning_rate=2e-4,
        epochs=3,
        quality=True,
    ),
    # The same training without a score, to tell its minutes; weights may be random.
    Preset(
        name="minutes",
        model="",
        data="",
        epochs=3,
        time_limit_s=7200,
    ),
    # Like `quality`, for questions that all have an answer: never answering has an F1 of 0.
    Preset(
        name="answerable",
        model="",
        data="",
        learning_rate=2e-4,
        epochs=3,
        quality=True,
    ),
    # For records of docs/speedrun.md: a model and data of the hub, else like `quality`.
    Preset(
        name="speedrun",
        model="sentence-transformers/all-MiniLM-L6-v2",
        data="squad_v2",
        learning_rate=2e-4,
        epochs=3,
        quality=True,
    ),
    # For what a batch is worth: the noise of gradients, steps to one loss (family P, with --batch).
    Preset(
        name="critical-batch",
        model="",
        data="",
        learning_rate=2e-4,
        epochs=3,
        quality=True,
    ),
    Preset(
        name="full",
        epochs=3,
        quality=True,
        checkpoint_every=500,
        time_limit_s=21_600,
    ),
    # For one's own data, whose answers may be longer than SQuAD's.
    Preset(
        name="local",
        model="",
        data="",
        max_answer_length=None,
        epochs=3,
        quality=True,
        checkpoint_every=500,
        time_limit_s=21_600,
    ),
    Preset(
        name="lm-smoke",
        task="lm",
        model="gpt2:L2H64V1024",
        data="synthetic:1600",
        max_length=64,
        stride=32,
        batch_tokens=1024,
        learning_rate=5e-3,
        recipe_rates=False,
        steps=120,
        measure_from=30,
        quality=True,
        checkpoint_every=60,
        time_limit_s=300,
        threads=1,
    ),
    Preset(
        name="lm-bench",
        task="lm",
        model="gpt2:L12H768",
        data="Salesforce/wikitext:wikitext-103-raw-v1",
        max_length=1024,
        stride=64,
        batch_tokens=32_768,
        learning_rate=6e-4,
        recipe_rates=False,
        steps=150,
        measure_from=50,
    ),
    # Like `sizing`, with positions for every context length up to 16,384.
    Preset(
        name="lm-sizing",
        task="lm",
        model="gpt2:L12H768P16384",
        data="Salesforce/wikitext:wikitext-103-raw-v1",
        max_length=1024,
        stride=64,
        effective_batch=None,
        learning_rate=6e-4,
        recipe_rates=False,
        steps=60,
        measure_from=30,
        time_limit_s=900,
    ),
    # Small enough for differences between variants, sizes and context lengths over seeds.
    Preset(
        name="lm-quality",
        task="lm",
        model="gpt2:L6H384V16384",
        data="",
        max_length=512,
        stride=64,
        batch_tokens=32_768,
        learning_rate=1e-3,
        recipe_rates=False,
        epochs=3,
        quality=True,
    ),
    Preset(
        name="lm-full",
        task="lm",
        model="gpt2:L12H768",
        data="Salesforce/wikitext:wikitext-103-raw-v1",
        max_length=1024,
        stride=64,
        batch_tokens=131_072,
        learning_rate=6e-4,
        recipe_rates=False,
        epochs=3,
        quality=True,
        checkpoint_every=500,
        time_limit_s=21_600,
    ),
]
PRESETS = {preset.name: preset for preset in _TABLE}


def find_preset(name: str) -> Preset:
    """Return the preset of that name. Raises UnknownName for a name that none has."""
    return find("preset", name, PRESETS)


def named_or_own(preset: str | None, data: object, model: object) -> str:
    """Return the name of the preset that is meant: OWN where data and a model are given alone.

    Raises SpecError where no preset is given, and data or a model is not.
    """
    if preset is not None:
        return preset
    if data and model:
        return OWN
    raise SpecError(
        f"no preset is named: give --preset ({', '.join(PRESETS)}), "
        f"or --data and --model for {OWN!r}"
    )


def sized(
    preset: Preset,
    epochs: int | None = None,
    learning_rate: float | None = None,
    max_length: int | None = None,
    batch: int | None = None,
    max_answer_length: int | None = None,
) -> Preset:
    """Return the preset with these in place of its own, unless they are 0 or None.

    `batch` is in samples of an optimizer step. Raises SpecError for numbers that cannot be, and for
    windows that do not make up the tokens of a step.
    """
    changes = {}
    if epochs:
        changes |= {"steps": None, "epochs": epochs}
    if learning_rate:
        is_number = isinstance(learning_rate, numbers.Real) and not isinstance(learning_rate, bool)
        changes["learning_rate"] = float(learning_rate) if is_number else learning_rate
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
    changed = dataclasses.replace(preset, **changes)
    _check_windows(changed)
    return changed


def _check_windows(preset: Preset) -> None:
    """Raise SpecError for windows of a length that cannot be, or that do not make up a step."""
    length = preset.max_length
    step_tokens = preset.batch_tokens
    longest = step_tokens or length
    if not 0 < preset.stride < length <= longest:
        raise SpecError(
            f"{length} tokens are too few or too many: a sample of preset {preset.name!r} has at "
            f"least 3, and at most {step_tokens or 'what the model takes'}"
        )
    if step_tokens and step_tokens % length:
        divisors = [n for n in range(3, step_tokens + 1) if step_tokens % n == 0]
        shorter = [n for n in divisors if n < length]
        longer = [n for n in divisors if n > length]
        nearest = shorter[-1:] + longer[:1]
        raise SpecError(
            f"samples of {length} tokens do not make up the {step_tokens:,} tokens of a step at "
            f"preset {preset.name!r}: take {' or '.join(map(str, nearest))} tokens, or give --batch"
        )
