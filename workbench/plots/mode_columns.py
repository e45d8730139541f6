"""The modes of a spectrum as columns to draw, the view that contains them, and their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

#: The default view never goes beyond this, so that the unit circle stays large next to a model of spectral radius 11.
WIDEST_DEFAULT_LIMIT = 1.5
NARROWEST_LIMIT = 1.2


def mode_columns(
    spectra: xr.Dataset, *, n_layers: int | None = None, reliable_only: bool = False
) -> dict[str, np.ndarray]:
    """The modes of one spectra dataset as columns of equal length, one row per mode, ready to draw.

    Args:
        spectra: Dims ``layer`` and ``mode``; modes whose eigenvalue is NaN do not exist and are dropped.
        n_layers: Number of layers of the model, if the dataset holds only some of them.
        reliable_only: Whether to drop also the modes that are not reliable.

    Returns:
        ``real``, ``imag``, ``modulus``, ``residual`` (float32), ``layer``, ``mode`` (int), ``depth`` (0 the model's
        first layer, 1 its last), ``fill`` (opacity of the marker's inside: 0 where the mode is not reliable) and
        ``marker`` (a bokeh name).
    """
    eigenvalue = spectra["eigenvalue"].transpose("layer", "mode").values
    reliable = spectra["is_reliable"].transpose("layer", "mode").values
    row, mode = np.nonzero(np.isfinite(eigenvalue) & (reliable | (not reliable_only)))
    # Hollow markers first and deep layers last, so that reliable modes are on top.
    order = np.lexsort((row, reliable[row, mode]))
    row, mode = row[order], mode[order]
    chosen = eigenvalue[row, mode]
    layer = spectra["layer"].values[row].astype(np.int32)
    informative = spectra["is_informative"].values[row]
    return {
        "real": chosen.real.astype(np.float32),
        "imag": chosen.imag.astype(np.float32),
        "layer": layer,
        "depth": (layer / max((n_layers or spectra.sizes["layer"]) - 1, 1)).astype(np.float32),
        "mode": mode.astype(np.int32),
        "modulus": np.abs(chosen).astype(np.float32),
        "residual": spectra["residual"].transpose("layer", "mode").values[row, mode].astype(np.float32),
        "fill": np.where(reliable[row, mode], 0.8, 0.0).astype(np.float32),
        "marker": np.where(informative, "circle", "x").astype(object),
    }


@dataclass(frozen=True)
class View:
    """The square that all panels show: its middle on the real axis, and half its width."""

    center: float
    limit: float

    @property
    def real(self) -> tuple[float, float]:
        """Range of Re lambda."""
        return self.center - self.limit, self.center + self.limit

    @property
    def imag(self) -> tuple[float, float]:
        """Range of Im lambda."""
        return -self.limit, self.limit

    def reach(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Half-width that would just hold each mode, shape (mode,)."""
        return np.maximum(np.abs(columns["real"] - self.center), np.abs(columns["imag"]))


def view_of(
    modes: Mapping[str, Mapping[str, np.ndarray]], limit: float | str | None = None, center: float = 0.0
) -> View:
    """The view that all panels share; see `eigenvalue_map`.

    Raises:
        OptionError: If the limit is neither None, ``"all"`` nor a positive number, or the centre is not finite.
    """
    if not np.isfinite(center):
        raise OptionError(f"The center is {center!r}, expected a finite number.")
    reach = np.concatenate([View(center, 0.0).reach(columns) for columns in modes.values()] or [np.zeros(0)])
    largest = 1.08 * float(reach.max(initial=0))
    if limit is None and center != 0:
        most = float(np.quantile(reach, 2 / 3)) if len(reach) else WIDEST_DEFAULT_LIMIT
        return View(center, float(np.clip(most, 0.05, WIDEST_DEFAULT_LIMIT)))
    if limit is None:
        return View(center, min(max(largest, NARROWEST_LIMIT), WIDEST_DEFAULT_LIMIT))
    if limit == "all":
        return View(center, max(largest, NARROWEST_LIMIT))
    if isinstance(limit, str) or not (np.isfinite(limit) and limit > 0):
        raise OptionError(f"The limit is {limit!r}, expected a positive number, 'all' or None.")
    return View(center, float(limit))


def headline(
    spectra: xr.Dataset,
    columns: Mapping[str, np.ndarray],
    view: View,
    *,
    template: str = "mean M {:.2f}   max ρ {:.3g}",
) -> str:
    """One line above a panel: mean near-unit mass, largest spectral radius, and the modes outside the view."""
    if not spectra.sizes["layer"]:
        return "no layer in this range"
    masses, radii = (spectra[name].values.astype(float) for name in ("near_unit_mass", "spectral_radius"))
    line = template.format(_mean(masses), _largest(radii))
    n_outside = int(np.count_nonzero(view.reach(columns) > view.limit))
    if n_outside:
        line += f"   {n_outside} outside"
    return line


# As `spectral.measures.summarize` gives them, in a hundredth of the time: a slider redraws a dozen panels at once.
def _mean(values: np.ndarray) -> float:
    is_known = ~np.isnan(values)
    return float(values.sum(where=is_known) / is_known.sum()) if is_known.any() else np.nan


def _largest(values: np.ndarray) -> float:
    is_known = ~np.isnan(values)
    return float(values[is_known].max()) if is_known.any() else np.nan


def key(spectra: xr.Dataset) -> str:
    """Two lines below a panel: the meaning of filled and hollow markers and of the shading."""
    lower, upper, residual = (
        spectra.attrs[name] for name in ("near_unit_lower", "near_unit_upper", "reliable_residual")
    )
    return f"● residual ≤ {residual:.3g}   ○ larger\n▒ {lower:.3g} ≤ |λ| ≤ {upper:.3g} near unit"


def silent_layers(spectra: xr.Dataset) -> str:
    """One line that names the layers whose update is too small to say anything; empty if there are none."""
    silent = spectra["layer"].values[~spectra["is_informative"].values]
    if not len(silent):
        return ""
    shown = ", ".join(map(str, silent[:4])) + ("…" if len(silent) > 4 else "")
    return f"× update too small to say anything: layer {shown}"


def band_outline(spectra: xr.Dataset) -> dict[str, np.ndarray]:
    """The near-unit band as one closed ring, ``real`` and ``imag``: outer circle, then the inner one backwards."""
    angle = np.linspace(0, 2 * np.pi, 129)
    outer = spectra.attrs["near_unit_upper"] * np.exp(1j * angle)
    inner = spectra.attrs["near_unit_lower"] * np.exp(-1j * angle)
    ring = np.concatenate([outer, inner])
    return {"real": ring.real, "imag": ring.imag}
