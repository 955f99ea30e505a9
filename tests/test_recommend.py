"""`recommended`: what is chosen for made-up machines, and what takes the place of a choice that fails."""

import dataclasses
import importlib
import math
import pkgutil
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from transformers import BertConfig, DistilBertConfig

import qa_lib
from qa_lib.__main__ import main
from qa_lib.data.squad import DataError
from qa_lib.errors import UserError
from qa_lib.lab import sweep
from qa_lib.lab.launch import anywhere
from qa_lib.lab.launch import local as launch
from qa_lib.lab.launch.recommended import run_in_turn
from qa_lib.lab.report import load
from qa_lib.lab.report.stats import BASELINE, MARGIN, equivalence
from qa_lib.lab.search import recommend as choosing
from qa_lib.lab.search.plan import plan
from qa_lib.measure import hardware
from qa_lib.records import record
from qa_lib.run import recording
from qa_lib.spec.spec import Machine, resolve
from qa_lib.spec.variants import TASKS, VARIANTS, find_recipe
from qa_lib.train.step_log import StepFailed
from tests import faulty, small  # noqa: F401, which has the preset
from tests.conftest import slow
from tests.material import cases, committed, leave, refused, table, write
from tests.tiny import CPU, checkpoint

LARGE = BertConfig(
    num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096
)
MINILM = BertConfig(
    num_hidden_layers=6, hidden_size=384, num_attention_heads=12, intermediate_size=1536
)


def card(name: str, sm: int, gib: float, gpus: int = 1, **more) -> Machine:
    return dataclasses.replace(
        CPU, hardware=name, gpus=gpus, sm=sm, free_mib=int(1024 * gib), **more
    )


T4, A100, L4 = card("t4", 75, 14.6), card("a100-sxm4-40gb", 80, 39), card("l4", 89, 22)
H100 = card("h100-80gb-hbm3", 90, 79)


@pytest.fixture
def models(tmp_path):
    """The models' folders, by name."""
    configs = {"large": LARGE, "minilm": MINILM, "distilbert": DistilBertConfig()}
    for name, config in configs.items():
        config.save_pretrained(tmp_path / name)
    return {"base": "bert-base-uncased"} | {name: str(tmp_path / name) for name in configs}


def unchosen(machine, model="bert-base-uncased", preset="full", **own):
    """What `plan` hands on, without asking the hub for SQuAD."""
    found = {"name": "squad_v2", "sha256": "0"}, {"name": model, "revision": "0"}
    return resolve("recommended", preset, 0, machine, *found, "squad_v2", model, **own)


def chosen(machine, runs, *model, **own):
    found = choosing.choose(unchosen(machine, *model, **own), machine, runs)
    return found.variant, found.settings.micro_batch, found.adjusted[0]


def fails(spec, runs, status, kind=None, step=None):
    """A record of a run of that spec that ended so."""
    return record.read_record(
        leave(runs, spec, status, {"kind": kind, "message": f"what {kind} says", "step": step})
    )


@pytest.mark.parametrize("row", table("recommended"), ids=" ".join)
def test_a_machine_gets_the_quickest_that_it_runs_and_that_fits(row, models, tmp_path):
    name, sm, gib, compiler, model, variant, size, why = row
    machine = card(name, int(sm), float(gib), compiler=compiler == "yes", gpus=int(name != "cpu"))
    *found, said = chosen(machine, tmp_path, models[model])
    assert found == [variant, int(size)] and why in said and "\n" not in said
    assert said.startswith(f"recommended: {variant} at micro-batch {size} on {name}, ")


def test_a_size_that_was_asked_for_stays_and_a_batch_of_ones_own_is_divided(models, tmp_path):
    assert chosen(T4, tmp_path, micro_batch=8)[:2] == ("E-t4-norm", 8)
    assert chosen(T4, tmp_path, batch=48)[:2] == ("E-t4-norm", 48)
    tight = dataclasses.replace(A100, free_mib=2900)
    assert chosen(tight, tmp_path, batch=48)[:2] == ("E-uncompiled", 12)
    refused("E-uncompiled at micro-batch 32 would take 3", chosen, tight, tmp_path, micro_batch=32)


