"""Execution of one run of a sweep, from its settings to its row."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from workbench.callbacks.train import train
from workbench.models.calling import call_model
from workbench.models.losses import token_loss
from workbench.models.probing import eval_mode
from workbench.schema.sweeps import LOSS_WINDOW
from workbench.sweeps.case_measures import measure_row
from workbench.sweeps.run_settings import RunSettings
from workbench.tasks.target_frequencies import frequency_loss
from workbench.tasks.task import SeededTask
from workbench.training.step_record import StepRecord

#: Steps from which the predictors of RKSP Table 2 are computed.
_GRAD_NORM_STEP, _SPIKE_STEPS = 100, 500
#: A loss is a spike if it exceeds the mean of the preceding window by this many standard deviations. The paper states
#: no rule; with 3 deviations, noise alone causes about one spike in a thousand steps.
_SPIKE_WINDOW, _SPIKE_DEVIATIONS = 20, 3.0
#: Number of token states of the held-out examples.
N_HELD_OUT = 4096


def make_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a new model, train it, and return its row.

    The computation uses one thread, so the same settings yield the same row on every worker of one machine type.

    Args:
        settings: Settings, as returned by `RunSettings.as_dict`.

    Returns:
        The values of the row by name, as defined in `workbench.schema.sweeps`.

    Example:
        >>> import workbench as wb
        >>> task = {"name": "random_tokens", "length": 8, "vocab_size": 16, "batch_size": 4}
        >>> model = {"d_model": 16, "n_layers": 2, "n_heads": 2}
        >>> runs = wb.sweeps.grid({"tiny": model}, learning_rate=[0.001], n_steps=2, task=task, n_snapshots=64)
        >>> row = wb.sweeps.make_run(runs[0].as_dict())
        >>> row["has_diverged"]
        False

    See Also:
        `workbench.sweeps.run`: Executes many runs in parallel.
    """
    start = time.monotonic()
    run = RunSettings.from_dict(settings)
    plan = run.plan()
    with _one_thread():
        model, task = run.make_model(), run.make_task()
        is_measured = run.n_snapshots > 0
        row = measure_row(
            model, task, plan, n_snapshots=run.n_snapshots, takes_gradients=is_measured, runs_pilot=is_measured
        )
        training: dict[str, Any] = {name: getattr(plan, name) for name in settings["training"]}
        training |= {"optimizer_options": plan.optimizer_options, "seed": run.seed}
        records, evaluations = [], []
        for record in train(model, task, kss=run.make_kss(), **training):
            records.append(record)
            is_due = run.n_evaluations and not (record.step + 1) % (plan.n_steps // run.n_evaluations)
            if is_due and math.isfinite(record.loss):
                evaluations.append((record.step + 1, held_out_loss(model, task)))
        trivial = trivial_loss(task) if run.n_evaluations else math.nan
    row |= run.describe() | outcome(records) | loss_curves(records, evaluations) | {"trivial_loss": trivial}
    return row | {"seconds": time.monotonic() - start}


def outcome(records: list[StepRecord]) -> dict[str, Any]:
    """Return the outcome of a run, with the names of ``schema.sweeps.OUTCOMES``, without the duration."""
    loss = np.array([record.loss for record in records])
    grad_norm = np.array([record.grad_norm for record in records])
    last, diverged = records[-1], next((record for record in records if record.diverged), None)
    n_last = max(1, len(records) // 8)
    grad_norm = np.where(np.isnan(grad_norm), np.inf, grad_norm)
    known = grad_norm[1 : _GRAD_NORM_STEP + 1]
    with np.errstate(invalid="ignore", over="ignore"):
        variance = float(np.var(known)) if len(known) and np.isfinite(known).all() else math.inf
    return {
        "grad_norm_step_100": float(grad_norm[min(_GRAD_NORM_STEP, len(records) - 1)]),
        "grad_norm_variance": variance,
        "n_loss_spikes": count_spikes(loss[: _SPIKE_STEPS + 1]),
        "has_diverged": diverged is not None,
        "cause": "" if diverged is None else diverged.cause,
        "divergence_step": math.nan if diverged is None else float(diverged.step),
        "final_loss": last.loss if math.isfinite(last.loss) else math.nan,
        "accuracy": math.nan
        if diverged is not None
        else float(np.mean([record.accuracy for record in records[-n_last:]])),
    }


def loss_curves(records: list[StepRecord], evaluations: list[tuple[int, float]]) -> dict[str, np.ndarray]:
    """Return the losses along a run, with the names of ``schema.sweeps.CURVES``.

    Args:
        records: Record of each update.
        evaluations: Number of updates before each evaluation, and the held-out loss.

    Returns:
        Arrays of shapes (window,) and (evaluation,); infinite where a loss is not finite.
    """
    losses = np.array([record.loss for record in records])
    n_windows = -(-len(losses) // LOSS_WINDOW)
    windows = [losses[i * LOSS_WINDOW : (i + 1) * LOSS_WINDOW].mean() for i in range(n_windows)]
    steps, held_out = np.array(evaluations, dtype=float).T if evaluations else np.full((2, 1), math.nan)
    training = np.array(windows, dtype=float)
    return {
        "training_loss": np.where(np.isfinite(training), training, np.inf),
        "held_out_loss": np.where(np.isfinite(held_out) | np.isnan(steps), held_out, np.inf),
        "evaluation_step": steps,
    }


@torch.no_grad()
def held_out_loss(model: nn.Module, task: SeededTask) -> float:
    """Return the loss on held-out examples of a task in eval mode, in nats.

    Args:
        model: The model; its training mode is restored.
        task: One of the workbench's tasks.
    """
    inputs, targets = task.held_out(N_HELD_OUT)
    with eval_mode(model):
        output = call_model(model, inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return float(token_loss(logits, targets))


def trivial_loss(task: SeededTask) -> float:
    """Return the held-out loss of the predictor that knows only the frequencies of the training targets, in nats."""
    _, targets = task.held_out(N_HELD_OUT)
    return frequency_loss(task, targets)


def count_spikes(loss: np.ndarray) -> int:
    """Count the steps whose loss exceeds the mean of the previous 20 losses by more than three standard deviations.

    RKSP counts loss spikes without defining them; this definition is the workbench's own.

    Args:
        loss: Loss of each step, in nats; a value that is not finite counts as a spike.
    """
    loss = np.asarray(loss, dtype=float)
    if not len(loss) > _SPIKE_WINDOW:
        return int(np.count_nonzero(~np.isfinite(loss)))
    before = np.lib.stride_tricks.sliding_window_view(loss, _SPIKE_WINDOW)[:-1]
    now = loss[_SPIKE_WINDOW:]
    with np.errstate(invalid="ignore", over="ignore"):
        is_high = now > before.mean(-1) + _SPIKE_DEVIATIONS * before.std(-1)
    return int(np.count_nonzero(is_high | ~np.isfinite(now)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread within the ``with`` block."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(n_threads)
