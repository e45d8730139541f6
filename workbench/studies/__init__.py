"""Evaluate recorded data: outcomes of sweeps, early warnings, comparisons, published figures, samples."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
