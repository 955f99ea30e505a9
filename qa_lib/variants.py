"""What is compared: the variants table, the scales, and the spec that one run is made of.

A `Variant` names its parent and the one `Settings` field it changes. A variant, a `Scale` and a seed, together with
the identity of data and model, resolve to a frozen `Spec`; its hash names the run. Standard library only, so that the
driver and the tests can plan a sweep without importing torch.
"""

import argparse
import dataclasses
import difflib
import json
import re
from dataclasses import dataclass


class SpecError(ValueError):
    """A run that cannot be specified as asked."""


class UnknownName(SpecError):
    """A variant, scale, family or setting that does not exist; the message suggests the nearest."""


@dataclass(frozen=True)
class Settings:
    """Every knob of a run. The defaults are row A1, the baseline of the seeds."""

    engine: str = "loop"  # loop: the visible loop of train.py | trainer: transformers.Trainer
    precision: str = "fp16"  # autocast to fp16 (with GradScaler) or bf16 | fp32
    attention: str = "eager"  # eager | sdpa; packed rows: flash | efficient | blockmask, sdpa takes what the GPU has
    projections: str = "separate"  # query, key and value: separate | fused into one matrix product
    dropout: str = "philox"  # random bits of the hidden states' dropout: philox, PyTorch's generator | hash
    feed_forward: str = "native"  # its products in the precision's type: native | fp8
    compile: str = "none"  # none | a backend name of torch.compile
    padding: str = "max"  # max: to the scale's max_length | longest: of the micro-batch | packed: none, end to end
    order: str = "random"  # random | bucketed: micro-batches of like length, in random order
    trainable: str = "all"  # a recipe, see find_recipe
    optimizer: str = "adamw"  # adamw | fused: one kernel, no wait for the device | adamw8bit
    weights: str = "fp32"  # fp32: cast where used | half: kept in the precision's type, fp32 masters in the optimizer
    step: str = "eager"  # eager: kernel by kernel | graph: the whole step replayed as one CUDA graph
    checkpointing: bool = False  # recompute the layers' activations in the backward pass
    join: str = "id"  # predictions to questions: by id | by position, the fault of A4-b
    micro_batch: int = 8  # features in one forward pass


@dataclass(frozen=True)
class Recipe:
    """Which parameters train. `lr_factor` multiplies the scale's learning rate, since PEFT wants a larger one."""

    kind: str  # all | lora | biases | top
    lr_factor: float = 1.0
    targets: str | tuple[str, ...] = ()  # lora: peft's target_modules
    rank: int = 8  # lora: r; alpha is 2 r
    frozen: tuple[int, int] = (0, 12)  # top: this share of the layers is frozen ...
    frozen_side: str = "bottom"  # ... counted from the bottom (with the embeddings) or from the top


RECIPES = {
    "all": Recipe("all"),
    "lora-qv": Recipe("lora", targets=("query", "value")),
    # Rank and rate by `tune`: rank 8 at this rate, and ranks above 32, end one to three F1 lower (LOG.md).
    "lora-all": Recipe("lora", lr_factor=5.0, targets=("query", "key", "value", "dense"), rank=32),
    "biases": Recipe("biases", lr_factor=30.0),
    "freeze-bottom-10": Recipe("top", frozen=(10, 12)),
    "freeze-last-4": Recipe("top", frozen=(4, 12), frozen_side="top"),
}


@dataclass(frozen=True)
class Variant:
    """One row: `change` holds at most one field of Settings, the difference to `parent`."""

    name: str
    parent: str | None
    change: dict
    why: str

    @property
    def family(self) -> str:
        return self.name[0]

    @property
    def settings(self) -> Settings:
        base = VARIANTS[self.parent].settings if self.parent else Settings()
        return dataclasses.replace(base, **self.change)


