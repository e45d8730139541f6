"""Where modes are drawn in the complex plane: true to scale around the unit circle, logarithmic farther out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError
from workbench.plots.style import depth_colors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

#: Moduli up to KNEE are drawn as they are; beyond, a factor of ten is as long as PER_DECADE. plane.js has the same.
KNEE, PER_DECADE = 1.25, 0.3
#: Moduli beyond ten to this power are drawn on its ring.
FARTHEST = 9
#: Half the width of the square around 1 in the view "near 1".
NEAR = 0.3
#: The views of a plane.
ZOOMS = ("all modes", "near 1")
#: From this many modes on, a panel shows their density, in so many cells on a side.
DENSE, N_CELLS = 5000, 160
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def drawn_radius(modulus: ArrayLike) -> np.ndarray:
    """Distance from the origin at which a modulus is drawn; continuous, and the identity up to `KNEE`.

    Example:
        >>> from workbench.plots.plane_view import drawn_radius
        >>> drawn_radius([0.5, 1.0, 12.5, 125.0]).tolist()
        [0.5, 1.0, 1.55, 1.85]
    """
    values = np.asarray(modulus, float)
    return np.where(values <= KNEE, values, KNEE + PER_DECADE * np.log10(np.maximum(values, KNEE) / KNEE))


def drawn_places(eigenvalue: np.ndarray) -> np.ndarray:
    """Where eigenvalues are drawn, complex: the angle is theirs, the radius as in `drawn_radius`."""
    modulus = np.abs(eigenvalue)
    radius = np.minimum(drawn_radius(modulus), drawn_radius(10.0**FARTHEST))
    return eigenvalue * np.divide(radius, modulus, out=np.ones_like(modulus), where=modulus > 0)


def power_of_ten(exponent: int) -> str:
    """Name of a ring."""
    return str(10**exponent) if exponent <= 2 else "10" + str(exponent).translate(_SUPERSCRIPTS)


@dataclass(frozen=True)
class PlaneView:
    """The part of the plane that all panels show: up to a power of ten, or the square around 1.

    Attributes:
        decades: The largest power of ten inside, from 1.
        is_near: Whether it is the square around 1, where everything is true to scale.
    """

    decades: int = 1
    is_near: bool = False

    @property
    def half(self) -> float:
        """Half the width, as drawn."""
        return NEAR if self.is_near else 1.05 * float(drawn_radius(10.0**self.decades))

    @property
    def real(self) -> tuple[float, float]:
        """Horizontal range, as drawn."""
        middle = 1.0 if self.is_near else 0.0
        return middle - self.half, middle + self.half

    @property
    def imag(self) -> tuple[float, float]:
        """Vertical range, as drawn."""
        return -self.half, self.half

    def n_outside(self, columns: Mapping[str, np.ndarray]) -> int:
        """Number of modes that the view does not show where they are."""
        if not self.is_near:
            return int(np.count_nonzero(columns["modulus"] > 10.0**FARTHEST))
        return int(np.count_nonzero(np.maximum(np.abs(columns["x"] - 1), np.abs(columns["y"])) > NEAR))

    def rings(self) -> list[np.ndarray]:
        """The circles at the powers of ten, as closed lines, shape (point, 2)."""
        return [ring(float(drawn_radius(10.0**k))) for k in range(1, self.decades + 1)]

    def labels(self) -> dict[str, np.ndarray]:
        """Names of some rings, on a diagonal where few modes are, and of the axes: ``x``, ``y`` and ``text``."""
        if self.is_near:
            return {"x": np.zeros(0), "y": np.zeros(0), "text": np.zeros(0, object)}
        # In a small panel there is room for three names alone; on the right of the real axis there are modes.
        exponents = sorted({0, self.decades} | ({self.decades // 2} if self.decades > 3 else set()))
        place = -drawn_radius(10.0 ** np.array(exponents)) * np.sqrt(0.5)
        return {
            "x": np.array([*place, -0.84 * self.half, 0.17 * self.half]),
            "y": np.array([*place, 0.07 * self.half, 0.92 * self.half]),
            "text": np.array([*map(power_of_ten, exponents), "Re λ", "Im λ"], object),
        }


def view_of(modes: Mapping[str, Mapping[str, np.ndarray]], zoom: str = "all modes") -> PlaneView:
    """The view that all panels share: of every mode, or of the square around 1.

    Args:
        modes: Columns of each panel; see `workbench.plots.mode_columns.mode_columns`.
        zoom: ``"all modes"`` or ``"near 1"``.

    Raises:
        OptionError: If there is no such zoom.
    """
    if zoom not in ZOOMS:
        raise OptionError(f"The zoom is {zoom!r}, expected one of {', '.join(map(repr, ZOOMS))}.")
    largest = max((float(columns["modulus"].max(initial=0)) for columns in modes.values()), default=0.0)
    decades = int(np.ceil(np.log10(max(largest, 1.0)) - 1e-9))
    return PlaneView(min(max(decades, 1), FARTHEST), zoom == "near 1")


def ring(radius: float) -> np.ndarray:
    """A circle around the origin as a closed line, shape (point, 2)."""
    angle = np.linspace(0, 2 * np.pi, 181)
    return radius * np.stack([np.cos(angle), np.sin(angle)], -1)


def density(columns: Mapping[str, np.ndarray], view: PlaneView, n_layers: int) -> np.ndarray:
    """The density of modes as an image: colour is the mean depth of a cell, opacity the logarithm of its modes.

    Args:
        columns: Columns of one panel.
        view: The part of the plane; the image covers it.
        n_layers: Number of layers of the colour scale.

    Returns:
        Red, green, blue and alpha from 0 to 255, uint8, shape (row, column, 4), the lowest row first.
    """
    edges = (np.linspace(*view.imag, N_CELLS + 1), np.linspace(*view.real, N_CELLS + 1))
    places = columns["y"], columns["x"]
    counts = np.histogram2d(*places, bins=edges)[0]
    depth = np.histogram2d(*places, bins=edges, weights=columns["depth"])[0] / np.maximum(counts, 1)
    ramp = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in depth_colors(n_layers)])
    image = np.zeros((*counts.shape, 4), np.uint8)
    image[..., :3] = ramp[np.rint(depth * (n_layers - 1)).astype(int)]
    opacity = np.log1p(counts) / max(np.log1p(counts.max(initial=0)), 1e-9)
    image[..., 3] = np.where(counts > 0, np.rint(255 * (0.25 + 0.75 * opacity)), 0)
    return image
