"""Measure speed, memory and host synchronizations on the accelerator of this machine (CUDA or MPS), or on its CPU.

Call: python -m benchmarks.gpu [--only moments eigenvalues ...]; writes benchmarks/gpu.md. It requires only torch, NumPy
and this source tree. The report is written after every result, so that an interrupted run keeps its results; a failed
measurement is reported in its row. Without an accelerator the script measures tiny sizes (--device cpu measures the
full sizes) and prints the report; it writes a file only with --out, because benchmarks/gpu.md never contains results of
a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import inspect
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import workbench as wb
from benchmarks.host_reads import counter_for
from benchmarks.report import FOLDER, table
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.koopman import SnapshotMoments, layer_spectra, layer_spectrum, modes
from workbench.models.batches import Batches, TokenSelection
from workbench.models.capture import LayerResults, capture_layers
from workbench.models.streamed_capture import capture_streamed
from workbench.zoo.decoders import Transformer

EVERY = 10  # steps between two measurements of the mechanism monitors


@dataclass
class Measurement:
    """One row of a table.

    Attributes:
        label: First cell of the row.
        run: Function that measures and returns the other cells and a value for the conclusion.
        weight: Expected duration, in an arbitrary unit.
    """

    label: str
    run: Callable[[], tuple[Sequence[str], Any]]
    weight: float = 1.0


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


# Moments


def moments(device: torch.device, small: bool) -> Section:
    """Compare `SnapshotMoments.update` on the host and on the device."""

    def measure(width: int, n: int) -> tuple[list[str], float]:
        x = torch.randn(n, width, generator=torch.Generator().manual_seed(0))
        y = x + 0.1 * x.roll(1, dims=1)
        places = {"host": torch.device("cpu"), "device": device}
        states = {name: (x.to(place), y.to(place)) for name, place in places.items()}
        tasks = {name: _updating(width, place, *states[name]) for name, place in places.items()}
        if device.type == "cpu":
            del tasks["device"]
        seconds = medians(tasks, device, 3)
        ratio = seconds["host"] / seconds["device"] if "device" in seconds else float("nan")
        return [_ms(seconds["host"]), _ms(seconds.get("device")), _times(ratio)], ratio

    shapes = [(32, 128), (64, 128)] if small else [(w, n) for w in (768, 2048, 4096) for n in (2048, 16384)]
    return Section(
        "Moments of the snapshots",
        "`SnapshotMoments.update` with float32 states and float64 moments; the states are on the device of the moments."
        " Median of 3.",
        ("width, states", "host", "device", "host / device"),
        [Measurement(f"{w:,}, {n:,}", lambda w=w, n=n: measure(w, n), max(1.0, w * w * n / 1e10)) for w, n in shapes],
    )


def _updating(width: int, place: torch.device, x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    return lambda: SnapshotMoments(width, device=place).update(x, y)


# Eigenvalues


def eigenvalues(device: torch.device, small: bool) -> Section:
    """Compare the eigenproblem of a layer on the host and on the device, by width."""

    def measure(width: int) -> tuple[list[str], float]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2 * width, width, generator=generator, dtype=torch.float64)
        y = x + 0.3 * torch.tanh(x @ torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5)
        on_host = SnapshotMoments(width).update(x, y)
        found: dict[str, np.ndarray] = {}

        def solve(name: str, moments: SnapshotMoments, smallest: float) -> None:
            with eig_on_device_from(smallest):
                found[name] = np.abs(layer_spectrum(moments).eigenvalue)

        tasks: dict[str, Callable[[], object]] = {"host": lambda: solve("host", on_host, np.inf)}
        if device.type == "cuda":
            on_device = SnapshotMoments(width, device=device).merge(on_host)
            tasks["eig on host"] = lambda: solve("eig on host", on_device, np.inf)
            tasks["device"] = lambda: solve("device", on_device, 0)
        seconds = medians(tasks, device, 3 if width < 2048 else 1, warm=width < 2048)
        ratio = seconds["eig on host"] / seconds["device"] if "device" in seconds else float("nan")
        error = np.abs(found["device"] / found["host"] - 1).max() if "device" in found else float("nan")
        times = [_ms(seconds.get(name)) for name in ("host", "eig on host", "device")]
        return [*times, _times(ratio), "" if np.isnan(error) else f"{error:.0e}"], ratio

    def conclude(ratios: dict[str, float]) -> str:
        widths = {int(label.replace(",", "")): ratio for label, ratio in ratios.items() if not np.isnan(ratio)}
        if not widths:
            return "Not measured: `CUDA_EIG_MIN_WIDTH` needs a CUDA device."
        faster = [w for w in sorted(widths) if all(ratio > 1 for other, ratio in widths.items() if other >= w)]
        if not faster:
            return (
                f"The device is not faster at the largest measured width, {max(widths):,}: `CUDA_EIG_MIN_WIDTH` (now "
                f"{modes.CUDA_EIG_MIN_WIDTH:,}) should be above {max(widths):,}."
            )
        return (
            f"The device is faster at every measured width from {faster[0]:,} on: `CUDA_EIG_MIN_WIDTH` (now "
            f"{modes.CUDA_EIG_MIN_WIDTH:,}) should be {faster[0]:,}."
        )

    widths = (32, 64, 96) if small else (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
    has_scipy = "with" if _is_installed("scipy") else "without"
    return Section(
        "Eigenvalues of a layer",
        "`layer_spectrum` of 2 x width snapshots at full rank, computed on the host; on the device with the general "
        "eigenproblem on the host; and on the device alone. The ratio determines `CUDA_EIG_MIN_WIDTH`; the last column "
        "is the largest relative difference of a modulus from the result of the host. Median of 3 calls, from width "
        f"2,048 on a single call; {has_scipy} SciPy (without SciPy the eigenvector condition needs full singular value "
        "decompositions).",
        ("width", "host", "eigenvalues on host", "device", "eigenvalues on host / device", "difference"),
        [Measurement(f"{w:,}", lambda w=w: measure(w), max(1.0, w**3 / 1e9)) for w in widths],
        conclude,
    )


@contextlib.contextmanager
def eig_on_device_from(width: float) -> Iterator[None]:
    """Context in which general eigenproblems are solved on the device from this width on."""
    before = modes.CUDA_EIG_MIN_WIDTH
    modes.CUDA_EIG_MIN_WIDTH = width
    try:
        yield
    finally:
        modes.CUDA_EIG_MIN_WIDTH = before


# Profile

GPT2_124M = {
    "d_model": 768, "n_layers": 12, "n_heads": 12, "vocab_size": 50257, "max_length": 1024, "ties_embeddings": True,
}  # fmt: skip
OF_1B = {
    "d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50257, "max_length": 2048, "ties_embeddings": True,
}  # fmt: skip
LLAMA_2_7B = {
    "norm": "rms_norm", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000, "max_length": 4096,
    "position": "rotary", "has_bias": False, "mlp": "swiglu", "mlp_width": 11008,
}  # fmt: skip
SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "max_length": 64}
#: Number of layers whose spectra are timed; all layers of the 7B model would take as long as all other measurements.
N_TIMED = 4


def resident(shape: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Create a subject with random parameters on the device."""
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
    return wb.open_checkpoint(model)


