"""Reparametrized weights: the linear maps of the blocks with bounded operator norm, or with length and direction apart.

While a parametrization is on, a module's ``weight`` is computed from what the optimizer moves; spectra, probes and
forward passes see it as it acts. A run resumes if the same parametrization is put on its model first. `plain_copy`
gives the model to save or study.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrizations, parametrize

from workbench.errors import OptionError
from workbench.models.anatomy import read_anatomy
from workbench.models.batches import take_rows
from workbench.models.calling import on_device_of
from workbench.models.wrapping import unwrap
from workbench.zoo import ZooModel
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from workbench.models.subject import Subject

#: Power iterations on a fresh matrix; a random one's leading singular values lie close together.
_FIRST_ITERATIONS = 200


@dataclass(frozen=True)
class LinearParametrization(ABC):
    """A parametrization of every linear map in the residual blocks."""

    def apply(self, model: Subject | nn.Module, inputs: Any = None) -> Callable[[], None]:
        """Apply it to a model, in place, before its optimizer is made.

        Args:
            model: Model of the zoo, or any whose blocks `workbench.read_anatomy` finds.
            inputs: Batch to find the blocks with; a model of the zoo needs none.

        Returns:
            A function that removes it; the effective weights stay the same. An optimizer made before cannot be used
            then.

        Raises:
            OptionError: If the model's weights are parametrized already, its blocks hold no linear maps, they cannot
                be found without inputs, or one of them is zero where a norm is to be 1.
            AnatomyError: If the residual stream cannot be read with certainty.
        """
        model = module_of(model)
        linears = list(_linear_maps(model, inputs))
        require_plain(model)
        names = {module: name for name, module in model.named_modules()}
        for linear in linears:
            self._require(names[linear], linear)
        for linear in linears:
            self._register(linear)
        return lambda: make_plain(model)

    def _require(self, name: str, linear: nn.Module) -> None:  # noqa: B027  (most take any)
        """Refuse a linear map to which it cannot be applied."""

    @abstractmethod
    def _register(self, linear: nn.Module) -> None:
        """Apply it to one linear map."""


@dataclass(frozen=True)
class SpectralNorm(LinearParametrization):
    """Every linear map divided by its largest singular value, which becomes 1 (Miyato et al. 2018, arXiv:1802.05957).

    Maps that were smaller grow: the blocks of a fresh model act about as strongly as those of a trained one.

    The singular value is estimated by power iteration that goes on from the last step's direction. One iteration, as in
    the paper, is enough for small steps. Adam's first ones replace the leading direction of a small fresh matrix, and
    norms reached 2.5 at rate .01 and 3.4 at .05 (no norms, d = 32); with eight they stayed below 1.07.
    ``torch.nn.utils.parametrizations.spectral_norm`` does not iterate in eval mode, where the weights just updated
    then had norms up to 78; here spectra and evaluations see what the next step of training will.

    Attributes:
        n_iterations: Power iterations a forward pass.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> remove = wb.baselines.SpectralNorm().apply(model)
        >>> round(torch.linalg.matrix_norm(model.blocks[0].attention.query.weight, 2).item(), 1)
        1.0
    """

    n_iterations: int = 8

    def __post_init__(self) -> None:
        n = self.n_iterations
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError(f"n_iterations is {n}, expected a whole number of at least 1.")

    def _register(self, linear: nn.Module) -> None:
        parametrize.register_parametrization(
            linear, "weight", UnitNorm(linear.get_parameter("weight"), self.n_iterations)
        )

    def _require(self, name: str, linear: nn.Module) -> None:
        if not bool(linear.get_parameter("weight").detach().any()):
            raise OptionError(f"The weight of {name} is zero, which no factor gives norm 1; initialize it otherwise.")


@dataclass(frozen=True)
class WeightNorm(LinearParametrization):
    """Every row of a linear map as a length times a direction (Salimans and Kingma 2016, arXiv:1602.07868).

    The weights are as before at first; nothing is bounded, only learned differently.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> n_parameters = len(list(model.parameters()))
        >>> remove = wb.baselines.WeightNorm().apply(model)
        >>> len(list(model.parameters())) - n_parameters
        6
    """

    def _register(self, linear: nn.Module) -> None:
        hooks = linear._load_state_dict_pre_hooks
        before = set(hooks)
        # One length for each output; transformers' Conv1D keeps its weight as (in, out).
        parametrizations.weight_norm(linear, dim=0 if isinstance(linear, nn.Linear) else 1)
        for added in set(hooks) - before:  # it reads files of an older torch, and would stay when the norm is taken off
            del hooks[added]


class UnitNorm(nn.Module):
    """A matrix divided by its largest singular value.

    Args:
        weight: Present value of the matrix.
        n_iterations: Power iterations at each reading; only those in training mode are kept.
    """

    direction: Tensor

    def __init__(self, weight: Tensor, n_iterations: int) -> None:
        super().__init__()
        self.n_iterations = n_iterations
        start = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
        self.register_buffer("direction", start.to(weight))
        with torch.no_grad():
            self.direction.copy_(self._leading(weight, _FIRST_ITERATIONS)[1])

    def forward(self, weight: Tensor) -> Tensor:
        """The effective weight."""
        with torch.no_grad():
            left, right = self._leading(weight.detach(), self.n_iterations)
            if self.training:
                self.direction.copy_(right)
        return weight / torch.dot(left, weight @ right)

    def extra_repr(self) -> str:
        """The description for the run's configuration."""
        return f"n_iterations={self.n_iterations}"

    def _leading(self, weight: Tensor, n_iterations: int) -> tuple[Tensor, Tensor]:
        """Estimates of the leading singular vectors."""
        right, transposed = self.direction, weight.T
        for _ in range(n_iterations):
            right = transposed @ (weight @ right)
            right /= right.norm()
        return normalize(weight @ right, dim=0), right


