"""Designs: descriptions of architectures from which models of any width and depth can be built."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import CheckpointError, OptionError
from workbench.io.files import FileKind, as_path
from workbench.models.checkpoint import TOKENIZER_KEY, ZOO_KEY
from workbench.models.model_sizes import model_sizes
from workbench.models.state_files import read_config
from workbench.models.subject import Subject
from workbench.option_kinds import PositiveInt
from workbench.scaling.design_sources import DesignSource, FunctionSource, ZooSource
from workbench.scaling.known_designs import KNOWN, known_config
from workbench.scaling.transformers_source import TransformersSource, cause_of
from workbench.zoo import ArchitectureConfig

_FILE = FileKind("a configuration", "pass an existing config.json, or download it again", CheckpointError, "source")


@dataclass(frozen=True)
class Design:
    """An architecture that can be built at several sizes; created by `design`.

    Attributes:
        name: Name in tables and figures.
        source: Builder of the models.
        width: Width of the residual stream at the target size.
        depth: Number of residual blocks at the target size.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 64, "n_layers": 4})
        >>> design.name, design.width, design.depth
        ('pre_ln transformer', 64, 4)

    See Also:
        `workbench.design`: Creates a design.
        `workbench.scaling.matched_width`: Builds a narrow model with the gains of a wide one.
    """

    name: str
    source: DesignSource
    width: int
    depth: int

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary at the target size; None if the design reads no tokens or the size is unknown."""
        return self.source.vocabulary

    @property
    def n_classes(self) -> int | None:
        """Number of classes of a design that reads images and can have any number of classes; None otherwise."""
        return self.source.n_classes

    def build(
        self,
        width: PositiveInt | None = None,
        depth: PositiveInt | None = None,
        seed: int = 0,
        *,
        vocabulary: PositiveInt | None = None,
    ) -> nn.Module:
        """Build a model with random parameters from the initialization of its library.

        At another width the attention heads keep their width, and their number changes; below the width of one head
        there is a single narrower head. The ratio of key-value heads, the ratio of the MLP and the number of experts do
        not change; dimensions that Mamba derives from the width do.

        Args:
            width: Width of the residual stream; None uses the target width.
            depth: Number of residual blocks; None uses the target depth.
            seed: Seed of the parameters.
            vocabulary: Size of the vocabulary, which reduces the embeddings of narrow models, or the number of classes
                of a design with ``n_classes``; None uses that of the design. Ignored by a design with neither, and by a
                function without this parameter.

        Returns:
            The model in training mode, on the CPU, in float32; the global random state is not changed.

        Raises:
            OptionError: If there is no model of that size; the message states the nearest width or the reason.
        """
        width, depth = self._checked(width, depth)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return self.source.make(width, depth, seed, vocabulary)

    def n_weights(
        self,
        width: PositiveInt | None = None,
        depth: PositiveInt | None = None,
        *,
        vocabulary: PositiveInt | None = None,
    ) -> int:
        """Return the number of parameters of a model, with tied parameters counted once.

        No memory is allocated, except by a function that itself chooses a device. Arguments and errors as in `build`.
        """
        width, depth = self._checked(width, depth)
        with torch.random.fork_rng(devices=[]):
            return self.source.count(width, depth, vocabulary)

    def nearest_width(self, width: PositiveInt) -> int:
        """Return the nearest width that a model can have; a function is assumed to accept any width."""
        return self.source.nearest_width(width)

    def describe(self) -> dict[str, Any]:
        """Return name, target size and all options that determine the size, as JSON values."""
        return {"name": self.name, "width": self.width, "depth": self.depth} | self.source.describe(
            self.width, self.depth
        )

    def resized(self, width: PositiveInt | None = None, depth: PositiveInt | None = None) -> Design:
        """Return the same design with another target size."""
        width, depth = self._checked(width, depth)
        return Design(self.name, self.source, width, depth)

    def _checked(self, width: int | None, depth: int | None) -> tuple[int, int]:
        """Return width and depth of a model, after a check."""
        width, depth = self.width if width is None else width, self.depth if depth is None else depth
        nearest = self.source.nearest_width(width)
        if nearest != width:
            per_head = self.source.width_per_head
            why = "" if per_head is None else f", because each head takes a width of {per_head}"
            raise OptionError(f"{self.name} cannot have a width of {width}{why}; choose {nearest}.")
        return width, depth


