"""Positions of modes in the complex plane: true to scale around the unit circle, logarithmic beyond."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import require_listed
from workbench.plots.style import depth_colors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

#: Moduli up to KNEE are true to scale; beyond, a factor of ten has length PER_DECADE. plane.js has the same values.
KNEE, PER_DECADE = 1.25, 0.3
#: Moduli beyond ten to this power are drawn at this power.
FARTHEST = 9
#: Half the width of the square around 1 in the view "near 1".
NEAR = 0.3
#: The views of a plane.
ZOOMS = ("all modes", "near 1")
#: A panel with more modes shows their density, in this many cells per side.
DENSE, N_CELLS = 5000, 160
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def drawn_radius(modulus: ArrayLike) -> np.ndarray:
    """Return the distance from the origin at which a modulus is drawn: continuous, and the identity up to `KNEE`."""
    values = np.asarray(modulus, float)
    return np.where(values <= KNEE, values, KNEE + PER_DECADE * np.log10(np.maximum(values, KNEE) / KNEE))


def drawn_places(eigenvalue: np.ndarray) -> np.ndarray:
    """Return the positions of eigenvalues as complex numbers: the same angle, the radius from `drawn_radius`."""
    modulus = np.abs(eigenvalue)
    radius = np.minimum(drawn_radius(modulus), drawn_radius(10.0**FARTHEST))
    return eigenvalue * np.divide(radius, modulus, out=np.ones_like(modulus), where=modulus > 0)


def power_of_ten(exponent: int) -> str:
    """Return the label of a power of ten."""
    return str(10**exponent) if exponent <= 2 else "10" + str(exponent).translate(_SUPERSCRIPTS)


@dataclass(frozen=True)
class PlaneView:
    """Part of the plane that all panels show: up to a power of ten, or the square around 1."""

    decades: int = 1
    is_near: bool = False

    @property
    def half(self) -> float:
        """Half the width, in drawn units."""
        return NEAR if self.is_near else 1.05 * float(drawn_radius(10.0**self.decades))

    @property
    def real(self) -> tuple[float, float]:
        """Horizontal range, in drawn units."""
        middle = 1.0 if self.is_near else 0.0
        return middle - self.half, middle + self.half

    @property
    def imag(self) -> tuple[float, float]:
        """Vertical range, in drawn units."""
        return -self.half, self.half

    def n_outside(self, columns: Mapping[str, np.ndarray]) -> int:
        """Return the number of modes that are outside of the view or drawn at its largest modulus."""
        if not self.is_near:
            return int(np.count_nonzero(columns["modulus"] > 10.0**FARTHEST))
        return int(np.count_nonzero(np.maximum(np.abs(columns["x"] - 1), np.abs(columns["y"])) > NEAR))

    def rings(self) -> list[np.ndarray]:
        """Return the circles at the powers of ten as closed lines, shape (point, 2)."""
        return [ring(float(drawn_radius(10.0**k))) for k in range(1, self.decades + 1)]

    def labels(self) -> dict[str, np.ndarray]:
        """Return labels of some circles, on a diagonal with few modes, and of the axes: ``x``, ``y`` and ``text``."""
        if self.is_near:
            return {"x": np.zeros(0), "y": np.zeros(0), "text": np.zeros(0, object)}
        # Only three labels fit in a small panel. They are on the left, because most modes are on the right.
        exponents = sorted({0, self.decades} | ({self.decades // 2} if self.decades > 3 else set()))
        place = -drawn_radius(10.0 ** np.array(exponents)) * np.sqrt(0.5)
        return {
            "x": np.array([*place, -0.84 * self.half, 0.17 * self.half]),
            "y": np.array([*place, 0.07 * self.half, 0.92 * self.half]),
            "text": np.array([*map(power_of_ten, exponents), "Re λ", "Im λ"], object),
        }


def view_of(modes: Mapping[str, Mapping[str, np.ndarray]], zoom: str = "all modes") -> PlaneView:
    """Return the view that all panels share: all modes, or the square around 1."""
    require_listed("zoom", [zoom], ZOOMS)
    largest = max((float(columns["modulus"].max(initial=0)) for columns in modes.values()), default=0.0)
    decades = int(np.ceil(np.log10(max(largest, 1.0)) - 1e-9))
    return PlaneView(min(max(decades, 1), FARTHEST), zoom == "near 1")


def ring(radius: float) -> np.ndarray:
    """Return a circle around the origin as a closed line, shape (point, 2)."""
    angle = np.linspace(0, 2 * np.pi, 181)
    return radius * np.stack([np.cos(angle), np.sin(angle)], -1)


def density(columns: Mapping[str, np.ndarray], view: PlaneView, n_layers: int) -> np.ndarray:
    """Return the density of modes as an image: the color of a cell is their mean depth, its opacity their log count.

    Args:
        columns: Columns of one panel.
        view: Part of the plane that the image covers.
        n_layers: Number of layers of the color scale.

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
