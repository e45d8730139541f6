"""Inputs of figures: checks of datasets and names, the columns that are drawn, and the selection of step and layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.io.store import at_step, by_subject, named_runs, spectra_of
from workbench.schema.runs import CONCAT_DIMS, validate_spectra

if TYPE_CHECKING:
    import xarray as xr


def columns_of(
    data: xr.Dataset, needed: Sequence[str], *, what: str, source: str, dim: str | None = None
) -> dict[str, np.ndarray]:
    """Return variables along one dimension (None: the shared one) as arrays; ``what`` and ``source`` word errors."""
    import xarray as xr

    if not isinstance(data, xr.Dataset):
        raise SchemaError(f"The {what} is {_described(data)}, expected a dataset from {source}.")
    require_variables(data, needed, what=what, source=source)
    dim = dim or next((str(d) for d in data[needed[0]].dims), "run")
    for name in needed:
        if data[name].dims != (dim,):
            has = ", ".join(map(str, data[name].dims)) or "no dimension"
            raise SchemaError(f"In the {what}, {name} has dimensions {has}, expected {dim}; select or average first.")
    if not data.sizes[dim]:
        raise SchemaError(f"The {what} is empty along {dim}; select less narrowly.")
    return {name: data[name].values for name in needed}


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
        raise SchemaError(f"The {what} is {_described(data)}, expected a dataset from {source} or a dict of them.")
    return {str(key): value for key, value in datasets.items()}


def _described(value: object) -> str:
    if isinstance(value, Mapping) and not value:
        return "an empty dict"
    return f"of type {type(value).__name__}"


def named_spectra(
    spectra: xr.Dataset | xr.DataTree | Mapping[str, xr.Dataset | xr.DataTree] | Sequence[xr.Dataset | xr.DataTree],
    *,
    step: int | str | None = None,
) -> dict[str, xr.Dataset]:
    """Return spectra or runs by name, by default their subjects; a step (first, last, number) joins the name."""
    import xarray as xr

    if isinstance(spectra, xr.DataTree):
        spectra = named_runs(spectra)
    if isinstance(spectra, xr.Dataset):
        validate_spectra(spectra)
        spectra = [spectra]
    if isinstance(spectra, list | tuple):
        spectra = by_subject(spectra)
    if not isinstance(spectra, Mapping) or not spectra:
        raise SchemaError(f"The spectra are {_described(spectra)}, expected those of wb.profile() or a dict of them.")
    models = {}
    for name, data in spectra.items():
        if not isinstance(data, xr.Dataset | xr.DataTree):
            raise SchemaError(f"'{name}' is {_described(data)}, expected a dataset from wb.profile().")
        model = spectra_of(named_runs({str(name): data})[str(name)]) if isinstance(data, xr.DataTree) else data
        validate_spectra(model)
        label = str(name)
        if step is not None:
            model = at_step(model, step, name=label)
            label += _step_label(model)
        extra = [dim for dim in model["eigenvalue"].dims if dim in CONCAT_DIMS]
        if extra:
            choice = ", or draw with step='last'" if extra == ["step"] else ""
            raise SchemaError(
                f"'{name}' has dimensions {', '.join(extra)}, but a figure shows one spectrum per layer; select one, "
                f"for example spectra.isel({extra[0]}=-1){choice}."
            )
        models[label] = model
    return models


def given_name(label: str, spectra: xr.Dataset) -> str:
    """Return the original name of a model to whose name `named_spectra` added the step."""
    return label.removesuffix(_step_label(spectra))


def select_layers(spectra: xr.Dataset, layers: Iterable[int] | None) -> xr.Dataset:
    """Return the requested layers that exist in a dataset, possibly none; None selects all."""
    if layers is None:
        return spectra
    is_chosen = np.isin(spectra["layer"].values, np.fromiter(layers, dtype=int))
    return spectra if is_chosen.all() else spectra.isel(layer=is_chosen)


def _step_label(spectra: xr.Dataset) -> str:
    return f", step {int(spectra['step'])}" if "step" in spectra.coords else ""