def test_the_size_that_was_measured_to_be_quickest_comes_first():
    def entry(size, speed):
        return {"spec": {"settings": {"micro_batch": size}}, "speed": {"samples_per_s": speed}}

    assert choosing._sizes(unchosen(H100), []) == [32, 16, 8, 4, 2, 1]
    assert choosing._sizes(unchosen(H100), [entry(8, 100.0), entry(32, 90.0)]) == [
        8,
        16,
        32,
        4,
        2,
        1,
    ]


def test_where_nothing_fits_one_line_says_what_to_do(models, tmp_path):
    words = card("gtx-1050", 61, 2, compiler=False), tmp_path, models["large"]
    said = refused("on gtx-1050: A2 at micro-batch 1 would take", chosen, *words)
    assert "of 2.0 GiB that are free" in said and "--max-length" in said and "nvidia-smi" in said


def test_a_checkout_without_records_takes_the_largest_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(choosing, "COMMITTED", tmp_path / "no")
    assert chosen(T4, tmp_path / "none")[:2] == ("E-t4-norm", 32)


def test_what_recommended_may_take_is_in_the_order_of_the_records():
    """From quickest to slowest, each with the baseline's score; and what is there of a language model's."""
    runs, names = committed(), TASKS["qa"]["on_gpu"]
    own = load.usual(load.select(runs, load.REFERENCE))
    speeds = own[own["micro_batch"] == 32].groupby("spec.variant")["speed.samples_per_s"].mean()
    assert speeds[names].is_monotonic_decreasing
    tested = (
        equivalence(load.usual(load.judging(runs, load.REFERENCE)))
        .reindex(names)
        .drop(index=BASELINE)
    )
    assert (tested["best_delta"] >= -MARGIN).all()
    text = (
        load.select(runs, TASKS["lm"]["reference"])
        .groupby("spec.variant")["speed.samples_per_s"]
        .mean()
    )
    on_any, on_old = TASKS["lm"]["on_gpu"][:3], TASKS["lm"]["on_gpu"][3:]
    assert text[on_any].is_monotonic_decreasing and text[on_old].is_monotonic_decreasing
    for name, task in TASKS.items():
        for variant in {*task["on_gpu"], *task["on_cpu"]}:
            assert (
                VARIANTS[variant].task == name
                and find_recipe(VARIANTS[variant].settings.trainable).kind == "all"
            )


def test_plan_puts_it_in_the_place_of_the_name(tmp_path):
    where = {"data": "synthetic:80", "machine": T4, "runs": tmp_path}
    usual, spec, *others = plan(["A1", "recommended"], "smoke", [0, 1], **where)
    found = [(each.variant, each.seed) for each in (usual, spec, *others)]
    assert found == [("A1", 0), ("E-t4-norm", 0), ("A1", 1), ("E-t4-norm", 1)]
    assert (spec.chosen, spec.own, usual.chosen) == (
        ["variant", "micro_batch"],
        {"micro_batch": 16},
        [],
    )
    (named,) = plan(["E-t4-norm"], "smoke", [0], micro_batch=16, **where)
    assert spec == named and spec.run_path == named.run_path, "a recommended run is that run"
    sizes = plan(["recommended"], "smoke", micro_batch=[8, 16], **where)
    assert [(spec.settings.micro_batch, spec.chosen) for spec in sizes] == [
        (8, ["variant"]),
        (16, ["variant"]),
    ]
    assert len(plan(["recommended", "E-t4-norm"], "smoke", micro_batch=16, **where)) == 1
    refused("does not divide", plan, ["recommended"], "smoke", micro_batch=5, **where)
    (text,) = plan(["recommended"], "lm-smoke", **where)
    assert (text.variant, text.settings.micro_batch) == ("L-fp16", 16)


