"""The probes of a recorder: the run's own arithmetic, and the effect of an update on fixed examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.recorder.batch_watch import few_rows
from workbench.errors import SnapshotError
from workbench.models.anatomy import Anatomy
from workbench.models.attention_weights import QueryKey, Unreadable
from workbench.models.calling import call_model
from workbench.models.losses import loss_in, prediction_of, token_loss
from workbench.models.probing import undisturbed
from workbench.probes.precision import precision_errors
from workbench.probes.update import update_effect

#: Tokens of the probe that its gradients are taken on.
N_TOKENS = 64
#: Function that returns a context in which the run computes its passes.
Around = Callable[[], AbstractContextManager[Any]]


class ProbeCollector:
    """Measures with gradients of a few examples.

    Args:
        model: Model without its wrappers.
        probe: Examples of the recorder, of which a few are used.
        anatomy: Anatomy of the blocks; None: it cannot be read.
        query_keys: Query and key weights, one entry per block.
        around: Function that returns the context of the run's passes.
        loss_of: Function from the model to its loss on fixed examples; None: the loss that the model returns for the
            probe, if it does.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        anatomy: Anatomy | None,
        query_keys: Sequence[QueryKey | Unreadable],
        around: Around,
        loss_of: Callable[[nn.Module], Tensor] | None,
    ) -> None:
        self.model, self.anatomy, self.query_keys, self.around = model, anatomy, query_keys, around
        self.rows = few_rows(probe, N_TOKENS)
        self._loss_of = loss_of
        self._before: dict[str, Tensor] = {}

    def precision(self) -> dict[str, np.ndarray]:
        """Variables of ``schema.PRECISION``."""
        if self.anatomy is None:
            raise SnapshotError("the blocks cannot be read")
        errors = precision_errors(
            self.model, self._some_loss, anatomy=self.anatomy, query_keys=self.query_keys, around=self.around
        )
        return {str(name): variable.values for name, variable in errors.data_vars.items()}

    @torch.no_grad()
    def begin_update(self) -> None:
        """Copy the parameters before an update whose effect is measured."""
        self._before = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def update(self) -> dict[str, float]:
        """Variables of ``schema.UPDATE``; NaN where nothing was copied before."""
        before, self._before = self._before, {}
        if not before:
            return {"loss_change": math.nan, "predicted_loss_change": math.nan}
        effect = update_effect(self.model, self._true_loss, before)
        return {"loss_change": effect.change, "predicted_loss_change": effect.predicted}

    @property
    def knows_loss(self) -> bool:
        """Whether there is a loss whose change means something."""
        if self._loss_of is not None:
            return True
        with undisturbed(self.model):
            return loss_in(call_model(self.model, self.rows)) is not None

    def _true_loss(self, model: nn.Module) -> Tensor:
        if self._loss_of is not None:
            return self._loss_of(model)
        loss = loss_in(call_model(model, self.rows))
        if loss is None:
            raise SnapshotError("the model returns no loss any more")
        return loss

    def _some_loss(self, model: nn.Module) -> Tensor:
        """The model's own loss, or one that gives every output a gradient as a loss would."""
        output = call_model(model, self.rows)
        if (loss := loss_in(output)) is not None:
            return loss
        prediction = prediction_of(output)
        if not isinstance(prediction, Tensor):
            raise SnapshotError("the model returns neither a loss nor logits")
        if prediction.ndim > 1 and prediction.shape[-1] > 1:
            n_targets = prediction[..., 0].numel()
            # Targets spread over the classes; which ones does not matter for errors of arithmetic.
            targets = (7919 * torch.arange(n_targets, device=prediction.device)) % prediction.shape[-1]
            return token_loss(prediction, targets.view(prediction.shape[:-1]))
        return prediction.float().square().mean()
