"""The two runs of a live training: treatment and control, or two architectures, with the same monitors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.callbacks.gathering import gather
from workbench.callbacks.kss import KSS
from workbench.callbacks.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workbench.callbacks.actions import Actions
    from workbench.callbacks.alarms import Alarms
    from workbench.callbacks.faults import Fault

WITH_KSS, WITHOUT_KSS = "with KSS", "without KSS"
WITH_FAULTS, WITHOUT_FAULTS = "with faults", "without faults"


class PairedRuns:
    """The callbacks of the two runs of a live training.

    A control has the same faults and the same KSS, never switched on, so that both runs are bitwise identical until
    something is switched on. It has a recorder and alarms with the same settings, and no actions. A second architecture
    has all of them, and is switched together with the first.

    Args:
        kss: KSS of the first run; None for the recommended one.
        faults: Faults of the first run.
        recorder: Recorder of the first run; None if there is none.
        alarms: Alarms of the first run; None if there are none.
        actions: Actions of the first run; None if there are none.
        is_off: Whether the recommended KSS is off at first; with faults it always is.
    """

    def __init__(
        self,
        kss: KSS | None,
        faults: Sequence[Fault],
        recorder: Recorder | None,
        alarms: Alarms | None,
        actions: Actions | None,
        *,
        is_off: bool = False,
    ) -> None:
        gather(None, faults=faults, recorder=recorder, alarms=alarms, actions=actions)  # it checks them
        self.faults = tuple(faults)
        self.recorder, self.alarms, self.actions = recorder, alarms, actions
        if kss is None:
            kss = KSS.recommended()
            kss.enabled = not self.faults and not is_off
        self.kss = kss
        self.names = (WITH_FAULTS, WITHOUT_FAULTS) if self.faults else (WITH_KSS, WITHOUT_KSS)

    @property
    def note(self) -> str:
        """A short note on what is switched on, for a run that has not ended."""
        if not self.faults:
            return "KSS on" if self.kss.enabled else "KSS off"
        on = [fault.name.replace("_", " ") for fault in self.faults if fault.enabled]
        words = ["KSS on"] if self.kss.enabled else []
        return " · ".join([*words, f"{' and '.join(on)} on" if on else "no fault on"])

    def of_first(self) -> dict[str, Any]:
        """Return arguments of `workbench.train` for the first run."""
        return {
            "kss": self.kss,
            "faults": self.faults,
            "recorder": self.recorder,
            "alarms": _from_the_start(self.alarms),
            "actions": self.actions,
        }

    def of_control(self) -> dict[str, Any]:
        """Return the arguments for a run in which nothing is ever switched on."""
        never = tuple(replace(fault) for fault in self.faults)
        for fault in never:
            fault.enabled = False
        return {
            "kss": KSS(enabled=False, options=self.kss.options),
            "faults": never,
            "recorder": _alike(self.recorder),
            "alarms": _from_the_start(copy.copy(self.alarms)),
        }

    def of_second(self) -> dict[str, Any]:
        """Return the arguments for a run of another architecture, which is switched like the first."""
        kss = KSS(options=self.kss.options)
        kss.load_state_dict(self.kss.state_dict())
        faults = tuple(replace(fault) for fault in self.faults)
        for own, fault in zip(faults, self.faults, strict=True):
            own.load_state_dict(fault.state_dict())
        actions = self.actions
        return {
            "kss": kss,
            "faults": faults,
            "recorder": _alike(self.recorder),
            "alarms": _from_the_start(copy.copy(self.alarms)),
            "actions": None if actions is None else replace(actions, kss=None if actions.kss is None else kss),
        }


def _from_the_start(alarms: Alarms | None) -> Alarms | None:
    """Reset alarms, so that they have no measurements."""
    if alarms is not None:
        alarms.reset()
    return alarms


def _alike(recorder: Recorder | None) -> Recorder | None:
    """Return a recorder with the same settings, without external loggers, which could not distinguish the runs."""
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
