"""Designs from configurations of transformers: models of any size, built from the configuration alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from workbench.errors import OptionError, WorkbenchError
from workbench.scaling.built_sizes import Shapes, misfit, shapes_of
from workbench.scaling.design_sources import DesignSource
from workbench.scaling.resizing import GRANULE, depth_of, is_count, n_heads_of, resized, rotated_share

#: Options of configurations that `TransformersSource.describe` repeats.
_DESCRIBED = (
    "model_type", "vocab_size", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim",
    "encoder_layers", "decoder_layers", "num_decoder_layers", "decoder_attention_heads", "intermediate_size", "ffn_dim",
    "n_inner", "d_ff", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "word_embed_proj_dim", "q_lora_rank", "kv_lora_rank", "num_local_experts",
    "num_experts", "n_routed_experts", "num_experts_per_tok", "state_size", "expand", "n_groups",
    "time_step_rank", "max_position_embeddings", "image_size", "patch_size", "num_channels", "tie_word_embeddings",
    "initializer_range",
)  # fmt: skip
#: Longest part of another library's message that is repeated, in characters.
_LONGEST_CAUSE = 200
_NOT_EQUAL = (
    "blocks of several widths, expected one stack of equal blocks; pass a function(width, depth, seed) that builds it."
)

#: Kinds whose code splits the heads into this many parts.
_PARTS_OF_HEADS = {"codegen": 4}


@dataclass(frozen=True)
class TransformersSource(DesignSource):
    """A configuration of transformers.

    Raises:
        OptionError: If it does not describe one stack of equal blocks of a given width and depth.
    """

    config: Any

    def __post_init__(self) -> None:
        name = type(self.config).__name__
        parts = [part for part in getattr(self.config, "sub_configs", {}) if getattr(self.config, part, None)]
        try:
            sizes = {option: getattr(self.config, option, None) for option in ("hidden_size", "num_hidden_layers")}
            n_heads_of(self.config)
            getattr(self.config, "head_dim", None)
        except Exception as error:  # configurations of models whose blocks differ in size
            raise OptionError(f"{name} describes {_NOT_EQUAL}") from error
        missing = next((option for option, size in sizes.items() if not is_count(size)), None)
        if missing and parts:
            part = "text_config" if "text_config" in parts else parts[0]
            raise OptionError(
                f"{name} describes a model of several parts ({', '.join(parts)}), expected one stack of equal blocks; "
                f"pass one part alone, such as its {part}."
            )
        if missing:
            raise OptionError(
                f"{name} has no {missing}, expected a model of one stack of equal blocks; pass a function(width, "
                "depth, seed) that builds it."
            )
        if isinstance(getattr(self.config, "depths", None), list | tuple):
            raise OptionError(f"{name} describes {_NOT_EQUAL}")

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def depth(self) -> int:
        """Residual blocks; of an encoder-decoder model those of the decoder."""
        return depth_of(self.config)

    @property
    def width_per_head(self) -> int | None:
        """Width of the stream over the number of heads; None also where both widths are independent."""
        n_heads = n_heads_of(self.config)
        if not n_heads:
            return None
        per_head, head = max(1, self.width // n_heads), getattr(self.config, "head_dim", None)
        return None if per_head % GRANULE and is_count(head) and n_heads * head != self.width else per_head

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary; None for images."""
        return None if self.n_classes else getattr(self.config, "vocab_size", None)

    @property
    def n_classes(self) -> int | None:
        """Number of classes of a model of images."""
        return self.config.num_labels if self._reads_images else None

    @property
    def target_shapes(self) -> Shapes:
        """Shapes of the weights at the target size, by name."""
        return self._target[0]

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """The options that decide the size, by transformers' names."""
        config = self.at(width, depth, None)
        found = {name: value for name in _DESCRIBED if (value := getattr(config, name, None)) is not None}
        if self.n_classes:
            found = {name: value for name, value in found.items() if name != "vocab_size"}
            found["num_labels"] = config.num_labels
        return found

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """See `DesignSource`."""
        with self._naming_the_size(width, depth):
            torch.manual_seed(seed)
            model = self._build(self.at(width, depth, vocabulary))
        self._check(shapes_of(model), width, depth)
        return model

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """See `DesignSource`."""
        if (width, depth, vocabulary) == (self.width, self.depth, None):
            return self._target[1]
        shapes, n_weights = self._on_meta(width, depth, vocabulary)
        self._check(shapes, width, depth)
        return n_weights

    def at(self, width: int, depth: int, vocabulary: int | None) -> Any:
        """The configuration at a size.

        Raises:
            OptionError: If transformers has no such configuration.
        """
        with self._naming_the_size(width, depth):
            config = resized(self.config, width, depth, vocabulary, reads_images=self._reads_images)
            if callable(validate := getattr(config, "validate", None)):
                validate()
            found = config.hidden_size, depth_of(config)
        if found != (width, depth):
            raise self._refusal(width, depth, f"its configuration stays {found[0]} wide and {found[1]} deep")
        return config

    def with_images(self, side: int) -> TransformersSource:
        """See `DesignSource`."""
        if not self.n_classes or not is_count(getattr(self.config, "image_size", None)):
            return self
        config = copy.deepcopy(self.config)
        config.image_size = side
        return TransformersSource(config)

    def nearest_width(self, width: int) -> int:
        """See `DesignSource`; the rotated part of each head has to be an even number of features."""
        if width == self.width:
            return width
        if self.width_per_head is None and n_heads_of(self.config):
            return max(GRANULE, GRANULE * math.ceil(width / GRANULE - 0.5))
        if parts := _PARTS_OF_HEADS.get(self.config.model_type):
            step = parts * (self.width_per_head or 1)
            return max(step, step * math.ceil(width / step - 0.5))
        return super().nearest_width(width)

    def _is_width(self, width: int) -> bool:
        per_head, named = self.width_per_head, getattr(self.config, "head_dim", None)
        if per_head is None:
            return True
        head = (named if is_count(named) else per_head) * width / per_head
        head = head if head.is_integer() else GRANULE * max(1, round(head / GRANULE))
        return int(head * rotated_share(self.config)) % 2 == 0

    @cached_property
    def _target(self) -> tuple[Shapes, int]:
        """Shapes of the weights at the target size, and the number of parameters."""
        return self._on_meta(self.width, self.depth, None)

    def _on_meta(self, width: int, depth: int, vocabulary: int | None) -> tuple[Shapes, int]:
        with self._naming_the_size(width, depth), torch.device("meta"):
            model = self._build(self.at(width, depth, vocabulary))
        return shapes_of(model), sum(weight.numel() for weight in model.parameters())

    def _check(self, shapes: Shapes, width: int, depth: int) -> None:
        if (width, depth) == (self.width, self.depth):
            return
        reason = misfit(shapes, self._target[0], (width, depth), (self.width, self.depth))
        if reason:
            raise self._refusal(width, depth, reason)

    @contextmanager
    def _naming_the_size(self, width: int, depth: int) -> Iterator[None]:
        """Raise an error of transformers as one sentence that names the size."""
        try:
            yield
        except WorkbenchError:
            raise
        except Exception as error:  # of any kind, as any code may build the model
            raise self._refusal(width, depth, cause_of(error)) from error

    def _refusal(self, width: int, depth: int, reason: str) -> OptionError:
        return OptionError(
            f"{type(self.config).__name__} cannot be built {width} wide and {depth} deep: {reason}; choose another "
            "size, or pass a function(width, depth, seed) that builds it."
        )

    @cached_property
    def _reads_images(self) -> bool:
        from transformers.models.auto import modeling_auto as auto

        kind = type(self.config)
        reads_text = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING or kind in auto.MODEL_FOR_MASKED_LM_MAPPING
        return kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and not reads_text

    def _build(self, config: Any) -> nn.Module:
        return self._class._from_config(config, dtype=torch.float32)

    @cached_property
    def _class(self) -> Any:
        return class_of(self.config)


