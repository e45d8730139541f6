"""Measures of a spectrum: mass fractions, their thresholds, and summaries over layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat

if TYPE_CHECKING:
    import xarray as xr

MASSES = ("near_unit_mass", "expansive_mass", "contractive_mass", "intermediate_mass")
THIRDS = ("early", "middle", "late")
STATISTICS = ("mean", "max", "min", "std")


@checked
@dataclass(frozen=True)
class Thresholds:
    """Thresholds that separate the kinds of modes (RKSP Eq. 12 and the related masses; all of unit 1).

    Attributes:
        near_unit_lower: Smallest modulus of a near-unit mode, inclusive.
        near_unit_upper: Largest modulus of a near-unit mode, inclusive; modes above it are expansive.
        contractive_upper: Modes of a smaller modulus are contractive, exclusive.
        reliable_residual: Largest residual of a reliable mode, inclusive.
        informative_update: A spectrum is informative if its update norm exceeds this value. Not in the paper: with an
            identity initialization all eigenvalues are 1, which implies no risk.

    Example:
        >>> import workbench as wb
        >>> thresholds = wb.Thresholds(near_unit_lower=0.95)
        >>> masses = wb.koopman.mass_fractions([0.5, 0.93, 1.0, 1.2], thresholds)
        >>> float(masses["near_unit_mass"])
        0.25

    See Also:
        `workbench.remeasure`: Applies other thresholds to existing spectra.
        `workbench.koopman.mass_fractions`: Computes the fractions.
    """

    near_unit_lower: NonNegativeFloat = 0.90
    near_unit_upper: NonNegativeFloat = 1.05
    contractive_upper: NonNegativeFloat = 0.80
    reliable_residual: NonNegativeFloat = 0.10
    informative_update: NonNegativeFloat = 1e-3

    def __post_init__(self) -> None:
        if not self.near_unit_lower < self.near_unit_upper:
            raise OptionError.of(
                "near_unit_lower", self.near_unit_lower, f"less than near_unit_upper ({self.near_unit_upper:g})"
            )
        if self.contractive_upper > self.near_unit_lower:
            raise OptionError.of(
                "contractive_upper",
                self.contractive_upper,
                f"at most near_unit_lower ({self.near_unit_lower:g}), so that no mode is of both kinds",
            )

    @classmethod
    def of(cls, spectra: xr.Dataset) -> Thresholds:
        """Return the thresholds with which a spectra dataset was computed.

        Args:
            spectra: A spectra dataset.
        """
        return cls(**{field.name: float(spectra.attrs[field.name]) for field in fields(cls)})

    def as_attrs(self) -> dict[str, float]:
        """Return the thresholds as attributes of a dataset."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


def mass_fractions(modulus: np.ndarray, thresholds: Thresholds | None = None) -> dict[str, np.ndarray]:
    """Compute the fractions of near-unit, expansive, contractive and intermediate modes (RKSP Eq. 12).

    With near-unit bounds lower and upper and contractive bound c, a mode is near-unit if lower <= |lambda| <= upper,
    expansive if |lambda| > upper, contractive if |lambda| < c, and otherwise intermediate.

    Args:
        modulus: |lambda|, shape (..., mode), unit 1; NaN marks modes that do not exist or were filtered out.
        thresholds: Bounds of the masses; the paper's by default.

    Returns:
        An array of shape (...) for each mass, in [0, 1]; the masses sum to 1. NaN where there are no modes.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> masses = wb.koopman.mass_fractions(np.array([0.5, 0.85, 1.0, 1.2]))
        >>> {name: float(fraction) for name, fraction in masses.items()}
        {'near_unit_mass': 0.25, 'expansive_mass': 0.25, 'contractive_mass': 0.25, 'intermediate_mass': 0.25}

    See Also:
        `workbench.Thresholds`: Holds the bounds.
        `workbench.koopman.near_unit_mass`: Computes the near-unit mass alone.
    """
    thresholds = thresholds or Thresholds()
    modulus = np.asarray(modulus, dtype=float)
    n_modes = np.isfinite(modulus).sum(-1)
    near = (modulus >= thresholds.near_unit_lower) & (modulus <= thresholds.near_unit_upper)
    expansive = modulus > thresholds.near_unit_upper
    contractive = modulus < thresholds.contractive_upper
    counts = [kind.sum(-1) for kind in (near, expansive, contractive)]
    counts.append(n_modes - sum(counts))
    with np.errstate(invalid="ignore"):
        return {
            name: count / np.where(n_modes > 0, n_modes, np.nan) for name, count in zip(MASSES, counts, strict=True)
        }


