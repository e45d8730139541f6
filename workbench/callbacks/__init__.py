"""Callbacks that act during training: KSS, faults, penalties, the recorder, alarms and their actions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
