"""Eps fraction of each normalization: fraction of eps in the sum under its root; near 1 it does not normalize."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.models.calling import run_model
from workbench.models.probing import undisturbed, watch
from workbench.monitors.matrices import widened

#: Attribute names of the constant under the root.
_NAMES = ("eps", "variance_epsilon", "epsilon")


def eps_fractions(model: nn.Module, inputs: Any) -> np.ndarray:
    """Compute the eps fraction eps / (eps + v) of every call of a normalization over features.

    v is the other term under the root: the variance over the features of a token if the normalization subtracts their
    mean, otherwise their mean square. The median over tokens is returned, float64, shape (call,) in order: near 0 the
    normalization is effective; near 1 its output is proportional to its input; NaN where the states are not finite.
    Only modules that normalize over the last axis with a known eps count.
    """
    seen: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], _: Any) -> None:
        states = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point())
        state = next(states, None)
        if state is not None and state.numel() and _is_over_features(module, state):
            seen.append((module, state.detach().clone()))

    norms = [module for name, module in model.named_modules() if "parametrizations" not in name and _is_norm(module)]
    with undisturbed(model):
        with watch((module, note, False) for module in norms):
            run_model(model, inputs)
        return np.array([_eps_fraction(module, state) for module, state in seen])


def _eps_fraction(module: nn.Module, state: Tensor) -> float:
    """Return the median eps fraction over the tokens of a state."""
    eps, wide = _eps_of(module, state.dtype), widened(state)
    axes = tuple(range(-len(module.normalized_shape), 0)) if isinstance(module, nn.LayerNorm | nn.RMSNorm) else (-1,)
    size = wide.var(axes, unbiased=False) if _subtracts_mean(module, state) else wide.square().mean(axes)
    return float((eps / (eps + size)).median()) if bool(size.isfinite().all()) else math.nan


def _subtracts_mean(module: nn.Module, state: Tensor) -> bool:
    """Return whether the output does not change if a constant is added to all features."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return isinstance(module, nn.LayerNorm)
    token = state.abs().mean() * torch.linspace(-1, 1, state.shape[-1], dtype=state.dtype, device=state.device)[None]
    try:
        before, after = module(token), module(token + token.abs().mean())
        return bool(torch.allclose(before, after, rtol=1e-2, atol=1e-2 * float(before.abs().max())))
    except Exception:  # noqa: BLE001  (third-party code, which may need other arguments)
        return False


def _eps_of(module: nn.Module, dtype: torch.dtype) -> float:
    """Return the eps of a normalization; 0 if it is unknown."""
    found = next((getattr(module, name) for name in _NAMES if hasattr(module, name)), 0.0)
    if found is None and isinstance(module, nn.RMSNorm):
        return torch.finfo(dtype).eps
    return float(found) if isinstance(found, float | int) else 0.0


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalization with an eps, and not over batches or groups."""
    is_over_others = isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase)
    is_by_name = "norm" in type(module).__name__.lower()
    return is_by_name and not is_over_others and _eps_of(module, torch.float32) > 0


def _is_over_features(module: nn.Module, state: Tensor) -> bool:
    """Return whether a module normalizes over the last axis or axes of a state."""
    if getattr(module, "data_format", "") == "channels_first":
        return False
    shape = getattr(module, "normalized_shape", None)
    if shape is None:
        weight = getattr(module, "weight", None)
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else state.shape[-1:]
    shape = tuple(shape) if isinstance(shape, tuple | list | torch.Size) else (shape,)
    return tuple(state.shape[-len(shape) :]) == shape
