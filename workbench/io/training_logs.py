"""Read training logs of other tools as monitors of a run."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError, StoreError, WorkbenchError
from workbench.formatting import clipped, listed
from workbench.io.files import as_path
from workbench.io.log_rows import COUNTERS, EVENT_FILE, HELD_OUT, LOG, LogRows, counter_of, read_rows, words_of
from workbench.schema.runs import MONITORS

if TYPE_CHECKING:
    import xarray as xr

    Columns = Mapping[str, tuple[Any, ...]]

#: Words that do not change the meaning of a name.
_PLAIN = set(
    words_of("train training trainer metric metrics global avg average mean total step batch iter reduced current s")
)
#: Name of a monitor -> sets of words, one of which its name in a log has, and words that it may have.
NAMES: dict[str, tuple[tuple[set[str], ...], set[str]]] = {
    "loss": (({"loss"}, {"cross", "entropy"}, {"nll"}, {"xent"}, {"cost"}, {"trl"}),
        set(words_of("lm language model modeling ce cross entropy nll token epoch"))),
    "grad_norm": (({"grad", "norm"}, {"gradient", "norm"}, {"gnorm"}, {"global", "norm"}, {"norm"}),
        set(words_of("grad gradient gradients optim optimizer l 2 0 raw pre before clip clipping unclipped all"))),
    "learning_rate": (({"lr"}, {"learning", "rate"}, {"learningrate"}),
        set(words_of("lr optim optimizer group 0 pg 1 adam adamw w decoupled fused sgd lion muon scheduler schedule"))),
    "auxiliary_loss": (
        ({"aux", "loss"}, {"auxiliary", "loss"}, {"balancing", "loss"}, {"balance", "loss"}), {"load", "moe"}
    ),
    "accuracy": (({"accuracy"}, {"acc"}), {"token", "top", "1"}),
    "batch_size": (({"batch", "size"},), set()),
}  # fmt: skip
_PERPLEXITY: tuple[tuple[set[str], ...], set[str]] = (({"ppl"}, {"perplexity"}), set())
#: Words in the names of losses other than that of a batch of training.
_OTHER_LOSSES = HELD_OUT | set(
    words_of(
        "scale scaler scaling aux auxiliary balancing balance load z router best min max std var vs delta change "
        "weight ratio ppl perplexity kl ema penalty limit fn smoothing"
    )
)
_STATE = "trainer_state.json"
_LOG_FILES = (".csv", ".csv.gz", ".tsv", ".jsonl", ".ndjson", ".json", ".log", ".out", ".err", ".txt")
#: Files of a folder, and bytes of a file, in which a log is sought; rows that may be numbered without a step.
_MOST_FILES, _FIRST_BYTES, _LEAST_ROWS = 2000, 16_384, 5
_MOST_NOTES = 8  # of one kind


def read_log(path: str | os.PathLike[str]) -> xr.Dataset:
    r"""Read the numbers of each step from the log of another tool, as monitors that `workbench.diagnose` accepts.

    Numbers are recognized by the words of their names: ``train/loss``, ``lm loss`` and ``train_loss_step`` are a loss;
    ``val_loss`` and ``loss scale`` are not. Of several runs, ranks or losses, the one with the most rows is read, and
    the others are kept by name. Where the steps go back the run was resumed, and its later rows replace the earlier
    ones. The other numbers are placed in the first row at or after their step.

    Args:
        path: A text with names and numbers in any form (``step: 10 loss: 2.5``), lines of JSON, a CSV file (W&B's
            exports as well), ``trainer_state.json``, or TensorBoard events; or a folder with such files, or with
            checkpoints of Hugging Face's Trainer, whose latest one is read. Text may be packed by gzip.

    Returns:
        Dataset with dim ``step`` of those ``MONITORS`` variables that the log has, and of its other numbers; NaN where
        a row lacks a value. The attribute ``source_name`` of a variable is its name in the log. Attributes of the
        dataset: ``notes`` states what was chosen or changed; ``missing`` what a diagnosis would use and the log lacks;
        ``resumed_at`` the steps at which the run was resumed, if any.

    Raises:
        StoreError: If the path does not exist, or cannot be read.
        SchemaError: If the log has no steps or no loss.
        MissingPackageError: If the path is a TensorBoard log and the package is not installed.

    Example:
        >>> import workbench as wb
        >>> with open("train.log", "w") as file:
        ...     _ = file.write("step 0: loss 3.5, lr 0.001\nstep 10: loss 3.1, lr 0.001\n")
        >>> log = wb.read_log("train.log")
        >>> log["loss"].values, log.attrs["missing"]
        (array([3.5, 3.1]), 'no gradient norm')

    See Also:
        `workbench.diagnose`: Finds the causes of a failed run.
        `workbench.open_run`: Opens a run of the workbench.
    """
    path = as_path(path)
    rows = LogRows()
    with LOG.reading(path):
        for file, label in _files_of(path):
            read_rows(file, rows, label)
    runs = {label: name for label, columns in rows.runs.items() if (name := _loss_of(columns))}
    if not runs:
        raise _no_loss(path, rows)
    label = max(runs, key=lambda each: (len(rows.runs[each][runs[each]][0]), not each))
    notes = list(rows.remarks)
    if len(runs) > 1:
        names = listed(f"'{each or 'rank 0'}'" for each in itertools.islice(runs, _MOST_NOTES))
        notes.append(f"The log has {len(runs)} runs or ranks ({names}); '{label or 'rank 0'}' has the most rows.")
    columns = dict(rows.runs[label])
    if HELD_OUT & set(words_of(runs[label])):
        notes.append(f"The log has no loss of training; '{runs[label]}' is read.")
    row_steps, counted_by = _steps_of(path, rows, columns, runs[label], notes)
    of_loss, loss = (np.asarray(each) for each in columns.pop(runs[label]))
    at = row_steps[of_loss]
    # A table may fill the loss of rows that are not steps with NaN.
    is_row = np.isfinite(at) & ~(np.isnan(loss) & (np.diff(at, prepend=-1) == 0))
    of_loss, loss, at = of_loss[is_row], loss[is_row], at[is_row].astype(np.int64)
    kept, resumed = _later_rows(at, notes)
    steps, found = at[kept], {"loss": (runs[label], loss[kept])}
    padded = np.pad(np.diff(steps), 1)
    gaps = np.flatnonzero(padded[1:-1] > 1.5 * np.maximum(padded[:-2], padded[2:])) if len(steps) > 2 else padded[:0]
    notes += [f"No steps between {steps[i]} and {steps[i + 1]}." for i in gaps[:_MOST_NOTES]]

    def placed(of_values: Any, values: Any, places: np.ndarray, *, is_same_run: bool = True) -> np.ndarray:
        """Return values in the rows of the loss."""
        of_values, values = np.asarray(of_values), np.asarray(values)
        own = places[of_values]
        for first in resumed if is_same_run and of_values[-1] > of_loss[0] else ():
            own = np.where((of_values < of_loss[first]) & (own >= at[first]), np.nan, own)
        of_values, values, own = (each[np.isfinite(own)] for each in (of_values, values, own))
        last = _later_rows(own, [])[0]
        result = np.full(len(steps), np.nan)
        result[np.searchsorted(steps, own[last]).clip(max=len(steps) - 1)] = values[last]
        return result

    for monitor in list(NAMES)[1:]:
        if name := _named(columns, NAMES[monitor]):
            found[monitor] = name, placed(*columns.pop(name), row_steps)
    # Megatron draws its numbers over samples as well, such as "lm loss vs samples".
    left = {name for name in columns if name in counted_by or name[:4] == "bar " or "vs" in words_of(name)}
    others = {name: placed(*column, row_steps) for name, column in columns.items() if name not in left}
    for other, name in runs.items():
        if other != label:
            places = _steps_of(path, rows, rows.runs[other], name, [])[0]
            others[f"{other or 'rank 0'}/{name}"] = placed(*rows.runs[other][name], places, is_same_run=False)
    _convert(found, others, rows, notes)
    import xarray as xr

    variables = {name: ("step", v, MONITORS[name].attrs | {"source_name": own}) for name, (own, v) in found.items()}
    for name, values in others.items():
        key = re.sub(r"\W+", "_", name).strip("_") or "unnamed"
        while key in variables or key in MONITORS or key == "step":
            key += "_of_log"
        described = {"long_name": name, "units": rows.units.get(name, "1"), "source_name": name}
        variables[key] = ("step", values, described)
    log = xr.Dataset(variables, coords={"step": steps})
    log.attrs = {"subject": path.stem if path.is_file() else path.name, "source": str(path)}
    absent = [f"no {MONITORS[name].long_name}" for name in ("grad_norm", "learning_rate") if name not in found]
    log.attrs |= {"missing": ", ".join(absent), "notes": " ".join(notes)}
    if len(resumed):
        log.attrs["resumed_at"] = at[resumed].tolist()
    return log


def is_log(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a log for `read_log` rather than a run, from its name and its first rows."""
    path = Path(path)
    name = path.name.lower()
    if path.is_dir():
        is_run = (path / "zarr.json").exists()
        return not is_run and ((path / _STATE).is_file() or any(path.glob(f"*{EVENT_FILE}*")))
    if not path.is_file() or EVENT_FILE in name or name.endswith((*_LOG_FILES[:2], _STATE)):
        return path.is_file()
    if not name.endswith(_LOG_FILES):
        return False
    rows = LogRows()
    try:
        read_rows(path, rows, most=_FIRST_BYTES)
    except (OSError, WorkbenchError):
        return False
    found = ((_loss_of(columns), columns) for columns in rows.runs.values() if any(map(counter_of, columns)))
    return any(len(columns[loss][0]) > 1 for loss, columns in found if loss)


