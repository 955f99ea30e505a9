"""Records for tests of the report, made by the real record functions.

A change of the schema breaks the tests that use them.
"""

import dataclasses

import pandas as pd

from qa_lib.spec.resolve import resolve
from tests.material import leave
from tests.tiny import CPU, H200

# samples/s that records of a variant have where a test says nothing else
SPEEDS = {
    "A0": 95.0,
    "A1": 100.0,
    "A2": 120.0,
    "A3": 150.0,
    "A4-nb": 160.0,
    "A4": 200.0,
    "B1": 300.0,
    "C2": 80.0,
}
OTHER_SPEED = 110.0


def make(
    runs,
    variant,
    seed=0,
    *,
    machine=CPU,
    preset="smoke",
    status="ok",
    error=None,
    micro_batch=8,
    world=1,
    batch=None,
    length=None,
    precision=None,
    model="tiny",
    revision="1",
    params=75_000,
    speed=None,
    f1=None,
    peak=None,
    resumed=None,
):
    """Write one record as fit would, and return its folder.

    Without a speed, F1 or peak the record has usual ones. `batch` is the effective batch, and
    `resumed` the step from which the run went on.
    """
    spec = resolve(
        variant,
        preset,
        seed,
        machine,
        data={"name": "synthetic:1600", "sha256": "ab" * 32},
        model={"name": model, "revision": revision},
        data_source="synthetic:1600",
        model_source="tiny",
        micro_batch=micro_batch,
        world=world if batch else None,
        batch=batch,
    )
    spec = dataclasses.replace(
        spec,
        preset=dataclasses.replace(spec.preset, max_length=length or spec.preset.max_length),
        asked=dataclasses.replace(spec.asked, precision=precision or spec.asked.precision),
        world=world,
    )
    sections = {"code": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}}
    if status == "ok":
        sections |= _sections_of_a_good_run(variant, machine, params, speed, f1, peak, resumed)
    return leave(runs, spec, status, error, {"python": "3.11", "gpu": None}, **sections)


def _sections_of_a_good_run(variant, machine, params, speed, f1, peak, resumed):
    """Return the sections of a record that only a run has which ended ok."""
    speed = speed or SPEEDS.get(variant, OTHER_SPEED)
    step_ms = 32e3 / speed
    train_s = 9600 / speed
    f1 = f1 or (30.0 if variant == "A4-b" else 95.0)
    peak = peak or (2000.0 if machine is H200 else None)
    return {
        "time": {
            "train_s": train_s,
            "compile_s": 1.5,
            "eval_s": 1.0,
            "wall_s": train_s + 4.0,
            "resumed_from_step": resumed,
            "step_ms": {"n": 270, "median": step_ms, "p10": 0.9 * step_ms, "p90": 1.2 * step_ms},
        },
        "quality": {"f1": f1, "best_f1": f1, "exact": f1, "n": 400},
        "speed": {"samples_per_s": speed},
        "memory": {"peak_alloc_mib": peak},
        "model": {"params_total": params, "params_trainable": 750 if variant == "B1" else params},
    }


def make_one_of_each_kind(runs):
    """Write eleven records of group cpu-smoke: nine ended ok, one was skipped, one ran out of
    memory."""
    for variant in ("A0", "A1", "A2", "A3", "A4-nb", "A4", "A4-b", "B1", "C2"):
        make(runs, variant)
    skipped = {"kind": "skipped", "message": "no backend named 'nvfuser'"}
    make(runs, "D1-nvfuser", status="skipped", error=skipped)
    oom = {"kind": "OutOfMemoryError", "message": "CUDA out of memory", "step": 3}
    make(runs, "C1", status="oom", error=oom)


def gpu_runs(*lines):
    """Runs that are columns alone: (variant, GPUs, batch, micro-batch, samples/s, other columns).

    All have ended ok.
    """
    rows = []
    for variant, world, batch, micro_batch, speed, more in lines:
        rows.append({
            "run_id": f"{variant}-{len(rows)}",
            "spec.variant": variant,
            "spec.seed": 0,
            "spec.hardware": "h200",
            "status": "ok",
            "model": "bert",
            "data": "squad",
            "precision": "own",
            "length": 384,
            "training": "",
            "world": world,
            "stages": 1,
            "batch": batch,
            "micro_batch": micro_batch,
            "speed.samples_per_s": speed,
            "code.commit": "a",
            "code": "a",
            **more,
        })  # fmt: skip
    return pd.DataFrame(rows)
