"""Measures of a spectrum: mass fractions, their thresholds, and summaries over layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError

if TYPE_CHECKING:
    import xarray as xr

MASSES = ("near_unit_mass", "expansive_mass", "contractive_mass", "intermediate_mass")
THIRDS = ("early", "middle", "late")
STATISTICS = ("mean", "max", "min", "std")


@dataclass(frozen=True)
class Thresholds:
    """The bounds between kinds of modes (RKSP Eq. 12 and the related masses; all of unit 1).

    Attributes:
        near_unit_lower: Smallest modulus called near-unit, inclusive.
        near_unit_upper: Largest modulus called near-unit, inclusive; beyond it modes are expansive.
        contractive_upper: Modes of a smaller modulus are contractive, exclusive.
        reliable_residual: Largest residual of a reliable mode, inclusive.
        informative_update: Smallest update norm at which a spectrum says anything, exclusive. Ours, not the
            paper's: an identity initialization has every eigenvalue at 1 and no risk.

    Example:
        >>> import workbench as wb
        >>> thresholds = wb.Thresholds(near_unit_lower=0.95)
        >>> masses = wb.koopman.mass_fractions([0.5, 0.93, 1.0, 1.2], thresholds)
        >>> float(masses["near_unit_mass"])
        0.25
    """

    near_unit_lower: float = 0.90
    near_unit_upper: float = 1.05
    contractive_upper: float = 0.80
    reliable_residual: float = 0.10
    informative_update: float = 1e-3

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not np.isfinite(value) or value < 0:
                raise OptionError(f"Threshold {field.name} is {value}, expected a finite number of at least 0.")
        if not self.near_unit_lower < self.near_unit_upper:
            raise OptionError(
                f"near_unit_lower ({self.near_unit_lower:g}) must lie below near_unit_upper "
                f"({self.near_unit_upper:g}); move one of them."
            )
        if self.contractive_upper > self.near_unit_lower:
            raise OptionError(
                f"contractive_upper ({self.contractive_upper:g}) must not exceed near_unit_lower "
                f"({self.near_unit_lower:g}), or a mode would be of both kinds; move one of them."
            )

    @classmethod
    def of(cls, spectra: xr.Dataset) -> Thresholds:
        """The thresholds that a spectra dataset was made with."""
        return cls(**{field.name: float(spectra.attrs[field.name]) for field in fields(cls)})

    def as_attrs(self) -> dict[str, float]:
        """The thresholds as attributes of a dataset."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


