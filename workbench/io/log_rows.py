"""Numbers in the files that training tools write, by row and name: text, tables, JSON and TensorBoard events."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any, cast

from workbench.errors import MissingPackageError
from workbench.io.files import FileKind


@cache
def words_of(name: str) -> tuple[str, ...]:
    """Split a name into words in lower case: "train/CrossEntropyLoss" -> train, cross, entropy, loss."""
    return tuple(re.findall(r"[a-zµ]+|\d+", re.sub(r"([a-z\d])([A-Z])", r"\1 \2", name).lower()))


LOG = FileKind("a log that can be read", "pass one in text, CSV, JSON or TensorBoard events", most_bytes=1 << 34)
#: Part of the names of TensorBoard's event files.
EVENT_FILE = "tfevents"
#: Words for data on which a model is not trained.
HELD_OUT = set(words_of("val valid validation validate validating eval evaluation evaluating evaluate test dev tel"))
#: What numbers rows, the most reliable first; "bar" is a progress, such as "10/2000".
COUNTERS = (
    "step", "iteration", "iter", "update", "updates", "steps", "iterations", "iters", "it", "s", "up", "_step", "bar",
    "batch", "samples", "consumed samples", "tokens", "consumed tokens", "total tokens", "tokens seen", "epoch",
    "epochs",
)  # fmt: skip
_OF_COUNTERS = HELD_OUT | set(
    words_of("train training trainer global completed optimizer optim opt current num of n idx")
)
#: Columns of text: the name of a metric and its value, the data that a row belongs to, and the run or rank.
_NAMES = ("metric", "key", "tag", "name", "metricname", "metric_name")
_VALUES = ("value", "metricvalue", "metric_value")
_SPLITS = ("split", "mode", "phase", "stage", "subset", "prefix")
_RUNS = ("run", "run_id", "run_name", "run_uuid", "experiment", "trial", "rank", "local_rank", "process_index")
_MESSAGES = ("log", "message", "msg")
#: Contents of a cell that count as empty.
_EMPTY = frozenset(("", "none", "null", "na", "n/a", "-"))
#: Limits, so that no file occupies the memory or the user for long.
_MOST_NAMES, _LONGEST_LINE, _LARGEST_JSON, _MOST_TEXT = 10_000, 32_000_000, 200_000_000, 20_000_000_000
#: Largest ratio of a text to its packed file; longest part of a line that is searched; most progress bars of a log.
_MOST_UNPACKED, _MOST_SEARCHED, _LONGEST_NAME, _MOST_BARS = 200, 20_000, 100, 8

_NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d*+)?|\.\d++)(?:[eE][-+]?\d++)?|[-+]?(?:nan|inf(?:inity)?)\b"
)
_WORD = r"[A-Za-z_][\w./@%+*#-]*+(?:\([^()]{0,20}\))?"
#: A sign and a number: ": 2.5E+00", " 2.5,", "': '2.5'", "=[1e-4,", but no time, date or version; a name before it.
_VALUE = re.compile(
    rf"(['\"]?\s*(?:[:=]+|->)\s*(?:\{{['\"]\w+['\"]:\s*)?|\s+(?:is\s+)?)['\"\[(]*(?:tensor\()?({_NUMBER})"
    r"(?![:-]\d|\.\d)(%|[A-Za-zµ]+)?",
    re.IGNORECASE,
)
_NAME = re.compile(rf"(?<![\w/.@%-]){_WORD}(?:(?<!\.) (?:{_WORD}|\([^()]{{1,20}}\))){{0,5}}\Z")
#: Last words of names that may stand before their number without a sign, as in "loss 2.5".
_SPOKEN = set(words_of("loss lr rate norm gnorm nll ppl perplexity acc accuracy cost xent"))
_CELL = re.compile(rf"({_NUMBER})(?:/\d+)?\s?(%|[A-Za-zµ/]+)?", re.IGNORECASE)
_THOUSANDS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_BAR = re.compile(r"(?<![\d/.])(\d+)\s*/\s*(\d+)(?![\d/.])")
#: The rank of a line: "[rank1]:", "[RANK:1]", and "1: " before a line with a step, as srun writes it.
_RANK = re.compile(
    r"(?:\b(?:default|local_rank|rank)[ _:=]*|^\s*(?=\d+: .*\b(?:step|iter)))(\d+)\b\]?:?", re.IGNORECASE
)
_FIRST = re.compile(r"\s*\[?(\d+)(?:\s*/\s*\d+)?\]?[:|,]?\s")
_CONTEXT = re.compile(rf"(?<![\w/.-])(?:{'|'.join(sorted(HELD_OUT))})(?![\w/.-])", re.IGNORECASE)
#: What is no part of a message: colors, date and time, and the line of code.
_PREFIX = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\d{4}[-/]\d\d[-/]\d\d[T _-]\d\d:?\d\d:?\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?|"
    r"\b[\w/]+(?:\.\w+)+:\d+\b(?![\d.])|\b(?:INFO|DEBUG|WARNING)\b"
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
    """The numbers of a log, in the order written: run or rank ("" for the first) -> metric -> rows and values.

    ``n_rows`` counts all runs; ``units`` stand behind numbers, ``not_numbers`` has the first cell of a column that is
    none, and ``likely`` the line that looks most like a row.
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
        of_runs, key, value, split = _texts_in(tuple(flat))
        for name in of_runs:
            if (text := str(flat.pop(name)).removesuffix(".0")) not in ("", "0"):
                label = "/".join(filter(None, [label, f"rank {text}" if text.isdigit() else text]))
        if key and value and isinstance(flat[key], str):
            flat[flat.pop(key)] = flat.pop(value)
        if split and HELD_OUT.intersection(words_of(str(flat[split]))):
            flat = {name if counter_of(name) else f"{flat[split]}/{name}": each for name, each in flat.items()}
        run = self.runs.setdefault(label, {})
        for name, content in flat.items():
            if (number := self._number(name, content)) is None:
                if line:
                    self.not_numbers.setdefault(name, (line, content))
                continue
            if name not in run and len(run) >= _MOST_NAMES:
                raise ValueError(f"it has more than {_MOST_NAMES:,} names of metrics")
            rows, values = run.setdefault(name, (array("q"), array("d")))
            rows.append(self.n_rows)
            values.append(number)
        self.n_rows += 1

    def _number(self, name: str, content: Any) -> float | None:
        if not isinstance(content, str):
            is_number = isinstance(content, float) or (type(content) is int and abs(content) < 10**300)
            return float(content) if is_number else None
        try:
            return float(content)
        except ValueError:
            if (found := _CELL.fullmatch(content.strip())) is None:
                return None
        if found[2] and found[2] not in _THOUSANDS:
            self.units.setdefault(name, found[2])
        return float(found[1].replace(",", "")) * _THOUSANDS.get(found[2], 1.0)


