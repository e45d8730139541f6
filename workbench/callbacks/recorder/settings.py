"""The settings of a run at each update, and what changes among them without a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.callbacks.alarms.settings_sentinel import SettingsSentinel
from workbench.callbacks.recorder.current_settings import settings_of

if TYPE_CHECKING:
    from workbench.callbacks.alarms.settings_change import SettingsChange

#: Numbers of an update that are settings.
_LOGGED = ("batch_size", "auxiliary_loss")


class SettingsWatch:
    """Reads the settings right before each update, and gives the changes after it.

    Args:
        model: Model without its wrappers.
        optimizer: Innermost.
        planned_rates: Function from the step to the planned rate of each group; None: not known.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, planned_rates: Callable[[int], Sequence[float]] | None
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.sentinel = SettingsSentinel(planned={} if planned_rates is None else {"learning_rate": planned_rates})
        self._found: dict[str, Any] = {}
        self._has_updated = False

    def read(self, autocast: torch.dtype | None, n_batches: int) -> None:
        """Called right before an update.

        Args:
            autocast: Type of autocast in the last forward pass; None: there was none.
            n_batches: Forward passes since the last update; 0: not known.
        """
        known: dict[str, Any] = {"autocast": "off" if autocast is None else autocast}
        self._found = settings_of(self.optimizer, self.model, **known, accumulation=n_batches or None)

    def changes(self, step: int) -> list[SettingsChange]:
        """Changes of what was read; called after the update, empty where none was made."""
        settings, self._found = self._found, {}
        self._has_updated = bool(settings)
        return self.sentinel.observe(step, settings)

    def logged_changes(self, step: int, numbers: Mapping[str, float]) -> list[SettingsChange]:
        """Changes of settings that are numbers of the update; called when all of these are known."""
        if not self._has_updated:
            return []
        self._has_updated = False
        return self.sentinel.observe(step, {name: numbers.get(name, math.nan) for name in _LOGGED})