def mass_fractions(modulus: np.ndarray, thresholds: Thresholds | None = None) -> dict[str, np.ndarray]:
    """Fractions of near-unit, expansive, contractive and intermediate modes (RKSP Eq. 12 and the masses beside it).

    With lower and upper the near-unit bounds and c the contractive one, they are the shares of the modes with
    lower <= |lambda| <= upper (near-unit), |lambda| > upper (expansive), |lambda| < c (contractive), and of all others
    (intermediate).

    Args:
        modulus: |lambda|, shape (..., mode), unit 1; NaN marks modes that do not exist or were filtered out.
        thresholds: Bounds of the masses; the paper's by default.

    Returns:
        One array of shape (...) for each name in ``MASSES``, in [0, 1] and adding up to 1; NaN where no mode is left.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> masses = wb.koopman.mass_fractions(np.array([0.5, 0.85, 1.0, 1.2]))
        >>> {name: float(share) for name, share in masses.items()}
        {'near_unit_mass': 0.25, 'expansive_mass': 0.25, 'contractive_mass': 0.25, 'intermediate_mass': 0.25}
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
    """Fraction of eigenvalues close to the unit circle, M = #{j: lower <= |lambda_j| <= upper} / #{j} (RKSP Eq. 12).

    Args:
        modulus: |lambda|, shape (mode,), unit 1; NaN marks unused modes.
        lower: Inclusive lower bound; the paper's 1 - eps_n.
        upper: Inclusive upper bound; the paper's 1 + eps_u.

    Returns:
        Fraction in [0, 1]; NaN if no mode is used.

    Raises:
        OptionError: If ``lower`` is not below ``upper``.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> wb.koopman.near_unit_mass(np.array([0.5, 0.95, 1.0, 1.2]))
        0.5
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
    """Apply other thresholds to spectra that are already there.

    Args:
        spectra: A spectra dataset, dims ``layer`` and ``mode`` (others may come first).
        near_unit_lower: Bound as in `Thresholds`; None keeps the value the spectra carry. Likewise the next four.
        near_unit_upper: Bound, likewise.
        contractive_upper: Bound, likewise.
        reliable_residual: Bound, likewise.
        informative_update: Bound, likewise.
        reliable_only: Count only the reliable modes in the masses.

    Returns:
        A new dataset with the masses, ``is_reliable``, ``is_informative`` and the threshold attributes replaced.

    Raises:
        OptionError: If the thresholds contradict each other.
        SchemaError: If it is no spectra dataset.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> states = np.random.default_rng(0).normal(size=(64, 4))
        >>> spectra = wb.koopman.whitened_dmd(states, 0.85 * states)
        >>> spectra["near_unit_mass"].item(), wb.remeasure(spectra, near_unit_lower=0.8)["near_unit_mass"].item()
        (0.0, 1.0)
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
    """Mean, maximum, minimum and standard deviation over layers of every per-layer measure (RKSP).

    Args:
        spectra: A spectra dataset.

    Returns:
        Dataset with dim ``statistic`` (mean, max, min, std) in place of ``layer``; one variable for each measure of
        dims (layer,), booleans as fractions. The risk score of the paper is ``near_unit_mass`` at ``mean``.
        Layers whose measure is NaN are left out; an infinite one makes mean and max infinite and std NaN.

    Raises:
        SchemaError: If it is no spectra dataset.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256, progress=False)
        >>> score = wb.summarize(spectra)["near_unit_mass"].sel(statistic="mean")
        >>> 0 <= score.item() <= 1
        True
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
    """Mean of every per-layer measure over the early, middle and late third of the layers (RKSP, depth tables).

    Args:
        spectra: A spectra dataset of at least three layers.

    Returns:
        Dataset with dim ``third`` (early, middle, late) in place of ``layer``; where the number of layers is no
        multiple of three the first thirds get one more.

    Raises:
        OptionError: If there are fewer than three layers.
        SchemaError: If it is no spectra dataset.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=3, n_heads=2)
        >>> spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256, progress=False)
        >>> wb.depth_thirds(spectra)["third"].values.tolist()
        ['early', 'middle', 'late']
    """
    import xarray as xr

    _check_spectra(spectra)
    n_layers = spectra.sizes["layer"]
    if n_layers < len(THIRDS):
        raise OptionError(f"There are {n_layers} layers, expected at least 3 to speak of thirds.")
    parts = np.array_split(np.arange(n_layers), len(THIRDS))
    means = [_per_layer(spectra).isel(layer=part).mean("layer", keep_attrs=True) for part in parts]
    return xr.concat(means, dim="third", combine_attrs="override").assign_coords(third=list(THIRDS))


def _check_spectra(spectra: Any) -> None:
    """Refuse what is not a dataset with layers, such as the whole run that holds one.

    Raises:
        SchemaError: That names what to pass.
    """
    import xarray as xr

    if isinstance(spectra, xr.DataTree):
        part = 'run["spectra"].to_dataset()'
        raise SchemaError(f"The spectra are a DataTree, expected a dataset; pass its part, such as {part}.")
    if not isinstance(spectra, xr.Dataset):
        raise SchemaError(f"The spectra are of type {type(spectra).__name__}, expected a dataset of wb.profile().")
    if "layer" not in spectra.dims:
        raise SchemaError("The dataset has no dimension 'layer', expected spectra; pass a dataset of wb.profile().")


def _per_layer(spectra: xr.Dataset) -> xr.Dataset:
    names = [name for name, v in spectra.data_vars.items() if "layer" in v.dims and "mode" not in v.dims]
    return spectra[names].astype(float)
