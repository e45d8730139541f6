"""Mirrors of a run: its numbers and alarms in TensorBoard, W&B, trackio, MLflow, Aim, or any logger; and notices of it.

Each mirror has a thread of its own, with a bounded queue. The training thread only appends to that queue, so a service
that is slow or fails neither delays nor changes the training. What a mirror misses is in the store of the run.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np

from workbench.callbacks.observation import Alarm, Observation
from workbench.errors import MissingPackageError, OptionError
from workbench.formatting import counted
from workbench.io.run_output import issue_warning
from workbench.schema.runs import PARTS
from workbench.schema.statuses import RunState

#: Most rows, and values in them, that wait for one mirror.
_MOST_ROWS, _MOST_VALUES = 2000, 2_000_000
#: Seconds that all mirrors together may take at the end of a run.
SECONDS_TO_CLOSE = 10.0
#: Metric of W&B and trackio that counts the updates of the run.
_STEP = "watch/step"

Row = tuple[int, dict[str, float]]
#: An alarm, and the same as sentences, with its cause.
RaisedAlarm = tuple["Alarm", str]


class Service:
    """A service to which rows and alarms go; only its constructor is called in the thread of the training."""

    title = "The logger"
    takes_rows = True
    #: Seconds for which rows are collected, 0 to send them at once, and for which it rests after alarms.
    pause, rest = 0.5, 0.0
    #: Whether `warn` is to be called again, also without new alarms.
    has_more = False

    def start(self) -> None:
        """Connect, or start a run."""

    def send(self, rows: list[Row]) -> None:
        """Send rows."""

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        """Send alarms."""

    def close(self, state: str, n_updates: int) -> None:
        """Send what waits, and end what `start` has started."""


class Outlet:
    """The queue and the thread between a training and a service."""

    def __init__(self, service: Service) -> None:
        self._service, self._state, self._n_updates = service, "", 0
        self._rows: deque[Observation] = deque()
        self._alarms: deque[RaisedAlarm] = deque()
        self._n_put = self._n_taken = 0  # values; each count is changed by one thread alone
        self._trouble, self._has_warned = "", False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"workbench {service.title}", daemon=True)
        self._thread.start()

    def put(self, observation: Observation, alarms: Sequence[RaisedAlarm] = ()) -> None:
        """Pass an observation and its alarms on, without waiting."""
        self._alarms.extend(alarms)
        if self._service.takes_rows and self._thread.is_alive():
            size = _size(observation)
            if len(self._rows) < _MOST_ROWS and self._n_put - self._n_taken + size <= _MOST_VALUES:
                self._n_put += size
                self._rows.append(observation)
            else:
                self._trouble = self._trouble or "it is too slow"
        if self._alarms or (self._rows and not self._service.pause):  # waking a thread takes longer than all the rest
            self._wake.set()
        self._report()

    def end(self, state: str, n_updates: int) -> None:
        """Let the thread send what waits, and end."""
        self._state, self._n_updates = state, n_updates
        self._closing.set()
        self._wake.set()

    def join(self, until: float) -> None:
        """Wait for the thread until a time of the monotonic clock."""
        if self._thread is not threading.current_thread():  # where the garbage collector may run
            self._thread.join(max(0.0, until - time.monotonic()))
            if self._thread.is_alive():
                self._trouble = self._trouble or f"it took longer than {SECONDS_TO_CLOSE:g} s to end"
            self._report()

    def _report(self) -> None:
        """Issue one warning about the first trouble, in the thread of the training."""
        if self._trouble and not self._has_warned:
            self._has_warned = True
            issue_warning(
                f"{self._service.title} failed ({self._trouble}); training continues, and the run's record contains "
                "what it missed."
            )

    def _run(self) -> None:
        service = self._service
        is_over = not self._tried(service.start)
        while not is_over:
            self._wake.wait(service.pause or None)
            self._wake.clear()
            is_over = self._closing.is_set()
            rows = []
            for _ in range(len(self._rows)):
                seen = self._rows.popleft()
                self._n_taken += _size(seen)
                if named := numbers(seen):
                    rows.append((int(seen.step), named))
            if rows:
                self._tried(service.send, rows)
            alarms = [self._alarms.popleft() for _ in range(len(self._alarms))]
            if alarms or service.has_more:
                self._tried(service.warn, alarms)
                self._closing.wait(service.rest)
                if service.has_more:
                    self._wake.set()
            if is_over:
                self._tried(service.close, self._state, self._n_updates)

    def _tried(self, action: Callable[..., None], *args: Any) -> bool:
        """Carry out an action of the service, and return whether it succeeded."""
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001  (third-party code; training continues)
            self._trouble = self._trouble or plain_reason(error)
            return False
        return True


def _size(observation: Observation) -> int:
    return sum(getattr(value, "size", 1) for value in observation.values.values())


def plain_reason(error: BaseException) -> str:
    """Return what went wrong without the text of a library, which may contain addresses, tokens or keys."""
    if isinstance(code := getattr(error, "code", None), int):
        return f"it answered {code}"
    reason = getattr(error, "reason", None)
    found = reason if isinstance(reason, OSError) else error
    return getattr(found, "strerror", None) or type(found).__name__


def close_all(outlets: Sequence[Outlet], state: str, n_updates: int) -> None:
    """End all outlets at once, within the time limit."""
    for outlet in outlets:
        outlet.end(state, n_updates)
    until = time.monotonic() + SECONDS_TO_CLOSE
    for outlet in outlets:
        outlet.join(until)


#: Statistics over layers, heads, experts or modules.
_SUMMARIES: dict[str, Callable[[np.ndarray], Any]] = {"mean": np.nanmean, "min": np.nanmin, "max": np.nanmax}


def numbers(observation: Observation) -> dict[str, float]:
    """Return an observation as named numbers.

    Returns:
        Scalars unchanged (``monitors/loss``); of arrays, the mean, minimum and maximum over layers, heads, experts and
        modules, ignoring NaN (``router/max_violation/mean``), separately for each term if there are terms
        (``attention/effective_rank/D2/min``). Arrays of NaN alone, complex numbers and text are left out.
    """
    named: dict[str, float] = {}
    rules = PARTS.get(observation.part, {})
    for name, value in observation.values.items():
        values = np.asarray(value)
        if values.dtype.kind not in "biuf":
            continue
        tag = f"{observation.part}/{name}"
        if values.ndim == 0:
            named[tag] = float(values)
        elif name in rules and rules[name].dims[-1] == "term":
            for term, of_term in zip(observation.coords["term"], np.moveaxis(values, -1, 0), strict=True):
                named |= _summary(f"{tag}/{term}", of_term)
        else:
            named |= _summary(tag, values)
    return named


def _summary(tag: str, values: np.ndarray) -> dict[str, float]:
    values = values.astype(np.float64)
    if np.isnan(values).all():
        return {}
    with np.errstate(invalid="ignore"):  # the mean of inf and -inf
        return {f"{tag}/{word}": float(summary(values)) for word, summary in _SUMMARIES.items()}


# Services


class _Function(Service):
    """A function of a dictionary of numbers."""

    def __init__(self, function: Callable[..., Any], path: Path | None = None) -> None:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # a compiled function
            parameters = []
        self._call = function
        self._takes_step = any(each.name == "step" or each.kind is each.VAR_KEYWORD for each in parameters)

    def send(self, rows: list[Row]) -> None:
        first: Exception | None = None
        for step, named in rows:
            try:
                self._call(named, step=step) if self._takes_step else self._call({"step": step, **named})
            except Exception as error:  # noqa: BLE001  (raised after the last row)
                first = first or error
        if first is not None:
            raise first


class _Library(Service):
    """A service with runs: one that the user holds or that is active in this process, or one that is started."""

    def __init__(self, held: Any, path: Path | None) -> None:
        self._path = Path("workbench", "watched") if path is None else path.absolute()
        self._name = self._path.stem
        self._run = self._active() if held is None else held
        self._is_own = self._run is None

    def _active(self) -> Any:
        """Return the run that is active in this process, or None."""

    def start(self) -> None:
        if self._is_own:
            self._run = self._started()

    def _started(self) -> Any:
        """Return a new run."""

    def close(self, state: str, n_updates: int) -> None:
        if self._is_own:
            self._finish(is_sound=state == RunState.FINISHED)

    def _finish(self, *, is_sound: bool) -> None:
        """Finish the run that was started."""
        self._run.close()


class _TensorBoard(_Library):
    title = "TensorBoard"

    def _started(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._path.with_suffix(".tensorboard")))

    def send(self, rows: list[Row]) -> None:
        for tag, value, step in ((tag, value, step) for step, named in rows for tag, value in named.items()):
            self._run.add_scalar(tag, value, step)

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        for alarm, text in alarms:
            self._run.add_text("alarm", text, alarm.step)

    def close(self, state: str, n_updates: int) -> None:
        self._run.flush()
        super().close(state, n_updates)


class _Stepped(_Library):
    """A service with one counter of steps for all numbers of a run, which belongs to the loop if it logs as well.

    The rows of such a loop keep their steps: ours are added at the latest of them, `_place`. Until it logs, they wait.
    """

    _place: Callable[[], int]
    _add: Callable[[list[Row]], None]
    _log: Callable[[list[Row]], None]

    def __init__(self, held: Any, path: Path | None) -> None:
        super().__init__(held, path)
        self._waiting, self._known = deque[Row](maxlen=_MOST_ROWS), set[str]()
        self._first = -1 if self._is_own else self._place()
        self.pause = 0.5 if self._is_own else 0.0

    def send(self, rows: list[Row]) -> None:
        if self._is_own:
            self._log(rows)
        else:
            self._waiting.extend(rows)
            if self._place() != self._first:  # parts wait for the metrics of their update, and share its step
                n_whole = max((i + 1 for i, (_, row) in enumerate(self._waiting) if "monitors/loss" in row), default=0)
                self._add([self._waiting.popleft() for _ in range(n_whole)])

    def close(self, state: str, n_updates: int) -> None:
        if not self._is_own:
            (self._log if self._place() == self._first else self._add)(list(self._waiting))
        super().close(state, n_updates)

    def _finish(self, *, is_sound: bool) -> None:
        self._run.finish()


class _Wandb(_Stepped):
    title = "W&B"

    def _active(self) -> Any:
        return getattr(sys.modules.get("wandb"), "run", None)

    def _started(self) -> Any:
        import wandb

        # Nobody is asked for a key: without one, the run stays on this machine, for `wandb sync`.
        is_offline = wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False)
        options: dict[str, Any] = {"mode": "offline"} if is_offline else {}
        settings = wandb.Settings(console="off", silent=True)
        return wandb.init(name=self._name, reinit="create_new", settings=settings, **options)

    def _place(self) -> int:
        return int(self._run.step)

    def _add(self, rows: list[Row]) -> None:
        latest: dict[str, float] = {}
        for step, named in rows:
            latest |= {_STEP: step, **named}
        if latest:
            self._define(latest)
            self._run.log(latest, commit=False)

    def _log(self, rows: list[Row]) -> None:
        merged: dict[int, dict[str, float]] = {}
        for step, named in rows:
            merged.setdefault(step, {_STEP: step}).update(named)
        for step, row in merged.items():
            self._define(row)
            self._run.log(row, step=step if self._is_own else None)

    def _define(self, named: dict[str, float]) -> None:
        """Draw each number over the steps of the watch; patterns of other libraries would match it as well."""
        for name in named.keys() - self._known:
            self._run.define_metric(name, step_metric=None if name == _STEP else _STEP)
        self._known |= named.keys()

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        for alarm, text in alarms:
            self._run.alert(f"{self._name}: {alarm.signal}"[:63], text, "WARN")

    def _finish(self, *, is_sound: bool) -> None:
        self._run.finish(exit_code=int(not is_sound))


class _Trackio(_Stepped):
    title = "trackio"

    def _active(self) -> Any:
        return import_module("trackio.context_vars").current_run.get() if "trackio" in sys.modules else None

    def _started(self) -> Any:
        import trackio

        return trackio.init(self._path.parent.name or "workbench", self._name, embed=False)

    def _place(self) -> int:
        return int(self._run._next_step) - 1  # a larger step would move the counter of the loop

    def _add(self, rows: list[Row]) -> None:
        self._log(rows, self._place)

    def _log(self, rows: list[Row], place: Callable[[], int] | None = None) -> None:
        for step, named in rows:
            self._run.log({_STEP: step, **named}, step=step if place is None else place())

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        for alarm, text in alarms:
            self._run.alert(alarm.signal, text, step=alarm.step)


class _MLflow(_Library):
    title = "MLflow"

    def __init__(self, held: Any, path: Path | None) -> None:
        inner = getattr(held, "experiment", held)  # of a logger of Lightning
        self._client: Any = inner if hasattr(inner, "log_batch") else None
        self._run_id = held.run_id if inner is not held else None
        super().__init__(held if hasattr(held, "info") else None, path)
        self._is_own &= self._run_id is None
        self._n_alarms, self._tags = 0, dict[str, str]()

    def _active(self) -> Any:
        return sys.modules["mlflow"].active_run() if "mlflow" in sys.modules else None

    def _started(self) -> Any:
        return import_module("mlflow").start_run(run_name=self._name)  # the active one of this thread alone

    def start(self) -> None:
        super().start()
        self._client = self._client or import_module("mlflow").MlflowClient()
        self._run_id = self._run_id or self._run.info.run_id

    def send(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(tag, value, now, step) for step, named in rows for tag, value in named.items()]
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + 1000])

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        first, latest = (f"step {alarm.step}: {text}"[:1000] for alarm, text in (alarms[0], alarms[-1]))
        self._tags = {"first_alarm": first} | self._tags | {"latest_alarm": latest}
        self._n_alarms += len(alarms)
        for key, value in {**self._tags, "n_alarms": self._n_alarms}.items():
            self._client.set_tag(self._run_id, f"watch.{key}", value)

    def _finish(self, *, is_sound: bool) -> None:
        import_module("mlflow").end_run("FINISHED" if is_sound else "FAILED")


class _Aim(_Library):
    title = "Aim"

    def _started(self) -> Any:
        run = import_module("aim").Run()
        run.name = self._name
        return run

    def send(self, rows: list[Row]) -> None:
        for tag, value, step in ((tag, value, step) for step, named in rows for tag, value in named.items()):
            self._run.track(value, name=tag, step=step)

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        for alarm, text in alarms:
            self._run.track(import_module("aim").Text(text), name="alarm", step=alarm.step)


#: Services that can be named, with the method by which their runs are recognized.
_NAMED = {
    "tensorboard": (_TensorBoard, "add_scalar"),
    "wandb": (_Wandb, "define_metric"),
    "trackio": (_Trackio, "alert"),
    "mlflow": (_MLflow, ""),
    "aim": (_Aim, "track"),
}


def services_of(log: Any) -> list[Callable[[Path | None], Service]]:
    """Return a function of the path of the store for each logger; it is called where the training begins."""
    logs = log if isinstance(log, list | tuple) else [] if log is None else [log]
    return [_service_of(each) for each in logs]


def _service_of(log: Any) -> Callable[[Path | None], Service]:
    name = log.__name__ if type(log) is type(sys) else log
    if isinstance(name, str) and name in _NAMED:
        if find_spec(name) is None:
            sentence = f"log='{name}' needs the package {name}; install it with 'pip install {name}'."
            raise MissingPackageError(sentence, name=name, expected="installed")
        return partial(_NAMED[name][0], None)
    owner = getattr(log, "__self__", log)
    log = owner if hasattr(owner, "define_metric") else log  # wandb.log
    for name, (service, method) in _NAMED.items():
        if (name == "tensorboard" or name in type(log).__module__.split(".")) and hasattr(log, method or "__class__"):
            return partial(service, log)
    inner = getattr(log, "tracker", getattr(log, "experiment", None))  # of accelerate, of Lightning
    if inner is not None and not callable(log):
        with suppress(OptionError):
            return _service_of(inner)
    send = log if callable(log) else getattr(log, "log_metrics", getattr(log, "log", None))
    if isinstance(log, str) or not callable(send):
        expected = (
            f"one of {', '.join(_NAMED)}, a run or writer of these, a logger of Lightning or accelerate, a function of "
            "a dictionary, or a list of them"
        )
        raise OptionError.of("log", log, expected)
    return partial(_Function, send)


# Notices


#: Seconds between two notices of alarms, and until a server must have answered; alarms that a notice describes.
_REST, _TIMEOUT, _N_DESCRIBED = 60.0, 5.0, 5
_EXPECTED = "the URL of a webhook, the name of an environment variable after a $, a function of a text, or a list"


class Notice(Service):
    """Messages about one run; alarms that come while it rests are described and counted in one message."""

    takes_rows, pause = False, 0.0

    def __init__(self, send: Callable[[str, dict[str, Any]], object], title: str, path: Path | None) -> None:
        self._send, self.title, self.rest = send, title, _REST
        self._name = "watched" if path is None else path.name
        self._waiting: list[RaisedAlarm] = []
        self._n_alarms = 0

    @property
    def has_more(self) -> bool:  # type: ignore[override]
        """Whether alarms wait that could not be sent."""
        return bool(self._waiting)

    def warn(self, alarms: list[RaisedAlarm]) -> None:
        """Send one message about all alarms since the last one."""
        self._waiting += alarms
        self._n_alarms += len(alarms)
        n, first = len(self._waiting), self._waiting[0][0]
        what = f"{n} alarms from step {first.step} on" if n > 1 else f"alarm at step {first.step}"
        lines = [f"step {alarm.step}, {alarm.signal}: {text}" for alarm, text in self._waiting[:_N_DESCRIBED]]
        more = [f"and {n - _N_DESCRIBED} more"] if n > _N_DESCRIBED else []
        self._post("alarm", first.step, n, "\n".join([f"Run {self._name}: {what}", *lines, *more]))
        self._waiting = []

    def close(self, state: str, n_updates: int) -> None:
        """Send a message about the end of the run."""
        how = {RunState.FINISHED: "finished", RunState.STOPPED: "was stopped by an error"}.get(RunState(state), state)
        text = f"Run {self._name} {how} after {n_updates} updates, with {counted(self._n_alarms, 'alarm')}"
        self._post(str(state), n_updates, self._n_alarms, text)

    def _post(self, kind: str, step: int, n_alarms: int, text: str) -> None:
        self._send(text, {"run": self._name, "kind": kind, "step": step, "n_alarms": n_alarms, "text": text})


def notices_of(notify: Any) -> list[Callable[[Path | None], Notice]]:
    """Return a function of the path of the store for each URL, name of a variable, or function."""
    given = notify if isinstance(notify, list | tuple) else [] if notify is None else [notify]
    return [_notice_of(each) for each in given]


def _notice_of(to: Any) -> Callable[[Path | None], Notice]:
    if callable(to):
        return partial(Notice, lambda text, data: to(text), "The function of notify=")
    if not isinstance(to, str):
        raise OptionError.of("notify", to, _EXPECTED)
    is_named = to.startswith("$")
    url = os.environ.get(to[1:], "") if is_named else to
    host: str = ""
    with suppress(ValueError):
        parts = urlsplit(url)
        host = (parts.hostname or "") if parts.scheme in ("http", "https") and "@" not in parts.netloc else ""
    if not host:  # a URL is a secret, and the message does not contain it
        raise OptionError(
            f"{f'the environment variable {to[1:]}' if is_named else 'notify'} must be a URL that begins with https:// "
            "and names no user; copy it from the settings of the webhook, or pass a function that sends the text."
        )
    # Closures, as the representation of a partial function shows its arguments.
    return lambda path: Notice(lambda text, data: _post(url, host, text, data), f"The webhook at {host}", path)


def _post(url: str, host: str, text: str, data: dict[str, Any]) -> None:
    """Post a message in the form that the host expects."""
    body: dict[str, Any] = data
    if host == "hooks.slack.com":
        body = {"text": escape(text, quote=False)}
    elif host.removeprefix("www.") in ("discord.com", "discordapp.com"):
        body = {"content": text[:2000], "allowed_mentions": {"parse": []}}
    headers = {"Content-Type": "application/json", "User-Agent": "stability-workbench"}
    with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=_TIMEOUT):
        pass
