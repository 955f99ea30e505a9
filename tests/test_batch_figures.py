"""The figures of what a step computes, and of the kernels that do it."""

import types

import numpy as np
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


class Dealt:
    """Batches of four samples, two to a micro-batch, of 10 computed tokens each."""

    size = 2
    budget = 16

    def __init__(self, samples):
        self.samples = samples

    def step(self, number):
        return [np.array([0, 1]), np.array([2, 3])]

    def tokens(self, micro_batches):
        lengths = self.samples.lengths[np.concatenate(micro_batches)]
        return lengths, np.full(len(lengths), 10)

    def arrays(self, indices):
        ends = self.samples.lengths[indices].cumsum()
        return {"cu_seqlens": np.array([0, *ends, self.budget])}


@pytest.fixture
def dealt(monkeypatch):
    """Samples that every variant deals alike."""
    samples = types.SimpleNamespace(lengths=np.array([4, 9, 2, 8]), max_length=10)
    monkeypatch.setattr(batch_figures, "_batches", lambda *_: Dealt(samples))
    return samples


def test_the_share_of_text_is_in_percent_of_the_tokens_of_a_hundred_steps(dealt):
    figure = batch_figures.fig_text(dealt, planned("A1"))
    assert title_of(figure) == "Windows have 6 of 10 tokens on average"
    bars = figure.axes[1]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["A1: 4,000 tokens"]
    assert bars.patches[0].get_width() == pytest.approx(57.5)


def test_the_padding_of_a_step_is_told_and_micro_batches_are_drawn_apart(dealt):
    figure = batch_figures.fig_padding(dealt, planned("A1", "A2"))
    assert title_of(figure) == "Padding takes 42.5 % in A1, 42.5 % in A2"
    rows = [patch.get_y() + 0.5 for patch in figure.axes[0].patches]
    assert rows == [0, -1, -3, -4] * 2


def test_the_padding_of_a_packed_micro_batch_is_told_beside_that_of_padded_samples(dealt):
    (spec,) = planned("E-packed")
    title = title_of(batch_figures.fig_packed(dealt, spec))
    limit = spec.preset.max_length
    padded = f"{100 * (1 - 13 / (2 * limit)):.1f} %"
    assert title == f"2 samples in 16 tokens: 18.8 % padding; each padded to {limit}: {padded}"


def test_a_part_of_a_model_is_drawn_with_how_much_of_it_trains():
    columns = {"parameters": [4000, 6000, 10_000], "trainable": [0, 1500, 1500]}
    parts = pd.DataFrame(columns, index=["embeddings", "layers", "all"])
    figure = batch_figures.fig_trained(parts, "B2")
    assert title_of(figure) == "B2 trains 1.5 k of 10 k parameters, 15.0 %"
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.texts] == ["0 of 4 k", "1.5 k of 6 k"]
    assert [patch.get_width() for patch in axis.patches] == [4000, 6000, 0, 1500]
    assert axis.xaxis.get_major_formatter()(2_000_000) == "2 M"


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

    assert "the kernels span 3.00" in figure.axes[0].get_xlabel()


def test_long_names_of_kernels_stay_apart(monkeypatch):
    monkeypatch.setattr(profile_figures, "LETTERS", 10)
    names = [
        "void at::native::(anonymous namespace)::apply",
        "a_long_name_1",
        "a_long_name_2",
        "bcd" * 9,
    ]
    assert profile_figures.short_names(names) == ["apply", "a_lo…1", "a_lo…2", "bcdbcdbcd…"]


@pytest.mark.slow
def test_a_layer_has_fewer_kernels_than_operators_once_it_is_compiled():
    (spec,) = planned("D1")
    layer = layer_kernels(spec)
    assert 0 < len(layer.kernels) < len(layer.operators)
    assert layer.code
    figure = profile_figures.fig_kernels(layer.operators, layer.kernels)
    assert "operators become" in title_of(figure)
