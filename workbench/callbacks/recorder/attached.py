"""A recorder attached to one model: the measurements around each optimizer step."""

from __future__ import annotations

import contextlib
import json
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.callbacks.mirrors import RaisedAlarm
from workbench.callbacks.observation import Alarm, Observation, broken_contract, changed_setting
from workbench.callbacks.recorder.batch_watch import BatchWatch
from workbench.callbacks.recorder.blame import BlameSearch, PassSketches, is_replicated
from workbench.callbacks.recorder.budget import OF_UPDATE, Budget, Cost
from workbench.callbacks.recorder.collectors import Collectors, ModelReading
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer, OptimizedParameters, other_optimizers
from workbench.callbacks.recorder.options import (
    NUMBERS,
    OF_STAGE,
    SUMS,
    Change,
    PeerError,
    RecorderMemory,
    RecorderOptions,
    as_floats,
    as_number,
    changed_on_any,
    failures,
    mean_over_ranks,
    measured_by_all,
    of_all_ranks,
    of_each_rank,
    of_first_rank,
    on_every_rank,
    on_ranks,
    plain,
    to_plain,
)
from workbench.callbacks.recorder.probes import ReductionCollector
from workbench.callbacks.recorder.rows import Flight, Row, Started
from workbench.callbacks.recorder.settings import SettingsWatch
from workbench.callbacks.recorder.shards import (
    HeldParts,
    PipelineStage,
    divides_gradients,
    splits_tensors,
    stages_of,
    summed,
)
from workbench.callbacks.recorder.updates import SampledUpdate, gradient_square, overflow_of, total_gradient_norm
from workbench.errors import OptionError, WorkbenchError
from workbench.io.run_output import RunOutput, before_exit, issue_warning
from workbench.models.calling import alone, bare, is_shared
from workbench.models.readable_weights import Measurement, complete
from workbench.monitors.probe_pass import PARTS as PROBED
from workbench.monitors.scalars import SpikeScore
from workbench.schema.events import Event
from workbench.schema.statuses import RunState

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.alarms.settings_sentinel import SettingsChange
    from workbench.callbacks.recorder.watched_contracts import WatchedContracts
    from workbench.probes.blame import Blame
    from workbench.training.callback import TrainingRun

#: Descriptions of failed measurements that are not parts of a run.
_WORDS = {
    "probe": "The measurements on the probe (activations, attention logits, routing)",
    "setup": "The initial state",
    "monitors": "The gradient norm",
    "sample": "The update ratio",
    "settings": "The settings",
    "sketch": "What spoils an update (rank, micro-batch and row)",
}


#: Parts whose costs are counted together with others.
_COUNTED = {"monitors": "batch", "sample": "batch"}
#: Most rows that wait for one copy from the device or one message between ranks, most updates for which they wait, and
#: number of updates after which a copy is read: it is complete by then unless the device is far behind.
_MOST_ROWS, _LONGEST_WAIT, _LAG = 10, 30, 8
#: Number of updates between two copies of the state of the recorder in its store.
_STATE_EVERY = 200
#: Recorders that record, which end with the interpreter.
_attached: weakref.WeakSet[AttachedRecorder] = weakref.WeakSet()
#: Parts that determine the cause of an alarm.
_CHECKS = ("precision", "reduction")


