"""Watching a run in any training loop: recorder, probes, alarms and a display of its status in one line."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from workbench.callbacks.adapters import lightning_callback, trainer_callback
from workbench.callbacks.alarms import Alarm, Alarms, Attribution, Calibration
from workbench.callbacks.observation import Observation
from workbench.callbacks.recorder import Recorder
from workbench.callbacks.recorder.attached import AttachedRecorder
from workbench.callbacks.recorder.budget import Cost
from workbench.callbacks.recorder.joint_optimizer import optimizers_in
from workbench.callbacks.recorder.options import is_first, meet, of_first_rank
from workbench.callbacks.recorder.watched_contracts import WatchedContracts
from workbench.contracts.results import CheckReport
from workbench.errors import OptionError
from workbench.formatting import listed, number_in_words
from workbench.io.run_copy import store_path
from workbench.models.calling import bare
from workbench.option_checks import checked
from workbench.option_kinds import Level, PositiveFloat, PositiveInt
from workbench.probes.blame import Blame
from workbench.training.training_plan import NO_OPTIONS

#: Maximum number of losses in the curve; when it is exceeded, every second one is dropped.
_N_POINTS = 400
#: Number of signals whose evidence is shown.
_N_SIGNALS = 5
_WIDTH, _HEIGHT = 320, 54
_QUIET, _ALARMED, _ENDED = "#2e7d32", "#c62828", "#757575"


class RunStatus:
    """Status of a run: its metrics, its first alarm with the cause, and the signals with the most evidence."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.step, self.loss, self.rate = -1, math.nan, math.nan
        self.first_alarm: Alarm | None = None
        self.n_alarms = 0
        self.cause: Attribution | None = None
        self.blame: Blame | None = None
        self.scores: dict[str, float] = {}
        self.checked: dict[str, int] = {}
        #: Updates between two measurements of each part that the budget allows less often than usual.
        self.slowed: Mapping[str, int] = {}
        self.is_over = False
        self._losses: list[tuple[int, float]] = []
        self._n_rows, self._spacing = 0, 1
        self._times: deque[tuple[int, float]] = deque(maxlen=50)

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
        self._times.append((self.step, time.monotonic()))
        self._n_rows += 1
        if self._n_rows % self._spacing == 0 and math.isfinite(self.loss):
            self._losses.append((self.step, self.loss))
            if len(self._losses) > _N_POINTS:
                self._losses, self._spacing = self._losses[::2], 2 * self._spacing
        if new_alarms or self._n_rows % 10 == 1:
            known = {name: score for name, score in scores().items() if not math.isnan(score)}
            self.scores = dict(sorted(known.items(), key=lambda each: -each[1]))

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of the latest steps; NaN before the second."""
        if len(self._times) < 2:
            return math.nan
        (first, begin), (last, end) = self._times[0], self._times[-1]
        return (end - begin) / (last - first) if last > first else math.nan

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
        if self.blame is not None:
            lines.append(f"<div>Step {self.blame.step:,}: {escape(self.blame.sentence)}</div>")
        style = "display:flex;gap:24px;align-items:flex-start;margin-top:6px"
        figures = f'<div style="{style}">{self._curve()}{self._bars()}</div>'
        where = f"recorded in {escape(str(self.path))}" if self.path is not None else "not recorded"
        checked = "".join(f" · {name} checked at step {step:,}" for name, step in self.checked.items())
        style_of_notes = "opacity:.65;font-size:.85em"
        lines += [figures, f'<div style="{style_of_notes}">{where}{checked}</div>']
        if self.slowed:
            lines.append(f'<div style="{style_of_notes}">{escape(self.blindness)}</div>')
        style = "font-family:sans-serif;font-size:13px;line-height:1.45;max-width:760px"
        return f'<div style="{style}">{"".join(lines)}</div>'

    @property
    def blindness(self) -> str:
        """What the budget lets nobody see for how long, in words; empty if nothing is slowed down."""
        found = [f"{name} every {every:,} updates" for name, every in sorted(self.slowed.items(), key=lambda e: e[1])]
        return f"Within the budget, recorded or examined only: {listed(found)}." if found else ""

    def _cause_text(self) -> str:
        cause, first = self.cause, self.first_alarm
        if cause is None or first is None:
            return "Cause: unknown."
        likely = "Cause" if math.isnan(cause.score) else "Likely cause"
        name = f"{likely}: {cause.summary}"
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

    def __init__(self, status: RunStatus, *, shows_line: bool = True) -> None:
        self._status = status
        self._shown_at = -float("inf")
        self._handle: Any = None
        self._is_off = False
        self._is_terminal = shows_line and sys.stderr is not None and sys.stderr.isatty()
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if getattr(shell, "kernel", None) is not None:
            from IPython.display import HTML, display

            self._handle = display(HTML(status.as_html()), display_id=True)

    def update(self, news: Sequence[str]) -> None:
        """Update the display; ``news`` are lines about new alarms."""
        now = time.monotonic()
        if not self._is_off and (news or now - self._shown_at >= _PAUSE):
            self._shown_at = now
            self._try_to(lambda: self._show(news))

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

    def _show(self, news: Sequence[str], *, end: str = "") -> None:
        if self._handle is None:
            for line in news:
                self._clear()
                print(line, file=sys.stderr, flush=True)
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self._status.as_html()))
        elif self._is_terminal:
            self._clear()
            print(self._status.as_text(), end=end, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[2K", end="", file=sys.stderr)


#: Library of each module with a class ``Trainer``.
_TRAINERS = {"transformers.trainer": "transformers", "lightning.pytorch": "lightning", "pytorch_lightning": "lightning"}


@checked
def watch(
    model: Any,
    optimizer: Any = None,
    *,
    store: str | os.PathLike[str] | None = None,
    every: Mapping[str, int | None] | int | None = NO_OPTIONS,
    budget: Level | None = 0.02,
    false_alarms: PositiveFloat = 1.0,
    calibration: Calibration | None = None,
    on_alarm: Callable[[Alarm], None] | None = None,
    log: Any = None,
    notify: Any = None,
    plan: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
    shows: bool = True,
    resume: bool | PositiveInt = False,
    overwrite: bool = False,
) -> Watch:
    """Watch a run with recorder, probes, alarms and a comparison of settings, in any training loop.

    The training itself is bitwise identical. A notebook shows a small view below the cell, which is updated during
    training; a terminal shows one line; a log file contains only the alarms. The record is a store for
    `workbench.open_run`, `workbench.widgets.Timeline` and `workbench.diagnose`.

    If several processes train one model, each of them has to call this function; those that do not within two minutes
    are named by an error. A part that fails on one rank is left out on all. Only rank 0 writes the store and shows the
    status. Alarms are raised on all ranks at the same step, so that an ``on_alarm`` that ends the training ends it
    on all ranks. Parameters that FSDP2 or tensor parallelism splits over ranks are gathered for passes of the probes.
    Their gradients are checked if FSDP2 splits them by rows; otherwise the reduction probe tests a sum over ranks.
    Stages of a pipeline of PyTorch are recorded each on its own, in stores that `workbench.open_run` reads as one run.

    Args:
        model: Module that the loop calls, which may be compiled or wrapped by DDP, FSDP2 or accelerate; or a
            ``Trainer`` of Hugging Face or Lightning, before it trains.
        optimizer: Optimizer of the model, or a list, tuple or mapping of all of them; None for a ``Trainer``, which
            creates its own.
        store: Path of the store; None for a new one in ``runs/``, named after the model and the time. Or a URL for
            fsspec, such as ``"s3://bucket/run.zarr"``: the run is written to a store in ``runs/``, and another process
            copies it, so that a slow or broken link does not touch the training.
        every: Steps between two measurements of the parts that shall not follow the budget, see `workbench.Recorder`.
        budget: Share of the training time that watching may take, see `workbench.Recorder`; ``watched.cost`` reports
            what it takes. What is recorded or examined less often for it is shown with the status.
        false_alarms: False alarms per 100,000 healthy steps, see `workbench.Alarms`.
        calibration: Calibration on your own healthy runs, see `workbench.Alarms`; None for the default one.
        on_alarm: Function called with each alarm when it is raised. Its exceptions reach the training loop.
        log: Mirrors of numbers and alarms: ``"tensorboard"``, ``"wandb"``, ``"trackio"``, ``"mlflow"``, ``"aim"``, or
            a logger that you hold, see `workbench.Recorder`.
        notify: Webhooks or functions to which alarms and the end of the run are reported, such as ``"$SLACK_URL"``,
            see `workbench.Recorder`.
        plan: Planned settings, such as ``{"learning_rate": rate_at, "batch_size": {0: 8, 500: 16}}``, which may change
            without an alarm, see `workbench.Recorder`.
        shows: Whether to show the status.
        resume: Whether to continue the run in the store, if there is one: True after its last row, or the number of
            updates in the checkpoint from which the training continues; later rows are dropped. A ``Trainer`` knows
            that number, so pass True. What the alarms and the watch know of the run is kept.
        overwrite: Whether to replace the run in the store.

    Returns:
        The watch. It ends when its context is left, when ``close()`` is called, or when a ``Trainer`` ends.

    Raises:
        OptionError: If there is no optimizer, it updates no parameter of the model, or a rank does not call this.
        StoreError: If the store exists already and is neither continued nor replaced, or is being written.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=8)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> with wb.watch(model, optimizer, store="watched.zarr", shows=False) as watched:
        ...     for i in range(20):
        ...         inputs, targets = task.batch(i)
        ...         loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> watched.status.step, watched.alarms.raised
        (19, [])

    See Also:
        `workbench.Recorder`: Records a run without alarms.
        `workbench.Alarms`: Describes the alarms.
        `workbench.diagnose`: Ranks the causes of a failed run.
    """
    trainer = trainer_kind(model)
    module = model.model if trainer == "transformers" else model
    if trainer is None:
        optimizers_in(optimizer)
    meet("wb.watch")
    name = type(bare(module) if isinstance(module, nn.Module) else module).__name__
    name = f"{re.sub('[^A-Za-z0-9]+', '_', name)}_{datetime.now().astimezone():%Y%m%d_%H%M%S_%f}.zarr"
    path = Path("runs", of_first_rank(name)) if store is None else store_path(store)
    watched = Watch(
        path,
        every=every,
        budget=budget,
        log=log,
        notify=notify,
        plan=plan,
        resume=resume is not False,
        overwrite=overwrite,
        alarms=Alarms(false_alarms=false_alarms, calibration=calibration, on_alarm=on_alarm),
        shows=shows,
    )
    if trainer == "transformers":
        model.add_callback(trainer_callback(watched.recorder))
    elif trainer == "lightning":
        model.callbacks.append(lightning_callback(watched.recorder))
    else:
        watched.attach(model, optimizer, step=None if isinstance(resume, bool) else resume)
    return watched


class Watch:
    """A run that is watched; created by `watch`."""

    def __init__(self, path: Path, *, alarms: Alarms, shows: bool, **options: Any) -> None:
        self.path, self.alarms = path, alarms
        self.recorder = Recorder(path, alarms=alarms, **options)
        self.recorder._ended = self._end
        self.recorder._contracts = WatchedContracts
        self.status = RunStatus(path)
        self._attached: AttachedRecorder | None = None
        self._shows = shows
        self._display = StatusDisplay(self.status) if shows and is_first() else None
        self.recorder.observe(self._take_observation)
        self._n_alarms = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self.close(is_broken=kind is not None)

    def log(self, **numbers: Any) -> None:
        """Log metrics of the current update, such as ``loss``; see `workbench.Recorder.log`."""
        self.recorder.log(**numbers)

    def attach(self, model: nn.Module, optimizer: Any, *, step: int | None = None) -> None:
        """Attach the recorder to a model and its optimizer, after some updates."""
        self._attached = self.recorder.attach(model, optimizer, step=step)
        if (stage := self.recorder.stage) is not None:
            self.status.path = self._attached.output.path
            self._display = StatusDisplay(self.status, shows_line=stage.is_last) if self._shows else None

    @property
    def cost(self) -> Cost | None:
        """What watching has cost so far, by part; None before it has begun."""
        return self.recorder.cost

    @property
    def contracts(self) -> CheckReport | None:
        """Results of the contracts of the training so far, as of `workbench.check`; None before its first updates."""
        attached = self.recorder._attached
        return None if attached is None or attached.contracts is None else attached.contracts.report

    def blame(self, step: int | None = None) -> Blame:
        """Return the rank, the micro-batch and the row that spoiled an update, or that nobody departs from the others.

        The batches of the update are computed again, its rows each alone, in eval mode and with the present
        parameters: ask soon after the update. Their losses are compared with what the model expects, with each other
        and with earlier updates, and their gradients with those of the training, as they were before any reduction.
        With several ranks, each of them has to call this.

        Args:
            step: Step of the update, one of the latest eight that were examined; None for the latest.

        Raises:
            OptionError: If the watch has ended, or the gradients cannot be seen before their reduction.
        """
        attached = self.recorder._attached
        if attached is None or not attached.is_attached:
            raise OptionError("blame() needs a watch that has not ended; ask before close().")
        return attached.find_blame(step)

    def close(self, *, is_broken: bool = False) -> None:
        """Remove all hooks and complete the store; not needed for a ``Trainer``."""
        if self._attached is not None:
            self._attached.detach(is_broken=is_broken)
            self._attached = None

    def _end(self) -> None:
        """Show the final status; called when the recorder has ended."""
        self.status.is_over = True
        self.status.step = max(self.status.step, self.recorder.memory.step - 1)  # the last updates may have no row
        if self._display is not None:
            self._display.close()

    def _repr_html_(self) -> str:
        return self.status.as_html()

    def __repr__(self) -> str:
        return self.status.as_text()

    def _take_observation(self, observation: Observation) -> None:
        if self.status.step < 0 and (known := [a for a in self.alarms.raised if a.step < observation.step]):
            self._n_alarms = self.status.n_alarms = len(known)  # of the run that is resumed
            self.status.first_alarm = known[0]
        new_alarms = self.alarms.raised[self._n_alarms :]
        self._n_alarms = len(self.alarms.raised)
        cause = self.alarms.attribute() if new_alarms else None
        news = [f"step {alarm.step:,}: {alarm.message}" for alarm in new_alarms]
        if (attached := self.recorder._attached) is not None:
            self.status.slowed = attached.slowed
            if (found := attached.last_blame) is not None and found is not self.status.blame:
                self.status.blame = found
                news.append(f"step {found.step:,}: {found.sentence}")
        self.status.update(observation, new_alarms, cause, self.alarms.scores)
        if not is_first():  # a Trainer may set up the ranks after this object was created
            self._display = None
        if self._display is not None:
            self._display.update(news)


def trainer_kind(model: Any) -> str | None:
    """Return the library of a ``Trainer``; None for other objects."""
    if isinstance(model, nn.Module):
        return None
    for module, name in _TRAINERS.items():
        kind = getattr(sys.modules.get(module), "Trainer", None)
        if isinstance(kind, type) and isinstance(model, kind):
            return name
    return None
