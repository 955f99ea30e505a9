"""notebooks/speedrun.ipynb and docs/speedrun.md: clocks, verdict, history, what to type."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from qa_lib.__main__ import main
from qa_lib.data.squad import open_source
from qa_lib.lab.launch import cold
from qa_lib.lab.report import evidence, speedrun
from qa_lib.lab.search.plan import plan
from qa_lib.records.record import read_record, run_files
from tests.material import ROOT, change_record, committed, document, question, refused, write
from tests.report_runs import make
from tests.test_notebooks import run_here
from tests.tiny import H200

NOTEBOOK = ROOT / "notebooks" / "speedrun.ipynb"
PAGE = (ROOT / "docs" / "speedrun.md").read_text(encoding="utf-8")


def make_scored(runs, preset, variant, f1, train_s, day=1, **asked):
    """Write the runs of five seeds on the official dev set, with that F1 in the mean.

    Each began on a day of December, and took 20 s beside its training.
    """
    first = {"step": 1, "ms": 6000}
    second = {"step": 2, "ms": 1000 * train_s}
    for seed in range(5):
        folder = make(runs, variant, seed, machine=H200, preset=preset, **asked)
        (folder / "steps.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
        change_record(
            folder,
            quality={"best_f1": f1 + 0.1 * (seed - 2), "n": 11_873},
            model={"layers": 6},
            time={
                "notebook_s": train_s + 20.0,
                "started": f"2026-12-0{day}T00:00:0{seed}+00:00",
            },
        )


def run_at_smoke_size(runs):
    """Return the texts that the notebook shows of A2, one seed, with no records committed."""
    load_runs = evidence.load_runs

    def load_own_runs(*folders):
        return load_runs(*folders) if folders else committed()[:0]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(evidence, "load_runs", load_own_runs)
        outputs = run_here(NOTEBOOK, variant="A2", seeds="0", runs=str(runs))
    return "\n".join(output.get("text/markdown", "") for output in outputs)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What the notebook shows of a run that has been made up."""
    runs = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold, "run_cold", lambda spec, runs: read_record(make(runs, spec.variant)))
        texts = run_at_smoke_size(runs)
    return texts


def test_it_shows_a_line_a_recipe_and_no_verdict_at_smoke_size(shown):
    assert "| cpu-smoke | A2 |" in shown
    assert "*Not shown: no record yet.*" in shown
    assert "*Not shown: a record takes preset speedrun, 6 layers, seeds 0 to 4" in shown


@pytest.mark.slow
def test_at_smoke_size_it_trains_and_shows_both_clocks(tmp_path):
    texts = run_at_smoke_size(tmp_path)
    (path,) = run_files(tmp_path, "record.json")
    record = read_record(path.parent)
    assert record["status"] == "ok"
    assert record["time"]["notebook_s"] > record["time"]["wall_s"]
    assert "training s | prompt to score s" in texts


@pytest.mark.parametrize(("f1", "said"), [(67.2, "met by 0.20"), (66.9, "missed by 0.10")])
def test_the_verdict_is_by_the_mean_of_five_seeds(tmp_path, f1, said):
    make_scored(tmp_path, "quality", "A1", 67.5, 25.0)
    make_scored(tmp_path, "speedrun", "A2", f1, 14.0)
    runs = evidence.load_runs(tmp_path)
    assert f"**The target is {said}**: best F1 {f1:.2f}, wanted 67.00." == speedrun.verdict(
        runs, runs
    )


@pytest.fixture
def entry(tmp_path):
    """Five runs that keep the rules, without a baseline that sets the target."""
    make_scored(tmp_path, "speedrun", "A2", 70.0, 14.0)
    return evidence.load_runs(tmp_path)


def test_there_is_no_verdict_without_a_target(entry):
    refused("no target yet, for lack of A1's seeds 0 to 4", speedrun.verdict, entry, entry)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("quality.n", 6_078),
        ("model.layers", 12),
        ("spec.seed", 7),
        ("spec.preset.name", "local"),
    ],
)
def test_there_is_no_verdict_by_other_rules(entry, column, value):
    other = entry.copy()
    other.loc[other["spec.seed"] == 3, column] = value
    refused("a record takes preset speedrun", speedrun.verdict, other, entry)


