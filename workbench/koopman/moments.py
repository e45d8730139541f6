"""The snapshot moments: all that the spectra need to know about N snapshots, in memory that does not grow with N."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import SnapshotError

if TYPE_CHECKING:
    from torch import Tensor

#: Rows converted to float64 at a time, so that a long batch costs no second copy of itself.
CHUNK = 4096


def device_for_float64(device: torch.device | str) -> torch.device:
    """The device itself if it has float64, as CPUs and CUDA do; else the host."""
    device = torch.device(device)
    return device if device.type in ("cpu", "cuda", "meta") else torch.device("cpu")


def check_snapshots(x: Tensor, y: Tensor, n_features: int, name: str) -> None:
    """Refuse snapshots of a wrong shape or kind.

    Args:
        x: States entering.
        y: States leaving.
        n_features: Width of the state.
        name: Name of the layer, for the message.

    Raises:
        SnapshotError: If they are no two arrays (snapshot, feature) of floating-point numbers.
    """
    if x.ndim != 2 or x.shape != y.shape or x.shape[1] != n_features:
        raise SnapshotError(
            f"Snapshots of {name} have shapes {tuple(x.shape)} and {tuple(y.shape)}, expected two arrays "
            f"(snapshot, {n_features}); flatten batch and token into the first axis."
        )
    if not (x.is_floating_point() and y.is_floating_point()):
        raise SnapshotError(f"Snapshots of {name} are {x.dtype} and {y.dtype}, expected real floating point.")
    if x.is_meta or y.is_meta:
        raise SnapshotError(f"Snapshots of {name} are on the meta device and hold no values; load weights first.")


def not_finite(name: str) -> SnapshotError:
    """An error that says that a layer holds NaN or infinite values."""
    return SnapshotError(
        f"The residual stream holds NaN or infinite values in {name}; profile an earlier checkpoint or "
        "load the weights in float32."
    )


class SnapshotMoments:
    """Running means and centred second moments of snapshot pairs (x, y), in float64.

    The pair is stored as the state x and its update d = y - x: where a block changes its input little, y'y - x'x
    loses every digit that d'd keeps. The moments of y follow from them (``c_yx``, ``c_yy``).

    On a device without float64, such as Apple's, they are kept on the host, to which the snapshots are moved.

    Moments add up over batches, devices and ranks (Chan, Golub & LeVeque 1983), so memory is O(feature^2).

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
    """

    def __init__(self, n_features: int, *, device: torch.device | str = "cpu", name: str = "the layer") -> None:
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

    @classmethod
    def of_nothing_finite(cls, n_features: int, *, device: torch.device | str = "cpu") -> SnapshotMoments:
        """Stands for snapshots that are not finite, where ranks must add up theirs all the same."""
        moments = cls(n_features, device=device)
        for sums in (moments.mean_x, moments.mean_d, moments._sum_xx, moments._sum_dx, moments._sum_dd):
            sums.fill_(float("nan"))
        moments.n_snapshots = 1
        return moments

    @property
    def n_bytes(self) -> int:
        """Memory that the moments take."""
        return 3 * self._sum_xx.nbytes

    @property
    def is_finite(self) -> Tensor:
        """Whether all values seen are finite: a boolean on the device, which the caller reads when it suits.

        A sum is finite only if every term is, so the means tell for d values instead of n d.
        """
        return torch.isfinite(self.mean_x).all() & torch.isfinite(self.mean_d).all()

    def update(self, x: Tensor, y: Tensor, *, refuses: bool = True) -> SnapshotMoments:
        """Add snapshots.

        Args:
            x: States entering, shape (snapshot, feature), any floating dtype.
            y: States leaving, same shape; row i belongs to row i of ``x``.
            refuses: Whether values that are not finite are refused now, for which the host waits for the device; else
                they are added, and `is_finite` tells.

        Returns:
            Itself.

        Raises:
            SnapshotError: If the shapes disagree or a value is NaN or infinite; nothing is added then.
        """
        check_snapshots(x, y, self.n_features, self.name)
        parts = [_Part.of(x[i : i + CHUNK], y[i : i + CHUNK], self.mean_x.device) for i in range(0, len(x), CHUNK)]
        if refuses and not all(
            bool(torch.isfinite(part.mean_x).all() & torch.isfinite(part.mean_d).all()) for part in parts
        ):
            raise not_finite(self.name)
        self.resolution = max(self.resolution, torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps)
        for part in parts:
            self._add(part)
        return self

    def merge(self, other: SnapshotMoments) -> SnapshotMoments:
        """Add the snapshots that another object of the same layer has seen.

        Args:
            other: Moments of the same width; left as it is.

        Returns:
            Itself.

        Raises:
            SnapshotError: If the widths differ.
        """
        if other.n_features != self.n_features:
            raise SnapshotError(
                f"Moments of width {other.n_features} cannot be merged into moments of width {self.n_features}; "
                "merge moments of the same layer."
            )
        self.resolution = max(self.resolution, other.resolution)
        device = self.mean_x.device
        moved = (t.to(device) for t in (other.mean_x, other.mean_d, other._sum_xx, other._sum_dx, other._sum_dd))
        self._add(_Part(other.n_snapshots, *moved))
        return self

    def all_reduce(self, group: Any = None) -> SnapshotMoments:
        """Add up the snapshots of all ranks; every rank ends with the same moments.

        A gradient flows into the snapshots of the own rank alone: that of a function of the sum is the sum of what the
        ranks get. (The mean of all carries none: the centred sums do not change with it, to first order.)

        Args:
            group: Process group of ``torch.distributed``; None: the default one.

        Returns:
            Itself.
        """
        from torch.distributed import all_reduce

        counts = torch.tensor([float(self.n_snapshots)], dtype=torch.float64, device=self.mean_x.device)
        message = torch.cat([counts, self.n_snapshots * torch.cat([self.mean_x.detach(), self.mean_d.detach()])])
        all_reduce(message, group=group)
        total = int(message[0])
        mean_x, mean_d = (message[1:] / max(total, 1)).split(self.n_features)
        self._centre_on(mean_x, mean_d)
        sums = torch.cat([self._sum_xx, self._sum_dx, self._sum_dd])
        reduced = sums.detach().clone()
        all_reduce(reduced, group=group)
        reduced = reduced + (sums - sums.detach())
        self.n_snapshots, self.mean_x, self.mean_d = total, mean_x, mean_d
        self._sum_xx, self._sum_dx, self._sum_dd = reduced.split(self.n_features)
        return self

    def _centre_on(self, mean_x: Tensor, mean_d: Tensor) -> None:
        """Centre the sums on other means than the own ones."""
        shift_x, shift_d = self.mean_x - mean_x, self.mean_d - mean_d
        self._sum_xx = self._sum_xx + self.n_snapshots * torch.outer(shift_x, shift_x)
        self._sum_dx = self._sum_dx + self.n_snapshots * torch.outer(shift_d, shift_x)
        self._sum_dd = self._sum_dd + self.n_snapshots * torch.outer(shift_d, shift_d)

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
    """Centred sums of one chunk."""

    def __init__(self, n: int, mean_x: Tensor, mean_d: Tensor, sum_xx: Tensor, sum_dx: Tensor, sum_dd: Tensor) -> None:
        self.n = n
        self.mean_x, self.mean_d = mean_x, mean_d
        self.sum_xx, self.sum_dx, self.sum_dd = sum_xx, sum_dx, sum_dd

    @classmethod
    def of(cls, x: Tensor, y: Tensor, device: torch.device) -> _Part:
        # Moved before they are widened, which the device that they come from may not be able to do.
        x = x.to(device).to(torch.float64)
        d = y.to(device).to(torch.float64) - x
        mean_x, mean_d = x.mean(0), d.mean(0)
        x, d = x - mean_x, d - mean_d
        return cls(len(x), mean_x, mean_d, x.T @ x, d.T @ x, d.T @ d)
