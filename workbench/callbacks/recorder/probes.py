"""Measurements of a recorder: arithmetic, the effect of an update, queries and keys, reduction of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from workbench.callbacks.recorder.batch_watch import few_examples
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer, OptimizedParameters
from workbench.callbacks.recorder.options import jointly, summed_over_ranks
from workbench.errors import OptionError, SnapshotError
from workbench.models.anatomy import Anatomy
from workbench.models.attention_weights import QueryKey, Unreadable
from workbench.models.calling import call_model, is_shared
from workbench.models.losses import loss_in, prediction_of, tensors_in, token_loss
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import Measurement, finish, full_tensor
from workbench.monitors.attention_health import spectrum_of_grams, update_grams
from workbench.monitors.matrices import at_least_float32, frobenius_norm, spectral_entropy, stable_rank, widened
from workbench.probes.gradient_agreement import GradientAgreement, GradientVerdict
from workbench.probes.gradient_comparison import compare_gradients
from workbench.probes.gradient_projections import GradientProjections
from workbench.probes.precision import precision_reading, trained_blocks
from workbench.probes.reduction import KnownAnswer, known_answer_all_reduce
from workbench.probes.update import update_reading

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
        #: Layers whose arithmetic cannot be measured, with the reason.
        self.failed: dict[int, str] = {}

    @property
    def precision_layers(self) -> list[int]:
        """Layers whose arithmetic can be measured."""
        return [] if self.anatomy is None else [i for i in trained_blocks(self.anatomy) if i not in self.failed]

    def precision(self, layers: Collection[int] | None = None) -> Measurement[dict[str, np.ndarray]]:
        """Measure the variables of ``schema.PRECISION`` of some layers, None for all; NaN for the others.

        A layer whose measurement fails is added to ``failed`` and not measured again. If none is left, that is an
        error.
        """
        if self.anatomy is None:
            raise SnapshotError("The blocks of the model cannot be read.")
        able = self.precision_layers
        values, failed = yield from precision_reading(
            self.model,
            self._some_loss,
            anatomy=self.anatomy,
            query_keys=self.query_keys,
            around=self.around,
            layers=[layer for layer in able if layers is None or layer in layers],
        )
        self.failed |= {layer: f"{type(error).__name__}: {error}" for layer, error in failed.items()}
        if failed and self.failed.keys() >= {*able}:
            raise SnapshotError(f"No block can be run separately ({next(iter(self.failed.values()))}).")
        return values

    @torch.no_grad()
    def begin_update(self, copies: Mapping[int, Tensor]) -> None:
        """Copy the trained parameters before an update whose effect is measured."""
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        self._before = {
            name: copies[id(weight)].view(weight.shape)
            if id(weight) in copies and not hasattr(weight, "to_local")
            else weight.detach().clone()
            for name, weight in trained.items()
        }

    def update(self) -> Measurement[dict[str, float]]:
        """Return the variables of ``schema.UPDATE``; NaN if the parameters were not copied before."""
        before, self._before = self._before, {}
        if not before:
            yield []
            return {"loss_change": math.nan, "predicted_loss_change": math.nan}
        before = {name: full_tensor(weight) for name, weight in before.items()}
        effect = yield from update_reading(self.model, self._true_loss, before)
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
#: Query weight entries that are compared in one call; float64 copies have about four times as many.
_ENTRIES_AT_A_TIME = 1 << 23
#: Entries of the Gram matrices that are computed and copied at a time; their eigenvalues take the host some 0.2 s.
_ENTRIES_OF_GRAMS = 1 << 21


class QueryKeyWindow:
    """Changes of query and key weights since the last measurement.

    Layers of equal shape are processed in one call. Only the weights of queries and keys are stored, in at least
    float32. In a large model some layers are measured at a time; when all have had their turn, their values follow
    together, each over its own window.
    """

    def __init__(
        self, readings: Sequence[QueryKey | Unreadable], parameters: OptimizedParameters, alpha: float
    ) -> None:
        self.n_layers = len(readings)
        self.parameters, self.alpha = parameters, alpha
        self._readings = [reading for reading in readings if isinstance(reading, QueryKey)]
        self.n_heads = max((reading.query.shape[0] for reading in self._readings), default=0)
        self._base: list[_Weights] = []
        self._turns: list[list[QueryKey]] = []
        n_entries = math.inf
        for reading in self._readings:
            own = 4 * reading.query.shape[0] * reading.query.shape[-1] ** 2  # of the Gram matrices of its heads
            if n_entries + own > _ENTRIES_OF_GRAMS:
                self._turns.append([])
                n_entries = 0
            self._turns[-1].append(reading)
            n_entries += own
        self._n_measured = 0
        self._round: dict[str, np.ndarray] = {}

    @property
    def is_in_turn(self) -> bool:
        """Whether not all layers are measured together."""
        return len(self._turns) > 1

    def begin(self) -> None:
        """Take the current weights of the layers whose turn it is as the base point."""
        groups: dict[tuple, list[QueryKey]] = {}
        for reading in self._turns[self._n_measured % len(self._turns)] if self._turns else ():
            groups.setdefault((reading.query.shape, reading.key.shape), []).append(reading)
        self._base = [
            self._read(group[start : start + n])
            for group in groups.values()
            for n in [max(1, _ENTRIES_AT_A_TIME // max(1, group[0].query.numel()))]  # layers that are computed together
            for start in range(0, len(group), n)
        ]

    def release(self) -> None:
        """Release the weights of the base point."""
        self._base = []

    def measure(self, n_heads: int, *, is_full: bool) -> Measurement[tuple[dict[str, np.ndarray], dict[int, str]]]:
        """Measure the changes since the base point; the current weights become the next base point.

        Args:
            n_heads: Heads of a row.
            is_full: Whether the window has its length; values over fewer updates are not comparable, and are NaN.

        Returns:
            For each variable an array (layer, head, term), NaN unless all layers have had their turn; and a description
            of layers with values that are not finite.
        """
        self._n_measured += 1
        is_complete = not self._turns or self._n_measured % len(self._turns) == 0
        parts = [
            ([reading.layer for reading in base.group], base.query.shape[-2], widened(base.query[:0]).dtype)
            for base in self._base
        ]
        found = iter((yield self._changes()))
        shape = (self.n_layers, n_heads, len(TERMS))
        values = {name: np.full(shape, np.nan) for name in SPECTRA_OF_HEADS}
        broken: dict[int, str] = {}
        for layers, n_features, dtype in parts:
            gram_q, gram_k = torch.from_numpy(next(found)), torch.from_numpy(next(found))
            is_finite = np.isfinite(next(found)) & np.isfinite(next(found))
            broken |= {layers[i]: "query and key weights" for i in np.flatnonzero(~is_finite)}
            for term, s in enumerate(spectrum_of_grams(gram_q, gram_k, n_features, torch.finfo(dtype).eps).values()):
                entropy = spectral_entropy(s, alpha=self.alpha)
                for name, value in zip(
                    SPECTRA_OF_HEADS, (frobenius_norm(s), stable_rank(s), entropy.exp(), entropy), strict=True
                ):
                    values[name][layers, : gram_q.shape[1], term] = value if is_full else math.nan
        if not self.is_in_turn:
            return values, broken
        for name, earlier in self._round.items():
            values[name] = np.where(np.isnan(values[name]), earlier, values[name])
        self._round = {} if is_complete else values
        return values if is_complete else {name: np.full(shape, np.nan) for name in values}, broken

    def _changes(self) -> list[Tensor]:
        """Return Gram matrices and largest weights of each part; apart from them, no copy is kept on the device."""
        # All are read first: shards are gathered from all ranks, which would wait if a computation failed on one.
        before, self._base = self._base, [self._read(base.group) for base in self._base]
        found: list[Tensor] = []
        for old, new in zip(before, self._base, strict=True):
            found += update_grams(old.query, old.key, new.query, new.key)
            found += [torch.linalg.vector_norm(w.flatten(1), torch.inf, 1) for w in (new.query, new.key)]
        return found

    def _read(self, group: Sequence[QueryKey]) -> _Weights:
        queries = [reading.query_recipe.read(self.parameters.as_model)[0] for reading in group]
        keys = [reading.key_recipe.read(self.parameters.as_model)[0] for reading in group]
        return _Weights(group, *(torch.stack([at_least_float32(w) for w in of]) for of in (queries, keys)))


@dataclass(frozen=True)
class _Weights:
    """Query and key weights of some layers, shape (layer, head, feature, head_dim), in at least float32."""

    group: Sequence[QueryKey]
    query: Tensor
    key: Tensor


#: Values of a step that was not measured.
_UNKNOWN = {
    "gradient_verdict": -1.0,
    "wrong_parameters": math.nan,
    "significant_bits": math.nan,
    "missing_rank": math.nan,
    "missing_pass": math.nan,
    "receiving_rank": math.nan,
}


#: Largest number of parameters whose gradients are compared in turn, and of wrong ones that are compared again.
_N_IN_TURN, _N_AGAIN = 32, 8
#: Relative difference between norms of the same parameter on two ranks.
_SAME = 1e-5


class ReductionCollector:
    """Comparison of projected gradients; if hooks cannot see full gradients, a check of a sum with a known answer.

    Parameters take turns, in groups from all parts of the model.
    """

    def __init__(self, optimizer: JointOptimizer, model: nn.Module) -> None:
        self._parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.projections: GradientProjections | None = None
        self._values = dict(_UNKNOWN)
        self._begun: tuple[Measurement[Any], Sequence[Tensor]] | None = None
        self._n_taken = 0
        self._wrong: list[int] = []
        with suppress(OptionError):  # parameters that are sharded in another way, or a device without float64
            self.projections = GradientProjections(self._parameters, model=model)
        self.replicas = _replicas(self._parameters)
        if not self.replicas:
            self.projections = None

    def arm(self) -> None:
        """Register hooks before the first backward pass of a step that is measured."""
        if self.projections is not None and not self.projections.is_armed:
            n_groups = -(-len(self.replicas) // _N_IN_TURN)
            turn, first = divmod(self._n_taken, n_groups)
            group = self.replicas[first::n_groups]
            self.projections.arm(sorted({*group, *self._wrong}), turn=turn)

    def note_update(self) -> None:
        """Note the gradients after an update, before a step that is measured."""
        if self.projections is not None:
            self.projections.note_update()

    def disarm(self) -> None:
        """Remove hooks."""
        if self.projections is not None:
            self.projections.disarm()

    @property
    def is_ready(self) -> bool:
        """Whether the gradients of this step were seen by hooks, or need not be."""
        return self.projections is None or self.projections.is_armed

    def skip(self) -> None:
        """Skip the comparison; called instead of `take` if a rank could not take part in it."""
        self._values = dict(_UNKNOWN)
        self.disarm()

    def take(self) -> None:
        """Begin to compare the gradients right before the update; called on every rank if all are ready."""
        self._values, self._begun = dict(_UNKNOWN), None
        self._n_taken += 1
        if (projections := self.projections) is not None:
            measurement = projections.measured()
            self._begun = measurement, jointly(lambda: next(measurement))
        elif is_shared():
            self._values = _of_known_answer(known_answer_all_reduce(torch.zeros((), device=self._parameters[0].device)))

    def values(self) -> Measurement[dict[str, float]]:
        """Return the variables of ``schema.REDUCTION`` for the step of the last `take`."""
        begun, self._begun, values = self._begun, None, self._values
        if begun is None or self.projections is None:
            yield []
            return values
        found = yield begun[1]
        own = jointly(lambda: finish(begun[0], found))
        return self._compared(compare_gradients(self.projections.gathered(own)))

    def _compared(self, found: GradientAgreement) -> dict[str, float]:
        measured = [state for state in found.states if state != GradientVerdict.NOT_MEASURED]
        wrong = [number for number, state in enumerate(found.states) if state.is_fault]
        self._wrong = wrong[:_N_AGAIN]  # so that the fault is not over while others have their turn
        return {
            "gradient_verdict": float(found.verdict.severity),
            "wrong_parameters": len(wrong) / len(measured) if measured else math.nan,
            "significant_bits": float(found.n_bits),
            "missing_rank": float(min(found.missing_ranks, default=math.nan)),
            "missing_pass": float(min(found.missing_passes, default=math.nan)),
            "receiving_rank": _one_of(found.receivers if found.verdict.is_fault else (), len(found.weights)),
        }


def _replicas(parameters: Sequence[Tensor]) -> list[int]:
    """Return the places of parameters whose gradients are reduced over ranks: not those that are parts of one model.

    Code that splits a model by hand holds its parts as plain tensors, which differ between ranks from the beginning.
    """
    places = [*range(len(parameters))]
    if not is_shared() or any(hasattr(each, "placements") for each in parameters):
        return places
    n, n_ranks = len(parameters), distributed.get_world_size()
    n_all, n_squares = summed_over_ranks(np.array([n, n * n], dtype=np.float64))
    if n_squares * n_ranks != n_all**2:  # stages of a pipeline
        return []
    own = np.zeros((n_ranks, 2, n))
    own[distributed.get_rank()] = [
        [float(value) for value in torch._foreach_norm([p.detach() for p in parameters], order)] for order in (1, 2)
    ]
    norms = summed_over_ranks(own)
    is_same = np.isclose(norms, norms[:1], rtol=_SAME, atol=0, equal_nan=True).all((0, 1))
    return [place for place in places if is_same[place]]


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
