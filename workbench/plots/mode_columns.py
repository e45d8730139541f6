"""Modes of a spectrum as columns to draw, and their labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.plots.plane_view import DENSE, FARTHEST, KNEE, drawn_places, drawn_radius, power_of_ten

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

    from workbench.plots.plane_view import PlaneView


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
