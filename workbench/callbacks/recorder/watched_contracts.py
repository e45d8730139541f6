"""Contracts of a training that is watched: its first updates are observed, and experiments are made between later ones.

Contracts that need no pass of the model are tested after the first updates; of the others, one after each update while
their time allows. What would need a training that waits is left to ``workbench check``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from workbench.callbacks.recorder.joint_optimizer import JointOptimizer
from workbench.callbacks.recorder.options import of_each_rank
from workbench.contracts.check import CONTRACTS
from workbench.contracts.lab import APART, Lab, PassNeededError, not_tested, result_of
from workbench.contracts.observer import Observer
from workbench.contracts.results import CheckReport, Result, Status
from workbench.contracts.script import merged
from workbench.io import run_output
from workbench.models.calling import bare, is_shared, is_split
from workbench.models.probing import without_own_hooks

#: Updates that are observed.
N_UPDATES = 4
#: Durations of a step that experiments with passes may take, whatever the budget.
_FREE = 10
#: Most bytes of parameters that are copied to float32 for a pass.
_MOST_BYTES = 1 << 28
_LEFT = "It is not tested beside a training that goes on; workbench check -- python train.py tests it."


class WatchedContracts:
    """Tests the contracts of one training.

    Args:
        model: Module that the loop calls.
        optimizer: Its optimizers.
        is_own: Whether passes of the moment are those of the watch itself.
    """

    def __init__(self, model: nn.Module, optimizer: JointOptimizer, is_own: Callable[[], bool]) -> None:
        self._model, self._optimizer = weakref.ref(bare(model)), weakref.ref(optimizer)
        self._waiting, self._found = list(CONTRACTS), dict[str, Result]()
        self._seen: _WatchObserver | None = None
        self._lab: Lab | None = None
        self._n_updates, self._losses, self._seconds = 0, list[float](), 0.0
        self._of_passes = 0.0
        self._n_after, self._is_joint = 0, is_shared()  # whether all ranks have yet to compare their results
        is_observed = torch.autograd.backward.__module__ == Observer.__module__  # by a check, or another watch
        if is_observed or threading.current_thread() is not threading.main_thread():
            self._waiting.clear()
        elif any(_is_compiled(each) for each in bare(model).modules()) or _is_compiled(model):
            self._leave_all(f"The model is compiled, and the observation would compile it again. {_LEFT}")
        else:
            self._seen = _WatchObserver(weakref.WeakMethod(self._ready), is_own)
            self._seen.__enter__()

    @property
    def report(self) -> CheckReport | None:
        """Results so far; None before there are any."""
        if not self._found:
            return None
        left = [replace(not_tested(_LEFT), id=id) for id in self._waiting]
        return CheckReport([*self._found.values(), *left], self._n_updates, self._seconds, self._losses)

    @property
    def is_due(self) -> bool:
        """Whether `test` is to be called after an update."""
        return self._lab is not None or self._is_joint

    def end(self) -> None:
        """Remove all hooks, and release what was observed."""
        if self._seen is not None:
            self._seen.leave()
        self._seen = self._lab = None

    def test(self, step_seconds: float, *, is_within_budget: bool) -> list[Result]:
        """Make some experiments after an update, and return the contracts that turn out to be broken.

        Args:
            step_seconds: Duration of a step; 0 if unknown.
            is_within_budget: Whether the observation has taken less than its budget so far.
        """
        self._n_after += 1
        before, begin = set(self._found), run_output.stopwatch()
        if self._is_joint:
            if self._n_after > N_UPDATES:  # on all ranks
                self._test_on_ranks()
        elif self._lab is not None and not self._lab.may_act:
            self._test_without_passes(self._lab, begin + step_seconds)
        elif self._lab is not None and (is_within_budget or self._of_passes <= _FREE * step_seconds):
            self._test_with_passes(self._lab)
            self._of_passes += run_output.stopwatch() - begin
        self._seconds += run_output.stopwatch() - begin
        return [each for id, each in self._found.items() if id not in before and each.status is Status.FAILED]

    def _ready(self, seen: Observer) -> None:
        """Take over what was observed."""
        self._seen, model, optimizer = None, self._model(), self._optimizer()
        if model is None or optimizer is None:
            return
        self._n_updates, self._losses = seen.n_done, [each.loss for each in seen.passes]
        if isinstance(seen, _WatchObserver) and seen.error:
            self._leave_all(f"The observation ended with {seen.error}. {_LEFT}")
        elif _has_others(seen, {id(p) for p in (*model.parameters(), *optimizer.parameters)}):
            self._leave_all(f"Another model is trained in the same process. {_LEFT}")
        else:
            self._lab = Lab(seen, may_act=False)
            short = [p for p in model.parameters() if p.is_floating_point() and p.element_size() < 4]
            self._lab.copies_to_float32 = sum(4 * p.numel() for p in short) <= _MOST_BYTES
            self._first = list(CONTRACTS)

    def _test_without_passes(self, lab: Lab, until: float) -> None:
        """Test contracts that need no pass, some after each update if they take longer than a step."""
        while self._first:
            id = self._first.pop(0)
            with contextlib.suppress(PassNeededError):
                self._found[id] = result_of(lab, id)
                self._waiting.remove(id)
            if run_output.stopwatch() > until:
                break
        if not self._first:
            lab.may_act = True
            is_whole = bool(lab.seen.roots) and not is_split(lab.seen.roots[0])
            self._end_unless([id for id in self._waiting if id not in APART and is_whole])

    def _test_with_passes(self, lab: Lab) -> None:
        """Test the next contract that needs passes."""
        id = next(id for id in self._waiting if id not in APART)
        with without_own_hooks(lab.model):
            self._found[id] = result_of(lab, id)
        self._waiting.remove(id)
        vars(lab).pop("base", None)  # the next update changes the outputs
        self._end_unless([id for id in self._waiting if id not in APART])

    def _test_on_ranks(self) -> None:
        """Test what needs neither passes nor messages, and combine the results of all ranks."""
        self._is_joint = False
        if self._seen is not None:
            self._seen.finish()
        if self._lab is not None:
            self._test_without_passes(self._lab, float("inf"))
        own = self.report
        reports = [CheckReport.of_json(each) for each in of_each_rank(None if own is None else own.as_json()) if each]
        if reports:
            self._found = {each.id: each for each in merged(reports).checks}
        self._waiting.clear()
        self.end()

    def _end_unless(self, waiting: list[str]) -> None:
        if not waiting or is_shared():
            self._leave_all(_LEFT)

    def _leave_all(self, reason: str) -> None:
        """Leave all that was not tested to a check."""
        self._found |= {id: replace(not_tested(reason), id=id) for id in self._waiting}
        self._waiting.clear()
        self.end()


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _has_others(seen: Observer, known: set[int]) -> bool:
    """Return whether a model or optimizer was seen that holds none of the known parameters, or others besides."""
    held = [[p for group in each.param_groups for p in group["params"]] for each in seen.optimizers]
    called = {bare(call.module) for call in seen.calls if call.reached}
    trained = [[p for p in module.parameters() if p.requires_grad] for module in called]
    is_other = [any(id(p) not in known for p in each) for each in held]
    return any([*is_other, *(bool(each) and all(id(p) not in known for p in each) for each in trained)])


class _WatchObserver(Observer):
    """Observer of a training that goes on whatever happens: after an exception of its own, it leaves."""

    def __init__(self, receive: weakref.WeakMethod[Callable[[Observer], None]], is_own: Callable[[], bool]) -> None:
        super().__init__(N_UPDATES, self._hand_over)
        self.is_brief, self.error = True, ""
        self._receive, self._is_own = receive, is_own

    def leave(self) -> None:
        """Remove all hooks."""
        self.is_over = True
        self.__exit__(None, None, None)
        self._open.clear()

    def _hand_over(self, seen: Observer) -> None:
        self.leave()
        if (receive := self._receive()) is not None:
            receive(self)

    def _try(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001  (training continues after any failure)
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        if not self.is_over:
            self.is_over, self.error = True, f"{type(error).__name__}: {error}"
            self._hand_over(self)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if not self._is_own():
            self._try(super()._enter, module, args)

    def _leave(self, module: nn.Module, args: tuple, *rest: Any) -> None:
        if not self._is_own():
            self._try(super()._leave, module, args, *rest)

    def _before_step(self, of: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return None if self._is_own() else self._try(super()._before_step, of, args, kwargs)

    def _note_update(self, of: Any) -> None:
        self._try(super()._note_update, of)

    def _after_step(self, of: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._is_own():
            self._try(super()._after_step, of, args, kwargs)

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        def safe(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.is_over or self._is_own():
                return own(*args, **kwargs)
            results: list[Any] = []
            raised: list[BaseException] = []

            @functools.wraps(own)
            def once(*args: Any, **kwargs: Any) -> Any:
                try:
                    results.append(own(*args, **kwargs))
                except BaseException as error:
                    raised.append(error)
                    raise
                return results[0]

            try:
                return around(once, *args, **kwargs)
            except Exception as error:
                if raised:
                    raise
                self._give_up(error)
                return results[0] if results else own(*args, **kwargs)

        super()._replace(owner, name, safe)
