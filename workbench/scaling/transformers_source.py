"""Designs from configurations of transformers: models of any size, built without a checkpoint."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from workbench.errors import OptionError, WorkbenchError
from workbench.scaling.design_sources import (
    GRANULE,
    DesignSource,
    depth_of,
    is_count,
    n_heads_of,
    resized,
    rotated_fraction,
)

#: Shape of each parameter, by its name.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_NUMBER = re.compile(r"\.\d+\.")
#: The number of entries of a matrix is proportional to the square of the width. States, ranks and routers of constant
#: size are a small fraction of the parameters of the blocks at the target size; a part that exceeds this fraction was
#: not resized. A model with less than ``_MAX_EXCESS`` times the expected number is accepted, because small dimensions
#: are rounded up.
_MAX_FRACTION, _MAX_EXCESS = 0.25, 4.0
#: A dimension of a narrow model that is at least this large, and at least the target width, was not resized.
_LARGE = 512


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a model by name, with tied parameters counted once."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def misfit(built: Shapes, target: Shapes, size: tuple[int, int], target_size: tuple[int, int]) -> str:
    """Return a clause on what in the shapes of its parameters contradicts a model's size; empty if nothing does."""
    (width, depth), (of_width, of_depth) = size, target_size
    counts, of_counts = _n_blocks(built), _n_blocks(target)
    for stack, n in of_counts.items():
        if n == of_depth != depth and counts.get(stack) == of_depth:
            return f"{stack} still has {of_depth} blocks"
    in_blocks = {name: shape for name, shape in built.items() if _NUMBER.search(name)}
    if not any(width in shape for shape in in_blocks.values()):
        return "no parameter of its blocks has that width"
    if width >= of_width:
        return ""
    kept = {name: (shape, target[name]) for name, shape in in_blocks.items() if name in target}
    for name, (shape, of_shape) in kept.items():
        if len(shape) == len(of_shape) == 2 and name.endswith("weight") and shape != of_shape:
            for n, of_n in zip(shape, of_shape, strict=True):
                if n == of_n >= max(of_width, _LARGE):
                    return f"{name} still has a width of {n}"
    sizes, ratio = {name: (math.prod(a), math.prod(b)) for name, (a, b) in kept.items()}, width / of_width
    n, of_n = (sum(each) for each in zip(*sizes.values(), strict=True)) if sizes else (0, 1)
    if n <= max(_MAX_EXCESS, 1 + _MAX_FRACTION / ratio) * ratio**2 * of_n:
        return ""
    worst = max(sizes, key=lambda name: sizes[name][0] - ratio**2 * sizes[name][1])
    return f"its blocks have {n / (ratio**2 * of_n):.2g} times as many parameters as that width needs, most in {worst}"


def _n_blocks(shapes: Shapes) -> dict[str, int]:
    """Return the number of modules in each outermost numbered container."""
    found: dict[str, set[str]] = {}
    for name in shapes:
        if match := _NUMBER.search(name):
            found.setdefault(name[: match.start()], set()).add(match.group())
    return {stack: len(numbers) for stack, numbers in found.items()}


#: Options of configurations that `TransformersSource.describe` returns.
_DESCRIBED = (
    "model_type", "vocab_size", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "head_dim",
    "encoder_layers", "decoder_layers", "num_decoder_layers", "decoder_attention_heads", "intermediate_size", "ffn_dim",
    "n_inner", "d_ff", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "word_embed_proj_dim", "q_lora_rank", "kv_lora_rank", "num_local_experts",
    "num_experts", "n_routed_experts", "num_experts_per_tok", "state_size", "expand", "n_groups",
    "time_step_rank", "max_position_embeddings", "image_size", "patch_size", "num_channels", "tie_word_embeddings",
    "initializer_range",
)  # fmt: skip
#: Maximum length of the message of another library that is quoted, in characters.
_MAX_CAUSE = 200

#: Kinds of models whose code splits the heads into this number of parts.
_PARTS_OF_HEADS = {"codegen": 4}


