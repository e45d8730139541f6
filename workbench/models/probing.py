"""Run a foreign model once and leave no trace: hooks, modes, random state, weights and buffers end as they began."""

from __future__ import annotations

import inspect
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.errors import SnapshotError, WorkbenchError
from workbench.models.families import RUN_OVERRIDES
from workbench.models.refused_inputs import reason_for
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.models.subject import Subject

#: A hook as `watch` attaches it: the module, the hook, and whether it runs before the module.
HookRequest = tuple[nn.Module, Callable[..., Any], bool]


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with whatever a user has at hand.

    Args:
        model: Any module.
        inputs: A tensor, passed first (an encoder-decoder model that would miss its decoder's tokens gets the same
            tokens there, or its start token); a mapping, passed as keywords; or a tuple or list, passed by position.
            A model that knows no ``input_ids`` gets them first, without a mask that only marks padding at the end.

    Returns:
        The model's output.

    Raises:
        SnapshotError: If a model that takes tokens alone is given a mask that hides more than the end.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs) if _takes(model, inputs) else model(_tokens_alone(model, inputs))
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs, **_decoder_tokens(model, inputs))


def _takes(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the inputs may be passed by keyword; only for token ids is there another way."""
    known = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return takes_any or "input_ids" not in inputs or "input_ids" in known


def _tokens_alone(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    mask = inputs.get("attention_mask")
    # What follows a token changes nothing in a causal model; what hides in front of it does.
    if mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise SnapshotError(
            f"{type(model).__name__} takes tokens without a mask, but this batch is padded in front of tokens; "
            "pad it at the end."
        )
    return inputs["input_ids"]


def _decoder_tokens(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return {}
    if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        return {}
    if not inputs.is_floating_point():
        return {"decoder_input_ids": inputs}
    start = getattr(config, "decoder_start_token_id", None) or 0
    return {"decoder_input_ids": torch.full((inputs.shape[0], 1), start, device=inputs.device)}


def run_foreign(model: nn.Module, inputs: Any) -> Any:
    """`call_model` on inputs that the model may refuse: what it raises becomes one sentence.

    Raises:
        SnapshotError: If the model cannot run on the inputs; the model's own error is its cause.
    """
    try:
        return call_model(model, inputs)
    except WorkbenchError:
        raise
    except Exception as error:
        raise SnapshotError(reason_for(model, inputs, error)) from error


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: the device of its parameters, or where those that are offloaded are sent to."""
    parameters = (parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    if (device := next(parameters, None)) is not None:
        return device
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    place = next((place for place in places if place is not None), None)
    return torch.device("cpu" if place is None else place)


def on_device_of(model: nn.Module, batch: Any) -> Any:
    """The batch where the model takes its inputs."""
    device = device_of(model)
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return type(batch)(on_device_of(model, item) for item in batch)
    if hasattr(batch, "items"):
        return {name: on_device_of(model, item) for name, item in batch.items()}
    return batch


def unwrap(model: Subject | nn.Module) -> nn.Module:
    """The module of a subject, out of ``torch.compile``: compiled code ignores hooks that come later.

    Raises:
        AnatomyError: As `module_of`.
    """
    module = module_of(model)
    return getattr(module, "_orig_mod", module)


def as_written() -> AbstractContextManager:
    """Modules run as they were written: compiled code ignores hooks that come later."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run forwards in eval mode without gradients; afterwards the model and all random states are as before.

    Parameters and buffers that a forward writes to are copied just before the first write (some models rescale their
    weights in place on the first call in eval mode), plain attributes and replaced buffers are put back.

    Args:
        model: The module that will run; its existing hooks stay and run.
    """
    with ExitStack() as stack:
        stack.enter_context(as_written())
        stack.enter_context(_restored_random_state())
        stack.enter_context(_restored_attributes(model))
        stack.enter_context(_config_overrides(model))
        stack.enter_context(_without_fast_path())
        stack.enter_context(torch.no_grad())
        stack.enter_context(_WriteGuard(model))
        for module in model.modules():
            module.training = False
        yield


@contextmanager
def watch(requests: Iterable[HookRequest]) -> Iterator[None]:
    """Attach hooks, and remove them whatever happens.

    Args:
        requests: Module, hook, and True for a hook that runs before the module. A hook before gets (module, args,
            kwargs), one after gets (module, args, kwargs, output). What it returns replaces what flows through the
            model, unless it is None.
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
def _restored_random_state() -> Iterator[None]:
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002 (the legacy state is the global one)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)


#: Tables of nn.Module that hold children, weights and hooks, not plain attributes.
_TABLES = frozenset(nn.Module().__dict__) - {"training"}
#: Those of them that a forward may add to, and that are put back: transformers, for one, adds hooks in the first call
#: that captures hidden states, and remembers in a plain attribute that it has.
_RESTORED = tuple(name for name in sorted(_TABLES) if "hooks" in name or name in ("_buffers", "_modules"))


@contextmanager
def _restored_attributes(model: nn.Module) -> Iterator[None]:
    """Put back training flags, plain attributes, hooks, children and the identity of buffers."""
    before = [
        (module, _plain_attributes(module), {name: dict(module.__dict__[name]) for name in _tables(module)})
        for module in model.modules()
    ]
    contents = _Contents()
    for _, attributes, _ in before:
        contents.remember(attributes)
    try:
        yield
    finally:
        contents.put_back()
        for module, attributes, tables in before:
            for name in _plain_attributes(module).keys() - attributes.keys():
                module.__dict__.pop(name)
            module.__dict__.update(attributes)
            for name, table in tables.items():
                now = module.__dict__[name]
                if now.keys() != table.keys() or any(now[key] is not table[key] for key in table):
                    now.clear()
                    now.update(table)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _TABLES}


def _tables(module: nn.Module) -> list[str]:
    return [name for name in _RESTORED if isinstance(module.__dict__.get(name), dict)]


class _Contents:
    """Lists, dictionaries and sets among attributes, at any depth, as they were: a forward may write into them."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}

    def remember(self, attributes: Mapping[str, Any]) -> None:
        """Note what the containers among the values hold."""
        waiting = list(attributes.values())
        while waiting:
            value = waiting.pop()
            if type(value) not in (list, dict, set, deque) or id(value) in self._copies:
                continue
            self._copies[id(value)] = (value, value.copy())
            waiting += value.values() if isinstance(value, dict) else value

    def put_back(self) -> None:
        """Write it into them again, where it has changed."""
        for value, copy in self._copies.values():
            if isinstance(value, dict):
                is_same = value.keys() == copy.keys() and all(value[key] is copy[key] for key in copy)
            else:
                is_same = len(value) == len(copy) and all(a is b for a, b in zip(value, copy, strict=True))
            if not is_same:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(copy)


@contextmanager
def _config_overrides(model: nn.Module) -> Iterator[None]:
    """Set the options that would keep a family from being read, and put them back."""
    undo = []
    for config in {id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}.values():
        for name, value in RUN_OVERRIDES.get(getattr(config, "model_type", None), {}).items():
            if hasattr(config, name):
                undo.append((config, name, getattr(config, name)))
                setattr(config, name, value)
    try:
        yield
    finally:
        for config, name, value in undo:
            setattr(config, name, value)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Keep nn.TransformerEncoder from its fused kernel, inside which no hook and no projection can be seen."""
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


class _WriteGuard(TorchDispatchMode):
    """Copy a parameter or buffer just before an operation writes to it; write the copies back on leaving."""

    #: flex_attention is an operator of operators, which torch otherwise refuses to run in a dispatch mode.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners: dict[int, list[Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for tensor in [*model.parameters(), *model.buffers()]:
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
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        self._copies.clear()


def storage_pointer(tensor: Any) -> int | None:
    """Address of a tensor's memory; None for what is no tensor or has none (meta tensors, empty ones)."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # tensor subclasses without memory of their own
        return None
