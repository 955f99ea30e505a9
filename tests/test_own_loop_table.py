"""The table of what the techniques give in one's own loop, from lines as the bench writes them."""

import json
from pathlib import Path

import pandas as pd
import pytest

from qa_lib.lab.report import own_loop_table
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.own_loop_table import ALL, FAST, LOOP, TUNED, load_lines, way_lines
from qa_lib.own import bench
from tests.material import committed, refused


def line(way, number, speed, **more):
    """A line of the bench."""
    return {
        "card": "NVIDIA H200",
        "torch": "2.11.0+cu130",
        "transformers": "5.17.0",
        "code": "abcdefghij",
        "task": "paragraphs",
        "size": "base",
        "batch": 32,
        "samples": 4096,
        "steps": 100,
        "warm_up": 20,
        "way": way,
        "round": number,
        "tokens_a_sample": 100.0,
        "sitting": "2026-11-28T20:00:00+00:00",
        "date": f"2026-11-28T20:0{number}:00+00:00",
        "samples_per_s": speed,
        "kernel_ms": 5.0 if number == 2 else None,
    } | more


# The card of the second round is twice as quick, and ratios are alike in all.
LINES = [
    line(way, number, speed * factor)
    for number, factor in enumerate([1.0, 2.0, 1.0])
    for way, speed in {TUNED: 1000.0, LOOP: 500.0, ALL: 3100.0, FAST: 1400.0}.items()
]


NO_RUNS = pd.DataFrame()


@pytest.fixture
def block(tmp_path, monkeypatch):
    """A function that returns the block of lines and runs."""
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()

    def made(lines, runs=NO_RUNS):
        text = "".join(json.dumps(one) + "\n" for one in lines)
        Path("docs/own-bench.jsonl").write_text(text)
        return own_loop_table.own_loop(runs, "", Path("figures"))

    return made


def test_every_way_task_and_size_has_its_words():
    assert tuple(own_loop_table.WAYS) == (LOOP, "trainer", TUNED, *list(bench.WAYS)[3:])
    assert list(own_loop_table.TASKS) == list(bench.TASKS)
    assert list(own_loop_table.MODELS) == list(bench.SIZES)


def test_the_bench_writes_what_the_table_tells_apart():
    settings = bench.settings_of(bench.parsed([]))
    assert {*own_loop_table.ORIGIN, *own_loop_table.PART} <= set(settings)


def test_ratios_are_of_equal_rounds():
    ways = way_lines(pd.DataFrame(LINES)).set_index("way")
    assert list(ways.index) == [LOOP, TUNED, ALL, FAST]
    assert ways.loc[ALL, "over_tuned"] == pytest.approx(3.1)
    assert ways.loc[ALL, "over_loop"] == pytest.approx(6.2)
    assert ways.loc[ALL, ["samples_per_s", "lowest", "highest"]].tolist() == [3100, 3100, 6200]
    assert ways.loc[ALL, "tokens_per_s"] == 310_000
    assert ways.loc[ALL, "kernel_ms"] == 5.0


def test_a_way_without_the_tuned_trainer_beside_it_has_no_ratio():
    ways = way_lines(pd.DataFrame([line(LOOP, 0, 5.0), line(ALL, 1, 10.0)]))
    assert ways["over_tuned"].isna().all()
    assert ways.set_index("way")["over_loop"].isna().tolist() == [False, True]


def test_without_a_file_nothing_has_been_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = own_loop_table.own_loop(pd.DataFrame(), "", Path("figures"))
    assert text == "How much it gives on a GPU is not measured yet."


