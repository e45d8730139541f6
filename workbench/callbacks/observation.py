"""The result of one measurement of one part of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Observation:
    """The result of one measurement of one part.

    Attributes:
        step: Update that it belongs to, from 0; measurements are taken right after it (spectra right before it).
        part: Name of the part: ``"monitors"`` (the numbers of the update itself), or one of the measured parts.
        values: Values of each variable, without the dimension of the steps; dimensions as in `workbench.schema`.
        coords: Values along those dimensions: ``layer``, ``head``, ``term``, ``module``, ... and ``layer_name``.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> alarms = wb.Alarms()
        >>> for step in range(400):
        ...     loss = np.array(3.0 if step < 300 else 30.0 + step % 2)
        ...     raised = alarms.observe(wb.alarms.Observation(step, "monitors", {"loss": loss}))
        >>> alarms.raised[0].signal, alarms.raised[0].step >= 300
        ('loss', True)
    """

    step: int
    part: str
    values: Mapping[str, np.ndarray]
    coords: Mapping[str, np.ndarray] = field(default_factory=dict)


def changed_setting(step: int, setting: str, factor: float, message: str) -> Observation:
    """An observation of the part ``"settings"``: one setting has changed without a plan.

    Args:
        step: Update at which it was noticed.
        setting: Name of the setting.
        factor: Its new value over the one before; 1: it is back, NaN: not known.
        message: Description in plain words.
    """
    return Observation(
        step, "settings", {"factor": np.array(factor)}, {"setting": np.array(setting), "message": np.array(message)}
    )
