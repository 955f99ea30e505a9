"""The rivals at a tiny size, and the search for the quickest of them.

Each option trains as the plain fp32 step does, and packing leaves hardly any padding.
"""

import functools
import itertools
import json
import multiprocessing
import random
import signal
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import BertConfig, GPT2Config
from transformers.trainer_pt_utils import get_length_grouped_indices

from qa_lib.peers import adamw, bert, gpt2, mpnet, packing, processes, search, search_trainer
from qa_lib.peers.adamw import CompiledAdamW, _round_stochastically
from qa_lib.peers.bert import Bert
from qa_lib.peers.processes import Measurements
from qa_lib.peers.search import Wanted
from qa_lib.peers.search_options import BASE, merged, without_defaults
from qa_lib.peers.step import Step, compile_parts
from tests import measures

BERT = {
    "hidden_size": 32,
    "layer_norm_eps": 1e-12,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "type_vocab_size": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
MPNET = BERT | {"pad_token_id": 1}
LM = {"vocab_size": 97, "n_embd": 32, "n_positions": 16, "n_layer": 2, "n_head": 2}
EAGER = {"compiled": False}  # of CompiledAdamW, as compiling takes long
SHAPES = {"bert": BERT, "mpnet": MPNET, "gpt2": LM}
OWN = {"precision": "bf16", "optimizer": "own", "optimizer_options": EAGER}
PLAIN = {"precision": "fp32", "compile": "none", "graph": False}
LENGTHS = np.random.default_rng(0).integers(20, 60, 400)


@pytest.fixture(autouse=True)
def on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(peer: str, *changes: dict, parts: int = 1, steps: int = 4) -> list[float]:
    """Return the losses of the first steps of PLAIN with these changes, without dropout."""
    setting = merged(PLAIN, *changes)
    shape = SHAPES[peer]
    data = search.data_for(peer, shape, 4, parts, setting, LENGTHS)
    batches = data.steps(steps)
    step = search.build(peer, shape, setting, data, batches[0], dropout=0.0, rate=1e-3)
    return [step(batch).item() for batch in batches]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": {"blend_types": True}}, id="types blended"),
        pytest.param({"model": {"gelu": "tanh"}}, id="tanh GELU"),
        pytest.param({"model": {"attention": "cudnn"}}, id="cuDNN attention"),
        pytest.param({"model": {"drawn_at_once": True}}, id="dropout drawn at once"),
        pytest.param({"precision": "autocast"}, id="autocast"),
        pytest.param({"precision": "bf16"}, id="weights in bf16"),
        pytest.param(OWN, id="stochastic rounding"),
        pytest.param(OWN | {"optimizer_options": EAGER | {"hashed": True}}, id="hashed rounding"),
        pytest.param(OWN | {"optimizer_options": EAGER | {"masters": True}}, id="masters"),
    ],
)
def test_an_option_of_bert_trains_as_plain_fp32_does(changes):
    wanted = losses("bert")
    assert wanted[-1] < wanted[0]
    assert losses("bert", changes) == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": {"calls": 2}}, id="two calls"),
        pytest.param({"model": {"attention": "eager"}}, id="eager attention"),
        pytest.param({"model": {"gelu": "tanh"}}, id="tanh GELU"),
        pytest.param({"model": {"drawn_at_once": True}}, id="dropout drawn at once"),
        pytest.param({"packing": "fill", "budget": 256}, id="filled"),
        pytest.param({"precision": "autocast"}, id="autocast"),
        pytest.param(OWN, id="stochastic rounding"),
        pytest.param(OWN | {"model": {"attention": "eager"}}, id="eager attention in bf16"),
        pytest.param(OWN | {"optimizer_options": EAGER | {"masters": True}}, id="masters"),
    ],
)
def test_an_option_of_mpnet_trains_as_plain_fp32_does(changes):
    packed = {name: changes[name] for name in ("packing", "budget") if name in changes}
    wanted = losses("mpnet", packed)
    assert wanted[-1] < wanted[0]
    assert losses("mpnet", changes) == pytest.approx(wanted, abs=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"model": {"align": 64}}, id="aligned vocabulary"),
        pytest.param({"model": {"align": 64, "loss": "chunked"}}, id="loss in chunks"),
        pytest.param({"model": {"drawn_at_once": True}}, id="dropout drawn at once"),
        pytest.param(OWN, id="stochastic rounding"),
    ],
)
def test_an_option_of_gpt2_trains_as_plain_fp32_does(changes):
    # An aligned vocabulary draws more random weights, and all that follow are others: the losses
    # are only near each other.
    wanted = losses("gpt2")
    assert wanted[-1] < wanted[0]
    assert losses("gpt2", changes) == pytest.approx(wanted, abs=0.05)


def test_own_adamw_with_moments_in_fp32_is_pytorchs():
    wide = EAGER | {"moments": "float32"}
    own = losses("bert", {"optimizer": "own", "optimizer_options": wide})
    assert own == pytest.approx(losses("bert", {"optimizer": "fused"}), rel=1e-5)


def test_own_adamw_has_moments_in_bf16_by_default():
    own = losses("bert", {"optimizer": "own", "optimizer_options": EAGER})
    assert own != losses("bert", {"optimizer": "fused"})


def test_small_parameters_are_views_of_one_piece_and_train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 3))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = CompiledAdamW(model, 0.1, compiled=False)
    optimizer.step([torch.ones_like(parameter) for parameter in model.parameters()])
    pieces = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert len(pieces) == 1
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hashed", [False, True])
def test_stochastic_rounding_is_right_in_the_mean(hashed):
    torch.manual_seed(0)
    wide = torch.full((20_000,), 1 + 2**-10)  # an eighth of the way from 1 to its neighbour
    rounded = _round_stochastically(wide, torch.tensor(7, dtype=torch.int32) if hashed else None)
    assert sorted(rounded.unique().tolist()) == [1.0, 1 + 2**-7]
    assert (rounded > 1).float().mean().item() == pytest.approx(1 / 8, abs=0.01)


def test_micro_batches_give_the_step_of_all_samples():
    setting = merged(PLAIN)
    data = search.data_for("gpt2", LM, 4, 1, setting, None)
    halves = []
    for (batch,) in data.steps(2):
        first = {name: tensor[:2] for name, tensor in batch.items()}
        second = {name: tensor[2:] for name, tensor in batch.items()}
        halves.append([first, second])
    step = search.build("gpt2", LM, setting, data, halves[0], dropout=0.0, rate=1e-3)
    of_halves = [step(batches).item() for batches in halves]
    assert of_halves == pytest.approx(losses("gpt2", steps=2), rel=1e-4)


def test_the_chunked_loss_has_the_whole_ones_gradients(monkeypatch):
    monkeypatch.setattr(gpt2, "CHUNK", 16)
    torch.manual_seed(0)
    x = torch.randn(50, 8, requires_grad=True)
    weight = torch.randn(104, 8, requires_grad=True)
    targets = torch.randint(97, (50,))
    targets[::7] = -100

    def with_gradients(form):
        loss = form(x, weight, targets, 97)
        return (loss, *torch.autograd.grad(loss / 2, (x, weight)))

    chunked = with_gradients(gpt2.chunked_loss)
    whole = with_gradients(gpt2.whole_loss)
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)


def test_empty_segments_have_no_part_in_the_loss():
    torch.manual_seed(0)
    like = SimpleNamespace(config=SimpleNamespace(**BERT))
    model = Bert(like, 0.0, 64)
    lengths = np.array([9, 5])
    tokens = torch.randint(100, (1, 20))

    def with_gradients(segments):
        arrays = packing.sequence(lengths, 20, segments)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        answers = torch.full((segments,), -100)
        answers[:2] = torch.tensor([3, 4])
        loss = model(
            tokens,
            token_type_ids=torch.zeros_like(tokens),
            start_positions=answers,
            end_positions=answers,
            **inputs,
        )
        return (loss, *torch.autograd.grad(loss, list(model.parameters())))

    torch.testing.assert_close(with_gradients(segments=4), with_gradients(segments=2))


@pytest.mark.parametrize("drawn_at_once", [False, True])
def test_dropout_drops_about_a_tenth_and_keeps_the_mean(drawn_at_once):
    torch.manual_seed(0)
    noise = torch.randint(256, (100_000,), dtype=torch.uint8) if drawn_at_once else None
    dropped = gpt2.dropout(torch.ones(100_000), 0.1, noise)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.005)
    assert dropped.mean().item() == pytest.approx(1, abs=0.005)


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    """Lengths like those of SQuAD's samples: 171 tokens in the mean, at most 384."""
    return np.random.default_rng(0).gamma(7, 24.5, 20_000).clip(35, 384).astype(np.int64)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_dealt_sequences_have_under_one_percent_of_padding(lengths, size):
    groups = packing.deal(lengths, size)
    totals = np.array([lengths[group].sum() for group in groups])
    assert 1 - totals.mean() / packing.tile(totals.max(), 16) < 0.01


