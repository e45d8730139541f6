"""The risk model that ships with the workbench, fitted to the study of learning rates by ``data/fit_risk.py``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from workbench.risk.edge_model import EdgeModel, load

_FILE = Path(__file__).parent / "shipped" / "edges.json"


@cache
def shipped() -> EdgeModel:
    """Return the risk model that ships with the workbench.

    Raises:
        StoreError: If its file is missing.

    Example:
        >>> import workbench as wb
        >>> wb.risk.shipped().about["n_families"] > 10
        True

    See Also:
        `workbench.risk.predict`: Uses it by default.
        `workbench.risk.fit`: Fits another model.
    """
    return load(_FILE)
