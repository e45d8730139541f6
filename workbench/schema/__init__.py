"""The shape of the data: every dimension, coordinate, variable, unit and status; names load when first used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
