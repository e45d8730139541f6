"""Reparametrized weights: linear maps of the blocks with bounded operator norm, or with separate length and direction.

While a parametrization is active, a module's ``weight`` is computed from the parameters that the optimizer updates;
spectra, probes and forward passes see this effective weight. To resume a run, apply the same parametrization to its
model first. `plain_copy` returns the model to save or study.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrizations, parametrize

from workbench.errors import OptionError
from workbench.models.anatomy import read_anatomy
from workbench.models.batches import take_examples
from workbench.models.calling import on_device_of, unwrap
from workbench.models.probing import eval_mode
from workbench.models.subject import Subject
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt
from workbench.zoo import ZooModel
from workbench.zoo.module_of import module_of

#: Power iterations on a new matrix; the leading singular values of a random matrix are close together.
_FIRST_ITERATIONS = 200


@dataclass(frozen=True)
class LinearParametrization(ABC):
    """A parametrization of every linear map in the residual blocks."""

    def apply(self, model: Subject | nn.Module, inputs: Any = None) -> Callable[[], None]:
        """Apply the parametrization to a model in place; create the optimizer afterwards.

        Args:
            model: Model of the zoo, or any model whose blocks `workbench.read_anatomy` finds.
            inputs: Batch with which the blocks are found; not needed for models of the zoo.

        Returns:
            A function that removes the parametrization and keeps the effective weights. An optimizer created before
            that call cannot be used afterwards.

        Raises:
            OptionError: If the model's weights are parametrized already, its blocks hold no linear maps, the blocks
                cannot be found without inputs, or a weight is zero that `SpectralNorm` would have to scale to norm 1.
            AnatomyError: If the residual stream cannot be identified with certainty.
        """
        model = module_of(model)
        linears = list(_linear_maps(model, inputs))
        require_unparametrized(model)
        names = {module: name for name, module in model.named_modules()}
        for linear in linears:
            self._require(names[linear], linear)
        for linear in linears:
            self._register(linear)
        return lambda: unparametrize(model)

    def _require(self, name: str, linear: nn.Module) -> None:  # noqa: B027  (most accept every linear map)
        """Raise OptionError if the parametrization cannot be applied to a linear map."""

    @abstractmethod
    def _register(self, linear: nn.Module) -> None:
        """Apply the parametrization to one linear map."""


@checked
@dataclass(frozen=True)
class SpectralNorm(LinearParametrization):
    """Spectral normalization: every linear map is divided by its largest singular value (Miyato et al. 2018).

    The largest singular value becomes 1 (arXiv:1802.05957). Maps whose norm was below 1 grow: the blocks of an
    untrained model then act about as strongly as those of a trained one.

    The singular value is estimated by power iteration that starts from the direction of the last step. One iteration,
    as in the paper, is enough for small steps. Adam's first steps, however, replace the leading direction of a small
    untrained matrix: with one iteration, operator norms reached 2.5 at learning rate 0.01 and 3.4 at 0.05 (a model
    without normalization, d = 32); with eight they stayed below 1.07. ``torch.nn.utils.parametrizations.spectral_norm``
    does not iterate in eval mode, where the updated weights then had norms of up to 78. Here, spectra and evaluations
    see the weights that the next training step will use.

    Attributes:
        n_iterations: Power iterations per forward pass.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> remove = wb.baselines.SpectralNorm().apply(model)
        >>> round(torch.linalg.matrix_norm(model.blocks[0].attention.query.weight, 2).item(), 1)
        1.0

    See Also:
        `workbench.baselines.WeightNorm`: Separates length and direction and bounds nothing.
        `workbench.baselines.plain_copy`: Returns a model without parametrizations.
    """

    n_iterations: PositiveInt = 8

    def _register(self, linear: nn.Module) -> None:
        parametrize.register_parametrization(
            linear, "weight", UnitNorm(linear.get_parameter("weight"), self.n_iterations)
        )

    def _require(self, name: str, linear: nn.Module) -> None:
        if not bool(linear.get_parameter("weight").detach().any()):
            raise OptionError(f"The weight of {name} is zero and has no norm to scale to 1; initialize it differently.")


@dataclass(frozen=True)
class WeightNorm(LinearParametrization):
    """Weight normalization: each row of a linear map is a length times a direction (Salimans and Kingma 2016).

    The weights are unchanged at first (arXiv:1602.07868). Nothing is bounded; only the parametrization differs.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> n_parameters = len(list(model.parameters()))
        >>> remove = wb.baselines.WeightNorm().apply(model)
        >>> len(list(model.parameters())) - n_parameters
        6

    See Also:
        `workbench.baselines.SpectralNorm`: Bounds the operator norm.
        `workbench.baselines.plain_copy`: Returns a model without parametrizations.
    """

    def _register(self, linear: nn.Module) -> None:
        hooks = linear._load_state_dict_pre_hooks
        before = set(hooks)
        # One length per output; the Conv1D of transformers stores its weight as (in, out).
        parametrizations.weight_norm(linear, dim=0 if isinstance(linear, nn.Linear) else 1)
        for added in set(hooks) - before:  # reads files of older torch versions, and would outlast the parametrization
            del hooks[added]


class UnitNorm(nn.Module):
    """A matrix divided by its largest singular value; the direction of the iteration is kept in training mode only."""

    direction: Tensor

    def __init__(self, weight: Tensor, n_iterations: int) -> None:
        super().__init__()
        self.n_iterations = n_iterations
        start = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
        self.register_buffer("direction", start.to(weight))
        with torch.no_grad():
            self.direction.copy_(self._leading(weight, _FIRST_ITERATIONS)[1])

    def forward(self, weight: Tensor) -> Tensor:
        """Return the effective weight."""
        with torch.no_grad():
            left, right = self._leading(weight.detach(), self.n_iterations)
            if self.training:
                self.direction.copy_(right)
        return weight / torch.dot(left, weight @ right)

    def extra_repr(self) -> str:
        """Return the description in the configuration of a run."""
        return f"n_iterations={self.n_iterations}"

    def _leading(self, weight: Tensor, n_iterations: int) -> tuple[Tensor, Tensor]:
        """Estimate the leading left and right singular vectors."""
        right, transposed = self.direction, weight.T
        for _ in range(n_iterations):
            right = transposed @ (weight @ right)
            right /= right.norm()
        return normalize(weight @ right, dim=0), right


def unparametrize(model: nn.Module) -> None:
    """Remove all parametrizations of a model; its effective weights stay the same."""
    with eval_mode(model):  # in which reading a weight does not advance its power iteration
        for module in list(model.modules()):
            if parametrize.is_parametrized(module) and isinstance(module.parametrizations, nn.ModuleDict):
                for name in list(module.parametrizations):
                    parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def plain_copy(model: Subject | nn.Module) -> nn.Module:
    """Return a copy without parametrizations that computes the same function.

    The copy can be saved with `workbench.save_checkpoint` or studied.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> remove = wb.baselines.WeightNorm().apply(model)
        >>> plain = wb.baselines.plain_copy(model)
        >>> any("parametrizations" in name for name in plain.state_dict())
        False

    See Also:
        `workbench.baselines.SpectralNorm`: A parametrization.
        `workbench.save_checkpoint`: Saves the copy.
    """
    model = copy.deepcopy(module_of(model))
    for module in model.modules():
        if parametrize.is_parametrized(module):
            # torch keeps the parametrized names on a class that the copy shares, and would delete them from that class.
            shared = type(module)
            own = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
            module.__class__ = type(shared.__name__, shared.__bases__, own)
    unparametrize(model)
    return model


def is_parametrized(model: nn.Module) -> bool:
    """Return whether any weight of a model is parametrized."""
    return any(parametrize.is_parametrized(module) for module in model.modules())


def require_unparametrized(model: nn.Module) -> None:
    """Raise OptionError if a weight of a model is parametrized already."""
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise OptionError(f"The weights of {name} are parametrized already; remove that first, or use a new model.")


def _linear_maps(model: nn.Module, inputs: Any) -> Iterator[nn.Module]:
    """Yield every linear map in the residual blocks once."""
    seen: set[int] = set()
    for block in _blocks(model, inputs):
        for module in block.modules():
            is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            if is_linear and getattr(getattr(module, "weight", None), "ndim", 0) == 2 and id(module) not in seen:
                seen.add(id(module))
                yield module
    if not seen:
        raise OptionError(f"The blocks of {type(model).__name__} have no nn.Linear or Conv1D; choose another control.")


def _blocks(model: nn.Module, inputs: Any) -> list[nn.Module]:
    model = unwrap(model)
    if isinstance(model, ZooModel):
        return list(model.blocks)
    if inputs is None:
        raise OptionError(f"{type(model).__name__} is not a model of the zoo; pass inputs= to find its blocks.")
    anatomy = read_anatomy(model, on_device_of(model, take_examples(inputs, slice(0, 2))))
    return [site.module for site in anatomy.sites]