VARIANTS = {
    row.name: row
    for row in [
        Variant(
            "A1",
            None,
            {},
            "The baseline: fp16, eager attention, every feature padded to the limit, AdamW, no compiler.",
        ),
        Variant(
            "A0",
            "A1",
            {"engine": "trainer"},
            "What most people would run: the same recipe through transformers.Trainer.",
        ),
        Variant("A0-sdpa", "A0", {"attention": "sdpa"}, "The Trainer with fused attention, which is its default."),
        Variant(
            "A0-nb", "A0-sdpa", {"padding": "longest"}, "The Trainer with its usual collator: padded to the longest."
        ),
        Variant(
            "A0-best", "A0-nb", {"order": "bucketed"}, "The Trainer with all that pays: batches of like length, too."
        ),
        Variant(
            "A0-compile", "A0-best", {"compile": "inductor"}, "Whether torch.compile helps the Trainer at its best."
        ),
        Variant(
            "A2",
            "A1",
            {"attention": "sdpa"},
            "Fused attention keeps the score matrix out of memory and saves launches.",
        ),
        Variant(
            "A3", "A2", {"compile": "inductor"}, "The compiler fuses elementwise work and removes Python from the step."
        ),
        Variant(
            "A4-nb",
            "A3",
            {"padding": "longest"},
            "Padding only to the longest of the batch; in random order one long feature spoils it.",
        ),
        Variant(
            "A4",
            "A4-nb",
            {"order": "bucketed"},
            "Batches of like length make dynamic padding pay: half of a padded batch is not text.",
        ),
        Variant(
            "A4-b",
            "A4",
            {"join": "position"},
            "The seeds' failed ablation on purpose: sorted predictions joined to unsorted questions.",
        ),
        Variant(
            "B1",
            "A3",
            {"trainable": "lora-qv"},
            "LoRA r=8 on query and value at the full fine-tune's rate, as in the seeds.",
        ),
        Variant(
            "B1-all",
            "A3",
            {"trainable": "lora-all"},
            "LoRA r=32 on every linear layer at five times the full fine-tune's rate.",
        ),
        Variant("B2", "A3", {"trainable": "biases"}, "BitFit: only biases and the answer head train."),
        Variant(
            "B3",
            "A3",
            {"trainable": "freeze-bottom-10"},
            "The bottom 10 of 12 layers and the embeddings frozen: the backward pass stops early.",
        ),
        Variant(
            "B3-last4",
            "A3",
            {"trainable": "freeze-last-4"},
            "The last 4 of 12 layers frozen, as the proposal wrote: gradients still pass through them.",
        ),
        Variant("C1", "A3", {"optimizer": "adamw8bit"}, "Adam's two moments in 8 bits instead of 32."),
        Variant("C2-8", "A2", {"optimizer": "adamw8bit"}, "The 8-bit optimizer alone, without the compiler."),
        Variant("C2", "A3", {"checkpointing": True}, "Activations are recomputed instead of kept: memory for time."),
        Variant("D1", "A3", {"compile": "aot_eager"}, "The compiler's graph capture without its code generation."),
        Variant(
            "D1-cudagraphs",
            "A3",
            {"compile": "cudagraphs"},
            "Launch overhead alone: captured graphs of unfused kernels.",
        ),
        Variant(
            "D1-nvfuser",
            "A3",
            {"compile": "nvfuser"},
            "The backend the proposal names; torch.compile has none any more.",
        ),
        Variant(
            "E1", "A3", {"padding": "packed"}, "No padding at all: features end to end in rows of one static length."
        ),
        Variant(
            "E1-efficient", "E1", {"attention": "efficient"}, "The kernel that a T4 has, in FlashAttention's place."
        ),
        Variant(
            "E2",
            "E1",
            {"optimizer": "fused"},
            "AdamW as one kernel, with rate and step count on the device: no waiting.",
        ),
        Variant("E3", "E2", {"step": "graph"}, "The whole step is one launch, so that a slow host no longer matters."),
        Variant(
            "E4", "E3", {"precision": "bf16"}, "No loss scaling; the same matrix rate on this generation of chips."
        ),
        Variant(
            "E5",
            "E4",
            {"weights": "half"},
            "Weights, gradients and residual stream in bf16 over fp32 masters: no casts, and half the bytes.",
        ),
        Variant(
            "E6",
            "E5",
            {"projections": "fused"},
            "Query, key and value in one product: wider tiles, fewer kernels.",
        ),
        Variant(
            "E-best",
            "E6",
            {"dropout": "hash"},
            "The recommended stack. Random bits for dropout at a tenth of the instructions.",
        ),
        Variant(
            "E-fp8",
            "E-best",
            {"feed_forward": "fp8"},
            "Half of the multiplications in 8-bit floats, where the chip has them.",
        ),
        Variant(
            "E-t4",
            "E3",
            {"projections": "fused"},
            "What is left of the stack on a GPU without bf16 and FlashAttention, such as a T4.",
        ),
        Variant("EC1", "E1", {"optimizer": "adamw8bit"}, "Packed rows with 8-bit moments: towards the least memory."),
        Variant(
            "EC2", "EC1", {"checkpointing": True}, "The leanest full fine-tune: packed, 8-bit moments, recomputed."
        ),
        Variant("EB1-lean", "EC2", {"trainable": "lora-all"}, "The leanest row of all: LoRA on top of that."),
        Variant(
            "EB1",
            "E5",
            {"trainable": "lora-qv"},
            "Does LoRA still pay once the step is fused and captured?",
        ),
        Variant("EB1-all", "E5", {"trainable": "lora-all"}, "And LoRA on every linear layer?"),
        Variant("EB2", "E-best", {"trainable": "biases"}, "And biases alone?"),
        Variant(
            "EB3", "E-best", {"trainable": "freeze-bottom-10"}, "And freezing, which shortens the backward pass itself?"
        ),
    ]
}
FAMILIES = {"A": "systems", "B": "peft", "C": "memory", "D": "backends", "E": "beyond"}  # family -> notebook


