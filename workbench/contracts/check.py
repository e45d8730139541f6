"""Checks of a training before compute is spent: is it wired as its author believes?"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.contracts import data as data
from workbench.contracts import dependence as dependence
from workbench.contracts import gradients as gradients
from workbench.contracts import learning as learning
from workbench.contracts import modes as modes
from workbench.contracts import numbers as numbers
from workbench.contracts import ranks as ranks
from workbench.contracts import updates as updates
from workbench.contracts.lab import CONTRACTS, all_results, show_progress
from workbench.contracts.observer import Observer
from workbench.contracts.results import CheckReport
from workbench.errors import OptionError
from workbench.models.calling import bare, call_model
from workbench.models.losses import loss_in
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt

#: Updates of a check that has a model, an optimizer and batches.
_N_UPDATES = 4


@checked
def check(
    model: Any,
    optimizer: Any = None,
    batches: Any = None,
    loss: Callable[..., Tensor] | None = None,
    *,
    updates: PositiveInt = _N_UPDATES,
    accept: Sequence[str] = (),
    progress: bool | Callable[[str], None] = True,
) -> CheckReport:
    """Test whether a training is wired as its author believes: each contract by a short experiment on copies.

    A few updates are made with the optimizer, then the experiments. Parameters, the optimizer, gradients, modes and
    random states are restored.

    Args:
        model: Module that the loop calls; or a ``Trainer`` of Hugging Face or of Lightning, before it trains.
        optimizer: Its optimizer, or a list of them; None for a ``Trainer`` of Hugging Face, the module for one of
            Lightning.
        batches: Batches of the training, a list or a DataLoader: arguments of the model, or whatever ``loss`` expects.
            For Lightning, what ``fit`` takes; None if the module has its own.
        loss: Function of model and batch that returns the loss; None if the output of the model has a ``loss``.
        updates: Number of updates.
        accept: Ids of contracts that are broken on purpose; they are shown as accepted.
        progress: Whether to show progress; or a function that receives each progress text, whose exceptions abort the
            check.

    Returns:
        Results by contract, printed as a table.

    Raises:
        OptionError: If there is no loss, no batch, or ``accept`` names no contract.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> tokens = torch.randint(0, 16, (4, 4, 9), generator=torch.Generator().manual_seed(0))
        >>> def loss(model, batch):
        ...     logits = model(batch[:, :-1])
        ...     return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        >>> report = wb.check(model, optimizer, list(tokens), loss)
        >>> report["causal"].status.value, report["labels_aligned"].status.value
        ('passed', 'passed')

    See Also:
        `workbench.watch`: Watches the training while it runs.
        `workbench.find_rate`: Finds its learning rate.
    """
    unknown = [each for each in accept if each not in CONTRACTS]
    if unknown:
        raise OptionError.of("accept", unknown[0], f"ids of contracts: {', '.join(CONTRACTS)}")
    start = time.perf_counter()
    found: list[Any] = []

    with show_progress(progress) as bar:
        bar.describe(f"{updates} updates")

        def ready(seen: Observer) -> None:
            found.extend(all_results(seen, tuple(accept), bar))

        if hasattr(model, "train") and hasattr(model, "get_train_dataloader"):
            seen = _observe_trainer(model, updates, ready)
        elif hasattr(model, "fit") and hasattr(model, "strategy"):
            seen = _observe_lightning(model, optimizer, batches, updates, ready)
        else:
            seen = _observe_loop(model, optimizer, batches, loss, updates, ready)
    return CheckReport(found, seen.n_done, time.perf_counter() - start, [each.loss for each in seen.passes])


def _observe_loop(
    model: Any,
    optimizer: Any,
    batches: Any,
    loss: Callable[..., Tensor] | None,
    updates: int,
    ready: Callable[[Observer], None],
) -> Observer:
    """Make some updates as a plain loop does, then the experiments, and restore everything."""
    if not isinstance(model, nn.Module):
        raise OptionError.of("model", model, "a module, or a Trainer of Hugging Face or Lightning before it trains")
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise OptionError.of("optimizer", optimizer, "an optimizer of the model, or a list of them")
    if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
        raise OptionError.of("batches", batches, "a list of batches or a DataLoader, which can be read again")

    def loss_of(batch: Any) -> Tensor:
        if loss is not None:
            return loss(model, batch)
        value = loss_in(call_model(model, batch))
        if value is None:
            raise OptionError("The output of the model has no loss; pass loss=, a function of model and batch.")
        return value

    with restored(model, optimizers):
        seen = Observer(updates, ready)
        with seen:
            seen.sees_loop = False
            seen.see_compiled(model)
            given = [*islice(batches, updates)]
            if not given:
                raise OptionError("The batches are empty; pass at least one.")
            for i in range(updates):
                value = loss_of(given[i % len(given)])
                for each in optimizers:
                    each.zero_grad()
                value.backward()
                for each in optimizers:
                    each.step()
            seen.finish()
    return seen


def _observe_trainer(trainer: Any, updates: int, ready: Callable[[Observer], None]) -> Observer:
    """Train some updates with a ``Trainer``, then make the experiments, and restore everything."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop |= state.global_step >= updates
            return control

    seen, stop, args = Observer(updates, ready), Stop(), trainer.args
    names = ("save_strategy", "eval_strategy", "logging_strategy", "load_best_model_at_end", "disable_tqdm")
    before = {name: getattr(args, name) for name in names}
    kept = {name: getattr(trainer, name) for name in ("optimizer", "lr_scheduler", "state", "control")}
    callbacks = list(trainer.callback_handler.callbacks)
    with restored(trainer.model, [each for each in [trainer.optimizer] if each is not None]):
        try:
            for name in names[:3]:
                setattr(args, name, type(before[name])("no"))
            args.load_best_model_at_end, args.disable_tqdm = False, True
            trainer.callback_handler.callbacks = [
                each for each in callbacks if type(each).__name__ == "DefaultFlowCallback"
            ]
            trainer.add_callback(stop)
            with seen:
                trainer.train()
                seen.finish()
        finally:
            for name, value in before.items():
                setattr(args, name, value)
            trainer.callback_handler.callbacks = callbacks
            for name, value in kept.items():
                setattr(trainer, name, value)
    return seen


