"""Search for the place in a pass where the first value arises that is not finite."""

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
from workbench.models.losses import require_graph
from workbench.models.probing import undisturbed, watch
from workbench.models.wrapping import bare, is_split, unwrap
from workbench.probes.bad_gradients import first_bad_gradient
from workbench.probes.bad_operations import BadOperation, Operations, first_bad_operation
from workbench.probes.bad_tensor import BadTensor, bad_tensor_of
from workbench.probes.graph_readings import suspects
from workbench.probes.pass_readings import Call, Calls, Edge, Reading, largest_of, read, readings_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject

#: Function from the model to its loss as a 0-dim tensor with a graph.
LossOf = Callable[[nn.Module], Tensor]
#: Function that returns the context in which the run computes its passes.
Around = Callable[[], AbstractContextManager[Any]]


def first_bad_tensor(model: Subject | nn.Module, loss_of: LossOf, *, around: Around = nullcontext) -> BadTensor | None:
    """Repeat a pass whose loss or gradients are not finite, and find where the first such value arises.

    If the loss is not finite, tensors that are not finite are traced from the loss back through the graph; values that
    a later module makes finite again, such as a mask of -inf, are not reported. The result is, in this order, a
    parameter or buffer; an input, if the values come from outside of every module; the innermost module, in the order
    of execution, that returns such values although its inputs have none; or the loss. A tensor without gradient whose
    only values that are not finite are -inf counts as a mask and not as a bad input, unless an operation other than a
    softmax or attention fails on it.

    If the loss is finite, the backward pass is traced through the nodes of the graph. The result is the first node that
    receives finite gradients, passes on others, and thereby reaches the gradient of a parameter; its module is the
    innermost one that was running when the node was created.

    Modules run in their current modes, so dropout acts as in training: it draws from the current random states, which
    are restored. To repeat the failed pass exactly, set them to their values before it. Parameters, their ``.grad``,
    buffers, modes, hooks and random states are left unchanged. Scaling of the loss is part of ``loss_of``. Autocast is
    off in the backward pass, as PyTorch recommends. A checkpoint with ``use_reentrant=True`` runs as one without.

    Cost: about five times a forward and backward pass; if the loss is not finite, one more forward pass, and one for
    each module that writes -inf on the way to the loss. Memory: that of the pass and its gradients, and four numbers
    for each tensor. The device is read once or twice, and once for each further pass, independent of depth.

    Error bound: counts and the largest |value| are exact. Values in objects other than tuples, lists, mappings and
    dataclasses, and inside ``torch.func`` transforms, are not seen. The failed operation is known only if the second
    forward pass repeats the first.

    Args:
        model: Model to run.
        loss_of: Function from the model to its loss on the batch, a 0-dim tensor with a graph; called once for
            each forward pass.
        around: Function that returns the context in which the run computes, such as ``lambda: torch.autocast("cuda",
            torch.bfloat16)``; entered around the forward and backward pass together.

    Returns:
        The place; None if the loss and all gradients of parameters are finite.

    Raises:
        OptionError: If the loss is not a 0-dim tensor with a graph, if no parameter can be trained, or if the model is
            sharded over ranks.

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

    See Also:
        `workbench.probes.BadTensor`: The result.
        `workbench.diagnose`: Ranks the causes of a failed run.
    """
    module = bare(unwrap(model))
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if not weights:
        raise OptionError("The model has no trainable parameters; make some of them require gradients.")
    if is_split(module):
        raise OptionError(
            "The model is sharded over ranks, each of which sees only a part; load its checkpoint on one device."
        )
    calls = Calls(module)
    with _as_in_training(module), around():
        held = {name: (t, readings_of(t)) for name, t in (*module.named_parameters(), *module.named_buffers())}
        with watch(calls.hooks()):
            loss = require_graph(loss_of(module))
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
    """Leave the model unchanged, as `undisturbed` does, but run it in its current modes and with gradients."""
    modes = [(module, module.training) for module in model.modules()]
    with undisturbed(model), torch.enable_grad(), _checkpoints_with_graph():
        for module, mode in modes:
            module.training = mode
        yield


