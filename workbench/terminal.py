"""One terminal screen on a run: its state, the curve of the loss, the first alarm, its cause, and what to do next."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import WorkbenchError
from workbench.formatting import capitalized, duration, percent
from workbench.io.far_places import FarPlace, UnreachableError, place_of
from workbench.io.run_index import last_change, metrics_of, status_of
from workbench.schema.statuses import RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Seconds between two looks at a run, and without news after which their age is shown.
_EVERY, _SILENT = 2.0, 20.0
_HEIGHT = 10
#: Bits of the dots of a braille character, by column from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def facts_of(run: str) -> dict[str, Any]:
    """Return the status of a run with what to do next, as values of JSON."""
    found = status_of(run)
    return found | {"next": _next(found)}


class RunView:
    """What is known of a run that is followed; it stays when the link is cut or the run is removed."""

    def __init__(self, run: str) -> None:
        self.run, self.facts = run, facts_of(run)
        self.steps, self.losses = metrics_of(run, "loss")
        self.link, self.seconds_per_step = "", math.nan
        self.news_at = time.monotonic()
        self._change, self._place = last_change(run), place_of(run)

    def look(self) -> None:
        """Read what is new."""
        try:
            if (change := last_change(self.run)) is None:
                self.link = "the run was removed; this is the last that was read"
            elif change != self._change:
                before, since = self.facts, time.monotonic() - self.news_at
                self.facts = facts_of(self.run)
                self.steps, self.losses = metrics_of(self.run, "loss")
                self._change, self.news_at = change, time.monotonic()
                if (done := (self.facts["step"] or 0) - (before["step"] or 0)) > 0:
                    self.seconds_per_step = since / done
            self.link = "" if change is not None else self.link
        except UnreachableError as error:
            self.link = f"not reached: {str(error).partition('(')[2].rpartition(')')[0]}"
        except WorkbenchError as error:  # between two files of a copy
            self.link = str(error)

    def screen(self, width: int) -> RenderableType:
        """Return the screen; text of the run is never read as markup."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        found = self.facts
        alarm, cause, is_bad = found["first_alarm"], found["cause"], found["state"] == RunState.DIVERGED
        head = [found["state"] or "state unknown"]
        head += [] if found["step"] is None else [f"step {found['step']:,}"]
        head += [] if math.isnan(self.seconds_per_step) else [f"{self.seconds_per_step:.3g} s/step"]
        for name, title in (("loss", "loss"), ("learning_rate", "learning rate")):
            head += [] if found[name] is None else [f"{title} {found[name]:.4g}"]
        is_open = found["state"] in (RunState.RUNNING, "")
        silent = time.monotonic() - self.news_at
        news = f"no news for {duration(silent)}" if silent > _SILENT and is_open else ""
        if is_open and isinstance(self._place, FarPlace) and found["last_written"]:
            news = "; ".join(filter(None, [news, f"last written {found['last_written']} by the clock there"]))
        where = f" ({alarm['source']})" if alarm else ""
        lines = [
            Text(" · ".join(head), style="bold red" if alarm or is_bad else "bold green"),
            Text(_curve(self.steps, self.losses, max(20, width - 6), alarm["step"] if alarm else None)),
            Text(f"First alarm: step {alarm['step']:,}{where}: {alarm['message']}" if alarm else "No alarm recorded."),
        ]
        if alarm:
            said = cause["message"].removesuffix(f": {alarm['message']}") if cause else "Cause: unknown"  # not twice
            lines.append(Text(f"{said.rstrip('.')}."))
        if found["contracts_failed"]:
            lines.append(Text(f"Broken contracts: {', '.join(found['contracts_failed'])}", style="red"))
        lines.append(Text(f"Next: {found['next']}"))
        cost = "" if found["cost"] is None else f"watching takes {percent(found['cost'])} of the training time"
        lines += [Text(capitalized(each), style="dim") for each in (cost, news, self.link) if each]
        return Panel(Group(*lines), title=Text(found["path"] or self.run), subtitle="q ends", expand=True)


def follow(run: str, *, once: bool = False) -> dict[str, Any]:
    """Show a run until q or Ctrl-C; once if that is asked for, or the output is no terminal. Return its facts."""
    from rich.console import Console
    from rich.live import Live

    console, view = Console(), RunView(run)
    if once or not console.is_terminal:
        console.print(view.screen(console.width))
        return view.facts
    is_over = threading.Event()

    def keep_looking() -> None:
        while not is_over.wait(_EVERY):
            view.look()

    threading.Thread(target=keep_looking, daemon=True).start()  # a broken link must not stop the screen
    with contextlib.suppress(KeyboardInterrupt), _keys() as pressed, Live(console=console, screen=True) as live:
        while not pressed("q", 0.5):
            live.update(view.screen(console.width), refresh=True)
    is_over.set()
    return view.facts


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits for a key, where the terminal can send single ones."""
    try:
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError, termios.error):
        yield lambda key, seconds: threading.Event().wait(seconds)
        return

    def pressed(key: str, seconds: float) -> bool:
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        try:
            return bool(readable) and os.read(sys.stdin.fileno(), 1) in (key.encode(), b"")
        except OSError:  # the terminal is gone
            return True

    try:
        tty.setcbreak(sys.stdin.fileno())
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _next(found: dict[str, Any]) -> str:
    """Return what to do next, in words."""
    run = found["path"] or "RUN"
    if found["contracts_failed"]:
        return f"workbench diagnose {run} names place and remedy of each broken contract."
    if found["first_alarm"] or found["state"] == RunState.DIVERGED:
        return f"workbench diagnose {run} looks for the causes."
    if found["state"] in (RunState.INTERRUPTED, RunState.UNCLOSED):
        return "look for the error in the log of the training; wb.watch(resume=True) continues the record."
    return "nothing; an alarm would be shown here."


def _curve(steps: np.ndarray, values: np.ndarray, width: int, mark: int | None) -> str:
    """Return a curve in braille, two by four dots a character, with its range; and the step of the first alarm."""
    is_drawn = np.isfinite(values)
    if is_drawn.sum() < 2:
        return "The loss is not recorded yet."
    steps, values = steps[is_drawn].astype(float), values[is_drawn]
    low, high = float(values.min()), float(values.max())
    if len(steps) < 2 * width:
        of_columns = np.linspace(steps[0], steps[-1], 2 * width)
        steps, values = of_columns, np.interp(of_columns, steps, values)
    x = ((steps - steps[0]) / max(steps[-1] - steps[0], 1) * (2 * width - 1)).astype(int)
    y = ((high - values) / max(high - low, 1e-300) * (4 * _HEIGHT - 1)).astype(int)
    cells = np.zeros((_HEIGHT, width), int)
    for column in np.unique(x):
        of_column = y[x == column]
        for row in range(of_column.min(), of_column.max() + 1):
            cells[row // 4, column // 2] |= _DOTS[column % 2][row % 4]
    lines = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    if mark is not None and steps[0] <= mark <= steps[-1]:
        at = int((mark - steps[0]) / max(steps[-1] - steps[0], 1) * (width - 1))
        lines.append(" " * at + "▲")
    return "\n".join([f"loss, {low:.4g} to {high:.4g}", *lines, f"steps {steps[0]:,.0f} to {steps[-1]:,.0f}"])
