"""Calibration of alarms: the spread of healthy runs, which sets the threshold for a given false-alarm rate."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.callbacks.alarms.detector_options import DetectorOptions
from workbench.errors import OptionError, StoreError
from workbench.io.atomic import write_json

_SHIPPED = Path(__file__).parent / "shipped"
KINDS = ("level", "change")
#: A signal's scale is this many standard deviations above the mean of what healthy runs reach at most, ...
_N_DEVIATIONS = 3.0
#: ... and never below this: 2 % on a logarithmic scale, .02 on a linear one.
_LEAST_SCALE = 0.02


@dataclass(frozen=True)
class Calibration:
    """The largest departures of healthy runs, for each signal and over all signals.

    Attributes:
        options: Options of the detectors that measured it.
        scale: Signal name and kind of departure (``"level"``, ``"change"``) -> the departure that scores 1.
        highest: For ``"mechanism"`` and ``"outcome"``: the largest score of each healthy run over all its steps and
            signals, measured with scales from the other runs, rising.
        about: Origin of the runs, for readers.

    Example:
        >>> import workbench as wb
        >>> calibration = wb.alarms.Calibration.shipped()
        >>> calibration.threshold(0.01) >= calibration.threshold(0.20)
        True
    """

    options: DetectorOptions
    scale: Mapping[str, Mapping[str, float]]
    highest: Mapping[str, tuple[float, ...]]
    about: str = ""

    @classmethod
    def of(
        cls, runs: Iterable[Mapping[str, Mapping[str, float]]], options: DetectorOptions, *, groups: Mapping[str, str],
        about: str = "",
    ) -> Calibration:  # fmt: skip
        """Make a calibration from the largest departures of healthy runs.

        Args:
            runs: For each run: signal name and kind -> largest departure.
            options: Options of the detectors.
            groups: Signal name -> ``"mechanism"`` or ``"outcome"``.
            about: Origin of the runs, for readers.

        Raises:
            OptionError: If there are fewer than five runs.
        """
        runs = list(runs)
        if len(runs) < 5:
            raise OptionError(f"There are {len(runs)} healthy runs to calibrate with, expected at least 5.")
        highest: dict[str, list[float]] = {"mechanism": [], "outcome": []}
        for i, run in enumerate(runs):
            others = _scales(runs[:i] + runs[i + 1 :])
            for group, values in highest.items():
                scores = [
                    run[name][kind] / others[name][kind]
                    for name in run
                    if groups.get(name) == group and name in others
                    for kind in run[name]
                    if kind in others[name]
                ]
                values.append(max(scores, default=0.0))
        return cls(options, _scales(runs), {group: tuple(sorted(values)) for group, values in highest.items()}, about)

    def threshold(self, budget: float, *, group: str = "mechanism") -> float:
        """The score that a healthy run, as in the calibration, exceeds at any time with probability ``budget``.

        The budget's quantile of the healthy runs (split-conformal: exact for runs that are exchangeable with them). A
        budget smaller than one over their number plus one needs an extrapolation; the threshold then continues
        from the largest of them along an exponential tail through the upper half.

        Args:
            budget: Share of healthy runs, in (0, 1).
            group: Group of signals, ``"mechanism"`` or ``"outcome"``.

        Raises:
            OptionError: If the budget is out of range.
        """
        if not 0 < budget < 1:
            raise OptionError(f"budget is {budget}, expected a share of healthy runs above 0 and below 1.")
        values = self.highest[group]
        rank = math.ceil((len(values) + 1) * (1 - budget))
        if rank <= len(values):
            return values[rank - 1]
        upper = values[len(values) // 2 :]
        tail = float(np.mean(upper)) - upper[0]
        return values[-1] + tail * math.log(1 / (budget * (len(values) + 1)))

    def score(self, name: str, kind: str, departure: np.ndarray) -> np.ndarray:
        """Departures in units of what healthy runs reach; NaN where that is not known."""
        scale = self.scale.get(name, {}).get(kind)
        return departure / scale if scale else np.full_like(departure, np.nan)

    def save(self, path: Path, *, overwrite: bool = False) -> Path:
        """Write it as JSON."""
        content = {
            "options": asdict(self.options),
            "scale": {name: {k: _rounded(v) for k, v in kinds.items()} for name, kinds in sorted(self.scale.items())},
            "highest": {group: [_rounded(v) for v in values] for group, values in self.highest.items()},
            "about": self.about,
        }
        return write_json(content, path, overwrite=overwrite)

    @classmethod
    def open(cls, path: Path) -> Calibration:
        """Read a file written by `save`.

        Raises:
            StoreError: If the file does not exist or has other content.
        """
        try:
            content: dict[str, Any] = json.loads(Path(path).read_text())
            options = DetectorOptions(**content["options"])
            highest = {group: tuple(values) for group, values in content["highest"].items()}
            return cls(options, content["scale"], highest, content["about"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is no calibration of alarms ({error}); pass one from Calibration.save()."
            ) from error

    @classmethod
    def shipped(cls, *, paired: bool = False) -> Calibration:
        """The calibration measured on the recorded healthy runs, single or paired; see data/README.md."""
        return cls.open(_SHIPPED / ("calibration_paired.json" if paired else "calibration.json"))


def _scales(runs: list[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean plus deviations of the runs' largest departures; signals of too few runs are left out."""
    scales: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        for kind in KINDS:
            reached = np.array([run[name][kind] for run in runs if name in run and kind in run[name]])
            reached = reached[np.isfinite(reached)]
            if len(reached) >= 4:
                scale = float(reached.mean() + _N_DEVIATIONS * reached.std(ddof=1))
                scales.setdefault(name, {})[kind] = max(scale, _LEAST_SCALE)
    return scales


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