@cache
def counter_of(name: str) -> str:
    """Return which of ``COUNTERS`` a name is; empty if it is none."""
    words = words_of(name.partition("/max")[0])
    found = " ".join(word for word in words if word not in _OF_COUNTERS) if words[:1] != ("bar",) else "bar"
    return name if name == "_step" else found if found in COUNTERS else ""  # W&B's _step counts calls


@lru_cache(1000)
def _texts_in(names: tuple[str, ...]) -> tuple[list[str], str, str, str]:
    """Return which columns say the run or rank, the name of a metric, its value, and the data that a row belongs to."""
    plain = {re.sub(r"\W", "_", name.lower()): name for name in names}
    key, value, split = (next((plain[n] for n in each if n in plain), "") for each in (_NAMES, _VALUES, _SPLITS))
    return [plain[name] for name in _RUNS if name in plain], key, value, split


def read_rows(file: Path, rows: LogRows, label: str = "", *, most: int = _MOST_TEXT) -> None:
    """Append the rows of a file of any kind, of its first ``most`` letters."""
    with LOG.reading(file):
        if EVENT_FILE in LOG.check(file).name:
            return _read_events(file, rows, label)
        with file.open("rb") as raw:
            try:
                return _read(_decoded(raw), raw, file, rows, label, most)
            except (csv.Error, zlib.error) as error:
                raise ValueError(str(error)) from error


