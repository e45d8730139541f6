"""Narrow models with the gains of a wide one: the product of fan-in and variance of every matrix is preserved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workbench.errors import OptionError
from workbench.models.model_sizes import model_sizes
from workbench.option_checks import PositiveInt

if TYPE_CHECKING:
    from workbench.scaling.designs import Design

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
        _untie(model)
        for path, owner in model.named_modules():
            for name, weight in owner.named_parameters(recurse=False):
                path_of_weight = f"{path}.{name}".lstrip(".")
                other, shape = others.get(path_of_weight), of_design.get(path_of_weight)
                if other is not None and weight.ndim > 1:
                    shapes = [weight.shape, other.shape, *([] if shape is None else [torch.Size(shape)])]
                    inputs = [_fan_in(owner, shape, weight, other, n_experts) for shape in shapes]
                    weight.mul_(_factor(inputs, [_spread(weight), _spread(other)], (width, wider, design.width)))
    return model


def _untie(model: nn.Module) -> None:
    """Replace linear maps that are tied to an embedding by copies."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in embedded:
            module.weight = nn.Parameter(module.weight.detach().clone())


def _fan_in(owner: nn.Module, shape: torch.Size, narrow: Tensor, wide: Tensor, n_experts: int | None) -> int:
    """Return the number of terms that are summed for each output; 1 for a table whose rows are looked up or added.

    A parameter outside of a layer of torch is such a table if only one of its axes grows with the width, unless it has
    a row for each expert.
    """
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
    """Return the factor after which a weight has the product of fan-in and variance of the target width.

    Args:
        fan_in: Fan-in at each width; the third is extrapolated linearly from the first two if it is missing.
        spread: Standard deviation at the first two widths.
        widths: Width of the model, width of the second model, and target width.
    """
    narrow, wider, target = widths
    if min(spread) == 0:
        return 1.0
    exponent = math.log(spread[1] / spread[0]) / math.log(wider / narrow)
    exponent = _STEP_OF_EXPONENT * round(exponent / _STEP_OF_EXPONENT)
    on_line = fan_in[0] + (fan_in[1] - fan_in[0]) * (target - narrow) / (wider - narrow)
    inputs = fan_in[2] if len(fan_in) > 2 else on_line
    return math.sqrt(inputs / fan_in[0]) * (target / narrow) ** exponent
