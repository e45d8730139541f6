"""Snapshots of one layer, kept unchanged or as a sketch, in memory linear in its width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SnapshotError
from workbench.io.memory import give_back
from workbench.koopman.moments import check_snapshots, device_for_float64, not_finite
from workbench.option_kinds import PositiveInt

#: Random directions beyond the rank in the range finder, and its power iterations (Halko, Martinsson & Tropp 2011).
_EXTRA, _N_ITERATIONS = 10, 4
#: Directions that a sketch keeps, as a multiple of the requested rank.
OVERSAMPLING = 4


@dataclass(frozen=True)
class PrincipalMoments:
    """Second moments of states x and updates d = y - x in the principal directions of x, variances increasing."""

    variance: Tensor  # variances of x along the directions, shape (m,)
    c_dx: Tensor  # cross-covariance of update and state in the directions, shape (m of d, m of x)
    c_dd: Tensor  # covariance of the update in the directions, shape (m, m)
    update_outside: Tensor  # variance of the update in the remaining directions
    explained_outside: Tensor  # part of it that a linear map of the states explains, in units of the variances
    n_outside: int  # number of remaining directions


class SnapshotSketch:
    """Snapshot pairs (x, y) of one layer, for a wide stream with few snapshots or a small rank.

    Up to ``n_features`` snapshots are kept unchanged, and their spectra are those of the exact moments. Further
    snapshots need a rank: all are then replaced by their moments in the leading ``4 rank`` directions of x, which are
    updated as more snapshots arrive (incremental principal component analysis: Ross, Lim, Lin & Yang 2008); the total
    variance stays exact. The leading eigenvalues are then close to those of the exact moments: for random snapshots
    whose variances decay as j^-0.5, j^-1, j^-1.5 and j^-2, within 0.06, 0.04, 0.015 and 0.01
    (``tests/koopman/test_sketch.py``).

    Memory is O(feature * min(snapshot, feature)) in the dtype of the snapshots, then O(feature * rank).

    Args:
        n_features: Width of the state.
        rank: Number of leading directions; None uses all and accepts at most ``n_features`` snapshots.
        seed: Seed of the randomized range finder.
        device: Device on which the snapshots are kept; the host if it does not support float64.
        name: Name of the layer of the snapshots, for error messages.

    Attributes:
        n_features: Width of the state.
        device: Device on which the snapshots are kept.
        n_snapshots: Snapshots seen so far.
        name: Name of the layer.
        resolution: Relative spacing of the coarsest dtype that the snapshots came in.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
        >>> sketch = wb.koopman.SnapshotSketch(96, rank=4).update(x, 0.5 * x)
        >>> spectrum = wb.koopman.layer_spectrum(sketch, wb.DmdOptions(rank=4))
        >>> round(spectrum.values["spectral_radius"], 3), spectrum.values["rank"]
        (0.5, 4)

    See Also:
        `workbench.koopman.layer_spectrum`: Computes the spectrum of a sketch.
        `workbench.koopman.SnapshotMoments`: Keeps the exact moments.
    """

    def __init__(
        self,
        n_features: PositiveInt,
        *,
        rank: PositiveInt | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        name: str = "the layer",
    ) -> None:
        self.n_features, self.device = n_features, device_for_float64(device)
        self.name = name
        self.n_snapshots = 0
        self.resolution = torch.finfo(torch.float64).eps
        self._rank, self._seed = rank, seed
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._moments: _Moments | None = None
        self._are_finite: list[Tensor] = []

    @property
    def is_finite(self) -> Tensor:
        """Whether all values so far are finite, as in `SnapshotMoments.is_finite`."""
        return torch.stack(self._are_finite or [torch.tensor(True)]).all()

    def update(self, x: Tensor, y: Tensor, *, check_finite: bool = True) -> SnapshotSketch:
        """Add snapshots.

        Args:
            x: States entering, shape (snapshot, feature), any floating dtype; kept without a copy, so do not write to
                them.
            y: States leaving, same shape; row i belongs to row i of ``x``.
            check_finite: Raise if a value is not finite, for which the host waits for the device. If False, such values
                are added, and `is_finite` becomes False.

        Returns:
            Itself.

        Raises:
            SnapshotError: If the shapes disagree, a value is NaN or infinite, or there are more snapshots than features
                and no rank; nothing is added then.
        """
        check_snapshots(x, y, self.n_features, self.name)
        x, y = x.to(self.device), y.to(self.device)
        is_finite = torch.isfinite(x.sum(0, dtype=torch.float64) + y.sum(0, dtype=torch.float64)).all()
        if check_finite and not bool(is_finite):
            raise not_finite(self.name)
        if self._rank is None and self.n_snapshots + len(x) > self.n_features:
            raise SnapshotError(
                f"A sketch without a rank takes at most as many snapshots as features, {self.n_features} of "
                f"{self.name}; pass a rank, or use SnapshotMoments."
            )
        self.resolution = max(self.resolution, torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps)
        self._are_finite = [torch.stack([*self._are_finite, is_finite]).all()]
        for i in range(0, len(x), self.n_features):
            part = x[i : i + self.n_features].detach(), y[i : i + self.n_features].detach()
            if self._n_kept and self._n_kept + len(part[0]) > self.n_features:
                if not bool(self.is_finite):  # on such values LAPACK may hang
                    raise not_finite(self.name)
                self._moments, self._kept = self._gathered(), []
            self._kept.append(part)
        self.n_snapshots += len(x)
        return self

    @property
    def n_bytes(self) -> int:
        """Memory of the snapshots, in bytes."""
        return sum(x.nbytes + y.nbytes for x, y in self._kept)

    @property
    def _n_kept(self) -> int:
        return sum(len(x) for x, _ in self._kept)

    def principal_moments(self, rank: int | None, rank_tolerance: float) -> PrincipalMoments:
        """Return the moments in the leading directions.

        Args:
            rank: Number of directions; None uses all in which the states vary.
            rank_tolerance: Directions with less than this fraction of the largest variance are dropped.

        Raises:
            SnapshotError: If the rank exceeds that of the sketch.
        """
        if self._rank is not None and (rank is None or rank > self._rank):
            raise SnapshotError.of(
                "rank", rank, f"at most {self._rank}, the rank of the sketch", remedy="create the sketch with this rank"
            )
        found = self._gathered(n_directions=rank)
        n = self.n_snapshots - 1
        variance = found.sum_xx / n
        is_used = variance > rank_tolerance * variance[-1]
        is_used[: len(variance) - (rank or len(variance))] = False
        variance = variance[is_used]
        c_dx, c_dd = (sums[is_used][:, is_used].div_(n) for sums in (found.sum_dx, found.sum_dd))
        outside = (found.totals.total_d / n - c_dd.diagonal().sum()).clamp(min=0)
        explained = torch.zeros_like(outside)
        if rank is None:  # columns of C_dx over all features, less the part in the directions
            beyond = (found.full_dx[:, is_used] / n).square().sum(0) - c_dx.square().sum(0)
            explained = (beyond.clamp(min=0) / variance).sum()
        return PrincipalMoments(variance, c_dx, c_dd, outside, explained, self.n_features - len(variance))

    def total_variance(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the traces of the covariances of states and updates, and the squared norm of the mean state."""
        totals, n = self._centered()[0], max(self.n_snapshots - 1, 1)
        return totals.total_x / n, totals.total_d / n, totals.mean_x.square().sum()

    def _centered(self) -> tuple[_Totals, Tensor, Tensor]:
        """Return the totals over all snapshots, and the kept states and updates less their mean, one per row."""
        x = torch.cat([x for x, _ in self._kept]).double()
        d = torch.cat([y for _, y in self._kept]).double().sub_(x)
        n, mean_x, mean_d = len(x), x.mean(0), d.mean(0)
        x.sub_(mean_x)
        d.sub_(mean_d)
        total_x, total_d = x.square().sum(), d.square().sum()
        if (before := self._moments) is None:
            return _Totals(n, mean_x, mean_d, total_x, total_d), x, d
        seen = before.totals
        total = seen.n + n
        weight = (seen.n * n / total) ** 0.5  # Chan, Golub & LeVeque 1983
        shift_x, shift_d = mean_x - seen.mean_x, mean_d - seen.mean_d
        x, d = torch.cat([x, weight * shift_x[None]]), torch.cat([d, weight * shift_d[None]])
        mean_x, mean_d = seen.mean_x + shift_x * (n / total), seen.mean_d + shift_d * (n / total)
        total_x, total_d = seen.total_x + x.square().sum(), seen.total_d + d.square().sum()
        return _Totals(total, mean_x, mean_d, total_x, total_d), x, d

    def _gathered(self, n_directions: int | None = None) -> _Moments:
        """Reduce all snapshots to moments in leading directions, by default as many as the sketch keeps."""
        totals, x, d = self._centered()
        before = self._moments
        if self._rank is None:
            basis = _row_space(x)
        elif before is None:
            n_directions = n_directions or OVERSAMPLING * self._rank
            basis = _leading_rows(x, min(n_directions, self.n_features), self._seed)
        else:
            scale = before.sum_xx.clamp(min=0).sqrt()
            rows = torch.cat([x, scale[:, None] * before.basis.T])
            basis = _leading_rows(rows, min(OVERSAMPLING * self._rank, self.n_features), self._seed)
        # Each of these may take as much memory as all snapshots, so they are deleted as soon as possible.
        in_x, in_d = x @ basis, d @ basis
        del x
        sum_dd, sum_dx, sum_xx = in_d.T @ in_d, in_d.T @ in_x, in_x.T @ in_x
        del in_d
        if before is not None:
            turn = basis.T @ before.basis
            sum_xx += (turn * before.sum_xx) @ turn.T
            sum_dx += turn @ before.sum_dx @ turn.T
            sum_dd += turn @ before.sum_dd @ turn.T
        variance, rotation = torch.linalg.eigh(sum_xx)
        del sum_xx
        give_back(rotation.nbytes)
        sum_dx = rotation.T @ sum_dx @ rotation
        sum_dd = rotation.T @ sum_dd @ rotation
        if self._rank is not None:
            return _Moments(totals, basis @ rotation, variance, sum_dx, sum_dd, basis[:0])
        del basis  # without a rank, snapshots are never merged into these moments
        return _Moments(totals, in_x[:0], variance, sum_dx, sum_dd, d.T @ (in_x @ rotation))


