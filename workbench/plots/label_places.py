"""Placement of names next to points so that no name covers another name or a point."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Width of a letter and height of a line of `workbench.plots.primitives.Primitives.words`, in pixels.
LETTER, LINE = 6.9, 13.0
_GAP, _RADIUS = 8.0, 5.0


class Box(NamedTuple):
    """A rectangle on the frame, in pixels from its lower left corner."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> bool:
        """Return whether two boxes overlap."""
        is_disjoint = self.right <= other.left or other.right <= self.left
        return not (is_disjoint or self.top <= other.bottom or other.top <= self.bottom)


def place_labels(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    frame: tuple[float, float],
    taken: Sequence[Box] = (),
) -> list[Box | None]:
    """Choose the position of each label: next to, above or below its point, the first that is free.

    Args:
        points: Positions in pixels from the frame's lower left corner.
        labels: One label per point; an empty one is not placed.
        frame: Width and height in pixels.
        taken: Rectangles that other texts occupy.

    Returns:
        Box of each label; None if no position is free. Earlier labels choose first.
    """
    filled = [*taken, *(Box(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in points)]
    boxes: list[Box | None] = []
    for (x, y), label in zip(points, labels, strict=True):
        width, half = LETTER * len(label), LINE / 2
        corners = [
            (x + _GAP, y - half),
            (x - _GAP - width, y - half),
            (x - width / 2, y + _GAP),
            (x - width / 2, y - _GAP - LINE),
            *((x + dx, y + dy) for dy in (_GAP - 2, 2 - _GAP - LINE) for dx in (_GAP - 4, 4 - _GAP - width)),
        ]
        candidates = [Box(left, bottom, left + width, bottom + LINE) for left, bottom in corners]
        inside = [box for box in candidates if box.left >= 0 and box.right <= frame[0] and box.bottom >= 0]
        inside = [box for box in inside if box.top <= frame[1]]
        free = [box for box in inside if not any(box.meets(other) for other in filled)]
        boxes.append(free[0] if free and label else None)
        filled += [box for box in boxes[-1:] if box is not None]
    return boxes
