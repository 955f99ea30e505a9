"""One run from spec to record: the function behind the notebooks, the command line and the sweep."""

import argparse
import gc
import os
import time
from pathlib import Path

import torch

from qa_lib import record
from qa_lib.data.load import Data, batches_of, load_data
from qa_lib.measure.cost import StepCost
from qa_lib.measure.machine import environment, limit_memory, matrix_rate, train_device, turn
from qa_lib.measure.meter import memory_use
from qa_lib.model.build import DTYPES, build_model, save_model
from qa_lib.run.plan import add_source_arguments, plan
from qa_lib.score.evaluate import evaluate
from qa_lib.spec import Spec
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.engine import train_afresh

USED = "used_by_a_run"  # an attribute of models that have been trained
SHARE = "QA_LIB_SHARE"  # an environment variable: where it is set, other runs train on this GPU at the same time


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
        entry = record.new_record(spec, environment())
        record.write_record(run_dir, entry)
        if spec.skip:
            say(f"{spec.variant}: skipped, {spec.skip}")
            return record.finish(run_dir, entry, "skipped", {"kind": "skipped", "message": spec.skip})
        try:
            _fill(entry, spec, run_dir, data, model, say)
        except (Exception, KeyboardInterrupt) as problem:
            # Beside others it may be they who filled the memory: an error, which is run again, and no result.
            out = _out_of_memory(problem) and not _shares(train_device())
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
    device = train_device()
    if spec.scale.limit_gib and device.type == "cuda":
        limit_memory(spec.scale.limit_gib)
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
    with turn(device, shared, say) as waited_s:
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


def _work(entry, spec, run_dir, data, model, batches, device, begin, say) -> None:
    """What must not be timed beside another run: training and evaluation, measured from `begin`."""
    peak = matrix_rate(device, DTYPES[spec.settings.precision])
    entry["time"]["prepare_s"] = time.perf_counter() - begin
    optimizer, meter, first = train_afresh(model, batches, spec, device, run_dir, say)
    speed, clock = meter.summary(StepCost(model), peak)
    entry["speed"] |= speed
    entry["time"] |= clock | {"resumed_from_step": first or None, "steps": first + clock["steps"]}
    if spec.settings.compile == "none":
        entry["time"]["compile_s"] = None  # nothing was compiled: the slow first steps have other reasons
    else:
        hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        entry["time"]["compile_cached"] = hits > 0  # an earlier run has paid a part of it
    entry["energy"]["joules_per_feature"] = meter.joules_per_feature()
    entry["memory"] |= memory_use(model, optimizer, device)

    if data.validation:
        clock = time.perf_counter()
        entry["quality"] |= evaluate(model, data, spec, device, run_dir)
        entry["time"]["eval_s"] = time.perf_counter() - clock
        save_model(model, data.tokenizer, run_dir / "model")


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
