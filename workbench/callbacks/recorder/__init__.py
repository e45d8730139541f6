"""The recorder: watches any training run from around its optimizer's step, and writes down what its monitors say."""

from workbench.callbacks.recorder.options import Observation
from workbench.callbacks.recorder.recorder import Recorder

__all__ = ["Observation", "Recorder"]


def __dir__() -> list[str]:
    return sorted(__all__)
