"""Search for the place in a pass where the first value arises that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from workbench.errors import OptionError
from workbench.formatting import capitalized, counted, number_in_words
from workbench.models.calling import bare, is_split, unwrap
from workbench.models.losses import require_graph
from workbench.models.probing import undisturbed, watch
from workbench.models.subject import Subject
from workbench.probes.pass_readings import (
    BadOperation,
    Call,
    Calls,
    Edge,
    Operations,
    Reading,
    first_bad_operation,
    gradient_suggestion,
    key_of,
    largest_of,
    read,
    readings_of,
)

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
        `workbench.diagnose`: Ranks the causes of a failed run.
    """
    module = bare(unwrap(model))
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if not weights:
        raise OptionError("The model has no trainable parameters; make some of them require gradients.")
    if is_split(module):
        raise OptionError("The model is sharded over ranks, which see only parts; load its checkpoint on one device.")
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
    with undisturbed(model), torch.enable_grad(), checkpoints_with_graph():
        for module, mode in modes:
            module.training = mode
        yield


@contextmanager
def checkpoints_with_graph() -> Iterator[None]:
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
        """Return the module, input or loss where the first bad value arises; ``operation_in`` maps a call, or None."""
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


def first_bad_gradient(loss: Tensor, calls: Calls, weights: Mapping[str, Tensor]) -> BadTensor | None:
    """Run the backward pass of a loss and find the first node with a bad gradient of a parameter, if any."""
    with torch.autocast(loss.device.type, enabled=False), backward_steps(loss) as steps:
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    last = {leaf_key(w): readings_of(g) for w, g in zip(weights.values(), gradients, strict=True)}
    del gradients
    read([*(r for step in steps for r in step.readings), *(r for found in last.values() for r in found)])
    bad = {key: found[0] for key, found in last.items() if found and found[0].n_bad}
    return _Search(steps, calls, {leaf_key(w): name for name, w in weights.items()}).found(bad) if bad else None


class _Search:
    """The search in a backward pass."""

    def __init__(self, steps: Sequence[Step], calls: Calls, parameters: Mapping[int, str]) -> None:
        self._steps, self._parameters = steps, parameters
        self._by_key = {step.key: step for step in steps}
        self._calls = {step.key: calls.running_at(step.key) for step in steps}

    def found(self, bad: Mapping[int, Reading]) -> BadTensor:
        """Return the first step that causes a bad gradient, among those that lead to one of the bad parameters."""
        leads = set(bad)
        for step in reversed(self._steps):
            if any(r.n_bad and target in leads for target, r in step.passed):
                leads.add(step.key)
        reached: set[int] = set()
        for i, step in enumerate(self._steps):
            if step.key in leads:
                given = next((r for r in step.given if r.n_bad), None)
                if given is None:
                    return self._passed(i, [(target, r) for target, r in step.passed if r.n_bad and target in leads])
                if step.key not in reached:
                    return self._place(i, "gradient of the output", given, self._contributions(step.key))
            reached |= {target for target, r in step.passed if r.n_bad}
        key, reading = next(iter(bad.items()))
        owner, _, name = self._parameters[key].rpartition(".")
        largest = largest_of(self._contributions(key))
        return bad_tensor_of(reading, owner, f"gradient of parameter {name}", largest, pass_="backward")

    def _passed(self, i: int, passed: Sequence[tuple[int, Reading]]) -> BadTensor:
        """Describe a node that receives finite gradients and passes on others."""
        step = self._steps[i]
        named = [(self._parameter(step, target), reading) for target, reading in passed]
        name, reading = next((pair for pair in named if pair[0] is None), named[0])
        tensor = "gradient of the input" if name is None else f"gradient of parameter {name}"
        suggestion = gradient_suggestion(step.name, reading.dtype)
        return replace(self._place(i, tensor, reading, step.given), operation=step.name, suggestion=suggestion)

    def _place(self, i: int, tensor: str, reading: Reading, before: Iterable[Reading]) -> BadTensor:
        call = self._calls[self._steps[i].key]
        if call is None:
            tensor = "gradient from the loss"
        bracket = self._neighbor(i, reversed(range(i))), self._neighbor(i, range(i + 1, len(self._steps)))
        place = bad_tensor_of(reading, "" if call is None else call.name, tensor, largest_of(before), pass_="backward")
        return replace(place, bracket=bracket)

    def _neighbor(self, i: int, steps: Iterable[int]) -> Neighbor | None:
        """Return the first other module in these steps whose gradients are all finite."""
        names = ["the loss" if (call := self._calls[step.key]) is None else call.name for step in self._steps]
        passed: dict[str, list[Reading]] = {}
        for j in steps:
            passed.setdefault(names[j], []).extend(reading for _, reading in self._steps[j].passed)
        for name, readings in passed.items():
            if name != names[i] and readings and not any(r.n_bad for r in readings):
                return name, largest_of(readings)
        return None

    def _contributions(self, key: int) -> list[Reading]:
        """Return the summands of the gradient that a node or parameter receives."""
        return [reading for step in self._steps for target, reading in step.passed if target == key]

    def _parameter(self, step: Step, target: int) -> str | None:
        """Return the name of the parameter of a gradient, also if it is transposed or cast first; None if none."""
        call = self._calls[step.key]
        while target not in self._parameters:
            follower = self._by_key.get(target)
            if follower is None or self._calls[target] is not call or len(follower.passed) != 1:
                return None
            target = follower.passed[0][0]
        name = self._parameters[target]
        owner, _, leaf = name.rpartition(".")
        return leaf if call is not None and owner == call.name else name


