"""Record of one training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

#: Metrics of a step that the trainer itself provides.
NUMBERS = ("loss", "auxiliary_loss", "accuracy", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class StepRecord:
    """Record of one step; all measurements are of the parameters before its update.

    Attributes:
        step: Number of updates before this one.
        loss: Loss of the batch, without auxiliary terms, in nats for cross entropy.
        auxiliary_loss: Weighted auxiliary terms that were added, such as the balance loss of a router or a penalty;
            NaN if there are none.
        accuracy: Fraction of targets with the largest probability; NaN if not defined.
        grad_norm: Norm of all gradients together, before clipping; NaN if the loss is not finite.
        learning_rate: Largest learning rate of the parameter groups.
        cause: Reason why the step diverged: ``"loss"``, ``"grad_norm"`` or ``"non-finite"``; empty if it did not.
        spectra: Spectra dataset with a ``step`` dimension of size one; None if not due.
        numbers: Metrics of callbacks to record, such as ``kss_penalty`` and ``batch_size``.
        outcomes: Results of callbacks, by their names.
    """

    step: int
    loss: float
    auxiliary_loss: float
    accuracy: float
    grad_norm: float
    learning_rate: float
    cause: str = ""
    spectra: xr.Dataset | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    outcomes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shaping(self) -> Any:
        """Record of KSS, a `workbench.callbacks.kss.Shaping`; None if the run has no KSS."""
        return self.outcomes.get("kss")

    @property
    def active_faults(self) -> tuple[str, ...]:
        """Names of the active faults."""
        return self.outcomes.get("faults", ())

    @property
    def alarms(self) -> tuple[Any, ...]:
        """Alarms raised in this step, as `workbench.alarms.Alarm`."""
        return self.outcomes.get("guard", ())

    @property
    def kss_enabled(self) -> bool:
        """Whether KSS was enabled in this step."""
        return self.shaping is not None and self.shaping.control.enabled

    @property
    def kss_strength(self) -> float:
        """Strength of KSS in this step; NaN if the run has none."""
        return math.nan if self.shaping is None else self.shaping.control.strength

    @property
    def diverged(self) -> bool:
        """Whether the step diverged."""
        return bool(self.cause)

    def monitors(self) -> dict[str, float]:
        """Return the metrics of the step; names as in ``schema.MONITORS``."""
        return {name: getattr(self, name) for name in NUMBERS} | dict(self.numbers)
