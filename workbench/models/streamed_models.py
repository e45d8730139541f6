"""Streamed weights of models of transformers, of the zoo and of custom models."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.models.state_fit import tied_names, unwrapped_names
from workbench.models.streaming import StreamedWeights, WeightSource, weight_names

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from workbench.models.lazy_tensor import LazyTensor


def files_identity(path: Path) -> str:
    """Return name, length and modification time of a file, or of all files of a folder, as text."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    return "; ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def stream_pretrained(
    model: nn.Module, state: Mapping[str, LazyTensor], *, identity: str, device: torch.device | str = "cpu"
) -> StreamedWeights:
    """Return the streamed weights of a transformers model on the meta device.

    Tensors are renamed, merged and split as transformers does when it loads the checkpoint.

    Args:
        model: Model as ``from_pretrained`` creates it on the meta device.
        state: Tensors of the checkpoint by their names in the files.
        identity: Text that changes when the files do.
        device: Device on which the model will run.

    Raises:
        CheckpointError: If a weight of the model cannot be computed from the tensors of the checkpoint.
    """
    _fill_computed_buffers(model, state)
    names = weight_names(model)
    return _streamed(model, _Converter(model, state, set(names.values())), names, identity, device)


def stream_module(
    model: nn.Module, state: Mapping[str, LazyTensor], *, identity: str, device: torch.device | str = "cpu"
) -> StreamedWeights:
    """Move a model to the meta device and return its streamed weights, read from tensors of the same names.

    Args:
        model: Model that fits the tensors; parameters that the checkpoint lacks are not changed.
        state: Tensors by their names in the model.
        identity: Text that changes when the files do.
        device: Device on which the model will run.
    """
    empty: dict[int, Tensor] = {}
    sources = dict(zip(state, state, strict=True))
    alias = {id(tensor): name for name, tensor in _named_tensors(model) if name in state}
    for path, module in model.named_modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or id(tensor) not in alias:
                    continue
                meta = tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                meta = nn.Parameter(meta, requires_grad=tensor.requires_grad) if is_parameter else meta
                sources.setdefault(f"{path}.{name}" if path else name, alias[id(tensor)])
                table[name] = empty.setdefault(id(tensor), meta)
    dtypes = {name: tensor.dtype for name, tensor in _named_tensors(model)}
    return _streamed(model, _Renamed(state, sources, dtypes), weight_names(model), identity, device)


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
    model: nn.Module, source: WeightSource, names: Mapping[Any, str], identity: str, device: torch.device | str
) -> StreamedWeights:
    tensors: dict[str, Any] = dict(_named_tensors(model))
    n_bytes = {name: tensors[name].numel() * tensors[name].element_size() for name in set(names.values())}
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
    """Weights of a transformers model, computed from the tensors of its checkpoint by the rules of transformers.

    Args:
        model: Model on the meta device.
        state: Tensors by their names in the files.
        needed: Names of the weights that will be read.

    Raises:
        CheckpointError: If one of them cannot be computed from the tensors.
    """

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
        self._group_of = self._targets()
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

    def _targets(self) -> dict[str, str]:
        """Return weight -> group of tensors from which it is computed, by converting tensors without values."""
        targets: dict[str, str] = {}
        for group in self._groups:
            empty = self._converted(group, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            targets |= dict.fromkeys(empty, group)
        return targets

    def _converted(self, group: str, read: Callable[[LazyTensor], Tensor]) -> dict[str, Tensor]:
        """Compute the weights of a group of tensors."""
        rule = copy.deepcopy(self._converter_of[self._groups[group][0][1]])
        dtype = self._dtypes[group]
        for source, pattern in self._groups[group]:
            load: Any = functools.partial(lambda name: read(self._state[name]).to(dtype), source)
            rule.add_tensor(group, source, pattern, load)
        weights = rule.convert(group, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in weights.items()}
