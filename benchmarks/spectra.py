"""Measure speed and memory of the spectra, as ratios of calculations that alternate in one process.

Call: python -m benchmarks.spectra [--repeats 5]; writes benchmarks/results.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import workbench as wb
from benchmarks.report import write_report
from tests.oracle import oracle
from workbench.io.provenance import versions
from workbench.koopman import SnapshotMoments, layer_spectra, whitened_dmd

ROOT = Path(__file__).resolve().parent.parent
WIDTH, N_SNAPSHOTS, N_LAYERS = 768, 2048, 12


def residual_snapshots(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Generate states of a block that adds a nonlinear update; the spectral radius exceeds 1."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N_SNAPSHOTS, WIDTH)) * np.geomspace(1, 0.1, WIDTH)
    return X, X + 0.3 * np.tanh(X @ rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5)


def contractive_snapshots(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Generate states of a map with spectral radius below 1, where the Kreiss constant requires a search."""
    X, Y = residual_snapshots(seed)
    return X, 0.7 * Y


def median_seconds(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median wall time of each task; the tasks alternate, so that a temporary load affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for task in tasks.values():
        task()
    for _ in range(repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def one_layer(repeats: int) -> list[str]:
    """Compare all quantities of one layer with the literal formulas and with a lower bound of the time."""
    rows = []
    for label, (X, Y) in (("rho > 1", residual_snapshots()), ("rho < 1", contractive_snapshots())):
        torch_X, torch_Y = torch.from_numpy(X), torch.from_numpy(Y)
        general = torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        ridge = 1e-5 * float(np.cov(X.T).trace()) / WIDTH

        def floor(A: torch.Tensor = general, X: torch.Tensor = torch_X, Y: torch.Tensor = torch_Y) -> None:
            torch.linalg.eig(A)
            _ = X.T @ X, Y.T @ X, Y.T @ Y

        seconds = median_seconds(
            {
                "workbench": lambda X=torch_X, Y=torch_Y: whitened_dmd(X, Y),
                "oracle": lambda X=X, Y=Y, ridge=ridge: oracle(X.T, Y.T, ridge),
                "floor": floor,
            },
            repeats,
        )
        rows.append(
            f"| one layer, d = {WIDTH}, N = {N_SNAPSHOTS}, every quantity, {label}: literal formulas / workbench "
            f"| at least 1.7 | **{seconds['oracle'] / seconds['workbench']:.2f}** "
            f"| {seconds['oracle']:.2f} s / {seconds['workbench']:.2f} s; "
            "the literal formulas exclude the Kreiss constant |"
        )
        rows.append(
            f"| same, {label}: workbench / (one general eigendecomposition + three Gram products) "
            f"| at most 2 | **{seconds['workbench'] / seconds['floor']:.2f}** "
            f"| {seconds['workbench']:.2f} s / {seconds['floor']:.2f} s |"
        )
    return rows


def many_layers(repeats: int) -> list[str]:
    """Compare twelve layers computed in parallel after the forward pass with the same layers in sequence."""
    moments = []
    for i in range(N_LAYERS):
        X, Y = residual_snapshots(i)
        moments.append(SnapshotMoments(WIDTH).update(torch.from_numpy(X), torch.from_numpy(Y)))
    seconds = median_seconds(
        {
            "parallel": lambda: layer_spectra(moments),
            "sequential": lambda: [layer_spectra([m], n_workers=1) for m in moments],
        },
        max(1, repeats // 2),
    )
    ratio = seconds["sequential"] / seconds["parallel"]
    return [
        f"| {N_LAYERS} layers, d = {WIDTH}, from moments to spectra | under 6 s on two cores "
        f"| **{seconds['parallel']:.1f} s** | {ratio:.2f} times faster than the layers in sequence on one thread |"
    ]


def memory() -> list[str]:
    """Measure the peak resident memory of profile() for two numbers of snapshots, each in a separate process."""
    peak = {}
    for n in (4096, 65536):
        command = [sys.executable, "-m", "benchmarks.spectra", "--peak-of", str(n)]
        peak[n] = (
            int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1]) / 1024
        )
    growth = peak[65536] / peak[4096] - 1
    return [
        f"| memory of profile(), d = 256, L = 4: N = 65,536 over N = 4,096 | at most +10 % | **{growth:+.1%}** "
        f"| {peak[65536]:.0f} MB / {peak[4096]:.0f} MB, peak resident size of the process |"
    ]


def print_peak(n_snapshots: int) -> None:
    """Profile a model on token states from an iterator and print the peak resident memory in kB."""
    model = wb.zoo.transformer("pre_ln", d_model=256, n_layers=4, n_heads=4)
    batches = (tokens for tokens, _ in wb.tasks.text_bytes(batch_size=64))
    wb.profile(model, batches, n_snapshots=n_snapshots, progress=False)
    print(peak_resident_kb())


def peak_resident_kb() -> int:
    """Return the peak resident memory of this process in kB."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux, getrusage() of a child process reports the inherited peak of its parent.
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cuda(repeats: int) -> list[str]:
    """Compare the general eigensolver of the GPU with LAPACK by width, if there is a GPU."""
    if not torch.cuda.is_available():
        return ["| smallest width at which eigenvalues are faster on CUDA | none | not measured | no CUDA device |"]
    rows = []
    for width in (768, 1024, 2048, 3072):
        A = torch.randn(width, width, dtype=torch.float64)
        on_cuda = A.cuda()

        def solve(A: torch.Tensor = on_cuda) -> None:
            torch.linalg.eig(A)
            torch.cuda.synchronize()

        seconds = median_seconds({"cpu": lambda A=A: torch.linalg.eig(A), "cuda": solve}, max(1, repeats // 2))
        rows.append(
            f"| general eigendecomposition, d = {width}: CPU / {torch.cuda.get_device_name()} | none "
            f"| **{seconds['cpu'] / seconds['cuda']:.2f}** | {seconds['cpu']:.2f} s / {seconds['cuda']:.2f} s |"
        )
    return rows


def main() -> None:
    """Run the benchmark, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        print_peak(args.peak_of)
        return
    rows = [*one_layer(args.repeats), *many_layers(args.repeats), *memory(), *cuda(args.repeats)]
    about = (
        "Ratios are those of median times of calculations that alternate in one process. Generated by `make bench` on "
        f"{os.cpu_count()} cores ({platform.machine()}) with {versions()}."
    )
    write_report("results", "Speed and memory of the spectra", about, ("quantity", "target", "result", "details"), rows)


if __name__ == "__main__":
    main()
