"""The tables of a student's slides: what they say, and what their numbers come to."""

from qa_lib.lab.report import one_stack, slides
from qa_lib.lab.report.claims import CANNOT_TELL
from qa_lib.lab.report.stats import FAILS
from tests.report_runs import gpu_runs
from tests.test_one_stack import line


def claims(runs):
    """The lines of the table of claims, by claim."""
    return slides.claims_table(runs).set_index("their claim")


def test_the_slides_numbers_stand_as_they_were_transcribed():
    table = slides.numbers_table().set_index("their experiment")
    four = table.loc["Pipeline 4 GPUs 4 Stages"]
    assert four["seconds"] == "1930.19"
    assert four["validation loss"] == "1.090"
    assert four["statistical efficiency"] == "0.0001116"


def test_the_slides_numbers_are_all_of_the_file():
    assert len(slides.HEADINGS) == one_stack.theirs().shape[1]
    assert list(slides.numbers_table()) == list(slides.HEADINGS.values())


def test_a_claim_is_told_by_both_pipelines_over_the_first_experiment():
    table = claims(gpu_runs(line("P-ddp", 2, 64, 2000)))
    assert table.loc["pipelines take less time", "theirs"] == "×0.85 and ×0.52"
    assert table.loc["pipelines teach less a sample", "theirs"] == "×0.0043 and ×0.0069"
    assert table.loc["pipelines teach less a sample", "holds"] == FAILS


def test_their_speed_follows_from_their_steps_and_seconds_too():
    table = claims(gpu_runs(line("P-ddp", 2, 64, 2000)))
    by_steps = table.loc["the same, by steps × GPUs × 16 samples ÷ seconds"]
    first = 5430 * 4 / 3688
    pipelines = [6735 * 2 / 3148, 3340 * 4 / 1930.19]
    assert by_steps["theirs"] == " and ".join(f"×{rate / first:.2f}" for rate in pipelines)
    assert table.loc["pipelines take less time", "here"] == (
        "theirs trained on 347,520, 215,520, 213,760 samples"
    )


def test_claims_on_speed_are_judged_by_the_runs_and_come_first():
    runs = gpu_runs(
        line("E-masters-eager", 1, 128, 1000),
        line("P-ddp", 2, 128, 2000),
        line("P-1f1b", 2, 64, 1850),
    )
    table = claims(runs)
    assert table.index[2] == "pipelines train faster: 2 GPUs, over one GPU"
    assert table.iloc[2].tolist() == ["×1.85", "P-1f1b ×1.85 at batch 512", "✓"]
    assert table.iloc[3]["holds"] == CANNOT_TELL


def test_without_runs_the_claims_on_speed_cannot_be_told():
    table = claims(gpu_runs(line("P-ddp", 2, 64, 2000))[:0])
    assert table["here"].iloc[:4].tolist() == [one_stack.NOTHING] * 4
    assert table["holds"].iloc[:4].tolist() == [CANNOT_TELL] * 4
