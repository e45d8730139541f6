"""Status of a run in training, as one line of text and as a small page, and its display."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.formatting import number_in_words

if TYPE_CHECKING:
    from workbench.callbacks.alarms import Alarm, Attribution
    from workbench.callbacks.observation import Observation


#: Maximum number of losses in the curve; when it is exceeded, every second one is dropped.
_N_POINTS = 400
#: Number of signals whose evidence is shown.
_N_SIGNALS = 5
_WIDTH, _HEIGHT = 320, 54
_QUIET, _ALARMED, _ENDED = "#2e7d32", "#c62828", "#757575"


class RunStatus:
    """Status of a run: its metrics, its first alarm with the cause, and the signals with the most evidence.

    Args:
        path: Path of the run's store; None if it has none.

    Attributes:
        path: Path of the run's store; None if it has none.
        step: Number of the latest update; -1 before the first.
        loss: Loss of the latest update; NaN if unknown.
        rate: Learning rate of the latest update; NaN if unknown.
        first_alarm: The first alarm; None if there is none.
        n_alarms: Number of alarms.
        cause: The latest attribution; None if there is none.
        scores: Evidence of each signal as a multiple of its threshold, in decreasing order; 1 is an alarm.
        checked: Step of the latest measurement of each probe, by part.
        is_over: Whether the run has ended.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.step, self.loss, self.rate = -1, math.nan, math.nan
        self.first_alarm: Alarm | None = None
        self.n_alarms = 0
        self.cause: Attribution | None = None
        self.scores: dict[str, float] = {}
        self.checked: dict[str, int] = {}
        self.is_over = False
        self._losses: list[tuple[int, float]] = []
        self._spacing = 1
        self._times: deque[float] = deque(maxlen=50)

    def update(
        self,
        observation: Observation,
        new_alarms: Sequence[Alarm],
        cause: Attribution | None,
        scores: Callable[[], dict[str, float]],
    ) -> None:
        """Update the status with an observation and the alarms that it raised."""
        if new_alarms:
            self.first_alarm = self.first_alarm or new_alarms[0]
            self.n_alarms += len(new_alarms)
            self.cause = cause
        if observation.part in ("precision", "reduction"):
            self.checked[observation.part] = observation.step
        if observation.part != "monitors":
            return
        self.step = observation.step
        self.loss, self.rate = (float(observation.values.get(name, math.nan)) for name in ("loss", "learning_rate"))
        self._times.append(time.monotonic())
        if self.step % self._spacing == 0 and math.isfinite(self.loss):
            self._losses.append((self.step, self.loss))
            if len(self._losses) > _N_POINTS:
                self._losses, self._spacing = self._losses[::2], 2 * self._spacing
        if new_alarms or self.step % 10 == 0:
            known = {name: score for name, score in scores().items() if not math.isnan(score)}
            self.scores = dict(sorted(known.items(), key=lambda each: -each[1]))

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of the latest steps; NaN before the second."""
        n = len(self._times) - 1
        return (self._times[-1] - self._times[0]) / n if n > 0 else math.nan

    def as_text(self) -> str:
        """Return the status as one line: step, loss, learning rate, time per step, and the alarms."""
        if self.step < 0:
            return "waiting for the first update"
        pace = self.seconds_per_step
        parts = [f"step {self.step:,}", f"loss {self.loss:.4g}", f"learning rate {self.rate:.3g}"]
        parts += [f"{1000 * pace:.0f} ms/step"] if math.isfinite(pace) else []
        return " · ".join([*parts, self.verdict])

    @property
    def verdict(self) -> str:
        """Summary of the alarms in a few words."""
        first = self.first_alarm
        if first is None:
            return "no alarm"
        more = f", and {self.n_alarms - 1} more" if self.n_alarms > 1 else ""
        return f"ALARM at step {first.step:,} ({first.signal}{more})"

    def as_html(self) -> str:
        """Return a small HTML page without scripts: alarms and cause, the loss, and the signals with most evidence."""
        color = _ALARMED if self.first_alarm else _ENDED if self.is_over or self.step < 0 else _QUIET
        dot = f'<span style="color:{color};font-size:1.4em;vertical-align:-1px">●</span>'
        lines = [f"<div>{dot} <b>{escape(self.as_text())}</b></div>"]
        if self.first_alarm is not None:
            lines.append(f'<div style="margin-top:2px">First alarm: {escape(self.first_alarm.message)}</div>')
            lines.append(f"<div>{escape(self._cause_text())}</div>")
        style = "display:flex;gap:24px;align-items:flex-start;margin-top:6px"
        figures = f'<div style="{style}">{self._curve()}{self._bars()}</div>'
        where = f"recorded in {escape(str(self.path))}" if self.path is not None else "not recorded"
        checked = "".join(f" · {name} checked at step {step:,}" for name, step in self.checked.items())
        lines += [figures, f'<div style="opacity:.65;font-size:.85em">{where}{checked}</div>']
        style = "font-family:sans-serif;font-size:13px;line-height:1.45;max-width:760px"
        return f'<div style="{style}">{"".join(lines)}</div>'

    def _cause_text(self) -> str:
        cause, first = self.cause, self.first_alarm
        if cause is None or first is None:
            return "Cause: unknown."
        name = f"Likely cause: {cause.summary}"
        other = [each for each in cause.evidence if each.rstrip(".") != first.message.rstrip(".")]
        return f"{name}: {'; '.join(other)}." if other else f"{name}."

    def _curve(self) -> str:
        """Return the curve of the loss as SVG; empty with fewer than two losses."""
        if len(self._losses) < 2:
            return ""
        steps, losses = zip(*self._losses, strict=True)
        low, high = min(losses), max(losses)
        wide, tall = _WIDTH / max(1, steps[-1] - steps[0]), (_HEIGHT - 4) / max(high - low, 1e-12)
        points = " ".join(
            f"{wide * (step - steps[0]):.1f},{2 + tall * (high - loss):.1f}" for step, loss in self._losses
        )
        mark = ""
        if self.first_alarm is not None:
            x = wide * (min(max(self.first_alarm.step, steps[0]), steps[-1]) - steps[0])
            mark = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}" stroke="{_ALARMED}" stroke-width="1.5"/>'
        title = f"<title>Loss of steps {steps[0]:,} to {steps[-1]:,}: {low:.4g} to {high:.4g}</title>"
        span = f"loss, {number_in_words(low)} to {number_in_words(high)}"
        return (
            f'<div><div style="opacity:.65;font-size:.85em">{span}</div>'
            f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="loss">{title}{mark}'
            f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.2"/></svg></div>'
        )

    def _bars(self) -> str:
        """Return the signals with the most evidence as a table of bars, which are full at the threshold of an alarm."""
        rows = []
        for name, score in list(self.scores.items())[:_N_SIGNALS]:
            length = min(max(score, 0.0), 1.0)
            color = _ALARMED if score >= 1 else "#1565c0"
            bar = f"width:{120 * length:.0f}px;height:9px;background:{color}"
            rows.append(
                f'<tr><td style="text-align:left;padding:0 8px 0 0;border:0">{escape(name)}</td>'
                '<td style="padding:0;border:0"><div style="width:120px;background:rgba(128,128,128,.25)">'
                f'<div style="{bar}"></div></div></td></tr>'
            )
        if not rows:
            return ""
        return (
            '<div><div style="opacity:.65;font-size:.85em">evidence of a change; a full bar is an alarm</div>'
            f'<table style="border-collapse:collapse;font-size:.85em;margin:0">{"".join(rows)}</table></div>'
        )


#: Minimum number of seconds between two updates of the display.
_PAUSE = 0.5


class StatusDisplay:
    """Display of a status, updated at most twice per second, and immediately at an alarm."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status
        self._shown_at = -float("inf")
        self._handle: Any = None
        self._is_off = False
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        if _in_notebook():
            from IPython.display import HTML, display

            self._handle = display(HTML(status.as_html()), display_id=True)

    def update(self, new_alarms: Sequence[Alarm]) -> None:
        """Update the display."""
        now = time.monotonic()
        if not self._is_off and (new_alarms or now - self._shown_at >= _PAUSE):
            self._shown_at = now
            self._try_to(lambda: self._show(new_alarms))

    def close(self) -> None:
        """Show the final status."""
        if not self._is_off:
            self._try_to(lambda: self._show((), end="\n"))

    def _try_to(self, show: Callable[[], None]) -> None:
        """Call a function; if it fails, as in a closed terminal, the display is switched off and training continues."""
        try:
            show()
        except Exception:  # noqa: BLE001  (the display must never stop a training)
            self._is_off = True

    def _show(self, new_alarms: Sequence[Alarm], *, end: str = "") -> None:
        if self._handle is None:
            for alarm in new_alarms:
                self._clear()
                print(f"step {alarm.step:,}: {alarm.message}", file=sys.stderr, flush=True)
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self._status.as_html()))
        elif self._is_terminal:
            self._clear()
            print(self._status.as_text(), end=end, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr)


def _in_notebook() -> bool:
    """Return whether the code runs in a Jupyter kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
