"""The recorder: measures a training run around its optimizer's step and records the values of the monitors."""

from workbench.callbacks.observation import Observation
from workbench.callbacks.recorder.recorder import Recorder

__all__ = ["Observation", "Recorder"]
