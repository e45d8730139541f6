"""Operations that compute values that are not finite from finite ones, and their probable causes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.formatting import number_in_words
from workbench.probes.pass_readings import Reading, largest_of, readings_of

#: Operations that write a value given by the program, or leave memory uninitialized.
_FILLS = {
    "fill",
    "maskedfill",
    "fulllike",
    "newfull",
    "empty",
    "emptylike",
    "newempty",
    "emptystrided",
    "newemptystrided",
}
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