def design(
    source: str | os.PathLike[str] | Mapping[str, Any] | ArchitectureConfig | nn.Module | Subject | Callable | Any,
    *,
    width: PositiveInt | None = None,
    depth: PositiveInt | None = None,
    name: str | None = None,
) -> Design:
    """Create a design: a description of an architecture that can be built at any size.

    No parameters are read and nothing is downloaded.

    Args:
        source: A known name (``"gpt2"``, ``"llama-2-7b"``, ``"mixtral-8x7b"``, ``"mamba-130m"``, ``"pythia-160m"``,
            ...; `workbench.scaling.known_designs`); a ``config.json`` or a checkpoint folder that contains one; a
            configuration of transformers; a `workbench.zoo.ArchitectureConfig`, or its options as a mapping; a model
            or subject with such a configuration; or a function of ``width``, ``depth`` and ``seed`` (and optionally
            ``vocabulary``) that returns a module with initial parameters.
        width: Width of the residual stream at the target size; None uses that of the source. Required for a function.
        depth: Number of residual blocks at the target size; None uses that of the source. Required for a function.
        name: Name for titles; None uses a name from the source.

    Raises:
        OptionError: If the source describes no architecture, or cannot have the target size.
        CheckpointError: If there is no such name or file, or the file is damaged.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 64, "n_layers": 4})
        >>> design.width, design.depth
        (64, 4)
        >>> design.n_weights(width=128) > design.n_weights()
        True

    See Also:
        `workbench.scaling.Design`: Describes the result.
        `workbench.assess`: Assesses a design before training.
    """
    if isinstance(source, Design):
        found, default_name = source.source, source.name
        width, depth = source.width if width is None else width, source.depth if depth is None else depth
    elif isinstance(source, str | os.PathLike):
        found, default_name = _from_name_or_file(source)
    else:
        found, default_name = _from_object(source, width, depth)
    return Design(name or default_name, found, found.width, found.depth).resized(width, depth)


def _from_object(source: Any, width: int | None, depth: int | None) -> tuple[DesignSource, str]:
    """Return the source of a design, and its name, from a configuration, options, a model or a function."""
    if isinstance(source, Subject):
        return _from_object(source.model, width, depth)[0], source.name
    if isinstance(source, ArchitectureConfig):
        return ZooSource(source), source.title
    if isinstance(source, nn.Module):
        config = getattr(source, "config", None)
        if isinstance(config, ArchitectureConfig):
            return _from_object(config, width, depth)
        if _is_of_transformers(config):
            return _from_object(config, width, depth)[0], type(source).__name__
        raise OptionError(
            f"{type(source).__name__} has no configuration from which it can be built at another size; pass a "
            "function(width, depth, seed) that builds it."
        )
    if isinstance(source, Mapping):
        return _from_options(source)
    if _is_of_transformers(source):
        return TransformersSource(source), source.model_type
    if callable(source):
        if width is None or depth is None:
            raise OptionError("A function has no target size; pass wb.design(..., width=, depth=).")
        return FunctionSource(source, width, depth), getattr(source, "__name__", type(source).__name__)
    raise OptionError.of(
        "source", source, "a name, a config.json, a configuration, options of the zoo or a function(width, depth, seed)"
    )


