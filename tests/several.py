"""Made-up records of rows on several GPUs, as `sweep --preset parallel` and `--preset critical-batch` leave them.

Each number follows from a law that is written here, so that a test can say what a table has to find.
"""

import dataclasses
import json
from itertools import product

import numpy as np

from qa_lib import record
from qa_lib.record import Noise
from qa_lib.spec import Machine, resolve
from qa_lib.train.grad_noise import efficiency

GPUS = Machine("h200", gpus=4, sm=90, backends=("inductor",), bitsandbytes=True, compiler=True)
DATA, MODEL = {"name": "squad", "sha256": "ab" * 32}, {"name": "bert", "revision": "1"}
PHI = 400.0  # samples, from the middle of a training on
FEATURES = 40_000  # of a training


def write(
    runs, variant, preset, seed=0, *, world=1, batch=32, micro_batch=8, stages=None, log=None, name="", **values
):  # fmt: skip
    """A record that ended ok, with these values by path ('parallel.bubble') and the lines of its log; of a row `name`
    that is otherwise as `variant`."""
    own = {"world": world, "stages": stages, "batch": batch}
    spec = resolve(variant, preset, seed, GPUS, DATA, MODEL, "squad/", "bert/", micro_batch, **own)
    spec = dataclasses.replace(spec, variant=name or variant)
    entry = record.new_record(spec, {"python": "3.11", "gpu": "NVIDIA H200"})
    entry["code"] = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}
    entry["time"]["wall_s"] = 60.0
    if world > 1:
        entry["parallel"] |= {"world": world, "weights_equal": True}
    for path, value in values.items():
        section = entry
        *parts, name = path.split(".")
        for part in parts:
            section = section[part]
        section[name] = value
    folder = runs / spec.run_path
    record.finish(folder, entry, "ok")
    if log:
        (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return folder


def timed(runs, variant, seed=0, *, ms, world=1, batch=32, **more):
    """A run of preset `parallel` whose steps take so many milliseconds, some percent more or less by its seed; those of
    process n take n percent longer than the first's, twice that with seed 1, and thrice with seed 2."""
    ms *= 1 + 0.01 * (seed - 1)
    speed = {"speed.samples_per_s": 1e3 * batch / ms, "time.step_ms.median": ms}
    peaks = {"parallel.rank_peak_mib": {str(rank): 3000.0 + 10 * rank for rank in range(world)}}
    steps = {"parallel.rank_step_ms": {str(rank): ms * (1 + 0.01 * rank * (seed + 1)) for rank in range(world)}}
    memory = {"memory.peak_alloc_mib": 3000.0} | (peaks | steps if world > 1 else {})
    return write(runs, variant, "parallel", seed, world=world, batch=batch, **speed | memory | more)


def parallel_group(runs):
    """P-one-bucket takes 2 ms, 0.25 ms for each sample of a GPU, and 1 ms of waiting where there are several; P1 takes
    1.6 ms for each sample. Three seeds each; pipelines once."""
    for seed in range(3):
        for batch in (8, 16, 32, 64, 128):
            timed(runs, "E-dropout", seed, ms=2 + 0.25 * batch, batch=batch, micro_batch=min(batch, 32))
        timed(runs, "A1", seed, ms=51.2)
        for world in (1, 2, 4):
            for batch in {32, 32 * world, 128}:
                waits = 1.0 if world > 1 else 0.0
                ms, more = 2 + 0.25 * batch / world + waits, {"parallel.exposed_ms": waits} if waits else {}
                timed(runs, "P-one-bucket", seed, ms=ms, world=world, batch=batch, **more)
                timed(runs, "P1", seed, ms=1.6 * batch / world, world=world, batch=batch)
    timed(runs, "E-masters-eager", ms=20.0)
    measured = {
        "parallel.bubble": 0.24,
        "parallel.bubble_formula": 0.2,
        "parallel.rank_computing_ms": {"0": 11.4, "1": 11.97},
        "parallel.allreduce_gbs": 300.0,
    }
    for variant, world, stages, batch in (("P-gpipe", 2, 2, 32), ("P-1f1b", 4, 2, 32), ("P-1f1b", 4, 4, 128)):
        timed(runs, variant, ms=15.0, world=world, stages=stages, batch=batch, **measured)


def made_log(batch, seed, phi=True):
    """A training's lines: its loss falls with the samples that it has seen, by their efficiency at PHI, and scatters
    as one over the root of the batch."""
    chance, steps = np.random.default_rng(seed), FEATURES // batch
    progress = efficiency(Noise(sqr=1.0, var=PHI), batch) * batch * np.arange(1, steps + 1) / FEATURES
    loss = 1 + 5 * np.exp(-5 * progress) + chance.normal(scale=1.6 / np.sqrt(batch), size=steps)
    lines = [{"step": step, "loss": float(value), "lr": 1e-4, "ms": 10.0} for step, value in enumerate(loss, 1)]
    for line in lines[9::10] if phi else ():
        line["phi"] = PHI * min(1.0, line["step"] / steps / 0.1)
    return lines


def slides_group(runs):
    """Logs by `made_log`; held-out loss that knows no GPUs; a noise scale of PHI, some percent more or less by seed."""
    noise = {"parallel.noise": {"sqr": 1e-3, "var": 1e-3 * PHI, "steps": 1000}}
    for batch, seed in product((16, 32, 64), range(3)):
        world = 1 if seed else batch // 16  # one GPU may stand for several, with all of their batch
        more = {"spec.planned_steps": FEATURES // batch, "quality.loss": 1.1, "speed.gpu_busy": 0.9}
        write(runs, "P0", "critical-batch", seed, world=world, batch=batch, micro_batch=batch // world,
              log=made_log(batch, seed, phi=False), **more | {"time.step_ms.median": 60.0})  # fmt: skip
    write(runs, "P0", "critical-batch", name="P0-polled", world=2, batch=32, micro_batch=16,
          **{"time.step_ms.median": 500.0, "speed.gpu_busy": 0.1, "speed.gpu_busy_polled": 0.12})  # fmt: skip
    for seed in range(3):
        noise["parallel.noise"]["var"] = 1e-3 * PHI * (1 + 0.02 * seed)
        for batch in (32, 64, 128):
            write(
                runs, "P-one-bucket", "critical-batch", seed, world=2, batch=batch, log=made_log(batch, seed), **noise
            )
        write(runs, "P-zero1", "critical-batch", seed, world=2, log=made_log(32, seed), **noise)
        write(runs, "P-1f1b", "critical-batch", seed, world=4, stages=2, log=made_log(32, seed), **noise)
        write(runs, "P-one-bucket", "critical-batch", seed, world=4, log=made_log(32, seed), **noise)