def _files_of(path: Path) -> list[tuple[Path, str]]:
    """Return the files of a log, each with the name of its run; empty if there is only one."""
    if not path.is_dir():
        return [(path, "")]
    files = sorted(itertools.islice((file for file in path.rglob("*") if file.is_file()), _MOST_FILES))
    states = [file for file in files if file.name == _STATE]
    number = {state: int("".join(re.findall(r"\d+$", state.parent.name)) or 0) for state in states}
    latest = sorted(states, key=lambda state: (state.parent == path, number[state]))[-1:]
    metrics = [file for file in files if "metrics" in file.parts and not file.suffix]
    # Events beside the latest checkpoint may go on after it.
    found = [(file, file) for file in latest] + [(file, file.parent) for file in files if EVENT_FILE in file.name]
    found = found or [(file, Path(*file.parts[: file.parts.index("metrics")])) for file in metrics]
    found = found or [(file, file) for file in files if is_log(file)]
    if not found:
        raise StoreError(
            f"{path} holds no log; pass a folder with TensorBoard events, trainer_state.json, or text, CSV or JSON.",
        )  # fmt: skip
    is_one = len({place for _, place in found}) == 1
    return [(file, "" if is_one or place == path else place.relative_to(path).as_posix()) for file, place in found]


def _named(columns: Columns, words: tuple[tuple[set[str], ...], set[str]]) -> str:
    """Return the name that fits, with the most values and the fewest words; empty if none fits."""
    needed, allowed = words
    last = [name.rpartition("/")[2] for name in columns]
    own = {name: set(words_of(name)) for name in columns}
    # Names such as "actor/lr" fit as well, if no other one ends so.
    ends = {n: set(words_of(end)) for n, end in zip(columns, last, strict=True) if last.count(end) == 1}
    for each in (own, {name: end for name, end in ends.items() if not HELD_OUT & own[name]}):
        fit = {  # the place of the words that it has, in the order of the table
            name: next((i for i, need in enumerate(needed) if need <= has <= need | allowed | _PLAIN), -1)
            for name, has in each.items()
        }
        fit = {name: place for name, place in fit.items() if place >= 0}
        most = max((len(columns[name][0]) for name in fit), default=0)
        often = [name for name in fit if 2 * len(columns[name][0]) >= most]
        if often:
            return min(often, key=lambda n: (len({"total", "epoch"} & own[n]), fit[n], len(words_of(n))))
    return ""