@pytest.mark.parametrize("size", [8, 32, 128])
def test_dealt_sequences_have_each_sample_once_and_leave_out_less_than_a_sequence(lengths, size):
    groups = packing.deal(lengths, size)
    dealt = np.concatenate(groups)
    assert {len(group) for group in groups} == {size}
    assert len(np.unique(dealt)) == len(dealt)
    assert len(dealt) > len(lengths) - size


def test_filled_sequences_have_under_one_percent_of_padding_and_every_sample(lengths):
    groups = packing.fill(lengths, 5632)
    totals = np.array([lengths[group].sum() for group in groups])
    assert sorted(np.concatenate(groups)) == list(range(len(lengths)))
    assert totals.max() <= 5632
    assert 1 - totals.mean() / 5632 < 0.01


@pytest.mark.parametrize(
    ("limits", "most", "runs"),
    [
        ([40, 33, 17, 9], 1, [(4, 40)]),
        ([40, 33, 17, 9], 2, [(2, 40), (2, 24)]),
        ([40, 16, 9, 9], 2, [(1, 40), (3, 16)]),
        ([9, 40, 20], 2, [(1, 16), (2, 40)]),
        ([40, 33], 9, [(2, 40)]),
    ],
)
def test_samples_are_cut_into_runs_of_the_least_squares(limits, most, runs):
    assert packing.cut(limits, most, 8) == runs


def test_a_sample_as_long_as_a_sequence_fills_one():
    groups = packing.fill(np.array([20, 60, 40]), 60)
    assert [group.tolist() for group in groups] == [[1], [2, 0]]


def test_a_sample_longer_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="61 tokens is longer than 60"):
        packing.fill(np.array([5, 61]), 60)


def test_flex_attention_refuses_a_dropout_that_it_has_not():
    with pytest.raises(ValueError, match="no dropout"):
        gpt2.flex(None, None, None, None, 0.1)


def test_a_misspelt_way_to_compile_is_refused():
    with pytest.raises(ValueError, match="none of whole, layers, none"):
        compile_parts(torch.nn.Linear(1, 1), "all")


def test_a_setting_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no 'optimiser'"):
        merged({"optimiser": "own"})


def test_of_several_changes_options_are_joined_and_of_all_else_the_last_one_counts():
    before = json.dumps(BASE)
    first = {"model": {"gelu": "tanh", "align": 1}, "precision": "bf16"}
    setting = merged(first, {"model": {"align": 64}, "precision": "fp32"})
    assert setting["model"] == {"gelu": "tanh", "align": 64}
    assert setting["precision"] == "fp32"
    assert json.dumps(BASE) == before
    expected = {"model": {"gelu": "tanh", "align": 64}, "precision": "fp32"}
    assert without_defaults(setting) == expected


def test_a_misspelt_optimizer_is_refused():
    with pytest.raises(ValueError, match="none of fused, torchao, own"):
        losses("gpt2", {"optimizer": "adam"})


# The search, and its measuring in processes of their own.


class PretendedRunner:
    """In place of a Runner: `speed` gives the speed of a setting by its options, as "a + b".

    `asked` has the settings that were measured.
    """

    def __init__(self, speed):
        self.speed = speed
        self.asked = []

    def __call__(self, settings):
        for wanted in settings:
            self.asked.append(wanted)
            names = " + ".join(change["compile"] for change in wanted.changes)
            yield {"samples_s": self.speed(names)}


def test_a_search_adds_what_pays_and_leaves_what_does_not():
    """Here b pays alone but not beside a, c does not pay, and d is the best of its group."""
    gains = {"a": 1.1, "b": 1.05, "c": 0.5, "d": 1.2}

    def speed(names):
        speed = 100.0
        for option in names.split(" + ") if names else []:
            speed *= gains[option]
        return speed / 2 if "a" in names and "b" in names else speed

    groups = {
        "first": {"a": {"compile": "a"}},
        "second": {"b": {"compile": "b"}},
        "third": {"c": {"compile": "c"}, "d": {"compile": "d"}},
    }
    found = search.search(PretendedRunner(speed), groups, alone={}, start=[], least_gain=0.01)
    assert found == Wanted("d + a", [{"compile": "d"}, {"compile": "a"}])


def tried_one_at_a_time(speed, options: dict[str, dict[str, dict]], least_gain: float) -> list[str]:
    """Return the sets that a search measures which waits for each result, the base first."""
    tried = [""]
    candidates = []
    for group, alternatives in options.items():
        for name in alternatives:
            tried.append(name)
            candidates.append((speed(name) / speed("") - 1, group, name))
    best = speed("")
    chosen, groups = [], []
    for gain, group, name in sorted(candidates, key=lambda candidate: -candidate[0]):
        if gain < search.WORTH_A_TRY or group in groups:
            continue
        tried.append(" + ".join([*chosen, name]))
        if speed(tried[-1]) > best * (1 + least_gain):
            best = speed(tried[-1])
            chosen.append(name)
            groups.append(group)
    return tried


@pytest.mark.parametrize("seed", range(20))
def test_sets_that_are_asked_for_ahead_are_those_of_a_search_that_waits_for_each_result(seed):
    """Speeds are drawn, so that what is foreseen is often wrong."""
    draw = random.Random(seed)
    names = iter("abcdefghij")
    options = {
        group: {name: {"compile": name} for name in itertools.islice(names, size)}
        for group, size in {"first": 3, "second": 1, "third": 2, "fourth": 4}.items()
    }

    @functools.cache
    def speed(names):
        options = len(names.split(" + ")) if names else 0
        return 100.0 + 5 * options + draw.uniform(-8, 8)

    expected = tried_one_at_a_time(speed, options, least_gain=0.002)
    run = PretendedRunner(speed)
    search.search(run, options, alone={}, start=[], least_gain=0.002)
    asked = [" + ".join(change["compile"] for change in wanted.changes) for wanted in run.asked]
    assert asked == expected


OPTIONS = {
    "first": {"a": {"model": {"a": 1}}},
    "second": {"b": {"model": {"b": 1}}},
    "third": {"c": {"model": {"c": 1}}, "d": {"model": {"d": 1}}},
    "fourth": {"e": {"model": {"e": 1}}},
    "fifth": {"f": {"model": {"f": 1}}},
    "sixth": {"g": {"model": {"g": 1}}},
}


def searched_in_processes(out, at_once: int, monkeypatch) -> tuple[Wanted, list[dict]]:
    """Return the set that a search of OPTIONS finds, and the lines that it appends to a file."""
    spawning = functools.partial(Measurements, start_method="spawn")
    monkeypatch.setattr(search, "Measurements", spawning)
    monkeypatch.setattr(search, "measure", measures.speed)
    arguments = search.parse(["gpt2", "--out", str(out), "--at-once", str(at_once)])
    run = search.Runner(arguments, None, LM)
    run.settings["torch"] = "2"  # PyTorch's own value is of a class that new processes would import
    alone = {"z": {"model": {"z": 1}}}
    found = search.search(run, OPTIONS, alone, start=[], least_gain=0.002)
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    for line in lines:
        del line["at"]
        line.pop("trace", None)
    return found, lines


def test_settings_that_are_set_up_at_the_same_time_give_the_lines_of_one_at_a_time(
    tmp_path, monkeypatch
):
    """What was prepared for nothing leaves no line."""
    found, lines = searched_in_processes(tmp_path / "one", 1, monkeypatch)
    assert found == Wanted("a + c + e", [{"model": {name: 1}} for name in "ace"])
    names = ["base", *"abcdefgz", "a + b", "a + c", "a + c + e"]
    assert [line["name"] for line in lines] == names
    assert searched_in_processes(tmp_path / "four", 4, monkeypatch) == (found, lines)


def measured(measure, task, out, timeout_s=60.0, within_s=120.0) -> dict:
    """Return the result of a task in a process that imports only what `measure` needs."""
    measurements = Measurements(measure, out, timeout_s, within_s, start_method="spawn")
    return measurements({"name": "x"}, task)


def children() -> set:
    """Return the processes that this one has begun; other tests may have left some."""
    return set(multiprocessing.active_children())


def noted_in_turns(folder, *tasks: dict, at_once=4) -> tuple[list[dict], list[list]]:
    """Measure tasks of measures.noted, each called by its place: "0", "1" and so on.

    Return their results, and what was done when: name, "set-up" or "turn", begin and end.
    """
    earlier = children()
    defaults = {"file": str(folder / "events"), "set_up_s": 0.1, "turn_s": 0.1, "faults": []}
    pairs = []
    for place, task in enumerate(tasks):
        pairs.append(({"name": str(place)}, defaults | {"name": str(place)} | task))
    measurements = Measurements(
        measures.noted, folder / "lines", 60.0, 120.0, at_once, start_method="spawn"
    )
    results = list(measurements.in_turns(pairs))
    lines = [json.loads(text) for text in (folder / "lines").read_text().splitlines()]
    assert [line["name"] for line in lines] == [line["name"] for line, _ in pairs]
    assert children() <= earlier
    return results, [json.loads(text) for text in (folder / "events").read_text().splitlines()]


