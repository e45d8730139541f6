"""Spectra of the layers of a model as one dataset, computed from their moments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.errors import SnapshotError
from workbench.io.progress import n_cores
from workbench.io.provenance import versions
from workbench.koopman.dmd import DmdOptions, whitened_operator
from workbench.koopman.measures import Thresholds, mass_fractions
from workbench.koopman.modes import eigenmodes, significant_digits
from workbench.koopman.moments import SnapshotMoments
from workbench.koopman.sketch import SnapshotSketch
from workbench.option_checks import checked
from workbench.option_kinds import PositiveFloat, PositiveInt
from workbench.schema.runs import SCHEMA_VERSION, SPECTRA, validate_spectra

if TYPE_CHECKING:
    import xarray as xr
    from numpy.typing import ArrayLike
    from torch import Tensor

    from workbench.koopman.modes import OperatorModes


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


@dataclass(frozen=True)
class LayerSpectrum:
    """Eigenvalues, residuals and measures of one layer; names and units as in ``schema.SPECTRA``."""

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
    """Combine the spectra of layers into one validated dataset, padded with NaN; ``attrs`` add provenance."""
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
        raise SnapshotError(f"X has shape {tuple(X.shape)}, expected (snapshot, feature); flatten batch and token.")
    moments = SnapshotMoments(X.shape[1], device=device).update(X, Y)
    layer = layer_spectrum(moments, options)
    warn_if_rank_deficient([layer], [moments], options)
    attrs = {"n_snapshots": moments.n_snapshots, "dtype": str(X.dtype).removeprefix("torch.")}
    return as_dataset([layer], ["layer"], thresholds=thresholds, options=options, attrs=attrs)


def warn_if_rank_deficient(layers: Sequence[LayerSpectrum], moments: Sequence[Any], options: DmdOptions | None) -> None:
    """Warn once of layers with fewer modes than requested; one missing is expected, as after a LayerNorm."""
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
    """Yield a pool whose threads use one BLAS thread each; after an error it does not wait for layers in progress."""
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


#: Distances |z| - 1 of the initial scan.
_DISTANCES = (0.003, 0.02, 0.1, 0.4, 1.5)
_AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
_N_PEAKS = 6
_N_CLIMBS = 10
#: Largest eigenvector condition at which products with V and its inverse replace solving with zI - A.
_TRUSTED_CONDITION = 1e7


@checked
def kreiss_constant(operator: np.ndarray | Tensor, *, tolerance: PositiveFloat = 1e-6) -> float:
    """Compute a lower bound of K(A) = sup over |z| > 1 of (|z| - 1) |(zI - A)^-1|_2 (RKSP).

    At any z and for any vector w, |(zI - A)^-1| >= |w| / |(zI - A) w|, so each value evaluated is at most K(A); the
    largest one is returned. The search scans the angles of the outer eigenvalues and equally spaced angles, then climbs
    from the best points. On small matrices the result is within 1 % of a dense grid search
    (tests/koopman/test_kreiss.py); where many peaks are close, the error may be larger.

    Args:
        operator: A, real, shape (mode, mode).
        tolerance: The search covers |z| >= 1 + tolerance; K is infinite if an eigenvalue has a modulus above
            1 + tolerance.

    Returns:
        At least 1; inf if the spectral radius exceeds 1 + tolerance.

    Raises:
        SnapshotError: If the operator is not a square, finite matrix.
        OptionError: If the tolerance is not positive.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> round(wb.koopman.kreiss_constant(np.diag([0.5, 0.9])), 3)
        1.0
        >>> wb.koopman.kreiss_constant(np.array([[0.9, 5.0], [0.0, 0.9]])) > 10
        True
        >>> wb.koopman.kreiss_constant(np.diag([0.5, 1.1]))
        inf

    See Also:
        `workbench.koopman.eigenmodes`: Computes the eigenvalues and their condition.
        `workbench.koopman.layer_spectrum`: Computes all measures of a layer.
    """
    A = torch.as_tensor(operator, dtype=torch.float64)
    if A.ndim != 2 or A.shape[0] != A.shape[1] or not bool(torch.isfinite(A).all()):
        raise SnapshotError.of("operator", A, "a square matrix of finite numbers")
    eigenvalue, right = torch.linalg.eig(A)
    condition = float(torch.linalg.cond(right))
    left = torch.linalg.inv(right) if condition < _TRUSTED_CONDITION else None
    return _search(A, eigenvalue, right, left, tolerance)


def kreiss_from_modes(operator: Tensor, modes: OperatorModes, *, tolerance: float = 1e-6) -> float:
    """Compute `kreiss_constant` of an operator whose modes are known."""
    A = operator.detach().to(modes.right.device)
    return _search(A, torch.from_numpy(modes.eigenvalue).to(A.device), modes.right, modes.left, tolerance)


def _search(A: Tensor, eigenvalue: Tensor, right: Tensor, left: Tensor | None, tolerance: float) -> float:
    modulus = eigenvalue.abs().cpu().numpy()
    if modulus.max() > 1 + tolerance:
        return float("inf")
    resolvent = _Resolvent(A, eigenvalue, right, left)
    gap = np.clip(1 - modulus.max(), tolerance, 1.0)
    distance = np.unique(np.concatenate([np.maximum(_DISTANCES, tolerance), [gap, tolerance]]))
    angle = _angles(eigenvalue.cpu().numpy())
    grid = np.stack(np.meshgrid(np.log(distance), angle, indexing="ij"), axis=-1)
    value, vector = resolvent.lower_bound(_point(grid.reshape(-1, 2)), n_iterations=3)
    start = _peaks(value.reshape(grid.shape[:2]))[:_N_PEAKS]
    position, best, vector = grid.reshape(-1, 2)[start], value[start], vector[:, start]
    highest = max(1.0, float(value.max()))
    compass = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
    step = np.tile([0.6, np.pi / 36], (len(position), 1))
    for _ in range(_N_CLIMBS):
        trial = position[:, None] + compass * step[:, None]
        trial[..., 0] = np.maximum(trial[..., 0], np.log(tolerance))
        found, vector = resolvent.lower_bound(
            _point(trial.reshape(-1, 2)), n_iterations=2, start=vector.repeat_interleave(len(compass), dim=1)
        )
        found = found.reshape(-1, len(compass))
        choice, row = found.argmax(1), np.arange(len(position))
        position, best = trial[row, choice], found[row, choice]
        vector = vector[:, row * len(compass) + choice]
        highest = max(highest, float(best.max()))
        step[choice == 0] /= 2
    return highest


def _peaks(value: np.ndarray) -> np.ndarray:
    """Return the flat indices of the local maxima of a grid (distance, angle), highest first."""
    padded = np.pad(value, 1, constant_values=-np.inf)
    neighbors = [padded[1 + i : padded.shape[0] - 1 + i, 1 + j : padded.shape[1] - 1 + j] for i, j in _AROUND]
    index = np.flatnonzero(value >= np.max(neighbors, axis=0))
    return index[np.argsort(-value.ravel()[index])]


def _point(position: np.ndarray) -> np.ndarray:
    """Return the points z at positions (log(|z| - 1), angle), shape (point, 2)."""
    return (1 + np.exp(position[:, 0])) * np.exp(1j * position[:, 1])


def _angles(eigenvalue: np.ndarray, n_spaced: int = 25, n_outer: int = 12) -> np.ndarray:
    """Return the angles in [0, pi] to scan; the resolvent of a real operator is symmetric about the real axis."""
    outer = eigenvalue[np.argsort(-np.abs(eigenvalue))]
    outer = outer[outer.imag >= 0][:n_outer]
    return np.unique(np.round(np.concatenate([np.angle(outer), np.linspace(0, np.pi, n_spaced)]), 6))


class _Resolvent:
    """Power iteration on (zI - A)^-1 for many z at once.

    The iteration runs in single precision where V is well-conditioned. Its final vector w gives a valid bound in any
    case, because the bound is evaluated with A in double precision.
    """

    def __init__(self, A: Tensor, eigenvalue: Tensor, right: Tensor, left: Tensor | None) -> None:
        self.A = A
        is_benign = left is not None and float(torch.linalg.norm(right) * torch.linalg.norm(left)) < 1e4 * len(A)
        working = torch.complex64 if is_benign else torch.complex128
        self.eigenvalue, self.right = eigenvalue[:, None], right.to(working)
        self.left = None if left is None else left.to(working)
        generator = torch.Generator().manual_seed(0)
        self.first = torch.randn(len(A), 1, dtype=A.dtype, generator=generator).to(A.device)

    def lower_bound(self, z: np.ndarray, n_iterations: int, start: Tensor | None = None) -> tuple[np.ndarray, Tensor]:
        """Compute (|z| - 1) |w| / |(zI - A) w|, shape (point,), and w by power iteration, shape (mode, point)."""
        points = torch.from_numpy(z).to(self.A.device)
        inverse = (1 / (points - self.eigenvalue)).to(self.right.dtype)
        w = (self.first.expand(-1, len(z)) if start is None else start).to(self.right.dtype)
        if start is None:
            w = self._solve(points, inverse, w)
        for _ in range(n_iterations - 1):
            x = self._solve_adjoint(points, inverse, w / torch.linalg.norm(w, dim=0))
            w = self._solve(points, inverse, x / torch.linalg.norm(x, dim=0))
        exact = (w / torch.linalg.norm(w, dim=0)).to(torch.complex128)
        image = points * exact - torch.complex(self.A @ exact.real, self.A @ exact.imag)
        value = (points.abs() - 1) * torch.linalg.norm(exact, dim=0) / torch.linalg.norm(image, dim=0)
        return torch.nan_to_num(value, nan=0.0, posinf=0.0).cpu().numpy(), w

    def _solve(self, z: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
        if self.left is not None:
            return self.right @ (inverse * (self.left @ x))
        return torch.linalg.solve(self._shifted(z), x.T.unsqueeze(-1)).squeeze(-1).T

    def _solve_adjoint(self, z: Tensor, inverse: Tensor, x: Tensor) -> Tensor:
        if self.left is not None:
            return self.left.mH @ (inverse.conj() * (self.right.mH @ x))
        return torch.linalg.solve(self._shifted(z).mH, x.T.unsqueeze(-1)).squeeze(-1).T

    def _shifted(self, z: Tensor) -> Tensor:
        identity = torch.eye(len(self.A), dtype=self.right.dtype, device=self.A.device)
        return z[:, None, None] * identity - self.A.to(self.right.dtype)
