"""Koopman Spectral Shaping (KSS, arXiv:2602.22988): regularization of the spectrum of the residual stream."""

from workbench.callbacks.kss.control import ControlValues, KSSOptions
from workbench.callbacks.kss.penalty import LayerPenalty, PenaltyShape
from workbench.callbacks.kss.shaper import KSS, Shaper, Shaping
from workbench.callbacks.kss.trust_region import TrustRegion

__all__ = ["KSS", "ControlValues", "KSSOptions", "LayerPenalty", "PenaltyShape", "Shaper", "Shaping", "TrustRegion"]
