"""Probes: measurements that settle one question about a training run, each with its cost and error bound."""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
