"""Sources of designs: options of the zoo and functions; `transformers_source` has configurations of transformers."""

from __future__ import annotations

import copy
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from workbench.errors import OptionError
from workbench.zoo import ArchitectureConfig, build, count_parameters

#: Inner widths are multiples of this number, and so are the widths of narrowed heads.
GRANULE = 8
#: Options that are proportional to the width.
_INNER_WIDTH = re.compile(
    r"(^|_)(intermediate_size|intermediate_size_mlp|intermediate_dim|ffn_dim|ffn_hidden_size|ffn_hidden_dim|ffn_size"
    r"|n_inner|d_inner|d_ff|dff|dim_ff|mlp_dim|inner_dim|hidden_dim|lru_width|lora_rank|embedding_size|embed_proj_dim"
    r"|attention_hidden_size|pooler_output_size|pooler_hidden_size|mamba_d_ssm)$"
)
#: Options with one entry for each block, or with the indices of some blocks.
_OF_BLOCKS = re.compile(r"layer|block|attn|attention|indexer|intermediate|sparsity|windows")
#: Number of different blocks at the start of a stack.
_FIRST_BLOCKS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
#: Position of a block of another kind in each period of a mixed stack.
_OFFSETS = ("attn_layer_offset", "expert_layer_offset")
#: Chunk sizes of a scan. They affect its speed, and its results only by rounding.
_CHUNKS = ("chunk_size", "mamba_chunk_size")
LARGEST_CHUNK = 16
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")
#: Numbers of blocks of the decoder and of the encoder of a model with both.
_DECODER_DEPTH = ("num_decoder_layers", "decoder_layers")
_ENCODER_DEPTH = ("num_layers", "encoder_layers", "num_encoder_layers")
#: Fractions of a head below this are rounding errors.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Heads:
    """Options of one kind of heads: their number, groups, multiples, widths, and total width over the width."""

    counts: tuple[str, ...]
    groups: tuple[str, ...] = ()
    multiples: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    expand: str = ""


