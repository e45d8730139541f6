"""KSS and faults of a run, kept alike in the kernel and in the training process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from workbench.callbacks.faults import Fault
    from workbench.callbacks.kss import KSS

State = dict[str, dict[str, Any]]
KSS_NAME = "kss"


class Switches:
    """The KSS and the faults of one run, as one state: what changes on one side is told to the other.

    Args:
        kss: KSS of the run.
        faults: Faults of the run, at most one of a kind.
        tell: Called with what has changed, by the name of the fault or ``"kss"``, in the thread that changed it; not
            for what `load` changes.
    """

    def __init__(self, kss: KSS, faults: Iterable[Fault], tell: Callable[[State], None]) -> None:
        self.kss, self.faults = kss, {fault.name: fault for fault in faults}
        self._tell = tell
        self._lock = threading.Lock()
        self._loading = threading.local()
        self._told = self.state
        switched: tuple[KSS | Fault, ...] = (self.kss, *self.faults.values())
        self._undo = [each.observe(self._hear) for each in switched]

    @property
    def state(self) -> State:
        """Everything that can be switched, as plain values."""
        return {
            KSS_NAME: self.kss.state_dict(),
            **{name: fault.state_dict() for name, fault in self.faults.items()},
        }

    def load(self, state: State) -> None:
        """Take over what the other side says."""
        self._loading.is_on = True
        try:
            for name, values in state.items():
                (self.kss if name == KSS_NAME else self.faults[name]).load_state_dict(values)
        finally:
            self._loading.is_on = False
            with self._lock:
                self._told = self.state

    def follow_schedule(self, step: int) -> None:
        """Let faults follow their schedules, as they do where they act."""
        self._loading.is_on = True
        try:
            for fault in self.faults.values():
                fault.begin_step(step)
        finally:
            self._loading.is_on = False

    def close(self) -> None:
        """Tell no more."""
        while self._undo:
            self._undo.pop()()

    def _hear(self, *_: Any) -> None:
        if getattr(self._loading, "is_on", False):
            return
        with self._lock:  # several controls that were set at once are told at once
            state, told = self.state, self._told
            changed = {
                name: {key: value for key, value in values.items() if told[name][key] != value}
                for name, values in state.items()
            }
            self._told = state
        if changed := {name: values for name, values in changed.items() if values}:
            self._tell(changed)
