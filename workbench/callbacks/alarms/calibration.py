"""Calibration of alarms on healthy runs, and attribution of alarms to faults by an interpretable linear model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from workbench.callbacks.alarms.run_evidence import RunEvidence, observations
from workbench.callbacks.alarms.watched import WATCHED
from workbench.errors import OptionError
from workbench.io.atomic import write_json
from workbench.io.files import FileKind
from workbench.option_kinds import PositiveInt, Remedy, above

if TYPE_CHECKING:
    import xarray as xr


_SHIPPED = Path(__file__).parent / "shipped" / "calibration.json"
_FILE = FileKind("a calibration of alarms", "pass a file written by Calibration.save()")
#: Number of healthy steps that a rate of false alarms refers to.
PER_STEPS = 100_000
#: Steps of a stretch, of which only the largest evidence counts.
_STRETCH = 100
#: Upper fraction of the stretches to which the tail is fitted, and smallest sufficient number of stretches.
_UPPER, _LEAST_STRETCHES = 0.02, 10
#: Smallest evidence of an alarm, for any rate of false alarms.
_LEAST_EVIDENCE = 1.0
#: Mean excess of -log10 of an exact p value over a limit; real signals have heavier tails.
_NOMINAL_EXCESS = 1 / math.log(10)
#: Weight of the base calibration, in stretches, relative to the user's own runs.
_PRIOR = 50.0


#: Rate of false alarms of all signals together.
FalseAlarms = Annotated[float, above(0), Remedy("pass a rate per 100,000 steps, such as 1")]


@dataclass(frozen=True)
class Tail:
    """Exponential tail of the evidence of one signal in healthy runs."""

    limit: float
    rate: float
    excess: float

    def evidence_at(self, rate: float) -> float:
        """Return the evidence that is exceeded at a rate, per 100,000 steps; never below the limit, or below 1."""
        return max(self.limit + self.excess * math.log(max(self.rate / rate, 1.0)), _LEAST_EVIDENCE)


#: Tail of exact p values that are evaluated at every step.
_NOMINAL = Tail(0.0, PER_STEPS, _NOMINAL_EXCESS)


@dataclass(frozen=True)
class Calibration:
    """Frequency with which healthy runs reach the evidence of each signal.

    Attributes:
        tails: Tail of each signal by its name; a missing signal is treated as one with exact p values.
        n_steps: Steps of the healthy runs.
        about: Origin of the runs, for readers.

    Example:
        >>> import workbench as wb
        >>> calibration = wb.alarms.Calibration.shipped()
        >>> often, rarely = (calibration.threshold("loss", rate, n_signals=20) for rate in (100, 1))
        >>> often < rarely
        True

    See Also:
        `workbench.alarms.calibrate`: Computes a calibration from healthy runs.
        `workbench.Alarms`: Uses it.
    """

    tails: Mapping[str, Tail]
    n_steps: int
    about: str = ""

    def threshold(self, signal: str, false_alarms: FalseAlarms, *, n_signals: PositiveInt) -> float:
        """Return the evidence at which a signal raises an alarm, for a rate of false alarms of all signals together.

        Args:
            signal: Name of the signal.
            false_alarms: Rate for all signals together, per 100,000 steps.
            n_signals: Number of signals, among which the rate is divided equally.
        """
        return self.tails.get(signal, _NOMINAL).evidence_at(false_alarms / max(n_signals, 1))

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the calibration to a JSON file."""
        tails = {
            name: {key: float(f"{value:.4g}") for key, value in asdict(tail).items()}
            for name, tail in sorted(self.tails.items())
        }
        return write_json({"tails": tails, "n_steps": self.n_steps, "about": self.about}, path, overwrite=overwrite)

    @classmethod
    def open(cls, path: str | Path) -> Calibration:
        """Read a file written by `save`.

        Raises:
            StoreError: If the file does not exist or has other content.
        """
        content = _FILE.json(path)
        with _FILE.reading(path):
            tails = {name: Tail(**tail) for name, tail in content["tails"].items()}
            return cls(tails, int(content["n_steps"]), str(content["about"]))

    @classmethod
    def shipped(cls) -> Calibration:
        """Return the calibration on the recorded healthy runs; see data/README.md."""
        return cls.open(_SHIPPED)


