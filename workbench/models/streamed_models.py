"""Models on the meta device with readers of their weights: of transformers, of the zoo, and of the user's own."""

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
from workbench.models.state_fit import plain_names, tied_names
from workbench.models.streaming import StreamedWeights, WeightSource, weight_names

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from workbench.models.lazy_tensor import LazyTensor


def files_identity(path: Path) -> str:
    """Name, length and time of change of a file, or of all files of a folder, as one text."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    return "; ".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)


def stream_pretrained(
    model: nn.Module, state: Mapping[str, LazyTensor], *, identity: str, device: torch.device | str = "cpu"
) -> StreamedWeights:
    """The weights of a transformers model on the meta device, read from the tensors of its checkpoint.

    Tensors are renamed, merged and split as transformers does when it loads the checkpoint.

    Args:
        model: Model as ``from_pretrained`` makes it on the meta device.
        state: Tensors of the checkpoint by their names in the files.
        identity: Text that changes when the files do.
        device: Device on which the model will run.

    Raises:
        CheckpointError: If a weight of the model is made from no tensor of the checkpoint.
    """
    _fill_computed_buffers(model, state)
    names = weight_names(model)
    return _streamed(model, _Converter(model, state, set(names.values())), names, identity, device)


def stream_plain(
    model: nn.Module, state: Mapping[str, LazyTensor], *, identity: str, device: torch.device | str = "cpu"
) -> StreamedWeights:
    """The weights of any model, which go to the meta device and are read from tensors of the same names.

    Args:
        model: Model that fits the tensors; what the checkpoint does not hold stays as it is.
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
    """Weights that are the tensors of a checkpoint, under names and in dtypes of the model."""

    state: Mapping[str, LazyTensor]
    sources: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Weights in the dtype that the model computes in."""
        return {name: self.state[self.sources[name]].read().to(self.dtypes[name]) for name in names}

    def is_view(self, name: str) -> bool:
        """Whether reading a weight takes no memory."""
        tensor = self.state.get(self.sources.get(name, ""))
        return tensor is not None and tensor.is_view and tensor.dtype == self.dtypes[name]


def _streamed(
    model: nn.Module, source: WeightSource, names: Mapping[Any, str], identity: str, device: torch.device | str
) -> StreamedWeights:
    tensors: dict[str, Any] = dict(_named_tensors(model))
    n_bytes = {name: tensors[name].numel() * tensors[name].element_size() for name in set(names.values())}
    for module in model.modules():  # what is in memory already runs where the weights will be
        own: list[dict[str, Any]] = [module._parameters, module._buffers]
        for table in own:
            for name, tensor in table.items():
                if tensor is not None and not tensor.is_meta and tensor.device.type != torch.device(device).type:
                    moved = tensor.to(device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(moved, requires_grad=tensor.requires_grad) if is_parameter else moved
    return StreamedWeights(model, source, n_bytes, identity=identity, device=device)


def _named_tensors(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _fill_computed_buffers(model: nn.Module, state: Mapping[str, LazyTensor]) -> None:
    """Give buffers that are computed, not loaded, their values: rotary frequencies, position indices."""
    from accelerate import init_empty_weights
    from transformers.modeling_utils import local_torch_dtype

    kept = {name.rpartition(".")[2] for name in state}
    config: Any = model.config
    with local_torch_dtype(config.dtype or torch.float32), init_empty_weights(include_buffers=False):
        twin = type(model)(copy.deepcopy(config))
    computed = dict(twin.named_buffers())
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            is_loaded = name in kept and name not in module._non_persistent_buffers_set
            if buffer is not None and buffer.is_meta and full in computed and not is_loaded:
                module._buffers[name] = computed[full]


class _Converter:
    """Weights of a transformers model from the tensors of its checkpoint, by transformers' own rules.

    Args:
        model: Model on the meta device.
        state: Tensors by their names in the files.
        wanted: Names of the weights that will be read.

    Raises:
        CheckpointError: If one of them is made from no tensor.
    """

    def __init__(self, model: Any, state: Mapping[str, LazyTensor], wanted: set[str]) -> None:
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
        plain = plain_names(state)
        for source in sorted(state, key=lambda name: dot_natural_key(plain[name])):
            target, pattern = rename_source_key(plain[source], renamings, converters, prefix, own)
            if target not in own and plain[source] in own:
                target, pattern = rename_source_key(plain[source], [], [], prefix, own)
            if target in own and pattern is not None:
                self._groups[target].append((source, pattern))
            elif target in own:
                self._plain[target] = source
        for name, first in tied_names(model.state_dict(keep_vars=True)).items():
            if name in self._plain and first in wanted:
                self._plain.setdefault(first, self._plain[name])
        self._renamed = _Renamed(state, self._plain, self._dtypes)
        self._group_of = self._targets()
        if lost := wanted - {*self._plain, *self._group_of}:
            raise CheckpointError(
                f"{type(model).__name__} cannot be streamed: how {min(lost)} is made from the checkpoint is not known "
                "here; open it with streaming=False."
            )

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Weights in the dtype that the model computes in."""
        made: dict[str, Tensor] = {}
        for name in names:
            if name not in self._plain and name not in made:
                made |= self._converted(self._group_of[name], lambda tensor: tensor.read())
        plain = self._renamed.read([name for name in names if name in self._plain])
        return {name: plain[name] if name in plain else made[name] for name in names}

    def is_view(self, name: str) -> bool:
        """Whether reading a weight takes no memory."""
        return self._renamed.is_view(name)

    def _targets(self) -> dict[str, str]:
        """Weight -> the group that it is made from; found by converting tensors without values."""
        made: dict[str, str] = {}
        for group in self._groups:
            empty = self._converted(group, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            made |= dict.fromkeys(empty, group)
        return made

    def _converted(self, group: str, read: Callable[[LazyTensor], Tensor]) -> dict[str, Tensor]:
        rule = copy.deepcopy(self._converter_of[self._groups[group][0][1]])
        dtype = self._dtypes[group]
        for source, pattern in self._groups[group]:
            load: Any = functools.partial(lambda name: read(self._state[name]).to(dtype), source)
            rule.add_tensor(group, source, pattern, load)
        made = rule.convert(group, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
