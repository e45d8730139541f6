"""The door of public calls: each argument is checked against its annotation before any work begins.

Type and range are data in the signature, such as ``n_steps: PositiveInt`` or ``Annotated[float, below(1)]``.
`published` puts the door before every public name for calls from outside of the package, `checked` before a function or
a constructor for all calls. Names that are imported for type checkers alone are looked up among the modules already
imported: a value cannot be an instance of a class whose module is not.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import islice
from numbers import Complex, Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union

from workbench.errors import AnatomyError, CallError, OptionError, held_module

Target = TypeVar("Target", bound=Callable[..., Any])


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

#: Names here -> the names of other libraries.
USUAL_NAMES = {
    "learning_rate": "lr rate max_lr peak_lr eta",
    "n_steps": "steps max_steps num_steps iterations iters n_iter max_iter total_steps epochs",
    "batch_size": "bs batch batchsize per_device_train_batch_size train_batch_size",
    "clip_norm": "grad_clip clip max_norm max_grad_norm gradient_clip_val",
    "warmup": "warmup_steps num_warmup_steps n_warmup",
    "schedule": "scheduler lr_scheduler lr_scheduler_type",
    "optimizer_options": "weight_decay wd betas momentum eps",
    "optimizer": "opt optim",
    "precision": "dtype mixed_precision amp fp16 bf16",
    "loss": "loss_fn criterion loss_function",
    "store": "output_dir out_dir logdir log_dir path folder out filename run",
    "path": "output_dir out_dir folder out filename file store",
    "model": "module net network checkpoint subject",
    "subject": "model module net network checkpoint",
    "task": "data dataset dataloader loader train_dataset batches",
    "inputs": "data batch tokens dataset dataloader loader",
    "overwrite": "force exist_ok replace",
    "progress": "verbose quiet disable_tqdm",
    "seed": "random_state random_seed rng",
    "d_model": "dim hidden_size n_embd embed_dim width hidden_dim",
    "n_layers": "num_layers n_layer depth num_hidden_layers",
    "n_heads": "num_heads n_head heads num_attention_heads",
    "vocab_size": "vocab n_vocab num_tokens",
    "max_length": "block_size seq_len context_length max_len n_positions",
    "length": "block_size seq_len context_length max_len max_length",
}

_PHRASES = {
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
_ABSENT = object()


class _RefusedError(Exception):
    """A value is not what its annotation says; the phrase replaces the general one if it says more."""

    def __init__(self, phrase: str = "", part: Any = _ABSENT) -> None:
        super().__init__(phrase)
        #: ``part`` is the element of a collection that is wrong.
        self.phrase, self.part = phrase, part


def _require(holds: bool, phrase: str = "", part: Any = _ABSENT) -> None:
    if not holds:
        raise _RefusedError(phrase, part)


class _Kind(NamedTuple):
    """What an annotation says: a phrase that completes "must be", or the allowed values, and the check.

    ``admit`` returns the value, as a plain number or list if it is of NumPy or torch, or raises `_RefusedError`.
    """

    expected: str | tuple[Any, ...]
    admit: Callable[[Any], Any]
    remedy: str = ""

    @property
    def phrase(self) -> str:
        return self.expected if isinstance(self.expected, str) else f"one of {', '.join(map(repr, self.expected))}"


def _kind_of(
    expected: str | tuple[Any, ...], holds: Callable[[Any], bool], plain: Callable[[Any], Any] = lambda x: x
) -> _Kind:
    def admit(value: Any) -> Any:
        _require(holds(value := plain(value)))
        return value

    return _Kind(expected, admit)


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
        """Return the object; `_ABSENT` if the module of another library is not imported."""
        module = cls.path[0]
        if module not in sys.modules and module.partition(".")[0] != "workbench":
            return _ABSENT
        try:
            return functools.reduce(getattr, cls.path[1:], importlib.import_module(module))
        except AttributeError:
            return _ABSENT


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
    found = {name: later.resolved() if later.path[0] in sys.modules else _ABSENT for name, later in names.items()}
    return {name: later if found[name] is _ABSENT else found[name] for name, later in names.items()}


def _evaluated(text: Any, module: str) -> Any:
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


def _number(kind: type, words: str, *, may_be_nan: bool, may_be_infinite: bool) -> _Kind:
    def admit(value: Any) -> Any:
        value = _plain(value)
        _require(isinstance(value, kind) and not isinstance(value, bool))
        _require(not isinstance(value, Integral) or -(2**63) <= int(value) < 2**64, "a number of 64 bits")
        _require(may_be_nan or (value == value and (may_be_infinite or abs(value) != math.inf)))
        return value

    return _Kind(words, admit)


def _is_sequence(value: Any) -> bool:
    if isinstance(value, str | bytes | Mapping | type):
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ()


def _is_iterable(value: Any) -> bool:
    return not isinstance(value, str | bytes | type) and (hasattr(value, "__iter__") or _is_sequence(value))


def _collection(words: str, belongs: Callable[[Any], bool], parts: Iterable[Any], length: int = 0) -> _Kind:
    """Return the kind of a collection whose elements (of a mapping: keys and values) are as annotated."""
    kinds = [_kind(Measured if part is float else part) for part in parts]  # they may be measured
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
                except _RefusedError:
                    raise _RefusedError if length else _RefusedError(words, each) from None
        return value

    return _Kind(words, admit)


def _array(*, converts: bool) -> _Kind:
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
            raise _RefusedError from None
        _require(array.dtype.kind in ("biufc" if converts else "biufcUO" if is_array else "biufcU"))
        return array if converts else value

    return _Kind("an array of numbers", admit)


def _function(arguments: Any) -> _Kind:
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

    return _kind_of(
        "a function" + (f" of {n_arguments} argument{'s' * (n_arguments > 1)}" if n_arguments else ""), holds
    )


def _is_device(value: Any) -> bool:
    torch = sys.modules["torch"]
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and bool(torch.device(value)))
    except RuntimeError:
        return False


def _phrase(name: str) -> str:
    return _PHRASES.get(name, f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}")


def _class(cls: type) -> _Kind:
    phrase = _phrase(cls.__name__)
    if cls.__name__ in _MODELS:
        return _kind_of("an nn.Module or a subject", lambda value: held_module(value) is not None)
    if cls.__name__ == "device":
        return _kind_of(phrase, _is_device)
    if not getattr(cls, "_is_protocol", False):
        return _kind_of(phrase, lambda value: isinstance(value, (str, cls) if phrase == "a path" else cls))
    bases = [base for base in cls.__mro__ if getattr(base, "_is_protocol", False)]
    names = {each for base in bases for each in (*vars(base), *vars(base).get("__annotations__", ()))}
    members = [each for each in names if not each.startswith("_") or each == "__call__"]
    return _kind_of(phrase, lambda value: all(hasattr(value, each) for each in members))


def _later(name: _Later) -> _Kind | None:
    if name.__name__ == "Any":
        return None
    if name.__name__ == "ArrayLike":
        return _array(converts=False)
    if name.__name__ in _MODELS:
        return _class(name)

    def admit(value: Any) -> Any:
        _require((target := name.resolved()) is not _ABSENT)
        kind = _kind(target)
        return value if kind is None else kind.admit(value)

    return _Kind(_phrase(name.__name__), admit)


#: Phrase of a member of a union -> those that it includes.
_INCLUDED = {"a path": ("text",), "a torch.device": ("text",), "an nn.Module or a subject": ("a torch.nn.Module",)}


def _union(members: Iterable[Any], default: Any) -> _Kind | None:
    kinds: dict[str, _Kind] = {}
    for member in members:
        if (kind := _kind(member, default)) is None:
            return None
        kinds[kind.phrase] = kind
    for included in [each for phrase in kinds for each in _INCLUDED.get(phrase, ())]:
        kinds.pop(included, None)
    named = [kind for phrase, kind in kinds.items() if phrase != "None"]  # a value that is refused is not None

    def admit(value: Any) -> Any:
        error: Exception = _RefusedError()
        for kind in kinds.values():
            try:
                return kind.admit(value)
            except (_RefusedError, AnatomyError) as refused:
                error = refused if named == [kind] else error
        raise error

    *others, last = [kind.phrase for kind in named or kinds.values()]
    return _Kind(f"{', '.join(others)} or {last}" if others else (named or [*kinds.values()])[0].expected, admit)


def _kind(annotation: Any, default: Any = None, limits: Sequence[Range] = ()) -> _Kind | None:
    """Return the kind of an annotation; None if it admits everything."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind = _kind(parts[0], default, [*limits, *(each for each in parts[1:] if isinstance(each, Range))])
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
    return _Kind(values or f"{kind.phrase} {words}", admit)