def _loss_of(columns: Columns) -> str:
    """Return the name of the loss of training: a plain one, one of a part, or, if there is no other, held out."""
    losses = {name: set(words_of(name)) for name in columns if any(word.endswith("loss") for word in words_of(name))}
    parts = [name for name, has in losses.items() if not has & _OTHER_LOSSES]
    held_out = [name for name, has in losses.items() if not has & (_OTHER_LOSSES - HELD_OUT)]
    return _named(columns, NAMES["loss"]) or max(parts or held_out, key=lambda name: len(columns[name][0]), default="")


def _steps_of(path: Path, rows: LogRows, columns: Columns, loss: str, notes: list[str]) -> tuple[np.ndarray, list[str]]:
    """Return the step of each row, NaN before the first one, and the names of the columns that it comes from."""
    of_loss = np.asarray(columns[loss][0])
    groups: dict[tuple[int, str], list[str]] = {}
    fraction: tuple[str, float] | None = None
    for name in columns:
        if kind := counter_of(name):
            groups.setdefault((COUNTERS.index(kind), name if kind == "bar" else ""), []).append(name)
    epoch = _filled(rows.n_rows, [columns[name] for name in columns if counter_of(name) in ("epoch", "epochs")])
    # A counter that changes in most rows is preferred; ranks or micro-batches may repeat the steps of a log.
    for least, ((place, _), names) in itertools.product((0.5, 0.02), sorted(groups.items())):
        found = _filled(rows.n_rows, [columns[name] for name in names])
        at = found[of_loss]
        known = at[np.isfinite(at)]
        if 2 * len(known) < len(at) or (len(at) > 1 and (np.diff(known) != 0).sum() < least * (len(known) - 1)):
            continue
        for name in (names[0], loss):
            if name in rows.not_numbers:
                line, cell = rows.not_numbers[name]
                remedy = f"correct line {line} of {path}, or leave it empty there"
                raise SchemaError.of(name, cell, "a number", remedy=remedy)
        kind, is_whole = COUNTERS[place], not (known % 1).any()
        if not is_whole and kind not in ("epoch", "epochs"):
            fraction = fraction or (names[0], float(at[np.argmax(at % 1 != 0)]))
        elif is_whole:
            if kind in ("bar", *COUNTERS[COUNTERS.index("batch") :]):
                notes.append(f"The steps are those of '{names[0]}'.")
            total = float(words_of(names[0])[1]) if kind == "bar" else math.inf
            return _over_epochs(found, epoch, of_loss, total, notes) if "epoch" not in kind else found, names
    if fraction:
        raise SchemaError.of(*fraction, "an integer", remedy=f"write the step of each row of {path}")
    if len(of_loss) < _LEAST_ROWS:
        raise _missing(path, "step", columns)
    notes.append(f"The log has no steps; its {len(of_loss)} rows with a loss are numbered.")
    return _filled(rows.n_rows, [(of_loss, np.arange(1.0, len(of_loss) + 1))]), []


