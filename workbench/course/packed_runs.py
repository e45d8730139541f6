"""Many short runs in one dataset with a dimension ``patient``, from which each part of a run is read on its own.

Shorter runs and models with fewer blocks, heads, experts or modes are padded. Numbers are rounded to a few bits of the
mantissa, so that the file is small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench import schema
from workbench.diagnosis.failed_run import read_record
from workbench.koopman.measures import MASSES

if TYPE_CHECKING:
    import xarray as xr

#: Part of a run -> its packed variables: those that `wb.diagnose` reads, those of the batches, and whole spectra.
VARIABLES: dict[str, tuple[str, ...]] = {
    "monitors": (
        "loss", "grad_norm", "learning_rate", "batch_size", "auxiliary_loss",
        "label_agreement", "label_entropy", "token_entropy", "repeated_examples", "largest_losses",
    ),
    "optimizer": (
        "update_ratio", "module_weight_norm", "module_grad_norm", "adam_staleness", "gradient_rms",
        "gradient_rms_over_eps", "gradient_signal_share", "unchanged_share",
    ),
    "activations": ("state_norm", "activation_max", "kurtosis"),
    "attention": ("attention_logit_max", "attention_entropy_share", "effective_rank", "frobenius_norm"),
    "router": (
        "dead_experts", "max_violation", "routing_entropy_share", "router_similarity", "routing_change", "expert_load",
    ),
    "curvature": ("sharpness", "sharpness_rate", "preconditioned_sharpness", "preconditioned_sharpness_rate"),
    "spectra": tuple(schema.SPECTRA),
}  # fmt: skip
#: Terms of the update spectra of queries and keys that are packed.
TERMS = ("D2", "dWq", "W")
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
    import xarray as xr

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


def unpack(packed: xr.Dataset, part: str, names: Sequence[str] | None = None) -> xr.Dataset:
    """Return a part of one run; empty if it was not measured.

    Args:
        packed: One patient of a packed dataset.
        part: A name in `VARIABLES`.
        names: Variables to read; None for all.
    """
    import xarray as xr

    steps = packed[f"{part}_step"].values
    n_rows = int((steps >= 0).sum())
    rules = {**schema.MONITORS, **schema.SPECTRA} if part in ("monitors", "spectra") else schema.PARTS[part]
    variables: dict[str, Any] = {}
    for name in VARIABLES[part] if names is None else names:
        values = _values(packed, part, name, n_rows)
        if values is not None:
            rule = rules.get(name)
            variables[name] = (*values, rule.attrs if rule is not None else {})
    if "rank" in variables:  # a mass is a number of modes over the rank, so that rounding can be undone
        rank = np.maximum(variables["rank"][1], 1)
        for name in set(MASSES) & set(variables):
            dims, mass, about = variables[name]
            variables[name] = (dims, np.round(mass * rank) / rank, about)
    coords: dict[str, Any] = {"step": steps[:n_rows].astype(np.int64)}
    sizes = {dim: n for dims, values, _ in variables.values() for dim, n in zip(dims, values.shape, strict=True)}
    coords |= {dim: np.arange(sizes[dim]) for dim in sorted(sizes) if dim not in ("step", "term")}
    if "layer" in sizes:
        coords["layer_name"] = ("layer", [f"block {i}" for i in coords["layer"]])
    if "module" in sizes:  # the last one holds all parameters outside of the blocks
        n_blocks = len(coords["module"]) - 1
        coords["layer"] = ("module", np.array([*range(n_blocks), -1]))
        coords["module_name"] = ("module", [*(f"block {i}" for i in range(n_blocks)), "outside"])
    if "term" in sizes:
        coords["term"] = list(TERMS)
    attrs: dict[str, Any] = json.loads(packed.attrs["spectra"]) if part == "spectra" and variables else {}
    if "loss" in variables:
        attrs["diverged_at"] = int(packed["diverged_at"])
    return xr.Dataset(variables, coords, attrs)


def _values(packed: xr.Dataset, part: str, name: str, n_rows: int) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return dimensions and values of a variable; None if it was not measured."""
    is_complex = f"{part}_{name}_real" in packed
    name_of_column = f"{part}_{name}_real" if is_complex else f"{part}_{name}"
    if name_of_column not in packed:
        return None
    column = packed[name_of_column]
    dims = tuple(str(dim).removeprefix(f"{part}_") for dim in column.dims)
    counts = [n_rows, *(int(packed[f"{part}_n_{dim}"]) if dim != "term" else len(TERMS) for dim in dims[1:])]
    if not all(counts):
        return None
    at = tuple(slice(n) for n in counts)
    values: np.ndarray = column.values[at].astype(np.float64)
    if is_complex:
        values = values + 1j * packed[f"{part}_{name}_imag"].values[at]
    elif part == "spectra" and (kind := schema.SPECTRA[name].kind) in "bi":
        values = np.nan_to_num(values).astype(bool if kind == "b" else np.int64)
    return ("step", *dims[1:]), values


def events_of(loss: xr.Dataset) -> xr.Dataset:
    """Return the events of one run, which are its divergence or its end."""
    import xarray as xr

    at, last = int(loss.attrs["diverged_at"]), int(loss["step"].values.max())
    kind, step = ("divergence", at) if at >= 0 else ("finished", last + 1)
    row = {"step": step, "kind": kind, "source": "", "score": np.nan, "message": "", "layer": -1, "head": -1}
    return xr.Dataset({name: ("event", [value]) for name, value in row.items()})
