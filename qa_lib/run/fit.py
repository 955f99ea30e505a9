"""One run from spec to record: the function behind the notebooks, the command line and the sweep's processes.

`fit` hands a run of several processes to torchrun. `work`, in the process or in each of them, is a line of stations:
load, build, batches, GPU lock, train, evaluate, save. `recording` is the life of its record.
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import torch
from safetensors import SafetensorError

from qa_lib.calls import checked, expect, expect_folder
from qa_lib.data.batches import Batches
from qa_lib.data.load import Data, batches_of, load_data, load_text
from qa_lib.errors import UserError, first_line, wrapped
from qa_lib.lab.launch.local import Launcher, is_finished, run_in_turn
from qa_lib.lab.launch.process import (
    SHARE,
    START,
    WARM,
    check_driver,
    follow_driver,
    with_driver,
)
from qa_lib.lab.launch.torchrun import fault_path, faults, first_fault, run_processes
from qa_lib.lab.tools.push import check_own, write_card
from qa_lib.loaded import CODE, said_of_changes
from qa_lib.measure import hardware
from qa_lib.measure.meter import Hooks, Meter, StepFlops, memory_use
from qa_lib.model.architectures import param_counts
from qa_lib.model.build import DTYPES, build_model, save_model
from qa_lib.model.load import check_tokenizer
from qa_lib.model.qat import WIDTHS
from qa_lib.records import record
from qa_lib.run.plan import check_planned
from qa_lib.score.evaluate import evaluate_answers, evaluate_text
from qa_lib.score.predict import ANSWER, WINDOW
from qa_lib.signals import stoppable, stopped_by
from qa_lib.spec.spec import Spec
from qa_lib.train.checkpoint import CHECKPOINT, digest_of
from qa_lib.train.compile import (
    forget_compiled,
    found_in_cache,
    start_compilers,
    use_plain_paths,
)
from qa_lib.train.grad_noise import efficiency
from qa_lib.train.parallel.data_parallel import gather_model
from qa_lib.train.parallel.pipeline import bubble, measured_bubble
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.step_log import StepFailed

# Another task takes a loader in data/load.py, an evaluation in score/evaluate.py, a preset that names it, variants, and
# an entry in both of these, by task, and in each of those: tasks.toml (its families of variants, its scores, what
# variants are compared by, and words for a model's card), plan.SOURCES (what opens its data), architectures.OF_TASK
# (the models that it trains), build.HEADS (transformers' class of them).
LOADERS = {"qa": load_data, "lm": load_text}  # (spec) -> a run's data
# (model, data, spec, device, run_dir) -> the record's `quality`; record.SCORING says by which score variants compare.
EVALUATIONS = {"qa": evaluate_answers, "lm": evaluate_text}
NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
served: list[str] = []  # the runs that this process has worked on
# Imported when it is used: that of the Trainer takes seconds, and only the A0 variants need it.
ENGINES = {
    "loop": "qa_lib.train.loop",
    "trainer": "qa_lib.train.trainer",
    "plain": "qa_lib.train.plain",
}


@checked
def fit(
    spec: Spec,
    runs: str | Path = "runs",
    data: Data | None = None,
    say=print,
    force: bool = False,
) -> dict:
    """Train, measure and evaluate one spec; write its run folder below `runs` and return the record, as in
    fit(spec)["quality"]["f1"].

    A run that is finished is not trained again: its record is returned, unless `force` asks for a run from its first
    step on. One that was stopped goes on from its last checkpoint, unless `force` drops that.

    `data` is what the task's loader returns, for callers that have it already. A spec that cannot run here ends as
    `skipped`, one that runs out of memory as `oom`: both are results and return normally. Anything else that fails is
    recorded as `error` and raised. Raises RunTaken while another process has the run, and UserError for a folder that
    cannot be and for data and a model that are not those that the spec was planned with.

    A spec of several processes is given to torchrun, which works on it in each of them; the first has the record. A
    `recommended` one has a process of its own, which loads the data anew and prints how far it is; where its first step
    fails on this machine, the next choice has another. The record says which variant it was in the end.
    """
    expect("spec", spec, Spec, "give one spec that plan has made, as in `(spec,) = plan(...)`")
    expect_folder("runs", runs)
    expect("data", data, Data | None, "give what load_data returns, or leave it out")
    expect("say", say, Callable, "give a function of one text, such as print")
    torchrun = torch.distributed.is_torchelastic_launched()
    started = int(os.environ["WORLD_SIZE"]) if torchrun else 1
    if started > 1 and spec.settings.parallel == "none":
        raise UserError(
            f"{spec.variant} trains in one process, and torchrun has started {started}: see family P"
        )
    record.check_folder(Path(runs) / spec.run_path)
    if spec.chosen and not spec.recommended:  # what is recommended is said by its launcher
        say(wrapped(spec.adjusted[0]))
    if force and int(os.environ.get("RANK", 0)) == 0:
        _drop_checkpoint(Path(runs) / spec.run_path)
    elif not force and not spec.skip and is_finished(Path(runs), spec):
        return _finished(Path(runs), spec, say)
    # DeepSpeed asks for a launcher also of one process, and leaves the next Trainer of the process changed.
    several = spec.world > 1 or spec.settings.parallel == "deepspeed"
    if several and not spec.skip and not torchrun:
        return run_processes(spec, runs, say)
    if spec.recommended:
        return _fit_recommended(spec, Path(runs), say, force)
    return work(spec, runs, data, say)


def _finished(runs: Path, spec: Spec, say) -> dict:
    """The record of a finished run, of which `say` is told."""
    entry = record.read_record(runs / spec.run_path)
    if spec.recommended:
        say(wrapped(spec.adjusted[0]))
    say(
        f"finished on {entry['time']['started'][:10]}; to train it anew, give --force, or in Python "
        "force=True"
    )
    return entry


def _drop_checkpoint(run_dir: Path) -> None:
    """Have a run begin with its first step. Raises RunTaken while another process has it."""
    with record.lock(run_dir):
        for old in _checkpoints(run_dir):
            old.unlink(missing_ok=True)


def _checkpoints(run_dir: Path) -> list[Path]:
    """Where a run keeps its checkpoint, one that was not believed, and one that was not written to its end."""
    endings = (".safetensors", ".refused", ".partial")
    return [(run_dir / CHECKPOINT).with_suffix(ending) for ending in endings]


def _fit_recommended(spec: Spec, runs: Path, say, force: bool) -> dict:
    """The record of a recommended spec, or of that which took its place. Raises UserError for a run that failed."""
    with record.lock(runs / spec.run_path):  # the launcher would wait for whoever has it
        if force:  # it passes over what is finished
            (runs / spec.run_path / "record.json").unlink(missing_ok=True)
        launcher = Launcher(
            runs,
            hardware.this_machine(),
            hardware.environment(),
            aloud=True,
            time_limit_s=math.inf,
        )
    (spec,) = run_in_turn(launcher, [spec], say)
    return record.with_result(launcher.entry_of(spec), " (its log.txt has more)")


def prepare(spec: Spec, data: Data | None = None) -> tuple[Data, torch.nn.Module, Batches]:
    """What a spec trains: its data, or `data` that the caller has loaded, its model, and micro-batches of the former.

    Raises UserError where they do not go together, or are not those that the spec was planned with.
    """
    data = data or LOADERS[spec.preset.task](spec)
    model = build_model(spec)
    check_tokenizer(spec.model_source, data.tokenizer, model)
    check_planned(spec, [source.sha256 for source in (data.source, data.validation) if source])
    return data, model, batches_of(data.samples, spec)


def train(
    model,
    batches,
    spec: Spec,
    device: torch.device,
    run_dir: Path,
    say=print,
    hooks=None,
    ranks=None,
) -> tuple:
    """Forget what an earlier run of this process has compiled, then train with the spec's engine; see loop.train."""
    forget_compiled()
    if spec.settings.compile != "none":
        use_plain_paths()
    engine = importlib.import_module(ENGINES[spec.settings.engine])
    with contextlib.nullcontext(ranks) if ranks else ProcessGroup(device) as ranks:
        ranks.join(spec)
        return engine.train(model, batches, spec, run_dir, say, hooks or Hooks(), ranks)


