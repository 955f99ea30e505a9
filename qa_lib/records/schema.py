"""What record.json holds: a typed model for each of its sections, with a docstring for each value.

A number that was not measured is null, never 0. A value that came after a record was written has
its default when that record is read. The defaults are also those of a new record.

In memory a record is the dict that its JSON says (record.py). These models check what is read, make
a new record, and carry what meter.py measures.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

# Versions of record.json, and of the two documents that may lie beside it.
SCHEMA = "qa_lib/3"
PROFILE_SCHEMA = "qa_lib-profile/3"
QUANTIZED_SCHEMA = "qa_lib-quantized/3"

# A run or a group; folders bear these names, so that none may lead out of the runs folder.
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
Status = Literal["starting", "waiting", "running", "ok", "oom", "error", "killed", "skipped"]

# A column of a table holds integers of 64 bits. True and False are no numbers.
_FITS_A_COLUMN = Field(ge=-(2**63), lt=2**63)
WholeNumber = Annotated[StrictInt, _FITS_A_COLUMN]
Count = Annotated[WholeNumber, Field(ge=0)]
Number = Annotated[StrictInt | StrictFloat, _FITS_A_COLUMN]
Flag = StrictBool
Scores = dict[str, Number | None]
Values = dict[str, str | Flag | Number | None]


@dataclass(kw_only=True)
class SpecSection:
    """What was asked for."""

    variant: str = ""
    """Name of the variant (spec/variants.py)."""

    seed: Count = 0
    """Seed of everything random in the run."""

    hash: str = ""
    """SHA-256 of what defines the run (`Spec.hash`); its first digits end the run id."""

    hardware: str = ""
    """Name of the GPU as part of a folder's name; "cpu" where there is none."""

    world: Count = 0
    """Processes that were asked for, one a GPU."""

    stages: WholeNumber | None = None
    """Processes that a micro-batch passes through, where they make up pipelines."""

    search: str = ""
    """Verb of the search that the run is a try of, "tune" or "max-batch"; "" for other runs."""

    sm: WholeNumber | None = None
    """Compute capability x 10 whose kernels that search allowed."""

    preset: Values = field(default_factory=dict)
    """All fields of the preset (spec/presets.py), which are more than tables and figures use."""

    settings: Values = field(default_factory=dict)
    """All settings of the variant (spec/variants.py), as they were asked for."""

    adjusted: list[str] = field(default_factory=list)
    """A sentence for each thing in which the run differed from what was asked for."""

    planned_steps: WholeNumber | None = None
    """Optimizer steps of the whole training."""

    n_train: WholeNumber | None = None
    """Training samples."""

    n_eval: WholeNumber | None = None
    """Questions that the model is scored on; tokens, where the data is text."""


@dataclass(kw_only=True)
class CodeSection:
    """The checkout that the run is of (code.py)."""

    commit: str | None = None
    """Hash of the commit, 40 hexadecimal digits; null where there is no history."""

    dirty: Flag | None = None
    """Whether the code differed from the commit; null where that is not known."""

    digest: str | None = None
    """SHA-256 of all files that decide what a training computes (loaded.py).

    It tells more than a commit, which may change a page alone, and is known without a history.
    """


@dataclass(kw_only=True)
class DataSection:
    """The identity of the questions or the text, and how much there is."""

    name: str = ""
    """Name of the data set on the hub, of the file or of the folder."""

    sha256: str = ""
    """SHA-256 of its content."""

    n: Number | None = None
    """Questions to train on; words, where the data is text."""


@dataclass(kw_only=True)
class ModelSection:
    """The identity and the size of the model."""

    name: str = ""
    """Name on the Hugging Face hub, or of the folder that it was loaded from."""

    revision: str = ""
    """The commit there, or the begin of a digest of the folder's files."""

    params_total: Number | None = None
    """All parameters."""

    params_trainable: Number | None = None
    """Parameters that were trained."""

    layers: WholeNumber | None = None
    """Encoder or decoder layers."""


