"""Measure speed, memory and host synchronizations on the accelerator of this machine (CUDA or MPS), or on its CPU.

Call: python -m benchmarks.gpu [--quick] [--only moments eigenvalues ...]; writes benchmarks/gpu.md. The quick call
measures in six minutes what watching costs, and writes benchmarks/gpu_quick.md; the full call measures everything. The
sections on moments, profiles and eigenvalues require only torch, NumPy and this source tree. The report is written
after every result, so that an interrupted run keeps its results; with --out FOLDER the results are also kept as JSON,
and rows that are there are not measured again. A failed measurement, or one without time, is reported in its row.
Without an accelerator the script measures tiny sizes (--device cpu measures the full sizes) and prints the report; it
writes files only with --out, because benchmarks/gpu.md never contains results of a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import workbench as wb
from benchmarks.accelerator import (
    OF_1B,
    SMALL,
    Measurement,
    Section,
    as_time,
    best_device,
    lack_of_memory,
    measure_all,
    medians,
    random_model,
    release,
    wait_for,
)
from benchmarks.gpu_watching import WATCHING
from benchmarks.report import FOLDER
from workbench.koopman import SnapshotMoments, layer_spectra, layer_spectrum, modes
from workbench.models.batches import Batches, TokenSelection
from workbench.models.capture import LayerResults, capture_layers
from workbench.models.streamed_capture import capture_streamed

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
        return [as_time(seconds["host"]), as_time(seconds.get("device")), _times(ratio)], ratio

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
        times = [as_time(seconds.get(name)) for name in ("host", "eig on host", "device")]
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
LLAMA_2_7B = {
    "norm": "rms_norm", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000, "max_length": 4096,
    "position": "rotary", "has_bias": False, "mlp": "swiglu", "mlp_width": 11008,
}  # fmt: skip
#: Number of layers whose spectra are timed; all layers of the 7B model would take as long as all other measurements.
N_TIMED = 4


def resident(shape: dict[str, Any], device: torch.device) -> Any:
    """Create a subject with random bfloat16 parameters on the device."""
    return wb.open_checkpoint(random_model(shape, device))


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
        if way == "resident" and (reason := lack_of_memory(needed, device)):
            return [f"{n_bytes / 1e9:.1f} GB", reason, "", "", ""], None
        release(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        subject = OPENERS[way](shape, device)
        length = min(512, config.max_length)
        n_tokens = 2 * width
        rows = torch.randint(
            0, config.vocab_size, (-(-n_tokens // length), length), generator=torch.Generator().manual_seed(0)
        )
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
        parts = ["" if part is None else as_time(part) for part in (capture, spectrum)]
        return [f"{n_bytes / 1e9:.1f} GB", *parts, as_time(total), peak]

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


# All sections

SECTIONS = WATCHING | {"moments": moments, "profiles": profiles, "eigenvalues": eigenvalues}  # the longest is last
#: Seconds of the quick call.
QUICK = 330


def _is_installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


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
    parser.add_argument("--quick", action="store_true", help="measure what watching costs, in at most six minutes")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], help="sections to measure; by default all")
    parser.add_argument(
        "--device",
        type=torch.device,
        default=None,
        help="device such as cuda:0; by default the accelerator of this machine",
    )
    parser.add_argument("--seconds", type=float, help="time after which nothing more is measured")
    parser.add_argument(
        "--out", type=Path, help="folder of the report and its results; by default benchmarks on an accelerator"
    )
    args = parser.parse_args(arguments)
    device = best_device() if args.device is None else args.device
    small = args.small or (args.device is None and device.type == "cpu")
    is_real = device.type != "cpu" and not small
    name = ("gpu_quick" if args.quick else "gpu") + ("_small" if small else "")
    folder = args.out or (FOLDER if is_real else None)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    notes = ["There is no accelerator: these figures were measured on a CPU."] if device.type == "cpu" else []
    notes += ["The sizes are tiny and only show that the benchmark runs."] if small else []
    text = measure_all(
        device,
        [SECTIONS[each](device, small) for each in args.only or (WATCHING if args.quick else SECTIONS)],
        out=folder and folder / f"{name}.md",
        kept=args.out and args.out / f"{name}.json",
        notes=notes,
        seconds=args.seconds or (QUICK if args.quick else math.inf),
    )
    print(text)
    print("Not written: pass --out FOLDER." if folder is None else f"Written to {folder}.", file=sys.stderr)


if __name__ == "__main__":
    main()