def test_what_a_card_could_not_do_is_passed_over(tmp_path):
    spec = choosing.choose(unchosen(H100), H100, tmp_path)
    fails(spec, tmp_path, "oom", "OutOfMemoryError", step=7)
    *found, said = chosen(H100, tmp_path)
    assert found == ["E-fp8-uncompiled", 16], "the next size, of what ran out of memory"
    assert (
        f"failed here at micro-batch 32 (what OutOfMemoryError says; {spec.group}/{spec.run_id})"
        in said
    )
    fails(
        choosing.choose(unchosen(H100), H100, tmp_path),
        tmp_path,
        "error",
        "CompilationError",
        step=1,
    )
    assert chosen(H100, tmp_path)[:2] == ("E-uncompiled", 32)
    assert chosen(H100, tmp_path, preset="bench")[0] == "E-uncompiled", "whatever the preset"
    for other, length in (
        (dataclasses.replace(H100, hardware="h200"), None),
        (L4, None),
        (H100, 256),
    ):
        assert chosen(other, tmp_path, max_length=length)[:2] == ("E-fp8-uncompiled", 32), (
            "nothing is known of that"
        )
    with pytest.raises(UserError, match="no variant is known"):
        for _ in range(30):
            fails(
                choosing.choose(unchosen(H100), H100, tmp_path), tmp_path, "error", "RuntimeError"
            )
    assert len(choosing._failed(unchosen(H100), tmp_path)) == len(TASKS["qa"]["on_gpu"]) + 1, (
        "two sizes of the first"
    )


def test_a_failure_counts_for_the_model_that_had_it(models, tmp_path):
    """The folder of every model that a run keeps is called `model`."""
    large, little = (
        dataclasses.replace(unchosen(H100), model={"name": "model", "revision": revision})
        for revision in ("a large one", "a small one")
    )
    spec = choosing.choose(large, H100, tmp_path)
    fails(spec, tmp_path, "oom", "OutOfMemoryError", step=1)
    assert len(choosing._failed(large, tmp_path)) == 1 and not choosing._failed(little, tmp_path)


@pytest.mark.parametrize(
    ("status", "kind", "step", "steps", "found"), cases("ends that are the machine's")
)
def test_which_ends_are_the_machines(status, kind, step, steps, found):
    """A file that is not found in the first step is a compiler's; what fails after all steps fails in scoring."""
    error = {"kind": kind, "step": step}
    assert record.unable({"status": status, "error": error, "time": {"steps": steps}}) is found


def test_mistakes_are_told_by_their_kind():
    class Unreachable(ConnectionError):
        """As libraries have them."""

    failed = StepFailed(1)
    failed.__cause__ = FileNotFoundError(2, "no ptxas")
    for problem, mistake in (
        (Unreachable(), True),
        (DataError("x"), True),
        (failed, False),
        (RuntimeError(), False),
    ):
        assert (recording.outcome_of(problem)["error"]["kind"] in record.MISTAKES) is mistake, (
            problem
        )

    for module in pkgutil.walk_packages(qa_lib.__path__, "qa_lib."):
        if not module.name.startswith(
            ("qa_lib.lab.report", "qa_lib.kernels", "qa_lib.__main__", "qa_lib.lab.app.page")
        ):
            importlib.import_module(module.name)
    kinds = [UserError]
    for one in kinds:
        kinds += one.__subclasses__()
        assert (
            one.__module__.startswith(("qa_lib.lab.report", "qa_lib.train", "tests"))
            or one.__name__ in record.MISTAKES
        )


def cold(monkeypatch, folder):
    """The C++ compiler does not work, which only the first step finds out."""
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))


def warm(monkeypatch, folder):
    """Processes are forked, and A4's first step fails by itself."""
    launcher = partial(launch.Launcher, warm=True, command=faulty.command_without_a4)
    monkeypatch.setattr(anywhere, "Launcher", launcher)


