"""Probes of a recorder: errors of the run's arithmetic, and the effect of an update on fixed examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.recorder.batch_watch import few_examples
from workbench.errors import SnapshotError
from workbench.models.anatomy import Anatomy
from workbench.models.attention_weights import QueryKey, Unreadable
from workbench.models.calling import call_model
from workbench.models.losses import loss_in, prediction_of, tensors_in, token_loss
from workbench.models.probing import undisturbed
from workbench.probes.precision import precision_errors
from workbench.probes.update import update_effect

#: Number of tokens of the probe on which gradients are computed.
N_TOKENS = 64
#: Function that returns the context of the run's passes.
Around = Callable[[], AbstractContextManager[Any]]


class ProbeCollector:
    """Measurements that need gradients of a few examples.

    Args:
        model: Model without its wrappers.
        probe: Examples of the recorder, of which a few are used.
        anatomy: Anatomy of the blocks; None if it cannot be read.
        query_keys: Query and key weights, one entry per block.
        around: Function that returns the context of the run's passes.
        loss_of: Function from the model to its loss on fixed examples; None for the loss that the model itself returns
            for the probe, if it does.
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
        self.rows = few_examples(probe, N_TOKENS)
        self._loss_of = loss_of
        self._before: dict[str, Tensor] = {}

    def precision(self) -> dict[str, np.ndarray]:
        """Return the variables of ``schema.PRECISION``."""
        if self.anatomy is None:
            raise SnapshotError("The blocks of the model cannot be read.")
        errors = precision_errors(
            self.model, self._some_loss, anatomy=self.anatomy, query_keys=self.query_keys, around=self.around
        )
        return {str(name): variable.values for name, variable in errors.data_vars.items()}

    @torch.no_grad()
    def begin_update(self, copies: Mapping[int, Tensor]) -> None:
        """Copy the trained parameters before an update whose effect is measured.

        Args:
            copies: Copies of some of them that exist already, flat, by the id of the parameter.
        """
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self._before = {
            name: copies[id(weight)].view(weight.shape) if id(weight) in copies else weight.detach().clone()
            for name, weight in trained.items()
        }

    def update(self) -> dict[str, float]:
        """Return the variables of ``schema.UPDATE``; NaN if the parameters were not copied before."""
        before, self._before = self._before, {}
        if not before:
            return {"loss_change": math.nan, "predicted_loss_change": math.nan}
        effect = update_effect(self.model, self._true_loss, before)
        return {"loss_change": effect.change, "predicted_loss_change": effect.predicted}

    @property
    def knows_loss(self) -> bool:
        """Whether the loss on fixed examples is available."""
        if self._loss_of is not None:
            return True
        with undisturbed(self.model):
            return loss_in(call_model(self.model, self.rows)) is not None

    def _true_loss(self, model: nn.Module) -> Tensor:
        if self._loss_of is not None:
            return self._loss_of(model)
        loss = loss_in(call_model(model, self.rows))
        if loss is None:
            raise SnapshotError("The model no longer returns a loss.")
        return loss

    def _some_loss(self, model: nn.Module) -> Tensor:
        """Return the model's own loss, or one with similar gradients of all outputs."""
        output = call_model(model, self.rows)
        if (loss := loss_in(output)) is not None:
            return loss
        prediction = prediction_of(output)
        if not isinstance(prediction, Tensor):  # such as a tuple, or the last hidden state
            prediction = next((each for each in tensors_in(output) if each.requires_grad), None)
        if not isinstance(prediction, Tensor):
            raise SnapshotError("The model returns neither a loss nor logits.")
        if prediction.ndim > 1 and prediction.shape[-1] > 1:
            n_targets = prediction[..., 0].numel()
            # Targets spread over the classes; errors of arithmetic do not depend on the choice.
            targets = (7919 * torch.arange(n_targets, device=prediction.device)) % prediction.shape[-1]
            return token_loss(prediction, targets.view(prediction.shape[:-1]))
        return prediction.float().square().mean()
