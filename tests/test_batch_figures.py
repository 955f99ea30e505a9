"""The figures of what a step computes, and of the kernels that do it."""

import pandas as pd
import pytest

from qa_lib.data.load import load_data
from qa_lib.lab.report import batch_figures, profile_figures
from qa_lib.lab.report.style import title_of
from qa_lib.lab.search.plan import plan
from qa_lib.lab.tools.layer_kernels import layer_kernels
from qa_lib.model.build import build_model, trainable_summary
from tests.material import refused


@pytest.fixture(scope="module")
def samples():
    """The windows that preset smoke trains on."""
    (spec,) = plan(["A1"], "smoke")
    return load_data(spec).samples


def planned(*variants):
    return plan(variants, "smoke", micro_batch=8)


def test_the_share_of_text_is_drawn_for_each_variant(samples):
    figure = batch_figures.fig_text(samples, planned("A1", "A4"))
    names = [label.get_text() for label in figure.axes[1].get_yticklabels()]
    assert [name.split(":")[0] for name in names] == ["A1", "A4"]


def test_the_first_step_is_drawn_with_a_row_for_each_sample(samples):
    figure = batch_figures.fig_padding(samples, planned("A1", "A4"))
    assert title_of(figure).startswith("Padding takes ")
    for axis in figure.axes:
        assert len(axis.patches) == 2 * 16  # what is computed, and what of it is text


def test_a_packed_micro_batch_is_drawn_with_a_block_of_attention_for_each_sample(samples):
    (spec,) = planned("E-packed")
    figure = batch_figures.fig_packed(samples, spec)
    assert title_of(figure).startswith("8 samples in ")
    assert len(figure.axes[1].patches) == 8


def test_a_variant_that_packs_nothing_has_no_packed_sequence(samples):
    (spec,) = planned("A4")
    refused("A4 packs nothing", batch_figures.fig_packed, samples, spec)


def test_the_weights_that_train_are_drawn_by_part_of_the_model():
    (spec,) = planned("B2")
    parts = trainable_summary(build_model(spec))
    figure = batch_figures.fig_trained(parts, "B2")
    assert title_of(figure).startswith("B2 trains ")
    assert len(figure.axes[0].get_yticklabels()) == len(parts) - 1


def test_the_heaviest_kernels_of_a_step_are_drawn_beside_all_in_time():
    kernels = [{"name": f"k{n}", "ms": 9.0 - n, "count": 1, "part": "attention"} for n in range(9)]
    profiled = {"kernels": kernels, "busy_ms": 72.0, "step_ms": 80.0}
    work = pd.DataFrame({"start_ms": [0.0, 1.0], "ms": [1.0, 2.0], "part": ["attention"] * 2})
    figure = profile_figures.fig_launches(profiled, work)
    assert title_of(figure).startswith("One step: 2 kernels in 80.0 ms; the 8 heaviest take 61.1")


@pytest.mark.slow
def test_a_layer_has_fewer_kernels_than_operators_once_it_is_compiled():
    (spec,) = planned("D1")
    layer = layer_kernels(spec)
    assert 0 < len(layer.kernels) < len(layer.operators)
    assert layer.code
    figure = profile_figures.fig_kernels(layer.operators, layer.kernels)
    assert "operators become" in title_of(figure)