#: Path of a module, and the largest |gradient| that it passes back.
Neighbor = tuple[str, float]


@dataclass(frozen=True)
class BadTensor:
    """The first tensor of a pass with values that are not finite.

    Attributes:
        module: Path of the module in the model; "" for the model itself, or for code outside of it, as ``tensor``
            states.
        tensor: "parameter NAME", "buffer NAME", "input", "output", or "loss" (computed outside of every module). In the
            backward pass: "gradient of the input" (passed back by the module although the gradient of its output is
            finite), "gradient of parameter NAME", "gradient of the output" (a sum of finite contributions, or the
            result of a hook), or "gradient from the loss" (computed outside of every module).
        pass_: "forward" or "backward".
        n_bad: Number of values that are not finite.
        n_values: Number of values of the tensor.
        largest_before: Largest finite |value| among the inputs of the operation if it is known, otherwise of the
            module; for a gradient, among the gradients received; for a parameter, buffer or input, among its own
            values. NaN if no value is finite.
        bracket: Nearest modules on either side, in the order of the backward pass, that passed back finite gradients:
            the last other one before and the first one after, each with its largest |gradient|; "the loss" represents
            code outside of every module. None if there is none, and in the forward pass.
        operation: Operation of torch that computed the tensor, such as "exp" or "SqrtBackward0"; empty if unknown.
        suggestion: Probable cause; empty if none is certain.
    """

    module: str
    tensor: str
    pass_: str
    n_bad: int
    n_values: int
    largest_before: float
    bracket: tuple[Neighbor | None, Neighbor | None] = (None, None)
    operation: str = ""
    suggestion: str = ""

    @property
    def sentence(self) -> str:
        """Description of the tensor, its place, its inputs and the probable cause."""
        where = self.module or "the model"
        are = "is" if self.n_values == 1 else "are"
        bad = f"{self.n_bad:,} of {counted(self.n_values, 'value')} that {are} not finite"
        text = {
            "output": f"{where} returns {bad}",
            "loss": "the loss is not finite",
            "gradient from the loss": f"the loss passes back to the model a gradient with {bad}",
            "gradient of the output": f"the gradient of the output of {where} has {bad}",
            "input": f"an input of {where} has {bad}",
        }.get(self.tensor)
        if text is None and self.pass_ == "backward":
            text = f"{where} passes back a {self.tensor} with {bad}"
        elif text is None:
            text = f"{self.tensor} of {where} has {bad}"
        if self.tensor in ("output", "loss") or self.pass_ == "backward":
            size = "" if math.isnan(self.largest_before) else f" of at most {number_in_words(self.largest_before)}"
            kind = "gradients" if self.pass_ == "backward" else "values"
            source = f"by {self.operation} of" if self.operation else "computed from"
            text += f", {source} finite {kind}{size}"
        beginnings = ("the last finite gradients before it are those of", "the first after it those of")
        for words, side in zip(beginnings, self.bracket, strict=True):
            if side is not None:
                text += f"; {words} {side[0] or 'the model'} (at most {number_in_words(side[1])})"
        ending = f": {self.suggestion}." if self.suggestion else "."
        return f"{capitalized(self.pass_)} pass: {text}{ending}"


