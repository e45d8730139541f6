"""The record of one training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import xarray as xr

#: Numbers of a step that the trainer itself gives.
NUMBERS = ("loss", "auxiliary_loss", "accuracy", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class StepRecord:
    """The record of one step; everything but the update itself belongs to the parameters after ``step`` updates.

    Attributes:
        step: Number of updates done before this one.
        loss: Loss of the batch, without auxiliary terms, in nats for cross entropy.
        auxiliary_loss: Weighted auxiliary terms as they were added, such as a router's balance or a penalty; NaN if
            there are none.
        accuracy: Share of the batch's targets that were most likely; NaN if that is not defined.
        grad_norm: Norm of all gradients together, before clipping; NaN if the loss is not finite.
        learning_rate: Largest rate of the optimizer's groups.
        cause: Reason why the step counts as diverged: ``"loss"``, ``"grad_norm"`` or ``"non-finite"``; empty otherwise.
        spectra: Spectra dataset with a ``step`` dimension of one, if they were due.
        numbers: Numbers of callbacks to record, such as ``kss_penalty`` and ``batch_size``.
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
        """The record of KSS, a `workbench.callbacks.kss.Shaping`; None: the run has no KSS."""
        return self.outcomes.get("kss")

    @property
    def active_faults(self) -> tuple[str, ...]:
        """Names of the faults that were on."""
        return self.outcomes.get("faults", ())

    @property
    def alarms(self) -> tuple[Any, ...]:
        """Each `workbench.alarms.Alarm` raised in this step."""
        return self.outcomes.get("guard", ())

    @property
    def kss_enabled(self) -> bool:
        """Whether KSS was switched on in this step."""
        return self.shaping is not None and self.shaping.control.enabled

    @property
    def kss_strength(self) -> float:
        """Strength of KSS in this step; NaN if the run has none."""
        return math.nan if self.shaping is None else self.shaping.control.strength

    @property
    def diverged(self) -> bool:
        """Whether the step counts as diverged."""
        return bool(self.cause)

    def monitors(self) -> dict[str, float]:
        """The numbers of the step; names as in ``schema.MONITORS``."""
        return {name: getattr(self, name) for name in NUMBERS} | dict(self.numbers)
