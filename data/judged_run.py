"""Evaluation of the alarms of one run of their study, during training or from its record."""

from __future__ import annotations

import math
from typing import Any

from warning_cases import BY_HAND, KINDS, SETUPS

import workbench as wb
from workbench.callbacks.alarms import Calibration

#: Number of steps after the onset within which the cause should be named.
NAMED = 50


def is_healthy(result: dict[str, Any]) -> bool:
    """Return whether a run has no fault and is not a late failure."""
    return result.get("kind") == ""


def family_of(result: dict[str, Any]) -> str:
    """Return the family with which a run is held out."""
    return SETUPS[result["setup"]].family if "setup" in result else str(result["norm"])


class JudgedRun:
    """Follow the alarms of a run, update by update.

    Args:
        alarms: Alarms that have processed an update before `end_update` is called.
        start: First step of the fault; None if there is none.
    """

    def __init__(self, alarms: wb.Alarms, start: int | None = None) -> None:
        self._alarms, self._alone = alarms, Alone(alarms)
        self.begin_fault(start)

    def begin_fault(self, start: int | None) -> None:
        """Set the first step of the fault."""
        self._start, self._named = start or 0, {"first_cause": "", "cause": ""}

    def end_update(self, step: int) -> None:
        """Record the named causes after an update."""
        self._alone.update()
        if not self._named["first_cause"] and any(alarm.step >= self._start for alarm in self._alarms.raised):
            self._named["first_cause"] = self._alarms.attribute().cause
        if self._named["first_cause"] and step <= self._start + NAMED:
            self._named["cause"] = self._alarms.attribute().cause

    def row(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the row of the table.

        Args:
            result: Result of record_warnings.py for the run.
        """
        start = self._start
        before = [alarm for alarm in self._alarms.raised if alarm.step < start]
        after = [alarm for alarm in self._alarms.raised if alarm.step >= start]
        mechanisms = [alarm for alarm in after if not alarm.is_outcome]
        first, mechanism = next(iter(after), None), next(iter(mechanisms), None)
        kind, kinds = result.get("kind", ""), KINDS | BY_HAND
        ends = [result["visible"], result["n_steps"] - 1 if result["diverged"] else None]
        return {
            "name": result["name"],
            "set": result["set"],
            "setup": result.get("setup", "decoder at a high rate"),
            "family": family_of(result),
            "plan": result.get("plan", result.get("seed", -1)),
            "device": result.get("device", "cpu"),
            "kind": kind if "setup" in result else "late",
            "dose": float(result.get("dose", result.get("rate", math.nan))),
            "remedy": str(result.get("remedy", "")),
            "expected_cause": "logit_growth" if "setup" not in result else kinds[kind].cause if kind else "",
            "settings_show_it": bool(kind) and kinds[kind].is_visible,
            "start": math.nan if result["start"] is None else result["start"],
            "n_steps": result["n_steps"],
            "is_harmful": bool(result["is_harmful"]),
            "harm_step": float(min((end for end in ends if end is not None), default=math.nan)),
            "divergence": result["diverged"],
            "first_step": math.nan if first is None else first.step,
            "first_signal": "" if first is None else first.signal,
            "mechanism_step": math.nan if mechanism is None else mechanism.step,
            "mechanism_signal": "" if mechanism is None else mechanism.signal,
            "loss_step": self._alone.first("loss", start),
            "grad_norm_step": self._alone.first("grad_norm", start),
            "n_alarms": len(after),
            "n_alarms_before": len(before),
            "alarms_before": ", ".join(
                f"{a.signal} {a.step}" for a in (self._alarms.raised if is_healthy(result) else before)
            ),
            "n_loss_alarms": self._alone.n_before("loss", None if is_healthy(result) else start),
            "n_grad_norm_alarms": self._alone.n_before("grad_norm", None if is_healthy(result) else start),
            "seconds": result["seconds"],
            **self._named,
        }


class Alone:
    """Alarms of the loss alone and of the gradient norm alone, each with the total rate of false alarms.

    Args:
        alarms: Alarms of the run, whose evidence of both signals is used.
    """

    def __init__(self, alarms: wb.Alarms) -> None:
        self._alarms = alarms
        self._steps: dict[str, list[int]] = {"loss": [], "grad_norm": []}
        self._is_standing = dict.fromkeys(self._steps, False)
        calibration = Calibration.shipped()
        self._threshold = {name: calibration.threshold(name, 1.0, n_signals=1) for name in self._steps}

    def update(self) -> None:
        """Process the readings of the alarms after an update."""
        for name in self._steps:
            reading = self._alarms.reading(name)
            if reading is None:
                continue
            share = math.inf if reading.is_broken else reading.evidence / self._threshold[name]
            if reading.is_broken or (reading.is_evaluated and share >= 1):
                if not self._is_standing[name]:
                    self._steps[name].append(reading.step)
                self._is_standing[name] = True
            elif share < 0.5:
                self._is_standing[name] = False

    def first(self, name: str, start: int) -> float:
        """Return the first step of an alarm from ``start`` on; NaN if there is none."""
        return float(next((step for step in self._steps[name] if step >= start), math.nan))

    def n_before(self, name: str, start: int | None) -> int:
        """Return the number of alarms before a step, or of all alarms."""
        return sum(start is None or step < start for step in self._steps[name])
