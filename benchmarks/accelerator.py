"""Sections of a report on an accelerator, whose rows are measured one by one and kept in a file."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import workbench as wb
from benchmarks.report import table
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.zoo.decoders import Transformer

OF_1B = {
    "d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50257, "max_length": 2048, "ties_embeddings": True,
}  # fmt: skip
SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "max_length": 64}


class OutOfTimeError(BaseException):
    """The time of a row is over; no guard of a measurement catches it."""


@dataclass
class Measurement:
    """One row of a table.

    Attributes:
        label: First cell of the row.
        run: Function that measures and returns the other cells and a value for the conclusion, as JSON.
        weight: Expected duration, in an arbitrary unit.
        seconds: Seconds after which the measurement is given up.
    """

    label: str
    run: Callable[[], tuple[Sequence[str], Any]]
    weight: float = 1.0
    seconds: float = math.inf


@dataclass
class Section:
    """A table of the report.

    Attributes:
        title: Heading.
        about: Description of the measurement.
        columns: Headings of the columns.
        measurements: Measurements, one for each row.
        conclude: Function of the values of all rows, by label, that returns a closing sentence.
        rows: Rows measured so far, in Markdown.
        values: Values measured so far, by label.
    """

    title: str
    about: str
    columns: Sequence[str]
    measurements: list[Measurement]
    conclude: Callable[[dict[str, Any]], str] = lambda values: ""
    rows: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, label: str, cells: Sequence[str], value: Any) -> None:
        """Add the row of a measurement."""
        cells = [*cells, *[""] * (len(self.columns) - 1 - len(cells))]
        self.rows.append(f"| {label} | {' | '.join(cells)} |")
        if value is not None:
            self.values[label] = value

    def text(self) -> list[str]:
        """Return the lines of the section with the results so far."""
        after = (
            self.conclude(self.values) if len(self.rows) == len(self.measurements) else "This section is not complete."
        )
        return [
            f"## {self.title}",
            "",
            self.about,
            "",
            *table(self.columns, self.rows),
            "",
            *([after, ""] if after else []),
        ]


def measure_all(
    device: torch.device,
    sections: Sequence[Section],
    *,
    out: Path | None = None,
    kept: Path | None = None,
    notes: Sequence[str] = (),
    seconds: float = math.inf,
) -> str:
    """Measure sections and write the report after each row.

    Args:
        device: Device that is measured.
        sections: Sections, in their order.
        out: File of the report; None if there is none.
        kept: File of the rows measured so far, which are not measured again; None if there is none.
        notes: Paragraphs before the sections.
        seconds: Seconds after which no row begins, and the running one is given up.

    Returns:
        The report.
    """
    known: dict[str, Any] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    rows = [(section, measurement) for section in sections for measurement in section.measurements]
    total, done, start = sum(measurement.weight for _, measurement in rows), 0.0, time.perf_counter()
    text = ""
    for i, (section, measurement) in enumerate(rows):
        name, left = f"{section.title}/{measurement.label}", seconds - (time.perf_counter() - start)
        entry = known.get(name)
        if entry is None:
            if left > 1:
                entry = _measured(measurement, min(left, measurement.seconds))
            else:
                entry = {"cells": ["not measured: no time left"], "value": None}
            if not entry["cells"][0].startswith(("failed", "not measured")):
                known[name] = entry
                if kept is not None:
                    with replacing(kept) as partial:
                        partial.write_text(json.dumps(known, indent=1))
        section.add(measurement.label, entry["cells"], entry["value"])
        text = report(device, sections, notes)
        if out is not None:
            with replacing(out) as partial:
                partial.write_text(text)
        done += measurement.weight
        passed = time.perf_counter() - start
        remaining = passed * (total - done) / done
        line = (
            f"[{i + 1}/{len(rows)}] {section.title}: {section.rows[-1]} ({passed:.0f} s, about {remaining:.0f} s left)"
        )
        print(line, file=sys.stderr, flush=True)
        release(device)
    return text


def _measured(measurement: Measurement, seconds: float) -> dict[str, Any]:
    try:
        with time_limit(seconds):
            cells, value = measurement.run()
    except OutOfTimeError:
        return {"cells": [f"not measured: more than {seconds:.0f} s"], "value": None}
    except Exception as error:  # noqa: BLE001  a failed measurement must not stop the others
        reason = " ".join(str(error).split()).replace("|", "/")[:200]
        return {"cells": [f"failed: {type(error).__name__}: {reason}"], "value": None}
    return {"cells": [*cells], "value": value}


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context that raises OutOfTimeError after some seconds, and once more every few seconds until it is left."""
    if math.isinf(seconds) or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def report(device: torch.device, sections: Sequence[Section], notes: Sequence[str] = ()) -> str:
    """Return the report with the results so far."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type.upper()
    begun = [section for section in sections if section.rows]
    about = (
        f"Measured on **{name}**, with {os.cpu_count()} CPU cores ({platform.machine()}). Generated by `python -m "
        f"benchmarks.gpu` with {versions()}."
    )
    lines = [line for note in notes for line in (note, "")]
    return "\n".join(
        ["# Benchmarks on the GPU", "", about, "", *lines, *(line for section in begun for line in section.text())]
    )


def best_device() -> torch.device:
    """Return the accelerator of this machine, or its CPU if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def wait_for(device: torch.device) -> None:
    """Wait until the device has completed all operations."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def lack_of_memory(needed: int, device: torch.device) -> str:
    """Return why a measurement that needs so many bytes cannot run on a device; empty if it can."""
    free = free_bytes(device)
    return f"not measured: needs {needed / 1e9:.0f} GB, has {free / 1e9:.0f} GB" if needed > free else ""


def release(device: torch.device) -> None:
    """Free unused memory of the host and the device."""
    gc.collect()
    if device.type != "cpu":
        getattr(torch, device.type).empty_cache()


def medians(
    tasks: dict[str, Callable[[], object]], device: torch.device, n: int, *, warm: bool = True
) -> dict[str, float]:
    """Return the median seconds of each task; the tasks alternate, so that a temporary load affects all of them.

    Args:
        tasks: Functions by name.
        device: Device that is synchronized before and after each call.
        n: Number of timed calls of each task.
        warm: Whether a first call of each task is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for i in range(n + warm):
        for name, task in tasks.items():
            wait_for(device)
            start = time.perf_counter()
            task()
            wait_for(device)
            if i >= warm:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def random_model(shape: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """Create a model with random parameters on the device."""
    with torch.device("meta"):
        model = Transformer(wb.zoo.ArchitectureConfig(**shape)).to(dtype)
    model.to_empty(device=device)
    model.tie()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.zero_()
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
                module.weight.fill_(1.0)
    return model


def as_time(seconds: float | None) -> str:
    """Return a time as the cell of a table; empty for None."""
    return "" if seconds is None else f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
