"""Readings of the values in a forward pass, and operations that compute values that are not finite."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workbench.formatting import number_in_words
from workbench.models.probing import HookRequest
from workbench.models.readable_weights import read_arrays

#: Values that are reduced at a time, so that large tensors are not copied.
_CHUNK = 1 << 22
#: Origin of a tensor: a node of the graph and the index of its output.
Edge = tuple[int, int]


@dataclass(eq=False)
class Reading:
    """Counts of the values of one tensor that are not finite; they stay on its device until `read` transfers them."""

    #: Number of values that are not finite, number of NaN and of -inf among them, and largest finite |value| or -1,
    #: shape (4,).
    numbers: Tensor
    n_values: int  # number of values
    dtype: torch.dtype  # number format
    needs_gradient: bool  # whether a gradient flows to the tensor
    edge: Edge | None  # origin of the tensor in the graph; None for a leaf
    n_bad: int = 0  # number of values that are not finite
    n_nan: int = 0  # number of NaN among them
    n_lowest: int = 0  # number of -inf among them
    largest: float = math.nan  # largest finite |value|; NaN if there is none

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
    """One call of a module in the forward pass."""

    name: str  # path of the module
    number: int  # number of calls that began before it
    parent: Call | None  # enclosing call; None if there is none
    begin: int  # number of nodes of the graph that were created before it
    inputs: list[Reading]  # readings of its arguments
    outputs: list[Reading] = field(default_factory=list)  # readings of its results
    end: int = -1  # number of nodes that were created when it ended


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


#: Operations that write a value given by the program, or leave memory uninitialized.
_FILLS = {
    "fill", "maskedfill", "fulllike", "newfull", "empty", "emptylike", "newempty", "emptystrided", "newemptystrided",
}  # fmt: skip
_LOGARITHMS = {"log", "log2", "log10", "log1p"}
_ROOTS = {"sqrt", "rsqrt"}
_QUOTIENTS = {"div", "reciprocal", "rsqrt"}
_SOFTMAX = {"softmax", "logsoftmax"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "mul", "addcmul"}
#: Operations that turn finite numbers into infinite ones or NaN only by overflow.
_OVERFLOWS = _PRODUCTS | {"add", "sub", "sum", "cumsum", "exp", "exp2", "expm1", "square", "tocopy", "copy", "linear"}


#: Name of an operation, readings of its inputs, readings of its results.
Seen = tuple[str, list[Reading], list[Reading]]


class Operations(TorchDispatchMode):
    """Dispatch mode that records the operations of torch in a part of a pass, with readings of inputs and results."""

    #: flex_attention is a higher-order operator, which torch otherwise does not run in a dispatch mode.
    supports_higher_order_operators = True

    def __init__(self, is_part: Callable[[], bool]) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self._is_part = is_part

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_part():
            return func(*args, **kwargs)
        inputs = readings_of((args, kwargs))
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func)).partition(".")[0].strip("_")
        self.seen.append((name, inputs, readings_of(result)))
        return result


class BadOperation(NamedTuple):
    """An operation of torch whose result is not finite."""

    name: str
    result: Reading
    inputs: list[Reading]

    @property
    def largest(self) -> float:
        """Largest finite |value| of the inputs."""
        return largest_of(self.inputs)

    @property
    def has_unmasked_lowest(self) -> bool:
        """Whether an input contains -inf, other than the mask of attention or the input of a softmax."""
        key = _plain(self.name)
        unmasked = self.inputs[:3] if "attention" in key else self.inputs  # queries, keys, values
        return key not in _SOFTMAX and any(r.n_bad for r in unmasked)

    @property
    def suggestion(self) -> str:
        """Probable cause of the result; empty if none is certain."""
        key = _plain(self.name)
        if "attention" in key:
            return f"{_overflow(self.result.dtype)}, or a row in which the mask hides every position"
        if any(r.n_bad for r in self.inputs):
            masked = "a row of its input is all -inf, as if a mask hides every position"
            return masked if key in _SOFTMAX else ""
        if key == "mean" and not any(r.n_values for r in self.inputs):
            return "there are no values to average"
        if key in _LOGARITHMS:
            return f"the logarithm of {'a negative number' if self.result.n_nan else 'zero'}"
        if key in _ROOTS and self.result.n_nan:
            return "the root of a negative number"
        if key in _QUOTIENTS:
            return "a division by zero, or by a number so small that the quotient overflows"
        if key.startswith("nllloss") and self.result.n_nan:
            return "there is no target to average over"
        return _overflow(self.result.dtype) if key in _OVERFLOWS else ""


def first_bad_operation(seen: Sequence[Seen]) -> BadOperation | None:
    """Return the first operation with finite inputs whose result is not finite; inputs may contain -inf, as in masks.

    Operations on the path of a gradient take precedence: other results, such as buckets of positions, are often not
    finite at entries that are never used.
    """
    bad = []
    for name, inputs, results in seen:
        is_sound = inputs and all(r.may_be_mask for r in inputs) and _plain(name) not in _FILLS
        is_masked = any(r.n_bad for r in inputs)
        result = next((r for r in results if not r.may_be_mask or (r.n_bad and not is_masked)), None)
        if is_sound and result is not None:
            bad.append(BadOperation(name, result, inputs))
    return next((one for one in bad if any(r.needs_gradient for r in one.inputs)), bad[0] if bad else None)


def gradient_suggestion(node: str, dtype: torch.dtype) -> str:
    """Return the probable cause if a node of the graph receives a finite gradient and returns one that is not."""
    key = _plain(re.sub(r"Backward\d*$", "", node))
    if key == "tocopy":
        return _overflow(dtype)
    if key in _LOGARITHMS | _ROOTS | _QUOTIENTS | {"pow"}:
        return f"a derivative that is infinite, as at zero, or too large for {_named(dtype)}"
    if key in _PRODUCTS:
        return f"{_overflow(dtype)}, or a factor of the forward pass that is not finite"
    return ""


def _overflow(dtype: torch.dtype) -> str:
    return f"an overflow of {_named(dtype)}"


def _named(dtype: torch.dtype) -> str:
    limit = torch.finfo(dtype).max
    words = f"{limit:,.0f}" if limit < 1e6 else number_in_words(limit)
    return f"{str(dtype).removeprefix('torch.')} (at most {words})"


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
