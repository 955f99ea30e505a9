"""Names beside the points of a figure: apart from each other, and near their points."""

import itertools

import pytest
from matplotlib.text import Text

from qa_lib.lab.report import point_names, style


@pytest.fixture
def axis():
    """An axis from 0 to 1 each way."""
    axis = style.new_figure("Title", "", 3.0).subplots()
    axis.set(xlim=(0, 1), ylim=(0, 1))
    return axis


def boxes(axis):
    """The boxes of the texts of an axis, in pixels."""
    axis.figure.draw_without_rendering()
    renderer = axis.figure.canvas.get_renderer()
    return [Text.get_window_extent(text, renderer) for text in axis.texts]


# In a column right of the axis.


def test_names_beside_an_axis_are_apart_and_inside(axis):
    point_names.name_points(axis, [(1, 0.99, "top"), (1, 0.98, "next"), (1, 0.1, "low")])
    low, second, top = [text.get_position()[1] for text in axis.texts]
    assert low == pytest.approx(0.1)
    assert top - second == pytest.approx(0.06)
    assert top <= 1


def test_names_move_up_and_down_from_points_at_one_height(axis):
    point_names.name_points(axis, [(1, 0.5, "a"), (1, 0.5, "b")])
    assert [text.get_position()[1] for text in axis.texts] == pytest.approx([0.47, 0.53])


def test_very_many_names_are_as_far_apart_as_the_axis_lets_them(axis):
    point_names.name_points(axis, [(1, 0.5, str(number)) for number in range(41)])
    heights = [text.get_position()[1] for text in axis.texts]
    assert heights == pytest.approx([number / 40 for number in range(41)])


def test_a_faint_name_is_smaller(axis):
    point_names.name_points(axis, [(1, 0.2, "told"), (1, 0.8, "faint")], faint=["faint"])
    told, faint = axis.texts
    assert faint.get_fontsize() < told.get_fontsize()
    assert faint.get_color() == point_names.FAINT


# Inside of the axis.


def test_a_lone_name_stands_right_of_its_point(axis):
    point_names.name_beside(axis, [(0.5, 0.5, "name")], kept_free=[])
    right, up = axis.texts[0].get_position()
    assert 0 < right < 30
    assert up == 0


def test_names_of_points_at_one_place_lie_over_none_another(axis):
    point_names.name_beside(axis, [(0.5, 0.5, f"name {number}") for number in range(9)], [])
    for first, second in itertools.combinations(boxes(axis), 2):
        assert not first.overlaps(second)


def test_a_name_lies_over_no_place_that_is_kept_free(axis):
    row = [(0.5 + step / 100, 0.5) for step in range(30)]
    point_names.name_beside(axis, [(0.5, 0.5, "name")], row)
    (box,) = boxes(axis)
    assert not any(box.contains(*axis.transData.transform(place)) for place in row)


def test_a_name_stays_inside_of_the_axis(axis):
    point_names.name_beside(axis, [(0.99, 0.99, "a long name")], [])
    (box,) = boxes(axis)
    inside = axis.get_window_extent()
    assert box.x1 <= inside.x1
    assert box.y1 <= inside.y1


def test_places_along_a_curve_lie_between_its_points(axis):
    axis.set_xscale("log")
    axis.set_xlim(1, 100)
    places = point_names.along_curve(axis, [1, 100], [0, 1])
    middle = [x for x, y in places if 0.48 < y < 0.52]
    assert middle
    assert all(9 < x < 11 for x in middle)
