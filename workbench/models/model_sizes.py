"""Sizes of a model that a plan has to fit, such as heads, blocks, experts and vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from workbench.models.calling import unwrap
from workbench.option_kinds import PositiveInt

_NAMES = {
    "n_heads": ("n_heads", "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads"),
    "n_kv_heads": ("n_kv_heads", "num_key_value_heads", "num_kv_heads"),
    "depth": ("n_layers", "num_hidden_layers", "n_layer", "num_layers", "depth"),
    "width": ("d_model", "hidden_size", "n_embd", "width"),
    "inner_width": ("mlp_width", "intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
    "n_experts": ("n_experts", "num_local_experts", "num_experts", "n_routed_experts"),
    "vocabulary": ("vocab_size",),
    "max_length": ("max_length", "max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"),
    "image_size": ("image_size",),
    "n_channels": ("n_channels", "num_channels", "in_channels"),
    "patch_size": ("patch_size",),
}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model; a size is None if it does not exist or is unknown."""

    n_heads: int | None = None  # query heads of each block
    n_kv_heads: int | None = None
    depth: int | None = None
    width: int | None = None
    inner_width: int | None = None  # width of the hidden layer of the MLP, or of the module that replaces it
    n_experts: int | None = None
    vocabulary: int | None = None  # tokens
    max_length: int | None = None  # of a sequence, in tokens
    image_size: int | None = None  # side length, in pixels
    n_channels: int | None = None
    patch_size: int | None = None  # side length, in pixels

    def supports_tensor_parallel(self, n: PositiveInt) -> bool:
        """Return whether every matrix can be split over ``n`` devices, each with complete heads."""
        if self.n_heads is not None and self.n_heads % n:
            return False
        if self.n_kv_heads is not None and self.n_kv_heads % n and n % self.n_kv_heads:
            return False
        widths = [self.inner_width] if self.n_heads is not None else [self.width, self.inner_width]
        return all(width % n == 0 for width in widths if width is not None)


def model_sizes(source: Any) -> ModelSizes:
    """Return the sizes of a design, a model, a subject, or the configuration of one, also as a mapping."""
    found: dict[str, int | None] = {}
    option = _options(source)
    for name, spellings in _NAMES.items():
        values = [option(spelling) for spelling in spellings]
        is_pair = [isinstance(value, list | tuple) and len(value) == 2 for value in values]  # of height and width
        values = [v[0] if pair and v[0] == v[1] else v for v, pair in zip(values, is_pair, strict=True)]
        found[name] = next((int(v) for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)
    ratio, expand = option("mlp_ratio"), option("expand")
    if found["inner_width"] is None and found["width"] is not None and found["n_heads"] is not None:
        wide = (ratio if isinstance(ratio, int | float) else 4) * found["width"]
        found["inner_width"] = int(wide) if float(wide).is_integer() else 8 * math.ceil(wide / 8)
    if found["inner_width"] is None and found["width"] is not None and isinstance(expand, int):
        found["inner_width"] = expand * found["width"]
    if found["n_heads"] is None:
        found["n_kv_heads"] = None
    return ModelSizes(**found)


def nearest_size(target: int, is_possible: Callable[[int], bool], *, highest: int) -> int:
    """Return the possible number from 1 to ``highest`` that is nearest by ratio; of two equally near, the smaller."""
    possible = [n for n in range(1, highest + 1) if is_possible(n)]
    return min(possible, key=lambda n: (abs(math.log(n / target)), n))


def _options(source: Any) -> Callable[[str], Any]:
    """Return a function from the name of an option to its value, or None."""
    if callable(describe := getattr(source, "describe", None)):
        source = describe()
    elif not isinstance(source, nn.Module) and isinstance(getattr(source, "model", None), nn.Module):
        source = source.model
    if isinstance(source, nn.Module):
        source = getattr(unwrap(source), "config", None)
    if callable(as_dict := getattr(source, "as_dict", None)):
        source = as_dict()
    if isinstance(source, Mapping):
        # A composite description has the language part one level below.
        inner = [value for value in source.values() if isinstance(value, Mapping)]
        return lambda name: next((part[name] for part in (source, *inner) if part.get(name) is not None), None)
    configs = (source, getattr(source, "text_config", None), getattr(source, "vision_config", None))
    parts = [part for part in configs if part is not None]
    return lambda name: next((v for part in parts if (v := getattr(part, name, None)) is not None), None)
