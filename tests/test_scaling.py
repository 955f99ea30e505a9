"""How speed, memory and what a sample teaches change with GPUs, batch and length."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import curve_fit

from qa_lib.lab.report import curves, noise_scale, scaling
from qa_lib.lab.report.evidence import NotMeasured, load_runs, select
from qa_lib.lab.report.variants_table import lead
from tests.material import ROOT
from tests.report_runs import make
from tests.tiny import H200

# Several GPUs.

SEEDS = range(3)


@pytest.fixture
def several(tmp_path):
    """Runs of four GPUs and of one, three seeds each.

    Four GPUs train 160, 161 and 162 samples/s, and one 100 to 102 at the same batch and 50 to 52 at
    a GPU's share of it. A peak is as many MiB as the speed is, and twice that in the last of four
    processes.
    """
    machine = dataclasses.replace(H200, gpus=4)
    for variant, world, batch, speed in (
        ("E-dropout", 1, 32, 100),
        ("E-dropout", 1, 8, 50),
        ("P-one-bucket", 4, 32, 160),
    ):
        for seed in SEEDS:
            make(
                tmp_path,
                variant,
                seed,
                machine=machine,
                preset="parallel",
                world=world,
                batch=batch,
                speed=speed + seed,
                peak=speed + seed,
            )
    runs = select(load_runs(tmp_path), "h200-parallel")
    of_four = runs["memory.peak_alloc_mib"].where(runs["world"] == 4)
    return runs.assign(**{"parallel.rank_peak_mib.3": 2 * of_four})


def test_the_peak_is_that_of_the_process_with_the_most(several):
    assert scaling.scaling(several)["peak_mib"].tolist() == [51.0, 101.0, 2 * 161.0]


def test_efficiencies_are_against_the_variant_that_shares_nothing(several):
    lines = scaling.scaling(several).set_index("variant")
    line = lines.loc["P-one-bucket"]
    assert line["reference"] == "E-dropout"
    assert line["strong"] == pytest.approx(161 / 4 / 101)
    assert line["weak"] == pytest.approx(161 / 4 / 51)


def test_an_efficiency_has_an_interval_over_equal_seeds(several):
    line = scaling.scaling(several).set_index("variant").loc["P-one-bucket"]
    assert line["strong±"] > 0
    assert line["weak±"] > 0


def test_an_efficiency_against_other_code_has_no_interval_and_says_so(several):
    is_alone = several["world"] == 1
    code = several["code.commit"].mask(is_alone, "f" * 40)
    line = scaling.scaling(several.assign(**{"code.commit": code})).iloc[-1]
    assert line["reference"] == "E-dropout of another day"
    assert math.isnan(line["strong±"])


def test_a_sentence_says_how_much_quicker_several_gpus_are(several):
    assert scaling.speed_finding(scaling.scaling(several)) == (
        "4 GPUs train ×3.16 as fast as one at 8 samples each, ×1.59 at 32 in all (P-one-bucket)"
    )


# What a sample teaches.


@pytest.fixture
def logs():
    """The logs of a batch of 32 and one of 64, whose losses fall alike by steps."""
    steps = pd.DataFrame({"step": range(1, 201), "loss": np.linspace(4, 1, 200), "phi": 96.0})
    return pd.DataFrame(
        {"variant": "P-one-bucket", "seed": 0, "world": 1, "batch": [32, 64], "log": [steps, steps]}
    )


def test_the_noise_scale_predicts_what_a_batch_teaches(logs):
    worth, _ = noise_scale.batch_worth(logs)
    assert worth.loc[64, "predicted"] == pytest.approx((96 + 32) / (96 + 64))


def test_what_a_batch_teaches_is_measured_by_the_samples_to_one_loss(logs):
    worth, loss = noise_scale.batch_worth(logs)
    assert worth.loc[64, "measured"] == pytest.approx(0.5)
    assert loss > 1


def test_what_a_batch_teaches_takes_two_batches(logs):
    with pytest.raises(NotMeasured, match="at batch 32 and at a larger one"):
        noise_scale.batch_worth(logs[:1])


# Length and batch.


def test_memory_is_a_fixed_cost_and_one_a_token():
    part = pd.DataFrame({"gib": [1.5, 2.0, 3.0], "tokens": [1024, 2048, 4096]})
    assert curves.fit(part) == pytest.approx((1.0, 512.0, 0.0), abs=1e-9)


def test_two_points_make_no_line():
    part = pd.DataFrame({"gib": [1.5, 2.0], "tokens": [1024, 2048]})
    assert all(math.isnan(value) for value in curves.fit(part))


@pytest.fixture
def speeds():
    """Speeds of the visible loop, of the Trainer with its compiler, and of the Trainer without."""
    lines = [
        ("A0-compile", 8, 10),
        ("A0-compile", 32, 20),
        ("E-uncompiled", 8, 40),
        ("E-uncompiled", 32, 60),
        ("A0", 8, 1),
    ]
    return pd.DataFrame(lines, columns=["variant", "micro_batch", "speed"])


def test_the_lead_is_over_the_compiled_trainer_at_equal_batches(speeds):
    variant, rival, factors = curves.lead(speeds)
    assert variant == "E-uncompiled"
    assert rival == "A0-compile"
    assert factors.to_dict() == {8: 4.0, 32: 3.0}


def test_there_is_no_lead_over_the_trainer_as_it_comes(speeds):
    with pytest.raises(NotMeasured):
        curves.lead(speeds[speeds["variant"] != "A0-compile"])


def test_a_speed_that_scatters_has_no_part_in_the_lead(tmp_path):
    speeds = {"E-uncompiled": 200.0, "E-plain-graphs": 100.0}
    for seed, size, variant in itertools.product(SEEDS, (8, 32, 64), speeds):
        scatter = 40.0 * seed if size == 8 else 0.0
        make(
            tmp_path,
            variant,
            seed,
            machine=H200,
            preset="bench",
            micro_batch=size,
            batch=max(size, 32),
            speed=speeds[variant] + scatter,
        )
    sentence = lead(load_runs(tmp_path), "h200-bench")
    assert sentence.endswith(" by ×2.00 at 32, ×2.00 at 64 samples a pass.")


# What the notebooks compute.


def run_cell(notebook, cell_id, **names):
    """Run a cell of a notebook, up to the line that reads what other cells made; its names."""
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if cell["id"] == cell_id]
    exec(source.split("own, ok, inf")[0], names)
    return names


@pytest.mark.parametrize(("constants", "rest"), [(2, 0.0), (3, 0.7)])
def test_the_fitted_law_is_the_one_that_made_the_losses(constants, rest):
    cell = run_cell("scaling", "scaling-laws", np=np, math=math, pd=pd, curve_fit=curve_fit)
    sizes = np.array([1e6, 4e6, 1.6e7, 6.4e7, 2.56e8])
    law = cell["fit"](sizes, 30 * sizes**-0.25 + rest, constants)
    assert law[2:] == pytest.approx((0.25, rest), rel=1e-3)
    assert cell["value"](law, 1e9) == pytest.approx(30 * 1e9**-0.25 + rest, rel=1e-3)


def test_the_slides_formula_falls_where_losses_are_told_again():
    cell = run_cell("multi_gpu", "artefact", np=np, pd=pd)
    loss = pd.Series(np.tile([1.0, 2.0], 100))
    assert cell["formula"](loss, 10) == pytest.approx(0.1)
    assert cell["formula"](cell["repeated"](loss), 10) == 0.0
