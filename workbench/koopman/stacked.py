"""Moments and operators of several layers at once, with one call of each operation for all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from workbench.koopman.dmd import N_POWERS, DmdOptions, first_sketch, ridge_of
from workbench.koopman.moments import device_for_float64


class StackedMoments:
    """Centered second moments of the states of layers of one width, and of their updates d = y - x, in float64.

    Nothing makes the host wait for the device. With several ranks, the moments are those of the snapshots of all ranks;
    the gradient in the snapshots of this rank is then that of the sum of a function over all ranks.

    Args:
        states: Layer -> states entering and leaving it, each of shape (snapshot, feature); shapes and dtypes are those
            of the first layer.
        is_shared: Whether to sum over all ranks, each of which must call the same methods.

    Attributes:
        states: The states.
        n_features: Width of the states.
        resolution: Relative spacing of the coarsest dtype of the states.
        facts: For each layer the traces of C_xx, C_dx and C_dd, the squared norm of the mean state, and the number of
            snapshots; shape (layer, 5).
    """

    def __init__(self, states: Mapping[int, tuple[Tensor, Tensor]], *, is_shared: bool = False) -> None:
        self.states, self._is_shared = states, is_shared
        x, y = self._leaves = [torch.stack([pair[k].detach() for pair in states.values()]) for k in range(2)]
        self.n_features = x.shape[-1]
        self.resolution = max(torch.finfo(part.dtype).eps for part in (x, y, x.new_empty(0, dtype=torch.float64)))
        for leaf, parts in zip(self._leaves, zip(*states.values(), strict=True), strict=True):
            leaf.requires_grad_(torch.is_grad_enabled() and any(part.requires_grad for part in parts))
        device = device_for_float64(x.device)
        x = x.to(device).double()
        d = y.to(device).double() - x
        with torch.no_grad():
            n, mean = float(x.shape[1]), torch.stack([x.sum(1, keepdim=True), d.sum(1, keepdim=True)])
            if is_shared:
                n, *_ = message = self._summed(torch.cat([x.new_full((1,), n), mean.flatten()]))
                mean = message[1:].view_as(mean)
            mean = mean / n
        self._n_less_one, self._x, self._d = n - 1, x - mean[0], d - mean[1]
        with torch.no_grad():
            flat = torch.stack([self._x.flatten(1), self._d.flatten(1)], 1)
            gram = self._summed(flat @ flat.mT) / self._n_less_one
            ends = [mean[0].square().sum(2), torch.ones_like(gram[:, 0, :1]) * n]
            self.facts = torch.cat([gram[:, 0], gram[:, 1, 1:], *ends], 1)

    def _summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks; it has the gradient of the part of this rank."""
        if not self._is_shared:
            return tensor
        total = tensor.detach().clone()
        distributed.all_reduce(total)
        return total + (tensor - tensor.detach()) if tensor.requires_grad else total

    def project(self, options: DmdOptions) -> Tensor:
        """Compute Q' C_xx Q and Q' C_dx Q of each layer, where Q spans slightly more than the leading directions.

        Q is found with power iterations (Halko, Martinsson & Tropp 2011, Algorithm 4.4), and has no gradient; without a
        rank, it is the identity. Layers whose squares overflow, or that hold other values that are not finite, count as
        zero.

        Returns:
            A tensor of shape (layer, 2, column of Q, column of Q).
        """
        is_sound = torch.isfinite(self.facts[:, :3]).all(1)[:, None, None]
        x, d = (torch.where(is_sound, part, 0.0) for part in (self._x, self._d))
        if options.rank is not None and options.rank < self.n_features:
            states = x.detach()
            sketch = first_sketch(self.n_features, options.rank, options.seed).to(x.device, non_blocking=True)
            for _ in range(N_POWERS):
                sketch = orthonormalized(self._summed(states.mT @ (states @ sketch)))
            x, d = x @ sketch, d @ sketch
        self._projected = self._summed(torch.stack([x.mT @ x, d.mT @ x], 1)) / self._n_less_one
        return self._projected

    def gradients(self, slopes: Mapping[int, np.ndarray]) -> list[tuple[Tensor, Tensor]]:
        """Return states with a gradient and the gradient in them of a function of `project` with the given slopes."""
        given = np.zeros(tuple(self._projected.shape))
        for i, layer in enumerate(self.states):
            given[i] = slopes.get(layer, 0.0)
        leaves = [leaf for leaf in self._leaves if leaf.requires_grad]
        found = torch.autograd.grad(
            self._projected, leaves, torch.from_numpy(given).to(self._x.device, non_blocking=True)
        )
        by_leaf = dict(zip(map(id, leaves), found, strict=True))
        return [
            (state, by_leaf[id(leaf)][i])
            for i, (layer, pair) in enumerate(self.states.items())
            for leaf, state in zip(self._leaves, pair, strict=True)
            if layer in slopes and state.requires_grad
        ]


