"""A plan of evidence: read from its file, resumed from records, and run in blocks or GPU by GPU."""

import dataclasses
import datetime
import functools
import json
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from qa_lib.__main__ import main
from qa_lib.lab.queue import verb
from qa_lib.lab.queue.plan_file import Group, read_plan
from qa_lib.lab.queue.runner import Archives, TimedLauncher
from qa_lib.lab.queue.units import (
    COLD_START_S,
    MOST_BETWEEN_S,
    START_S,
    Recorded,
    Unit,
    next_units,
    units_of,
)
from qa_lib.lab.search.plan import plan as plan_specs
from qa_lib.loaded import CODE
from qa_lib.records.archive import read_runs
from qa_lib.records.record import read_record
from qa_lib.records.schema import PROFILE_SCHEMA
from qa_lib.spec.machine import Machine
from qa_lib.spec.rules import lacking
from qa_lib.spec.variants import VARIANTS, find_variant, tagged
from tests import small
from tests.material import ROOT, change_record, leave, refused, without_torch, write

COMMITTED = ROOT / "docs" / "evidence.toml"
# A speed in blocks of two variants, and a quality in single runs, at the preset of tests.small.
PLAN = """cards = ["cpu"]

[[groups]]
name = "speed"
why = "Which of two is quicker."
preset = "test"
model = "tiny"
data = "synthetic:80"
micro_batch = 8
variants = ["A1", "A2"]
seeds = [0, 1]
alone = true
seconds = 100

[[groups]]
name = "quality"
why = "Which of two is better."
preset = "test"
model = "tiny"
data = "synthetic:80"
micro_batch = 8
variants = ["A1", "A2"]
seeds = [2]
alone = false
seconds = 60
"""
BEGAN = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC)


@pytest.fixture
def path(tmp_path):
    """The file of PLAN."""
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


@pytest.fixture
def plan(path):
    return read_plan(path)


def spec_of(variant, seed):
    """The spec of a run of PLAN."""
    (spec,) = plan_specs([variant], "test", [seed], micro_batch=8, machine=Machine())
    return spec


def leave_run(runs, variant, seed, after=0.0, lasting=10.0, digest=CODE.digest, **more):
    """Leave a run of PLAN, which began so many seconds after BEGAN and lasted some; its folder."""
    return leave_spec(runs, spec_of(variant, seed), after, lasting, digest, **more)


def leave_spec(runs, spec, after=0.0, lasting=10.0, digest=CODE.digest, **more):
    """Leave a run of a spec likewise."""
    begin = BEGAN + datetime.timedelta(seconds=after)
    folder = leave(runs, spec, code={"digest": digest}, **more)
    ended = begin + datetime.timedelta(seconds=lasting)
    times = {"started": begin.isoformat(), "ended": ended.isoformat(), "wall_s": lasting}
    change_record(folder, time=times)
    return folder


def missing_of(plan, runs):
    """The units that are not recorded, as (group, seed, variants)."""
    recorded = Recorded(plan, "cpu", runs)
    units = [unit for unit in units_of(plan.groups) if not recorded.results(unit)]
    return [(unit.group.name, unit.seed, unit.variants) for unit in units]


