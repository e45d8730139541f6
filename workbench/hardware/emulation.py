"""Input and result of emulations: a model, micro-batches and a plan; and a finding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from workbench.errors import AnatomyError, OptionError
from workbench.formatting import counted
from workbench.formatting import fine_percent as percent
from workbench.hardware.share_gradients import Batch, GradientLayout, Loss, ShareGradients, WorkingCopy
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import count_examples, take_examples
from workbench.tasks.task import mixed_seed

if TYPE_CHECKING:
    from workbench.hardware.plan_files import AssessmentPlan
    from workbench.training.training_plan import TrainingPlan

#: Maximum number of micro-batches whose gradients are measured.
MAX_SHARES = 32


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of an emulation.

    Attributes:
        effect: The value that is compared with the limits of the hazard.
        meaning: What it means for this plan, one sentence.
        how: How it was emulated, one sentence.
        n_trials: Number of emulations of which the effect is the mean.
        relative_error: Norm of the change of the gradient (or update) over its norm; NaN if it does not apply.
        error_over_noise: Norm of the change over the sampling noise of the plan's batch.
        shrinkage: Fraction of the gradient (or update) that is missing along its own direction.
        shrinkage_error: Standard error of the shrinkage between draws; 0 if nothing is drawn.
        cosine: Cosine between the gradients with and without the effect.
        layer_errors: Relative error in each block, shape (layer,).
        growth: Number of terms -> relative error of their sum.
        is_extrapolated: Whether the effect is extrapolated beyond the emulated number of terms.
        remedy_value: Remedy instead of the usual one of the hazard; None uses the usual one.
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
    """A model, micro-batches for it, and the plan that is emulated.

    Attributes:
        rows: Examples in a micro-batch: as in the plan, or fewer if there are too few examples.
        micro_batches: The batches split into micro-batches, at most 32.
        known: Findings that several hazards share.
        measured: Other measurements that several hazards share, by name.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], plan: AssessmentPlan, *, loss: Loss, seed: int
    ) -> None:
        self.model, self.plan, self.loss, self.seed = model, plan, loss, seed
        self.batches = list(batches)
        n_rows = sum(count_examples(inputs) for inputs, _ in self.batches)
        if n_rows < 2:
            raise OptionError(
                f"The batches contain {counted(n_rows, 'example')}, but at least two are needed to measure the "
                "sampling noise; pass more."
            )
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