@dataclass(kw_only=True)
class TaskSection:
    """What a run is scored by (the task's scoring)."""

    name: str = ""
    """Name of the task, "qa" or "lm"."""

    metric: str = ""
    """The score in `quality` that variants are compared by."""

    label: str = ""
    """What people call that score."""

    higher_is_better: Flag | None = None
    """Whether a higher value of that score is the better one."""

    scores: list[str] = field(default_factory=list)
    """Names of all the scores in `quality`."""


@dataclass(kw_only=True)
class ErrorSection:
    """Why a run did not end ok."""

    kind: str | None = None
    """Class of the exception, or a word such as "killed"."""

    message: str | None = None
    """Its message, in one line."""

    step: WholeNumber | None = None
    """The optimizer step that failed, counted from 1."""


@dataclass(kw_only=True)
class StepTime:
    """Milliseconds of the measured optimizer steps."""

    n: Number | None = None
    """How many steps were measured."""

    median: Number | None = None
    """Median."""

    p10: Number | None = None
    """10th percentile."""

    p90: Number | None = None
    """90th percentile."""


@dataclass(kw_only=True)
class Time:
    """When the run took place, and how many seconds its parts took."""

    started: str = ""
    """When the record was made, in UTC, as ISO 8601."""

    ended: str | None = None
    """When the run got its terminal status."""

    prepare_s: Number | None = None
    """Seconds before the first step.

    They are for data, samples, model, the measured matrix rate, the compiler's imports, and the
    start of its processes, which go on meanwhile.
    """

    compile_s: Number | None = None
    """Seconds of compilation, a part of train_s (`Meter.compile_s`)."""

    compile_cached: Flag | None = None
    """Whether the compiler's cache had what was compiled."""

    first_step_s: Number | None = None
    """Seconds from the process's start to the end of its first training step.

    Null where the process had served another run before.
    """

    train_s: Number | None = None
    """Seconds of the optimizer steps, and of what was compiled before the first of them."""

    eval_s: Number | None = None
    """Seconds of the evaluation."""

    wall_s: Number | None = None
    """Seconds of all that, and of writing the model."""

    notebook_s: Number | None = None
    """Seconds of the process that executed the run's notebook: wall_s, and its imports."""

    data_ms: Number | None = None
    """Median milliseconds that the host takes for the inputs of a measured step.

    With several processes it is the first one's. Most of it passes while the GPU computes, so that
    the GPU waits for data that long at most. Null where transformers.Trainer fetches the inputs.
    """

    kernel_ms: Number | None = None
    """Milliseconds of a step in which the GPU ran kernels or copied.

    It is a mean over the last steps of a run, which are not timed (measure/kernel_time.py). Null
    where the model is scored, where several processes train, and on a CPU.
    """

    steps: WholeNumber | None = None
    """Optimizer steps that were trained, in all processes that worked on the run."""

    resumed_from_step: WholeNumber | None = None
    """Steps that an earlier process had done; null for a run that was never resumed."""

    step_ms: StepTime = field(default_factory=StepTime)
    """Milliseconds of the measured steps."""


@dataclass(kw_only=True)
class Speed:
    """Rates over the measured steps, of all processes together."""

    samples_per_s: Number | None = None
    """Samples a second."""

    tokens_per_s: Number | None = None
    """Tokens a second without padding; a question's tokens count, too."""

    tokens_per_s_padded: Number | None = None
    """Tokens a second with padding."""

    pad_fraction: Number | None = None
    """Share of the computed tokens that are padding."""

    gemm_utilization: Number | None = None
    """Share of gemm_tflops_measured, by the FLOPs of tokens without padding."""

    gemm_utilization_padded: Number | None = None
    """The same share, by the FLOPs of all that is computed, what is recomputed as well."""

    mfu: Number | None = None
    """The FLOPs of gemm_utilization as a share of the rate in the card's data sheet.

    No run writes it: the report computes it (lab/report/summary.py).
    """

    gemm_tflops_measured: Number | None = None
    """Matrix rate of a GPU in TFLOP/s, as the run measured it itself."""

    gpu_busy: Number | None = None
    """Share of the time in which the run's own GPU was busy, by NVML; a mean over the processes."""

    gpu_busy_polled: Number | None = None
    """Share that nvidia-smi gave after each step, over all GPUs of the host (P0-polled)."""


