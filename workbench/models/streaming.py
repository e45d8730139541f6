"""Streaming of weights from disk: each part of a model is filled while it runs and emptied afterwards."""

from __future__ import annotations

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError
from workbench.io.memory import free_memory
from workbench.models.state_files import LazyTensor, tied_names, unwrapped_names

#: Owner and attribute of a parameter or buffer.
Key = tuple[nn.Module, str]
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class StreamedWeights:
    """Weights of a model on the meta device, read from disk part by part while the model runs.

    A part is a block (a member of a repeated container, including its submodules) or the weights of one other module.
    Hooks fill a part before it runs and return it to the meta device afterwards, so that only the parts that are
    running are in memory. On the CPU, weights that need no conversion are views of the file; outside of blocks such
    views are permanent. ``identity`` is a text that changes when the files do; ``n_reads`` counts how often each part
    was read, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        source: _Renamed | _Converter,
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
        self._shared: dict[Any, list[Tensor]] | None = None
        if self.device.type != "cpu":
            model.register_forward_pre_hook(self._move_inputs, prepend=True, with_kwargs=True)
        for module in [module for module in self._parts if module not in members and not self.n_bytes(module)]:
            self._fill(module)
            del self._parts[module]
        self.n_reads.clear()
        for module in self._parts:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)
            # A model may call a submodule of a block directly, as DiT does with the embedding in its first block. One
            # without tensors needs none, and may be shared with other models, as OpenAI GPT's activation is.
            inside = list(module.modules())[1:] if module in members else []
            for inner in [each for each in inside if [*each.parameters(), *each.buffers()]]:
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

    def hold(self, module: nn.Module) -> AbstractContextManager[None]:
        """Keep a part filled within a context, however often it runs."""
        return self._all_of([module] if module in self._parts else [])

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
        """Run all blocks of a kind with the first one's weights, the only ones read; only the flow of states holds."""
        self._shared = {}
        try:
            yield
        finally:
            self._shared = None

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Fill all parts within a context: with views of the files, or in memory if they fit."""
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
        listed, part = sorted(set(names.values())), self._parts[module]
        shapes = tuple((name.removeprefix(part), self._n_bytes[name]) for name in listed)
        kind = (type(module), shapes)
        if self._shared is None or kind not in self._shared:
            self.n_reads[part] += 1
            found = self._source.read(listed)
            values = [found[name] for name in listed]
            if self._shared is not None:
                self._shared[kind] = values
        else:
            values = self._shared[kind]
        value_of = dict(zip(listed, values, strict=True))
        filled = []
        for (owner, name), weight_name in names.items():
            table: Any = owner._parameters if name in owner._parameters else owner._buffers
            filled.append((owner, name, table[name]))
            value = value_of[weight_name].to(self.device)
            # requires_grad is kept, because it decides between kernels with different rounding.
            is_parameter, requires_grad = table is owner._parameters, table[name].requires_grad
            table[name] = nn.Parameter(value, requires_grad=requires_grad) if is_parameter else value
        return filled


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
    """Raise CheckpointError if the weights of a model are on the meta device."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CheckpointError(
            f"{what} needs all weights of {type(model).__name__} in memory, but they stay on disk; open it with "
            "open_checkpoint(..., streaming=False)."
        )


def _parts_of(model: nn.Module) -> tuple[dict[nn.Module, list[Key]], set[nn.Module]]:
    """Return the modules that are filled while they run with their weights, and the container members among them."""
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


