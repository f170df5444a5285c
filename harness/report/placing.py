"""Where the names of points stand: beside them, and off one another as far as there is room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.report.intervals import Bounds

# Plotly's `textposition` -> the text's middle from its point's, in half widths and half heights of both.
PLACES = {
    **{"top center": (0, 1), "bottom center": (0, -1), "middle right": (1, 0), "middle left": (-1, 0)},
    **{"top right": (1, 1), "top left": (-1, 1), "bottom right": (1, -1), "bottom left": (-1, -1)},
}
LETTER_PX, LINE_PX, MARKER_PX, BAR_PX = 6.8, 15.0, 14.0, 4.0
NAME_COSTS = 5.0  # a name under another one is read by nobody, one on an error bar by most


class Box(NamedTuple):
    """In px; y grows upwards."""

    left: float
    bottom: float
    right: float
    top: float

    def shared(self, other: Box) -> float:
        """Area in px^2 that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


class Named(NamedTuple):
    """A point with its name and the ends of its error bars, on axes that begin at 0."""

    name: str
    x: float
    y: float
    x_bounds: Bounds
    y_bounds: Bounds


def placed(points: Sequence[Named], ends: tuple[float, float], size_px: tuple[float, float]) -> list[str]:
    """A `textposition` for each point: the one that covers least, in the order of the points.

    ends: of both axes; size_px: about how wide and high they are.
    """
    scale = size_px[0] / ends[0], size_px[1] / ends[1]
    frame = Box(0.0, 0.0, *size_px)
    covered = [box for point in points for box in drawn(point, scale)]
    names: list[Box] = []
    found = []
    for point in points:
        boxes = {place: name_box(point, place, scale) for place in PLACES}
        costs = {
            place: sum(map(box.shared, covered))
            + NAME_COSTS * (sum(map(box.shared, names)) + box.area - box.shared(frame))
            for place, box in boxes.items()
        }
        best = min(costs, key=lambda place: costs[place])
        found.append(best)
        names.append(boxes[best])
    return found


def drawn(point: Named, scale: tuple[float, float]) -> list[Box]:
    """Its marker, and its error bars if it has any."""
    x, y = point.x * scale[0], point.y * scale[1]
    boxes = [_around(x, y, MARKER_PX, MARKER_PX)]
    (left, right), (low, high) = point.x_bounds, point.y_bounds
    if left is not None and right is not None:
        boxes.append(Box(left * scale[0], y - BAR_PX / 2, right * scale[0], y + BAR_PX / 2))
    if low is not None and high is not None:
        boxes.append(Box(x - BAR_PX / 2, low * scale[1], x + BAR_PX / 2, high * scale[1]))
    return boxes


def name_box(point: Named, place: str, scale: tuple[float, float]) -> Box:
    """What its name covers there."""
    width, (right, up) = LETTER_PX * len(point.name), PLACES[place]
    x = point.x * scale[0] + right * (width + MARKER_PX) / 2
    y = point.y * scale[1] + up * (LINE_PX + MARKER_PX) / 2
    return _around(x, y, width, LINE_PX)


def _around(x: float, y: float, width: float, height: float) -> Box:
    return Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
