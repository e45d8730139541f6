"""Comparison of the gradients that the optimizer receives with those computed by the ranks, for a recorder."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import torch
from torch import nn

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.callbacks.recorder.ranks import jointly
from workbench.errors import OptionError
from workbench.models.wrapping import is_shared
from workbench.probes.gradient_agreement import GradientVerdict
from workbench.probes.gradient_comparison import compare_gradients
from workbench.probes.gradient_projections import GradientProjections
from workbench.probes.reduction import KnownAnswer, known_answer_all_reduce

#: Values of a step that was not measured.
_UNKNOWN = {
    "gradient_verdict": -1.0,
    "wrong_parameters": math.nan,
    "significant_bits": math.nan,
    "missing_rank": math.nan,
    "missing_pass": math.nan,
    "receiving_rank": math.nan,
}


class ReductionCollector:
    """Comparison of projected gradients; if hooks cannot see full gradients, a check of a sum with a known answer.

    Args:
        optimizer: Innermost optimizer.
        model: Model whose parameters FSDP2 may have sharded.
    """

    def __init__(self, optimizer: JointOptimizer, model: nn.Module) -> None:
        self._parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._projections: GradientProjections | None = None
        self._values = dict(_UNKNOWN)
        with suppress(OptionError):  # parameters that are sharded in another way, or a device without float64
            self._projections = GradientProjections(self._parameters, model=model)

    def arm(self) -> None:
        """Register hooks before the first backward pass of a step that is measured."""
        if self._projections is not None and not self._projections.is_armed:
            self._projections.arm()

    def note_update(self) -> None:
        """Note the gradients after an update, before a step that is measured."""
        if self._projections is not None:
            self._projections.note_update()

    def disarm(self) -> None:
        """Remove hooks."""
        if self._projections is not None:
            self._projections.disarm()

    @property
    def is_ready(self) -> bool:
        """Whether the gradients of this step were seen by hooks, or need not be."""
        return self._projections is None or self._projections.is_armed

    def skip(self) -> None:
        """Skip the comparison; called instead of `take` if a rank could not take part in it."""
        self._values = dict(_UNKNOWN)
        self.disarm()

    def take(self) -> None:
        """Compare the gradients right before the update; called on every rank if all are ready."""
        self._values = dict(_UNKNOWN)
        if self._projections is not None:
            self._values = self._compared(self._projections)
        elif is_shared():
            self._values = _of_known_answer(known_answer_all_reduce(torch.zeros((), device=self._parameters[0].device)))

    def values(self) -> dict[str, float]:
        """Return the variables of ``schema.REDUCTION`` for the step of the last `take`."""
        return self._values

    def _compared(self, projections: GradientProjections) -> dict[str, float]:
        found = compare_gradients(projections.gathered(jointly(projections.measured)))
        measured = [state for state in found.states if state != GradientVerdict.NOT_MEASURED]
        wrong = sum(state.is_fault for state in measured)
        return {
            "gradient_verdict": float(found.verdict.severity),
            "wrong_parameters": wrong / len(measured) if measured else math.nan,
            "significant_bits": float(found.n_bits),
            "missing_rank": float(min(found.missing_ranks, default=math.nan)),
            "missing_pass": float(min(found.missing_passes, default=math.nan)),
            "receiving_rank": _one_of(found.receivers if found.verdict.is_fault else (), len(found.weights)),
        }


def _of_known_answer(answer: KnownAnswer) -> dict[str, float]:
    verdict = GradientVerdict.NOT_COMPUTED
    if answer.is_exact:
        verdict = GradientVerdict.AS_COMPUTED
    elif answer.missing:
        verdict = GradientVerdict.RANK_MISSING
    elif not np.isnan(answer.n_bits):
        verdict = GradientVerdict.LOW_PRECISION
    return {
        "gradient_verdict": float(verdict.severity),
        "wrong_parameters": float(verdict.is_fault),
        "significant_bits": float(answer.n_bits),
        "missing_rank": float(min(answer.missing, default=math.nan)),
        "missing_pass": math.nan,
        "receiving_rank": _one_of(answer.receivers, answer.n_ranks),
    }


def _one_of(ranks: tuple[int, ...], n_ranks: int) -> float:
    """Return the first of some ranks; NaN if they are all ranks, or none."""
    return float(ranks[0]) if 0 < len(ranks) < n_ranks else math.nan