# The file.


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "seeds = [2]",
            "sedes = [2]",
            "group 'quality': unknown key 'sedes'; did you mean 'seeds'",
        ),
        ("seeds = [2]\n", "", "group 'quality': 'seeds' is missing"),
        ("seeds = [2]", "seeds = []", r"group 'quality': seeds is \(?\[?.*at least 1 item"),
        ("seeds = [2]", "seeds = [-1]", "group 'quality': seeds.0 is '-1'"),
        ('"A2"]\nseeds = [2]', '"A22"]\nseeds = [2]', "'quality': unknown variant 'A22'; did you"),
        ('"A2"]\nseeds = [2]', '"L1"]\nseeds = [2]', "'quality': L1 is a variant of task lm"),
        ('"A2"]\nseeds = [2]', '"recommended"]\nseeds = [2]', "unknown variant 'recommended'"),
        ('"A2"]\nseeds = [2]', '"P1"]\nseeds = [2]', "P1 takes several GPUs: give world"),
        ("seeds = [2]", "seeds = [2]\nworld = 2", "on several GPUs are timed, and need alone"),
        ("seeds = [0, 1]", "seeds = [0, 1]\nworld = 2", "no variant takes several GPUs"),
        ("seeds = [0, 1]", "seeds = [0, 1]\nworld = 1", "world is '1': .* 2"),
        (
            '"A2"]\nseeds = [0, 1]',
            '"P1"]\nseeds = [0, 1]\nworld = 2',
            "A1 takes one GPU beside others: give one_gpu_batch",
        ),
        ("seeds = [2]", "seeds = [2]\none_gpu_batch = 8", "no variant takes one GPU beside"),
        ("seeds = [2]", "seeds = [1, 2]", r"A\d with seed 1 at preset test is there 2 times"),
        ("seeds = [2]", "seeds = [2]\nlearning_rate = 1.0", "learning_rate is '1.0'"),
        ("alone = false", 'alone = "no"', "group 'quality': alone is 'no'"),
        ("alone = false", "alone = false\ncold = true", "need alone = true"),
        ('cards = ["cpu"]', "", "'cards' is missing"),
        ('cards = ["cpu"]', 'card = "cpu"', "unknown key 'card'; did you mean 'cards'"),
        ('cards = ["cpu"]', 'cards = "cpu"', "cards is 'cpu': Input should be a valid tuple"),
        ('cards = ["cpu"]', "cards = []", "cards is .*at least 1 item"),
        ("[[groups]]", "[[groups", "not readable as TOML"),
        ('name = "quality"\n', "", "group 2: 'name' is missing"),
        (PLAN, 'cards = ["cpu"]\ngroups = [1]', "group 1: is '1'"),
        (
            'variants = ["A1", "A2"]\nseeds = [2]',
            'variants = ["A3"]\nseeds = [2, 2]',
            r"A3 with seed 2 .* is there 2 times \(groups with A3: quality\)",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_told_in_one_line(path, old, new, said):
    assert old in PLAN
    path.write_text(PLAN.replace(old, new))
    assert refused(said, read_plan, path).startswith(str(path))


def test_a_plan_that_is_not_there_is_told(tmp_path):
    refused("no.toml: No such file", read_plan, tmp_path / "no.toml")


def test_two_groups_may_have_a_seed_at_batches_of_their_own(path):
    path.write_text(PLAN.replace("seeds = [2]", "seeds = [0]\nbatch = 8"))
    assert read_plan(path).groups[1].sized_preset("A1").batch == 8


# Blocks on two GPUs.


def with_two_gpus(batch, micro_batch, one_gpu_batch):
    """PLAN, but for a block of a variant on one GPU and of another one on two."""
    sizes = f"batch = {batch}\nworld = 2\none_gpu_batch = {one_gpu_batch}"
    text = PLAN.replace("seeds = [0, 1]", f"seeds = [0, 1]\n{sizes}")
    text = text.replace("micro_batch = 8", f"micro_batch = {micro_batch}", 1)
    return text.replace('["A1", "A2"]', '["E-uncompiled", "P-nccl"]', 1)


@pytest.mark.parametrize(
    ("sizes", "of_one", "of_two"),
    [
        ((64, 32, 32), (32, 32, 1), (32, 64, 2)),
        ((128, 64, 128), (128, 128, 1), (64, 128, 2)),
    ],
    ids=["as many samples a GPU", "as many samples in all"],
)
def test_a_block_on_two_gpus_has_a_variant_on_one(sizes, of_one, of_two, path):
    path.write_text(with_two_gpus(*sizes))
    group = read_plan(path).groups[0]
    machine = Machine(gpus=2, sm=90, compiler=True, hardware="h200")
    specs = verb.Specs(None, None, machine, path.parent).of(units_of([group])[0])
    assert [spec.variant for spec in specs] == ["E-uncompiled", "P-nccl"]
    planned = [(spec.settings.micro_batch, spec.preset.batch, spec.world) for spec in specs]
    assert planned == [of_one, of_two]


def test_a_block_on_two_gpus_is_left_out_where_there_is_one(path, capsys):
    path.write_text(with_two_gpus(64, 32, 32))
    group = read_plan(path).groups[0]
    machine = Machine(gpus=1, sm=90, compiler=True, hardware="h200")
    assert not verb.Specs(None, None, machine, path.parent).of(units_of([group])[0])
    assert "left out of speed: P-nccl: needs 2 GPUs" in capsys.readouterr().err


def test_the_example_of_a_block_on_two_gpus_is_one(path):
    page = (ROOT / "docs" / "evidence.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    path.write_text(f'cards = ["h200"]\n{example}')
    assert read_plan(path).groups[0].world == 2


def test_a_record_counts_with_as_many_processes_as_its_group_has(path, tmp_path):
    path.write_text(with_two_gpus(16, 8, 8).replace("E-uncompiled", "A1").replace("P-nccl", "P1"))
    plan = read_plan(path)
    unit = units_of(plan.groups)[0]
    names = {"seeds": [0], "machine": Machine()}
    (single,) = plan_specs(["A1"], "test", micro_batch=8, batch=8, **names)
    (double,) = plan_specs(["P1"], "test", micro_batch=8, batch=16, world=2, **names)
    leave_spec(tmp_path, single)
    folder = leave_spec(tmp_path, double, after=20)
    assert Recorded(plan, "cpu", tmp_path).results(unit)
    change_record(folder, spec={"world": 4})
    assert not Recorded(plan, "cpu", tmp_path).results(unit)


# The committed plan.


def test_every_variant_of_the_committed_plan_fits_its_model():
    kinds = {"all-mpnet-base-v2": "mpnet"}  # the others are BERTs
    for group in read_plan(COMMITTED).groups:
        kind = "gpt2" if group.model.startswith("gpt2:") else kinds.get(group.model, "bert")
        for variant in group.variants:
            assert not lacking(find_variant(variant).settings, kind)


def test_every_block_of_the_committed_plan_fits_into_one_command():
    groups = [group for group in read_plan(COMMITTED).groups if group.alone]
    assert all(group.seconds * len(group.variants) <= 500 for group in groups)


def test_every_step_of_the_ladder_is_measured_in_a_block_with_its_parent_and_both_ends():
    ladder = [group for group in read_plan(COMMITTED).groups if group.name.startswith("ladder-")]
    assert all({"A1", "E-uncompiled"} <= set(group.variants) for group in ladder)
    for name in tagged("ladder"):
        parent = VARIANTS[name].parent
        if VARIANTS[name].task == "qa" and parent:
            assert any({name, parent} <= set(group.variants) for group in ladder), name


def test_variants_of_equal_seeds_are_of_one_block_in_the_committed_plan():
    seeds = {}
    for group in read_plan(COMMITTED).groups:
        if group.alone:
            keys = {
                (group.sized_preset(name), group.model, group.sizes(name))
                for name in group.variants
            }
            for key in keys:
                assert seeds.setdefault(key, set()).isdisjoint(group.seeds), group.name
                seeds[key].update(group.seeds)


# What is recorded.


def test_a_block_counts_once_all_of_it_is_recorded(plan, tmp_path):
    leave_run(tmp_path, "A1", 0)
    assert ("speed", 0, ("A1", "A2")) in missing_of(plan, tmp_path)
    leave_run(tmp_path, "A2", 0, after=20)
    assert ("speed", 0, ("A1", "A2")) not in missing_of(plan, tmp_path)


def leave_run_on_other_data(runs, variant, seed, after):
    """Leave a run of PLAN whose data have the same name and other contents."""
    spec = spec_of(variant, seed)
    leave_spec(runs, dataclasses.replace(spec, data=spec.data | {"sha256": "cd" * 32}), after)


@pytest.mark.parametrize("after", [-20, 20])
def test_two_runs_of_a_variant_do_not_stand_for_that_of_another(after, plan, tmp_path):
    leave_run(tmp_path, "A1", 0)
    leave_run_on_other_data(tmp_path, "A1", 0, after)
    assert ("speed", 0, ("A1", "A2")) in missing_of(plan, tmp_path)


@pytest.mark.parametrize("after", [-1000, 1000])
def test_a_block_has_one_run_of_each_variant_though_one_ran_at_another_time_too(
    after, plan, tmp_path
):
    leave_run_on_other_data(tmp_path, "A1", 0, after)
    leave_run(tmp_path, "A1", 0)
    leave_run(tmp_path, "A2", 0, after=20)
    block = units_of(plan.groups)[0]
    found = Recorded(plan, "cpu", tmp_path).results(block)
    assert [run.record["spec"]["variant"] for run in found] == ["A1", "A2"]
    assert found[0].record["time"]["started"] == BEGAN.isoformat()


@pytest.mark.parametrize("after", [-20, 11 + MOST_BETWEEN_S])
def test_runs_of_two_sittings_are_no_block(after, plan, tmp_path):
    """The second variant was recorded before the first one was, or long after it."""
    leave_run(tmp_path, "A1", 0)
    leave_run(tmp_path, "A2", 0, after=after)
    assert ("speed", 0, ("A1", "A2")) in missing_of(plan, tmp_path)


@pytest.mark.parametrize(("codes", "counts"), [((), False), (("abc",), True), (("abd",), False)])
def test_records_of_an_earlier_code_count_where_the_plan_names_it(codes, counts, plan, tmp_path):
    plan = dataclasses.replace(plan, codes=codes)
    leave_run(tmp_path, "A1", 2, digest="abcdef")
    single = units_of(plan.groups)[-2]
    assert bool(Recorded(plan, "cpu", tmp_path).results(single)) == counts


def test_a_single_run_counts_whenever_it_was_made(plan, tmp_path):
    leave_run(tmp_path, "A2", 2)
    leave_run(tmp_path, "A1", 2, after=1e6)
    assert [name for name, _, _ in missing_of(plan, tmp_path)] == ["speed", "speed"]


def test_a_run_that_ran_out_of_memory_has_its_result(plan, tmp_path):
    leave_run(tmp_path, "A1", 2, status="oom")
    assert ("quality", 2, ("A1",)) not in missing_of(plan, tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        {"digest": "0" * 64},
        {"digest": None},
        {"status": "killed"},
        {"status": "error"},
        {"data": {"name": "squad"}},
        {"model": {"name": "bert-base"}},
    ],
    ids=str,
)
def test_a_run_of_other_code_data_or_model_or_without_a_result_does_not_count(
    other, plan, tmp_path
):
    leave_run(tmp_path, "A1", 2, **other)
    assert ("quality", 2, ("A1",)) in missing_of(plan, tmp_path)


def test_a_run_of_another_preset_does_not_count(plan, tmp_path):
    folder = leave_run(tmp_path, "A1", 2)
    change_record(folder, spec={"preset": read_record(folder)["spec"]["preset"] | {"steps": 9}})
    assert ("quality", 2, ("A1",)) in missing_of(plan, tmp_path)


def test_a_run_takes_as_long_as_the_longest_like_it_whatever_its_code(plan, tmp_path):
    leave_run(tmp_path, "A1", 5, lasting=20.0, digest="0" * 64)
    leave_run(tmp_path, "A1", 6, lasting=30.0)
    recorded = Recorded(plan, "cpu", tmp_path)
    block, *_, single, _ = units_of(plan.groups)
    assert recorded.seconds(single) == 30 + START_S
    assert recorded.seconds(block) == 30 + START_S + 100, "A2 has no like run"


def test_a_cold_run_takes_longer_to_begin(path, tmp_path):
    path.write_text(PLAN.replace("alone = true", "alone = true\ncold = true"))
    leave_run(tmp_path, "A1", 5, lasting=20.0)
    plan = read_plan(path)
    block = units_of(plan.groups)[0]
    assert Recorded(plan, "cpu", tmp_path).seconds(block) == 20 + COLD_START_S + 100


# What comes next.


class Guessed:
    """Stands for what is recorded: each unit takes what its group guesses."""

    def seconds(self, unit):
        return unit.group.seconds * len(unit.variants)


def unit(name, alone, seconds):
    """A unit of one run that is expected to take some seconds."""
    group = Group(
        name=name,
        why="-",
        preset="test",
        model="tiny",
        data="synthetic:80",
        micro_batch=8,
        variants=("A1",),
        seeds=(0,),
        alone=alone,
        seconds=seconds,
    )
    return Unit(group, 0, group.variants)


LONG, SHORT = unit("long", True, 400), unit("short", True, 100)
SINGLES = [unit(f"single {number}", False, 60 + number) for number in range(5)]


@pytest.mark.parametrize(
    ("units", "seconds", "places", "chosen"),
    [
        ([LONG, SHORT], 500, 1, [LONG]),
        ([LONG, SHORT], 300, 1, [SHORT]),
        ([LONG], 300, 1, []),
        ([LONG], 400, 1, [LONG]),
        (SINGLES[:1], 60, 1, SINGLES[:1]),
        ([LONG, *SINGLES], 500, 4, [LONG]),
        ([LONG, *SINGLES], 130, 1, SINGLES[:2]),
        ([*SINGLES], 130, 2, SINGLES[:4]),
        ([*SINGLES], 400, 2, SINGLES),
        ([*SINGLES[:2], SHORT, *SINGLES[2:]], 500, 4, SINGLES[:2]),
    ],
)
def test_what_comes_next_is_the_first_that_ends_in_time(units, seconds, places, chosen):
    assert next_units(units, Guessed(), seconds, places) == chosen


# The verb.


@pytest.fixture
def queue(path, tmp_path, monkeypatch, capsys):
    return Queue(path, tmp_path / "runs", monkeypatch, capsys)


class Queue:
    """The verb on PLAN, whose runs write records and train nothing."""

    def __init__(self, path, runs, patch, output):
        self.path = path
        self.runs = runs
        self.patch = patch
        self.output = output
        patch.setattr(verb, "probe", lambda: (Machine(), {}))
        self.let_runs()

    def let_runs(self, **more):
        """Let each run be a process of tests.small with these words, such as its pause."""
        command = functools.partial(small.pretend_command, **more)
        launcher = functools.partial(TimedLauncher, command=command)
        self.patch.setattr(verb, "TimedLauncher", launcher)

    def run(self, *words, code=0):
        """Run the verb, and return which runs ended, such as 'A1 seed 0: ok'."""
        assert main(["queue", str(self.path), "--runs", str(self.runs), *words]) == code
        self.said = self.output.readouterr()
        lines = [line.split(" ", 1)[1] for line in self.said.out.splitlines() if ": ok" in line]
        return [line.split(",")[0] for line in lines]


def test_a_plan_is_run_in_its_order_and_then_no_more(queue):
    assert queue.run() == [f"{name} seed {seed}" for seed in (0, 1, 2) for name in ("A1", "A2")]
    assert queue.run() == []


def test_the_runs_of_a_group_have_its_learning_rate_and_count(path, queue):
    path.write_text(PLAN.replace("seeds = [2]", "seeds = [2]\nlearning_rate = 6e-5"))
    assert queue.run("--groups", "quality") == ["A1 seed 2", "A2 seed 2"]
    records = [read_record(folder) for folder in queue.runs.glob("cpu-test/*")]
    assert {record["spec"]["preset"]["learning_rate"] for record in records} == {6e-5}
    assert queue.run("--groups", "quality") == []


def test_a_host_that_begins_bare_goes_on_from_the_archives_alone(queue, tmp_path):
    copies = tmp_path / "copies"
    queue.run("--groups", "speed", "--copy-to", str(copies))
    archives = {path.name for path in queue.runs.glob("*.*")}
    assert {path.name for path in copies.iterdir()} == archives
    shutil.rmtree(queue.runs)
    shutil.copytree(copies, queue.runs)
    assert queue.run() == ["A1 seed 2", "A2 seed 2"]


def test_a_broken_block_is_begun_again_whole(queue):
    queue.run("--groups", "speed")
    (queue.runs / "cpu-test.jsonl").unlink()
    shutil.rmtree(queue.runs / spec_of("A2", 1).run_path)
    assert queue.run("--groups", "speed") == ["A1 seed 1", "A2 seed 1"]


def test_nothing_begins_that_would_not_end_in_time(queue):
    assert queue.run("--within", "50") == []
    assert "not begun: 4 blocks and runs that would not end in time" in queue.said.out


def test_a_profile_of_the_same_options_is_archived_with_the_plans_run(plan, tmp_path):
    profile = {"schema": PROFILE_SCHEMA}
    leave_run(tmp_path, "A1", 0)
    unit = units_of(plan.groups)[0]
    spec, _ = verb.Specs(None, None, Machine(), tmp_path).of(unit)
    # The spec that the verb `profile` makes, without a plan's arguments.
    profiled = plan_specs(["A1"], "test", [0], "synthetic:80", "tiny", 8, machine=Machine())
    assert [spec.run_path] == [spec.run_path for spec in profiled]
    write(tmp_path / spec.run_path / "profile.json", profile)
    Archives(plan, "cpu", tmp_path, copies=None).keep_all()
    shutil.rmtree(tmp_path / spec.group)
    (run,) = read_runs(tmp_path)
    assert run.profile() == profile


def test_a_run_is_ended_when_the_time_is_over_and_its_block_is_not_archived(queue):
    queue.path.write_text(PLAN.replace("seconds = 100", "seconds = 1"))
    queue.let_runs(pause=1.0)
    begin = time.monotonic()
    assert queue.run("--groups", "speed", "--within", "5", code=1) == []
    assert time.monotonic() - begin < 30
    assert "A1 seed 0, micro-batch 8: killed" in queue.said.out
    assert "A2" not in queue.said.out.split("plan.toml")[0], "the rest of a broken block is left"
    assert not (queue.runs / "cpu-test.jsonl").exists()


def test_the_runs_of_a_block_that_was_broken_off_are_archived_and_do_not_count(queue):
    def stop(spec, entry):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "_tell", stop)
        queue.run("--groups", "speed", code=130)
    lines = (queue.runs / "cpu-test.jsonl").read_text().splitlines()
    assert [json.loads(line)["spec"]["variant"] for line in lines] == ["A1"]
    again = queue.run("--groups", "speed")
    assert again == [f"{name} seed {seed}" for seed in (0, 1) for name in ("A1", "A2")]


