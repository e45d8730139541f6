"""The public class of the recorder: what it measures, how often, and where it writes."""

from __future__ import annotations

import json
import math
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.callbacks.alarms import Alarms
from workbench.callbacks.alarms.replaying import replay
from workbench.callbacks.observation import Observation
from workbench.callbacks.observers import Observers
from workbench.callbacks.recorder.attached import AttachedRecorder
from workbench.callbacks.recorder.collectors import ModelReading, read_model
from workbench.callbacks.recorder.full_parameters import OptimizedParameters
from workbench.callbacks.recorder.loggers import logging_observer
from workbench.callbacks.recorder.options import CADENCE, RecorderOptions, checked_cadence
from workbench.callbacks.recorder.probe_text import of_plain, to_plain
from workbench.callbacks.recorder.ranks import is_first, of_first_rank
from workbench.errors import AnatomyError, OptionError, StoreError
from workbench.io.atomic import check_free
from workbench.io.background_writer import BackgroundWriter
from workbench.io.provenance import versions
from workbench.io.run_output import RunOutput
from workbench.io.run_writer import RunWriter
from workbench.io.store import open_run
from workbench.models.calling import on_device_of
from workbench.models.process_group import is_shared
from workbench.models.wrapping import bare, innermost
from workbench.monitors.scalars import SpikeScore
from workbench.schema.events import Event
from workbench.training.configuration import describe_model, first_difference
from workbench.training.recording import recorded_configuration
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workbench.models.subject import Subject
    from workbench.training.callback import TrainingRun


