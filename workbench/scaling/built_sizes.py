"""Check that a model built at another size has that size, and has kept no dimension of the target size."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

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
    """Find an error in the size of a model from the shapes of its parameters.

    Args:
        built: Shapes of the model.
        target: Shapes of the same design at its target size.
        size: Requested width and depth.
        target_size: Target width and depth.

    Returns:
        A clause that describes the error; empty if there is none.
    """
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
    counted = {name: (math.prod(shape), math.prod(of_shape)) for name, (shape, of_shape) in kept.items()}
    return _excess(counted, width / of_width)


def _excess(kept: Mapping[str, tuple[int, int]], ratio: float) -> str:
    """Return a clause if the blocks have far more parameters than expected for the width; empty otherwise.

    Args:
        kept: Number of entries of each parameter in the model and in the target.
        ratio: Width of the model over the target width.
    """
    n, of_n = (sum(sizes) for sizes in zip(*kept.values(), strict=True)) if kept else (0, 1)
    if n <= max(_MAX_EXCESS, 1 + _MAX_FRACTION / ratio) * ratio**2 * of_n:
        return ""
    worst = max(kept, key=lambda name: kept[name][0] - ratio**2 * kept[name][1])
    return f"its blocks have {n / (ratio**2 * of_n):.2g} times as many parameters as that width needs, most in {worst}"


def _n_blocks(shapes: Shapes) -> dict[str, int]:
    """Return the number of modules in each outermost numbered container."""
    found: dict[str, set[str]] = {}
    for name in shapes:
        if match := _NUMBER.search(name):
            found.setdefault(name[: match.start()], set()).add(match.group())
    return {stack: len(numbers) for stack, numbers in found.items()}
