"""Callbacks that act during training: KSS, faults, penalties, recorder, alarms and actions."""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
