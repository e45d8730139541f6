"""Number of blocks that the config of a model states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DECODER_NAMES = ("decoder_layers", "num_decoder_layers")
_ENCODER_NAMES = ("encoder_layers", "num_encoder_layers")
#: Parts of a composite config; those that hold the language decoder come first.
_PARTS = (
    "decoder",
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "vision_config",
    "audio_config",
    "encoder",
)


@dataclass(frozen=True)
class BlockCount:
    """A number of blocks in a config.

    Attributes:
        n_blocks: Number of blocks.
        where: Path of the option in the config.
    """

    n_blocks: int
    where: str

    def __str__(self) -> str:
        return f"{self.where} = {self.n_blocks}"

    def matches(self, stack: str) -> bool:
        """Return whether the option and the stack name the same part of a model, such as the decoder."""
        part = next((part for part in ("decoder", "encoder", "text", "vision", "audio") if part in self.where), None)
        return part is not None and part in stack


def block_counts(model: nn.Module) -> list[BlockCount]:
    """Return the numbers of blocks that ``model.config`` states, the main stack first; empty without a config."""
    config = getattr(model, "config", None)
    if config is None:
        config = next((c for c in (getattr(m, "config", None) for m in model.children()) if c is not None), None)
    return list(_counts(config, ""))


def _counts(config: Any, prefix: str) -> Iterator[BlockCount]:
    if config is None or isinstance(config, str | int | float):
        return
    is_encoder_decoder = bool(_read(config, "is_encoder_decoder"))
    names = (*_DECODER_NAMES, *_NAMES, *_ENCODER_NAMES) if is_encoder_decoder else _NAMES
    seen: set[int] = set()
    for name in names:
        value = _read(config, name)
        if (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value > 0
            and (is_encoder_decoder or value not in seen)
        ):
            seen.add(value)
            yield BlockCount(value, f"{prefix}{name}")
    for part in _PARTS:
        yield from _counts(_read(config, part), f"{prefix}{part}.")


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