def stacked(states: Mapping[int, tuple[Tensor, Tensor]], *, is_shared: bool) -> list[StackedMoments]:
    """Return the moments of layers, together for those of one kind; NaN on all ranks where states are unusable."""
    kinds: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}
    for i, (x, y) in states.items():
        is_usable = x.shape == y.shape and x.is_floating_point() and y.is_floating_point()
        # The number of states differs between ranks, which have to send the same messages.
        kind = is_usable, x.shape[1:], x.dtype, y.dtype, x.device, y.device
        if not (is_usable and len(x)):
            x = y = torch.full((1, x.shape[-1]), math.nan, device=x.device)
        kinds.setdefault(kind, {})[i] = x, y
    return [StackedMoments(each, is_shared=is_shared) for each in kinds.values()]


def orthonormalized(a: Tensor) -> Tensor:
    """Return orthonormal bases of the columns of matrices (..., row, column), without a wait of the host.

    This is the shifted Cholesky QR of Fukaya et al. (2020), for which condition numbers up to 1e15 make no difference.
    Directions in which the columns do not vary are zero.
    """
    n_rows, n_columns = a.shape[-2:]
    eps = torch.finfo(a.dtype).eps
    for shift in (11 * (n_rows + n_columns + 1) * n_columns * eps, 10 * n_columns * eps, 10 * n_columns * eps):
        gram = a.mT @ a
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        # Bounds the square of the largest singular value, which is 1 after the first pass.
        diagonal += shift * (diagonal.sum(-1, keepdim=True) if shift > 10 * n_columns * eps else 1)
        upper, _ = torch.linalg.cholesky_ex(gram, upper=True)
        a = torch.linalg.solve_triangular(upper, a, upper=True, left=False)
    return a


@dataclass(frozen=True)
class ProjectedOperator:
    """An operator A, (mode, mode), in the leading directions of a layer's states, on the host.

    ``whiten`` are whitened directions in the basis of `StackedMoments.project`, (column, mode), and ``inverse`` is that
    of the covariance of the whitened states.
    """

    matrix: np.ndarray
    whiten: np.ndarray
    inverse: np.ndarray

    @classmethod
    def of(
        cls, moments: StackedMoments, facts: np.ndarray, projected: np.ndarray, options: DmdOptions
    ) -> ProjectedOperator | None:
        """Compute a layer's operator from facts and projection, whose directions count as constant; may be None."""
        xx, dx = projected
        energy, _, _, squared_mean, n_snapshots = facts.tolist()
        if n_snapshots < 3 or not np.isfinite(facts).all() or not np.isfinite(projected).all():
            return None
        # States that are all the same still vary by the rounding of the dtype they came in.
        if not energy > moments.resolution**2 * squared_mean:
            return None
        try:
            variance, rotation = np.linalg.eigh(xx)
            is_used = np.flatnonzero(variance > options.rank_tolerance * variance[-1])[-(options.rank or len(xx)) :]
            ridge = ridge_of(options, energy, moments.n_features)
            whiten = rotation[:, is_used] / np.sqrt(variance[is_used] + ridge)
            inverse = np.linalg.inv(whiten.T @ xx @ whiten)
        except np.linalg.LinAlgError:
            return None
        return cls(whiten.T @ dx @ whiten @ inverse + np.eye(len(is_used)), whiten, inverse)

    def slopes(self, slope: np.ndarray) -> np.ndarray:
        """Return the slopes of a function in the two projections, shape (2, column, column), from its slope in A."""
        right = slope @ self.inverse.T
        left = -(self.matrix - np.eye(len(right))).T @ right
        return self.whiten @ np.stack([left, right]) @ self.whiten.T