def test_a_run_is_told_with_its_speed(queue):
    queue.run("--groups", "quality")
    spec = spec_of("A1", 2)
    entry = read_record(queue.runs / spec.run_path)
    entry["speed"]["samples_per_s"] = 3409.1
    verb._tell(spec, entry)
    assert queue.output.readouterr().out.endswith("ok, 0 s, 3,409 samples/s\n")


def test_groups_are_run_in_the_order_in_which_they_are_named(queue):
    named = queue.run("--groups", "quality", "speed")
    assert named[:3] == ["A1 seed 2", "A2 seed 2", "A1 seed 0"]


def test_a_stopped_command_loses_nothing_that_was_finished(queue, monkeypatch, tmp_path):
    ended = []

    def stop_at_the_second(spec, entry):
        ended.append(spec.variant)
        if len(ended) == 2:
            raise KeyboardInterrupt

    queue.let_runs(pause=0.01)
    copies = tmp_path / "copies"
    with monkeypatch.context() as patch:
        patch.setattr(verb, "_tell", stop_at_the_second)
        queue.run("--groups", "quality", "--copy-to", str(copies), code=130)
    shutil.rmtree(queue.runs)
    shutil.copytree(copies, queue.runs)
    assert queue.run("--groups", "quality") == []


def test_a_record_says_how_long_the_process_of_its_run_took(queue):
    queue.run("--groups", "quality")
    times = read_record(queue.runs / spec_of("A1", 2).run_path)["time"]
    assert times["notebook_s"] > times["wall_s"]


