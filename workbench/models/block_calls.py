"""Calls of modules in one run, and sites: where their arguments and results hold the residual stream."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import AnatomyError
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
    """Run a model and return the calls of possible blocks or ``everything``, with states for modules in ``keep``."""

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


@dataclass(frozen=True)
class Place:
    """A call in whose arguments or results a state can be read."""

    module: nn.Module
    call: int  # number of the call of this module within one forward pass, from 0
    n_calls: int  # number of its calls in the forward pass in which the anatomy was read
    slot: Slot  # place of the state in the arguments or in the output
    is_output: bool = False
    start: int | None = None  # index of its first feature in a tensor of two states; None if the tensor is the state

    def state_in(self, args: tuple, kwargs: Mapping[str, Any], name: str) -> Tensor:
        """Return the state in the arguments of the call; the name of the site is for the message if it is not there."""
        state = _take(dict(arguments(args, kwargs)), self.slot, name, "arguments")
        return state if self.start is None else state.narrow(-1, self.start, state.shape[-1] // 2)

    def state_out(self, output: Any, name: str) -> Tensor:
        """Return the state in the output of the call, as `state_in` does for the arguments."""
        return _take(dict(results(output)), self.slot, name, "output")


@dataclass(frozen=True)
class Site:
    """One place where the residual stream passes a block.

    Where the residual is added outside of modules, no module returns the state that leaves. It is then read where it
    enters the next module (``exit``), and ``entry`` is the first call that receives the state that enters.

    Attributes:
        name: Module path, such as ``transformer.h.3``; later calls of a shared module end in ``#1``, ``#2``, ...
        module: Module of the block.
        call: Number of the call of this module within one forward pass, from 0.
        input_slot: Place of the state in the arguments: a position or a keyword. If the argument is a container, a
            pair of that and the index or key within it.
        output_slot: Place of the state in the output: an index or a key; None if the output is the state.
        entry: Call that receives the state that enters; None if it is the call of ``module``.
        exit: Call from which the state that leaves is read; None if it is the call of ``module``.
        feature_axis: Axis of the block's tensors that counts features: -1, or 1 for images (batch, feature, height,
            width). `state_in` and `state_out` always return features last.
        stream: Axis of the tensors that counts streams, and the number of the one that is read; None if the tensors
            are one stream.
        terms: Places in arguments and output of a second tensor, where the state is the sum of two; where that place
            holds no tensor, the state is the first tensor. None if the state is one tensor.
    """

    name: str
    module: nn.Module
    call: int
    input_slot: Slot = 0
    output_slot: Slot = None
    entry: Place | None = None
    exit: Place | None = None
    feature_axis: int = -1
    stream: tuple[int, int] | None = None
    terms: tuple[Slot, Slot] | None = None

    def state_in(self, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
        """Return the state that enters the block, shape (..., feature), with the other axes as the block receives them.

        ``Anatomy.layout`` states which axis counts sequences; (token, batch, feature) occurs too. The arguments are
        those that a forward pre-hook with ``with_kwargs=True`` sees. AnatomyError is raised if the state is not where
        it was when the anatomy was read.
        """
        values = dict(arguments(args, kwargs))
        state = self._state_of(_take(values, self.input_slot, self.name, "arguments"))
        return state if self.terms is None else _with_term(state, values.get(self.terms[0]))

    def with_state(
        self, args: tuple, kwargs: Mapping[str, Any], state: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call of the block, with another state entering, shaped like the original one."""
        if self.exit is not None:
            raise AnatomyError(
                f"The residual of {self.name} is added outside of modules, so its states can be read but not "
                "replaced; choose a model whose blocks add the residual themselves."
            )
        slot = self.input_slot
        if self.terms is not None:
            term = dict(arguments(args, kwargs)).get(self.terms[0])
            state = state - term if isinstance(term, Tensor) else state
        if self.stream is not None:
            axis, number = self.stream
            streams = list(_take(dict(arguments(args, kwargs)), slot, self.name, "arguments").unbind(axis))
            streams[number] = state
            state = torch.stack(streams, axis)
        if self.feature_axis != -1:
            state = state.movedim(-1, self.feature_axis)
        given: Any = state
        if isinstance(slot, tuple):
            slot, key = slot
            given = with_item(args[slot] if isinstance(slot, int) else kwargs[str(slot)], key, state)
        if isinstance(slot, int):
            return (*args[:slot], given, *args[slot + 1 :]), dict(kwargs)
        return args, {**kwargs, str(slot): given}

    def state_out(self, output: Any) -> Tensor:
        """Return the state in the output of the block, shaped like that of `state_in`."""
        values = dict(results(output))
        state = self._state_of(_take(values, self.output_slot, self.name, "output"))
        return state if self.terms is None else _with_term(state, values.get(self.terms[1]))

    def _state_of(self, state: Tensor) -> Tensor:
        """Return the state in a tensor: the stream that is read, with features last."""
        if self.stream is not None:
            state = state.select(*self.stream)
        return state if self.feature_axis == -1 else state.movedim(self.feature_axis, -1)


def _with_term(state: Tensor, term: Any) -> Tensor:
    """Return the sum of the two terms of a state; the first block may receive no second term."""
    return state + term if isinstance(term, Tensor) else state


def with_item(holder: Any, key: int | str, value: Any) -> Any:
    """Return a copy of the container of a state, with another value in the state's place."""
    if isinstance(holder, tuple):
        items = (*holder[: int(key)], value, *holder[int(key) + 1 :])
        return type(holder)(*items) if hasattr(holder, "_fields") else items
    other = copy(holder)
    if isinstance(other, list | MutableMapping):
        other[key] = value  # type: ignore[index]
    else:
        object.__setattr__(other, str(key), value)  # also where a dataclass is frozen
    return other


def _take(values: dict[Slot, Any], slot: Slot, name: str, what: str) -> Tensor:
    value = values.get(slot)
    if not isinstance(value, Tensor):
        where = "itself" if slot is None else f"at {slot!r}"
        raise AnatomyError(
            f"There is no tensor {where} in the {what} of {name}, where the residual stream was when the anatomy was "
            "read; read the anatomy again with inputs of the kind that you use."
        )
    return value
