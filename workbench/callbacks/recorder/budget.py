"""The share of the training time that observation may take, and the cadence of each part that follows from it."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workbench.io import run_output
from workbench.monitors.probe_pass import PARTS as PROBED

#: What is examined of every update if the budget allows: alarms on its metrics; the contents of its batch with the
#: norms of gradient and update; the settings; and sketches of its backward passes.
OF_UPDATE = ("alarms", "batch", "settings", "sketch")
#: Weight of these in the sum that the intervals minimize; other parts have 1. Most faults show first in them.
_WEIGHT = 10.0
#: Weight of the row of an update, which therefore is spread last, and the most updates between two rows.
_WEIGHT_OF_ROW, LONGEST_ROW = 100.0, 10
#: Latest costs of a part and durations of steps whose medians count.
_N_COSTS, _N_STEPS = 5, 51
#: Steps before the first plan and between two plans.
_EVERY = 10
#: Fraction of the budget for writing blocks of the store, and the least one for the parts if rows cannot be spread
#: further.
OF_STORE, _LEAST = 0.2, 0.5
#: Parts of which one block is measured at a time once the whole is too expensive for its cadence, or if the model has
#: more parameters than this, so that the first measurement is not longer than some steps.
_IN_TURN, _LARGE = ("precision",), 1 << 27
#: Cost of a later measurement as a fraction of that of the first one, as long as only that is known.
_OF_FIRST = 0.3
#: An interval is kept while the one that the budget allows is within these multiples of it.
_SHORTER, _LONGER = 0.45, 1.2


@dataclass(frozen=True)
class PartCost:
    """What one part of the observation of a run has cost.

    Attributes:
        seconds: Time of one measurement on this machine, the median of the latest ones.
        every: Updates between two measurements; None if the part is not measured.
        total: Time of all measurements so far, in seconds.
    """

    seconds: float
    every: int | None
    total: float


@dataclass(frozen=True)
class Cost:
    """What the observation of a run has cost so far; printed as a table.

    Attributes:
        budget: Share of the training time that it may take; None if there is no limit.
        share: Time of observation over that of the training since the first plan of the cadences; NaN before it.
        step_seconds: Median duration of a step without observation.
        parts: Cost of each part; ``row`` is the row of an update, ``store`` a block that is written.

    See Also:
        `workbench.watch`: Watches a run within a budget.
    """

    budget: float | None
    share: float
    step_seconds: float
    parts: Mapping[str, PartCost]

    def __str__(self) -> str:
        limit = "no limit" if self.budget is None else f"aim {self.budget:.1%}"
        share = "an unknown share" if math.isnan(self.share) else f"{self.share:.1%}"
        lines = [
            f"Observation takes {share} of the training time ({limit}; a step takes {1e3 * self.step_seconds:.3g} ms)."
        ]
        lines.append(f"{'part':<12} {'one [ms]':>9} {'every':>7} {'of a step':>10} {'total [s]':>10}")
        for name, part in sorted(self.parts.items(), key=lambda each: -each[1].total):
            cells = [f"{1e3 * part.seconds:.3g}", str(part.every or ""), ""]
            if part.every and self.step_seconds > 0:
                cells[2] = f"{part.seconds / part.every / self.step_seconds:.2%}"
            one, every, of_step = ("" if cell in ("nan", "nan%") else cell for cell in cells)
            lines.append(f"{name:<12} {one:>9} {every:>7} {of_step:>10} {part.total:>10.3g}")
        return "\n".join(lines)


class Budget:
    """Decides at which updates each part is measured, from what it costs on this machine.

    A part that is not fixed is measured at the cadence of `options.CADENCE` while that is within the budget. Otherwise
    the intervals grow as the square root of cost times cadence, which minimizes the weighted sum over the parts of
    interval over cadence for a given total cost. Costs are those of the host, or of the device where these are larger;
    the median of the latest measurements counts.

    Args:
        every: Updates between two measurements by part, None if it is off: fixed, or the smallest interval.
        fixed: Parts whose cadence the caller has fixed.
        share: Share of the training time, 0.02 for 2 %; None fixes all parts.
        device: Device of the model.
        costs: Seconds by part that an earlier part of the run has measured.
        n_parameters: Number of parameters of the model.
    """

    def __init__(
        self,
        every: Mapping[str, int | None],
        *,
        fixed: Collection[str],
        share: float | None,
        device: torch.device,
        costs: Mapping[str, float],
        n_parameters: int = 0,
    ) -> None:
        self.share, self._device = share, device
        self._every = every  # which the user may change during the run
        self._fixed = {*self._base} if share is None else {*fixed}
        #: Whether updates of which nothing is examined may have no row.
        self.spreads_rows = True
        self.interval = {"row": 1, **self._base}
        #: Intervals longer than the cadence of their part.
        self.slowed: dict[str, int] = {}
        #: Parts that are measured block by block.
        self.in_turn: set[str] = {*_IN_TURN} - self._fixed if n_parameters > _LARGE else set()
        self._next, self._latest = dict[str, int](), dict[str, int]()
        self._passes: list[str] = []  # parts that are measured in one pass, of which the first one has its cost
        self._costs = {part: deque([cost], _N_COSTS) for part, cost in costs.items()}
        self._first: set[str] = set()  # parts whose cost is that of their first measurement
        self._total: dict[str, float] = {}
        self._now: dict[str, float] = {}
        self._steps: deque[float] = deque(maxlen=_N_STEPS)
        self._inside: list[float] = []
        self._events: list[tuple[str, Any, Any, float]] = []
        self._observed = self._spent = self._passed = 0.0
        self._began: float | None = None
        self._batch: tuple[float, float] | None = None  # time at its beginning, and costs until then
        self._n_steps = self._planned = 0
        self._typical = math.nan  # duration of a step in the latest plan
        self._has_plan = False
        self._lock = threading.Lock()

    @property
    def _base(self) -> dict[str, int]:
        """Cadence of each part that is on."""
        return dict.fromkeys(OF_UPDATE, 1) | {part: n for part, n in self._every.items() if n is not None}

    def due(self, step: int, made: int, is_on: Callable[[str], bool]) -> set[str]:
        """Return the parts that are measured after the update of a step.

        Args:
            step: Step of the update.
            made: Number of updates made before it, by which the reduction of gradients counts.
            is_on: Function from a part to whether it can be measured.
        """
        found: set[str] = set()
        cadence = self._base
        passes = self._passes = [p for p in PROBED if p in cadence and p not in self._fixed and is_on(p)]
        for part, base in cadence.items():
            at = (made if part == "reduction" else step) + 1
            if part in self._fixed:
                is_due = at % base == 0
            elif part in passes[1:]:  # these share the pass of the first one
                is_due = passes[0] in found and at >= self._next.setdefault(part, base)
            else:
                is_due = at >= self._next.setdefault(part, -(-at // base) * base)
            is_due |= at == self._latest.get(part)
            if is_due:
                found.add(part)
                self._latest[part] = at
                self._next[part] = at - at % base + (base if part in passes[1:] else self.interval.get(part, base))
        return found

    def row_is_due(self, step: int, due: Collection[str]) -> bool:
        """Return whether the update of a step has a row, given the parts that are due after it."""
        is_due = bool(due) or self.opens_window("attention", step) or step + 1 >= self._next.get("row", 0)
        if is_due:
            self._next["row"] = step + 1 + self.interval["row"]
        return is_due

    def opens_window(self, part: str, step: int) -> bool:
        """Return whether a part that compares weights over its cadence needs those after the update of a step."""
        if (base := self._every.get(part)) is None:
            return False
        return (step + 1) % base == 0 if part in self._fixed else step + 1 == self._next.get(part, base) - base

    def timed(self, part: str) -> _Timer:
        """Return a context whose time is a cost of a part, less that of the contexts within it."""
        return _Timer(self, part)

    def add(self, part: str, seconds: float) -> None:
        """Add a cost of a part."""
        with self._lock:
            self._now[part] = self._now.get(part, 0.0) + seconds
            self._total[part] = self._total.get(part, 0.0) + seconds
            self._observed += seconds

    def begin_batch(self) -> None:
        """Note that a batch begins, the first one of an update."""
        if self._batch is None:
            self._batch = run_output.stopwatch(), self._observed

    def end_step(self, due: Collection[str], forced: Collection[str] = ()) -> None:
        """End a step in which some parts were measured; those that were forced do not show the cost of a part."""
        now = run_output.stopwatch()
        self._read_events()
        with self._lock:
            costs, self._now = self._now, {}
            observed, self._observed = self._observed, 0.0
        due = {"row", *(set(due) - set(forced))}
        passes = [part for part in PROBED if part in due]
        for part in passes[1:]:
            costs[passes[0]] = costs.get(passes[0], 0.0) + costs.pop(part, 0.0)
        if "probe" in costs and passes:
            costs[passes[0]] = costs.get(passes[0], 0.0) + costs.pop("probe")
        for part, seconds in costs.items():
            if part in due:
                self._note(part, seconds)
            elif part in self._base and part not in forced:
                self._now[part] = self._now.get(part, 0.0) + seconds  # belongs to its next measurement
        # On the host, what happens between two updates, such as the step of another model, is no time of this training;
        # an accelerator computes it then.
        batch, self._batch = self._batch, None
        began, before = (self._began, 0.0) if batch is None or self._device.type != "cpu" else batch
        if began is not None:
            self._steps.append(max(now - began - (observed - before), 0.0))
            if self._has_plan:
                self._spent, self._passed = self._spent + observed, self._passed + self._steps[-1]
        self._began = now
        self._n_steps += 1

    def skip_step(self) -> None:
        """End a step without a row; what was observed in it, such as the row before, is a cost of the next one."""
        with self._lock:
            observed, self._observed = self._observed, 0.0
        self._spent, self._passed = self._spent + observed, self._passed + self._typical
        self._began, self._batch = run_output.stopwatch(), None
        self._n_steps += 1

    @property
    def is_plan_due(self) -> bool:
        """Whether the intervals are to be chosen again, which is so at the same steps on all ranks."""
        return self.share is not None and self._n_steps >= self._planned + _EVERY

    def known(self) -> dict[str, float]:
        """Return the known costs, in seconds, and the duration of a step as ``step``."""
        found = {part: statistics.median(values) for part, values in self._costs.items()}
        found |= {part: _OF_FIRST * found[part] for part in self._first}
        return found | ({"step": statistics.median(self._steps)} if self._steps else {})

    def plan(self, known: Mapping[str, float]) -> None:
        """Choose the intervals for known costs."""
        self._planned = self._n_steps
        if self.share is None or math.isnan(known.get("step", math.nan)):
            return
        allowed, base = (1 - OF_STORE) * self.share * known["step"], self._base
        of_fixed = sum(known.get(part, 0.0) / base[part] for part in self._fixed & base.keys())
        rest, row = allowed - of_fixed, known.get("row", 0.0)
        parts = {p: (known[p], b) for p, b in base.items() if p in known and p not in self._fixed}
        of_row = intervals(parts | {"row": (row, 1)}, max(rest, 1e-9))["row"] if self.spreads_rows else 1.0
        self._follow("row", of_row := min(of_row, LONGEST_ROW), 1)
        self.interval["row"] = min(self.interval["row"], LONGEST_ROW)
        rest -= row / of_row
        if not self.spreads_rows or of_row == LONGEST_ROW:
            rest = max(rest, _LEAST * allowed)
        ideal = intervals(parts, rest)
        for part, n in ideal.items():
            self._follow(part, n, base[part])
        for part in self._passes[1:]:
            self.interval[part] = max(base[part], self.interval[self._passes[0]])
        for part in _IN_TURN:
            if part in ideal and self.interval[part] > base[part] and part not in self.in_turn:
                self.in_turn.add(part)
                self._costs.pop(part, None)  # another rank may have measured it alone
                self._first.discard(part)
        self._has_plan, self._typical = True, known["step"]
        named = [*ideal, *self._passes[1:]]
        self.slowed = {part: self.interval[part] for part in named if self.interval[part] > base[part]}
        if self.interval["row"] > 1:
            self.slowed["rows"] = self.interval["row"]

    def _follow(self, part: str, ideal: float, base: int) -> None:
        """Set the interval of a part to the ideal one, unless it is close to that already."""
        now = self.interval.setdefault(part, base)  # the user may have switched it on since
        if not _SHORTER <= ideal / now <= _LONGER or ideal == base:
            self.interval[part] = rounded(ideal, base)

    def cost(self) -> Cost:
        """Return what observation has cost so far."""
        known, share = self.known(), self.spent_share()
        every, totals = self.interval, self._total.items()
        parts = {part: PartCost(known.get(part, math.nan), every.get(part), total) for part, total in totals}
        return Cost(self.share, share, known.get("step", math.nan), parts)

    def spent_share(self) -> float:
        """Return the time of observation over that of the training since the first plan; NaN before it."""
        return self._spent / self._passed if self._passed > 0 else math.nan

    def _note(self, part: str, seconds: float) -> None:
        values = self._costs.get(part)
        if values is None:
            self._costs[part] = deque([seconds], _N_COSTS)
            self._first.add(part)
            return
        if part in self._first:  # a first measurement costs more, for imports and caches
            self._first.discard(part)
            values.clear()
        values.append(seconds)

    def _read_events(self) -> None:
        """Replace the costs of the host by those of the device where these are larger and already known."""
        waiting = []
        for part, start, end, on_host in self._events:
            if end.query():
                self.add(part, max(start.elapsed_time(end) / 1e3, on_host) - on_host)
            else:
                waiting.append((part, start, end, on_host))
        self._events = waiting


class _Timer:
    """Context of `Budget.timed`."""

    def __init__(self, budget: Budget, part: str) -> None:
        self._budget, self._part = budget, part
        self._event: Any = None

    def __enter__(self) -> None:
        budget = self._budget
        if budget._device.type == "cuda" and self._part != "row":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        budget._inside.append(0.0)
        self._start = run_output.stopwatch()

    def __exit__(self, *exception: object) -> None:
        budget, took = self._budget, run_output.stopwatch() - self._start
        own = took - budget._inside.pop()
        if budget._inside:
            budget._inside[-1] += took
        budget.add(self._part, own)
        if self._event is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            budget._events.append((self._part, self._event, end, took))


def intervals(parts: Mapping[str, tuple[float, int]], allowed: float) -> dict[str, float]:
    """Return the interval of each part, at least its cadence, so that all of them cost at most a given time per step.

    Args:
        parts: Cost of one measurement, in seconds, and cadence, in steps, by part.
        allowed: Seconds per step, above 0.

    Returns:
        Intervals in steps. Of those longer than the cadence b of a part that costs c and has the weight w, all are the
        same multiple of sqrt(b c / w).
    """
    found = {part: float(base) for part, (_, base) in parts.items()}
    weights = {part: _WEIGHT_OF_ROW if part == "row" else _WEIGHT if part in OF_UPDATE else 1.0 for part in parts}
    free = {part: math.sqrt(weights[part] * cost / base) for part, (cost, base) in parts.items() if cost > 0}
    while free and allowed > 0:
        factor = sum(free.values()) / allowed
        ideal = {part: parts[part][1] * factor * root / weights[part] for part, root in free.items()}
        cheap = [part for part, interval in ideal.items() if interval <= parts[part][1]]
        if not cheap:
            return found | ideal
        for part in cheap:
            del free[part]
            allowed -= parts[part][0] / parts[part][1]
    return found


def rounded(interval: float, base: int) -> int:
    """Round an interval up to a multiple of its cadence: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... times."""
    n, steps = math.ceil(interval / base - 1e-9), (2, 3)
    ladder = 1
    while ladder < n:
        ladder = steps[0] if ladder == 1 else ladder * 3 // 2 if ladder % 3 else ladder * 4 // 3
    return ladder * base