def work(spec: Spec, runs: str | Path, data: Data | None = None, say=print) -> dict:
    """Train, measure and evaluate a spec in this process, one of torchrun's where it has several; see fit.fit."""
    run_dir, device = Path(runs) / spec.run_path, hardware.train_device()
    check_driver(run_dir)
    if spec.preset.quality and not spec.skip:
        check_own(
            run_dir / "model", spec.run_id
        )  # before its record changes, which may be that of a finished run
    ranks = ProcessGroup(device)
    # The first process has the record, and the others a copy that goes nowhere.
    recorded = (
        recording(spec, run_dir, say)
        if ranks.first
        else contextlib.nullcontext(record.new_record(spec, {}))
    )
    with _limits(spec, device), recorded as entry, noting_faults(run_dir, ranks):
        if spec.skip:
            return entry
        begin, first_run = time.perf_counter(), not served
        served.append(spec.run_id)
        start_compilers(spec.settings, device)
        data, model, batches = prepare(spec, data)
        begin = min(
            begin, time.perf_counter() - data.load_s
        )  # what the caller has loaded is this run's time as well
        _note_sizes(entry, data, model, batches.steps)
        for note in data.notes if ranks.first else []:
            say(note)

        shared = shares_gpu(device)
        held = hardware.gpu_lock(
            device, shared, lambda: record.write_record(run_dir, entry | {"status": "waiting"})
        )
        with held if ranks.first else contextlib.nullcontext(0.0) as waited_s:
            ranks.start()
            if ranks.first:
                record.write_record(run_dir, entry)
            begin += waited_s
            matrix_tflops = hardware.matrix_rate(device, DTYPES[spec.settings.precision])
            prepared = time.perf_counter()
            with ranks:
                optimizer, meter, done_before, note = train(
                    model, batches, spec, device, run_dir, say, ranks=ranks
                )
                _note_training(entry, spec, meter, done_before, note, ranks)
                entry["memory"] = dataclasses.asdict(memory_use(model, optimizer, device))
                model = gather_model(model, lambda: build_model(spec).to(device), ranks)
                joules = (
                    _note_ranks(entry, spec, meter, model, ranks)
                    if ranks.world > 1
                    else meter.joules_per_sample()
                )
            if not ranks.first:
                return entry
            if os.environ.get(START, WARM) != WARM:
                entry["spec"]["adjusted"].append(f"start: {os.environ[START]}")
            if not shared:
                if first_run and START not in os.environ and meter.first_step_at:
                    entry["time"]["first_step_s"] = (
                        meter.first_step_at - psutil.Process().create_time()
                    )
                _note_times(
                    entry,
                    spec,
                    meter,
                    joules,
                    meter.speed(StepFlops(model), matrix_tflops, ranks.world),
                )
                if why := _untimed(meter):
                    entry["spec"]["adjusted"].append(why)
                    say(f"{spec.variant}: {why}")
            trained = time.perf_counter()
            if spec.preset.quality:
                entry["quality"] |= EVALUATIONS[spec.preset.task](
                    model, data, spec, device, run_dir
                )
                evaluated = time.perf_counter()
                _save(model, data, run_dir / "model", entry)
        if shared:
            entry["spec"]["adjusted"].append("times: not recorded, others shared the GPU")
        else:
            entry["time"] |= {"prepare_s": prepared - begin, "wall_s": time.perf_counter() - begin}
            entry["time"]["eval_s"] = evaluated - trained if spec.preset.quality else None
    return entry