def test_a_cold_run_finds_empty_caches_and_leaves_none(queue, monkeypatch, tmp_path):
    queue.path.write_text(PLAN.replace("alone = true", "alone = true\ncold = true"))
    seen = []

    class Watched(TimedLauncher):
        def _start(self, *words):
            seen.append(self.variables["TORCHINDUCTOR_CACHE_DIR"])
            return super()._start(*words)

    launcher = functools.partial(Watched, command=small.pretend_command)
    monkeypatch.setattr(verb, "TimedLauncher", launcher)
    queue.run("--groups", "speed")
    assert len(set(seen)) == 4, "each run has caches of its own"
    assert not any(Path(folder).parent.exists() for folder in seen)
    assert read_record(queue.runs / spec_of("A1", 0).run_path)["time"]["compile_cached"] is False


@pytest.mark.parametrize(("cold", "is_warm"), [("false", True), ("true", False)])
def test_runs_begin_warm_unless_their_group_is_cold(cold, is_warm, queue, monkeypatch):
    queue.path.write_text(PLAN.replace("alone = true", f"alone = true\ncold = {cold}"))
    launcher = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(verb, "TimedLauncher", launcher)
    queue.run("--groups", "speed", code=130)
    assert launcher.call_args.kwargs["warm"] is is_warm


