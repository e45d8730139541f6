"""Versions of the packages with which a file was written."""

from __future__ import annotations

import importlib.metadata
from functools import cache

#: Packages whose version may affect results or files.
_PROVENANCE = ("stability-workbench", "torch", "numpy", "xarray", "transformers")


@cache
def versions() -> str:
    """Return the versions of the packages on which results and files depend, in one line."""
    found = []
    for name in _PROVENANCE:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
