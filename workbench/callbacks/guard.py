"""The monitoring of a run in training: its recorder, its alarms, and the actions that they trigger."""

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

    In `workbench.train` the recorder writes into the run's own store and receives the loop's numbers of each step; in
    another trainer it has a store of its own.

    Args:
        recorder: Recorder of the run.
        alarms: Alarms on what the recorder measures.
        actions: Actions that the alarms may trigger.
        faults: Faults of the run, one of which may have switched off the auxiliary loss.

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
                raise OptionError("The recorder has alarms already; leave out alarms=, or give the recorder none.")
            alarms = recorder.alarms
        if alarms is not None and recorder is None:
            raise OptionError("alarms= listen to a recorder; pass recorder=wb.Recorder() too.")
        if actions is not None and alarms is None:
            raise OptionError("actions= need alarms to act on; pass alarms=wb.Alarms() too.")
        self.recorder, self.alarms = recorder, alarms
        self._actions, self._faults = actions, faults
        self._answered = ResponseState()
        self._response: Response | None = None
        self._attached: AttachedRecorder | None = None
        self._stop_observing: Callable[[], None] | None = None
        self._fresh: list[Alarm] = []
        self._n_heard = 0
        self._raised: tuple[Alarm, ...] = ()
        self._logged: frozenset[str] = frozenset()
        self._state: dict[str, Any] = {}
        self._early_events: list[Event] = []

    def setup(self, run: TrainingRun) -> None:
        """Refuse incompatible combinations.

        Raises:
            OptionError: If the recorder has a store of its own in `workbench.train`, or an action needs checkpoints
                and there are none.
        """
        super().setup(run)
        # Reset: a trainer may train with one callback several times.
        self._raised, self._fresh, self._logged, self._state, self._early_events = (), [], frozenset(), {}, []
        self._answered, self._response = ResponseState(), None
        if self.alarms is not None and self._actions is not None:
            self._response = Response(self.alarms, self._actions, self._faults, self._answered)
        if run.owns_loop and self.recorder is not None and self.recorder.path is not None:
            raise OptionError(
                "In train() a recorder writes into the run's own store; make it without a path, and pass store= to "
                "train()."
            )
        kinds = set() if self._actions is None else self._actions.kinds
        if "roll_back" in kinds and run.checkpoints is None:
            remedy = "pass checkpoint_every= too" if run.owns_loop else "give Actions a policy without 'roll_back'"
            raise OptionError(f"Rolling back needs checkpoints of wb.train() to go back to; {remedy}.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self._state = dict(state)
        self._answered.load(state)
        self.run.n_skipped = state["n_skipped"]
        if self.recorder is not None:
            self.recorder.recent_examples = state.get("recent_examples", [])
            self.recorder.settings_state = state.get("settings", {})
        if not self.run.owns_loop and self.recorder is not None and "recorder" in state:
            self.recorder.load_state_dict(state["recorder"])

    def begin(self) -> None:
        """Attach the recorder; in `workbench.train` that waits for the first step, when the store exists."""
        run, path = self.run, None if self.recorder is None else self.recorder.path
        if run.owns_loop:
            if run.step and not self._state:
                raise OptionError("The run was made without a recorder; resume it without one, or start a run anew.")
            return
        self._attach(None, None)
        if run.step and path is not None and self._response is not None:
            self._learn(path)

    def begin_step(self, step: int) -> None:
        """Keep the recorder's own count of steps: with float16, updates that the loop counts may be skipped."""
        run = self.run
        if not run.owns_loop or self.recorder is None:
            return
        if self._attached is None:
            probe = self.recorder.probe
            if probe is None and run.probe is not None:
                probe = run.probe(self.recorder.n_probe_tokens)
            if run.step and run.output.path is not None:
                self._learn(run.output.path)
            self._attach(run.output, probe)
        if self._attached is not None:
            self._attached.step = step

    @property
    def rate_factor(self) -> float:
        """The factor on the learning rate after all cuts."""
        return self._answered.rate_factor

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers that another trainer has before the update: these are averaged over ranks."""
        if self._attached is not None and not self.run.owns_loop:
            self._logged = frozenset(numbers)
            self._attached.log(**numbers)

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """Pass on the numbers of a step.

        Returns:
            Further numbers of the recorder, such as ``batch_size``.
        """
        if self._attached is None:
            return {}
        if not self.run.owns_loop:
            # Numbers logged before the update are now means over ranks; the rate is read from the optimizer.
            given = {n: value for n, value in numbers.items() if n not in {*self._logged, "learning_rate"}}
            if not math.isfinite(float(self._attached.pending.get("loss", 0.0))):
                given.pop("loss", None)  # a Trainer may replace a loss that is not finite by another number
            self._attached.log(**given)
            return {}
        known = self._attached.finish_step(**numbers)
        self._raised, self._fresh = tuple(self._fresh), []
        for alarm in self._raised:
            self.event(alarm.step, "alarm", **alarm.as_event())
        found = None if self.alarms is None else self.alarms.new_attribution(self._raised)
        if found is not None:
            self.event(step, "attribution", **found.as_event())
        return {name: value for name, value in known.items() if name not in numbers}

    def outcome(self) -> tuple[Alarm, ...]:
        """Alarms raised in this step."""
        return self._raised

    def after_step(self, step: int) -> None:
        """Carry out the actions that the alarms of the step request."""
        if not self.run.owns_loop and self.alarms is not None:  # they receive the recorder's observations directly
            self._raised = tuple(self.alarms.raised[self._n_heard :])
            self._n_heard += len(self._raised)
        if self._response is not None:
            for action in self._response.answer(self._raised, self.run, step):
                self.event(step, "action", source=action.kind, message=action.message)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; alarms rebuild theirs from the record."""
        if self.is_running:
            self._state = {**self._answered.as_dict(), "n_skipped": self.run.n_skipped}
            if not self.run.owns_loop and self.recorder is not None:
                self._state["recorder"] = self.recorder.state_dict()
            elif self._attached is not None:
                self._state["recent_examples"] = self._attached.batches.recent_examples
                self._state["settings"] = self._attached.settings_state
        return self._state

    def end(self, *, is_broken: bool = False) -> None:
        """Stop recording: hooks are removed, the state stays for a checkpoint at the very end."""
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
        """Record an event of another callback, in a trainer that does not record events itself."""
        if self._attached is not None:
            self._attached.output.event(event)
        elif self.is_running:
            self._early_events.append(event)

    def _attach(self, host: RunOutput | None, probe: Any) -> None:
        if self.recorder is None:
            return
        run, alarms = self.run, self.alarms
        self._attached = self.recorder.attach(
            run.model,
            run.optimizer,
            host=host,
            probe=probe,
            step=run.step,
            alarms=alarms,
            run=run,
        )
        early, self._early_events = self._early_events, []
        for event in early:
            self._attached.output.event(event)
        if alarms is None:
            return
        self._n_heard = len(alarms.raised)
        if host is not None:

            def hear(observation: Observation) -> None:
                fresh = alarms.observe(observation)
                self._fresh += fresh
                if (row := alarms.evidence_row(observation)) is not None:
                    host.add(row.part, row.step, row.values, row.coords)
                if (fresh or alarms.is_in_doubt) and self._attached is not None:
                    self._attached.check_now()

            self._stop_observing = self.recorder.observe(hear)

    def _learn(self, store: Path) -> None:
        """Bring the alarms to the state at the end of a resumed run's record."""
        if self.alarms is not None:
            run, rest = open_run(store), 0 if self._actions is None else self._actions.rest
            self.alarms.reset()
            replay(run, self.alarms, rest=rest)
            self._n_heard = len(self.alarms.raised)
            if self._response is not None:
                last = max(action_steps(run), default=0)
                self._response.recall([alarm for alarm in self.alarms.raised if alarm.step >= last])
