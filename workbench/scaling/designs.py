"""One description of an architecture, from which models of any width and depth can be built."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.errors import CheckpointError, OptionError
from workbench.models.checkpoint import TOKENIZER_KEY, ZOO_KEY
from workbench.models.subject import Subject
from workbench.scaling.design_sources import DesignSource, FunctionSource, ZooSource
from workbench.scaling.known_designs import KNOWN, known_config
from workbench.scaling.transformers_source import TransformersSource, cause_of
from workbench.zoo import ArchitectureConfig


@dataclass(frozen=True)
class Design:
    """An architecture whose size can be chosen; made by `design`.

    Attributes:
        name: Name in tables and figures.
        source: Builder of its models.
        width: Width of the residual stream at the target size.
        depth: Residual blocks at the target size.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 64, "n_layers": 4})
        >>> isinstance(design, wb.scaling.Design)
        True
        >>> thin = design.build(width=16, depth=2)
        >>> thin.config.d_model, len(thin.blocks)
        (16, 2)
    """

    name: str
    source: DesignSource
    width: int
    depth: int

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary at the target size; None if the design reads no tokens, or it is not known."""
        return self.source.vocabulary

    @property
    def n_classes(self) -> int | None:
        """Classes at the target size, of a design that reads images and can have any number of them."""
        return self.source.n_classes

    def build(
        self, width: int | None = None, depth: int | None = None, seed: int = 0, *, vocabulary: int | None = None
    ) -> nn.Module:
        """Build a model with fresh random parameters, as its own library initializes them.

        Another width keeps the width of the attention heads and has fewer or more of them; a width below that of one
        head has one narrower head. The ratio of key-value heads, the ratio of the MLP and the number of experts do not
        change; sizes that Mamba derives from the width do.

        Args:
            width: Width of the residual stream; None: that of the target size.
            depth: Residual blocks; None: those of the target size.
            seed: Seed of the parameters.
            vocabulary: Size of the vocabulary, to save parameters of embeddings in thin models, or number of classes of
                a design with ``n_classes``; None: that of the design. It is ignored by a design with neither, or of a
                function that takes none.

        Returns:
            The model in training mode, on the CPU, float32; the global random state is untouched.

        Raises:
            OptionError: If there is no model of that size; the message names the nearest width, or the reason.
        """
        width, depth = self._checked(width, depth, vocabulary)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return self.source.make(width, depth, seed, vocabulary)

    def n_weights(self, width: int | None = None, depth: int | None = None, *, vocabulary: int | None = None) -> int:
        """Number of parameters of a model of a size, tied ones counted once; for arguments and errors see `build`.

        No memory is allocated, except by a function that chooses a device itself.
        """
        width, depth = self._checked(width, depth, vocabulary)
        with torch.random.fork_rng(devices=[]):
            return self.source.count(width, depth, vocabulary)

    def nearest_width(self, width: int) -> int:
        """The nearest width that a model can have; a function is assumed to accept any.

        Raises:
            OptionError: If the width is no whole number of at least 1.
        """
        _require_size("width", width)
        return self.source.nearest_width(width)

    def describe(self) -> dict[str, Any]:
        """Name, target size and everything else that decides the size, as plain values."""
        return {"name": self.name, "width": self.width, "depth": self.depth} | self.source.describe(
            self.width, self.depth
        )

    def resized(self, width: int | None = None, depth: int | None = None) -> Design:
        """The same design with another target size."""
        width, depth = self._checked(width, depth, None)
        return Design(self.name, self.source, width, depth)

    def _checked(self, width: int | None, depth: int | None, vocabulary: int | None) -> tuple[int, int]:
        width, depth = self.width if width is None else width, self.depth if depth is None else depth
        _require_size("width", width)
        _require_size("depth", depth)
        if vocabulary is not None:
            _require_size("vocabulary", vocabulary)
        nearest = self.source.nearest_width(width)
        if nearest != width:
            per_head = self.source.width_per_head
            why = "" if per_head is None else f", for each of its heads takes {per_head}"
            raise OptionError(f"{self.name} cannot be {width} wide{why}; choose {nearest}.")
        return width, depth


