"""How often healthy runs reach the evidence of an alarm: which evidence a given false-alarm rate needs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.callbacks.alarms.recorded_observations import observations
from workbench.callbacks.alarms.run_evidence import RunEvidence
from workbench.errors import OptionError, StoreError
from workbench.io.atomic import write_json

if TYPE_CHECKING:
    import xarray as xr

_SHIPPED = Path(__file__).parent / "shipped" / "calibration.json"
#: Steps for which a rate of false alarms is said.
PER_STEPS = 100_000
#: The largest evidence of each stretch of so many steps counts once.
_STRETCH = 100
#: The upper share of the stretches to which the tail is fitted, and the number of them that are enough.
_UPPER, _LEAST_STRETCHES = 0.02, 10
#: No alarm with less evidence, whatever the rate of false alarms.
_LEAST_EVIDENCE = 1.0
#: Mean excess of -log10 of an exact p value over a limit; real signals have heavier tails.
_NOMINAL_EXCESS = 1 / math.log(10)
#: Weight, in stretches, of the shipped calibration beside that of one's own runs.
_PRIOR = 50.0


@dataclass(frozen=True)
class Tail:
    """How often the evidence of one signal exceeds a limit in healthy runs: an exponential tail.

    Attributes:
        limit: Evidence from which the tail holds.
        rate: Stretches with evidence above it, per 100,000 steps.
        excess: Mean excess over it.
    """

    limit: float
    rate: float
    excess: float

    def evidence_at(self, rate: float) -> float:
        """The evidence that is exceeded at a rate, per 100,000 steps; never below the limit, or below 1."""
        return max(self.limit + self.excess * math.log(max(self.rate / rate, 1.0)), _LEAST_EVIDENCE)


#: That of exact p values, which are judged at every step.
_NOMINAL = Tail(0.0, PER_STEPS, _NOMINAL_EXCESS)


@dataclass(frozen=True)
class Calibration:
    """How often healthy runs reach the evidence of each signal.

    Attributes:
        tails: Signal name -> its tail; a signal that is missing counts as one of exact p values.
        n_steps: Steps of the healthy runs.
        about: Origin of the runs, for readers.

    Example:
        >>> import workbench as wb
        >>> calibration = wb.alarms.Calibration.shipped()
        >>> often, rarely = (calibration.threshold("loss", rate, n_signals=20) for rate in (100, 1))
        >>> often < rarely
        True
    """

    tails: Mapping[str, Tail]
    n_steps: int
    about: str = ""

    def threshold(self, signal: str, false_alarms: float, *, n_signals: int) -> float:
        """The evidence of a signal that healthy runs exceed so often that all signals together keep the rate.

        Args:
            signal: Name of the signal.
            false_alarms: Rate for all signals together, per 100,000 steps.
            n_signals: Number of signals, each of which gets an equal share.

        Raises:
            OptionError: If the rate is not positive.
        """
        check_rate(false_alarms)
        return self.tails.get(signal, _NOMINAL).evidence_at(false_alarms / max(n_signals, 1))

    def save(self, path: Path, *, overwrite: bool = False) -> Path:
        """Write it as JSON."""
        tails = {
            name: {key: float(f"{value:.4g}") for key, value in asdict(tail).items()}
            for name, tail in sorted(self.tails.items())
        }
        return write_json({"tails": tails, "n_steps": self.n_steps, "about": self.about}, path, overwrite=overwrite)

    @classmethod
    def open(cls, path: Path) -> Calibration:
        """Read a file written by `save`.

        Raises:
            StoreError: If the file does not exist or has other content.
        """
        try:
            content: dict[str, Any] = json.loads(Path(path).read_text())
            tails = {name: Tail(**tail) for name, tail in content["tails"].items()}
            return cls(tails, int(content["n_steps"]), str(content["about"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path} is no calibration of alarms ({error}); pass one from Calibration.save()."
            ) from error

    @classmethod
    def shipped(cls) -> Calibration:
        """The calibration measured on the recorded healthy runs; see data/README.md."""
        return cls.open(_SHIPPED)


def check_rate(false_alarms: float) -> None:
    """Refuse a rate of false alarms that is not positive."""
    if not 0 < false_alarms < math.inf:
        raise OptionError(f"false_alarms is {false_alarms}, expected a positive rate per 100,000 steps, such as 1.")


def calibrate(
    runs: Iterable[xr.DataTree],
    *,
    base: Calibration | None = None,
    about: str = "",
) -> Calibration:
    """Measure how often healthy runs reach the evidence of an alarm, for ``workbench.Alarms(calibration=)``.

    The fewer runs there are, the more the base counts: it has the weight of 5,000 steps.

    Args:
        runs: Healthy runs of the kind to be watched, with the same recorder: at least 1,000 judged steps in all.
        base: Calibration to start from; None: the shipped one.
        about: Origin of the runs, for readers.

    Raises:
        OptionError: If there are too few steps.
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
            f"The healthy runs have {n_steps} steps, of which fewer than {_LEAST_STRETCHES * _STRETCH} are judged; "
            "pass more or longer runs: the first 200 steps and a warm-up do not count."
        )
    tails = dict(base.tails) | {name: _tail(np.array(found), base.tails.get(name)) for name, found in largest.items()}
    return Calibration(tails, n_steps, about)


def stretches(run: xr.DataTree) -> dict[str, list[float]]:
    """The largest evidence of each signal in each judged stretch of 100 steps of a run."""
    evidence = RunEvidence()
    largest: dict[str, dict[int, float]] = {}
    for observation in observations(run):
        for reading in evidence.update(observation):
            if reading.is_judged and math.isfinite(reading.evidence):
                of_signal = largest.setdefault(reading.watched.name, {})
                at = reading.step // _STRETCH
                of_signal[at] = max(of_signal.get(at, -math.inf), reading.evidence)
    return {name: list(found.values()) for name, found in largest.items()}


def _tail(largest: np.ndarray, base: Tail | None) -> Tail:
    """An exponential tail through the upper stretches, by their mean excess; never lighter than that of exact p."""
    per_stretch = _STRETCH / PER_STEPS
    limit = float(np.quantile(largest, 1 - _UPPER)) if base is None else base.limit
    above = largest[largest > limit] - limit
    n, n_above, total = float(len(largest)), float(len(above)), float(above.sum())
    if base is not None:  # so many stretches of the base
        n_prior = _PRIOR * base.rate * per_stretch
        n, n_above, total = n + _PRIOR, n_above + n_prior, total + n_prior * base.excess
    excess = max(total / n_above, _NOMINAL_EXCESS) if n_above else _NOMINAL_EXCESS
    return Tail(limit, n_above / n / per_stretch, excess)
