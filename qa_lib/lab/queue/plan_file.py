"""A plan of evidence: a TOML file that fixes, before any result is seen, which runs are made.

`docs/evidence.toml` is one. Its key `cards` names the hardware, and each table of its list `groups`
has the fields of Group. Groups are made in the order of the file.
"""

import tomllib
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter
from pydantic import ValidationError as Invalid

from qa_lib.errors import UserError, find, nearest, one_line
from qa_lib.spec.presets import MOST, Preset, find_preset, sized
from qa_lib.spec.spec import group_name
from qa_lib.spec.variants import VARIANTS, find_variant

Text = Annotated[StrictStr, Field(min_length=1)]
Count = Annotated[StrictInt, Field(ge=1, le=MOST)]
Several = Annotated[StrictInt, Field(ge=2, le=MOST)]
Rate = Annotated[StrictFloat, Field(gt=0, lt=1)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How many samples and processes the runs of a variant have."""

    micro_batch: int
    """Samples in one forward pass."""
    batch: int | None
    """Samples in an optimizer step, of all processes together; None: the preset's."""
    world: int
    """Processes, one a GPU."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs of some variants with some seeds, which answer one question."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    name: Text
    """What the plan calls it; it is not the name of a folder of runs."""

    why: Text
    """What the runs are evidence for, in one sentence."""

    preset: Text
    """A name in spec/presets.py."""

    model: Text
    """The model's name in records: that of its folder, or a generated model such as `tiny`."""

    data: Text
    """The data's name in records: that of their folder or file, or generated data such as
    `synthetic:1600`."""

    micro_batch: Count
    """Samples in one forward pass."""

    variants: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Names in spec/variants.py, in the order in which a block runs them."""

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    """Each makes a run of every variant."""

    alone: StrictBool
    """Whether a run has the host for itself, as a speed needs.

    Then the runs of a seed are a block: one after the other, and done again together if one is
    missing. Otherwise runs are single, and each GPU of the host has two, which take turns in
    training.
    """

    seconds: Count
    """What a run is expected to take, on average over the variants, until a like one is
    recorded."""

    batch: Count | None = None
    """Samples in an optimizer step, of all GPUs together; None: the preset's."""

    world: Several | None = None
    """Processes of each run, one a GPU, for variants that take several; None: no variant does."""

    one_gpu_batch: Count | None = None
    """Samples in an optimizer step, and in its one forward pass, of those variants of a group with
    `world` that take one process; None: there are none.

    They run on one GPU in the same block. Set it to `batch` divided by `world` to compare at as
    many samples a GPU, or to `batch` to compare at as many samples a step.
    """

    learning_rate: Rate | None = None
    """Peak of the learning rate; None: the preset's, which was searched for a small model."""

    cold: StrictBool = False
    """Whether each run begins with empty caches, so that it compiles all it needs."""

    def sizes(self, variant: str) -> Sizes:
        """Return the sizes of a variant's runs."""
        if self.world is None:
            return Sizes(micro_batch=self.micro_batch, batch=self.batch, world=1)
        if takes_several(variant):
            return Sizes(micro_batch=self.micro_batch, batch=self.batch, world=self.world)
        return Sizes(micro_batch=self.one_gpu_batch, batch=self.one_gpu_batch, world=1)

    def sized_preset(self, variant: str) -> Preset:
        """Return the preset with a variant's batch and the group's rate, as records have it."""
        batch = self.sizes(variant).batch
        return sized(find_preset(self.preset), batch=batch, learning_rate=self.learning_rate)

    def runs_group(self, card: str) -> str:
        """Return the name of the folder and the archive that hold its runs."""
        return group_name(card, self.preset, find_preset(self.preset).task)


@dataclass(frozen=True, kw_only=True)
class EvidencePlan:
    """All that a file of evidence says."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    cards: Annotated[tuple[Text, ...], Field(min_length=1)]
    """The hardware that all runs are made on, as the names of their folders begin, such as
    h100-80gb-hbm3. On each of them the plan is made on its own, since times of two cards are no
    ratio."""

    groups: Annotated[list[Group], Field(min_length=1)]
    """In the order in which they are made."""

    codes: tuple[Text, ...] = ()
    """Digests of earlier code, or their beginnings, whose records count beside those of the code at
    hand: it computed the same."""


def takes_several(variant: str) -> bool:
    """Return whether a variant is trained by several processes, one a GPU."""
    return find_variant(variant).settings.parallel != "none"


def read_plan(path: Path) -> EvidencePlan:
    """Return the plan of a file.

    Raises UserError, which names the file and the group, for a file that cannot be read, a key that
    is unknown, missing, has an impossible value or does not go with the others, an unknown variant
    or preset, and a run that is there twice.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"{path}: {problem.strerror}") from None
    except ValueError as problem:  # no TOML, or no UTF-8
        raise UserError(one_line(f"{path}: not readable as TOML ({problem})")) from None
    try:
        plan = TypeAdapter(EvidencePlan).validate_python(content)
    except Invalid as problem:
        raise UserError(one_line(f"{path}: {_first_fault(problem, content)}")) from None
    for group in plan.groups:
        try:
            _check_names(group)
            _check_together(group)
        except UserError as problem:
            raise UserError(f"{path}: group {group.name!r}: {problem}") from None
    _check_once(path, plan)
    return plan


