"""Record of one run of a model: each call of a module that could be a block, with the states that enter and leave."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.calling import run_model
from workbench.models.probing import undisturbed, watch

#: Place of a tensor in a call's arguments (position or keyword) or in its output (None is the output itself). A pair
#: where a container at that place holds the tensor, such as the entry "x" of a dict.
Slot = int | str | None | tuple[int | str | None, int | str]


@dataclass(frozen=True)
class State:
    """A tensor that entered or left a call: place, shape, fingerprint of the values, and a copy if values are kept."""

    slot: Slot
    shape: tuple[int, ...]
    fingerprint: bytes
    value: Tensor | None = None


@dataclass
class Call:
    """One call of a module, with the tensors that entered and left."""

    name: str  # path of the module
    module: nn.Module
    index: int  # number of its beginning, counted over the beginnings and ends of all calls
    inputs: list[State]
    outputs: list[State] = field(default_factory=list)
    end: int = -1  # number of its end, counted likewise; -1 before

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Shapes of states that both enter and leave."""
        return {s.shape for s in self.inputs} & {s.shape for s in self.outputs}

    @property
    def changed(self) -> list[State]:
        """Outputs whose shape also enters; if some of them differ from all inputs, only those."""
        entered = {s.fingerprint for s in self.inputs}
        leaving = [s for s in self.outputs if s.shape in self.shapes]
        return [s for s in leaving if s.fingerprint not in entered] or leaving


def record_calls(
    model: nn.Module, inputs: Any, *, everything: bool = False, keep: Collection[nn.Module] = ()
) -> list[Call]:
    """Run a model and return every call of a module that could be a block, in the order in which they began.

    If ``everything``, calls of all modules are recorded, including the model itself and its leaves. The values of the
    states are kept too, on the host, for the modules in ``keep``.
    """

    def could_be_block(module: nn.Module) -> bool:
        is_torch = type(module).__module__.startswith("torch.nn.modules")
        is_leaf = is_torch and not any(True for _ in module.children())
        return not is_leaf and any(True for _ in module.parameters())

    watched = {
        module: name for name, module in model.named_modules() if everything or (name and could_be_block(module))
    }
    calls: list[Call] = []
    running: list[Call] = []
    clock = iter(range(1 << 62))

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        states = _states(arguments(args, kwargs), keep=module in keep)
        running.append(Call(watched[module], module, next(clock), states))

    def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        while running:  # a call that raised inside the model never left
            call = running.pop()
            if call.module is module:
                call.outputs, call.end = _states(results(output), keep=module in keep), next(clock)
                calls.append(call)
                return

    requests = [(module, hook, is_before) for module in watched for hook, is_before in ((enter, True), (leave, False))]
    with undisturbed(model), watch(requests):
        run_model(model, inputs)
    return sorted(calls, key=lambda call: call.index)


def has_matrix(module: nn.Module) -> bool:
    """Return whether a module holds a matrix, as a parameter or, if quantized, a buffer; norms and sums hold none."""
    return any(tensor.ndim > 1 for tensor in (*module.parameters(), *module.buffers()))


def arguments(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[tuple[Slot, Any]]:
    """Yield slot and value of each argument of a call."""
    yield from _with_held([*enumerate(args), *kwargs.items()])


def results(output: Any) -> Iterator[tuple[Slot, Any]]:
    """Yield slot and value of each part of a call's output."""
    held = _held(output)
    yield from _with_held([(None, output)] if held is None else [*held.items()])


def _with_held(values: list[tuple[Any, Any]]) -> Iterator[tuple[Slot, Any]]:
    """Yield the values and, where none of them is a state, also the contents of containers among them."""
    yield from values
    if not any(_is_state(value) for _, value in values):
        for slot, value in values:
            yield from (((slot, key), item) for key, item in (_held(value) or {}).items())


def _held(value: Any) -> dict[Any, Any] | None:
    """Return the contents of a container by key, index or name; None if the value is not a container."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return None


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and value.numel() > 0


def _states(values: Iterator[tuple[Slot, Any]], *, keep: bool = False) -> list[State]:
    return [
        State(slot, tuple(value.shape), _fingerprint(value), value.detach().cpu().clone() if keep else None)
        for slot, value in values
        if _is_state(value)
    ]


def _fingerprint(tensor: Tensor) -> bytes:
    """Return a digest of the values; two states have the same digest only if they are equal bit for bit."""
    if tensor.device.type == "meta":
        return b"meta"
    data = tensor.detach().to("cpu").contiguous()
    return hashlib.blake2b(data.flatten().view(torch.uint8).numpy().data, digest_size=16).digest()