def test_the_block_has_finding_leads_goals_and_table(block):
    text = block(LINES)
    finding, lead_header, _, lead, said, header, *rows = filter(None, text.splitlines())
    assert finding == (
        "**On one H200 a loop with all of it trains at ×3.10 the speed of the tuned Trainer, for "
        "paragraphs at 32 samples a step (×1.00 by kernels).**"
    )
    assert "| by kernels | `FastTrainer` | the Trainer's GPU works for |" in lead_header
    assert lead == "| paragraphs at 32 | ×3.10 | ×1.00 | ×1.40 | 15.6\u00a0% |"
    assert said == (
        "For the rest of its step the tuned Trainer's GPU waits for the host: where a lead is "
        "larger than the lead by kernels, the difference is this host's. The goals, for BERT-base, "
        "are ×3.00 for the loop at 32 samples and ×1.60 at 128, and ×1.50 for `FastTrainer`: "
        "1 of 2 are reached, "
        "missed by `FastTrainer` for paragraphs at 32 (×1.40 of ×1.50)."
    )
    assert "× the tuned Trainer" in header
    assert rows[1].startswith("| paragraphs, BERT-base, 32 in a step | a plain loop (loop) | 500")
    assert rows[3].startswith(
        "|  | `speed_up`, packing and masters as one CUDA graph (all) | 3,100\u00a0(3,100–6,200) |"
    )
    assert "of 100 steps each, in turns, in one call of the bench" in rows[-1]


def test_the_readme_has_the_finding_and_the_trainers_lead(block):
    block([*LINES, *(one | {"task": "pairs", "samples_per_s": 9.0} for one in LINES)])
    assert own_loop_table.own_lead(NO_RUNS, "", Path("figures")) == (
        "**On one H200 a loop with all of it trains at ×3.10 the speed of the tuned Trainer, for "
        "paragraphs at 32 samples a step (×1.00 by kernels).** "
        "`FastTrainer(cuda_graph=True)` trains at ×1.40."
    )


def test_parts_may_have_turns_of_other_lengths(block):
    longer = [one | {"batch": 128, "steps": 200, "sitting": "2026-11-28T21:00"} for one in LINES]
    text = block([*LINES, *longer])
    assert "of 100–200 steps each, in turns, in 2 calls" in text
    assert "2 of 4 are reached" in text
    assert "`FastTrainer` for paragraphs at 128 (×1.40 of ×1.50)." in text


def test_the_finding_is_of_paragraphs_where_these_were_timed(block):
    pairs = [one | {"task": "pairs"} for one in LINES]
    assert "for paragraphs at 32 samples a step" in block([*pairs, *LINES]).splitlines()[0]
    assert "for pairs of sentences at 32 samples a step" in block(pairs).splitlines()[0]


def test_a_lead_that_is_the_hosts_alone_is_told(block):
    slow = [one | {"kernel_ms": 6.0} if one["way"] == ALL else one for one in LINES]
    told = "For paragraphs at 32 its compiled kernels are quicker: that lead is the host's."
    assert told in block(slow)
    assert "are quicker" not in block(LINES)


def test_a_technique_that_lost_in_some_rounds_alone_is_not_named(block):
    speeds = [400.0, 900.0, 600.0]  # beside 500, 1000 and 500
    mixed = [line("speed_up", number, speed) for number, speed in enumerate(speeds)]
    assert "**Without the graph" not in block([*LINES, *mixed])


def test_goals_are_of_bert_base(block):
    modern = [one | {"size": "modernbert"} for one in LINES]
    text = block(modern)
    assert "| paragraphs with ModernBERT-base at 32 | ×3.10 |" in text
    assert "The goals" not in text
    quick = [one | {"samples_per_s": 2000.0} if one["way"] == FAST else one for one in LINES]
    assert "all 2 are reached." in block([*quick, *modern])


def test_where_the_tuned_trainer_has_not_run_the_plain_loop_is_what_counts(block):
    text = block([line(LOOP, 0, 100.0), line(ALL, 0, 250.0)])
    assert "at ×2.50 the speed of a plain loop, for paragraphs at 32 samples a step" in text
    assert "goal" not in text
    assert "× the tuned Trainer" not in text


def test_a_block_without_the_loop_has_a_table_alone(block):
    assert block([line(LOOP, 0, 100.0)]).startswith("| task |")


def test_a_lead_is_told_by_kernels_too_where_both_are_known(block):
    quick = [one | {"kernel_ms": 2.0} if one["way"] == ALL else one for one in LINES]
    assert "paragraphs at 32 samples a step (×2.50 by kernels).**" in block(quick)
    unknown = [one | {"kernel_ms": None} for one in LINES]
    assert "paragraphs at 32 samples a step.**" in block(unknown)
    assert "For the rest of it" not in block(unknown)