class Recorder:
    """Measures any training run: its parameters, updates and activations, together with its loss.

    One line attaches it to a loop; it removes itself at the end:

        recorder = wb.Recorder("runs/a.zarr")
        with recorder.attach(model, optimizer):
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                recorder.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

    Everything is measured around the optimizer's step, and in passes of its own over a few examples that stay the same
    (eval mode, no gradients), so that gradient accumulation and checkpointing, mixed precision, ``torch.compile``, DDP
    and FSDP2 need no further code, and the training is the same to the bit. The settings of the run (learning rate
    and options of the optimizer, batch, terms of the loss, number formats, parameters that are trained, versions)
    are compared at every update; what changes without a plan is an event, and an alarm. Once attached it never
    stops a training run: a part that fails is switched off, with an event and a warning. Exceptions of an observer
    are passed on.

    Args:
        path: Path of the run's store; None: nothing is written, only observers and loggers get the values.
        every: Steps between two measurements, by part: ``attention``, ``router``, ``optimizer`` (10 each),
            ``precision``, ``reduction`` (20), ``activations``, ``update`` (50), ``curvature``, ``spectra`` (off); one
            number for all that are on; None: only the numbers of each update. The window of ``attention``: queries and
            keys are compared over so many steps.
        probe: Inputs to measure activations, attention and routing on, a few examples; None: the first examples of the
            first batch. All measurements use the same.
        n_probe_tokens: Approximate number of tokens to take from the first batch.
        alpha: Power of the singular values in effective rank and spectral entropy.
        loss_of: Function from the model and the probe to a loss; for ``curvature``.
        profile_options: Further arguments of `workbench.profile`, for ``spectra``.
        log: Loggers of the scalars: a TensorBoard writer, or callables that take a dictionary; one or several.
        alarms: Alarms on all measurements; they go into the run's events and to their ``on_alarm``. Attached at
            step 0 they forget the previous run.
        rows_per_block: Rows of a part that are written at once, in a thread of their own.
        overwrite: Whether to replace the run at ``path``.
        resume: Whether to continue the run at ``path`` from the step given to `attach`; later rows are dropped. If
            there is none it starts.

    Raises:
        OptionError: If an option is out of range.
        StoreError: If the path is taken.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> recorder = wb.Recorder(every={"optimizer": 2})
        >>> run = wb.train(model, wb.tasks.random_tokens(), n_steps=4, recorder=recorder, store="mine.zarr")
        >>> records = list(run)
        >>> wb.open_run("mine.zarr")["optimizer"]["step"].values
        array([1, 3])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: Mapping[str, int | None] | int | None = CADENCE,
        probe: Any = None,
        n_probe_tokens: int = 512,
        alpha: float = 2.0,
        loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None,
        profile_options: Mapping[str, Any] | None = None,
        log: Any = None,
        alarms: Alarms | None = None,
        rows_per_block: int = 200,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        if not 0 < alpha < math.inf:
            raise OptionError(f"alpha is {alpha}, expected a positive number such as 2.")
        for name, value in (("n_probe_tokens", n_probe_tokens), ("rows_per_block", rows_per_block)):
            if value < 1:
                raise OptionError(f"{name} is {value}, expected at least 1.")
        if alarms is not None and not isinstance(alarms, Alarms):
            raise OptionError(f"alarms is {alarms!r}, expected wb.Alarms or None; pass alarms=wb.Alarms().")
        self.every = checked_cadence(every)
        if self.every["curvature"] is not None and loss_of is None:
            raise OptionError("curvature needs the loss as a function; pass loss_of=, from model and probe to a loss.")
        self.path = None if path is None else Path(path)
        self.alarms = alarms
        self.probe, self.n_probe_tokens = probe, n_probe_tokens
        self.options = RecorderOptions(self.every, float(alpha), loss_of, dict(profile_options or {}))
        self._loggers = (
            [] if log is None else [logging_observer(each) for each in (log if isinstance(log, list) else [log])]
        )
        self._rows_per_block, self._overwrite, self._resumes = rows_per_block, overwrite, resume
        self._observers = Observers()
        self._attached: AttachedRecorder | None = None
        self._reading: ModelReading | None = None
        self._step = 0
        self._kept_probe: Any = None
        self._last_model: weakref.ref[nn.Module] | None = None
        self._is_loaded = False
        self.recent_examples: list[int] = []
        self.settings_state: dict[str, Any] = {}
        # Several ranks learn together whether the first one can write: it may do so before another one comes here.
        if self.path is not None and not resume and not is_shared():
            check_free(self.path, overwrite=overwrite)

    def attach(
        self,
        model: Subject | nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        host: RunOutput | None = None,
        probe: Any = None,
        step: int | None = None,
        alarms: Alarms | None = None,
        run: TrainingRun | None = None,
    ) -> AttachedRecorder:
        """Attach the recorder to a model that a loop trains, with one line before the loop.

        Args:
            model: The module that the loop calls, or its subject; it may be wrapped by DDP, FSDP2 or ``torch.compile``.
            optimizer: Optimizer of its parameters, or of copies of them in float32; it may be wrapped too.
            host: Store of another owner, to which the parts are written; the owner writes the numbers of each update;
                the owner then passes everything to the alarms.
            probe: Probe to use instead of the recorder's own.
            step: Updates done; None: 0, or, on the model that it was attached to last, where it was detached.
            alarms: Alarms to use instead of the recorder's own.
            run: Training of a callback, which knows the labels of its batches and a loss on other examples; None: the
                model is asked for them, and ``loss_of``.

        Returns:
            The attached recorder; leaving its context, or ``detach()``, ends it.

        Raises:
            OptionError: If the optimizer moves no parameter of the model, or the recorder is attached already.
            StoreError: If the store cannot be written, or holds another run.
        """
        if self._attached is not None and self._attached.is_attached:
            raise OptionError("The recorder is attached already; detach it first, or use another one.")
        model = module_of(model)
        parameters = OptimizedParameters(bare(model), innermost(optimizer))
        goes_on = self._is_loaded or (self._last_model is not None and self._last_model() is bare(model))
        step = int(step) if step is not None else self._step if goes_on else 0
        goes_on &= step > 0  # at step 0 another run begins
        if not goes_on:
            self._step, self._kept_probe = 0, None
        if not step:
            self.recent_examples, self.settings_state = [], {}
        goes_on |= self._resumes
        output = self._output(model, step, goes_on=goes_on) if host is None else host
        alarms = self.alarms if alarms is None else alarms
        if alarms is not None and not step:
            alarms.reset()  # a new run has its own past
        elif host is None and alarms is not None and output.path is not None and not alarms.is_at(step):
            alarms.reset()
            replay(open_run(output.path), alarms)
        self._last_model, self._is_loaded = weakref.ref(bare(model)), False
        probe = next((p for p in (probe, self.probe, self._kept_probe) if p is not None), None)
        self._attached = AttachedRecorder(
            self,
            model,
            optimizer,
            output,
            parameters=parameters,
            probe=probe,
            step=step,
            spikes=_spikes_before(step, output.path),
            reading=self._reading,
            alarms=alarms,
            run=run,
            is_hosted=host is not None,
        )
        return self._attached

    def prepare(self, model: Subject | nn.Module, inputs: Any) -> None:
        """Read blocks, queries, keys and routers now, from a model that cannot be read later because it is sharded.

        Args:
            model: Model before ``fully_shard``; names of its parameters stay.
            inputs: A few examples.

        Raises:
            AnatomyError: If the blocks cannot be read.
        """
        model = bare(module_of(model))
        reading = read_model(model, on_device_of(model, inputs))
        if reading.anatomy is None:
            raise AnatomyError(reading.troubles["anatomy"])
        self._reading = reading

    def log(self, **numbers: Any) -> None:
        """Numbers of the present update, such as ``loss`` and ``accuracy``; tensors are read when the update is made.

        What is logged before ``optimizer.step()`` belongs to that update; until the next batch begins, what is logged
        after it still does. With several ranks the usual ones are averaged, if they come before the update.

        Raises:
            OptionError: If the recorder is not attached, or a value is no number.
        """
        self._at_work("log()").log(**numbers)

    def event(self, kind: str, **what: Any) -> None:
        """Record an event: ``source``, ``score``, ``message``, ``layer``, ``head``; see ``schema.EVENTS``.

        Raises:
            OptionError: If the recorder is not attached.
        """
        self._at_work("event()").event(kind, **what)

    def observe(self, callback: Callable[[Observation], None]) -> Callable[[], None]:
        """Call ``callback(observation)`` with every `Observation` after it was passed to the store.

        Exceptions of the callback reach the training loop.

        Returns:
            A function that unsubscribes it.
        """
        return self._observers.add(callback)

    def publish(self, observation: Observation) -> None:
        """Pass an observation to all loggers, on rank 0 only, and to observers."""
        for logger in self._loggers if is_first() else ():
            logger(observation)
        self._observers.call(observation)

    def describe(self) -> dict[str, Any]:
        """The options that define the measurements, as plain values."""
        return {"every": dict(self.every), "alpha": self.options.alpha, "profile_options": self.options.profile_options}

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, for JSON; everything recorded is on disk when this returns."""
        if self._attached is not None and self._attached.is_attached:
            self._step = self._attached.step
            self._attached.flush()
            self.recent_examples = self._attached.batches.recent_examples
            self.settings_state = self._attached.settings_state
        return {
            "step": self._step,
            "probe": to_plain(self._kept_probe),
            "recent_examples": self.recent_examples,
            "settings": self.settings_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave: at the next `attach`, in the same store if it exists.

        Raises:
            OptionError: If the recorder is attached.
        """
        if self._attached is not None and self._attached.is_attached:
            raise OptionError("The recorder is attached already; load its state before that.")
        self._step, self._is_loaded = state["step"], True
        self.recent_examples = state.get("recent_examples", [])
        self.settings_state = state.get("settings", {})
        if (probe := of_plain(state["probe"])) is not None:
            self._kept_probe = probe

    def keep_probe(self, probe: Any) -> Any:
        """Remember the examples that an attachment measures on, for the next one; return JSON, None if none."""
        self._kept_probe = probe
        return None if (plain := to_plain(probe)) is None else json.dumps(plain)

    def detached(self, step: int) -> None:
        """Remember the step at which an attachment ended."""
        self._step = step

    def _at_work(self, what: str) -> AttachedRecorder:
        if self._attached is None or not self._attached.is_attached:
            raise OptionError(f"{what} needs a run; attach the recorder first: recorder.attach(model, optimizer).")
        return self._attached

    def _output(self, model: nn.Module, step: int, *, goes_on: bool) -> RunOutput:
        """Open the recorder's own store, on rank 0 only; its errors are raised on every rank."""
        path = self.path
        if path is None:
            return RunOutput(None)
        writer, problem = None, ""
        if is_first():
            try:
                writer = self._writer(path, bare(model), step, goes_on=goes_on)
            except StoreError as error:
                problem = str(error)
        if problem := of_first_rank(problem):
            raise StoreError(problem)
        output = RunOutput(writer)
        word = "resumed" if step else "started"
        output.event(Event(step, word, message=f"{word.capitalize()} at step {step}."))
        return output

    def _writer(self, path: Path, model: nn.Module, step: int, *, goes_on: bool) -> BackgroundWriter:
        configuration = json.loads(
            json.dumps({"model": describe_model(model), "recorder": self.describe()}, default=str)
        )
        if goes_on and path.exists():
            recorded = recorded_configuration(path)
            if (difference := first_difference(recorded, configuration)) is not None:
                name, before, now = difference
                raise StoreError(
                    f"The run at {path} was recorded with {name} = {before}, this recorder says {now}; go on with "
                    "the same, or record into another run."
                )
            writer = RunWriter.reopen(path, before_step=step)
            writer.commit(state="running")
            if self._kept_probe is None and "probe" in (kept := open_run(path).attrs):
                self._kept_probe = of_plain(json.loads(kept["probe"]))
        else:
            attrs = {
                "subject": configuration["model"]["name"],
                "state": "running",
                "configuration": json.dumps(configuration),
                "versions": versions(),
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            writer = RunWriter(path, attrs, overwrite=self._overwrite)
        return BackgroundWriter(writer, rows_per_block=self._rows_per_block)


def _spikes_before(step: int, path: Path | None) -> SpikeScore:
    """The spike score of the losses that a store holds from before a step."""
    spikes = SpikeScore()
    if step and path is not None:
        run = open_run(path)
        if "monitors" in run.children and "loss" in run.children["monitors"]:
            of_steps = run.children["monitors"].to_dataset()["loss"]
            for loss in of_steps.values[of_steps["step"].values < step]:
                spikes.update(loss)
    return spikes
