"""The bench of one's own training: ways in turns, the file that it goes on from, the limit."""

import itertools
import json
import math
import re
import statistics
import time
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch

from qa_lib.own import bench, bench_turns, bench_ways
from qa_lib.own.bench_turns import TimeIsUp, WayFailed
from tests.own_ways import idle

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = bench_ways.SIZES["tiny"]
BRIEF = "--task labels --batch 4 --samples 16 --steps 1 --warm-up 1 --rounds 2 --ways".split()


class Told:
    """A connection that keeps what is sent, and gives the sign to go on at once."""

    def __init__(self):
        self.sent = []

    def send(self, answer):
        self.sent.append(answer)

    def recv(self):
        self.sent.append("waits")


# Turns of a way.


def test_a_way_waits_after_its_warm_up_and_after_each_turn_but_the_last(monkeypatch):
    monkeypatch.setattr(bench_turns, "LEAD_IN", 2)
    connection = Told()
    turns = bench_turns.Turns(warm_up=4, batch=8, steps=3, turns=2, connection=connection)
    assert turns.further_steps == 10
    for loss in range(14):
        turns.step(torch.tensor(loss))
    setup, _, first, _, last = connection.sent
    assert connection.sent[1::2] == ["waits", "waits"]
    assert setup["setup_s"] >= 2 * setup["step_s"] > 0
    assert (first["steps"], last["steps"]) == (3, 3)
    assert first["last_loss"] == 4.0  # the mean of all nine so far
    assert last["kernel_ms"] is None


