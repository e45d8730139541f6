"""Monitors: numbers that warn early of instability; most are pure functions of tensors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
