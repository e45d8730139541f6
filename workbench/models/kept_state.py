"""State beside tensors that a pass may change: generators, iterators, and what functions and objects refer to."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain, count
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import SnapshotError

#: Iterators that `copy.copy` copies with their position.
_COPIED: tuple[type, ...] = (count, type(iter([])), type(iter(())), type(iter(range(0))))
#: Number of objects that are looked at, entries of a container that are followed, and bytes of an array that is copied.
_MOST, _LONGEST, _MOST_BYTES = 20_000, 10_000, 1 << 20
_MISSING = object()


class KeptState:
    """State that is restored after a pass: of attributes, and of all that the code of the model itself refers to.

    Followed are lists, dictionaries, sets, arrays, own objects, and functions with their closures, defaults and the
    globals that they name. Classes and functions of installed packages are not followed. An iterator that cannot be
    copied, such as a generator or a file, is replaced during the pass by an object that raises SnapshotError when it is
    used: the model cannot be measured then, but its training is unchanged.

    Attributes:
        tensors: Tensors that were found; they are not copied.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._restore: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}
        self._waiting: list[Any] = []

    def follow(self, values: Iterable[Any]) -> None:
        """Keep the state of values, and of what they refer to."""
        self._waiting += values
        while self._waiting and len(self._seen) < _MOST:
            value = self._waiting.pop()
            if id(value) not in self._seen and not isinstance(value, str | int | float | bool | None | torch.dtype):
                self._seen[id(value)] = value  # alive, so that its id is not used again
                self._keep(value)

    def restore(self) -> None:
        """Restore all that has changed."""
        for restore in reversed(self._restore):
            restore()

    def keep_names(self, owner: Any, names: Iterable[str]) -> None:
        """Keep what some names refer to: keys of a dictionary, or attributes of a class or of a variable."""
        get, put = (owner.get, owner.__setitem__) if isinstance(owner, dict) else (partial(getattr, owner), None)
        put = put or partial(setattr, owner)
        before = {name: value for name in names if (value := get(name, _MISSING)) is not _MISSING}
        self._waiting += before.values()
        for name, value in before.items():
            if (held := _held(value)) is not value:
                put(name, held)

        def restore() -> None:
            for name, value in before.items():
                if get(name, _MISSING) is not value:
                    put(name, value)

        self._restore.append(restore)

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, torch.Generator):
            self._restore.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.RandomState):
            self._restore.append(partial(value.set_state, value.get_state(legacy=False)))
        elif isinstance(value, random.Random):
            self._restore.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._restore.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST_BYTES and value.flags.writeable:
                self._restore.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, list | dict | set | deque):
            self._keep_contents(value)
        elif isinstance(value, tuple):
            self._waiting += value
        elif isinstance(value, partial):
            self._waiting += [value.func, value.args, value.keywords]
        elif isinstance(value, MethodType):
            self._waiting += [value.__func__, value.__self__]
        elif isinstance(value, FunctionType) and not is_library(value.__module__):
            self._waiting += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            self.keep_names(value.__globals__, _names_in(value.__code__))
            for cell in value.__closure__ or ():
                self.keep_names(cell, ["cell_contents"])
        elif isinstance(value, type):
            for owner in () if is_library(value.__module__) else value.__mro__:
                own = {} if is_library(owner.__module__) else dict(vars(owner))
                self.keep_names(owner, [name for name, each in own.items() if not hasattr(type(each), "__get__")])
                self._waiting += [each for each in own.values() if isinstance(each, FunctionType)]
        elif not isinstance(value, nn.Module) and hasattr(value, "__dict__") and not is_library(type(value).__module__):
            self._waiting += [vars(value), type(value)]

    def _keep_contents(self, value: Any) -> None:
        # Read as the built-in type does: the items of a subclass, such as a registry of classes, may be made anew.
        kind: Any = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(value, kind))
        is_table = issubclass(kind, dict)

        def read() -> list[Any]:
            return [(key, dict.__getitem__(value, key)) if is_table else key for key in kind.__iter__(value)]

        then = read()
        self._waiting += ([item[1] for item in then] if is_table else then) if len(then) <= _LONGEST else ()
        places = then if is_table else enumerate(then) if kind is not set else ()
        for place, held in [(place, held) for place, item in places if (held := _held(item)) is not item]:
            value[place] = held

        def restore() -> None:
            now = read()
            flat_now, flat_then = (list(chain(*each)) if is_table else each for each in (now, then))
            if len(now) != len(then) or any(a is not b for a, b in zip(flat_now, flat_then, strict=True)):
                value.clear()
                for item in then:  # subclasses, such as a Counter, update differently
                    if is_table:
                        value[item[0]] = item[1]
                    else:
                        (value.add if isinstance(value, set) else value.append)(item)

        self._restore.append(restore)


class _Refused:
    """An object in place of an iterator that a pass must not advance."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        raise SnapshotError(
            f"The model uses a {self._kind}, which cannot be set back after a measurement; hold its values in a list, "
            "or draw them outside of the model."
        )

    def __next__(self) -> Any:
        return self.advance

    __iter__ = __enter__ = __next__


def _held(value: Any) -> Any:
    """Return a copy of an iterator, or an object that refuses to be one; other values are returned unchanged."""
    if type(value) in _COPIED:
        return copy.copy(value)
    return _Refused(type(value).__name__) if hasattr(type(value), "__next__") else value


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names}.union(*map(_names_in, inner))


@cache
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, to an installed package or to the workbench."""
    root = str(module).partition(".")[0]
    if root == "__main__":
        return False
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root in sys.stdlib_module_names or root == "workbench" or "-packages" in file
