"""What several GPUs come to: efficiencies by made-up laws, the slides' formula, their hypotheses, figures, notebook."""

import math
import shutil

import nbformat
import numpy as np
import pandas as pd
import pytest
from qa_lib.report.runs import NotMeasured, ReportError, group_or_why, load_runs, select
from qa_lib.report.text import factor, number

from qa_lib.report import curve_tables, losses, scaling, scaling_figures, slides, style, tables
from tests import several
from tests.test_figures import ROOT, faults


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("several")
    several.parallel_group(made)
    several.slides_group(made)
    return made


@pytest.fixture(scope="module")
def every(folder):
    return load_runs(folder)


@pytest.fixture(scope="module")
def facts(every):
    return slides.Facts(*(group_or_why(every, f"h200-{scale}")[0] for scale in ("parallel", "critical-batch")))


@pytest.fixture(scope="module")
def lines(facts):
    return scaling.scaling(facts.speed).set_index(["variant", "world", "stages", "batch"])


# The table.


def test_the_one_gpu_is_the_row_that_shares_nothing():
    ancestors = {"P-one-bucket": "E-dropout", "P-zero1": "E-dropout", "P1-bf16": "A1", "P-fsdp": "A1", "P0": "A0"}
    ancestors |= {"P-interleaved": "E-masters-eager", "P-tensor": "E-masters-eager", "E-dropout": "E-dropout"}
    assert {name: scaling.one_gpu(name) for name in ancestors} == ancestors


