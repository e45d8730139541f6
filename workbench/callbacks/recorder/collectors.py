"""Measurements of a recorder on one model: the model is read once, and each part is measured when it is due."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.recorder.joint_optimizer import OptimizedParameters
from workbench.callbacks.recorder.options import jointly, of_each_rank, on_ranks
from workbench.callbacks.recorder.probes import (
    TERMS,
    Around,
    ProbeCollector,
    QueryKeyWindow,
    ReductionCollector,
)
from workbench.callbacks.recorder.shards import HeldParts
from workbench.callbacks.recorder.updates import UpdateCollector
from workbench.errors import AnatomyError, OptionError, SnapshotError, WorkbenchError
from workbench.io.memory import free_memory
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.attention_weights import QueryKey, Unreadable, query_key_weights
from workbench.models.batches import take_examples
from workbench.models.calling import as_written, on_device_of
from workbench.models.probing import without_own_hooks
from workbench.models.readable_weights import (
    Measurement,
    complete,
    finish,
    gathered,
    local_part,
    readable,
)
from workbench.models.router_weights import Router, router_weights
from workbench.monitors.curvature import preconditioned_sharpness, sharpness
from workbench.monitors.probe_pass import PARTS as PROBED
from workbench.monitors.probe_pass import ModelProbe
from workbench.monitors.router_health import router_conditioning, router_similarity
from workbench.schema.runs import ROUTER
from workbench.training.recording import SpectraTaker

if TYPE_CHECKING:
    import xarray as xr

    from workbench.callbacks.recorder.options import RecorderOptions


#: Bytes that are always free.
_SMALL = 1 << 24
#: Why the blocks of a model cannot be read whose parameters FSDP1 has replaced by parts of a flat tensor.
_FLAT = "FSDP1 replaces its weights by parts of flat tensors. Shard it with fully_shard (FSDP2)."


@dataclass(frozen=True)
class ModelReading:
    """Structure of a model as names and paths, read once and also valid for the wrapped or sharded model."""

    anatomy: Anatomy | None
    query_keys: list[QueryKey | Unreadable] = field(default_factory=list)
    routers: list[Router | Unreadable] = field(default_factory=list)
    troubles: Mapping[str, str] = field(default_factory=dict)


def read_model(model: nn.Module, inputs: Any, *, is_stage: bool = False) -> ModelReading:
    """Read blocks, query and key weights, and routers of a model; the model is left unchanged."""
    troubles = {}
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    # A stage of a pipeline may have one block, which nothing but its container shows.
    single = [name for name, each in model.named_modules() if is_stage and isinstance(each, kinds) and len(each) == 1]
    with warnings.catch_warnings(), as_written(), readable(model):
        warnings.simplefilter("ignore")
        try:
            try:
                anatomy = read_anatomy(model, take_examples(inputs, slice(0, 2)))
            except AnatomyError:
                if not single:
                    raise
                anatomy = read_anatomy(model, take_examples(inputs, slice(0, 2)), stack=single[0])
        except Exception as error:  # noqa: BLE001  (a third-party model may fail in any way; an event reports it)
            return ModelReading(None, troubles={"anatomy": _reason(error)})
        query_keys, routers = [], []
        try:
            query_keys = query_key_weights(model, inputs, anatomy=anatomy)
        except Exception as error:  # noqa: BLE001
            troubles["attention"] = _reason(error)
        try:
            routers = router_weights(model, inputs, anatomy=anatomy)
        except Exception as error:  # noqa: BLE001
            troubles["router"] = _reason(error)
    return ModelReading(anatomy, query_keys, routers, troubles)


class Collectors:
    """All measurements of a recorder on one model."""

    def __init__(
        self,
        options: RecorderOptions,
        subjects: Sequence[nn.Module],
        parts: HeldParts,
        parameters: OptimizedParameters,
        probe: Any,
        event: Callable[..., None],
        reading: ModelReading | None = None,
        *,
        around: Around = nullcontext,
        loss_of: Callable[[nn.Module], Tensor] | None = None,
        is_stage: bool = False,
    ) -> None:
        self._is_stage = is_stage
        self.options, self.optimizer, self.parameters = options, parts.optimizer, parameters
        self.model = self._outermost = subjects[0]
        self._is_flat = any(hasattr(weight, "_fsdp_flattened") for weight in self.model.parameters())
        self._event = event
        self._off = {part for part, every in options.every.items() if every is None}
        self._reported: set[int] = set()
        self._window_begins = 0
        self.is_whole, self._turn = True, 0  # whether blocks are measured together, or in turn
        self.n_heads = 0
        self._had_attention: np.ndarray | None = None
        self.called: set[str] = set()
        self.probe = None if probe is None else on_device_of(self.model, probe)
        self.reading = self._agreed(self._read(subjects) if reading is None else reading)
        reading, parameters.model = self.reading, self.model
        self.names = [site.name for site in reading.anatomy.sites] if reading.anatomy is not None else []
        self.routers = [router for router in reading.routers if isinstance(router, Router)]
        self.query_keys = QueryKeyWindow(reading.query_keys, parameters, options.alpha)
        self._update = UpdateCollector(parts, parameters, reading.anatomy)
        self.reduction = ReductionCollector(parts.optimizer, self._outermost)
        self._probes: ProbeCollector | None = None
        if self.probe is not None:
            if (given := options.loss_of) is not None:
                loss_of = lambda model: given(model, self.probe)  # noqa: E731
            self._probes = ProbeCollector(self.model, self.probe, reading.anatomy, reading.query_keys, around, loss_of)
        self._probe_pass: ModelProbe | None = None
        self._taker: SpectraTaker | None = None
        #: Parts that are measured after an update -> function from the step and the values of the probe, which are
        #: complete when the tensors of the measurement have been read.
        self.after_update: dict[str, Callable[[int, Mapping[str, Any]], Measurement[Mapping[str, Any]]]] = {
            "attention": self.attention,
            "router": self.router,
            "optimizer": self.update,
            "activations": self.activations,
            "curvature": lambda step, probed: self.curvature(),
            "precision": lambda step, probed: self.precision(),
            "reduction": lambda step, probed: self.reduction.values(),
            "update": lambda step, probed: self.update_effect(),
        }

    def begin(self, step: int) -> None:
        """Report the parts that cannot be recorded, and take base points after ``step`` updates."""
        if (reason := self.reading.troubles.get("anatomy")) is not None:
            if self.parameters.are_elsewhere:
                reason += " Read a sharded model before sharding it: recorder.prepare(model, inputs)."
            self._begin_probes()
            for part in ("attention", "router", "activations", "precision", "spectra"):  # the others need no blocks
                self._miss(part, f"The blocks of {type(self.model).__name__} cannot be read: {reason}")
            return
        for source in ("attention", "router"):
            if (reason := self.reading.troubles.get(source)) is not None and self.is_on(source):
                self._event("not recorded", source=source, message=reason)
        self._begin_probes()
        taken = self._first_pass()
        self._off = set().union(*of_each_rank(self._off))
        taken = taken if self.is_on("probe") else {}
        if self.is_on("attention"):
            self._begin_attention(taken.get("attention", {}))
        if self.is_on("router"):
            for router in self.reading.routers:
                if isinstance(router, Unreadable):
                    self._event("not recorded", source="router", message=router.reason, layer=router.layer)
            if not self.routers:
                self.switch_off("router")  # a dense model has none, so nothing is missing
        if self.is_on("attention"):
            self.set_window(step, opens=True, is_measured=False)
        self._report_unreadable()

    def _begin_probes(self) -> None:
        """Switch off probes that cannot run, without an event if only the model returns no loss."""
        if self._is_flat:
            for part in ("precision", "update"):
                self._miss(part, f"The probe needs whole blocks on each rank. {_FLAT}")
        elif self._probes is None:
            self.switch_off("precision")
            self.switch_off("update")
        elif self.is_on("update"):
            try:
                with self.passes():
                    if not self._probes.knows_loss:
                        self.switch_off("update")
            except Exception:  # noqa: BLE001  (a third-party model may fail in any way; the probe's event reports it)
                self.switch_off("update")

    def _first_pass(self) -> dict[str, dict[str, np.ndarray]]:
        """Run the probe once, to find the parts that it can measure."""
        anatomy = self.reading.anatomy
        if self.probe is None or anatomy is None or not any(self.is_on(part) for part in PROBED):
            return {}
        try:
            self._probe_pass = ModelProbe(self.model, anatomy, self.probe, routers=self.reading.routers)
            found: dict[str, dict[str, np.ndarray]] = {}
            with self._noting_calls():
                measurement = self.probed(PROBED, found)
                if measurement is not None:
                    complete(measurement)
            return found
        except Exception as error:  # noqa: BLE001  (a third-party model may fail in any way; an event reports it)
            self._miss("activations", f"The probe does not pass through the model: {_reason(error)}")
            self.switch_off("probe")
            return {}

    def renew_probe(self, examples: Any) -> None:
        """Measure on other examples from now on."""
        self.probe = on_device_of(self.model, examples)
        if self._probe_pass is not None:
            anatomy = self._probe_pass.anatomy
            self._probe_pass = ModelProbe(self.model, anatomy, self.probe, routers=self.reading.routers)

    @contextmanager
    def _noting_calls(self) -> Iterator[None]:
        """Note the names of the modules that are called."""
        handles = [
            module.register_forward_pre_hook(lambda *_, name=name: self.called.add(name))
            for name, module in self.model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def passes(self, *, n_copies: int = 1, casts: bool = False) -> Iterator[None]:
        """Return the context of passes through the model: uncompiled, without the hooks of the user, and not sharded.

        A pass that gathers shards on the way would make other ranks wait for ever if it failed on one.
        """
        missing = [p for p in self._outermost.parameters() if hasattr(p, "to_local")]
        if missing:
            n_bytes = n_copies * _n_bytes(missing) - _n_bytes(map(local_part, missing))
            jointly(lambda: self._require_memory(n_bytes))
        with as_written(), without_own_hooks(self._outermost), gathered(self._outermost, casts=casts):
            yield

    def _require_memory(self, n_bytes: int) -> None:
        """Raise SnapshotError before a measurement if it needs more memory than is free."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if n_bytes > _SMALL and n_bytes > (free := free_memory(device)):
            raise SnapshotError(
                f"It needs {n_bytes / 1e9:.2f} GB of memory, but {free / 1e9:.2f} GB are free; measure it on a larger "
                "device, or switch it off with every=."
            )

    def is_on(self, part: str) -> bool:
        """Return whether a part is recorded."""
        return part not in self._off and not (part == "activations" and "probe" in self._off)

    def switch_off(self, part: str) -> None:
        """Stop recording a part."""
        self._off.add(part)

    def coords(self, part: str) -> dict[str, np.ndarray]:
        """Return the coordinates of a part: values along its dimensions, and names."""
        if part in ("curvature", "reduction", "update"):
            return {}
        if part == "optimizer":
            names, layers = self._update.module_names, self._update.layers
            return {"module": np.arange(len(names)), "module_name": np.array(names), "layer": np.array(layers)}
        layers = [router.layer for router in self.routers] if part == "router" else [*range(len(self.names))]
        coords = {"layer": np.array(layers), "layer_name": np.array([self.names[layer] for layer in layers])}
        if part == "attention":
            coords |= {"head": np.arange(self.n_heads), "term": np.array(TERMS)}
        if part == "precision":
            coords["head"] = np.arange(self.query_keys.n_heads)
        if part == "router":
            coords["expert"] = np.arange(max(router.n_experts for router in self.routers))
        return coords

    def probed(
        self, parts: Collection[str], found: dict[str, dict[str, np.ndarray]], *, is_first: bool = False
    ) -> Measurement[None] | None:
        """Measure all parts that need a pass over the probe, in one pass, which adds their values to ``found``."""
        due = [part for part in parts if part in PROBED and self.is_on(part)]
        if self._probe_pass is None or not due or not self.is_on("probe"):
            return None
        return self._probed(self._probe_pass, due, found, is_first=is_first)

    def _probed(
        self, probe_pass: ModelProbe, due: list[str], found: dict[str, dict[str, np.ndarray]], *, is_first: bool
    ) -> Measurement[None]:
        with self.passes(), torch.autocast(next(self.model.parameters()).device.type, enabled=False):
            measurement = probe_pass.taking(due)
            tensors = next(measurement)
        found |= finish(measurement, (yield tensors))
        if is_first and "router" in found:
            found["router"]["routing_change"][:] = math.nan  # the parameters have not changed since then

    def measure(self, part: str, step: int, probed: Mapping[str, Any]) -> Measurement[Mapping[str, Any]]:
        """Measure one part after the update of a step; ``probed`` receives the values of `probed`."""
        return self.after_update[part](step, probed)

    def set_window(self, n_done: int, *, opens: bool, is_measured: bool) -> None:
        """Begin to compare queries and keys with their weights after some updates, or release the weights compared."""
        if opens and (not is_measured or self.query_keys.is_in_turn):
            self.query_keys.begin()
        elif is_measured and not opens:
            self.query_keys.release()
        if opens:
            self._window_begins = n_done

    def attention(self, step: int, probed: Mapping[str, Any]) -> Measurement[dict[str, np.ndarray]]:
        """Return the spectra of query-key updates, and attention on the probe."""
        is_full = step + 1 - self._window_begins == self.options.every["attention"]
        values, broken = yield from self.query_keys.measure(self.n_heads, is_full=is_full)
        of_probe = probed.get("attention", {})
        for name in ("attention_logit_max", "attention_entropy", "attention_entropy_share"):
            values[name] = np.full((len(self.names), self.n_heads), np.nan)
            if name in of_probe:
                values[name][:, : of_probe[name].shape[1]] = of_probe[name]
        is_lost = (self._had_attention & np.isnan(values["attention_entropy"])).any(1) if of_probe else []
        self._report_broken(step, {int(layer): "attention scores" for layer in np.flatnonzero(is_lost)} | broken)
        return values

    def router(self, step: int, probed: Mapping[str, Any]) -> Measurement[dict[str, np.ndarray]]:
        """Return the measures of the router weights, and the routing of the probe."""
        values = {name: np.full(len(self.routers), np.nan) for name in ROUTER if name != "expert_load"}
        values["expert_load"] = np.full((len(self.routers), max(router.n_experts for router in self.routers)), np.nan)
        weights = [router.read(self.parameters.as_model).weight.float() for router in self.routers]
        measured = [(router_similarity(w), router_conditioning(w), torch.isfinite(w).all()) for w in weights]
        found = yield [value for of_router in measured for value in of_router]
        values["router_similarity"][:], values["router_conditioning"][:] = found[0::3], found[1::3]
        broken = {
            router.layer: "router weights" for router, good in zip(self.routers, found[2::3], strict=True) if not good
        }
        self._report_broken(step, broken)
        return values | dict(probed.get("router", {}))

    def begin_update(self) -> None:
        """Prepare the measurement of the next update."""
        self._require_memory(_n_bytes(map(local_part, self.optimizer.parameters)))
        self._update.begin()

    def begin_effect(self) -> None:
        """Prepare the measurement of the effect of the next update."""
        if self._probes is not None:
            copies = self._update.copies
            new = [p for p in self.model.parameters() if p.requires_grad and id(p) not in copies]
            self._require_memory(_n_bytes(map(local_part, new)))
            self._probes.begin_update(copies)

    def precision(self) -> Measurement[dict[str, np.ndarray]]:
        """Return the errors of the run's arithmetic."""
        assert self._probes is not None
        sites = () if self.reading.anatomy is None else self.reading.anatomy.sites
        # Parameters and gradients of one block, four times, two of them in float64, and their differences in float64.
        jointly(
            lambda: self._require_memory(12 * max((_n_bytes(each.module.parameters()) for each in sites), default=0))
        )
        with self.passes(casts=True):
            layers = self._probes.precision_layers
            if not self.is_whole:
                layers = layers[self._turn % max(1, len(layers)) :][:1]
                self._turn += 1
            measurement = self._probes.precision(layers)
            tensors = next(measurement)
        before, values = {*self._probes.failed}, finish(measurement, (yield tensors))
        for layer in self._probes.failed.keys() - before:
            reason = f"The arithmetic of layer {layer} cannot be measured ({self._probes.failed[layer]})."
            self._event("not recorded", source="precision", message=reason, layer=layer)
        return values

    def update_effect(self) -> Measurement[dict[str, float]]:
        """Return the effect of the update on the loss of fixed examples."""
        assert self._probes is not None
        with self.passes(n_copies=2):
            measurement = self._probes.update()
            tensors = next(measurement)
        return finish(measurement, (yield tensors))

    def forget_update(self) -> None:
        """Discard the measurement of an update that was skipped."""
        self._update.forget()

    def update(self, step: int, probed: Mapping[str, Any]) -> Measurement[dict[str, np.ndarray]]:
        """Return the measures of the update, from the parameters before and after it."""
        values, broken = yield from self._update.end()
        self._report_broken(step, broken)
        return values

    def activations(self, step: int, probed: Mapping[str, Any]) -> Measurement[dict[str, np.ndarray]]:
        """Return the measures of the residual stream on the probe."""
        yield []
        if "activations" not in probed:
            raise SnapshotError("The probe did not pass through the model.")
        is_bad = ~np.isfinite(probed["activations"]["activation_max"])
        self._report_broken(step, {int(layer): "activations" for layer in np.flatnonzero(is_bad)})
        return dict(probed["activations"])

    def curvature(self) -> Measurement[dict[str, float]]:
        """Return the sharpness of the loss on the probe, also preconditioned by Adam."""
        loss_of = self.options.loss_of
        if loss_of is None:
            raise OptionError("curvature needs the loss as a function; pass Recorder(loss_of=).")
        if self.parameters.are_elsewhere:
            raise SnapshotError(
                "The optimizer updates copies of the model's parameters, or they are sharded over ranks."
            )
        rate = max(float(group["lr"]) for group in self.optimizer.param_groups)

        def loss(model: nn.Module) -> Tensor:
            return loss_of(model, self.probe)

        with self.passes():
            unscaled = sharpness(self.model, loss)
            try:
                scaled = preconditioned_sharpness(self.model, loss, self.optimizer)
            except OptionError:  # no second moments
                scaled = math.nan
        yield []
        return {
            "sharpness": unscaled,
            "sharpness_rate": unscaled * rate,
            "preconditioned_sharpness": scaled,
            "preconditioned_sharpness_rate": scaled * rate,
        }

    def spectra(self, step: int) -> xr.Dataset | None:
        """Return spectra of the residual stream on the probe; None, with an event, if the stream is not finite."""
        try:
            with self.passes():
                if self._taker is None:
                    self._taker = SpectraTaker(self.model, self.probe, self.options.profile_options)
                return self._taker.take(step)
        except SnapshotError as error:
            self._event("no spectra", message=str(error))
            return None

    def _read(self, subjects: Sequence[nn.Module]) -> ModelReading:
        """Read the first module that can be read; a LightningModule is often a wrapper without a forward."""
        if self.probe is None:
            reason = (
                "no batch entered it before its first update. If a compiled function calls the model, compile the "
                "model instead."
            )
            return ModelReading(None, troubles={"anatomy": reason})
        if self._is_flat:  # each rank would see other shapes, and would go another way through messages of passes
            return ModelReading(None, troubles={"anatomy": _FLAT})
        readings = []
        try:
            with self.passes():
                for subject in subjects:
                    readings.append(read_model(subject, self.probe, is_stage=self._is_stage))
                    if readings[-1].anatomy is not None:
                        self.model = subject
                        return readings[-1]
        except WorkbenchError as error:  # of memory
            return ModelReading(None, troubles={"anatomy": str(error)})
        return readings[0]

    def _agreed(self, reading: ModelReading) -> ModelReading:
        """Return a reading without the parts that another rank cannot read; a collective operation."""
        ranks = of_each_rank(dict(reading.troubles))
        found = {part: {rank: of[part] for rank, of in enumerate(ranks) if part in of} for of in ranks for part in of}
        missing = {part: on_ranks(why) for part, why in found.items() if part not in reading.troubles}
        if not missing:
            return reading
        return ModelReading(
            None if "anatomy" in missing else reading.anatomy,
            [] if {"anatomy", "attention"} & missing.keys() else reading.query_keys,
            [] if {"anatomy", "router"} & missing.keys() else reading.routers,
            {**reading.troubles, **missing},
        )

    def _begin_attention(self, probed: Mapping[str, np.ndarray]) -> None:
        unreadable = [reading for reading in self.reading.query_keys if isinstance(reading, Unreadable)]
        if not probed and not self.query_keys.n_heads:
            reason = f" {unreadable[0].reason}" if unreadable else ""
            self._miss("attention", f"No layer has attention that can be read.{reason}")
            return
        for reading in unreadable:
            self._event("not recorded", source="attention", message=reading.reason, layer=reading.layer)
        n_seen = probed["attention_entropy"].shape[1] if probed else 0
        self.n_heads = max(self.query_keys.n_heads, n_seen)
        self._had_attention = np.zeros((len(self.names), self.n_heads), dtype=bool)
        self._had_attention[:, :n_seen] = ~np.isnan(probed["attention_entropy"]) if probed else False

    def _miss(self, part: str, reason: str) -> None:
        if self.is_on(part):
            self.switch_off(part)
            self._event("not recorded", source=part, message=reason)

    def _report_unreadable(self) -> None:
        """Record events for the values that cannot be measured on the probe."""
        if self._probe_pass is None:
            return
        read = (*self.reading.routers, *self.reading.query_keys)
        known = {reading.reason for reading in read if isinstance(reading, Unreadable)}
        for sentence in self._probe_pass.unreadable:
            if sentence not in known and (self.is_on("attention") or not sentence.startswith("The attention")):
                self._event("not recorded", source="probe", message=sentence)

    def _report_broken(self, step: int, broken: Mapping[int, str]) -> None:
        """Record one event for each layer with values that are not finite."""
        for layer, what in broken.items():
            if layer not in self._reported:
                self._reported.add(layer)
                message = f"Layer {layer} ({self.names[layer]}) contains {what} that are not finite."
                self._event("not finite", source=what, message=message, layer=layer, step=step)


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
