"""Stability Workbench: Koopman spectra of transformers, and what they say about training stability.

The public names are those of ``__init__.pyi``; each loads when it is first used, so that ``import workbench`` is quick
and stays headless.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