def test_efficiency_is_against_one_gpu_with_the_same_batch_or_with_its_share(lines):
    alone = {batch: 2 + 0.25 * batch for batch in (8, 16, 32, 64, 128)}  # ms of E-dropout
    for world, batch in ((2, 32), (4, 32), (2, 64), (2, 128), (4, 128)):
        line, ms = lines.loc["P-one-bucket", world, 1, batch], 3 + 0.25 * batch / world
        assert line["strong"] == pytest.approx(alone[batch] / (world * ms))
        assert line["weak"] == pytest.approx(alone[batch // world] / ms)
        assert line[["strong±", "weak±"]].tolist() == pytest.approx([0, 0], abs=1e-9), (
            "seeds differ, their ratios do not"
        )
        assert line["reference"] == "E-dropout" and line["rate±"] > 0 and line["n"] == 3


def test_one_gpu_of_other_code_is_of_another_day_and_gives_no_interval(facts, lines):
    runs, alone = facts.speed, facts.speed["spec.variant"] == "E-dropout"
    apart = scaling.scaling(runs.assign(**{"code.commit": runs["code.commit"].mask(alone, "f" * 40)}))
    found = apart.set_index([*scaling.WHERE, "batch"]).loc["P-one-bucket", 2, 1, 32]
    assert (
        found["reference"] == "E-dropout of another day"
        and found["strong"] == lines.loc["P-one-bucket", 2, 1, 32]["strong"]
    )
    assert math.isnan(found["strong±"]) and math.isnan(found["weak±"])


def test_data_parallelism_is_shown_on_and_off_at_as_many_features_a_gpu(every, lines):
    table = curve_tables.parallel_table(every, "h200-parallel")
    assert [*zip(table["row"], table["GPUs"], strict=True)] == [(r, n) for r in ("P1", "P-one-bucket") for n in "24"]
    for _, told in table[table["row"] == "P-one-bucket"].iterrows():
        line, off = (
            lines.loc["P-one-bucket", int(told["GPUs"]), 1, 32 * int(told["GPUs"])],
            lines.loc["E-dropout", 1, 1, 32],
        )
        assert (told["features a GPU"], told["off is"]) == ("32", "E-dropout")
        assert told["off, features/s"] == number(off["rate"]) and told["× off"] == factor(line["rate"] / off["rate"])
    alone = every[every["world"] == 1]
    with pytest.raises(NotMeasured, match="no run of P0, P1, P-one-bucket beside its row on one GPU"):
        curve_tables.parallel_table(alone, "h200-parallel")


def test_a_row_without_its_ancestor_is_its_own_one_gpu(lines):
    line = lines.loc["P1", 2, 1, 128]
    assert (line["reference"], line["strong"]) == ("P1", pytest.approx(1)) and math.isnan(line["weak"])
    assert lines.loc["P1", 4, 1, 32]["reference"] == "A1"
    assert lines.loc["P1", 4, 1, 128]["reference"] == "P1, A1", "A1 ran at batch 32 alone"


def test_one_run_has_no_interval_and_a_row_for_one_gpu_no_efficiency(lines):
    pipeline = lines.loc["P-gpipe", 2, 2, 32]
    assert pipeline["strong"] == pytest.approx(20 / (2 * 15)) and math.isnan(pipeline["strong±"])
    alone = lines.loc["E-dropout", 1, 1, 32]
    assert alone[["strong", "weak"]].isna().all() and alone["reference"] == ""


def test_the_one_gpu_takes_the_micro_batch_at_which_it_is_quickest(folder, lines, tmp_path):
    shutil.copytree(folder / "h200-parallel", tmp_path / "h200-parallel")
    for seed in range(3):
        several.timed(tmp_path, "E-dropout", seed, ms=40.0, micro_batch=4)
    again = scaling.scaling(select(load_runs(tmp_path), "h200-parallel"))
    slow = again[(again["variant"] == "E-dropout") & (again["batch"] == 32)]
    assert slow["micro_batch"].tolist() == [4, 32], "two lines, no mean of both"
    own = again.set_index(["variant", "world", "stages", "batch", "micro_batch"]).loc["P-one-bucket", 2, 1, 32, 8]
    assert own["strong"] == lines.loc["P-one-bucket", 2, 1, 32]["strong"]


def test_waiting_and_memory_are_those_of_a_step_and_of_the_fullest_gpu(lines):
    assert (
        lines.loc["P-one-bucket", 4, 1, 32]["waiting_ms"] == 1
        and lines.loc["P-one-bucket", 1, 1, 32]["waiting_ms"] == 0
    )
    assert math.isnan(lines.loc["P1", 2, 1, 32]["waiting_ms"]), "nobody measured it"
    pipeline = lines.loc["P-gpipe", 2, 2, 32]
    assert pipeline["waiting_ms"] == pytest.approx(0.24 * pipeline["step_ms"])
    assert lines.loc["P-one-bucket", 4, 1, 32]["peak_mib"] == 3030


def test_ranks_are_apart_by_the_slowest_and_the_fastest_of_a_run(facts, lines):
    assert lines.loc["P-one-bucket", 4, 1, 32]["apart"] == pytest.approx(0.06), "the mean of 3, 6 and 9 %"
    assert math.isnan(lines.loc["P-one-bucket", 1, 1, 32]["apart"])
    costs = scaling.cost_table(facts.speed).set_index(["row", "GPUs", "batch"])
    assert costs.loc["P-one-bucket", "4", "32"]["ranks apart"] == "6.00 %"
    untold = facts.speed.drop(columns=facts.speed.filter(like="rank_step_ms").columns)
    assert "ranks apart" not in scaling.cost_table(untold)


def test_the_tables_say_only_what_was_measured(facts):
    speed = scaling.speed_table(facts.speed).set_index(["row", "GPUs", "batch"])
    line = speed.loc["P-one-bucket", "2", "32"]
    assert (line["strong"], line["weak"], line["one GPU"]) == ("71.4 ± 0.0 %", "85.7 ± 0.0 %", "E-dropout")
    costs = scaling.cost_table(facts.speed)
    assert "GPU busy" not in costs and set(costs["weights equal"]) == {"yes", "–"}
    waits = costs.set_index("row").loc["P-gpipe", ["bubble", "by formula", "stages apart"]]
    assert waits.tolist() == ["24.0 %", "20.0 %", "5.00 %"]
    with pytest.raises(NotMeasured, match="family P"):
        scaling.scaling(facts.speed[facts.speed["spec.variant"] == "E-dropout"])


def test_on_a_cpu_what_shares_a_step_is_called_processes(facts):
    runs = facts.speed.assign(**{"spec.hardware": "cpu"})
    speed, costs = scaling.speed_table(runs), scaling.cost_table(runs)
    assert {"processes", "a process's", "one process"} <= set(speed) and "GiB a process" in costs
    for draw in (scaling_figures.fig_scaling, scaling_figures.fig_waiting):
        figure = draw(runs)
        texts = [text.get_text() for axis in figure.axes for text in (axis.title, axis.xaxis.label, axis.yaxis.label)]
        texts += [label.get_text() for axis in figure.axes for label in axis.get_yticklabels()]
        said = " ".join([figure.get_suptitle(), *texts])
        assert "GPU" not in said.replace("nothing about GPUs", "") and "process" in said


def test_runs_that_differ_in_batch_world_or_stages_are_never_averaged(facts):
    averaged = tables.summarise(facts.speed)
    keys = ["variant", "world", "stages", "batch", "micro_batch"]
    assert not averaged.duplicated(keys).any() and averaged["n"].sum() == len(facts.speed)
    table = averaged.set_index(keys)
    assert table.loc["P-one-bucket", 1, 1, 32, 8]["ratio"] == pytest.approx(51.2 / 10)
    assert math.isnan(table.loc["P-one-bucket", 2, 1, 32, 8]["ratio"]) and not averaged["note"].any()


def test_a_group_with_rows_for_several_gpus_does_without_the_baseline(facts):
    assert tables.result_table(tables.summarise(facts.slides))["effective batch"].nunique() == 4
    with pytest.raises(ReportError, match="the baseline A1"):
        tables.summarise(facts.speed[facts.speed["spec.variant"] == "E-dropout"].reset_index(drop=True))


def test_so_does_one_that_compares_lengths_of_one_row(facts):
    alone = facts.speed[facts.speed["spec.variant"] == "E-dropout"].reset_index(drop=True)
    lines = tables.summarise(alone.assign(length=[128, *alone["length"][1:]]))
    assert set(lines["length"]) == {128, 384} and lines["ratio"].isna().all()


# The slides' formula, and what our logs say of it.


def test_the_formula_on_a_log_that_falls_evenly():
    loss = pd.Series(np.arange(500, 0, -1.0))
    assert losses.formula(loss, 16).tolist() == [1 / 16] * 499
    again = losses.repeated(loss)
    assert len(again) == 450 and again.iloc[:50].eq(475.5).all() and again.iloc[50] == 425.5
    assert losses.formula(again, 1).sum() == 8 * 50, "nine means of fifty steps, told fifty times each"


def test_a_committed_log_gives_two_values_two_orders_apart():
    runs = pd.DataFrame([{
        "path": ROOT / "runs" / "h200-bench" / "A1-s0-519207", "status": "ok", "batch": 32, "group": "h200-bench",
        "world": 1, "run_id": "A1-s0-519207", "spec.variant": "A1", "spec.seed": 0,
    }])  # fmt: skip
    log = losses.one_log(losses.logs_of(runs))
    assert log["raw"] * 32 == pytest.approx(0.306, abs=0.001) and 100 < log["raw"] / log["again"] < 250


def test_a_smoothed_loss_is_reached_sooner_by_the_batch_that_learns_more(facts):
    found = losses.reached(facts.logs)
    assert list(found.features) == [32, 64, 128] and len(found.features) == 3
    told, laws = found.efficiency, losses.predicted(facts.logs, [32, 64, 128])
    assert told.loc[32, "mean"] == 1 and laws[32] == 1
    assert laws[64] == pytest.approx(432 / 464, abs=0.02) and laws[128] == pytest.approx(432 / 528, abs=0.03)
    assert told.loc[128, "mean"] == pytest.approx(laws[128], rel=0.15)


def verdicts_of(facts):
    """{hypothesis: the verdicts of its parts}."""
    table = slides.hypotheses_table(facts).replace({"hypothesis": {"": None}}).ffill()
    return table.groupby(table["hypothesis"].str[:2], sort=False)["holds"].agg("".join).to_dict()


def test_each_hypothesis_holds_in_a_world_that_obeys_it(facts):
    assert verdicts_of(facts) == {"H1": "✓", "H2": "✓", "H3": "✓✓", "H4": "✓✓✓", "H5": "✓✓✓", "H6": "✓✓", "H7": "✓✓"}
    said = slides.hypotheses_table(facts)["measured here"]
    assert said[0] == "P0: 2500 on 1, 1250 on 2, 625 on 4 GPUs"
    conclusions = slides.conclusions(facts)
    assert conclusions.count("\n") == 3
    assert "P-one-bucket trains 6,400 features/s; the only row that divided the model there, P-1f1b" in conclusions
    another = facts.speed.query("`spec.variant` == 'P-1f1b' and batch == 32").assign(**{"spec.variant": "P-gpipe"})
    both = slides.Facts(pd.concat([facts.speed, another], ignore_index=True), facts.slides)
    assert "the quickest that divides the model, P-" in slides.conclusions(both)
    assert "Here P-gpipe on 2 GPUs peaks at " in conclusions, "a pipeline, where other rows divide a model as well"


def test_the_class_that_trained_is_told_where_records_name_it(facts):
    def why(runs):
        return slides.reasons_table(slides.Facts(facts.speed, runs))["why"][0]

    assert why(facts.slides).endswith("and not which engine ran.")
    runs = put(facts.slides, f"{P0} and world > 1", parallel__wrapper="DistributedDataParallel")
    deepspeed = {"spec.variant": "P0-deepspeed", "run_id": "another", "parallel.wrapper": "DeepSpeedEngine"}
    runs = pd.concat([runs, runs.query(f"{P0} and world == 4").assign(**deepspeed)])
    said = "Ours, by their records: P0 trained in DistributedDataParallel, P0-deepspeed trained in DeepSpeedEngine."
    assert why(runs).endswith(f"and not which engine ran. {said}")


def test_the_slides_pair_is_one_log_step_by_step_over_others_told_again(facts):
    runs = [
        ("P0", 1, 16, 0.02, 1.0),
        ("P0", 1, 32, 9.0, 9.0),
        ("P0-deepspeed", 2, 32, 1.0, 1e-4),
        ("P0-deepspeed", 4, 64, 1.0, 2e-4),
    ]
    again = slides.Facts(facts.speed, facts.slides)
    again.__dict__["logs"] = pd.DataFrame(runs, columns=["variant", "world", "batch", "raw", "again"])
    found = {row["world"]: (row["ratio"], row["theirs"]) for row in again.pair()}
    assert found == {2: pytest.approx((200, 230), abs=0.2), 4: pytest.approx((100, 146), abs=0.3)}
    assert facts.pair() == []


def test_three_epochs_on_the_most_gpus(facts):
    found = facts.shortest()
    assert found["world"] == 4 and found["seconds"] == pytest.approx(395_262 / found["rate"] + found["compile_s"])
    assert f"would take {found['seconds']:.1f} s with {found['variant']}" in slides.conclusions(facts)
    assert found["learnt"] == facts.batches()["rows"][found["batch"]]
    untimed = slides.Facts(facts.speed, facts.slides[:0])
    assert untimed.shortest()["learnt"] is None, "without runs of scale slides"


def test_compilation_that_found_a_part_done_says_so(facts):
    warm = slides.Facts(facts.speed.assign(**{"time.compile_s": 12.0, "time.compile_cached": True}), facts.slides)
    assert "+ 12.0 s of compilation, which found a part of the code compiled" in slides.conclusions(warm)
    cold = slides.Facts(facts.speed.assign(**{"time.compile_s": 12.0, "time.compile_cached": False}), facts.slides)
    assert "+ 12.0 s of compilation." in slides.conclusions(cold)


def test_polling_is_judged_within_one_group(facts):
    """The groups are of two models, whose steps take different times."""
    own = put(facts.slides, "`spec.variant` == 'P0'", time__step_ms__median=1.0)
    for other in (own, facts.slides[:0]):
        assert slides.Facts(facts.slides, other).polling()["plain"]["ms"] == facts.polling()["plain"]["ms"]


def put(table, rows, **values):
    """The runs with other values in the rows that a query names."""
    changed = table.copy()
    for column, value in values.items():
        changed.loc[table.query(rows).index, column.replace("__", ".")] = value
    return changed


P0 = "`spec.variant` == 'P0'"
ELSEWHERE = {
    "as many steps on four": (f"{P0} and world == 4", {"spec__planned_steps": 2500.0}, "H1", "✗"),
    "held-out loss rises, too": (f"{P0} and batch == 64", {"quality__loss": 1.3}, "H4", "✓✓✗"),
    "one seed of the Trainer": (f"{P0} and `spec.seed` > 0", {"status": "error"}, "H4", "???"),
    "a batch of two seeds": (f"{P0} and `spec.seed` == 2 and batch == 64", {"status": "error"}, "H4", "???"),
    "no held-out loss": (P0, {"quality__loss": math.nan}, "H4", "✓✓?"),
    "polling costs nothing": ("`spec.variant` == 'P0-polled'", {"time__step_ms__median": 61.0}, "H5", "✗✓✓"),
    "no utilisation": (P0, {"speed__gpu_busy": None}, "H5", "✓?✓"),
    "pipelines are noisier": ("`spec.variant` == 'P-1f1b'", {"parallel__noise__var": 0.8}, "H6", "✓✗"),
    "other code averages otherwise": ("`spec.variant` == 'P-1f1b'", {"code__commit": "f" * 40}, "H6", "✓"),
    "noise hides the gradient": ("`spec.variant` == 'P-1f1b'", {"parallel__noise__sqr": -1.0}, "H6", "✓"),
    "one seed": ("`spec.seed` > 0", {"status": "error"}, "H3", "??"),
    "one seed of phi": ("`spec.seed` > 0", {"status": "error"}, "H6", "??"),
}


@pytest.mark.parametrize(("rows", "values", "hypothesis", "verdicts"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_hypothesis_fails_or_stays_open_where_records_say_so(facts, rows, values, hypothesis, verdicts):
    other = slides.Facts(facts.speed, put(facts.slides, rows, **values))
    assert verdicts_of(other)[hypothesis] == verdicts


def test_the_cost_of_a_batch_is_judged_against_the_prediction(facts, monkeypatch):
    monkeypatch.setattr(slides, "predicted", lambda logs, batches: pd.Series({64: 0.5, 128: 0.8})[list(batches)])
    assert verdicts_of(facts)["H7"] == "✗✓"


def test_where_nothing_was_measured_all_is_open_and_says_why(tmp_path):
    none = load_runs(tmp_path)
    facts = slides.Facts(none, none)
    assert set(slides.hypotheses_table(facts)["holds"]) == {"?"}
    assert slides.reasons_table(facts)["why"].str.startswith("Not measured: ").all()
    assert slides.conclusions(facts).count("Not measured yet") == 4
    for figure_of in scaling_figures.FIGURES.values():
        with pytest.raises(NotMeasured):
            figure_of(none)


def test_the_slides_own_numbers_are_as_transcribed():
    table = slides.theirs()
    assert table.iloc[1].tolist() == [
        "Pipeline 2 GPUs 2 Stages", "2", "6735", "3148", "70.40", "0.8701", "14.45", "0.0000707", "0.0049",
    ]  # fmt: skip
    goodput = table["“samples/s”"].astype(float) * table["“statistical efficiency”"].astype(float)
    assert goodput.round(4).tolist()[0] == 0.6179, "theirs is throughput times their efficiency"


# Figures and notebook.


@pytest.mark.parametrize("name", scaling_figures.FIGURES)
def test_a_figure_can_be_read(facts, name):
    figure = scaling_figures.FIGURES[name](facts.speed if name in ("scaling", "waiting") else facts.slides)
    assert not faults(figure)
    assert "\n" not in figure.get_suptitle() and "code 0123456" in " ".join(figure.get_supxlabel().split())
    assert all(axis.get_xlabel() for axis in figure.axes)


def test_the_scaling_figure_shows_each_batch_with_its_ideal(facts):
    figure = scaling_figures.fig_scaling(facts.speed)
    assert [axis.get_title("left") for axis in figure.axes] == [
        "32 features in all", "128 features in all", "32 features a GPU",
    ]  # fmt: skip
    ideal = [line.get_ydata() for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert any(np.allclose(line, np.array([1, 2, 4]) * 3200, rtol=1e-3) for line in ideal)
    title = "4 GPUs train ×3.64 as fast as one at 32 features each, ×2.00 at 32 in all (P-one-bucket)"
    assert figure.get_suptitle() == title


def test_the_waiting_figure_has_each_row_at_the_usual_batch_or_the_nearest(facts):
    figure = scaling_figures.fig_waiting(facts.speed)
    left = figure.axes[0]
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == [
        *(f"{row}: {gpus}" for row in ("P1", "P-one-bucket") for gpus in ("1 GPU", "2 GPUs", "4 GPUs")),
        "P-gpipe, 2 stages: 2 GPUs", "P-1f1b, 2 stages: 4 GPUs", "P-1f1b, 4 stages: 4 GPUs at 128",
    ]  # fmt: skip
    bars = {
        bars.get_label(): dict(zip(names, [bar.get_width() for bar in bars], strict=True)) for bars in left.containers
    }
    assert bars["communicating"]["P-one-bucket: 4 GPUs"] == pytest.approx(100 / 5)
    assert bars["bubble"]["P-1f1b, 4 stages: 4 GPUs at 128"] == 24 and bars["bubble"]["P-one-bucket: 4 GPUs"] == 0
    title = "On 2 GPUs P-one-bucket waits 14.3\u00a0% of a step for others, P-gpipe 24.0\u00a0%"
    assert figure.get_suptitle() == title


@pytest.mark.parametrize("measured", [True, False])
def test_the_notebook_tells_its_story_with_and_without_records(folder, tmp_path, monkeypatch, measured):
    """Its cells in this process, and figures that are made but not drawn: papermill would take twenty seconds."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(style, "png", lambda figure, dpi: b"\x89PNG\r\n\x1a\n")
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *objects: shown.extend(objects))
    cells = [c for c in nbformat.read(ROOT / "notebooks" / "slides.ipynb", 4).cells if c.cell_type == "code"]
    names = {"In": [cell.source for cell in cells]}
    for cell in cells[1:]:
        source = (
            f"{cell.source}\nruns = {str(folder if measured else tmp_path)!r}"
            if cell.id == "parameters"
            else cell.source
        )
        exec(source, names)
    said = [each.data for each in shown if isinstance(each.data, str)]
    assert len(shown) == 10 and sum("Not measured" in text for text in said) == (0 if measured else 3)
    assert sum("*No figure" in text for text in said) == (0 if measured else 4)
