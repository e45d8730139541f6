"""Checks of the datasets and names that figures receive, and the columns that they draw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """Return variables along one dimension as arrays.

    Args:
        data: Dataset to read.
        needed: Names of the variables that must exist.
        what: Kind of dataset expected, such as "ROC curve", for the error message.
        source: Function that creates one, such as "wb.profile()", for the error message.
        optional: Names of variables that are read if they exist.
        dim: Dimension of the variables; None accepts any that they share.
    """
    import xarray as xr

    if not isinstance(data, xr.Dataset):
        raise SchemaError(f"The {what} is {_described(data)}, expected a dataset from {source}.")
    require_variables(data, needed, what=what, source=source)
    names = [*needed, *(name for name in optional if name in data.variables)]
    dim = dim or next((str(d) for d in data[needed[0]].dims), "run")
    for name in names:
        if data[name].dims != (dim,):
            has = ", ".join(map(str, data[name].dims)) or "no dimension"
            raise SchemaError(
                f"In the {what}, {name} has dimensions {has}, expected only {dim}; select or average first."
            )
    if not data.sizes[dim]:
        raise SchemaError(f"The {what} is empty along {dim}; select less narrowly.")
    return {name: data[name].values for name in names}


def require_variables(data: xr.Dataset, needed: Sequence[str], *, what: str, source: str) -> None:
    """Raise an exception if a dataset lacks variables."""
    if missing := [name for name in needed if name not in data.variables]:
        raise SchemaError(f"The {what} lacks {', '.join(missing)}; create it with {source}.")


def require_choices(name: str, chosen: Sequence[str], choices: Iterable[str]) -> None:
    """Raise an exception if no name is chosen, or one is not among the choices."""
    choices = tuple(choices)
    for each in chosen:
        if each not in choices:
            raise SchemaError.of(name, each, choices)
    if not len(chosen):
        listed = f"; choose from {', '.join(choices)}" if choices else ""
        raise SchemaError(f"{name} is empty{listed}.")


def by_name(
    data: xr.Dataset | Mapping[str, xr.Dataset], *, what: str, source: str, name: str = ""
) -> dict[str, xr.Dataset]:
    """Return datasets by name; a single dataset receives the given name."""
    import xarray as xr

    if isinstance(data, xr.Dataset):
        return {name: data}
    datasets: Mapping[str, xr.Dataset] = data
    if not isinstance(data, Mapping) or not data:
        raise SchemaError(
            f"The {what} is {_described(data)}, expected a dataset from {source} or a dict of name: dataset."
        )
    return {str(key): value for key, value in datasets.items()}


def _described(value: object) -> str:
    if isinstance(value, Mapping) and not value:
        return "an empty dict"
    return f"of type {type(value).__name__}"