def work_as_one(spec: Spec, runs: str) -> None:
    """`work` in one of the processes that torchrun has started."""
    # torchrun ends by SIGTERM a process whose peer has failed.
    with contextlib.suppress(KeyboardInterrupt), stoppable():
        if work(spec, runs)["status"] != "oom":
            return
    sys.exit(1)  # so that torchrun ends the others


@contextlib.contextmanager
def recording(spec: Spec, run_dir: Path, say) -> Iterator[dict]:
    """The life of a run's record: yields it as `running`, and ends it by what happens meanwhile.

    What is raised inside makes it `error`, a signal or Ctrl-C `killed`, out of memory `oom`; only the latter is
    swallowed. Where another of the run's processes failed first, that one's fault ends it. Holds the run's lock. Where
    a driver started this process, it ends with that driver.
    """
    with with_driver(), record.lock(run_dir):
        record.check_folder(run_dir)
        entry = record.new_record(spec, hardware.environment())
        try:
            follow_driver()  # which may be gone already: only in here does the record say so
            record.write_record(run_dir, entry)
            yield entry
            if spec.skip:
                say(f"{spec.variant}: skipped, {spec.skip}")
                record.finish(run_dir, entry, "skipped", {"kind": "skipped", "message": spec.skip})
                return
            _note_code(entry)
            record.finish(run_dir, entry, "ok")
            # And faults of processes that were restarted.
            for old in [*_checkpoints(run_dir), *faults(run_dir)]:
                old.unlink(missing_ok=True)
        except (Exception, KeyboardInterrupt) as problem:
            if isinstance(problem, KeyboardInterrupt) and entry["status"] in record.FINISHED:
                record.write_record(run_dir, entry)  # it had its result when the signal came
                raise
            outcome = outcome_of(problem)
            # torchrun stops this process where another has failed. It starts all at once: older faults are of others.
            first = first_fault(run_dir, psutil.Process().create_time()) or outcome
            # What JSON has not, a NaN say, may be what has ended the run: the record does without it.
            entry |= json.loads(
                json.dumps(entry, default=lambda _: None), parse_constant=lambda _: None
            )
            _note_code(entry)
            record.finish(run_dir, entry, first["status"], first["error"])
            if outcome["status"] != "oom":
                raise
            step = outcome["error"]["step"]
            say(
                f"{spec.variant}: out of memory "
                + (f"in step {step}" if step else "before training")
            )


