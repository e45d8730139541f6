"""How much of what each normalization divides by is its eps: where that is most of it, nothing is normalized."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.models.calling import run_foreign
from workbench.models.probing import undisturbed, watch

#: Names of the constant below the root.
_NAMES = ("eps", "variance_epsilon", "epsilon")


def eps_shares(model: nn.Module, inputs: Any) -> np.ndarray:
    """Measure eps / (eps + v) of every call of a normalization, v being what it divides by the root of.

    v is the variance over the features of a token for a LayerNorm, otherwise their mean square; the median over tokens
    counts. Near 0 the normalization works; near 1 its output is proportional to its input.

    Args:
        model: The model, which is not changed.
        inputs: Inputs as for `workbench.profile`.

    Returns:
        Shape (call,), in the order of the calls, float64; empty: no module is a normalization over features with an
        eps that can be read. NaN: states are not finite.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> from workbench.flow.norm_eps import eps_shares
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, norm_eps=1e6)
        >>> eps_shares(model, torch.zeros(1, 8, dtype=torch.int64)).round(2).tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    found: list[float] = []

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], _: Any) -> None:
        states = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.is_floating_point())
        if (state := next(states, None)) is None:
            return
        state, eps = state.detach().double(), _eps_of(module)
        is_layer_norm = isinstance(module, nn.LayerNorm)
        size = state.var(-1, unbiased=False) if is_layer_norm else state.square().mean(-1)
        found.append(float((eps / (eps + size)).median()))

    norms = [module for module in model.modules() if _is_norm(module)]
    with undisturbed(model), watch((module, note, False) for module in norms), torch.no_grad():
        run_foreign(model, inputs)
    return np.array(found)


def _eps_of(module: nn.Module) -> float:
    return next((float(value) for name in _NAMES if isinstance(value := getattr(module, name, None), float | int)), 0.0)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes over the features of a token, with an eps."""
    over_others = isinstance(module, nn.GroupNorm | nn.modules.batchnorm._NormBase)
    return "norm" in type(module).__name__.lower() and not over_others and _eps_of(module) > 0