def _bare_kind(annotation: Any, origin: Any, parts: Any, default: Any, limits: Sequence[Range]) -> _Kind | None:
    if isinstance(annotation, _Later):
        return _later(annotation)
    if annotation is getattr(sys.modules.get("numpy.typing"), "ArrayLike", _ABSENT):
        return _array(converts=False)
    if origin in (Union, types.UnionType):
        return _union(parts, default)
    if annotation in (None, types.NoneType):
        return _kind_of("None", lambda value: value is None)
    if annotation is bool:
        return _kind_of((True, False), lambda value: isinstance(value, bool), _plain)
    if annotation is int:
        return _number(Integral, "an integer", may_be_nan=False, may_be_infinite=True)
    if annotation is float:
        may_be_nan = MAY_BE_NAN in limits
        may_be_infinite = may_be_nan or MAY_BE_INFINITE in limits or not limits or default == math.inf
        words = "a number" if may_be_infinite else "a finite number"
        return _number(Real, words, may_be_nan=may_be_nan, may_be_infinite=may_be_infinite)
    if origin is Literal:
        return _kind_of(parts, lambda value: (type(value), value) in [(type(each), each) for each in parts])
    base = origin or annotation
    if not isinstance(base, type) or base in (Any, object):
        return _kind(annotation.__bound__) if isinstance(annotation, TypeVar) and annotation.__bound__ else None
    if base is getattr(sys.modules.get("numpy"), "ndarray", _ABSENT):
        return _array(converts=True)
    if base is type:
        return _kind_of("a class", lambda value: isinstance(value, type))
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