def near_unit_mass(modulus: np.ndarray, *, lower: float = 0.90, upper: float = 1.05) -> float:
    """Compute the fraction of eigenvalues close to the unit circle (RKSP Eq. 12).

    M = #{j: lower <= |lambda_j| <= upper} / #{j}.

    Args:
        modulus: |lambda|, shape (mode,), unit 1; NaN marks unused modes.
        lower: Inclusive lower bound; the paper's 1 - eps_n.
        upper: Inclusive upper bound; the paper's 1 + eps_u.

    Returns:
        Fraction in [0, 1]; NaN if there are no modes.

    Raises:
        OptionError: If ``lower`` is not below ``upper``.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> wb.koopman.near_unit_mass(np.array([0.5, 0.95, 1.0, 1.2]))
        0.5

    See Also:
        `workbench.koopman.mass_fractions`: Computes all masses.
    """
    thresholds = Thresholds(near_unit_lower=lower, near_unit_upper=upper, contractive_upper=min(0.8, lower))
    return float(mass_fractions(modulus, thresholds)["near_unit_mass"])


def remeasure(
    spectra: xr.Dataset,
    *,
    near_unit_lower: float | None = None,
    near_unit_upper: float | None = None,
    contractive_upper: float | None = None,
    reliable_residual: float | None = None,
    informative_update: float | None = None,
    reliable_only: bool = False,
) -> xr.Dataset:
    """Apply other thresholds to existing spectra.

    Args:
        spectra: A spectra dataset, dims ``layer`` and ``mode`` (others may come first).
        near_unit_lower: As in `Thresholds`; None keeps the value of the spectra.
        near_unit_upper: As in `Thresholds`; None keeps the value of the spectra.
        contractive_upper: As in `Thresholds`; None keeps the value of the spectra.
        reliable_residual: As in `Thresholds`; None keeps the value of the spectra.
        informative_update: As in `Thresholds`; None keeps the value of the spectra.
        reliable_only: Count only the reliable modes in the masses.

    Returns:
        A new dataset with the masses, ``is_reliable``, ``is_informative`` and the threshold attributes replaced.

    Raises:
        OptionError: If the thresholds contradict each other.
        SchemaError: If ``spectra`` is not a spectra dataset.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> states = np.random.default_rng(0).normal(size=(64, 4))
        >>> spectra = wb.koopman.whitened_dmd(states, 0.85 * states)
        >>> spectra["near_unit_mass"].item(), wb.remeasure(spectra, near_unit_lower=0.8)["near_unit_mass"].item()
        (0.0, 1.0)

    See Also:
        `workbench.Thresholds`: Describes the thresholds.
        `workbench.summarize`: Summarizes the measures over layers.
    """
    _check_spectra(spectra)
    given = {
        "near_unit_lower": near_unit_lower,
        "near_unit_upper": near_unit_upper,
        "contractive_upper": contractive_upper,
        "reliable_residual": reliable_residual,
        "informative_update": informative_update,
    }
    thresholds = replace(Thresholds.of(spectra), **{k: float(v) for k, v in given.items() if v is not None})
    result = spectra.copy()
    result.attrs.update(thresholds.as_attrs())
    result["is_reliable"] = (spectra["residual"] <= thresholds.reliable_residual).assign_attrs(
        spectra["is_reliable"].attrs
    )
    result["is_informative"] = (spectra["update_norm"] > thresholds.informative_update).assign_attrs(
        spectra["is_informative"].attrs
    )
    modulus = abs(spectra["eigenvalue"])
    if reliable_only:
        modulus = modulus.where(result["is_reliable"])
    dims = [dim for dim in spectra["eigenvalue"].dims if dim != "mode"]
    for name, value in mass_fractions(modulus.transpose(*dims, "mode").values, thresholds).items():
        result[name] = (dims, value, spectra[name].attrs)
    return result


