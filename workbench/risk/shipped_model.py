"""The risk model that ships, fitted to the recorded study of learning rates by ``data/fit_risk.py``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from workbench.risk.edge_model import EdgeModel, load

_FILE = Path(__file__).parent / "shipped" / "edges.json"


@cache
def shipped() -> EdgeModel:
    """The shipped model.

    Raises:
        StoreError: If its file is missing.

    Example:
        >>> import workbench as wb
        >>> wb.risk.shipped().about["n_families"] > 10
        True
    """
    return load(_FILE)
