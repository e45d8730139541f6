"""The recorder: measures any training run from around its optimizer's step, and writes down what its monitors say."""

from workbench.callbacks.observation import Observation
from workbench.callbacks.recorder.loggers import mirror_to
from workbench.callbacks.recorder.recorder import Recorder

__all__ = ["Observation", "Recorder", "mirror_to"]


def __dir__() -> list[str]:
    return sorted(__all__)
