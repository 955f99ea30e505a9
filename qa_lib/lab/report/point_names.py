"""Names beside the points of a figure, of which none lies over another.

`name_points` writes them in a column right of the axis, as the ends of curves need them. Where
points lie anywhere, `name_beside` looks for a free place near each.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text
from scipy.optimize import isotonic_regression

FAINT = "0.4"  # the grey of names that no title speaks of
LEADER = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}

# Lengths in points.
MARGIN = 3  # that a text keeps from points, from lines and from other texts
FARTHEST = 200  # from a point to its text
POINTS_AN_INCH = 72

PLACES = 40  # along a line, at which it is asked what lies there


def name_points(
    axis: Axes, points: Iterable[tuple[float, float, str]], faint: Collection[str] = ()
) -> None:
    """Write the texts of some points (x, y, text) right of the axis, with a line from each.

    The texts stand in the order of their points' heights and apart from each other. Those that are
    in `faint` are grey and small.
    """
    points = sorted(points, key=itemgetter(1))
    pixels = [axis.transData.transform((x, y))[1] for x, y, _ in points]
    for point, height in zip(points, _apart(axis, pixels), strict=True):
        right = {"xytext": (1.02, height), "textcoords": "axes fraction", "ha": "left"}
        _write(axis, point, faint, LEADER | {"relpos": (0, 0.5)}, **right)


def _write(
    axis: Axes, point: tuple[float, float, str], faint: Collection[str], line: dict, **place
) -> Annotation:
    """Write the text of a point (x, y, text) at a place, as matplotlib's `annotate` takes it."""
    x, y, text = point
    return axis.annotate(
        text,
        (x, y),
        fontsize=7 if text in faint else 8,
        color=FAINT if text in faint else "black",
        va="center",
        arrowprops=line,
        **place,
    )


def _apart(axis: Axes, pixels: Sequence[float], least: float = 0.06) -> np.ndarray:
    """Return rising heights in pixels as shares of the axis, moved apart by a share of `least`.

    The sum of the squares of how far they move is the least that there is, and all stay inside of
    the axis. Where they are too many for that, they are as far apart as the axis lets them.
    """
    bottom = axis.transAxes.transform((0, 0))[1]
    top = axis.transAxes.transform((0, 1))[1]
    shares = (np.array(pixels, dtype=float) - bottom) / (top - bottom)
    if len(shares) < 2:
        return shares
    steps = min(least, 1 / (len(shares) - 1)) * np.arange(len(shares))
    moved = isotonic_regression(shares - steps).x
    return np.clip(moved, 0, 1 - steps[-1]) + steps


def along_curve(axis: Axes, x: Iterable[float], y: Iterable[float]) -> list[tuple[float, float]]:
    """Return places (x, y) all along a curve through some points, which no name may lie over.

    The scales of the axis are to be set before.
    """
    to_pixels = axis.transData
    corners = to_pixels.transform(list(zip(x, y, strict=True)))
    places = [corners[-1]]
    for begin, end in itertools.pairwise(corners):
        places += list(np.linspace(begin, end, PLACES))
    return [tuple(place) for place in to_pixels.inverted().transform(places)]


# Free places inside of an axis. All lengths are in points, from the figure's lower left corner, and
# a box is an array of its left, bottom, right and top.


def name_beside(
    axis: Axes,
    points: Iterable[tuple[float, float, str]],
    kept_free: Iterable[tuple[float, float]],
    faint: Collection[str] = (),
) -> None:
    """Write the texts of some points (x, y, text) inside of the axis, each near its point.

    Where there is such a place, no text lies over another, over the line that leads to another, or
    over a point (x, y) of `kept_free`, and the line to it leads over none of these either. Texts
    that are in `faint` are grey and small. Everything else is drawn before, since the layout of the
    figure says where a point is.
    """
    figure = axis.figure
    figure.draw_without_rendering()
    pixels_a_point = figure.dpi / POINTS_AN_INCH
    inside = np.array(axis.get_window_extent().extents) / pixels_a_point
    drawn = [_box(axis.transData.transform(place) / pixels_a_point, MARGIN) for place in kept_free]
    written = []
    for point in points:
        over_point = {"xytext": (0, 0), "textcoords": "offset points", "ha": "center"}
        note = _write(axis, point, faint, LEADER, **over_point)
        at = axis.transData.transform(point[:2]) / pixels_a_point
        extent = Text.get_window_extent(note, figure.canvas.get_renderer())
        half = np.array([extent.width, extent.height]) / 2 / pixels_a_point
        way = _free_way(at, half, inside, _array(drawn), _array(written))
        note.set_position(tuple(way))
        written.append(_box(at + way, half))
        written += [_box(place, 1) for place in _line(at, way, half)]


def _free_way(
    at: np.ndarray, half: np.ndarray, inside: np.ndarray, drawn: np.ndarray, written: np.ndarray
) -> np.ndarray:
    """Return the first of `_ways` from a point to a place that is free for a text of half a size.

    There the text lies in the box `inside`, and over no box that is drawn or written. A place comes
    first whose line crosses none of these boxes, then one whose line crosses none that is written.
    Where no place is free it is the first of all.
    """
    ways = list(_ways(half))
    taken = np.concatenate([drawn, written])
    free = [way for way in ways if _is_free(_box(at + way, half), inside, taken)]
    for crossed in (taken, written, _array([])):
        for way in free:
            if not any(_is_over(_box(place, 0), crossed) for place in _line(at, way, half)):
                return way
    return ways[0]


def _is_free(box: np.ndarray, inside: np.ndarray, taken: np.ndarray) -> bool:
    """Return whether a box lies in another, and over none that is taken."""
    is_inside = (box[:2] >= inside[:2]).all() and (box[2:] <= inside[2:]).all()
    return bool(is_inside) and not _is_over(box, taken)


def _ways(half: np.ndarray) -> Iterator[np.ndarray]:
    """Yield ways from a point to the centre of a text: near ones, and to the right, first."""
    angles = np.pi / 8 * np.array([0, 1, -1, 8, 4, -4, 2, -2, 3, -3, 5, -5, 6, -6, 7, -7])
    distances = np.arange(2 * MARGIN, FARTHEST, MARGIN)
    for distance, angle in itertools.product(distances, angles):
        yield np.array([np.cos(angle), np.sin(angle)]) * (distance + half)


def _line(at: np.ndarray, way: np.ndarray, half: np.ndarray) -> list[np.ndarray]:
    """Return places on the line that is drawn from a point to the text at the end of a way."""
    text = _array([_box(at + way, half)])
    places = [at + share * way for share in np.linspace(0, 1, PLACES)]
    beyond = [place for place in places if np.hypot(*(place - at)) > LEADER["shrinkB"]]
    return [place for place in beyond if not _is_over(_box(place, 0), text)]


def _box(centre: np.ndarray, half: np.ndarray | float) -> np.ndarray:
    """Return the box around a centre of half a width and half a height."""
    return np.concatenate([centre - half, centre + half])


def _array(boxes: list[np.ndarray]) -> np.ndarray:
    """Return boxes as one array, a row for each."""
    return np.reshape(boxes, (-1, 4))


def _is_over(box: np.ndarray, others: np.ndarray) -> bool:
    """Return whether a box lies over any of some others. One with NaN lies nowhere."""
    is_over = (others[:, :2] < box[2:]) & (others[:, 2:] > box[:2])
    return bool(is_over.all(axis=1).any())
