"""Numbers in the files that training tools write, by row and name: text, tables, JSON and TensorBoard events."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from workbench.errors import MissingPackageError, StoreError


@cache
def words_of(name: str) -> tuple[str, ...]:
    """Split a name into words in lower case: "train/CrossEntropyLoss" -> train, cross, entropy, loss."""
    return tuple(re.findall(r"[a-zµ]+|\d+", re.sub(r"([a-z\d])([A-Z])", r"\1 \2", name).lower()))


#: Part of the names of TensorBoard's event files.
EVENT_FILE = "tfevents"
#: Words for data on which a model is not trained.
HELD_OUT = set(words_of("val valid validation validate validating eval evaluation evaluating evaluate test dev tel"))
#: What numbers rows, the most reliable first; "bar" is a progress, such as "10/2000".
COUNTERS = (
    "step", "iteration", "iter", "update", "updates", "steps", "iterations", "iters", "it", "s", "_step", "bar",
    "batch", "samples", "consumed samples", "tokens", "consumed tokens", "total tokens", "tokens seen", "epoch",
    "epochs",
)  # fmt: skip
_OF_COUNTERS = HELD_OUT | set(words_of("train training trainer global completed optimizer optim opt current num of"))
#: Columns of text: the name of a metric and its value, the data that a row belongs to, and the run or rank.
_NAMES = ("metric", "key", "tag", "name", "metricname", "metric_name")
_VALUES = ("value", "metricvalue", "metric_value")
_SPLITS = ("split", "mode", "phase", "stage", "subset", "prefix")
_RUNS = ("run", "run_id", "run_name", "run_uuid", "experiment", "trial", "rank", "local_rank", "process_index")
#: Contents of a cell that count as empty.
_EMPTY = frozenset(("", "none", "null", "na", "n/a", "-"))
#: Limits, so that no file occupies the memory or the user for long.
_MOST_NAMES, _LONGEST_LINE, _LARGEST_JSON, _MOST_TEXT = 10_000, 32_000_000, 200_000_000, 20_000_000_000
#: Largest ratio of a text to its packed file; longest part of a line that is searched; most progress bars of a log.
_MOST_UNPACKED, _MOST_SEARCHED, _MOST_BARS = 200, 20_000, 8

_NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?|[-+]?(?:nan|inf(?:inity)?)\b"
)
_WORD = r"[A-Za-z_][\w./@%+*#-]*+(?:\([^()]{0,20}\))?"
#: A name and its number: "lm loss: 2.5E+00", "loss 2.5,", "'loss': '2.5'", "lr=[1e-4,", but no time, date or version.
_PAIR = re.compile(
    rf"(?<![\w/.@%-])({_WORD}(?: (?:{_WORD}|\([^()]{{1,20}}\))){{0,5}}?)(?:['\"]?\s*(?:[:=]+|->)\s*|(\s+))"
    rf"['\"\[(]*(?:tensor\()?({_NUMBER})(?![:-]\d|\.\d)(%|[A-Za-zµ]+)?",
    re.IGNORECASE,
)
#: Last words of names that may stand before their number without a sign, as in "loss 2.5".
_SPOKEN = set(words_of("loss lr rate norm gnorm nll ppl perplexity acc accuracy"))
_CELL = re.compile(rf"({_NUMBER})\s?(%|[A-Za-zµ/]+)?", re.IGNORECASE)
_THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BAR = re.compile(r"(?<![\d/.])(\d+)\s*/\s*(\d+)(?![\d/.])")
_RANK = re.compile(r"\b(?:default|local_rank|rank)[ _:=]*(\d+)\b\]?:?", re.IGNORECASE)
_CONTEXT = re.compile(rf"\b(?:{'|'.join(sorted(HELD_OUT))})\b", re.IGNORECASE)
#: What is no part of a message: colors, date and time, and the line of code.
_PREFIX = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\d{4}[-/]\d\d[-/]\d\d[T _-]\d\d:?\d\d:?\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?|"
    r"\b[\w/]+(?:\.\w+)+:\d+\b(?![\d.])"
)
#: How a document of JSON begins that is not a row of a log.
_JSON = re.compile(r"\s*[\[{]\s*(?:[\"\[{]|$)")
#: Lines without a name for each number, as short scripts and MLflow write them.
_BARE = [
    re.compile(form.replace("NUMBER", _NUMBER), re.IGNORECASE)
    for form in (
        r"\s*(?P<step>\d+)\s*/\s*\d+\s*:\s*(?P<loss>NUMBER)\s*",
        r"\s*(?:step |iter )?(?P<step>\d+)[:,]\s+(?P<loss>NUMBER)\s*",
        r"\s*(?P<step>\d+) (?P<key>[A-Za-z]\w*) (?P<value>NUMBER)\s*",
        r"(?P<timestamp>\d{10,}) (?P<value>NUMBER) (?P<step>\d+)\s*",
    )
]


class LogRows:
    """The numbers of a log, in the order written.

    Attributes:
        runs: Name of a run or rank ("" for the only one, and for rank 0) -> name of a metric -> rows and values.
        n_rows: Number of rows of all runs together.
        units: Name of a metric -> what stands behind its numbers, such as "%".
        not_numbers: Name of a column of a table -> line and content of its first cell that is no number.
        remarks: Sentences on what could not be read.
        likely: The line of text that looks most like a row.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, tuple[array[int], array[float]]]] = {}
        self.n_rows = 0
        self.units: dict[str, str] = {}
        self.not_numbers: dict[str, tuple[int, str]] = {}
        self.remarks: list[str] = []
        self.likely = ""

    def add(self, row: Mapping[str, Any], label: str = "", *, line: int = 0) -> None:
        """Append a row of numbers, and of texts that say which metric, data, run or rank they belong to."""
        flat = dict(_flat(row))
        lower = {re.sub(r"\W", "_", name.lower()): name for name in flat}
        for key in _RUNS:
            if key in lower and (text := str(flat.pop(lower[key])).removesuffix(".0")) not in ("", "0"):
                label = "/".join(filter(None, [label, f"rank {text}" if text.isdigit() else text]))
        key, value = (next((lower[name] for name in names if name in lower), "") for names in (_NAMES, _VALUES))
        if key and value and isinstance(flat[key], str):
            flat[flat.pop(key)] = flat.pop(value)
        split = next((str(flat[lower[key]]) for key in _SPLITS if key in lower), "")
        if HELD_OUT.intersection(words_of(split)):
            flat = {name if counter_of(name) else f"{split}/{name}": value for name, value in flat.items()}
        run = self.runs.setdefault(label, {})
        for name, content in flat.items():
            if (number := self._number(name, content)) is None:
                if line:
                    self.not_numbers.setdefault(name, (line, content))
                continue
            if name not in run and len(run) >= _MOST_NAMES:
                raise _unreadable(name, f"more than {_MOST_NAMES:,} names of metrics")
            rows, values = run.setdefault(name, (array("q"), array("d")))
            rows.append(self.n_rows)
            values.append(number)
        self.n_rows += 1

    def _number(self, name: str, content: Any) -> float | None:
        if not isinstance(content, str):
            is_number = isinstance(content, int | float) and not isinstance(content, bool) and abs(content) < 1e300
            return float(content) if is_number or content != content or content in (_INF, -_INF) else None
        try:
            return float(content)
        except ValueError:
            if (found := _CELL.fullmatch(content.strip())) is None:
                return None
        if found[2] and found[2] not in _THOUSANDS:
            self.units.setdefault(name, found[2])
        return float(found[1].replace(",", "")) * _THOUSANDS.get(found[2], 1.0)


