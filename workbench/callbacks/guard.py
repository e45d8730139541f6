"""Recorder, alarms and actions of a run as one callback."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.callbacks.alarms.replaying import action_steps, replay
from workbench.callbacks.responding import Response, ResponseState
from workbench.errors import OptionError
from workbench.io.store import open_run
from workbench.training.callback import Callback, TrainingRun

if TYPE_CHECKING:
    from pathlib import Path

    from workbench.callbacks.actions import Actions
    from workbench.callbacks.alarms import Alarm, Alarms
    from workbench.callbacks.faults import Injection
    from workbench.callbacks.observation import Observation
    from workbench.callbacks.recorder import Recorder
    from workbench.callbacks.recorder.attached import AttachedRecorder
    from workbench.io.run_output import RunOutput
    from workbench.schema.events import Event


class Guard(Callback):
    """Recorder, alarms and actions of one run as a callback.

    In `workbench.train` the recorder writes to the store of the run and receives the metrics of each step from the
    loop. In another trainer it has its own store.

    Args:
        recorder: Recorder of the run; None if there is none.
        alarms: Alarms on what the recorder measures; None for those of the recorder.
        actions: Actions that the alarms may trigger; None if there are none.
        faults: Faults of the run, one of which may have switched off the auxiliary loss; None if there are none.

    Raises:
        OptionError: If alarms have no recorder, or actions no alarms.
    """

    name = "guard"

    def __init__(
        self,
        recorder: Recorder | None,
        alarms: Alarms | None = None,
        actions: Actions | None = None,
        faults: Injection | None = None,
    ) -> None:
        if recorder is not None and recorder.alarms is not None:
            if alarms is not None:
                raise OptionError("alarms was passed, but the recorder has alarms already; pass one of them.")
            alarms = recorder.alarms
        if alarms is not None and recorder is None:
            raise OptionError("alarms observe what a recorder measures, but there is none; add wb.Recorder().")
        if actions is not None and alarms is None:
            raise OptionError("actions respond to alarms, but there are none; add wb.Alarms().")
        self.recorder, self.alarms = recorder, alarms
        self._actions, self._faults = actions, faults
        self._answered = ResponseState()
        self._response: Response | None = None
        self._attached: AttachedRecorder | None = None
        self._stop_observing: Callable[[], None] | None = None
        self._new_alarms: list[Alarm] = []
        self._n_observed = 0
        self._raised: tuple[Alarm, ...] = ()
        self._logged: frozenset[str] = frozenset()
        self._state: dict[str, Any] = {}
        self._early_events: list[Event] = []

    def setup(self, run: TrainingRun) -> None:
        """Check that the trainer, the recorder and the actions are compatible.

        Raises:
            OptionError: If the recorder has its own store in `workbench.train`, or an action needs checkpoints and
                there are none.
        """
        super().setup(run)
        # A trainer may train several times with the same callback.
        self._raised, self._new_alarms, self._logged, self._state, self._early_events = (), [], frozenset(), {}, []
        self._answered, self._response = ResponseState(), None
        if self.alarms is not None and self._actions is not None:
            self._response = Response(self.alarms, self._actions, self._faults, self._answered)
        if run.owns_loop and self.recorder is not None and self.recorder.path is not None:
            raise OptionError(
                "In wb.train() a recorder writes to the store of the run; create the recorder without a path, and pass "
                "store= to wb.train()."
            )
        kinds = set() if self._actions is None else self._actions.kinds
        if "roll_back" in kinds and run.checkpoints is None:
            remedy = "pass checkpoint_every= too" if run.owns_loop else "give Actions a policy without 'roll_back'"
            raise OptionError(f"The action 'roll_back' needs checkpoints of wb.train(), but there are none; {remedy}.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self._state = dict(state)
        self._answered.load(state)
        self.run.n_skipped = state["n_skipped"]
        if self.recorder is not None:
            self.recorder.recent_examples = state.get("recent_examples", [])
            self.recorder.settings_state = state.get("settings", {})
        if not self.run.owns_loop and self.recorder is not None and "recorder" in state:
            self.recorder.load_state_dict(state["recorder"])

    def begin(self) -> None:
        """Attach the recorder; in `workbench.train` this happens in the first step, when the store exists."""
        run, path = self.run, None if self.recorder is None else self.recorder.path
        if run.owns_loop:
            if run.step and not self._state:
                raise OptionError(
                    "The run to resume has no recorder, but this call has one; resume without a recorder, or start a "
                    "new run."
                )
            return
        self._attach(None, None)
        if run.step and path is not None and self._response is not None:
            self._replay_record(path)

    def begin_step(self, step: int) -> None:
        """Set the step of the recorder, which cannot count: in float16 the loop counts updates that are skipped."""
        run = self.run
        if not run.owns_loop or self.recorder is None:
            return
        if self._attached is None:
            probe = self.recorder.probe
            if probe is None and run.probe is not None:
                probe = run.probe(self.recorder.n_probe_tokens)
            if run.step and run.output.path is not None:
                self._replay_record(run.output.path)
            self._attach(run.output, probe)
        if self._attached is not None:
            self._attached.step = step

    @property
    def rate_factor(self) -> float:
        """Learning rate after all cuts, as a fraction of the planned one."""
        return self._answered.rate_factor

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the metrics that another trainer has before the update; they are averaged over ranks."""
        if self._attached is not None and not self.run.owns_loop:
            self._logged = frozenset(numbers)
            self._attached.log(**numbers)

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """Pass the metrics of a step to the recorder, and record the alarms that they raise.

        Returns:
            Further metrics from the recorder, such as ``batch_size``.
        """
        if self._attached is None:
            return {}
        if not self.run.owns_loop:
            # Metrics logged before the update are means over ranks by now; the rate is read from the optimizer.
            given = {n: value for n, value in numbers.items() if n not in {*self._logged, "learning_rate"}}
            if not math.isfinite(float(self._attached.pending.get("loss", 0.0))):
                given.pop("loss", None)  # a Trainer may replace a loss that is not finite by another number
            self._attached.log(**given)
            return {}
        known = self._attached.finish_step(**numbers)
        self._raised, self._new_alarms = tuple(self._new_alarms), []
        for alarm in self._raised:
            self.event(alarm.step, "alarm", **alarm.as_event())
        found = None if self.alarms is None else self.alarms._new_attribution(self._raised)
        if found is not None:
            self.event(step, "attribution", **found.as_event())
        return {name: value for name, value in known.items() if name not in numbers}

    def outcome(self) -> tuple[Alarm, ...]:
        """Return the alarms raised in this step."""
        return self._raised

    def after_step(self, step: int) -> None:
        """Carry out the actions that the alarms of the step request."""
        if not self.run.owns_loop and self.alarms is not None:  # the recorder passes its observations to them directly
            self._raised = tuple(self.alarms.raised[self._n_observed :])
            self._n_observed += len(self._raised)
        if self._response is not None:
            for action in self._response.answer(self._raised, self.run, step):
                self.event(step, "action", source=action.kind, message=action.message)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the state of the alarms is rebuilt from the record instead."""
        if self.is_running:
            self._state = {**self._answered.as_dict(), "n_skipped": self.run.n_skipped}
            if not self.run.owns_loop and self.recorder is not None:
                self._state["recorder"] = self.recorder.state_dict()
            elif self._attached is not None:
                self._state["recent_examples"] = self._attached.batches.recent_examples
                self._state["settings"] = self._attached.settings_state
        return self._state

    def end(self, *, is_broken: bool = False) -> None:
        """Stop recording and remove all hooks; the state remains available for a checkpoint after the last step."""
        if self.is_running:
            self.state_dict()
        super().end(is_broken=is_broken)
        if self._stop_observing is not None:
            self._stop_observing()
            self._stop_observing = None
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.detach(is_broken=is_broken)

    def take_event(self, event: Event) -> None:
        """Record an event of another callback, in a trainer that does not record events."""
        if self._attached is not None:
            self._attached.output.event(event)
        elif self.is_running:
            self._early_events.append(event)

    def _attach(self, host: RunOutput | None, probe: Any) -> None:
        if self.recorder is None:
            return
        run, alarms = self.run, self.alarms
        self._attached = self.recorder.attach(
            run.model, run.optimizer, host=host, probe=probe, step=run.step, alarms=alarms, run=run
        )
        early, self._early_events = self._early_events, []
        for event in early:
            self._attached.output.event(event)
        if alarms is None:
            return
        self._n_observed = len(alarms.raised)
        if host is not None:

            def take_observation(observation: Observation) -> None:
                raised = alarms.observe(observation)
                self._new_alarms += raised
                if (row := alarms._evidence_row(observation)) is not None:
                    host.add(row.part, row.step, row.values, row.coords)
                if (raised or alarms.is_in_doubt) and self._attached is not None:
                    self._attached.check_now()

            self._stop_observing = self.recorder.observe(take_observation)

    def _replay_record(self, store: Path) -> None:
        """Set the alarms to their state at the end of the record of a run that is resumed."""
        if self.alarms is not None:
            run, rest = open_run(store), 0 if self._actions is None else self._actions.rest
            self.alarms.reset()
            replay(run, self.alarms, rest=rest)
            self._n_observed = len(self.alarms.raised)
            if self._response is not None:
                last = max(action_steps(run), default=0)
                self._response.recall([alarm for alarm in self.alarms.raised if alarm.step >= last])
