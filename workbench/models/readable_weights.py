"""Values of tensors with few transfers to the host, and effective weights: parametrized, or gathered from shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.weight_norm import WeightNorm

from workbench.models.probing import undisturbed, without_hooks

T = TypeVar("T")
#: A measurement that computes on the device first: it yields small tensors once, receives their values as float64
#: arrays, and returns its result, computed on the host.
Measurement = Generator[Sequence[Tensor], list[np.ndarray], T]

#: Number of entries that fit into the cache of a processor, together with a few float64 copies of them.
_PIECE = 2**17


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield flat pieces of tensors of one shape for sums that need copies; on a CPU these cost more than the sums."""
    first = tensors[0]
    are_contiguous = all(type(each) in (Tensor, nn.Parameter) and each.is_contiguous() for each in tensors)
    if first.numel() <= _PIECE or first.device.type != "cpu" or not are_contiguous:
        yield tensors
        return
    yield from zip(*(each.detach().view(-1).split(_PIECE) for each in tensors), strict=True)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device; a copy from the host is asynchronous."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def read_arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Return small real tensors on the host as float64 arrays of their shapes, with one transfer per device."""
    return send_arrays(tensors)()


def send_arrays(tensors: Sequence[Tensor], *, waits: bool = True) -> Callable[[], list[np.ndarray]]:
    """Begin to copy small real tensors to the host; return a function, for any thread, that reads them."""
    found: list[np.ndarray] = [np.zeros(0)] * len(tensors)
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if type(tensor) in (Tensor, nn.Parameter):
            places.setdefault(tensor.device, []).append(i)
        else:  # a tensor subclass, such as one split over ranks, has its own way to be read
            found[i] = np.array(tensor.detach().tolist(), dtype=np.float64)
    shapes, sent = [tuple(tensor.shape) for tensor in tensors], []
    for device, here in places.items():
        parts = [tensors[i].detach().flatten() for i in here]
        if len({part.dtype for part in parts}) > 1:
            # On a device without float64 there are no values that float32 would round.
            parts = [part.to(torch.float32 if device.type == "mps" else torch.float64) for part in parts]
        is_late = not waits and device.type == "cuda"
        message = torch.cat(parts)
        message = message.to("cpu", non_blocking=True) if is_late else message.cpu()
        sent.append((here, message, torch.cuda.current_stream(device).record_event() if is_late else None))

    def read() -> list[np.ndarray]:
        for here, message, event in sent:
            if event is not None:
                event.synchronize()
            values, end = message.double().numpy(), 0
            for i in here:
                start, end = end, end + math.prod(shapes[i])
                found[i] = values[start:end].reshape(shapes[i])
        return found

    return read


def complete(measurement: Measurement[T]) -> T:
    """Return the result of a measurement at once; the host waits for the device."""
    return finish(measurement, read_arrays(next(measurement)))


def finish(measurement: Measurement[T], values: list[np.ndarray]) -> T:
    """Return the result of a measurement that has begun, from the values of its tensors."""
    try:
        measurement.send(values)
    except StopIteration as end:
        return end.value
    raise RuntimeError("A measurement yields its tensors once.")


def read_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors with one element each, not rounded, with one transfer per device."""
    return [array.item() for array in read_arrays(tensors)]


def read_parameter(model: Any, name: str) -> Tensor:
    """Return the full value of a parameter (or of an object with ``get_parameter``) by its path within `readable`."""
    if not isinstance(model, nn.Module):
        return model.get_parameter(name).detach()
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    if parametrize.is_parametrized(owner, attribute):
        with undisturbed(model):
            return getattr(owner, attribute).detach().clone()
    for hook in _weight_norms(owner).values():
        if hook.name == attribute:
            return hook.compute_weight(owner).detach()
    return full_tensor(model.get_parameter(name).detach())


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from its shards on all ranks; every rank must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor on this rank; the tensor itself if it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def readable(model: nn.Module) -> Iterator[None]:
    """Replace all weights by ordinary full parameters, so that a pass shows which it uses; then restore them."""
    with ExitStack() as stack:
        stack.enter_context(gathered(model))
        for module in [m for m in model.modules() if parametrize.is_parametrized(m)]:
            stack.enter_context(_without_parametrization(model, module))
        for module in [m for m in model.modules() if _weight_norms(m)]:
            stack.enter_context(_without_weight_norm(module))
        yield


def parameters_of_shards(model: nn.Module) -> dict[int, Any]:
    """Return FSDP2's record of each sharded parameter, by the id of the shard on this rank."""
    sharded = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    groups = [group for module in sharded for group in _shard_groups(module)]
    return {id(each.sharded_param): each for group in groups for each in group.fsdp_params}


def shards_in(model: nn.Module) -> list[Any]:
    """Return the modules whose parameters FSDP2 has sharded."""
    return [module for module in model.modules() if hasattr(module, "unshard") and hasattr(module, "reshard")]


