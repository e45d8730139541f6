"""Build thin models with the gains of a wide one: the product of fan-in and variance of every matrix is preserved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workbench.errors import OptionError
from workbench.models.model_sizes import model_sizes

if TYPE_CHECKING:
    from workbench.scaling.designs import Design

#: A spread is assumed to scale with the width to a power that is a multiple of this: 0, -1/2 and -1 are in use.
_STEP_OF_EXPONENT = 0.5


def matched_width(
    design: Design, width: int, depth: int | None = None, seed: int = 0, *, vocabulary: int | None = None
) -> nn.Module:
    """Build a thin fresh model whose signal and gradient gains are those of the design at its own width.

    In the limit of wide layers, the gains of a fresh network depend on the variance of each matrix times its fan-in
    alone (mean field: Poole et al., arXiv:1606.05340; Schoenholz et al., arXiv:1611.01232). Where a library draws
    weights with one fixed spread that product grows with the width, and a model that is merely thin behaves unlike the
    wide one; here each matrix is multiplied by the square root of the ratio of the two products. How spreads depend on
    width is estimated from a second model of twice the width, and so are fan-ins, where those of the design are not
    known. A head that is tied to the embedding is untied first, as the two scale differently.

    The match holds at initialization only: one learning rate has different effects on the two models.

    Args:
        design: The design at its target size.
        width: Width of the thin model.
        depth: Residual blocks; None: those of the design.
        seed: Seed of the parameters.
        vocabulary: As in `Design.build`.

    Returns:
        The model, otherwise as `Design.build` returns it: biases, gains of norms, constants and weights that begin at
        zero are unchanged, and nothing of the target's width is allocated.

    Raises:
        OptionError: If there is no model of that size, or it would be wider than the design.

    Example:
        >>> import workbench as wb
        >>> design = wb.design({"d_model": 64, "n_layers": 2})
        >>> thin = wb.scaling.matched_width(design, width=16)
        >>> thin.config.d_model, len(thin.blocks)
        (16, 2)
    """
    if width > design.width:
        raise OptionError(f"width is {width}, expected at most that of the design; choose up to {design.width}.")
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
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in embedded:
            module.weight = nn.Parameter(module.weight.detach().clone())


def _fan_in(owner: nn.Module, shape: torch.Size, thin: Tensor, wide: Tensor, n_experts: int | None) -> int:
    """Numbers that are summed for each output; 1 for a table whose rows are looked up or added.

    A bare matrix with one axis that grows with the width is such a table, unless it has a row for each expert.
    """
    n_growing = sum(a != b for a, b in zip(thin.shape, wide.shape, strict=True))
    is_bare = type(owner).__module__.split(".")[0] != "torch" and type(owner).__name__ != "Conv1D"
    has_experts = n_experts is not None and shape[0] == n_experts
    if isinstance(owner, nn.Embedding) or (is_bare and n_growing < 2 and not has_experts):
        return 1
    if type(owner).__name__ == "Conv1D":  # transformers' name for a linear map whose matrix is transposed
        return shape[0]
    return shape[-1] if has_experts else math.prod(shape[1:])


def _spread(weight: Tensor) -> float:
    return float(torch.linalg.vector_norm(weight, dtype=torch.float64)) / math.sqrt(weight.numel())


def _factor(fan_in: list[int], spread: list[float], widths: tuple[int, int, int]) -> float:
    """The factor that gives a weight of the first width the product of fan-in and variance of the last width.

    The fan-in of the last width is given as the third one, or extrapolated linearly from the first two.
    """
    thin, wider, target = widths
    if min(spread) == 0:
        return 1.0
    exponent = math.log(spread[1] / spread[0]) / math.log(wider / thin)
    exponent = _STEP_OF_EXPONENT * round(exponent / _STEP_OF_EXPONENT)
    on_line = fan_in[0] + (fan_in[1] - fan_in[0]) * (target - thin) / (wider - thin)
    inputs = fan_in[2] if len(fan_in) > 2 else on_line
    return math.sqrt(inputs / fan_in[0]) * (target / thin) ** exponent
