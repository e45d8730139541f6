"""The public function that trains a model, and the callbacks of a run in the order in which they act."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from workbench.callbacks.alarms import Alarms
from workbench.callbacks.baselines import Penalty
from workbench.callbacks.baselines.penalties import PenaltyTerms
from workbench.callbacks.faults import Fault, Injection
from workbench.callbacks.guard import Actions, Guard
from workbench.callbacks.kss import KSS, Shaper
from workbench.callbacks.recorder import Recorder
from workbench.errors import OptionError
from workbench.models.losses import token_loss
from workbench.models.streaming import require_in_memory
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt, Remedy
from workbench.tasks import as_task
from workbench.training.callback import Callback
from workbench.training.loop import Training
from workbench.training.recording import Recording
from workbench.training.training_plan import NO_OPTIONS, TrainingOptions, TrainingPlan, takes_settings
from workbench.zoo.module_of import module_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workbench.models.subject import Subject
    from workbench.training.callback import StepRecord


AnyCallback = Callback | KSS | Fault | Penalty | Recorder | Alarms | Actions


def gather(
    callbacks: Sequence[AnyCallback] | None,
    *,
    kss: KSS | None = None,
    faults: Sequence[Fault] | None = (),
    penalties: Sequence[Penalty] | None = (),
    recorder: Recorder | None = None,
    alarms: Alarms | None = None,
    actions: Actions | None = None,
    seed: int = 0,
    stack: str | None = None,
) -> list[Callback]:
    """Return the callbacks of one run, from the arguments of `workbench.train`.

    KSS acts first, as it measures the state before the step. Faults and penalties follow, which change the loss, then
    the user's callbacks, in their order. The recorder with its alarms and actions is last, so that it receives the
    output of all others.
    """
    found: dict[type, list[Any]] = {kind: [] for kind in (KSS, Fault, Penalty, Recorder, Alarms, Actions)}
    of_user: list[Any] = []
    for callback in callbacks or ():
        kind = next((kind for kind in found if isinstance(callback, kind)), None)
        (of_user if kind is None else found[kind]).append(callback)
    for kind, given in ((KSS, kss), (Recorder, recorder), (Alarms, alarms), (Actions, actions)):
        name = kind.__name__
        found[kind] = [*([] if given is None else [given]), *found[kind]]
        if (n_found := len(found[kind])) > 1:
            raise OptionError(f"A run takes at most one wb.{name}, got {n_found}; remove the others.")
    kss, recorder, alarms, actions = (next(iter(found[kind]), None) for kind in (KSS, Recorder, Alarms, Actions))
    injection = Injection([*(faults or ()), *found[Fault]], seed=seed)
    terms = PenaltyTerms([*(penalties or ()), *found[Penalty]], seed=seed, stack=stack)
    if recorder is not None and recorder.alarms is not None:
        if alarms is not None:
            raise OptionError("alarms was passed, but the recorder has alarms already; pass one of them.")
        alarms = recorder.alarms
    if alarms is not None and recorder is None:
        raise OptionError("alarms observe what a recorder measures, but there is none; add wb.Recorder().")
    if actions is not None and alarms is None:
        raise OptionError("actions respond to alarms, but there are none; add wb.Alarms().")
    ordered: list[Callback | None] = [
        Shaper(kss) if kss is not None else None,
        injection if injection.describe() else None,
        terms if terms.penalties else None,
        *of_user,
        None if recorder is None else Guard(recorder, alarms, actions, injection),
    ]
    gathered = [callback for callback in ordered if callback is not None]
    names = [callback.name for callback in gathered]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError(f"Two callbacks have the name '{twice[0]}'; rename one of them.")
    return gathered


@checked
@takes_settings()
def train(
    model: Subject | nn.Module,
    task: Any,
    *,
    n_steps: PositiveInt,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    store: Path | str | None = None,
    flush_every: PositiveInt = 200,
    spectra_every: PositiveInt | None = None,
    profile_options: Mapping[str, Any] = NO_OPTIONS,
    probe: Any = None,
    checkpoint_every: PositiveInt | None = None,
    checkpoints: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[AnyCallback] | None = (),
    kss: KSS | None = None,
    penalties: Sequence[Penalty] | None = (),
    faults: Sequence[Fault] | None = (),
    recorder: Annotated[Recorder | None, Remedy("pass recorder=wb.Recorder(), and the path as store=")] = None,
    alarms: Alarms | None = None,
    actions: Actions | None = None,
    **settings: Unpack[TrainingOptions],
) -> Iterator[StepRecord]:
    """Train a model and yield one record per step.

    Training stops when the caller stops iterating. It ends after ``n_steps``, or when the run diverges (RKSP's label:
    loss above 50, gradient norm above 500, or a value that is not finite). The update of the step that diverged is not
    applied. Random numbers within the model come from a separate stream of the run. The global random states are
    therefore unchanged, and runs that alternate in one process yield the same results as when they run alone.

    Args:
        model: Module that returns logits, or an output with ``logits``; or its subject. It is trained in place, on its
            device. The result of its method ``auxiliary_loss()`` (zoo), or ``aux_loss`` in its output (Hugging Face),
            is added to the loss.
        task: Task from ``wb.tasks``, a DataLoader, a dataset or an iterable of batches; see `workbench.tasks.as_task`.
        n_steps: Number of optimizer steps.
        learning_rate: Peak learning rate, reached after the warm-up. None uses 1e-3, or the rate of an optimizer
            object.
        warmup: Number of steps over which the learning rate rises linearly to its peak.
        schedule: Schedule after the warm-up: ``"constant"``; ``"cosine"`` or ``"linear"`` decay to 0 at ``n_steps``;
            ``"wsd"``, constant and then linear decay to 0 over the last fifth of the steps (Hägele et al. 2024,
            arXiv:2405.18392); or a function from the step, counted from 0, to the fraction of the peak learning rate.
        optimizer: Name of a class in ``torch.optim``, in upper or lower case; a function from the parameters to an
            optimizer; or an optimizer over the parameters of the model. ``"Muon"`` updates the matrices of the blocks
            by Muon and all other parameters by AdamW; see `workbench.training.muon`.
        optimizer_options: Further arguments of a named optimizer, such as ``{"weight_decay": 0.1, "betas": (0.9,
            0.95)}``.
        clip_norm: Maximum norm of all gradients together, to which larger ones are scaled down. None disables
            clipping.
        precision: ``"float32"``, or ``"bfloat16"`` or ``"float16"`` for automatic mixed precision.
        seed: Seed of all randomness in training itself, such as dropout.
        loss: Function from logits and targets to a 0-dim tensor. If the output of the model is not a tensor and has no
            ``logits``, the function receives the complete output instead of the logits.
        loss_limit: Loss above which the run has diverged (RKSP's label: 50).
        grad_norm_limit: Norm of all gradients, before clipping, above which the run has diverged (RKSP's label: 500).
        stops_at_divergence: Whether divergence ends the run; otherwise it continues while all values are finite.
        store: Path of the run's Zarr store, or a URL as in `workbench.watch`; None writes nothing.
        flush_every: Steps per block of the store. A killed process loses at most the last block, provided that the
            disk works.
        spectra_every: Steps between spectra of the residual stream, from step 0 on; None takes none. Spectra are also
            taken at the last step and at divergence.
        profile_options: Further arguments of `workbench.profile`, such as ``{"n_snapshots": 512}``.
        probe: Inputs for the spectra; None uses the fixed probe of the task.
        checkpoint_every: Steps between checkpoints; None writes none.
        checkpoints: Folder of the checkpoints; None places it next to the store, ``run.zarr`` -> ``run.checkpoints``.
        resume: Whether to continue from the last checkpoint. Parameters, optimizer, data and random numbers continue as
            if the run had never been interrupted.
        overwrite: Whether to replace the run at ``store`` and its checkpoints.
        callbacks: Callbacks of the run: subclasses of `workbench.Callback`, or objects of the kinds below. This and
            the following arguments may be None.
        kss: Koopman Spectral Shaping. Its controls may be changed during the run. A resumed run loads the controls from
            its checkpoint.
        penalties: Penalties on the residual stream, which are added to the loss; see `workbench.baselines`.
        faults: Faults from `workbench.faults`, at most one of each kind. Each may be switched on and off during the
            run. A resumed run loads the switches from its checkpoint.
        recorder: Recorder, which adds its measurements to the store of the run.
        alarms: Alarms on what the recorder measures. They are recorded as events and in each `StepRecord`.
        actions: Actions that the alarms may trigger. After a roll-back the step counter continues: a step is the number
            of updates made, and the event names the step of the restored parameters.

    Returns:
        A generator of `StepRecord`. Closing it writes all pending rows and, if checkpoints are enabled, one more
        checkpoint.

    Raises:
        OptionError: If a setting is invalid, before anything is done. When training begins, if a fault cannot act on
            this model; later, if a fault cannot act on a batch.
        AnatomyError: When training begins, if spectra or penalties are requested and the blocks of the model cannot be
            found.
        StoreError: If the store exists, or holds a run of another configuration. When training begins, if the store or
            the folder of the checkpoints cannot be written. Later disk errors issue a `RecordingWarning`.
        CheckpointError: If there is no checkpoint to resume from, or it is damaged.

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

    See Also:
        `workbench.TrainingPlan`: The same settings as an object.
        `workbench.Callback`: Base class of user-defined callbacks.
        `workbench.open_run`: Opens the recorded run.
    """
    plan = TrainingPlan(n_steps=n_steps, **settings)
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
        seed=plan.seed,
        stack=profile_options.get("stack"),
    )
    recorders = [found for each in gathered if (found := getattr(each, "recorder", None)) is not None]
    if spectra_every and any(each.every["spectra"] is not None for each in recorders):
        raise OptionError("The recorder has spectra too; set spectra_every=None, or Recorder(every={'spectra': None}).")
    require_in_memory(module_of(model), "Training")
    training = Training(
        module_of(model), as_task(task), plan, recording, loss, gathered, resume=resume, overwrite=overwrite
    )
    return training.steps()
