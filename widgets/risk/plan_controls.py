"""Controls of the training plan: learning rate, warm-up, schedule, steps, clipping, optimizer."""

from __future__ import annotations

from typing import Any

import ipywidgets

from workbench.training.training_plan import SCHEDULES

#: Name -> optimizer and its options: those of the recorded study, and SGD without momentum.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW, β₂ 0.95, decay 0.1": ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.1}),
    "AdamW": ("AdamW", {}),
    "Muon, decay 0.1": ("Muon", {"weight_decay": 0.1}),
    "SGD, momentum 0.9": ("SGD", {"momentum": 0.9}),
    "SGD": ("SGD", {}),
}
#: Clip norms; the slider needs a number for "none".
_CLIPPING = (("none", 0.0), *((f"{norm:g}", norm) for norm in (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)))

#: The columns are wide enough for the longest name of an optimizer.
CSS = """
.workbench-plan { align-items: center; overflow: visible; grid-auto-rows: max-content;
  grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); }
.workbench-projector .workbench-plan { grid-template-columns: repeat(auto-fit, minmax(min(450px, 100%), 1fr)); }
"""


class PlanControls:
    """Controls for the settings of a planned run."""

    def __init__(self) -> None:
        wide = {"style": {"description_width": "92px"}, "layout": {"width": "auto"}}
        self.learning_rate = ipywidgets.FloatLogSlider(
            3e-3, min=-5, max=1, step=0.02, description="learning rate", readout_format=".3g", **wide
        )
        self.warmup = ipywidgets.IntSlider(30, min=0, max=200, step=5, description="warm-up", **wide)
        self.n_steps = ipywidgets.IntSlider(480, min=40, max=4000, step=40, description="steps", **wide)
        self.schedule = ipywidgets.Dropdown(options=SCHEDULES, description="schedule", **wide)
        self.clip_norm = ipywidgets.SelectionSlider(options=_CLIPPING, value=1.0, description="clip norm", **wide)
        self.optimizer = ipywidgets.Dropdown(options=tuple(OPTIMIZERS), description="optimizer", **wide)
        self.controls = [self.learning_rate, self.warmup, self.n_steps, self.clip_norm, self.schedule, self.optimizer]
        self.box = ipywidgets.GridBox(self.controls)
        self.box.add_class("workbench-plan")

    def settings(self) -> dict[str, Any]:
        """Return the values of the controls as fields of `workbench.training.training_plan.TrainingPlan`."""
        optimizer, options = OPTIMIZERS[self.optimizer.value]
        return {
            "learning_rate": float(self.learning_rate.value),
            "warmup": self.warmup.value,
            "n_steps": self.n_steps.value,
            "schedule": self.schedule.value,
            "clip_norm": self.clip_norm.value or None,
            "optimizer": optimizer,
            "optimizer_options": dict(options),
        }
