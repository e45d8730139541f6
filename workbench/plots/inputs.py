"""What every figure of spectra accepts, and which layers of it are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.schema import CONCAT_DIMS, validate_spectra

if TYPE_CHECKING:
    import xarray as xr


def named_spectra(spectra: xr.Dataset | Mapping[str, xr.Dataset]) -> dict[str, xr.Dataset]:
    """Spectra by name; a single dataset is named after its subject.

    Raises:
        SchemaError: If there is no dataset, one does not follow the schema, or one holds several steps or runs.
    """
    import xarray as xr

    if isinstance(spectra, xr.Dataset):
        validate_spectra(spectra)
        spectra = {spectra.attrs["subject"]: spectra}
    if not isinstance(spectra, Mapping) or not spectra:
        raise SchemaError(
            f"The spectra are {_described(spectra)}, expected a dataset of wb.profile() "
            "or a non-empty dict of name: dataset."
        )
    for name, data in spectra.items():
        if not isinstance(data, xr.Dataset):
            raise SchemaError(f"'{name}' is {_described(data)}, expected a dataset of wb.profile().")
        validate_spectra(data)
        extra = [dim for dim in data["eigenvalue"].dims if dim in CONCAT_DIMS]
        if extra:
            raise SchemaError(
                f"'{name}' runs over {', '.join(extra)} and a figure shows one spectrum a layer; select one, "
                f"for example spectra.isel({extra[0]}=-1)."
            )
    return {str(name): data for name, data in spectra.items()}


def select_layers(spectra: xr.Dataset, layers: Iterable[int] | None) -> xr.Dataset:
    """The layers of one dataset that are asked for and exist, possibly none; None means all."""
    if layers is None:
        return spectra
    return spectra.isel(layer=np.isin(spectra["layer"].values, np.fromiter(layers, dtype=int)))


def _described(value: object) -> str:
    return "an empty dict" if isinstance(value, Mapping) and not value else f"of type {type(value).__name__}"
