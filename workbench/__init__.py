"""Stability Workbench: Koopman spectra of transformers, and what they say about training stability.

The public names are those of ``__init__.pyi``; each loads when it is first used, so that ``import workbench`` is quick
and stays headless.
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
