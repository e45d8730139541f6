"""Gradients of the shares of one update: measured on a few micro-batches, resampled for as many as a plan has."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import SnapshotError, WorkbenchError
from workbench.models.calling import call_model
from workbench.models.losses import auxiliary_loss, prediction_of
from workbench.models.probing import family_options
from workbench.models.wrapping import unwrap
from workbench.training import low_precision

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Any, Tensor]

#: Gradient entries kept of all shares together; of larger models every n-th entry of each weight is kept.
MAX_VALUES = 2**25
#: The same for resampled terms.
_MAX_DRAWN = 2**23


class NotMeasured(Exception):  # noqa: N818  (a result, caught by who asked; not an error of the user's)
    """An emulation is impossible on this model; the message gives the reason as a clause."""


class WorkingCopy:
    """A float32 copy of a model, in eval mode, to take gradients of and to change; the model itself is not changed.

    Args:
        model: Any module.
        loss: Function of logits and targets.

    Attributes:
        model: The copy.
        names: Names of its trainable weights.
        weights: The trainable weights.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = copy.deepcopy(unwrap(model)).float().eval()
        for option in family_options(self.model):
            setattr(*option)
        self.model.zero_grad(set_to_none=True)
        self.loss = loss
        named = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        self.names = [name for name, _ in named]
        self.weights = [weight for _, weight in named]

    def measure(self, batch: Batch, *, autocast: torch.dtype | None = None, scale: float = 1.0) -> float:
        """Take the gradients of one batch, which stay on the weights, and return its loss.

        Args:
            batch: Inputs and targets.
            autocast: Format of torch's autocast in the forward pass; None: that of the weights.
            scale: Factor of the loss before the backward pass.

        Raises:
            NotMeasured: If the model has no gradient in eval mode, or not in this format.
        """
        inputs, targets = batch
        device = next((weight.device.type for weight in self.weights), "cpu")
        self.model.zero_grad(set_to_none=True)
        try:
            with low_precision.autocast(device, autocast):
                output = call_model(self.model, inputs)
                own = self.loss(prediction_of(output), targets)
                extra = auxiliary_loss(self.model, output)
                total = own if extra is None else own + extra
            (total * scale).backward()
        except WorkbenchError:
            raise
        except Exception as error:  # of any kind, as the model's code is unknown
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise NotMeasured(f"the model has no gradient in eval mode ({cause})") from error
        return float(own.detach())

    def gradients(self) -> list[Tensor]:
        """The gradient of each weight, zero where it has none."""
        return [torch.zeros_like(w) if w.grad is None else w.grad.detach() for w in self.weights]


