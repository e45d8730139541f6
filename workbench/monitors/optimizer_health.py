"""Measures of an update: its size, the staleness and noise of the optimizer's moments, and the influence of epsilon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from torch import Tensor

from workbench.errors import OptionError
from workbench.monitors.matrices import at_least_float32, widened
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeFloat, at_least, below

#: One tensor, or all tensors of a module.
Tensors = Tensor | Iterable[Tensor]


def gradient_rms(gradients: Tensors) -> Tensor:
    """Return the root mean square of all entries of the gradients, sqrt(mean(g^2)).

    Near Adam's eps (1e-8), updates no longer depend on the direction of the gradient alone (Wortsman et al. 2023,
    arXiv:2309.14322).

    Args:
        gradients: One tensor or several, of any shapes and devices.

    Returns:
        0-dim, in the unit of the gradient; NaN if there are no entries or a gradient is NaN.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> wb.monitors.gradient_rms([torch.full((3,), 2.0), torch.full((2, 2), -2.0)]).item()
        2.0

    See Also:
        `workbench.monitors.adam_staleness`: Gradients relative to Adam's second moment.
    """
    gradients = _listed(gradients)
    return _norm(gradients) / _count(gradients) ** 0.5


def update_ratio(before: Tensors, after: Tensors) -> Tensor:
    """Return RMS(dw) / RMS(w) of the change between two states of the same parameters; typically 1e-3 per step.

    Args:
        before: One parameter or several.
        after: The same parameters later.

    Returns:
        0-dim, dimensionless, where w are the parameters before the change. inf if they were all 0 and changed; NaN if
        they stayed 0, if there are no entries, or if a parameter is NaN.

    Raises:
        OptionError: If the two do not have the same shapes.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.update_ratio(torch.full((4,), 2.0), torch.full((4,), 2.002)).item(), 4)
        0.001

    See Also:
        `workbench.monitors.unchanged_share`: Fraction of the parameters without a change.
    """
    before, after = _same_shapes("before", before, "after", after)
    # The difference of neighboring numbers is exact in float32, in any precision of the parameters.
    change = (at_least_float32(b) - at_least_float32(a) for a, b in zip(before, after, strict=True))
    return _norm(change) / _norm(before)


def unchanged_share(before: Tensors, after: Tensors, gradients: Tensors) -> Tensor:
    """Return the fraction of the parameters with a nonzero gradient whose value an update did not change.

    In float32 nearly every update changes every parameter. In low precision an update is lost if it is smaller than
    half the distance to the neighboring number, which in bfloat16 is about 2e-3 of the parameter. Stochastic rounding
    preserves such updates on average, although it leaves most parameters unchanged.

    Args:
        before: One parameter or several, before the update.
        after: The same parameters after the update.
        gradients: Their gradients. Entries whose gradient is 0 are excluded, such as embeddings of tokens that are not
            in the batch.

    Returns:
        0-dim, a fraction; NaN if every gradient is 0 or there are no entries.

    Raises:
        OptionError: If they do not have the same shapes.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> before = torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16)
        >>> after = before - torch.tensor([1e-3, 1e-2, 0.0], dtype=torch.bfloat16)
        >>> wb.monitors.unchanged_share(before, after, torch.tensor([1.0, 1.0, 0.0])).item()
        0.5

    See Also:
        `workbench.monitors.update_ratio`: Size of an update relative to the parameters.
    """
    before, after = _same_shapes("before", before, "after", after)
    before, gradients = _same_shapes("before", before, "gradients", gradients)
    counts = [n_unchanged(*each) for each in zip(before, after, gradients, strict=True)]
    unchanged, total = (torch.stack([c[i].to(counts[0][0]) for c in counts]).sum() if counts else 0 for i in range(2))
    return torch.as_tensor(unchanged) / torch.as_tensor(total)


def n_unchanged(before: Tensor, after: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Count the unchanged entries among those with a nonzero gradient, and all entries with one; both 0-dim."""
    has_gradient = gradient != 0
    return torch.count_nonzero(has_gradient & (before == after)), torch.count_nonzero(has_gradient)


