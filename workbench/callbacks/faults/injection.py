"""The faults of one run: the methods that the training loop calls in each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from workbench.callbacks.faults.communication import (
    DroppedBucket,
    Gradients,
    LowPrecisionReduction,
    StaleReduction,
    in_buckets,
    ring_sum,
)
from workbench.callbacks.faults.conditions import CorruptedData, LargeRate, NoAuxiliaryLoss, SmallBatch
from workbench.callbacks.faults.fault import Fault
from workbench.callbacks.faults.flash_attention_mode import NO_CUT, FlashAttentionMode, attention_modules
from workbench.callbacks.faults.low_precision_fault import LowPrecisionAttention
from workbench.errors import OptionError
from workbench.models.batches import count_rows, take_rows
from workbench.models.calling import call_model
from workbench.models.losses import auxiliary_loss
from workbench.models.probing import undisturbed
from workbench.models.wrapping import unwrap
from workbench.tasks.task import mixed_seed
from workbench.training.callback import Callback, PassFunction, PassResult, TrainingRun
from workbench.training.loop import takes_several_passes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.hooks import RemovableHandle

_OF_GRADIENTS = (DroppedBucket, LowPrecisionReduction, StaleReduction)
_AnyFault = TypeVar("_AnyFault", bound=Fault)


class Injection(Callback):
    """The faults of a run as a callback; without any fault, no method changes anything.

    They act in the order in which data flow, whatever their order in the list: corrupted data, a smaller batch,
    attention, the loss, then gradients: split over ranks, lost, added up, late; and the rate. Gradients are changed
    before their norm is measured.

    Args:
        faults: Faults from `workbench.faults`.
        seed: Seed of their random draws, which depend on it and the step.

    Raises:
        OptionError: If an element is no fault, two are of one kind, or two contradict each other.

    Example:
        >>> import workbench as wb
        >>> injection = wb.faults.Injection([wb.faults.LargeRate(factor=5.0, start=10)], seed=1)
        >>> sorted(injection.describe())
        ['large_rate']
    """

    name = "faults"
    is_planned = False

    def __init__(self, faults: Sequence[Fault], *, seed: int = 0) -> None:
        if isinstance(faults, Fault):
            raise OptionError(f"faults is one {faults.name}, expected a sequence; pass [it].")
        self._faults: dict[type[Fault], Fault] = {}
        for fault in faults:
            if not isinstance(fault, Fault):
                raise OptionError(
                    f"faults holds a {type(fault).__name__}, expected faults such as wb.faults.large_rate()."
                )
            if type(fault) in self._faults:
                raise OptionError(f"faults holds {fault.kind} twice, expected one of a kind; join or drop one.")
            self._faults[type(fault)] = fault
        dropped, reduced = self._get(DroppedBucket), self._get(LowPrecisionReduction)
        if dropped and dropped.needs_ranks and reduced and dropped.n_ranks != reduced.n_ranks:
            raise OptionError(
                f"dropped_bucket has n_ranks = {dropped.n_ranks} but low_precision_reduction {reduced.n_ranks}; "
                "give both the same number."
            )
        self.seed = seed
        self.active: tuple[str, ...] = ()
        self._step = 0
        self._on_since: dict[type[Fault], int] = {}
        self._mode = FlashAttentionMode() if LowPrecisionAttention in self._faults else None
        self._handles: list[RemovableHandle] = []
        self._weights: list[nn.Parameter] = []
        self._kept: list[Gradients] = []

    def describe(self) -> dict[str, dict[str, Any]]:
        """The faults as plain values, by kind."""
        return {fault.kind: fault.describe() for fault in self._faults.values()}

    def setup(self, run: TrainingRun) -> None:
        """Collect the parameters whose gradients may be changed.

        Raises:
            OptionError: If a fault is incompatible with the trainer, the optimizer or the parameters.
        """
        super().setup(run)
        self.active, self._on_since, self._kept = (), {}, []  # a trainer may train with one callback several times
        if self._mode is not None:
            self._mode.n_calls = 0
        if not run.owns_loop:
            self._require_own_loop()
        optimizer = run.optimizer
        self._weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        for fault in self._of(*_OF_GRADIENTS):
            if takes_several_passes(optimizer):
                raise OptionError(
                    f"{fault.name} changes the gradients of one backward pass a step, but {type(optimizer).__name__} "
                    "takes several; choose another optimizer, or leave the fault out."
                )
            n_buckets = getattr(fault, "n_buckets", 1)
            if n_buckets > len(self._weights):
                raise OptionError(
                    f"{fault.name} has n_buckets = {n_buckets}, but only {len(self._weights)} weight tensors are "
                    "trained; take fewer buckets."
                )

    def _require_own_loop(self) -> None:
        for fault in self._of(NoAuxiliaryLoss, LowPrecisionReduction, DroppedBucket):
            if getattr(fault, "needs_ranks", True):
                raise OptionError(
                    f"{fault.name} changes the loss or splits the batch, which only wb.train() lets it do; train with "
                    "that, or leave the fault out."
                )

    def begin(self) -> None:
        """Find the parts of the model that the faults change, by running it on its probe.

        Raises:
            OptionError: If it has no attention or no auxiliary loss that could be changed.
        """
        run = self.run
        if run.probe is None or not self._of(LowPrecisionAttention, NoAuxiliaryLoss):
            return
        model, inputs = unwrap(run.model), run.probe(2)
        if NoAuxiliaryLoss in self._faults:
            with undisturbed(model):
                has_one = auxiliary_loss(run.model, call_model(model, inputs)) is not None
            if not has_one:
                raise OptionError(
                    f"no_auxiliary_loss needs a model with an auxiliary loss, but {type(model).__name__} has none; "
                    "take a mixture of experts (Hugging Face: with output_router_logits=True), or leave the fault out."
                )
        if self._mode is not None:
            modules = attention_modules(model, inputs)
            if not modules:
                raise _no_attention(model)
            self._handles = self._mode.reaches_recomputation(modules)

    def end(self, *, is_broken: bool = False) -> None:
        """Remove all hooks; the switches stay as they are."""
        super().end(is_broken=is_broken)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self, step: int) -> None:
        """Read the switches for the coming step."""
        self._step = step
        for kind, fault in self._faults.items():
            is_on = fault.begin_step(step)
            if is_on == (kind in self._on_since):
                continue
            if is_on:
                self._on_since[kind] = step
                self._say(fault, f"{fault.name} on: {fault.effect}.")
            else:
                del self._on_since[kind]
                self._say(fault, f"{fault.name} off.")
        self.active = tuple(fault.name for kind, fault in self._faults.items() if kind in self._on_since)
        if self._mode is not None:
            attention = self._on(LowPrecisionAttention)
            self._mode.cut = NO_CUT if attention is None else attention.cut
        if self._on(StaleReduction) is None:
            self._kept.clear()

    def outcome(self) -> tuple[str, ...]:
        """Names of the faults that were on."""
        return self.active

    @property
    def rate_factor(self) -> float:
        """The factor on the learning rate in this step."""
        fault = self._on(LargeRate)
        return 1.0 if fault is None else fault.rate_factor(self._step - self._on_since[LargeRate])

    @property
    def keeps_auxiliary_loss(self) -> bool:
        """Whether the model's own auxiliary loss counts in this step."""
        return self._on(NoAuxiliaryLoss) is None

    def switch_off(self, kind: type[Fault]) -> None:
        """Switch off the fault of a kind by hand, from the next step on."""
        if kind in self._faults:
            self._faults[kind].enabled = False

    def around_pass(self) -> AbstractContextManager[Any]:
        """The attention of the fault, in place of torch's."""
        return nullcontext() if self._mode is None else self._mode

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Remove the model's own auxiliary loss if that fault is on."""
        return auxiliary if auxiliary is None or self.keeps_auxiliary_loss else torch.zeros_like(auxiliary)

    def change_batch(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """The batch of this step as changed by the faults.

        Raises:
            OptionError: If it has fewer examples than are to be kept, or nothing to corrupt.
        """
        if (corrupted := self._on(CorruptedData)) is not None:
            inputs, targets = corrupted.batch(inputs, targets, self._random(corrupted))
        if (small := self._on(SmallBatch)) is not None:
            inputs, targets = small.batch(inputs, targets)
        return inputs, targets

    def run_pass(self, one_pass: PassFunction, inputs: Any, targets: Tensor) -> PassResult:
        """Forward and backward pass over a batch, with the faults of its gradients.

        Returns:
            The result of the pass; over several ranks their mean, with the logits of all.
        """
        faults = self._of(*_OF_GRADIENTS)
        if not any(type(fault) in self._on_since for fault in faults):
            return one_pass(inputs, targets)
        parts, ranks = [], []
        for shard in self._shards(inputs, targets):
            parts.append(one_pass(*shard))
            if not parts[-1].is_finite:
                break
            ranks.append([weight.grad for weight in self._weights])
        whole = _joined(parts)
        if whole.is_finite:
            for weight, gradient in zip(self._weights, self._reduced(ranks), strict=True):
                weight.grad = gradient
        return whole

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """In another trainer: apply the faults of one rank's gradients, and check that attention ran."""
        if not self.is_running or self.run.owns_loop:
            return
        if any(type(fault) in self._on_since for fault in self._of(*_OF_GRADIENTS)):
            reduced = self._reduced([[weight.grad for weight in self._weights]])
            for weight, gradient in zip(self._weights, reduced, strict=True):
                weight.grad = gradient
        if self._mode is not None and not self._mode.n_calls:
            raise _no_attention(self.run.model)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, in types that ``torch.load(weights_only=True)`` reads."""
        return {
            "switches": {fault.kind: fault.state_dict() for fault in self._faults.values()},
            "on_since": {kind.kind: step for kind, step in self._on_since.items()},
            "kept": [list(gradients) for gradients in self._kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; the switches of the faults are set to it."""
        for fault in self._faults.values():
            fault.load_state_dict(state["switches"][fault.kind])
        on_since = state["on_since"]
        self._on_since = {kind: on_since[kind.kind] for kind in self._faults if kind.kind in on_since}
        self._kept = [
            [None if one is None else one.to(weight.device) for weight, one in zip(self._weights, kept, strict=True)]
            for kept in state["kept"]
        ]

    def _say(self, fault: Fault, message: str) -> None:
        self.event(self._step, "fault", source=fault.name, message=message)

    def _of(self, *kinds: type[Fault]) -> list[Fault]:
        return [self._faults[kind] for kind in kinds if kind in self._faults]

    def _get(self, kind: type[_AnyFault]) -> _AnyFault | None:
        """The fault of a kind, on or off."""
        fault = self._faults.get(kind)
        return fault if isinstance(fault, kind) else None

    def _on(self, kind: type[_AnyFault]) -> _AnyFault | None:
        """The fault of a kind, if it is on in this step."""
        return self._get(kind) if kind in self._on_since else None

    def _random(self, fault: Fault) -> torch.Generator:
        return torch.Generator().manual_seed(mixed_seed("fault", fault.kind, self.seed, self._step))

    def _shards(self, inputs: Any, targets: Tensor) -> Iterator[tuple[Any, Tensor]]:
        dropped, reduced = self._on(DroppedBucket), self._on(LowPrecisionReduction)
        splitting = reduced or (dropped if dropped is not None and dropped.needs_ranks else None)
        if splitting is None:
            yield inputs, targets
            return
        n_rows = count_rows(inputs)
        if n_rows < splitting.n_ranks:
            raise OptionError(
                f"{splitting.name} splits a batch over n_ranks = {splitting.n_ranks}, but one has only {n_rows} rows; "
                "take fewer ranks or larger batches."
            )
        for rows in torch.arange(n_rows).tensor_split(splitting.n_ranks):
            which = slice(int(rows[0]), int(rows[-1]) + 1)
            yield take_rows(inputs, which), targets[which]

    def _reduced(self, ranks: list[Gradients]) -> Gradients:
        """The gradients that the optimizer gets, from those of all ranks."""
        if (dropped := self._on(DroppedBucket)) is not None:
            dropped.drop(ranks, self._buckets(dropped.n_buckets), self._random(dropped))
        reduced = self._on(LowPrecisionReduction)
        gradients = ranks[0] if len(ranks) == 1 else _mean(ranks, reduced)
        if (stale := self._on(StaleReduction)) is None:
            return gradients
        scaler = self.run.scaler if self.is_running else None
        scale = 1.0 if scaler is None else scaler.get_scale()  # scale of the gradients, in float16
        # Kept without the scale, which may have changed when they are used; overflowed values stay infinite.
        self._kept = [*self._kept[-stale.delay :], [None if g is None else g / scale for g in gradients]]
        late = stale.late(self._kept, self._buckets(stale.n_buckets), self._random(stale))
        return [None if g is None else g * scale for g in late]

    def _buckets(self, n_buckets: int) -> list[list[int]]:
        return in_buckets([weight.numel() for weight in self._weights], n_buckets)


def _no_attention(model: nn.Module) -> OptionError:
    return OptionError(
        "low_precision_attention needs a model that calls torch's scaled_dot_product_attention itself, "
        f"but {type(model).__name__} does not; load a Hugging Face model with attn_implementation='sdpa', "
        "or leave the fault out."
    )


def _mean(ranks: list[Gradients], reduced: LowPrecisionReduction | None) -> Gradients:
    """Mean over ranks, in a ring of low precision if there is such a fault."""
    shapes: dict[int, Tensor] = {}  # shape of each parameter that has a gradient on any rank
    for i, of_ranks in enumerate(zip(*ranks, strict=True)):
        first = next((gradient for gradient in of_ranks if gradient is not None), None)
        if first is not None:
            shapes[i] = first
    flat = [torch.cat([_filled(rank[i], shape).flatten() for i, shape in shapes.items()]) for rank in ranks]
    total = torch.stack(flat).sum(0) if reduced is None else ring_sum(flat, reduced)
    parts = (total / len(ranks)).split([shape.numel() for shape in shapes.values()])
    mean: Gradients = [None] * len(ranks[0])
    for (i, shape), part in zip(shapes.items(), parts, strict=True):
        mean[i] = part.view_as(shape).to(shape.dtype)
    return mean


def _filled(gradient: Tensor | None, shape: Tensor) -> Tensor:
    """A gradient; zeros shaped like another if there is none."""
    return torch.zeros_like(shape) if gradient is None else gradient


def _joined(parts: list[PassResult]) -> PassResult:
    """The passes of all ranks as one; every rank counts alike."""
    if len(parts) == 1:
        return parts[0]
    is_finite = all(part.is_finite for part in parts)
    return PassResult(
        loss=math.fsum(part.loss for part in parts) / len(parts) if is_finite else math.nan,
        auxiliary_loss=math.fsum(part.auxiliary_loss for part in parts) / len(parts) if is_finite else math.nan,
        logits=torch.cat([part.logits for part in parts]),
        is_finite=is_finite,
    )