@contextlib.contextmanager
def _limits(spec: Spec, device: torch.device):
    """Hold this process to the threads and the memory that its preset allows, and to the attention kernels of another
    GPU where a search asked for them; forget what an earlier run left.

    Outside there are as many threads as before, and all of the memory.
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


def _save(model: torch.nn.Module, data: Data, folder: Path, entry: dict) -> None:
    """Keep the trained model with its card, and nothing that was made of the one before it. Its config says how long
    its windows and answers are, so that a copy answers alike. Raises RecordError when the disk is full."""
    preset = entry["spec"]["preset"]
    if entry["task"]["name"] == "qa":
        model.config.update(
            dict(zip(WINDOW, (preset["max_length"], preset["stride"]), strict=True))
            | {ANSWER: preset["max_answer_length"]}
        )
    try:
        save_model(model, data.tokenizer, folder)
        write_card(folder, entry)
        for width in WIDTHS:
            shutil.rmtree(folder.with_name(f"{folder.name}-{width}"), ignore_errors=True)
    except (OSError, SafetensorError) as problem:
        raise record.RecordError(f"cannot write {folder}: {first_line(problem)}") from problem


def _note_sizes(entry: dict, data: Data, model: torch.nn.Module, steps: int) -> None:
    """Put into a record how much there is: steps, samples, questions, parameters; and how long answers may be, where
    the preset leaves that to the training answers."""
    if data.max_answer_length:
        entry["spec"]["preset"]["max_answer_length"] = data.max_answer_length
    entry["spec"] |= {"planned_steps": steps, "n_train": len(data.samples), "n_eval": data.n_eval}
    entry["data"]["n"] = data.n
    held = param_counts(model)
    entry["model"] |= {
        "params_total": sum(held.values()),
        "params_trainable": sum(n for parameter, n in held.items() if parameter.requires_grad),
        "layers": model.config.num_hidden_layers,
    }


def _note_training(
    entry: dict, spec: Spec, meter: Meter, begin: int, note: str | None, ranks: ProcessGroup
) -> None:
    """Put into a record how many steps were trained and in which processes, what became of an earlier process's, and
    the gradient noise scale, where the variant sees its gradients in one piece; all processes call this together."""
    noise = ranks.stats.noise(len(meter.times))
    entry["time"] |= {"steps": begin + len(meter.times), "resumed_from_step": begin or None}
    entry["parallel"] |= {
        "wrapper": ranks.wrapper,
        "noise": dataclasses.asdict(noise),
        "efficiency": efficiency(noise, ranks.batch),
    }
    if note:
        entry["spec"]["adjusted"].append(f"checkpoint: {note}")
    if ranks.world != spec.world:  # torchrun's may be fewer after a loss, down to one
        entry["parallel"]["world"] = ranks.world
        entry["spec"]["adjusted"].append(f"world: {ranks.world} processes at the end")


def _note_code(entry: dict) -> None:
    """Put into a record that code changed on disk since this process took its digests: what is imported late may be of
    the one or the other, so that the run's checkpoints are not gone on from."""
    if changed := CODE.changed():
        said = f"code: {said_of_changes(changed)} changed on disk since this process began"
        entry["spec"]["adjusted"].append(said)


