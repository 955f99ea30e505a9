"""One run from spec to record, in this process, or in each of those that torchrun has started.

`fit` is a line of stations: load, wait for the GPU, train, score, save. The record's life is in
recording.py, what is put into it in notes.py. What starts processes, tries another variant or
returns a finished run stands above: lab/launch/anywhere.py, which is `qa_lib.fit`.
"""

import contextlib
import dataclasses
import gc
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import torch
from safetensors import SafetensorError

from qa_lib.data.batches import BUCKET, Batches
from qa_lib.data.load import Data, batches_of
from qa_lib.errors import first_line
from qa_lib.measure import hardware
from qa_lib.measure.kernel_time import KernelTime
from qa_lib.measure.meter import Hooks, Meter, StepFlops, memory_use
from qa_lib.model.build import DTYPES, build_model, save_model
from qa_lib.model.hf_checkpoint import ModelFolder, inspect_source
from qa_lib.model.load import check_tokenizer
from qa_lib.model.qat import WIDTHS
from qa_lib.records import record
from qa_lib.records.files import RecordError
from qa_lib.run import notes
from qa_lib.run.card import check_own, write_card
from qa_lib.run.identity import check_planned
from qa_lib.run.recording import noting_faults, recording
from qa_lib.run.surroundings import ALONE, Surroundings
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.score.predict import ANSWER, WINDOW
from qa_lib.spec.spec import Spec
from qa_lib.train.compile import forget_compiled, start_compilers, use_plain_paths
from qa_lib.train.parallel.data_parallel import gather_model
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.trained import Trained

PROFILED_STEPS = 3  # whose kernel time is a run's, where all steps are alike

_run_ids: list[str] = []  # the runs that this process has worked on


def fit(
    spec: Spec,
    runs: str | Path,
    data: Data | None = None,
    say=print,
    surroundings: Surroundings = ALONE,
) -> dict:
    """Train, measure and score one spec; write its run folder below `runs` and return the record.

    A run that was stopped goes on from its last checkpoint. `data` is what the task's loader
    returns, for callers that have it already.

    A spec that cannot run here ends as `skipped`, one that runs out of memory as `oom`: both are
    results and return normally. Anything else that fails is recorded as `error` and raised. Raises
    RunTaken while another process has the run, and UserError for a folder that cannot be and for
    data and a model that are not those that the spec was planned with.

    In one of several processes the first has the record, and the others return a copy of it that
    goes nowhere.
    """
    run_dir = Path(runs) / spec.run_path
    device = hardware.train_device()
    shared = surroundings.shares(device)
    if spec.preset.quality and not spec.skip:
        # Before the record changes, which may be that of a finished run.
        check_own(run_dir / "model", spec.run_id)
    ranks = ProcessGroup(device)
    if ranks.first:
        recorded = recording(spec, run_dir, say, surroundings)
    else:
        recorded = contextlib.nullcontext(record.new_record(spec, {}))
    with limits(spec, device), recorded as entry, noting_faults(run_dir, ranks, shared):
        if spec.skip:
            return entry

        # Load.
        begin = time.perf_counter()
        is_first_run = not _run_ids
        _run_ids.append(spec.run_id)
        start_compilers(spec.settings, device)
        folder = inspect_source(spec.model_source)
        data, model, batches = prepare(spec, data, folder)
        # What the caller has loaded is this run's time as well.
        begin = min(begin, time.perf_counter() - data.load_s)
        notes.note_sizes(entry, data, model, batches.steps)
        if ranks.first:
            for note in data.notes:
                say(note)

        with gpu_turn(entry, run_dir, device, ranks, shared) as waited_s:
            begin += waited_s
            matrix_tflops = hardware.matrix_rate(device, DTYPES[spec.settings.precision])
            prepared = time.perf_counter()

            # Train; all processes do this together.
            hooks = hooks_of(spec, batches.steps, device, shared)
            with ranks:
                done = train(model, batches, spec, device, run_dir, say, hooks, ranks)
                meter = done.meter
                notes.note_steps(entry, len(meter.times), done.resumed_from, done.checkpoint_note)
                notes.note_noise(entry, len(meter.times), ranks)
                notes.note_processes(entry, spec, ranks)
                memory = memory_use(model, done.optimizer, device, ranks.peer_bytes)
                entry["memory"] = dataclasses.asdict(memory)
                model = gather_model(model, lambda: build_model(spec, folder).to(device), ranks)
                joules = _measure_ranks(entry, spec, meter, model, ranks)
            if not ranks.first:
                return entry
            if surroundings.start_note:
                entry["spec"]["adjusted"].append(surroundings.start_note)
            if not shared:
                if is_first_run and surroundings.began_for_run and meter.first_step_at:
                    process_began = psutil.Process().create_time()
                    entry["time"]["first_step_s"] = meter.first_step_at - process_began
                speed = meter.speed(StepFlops(model), matrix_tflops, ranks.world)
                notes.note_times(entry, spec, meter, joules, speed)
                if isinstance(hooks, KernelTime):
                    entry["time"]["kernel_ms"] = hooks.kernel_ms
                why = notes.why_untimed(meter)
                if why:
                    entry["spec"]["adjusted"].append(why)
                    say(f"{spec.variant}: {why}")
            trained = time.perf_counter()

            # Score and save.
            if spec.preset.quality:
                evaluate = WORKFLOWS[spec.preset.task].evaluate
                entry["quality"] |= evaluate(model, data, spec, device, run_dir)
                evaluated = time.perf_counter()
                keep_model(model, data, run_dir / "model", entry)

        if shared:
            entry["spec"]["adjusted"].append("times: not recorded, others shared the GPU")
        else:
            entry["time"]["prepare_s"] = prepared - begin
            entry["time"]["wall_s"] = time.perf_counter() - begin
            entry["time"]["eval_s"] = evaluated - trained if spec.preset.quality else None
    return entry