def bad_tensor_of(
    reading: Reading, module: str, tensor: str, largest_before: float, *, pass_: str = "forward", suggestion: str = ""
) -> BadTensor:
    """Return a `BadTensor` with the counts of a reading."""
    return BadTensor(module, tensor, pass_, reading.n_bad, reading.n_values, largest_before, suggestion=suggestion)


def suspects(loss: Tensor, finite: Collection[Edge]) -> tuple[set[Edge], set[int]]:
    """Return the tensors that may have caused the value of a loss: those that reach it without passing a finite one."""
    edges: set[Edge] = set()
    leaves: set[int] = set()
    waiting = [(loss.grad_fn, loss.output_nr)]
    while waiting:
        node, number = waiting.pop()
        if node is None:
            continue
        if (leaf := _leaf(node)) is not None:
            leaves.add(id(leaf))
        elif (edge := (key_of(node), number)) not in edges and edge not in finite:
            edges.add(edge)
            waiting += node.next_functions
    return edges, leaves


@dataclass(eq=False)
class Step:
    """One step of the backward pass: the execution of a node of the graph."""

    name: str  # name of the node, such as "MmBackward0"
    key: int  # number of the node, in the order of creation
    given: list[Reading]  # gradients that the node receives
    #: Gradients that it passes on, each with the key of the node that receives it; see `leaf_key`.
    passed: list[tuple[int, Reading]]

    @property
    def readings(self) -> list[Reading]:
        """All readings of the step."""
        return [*self.given, *(reading for _, reading in self.passed)]


def leaf_key(leaf: Tensor) -> int:
    """Return the key of a leaf of the graph, which is below those of all nodes."""
    return -id(leaf)


@contextmanager
def backward_steps(loss: Tensor) -> Iterator[list[Step]]:
    """Read the gradients of all nodes in the backward pass of a loss; steps are appended in the order of the pass."""
    steps: list[Step] = []
    handles = []

    def hook_of(node: Any) -> Callable[..., None]:
        name, key = node.name(), key_of(node)
        targets = [None if target is None else _target(target) for target, _ in node.next_functions]

        def hook(passed: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
            pairs = [(target, readings_of(gradient)) for target, gradient in zip(targets, passed, strict=False)]
            known = [(target, found[0]) for target, found in pairs if target is not None and found]
            steps.append(Step(name, key, readings_of(given), known))

        return hook

    waiting, seen = [loss.grad_fn], set()
    try:
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen and _leaf(node) is None:
                seen.add(node)
                handles.append(node.register_hook(hook_of(node)))
                waiting += [target for target, _ in node.next_functions]
        yield steps
    finally:
        for handle in handles:
            handle.remove()


def _leaf(node: Any) -> Tensor | None:
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def _target(node: Any) -> int:
    leaf = _leaf(node)
    return key_of(node) if leaf is None else leaf_key(leaf)
