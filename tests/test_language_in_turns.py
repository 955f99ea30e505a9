"""A language model's stack beside plain PyTorch, by blocks of runs in turns."""

import pandas as pd
import pytest

from qa_lib.lab.report import language_in_turns
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.language_in_turns import FIRST, LEADS, PLAIN, STACK, Part
from tests.material import committed


def run(variant, seed, speed, **more) -> dict:
    """A timed run, as `load_runs` gives it."""
    return {
        "group": "h200-lm-bench",
        "status": "ok",
        "model": "gpt2 1",
        "model.name": "gpt2:L12H768",
        "data": "text 1",
        "length": 1024,
        "training": "as it is",
        "code": "abc",
        "code.commit": "a" * 40,
        "code.digest": None,
        "code.dirty": None,
        "micro_batch": 32,
        "env.gpu": "NVIDIA H200",
        "spec.variant": variant,
        "spec.seed": seed,
        "spec.search": "",
        "spec.preset.name": "lm-bench",
        "spec.preset.max_length": 1024,
        "spec.preset.effective_batch": 32,
        "time.started": f"2026-11-29T0{seed}:00:00",
        "speed.samples_per_s": speed,
        "time.kernel_ms": 1000 * 32 / speed - 2.0,
        "memory.peak_reserved_mib": 9216.0,
    } | more


# The host of the second block is twice as quick, and ratios are alike in all.
BLOCKS = [
    run(variant, seed, speed * quickness)
    for seed, quickness in enumerate([1, 2, 1])
    for variant, speed in {PLAIN: 500.0, "L-moments": 550.0, STACK: 690.0}.items()
]


def test_ratios_are_of_one_block():
    table = language_in_turns.lead_table(
        language_in_turns.blocks_with_plain(pd.DataFrame(BLOCKS)), FIRST
    )
    assert list(table.index) == [PLAIN, "L-moments", STACK]
    assert table.loc[STACK, "lead"] == pytest.approx(1.38)
    assert table.loc[STACK, "lead±"] == pytest.approx(0, abs=1e-9)
    assert table.loc[STACK, "tokens_per_s"] == pytest.approx(690 * 4 / 3 * 1024)
    assert table.loc[STACK, "gib"] == 9.0
    assert table.loc[STACK, "n"] == 3


def test_runs_without_plain_pytorch_beside_them_do_not_count():
    alone = run(STACK, 5, 9000.0)
    slow = run("L-moments", 0, 1.0, status="failed")
    tried = run(STACK, 0, 1.0, **{"spec.search": "max-batch"})
    blocks = language_in_turns.blocks_with_plain(pd.DataFrame([*BLOCKS, alone, slow, tried]))
    assert len(blocks) == len(BLOCKS)
    with pytest.raises(NotMeasured, match="L-searched has not been timed"):
        language_in_turns.blocks_with_plain(pd.DataFrame([alone]))


def test_the_block_says_which_goals_are_reached():
    small = [one | {"micro_batch": 8} for one in BLOCKS]
    text = language_in_turns.beside_plain_pytorch(pd.DataFrame([*BLOCKS, *small]))
    assert text.startswith(
        "**On one H200 the full stack in 8 bits (L-fp8-all) trains GPT-2's small shape at "
        "942,080 tokens/s, ×1.38 ± 0.00 of the quickest plain PyTorch found (L-searched).** "
        "Goals: 680,000 tokens/s (reached), at most 10.0 GiB (reached), ×1.40 at 32 windows "
        "(missed by 0.020), ×1.35 at 8 windows (reached).\n"
    )
    assert "no dropout" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2].startswith("| 32 | the quickest plain PyTorch found (L-searched) | 3 |")
    assert rows[5].startswith("| 8 | the quickest plain PyTorch found (L-searched) | 3 |")


def test_without_the_first_part_nothing_is_said():
    small = [one | {"micro_batch": 8} for one in BLOCKS]
    with pytest.raises(NotMeasured, match="have not been timed in one block"):
        language_in_turns.beside_plain_pytorch(pd.DataFrame(small))


def test_bits_are_compared_over_equal_seeds_of_one_code():
    bits = {"L-moments": 1.460, STACK: 1.465}
    scored = [
        run(name, seed, 1.0)
        | {
            "group": "h200-lm-quality",
            "spec.preset.name": "lm-quality",
            "spec.preset.epochs": 3,
            "quality.bits_per_byte": value + 0.01 * seed,
        }
        for name, value in bits.items()
        for seed in range(4)
    ]
    text = language_in_turns.bits_table(pd.DataFrame(scored)).replace("\u00a0", " ")
    assert "| the full stack in 16 bits (L-moments) | 4 | 1.475 | – |" in text
    assert "| the full stack in 8 bits (L-fp8-all) | 4 | 1.480 | +0.005 ± 0.000 |" in text
    assert "is not measured yet" not in text
    head = [
        one | {"spec.variant": "L-fp8-head"} if one["spec.variant"] == STACK else one
        for one in scored
    ]
    told = "What the full stack in 8 bits (L-fp8-all) does to them is not measured yet."
    assert told in language_in_turns.bits_table(pd.DataFrame(head))
    few = [one for one in scored if one["spec.seed"] < 2]
    assert language_in_turns.bits_table(pd.DataFrame(few)) == ""
    # Other code's runs are no pairs of these.
    split = [one | {"code": "def" if one["spec.variant"] == STACK else "abc"} for one in scored]
    assert language_in_turns.bits_table(pd.DataFrame(split)) == ""


def test_every_goal_is_of_a_part_with_words():
    assert [str(part) for part in LEADS] == ["32", "8", "32, no dropout"]
    assert Part(8, drops=False).rows[-1] == f"{STACK}-nodropout"


def test_the_committed_records_have_a_block():
    assert "tokens/s (" in language_in_turns.beside_plain_pytorch(committed())
