"""KSS and faults of a run, synchronized between the kernel and the training process."""

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
    """The state of the KSS and the faults of one run; changes on one side are sent to the other."""

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
        """The state of all switches as plain values."""
        return {
            KSS_NAME: self.kss.state_dict(),
            **{name: fault.state_dict() for name, fault in self.faults.items()},
        }

    def load(self, state: State) -> None:
        """Load the state of the other side."""
        self._loading.is_on = True
        try:
            for name, values in state.items():
                (self.kss if name == KSS_NAME else self.faults[name]).load_state_dict(values)
        finally:
            self._loading.is_on = False
            with self._lock:
                self._told = self.state

    def follow_schedule(self, step: int) -> None:
        """Let faults follow their schedules, as in the training process."""
        self._loading.is_on = True
        try:
            for fault in self.faults.values():
                fault.begin_step(step)
        finally:
            self._loading.is_on = False

    def close(self) -> None:
        """Stop sending changes."""
        while self._undo:
            self._undo.pop()()

    def _hear(self, *_: Any) -> None:
        if getattr(self._loading, "is_on", False):
            return
        with self._lock:  # several changes at once are sent together
            state, told = self.state, self._told
            changed = {
                name: {key: value for key, value in values.items() if told[name][key] != value}
                for name, values in state.items()
            }
            self._told = state
        if changed := {name: values for name, values in changed.items() if values}:
            self._tell(changed)
