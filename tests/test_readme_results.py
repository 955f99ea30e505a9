"""The results in README.md: each block is made of the committed records, and checked."""

import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from qa_lib.__main__ import main
from qa_lib.lab.report import (
    cli,
    evidence,
    headline,
    in_turns,
    readme,
    variants_table,
    whole_trainings,
)
from qa_lib.lab.report.evidence import select
from qa_lib.lab.report.format import gain
from qa_lib.lab.report.stats import BEST_F1, by_seed, compare
from qa_lib.records.archive import read_runs, write_archive
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import RECOMMENDED
from tests.material import committed, refused
from tests.report_runs import make, make_one_of_each_kind

# The blocks that take no time; `test_readme` checks all of them.
BLOCKS = {name: readme.BLOCKS[name] for name in ("headline", "variants", "groups")}


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A folder with README.md, whose three blocks are empty.

    There are an archived group of runs, which is in git's index, and a run of another group.
    """
    folder = tmp_path_factory.mktemp("readme")
    runs = folder / "runs"
    make_one_of_each_kind(runs)
    markers = "\n\n".join(f"<!-- {name} -->\n<!-- /{name} -->" for name in BLOCKS)
    (folder / "README.md").write_text(f"# Title\n\n{markers}\n\ntail\n")
    write_archive(runs / "cpu-smoke.jsonl", read_runs(runs, "cpu-smoke"), [])
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "runs"], cwd=folder, check=True)
    make(runs, "A1", preset="local")
    return folder


@pytest.fixture(scope="module")
def filled(empty):
    """What `report --readme` makes of README.md in the folder, whose file stays as it is."""
    before = (empty / "README.md").read_text()
    with pytest.MonkeyPatch.context() as patch:
        work_in(empty, patch)
        assert main(["report", "--readme"]) == 0
    after = (empty / "README.md").read_text()
    (empty / "README.md").write_text(before)
    return after


@pytest.fixture
def page(empty, tmp_path, monkeypatch):
    """README.md as the only page, in a copy of the folder that the test works in."""
    work_in(shutil.copytree(empty, tmp_path / "copy"), monkeypatch)
    return Path("README.md")


def work_in(folder, patch):
    """Work in this folder, in which README.md is the only page."""
    patch.chdir(folder)
    patch.setattr(cli, "PAGES", {})
    patch.setattr(cli, "TRAINED", {})
    patch.setattr(readme, "BLOCKS", BLOCKS)


# The page.


@pytest.mark.parametrize(
    "words", ["**the unoptimized loop** (A1)", "`cpu-smoke`", "Not measured yet: "]
)
def test_the_readme_shows_committed_groups_and_what_they_lack(filled, words):
    assert words in filled


def test_the_readme_shows_no_group_that_is_not_committed(filled):
    assert "cpu-local" not in filled


def test_what_stands_outside_of_the_blocks_stays(filled):
    assert filled.startswith("# Title\n\n<!-- headline -->")
    assert filled.endswith("tail\n")


def test_a_readme_that_was_just_made_is_up_to_date(page, filled, typed):
    page.write_text(filled)
    assert "are up to date" in typed("report --check")


def test_a_readme_without_results_is_not_up_to_date(page, capsys):
    assert cli.print_check(Path("runs"), Path("figures")) == 1
    assert "README.md is not up to date" in capsys.readouterr().out


def test_a_readme_with_other_results_is_not_up_to_date(page, filled, capsys):
    page.write_text(filled.replace("(A1)", "(A9)"))
    assert cli.print_check(Path("runs"), Path("figures")) == 1
    assert "README.md is not up to date" in capsys.readouterr().out


def test_a_readme_without_markers_is_a_clear_error(page, typed):
    page.write_text("nothing")
    text = typed("report --readme", code=2)
    assert "no page has a block between <!-- headline -->" in text


# The blocks.


def test_the_blocks_are_made_where_the_reference_group_is_alone_on_its_card():
    """Scores, several GPUs and the language model are then those of the card that has them."""
    every = committed()
    names = {"group": "new-bench", "spec.hardware": "new", "env.gpu": "NEW"}
    of_new_card = every[every["group"] == evidence.REFERENCE].assign(**names)
    every = pd.concat([every, of_new_card], ignore_index=True)
    texts = [
        readme._content(block, every, "new-bench", Path("figures"))
        for block in readme.BLOCKS.values()
    ]
    assert "on one NEW" in texts[0]
    assert "over 8 seeds" in texts[0]
    assert "2 GPUs train" in "".join(texts)


def without_whole_trainings():
    """The committed records without those of trainings that were measured whole."""
    every = committed()
    return every[every["spec.preset.name"] != "minutes"]


@pytest.fixture
def with_whole_trainings():
    """Records with two trainings that were measured whole, of 1,000 samples.

    The Trainer took 300 s for one of three epochs, 30 s of them until its first step, and the
    recommended variant 150 s for all.
    """
    every = without_whole_trainings()
    chosen = select(every, evidence.REFERENCE)
    is_compared = chosen["spec.variant"].isin(["A0-longest", RECOMMENDED])
    whole = chosen[is_compared & chosen["micro_batch"].eq(32)]
    epochs = whole["spec.variant"].map({"A0-longest": 1.0, RECOMMENDED: 3.0})
    seconds = whole["spec.variant"].map({"A0-longest": 300.0, RECOMMENDED: 150.0})
    columns = {
        "group": "h200-minutes",
        "spec.preset.name": "minutes",
        "spec.n_train": 1000,
        evidence.EPOCHS: epochs,
        "time.compile_cached": False,
        "time.notebook_s": seconds,
        "time.first_step_s": 30.0,
    }
    return pd.concat([every, whole.assign(**columns)], ignore_index=True)


def test_the_first_screen_has_the_lead_and_the_f1_of_runs_in_turns_on_whichever_card():
    every = committed()
    text = headline.first_screen(every, evidence.REFERENCE, Path("figures"))
    minutes, lead, f1 = text.split("\n\n")[0].splitlines()
    assert "minutes** on one H100" in minutes
    blocks = in_turns.largest_part(in_turns.blocks_with_rivals(every))
    assert lead == f"- {in_turns.finding(blocks)}"
    scored = in_turns.scored_part(every)
    change = gain(*compare(scored, in_turns.STACK, in_turns.PLAIN, BEST_F1))
    assert f1.startswith(
        f"- Its F1 differs by **{change}** from that of the quickest plain PyTorch found"
    )
    assert f"figures/{blocks['group'].iloc[0]}/rivals.png" in text


OF_MPNET = {
    "model.name": "all-mpnet-base-v2",
    "model": "all-mpnet-base-v2",
    "model.params_total": 109e6,
}


def mpnet_trainings(every, variant, count, **more):
    """Trainings of MPNet-base that began cold on an H200, with these columns."""
    whole = every[every["group"] == "h100-80gb-hbm3-minutes"].iloc[[0] * count]
    columns = {
        "group": "h200-quality",
        "spec.hardware": "h200",
        "env.gpu": "NVIDIA H200",
        "spec.variant": variant,
        "spec.n_train": 64534,
        "micro_batch": 32,
        evidence.EPOCHS: 3.0,
        "time.compile_cached": False,
        "time.first_step_s": 9.0,
        "time.notebook_s": 75.0,
    }
    return whole.assign(**columns, **OF_MPNET).assign(**more)


def without_mpnet(every):
    """Records without those of MPNet-base, to which tests add their own."""
    return every[every["model.name"] != OF_MPNET["model.name"]]


@pytest.mark.parametrize(("count", "is_shown"), [(2, False), (3, True)])
def test_the_first_screen_has_the_time_of_the_largest_model_that_both_trained_whole(
    count, is_shown
):
    """The stack and plain PyTorch trained one model; a larger one only the stack."""
    every = without_mpnet(committed())
    larger = {"model.name": "large", "model.params_total": 335e6}
    every = pd.concat(
        [
            every,
            mpnet_trainings(every, in_turns.STACK, 3),
            mpnet_trainings(every, in_turns.PLAIN, count, **{"time.notebook_s": 150.0}),
            mpnet_trainings(every, in_turns.STACK, 3, **larger),
        ],
        ignore_index=True,
    )
    text = headline.first_screen(every, evidence.REFERENCE, Path("figures"))
    expected = (
        "- Three epochs of MPNet-base on 64,534 samples take **75 seconds** on one H200 with the "
        "full stack in 8 bits (E-fp8-gradients), with the quickest plain PyTorch found "
        "(E-searched) 2.5 minutes.\n"
    )
    assert text.startswith(expected) == is_shown
    # Of such a model no lead was measured, so that BERT-base's stands below.
    assert "trains BERT-base **" in text


def test_the_first_screen_speaks_of_one_model_where_its_time_lead_and_f1_are_known():
    every = without_mpnet(committed())
    timed = in_turns.largest_part(in_turns.blocks_with_rivals(every))
    scored = in_turns.scored_part(every)
    of_both = [in_turns.STACK, in_turns.STACK_16_BITS, in_turns.PLAIN]
    every = pd.concat(
        [
            every,
            *(mpnet_trainings(every, name, 3) for name in of_both),
            timed[timed["spec.variant"].isin(of_both)].assign(**OF_MPNET),
            scored[scored["spec.variant"].isin(of_both)].assign(**OF_MPNET),
        ],
        ignore_index=True,
    )
    text = headline.first_screen(every, evidence.REFERENCE, Path("figures"))
    minutes, lead, f1 = text.split("\n\n")[0].splitlines()
    assert minutes.startswith("- Three epochs of MPNet-base")
    assert "trains MPNet-base **" in lead
    lead_over_trainer = in_turns.lead_table(timed).loc[in_turns.TUNED_TRAINER, "lead"]
    assert f". BERT-base it trains {lead_over_trainer:.2f} times as fast as the tuned " in lead
    mean = by_seed(scored, BEST_F1)[in_turns.STACK].mean()
    assert f1.startswith(f"- Its F1 is **{mean:.1f}** and differs by **")
    assert "measured on the same model" in f1


def test_without_runs_in_turns_the_first_screen_is_the_headline_of_the_group():
    every = committed()
    without = every[every["spec.variant"] != in_turns.STACK]
    assert headline.first_screen(without, evidence.REFERENCE, Path("figures")) == headline.headline(
        without, evidence.REFERENCE, Path("figures")
    )


def test_an_f1_of_the_stack_that_was_not_measured_is_told():
    every = committed()
    unscored = every[every["spec.preset.name"] != "quality"]
    text = headline.first_screen(unscored, evidence.REFERENCE, Path("figures"))
    assert "has not been measured beside plain PyTorch's" in text
    assert "*F1:*" not in text


def test_minutes_are_projected_where_no_training_was_measured_whole():
    text = headline.headline(without_whole_trainings(), evidence.REFERENCE)
    assert "Projected.\n" in text
    assert "*Minutes:* projected from measured speed to 131,754 samples" in text


def test_minutes_take_a_speed_of_the_recommended_variant():
    runs = without_whole_trainings()
    chosen = select(runs, evidence.REFERENCE)
    without = chosen[chosen["spec.variant"] != RECOMMENDED]
    said = f"{RECOMMENDED} and the Trainer have not both been timed in {evidence.REFERENCE}"
    refused(said, headline._minutes, runs, without)


def test_a_training_that_was_measured_whole_takes_the_place_of_a_projection(with_whole_trainings):
    text = headline.headline(with_whole_trainings, evidence.REFERENCE)
    assert text.startswith(
        "- Three epochs of BERT-base take **2.5 minutes** on one H100 "
        "with the full stack in 16 bits (E-uncompiled), with the Trainer as most use it "
        "(A0-longest) 14.0. The minutes of A0-longest are "
    )
    assert "measured from the command to the last step, with nothing cached, on 1,000 " in text
    assert "Projected" not in text


def test_one_epoch_stands_for_three_and_the_text_says_so(with_whole_trainings):
    text = headline.headline(with_whole_trainings, evidence.REFERENCE)
    assert "The minutes of A0-longest are projected from one epoch." in text


def test_a_training_that_was_scored_is_measured_to_the_score(with_whole_trainings):
    is_whole = with_whole_trainings["group"] == "h200-minutes"
    with_whole_trainings.loc[is_whole, "quality.f1"] = 80.0
    assert "to the score" in headline.headline(with_whole_trainings, evidence.REFERENCE)


# Cards.


@pytest.fixture(scope="module")
def cards():
    return readme.cards_table().set_index("card")


def test_a_t4_gets_a_variant_that_it_has_kernels_for(cards):
    assert cards.loc["T4", ["variant", "micro-batch"]].tolist() == ["E-t4-norm", "32"]


def test_other_cards_get_one_of_the_two_quickest_variants(cards):
    assert set(cards.drop(index="T4")["variant"]) <= set(TASKS["qa"].on_gpu[:2])


def test_only_the_smallest_card_takes_a_smaller_micro_batch(cards):
    assert set(cards["micro-batch"][:-1]) == {"32"}
    assert int(cards["micro-batch"].iloc[-1]) < 32


# Minutes of a training, of lines that are columns alone.


SPEEDS = pd.DataFrame({
    "variant": ["A1", "A0-longest", "A0-compile", RECOMMENDED, "A2"],
    "micro_batch": 32,
    "length": 384,
    "task.name": "qa",
    "samples_per_s": [65.877, 131.754, 395.262, 790.524, 1.0],
    "compile_s": [9.0, 9.0, None, 9.0, None],
    "warm_compile_s": [None, None, 60.0, None, None],
    "ratio": [1.0, None, 6.0, 12.0, 0.1],
})  # fmt: skip


def test_a_training_is_projected_from_its_speed_and_its_compilation():
    table = headline.projected(SPEEDS)
    assert table["minutes"].to_dict() == pytest.approx({
        "A1": 100.0,
        "A0-longest": 50.0,
        "A0-compile": 1000 / 60 + 1.0,
        RECOMMENDED: 500 / 60,
    })  # fmt: skip
    assert table["compile_s"].tolist() == [0.0, 0.0, 60.0, 0.0]
    assert table["cold"].tolist() == [True, True, False, True]
    # A0-longest was timed in another sitting.
    assert table["share"].isna().tolist() == [False, True, False, False]
    assert table["share"][RECOMMENDED] == pytest.approx(1 / 12)


def test_a_projection_says_where_the_quickest_trainer_found_code_compiled():
    table = headline.projected(SPEEDS)
    text = headline._source_of_projected(table)
    assert text.endswith("; A0-compile compiles for 60 s, with a part of the code from a cache.")
    cold = headline._source_of_projected(table.assign(cold=True))
    assert cold.endswith("with compilation, without data and scoring.")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (SPEEDS.assign(**{"task.name": "lm"}), "another task"),
        (SPEEDS.assign(micro_batch=16), "no measured speed at micro-batch 32"),
        (SPEEDS[1:], "no measured speed at micro-batch 32"),
    ],
)
def test_nothing_is_projected_of_another_task_or_without_the_baselines_speed(lines, said):
    refused(said, headline.projected, lines)


def whole_runs(*rows):
    """Runs of the baseline that trained whole, each with other columns."""
    usual = {
        "spec.variant": "A1",
        "spec.hardware": "h200",
        "spec.search": "",
        "spec.n_train": 1000,
        evidence.EPOCHS: 3.0,
        "model.params_total": 7.0,
        "status": "ok",
        "micro_batch": 32,
        "length": 384,
        "training": "three",
        "time.resumed_from_step": None,
        "time.compile_cached": False,
        "time.compile_s": 20.0,
        "time.notebook_s": 600.0,
        "time.wall_s": 500.0,
        "time.first_step_s": 30.0,
    }
    return pd.DataFrame([usual | row for row in rows])


def minutes_of(*rows):
    """The minutes of those of the runs that count beside a group on an H200."""
    runs = whole_runs(*rows)
    return whole_trainings.like(runs, whole_runs({}))["minutes"].tolist()


def test_a_whole_training_is_timed_from_its_process_or_else_by_the_run():
    assert minutes_of({}, {"time.notebook_s": None}) == pytest.approx([10.0, 500 / 60])


def test_three_epochs_whose_start_was_not_measured_count_and_a_run_without_a_time_does_not():
    timeless = {"time.notebook_s": None, "time.wall_s": None}
    assert minutes_of({"time.first_step_s": None}, timeless) == pytest.approx([10.0])


@pytest.mark.parametrize(("f1", "end"), [([80.0] * 3, "score"), ([80.0, 80.0, None], "last step")])
def test_whole_trainings_say_to_what_end_and_how_many_of_each_were_measured(f1, end):
    usual = {"group": "g", "data.name": "squad", "times": 1.0, "code": "a"}
    usual |= {"code.commit": "a" * 40, "code.dirty": False}
    rows = [{"spec.variant": variant} for variant in ("A0", "A1", "A1")]
    whole = whole_runs(*(usual | row for row in rows)).assign(**{"quality.f1": f1})
    text = headline._source_of_measured(whole)
    assert f"measured from the command to the {end}, with nothing cached, on 1,000 samples" in text
    assert "runs of each: 1; group g, code aaaaaaa." in text


def test_one_epoch_counts_three_times_and_its_start_once():
    one = {evidence.EPOCHS: 1.0, "training": "one"}
    assert minutes_of({}, one) == pytest.approx([10.0, (3 * 600 - 2 * 30) / 60])


@pytest.mark.parametrize(
    "other",
    [
        {"status": "killed"},
        {evidence.EPOCHS: 2.0},
        {"spec.search": "tune"},
        {"spec.hardware": "t4"},
        {"model.params_total": 8.0},
        {"time.resumed_from_step": 5.0},
        {"time.compile_cached": True},
        {"spec.n_train": 999},
        {"micro_batch": 16},
    ],
    ids=lambda other: str(*other),
)
def test_a_training_that_was_not_whole_cold_and_alike_does_not_count(other):
    assert len(minutes_of({}, other)) == 1


@pytest.fixture
def scored(monkeypatch):
    """Make F1 of the recommended variant in a group whose headline is of BERT-base.

    The function takes the verdict on it, and the model that was scored.
    """

    def make(verdict, model):
        row = {"verdict": verdict, "n": 5, "delta": 0.25, "delta±": 0.2, "best_delta": -0.5}
        tested = pd.DataFrame([row | {"best_delta±": 0.1}], index=[RECOMMENDED])
        runs = pd.DataFrame({"spec.variant": ["A1", RECOMMENDED], "model.name": model})
        runs = runs.assign(**{"model.params_total": [1e6, 11.2e6], "group": "q"})
        monkeypatch.setattr(headline, "shown_model", lambda runs, group: "bert-base")
        monkeypatch.setattr(headline, "judged", lambda runs, group: runs)
        monkeypatch.setattr(headline, "equivalence", lambda judged: tested)
        return runs

    return make


@pytest.mark.parametrize(
    ("verdict", "finding"),
    [
        (
            "within",
            "(E-uncompiled) stays within 1 point of that of the unoptimized loop (A1): **−0.50 ± ",
        ),
        (
            "no worse",
            "(E-uncompiled) does not fall 1 point below that of the unoptimized loop (A1)",
        ),
        ("open", "(E-uncompiled) is not shown to stay within 1 point"),
        ("beyond", "(E-uncompiled) is not shown to stay within 1 point"),
    ],
)
def test_whether_f1_is_kept_follows_from_the_verdict(verdict, finding, scored):
    text, (source,) = headline._kept(scored(verdict, "minilm"), "g")
    assert finding in text
    assert "at threshold 0 it is +0.25 ± 0.20" in source
    assert "over 5 seeds" in source


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("minilm", "measured on a smaller model (MiniLM, 11 M parameters)."),
        ("bert-base", "measured on the same model."),
    ],
)
def test_the_model_that_was_scored_is_told(model, said, scored):
    text, _ = headline._kept(scored("within", model), "g")
    assert text.endswith(said)


def test_an_f1_of_the_recommended_variant_that_was_not_measured_is_told():
    runs = committed()
    without = runs[runs["spec.variant"] != RECOMMENDED]
    text, sources = headline._kept(without, evidence.REFERENCE)
    assert text == "The F1 of the full stack in 16 bits (E-uncompiled) has not been measured."
    assert sources == []


def renamed(runs, group, model):
    """The runs of a group as if they were of another model."""
    return runs[runs["group"] == group].assign(**{"model.name": model, "model.params_total": 110.0})


def test_the_headline_is_of_the_largest_model_that_was_timed_scored_and_trained_whole():
    every = committed()
    assert headline.shown_model(every, evidence.REFERENCE) == "bert-base"
    of_recommended = every[every["spec.variant"] == RECOMMENDED]
    bench, quality, minutes = (
        renamed(of_recommended, f"h100-80gb-hbm3-{preset}", "all-mpnet-base-v2")
        for preset in ("bench", "quality", "minutes")
    )
    complete = pd.concat([every, bench, quality, minutes], ignore_index=True)
    assert headline.shown_model(complete, evidence.REFERENCE) == "all-mpnet-base-v2"
    unscored = pd.concat([every, bench, minutes], ignore_index=True)
    assert headline.shown_model(unscored, evidence.REFERENCE) == "bert-base"


def test_without_a_timed_language_model_there_is_no_block_about_one():
    runs = committed()
    without = runs[runs["spec.preset.name"] != "lm-bench"]
    said = "L-searched has not been timed"
    refused(said, readme.language, without, evidence.REFERENCE, Path("figures"))


def night_of(**speeds):
    """The block of a night, made of the speeds of some variants at 32 samples."""
    runs = select(committed(), evidence.REFERENCE)
    runs = runs[runs["spec.variant"].isin(list(speeds)) & runs["spec.settings.micro_batch"].eq(32)]
    runs = runs.groupby("spec.variant").head(1).copy()
    runs["speed.samples_per_s"] = runs["spec.variant"].map(speeds).astype(float)
    return readme.night(runs, evidence.REFERENCE, Path())


def test_a_night_of_sweeps_has_the_hours_of_its_trainings_and_a_minute_for_each_start():
    # Three epochs are 395,262 samples: an hour, twelve times, and half an hour.
    shown = night_of(A1=395_262 / 3600, A4=2 * 395_262 / 3600)
    assert "| A1, the baseline | 110 | 60.0 | 12.0 |" in shown
    assert "| A4, grouped by length | 220 | 30.0 | 6.00 |" in shown
    assert "12 trainings of each would take 18.4 hours on one H100" in shown


def test_a_night_of_variants_that_were_not_timed_is_not_known():
    with pytest.raises(evidence.NotMeasured, match="the baseline A1 has no measured speed"):
        night_of(A3=1000)


def test_a_picture_stands_below_a_text_where_it_was_drawn(monkeypatch):
    monkeypatch.setattr(readme, "picture_link", lambda path: f"![A title]({path})")
    assert readme._above("A text.", Path("a.png")) == "A text.\n\n![A title](a.png)"
    monkeypatch.setattr(readme, "picture_link", lambda path: "")
    assert readme._above("A text.", Path("a.png")) == "A text."


def test_a_point_of_f1_is_a_share_of_what_the_baselines_ok_runs_have_learnt(tmp_path):
    make(tmp_path, "A1", f1=70.0)
    make(tmp_path, "A1", seed=1, status="killed")
    judged = evidence.load_runs(tmp_path).assign(**{"quality.always_null_f1": 50.0})
    text = variants_table._source_of_scores(judged)
    assert text.endswith(
        "A1 scores 70.00 there, which is 20.0 above never answering (50.00); "
        "1 F1 is 5.00 % of that difference."
    )


def test_a_page_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused("cannot read README.md in this folder: No such file", readme._pages_with_blocks)


def test_what_no_record_shows_is_said():
    runs = pd.DataFrame({
        "env.gpu": ["NVIDIA H200", "NVIDIA H100 80GB HBM3"],
        "spec.variant": ["E-uncompiled", "A1"],
        "quality.f1": [None, 80.0],
        "model.name": ["bert-base", "minilm"],
        "model.params_total": [110.0, 11.0],
    })  # fmt: skip
    assert headline._not_shown(runs, runs, "bert-base") == (
        "**Not shown:** the F1 of BERT-base itself; the tuned Trainer (A0-tuned), which a search "
        "found quicker than the compiled one; anything on another card than the H100 and H200; no "
        "T4 has run anything."
    )
    with_t4 = runs.assign(**{"env.gpu": "Tesla T4"})
    assert headline._not_shown(
        with_t4.assign(**{"spec.variant": "A0-tuned"}), with_t4, "minilm"
    ) == ("**Not shown:** anything on another card than the T4.")


def test_a_group_is_listed_with_its_purpose_models_hardware_and_the_median_of_its_runs():
    columns = {"env.gpu": "NVIDIA T4", "env.gpu_mem_mib": 15360, "spec.hardware": "t4"}
    columns |= {"spec.search": "", "spec.preset.name": "vram"}
    models = ["a", "b", "a"]
    runs = pd.DataFrame({"model.name": models, "time.notebook_s": [30.0, 10.0, 11.0], **columns})
    assert readme._group_line("g", runs) == {
        "group": "`g`",
        "evidence for": "memory by the reference project's protocol",
        "model": "a, b",
        "hardware": "NVIDIA T4 (15 GiB)",
        "runs": "3",
        "one run": "11.0 s (10.0–30.0)",
    }
    of_cpu = runs.assign(**{"spec.hardware": "cpu", "time.notebook_s": None})
    of_cpu["model.name"] = ["a", "b", "c"]
    line = readme._group_line("g", of_cpu)
    assert (line["model"], line["hardware"], line["one run"]) == ("3 models", "a CPU", "–")
