"""Pack many short runs into one dataset with a dimension ``patient``; `course.case_files.unpack` reads a part of one.

Shorter runs and models with fewer blocks, heads, experts or modes are padded. Numbers are rounded to a few bits of the
mantissa, so that the file is small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from workbench.course.case_files import TERMS, VARIABLES
from workbench.diagnosis import read_record

#: Bits of the mantissa: of the loss and the gradient norm, whose noise from step to step is a symptom, also in a loss
#: that is almost constant; of the learning rate; of fractions of a few tokens, from which their number is read; and of
#: everything else.
BITS, DEFAULT_BITS = {"loss": 22, "grad_norm": 14, "learning_rate": 16, "expert_load": 16}, 8
#: Number of patients in a chunk of the file.
_CHUNK = 48
#: Attributes of spectra that differ between runs, and what replaces them.
_OF_ONE_RUN = {"subject": "patient", "source": "", "seed": 0, "token_selection": "", "created": "", "stack": "blocks"}


def rounded_bits(values: np.ndarray, n_bits: int) -> np.ndarray:
    """Return values as float32, rounded to a number of bits of the mantissa; relative error at most 2^-(n_bits + 1)."""
    exact = np.ascontiguousarray(values, dtype=np.float32)
    lost = 23 - n_bits
    raw = exact.view(np.uint32).astype(np.uint64)
    near = ((raw + (1 << (lost - 1))) >> lost << lost).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(exact) & np.isfinite(near), near, exact)


def pack(runs: Sequence[xr.DataTree]) -> xr.Dataset:
    """Return runs as one dataset; the inverse is `unpack`."""
    columns: dict[str, Any] = {}
    attrs: dict[str, Any] = {}
    for part, names in VARIABLES.items():
        found = [run.children[part].to_dataset(inherit=False) if part in run.children else None for run in runs]
        known = [data for data in found if data is not None]
        columns[f"{part}_step"] = _padded(
            [data["step"].values if data is not None else np.zeros(0) for data in found], ("row",), part, np.int16, -1
        )
        for name in names:
            example = next((data[name] for data in known if name in data), None)
            if example is None:
                continue
            dims = [str(dim) for dim in example.dims if dim != "step"]
            pieces = [_piece(data, name, len(dims)) for data in found]
            for each, of_kind in _by_kind(name, pieces).items():
                rounded = [rounded_bits(piece, BITS.get(name, DEFAULT_BITS)) for piece in of_kind]
                columns[f"{part}_{each}"] = _padded(rounded, ("row", *dims), part, np.float32, np.nan)
        sizes = sorted({str(dim) for data in known for dim in data.sizes} - {"step", "term"})
        for dim in sizes:
            columns[f"{part}_n_{dim}"] = (
                "patient", np.array([0 if data is None else data.sizes.get(dim, 0) for data in found], dtype=np.int16),
            )  # fmt: skip
        if part == "spectra":
            plain = {name: v.item() if isinstance(v, np.generic) else v for name, v in known[0].attrs.items()}
            attrs["spectra"] = json.dumps(plain | _OF_ONE_RUN)
    columns["diverged_at"] = (
        "patient", np.array([-1 if (at := read_record(run).diverged_at) is None else at for run in runs], np.int16),
    )  # fmt: skip
    return xr.Dataset(columns, attrs=attrs)


def _piece(data: xr.Dataset | None, name: str, n_dims: int) -> np.ndarray:
    """Return the values of a variable of one run; without rows if it was not measured."""
    if data is None or name not in data:
        return np.zeros((0,) * (1 + n_dims))
    values = data[name].transpose("step", ...)
    return (values.sel(term=list(TERMS)) if "term" in values.dims else values).values


def _by_kind(name: str, pieces: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Return complex values as two variables, and all others as numbers."""
    if any(np.iscomplexobj(piece) for piece in pieces):
        return {f"{name}_real": [piece.real for piece in pieces], f"{name}_imag": [piece.imag for piece in pieces]}
    return {name: [piece.astype(np.float64) for piece in pieces]}


def _padded(pieces: list[np.ndarray], dims: tuple[str, ...], part: str, dtype: type, fill: float) -> tuple:
    """Return arrays of different sizes as one, with dims ``patient`` and those of the part."""
    shape = tuple(max(piece.shape[i] for piece in pieces) for i in range(len(dims)))
    values = np.full((len(pieces), *shape), fill, dtype=dtype)
    for i, piece in enumerate(pieces):
        values[i][tuple(slice(n) for n in piece.shape)] = piece
    return ("patient", *(f"{part}_{dim}" if dim != "term" else dim for dim in dims)), values


def encoding(data: xr.Dataset) -> dict[str, dict[str, Any]]:
    """Return the options with which a packed dataset is written compactly, by variable."""
    found = {}
    for name, values in data.data_vars.items():
        if values.dims and values.dims[0] == "patient" and values.dtype.kind in "fiub":
            chunks = (min(_CHUNK, values.shape[0]), *values.shape[1:])
            found[str(name)] = {"zlib": True, "complevel": 9, "shuffle": True, "chunksizes": chunks}
    return found
