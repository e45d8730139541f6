"""Projected gradients of one step, and the result of comparing them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from workbench.errors import OptionError
from workbench.formatting import counted, listed, number_in_words


class GradientVerdict(StrEnum):
    """Verdict on the gradients that the optimizer received, for a step or one parameter, by increasing severity."""

    AS_COMPUTED = "as computed"
    SCALED = "scaled parameter by parameter"
    LOW_PRECISION = "low precision"
    STALE = "stale"
    PARAMETERS_MISSING = "parameters missing"
    RANKS_UNEQUAL = "ranks count unequally"
    RANK_MISSING = "rank missing"
    NOT_COMPUTED = "not what was computed"
    PASS_MISSING = "backward pass missing"
    DISCARDED = "earlier passes discarded"
    NOT_CLEARED = "earlier updates not cleared"
    #: Not part of the order of severity.
    NOT_MEASURED = "not measured"

    @property
    def severity(self) -> int:
        """Severity, increasing from 0 for gradients as computed; -1 if not measured."""
        return _SEVERITY[self]

    @property
    def is_fault(self) -> bool:
        """Whether the gradients differ from those that the ranks computed by more than a scale."""
        return self.severity > GradientVerdict.SCALED.severity


_SEVERITY = {verdict: i for i, verdict in enumerate(GradientVerdict)} | {GradientVerdict.NOT_MEASURED: -1}


@dataclass(frozen=True)
class ProjectedGradients:
    """Random projections of the gradients of one step, as computed by the ranks and as received by the optimizer.

    A projection of a gradient is the sum of some elements with random signs; both are the same on every rank and in
    every step. The expectation of its square is the squared Euclidean norm of these elements.

    Attributes:
        computed: Sum of the gradients from the backward passes of the step on each rank, shape
            (rank, parameter, projection); 0 if there was no gradient.
        accumulated: Content of ``.grad`` on each rank before any reduction, in the same shape; it differs from
            ``computed`` if the loop discarded gradients of earlier passes, as SAM does.
        received: Gradients that the optimizer of each rank receives, in the same shape.
        size: Sum over backward passes of the norms of their gradients, shape (rank, parameter), in units of the
            gradient.
        n_elements: Number of elements of each parameter that are projected, shape (parameter,); 0 if not measured.
        formats: Number format of each parameter's gradient, such as "float32".
        n_passes: Largest number of gradients that were summed for one parameter on one rank; 0 if none was seen.
        passes: Gradients of the individual backward passes, shape (pass, parameter, projection); None or empty if they
            are unknown.
        is_left_over: Whether the first pass found the gradient of the last update in ``.grad`` unchanged, shape
            (parameter,); None if unknown.
        is_last_alone: Whether ``.grad`` was empty before the last of several passes, in the same shape; None if
            unknown.
        has_moved: Whether parameters changed between the passes, as with SAM; None if unknown.
    """

    computed: np.ndarray
    accumulated: np.ndarray
    received: np.ndarray
    size: np.ndarray
    n_elements: np.ndarray
    formats: tuple[str, ...]
    n_passes: int = 1
    passes: np.ndarray | None = None
    is_left_over: np.ndarray | None = None
    is_last_alone: np.ndarray | None = None
    has_moved: bool | None = None

    def __post_init__(self) -> None:
        shape = self.computed.shape
        if len(shape) != 3 or not shape[0] or not shape[2]:
            raise _wrong_shape("computed", shape, "(rank, parameter, projection), not empty")
        matching = {"accumulated": shape, "received": shape, "size": shape[:2], "n_elements": shape[1:2]}
        for name, expected in matching.items():
            if (found := getattr(self, name).shape) != expected:
                raise _wrong_shape(name, found, f"{expected}, like computed")
        if self.passes is not None and self.passes.shape[1:] != shape[1:]:
            raise _wrong_shape("passes", self.passes.shape, f"(pass, {shape[1]}, {shape[2]}), like computed")
        if len(self.formats) != shape[1]:
            raise OptionError.of("formats", self.formats, f"of length {shape[1]}, the number of parameters")
        for name in self.formats:
            if not getattr(getattr(torch, name, None), "is_floating_point", False):
                raise OptionError.of("formats", name, "floating-point formats such as 'bfloat16'")

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.computed)


def _wrong_shape(name: str, shape: tuple[int, ...], expected: str) -> OptionError:
    return OptionError(f"{name} must have shape {expected}, got {shape}.")


@dataclass(frozen=True)
class GradientAgreement:
    """Result of comparing the gradients that the optimizer received with the mean of those that the ranks computed.

    Attributes:
        verdict: The most severe verdict on any parameter and rank.
        states: Verdict on each parameter; "not measured" if it has no gradient or was left out, or if rounding explains
            any difference.
        scale: Common factor of the received gradients, from clipping, loss scale or accumulation, unit 1; NaN if no
            common scale was found.
        residual: Norm of the difference from ``scale`` times the mean, relative to ``scale`` times the mean norm of the
            ranks' gradients, shape (parameter,), unit 1; NaN if there is no gradient or no scale.
        tolerance: The largest residual that rounding explains, in the same shape and unit.
        weights: Weight of the gradients of each rank, shape (rank,), unit 1: 1 is correct, 0 is missing; over the
            parameters with another state than "as computed", if there are any. NaN if there is only one rank, for a
            rank without gradients, or if there are too few parameters to determine it.
        missing_ranks: Ranks whose gradients are missing, in some parameters or all.
        missing_passes: Backward passes of the step whose gradients are missing, in some parameters or all.
        delay: Age in steps of most stale gradients; None if there are none.
        n_bits: Approximate number of significant bits at low precision (24 in float32, 8 in bfloat16); NaN otherwise.
        receivers: Ranks that received gradients with this verdict.
        reason: Why nothing was measured; empty otherwise.
    """

    verdict: GradientVerdict
    states: tuple[GradientVerdict, ...]
    scale: float
    residual: np.ndarray
    tolerance: np.ndarray
    weights: np.ndarray
    missing_ranks: tuple[int, ...] = ()
    missing_passes: tuple[int, ...] = ()
    delay: int | None = None
    n_bits: float = np.nan
    receivers: tuple[int, ...] = (0,)
    reason: str = ""

    def parameters(self, state: GradientVerdict) -> tuple[int, ...]:
        """Return the indices of the parameters in a state."""
        return tuple(i for i, found in enumerate(self.states) if found == state)

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        if self.verdict == GradientVerdict.NOT_MEASURED:
            return f"The gradients that the optimizer receives were not checked: {self.reason}."
        counts = Counter(state for state in self.states if state != GradientVerdict.NOT_MEASURED)
        n_known = counts.total()
        n_hidden = max(int(np.isfinite(self.residual).sum()) - n_known, 0)
        where = f"{counts[self.verdict]} of {counted(n_known + n_hidden, 'parameter')}"
        if len(self.receivers) < len(self.weights):
            ranks = f"{'rank' if len(self.receivers) == 1 else 'ranks'} {listed(map(str, self.receivers))}"
            where += f" on {ranks}"
        others = [
            f"{state} in {n}" for state, n in counts.items() if state not in (self.verdict, GradientVerdict.AS_COMPUTED)
        ]
        others += [f"rounding explains any difference in {n_hidden}"] if n_hidden else []
        return f"{self._finding(where)}{f'; {listed(others)}' if others else ''}."

    def _finding(self, where: str) -> str:
        match self.verdict:
            case GradientVerdict.AS_COMPUTED:
                return f"The optimizer receives the gradients as computed, in {where}"
            case GradientVerdict.SCALED:
                return f"Gradients are scaled by individual factors, as by clipping each parameter, in {where}"
            case GradientVerdict.LOW_PRECISION:
                bits = counted(max(round(self.n_bits), 0), "significant bit")
                return f"Gradients are rounded to about {bits} on their way to the optimizer, in {where}"
            case GradientVerdict.STALE:
                age = counted(self.delay or 0, "step")
                return f"The optimizer receives gradients of {age} before, in {where}"
            case GradientVerdict.PARAMETERS_MISSING:
                return f"The optimizer receives zeros although gradients were computed, in {where}"
            case GradientVerdict.RANKS_UNEQUAL:
                low, high = (number_in_words(float(end(self.weights))) for end in (np.nanmin, np.nanmax))
                return f"Gradients of the ranks are weighted unequally, by {low} to {high}, in {where}"
            case GradientVerdict.RANK_MISSING:
                ranks = f"{'rank' if len(self.missing_ranks) == 1 else 'ranks'} {listed(map(str, self.missing_ranks))}"
                return f"Gradients of {ranks} are missing, in {where}"
            case GradientVerdict.NOT_CLEARED:
                return f"Gradients of earlier updates are still in .grad and are added to those of this one, in {where}"
            case GradientVerdict.DISCARDED:
                return f"Only the last backward pass of the step counts, since .grad was cleared before it, in {where}"
            case GradientVerdict.PASS_MISSING:
                several = len(self.missing_passes) > 1
                passes = f"backward {'passes' if several else 'pass'} {listed(map(str, self.missing_passes))}"
                return f"Gradients of {passes} of the step are missing, in {where}"
            case _:
                return (
                    "The optimizer receives gradients that were not computed in this step (clipping by value, noise "
                    f"and masks cause this on purpose), in {where}"
                )