def test_what_was_timed_by_other_code_is_told_in_a_sentence(block):
    old = [
        one | {"code": "fedcba9876"}
        for one in LINES
        if one["way"] in (TUNED, FAST) and one["round"] == 0
    ]
    assert (
        "Other hosts and older code, over the tuned Trainer there: `FastTrainer(cuda_graph=True)` "
        "×1.40 over 1,000 samples/s for paragraphs at 32 (one H200, digest fedcba9)."
    ) in block([*LINES, *old])
    assert "Other hosts" not in block(LINES)
    without = [one for one in old if one["way"] == FAST]
    assert "Other hosts" not in block([*LINES, *without])


def test_techniques_that_lose_to_the_plain_loop_are_named_with_their_kernels(block):
    slower = [line("speed_up", number, 400.0 * (1 + number % 2)) for number in range(3)]
    quicker = [line("packing", number, 600.0 * (1 + number % 2)) for number in range(3)]
    text = block([*LINES, *slower, *quicker])
    said = (
        "**Without the graph some lose to the plain loop in every round:** the loop and "
        "`speed_up`, ×0.80 for paragraphs at 32 (5.00 ms of kernels for 5.00). Python"
    )
    assert said in text
    assert "and packing, ×" not in text
    assert "**Without the graph" not in block([*LINES, *quicker])


def test_the_lines_that_are_shown_are_of_the_code_that_measured_the_most(block):
    newer = line(LOOP, 0, 7.0, code="new", date="2026-11-29")
    assert "abcdefg" in block([*LINES, newer])
    as_many = [one | {"code": "newer", "date": "2026-11-30"} for one in LINES]
    assert "digest newer" in block([*LINES, *as_many])


def test_of_a_turn_that_was_measured_twice_the_last_counts(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line(LOOP, 0, speed)) + "\n" for speed in (1.0, 2.0)))
    assert load_lines(path)["samples_per_s"].tolist() == [2.0]


@pytest.mark.parametrize("text", ["no\n", "{}\n", ""])
def test_a_file_that_the_bench_did_not_write_is_refused(tmp_path, text):
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    refused("is not what the bench writes", load_lines, path)


def test_the_librarys_own_training_stands_beside_the_loop(block):
    """The library's own speed is that of the newest code on this card, at 32 samples."""
    text = block(LINES, committed())
    assert "% of the " in text
    assert "E-uncompiled" in text
    elsewhere = [one | {"card": "NVIDIA X"} for one in LINES]
    assert "E-uncompiled" not in block(elsewhere, committed())
    assert "E-uncompiled" not in block([one | {"task": "pairs"} for one in LINES], committed())


def own_run(speed, started, **more):
    """A timed run of the library's own training."""
    return {
        "spec.variant": "E-uncompiled",
        "spec.preset.name": "bench",
        "spec.search": "",
        "status": "ok",
        "env.gpu": "NVIDIA H200",
        "model.name": "bert-base",
        "micro_batch": 32,
        "group": "h200-bench",
        "code": "a",
        "data": "squad",
        "time.started": started,
        "speed.tokens_per_s": speed,
    } | more


def test_the_loop_is_to_reach_nine_tenths_of_the_newest_codes_own_training(block):
    old = own_run(1e6, "2026-11-27", code="old")
    new = [own_run(speed, f"2026-11-28T0{speed}") for speed in (330_000, 340_000, 350_000)]
    assert "91.2 % of the 340,000 tokens/s" in block(LINES, pd.DataFrame([old, *new]))
    assert "the goal of 90.0 % is reached" in block(LINES, pd.DataFrame([old, *new]))
    assert "the goal of 90.0 % is missed" in block(LINES, pd.DataFrame([old]))
    large = own_run(340_000, "2026-11-28", **{"model.name": "bert-large"})
    assert "goal of 90.0 %" not in block(LINES, pd.DataFrame([large]))


def test_a_notebook_shows_the_committed_table_where_there_is_a_checkout(tmp_path, monkeypatch):
    text = own_loop_table.on_a_gpu()
    assert text.startswith("**On one H200 a loop with all of it trains at ×")
    assert "| `speed_up`, packing and masters as one CUDA graph (all) |" in text
    monkeypatch.setattr(own_loop_table, "ROOT", tmp_path)
    with pytest.raises(NotMeasured, match="is in a checkout alone"):
        own_loop_table.on_a_gpu()
