"""Koopman Spectral Shaping (KSS, arXiv:2602.22988): a penalty on the spectrum of the residual stream, live."""

from workbench.training.kss.control import KSS, Band, Control, KSSOptions
from workbench.training.kss.penalty import LayerPenalty, PenaltyShape, layer_penalty
from workbench.training.kss.shaper import Shaper
from workbench.training.kss.shaping import Shaping
from workbench.training.kss.trust_region import TrustRegion

__all__ = [
    "KSS",
    "Band",
    "Control",
    "KSSOptions",
    "LayerPenalty",
    "PenaltyShape",
    "Shaper",
    "Shaping",
    "TrustRegion",
    "layer_penalty",
]
