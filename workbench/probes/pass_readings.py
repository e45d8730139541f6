"""Readings of whether the values that enter and leave the modules of a forward pass are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from workbench.models.device_numbers import read_arrays
from workbench.models.probing import HookRequest

#: Values that are reduced at a time, so that large tensors are not copied.
_CHUNK = 1 << 22
#: Origin of a tensor: a node of the graph and the index of its output.
Edge = tuple[int, int]


@dataclass(eq=False)
class Reading:
    """Counts of the values of one tensor that are not finite; they stay on its device until `read` transfers them.

    Attributes:
        numbers: Number of values that are not finite, number of NaN and of -inf among them, and largest finite |value|
            or -1, shape (4,).
        n_values: Number of values.
        dtype: Number format.
        needs_gradient: Whether a gradient flows to the tensor.
        edge: Origin of the tensor in the graph; None for a leaf.
        n_bad: Number of values that are not finite.
        n_nan: Number of NaN among them.
        n_lowest: Number of -inf among them.
        largest: Largest finite |value|; NaN if there is none.
    """

    numbers: Tensor
    n_values: int
    dtype: torch.dtype
    needs_gradient: bool
    edge: Edge | None
    n_bad: int = 0
    n_nan: int = 0
    n_lowest: int = 0
    largest: float = math.nan

    @property
    def may_be_mask(self) -> bool:
        """Whether all values that are not finite are -inf, as in additive masks."""
        return self.n_bad == self.n_lowest


def readings_of(value: Any) -> list[Reading]:
    """Return readings of all floating-point and complex tensors in a value."""
    return [_reading(tensor) for tensor in _tensors_in(value) if _is_read(tensor)]


def read(readings: Iterable[Reading]) -> None:
    """Transfer the numbers of many readings to the host at once."""
    readings = list(readings)
    for reading, numbers in zip(readings, read_arrays([r.numbers for r in readings]), strict=True):
        reading.n_bad, reading.n_nan, reading.n_lowest = (int(number) for number in numbers[:3])
        reading.largest = float(numbers[3]) if numbers[3] >= 0 else math.nan


def largest_of(readings: Iterable[Reading]) -> float:
    """Return the largest finite |value| of several readings; NaN if there is none."""
    return max((r.largest for r in readings if not math.isnan(r.largest)), default=math.nan)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors_in([getattr(value, entry.name) for entry in fields(value)])


def _is_read(tensor: Tensor) -> bool:
    if is_functorch_wrapped_tensor(tensor) or tensor.device.type == "meta":  # its values do not exist
        return False
    return tensor.is_floating_point() or tensor.is_complex()


def _reading(tensor: Tensor) -> Reading:
    node = tensor.grad_fn
    edge = None if node is None else (key_of(node), tensor.output_nr)
    values = tensor.detach()
    if values.layout == torch.sparse_coo:  # the gradient of a sparse embedding
        values = values.coalesce().values()
    elif values.layout != torch.strided:
        values = values.values()
    return Reading(_numbers(values), values.numel(), values.dtype, tensor.requires_grad, edge)


def _numbers(values: Tensor) -> Tensor:
    exact = torch.float32 if values.device.type == "mps" else torch.float64
    found = []
    with _disable_current_modes():  # modes are meant for the operations of the model, and slow
        for part in values.reshape(-1).split(_CHUNK):
            if part.itemsize == 1:  # torch does not compute in eight bits
                part = part.float()
            size = part.abs()
            n_nan, n_infinite, n_lowest = (
                torch.count_nonzero(is_such) for is_such in (part.isnan(), size == math.inf, part == -math.inf)
            )
            largest = size.nan_to_num_(nan=-1, posinf=-1).amax() if len(part) else n_nan - 1
            found.append(torch.stack([n_nan + n_infinite, n_nan, n_lowest, largest.to(exact)]))
        rows = torch.stack(found)
        return torch.cat([rows[:, :3].sum(0), rows[:, 3:].amax(0)]) if len(found) > 1 else found[0]


def key_of(node: Any) -> int:
    """Return the number of a node of the graph, in the order of creation."""
    return node._sequence_nr()


@dataclass(eq=False)
class Call:
    """One call of a module in the forward pass.

    Attributes:
        name: Path of the module.
        number: Number of calls that began before it.
        parent: Enclosing call; None if there is none.
        begin: Number of nodes of the graph that were created before it.
        inputs: Readings of its arguments.
        outputs: Readings of its results.
        end: Number of nodes that were created when it ended.
    """

    name: str
    number: int
    parent: Call | None
    begin: int
    inputs: list[Reading]
    outputs: list[Reading] = field(default_factory=list)
    end: int = -1


class Calls:
    """Calls of all modules of a model in one forward pass."""

    def __init__(self, model: nn.Module, measure: Callable[[Any], list[Reading]] = readings_of) -> None:
        self.entered: list[Call] = []
        self.left: list[Call] = []
        self.running: list[Call] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._modules: list[nn.Module] = []
        self._measure = measure

    def hooks(self) -> list[HookRequest]:
        """Return the hooks that record the calls, for `workbench.models.probing.watch`."""
        return [
            request for module in self._names for request in ((module, self._enter, True), (module, self._leave, False))
        ]

    def readings(self) -> list[Reading]:
        """Return the readings of all calls."""
        return [reading for call in self.entered for reading in (*call.inputs, *call.outputs)]

    def running_at(self, node: int) -> Call | None:
        """Return the innermost call in which a node of the graph was created; None if outside of the model."""
        return next((call for call in reversed(self.entered) if call.begin <= node < call.end), None)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        parent = self.running[-1] if self.running else None
        inputs = self._measure((args, kwargs))
        call = Call(self._names[module], len(self.entered), parent, _get_sequence_nr(), inputs)
        self.entered.append(call)
        self.running.append(call)
        self._modules.append(module)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        outputs = self._measure(output)
        while self.running:  # calls that raised an exception within the model never end
            call = self.running.pop()
            if self._modules.pop() is module:
                call.outputs, call.end = outputs, _get_sequence_nr()
                self.left.append(call)
                return
