"""Response of a run to its alarms: the actions that they request, and how these are carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.callbacks.actions import KINDS, Action, ActionRequest, Actions
from workbench.callbacks.faults import NoAuxiliaryLoss
from workbench.models.run_checkpoints import list_checkpoints, load_weights
from workbench.training.checkpoints import read_checkpoint

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarm, Alarms
    from workbench.callbacks.faults import Injection
    from workbench.training.callback import TrainingRun

#: Multiple of its threshold from which an alarm does not wait for more evidence.
_CLEAR = 10.0


@dataclass
class ResponseState:
    """Lasting effects of the actions so far; stored in checkpoints.

    Attributes:
        rate_factor: Learning rate after all cuts, as a fraction of the planned one.
        n_answered: Number of requests that were carried out.
        unsound: Steps of the checkpoints that were written after the onset of an alarm.
    """

    rate_factor: float = 1.0
    n_answered: int = 0
    unsound: set[int] = field(default_factory=set)

    def as_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {"rate_factor": self.rate_factor, "n_answered": self.n_answered, "unsound": sorted(self.unsound)}

    def load(self, values: Mapping[str, Any]) -> None:
        """Load values that `as_dict` returned."""
        self.rate_factor, self.n_answered = values["rate_factor"], values["n_answered"]
        self.unsound = set(values["unsound"])


class Response:
    """Actions in response to the alarms of one run.

    Args:
        alarms: Alarms of the run, with the changed signals and their onsets.
        actions: Actions that they may trigger.
        faults: Faults of the run, one of which may have switched off the auxiliary loss; None if there are none.
        state: Lasting effects of earlier actions.
    """

    def __init__(self, alarms: Alarms, actions: Actions, faults: Injection | None, state: ResponseState) -> None:
        self.alarms, self.actions, self.faults, self.state = alarms, actions, faults, state
        self._waiting: Alarm | None = None

    def answer(self, alarms: Sequence[Alarm], run: TrainingRun, step: int) -> list[Action]:
        """Carry out the actions that the alarms of a step request.

        After an action no alarm is raised for `Actions.rest` steps.

        Args:
            alarms: Alarms raised in the step.
            run: Training to act on.
            step: Number of updates, including that of the step.

        Returns:
            The actions, with messages that state what was done or why it was not possible; empty if none is requested.
        """
        request = self._request(step - 1, alarms)
        if request is None:
            return []
        functions: dict[str, Callable[[], str]] = {
            "roll_back": lambda: self._roll_back(request, run),
            "auxiliary_loss": self._restore_auxiliary_loss,
            "kss": self._strengthen_kss,
            "cut_rate": self._cut_rate,
            "stop": lambda: _stop(run, request),
        }
        done = [Action(kind, step, functions[kind]()) for kind in KINDS if kind in request.kinds]
        self.state.n_answered += 1
        self.actions.done += done
        self.alarms.rest(step, n_steps=self.actions.rest)
        return done

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Restore the alarm that waited for more evidence when the run was interrupted.

        Args:
            alarms: Alarms raised since the last action.
        """
        self._waiting = next(filter(self._requests_action, alarms), None)

    def _requests_action(self, alarm: Alarm) -> bool:
        return not alarm.is_outcome or self.actions.reacts_to_outcome

    def _request(self, step: int, alarms: Sequence[Alarm]) -> ActionRequest | None:
        """Return the request to carry out now; None while the first alarm waits for more evidence."""
        if self.state.n_answered >= self.actions.n_most:
            return None
        first = self._waiting = self._waiting or next(filter(self._requests_action, alarms), None)
        if first is None:
            return None
        is_clear = any(alarm.is_outcome or alarm.score >= _CLEAR for alarm in alarms)
        if step - first.step < self.actions.wait and not is_clear:
            return None
        self._waiting = None
        onset = self.alarms.onset(first.signal)
        return self.actions.answer(first, self.alarms.attribute(), first.step if onset is None else onset)

    def _roll_back(self, request: ActionRequest, run: TrainingRun) -> str:
        signal, state = request.alarm.signal, self.state
        found = {} if run.checkpoints is None else list_checkpoints(run.checkpoints)
        sound = [at for at in found if at <= request.onset and at not in state.unsound]
        state.unsound |= {at for at in found if at > request.onset}
        if not sound:
            return f"There is no checkpoint from before step {request.onset}, at which {signal} changed."
        kept = read_checkpoint(found[max(sound)])
        load_weights(run.model, found[max(sound)])
        run.optimizer.load_state_dict(kept.optimizer)
        if run.scaler is not None:
            run.scaler.load_state_dict(kept.scaler)
        run.skip_batches(self.actions.skip)
        skipped = f", and {self.actions.skip} batches are skipped" if self.actions.skip else ""
        return (
            f"Parameters and optimizer were restored from step {max(sound)}, before {signal} changed at step "
            f"{request.onset}{skipped}."
        )

    def _restore_auxiliary_loss(self) -> str:
        """Switch the auxiliary loss on again, if a fault or the user has switched it off."""
        if self.faults is None or self.faults.keeps_auxiliary_loss:
            return "The auxiliary loss is on already."
        self.faults.switch_off(NoAuxiliaryLoss)
        return "The auxiliary loss was switched on again."

    def _strengthen_kss(self) -> str:
        kss = self.actions.kss
        if kss is None:
            return "There is no KSS to strengthen; pass Actions(kss=), the same object as in wb.train(kss=)."
        if not kss.enabled:
            kss.enabled = True
            return f"KSS was switched on, with strength {kss.strength:g}."
        kss.strength = kss.strength * self.actions.kss_factor
        return f"The strength of KSS was raised to {kss.strength:g}."

    def _cut_rate(self) -> str:
        state, lowest = self.state, self.actions.lowest_rate
        if state.rate_factor <= lowest:
            return f"The learning rate stays at {state.rate_factor:g} times the planned one, the lowest allowed."
        state.rate_factor = max(state.rate_factor * self.actions.cut_rate, lowest)
        return f"The learning rate was reduced to {state.rate_factor:g} times the planned one."


def _stop(run: TrainingRun, request: ActionRequest) -> str:
    run.stop("by an alarm")
    found = request.attribution
    return f"The run was stopped. {request.alarm.message if found is None else found.message}"
