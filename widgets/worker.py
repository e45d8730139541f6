"""A background thread for measurements, and the base class of widgets that measure in the background."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import ipywidgets
import torch

from workbench.formatting import duration
from workbench.option_kinds import NonNegativeFloat
from workbench.widgets.base import WorkbenchWidget


class Dropped(Exception):  # noqa: N818  (not an error)
    """Ends a job whose result is no longer needed."""


class MeasuringWidget(WorkbenchWidget):
    """Base class of widgets that measure in the background: `_begin` starts a job, `_take` receives its result.

    One job runs at a time, in a background thread; a new one cancels the waiting one and drops the running one.
    ``_doing`` shows the progress and a button that stops the job; subclasses put it on the page.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._job_number = 0
        self._future: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="MeasuringWidget")
        self._progress: MeasuringProgress | None = None
        self._stop = ipywidgets.Button(
            description="Stop", tooltip="Stop the measurement", layout={"width": "70px", "display": "none"}
        )
        self._status = ipywidgets.HTML(layout={"flex": "1 1 260px", "min_width": "0"})
        self._doing = ipywidgets.HBox(
            [self._stop, self._status], layout={"flex": "1 1 420px", "align_items": "center", "grid_gap": "2px 12px"}
        )
        self._on_click(self._stop, lambda _: self.stop())
        self._at_close(lambda: self._pool.shutdown(wait=False, cancel_futures=True))
        self._at_close(self._drop)

    @property
    def is_measuring(self) -> bool:
        """Whether a measurement is running, so that the displayed result is out of date."""
        return self._future is not None and not self._future.done()

    def stop(self) -> None:
        """Stop the measurement at its next check; the displayed result stays."""
        with self.turn:
            if not self.is_measuring:
                return
            self._drop()
            at = f" at {self._progress.current}" if self._progress is not None and self._progress.current else ""
            self._end(f"Stopped{at}; the partial result was discarded.")
            self._show_end()

    def wait(self, timeout: NonNegativeFloat | None = None) -> None:
        """Wait until the measurement has ended. The page does not respond meanwhile; in a notebook use `finished`.

        Args:
            timeout: Maximum seconds to wait; None for no limit.

        Raises:
            TimeoutError: If the measurement takes longer.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (future := self._future) is not None and not future.done():
            try:
                future.result(None if end is None else max(0.0, end - time.monotonic()))
            except CancelledError:  # by a newer job
                continue
            except TimeoutError:
                raise TimeoutError(f"The measurement did not end within {timeout:g} s.") from None

    async def finished(self) -> None:
        """Wait until the measurement has ended, while the page responds: ``await widget.finished()``."""
        while self.is_measuring:
            await asyncio.sleep(0.05)

    def _begin(
        self,
        title: str,
        job: Callable[[Callable[[], None], Callable[[str], None]], Any],
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Run a job in the background; a running job is dropped.

        Args:
            title: Title of the job.
            job: Receives two functions to call regularly: the first only checks whether the job has been dropped, the
                second also reports the progress (see `MeasuringProgress.tell`). Both end a dropped job by an exception.
            shares: Typical durations of the parts, as in `MeasuringProgress`.
        """
        with self.turn:
            self._drop()
            progress = self._progress = MeasuringProgress(title, lambda words: self._say(progress, words), shares)
            self._say(progress, progress.html())
            self._stop.layout.display = None
            number = self._job_number

            def check() -> None:
                if number != self._job_number:
                    raise Dropped

            def tell(words: str) -> None:
                check()
                progress.tell(words)

            self._future = self._pool.submit(self._work, number, lambda: job(check, tell))

    def _drop(self) -> None:
        """Drop the current job: it ends at its next check, and its result is ignored."""
        self._job_number += 1
        if self._future is not None:
            self._future.cancel()
            self._future = None

    def _work(self, number: int, job: Callable[[], Any]) -> None:
        if number != self._job_number:
            return
        found: Any = None
        failure: Exception | None = None
        n_threads = torch.get_num_threads()
        # This applies to this thread only. One core stays free for the page and the kernel, so that sliders respond.
        torch.set_num_threads(max(1, n_threads - 1))
        try:
            found = job()
        except Dropped:
            return
        except Exception as error:  # noqa: BLE001  (shown under the widget)
            failure = error
        finally:
            torch.set_num_threads(n_threads)  # new threads inherit this value
        with self.turn:
            if number != self._job_number:  # a dropped job must not change the line for errors
                return
            with self._attempt():
                self._end("")
                try:
                    if failure is not None:
                        raise failure
                    self._take(found)
                finally:
                    self._show_end()

    def _say(self, progress: MeasuringProgress, words: str) -> None:
        """Show the progress of a job unless it has been dropped."""
        with self.turn:
            if progress is self._progress:
                self._status.value = words

    def _end(self, sentence: str) -> None:
        """Show a sentence in place of the progress."""
        self._progress = None
        self._status.value = f'<div role="status" style="{_STYLE}">{html.escape(sentence)}</div>' if sentence else ""
        self._stop.layout.display = "none"

    def _take(self, found: Any) -> None:
        """Show the result of a job; called in the background thread while the lock is held."""
        raise NotImplementedError

    def _show_end(self) -> None:
        """Update the display after a job has succeeded, failed, or been stopped."""


