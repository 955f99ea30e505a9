"""Trade-offs from records whose laws are written here: the fit finds them, and the model that was kept out."""

import math
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from qa_lib.presets import find_shape
from qa_lib.report.runs import NotMeasured, load_runs
from transformers import BertForQuestionAnswering, GPT2LMHeadModel

from qa_lib import record
from qa_lib.measure.flops import StepFlops
from qa_lib.model.architectures import layers_of
from qa_lib.model.build import build_model, model_config
from qa_lib.model.encoders import layers_of
from qa_lib.report import text, tradeoff_figures, tradeoffs
from qa_lib.run.plan import plan
from qa_lib.spec import Machine, resolve
from qa_lib.variants import UnknownName
from tests import tiny
from tests.test_figures import faults
from tests.test_report import GPU, make

ROOT = Path(__file__).parents[1]
TEXT = {"name": "text", "sha256": "ab" * 32}
H200 = Machine("h200", gpus=1, sm=90, backends=("inductor",), compiler=True)
SHAPES = [f"gpt2:{shape}V16384" for shape in ("L2H128", "L4H256", "L6H384", "L8H512", "L10H640", "L12H768")]
STEPS, TOKENS = 300, 32_768
GROUP = "h200-lm-quality"


def without_embeddings(model):
    shape = find_shape(model)
    return shape.layers * (12 * shape.hidden**2 + 13 * shape.hidden) + 2 * shape.hidden


def score(law, size):
    a, b, c = law
    return a * (size / 1e6) ** -b + c


def write(folder, model, seed, loss, *, row="L-dropout", rate=1e-3, length=512, epochs=3, total=None, **time):
    """A record of scale lm-quality with this loss, as fit leaves it."""
    source = {"name": model, "revision": "1"}
    own = {"learning_rate": rate, "max_length": length, "epochs": epochs}
    spec = resolve(row, "lm-quality", seed, H200, TEXT, source, "text/", model, **own)
    entry = record.new_record(spec, {"python": "3.11", "gpu": "NVIDIA H200"})
    entry["code"] = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}
    shape, size = find_shape(model), without_embeddings(model)
    entry["data"] |= {"name": "text", "n": 6000}
    entry["model"]["params_total"] = total or size + (shape.vocabulary + shape.positions) * shape.hidden
    entry["time"] |= {"steps": STEPS, "train_s": size / 1e5 + 5, "compile_s": 5.0} | time
    entry["quality"]["bits_per_byte"] = loss
    record.finish(folder / spec.run_path, entry, "ok")


