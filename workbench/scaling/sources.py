"""What a design is made from: options of the zoo, a configuration of transformers, or a function."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.errors import ThresholdError
from workbench.subjects.zoo import ArchitectureConfig, build, count_parameters

#: Widths narrower than one head, and inner widths, are multiples of this.
_GRANULE = 8
#: Options of transformers' configurations that grow in proportion to the width.
_PROPORTIONAL = (
    "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size",
    "word_embed_proj_dim",
)  # fmt: skip
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Source(ABC):
    """Where the models of a design come from.

    Attributes:
        width: Of the residual stream at the target size.
        depth: Residual blocks at the target size.
        width_per_head: Width of the stream for each attention head; None: there are no heads, or unknown ones.
    """

    width: int
    depth: int
    width_per_head: int | None = None

    @property
    def vocabulary(self) -> int | None:
        """Tokens at the target size; None: it reads none, or it is not known."""
        return None

    @abstractmethod
    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """What is known of a size, as plain values."""

    @abstractmethod
    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """A fresh model; the caller keeps the global random state."""

    @abstractmethod
    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Its weights, tied ones once."""

    def nearest_width(self, width: int) -> int:
        """The nearest width that a model can have; of two equally near the smaller.

        A multiple of the width per head, so that heads stay as wide as they are; or, below that, one narrower head.
        """
        per_head = self.width_per_head
        if per_head is None:
            return width
        if width >= per_head:
            below = width // per_head * per_head
            return below if width - below <= below + per_head - width else below + per_head
        narrow = [*range(_GRANULE, per_head, _GRANULE), per_head]
        return min(narrow, key=lambda w: abs(w - width))