@dataclass(frozen=True)
class GradientLayout:
    """Which entries of a model's gradients are kept, and the weights and blocks they belong to.

    Attributes:
        steps: Stride of the kept entries of each weight.
        sizes: Number of kept entries of each weight.
        layers: Block that each weight belongs to, -1 for none.
        n_layers: Blocks.
    """

    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    n_layers: int

    @classmethod
    def of(cls, weights: Sequence[Tensor], layers: Sequence[int], n_layers: int, *, n_shares: int) -> GradientLayout:
        """The layout of a model's weights for ``n_shares`` shares."""
        step = max(1, -(-sum(w.numel() for w in weights) * n_shares // MAX_VALUES))
        steps = tuple(min(step, w.numel()) for w in weights)
        sizes = tuple(-(-w.numel() // s) for w, s in zip(weights, steps, strict=True))
        return cls(steps, sizes, tuple(layers), n_layers)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """The kept entries, as one float32 vector on the CPU."""
        parts = [t.detach().flatten()[::s].float().cpu() for t, s in zip(tensors, self.steps, strict=True)]
        return torch.cat(parts)

    @property
    def factor(self) -> Tensor:
        """Number of entries that each kept one represents, shape (entry,), float64."""
        return torch.repeat_interleave(torch.tensor(self.steps, dtype=torch.float64), torch.tensor(self.sizes))

    @property
    def layer(self) -> Tensor:
        """The block of each kept entry, shape (entry,), int64."""
        return torch.repeat_interleave(torch.tensor(self.layers), torch.tensor(self.sizes))


@dataclass(frozen=True)
class Discrepancy:
    """The difference between a gradient and its reference.

    Attributes:
        relative_error: Norm of the difference over the norm of the reference.
        error_norm: Norm of the difference.
        shrinkage: 1 - <found, reference> / <reference, reference>: the part missing along the reference. Above 0: too
            short, which does not average out over updates.
        cosine: Cosine of the angle between them.
        layer_errors: Relative error within each block, shape (layer,); NaN where the reference is zero.
    """

    relative_error: float
    error_norm: float
    shrinkage: float
    cosine: float
    layer_errors: np.ndarray


def compare(found: Tensor, reference: Tensor, factor: Tensor, layer: Tensor, n_layers: int) -> Discrepancy:
    """Compare ``found`` with ``reference``.

    Args:
        found: Gradient, shape (entry,).
        reference: Reference, shape (entry,), float64.
        factor: Number of entries that each kept one represents.
        layer: Block of each entry, -1 for none.
        n_layers: Blocks.
    """
    found, reference = found.double(), reference.double()
    squares, error = reference.square() * factor, (found - reference).square() * factor
    length, along = float(squares.sum()), float((found * reference * factor).sum())
    own_length = float((found.square() * factor).sum())
    norms = [torch.zeros(n_layers + 1, dtype=torch.float64).index_add_(0, layer + 1, v) for v in (error, squares)]
    with np.errstate(divide="ignore", invalid="ignore"):
        layer_errors = np.sqrt(norms[0][1:].numpy() / norms[1][1:].numpy())
    if not length:  # relative errors are 0 or infinite
        lost = math.inf if float(error.sum()) else 0.0
        return Discrepancy(lost, math.sqrt(float(error.sum())), lost, math.nan, np.full(n_layers, np.nan))
    return Discrepancy(
        relative_error=math.sqrt(float(error.sum()) / length),
        error_norm=math.sqrt(float(error.sum())),
        shrinkage=1 - along / length,
        cosine=along / math.sqrt(length * own_length) if 0 < own_length < math.inf else math.nan,
        layer_errors=np.where(np.isfinite(layer_errors), layer_errors, np.nan),
    )


@dataclass(frozen=True)
class Terms:
    """Gradients that are added up.

    Attributes:
        values: float32, shape (term, entry).
        factor: Number of entries that each one represents, shape (entry,).
        layer: Block of each, -1 for none, shape (entry,).
        n_layers: Blocks.
        are_measured: Whether each is a measured gradient; else they are resampled from measured ones.
    """

    values: Tensor
    factor: Tensor
    layer: Tensor
    n_layers: int
    are_measured: bool

    @property
    def exact_sum(self) -> Tensor:
        """The sum in float64, shape (entry,)."""
        total = torch.zeros(self.values.shape[1], dtype=torch.float64)
        for term in self.values:
            total += term.double()
        return total

    def compare(self, found: Tensor, reference: Tensor) -> Discrepancy:
        """Compare two sums."""
        return compare(found, reference, self.factor, self.layer, self.n_layers)


class ShareGradients:
    """Gradients of micro-batches, each the mean over its sequences.

    Args:
        gradients: float32, shape (micro-batch, entry).
        rows: Sequences in a micro-batch.
        layout: Layout of the entries.

    Raises:
        SnapshotError: If some are not finite.
    """

    def __init__(self, gradients: Tensor, rows: int, layout: GradientLayout) -> None:
        if not bool(gradients.isfinite().all()):
            raise SnapshotError(
                "The gradients of the model are not finite on these batches, so nothing that is added to them can be "
                "judged; look at its initialization first."
            )
        self.values, self.rows, self.layout = gradients, rows, layout
        self.factor, self.layer = layout.factor, layout.layer
        self.mean = gradients.double().mean(0)
        n = len(gradients)
        # One by one, so that no second copy of all gradients is made.
        spread = sum(float(((g.double() - self.mean).square() * self.factor).sum()) for g in gradients) / max(n - 1, 1)
        #: Trace of the covariance of the gradient of one sequence.
        self.row_variance = spread * rows
        squared = float((self.mean.square() * self.factor).sum())
        #: Squared norm of the expected gradient, without the contribution of the sampling noise; at least 0.
        self.squared_norm = max(0.0, squared - spread / n)
        #: Factor that corrects the length of the measured mean for the same noise; 0 if it is all noise.
        self.mean_share = math.sqrt(self.squared_norm / squared) if squared else 0.0

    @property
    def norm(self) -> float:
        """Norm of the mean of all measured micro-batches."""
        return math.sqrt(float((self.mean.square() * self.factor).sum()))

    def noise(self, n_rows: int) -> float:
        """Sampling noise of the gradient of ``n_rows`` sequences: root of the expected squared distance to its mean."""
        return math.sqrt(self.row_variance / n_rows)

    def terms(self, n_terms: int, rows: int, generator: torch.Generator) -> Terms:
        """Gradients of ``n_terms`` shares of ``rows`` sequences each.

        Where enough sequences were measured these are their gradients. Otherwise terms are drawn with replacement from
        the measured ones: the mean, corrected for the sampling noise in its length (McCandlish et al. 2018,
        arXiv:1812.06162, appendix A), and a deviation from it, scaled to the variance of ``rows`` sequences. So
        magnitude, direction and noise of each term are those of the plan, on other data.

        Args:
            n_terms: Number of shares.
            rows: Sequences in each.
            generator: Generator of the draws; on the CPU.
        """
        group, n = rows // self.rows, len(self.values)
        if rows % self.rows == 0 and n_terms * group <= n:
            values = self.values[: n_terms * group].view(n_terms, group, -1)
            values = values[:, 0] if group == 1 else values.mean(1)
            return Terms(values, self.factor, self.layer, self.layout.n_layers, True)
        step = max(1, -(-self.values.shape[1] * n_terms // _MAX_DRAWN))
        # The first kept entry varies, so that no weight is left out by the stride alone.
        start = int(torch.randint(step, (1,), generator=generator))
        values, mean = self.values[:, start::step], self.mean[start::step].float()
        scale = math.sqrt(self.rows / rows * n / max(n - 1, 1))
        drawn = torch.randint(n, (n_terms,), generator=generator)
        terms = (values[drawn] - mean).mul_(scale).add_(mean * self.mean_share)
        return Terms(terms, self.factor[start::step] * step, self.layer[start::step], self.layout.n_layers, False)
