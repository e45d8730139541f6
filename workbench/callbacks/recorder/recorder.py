"""The public class of the recorder: which parts it measures, how often, and where it writes them."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.callbacks.alarms import Alarms
from workbench.callbacks.alarms.replaying import replay
from workbench.callbacks.alarms.settings_sentinel import planned_settings
from workbench.callbacks.mirrors import Outlet, RaisedAlarm, close_all, notices_of, services_of
from workbench.callbacks.observation import Observation, Observers
from workbench.callbacks.recorder.attached import AttachedRecorder
from workbench.callbacks.recorder.budget import OF_STORE, Cost
from workbench.callbacks.recorder.collectors import ModelReading, read_model
from workbench.callbacks.recorder.joint_optimizer import JointOptimizer, OptimizedParameters, optimizers_in
from workbench.callbacks.recorder.options import (
    RecorderMemory,
    RecorderOptions,
    checked_cadence,
    in_pipeline,
    is_first,
    meet,
    of_each_rank,
    of_plain,
    to_plain,
)
from workbench.callbacks.recorder.shards import PipelineStage, stages_of
from workbench.errors import AnatomyError, OptionError, StoreError
from workbench.io.run_copy import bring, stage_path, store_path
from workbench.io.run_output import RunOutput
from workbench.io.run_writer import RunWriter
from workbench.io.store import open_run
from workbench.models.calling import alone, bare, is_shared, on_device_of
from workbench.monitors.scalars import SpikeScore
from workbench.option_checks import checked
from workbench.option_kinds import Level, PositiveFloat, PositiveInt
from workbench.schema.events import Event
from workbench.training.recording import describe_model, new_run, recorded_configuration, require_same
from workbench.training.training_plan import NO_OPTIONS
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from workbench.callbacks.recorder.watched_contracts import WatchedContracts
    from workbench.models.subject import Subject
    from workbench.training.callback import TrainingRun


class Recorder:
    """Measures a training run: its parameters, updates and activations, together with its loss.

    One line attaches it to a training loop; it removes itself at the end::

        recorder = wb.Recorder("runs/a.zarr")
        with recorder.attach(model, optimizer):
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                recorder.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

    All measurements are taken around the optimizer's step, and in separate passes over a few fixed examples (eval mode,
    no gradients). Gradient accumulation and checkpointing, mixed precision, ``torch.compile``, DDP and FSDP2 therefore
    need no further code, and the training is bit for bit the same as without a recorder. The settings of the run
    (learning rate and options of the optimizer, batch, terms of the loss, number formats, trained parameters, versions)
    are compared at every update; a change without a plan is an event and an alarm. An attached recorder never stops a
    training run: a part that fails is switched off, with an event and a warning. Only exceptions of observers are
    passed on.

    Args:
        path: Path of the run's store, or a URL as in `workbench.watch`; None to write nothing and pass values only to
            observers and loggers.
        every: Steps between two measurements of a part, which then do not follow the budget, such as
            ``{"precision": 100, "spectra": 500}``; None switches a part off. The others are measured every 10
            (``attention``, ``router``, ``optimizer``), 5 (``reduction``), 20 (``precision``) or 50 steps
            (``activations``, ``update``), or less often if the budget requires it; ``curvature`` and ``spectra`` are
            off. One number fixes all parts that are on; None records only the metrics of each update. For
            ``attention`` it is also the number of updates over which queries and keys are compared.
        budget: Share of the training time that the recorder may take, kept by measuring what each part costs on this
            machine: parts are measured less often, and contents of batches, norms, settings and alarms are examined
            only at some updates. If the rows of all updates, with loss and learning rate, cost more than that, only
            every second to tenth update has one, unless the loop logs metrics, scales its losses or runs on several
            ranks. None sets no limit.
        probe: Inputs on which activations, attention and routing are measured, a few examples; None for the first
            examples of the first batch. All measurements use the same inputs.
        n_probe_tokens: Approximate number of tokens to take from the first batch.
        alpha: Power of the singular values in effective rank and spectral entropy.
        loss_of: Function from the model and the probe to a loss; required by ``curvature``.
        profile_options: Further arguments of `workbench.profile`, for ``spectra``.
        log: Loggers that mirror numbers and alarms: ``"tensorboard"``, ``"wandb"``, ``"trackio"``, ``"mlflow"`` or
            ``"aim"`` for the active run or a new one; a run or writer of these; a logger of Lightning or accelerate; a
            function of a dictionary of numbers, called as ``log(numbers, step=...)`` or with ``"step"`` among them; or
            a list of these. They are called in threads of their own, on rank 0.
        notify: Where alarms and the end of the run are reported: the URL of a webhook (Slack, Discord, or any that
            takes JSON), ``"$NAME"`` for a URL in an environment variable, a function of a text, or a list of these. It
            is stored nowhere.
        plan: Planned settings that are numbers, such as ``{"learning_rate": rate_at, "batch_size": {0: 8, 500: 16}}``:
            each a number, a function of the step, or values by their first steps, in multiples of any unit. Or one
            function from the step to the values by name. Changes that follow it raise no alarm.
        alarms: Alarms on all measurements; they are recorded as events of the run and passed to their ``on_alarm``.
            Attached at step 0 they forget the previous run.
        rows_per_block: Number of rows of a part that are written together.
        overwrite: Whether to replace the run at ``path``.
        resume: Whether to continue the run at ``path``: after its last row, or from the step given to `attach`, where
            later rows are dropped. Recent examples, settings and the past of the alarms are taken from it. If there is
            no run, it starts a new one.

    Raises:
        OptionError: If an option is out of range.
        StoreError: If a run exists at ``path`` and is neither replaced nor resumed.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> recorder = wb.Recorder(every={"optimizer": 2})
        >>> run = wb.train(model, wb.tasks.random_tokens(), n_steps=4, recorder=recorder, store="mine.zarr")
        >>> records = list(run)
        >>> wb.open_run("mine.zarr")["optimizer"]["step"].values
        array([1, 3])

    See Also:
        `workbench.watch`: Records and displays a training loop in one call.
        `workbench.train`: Trains with a recorder.
        `workbench.monitors`: The measured quantities.
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: Mapping[str, int | None] | int | None = NO_OPTIONS,
        budget: Level | None = 0.02,
        probe: Any = None,
        n_probe_tokens: PositiveInt = 512,
        alpha: PositiveFloat = 2.0,
        loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None,
        profile_options: Mapping[str, Any] | None = None,
        log: Any = None,
        notify: Any = None,
        plan: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None = None,
        alarms: Alarms | None = None,
        rows_per_block: PositiveInt = 200,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        self.every, fixed = checked_cadence(every)
        if self.every["curvature"] is not None and loss_of is None:
            raise OptionError(
                "curvature needs the loss; pass wb.Recorder(..., loss_of=), a function of model and probe."
            )
        self.path = None if path is None else store_path(path)
        self.alarms = alarms
        self.probe, self.n_probe_tokens = probe, n_probe_tokens
        self.options = RecorderOptions(
            self.every,
            float(alpha),
            loss_of,
            dict(profile_options or {}),
            planned_settings(plan),
            n_probe_tokens,
            budget,
            fixed,
        )
        self._loggers, self._notices, self._outlets = services_of(log), notices_of(notify), list[Outlet]()
        self._rows_per_block, self._overwrite, self._resumes = rows_per_block, overwrite, resume
        self._observers = Observers()
        self._attached: AttachedRecorder | None = None
        self._reading: ModelReading | None = None
        self.memory = RecorderMemory()
        self._ended: Callable[[], None] = lambda: None
        self._contracts: Callable[..., WatchedContracts] | None = None
        self._last_model: weakref.ref[nn.Module] | None = None
        self._is_loaded = False
        self.stage: PipelineStage | None = None  # of a pipeline, that of the attached model
        # With several ranks this is checked at `attach`: the first rank may write before another one gets here.
        if not (is_shared() or alone):
            self._check_store()

    def attach(
        self,
        model: Subject | nn.Module,
        optimizer: Any,
        *,
        host: RunOutput | None = None,
        probe: Any = None,
        step: int | None = None,
        alarms: Alarms | None = None,
        run: TrainingRun | None = None,
    ) -> AttachedRecorder:
        """Attach the recorder to the model of a training loop, in one line before the loop.

        Args:
            model: The module that the loop calls, or its subject; it may be wrapped by DDP, FSDP2 or ``torch.compile``.
            optimizer: Optimizer of its parameters, or of copies of them in float32; it may be wrapped too. Several of
                them, as a list, tuple or mapping, make one update together. An optimizer has ``step()`` and
                ``param_groups``.
            host: Store of another owner, to which the parts are written. The owner writes the metrics of each update
                and passes all observations to the alarms.
            probe: Probe to use instead of the recorder's own.
            step: Number of updates done; None for 0 or, if the recorder was last attached to the same model, the step
                at which it was detached, or the end of a run to resume.
            alarms: Alarms to use instead of the recorder's own.
            run: Training that a callback belongs to, which provides the labels of its batches and a loss on other
                examples; None to obtain them from the model and ``loss_of``.

        Returns:
            The attached recorder; leaving its context, or calling ``detach()``, ends the recording.

        Raises:
            OptionError: If it is not an optimizer, or updates no parameter of the model, or the recorder is already
                attached.
            StoreError: If the store cannot be written, or contains another run.
        """
        self._check_free("attach")
        meet("Recorder.attach")
        model, memory = module_of(model), self.memory
        joint = JointOptimizer(optimizers_in(optimizer))
        parameters = OptimizedParameters(bare(model), joint)
        ranks = of_each_rank(own := stages_of(model, joint))
        if any(len(stages) > 1 for stages in ranks):
            raise OptionError(
                "A rank has several stages of a pipeline; watch each with an optimizer of its own, all with the same "
                "store=."
            )
        self.stage = own[0] if all(ranks) and len({stage for (stage,) in ranks}) == len(ranks) else None
        options, left_out = self.options, list[str]()
        if self.stage is not None:
            (options, left_out), probe = in_pipeline(options), None
        continues = self._is_loaded or (self._last_model is not None and self._last_model() is bare(model))
        stored = self._stored_state() if self._resumes and not continues and host is None else {}
        if step == 0 and stored.get("n_rows"):
            raise StoreError(
                f"The run at {self.path} ends at step {stored['n_rows'] - 1}, but this training begins at step 0; "
                "resume it from a checkpoint, or pass overwrite=True instead of resume=True to replace the run."
            )
        step = int(step) if step is not None else memory.step if continues else stored.get("n_rows", 0)
        continues &= step > 0  # step 0 begins another run
        if not continues:
            memory.step, memory.probe = 0, None
        if not step:
            memory.recent_examples, memory.settings, memory.costs = [], {}, {}
        elif stored.get("step", step + 1) <= step:  # otherwise later examples would come again
            memory.recent_examples = stored["recent_examples"]
        if step and stored:
            memory.settings, memory.costs = stored.get("settings", {}), stored.get("costs", {})
        continues |= self._resumes
        output = self._output(model, step, continues=continues) if host is None else host
        alarms = self.alarms if alarms is None else alarms
        if alarms is not None and not step:
            alarms.reset()  # a new run has its own past
        elif host is None and alarms is not None and output.path is not None and not alarms._is_at(step):
            alarms.reset()
            replay(open_run(output.path), alarms)
        self._last_model, self._is_loaded = weakref.ref(bare(model)), False
        # Of a pipeline, the last stage has the loss, and each notifies of its own alarms.
        logs = is_first() if self.stage is None else self.stage.is_last
        services = [*(self._loggers if logs else ()), *(self._notices if is_first() or self.stage is not None else ())]
        self._outlets = [Outlet(service(output.path or self._place)) for service in services]
        if self.stage is None:
            probe = next((p for p in (probe, self.probe, memory.probe) if p is not None), None)
        self._attached = AttachedRecorder(
            model,
            joint,
            output,
            options,
            memory,
            publish=self._publish,
            ended=self._end,
            parameters=parameters,
            probe=probe,
            step=step,
            spikes=_spikes_before(step, output.path),
            reading=self._reading,
            alarms=alarms,
            run=run,
            is_hosted=host is not None,
            contracts=None if self.stage else self._contracts,
            stage=self.stage,
        )
        for part in left_out:
            reason = f"The part '{part}' is not measured in a pipeline: it needs passes through all stages at once."
            output.event(Event(step, "not recorded", source=part, message=reason))
        if step and stored:
            self._attached._keep_state()  # that in the store may be one of a later step, whose rows were dropped
        return self._attached

    def prepare(self, model: Subject | nn.Module, inputs: Any) -> None:
        """Read blocks, queries, keys and routers of a model before it is sharded, if they cannot be read afterwards.

        Args:
            model: Model before ``fully_shard``, with its final parameter names.
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
        """Log metrics of the current update, such as ``loss`` and ``accuracy``; tensors are read at the update.

        Metrics logged before ``optimizer.step()`` belong to that update, and so do those logged afterwards until the
        next batch begins. With several ranks the standard metrics are averaged if they are logged before the update.

        Args:
            **numbers: Metrics by name: numbers, or tensors or arrays of one number.

        Raises:
            OptionError: If the recorder is not attached, or a value is not a number.
        """
        self._current("log").log(**numbers)

    def event(self, kind: str, **what: Any) -> None:
        """Record an event at the current step.

        Args:
            kind: Kind of the event.
            **what: Any of ``source``, ``score``, ``message``, ``layer`` and ``head``; see ``schema.EVENTS``.

        Raises:
            OptionError: If the recorder is not attached.
        """
        self._current("event").event(kind, **what)

    def observe(self, callback: Callable[[Observation], None]) -> Callable[[], None]:
        """Call ``callback(observation)`` with every `Observation` after it was passed to the store.

        Exceptions of the callback reach the training loop.

        Returns:
            A function that unsubscribes the callback.
        """
        return self._observers.add(callback)

    def _publish(self, observation: Observation, alarms: Sequence[RaisedAlarm] = ()) -> None:
        """Pass an observation and its alarms to all mirrors, and the observation to all observers."""
        for outlet in self._outlets:
            outlet.put(observation, alarms)
        self._observers.call(observation)

    def _end(self, state: str) -> None:
        """Complete the mirrors at the end of the recording."""
        close_all(self._outlets, state, self.memory.step)
        self._outlets = []
        self._ended()

    @property
    def cost(self) -> Cost | None:
        """What the recorder has cost since it was attached last, by part; None before."""
        return None if self._attached is None else self._attached.cost()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values; all records are on disk when this returns."""
        memory = self.memory
        if self._attached is not None and self._attached.is_attached:
            memory.step = self._attached.step
            self._attached.flush()
            memory.recent_examples = self._attached.batches.recent_examples
            memory.settings = self._attached.settings_state
        return vars(memory) | {"probe": to_plain(memory.probe)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`: the next `attach` continues from it, in the same store if that exists.

        Raises:
            OptionError: If the recorder is attached.
        """
        self._check_free("load_state_dict")
        if not {"step", "probe"} <= state.keys():
            raise OptionError.of("state", tuple(state), "from state_dict()")
        self.memory.step, self._is_loaded = state["step"], True
        self.memory.recent_examples = state.get("recent_examples", [])
        self.memory.settings, self.memory.costs = state.get("settings", {}), state.get("costs", {})
        if (probe := of_plain(state["probe"])) is not None:
            self.memory.probe = probe

    @property
    def _place(self) -> Path | None:
        """Path of the store of this rank."""
        return self.path if self.path is None or self.stage is None else stage_path(self.path, self.stage.number)

    def _check_store(self) -> None:
        """Raise StoreError if there is a run that is neither replaced nor resumed."""
        if self.path is None or self._place is None or self._resumes or self._overwrite:
            return
        # A run has one store, or one for each stage.
        others = (stage_path(self.path, 0) if self.stage is None else self._place, self.path)
        if found := [each for each in others if each.exists()]:
            raise StoreError(
                f"{found[0]} exists already; pass resume=True to continue it, overwrite=True to replace it, or choose "
                "another path."
            )

    def _stored_state(self) -> dict[str, Any]:
        """Return the state of the recorder in its store, and ``n_rows``, the step after its last one; on each rank.

        Updates after the last row may have none.
        """
        state: dict[str, Any] = {}
        path = self._place if is_first() or self.stage is not None else None
        if path is not None:
            bring(path)
        if path is not None and path.exists():
            run = open_run(path)
            state = json.loads(run.attrs.get("recorder_state", "{}"))
            if "monitors" in run.children and run["monitors"].sizes.get("step"):
                n_rows = int(run.children["monitors"].to_dataset()["step"].values[-1]) + 1
                state["n_rows"] = n_rows if self.stage is not None else max(n_rows, state.get("step", 0))
        states = of_each_rank(state)
        if self.stage is None:
            return states[0]
        # The run goes on after the last row that all stages have.
        n_rows = min(each.get("n_rows", 0) for each in states)
        return state | {"n_rows": n_rows} if n_rows else {}

    def _check_free(self, what: str) -> None:
        """Raise OptionError if the recorder is attached."""
        if self._attached is not None and self._attached.is_attached:
            raise OptionError(f"{what}() needs a recorder that is not attached, but this one is; detach it first.")

    def _current(self, what: str) -> AttachedRecorder:
        """Return the attached recorder; raise OptionError if there is none."""
        if self._attached is None or not self._attached.is_attached:
            raise OptionError(f"{what}() needs an attached recorder; call recorder.attach(model, optimizer) first.")
        return self._attached

    def _output(self, model: nn.Module, step: int, *, continues: bool) -> RunOutput:
        """Open the recorder's own store, on rank 0 or for each stage; its errors are raised on every rank."""
        if (path := self._place) is None:
            return RunOutput(None)
        writer: RunWriter | None = None
        problem: StoreError | None = None
        if is_first() or self.stage is not None:
            try:
                writer = self._writer(path, bare(model), step, continues=continues)
            except StoreError as error:
                problem = error
        if problems := [each for each in of_each_rank(problem) if each is not None]:
            raise problem or problems[0]
        if writer is not None and self.stage is not None:
            writer.commit(stage=self.stage.number, n_stages=self.stage.n_stages)
        share = None if self.options.budget is None else OF_STORE * self.options.budget
        output = RunOutput(writer, rows_per_block=self._rows_per_block, share=share)
        word = "resumed" if step else "started"
        output.event(Event(step, word, message=f"{word.capitalize()} at step {step}."))
        return output

    def _writer(self, path: Path, model: nn.Module, step: int, *, continues: bool) -> RunWriter:
        if not continues:
            self._check_store()
        options = self.options
        about = {"every": dict(self.every), "alpha": options.alpha, "profile_options": options.profile_options}
        configuration = json.loads(json.dumps({"model": describe_model(model), "recorder": about}, default=str))
        if continues and path.exists():
            where, remedy = f"The run at {path} was recorded with", "use the same value, or record into another run"
            recorded = recorded_configuration(path)
            require_same(recorded, configuration, where=where, now="this recorder", remedy=remedy)
            writer = RunWriter.reopen(path, before_step=step)
            writer.commit(state="running")
            if self.memory.probe is None and "probe" in (kept := open_run(path).attrs):
                self.memory.probe = of_plain(json.loads(kept["probe"]))
            return writer
        return new_run(path, configuration, overwrite=self._overwrite)


def _spikes_before(step: int, path: Path | None) -> SpikeScore:
    """Return the spike score of the losses that a store contains from before a step."""
    spikes = SpikeScore()
    if step and path is not None:
        run = open_run(path)
        if "monitors" in run.children and "loss" in run.children["monitors"]:
            of_steps = run.children["monitors"].to_dataset()["loss"]
            for loss in of_steps.values[of_steps["step"].values < step]:
                spikes.update(loss)
    return spikes