def hooks_of(spec: Spec, steps: int, device: torch.device, shared: bool) -> Hooks:
    """Return what listens to a training of so many steps: KernelTime, where it costs little.

    That is on a GPU that others do not use, in one process, for a run of which most steps are timed
    all the same. A model that is scored is not profiled, so that its minutes are those of training.
    """
    # The micro-batches of a span differ in length, and a whole one has them all.
    untimed = BUCKET if spec.settings.group_by_length else PROFILED_STEPS
    timed = steps - spec.preset.measure_from - untimed
    profiles = (
        device.type == "cuda"
        and spec.world == 1
        and not shared
        and not spec.preset.quality
        and timed >= 2 * untimed
    )
    return KernelTime(steps, untimed) if profiles else Hooks()


def prepare(
    spec: Spec, data: Data | None = None, folder: ModelFolder | None = None
) -> tuple[Data, torch.nn.Module, Batches]:
    """Return what a spec trains: its data, its model, and micro-batches of the former.

    `data` and `folder` are what the caller has of it already: loaded data, and the model's folder,
    inspected. Raises UserError where they do not go together, or are not those that the spec was
    planned with.
    """
    if folder is None:
        folder = inspect_source(spec.model_source)
    if data is None:
        data = WORKFLOWS[spec.preset.task].load(spec)
    model = build_model(spec, folder)
    check_tokenizer(spec.model_source, data.tokenizer, model)
    hashes = [source.sha256 for source in (data.source, data.validation) if source]
    check_planned(spec, hashes, folder)
    return data, model, batches_of(data.samples, spec)


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    device: torch.device,
    run_dir: Path,
    say=print,
    hooks: Hooks | None = None,
    ranks: ProcessGroup | None = None,
) -> Trained:
    """Train with the spec's engine.

    What an earlier run of this process has compiled is forgotten first. Without `ranks` this
    process is alone.
    """
    forget_compiled()
    if spec.settings.compile != "none":
        use_plain_paths()
    engine = find_engine(spec.settings.engine)
    # The caller ends the processes' group where it has made it.
    held = contextlib.nullcontext(ranks) if ranks else ProcessGroup(device)
    with held as ranks:
        ranks.join(spec)
        return engine.train(model, batches, spec, run_dir, say, hooks or Hooks(), ranks)


