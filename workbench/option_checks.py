"""The door of public calls: each argument is checked against its annotation before any work begins.

`published` puts the door before every public name for calls from outside of the package, `checked` before a function or
a constructor for all calls. `option_kinds` says what an annotation admits.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from workbench.errors import CallError, OptionError
from workbench.option_kinds import ABSENT, PHRASES, ArgumentKind, Measured, RefusedError, evaluated, kind_of

Target = TypeVar("Target", bound=Callable[..., Any])

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


class _Door:
    """The check of the calls of one function."""

    def __init__(
        self, function: Callable[..., Any], title: str, owner: type | None = None, *, measures: bool = False
    ) -> None:
        self.function, self.title = function, title
        self.signature = inspect.signature(function)
        #: Name of the property that the function sets, if it does.
        self.sets = title if title == function.__name__ and "self" in self.signature.parameters else ""
        self.kinds: dict[str, tuple[ArgumentKind, Any, Any]] = {}
        for parameter in list(self.signature.parameters.values()):
            modules = [base.__module__ for base in owner.__mro__ if parameter.name in _fields(base)] if owner else []
            annotation = evaluated(parameter.annotation, (modules or [function.__module__])[0])
            kind = kind_of(Measured if annotation is float and measures else annotation, parameter.default)
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
    def admitted(name: str, kind: ArgumentKind, value: Any) -> Any:
        try:
            return kind.admit(value)
        except RefusedError as error:
            value = value if error.part is ABSENT else error.part
            is_run = kind.phrase == PHRASES["Dataset"] and type(value).__name__ == "DataTree"
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
    """Return a decorator that shows options (annotation, default) for ``**options``, and ``first`` for ``*args``."""

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
    """Return a function with the door before it, for internal calls only if ``always``; ``measures`` may be NaN."""
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