_INF = float("inf")


@cache
def counter_of(name: str) -> str:
    """Return which of ``COUNTERS`` a name is; empty if it is none."""
    words = words_of(name)
    found = " ".join(word for word in words if word not in _OF_COUNTERS) if words[:1] != ("bar",) else "bar"
    return name if name == "_step" else found if found in COUNTERS else ""  # W&B's _step counts calls


def read_rows(file: Path, rows: LogRows, label: str = "", *, most: int = _MOST_TEXT) -> None:
    """Append the rows of a file of any kind, of its first ``most`` letters.

    Raises:
        StoreError: If the file cannot be read, is not text, or has more columns or text than a log has.
        MissingPackageError: If it is a TensorBoard log and the package is not installed.
    """
    if EVENT_FILE in file.name:
        return _read_events(file, rows, label)
    name = file.as_posix().rpartition("/metrics/")[2] if "metrics" in file.parts else file.name  # MLflow's
    try:
        with _opened(file) as text:
            lines = _bounded(text, file, most)
            head = next((line for line in lines if line.strip() and line[0] != "#"), "")
            is_alone = next(lines, None) is None
            text.seek(0)
            if _JSON.match(head) and (is_alone or _parsed(head) is None):
                if (whole := _parsed(text.read(_LARGEST_JSON))) is not None:
                    return _read_json(whole, rows, label)
                text.seek(0)
            lines = _bounded(text, file, most)
            cells = max((head.split(by) for by in ",\t;|"), key=len)
            is_table = len(cells) > 1 and not any(_CELL.fullmatch(cell.strip()) for cell in cells)
            if is_table and (any(n in file.name.lower() for n in (".csv", ".tsv")) or any(map(counter_of, cells))):
                table = csv.reader(lines, delimiter=head[len(cells[0])], skipinitialspace=True)
                return _read_table(table, rows, label, file)
            return _read_text(lines, rows, label, name)
    except (OSError, EOFError, csv.Error) as error:
        raise _unreadable(file, str(error)) from error


