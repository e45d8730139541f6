"""The recorder: watches any training run from around its optimizer's step, and writes down what its monitors say."""

from workbench.monitors.recorder.options import Observation
from workbench.monitors.recorder.recorder import Recorder

__all__ = ["Observation", "Recorder"]
