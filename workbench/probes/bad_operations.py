"""Operations that make values that are not finite out of finite ones, and what they suggest."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.formatting import number_in_words
from workbench.probes.pass_readings import Reading, largest_of, readings_of

#: Operations that write a value which the program names, or none yet.
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
#: Operations that make finite numbers infinite, or NaN, by overflow alone.
_OVERFLOWS = _PRODUCTS | {"add", "sub", "sum", "cumsum", "exp", "exp2", "expm1", "square", "tocopy", "copy", "linear"}


#: Name of an operation, readings of its inputs, readings of its results.
Seen = tuple[str, list[Reading], list[Reading]]


class Operations(TorchDispatchMode):
    """The operations of torch in a part of a pass, with readings of what entered and left each.

    Args:
        is_part: Function that says whether the pass is in that part.

    Attributes:
        seen: The operations, in their order.
    """

    #: flex_attention is an operator of operators, which torch otherwise refuses to run in a dispatch mode.
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
    """An operation of torch whose result is not finite.

    Attributes:
        name: Its name in torch, such as "exp".
        result: Reading of the result.
        inputs: Readings of its inputs.
    """

    name: str
    result: Reading
    inputs: list[Reading]

    @property
    def largest(self) -> float:
        """Largest finite |value| that went in."""
        return largest_of(self.inputs)

    @property
    def lowest_goes_in(self) -> bool:
        """Whether -inf goes in, other than as the mask of attention or into a softmax."""
        key = _plain(self.name)
        unmasked = self.inputs[:3] if "attention" in key else self.inputs  # queries, keys, values
        return key not in _SOFTMAX and any(r.n_bad for r in unmasked)

    @property
    def suggestion(self) -> str:
        """What the result suggests; empty: nothing that is certain."""
        key = _plain(self.name)
        if "attention" in key:
            return f"{_overflow(self.result.dtype)}, or a row that the mask hides throughout"
        if any(r.n_bad for r in self.inputs):
            masked = "a row of what it gets is -inf throughout, as where a mask hides every position"
            return masked if key in _SOFTMAX else ""
        if key == "mean" and not any(r.n_values for r in self.inputs):
            return "there are no values to average"
        if key in _LOGARITHMS:
            return f"the logarithm of {'a negative number' if self.result.n_nan else 'zero'}"
        if key in _ROOTS and self.result.n_nan:
            return "the root of a negative number"
        if key in _QUOTIENTS:
            return "a division by zero, or by a number so small that the quotient is too large"
        if key.startswith("nllloss") and self.result.n_nan:
            return "there is no target to average over"
        return _overflow(self.result.dtype) if key in _OVERFLOWS else ""


def first_bad_operation(seen: Sequence[Seen]) -> BadOperation | None:
    """The first operation that makes values that are not finite; -inf may go in, as masks hold it.

    Operations on the path of a gradient come first: what is computed beside it, such as buckets of positions, is often
    not finite where nobody uses it.

    Args:
        seen: Operations as `Operations` has them, with numbers that were read.
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
    """What a node of the graph suggests that gets a finite gradient and passes on another one.

    Args:
        node: Name of the node, such as "SqrtBackward0".
        dtype: Number format of what it passes on.
    """
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
