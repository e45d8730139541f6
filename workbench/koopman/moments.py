"""Snapshot moments, from which all spectra follow, in memory that does not grow with the number of snapshots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.errors import SnapshotError
from workbench.option_kinds import PositiveInt

#: Number of rows that are converted to float64 at a time, so that a long batch is never copied completely.
CHUNK = 4096


def device_for_float64(device: torch.device | str) -> torch.device:
    """Return the device if it supports float64, as CPUs and CUDA devices do; else the host."""
    device = torch.device(device)
    return device if device.type in ("cpu", "cuda", "meta") else torch.device("cpu")


def check_snapshots(x: Tensor, y: Tensor, n_features: int, name: str) -> None:
    """Raise if snapshots have the wrong shape or kind."""
    if x.ndim != 2 or x.shape != y.shape or x.shape[1] != n_features:
        raise SnapshotError(
            f"Snapshots of {name} have shapes {tuple(x.shape)} and {tuple(y.shape)}, expected two arrays of shape "
            f"(snapshot, {n_features}); flatten batch and token into the first axis."
        )
    if not (x.is_floating_point() and y.is_floating_point()):
        raise SnapshotError(f"Snapshots of {name} have the types {x.dtype} and {y.dtype}; convert them to real floats.")
    if x.is_meta or y.is_meta:
        raise SnapshotError(f"Snapshots of {name} are on the meta device, without values; load the parameters first.")


def not_finite(name: str) -> SnapshotError:
    """Create the error for a layer that holds NaN or infinite values."""
    return SnapshotError(
        f"The residual stream holds NaN or infinite values in {name}; profile an earlier checkpoint or "
        "load the parameters in float32."
    )


class SnapshotMoments:
    """Running means and centered second moments of snapshot pairs (x, y), in float64.

    A pair is stored as the state x and its update d = y - x. Where a block changes its input little, y'y - x'x loses
    the digits that d'd keeps. The moments of y follow from them (``c_yx``, ``c_yy``).

    If the device does not support float64 (Apple's, for example), the snapshots are moved to the host, where the
    moments are kept.

    Moments are added over batches and devices (Chan, Golub & LeVeque 1983), so memory is O(feature^2).

    Attributes:
        n_features: Width of the state.
        n_snapshots: Snapshots seen so far.
        name: Name of the layer of the snapshots, for error messages.
        mean_x: Mean state, shape (feature,).
        mean_d: Mean update, shape (feature,).
        resolution: Relative spacing of the coarsest dtype that the snapshots came in.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        >>> moments = wb.koopman.SnapshotMoments(4).update(x[:32], 0.9 * x[:32])
        >>> moments.update(x[32:], 0.9 * x[32:]).n_snapshots
        64

    See Also:
        `workbench.koopman.layer_spectrum`: Computes the spectrum from the moments.
        `workbench.koopman.SnapshotSketch`: Needs less memory for wide layers.
    """

    def __init__(self, n_features: PositiveInt, *, device: torch.device | str = "cpu", name: str = "the layer") -> None:
        self.n_features = n_features
        self.name = name
        self.n_snapshots = 0
        self.resolution = torch.finfo(torch.float64).eps
        options: dict[str, Any] = {"dtype": torch.float64, "device": device_for_float64(device)}
        self.mean_x = torch.zeros(n_features, **options)
        self.mean_d = torch.zeros(n_features, **options)
        self._sum_xx = torch.zeros(n_features, n_features, **options)
        self._sum_dx = torch.zeros(n_features, n_features, **options)
        self._sum_dd = torch.zeros(n_features, n_features, **options)

    @property
    def n_bytes(self) -> int:
        """Memory of the moments, in bytes."""
        return 3 * self._sum_xx.nbytes

    @property
    def is_finite(self) -> Tensor:
        """Whether all values so far are finite, as a boolean tensor on the device.

        A sum is finite only if every term is, so it suffices to check the means.
        """
        return torch.isfinite(self.mean_x).all() & torch.isfinite(self.mean_d).all()

    def update(self, x: Tensor, y: Tensor, *, check_finite: bool = True) -> SnapshotMoments:
        """Add snapshots.

        Args:
            x: States entering, shape (snapshot, feature), any floating dtype.
            y: States leaving, same shape; row i belongs to row i of ``x``.
            check_finite: Raise if a value is not finite, for which the host waits for the device. If False, such values
                are added, and `is_finite` becomes False.

        Returns:
            Itself.

        Raises:
            SnapshotError: If the shapes disagree or a value is NaN or infinite; nothing is added then.
        """
        check_snapshots(x, y, self.n_features, self.name)
        parts = [_Part.of(x[i : i + CHUNK], y[i : i + CHUNK], self.mean_x.device) for i in range(0, len(x), CHUNK)]
        if check_finite and not all(
            bool(torch.isfinite(part.mean_x).all() & torch.isfinite(part.mean_d).all()) for part in parts
        ):
            raise not_finite(self.name)
        self.resolution = max(self.resolution, torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps)
        for part in parts:
            self._add(part)
        return self

    def merge(self, other: SnapshotMoments) -> SnapshotMoments:
        """Add the snapshots of another object, such as that of another device for the same layer.

        Args:
            other: Moments of the same width; it is not changed.

        Returns:
            Itself.

        Raises:
            SnapshotError: If the widths differ.
        """
        if other.n_features != self.n_features:
            raise SnapshotError(
                f"Moments of width {other.n_features} do not fit those of width {self.n_features}; merge one layer."
            )
        self.resolution = max(self.resolution, other.resolution)
        device = self.mean_x.device
        moved = (t.to(device) for t in (other.mean_x, other.mean_d, other._sum_xx, other._sum_dx, other._sum_dd))
        self._add(_Part(other.n_snapshots, *moved))
        return self

    def _add(self, part: _Part) -> None:
        if part.n == 0:
            return
        total = self.n_snapshots + part.n
        shift_x = part.mean_x - self.mean_x
        shift_d = part.mean_d - self.mean_d
        weight = self.n_snapshots * part.n / total
        self._sum_xx.add_(part.sum_xx).addr_(shift_x, shift_x, alpha=weight)
        self._sum_dx.add_(part.sum_dx).addr_(shift_d, shift_x, alpha=weight)
        self._sum_dd.add_(part.sum_dd).addr_(shift_d, shift_d, alpha=weight)
        self.mean_x.add_(shift_x, alpha=part.n / total)
        self.mean_d.add_(shift_d, alpha=part.n / total)
        self.n_snapshots = total

    @property
    def c_xx(self) -> Tensor:
        """Covariance of the state, shape (feature, feature)."""
        return self._sum_xx / (self.n_snapshots - 1)

    @property
    def c_dx(self) -> Tensor:
        """Cross-covariance of update and state, shape (feature of d, feature of x)."""
        return self._sum_dx / (self.n_snapshots - 1)

    @property
    def c_dd(self) -> Tensor:
        """Covariance of the update, shape (feature, feature)."""
        return self._sum_dd / (self.n_snapshots - 1)

    @property
    def mean_y(self) -> Tensor:
        """Mean state leaving, shape (feature,)."""
        return self.mean_x + self.mean_d

    @property
    def c_yx(self) -> Tensor:
        """Cross-covariance of the states leaving and entering, shape (feature of y, feature of x)."""
        return self.c_dx + self.c_xx

    @property
    def c_yy(self) -> Tensor:
        """Covariance of the state leaving, shape (feature, feature)."""
        return self.c_dd + self.c_dx + self.c_dx.T + self.c_xx


class _Part:
    """Centered sums of one chunk."""

    def __init__(self, n: int, mean_x: Tensor, mean_d: Tensor, sum_xx: Tensor, sum_dx: Tensor, sum_dd: Tensor) -> None:
        self.n = n
        self.mean_x, self.mean_d = mean_x, mean_d
        self.sum_xx, self.sum_dx, self.sum_dd = sum_xx, sum_dx, sum_dd

    @classmethod
    def of(cls, x: Tensor, y: Tensor, device: torch.device) -> _Part:
        # Moved before the conversion, because the device of the snapshots may not support float64.
        x = x.to(device).to(torch.float64)
        d = y.to(device).to(torch.float64) - x
        mean_x, mean_d = x.mean(0), d.mean(0)
        x, d = x - mean_x, d - mean_d
        return cls(len(x), mean_x, mean_d, x.T @ x, d.T @ x, d.T @ d)
