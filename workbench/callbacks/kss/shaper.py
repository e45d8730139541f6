"""Koopman Spectral Shaping: its public class, and KSS attached to one model, around each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.utils.hooks import RemovableHandle

from workbench.callbacks.kss.control import ControlValues, KSSControls, KSSOptions
from workbench.callbacks.kss.penalty import LayerPenalty, PenaltyShape, layer_penalties
from workbench.errors import OptionError, SnapshotError, WorkbenchError
from workbench.koopman.stacked import StackedMoments, stacked
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.batches import Batches, TokenSelection, count_examples, take_examples
from workbench.models.calling import (
    acting_on_gradients,
    bare,
    call_model,
    entrances,
    innermost,
    is_shared,
    is_split,
    message_device,
    named_arguments,
)
from workbench.models.capture import StreamWatcher
from workbench.models.probing import RepeatedPasses, eval_mode, watch
from workbench.models.readable_weights import (
    Measurement,
    complete,
    finish,
    gathered,
    local_part,
    read_arrays,
    read_numbers,
)
from workbench.models.residual_check import require_residuals
from workbench.models.subject import Subject
from workbench.training.callback import Callback, TrainingRun
from workbench.zoo.module_of import module_of

#: A trust region on the energy gain takes eigenvalues only in one of this many measurements.
SPECTRA_EVERY = 10
#: Reasons why layers with a penalty did not act.
NO_GRADIENT, GRADIENT_NOT_FINITE = "no gradient", "gradient not finite"
#: Codes of named choices of layers in a message between ranks; for layers given by number, it holds how many there are.
_CODES = {"half": -1, "all": -2}


@dataclass(frozen=True)
class Shaping:
    """The record of KSS in one step.

    Attributes:
        step: Number of optimizer steps before this one.
        control: Values of the controls in this step.
        layers: Measured layers; empty in steps without a measurement.
        penalty: Mean penalty of the measured layers; NaN if there is none.
        spectral_radius: Maximum over the measured layers; NaN if no spectrum was taken.
        near_unit_mass: Mean over the measured layers; NaN if no spectrum was taken.
        skipped: Mapping from each layer that was skipped to the reason; None if nothing was measured.
        n_acting: Number of layers whose gradient reached the parameters, or that caused the update to be undone.
        update_size: Size of the update, as a fraction of the optimizer's update; below 1 only in a trust region.
    """

    step: int
    control: ControlValues
    layers: tuple[int, ...] = ()
    penalty: float = math.nan
    spectral_radius: float = math.nan
    near_unit_mass: float = math.nan
    skipped: Mapping[int, str] | None = None
    n_acting: int = 0
    update_size: float = 1.0

    def monitors(self) -> dict[str, float]:
        """Return the metrics of the step; names as in ``schema.MONITORS``."""
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
            "kss_update_size": self.update_size,
        }


class Shaper(Callback):
    """KSS in one run: attached to any training loop by `KSS.attach`, or a callback of `workbench.train` and trainers.

    A hook keeps the inputs of the model. When KSS is due, hooks on the optimizer pass a few examples of these inputs
    through the model in eval mode, and apply the gradient of the penalty to the parameters. Because of this separate
    pass, KSS does not depend on how the loss is scaled, accumulated, recomputed or reduced, and the loss and the
    gradient norm of the task are not affected.
    """

    name = "kss"

    def __init__(self, kss: KSSControls) -> None:
        self.kss = kss
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self._handles: list[RemovableHandle] = []
        self._entrances: tuple[nn.Module, ...] = ()
        self._inputs: dict[nn.Module, Any] = {}
        self._rates: list[Any] = []
        self._parameters: list[Tensor] = []  # those that are copied before the update, and the copies
        self._copies: list[Tensor] = []
        self._copied: list[int] = []  # ids of the parameters, of which this rank may have parts
        #: Inputs, and the measurement before the update that has begun on them, with its tensors.
        self._begun: tuple[Any, Measurement[dict[int, LayerPenalty]], list[Tensor]] | None = None
        self._is_shared = False
        self._forget()

    def _forget(self) -> None:
        """Begin a run without a past."""
        self.step = 0
        self.last: Shaping | None = None
        self.n_skipped: dict[str, int] = {}
        self._measured: Shaping | None = None  # the last record with a measurement
        self._anatomy: Anatomy | None = None
        self._passes: RepeatedPasses | None = None
        self._states_per_example = self._last_states_per_example = 0.0
        self._control: ControlValues | None = None
        self._control_before: ControlValues | None = None
        self._changes: list[str] = []
        self._update_size = 1.0
        self._was_outside = False

    def attach(self, model: Subject | nn.Module, optimizer: torch.optim.Optimizer) -> Shaper:
        """Add the hooks; see `KSS.attach`."""
        model = module_of(model)
        _check_attachable(bare(model), innermost(optimizer), self.kss.options.coupling)
        self.model, self.optimizer = bare(model), innermost(optimizer)
        self._is_shared, self._entrances = is_shared(), tuple(entrances(model))
        keep_inputs = torch.compiler.disable(self._keep_inputs)  # it stores tensors, and must not be compiled
        self._handles = [
            *(module.register_forward_pre_hook(keep_inputs, with_kwargs=True) for module in self._entrances),
            self.optimizer.register_step_pre_hook(torch.compiler.disable(self._before_update)),
            self.optimizer.register_step_post_hook(torch.compiler.disable(self._after_update)),
        ]
        return self

    def __enter__(self) -> Shaper:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Remove all hooks and release the model; the controls are unchanged."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._inputs.clear()
        self._end_update()
        self._parameters, self._copies, self._copied = [], [], []
        self._anatomy, self._passes, self._entrances = None, None, ()
        del self.model, self.optimizer

    def describe(self) -> Mapping[str, Any]:
        """Return the options that are fixed over a run."""
        return self.kss.describe()

    def setup(self, run: TrainingRun) -> None:
        """Forget the previous run, as a trainer may train several times with the same callback."""
        super().setup(run)
        self._forget()

    def begin(self) -> None:
        """Attach KSS to the model; if there is a probe, the residual blocks are found here."""
        run = self.run
        try:
            self.attach(run.model, run.optimizer)
            self.step = run.step
            if run.probe is not None:
                self.read_anatomy(run.probe(2))
        except WorkbenchError:
            self.end()
            raise

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the metrics of the step, and record an event for each control that was changed."""
        changes, self._changes = self._changes, []
        for change in changes:
            self.event(step, "kss", source="kss", message=change)
        if self.last is None:
            return {}
        if self.last.layers:
            self._measured = self.last
        return self.last.monitors()

    def outcome(self) -> Shaping | None:
        """Return the record of this step."""
        return self.last

    def to_log(self) -> dict[str, float]:
        """Return the controls of the last step and the latest measurements, which may be from an earlier step."""
        if self.last is None:
            return {}
        latest = self.last.monitors()
        controls = ("kss_enabled", "kss_strength", "kss_interval", "kss_gamma")
        measured = latest if self._measured is None else self._measured.monitors() | {n: latest[n] for n in controls}
        return {name: float(value) for name, value in measured.items() if not math.isnan(value)}

    def end(self, *, is_broken: bool = False) -> None:
        """Detach KSS."""
        super().end(is_broken=is_broken)
        self.detach()

    def read_anatomy(self, inputs: Any) -> None:
        """Find the residual blocks now, instead of in the first step in which KSS acts."""
        with gathered(self.model):
            self._anatomy = anatomy = _residual_blocks(self.model, inputs)
        _draw_layers(self.kss.control, len(anatomy.sites), np.random.default_rng(0))

    def begin_step(self, step: int | None = None) -> None:
        """Read the controls for the coming step; all ranks use those of rank 0.

        Only a loop with its own step counter needs to call this.
        """
        self.step = self.step if step is None else step
        self._read_controls()

    def _read_controls(self) -> ControlValues:
        """Return the controls for the coming step, and note their changes."""
        control = self.kss.control
        if self._is_shared and (first := _control_of_first_rank(control)) != control:
            self.kss.set(**vars(first))
            control = first
        before, self._control = self._control_before, control
        self.last = Shaping(self.step, control)
        if before is not None and before != control:
            pairs = ((name, getattr(before, name), value) for name, value in vars(control).items())
            self._changes += [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
        self._control_before = control
        return control

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON-compatible values."""
        return {
            "control": self.kss.state_dict(),
            "control_before": None if self._control_before is None else self._control_before.as_dict(),
            "step": self.step,
            "states_per_row": self._states_per_example,
            "update_size": self._update_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`; the controls are set now, and may be changed before the run begins."""
        self.kss.load_state_dict(state["control"])
        before = state["control_before"]
        self._control_before = None if before is None else ControlValues(**before)
        self.step, self._states_per_example = state["step"], state["states_per_row"]
        self._update_size = state["update_size"]

    def _keep_inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (module.training and torch.is_grad_enabled()):  # as in the passes of KSS
            return
        # Lightning under DDP replaces `forward` by a function with other arguments than those of the model.
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
        self._inputs.clear()  # release the batch

    def _act(self, control: ControlValues) -> None:
        """Apply KSS if it is due."""
        if not control.is_due(self.step):
            return
        called = self._called
        if called is None:
            raise SnapshotError(
                f"{type(self.model).__name__} did not run in training mode before this update; attach KSS to the "
                "module that the training loop calls, and keep it in training mode."
            )
        act = self._hold_in_band if self.kss.options.coupling == "trust_region" else self._apply_penalty
        act(bare(called), self._inputs[called], control)
        # Updated only here, because all passes of one step have to use the same examples.
        self._states_per_example = self._last_states_per_example

    @property
    def _called(self) -> nn.Module | None:
        """The module that the loop has called; None if it has called none since the last update."""
        return next((module for module in self._entrances if module in self._inputs), None)

    @torch.enable_grad()  # SAM disables gradients in its steps
    def _apply_penalty(self, model: nn.Module, inputs: Any, control: ControlValues) -> None:
        """Measure the chosen layers and apply the gradient of their penalty."""
        stacks = self._moments_of_layers(model, inputs, control)
        measured = complete(layer_penalties(stacks, self.kss.options.penalty, gamma=control.gamma))
        values = {i: layer.value for i, layer in measured.items() if layer.value is not None}
        # The mean is over all measured layers, so that skipping a layer does not increase the weight of the others.
        weight = 1 / len(measured)
        slopes = {i: weight * layer.slopes for i, layer in measured.items() if layer.slopes is not None}
        skipped = {i: layer.reason for i, layer in measured.items() if layer.reason}
        skipped |= dict.fromkeys(values.keys() - slopes.keys(), NO_GRADIENT)
        gradients = None
        if slopes:
            gradients = self._gradients([pair for stack in stacks for pair in stack.gradients(slopes)])
            if gradients is None:
                skipped |= dict.fromkeys(slopes, GRADIENT_NOT_FINITE)
            else:
                self._apply_gradients(control, weight * sum(values[i] for i in slopes), gradients)
        for reason in skipped.values():
            self.n_skipped[reason] = self.n_skipped.get(reason, 0) + 1
        self.last = self._record(
            control,
            measured,
            layers=tuple(measured),
            penalty=float(np.mean([*values.values()])) if values else math.nan,
            skipped=skipped,
            n_acting=len(slopes) if gradients is not None else 0,
        )

    def _record(self, control: ControlValues, measured: Mapping[int, LayerPenalty], **fields: Any) -> Shaping:
        """Return the record of the step, with the spectra of the measured layers and the given further fields."""
        spectra = [layer for layer in measured.values() if len(layer.modulus)]
        return Shaping(
            self.step,
            control,
            spectral_radius=max((layer.spectral_radius for layer in spectra), default=math.nan),
            near_unit_mass=float(np.mean([layer.near_unit_mass for layer in spectra])) if spectra else math.nan,
            **fields,
        )

    @torch.no_grad()
    def _begin_update(self, control: ControlValues) -> None:
        """Reduce the size of the coming update, and copy the parameters if it will be measured."""
        if self._rates:  # the previous update failed
            self._end_update()
        if not (control.enabled and control.strength > 0):
            return
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self._update_size
        if not control.is_due(self.step):
            return
        parameters: list[Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        if [*map(id, parameters)] != self._copied:
            # The copies are reused, as allocating new memory costs more than copying.
            self._copied, self._parameters = [*map(id, parameters)], [local_part(p.detach()) for p in parameters]
            self._copies = [torch.empty_like(p) for p in self._parameters]
        torch._foreach_copy_(self._copies, self._parameters)
        self._begin_measurement(control)

    @torch.no_grad()
    def _begin_measurement(self, control: ControlValues) -> None:
        """Begin to measure the parameters before the update if that will probably be needed.

        This is where the last update ended above the band. The parameters then need not be restored to measure them,
        and the host waits for the device once for both measurements.
        """
        called = self._called
        if not (self._was_outside and control.is_due(self.step)) or called is None:
            return
        inputs = self._inputs[called]
        if self._begun is None or self._begun[0] is not inputs:
            begun = self._measurement(bare(called), inputs, control)
            self._begun = inputs, begun, [*next(begun)]

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        """Begin to measure after the backward pass, while the device still computes and the host would wait for it."""
        yield
        is_within_update = bool(self._rates)  # where an optimizer computes a second gradient at other parameters
        if self.is_running and self.run.owns_loop and self._control is not None and not is_within_update:
            self._begin_measurement(self._control)

    def _restore_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def _end_update(self) -> None:
        self._restore_rates()
        self._begun = None

    @torch.no_grad()
    def _hold_in_band(self, model: nn.Module, inputs: Any, control: ControlValues) -> None:
        """Undo the update if it moved a layer out of the band of the trust region."""
        region = self.kss.options.trust_region
        # The gain needs no eigenvalues. They are then only recorded, and therefore taken less often.
        has_spectra = self.step % (SPECTRA_EVERY * control.interval) == 0
        begun = self._begun if self._begun is not None and self._begun[0] is inputs else None
        measurement = self._measurement(model, inputs, control, has_spectra=has_spectra)
        tensors = [*next(measurement)]
        values = read_arrays([*tensors, *(begun[2] if begun is not None else ())])
        found = finish(measurement, values[: len(tensors)])
        after = {i: getattr(layer, region.measure) for i, layer in found.items()}
        violated: list[int] = []
        self._was_outside = bool(region.outside(after))
        if self._was_outside:
            if begun is not None:
                found_before, updated = finish(begun[1], values[len(tensors) :]), None
            else:
                updated = [p.clone() for p in self._parameters]
                torch._foreach_copy_(self._parameters, self._copies)
                found_before = complete(self._measurement(model, inputs, control))
            before = {i: getattr(layer, region.measure) for i, layer in found_before.items()}
            violated = region.violated(before, after)
            if updated is None and violated:
                torch._foreach_copy_(self._parameters, self._copies)
            elif updated is not None and not violated:
                torch._foreach_copy_(self._parameters, updated)
        self.last = self._record(
            control, found, layers=tuple(found), n_acting=len(violated), update_size=self._update_size
        )
        self._update_size = region.next_size(self._update_size, control.strength, is_undone=bool(violated))

    def _measurement(
        self, model: nn.Module, inputs: Any, control: ControlValues, *, has_spectra: bool = False
    ) -> Measurement[dict[int, LayerPenalty]]:
        """Measure the chosen layers for a trust region, with spectra if it needs them or they are requested."""
        has_spectra = has_spectra or self.kss.options.trust_region.measure == "spectral_radius"
        stacks = self._moments_of_layers(model, inputs, control)
        return layer_penalties(stacks, self.kss.options.penalty, gamma=control.gamma, has_spectra=has_spectra)

    def _moments_of_layers(self, model: nn.Module, inputs: Any, control: ControlValues) -> list[StackedMoments]:
        """Return the moments of the chosen layers, in passes of gathered parameters if ranks hold parts of them."""
        with gathered(model):
            layers, states = self._states_of_layers(model, inputs, control)
        return stacked({i: states[i] for i in layers}, is_shared=self._is_shared)

    def _states_of_layers(
        self, model: nn.Module, inputs: Any, control: ControlValues
    ) -> tuple[list[int], dict[int, tuple[Tensor, Tensor]]]:
        """Pass some examples, the same in all calls of a step, and return their states in the chosen layers."""
        has_gradient = torch.is_grad_enabled()
        options = self.kss.options
        # The generator depends only on the step. A resumed run needs no further state, and ranks whose last batches
        # differ draw the same layers.
        random = np.random.default_rng([options.seed % 2**64, self.step])
        anatomy = self._anatomy = _residual_blocks(model, inputs) if self._anatomy is None else self._anatomy
        if self._passes is None or self._passes.model is not model:
            self._passes = RepeatedPasses(model)
        layout = anatomy.layout
        layers = _draw_layers(control, len(anatomy.sites), random)
        if layout.can_split:
            axis = layout.inputs or 0
            n_examples = n_drawn = count_examples(inputs, axis)
            if self._states_per_example:  # the first time, all examples are used, to count the states of each
                n_drawn = min(n_examples, math.ceil(options.n_snapshots / self._states_per_example))
            drawn = torch.from_numpy(np.sort(random.choice(n_examples, size=n_drawn, replace=False)))
            inputs = take_examples(inputs, drawn, axis)
        selection = TokenSelection(options.n_snapshots, seed=int(random.integers(2**31)))
        states: dict[int, tuple[Tensor, Tensor]] = {}

        def take(i: int, x: Tensor, y: Tensor) -> None:
            is_trained = any(p.requires_grad for p in anatomy.sites[i].module.parameters())
            if has_gradient and is_trained and not y.requires_grad:
                raise _recomputation_error(model)
            states[i] = x, y

        watcher = StreamWatcher(anatomy, selection, take, layers=layers)
        selection.begin(Batches([inputs], True, layout))
        watcher.begin(inputs)
        device = next(self.model.parameters()).device.type
        with (
            self._passes.undisturbed(),
            watch(watcher.hooks()),
            torch.set_grad_enabled(has_gradient),
            torch.autocast(device, enabled=False),
        ):
            call_model(model, inputs)
        self._last_states_per_example = watcher.leading.numel() / count_examples(inputs, layout.inputs or 0)
        return layers, states

    def _gradients(self, of_states: Sequence[tuple[Tensor, Tensor]]) -> dict[nn.Parameter, Tensor] | None:
        """Return the gradient in the parameters of the optimizer, from that in states; None if it is not finite."""
        states, in_states = zip(*of_states, strict=True)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        try:
            with eval_mode(self.model):  # blocks that recompute their forward pass have to repeat the one of KSS
                found: Sequence[Tensor | None] = torch.autograd.grad(states, parameters, in_states, allow_unused=True)
        except RuntimeError as error:
            if "checkpoint" in str(error):
                raise _recomputation_error(self.model) from error
            raise
        if self._is_shared:
            found = _summed(parameters, found)
        gradients = {p: g for p, g in zip(parameters, found, strict=True) if g is not None}
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        return gradients if bool(torch.isfinite(norm)) else None

    @torch.no_grad()
    def _apply_gradients(self, control: ControlValues, penalty: float, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Apply the gradients of the penalty, before the update or after it, as the coupling requires."""
        coupling = self.kss.options.coupling
        if coupling == "gradient":
            # A fused optimizer receives scaled gradients and unscales them itself.
            scale = getattr(self.optimizer, "grad_scale", None)
            given = [*gradients.values()] if scale is None else torch._foreach_mul([*gradients.values()], scale)
            sums = [torch.zeros_like(p) if p.grad is None else p.grad for p in gradients]
            torch._foreach_add_(sums, given, alpha=control.strength)
            for parameter, total in zip(gradients, sums, strict=True):
                parameter.grad = total
            return
        rates = {parameter: group["lr"] for group in self.optimizer.param_groups for parameter in group["params"]}
        if coupling == "projection":
            square = sum(read_numbers([gradient.double().square().sum() for gradient in gradients.values()]))
            step = penalty / square if square > 0 else 0.0
        for parameter, gradient in gradients.items():
            size = step if coupling == "projection" else float(rates[parameter])
            parameter.add_(gradient, alpha=-control.strength * size)


def _residual_blocks(model: nn.Module, inputs: Any) -> Anatomy:
    """Return the anatomy of a model with a residual stream."""
    anatomy = read_anatomy(model, inputs)
    require_residuals(model, inputs, anatomy.stack, anatomy.sites)
    return anatomy


def _draw_layers(control: ControlValues, n_layers: int, random: np.random.Generator) -> list[int]:
    """Return the layers to measure in a step."""
    layers = control.layers
    if isinstance(layers, str):
        if layers == "all":
            return list(range(n_layers))
        return sorted(random.choice(n_layers, size=max(1, n_layers // 2), replace=False).tolist())
    if (highest := max(layers)) >= n_layers:
        raise OptionError(f"layers includes {highest}, but the model has the layers 0 to {n_layers - 1}.")
    return list(layers)


def _check_attachable(model: nn.Module, optimizer: torch.optim.Optimizer, coupling: str) -> None:
    """Raise `OptionError` if KSS cannot act on a model and its optimizer."""
    name = type(model).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError("KSS cannot act inside LBFGS, which takes several losses a step; use another, such as AdamW.")
    if is_split(model) and not any(hasattr(p, "full_tensor") for p in model.parameters()):
        raise OptionError(
            f"KSS cannot read the parameters of {name}, which are sharded over processes; shard it with fully_shard "
            "(FSDP2), or train with DDP."
        )
    if is_split(model) and coupling != "trust_region":
        raise OptionError(
            f"KSS with coupling={coupling!r} needs gradients of whole parameters, but those of {name} are sharded over "
            "processes; use wb.KSS.recommended(), or train with DDP."
        )
    parameters = {id(p) for p in model.parameters() if p.requires_grad}
    if not any(id(p) in parameters for group in optimizer.param_groups for p in group["params"]):
        raise OptionError(f"The optimizer updates no parameter of {name}; attach KSS to the model that it trains.")


def _recomputation_error(model: nn.Module) -> SnapshotError:
    """Return the error for activation checkpointing in eval mode, which hides the states from hooks."""
    return SnapshotError(
        f"{type(model).__name__} recomputes its activations even in eval mode, which hides them from KSS; use "
        "torch.utils.checkpoint only while module.training is True."
    )


def _control_of_first_rank(control: ControlValues) -> ControlValues:
    """Return the controls of rank 0 on every rank, in one message, or two if layers are given by number."""
    code = _CODES[control.layers] if isinstance(control.layers, str) else len(control.layers)
    values = [control.enabled, control.strength, control.interval, control.gamma, code]
    message = torch.tensor(values, dtype=torch.float64, device=message_device())
    distributed.broadcast(message, src=0)
    enabled, strength, interval, gamma, code = message.tolist()
    layers: str | tuple[int, ...] | None = next((name for name, number in _CODES.items() if number == code), None)
    if layers is None:
        sent = control.layers if distributed.get_rank() == 0 else [0] * int(code)
        numbers = torch.tensor(sent, device=message.device)
        distributed.broadcast(numbers, src=0)
        layers = tuple(numbers.tolist())
    return ControlValues(bool(enabled), strength, int(interval), gamma, layers)


def _summed(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients summed over all ranks, in one message."""
    dense = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    message = torch.cat([gradient.flatten() for gradient in dense])
    distributed.all_reduce(message)
    parts = message.split([gradient.numel() for gradient in dense])
    return [part.view_as(gradient) for part, gradient in zip(parts, dense, strict=True)]


class KSS(KSSControls):
    """Koopman Spectral Shaping (RKSP, arXiv:2602.22988), a regularizer of the spectrum of each block.

    The first five arguments are the controls. They are attributes, which are read once per step: a script, a schedule,
    an alarm or a button may set them at any time and from any thread. Every change is recorded with the run.

    Args:
        strength: Weight alpha of the penalty; the paper uses 0.01 to 0.20.
        interval: Optimizer steps between two applications; the paper uses 10 to 20. The dose is strength / interval.
        enabled: Whether KSS acts.
        gamma: Target near-unit mass, in [0, 1]; the paper uses 0.3 to 0.5.
        layers: Layers to act on: ``"half"``, drawn in each step, as in the paper; ``"all"``; or the numbers of the
            layers.
        options: Options that are fixed over a run; None for the default ones.

    Example:
        >>> import workbench as wb
        >>> kss = wb.KSS.recommended()
        >>> model = wb.zoo.transformer(norm="none", d_model=16, n_layers=2, n_heads=2)
        >>> for record in wb.train(model, wb.tasks.associative_recall(), n_steps=3, kss=kss):
        ...     kss.enabled = record.step < 1
        >>> kss.enabled
        False

    See Also:
        `workbench.KSSOptions`: The options that are fixed over a run.
        `workbench.train`: Trains with KSS.
        `workbench.baselines.controls`: Other stability controls.
    """

    @classmethod
    def published(cls, **controls: Any) -> KSS:
        """Return KSS with the settings of the paper (arXiv:2602.22988): strength 0.15, every 10 steps, rank 32.

        It acts on half of the layers, drawn in each step.

        Args:
            **controls: Arguments of `KSS` that differ from these settings.
        """
        return cls(**controls)

    @classmethod
    def recommended(cls, **controls: Any) -> KSS:
        """Return KSS as a trust region, with which most runs of our sweeps converged, at the least compute cost.

        The results are in ``data/README.md``. After every update, the gain of all layers is measured from 64 token
        states of the batch. A block may increase the norm of the states up to twofold; beyond that, its gain may rise
        by at most a quarter per step. Spectra are taken in the eight leading directions.

        Args:
            **controls: Arguments of `KSS` that differ from these settings.
        """
        options = KSSOptions(n_snapshots=64, coupling="trust_region", penalty=PenaltyShape(rank=8))
        return cls(**{"strength": 1.0, "interval": 1, "layers": "all", "options": options, **controls})

    def attach(self, model: Subject | nn.Module, optimizer: torch.optim.Optimizer) -> Shaper:
        """Apply KSS in any training loop, as a context around the loop.

        Gradient accumulation, mixed precision, gradient checkpointing and DDP need no further code, nor do FSDP2 and
        tensor parallelism with the recommended settings, which gather the model for a pass.

        Args:
            model: Module that the loop calls, or its subject; it may be wrapped by DDP or ``torch.compile``.
            optimizer: Optimizer of its parameters; it may be wrapped too.

        Returns:
            The attached `Shaper`. Leaving its context, or calling ``detach()``, removes it.

        Raises:
            OptionError: If the optimizer evaluates the loss several times per step (LBFGS) or updates no parameter of
                the model, or if the parameters are sharded over processes and the coupling is not ``"trust_region"``.
        """
        return Shaper(self).attach(model, optimizer)
