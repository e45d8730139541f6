"""Measurements of a recorder: arithmetic, the effect of an update, queries and keys, reduction of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.recorder.batch_watch import few_examples
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer, OptimizedParameters
from workbench.callbacks.recorder.options import jointly
from workbench.errors import OptionError, SnapshotError
from workbench.models.anatomy import Anatomy
from workbench.models.attention_weights import QueryKey, Unreadable
from workbench.models.calling import call_model, is_shared
from workbench.models.losses import loss_in, prediction_of, tensors_in, token_loss
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import read_arrays
from workbench.monitors.attention_health import qk_update_spectrum
from workbench.monitors.matrices import effective_rank, frobenius_norm, spectral_entropy, stable_rank
from workbench.probes.gradient_agreement import GradientVerdict
from workbench.probes.gradient_comparison import compare_gradients
from workbench.probes.gradient_projections import GradientProjections
from workbench.probes.precision import precision_errors
from workbench.probes.reduction import KnownAnswer, known_answer_all_reduce
from workbench.probes.update import update_effect

#: Number of tokens of the probe on which gradients are computed.
N_TOKENS = 64
#: Function that returns the context of the run's passes.
Around = Callable[[], AbstractContextManager[Any]]


class ProbeCollector:
    """Measurements that need gradients of a few examples."""

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
        """Copy the trained parameters before an update whose effect is measured."""
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


TERMS = ("D2", "D3", "dWq", "dWk", "W")
#: Variables computed for each of them.
SPECTRA_OF_HEADS = ("frobenius_norm", "stable_rank", "effective_rank", "spectral_entropy")
#: Query weight entries that are compared in one call; float64 copies and factors have about ten times as many.
_ENTRIES_AT_A_TIME = 1 << 23


class QueryKeyWindow:
    """Changes of query and key weights since the last measurement.

    Layers of equal shape are processed in one call. Only the weights of queries and keys are stored, in at least
    float32.
    """

    def __init__(
        self, readings: Sequence[QueryKey | Unreadable], parameters: OptimizedParameters, alpha: float
    ) -> None:
        self.n_layers = len(readings)
        self.parameters, self.alpha = parameters, alpha
        groups: dict[tuple, list[QueryKey]] = {}
        for reading in readings:
            if isinstance(reading, QueryKey):
                groups.setdefault((reading.query.shape, reading.key.shape), []).append(reading)
        self._groups = list(groups.values())
        self.n_heads = max((group[0].query.shape[0] for group in self._groups), default=0)
        self._base: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """Take the current weights as the base point."""
        self._base = [self._read(group) for group in self._groups]

    def measure(self, n_heads: int) -> tuple[dict[str, np.ndarray], dict[int, str]]:
        """Measure the changes since the base point; the current weights become the next base point.

        Returns:
            For each variable an array (layer, head, term), and a description of layers with values that are not finite.
        """
        shape = (self.n_layers, n_heads, len(TERMS))
        measures = {
            "frobenius_norm": frobenius_norm,
            "stable_rank": stable_rank,
            "effective_rank": lambda s: effective_rank(s, alpha=self.alpha),
            "spectral_entropy": lambda s: spectral_entropy(s, alpha=self.alpha),
        }
        values = {name: np.full(shape, np.nan) for name in measures}
        broken: dict[int, str] = {}
        # All are read first: shards are gathered from all ranks, which would wait if a computation failed on one.
        bases, self._base = self._base, [self._read(group) for group in self._groups]
        for group, before, now in zip(self._groups, bases, self._base, strict=True):
            n_layers = max(1, _ENTRIES_AT_A_TIME // max(1, now[0][0].numel()))  # that are computed together
            for start in range(0, len(now[0]), n_layers):
                part = slice(start, start + n_layers)
                layers = [reading.layer for reading in group[part]]
                spectra = qk_update_spectrum(*(w[part] for w in (*before, *now)))
                good = [torch.isfinite(w[part]).flatten(1).all(1) for w in now]
                places = [(name, i) for i in range(len(TERMS)) for name in measures]
                measured = [measures[name](spectra[TERMS[i]]) for name, i in places]
                *found, of_queries, of_keys = read_arrays([*measured, *good])  # one transfer for all
                is_finite = np.logical_and(of_queries, of_keys)
                broken |= {layers[i]: "query and key weights" for i in np.flatnonzero(~is_finite)}
                n_own = now[0].shape[1]
                for (name, i), value in zip(places, found, strict=True):
                    values[name][layers, :n_own, i] = value
        return values, broken

    def _read(self, group: Sequence[QueryKey]) -> tuple[Tensor, Tensor]:
        """Return query and key weights, shape (layer, head, feature, head_dim), in at least float32."""
        queries = [reading.query_recipe.read(self.parameters.as_model)[0] for reading in group]
        keys = [reading.key_recipe.read(self.parameters.as_model)[0] for reading in group]
        return torch.stack([_wide(q) for q in queries]), torch.stack([_wide(k) for k in keys])


def _wide(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


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
    """Comparison of projected gradients; if hooks cannot see full gradients, a check of a sum with a known answer."""

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
