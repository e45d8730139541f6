"""Options of a recorder: the parts that it measures and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, require_listed
from workbench.io.run_output import issue_warning

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Default number of steps between two measurements of each part; None if it is not measured.
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
#: Smallest recommended number of updates in a window of queries and keys; with fewer, noise outweighs their sum.
_SHORTEST_WINDOW = 10


def checked_cadence(every: Mapping[str, int | None] | int | None) -> dict[str, int | None]:
    """Return the number of steps between two measurements of each part.

    Args:
        every: One cadence for all parts that are on by default, or cadences by part; None to measure no part.

    Raises:
        OptionError: If a part is unknown or a cadence is invalid.
    """
    if every is None:
        return dict.fromkeys(CADENCE)
    if isinstance(every, Mapping):
        require_listed("every", every, CADENCE)
        given = dict(every)
    else:
        given = {name: every for name, default in CADENCE.items() if default is not None}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise OptionError.of(f"every['{name}']", value, "a whole number of steps, at least 1, or None")
    cadence = CADENCE | given
    if cadence["attention"] is not None and cadence["attention"] < _SHORTEST_WINDOW:
        issue_warning(
            f"Updates of queries and keys are compared over {cadence['attention']} steps, too few to detect their "
            "common direction: it grows with the number of updates, and noise only with its square root. Use "
            f"{_SHORTEST_WINDOW} steps or more."
        )
    return cadence


def is_due(step: int, every: int | None) -> bool:
    """Return whether a part is measured after the update of a step, that is, after every ``every`` updates."""
    return every is not None and (step + 1) % every == 0


def plain(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return values as float64 arrays."""
    return {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}


@dataclass(frozen=True)
class RecorderOptions:
    """Options of a recorder that its collectors need."""

    every: Mapping[str, int | None]
    alpha: float
    loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None
    profile_options: Mapping[str, Any] = field(default_factory=dict)
