"""The training loop: a generator that yields one record a step. No user interface; a thread writes the store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.callbacks.baselines.penalty_terms import PenaltyTerms
from workbench.callbacks.faults import Fault, Injection, Pass
from workbench.callbacks.guard import Guard
from workbench.callbacks.kss import KSS, Shaper
from workbench.callbacks.run_recording import (
    Recording,
    SpectraTaker,
    StepWriter,
    check_checkpoint_folder,
    check_places,
    open_writer,
    recorded_configuration,
    take_or_say,
)
from workbench.errors import CheckpointError, StoreError, ThresholdError, WorkbenchError
from workbench.io.run_writer import RunWriter
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import accuracy_of, auxiliary_loss, token_loss
from workbench.models.run_checkpoints import latest_checkpoint, load_weights
from workbench.tasks import Task, as_task
from workbench.tasks.random_stream import RandomStream
from workbench.training.checkpoints import TrainingState, read_checkpoint
from workbench.training.configuration import describe_run, first_difference
from workbench.training.step_record import StepRecord
from workbench.training.training_plan import PRECISIONS, TrainingPlan
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from workbench.callbacks.actions import Actions, Request
    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.baselines.penalties import Penalty
    from workbench.callbacks.recorder import Recorder
    from workbench.models.subject import Subject


def train(
    model: Subject | nn.Module,
    task: Any,
    *,
    resume: bool = False,
    overwrite: bool = False,
    kss: KSS | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    penalties: Sequence[Penalty] = (),
    faults: Sequence[Fault] = (),
    recorder: Recorder | None = None,
    alarms: Alarms | None = None,
    actions: Actions | None = None,
    **settings: Any,
) -> Iterator[StepRecord]:
    """Train a model, one record a step.

    The run stops when the caller stops asking; it ends by itself after ``n_steps``, or where it diverges (RKSP's label:
    loss above 50 or gradient norm above 500; a value that is not finite counts). The update of the diverged step is not
    applied. Randomness within the model comes from a stream of the run's own, so the global random states stay
    untouched, and runs that take turns in one process are each what they would be alone.

    Args:
        model: Any module that returns logits, or an output with ``logits``; or its subject. It is trained where it is,
            on its device. A method ``auxiliary_loss()`` (zoo), or an ``aux_loss`` in the output (Hugging Face), is
            added to the loss.
        task: From ``wb.tasks``, a DataLoader, a dataset or an iterable of batches; see `workbench.tasks.as_task`.
        resume: Go on from the last checkpoint; weights, optimizer, data and random numbers continue as if the run had
            never stopped.
        overwrite: Replace the run that is at ``store``, with its checkpoints.
        kss: Koopman Spectral Shaping; its controls may be turned while the run goes on. A resumed run takes up the
            controls of its checkpoint.
        loss: From logits and targets to a 0-dim tensor.
        penalties: Terms added to the loss that look at the residual stream; see `workbench.baselines`.
        faults: From `workbench.faults`, at most one of a kind; each may be switched on and off while the run goes on. A
            resumed run takes up the switches of its checkpoint.
        recorder: Looks at the mechanism while the run trains; its parts go into the run's own store.
        alarms: Listen to the recorder; what they say is in the events and in each `StepRecord`.
        actions: What an alarm may trigger; None: nothing. After a roll-back steps count on: the step is the number of
            updates made, and the event says which weights they begin from.
        **settings: Fields of `TrainingPlan` (``n_steps``, ``learning_rate``, ``warmup``, ...) and of `Recording`
            (``store``, ``spectra_every``, ``checkpoint_every``, ...).

    Returns:
        A generator of `StepRecord`. Closing it writes what was gathered and, where checkpoints are on, one more.

    Raises:
        ThresholdError: If a setting is unknown or impossible; nothing is done then. When it begins, if a fault cannot
            act on this model, or when a batch is met that it cannot act on.
        AnatomyError: When it begins, if spectra or penalties are asked for and the model's blocks cannot be found.
        StoreError: If the store is taken, or holds a run of another configuration; when it begins, if it or the folder
            of the checkpoints cannot be written. Trouble with the disk later on is a `RecordingWarning`.
        CheckpointError: If there is nothing to resume from, or it is damaged.
    """
    model = module_of(model)
    plan, recording = _split(settings)
    task = as_task(task)
    if plan.precision == "float16" and _device_of(model).type != "cuda":
        raise ThresholdError("float16 needs a CUDA device for its loss scaling; choose 'bfloat16' or 'float32'.")
    optimizer = plan.optimizer_for(model)
    if plan.precision == "float16" and _is_two_pass(optimizer):
        raise ThresholdError("float16 scales one gradient a step, but SAM takes two; choose 'bfloat16' or 'float32'.")
    terms = PenaltyTerms(model, penalties, seed=plan.seed, stack=recording.profile_options.get("stack"))
    injection = Injection(faults, seed=plan.seed)
    injection.attach(optimizer, looks_again=_looks_again(optimizer))
    guard = Guard(recorder, alarms, actions)
    if guard.rolls_back and not recording.checkpoint_every:
        raise ThresholdError("Rolling back needs checkpoints to go back to; pass checkpoint_every= too.")
    if recording.spectra_every and recorder is not None and recorder.every["spectra"] is not None:
        raise ThresholdError("Both spectra_every= and the recorder would write the run's spectra; ask one of them.")
    run = _Run(model, task, plan, recording, loss, optimizer, terms, kss, injection, guard)
    if resume:
        run.restore()
    else:
        check_places(recording, overwrite=overwrite)
    return run.steps(overwrite=overwrite)


class _Run:
    """One run in training: what the steps share."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        plan: TrainingPlan,
        recording: Recording,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: torch.optim.Optimizer,
        penalties: PenaltyTerms,
        kss: KSS | None,
        faults: Injection,
        guard: Guard,
    ) -> None:
        self.model, self.task, self.plan, self.recording, self.loss = model, task, plan, recording, loss
        self.optimizer, self.penalties, self.faults, self.guard = optimizer, penalties, faults, guard
        self.shaper: Shaper | None = None
        self.kss, self.kss_state = kss, {}
        self.peak_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.configuration = describe_run(
            model, task, plan, recording, loss, kss, penalties.describe(), faults.describe()
        )
        self.device = _device_of(model)
        self.random = RandomStream(plan.seed, device=self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=plan.precision == "float16")
        self.step = 0
        self.writer: RunWriter | None = None

    def restore(self) -> None:
        """Take up the last checkpoint, if it is of this very configuration."""
        folder = self.recording.checkpoint_folder
        if folder is None:
            raise ThresholdError("resume=True needs to know where from; pass store= or checkpoints=.")
        place = latest_checkpoint(folder)
        if place is None:
            raise CheckpointError(
                f"{folder} holds no checkpoint to resume from; train with checkpoint_every=, or start again."
            )
        state = read_checkpoint(place)
        found = {str(place): state.configuration}
        if self.recording.store is not None:
            found[str(self.recording.store)] = recorded_configuration(self.recording.store)
        for where, recorded in found.items():
            if (difference := first_difference(recorded, self.configuration)) is not None:
                name, before, now = difference
                raise StoreError(
                    f"The run at {where} was made with {name} = {before}, this call says {now}; resume with the same "
                    "configuration, or start a run of its own."
                )
        check_checkpoint_folder(self.recording)
        load_weights(self.model, place)
        self.optimizer.load_state_dict(state.optimizer)
        self.scaler.load_state_dict(state.scaler)
        self.random.load_state_dict(state.random)
        if state.faults:
            self.faults.load_state_dict(state.faults)
        if state.guard:
            self.guard.load_state_dict(state.guard)
        self.kss_state = state.kss
        if self.kss is not None and state.kss:
            self.kss.load_state_dict(state.kss["control"])
        self.step = state.step
        if self.recording.store is not None:
            self.writer = RunWriter.reopen(self.recording.store, before_step=self.step)

    def steps(self, *, overwrite: bool) -> Iterator[StepRecord]:
        """The generator that `train` returns."""
        writer, every = self.writer, self.recording.spectra_every
        taker = self._taker() if every else None  # first: a model that cannot be read is refused before a store is made
        if self.penalties.are_on:
            self.penalties.read_anatomy(self.task.probe(2))
        if self.faults.looks_at_the_model:
            probe = on_device_of(self.model, self.task.probe(2))
            self.faults.attach_to_model(
                self.model, probe, lambda output: auxiliary_loss(self.model, output) is not None
            )
        if self.kss is not None:
            self.shaper = self._attached()
        if writer is None:
            writer = open_writer(self.recording, self.configuration, overwrite=overwrite)
        ledger = StepWriter(writer, self.recording.flush_every, locates_events=self.guard.is_on)
        was_training = self.model.training
        state, is_whole = "interrupted", True
        try:
            if self.writer is not None:
                ledger.resumed(self.step)
                self.guard.learn(self.recording.store)
            batches = self.task.stream(self.step + self.guard.n_skipped)
            self.guard.attach(
                self.model, self.optimizer, writer=ledger.background, probe_of=self._probe, step=self.step
            )
            while self.step < self.plan.n_steps:
                is_last = self.step == self.plan.n_steps - 1
                is_due = taker is not None and (self.step % every == 0 or is_last)
                spectra = take_or_say(taker, self.step, ledger) if is_due else None
                batch = next(batches, None)
                if batch is None:
                    ledger.event(self.step, "finished", message=f"The data ended after {self.step} steps.")
                    state = "finished"
                    return
                is_whole = False
                record = self._step(*batch)
                is_whole = True
                if record.diverged and taker is not None and not is_due:
                    spectra = take_or_say(taker, record.step, ledger)
                known = self.guard.finish_step(record.monitors())
                record = replace(record, spectra=spectra, alarms=self.guard.take_alarms())
                ledger.add(record.step, record.monitors() | known, spectra)
                for change in self.shaper.new_changes() if self.shaper is not None else ():
                    ledger.event(record.step, "kss", source="kss", message=change)
                for name, change in self.faults.new_changes():
                    ledger.event(record.step, "fault", source=name, message=change)
                self._tell_alarms(record, ledger)
                if record.diverged:
                    ledger.event(record.step, "divergence", **_evidence(record, self.plan))
                if record.diverged and (self.plan.stops_at_divergence or record.cause == "non-finite"):
                    state = "diverged"
                    ledger.flush(state=state)  # at once: whoever gets the record may look at the store
                    yield record
                    return
                self.step += 1
                if self.recording.checkpoint_every and self.step % self.recording.checkpoint_every == 0:
                    ledger.flush()  # first: a resumed run does not make the rows before its checkpoint again
                    self._checkpoint(ledger)
                if (request := self.guard.request(record.step, record.alarms)) is not None:
                    self._carry_out(request, batches, ledger)
                    if "stop" in request.kinds:
                        state = "stopped"
                        ledger.event(self.step, "stopped", message=f"Stopped after {self.step} steps, by an alarm.")
                        yield record
                        return
                yield record
            state = "finished"
            ledger.event(self.step, "finished", message=f"Finished after {self.step} steps.")
        except GeneratorExit:
            if state != "diverged":
                state = "stopped"
                ledger.event(self.step, "stopped", message=f"Stopped after {self.step} steps.")
            raise
        finally:
            try:
                self.model.train(was_training)
                self.guard.detach()
                if self.shaper is not None:
                    self.shaper.detach()
                self.faults.detach()
                for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
                    group["lr"] = peak  # a ready optimizer goes back to its owner as it came
                ledger.flush(state=state)
                if self.recording.checkpoint_every and is_whole and state in ("stopped", "finished"):
                    self._checkpoint(ledger)
            finally:
                ledger.close()

    def _step(self, inputs: Any, targets: Any) -> StepRecord:
        """One forward, backward and, unless it diverged, update."""
        if self.shaper is not None:
            self.shaper.begin_step(self.step)
        self.faults.begin_step(self.step)
        self.guard.begin_step(self.step)
        factor = self.plan.rate_factor(self.step) * self.faults.rate_factor * self.guard.rate_factor
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * factor
        inputs, targets = on_device_of(self.model, inputs), on_device_of(self.model, targets)
        inputs, targets = self.faults.batch(inputs, targets)
        self.model.train()
        with self.random.active():
            given = self.faults.backward(self._backward, inputs, targets, scale=self.scaler.get_scale)
            grad_norm = self._grad_norm() if given.is_finite else math.nan
            cause = self._cause(given.loss if given.is_finite else math.nan, grad_norm)
            if not cause or not (self.plan.stops_at_divergence or cause == "non-finite"):
                self._update(inputs, targets, grad_norm)
        return StepRecord(
            step=self.step,
            loss=given.loss,
            auxiliary_loss=given.auxiliary_loss,
            accuracy=accuracy_of(given.logits, targets),
            grad_norm=grad_norm,
            learning_rate=max(group["lr"] for group in self.optimizer.param_groups),
            cause=cause,
            shaping=None if self.shaper is None else self.shaper.last,
            active_faults=self.faults.active,
        )

    def _backward(self, inputs: Any, targets: Tensor) -> Pass:
        """Losses of some rows and, where they are finite, the gradients on the weights."""
        with self.faults.attention():
            task_loss, auxiliary, logits = self._losses(inputs, targets)
            total = task_loss if auxiliary is None else task_loss + auxiliary
            is_finite = math.isfinite(total.item())
            self.optimizer.zero_grad(set_to_none=True)
            if is_finite:
                self.scaler.scale(total).backward()
        return Pass(task_loss.item(), math.nan if auxiliary is None else auxiliary.item(), logits, is_finite)

    def _losses(self, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Task loss, weighted auxiliary terms or None, and logits."""
        dtype = PRECISIONS[self.plan.precision]
        autocast = torch.autocast(self.device.type, dtype, enabled=dtype is not None)
        with autocast, self.penalties.watch(self.step) as penalty_of:
            output = call_model(self.model, inputs)
            logits = output if isinstance(output, Tensor) else output.logits
            task_loss, auxiliary = self.loss(logits, targets), auxiliary_loss(self.model, output)
            if auxiliary is not None and not self.faults.keeps_auxiliary_loss:
                auxiliary = torch.zeros_like(auxiliary)
            if (penalty := penalty_of(task_loss)) is not None:
                auxiliary = penalty if auxiliary is None else auxiliary + penalty
            return task_loss, auxiliary, logits

    def _grad_norm(self) -> float:
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _cause(self, loss: float, grad_norm: float) -> str:
        if self.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(grad_norm):
            return ""  # float16 overflowed: the scaler leaves out this update and lowers its scale
        return self.plan.cause_of_divergence(loss, grad_norm)

    def _update(self, inputs: Any, targets: Tensor, grad_norm: float) -> None:
        self._clip(grad_norm)
        if _looks_again(self.optimizer):
            self.optimizer.step(lambda: self._closure(inputs, targets))
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _clip(self, grad_norm: float) -> None:
        if self.plan.clip_norm is not None:
            weights = [p for group in self.optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(weights, self.plan.clip_norm, torch.tensor(grad_norm))

    def _closure(self, inputs: Any, targets: Tensor) -> Tensor:
        """Loss and gradients at the weights where an optimizer looks again within a step."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.faults.attention():
            task_loss, auxiliary, _ = self._losses(inputs, targets)
            total = task_loss if auxiliary is None else task_loss + auxiliary
            total.backward()
        if self.plan.clip_norm is not None and _is_two_pass(self.optimizer):  # LBFGS needs the true gradient
            self._clip(self._grad_norm())
        return total

    def _taker(self) -> SpectraTaker:
        options = self.recording.profile_options
        n_tokens = options.get("n_snapshots", 2048) or 2048
        inputs = self.task.probe(n_tokens) if self.recording.probe is None else self.recording.probe
        return SpectraTaker(self.model, inputs, options)

    def _attached(self) -> Shaper:
        """KSS on this model; a model that it cannot read is refused here."""
        shaper = self.kss.attach(self.model, self.optimizer)
        try:
            if self.kss_state:
                # The controls were taken up by `restore`; who resumes the run may have turned them since.
                shaper.load_state_dict({**self.kss_state, "control": self.kss.state_dict()})
            shaper.read_anatomy(on_device_of(self.model, self.task.probe(2)))
        except WorkbenchError:
            shaper.detach()
            raise
        return shaper

    def _probe(self, n_tokens: int) -> Any:
        return on_device_of(self.model, self.task.probe(n_tokens))

    def _tell_alarms(self, record: StepRecord, ledger: StepWriter) -> None:
        for alarm in record.alarms:
            ledger.event(alarm.step, "alarm", **alarm.as_event())
        if (found := self.guard.attribution(record.alarms)) is not None:
            ledger.event(record.step, "attribution", **found.as_event())

    def _carry_out(self, request: Request, batches: Iterator[Any], ledger: StepWriter) -> None:
        """Do what an alarm asked for."""
        n_skipped = self.guard.n_skipped
        done = self.guard.carry_out(
            request,
            step=self.step,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            faults=self.faults,
            checkpoints=self.recording.checkpoint_folder,
        )
        for action in done:
            ledger.event(self.step, "action", source=action.kind, message=action.message)
        for _ in range(self.guard.n_skipped - n_skipped):
            next(batches, None)

    def _checkpoint(self, ledger: StepWriter) -> None:
        state = TrainingState(
            step=self.step,
            configuration=self.configuration,
            optimizer=self.optimizer.state_dict(),
            scaler=self.scaler.state_dict(),
            random=self.random.state_dict(),
            kss={} if self.shaper is None else self.shaper.state_dict(),
            faults=self.faults.state_dict(),
            guard=self.guard.state_dict(),
        )
        ledger.checkpoint(self.model, state, self.recording.checkpoint_folder)


def _split(settings: Mapping[str, Any]) -> tuple[TrainingPlan, Recording]:
    """The settings of a call as the two objects that know them."""
    kinds = {cls: [item.name for item in fields(cls)] for cls in (TrainingPlan, Recording)}
    known = [name for names in kinds.values() for name in names]
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ThresholdError(f"train() knows no setting '{unknown[0]}'; choose from {', '.join(known)}.")
    if "n_steps" not in settings:
        raise ThresholdError("train() needs n_steps, the number of updates; pass n_steps=.")
    return tuple(cls(**{k: v for k, v in settings.items() if k in names}) for cls, names in kinds.items())


def _is_two_pass(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it takes a second gradient elsewhere, as SAM and its kin do: ``step(closure)`` after a first backward."""
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def _looks_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it takes further gradients within a step, by a closure."""
    return isinstance(optimizer, torch.optim.LBFGS) or _is_two_pass(optimizer)


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _evidence(record: StepRecord, plan: TrainingPlan) -> dict[str, Any]:
    """Source, score and sentence of a divergence."""
    if record.cause == "loss":
        score, limit = record.loss, plan.loss_limit
        what = f"Loss {score:.4g} is above {limit:g}."
    elif record.cause == "grad_norm":
        score, limit = record.grad_norm, plan.grad_norm_limit
        what = f"Gradient norm {score:.4g} is above {limit:g}."
    else:
        score = record.loss if not math.isfinite(record.loss) else record.grad_norm
        what = "Loss or gradients are not finite."
    return {"source": record.cause, "score": score, "message": what}