def test_the_history_has_a_line_a_recipe_of_the_archived_records(tmp_path):
    make_scored(tmp_path, "speedrun", "A2", 67.2, 22.0)
    make_scored(tmp_path, "speedrun", "A2", 67.3, 11.0, day=2, micro_batch=32)
    assert main(["archive", "h200-speedrun", "--runs", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "h200-speedrun")
    table = speedrun.recipes(evidence.load_runs(tmp_path))
    columns = ["micro-batch", "seeds", "training s", "prompt to score s", "× line above"]
    first, second = table[columns].values.tolist()
    assert first == ["8", "5", "22.0 ± 0.0", "42.0 ± 0.0", "–"]
    assert second == ["32", "5", "11.0 ± 0.0", "31.0 ± 0.0", "×2.00"]


def test_a_cold_run_finds_nothing_cached_and_is_timed_whole(tmp_path, monkeypatch):
    (spec,) = plan(["recommended"], "smoke", seeds=[3], runs=tmp_path)
    made = make(tmp_path, "A1")
    started = {}

    def run(command, env, check):
        started["command"] = command
        started["caches"] = {
            env[name] for name in ("QA_LIB_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        started["warm"] = [folder for folder in started["caches"] if os.path.exists(folder)]
        made.rename(tmp_path / spec.run_path)

    monkeypatch.setattr(cold.subprocess, "run", run)
    record = cold.run_cold(spec, tmp_path)
    assert len(started["caches"]) == 3
    assert started["warm"] == []
    micro_batch = f"--micro-batch={spec.asked.micro_batch}"  # as chosen for this machine
    words = {"run", spec.variant, "--seed=3", "--data=synthetic:1600", micro_batch}
    assert words <= set(started["command"])
    assert record == read_record(tmp_path / spec.run_path)
    assert record["time"]["notebook_s"] is not None


def test_a_cold_run_begins_without_its_record_and_is_timed_to_the_end_of_its_process(
    tmp_path, monkeypatch
):
    """On a clock that the command alone moves."""
    (spec,) = plan(["A2"], "smoke", machine=H200)
    folder = make(tmp_path, "A2").rename(tmp_path / "made")
    run_dir = tmp_path / spec.run_path
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "record.json").write_text("of before")
    now = 5.0

    def run(*_, **__):
        nonlocal now
        now = 17.25
        assert list(run_dir.iterdir()) == []
        shutil.copy(folder / "record.json", run_dir)

    monkeypatch.setattr(cold.subprocess, "run", run)
    monkeypatch.setattr(cold.time, "monotonic", lambda: now)
    times = cold.run_cold(spec, tmp_path)["time"]
    assert times["notebook_s"] == 12.25
    assert times["compile_cached"] is False


# The page.


def command_of_page(part):
    """Return the block of the page that has this in it, for this Python."""
    blocks = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    (block,) = [block for block in blocks if part in block]
    return block.replace("python ", f"{shlex.quote(sys.executable)} ")


@pytest.fixture
def type_here(tmp_path):
    """Type a block in a shell, in a folder with training data of 25 articles; what it prints."""
    documents = [
        document((f"alice {i}", [question(f"q{i}", "who?", ("alice", 0))])) for i in range(25)
    ]
    articles = [one["data"][0] for one in documents]
    (tmp_path / "squad").mkdir()
    write(tmp_path / "squad" / "train.json", {"data": articles})

    def shell(block):
        done = subprocess.run(
            block,
            shell=True,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    return shell


def test_what_the_page_has_to_type_holds_articles_out(tmp_path, type_here):
    type_here(command_of_page("mkdir tuning"))
    train = open_source(tmp_path / "tuning", "train").examples
    validation = open_source(tmp_path / "tuning", "validation").examples
    assert [example.id for example in validation] == ["q0", "q10", "q20"]
    assert len(train) == 22


def test_what_the_page_has_to_type_names_the_data(type_here):
    ids = "\n".join(sorted(f"q{i}" for i in range(25)))
    digest = hashlib.sha256(ids.encode()).hexdigest()
    assert type_here(command_of_page("hashlib")) == f"25 {digest}\n"


def test_the_page_has_the_records_that_are_committed():
    runs = committed()
    groups = set(runs.loc[runs["spec.preset.name"] == "speedrun", "group"])
    assert [group for group in groups if f"runs/{group}.jsonl" not in PAGE] == []
    assert ("No entry yet." in PAGE) == (not groups)
