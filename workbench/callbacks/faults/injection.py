"""The faults of one run as a callback, and a fault attached to any loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.callbacks.attachment import Attachment
from workbench.callbacks.faults.communication import (
    DroppedBucket,
    Gradients,
    LowPrecisionReduction,
    StaleReduction,
    in_buckets,
    ring_sum,
)
from workbench.callbacks.faults.fault import CorruptedData, Fault, LargeRate, NoAuxiliaryLoss, SmallBatch
from workbench.callbacks.faults.flash_attention_mode import (
    NO_CUT,
    FlashAttentionMode,
    LowPrecisionAttention,
    attention_modules,
)
from workbench.errors import OptionError
from workbench.models.batches import count_examples, take_examples
from workbench.models.calling import acting_on_gradients, call_model, innermost, unwrap
from workbench.models.losses import auxiliary_loss
from workbench.models.probing import undisturbed
from workbench.tasks.task import mixed_seed
from workbench.training.callback import Callback, PassFunction, PassResult, TrainingRun
from workbench.training.loop import takes_several_passes

_OF_GRADIENTS = (DroppedBucket, LowPrecisionReduction, StaleReduction)
_AnyFault = TypeVar("_AnyFault", bound=Fault)


class Injection(Callback):
    """The faults of a run as a callback; without any fault, it changes nothing.

    The faults act in the order of the data flow, not in that of the list: corrupted data, smaller batch, attention,
    loss, gradients (split over ranks, lost, summed, delayed), learning rate. Gradients are changed before their norm is
    measured.

    Args:
        faults: Faults from `workbench.faults`, at most one of each kind.
        seed: Seed of the random draws, which depend only on the seed and the step.

    Attributes:
        active: Names of the faults that are on in the current step.

    Raises:
        OptionError: If an element is not a fault, two faults are of the same kind, or two contradict each other.

    Example:
        >>> import workbench as wb
        >>> injection = wb.faults.Injection([wb.faults.LargeRate(factor=5.0, start=10)], seed=1)
        >>> injection.begin_step(10)
        >>> injection.active, injection.rate_factor
        (('large_rate',), 5.0)

    See Also:
        `workbench.train`: Creates it from its argument ``faults``.
        `workbench.faults.Fault`: Injects a fault into any training loop by its method ``attach``.
    """

    name = "faults"
    is_planned = False

    def __init__(self, faults: Sequence[Fault], *, seed: int = 0) -> None:
        self._faults: dict[type[Fault], Fault] = {}
        for fault in faults:
            if type(fault) in self._faults:
                raise OptionError(f"faults contains {fault.kind} twice; pass at most one fault of each kind.")
            self._faults[type(fault)] = fault
        dropped, reduced = self._get(DroppedBucket), self._get(LowPrecisionReduction)
        if dropped and dropped.needs_ranks and reduced and dropped.n_ranks != reduced.n_ranks:
            raise OptionError(
                f"dropped_bucket has n_ranks = {dropped.n_ranks}, but low_precision_reduction has {reduced.n_ranks}; "
                "use the same number for both."
            )
        self.seed = seed
        self.active: tuple[str, ...] = ()
        self._step = 0
        self._on_since: dict[type[Fault], int] = {}
        self._mode = FlashAttentionMode() if LowPrecisionAttention in self._faults else None
        self._handles: list[RemovableHandle] = []
        self._parameters: list[nn.Parameter] = []
        self._kept: list[Gradients] = []

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the attributes of the faults as plain values, by kind."""
        return {fault.kind: fault.describe() for fault in self._faults.values()}

    def setup(self, run: TrainingRun) -> None:
        """Collect the parameters whose gradients may be changed."""
        super().setup(run)
        # A trainer may train several times with the same callback.
        self.active, self._on_since, self._kept = (), {}, []
        if self._mode is not None:
            self._mode.n_calls = 0
        needing = () if run.owns_loop else self._of(NoAuxiliaryLoss, LowPrecisionReduction, DroppedBucket)
        for fault in needing:
            if getattr(fault, "needs_ranks", True):
                raise OptionError(
                    f"{fault.name} changes the loss or splits the batch, which is possible only in wb.train(); use "
                    "that, or leave the fault out."
                )
        optimizer = run.optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for fault in self._of(*_OF_GRADIENTS):
            if takes_several_passes(optimizer):
                raise OptionError(
                    f"{fault.name} changes the gradients of one backward pass per step, but {type(optimizer).__name__} "
                    "takes several; choose another optimizer, or leave the fault out."
                )
            n_buckets = getattr(fault, "n_buckets", 1)
            if n_buckets > len(self._parameters):
                raise OptionError.of(
                    "n_buckets", n_buckets, f"at most {len(self._parameters)}, the number of trained parameter tensors"
                )

    def begin(self) -> None:
        """Find the parts of the model that the faults change, by running it on the probe."""
        run = self.run
        if run.probe is None or not self._of(LowPrecisionAttention, NoAuxiliaryLoss):
            return
        model, inputs = unwrap(run.model), run.probe(2)
        if NoAuxiliaryLoss in self._faults:
            with undisturbed(model):
                has_one = auxiliary_loss(run.model, call_model(model, inputs)) is not None
            if not has_one:
                raise OptionError(
                    f"no_auxiliary_loss needs a model with an auxiliary loss, but {type(model).__name__} has none; use "
                    "a mixture of experts (Hugging Face: with output_router_logits=True), or leave the fault out."
                )
        if self._mode is not None:
            modules = attention_modules(model, inputs)
            if not modules:
                raise _no_attention_error(model)
            self._handles = self._mode.register_recomputation_hooks(modules)

    def end(self, *, is_broken: bool = False) -> None:
        """Remove all hooks; the switches are unchanged."""
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
                self._record_switch(fault, f"{fault.name} on: {fault.effect}.")
            else:
                del self._on_since[kind]
                self._record_switch(fault, f"{fault.name} off.")
        self.active = tuple(fault.name for kind, fault in self._faults.items() if kind in self._on_since)
        if self._mode is not None:
            attention = self._on(LowPrecisionAttention)
            self._mode.cut = NO_CUT if attention is None else attention.cut
        if self._on(StaleReduction) is None:
            self._kept.clear()

    def outcome(self) -> tuple[str, ...]:
        """Return the names of the faults that were on in this step."""
        return self.active

    @property
    def rate_factor(self) -> float:
        """Factor on the learning rate in this step."""
        fault = self._on(LargeRate)
        return 1.0 if fault is None else fault.rate_factor(self._step - self._on_since[LargeRate])

    @property
    def keeps_auxiliary_loss(self) -> bool:
        """Whether the auxiliary loss of the model counts in this step."""
        return self._on(NoAuxiliaryLoss) is None

    def switch_off(self, kind: type[Fault]) -> None:
        """Switch off the fault of a kind, from the next step on; without such a fault, nothing happens."""
        if kind in self._faults:
            self._faults[kind].enabled = False

    def around_pass(self) -> AbstractContextManager[Any]:
        """Return the context in which the attention of the fault replaces that of torch."""
        return nullcontext() if self._mode is None else self._mode

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Return the auxiliary loss, which is zero while `NoAuxiliaryLoss` is on."""
        return auxiliary if auxiliary is None or self.keeps_auxiliary_loss else torch.zeros_like(auxiliary)

    def change_batch(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """Return the batch of this step as changed by the faults."""
        if (corrupted := self._on(CorruptedData)) is not None:
            inputs, targets = corrupted.batch(inputs, targets, self._random(corrupted))
        if (small := self._on(SmallBatch)) is not None:
            inputs, targets = small.batch(inputs, targets)
        return inputs, targets

    def run_pass(self, one_pass: PassFunction, inputs: Any, targets: Tensor) -> PassResult:
        """Run the forward and backward pass over a batch, with the faults of its gradients."""
        faults = self._of(*_OF_GRADIENTS)
        if not any(type(fault) in self._on_since for fault in faults):
            return one_pass(inputs, targets)
        parts, ranks = [], []
        for shard in self._shards(inputs, targets):
            parts.append(one_pass(*shard))
            ranks.append([parameter.grad for parameter in self._parameters])
        self._set_gradients(self._reduced(ranks))
        if len(parts) == 1:
            return parts[0]
        return PassResult([loss for part in parts for loss in part.losses], torch.cat([part.logits for part in parts]))

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Apply the faults of the gradients, and check that attention ran; `workbench.train` does both elsewhere."""
        if not self.is_running or self.run.owns_loop:
            return
        if any(type(fault) in self._on_since for fault in self._of(*_OF_GRADIENTS)):
            self._set_gradients(self._reduced([[parameter.grad for parameter in self._parameters]]))
        if self._mode is not None and not self._mode.n_calls:
            raise _no_attention_error(self.run.model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, in types that ``torch.load(weights_only=True)`` accepts."""
        return {
            "switches": {fault.kind: fault.state_dict() for fault in self._faults.values()},
            "on_since": {kind.kind: step for kind, step in self._on_since.items()},
            "kept": [list(gradients) for gradients in self._kept],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned, including the switches of the faults."""
        for fault in self._faults.values():
            fault.load_state_dict(state["switches"][fault.kind])
        on_since = state["on_since"]
        self._on_since = {kind: on_since[kind.kind] for kind in self._faults if kind.kind in on_since}
        self._kept = [
            [None if g is None else g.to(parameter.device) for parameter, g in zip(self._parameters, kept, strict=True)]
            for kept in state["kept"]
        ]

    def _set_gradients(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _record_switch(self, fault: Fault, message: str) -> None:
        self.event(self._step, "fault", source=fault.name, message=message)

    def _of(self, *kinds: type[Fault]) -> list[Fault]:
        """Return the faults of some kinds, on or off."""
        return [self._faults[kind] for kind in kinds if kind in self._faults]

    def _get(self, kind: type[_AnyFault]) -> _AnyFault | None:
        """Return the fault of a kind, on or off; None if there is none."""
        fault = self._faults.get(kind)
        return fault if isinstance(fault, kind) else None

    def _on(self, kind: type[_AnyFault]) -> _AnyFault | None:
        """Return the fault of a kind if it is on in this step; None otherwise."""
        return self._get(kind) if kind in self._on_since else None

    def _random(self, fault: Fault) -> torch.Generator:
        return torch.Generator().manual_seed(mixed_seed("fault", fault.kind, self.seed, self._step))

    def _shards(self, inputs: Any, targets: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield the part of a batch for each rank; the complete batch if no fault splits it."""
        dropped, reduced = self._on(DroppedBucket), self._on(LowPrecisionReduction)
        splitting = reduced or (dropped if dropped is not None and dropped.needs_ranks else None)
        if splitting is None:
            yield inputs, targets
            return
        n_examples = count_examples(inputs)
        if n_examples < splitting.n_ranks:
            raise OptionError.of(
                "n_ranks",
                splitting.n_ranks,
                f"at most {n_examples}, the number of examples of the batch that {splitting.name} splits",
            )
        for numbers in np.array_split(np.arange(n_examples), splitting.n_ranks):
            of_rank = slice(numbers[0], numbers[-1] + 1)
            yield take_examples(inputs, of_rank), targets[of_rank]

    def _reduced(self, ranks: list[Gradients]) -> Gradients:
        """Return the gradients that the optimizer receives, from those of all ranks."""
        if (dropped := self._on(DroppedBucket)) is not None:
            dropped.drop(ranks, self._buckets(dropped.n_buckets), self._random(dropped))
        reduced = self._on(LowPrecisionReduction)
        gradients = ranks[0] if len(ranks) == 1 else _mean(ranks, reduced)
        if (stale := self._on(StaleReduction)) is None:
            return gradients
        scaler = self.run.scaler if self.is_running else None
        scale = 1.0 if scaler is None else scaler.get_scale()  # scale of the gradients, in float16
        # Stored without the scale, which may have changed when they are used; overflows remain infinite.
        self._kept = [*self._kept[-stale.delay :], _each(torch._foreach_div, gradients, scale)]
        late = stale.late(self._kept, self._buckets(stale.n_buckets), self._random(stale))
        return _each(torch._foreach_mul, late, scale)

    def _buckets(self, n_buckets: int) -> list[list[int]]:
        return in_buckets([parameter.numel() for parameter in self._parameters], n_buckets)


def _no_attention_error(model: nn.Module) -> OptionError:
    return OptionError(
        "low_precision_attention needs a model that calls torch's scaled_dot_product_attention directly, "
        f"but {type(model).__name__} does not; load a Hugging Face model with attn_implementation='sdpa', "
        "or leave the fault out."
    )


def _each(function: Callable[..., Sequence[Tensor]], gradients: Gradients, scale: float) -> Gradients:
    """Return gradients of which a function of a list has computed each that is there."""
    given = [g for g in gradients if g is not None]
    found = iter(function(given, scale) if given else ())
    return [None if g is None else next(found) for g in gradients]


def _mean(ranks: list[Gradients], reduced: LowPrecisionReduction | None) -> Gradients:
    """Return the mean over ranks, computed in a ring of low precision if there is such a fault."""
    templates: dict[int, Tensor] = {}  # a gradient of each parameter that has one on any rank
    for i, of_ranks in enumerate(zip(*ranks, strict=True)):
        first = next((gradient for gradient in of_ranks if gradient is not None), None)
        if first is not None:
            templates[i] = first
    given = [[(rank[i], like) for i, like in templates.items()] for rank in ranks]
    flat = [torch.cat([(torch.zeros_like(like) if g is None else g).flatten() for g, like in of]) for of in given]
    total = torch.stack(flat).sum(0) if reduced is None else ring_sum(flat, reduced)
    parts = (total / len(ranks)).split([template.numel() for template in templates.values()])
    mean: Gradients = [None] * len(ranks[0])
    for (i, template), part in zip(templates.items(), parts, strict=True):
        mean[i] = part.view_as(template).to(template.dtype)
    return mean


class AttachedFault:
    """A fault attached to a model and an optimizer; created by `Fault.attach`.

    Leaving its context, or calling `detach`, removes it. Each update is a step. A step begins with the first forward
    pass with gradients after the previous update. Gradients and learning rate are changed right before the update,
    ahead of all other hooks on the optimizer, so that a recorder sees what the optimizer receives. Faults of the data
    change the inputs of the model in training mode.
    """

    def __init__(
        self, fault: Fault, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int = 0, seed: int = 0
    ) -> None:
        self.fault, self.step = fault, step
        self._attachment = Attachment([Injection([fault], seed=seed)])
        self._passes, self._is_in_pass, self._has_begun = ExitStack(), False, False
        self._changes_inputs = isinstance(fault, SmallBatch | CorruptedData)
        self._attachment.begin(model, optimizer, step=step)
        inner = innermost(optimizer)
        self._handles = [
            # Ahead of the hook of a recorder, which notes the modes in which a pass runs.
            model.register_forward_pre_hook(torch.compiler.disable(self._enter), with_kwargs=True, prepend=True),
            inner.register_step_pre_hook(torch.compiler.disable(self._before_update)),
            inner.register_step_post_hook(torch.compiler.disable(self._after_update)),
        ]
        # The hooks that change the gradients and then the rate are moved ahead of those registered earlier.
        hooks: Any = inner._optimizer_step_pre_hooks
        for hook in [list(hooks)[-2], list(hooks)[-1]]:
            hooks.move_to_end(hook, last=False)

    def __enter__(self) -> AttachedFault:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.detach(is_broken=kind is not None)

    def detach(self, *, is_broken: bool = False) -> None:
        """Remove all hooks; apart from the training so far, model and optimizer are as before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._leave_pass()
        self._attachment.end(is_broken=is_broken)

    def change_batch(self, inputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """Return a batch as changed by a fault of the data, before its forward pass, where the model gets no labels."""
        self._begin()
        self._changes_inputs = False
        return self._attachment.callbacks.change_batch(inputs, targets)

    def _begin(self) -> None:
        """Read the switch, once for each update."""
        if not self._has_begun:
            self._has_begun = True
            self._attachment.begin_step(self.step)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        # Within the backward pass, gradient checkpointing runs the model again.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return None
        self._begin()
        if not self._is_in_pass:
            self._is_in_pass = True
            self._passes.enter_context(self._attachment.callbacks.around_pass())
        if not self._changes_inputs or not module.training:  # the examples of a recorder's probe are not changed
            return None
        if isinstance(kwargs.get("labels"), Tensor):
            return args, self._attachment.change_batch(kwargs)
        if args and isinstance(args[0], Mapping) and isinstance(args[0].get("labels"), Tensor):
            return (self._attachment.change_batch(args[0]), *args[1:]), kwargs
        if isinstance(self.fault, CorruptedData) and self.fault.what == "tokens":
            no_labels = torch.empty(0)
            if args:
                return (self._attachment.callbacks.change_batch(args[0], no_labels)[0], *args[1:]), kwargs
            return args, self._attachment.callbacks.change_batch(kwargs, no_labels)[0]
        raise OptionError(
            f"{self.fault.name} changes labels, which this model does not receive; pass each batch through "
            "change_batch(inputs, targets) of the object that attach() returned."
        )

    def _leave_pass(self) -> None:
        self._is_in_pass = False
        self._passes.close()

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        def act(loss: Any) -> None:
            self._leave_pass()
            self._attachment.before_update(self.step, {})

        self._begin()
        return acting_on_gradients(optimizer, args, kwargs, act)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._leave_pass()
        self._attachment.updated(self.step)
        self.step += 1
        self._has_begun = False