#: Minimum seconds between two updates of the text within a part.
_EVERY = 0.2
_COUNT = re.compile(r"\b([\d,]+) of ([\d,]+)\b")
_STYLE = "line-height:1.5;white-space:normal;color:var(--jp-ui-font-color1,#222)"


class MeasuringProgress:
    """Progress of a job of parts, whose typical durations are ``shares``, told as HTML in the thread of `tell`."""

    def __init__(self, title: str, on_change: Callable[[str], None], shares: Mapping[str, float] | None = None) -> None:
        self.title = title
        self._on_change = on_change
        self._shares = shares or {}
        self._begun, self._said = time.monotonic(), 0.0
        self._parts: list[tuple[str, float]] = []
        self._step, self._fraction = "", 0.0

    def tell(self, words: str) -> None:
        """Report the current part as ``"part"`` or ``"part: step"``, such as "trial: 12 of 400 updates"."""
        part, _, self._step = words.partition(": ")
        is_new = not self._parts or part != self._parts[-1][0]
        if is_new:
            self._parts.append((part, time.monotonic()))
            self._fraction = 0.0
        if count := _COUNT.search(self._step):
            done, total = (int(number.replace(",", "")) for number in count.groups())
            self._fraction = min(1.0, done / max(1, total))
        if is_new or time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
            self._on_change(self.html())

    @property
    def done(self) -> list[tuple[str, float]]:
        """The completed parts, each with its duration in seconds."""
        starts = [start for _, start in self._parts]
        return [(part, end - start) for (part, start), end in zip(self._parts, starts[1:], strict=False)]

    @property
    def current(self) -> str:
        """The current part with its step; empty before the first."""
        return ": ".join(filter(None, [self._parts[-1][0], self._step])) if self._parts else ""

    @property
    def fraction(self) -> float | None:
        """Completed fraction of the job; None if unknown."""
        part, names = self._parts[-1][0] if self._parts else "", list(self._shares)
        if part not in names:
            return None
        before = sum(self._shares[name] for name in names[: names.index(part)])
        return (before + self._fraction * self._shares[part]) / sum(self._shares.values())

    def html(self) -> str:
        """Return a progress bar, the current part, elapsed and remaining time, and the completed parts."""
        fraction, elapsed = self.fraction, time.monotonic() - self._begun
        times = duration(elapsed)
        if fraction:
            times += f", about {duration(max(1.0, elapsed * (1 - fraction) / fraction))} left"
        current = f": {html.escape(self.current)}" if self.current else ""
        value = "" if fraction is None else f' value="{fraction:.3f}"'
        look = "vertical-align:middle;width:140px;accent-color:var(--jp-brand-color1,#1976d2)"
        done = " · ".join(f"✓ {html.escape(part)} ({duration(seconds)})" for part, seconds in self.done)
        return (
            f'<div style="{_STYLE}"><progress aria-label="{html.escape(self.title)}"{value} style="{look}"></progress> '
            f"<b>{html.escape(self.title)}</b>{current} … · {times}{f'<div>{done}</div>' if done else ''}</div>"
        )
