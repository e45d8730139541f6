"""Options of a recorder: what it measures and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError
from workbench.io.run_output import say

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Steps between two measurements of each part, unless `Recorder(every=)` says otherwise; None: never.
CADENCE: dict[str, int | None] = {
    "attention": 10,
    "router": 10,
    "optimizer": 10,
    "activations": 50,
    "precision": 20,
    "reduction": 5,
    "update": 50,
    "curvature": None,
    "spectra": None,
}
#: Below this many updates noise outweighs their sum.
_SHORTEST_WINDOW = 10


def checked_cadence(every: Mapping[str, int | None] | int | None) -> dict[str, int | None]:
    """Steps between two measurements of each part.

    Args:
        every: One cadence for all parts that are on by default, or cadences by part; None: never.

    Raises:
        OptionError: If a part is unknown or a cadence is invalid.
    """
    if every is None:
        return dict.fromkeys(CADENCE)
    if isinstance(every, Mapping):
        unknown = [name for name in every if name not in CADENCE]
        if unknown:
            raise OptionError(f"A recorder has no part '{unknown[0]}'; choose from {', '.join(CADENCE)}.")
        given = dict(every)
    else:
        given = {name: every for name, default in CADENCE.items() if default is not None}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError(f"every['{name}'] is {value!r}, expected a whole number of steps, at least 1, or None.")
    cadence = CADENCE | given
    if cadence["attention"] is not None and cadence["attention"] < _SHORTEST_WINDOW:
        say(
            f"Updates of queries and keys are compared over {cadence['attention']} steps; what updates have in common "
            f"adds up with their number, noise only with its root, so use {_SHORTEST_WINDOW} or more to see it."
        )
    return cadence


def is_due(step: int, every: int | None) -> bool:
    """Whether a part is measured after the update of a step: after every so many updates, counted from the first."""
    return every is not None and (step + 1) % every == 0


def plain(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Values as float64 arrays."""
    return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


@dataclass(frozen=True)
class RecorderOptions:
    """The settings of a recorder, as its collectors need them."""

    every: Mapping[str, int | None]
    alpha: float
    loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None
    profile_options: Mapping[str, Any] = field(default_factory=dict)
