"""The report against records made by the real record functions, so that a change of the schema breaks these tests."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.optimize import curve_fit

from qa_lib.__main__ import main
from qa_lib.lab.report import cli, evidence, figures, readme, scaling, style
from qa_lib.lab.report.evidence import NotMeasured, load_runs, select
from qa_lib.lab.report.notebook import advice, family_table
from qa_lib.records.archive import read_runs, write_archive
from qa_lib.records.record import DEFAULT_PRESET
from qa_lib.spec.spec import resolve
from qa_lib.spec.variants import RECOMMENDED, TASKS, VARIANTS
from tests.material import ROOT, committed, leave, refused, write
from tests.tiny import CPU, H200

# samples/s that records of a variant have where a test says nothing else
SPEEDS = {
    "A0": 95.0,
    "A1": 100.0,
    "A2": 120.0,
    "A3": 150.0,
    "A4-nb": 160.0,
    "A4": 200.0,
    "B1": 300.0,
    "C2": 80.0,
}
OTHER_SPEED = 110.0


def make(
    runs,
    variant,
    seed=0,
    *,
    machine=CPU,
    preset="smoke",
    status="ok",
    error=None,
    micro_batch=8,
    world=1,
    batch=None,
    length=None,
    precision=None,
    model="tiny",
    revision="1",
    params=75_000,
    speed=None,
    f1=None,
    peak=None,
    resumed=None,
):
    """Write one record as fit would, and return its folder.

    Without a speed, F1 or peak the record has usual ones. `batch` is the effective batch, and
    `resumed` the step from which the run went on.
    """
    spec = resolve(
        variant,
        preset,
        seed,
        machine,
        data={"name": "synthetic:1600", "sha256": "ab" * 32},
        model={"name": model, "revision": revision},
        data_source="synthetic:1600",
        model_source="tiny",
        micro_batch=micro_batch,
        world=world if batch else None,
        batch=batch,
    )
    spec = dataclasses.replace(
        spec,
        preset=dataclasses.replace(spec.preset, max_length=length or spec.preset.max_length),
        asked=dataclasses.replace(spec.asked, precision=precision or spec.asked.precision),
        world=world,
    )
    sections = {"code": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}}
    if status == "ok":
        sections |= _sections_of_a_good_run(variant, machine, params, speed, f1, peak, resumed)
    return leave(runs, spec, status, error, {"python": "3.11", "gpu": None}, **sections)


def _sections_of_a_good_run(variant, machine, params, speed, f1, peak, resumed):
    """The sections of a record that only a run has which ended ok."""
    speed = speed or SPEEDS.get(variant, OTHER_SPEED)
    step_ms = 32e3 / speed
    train_s = 9600 / speed
    f1 = f1 or (30.0 if variant == "A4-b" else 95.0)
    peak = peak or (2000.0 if machine is H200 else None)
    return {
        "time": {
            "train_s": train_s,
            "compile_s": 1.5,
            "eval_s": 1.0,
            "wall_s": train_s + 4.0,
            "resumed_from_step": resumed,
            "step_ms": {"n": 270, "median": step_ms, "p10": 0.9 * step_ms, "p90": 1.2 * step_ms},
        },
        "quality": {"f1": f1, "best_f1": f1, "exact": f1, "n": 400},
        "speed": {"samples_per_s": speed},
        "memory": {"peak_alloc_mib": peak},
        "model": {"params_total": params, "params_trainable": 750 if variant == "B1" else params},
    }


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A runs folder with one variant of each kind, in a folder of its own that the test works in."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs")
    for variant in ("A0", "A1", "A2", "A3", "A4-nb", "A4", "A4-b", "B1", "C2"):
        make(folder, variant)
    make(
        folder,
        "D1-nvfuser",
        status="skipped",
        error={"kind": "skipped", "message": "no backend named 'nvfuser'"},
    )
    make(
        folder,
        "C1",
        status="oom",
        error={"kind": "OutOfMemoryError", "message": "CUDA out of memory", "step": 3},
    )
    return folder


@pytest.fixture
def own(runs):
    """The runs, as the report reads them."""
    return select(load_runs(runs), "cpu-smoke")


# What the notebooks show of a family.


def test_a_familys_table_has_the_baseline_and_what_its_variants_change(runs):
    every = load_runs(runs)
    of_b1 = every.set_index("spec.variant")["run"]["B1"].record
    assert list(family_table(every, [of_b1])["variant"]) == ["A1", "A3", "B1"]


def test_a_familys_table_has_runs_of_other_families_that_were_made_with_it(runs):
    every = load_runs(runs)
    by_variant = every.set_index("spec.variant")["run"]
    records = [by_variant["B1"].record, by_variant["A4"].record]
    assert list(family_table(every, records)["variant"]) == ["A1", "A3", "A4", "B1"]


def test_a_familys_table_has_no_speeds_of_a_cpu(runs):
    every = load_runs(runs)
    of_b1 = every.set_index("spec.variant")["run"]["B1"].record
    assert "samples/s" not in family_table(every, [of_b1])


# What to run.


def test_cards_that_people_have_get_what_recommended_takes():
    table = readme.cards_table().set_index("card")
    assert table.loc["T4", ["variant", "micro-batch"]].tolist() == ["E-t4-norm", "32"]
    assert set(table.drop(index="T4")["variant"]) <= set(TASKS["qa"]["on_gpu"][:2])
    assert set(table["micro-batch"][:-1]) == {"32"} and int(table["micro-batch"].iloc[-1]) < 32


def test_a_card_is_named_with_what_suits_it():
    assert 'This card:** T4. `variant = "recommended"` takes what suits it' in advice("t4")
    assert "No GPU here" in advice("cpu")


def test_a_training_that_was_measured_whole_takes_the_place_of_a_projection():
    every = committed()
    every = every[every["spec.preset.name"] != "minutes"]
    assert readme.headline(every, evidence.REFERENCE).startswith(
        "**Projected from measured speed: three epochs"
    )
    own = select(every, evidence.REFERENCE)
    whole = own[own["spec.variant"].isin(["A0-longest", RECOMMENDED]) & own["micro_batch"].eq(32)]
    whole = whole.assign(
        group="h200-minutes", **{"time.compile_cached": False, "spec.n_train": 1000}
    )
    epochs = whole["spec.variant"].map({"A0-longest": 1.0, RECOMMENDED: 3.0})
    seconds = whole["spec.variant"].map({"A0-longest": 300.0, RECOMMENDED: 150.0})
    whole = whole.assign(
        **{"spec.preset.name": "minutes", evidence.EPOCHS: epochs, "time.notebook_s": seconds}
    )
    whole["time.first_step_s"] = 30.0
    said = readme.headline(pd.concat([every, whole], ignore_index=True), evidence.REFERENCE)
    assert (
        "**Three epochs of 1,000 samples train BERT-base in 2.5 minutes on one NVIDIA H100 80GB HBM3"
        in said
    )
    assert "`transformers.Trainer` takes 14.0 as it comes.**" in said and "Projected" not in said
    assert "to the last step" in said and "A0-longest: start, 3 times one epoch)" in said
    whole["quality.f1"] = 80.0
    assert "to the score" in readme.headline(
        pd.concat([every, whole], ignore_index=True), evidence.REFERENCE
    )


def test_the_blocks_are_made_where_the_reference_group_is_alone_on_its_card():
    """Scores, several GPUs and the language model are then those of the card that has them."""
    every = committed()
    own = {"group": "new-bench", "spec.hardware": "new", "env.gpu": "NEW"}
    every = pd.concat(
        [every, every[every["group"] == evidence.REFERENCE].assign(**own)], ignore_index=True
    )
    said = [block(every, "new-bench", Path("figures")) for block in readme.BLOCKS.values()]
    assert "on one NEW" in said[0] and "8 seeds" in said[0] and "4 GPUs train" in "".join(said)


def test_plain_pytorch_stands_beside_the_trainer_where_it_ran():
    minutes = {
        "A0-longest": 12.0,
        "A0-compile": 5.8,
        "E-plain": 3.0,
        "E-plain-graphs": 2.9,
        RECOMMENDED: 1.9,
    }
    rivals, asked = (
        "5.8 with torch.compile, and plain PyTorch 2.9 at its best",
        pd.Series(minutes | {"A0": 12.0}),
    )
    assert readme._rivals(asked) == f"12.0 as it comes, {rivals}"
    assert readme._rivals(asked.drop("A0-longest")) == rivals
    assert readme._rivals(asked[["E-plain", "A0"]]) == "", "of the Trainer's ways A0 is neither"


# Several GPUs, curves, profiles.


def test_efficiencies_are_against_the_variant_that_shares_nothing(tmp_path):
    rates = ("E-dropout", 1, 32, 100), ("E-dropout", 1, 8, 50), ("P-one-bucket", 4, 32, 160)
    for (variant, world, batch, rate), seed in itertools.product(rates, range(3)):
        values = {"world": world, "batch": batch, "speed": rate + seed, "peak": rate + seed}
        make(
            tmp_path,
            variant,
            seed,
            machine=dataclasses.replace(H200, gpus=4),
            preset="parallel",
            **values,
        )
    runs = select(load_runs(tmp_path), "h200-parallel")
    runs["parallel.rank_peak_mib.3"] = 2 * runs["memory.peak_alloc_mib"].where(runs["world"] == 4)
    lines = scaling.scaling(runs)
    assert lines["peak_mib"].tolist() == [51.0, 101.0, 2 * 161.0], (
        "the process with the most, a mean over seeds"
    )
    line = lines.query("variant == 'P-one-bucket'").iloc[0]
    assert line["strong"] == pytest.approx(161 / 4 / 101) and line["weak"] == pytest.approx(
        161 / 4 / 51
    )
    assert line["reference"] == "E-dropout" and line["strong±"] > 0
    assert scaling.speed_finding(line.to_frame().T).startswith(
        "4 GPUs train ×3.16 as fast as one at 8 samples each"
    )


def test_the_noise_scale_predicts_what_a_batch_teaches():
    steps = pd.DataFrame({"step": range(1, 201), "loss": np.linspace(4, 1, 200), "phi": 96.0})
    logs = pd.DataFrame(
        {"variant": "P-one-bucket", "seed": 0, "world": 1, "batch": [32, 64], "log": [steps, steps]}
    )
    worth, loss = scaling.batch_worth(logs)
    assert worth.loc[64, "predicted"] == pytest.approx((96 + 32) / (96 + 64))
    assert (
        worth.loc[64, "measured"] == pytest.approx(0.5) and loss > 1
    )  # as many steps of twice the samples
    with pytest.raises(NotMeasured):
        scaling.batch_worth(logs[:1])


def test_memory_is_a_fixed_cost_and_one_a_token():
    part = pd.DataFrame({"gib": [1.5, 2.0, 3.0], "tokens": [1024, 2048, 4096]})
    assert scaling.fit(part) == pytest.approx((1.0, 512.0, 0.0), abs=1e-9)
    assert math.isnan(scaling.fit(part[:2])[0])


def test_a_speed_that_scatters_has_no_part_in_the_lead(tmp_path):
    speeds = ("E-uncompiled", 200.0), ("E-plain-graphs", 100.0)
    for seed, size, (variant, speed) in itertools.product(range(3), (8, 32, 64), speeds):
        sizes = {
            "micro_batch": size,
            "batch": max(size, 32),
            "world": 1,
            "speed": speed + 40.0 * seed * (size == 8),
        }
        make(tmp_path, variant, seed, machine=H200, preset="bench", **sizes)
    assert readme.lead(load_runs(tmp_path), "h200-bench").endswith(
        " by ×2.00 at 32, ×2.00 at 64 samples a pass."
    )


def test_the_lead_is_over_the_compiled_trainer_at_equal_batches():
    peers, own = (
        [("A0-compile", 8, 10), ("A0-compile", 32, 20)],
        [("E-uncompiled", 8, 40), ("E-uncompiled", 32, 60)],
    )
    table = pd.DataFrame([*peers, *own, ("A0", 8, 1)], columns=["variant", "micro_batch", "speed"])
    variant, peer, factors = scaling.lead(table)
    assert (variant, peer, factors.to_dict()) == ("E-uncompiled", "A0-compile", {8: 4.0, 32: 3.0})
    with pytest.raises(NotMeasured):
        scaling.lead(table.query("variant != 'A0-compile'"))


def a_profile():
    """The first of the committed profiles."""
    return next(filter(None, (one.profile() for one in read_runs(ROOT / "runs", "h200-bench"))))


def test_profiles_are_drawn_unless_their_code_took_other_memory(tmp_path):
    """A committed profile beside each of three runs, as of a step of 7.5 ms."""
    for variant, peak in (("A1", 23.0), ("A3", 23.0), ("C2", 90.0)):
        run, profile = make(tmp_path, variant, machine=H200, peak=23.0), a_profile()
        profile["spec"] |= {"variant": variant, "micro_batch": 8}
        profile["time"]["step_ms"], profile["memory"]["peak_mib"] = 7.5, peak
        write(run / "profile.json", profile | {"run_id": run.name, "group": run.parent.name})
    runs = select(load_runs(tmp_path), "h200-smoke")
    assert style.title_of(figures.fig_step(runs)) == "A step takes 7.50 ms in A1, 7.50 ms in A3"
    assert [label.get_text() for label in figures.fig_phases(runs).axes[0].get_yticklabels()] == [
        "A1",
        "A3",
    ]


# Figures.


def test_the_ladder_says_how_far_it_reaches(own):
    figure = figures.fig_ladder(own)
    title = "On a CPU: A4 trains 2.00× as fast as A1, 2.11× as fast as the plain Trainer (A0)"
    words = {text.get_text() for text in figure.axes[0].texts}
    assert style.title_of(figure) == title and words >= {
        "samples/s",
        "× A1",
        "× variant above",
        "1.25",
        "0.95 (A1)",
    }


def test_a_few_timed_runs_do_not_stand_for_a_group_that_shared_the_gpu(own):
    refused("shared the GPU", figures.timed, own.assign(**{"time.wall_s": math.nan}))


def test_a_figure_is_kept_with_its_title_and_what_it_was_drawn_from(own):
    shown = style.show(figures.fig_ladder, own, save="figures")
    with Image.open("figures/cpu-smoke/ladder.png") as image:
        assert image.text["Title"] == shown.alt
        assert image.text["Records"] == style.digest(own)


def test_equal_figures_are_equal_bytes(own):
    style.show(figures.fig_ladder, own, save="figures")
    first = Path("figures/cpu-smoke/ladder.png").read_bytes()
    style.show(figures.fig_ladder, own, save="figures")
    assert Path("figures/cpu-smoke/ladder.png").read_bytes() == first


def test_figures_of_other_records_have_another_digest(own):
    assert style.digest(own[1:]) != style.digest(own)


def test_a_digest_counts_a_later_field_of_a_preset_only_where_it_is_not_the_default(own):
    before = style.digest(own)
    (name,) = style.LATER
    for run in own["run"]:
        preset = run.record["spec"]["preset"]
        assert preset.pop(name) == DEFAULT_PRESET[name]
    assert style.digest(own) == before
    own["run"].iloc[0].record["spec"]["preset"][name] = 7
    assert style.digest(own) != before


def test_links_and_files_that_are_no_pictures_are_no_figures(own, tmp_path):
    style.show(figures.fig_ladder, own, save="figures")
    folder = Path("figures/cpu-smoke")
    figure = folder / "ladder.png"
    (folder / "link.png").symlink_to(tmp_path / figure)
    (folder / "text.png").write_text("no picture")
    ((title, png),) = style.figures_of(folder)
    assert title.startswith("On a CPU: ")
    assert png == figure.read_bytes()


def test_a_step_that_got_shorter_says_what_shrank():
    """Here with the time of one part that is as long as before and of two that are not."""
    profile, shown, parts = (
        a_profile(),
        {},
        {"attention": 4.0, "copies": 3.0, "norms and elementwise": 9.0},
    )
    for name, own in (("A1", parts), ("A3", parts | {"copies": 1.0, "norms and elementwise": 0.5})):
        times = profile["time"] | {"step_ms": sum(own.values()), "parts": {"forward": own}}
        shown[name] = profile | {"time": times}
    title = (
        "A step takes 16.0 ms in A1, 5.50 ms in A3; norms and elementwise + copies: 12.0 → 1.50 ms"
    )
    assert style.title_of(figures.step(shown)) == title
    assert style.title_of(figures.step({"A1": shown["A1"]})) == "A step takes 16.0 ms in A1"


def test_axes_write_thousands_as_tables_do():
    figure = style.new_figure("Title", "", 3.0)
    axis = figure.subplots()
    axis.set(xlim=(0, 12_000), ylim=(0, 1.2))
    style.png(figure)
    assert "12,000" in [label.get_text() for label in axis.get_xticklabels()]
    assert "1.0" in [label.get_text() for label in axis.get_yticklabels()]


@pytest.mark.parametrize(
    ("versions", "words"), [("a, b", "Code a, b"), ("a, b, c, d", "Code a, b, and 2 more")]
)
def test_a_caption_names_two_versions_of_the_code(versions, words):
    assert style.code(versions) == words


def test_texts_beside_an_axis_are_apart_and_inside():
    axis = style.new_figure("Title", "", 3.0).subplots()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    style.name_points(axis, [(1, 0.99, "top"), (1, 0.98, "next"), (1, 0.1, "low")])
    low, second, top = [text.get_position()[1] for text in axis.texts]
    assert low == pytest.approx(0.1)
    assert top - second >= 0.07 - 1e-9
    assert top <= 1


def test_a_figure_that_cannot_be_drawn_is_a_sentence(own):
    said = style.show(figures.fig_step, own).data
    assert said.startswith("*Not shown: no run of this group has a profile")


def test_a_spoilt_record_is_a_sentence_that_names_the_error():
    assert style.show(lambda: {}["x"]).data.startswith("*Not shown: KeyError")


# README.md and the command.


@pytest.fixture
def front(runs):
    """README.md as the only page, with empty blocks, and the runs, archived, in git's index."""
    blocks = "\n\n".join(f"<!-- {name} -->\n<!-- /{name} -->" for name in readme.BLOCKS)
    Path("README.md").write_text(f"# Title\n\n{blocks}\n\ntail\n")
    write_archive(Path("runs/cpu-smoke.jsonl"), read_runs("runs", "cpu-smoke"), [])
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "add", "runs"], check=True)
    return Path("README.md")


