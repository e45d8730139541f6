"""Read the training logs of other tools: CSV files, and TensorBoard folders or files."""

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

#: Name of a monitor -> its names in logs, in lower case; the first that is found is used.
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
#: Part of the names of TensorBoard's files of events.
_EVENT_FILE = "tfevents"
_STEPS = ("step", "global_step", "train/global_step", "_step", "iteration", "iter", "update", "num_updates")


def read_log(path: str | os.PathLike[str], *, allow_gaps: bool = False) -> xr.Dataset:
    """Read the numbers of each step from a log, as monitors that `workbench.diagnose` accepts.

    Args:
        path: Path of a CSV file with one row for each step, in any order of columns, or of a folder or file of
            TensorBoard events. Columns and tags are found by their usual names (``loss``, ``train/loss``, ``lr``, ...,
            also those of Hugging Face's Trainer).
        allow_gaps: Accept a log in which steps are missing. A log that was thinned evenly, such as to every tenth
            step, is accepted in any case.

    Returns:
        Dataset of ``MONITORS`` variables with dim ``step``, as many as the log has; a number that a row lacks is NaN.

    Raises:
        StoreError: If there is nothing at the path, or it cannot be read.
        SchemaError: If it has no steps or no loss, a step comes twice or falls, or steps are missing.
        MissingPackageError: If a TensorBoard log is given and the package is not installed.

    Example:
        >>> import workbench as wb
        >>> import csv
        >>> with open("log.csv", "w", newline="") as file:
        ...     csv.writer(file).writerows([("step", "train/loss", "lr"), (0, 3.5, 0.001), (1, 3.1, 0.001)])
        >>> wb.read_log("log.csv")["loss"].values
        array([3.5, 3.1])
    """
    path = Path(path)
    if not path.exists():
        raise StoreError(f"There is no log at {path}; check the path.")
    steps, columns = _read_events(path) if path.is_dir() or _EVENT_FILE in path.name else _read_csv(path)
    _check_steps(path, steps, allow_gaps=allow_gaps)
    return _dataset(path, steps, columns)


def is_log(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a log for `read_log` rather than of a run: a CSV file, or events of TensorBoard."""
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
        raise StoreError(f"{path} cannot be read as a CSV file ({error}); export the log again.") from error
    except pd.errors.EmptyDataError:
        table = pd.DataFrame()
    table.index += 2  # lines of the file
    table = table.apply(lambda column: column.str.strip()).replace("", None).dropna(how="all")
    if table.empty:
        raise SchemaError(f"{path} has no rows under its header; export a log with one row a step.")
    header = {str(name).strip().lower(): str(name) for name in reversed(table.columns)}
    known = ", ".join(str(name).strip().lower() for name in table.columns)
    step = next((header[name] for name in _STEPS if name in header), None)
    if step is None:
        raise SchemaError(f"{path} has no column of steps among {known}; name it 'step'.")
    chosen = {name: next((header[a] for a in names if a in header), None) for name, names in NAMES.items()}
    if chosen["loss"] is None:
        raise SchemaError(f"{path} has no column of the loss among {known}; name it 'loss'.")
    # Rows without a loss are those of evaluations and of the end, as Hugging Face's Trainer writes them.
    table = table[table[chosen["loss"]].notna()]
    if table.empty:
        raise SchemaError(f"{path} has no row with a loss; export a log with one row a step.")
    steps = _numbers(path, table[step])
    if (is_whole := steps % 1 == 0).all():
        columns = {name: _numbers(path, table[column]) for name, column in chosen.items() if column is not None}
        return steps.astype(np.int64), columns
    line = table.index[np.argmin(is_whole)]
    raise SchemaError(f"Line {line} of {path} has no whole number for its step; write the step of each row.")


def _numbers(path: Path, column: pd.Series[str]) -> np.ndarray:
    """A column as numbers; NaN where a cell is empty or missing."""
    try:
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    except ValueError:
        import pandas as pd

        line: Any = (pd.to_numeric(column, errors="coerce").isna() & column.notna()).idxmax()
        raise SchemaError(
            f"Line {line} of {path} has {column.loc[line]!r} for {str(column.name).strip()}, expected a number; "
            "correct the line or leave it empty."
        ) from None


def _read_events(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise MissingPackageError(
            "Reading a TensorBoard log needs the package tensorboard; install it (pip install tensorboard), or "
            "export a CSV."
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = {tag.lower(): tag for tag in events.Tags()["scalars"]}
    if not tags:
        raise StoreError(
            f"{path} has no scalars of TensorBoard; pass the folder that holds the files events.out.tfevents.*."
        )
    chosen = {name: next((tags[a] for a in known if a in tags), None) for name, known in NAMES.items()}
    if chosen["loss"] is None:
        raise SchemaError(
            f"{path} has no scalar of the loss among {', '.join(sorted(tags))}; log it as 'loss' or 'train/loss'."
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
    """Refuse steps that do not rise, or not evenly."""
    apart = np.diff(steps)
    if len(bad := np.flatnonzero(apart <= 0)):
        at = int(bad[0])
        how = "comes twice" if apart[at] == 0 else f"is followed by {steps[at + 1]}"
        raise SchemaError(
            f"Step {steps[at]} of {path} {how}, expected steps that rise; keep the rows of one run, each once."
        )
    if allow_gaps or not len(apart):
        return
    usual = int(np.median(apart))
    # Many logs begin at step 0 or 1 and then keep every tenth; that first interval may be shorter.
    holes = np.flatnonzero(apart > usual)
    if len(holes):
        at = int(holes[0])
        raise SchemaError(
            f"{path} lacks steps between {steps[at]} and {steps[at + 1]}, expected one every {usual}; export the "
            f"whole log, or pass "
            "allow_gaps=True to go on without them."
        )