def nearest(kind: str, name: str, known) -> str:
    folded = {word.casefold(): word for word in known}
    close = [folded[word] for word in difflib.get_close_matches(name.casefold(), folded, 1, 0.3)]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})"


def find_variant(name: str) -> Variant:
    """The row of that name; UnknownName otherwise."""
    if name not in VARIANTS:
        raise UnknownName(nearest("variant", name, VARIANTS))
    return VARIANTS[name]


def find_family(name: str) -> list[str]:
    """The names of a family's rows, in table order; UnknownName otherwise."""
    if name not in FAMILIES:
        raise UnknownName(nearest("family", name, FAMILIES))
    return [row.name for row in VARIANTS.values() if row.family == name]


def find_recipe(name: str) -> Recipe:
    """A recipe of RECIPES; or LoRA of any rank on the same targets, named like 'lora-all-r32', at the scale's own
    learning rate. UnknownName otherwise."""
    if found := re.fullmatch(r"(lora-[a-z]+)-r([1-9]\d*)", name):
        family, rank = found.groups()
        if family in RECIPES:
            return dataclasses.replace(RECIPES[family], rank=int(rank), lr_factor=1.0)
    if name not in RECIPES:
        raise UnknownName(nearest("trainable", name, RECIPES))
    return RECIPES[name]


def needs(settings: Settings) -> list[str]:
    """What a machine must have for these settings, by name."""
    found = []
    if settings.compile == "inductor":
        found.append("compiler")
    elif settings.compile != "none":
        found.append(f"backend {settings.compile}")
    if settings.compile == "cudagraphs" or settings.attention == "efficient":
        found.append("cuda")
    if settings.attention == "flash" or settings.precision == "bf16":
        found.append("sm80")
    if settings.feed_forward == "fp8":
        found.append("sm89")
    if settings.optimizer == "adamw8bit":
        found.append("bitsandbytes")
    return found


EXAMPLE = "example: python -m qa_lib variants --json | jq '.[] | select(.family == \"B\")'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib variants`."""
    parser.add_argument("--json", action="store_true", help="print every row with all its settings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the table of rows."""
    if args.json:
        rows = [
            dataclasses.asdict(row)
            | {"family": row.family, "settings": dataclasses.asdict(row.settings), "needs": needs(row.settings)}
            for row in VARIANTS.values()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for row in VARIANTS.values():
        change = ", ".join(f"{key} = {value}" for key, value in row.change.items()) or "baseline"
        print(f"{row.name:14}{row.parent or '-':9}{change:32}{row.why}")
    return 0
