"""Parts of a run that grow row by row: declarations of their rows, and rows that wait to be written."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError
from workbench.schema.runs import EVENT_PLACES, EVENTS

if TYPE_CHECKING:
    import xarray as xr

#: Memory of a row or an array in addition to its values, and of a number in a list.
_BYTES_PER_OBJECT, _BYTES_PER_NUMBER = 120, 32
#: Types that have no NaN.
_NEEDED = (bool, int, str)


@dataclass(frozen=True)
class Part:
    """Names, dimensions and types of the variables in the rows of a part.

    ``dims`` leave out ``dim``, along which the part grows (if that is ``step``, the steps are its coordinate).
    ``coords`` have the values of a dimension, ``{"term": ["D2", "D3"]}``, or dimension and values of another
    coordinate, ``{"layer_name": ("layer", ["blocks.0"])}``; ``dtypes`` are those other than ``float64``.
    """

    name: str
    dims: Mapping[str, tuple[str, ...]]
    coords: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dim: str = "step"

    @classmethod
    def of_scalars(
        cls, name: str, values: Mapping[str, Any], attrs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Part:
        """Create a part of scalars whose types (boolean, integer or float) are those of the first row."""
        kinds = {"b": "bool", "i": "int64", "u": "int64"}
        dtypes = {key: kinds[kind] for key, value in values.items() if (kind := np.asarray(value).dtype.kind) in kinds}
        return cls(name, dict.fromkeys(values, ()), attrs=attrs or {}, dtypes=dtypes)

    def dataset(self, steps: Sequence[int], columns: Mapping[str, np.ndarray]) -> xr.Dataset:
        """Return rows as a dataset."""
        import xarray as xr

        variables = {
            name: ((self.dim, *dims), columns[name], self.attrs.get(name, {})) for name, dims in self.dims.items()
        }
        coords = {
            name: (*values, self.attrs.get(name, {})) if _has_dim(values) else (name, np.asarray(values))
            for name, values in self.coords.items()
        }
        step = {"step": (self.dim, np.asarray(steps, dtype=np.int64), self.attrs.get("step", {}))}
        if self.dim == "step":
            return xr.Dataset(variables, coords | step)
        return xr.Dataset(step | variables, coords)

    def dtype(self, name: str) -> np.dtype:
        """Return the type of a variable."""
        return np.dtype(self.dtypes.get(name, "float64"))


def _has_dim(values: Any) -> bool:
    return (
        isinstance(values, tuple) and len(values) == 2 and isinstance(values[0], str) and not isinstance(values[1], str)
    )


def events_part(present: Sequence[str] | None = None) -> Part:
    """Return the declaration of the part ``events``, with the variables of an existing store or of a new one."""
    dtypes = {"kind": "str", "source": "str", "message": "str", "layer": "int64", "head": "int64"}
    names = ["kind", "source", "score", "message", "layer", "head"]
    places = ("layer", "head") if present is None else present
    names = [name for name in names if name in places or name not in ("layer", "head")]
    attrs = {name: rule.attrs for name, rule in (EVENTS | EVENT_PLACES).items()}
    return Part("events", dict.fromkeys(names, ()), attrs=attrs, dtypes=dtypes, dim="event")


def check_layout(rows: xr.Dataset, layout: xr.Dataset, part: str, dim: str, where: Any) -> None:
    """Raise if new rows of a part differ in layout from its existing rows."""
    advice = "record the same variables as before, or write to another run"
    begin = f"Part '{part}' of the run at {where}"
    written, given = set(map(str, layout.variables)), set(map(str, rows.variables))
    if written != given:
        words = [
            f"has {', '.join(sorted(written - given))}, which the rows lack" if written - given else "",
            f"lacks {', '.join(sorted(given - written))}, which the rows have" if given - written else "",
        ]
        raise StoreError(f"{begin} {' and '.join(filter(None, words))}; {advice}.")
    for name, new in rows.variables.items():
        old = layout[name].variable
        if dim in old.dims:
            new = new.transpose(dim, ...) if dim in new.dims else new
        sizes = [(d, old.sizes.get(d), n) for d, n in new.sizes.items() if d != dim and n]
        if old.dims != new.dims or any(had != has for _, had, has in sizes):
            raise StoreError(f"{begin} has '{name}' with {dict(old.sizes)}, the rows with {dict(new.sizes)}; {advice}.")
        if _kind(old) != _kind(new):
            raise StoreError(f"{begin} has '{name}' as {old.dtype}, the rows have it as {new.dtype}; {advice}.")
        if dim not in old.dims and not _are_same(old.values, new.values):
            raise StoreError(f"{begin} has other values of '{name}' than the rows; {advice}.")


def _are_same(old: np.ndarray, new: np.ndarray) -> bool:
    if old.dtype.kind in "UTO":
        return old.tolist() == new.tolist()
    return np.array_equal(old, new, equal_nan=old.dtype.kind in "fc")


def _kind(variable: xr.Variable) -> str:
    return "text" if variable.dtype.kind in "UTO" else variable.dtype.kind


@dataclass
class Lost:
    """Range and number of dropped rows, and the reason."""

    first: int
    last: int
    n_rows: int
    why: str

    def message(self, part: str) -> str:
        """Return a sentence with the part and the steps of the dropped rows."""
        n_rows = "1 row" if self.n_rows == 1 else f"{self.n_rows} rows"
        return f"Part '{part}' lacks {n_rows} of steps {self.first} to {self.last}: {self.why}."


@dataclass
class RecordedRow:
    """Step and values of a row, and their approximate size in bytes."""

    step: int
    values: Any
    n_bytes: int


class WaitingRows:
    """Rows of one part, in order, that are not yet on disk."""

    def __init__(self, part: Part | None, layout: xr.Dataset | None = None) -> None:
        self.part = part
        self.layout = layout
        self.rows: deque[RecordedRow] = deque()
        self.n_bytes = self.n_new = 0
        self.last_step: int | None = None
        self.lost: Lost | None = None
        if part is not None:
            types = {"b": bool, "i": int, "u": int, "f": float, "c": complex, "U": str}
            self._scalars = [(name, types[part.dtype(name).kind]) for name, dims in part.dims.items() if not dims]
            self._arrays = [(name, dims) for name, dims in part.dims.items() if dims]
            self._sizes = {coord: len(values) for coord, values in part.coords.items() if not _has_dim(values)}
            self._sizes |= {values[0]: len(values[1]) for values in part.coords.values() if _has_dim(values)}

    def put(self, row: RecordedRow) -> None:
        """Add a row at the end."""
        self.rows.append(row)
        self.n_bytes += row.n_bytes
        self.n_new += 1
        self.last_step = row.step

    def clear(self) -> int:
        """Remove all rows, and return their number."""
        n_rows = len(self.rows)
        self.rows.clear()
        self.n_bytes = self.n_new = 0
        return n_rows

    def drop_oldest(self, why: str) -> None:
        """Drop the oldest row and record the loss."""
        row = self.rows.popleft()
        self.n_bytes -= row.n_bytes
        n_before = 0 if self.lost is None else self.lost.n_rows
        self.lost = Lost(row.step if self.lost is None else self.lost.first, row.step, n_before + 1, why)

    def empty(self) -> xr.Dataset:
        """Return a dataset without rows, in the form written to disk; dimensions of unknown size have size 0."""
        assert self.part is not None
        columns = {
            name: np.empty((0, *(self._sizes.get(dim, 0) for dim in dims)), self.part.dtype(name))
            for name, dims in self.part.dims.items()
        }
        return self.part.dataset([], columns)

    def row(self, step: int, values: Mapping[str, Any]) -> RecordedRow:
        """Check the values and return a row with copies of them; missing floating-point values are NaN."""
        assert self.part is not None
        copies, n_bytes = [], _BYTES_PER_OBJECT
        for variable, kind in self._scalars:
            try:
                value = kind(values[variable] if variable in values or kind in _NEEDED else math.nan)
            except (KeyError, TypeError, ValueError) as error:
                given = repr(values[variable]) if variable in values else "missing"
                raise StoreError(
                    f"'{variable}' of part '{self.part.name}' is {given} at step {step}, expected one "
                    f"{kind.__name__}; only floating-point variables may be omitted."
                ) from error
            copies.append(value)
            n_bytes += _BYTES_PER_NUMBER + (len(value) if kind is str else 0)
        for variable, dims in self._arrays:
            array = self._copy(step, variable, dims, values)
            copies.append(array)
            n_bytes += array.nbytes + _BYTES_PER_OBJECT
        return RecordedRow(step, copies, n_bytes)

    def _copy(self, step: int, variable: str, dims: tuple[str, ...], values: Mapping[str, Any]) -> np.ndarray:
        assert self.part is not None
        dtype = self.part.dtype(variable)
        expected = tuple(self._sizes.get(dim) for dim in dims)
        if variable not in values and dtype.kind in "fc" and None not in expected:
            return np.full(expected, np.nan, dtype)  # type: ignore[arg-type]
        try:
            array = np.array(values[variable], dtype=dtype)
        except (KeyError, TypeError, ValueError) as error:
            reason = "is missing" if variable not in values else f"cannot be converted to an array of {dtype} ({error})"
            raise StoreError(f"'{variable}' of part '{self.part.name}' {reason} at step {step}.") from error
        if array.ndim != len(dims) or any(size not in (None, n) for size, n in zip(expected, array.shape, strict=True)):
            sizes = (f"{dim} ({'any' if size is None else size})" for dim, size in zip(dims, expected, strict=True))
            raise StoreError(
                f"'{variable}' of part '{self.part.name}' has shape {array.shape} at step {step}, expected "
                f"{' x '.join(sizes)}; pass the same shape at every step."
            )
        self._sizes |= zip(dims, array.shape, strict=True)
        return array

    def dataset(self, rows: Sequence[RecordedRow]) -> xr.Dataset:
        """Return rows as a dataset, in the form written to disk."""
        import xarray as xr

        if self.part is None:
            return xr.concat([row.values for row in rows], "step", combine_attrs="override")
        names = [name for name, _ in self._scalars] + [name for name, _ in self._arrays]
        columns = {
            name: np.array([row.values[place] for row in rows], dtype=self.part.dtype(name))
            for place, name in enumerate(names)
        }
        return self.part.dataset([row.step for row in rows], columns)