def group(folder, law, shapes=SHAPES, seeds=3):
    """Every shape at three rates, of which the middle one is best, and three lengths of the third shape."""
    for model in shapes:
        for seed in range(seeds):
            loss = score(law, without_embeddings(model)) * (1 + 0.002 * (seed - 1))
            write(folder, model, seed, loss)
            write(folder, model, seed, 1.05 * loss, rate=5e-4)
    write(folder, shapes[0], 0, 0.5, rate=2e-3)  # one lucky seed is no rate
    for length, loss in ((128, 1.6), (1024, 1.2)):
        write(folder, SHAPES[2], 0, loss, length=length)
    return load_runs(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return tradeoffs.measured(group(tmp_path_factory.mktemp("plain"), (1.5, 0.1, 0.0)), GROUP, "L-dropout")


@pytest.fixture(scope="module")
def bent(tmp_path_factory):
    return tradeoffs.measured(group(tmp_path_factory.mktemp("bent"), (0.8, 0.3, 0.7)), GROUP, "L-dropout")


def test_a_power_is_found_and_predicts_the_largest_model(plain):
    two, three = tradeoffs.laws(plain, "without_embeddings").itertuples()
    true = score((1.5, 0.1, 0.0), without_embeddings(SHAPES[-1]))
    assert two.b == pytest.approx(0.1, abs=1e-5) and two.predicted == pytest.approx(true, rel=1e-5)
    assert three.predicted == pytest.approx(true, rel=1e-3), "a constant that is none does no harm"
    assert two.kept_out.startswith(SHAPES[-1]) and two.came == pytest.approx(true)


def test_a_loss_that_no_size_removes_takes_the_law_with_a_constant(bent):
    two, three = tradeoffs.laws(bent, "without_embeddings").itertuples()
    assert three.b == pytest.approx(0.3, abs=1e-3) and three.law[-1] == pytest.approx(0.7, abs=1e-3)
    assert three.predicted == pytest.approx(three.came, rel=1e-4) and two.predicted < 0.99 * two.came


def test_intervals_are_those_of_a_fit_to_each_seed(plain):
    law = tradeoffs.laws(plain, "without_embeddings").iloc[0]
    # Seeds differ by a factor of 0.2 % each way, which moves every prediction and no exponent.
    half = 2.92 * 0.002 / math.sqrt(3)
    assert law["predicted±"] == pytest.approx(half * law["predicted"], rel=0.01)
    assert law["b±"] == pytest.approx(0, abs=1e-6) and law["came±"] == pytest.approx(half * law["came"], rel=0.01)


def test_one_seed_has_no_interval_and_few_models_one_law_or_none(tmp_path):
    alone = tradeoffs.measured(group(tmp_path / "four", (1.5, 0.1, 0.0), SHAPES[:4], seeds=1), GROUP, "L-dropout")
    found = tradeoffs.laws(alone, "without_embeddings")
    assert list(found["constants"]) == [2] and found[["b±", "predicted±", "came±"]].isna().all(axis=None)
    three = tradeoffs.measured(group(tmp_path / "three", (1.5, 0.1, 0.0), SHAPES[:3]), GROUP, "L-dropout")
    with pytest.raises(NotMeasured, match=r"takes 3 models .* there are 3 in all"):
        tradeoffs.law_table(three)


def test_the_rate_of_most_seeds_and_the_best_mean_counts(plain):
    lines = tradeoffs.means(tradeoffs.along(plain, "without_embeddings"))
    assert set(lines["rate"]) == {1e-3} and list(lines["rates"][:2]) == [
        "0.0005, 0.001, 0.002",
        "0.0005, 0.001: at the end",
    ]
    assert set(lines["n"]) == {3}


def test_many_rates_are_told_by_their_ends(tmp_path):
    for rate, loss in ((5e-4, 2.0), (1e-3, 1.9), (2e-3, 1.8), (4e-3, 1.7)):
        write(tmp_path, SHAPES[0], 0, loss, rate=rate)
    found = tradeoffs.measured(load_runs(tmp_path), GROUP, "L-dropout")
    assert list(found["rates"]) == ["0.0005–0.004 (4): at the end"]


def test_flops_are_those_that_a_run_is_measured_by(tmp_path):
    model = GPT2LMHeadModel(model_config("gpt2:L2H128V1000", "lm"))  # whose vocabulary is rounded up
    write(tmp_path, "gpt2:L2H128V1000", 0, 1.5, total=model.num_parameters())
    run = tradeoffs.measured(load_runs(tmp_path), GROUP, "L-dropout").iloc[0]
    counted = StepFlops(model).flops(TOKENS, TOKENS * 512) * STEPS
    assert run["flops"] == pytest.approx(counted)
    assert run["without_embeddings"] == sum(p.numel() for p in model.transformer.h.parameters()) + 2 * 128
    assert run["without_embeddings"] == run["parameters"] - 128 * (1024 + model.config.vocab_size)
    assert run["seconds"] == pytest.approx(run["without_embeddings"] / 1e5)


def test_other_training_data_and_resumed_times_are_left_out(tmp_path):
    every = group(tmp_path, (1.5, 0.1, 0.0))
    write(tmp_path, SHAPES[1], 7, 0.1, epochs=1)
    write(tmp_path, "gpt2:L3H192V16384", 0, 1.7, resumed_from_step=50)
    runs = tradeoffs.measured(load_runs(tmp_path), GROUP, "L-dropout")
    assert len(runs) == len(tradeoffs.measured(every, GROUP, "L-dropout")) + 1 and 7 not in set(runs["spec.seed"])
    assert list(runs["model.name"][runs["seconds"].isna()]) == ["gpt2:L3H192V16384"]
    mixed = every.assign(precision=every["precision"].mask(every["spec.seed"] == 2, "fp32"))
    assert set(tradeoffs.measured(mixed, GROUP, "L-dropout")["spec.seed"]) == {0, 1}


def test_the_tables_say_what_was_predicted_and_what_came(bent):
    table = tradeoffs.law_table(bent).set_index(["N is", "law"])
    assert len(table) == 8
    line = table.loc["parameters without embeddings", "a·N⁻ᵇ + c"]
    assert line["predicted"].split(" ±")[0] == line["came to"].split(" ±")[0] and line["c"].startswith("0.700 ± 0.00")
    assert table.loc[("parameters without embeddings", "a·N⁻ᵇ"), "off by"].startswith("−")
    points = tradeoffs.points_table(bent)
    assert len(points) == 8 and list(points["model"][:3]) == [SHAPES[0], SHAPES[1], SHAPES[2]]


def test_the_misses_over_other_sizes_are_a_sentence(bent):
    said = tradeoffs.misses(bent)
    off = tradeoffs.law_table(bent).set_index(["law", "N is"])["off by"]
    for form in ("a·N⁻ᵇ", "a·N⁻ᵇ + c"):
        own, *others = off[form]
        others.sort(key=lambda miss: float(miss.replace("−", "-")[:-2]))
        assert (
            f"With parameters without embeddings, {form} is off by {own}; with the other sizes, by {others[0]} to "
            f"{others[-1]}." in said
        )
    with pytest.raises(NotMeasured, match="no law is there over parameters without embeddings"):
        tradeoffs.misses(bent.assign(without_embeddings=math.nan))


def test_points_have_the_perplexity_of_words_and_say_how_many_runs_gave_seconds(plain):
    model, seeds = plain["model.name"] == SHAPES[1], plain["spec.seed"]
    runs = plain.assign(seconds=plain["seconds"].mask(model & (seeds == 1)), perplexity=100.0 + 10 * seeds)
    table = tradeoffs.points_table(runs).set_index("model")
    assert table.loc[SHAPES[1], "seconds"] == f"{text.number(plain.loc[model, 'seconds'].mean())} (n = 2)"
    assert "n =" not in table.loc[SHAPES[0], "seconds"] and table.loc[SHAPES[0], "perplexity per word"] == "110"
    assert len(table.columns) + 1 <= 11


def test_perplexity_is_that_of_the_records(tmp_path):
    write(tmp_path, SHAPES[0], 0, 1.5)
    every = load_runs(tmp_path).assign(**{"quality.word_perplexity": 321.0})
    assert tradeoffs.points_table(tradeoffs.measured(every, GROUP, "L-dropout"))["perplexity per word"].tolist() == [
        "321"
    ]


def test_the_figure_can_be_read(bent):
    figure = tradeoff_figures.fig_tradeoffs(bent)
    assert not faults(figure)
    assert [axis.get_xlabel() for axis in figure.axes] == [*tradeoffs.SIZES.values(), tradeoffs.AXES["length"]]
    title = " ".join(figure.get_suptitle().split())
    predicted = tradeoffs.laws(bent, "without_embeddings")["predicted"].iloc[-1]
    assert title.startswith("Bits per byte go from 1.7") and title.endswith(
        f"; a·N⁻ᵇ + c, N without embeddings, says {predicted:.3f}"
    )
    assert "\n" not in figure.get_suptitle() and "tokens, bits per byte go from" in figure.get_supxlabel()
    hollow = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[without_embeddings(SHAPES[-1])]]


