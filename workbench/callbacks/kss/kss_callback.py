"""KSS as a callback, with one `Shaper` per run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbench.callbacks.kss.shaper import Shaper
from workbench.errors import OptionError, WorkbenchError
from workbench.training.callback import Callback, TrainingRun

if TYPE_CHECKING:
    from workbench.callbacks.kss.control import KSSControls
    from workbench.callbacks.kss.shaping import Shaping

_CONTROLS = ("kss_enabled", "kss_strength", "kss_interval", "kss_gamma")


class KSSCallback(Callback):
    """KSS as a callback of a run.

    Args:
        kss: KSS whose controls may be changed during training.
    """

    name = "kss"

    def __init__(self, kss: KSSControls) -> None:
        self.kss = kss
        self._shaper: Shaper | None = None
        self._state: dict[str, Any] = {}
        self._measured: Shaping | None = None

    @property
    def shaper(self) -> Shaper:
        """The shaper attached to the model of the run, from `begin` to `end`.

        Raises:
            OptionError: If no run is active.
        """
        if self._shaper is None:
            raise OptionError(
                "KSS has a shaper only during a training run; read it between the begin and the end of the run."
            )
        return self._shaper

    def describe(self) -> Mapping[str, Any]:
        """Return the options that are fixed over a run."""
        return self.kss.describe()

    def setup(self, run: TrainingRun) -> None:
        """Reset the state, as a trainer may train several times with the same callback."""
        super().setup(run)
        self._state, self._measured = {}, None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; the controls are set immediately, so that they may be changed before a resumed run begins."""
        self._state = dict(state)
        self.kss.load_state_dict(state["control"])

    def begin(self) -> None:
        """Attach KSS to the model; if there is a probe, the residual blocks are found here.

        Raises:
            AnatomyError: If the residual stream cannot be identified with certainty.
            OptionError: If KSS cannot act on the model or the optimizer.
        """
        run = self.run
        self._shaper = shaper = Shaper(self.kss, run.model, run.optimizer)
        try:
            if self._state:
                shaper.load_state_dict({**self._state, "control": self.kss.state_dict()})
            shaper.step = run.step
            if run.probe is not None:
                shaper.read_anatomy(run.probe(2))
        except WorkbenchError:
            self.end()
            raise

    def begin_step(self, step: int) -> None:
        """Read the controls for the step."""
        self.shaper.begin_step(step)

    def end_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the metrics of the step, and record an event for each control that was changed."""
        last = self.shaper.last
        for change in self.shaper.new_changes():
            self.event(step, "kss", source="kss", message=change)
        if last is None:
            return {}
        if last.layers:
            self._measured = last
        return last.monitors()

    def outcome(self) -> Shaping | None:
        """Return the record of this step."""
        return self.shaper.last

    def to_log(self) -> dict[str, float]:
        """Return the controls of the last step and the latest measurements, which may be from an earlier step."""
        if self._shaper is None or self._shaper.last is None:
            return {}
        latest = self._shaper.last.monitors()
        measured = latest if self._measured is None else self._measured.monitors() | {n: latest[n] for n in _CONTROLS}
        return {name: float(value) for name, value in measured.items() if not math.isnan(value)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; after the run, its final state."""
        if self._shaper is not None:
            self._state = self._shaper.state_dict()
        return self._state

    def end(self, *, is_broken: bool = False) -> None:
        """Detach KSS."""
        super().end(is_broken=is_broken)
        if self._shaper is not None:
            self._state = self._shaper.state_dict()
            self._shaper.detach()
            self._shaper = None
