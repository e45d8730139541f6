"""State of a model and of its process that a call could change, compared before and after the call."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, eq=False)
class Same:
    """Wrapper that is equal only to a wrapper of the same object; it keeps the object alive, so that ids are unique."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return f"{type(self.thing).__name__} at {id(self.thing):#x}"


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return type, shape and all bits of a tensor."""
    here = tensor.detach().cpu().contiguous()
    return str(tensor.dtype), tuple(tensor.shape), here.flatten().view(torch.uint8).numpy().tobytes()


def frozen(value: Any) -> Any:
    """Return a snapshot of a value for comparisons: the identity and contents of containers and tensors."""
    if isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.Tensor):
        return (Same(value), *bits(value), value.requires_grad)
    if isinstance(value, Mapping):
        return (Same(value), tuple((Same(k) if callable(k) else k, frozen(v)) for k, v in value.items()))
    if isinstance(value, list | tuple):
        return (Same(value), tuple(frozen(item) for item in value))
    if isinstance(value, set | frozenset):
        return (Same(value), frozenset(value))
    if hasattr(value, "to_dict") and hasattr(value, "model_type"):  # a config of transformers
        return (Same(value), repr(value.to_dict()))
    return (Same(value), repr(value)) if is_dataclass(value) else Same(value)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return parameters, gradients, buffers, flags, hooks and other attributes of a model, by their place."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        at = f"{name or 'model'}: "
        found[at + "module"], found[at + "class"] = Same(module), Same(type(module))
        found[at + "forward of its class"] = Same(type(module).forward)
        for key, value in vars(module).items():
            if key in _TABLES:  # identity and order of the objects; their contents follow below
                found[at + key] = tuple((child, Same(thing)) for child, thing in value.items())
            elif "hooks" in key and isinstance(value, Mapping):
                found[at + key] = tuple((number, Same(hook)) for number, hook in value.items())
            else:
                found[at + key] = frozen(value)
        for key, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None:
                continue
            found[f"{at}{key}"] = frozen(tensor)
            found[f"{at}{key}.grad"] = frozen(tensor.grad) if tensor.is_leaf else None
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                table = getattr(tensor, hooks, None) or OrderedDict()
                found[f"{at}{key}.{hooks}"] = tuple((number, Same(hook)) for number, hook in table.items())
    return found


def state_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return settings, state and hooks of an optimizer."""
    return {f"optimizer: {key}": frozen(value) for key, value in vars(optimizer).items()}


def state_of_process() -> dict[str, Any]:
    """Return random states and other global settings of the process."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  (the legacy state is the global one)
    hooks = {name: table for name, table in vars(torch.nn.modules.module).items() if name.endswith("_hooks")}
    return {
        "python's random state": random.getstate(),
        "numpy's random state": (kind, keys.tobytes(), *rest),
        "torch's random state": bits(torch.get_rng_state()),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of products": torch.get_float32_matmul_precision(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "kernels of attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "numpy's errors": np.geterr(),
        "warnings": (Same(warnings.filters), tuple(warnings.filters), Same(warnings.showwarning)),
        "hooks of all modules": {name: frozen(table) for name, table in hooks.items()},
    }


def output_of(model: nn.Module, inputs: Any) -> Any:
    """Return the output of a model in eval mode, with all bits and lengths; the modes are restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return structure(model(inputs))
    finally:
        for module, training in modes:
            module.training = training


def structure(value: Any) -> Any:
    """Convert a nested output to types, keys, lengths and bits."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, Mapping):
        return type(value).__name__, {key: structure(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, len(value), [structure(item) for item in value]
    return type(value).__name__, value if isinstance(value, _PLAIN) else None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two states."""
    missing = [f"{name} is missing" for name in before if name not in after]
    new = [f"{name} is new" for name in after if name not in before]
    return missing + new + [f"{name} has changed" for name in before if name in after and before[name] != after[name]]
