"""KSS at work on one model: what is done around each optimizer step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from workbench.errors import SnapshotError, ThresholdError
from workbench.spectral.moments import SnapshotMoments
from workbench.subjects.anatomy import Anatomy, read_anatomy
from workbench.subjects.batches import Batches, TokenSelection, count_rows, take_rows
from workbench.subjects.capture import StreamWatcher, empty_moments
from workbench.subjects.probing import call_model, undisturbed, unwrap, watch
from workbench.training.kss.penalty import LayerPenalty, layer_penalty

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.training.kss.control import KSS, Control


@dataclass(frozen=True)
class Shaping:
    """What KSS did in one step.

    Attributes:
        step: Optimizer steps done before this one.
        control: The controls that the step used.
        layers: Layers looked at; empty where nothing was due.
        penalty: Mean penalty of the layers that took part; NaN if none did.
        spectral_radius: Largest over the layers looked at; NaN if there is no spectrum.
        near_unit_mass: Mean over the layers looked at; NaN if there is no spectrum.
        skipped: Why layers were left out although they were due: layer -> reason.
        n_acting: Layers whose gradient reached the weights.
    """

    step: int
    control: Control
    layers: tuple[int, ...] = ()
    penalty: float = math.nan
    spectral_radius: float = math.nan
    near_unit_mass: float = math.nan
    skipped: Mapping[int, str] | None = None
    n_acting: int = 0

    def monitors(self) -> dict[str, float]:
        """The numbers of the step; names as in ``schema.MONITORS``."""
        return {
            "kss_enabled": self.control.enabled,
            "kss_strength": self.control.strength,
            "kss_interval": self.control.interval,
            "kss_gamma": self.control.gamma,
            "kss_penalty": self.penalty,
            "kss_spectral_radius": self.spectral_radius,
            "kss_near_unit_mass": self.near_unit_mass,
            "kss_acting": self.n_acting,
            "kss_skipped": len(self.skipped or ()),
        }


class Shaper:
    """KSS attached to a model and an optimizer; made by `KSS.attach`.

    The model's inputs are remembered by a hook. When a step is due, hooks on the optimizer run a few rows of them
    through the model once more, in eval mode, and let the gradient of the penalty act on the weights. A pass of its own
    makes KSS independent of how the loss is scaled, accumulated, recomputed or reduced; the task's loss and gradient
    norm stay what they are without it.

    Attributes:
        step: Optimizer steps done.
        last: What was done in the last step; None before the first.
        n_skipped: Layers left out although they were due, by reason, over all steps.
    """

    def __init__(self, kss: KSS, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.kss = kss
        self.model = _bare(model)
        self._is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.optimizer = _innermost(optimizer)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ThresholdError("KSS cannot act inside LBFGS, which looks at the loss several times a step; use Adam.")
        self.step = 0
        self.last: Shaping | None = None
        self.n_skipped: dict[str, int] = {}
        self._random = np.random.default_rng(kss.options.seed)
        self._anatomy: Anatomy | None = None
        self._states_per_row = 0.0
        self._entrances = _entrances(model)
        self._inputs: dict[nn.Module, Any] = {}
        self._control: Control | None = None
        self._control_before: Control | None = None
        self._changes: list[str] = []
        self._is_own_pass = False
        self._handles = [
            *(module.register_forward_pre_hook(self._remember, with_kwargs=True) for module in self._entrances),
            self.optimizer.register_step_pre_hook(self._before_update),
            self.optimizer.register_step_post_hook(self._after_update),
        ]

    def __enter__(self) -> Shaper:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Remove all hooks; the controls stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inputs.clear()

    def read_anatomy(self, inputs: Any) -> None:
        """Find the residual blocks now, not in the first step that is due.

        Args:
            inputs: What `workbench.read_anatomy` takes.

        Raises:
            AnatomyError: If the residual stream cannot be read with certainty.
            ThresholdError: If KSS is to look at a layer that the model does not have.
        """
        self._anatomy = read_anatomy(self.model, inputs)
        self._draw_layers(self.kss.control, np.random.default_rng(0))

    def begin_step(self, step: int | None = None) -> None:
        """Read the controls for the coming step; a loop that counts its steps itself calls this."""
        self.step = self.step if step is None else step
        before, self._control = self._control_before, self.kss.control
        self.last = Shaping(self.step, self._control)
        if before is not None and before != self._control:
            pairs = ((name, getattr(before, name), value) for name, value in vars(self._control).items())
            self._changes += [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
        self._control_before = self._control

    def new_changes(self) -> list[str]:
        """What was changed by others since the last call, such as ``strength 5.0 -> 2.0``; the controller's own not."""
        changes, self._changes = self._changes, []
        return changes

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on alike: controls, step and random state."""
        return {
            "control": self.kss.state_dict(),
            "step": self.step,
            "states_per_row": self._states_per_row,
            "random": self._random.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; the controls of the `KSS` object are set to it."""
        self.kss.load_state_dict(state["control"])
        self.step, self._states_per_row = state["step"], state["states_per_row"]
        self._random.bit_generator.state = state["random"]

    def _remember(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and not self._is_own_pass:
            self._inputs[module] = _named(_bare(module), args, kwargs)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._control is None:
            self.begin_step()
        if self.kss.options.coupling == "gradient":
            self._act(self._control)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.kss.options.coupling != "gradient":
            self._act(self._control)
        self.step += 1
        self._control = None
        self._inputs.clear()  # not to keep a batch alive

    def _act(self, control: Control) -> None:
        """Let the penalty act, if it is due."""
        if not control.is_due(self.step):
            return
        called = next((module for module in self._entrances if module in self._inputs), None)
        if called is None:
            raise SnapshotError(
                f"KSS did not see {type(self.model).__name__} run before this update; attach it to the module that the "
                "training loop calls, and keep that in training mode."
            )
        parts = self._layer_penalties(_bare(called), self._inputs[called], control)
        acting = {i: part for i, part in parts.items() if part.value is not None and part.value.requires_grad}
        valued = [float(part.value.detach()) for part in parts.values() if part.value is not None]
        skipped = {i: part.reason for i, part in parts.items() if part.reason}
        gradients = None
        if acting:
            # The mean over the layers looked at: a layer left out counts as zero, so that no other pulls harder for it.
            total = sum(part.value for part in acting.values()) / len(parts)
            gradients = self._gradients(total)
            if gradients is None:
                skipped |= dict.fromkeys(acting, "gradient not finite")
            else:
                self._apply(control, float(total.detach()), gradients)
        for reason in skipped.values():
            self.n_skipped[reason] = self.n_skipped.get(reason, 0) + 1
        spectra = [part for part in parts.values() if len(part.modulus)]
        self.last = Shaping(
            self.step,
            control,
            layers=tuple(parts),
            penalty=float(np.mean(valued)) if valued else math.nan,
            spectral_radius=max((part.spectral_radius for part in spectra), default=math.nan),
            near_unit_mass=float(np.mean([part.near_unit_mass for part in spectra])) if spectra else math.nan,
            skipped=skipped,
            n_acting=len(acting) if gradients is not None else 0,
        )
        if (band := self.kss.controller) is not None:
            self.kss.strength = band.adjusted(control.strength, getattr(self.last, band.quantity))
            # What the controller did is in the strengths recorded, and no event; what others did meanwhile is.
            self._control_before = replace(self._control_before, strength=self.kss.strength)

    def _layer_penalties(self, model: nn.Module, inputs: Any, control: Control) -> dict[int, LayerPenalty]:
        """Run some rows of the batch through the model and take the penalty of each layer that is due."""
        options = self.kss.options
        self._is_own_pass = True
        try:
            n_rows = count_rows(inputs)
            if self._anatomy is None:
                self._anatomy = read_anatomy(model, take_rows(inputs, torch.arange(min(2, n_rows))))
            layers = self._draw_layers(control, self._random)
            inputs = take_rows(inputs, self._draw_rows(n_rows))
            selection = TokenSelection(options.n_snapshots, options.skip_first, int(self._random.integers(2**31)))
            states: dict[int, tuple[Tensor, Tensor]] = {}

            def take(i: int, x: Tensor, y: Tensor) -> None:
                states[i] = (
                    x if options.side != "output" else x.detach(),
                    y if options.side != "input" else y.detach(),
                )

            watcher = StreamWatcher(self._anatomy, selection, take, layers=layers)
            selection.begin(Batches([inputs], [count_rows(inputs)]))
            watcher.begin(inputs)
            device = next(self.model.parameters()).device.type
            with (
                undisturbed(model),
                watch(watcher.hooks()),
                torch.enable_grad(),
                torch.autocast(device, enabled=False),
            ):
                call_model(model, inputs)
        finally:
            self._is_own_pass = False
        self._states_per_row = watcher.leading.numel() / watcher.leading[0]
        moments = {i: self._moments(i, *states[i]) for i in layers}
        parts = {i: layer_penalty(m, options.penalty, gamma=control.gamma) for i, m in moments.items()}
        return {i: _if_outside(part, options.trigger) for i, part in parts.items()}

    def _moments(self, layer: int, x: Tensor, y: Tensor) -> SnapshotMoments:
        """Moments of the states of all ranks."""
        moments = empty_moments(self._anatomy, layer, x)
        try:
            moments.update(x, y)
        except SnapshotError:  # not finite: the penalty will say so, on every rank
            moments = SnapshotMoments.of_nothing_finite(moments.n_features, device=moments.mean_x.device)
        return moments.all_reduce() if self._is_shared else moments

    def _gradients(self, total: Tensor) -> dict[nn.Parameter, Tensor] | None:
        """Of the penalty in the weights that the optimizer moves; None if it is not finite."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        found = torch.autograd.grad(total, weights, allow_unused=True)
        if self._is_shared:
            found = _summed(weights, found)
        gradients = {weight: g for weight, g in zip(weights, found, strict=True) if g is not None}
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        return gradients if bool(torch.isfinite(norm)) else None

    @torch.no_grad()
    def _apply(self, control: Control, penalty: float, gradients: dict[nn.Parameter, Tensor]) -> None:
        coupling = self.kss.options.coupling
        if coupling == "gradient":
            # A fused optimizer is handed scaled gradients and unscales them itself.
            scale = getattr(self.optimizer, "grad_scale", None)
            for weight, gradient in gradients.items():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weight.grad.add_(gradient if scale is None else gradient * scale, alpha=control.strength)
            return
        rates = {weight: group["lr"] for group in self.optimizer.param_groups for weight in group["params"]}
        if coupling == "projection":
            square = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
            step = penalty / square if square > 0 else 0.0
        for weight, gradient in gradients.items():
            size = step if coupling == "projection" else float(rates[weight])
            weight.add_(gradient, alpha=-control.strength * size)

    def _draw_layers(self, control: Control, random: np.random.Generator) -> list[int]:
        n_layers = len(self._anatomy.sites)
        if control.layers == "all":
            return list(range(n_layers))
        if control.layers == "half":
            return sorted(random.choice(n_layers, size=max(1, n_layers // 2), replace=False).tolist())
        if (highest := max(control.layers)) >= n_layers:
            raise ThresholdError(f"KSS is to look at layer {highest}, but the model has layers 0 to {n_layers - 1}.")
        return list(control.layers)

    def _draw_rows(self, n_rows: int) -> Tensor:
        """As many rows as the snapshots need; all of them the first time, to learn how many states a row has."""
        wanted = n_rows
        if self._states_per_row:
            wanted = min(n_rows, math.ceil(self.kss.options.n_snapshots / self._states_per_row))
        return torch.from_numpy(np.sort(self._random.choice(n_rows, size=wanted, replace=False)))


def _if_outside(part: LayerPenalty, trigger: float) -> LayerPenalty:
    """The penalty of a layer whose radius lies above the trigger; without its gradient otherwise."""
    if part.value is None or part.spectral_radius > trigger:
        return part
    return replace(part, value=part.value.detach())


def _bare(model: nn.Module) -> nn.Module:
    """The module itself, out of ``torch.compile`` and DDP."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _bare(model.module)
    inner = unwrap(model)
    return model if inner is model else _bare(inner)


def _entrances(model: nn.Module) -> list[nn.Module]:
    """Modules by which a loop may run the whole model, outermost first: each holds every trainable weight.

    A LightningModule, for one, is often a shell around the model that its training step calls.
    """
    chain, weights = [model], {id(p) for p in model.parameters() if p.requires_grad}
    while True:
        inner = [m for m in chain[-1].children() if weights <= {id(p) for p in m.parameters()}]
        if len(inner) != 1:
            return chain
        chain.append(inner[0])


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that moves the weights, out of what wraps it (accelerate, Lightning, SAM)."""
    for name in ("base_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return _innermost(inner)
    return optimizer


def _named(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as `call_model` takes them: a tuple, or a mapping of keywords."""
    if not kwargs:
        return args
    names = [*inspect.signature(model.forward).parameters]
    return dict(zip(names, args, strict=False)) | kwargs


def _summed(weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients added up over all ranks, in one message."""
    dense = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]
    message = torch.cat([gradient.flatten() for gradient in dense])
    torch.distributed.all_reduce(message)
    parts = message.split([gradient.numel() for gradient in dense])
    return [part.view_as(gradient) for part, gradient in zip(parts, dense, strict=True)]
