"""Which versions of which packages made a file."""

from __future__ import annotations

import importlib.metadata
from functools import cache

#: Packages whose version may change a number or a file.
_PROVENANCE = ("stability-workbench", "torch", "numpy", "xarray", "transformers")


@cache
def versions() -> str:
    """Versions of the packages that numbers and files depend on, as one line."""
    found = []
    for name in _PROVENANCE:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