def test_the_readme_is_made_of_committed_groups_and_checked(front, runs, capsys, monkeypatch):
    monkeypatch.setattr(cli, "PAGES", {})
    make(runs, "A1", preset="local")
    assert main(["report", "--check"]) == 1
    assert main(["report", "--readme"]) == 0
    text = front.read_text()
    assert all(
        words in text for words in ("| A1 | ", "`cpu-smoke`", "What is missing here is not known")
    )
    assert "cpu-local" not in text and text.endswith("tail\n") and main(["report", "--check"]) == 0
    front.write_text(text.replace("| A1 |", "| A9 |"))
    assert (
        main(["report", "--check"]) == 1
        and "README.md is not up to date" in capsys.readouterr().out
    )


def test_a_readme_without_markers_and_a_folder_without_git_are_clear_errors(front, typed):
    front.write_text("nothing")
    assert "no page has a block between <!-- headline -->" in typed("report --readme", code=2)
    assert "no group 'x' below runs; there are cpu-smoke" in typed("report --group x", code=2)


def test_the_report_of_a_small_group_fits_a_terminal_and_draws_its_figures(runs, typed):
    said = typed("report").splitlines()
    assert (
        len(said) <= 30
        and max(map(len, said)) <= 100
        and said[0] == "Group cpu-smoke: 11 runs, micro-batch 8"
    )
    text, words = (
        Path("figures/cpu-smoke/report.md").read_text(),
        ("| A1 |", "| D1-nvfuser |", "no backend named 'nvfuser'", "CUDA out of memory"),
    )
    assert [each for each in ("![On a CPU: A4 trains", *words) if each not in text] == []
    assert Path("figures/cpu-smoke/ladder.png").is_file()
    assert len(text.split()) < 650, "eleven runs on three screens"