def _read(text: io.TextIOWrapper, raw: IO[bytes], file: Path, rows: LogRows, label: str, most: int) -> None:
    """Read a text in the form that it begins with."""
    lines = _bounded(text, raw, most)
    head = next((line for line in lines if line.strip() and line[0] != "#"), "")
    is_alone = next(lines, None) is None
    text.seek(0)
    if _JSON.match(head) and (is_alone or _parsed(head) is None):
        if (whole := _parsed(text.read(min(most, _LARGEST_JSON)))) is not None:
            return _read_json(whole, rows, label)
        if head.strip() in ("{", "[", "[{"):
            raise ValueError("it is no complete JSON")
        text.seek(0)
    lines = _bounded(text, raw, most)
    cells = max((head.split(by) for by in ",\t;|"), key=len)
    is_table = len(cells) > 1 and head[0] != "{" and not any(_CELL.fullmatch(cell.strip()) for cell in cells)
    if is_table and (any(n in file.name.lower() for n in (".csv", ".tsv")) or any(map(counter_of, cells))):
        table = csv.reader(lines, delimiter=head[len(cells[0])], skipinitialspace=True)
        return _read_table(table, rows, label, file)
    name = file.as_posix().rpartition("/metrics/")[2] if "metrics" in file.parts else file.name  # MLflow's
    return _read_text(lines, rows, label, name)


def _decoded(raw: IO[bytes]) -> io.TextIOWrapper:
    """Return the text of a file, unpacked if it is packed; the ends of lines of progress bars are ends of lines."""
    head, data = raw.read(4096), raw
    if head[:2] == b"\x1f\x8b":  # a packed file ends with the size of its contents
        n_packed = raw.seek(-4, io.SEEK_END)
        _check_size(int.from_bytes(raw.read(4), "little"), n_packed)
        raw.seek(0)
        data = cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
        head = data.read(4096)
    data.seek(0)
    is_wide = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    if b"\0" in head and not is_wide:
        raise ValueError("it is a binary file")
    return io.TextIOWrapper(cast("Any", data), "utf-16" if is_wide else "utf-8-sig", errors="replace")


def _bounded(text: io.TextIOWrapper, raw: IO[bytes], most: int) -> Iterator[str]:
    n_read = 0
    while n_read < most and (line := text.readline(_LONGEST_LINE)):
        n_read += len(line)
        _check_size(n_read + _MOST_TEXT * (len(line) >= _LONGEST_LINE), raw.tell())
        yield line