def _filled(n_rows: int, columns: list[tuple[Any, Any]]) -> np.ndarray:
    """Return the values of columns, the first one first, in all rows; each holds until the next one."""
    found = np.full(n_rows, np.nan)
    for own, values in reversed(columns):
        found[np.asarray(own)] = np.asarray(values)
    last = np.maximum.accumulate(np.where(np.isfinite(found), np.arange(n_rows), -1))
    return np.where(last >= 0, found[last], np.nan)


def _over_epochs(
    found: np.ndarray, epoch: np.ndarray, of_loss: np.ndarray, total: float, notes: list[str]
) -> np.ndarray:
    """Number steps on that begin again in each epoch, or after a bar was full."""
    at, in_epoch = found[of_loss], np.floor(epoch[of_loss])
    again = np.flatnonzero(np.diff(at) < 0) + 1
    interval = np.median(np.abs(np.diff(at))) if len(at) > 1 else 0
    is_full = (total < math.inf) & (at[again - 1] + max(interval, 0.2 * total) >= total)
    is_next = (in_epoch[again] > in_epoch[again - 1]) | is_full
    if not len(again) or not is_next.all():
        return found
    last = at[again - 1].max() + (interval if at[again].min() == 0 else 0)
    length = last if math.isinf(total) else total
    notes.append(f"The steps begin again in each epoch and are numbered on, {length:.0f} in each.")
    return found + length * np.searchsorted(of_loss[again], np.arange(len(found)), side="right")


