"""What watches over a run in training: its recorder, the alarms that listen to it, and what they may trigger."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.callbacks.actions import KINDS, Action, Actions, Request
from workbench.callbacks.alarms.replaying import replay
from workbench.callbacks.faults import NoAuxiliaryLoss
from workbench.errors import ThresholdError
from workbench.io.store import open_run
from workbench.models.run_checkpoints import list_checkpoints, load_weights
from workbench.training.callback import Callback, Run
from workbench.training.checkpoints import read_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from workbench.callbacks.alarms import Alarm, Alarms
    from workbench.callbacks.faults import Injection
    from workbench.callbacks.observation import Observation
    from workbench.callbacks.recorder import Recorder
    from workbench.callbacks.recorder.attached import AttachedRecorder
    from workbench.io.run_output import RunOutput
    from workbench.schema.events import Event

#: An alarm this many times its threshold does not wait for more evidence.
_CLEAR = 10.0


class Guard(Callback):
    """Recorder, alarms and actions of one run as a callback.

    In `workbench.train` the recorder writes into the run's own store and hears what the loop knows of each step; in
    another trainer it has a store of its own.

    Args:
        recorder: Watches the run.
        alarms: Listen to it.
        actions: What they may trigger.
        faults: Of the run, among which the auxiliary loss may have been switched off.

    Raises:
        ThresholdError: If alarms have no recorder, or actions no alarms.
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
                raise ThresholdError("The recorder has alarms already; leave out alarms=, or give the recorder none.")
            alarms = recorder.alarms
        if alarms is not None and recorder is None:
            raise ThresholdError("alarms= listen to a recorder; pass recorder=wb.Recorder() too.")
        if actions is not None and alarms is None:
            raise ThresholdError("actions= need alarms to act on; pass alarms=wb.Alarms() too.")
        self.recorder, self.alarms, self.actions, self.faults = recorder, alarms, actions, faults
        self._factor = 1.0
        self._n_answered = 0
        self._unsound: set[int] = set()
        self._attached: AttachedRecorder | None = None
        self._stop_observing: Callable[[], None] | None = None
        self._fresh: list[Alarm] = []
        self._n_heard = 0
        self._raised: tuple[Alarm, ...] = ()
        self._waiting: Alarm | None = None
        self._state: dict[str, Any] = {}

    def setup(self, run: Run) -> None:
        """Refuse what does not go together.

        Raises:
            ThresholdError: If the recorder has a store of its own in `workbench.train`, or an action needs checkpoints
                and there are none.
        """
        super().setup(run)
        if run.owns_loop and self.recorder is not None and self.recorder.path is not None:
            raise ThresholdError(
                "In train() a recorder writes into the run's own store; make it without a path, and pass store= to "
                "train()."
            )
        kinds = () if self.actions is None else self.actions.kinds
        if "roll_back" in kinds and run.checkpoints is None:
            remedy = "pass checkpoint_every= too" if run.owns_loop else "give Actions a policy without 'roll_back'"
            raise ThresholdError(f"Rolling back needs checkpoints of wb.train() to go back to; {remedy}.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._state = dict(state)
        self._factor, self.run.n_skipped = state["rate_factor"], state["n_skipped"]
        self._n_answered, self._unsound = state["n_answered"], set(state["unsound"])
        if not self.run.owns_loop and self.recorder is not None and "recorder" in state:
            self.recorder.load_state_dict(state["recorder"])

    def begin(self) -> None:
        """Attach the recorder; in `workbench.train` that waits for the first step, when the store is there."""
        if not self.run.owns_loop:
            self._attach(None, None)

    def begin_step(self, step: int) -> None:
        """Keep the recorder's count: float16 may leave out updates that the loop counts."""
        if not self.run.owns_loop or self.recorder is None:
            return
        if self._attached is None:
            probe = self.recorder.probe
            probe = self.run.probe(self.recorder.n_probe_tokens) if probe is None else probe
            if self.run.step and self.run.output.path is not None:
                self._learn(self.run.output.path)
            self._attach(self.run.output, probe)
        self._attached.step = step

    @property
    def rate_factor(self) -> float:
        """What cuts of the rate have left of it."""
        return self._factor

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log what another trainer knows before the update: over several ranks it is averaged then."""
        if self._attached is not None and not self.run.owns_loop:
            self._attached.log(**numbers)

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """Hand over the numbers of a step.

        Returns:
            What the recorder knows beside them, such as ``batch_size``.
        """
        if self._attached is None:
            return {}
        if not self.run.owns_loop:
            given = {name: value for name, value in numbers.items() if name in ("loss", "grad_norm")}
            if not math.isfinite(self._attached.pending.get("loss", 0.0)):
                given.pop("loss", None)  # a Trainer may put another number in the place of a loss that is not finite
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
        """Do what the alarms of the step ask for."""
        if not self.run.owns_loop and self.alarms is not None:  # they hear the recorder by themselves
            self._raised = tuple(self.alarms.raised[self._n_heard :])
            self._n_heard += len(self._raised)
        if (request := self._request(step - 1, self._raised)) is not None:
            for action in self._carry_out(request, step):
                self.event(step, "action", source=action.kind, message=action.message)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; the alarms learn from the record again."""
        if self.run is not None:
            self._state = {
                "rate_factor": self._factor,
                "n_skipped": self.run.n_skipped,
                "n_answered": self._n_answered,
                "unsound": sorted(self._unsound),
            }
            if not self.run.owns_loop and self.recorder is not None:
                self._state["recorder"] = self.recorder.state_dict()
        return self._state

    def end(self, *, is_broken: bool = False) -> None:
        """Watch no more; hooks are gone, the state stays for a checkpoint at the very end."""
        if self.run is not None:
            self.state_dict()
        super().end(is_broken=is_broken)
        if self._stop_observing is not None:
            self._stop_observing()
            self._stop_observing = None
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.detach(is_broken=is_broken)

    def take_event(self, event: Event) -> None:
        """Record an event of another callback, in a trainer whose events nobody else keeps."""
        if self._attached is not None:
            self._attached.output.event(event)

    def _attach(self, host: RunOutput | None, probe: Any) -> None:
        if self.recorder is None:
            return
        run = self.run
        self._attached = self.recorder.attach(
            run.model, run.optimizer, host=host, probe=probe, step=run.step, alarms=self.alarms
        )
        if self.alarms is not None and host is not None:
            self._stop_observing = self.recorder.observe(self._hear)
        self._n_heard = 0 if self.alarms is None else len(self.alarms.raised)

    def _learn(self, store: Path) -> None:
        """Bring the alarms to where the record of a resumed run ends."""
        if self.alarms is not None:
            self.alarms.reset()
            replay(open_run(store), self.alarms)

    def _request(self, step: int, alarms: tuple[Alarm, ...]) -> Request | None:
        """What is to be done now."""
        if self.actions is None or self._n_answered >= self.actions.n_most:
            return None
        for alarm in alarms:
            if self._waiting is None and (not alarm.is_outcome or self.actions.reacts_to_outcome):
                self._waiting = alarm
        first = self._waiting
        if first is None:
            return None
        is_clear = any(alarm.is_outcome or alarm.score >= _CLEAR for alarm in alarms)
        if step - first.step < self.actions.wait and not is_clear:
            return None
        self._waiting = None
        onset = self.alarms.onset(first.signal)
        return self.actions.answer(first, self.alarms.attribute(), first.step if onset is None else onset)

    def _carry_out(self, request: Request, step: int) -> list[Action]:
        """Do what was asked for, and say what could not be done and why; alarms rest for a while then."""
        ways: dict[str, Callable[[], str]] = {
            "roll_back": lambda: self._roll_back(request),
            "auxiliary_loss": self._restore_auxiliary_loss,
            "kss": self._turn_up_kss,
            "cut_rate": self._cut_rate,
            "stop": self._stop,
        }
        done = [Action(kind, step, ways[kind]()) for kind in KINDS if kind in request.kinds]
        self._n_answered += 1
        self.actions.done += done
        self.alarms.rest(step, n_steps=self.actions.rest)
        return done

    def _roll_back(self, request: Request) -> str:
        found = list_checkpoints(self.run.checkpoints)
        sound = [at for at in found if at <= request.onset and at not in self._unsound]
        self._unsound |= {at for at in found if at > request.onset}
        if not sound:
            return f"There is no checkpoint from before step {request.onset}, where {request.alarm.signal} changed."
        state = read_checkpoint(found[max(sound)])
        load_weights(self.run.model, found[max(sound)])
        self.run.optimizer.load_state_dict(state.optimizer)
        self.run.scaler.load_state_dict(state.scaler)
        self.run.skip_batches(self.actions.skip)
        words = f", and {self.actions.skip} batches are skipped" if self.actions.skip else ""
        return (
            f"Weights and optimizer are those of step {max(sound)} again, before {request.alarm.signal} changed at "
            f"step {request.onset}{words}."
        )

    def _cut_rate(self) -> str:
        if self._factor <= self.actions.lowest_rate:
            return f"The learning rate stays at {self._factor:g} of the plan, the lowest allowed."
        self._factor = max(self._factor * self.actions.cut_rate, self.actions.lowest_rate)
        return f"The learning rate is {self._factor:g} of the plan from here on."

    def _turn_up_kss(self) -> str:
        kss = self.actions.kss
        if not kss.enabled:
            kss.enabled = True
            return f"KSS is on, strength {kss.strength:g}."
        kss.strength = kss.strength * self.actions.kss_factor
        return f"KSS has strength {kss.strength:g} now."

    def _stop(self) -> str:
        self.run.stop("by an alarm")
        return "The run is stopped."

    def _restore_auxiliary_loss(self) -> str:
        """Whoever has switched it off."""
        if self.faults is None or self.faults.keeps_auxiliary_loss:
            return "The auxiliary loss is on already."
        self.faults.switch_off(NoAuxiliaryLoss)
        return "The auxiliary loss is on again."

    def _hear(self, observation: Observation) -> None:
        self._fresh += self.alarms.observe(observation)
