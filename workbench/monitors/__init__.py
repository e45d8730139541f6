"""Monitors: numbers that warn early of instability; most are pure functions of tensors."""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