def test_tasks_are_set_up_at_the_same_time_and_nothing_happens_beside_a_turn(tmp_path):
    tasks = [{"set_up_s": 0.5}, {"set_up_s": 1.0}, {"set_up_s": 0.1}, {}, {}]
    results, events = noted_in_turns(tmp_path, *tasks, at_once=3)
    assert results == [{"measured": name} for name in "01234"]
    times = {(name, what): (begin, end) for name, what, begin, end in events}
    assert len(times) == len(events) == 2 * 5
    assert times["1", "set-up"][0] < times["0", "set-up"][1]
    assert [name for name, what, *_ in events if what == "turn"] == list("01234")
    for turn, other in itertools.permutations(events, 2):
        if turn[1] == "turn":
            (_, _, begin, end), (_, _, other_begin, other_end) = turn, other
            assert other_end <= begin or end <= other_begin


def test_a_task_that_fails_in_its_set_up_leaves_the_others_theirs(tmp_path):
    results, events = noted_in_turns(tmp_path, {}, {"faults": ["no such kernel"]}, {})
    assert [result.get("measured") for result in results] == ["0", None, "2"]
    assert results[1]["error"] == "RuntimeError: no such kernel"
    assert [name for name, what, *_ in events if what == "turn"] == ["0", "2"]