def _observe_lightning(
    trainer: Any, module: Any, batches: Any, updates: int, ready: Callable[[Observer], None]
) -> Observer:
    """Train some updates with another Trainer that has the settings of the given one, and restore the module."""
    if not isinstance(module, nn.Module) or not hasattr(module, "training_step"):
        raise OptionError.of("optimizer", module, "the module of the Trainer: wb.check(trainer, module, loader)")
    given = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "precision", "accelerator")
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"),
        False,
    )
    own = type(trainer)(
        **{name: getattr(trainer, name) for name in given},
        **off,
        devices=1,
        max_steps=updates,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    seen, attached = Observer(updates, ready), module._trainer
    with restored(module, []):
        try:
            with seen:
                own.fit(module, batches)
                seen.finish()
        finally:
            module._trainer = attached
    return seen


@contextmanager
def restored(model: nn.Module, optimizers: Sequence[Any]) -> Iterator[None]:
    """Restore parameters, buffers, gradients, modes, optimizers and random states after a few updates."""
    inner = bare(model)
    tensors = [*inner.parameters(), *inner.buffers()]
    values = [(t, t.detach().clone()) for t in tensors]
    gradients = [(p, p.grad) for p in inner.parameters()]
    for p in inner.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    modes = [(module, module.training) for module in inner.modules()]
    states = [(each, copy.deepcopy(each.state_dict())) for each in optimizers]
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient
        for module, mode in modes:
            module.training = mode
        for each, state in states:
            each.load_state_dict(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
