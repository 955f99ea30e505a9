"""The families' pictures, of tiny data and models: what their titles say, and when there is none."""

import pytest
import torch
from IPython.display import Image, Markdown
from qa_lib.report.runs import NotMeasured
from qa_lib.run.memory_estimate import estimate, gpu_of

from qa_lib.data.load import batches_of, load_data
from qa_lib.model.build import build_model, trainable_summary
from qa_lib.report import lessons
from qa_lib.run.plan import plan
from qa_lib.run.profile import steady_step
from qa_lib.spec import Machine
from qa_lib.train.kernels import CALLS, translated
from tests.material import committed

CPU = Machine(backends=("inductor", "aot_eager"), bitsandbytes=True, compiler=True)
OK = {"run_id": "A1-s0-1", "status": "ok", "error": {"message": None}}


def smoke(*variants, machine=CPU):
    return plan(variants, "smoke", data="synthetic:200", machine=machine)


@pytest.fixture(scope="module")
def data():
    return load_data(smoke("A1")[0])


def titles(figure):
    return [
        figure.get_suptitle().replace("\u00a0", " ").replace("\n", " "),
        *(axis.get_title("left") or axis.get_title() for axis in figure.axes),
    ]


def test_padding_is_of_the_first_step_and_marks_the_way_that_the_row_fills(data):
    rows = [(spec, batches_of(data.features, spec)) for spec in smoke("A1", "A4-nb", "A4")]
    title, *panels = titles(lessons.fig_padding(smoke("A2")[0], rows))
    lengths, padded = rows[0][1].tokens(rows[0][1].step(0))
    assert f"{100 * (1 - lengths.sum() / padded.sum()):.1f} % in A1" in title
    assert panels == ["A1: as this row", "A4-nb", "A4"]


def test_a_packed_row_has_a_block_for_each_feature_and_other_rows_have_none(data):
    a1, e1 = smoke("A1", "E-packed")
    batches = batches_of(data.features, e1)
    figure = lessons.fig_packed(e1, batches)
    assert f"{batches.size} features in a row of {batches.budget:,} tokens" in titles(figure)[0]
    (mask,) = (axis for axis in figure.axes if "attends" in axis.get_xlabel())
    lengths = data.features.lengths[batches.step(0)[0]]
    assert [(block.get_width(), block.get_height()) for block in mask.patches] == [(n, n) for n in lengths]
    assert all(block.get_x() == block.get_y() for block in mask.patches)
    with pytest.raises(NotMeasured, match="A1 packs nothing"):
        lessons.fig_packed(a1, batches_of(data.features, a1))


def test_what_trains_and_how_good_it_is():
    parts = trainable_summary(build_model(smoke("B3")[0]))
    share = parts.loc["all", "trainable"] / parts.loc["all", "parameters"]
    assert f"{100 * share:.1f} %" in titles(lessons.fig_trained(parts, "B3"))[0]
    every = committed()
    figure = lessons.fig_scores(every, every, "cpu-none")  # the reader has run nothing
    named = [{text.get_text() for text in axis.texts} for axis in figure.axes]
    timed = lessons.fig_scores(every, every, "h200-bench")  # a group without scores
    assert not list(timed.axes[0].texts)
    assert named == [set(), {"A1", "B1", "B1-all", "B2", "B3", "B3-last4"}]


@pytest.mark.parametrize("variant", ["A1", "C1", "C2"])
def test_what_lies_in_memory_adds_up_to_the_predicted_peak(variant):
    (spec,) = smoke(variant, machine=gpu_of(90))
    predicted = estimate(spec)
    for phase in (predicted["phase"], "optimizer"):
        held = lessons._at_peak(predicted | {"phase": phase})
        assert sum(held.values()) == pytest.approx(predicted["peak_mib"])
    assert lessons._at_peak(predicted | {"phase": "optimizer"})["activations"] == 0
    record = OK | {"spec": {"variant": variant}, "model": {"name": "tiny"}, "memory": {"peak_alloc_mib": None}}
    title, here, there = titles(lessons.fig_stack(record, predicted, committed()))
    assert "predicted, not measured" in title and "tiny" in here and "h200-bench" in there


def test_a_steps_launches_or_why_there_is_no_picture(data):
    (spec,) = smoke("A1")
    assert isinstance(lessons.taught(OK, lessons.fig_launches, lambda: steady_step(spec, data)), Image)
    skipped = OK | {"status": "skipped", "error": {"message": "no such backend"}}
    said = lessons.taught(skipped, lessons.fig_launches, lambda: 1 / 0)
    assert isinstance(said, Markdown) and "skipped: no such backend" in said.data


def test_a_layers_operators_become_fewer_kernels_of_which_one_is_shown():
    (spec,) = smoke("D1")
    operators, kernels, program = translated(spec, torch.device("cpu"))
    products = [sum(name.split(".")[-1] in ("addmm", "bmm", "mm") for name in names) for names in (operators, kernels)]
    assert products[0] == products[1] >= 6
    assert len(kernels) < len(operators)
    assert (
        f"{len(operators)} operators become {len(kernels)} kernels"
        in titles(lessons.fig_kernels((operators, kernels, program)))[0]
    )
    code = lessons.excerpt((operators, kernels, program), 10)
    assert "gelu" in code.split("\n")[1] and len(code.split("\n")) == 13


def test_a_gpus_program_is_read_as_well():
    program = """
        buf1 = empty_strided_cuda((4, 4), (4, 1), torch.float16)
        triton_poi_fused__to_copy_0.run(arg0_1, buf1, 16, stream=stream0)
        extern_kernels.addmm(arg1_1, buf1, out=buf2)
        buf3 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf2)
        assert_size_stride(buf4, (4,), (1,))
"""
    assert CALLS.findall(program) == [
        "triton_poi_fused__to_copy_0.run",
        "extern_kernels.addmm",
        "torch.ops.aten._scaled_dot_product_flash_attention.default",
    ]
