"""Alarms: signals that have left the range of healthy runs, reported at the first measurement that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.callbacks.alarms.alarm import Alarm
from workbench.callbacks.alarms.attribution import Attribution, Attributor
from workbench.callbacks.alarms.calibration import KINDS, Calibration
from workbench.callbacks.alarms.detector import Detector, onset
from workbench.callbacks.alarms.detector_options import DetectorOptions
from workbench.callbacks.alarms.probe_alarms import ProbeAlarms
from workbench.callbacks.alarms.recorded_settings import SettingsFollower
from workbench.callbacks.alarms.settling import Settling
from workbench.callbacks.alarms.watched import WATCHED, Watched
from workbench.errors import SchemaError

if TYPE_CHECKING:
    import xarray as xr

_PLACES = ("layer", "head")
#: A signal raises another alarm only after its score has fallen below this share of the threshold.
_REARM = 0.5


#: Signals of the part ``attention`` that compare queries and keys over a window of updates.
_OVER_A_WINDOW = ("frobenius_norm", "stable_rank", "effective_rank", "spectral_entropy")


class Alarms:
    """Raises alarms from the observations of a `workbench.Recorder`; causal, so a replay gives the same ones.

    Each signal is compared with the run's own healthy start, which begins once the run has settled and its warm-up is
    over, and with its own recent past, in units of the spread of healthy runs. The thresholds follow from the
    false-alarm budget, one for the mechanism monitors together and one for loss and gradient norm together.

    Args:
        budget: Share of healthy runs that may raise a false alarm of either group; a larger one gives earlier alarms.
        calibration: Ranges of healthy runs; None: the built-in one, of small transformers (see data/README.md). Your
            own is made by `calibrate`.
        paired: A healthy run of the same model to compare with, step by step, instead of the run's own start.
        options: Options of the detectors; None: those of the calibration.
        attributor: Model that names the fault; None: the built-in one.
        on_alarm: Function called with each `Alarm` as it is raised; its exceptions reach the training loop.

    Raises:
        OptionError: If the budget is out of range.
        SchemaError: If the paired run has no monitors.

    Example:
        >>> import numpy as np
        >>> import xarray as xr
        >>> import workbench as wb
        >>> step = np.arange(400)
        >>> loss = 3.0 + 0.1 * np.sin(step) + 30.0 * (step > 300)
        >>> run = xr.DataTree.from_dict({"/monitors": xr.Dataset({"loss": ("step", loss)}, {"step": step})})
        >>> raised = wb.alarms.replay(run, wb.Alarms(budget=0.05))
        >>> raised[0].signal, raised[0].step > 300
        ('loss', True)
    """

    def __init__(
        self,
        *,
        budget: float = 0.05,
        calibration: Calibration | None = None,
        paired: xr.DataTree | None = None,
        options: DetectorOptions | None = None,
        attributor: Attributor | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        if calibration is None:
            calibration = Calibration.shipped(paired=paired is not None)
        self.calibration = calibration
        self.options = options or calibration.options
        self.budget = budget
        self.attributor = attributor or Attributor.shipped()
        self.on_alarm = on_alarm
        self._pair = None if paired is None else Pair(paired)
        self.reset()

    @property
    def budget(self) -> float:
        """Share of healthy runs that may raise a false alarm; may be changed at any time."""
        return self._budget

    @budget.setter
    def budget(self, budget: float) -> None:
        groups = ("mechanism", "outcome")
        self._thresholds = {group: self.calibration.threshold(budget, group=group) for group in groups}
        self._budget = budget

    def reset(self, *, step: int = 0) -> None:
        """Forget the run so far: its healthy start is learned again from ``step`` on, for example after an action."""
        self._from = step
        self._follows: dict[str, _Follow] = {}
        self._probes = ProbeAlarms()
        self._settling = Settling(self.options)
        self._settings = SettingsFollower(self._settling)
        self._silent_until = self._last_step = -1
        self._reported = ""
        self.raised: list[Alarm] = []

    @property
    def settled_at(self) -> int:
        """Step at which the healthy start begins, as far as it is known so far; it moves on during a warm-up."""
        return self._from + self._settling.end

    def is_at(self, step: int) -> bool:
        """Whether the observations so far are those of a run up to a step: some, and none of that step or later."""
        return bool(self._follows) and self._last_step < step

    def rest(self, step: int, *, n_steps: int) -> None:
        """Raise no alarm for some steps and forget the recent past, but not the healthy start: after an action."""
        self._silent_until, self._reported = step + n_steps, ""
        for follow in self._follows.values():
            follow.forget_past()

    def observe(self, observation: Any) -> list[Alarm]:
        """Process an observation of a recorder.

        Args:
            observation: A `workbench.alarms.Observation`.

        Returns:
            Alarms that this measurement raises; most raise none.
        """
        fresh = self._probes.observe(observation)
        self._last_step = max(self._last_step, observation.step)
        if observation.part == "monitors":
            self._settling.update(observation.step - self._from, observation.values)
            self._settings.update(observation.step - self._from, observation.values)
        for watched, values, layers in watched_values(observation.part, observation.values, observation.coords):
            follow = self._follows.get(watched.name)
            if follow is None:
                follow = self._follows[watched.name] = _Follow(
                    watched, self.options, self._settling, has_pair=self._pair is not None
                )
            compared = watched.badness(values)
            if self._pair is not None:
                compared = compared - self._pair.badness(watched, observation.step, compared.shape)
            follow.update(observation.step - self._from, compared, values, layers, self.calibration)
            threshold = self._thresholds["outcome" if watched.is_outcome else "mechanism"]
            if observation.step >= self._silent_until and (alarm := follow.alarm(observation.step, threshold)):
                fresh.append(alarm)
        self.raised += fresh
        if self.on_alarm is not None:
            for alarm in fresh:
                self.on_alarm(alarm)
        return fresh

    def scores(self) -> dict[str, float]:
        """The latest score of each signal, in units of the scale of healthy runs; of its worst layer and head."""
        return {name: follow.score for name, follow in self._follows.items()}

    def departures(self) -> dict[str, dict[str, float]]:
        """The latest departure of each signal and kind, at its worst layer and head; what `Calibration.of` takes."""
        return {name: dict(follow.latest) for name, follow in self._follows.items()}

    def attribute(self) -> Attribution:
        """Which fault the signals point to now, with the evidence; faults that a probe cannot tell apart share it."""
        for alarm, causes in self._probes.standing.values():
            return Attribution(causes[0], dict.fromkeys(causes, 1 / len(causes)), (alarm.message.rstrip("."),))
        return self.attributor.attribute(self.features())

    def new_attribution(self, fresh: Sequence[Alarm]) -> Attribution | None:
        """The attribution, if alarms are recent and it is a different fault than the last one reported."""
        if not fresh or (found := self.attribute()).cause == self._reported:
            return None
        self._reported = found.cause
        return found

    def features(self) -> dict[str, float]:
        """The input of `attribute`: the latest signed score of each signal, and how the run's settings have changed."""
        return {name: follow.signed for name, follow in self._follows.items()} | self._settings.changes()

    def onset(self, signal: str) -> int | None:
        """The last step before a signal changed, as far as the detectors remember; None if that is not enough."""
        follow = self._follows.get(signal)
        return None if follow is None else follow.onset(self._from)