@contextmanager
def _checkpoints_with_graph() -> Iterator[None]:
    """Run checkpoints without reentrance, which `torch.autograd.grad` rejects and which hides nodes of the graph."""

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
        """Return a parameter or buffer that caused the loss not to be finite; None if there is none."""
        bad = {name: (tensor, found[0]) for name, (tensor, found) in held.items() if found and found[0].n_bad}
        first = self._first()
        for name, (tensor, reading) in bad.items():
            owner, _, leaf = name.rpartition(".")
            goes_in = first is not None and owner == first.name and not reading.may_be_mask
            if id(tensor) in self._leaves or goes_in:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                n_bad, n = (sum(isinstance(t, nn.Parameter) for t, _ in of.values()) for of in (bad, held))
                reason = f"caused by an earlier update or a loaded checkpoint ({n_bad} of {n} parameters in total)"
                return bad_tensor_of(reading, owner, f"{kind} {leaf}", reading.largest, suggestion=reason)
        return None

    def found(self, operation_in: Callable[[Call | None], BadOperation | None]) -> BadTensor:
        """Return the module, the input or the loss where the first bad value arises.

        Args:
            operation_in: Function from a call to its first bad operation, and from None to the first bad operation
                outside of all calls.
        """
        unexplained: list[BadTensor] = []
        while (first := self._first()) is not None:
            source = next((call for call in _outwards(first) if self._bad(call.inputs) is None), None)
            if source is None:
                return _bad_input(first)
            operation = operation_in(source)
            bad = self._bad(source.outputs) or self._bad(first.inputs)
            assert bad is not None  # an input of the first call is bad, unless that call is the source
            found = bad_tensor_of(bad, source.name, "output", largest_of(source.inputs))
            if operation is None and bad.may_be_mask:
                unexplained.append(found)  # no operation computed -inf: it was written on purpose, as into a mask
                self._edges.discard(bad.edge)
                continue
            is_failed_by_lowest = operation is not None and operation.has_unmasked_lowest
            if unexplained and (operation is None or is_failed_by_lowest):
                return unexplained[0]
            if is_failed_by_lowest and any(r.n_bad for r in source.inputs):
                return _bad_input(source)
            return _with_operation(found, operation)
        operation = operation_in(None)
        if unexplained and operation is None:
            return unexplained[0]
        outputs = [r for call in self._calls.left if call.parent is None for r in call.outputs]
        return _with_operation(bad_tensor_of(self._loss, "", "loss", largest_of(outputs)), operation)

    def _first(self) -> Call | None:
        """Return the first call to end with bad values that may have reached the loss."""
        return next((call for call in self._calls.left if self._bad(call.outputs)), None)

    def _bad(self, readings: Sequence[Reading]) -> Reading | None:
        """Return the first tensor with values that are not finite and may have reached the loss."""
        for r in readings:
            if r.n_bad and (r.edge in self._edges if r.needs_gradient else not r.may_be_mask):
                return r
        return None


def _outwards(call: Call | None) -> Iterator[Call]:
    """Yield a call and the calls that enclose it, from the inside out."""
    while call is not None:
        yield call
        call = call.parent


def _bad_input(call: Call) -> BadTensor:
    """Describe a bad input at the outermost call that received it."""
    outer = list(takewhile(lambda one: any(r.n_bad for r in one.inputs), _outwards(call)))[-1]
    reading = next(r for r in outer.inputs if r.n_bad)
    return bad_tensor_of(
        reading, outer.name, "input", reading.largest, suggestion="the batch or the code that prepares it is faulty"
    )


def _with_operation(bad: BadTensor, operation: BadOperation | None) -> BadTensor:
    """Add the operation that computed a bad tensor, if it is known."""
    if operation is None:
        return bad
    size, suggestion = operation.largest, operation.suggestion
    return replace(bad, operation=operation.name, largest_before=size, suggestion=suggestion)


def _operation_in(model: nn.Module, loss_of: LossOf, around: Around, call: Call | None) -> BadOperation | None:
    """Return the first bad operation in a call itself, not in a nested one, from one more forward pass."""
    calls = Calls(model, lambda value: [])
    number = None if call is None else call.number
    operations = Operations(lambda: (calls.running[-1].number if calls.running else None) == number)
    with _as_in_training(model), around(), watch(calls.hooks()), operations:
        loss_of(model)
    read([r for _, inputs, results in operations.seen for r in (*inputs, *results)])
    return first_bad_operation(operations.seen)