def calibrate(runs: Iterable[xr.DataTree], *, base: Calibration | None = None, about: str = "") -> Calibration:
    """Measure how often healthy runs reach the evidence of an alarm, for ``workbench.Alarms(calibration=)``.

    The base calibration has the weight of 5,000 steps, so it matters more when there are few runs.

    Args:
        runs: Healthy runs of the kind to be watched, recorded in the same way, with at least 1,000 evaluated steps in
            total.
        base: Calibration to start from; None for the shipped one.
        about: Origin of the runs, for readers.

    Raises:
        OptionError: If there are too few evaluated steps.
        SchemaError: If a run has no monitors.

    Example:
        >>> import numpy as np
        >>> import xarray as xr
        >>> import workbench as wb
        >>> def healthy(seed):
        ...     loss = np.random.default_rng(seed).normal(3.0, 0.1, size=600)
        ...     monitors = xr.Dataset({"loss": ("step", loss)}, {"step": np.arange(600)})
        ...     return xr.DataTree.from_dict({"/monitors": monitors})
        >>> calibration = wb.alarms.calibrate([healthy(seed) for seed in range(5)])
        >>> alarms = wb.Alarms(calibration=calibration)

    See Also:
        `workbench.Alarms`: Uses a calibration.
        `workbench.alarms.Calibration`: The result.
    """
    base = Calibration.shipped() if base is None else base
    largest: dict[str, list[float]] = {}
    n_steps = 0
    for run in runs:
        for name, found in stretches(run).items():
            largest.setdefault(name, []).extend(found)
        n_steps += len(run["monitors"]["step"])
    if max(map(len, largest.values()), default=0) < _LEAST_STRETCHES:
        raise OptionError(
            f"The healthy runs have {n_steps} steps, of which fewer than {_LEAST_STRETCHES * _STRETCH} are evaluated; "
            "pass more or longer runs: the first 200 steps and a warm-up do not count."
        )
    tails = dict(base.tails) | {name: _tail(np.array(found), base.tails.get(name)) for name, found in largest.items()}
    return Calibration(tails, n_steps, about)


def stretches(run: xr.DataTree) -> dict[str, list[float]]:
    """Return the largest evidence of each signal in each evaluated stretch of 100 steps of a run."""
    evidence = RunEvidence()
    largest: dict[str, dict[int, float]] = {}
    for observation in observations(run):
        for reading in evidence.update(observation):
            if reading.is_evaluated and math.isfinite(reading.evidence) and math.isnan(reading.watched.threshold):
                of_signal = largest.setdefault(reading.watched.name, {})
                at = reading.step // _STRETCH
                of_signal[at] = max(of_signal.get(at, -math.inf), reading.evidence)
    return {name: list(found.values()) for name, found in largest.items()}


def _tail(largest: np.ndarray, base: Tail | None) -> Tail:
    """Fit an exponential tail to the upper stretches by their mean excess; never lighter than for exact p values."""
    per_stretch = _STRETCH / PER_STEPS
    limit = float(np.quantile(largest, 1 - _UPPER)) if base is None else base.limit
    above = largest[largest > limit] - limit
    n, n_above, total = float(len(largest)), float(len(above)), float(above.sum())
    if base is not None:
        n_prior = _PRIOR * base.rate * per_stretch
        n, n_above, total = n + _PRIOR, n_above + n_prior, total + n_prior * base.excess
    excess = max(total / n_above, _NOMINAL_EXCESS) if n_above else _NOMINAL_EXCESS
    return Tail(limit, n_above / n / per_stretch, excess)


_ATTRIBUTION = Path(__file__).parent / "shipped" / "attribution.json"
_ATTRIBUTOR = FileKind("an attributor", "pass a file of this version")
#: Largest absolute score; larger ones are clipped.
_CLIP = 3.0
#: Largest number of signals named as evidence.
_N_EVIDENCE = 3
#: The cause if none of the known ones explains the alarms.
UNKNOWN = "unknown"
#: Smallest probability of a cause that is named, and smallest score of a signal that is evidence for one.
_LEAST_PROBABILITY, _LEAST_SCORE = 0.5, 0.5