@checked
def adam_staleness(gradients: Tensors, second_moments: Tensors, eps: NonNegativeFloat = 1e-8) -> Tensor:
    """Return sqrt(mean(g^2 / max(v, eps^2))), which is about 1 while Adam's second moment v matches the gradients g.

    Spikes of it precede spikes of the loss by a few steps (Wortsman et al. 2023, arXiv:2304.13013).

    Args:
        gradients: Gradients of this step, one tensor or several.
        second_moments: Second moments v, by whose roots the optimizer divides; with Adam's bias correction if the
            optimizer applies it.
        eps: Epsilon of Adam, at least 0.

    Returns:
        0-dim, dimensionless; NaN if there are no entries or if a gradient or moment is NaN.

    Raises:
        OptionError: If the two do not have the same shapes, or ``eps`` is negative.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> round(wb.monitors.adam_staleness(torch.full((4,), 0.2), torch.full((4,), 0.01)).item(), 3)
        2.0

    See Also:
        `workbench.monitors.gradient_signal_share`: Noise of the gradients, from the same moments.
    """
    gradients, second_moments = _same_shapes("gradients", gradients, "second_moments", second_moments)
    pairs = zip(gradients, second_moments, strict=True)
    # This form avoids a root of each entry, which would take longer than all other operations together.
    sums = [(widened(g).square() / widened(v).clamp_min(eps**2)).sum() for g, v in pairs]
    total = torch.stack([each.to(sums[0]) for each in sums]).sum() if sums else torch.tensor(torch.nan)
    return total.sqrt() / _count(gradients) ** 0.5


@checked
def gradient_signal_share(
    first_moments: Tensors,
    second_moments: Tensors,
    *,
    beta1: Annotated[float, at_least(0), below(1)],
    n_updates: NonNegativeFloat,
) -> Tensor:
    """Estimate the fraction of the mean squared gradient that successive batches have in common, from Adam's moments.

    For gradients g = s + n with noise n that is independent between batches, the bias-corrected moments have the
    expectations m^2 = s^2 + r n^2 and v = s^2 + n^2, where r = (1 - beta1) (1 + beta1^t) / ((1 + beta1) (1 - beta1^t))
    after t updates. The result solves these, summed over all entries, for s^2 / (s^2 + n^2). The simple gradient noise
    scale of McCandlish et al. 2018 (arXiv:1812.06162, Eq. 2.9) is the batch size times (1 - fraction) / fraction: below
    one half, gradients are mostly noise.

    Args:
        first_moments: Bias-corrected first moments, one tensor or several.
        second_moments: Bias-corrected second moments of the same shapes.
        beta1: Decay of the first moment, at least 0 and below 1.
        n_updates: Number of updates t in the moments.

    Returns:
        0-dim, at most 1 while the gradients are stationary, and about 0, possibly slightly negative, for pure noise.
        NaN before the second update, if beta1 is 0, if all gradients are 0, if there are no entries, or if a moment is
        NaN.

    Raises:
        OptionError: If the two do not have the same shapes, or ``beta1`` is not in [0, 1).

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> moments = torch.tensor([2.0, -1.0]), torch.tensor([4.0, 1.0])  # of gradients that are always the same
        >>> wb.monitors.gradient_signal_share(*moments, beta1=0.9, n_updates=10).item()
        1.0

    See Also:
        `workbench.monitors.adam_staleness`: Match of the gradients and the second moment.
    """
    first, second = _same_shapes("first_moments", first_moments, "second_moments", second_moments)
    squares, total = _norm(first) ** 2, _norm(v.clamp_min(0).sqrt() for v in second) ** 2
    return signal_share(squares / total, beta1=beta1, n_updates=n_updates)


def signal_share(ratio: Any, *, beta1: float, n_updates: float) -> Any:
    """Return `gradient_signal_share` from the sum of squared first moments over the sum of second moments."""
    if not (beta1 > 0 and n_updates > 1):
        return ratio * float("nan")
    decay = beta1**n_updates
    noise = (1 - beta1) * (1 + decay) / ((1 + beta1) * (1 - decay))
    return (ratio - noise) / (1 - noise)


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors.detach()] if isinstance(tensors, Tensor) else [tensor.detach() for tensor in tensors]


def _same_shapes(name: str, first: Tensors, other: str, second: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Return two arguments as lists of tensors; raise OptionError if their shapes differ."""
    first, second = _listed(first), _listed(second)
    shapes = [tuple(t.shape) for t in first], [tuple(t.shape) for t in second]
    if shapes[0] != shapes[1]:
        raise OptionError(
            f"{name} and {other} have shapes {shapes[0]} and {shapes[1]}; pass the same tensors in order."
        )
    return first, second


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all entries together."""
    norms = [torch.linalg.vector_norm(t, dtype=widened(t[:0] if t.ndim else t).dtype) for t in tensors]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0]) for n in norms])) if norms else torch.tensor(torch.nan)


def _count(tensors: list[Tensor]) -> int | float:
    return sum(t.numel() for t in tensors) or float("nan")