@pytest.mark.parametrize("plant", [warm, slow(cold)])
def test_a_first_step_that_fails_gives_way_and_the_next_command_begins_there(
    plant, tmp_path, monkeypatch, capfd
):
    """Each try in a process of its own."""
    plant(monkeypatch, tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["run", "recommended", "--preset", "test", "--runs", str(tmp_path / "runs")]
    assert main(command) == 0
    out, err = capfd.readouterr()
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 100
    lines = out.replace("\n    ", " ").splitlines()
    first, second = (line for line in lines if line.startswith("recommended: "))
    assert first == "recommended: A4 at micro-batch 8 on cpu, the quickest known"
    assert second.startswith(
        "recommended: A2 at micro-batch 8 on cpu, since A4 failed here at micro-batch 8 ("
    )
    assert (
        "Traceback" not in out + err and "A2: ok" in out and (plant is warm or "step 40/40" in out)
    )
    entries = {
        path.name[:2]: record.read_record(path) for path in (tmp_path / "runs").glob("cpu-test/*")
    }
    ends = {
        name: (entry["status"], entry["spec"]["adjusted"][0]) for name, entry in entries.items()
    }
    assert (
        ends == {"A4": ("error", first), "A2": ("ok", second)}
        and entries["A4"]["error"]["step"] == 1
    )
    (log,) = (tmp_path / "runs").glob("cpu-test/A4-*/log.txt")
    assert "Traceback" in log.read_text()

    assert main(command) == 0
    out = capfd.readouterr().out
    assert (
        out.replace("\n    ", " ").startswith(second)
        and "A4 seed" not in out
        and "\nfinished on " in out
        and "A2: ok" in out
    )
    assert entries["A4"] == record.read_record(log.parent)


def test_a_run_that_fails_later_or_by_a_mistake_is_not_replaced(tmp_path, monkeypatch):
    """`fit` says so in one line; what failed would fail again."""

    run_all = Mock(
        side_effect=lambda specs, *_: [
            fails(spec, tmp_path, "error", "DataError") for spec in specs
        ]
    )
    monkeypatch.setattr(launch.Launcher, "run_all", run_all)
    (spec,) = plan(["recommended"], "smoke", runs=tmp_path)
    assert spec.recommended
    refused(f"{spec.run_path}: error, what DataError says ", qa_lib.fit, spec, tmp_path)


def test_a_sweep_goes_on_with_the_next_and_counts_both(tmp_path, monkeypatch, typed):
    """The driver passes on what it has chosen, and says in the record why; its notebooks know the variant alone."""
    monkeypatch.setattr(sweep, "probe", lambda: (CPU, {}))

    def work(self, spec, run_dir, cards):
        named = dataclasses.replace(spec, chosen=[], adjusted=[])
        ends = ("error", "CppCompileError", 1) if spec.variant == "A4" else ("ok",)
        entry = fails(named, self.runs, *ends)
        return launch.judge(spec, run_dir, None, 0, 1.0) | {"time": entry["time"]}

    monkeypatch.setattr(launch.Launcher, "_work", work)
    command = f"sweep --preset smoke --variants recommended,A1 --runs {tmp_path}"
    out = typed(command)
    assert "sweep: 2 runs, 0 finished, 2 to run" in out and "[3/3]" in out and "sweep: 2 ok" in out
    assert (
        out.count("recommended: A4 at micro-batch 8") == 1
        and "recommended: A2 at micro-batch 8" in out
    )
    (path,) = tmp_path.glob("cpu-smoke/A2-*")
    assert record.read_record(path)["spec"]["adjusted"][0].startswith("recommended: A2")
    assert "sweep: 2 runs, 2 finished, 0 to run" in typed(command)


def test_a_process_that_a_compiler_takes_with_it_is_told_from_one_that_was_stopped(tmp_path):
    (spec,) = plan(["recommended"], "smoke", machine=CPU, runs=tmp_path)
    run_dir = tmp_path / spec.run_path

    def judged(one, reason=None):
        record.write_record(run_dir, record.new_record(one, {}))
        (run_dir / "log.txt").write_text("LLVM ERROR: Cannot select\n")
        return launch.judge(one, run_dir, reason, -6, 1.0)

    entry = judged(spec)
    assert (
        record.unable(entry)
        and "exit code -6" in entry["error"]["message"]
        and "LLVM" in entry["error"]["message"]
    )
    assert not record.unable(judged(spec, "the driver was stopped"))
    assert not record.unable(judged(dataclasses.replace(spec, chosen=[]))), (
        "a named variant is nobody's choice"
    )
    write(run_dir / "steps.jsonl", {"step": 2})
    assert record.unable(judged(spec)), "the second step compiles for another shape"
    write(run_dir / "steps.jsonl", {"step": 3})
    assert not record.unable(judged(spec))


def test_a_recommended_run_that_is_finished_is_returned_unless_it_is_forced(tmp_path, monkeypatch):
    (spec,) = plan(["recommended"], "smoke", machine=CPU, runs=tmp_path)
    there = fails(spec, tmp_path, "ok")
    anew = Mock(side_effect=lambda specs, *_: [fails(spec, tmp_path, "ok") for spec in specs])
    monkeypatch.setattr(launch.Launcher, "run_all", anew)
    said = []
    assert qa_lib.fit(spec, tmp_path, say=said.append) == there
    assert said[0] == spec.adjusted[0] and said[1].startswith("finished on ")
    anew.assert_not_called()
    qa_lib.fit(spec, tmp_path, say=said.append, force=True)
    anew.assert_called_once()


class Hung:
    """A process that goes on for ever, and trains `steps` steps, or none and does not begin to."""

    def __init__(self, run_dir, steps):
        record.write_record(run_dir, record.read_record(run_dir) | {"status": "running"})
        if steps is not None:
            (run_dir / "steps.jsonl").write_text(
                "".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1))
            )
        (run_dir / "log.txt").touch()
        self.returncode, self.pid, self.poll, self.kill = -9, 1, Mock(return_value=None), Mock()