@dataclass
class _Follow:
    """One signal: its detector, latest score and whether its alarm is armed."""

    watched: Watched
    options: DetectorOptions
    settling: Settling
    has_pair: bool
    score: float = float("nan")
    signed: float = 0.0
    latest: dict[str, float] = field(default_factory=dict)
    is_armed: bool = True
    was_finite: bool = False
    place: tuple[int, int] = (-1, -1)
    value: float = float("nan")
    unit: int = 0
    is_broken: bool = False

    def __post_init__(self) -> None:
        self.detector = Detector(self.options, part=self.watched.part, has_pair=self.has_pair, settling=self.settling)

    def update(
        self, step: int, compared: np.ndarray, values: np.ndarray, layers: np.ndarray | None, calibration: Calibration
    ) -> None:
        self.is_broken = self.was_finite and not np.isfinite(compared).any()
        self.was_finite |= bool(np.isfinite(compared).any())
        departure = self.detector.update(step, compared)
        self.score, self.signed = float("nan"), 0.0
        if departure is None:
            return
        scores = []
        for kind in KINDS:
            departed = getattr(departure, kind)
            if np.isfinite(departed).any():
                self.latest[kind] = float(np.nanmax(departed))
            scores.append(calibration.score(self.watched.name, kind, departed))
        together = np.fmax(*scores)
        if not np.isfinite(together).any():
            return
        worst = np.unravel_index(np.nanargmax(together), together.shape)
        self.score, self.value = float(together[worst]), float(values[worst])
        self.unit = int(np.ravel_multi_index(worst, together.shape)) if worst else 0
        lowest = float(np.nanmin(np.fmin(*scores)))
        self.signed = self.score if self.score >= -lowest else lowest
        where = [int(i) for i in worst]
        layer = -1 if not where else (where[0] if layers is None else int(layers[where[0]]))
        self.place = (layer, where[1] if len(where) > 1 else -1)

    def forget_past(self) -> None:
        """Forget the past of the signal except its healthy start, and arm the alarm again."""
        self.detector.forget_past()
        self.is_armed = True

    def onset(self, offset: int) -> int | None:
        """See `Alarms.onset`; for the layer and head with the worst value."""
        steps, values = self.detector.past()
        found = onset(steps, values.reshape(len(steps), -1)[:, self.unit]) if len(steps) else None
        return None if found is None else found + offset

    def alarm(self, step: int, threshold: float) -> Alarm | None:
        score = float("inf") if self.is_broken else self.score / threshold
        if not score >= 1:  # also if it is NaN
            self.is_armed |= score < _REARM
            return None
        if not self.is_armed:
            return None
        self.is_armed = False
        return Alarm(
            step=step,
            signal=self.watched.name,
            layer=self.place[0],
            head=self.place[1],
            score=score,
            value=self.value,
            is_outcome=self.watched.is_outcome,
            message=self._message(),
        )

    def _message(self) -> str:
        if self.is_broken:
            return f"{self.watched.name} is not finite any more."
        layer, head = self.place
        where = f" in layer {layer}" if layer >= 0 else ""
        where += f", head {head}" if head >= 0 else ""
        way = "low" if self.watched.is_bad_low else "high"
        return f"{self.watched.name} is too {way} ({self.value:.4g}){where}: {self.watched.points_to}."


