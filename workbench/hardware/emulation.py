"""Input and result of emulations: a model, micro-batches and a plan; and a finding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import AnatomyError, OptionError, SnapshotError, WorkbenchError
from workbench.formatting import counted
from workbench.formatting import fine_percent as percent
from workbench.hardware.plan import AssessmentPlan
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import count_examples, take_examples
from workbench.models.calling import call_model, unwrap
from workbench.models.losses import auxiliary_loss, prediction_of
from workbench.models.probing import family_options
from workbench.tasks.task import mixed_seed
from workbench.training import low_precision
from workbench.training.training_plan import TrainingPlan

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Any, Tensor]

#: Maximum number of gradient entries of all shares; of larger models every n-th entry of each parameter is kept.
MAX_VALUES = 2**25
#: The same for resampled terms.
_MAX_DRAWN = 2**23


class NotMeasured(Exception):  # noqa: N818  (a result that the caller handles, not an error of the user)
    """An emulation is impossible on this model; the message states the reason as a clause."""


class WorkingCopy:
    """A float32 copy of a model, in eval mode, for gradients and updates; the model itself is not changed."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model = copy.deepcopy(unwrap(model)).float().eval()
        for option in family_options(self.model):
            setattr(*option)
        self.model.zero_grad(set_to_none=True)
        self.loss = loss
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]

    def measure(self, batch: Batch, *, autocast: torch.dtype | None = None, scale: float = 1.0) -> float:
        """Compute the gradients of one batch, which stay on the parameters, and return its loss."""
        inputs, targets = batch
        device = next((parameter.device.type for parameter in self.parameters), "cpu")
        self.model.zero_grad(set_to_none=True)
        try:
            with low_precision.autocast(device, autocast):
                output = call_model(self.model, inputs)
                loss = self.loss(prediction_of(output), targets)
                auxiliary = auxiliary_loss(self.model, output)
                total = loss if auxiliary is None else loss + auxiliary
            (total * scale).backward()
        except WorkbenchError:
            raise
        except Exception as error:  # The code of the model may raise any exception.
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise NotMeasured(f"the model has no gradient in eval mode ({cause})") from error
        return float(loss.detach())

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each parameter; zero if it has none."""
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.parameters]


@dataclass(frozen=True)
class GradientLayout:
    """The entries of gradients that are kept: stride, number and block (-1 for none) of each parameter's."""

    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    n_layers: int

    @classmethod
    def of(cls, parameters: Sequence[Tensor], layers: Sequence[int], n_layers: int, *, n_shares: int) -> GradientLayout:
        """Create the layout for the parameters of a model and ``n_shares`` shares."""
        step = max(1, -(-sum(p.numel() for p in parameters) * n_shares // MAX_VALUES))
        steps = tuple(min(step, p.numel()) for p in parameters)
        sizes = tuple(-(-p.numel() // s) for p, s in zip(parameters, steps, strict=True))
        return cls(steps, sizes, tuple(layers), n_layers)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the kept entries as one float32 vector on the CPU."""
        parts = [t.detach().flatten()[::s].float().cpu() for t, s in zip(tensors, self.steps, strict=True)]
        return torch.cat(parts)

    @property
    def factor(self) -> Tensor:
        """Number of entries that each kept entry represents, shape (entry,), float64."""
        return torch.repeat_interleave(torch.tensor(self.steps, dtype=torch.float64), torch.tensor(self.sizes))

    @property
    def layer(self) -> Tensor:
        """Block of each kept entry, shape (entry,), int64."""
        return torch.repeat_interleave(torch.tensor(self.layers), torch.tensor(self.sizes))


@dataclass(frozen=True)
class Discrepancy:
    """The difference between a gradient and its reference.

    ``shrinkage``, 1 - <found, reference> / <reference, reference>, is missing along the reference and does not average
    out over updates; the relative error of a layer is NaN where the reference is zero.
    """

    relative_error: float
    error_norm: float
    shrinkage: float
    cosine: float
    layer_errors: np.ndarray


def compare(found: Tensor, reference: Tensor, factor: Tensor, layer: Tensor, n_layers: int) -> Discrepancy:
    """Compare a gradient with its reference."""
    found, reference = found.double(), reference.double()
    squares, error = reference.square() * factor, (found - reference).square() * factor
    length, along = float(squares.sum()), float((found * reference * factor).sum())
    own_length = float((found.square() * factor).sum())
    norms = [torch.zeros(n_layers + 1, dtype=torch.float64).index_add_(0, layer + 1, v) for v in (error, squares)]
    with np.errstate(divide="ignore", invalid="ignore"):
        layer_errors = np.sqrt(norms[0][1:].numpy() / norms[1][1:].numpy())
    if not length:  # Relative errors are 0 or infinite.
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
    """Gradients that are added, float32, shape (term, entry).

    Each entry, of ``layer`` (-1 for none), represents ``factor`` entries; ``are_measured`` unless they were resampled.
    """

    values: Tensor
    factor: Tensor
    layer: Tensor
    n_layers: int
    are_measured: bool

    @property
    def exact_sum(self) -> Tensor:
        """Sum of the terms in float64, shape (entry,)."""
        total = torch.zeros(self.values.shape[1], dtype=torch.float64)
        for term in self.values:
            total += term.double()
        return total

    def compare(self, found: Tensor, reference: Tensor) -> Discrepancy:
        """Compare two sums."""
        return compare(found, reference, self.factor, self.layer, self.n_layers)


class ShareGradients:
    """Gradients of micro-batches of ``rows`` examples, float32, (micro-batch, entry), each a mean over its examples.

    ``row_variance`` is the trace of the covariance for one example, ``squared_norm`` that of the expected gradient
    without noise, and ``mean_share`` corrects the length of the measured mean (0 if it is only noise).
    """

    def __init__(self, gradients: Tensor, rows: int, layout: GradientLayout) -> None:
        if not bool(gradients.isfinite().all()):
            raise SnapshotError(
                "The gradients of the model are not finite on these batches, so numerical effects cannot be measured; "
                "check its initialization and the data."
            )
        self.values, self.rows, self.layout = gradients, rows, layout
        self.factor, self.layer = layout.factor, layout.layer
        self.mean = gradients.double().mean(0)
        n = len(gradients)
        # Computed for each gradient separately, to avoid a second copy of all of them.
        spread = sum(float(((g.double() - self.mean).square() * self.factor).sum()) for g in gradients) / max(n - 1, 1)
        self.row_variance = spread * rows
        squared = float((self.mean.square() * self.factor).sum())
        self.squared_norm = max(0.0, squared - spread / n)
        self.mean_share = math.sqrt(self.squared_norm / squared) if squared else 0.0

    @property
    def norm(self) -> float:
        """Norm of the mean of all measured micro-batches."""
        return math.sqrt(float((self.mean.square() * self.factor).sum()))

    def noise(self, n_rows: int) -> float:
        """Return the sampling noise of a gradient of ``n_rows`` examples: the RMS distance to its expectation."""
        return math.sqrt(self.row_variance / n_rows)

    def terms(self, n_terms: int, rows: int, generator: torch.Generator) -> Terms:
        """Return gradients of ``n_terms`` shares of ``rows`` examples each.

        With too few measured examples, each is the mean, its length corrected for noise (McCandlish et al. 2018,
        arXiv:1812.06162, Appendix A), plus a deviation drawn from the measured ones and scaled to the variance of
        ``rows`` examples.
        """
        group, n = rows // self.rows, len(self.values)
        if rows % self.rows == 0 and n_terms * group <= n:
            values = self.values[: n_terms * group].view(n_terms, group, -1)
            values = values[:, 0] if group == 1 else values.mean(1)
            return Terms(values, self.factor, self.layer, self.layout.n_layers, True)
        step = max(1, -(-self.values.shape[1] * n_terms // _MAX_DRAWN))
        # The first kept entry varies, so that the stride does not always omit the same parameters.
        start = int(torch.randint(step, (1,), generator=generator))
        values, mean = self.values[:, start::step], self.mean[start::step].float()
        scale = math.sqrt(self.rows / rows * n / max(n - 1, 1))
        drawn = torch.randint(n, (n_terms,), generator=generator)
        terms = (values[drawn] - mean).mul_(scale).add_(mean * self.mean_share)
        return Terms(terms, self.factor[start::step] * step, self.layer[start::step], self.layout.n_layers, False)


#: Maximum number of micro-batches whose gradients are measured.
MAX_SHARES = 32


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of an emulation.

    ``effect`` is compared with the limits of the hazard, ``meaning`` and ``how`` are sentences on this plan. Errors are
    those of the gradient (or update), NaN if they do not apply; the shrinkage is the fraction missing along it, with
    its standard error between draws. ``growth`` maps numbers of terms to the error of their sum; ``remedy_value``
    replaces the hazard's usual one.
    """

    effect: float
    meaning: str
    how: str
    n_trials: int = 1
    relative_error: float = math.nan
    error_over_noise: float = math.nan
    shrinkage: float = math.nan
    shrinkage_error: float = 0.0
    cosine: float = math.nan
    layer_errors: np.ndarray | None = None
    growth: Mapping[int, float] = field(default_factory=dict)
    is_extrapolated: bool = False
    remedy_value: str | None = None


class Emulation:
    """A model, its batches as at most 32 micro-batches, the emulated plan, and findings that hazards share."""

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], plan: AssessmentPlan, *, loss: Loss, seed: int
    ) -> None:
        self.model, self.plan, self.loss, self.seed = model, plan, loss, seed
        self.batches = list(batches)
        n_rows = sum(count_examples(inputs) for inputs, _ in self.batches)
        if n_rows < 2:
            raise OptionError(f"The batches contain {counted(n_rows, 'example')}; pass two or more, for their noise.")
        n_target = min(max(plan.n_shares, 4), MAX_SHARES)
        smallest = min(count_examples(inputs) for inputs, _ in self.batches)
        self.rows = max(1, min(plan.rows_per_share, n_rows // n_target, smallest))
        self.micro_batches = self._split()[:MAX_SHARES]
        self.known: dict[str, Finding] = {}
        self.measured: dict[str, Any] = {}

    @cached_property
    def training(self) -> TrainingPlan:
        """Settings of the run."""
        return self.plan.training_plan()

    @cached_property
    def anatomy(self) -> Anatomy | None:
        """Anatomy of the model, valid for every copy; None if the residual blocks cannot be read."""
        try:
            return read_anatomy(self.model, self.micro_batches[0][0])
        except AnatomyError:
            return None

    @property
    def layer_names(self) -> list[str]:
        """Module path of each block."""
        return [] if self.anatomy is None else [site.name for site in self.anatomy.sites]

    @cached_property
    def shares(self) -> ShareGradients:
        """Gradients of the micro-batches."""
        copy = self.copy()
        layout = self.layout_of(copy, n_shares=len(self.micro_batches))
        rows = []
        for batch in self.micro_batches:
            copy.measure(batch)
            rows.append(layout.flat(copy.gradients()))
        return ShareGradients(torch.stack(rows), self.rows, layout)

    def layout_of(self, copy: WorkingCopy, *, n_shares: int) -> GradientLayout:
        """Return which entries of the gradients of a copy are kept."""
        names = self.layer_names
        layers = [next((i for i, n in enumerate(names) if name.startswith(f"{n}.")), -1) for name in copy.names]
        return GradientLayout.of(copy.parameters, layers, len(names), n_shares=n_shares)

    def copy(self) -> WorkingCopy:
        """Return a working copy of the model."""
        return WorkingCopy(self.model, self.loss)

    def generator(self, *key: str | int) -> torch.Generator:
        """Return the random generator of an emulation, which depends on the seed and the key."""
        return torch.Generator().manual_seed(mixed_seed("hardware", self.seed, *key))

    @property
    def noise(self) -> float:
        """Sampling noise of the gradient of the plan's global batch."""
        return self.shares.noise(self.plan.batch_size)

    def over_noise(self, error_norm: float) -> float:
        """Return an error of the gradient over the sampling noise of the plan's batch; infinite without noise."""
        if not error_norm:
            return 0.0
        return error_norm / self.noise if self.noise else math.inf

    def worst_layer(self, errors: np.ndarray | None) -> str:
        """Return a clause that names the block with the largest relative error; empty if there is none."""
        if errors is None or not len(errors) or np.isnan(errors).all():
            return ""
        worst = int(np.nanargmax(errors))
        return f", most in {self.layer_names[worst]} ({percent(errors[worst])})"

    def _split(self) -> list[Batch]:
        """Split all batches into micro-batches; the remaining examples of a batch are dropped."""
        found = []
        for inputs, targets in self.batches:
            for start in range(0, count_examples(inputs) - self.rows + 1, self.rows):
                which = slice(start, start + self.rows)
                found.append((take_examples(inputs, which), targets[which]))
        return found
