"""Options in the configs of Hugging Face models that are set temporarily while a model is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

#: A config, the name of an option, and its value.
Option = tuple[Any, str, Any]
#: Option of the attention implementation. Unlike the property without the suffix, it does not change nested configs.
_ATTENTION = "_attn_implementation_internal"


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of a model and its parts, each once."""
    return list({id(c): c for c in (getattr(m, "config", None) for m in model.modules()) if c is not None}.values())


def known_options(model: nn.Module, values: Mapping[str, Any]) -> list[Option]:
    """Return these values for every config in which the option exists and is not None."""
    return [
        (config, name, value)
        for config in configs_of(model)
        for name, value in values.items()
        if getattr(config, name, None) is not None
    ]


def visible_attention(model: nn.Module) -> list[Option]:
    """Return the options that replace the kernels of flash or flex attention by observable operations.

    Models that select their attention from transformers' ``AttentionInterface`` are switched to "sdpa", or to "eager"
    where they cap their logits or have sinks, for which torch's ``scaled_dot_product_attention`` has no argument.
    Masks, windows and scales of the model are unchanged. Implementations that users register are not replaced, because
    they may compute something else.
    """
    options = {}
    for part in model.modules():
        config = getattr(part, "config", None)
        name = getattr(config, _ATTENTION, None)
        if not isinstance(name, str) or not ("flash" in name or name == "flex_attention"):
            continue
        # Only models of transformers have this method; their attention modules share the config.
        if (can_set := getattr(part, "_can_set_attn_implementation", None)) is not None and can_set():
            options[id(config)] = (config, _ATTENTION, "sdpa" if part._supports_sdpa else "eager")
    return list(options.values())


@contextmanager
def config_options(options: Iterable[Option]) -> Iterator[None]:
    """Set options within a context and restore them afterwards."""
    undo = []
    try:
        for config, name, value in options:
            undo.append((config, name, getattr(config, name)))
            setattr(config, name, value)
        yield
    finally:
        for before in reversed(undo):
            setattr(*before)