def design(
    source: str | os.PathLike[str] | Mapping[str, Any] | ArchitectureConfig | nn.Module | Subject | Callable | Any,
    *,
    width: int | None = None,
    depth: int | None = None,
    name: str | None = None,
) -> Design:
    """Describe an architecture so that it can be built at any size; no parameters are read, nothing is fetched.

    Args:
        source: A known name (``"gpt2"``, ``"llama-2-7b"``, ``"mixtral-8x7b"``, ``"mamba-130m"``, ``"pythia-160m"``,
            ...; `workbench.scaling.known_designs`); a ``config.json`` or a checkpoint folder that has one; a
            configuration of transformers; a `workbench.zoo.ArchitectureConfig`, or its options as a mapping; a model
            or a subject that has such a configuration; or a function of ``width``, ``depth`` and ``seed`` (and
            optionally ``vocabulary``) that returns a fresh module.
        width: Width of the residual stream at the target size; None: that of the source. A function needs it.
        depth: Residual blocks at the target size; likewise.
        name: For titles; made from the source if not given.

    Raises:
        OptionError: If the source describes no architecture, or not one of the target size.
        CheckpointError: If there is no such name or file, or the file is damaged.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 64, "n_layers": 4})
        >>> design.width, design.depth
        (64, 4)
        >>> design.n_weights(width=128) > design.n_weights()
        True
    """
    if isinstance(source, Design):
        found, known_as = source.source, source.name
        width, depth = source.width if width is None else width, source.depth if depth is None else depth
    elif isinstance(source, str | os.PathLike):
        found, known_as = _from_name_or_file(source)
    else:
        found, known_as = _from_object(source, width, depth)
    whole = Design(name or known_as, found, found.width, found.depth)
    return whole.resized(width, depth)


def _from_object(source: Any, width: int | None, depth: int | None) -> tuple[DesignSource, str]:
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
            f"{type(source).__name__} has no configuration that says how to build it at another size; pass a "
            "function(width, depth, seed) that builds it."
        )
    if isinstance(source, Mapping):
        return _from_options(source)
    if _is_of_transformers(source):
        return TransformersSource(source), source.model_type
    if callable(source):
        if width is None or depth is None:
            raise OptionError("A function has no size of its own; pass the target's width= and depth= with it.")
        _require_size("width", width)
        _require_size("depth", depth)
        return FunctionSource(source, width, depth), getattr(source, "__name__", type(source).__name__)
    raise OptionError(
        f"A {type(source).__name__} describes no architecture, expected a name, a config.json, a configuration, "
        "options of the zoo or a function(width, depth, seed)."
    )


def _from_name_or_file(source: str | os.PathLike[str]) -> tuple[DesignSource, str]:
    path, text = Path(source).expanduser(), os.fspath(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path.parent} has no config.json, so it is no checkpoint folder; pass another.")
    if path.is_file():
        return _from_file(path)
    config = known_config(text)
    if config is not None:
        return TransformersSource(config), text.rsplit("/", 1)[-1]
    near = difflib.get_close_matches(text.lower().rsplit("/", 1)[-1], KNOWN, n=1, cutoff=0.0)
    raise CheckpointError(
        f"'{text}' is neither a file here nor a design known by name; the nearest name is '{near[0]}', or pass the "
        "path of a config.json."
    )


def transformers_config(source: Any) -> Any:
    """The configuration of transformers that a source describes, of one stack of blocks or not; None: it has none.

    Args:
        source: A ``config.json`` or a folder that has one, a configuration, or its options as a mapping.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        path = path / "config.json" if path.is_dir() else path
        source = _options_in(path) if path.is_file() else None
    if isinstance(source, Mapping) and "model_type" in source:
        return _config_of(source)
    return source if _is_of_transformers(source) else None


def _from_file(path: Path) -> tuple[DesignSource, str]:
    options = _options_in(path)
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return _from_options(options)[0], str(options.get("_name_or_path") or name).rsplit("/", 1)[-1]


def _options_in(path: Path) -> dict[str, Any]:
    try:
        options = json.loads(path.read_text())
        if not isinstance(options, dict):
            raise ValueError("it holds no table of options")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is no valid configuration ({error}); fetch it again.") from error
    return options


def _from_options(options: Mapping[str, Any]) -> tuple[DesignSource, str]:
    """Read options of a configuration file: the zoo's with its key or a family, transformers' with model_type."""
    options = dict(options)
    if ZOO_KEY in options:
        options["family"] = options.pop(ZOO_KEY)
        options.pop(TOKENIZER_KEY, None)
    if "model_type" not in options and {"architectures", "transformers_version"} & options.keys():
        raise OptionError(
            "The configuration of a transformers model says no model_type, expected one such as 'llama'; add it."
        )
    if "model_type" not in options:
        own = ArchitectureConfig.from_dict(options)
        return ZooSource(own), own.title
    return TransformersSource(_config_of(options)), str(options["model_type"])


def _config_of(options: Mapping[str, Any]) -> Any:
    import transformers

    options = dict(_with_floats(options))
    kind = options.pop("model_type")
    try:
        return transformers.AutoConfig.for_model(kind, **options)
    except Exception as error:  # of any kind: each configuration checks its options in its own way
        raise OptionError(
            f"transformers has no architecture '{kind}' of these options ({cause_of(error)}); correct them."
        ) from error


def _with_floats(value: Any) -> Any:
    """The same with the numbers that JSON does not have, such as infinity, which transformers writes as a table."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(item) for name, item in value.items()}
    return type(value)(map(_with_floats, value)) if isinstance(value, list | tuple) else value


def _is_of_transformers(config: Any) -> bool:
    """Whether it is a configuration of transformers, without importing transformers."""
    return any(cls.__module__.startswith("transformers.") for cls in type(config).__mro__)


def _require_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} is {value!r}, expected a whole number of at least 1.")
