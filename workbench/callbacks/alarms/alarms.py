"""Alarms: signals that have left their own past, reported at the first measurement that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.callbacks.alarms.alarm import Alarm
from workbench.callbacks.alarms.attribution import Attribution, Attributor
from workbench.callbacks.alarms.calibration import Calibration, check_rate
from workbench.callbacks.alarms.evidence_rows import EvidenceRows
from workbench.callbacks.alarms.probe_alarms import Check, ProbeAlarms
from workbench.callbacks.alarms.run_evidence import Reading, RunEvidence
from workbench.callbacks.observation import Observation

#: A signal raises another alarm only after its evidence has fallen below this share of the threshold.
_REARM = 0.5
#: Alarms within so many steps of the one before follow from the same cause, which the first one shows best.
_SAME_CAUSE = 50
#: Probe that was sound -> faults that it would have found.
_EXCLUDES = {
    "arithmetic": ("low_precision_attention",),
    "gradients": ("low_precision_reduction", "stale_reduction", "dropped_bucket"),
}


@dataclass(frozen=True)
class _Change:
    """What was known at the first of several alarms: the last step before the change, and `Alarms.features`."""

    onset: int
    features: dict[str, float]


class Alarms:
    """Raises alarms from the observations of a `workbench.Recorder`; causal, so a replay gives the same ones.

    Three kinds, none of which needs an earlier run: what a probe finds, a setting that changes without a plan, and an
    attention logit that grows beyond 10,000, are alarms at once. Every other signal, of each layer and head, is
    compared with its own past, and the evidence of a change accumulates: over windows of 1 to 128 measurements
    (`OwnPast`), and of the gradient norm also as a cumulative sum. It counts from step 200 on, but not within 100 steps
    after the learning rate rose by more than 5 % (losses and contents of batches: after it doubled), nor once it has
    fallen to 2 % of its largest.

    The thresholds follow from the rate of false alarms, which all signals share, and from how often healthy runs
    reached the evidence (`Calibration`).

    Args:
        false_alarms: False alarms per 100,000 healthy steps, of all signals together; a larger rate gives earlier
            alarms. It holds for runs like those of the calibration.
        calibration: Made by `calibrate` of your own healthy runs; None: the built-in one, of small models (see
            data/README.md).
        attributor: Model that names the fault; None: the built-in one.
        on_alarm: Function called with each `Alarm` as it is raised; its exceptions reach the training loop.

    Raises:
        OptionError: If the rate is not positive.

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
    """

    def __init__(
        self,
        *,
        false_alarms: float = 1.0,
        calibration: Calibration | None = None,
        attributor: Attributor | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        self.calibration = calibration or Calibration.shipped()
        self.false_alarms = false_alarms
        self.attributor = attributor or Attributor.shipped()
        self.on_alarm = on_alarm
        self.reset()

    @property
    def false_alarms(self) -> float:
        """False alarms per 100,000 healthy steps; may be changed at any time."""
        return self._false_alarms

    @false_alarms.setter
    def false_alarms(self, false_alarms: float) -> None:
        check_rate(false_alarms)
        self._false_alarms = false_alarms

    def reset(self, *, step: int = 0) -> None:
        """Forget the run so far: its past is learned again from ``step`` on."""
        self._evidence = RunEvidence(step)
        self._probes = ProbeAlarms()
        self._rows = EvidenceRows()
        self._waiting: list[Observation] = []
        self._standing: set[str] = set()
        self._silent_until = self._last_step = -1
        self._change: _Change | None = None
        self._last_alarm = -1
        self._reported = ""
        self.raised: list[Alarm] = []

    def is_at(self, step: int) -> bool:
        """Whether the observations so far are those of a run up to a step: some, and none of that step or later."""
        return bool(self._evidence.latest) and self._last_step < step

    def rest(self, step: int, *, n_steps: int) -> None:
        """Raise no alarm for some steps and forget the latest values, but not how they spread: after an action."""
        self._silent_until, self._reported, self._change = step + n_steps, "", None
        self._evidence.restart()
        self._waiting.clear()
        self._standing.clear()

    def observe(self, observation: Observation) -> list[Alarm]:
        """Process an observation of a recorder.

        Args:
            observation: A `workbench.alarms.Observation`.

        Returns:
            Alarms that are raised now; mostly none. Evidence of a part is judged with the numbers of its step, the part
            ``"monitors"``, which come last.
        """
        fresh = self._probes.observe(observation)
        self._last_step = max(self._last_step, observation.step)
        if observation.part != "monitors":
            self._waiting.append(observation)
            return self._raise(fresh)
        # Other parts of a step wait for its learning rate, which says whether they are judged.
        of_update = self._evidence.update(observation)
        of_parts = [reading for waiting in self._waiting for reading in self._evidence.update(waiting)]
        self._waiting.clear()
        for reading in (*of_parts, *of_update):
            if reading.step >= self._silent_until:
                share = self._share(reading)
                if alarm := self._alarm(reading, share):
                    fresh.append(alarm)
                if reading.is_judged or reading.is_broken:
                    self._rows.note(reading.watched.name, share, is_alarm=alarm is not None)
        self._rows.end_update(observation.step)
        self._note_change(fresh)
        return self._raise(fresh)

    def _note_change(self, fresh: Sequence[Alarm]) -> None:
        """Keep what the first alarms of a change show."""
        onsets = [reading.onset for alarm in fresh if (reading := self.reading(alarm.signal)) is not None]
        if not onsets:
            return
        step = fresh[0].step
        if self._change is None or step > self._last_alarm + _SAME_CAUSE:
            self._change = _Change(min(onsets), self.features())
        self._last_alarm = step

    def _raise(self, fresh: list[Alarm]) -> list[Alarm]:
        self.raised += fresh
        if self.on_alarm is not None:
            for alarm in fresh:
                self.on_alarm(alarm)
        return fresh

    def evidence_row(self, observation: Observation) -> Observation | None:
        """The row of a run's part ``evidence`` that an observation has completed, as `observe` left it.

        Args:
            observation: The observation that was processed last.

        Returns:
            The row, every 10 updates and at each alarm: the largest evidence over its threshold of each signal since
            the last row, shape (signal,); None: the observation completes none.
        """
        row = self.latest_evidence
        is_new = observation.part == "monitors" and row is not None and row.step == observation.step
        return row if is_new else None

    @property
    def latest_evidence(self) -> Observation | None:
        """The latest row of `evidence_row`; None: there is none yet."""
        return self._rows.latest

    @property
    def checks(self) -> dict[str, Check]:
        """The latest measurement of each probe, by signal: whether it was sound, and what it found."""
        return self._probes.checks

    @property
    def is_in_doubt(self) -> bool:
        """Whether what a probe has found waits for another measurement that confirms it."""
        return self._probes.is_in_doubt

    def _share(self, reading: Reading) -> float:
        """The evidence over its threshold: infinite where the signal is not finite any more."""
        return math.inf if reading.is_broken else reading.evidence / self._threshold(reading.watched.name)

    def _alarm(self, reading: Reading, share: float) -> Alarm | None:
        name = reading.watched.name
        if reading.is_broken or (share >= 1 and reading.is_judged):
            if name in self._standing:
                return None
            self._standing.add(name)
            return Alarm(
                step=reading.step,
                signal=name,
                layer=reading.layer,
                head=reading.head,
                score=share,
                value=reading.value,
                is_outcome=reading.watched.is_outcome,
                message=_message(reading),
            )
        if share < _REARM:
            self._standing.discard(name)
        return None

    def _threshold(self, signal: str) -> float:
        return self.calibration.threshold(signal, self.false_alarms, n_signals=len(self._evidence.latest))

    def scores(self) -> dict[str, float]:
        """The latest evidence of each signal, at its worst layer and head, over the threshold; NaN: not known yet."""
        return {name: found.evidence / self._threshold(name) for name, found in self._evidence.latest.items()}

    def attribute(self) -> Attribution:
        """Which fault the alarms point to, with the evidence.

        What a probe has found decides; faults that it cannot tell apart share the probability. Otherwise the signals do
        as they were at the first alarm, since later ones may be consequences, without the faults that a probe would
        have found since the change.
        """
        # Large logits are last, as another fault may have made them.
        for alarm, causes in sorted(self._probes.standing.values(), key=lambda found: found[0].signal == "logits"):
            return Attribution(causes[0], dict.fromkeys(causes, 1 / len(causes)), (alarm.message.rstrip("."),))
        if self._change is None:
            return self.attributor.attribute(self.features())
        sound = [name for name, check in self.checks.items() if check.is_sound and check.step > self._change.onset]
        excluded = [fault for name in sound for fault in _EXCLUDES[name]]
        return self.attributor.attribute(self._change.features, excluded=excluded)

    def new_attribution(self, fresh: Sequence[Alarm]) -> Attribution | None:
        """The attribution, if alarms are recent and it is a different fault than the last one reported."""
        if not fresh or (found := self.attribute()).cause == self._reported:
            return None
        self._reported = found.cause
        return found

    def features(self) -> dict[str, float]:
        """The input of `Attributor.attribute`: the score of each signal, negative in the opposite direction."""
        found = {}
        for name, reading in self._evidence.latest.items():
            is_opposite = reading.opposite > reading.evidence and not reading.watched.is_bad_both_ways
            found[name] = (-reading.opposite if is_opposite else reading.evidence) / self._threshold(name)
        return {name: score for name, score in found.items() if math.isfinite(score)}

    def reading(self, signal: str) -> Reading | None:
        """The evidence of a signal in its latest measurement; None: it was not measured."""
        return self._evidence.latest.get(signal)

    def onset(self, signal: str) -> int | None:
        """The last step before a signal changed, by the most telling window; None: it was not measured."""
        reading = self.reading(signal)
        return None if reading is None else reading.onset


def _message(reading: Reading) -> str:
    watched = reading.watched
    if reading.is_broken:
        return f"{watched.name} is not finite any more."
    where = f" in layer {reading.layer}" if reading.layer >= 0 else ""
    where += f", head {reading.head}" if reading.head >= 0 else ""
    way = "risen" if reading.is_rise else "fallen"
    return f"{watched.name} has {way} to {reading.value:.4g}{where}: {watched.points_to}."
