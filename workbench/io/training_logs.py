"""Logs of training that are no store of ours: CSV files and TensorBoard folders."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import MissingPackageError, SchemaError, StoreError
from workbench.schema.runs import MONITORS

if TYPE_CHECKING:
    import xarray as xr

#: Name of a monitor -> what logs call it, in lower case; the first that is found counts.
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
_STEPS = ("step", "global_step", "train/global_step", "_step", "iteration", "iter", "update", "num_updates")


def read_log(path: str | os.PathLike[str], *, allow_gaps: bool = False) -> xr.Dataset:
    """The numbers of each step from a log, as monitors that `workbench.diagnose` takes.

    Args:
        path: Of a CSV file with one row a step, in any order of columns, or of a folder of TensorBoard events. Columns
            and tags are known by their usual names (``loss``, ``train/loss``, ``lr``, ..., Hugging Face's Trainer's
            included).
        allow_gaps: Take a log in which steps are missing; what lies in a hole is then simply not known. A log that was
            thinned evenly, such as every ten steps, needs no permission.

    Returns:
        Dataset of ``MONITORS`` variables with dim ``step``, as many as the log has; a number that a row lacks is NaN.

    Raises:
        StoreError: If there is nothing at the path, or it cannot be read.
        SchemaError: If it has no steps or no loss, a step comes twice or falls, or steps are missing.
        MissingPackageError: If a TensorBoard folder is given and the package is not there.
    """
    path = Path(path)
    if not path.exists():
        raise StoreError(f"There is no log at {path}; check the path.")
    steps, columns = _read_events(path) if path.is_dir() else _read_csv(path)
    _check_steps(path, steps, allow_gaps=allow_gaps)
    return _dataset(path, steps, columns)


def _dataset(path: Path, steps: np.ndarray, columns: dict[str, np.ndarray]) -> xr.Dataset:
    import xarray as xr

    variables = {name: ("step", values, MONITORS[name].attrs) for name, values in columns.items()}
    found = xr.Dataset(variables, coords={"step": steps})
    found.attrs = {"subject": path.stem if path.is_file() else path.name, "source": str(path)}
    return found


def _read_csv(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError(f"{path} cannot be read as a CSV file ({error}); export the log again.") from error
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if len(rows) < 2:
        raise SchemaError(f"{path} has no rows under its header; export a log with one row a step.")
    header = [cell.strip().lower() for cell in rows[0]]
    step_at = next((header.index(name) for name in _STEPS if name in header), None)
    if step_at is None:
        raise SchemaError(f"{path} has no column of steps among {', '.join(header)}; name it 'step'.")
    places = {name: next((header.index(a) for a in known if a in header), None) for name, known in NAMES.items()}
    if places["loss"] is None:
        raise SchemaError(f"{path} has no column of the loss among {', '.join(header)}; name it 'loss'.")
    # Rows without a loss are those of evaluations and of the end, as Hugging Face's Trainer writes them.
    kept = [
        (number, row)
        for number, row in enumerate(rows[1:], start=2)
        if _cell(path, number, row, places["loss"], rows[0]) is not None
    ]
    if not kept:
        raise SchemaError(f"{path} has no row with a loss; export a log with one row a step.")
    steps = [_cell(path, number, row, step_at, rows[0]) for number, row in kept]
    if any(step is None or not float(step).is_integer() for step in steps):
        number = next(
            n for (n, _), step in zip(kept, steps, strict=True) if step is None or not float(step).is_integer()
        )
        raise SchemaError(f"Line {number} of {path} has no whole number for its step; write the step of each row.")
    columns = {}
    for name, place in places.items():
        if place is not None:
            cells = [_cell(path, number, row, place, rows[0]) for number, row in kept]
            columns[name] = np.array([math.nan if cell is None else cell for cell in cells])
    return np.array([int(step) for step in steps if step is not None], dtype=np.int64), columns


def _cell(path: Path, number: int, row: list[str], place: int, header: list[str]) -> float | None:
    """A number of a row; None: the cell is empty or not there."""
    text = row[place].strip() if place < len(row) else ""
    if not text or text.lower() in ("none", "null", "na"):
        return None
    try:
        return float(text)
    except ValueError as error:
        raise SchemaError(
            f"Line {number} of {path} has {text!r} for {header[place].strip()}, expected a number; correct the line "
            f"or leave it empty."
        ) from error


def _read_events(path: Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise MissingPackageError(
            "Reading a TensorBoard folder needs the package tensorboard; install it (pip install tensorboard), or "
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
    """Steps rise, and evenly."""
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
