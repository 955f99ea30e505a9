"""The whole stack beside its rivals, from runs in turns."""

import pandas as pd
import pytest

from qa_lib.lab.report import in_turns
from qa_lib.lab.report.in_turns import (
    PLAIN,
    STACK,
    STACK_16_BITS,
    TUNED_TRAINER,
    WITHOUT_MASTERS,
)
from tests.material import refused


def run(variant, seed, speed, kernel_ms, **more):
    """A timed run: its columns."""
    return {
        "spec.variant": variant,
        "spec.seed": seed,
        "spec.preset.name": "bench",
        "spec.search": "",
        "status": "ok",
        "group": "h200-bench",
        "code": "a",
        "code.commit": "aaaaaaaaaa",
        "code.dirty": False,
        "model": "bert",
        "model.name": "bert-base",
        "model.params_total": 110e6,
        "data": "squad",
        "length": 384,
        "training": "",
        "batch": 0,
        "micro_batch": 32,
        "env.gpu": "NVIDIA H200",
        "time.started": f"2026-11-28T10:0{seed}",
        "time.kernel_ms": kernel_ms,
        "speed.samples_per_s": speed,
    } | more


# Blocks 0 to 2 have plain PyTorch, block 3 the tuned Trainer.
BLOCKS = [
    *(run(PLAIN, seed, 1000.0 * (1 + seed), 30.0) for seed in range(3)),
    *(run(STACK, seed, 1500.0 * (1 + seed), 20.0) for seed in range(3)),
    *(run(STACK_16_BITS, seed, 1200.0 * (1 + seed), 24.0) for seed in range(3)),
    run(TUNED_TRAINER, 3, 500.0, 40.0),
    run(STACK, 3, 2000.0, 20.0),
]


def frame(*rows):
    return pd.DataFrame(rows)


def test_leads_are_of_blocks_that_have_both():
    table = in_turns.lead_table(in_turns.blocks_with_rivals(frame(*BLOCKS)))
    assert list(table.index) == [TUNED_TRAINER, PLAIN, STACK_16_BITS, STACK]
    # Speeds of the blocks differ by a factor of 3, and the lead in each of them is equal.
    assert table.loc[PLAIN, "lead"] == pytest.approx(1.5)
    assert table.loc[PLAIN, "lead±"] == pytest.approx(0.0)
    assert table.loc[TUNED_TRAINER, "lead"] == pytest.approx(4.0)
    assert pd.isna(table.loc[TUNED_TRAINER, "lead±"])  # one block
    assert list(table["kernel_lead"]) == pytest.approx([2.0, 1.5, 1.2, 1.0])
    assert table.loc[PLAIN, "step_ms"] == pytest.approx(16.0)  # 32 samples at 2,000 a second


def test_a_step_of_several_passes_has_all_of_their_samples():
    at_8 = [run(name, 0, 1000.0, 30.0, micro_batch=8, batch=32) for name in (PLAIN, STACK)]
    blocks = in_turns.blocks_with_rivals(frame(*at_8))
    assert list(in_turns.lead_table(blocks)["step_ms"]) == pytest.approx([32.0, 32.0])


def test_data_of_the_most_variants_are_shown_in_blocks_that_have_the_stack():
    elsewhere = [run(name, 0, 1.0, 1.0, data="other") for name in (PLAIN, STACK)]
    without_stack = [run(PLAIN, 7, 1.0, 1.0)]
    failed = [run(TUNED_TRAINER, 0, 1.0, 1.0, status="error")]
    blocks = in_turns.blocks_with_rivals(frame(*BLOCKS, *elsewhere, *without_stack, *failed))
    assert set(blocks["data"]) == {"squad"}
    assert len(blocks) == len(BLOCKS)


def test_runs_of_one_seed_and_two_codes_are_no_block():
    # At seed 0 another code has both, four times as fast; at seed 9 each code has one of them.
    other_code = [run(PLAIN, 0, 4000.0, 30.0, code="b"), run(STACK, 0, 8000.0, 20.0, code="b")]
    apart = [run(PLAIN, 9, 1.0, 30.0, code="b"), run(STACK, 9, 9000.0, 20.0)]
    blocks = in_turns.blocks_with_rivals(frame(*BLOCKS, *other_code, *apart))
    line = in_turns.lead_table(blocks).loc[PLAIN]
    assert line["n"] == 4
    assert line["lead"] == pytest.approx((1.5 + 1.5 + 1.5 + 2.0) / 4)