def _opened(file: Path) -> io.TextIOWrapper:
    """Open a file as text, unpacked if it is packed; the ends of lines of progress bars are ends of lines."""
    if not file.is_file():
        raise _unreadable(file, "no regular file")
    raw = file.open("rb")
    packed = raw.peek(2)[:2] == b"\x1f\x8b"
    data: Any = gzip.GzipFile(fileobj=raw) if packed else raw
    text = io.TextIOWrapper(io.BufferedReader(data) if packed else data, "utf-8-sig", errors="replace")
    head = data.peek(4096)[:4096]
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text.reconfigure(encoding="utf-16")
    elif b"\0" in head:
        text.close()
        raise _unreadable(file, "a binary file")
    return text


def _bounded(text: io.TextIOWrapper, file: Path, most: int) -> Iterator[str]:
    n_read, largest = 0, min(_MOST_TEXT, _MOST_UNPACKED * max(file.stat().st_size, 100_000))
    while n_read < most and (line := text.readline(_LONGEST_LINE)):
        n_read += len(line)
        if len(line) >= _LONGEST_LINE or n_read > largest:
            raise _unreadable(file, "a longer line, or more text, than a log has")
        yield line


def _unreadable(file: Path | str, why: str) -> StoreError:
    return StoreError(
        f"{file} cannot be read as a log ({why}); pass a log in text, CSV, JSON or TensorBoard events.",
        name="path", value=file, expected="a log",
    )  # fmt: skip


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _flat(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries of nested mappings by joined names, and the first entry of lists."""
    for key, value in row.items():
        while isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}/")
        else:
            yield f"{above}{key}".strip(), value


def _read_table(cells: Any, rows: LogRows, label: str, file: Path) -> None:
    """Read a table with a header; in W&B's exports of a panel, columns are "run - metric", beside their extremes."""
    header = [name.strip() for name in next((row for row in cells if row and row[0][:1] != "#"), [])]
    if len(header) > _MOST_NAMES:
        raise _unreadable("The table", f"{len(header):,} columns")
    of_run: dict[str, dict[str, int]] = {}
    if "loss" in file.stem.lower() and not any(map(_NAMES.__contains__, map(str.lower, header))):
        header = [f"{file.stem} loss" if name.lower() == "value" else name for name in header]
    for place, name in enumerate(header):
        run, _, metric = name.rpartition(" - ")
        if name and not name.endswith(("__MIN", "__MAX")):
            of_run.setdefault(run, {}).setdefault(metric, place)
    shared = of_run.pop("", {})
    for row in cells:
        if cells.dialect.delimiter == ";":
            row = [re.sub(r"^(-?\d+),(\d+)", r"\1.\2", cell) for cell in row]
        if row != header and any(row):
            for run, places in (of_run or {"": {}}).items():
                named = {n: row[at].strip() for n, at in (shared | places).items() if at < len(row)}
                found = {name: cell for name, cell in named.items() if cell.lower() not in _EMPTY}
                if not run or places.keys() & found.keys():
                    rows.add(found, "/".join(filter(None, [label, run])), line=cells.line_num)


def _read_json(whole: Any, rows: LogRows, label: str) -> None:
    """Read a list of rows, also if it has a name such as "log_history", or columns by name."""
    if isinstance(whole, Mapping):
        lists: dict[str, Any] = {name: value for name, value in whole.items() if isinstance(value, list) and value}
        columns: list[Any] = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=False)]
        nested = (value for value in lists.values() if isinstance(value[0], Mapping))
        whole = next(nested, columns or [whole])
    for row in whole if isinstance(whole, list) else ():
        if isinstance(row, list) and len(row) == 3:  # time, step and value, as TensorBoard exports them
            row = dict(zip(("timestamp", "step", "value"), row, strict=True))
        if isinstance(row, Mapping):
            rows.add(row, label)


