"""Very many records: python -m tests.many FOLDER [--records N] [--groups N], then the report and the dashboard, timed.

Made by the real record functions, one for each row, and copied with other names and numbers: 5,000 take seconds.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

from qa_lib import record
from qa_lib.app import dashboard
from qa_lib.spec import Machine, resolve
from qa_lib.variants import VARIANTS

GPU = Machine("h200", gpus=1, sm=90, backends=("inductor", "aot_eager", "cudagraphs"), bitsandbytes=True, compiler=True)


def write(folder: Path, records: int, groups: int = 1) -> None:
    """So many records in so many groups, each of all rows at equal seeds, as far as they reach."""
    chance, per_group = random.Random(0), records // groups
    data, model = {"name": "synthetic:1600", "sha256": "ab" * 32}, {"name": "tiny", "revision": "1"}
    rows = [resolve(name, "smoke", 0, GPU, data, model, "synthetic:1600", "tiny") for name in VARIANTS]
    made = [record.new_record(spec, {"python": "3.11", "gpu": "NVIDIA H200"}) for spec in rows]
    for i in range(groups * per_group):
        group, number = f"card{i // per_group}-smoke", i % per_group
        entry, seed = made[number % len(made)], number // len(made)
        entry |= {"group": group, "run_id": f"{entry['spec']['variant']}-s{seed}-{seed:06x}", "status": "ok"}
        entry["spec"] |= {"seed": seed, "hardware": f"card{i // per_group}", "planned_steps": 400, "n_eval": 400}
        speed = chance.uniform(90, 110)
        entry["speed"] |= {"samples_per_s": speed, "tokens_per_s": 180 * speed, "gemm_utilization": speed / 1000}
        entry["time"] |= {"ended": record.now(), "train_s": 1e4 / speed, "compile_s": 1.5, "wall_s": 1.1e4 / speed}
        entry["time"]["step_ms"] = {"n": 370, "median": 1e3 / speed, "p10": 900 / speed, "p90": 1200 / speed}
        entry["quality"] |= dict.fromkeys(("exact", "f1", "best_f1"), chance.uniform(94, 96)) | {"n": 400}
        entry["memory"]["peak_alloc_mib"] = chance.uniform(1900, 2100)
        entry["model"] |= {"params_total": 75_000, "params_trainable": 75_000}
        path = folder / group / entry["run_id"] / "record.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(entry, indent=1) + "\n")


def timed(*words: str) -> float:
    """Seconds that a verb takes in a process of its own, imports included."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "qa_lib", *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--records", type=int, default=5_000)
    parser.add_argument("--groups", type=int, default=1)
    args = parser.parse_args()
    runs, figures = args.folder / "runs", args.folder / "figures"
    write(runs, args.records, args.groups)
    for what in ("first report", "report again"):
        print(f"{what}: {timed('report', '--runs', str(runs), '--figures', str(figures)):.1f} s", flush=True)
    begin = time.perf_counter()
    dashboard(runs, figures)
    print(f"dashboard of the newest group: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