def test_a_way_that_waits_keeps_no_memory_for_later_steps(monkeypatch):
    """It gives it back before others are told, and after its own time was taken."""
    monkeypatch.setattr(bench_turns, "LEAD_IN", 1)
    connection = Told()
    turns = bench_turns.Turns(warm_up=1, batch=8, steps=1, turns=2, connection=connection)
    monkeypatch.setattr(bench_turns, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: connection.sent.append("is timed"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: connection.sent.append("gives back"))
    for _ in range(3):
        turns.step()
    told = ["told" if isinstance(answer, dict) else answer for answer in connection.sent]
    waits = ["gives back", "told", "waits"]
    assert told == ["is timed", *waits, "is timed", "is timed", *waits]


def test_a_turn_is_timed_without_its_lead_in_and_without_the_waiting(monkeypatch):
    clock = iter([0, 10, 11, 100, 105])
    monkeypatch.setattr(bench_turns, "LEAD_IN", 1)
    monkeypatch.setattr(bench_turns.Turns, "now", lambda self: next(clock))
    connection = Told()
    turns = bench_turns.Turns(warm_up=2, batch=8, steps=2, turns=1, connection=connection)
    for _ in range(5):
        turns.step()
    assert connection.sent[0] == {"setup_s": 11, "step_s": 1.0}
    assert connection.sent[-1]["samples_per_s"] == 2 * 8 / 5


def test_kernels_are_timed_after_the_last_turn(monkeypatch):
    monkeypatch.setattr(bench_turns, "LEAD_IN", 1)
    monkeypatch.setattr(bench_turns, "PROFILED", 3)
    connection = Told()
    turns = bench_turns.Turns(warm_up=1, batch=8, steps=2, turns=2, connection=connection)
    turns.kernels = Mock(kernel_ms=5.0)
    assert turns.further_steps == 9
    seen = []
    turns.kernels.finished.side_effect = lambda steps: seen.append((turns.steps, steps))
    for _ in range(10):
        turns.step()
    assert seen == [(7, 0), (10, 3)]
    results = [answer for answer in connection.sent if "kernel_ms" in answer]
    assert [answer["kernel_ms"] for answer in results] == [None, 5.0]
    assert results[1]["steps"] == 2  # without those that were profiled


@pytest.mark.parametrize("way", ["loop", "trainer", "trainer-tuned", "fast-trainer"])
def test_a_way_takes_its_turns(way):
    connection = Told()
    bench.train_in_turns(connection, way, bench.parsed([*BRIEF, way]), 2)
    speeds = [answer["samples_per_s"] for answer in connection.sent if "samples_per_s" in answer]
    assert len(speeds) == 2
    assert min(speeds) > 0


@pytest.mark.parametrize(
    ("way", "is_sped_up", "takes_packed", "dtype", "is_packed"),
    [
        ("loop", False, False, torch.float32, False),
        ("speed_up", True, False, torch.float32, False),
        ("packing", False, True, torch.float32, True),
        ("masters", True, False, torch.bfloat16, True),
        ("all", True, False, torch.bfloat16, True),
    ],
)
def test_a_way_of_the_bench_has_these_techniques(
    way, is_sped_up, takes_packed, dtype, is_packed, monkeypatch
):
    seen = Mock()
    loaders = ("padded_loader", "packed_loader")
    for name in ("speed_up", "take_packed", "time_loop", "plain_step", "master_step", *loaders):
        monkeypatch.setattr(bench_ways, name, getattr(seen, name))
    bench.train_by(way, bench.parsed([*BRIEF, way]), 1, bench_turns.Measured(1, 4))
    make = seen.master_step if dtype == torch.bfloat16 else seen.plain_step
    model = make.call_args.args[0]
    assert model.dtype == dtype
    assert (seen.speed_up.called, seen.take_packed.called) == (is_sped_up, takes_packed)
    loader = seen.packed_loader if is_packed else seen.padded_loader
    assert seen.time_loop.call_args.args[:2] == (make.return_value, loader.return_value)


# The order of turns, the file and the limit.


class FakeWay:
    """A way that is set up in one second, whose step takes one, and of which all are kept."""

    made: ClassVar[dict]
    faults: ClassVar[dict]

    def __init__(self, name, train, arguments):
        self.name = name
        self.turns = arguments[-1]
        self.setup = {}
        self.is_stopped = False
        FakeWay.made[name] = self

    def await_setup(self, deadline):
        self._fail("await_setup")
        self.setup = {"setup_s": 1.0, "step_s": 1.0}

    def take_turn(self, deadline):
        self._fail("take_turn")
        return {"samples_per_s": 8.0, "steps": 1, "reserved_gib": None, "kernel_ms": None}

    def _fail(self, where):
        if (self.name, where) in self.faults:
            raise self.faults[self.name, where]

    def stop(self):
        self.is_stopped = True


@pytest.fixture
def ways(monkeypatch):
    """FakeWay in place of processes; the test may give it faults."""
    monkeypatch.setattr(bench, "Way", FakeWay)
    monkeypatch.setattr(FakeWay, "made", {}, raising=False)
    monkeypatch.setattr(FakeWay, "faults", {}, raising=False)
    yield FakeWay
    assert all(way.is_stopped for way in FakeWay.made.values())


def measured(out: str) -> list[tuple[int, str]]:
    """Return (round, way) of each line of JSON."""
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return [(line["round"], line["way"]) for line in lines]


IN_TURNS = [(0, "all"), (0, "loop"), (1, "all"), (1, "loop")]


def test_ways_take_turns_round_after_round(ways, capsys):
    assert bench.main([*BRIEF, "all", "loop"]) == 0
    out, err = capsys.readouterr()
    assert measured(out) == IN_TURNS
    assert err.splitlines() == [
        "set up at the same time: all, loop",
        "round 1 of 2: all",
        "round 1 of 2: loop",
        "round 2 of 2: all",
        "round 2 of 2: loop",
    ]
    assert out.splitlines()[-2:] == ["| all | 8 | 1.00 |", "| loop | 8 | 1.00 |"]


def test_a_second_call_measures_what_the_file_does_not_have(ways, tmp_path, capsys):
    words = [*BRIEF, "all", "loop", "--out", str(tmp_path / "lines.jsonl")]
    ways.faults["loop", "take_turn"] = TimeIsUp()
    assert bench.main(words) == 0
    assert measured(capsys.readouterr().out) == [(0, "all"), (1, "all")]
    ways.faults.clear()
    ways.made.clear()
    assert bench.main(words) == 0
    out = capsys.readouterr().out
    assert measured(out) == [(0, "loop"), (1, "loop")]
    assert list(ways.made) == ["loop"]
    assert "| all | 8 | 1.00 |" in out
    ways.made.clear()
    assert bench.main(words) == 0
    assert not ways.made
    assert bench.main([*words, "--rounds", "3"]) == 0
    assert measured(capsys.readouterr().out) == [(2, "all"), (2, "loop")]
    assert ways.made["all"].turns == 1


def test_measurements_of_other_settings_code_and_cards_are_not_those_of_this_call(
    ways, tmp_path, capsys
):
    path = tmp_path / "lines.jsonl"
    words = [*BRIEF, "all", "--rounds", "1", "--out", str(path)]
    bench.main(words)
    line = json.loads(path.read_text())
    changes = {"card": "H0", "torch": "1", "transformers": "1", "code": "0", "task": "pairs",
               "size": "base", "batch": 5, "samples": 17, "steps": 2, "warm_up": 2, "way": "loop",
               "round": 1}  # fmt: skip
    others = [json.dumps(line | {name: value}) for name, value in changes.items()]
    path.write_text("\n".join(others) + "\n")
    capsys.readouterr()
    assert bench.main(words) == 0
    assert measured(capsys.readouterr().out) == [(0, "all")]


def test_a_line_says_what_was_measured(ways, tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    bench.main([*BRIEF, "all", "--rounds", "1", "--out", str(path)])
    line = json.loads(path.read_text())
    assert line == json.loads(capsys.readouterr().out.splitlines()[0])
    assert line.pop("date") >= line.pop("sitting") > "2026"
    lengths = [len(sample["input_ids"]) for sample in bench_ways.drawn_samples("labels", 16, TINY)]
    assert line == {
        "card": "cpu",
        "torch": torch.__version__,
        "transformers": bench.transformers.__version__,
        "code": bench.CODE.digest,
        "task": "labels",
        "size": "tiny",
        "batch": 4,
        "samples": 16,
        "steps": 1,
        "warm_up": 1,
        "way": "all",
        "round": 0,
        "step_ms": 500.0,
        "samples_timed": 4,
        "tokens_a_sample": statistics.mean(lengths),
        "setup_s": 1.0,
        "samples_per_s": 8.0,
        "reserved_gib": None,
        "kernel_ms": None,
    }


@pytest.mark.parametrize("where", ["await_setup", "take_turn"])
def test_a_way_that_fails_leaves_the_others_their_turns(ways, capsys, where):
    ways.faults["all", where] = WayFailed("OutOfMemoryError: CUDA out of memory")
    assert bench.main([*BRIEF, "all", "loop"]) == 1
    out, err = capsys.readouterr()
    assert measured(out) == [(0, "loop"), (1, "loop")]
    why = "all failed, and is left out from here on: OutOfMemoryError: CUDA out of memory"
    assert err.splitlines().count(why) == 1


def test_a_way_that_runs_out_of_memory_beside_others_is_set_up_again_after_them(
    ways, capsys, monkeypatch
):
    begun = []

    def await_setup(self, deadline):
        begun.append(self)
        self.setup = {"setup_s": 1.0, "step_s": 1.0}
        if len(begun) == 1:
            raise WayFailed("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(FakeWay, "await_setup", await_setup)
    assert bench.main([*BRIEF, "all", "loop"]) == 0
    assert [way.name for way in begun] == ["all", "loop", "all"]
    assert begun[0].is_stopped
    out, err = capsys.readouterr()
    assert measured(out) == IN_TURNS
    assert "all ran out of memory beside the others, and is set up again" in err


def test_a_way_whose_setup_would_not_end_in_time_is_not_begun(ways, capsys):
    """The tuned Trainer's is guessed at 150 s, and that of others at 20."""
    words = [*BRIEF, "trainer-tuned", "loop", "--within", "100"]
    assert bench.main(words) == 0
    out, err = capsys.readouterr()
    assert measured(out) == [(0, "loop"), (1, "loop")]
    assert "trainer-tuned would not end in time" in err
    assert list(ways.made) == ["loop"]


def test_a_setup_that_was_measured_before_is_no_guess(ways, tmp_path, capsys):
    """Setups may take half of the time."""
    path = tmp_path / "lines.jsonl"
    known = {"card": "cpu", "size": "tiny", "way": "trainer-tuned", "setup_s": 30.0}
    path.write_text(json.dumps(known) + "\n" + json.dumps(known | {"setup_s": 5.0}) + "\n")
    words = [*BRIEF, "trainer-tuned", "--out", str(path), "--within"]
    assert bench.main([*words, "59"]) == 0
    assert measured(capsys.readouterr().out) == []
    assert bench.main([*words, "70"]) == 0
    assert len(measured(capsys.readouterr().out)) == 2


def test_a_turn_that_would_not_end_in_time_is_not_begun(ways, capsys):
    """A turn of 41 steps, with those that are not timed, takes as many seconds."""
    words = [*BRIEF, "loop", "--steps", "21", "--within"]
    assert bench.main([*words, "41"]) == 0
    assert measured(capsys.readouterr().out) == []
    assert bench.main([*words, "50"]) == 0
    assert len(measured(capsys.readouterr().out)) == 2


def test_a_turn_is_expected_to_take_as_long_as_the_one_before(ways, capsys, monkeypatch):
    """The warm-up's steps took a second, beside other ways' setups; those of a turn take half."""
    clock = itertools.count(0, 10)
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    # The second turn begins at 40 s: 41 steps of a second would end too late.
    assert bench.main([*BRIEF, "loop", "--steps", "21", "--within", "78"]) == 0
    assert measured(capsys.readouterr().out) == [(0, "loop"), (1, "loop")]


def test_a_stopped_bench_prints_what_was_measured(ways, capsys):
    ways.faults["loop", "take_turn"] = KeyboardInterrupt()
    assert bench.main([*BRIEF, "all", "loop"]) == 130
    out, err = capsys.readouterr()
    assert measured(out) == [(0, "all")]
    assert "| all | 8 | 1.00 |" in out
    assert err.endswith("stopped: the medians are of the measurements that ended\n")


@pytest.mark.parametrize(("content", "said"), [("{}\nno\n", "line 2 is no JSON"), (None, "cannot")])
def test_a_file_that_cannot_be_used_is_refused_in_one_line(ways, tmp_path, capsys, content, said):
    path = tmp_path / "folder" / "lines.jsonl"
    if content:
        path.parent.mkdir()
        path.write_text(content)
    assert bench.main([*BRIEF, "all", "--out", str(path)]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


# Processes.


def test_what_becomes_of_a_process_is_told(monkeypatch):
    """One raises an error, one ends, and one is at work at the deadline."""
    words = ("raise", "end", "sleep")
    raising, ending, sleeping = ways = [bench_turns.Way(word, idle, (word,)) for word in words]
    try:
        with pytest.raises(WayFailed, match=r"^ValueError: no such model$"):
            raising.await_setup(math.inf)
        with pytest.raises(WayFailed, match=r"^its process ended with 3$"):
            ending.await_setup(math.inf)
        sleeping.await_setup(math.inf)
        assert sleeping.setup == {"setup_s": 1.0, "step_s": 1.0}
        with pytest.raises(TimeIsUp):
            sleeping.take_turn(time.monotonic() + 0.1)
    finally:
        monkeypatch.setattr(bench_turns, "PATIENCE_S", 1)
        for way in ways:
            way.stop()
    assert not any(way.process.is_alive() for way in ways)


def test_the_bench_times_a_way_in_a_process_of_its_own(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert bench.main([*BRIEF, "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert min(json.loads(line)["samples_per_s"] for line in lines[:2]) > 0


# The command line, and what is measured.


def test_the_benchs_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        bench.parsed(["--help"])
    help_text = capsys.readouterr().out
    examples = re.findall(r"^  python -m qa_lib.own.bench (.*)$", help_text, re.M)
    assert all(bench.parsed(words.split()) for words in examples)
    assert examples


def test_the_bench_takes_all_ways_at_pairs_of_sentences_where_nothing_else_is_said():
    assert vars(bench.parsed([])) == {
        "task": "pairs",
        "size": "tiny",
        "ways": list(bench.WAYS),
        "batch": 32,
        "samples": 16384,
        "steps": 100,
        "warm_up": 20,
        "rounds": 3,
        "out": None,
        "within": math.inf,
    }


def test_a_bench_without_a_warm_up_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.parsed(["--warm-up", "0"])
    assert "--warm-up" in capsys.readouterr().err


def test_no_step_of_a_warm_up_that_was_stopped_has_been_timed():
    measured = bench_turns.Measured(warm_up=3, batch=4)
    measured.step()
    assert measured.timed_steps == 0


def test_a_loops_result_has_the_mean_of_its_first_and_of_its_last_ten_losses():
    measured = bench_turns.Measured(warm_up=0, batch=4)
    for loss in range(25):
        measured.step(torch.tensor(loss))
    result = measured.result()
    assert (result["first_loss"], result["last_loss"]) == (4.5, 19.5)
    assert result["steps"] == 25


def test_the_benchs_plain_batches_are_whole_and_in_another_order_in_each_epoch():
    samples = [{"input_ids": [number], "labels": 0} for number in range(10)]
    torch.manual_seed(0)
    work = bench_ways.Work(None, samples, 4, 0, None)
    batches = list(bench_ways.repeated(bench_ways.padded_loader(work), 4))
    ids = [batch["input_ids"] for batch in batches]
    epochs = torch.cat(ids[:2]), torch.cat(ids[2:])
    assert [len(rows) for rows in ids] == [4, 4, 4, 4]
    assert not torch.equal(*epochs)
    assert len(set(epochs[0].flatten().tolist())) == 8


@pytest.mark.parametrize(
    ("task", "median", "spread", "longest"),
    [("pairs", 36, 0.45, 128), ("paragraphs", 160, 0.35, 384), ("labels", 22, 0.6, 128)],
)
def test_the_benchs_samples_are_as_long_as_those_of_the_data_sets(task, median, spread, longest):
    lengths = [len(sample["input_ids"]) for sample in bench_ways.drawn_samples(task, 4000, TINY)]
    assert statistics.median(lengths) == pytest.approx(median, abs=3)
    assert longest / 1.2 < max(lengths) <= longest
    # The spread is that of the lengths' logarithms: 68 % lie within it of the median.
    within = [abs(math.log(length / median)) < spread for length in lengths]
    assert statistics.mean(within) == pytest.approx(0.68, abs=0.03)


def test_the_tuned_trainers_warm_up_visits_every_padded_length(monkeypatch):
    real_padded = bench_ways.padded
    seen = []

    def seeing(samples, multiple=1):
        batch = real_padded(samples, multiple)
        seen.append(batch["input_ids"].shape)
        return batch

    monkeypatch.setattr(bench_ways, "padded", seeing)
    words = "--task paragraphs --batch 4 --samples 64 --steps 20 --warm-up 1 --ways trainer-tuned"
    arguments = bench.parsed(words.split())
    measured = bench_turns.Measured(arguments.warm_up, arguments.batch)
    bench.train_by("trainer-tuned", arguments, arguments.steps, measured)
    lengths = [length for count, length in seen if count == 4]
    visited = measured.warm_up - arguments.warm_up
    assert lengths[:visited] == sorted(set(lengths), reverse=True)
    assert visited > 3


def test_a_length_that_no_batch_can_have_is_not_visited():
    """The two shortest samples are never in a batch of three without a longer one."""
    samples = [{"input_ids": [5] * length} for length in (130, 10, 100, 20, 140)]
    assert bench_ways.batches_of_each_length(samples, 3) == [2, 0, 4, 1, 3, 2]


@pytest.mark.parametrize("task", bench_ways.TASKS)
def test_the_benchs_samples_have_labels_that_can_be_learnt(task):
    samples = bench_ways.drawn_samples(task, 20, TINY)
    for sample in samples:
        first = sample["labels"][0] if task == "labels" else sample["labels"]
        assert first == sample["input_ids"][0] % 2
    assert torch.equal(
        bench_ways.padded(samples)["input_ids"][0][:3], torch.tensor(samples[0]["input_ids"][:3])
    )


@pytest.mark.parametrize("size", bench_ways.SIZES)
def test_no_token_of_the_benchs_samples_is_padding(size):
    # Few words, of which padding is the last: a sample that ended in it would be refused.
    few = type(bench_ways.SIZES[size])(vocab_size=20, pad_token_id=19)
    for sample in bench_ways.drawn_samples("pairs", 50, few):
        assert 19 not in sample["input_ids"]