@pytest.mark.parametrize(("cold", "starts"), [("false", 1), ("true", 0)])
def test_imports_begin_before_the_machine_is_probed_unless_all_is_cold(
    cold, starts, queue, monkeypatch
):
    queue.path.write_text(PLAN.replace("alone = true", f"alone = true\ncold = {cold}"))
    start_server = Mock()
    monkeypatch.setattr(verb, "start_server", start_server)
    monkeypatch.setattr(verb, "probe", Mock(side_effect=KeyboardInterrupt))
    queue.run("--groups", "speed", code=130)
    assert start_server.call_count == starts


def test_the_state_of_a_plan_is_told_without_torch_a_gpu_or_data(tmp_path):
    said = without_torch(tmp_path, "-m", "qa_lib", "queue", str(COMMITTED), "--status")
    plan = read_plan(COMMITTED)
    assert len(said.splitlines()) == len(plan.cards) * (len(plan.groups) + 2)
    assert "minutes of a GPU are missing" in said


def test_the_state_of_a_plan_says_what_is_done_and_what_is_missing(queue):
    leave_run(queue.runs, "A1", 0)
    leave_run(queue.runs, "A2", 0, after=20, lasting=30.0)
    leave_run(queue.runs, "A1", 2)
    queue.run("--status")
    speed, quality = queue.said.out.splitlines()[1:3]
    assert speed.split() == "speed 1/2 blocks 1 min: seeds 1".split()
    assert quality.split() == "quality 1/2 runs 1 min: A2 ×1".split()