@dataclass(frozen=True)
class TransformersSource(DesignSource):
    """A configuration of transformers."""

    config: Any

    def __post_init__(self) -> None:
        name = type(self.config).__name__
        parts = [part for part in getattr(self.config, "sub_configs", {}) if getattr(self.config, part, None)]
        try:
            sizes = {option: getattr(self.config, option, None) for option in ("hidden_size", "num_hidden_layers")}
            n_heads_of(self.config)
            getattr(self.config, "head_dim", None)
        except Exception as error:  # Configurations of models whose blocks have several widths raise here.
            raise self._not_equal() from error
        missing = next((option for option, size in sizes.items() if not is_count(size)), None)
        if missing and parts:
            part = "text_config" if "text_config" in parts else parts[0]
            raise OptionError(
                f"{name} describes a model of several parts ({', '.join(parts)}), but a design is one stack of equal "
                f"blocks; pass one of the parts, such as its {part}."
            )
        if missing:
            raise OptionError(
                f"{name} has no {missing}, so it is no stack of equal blocks; pass a function(width, depth, seed)."
            )
        if isinstance(getattr(self.config, "depths", None), list | tuple):
            raise self._not_equal()

    def _not_equal(self) -> OptionError:
        """Create the exception for blocks of several widths."""
        name = type(self.config).__name__
        return OptionError(
            f"{name} describes blocks of several widths, but a design is one stack of equal blocks; pass a "
            "function(width, depth, seed) that builds it."
        )

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def depth(self) -> int:
        """Number of residual blocks; of an encoder-decoder model that of the decoder."""
        return depth_of(self.config)

    @property
    def width_per_head(self) -> int | None:
        """Width of the residual stream per head; None if there are no heads, or both widths are independent."""
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
        """Number of classes of a model that reads images; None otherwise."""
        return self.config.num_labels if self._reads_images else None

    @property
    def target_shapes(self) -> Shapes:
        """Shapes of the parameters at the target size, by name."""
        return self._target[0]

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Return the options that determine the size, with the names of transformers."""
        config = self.at(width, depth, None)
        found = {name: value for name in _DESCRIBED if (value := getattr(config, name, None)) is not None}
        if self.n_classes:
            found = {name: value for name, value in found.items() if name != "vocab_size"}
            found["num_labels"] = config.num_labels
        return found

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a model with initial parameters, and check its size."""
        with self._errors_with_size(width, depth):
            torch.manual_seed(seed)
            model = self._class._from_config(self.at(width, depth, vocabulary), dtype=torch.float32)
        if (width, depth) != (self.width, self.depth) and (
            reason := misfit(shapes_of(model), self._target[0], (width, depth), (self.width, self.depth))
        ):
            raise self._cannot_build(width, depth, reason)
        return model

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Return the number of parameters of a model of a size, with tied parameters counted once."""
        is_target = (width, depth, vocabulary) == (self.width, self.depth, None)
        return self._target[1] if is_target else super().count(width, depth, vocabulary)

    def at(self, width: int, depth: int, vocabulary: int | None) -> Any:
        """Return the configuration at a size."""
        with self._errors_with_size(width, depth):
            config = resized(self.config, width, depth, vocabulary, reads_images=self._reads_images)
            if callable(validate := getattr(config, "validate", None)):
                validate()
            found = config.hidden_size, depth_of(config)
        if found != (width, depth):
            raise self._cannot_build(width, depth, f"its configuration keeps width {found[0]} and depth {found[1]}")
        return config

    def with_images(self, side: int) -> TransformersSource:
        """Return the source for square images of another side; itself if it reads none or their size is fixed."""
        if not self.n_classes or not is_count(getattr(self.config, "image_size", None)):
            return self
        config = copy.deepcopy(self.config)
        config.image_size = side
        return TransformersSource(config)

    def nearest_width(self, width: int) -> int:
        """Return the nearest width that a model can have; the rotated part of each head must have an even width."""
        if width == self.width:
            return width
        if self.width_per_head is None and n_heads_of(self.config):
            return max(GRANULE, GRANULE * math.ceil(width / GRANULE - 0.5))
        if parts := _PARTS_OF_HEADS.get(self.config.model_type):
            step = parts * (self.width_per_head or 1)
            return max(step, step * math.ceil(width / step - 0.5))
        return super().nearest_width(width)

    def _is_width(self, width: int) -> bool:
        """Return whether a single head can have this width: its rotated part must have an even width."""
        per_head, named = self.width_per_head, getattr(self.config, "head_dim", None)
        if per_head is None:
            return True
        head = (named if is_count(named) else per_head) * width / per_head
        head = head if head.is_integer() else GRANULE * max(1, round(head / GRANULE))
        return int(head * rotated_fraction(self.config)) % 2 == 0

    @cached_property
    def _target(self) -> tuple[Shapes, int]:
        """Shapes and number of the parameters at the target size."""
        with torch.device("meta"):
            model = self.make(self.width, self.depth, 0, None)
        return shapes_of(model), sum(parameter.numel() for parameter in model.parameters())

    @contextmanager
    def _errors_with_size(self, width: int, depth: int) -> Iterator[None]:
        """Raise errors of transformers as one sentence that states the size."""
        try:
            yield
        except WorkbenchError:
            raise
        except Exception as error:  # The code of a model may raise any exception.
            raise self._cannot_build(width, depth, cause_of(error)) from error

    def _cannot_build(self, width: int, depth: int, reason: str) -> OptionError:
        """Create the exception for a size that cannot be built."""
        return OptionError(
            f"{type(self.config).__name__} cannot be built with width {width} and depth {depth}: {reason}; choose "
            "another size, or pass a function(width, depth, seed) that builds it."
        )

    @cached_property
    def _reads_images(self) -> bool:
        """Whether the model reads only images."""
        from transformers.models.auto import modeling_auto as auto

        kind = type(self.config)
        reads_text = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING or kind in auto.MODEL_FOR_MASKED_LM_MAPPING
        return kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and not reads_text

    @cached_property
    def _class(self) -> Any:
        return class_of(self.config)


def class_of(config: Any) -> Any:
    """Return the class of a configuration's models; one without a head receives that of its pretraining task."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    kind = type(config)
    named = config.architectures or []
    named = [named] if isinstance(named, str) else named
    classes = [getattr(transformers, name, None) for name in named if isinstance(name, str)]
    own = next((cls for cls in classes if getattr(cls, "config_class", None) is kind), None)
    without_head = _class_of(auto.MODEL_MAPPING, kind)
    if own is not None and own is not without_head:
        return own
    heads = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    ]
    if getattr(config, "is_encoder_decoder", False):  # Otherwise a class of only the decoder may be found.
        heads = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, *heads]
    found = next((cls for mapping in heads if (cls := _class_of(mapping, kind)) is not None), own or without_head)
    if found is None:
        raise OptionError(f"transformers has no model for {kind.__name__}; pass a function(width, depth, seed).")
    return found


