"""Labels and weights of tokens in a cross entropy, read from the gradient of its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Label of positions that do not count, by the convention of PyTorch.
IGNORED = -100
#: Most logits of which labels are read; of more, the first examples.
_MOST = 1 << 26
#: A gradient is that of a cross entropy if a line through the probabilities explains it up to this fraction.
_MAX_RESIDUAL = 0.02
#: Least share of positions with such a gradient.
_LEAST_FITTING = 0.99
#: A class that is this much less likely than another, in nats, is masked.
_MASKED = 1e3


@dataclass(frozen=True)
class TokenLabels:
    """What the gradient of logits says about a cross entropy.

    Attributes:
        labels: Class that the loss wants at each position, -100 where the position does not count; shape (...).
        weights: Factor of each position's loss in the differentiated loss, shape (...); unit 1. In a policy gradient
            they may be negative.
        losses: Cross entropy at each position, in nats, shape (...); NaN where the position does not count.
        n_classes: Number of classes.
        is_cross_entropy: Whether the gradient is that of a cross entropy with one label for each position.
        smoothing: Label smoothing.
        spread: Standard deviation of the logits over classes, without classes that are masked.
        are_probabilities: Whether the logits of each position are probabilities: positive, with the sum 1.
    """

    labels: Tensor
    weights: Tensor
    losses: Tensor
    n_classes: int
    is_cross_entropy: bool
    smoothing: float
    spread: float = float("nan")
    are_probabilities: bool = False

    @property
    def counts(self) -> Tensor:
        """Whether each position counts, shape (...)."""
        return self.labels != IGNORED


@torch.no_grad()
def read_labels(logits: Tensor, gradient: Tensor) -> TokenLabels | None:
    """Return labels and weights of a cross entropy.

    The gradient of a position with the weight w, probabilities p, label y and smoothing e is
    w (p - (1 - e) 1[c = y] - e / V): a line in p, off which only the label lies. Slope and offset of the line are those
    of two other classes.

    Args:
        logits: Shape (..., class).
        gradient: Derivative of the differentiated loss by the logits, in the same shape.

    Returns:
        Labels and weights; None if there are fewer than two classes, or the output is no tensor of logits.
    """
    if logits.ndim < 2 or logits.shape[-1] < 2 or not logits.numel():
        return None
    n = max(1, _MOST // max(1, logits[0].numel()))
    z, g = logits[:n].double(), gradient[:n].double()
    p, n_classes = z.softmax(-1), z.shape[-1]
    size = g.abs().amax(-1)
    counts = size > 0
    # Of a policy gradient some weights are negative, and the label has the largest derivative.
    label, weight, residual, share = _line(p, g, g.argmin(-1))
    if n_classes > 2:
        others = _line(p, g, g.argmax(-1))
        is_negative = (residual > _MAX_RESIDUAL * size) & (others[2] < 0.1 * residual)
        label, weight, residual, share = (
            torch.where(is_negative, b, a) for a, b in zip((label, weight, residual, share), others, strict=True)
        )
    fits = (residual <= _MAX_RESIDUAL * size) | ~counts
    # Where the outputs are themselves logarithms of probabilities, a gradient is a constant, and no weight is off it.
    has_weight = weight.abs() > 0.1 * size
    smoothing = float(share[counts].median()) if counts.any() else 0.0
    smoothing = smoothing if 0.005 < smoothing < 0.9 else 0.0
    loss = -z.log_softmax(-1).gather(-1, label[..., None])[..., 0]
    return TokenLabels(
        label.where(counts, IGNORED).cpu(),
        (weight / (1 - smoothing)).where(counts, 0.0).cpu(),
        loss.where(counts, torch.nan).cpu(),
        n_classes,
        bool(counts.any())
        and bool(fits[counts].double().mean() > _LEAST_FITTING and has_weight[counts].double().mean() > 0.5),
        smoothing,
        _spread(z[counts]),
        bool(counts.any()) and bool((z[counts] >= 0).all() and (z[counts].sum(-1) - 1).abs().max() < 0.01),
    )


def _line(p: Tensor, g: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the label, the weight, the largest distance of another class from the line, and the smoothing."""
    n_classes = p.shape[-1]
    at_p, at_g = (each.gather(-1, label[..., None])[..., 0] for each in (p, g))
    if n_classes == 2:  # there is one other class: the offset of the line is taken as 0
        return label, -at_g / (1 - at_p).clamp_min(1e-12), g.sum(-1).abs(), torch.zeros_like(at_p)
    # Classes that are masked before the loss have no gradient, and the probabilities of others are in proportion.
    others = (g != 0).scatter_(-1, label[..., None], value=False)
    n_others = others.sum(-1, keepdim=True).clamp_min(1)
    # Least squares over the other classes; if their probabilities are equal, the line goes through 0.
    mean_p, mean_g = (each.where(others, 0.0).sum(-1, keepdim=True) / n_others for each in (p, g))
    dp = (p - mean_p).where(others, 0.0)
    variance = dp.square().sum(-1, keepdim=True)
    slope = (dp * (g - mean_g)).sum(-1, keepdim=True) / variance.clamp_min(1e-300)
    slope = slope.where(variance > 1e-24, mean_g / mean_p.clamp_min(1e-300))
    line = mean_g + slope * (p - mean_p)
    residual = (g - line).where(others, 0.0).abs().amax(-1)
    weight = line.gather(-1, label[..., None])[..., 0] - at_g
    slope, offset = slope[..., 0], (mean_g - slope * mean_p)[..., 0]
    return label, weight, residual, -offset * n_classes / slope.where(slope != 0, 1.0)


def _spread(logits: Tensor) -> float:
    """Return the mean over positions of the standard deviation over classes that are not masked."""
    is_real = logits > logits.amax(-1, keepdim=True) - _MASKED
    n = is_real.sum(-1)
    mean = logits.where(is_real, 0.0).sum(-1) / n
    return float(((logits - mean[..., None]).where(is_real, 0.0).square().sum(-1) / n).sqrt().mean())
