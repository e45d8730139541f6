"""All optimizers of a loop as one: groups, states, hooks around their update, and the parameters that it changes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from workbench.errors import OptionError
from workbench.models.calling import acting_on_gradients, innermost
from workbench.models.probing import undisturbed
from workbench.models.readable_weights import full_tensor, local_part


def optimizers_in(given: Any) -> list[Any]:
    """Return the innermost optimizers of a loop."""
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else [given]
    found = [innermost(each) for each in values]
    wrong = [each for each in found if not (callable(getattr(each, "step", None)) and hasattr(each, "param_groups"))]
    if wrong or not found:
        raise OptionError.of(
            "optimizer",
            wrong[0] if wrong else given,
            "an optimizer of the model with step() and param_groups, or a list of them",
            remedy="pass all optimizers that update the model, or a Trainer before it trains",
        )
    return found


class JointOptimizer:
    """Optimizers that update one model, with the interface of one.

    The update begins before the first of them acts, and ends after the last one. If a loop does not call all of them,
    `end_update` has to be called when the next batch begins.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.is_updating, self.n_updates = False, 0
        self._stepped: set[int] = set()
        self._remove: list[Callable[[], None]] = []
        self._before: Callable[[Any], None] = lambda loss: None
        self._after: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """Names of the optimizers, such as "Muon and AdamW"."""
        return " and ".join(dict.fromkeys(type(each).__name__ for each in self.parts))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all optimizers."""
        return [group for each in self.parts for group in each.param_groups]

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of all optimizers."""
        return [weight for group in self.param_groups for weight in group["params"]]

    @property
    def state(self) -> _States:
        """States of all parameters that have one."""
        return _States([getattr(each, "state", {}) for each in self.parts])

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that one of the optimizers has at the moment, such as ``grad_scale``."""
        if name.startswith("_") or name not in ("grad_scale", "found_inf"):
            raise AttributeError(name)
        return next((found for each in self.parts if (found := getattr(each, name, None)) is not None), None)

    def hook(self, before: Callable[[Any], None], after: Callable[[], None]) -> None:
        """Call functions around each update."""
        self._before, self._after = before, after
        for each in self.parts:
            self._hook(each)

    def unhook(self) -> None:
        """Remove the hooks."""
        for remove in self._remove:
            remove()
        self._remove.clear()

    def follow(self, parts: Sequence[Any]) -> None:
        """Continue with other optimizers of the same parameters."""
        self.unhook()
        self.parts = list(parts)
        self.is_updating = False
        self._stepped.clear()
        self.hook(self._before, self._after)

    def end_update(self) -> None:
        """End an update in which not all optimizers acted."""
        if self.is_updating and self._stepped:
            self._end()
        self.is_updating = False

    def _hook(self, part: Any) -> None:
        # The hooks must not be compiled together with a compiled step of the optimizer.
        before, after = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        if isinstance(part, torch.optim.Optimizer):
            self._remove += [part.register_step_pre_hook(before).remove, part.register_step_post_hook(after).remove]
            return
        step, own = part.step, vars(part).get("step")

        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            changed = before(part, (part, *args), kwargs)
            if changed is not None:
                args, kwargs = changed[0][1:], changed[1]
            result = step(*args, **kwargs)
            after(part, (), {})
            return result

        def remove() -> None:
            if vars(part).get("step") is watched:
                if own is None:
                    del part.step
                else:
                    part.step = own

        part.step = watched
        self._remove.append(remove)

    def _enter(self, part: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if id(part) in self._stepped:  # the same optimizer again, so that this is another update
            self.end_update()
        has_measured = self.is_updating and bool(self._stepped)
        self.is_updating = True

        def measure(loss: Any) -> None:
            nonlocal has_measured
            if not has_measured:  # LBFGS calls its closure several times
                has_measured = True
                self._before(loss)

        return acting_on_gradients(part, args, kwargs, measure)

    def _leave(self, part: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self._stepped.add(id(part))
        if len(self._stepped) == len(self.parts):
            self._end()

    def _end(self) -> None:
        self.is_updating = False
        self.n_updates += 1
        self._stepped.clear()
        self._after()


class _States:
    """States of parameters in several optimizers."""

    def __init__(self, states: Sequence[Mapping[Any, Any]]) -> None:
        self._states = states

    def get(self, weight: Tensor, default: Any = None) -> Any:
        """Return the state of a parameter."""
        return next((each[weight] for each in self._states if weight in each), default)

    def __getitem__(self, weight: Tensor) -> Any:
        return self.get(weight, {})


def other_optimizers(parameters: Iterable[Tensor], known: Sequence[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers in memory that hold some of these parameters, other than the known ones."""
    own, found = {id(p) for p in parameters}, []
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer) and not any(each is one for one in known):
            groups = getattr(each, "param_groups", ())
            if innermost(each) is each and any(id(p) in own for group in groups for p in group["params"]):
                found.append(each)
    return found


_LOW_PRECISION = (torch.bfloat16, torch.float16)


class OptimizedParameters:
    """Parameters of a model by name, read from the tensors that the optimizer updates.

    An optimizer may hold float32 copies of parameters that the model has in bfloat16. They are matched by their values
    and shapes, in the model's order if several match. Tensors of another model are no copies, whatever their values.
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