def build_full_size(config: Any, *, seed: int, max_parameters: int) -> nn.Module | None:
    """Build a model of a configuration that describes no design; None if it is too large, or cannot be built."""
    try:
        cls = class_of(config)
        with torch.device("meta"):
            model = cls._from_config(copy.deepcopy(config))
        if sum(parameter.numel() for parameter in model.parameters()) > max_parameters:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls._from_config(copy.deepcopy(config), dtype=torch.float32)
    except Exception:  # noqa: BLE001  (the code of a model may raise any exception)
        return None


def cause_of(error: Exception) -> str:
    """Return the message of an exception of another library, in one line without a period."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The first line of a validation error states the rule, the last one the class of the error and the reason.
    is_validation = bool(lines) and lines[0].endswith(":")
    text = (lines[-1] if is_validation else lines[0]).rstrip(".") if lines else ""
    text = text if len(text) <= _MAX_CAUSE else f"{text[:_MAX_CAUSE].rsplit(' ', 1)[0]} …"
    return text if is_validation else f"{type(error).__name__}: {text}" if text else type(error).__name__


def _class_of(mapping: Any, kind: type) -> Any:
    """Return the class that an auto mapping has for a kind of configuration, the first of several; None if none."""
    if kind not in mapping:
        return None
    found = mapping[kind]
    return found[0] if isinstance(found, list | tuple) else found