def class_of(config: Any) -> Any:
    """The class of the models: the one that a configuration names, or one with a head if that has none.

    A bare model makes no predictions; it gets the head of the task that its kind is pretrained on.

    Raises:
        OptionError: If there is none.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    named = config.architectures or []
    named = [named] if isinstance(named, str) else named
    classes = [getattr(transformers, name, None) for name in named if isinstance(name, str)]
    own = next((cls for cls in classes if getattr(cls, "config_class", None) is kind), None)
    bare = _class_of(auto.MODEL_MAPPING, kind)
    if own is not None and own is not bare:
        return own
    heads = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ]
    if getattr(config, "is_encoder_decoder", False):  # not the decoder alone, which may have its own class
        heads = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, *heads]
    found = next((cls for mapping in heads if (cls := _class_of(mapping, kind)) is not None), own or bare)
    if found is None:
        raise OptionError(
            f"transformers has no model for {kind.__name__}; pass a function(width, depth, seed) that builds it."
        )
    return found


def built_whole(config: Any, *, seed: int, most_weights: int) -> nn.Module | None:
    """A fresh model of a configuration that describes no design, such as of stages; None: it is too large, or fails."""
    try:
        cls = class_of(config)
        with torch.device("meta"):
            n_weights = sum(weight.numel() for weight in cls._from_config(copy.deepcopy(config)).parameters())
        if n_weights > most_weights:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls._from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception:  # noqa: BLE001  (of any kind, as any code may build the model)
        return None


def cause_of(error: Exception) -> str:
    """The message of another library's exception, in one line without a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of a validation error the first line names the rule; the last names the class of the error, then the reason.
    is_validation = bool(lines) and lines[0].endswith(":")
    says = (lines[-1] if is_validation else lines[0]).rstrip(".") if lines else ""
    says = says if len(says) <= _LONGEST_CAUSE else f"{says[:_LONGEST_CAUSE].rsplit(' ', 1)[0]} …"
    return says if is_validation else f"{type(error).__name__}: {says}" if says else type(error).__name__


def _class_of(mapping: Any, kind: type) -> Any:
    """The class that an auto mapping has for a kind of configuration, the first of several; None if it has none."""
    if kind not in mapping:
        return None
    found = mapping[kind]
    return found[0] if isinstance(found, list | tuple) else found