@pytest.mark.parametrize("fault", ["CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_task_that_lacks_memory_beside_others_is_set_up_again_alone(fault, tmp_path):
    results, events = noted_in_turns(tmp_path, {}, {"faults": [fault]}, {})
    assert results == [{"measured": name} for name in "012"]
    done = [event[:2] for event in events]
    assert done[-5:] == [
        ["0", "turn"],
        ["1", "set-up"],
        ["1", "turn"],
        ["2", "set-up"],
        ["2", "turn"],
    ]


def test_a_task_that_lacks_memory_alone_is_not_set_up_again(tmp_path):
    results, events = noted_in_turns(tmp_path, {"faults": ["out of memory"] * 3}, at_once=4)
    assert results[0]["error"] == "RuntimeError: out of memory"
    assert len(events) == 1


@pytest.mark.parametrize(("lacking", "at_once"), [(1, 3), (2, 4)])
def test_fewer_are_set_up_at_once_where_memory_held_one_alone_and_not_beside_others(
    lacking, at_once, tmp_path
):
    task = {"file": str(tmp_path / "events"), "set_up_s": 0.0, "turn_s": 0.0}
    faults = ["out of memory"] * lacking
    pairs = [({}, task | {"name": "a", "faults": faults}), ({}, task | {"name": "b", "faults": []})]
    measurements = Measurements(
        measures.noted, tmp_path / "lines", 60.0, 120.0, at_once=4, start_method="spawn"
    )
    first, second = measurements.in_turns(pairs)
    assert ("error" in first) == (lacking == 2)
    assert second == {"measured": "b"}
    assert measurements.at_once == at_once


def begun_in_turns(out) -> tuple[Measurements, list[tuple[dict, dict]]]:
    """Return what measures three tasks, each of which goes on until it is ended."""
    task = {"file": str(out) + ".events", "set_up_s": 0.0, "turn_s": 600.0, "faults": []}
    pairs = [({"name": name}, task | {"name": name}) for name in "abc"]
    pairs[0][1]["turn_s"] = 0.0
    measurements = Measurements(measures.noted, out, 60.0, 120.0, at_once=3, start_method="spawn")
    return measurements, pairs


def test_those_that_wait_are_ended_where_no_more_results_are_wanted(tmp_path):
    earlier = children()
    measurements, pairs = begun_in_turns(tmp_path / "lines")
    results = measurements.in_turns(pairs)
    assert next(results) == {"measured": "a"}
    assert len(children() - earlier) == 2
    results.close()
    assert children() <= earlier
    assert len((tmp_path / "lines").read_text().splitlines()) == 1


@pytest.mark.parametrize("place", ["wait", "_Measurement.take_turn"])
def test_ctrl_c_ends_all_processes(place, tmp_path, monkeypatch):
    earlier = children()
    running = []

    def interrupt(*_):
        running.extend(children() - earlier)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"qa_lib.peers.processes.{place}", interrupt)
    measurements, pairs = begun_in_turns(tmp_path / "lines")
    with pytest.raises(KeyboardInterrupt):
        list(measurements.in_turns(pairs))
    assert len(running) == 3
    assert children() <= earlier


def test_a_result_of_another_process_is_printed_and_appended_as_a_line(tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    out.write_text("before\n")
    assert measured(measures.same, {"ms": 1.5}, out) == {"ms": 1.5}
    before, text = out.read_text().splitlines()
    assert capsys.readouterr().out == f"{text}\n"
    assert before == "before"
    line = json.loads(text)
    assert line["name"] == "x"
    assert line["ms"] == 1.5


def test_a_measurement_that_fails_is_a_line_with_its_error(tmp_path):
    result = measured(measures.number, "no number", tmp_path / "lines.jsonl")
    assert result["error"].startswith("ValueError: invalid literal")
    assert json.loads((tmp_path / "lines.jsonl").read_text())["error"] == result["error"]


def test_a_measurement_that_takes_too_long_is_ended(tmp_path):
    begin = time.monotonic()
    result = measured(measures.asleep, 600, tmp_path / "lines.jsonl", timeout_s=0.1)
    assert result == {"error": "time is up"}
    assert time.monotonic() - begin < 60


def test_no_measurement_begins_without_time_left(tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    result = measured(measures.same, {}, out, within_s=processes.LEAST_S - 1)
    assert result == {"error": "no time left"}
    assert not out.exists()
    assert json.loads(capsys.readouterr().out)["error"] == "no time left"


def test_sigterm_ends_a_search_as_an_exit_does():
    before = signal.getsignal(signal.SIGTERM)
    try:
        processes.exit_on_sigterm()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


@pytest.mark.parametrize(
    ("samples", "size", "span"), [(8000, 32, 50), (8000, 128, 15), (8000, 8, 50), (100, 32, 1)]
)
def test_a_block_of_the_trainer_is_a_span_of_its_sampler(samples, size, span):
    """Within a span lengths fall, and the next span begins with long samples again."""
    lengths = np.random.default_rng(0).integers(30, 384, samples).tolist()
    order = get_length_grouped_indices(lengths, size)
    # The first sample of all is swapped with the longest, wherever that is.
    borders = []
    for place, (index, following) in enumerate(itertools.pairwise(order), start=1):
        if lengths[following] > lengths[index]:
            borders.append(place)
    assert search_trainer.span_of(samples, size) == span
    assert span * size in borders
    assert [place for place in borders if place % (span * size) > 1] == []


# The update of the weights.


def updated(optimizer_of, gradients: list[float], value: float = 1.0) -> torch.Tensor:
    """Return a weight of `value` after steps on these gradients."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    optimizer = optimizer_of(model)
    for gradient in gradients:
        optimizer.step([torch.full_like(model.weight, gradient)])
    return model.weight.detach()


RIVALS = {
    "PyTorch's": lambda model: adamw.PublicAdamW(model, 0.1),
    "own": lambda model: CompiledAdamW(model, 0.1, moments=torch.float32, compiled=False),
}


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rivals_update_is_adam_by_its_formula_without_weight_decay(rival):
    gradients = [0.5, -3e-8, 0.25]  # the second is near the least divisor, 1e-8
    weight, mean, square = 1.0, 0.0, 0.0
    for step, gradient in enumerate(gradients, start=1):
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        divisor = (square / (1 - 0.999**step)) ** 0.5 + 1e-8
        weight -= 0.1 * mean / (1 - 0.9**step) / divisor
    assert updated(RIVALS[rival], gradients).item() == pytest.approx(weight, rel=1e-5)


@pytest.mark.parametrize("rival", RIVALS)
def test_the_least_divisor_of_a_rivals_update_is_adams(rival):
    first_step = 0.1 * 1e-8 / (1e-8 + 1e-8)
    assert updated(RIVALS[rival], [1e-8]).item() == pytest.approx(1 - first_step, abs=1e-4)


@pytest.mark.parametrize(("length", "factor"), [(10.0, 0.1), (0.5, 1.0), (0.0, 1.0)])
def test_gradients_are_clipped_to_a_norm_of_1_and_never_made_longer(length, factor):
    gradients = [torch.tensor([0.6 * length]), torch.tensor([[0.8 * length]])]
    assert adamw._clip_factor(gradients).item() == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize("rival", RIVALS)
def test_a_rivals_update_takes_clipped_gradients(rival):
    """Adam forgets a factor of all gradients, but not one that changes from step to step."""
    clipped = updated(RIVALS[rival], [30.0, 0.5])
    torch.testing.assert_close(clipped, updated(RIVALS[rival], [1.0, 0.5]))


@pytest.mark.parametrize(
    ("first", "second", "small"), [((3, 2), (2, 2), 4 + 2 + 2), ((2, 2), (2, 3), 4 + 3 + 2)]
)
def test_large_parameters_are_updated_by_themselves_and_all_by_their_own_gradient(
    first, second, small, monkeypatch
):
    monkeypatch.setattr(adamw, "SMALL", 6)
    model = torch.nn.Sequential(torch.nn.Linear(*first), torch.nn.Linear(*second))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = CompiledAdamW(model, 0.1, moments=torch.float32, compiled=False)
    assert [weight.numel() for weight in optimizer.weights] == [6, small]
    signs = [
        torch.full_like(parameter, sign)
        for parameter, sign in zip(before, [1, -1, -1, 1], strict=True)
    ]
    optimizer.step([0.01 * sign for sign in signs])
    for parameter, old, sign in zip(model.parameters(), before, signs, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1 * sign, rtol=1e-4, atol=1e-4)


def test_masters_keep_what_weights_in_16_bits_cannot():
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)
    optimizer = CompiledAdamW(model, 1e-3, masters=True, moments=torch.float32, compiled=False)
    for step in range(1, 9):
        optimizer.step([torch.full_like(model.weight, 0.5)])
        ((weight, master, *_),) = optimizer.state
        assert master.item() == pytest.approx(1 - 1e-3 * step, abs=1e-5)
        assert weight == master.bfloat16()
    assert model.weight < 1


def test_no_seed_of_the_rounding_comes_twice(monkeypatch):
    monkeypatch.setattr(adamw, "SMALL", 2)
    model = torch.nn.Linear(2, 2)
    optimizer = CompiledAdamW(model, 0.1, hashed=True, compiled=False)
    seeds = []
    monkeypatch.setattr(optimizer, "update", lambda *words: seeds.append(words[-1].item()))
    for _ in range(3):
        optimizer.step([torch.ones_like(parameter) for parameter in model.parameters()])
    assert len(seeds) == len(set(seeds)) == 3 * len(optimizer.weights) == 6


def test_bits_that_are_not_hashed_have_no_seed(monkeypatch):
    optimizer = CompiledAdamW(torch.nn.Linear(2, 2), 0.1, compiled=False)
    seeds = []
    monkeypatch.setattr(optimizer, "update", lambda *words: seeds.append(words[-1]))
    optimizer.step([torch.ones_like(parameter) for parameter in optimizer.parameters])
    assert seeds == [None]


def test_the_bits_of_hashed_rounding_are_those_of_murmurhash3():
    number = np.arange(50, dtype=np.uint32)
    seed = np.uint32(7)
    expected = number ^ (seed * np.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        expected = (expected ^ (expected >> np.uint32(shift))) * np.uint32(factor)
    found = adamw._hash(torch.arange(50, dtype=torch.int32), torch.tensor(7, dtype=torch.int32))
    assert found.tolist() == (expected >> np.uint32(16)).tolist()


# Embeddings.


@pytest.mark.parametrize("blended", [True, False])
def test_blended_types_are_looked_up_in_no_table(blended):
    model = Bert(like(BERT), 0.0, 8, blend_types=blended)
    looked_up = []
    model.types.register_forward_hook(lambda *_: looked_up.append(1))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model.embed(*[ids[0]] * 3)
    assert bool(looked_up) is not blended


def test_a_text_may_be_shorter_than_a_model_has_positions():
    model = gpt2.GPT2(like(LM), 0.0)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    expected = model.words.weight[0] + model.positions.weight[:5]
    torch.testing.assert_close(model.embed(ids)[1], expected)


# Dropout and attention.


def test_an_element_is_dropped_where_its_byte_is_below_the_rate():
    noise = torch.arange(256, dtype=torch.uint8)
    dropped = gpt2.dropout(torch.ones(256), 26 / 256, noise)
    assert (dropped[:26] == 0).all()
    torch.testing.assert_close(dropped[26:], torch.full((230,), 256 / 230))


def like(shape: dict) -> SimpleNamespace:
    """A model of transformers of which only the config is read."""
    return SimpleNamespace(config=SimpleNamespace(**shape))


RIVAL_MODELS = {
    "bert": lambda **options: Bert(like(BERT), 0.1, 64, **options),
    "mpnet": lambda **options: mpnet.MPNet(like(MPNET), 0.1, [64, 64], **options),
    "gpt2": lambda **options: gpt2.GPT2(like(LM), 0.1, **options),
}
KERNELS = {
    "bert": (bert.ATTENTION, "flash"),
    "mpnet": (mpnet.ATTENTION, "efficient"),
    "gpt2": (gpt2.ATTENTION, "sdpa"),
}


def run_once(model, peer: str) -> None:
    data = search.data_for(peer, SHAPES[peer], 2, 1, merged(PLAIN), LENGTHS)
    model(**data.steps(1)[0][0])


@pytest.mark.parametrize(
    ("rate", "trains", "seen"),
    [(None, True, 0.1), (0.0, True, 0.0), (0.3, True, 0.3), (None, False, 0), (0.3, False, 0)],
)
@pytest.mark.parametrize("peer", KERNELS)
def test_attention_has_a_rate_of_its_own_or_that_of_all_dropouts_and_none_out_of_training(
    peer, rate, trains, seen, monkeypatch
):
    table, name = KERNELS[peer]
    kernel = table[name]
    rates = []

    def noting(*words):
        rates.append(words[-1])
        return kernel(*words)

    monkeypatch.setitem(table, name, noting)
    run_once(RIVAL_MODELS[peer](attention_dropout=rate).train(trains), peer)
    assert rates == [seen] * 2


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("attention", ["efficient", "eager"])
def test_the_plain_mpnets_attention_drops_at_its_rate(attention, rate):
    """The mean over many draws is what comes without dropout."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 2, 8)
    place = torch.arange(4)
    layout = mpnet.Rows(token=place, place=place, masks=[torch.zeros(1, 2, 4, 4)])

    def attend(rate):
        return mpnet.ATTENTION[attention](query, key, value, layout, 4, rate)

    draws = torch.stack([attend(rate) for _ in range(2000)])
    assert (draws.std(0) > 0).all() == (rate > 0)
    torch.testing.assert_close(draws.mean(0), attend(0.0), atol=0.1, rtol=0)


@pytest.mark.parametrize("drawn_at_once", [False, True])
@pytest.mark.parametrize("peer", KERNELS)
def test_out_of_training_a_rival_drops_nothing(peer, drawn_at_once):
    model = RIVAL_MODELS[peer](drawn_at_once=drawn_at_once).eval()
    state = torch.get_rng_state()
    run_once(model, peer)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


@pytest.mark.parametrize(
    ("peer", "x", "shape"),
    [("bert", (5, 32), (2, 2, 5, 32)), ("gpt2", (3, 5, 32), (2, 2, 3, 5, 32))],
)
def test_bytes_for_dropout_are_drawn_for_two_dropouts_of_each_layer(peer, x, shape):
    torch.manual_seed(0)
    drawn = RIVAL_MODELS[peer](drawn_at_once=True).draw(torch.empty(x))
    assert drawn.shape == shape
    assert drawn.dtype == torch.uint8
    assert not torch.equal(drawn[0], drawn[1])
    assert drawn.float().mean().item() == pytest.approx(127.5, abs=15)


@pytest.mark.parametrize("peer", ["bert", "mpnet"])
def test_the_norms_of_a_rival_have_the_least_deviation_of_the_model_that_it_is_like(
    peer, monkeypatch
):
    monkeypatch.setitem(SHAPES[peer], "layer_norm_eps", 1e-3)
    norms = [m for m in RIVAL_MODELS[peer]().modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 5
    assert {norm.eps for norm in norms} == {1e-3}


@pytest.mark.parametrize("gelu", ["none", "tanh"])
def test_every_layer_of_the_plain_bert_has_the_gelu_that_was_asked_for(gelu):
    assert {layer.gelu for layer in RIVAL_MODELS["bert"](gelu=gelu).layers} == {gelu}


def test_padding_of_a_vocabulary_is_no_word():
    model = gpt2.GPT2(like(LM), 0.0, align=64)
    assert len(model.words.weight) == 128
    x = torch.randn(4, 32)
    weight = model.words.weight.detach().clone()
    targets = torch.tensor([0, 5, 96, -100])
    expected = torch.nn.functional.cross_entropy(x @ weight[:97].T, targets)
    weight[97:] = 50.0
    torch.testing.assert_close(gpt2.whole_loss(x, weight, targets, 97), expected)


# The data of the search.


def test_a_packed_sequence_says_where_its_samples_lie():
    arrays = packing.sequence(np.array([3, 2]), 8, most=4)
    assert arrays["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert arrays["cu_seqlens"].tolist() == [0, 3, 5, 5, 5, 8]
    assert arrays["cu_seqlens"].dtype == np.int32


@pytest.mark.parametrize(("tokens", "tiled"), [(1, 128), (128, 128), (129, 256)])
def test_a_tile_is_a_multiple_that_is_no_shorter(tokens, tiled):
    assert packing.tile(tokens) == tiled


def test_dealt_sequences_differ_by_a_token_or_two(lengths):
    totals = np.array([lengths[group].sum() for group in packing.deal(lengths, 32)])
    assert np.ptp(totals) <= 2


def test_the_answer_of_a_random_sample_is_said_by_its_tokens():
    """The loss could not fall otherwise."""
    data = search.data_for("bert", BERT, 4, 1, merged(PLAIN), LENGTHS)
    ((batch,), *_) = data.steps(3)
    begins = batch["cu_seqlens"]
    ids, types = batch["input_ids"][0], batch["token_type_ids"][0]
    assert len(batch["start_positions"]) == 4
    for begin, end, start, stop in zip(
        begins, begins[1:5], batch["start_positions"], batch["end_positions"], strict=False
    ):
        assert 0 <= start <= stop < end - begin
        assert ids[begin + stop] == search.END_TOKEN
        assert start == stop or ids[begin + start] == search.START_TOKEN
        assert types[begin:end].tolist() == [0] * 14 + [1] * (end - begin - 14)
    others = ids[(ids != search.START_TOKEN) & (ids != search.END_TOKEN)]
    assert others.min() >= search.FIRST_RANDOM_TOKEN


def test_a_sequence_of_fewer_samples_has_no_answers_for_the_others():
    setting = merged(PLAIN, {"packing": "fill", "budget": 256})
    data = search.data_for("bert", BERT, 4, 1, setting, LENGTHS)
    for (batch,) in data.steps(20):
        samples = int((batch["cu_seqlens"].diff()[: data.most] > 0).sum())
        answers = batch["start_positions"]
        assert (answers[:samples] >= 0).all()
        assert (answers[samples:] == -100).all()
        assert batch["input_ids"].shape == (1, 256)


def test_samples_and_tokens_of_packed_steps_are_counted():
    data = search.data_for("bert", BERT, 4, 2, merged(PLAIN), LENGTHS)
    steps = data.steps(3)
    assert [len(parts) for parts in steps] == [2, 2, 2]
    assert data.samples == 3 * 2 * 4
    assert data.padded == 3 * 2 * data.budget
    ends = [part["cu_seqlens"][data.most] for parts in steps for part in parts]
    assert data.tokens == sum(int(end) for end in ends)
    assert data.longest == 64, "the longest of 59 tokens, in tiles of 64"
    assert len(data.steps(1000)) == 400 // 4 // 2, "as many as there are samples for"


def test_the_longest_sample_at_each_place_of_a_sequence_is_known():
    setting = merged(PLAIN, {"packing": "fill", "budget": 256})
    data = search.data_for("mpnet", MPNET, 4, 1, setting, LENGTHS)
    assert len(data.limits) == data.most
    for (batch,) in data.steps(1000):
        lengths = batch["cu_seqlens"].diff()[: data.most]
        assert (lengths <= torch.tensor(data.limits)).all()


def test_mpnet_gets_no_token_types():
    ((batch,),) = search.data_for("mpnet", MPNET, 4, 1, merged(PLAIN), LENGTHS).steps(1)
    assert "token_type_ids" not in batch


def test_samples_and_tokens_of_windows_are_counted():
    data = search.data_for("gpt2", LM, 4, 2, merged(PLAIN), None)
    ((batch, _), *_) = data.steps(3)
    assert batch["input_ids"].shape == (4, 16)
    assert batch["input_ids"].max() < 97
    assert data.samples == 3 * 2 * 4
    assert data.tokens == data.padded == 3 * 2 * 4 * 16


# What the search builds.


def test_the_search_is_of_the_sizes_of_bert_base_and_gpt2():
    for config, sizes in ((BertConfig(), search.BERT_BASE), (GPT2Config(), search.GPT2_SMALL)):
        assert {name: getattr(config, name) for name in sizes} == sizes


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"dynamic": False}),
        ({"mode": "max-autotune"}, {"dynamic": False, "mode": "max-autotune"}),
        (
            {"inductor": {"epilogue_fusion": True}},
            {"dynamic": False, "options": {"epilogue_fusion": True}},
        ),
    ],
)
def test_the_compiler_gets_the_options_of_a_setting(changes, options, monkeypatch):
    compile_all = Mock()
    monkeypatch.setattr(search, "compile_parts", compile_all)
    losses("gpt2", {"compile": "layers"} | changes, steps=1)
    (_, how), given = compile_all.call_args
    assert how == "layers"
    assert given == options


def test_a_settings_kernels_and_formats_are_asked_for(monkeypatch):
    asked = Mock()
    monkeypatch.setattr(search, "_to_float8", asked.to_float8)
    monkeypatch.setattr(search, "_only_sdpa", asked.only_sdpa)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", asked.blas)
    losses("gpt2", {"fp8": "rowwise up down", "blas": "cublaslt", "sdpa": "flash"}, steps=1)
    _, *words = asked.to_float8.call_args.args
    assert words == ["rowwise", "up", "down"]
    asked.blas.assert_called_once_with("cublaslt")
    asked.only_sdpa.assert_called_once_with("flash")


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_one_kernel_of_attention_alone_is_left(name, monkeypatch):
    cuda = Mock()
    config = SimpleNamespace(force_disable_caches=False)
    monkeypatch.setattr(torch.backends, "cuda", cuda)
    monkeypatch.setattr(torch._inductor, "config", config)
    search._only_sdpa(name)
    cuda.enable_cudnn_sdp.assert_called_once_with(name == "cudnn")
    cuda.enable_flash_sdp.assert_called_once_with(name == "flash")
    cuda.enable_mem_efficient_sdp.assert_called_once_with(False)
    cuda.enable_math_sdp.assert_called_once_with(False)
    assert config.force_disable_caches


@pytest.mark.parametrize(
    ("parts", "converted"),
    [(("all",), ["0.up", "0.out", "1.up"]), (("up",), ["0.up", "1.up"]), (("head",), [])],
)
def test_linear_layers_are_converted_by_the_last_part_of_their_name(parts, converted, monkeypatch):
    float8 = Mock()
    monkeypatch.setitem(sys.modules, "torchao", Mock())
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    search._to_float8("a model", "rowwise", *parts)
    float8.Float8LinearConfig.from_recipe_name.assert_called_once_with("rowwise")
    is_wanted = float8.convert_to_float8_training.call_args.kwargs["module_filter_fn"]
    names = ["0.up", "0.out", "1.up", "head"]
    assert [name for name in names if is_wanted(None, name)] == converted


# What the search measures.

TASK = {
    "peer": "gpt2",
    "shape": LM,
    "size": 4,
    "parts": 2,
    "setting": merged(PLAIN),
    "lengths": None,
    "steps": 30,
    "block": 5,
    "blocks": 3,
    "rate": 1e-3,
    "profile": False,
}


class Counted:
    """A step that does nothing; its losses are the numbers of the steps, from 0 on."""

    def __init__(self):
        self.steps = 0

    def __call__(self, batches):
        assert len(batches) == 2
        self.steps += 1
        return torch.tensor(self.steps - 1.0)


def test_figures_of_a_setting_are_of_its_median_block(monkeypatch):
    monkeypatch.setattr(search, "build", lambda *_, **__: Counted())
    monkeypatch.setattr(search, "_step_ms", Mock(side_effect=[30.0, 4.0, 5.0]))
    monkeypatch.setattr(search, "BATCHES", 3)
    figures = search.measure(TASK, await_turn=Mock())
    assert figures["ms"] == 5.0
    assert figures["ms_blocks"] == [30.0, 4.0, 5.0]
    assert figures["samples_a_step"] == 8
    assert figures["samples_s"] == 1600.0
    assert figures["tokens_s"] == 1600 * 16
    assert figures["padding"] == 0.0
    assert figures["padded_tokens"] == 8 * 16
    assert figures["first_loss"] == 0.0
    assert 0 <= figures["ready_s"] < 60
    assert figures["loss"] == sum(range(10, 30)) / 20, "the mean of the last twenty"


@pytest.mark.parametrize(("steps", "before"), [(30, 10), (22, 3), (5, 3), (2, 2)])
def test_a_setting_waits_before_the_last_steps_that_are_not_timed_and_after_the_first(
    steps, before, monkeypatch
):
    """The first ones compile. None is done twice."""
    step = Counted()
    monkeypatch.setattr(search, "build", lambda *_, **__: step)
    done = []

    def timed(*_):
        done.append(step.steps)
        return 1.0

    monkeypatch.setattr(search, "_step_ms", timed)
    search.measure(TASK | {"steps": steps}, await_turn=lambda: done.append(step.steps))
    assert done == [before, steps, steps, steps]


def test_padding_is_a_share_of_all_tokens(monkeypatch):
    monkeypatch.setattr(search, "build", lambda *_, **__: Counted())
    monkeypatch.setattr(search, "_step_ms", lambda *_: 1.0)
    task = TASK | {"peer": "bert", "shape": BERT, "lengths": np.full(80, 24), "steps": 1}
    figures = search.measure(task, await_turn=Mock())
    assert figures["padding"] == 0.25, "4 samples of 24 tokens in 128"
    assert figures["padded_tokens"] == 2 * 128


def test_a_block_is_timed_in_milliseconds_a_step(monkeypatch):
    monkeypatch.setattr(search.time, "perf_counter", Mock(side_effect=[10.0, 12.0]))
    step = Counted()
    assert search._step_ms(step, [[1, 2], [3, 4]], 8) == 250.0
    assert step.steps == 8


# The search's memory of what was measured.


class Measured:
    """In place of Measurements: notes what is asked, and answers with a speed or an error."""

    def __init__(self, measure, out, **limits):
        self.limits = limits
        self.asked = []
        self.answer = {"samples_s": 50.0}

    def in_turns(self, measurements):
        for line, task in measurements:
            self.asked.append((line, task))
            yield self.answer


def runner(out, monkeypatch, *words, peer="gpt2", lengths=None, shape=LM) -> search.Runner:
    """A Runner of the command line with these words."""
    monkeypatch.setattr(search, "Measurements", Measured)
    if lengths is not None:
        words = ["--lengths", "lengths", *words]
    return search.Runner(search.parse([peer, "--out", str(out), *words]), lengths, shape)


def figures_of(run: search.Runner, *changes: dict, **task) -> dict:
    """Return the figures of one setting."""
    (figures,) = run([Wanted("a", list(changes), task)])
    return figures


BF16 = {"precision": "bf16"}


def test_a_setting_is_measured_once_for_each_way_to_measure_it(tmp_path, monkeypatch):
    run = runner(tmp_path / "out", monkeypatch)
    assert figures_of(run, BF16)["samples_s"] == figures_of(run, {}, BF16)["samples_s"] == 50.0
    assert len(run.measurements.asked) == 1
    figures_of(run, BF16, profile=True)
    figures_of(run, {"precision": "fp32"})
    assert len(run.measurements.asked) == 3


def test_of_settings_that_are_asked_for_at_once_only_new_ones_are_set_up_and_each_once(
    tmp_path, monkeypatch
):
    run = runner(tmp_path / "out", monkeypatch)
    figures_of(run, BF16)
    fp32 = {"precision": "fp32"}
    wanted = [Wanted("b", [fp32]), Wanted("c", [BF16]), Wanted("d", [{}, fp32]), Wanted("e", [])]
    assert [figures["name"] for figures in run(wanted)] == ["b", "a", "b", "e"]
    assert [line["name"] for line, _ in run.measurements.asked] == ["a", "b", "e"]


def test_no_more_is_measured_where_no_more_figures_are_wanted(tmp_path, monkeypatch):
    run = runner(tmp_path / "out", monkeypatch)
    results = run([Wanted("a", []), Wanted("b", [BF16])])
    next(results)
    results.close()
    assert [line["name"] for line, _ in run.measurements.asked] == ["a"]


def test_a_setting_that_fails_has_its_error_and_no_speed(tmp_path, monkeypatch):
    run = runner(tmp_path / "out", monkeypatch)
    run.measurements.answer = {"error": "no memory"}
    figures = figures_of(run, BF16)
    assert figures["error"] == "no memory"
    assert search.samples_s(figures) == 0.0
    figures_of(run, BF16)
    assert len(run.measurements.asked) == 1, "it fails once in a search"


def test_a_setting_is_measured_as_the_command_line_says(tmp_path, monkeypatch):
    words = "--size 7 --parts 3 --steps 11 --block 13 --blocks 5 --rate 0.5".split()
    limits = "--timeout 3 --within 9 --at-once 2".split()
    run = runner(tmp_path / "out", monkeypatch, *words, *limits)
    assert run.measurements.limits == {"timeout_s": 3.0, "within_s": 9.0, "at_once": 2}
    figures_of(run, BF16, block=17)
    ((line, task),) = run.measurements.asked
    assert line == run.settings | {"name": "a", "setting": BF16, "task": {"block": 17}}
    told = {"size": 7, "parts": 3, "steps": 11, "block": 13, "blocks": 5, "rate": 0.5}
    assert {name: line[name] for name in told} == told
    expected = {"size": 7, "parts": 3, "steps": 11, "block": 17, "blocks": 5, "rate": 0.5}
    assert {name: task[name] for name in expected} == expected
    assert task["setting"] == merged(BF16)


def test_at_least_one_setting_has_to_be_set_up_at_once(capsys):
    with pytest.raises(SystemExit):
        search.parse(["gpt2", "--at-once", "0"])
    assert "--at-once 0: at least one" in capsys.readouterr().err


def measured_before(out, monkeypatch, **changes) -> search.Runner:
    """A Runner whose file has a line of BF16 for BERT, with these changes."""
    words = {"peer": "bert", "lengths": LENGTHS, "shape": BERT}
    settings = runner(out, monkeypatch, **words).settings
    line = settings | {"name": "x", "setting": BF16, "task": {}, "samples_s": 9.0} | changes
    out.write_text(json.dumps(line) + "\n")
    return runner(out, monkeypatch, **words)


def test_what_a_search_before_has_measured_is_known(tmp_path, monkeypatch):
    assert figures_of(measured_before(tmp_path / "out", monkeypatch), BF16)["samples_s"] == 9.0


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 8},
        {"parts": 2},
        {"steps": 7},
        {"block": 3},
        {"blocks": 1},
        {"rate": 1.0},
        {"shape": BERT | {"num_hidden_layers": 1}},
        {"lengths": "of another file"},
        {"card": "another card"},
        {"torch": "2.0"},
        {"code": "of another day"},
        {"task": {"profile": True}},
        {"setting": {"compile": "none"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_measured_otherwise_is_measured_again(changes, tmp_path, monkeypatch):
    run = measured_before(tmp_path / "out", monkeypatch, **changes)
    assert figures_of(run, BF16)["samples_s"] == 50.0


def test_what_failed_in_a_search_before_is_measured_again(tmp_path, monkeypatch):
    out = tmp_path / "out"
    run = measured_before(out, monkeypatch)
    line = json.loads(out.read_text())
    del line["samples_s"]
    out.write_text(json.dumps(line | {"error": "time is up"}) + "\n")
    run = runner(out, monkeypatch, peer="bert", lengths=LENGTHS, shape=BERT)
    assert figures_of(run, BF16)["samples_s"] == 50.0


def searched(speeds: dict[str, float], least_gain: float) -> list[str]:
    """Return the options that a search takes, each of a group of its own, by names of sets."""
    options = {f"group {name}": {name: {"compile": name}} for name in ("a", "b")}
    run = PretendedRunner(speeds.__getitem__)
    found = search.search(run, options, alone={}, start=[], least_gain=least_gain)
    return [change["compile"] for change in found.changes]


def test_an_option_has_to_bring_more_than_the_least_gain():
    speeds = {"": 100.0, "a": 110.0, "b": 104.0, "a + b": 111.0}
    assert searched(speeds, least_gain=0.02) == ["a"]
    assert searched(speeds, least_gain=0.005) == ["a", "b"]


def test_an_option_that_loses_a_little_alone_is_tried_beside_others_and_no_worse_one():
    speeds = {"": 100.0, "a": 110.0, "b": 98.5, "a + b": 120.0}
    assert searched(speeds, least_gain=0.0) == ["a", "b"]
    assert searched(speeds | {"b": 97.0}, least_gain=0.0) == ["a"]


def test_what_is_measured_alone_is_never_added():
    run = PretendedRunner(lambda names: 100.0 + len(names))
    start = {"compile": "s"}
    found = search.search(run, {}, {"z": {"compile": "none"}}, start=[start], least_gain=0.0)
    assert found == Wanted("base", [start])
    assert run.asked == [found, Wanted("z", [start, {"compile": "none"}])]


def test_a_search_whose_base_fails_ends_with_its_error_and_measures_nothing_else():
    asked = []

    def run(settings):
        for wanted in settings:
            asked.append(wanted.name)
            yield {"error": "no memory"}

    with pytest.raises(search.BaseFailed, match=r"the base cannot be measured.*: no memory"):
        search.search(run, {"first": {"a": BF16}}, alone={}, start=[], least_gain=0.0)
    assert asked == ["base"]


def test_a_command_whose_base_fails_ends_with_a_line(monkeypatch):
    failing = (figures for figures in [{"error": "no memory"}])
    monkeypatch.setattr(search, "Runner", lambda *_: lambda settings: failing)
    with pytest.raises(SystemExit, match="no memory"):
        search.main(["gpt2"])


@pytest.mark.parametrize("peer", ["bert", "mpnet"])
def test_a_command_without_lengths_says_what_to_type(peer, capsys):
    with pytest.raises(SystemExit):
        search.parse([peer])
    assert "add --lengths FILE" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--tiny"]])
def test_the_sets_of_a_command_line_take_the_place_of_a_search(words, monkeypatch, tmp_path):
    made = []

    def noted(arguments, lengths, shape):
        made.append((lengths.tolist(), shape, Mock(return_value=[])))
        return made[-1][-1]

    monkeypatch.setattr(search, "Runner", noted)
    (tmp_path / "lengths").write_text("30\n50\n")
    sets = json.dumps({"x": [{"graph": False}], "y, profiled": []})
    start = json.dumps([BF16])
    words = ["--lengths", str(tmp_path / "lengths"), "--sets", sets, "--start", start, *words]
    search.main(["bert", *words])
    ((lengths, shape, run),) = made
    assert lengths == [30, 50]
    assert shape["num_hidden_layers"] == (2 if "--tiny" in words else 12)
    assert shape["vocab_size"] == 30522
    run.assert_called_once_with(
        [
            Wanted("x", [BF16, {"graph": False}]),
            Wanted("y, profiled", [BF16], {"profile": True}),
        ]
    )


@pytest.mark.parametrize("peer", search.SHAPES)
def test_a_search_starts_with_what_its_peer_does_and_ends_with_a_profile_and_plain_fp32(
    peer, monkeypatch, tmp_path
):
    run = Mock(return_value=[])
    found = Mock(return_value=Wanted("a + b", [BF16]))
    monkeypatch.setattr(search, "Runner", lambda *_: run)
    monkeypatch.setattr(search, "search", found)
    (tmp_path / "lengths").write_text("30\n50\n")
    search.main([peer, "--lengths", str(tmp_path / "lengths")])
    options, alone = search.OPTIONS[peer], search.ALONE[peer]
    found.assert_called_once_with(run, options, alone, search.START[peer], 0.002)
    run.assert_called_once_with(
        [
            Wanted("a + b, profiled", [BF16], {"profile": True}),
            Wanted("plain fp32", [PLAIN], {"blocks": 1, "block": 3}),
        ]
    )


def test_ligers_kernel_is_given_the_words_alone(monkeypatch):
    """Rows that fill up a tile would have a share of its softmax."""
    kernel = Mock()
    liger = Mock(LigerFusedLinearCrossEntropyLoss=lambda: kernel)
    monkeypatch.setitem(sys.modules, "liger_kernel", Mock())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    x, weight, targets = torch.zeros(3, 4), torch.zeros(8, 4), torch.zeros(3, dtype=torch.int64)
    gpt2.liger_loss(x, weight, targets, 6)
    rows, *others = kernel.call_args.args
    assert rows.shape == (6, 4)
    assert others == [x, targets]


# A step of a rival.


def test_parts_are_compiled_as_they_are_asked_for(monkeypatch):
    def compiled(how) -> list[str]:
        names = []
        model = gpt2.GPT2(like(LM), 0.0)
        for name, module in (
            ("model", model),
            *((f"layer {i}", b) for i, b in enumerate(model.blocks)),
        ):
            monkeypatch.setattr(module, "compile", lambda name=name, **_: names.append(name))
        monkeypatch.setattr(torch, "compile", lambda function, **_: names.append(function.__name__))
        compile_parts(model, how, dynamic=False)
        return names

    assert compiled("none") == []
    assert compiled("whole") == ["model"]
    assert compiled("layers") == ["layer 0", "layer 1", "embed", "loss"]


@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_is_in_bf16_if_it_says_so_and_counts_itself(autocast):
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return y.float().mean()

    model = Model(4, 4)
    batch = [{"x": torch.ones(2, 4)}]
    step = Step(model, adamw.PublicAdamW(model, 0.0), batch, autocast=autocast, graph=False)
    step(batch)
    step(batch)
    assert step.steps == 2
    assert seen == [torch.bfloat16 if autocast else torch.float32] * 2


def test_a_step_keeps_inputs_of_its_own():
    model = gpt2.GPT2(like(LM), 0.0)
    data = search.data_for("gpt2", LM, 2, 1, merged(PLAIN), None)
    (batch,) = data.steps(1)
    before = batch[0]["input_ids"].clone()
    step = Step(model, adamw.PublicAdamW(model, 1e-3), batch, autocast=False, graph=False)
    step([{name: torch.zeros_like(tensor) for name, tensor in batch[0].items()}])
    assert torch.equal(batch[0]["input_ids"], before)


# Processes, which are pretended.


class Connection:
    """One to a process that needs so many seconds to be ready, and then for its turn."""

    def __init__(self, context, set_up_s: float, turn_s: float, result):
        self.context = context
        self.due = context.now + set_up_s
        self.message = processes.READY
        self.turn_s = turn_s
        self.result = result

    def send(self, message):
        assert message == processes.GO
        self.due = self.context.now + self.turn_s
        self.message = self.result

    def recv(self):
        if self.message is None:
            raise EOFError
        return self.message

    def poll(self, limit_s):
        return bool(self.context.wait([self], limit_s))

    def close(self):
        pass


class Pretended:
    """In place of multiprocessing's context, and of the time, which goes on while it is waited.

    Processes need as many seconds as `plans` say, in the order in which they are begun.
    """

    def __init__(self, plans: list[tuple]):
        self.now = 0.0
        self.plans = iter(plans)
        self.begun = []  # when processes were
        self.process = Mock(pid=77)

    def Pipe(self):
        self.begun.append(self.now)
        return Connection(self, *next(self.plans)), Mock()

    def Process(self, **_):
        return self.process

    def wait(self, connections, limit_s):
        first_due = min(connection.due for connection in connections)
        self.now = max(self.now, min(first_due, self.now + limit_s))
        return [connection for connection in connections if connection.due <= self.now]

    def monotonic(self):
        return self.now

    def strftime(self, form):
        return form


@pytest.fixture
def killed(monkeypatch):
    """The groups of processes that were killed."""
    groups = []
    monkeypatch.setattr(processes.os, "killpg", lambda pid, signal: groups.append((pid, signal)))
    return groups


@pytest.fixture
def pretend(monkeypatch, tmp_path, killed):
    """Return a function that measures by plans; it returns the results and what was pretended."""

    def measure_all(plans, timeout_s, within_s=500.0, at_once=4):
        context = Pretended(plans)
        monkeypatch.setattr(processes, "time", context)
        monkeypatch.setattr(processes, "wait", context.wait)
        measurements = Measurements(
            measures.same, tmp_path / "out", timeout_s, within_s, at_once, start_method="spawn"
        )
        measurements.context = context
        results = list(measurements.in_turns([({}, {}) for _ in plans]))
        assert len(killed) == len(context.begun)
        return results, context

    return measure_all


FINE = {"ms": 1.0}
LATE = {"error": "time is up"}


@pytest.mark.parametrize("plan", [(3.0, 5.0, None), (3.0, float("inf"), {})])
def test_a_process_that_gives_no_result_is_ended_with_all_that_it_started(plan, pretend, killed):
    (result,), context = pretend([plan], timeout_s=60.0)
    assert result["error"] == ("the process ended" if plan[-1] is None else "time is up")
    assert killed == [(77, processes.signal.SIGKILL)]
    context.process.kill.assert_called_once_with()
    context.process.join.assert_called_once_with()


def test_the_time_in_which_a_measurement_waits_is_not_its_own(pretend):
    results, context = pretend([(10.0, 9.0, FINE)] * 3, timeout_s=20.0)
    assert results == [FINE] * 3
    assert context.now == 10.0 + 3 * 9.0


@pytest.mark.parametrize(
    ("late", "ends"),
    [((30.0, 1.0, FINE), 20.0 + 2 * 2.0), ((15.0, 9.0, FINE), 15.0 + 5.0 + 2 * 2.0)],
    ids=["set-up", "turn"],
)
def test_a_measurement_over_its_time_leaves_the_others_theirs(late, ends, pretend):
    results, context = pretend([(10.0, 2.0, FINE), late, (10.0, 2.0, FINE)], timeout_s=20.0)
    assert results == [FINE, LATE, FINE]
    assert context.now == ends


@pytest.mark.parametrize(("within_s", "ends"), [(500.0, 60.0), (30.0, 30.0)])
@pytest.mark.parametrize("plan", [(float("inf"), 1.0, FINE), (5.0, float("inf"), FINE)])
def test_a_measurement_takes_its_own_time_or_what_is_left_of_all(plan, within_s, ends, pretend):
    results, context = pretend([plan], timeout_s=60.0, within_s=within_s)
    assert results == [LATE]
    assert context.now == ends


def test_no_more_are_set_up_at_once_than_there_is_time_for(pretend):
    assert processes.LEAST_S == 20
    results, context = pretend([(10.0, 5.0, FINE)] * 7, timeout_s=60.0, within_s=85.0)
    # Left are 85 s, then 55 and 35 and 20, and last 5.
    assert context.begun == [0.0] * 4 + [30.0] * 2 + [50.0]
    assert results == [FINE] * 7


def test_a_failure_is_sent_with_its_end_and_no_longer_than_a_line_holds(monkeypatch):
    monkeypatch.setattr(processes.os, "setsid", lambda: None)

    def fail(task, await_turn):
        raise ValueError("x" * 1000)

    connection = Mock()
    processes._work(fail, {}, connection)
    (sent,) = connection.send.call_args.args
    assert sent["error"] == ("ValueError: " + "x" * 1000)[:400]
    assert 1 < len(sent["trace"]) <= 6


# The search for the quickest Trainer.


def test_samples_of_the_trainer_have_their_lengths_or_all_the_longest():
    lengths = np.array([20, 384])
    bare = search_trainer.Samples(lengths, padded=False, vocabulary=100)
    padded = search_trainer.Samples(lengths, padded=True, vocabulary=100)
    names = ("input_ids", "token_type_ids", "attention_mask")
    assert [[len(sample[name]) for name in names] for sample in bare] == [[20] * 3, [384] * 3]
    assert [[len(sample[name]) for name in names] for sample in padded] == [[384] * 3] * 2
    sample = padded[0]
    assert sample["input_ids"] == bare[0]["input_ids"] + [0] * 364
    assert sample["attention_mask"] == [1] * 20 + [0] * 364
    assert sample["token_type_ids"] == [0] * 14 + [1] * 6 + [0] * 364
    assert set(bare[0]["input_ids"]) <= set(range(1, 100)), "0 pads"
    assert 0 <= sample["start_positions"] <= sample["end_positions"] < 20


@pytest.mark.parametrize(
    ("multiple", "lengths", "width"), [(8, [20, 33], 40), (64, [64], 64), (64, [383], 384)]
)
def test_batches_of_the_trainer_are_as_long_as_their_longest_sample_in_multiples(
    multiple, lengths, width
):
    samples = search_trainer.Samples(np.array(lengths), padded=False, vocabulary=100)
    batch = search_trainer.Collator(multiple)(samples.samples)
    assert batch["input_ids"].shape == (len(lengths), width)
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["input_ids"][0, : lengths[0]].tolist() == samples[0]["input_ids"]
    assert batch["end_positions"].tolist() == [sample["end_positions"] for sample in samples]


def test_no_batch_of_the_trainer_is_longer_than_the_longest_sample_may_be():
    samples = search_trainer.Samples(np.array([384]), padded=False, vocabulary=100)
    assert search_trainer.Collator(100)(samples.samples)["input_ids"].shape == (1, 384)


@pytest.mark.parametrize(
    ("warm_up", "block", "expected"), [(2, 3, [2, 5, 8, 11]), (5, 2, [5, 7, 9, 11])]
)
def test_the_trainers_clock_notes_the_end_of_the_warm_up_and_of_each_block(
    warm_up, block, expected
):
    clock = search_trainer.Clock(warm_up, block)
    noted = []
    for step in range(1, 12):
        before = len(clock.times)
        clock.on_step_end(None, SimpleNamespace(global_step=step), None)
        noted += [step] * (len(clock.times) - before)
    assert noted == expected


def test_the_sets_of_the_trainers_options_are_all_there_are():
    sets = search_trainer.all_sets()
    assert sets[0] is None
    assert len(sets) == 1 + 2**4
    assert len({search_trainer.name_of(options) for options in sets}) == len(sets)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (None, "as it comes"),
        ([], "none of the four"),
        (["workers", "grouped"], "workers + grouped"),
    ],
)
def test_a_set_of_the_trainers_options_has_a_name(options, name):
    assert search_trainer.name_of(options) == name


