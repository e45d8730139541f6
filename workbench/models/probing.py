"""Forward passes without side effects: hooks, modes, random states, parameters and buffers are restored afterwards."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from itertools import chain, count
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import SnapshotError
from workbench.models.calling import Option, as_written, config_options, configs_of

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
    used: the model cannot be measured then, but its training is unchanged. Tensors that were found are not copied.
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

    def restore(self) -> bool:
        """Restore all that has changed; return whether anything has, or may have."""
        return sum(restore() is not False for restore in reversed(self._restore)) > 0

    def keep_names(self, owner: Any, names: Iterable[str]) -> None:
        """Keep what some names refer to: keys of a dictionary, or attributes of a class or of a variable."""
        get, put = (owner.get, owner.__setitem__) if isinstance(owner, dict) else (partial(getattr, owner), None)
        put = put or partial(setattr, owner)
        before = {name: value for name in names if (value := get(name, _MISSING)) is not _MISSING}
        self._waiting += before.values()
        for name, value in before.items():
            if (held := _held(value)) is not value:
                put(name, held)

        def restore() -> bool:
            changed = [(name, value) for name, value in before.items() if get(name, _MISSING) is not value]
            for name, value in changed:
                put(name, value)
            return bool(changed)

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

        def restore() -> bool:
            now = read()
            flat_now, flat_then = (list(chain(*each)) if is_table else each for each in (now, then))
            has_changed = len(now) != len(then) or any(a is not b for a, b in zip(flat_now, flat_then, strict=True))
            if has_changed:
                value.clear()
                for item in then:  # subclasses, such as a Counter, update differently
                    if is_table:
                        value[item[0]] = item[1]
                    else:
                        (value.add if isinstance(value, set) else value.append)(item)
            return has_changed

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


#: Modules of the workbench that are read as a user's script.
_TRAININGS = ("workbench.course.trainings", "workbench.course.miswirings")


@cache
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to Python, to an installed package or to the workbench, but not to a training."""
    root = str(module).partition(".")[0]
    if root == "__main__" or module in _TRAININGS:
        return False
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root in sys.stdlib_module_names or root == "workbench" or "-packages" in file


#: transformers ``model_type`` -> config options that are set while a model runs to be measured.
RUN_OVERRIDES: dict[str, dict[str, Any]] = {
    # In eval mode RWKV divides weights in place and halves the stream between blocks every `rescale_every` blocks.
    "rwkv": {"rescale_every": 0},
}
#: A hook as `watch` attaches it: the module, the hook, and whether it runs before the module.
HookRequest = tuple[nn.Module, Callable[..., Any], bool]


class Effects:
    """What passes within `undisturbed` have done: whether they have changed, or may have changed, any state."""

    has_changed = False


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Effects]:
    """Run forward passes in eval mode without gradients; restore the model and all random states afterwards.

    Tensors that a forward pass writes to are copied just before the first write (some models rescale their weights in
    place on the first call in eval mode). Attributes, replaced buffers and other state are restored, see `KeptState`.
    Hooks of the model remain active.
    """
    effects = Effects()
    with ExitStack() as stack:
        stack.enter_context(as_written())
        stack.enter_context(_restored_random_state(effects))
        tensors = stack.enter_context(_restored_attributes(model, effects))
        stack.enter_context(config_options(family_options(model)))
        stack.enter_context(_without_fast_path())
        stack.enter_context(torch.no_grad())
        stack.enter_context(_WriteGuard([*model.parameters(), *model.buffers(), *tensors], effects))
        stack.enter_context(eval_mode(model))
        yield effects


class RepeatedPasses:
    """Undisturbed passes of one model in training; once a pass changed nothing, one in a hundred is guarded."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._options = model, family_options(model)
        self._n_passes, self._has_changed = 0, True

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Run one pass as in `undisturbed`."""
        is_guarded = self._has_changed or self._n_passes % 100 == 0
        self._n_passes += 1
        with ExitStack() as stack:
            if is_guarded:
                self._has_changed = True  # also if the pass fails
                effects = stack.enter_context(undisturbed(self.model))
            else:
                kept = eval_mode(self.model), config_options(self._options), _without_fast_path()
                for context in (as_written(), torch.no_grad(), *kept):
                    stack.enter_context(context)
            yield
        if is_guarded:
            self._has_changed = effects.has_changed


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Disable the fused kernel of nn.TransformerEncoder, which bypasses hooks and projections."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Return all modules of a model, those that it holds several times too, in a sixth of the time of `modules()`."""
    parts = [model]
    for part in parts:  # which grows
        if part._modules:
            parts += [each for each in part._modules.values() if each is not None]
    return parts


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode; restore the modes afterwards."""
    training = [module for module in parts_of(model) if module.training]
    _set_modes(training, is_training=False)
    try:
        yield
    finally:
        _set_modes(training, is_training=True)


def _set_modes(modules: Iterable[nn.Module], *, is_training: bool) -> None:
    for module in modules:
        if "training" in vars(module):  # as `nn.Module` sets it, without its search for parameters
            vars(module)["training"] = is_training
        else:
            module.training = is_training


def without_own_hooks(model: nn.Module) -> AbstractContextManager[None]:
    """Leave out the hooks that are defined outside of installed packages, which are meant for the passes of a training.

    Hooks of libraries may be a part of the model, as those that gather its shards or compute its weights.
    """
    return without_hooks(model, lambda origin: not is_library(origin))


@contextmanager
def without_hooks(model: nn.Module, leaves_out: Callable[[str], bool]) -> Iterator[None]:
    """Leave out the hooks of a model that are defined in some modules, given by name."""
    before = []
    for module in model.modules():
        tables: list[dict[int, Any]] = [module.__dict__.get(name) or {} for name in _HOOKS]
        for table in tables:
            if own := [key for key, hook in table.items() if leaves_out(_origin(hook))]:
                before.append((table, dict(table)))
                for key in own:
                    del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            added = {key: hook for key, hook in table.items() if key not in hooks}
            table.clear()
            table.update(hooks | added)


def _origin(hook: Any) -> str:
    """Return the module that defines a hook: a function, a method, or an object that is called."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


