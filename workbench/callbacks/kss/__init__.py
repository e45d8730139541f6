"""Koopman Spectral Shaping (KSS, arXiv:2602.22988): regularization of the spectrum of the residual stream."""

from workbench.callbacks.kss.control import ControlValues, KSSOptions
from workbench.callbacks.kss.kss import KSS
from workbench.callbacks.kss.kss_callback import KSSCallback
from workbench.callbacks.kss.penalty import LayerPenalty, PenaltyShape
from workbench.callbacks.kss.shaper import Shaper
from workbench.callbacks.kss.shaping import Shaping
from workbench.callbacks.kss.trust_region import TrustRegion

__all__ = [
    "KSS",
    "ControlValues",
    "KSSCallback",
    "KSSOptions",
    "LayerPenalty",
    "PenaltyShape",
    "Shaper",
    "Shaping",
    "TrustRegion",
]


def __dir__() -> list[str]:
    return sorted(__all__)