@dataclass(frozen=True)
class StreamingChoice:
    """Choice of whether the weights of a checkpoint stay on disk, and on which device the model runs."""

    streaming: bool | str  # True, False, or "auto" to stream weights that need more than half of the free memory
    device: torch.device | None  # device on which the model runs; None to leave it where it is

    @classmethod
    def of(cls, streaming: bool | str, device: torch.device | str | None) -> StreamingChoice:
        """Create the choice from the arguments of `open_checkpoint`."""
        if streaming is not True and streaming is not False and streaming != "auto":
            raise CheckpointError.of("streaming", streaming, (True, False, "auto"))
        if device is None:
            return cls(streaming, None)
        try:
            place = torch.device(device)
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise CheckpointError.of("device", str(device), "an available device", remedy="pass 'cpu'") from error
        return cls(streaming, place)

    def is_streamed(self, n_bytes: int, *, why_not: str = "", is_strict: bool = True) -> bool:
        """Return whether weights stay on disk, or raise CheckpointError if they should but cannot, for ``why_not``."""
        why_not = why_not or ("" if is_strict else "with strict=False, missing weights are initialized in memory")
        if self.streaming is True and why_not:
            raise CheckpointError(
                f"This checkpoint cannot be streamed: {why_not}; open it with wb.open_checkpoint(..., streaming=False)."
            )
        if self.streaming == "auto":
            return not why_not and n_bytes > free_memory(self.device or "cpu") / 2
        return bool(self.streaming)

    def placed(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, if there is one, and return it."""
        return model if self.device is None else model.to(self.device)


def stream_pretrained(
    model: nn.Module, state: Mapping[str, LazyTensor], path: Path, device: torch.device | str
) -> StreamedWeights:
    """Return the streamed weights of a transformers model on the meta device, converted as transformers does."""
    _fill_computed_buffers(model, state)
    return _streamed(model, _Converter(model, state, set(weight_names(model).values())), path, device)


def stream_module(
    model: nn.Module, state: Mapping[str, LazyTensor], path: Path, device: torch.device | str
) -> StreamedWeights:
    """Move a model to the meta device and return its streamed weights; parameters without a tensor are not changed."""
    empty: dict[int, Tensor] = {}
    sources = dict(zip(state, state, strict=True))
    alias = {id(tensor): name for name, tensor in _named_tensors(model) if name in state}
    for prefix, module in model.named_modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or id(tensor) not in alias:
                    continue
                meta = tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                meta = nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta
                sources.setdefault(f"{prefix}.{name}" if prefix else name, alias[id(tensor)])
                table[name] = empty.setdefault(id(tensor), meta)
    dtypes = {name: tensor.dtype for name, tensor in _named_tensors(model)}
    return _streamed(model, _Renamed(state, sources, dtypes), path, device)


@dataclass(frozen=True)
class _Renamed:
    """Weights that equal tensors of a checkpoint, under the names and in the number formats of the model."""

    state: Mapping[str, LazyTensor]
    sources: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read weights in the number format of the model."""
        return {name: self.state[self.sources[name]].read().to(self.dtypes[name]) for name in names}

    def is_view(self, name: str) -> bool:
        """Return whether a weight is a view of its file, which needs no memory."""
        tensor = self.state.get(self.sources.get(name, ""))
        return tensor is not None and tensor.is_view and tensor.dtype == self.dtypes[name]


def _streamed(
    model: nn.Module, source: _Renamed | _Converter, path: Path, device: torch.device | str
) -> StreamedWeights:
    tensors: dict[str, Any] = dict(_named_tensors(model))
    n_bytes = {n: tensors[n].numel() * tensors[n].element_size() for n in set(weight_names(model).values())}
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    identity = "; ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    for module in model.modules():  # tensors in memory move to the device on which the model will run
        own: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in own:
            for name, tensor in table.items():
                if tensor is not None and not tensor.is_meta and tensor.device.type != torch.device(device).type:
                    moved = tensor.to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(moved, requires_grad=tensor.requires_grad) if is_parameter else moved
    return StreamedWeights(model, source, n_bytes, identity=identity, device=device)


def _named_tensors(model: nn.Module) -> list[tuple[str, Any]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _fill_computed_buffers(model: nn.Module, state: Mapping[str, LazyTensor]) -> None:
    """Fill buffers that are computed and not loaded, such as rotary frequencies and position indices."""
    from accelerate import init_empty_weights
    from transformers.modeling_utils import local_torch_dtype

    kept = {name.rpartition(".")[2] for name in state}
    config: Any = model.config
    with local_torch_dtype(config.dtype or torch.float32), init_empty_weights(include_buffers=False):
        other = type(model)(copy.deepcopy(config))
    computed = dict(other.named_buffers())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            is_loaded = name in kept and name not in module._non_persistent_buffers_set
            if buffer is not None and buffer.is_meta and full in computed and not is_loaded:
                module._buffers[name] = computed[full]


class _Converter:
    """Weights of a transformers model, computed from the tensors of its checkpoint by the rules of transformers."""

    def __init__(self, model: Any, state: Mapping[str, LazyTensor], needed: set[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        self._model, self._state = model, state
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        own, prefix = model.state_dict(), model.base_model_prefix
        self._dtypes = {name: tensor.dtype for name, tensor in own.items()}
        self._plain: dict[str, str] = {}
        self._groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        plain = unwrapped_names(state)
        for source in sorted(state, key=lambda name: dot_natural_key(plain[name])):
            target, pattern = rename_source_key(plain[source], renamings, converters, prefix, own)
            if target not in own and plain[source] in own:
                target, pattern = rename_source_key(plain[source], [], [], prefix, own)
            if target in own and pattern is not None:
                self._groups[target].append((source, pattern))
            elif target in own:
                self._plain[target] = source
        for name, first in tied_names(model.state_dict(keep_vars=True)).items():
            if name in self._plain and first in needed:
                self._plain.setdefault(first, self._plain[name])
        self._renamed = _Renamed(state, self._plain, self._dtypes)
        # Which weights come from which group of tensors is found by converting tensors without values.
        self._group_of: dict[str, str] = {}
        for group in self._groups:
            empty = self._converted(group, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            self._group_of |= dict.fromkeys(empty, group)
        if lost := needed - {*self._plain, *self._group_of}:
            raise CheckpointError(
                f"{type(model).__name__} cannot be streamed, because it is unknown how {min(lost)} is computed from "
                "the checkpoint; open it with wb.open_checkpoint(..., streaming=False)."
            )

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read or compute weights in the number format of the model."""
        converted: dict[str, Tensor] = {}
        for name in names:
            if name not in self._plain and name not in converted:
                converted |= self._converted(self._group_of[name], lambda tensor: tensor.read())
        plain = self._renamed.read([name for name in names if name in self._plain])
        return {name: plain[name] if name in plain else converted[name] for name in names}

    def is_view(self, name: str) -> bool:
        """Return whether a weight is a view of its file, which needs no memory."""
        return self._renamed.is_view(name)

    def _converted(self, group: str, read: Callable[[LazyTensor], Tensor]) -> dict[str, Tensor]:
        """Compute the weights of a group of tensors."""
        rule = copy.deepcopy(self._converter_of[self._groups[group][0][1]])
        dtype = self._dtypes[group]
        for source, pattern in self._groups[group]:
            load: Any = functools.partial(lambda name: read(self._state[name]).to(dtype), source)
            rule.add_tensor(group, source, pattern, load)
        weights = rule.convert(group, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in weights.items()}