def test_ones_own_runs_are_shown_first_and_archived_ones_to_who_names_them(runs, typed):
    typed("archive cpu-smoke --runs", runs)
    Path(runs, "cpu-smoke").rename("away")
    for variant in ("A1", "A2"):
        make(runs, variant, preset="local")
    Path(runs, "cpu-smoke.jsonl").write_text(
        Path(runs, "cpu-smoke.jsonl").read_text().replace('"started":"2', '"started":"3')
    )
    said = typed("report")
    assert said.startswith("Group cpu-local: 2 runs, ") and "cpu-smoke" not in said
    text = Path("figures/cpu-local/report.md").read_text()
    assert "cpu-smoke" not in text and not Path("figures/cpu-local/report.ipynb").exists()


def test_the_page_of_ones_own_group_says_what_three_seeds_show(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        make(Path("runs"), "A1", seed, f1=80 + seed)
        make(Path("runs"), "A2", seed, f1=80.1 + 1.01 * seed)
        make(Path("runs"), "B1", seed, f1=60 + seed)
    typed("report")
    text = Path("figures/cpu-smoke/report.md").read_text()
    assert re.search(r"(?m)^\| A2 \|.*\+0\.11.±.0\.02 \| ✓ \|$", text)
    assert re.search(r"(?m)^\| B1 \|.*−20\.00.±.0\.00 \| ✗ \|$", text)


def test_a_group_of_ones_own_is_shown_without_what_is_archived_of_it(runs, typed):
    typed("archive cpu-smoke --runs", runs)
    Path(runs, "cpu-smoke").rename("away")
    for variant in ("A1", "A2"):
        make(runs, variant, seed=7)
    assert typed("report").startswith("Group cpu-smoke: 2 runs, ")
    every = load_runs(runs)
    entry = every[every["spec.seed"] == 7]["run"].iloc[0].record
    assert list(family_table(every, [entry])["variant"]) == ["A1", "A2"]


def test_figures_are_not_drawn_into_a_folder_that_is_a_link(runs, typed):
    for name in ("figures", "theirs"):
        Path(name).mkdir()
    Path("figures/cpu-smoke").symlink_to("../theirs")
    assert "cpu-smoke: a link" in typed("report", code=2) and not list(Path("theirs").iterdir())


def test_the_printed_table_has_no_cpu_speeds_and_the_speeds_of_the_reference_beside(runs):
    reference = committed().query("group == @evidence.REFERENCE")
    said = cli.overview(
        select(load_runs(runs), "cpu-smoke"), pd.concat([load_runs(runs), reference])
    )
    ratio = (
        figures.timed(select(committed(), evidence.REFERENCE))
        .set_index("variant")
        .loc["A3", "ratio"]
    )
    assert (
        " samples/s" not in said
        and "speed × A1 on one NVIDIA H100" in said
        and f"{ratio:.2f}" in said
    )
    of_reference = select(committed(), evidence.REFERENCE)
    assert len(cli.overview(of_reference, committed()).splitlines()) <= 26


def test_every_tag_is_one_that_the_report_knows():
    known = {"ladder", "trainer", "plain", "default", "headline", "quickstart"}
    assert {tag for variant in VARIANTS.values() for tag in variant.tags} == known
    assert {"ladder", "headline"} <= {*VARIANTS[RECOMMENDED].tags}


# What the notebooks compute.


def cell_of(notebook, name):
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    return "".join(next(cell["source"] for cell in cells if cell["id"] == name))


def test_the_fitted_law_is_the_one_that_made_the_losses():
    space = {"np": np, "math": math, "pd": pd, "curve_fit": curve_fit}
    exec(cell_of("scaling", "scaling-laws"), space)
    sizes = np.array([1e6, 4e6, 1.6e7, 6.4e7, 2.56e8])
    for constants, c in ((2, 0.0), (3, 0.7)):
        law = space["fit"](sizes, 30 * sizes**-0.25 + c, constants)
        assert law[2:] == pytest.approx((0.25, c), rel=1e-3)
        assert space["value"](law, 1e9) == pytest.approx(30 * 1e9**-0.25 + c, rel=1e-3)


def test_the_slides_formula_falls_where_losses_are_told_again():
    space = {"np": np, "pd": pd}
    exec(cell_of("multi_gpu", "artefact").split("own, ok, inf")[0], space)
    loss = pd.Series(np.tile([1.0, 2.0], 100))
    assert space["formula"](loss, 10) == pytest.approx(0.1)
    assert space["formula"](space["repeated"](loss), 10) == 0.0


def test_an_errors_words_are_shown_as_words(tmp_path, monkeypatch, typed):
    """Without escapes; dollars are no formula."""
    monkeypatch.chdir(tmp_path)
    make(Path("runs"), "A1")
    said = {"kind": "E", "message": "\x1b[2Jodd $\\bad{ é"}
    make(Path("runs"), "A2", status="error", error=said)
    assert "[2Jodd $\\bad{ é" in typed("report")
    text = Path("figures/cpu-smoke/report.md").read_text()
    assert "\x1b" not in text and "Not shown" not in text and "error: [2Jodd $\\bad{ é" in text