def _note_ranks(
    entry: dict, spec: Spec, meter: Meter, model: torch.nn.Module, ranks: ProcessGroup
) -> float | None:
    """Put into a record what several processes have each measured, and let the meter count the samples of all.

    All processes call this together; the joules per sample of all their GPUs.
    """
    own = {
        "joules": meter.joules_per_sample(),
        "counts": meter.counts,
        "samples": meter.samples,
        "peak_mib": entry["memory"]["peak_alloc_mib"],
        "step_ms": meter.step_ms().median,
        "weights": digest_of({name: p.detach().cpu() for name, p in model.named_parameters()}, {}),
        "allreduce_gbs": hardware.reduce_rate(ranks.device),
        "pipelined": ranks.stats.pipelined(),
        **ranks.stats.overlap,
    }
    found = ranks.gather(own)
    # The processes of one replica have all counted the same samples.
    meter.counts = list(
        np.sum([each["counts"] for each in found], axis=0) * ranks.replicas // ranks.world
    )
    meter.samples = [sample for each in found for sample in each["samples"]]
    peaks, times = (
        {str(rank): each[name] for rank, each in enumerate(found)}
        for name in ("peak_mib", "step_ms")
    )
    entry["parallel"] |= {
        "world": ranks.world,
        "replicas": ranks.replicas,
        "backend": ranks.backend,
        "interconnect": hardware.interconnect() if ranks.device.type == "cuda" else None,
        "allreduce_gbs": own["allreduce_gbs"],
        "rank_peak_mib": peaks if ranks.device.type == "cuda" else None,
        "rank_step_ms": times,
        "weights_equal": len({each["weights"] for each in found}) == 1,
    }
    if ranks.stages > 1:
        stages = [each["pipelined"] for each in found]
        entry["parallel"] |= {
            "stages": ranks.stages,
            "schedule": spec.settings.schedule,
            "bubble": measured_bubble(stages),
            "bubble_formula": bubble(
                ranks.stages, spec.micro_batches // ranks.replicas, spec.settings.chunks
            ),
            "rank_computing_ms": {
                str(rank): 1000 * computing for rank, (computing, _) in enumerate(stages)
            },
        }
    if ranks.stats.overlap.get("busy_ms"):
        entry["parallel"] |= {
            name: np.mean([each[name] for each in found]).item() for name in ranks.stats.overlap
        }
    joules = [each["joules"] for each in found]
    return (
        None if None in joules else sum(joules) / ranks.replicas
    )  # each has worked on as many samples


