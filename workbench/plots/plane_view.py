"""Places of modes in the complex plane, true to scale around the unit circle and logarithmic beyond, and texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import require_listed
from workbench.plots.style import depth_colors

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr
    from numpy.typing import ArrayLike

#: Moduli up to KNEE are true to scale; beyond, a factor of ten has length PER_DECADE. Live views get these constants.
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
    """Return the density of modes in a view as RGBA image, uint8: mean depth as color, log count as opacity."""
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


def depth_of(spectra: xr.Dataset) -> int:
    """Return the number of layers of the model up to the last layer of the spectra."""
    return int(spectra["layer"].max()) + 1 if spectra.sizes["layer"] else 0


def mode_columns(
    spectra: xr.Dataset, *, n_layers: int | None = None, reliable_only: bool = False
) -> dict[str, np.ndarray]:
    """Return the modes of one spectra dataset as columns of equal length, ready to draw.

    Args:
        spectra: Dims ``layer`` and ``mode``; modes whose eigenvalue is NaN do not exist and are omitted.
        n_layers: Number of layers of the model, if the dataset holds only some of them.
        reliable_only: Whether to omit modes that are not reliable.

    Returns:
        ``x`` and ``y`` (position in the figure), ``real``, ``imag``, ``modulus``, ``residual`` (float32), ``layer``,
        ``mode`` (int), ``depth`` (0 for the first layer of the model, 1 for the last), ``fill`` (opacity of the inside
        of the marker: 0 if the mode is not reliable), ``edge`` (opacity of its outline) and ``marker`` (its name in
        bokeh). ``fill`` and ``edge`` are 0 where the density is drawn instead.
    """
    eigenvalue = spectra["eigenvalue"].transpose("layer", "mode").values
    reliable = spectra["is_reliable"].transpose("layer", "mode").values
    row, mode = np.nonzero(np.isfinite(eigenvalue) & (reliable | (not reliable_only)))
    # Hollow markers come first and deep layers last, so that reliable modes are drawn on top.
    order = np.lexsort((row, reliable[row, mode]))
    row, mode = row[order], mode[order]
    chosen = eigenvalue[row, mode]
    layer = spectra["layer"].values[row].astype(np.int32)
    informative = spectra["is_informative"].values[row]
    place, is_dense = drawn_places(chosen), len(chosen) > DENSE
    return {
        "x": place.real.astype(np.float32),
        "y": place.imag.astype(np.float32),
        "real": chosen.real.astype(np.float32),
        "imag": chosen.imag.astype(np.float32),
        "layer": layer,
        "depth": (layer / max((n_layers or depth_of(spectra)) - 1, 1)).astype(np.float32),
        "mode": mode.astype(np.int32),
        "modulus": np.abs(chosen).astype(np.float32),
        "residual": spectra["residual"].transpose("layer", "mode").values[row, mode].astype(np.float32),
        "fill": np.where(reliable[row, mode] & (not is_dense), 0.8, 0.0).astype(np.float32),
        "edge": np.full(len(chosen), 0.0 if is_dense else 1.0, np.float32),
        "marker": np.where(informative, "circle", "x").astype(object),
    }


def headline(
    spectra: xr.Dataset,
    columns: Mapping[str, np.ndarray],
    view: PlaneView,
    *,
    template: str = "mean M {:.2f}   max ρ {:.3g}",
) -> str:
    """Return the line above a panel: mean near-unit mass, largest spectral radius, and modes outside the view."""
    if not spectra.sizes["layer"]:
        return "no layers in this range"
    masses, radii = (spectra[name].values.astype(float) for name in ("near_unit_mass", "spectral_radius"))
    line = template.format(_mean(masses), _largest(radii))
    n_outside = view.n_outside(columns)
    if n_outside:
        line += (
            f"   {n_outside} outside"
            if view.is_near
            else f"   {n_outside} beyond {power_of_ten(FARTHEST)}, drawn there"
        )
    return line


# Same values as `workbench.summarize`, in a hundredth of the time: a slider redraws a dozen panels at once.
def _mean(values: np.ndarray) -> float:
    is_known = ~np.isnan(values)
    return float(values.sum(where=is_known) / is_known.sum()) if is_known.any() else np.nan


def _largest(values: np.ndarray) -> float:
    is_known = ~np.isnan(values)
    return float(values[is_known].max()) if is_known.any() else np.nan


def key(spectra: xr.Dataset) -> str:
    """Return the lines below a panel that explain filled and hollow markers, or the density, and the shading."""
    lower, upper, residual = (
        spectra.attrs[name] for name in ("near_unit_lower", "near_unit_upper", "reliable_residual")
    )
    n_modes = int(spectra["eigenvalue"].notnull().sum(("layer", "mode")).max())
    marks = (
        f"density of {n_modes:,} modes"
        if n_modes > DENSE
        else f"● residual ≤ {residual:.3g}\n○ residual > {residual:.3g}"
    )
    return f"{marks}\n▒ near-unit: {lower:.3g} to {upper:.3g}\n┄ log scale for |λ| > {KNEE:g}"


def silent_layers(spectra: xr.Dataset) -> str:
    """Return a line that lists the layers whose update is too small for a spectrum; empty if there are none."""
    silent = spectra["layer"].values[~spectra["is_informative"].values]
    if not len(silent):
        return ""
    shown = ", ".join(map(str, silent[:4])) + ("…" if len(silent) > 4 else "")
    return f"× update too small for a spectrum: layer {shown}"


def band_outline(spectra: xr.Dataset) -> dict[str, np.ndarray]:
    """Return the near-unit band as one closed ring ``x``, ``y``: the outer circle, then the inner one in reverse."""
    angle = np.linspace(0, 2 * np.pi, 129)
    lower, upper = drawn_radius([spectra.attrs["near_unit_lower"], spectra.attrs["near_unit_upper"]])
    ring = np.concatenate([upper * np.exp(1j * angle), lower * np.exp(-1j * angle)])
    return {"x": ring.real, "y": ring.imag}
