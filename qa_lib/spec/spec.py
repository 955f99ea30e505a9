"""One run, completely: a frozen `Spec` whose hash names it.

Standard library only, so that the driver and the tests can plan a sweep without importing torch.
`resolve.py` makes specs of a variant, a preset, a seed and a machine.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

from qa_lib.spec.presets import Preset
from qa_lib.spec.recipes import Recipe, find_recipe
from qa_lib.spec.rules import replicas
from qa_lib.spec.settings import Settings

IDENTITY = 1  # the version of what a run's hash covers, and of the names in it


@dataclasses.dataclass(frozen=True)
class Spec:
    """One run, completely. Its `hash` covers what defines the run, and not where or how it runs."""

    variant: str
    """Name of the variant; where `recommended` was asked for, of the one that was chosen."""
    preset: Preset
    seed: int
    asked: Settings
    """The variant's settings."""
    settings: Settings
    """What this machine makes of them."""
    adjusted: list[str] = dataclasses.field(compare=False)
    """A sentence for each setting that this machine changes, after what was chosen for it."""
    skip: str | None
    """Why this machine cannot run it; None if it can."""
    hardware: str
    data: dict
    """Identity of the data: {name, sha256}."""
    model: dict
    """Identity of the model: {name, revision}."""
    data_source: str
    """Where to load the data from. Paths differ between machines, so that they are not hashed."""
    model_source: str
    """Where to load the model from."""
    world: int = 1
    """Processes, one for each GPU. A run that is resumed may have fewer or more
    (train/parallel/data_parallel.py)."""
    stages: int = 1
    """Processes that a micro-batch passes through, where they make up pipelines."""
    search: str = ""
    """The verb of the search that the run is a try of, "tune" or "max-batch"; "" for others."""
    sm: int | None = None
    """The compute capability x 10 whose kernels that search allowed; None for other runs."""
    own: dict = dataclasses.field(default_factory=dict, compare=False)
    """What was asked for in place of the variant's and the preset's, by `plan`'s arguments."""
    chosen: list[str] = dataclasses.field(default_factory=list, compare=False)
    """What was left to this machine (lab/search/recommend.py): "variant" by `recommended`, and
    "micro_batch" by `recommended` and the presets QUICKEST, unless that was asked for. The first
    line of `adjusted` says what was chosen."""

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of what defines the run.

        Settings and preset are in it by the fields that differ from their defaults: a new field
        whose default means what was so before moves no hash.
        """
        content = {
            "version": IDENTITY,
            "settings": _differing(self.asked, Settings()),
            "preset": _differing(self.preset, Preset(name="")),
            "seed": self.seed,
            "data": self.data,
            "model": self.model,
        }
        if self.asked.trainable != "all":  # a name does not say which rank and rate it stood for
            content["recipe"] = dataclasses.asdict(find_recipe(self.asked.trainable))
        if self.world != 1:
            content["world"] = self.world
        if self.stages != 1:
            content["stages"] = self.stages
        return sha256_of_json(content)

    @property
    def recommended(self) -> bool:
        """Whether the variant was left to this machine; if it fails, another takes its place."""
        return "variant" in self.chosen

    @property
    def recipe(self) -> Recipe:
        return find_recipe(self.settings.trainable)

    @property
    def group(self) -> str:
        """The folder that holds this run and those that it is compared with."""
        return group_name(self.hardware, self.preset.name, self.preset.task)

    @property
    def run_id(self) -> str:
        return f"{self.variant}-s{self.seed}-{self.hash[:6]}"

    @property
    def run_path(self) -> Path:
        """The run's folder below the runs folder."""
        return Path(self.group, self.run_id)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step, of all processes together."""
        if self.preset.batch:
            return self.preset.batch // self.settings.micro_batch
        return 1 if self.settings.parallel == "tensor" else self.world

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step in each process."""
        return self.micro_batches // replicas(self, self.world)


def group_name(hardware: str, preset: str, task: str) -> str:
    """Return the name of the group of a preset's runs on some hardware.

    The task is in it unless it is "qa", or the preset's name has it.
    """
    names = [hardware, preset]
    if task != "qa" and task not in preset.split("-"):
        names.append(task)
    return "-".join(names)


def sha256_of_json(content: object) -> str:
    """Return the SHA-256, in hexadecimal digits, of the canonical JSON of a value."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _differing(values: Settings | Preset, defaults: Settings | Preset) -> dict:
    """Return the fields whose values are not those of `defaults`."""
    usual = dataclasses.asdict(defaults)
    items = dataclasses.asdict(values).items()
    return {name: value for name, value in items if value != usual[name]}