def test_answers_have_depth_and_length_and_no_law(tmp_path):
    for seed in range(3):
        for length, f1 in ((128, 55.0), (384, 60.0)):
            make(tmp_path, "A1", seed, machine=GPU, preset="quality", length=length, f1=f1 + seed)
        for layers, f1 in ((2, 40.0), (6, 70.0)):
            make(tmp_path, "A1", seed, machine=GPU, preset="quality", model=f"mini-{layers}", f1=f1)
    every = load_runs(tmp_path)
    found = every["model.name"].str.extract(r"-(\d)")[0].astype(float)
    every = every.assign(**{"model.layers": found, "model.params_total": 50_000 + 10_000 * found.fillna(3)})
    runs = tradeoffs.measured(every, "h200-quality", "A1")
    table = tradeoffs.points_table(runs)
    scores = ["40.00 ± 0.00", "56.00 ± 1.69", "61.00 ± 1.69", "70.00 ± 0.00"]
    assert list(table["F1 at the best threshold"]) == scores and list(table["layers"]) == ["2", "–", "–", "6"]
    with pytest.raises(NotMeasured, match="another task"):
        tradeoffs.laws(runs, "parameters")
    figure = tradeoff_figures.fig_tradeoffs(runs)
    assert not faults(figure)
    title = " ".join(figure.get_suptitle().split())
    assert title.startswith("From 2 to 6 layers, F1 at the best threshold goes from 40.00 to 70.00")
    assert "F1 at the best threshold goes from 56.00 to 61.00" in " ".join(figure.get_supxlabel().split())
    (depth,) = (axis for axis in figure.axes if axis.get_xlabel() == "layers")
    points, bars = depth.containers[0][0], depth.containers[0][2]
    assert list(points.get_xdata()) == [2, 6] and list(points.get_ydata()) == [40.0, 70.0] and len(bars) == 1
    assert [label.get_text() for label in depth.get_xticklabels()] == ["2", "6"]