class _Door:
    """The check of the calls of one function."""

    def __init__(
        self, function: Callable[..., Any], title: str, owner: type | None = None, *, measures: bool = False
    ) -> None:
        self.function, self.title = function, title
        self.signature = inspect.signature(function)
        #: Name of the property that the function sets, if it does.
        self.sets = title if title == function.__name__ and "self" in self.signature.parameters else ""
        self.kinds: dict[str, tuple[_Kind, Any, Any]] = {}
        for parameter in list(self.signature.parameters.values()):
            modules = [base.__module__ for base in owner.__mro__ if parameter.name in _fields(base)] if owner else []
            annotation = _evaluated(parameter.annotation, (modules or [function.__module__])[0])
            kind = _kind(Measured if annotation is float and measures else annotation, parameter.default)
            if parameter.annotation is not parameter.empty and kind is not None:
                self.kinds[parameter.name] = kind, parameter.default, parameter.kind

    def admit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with scalars as plain numbers."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            if self.function.__name__ == "__init__" and args:
                self.title = type(args[0]).__name__
            raise self._misfit(str(error), args, kwargs) from None
        given, changed = bound.arguments, False
        for name, value in given.items():
            if name not in self.kinds:
                continue
            kind, default, place = self.kinds[name]
            if value is default:
                continue
            if place is inspect.Parameter.VAR_POSITIONAL:
                given[name] = tuple(self.admitted(name, kind, each) for each in value)
            elif place is inspect.Parameter.VAR_KEYWORD:
                given[name] = {key: self.admitted(key, kind, each) for key, each in value.items()}
            else:
                given[name] = self.admitted(self.sets or name, kind, value)
            changed = changed or given[name] is not value
        return (bound.args, bound.kwargs) if changed else (args, kwargs)

    @staticmethod
    def admitted(name: str, kind: _Kind, value: Any) -> Any:
        try:
            return kind.admit(value)
        except _RefusedError as error:
            value = value if error.part is _ABSENT else error.part
            is_run = kind.phrase == _PHRASES["Dataset"] and type(value).__name__ == "DataTree"
            remedy = 'pass a part, such as run["spectra"].to_dataset()' if is_run else kind.remedy
            raise OptionError.of(name, value, error.phrase or kind.expected, remedy=remedy) from None

    def _misfit(self, problem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallError:
        """Return the exception for a call that does not fit the signature, as `inspect` describes it."""
        known = {name: each for name, each in self.signature.parameters.items() if name not in ("self", "cls")}
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        unknown = [] if takes_any else [name for name in kwargs if name not in known]
        name = unknown[0] if unknown else problem.partition("'")[2].rpartition("'")[0]
        value: Any = kwargs.get(name)
        expected: str | tuple[str, ...] = "passed once"
        if unknown:
            usual = [each for each, others in USUAL_NAMES.items() if name in others.split() and each in known]
            near = [*usual, *difflib.get_close_matches(name, known, n=1)]
            hint = f"use {near[0]}" if near else f"its arguments are {', '.join(known)}"
            hint = f'pass optimizer_options={{"{name}": ...}}' if near[:1] == ["optimizer_options"] else hint
            sentence, expected = f"has no argument {name}; {hint}", tuple(known)
        elif "missing" in problem:
            found = re.search(rf"^\s*{name}: ([^.;,(]+)", self._documentation(), re.MULTILINE)
            meaning = " ".join(found.group(1).split()) if found else ""
            sentence = f"needs the argument {name}{f' ({meaning})' if meaning else ''}"
            expected = meaning or "an argument"
        elif "multiple" in problem:
            sentence = f"received {name} by its position and by its name; pass it once"
        else:
            first = [each for each in known if known[each].kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
            rest = [each for each in known if each not in first]
            n_given = len(args) - (len(self.signature.parameters) - len(known))
            sentence = f"takes {', '.join(first) or 'no argument'} by position, got {n_given} values"
            if rest:
                sentence += f"; name the others, which may be {', '.join(rest[:8])}{', ...' * (len(rest) > 8)}"
            name, value, expected = (rest or first or [""])[0], args[-1], f"at most {len(first)} arguments by position"
        return CallError(f"{self.title} {sentence}.", name=name, value=value, expected=expected)

    def _documentation(self) -> str:
        documentation = self.function.__doc__ or ""
        if self.function.__name__ == "__init__":
            owner = getattr(sys.modules[self.function.__module__], self.title, None)
            documentation = getattr(owner, "__doc__", None) or documentation
        return documentation


def checked(target: Target) -> Target:
    """Check the arguments of a function or of the constructor of a class in each call.

    The annotations are read at the first call. A class is changed in place, with its bases of the same package; its
    public methods are checked in calls from outside of the workbench.
    """
    if isinstance(target, type):
        _check_class(target, always=True)
        return target
    return _checked_function(target, target.__qualname__)


def unpacking(options: Mapping[str, tuple[Any, Any]], *, first: str = "") -> Callable[[Target], Target]:
    """Return a decorator that shows options in the signature of a function in place of its ``**options``.

    Args:
        options: Name -> annotation and default.
        first: The option in place of the function's ``*args``, if it has these.
    """

    def decorate(function: Target) -> Target:
        given = inspect.signature(function)
        own = list(given.parameters.values())
        shown = []
        for name, (annotation, default) in options.items():
            is_first = name == first and any(each.kind is each.VAR_POSITIONAL for each in own)
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_first else inspect.Parameter.KEYWORD_ONLY
            shown.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        named = [each for each in own if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        # After the arguments that must be passed, and before the other ones.
        shown = [each for each in named if each.default is each.empty] + shown
        shown += [each for each in named if each.default is not each.empty]
        shown.sort(key=lambda each: each.kind)
        function.__signature__ = given.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorate


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass, which may be of a subclass that a user has defined without `checked`."""
    cls: Any = type(instance)
    door = _door_of(cls)
    for name, (kind, default, _) in door.kinds.items():
        if (value := getattr(instance, name)) is not default:
            object.__setattr__(instance, name, door.admitted(name, kind, value))


@functools.cache
def _door_of(cls: Any) -> _Door:
    return _Door(inspect.unwrap(cls.__init__), cls.__name__, cls)


def _fields(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass itself; nothing for another class, whose constructor has its own."""
    return vars(cls).get("__annotations__", {}) if "__dataclass_fields__" in vars(cls) else {}


def _checked_function(
    function: Any, title: str, owner: type | None = None, *, always: bool = True, measures: bool = False
) -> Any:
    """Return a function with the door before it; calls from the package pass it only if ``always``.

    With ``measures``, numbers without limits may be NaN or infinite.
    """
    if not inspect.isfunction(function) or hasattr(function, "_door"):
        return function
    doors: list[_Door] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not always and _is_inside(sys._getframe(1).f_globals.get("__name__", "")):
            return function(*args, **kwargs)
        if not doors:
            doors.append(_Door(function, title, owner, measures=measures))
        args, kwargs = doors[0].admit(args, kwargs)
        return function(*args, **kwargs)

    call._door = doors  # type: ignore[attr-defined]
    return call


def _is_inside(module: str) -> bool:
    """Return whether a module is of the package, but not the command line, whose arguments are of users."""
    return module.partition(".")[0] == "workbench" and module != "workbench.cli"


def _check_class(cls: type, *, always: bool) -> None:
    torch = sys.modules.get("torch")
    is_torch = torch is not None and issubclass(cls, torch.nn.Module | torch.optim.Optimizer)
    skipped = ("forward", "step") if is_torch else ()  # torch compiles and wraps them
    if issubclass(cls, BaseException) or getattr(cls, "_is_protocol", False):
        return
    is_result = not always and hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "__post_init__")
    package = cls.__module__.partition(".")[0]
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] != package or getattr(base, "_is_protocol", False):
            continue
        for name, value in list(vars(base).items()):
            if isinstance(value, property) and value.fset and not name.startswith("_"):
                setattr(base, name, value.setter(_checked_function(value.fset, name, always=False)))
                continue
            inner = getattr(value, "__func__", value)
            if not inspect.isfunction(inner) or hasattr(inner, "_door") or name in skipped:
                continue
            if name == "__init__":
                call = _checked_function(inner, base.__name__, base, always=always, measures=is_result)
            elif not name.startswith("_"):
                call = _checked_function(inner, f"{base.__name__}.{name}", always=False, measures=True)
            else:
                continue
            setattr(base, name, call if inner is value else type(value)(call))


def published(value: Any) -> Any:
    """Put the door before an object that becomes public, and return it.

    A function is replaced in its module too, so that it has one identity. Methods also receive what was measured, and a
    dataclass that checks nothing when it is created is a result of the library, whose numbers were measured.
    """
    if not getattr(value, "__module__", "").startswith("workbench"):
        return value
    if isinstance(value, type):
        _check_class(value, always=False)
        return value
    name = getattr(value, "__name__", "")
    call = _checked_function(value, name, always=False)
    home = vars(sys.modules[value.__module__])
    if call is not value and home.get(name) is value:
        home[name] = call
    return call


def publish(module: str) -> Callable[[], list[str]]:
    """Put the door before the names in ``__all__`` of a module that is complete, and return its ``__dir__``."""
    names = vars(sys.modules[module])
    for name in names["__all__"]:
        names[name] = published(names[name])
    return lambda: sorted(names["__all__"])
