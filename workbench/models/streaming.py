"""Streaming of weights from disk: each part of a model is filled while it runs and emptied afterwards."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.io.memory import free_memory

if TYPE_CHECKING:
    from torch import Tensor

#: Owner and attribute of a parameter or buffer.
Key = tuple[nn.Module, str]
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class WeightSource(Protocol):
    """Source of a model's weights by their names in the model."""

    def read(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Read weights in the number format of the model."""

    def is_view(self, name: str) -> bool:
        """Return whether a weight is a view of its file on the CPU, which needs no memory."""


class StreamedWeights:
    """Weights of a model on the meta device, read from disk part by part while the model runs.

    A part is a block (a member of a repeated container, including its submodules) or the weights of one other module.
    Hooks fill a part before it runs and return it to the meta device afterwards, so that only the parts that are
    running are in memory. On the CPU, weights that need no conversion are views of the file; outside of blocks such
    views are permanent.

    Args:
        model: Model with its parameters on the meta device.
        source: Source of the weights, by the names of `weight_names`.
        n_bytes: Bytes of each weight in memory, by name.
        identity: Text that changes when the files do.
        device: Device on which the model runs.

    Attributes:
        device: Device on which the model runs.
        identity: Text that changes when the files do.
        n_reads: Number of times that each part was read, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        source: WeightSource,
        n_bytes: Mapping[str, int],
        *,
        identity: str,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device, self.identity = torch.device(device), identity
        self.n_reads: Counter[str] = Counter()
        self._source, self._n_bytes = source, dict(n_bytes)
        self._names = weight_names(model)
        names = {module: name for name, module in model.named_modules()}
        self._tensors, members = _parts_of(model)
        self._parts = {module: names[module] for module in self._tensors}
        self._running: Counter[nn.Module] = Counter()
        self._filled: dict[nn.Module, list[tuple[nn.Module, str, Any]]] = {}
        self._skipped: set[nn.Module] = set()
        self._shared: dict[Any, Mapping[str, Tensor]] | None = None
        if self.device.type != "cpu":
            model.register_forward_pre_hook(self._move_inputs, prepend=True, with_kwargs=True)
        for module in [module for module in self._parts if module not in members and not self.n_bytes(module)]:
            self._fill(module)
            del self._parts[module]
        self.n_reads.clear()
        for module in self._parts:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)
            # A model may call a submodule of a block directly, as DiT does with the embedding in its first block.
            for inner in list(module.modules())[1:] if module in members else ():
                inner.register_forward_pre_hook(lambda *_, block=module: self._enter(block))
                inner.register_forward_hook(lambda *_, block=module: self._leave(block), always_call=True)

    def n_bytes(self, module: nn.Module) -> int:
        """Return the bytes of memory that the weights of a part need while it runs; views of the files need none."""
        names = {self._names[key] for key in self._tensors.get(module) or _tensors_in(module)}
        is_here = self.device.type == "cpu"
        return sum(self._n_bytes[name] for name in names if not (is_here and self._source.is_view(name)))

    def other_parts(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the parts that neither are, nor contain, nor are inside one of the given modules."""
        blocks = list(dict.fromkeys(modules))
        inside = {part for block in blocks for part in block.modules()}
        return [part for part in self._parts if part not in inside and not any(m in blocks for m in part.modules())]

    @contextmanager
    def hold(self, module: nn.Module) -> Iterator[None]:
        """Keep a part filled within a context, however often it runs."""
        with self._all_of([module] if module in self._parts else []):
            yield

    @contextmanager
    def emptied_after(self) -> Iterator[None]:
        """Restore the state of all parts after a context, including parts in which a pass was interrupted."""
        before = self._running.copy()
        try:
            yield
        finally:
            for module in list(self._running):
                while self._running[module] > before[module]:
                    self._leave(module)

    @contextmanager
    def sharing_weights(self) -> Iterator[None]:
        """Run all blocks of one kind with the weights of the first of them within a context.

        The outputs of the model are then meaningless, but the flow of states between modules is the same, and only one
        block has to be read.
        """
        self._shared = {}
        try:
            yield
        finally:
            self._shared = None

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Fill all parts within a context: with views of the files, or in memory if they fit.

        Raises:
            CheckpointError: If the weights need more memory than is free.
        """
        parts = list(self._parts)
        needed = sum(map(self.n_bytes, parts))
        free = free_memory(self.device)
        if needed > free:
            raise CheckpointError(
                f"This operation needs all weights at once, {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; "
                "open the checkpoint on the CPU with dtype='auto', so that weights stay in the files, or use a larger "
                "machine."
            )
        with self._all_of(parts):
            yield

    @contextmanager
    def _all_of(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        entered = []
        try:
            for part in parts:
                self._enter(part)
                entered.append(part)
            yield
        finally:
            for part in entered:
                self._leave(part)

    @contextmanager
    def without(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Leave some parts empty within a context; their callers must not run them."""
        self._skipped = set(modules)
        try:
            yield
        finally:
            self._skipped = set()

    def _move_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        from torch.utils._pytree import tree_map

        return tree_map(
            lambda value: value.to(self.device) if isinstance(value, torch.Tensor) else value, (args, kwargs)
        )

    def _enter(self, module: nn.Module, args: Any = None) -> None:
        self._running[module] += 1
        if self._running[module] == 1:
            self._filled[module] = [] if module in self._skipped else self._fill(module)

    def _leave(self, module: nn.Module, args: Any = None, output: Any = None) -> None:
        self._running[module] -= 1
        if self._running[module] <= 0:
            self._running[module] = 0
            for owner, name, empty in self._filled.pop(module, ()):
                table = owner._parameters if name in owner._parameters else owner._buffers
                table[name] = empty

    def _fill(self, module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
        names = {key: self._names[key] for key in self._tensors[module]}
        values = self._values(module, sorted(set(names.values())))
        filled = []
        for (owner, name), weight_name in names.items():
            table: Any = owner._parameters if name in owner._parameters else owner._buffers
            filled.append((owner, name, table[name]))
            value = values[weight_name].to(self.device)
            # requires_grad is kept, because it decides between kernels with different rounding.
            is_parameter, requires_grad = table is owner._parameters, table[name].requires_grad
            table[name] = nn.Parameter(value, requires_grad=requires_grad) if is_parameter else value
        return filled

    def _values(self, module: nn.Module, names: list[str]) -> Mapping[str, Tensor]:
        prefix = self._parts[module]
        if self._shared is not None:
            local = [name.removeprefix(prefix) for name in names]
            shapes = tuple(self._n_bytes[name] for name in names)
            kind = (type(module), tuple(local), shapes)
            if kind not in self._shared:
                self._shared[kind] = dict(zip(local, self._read_all(prefix, names).values(), strict=True))
            return dict(zip(names, self._shared[kind].values(), strict=True))
        return self._read_all(prefix, names)

    def _read_all(self, part: str, names: list[str]) -> dict[str, Tensor]:
        self.n_reads[part] += 1
        found = self._source.read(names)
        return {name: found[name] for name in names}


P = ParamSpec("P")
R = TypeVar("R")


def with_weights(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that all weights are filled while it runs if its first argument is a streamed subject."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        weights = getattr(args[0], "streamed", None) if args else None
        with weights.filled() if isinstance(weights, StreamedWeights) else nullcontext():
            return function(*args, **kwargs)

    return wrapped


def weight_names(model: nn.Module) -> dict[Key, str]:
    """Return (owner, attribute) -> name of every parameter and buffer on the meta device; tied ones have one name."""
    names: dict[Key, str] = {}
    first: dict[int, str] = {}
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    names[module, name] = first.setdefault(id(tensor), f"{path}.{name}" if path else name)
    return names


def require_in_memory(model: nn.Module, what: str) -> None:
    """Raise CheckpointError if the weights of a model are on the meta device.

    Args:
        model: Model.
        what: What needs the weights, as the subject of a sentence, such as "Training".
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(
            f"{what} needs all weights of {type(model).__name__} in memory, but they stay on disk; open it with "
            "open_checkpoint(..., streaming=False)."
        )


def _parts_of(model: nn.Module) -> tuple[dict[nn.Module, list[Key]], set[nn.Module]]:
    """Return the modules that are filled while they run, each with its weights, and the container members among them.

    Members of a container are filled together with their submodules; other modules are filled with their own weights.
    Weights of a container itself, which is never called, belong to the module that holds it.
    """
    parts: dict[nn.Module, list[Key]] = {}
    members: set[nn.Module] = set()

    def visit(module: nn.Module, holder: nn.Module) -> None:
        parts.setdefault(holder, []).extend(_own_tensors(module))
        for child in module.children():
            if isinstance(child, _NEVER_CALLED):
                visit(child, holder)
            elif isinstance(module, _CONTAINERS):
                members.add(child)
                parts.setdefault(child, []).extend(_tensors_in(child))
            else:
                visit(child, child)

    visit(model, model)
    return {module: list(dict.fromkeys(found)) for module, found in parts.items() if found}, members


def _tensors_in(module: nn.Module) -> list[Key]:
    return [key for part in module.modules() for key in _own_tensors(part)]


def _own_tensors(module: nn.Module) -> list[Key]:
    """Return owner and attribute of a module's parameters and buffers on the meta device."""
    tables: tuple[Any, ...] = (module._parameters, module._buffers)
    return [
        (module, name) for table in tables for name, tensor in table.items() if tensor is not None and tensor.is_meta
    ]
