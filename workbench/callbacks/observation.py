"""Results of the measurements of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Observation:
    """The result of one measurement of one part of a run.

    Attributes:
        step: Update that it belongs to, counted from 0. Measurements are taken right after the update, spectra right
            before it.
        part: Name of the part: ``"monitors"`` (the metrics of the update itself), or one of the measured parts.
        values: Values of each variable, without the dimension ``step``; other dimensions as in `workbench.schema`.
        coords: Coordinates of these dimensions, such as ``layer``, ``head``, ``term`` and ``module``, and
            ``layer_name``.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> alarms = wb.Alarms()
        >>> for step in range(400):
        ...     loss = np.array(3.0 if step < 300 else 30.0 + step % 2)
        ...     raised = alarms.observe(wb.alarms.Observation(step, "monitors", {"loss": loss}))
        >>> alarms.raised[0].signal, alarms.raised[0].step >= 300
        ('loss', True)

    See Also:
        `workbench.Alarms`: Raises alarms on observations.
        `workbench.alarms.observations`: Reads the observations of a recorded run.
        `workbench.Recorder`: Takes the measurements.
    """

    step: int
    part: str
    values: Mapping[str, Any]
    coords: Mapping[str, Any] = field(default_factory=dict)


def changed_setting(step: int, setting: str, factor: float, message: str) -> Observation:
    """Return an observation of the part ``"settings"``: one setting has changed without a plan.

    Args:
        step: Update at which the change was noticed.
        setting: Name of the setting.
        factor: Ratio of the new value to the previous one; 1 if the setting has returned to its earlier value, NaN if
            unknown.
        message: Description as a sentence.
    """
    return Observation(
        step, "settings", {"factor": np.array(factor)}, {"setting": np.array(setting), "message": np.array(message)}
    )