def test_a_plan_for_other_cards_is_refused(queue):
    queue.path.write_text(PLAN.replace('["cpu"]', '["h100-80gb-hbm3", "h200"]'))
    queue.run(code=2)
    assert "is a plan for h100-80gb-hbm3 and h200, and this is cpu" in queue.said.err


def test_a_plan_of_several_cards_is_made_on_each_on_its_own(queue):
    queue.path.write_text(PLAN.replace('["cpu"]', '["h200", "cpu"]'))
    assert len(queue.run("--groups", "quality")) == 2
    queue.run("--groups", "quality", "--status")
    on_h200, on_cpu = queue.said.out.split("of a GPU are missing\n")[:2]
    assert "h200, code" in on_h200
    assert "quality    0/2" in on_h200
    assert "cpu, code" in on_cpu
    assert "quality    2/2" in on_cpu


def test_a_group_whose_data_are_not_given_is_left_out_and_the_others_run(queue):
    quality = PLAN.index('name = "quality"')
    text = PLAN[:quality] + PLAN[quality:].replace("synthetic:80", "squad-large")
    queue.path.write_text(text)
    assert len(queue.run()) == 4
    assert "left out of quality: give --data .../squad-large" in queue.said.err


def test_a_folder_that_does_not_exist_is_told(queue):
    queue.run("--data", "no-such-folder", code=2)
    assert "--data no-such-folder: it does not exist" in queue.said.err