@pytest.fixture
def trainer_search(monkeypatch, tmp_path):
    """Return a function that runs search_trainer by some words, and gives what was measured.

    For each set these are the line and the task. There are three samples.
    """
    (tmp_path / "lengths").write_text("30\n50\n60\n")

    def run(*words):
        measured = Mock()
        monkeypatch.setattr(search_trainer, "Measurements", lambda *_, **__: measured)
        search_trainer.main(["--lengths", str(tmp_path / "lengths"), *words])
        return [of_set.args for of_set in measured.call_args_list]

    return run


@pytest.mark.parametrize(("words", "sets"), [([], 17), (["--sets", '[null, ["workers"]]'], 2)])
def test_the_sets_of_a_command_line_take_the_place_of_all_of_the_trainers(
    words, sets, trainer_search
):
    measured = trainer_search(*words)
    assert len(measured) == sets
    (line, task), *_ = measured
    assert line == {"peer": "trainer", "size": 32, "name": "as it comes"}
    assert task["options"] is None
    assert sorted(task["lengths"]) == [30, 50, 60]


@pytest.mark.parametrize(
    ("words", "config"), [(["--tiny"], search_trainer.TINY), (["--blocks", "4"], {})]
)
def test_the_trainers_model_is_tiny_where_that_is_asked_for(words, config, trainer_search):
    assert trainer_search(*words)[0][1]["config"] == config


