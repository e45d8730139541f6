"""Records of operations: from the outputs of a model to its loss, and those that made the labels."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from workbench.contracts.places import line_of_script
from workbench.models.losses import tensors_in

#: Most operations of a record; a longer one is given up.
_MOST = 4096
#: Losses that receive logits, or their logarithmic softmax.
_OF_LOGITS = ("cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "ctc_loss")
#: Operations that only give a tensor another shape, between probabilities and a loss.
_SHAPES = (
    *("View", "UnsafeView", "Reshape", "Alias", "Transpose", "Permute", "TBackward", "Squeeze", "Unsqueeze"),
    *("Select", "Slice", "Clone", "ToCopy"),
)
#: Error of a sum of probabilities in half precision.
_OF_SUM = 0.01


class _Place:
    """Place of a tensor that an operation of the record has computed."""

    def __init__(self, number: int, shape: tuple[int, ...]) -> None:
        self.number, self.shape = number, shape


class Tape(TorchFunctionMode):
    """Records functions of torch from the end of a forward pass to the backward pass.

    Attributes:
        calls: Calls of modules whose outputs the operations use.
        operations: Each function with its arguments, in which tensors computed earlier are replaced by their places.
        is_complete: Whether the loss follows from the outputs by the operations alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.operations: list[tuple[Any, Any, Any, list[int]]] = []
        self._lines: list[str] = []
        self.is_complete = self.is_closed = False
        self._places: dict[int, int] = {}
        self._of_calls: list[list[int]] = []
        self._held: list[Tensor] = []  # so that no address is used twice
        self._doubled: dict[int, tuple[str, int]] = {}
        self._root = -1
        self._n = 0

    def add_outputs(self, call: Any, output: Any) -> None:
        """Note the outputs of a call as inputs of the operations."""
        self.calls.append(call)
        self._of_calls.append([self._note(tensor) for tensor in tensors_in(output)])

    def _note(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        self._places[id(tensor)] = number = self._n
        self._n += 1
        return number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and record it."""
        kwargs = kwargs or {}
        if self.is_closed:
            return func(*args, **kwargs)
        given = None if len(self.operations) >= _MOST else (self._placed(args), self._placed(kwargs))
        result = func(*args, **kwargs)
        if given is not None:
            made = [result] if isinstance(result, Tensor) else [*tensors_in(result)]
            if made:
                self.operations.append((func, *given, [self._note(each) for each in made]))
                self._lines.append(line_of_script())
                if (n := _n_classes(func, args, kwargs)) > 0:
                    self._doubled[self._places[id(made[0])]] = getattr(func, "__name__", ""), n
        return result

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            return value if place is None else _Place(place, tuple(value.shape))
        if isinstance(value, Mapping):
            return {name: self._placed(each) for name, each in value.items()}
        return type(value)(self._placed(each) for each in value) if type(value) in (tuple, list) else value

    def close(self, root: Tensor | None) -> None:
        """End the record at the loss, and release the graph."""
        self.is_closed = True
        if root is not None and id(root) in self._places and len(self.operations) < _MOST:
            self._root, self.is_complete = self._places[id(root)], True
        self._held.clear()
        self._places.clear()
        if not self.is_complete:
            self.operations.clear()
            self._lines.clear()

    @property
    def functions(self) -> list[str]:
        """Names of the recorded functions that the loss needs, in their order."""
        return [getattr(func, "__name__", str(func)) for func, *_ in self._needed()]

    @property
    def lines(self) -> list[str]:
        """Lines of the script with the operations that the loss needs, in their order."""
        needed = {id(each) for each in self._needed()}
        found = [line for each, line in zip(self.operations, self._lines, strict=True) if id(each) in needed]
        return [*dict.fromkeys(line for line in found if line)]

    @property
    def targets(self) -> list[Tensor]:
        """Integer tensors from outside of the model that the loss needs."""
        found = [t for _, args, kwargs, _ in self._needed() for t in tensors_in([args, kwargs])]
        return [*{id(t): t for t in found if t.dtype in (torch.int64, torch.int32) and t.ndim}.values()]

    @property
    def outer(self) -> list[Tensor]:
        """Numbers that the loss needs, and that are neither outputs nor computed from them."""
        found = [t for _, args, kwargs, _ in self._needed() for t in tensors_in([args, kwargs])]
        return [t for t in found if t.numel() == 1 and t.is_floating_point()]

    @property
    def shapes(self) -> list[tuple[str, list[tuple[int, ...]]]]:
        """Name of each function that the loss needs, with the shapes of the tensors that it received."""
        return [
            (getattr(func, "__name__", str(func)), [tuple(each.shape) for each in _tensors_and_places((args, kwargs))])
            for func, args, kwargs, _ in self._needed()
        ]

    def _needed(self) -> list[tuple[Any, Any, Any, list[int]]]:
        needed, found = {self._root}, []
        for operation in reversed(self.operations):
            _, args, kwargs, made = operation
            if needed & {*made}:
                found.append(operation)
                needed |= {place.number for place in _places_in((args, kwargs))}
        return found[::-1]

    @property
    def is_mean(self) -> bool:
        """Whether the loss is what a loss function of torch returns, as a mean over the batch."""
        made = next((each for each in self.operations if self._root in each[3]), None)
        if made is None or not getattr(made[0], "__name__", "").endswith(("_loss", "cross_entropy", "with_logits")):
            return False
        return made[2].get("reduction", "mean") == "mean" and "sum" not in made[1]

    @property
    def doubled(self) -> tuple[str, int]:
        """Name of the first loss that receives probabilities, and the number of their classes; empty without one."""
        made = [number for *_, numbers in self._needed() for number in numbers]
        return next((self._doubled[number] for number in made if number in self._doubled), ("", 0))

    def loss(self, outputs: list[Any]) -> Tensor:
        """Return the loss of new outputs of the same calls."""
        values: dict[int, Tensor] = {}
        for numbers, output in zip(self._of_calls, outputs, strict=True):
            values |= dict(zip(numbers, tensors_in(output), strict=True))

        def real(value: Any) -> Any:
            if isinstance(value, _Place):
                return values[value.number]
            if isinstance(value, Tensor):
                return value.detach() if value.grad_fn is not None else value
            if isinstance(value, Mapping):
                return {name: real(each) for name, each in value.items()}
            return type(value)(real(each) for each in value) if type(value) in (tuple, list) else value

        # Those alone that the loss needs: others, such as `zero_grad`, may write to what the training owns.
        for func, args, kwargs, made in self._needed() if self._root not in values else ():
            result = func(*real(args), **real(kwargs))
            new = [result] if isinstance(result, Tensor) else [*tensors_in(result)]
            values |= dict(zip(made, new, strict=True))
        return values[self._root]


class Origins(TorchFunctionMode):
    """Notes which lines of a script make and write integer tensors, such as labels, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = False
        self._lines: dict[int, tuple[weakref.ref[Tensor], list[str]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and note the line for the integer tensors that it makes or writes."""
        result = func(*args, **(kwargs or {}))
        if not self.is_closed:
            written = args[:1] if result is None else [result]
            made = [each for each in written if isinstance(each, Tensor) and not each.is_floating_point() and each.ndim]
            if made and (line := line_of_script()):
                given = [line for each in tensors_in([args, kwargs or {}]) for line in self.of(each)]
                for each in made:
                    self._lines[id(each)] = (weakref.ref(each), [*dict.fromkeys([*given, *self.of(each), line])])
        return result

    def of(self, tensor: Tensor) -> list[str]:
        """Return the lines that have made and written a tensor, the latest last."""
        reference, lines = self._lines.get(id(tensor), (None, []))
        return lines if reference is not None and reference() is tensor else []


def leave_closed() -> None:
    """Leave a record that is closed.

    `Tensor.backward` is itself called within the mode, which torch enters again after it; so it is left later.
    """
    stack = _get_current_function_mode_stack()
    if stack and isinstance(stack[-1], Tape | Origins) and stack[-1].is_closed:
        stack[-1].__exit__(None, None, None)


def _n_classes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the number of classes of probabilities that a loss receives, 1 after a sigmoid; 0 if it has logits."""
    given, name = next(tensors_in([args, kwargs]), None), getattr(func, "__name__", "")
    if given is None or name not in _OF_LOGITS or torch._C._functorch.peek_interpreter_stack() is not None:
        return 0
    node: Any = given.grad_fn
    while node is not None and node.name().startswith(_SHAPES):
        node = node.next_functions[0][0]
    maker = "" if node is None else node.name()
    if name == "binary_cross_entropy_with_logits":
        return int(maker.startswith("Sigmoid"))
    axis = 1 if given.ndim > 1 and name != "ctc_loss" else -1
    sums = given.detach().float().sum(axis)
    is_sum = sums.numel() > 1 and bool((given >= 0).all()) and bool(((sums - 1).abs() < _OF_SUM).all())
    return given.shape[axis] if is_sum or maker.startswith("Softmax") else 0


def _places_in(value: Any) -> list[_Place]:
    return [each for each in _tensors_and_places(value) if isinstance(each, _Place)]


def _tensors_and_places(value: Any) -> list[Any]:
    if isinstance(value, _Place | Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if type(value) in (tuple, list) else ()
    return [each for part in parts for each in _tensors_and_places(part)]