def _check_size(n_unpacked: int, n_packed: int) -> None:
    if n_unpacked > min(_MOST_TEXT, 2_000_000 + _MOST_UNPACKED * n_packed):
        raise ValueError("it has a longer line or more text than a log has, or is cut off")


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
        raise ValueError(f"it has {len(header):,} columns")
    of_run: dict[str, dict[str, int]] = {}
    if "loss" in file.stem.lower() and not any(map(_NAMES.__contains__, map(str.lower, header))):
        header = [f"{file.stem} loss" if name.lower() == "value" else name for name in header]
    for place, name in enumerate(header):
        run, _, metric = name.rpartition(" - ")
        if name and not name.endswith(("__MIN", "__MAX")):
            of_run.setdefault(run, {}).setdefault(metric, place)
    shared, n_before = of_run.pop("", {}), rows.n_rows
    for row in cells:
        if cells.dialect.delimiter == ";":
            row = [re.sub(r"^(-?\d+),(\d+)", r"\1.\2", cell) for cell in row]
        if row != header and any(row):
            for run, places in (of_run or {"": {}}).items():
                named = {n: row[at].strip() for n, at in (shared | places).items() if at < len(row)}
                found = {name: cell for name, cell in named.items() if cell.lower() not in _EMPTY}
                if not run or places.keys() & found.keys():
                    rows.add(found, "/".join(filter(None, [label, run])), line=cells.line_num)
    if rows.n_rows == n_before:
        rows.remarks.append(f"{file.name} has no rows below its header.")


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
    """Read lines of JSON, and numbers by name in other lines; each line is a row, and a step holds until the next."""
    bars: dict[str, int] = {}
    n_broken, most = 0, 0
    for line in lines:
        if line[:1] == "{" and isinstance(parsed := _parsed(line), Mapping):
            message = next((parsed[key] for key in _MESSAGES if isinstance(parsed.get(key), str)), "")
            if not _numbers_in(message, {}, name):
                rows.add(parsed, label)
                continue
            line = message  # as containers keep what a process prints
        n_broken += line[:2] == '{"'
        line = _PREFIX.sub(" ", line)
        if found := _RANK.search(line[:200]):
            line = f"{line[: found.start()]} {line[found.end() :]}"
        for done, total in _BAR.findall(line):
            if int(total) > 4 and (total in bars or len(bars) < _MOST_BARS):
                bars[total] = int(done)
        if values := _numbers_in(line, rows.units, name):
            if (n_seen := len(values) + 2 * ("loss" in line.lower())) > most:
                most, rows.likely = n_seen, line.strip()
            of_rank = f"rank {found[1]}" if found and int(found[1]) else ""
            values |= {f"bar {total}": done for total, done in bars.items()}
            rows.add(values, "/".join(filter(None, [label, of_rank])))
    if n_broken:
        rows.remarks.append(f"Incomplete lines of JSON were left out: {n_broken}.")


def _numbers_in(line: str, units: dict[str, str], name: str) -> dict[str, Any]:
    """Return the numbers of a line of text by name; held-out data are named so."""
    for bare in _BARE:
        if found := bare.fullmatch(line):
            row = found.groupdict()
            key = row.pop("key", name)
            key += " loss" if key == "train" or key in HELD_OUT else ""  # as in "250 val 3.2"
            return row if "value" not in row else {key: row.pop("value"), **row}
    pairs: list[tuple[re.Match[str], re.Match[str]]] = []
    for value in _VALUE.finditer(line, 0, _MOST_SEARCHED):
        end = max(pairs[-1][1].end() if pairs else 0, value.start() - _LONGEST_NAME)
        before = _NAME.search(line, end, value.start())
        if before is None:
            continue
        is_spoken = _SPOKEN.intersection(words_of(before[0])[-1:]) and line[value.end() : value.end() + 1] != ":"
        if value[1].strip() or is_spoken or counter_of(before[0]):
            pairs.append((before, value))
    of_names = [found.span() for found, _ in pairs if not counter_of(found[0])]
    held_out = (at for at in _CONTEXT.finditer(line) if not any(a <= at.start() < b for a, b in of_names))
    context = next(held_out, None) if pairs else None
    values: dict[str, Any] = {}
    for found, value in pairs:
        key, unit = found[0], value[3] or ""
        if context is not None and context.start() < found.end() and not counter_of(key):
            key = f"{context[0].lower()}/{key}"
        if unit and unit not in _THOUSANDS:
            units.setdefault(key, unit)
        values.setdefault(key, float(value[2].replace(",", "")) * _THOUSANDS.get(unit, 1.0))
    is_loss = any("loss" in key.lower() for key in values) and not any(map(counter_of, values))
    return values | ({"step": float(first[1])} if is_loss and (first := _FIRST.match(line)) else {})


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