def _first_fault(problem: Invalid, content: dict) -> str:
    """Return in words what is wrong with the content of a file.

    An unknown key goes before one that is missing: the one is often the other, misspelt.
    """
    faults = problem.errors()
    unknown = [fault for fault in faults if fault["type"] == "unexpected_keyword_argument"]
    fault = (unknown or faults)[0]
    place = fault["loc"]
    of_group = place[0] == "groups" and len(place) > 1
    where = ""
    if of_group:
        table = content["groups"][place[1]]
        name = table.get("name") if isinstance(table, dict) else None
        where = f"group {name or place[1] + 1!r}: "
    keys = ".".join(str(part) for part in (place[2:] if of_group else place))
    if unknown:
        known = [field.name for field in fields(Group if of_group else EvidencePlan)]
        return where + nearest("key", keys, known)
    if fault["type"] == "missing":
        return f"{where}{keys!r} is missing"
    return f"{where}{keys} is {str(fault['input'])[:40]!r}: {fault['msg']}"


def _check_names(group: Group) -> None:
    """Raise UserError for a preset, a variant, or a pair of them, that cannot be run."""
    task = find_preset(group.preset).task
    for name in group.variants:
        variant = find("variant", name, VARIANTS)  # which `recommended` is not
        if variant.task != task:
            raise UserError(f"{name} is a variant of task {variant.task}, and the preset of {task}")


def _check_together(group: Group) -> None:
    """Raise UserError for keys of a group that do not go together."""
    several = [name for name in group.variants if takes_several(name)]
    single = [name for name in group.variants if not takes_several(name)]
    if group.cold and not group.alone:
        raise UserError("cold runs are timed, and need alone = true")
    if group.world and not group.alone:
        raise UserError("runs on several GPUs are timed, and need alone = true")
    if several and not group.world:
        raise UserError(f"{several[0]} takes several GPUs: give world, such as world = 2")
    if group.world and not several:
        raise UserError(f"world is {group.world}, and no variant takes several GPUs")
    if group.world and single and not group.one_gpu_batch:
        raise UserError(f"{single[0]} takes one GPU beside others: give one_gpu_batch")
    if group.one_gpu_batch and not (group.world and single):
        raise UserError("one_gpu_batch is there, and no variant takes one GPU beside others")


def _check_once(path: Path, plan: EvidencePlan) -> None:
    """Raise UserError where two places of a plan stand for one run: it would have one record."""
    asked = Counter(
        (
            group.sized_preset(variant),
            group.model,
            group.data,
            group.sizes(variant),
            variant,
            seed,
        )
        for group in plan.groups
        for variant in group.variants
        for seed in group.seeds
    )
    run, count = asked.most_common(1)[0]
    if count > 1:
        *_, variant, seed = run
        groups = [group.name for group in plan.groups if variant in group.variants]
        raise UserError(
            f"{path}: {variant} with seed {seed} at preset {run[0].name} is there {count} times "
            f"(groups with {variant}: {', '.join(groups)}): give each group other seeds"
        )
