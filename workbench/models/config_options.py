"""Options in the configs of Hugging Face models that are set for as long as a model is run to be measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

#: A config, the name of an option, and its value.
Option = tuple[Any, str, Any]
#: Implementation of attention. Unlike the property without the suffix, it does not change nested configs.
_ATTENTION = "_attn_implementation_internal"


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of a model and its parts, each once."""
    return list({id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}.values())


def known_options(model: nn.Module, values: Mapping[str, Any]) -> list[Option]:
    """These values, for every config in which the option exists and is not None."""
    return [
        (config, name, value)
        for config in configs_of(model)
        for name, value in values.items()
        if getattr(config, name, None) is not None
    ]


def visible_attention(model: nn.Module) -> list[Option]:
    """The options with which a model computes attention visibly, instead of in the kernels of flash or flex attention.

    Models that look their attention up in transformers' ``AttentionInterface`` are switched to "sdpa", or to "eager"
    where they cap their logits or have sinks, for which torch's ``scaled_dot_product_attention`` has no argument. The
    masks, windows and scales remain the model's own. Names of other kinds, which users register, are left alone: what
    they compute may be something else.
    """
    options = {}
    for part in model.modules():
        config = getattr(part, "config", None)
        name = getattr(config, _ATTENTION, None)
        if not isinstance(name, str) or not ("flash" in name or name == "flex_attention"):
            continue
        # Only transformers' models say so; their attention modules share the config.
        if (can_set := getattr(part, "_can_set_attn_implementation", None)) is not None and can_set():
            options[id(config)] = (config, _ATTENTION, "sdpa" if part._supports_sdpa else "eager")
    return list(options.values())


@contextmanager
def config_options(options: Iterable[Option]) -> Iterator[None]:
    """Set options, and restore them afterwards."""
    undo = []
    try:
        for config, name, value in options:
            undo.append((config, name, getattr(config, name)))
            setattr(config, name, value)
        yield
    finally:
        for before in reversed(undo):
            setattr(*before)