class AttachedRecorder:
    """A recorder attached to a model and an optimizer; created by `Recorder.attach`.

    Hooks on the optimizer run before and after each update; hooks on the model count its inputs. Measurements are taken
    after the update of step s, counted from 0, if s + 1 is a multiple of the part's cadence. The row of step s
    therefore shows the parameters with which the loss of step s + 1 is computed. Spectra are taken before the update of
    step s if s is a multiple of their cadence, as in `workbench.train`. If a run ends without error before its first
    update, because its first loss is too large, attention, routers and activations are measured at its end, as the row
    of step 0.

    On an accelerator the values of some rows are copied together, without waiting, and the rows follow a few updates
    later, each with its step. With several ranks the rows of updates between two measurements wait for one message.

    If the rows of all updates cost more than the budget, updates after which nothing is measured may have none; at
    least every tenth update has one. This is not so with several ranks, with a gradient scaler or in a loop that has
    skipped an update, and ends for good with the first call of `log` or `finish_step`.

    Metrics passed to `log` belong to the update of the batch that passed through the model last: before
    ``optimizer.step()`` to the next update, and afterwards, until the next batch begins, to the update just done.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: JointOptimizer,
        output: RunOutput,
        options: RecorderOptions,
        memory: RecorderMemory,
        *,
        publish: Callable[[Observation, Sequence[RaisedAlarm]], None],
        ended: Callable[[str], None],
        parameters: OptimizedParameters,
        probe: Any,
        step: int,
        spikes: SpikeScore,
        reading: ModelReading | None = None,
        alarms: Alarms | None = None,
        run: TrainingRun | None = None,
        is_hosted: bool = False,
        contracts: Callable[..., WatchedContracts] | None = None,
        stage: PipelineStage | None = None,
    ) -> None:
        self.contracts: WatchedContracts | None = None
        self._stage = stage
        self._run, self.is_attached = run, False
        self.options, self.memory, self.output, self.is_hosted = options, memory, output, is_hosted
        self._pass_on, self._ended = publish, ended
        self.step = step
        self.numbers: dict[str, float] = {}
        self._every = options.every
        self.device = next((p.device for p in bare(model).parameters()), torch.device("cpu"))
        self._budget = Budget(
            options.every,
            fixed=options.fixed,
            share=options.budget,
            device=self.device,
            costs=memory.costs,
            n_parameters=sum(p.numel() for p in bare(model).parameters()),
        )
        self._due, self._decided, self._forced, self._examined = set[str](), -1, set[str](), set[str]()
        #: Whether the current update has no row, whether that is so of the one before it and no batch began since, and
        #: whether the loop logs metrics, so that all updates have a row.
        self._is_lean = self._was_lean = self._logs = False
        self._rows: list[Row] = []
        self._flights: list[Flight] = []
        self._workers: ThreadPoolExecutor | None = None
        #: Whether values are read later, as a host that waits for them would hold up an accelerator.
        self._is_late = self.device.type != "cpu" and not is_hosted
        self._alarms, self.new_alarms = alarms, list[Alarm]()
        self._parameters: OptimizedParameters | None = parameters
        self._reading = reading
        self._collectors: Collectors | None = None
        self._pending: dict[str, float | Tensor] = {}  # metrics logged by the caller
        self._noted: dict[str, float | Tensor] = {}  # metrics computed by the recorder
        self._open_step: int | None = None
        self._spikes = spikes
        self._has_given_norm = False
        self._closure_loss: Any = None
        self._changes: list[Change] = []
        self._measured: dict[str, Started] = {}
        #: In a pipeline, what was measured on the current batch before the update: results, and values by part.
        self._before: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._was_finite, self._kept = True, step // _STATE_EVERY
        self._is_ready = False
        self.blame: BlameSearch | None = None
        self.last_blame: Blame | None = None  # that nobody asked for
        self._parts = HeldParts(optimizer)
        self._sample = SampledUpdate(self._parts)
        self._gradients: list[Tensor] = []  # square of the norm of those on this rank, and their number
        self._n_alike = 1  # ranks that read the same examples
        self._settings: SettingsWatch | None = None
        self._optimizer: JointOptimizer | None = optimizer
        self._has_updated = step > 0
        self._check_requested, self._checked = False, -1
        self._n_unmade = 0
        if parameters.are_coarse:
            issue_warning(
                f"{type(bare(model)).__name__} is trained in low precision without a float32 copy of its parameters; "
                "in bfloat16, updates below 2^-9 of a parameter are rounded away, so interpret small changes of the "
                "monitors with care."
            )
        self.batches = BatchWatch(
            model,
            optimizer,
            notes_unmade=not is_hosted,  # the owner of the store knows which updates were made
            n_probe_tokens=options.n_probe_tokens,
            probe=probe,
            begin=_weakly(self._begin_batch),
            loses_sight=_weakly(self._search_optimizer),
            labels=None if run is None else lambda: run.targets,
            recent_examples=memory.recent_examples,
            timed=self._budget.timed,
        )
        self.batches.is_stage = stage is not None
        output.share = self._budget.spent_share
        if not is_hosted:
            output.timed = self._budget.timed
        try:
            if probe is not None:
                self._prepare(optimizer)
            if stage is not None:
                alone.add(self)
            optimizer.hook(self._before_update, self._after_step)
            self.is_attached = True
            _attached.add(self)
            if contracts is not None:
                self.contracts = contracts(model, optimizer, partial(getattr, self.batches, "is_paused"))
                self._keep_contracts()
        except BaseException:
            self.batches.detach()
            raise

    def __del__(self) -> None:
        if getattr(self, "is_attached", False):
            self._end_unclosed()

    def __enter__(self) -> AttachedRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.detach(is_broken=kind is not None)

    @property
    def pending(self) -> dict[str, float | Tensor]:
        """Metrics of the current step logged so far."""
        return dict(self._pending)

    @property
    def settings_state(self) -> dict[str, Any]:
        """State of the comparison of the run's settings, as JSON values."""
        return self.memory.settings if self._settings is None else self._settings.sentinel.state_dict()

    @property
    def costs(self) -> dict[str, float]:
        """Seconds of one measurement of each part, from which a resumed run starts."""
        return {part: seconds for part, seconds in self._budget.known().items() if part != "step"}

    def flush(self) -> None:
        """Write all metrics so far, including those of the current step if its update is done.

        With several ranks, rows that wait for a message between them are not written yet.
        """
        if self._open_step is not None:
            self._close_row()
        if not is_shared():
            self._publish_waiting()
        self.output.flush()

    def cost(self) -> Cost:
        """Return what the observation has cost so far, by part."""
        return self._budget.cost()

    @property
    def slowed(self) -> dict[str, int]:
        """Updates between two measurements of each part that the budget allows less often than usual."""
        return self._budget.slowed

    def detach(self, *, is_broken: bool = False) -> None:
        """Remove all hooks, write all metrics so far, and release the model and the optimizer."""
        if not self.is_attached or self._optimizer is None:
            return
        self.is_attached = False
        word = "stopped" if is_broken else "finished"
        self._end_contracts()
        self._optimizer.unhook()
        try:
            self._optimizer.end_update()
            self._close_row()
            self.batches.note_unmade()
            self._write_unmade()
            self._publish_waiting()
            if not is_broken:
                self._measure_without_update()
        finally:
            if self._collectors is not None:
                self._collectors.reduction.disarm()
            if self.blame is not None:
                self.blame.forget()
            self.blame = self.batches.sketches = None  # they refer to the model
            self._keep_state()
            self.batches.detach()
            if self._workers is not None:
                self._workers.shutdown(wait=False)
            self._collectors = self._parameters = self._optimizer = self._settings = None
            if not self.is_hosted:
                self.event(word, message=f"{word.capitalize()} after {self.step} steps.")
                self.output.close(state=word)
            self._end_memory(word)

    def _end_unclosed(self) -> None:
        """Complete the record of a run whose recorder nobody detached: it is no longer used, or the process ends."""
        self.is_attached = False
        with contextlib.suppress(Exception):  # an exception here would be printed, and no one can handle it
            self._end_contracts()
            if self._optimizer is not None:
                self._optimizer.unhook()
            self._close_row()
            self._publish_waiting()
            self._keep_state()
            self.batches.detach()
            if not self.is_hosted:
                self.event("stopped", message=f"The recording was not closed; it ended after {self.step} steps.")
                self.output.close(state=str(RunState.UNCLOSED))
            self._end_memory(RunState.UNCLOSED)

    def _end_memory(self, state: str) -> None:
        self.memory.step = self.step
        self._ended(state)
        alone.discard(self)

    def _end_contracts(self) -> None:
        if self.contracts is not None:
            self.contracts.end()
            self._keep_contracts()

    def _keep_contracts(self) -> None:
        """Keep the results of contracts so far in the store."""
        if self.contracts is not None and (report := self.contracts.report) is not None:
            self.output.commit(contracts=json.dumps(report.as_json()))

    def _keep_state(self) -> None:
        """Keep in the memory, and in the store, what the next recorder of this run needs."""
        memory = self.memory
        memory.recent_examples, memory.settings = self.batches.recent_examples, self.settings_state
        memory.costs = self.costs
        if not self.is_hosted and self.output.path is not None:
            names = ("recent_examples", "settings", "costs")
            state = {"step": self.step, **{name: vars(memory)[name] for name in names}}
            self.output.commit(recorder_state=json.dumps(state))

    def log(self, **numbers: Any) -> None:
        """Log metrics of an update, such as ``loss`` and ``accuracy``."""
        if numbers and not self._logs:
            self._end_lean()
        for name, value in numbers.items():
            self._pending[name] = as_number(name, value)

    def finish_step(self, **numbers: Any) -> dict[str, float]:
        """End a step: no more metrics follow for it, even if its update was skipped.

        A loop that knows when a step ends may call this; a loop that counts its own steps may set ``step``.
        """
        self._end_lean()
        self.log(**numbers)
        self._has_given_norm = "grad_norm" in numbers  # then it need not be computed
        if self._open_step is None:
            self._noted["is_skipped"] = 1.0
            self._open_row()
        self._close_row()
        return self.numbers

    def find_blame(self, step: int | None) -> Blame:
        """Return what spoiled an update, see `workbench.callbacks.watch.Watch.blame`; on every rank."""
        collectors = self._collectors
        if self.blame is None or (collectors is not None and not collectors.is_on("sketch")):
            raise OptionError(
                "blame() needs gradients that hooks see before they are reduced, and at least two updates; parameters "
                "of this model are sharded in another way, or the first update was not made yet."
            )
        with self._budget.timed("sketch"), self.batches.paused():
            return self.blame.find(step)

    def check_now(self) -> None:
        """Check arithmetic and gradients also at the next update, regardless of their cadence, to explain an alarm.

        With several ranks nothing happens, since every rank would have to know of it.
        """
        self._check_requested = not is_shared()

    # Around the update

    def _end_lean(self) -> None:
        """Give all updates a row from now on, since the loop logs metrics of them.

        The row of an update that is already over, or whose batch has begun, has only what is logged.
        """
        self._logs = True
        if self._was_lean:
            self._open_step, self._was_lean = self.step - 1, False
        if self._open_step is not None:  # the next batch has not begun
            self.batches.rests = False
        self._is_lean = False

    def _decide(self) -> None:
        """Decide which parts are measured after the coming update."""
        if self._is_lean and self._decided == self.step and not self._check_requested:
            return
        made = self.step - self._n_unmade
        if self._decided != self.step:
            collectors = self._collectors
            is_on = (lambda part: True) if collectors is None else collectors.is_on
            self._decided = self.step
            self._due = {*filter(is_on, self._budget.due(self.step, made, is_on))}
            self.batches.examines = "batch" in self._due
            if self._stage is not None and self._due & {*PROBED}:
                self.batches.probe = None  # examples of the next batch
            spectra = self._every["spectra"]
            has_row = self._budget.row_is_due(self.step, self._due) or bool(spectra and self.step % spectra == 0)
            # Whether rows are spread is decided with each row, as a scaler can be noticed only then.
            self._is_lean = not has_row and self._budget.spreads_rows and self.batches.is_plain and not self._logs
            self.batches.rests = self._is_lean
        if self._check_requested:
            self._check_requested, self._checked = False, made
        is_checked = self._checked == made
        self._forced = {part for part in _CHECKS if is_checked and self._every[part] is not None}
        if self._forced:
            self._is_lean = self.batches.rests = False

    def _begin_batch(self) -> None:
        """Start a batch: metrics logged from now on belong to the next update."""
        if self._optimizer is not None:
            self._optimizer.end_update()
        self._was_lean = False
        if self._open_step is not None:
            with self._budget.timed("row"):
                self._close_row()
        if not is_shared():  # with several ranks, all of them write the row at the next update
            self._write_unmade()
        self._decide()
        if self._is_lean:
            return
        if self._is_due("reduction"):
            self._guarded("reduction", lambda collectors: collectors.reduction.arm())
        if (search := self.blame) is not None and self._is_due("sketch"):
            self._guarded("sketch", lambda collectors: search.sketches.arm())
        self._budget.begin_batch()

    def _before_update(self, loss: Any) -> None:
        """Measure between the backward pass and the update."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        self._was_lean = False
        if self._open_step is not None:  # no batch has passed since the last update
            with self._budget.timed("row"):
                self._close_row()
        if self._decided != self.step:
            self._decide()
        if self._settings is not None and "settings" not in self._due:
            self._settings.note_rates(self.step)
        if self._is_lean:
            return
        with self._budget.timed("row"):
            self._closure_loss = loss
            self.batches.begin_update()
            with self.batches.paused():
                if not self._is_ready:
                    with self._budget.timed("setup"):
                        self._prepare(optimizer)
                self._noted["learning_rate"] = self._rate()
                if self._parts.are_split and ("batch" in self._due or self._is_due("optimizer")):
                    self._parts.settle()
                if "batch" in self._due:
                    if self._parts.are_split:
                        found = self._guarded("monitors", lambda collectors: gradient_square(self._parts))
                        self._gradients = found or []
                    elif "grad_norm" not in self._pending and not self._has_given_norm:
                        norm = self._guarded("monitors", lambda collectors: total_gradient_norm(optimizer))
                        names = ("grad_norm",) if self._stage is None else ("grad_norm", OF_STAGE[0])
                        self._noted |= {} if norm is None else dict.fromkeys(names, norm)
                    self._guarded("sample", lambda collectors: self._sample.begin())
                if "settings" in self._due:
                    self._guarded("settings", lambda collectors: self._read_settings(collectors, optimizer))
                if self._is_due("reduction"):  # if every rank can; otherwise a rank would wait forever for the others
                    able = self._collectors
                    can_take = able is not None and able.is_on("reduction") and able.reduction.is_ready
                    act = ReductionCollector.take if on_every_rank(can_take) else ReductionCollector.skip
                    self._guarded("reduction", lambda collectors: act(collectors.reduction), is_joint=True)
                if self.blame is not None and self._is_due("sketch"):
                    search = self.blame
                    self._guarded("sketch", lambda collectors: search.take(self.step), is_joint=True)
                if self._every["spectra"] is not None and self.step % self._every["spectra"] == 0:
                    self._take_spectra()
                if self._is_due("optimizer"):
                    self._guarded("optimizer", lambda collectors: collectors.begin_update(), is_joint=True)
                if self._is_due("update"):
                    self._guarded("update", lambda collectors: collectors.begin_effect(), is_joint=True)
                if self._stage is not None:
                    self._probe_batch()

    def _probe_batch(self) -> None:
        """Measure on the first micro-batch of the update, which earlier stages of the pipeline have computed."""
        found, probed = self._before = {}, {}
        parts, examples = [part for part in PROBED if self._is_due(part)], self.batches.settle_probe()[0]
        if parts and examples is not None:

            def act(collectors: Collectors) -> Measurement[None] | None:
                collectors.renew_probe(examples)
                return collectors.probed(parts, probed)

            self._start(found, "probe", act)

    def _read_settings(self, collectors: Collectors, optimizer: JointOptimizer) -> None:
        if self._settings is None:
            run, planned = self._run, dict(self.options.planned)
            if run is not None and run.planned_rates:
                planned.setdefault("learning_rate", lambda step: run.planned_rates)
            self._settings = SettingsWatch(collectors.model, optimizer, planned, collectors.called)
            if self.memory.settings:
                self._settings.sentinel.load_state_dict(self.memory.settings)
        # In the workbench's own loop, several passes of one update are ranks emulated by a fault.
        is_own = self._run is not None and self._run.owns_loop
        self._settings.read(self.step, self.batches.autocast, 0 if is_own else self.batches.n_forwards)

    def _after_step(self) -> None:
        collectors, optimizer = self._collectors, self._optimizer
        if collectors is None or optimizer is None:  # the closure was never called
            return
        if self._is_lean:
            self.batches.forget()
            self._test_contracts()
            self._budget.skip_step()
            self._has_updated = self._was_lean = True
            self._go_on()
            return
        with self._budget.timed("row"):
            if "batch" in self._due:
                self._noted |= self._sizes()
            due = [part for part in collectors.after_update if self._is_due(part)] if self._due or self._forced else []
            found = overflow_of(optimizer)
            # On an accelerator the host does not wait for it; what is measured of a skipped update shows no change.
            is_skipped = not self._is_late and bool(found)
            self._noted["is_skipped"] = found if self._is_late else float(is_skipped)
            if is_skipped:
                kept = ("learning_rate", "is_skipped")
                self._noted = {name: self._noted[name] for name in kept if name in self._noted}
                collectors.forget_update()
                if self.is_hosted:
                    return
            self._open_row()
            if not is_skipped:
                self._has_updated = True
                with self.batches.paused():
                    self._measure(collectors, due, self.step)
            self._test_contracts()
            self._end_budget_step()
            self._go_on()
            if not self.batches.has_seen and not self.is_hosted:
                self._close_row()  # no hook marks the beginning of the next batch

    def _sizes(self) -> dict[str, float | Tensor]:
        """Return the size of the update, and the norm of its gradients if ranks hold parts of them; by all ranks."""
        found = self._guarded("sample", lambda collectors: self._sample.end()) or []
        if not self._parts.are_split:
            norms = () if self._stage is None else zip(OF_STAGE[1:], (each.sqrt() for each in found), strict=False)
            return {"update_ratio": (found[0] / found[1]).sqrt(), **dict(norms)} if found else {}
        # One message of all ranks, whatever could be measured on this one.
        unknown = [torch.full((), math.nan)] * 2
        square, n, change, size = summed([*(self._gradients or unknown), *(found or unknown)])
        self._gradients = []
        return {"grad_norm": torch.where(n > 0, square.sqrt(), math.nan), "update_ratio": (change / size).sqrt()}

    def _test_contracts(self) -> None:
        """Test contracts of the training that are due, and raise alarms for those that are broken."""
        contracts, budget = self.contracts, self._budget
        if contracts is None or not contracts.is_due:
            return
        share = budget.cost().share
        is_within = budget.share is None or share < budget.share
        with budget.timed("contracts"), self.batches.paused():
            broken = contracts.test(budget.known().get("step", 0.0), is_within_budget=is_within)
            self._keep_contracts()
        for each in broken:
            self._publish(broken_contract(self.step, each.id, each.sentence))

    def _go_on(self) -> None:
        """Begin the next step."""
        self.step += 1
        self._decide()
        if self._is_due("reduction"):
            self._guarded("reduction", lambda collectors: collectors.reduction.note_update())

    def _end_budget_step(self) -> None:
        budget = self._budget
        budget.end_step(self._due, self._forced)
        # Other ranks would wait for the messages of a row, and the owner of a store writes all rows.
        budget.spreads_rows = not (self._logs or self.is_hosted or is_shared()) and self.batches.may_rest
        if budget.is_plan_due:
            budget.plan(mean_over_ranks(budget.known(), (*self._every, *OF_UPDATE, "row", "step")))

    def _search_optimizer(self) -> None:
        """Follow the optimizer that updates the parameters instead of the one that was given, or report the loss."""
        if self._optimizer is None or self.is_hosted:
            return
        known = self._optimizer.parts
        found = other_optimizers(self._optimizer.parameters, known)
        reason = "The parameters change, but the optimizer that is recorded makes no update"
        if len(found) == 1:
            self._optimizer.follow([*(each for each in known if each is not known[-1]), *found])
            message = f"{reason}; another one ({type(found[0]).__name__}) is recorded from step {self.step} on."
        else:
            message = (
                f"{reason}; attach the recorder to the one that does. Nothing is recorded from step {self.step} on."
            )
            issue_warning(message)
        self.event("not recorded" if len(found) != 1 else "action", source="optimizer", message=message)

    # Rows

    def _open_row(self) -> None:
        """Collect the metrics of the current update; more may be logged until the row is closed."""
        seen = self.batches.take()
        found = seen.numbers() if seen.n_forwards else {}
        self._pending, self._noted = found | self._noted | self._pending, {}
        loss, self._closure_loss = self._closure_loss, None
        if "loss" not in self._pending and isinstance(loss, Real | Tensor):
            self.log(loss=loss)
        settings = self._settings
        if settings is not None and "settings" in self._due:
            changed = self._guarded("settings", lambda _: settings.changes(self.step))
            self._changes = [_plain_change(each) for each in changed or ()]
        self._open_step, self._examined = self.step, self._due | self._forced

    def _write_unmade(self, *, is_agreed: bool = False) -> None:
        """Write a row for each update that was not made."""
        unmade, self.batches.unmade = self.batches.unmade, []
        self._n_unmade += len(unmade)
        rows: list[dict[str, float | Tensor]] = [seen.numbers() if seen.n_forwards else {} for seen in unmade]
        rows = of_first_rank([as_floats(row) for row in rows]) if is_agreed else rows
        logged: dict[str, float | Tensor] = {} if is_agreed else self._pending
        for row in rows:
            own: dict[str, float | Tensor] = logged if row is rows[-1] else {}
            self._pending = {**row, "learning_rate": self._rate(), "is_skipped": 1.0, **own}
            self._open_step, self._examined = self.step, self._due
            self._close_row()
            self.step += 1

    def _rate(self) -> float | Tensor:
        groups = () if self._optimizer is None else self._optimizer.param_groups
        rates = [group["lr"] for group in groups if "lr" in group]
        if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates):
            return torch.stack([torch.as_tensor(rate, device=self.device) for rate in rates]).amax()
        return max(map(float, rates), default=math.nan)

    def _close_row(self) -> None:
        step, self._open_step = self._open_step, None
        if step is None:
            return
        if self._stage is not None and not self._stage.is_last:
            self._pending.pop("loss", None)  # which only the last stage knows
        examined, self._examined = self._examined, set()
        is_checked, has_batch = bool(examined - {"settings"}), "batch" in examined
        numbers, are_late = self._pending, self._is_late or is_shared()
        if not are_late:
            numbers = dict[str, float | Tensor](as_floats(numbers))
            is_checked |= not math.isfinite(numbers.get("loss", 0.0))
        self._rows.append(Row(step, numbers, self._changes, is_checked, has_batch, self._measured))
        is_urgent = is_checked or bool(self._changes) or self.is_hosted
        self._pending, self._changes, self._measured = {}, [], {}
        departs = is_urgent or len(self._rows) >= _MOST_ROWS or step - self._rows[0].step >= _LONGEST_WAIT
        if not are_late:
            if departs:
                self._publish_waiting()
            return
        if departs:
            self._depart()
        elif is_shared():  # a copy is read at the same steps on all ranks
            return
        while self._flights and self._flights[0].rows[-1].step <= step - (_LAG if self._is_late else 0):
            self._land(is_joint=is_shared())

    def _depart(self) -> None:
        """Begin one copy of the values of all rows that wait."""
        rows, self._rows = self._rows, []
        if self._is_late and not is_shared() and self._workers is None:
            self._workers = ThreadPoolExecutor(1, "workbench")
        self._flights.append(Flight(rows, is_late=self._is_late, workers=self._workers))

    def _publish_waiting(self) -> None:
        """Publish all rows that are closed, without a message between ranks, which may not end together."""
        if not (self._is_late or is_shared()):
            rows, self._rows = self._rows, []
            for row in rows:
                self._publish_row(row, as_floats(row.numbers))
        elif self._rows:
            self._depart()
        while self._flights:
            self._land(is_joint=False)

    def _land(self, *, is_joint: bool) -> None:
        """Publish the rows of the earliest copy."""
        flight = self._flights.pop(0)
        read, measured = flight.results()
        for part, seconds in flight.seconds.items():
            self._budget.add(part, seconds / (os.cpu_count() or 1))
        n_changes, n_unmade = sum(len(row.changes) for row in flight.rows), len(self.batches.unmade)
        if is_joint:
            read = [row | {name: row[name] / self._n_alike for name in SUMS if name in row} for row in read]
            read, n_changes, n_unmade = of_all_ranks(read, n_changes, n_unmade)
        for row, numbers, found in zip(flight.rows, read, measured, strict=True):
            if is_joint and n_changes:
                row.changes = changed_on_any(row.changes)
            self._publish_parts(row.step, found, is_joint=is_joint)
            self._publish_row(row, numbers)
        if is_joint and n_unmade:
            self._write_unmade(is_agreed=True)

    def _publish_row(self, row: Row, found: dict[str, float]) -> None:
        names = NUMBERS if self._stage is None else NUMBERS + OF_STAGE
        step, numbers = row.step, dict.fromkeys(names, math.nan) | found
        if "loss" in found:
            self._spikes.update(numbers["loss"])
        numbers["spike_score"] = self._spikes.score
        # A loss that is no longer finite does not wait for the alarms' turn.
        is_finite = math.isfinite(numbers["loss"])
        is_checked, self._was_finite = row.is_checked or (self._was_finite and not is_finite), is_finite
        numbers["examined"] = float(is_checked) + float(is_checked and row.has_batch)
        self.numbers = numbers
        values = {name: np.float64(value) for name, value in numbers.items()}
        self._publish(Observation(step, "monitors", values), is_checked=is_checked)
        changes, settings = row.changes, self._settings
        if settings is not None and settings.waits:  # these metrics are the same on every rank
            logged = self._guarded("settings", lambda _: settings.logged_changes(step, numbers)) or ()
            changes = [*changes, *map(_plain_change, logged)]
        if (step + 1) // _STATE_EVERY > self._kept and not self.is_hosted:
            self._kept = (step + 1) // _STATE_EVERY
            self._keep_state()
        for setting, factor, message in changes:
            self.event("setting", step=step, source=setting, score=factor, message=message)
            self._publish(changed_setting(step, setting, factor, message))

    # Measurements

    def _prepare(self, optimizer: JointOptimizer) -> None:
        """Read the model as soon as there is a probe; fewer parts are recorded of a model that cannot be read."""
        probe, subjects = self.batches.settle_probe()
        if self._stage is not None:
            self.batches.averages = divides_gradients(subjects[0])
        own = [(name, p) for model in subjects[:1] for name, p in model.named_parameters()]
        held = str([(name, None if hasattr(p, "_fsdp_flattened") else tuple(p.shape)) for name, p in own])
        ranks = of_each_rank((held, self._stage is None and bool(stages_of(subjects[0], optimizer))))
        if len({name for name, _ in ranks}) > 1 or any(is_part for _, is_part in ranks):
            # They wait for each other's messages before they begin a batch, so that rows could not be exchanged.
            message = (
                "Ranks hold different parts of a model; nothing more is recorded. Stages of a pipeline are recorded if "
                "each rank has created its own before the watch, and no two ranks have the same."
            )
            self.event("not recorded", source="setup", message=message)
            issue_warning(f"{message} Training continues.")
            self._end_contracts()
            optimizer.unhook()
            self.batches.detach()
            return
        probe = of_first_rank(probe)
        if any(map(splits_tensors, subjects)):
            examples = self.batches.recent_examples
            self._n_alike = of_each_rank(examples).count(examples)
        self._is_ready = True
        if self._stage is None:
            self.memory.probe = probe
            if (plain := to_plain(probe)) is not None and not self.is_hosted:
                self.output.commit(probe=json.dumps(plain))
        if self._parameters is None:
            return
        with self.batches.paused():
            self._collectors = Collectors(
                self.options,
                subjects,
                self._parts,
                self._parameters,
                probe,
                self.event,
                self._reading,
                around=self.batches.around_pass,
                loss_of=None if self._run is None else self._run.probe_loss,
                is_stage=self._stage is not None,
            )
            self._guarded("setup", lambda collectors: collectors.begin(self.step), is_joint=True)
            self._begin_blame(self._collectors)

    def _begin_blame(self, collectors: Collectors) -> None:
        """Sketch backward passes from the next update on, if hooks see whole gradients."""
        if self._every["reduction"] is None:  # both compare gradients
            return
        of = collectors.reduction
        if (projections := of.projections) is None:
            collectors.switch_off("sketch")
            return
        is_same = is_replicated(self.batches.entrances)
        self.batches.sketches = PassSketches(projections, collectors.model, of.replicas, is_replicated=is_same)
        passes, report = partial(collectors.passes, casts=True), _weakly(self._report_blame)
        self.blame = BlameSearch(self.batches.sketches, passes=passes, report=report, is_late=self._is_late)

    def _report_blame(self, found: Blame) -> None:
        self.last_blame = found
        self.event("blame", step=found.step, source=found.kind, score=found.score, message=found.sentence)

    def _is_due(self, part: str) -> bool:
        """Return whether a part is measured after the current update, by its cadence or because of an alarm."""
        return part in self._due or part in self._forced

    def _measure(self, collectors: Collectors, parts: list[str], step: int) -> None:
        """Measure some parts; their rows follow with the values of their tensors."""
        (found, probed), self._before = self._before, ({}, {})
        if self._stage is None and any(part in PROBED for part in parts):
            is_first = not self._has_updated
            self._start(found, "probe", lambda collectors: collectors.probed(parts, probed, is_first=is_first))
        collectors.is_whole = bool(self._forced) or "precision" not in self._budget.in_turn
        for part in parts:
            self._start(found, part, partial(Collectors.measure, part=part, step=step, probed=probed))
        opens, is_measured = self._budget.opens_window("attention", step), "attention" in parts
        if opens or is_measured:
            window = partial(Collectors.set_window, n_done=step + 1, opens=opens, is_measured=is_measured)
            self._guarded("attention", window, is_joint=True)
        if self._is_late:
            self._measured = found
        elif parts:
            if not is_shared():
                self._publish_waiting()
            self._publish_parts(step, found, is_joint=is_shared())

    def _start(self, found: dict[str, Any], part: str, start: Callable[[Collectors], Measurement[Any] | None]) -> None:
        """Start a measurement, and complete it unless its values are read later."""

        def act(collectors: Collectors) -> Any:
            if (measurement := start(collectors)) is None:
                return None
            return Started(measurement, next(measurement)) if self._is_late else complete(measurement)

        value = self._guarded(part, act, is_joint=True)
        if value is not None:
            found[part] = value

    def _publish_parts(self, step: int, found: Mapping[str, Any], *, is_joint: bool) -> None:
        """Publish the measurements of a step; those that failed are switched off."""
        measured = {}
        for part, result in found.items():
            value = self._guarded(part, partial(_of, result), is_joint=is_joint and self._is_late)
            if value is not None:
                measured[part] = plain(value)
        if self._stage is not None and not self._stage.is_last and "activations" in measured:
            measured["activations"]["log_z"] = np.array(math.nan)  # the output is no prediction
        for part, values in (measured_by_all(measured) if is_joint and found else measured).items():
            if self._collectors is not None:
                self._publish(Observation(step, part, values, self._collectors.coords(part)))

    def _measure_without_update(self) -> None:
        """Measure on the probe at the end of a run without updates, such as one that diverges immediately.

        The result is the row of step 0. Parts that are measured at every step are left out, since a run that is
        continued would have another row of that step.
        """
        self.batches.count_unreached()
        # Reading the model needs all ranks, which may not end together.
        is_part = is_shared() or self._stage is not None
        if self._has_updated or not self.batches.has_seen or self._optimizer is None or is_part:
            return
        if not self._is_ready:
            self._prepare(self._optimizer)
        if self._collectors is not None:
            parts = [part for part in PROBED if (self._every[part] or 1) > 1]
            with self.batches.paused():
                self._measure(self._collectors, parts, 0)
            if self._is_late:
                flight = Flight([Row(0, {}, [], False, False, self._measured)], is_late=False, workers=None)
                self._publish_parts(0, flight.results()[1][0], is_joint=False)

    def _take_spectra(self) -> None:
        spectra = self._guarded("spectra", lambda collectors: collectors.spectra(self.step), is_joint=True)
        if spectra is not None:
            self.output.add_dataset("spectra", spectra)
            row = spectra.isel(step=0, drop=True)
            values, coords = ({name: v.values for name, v in part.items()} for part in (row.data_vars, row.coords))
            self._pass_on(Observation(self.step, "spectra", values, coords), ())

    def _guarded(self, part: str, action: Callable[[Collectors], Any], *, is_joint: bool = False) -> Any:
        """Run a measurement without stopping the training: if it fails, the part is switched off."""
        collectors, value, own = self._collectors, None, ""
        if collectors is None or not collectors.is_on(part):
            return None
        try:
            with self._budget.timed(_COUNTED.get(part, part)):
                value = action(collectors)
        except PeerError:
            value = None
        except Exception as error:  # noqa: BLE001  (training continues after any failure, with an event)
            own = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
        if not (failed := failures(own) if is_joint else {0: own} if own else {}):
            return value
        collectors.switch_off(part)
        reason = on_ranks(failed) if is_joint else own
        message = f"{_WORDS.get(part, part)} cannot be recorded from step {self.step} on ({reason})."
        self.event("not recorded", source=part, message=message)
        issue_warning(f"{message} Training continues.")
        return None

    def event(
        self,
        kind: str,
        *,
        source: str = "",
        score: float = math.nan,
        message: str = "",
        layer: int = -1,
        head: int = -1,
        step: int | None = None,
    ) -> None:
        """Record an event, at the current step unless ``step`` is given; see ``schema.EVENTS``."""
        at = self.step if step is None else step
        self.output.event(Event(at, kind, source, score, message, layer, head))

    def _publish(self, observation: Observation, *, is_checked: bool = True) -> None:
        """Store an observation and pass it on, to observers last, since they may raise exceptions."""
        # Changed settings and broken contracts are events, and the owner of the store writes its monitors.
        if observation.part not in ("settings", "contracts") and not (
            self.is_hosted and observation.part == "monitors"
        ):
            self.output.add(observation.part, observation.step, observation.values, observation.coords)
        raised: list[RaisedAlarm] = []
        if self._alarms is not None and is_checked:
            with self._budget.timed("alarms" if observation.part == "monitors" else observation.part):
                raised = self._raise_alarms(self._alarms, observation)
        self._pass_on(observation, raised)

    def _raise_alarms(self, alarms: Alarms, observation: Observation) -> list[RaisedAlarm]:
        """Pass an observation to the alarms, record the alarms raised as events, and return them."""
        fresh = alarms.observe(observation)
        self.new_alarms += fresh
        if (row := alarms._evidence_row(observation)) is not None:
            self.output.add(row.part, row.step, row.values, row.coords)
        if fresh or alarms.is_in_doubt:
            self.check_now()
        if fresh and self.blame is not None:
            self.blame.ask(observation.step)
        for alarm in fresh:
            self.event("alarm", step=alarm.step, **alarm.as_event())
        if (found := alarms._new_attribution(fresh)) is not None:
            self.event("attribution", step=observation.step, **found.as_event())
        where = "" if self._stage is None else f"Stage {self._stage.number}: "
        return [(alarm, f"{where}{alarm.message.rstrip('.')}. Cause: {alarms.attribute().summary}.") for alarm in fresh]


def _of(result: Any, collectors: Collectors) -> Any:
    """Return the result of a measurement that another thread may have completed, or raise its exception."""
    if isinstance(result, Exception):
        raise result
    return result


def _plain_change(change: SettingsChange) -> Change:
    return change.setting, change.factor, change.sentence


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


def _end_all() -> None:
    for attached in list(_attached):
        if attached.is_attached:
            attached._end_unclosed()


before_exit(_end_all)