def _from_name_or_file(source: str | os.PathLike[str]) -> tuple[DesignSource, str]:
    """Return the source of a design, and its name, from a known name, a configuration file or a checkpoint folder."""
    path, text = as_path(source, "source"), os.fspath(source)
    with _FILE.reading(path):
        path = path.expanduser()
        if path.exists():
            path = path / "config.json" if path.is_dir() else path
            options = read_config(path)
            name = path.parent.resolve().name if path.name == "config.json" else path.stem
            return _from_options(options)[0], str(options.get("_name_or_path") or name).rsplit("/", 1)[-1]
    if (config := known_config(text)) is not None:
        return TransformersSource(config), text.rsplit("/", 1)[-1]
    near = difflib.get_close_matches(text.lower().rsplit("/", 1)[-1], KNOWN, n=1, cutoff=0.0)
    raise CheckpointError(
        f"'{text}' is neither an existing file nor the name of a known design; the nearest name is '{near[0]}', or "
        "pass the path of a config.json."
    )


def transformers_config(source: Any) -> Any:
    """Return the configuration of transformers that a source describes; None if it has none."""
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        path = path / "config.json" if path.is_dir() else path
        source = read_config(path) if path.is_file() else None
    if isinstance(source, Mapping) and "model_type" in source:
        return _config_of(source)
    return source if _is_of_transformers(source) else None


def _from_options(options: Mapping[str, Any]) -> tuple[DesignSource, str]:
    """Return the source of a design, and its name, from options of the zoo or, with model_type, of transformers."""
    options = dict(options)
    if ZOO_KEY in options:
        options["family"] = options.pop(ZOO_KEY)
        options.pop(TOKENIZER_KEY, None)
    if "model_type" not in options and {"architectures", "transformers_version"} & options.keys():
        raise OptionError("The configuration of a transformers model has no model_type; add it, such as 'llama'.")
    if "model_type" not in options:
        config = ArchitectureConfig.from_dict(options)
        return ZooSource(config), config.title
    return TransformersSource(_config_of(options)), str(options["model_type"])


def _config_of(options: Mapping[str, Any]) -> Any:
    """Create a configuration of transformers from its options."""
    import transformers

    options = dict(_with_floats(options))
    kind = options.pop("model_type")
    try:
        return transformers.AutoConfig.for_model(kind, **options)
    except Exception as error:  # Each configuration validates its options in its own way.
        raise OptionError(
            f"transformers has no architecture '{kind}' with these options ({cause_of(error)}); correct them."
        ) from error