def _later_rows(at: np.ndarray, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that count, with increasing steps, and the first row after each resumption."""
    back = np.flatnonzero(np.diff(at) < 0) + 1
    if len(back) > max(3, 0.05 * len(at)):
        notes.append(f"The steps go back {len(back)} times, as if processes had written at once; the last rows count.")
        order = np.argsort(at, kind="stable")
        return order[np.append(np.diff(at[order]) > 0, True)], back[:0]
    notes += [f"The run was resumed at step {at[i]:.0f} after step {at[i - 1]:.0f}." for i in back]
    if repeated := int((np.diff(at) == 0).sum()):
        notes.append(f"Of rows with the same step the last one counts ({repeated} left out).")
    least = np.minimum.accumulate(at[::-1])[::-1]
    return np.flatnonzero(np.append(at[:-1] < least[1:], True)[: len(at)]), back


def _convert(
    found: dict[str, tuple[str, np.ndarray]], others: Mapping[str, np.ndarray], rows: LogRows, notes: list[str]
) -> None:
    """Convert percent to fractions, and a loss in bits (as fairseq logs it) to nats."""
    name, accuracy = found.get("accuracy", ("", np.zeros(1)))
    if rows.units.get(name) == "%" or np.nanmax(accuracy, initial=0) > 1.5:
        found["accuracy"] = name, accuracy / 100
        notes.append(f"'{name}' is in percent and was divided by 100.")
    name, loss = found["loss"]
    perplexity = others.get(_named({each: (v,) for each, v in others.items()}, _PERPLEXITY))
    if perplexity is not None:
        with np.errstate(all="ignore"):
            bits, nats = (np.nanmedian(np.abs(log(perplexity) - loss)) for log in (np.log2, np.log))
        if bits < 0.02 and bits < nats / 10:
            found["loss"] = name, loss * math.log(2)
            notes.append(f"'{name}' is in bits, as its perplexity shows, and was converted to nats.")


def _no_loss(path: Path, rows: LogRows) -> SchemaError:
    columns = {name: column for run in rows.runs.values() for name, column in run.items()}
    if columns and not rows.likely:
        return _missing(path, "loss", columns)
    seen = f"the line closest to it is {clipped(rows.likely, 120)!r}" if rows.likely else "it has no numbers by name"
    seen = "; ".join([seen, *(remark.rstrip(".") for remark in rows.remarks)])
    return SchemaError(
        f"{path} has no step with a loss that is recognized; {seen}. Lines such as 'step: 10 loss: 2.5', lines of JSON "
        "with 'step' and 'loss', or a CSV file with these columns can be read."
    )


def _missing(path: Path, name: str, columns: Mapping[str, Any]) -> SchemaError:
    known = ", ".join(itertools.islice(columns, 40))
    return SchemaError.of(name, known, f"a column of {path}", remedy=f"name the column '{name}'")
