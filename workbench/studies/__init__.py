"""Evaluation of recorded data: outcomes of sweeps, early warnings, comparisons, published figures and samples."""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