def test_the_notebook_cuts_a_checkpoint_to_its_lowest_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(tiny.SHAPES, "bert", {"num_hidden_layers": 6})
    tiny.checkpoint("bert", Path("minilm"))
    whole = BertForQuestionAnswering.from_pretrained("minilm").state_dict()
    text = "\n".join(cell.source for cell in nbformat.read(ROOT / "notebooks" / "scaling.ipynb", 4).cells)
    exec(re.search(r"python - <<'EOF'.*?\n(.*?)\nEOF", text, re.S)[1], {})
    for layers in (2, 4, 6):
        (spec,) = plan(["A1"], "quality", data="synthetic:20", model=f"minilm-{layers}", machine=Machine())
        model = build_model(spec)
        assert spec.model["name"] == f"minilm-{layers}" and len(layers_of(model)) == layers
        assert all(value.equal(whole[name]) for name, value in model.state_dict().items() if ".encoder." in name)


def test_depth_is_not_told_of_older_records(tmp_path):
    make(tmp_path, "A1", machine=GPU, preset="quality", length=128)
    make(tmp_path, "A1", machine=GPU, preset="quality")
    runs = tradeoffs.measured(load_runs(tmp_path).drop(columns="model.layers"), "h200-quality", "A1")
    assert "layers" not in tradeoffs.points_table(runs)
    assert [axis.get_xlabel() for axis in tradeoff_figures.fig_tradeoffs(runs).axes] == [tradeoffs.AXES["length"]]


def test_depth_is_that_of_any_record_of_the_same_model(tmp_path):
    for row in ("A1", "A2"):
        make(tmp_path, row, machine=GPU, preset="quality", model="mini")
    every = load_runs(tmp_path)
    every["model.layers"] = every["spec.variant"].map({"A2": 6.0})
    assert tradeoffs.measured(every, "h200-quality", "A1")["depth"].tolist() == [6]


def test_what_is_not_there_is_told(plain, tmp_path):
    (said,) = tradeoff_figures.shown(pd.DataFrame(plain), "h200-lm-full", "L-dropout")
    assert "Not measured: group 'h200-lm-full' has no records" in said.data
    (said,) = tradeoff_figures.shown(plain, GROUP, "L1")
    assert "no run of L1 in group h200-lm-quality has ended ok" in said.data
    with pytest.raises(UnknownName, match="did you mean 'L-dropout'"):
        tradeoff_figures.shown(plain, GROUP, "L-bset")
    alone = plain[(plain["model.name"] == SHAPES[0])]
    with pytest.raises(NotMeasured, match="no two models and no two lengths"):
        tradeoff_figures.fig_tradeoffs(alone)
    read, figure, points, laws, misses = tradeoff_figures.shown(plain, GROUP, "L-dropout")
    assert "M tokens, in " in read.data and misses.data == tradeoffs.misses(plain)
    assert figure.data[:4] == b"\x89PNG" and "| 1,024 |" in points.data.replace("\u00a0", " ") and "a·N⁻ᵇ" in laws.data
