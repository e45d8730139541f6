"""What watches over a run in training: its recorder, the alarms that listen to it, and what they may trigger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.callbacks.actions import KINDS, Action, Actions, Request
from workbench.callbacks.faults import NoAuxiliaryLoss
from workbench.errors import ThresholdError
from workbench.io.store import open_run
from workbench.models.run_checkpoints import list_checkpoints, load_weights
from workbench.training.checkpoints import read_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from workbench.callbacks.alarms import Alarm, Alarms, Attribution
    from workbench.callbacks.faults import Injection
    from workbench.callbacks.recorder import Observation, Recorder
    from workbench.callbacks.recorder.attached import AttachedRecorder
    from workbench.io.background_writer import BackgroundWriter

#: An alarm this many times its threshold does not wait for more evidence.
_CLEAR = 10.0


class Guard:
    """Recorder, alarms and actions of one run; every method does nothing where the run has none of them.

    Args:
        recorder: Watches the run.
        alarms: Listen to it.
        actions: What they may trigger.

    Raises:
        ThresholdError: If alarms have no recorder, or actions no alarms.
    """

    def __init__(self, recorder: Recorder | None, alarms: Alarms | None, actions: Actions | None) -> None:
        if recorder is not None and recorder.alarms is not None:
            if alarms is not None:
                raise ThresholdError("The recorder has alarms already; leave out alarms=, or give the recorder none.")
            alarms = recorder.alarms
        if alarms is not None and recorder is None:
            raise ThresholdError("alarms= listen to a recorder; pass recorder=wb.Recorder() too.")
        if actions is not None and alarms is None:
            raise ThresholdError("actions= need alarms to act on; pass alarms=wb.Alarms() too.")
        if recorder is not None and recorder.path is not None:
            raise ThresholdError(
                "In train() a recorder writes into the run's own store; make it without a path, and pass store= to "
                "train()."
            )
        self.recorder, self.alarms, self.actions = recorder, alarms, actions
        self.rate_factor = 1.0
        self.n_skipped = 0
        self._n_answered = 0
        self._unsound: set[int] = set()
        self._attached: AttachedRecorder | None = None
        self._stop_observing: Any = None
        self._fresh: list[Alarm] = []
        self._waiting: Alarm | None = None

    @property
    def is_on(self) -> bool:
        """Whether the run has a recorder."""
        return self.recorder is not None

    @property
    def rolls_back(self) -> bool:
        """Whether an alarm may ask for a checkpoint."""
        return self.actions is not None and "roll_back" in self.actions.kinds

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        writer: BackgroundWriter | None,
        probe_of: Callable[[int], Any],
        step: int,
    ) -> None:
        """Begin to watch.

        Args:
            model: In training.
            optimizer: Over its weights.
            writer: Of the run's store; None: nothing is written.
            probe_of: From a number of tokens to inputs to look at the model with.
            step: Updates done.
        """
        if self.recorder is None:
            return
        probe = self.recorder.probe
        probe = probe_of(self.recorder.n_probe_tokens) if probe is None else probe
        self._attached = self.recorder.attach(
            model, optimizer, writer=writer, probe=probe, step=step, raises_alarms=False
        )
        if self.alarms is not None:
            self._stop_observing = self.recorder.observe(self._hear)

    def learn(self, store: Path | str | None) -> None:
        """Bring the alarms to where the record of a resumed run ends."""
        if self.alarms is not None and store is not None:
            self.alarms.reset()
            from workbench.callbacks.alarms.replaying import replay

            replay(open_run(store), self.alarms)

    def detach(self) -> None:
        """Watch no more; hooks are gone."""
        if self._stop_observing is not None:
            self._stop_observing()
            self._stop_observing = None
        if self._attached is not None:
            self._attached.detach()
            self._attached = None

    def begin_step(self, step: int) -> None:
        """Keep the recorder's count: float16 may leave out updates that the loop counts."""
        if self._attached is not None:
            self._attached.step = step

    def finish_step(self, numbers: Mapping[str, Any]) -> dict[str, float]:
        """Hand over the numbers of a step.

        Returns:
            What the recorder knows beside them, such as ``batch_size``.
        """
        if self._attached is None:
            return {}
        known = self._attached.finish_step(**numbers)
        return {name: value for name, value in known.items() if name not in numbers}

    def take_alarms(self) -> tuple[Alarm, ...]:
        """Alarms since the last call."""
        fresh, self._fresh = tuple(self._fresh), []
        return fresh

    def attribution(self, alarms: tuple[Alarm, ...]) -> Attribution | None:
        """What the signals point to, where there are fresh alarms and it is not what was said last."""
        return None if self.alarms is None else self.alarms.new_attribution(alarms)

    def request(self, step: int, alarms: tuple[Alarm, ...]) -> Request | None:
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

    def carry_out(
        self,
        request: Request,
        *,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        faults: Injection,
        checkpoints: Path | None,
    ) -> list[Action]:
        """Do what was asked for; alarms rest for a while then.

        Args:
            request: From `request`.
            step: Updates done.
            model: In training.
            optimizer: Over its weights.
            scaler: Of its gradients.
            faults: Among which the auxiliary loss may have been switched off.
            checkpoints: Folder of the run's.

        Returns:
            What was done, and what could not be, with the reason.
        """
        ways: dict[str, Callable[[], str]] = {
            "roll_back": lambda: self._roll_back(request, step, model, optimizer, scaler, checkpoints),
            "auxiliary_loss": lambda: _restore_auxiliary_loss(faults),
            "kss": self._turn_up_kss,
            "cut_rate": self._cut_rate,
            "stop": lambda: "The run is stopped.",
        }
        done = [Action(kind, step, ways[kind]()) for kind in KINDS if kind in request.kinds]
        self._n_answered += 1
        self.actions.done += done
        self.alarms.rest(step, n_steps=self.actions.rest)
        return done

    def _roll_back(
        self,
        request: Request,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        folder: Path | None,
    ) -> str:
        found = {} if folder is None else list_checkpoints(folder)
        sound = [at for at in found if at <= request.onset and at not in self._unsound]
        self._unsound |= {at for at in found if at > request.onset}
        if not sound:
            return f"There is no checkpoint from before step {request.onset}, where {request.alarm.signal} changed."
        state = read_checkpoint(found[max(sound)])
        load_weights(model, found[max(sound)])
        optimizer.load_state_dict(state.optimizer)
        scaler.load_state_dict(state.scaler)
        self.n_skipped += self.actions.skip
        words = f", and {self.actions.skip} batches are skipped" if self.actions.skip else ""
        return (
            f"Weights and optimizer are those of step {max(sound)} again, before {request.alarm.signal} changed at "
            f"step {request.onset}{words}."
        )

    def _cut_rate(self) -> str:
        if self.rate_factor <= self.actions.lowest_rate:
            return f"The learning rate stays at {self.rate_factor:g} of the plan, the lowest allowed."
        self.rate_factor = max(self.rate_factor * self.actions.cut_rate, self.actions.lowest_rate)
        return f"The learning rate is {self.rate_factor:g} of the plan from here on."

    def _turn_up_kss(self) -> str:
        kss = self.actions.kss
        if not kss.enabled:
            kss.enabled = True
            return f"KSS is on, strength {kss.strength:g}."
        kss.strength = kss.strength * self.actions.kss_factor
        return f"KSS has strength {kss.strength:g} now."

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; the alarms learn from the record again."""
        return {
            "rate_factor": self.rate_factor,
            "n_skipped": self.n_skipped,
            "n_answered": self._n_answered,
            "unsound": sorted(self._unsound),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.rate_factor, self.n_skipped = state["rate_factor"], state["n_skipped"]
        self._n_answered, self._unsound = state["n_answered"], set(state["unsound"])

    def _hear(self, observation: Observation) -> None:
        self._fresh += self.alarms.observe(observation)


def _restore_auxiliary_loss(faults: Injection) -> str:
    """Whoever has switched it off."""
    if faults.keeps_auxiliary_loss:
        return "The auxiliary loss is on already."
    faults.switch_off(NoAuxiliaryLoss)
    return "The auxiliary loss is on again."
