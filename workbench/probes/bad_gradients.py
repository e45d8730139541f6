"""Search for the node of a backward pass that computes the first gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.probes.bad_operations import gradient_suggestion
from workbench.probes.bad_tensor import BadTensor, Neighbor, bad_tensor_of
from workbench.probes.graph_readings import Step, backward_steps, leaf_key
from workbench.probes.pass_readings import Calls, Reading, largest_of, read, readings_of


def first_bad_gradient(loss: Tensor, calls: Calls, weights: Mapping[str, Tensor]) -> BadTensor | None:
    """Run the backward pass of a loss and find the first node that causes a bad gradient of a parameter.

    Args:
        loss: A finite loss with its graph, which is freed.
        calls: Calls of the forward pass, whose readings have been transferred by `read`.
        weights: Parameters by their names.

    Returns:
        The place; None if the gradients of all parameters are finite.
    """
    with torch.autocast(loss.device.type, enabled=False), backward_steps(loss) as steps:
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    last = {leaf_key(w): readings_of(g) for w, g in zip(weights.values(), gradients, strict=True)}
    del gradients
    read([*(r for step in steps for r in step.readings), *(r for found in last.values() for r in found)])
    bad = {key: found[0] for key, found in last.items() if found and found[0].n_bad}
    return _Search(steps, calls, {leaf_key(w): name for name, w in weights.items()}).found(bad) if bad else None


class _Search:
    """The search in a backward pass.

    Args:
        steps: Nodes that were run, in the order of the backward pass.
        calls: Calls of the forward pass.
        parameters: Names of parameters by their keys.
    """

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
