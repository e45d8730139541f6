"""What is known of the gradients of one step, as random projections, and what their comparison says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from workbench.errors import OptionError
from workbench.formatting import counted, listed, number_in_words


class GradientVerdict(StrEnum):
    """What the optimizer received, the gravest last; of a whole step, or of one parameter.

    Example:
        >>> import workbench as wb
        >>> wb.probes.GradientVerdict("stale").is_fault
        True
    """

    AS_COMPUTED = "as computed"
    SCALED = "scaled parameter by parameter"
    LOW_PRECISION = "low precision"
    STALE = "stale"
    PARAMETERS_MISSING = "parameters missing"
    RANKS_UNEQUAL = "ranks count unequally"
    RANK_MISSING = "rank missing"
    NOT_COMPUTED = "not what was computed"
    PASS_MISSING = "backward pass missing"
    #: Stands beside the others, and says nothing.
    NOT_MEASURED = "not measured"

    @property
    def severity(self) -> int:
        """0 for the best, rising; -1: not measured."""
        return -1 if self is GradientVerdict.NOT_MEASURED else list(GradientVerdict).index(self)

    @property
    def is_fault(self) -> bool:
        """Whether the gradients are other ones than the ranks computed; a scale of its own is none."""
        return self.severity > GradientVerdict.SCALED.severity


@dataclass(frozen=True)
class ProjectedGradients:
    """The gradients of one step as the ranks computed them and as the optimizer received them, as random projections.

    A projection of a gradient is the sum of its elements with random signs, the same signs on every rank and in every
    step. The mean of its square is the squared Euclidean norm of the gradient.

    Attributes:
        computed: What the backward passes of the step gave on each rank, added up, shape (rank, parameter, projection);
            0 where there was no gradient.
        accumulated: What each rank held in ``.grad`` before any reduction, in the same shape: another value where the
            loop threw gradients of earlier passes away, as SAM does.
        received: What the optimizer of each rank gets, in the same shape.
        size: Sum over backward passes of the norms of their gradients, shape (rank, parameter), in units of the
            gradient.
        n_elements: Number of elements of each parameter, shape (parameter,).
        formats: Number format of each parameter's gradient, such as "float32".
        n_passes: Largest number of gradients that were added up for one parameter on one rank; 0: none was seen.
        passes: The gradients of single backward passes, shape (pass, parameter, projection); None or empty: they are
            not known one by one.

    Raises:
        OptionError: If shapes do not fit together, or a format has no fractions.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> g = np.ones((2, 1, 8))
        >>> wb.probes.ProjectedGradients(g, g, g, np.ones((2, 1)), np.ones(1), ("float32",)).n_ranks
        2
    """

    computed: np.ndarray
    accumulated: np.ndarray
    received: np.ndarray
    size: np.ndarray
    n_elements: np.ndarray
    formats: tuple[str, ...]
    n_passes: int = 1
    passes: np.ndarray | None = None

    def __post_init__(self) -> None:
        shape = self.computed.shape
        if len(shape) != 3 or not shape[0] or not shape[2]:
            raise OptionError(
                f"computed has shape {shape}, expected (rank, parameter, projection), none of them empty."
            )
        fitting = {"accumulated": shape, "received": shape, "size": shape[:2], "n_elements": shape[1:2]}
        for name, expected in fitting.items():
            if (found := getattr(self, name).shape) != expected:
                raise OptionError(f"{name} has shape {found}, but that of computed, {shape}, asks for {expected}.")
        if self.passes is not None and self.passes.shape[1:] != shape[1:]:
            raise OptionError(
                f"passes has shape {self.passes.shape}, but that of computed, {shape}, asks for (pass, {shape[1]}, "
                f"{shape[2]})."
            )
        if len(self.formats) != shape[1]:
            raise OptionError(
                f"formats has {len(self.formats)} entries, expected one for each of {shape[1]} parameters."
            )
        for name in self.formats:
            if not getattr(getattr(torch, name, None), "is_floating_point", False):
                raise OptionError(f"formats has {name!r}, expected floating-point formats such as 'bfloat16'.")

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return len(self.computed)


@dataclass(frozen=True)
class GradientAgreement:
    """Whether the optimizer received the mean of the gradients that the ranks computed.

    Attributes:
        verdict: The gravest of the states of the parameters, on the rank where it is gravest.
        states: Verdict on each parameter; "not measured" where it has no gradient, or rounding explains any difference.
        scale: What the mean over ranks was multiplied by, for all parameters: clipping, loss scale, accumulation, unit
            1; NaN if no common scale was found.
        residual: Norm of what ``scale`` times the mean leaves over, relative to ``scale`` times the mean norm of the
            ranks' gradients, shape (parameter,), unit 1; NaN where there is no gradient or no scale.
        tolerance: The largest residual that rounding explains, in the same shape and unit.
        weights: How often the gradients of each rank count, shape (rank,), unit 1: 1 is right, 0 is missing; over the
            parameters with another state than "as computed", if there are any. NaN for one rank alone, for a rank
            without gradients, or if there are too few parameters to tell.
        missing_ranks: Ranks whose gradients are missing, in some parameters or all.
        missing_passes: Backward passes of the step whose gradients are missing, in some parameters or all.
        delay: How many steps old most stale gradients are; None: none is known to be.
        n_bits: About how many significant bits are left where the precision is low (24 in float32, 8 in bfloat16); NaN
            otherwise.
        receivers: Ranks that received such gradients.
        reason: Why nothing was measured; empty otherwise.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = torch.nn.Linear(3, 2)
        >>> with wb.probes.GradientProjections(model.parameters()) as projections:
        ...     model(torch.ones(4, 3)).square().sum().backward()
        ...     model.bias.grad.zero_()
        ...     found = wb.probes.compare_gradients(projections.take())
        tensor([0., 0.])
        >>> found.parameters(wb.probes.GradientVerdict.PARAMETERS_MISSING)
        (1,)
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
        """Numbers of the parameters in a state."""
        return tuple(i for i, found in enumerate(self.states) if found == state)

    @property
    def sentence(self) -> str:
        """The verdict as a person reads it."""
        if self.verdict == GradientVerdict.NOT_MEASURED:
            return f"Whether the optimizer gets the computed gradients was not measured: {self.reason}."
        counts = Counter(state for state in self.states if state != GradientVerdict.NOT_MEASURED)
        n_judged = counts.total()
        n_hidden = max(int(np.isfinite(self.residual).sum()) - n_judged, 0)
        where = f"{counts[self.verdict]} of {counted(n_judged + n_hidden, 'parameter')}"
        if len(self.receivers) < len(self.weights):
            ranks = f"{'rank' if len(self.receivers) == 1 else 'ranks'} {listed(map(str, self.receivers))}"
            where += f" on {ranks}"
        others = [
            f"{state} in {n}" for state, n in counts.items() if state not in (self.verdict, GradientVerdict.AS_COMPUTED)
        ]
        others += [f"{n_hidden} whose rounding explains any difference"] if n_hidden else []
        return f"{self._finding(where)}{f'; besides, {listed(others)}' if others else ''}."

    def _finding(self, where: str) -> str:
        match self.verdict:
            case GradientVerdict.AS_COMPUTED:
                return f"The optimizer gets the gradients that were computed, in {where}"
            case GradientVerdict.SCALED:
                return f"Gradients are scaled by factors of their own, as clipping one by one does, in {where}"
            case GradientVerdict.LOW_PRECISION:
                bits = counted(max(round(self.n_bits), 0), "significant bit")
                return f"Gradients are rounded to about {bits} on their way to the optimizer, in {where}"
            case GradientVerdict.STALE:
                age = counted(self.delay or 0, "step")
                return f"The optimizer gets gradients of {age} before, in {where}"
            case GradientVerdict.PARAMETERS_MISSING:
                return f"The optimizer gets zeros although gradients were computed, in {where}"
            case GradientVerdict.RANKS_UNEQUAL:
                low, high = (number_in_words(float(end(self.weights))) for end in (np.nanmin, np.nanmax))
                return f"Gradients of the ranks count unequally, {low} to {high} times, in {where}"
            case GradientVerdict.RANK_MISSING:
                ranks = f"{'rank' if len(self.missing_ranks) == 1 else 'ranks'} {listed(map(str, self.missing_ranks))}"
                return f"Gradients of {ranks} are missing, in {where}"
            case GradientVerdict.PASS_MISSING:
                several = len(self.missing_passes) > 1
                passes = f"backward {'passes' if several else 'pass'} {listed(map(str, self.missing_passes))}"
                return f"Gradients of {passes} of the step are missing, in {where}"
            case _:
                return (
                    "The optimizer gets gradients that were not computed in this step (clipping by value, noise and "
                    f"masks do so on purpose), in {where}"
                )
