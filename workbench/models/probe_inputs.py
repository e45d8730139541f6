"""Inputs that distinguish the axes of states: several different examples, of a length that no model dimension has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.layout import BATCH_FIRST, BatchLayout

_N_EXAMPLES = 12
_LENGTHS = (11, 13, 7, 17, 19)


def probe_inputs(model: nn.Module, inputs: Any, layout: BatchLayout = BATCH_FIRST) -> Any:
    """Return inputs like the given ones, with twelve different examples.

    Token ids are drawn from those given. Their length divides no dimension of the model's weights, so that shapes are
    unambiguous. Masks become ones. Other tensors are repeated with 10 % noise.

    Args:
        model: Model that the inputs are for.
        inputs: Inputs as for `call_model`.
        layout: Layout of the inputs; if the axis that counts sequences is unknown, they are returned unchanged.

    Returns:
        Inputs of the same structure. They are deterministic, and the global random state is not used.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {size for p in model.parameters() for size in p.shape}
    n_tokens = next((n for n in _LENGTHS if all(size % n for size in sizes)), _LENGTHS[0])
    axis = layout.inputs
    if axis is None:
        return inputs
    n_given = _n_examples(inputs, axis)

    # The embedding of padding is 0, so that no state could be told from another one by its direction.
    padding = {m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None}

    def remake(value: Any, name: str) -> Any:
        if not isinstance(value, Tensor) or value.ndim <= axis or value.shape[axis] != n_given:
            return value
        return remade(value.movedim(axis, 0), name).movedim(0, axis)

    def remade(value: Tensor, name: str) -> Tensor:
        if value.is_floating_point():
            copies = value[torch.arange(_N_EXAMPLES) % n_given].clone()
            scale = 0.1 * float(value.float().std(correction=0)) if "mask" not in name else 0.0
            noise = torch.randn(copies.shape, generator=generator) * scale
            return copies + noise.to(copies)
        if value.ndim != 2:
            return value[torch.arange(_N_EXAMPLES) % n_given]
        if "mask" in name:
            return value.new_ones(_N_EXAMPLES, n_tokens)
        if "position" in name:
            return torch.arange(n_tokens, device=value.device).expand(_N_EXAMPLES, -1).to(value)
        if "type" in name:
            return value.new_zeros(_N_EXAMPLES, n_tokens)
        return _draw(value, n_tokens, generator, padding)

    if isinstance(inputs, Mapping):
        return {name: remake(value, name) for name, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(remake(value, "") for value in inputs)
    return remake(inputs, "")


def _draw(tokens: Tensor, n_tokens: int, generator: torch.Generator, padding: set[int]) -> Tensor:
    """Draw sequences of token ids from those given, or from those below; first tokens differ where possible."""
    known = tokens.unique().cpu()
    if len(known) < _N_EXAMPLES:
        known = torch.arange(int(known.max()) + 1)[-4 * _N_EXAMPLES :]
    is_padding = torch.isin(known, torch.tensor(sorted(padding), dtype=known.dtype))
    known = known if is_padding.all() else known[~is_padding]
    firsts = known[torch.randperm(len(known), generator=generator)]
    firsts = firsts[torch.arange(_N_EXAMPLES) % len(firsts)]
    rest = known[torch.randint(len(known), (_N_EXAMPLES, n_tokens - 1), generator=generator)]
    return torch.cat([firsts[:, None], rest], dim=1).to(tokens)


def _n_examples(inputs: Any, axis: int) -> int:
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else [inputs]
    )
    return next((value.shape[axis] for value in values if isinstance(value, Tensor) and value.ndim > axis), 0)
