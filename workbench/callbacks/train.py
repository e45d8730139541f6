"""Train a model with all callbacks: the public function on top of `workbench.training.loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.callbacks.gathering import gather
from workbench.errors import OptionError
from workbench.models.losses import token_loss
from workbench.models.streaming import refuse_streamed
from workbench.tasks import as_task
from workbench.training.loop import Training
from workbench.training.recording import Recording
from workbench.training.training_plan import NO_OPTIONS, TrainingPlan
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from workbench.callbacks.actions import Actions
    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.baselines import Penalty
    from workbench.callbacks.faults import Fault
    from workbench.callbacks.kss import KSS
    from workbench.callbacks.recorder import Recorder
    from workbench.models.subject import Subject
    from workbench.training.step_record import StepRecord


def train(
    model: Subject | nn.Module,
    task: Any,
    *,
    n_steps: int,
    learning_rate: float | None = None,
    warmup: int = 0,
    schedule: str | Callable[[int], float] = "constant",
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "AdamW",
    optimizer_options: Mapping[str, Any] = NO_OPTIONS,
    clip_norm: float | None = None,
    precision: str = "float32",
    seed: int = 0,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    loss_limit: float = 50.0,
    grad_norm_limit: float = 500.0,
    stops_at_divergence: bool = True,
    store: Path | str | None = None,
    flush_every: int = 200,
    spectra_every: int | None = None,
    profile_options: Mapping[str, Any] = NO_OPTIONS,
    probe: Any = None,
    checkpoint_every: int | None = None,
    checkpoints: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[Any] | None = (),
    kss: KSS | None = None,
    penalties: Sequence[Penalty] | None = (),
    faults: Sequence[Fault] | None = (),
    recorder: Recorder | None = None,
    alarms: Alarms | None = None,
    actions: Actions | None = None,
) -> Iterator[StepRecord]:
    """Train a model, one record per step.

    The run stops when the caller stops iterating; it ends by itself after ``n_steps``, or if it diverges (RKSP's label:
    loss above 50 or gradient norm above 500; a value that is not finite counts). The update of the diverged step is not
    applied. Random numbers within the model come from the run's own stream, so the global random states stay
    unchanged, and runs that alternate in one process give the same results as alone.

    Args:
        model: Any module that returns logits, or an output with ``logits``; or its subject. It is trained in place,
            on its device. A method ``auxiliary_loss()`` (zoo), or an ``aux_loss`` in the output (Hugging Face), is
            added to the loss.
        task: Task from ``wb.tasks``, a DataLoader, a dataset or an iterable of batches; see `workbench.tasks.as_task`.
        n_steps: Number of optimizer steps.
        learning_rate: Peak rate, reached after the warm-up; None: 1e-3, or that of a ready optimizer.
        warmup: Number of steps over which the rate rises linearly to its peak.
        schedule: Schedule after the warm-up: ``"constant"``; ``"cosine"`` or ``"linear"`` down to 0 at ``n_steps``;
            ``"wsd"``, constant and then linear down to 0 over the last fifth of the steps (Hägele et al.
            2024, arXiv:2405.18392); or a function from the step, counted from 0, to the share of the peak rate.
        optimizer: Name of a class in ``torch.optim``, in any spelling of case; a function from the parameters to an
            optimizer; or a ready optimizer over the model's parameters. ``"Muon"`` updates the matrices of the blocks
            by Muon and all else by AdamW, see `workbench.training.muon`.
        optimizer_options: Further arguments of a named optimizer, such as ``{"weight_decay": 0.1, "betas": (0.9,
            0.95)}``.
        clip_norm: Largest norm of all gradients together; larger ones are scaled down. None: no clipping.
        precision: ``"float32"``, or ``"bfloat16"`` or ``"float16"`` for automatic mixed precision.
        seed: Seed of all randomness in training itself, such as dropout.
        loss: Function from logits and targets to a 0-dim tensor; of a model whose output is no tensor and has no
            ``logits``, from the whole output and targets.
        loss_limit: A loss above this is a divergence (RKSP's label: 50).
        grad_norm_limit: A norm of all gradients, before clipping, above this is a divergence (RKSP's label: 500).
        stops_at_divergence: Whether divergence ends the run; otherwise it continues while everything is finite.
        store: Path of the run's Zarr store; None: nothing is written.
        flush_every: Steps in a block; a killed process loses at most the last block, as long as the disk works.
        spectra_every: Steps between spectra of the residual stream, from step 0 on; also taken at the last step and
            at divergence; None: never.
        profile_options: Further arguments of `workbench.profile`, such as ``{"n_snapshots": 512}``.
        probe: Inputs to take spectra on; None: the task's own fixed ones.
        checkpoint_every: Steps between checkpoints; None: none.
        checkpoints: Folder of the checkpoints; None: next to the store, ``run.zarr`` -> ``run.checkpoints``.
        resume: Whether to continue from the last checkpoint; parameters, optimizer, data and random numbers continue as
            if the run had never stopped.
        overwrite: Whether to replace the run at ``store``, with its checkpoints.
        callbacks: Callbacks of the run: each a `workbench.Callback` of your own, or any of the following;
            None, here and below: none.
        kss: Koopman Spectral Shaping; its controls may be changed during the run. A resumed run loads the
            controls of its checkpoint.
        penalties: Terms added to the loss that depend on the residual stream; see `workbench.baselines`.
        faults: Faults from `workbench.faults`, at most one of a kind; each may be switched on and off during the run. A
            resumed run loads the switches of its checkpoint.
        recorder: Recorder that measures the mechanism during the run; its parts go into the run's own store.
        alarms: Alarms on what the recorder measures; they are in the events and in each `StepRecord`.
        actions: Actions that alarms may trigger; None: none. After a roll-back steps count on: the step is the number
            of updates made, and the event gives the step of the restored parameters.

    Returns:
        A generator of `StepRecord`. Closing it writes all pending rows and, if checkpoints are on, one more.

    Raises:
        OptionError: If a setting is impossible, before anything is done. When it begins, if a fault cannot act on this
            model, or when a batch is met that it cannot act on.
        AnatomyError: When it begins, if spectra or penalties are asked for and the model's blocks cannot be found.
        StoreError: If the store is taken, or holds a run of another configuration; when it begins, if it or the folder
            of the checkpoints cannot be written. Later disk errors give a `RecordingWarning`.
        CheckpointError: If there is nothing to resume from, or it is damaged.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(norm="none", d_model=16, n_layers=2, n_heads=2)
        >>> task = wb.tasks.associative_recall()  # of 256 tokens: the loss begins at ln 256
        >>> for record in wb.train(model, task, n_steps=3, learning_rate=1e-2, warmup=2):
        ...     print(record.step, round(record.loss, 1), record.learning_rate)
        0 5.5 0.005
        1 5.5 0.01
        2 5.5 0.01
        >>> records = list(wb.train(model, task, n_steps=50, learning_rate=10.0))
        >>> len(records) < 50, records[-1].cause != ""  # it ended early, as it diverged
        (True, True)
    """
    plan = TrainingPlan(
        n_steps=n_steps,
        learning_rate=learning_rate,
        warmup=warmup,
        schedule=schedule,
        optimizer=optimizer,
        optimizer_options=dict(optimizer_options),
        clip_norm=clip_norm,
        precision=precision,
        seed=seed,
        loss_limit=loss_limit,
        grad_norm_limit=grad_norm_limit,
        stops_at_divergence=stops_at_divergence,
    )
    recording = Recording(
        store=store,
        flush_every=flush_every,
        spectra_every=spectra_every,
        profile_options=dict(profile_options),
        probe=probe,
        checkpoint_every=checkpoint_every,
        checkpoints=checkpoints,
    )
    gathered = gather(
        callbacks,
        kss=kss,
        penalties=penalties,
        faults=faults,
        recorder=recorder,
        alarms=alarms,
        actions=actions,
        seed=seed,
        stack=profile_options.get("stack"),
    )
    if spectra_every and any(_takes_spectra(callback) for callback in gathered):
        raise OptionError("Both spectra_every= and the recorder would write the run's spectra; ask one of them.")
    refuse_streamed(module_of(model), "Training")
    training = Training(
        module_of(model), as_task(task), plan, recording, loss, gathered, resume=resume, overwrite=overwrite
    )
    return training.steps()


def _takes_spectra(callback: Any) -> bool:
    recorder = getattr(callback, "recorder", None)
    return recorder is not None and recorder.every["spectra"] is not None
