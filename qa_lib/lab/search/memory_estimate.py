"""How much GPU memory a run will take, predicted from its spec, without a GPU.

`StepMemory` (step_memory.py) adds up the bytes. Here they become a table of MiB (`estimate`), a
number of GiB to choose variants and sizes by (`MemoryNeeds`), and peaks to compare with measured
ones (`predicted_peaks`).
"""

import pandas as pd

from qa_lib.data.load import load_data
from qa_lib.data.packing import PackedBatches
from qa_lib.errors import UserError
from qa_lib.lab.search.squad_lengths import SquadLengths
from qa_lib.lab.search.step_memory import LIBRARIES_MIB, StepMemory, config_of
from qa_lib.measure.meter import MIB
from qa_lib.model.architectures import find_encoder
from qa_lib.spec.machine import CONTEXT_GIB, gpu_of
from qa_lib.spec.presets import Preset
from qa_lib.spec.rules import adjust
from qa_lib.spec.settings import Settings
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.spec import Spec

# The allocator reserves so many times the peak that it has given out; 1.03 to 1.08 on one H200.
RESERVED = 1.05
# The share of a GPU's memory that a run may be predicted to take. The rest is for errors of the
# estimate, which is within a tenth of what was measured.
USABLE = 0.9
# The measured size of weights and optimizer state differs from the predicted one by less than this
# share, if model and code are the same.
TOLERANCE = 0.02


def why_unpredicted(spec: Spec) -> str | None:
    """Return why the memory of a spec cannot be predicted, in words; None if it can."""
    why = "what {} keeps for its backward pass is not predicted"
    if spec.settings.qat != "none":
        return why.format("training on rounded weights")
    if spec.settings.engine == "searched":
        # The estimate was a fifth too low for BERT at 32 samples, and two fifths at 8.
        return why.format("the searched rival")
    model_type = config_of(spec).model_type
    if not find_encoder(model_type, spec.model_source, spec.preset.task).memory_known:
        return why.format(model_type)
    return None


def estimate(spec: Spec, samples=None) -> dict:
    """Return the MiB that a run takes on its GPU, by what they are for, and the phase of the peak.

    The keys are params_mib, grads_mib, optimizer_mib, activations_mib, workspace_mib, peak_mib,
    reserved_mib and phase. The lengths of `samples` decide how large a packed micro-batch is.
    Without `samples` the spec's own data are read for that.

    Raises UserError for a spec without a GPU, and where `why_unpredicted` gives a reason.
    """
    if spec.hardware == "cpu":
        raise UserError(
            f"{spec.variant}: the estimate is of GPU memory, and this one is planned for a CPU"
        )
    why = why_unpredicted(spec)
    if why:
        raise UserError(f"{spec.variant}: {why}")
    step = StepMemory(spec, tokens_of_micro_batch(spec, samples))
    activations, _ = step.activations()
    phases = step.phases()
    phase = max(phases, key=phases.get)
    peak = phases[phase]
    beside_activations = step.start_of_backward() - activations
    sizes = {
        "params": step.weights(),
        "grads": step.gradients(),
        "optimizer": step.optimizer(),
        "activations": activations,
        "workspace": LIBRARIES_MIB * MIB + step.casts() + beside_activations,
        "peak": peak,
        "reserved": RESERVED * peak,
    }
    mib = {f"{name}_mib": size / MIB for name, size in sizes.items()}
    return {**mib, "phase": phase}


def tokens_of_micro_batch(spec: Spec, samples=None) -> int:
    """Return the most tokens that a micro-batch has; if packed, by the lengths of the samples."""
    if spec.settings.padding == "packed":
        if samples is None:
            samples = load_data(spec).samples
        return PackedBatches(samples, spec).budget
    # A batch of the longest samples comes up in any epoch.
    return spec.settings.micro_batch * spec.preset.max_length


class MemoryNeeds:
    """Predicts how much of a GPU runs take; reads each data set once for each length of windows."""

    def __init__(self):
        self._samples = {}  # by (data, model, max_length, stride): samples that had to be read

    def gib(self, spec: Spec) -> float:
        """Return the GiB that a run is predicted to take of its GPU.

        It is 0 where that cannot be predicted (`why_unpredicted`). Whoever compares it with what is
        free then takes the run to fit: it may, and is not passed over for want of an estimate.
        """
        if why_unpredicted(spec):
            return 0.0
        reserved_mib = estimate(spec, self._samples_of(spec))["reserved_mib"]
        return reserved_mib / 1024 + CONTEXT_GIB

    def _samples_of(self, spec: Spec):
        """Return the samples whose lengths decide; None where every sample has the full length."""
        if spec.settings.padding != "packed":
            return None
        window = (spec.preset.max_length, spec.preset.stride)
        if spec.data_source == "squad_v2":  # its lengths are known without its data
            return SquadLengths(*window)
        key = (spec.data_source, spec.model_source, *window)  # a model has its own tokenizer
        if key not in self._samples:
            self._samples[key] = load_data(spec).samples
        return self._samples[key]


def predicted_peaks(runs: pd.DataFrame, model: str = "") -> pd.Series:
    """Return the peak in MiB that `estimate` gives for runs of `load_runs`, by their index.

    `model`, a folder or a name, stands for the model of all runs; without it each run has the model
    of its record. The peak is NaN for a run on a CPU, for one whose model is not known, for one
    that `why_unpredicted` has a reason for, and where the record's weights and optimizer state take
    another size than those predicted: it is of another model or of an older optimizer.
    """
    peaks = {}
    estimates = {}  # by spec, which is the same for all seeds
    for index, run in runs["run"].items():
        spec = _spec_of_record(run.record, model)
        if spec.hardware == "cpu" or not spec.model_source or why_unpredicted(spec):
            continue
        key = repr(spec)
        if key not in estimates:
            # Synthetic data are made when they are asked for. All else may not be on this machine,
            # and is taken for SQuAD.
            lengths = None
            if not spec.data_source.startswith("synthetic:"):
                lengths = SquadLengths(spec.preset.max_length, spec.preset.stride)
            estimates[key] = estimate(spec, lengths)
        if _has_same_state(estimates[key], run.record):
            peaks[index] = estimates[key]["peak_mib"]
    return pd.Series(peaks, runs.index, dtype=float)


def _has_same_state(estimated: dict, record: dict) -> bool:
    """Return whether weights and optimizer state are as large as estimated, or not recorded."""
    weights = record["memory"]["params_mib"]
    optimizer = record["memory"]["optimizer_mib"]
    if weights is None or optimizer is None:
        return True
    measured = weights + optimizer
    expected = estimated["params_mib"] + estimated["optimizer_mib"]
    return abs(expected - measured) < TOLERANCE * measured


def _spec_of_record(record: dict, model: str) -> Spec:
    """Return a record's spec as far as memory depends on it: the same for all seeds."""
    recorded = record["spec"]
    preset = Preset(**recorded["preset"])
    asked = Settings(**recorded["settings"])
    # A search records the capability whose kernels it took, which may be older than the GPU's.
    settings, adjusted = adjust(asked, gpu_of(recorded["sm"] or record["env"]["sm"]))
    if not model:
        # A model that is known by name need not be on this machine.
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
