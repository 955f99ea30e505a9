"""The figures of memory and speed against length and batch."""

import math

import pandas as pd
import pytest

from qa_lib.lab.report import curve_figures, style
from tests.material import refused


def table(*rows, size="length"):
    """Points of (variant, size, GiB, samples/s), which ran out of memory where there is no GiB."""
    points = pd.DataFrame(rows, columns=["variant", size, "gib", "speed"])
    points = points.assign(batch=0, predicted=points["gib"], tokens=points[size], code="a")
    points["oom"] = points["gib"].isna()
    points["sittings"] = [frozenset("a")] * len(points)
    return points.assign(**{"micro_batch" if size == "length" else "length": 32})


def drawn(points, size, measure):
    """The figure of points of a group on one GPU."""
    runs = pd.DataFrame(
        {
            "group": ["h200-sizing"],
            "env.gpu": "NVIDIA H200",
            "spec.hardware": "h200",
            "task.name": "qa",
            "code.commit": "a" * 40,
            "code.dirty": False,
            "code": "a",
        }
    )
    return curve_figures.fig_curve(runs, points, size, measure)


CURVES = (
    ("A1", 128, 4.0, 100.0),
    ("A1", 512, 16.0, 50.0),
    ("A2", 128, 2.0, 200.0),
    ("A2", 512, 4.0, 150.0),
    ("A3", 128, 2.0, 120.0),
    ("A3", 512, math.nan, math.nan),
)


def test_memory_grows_from_the_least_size_to_the_largest():
    figure = drawn(table(*CURVES), "length", "gib")
    assert style.title_of(figure) == (
        "From 128 to 512 tokens, memory grows ×4.00 in A1 and ×2.00 in A2"
    )
    assert "2 of 3 variants were measured at both ends" in figure.get_supxlabel()


def test_predicted_memory_can_be_told_from_measured_memory_on_which_it_lies():
    points = table(*CURVES).assign(predicted=lambda points: 1.02 * points["gib"])
    figure = drawn(points, "length", "gib")
    dashed = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert [line.get_color() for line in dashed] == ["black", "black"]
    caption = figure.get_supxlabel().replace("\xa0", " ")
    assert "Dashed: predicted, within 2.00 % of the measured." in caption


def test_where_no_memory_is_predicted_the_caption_tells_of_no_dashes():
    figure = drawn(table(*CURVES).assign(predicted=math.nan), "length", "gib")
    assert "Dashed" not in figure.get_supxlabel()


def test_speed_over_lengths_is_that_of_the_quickest_against_the_baseline():
    figure = drawn(table(*CURVES), "length", "speed")
    assert style.title_of(figure) == "A2 trains ×2.00 as fast as A1 at 128 tokens, ×3.00 at 512"
    assert "A2 is the fastest of 3 variants at every length" in figure.get_supxlabel()


def test_without_the_baseline_speed_is_in_samples_a_second():
    figure = drawn(table(*CURVES[2:]), "length", "speed")
    assert style.title_of(figure) == "A2 reaches 200 samples/s at 128 tokens, 150 at 512"


def test_speeds_of_another_sitting_than_the_baselines_are_in_samples_a_second():
    points = table(*CURVES)
    is_a2 = points["variant"] == "A2"
    points["sittings"] = is_a2.map({True: frozenset("b"), False: frozenset("a")})
    title = style.title_of(drawn(points, "length", "speed"))
    assert title == "A2 reaches 200 samples/s at 128 tokens, 150 at 512"


def test_speed_over_batches_is_against_the_quickest_rival():
    rows = [("A0-compile", 8, 1.0, 50.0), ("A0-compile", 32, 1.0, 100.0)]
    rows += [("A3", 8, 1.0, 100.0), ("A3", 32, 1.0, 150.0)]
    figure = drawn(table(*rows, size="micro_batch"), "micro_batch", "speed")
    assert style.title_of(figure) == (
        "A3 trains ×2.00 as fast as the Trainer (A0-compile) at 8 samples, ×1.50 at 32"
    )


def test_every_curve_has_its_name():
    (axis,) = drawn(table(*CURVES), "length", "speed").axes
    assert {text.get_text() for text in axis.texts} >= {"A1", "A2", "A3"}


@pytest.mark.parametrize(("measure", "is_above"), [("gib", True), ("speed", False)])
def test_who_ran_out_of_memory_stands_above_all_memory_and_below_all_speeds(measure, is_above):
    (axis,) = drawn(table(*CURVES), "length", measure).axes
    (cross,) = [line for line in axis.lines if line.get_marker() == "x"]
    _, height = axis.transAxes.inverted().transform(
        cross.get_transform().transform(cross.get_xydata()[0])
    )
    assert (height > 0.9) == is_above
    assert (height < 0.1) != is_above
    band = 1 - curve_figures.BAND if is_above else curve_figures.BAND
    to_axis = axis.transData + axis.transAxes.inverted()
    drawn_at = [
        to_axis.transform(point)[1] for line in axis.lines[:3] for point in line.get_xydata()
    ]
    heights = [share for share in drawn_at if not math.isnan(share)]
    assert all(share < band if is_above else share > band for share in heights)
    assert "out of memory: A3" in {text.get_text() for text in axis.texts}


def test_a_variant_at_one_size_is_no_curve():
    points = table(*CURVES, ("C1", 128, 1.0, 900.0))
    figure = drawn(points, "length", "speed")
    assert style.title_of(figure).startswith("A2 trains")


def test_no_curve_is_drawn_of_what_was_not_measured():
    untimed = table(*CURVES).assign(speed=math.nan)
    refused("these runs record no times", drawn, untimed, "length", "speed")


def test_memory_takes_a_variant_that_was_measured_at_both_ends():
    refused("at the least and the most tokens", drawn, table(*CURVES[-2:]), "length", "gib")