def summarize(spectra: xr.Dataset) -> xr.Dataset:
    """Compute mean, maximum, minimum and standard deviation over layers of every per-layer measure (RKSP).

    Args:
        spectra: A spectra dataset.

    Returns:
        Dataset with dim ``statistic`` (mean, max, min, std) in place of ``layer``; one variable for each measure with
        dims (layer,), booleans as fractions. The risk score of the paper is ``near_unit_mass`` at ``mean``.
        Layers whose measure is NaN are omitted; an infinite measure makes mean and max infinite and std NaN.

    Raises:
        SchemaError: If ``spectra`` is not a spectra dataset.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("architecture"))
        >>> summary = wb.summarize(run["spectra"].to_dataset().isel(step=0))
        >>> summary["statistic"].values.tolist()
        ['mean', 'max', 'min', 'std']
        >>> 0 <= summary["near_unit_mass"].sel(statistic="mean").item() <= 1
        True

    See Also:
        `workbench.depth_thirds`: Computes means over thirds of the layers.
        `workbench.profile`: Computes the spectra of a model.
    """
    import xarray as xr

    _check_spectra(spectra)
    measures = _per_layer(spectra)
    with np.errstate(invalid="ignore"):
        parts = [
            measures.mean("layer", keep_attrs=True),
            measures.max("layer", keep_attrs=True),
            measures.min("layer", keep_attrs=True),
            measures.std("layer", keep_attrs=True),
        ]
    result = xr.concat(parts, dim="statistic", combine_attrs="override")
    return result.assign_coords(statistic=list(STATISTICS))


def depth_thirds(spectra: xr.Dataset) -> xr.Dataset:
    """Compute the mean of every per-layer measure over the early, middle and late third of the layers (RKSP).

    Args:
        spectra: A spectra dataset of at least three layers.

    Returns:
        Dataset with dim ``third`` (early, middle, late) in place of ``layer``; where the number of layers is not a
        multiple of three, the first thirds have one layer more.

    Raises:
        OptionError: If there are fewer than three layers.
        SchemaError: If ``spectra`` is not a spectra dataset.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("architecture"))
        >>> wb.depth_thirds(run["spectra"].to_dataset())["third"].values.tolist()
        ['early', 'middle', 'late']

    See Also:
        `workbench.summarize`: Computes statistics over all layers.
    """
    import xarray as xr

    _check_spectra(spectra)
    n_layers = spectra.sizes["layer"]
    if n_layers < len(THIRDS):
        raise OptionError(f"spectra must have at least {len(THIRDS)} layers to be divided into thirds, got {n_layers}.")
    parts = np.array_split(np.arange(n_layers), len(THIRDS))
    means = [_per_layer(spectra).isel(layer=part).mean("layer", keep_attrs=True) for part in parts]
    return xr.concat(means, dim="third", combine_attrs="override").assign_coords(third=list(THIRDS))


def _check_spectra(spectra: xr.Dataset) -> None:
    """Raise if a dataset has no layers."""
    if "layer" not in spectra.dims:
        raise SchemaError("The dataset has no dimension 'layer'; pass a dataset of wb.profile().")


def _per_layer(spectra: xr.Dataset) -> xr.Dataset:
    names = [name for name, v in spectra.data_vars.items() if "layer" in v.dims and "mode" not in v.dims]
    return spectra[names].astype(float)