def make_plain(model: nn.Module) -> None:
    """Remove all parametrizations of a model; its effective weights stay the same."""
    with _still(model):
        for module in list(model.modules()):
            if parametrize.is_parametrized(module) and isinstance(module.parametrizations, nn.ModuleDict):
                for name in list(module.parametrizations):
                    parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def plain_copy(model: Subject | nn.Module) -> nn.Module:
    """A copy without parametrizations that computes the same, to save with `workbench.save_checkpoint` or to study.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=1, n_heads=2)
        >>> remove = wb.baselines.WeightNorm().apply(model)
        >>> plain = wb.baselines.plain_copy(model)
        >>> any("parametrizations" in name for name in plain.state_dict())
        False
    """
    model = copy.deepcopy(module_of(model))
    for module in model.modules():
        if parametrize.is_parametrized(module):
            # torch keeps the parametrized names on a class that the copy shares, and takes them off that class.
            shared = type(module)
            own = {name: value for name, value in vars(shared).items() if name not in ("__dict__", "__weakref__")}
            module.__class__ = type(shared.__name__, shared.__bases__, own)
    make_plain(model)
    return model


def is_parametrized(model: nn.Module) -> bool:
    """Whether any weight of a model is computed from others."""
    return any(parametrize.is_parametrized(module) for module in model.modules())


def require_plain(model: nn.Module) -> None:
    """Refuse a model that is parametrized already.

    Raises:
        OptionError: If it is.
    """
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            raise OptionError(f"The weights of {name} are parametrized already; take that off first, or start anew.")


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """In eval mode, where reading a weight does not move its power iteration."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def _linear_maps(model: nn.Module, inputs: Any) -> Iterator[nn.Module]:
    """Every linear map in the residual blocks, once."""
    seen: set[int] = set()
    for block in _blocks(model, inputs):
        for module in block.modules():
            if _is_linear(module) and id(module) not in seen:
                seen.add(id(module))
                yield module
    if not seen:
        raise OptionError(
            f"The blocks of {type(model).__name__} hold no linear maps as modules of their own, expected nn.Linear or "
            "Conv1D; choose another control for it."
        )


def _blocks(model: nn.Module, inputs: Any) -> list[nn.Module]:
    model = unwrap(model)
    if isinstance(model, ZooModel):
        return list(model.blocks)
    if inputs is None:
        raise OptionError(f"{type(model).__name__} is not of the zoo; pass inputs= to find its blocks with.")
    anatomy = read_anatomy(model, on_device_of(model, take_rows(inputs, slice(0, 2))))
    return [site.module for site in anatomy.sites]


def _is_linear(module: nn.Module) -> bool:
    weight: Tensor | None = getattr(module, "weight", None)
    return (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and getattr(weight, "ndim", 0) == 2
