"""Settings of a run at each update, and their unplanned changes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.callbacks.alarms.settings_sentinel import SettingsSentinel
from workbench.callbacks.recorder.current_settings import settings_of
from workbench.callbacks.recorder.single_tensors import SingleTensors

if TYPE_CHECKING:
    from workbench.callbacks.alarms.settings_change import SettingsChange
    from workbench.callbacks.alarms.settings_sentinel import Plan
    from workbench.callbacks.recorder.joint_optimizer import JointOptimizer

#: Metrics of an update that are settings.
_LOGGED = ("batch_size", "auxiliary_loss")


class SettingsWatch:
    """Comparison of settings that are read right before each update, with the changes reported after it.

    Args:
        model: Model without its wrappers.
        optimizer: Innermost optimizer.
        planned: Plans of settings, see `SettingsSentinel`.
        called: Names of the modules that a pass through the model calls, see `SingleTensors`.
    """

    def __init__(
        self, model: nn.Module, optimizer: JointOptimizer, planned: Mapping[str, Plan], called: Collection[str] = ()
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._tensors = SingleTensors(model, called)
        self.sentinel = SettingsSentinel(planned=planned)
        self._found: dict[str, Any] = {}
        self._has_updated = False

    def read(self, autocast: torch.dtype | None, n_batches: int) -> None:
        """Read the settings right before an update.

        Args:
            autocast: Dtype of autocast in the last forward pass; None if it was off.
            n_batches: Number of forward passes since the last update; 0 if unknown.
        """
        known: dict[str, Any] = {"autocast": "off" if autocast is None else autocast}
        known |= self._tensors.read()
        self._found = settings_of(self.optimizer, self.model, **known, accumulation=n_batches or None)

    def changes(self, step: int) -> list[SettingsChange]:
        """Return the changes of the settings read before; called after the update, empty if it was not made."""
        settings, self._found = self._found, {}
        self._has_updated = bool(settings)
        return self.sentinel.observe(step, settings)

    def logged_changes(self, step: int, numbers: Mapping[str, float]) -> list[SettingsChange]:
        """Return the changes of settings that are metrics of the update; called when all metrics are known."""
        if not self._has_updated:
            return []
        self._has_updated = False
        return self.sentinel.observe(step, {name: numbers.get(name, math.nan) for name in _LOGGED})