def find_engine(name: str) -> ModuleType:
    """Return the module that has the `train` of an engine.

    It is imported now: that of the Trainer takes seconds, and only the A0 variants need it. Raises
    KeyError for a name that no engine has.
    """
    if name == "loop":
        from qa_lib.train import loop

        return loop
    if name in ("trainer", "trainer-tuned"):
        from qa_lib.train import trainer

        return trainer
    if name in ("plain", "searched"):
        from qa_lib.train import plain

        return plain
    raise KeyError(name)


@contextlib.contextmanager
def limits(spec: Spec, device: torch.device) -> Iterator[None]:
    """Hold this process to what a spec allows; forget what an earlier run has left.

    These are threads and memory of the preset, and the attention kernels of another GPU where a
    search asked for them. Outside there are as many threads as before, and all of the memory.
    """
    gc.collect()  # it would count as this run's memory
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each stream that there was
        torch.cuda.empty_cache()
    with contextlib.ExitStack() as undo:
        if spec.preset.threads:
            undo.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(spec.preset.threads)
        if spec.preset.limit_gib and device.type == "cuda":
            undo.callback(hardware.limit_memory, math.inf)
            hardware.limit_memory(spec.preset.limit_gib)
        if spec.sm:  # for good: a search gives each trial a process
            hardware.restrict_sdpa(spec.sm)
        yield


@contextlib.contextmanager
def gpu_turn(
    entry: dict, run_dir: Path, device: torch.device, ranks: ProcessGroup, shared: bool
) -> Iterator[float]:
    """Hold the GPUs of a run, and yield how many seconds that took to wait for.

    The record says `waiting` meanwhile. The first process of several holds them for all. With
    `shared` other runs may hold them as well.
    """

    def say_waiting() -> None:
        record.write_record(run_dir, entry | {"status": "waiting"})

    held = contextlib.nullcontext(0.0)
    if ranks.first:
        held = hardware.gpu_lock(device, shared, say_waiting)
    with held as waited_s:
        ranks.start()
        if ranks.first:
            record.write_record(run_dir, entry)
        yield waited_s


def _measure_ranks(
    entry: dict, spec: Spec, meter: Meter, model: torch.nn.Module, ranks: ProcessGroup
) -> float | None:
    """Return the joules per sample of all GPUs; note what several processes have each measured.

    The meter counts the samples of all afterwards. All processes call this together.
    """
    if ranks.world == 1:
        return meter.joules_per_sample()
    measures = notes.gather_measures(entry, meter, model, ranks)
    notes.pool_samples(meter, measures, ranks)
    notes.note_ranks(entry, measures, ranks)
    if ranks.stages > 1:
        notes.note_pipeline(entry, spec, measures, ranks)
    if ranks.stats.overlap.get("busy_ms"):
        notes.note_overlap(entry, measures)
    return notes.pooled_joules(measures, ranks)


def keep_model(model: torch.nn.Module, data: Data, folder: Path, entry: dict) -> None:
    """Save the trained model with its card, and remove what was made of the one before it.

    The config of a model that answers says how long its windows and answers are, so that a copy
    answers alike. Raises RecordError when the disk is full.
    """
    preset = entry["spec"]["preset"]
    if entry["task"]["name"] == "qa":
        length_key, stride_key = WINDOW
        model.config.update(
            {
                length_key: preset["max_length"],
                stride_key: preset["stride"],
                ANSWER: preset["max_answer_length"],
            }
        )
    try:
        save_model(model, data.tokenizer, folder)
        write_card(folder, entry)
        for width in WIDTHS:
            shutil.rmtree(folder.with_name(f"{folder.name}-{width}"), ignore_errors=True)
    except (OSError, SafetensorError) as problem:
        raise RecordError(f"cannot write {folder}: {first_line(problem)}") from problem
