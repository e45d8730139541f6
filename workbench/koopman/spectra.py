"""Spectra of the layers of a model as one dataset, computed from their moments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from workbench.errors import SnapshotError
from workbench.io.progress import n_cores
from workbench.io.provenance import versions
from workbench.koopman.dmd import DmdOptions, whitened_operator
from workbench.koopman.kreiss import kreiss_from_modes
from workbench.koopman.measures import Thresholds, mass_fractions
from workbench.koopman.modes import eigenmodes, significant_digits
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.sketch import SnapshotSketch
from workbench.option_checks import PositiveInt
from workbench.schema.runs import SCHEMA_VERSION, SPECTRA, validate_spectra

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import ArrayLike
    from torch import Tensor


class RankWarning(UserWarning):
    """Warning that the states span fewer directions than the width of the stream, or than the requested rank.

    Example:
        >>> import warnings
        >>> import numpy as np
        >>> import workbench as wb
        >>> states = np.random.default_rng(0).normal(size=(8, 16))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     spectra = wb.koopman.whitened_dmd(states, 0.9 * states)
        >>> caught[0].category.__name__, spectra["rank"].item()
        ('RankWarning', 7)

    See Also:
        `workbench.koopman.whitened_dmd`: Issues it.
        `workbench.profile`: Issues it.
    """


class HasCounts(Protocol):
    """Number and width of the snapshots of a layer, and its name."""

    @property
    def n_snapshots(self) -> int:
        """Number of snapshots."""

    @property
    def n_features(self) -> int:
        """Width of the state."""

    @property
    def name(self) -> str:
        """Name of the layer."""


@dataclass(frozen=True)
class LayerSpectrum:
    """Eigenvalues, residuals and measures of one layer; names and units as in ``schema.SPECTRA``.

    Attributes:
        eigenvalue: As in `OperatorModes`.
        residual: As in `OperatorModes`.
        values: Measures that are one number per layer.
    """

    eigenvalue: np.ndarray
    residual: np.ndarray
    values: dict[str, float]


def layer_spectrum(moments: SnapshotMoments | SnapshotSketch, options: DmdOptions | None = None) -> LayerSpectrum:
    """Compute all measures of one layer from its moments (RKSP).

    Args:
        moments: Moments of at least three snapshots, or their sketch.
        options: Options, see `DmdOptions`.

    Returns:
        Eigenvalues and measures of the layer.

    Raises:
        SnapshotError: If there are too few snapshots, the states do not vary, or values are not finite.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> spectrum = wb.koopman.layer_spectrum(wb.koopman.SnapshotMoments(4).update(x, 0.5 * x))
        >>> round(spectrum.values["spectral_radius"], 3), spectrum.values["rank"]
        (0.5, 4)

    See Also:
        `workbench.koopman.layer_spectra`: Computes those of many layers in parallel.
        `workbench.koopman.whitened_dmd`: Computes a dataset from snapshots.
    """
    operator = whitened_operator(moments, options)
    modes = eigenmodes(operator)
    values = {
        "spectral_radius": float(np.abs(modes.eigenvalue).max()),
        "eigenvector_condition": modes.eigenvector_condition,
        "nonlinearity_ratio": float(operator.unexplained.sqrt()),
        "kreiss_constant": kreiss_from_modes(operator.matrix, modes),
        "rank": operator.rank,
        "energy_gain": operator.energy_gain,
        "update_norm": operator.update_norm,
        "covariance_condition": operator.covariance_condition,
        "significant_digits": significant_digits(operator, modes),
    }
    return LayerSpectrum(modes.eigenvalue, modes.residual, values)


def layer_spectra(
    moments: Sequence[SnapshotMoments | SnapshotSketch],
    options: DmdOptions | None = None,
    *,
    n_workers: PositiveInt | None = None,
    after_layer: Callable[[], Any] = lambda: None,
) -> list[LayerSpectrum]:
    """Compute `layer_spectrum` of many layers in parallel.

    LAPACK's general eigensolver gains little from a second core, and the layers are independent, so each layer is
    computed in one thread.

    Args:
        moments: One object per layer.
        options: Options, see `DmdOptions`.
        n_workers: Number of layers computed at a time; None uses all cores available to this process.
        after_layer: Called after each layer.

    Returns:
        One spectrum per layer, in the same order.

    Raises:
        SnapshotError: See `layer_spectrum`; the first layer without a spectrum ends the computation.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> layers = [wb.koopman.SnapshotMoments(4).update(x, factor * x) for factor in (0.5, 2.0)]
        >>> [round(layer.values["spectral_radius"], 3) for layer in wb.koopman.layer_spectra(layers)]
        [0.5, 2.0]

    See Also:
        `workbench.koopman.layer_spectrum`: Computes that of one layer.
        `workbench.profile`: Computes the spectra of a model.
    """
    n_workers = min(n_workers or n_cores(), len(moments)) or 1
    results = []
    with _single_threaded_workers(n_workers) as pool:
        for future in [pool.submit(layer_spectrum, m, options) for m in moments]:
            results.append(future.result())
            after_layer()
    return results


def as_dataset(
    layers: Sequence[LayerSpectrum],
    layer_names: Sequence[str],
    *,
    thresholds: Thresholds | None = None,
    options: DmdOptions | None = None,
    attrs: dict[str, Any] | None = None,
) -> xr.Dataset:
    """Combine the spectra of layers into one validated dataset.

    Args:
        layers: One spectrum per layer.
        layer_names: One name per layer.
        thresholds: Bounds of the masses; the paper's by default.
        options: Options of the spectra, stored as attributes.
        attrs: Provenance to add: subject, n_snapshots, token_selection, dtype, seed.

    Returns:
        Dataset with dims ``layer`` and ``mode``; layers with fewer modes are padded with NaN.
    """
    import xarray as xr

    thresholds, options = thresholds or Thresholds(), options or DmdOptions()
    n_modes = max(len(layer.eigenvalue) for layer in layers)
    eigenvalue = np.full((len(layers), n_modes), np.nan + 1j * np.nan)
    residual = np.full((len(layers), n_modes), np.nan)
    for i, layer in enumerate(layers):
        eigenvalue[i, : len(layer.eigenvalue)] = layer.eigenvalue
        residual[i, : len(layer.residual)] = layer.residual
    columns: dict[str, np.ndarray] = {
        "eigenvalue": eigenvalue,
        "residual": residual,
        "is_reliable": residual <= thresholds.reliable_residual,
        **mass_fractions(np.abs(eigenvalue), thresholds),
        **{name: np.array([layer.values[name] for layer in layers]) for name in layers[0].values},
    }
    columns["rank"] = columns["rank"].astype(np.int64)
    columns["is_informative"] = columns["update_norm"] > thresholds.informative_update
    variables = {
        name: (rule.dims, columns[name], {"long_name": rule.long_name, "units": rule.units, "meaning": rule.meaning})
        for name, rule in SPECTRA.items()
    }
    operator = "whitened DMD, all directions" if options.rank is None else f"randomized DMD, rank {options.rank}"
    provenance = {
        "schema_version": SCHEMA_VERSION,
        "subject": "unnamed",
        "n_snapshots": 0,
        "token_selection": "as given",
        **thresholds.as_attrs(),
        "ridge": float(options.ridge),
        "ridge_kind": options.ridge_kind,
        "rank_tolerance": float(options.rank_tolerance),
        "operator": operator,
        "dtype": "float64",
        "seed": options.seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    coords = {
        "layer": np.arange(len(layers)),
        "mode": np.arange(n_modes),
        "layer_name": ("layer", np.array(list(layer_names), dtype=str)),
    }
    return validate_spectra(xr.Dataset(variables, coords, {**provenance, **(attrs or {})}))


def whitened_dmd(
    X: ArrayLike | Tensor,
    Y: ArrayLike | Tensor,
    *,
    options: DmdOptions | None = None,
    thresholds: Thresholds | None = None,
    device: torch.device | str = "cpu",
) -> xr.Dataset:
    """Compute the Koopman spectrum of one layer from its snapshots (RKSP, whitened DMD).

    Args:
        X: States entering, shape (snapshot, feature), NumPy or torch, floating point.
        Y: States leaving, same shape; row i belongs to row i of ``X``.
        options: Ridge, rank and seed; see `DmdOptions`.
        thresholds: Bounds of the masses; the paper's by default.
        device: Device on which the moments are accumulated.

    Returns:
        Spectra dataset of one layer.

    Raises:
        SnapshotError: If the shapes disagree, there are fewer than three snapshots, the states are constant, or a
            value is not finite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> X = np.random.default_rng(0).normal(size=(64, 4))
        >>> spectra = wb.koopman.whitened_dmd(X, X @ np.diag([0.5, 0.9, 1.0, 1.2]))
        >>> abs(spectra["eigenvalue"]).values.round(3)
        array([[1.2, 1. , 0.9, 0.5]])

    See Also:
        `workbench.profile`: Computes the spectra of all layers of a model.
        `workbench.koopman.layer_spectrum`: Computes the spectrum from moments.
    """
    X, Y = torch.as_tensor(X), torch.as_tensor(Y)
    if X.ndim != 2:
        raise SnapshotError(
            f"X has shape {tuple(X.shape)}, expected (snapshot, feature); flatten batch and token into the first axis."
        )
    moments = SnapshotMoments(X.shape[1], device=device).update(X, Y)
    layer = layer_spectrum(moments, options)
    warn_if_rank_deficient([layer], [moments], options)
    attrs = {"n_snapshots": moments.n_snapshots, "dtype": str(X.dtype).removeprefix("torch.")}
    return as_dataset([layer], ["layer"], thresholds=thresholds, options=options, attrs=attrs)


def warn_if_rank_deficient(
    layers: Sequence[LayerSpectrum], moments: Sequence[HasCounts], options: DmdOptions | None
) -> None:
    """Issue one warning if layers have fewer modes than requested, because their states span fewer directions.

    One missing direction is expected with many snapshots, because states after a LayerNorm lie on a hyperplane.
    """
    width = moments[0].n_features
    expected = min(width, options.rank) if options and options.rank else width
    short = []
    for layer, seen in zip(layers, moments, strict=True):
        rank = layer.values["rank"]
        is_hyperplane = rank == width - 1 and seen.n_snapshots > 2 * width
        if rank < expected and not is_hyperplane:
            short.append((rank, seen.name))
    if short:
        rank, name = min(short)
        warnings.warn(
            f"The states of {len(short)} of {len(layers)} layers span fewer than {expected} directions (fewest: {rank} "
            f"in {name}), and the spectra are limited to their span; pass more distinct tokens.",
            RankWarning,
            stacklevel=3,
        )


@contextmanager
def _single_threaded_workers(n_workers: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool whose threads use one BLAS thread each; the settings of the caller are restored afterwards.

    After an error or an interrupt the pool does not wait for layers in progress, which may take minutes.
    """
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(n_workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        with _single_threaded_blas():
            yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        torch.set_num_threads(before)


def _single_threaded_blas() -> AbstractContextManager[object]:
    """Limit SciPy's BLAS, which is not that of torch, to one thread; without threadpoolctl only speed suffers."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        return nullcontext()
    return threadpool_limits(1, user_api="blas")