@pytest.mark.parametrize(
    ("words", "block"), [(["--size", "1"], 1), (["--size", "1", "--block", "7"], 7)]
)
def test_a_block_of_the_trainer_is_by_default_a_span_of_the_samples_that_there_are(
    words, block, trainer_search
):
    assert trainer_search(*words)[0][1]["block"] == block


class PretendedTrainer:
    """A Trainer whose steps take 0.1 s, but those of its first timed block, which take 1 s."""

    def __init__(self, model, args, train_dataset, data_collator, callbacks):
        self.args = args
        self.clock = callbacks[0]
        PretendedTrainer.made.append((args, train_dataset, data_collator))

    def train(self):
        blocks = (self.args.max_steps - self.clock.warm_up) // self.clock.block
        steps = [
            0,
            10.0 * self.clock.block / 10,
            *(0.1 * self.clock.block for _ in range(blocks - 1)),
        ]
        self.clock.times = list(itertools.accumulate(steps))
        return SimpleNamespace(training_loss=1.23456)


def measure_trainer(options, monkeypatch) -> tuple:
    """Return the figures of a set of options, and what its Trainer was made with."""
    monkeypatch.setattr(search_trainer, "Trainer", PretendedTrainer)
    monkeypatch.setattr(search_trainer.multiprocessing, "set_start_method", lambda *_, **__: None)
    PretendedTrainer.made = []
    task = {"size": 16, "warm_up": 2, "block": 5, "blocks": 3}
    task |= {"lengths": np.array([20, 30]), "options": options, "config": search_trainer.TINY}
    await_turn = Mock()
    figures = search_trainer.measure(task, await_turn)
    await_turn.assert_called_once_with()
    return figures, *PretendedTrainer.made[0]


