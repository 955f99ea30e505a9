"""`python -m qa_lib quickstart`: a few variants of the ladder, trained on a CPU and offline, and what came of it on one
screen. Everything that takes long is done in warm processes; this one never imports torch.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from qa_lib.data.squad import open_source
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.launch.warm import SERVER
from qa_lib.lab.report.figures import timed
from qa_lib.lab.report.format import SAYINGS, factor, number, percent, points, terminal
from qa_lib.lab.report.load import REFERENCE, load_runs, select
from qa_lib.lab.search.plan import plan
from qa_lib.lab.sweep import notebook_command, sweep
from qa_lib.packages import check_runner
from qa_lib.paths import ROOT
from qa_lib.records.record import write_atomically
from qa_lib.spec.spec import Machine, Spec
from qa_lib.spec.variants import tagged

PRESET, MICRO_BATCH, T4 = (
    "smoke",
    32,
    75,
)  # for memory and speed: samples in a forward pass; compute capability x 10


def main(args: argparse.Namespace) -> int:
    """Train what has not been trained yet, and print the summary, which is kept for the next time; 1 if a run fails."""
    kept, names = args.figures / "quickstart.txt", tagged("quickstart")
    # A run's id is the same on every machine.
    ids = [spec.run_id for spec in plan(names, PRESET, machine=Machine())]
    records = [next(args.runs.glob(f"*/{name}/record.json"), None) for name in ids]
    if (
        not kept.exists()
        or None in records
        or kept.stat().st_mtime < max(path.stat().st_mtime for path in records)
    ):
        check_runner()
        with ProcessPoolExecutor(1, mp_context=SERVER) as pool:
            print("PyTorch is being imported, once for all runs", flush=True)
            machine, env = pool.submit(_probe).result()
            specs = plan(names, PRESET, machine=machine)
            launcher = Launcher(args.runs, machine, env, command=notebook_command, warm=True)
            entries = sweep(specs[::-1], launcher)[
                ::-1
            ]  # the longest first: no core is idle at the end
            if any(entry["status"] not in ("ok", "skipped") for entry in entries):
                return 1
            answered = pool.submit(_answer, args.runs / specs[-1].run_path / "model").result()
            peaks = pool.submit(_peaks, names).result()
        table = _table(specs, entries, peaks)
        notebook = args.runs / specs[-1].run_path / "notebook.ipynb"
        figure = os.path.relpath(
            ROOT / "figures" / REFERENCE / "ladder.png"
        )  # a GPU's: a CPU's would rank the reverse
        files = f"Open\n  {notebook}\n  {figure}"
        write_atomically(
            kept, "\n\n".join([table, answered, files, SAYINGS["next"].strip()]) + "\n"
        )
    print(f"\n{kept.read_text(encoding='utf-8')}", end="")
    return 0


def _probe() -> tuple[Machine, dict]:
    from qa_lib.measure.hardware import environment, this_machine

    return this_machine(), environment()


def _table(specs: list[Spec], entries: list[dict], peaks: dict[str, float]) -> str:
    """What each run came to here, and beside it what is predicted for a T4 and was measured on another GPU."""
    every = load_runs(ROOT / "runs")
    there = (
        timed(select(every, REFERENCE)).set_index("variant")
        if REFERENCE in set(every["group"])
        else pd.DataFrame()
    )
    gpu = select(every, REFERENCE)["env.gpu"].iloc[0] if len(there) else "GPU"
    there = there.reindex(
        index=[spec.variant for spec in specs], columns=["samples_per_s", "ratio"]
    )
    table = pd.DataFrame({
        "variant": there.index,
        "F1": [points(entry["quality"]["f1"]) for entry in entries],
        "padding": [percent(entry["speed"]["pad_fraction"]) for entry in entries],
        "T4: peak GiB": [number(peaks[name] / 1024) for name in there.index],
        f"{gpu}: samples/s": there["samples_per_s"].map(number).to_list(),
        "× A1": there["ratio"].map(factor).to_list(),
    })  # fmt: skip
    said = f"""F1 and padding: a tiny BERT on generated questions, trained here. Memory: BERT-base, as predicted
for a T4. Speed: BERT-base, as measured ({REFERENCE}). Both with {MICRO_BATCH} samples in a forward pass."""
    return f"{said}\n\n{terminal(table)}"


def _peaks(names: list[str]) -> dict[str, float]:
    """The predicted peak in MiB of BERT-base on a T4, by variant."""
    from qa_lib.lab.search.memory_estimate import SquadLengths, estimate, gpu_of

    specs = plan(names, "bench", data="synthetic:1", micro_batch=MICRO_BATCH, machine=gpu_of(T4))
    lengths = SquadLengths(specs[0].preset.max_length, specs[0].preset.stride)
    return {spec.variant: estimate(spec, lengths)["peak_mib"] for spec in specs}


def _answer(folder: Path) -> str:
    """A question that the model of a folder is asked, and its answer."""
    from qa_lib.score.predict import ask

    generated = open_source("synthetic:200", "validation").examples
    example = min(
        (example for example in generated if example.answers),
        key=lambda example: len(example.context),
    )
    found = ask(folder, example.question, example.context)
    best = found["nbest"][0]
    return (
        f"A question to the last one\n  {example.context}\n  {example.question}\n"
        f"  -> {best['text'] or 'no answer'}   ({best['probability']:.0%}, {sum(found['ms'].values()):.0f} ms)"
    )
