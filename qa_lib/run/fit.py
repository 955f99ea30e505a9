"""One run from spec to record: the function behind the notebooks, the command line and the sweep."""

import argparse
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from qa_lib import record
from qa_lib.data.packing import batches_of
from qa_lib.data.squad import Source, open_source
from qa_lib.data.windows import Features, build_features
from qa_lib.measure import meter as measure
from qa_lib.model.build import Tokenizer, build_model, build_tokenizer, save_model
from qa_lib.run.plan import add_source_arguments, plan
from qa_lib.score.decode import decode
from qa_lib.score.f1 import score
from qa_lib.score.predict import predict_logits
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.loop import DTYPES, train
from qa_lib.train.trainer import train_with_trainer
from qa_lib.variants import Spec

USED = "used_by_a_run"  # an attribute of models that have been trained
SHARE = "QA_LIB_SHARE"  # an environment variable: where it is set, other runs train on this GPU at the same time


@dataclass
class Data:
    """A run's two sources and their features, and what loading them took in seconds; `validation` is None where the
    scale measures no quality."""

    tokenizer: Tokenizer
    source: Source
    features: Features
    validation: Source | None
    validation_features: Features | None
    load_s: float


def load_data(spec: Spec) -> Data:
    """Tokenizer, sources and features of a run, from the cache where they are in it."""
    begin = time.perf_counter()
    tokenizer = build_tokenizer(spec.model_source)
    limits = (spec.scale.max_length, spec.scale.stride)
    source = open_source(spec.data_source, "train")
    validation = open_source(spec.data_source, "validation") if spec.scale.quality else None
    features = build_features(source, tokenizer, *limits)
    validation_features = build_features(validation, tokenizer, *limits) if validation else None
    return Data(tokenizer, source, features, validation, validation_features, time.perf_counter() - begin)


def fit(
    spec: Spec, runs: str | Path = "runs", data: Data | None = None, model: torch.nn.Module | None = None, say=print
) -> dict:
    """Train, measure and evaluate one spec; write its run folder below `runs` and return the record.

    `data` and `model` are what load_data and build_model return, for callers that have them already; a model that was
    trained before is built anew, so that a notebook's cell can be run again. A row that cannot run here ends as
    `skipped`, one that runs out of memory as `oom`: both are results and return normally. Anything else that fails is
    recorded as `error` and raised. Raises RunTaken while another process has the run.
    """
    run_dir = Path(runs) / spec.run_path
    with record.lock(run_dir):
        if spec.scale.threads:
            torch.set_num_threads(spec.scale.threads)
        entry = record.new_record(spec, measure.environment())
        record.write_record(run_dir, entry)
        if spec.skip:
            say(f"{spec.variant}: skipped, {spec.skip}")
            return record.finish(run_dir, entry, "skipped", {"kind": "skipped", "message": spec.skip})
        try:
            _fill(entry, spec, run_dir, data, model, say)
        except (Exception, KeyboardInterrupt) as problem:
            # Beside others it may be they who filled the memory: an error, which is run again, and no result.
            out = _out_of_memory(problem) and not _shares(measure.device())
            message = "stopped by the user" if isinstance(problem, KeyboardInterrupt) else str(problem).split("\n")[0]
            error = {"kind": type(problem).__name__, "message": message}
            step = getattr(problem, "step", None)
            entry = record.finish(run_dir, entry, "oom" if out else "error", error | {"step": step})
            if not out:
                raise
            say(f"{spec.variant}: out of memory " + ("before the first step" if step is None else f"in step {step}"))
            return entry
        return record.finish(run_dir, entry, "ok")


def _fill(entry: dict, spec: Spec, run_dir: Path, data: Data | None, model, say) -> None:
    """Do the run's work and put what it measured into `entry`."""
    # Data that the caller has loaded already are a part of the run's time as well.
    begin = time.perf_counter() - (data.load_s if data else 0.0)
    device = measure.device()
    if spec.scale.limit_gib and device.type == "cuda":
        measure.limit_memory(spec.scale.limit_gib)
    data = data or load_data(spec)
    if getattr(model, USED, False):
        model.to("cpu")  # the caller's name keeps it, and its weights would count as this run's memory
        gc.collect()
        torch.cuda.empty_cache()
        model = None
    model = model or build_model(spec)
    setattr(model, USED, True)
    batches = batches_of(data.features, spec)
    entry["spec"] |= {"planned_steps": batches.steps, "n_train": len(data.features)}
    entry["spec"]["n_eval"] = len(data.validation.examples) if data.validation else None
    entry["data"]["n"] = int(data.features.example.max()) + 1  # without parsing the questions again
    parameters = [(p.numel(), p.requires_grad) for p in model.parameters()]
    entry["model"] |= {
        "params_total": sum(n for n, _ in parameters),
        "params_trainable": sum(n for n, trains in parameters if trains),
    }
    record.write_record(run_dir, entry)
    shared = _shares(device)
    with measure.turn(device, shared, say) as waited_s:
        begin += waited_s
        _work(entry, spec, run_dir, data, model, batches, device, begin, say)
    Checkpoint.path_of(run_dir).unlink(missing_ok=True)
    entry["time"]["wall_s"] = time.perf_counter() - begin
    if shared:
        forget_times(entry, spec)