@contextmanager
def watch(requests: Iterable[HookRequest]) -> Iterator[None]:
    """Attach hooks, each given as module, hook and whether it runs before the module; always remove them afterwards.

    A hook before the module receives (module, args, kwargs), one after it (module, args, kwargs, output). Unless it is
    None, the value that a hook returns replaces the arguments or the output.
    """
    handles = []
    try:
        for module, hook, is_before in requests:
            register = module.register_forward_pre_hook if is_before else module.register_forward_hook
            handles.append(register(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _restored_random_state(effects: Effects) -> Iterator[None]:
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), _torch_states()  # noqa: NPY002
    try:
        yield
    finally:
        pairs = [pair for name, before in of_torch.items() for pair in zip(before, _torch_states()[name], strict=True)]
        # They are on the host, those of a GPU too.
        are_same = random.getstate() == of_python and all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
        effects.has_changed |= not (are_same and pickle.dumps(np.random.get_state()) == pickle.dumps(of_numpy))  # noqa: NPY002
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch["cpu"][0])
        if of_torch["cuda"]:
            torch.cuda.set_rng_state_all(of_torch["cuda"])
        if of_torch["mps"]:
            torch.mps.set_rng_state(of_torch["mps"][0])


def _torch_states() -> dict[str, list[Tensor]]:
    return {
        "cpu": [torch.get_rng_state()],
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "mps": [torch.mps.get_rng_state()] if torch.backends.mps.is_available() else [],
    }


#: Tables of nn.Module that hold children, parameters and hooks, as opposed to ordinary attributes.
_TABLES = frozenset(nn.Module().__dict__) - {"training"}
#: Tables that a forward pass may add to, and that are restored. transformers, for example, adds hooks in the first call
#: that captures hidden states, and records that in an ordinary attribute.
_RESTORED = tuple(name for name in sorted(_TABLES) if "hooks" in name or name in ("_buffers", "_modules"))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def _restored_attributes(model: nn.Module, effects: Effects) -> Iterator[list[Tensor]]:
    """Restore attributes, hooks, children, buffers and what code refers to; yield tensors whose values are not."""
    before = [
        (
            module,
            _plain_attributes(module),
            {n: dict(t) for n in _RESTORED if isinstance(t := vars(module).get(n), dict)},
        )
        for module in model.modules()
    ]
    kept = KeptState()
    for module, attributes, _ in before:
        kept.keep_names(module.__dict__, attributes)
        kept.follow([type(module)])
    try:
        yield kept.tensors
    finally:
        effects.has_changed |= kept.restore()
        for module, attributes, tables in before:
            for name in _plain_attributes(module).keys() - attributes.keys():
                module.__dict__.pop(name)
                effects.has_changed = True
            for name, table in tables.items():
                now = module.__dict__[name]
                if now.keys() != table.keys() or any(now[key] is not table[key] for key in table):
                    now.clear()
                    now.update(table)
                    effects.has_changed = True


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _TABLES}


def family_options(model: nn.Module) -> list[Option]:
    """Return the config options that must be set for a model of a known family to be measured."""
    return [
        (config, name, value)
        for config in configs_of(model)
        for name, value in RUN_OVERRIDES.get(str(getattr(config, "model_type", "")), {}).items()
        if hasattr(config, name)
    ]


class _WriteGuard(TorchDispatchMode):
    """Mode that copies a tensor just before an operation writes to it, and restores the copies on exit."""

    #: flex_attention is a higher-order operator, which torch otherwise does not run in a dispatch mode.
    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor], effects: Effects) -> None:
        super().__init__()
        self._effects = effects
        self._owners: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            if (pointer := storage_pointer(tensor)) is not None:
                self._owners.setdefault(pointer, []).append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    for tensor in value if isinstance(value, list | tuple) else (value,):
                        self._save(tensor)
        return func(*args, **kwargs)

    def _save(self, tensor: Any) -> None:
        pointer = storage_pointer(tensor)
        for owner in self._owners.pop(pointer, ()) if pointer is not None else ():
            self._copies.append((owner, owner.detach().clone()))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._effects.has_changed |= bool(self._copies)
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        self._copies.clear()


def storage_pointer(tensor: Any) -> int | None:
    """Return the address of a tensor's memory; None for objects other than tensors, meta tensors and empty tensors."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return None
    tensor = getattr(tensor, "_local_tensor", tensor)  # the local shard of a DTensor
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # tensor subclasses without memory of their own
        return None
