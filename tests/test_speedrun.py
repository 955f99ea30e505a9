"""notebooks/speedrun.ipynb and docs/speedrun.md: clocks, verdict, history, and what the page has to type."""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from qa_lib.__main__ import main
from qa_lib.data.squad import open_source
from qa_lib.lab.launch import local as launch
from qa_lib.lab.report import evidence
from qa_lib.records.record import read_record, run_files
from qa_lib.run.plan import plan
from tests.material import ROOT, change_record, committed, document, question, refused, write
from tests.report_runs import make
from tests.test_notebooks import names, run_here
from tests.tiny import H200

NOTEBOOK = ROOT / "notebooks" / "speedrun.ipynb"
PAGE = (ROOT / "docs" / "speedrun.md").read_text(encoding="utf-8")


def scored(runs, preset, variant, f1, train_s, day=1, **asked):
    """Runs on the official dev set of five seeds, whose F1 is that in the mean."""
    steps = "".join(f'{{"step": {n}, "ms": {ms}}}\n' for n, ms in [(1, 6000), (2, 1000 * train_s)])
    for seed in range(5):
        folder = make(runs, variant, seed, machine=H200, preset=preset, **asked)
        (folder / "steps.jsonl").write_text(steps)
        time = {"notebook_s": train_s + 20.0}
        time["started"] = f"2026-12-0{day}T00:00:0{seed}+00:00"
        quality = {"best_f1": f1 + 0.1 * (seed - 2), "n": 11_873}
        change_record(folder, quality=quality, model={"layers": 6}, time=time)


def run_at_smoke_size(runs):
    """The texts that the notebook shows of A2, one seed, with no records committed."""
    read = evidence.load_runs
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(evidence, "load_runs", lambda *own: read(*own) if own else committed()[:0])
        data = run_here(NOTEBOOK, variant="A2", seeds="0", runs=str(runs))
    return "\n".join(each.get("text/markdown", "") for each in data)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What the notebook shows of a run that has been made up, and its names."""
    runs = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "run_cold", lambda spec, runs: read_record(make(runs, spec.variant)))
        texts = run_at_smoke_size(runs)
    return SimpleNamespace(texts=texts, **{name: names()[name] for name in ("verdict", "recipes")})


def test_it_shows_a_line_a_recipe_and_no_verdict_at_smoke_size(shown):
    assert "| cpu-smoke | A2 |" in shown.texts and "*Not shown: no record yet.*" in shown.texts
    assert "*Not shown: a record takes preset speedrun, 6 layers, seeds 0 to 4" in shown.texts


@pytest.mark.slow
def test_at_smoke_size_it_trains_and_shows_both_clocks(tmp_path):
    texts = run_at_smoke_size(tmp_path)
    (path,) = run_files(tmp_path, "record.json")
    entry = read_record(path.parent)
    assert entry["status"] == "ok" and entry["time"]["notebook_s"] > entry["time"]["wall_s"]
    assert "training s | prompt to score s" in texts


@pytest.mark.parametrize(("f1", "said"), [(67.2, "met by 0.20"), (66.9, "missed by 0.10")])
def test_the_verdict_is_by_the_mean_of_five_seeds(shown, tmp_path, f1, said):
    scored(tmp_path, "quality", "A1", 67.5, 25.0)
    scored(tmp_path, "speedrun", "A2", f1, 14.0)
    runs = evidence.load_runs(tmp_path)
    assert f"**The target is {said}**: best F1 {f1:.2f}, wanted 67.00." == shown.verdict(runs, runs)


def test_there_is_no_verdict_by_other_rules(shown, tmp_path):
    scored(tmp_path, "speedrun", "A2", 70.0, 14.0)
    without_target = evidence.load_runs(tmp_path)
    refused(
        "no target yet, for lack of A1's seeds 0 to 4",
        shown.verdict,
        without_target,
        without_target,
    )
    for column, value in {
        "quality.n": 6_078,
        "model.layers": 12,
        "spec.seed": 7,
        "spec.preset.name": "local",
    }.items():
        other = without_target.copy()
        other.loc[other["spec.seed"] == 3, column] = value
        refused("a record takes preset speedrun", shown.verdict, other, without_target)


def test_the_history_has_a_line_a_recipe_of_the_archived_records(shown, tmp_path):
    scored(tmp_path, "speedrun", "A2", 67.2, 22.0)
    scored(tmp_path, "speedrun", "A2", 67.3, 11.0, day=2, micro_batch=32)
    assert main(["archive", "h200-speedrun", "--runs", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "h200-speedrun")
    table = shown.recipes(evidence.load_runs(tmp_path))
    columns = ["micro-batch", "seeds", "training s", "prompt to score s", "× line above"]
    first, second = table[columns].values.tolist()
    assert first == ["8", "5", "22.0 ± 0.0", "42.0 ± 0.0", "–"]
    assert second == ["32", "5", "11.0 ± 0.0", "31.0 ± 0.0", "×2.00"]


def test_a_cold_run_finds_nothing_cached_and_is_timed_whole(tmp_path, monkeypatch):
    (spec,) = plan(["recommended"], "smoke", seeds=[3], runs=tmp_path)
    made = make(tmp_path, "A1")

    def run(command, env, check):
        folders = {
            env[name] for name in ("QA_LIB_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        assert len(folders) == 3 and not any(map(os.path.exists, folders))
        chosen = f"--micro-batch={spec.asked.micro_batch}"  # for this machine
        assert {"run", spec.variant, "--seed=3", "--data=synthetic:1600", chosen} <= {*command}
        made.rename(tmp_path / spec.run_path)

    monkeypatch.setattr(launch.subprocess, "run", run)
    entry = launch.run_cold(spec, tmp_path)
    assert (
        entry == read_record(tmp_path / spec.run_path) and entry["time"]["notebook_s"] is not None
    )


def typed(beginning):
    """The block of the page that has this in it."""
    (block,) = (
        block for block in re.findall(r"```text\n(.*?)```", PAGE, re.S) if beginning in block
    )
    return block.replace("python ", f"{shlex.quote(sys.executable)} ")


def test_what_the_page_has_to_type_holds_articles_out_and_names_the_data(tmp_path):
    articles = [
        document((f"alice {i}", [question(f"q{i}", "who?", ("alice", 0))]))["data"][0]
        for i in range(25)
    ]
    (tmp_path / "squad").mkdir()
    write(tmp_path / "squad" / "train.json", {"data": articles})

    def sh(block):
        shell = {"shell": True, "cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
        return subprocess.run(block, **shell, capture_output=True, text=True, check=True).stdout

    sh(typed("mkdir tuning"))
    train, validation = (
        open_source(tmp_path / "tuning", split).examples for split in ("train", "validation")
    )
    assert [each.id for each in validation] == ["q0", "q10", "q20"] and len(train) == 22
    whole = "\n".join(sorted(f"q{i}" for i in range(25)))
    assert sh(typed("hashlib")) == f"25 {hashlib.sha256(whole.encode()).hexdigest()}\n"


def test_the_page_has_the_records_that_are_committed():
    runs = committed()
    groups = set(runs.loc[runs["spec.preset.name"] == "speedrun", "group"])
    assert [group for group in groups if f"runs/{group}.jsonl" not in PAGE] == []
    assert ("No entry yet." in PAGE) == (not groups)