_ATTENTION_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads")
#: Options that were set for one kind are not changed by a later one.
_KINDS = (
    _Heads(("num_heads",), groups=("n_groups",), sizes=("head_dim",), expand="expand"),
    _Heads(("mamba_n_heads",), groups=("mamba_n_groups",), sizes=("mamba_d_head",), expand="mamba_expand"),
    _Heads(("n_mamba_heads",), groups=("mamba_ngroups",), sizes=("mamba_headdim",), expand="mamba_expand"),
    _Heads(("mamba_num_heads",), groups=("n_groups",), sizes=("mamba_head_dim",)),
    _Heads(_ATTENTION_HEADS,
        groups=("num_key_value_heads", "num_kv_heads", "kv_n_heads"),
        sizes=(
            "head_dim", "d_kv", "d_head", "dim_head", "kv_channels", "attention_head_dim", "attention_head_size",
            "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "rotary_dim", "query_pre_attn_scalar"),
    ),
    _Heads(("encoder_attention_heads",)),
    _Heads(("decoder_attention_heads",)),
    _Heads(("linear_num_key_heads",),
        multiples=("linear_num_value_heads",),
        sizes=("linear_key_head_dim", "linear_value_head_dim")),
    _Heads(("linear_num_heads",), sizes=("linear_head_dim",)),
    _Heads(("index_n_heads",), sizes=("index_head_dim",)),
)  # fmt: skip


def depth_of(config: Any) -> int:
    """Return the number of blocks of the measured stack, which of an encoder-decoder model is the decoder."""
    if getattr(config, "is_encoder_decoder", False):
        for name in _DECODER_DEPTH:
            if is_count(value := getattr(config, name, None)):
                return value
    return config.num_hidden_layers


def n_heads_of(config: Any) -> int | None:
    """Return the number of attention heads; None if the configuration has none."""
    for name in (*_ATTENTION_HEADS, "decoder_attention_heads"):
        if is_count(value := getattr(config, name, None)):
            return value
    return None


def rotated_fraction(config: Any) -> float:
    """Return the fraction of each head that rotary embeddings rotate; 1 by default."""
    for rope in _rope_tables(getattr(config, "rope_parameters", None)):
        if isinstance(fraction := rope.get("partial_rotary_factor"), int | float):
            return fraction
    fraction = getattr(config, "partial_rotary_factor", None)
    return fraction if isinstance(fraction, int | float) else 1.0


def resized(config: Any, width: int, depth: int, choices: int | None, *, reads_images: bool = False) -> Any:
    """Return a copy of a configuration at another size.

    Heads keep their width, and their number changes; below the width of one head there is a single narrower head. Inner
    widths and the ranks of factorized matrices are proportional to the width; the number of experts does not change.
    Options with an entry for each block keep the entries of consecutive blocks, starting at the first position with the
    largest number of different kinds.
    """
    changed = copy.deepcopy(config)
    if hasattr(changed, "quantization_config"):  # Initial parameters are not quantized.
        del changed.quantization_config
    of_width, of_depth = config.hidden_size, depth_of(config)
    if (width, depth) != (of_width, of_depth):
        _set_depth(changed, depth, of_depth)
        _set_width(changed, width, of_width)
    if choices is not None and reads_images:
        changed.num_labels = choices
    elif choices is not None:
        _set_vocabulary(changed, choices)
    return changed


def kv_heads(n_heads: int, sharing: float) -> int:
    """Return the number of key-value heads: the divisor of ``n_heads`` that is nearest to ``n_heads / sharing``."""
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    return min(divisors, key=lambda n: (abs(math.log(n * sharing / n_heads)), n))


def in_proportion(size: int, width: int, of_width: int) -> int:
    """Return an inner dimension at another width: proportional, and a multiple of 8 or of the width."""
    if width == of_width:
        return size
    if size % of_width == 0:
        return size // of_width * width
    return max(GRANULE, GRANULE * round(size * width / of_width / GRANULE))


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _set_width(config: Any, width: int, of_width: int) -> None:
    """Set the options that depend on the width."""
    name_of_width = getattr(config, "attribute_map", {}).get("hidden_size", "hidden_size")
    for part in _parts(config):
        options, done = dict(vars(part)), {name_of_width}
        for kind in _KINDS:
            _set_heads(part, kind, options, done, width, of_width)
        for name, value in options.items():
            if not _INNER_WIDTH.search(name) or name in done:
                continue
            if is_count(value):
                _set(part, name, in_proportion(value, width, of_width))
            elif isinstance(value, list | tuple) and value and all(map(is_count, value)):
                _set(part, name, type(value)(in_proportion(item, width, of_width) for item in value))
        for name in ("time_step_rank", "mamba_dt_rank"):  # "auto" in transformers is ceil(width / 16).
            if is_count(value := options.get(name)):
                is_automatic = value == math.ceil(of_width / 16)
                _set(part, name, math.ceil(width / 16) if is_automatic else in_proportion(value, width, of_width))
        for name in _CHUNKS:
            if is_count(value := options.get(name)):
                _set(part, name, min(value, LARGEST_CHUNK))
    config.hidden_size = width


def _set_heads(
    config: Any, kind: _Heads, options: Mapping[str, Any], done: set[str], width: int, of_width: int
) -> None:
    """Set the heads of one kind for the new width."""
    found = [name for name in kind.counts if is_count(options.get(name)) and name not in done]
    expand = options.get(kind.expand)
    if not found or (kind.expand and not is_count(expand)):
        return
    of_heads = options[found[0]]
    exact = of_heads * width / of_width
    n_heads, factor = max(1, int(exact + _ROUNDING)), min(1.0, exact)
    sizes = {name: options[name] for name in kind.sizes if is_count(options.get(name)) and name not in done}
    size = next(iter(sizes.values()), None)
    is_bound = False
    if size is not None and is_count(expand) and of_heads * size == expand * of_width:
        is_bound = True  # The total width of the heads must equal the expanded width exactly.
        n_heads = max(n for n in range(1, n_heads + 1) if expand * width % n == 0)
        factor = expand * width / n_heads / size
    for name in found:
        _set(config, name, n_heads)
    for name in kind.groups:
        if is_count(n_groups := options.get(name)) and name not in done:
            _set(config, name, kv_heads(n_heads, of_heads / n_groups))
    for name in kind.multiples:
        if is_count(n_others := options.get(name)):
            _set(config, name, n_heads * max(1, n_others // of_heads))
    if factor < 1 - _ROUNDING or factor > 1 + _ROUNDING:
        _set_head_sizes(config, sizes, factor, is_bound=is_bound)
    done.update(found, kind.groups, kind.multiples, sizes)


def _set_head_sizes(config: Any, sizes: Mapping[str, int], factor: float, *, is_bound: bool) -> None:
    """Set the dimensions that depend on the width of a head, if the heads change their width."""
    for name, size in sizes.items():
        exact = size * factor
        is_whole = is_bound or abs(exact - round(exact)) < _ROUNDING
        _set(config, name, round(exact) if is_whole else max(GRANULE, GRANULE * round(exact / GRANULE)))
    if "qk_head_dim" in sizes and "qk_nope_head_dim" in sizes:
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    for rope in _rope_tables(getattr(config, "rope_parameters", None)):
        for name in ("long_factor", "short_factor"):  # One number for each pair of features that rotate together.
            if isinstance(values := rope.get(name), list | tuple) and values:
                n = max(1, round(len(values) * factor))
                rope[name] = [values[i * len(values) // n] for i in range(n)]


def _rope_tables(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of rotary embeddings: one dictionary, and one for each kind of block."""
    if isinstance(parameters, dict):
        yield parameters
        yield from (value for value in parameters.values() if isinstance(value, dict))


def _set_depth(config: Any, depth: int, of_depth: int) -> None:
    """Set the options that depend on the depth."""
    options = {
        name: value
        for name, value in vars(config).items()
        if not (isinstance(value, list | tuple) and not (value and _OF_BLOCKS.search(name)))
    }
    lists = {name: value for name, value in options.items() if isinstance(value, list | tuple)}
    indices = {name: value for name, value in lists.items() if _is_increasing(value) and max(value) < of_depth}
    per_block = {name: value for name, value in lists.items() if len(value) == of_depth and name not in indices}
    start = _most_diverse(list(per_block.values()), depth, of_depth)
    for name, value in per_block.items():
        _set(config, name, type(value)(value[(start + i) % of_depth] for i in range(depth)))
    for name, value in indices.items():
        kept = [index - start for index in value if start <= index < start + depth]
        _set(config, name, type(value)(kept or [depth - 1]))
    for name in _FIRST_BLOCKS:
        if is_count(count := options.get(name)):
            _set(config, name, min(count, max(1, round(count * depth / of_depth))))
    for name in _OFFSETS:
        if is_count(count := options.get(name)):
            _set(config, name, min(count, depth - 1))
    if is_count(count := options.get("num_kv_shared_layers")):
        _set(config, "num_kv_shared_layers", min(depth - 1, round(count * depth / of_depth)))
    if not getattr(config, "is_encoder_decoder", False):
        config.num_hidden_layers = depth
        return
    has_both = any(is_count(options.get(name)) for name in _DECODER_DEPTH)
    for name in (*_ENCODER_DEPTH, *_DECODER_DEPTH):
        if is_count(count := options.get(name)):
            is_measured = name in _DECODER_DEPTH or not has_both
            _set(config, name, depth if is_measured else max(1, round(count * depth / of_depth)))


def _most_diverse(lists: Sequence[Sequence[Any]], depth: int, of_depth: int) -> int:
    """Return the first index from which ``depth`` consecutive blocks have the largest number of kinds."""
    if not lists or depth >= of_depth:
        return 0
    return max(
        range(of_depth - depth + 1),
        key=lambda start: (sum(len({repr(x) for x in values[start : start + depth]}) for values in lists), -start),
    )


def _set_vocabulary(config: Any, n: int) -> None:
    """Set the size of the vocabulary, and remove special tokens outside of it."""
    from huggingface_hub.errors import StrictDataclassError

    if not is_count(getattr(config, "vocab_size", None)):
        return
    config.vocab_size = n
    for name in _SPECIAL_TOKENS:
        token = getattr(config, name, None)
        if isinstance(token, list) or (isinstance(token, int) and token >= n):
            try:
                # A decoder needs some token to start with.
                _set(config, name, 0 if name == "decoder_start_token_id" else None)
            except StrictDataclassError:  # The configuration requires the token.
                _set(config, name, 0)


def _parts(config: Any) -> Iterator[Any]:
    """Yield the configuration and its nested configurations that describe a part of a block."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "attribute_map") and not is_count(getattr(value, "hidden_size", None)):
            yield value


def _set(config: Any, name: str, value: Any) -> None:
    """Set an option, unless it is derived from others."""
    kind = getattr(type(config), getattr(config, "attribute_map", {}).get(name, name), None)
    if not (isinstance(kind, property) and kind.fset is None):
        setattr(config, name, value)


def _is_increasing(values: Sequence[Any]) -> bool:
    """Return whether values are indices of blocks: increasing integers."""
    is_integer = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    return is_integer and all(a < b for a, b in pairwise(values))


class DesignSource(ABC):
    """Builder of the models of a design at any size; width and depth are those of the target."""

    if TYPE_CHECKING:  # Attributes of some sources, properties of others.

        @property
        def width(self) -> int: ...  # noqa: D102

        @property
        def depth(self) -> int: ...  # noqa: D102

    @property
    def width_per_head(self) -> int | None:
        """Width of the residual stream per attention head; None if there are no heads or their number is unknown."""
        return None

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary at the target size; None if the design reads no tokens or the size is unknown."""
        return None

    @property
    def n_classes(self) -> int | None:
        """Number of classes of a design that reads images and can have any number of classes; None otherwise."""
        return None

    @property
    def target_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters at the target size, by name; empty if they are unknown before a model is built."""
        return {}

    def with_images(self, side: int) -> DesignSource:
        """Return the source for square images of another side; itself if it reads none or their size is fixed."""
        del side
        return self

    @abstractmethod
    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Return a description of a size as JSON values."""

    @abstractmethod
    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a model with initial parameters; the caller preserves the global random state."""

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Return the number of parameters at a size, tied ones once; meta device unless a function chooses its own."""
        with torch.device("meta"):
            model = self.make(width, depth, 0, vocabulary)
        return sum(parameter.numel() for parameter in model.parameters())

    def nearest_width(self, width: int) -> int:
        """Return the nearest possible width (the smaller of two): a multiple of the head's width, or less than it."""
        per_head = self.width_per_head
        if per_head is None:
            return width
        if width >= per_head:
            below = width // per_head * per_head
            return below if width - below <= below + per_head - width else below + per_head
        narrow = [w for w in range(GRANULE, per_head, GRANULE) if self._is_width(w)]
        return min([*narrow, per_head], key=lambda w: abs(w - width))

    def _is_width(self, width: int) -> bool:
        """Return whether a single head can have this width."""
        del width
        return True


@dataclass(frozen=True)
class ZooSource(DesignSource):
    """A design from options of the zoo."""

    config: ArchitectureConfig

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.config.d_model

    @property
    def depth(self) -> int:
        """Number of residual blocks."""
        return self.config.n_layers

    @property
    def width_per_head(self) -> int | None:
        """Width of a head; None if there are no heads."""
        return self.config.head_dim if self.config.n_heads else None

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary; None for images."""
        return self.config.vocab_size

    def with_images(self, side: int) -> ZooSource:
        """Return the source for square images of another side; itself if it reads none."""
        if self.config.image_size is None:
            return self
        return ZooSource(ArchitectureConfig.from_dict(self.config.as_dict() | {"image_size": side}))

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Return the family and its options at a size."""
        return self.at(width, depth, self.config.seed, None).as_dict()

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a model with initial parameters; the zoo uses its own random generators."""
        return build(self.at(width, depth, seed, vocabulary))

    def count(self, width: int, depth: int, vocabulary: int | None) -> int:
        """Return the number of parameters of a model of a size, with tied parameters counted once."""
        return count_parameters(self.at(width, depth, 0, vocabulary))

    def at(self, width: int, depth: int, seed: int, vocabulary: int | None) -> ArchitectureConfig:
        """Return the configuration at a size."""
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
class FunctionSource(DesignSource):
    """A design from a function of width, depth and seed, and perhaps ``vocabulary``, that returns a model."""

    function: Callable[..., nn.Module]
    width: int
    depth: int

    def describe(self, width: int, depth: int) -> dict[str, Any]:
        """Return the name of the function."""
        del width, depth
        return {"function": getattr(self.function, "__qualname__", type(self.function).__name__)}

    def make(self, width: int, depth: int, seed: int, vocabulary: int | None) -> nn.Module:
        """Build a model with initial parameters."""
        torch.manual_seed(seed)
        has_vocabulary = "vocabulary" in inspect.signature(self.function).parameters
        options = {"vocabulary": vocabulary} if vocabulary is not None and has_vocabulary else {}
        model = self.function(width, depth, seed, **options)
        if not isinstance(model, nn.Module):
            raise OptionError(
                f"The function must return a module of width {width} and depth {depth}, got {type(model).__name__}."
            )
        return model
