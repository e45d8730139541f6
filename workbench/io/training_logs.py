"""Read training logs of other tools: CSV files, and TensorBoard folders or files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import MissingPackageError, SchemaError, StoreError
from workbench.schema.runs import MONITORS

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

#: Name of a monitor -> its names in logs, in lower case; the first one found is used.
NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "train/loss", "train_loss", "training_loss", "loss/train", "train/loss_step", "train_loss_step"),
    "grad_norm": (
        "grad_norm",
        "train/grad_norm",
        "gradient_norm",
        "grad/norm",
        "gnorm",
        "total_grad_norm",
        "global_norm",
    ),
    "learning_rate": (
        "learning_rate",
        "lr",
        "train/learning_rate",
        "train/lr",
        "lr/learning_rate",
        "lr-adamw",
        "lr-adam",
    ),
    "auxiliary_loss": ("auxiliary_loss", "aux_loss", "train/aux_loss", "load_balancing_loss"),
    "accuracy": ("accuracy", "train/accuracy", "acc", "train_acc"),
    "batch_size": ("batch_size", "train/batch_size", "global_batch_size"),
}
#: Contents of a CSV cell that count as empty.
_EMPTY = ["", *(form for word in ("none", "null", "na") for form in (word, word.upper(), word.capitalize()))]
#: Part of the names of TensorBoard's event files.
_EVENT_FILE = "tfevents"
_STEPS = ("step", "global_step", "train/global_step", "_step", "iteration", "iter", "update", "num_updates")


def read_log(path: str | os.PathLike[str], *, allow_gaps: bool = False) -> xr.Dataset:
    """Read the metrics of each step from a log, as monitors that `workbench.diagnose` accepts.

    Args:
        path: Path of a CSV file with one row for each step and columns in any order, or of a folder or file of
            TensorBoard events. Columns and tags are found by their usual names (``loss``, ``train/loss``, ``lr``, ...,
            including those of Hugging Face's Trainer).
        allow_gaps: Accept a log in which steps are missing. A log with evenly spaced steps, such as every tenth
            step, is always accepted.

    Returns:
        Dataset with dim ``step`` of those ``MONITORS`` variables that the log has; NaN where a row lacks a value.

    Raises:
        StoreError: If the path does not exist, or cannot be read.
        SchemaError: If the log has no steps or no loss, a step is repeated or decreases, or steps are missing.
        MissingPackageError: If the path is a TensorBoard log and the package is not installed.

    Example:
        >>> import csv
        >>> import workbench as wb
        >>> with open("log.csv", "w", newline="") as file:
        ...     csv.writer(file).writerows([("step", "train/loss", "lr"), (0, 3.5, 0.001), (1, 3.1, 0.001)])
        >>> wb.read_log("log.csv")["loss"].values
        array([3.5, 3.1])

    See Also:
        `workbench.diagnose`: Finds the causes of a failed run.
        `workbench.open_run`: Opens a run of the workbench.
    """
    path = Path(path)
    if not path.exists():
        raise StoreError(
            f"There is no log at {path}; check the path.", name="path", value=path, expected="an existing log"
        )
    steps, columns = _read_events(path) if path.is_dir() or _EVENT_FILE in path.name else _read_csv(path)
    _check_steps(path, steps, allow_gaps=allow_gaps)
    return _dataset(path, steps, columns)


def is_log(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a log for `read_log` (a CSV file or TensorBoard events) rather than a run."""
    path = Path(path)
    if path.is_dir():
        return not (path / "zarr.json").exists() and any(path.glob(f"*{_EVENT_FILE}*"))
    return path.is_file() and (_EVENT_FILE in path.name or path.name.lower().endswith((".csv", ".csv.gz")))


def _dataset(path: Path, steps: np.ndarray, columns: dict[str, np.ndarray]) -> xr.Dataset:
    import xarray as xr

    variables = {name: ("step", values, MONITORS[name].attrs) for name, values in columns.items()}
    found = xr.Dataset(variables, coords={"step": steps})
    found.attrs = {"subject": path.stem if path.is_file() else path.name, "source": str(path)}
    return found


def _read_csv(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    import pandas as pd

    try:
        # A row may have more cells than the header; a name that the header has twice becomes two names.
        table = pd.read_csv(
            path, dtype=str, encoding="utf-8-sig", skip_blank_lines=False, skipinitialspace=True, index_col=False,
            keep_default_na=False, na_values=_EMPTY, usecols=lambda _: True,
        )  # fmt: skip
    except (OSError, UnicodeDecodeError, pd.errors.ParserError) as error:
        raise StoreError(
            f"{path} cannot be read as a CSV file ({error}); export the log again.",
            name="path",
            value=path,
            expected="a CSV file",
        ) from error
    except pd.errors.EmptyDataError:
        table = pd.DataFrame()
    table.index += 2  # lines of the file
    table = table.apply(lambda column: column.str.strip()).replace("", None).dropna(how="all")
    if table.empty:
        raise SchemaError(
            f"{path} has no rows below its header; export a log with one row per step.",
            name="path",
            value=path,
            expected="a log with one row per step",
        )
    header = {str(name).strip().lower(): str(name) for name in reversed(table.columns)}
    known = ", ".join(str(name).strip().lower() for name in table.columns)
    step = next((header[name] for name in _STEPS if name in header), None)
    if step is None:
        raise _missing_column(path, "step", known)
    chosen = {name: next((header[a] for a in names if a in header), None) for name, names in NAMES.items()}
    if chosen["loss"] is None:
        raise _missing_column(path, "loss", known)
    # Hugging Face's Trainer writes rows without a loss for evaluations and at the end.
    table = table[table[chosen["loss"]].notna()]
    if table.empty:
        raise SchemaError(
            f"{path} has no row with a loss; export a log with the loss of each step.",
            name="loss",
            expected="present in each row of a step",
        )
    steps = _numbers(path, table[step])
    if (is_whole := steps % 1 == 0).all():
        columns = {name: _numbers(path, table[column]) for name, column in chosen.items() if column is not None}
        return steps.astype(np.int64), columns
    line = table.index[np.argmin(is_whole)]
    raise SchemaError(
        f"The step in line {line} of {path} is not an integer; write the step of each row.",
        name=step.strip(),
        value=table[step].loc[line],
        expected="an integer",
    )


def _missing_column(path: Path, name: str, known: str) -> SchemaError:
    """Create the error for a log without a required column."""
    return SchemaError(
        f"{path} has no column '{name}' among {known}; name it '{name}'.",
        name=name,
        value=known,
        expected="a column of the log",
    )


def _numbers(path: Path, column: pd.Series[str]) -> np.ndarray:
    """Convert a column to numbers; NaN where a cell is empty or missing."""
    try:
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    except ValueError:
        import pandas as pd

        line: Any = (pd.to_numeric(column, errors="coerce").isna() & column.notna()).idxmax()
        raise SchemaError(
            f"Line {line} of {path} has {column.loc[line]!r} for {str(column.name).strip()}, expected a number; "
            "correct the line or leave it empty.",
            name=str(column.name).strip(),
            value=column.loc[line],
            expected="a number",
        ) from None


def _read_events(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise MissingPackageError(
            "Reading a TensorBoard log needs the package tensorboard; install it (pip install tensorboard), or "
            "export the log as CSV.",
            name="tensorboard",
            expected="installed",
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = {tag.lower(): tag for tag in events.Tags()["scalars"]}
    if not tags:
        raise StoreError(
            f"{path} has no scalars of TensorBoard; pass the folder that holds the files events.out.tfevents.*.",
            name="path",
            value=path,
            expected="a TensorBoard log with scalars",
        )
    chosen = {name: next((tags[a] for a in names if a in tags), None) for name, names in NAMES.items()}
    if chosen["loss"] is None:
        known = ", ".join(sorted(tags))
        raise SchemaError(
            f"{path} has no scalar 'loss' among {known}; log it as 'loss' or 'train/loss'.",
            name="loss",
            value=known,
            expected="a scalar of the log",
        )
    scalars = {
        name: [(event.step, event.value) for event in events.Scalars(tag)]
        for name, tag in chosen.items()
        if tag is not None
    }
    steps = np.array([step for step, _ in scalars["loss"]], dtype=np.int64)
    columns = {}
    for name, found in scalars.items():
        by_step = dict(found)
        columns[name] = np.array([by_step.get(int(step), math.nan) for step in steps], dtype=np.float64)
    return steps, columns


def _check_steps(path: Path, steps: np.ndarray, *, allow_gaps: bool) -> None:
    """Raise if the steps do not increase, or are not evenly spaced."""
    intervals = np.diff(steps)
    if len(bad := np.flatnonzero(intervals <= 0)):
        at = int(bad[0])
        how = "is repeated" if intervals[at] == 0 else f"is followed by {steps[at + 1]}"
        raise SchemaError(
            f"Step {steps[at]} of {path} {how}, expected increasing steps; keep the rows of one run, each once.",
            name="step",
            value=int(steps[at + 1]),
            expected=f"greater than {steps[at]}",
        )
    if allow_gaps or not len(intervals):
        return
    usual = int(np.median(intervals))
    # The first interval may be shorter: many logs begin at step 0 or 1 and then keep every tenth step.
    gaps = np.flatnonzero(intervals > usual)
    if len(gaps):
        at = int(gaps[0])
        raise SchemaError(
            f"{path} lacks steps between {steps[at]} and {steps[at + 1]}, expected one every {usual}; export the "
            "complete log, or pass allow_gaps=True to continue without them.",
            name="step",
            value=int(steps[at + 1]),
            expected=f"at most {usual} after step {steps[at]}",
        )