def test_figures_of_the_trainer_are_of_its_median_block(monkeypatch):
    figures, arguments, *_ = measure_trainer([], monkeypatch)
    assert figures["ms_blocks"] == [1000.0, 100.0, 100.0]
    assert figures["ms"] == 100.0
    assert figures["samples_s"] == 160.0
    assert figures["loss"] == 1.2346
    assert figures["peak_mib"] is None or torch.cuda.is_available()
    assert arguments.max_steps == 2 + 3 * 5
    assert arguments.per_device_train_batch_size == 16


def test_the_trainer_as_it_comes_is_in_fp32_and_pads_every_sample_to_the_longest(monkeypatch):
    _, arguments, samples, collator = measure_trainer(None, monkeypatch)
    assert not arguments.bf16
    assert len(samples[0]["input_ids"]) == search_trainer.MAX_LENGTH
    assert collator is search_trainer.default_data_collator


@pytest.mark.parametrize(("options", "multiple"), [([], 8), (["few lengths"], 64)])
def test_a_tuned_trainer_is_in_bf16_and_pads_to_the_longest_of_a_batch(
    options, multiple, monkeypatch
):
    _, arguments, samples, collator = measure_trainer(options, monkeypatch)
    assert arguments.bf16
    assert arguments.optim == "adamw_torch_fused"
    assert len(samples[0]["input_ids"]) == 20
    assert collator.multiple == multiple


def test_an_option_of_the_trainer_is_of_its_own_set_alone(monkeypatch):
    _, arguments, *_ = measure_trainer(["workers"], monkeypatch)
    assert arguments.dataloader_num_workers == 4
    _, arguments, *_ = measure_trainer([], monkeypatch)
    assert arguments.dataloader_num_workers == 0
