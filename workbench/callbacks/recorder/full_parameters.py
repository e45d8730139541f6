"""Parameters as the optimizer holds them: in full precision, and gathered from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.errors import OptionError
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import full_tensor, local_part

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class OptimizedParameters:
    """Parameters of a model by name, read from the tensors that the optimizer updates.

    An optimizer may hold float32 copies of parameters that the model has in bfloat16. They are matched by their values
    and shapes, in the model's order if several match. Tensors of another model are no copies, whatever their values.

    Args:
        model: Model without its wrappers.
        optimizer: Innermost optimizer.

    Raises:
        OptionError: If the optimizer updates no parameter of the model, nor a copy of one.
    """

    def __init__(self, model: nn.Module, optimizer: JointOptimizer) -> None:
        self.model = model
        own = {id(p): p for p in model.parameters()}
        moved = [p for group in optimizer.param_groups for p in group["params"]]
        self._of_model = own
        self._master: dict[int, Tensor] = {}
        others = [p for p in moved if id(p) not in own]
        is_moved = {id(p) for p in moved}
        if others:
            free = [p for p in own.values() if p.requires_grad and id(p) not in is_moved]
            self._master = _matched(free, others)
        self._is_moved = is_moved
        if not self._master and not (own.keys() & is_moved):
            raise OptionError(
                f"The optimizer updates no parameter of {type(model).__name__}, nor a copy of one; it may belong to "
                "another or an earlier model of the same kind, so create it from model.parameters()."
            )

    @property
    def as_model(self) -> Any:
        """The object itself, typed for readers that access parameters and modules of a model only by name."""
        return self

    def get_parameter(self, name: str) -> Tensor:
        """Return a parameter by its path in the model: gathered, detached, and computed if it is parametrized."""
        module, _, attribute = name.rpartition(".")
        owner = self.model.get_submodule(module)
        if parametrize.is_parametrized(owner, attribute):
            with undisturbed(self.model):
                return getattr(owner, attribute).detach().clone()
        return full_tensor(self.moved(self.model.get_parameter(name)))

    def get_submodule(self, name: str) -> nn.Module:
        """Return a module by its path in the model, for weights that are computed by running it."""
        return self.model.get_submodule(name)

    def moved(self, parameter: Tensor) -> Tensor:
        """Return the tensor that the optimizer updates for a parameter of the model: a copy, or the parameter."""
        return self._master.get(id(parameter), parameter).detach()

    def moved_names(self) -> dict[int, str]:
        """Return the path of the model's parameter for each tensor of the optimizer, by the id of the tensor."""
        own_id = {id(master): parameter for parameter, master in self._master.items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {key: names[own_id.get(key, key)] for key in self._is_moved if own_id.get(key, key) in names}

    @property
    def are_elsewhere(self) -> bool:
        """Whether the optimizer updates copies, or parameters that are sharded over ranks."""
        return bool(self._master) or any(hasattr(p, "to_local") for p in self._of_model.values())

    @property
    def are_coarse(self) -> bool:
        """Whether some trained parameters exist only in low precision."""
        return any(
            p.dtype in _LOW_PRECISION and id(p) not in self._master
            for p in self._of_model.values()
            if p.requires_grad and id(p) in self._is_moved
        )


def _matched(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return the copy of each parameter that has one, by the id of the parameter."""
    pairs, free = {}, list(parameters)
    for master in masters:
        fitting = [p for p in free if p.shape == master.shape and p.dtype != master.dtype]
        same = (p for p in fitting if torch.equal(local_part(master.detach()).to(p.dtype), local_part(p.detach())))
        if (found := next(same, None)) is not None:
            pairs[id(found)] = master
            free = [p for p in free if p is not found]
    return pairs
