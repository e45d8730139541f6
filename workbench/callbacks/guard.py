"""Recorder, alarms and actions of a run as one callback; actions are off by default, and each one is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from workbench.callbacks.alarms import Alarm, Alarms, Attribution
from workbench.callbacks.alarms.replaying import REST, replay
from workbench.callbacks.faults import Injection, NoAuxiliaryLoss
from workbench.callbacks.recorder import Recorder
from workbench.callbacks.recorder.attached import AttachedRecorder
from workbench.errors import OptionError, require_listed
from workbench.io.run_output import RunOutput
from workbench.io.store import open_run
from workbench.models.checkpoint import list_checkpoints, load_weights
from workbench.option_checks import checked
from workbench.schema.events import Event
from workbench.training.callback import Callback, TrainingRun
from workbench.training.recording import read_checkpoint

#: Factor of each cut of the learning rate, smallest fraction of the planned rate that cuts reach, and maximum number of
#: alarms of a run that are answered.
_CUT, _LOWEST_RATE, _MOST_ANSWERS = 0.1, 0.01, 5
#: Kinds of action, in the order in which they are carried out.
KINDS = ("roll_back", "auxiliary_loss", "cut_rate", "stop")
#: Kinds of action for each attributed cause. A learning rate that is too high and a batch that is too small both raise
#: the ratio of rate to batch size. Bad data are skipped. Wrong arithmetic, wrong gradients and a data loader that
#: repeats batches are bugs, which smaller steps would hide: the run stops, and the alarm names what to fix. A changed
#: setting that matches no known fault is only reported.
POLICY: Mapping[str, tuple[str, ...]] = {
    "large_rate": ("roll_back", "cut_rate"),
    "small_batch": ("cut_rate",),
    "no_auxiliary_loss": ("auxiliary_loss",),
    "corrupted_data": ("roll_back",),
    **dict.fromkeys(("low_precision_attention", "arithmetic", "low_precision_reduction"), ("stop",)),
    **dict.fromkeys(("stale_reduction", "dropped_bucket", "repeated_data"), ("stop",)),
    "changed_setting": (),
    "otherwise": ("roll_back", "cut_rate"),
}


@dataclass(frozen=True)
class Action:
    """An action that was carried out: its kind, the number of updates before it, and a sentence."""

    kind: str
    step: int
    message: str


@checked
@dataclass(kw_only=True)
class Actions:
    """The actions that alarms may trigger: ``wb.train(..., recorder=, alarms=, actions=wb.Actions())``.

    The kinds of action are ``"roll_back"`` (restore the last checkpoint before the onset), ``"auxiliary_loss"``
    (switch the auxiliary loss on again), ``"cut_rate"`` (reduce the learning rate to a tenth, at most to 1 % of the
    planned one) and ``"stop"``. They are carried out in this order, for at most five alarms of a run. After an action
    no alarm is raised for 60 steps, while the run recovers. With actions the recorder has no budget, and every part
    keeps its cadence, so that the training does not depend on the speed of the machine.

    Attributes:
        policy: Mapping from cause to kinds of action; ``"otherwise"`` stands for all causes that it does not name.
        done: Actions carried out so far.

    Example:
        >>> import workbench as wb
        >>> actions = wb.Actions(policy={"large_rate": ["roll_back", "cut_rate"], "otherwise": "stop"})
        >>> sorted(actions.kinds)
        ['cut_rate', 'roll_back', 'stop']

    See Also:
        `workbench.Alarms`: Raises the alarms; its ``on_alarm`` may do anything else.
        `workbench.Recorder`: Measures what the alarms observe.
        `workbench.train`: Carries out the actions.
    """

    policy: Mapping[str, str | Sequence[str]] = field(default_factory=lambda: dict(POLICY))
    done: list[Action] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        given = {cause: (kinds,) if isinstance(kinds, str) else tuple(kinds) for cause, kinds in self.policy.items()}
        for kinds in given.values():
            require_listed("policy", kinds, KINDS)
        self.policy = given

    @property
    def kinds(self) -> set[str]:
        """All kinds of action that the policy may request."""
        return {kind for kinds in self.policy.values() for kind in kinds}


class Guard(Callback):
    """Recorder, alarms and actions of one run as a callback.

    In `workbench.train` the recorder writes to the store of the run and receives the metrics of each step from the
    loop. In another trainer it has its own store.
    """

    name = "guard"

    def __init__(
        self,
        recorder: Recorder,
        alarms: Alarms | None = None,
        actions: Actions | None = None,
        faults: Injection | None = None,
    ) -> None:
        self.recorder, self.alarms = recorder, alarms
        self._actions, self._faults = actions, faults
        self._forget()
        self._attached: AttachedRecorder | None = None

    def _forget(self) -> None:
        """Forget the previous run, as a trainer may train several times with the same callback."""
        self._raised: tuple[Alarm, ...] = ()
        self._logged: frozenset[str] = frozenset()
        self._state: dict[str, Any] = {}
        self._early_events: list[Event] = []
        #: Learning rate after all cuts, as a fraction of the planned one, number of requests that were carried out, and
        #: steps of the checkpoints that were written after the onset of an alarm.
        self._rate_factor, self._n_answered, self._unsound = 1.0, 0, set[int]()

    def setup(self, run: TrainingRun) -> None:
        """Check that the trainer, the recorder and the actions are compatible."""
        super().setup(run)
        self._forget()
        if run.owns_loop and self.recorder.path is not None:
            raise OptionError("In wb.train() the run has one store; create the recorder without path and pass store=.")
        kinds = set() if self._actions is None else self._actions.kinds
        if kinds:  # a training that alarms change must not depend on the speed of the machine
            self.recorder.options = replace(self.recorder.options, budget=None)
        if "roll_back" in kinds and run.checkpoints is None:
            remedy = "pass checkpoint_every= too" if run.owns_loop else "give Actions a policy without 'roll_back'"
            raise OptionError(f"The action 'roll_back' needs checkpoints of wb.train(), but there are none; {remedy}.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self._state = dict(state)
        self._rate_factor, self._n_answered = state["rate_factor"], state["n_answered"]
        self._unsound = set(state["unsound"])
        self.recorder.memory.recent_examples = state.get("recent_examples", [])
        self.recorder.memory.settings = state.get("settings", {})
        self.recorder.memory.costs = state.get("costs", {})
        if not self.run.owns_loop and "recorder" in state:
            self.recorder.load_state_dict(state["recorder"])

    def begin(self) -> None:
        """Attach the recorder; in `workbench.train` this happens in the first step, when the store exists."""
        run = self.run
        if not run.owns_loop:
            self._attach(None, None)
            if run.step and self.recorder.path is not None and self._actions is not None:
                self._replay_record(self.recorder.path)
        elif run.step and not self._state:
            raise OptionError("The run to resume has no recorder, but this call has one; leave it out or start anew.")

    def begin_step(self, step: int) -> None:
        """Set the step of the recorder, which cannot count: in float16 the loop counts updates that are skipped."""
        run = self.run
        if not run.owns_loop:
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
        return self._rate_factor

    def before_update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the metrics that another trainer has before the update; they are averaged over ranks."""
        if self._attached is not None and not self.run.owns_loop:
            self._logged = frozenset(numbers)
            self._attached.log(**numbers)

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """Pass the metrics of a step to the recorder, and record the alarms that they raise."""
        if self._attached is None:
            return {}
        if not self.run.owns_loop:
            # Metrics logged before the update are means over ranks by now; the rate is read from the optimizer.
            given: dict[str, Any] = {
                n: value for n, value in numbers.items() if n not in {*self._logged, "learning_rate"}
            }
            # A Trainer may replace a loss that is not finite by another number; the host does not wait for it.
            loss = self._attached.pending.get("loss")
            if "loss" in given and loss is not None:
                loss = torch.as_tensor(loss)
                given["loss"] = loss.where(~loss.isfinite(), torch.as_tensor(given["loss"], device=loss.device))
            self._attached.log(**given)
            return {}
        known = self._attached.finish_step(**numbers)
        self._take_alarms(self._attached)
        return {name: value for name, value in known.items() if name not in numbers}

    def outcome(self) -> tuple[Alarm, ...]:
        """Return the alarms raised in this step."""
        return self._raised

    def after_step(self, step: int) -> None:
        """Carry out the actions that the alarms of the step request."""
        if not self.run.owns_loop and self._attached is not None:
            self._take_alarms(self._attached)
        if self._actions is not None and self.alarms is not None and self._raised:
            for action in self._answer(self._actions, self.alarms, step):
                self.event(step, "action", source=action.kind, message=action.message)

    def _take_alarms(self, attached: AttachedRecorder) -> None:
        self._raised = tuple(attached.new_alarms)
        attached.new_alarms.clear()

    def _answer(self, actions: Actions, alarms: Alarms, step: int) -> list[Action]:
        """Carry out the actions that the first alarm of a step requests, and return them with their messages."""
        if self._n_answered >= _MOST_ANSWERS:
            return []
        alarm, found = self._raised[0], alarms.attribute()
        onset = alarms.onset(alarm.signal)
        onset = alarm.step if onset is None else onset
        functions: dict[str, Callable[[], str]] = {
            "roll_back": lambda: self._roll_back(alarm.signal, onset),
            "auxiliary_loss": self._restore_auxiliary_loss,
            "cut_rate": self._cut_rate,
            "stop": lambda: self._stop(found),
        }
        requested = actions.policy.get(found.cause, actions.policy.get("otherwise", ()))
        if not requested:
            return []
        done = [Action(kind, step, functions[kind]()) for kind in KINDS if kind in requested]
        self._n_answered += 1
        actions.done += done
        alarms.rest(step, n_steps=REST)
        return done

    def _roll_back(self, signal: str, onset: int) -> str:
        run = self.run
        found = {} if run.checkpoints is None else list_checkpoints(run.checkpoints)
        sound = [at for at in found if at <= onset and at not in self._unsound]
        self._unsound |= {at for at in found if at > onset}
        if not sound:
            return f"There is no checkpoint from before step {onset}, at which {signal} changed."
        kept = read_checkpoint(found[max(sound)])
        load_weights(run.model, found[max(sound)])
        run.optimizer.load_state_dict(kept.optimizer)
        if run.scaler is not None:
            run.scaler.load_state_dict(kept.scaler)
        return (
            f"Parameters and optimizer were restored from step {max(sound)}, before {signal} changed at step {onset}."
        )

    def _restore_auxiliary_loss(self) -> str:
        if self._faults is None or self._faults.keeps_auxiliary_loss:
            return "The auxiliary loss is on already."
        self._faults.switch_off(NoAuxiliaryLoss)
        return "The auxiliary loss was switched on again."

    def _cut_rate(self) -> str:
        if self._rate_factor <= _LOWEST_RATE:
            return f"The learning rate stays at {self._rate_factor:g} times the planned one, the lowest allowed."
        self._rate_factor = max(self._rate_factor * _CUT, _LOWEST_RATE)
        return f"The learning rate was reduced to {self._rate_factor:g} times the planned one."

    def _stop(self, found: Attribution) -> str:
        self.run.stop("by an alarm")
        return f"The run was stopped. {found.message}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the state of the alarms is rebuilt from the record instead."""
        if self.is_running:
            self._state = {
                "rate_factor": self._rate_factor,
                "n_answered": self._n_answered,
                "unsound": sorted(self._unsound),
            }
            if not self.run.owns_loop:
                self._state["recorder"] = self.recorder.state_dict()
            elif self._attached is not None:
                self._state["recent_examples"] = self._attached.batches.recent_examples
                self._state["settings"] = self._attached.settings_state
                self._state["costs"] = self._attached.costs
        return self._state

    def end(self, *, is_broken: bool = False) -> None:
        """Stop recording and remove all hooks; the state remains available for a checkpoint after the last step."""
        if self.is_running:
            self.state_dict()
        super().end(is_broken=is_broken)
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
        run = self.run
        self._attached = self.recorder.attach(
            run.model, run.optimizer, host=host, probe=probe, step=run.step, alarms=self.alarms, run=run
        )
        early, self._early_events = self._early_events, []
        for event in early:
            self._attached.output.event(event)

    def _replay_record(self, store: Path) -> None:
        """Set the alarms to their state at the end of the record of a run that is resumed."""
        if self.alarms is not None:
            self.alarms.reset()
            replay(open_run(store), self.alarms)