@dataclass(frozen=True)
class _Totals:
    """Number, means and sums of squares of all snapshots so far."""

    n: int
    mean_x: Tensor
    mean_d: Tensor
    total_x: Tensor
    total_d: Tensor


@dataclass(frozen=True)
class _Moments:
    """Centered sums over snapshots in the principal directions of x, the columns of ``basis``, variances increasing.

    The sums of x are diagonal. ``full_dx`` has rows for all features and is empty unless all snapshots are kept;
    ``basis`` is empty if they are.
    """

    totals: _Totals
    basis: Tensor
    sum_xx: Tensor
    sum_dx: Tensor
    sum_dd: Tensor
    full_dx: Tensor


def _row_space(rows: Tensor) -> Tensor:
    """Compute orthonormal directions that span the rows, largest variance first, shape (feature, row)."""
    variance, left = torch.linalg.eigh(rows @ rows.T)
    give_back(rows.nbytes)
    left /= variance.clamp(min=torch.finfo(rows.dtype).tiny).sqrt()
    directions = left.T @ rows
    del left
    # The Gram matrix yields inaccurate directions of small variance; QR makes them orthogonal to the others.
    return torch.linalg.qr(directions.flip(0).T).Q


def _leading_rows(rows: Tensor, n_directions: int, seed: int) -> Tensor:
    """Find the leading directions with power iterations (Halko, Martinsson & Tropp 2011, Algorithm 4.4)."""
    generator = torch.Generator().manual_seed(seed)
    width = min(n_directions + _EXTRA, rows.shape[1])
    start: Any = torch.randn(rows.shape[1], width, dtype=rows.dtype, generator=generator)
    basis = start.to(rows.device)
    for _ in range(_N_ITERATIONS):
        basis = torch.linalg.qr(rows.T @ (rows @ basis)).Q
    _, rotation = torch.linalg.eigh((rows @ basis).T @ (rows @ basis))
    return (basis @ rotation)[:, -n_directions:]
