"""Read the columns of a dataset for the figures of divergence prediction, and report missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr


def columns_of(
    data: xr.Dataset,
    needed: Sequence[str],
    *,
    what: str,
    source: str,
    optional: Sequence[str] = (),
    dim: str | None = None,
) -> dict[str, np.ndarray]:
    """Variables along one dimension, as arrays.

    Args:
        data: Dataset to read.
        needed: Names of the variables that must exist.
        what: Kind of dataset expected, such as "ROC curve", for the error message.
        source: Function that makes one, such as "wb.profile()".
        optional: Names of variables that are read if they exist.
        dim: Dimension of the variables; None: any that they share.

    Raises:
        SchemaError: If it is no dataset, lacks a variable, has one of another shape, or is empty.
    """
    import xarray as xr

    if not isinstance(data, xr.Dataset):
        raise SchemaError(f"The {what} is {_described(data)}, expected a dataset of {source}.")
    if missing := [name for name in needed if name not in data.variables]:
        raise SchemaError(f"The dataset is no {what}: it lacks {', '.join(missing)}; make it with {source}.")
    names = [*needed, *(name for name in optional if name in data.variables)]
    dim = dim or next((str(d) for d in data[needed[0]].dims), "run")
    for name in names:
        if data[name].dims != (dim,):
            has = ", ".join(map(str, data[name].dims)) or "no dimension"
            raise SchemaError(f"In the {what}, {name} runs over {has}, expected {dim} alone; select or average first.")
    if not data.sizes[dim]:
        raise SchemaError(f"The {what} has no {dim}; select less narrowly.")
    return {name: data[name].values for name in names}


def by_name(
    data: xr.Dataset | Mapping[str, xr.Dataset], *, what: str, source: str, name: str = ""
) -> dict[str, xr.Dataset]:
    """Datasets by name; a single one gets the given name.

    Raises:
        SchemaError: If there is none.
    """
    import xarray as xr

    if isinstance(data, xr.Dataset):
        return {name: data}
    datasets: Mapping[str, xr.Dataset] = data
    if not isinstance(data, Mapping) or not data:
        raise SchemaError(
            f"The {what} is {_described(data)}, expected a dataset of {source} or a dict of name: dataset."
        )
    return {str(key): value for key, value in datasets.items()}


def names_along(data: xr.Dataset | xr.DataArray, dim: str) -> list[str]:
    """Labels of the rows: the coordinate ``long_name`` or else the dimension's own; numbers if it has none."""
    if "long_name" in data.coords and data["long_name"].dims == (dim,):
        return [str(name) for name in data["long_name"].values]
    if dim in data.coords:
        return [str(name) for name in data[dim].values]
    return [str(i) for i in range(data.sizes[dim])]


def _described(value: object) -> str:
    if isinstance(value, Mapping) and not value:
        return "an empty dict"
    return f"of type {type(value).__name__}"