def test_an_unknown_group_is_told_with_the_nearest(queue):
    queue.run("--groups", "sped", code=2)
    assert "unknown group 'sped'; did you mean 'speed'?" in queue.said.err


def test_variants_that_cannot_run_here_are_told(queue):
    queue.path.write_text(PLAN.replace('["A1", "A2"]\nseeds = [2]', '["A1", "A3"]\nseeds = [2]'))
    assert queue.run("--groups", "quality") == ["A1 seed 2"]
    assert "left out of quality: A3: " in queue.said.err


def test_single_runs_have_every_gpu_twice_and_blocks_the_first_one(plan):
    speed, quality = plan.groups
    machine = Machine(gpus=2, sm=90)
    assert verb._gpus_for(machine, speed) == [0]
    assert verb._gpus_for(machine, quality) == [0, 1, 0, 1]


def test_blocks_on_two_gpus_have_the_first_two(path):
    path.write_text(with_two_gpus(64, 32, 32))
    assert verb._gpus_for(Machine(gpus=4, sm=90), read_plan(path).groups[0]) == [0, 1]


def test_the_state_of_a_plan_counts_the_minutes_of_each_gpu(queue):
    queue.path.write_text(with_two_gpus(64, 32, 32))
    queue.run("--groups", "speed", "--status")
    assert "7 min on 2 GPUs: seeds 0 1" in queue.said.out
    assert "about 13 minutes of a GPU are missing" in queue.said.out
