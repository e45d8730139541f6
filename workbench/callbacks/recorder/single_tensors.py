"""Trained tensors that receive no gradient, or that no update changes, while others do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from workbench.formatting import counted, listed
from workbench.models.device_numbers import read_numbers

#: Updates between two checks, checks in a row that a tensor must fail, and largest number of tensors that are named.
_EVERY, _N_CHECKS, _N_NAMED = 50, 5, 3
#: Settings that list such tensors; their value is this if there is none.
NO_GRADIENT, NOT_CHANGED, NONE = "tensors_without_gradient", "unchanged_tensors", "none"


class SingleTensors:
    """Check of every trained tensor by itself, every 50 updates; five checks in a row decide.

    Tensors of modules that the model does not call, such as an unused pooling layer, count only after they have had a
    gradient. Sharded tensors and sparse gradients are not checked.

    Args:
        model: Model without its wrappers.
        called: Names of the modules that a pass through the model calls.
    """

    def __init__(self, model: nn.Module, called: Collection[str]) -> None:
        self._model, self._called = model, called
        self._n_updates = 0
        self._n_dead, self._n_still = Counter[str](), Counter[str]()
        self._reached: set[str] = set()
        self._norms: dict[str, float] = {}
        self._found = {NO_GRADIENT: NONE, NOT_CHANGED: NONE}

    @torch.no_grad()
    def read(self) -> Mapping[str, str]:
        """Return the names of such tensors, right before an update."""
        self._n_updates += 1
        if self._n_updates % _EVERY == 0:
            self._check({name: p for name, p in self._model.named_parameters() if _is_checked(p)})
        return self._found

    def _check(self, tensors: dict[str, Tensor]) -> None:
        gradients = {name: p.grad for name, p in tensors.items() if p.grad is not None}
        if not gradients:
            return
        largest = torch._foreach_norm([*gradients.values()], float("inf"))
        lengths = torch._foreach_norm([p.detach() for p in tensors.values()])
        numbers = read_numbers([*largest, *lengths])  # the host waits once
        sizes = dict(zip(gradients, numbers, strict=False))
        norms = dict(zip(tensors, numbers[len(gradients) :], strict=True))
        self._reached |= {name for name, size in sizes.items() if size != 0}
        still = {name for name, norm in norms.items() if norm == self._norms.get(name) and sizes.get(name, 0) != 0}
        for name in tensors:
            is_used = name in self._reached or name.rpartition(".")[0] in self._called
            self._n_dead[name] = self._n_dead[name] + 1 if sizes.get(name, 0) == 0 and is_used else 0
            self._n_still[name] = self._n_still[name] + 1 if name in still else 0
        self._norms = norms
        for setting, counts in ((NO_GRADIENT, self._n_dead), (NOT_CHANGED, self._n_still)):
            names = [name for name in tensors if counts[name] >= _N_CHECKS]
            self._found[setting] = _named(names) if len(names) < len(tensors) else NONE


def _is_checked(parameter: Tensor) -> bool:
    gradient = parameter.grad
    is_plain = not hasattr(parameter, "to_local") and (gradient is None or gradient.layout == torch.strided)
    return parameter.requires_grad and bool(parameter.numel()) and is_plain


def _named(names: list[str]) -> str:
    if len(names) <= _N_NAMED:
        return listed(names) if names else NONE
    return f"{', '.join(names[: _N_NAMED - 1])} and {counted(len(names) - _N_NAMED + 1, 'other')}"
