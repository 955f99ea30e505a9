"""`python -m qa_lib quickstart`: the variants with the tag `quickstart`, trained on a CPU, offline.

Their results are printed on one screen. Everything that needs torch is done in warm processes
(lab/launch/warm.py); this one never imports it.
"""

import argparse
import os
import textwrap
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from qa_lib.data.english import smoke_question
from qa_lib.data.synthetic import vocabulary
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.launch.warm import SERVER
from qa_lib.lab.report.evidence import REFERENCE, load_runs, select
from qa_lib.lab.report.figures import timed
from qa_lib.lab.report.format import factor, number, percent, points
from qa_lib.lab.report.tables import terminal
from qa_lib.lab.search.plan import plan
from qa_lib.lab.sweep import notebook_command, sweep
from qa_lib.packages import check_runner
from qa_lib.paths import ROOT
from qa_lib.records.files import write_atomically
from qa_lib.spec.machine import Machine
from qa_lib.spec.spec import Spec
from qa_lib.spec.variants import tagged

PRESET = "smoke"
# Samples in a forward pass, for predicted memory: as many as the reference runs had, whose speeds
# stand beside it.
MICRO_BATCH = 32
WIDTH = 100  # columns of a terminal
# Why a variant's F1 is low although nothing went wrong.
LOW_BY_DESIGN = {
    "A4-b": "low by design: answers are mixed up",
    "B1": "low by design: no pretrained weights",
}
NEXT_COMMANDS = """\
What to type next
  python -m qa_lib report                     these runs as a page, with a figure
  python -m qa_lib app                        ask this model, and others, in the browser
  python -m qa_lib variants                   what each variant changes, and why
  python -m qa_lib run recommended --preset full
                                              on a GPU: BERT-base on SQuAD v2, three epochs
  make matrix                                 every variant of the reference project, in minutes
"""


def main(args: argparse.Namespace) -> int:
    """Train what has not been trained yet, and print the summary, which is kept for the next time.

    Returns the exit code: 1 if a run fails, of which the sweep has told then.
    """
    variants = tagged("quickstart")
    summary = args.figures / "quickstart.txt"
    if not _is_current(summary, variants, args.runs):
        check_runner()
        with ProcessPoolExecutor(1, mp_context=SERVER) as pool:
            print("PyTorch is being imported, once for all runs", flush=True)
            machine, env = pool.submit(_probe).result()
            specs = plan(variants, PRESET, machine=machine)
            entries = _train(specs, args.runs, machine, env)
            if any(entry["status"] not in ("ok", "skipped") for entry in entries):
                return 1
            # The last variant answers a question, and its notebook is the one to open.
            last_run = args.runs / specs[-1].run_path
            answer = pool.submit(_answer, last_run / "model").result()
            peaks = pool.submit(_peaks_on_a_t4, variants).result()
        files = f"Open\n  {last_run / 'notebook.ipynb'}\n  {_figure_path()}"
        sections = [_table(specs, entries, peaks), answer, files, NEXT_COMMANDS]
        write_atomically(summary, "\n\n".join(sections))
    print(f"\n{summary.read_text(encoding='utf-8')}", end="")
    return 0


def _is_current(summary: Path, variants: list[str], runs: Path) -> bool:
    """Return whether a summary is there that is newer than the records of all of its runs."""
    # A run's id is the same on every machine, so that any does here: to ask this one needs torch.
    specs = plan(variants, PRESET, machine=Machine())
    # The folder above a run's names the hardware, which is not known either.
    records = [next(runs.glob(f"*/{spec.run_id}/record.json"), None) for spec in specs]
    if not summary.exists() or None in records:
        return False
    return summary.stat().st_mtime >= max(path.stat().st_mtime for path in records)


def _train(specs: list[Spec], runs: Path, machine: Machine, env: dict) -> list[dict]:
    """Sweep the specs, and return their records in the same order."""
    launcher = Launcher(runs, machine, env, command=notebook_command, warm=True)
    # Later variants take longer on a CPU. They begin first, so that no core is idle at the end.
    longest_first = specs[::-1]
    entries = sweep(longest_first, launcher)
    return entries[::-1]


def _figure_path() -> str:
    """Return the path of the ladder's picture by the reference GPU.

    One by a CPU would rank variants the other way round.
    """
    return os.path.relpath(ROOT / "figures" / REFERENCE / "ladder.png")


def _table(specs: list[Spec], entries: list[dict], peaks: dict[str, float]) -> str:
    """Return, as text, each run's results beside predictions for a T4 and a GPU's measured speeds.

    `peaks` are MiB, by variant.
    """
    variants = [spec.variant for spec in specs]
    gpu, speeds = _reference_speeds(variants)
    columns = {
        "variant": variants,
        "F1": [points(entry["quality"]["f1"]) for entry in entries],
        "padding": [percent(entry["speed"]["pad_fraction"]) for entry in entries],
        "T4: GiB": [number(peaks[variant] / 1024) for variant in variants],
        "GPU: samples/s": [number(speed) for speed in speeds["samples_per_s"]],
        "× A1": [factor(ratio) for ratio in speeds["ratio"]],
        "note": [LOW_BY_DESIGN.get(variant, "") for variant in variants],
    }
    explanation = (
        "Trained here: F1 and padding of a tiny BERT on generated questions.\n"
        f"Not here: BERT-base, {MICRO_BATCH} samples in a forward pass; its memory as predicted "
        f"for a T4,\nits speed as measured on one {gpu}."
    )
    return f"{explanation}\n\n{terminal(pd.DataFrame(columns))}"


def _reference_speeds(variants: list[str]) -> tuple[str, pd.DataFrame]:
    """Return the name of the reference GPU and the variants' speeds on it, by committed records.

    Columns are samples_per_s and ratio (to A1), empty where nothing is committed.
    """
    gpu = "GPU"
    speeds = pd.DataFrame()
    committed = load_runs(ROOT / "runs")
    if REFERENCE in set(committed["group"]):
        reference = select(committed, REFERENCE)
        speeds = timed(reference).set_index("variant")
        if len(speeds):
            gpu = reference["env.gpu"].iloc[0]
    return gpu, speeds.reindex(index=variants, columns=["samples_per_s", "ratio"])


# These import torch, and so are called in a warm process.


def _probe() -> tuple[Machine, dict]:
    """Return this machine and its environment."""
    from qa_lib.measure.hardware import environment, this_machine

    return this_machine(), environment()


def _peaks_on_a_t4(variants: list[str]) -> dict[str, float]:
    """Return the predicted peak in MiB of BERT-base on a T4, by variant."""
    from qa_lib.lab.search.t4 import peaks_on_a_t4

    return peaks_on_a_t4(variants, MICRO_BATCH)


def _answer(folder: Path) -> str:
    """Ask the model of a folder a question, and return this and its answer as lines of text."""
    from qa_lib.score.predict import ask

    example = smoke_question()
    result = ask(folder, example.question, example.context)
    best = result["nbest"][0]
    milliseconds = sum(result["ms"].values())
    context = textwrap.fill(example.context, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return (
        f"A question to the last model. It was trained here on {len(vocabulary())} words, "
        f"and reads no others.\n{context}\n  {example.question}\n"
        f"  -> {best['text'] or 'no answer'}   "
        f"({best['probability']:.0%}, {milliseconds:.0f} ms)"
    )
