"""Measured trees as JSON values, for the command line and for agents."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import xarray as xr


def facts(tree: xr.DataTree) -> dict[str, Any]:
    """Return an assessment, a diagnosis or a comparison as JSON values.

    Returns:
        The attributes of the tree, and the rows of each node by its name; of a diagnosis without the scores of causes,
        which are no probabilities. Nodes with several dimensions have a list of names of their variables: the data
        themselves are saved as .nc or .zarr.
    """
    found = {str(name): _decoded(value) for name, value in tree.attrs.items() if "probabilit" not in str(name)}
    for name, node in tree.children.items():
        data = node.to_dataset()
        if node.children:
            found[name] = facts(node)
        elif len(data.sizes) == 1:
            columns = [str(column) for column in data.variables if "probabilit" not in str(column)]
            found[name] = data[columns].to_dataframe().reset_index()[columns].to_dict("records")
        elif data.sizes:
            found[name] = {"variables": [str(variable) for variable in data.data_vars]}
        else:
            found[name] = {str(variable): data[variable].item() for variable in data.data_vars}
    return plain(found)


def plain(value: Any) -> Any:
    """Return JSON values, in which null stands for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray | list | tuple | set):
        return [plain(each) for each in value]
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def _decoded(value: Any) -> Any:
    """Return an attribute; lists and mappings are stored as JSON."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
