"""What the annotation of an argument says: limits and types of the project, and the kind of any annotation.

Type and range are data in the signature, such as ``n_steps: PositiveInt`` or ``Annotated[float, below(1)]``. Names that
are imported for type checkers alone are looked up among the modules already imported: a value cannot be an instance of
a class whose module is not.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import islice
from numbers import Complex, Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from workbench.errors import AnatomyError, held_module


class Range(NamedTuple):
    """What a value is beyond its type: words that follow the name of the type, and the test."""

    words: str
    holds: Callable[[Any], bool]
    values: tuple[Any, ...] = ()

    def __repr__(self) -> str:  # as the reference shows it in a type
        return self.words if not self.values else ", ".join(map(repr, self.values))


def _limit(words: str, holds: Callable[[Any, float], bool]) -> Callable[[float], Range]:
    return lambda limit: Range(f"{words} {limit}", lambda value: holds(value, limit))


#: Limits of numbers, such as ``at_least(1)``.
at_least = _limit("of at least", operator.ge)
above = _limit("above", operator.gt)
at_most = _limit("of at most", operator.le)
below = _limit("below", operator.lt)


def n_dims(number: int) -> Range:
    """Return the limit of arrays with a number of dimensions."""
    return Range(f"with {number} dimension{'s' * (number > 1)}", lambda value: value.ndim == number)


def one_of(allowed: Iterable[Any]) -> Range:
    """Return the limit of values that are listed."""
    values = tuple(allowed)
    return Range("as listed", lambda value: value in values, values)


#: Numbers with limits are finite, and none is NaN, except with these.
MAY_BE_INFINITE = Range("", lambda value: True)
MAY_BE_NAN = Range("", lambda value: value is not None)


class Remedy(NamedTuple):
    """What to do with a value that is refused, in the imperative."""

    words: str


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, above(0)]
NonNegativeFloat = Annotated[float, at_least(0)]
#: Above 0 and at most 1.
Fraction = Annotated[float, above(0), at_most(1)]
#: Level of an interval.
Level = Annotated[float, above(0), below(1)]
#: Range of torch's generators.
Seed = Annotated[int, at_least(-(2**32)), at_most(2**32)]
#: A bound, infinite if there is none.
Bound = Annotated[float, above(0), MAY_BE_INFINITE]
#: A value that was measured, which may be NaN or infinite.
Measured = Annotated[float, MAY_BE_NAN]

PHRASES = {
    "Tensor": "a torch tensor", "ndarray": "a NumPy array", "Module": "a torch.nn.Module", "Generator": "a generator",
    "dtype": "a torch.dtype", "device": "a torch.device", "PathLike": "a path", "Path": "a pathlib.Path",
    "AnyOptimizer": "an optimizer", "Dataset": "an xarray Dataset", "DataTree": "an xarray DataTree",
    "DataArray": "an xarray DataArray", "Dimensioned": "a figure of wb.plots",
    "str": "text", "bytes": "bytes", "dict": "a mapping", "type": "a class",
}  # fmt: skip
#: Models in any wrapper, of which `held_module` says what is wrong.
_MODELS = ("Subject", "HoldsModel")
#: Elements of a collection that are checked, so that a long one costs no time.
_MAX_CHECKED = 1000
ABSENT = object()


class RefusedError(Exception):
    """A value is not what its annotation says; the phrase replaces the general one if it says more."""

    def __init__(self, phrase: str = "", part: Any = ABSENT) -> None:
        super().__init__(phrase)
        #: ``part`` is the element of a collection that is wrong.
        self.phrase, self.part = phrase, part


def _require(holds: bool, phrase: str = "", part: Any = ABSENT) -> None:
    if not holds:
        raise RefusedError(phrase, part)


class ArgumentKind(NamedTuple):
    """What an annotation says: a phrase that completes "must be", or the allowed values, and the check.

    ``admit`` returns the value, as a plain number or list if it is of NumPy or torch, or raises `RefusedError`.
    """

    expected: str | tuple[Any, ...]
    admit: Callable[[Any], Any]
    remedy: str = ""

    @property
    def phrase(self) -> str:
        """What completes "must be"."""
        return self.expected if isinstance(self.expected, str) else f"one of {', '.join(map(repr, self.expected))}"


def _plain_kind(
    expected: str | tuple[Any, ...], holds: Callable[[Any], bool], plain: Callable[[Any], Any] = lambda x: x
) -> ArgumentKind:
    def admit(value: Any) -> Any:
        _require(holds(value := plain(value)))
        return value

    return ArgumentKind(expected, admit)


class _Later(type):
    """A name that a module imports for type checkers alone: a class without instances, so that unions may hold it."""

    path: tuple[str, ...]

    @classmethod
    def of(cls, *path: str) -> _Later:
        """Return the name at the end of a path, which begins with a module."""
        return cls(path[-1], (), {"path": path})

    def __getattr__(cls, name: str) -> _Later:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.of(*cls.path, name)

    def __getitem__(cls, item: object) -> _Later:
        return cls

    def resolved(cls) -> Any:
        """Return the object; `ABSENT` if the module of another library is not imported."""
        module = cls.path[0]
        if module not in sys.modules and module.partition(".")[0] != "workbench":
            return ABSENT
        try:
            return functools.reduce(getattr, cls.path[1:], importlib.import_module(module))
        except AttributeError:
            return ABSENT


@functools.cache
def _typing_imports(module: str) -> dict[str, Any]:
    """Return the names that a module imports under ``if TYPE_CHECKING:``, as objects if their modules are loaded."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    blocks = [
        each for each in tree.body if isinstance(each, ast.If) and getattr(each.test, "id", "") == "TYPE_CHECKING"
    ]
    names = {
        alias.asname or alias.name: _Later.of(*filter(None, [getattr(node, "module", None), alias.name]))
        for block in blocks
        for node in block.body
        for alias in getattr(node, "names", ())
    }
    found = {name: later.resolved() if later.path[0] in sys.modules else ABSENT for name, later in names.items()}
    return {name: later if found[name] is ABSENT else found[name] for name, later in names.items()}


