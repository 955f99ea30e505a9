"""The rivals that this library is measured against, and their picture."""

import pandas as pd
import pytest

from qa_lib.lab.report import in_turns, rivals, spoken, style
from qa_lib.lab.report.evidence import REFERENCE, select
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged
from tests.material import committed, refused

SPEEDS = {"A0": 3.0, "A0-longest": 1.0, "A0-compile": 2.0, "E-searched": 4.0, RECOMMENDED: 5.0}


@pytest.fixture(scope="module")
def timed():
    """The runs of the reference group."""
    return select(committed(), REFERENCE)


@pytest.mark.parametrize(
    ("variants", "chosen"),
    [
        (list(SPEEDS), ["A0-longest", "A0-compile", "E-searched"]),
        (["E-searched", RECOMMENDED], ["E-searched"]),
        # A0 is the Trainer padded to the limit, and no way in which anybody takes it.
        (["A0"], []),
    ],
)
def test_the_quickest_rival_of_each_kind_is_taken(variants, chosen):
    assert rivals.quickest(pd.Series(SPEEDS)[variants]) == chosen


def test_a_quicker_trainer_takes_the_place_of_another():
    speeds = pd.Series({"A0-compile": 2.0, "A0-tuned": 3.0})
    assert rivals.quickest(speeds) == ["A0-tuned"]


def test_rivals_are_compared_at_the_largest_micro_batch_that_has_all_of_them(timed):
    lines = rivals.compared(timed, "bert-base")
    assert list(lines.index) == ["A0-longest", "A0-compile", "E-searched", RECOMMENDED]
    assert set(lines["micro_batch"]) == {32}


def test_a_rival_of_another_sitting_is_not_compared(timed):
    is_searched = timed["spec.variant"] == "E-searched"
    apart = timed.assign(sitting=timed["sitting"].mask(is_searched, "another"))
    lines = rivals.compared(apart, "bert-base")
    assert list(lines.index) == ["A0-longest", "A0-compile", RECOMMENDED]


def test_without_a_rival_nothing_is_compared(timed):
    alone = timed[timed["spec.variant"] == RECOMMENDED]
    said = f"{RECOMMENDED} and a rival have not both been timed on bert-base"
    refused(said, rivals.compared, alone, "bert-base")


def test_the_picture_has_a_bar_for_each_rival_and_names_the_lead(timed):
    figure = rivals.fig_rivals(timed, "bert-base")
    (axis,) = figure.axes
    lead = rivals.leads(rivals.compared(timed, "bert-base"))["E-searched"]
    assert style.title_of(figure) == (
        f"The full stack in 16 bits trains {lead:.2f} times as fast as the quickest plain PyTorch "
        "found"
    )
    assert len(axis.patches) == 4
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names[-1] == f"the full stack in 16 bits\n({RECOMMENDED})"
    said = "\n".join(text.get_text() for text in axis.texts)
    assert f"{lead:.2f} × the quickest plain PyTorch found" in said


def test_runs_in_turns_are_drawn_as_four_bars_with_their_own_factors():
    turns = select(committed(), "h200-bench")
    table = in_turns.lead_table(in_turns.largest_part(in_turns.blocks_with_rivals(turns)))
    figure = rivals.fig_rivals(turns, "bert-base")
    lead = table.loc[in_turns.PLAIN, "lead"]
    assert style.title_of(figure) == (
        f"The full stack in 8 bits trains {lead:.2f} times as fast as the quickest plain PyTorch "
        "found"
    )
    (axis,) = figure.axes
    assert [bar.get_width() for bar in axis.patches] == [
        table.loc[name, "samples_per_s"] for name in rivals.IN_TURNS
    ]
    said = [text.get_text() for text in axis.texts]
    over_trainer = table.loc[in_turns.TUNED_TRAINER, "lead"]
    assert said[-1] == (
        f"{over_trainer:.2f} × the tuned Trainer\n{lead:.2f} × the quickest plain PyTorch found"
    )


# Spoken names.


def test_every_variant_of_the_readme_has_words_that_people_say():
    shown = [name for name in tagged("headline") if VARIANTS[name].family in "AE"]
    assert [name for name in shown if name not in spoken.VARIANTS] == []
    assert set(spoken.VARIANTS) <= set(VARIANTS)


def test_words_have_the_code_in_brackets_behind_them():
    assert spoken.variant("A0-compile") == "the compiled Trainer (A0-compile)"
    assert spoken.variant("A2") == "A2"


def test_a_card_has_its_short_name():
    assert spoken.card("NVIDIA H100 80GB HBM3") == "H100"
    assert spoken.card("NVIDIA H200") == "H200"