def _shares(device: torch.device) -> bool:
    return device.type == "cuda" and bool(os.environ.get(SHARE))


def forget_times(entry: dict, spec: Spec) -> None:
    """Make null in a record what other runs on the same GPU have disturbed, and say so."""
    entry["spec"]["adjusted"] = [*spec.adjusted, "times: not recorded, since other runs shared the GPU"]
    kept = {"time": ("started", "ended", "steps", "resumed_from_step")}
    for section in ("speed", "energy", "time"):
        entry[section] |= {key: None for key in entry[section] if key not in kept.get(section, ())}
    entry["time"]["step_ms"] = dict.fromkeys(("n", "median", "p10", "p90"))


def train_afresh(model, batches, spec: Spec, device: torch.device, run_dir: Path, say=print, watch=None) -> tuple:
    """train() of the spec's engine, as the first of its process: nothing is compiled yet, nothing counted."""
    # Dynamo counts what it compiled for all models of a process, and soon leaves the rest uncompiled.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = train_with_trainer if spec.settings.engine == "trainer" else train
    return run(model, batches, spec, device, run_dir, say, watch)


def _work(entry, spec, run_dir, data, model, batches, device, begin, say) -> None:
    """What must not be timed beside another run: training and evaluation, measured from `begin`."""
    peak = measure.matrix_rate(device, DTYPES[spec.settings.precision])
    entry["time"]["prepare_s"] = time.perf_counter() - begin
    optimizer, meter, first = train_afresh(model, batches, spec, device, run_dir, say)
    speed, clock = meter.summary(measure.StepCost(model), peak)
    entry["speed"] |= speed
    entry["time"] |= clock | {"resumed_from_step": first or None, "steps": first + clock["steps"]}
    if spec.settings.compile == "none":
        entry["time"]["compile_s"] = None  # nothing was compiled: the slow first steps have other reasons
    else:
        hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        entry["time"]["compile_cached"] = hits > 0  # an earlier run has paid a part of it
    entry["energy"]["joules_per_feature"] = meter.joules_per_feature()
    entry["memory"] |= measure.memory(model, optimizer, device)

    if data.validation:
        clock = time.perf_counter()
        entry["quality"] |= evaluate(model, data, spec, device, run_dir)
        entry["time"]["eval_s"] = time.perf_counter() - clock
        save_model(model, data.tokenizer, run_dir / "model")


def evaluate(model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path) -> dict:
    """Answer the validation questions with a model on `device`; the record's `quality`, and the four answer files."""
    model.eval()
    dtype = DTYPES[spec.settings.precision]
    autocast = None if dtype == torch.float32 else dtype
    rows = predict_logits(model, data.validation_features, device, autocast_dtype=autocast, join=spec.settings.join)
    examples = data.validation.examples
    answers = decode(data.validation_features, examples, *rows)
    answers.write(run_dir / "answers")
    found = score(examples, answers.texts, answers.null_odds, 0.0)
    always_null = score(examples, dict.fromkeys(answers.texts, ""))
    return {
        "exact": found["exact"],
        "f1": found["f1"],
        "has_answer_exact": found.get("HasAns_exact"),
        "has_answer_f1": found.get("HasAns_f1"),
        "no_answer_f1": found.get("NoAns_f1"),
        "best_exact": found["best_exact"],
        "best_exact_threshold": found["best_exact_thresh"],
        "best_f1": found["best_f1"],
        "best_f1_threshold": found["best_f1_thresh"],
        "always_null_f1": always_null["f1"],
        "n": found["total"],
    }


NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def _out_of_memory(problem: BaseException | None) -> bool:
    """PyTorch has a class for what its GPU allocator is refused, and only messages for the host's memory, the driver's,
    cuBLAS's and Triton's. The end of a failed graph capture raises an error of its own over it."""
    if problem is None:
        return False
    return (
        isinstance(problem, torch.OutOfMemoryError | MemoryError)
        or (isinstance(problem, RuntimeError) and any(words in str(problem) for words in NO_MEMORY))
        or _out_of_memory(problem.__context__)
    )


EXAMPLE = "example: python -m qa_lib run A3 --scale smoke --seed 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib run`."""
    parser.add_argument("variant", metavar="VARIANT", help="a row of `python -m qa_lib variants`")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of new weights, order and dropout (default: 0)"
    )
    add_source_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Run one row here, whatever its record says, and print the record."""
    (spec,) = plan([args.variant], args.scale, [args.seed], args.data, args.model, args.micro_batch)
    entry = fit(spec, args.runs)
    measured = {"features/s": entry["speed"]["features_per_s"], "F1": entry["quality"]["f1"]}
    figures = [f"{name} {value:.2f}" for name, value in measured.items() if value is not None]
    print(", ".join([f"{spec.variant}: {entry['status']}", *figures]))
    print(args.runs / spec.run_path / "record.json")
    return 0
