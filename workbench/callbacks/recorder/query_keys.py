"""Spectra of the changes of the query-key product of each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from workbench.models.attention_weights import QueryKey, Unreadable
from workbench.models.device_numbers import read_arrays
from workbench.monitors.attention_health import qk_update_spectrum
from workbench.monitors.matrices import effective_rank, frobenius_norm, spectral_entropy, stable_rank

if TYPE_CHECKING:
    from workbench.callbacks.recorder.full_parameters import OptimizedParameters

TERMS = ("D2", "D3", "dWq", "dWk", "W")
#: Variables computed for each of them.
SPECTRA_OF_HEADS = ("frobenius_norm", "stable_rank", "effective_rank", "spectral_entropy")
#: Query weight entries that are compared in one call; float64 copies and factors have about ten times as many.
_ENTRIES_AT_A_TIME = 1 << 23


class QueryKeyWindow:
    """Changes of query and key weights since the last measurement.

    Layers of equal shape are processed in one call. Only the weights of queries and keys are stored, in at least
    float32.

    Args:
        readings: Query and key weights, one entry per layer.
        parameters: Parameters from which the weights are read.
        alpha: Power of the singular values in effective rank and entropy.
    """

    def __init__(
        self, readings: Sequence[QueryKey | Unreadable], parameters: OptimizedParameters, alpha: float
    ) -> None:
        self.n_layers = len(readings)
        self.parameters, self.alpha = parameters, alpha
        self._groups = _by_shape([reading for reading in readings if isinstance(reading, QueryKey)])
        self.n_heads = max((group[0].query.shape[0] for group in self._groups), default=0)
        self._base: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """Take the current weights as the base point."""
        self._base = [self._read(group) for group in self._groups]

    def measure(self, n_heads: int) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Measure the changes since the base point; the current weights become the next base point.

        Args:
            n_heads: Length of the head dimension; values are NaN where a layer has fewer heads.

        Returns:
            For each variable an array (layer, head, term), and a description of layers with values that are not finite.
        """
        shape = (self.n_layers, n_heads, len(TERMS))
        measures = {
            "frobenius_norm": frobenius_norm,
            "stable_rank": stable_rank,
            "effective_rank": lambda s: effective_rank(s, alpha=self.alpha),
            "spectral_entropy": lambda s: spectral_entropy(s, alpha=self.alpha),
        }
        values = {name: np.full(shape, np.nan) for name in measures}
        broken: dict[int, str] = {}
        # All are read first: shards are gathered from all ranks, which would wait if a computation failed on one.
        bases, self._base = self._base, [self._read(group) for group in self._groups]
        for group, before, now in zip(self._groups, bases, self._base, strict=True):
            for part in _parts(now[0]):
                layers = [reading.layer for reading in group[part]]
                spectra = qk_update_spectrum(*(w[part] for w in (*before, *now)))
                good = [torch.isfinite(w[part]).flatten(1).all(1) for w in now]
                places = [(name, i) for i in range(len(TERMS)) for name in measures]
                measured = [measures[name](spectra[TERMS[i]]) for name, i in places]
                *found, of_queries, of_keys = read_arrays([*measured, *good])  # one transfer for all
                is_finite = np.logical_and(of_queries, of_keys)
                broken |= {layers[i]: "query and key weights" for i in np.flatnonzero(~is_finite)}
                n_own = now[0].shape[1]
                for (name, i), value in zip(places, found, strict=True):
                    values[name][layers, :n_own, i] = value
        return values, broken

    def _read(self, group: Sequence[QueryKey]) -> tuple[Tensor, Tensor]:
        """Return query and key weights, shape (layer, head, feature, head_dim), in at least float32."""
        queries = [reading.query_recipe.read(self.parameters.as_model)[0] for reading in group]
        keys = [reading.key_recipe.read(self.parameters.as_model)[0] for reading in group]
        return torch.stack([_wide(q) for q in queries]), torch.stack([_wide(k) for k in keys])


def _by_shape(readings: Sequence[QueryKey]) -> list[list[QueryKey]]:
    groups: dict[tuple, list[QueryKey]] = {}
    for reading in readings:
        groups.setdefault((reading.query.shape, reading.key.shape), []).append(reading)
    return list(groups.values())


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _parts(queries: Tensor) -> list[slice]:
    """Return slices of layers that are computed together."""
    step = max(1, _ENTRIES_AT_A_TIME // max(1, queries[0].numel()))
    return [slice(start, start + step) for start in range(0, len(queries), step)]