def _note_times(
    entry: dict, spec: Spec, meter: Meter, joules: float | None, speed: record.Speed
) -> None:
    """Put into a record what was timed: speed, step times, compilation, energy."""
    entry["speed"] = dataclasses.asdict(speed)
    entry["time"] |= {"step_ms": dataclasses.asdict(meter.step_ms()), "train_s": sum(meter.times)}
    entry["time"]["data_ms"] = meter.data_ms()
    entry["energy"]["joules_per_sample"] = joules
    if entry["parallel"]["efficiency"] and speed.samples_per_s:
        entry["parallel"]["goodput"] = entry["parallel"]["efficiency"] * speed.samples_per_s
    if (
        spec.settings.compile != "none"
    ):  # else nothing was compiled, and slow first steps have other reasons
        entry["time"] |= {"compile_s": meter.compile_s(), "compile_cached": found_in_cache()}


def _untimed(meter: Meter) -> str | None:
    """Why a run has no samples/s, in words; None where it has."""
    steps = len(meter.times)
    if steps > meter.warm_up:
        return None
    return (
        f"speed: not measured, too few steps to time: {steps}, of which the first {meter.warm_up} "
        "of a process are warm-up"
    )


def outcome_of(problem: BaseException) -> dict:
    """The `status` and `error` of a run that an exception, a signal or Ctrl-C has ended.

    Out of memory is a result, unless other runs share the GPU: they may have filled it. Then it is an error, which is
    run again.
    """
    if isinstance(problem, KeyboardInterrupt):
        return {
            "status": "killed",
            "error": {"kind": "killed", "message": stopped_by(problem), "step": None},
        }
    status = (
        "oom" if out_of_memory(problem) and not shares_gpu(hardware.train_device()) else "error"
    )
    step = problem.step if isinstance(problem, StepFailed) else None
    if step is not None:
        problem = problem.__cause__ or problem
    # Libraries have OSErrors of their own. In a step a file that is missing is the compiler's.
    kind = "OSError" if isinstance(problem, OSError) and step is None else type(problem).__name__
    return {
        "status": status,
        "error": {"kind": kind, "message": str(problem).split("\n")[0], "step": step},
    }


def out_of_memory(problem: BaseException | None) -> bool:
    """PyTorch has a class for what its GPU allocator is refused, and only messages for the host's memory, the driver's,
    cuBLAS's and Triton's. The end of a failed graph capture raises an error of its own over it."""
    return problem is not None and (
        isinstance(problem, torch.OutOfMemoryError | MemoryError)
        or (isinstance(problem, RuntimeError) and any(words in str(problem) for words in NO_MEMORY))
        or out_of_memory(problem.__context__)
    )


def shares_gpu(device: torch.device) -> bool:
    """Whether other runs train on this GPU at the same time."""
    return device.type == "cuda" and bool(os.environ.get(SHARE))


@contextlib.contextmanager
def noting_faults(run_dir: Path, ranks: ProcessGroup):
    """Leave what ends one of torchrun's processes in the run's folder."""
    try:
        yield
    except Exception as problem:
        if ranks.store:
            fault = {"at": time.time()} | outcome_of(problem)
            fault["error"]["message"] = (
                f"process {ranks.rank} of {ranks.world}: {fault['error']['message']}"
            )
            record.write_atomically(fault_path(run_dir, ranks.rank), json.dumps(fault))
        raise