def streamed(shape: dict[str, Any], device: torch.device) -> Any:
    """Create a subject with random bfloat16 parameters that are read from a file block by block."""
    file = Path(tempfile.mkdtemp(prefix="streamed-", dir=_scratch().name)) / "model.pt"
    subject = resident(shape, torch.device("cpu"))
    torch.save(subject.model.state_dict(), file)
    return wb.open_checkpoint(file, module=subject.model, streaming=True, device=device)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the files of streamed models, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="gpu-benchmark-")


#: Functions that open a model of a given shape.
OPENERS: dict[str, Callable[[dict[str, Any], torch.device], Any]] = {"resident": resident, "streamed": streamed}


def profiles(device: torch.device, small: bool) -> Section:
    """Measure capture and spectra at the shapes of known models."""

    def measure(shape: dict[str, Any], way: str, rank: int | None) -> tuple[list[str], Any]:
        config = wb.zoo.ArchitectureConfig(**shape)
        width, n_layers = config.d_model, config.n_layers
        n_bytes = 2 * wb.zoo.count_parameters(config)
        # In addition to the parameters: three float64 moments per layer, and the arrays of the eigenproblem.
        needed = n_bytes + 24 * n_layers * width**2 + 160 * width**2
        if way == "resident" and (reason := _lack_of_memory(needed, device)):
            return [f"{n_bytes / 1e9:.1f} GB", reason, "", "", ""], None
        release(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        subject = OPENERS[way](shape, device)
        length = min(512, config.max_length)
        n_tokens = 2 * width
        rows = torch.randint(0, config.vocab_size, (-(-n_tokens // length), length), generator=_seeded())
        with contextlib.nullcontext() if subject.streamed is None else subject.streamed.sharing_weights():
            anatomy = wb.read_anatomy(subject, rows[:1, :16])
        wait_for(device)
        start = time.perf_counter()
        batches = Batches.of(list(rows.split(2)), subject).split(anatomy.layout)
        n_timed, selection = min(N_TIMED, n_layers), TokenSelection(n_tokens)
        options, names = wb.DmdOptions(rank=rank), [site.name for site in anatomy.sites]
        if subject.streamed is not None:
            results = LayerResults(options, names)
            capture_streamed(subject, anatomy, batches, selection, results, options, range(n_timed))
            results.complete()
            wait_for(device)
            return _row(n_bytes, device, None, None, (time.perf_counter() - start) / n_timed), None
        captured: dict[int, Any] = {}
        capture_layers(subject.model, anatomy, batches, selection, captured.__setitem__, options=options)
        wait_for(device)
        capture = (time.perf_counter() - start) / n_layers
        start = time.perf_counter()
        layer_spectra([captured[layer] for layer in range(n_timed)], options)
        wait_for(device)
        spectrum = (time.perf_counter() - start) / n_timed
        return _row(n_bytes, device, capture, spectrum, capture + spectrum), None

    def _row(
        n_bytes: int, device: torch.device, capture: float | None, spectrum: float | None, total: float
    ) -> list[str]:
        peak = f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if device.type == "cuda" else "unknown"
        parts = ["" if part is None else _ms(part) for part in (capture, spectrum)]
        return [f"{n_bytes / 1e9:.1f} GB", *parts, _ms(total), peak]

    shapes = {"small": SMALL} if small else {"GPT-2 124M": GPT2_124M, "1.3B": OF_1B, "Llama 2 7B": LLAMA_2_7B}
    ranks = (None, 8) if small else (None, 64)
    cases = [(name, way, rank) for name in shapes for way in OPENERS for rank in ranks]
    return Section(
        "Profile",
        "Random parameters in bfloat16, 2 x width token states in batches of 2 x 512 tokens. The time of a layer is "
        "that of the forward pass with moments, divided by the number of layers, plus that of its spectrum (mean over "
        f"{N_TIMED} layers computed in parallel). Streamed: the first {N_TIMED} layers, each of which is read from a "
        "file, applied to all batches, decomposed and freed.",
        ("model, location, rank", "parameters", "forward and moments", "spectrum", "total per layer", "peak memory"),
        [
            Measurement(
                f"{name}, {way}, {'full' if rank is None else rank}",
                lambda name=name, way=way, rank=rank: measure(shapes[name], way, rank),
                max(1.0, (shapes[name]["d_model"] / 1000) ** 3 * (4 if rank is None else 1)),
            )
            for name, way, rank in cases
        ],
    )


# Monitors


def monitors(device: torch.device, small: bool) -> Section:
    """Measure the time that the mechanism monitors add to a training step, with and without compilation."""
    shape, batch = (SMALL, (2, 16)) if small else (OF_1B, (4, 512))
    backend = "inductor" if device.type == "cuda" else "eager"
    n_rounds = 1 if small else 3

    def measure(is_compiled: bool) -> tuple[list[str], float]:
        config = wb.zoo.ArchitectureConfig(**shape)
        # In bfloat16: parameters, gradients, two moments, and a copy of the parameters.
        needed = 10 * wb.zoo.count_parameters(config)
        if reason := _lack_of_memory(needed, device):
            return [reason, "", "", ""], None
        release(device)
        model = resident(shape, device).model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        tokens = torch.randint(0, shape["vocab_size"], batch, generator=_seeded()).to(device)
        torch._dynamo.reset()
        called = torch.compile(model, backend=backend) if is_compiled else model

        def steps(recorder: Any = None) -> None:
            for _ in range(EVERY):
                loss = cross_entropy(called(tokens).flatten(0, 1).float(), tokens.flatten())
                loss.backward()
                if recorder is not None:
                    recorder.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

        def breaks() -> int:
            return sum(torch._dynamo.utils.counters["graph_break"].values())

        torch._dynamo.utils.counters.clear()
        steps()
        breaks_without = breaks()
        times: dict[str, list[float]] = {"without": [], "monitors": []}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bfloat16 parameters lose small updates, which does not affect the time
            for i in range(n_rounds + 1):
                for name in times:
                    recorder = wb.Recorder() if name == "monitors" else None
                    with (
                        contextlib.nullcontext() if recorder is None else recorder.attach(called, optimizer) as attached
                    ):
                        if attached is not None:
                            attached.log(loss=0.0)
                            steps(attached)  # reads the anatomy, and compiles the model again with hooks
                        wait_for(device)
                        start = time.perf_counter()
                        steps(attached)
                        wait_for(device)
                        if i:
                            times[name].append((time.perf_counter() - start) / EVERY)
        without, monitored = (statistics.median(times[name]) for name in ("without", "monitors"))
        found = [_ms(without), _ms(monitored), f"**{monitored / without - 1:+.1%}**"]
        return [*found, f"{breaks_without} / {breaks()}" if is_compiled else "not compiled"], monitored / without

    return Section(
        "Cost of the monitors",
        f"A training step of a {'tiny' if small else '1.3B'} model in bfloat16 with AdamW and batches of {batch[0]} x "
        f"{batch[1]} tokens, without and with the mechanism monitors every {EVERY} steps; means over {EVERY} steps, in "
        f"alternation. torch.compile uses the backend '{backend}'; graph breaks before / after attaching a recorder.",
        ("step", "without monitors", "with monitors", "added", "graph breaks"),
        [
            Measurement("not compiled", lambda: measure(False), 20),
            Measurement("compiled", lambda: measure(True), 40),
        ],
    )


# The training loop

FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "no options": dict,
    "clipping": lambda: {"clip_norm": 1.0},
    "mechanism monitors": lambda: {"recorder": wb.Recorder()},
    "monitors and alarms": lambda: {"recorder": wb.Recorder(), "alarms": wb.Alarms()},
    "KSS, recommended": lambda: {"kss": wb.KSS.recommended()},
    "KSS, published": lambda: {"kss": wb.KSS.published()},
    "a fault in the gradients": lambda: {"faults": [wb.faults.LowPrecisionReduction(n_ranks=2, start=0)]},
}


def training(device: torch.device, small: bool) -> Section:
    """Compare `wb.train` with a standard loop: speed, and how often the host waits for the device."""
    d_model, n_layers, batch_size, n_steps = (16, 2, 2, 20) if small else (512, 8, 64, 100)
    task = wb.tasks.associative_recall(batch_size=batch_size)

    def model() -> torch.nn.Module:
        return wb.zoo.transformer(d_model=d_model, n_layers=n_layers, n_heads=2 if small else 8).to(device)

    def standard_loop() -> Iterator[float]:
        trained = model().train()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        for inputs, targets in task.stream(0):
            loss = cross_entropy(trained(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    def run(name: str) -> Iterator[Any]:
        # Warm-up and counted steps together are as many as the timed steps; the run must not end within them.
        return wb.train(model(), task, n_steps=2 * n_steps + 1, learning_rate=1e-4, **FEATURES[name]())

    def measure(name: str) -> tuple[list[str], Any]:
        release(device)
        runs = {"loop": standard_loop(), "train": run(name)}
        waits: dict[str, Any] = {}
        for key, each in runs.items():
            _advance(each, n_steps // 2)
            with counter_for(device) as counter:
                _advance(each, n_steps // 2)
            waits[key] = counter
        seconds = dict.fromkeys(runs, 0.0)
        for _ in range(n_steps // EVERY):
            for key, each in runs.items():
                wait_for(device)
                start = time.perf_counter()
                _advance(each, EVERY)
                wait_for(device)
                seconds[key] += time.perf_counter() - start
        for each in runs.values():
            each.close()
        counts = {key: counter.n / (n_steps // 2) for key, counter in waits.items()}
        lines = ", ".join(f"{place} ({n})" for place, n in waits["train"].places.most_common(3))
        rates = [f"{n_steps / seconds[key]:.1f}" for key in runs]
        ratio = seconds["train"] / seconds["loop"]
        return [*rates, f"**{ratio - 1:+.1%}**", f"{counts['loop']:.2f}", f"**{counts['train']:.2f}**", lines], counts

    how = (
        "reported by CUDA, including the two copies of the batch in the standard loop"
        if device.type == "cuda"
        else "counted as calls that would make the host wait for a GPU, an upper bound"
    )
    return Section(
        "The training loop, and how often the host waits for the device",
        f"`wb.train` without a store, compared with a standard loop that reads its loss: Pre-LN, d = {d_model}, "
        f"L = {n_layers}, {batch_size} x 64 tokens of associative recall, float32, AdamW; {n_steps} steps, in "
        f"alternation. Waits per step are {how}, over {n_steps // 2} steps.",
        (
            "run",
            "standard loop, steps/s",
            "wb.train, steps/s",
            "added",
            "waits, standard loop",
            "waits, wb.train",
            "most frequent places",
        ),
        [Measurement(name, lambda name=name: measure(name), 3 if name == "no options" else 5) for name in FEATURES],
    )


def _advance(run: Iterator[Any], n_steps: int) -> None:
    for _ in range(n_steps):
        next(run)


# All sections

SECTIONS = {
    "moments": moments,
    "training": training,
    "monitors": monitors,
    "profiles": profiles,
    "eigenvalues": eigenvalues,  # the longest section is last
}


def measure_all(device: torch.device, names: Sequence[str], small: bool, out: Path | None) -> str:
    """Measure sections and write the report after each row.

    Args:
        device: Device to measure.
        names: Names of the sections, keys of `SECTIONS`.
        small: Whether to measure tiny sizes.
        out: File of the report; None if there is none.

    Returns:
        The report.
    """
    sections = [SECTIONS[name](device, small) for name in names]
    rows = [(section, measurement) for section in sections for measurement in section.measurements]
    total, done, start = sum(measurement.weight for _, measurement in rows), 0.0, time.perf_counter()
    text = ""
    for i, (section, measurement) in enumerate(rows):
        try:
            cells, value = measurement.run()
        except Exception as error:  # noqa: BLE001  a failed measurement must not stop the others
            reason = " ".join(str(error).split()).replace("|", "/")[:200]
            cells, value = [f"failed: {type(error).__name__}: {reason}"], None
        cells = [*cells, *[""] * (len(section.columns) - 1 - len(cells))]
        section.rows.append(f"| {measurement.label} | {' | '.join(cells)} |")
        if value is not None:
            section.values[measurement.label] = value
        text = report(device, sections, small)
        if out is not None:
            with replacing(out) as partial:
                partial.write_text(text)
        done += measurement.weight
        passed = time.perf_counter() - start
        left = passed * (total - done) / done
        line = f"[{i + 1}/{len(rows)}] {section.title}: {section.rows[-1]} (about {left / 60:.1f} min left)"
        print(line, file=sys.stderr, flush=True)
        release(device)
    return text


def report(device: torch.device, sections: Sequence[Section], small: bool) -> str:
    """Return the report with the results so far."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type.upper()
    begun = [section for section in sections if section.rows]
    about = (
        f"Measured on **{name}**, with {os.cpu_count()} CPU cores ({platform.machine()}). Generated by `python -m "
        f"benchmarks.gpu` with {versions()}."
    )
    notes = ["There is no accelerator: these figures were measured on a CPU.", ""] if device.type == "cpu" else []
    notes += ["The sizes are tiny and only show that the benchmark runs.", ""] if small else []
    return "\n".join(
        ["# Benchmarks on the GPU", "", about, "", *notes, *(line for section in begun for line in section.text())]
    )


def _lack_of_memory(needed: int, device: torch.device) -> str:
    """Return why a measurement that needs so many bytes cannot run on a device; empty if it can."""
    free = free_bytes(device)
    return f"not measured: needs {needed / 1e9:.0f} GB, has {free / 1e9:.0f} GB" if needed > free else ""


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _is_installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _times(ratio: float) -> str:
    return "not measured" if np.isnan(ratio) else f"**{ratio:.2f}**"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the report and save it."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument(
        "--small",
        action="store_true",
        help="measure tiny sizes to check that the benchmark runs (under a minute on a CPU)",
    )
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], default=[*SECTIONS], help="sections to measure")
    parser.add_argument(
        "--device",
        type=torch.device,
        default=None,
        help="device such as cuda:0; by default the accelerator of this machine",
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="file of the report; by default benchmarks/gpu.md on an accelerator"
    )
    args = parser.parse_args(arguments)
    device = best_device() if args.device is None else args.device
    small = args.small or (args.device is None and device.type == "cpu")
    is_real = device.type != "cpu" and not small
    out = args.out if args.out is not None or not is_real else FOLDER / "gpu.md"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    text = measure_all(device, args.only, small, out)
    print(text)
    print(f"Written to {out}." if out is not None else "Not written: pass --out FILE.", file=sys.stderr)


if __name__ == "__main__":
    main()