def watched_values(
    part: str, values: Mapping[str, np.ndarray], coords: Mapping[str, Any]
) -> Iterable[tuple[Watched, np.ndarray, np.ndarray | None]]:
    """The watched signals in one measurement: the signal, its values by layer and head, and the layers' numbers."""
    has_no_window = part == "attention" and _lacks_window(values)
    for watched in WATCHED:
        if watched.part != part or watched.variable not in values:
            continue
        if has_no_window and watched.variable in _OVER_A_WINDOW:
            continue
        found = np.asarray(values[watched.variable], dtype=np.float64)
        if watched.term:
            terms = [str(term) for term in coords["term"]]
            if watched.term not in terms:
                continue
            found = found[..., terms.index(watched.term)]
        layers = np.asarray(coords["layer"]) if "layer" in coords and found.ndim else None
        yield watched, found, layers


def _lacks_window(values: Mapping[str, np.ndarray]) -> bool:
    """Whether updates of queries and keys are missing because, after a resume, their window is not full yet.

    Attention itself is still measured then; with parameters that are not finite, its logits are not finite either.
    """
    spectra = [np.asarray(values[name], dtype=np.float64) for name in _OVER_A_WINDOW if name in values]
    logits = np.asarray(values.get("attention_logit_max", np.nan), dtype=np.float64)
    return bool(np.isfinite(logits).any()) and all(np.isnan(found).all() for found in spectra)


class Pair:
    """The healthy run that another is compared with."""

    def __init__(self, run: xr.DataTree) -> None:
        if "monitors" not in run.children:
            raise SchemaError("The paired run has no monitors; record it as the run that it is compared with.")
        self._run = run
        self._known: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def badness(self, watched: Watched, step: int, shape: tuple[int, ...]) -> np.ndarray:
        """The values of the paired run's latest measurement up to this step; NaN if it has none."""
        if watched.name not in self._known:
            self._known[watched.name] = self._read(watched)
        steps, values = self._known[watched.name]
        place = int(np.searchsorted(steps, step, side="right")) - 1
        if place < 0 or values.shape[1:] != shape:
            return np.full(shape, np.nan)
        return values[place]

    def _read(self, watched: Watched) -> tuple[np.ndarray, np.ndarray]:
        node = self._run.children.get(watched.part)
        part = None if node is None else node.to_dataset(inherit=False)
        if part is None or watched.variable not in part:
            return np.zeros(0, int), np.zeros((0,))
        variable = part[watched.variable]
        if watched.term:
            variable = variable.sel(term=watched.term)
        return part["step"].values, watched.badness(variable.values)
