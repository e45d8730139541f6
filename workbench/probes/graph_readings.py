"""The graph of a loss: tensors that may have caused its value, and readings of the gradients of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.probes.pass_readings import Edge, Reading, key_of, readings_of


def suspects(loss: Tensor, finite: Collection[Edge]) -> tuple[set[Edge], set[int]]:
    """Return the tensors that may have caused the value of a loss: those that reach it without passing a finite one.

    Args:
        loss: The loss.
        finite: Edges of tensors that are known to be finite.

    Returns:
        Edges of the suspects, and the ids of parameters among them.
    """
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
    """One step of the backward pass: the execution of a node of the graph.

    Attributes:
        name: Name of the node, such as "MmBackward0".
        key: Number of the node, in the order of creation.
        given: Gradients that the node receives.
        passed: Gradients that it passes on, each with the key of the node that receives it; see `leaf_key`.
    """

    name: str
    key: int
    given: list[Reading]
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