@dataclass(frozen=True)
class ZooSource(Source):
    """Options of the zoo."""

    config: ArchitectureConfig

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.config.d_model

    @property
    def depth(self) -> int:
        """Residual blocks."""
        return self.config.n_layers

    @property
    def width_per_head(self) -> int | None:
        """Width of a head."""
        return self.config.head_dim if self.config.n_heads else None

    @property
    def vocabulary(self) -> int | None:
        """Tokens; None for images."""
        return self.config.vocab_size

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """The family and its options."""
        return self.at(width, depth, self.config.seed, None).as_dict()

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """See `Source`; the zoo has generators of its own."""
        return build(self.at(width, depth, seed, vocabulary))

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """See `Source`."""
        return count_parameters(self.at(width, depth, 0, vocabulary))

    def at(self, width: int, depth: int, seed: int, vocabulary: int | None) -> ArchitectureConfig:
        """The configuration at a size."""
        options = self.config.as_dict() | {"d_model": width, "n_layers": depth, "seed": seed}
        if self.config.n_heads:
            options["n_heads"] = max(1, width // self.config.head_dim)
            if self.config.n_kv_heads is not None:
                sharing = self.config.n_heads / self.config.n_kv_heads
                options["n_kv_heads"] = kv_heads(options["n_heads"], sharing)
        if options.get("mlp_width") is not None:
            options["mlp_width"] = in_proportion(options["mlp_width"], width, self.width)
        if vocabulary is not None and self.config.vocab_size is not None:
            options["vocab_size"] = vocabulary
        return ArchitectureConfig.from_dict(options)


@dataclass(frozen=True)
class TransformersSource(Source):
    """A configuration of transformers.

    Raises:
        ThresholdError: If it does not say its width and depth.
    """

    config: Any

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers"):
            value = getattr(self.config, name, None)
            if not isinstance(value, int):
                raise ThresholdError(
                    f"{type(self.config).__name__} has no {name}, expected a model of one stack of equal blocks; "
                    "pass a function(width, depth, seed) that builds it."
                )

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.config.hidden_size

    @property
    def depth(self) -> int:
        """Residual blocks."""
        return self.config.num_hidden_layers

    @property
    def width_per_head(self) -> int | None:
        """Width of the stream over the number of heads."""
        n_heads = self._of("num_attention_heads")
        return self.width // n_heads if n_heads else None

    @property
    def vocabulary(self) -> int | None:
        """Tokens."""
        return self._of("vocab_size")

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """The options that decide the size, by transformers' names."""
        config = self.at(width, depth, None)
        names = (
            "model_type", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", *_PROPORTIONAL,
            "num_local_experts", "num_experts", "num_experts_per_tok", "state_size", "expand", "time_step_rank",
            "max_position_embeddings", "tie_word_embeddings", "initializer_range",
        )  # fmt: skip
        return {name: value for name in names if (value := getattr(config, name, None)) is not None}

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """See `Source`."""
        config = self.at(width, depth, vocabulary)
        torch.manual_seed(seed)
        return self._build(config)

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """See `Source`."""
        config = self.at(width, depth, vocabulary)
        with torch.device("meta"):
            model = self._build(config)
        return sum(weight.numel() for weight in model.parameters())

    def at(self, width: int, depth: int, vocabulary: int | None) -> Any:
        """The configuration at a size."""
        if (width, depth, vocabulary) == (self.width, self.depth, None):
            return copy.deepcopy(self.config)
        config = copy.deepcopy(self.config)
        changes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": depth}
        if self.width_per_head:
            n_heads = self._of("num_attention_heads")
            changes["num_attention_heads"] = max(1, width // self.width_per_head)
            if n_kv_heads := self._of("num_key_value_heads"):
                changes["num_key_value_heads"] = kv_heads(changes["num_attention_heads"], n_heads / n_kv_heads)
            if (head_dim := self._of("head_dim")) is not None and (width < head_dim == self.width_per_head):
                changes["head_dim"] = width
        for name in _PROPORTIONAL:
            if isinstance(value := self._of(name), int):
                changes[name] = in_proportion(value, width, self.width)
        if isinstance(rank := self._of("time_step_rank"), int):
            is_automatic = rank == math.ceil(self.width / 16)
            changes["time_step_rank"] = (
                math.ceil(width / 16) if is_automatic else in_proportion(rank, width, self.width)
            )
        for name, value in vars(config).items():  # one entry a block
            if isinstance(value, list) and len(value) == self.depth and name != "architectures":
                changes[name] = [value[i % self.depth] for i in range(depth)]
        if vocabulary is not None and self.vocabulary is not None:
            changes["vocab_size"] = vocabulary
            for name in _SPECIAL_TOKENS:
                token = self._of(name)
                if isinstance(token, list) or (isinstance(token, int) and token >= vocabulary):
                    changes[name] = None
        for name, value in changes.items():
            setattr(config, name, value)
        return config

    def _of(self, name: str) -> Any:
        return getattr(self.config, name, None)

    def _build(self, config: Any) -> nn.Module:
        import transformers

        for architecture in config.architectures or []:
            if hasattr(transformers, architecture):
                return getattr(transformers, architecture)._from_config(config, dtype=torch.float32)
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = transformers.AutoModelForCausalLM if type(config) in causal else transformers.AutoModel
        return kind.from_config(config, dtype=torch.float32)


@dataclass(frozen=True)
class FunctionSource(Source):
    """A function from width, depth and seed to a model.

    Its vocabulary can be cut where it takes a ``vocabulary``; otherwise it stays what the function makes it.
    """

    function: Callable[..., nn.Module]
    width: int
    depth: int

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """The function's name."""
        del width, depth
        return {"function": getattr(self.function, "__qualname__", type(self.function).__name__)}

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """See `Source`.

        Raises:
            ThresholdError: If the function returns no module.
        """
        torch.manual_seed(seed)
        takes_it = "vocabulary" in inspect.signature(self.function).parameters
        more = {"vocabulary": vocabulary} if vocabulary is not None and takes_it else {}
        model = self.function(width, depth, seed, **more)
        if not isinstance(model, nn.Module):
            raise ThresholdError(
                f"The function returned a {type(model).__name__}, expected a torch module of width {width} and depth "
                f"{depth}; return the model."
            )
        return model

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """See `Source`; memory is used where the function asks for a device of its own."""
        with torch.device("meta"):
            model = self.make(width, depth, 0, vocabulary)
        return sum(weight.numel() for weight in model.parameters())


def kv_heads(n_heads: int, sharing: float) -> int:
    """Key-value heads for so many query heads: as nearly as can be one for each ``sharing`` of them, a divisor."""
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    return min(divisors, key=lambda n: (abs(math.log(n * sharing / n_heads)), n))


def in_proportion(size: int, width: int, of_width: int) -> int:
    """An inner size at another width: in proportion, rounded to a multiple of 8 where it changes."""
    if width == of_width:
        return size
    return max(_GRANULE, _GRANULE * round(size * width / of_width / _GRANULE))
