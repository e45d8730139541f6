"""The shape of the data: every dimension, coordinate, variable, unit and status; names load when first used."""

from workbench.lazy_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