def _read_text(lines: Iterable[str], rows: LogRows, label: str, name: str) -> None:
    """Read lines of JSON, and numbers by name in other lines; a line without a counter continues the last row."""
    open_rows: dict[str, dict[str, Any]] = {}
    bars: dict[str, int] = {}
    n_broken, most = 0, 0
    for line in lines:
        if line[:1] == "{" and isinstance(parsed := _parsed(line), Mapping):
            rows.add(parsed, label)
            continue
        n_broken += line[:2] == '{"'
        line = _PREFIX.sub(" ", line)
        found = _RANK.search(line[:200])
        of_rank = "/".join(filter(None, [label, f"rank {found[1]}" if found and int(found[1]) else ""]))
        line = line if found is None else f"{line[: found.start()]} {line[found.end() :]}"
        for done, total in _BAR.findall(line):
            if int(total) > 4 and (total in bars or len(bars) < _MOST_BARS):
                bars[total] = int(done)
        if not (values := _numbers_in(line, rows.units, name)):
            continue
        if len(values) + 2 * ("loss" in line.lower()) > most:
            most, rows.likely = len(values) + 2 * ("loss" in line.lower()), line.strip()
        row = open_rows.get(of_rank, {})
        if any(counter_of(key) not in ("", "epoch", "epochs") or key in row for key in values):
            if row:
                rows.add(row, of_rank)
            row = {}
        open_rows[of_rank] = row | values | {f"bar {total}": done for total, done in bars.items()}
    for of_rank, row in open_rows.items():
        rows.add(row, of_rank)
    if n_broken:
        rows.remarks.append(f"{n_broken} incomplete lines of JSON were left out.")


def _numbers_in(line: str, units: dict[str, str], name: str) -> dict[str, Any]:
    """Return the numbers of a line of text by name; held-out data are named so."""
    for bare in _BARE:
        if found := bare.fullmatch(line):
            row = found.groupdict()
            key = row.pop("key", name)
            key += " loss" if key == "train" or key in HELD_OUT else ""  # as in "250 val 3.2"
            return row if "value" not in row else {key: row.pop("value"), **row}
    pairs, at = [], 0
    while pair := _PAIR.search(line, at, _MOST_SEARCHED):
        is_pair = pair[2] is None or counter_of(pair[1]) or _SPOKEN.intersection(words_of(pair[1])[-1:])
        pairs += [pair] if is_pair else []
        at = pair.end() if is_pair else pair.end(1)
    names = [pair.span(1) for pair in pairs if not counter_of(pair[1])]
    held_out = (at for at in _CONTEXT.finditer(line) if not any(a <= at.start() < b for a, b in names))
    context = next(held_out, None)
    values: dict[str, Any] = {}
    for pair in pairs:
        key, unit = pair[1], pair[4] or ""
        if context is not None and context.start() < pair.end() and not counter_of(key):
            key = f"{context[0].lower()}/{key}"
        if unit and unit not in _THOUSANDS:
            units.setdefault(key, unit)
        values.setdefault(key, float(pair[3].replace(",", "")) * _THOUSANDS.get(unit, 1.0))
    return values


def _read_events(file: Path, rows: LogRows, label: str) -> None:
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise MissingPackageError(
            "Reading a TensorBoard log needs the package tensorboard; install it (pip install tensorboard), or "
            "export the log as CSV.",
            name="tensorboard",
            expected="installed",
        ) from error
    n_read, step = 0, None
    for record in RawEventFileLoader(str(file)).Load():
        n_read += len(record) + 16  # its length and two checksums
        event = Event.FromString(record)
        for value in event.summary.value:
            number = make_ndarray(value.tensor) if value.HasField("tensor") else value.simple_value
            if value.HasField("simple_value") or (getattr(number, "size", 0) == 1 and number.dtype.kind in "fiu"):
                step = event.step
                rows.add({"step": step, value.tag: float(number)}, label)
    if n_read < file.stat().st_size:
        where = "at its start" if step is None else f"after step {step}"
        rows.remarks.append(f"{file.name} is damaged {where}, and what follows could not be read.")