def evaluated(text: Any, module: str) -> Any:
    """Return what an annotation says; `Any` if it cannot be evaluated at run time."""
    if not isinstance(text, str):
        return text
    try:
        return eval(text, {**_typing_imports(module), **vars(sys.modules[module])})
    except Exception:  # noqa: BLE001  # a name that only type checkers know
        return Any


def _plain(value: Any) -> Any:
    """Return a scalar of NumPy or torch as a number of Python, anything else unchanged."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        with contextlib.suppress(Exception):  # a tensor without data
            return value.item()
    return value


def _number(kind: type, words: str, *, may_be_nan: bool, may_be_infinite: bool) -> ArgumentKind:
    def admit(value: Any) -> Any:
        value = _plain(value)
        _require(isinstance(value, kind) and not isinstance(value, bool))
        _require(not isinstance(value, Integral) or -(2**63) <= int(value) < 2**64, "a number of 64 bits")
        _require(may_be_nan or (value == value and (may_be_infinite or abs(value) != math.inf)))
        return value

    return ArgumentKind(words, admit)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping | type):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ()


def _is_iterable(value: Any) -> bool:
    return not isinstance(value, str | bytes | type) and (hasattr(value, "__iter__") or _is_sequence(value))


def _collection(words: str, belongs: Callable[[Any], bool], parts: Iterable[Any], length: int = 0) -> ArgumentKind:
    """Return the kind of a collection whose elements (of a mapping: keys and values) are as annotated."""
    kinds = [kind_of(Measured if part is float else part) for part in parts]  # they may be measured
    inner = kinds[-1] if kinds else None
    phrases = list(dict.fromkeys(kind.phrase if kind else "anything" for kind in kinds))
    if len(phrases) > 1 and length:
        words = f"{words} of {' and '.join(phrases)}"
    elif inner is not None and words != "a mapping":
        words = f"{words} of {f'{length} elements' if length else 'elements'}, each {inner.phrase}"

    def admit(value: Any) -> Any:
        _require(belongs(value) and (not length or len(value) == length))
        if any(kinds) and hasattr(value, "dtype"):
            value = value.tolist() if hasattr(value, "tolist") else value.values.tolist()
        if not any(kinds) or not isinstance(value, Collection):
            return value  # an iterator can be read only once
        pairs = [value] if length else value.items() if isinstance(value, Mapping) else zip(value)
        for pair in islice(pairs, _MAX_CHECKED):
            for kind, each in zip(kinds, pair, strict=False):
                try:
                    if kind is not None:
                        kind.admit(each)
                except RefusedError:
                    raise RefusedError if length else RefusedError(words, each) from None
        return value

    return ArgumentKind(words, admit)


def _array(*, converts: bool) -> ArgumentKind:
    """Return the kind of arrays; ``converts`` is whether a sequence becomes one, for functions that need an array."""

    def admit(value: Any) -> Any:
        import numpy as np

        is_array = isinstance(value, np.ndarray | np.generic)
        if hasattr(value, "__array__") and not is_array and not isinstance(value, Mapping):  # a tensor or a DataArray
            return value.numpy(force=True) if converts and hasattr(value, "numpy") else value
        is_number = isinstance(value, Complex) and not isinstance(value, bool) and not converts
        try:
            array = np.asarray(value if is_array or is_number or _is_sequence(value) else None)
        except (TypeError, ValueError, OverflowError):
            raise RefusedError from None
        _require(array.dtype.kind in ("biufc" if converts else "biufcUO" if is_array else "biufcU"))
        return array if converts else value

    return ArgumentKind("an array of numbers", admit)


def _function(arguments: Any) -> ArgumentKind:
    """Return the kind of functions that can be called with as many arguments as a list has, if it is one."""
    n_arguments = len(arguments) if isinstance(arguments, list) else None

    def holds(value: Any) -> bool:
        if callable(value) and n_arguments is not None:
            try:
                inspect.signature(value).bind(*arguments)
            except TypeError:
                return False
            except ValueError:  # a builtin without signature
                return True
        return callable(value)

    return _plain_kind(
        "a function" + (f" of {n_arguments} argument{'s' * (n_arguments > 1)}" if n_arguments else ""), holds
    )


def _is_device(value: Any) -> bool:
    torch = sys.modules["torch"]
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and bool(torch.device(value)))
    except RuntimeError:
        return False


def _phrase(name: str) -> str:
    return PHRASES.get(name, f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}")


def _class(cls: type) -> ArgumentKind:
    phrase = _phrase(cls.__name__)
    if cls.__name__ in _MODELS:
        return _plain_kind("an nn.Module or a subject", lambda value: held_module(value) is not None)
    if cls.__name__ == "device":
        return _plain_kind(phrase, _is_device)
    if not getattr(cls, "_is_protocol", False):
        return _plain_kind(phrase, lambda value: isinstance(value, (str, cls) if phrase == "a path" else cls))
    bases = [base for base in cls.__mro__ if getattr(base, "_is_protocol", False)]
    names = {each for base in bases for each in (*vars(base), *vars(base).get("__annotations__", ()))}
    members = [each for each in names if not each.startswith("_") or each == "__call__"]
    return _plain_kind(phrase, lambda value: all(hasattr(value, each) for each in members))


def _later(name: _Later) -> ArgumentKind | None:
    if name.__name__ == "Any":
        return None
    if name.__name__ == "ArrayLike":
        return _array(converts=False)
    if name.__name__ in _MODELS:
        return _class(name)

    def admit(value: Any) -> Any:
        _require((target := name.resolved()) is not ABSENT)
        kind = kind_of(target)
        return value if kind is None else kind.admit(value)

    return ArgumentKind(_phrase(name.__name__), admit)


#: Phrase of a member of a union -> those that it includes.
_INCLUDED = {"a path": ("text",), "a torch.device": ("text",), "an nn.Module or a subject": ("a torch.nn.Module",)}


def _union(members: Iterable[Any], default: Any) -> ArgumentKind | None:
    kinds: dict[str, ArgumentKind] = {}
    for member in members:
        if (kind := kind_of(member, default)) is None:
            return None
        kinds[kind.phrase] = kind
    for included in [each for phrase in kinds for each in _INCLUDED.get(phrase, ())]:
        kinds.pop(included, None)
    named = [kind for phrase, kind in kinds.items() if phrase != "None"]  # a value that is refused is not None

    def admit(value: Any) -> Any:
        error: Exception = RefusedError()
        for kind in kinds.values():
            try:
                return kind.admit(value)
            except (RefusedError, AnatomyError) as refused:
                error = refused if named == [kind] else error
        raise error

    *others, last = [kind.phrase for kind in named or kinds.values()]
    return ArgumentKind(f"{', '.join(others)} or {last}" if others else (named or [*kinds.values()])[0].expected, admit)


def kind_of(annotation: Any, default: Any = None, limits: Sequence[Range] = ()) -> ArgumentKind | None:
    """Return the kind of an annotation; None if it admits everything."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind = kind_of(parts[0], default, [*limits, *(each for each in parts[1:] if isinstance(each, Range))])
        remedy = "".join(each.words for each in parts[1:] if isinstance(each, Remedy))
        return kind and kind._replace(remedy=remedy or kind.remedy)
    kind = _bare_kind(annotation, origin, parts, default, limits)
    words = " and ".join(limit.words for limit in limits if limit.words).replace(" and of ", " and ")
    if kind is None or not words:
        return kind

    def admit(value: Any) -> Any:
        value = kind.admit(value)
        _require(all(limit.holds(value) for limit in limits))
        return value

    values = next((limit.values for limit in limits if limit.values), ())
    return ArgumentKind(values or f"{kind.phrase} {words}", admit)