def _with_floats(value: Any) -> Any:
    """Convert numbers that JSON does not support, such as infinity, which transformers writes as an object."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(item) for name, item in value.items()}
    return type(value)(map(_with_floats, value)) if isinstance(value, list | tuple) else value


def _is_of_transformers(config: Any) -> bool:
    """Return whether an object is a configuration of transformers, without importing transformers."""
    return any(cls.__module__.startswith("transformers.") for cls in type(config).__mro__)


#: The standard deviation is assumed to scale with a power of the width that is a multiple of this, such as 0 or -1/2.
_STEP_OF_EXPONENT = 0.5


def matched_width(
    design: Design,
    width: PositiveInt,
    depth: PositiveInt | None = None,
    seed: int = 0,
    *,
    vocabulary: PositiveInt | None = None,
) -> nn.Module:
    """Build a narrow model whose initial signal and gradient gains are those of the design at its target width.

    In the limit of wide layers, the gains of a network at initialization depend only on the product of variance and
    fan-in of each matrix (mean field theory: Poole et al., arXiv:1606.05340; Schoenholz et al., arXiv:1611.01232). If a
    library initializes matrices with a constant standard deviation, this product grows with the width, and an ordinary
    narrow model behaves differently from the wide one. Here each matrix is multiplied by the square root of the ratio
    of the two products. The dependence of the standard deviation on the width is estimated from a second model of twice
    the width, and so is the fan-in if that of the design is unknown. A head that is tied to the embedding is untied
    first, because the two scale differently.

    The match holds only at initialization: the same learning rate has different effects on the two models.

    Args:
        design: The design at its target size.
        width: Width of the narrow model.
        depth: Number of residual blocks; None uses that of the design.
        seed: Seed of the parameters.
        vocabulary: As in `Design.build`.

    Returns:
        The model, otherwise as returned by `Design.build`: biases, gains of norms, constants and matrices that are
        initially zero are unchanged. Nothing of the target width is allocated.

    Raises:
        OptionError: If there is no model of that size, or it would be wider than the design.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 64, "n_layers": 2})
        >>> narrow = wb.scaling.matched_width(design, width=16)
        >>> narrow.config.d_model, len(narrow.blocks)
        (16, 2)

    See Also:
        `workbench.scaling.Design`: Builds narrow models with unmodified initialization.
        `workbench.samples.open`: Loads the recorded accuracy of the match.
    """
    if width > design.width:
        raise OptionError.of("width", width, f"at most {design.width}, the width of the design")
    model = design.build(width, depth, seed, vocabulary=vocabulary)
    if width == design.width:
        return model
    wider = design.nearest_width(2 * width)
    second = design.build(wider, depth, seed, vocabulary=vocabulary)
    others = dict(second.named_parameters(remove_duplicate=False))
    of_design = design.source.target_shapes if design.width == design.source.width else {}
    n_experts = model_sizes(model).n_experts
    with torch.no_grad():
        embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        for module in model.modules():
            if isinstance(module, nn.Linear) and id(module.weight) in embedded:  # tied
                module.weight = nn.Parameter(module.weight.detach().clone())
        for path, owner in model.named_modules():
            for name, weight in owner.named_parameters(recurse=False):
                path_of_weight = f"{path}.{name}".lstrip(".")
                other, shape = others.get(path_of_weight), of_design.get(path_of_weight)
                if other is not None and weight.ndim > 1:
                    shapes = [weight.shape, other.shape, *([] if shape is None else [torch.Size(shape)])]
                    inputs = [_fan_in(owner, shape, weight, other, n_experts) for shape in shapes]
                    weight.mul_(_factor(inputs, [_spread(weight), _spread(other)], (width, wider, design.width)))
    return model


def _fan_in(owner: nn.Module, shape: torch.Size, narrow: Tensor, wide: Tensor, n_experts: int | None) -> int:
    """Return the terms summed for each output; 1 for tables, whose rows are looked up or added."""
    n_growing = sum(a != b for a, b in zip(narrow.shape, wide.shape, strict=True))
    is_bare = type(owner).__module__.split(".")[0] != "torch" and type(owner).__name__ != "Conv1D"
    has_experts = n_experts is not None and shape[0] == n_experts
    if isinstance(owner, nn.Embedding) or (is_bare and n_growing < 2 and not has_experts):
        return 1
    if type(owner).__name__ == "Conv1D":  # In transformers this is a linear map with a transposed matrix.
        return shape[0]
    return shape[-1] if has_experts else math.prod(shape[1:])


def _spread(weight: Tensor) -> float:
    """Return the root mean square of a weight."""
    return float(torch.linalg.vector_norm(weight, dtype=torch.float64)) / math.sqrt(weight.numel())


def _factor(fan_in: list[int], spread: list[float], widths: tuple[int, int, int]) -> float:
    """Return the factor after which a weight has the product of fan-in and variance of the target width."""
    narrow, wider, target = widths
    if min(spread) == 0:
        return 1.0
    exponent = math.log(spread[1] / spread[0]) / math.log(wider / narrow)
    exponent = _STEP_OF_EXPONENT * round(exponent / _STEP_OF_EXPONENT)
    on_line = fan_in[0] + (fan_in[1] - fan_in[0]) * (target - narrow) / (wider - narrow)
    inputs = fan_in[2] if len(fan_in) > 2 else on_line
    return math.sqrt(inputs / fan_in[0]) * (target / narrow) ** exponent
