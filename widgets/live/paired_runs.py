"""Treatment and control of a live training: KSS and faults switched on, or never; both are monitored alike."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.callbacks.faults import Injection
from workbench.callbacks.guard import Guard
from workbench.callbacks.kss import KSS
from workbench.callbacks.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workbench.callbacks.actions import Actions
    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.faults import Fault

WITH_KSS, WITHOUT_KSS = "with KSS", "without KSS"
WITH_FAULTS, WITHOUT_FAULTS = "with faults", "without faults"


class PairedRuns:
    """The two runs of a room, but for model and data.

    The control has the same faults and the same KSS, never switched on, so that both compute alike to the bit until a
    button or a schedule switches something; it has a recorder and alarms of the same kind, and no actions.

    Args:
        kss: KSS of the treatment; None: the recommended one, switched off where there are faults.
        faults: Faults of the treatment.
        recorder: Recorder of the treatment; None: none.
        alarms: Alarms of the treatment; None: none.
        actions: Actions of the treatment; None: none.

    Attributes:
        names: Names of the treatment and of its control.

    Raises:
        OptionError: If the faults do not go together, or alarms have no recorder, or actions no alarms.
    """

    def __init__(
        self,
        kss: KSS | None,
        faults: Sequence[Fault],
        recorder: Recorder | None,
        alarms: Alarms | None,
        actions: Actions | None,
    ) -> None:
        Injection(faults)
        Guard(recorder, alarms, actions)
        self.faults = tuple(faults)
        self.recorder, self.alarms, self.actions = recorder, alarms, actions
        if kss is None:
            kss = KSS.recommended()
            kss.enabled = not self.faults
        self.kss = kss
        self.names = (WITH_FAULTS, WITHOUT_FAULTS) if self.faults else (WITH_KSS, WITHOUT_KSS)

    def note(self, name: str) -> str:
        """A few words on a run that is not over."""
        if name != self.names[0]:
            return ""
        if not self.faults:
            return "switched on" if self.kss.enabled else "switched off"
        on = [fault.name.replace("_", " ") for fault in self.faults if fault.enabled]
        words = ["KSS on"] if self.kss.enabled else []
        return " · ".join([*words, f"{' and '.join(on)} on" if on else "no fault on"])

    @contextmanager
    def arguments(self, *, resume: bool) -> Iterator[dict[str, dict[str, Any]]]:
        """Further arguments of `workbench.train` for each run, by name.

        Args:
            resume: Whether the runs go on from a checkpoint. It has switches of its own; when the context ends, they
                are where they had been put.
        """
        control, switches = self.kss.state_dict(), [fault.state_dict() for fault in self.faults]
        idle = KSS(enabled=False, options=self.kss.options, controller=self.kss.controller)
        never = tuple(replace(fault) for fault in self.faults)
        for fault in never:
            fault.enabled = False
        own = {
            "kss": self.kss,
            "faults": self.faults,
            "recorder": self.recorder,
            "alarms": _from_the_start(self.alarms),
            "actions": self.actions,
        }
        others = {
            "kss": idle,
            "faults": never,
            "recorder": _alike(self.recorder),
            "alarms": _from_the_start(copy.copy(self.alarms)),
        }
        try:
            yield dict(zip(self.names, (own, others), strict=True))
        finally:
            if resume:
                self.kss.load_state_dict(control)
                for fault, switch in zip(self.faults, switches, strict=True):
                    fault.load_state_dict(switch)
                idle.enabled = False
                for fault in never:
                    fault.enabled = False


def _from_the_start(alarms: Alarms | None) -> Alarms | None:
    """Alarms without any measurement yet."""
    if alarms is not None:
        alarms.reset()
    return alarms


def _alike(recorder: Recorder | None) -> Recorder | None:
    """A recorder with the same measurements, without other loggers, in which two runs could not be distinguished."""
    if recorder is None:
        return None
    options = recorder.options
    return Recorder(
        every=recorder.every,
        probe=recorder.probe,
        n_probe_tokens=recorder.n_probe_tokens,
        alpha=options.alpha,
        loss_of=options.loss_of,
        profile_options=options.profile_options,
    )