def _bare_kind(annotation: Any, origin: Any, parts: Any, default: Any, limits: Sequence[Range]) -> ArgumentKind | None:
    if isinstance(annotation, _Later):
        return _later(annotation)
    if annotation is getattr(sys.modules.get("numpy.typing"), "ArrayLike", ABSENT):
        return _array(converts=False)
    if origin in (Union, types.UnionType):
        return _union(parts, default)
    if annotation in (None, types.NoneType):
        return _plain_kind("None", lambda value: value is None)
    if annotation is bool:
        return _plain_kind((True, False), lambda value: isinstance(value, bool), _plain)
    if annotation is int:
        return _number(Integral, "an integer", may_be_nan=False, may_be_infinite=True)
    if annotation is float:
        may_be_nan = MAY_BE_NAN in limits
        may_be_infinite = may_be_nan or MAY_BE_INFINITE in limits or not limits or default == math.inf
        words = "a number" if may_be_infinite else "a finite number"
        return _number(Real, words, may_be_nan=may_be_nan, may_be_infinite=may_be_infinite)
    if origin is Literal:
        return _plain_kind(parts, lambda value: (type(value), value) in [(type(each), each) for each in parts])
    base = origin or annotation
    if not isinstance(base, type) or base in (Any, object):
        return kind_of(annotation.__bound__) if isinstance(annotation, TypeVar) and annotation.__bound__ else None
    if base is getattr(sys.modules.get("numpy"), "ndarray", ABSENT):
        return _array(converts=True)
    if base is type:
        return _plain_kind("a class", lambda value: isinstance(value, type))
    if base is dict or base in (Mapping, MutableMapping):
        return _collection("a mapping", lambda value: isinstance(value, Mapping), parts)
    if base is tuple:
        is_open = parts[-1:] == (Ellipsis,)
        return _collection("a sequence", _is_sequence, parts[:1] if is_open else parts, 0 if is_open else len(parts))
    if base in (Sequence, list):
        return _collection("a sequence", _is_sequence, parts)
    if base in (Iterable, Collection):
        return _collection("a sequence" if base is Collection else "an iterable", _is_iterable, parts)
    return _function(*parts[:1] or [None]) if base is Callable else _class(base)
