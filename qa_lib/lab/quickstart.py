"""`python -m qa_lib quickstart`: a few variants of the ladder, trained on a CPU and offline.

What came of them is printed on one screen. Everything that takes long is done in warm processes;
this one never imports torch.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from qa_lib.data.squad import open_source
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
MICRO_BATCH = 32  # samples in a forward pass, for predicted memory and measured speed
T4 = 75  # compute capability x 10
NEXT = """\
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

    The exit code is 1 if a run fails.
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
            last_run = args.runs / specs[-1].run_path
            answer = pool.submit(_answer, last_run / "model").result()
            peaks = pool.submit(_peaks_on_a_t4, variants).result()
        files = f"Open\n  {last_run / 'notebook.ipynb'}\n  {_figure()}"
        sections = [_table(specs, entries, peaks), answer, files, NEXT]
        write_atomically(summary, "\n\n".join(sections))
    print(f"\n{summary.read_text(encoding='utf-8')}", end="")
    return 0


def _is_current(summary: Path, variants: list[str], runs: Path) -> bool:
    """Return whether a summary is there that is newer than the records of all of its runs."""
    # A run's id is the same on every machine.
    specs = plan(variants, PRESET, machine=Machine())
    records = [next(runs.glob(f"*/{spec.run_id}/record.json"), None) for spec in specs]
    if not summary.exists() or None in records:
        return False
    return summary.stat().st_mtime >= max(path.stat().st_mtime for path in records)


def _train(specs: list[Spec], runs: Path, machine: Machine, env: dict) -> list[dict]:
    """Sweep the specs, the longest first, so that no core is idle at the end; their records."""
    launcher = Launcher(runs, machine, env, command=notebook_command, warm=True)
    longest_first = specs[::-1]
    return sweep(longest_first, launcher)[::-1]


def _figure() -> str:
    """Return the path of a GPU's ladder, since a CPU's would rank variants the other way round."""
    return os.path.relpath(ROOT / "figures" / REFERENCE / "ladder.png")


def _table(specs: list[Spec], entries: list[dict], peaks: dict[str, float]) -> str:
    """Return what each run came to here, beside predictions for a T4 and speeds of another GPU.

    `peaks` are MiB, by variant.
    """
    variants = [spec.variant for spec in specs]
    committed = load_runs(ROOT / "runs")
    speeds = pd.DataFrame(columns=["samples_per_s", "ratio"])
    gpu = "GPU"
    if REFERENCE in set(committed["group"]):
        of_reference = select(committed, REFERENCE)
        speeds = timed(of_reference).set_index("variant")
        if len(speeds):
            gpu = of_reference["env.gpu"].iloc[0]
    speeds = speeds.reindex(index=variants, columns=["samples_per_s", "ratio"])
    table = pd.DataFrame({
        "variant": variants,
        "F1": [points(entry["quality"]["f1"]) for entry in entries],
        "padding": [percent(entry["speed"]["pad_fraction"]) for entry in entries],
        "T4: peak GiB": [number(peaks[variant] / 1024) for variant in variants],
        f"{gpu}: samples/s": [number(speed) for speed in speeds["samples_per_s"]],
        "× A1": [factor(ratio) for ratio in speeds["ratio"]],
    })  # fmt: skip
    explanation = (
        "F1 and padding: a tiny BERT on generated questions, trained here. "
        "Memory: BERT-base, as predicted\n"
        f"for a T4. Speed: BERT-base, as measured ({REFERENCE}). "
        f"Both with {MICRO_BATCH} samples in a forward pass."
    )
    return f"{explanation}\n\n{terminal(table)}"


# What imports torch, and so is done in a warm process.


def _probe() -> tuple[Machine, dict]:
    """Return this machine and its environment."""
    from qa_lib.measure.hardware import environment, this_machine

    return this_machine(), environment()


def _peaks_on_a_t4(variants: list[str]) -> dict[str, float]:
    """Return the predicted peak in MiB of BERT-base on a T4, by variant."""
    from qa_lib.lab.search.memory_estimate import estimate, gpu_of
    from qa_lib.lab.search.squad_lengths import SquadLengths

    specs = plan(variants, "bench", data="synthetic:1", micro_batch=MICRO_BATCH, machine=gpu_of(T4))
    lengths = SquadLengths(specs[0].preset.max_length, specs[0].preset.stride)
    return {spec.variant: estimate(spec, lengths)["peak_mib"] for spec in specs}


def _answer(folder: Path) -> str:
    """Return a question that the model of a folder is asked, and its answer, as lines of text."""
    from qa_lib.score.predict import ask

    examples = open_source("synthetic:200", "validation").examples
    answered = [example for example in examples if example.answers]
    example = min(answered, key=lambda example: len(example.context))
    result = ask(folder, example.question, example.context)
    best = result["nbest"][0]
    milliseconds = sum(result["ms"].values())
    return (
        f"A question to the last one\n  {example.context}\n  {example.question}\n"
        f"  -> {best['text'] or 'no answer'}   "
        f"({best['probability']:.0%}, {milliseconds:.0f} ms)"
    )