@dataclass(frozen=True)
class Attribution:
    """The fault that the signals point to, with probabilities and evidence.

    Attributes:
        cause: The most probable fault; ``"unknown"`` if none of the known ones has a probability of one half, or no
            signal is evidence for it.
        probability: Probability of each fault, in decreasing order, with sum 1. It is conditional on one of the known
            faults having occurred; it is not the probability that there is a fault. Empty if there is no alarm.
        evidence: Strongest evidence for the cause, in words.

    Example:
        >>> import workbench as wb
        >>> attributor = wb.alarms.Attributor.shipped()
        >>> attributor.attribute({}).message
        'The cause is unknown: no signal stands out.'
        >>> round(sum(attributor.attribute({"label_entropy": 3.0}).probability.values()), 3)
        1.0

    See Also:
        `workbench.alarms.Attributor`: Computes attributions.
        `workbench.diagnose`: Ranks the causes of a failed run.
    """

    cause: str
    probability: Mapping[str, float]
    evidence: tuple[str, ...]

    @classmethod
    def of_unknown(cls, *evidence: str) -> Attribution:
        """Return an attribution to none of the known faults."""
        return cls(UNKNOWN, {}, evidence)

    @property
    def score(self) -> float:
        """Score of the cause among the known faults, 0 to 1; NaN if it is unknown, or a fact."""
        return self.probability.get(self.cause, math.nan)

    @property
    def summary(self) -> str:
        """The cause in a few words, without its score, which is no probability for a run of another kind."""
        return self.cause.replace("_", " ")

    @property
    def message(self) -> str:
        """The attribution as one sentence."""
        is_fact = self.cause != UNKNOWN and math.isnan(self.score)
        what = f"This is a {self.summary}" if is_fact else f"This looks like {self.summary}"
        what = "The cause is unknown" if self.cause == UNKNOWN else what
        return f"{what}: {'; '.join(self.evidence)}."

    def as_event(self) -> dict[str, Any]:
        """Return the fields of the attribution's event in a run, without step and kind."""
        return {"source": self.cause, "score": self.score, "message": self.message}


@dataclass(frozen=True)
class Attributor:
    """Multinomial logistic regression from scores to faults.

    Attributes:
        causes: The faults, shape (cause,).
        features: Names of the signals, shape (feature,).
        weight: Weights, shape (cause, feature).
        bias: Biases, shape (cause,).

    Example:
        >>> import workbench as wb
        >>> attributor = wb.alarms.Attributor.shipped()
        >>> attributor.causes[0]
        'corrupted_data'

    See Also:
        `workbench.Alarms`: Uses an attributor.
        `workbench.alarms.Attribution`: The result.
    """

    causes: tuple[str, ...]
    features: tuple[str, ...]
    weight: np.ndarray
    bias: np.ndarray

    def attribute(self, scores: Mapping[str, float], *, excluded: Collection[str] = ()) -> Attribution:
        """Return the most probable fault, with the probability of each; ``"unknown"`` if none is likely.

        Args:
            scores: Score of each signal: its evidence over the threshold, negative if it changed in the opposite
                direction. Missing signals count as 0.
            excluded: Faults that are known not to be the cause.
        """
        row = _row(self.features, scores)
        logits = self.weight @ row + self.bias
        is_possible = np.array([cause not in excluded for cause in self.causes])
        logits = np.where(is_possible | ~is_possible.any(), logits, -np.inf)
        probability = np.exp(logits - logits.max())
        probability /= probability.sum()
        best = int(probability.argmax())
        # Contribution of each feature to the logit of the cause, relative to the mean over all causes.
        lift = (self.weight[best] - self.weight.mean(axis=0)) * row
        telling = [i for i in np.argsort(-lift)[:_N_EVIDENCE] if lift[i] > 0 and abs(row[i]) >= _LEAST_SCORE]
        is_named = telling and is_possible[best] and probability[best] >= _LEAST_PROBABILITY
        return Attribution(
            self.causes[best] if is_named else UNKNOWN,
            {self.causes[i]: float(probability[i]) for i in np.argsort(-probability)},
            tuple(_words(self.features[i], float(row[i])) for i in telling) or ("no signal stands out",),
        )

    @classmethod
    def open(cls, path: str | Path) -> Attributor:
        """Read a file written by ``data/fitting.py``.

        Raises:
            StoreError: If the file does not exist or has other content.
        """
        content = _ATTRIBUTOR.json(path)
        with _ATTRIBUTOR.reading(path):
            weight, bias = np.array(content["weight"], float), np.array(content["bias"], float)
            causes, features = tuple(content["causes"]), tuple(content["features"])
        if weight.shape != (len(causes), len(features)) or bias.shape != (len(causes),):
            raise _ATTRIBUTOR.rejected(path, "its weights do not fit its causes and features")
        return cls(causes, features, weight, bias)

    @classmethod
    def shipped(cls) -> Attributor:
        """Return the attributor fitted to the recorded study; see data/README.md."""
        return cls.open(_ATTRIBUTION)


def _row(features: tuple[str, ...], scores: Mapping[str, float]) -> np.ndarray:
    row = np.array([scores.get(name, 0.0) for name in features], dtype=float)
    row = np.where(np.isnan(row), 0.0, row)
    return np.clip(row, -_CLIP, _CLIP)


def _words(name: str, value: float) -> str:
    watched = next(w for w in WATCHED if w.name == name)
    has_fallen = watched.is_bad_low == (value > 0)
    way = "changed" if watched.is_bad_both_ways else "fallen" if has_fallen else "risen"
    return f"{name} has {way} ({abs(value):.2g} times the evidence of an alarm)"