@pytest.mark.parametrize(
    ("steps", "recommended", "status", "unable"),
    [
        (0, True, "error", True),
        (2, True, "error", True),
        (3, True, "killed", False),  # by the time limit
        (None, True, "killed", False),
        (0, False, "killed", False),
    ],
)
@pytest.mark.parametrize("limit_s", [0.3, math.inf])
def test_a_first_step_that_hangs_is_ended_and_gives_way(
    steps, recommended, status, unable, limit_s, tmp_path, monkeypatch
):
    """Under a time limit, as in a sweep, and without one, as under `run`."""
    if limit_s == math.inf and not unable:
        pytest.skip("it would go on for ever")
    monkeypatch.setattr(launch, "FIRST_STEP_S", 0.2)
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    monkeypatch.setattr(launch, "kill", Mock())
    (spec,) = plan(["recommended" if recommended else "A1"], "smoke", machine=CPU, runs=tmp_path)
    launcher = launch.Launcher(tmp_path, CPU, {}, time_limit_s=limit_s)
    launcher._start = lambda spec, run_dir, env, log: Hung(run_dir, steps)
    (entry,) = launcher.run_all([spec])
    assert entry["status"] == status and record.unable(entry) is unable
    if limit_s == math.inf:
        assert f"step {steps + 1} was not done after 0.2 s" in entry["error"]["message"]


def test_a_sweep_in_which_a_choice_becomes_one_of_the_others_has_it_once(tmp_path, monkeypatch):
    specs = plan(["recommended", "A2"], "smoke", machine=CPU, runs=tmp_path)
    assert [spec.variant for spec in specs] == ["A4", "A2"]

    def work(self, specs, *_):
        ends = {"A4": ("error", "CppCompileError", 1), "A2": ("ok",)}
        return [fails(spec, tmp_path, *ends[spec.variant]) for spec in specs]

    monkeypatch.setattr(launch.Launcher, "run_all", work)
    monkeypatch.setattr(launch, "is_finished", lambda runs, spec: (runs / spec.run_path).exists())
    found = run_in_turn(launch.Launcher(tmp_path, CPU, {}), specs, lambda _: None)
    assert [spec.variant for spec in found] == ["A2"]


def test_free_memory_is_what_nvml_says_of_the_first_card(monkeypatch):
    ask = Mock(side_effect=[Mock(total=16 * 2**30, used=2**30, free=15 * 2**30), None])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", Mock(return_value=Mock(total_memory=16 * 2**30))
    )
    monkeypatch.setattr(hardware, "ask_nvml", ask)
    assert (hardware._free_mib(), hardware._free_mib()) == (15 * 1024, 16 * 1024)
    ask.assert_called_with(torch.device("cuda", 0), "nvmlDeviceGetMemoryInfo")


def test_memory_predicts_what_would_be_taken_on_such_a_card(tmp_path, typed):
    BertConfig().save_pretrained(tmp_path)
    command = f"memory recommended --preset bench --compute-capability 7.5 --model {tmp_path}"
    said, _, line = typed(command).splitlines()[:3]
    assert said.startswith("recommended: E-t4-norm") and line.split()[:3] == [
        "E-t4-norm",
        "384",
        "32",
    ]
    assert 1 < choosing._needed_gib(unchosen(T4), {}) < 14.6


def test_an_encoder_gets_what_its_layers_allow(tmp_path):
    (spec,) = plan(
        ["recommended"],
        "smoke",
        model=checkpoint("modernbert", tmp_path),
        machine=H100,
        runs=tmp_path,
    )
    assert (
        spec.variant == "E-masters"
        and "since E-t4-norm" in spec.adjusted[0]
        and "predicted" not in spec.adjusted[0]
    )
