"""Check that a model that was built at another size has that size, and kept none of the target's dimensions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

#: Shape of each weight, by its name.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_NUMBER = re.compile(r"\.\d+\.")
#: Matrices shrink by the square of the width's ratio. States, ranks and routers that keep their size make up little of
#: the blocks at the target's size; a part that makes up more than this share of them was not resized. A model with less
#: than the second number times as many parameters is never refused, as small sizes are rounded up.
_LARGEST_SHARE, _LARGEST_EXCESS = 0.25, 4.0
#: A size at least as large as this and as the target's width that remains in a thin model was not resized.
_LARGE = 512


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights; tied ones once."""
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def misfit(built: Shapes, target: Shapes, size: tuple[int, int], target_size: tuple[int, int]) -> str:
    """Find an error in the size of a model from the shapes of its weights.

    Args:
        built: Shapes of the model.
        target: Shapes of the same design at its own size.
        size: Requested width and depth.
        target_size: Width and depth of the target.

    Returns:
        A clause that names the error; empty if the shapes show none.
    """
    (width, depth), (of_width, of_depth) = size, target_size
    counts, of_counts = _n_blocks(built), _n_blocks(target)
    for stack, n in of_counts.items():
        if n == of_depth != depth and counts.get(stack) == of_depth:
            return f"{stack} still has {of_depth} blocks"
    in_blocks = {name: shape for name, shape in built.items() if _NUMBER.search(name)}
    if not any(width in shape for shape in in_blocks.values()):
        return "no weight of its blocks is that wide"
    if width >= of_width:
        return ""
    kept = {name: (shape, target[name]) for name, shape in in_blocks.items() if name in target}
    for name, (shape, of_shape) in kept.items():
        if len(shape) == len(of_shape) == 2 and name.endswith("weight") and shape != of_shape:
            for n, of_n in zip(shape, of_shape, strict=True):
                if n == of_n >= max(of_width, _LARGE):
                    return f"{name} is still {n} wide"
    counted = {name: (math.prod(shape), math.prod(of_shape)) for name, (shape, of_shape) in kept.items()}
    return _excess(counted, width / of_width)


def _excess(kept: Mapping[str, tuple[int, int]], ratio: float) -> str:
    """Whether the blocks have far more parameters than the ratio of the widths implies, and which weight has the most.

    Args:
        kept: Number of entries of each weight in the model and in the target.
        ratio: Width of the model over that of the target.
    """
    n, of_n = (sum(sizes) for sizes in zip(*kept.values(), strict=True)) if kept else (0, 1)
    if n <= max(_LARGEST_EXCESS, 1 + _LARGEST_SHARE / ratio) * ratio**2 * of_n:
        return ""
    worst = max(kept, key=lambda name: kept[name][0] - ratio**2 * kept[name][1])
    return f"its blocks have {n / (ratio**2 * of_n):.2g} times as many parameters as that width needs, most in {worst}"


def _n_blocks(shapes: Shapes) -> dict[str, int]:
    """Number of modules in each outermost numbered container."""
    found: dict[str, set[str]] = {}
    for name in shapes:
        if match := _NUMBER.search(name):
            found.setdefault(name[: match.start()], set()).add(match.group())
    return {stack: len(numbers) for stack, numbers in found.items()}
