"""Training loop: a generator that yields one record per step and writes the store in blocks."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from workbench.errors import CheckpointError, OptionError, SnapshotError, StoreError, WorkbenchError
from workbench.formatting import listed
from workbench.io.run_output import RecordingWarning, RunOutput
from workbench.io.run_parts import Lost
from workbench.io.run_writer import RunWriter
from workbench.io.store import open_run
from workbench.models.batches import count_examples, take_examples
from workbench.models.calling import bare, call_model, is_shared, message_device, on_device_of
from workbench.models.checkpoint import divided, is_sharded, latest_checkpoint, load_weights
from workbench.models.losses import accuracy_on_device, auxiliary_loss, prediction_of
from workbench.models.probing import parts_of
from workbench.probes.failed_pass import Around, LossOf, first_bad_tensor
from workbench.schema.events import Event
from workbench.tasks import Task
from workbench.tasks.random_stream import RandomStream
from workbench.tasks.user_data import DataTask, OneShotTask
from workbench.training.callback import Callback, CallbackGroup, PassFunction, PassResult, StepRecord, TrainingRun
from workbench.training.recording import (
    Recording,
    SpectraTaker,
    TrainingState,
    check_checkpoint_folder,
    check_places,
    damaged,
    describe_run,
    open_writer,
    read_checkpoint,
    recorded_configuration,
    require_same,
    write_checkpoint,
)
from workbench.training.training_plan import PRECISIONS, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr


class Ranks:
    """The ranks that train a model; one alone if it is neither wrapped by DDP nor sharded.

    Args:
        model: Model that the loop calls.
    """

    def __init__(self, model: nn.Module) -> None:
        is_wrapped = any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules())
        self.are_several = is_shared() and (is_wrapped or any(map(is_sharded, model.parameters())))
        self.rank = distributed.get_rank() if self.are_several else 0
        self.n = distributed.get_world_size() if self.are_several else 1

    def own_rows(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Return every n-th example of a batch, those of this rank.

        Raises:
            OptionError: If the examples cannot be divided equally, which would weight them differently.
        """
        if not self.are_several:
            return batch
        if (n_examples := count_examples(batch[0])) % self.n:
            raise OptionError(
                f"A batch of {n_examples} examples cannot be divided among {self.n} ranks; choose a batch size that is "
                f"a multiple of {self.n}."
            )
        inputs, targets = (take_examples(part, slice(self.rank, None, self.n)) for part in batch)
        return inputs, targets

    def means(self, numbers: Sequence[float]) -> list[float]:
        """Return the means of numbers over ranks."""
        if not self.are_several:
            return [*numbers]
        message = torch.tensor(numbers, dtype=torch.float64, device=message_device())
        distributed.all_reduce(message)
        return (message / self.n).tolist()

    def each(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        found: list[Any] = [value] * self.n
        if self.are_several:
            distributed.all_gather_object(found, value)
        return found

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Call a function on the first rank alone; its errors are raised on all ranks. Others receive None."""
        found, problem = None, None
        if self.rank == 0:
            try:
                found = function()
            except WorkbenchError as error:
                problem = error
        if (problem := self.each(problem)[0]) is not None:
            raise problem
        return found


def whole(value: Any, _gathered: dict[int, Tensor] | None = None) -> Any:
    """Return a state in which tensors that are sharded over ranks are complete; to be called on every rank."""
    gathered = {} if _gathered is None else _gathered
    if is_sharded(value):
        place = value.to_local().data_ptr()  # tied parameters remain one
        if place not in gathered or gathered[place].shape != value.shape:
            gathered[place] = value.full_tensor()
        return gathered[place]
    if isinstance(value, Mapping):
        return type(value)((key, whole(each, gathered)) for key, each in value.items())  # type: ignore[call-arg]
    return [whole(each, gathered) for each in value] if isinstance(value, list) else value


def replicated(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has, in a form that can be multiplied with another one."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


#: Tokens of the examples on which the effect of updates is measured.
_PROBE_TOKENS = 64
#: Names of callbacks in error messages.
_TITLES = {"guard": "a recorder", "kss": "KSS"}


class Training:
    """Training run; `steps` is the generator that `workbench.train` returns."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        plan: TrainingPlan,
        recording: Recording,
        loss: Callable[[Tensor, Tensor], Tensor],
        callbacks: Sequence[Callback],
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.model, self.task, self.plan, self.recording, self.loss = model, task, plan, recording, loss
        self.ranks, self._bare = Ranks(model), bare(model)
        self.callbacks = CallbackGroup(callbacks)
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if plan.precision == "float16" and self.device.type != "cuda":
            raise OptionError("float16 needs a CUDA device for its loss scaling; choose 'bfloat16' or 'float32'.")
        self.optimizer = plan.optimizer_for(self._bare)
        if plan.precision == "float16" and _is_two_pass(self.optimizer):
            raise OptionError("float16 scales one gradient per step, SAM needs two; choose 'bfloat16' or 'float32'.")
        self.peak_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.random = RandomStream(plan.seed + self.ranks.rank, device=self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=plan.precision == "float16")
        self.step = 0
        self._overwrite = overwrite
        self._is_resumed = self._is_open = False
        self._early_events: list[Event] = []  # events before the output exists
        self._output = RunOutput(None)
        self._lacks_checkpoint = False
        # Data of the user's own are those of each rank, a task of the workbench gives the batch of all.
        self._has_own_batches = isinstance(task, DataTask | OneShotTask)
        self._kept: tuple[Any, Tensor] | None = None
        self._failed_at = ""
        self.run = TrainingRun(
            model,
            self.optimizer,
            self._take_event,
            probe=lambda n_tokens: on_device_of(model, task.probe(n_tokens)),
            probe_loss=self._probe_loss if callable(getattr(task, "held_out", None)) else None,
            owns_loop=True,
            checkpoints=recording.written_checkpoints,
            scaler=self.scaler,
        )
        self.callbacks.setup(self.run)
        try:
            self.configuration = describe_run(self._bare, task, plan, recording, loss, self.callbacks.callbacks)
            if resume:
                self._restore()
            else:
                self.ranks.on_first(partial(check_places, recording, overwrite=overwrite))
        except BaseException:
            self.callbacks.end(self.run, is_broken=True)
            raise

    def _restore(self) -> None:
        """Load the last checkpoint; raise if its configuration differs."""
        folder = self.recording.checkpoint_folder
        if folder is None:
            raise OptionError("resume=True needs a checkpoint; pass store= or checkpoints=.")
        place = latest_checkpoint(folder)
        if place is None:
            raise CheckpointError(f"{folder} holds no checkpoint to resume; use checkpoint_every=, or resume=False.")
        state = read_checkpoint(place)
        found = {str(place): state.configuration}
        if self.recording.store is not None:
            found[str(self.recording.store)] = recorded_configuration(self.recording.store)
        for where, recorded in found.items():
            remedy = "resume with the same configuration, or start another run"
            require_same(recorded, self.configuration, where=f"The run at {where} has", now="this call", remedy=remedy)
        self.ranks.on_first(partial(check_checkpoint_folder, self.recording))
        names = [callback.name for callback in self.callbacks]
        if missing := [name for name in state.callbacks if name not in names]:
            raise StoreError(
                f"The run at {place} was trained with {listed(_TITLES.get(name, name) for name in missing)}; resume "
                "with the same callbacks, or start another run."
            )
        if (n_ranks := len(state.random.get("ranks", [0]))) != self.ranks.n:
            raise CheckpointError(f"{place} is of {n_ranks} processes, but {self.ranks.n} resume it; start as many.")
        try:  # before the parameters, which must not be replaced by those of a damaged checkpoint
            self.optimizer.load_state_dict(self._divided(state.optimizer))
            self.scaler.load_state_dict(state.scaler)
            self.random.load_state_dict(
                state.random["ranks"][self.ranks.rank] if self.ranks.are_several else state.random
            )
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise damaged(place, error) from error
        load_weights(self._bare, place)
        for callback in self.callbacks:
            if callback.name in state.callbacks:
                callback.load_state_dict(state.callbacks[callback.name])
        self.step = self.run.step = state.step
        self._is_resumed = True

    def steps(self) -> Iterator[StepRecord]:
        """Train, yielding one record per step."""
        # First, so that an error about the anatomy of the model is raised before a store is created.
        options, taker = self.recording.profile_options, None
        if self.recording.spectra_every:
            n_tokens = options.get("n_snapshots", 2048) or 2048
            inputs = self.task.probe(n_tokens) if self.recording.probe is None else self.recording.probe
            taker = SpectraTaker(self._bare, inputs, options)
        was_training = self.model.training
        state, is_step_complete = "interrupted", True
        try:
            self.callbacks.begin(self.run)
            self._open_output()
        except BaseException:
            self.callbacks.end(self.run, is_broken=True)
            raise
        try:
            if self._is_resumed and self._output.path is not None:
                self._record_resumption(self._output.path)
            self._is_open = True
            for event in self._early_events:
                self._output.event(event)
            batches = self.task.stream(self.step)
            while self.step < self.plan.n_steps:
                every, is_last = self.recording.spectra_every, self.step == self.plan.n_steps - 1
                is_due = every is not None and (self.step % every == 0 or is_last)
                spectra = self._spectra(taker, self.step) if taker is not None and is_due else None
                batch = next(batches, None)
                if batch is None:
                    self._record_event("finished", message=f"The data ended after {self.step} steps.")
                    state = "finished"
                    return
                is_step_complete = False
                record = self._step(*(batch if self._has_own_batches else self.ranks.own_rows(batch)))
                is_step_complete = True
                if record.diverged and taker is not None and not is_due:
                    spectra = self._spectra(taker, record.step)
                record = self._recorded(record if spectra is None else replace(record, spectra=spectra))
                if record.diverged:
                    self._record_event("divergence", **evidence(record, self.plan, self._failed_at))
                if record.diverged and (self.plan.stops_at_divergence or record.cause == "non-finite"):
                    state = "diverged"
                    self._output.flush(state=state)  # before the yield, because the receiver may read the store
                    warn_of_divergence(record, self.plan, self._failed_at, self.recording.store)
                    yield record
                    return
                self.step += 1
                if self.recording.checkpoint_every and self.step % self.recording.checkpoint_every == 0:
                    self._output.flush()  # first, as a resumed run does not write rows before its checkpoint again
                    self._write_checkpoint(self.callbacks.states())
                for callback in self.callbacks:
                    callback.after_step(self.step)
                if self.run.stop_reason:
                    state = "stopped"
                    self._record_event("stopped", message=f"Stopped after {self.step} steps, {self.run.stop_reason}.")
                    yield record
                    return
                yield record
            state = "finished"
            self._record_event("finished", message=f"Finished after {self.step} steps.")
        except GeneratorExit:
            if state != "diverged":
                state = "stopped"
                self._record_event("stopped", message=f"Stopped after {self.step} steps.")
            raise
        finally:
            states: dict[str, dict[str, Any]] | None = None

            def write_last() -> None:
                if states is not None and is_step_complete and state in ("stopped", "finished"):
                    self._write_checkpoint(states)

            with ExitStack() as last:  # called from the last to the first, even if one of them raises an exception
                last.callback(self._output.close)
                last.callback(write_last)
                last.callback(self._output.flush, state=state)
                last.callback(self._restore_rates)
                last.callback(self.callbacks.end, self.run, is_broken=state == "interrupted")
                last.callback(self.model.train, was_training)
                states = self.callbacks.states()

    def _open_output(self) -> None:
        every, store = self.recording.flush_every, self.recording.store

        def opened() -> RunWriter | None:
            if self._is_resumed:
                return None if store is None else RunWriter.reopen(store, before_step=self.step)
            return open_writer(self.recording, self.configuration, overwrite=self._overwrite)

        writer = self.ranks.on_first(opened)
        self._output = self.run.output = RunOutput(writer, rows_per_block=every)

    def _record_resumption(self, store: Path) -> None:
        """Record that the run is resumed, and which previous rows were never written."""
        self._record_event("resumed", message=f"Resumed from the checkpoint of step {self.step}.")
        run = open_run(store)
        first = 0
        if "monitors" in run.children and (known := run.children["monitors"].to_dataset()["step"].values).size:
            first = int(known[-1]) + 1
        if first < self.step:  # disk errors prevented the rows from being written, but not the checkpoint
            n_rows = self.step - first
            message = Lost(first, self.step - 1, n_rows, "the run ended before they were written").message("monitors")
            self._record_event("gap", source="monitors", score=n_rows, message=message)

    def _divided(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state of the optimizer sharded as its parameters are."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        by_place = {
            place: {name: divided(value, parameters[place]) for name, value in kept.items()}
            for place, kept in state["state"].items()
        }
        return state | {"state": by_place}

    def _step(self, inputs: Any, targets: Any) -> StepRecord:
        """Run a forward and a backward pass, and the update unless the step diverged."""
        for callback in self.callbacks:
            callback.begin_step(self.step)
        scheduled = self.plan.rate_factor(self.step)
        factor, planned = self.callbacks.rate_factor(scheduled), self.callbacks.planned_factor(scheduled)
        self.run.planned_rates = [peak * planned for peak in self.peak_rates]
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * factor
        inputs, targets = on_device_of(self.model, inputs), on_device_of(self.model, targets)
        inputs, targets = self.callbacks.change_batch(inputs, targets)
        self.run.targets = targets
        if not all(part.training for part in parts_of(self.model)):  # as `train` takes longer
            self.model.train()
        with self.random.active():
            given, grad_norm, accuracy = self._measured_pass(inputs, targets)
            cause = self._cause(given.loss if given.is_finite else math.nan, grad_norm)
            if not cause or not (self.plan.stops_at_divergence or cause == "non-finite"):
                self._update(inputs, targets, given.loss, grad_norm)
            if cause == "non-finite" and self.recording.store is not None:  # on every rank
                total = partial(self._total, inputs, targets)
                place = place_of_failure(self.model, total, around=self.callbacks.around_pass)
                places = {rank: each for rank, each in enumerate(self.ranks.each(place)) if each}
                self._failed_at = next((f"Rank {rank}: {each}" for rank, each in places.items()), "")
                if not self.ranks.are_several or len(places) == self.ranks.n:
                    self._failed_at = places.get(0, "")
        return StepRecord(
            step=self.step,
            loss=given.loss,
            auxiliary_loss=given.auxiliary_loss,
            accuracy=accuracy,
            grad_norm=grad_norm,
            learning_rate=max(group["lr"] for group in self.optimizer.param_groups),
            cause=cause,
        )

    def _recorded(self, record: StepRecord) -> StepRecord:
        """Add the results of the callbacks to a record and pass it to the store."""
        numbers = self.callbacks.end_step(record.step, record.monitors())
        if self.callbacks.callbacks:
            outcomes = {callback.name: callback.outcome() for callback in self.callbacks}
            record = replace(
                record,
                numbers={name: value for name, value in numbers.items() if not hasattr(record, name)},
                outcomes={name: outcome for name, outcome in outcomes.items() if outcome is not None},
            )
        if record.spectra is not None:
            self._output.add_dataset("spectra", record.spectra)
        self._output.add("monitors", record.step, numbers)  # last, as it may complete a block of steps
        return record

    def _measured_pass(self, inputs: Any, targets: Tensor) -> tuple[PassResult, float, float]:
        """Run a forward and a backward pass; return result, gradient norm and accuracy, after one wait for all."""
        one_pass: PassFunction = self._forward_and_backward
        for callback in reversed(self.callbacks.callbacks):
            one_pass = partial(callback.run_pass, one_pass)
        given = one_pass(inputs, targets)
        # The accuracy is missing if it is not defined.
        grad_norm, accuracy = (*given.read(self._measures_of(given.logits, targets), self.ranks.means), math.nan)[:2]
        if not given.is_finite:
            self.optimizer.zero_grad(set_to_none=True)
        return given, grad_norm if given.is_finite else math.nan, accuracy

    def _measures_of(self, logits: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the gradient norm and, if it is defined, the accuracy, on the device."""
        accuracy = accuracy_on_device(logits, targets)
        return [self._grad_norm()] if accuracy is None else [self._grad_norm(), accuracy]

    def _forward_and_backward(self, inputs: Any, targets: Tensor) -> PassResult:
        """Compute losses and gradients; the backward pass starts before the loss is known to be finite."""
        with self.callbacks.around_pass():
            task_loss, auxiliary, logits = self._losses(self.model, inputs, targets)
            total = task_loss if auxiliary is None else task_loss + auxiliary
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(total).backward()
        return PassResult([[total, task_loss] if auxiliary is None else [total, task_loss, auxiliary]], logits)

    def _total(self, inputs: Any, targets: Tensor, model: nn.Module) -> Tensor:
        """Compute the loss with its auxiliary terms."""
        task_loss, auxiliary, _ = self._losses(model, inputs, targets)
        return task_loss if auxiliary is None else task_loss + auxiliary

    def _losses(self, model: nn.Module, inputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the task loss, the weighted auxiliary terms or None, and the logits."""
        dtype = PRECISIONS[self.plan.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            output = call_model(model, inputs)
            logits = prediction_of(output)
            task_loss = self.loss(logits, targets)
            auxiliary = self.callbacks.auxiliary_loss(task_loss, auxiliary_loss(bare(model), output))
            return task_loss, auxiliary, logits

    def _grad_norm(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.ranks.are_several or len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
            return whole(torch.nn.utils.get_total_norm(gradients))
        # The same for tensors of one kind, without sorting them.
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))

    def _cause(self, loss: float, grad_norm: float) -> str:
        if self.scaler.is_enabled() and math.isfinite(loss) and not math.isfinite(grad_norm):
            return ""  # overflow in float16: the scaler skips this update and reduces its scale
        return self.plan.cause_of_divergence(loss, grad_norm)

    def _update(self, inputs: Any, targets: Tensor, loss: float, grad_norm: float) -> None:
        for callback in self.callbacks:
            callback.before_update(self.step, {"loss": loss, "grad_norm": grad_norm})
        if self.plan.clip_norm is not None:  # created on the device, as a copy would wait for it
            self._clip(self.plan.clip_norm, torch.full((), grad_norm, device=self.device))
        if takes_several_passes(self.optimizer):
            # Optimizers return the value of the closure, a tensor or a number.
            closure: Callable[[], Any] = partial(self._closure, inputs, targets)
            self.optimizer.step(closure)
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _clip(self, largest: float, grad_norm: Tensor) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # In the default dtype also where the gradients are in bfloat16.
        norm = replicated(grad_norm.to(torch.get_default_dtype()), parameters[0])
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)

    def _closure(self, inputs: Any, targets: Tensor) -> Tensor:
        """Compute loss and gradients again, for an optimizer that evaluates them several times per step."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.callbacks.around_pass():
            total = self._total(inputs, targets, self.model)
            total.backward()
        if self.plan.clip_norm is not None and _is_two_pass(self.optimizer):  # LBFGS needs the unclipped gradient
            self._clip(self.plan.clip_norm, self._grad_norm())
        return total

    def _spectra(self, taker: SpectraTaker, step: int) -> xr.Dataset | None:
        """Compute spectra, or record an event with the reason why there are none and return None."""
        try:
            return taker.take(step)
        except SnapshotError as error:
            self._output.event(Event(step, "no spectra", message=str(error)))
            return None

    def _probe_loss(self, model: nn.Module) -> Tensor:
        if self._kept is None:
            self._kept = self.task.held_out(_PROBE_TOKENS)  # type: ignore[attr-defined]
        inputs, targets = (on_device_of(self.model, each) for each in self._kept)
        return self.loss(prediction_of(call_model(model, inputs)), targets)

    def _record_event(self, kind: str, **what: Any) -> None:
        self._output.event(Event(self.step, kind, **what))

    def _take_event(self, event: Event) -> None:
        if self._is_open:
            self._output.event(event)
        else:
            self._early_events.append(event)

    def _restore_rates(self) -> None:
        """Restore the peak learning rates of the optimizer, which may belong to the user."""
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak

    def _write_checkpoint(self, callback_states: dict[str, dict[str, Any]]) -> None:
        """Write a checkpoint if they are enabled; where it cannot be written, an event ``gap`` is recorded."""
        folder = self.recording.written_checkpoints
        if folder is None:
            return
        random = self.ranks.each(self.random.state_dict())
        state = TrainingState(
            step=self.step,
            configuration=self.configuration,
            optimizer=whole(self.optimizer.state_dict()),
            scaler=self.scaler.state_dict(),
            random={"ranks": random} if self.ranks.are_several else random[0],
            callbacks=callback_states,
        )
        weights = whole(self._bare.state_dict()) if self.ranks.are_several else None
        if self.ranks.rank:
            return
        try:
            write_checkpoint(self._bare, state, folder, weights)
        except StoreError as error:
            message = f"There is no checkpoint of step {state.step}: {error}"
            self._record_event("gap", source="checkpoint", message=message)
            if not self._lacks_checkpoint:  # reported once, until a checkpoint is written again
                words = "Training continues; earlier checkpoints are unchanged."
                warnings.warn(f"{message} {words}", RecordingWarning, stacklevel=2)
            self._lacks_checkpoint = True
        else:
            self._lacks_checkpoint = False


def _is_two_pass(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs a second gradient at another point, as SAM does in ``step(closure)``."""
    return hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")


def takes_several_passes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer computes further gradients within a step, by a closure."""
    return isinstance(optimizer, torch.optim.LBFGS) or _is_two_pass(optimizer)


def place_of_failure(model: nn.Module, loss_of: LossOf, *, around: Around) -> str:
    """Repeat a failed pass and describe where the first value that is not finite arises."""
    try:
        bad = first_bad_tensor(model, loss_of, around=around)
    except Exception as error:  # noqa: BLE001  (no error may prevent the record of the run)
        reason = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
        return f"Its origin is unknown ({reason.rstrip('.')})."
    return "" if bad is None else bad.sentence


def evidence(record: StepRecord, plan: TrainingPlan, place: str) -> dict[str, Any]:
    """Return source, score and message of the event of a divergence."""
    if record.cause == "loss":
        score, limit = record.loss, plan.loss_limit
        what = f"Loss {score:.4g} is above {limit:g}."
    elif record.cause == "grad_norm":
        score, limit = record.grad_norm, plan.grad_norm_limit
        what = f"Gradient norm {score:.4g} is above {limit:g}."
    else:
        score = record.loss if not math.isfinite(record.loss) else record.grad_norm
        what = "Loss or gradients are not finite."
    return {"source": record.cause, "score": score, "message": f"{what} {place}".rstrip()}


def warn_of_divergence(record: StepRecord, plan: TrainingPlan, place: str, store: object) -> None:
    """Warn whoever iterates over a run that it ends here, and name the next call; arguments as in `evidence`."""
    frame = sys._getframe(1).f_back  # of the generator, and of the code that asks it for the next step
    if frame is not None and str(frame.f_globals.get("__name__")).startswith("workbench."):
        return
    what = evidence(record, plan, place)["message"]
    call = "Train with store= and call wb.diagnose(store), which" if store is None else f"wb.diagnose({str(store)!r})"
    warnings.warn(f"The run diverged at step {record.step}. {what} {call} names the likely causes.", stacklevel=3)
