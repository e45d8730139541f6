"""Stability Workbench: Koopman spectra of transformers, and training stability.

The public names are listed in ``__init__.pyi``. Each is loaded when it is first used, so that ``import workbench`` is
fast and needs no display.
"""

import difflib
from typing import Any

from workbench.lazy_names import attach_stub

_load, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__ and not name.startswith("_"):
        known = {each.lower(): each for each in __all__}
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean wb.{known[near[0]]}?" if near else ""
        raise AttributeError(f"No workbench attribute {name}{hint}", name=name)
    return _load(name)