@dataclass(kw_only=True)
class Memory:
    """MiB of the GPU's memory, and the process's peak on the host."""

    peak_alloc_mib: Number | None = None
    """Peak of what tensors held, memory that other processes write into included."""

    peak_reserved_mib: Number | None = None
    """Peak of what PyTorch's allocator held, and of memory that other processes write into."""

    params_mib: Number | None = None
    """Parameters."""

    grads_mib: Number | None = None
    """A gradient for each parameter that is trained."""

    optimizer_mib: Number | None = None
    """The optimizer's state."""

    activations_mib: Number | None = None
    """What peak_alloc_mib holds beside parameters, gradients and optimizer."""

    host_rss_mib: Number | None = None
    """Peak of the process's memory on the host."""


@dataclass(kw_only=True)
class Energy:
    """What the GPUs used."""

    joules_per_sample: Number | None = None
    """Joules for a sample, over the measured steps, by the GPUs' own counters."""


@dataclass(kw_only=True)
class Noise:
    """The gradient noise scale's two parts (train/grad_noise.py).

    They are means over the last 32,000 samples or so of `steps`.
    """

    sqr: Number | None = None
    """Square norm of the gradient over all data."""

    var: Number | None = None
    """Variance that a single sample adds to it."""

    steps: WholeNumber | None = None
    """Optimizer steps that were seen."""


@dataclass(kw_only=True)
class Parallel:
    """How several processes shared a run; null for a run of one, but for its wrapper and noise."""

    world: WholeNumber | None = None
    """Processes at the run's end."""

    replicas: WholeNumber | None = None
    """Models that these processes have."""

    wrapper: str | None = None
    """Class that PyTorch or DeepSpeed has put around the model."""

    stages: WholeNumber | None = None
    """Stages of a pipeline (train/parallel/pipeline.py)."""

    schedule: str | None = None
    """Schedule of the pipeline."""

    bubble: Number | None = None
    """Share of a step in which the process that waits most does so."""

    bubble_formula: Number | None = None
    """The same share by the formula of the schedule."""

    backend: str | None = None
    """Library that communicates, such as "nccl"."""

    interconnect: str | None = None
    """How the GPUs are connected (measure/hardware.py)."""

    allreduce_gbs: Number | None = None
    """Bus bandwidth of one reduction in GB/s."""

    busy_ms: Number | None = None
    """Milliseconds of a step in which a GPU computes (measure/communication.py); a mean over
    processes."""

    exposed_ms: Number | None = None
    """Milliseconds of a step in which a GPU only communicates; a mean over processes."""

    rank_peak_mib: Values | None = None
    """memory.peak_alloc_mib of each process, by its rank."""

    rank_step_ms: Values | None = None
    """time.step_ms.median of each process, by its rank."""

    rank_computing_ms: Values | None = None
    """Milliseconds that each stage computes in a step: whether stages are balanced."""

    weights_equal: Flag | None = None
    """Whether all processes ended with the same weights."""

    efficiency: Number | None = None
    """Progress by sample, as a share of that with the reference batch (train/grad_noise.py)."""

    goodput: Number | None = None
    """speed.samples_per_s times efficiency."""

    noise: Noise = field(default_factory=Noise)
    """The gradient noise scale, also of a run of one process."""


@dataclass(kw_only=True)
class Record:
    """What a run was, what it measured, and how it ended."""

    run_id: Name
    """Variant, seed and the first digits of the hash; the name of the run's folder."""

    group: Name
    """Hardware and preset; the name of the folder above."""

    status: Status
    """How far the run is, or how it ended (record.py)."""

    schema: str = SCHEMA
    """Version of this format."""

    env: Values = field(default_factory=dict)
    """Versions and hardware (measure/hardware.py)."""

    quality: Scores = field(default_factory=dict)
    """The scores that `task.scores` names."""

    spec: SpecSection = field(default_factory=SpecSection)
    code: CodeSection = field(default_factory=CodeSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    task: TaskSection = field(default_factory=TaskSection)
    error: ErrorSection = field(default_factory=ErrorSection)
    time: Time = field(default_factory=Time)
    speed: Speed = field(default_factory=Speed)
    memory: Memory = field(default_factory=Memory)
    energy: Energy = field(default_factory=Energy)
    parallel: Parallel = field(default_factory=Parallel)