@contextmanager
def gathered(model: nn.Module, *, casts: bool = False) -> Iterator[None]:
    """Replace parameters and buffers that are split over ranks by whole ones; every rank must call this.

    Args:
        model: The model, split by FSDP2, tensor parallelism or both.
        casts: Whether passes have the number format in which FSDP2 computes, instead of that of the parameters.
    """
    with replaced(model, whole_tensors(model, casts=casts), casts=casts):
        yield


def whole_tensors(model: nn.Module, *, casts: bool = False) -> dict[int, Tensor]:
    """Return the whole of each parameter and buffer that is split over ranks, by the id of its part, by all ranks."""
    reshard(model)
    kinds = _computed_kinds(model) if casts else {}
    whole: dict[int, Tensor] = {}
    for _, _, tensor in _places_of_parts(model):
        if id(tensor) not in whole:
            full = full_tensor(tensor.detach()).to(kinds.get(id(tensor), tensor.dtype))
            is_parameter = isinstance(tensor, nn.Parameter)
            whole[id(tensor)] = nn.Parameter(full, requires_grad=tensor.requires_grad) if is_parameter else full
    return whole


@contextmanager
def replaced(model: nn.Module, whole: Mapping[int, Tensor], *, casts: bool = False) -> Iterator[None]:
    """Replace the parts of parameters and buffers on this rank by whole ones from `whole_tensors`.

    Hooks that gather, split or cast tensors for ranks are left out, so that passes within the context send no messages
    and are those of one process.
    """
    places = _places_of_parts(model)
    if not places:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(without_hooks(model, lambda origin: origin.startswith("torch.distributed.")))
        for module in shards_in(model) if casts else ():
            _cast_as_sharded(module, stack)
        for table, name, tensor in places:
            table[name] = whole[id(tensor)]
        try:
            yield
        finally:
            for table, name, tensor in places:
                table[name] = tensor


def _places_of_parts(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers)]
    return [(table, name, each) for table in tables for name, each in table.items() if hasattr(each, "full_tensor")]


def reshard(model: nn.Module) -> None:
    """Release gathered parameters, which FSDP would use even after the optimizer has updated the shards."""
    for module in shards_in(model):
        module.reshard()


def _computed_kinds(model: nn.Module) -> dict[int, torch.dtype]:
    """Return the number format in which FSDP2 computes with a shard, by its id, where it is not that of the shard."""
    shards = parameters_of_shards(model)
    return {key: each.param_dtype for key, each in shards.items() if getattr(each, "param_dtype", None) is not None}


def _cast_as_sharded(module: Any, stack: ExitStack) -> None:
    """Cast inputs and outputs of a module as FSDP2 does, unless it runs in another format, until a context ends."""
    state = module._get_fsdp_state()
    kind = state._mp_policy.param_dtype

    def is_own() -> bool:
        return kind is not None and next((p.dtype for p in module.parameters()), None) == kind

    def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return state._cast_forward_inputs(args, kwargs) if is_own() else None

    def leave(_: nn.Module, args: tuple, output: Any) -> Any:
        return state._cast_output_dtype(output) if is_own() else None

    stack.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(leave).remove)


def _shard_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = getattr(state, "_fsdp_param_group", None)  # of torch before 2.13
    return [] if group is None else [group]


@contextmanager
def _without_parametrization(model: nn.Module, module: nn.Module) -> Iterator[None]:
    table: Any = module.parametrizations
    names = list(table)
    with undisturbed(model):
        values = {name: getattr(module, name).detach().clone() for name in names}
    parametrized = type(module)
    del module._modules["parametrizations"]
    module.__class__ = parametrized.__bases__[0]
    for name, value in values.items():
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for name in names:
            del module._parameters[name]
        module.__class__ = parametrized
        module._modules["parametrizations"] = table


def _weight_norms(module: nn.Module) -> dict[int, WeightNorm]:
    """Return the hooks of ``torch.nn.utils.weight_norm``, which compute a weight before each forward pass."""
    return {key: hook for key, hook in module._forward_pre_hooks.items() if isinstance(hook, WeightNorm)}


@contextmanager
def _without_weight_norm(module: nn.Module) -> Iterator[None]:
    hooks, before = _weight_norms(module), dict(module._forward_pre_hooks)
    last = {hook.name: module.__dict__.pop(hook.name) for hook in hooks.values() if hook.name in module.__dict__}
    for key, hook in hooks.items():
        del module._forward_pre_hooks[key]
        module._parameters[hook.name] = nn.Parameter(hook.compute_weight(module).detach(), requires_grad=False)
    try:
        yield
    finally:
        for hook in hooks.values():
            del module._parameters[hook.name]
        module.__dict__.update(last)
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks.update(before)
