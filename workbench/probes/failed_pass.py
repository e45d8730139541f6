"""The place in a pass where the first value arises that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from workbench.errors import OptionError
from workbench.models.probing import undisturbed, watch
from workbench.models.wrapping import bare, is_split, unwrap
from workbench.probes.bad_gradients import first_bad_gradient
from workbench.probes.bad_operations import BadOperation, Operations, first_bad_operation
from workbench.probes.bad_tensor import BadTensor
from workbench.probes.graph_readings import suspects
from workbench.probes.pass_readings import Call, Calls, Edge, Reading, largest_of, read, readings_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject

#: Function from the model to its loss as a 0-dim tensor with a graph.
LossOf = Callable[[nn.Module], Tensor]
#: Function that returns the context of a pass, as the run enters it.
Around = Callable[[], AbstractContextManager[Any]]


def first_bad_tensor(model: Subject | nn.Module, loss_of: LossOf, *, around: Around = nullcontext) -> BadTensor | None:
    """Run a pass whose loss or gradients are not finite again, and find where the first such value arises.

    If the loss is not finite, tensors are followed from the loss back through the graph, as far as they are not finite:
    what a later module makes finite again, such as a mask of -inf, is not reported. The result is, in this order, a
    parameter or buffer; an input, if the values come from outside of every module; the innermost module, in the order
    of execution, that returns such values although none go in; the loss. -inf alone, in a tensor without gradient,
    counts as a mask and not as a bad input, unless an operation other than a softmax or attention fails on it.

    If the loss is finite, the backward pass is followed node by node of the graph. The result is the first node that
    gets finite gradients, passes on others, and so reaches the gradient of a parameter; its module is the innermost one
    that was running when the node was made.

    Modules run in the modes they are in, so dropout acts as in training: it draws from the present random states, which
    are put back. Set them as they were before the failed pass to repeat it exactly. Parameters, their ``.grad``,
    buffers, modes, hooks and random states are left as they were. Scaling of the loss is part of ``loss_of``. Autocast
    is off in the backward pass, as PyTorch recommends. A checkpoint with ``use_reentrant=True`` runs as one without.

    Cost: about five times a forward and backward pass; if the loss is not finite, one more forward pass, and one for
    each module that writes -inf on the way to it. Memory: that of the pass and its gradients, and four numbers for each
    tensor. The device is read once or twice, and once for each further pass, whatever the depth.

    Error bound: counts and the largest |value| are exact. Values in objects other than tuples, lists, mappings and
    dataclasses, and inside of ``torch.func`` transforms, are not seen. Which operation failed is known only if the
    second forward pass repeats the first.

    Args:
        model: Model to run.
        loss_of: Function from the model to its loss on the batch, a 0-dim tensor with a graph; called once for
            each forward pass.
        around: Function that returns the context in which the run computes, such as ``lambda: torch.autocast("cuda",
            torch.bfloat16)``; entered around the forward and backward pass together.

    Returns:
        The place; None if the loss and all gradients of parameters are finite.

    Raises:
        OptionError: If the loss is no 0-dim tensor with a graph, if no parameter can be trained, or if the model is
            split over ranks.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> class Exponential(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.exp()
        >>> model = torch.nn.Sequential(Exponential(), torch.nn.Linear(1, 1))
        >>> inputs = torch.tensor([[1.0], [100.0]])
        >>> bad = wb.probes.first_bad_tensor(model, lambda model: model(inputs).mean())
        >>> bad.module, bad.tensor, bad.n_bad, bad.operation, bad.largest_before
        ('0', 'output', 1, 'exp', 100.0)
    """
    module = bare(unwrap(model))
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if not weights:
        raise OptionError("The model has no parameters to train; make some of them require gradients.")
    if is_split(module):
        raise OptionError(
            "The model is split over ranks, of which each sees a part; load its checkpoint on one device."
        )
    calls = Calls(module)
    with _as_in_training(module), around():
        held = {name: (t, readings_of(t)) for name, t in (*module.named_parameters(), *module.named_buffers())}
        with watch(calls.hooks()):
            loss = loss_of(module)
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise OptionError("loss_of returned no 0-dim tensor with a graph; return the loss of model(inputs).")
        at_loss = readings_of(loss)
        read([*at_loss, *calls.readings(), *(r for _, found in held.values() for r in found)])
        if not at_loss[0].n_bad:
            return first_bad_gradient(loss, calls, weights)
        search = _Forward(loss, at_loss[0], calls)
        if (stored := search.stored(held)) is not None:
            return stored
        del loss
    return search.found(lambda call: _operation_in(module, loss_of, around, call))


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """Leave the model as it was, as `undisturbed` does, with its own modes and with gradients."""
    modes = [(module, module.training) for module in model.modules()]
    with undisturbed(model), torch.enable_grad(), _checkpoints_with_graph():
        for module, mode in modes:
            module.training = mode
        yield


@contextmanager
def _checkpoints_with_graph() -> Iterator[None]:
    """Checkpoint without reentrance, which `torch.autograd.grad` refuses and which hides nodes of the graph."""

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    given = CheckpointFunction.__dict__.get("apply")
    CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if given is None:
            del CheckpointFunction.apply
        else:
            CheckpointFunction.apply = given  # type: ignore[method-assign]


class _Forward:
    """The search in a forward pass whose loss is not finite."""

    def __init__(self, loss: Tensor, at_loss: Reading, calls: Calls) -> None:
        finite = {reading.edge for reading in calls.readings() if not reading.n_bad and reading.edge is not None}
        edges, self._leaves = suspects(loss, finite)
        self._edges: set[Edge | None] = {*edges}
        self._loss, self._calls = at_loss, calls

    def stored(self, held: Mapping[str, tuple[Tensor, list[Reading]]]) -> BadTensor | None:
        """A parameter or buffer that made the loss what it is."""
        bad = {name: (tensor, found[0]) for name, (tensor, found) in held.items() if found and found[0].n_bad}
        first = self._first()
        for name, (tensor, reading) in bad.items():
            owner, _, leaf = name.rpartition(".")
            goes_in = first is not None and owner == first.name and not reading.may_be_mask
            if id(tensor) in self._leaves or goes_in:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                n_bad, n = (sum(isinstance(t, nn.Parameter) for t, _ in of.values()) for of in (bad, held))
                reason = f"an earlier update or a loaded checkpoint made it so ({n_bad} of {n} parameters in all)"
                return BadTensor.of(reading, owner, f"{kind} {leaf}", reading.largest, suggestion=reason)
        return None

    def found(self, operation_in: Callable[[Call | None], BadOperation | None]) -> BadTensor:
        """The module, the input or the loss.

        Args:
            operation_in: Function from a call to the first operation of its own that is bad, and from None to the first
                one outside of all calls.
        """
        unexplained: list[BadTensor] = []
        while (first := self._first()) is not None:
            source = next((call for call in _outwards(first) if self._bad(call.inputs) is None), None)
            if source is None:
                return _bad_input(first)
            operation = operation_in(source)
            bad = self._bad(source.outputs) or self._bad(first.inputs)
            assert bad is not None  # what goes into the first call is bad, unless it is the source
            found = BadTensor.of(bad, source.name, "output", largest_of(source.inputs))
            if operation is None and bad.may_be_mask:
                unexplained.append(found)  # no operation made -inf: it was written on purpose, as into a mask
                self._edges.discard(bad.edge)
                continue
            is_failed_by_lowest = operation is not None and operation.lowest_goes_in
            if unexplained and (operation is None or is_failed_by_lowest):
                return unexplained[0]
            if is_failed_by_lowest and any(r.n_bad for r in source.inputs):
                return _bad_input(source)
            return _made(found, operation)
        operation = operation_in(None)
        if unexplained and operation is None:
            return unexplained[0]
        outputs = [r for call in self._calls.left if call.parent is None for r in call.outputs]
        return _made(BadTensor.of(self._loss, "", "loss", largest_of(outputs)), operation)

    def _first(self) -> Call | None:
        """The innermost call that was the first to return values that may have made the loss so."""
        return next((call for call in self._calls.left if self._bad(call.outputs)), None)

    def _bad(self, readings: Sequence[Reading]) -> Reading | None:
        """The first tensor with values that are not finite and that may have made the loss so."""
        for r in readings:
            if r.n_bad and (r.edge in self._edges if r.needs_gradient else not r.may_be_mask):
                return r
        return None


def _outwards(call: Call | None) -> Iterator[Call]:
    """The call, and those inside of which it runs."""
    while call is not None:
        yield call
        call = call.parent


def _bad_input(call: Call) -> BadTensor:
    """The input of the outermost call that got it."""
    outer = list(takewhile(lambda one: any(r.n_bad for r in one.inputs), _outwards(call)))[-1]
    reading = next(r for r in outer.inputs if r.n_bad)
    return BadTensor.of(
        reading, outer.name, "input", reading.largest, suggestion="the batch is bad, or what prepares it"
    )


def _made(bad: BadTensor, operation: BadOperation | None) -> BadTensor:
    """With the operation that made it, if it is known."""
    if operation is None:
        return bad
    size, suggestion = operation.largest, operation.suggestion
    return replace(bad, operation=operation.name, largest_before=size, suggestion=suggestion)


def _operation_in(model: nn.Module, loss_of: LossOf, around: Around, call: Call | None) -> BadOperation | None:
    """The first bad operation in a call itself, not in one inside of it, from one more forward pass."""
    calls = Calls(model, lambda value: [])
    number = None if call is None else call.number
    operations = Operations(lambda: (calls.running[-1].number if calls.running else None) == number)
    with _as_in_training(model), around(), watch(calls.hooks()), operations:
        loss_of(model)
    read([r for _, inputs, results in operations.seen for r in (*inputs, *results)])
    return first_bad_operation(operations.seen)