def test_a_headline_takes_three_blocks_that_have_plain_pytorch():
    assert len(in_turns.enough_blocks(frame(*BLOCKS))) == len(BLOCKS)
    two = [line for line in BLOCKS if line["spec.seed"] != 2]
    refused("have not been timed in 3 blocks", in_turns.enough_blocks, frame(*two))
    refused("have not both been timed", in_turns.enough_blocks, frame(*BLOCKS)[:0])


def test_without_plain_pytorch_nothing_is_compared():
    refused("have not both been timed", in_turns.beside_rivals, frame(run(STACK, 0, 1.0, 1.0)))


def test_the_page_says_the_leads_and_those_at_other_sizes():
    at_128 = [run(PLAIN, 0, 1000.0, 30.0, micro_batch=128)]
    at_128 += [run(STACK, 0, 1400.0, 21.0, micro_batch=128)]
    text = in_turns.beside_rivals(frame(*BLOCKS, *at_128))
    assert text.startswith(
        "On one H200 the full stack in 8 bits (E-fp8-gradients) trains BERT-base **1.50 times as "
        "fast as the quickest plain PyTorch found** (E-searched) and 4.00 times as fast as the "
        "tuned Trainer (A0-tuned), whose GPU works for 62.5 % of a step. Over the quickest plain "
        "PyTorch found (E-searched) it is ×1.40 at 128 "
        "samples in a forward pass (1 block)."
    )
    row = (
        "| the quickest plain PyTorch found (E-searched) | 3 | 2,000 | 16.0 | 30.0 | ×1.50 ± 0.00 |"
    )
    assert row in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "| the full stack in 8 bits (E-fp8-gradients) | 4 |" in text


def scored(seeds, scores, **more):
    """Runs of MiniLM that were scored: at each seed each variant's F1, which grows by the seed."""
    quality = {
        "spec.preset.name": "quality",
        "group": "h200-quality",
        "model": "minilm",
        "model.name": "minilm",
        "model.params_total": 23e6,
    }
    return [
        run(name, seed, None, None, **quality | more, **{"quality.best_f1": score + seed})
        for name, score in scores.items()
        for seed in range(seeds)
    ]


F1_OF_THREE = {STACK: 66.0, STACK_16_BITS: 66.5, PLAIN: 65.0}


def cells_of(table: str) -> list[list[str]]:
    """The rows of a table in Markdown, less the line below its head."""
    lines = table.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return [rows[0], *rows[2:]]


def test_f1_is_compared_over_equal_seeds():
    rows = scored(3, F1_OF_THREE)
    rows.append(rows[0] | {"spec.seed": 9, "quality.best_f1": 90.0})
    text = in_turns.f1_table(frame(*rows))
    assert cells_of(text) == [
        [
            "training",
            "ΔF1 to 16 bits, SQuAD v2",
            "ΔF1 to plain PyTorch, SQuAD v2",
        ],
        ["the full stack in 8 bits (E-fp8-gradients)", "−0.50 ± 0.00", "+1.00 ± 0.00"],
        ["the full stack in 16 bits (E-uncompiled)", "–", "+1.50 ± 0.00"],
    ]
    assert text.endswith(
        "F1 at the best threshold: MiniLM on SQuAD v2, 3 equal seeds (group h200-quality)."
    )
    assert in_turns.f1_table(frame(*BLOCKS)) == ""


def test_f1_on_answerable_questions_stands_beside():
    answerable = {"spec.preset.name": "answerable", "group": "h200-answerable"}
    rows = scored(4, F1_OF_THREE | {WITHOUT_MASTERS: 64.0}, **answerable)
    # Plain PyTorch lacks a seed.
    rows = [row for row in rows if (row["spec.variant"], row["spec.seed"]) != (PLAIN, 3)]
    text = in_turns.f1_table(frame(*scored(3, F1_OF_THREE), *rows))
    assert [row[-2:] for row in cells_of(text)[1:]] == [
        ["−0.50 ± 0.00", "+1.00 ± 0.00"],
        ["–", "+1.50 ± 0.00"],
        ["−2.50 ± 0.00", "−1.00 ± 0.00"],
    ]
    assert "MiniLM on answerable questions, 3 to 4 equal seeds (group h200-ans" in text


@pytest.mark.parametrize(("seeds", "model"), [(2, "minilm"), (3, "mpnet")])
def test_f1_is_that_of_the_largest_model_that_has_three_seeds(seeds, model):
    of_mpnet = {"model": "mpnet", "model.name": "mpnet", "model.params_total": 109e6}
    rows = scored(5, F1_OF_THREE) + scored(seeds, F1_OF_THREE, **of_mpnet)
    assert set(in_turns.scored_part(frame(*rows))["model.name"]) == {model}
