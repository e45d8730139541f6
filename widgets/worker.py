"""A background thread for work that would block a slider, and the base class of widgets that have one."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ipywidgets
import torch

from workbench.widgets.base import WorkbenchWidget
from workbench.widgets.measuring import MeasuringProgress, said

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Dropped(Exception):  # noqa: N818  (no error: the result is not needed any more)
    """Ends a job that was dropped."""


class BackgroundWorker:
    """Does jobs one after the other; of those that wait only the newest, and an older one's result is dropped.

    Args:
        on_done: Called with result and error, one of them None, in the worker's thread; not for jobs that `is_latest`
            says are out of date.
    """

    def __init__(self, on_done: Callable[[int, Any, Exception | None], None]) -> None:
        self._on_done = on_done
        self._number = 0
        self._future: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="MeasuringWidget")

    @property
    def is_busy(self) -> bool:
        """Whether a job runs or waits."""
        return self._future is not None and not self._future.done()

    def is_latest(self, number: int) -> bool:
        """Whether no newer job was given since the one of this number, and the worker is not closed."""
        return number == self._number

    def drop(self) -> None:
        """Forget the present job: it ends where it next checks, and what it finds is not wanted."""
        self._number += 1
        if self._future is not None:
            self._future.cancel()
            self._future = None

    def submit(self, job: Callable[[Callable[[], None]], Any]) -> None:
        """Do a job as soon as the present one is over.

        Args:
            job: Gets a function to call now and then, which ends the job by an exception once it was dropped.
        """
        self.drop()
        self._future = self._pool.submit(self._work, self._number, job)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no job runs or waits.

        Raises:
            TimeoutError: If it takes longer than so many seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (future := self._future) is not None and not future.done():
            try:
                future.result(None if end is None else max(0.0, end - time.monotonic()))
            except CancelledError:  # a newer one is there
                continue
            except TimeoutError:
                raise TimeoutError(f"The measurement was not over after {timeout:g} s.") from None

    def close(self) -> None:
        """Take no more jobs and drop what the present one finds; does not wait for it."""
        self.drop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, number: int, job: Callable[[Callable[[], None]], Any]) -> None:
        def check() -> None:
            if not self.is_latest(number):
                raise Dropped

        if not self.is_latest(number):
            return
        n_threads = torch.get_num_threads()
        # For this thread alone: one core is left to the page and the kernel, which the sliders need.
        torch.set_num_threads(max(1, n_threads - 1))
        try:
            found, error = job(check), None
        except Dropped:
            return
        except Exception as failure:  # noqa: BLE001  (shown under the widget)
            found, error = None, failure
        finally:
            torch.set_num_threads(n_threads)  # which new threads begin with
        self._on_done(number, found, error)


class MeasuringWidget(WorkbenchWidget):
    """A widget that measures in the background: `_begin` starts a job, whose result goes to `_take`.

    While it goes on, ``_doing`` shows how far it is, with a button that stops it; put it on the page.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._worker = BackgroundWorker(self._hear)
        self._progress: MeasuringProgress | None = None
        self._stop = ipywidgets.Button(
            description="Stop", tooltip="End what goes on", layout={"width": "70px", "display": "none"}
        )
        self._status = ipywidgets.HTML(layout={"flex": "1 1 260px", "min_width": "0"})
        self._doing = ipywidgets.HBox(
            [self._stop, self._status], layout={"flex": "1 1 420px", "align_items": "center", "grid_gap": "2px 12px"}
        )
        self.on_click(self._stop, lambda _: self.stop())
        self.at_close(self._worker.close)

    @property
    def is_measuring(self) -> bool:
        """Whether something is being measured, so that what is shown is older."""
        return self._worker.is_busy

    def stop(self) -> None:
        """End what goes on, where it next looks whether it is still wanted; what is shown stays."""
        with self.turn:
            if not self.is_measuring:
                return
            self._worker.drop()
            at = f" at {self._progress.current}" if self._progress is not None and self._progress.current else ""
            self._end(f"Stopped{at}; nothing of it is kept.")
            self._show_end()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is being measured. The page stands still meanwhile; in a notebook use `finished`.

        Args:
            timeout: Seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: If it takes longer.
        """
        self._worker.wait(timeout)

    async def finished(self) -> None:
        """Wait until nothing is being measured, while the page goes on: ``await widget.finished()``."""
        while self.is_measuring:
            await asyncio.sleep(0.05)

    def _begin(
        self,
        title: str,
        job: Callable[[Callable[[], None], Callable[[str], None]], Any],
        shares: Mapping[str, float] | None = None,
    ) -> None:
        """Do a job in the background; what is under way is dropped.

        Args:
            title: Title of the job.
            job: Gets two functions to call now and then, of which the second one tells how far it is, as
                `MeasuringProgress.tell` takes it; both end the job by an exception once it was dropped.
            shares: As in `MeasuringProgress`.
        """
        with self.turn:
            self._worker.drop()
            progress = self._progress = MeasuringProgress(title, lambda words: self._say(progress, words), shares)
            self._say(progress, progress.html())
            self._stop.layout.display = None

            def run(check: Callable[[], None]) -> Any:
                def tell(words: str) -> None:
                    check()
                    progress.tell(words)

                return job(check, tell)

            self._worker.submit(run)

    def _say(self, progress: MeasuringProgress, words: str) -> None:
        """Show the progress of a job; that of a dropped one is ignored."""
        with self.turn:
            if progress is self._progress:
                self._status.value = words

    def _end(self, sentence: str) -> None:
        """Show a sentence in the place of the progress."""
        self._progress = None
        self._status.value = said(sentence)
        self._stop.layout.display = "none"

    def _take(self, found: Any) -> None:
        """Show what a job found; in the worker's thread, in turn with the callbacks."""
        raise NotImplementedError

    def _show_end(self) -> None:
        """Show that nothing goes on any more: a job has found something, has failed, or was stopped."""

    def _hear(self, number: int, found: Any, error: Exception | None) -> None:
        with self.turn:
            if not self._worker.is_latest(number):  # it must not touch what the line for errors says
                return
            with self.attempt():
                self._end("")
                try:
                    if error is not None:
                        raise error
                    self._take(found)
                finally:
                    self._show_end()
