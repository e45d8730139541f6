"""Alarms: signals that differ from their own past, reported at the first measurement that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.callbacks.alarms.calibration import UNKNOWN, Attribution, Attributor, Calibration, FalseAlarms
from workbench.callbacks.alarms.probe_alarms import BROKEN_CONTRACT, Check, ProbeAlarms
from workbench.callbacks.alarms.run_evidence import Reading, RunEvidence
from workbench.callbacks.alarms.watched import FALL, RISE, WATCHED
from workbench.callbacks.observation import Alarm, Observation
from workbench.option_kinds import NonNegativeInt

#: Updates between two rows; an alarm ends a row immediately.
_EVERY = 10
_NAMES = np.array([watched.name for watched in WATCHED])
_PLACES = {str(name): place for place, name in enumerate(_NAMES)}


class EvidenceRows:
    """Largest evidence of each signal since the last row, so that no peak between two rows is missed.

    Attributes:
        latest: The latest row, an observation of the part ``evidence``; None if there is none yet.
    """

    def __init__(self) -> None:
        self.latest: Observation | None = None
        self._n_tens = 0
        self._has_alarm = False
        self._empty()

    def note(self, signal: str, ratio: float, *, is_alarm: bool) -> None:
        """Process the evidence of a signal over its threshold; NaN if unknown."""
        place = _PLACES[signal]
        if not ratio <= self._largest[place] and not math.isnan(ratio):
            self._largest[place] = ratio
        self._has_alarm |= is_alarm

    def end_update(self, step: int) -> None:
        """End an update, and the current row if it is due."""
        n_tens = (step + 1) // _EVERY
        if n_tens == self._n_tens and not self._has_alarm:
            return
        self._n_tens = n_tens
        self.latest = Observation(step, "evidence", {"evidence": self._largest}, {"signal": _NAMES})
        self._empty()

    def _empty(self) -> None:
        self._largest = np.full(len(_NAMES), math.nan)
        self._has_alarm = False


#: A signal raises another alarm only after its evidence has fallen below this fraction of the threshold.
_REARM = 0.5
#: Alarms within this many steps of the previous one have the same cause, which the first one shows best.
_SAME_CAUSE = 50
#: Probe that found nothing -> faults that it would have found.
_EXCLUDES = {
    "arithmetic": ("low_precision_attention",),
    "gradients": ("low_precision_reduction", "stale_reduction", "dropped_bucket"),
}


@dataclass(frozen=True)
class _Change:
    """State at the first of several alarms: the last step before the change, and `Alarms.features`."""

    onset: int
    features: dict[str, float]
    #: What a fall of the loss may mean, if nothing else changed; no known fault makes a loss fall.
    only_fall: str = ""


class Alarms:
    """Raises alarms from the observations of a `workbench.Recorder`, without an earlier run for comparison.

    Alarms are causal: replaying a recorded run raises the same ones. An alarm is raised immediately if a probe finds a
    fault, a setting changes without a plan, an attention logit grows beyond 10,000, or the metrics of updates are
    beyond limits that need no past, such as labels that are all the same. Every other signal, of each layer and head,
    is compared with its own past, and the evidence of a change accumulates over windows of 1 to 128 measurements
    (`OwnPast`); that of the gradient norm also as a cumulative sum. Steps are evaluated from step 200 on, except within
    100 steps after the learning rate rose by more than 5 % (for losses and contents of batches: after it doubled), and
    not once the learning rate has fallen to 2 % of its largest value.

    The thresholds follow from the rate of false alarms, which all signals share, and from how often healthy runs
    reached the evidence (`Calibration`). Beneath them is a floor with a rate of its own, which comes on top: a loss
    that stays many of its own deviations above its trend ("loss rise"), or that falls far below it by more than a
    quarter ("loss fall"; not while the learning rate rises or after it fell steeply). It raised no alarm in 39,000
    healthy steps (see data/README.md).

    Args:
        false_alarms: False alarms per 100,000 healthy steps, of all signals together; a larger value leads to earlier
            alarms. The rate holds for runs like those of the calibration.
        calibration: Calibration on your own healthy runs from `calibrate`; None for the built-in one, which is of small
            models (see data/README.md).
        on_alarm: Function called with each `Alarm` as it is raised; its exceptions reach the training loop.

    Example:
        >>> import numpy as np
        >>> import xarray as xr
        >>> import workbench as wb
        >>> step = np.arange(400)
        >>> loss = 3.0 + 0.1 * np.sin(step) + 30.0 * (step > 300)
        >>> run = xr.DataTree.from_dict({"/monitors": xr.Dataset({"loss": ("step", loss)}, {"step": step})})
        >>> raised = wb.alarms.replay(run, wb.Alarms())
        >>> raised[0].signal, raised[0].step
        ('loss', 301)

    See Also:
        `workbench.watch`: Records a training loop with alarms.
        `workbench.alarms.calibrate`: Calibrates the thresholds on your own healthy runs.
        `workbench.Actions`: Responds to alarms.
    """

    def __init__(
        self,
        *,
        false_alarms: FalseAlarms = 1.0,
        calibration: Calibration | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        self.calibration = calibration or Calibration.shipped()
        self.false_alarms = false_alarms
        self.attributor = Attributor.shipped()
        self.on_alarm = on_alarm
        self.reset()

    @property
    def false_alarms(self) -> float:
        """Expected false alarms per 100,000 healthy steps; may be changed at any time."""
        return self._false_alarms

    @false_alarms.setter
    def false_alarms(self, false_alarms: FalseAlarms) -> None:
        self._false_alarms = false_alarms

    def reset(self, *, step: NonNegativeInt = 0) -> None:
        """Forget the run so far.

        Args:
            step: First step of the new run; the past of its signals is learned from there.
        """
        self._evidence = RunEvidence(step)
        self._probes = ProbeAlarms()
        self._rows = EvidenceRows()
        self._waiting: list[Observation] = []
        self._standing: set[str] = set()
        self._resting_until = self._last_step = -1
        self._change: _Change | None = None
        self._last_alarm = -1
        self._reported = ""
        self.raised: list[Alarm] = []

    def _is_at(self, step: int) -> bool:
        """Return whether there are observations, all of them from before a step."""
        return bool(self._evidence.latest) and self._last_step < step

    def rest(self, step: NonNegativeInt, *, n_steps: NonNegativeInt) -> None:
        """Raise no alarm for some steps, and forget the latest values of each signal but not their spread.

        Call it after changing the training, for example its learning rate, in response to an alarm.

        Args:
            step: Step after which the alarms rest.
            n_steps: Number of steps without alarms.
        """
        self._resting_until, self._reported, self._change = step + n_steps, "", None
        self._evidence.restart()
        self._waiting.clear()
        self._standing.clear()

    def observe(self, observation: Observation) -> list[Alarm]:
        """Process an observation of a recorder.

        Args:
            observation: A `workbench.alarms.Observation`.

        Returns:
            Alarms that this observation raises, usually none. The evidence of a part is evaluated when the metrics of
            its step, the part ``"monitors"``, arrive; they come last.
        """
        fresh = self._probes.observe(observation)
        self._last_step = max(self._last_step, observation.step)
        if observation.part == "settings" and observation.values["factor"] == 1:
            self._evidence.restart()  # a planned change of the run may change its signals
            self._standing.clear()
        if observation.part != "monitors":
            self._waiting.append(observation)
            return self._raise(fresh)
        # Other parts of a step wait for its learning rate, which determines whether they are evaluated.
        of_update = self._evidence.update(observation)
        of_parts = [reading for waiting in self._waiting for reading in self._evidence.update(waiting)]
        self._waiting.clear()
        for reading in (*of_parts, *of_update):
            if reading.step >= self._resting_until:
                name = reading.watched.name
                ratio = math.inf if reading.is_broken else reading.evidence / self._threshold(name)
                if alarm := self._alarm(reading, ratio):
                    fresh.append(alarm)
                if reading.is_evaluated or reading.is_broken:
                    self._rows.note(name, ratio, is_alarm=alarm is not None)
        self._rows.end_update(observation.step)
        self._note_change(fresh)
        return self._raise(fresh)

    def _note_change(self, fresh: Sequence[Alarm]) -> None:
        """Store the onset and the features at the first alarms of a change."""
        onsets = [reading.onset for alarm in fresh if (reading := self.reading(alarm.signal)) is not None]
        if not onsets:
            return
        step = fresh[0].step
        if self._change is None or step > self._last_alarm + _SAME_CAUSE:
            only_fall = fresh[0].message.rstrip(".") if all(alarm.signal == FALL.name for alarm in fresh) else ""
            self._change = _Change(min(onsets), self.features(), only_fall)
        self._last_alarm = step

    def _raise(self, fresh: list[Alarm]) -> list[Alarm]:
        self.raised += fresh
        if self.on_alarm is not None:
            for alarm in fresh:
                self.on_alarm(alarm)
        return fresh

    def _evidence_row(self, observation: Observation) -> Observation | None:
        """Return the row of a run's part ``evidence`` that the observation processed last has completed.

        A row ends every 10 updates and at each alarm. It holds the largest evidence over the threshold of each signal
        since the previous row, shape (signal,). None if the observation completes no row.
        """
        row = self.latest_evidence
        is_new = observation.part == "monitors" and row is not None and row.step == observation.step
        return row if is_new else None

    @property
    def latest_evidence(self) -> Observation | None:
        """The latest row of a run's part ``evidence``; None if there is none yet."""
        return self._rows.latest

    @property
    def checks(self) -> dict[str, Check]:
        """The latest measurement of each probe, by signal: whether it was sound, and any fault found."""
        return self._probes.checks

    @property
    def is_in_doubt(self) -> bool:
        """Whether the finding of a probe waits for another measurement to confirm it."""
        return self._probes.is_in_doubt

    def _alarm(self, reading: Reading, ratio: float) -> Alarm | None:
        name = reading.watched.name
        if reading.is_broken or (ratio >= 1 and reading.is_evaluated):
            if name in self._standing or (name == RISE.name and "loss" in self._standing):
                return None
            self._standing.add(name)
            return Alarm(
                step=reading.step,
                signal=name,
                layer=reading.layer,
                head=reading.head,
                score=ratio,
                value=reading.value,
                is_outcome=reading.watched.is_outcome,
                message=_message(reading),
            )
        if ratio < _REARM:
            self._standing.discard(name)
        return None

    def _threshold(self, signal: str) -> float:
        latest = self._evidence.latest
        if (own := latest[signal].watched.threshold) > 0:
            return own
        n_signals = sum(math.isnan(reading.watched.threshold) for reading in latest.values())
        return self.calibration.threshold(signal, self.false_alarms, n_signals=n_signals)

    def scores(self) -> dict[str, float]:
        """Return the latest evidence of each signal over its threshold, at its worst layer and head.

        Returns:
            Evidence by name of the signal; NaN if unknown yet.
        """
        return {name: found.evidence / self._threshold(name) for name, found in self._evidence.latest.items()}

    def attribute(self) -> Attribution:
        """Return the fault that the alarms point to, with probabilities and evidence, or that it is unknown.

        A fault found by a probe decides; faults that the probe cannot distinguish share the probability. Otherwise the
        attribution follows from the signals at the first alarm, since later alarms may be consequences, and excludes
        faults that a probe would have found since the change.
        """
        # Large logits come last, since another fault may have caused them.
        for alarm, causes in sorted(self._probes.standing.values(), key=lambda found: found[0].signal == "logits"):
            message = alarm.message.rstrip(".")
            if causes[0] == UNKNOWN:
                return Attribution.of_unknown(message)
            if causes[0] == BROKEN_CONTRACT:
                return Attribution(causes[0], {}, (message,))
            return Attribution(causes[0], dict.fromkeys(causes, 1 / len(causes)), (message,))
        if self._change is None or self._change.only_fall:
            return Attribution.of_unknown("no signal stands out" if self._change is None else self._change.only_fall)
        sound = [name for name, check in self.checks.items() if check.is_sound and check.step > self._change.onset]
        excluded = [fault for name in sound for fault in _EXCLUDES[name]]
        return self.attributor.attribute(self._change.features, excluded=excluded)

    def _new_attribution(self, fresh: Sequence[Alarm]) -> Attribution | None:
        """Return the attribution if there are new alarms and it names another fault than the last one reported."""
        if not fresh or (found := self.attribute()).cause == self._reported:
            return None
        self._reported = found.cause
        return found

    def features(self) -> dict[str, float]:
        """Return the input of `Attributor.attribute` for the latest measurements.

        Returns:
            Evidence of each signal over its threshold, negative if it changed in the opposite direction; signals whose
            evidence is not finite are left out.
        """
        found = {}
        for name, reading in self._evidence.latest.items():
            is_opposite = reading.opposite > reading.evidence and not reading.watched.is_bad_both_ways
            found[name] = (-reading.opposite if is_opposite else reading.evidence) / self._threshold(name)
        return {name: score for name, score in found.items() if math.isfinite(score)}

    def reading(self, signal: str) -> Reading | None:
        """Return the evidence of a signal in its latest measurement; None if it was not measured."""
        return self._evidence.latest.get(signal)

    def onset(self, signal: str) -> int | None:
        """Return the last step before a signal changed; None if it was not measured.

        The step is that of the window with the strongest evidence.
        """
        reading = self.reading(signal)
        return None if reading is None else reading.onset


def _message(reading: Reading) -> str:
    watched = reading.watched
    if reading.is_broken:
        return f"{watched.name} is no longer finite."
    where = f" in layer {reading.layer}" if reading.layer >= 0 else ""
    where += f", head {reading.head}" if reading.head >= 0 else ""
    way = "risen" if reading.is_rise else "fallen"
    if watched.threshold > 0:
        side = "above" if reading.is_rise else "below"
        return (
            f"The loss has {way} to {reading.value:.4g} and stays there, {reading.evidence:.0f} of its own deviations "
            f"{side} its trend: {watched.points_to}."
        )
    return f"{watched.name} has {way} to {reading.value:.4g}{where}: {watched.points_to}."
