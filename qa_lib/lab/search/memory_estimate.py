"""How much GPU memory a run will take, from its spec alone: before a card is rented.

`StepMemory` (step_memory.py) adds up the bytes. Here they become a table of MiB (`estimate`), a
number of GiB to choose variants and sizes by (`MemoryNeeds`), and peaks that stand beside measured
ones (`predicted`).
"""

import pandas as pd

from qa_lib.data.load import load_data
from qa_lib.data.packing import PackedBatches
from qa_lib.errors import UserError
from qa_lib.lab.search.squad_lengths import SquadLengths
from qa_lib.lab.search.step_memory import LIBRARIES_MIB, StepMemory, config_of
from qa_lib.measure.meter import MIB
from qa_lib.model.architectures import find_encoder
from qa_lib.spec.machine import CONTEXT_GIB, Machine
from qa_lib.spec.presets import Preset
from qa_lib.spec.rules import adjust
from qa_lib.spec.settings import Settings
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.spec import Spec

RESERVED = 1.05  # measured on one H200: what the allocator reserves over its peak, 3 to 8 % more
# Share of a GPU's memory that a run may be predicted to take: the estimate is within a tenth of
# what was measured.
USABLE = 0.9
# By at most this share weights and optimizer state of one model and one code differ, measured and
# predicted.
TOLERANCE = 0.02


def unpredicted(spec: Spec) -> str | None:
    """Return why the memory of a spec cannot be predicted, in words; None if it can."""
    if spec.settings.qat != "none":
        kind = "training on rounded weights"
    else:
        kind = config_of(spec).model_type
        if find_encoder(kind, spec.model_source, spec.preset.task).memory_known:
            return None
    return f"what {kind} keeps for its backward pass is not predicted"


def estimate(spec: Spec, samples=None) -> dict:
    """Return the MiB that a run takes on its GPU, by what they are for, and the phase of the peak.

    The keys are params_mib, grads_mib, optimizer_mib, activations_mib, workspace_mib, peak_mib,
    reserved_mib and phase. `samples`, of which a packed micro-batch needs the lengths, are the
    spec's own unless they are given.

    Raises UserError for a spec without a GPU, and for what is `unpredicted`.
    """
    if spec.hardware == "cpu":
        raise UserError(
            f"{spec.variant}: the estimate is of GPU memory, and this one is planned for a CPU"
        )
    why = unpredicted(spec)
    if why:
        raise UserError(f"{spec.variant}: {why}")
    step = StepMemory(spec, tokens_of_micro_batch(spec, samples))
    activations, _ = step.activations()
    phases = step.phases()
    phase = max(phases, key=phases.get)
    libraries = LIBRARIES_MIB * MIB
    sizes = {
        "params": step.weights(),
        "grads": step.gradients(),
        "optimizer": step.optimizer(),
        "activations": activations,
        "workspace": libraries + step.casts() + step.start_of_backward() - activations,
        "peak": phases[phase],
        "reserved": RESERVED * phases[phase],
    }
    mib = {f"{name}_mib": size / MIB for name, size in sizes.items()}
    return {**mib, "phase": phase}


def tokens_of_micro_batch(spec: Spec, samples=None) -> int:
    """Return the most tokens that a micro-batch has; packing decides by the samples' lengths."""
    if spec.settings.padding == "packed":
        if samples is None:
            samples = load_data(spec).samples
        return PackedBatches(samples, spec).budget
    # A batch of the longest samples comes up in any epoch.
    return spec.settings.micro_batch * spec.preset.max_length


class MemoryNeeds:
    """Predicts how much of a GPU runs take, and reads data that this needs once a length."""

    def __init__(self):
        self._samples = {}  # by (max_length, stride): samples that had to be read

    def gib(self, spec: Spec) -> float:
        """Return the GiB that a run is predicted to take of its GPU; 0 where that is not known."""
        if unpredicted(spec):
            return 0.0
        reserved_mib = estimate(spec, self._samples_of(spec))["reserved_mib"]
        return reserved_mib / 1024 + CONTEXT_GIB

    def _samples_of(self, spec: Spec):
        """Return the samples whose lengths decide; None where every sample has the full length."""
        if spec.settings.padding != "packed":
            return None
        length = (spec.preset.max_length, spec.preset.stride)
        if spec.data_source == "squad_v2":
            return SquadLengths(*length)
        if length not in self._samples:
            self._samples[length] = load_data(spec).samples
        return self._samples[length]


def gpu_of(sm: int) -> Machine:
    """Return a GPU of compute capability `sm` / 10 with everything installed.

    It is for plans that are made where there is none.
    """
    return Machine(
        hardware="gpu",
        gpus=1,
        sm=sm,
        bitsandbytes=True,
        deepspeed=True,
        peft=True,
        torchao=True,
        compiler=True,
    )


def predicted(runs: pd.DataFrame, model: str = "") -> pd.Series:
    """Return the peak in MiB that `estimate` gives for runs of `load_runs`, by their index.

    It is NaN for a run on a CPU, for one that an older optimizer made, and for one whose weights
    take another size than those of `model`, a folder or a name. Without `model` it is the record's
    own.
    """
    peaks = {}
    estimates = {}  # by spec: a seed changes nothing
    for index, run in runs["run"].items():
        spec = _spec_of_record(run.record, model)
        if spec.hardware == "cpu" or not spec.model_source or unpredicted(spec):
            continue
        key = repr(spec)
        if key not in estimates:
            lengths = None
            if not spec.data_source.startswith("synthetic:"):
                lengths = SquadLengths(spec.preset.max_length, spec.preset.stride)
            estimates[key] = estimate(spec, lengths)
        if _has_same_state(estimates[key], run.record):
            peaks[index] = estimates[key]["peak_mib"]
    return pd.Series(peaks, runs.index, dtype=float)


def _has_same_state(estimated: dict, record: dict) -> bool:
    """Return whether weights and optimizer state are as large as estimated, or not recorded."""
    measured = [record["memory"]["params_mib"], record["memory"]["optimizer_mib"]]
    if None in measured:
        return True
    expected = estimated["params_mib"] + estimated["optimizer_mib"]
    return abs(expected - sum(measured)) < TOLERANCE * sum(measured)


def _spec_of_record(record: dict, model: str) -> Spec:
    """Return a record's spec, as far as memory depends on it: the same for all seeds."""
    recorded = record["spec"]
    preset = Preset(**recorded["preset"])
    asked = Settings(**recorded["settings"])
    settings, adjusted = adjust(asked, gpu_of(recorded["sm"] or record["env"]["sm"]))
    if not model:
        name = record["model"]["name"]
        has_known_shape = name == "tiny" or find_shape(name)
        model = name if has_known_shape else preset.model
    return Spec(
        variant=recorded["variant"],
        preset=preset,
        seed=0,
        asked=asked,
        settings=settings,
        adjusted=adjusted,
        skip=None,
        hardware=recorded["hardware"],
        data=record["data"],
        model=record["model"],
        data_source=record["data"]["name"],
        model_source=model,
        world=recorded["world"],
        stages=recorded["stages"] or 1,
    )
