"""KSS attached to one model: its operations around each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from workbench.callbacks.kss.attachment import check_attachable, is_trained, recomputation_error
from workbench.callbacks.kss.control import ControlValues
from workbench.callbacks.kss.penalty import LayerPenalty, layer_penalties
from workbench.callbacks.kss.shaping import Shaping
from workbench.callbacks.kss.shared_control import control_of_first_rank, summed
from workbench.callbacks.kss.trust_region import gain_terms, gains_of
from workbench.errors import OptionError, SnapshotError
from workbench.koopman.moments import SnapshotMoments
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import Batches, count_rows, take_rows
from workbench.models.calling import call_model, named_arguments
from workbench.models.capture import StreamWatcher, empty_moments
from workbench.models.device_numbers import read_numbers
from workbench.models.probing import eval_mode, undisturbed, watch
from workbench.models.process_group import is_shared
from workbench.models.residual_check import refuse_plain_chain
from workbench.models.token_selection import TokenSelection
from workbench.models.wrapping import acting_on_gradients, as_written, bare, entrances, innermost
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.callbacks.kss.control import KSSControls
    from workbench.models.subject import Subject

#: A trust region that watches the energy gain takes eigenvalues in every so many of its measurements.
SPECTRA_EVERY = 10
#: Why layers did not act although they had a penalty.
NO_GRADIENT, GRADIENT_NOT_FINITE = "no gradient", "gradient not finite"


class Shaper:
    """KSS attached to a model and an optimizer; made by `KSS.attach`.

    The model's inputs are remembered by a hook. When a step is due, hooks on the optimizer run a few examples of them
    through the model once more, in eval mode, and let the gradient of the penalty act on the parameters. Its own pass
    makes KSS independent of how the loss is scaled, accumulated, recomputed or reduced; the task's loss and gradient
    norm are the same as without it.

    Attributes:
        step: Number of optimizer steps done.
        last: Record of the last step; None before the first.
        n_skipped: Layers left out although they were due, by reason, over all steps.
    """

    def __init__(self, kss: KSSControls, model: Subject | nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.kss = kss
        model = module_of(model)
        self.model = bare(model)
        self.optimizer = innermost(optimizer)
        check_attachable(self.model, self.optimizer)
        self._is_shared = is_shared()
        self.step = 0
        self.last: Shaping | None = None
        self.n_skipped: dict[str, int] = {}
        self._anatomy: Anatomy | None = None
        self._states_per_row = self._states_of_a_row = 0.0
        self._entrances = entrances(model)
        self._inputs: dict[nn.Module, Any] = {}
        self._control: ControlValues | None = None
        self._control_before: ControlValues | None = None
        self._changes: list[str] = []
        self._is_own_pass = False
        self._update_size = 1.0
        self._rates: list[Any] = []
        self._weights_before: dict[nn.Parameter, Tensor] = {}
        self._kept: dict[nn.Parameter, Tensor] = {}
        remember = torch.compiler.disable(self._remember)  # it records what passes, and must not be compiled
        self._handles = [
            *(module.register_forward_pre_hook(remember, with_kwargs=True) for module in self._entrances),
            self.optimizer.register_step_pre_hook(torch.compiler.disable(self._before_update)),
            self.optimizer.register_step_post_hook(torch.compiler.disable(self._after_update)),
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
        self._end_update()
        self._kept.clear()

    def read_anatomy(self, inputs: Any) -> None:
        """Find the residual blocks now, rather than in the first step that is due.

        Args:
            inputs: Inputs as for `workbench.read_anatomy`.

        Raises:
            AnatomyError: If the residual stream cannot be read with certainty.
            OptionError: If KSS is to act on a layer that the model does not have.
        """
        self._anatomy = anatomy = _residual_blocks(self.model, inputs)
        _draw_layers(self.kss.control, len(anatomy.sites), np.random.default_rng(0))

    def begin_step(self, step: int | None = None) -> None:
        """Read the controls for the coming step, on every rank those of rank 0.

        A loop that counts its steps itself calls this.
        """
        self.step = self.step if step is None else step
        self._read_controls()

    def _read_controls(self) -> ControlValues:
        """The controls for the coming step; changes by others are noted."""
        control = self.kss.control
        if self._is_shared and (first := control_of_first_rank(control)) != control:
            self.kss.set(**vars(first))
            control = first
        before, self._control = self._control_before, control
        self.last = Shaping(self.step, control)
        if before is not None and before != control:
            pairs = ((name, getattr(before, name), value) for name, value in vars(control).items())
            self._changes += [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
        self._control_before = control
        return control

    def new_changes(self) -> list[str]:
        """The changes by others since the last call, such as ``strength 5.0 -> 2.0``, not by the controller."""
        changes, self._changes = self._changes, []
        return changes

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, as plain values for JSON."""
        return {
            "control": self.kss.state_dict(),
            "control_before": None if self._control_before is None else self._control_before.as_dict(),
            "step": self.step,
            "states_per_row": self._states_per_row,
            "update_size": self._update_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave; the controls of the `KSS` object are set to it."""
        self.kss.load_state_dict(state["control"])
        before = state["control_before"]
        self._control_before = None if before is None else ControlValues.of_dict(before)
        self.step, self._states_per_row = state["step"], state["states_per_row"]
        self._update_size = state["update_size"]

    def _remember(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._is_own_pass or not (module.training and torch.is_grad_enabled()):
            return
        # Lightning under DDP replaces forward by a plain function, whose arguments are not the model's.
        if not isinstance(module.forward, FunctionType) or hasattr(module.forward, "__wrapped__"):
            self._inputs[module] = named_arguments(bare(module), args, kwargs)

    def _before_update(
        self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        control = self._read_controls() if self._control is None else self._control
        if self.kss.options.coupling == "trust_region":
            self._begin_update(control)
        if self.kss.options.coupling != "gradient":
            return None
        return acting_on_gradients(optimizer, args, kwargs, lambda loss: self._act(control))

    def _after_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._restore_rates()
        if self.kss.options.coupling != "gradient" and self._control is not None:
            self._act(self._control)
        self._end_update()
        self.step += 1
        self._control = None
        self._inputs.clear()  # so that no batch is kept alive

    def _act(self, control: ControlValues) -> None:
        """Let the penalty act, if it is due."""
        if not control.is_due(self.step):
            return
        called = next((module for module in self._entrances if module in self._inputs), None)
        if called is None:
            raise SnapshotError(
                f"KSS did not see {type(self.model).__name__} run before this update; attach it to the module that the "
                "training loop calls, and keep that in training mode."
            )
        self._is_own_pass = True
        try:
            act = self._hold_in_band if self.kss.options.coupling == "trust_region" else self._shape
            with as_written():
                act(bare(called), self._inputs[called], control)
        finally:
            self._is_own_pass = False
        self._states_per_row = self._states_of_a_row  # not within a step: its examples stay
        band, strength = self.kss.controller, control.strength
        if band is not None and self.kss.strength == strength:  # unless it was changed meanwhile
            self.kss.strength = band.adjusted(strength, getattr(self.last, band.quantity))
            # Changes by the controller are in the recorded strengths, and are no events.
            before = control if self._control_before is None else self._control_before
            self._control_before = replace(before, strength=self.kss.strength)

    @torch.enable_grad()  # SAM disables gradients in its steps
    def _shape(self, model: nn.Module, inputs: Any, control: ControlValues) -> None:
        """Measure the layers that are due and let their penalty act."""
        parts = self._layer_penalties(model, inputs, control)
        trigger = self.kss.options.trigger
        values = {i: part.value for i, part in parts.items() if part.value is not None}
        outside = {i: value for i, value in values.items() if parts[i].spectral_radius > trigger}
        acting = {i: value for i, value in outside.items() if value.requires_grad}
        valued = [float(value.detach().numpy()) for value in values.values()]  # penalties are on the host
        skipped = {i: part.reason for i, part in parts.items() if part.reason}
        skipped |= dict.fromkeys(outside.keys() - acting.keys(), NO_GRADIENT)
        gradients = None
        if acting:
            # The mean over the layers measured: a layer left out counts as zero, so that the others do not pull harder.
            total = reduce(torch.add, acting.values()) / len(parts)
            gradients = self._gradients(total)
            if gradients is None:
                skipped |= dict.fromkeys(acting, GRADIENT_NOT_FINITE)
            else:
                self._apply(control, float(total.detach().numpy()), gradients)
        for reason in skipped.values():
            self.n_skipped[reason] = self.n_skipped.get(reason, 0) + 1
        self.last = self._shaping(
            control,
            parts,
            layers=tuple(parts),
            penalty=float(np.mean(valued)) if valued else math.nan,
            skipped=skipped,
            n_acting=len(acting) if gradients is not None else 0,
        )

    def _shaping(self, control: ControlValues, parts: Mapping[int, LayerPenalty], **what: Any) -> Shaping:
        spectra = [part for part in parts.values() if len(part.modulus)]
        return Shaping(
            self.step,
            control,
            spectral_radius=max((part.spectral_radius for part in spectra), default=math.nan),
            near_unit_mass=float(np.mean([part.near_unit_mass for part in spectra])) if spectra else math.nan,
            **what,
        )

    @torch.no_grad()
    def _begin_update(self, control: ControlValues) -> None:
        """Cut the coming update, and remember the parameters if it is to be measured."""
        self._end_update()  # left over from an update that failed
        if not (control.enabled and control.strength > 0):
            return
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self._update_size
        if control.is_due(self.step):
            weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
            # Into the same memory each time: fresh pages cost more than the copy.
            self._weights_before = {w: self._kept.setdefault(w, torch.empty_like(w)).copy_(w) for w in weights}

    def _restore_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def _end_update(self) -> None:
        self._restore_rates()
        self._weights_before = {}

    @torch.no_grad()
    def _hold_in_band(self, model: nn.Module, inputs: Any, control: ControlValues) -> None:
        """Undo the update if it moved a layer out of its band."""
        region = self.kss.options.trust_region
        moments = self._moments_of_layers(model, inputs, control)
        # The gain needs no eigenvalues; they are then only recorded, and taken rarely.
        has_spectra = region.measure == "spectral_radius" or self.step % (SPECTRA_EVERY * control.interval) == 0
        of_spectra = moments if has_spectra else {}
        parts, after = self._spectra_and_measure(moments, control, of_spectra)
        layers, broken = tuple(moments), []
        if region.outside(after):
            weights_after = {weight: weight.detach().clone() for weight in self._weights_before}
            self._put(self._weights_before)
            moments = self._moments_of_layers(model, inputs, control)
            broken = region.broken(self._spectra_and_measure(moments, control, {})[1], after)
            if not broken:
                self._put(weights_after)
        self.last = self._shaping(control, parts, layers=layers, n_acting=len(broken), update_size=self._update_size)
        self._update_size = region.next_size(self._update_size, control.strength, is_broken=bool(broken))

    def _spectra_and_measure(
        self, moments: Mapping[int, SnapshotMoments], control: ControlValues, of_spectra: Mapping[int, SnapshotMoments]
    ) -> tuple[dict[int, LayerPenalty], dict[int, float]]:
        """The penalties of some layers, and the measure of the trust region for each; NaN where there is no spectrum.

        The host waits for the device once.
        """
        shape, is_gain = self.kss.options.penalty, self.kss.options.trust_region.measure == "energy_gain"
        wanted = of_spectra if is_gain else moments
        terms = gain_terms(moments) if is_gain else []
        found, numbers = layer_penalties(list(wanted.values()), shape, gamma=control.gamma, also=terms)
        parts = dict(zip(wanted, found, strict=True))
        measured = gains_of(moments, numbers) if is_gain else {i: p.spectral_radius for i, p in parts.items()}
        return {i: part for i, part in parts.items() if i in of_spectra}, measured

    def _put(self, weights: Mapping[nn.Parameter, Tensor]) -> None:
        for weight, value in weights.items():
            weight.copy_(value)

    def _layer_penalties(self, model: nn.Module, inputs: Any, control: ControlValues) -> dict[int, LayerPenalty]:
        """The penalty of each layer that is due."""
        with torch.enable_grad():
            moments = self._moments_of_layers(model, inputs, control)
            shape = self.kss.options.penalty
            found, _ = layer_penalties(list(moments.values()), shape, gamma=control.gamma)
            return dict(zip(moments, found, strict=True))

    def _moments_of_layers(self, model: nn.Module, inputs: Any, control: ControlValues) -> dict[int, SnapshotMoments]:
        """Run some examples of the batch through the model and take the moments of each layer that is due.

        Within a step these are the same examples, tokens and layers each time.
        """
        has_gradient = torch.is_grad_enabled()
        options = self.kss.options
        # Depends only on the step: resuming needs no more, and ranks whose last batches differ draw the same layers.
        random = np.random.default_rng([options.seed, self.step])
        anatomy = self._anatomy = _residual_blocks(model, inputs) if self._anatomy is None else self._anatomy
        layout = anatomy.layout
        layers = _draw_layers(control, len(anatomy.sites), random)
        if layout.can_split:
            axis = layout.inputs or 0
            inputs = take_rows(inputs, self._draw_rows(count_rows(inputs, axis), random), axis)
        selection = TokenSelection(options.n_snapshots, options.skip_first, int(random.integers(2**31)))
        states: dict[int, tuple[Tensor, Tensor]] = {}

        def take(i: int, x: Tensor, y: Tensor) -> None:
            if has_gradient and not y.requires_grad and is_trained(anatomy.sites[i].module):
                raise recomputation_error(model)
            states[i] = (
                x if options.side != "output" else x.detach(),
                y if options.side != "input" else y.detach(),
            )

        watcher = StreamWatcher(anatomy, selection, take, layers=layers)
        selection.begin(Batches([inputs], True, layout))
        watcher.begin(inputs)
        device = next(self.model.parameters()).device.type
        with (
            undisturbed(model),
            watch(watcher.hooks()),
            torch.set_grad_enabled(has_gradient),
            torch.autocast(device, enabled=False),
        ):
            call_model(model, inputs)
        self._states_of_a_row = watcher.leading.numel() / count_rows(inputs, layout.inputs or 0)
        return {i: self._moments(anatomy, i, *states[i]) for i in layers}

    def _moments(self, anatomy: Anatomy, layer: int, x: Tensor, y: Tensor) -> SnapshotMoments:
        """Moments of the states of all ranks."""
        moments = empty_moments(anatomy, layer, x)
        is_usable = len(x) > 0
        try:
            moments.update(x, y, refuses=False)  # the penalty and the gain show what is not finite
        except SnapshotError:
            is_usable = False
        if not is_usable:  # the penalty reports it, on every rank
            moments = SnapshotMoments.of_nothing_finite(moments.n_features, device=moments.mean_x.device)
        return moments.all_reduce() if self._is_shared else moments

    def _gradients(self, total: Tensor) -> dict[nn.Parameter, Tensor] | None:
        """The gradient of the penalty in the parameters that the optimizer moves; None if it is not finite."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        try:
            with eval_mode(self.model):  # blocks that recompute their forward repeat that of the own pass
                found: Sequence[Tensor | None] = torch.autograd.grad(total, weights, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" in str(error):
                raise recomputation_error(self.model) from error
            raise
        if self._is_shared:
            found = summed(weights, found)
        gradients = {weight: g for weight, g in zip(weights, found, strict=True) if g is not None}
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        return gradients if bool(torch.isfinite(norm)) else None

    @torch.no_grad()
    def _apply(self, control: ControlValues, penalty: float, gradients: dict[nn.Parameter, Tensor]) -> None:
        coupling = self.kss.options.coupling
        if coupling == "gradient":
            # A fused optimizer receives scaled gradients and unscales them itself.
            scale = getattr(self.optimizer, "grad_scale", None)
            for weight, gradient in gradients.items():
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                weight.grad.add_(gradient if scale is None else gradient * scale, alpha=control.strength)
            return
        rates = {weight: group["lr"] for group in self.optimizer.param_groups for weight in group["params"]}
        if coupling == "projection":
            square = sum(read_numbers([gradient.double().square().sum() for gradient in gradients.values()]))
            step = penalty / square if square > 0 else 0.0
        for weight, gradient in gradients.items():
            size = step if coupling == "projection" else float(rates[weight])
            weight.add_(gradient, alpha=-control.strength * size)

    def _draw_rows(self, n_rows: int, random: np.random.Generator) -> Tensor:
        """As many examples as the snapshots need; all of them the first time, to count the states of each."""
        wanted = n_rows
        if self._states_per_row:
            wanted = min(n_rows, math.ceil(self.kss.options.n_snapshots / self._states_per_row))
        return torch.from_numpy(np.sort(random.choice(n_rows, size=wanted, replace=False)))


def _residual_blocks(model: nn.Module, inputs: Any) -> Anatomy:
    """The anatomy of a model whose blocks add to their state.

    Raises:
        AnatomyError: If the residual stream cannot be read with certainty, or there is none.
    """
    anatomy = read_anatomy(model, inputs)
    refuse_plain_chain(model, inputs, anatomy.stack, anatomy.sites)
    return anatomy


def _draw_layers(control: ControlValues, n_layers: int, random: np.random.Generator) -> list[int]:
    """The layers that take part in a step."""
    layers = control.layers
    if isinstance(layers, str):
        if layers == "all":
            return list(range(n_layers))
        return sorted(random.choice(n_layers, size=max(1, n_layers // 2), replace=False).tolist())
    if (highest := max(layers)) >= n_layers:
        raise OptionError(f"KSS is to act on layer {highest}, but the model has layers 0 to {n_layers - 1}.")
    return list(layers)
