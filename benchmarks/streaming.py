"""Measure memory and time of streamed profiles at the shapes of a 1.3B model and of Llama 2 7B in bfloat16.

Call: python -m benchmarks.streaming [--small]; writes benchmarks/streaming.md. It needs 7 GB of disk for checkpoints
with random parameters, and about 90 minutes on two cores. Each profile runs in a separate process. Its memory is the
anonymous memory beyond that of the imports, sampled every 10 ms. Mapped pages of the files are not counted, because the
operating system can reclaim them at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

import workbench as wb
from benchmarks.report import write_report
from workbench.io.provenance import versions

N_SNAPSHOTS = 2048
#: Width, width of the MLP, number of blocks, and target memory in GB at rank 64 and at full rank.
SHAPES = {"1.3B": (2048, 5504, 24, 1.2, 1.5), "8 blocks of Llama 2 7B": (4096, 11008, 8, 2.5, 2.5)}
SMALL = {"small": (128, 256, 2, 1.2, 1.5)}
#: Ways to compute a profile, by rank. Many CPUs multiply float32 faster than bfloat16, so at rank 64, where the matrix
#: products take most of the time, blocks are also converted to float32.
WAYS = {64: ("streamed", "streamed as float32", "resident"), None: ("streamed", "resident")}
#: Shapes whose checkpoints are only profiled by streaming, because they do not fit into memory.
STREAMED_ONLY = ("8 blocks of Llama 2 7B",)


def write_checkpoint(folder: Path, width: int, mlp_width: int, n_layers: int) -> None:
    """Write a Llama with random bfloat16 parameters in shards of at most 1 GB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    heads = max(width // 128, 1)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=n_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=32000,
        dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="1GB")


def anonymous() -> float:
    """Return the anonymous memory of this process in GB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1e6


def measure(folder: str, way: str, rank: int | None) -> dict[str, Any]:
    """Profile a checkpoint; return memory and time, measured and estimated."""
    # Imported first, so that their memory is not counted.
    import scipy.linalg
    import scipy.sparse.linalg  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    import xarray  # noqa: F401

    wb.profile, wb.open_checkpoint  # noqa: B018  # imports their modules
    before, peak, is_done = anonymous(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.01):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        start = time.perf_counter()
        dtype = "float32" if way.endswith("float32") else "auto"
        subject = wb.open_checkpoint(folder, streaming=way != "resident", dtype=dtype)
        ids = torch.randint(0, 32000, (N_SNAPSHOTS // 512, 512), generator=torch.Generator().manual_seed(0))
        spectra = wb.profile(subject, ids, n_snapshots=N_SNAPSHOTS, rank=rank, progress=False)
        seconds = time.perf_counter() - start
    finally:
        is_done.set()
        watcher.join()
    cost = wb.profile(subject, ids, n_snapshots=N_SNAPSHOTS, rank=rank, dry_run=True)
    found = {"gigabytes": peak - before, "seconds": seconds, "n_layers": spectra.sizes["layer"]}
    return found | {"estimated": cost.memory / 1e9, "estimated_seconds": cost.seconds}


def floor(width: int, mlp_width: int) -> float:
    """Return a lower bound of the seconds per block: reading its bytes once, and its products with all tokens."""
    shapes = [(width, width)] * 4 + [(mlp_width, width)] * 2 + [(width, mlp_width)]
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2 * sum(n * m for n, m in shapes)))
        file.seek(0)
        start = time.perf_counter()
        file.read()
        seconds = time.perf_counter() - start
    for n_out, n_in in shapes:
        weight, x = torch.full((n_out, n_in), 0.02, dtype=torch.bfloat16), torch.ones(512, n_in, dtype=torch.bfloat16)
        linear(x, weight)
        start = time.perf_counter()
        for _ in range(N_SNAPSHOTS // 512):
            linear(x, weight)
        seconds += time.perf_counter() - start
    return seconds


def in_a_process(*arguments: str) -> dict[str, Any]:
    """Run this script in a new process and return its result."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"WORKBENCH_CACHE": cache}
        call = [sys.executable, "-m", "benchmarks.streaming", *arguments]
        done = subprocess.run(call, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(name: str, width: int, mlp_width: int, n_layers: int, *targets: float) -> list[str]:
    """Return the rows of one shape, with the target memory at each rank."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), width, mlp_width, n_layers)
        for (rank, ways), target in zip(WAYS.items(), targets, strict=True):
            ways = [way for way in ways if way != "resident" or name not in STREAMED_ONLY]
            found = {way: in_a_process("--measure", folder, way, str(rank or 0)) for way in ways}
            least = floor(width, mlp_width)
            for way, one in found.items():
                block, has_target = one["seconds"] / one["n_layers"], way == "streamed"
                cells = [
                    f"{name}, {way}, {f'rank {rank}' if rank else 'full rank'}",
                    f"at most {target} GB" if has_target else "",
                    f"**{one['gigabytes']:.2f} GB**",
                    f"{one['estimated']:.2f} GB" if way != "resident" else "",
                    f"{one['seconds']:.0f} s",
                    f"{one['estimated_seconds']:.0f} s",
                    f"{one['seconds'] / found['resident']['seconds']:.2f}" if "resident" in found else "",
                    f"{block:.1f} s",
                    f"{least:.1f} s",
                    f"**{block / least:.2f}**",
                ]
                rows.append(f"| {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--small", action="store_true", help="measure a tiny shape to check that the benchmark runs; writes no file"
    )
    parser.add_argument("--measure", nargs=3, metavar=("FOLDER", "WAY", "RANK"), help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.measure:
        folder, way, rank = chosen.measure
        print(json.dumps(measure(folder, way, int(rank) or None)))
        return
    shapes = SMALL if chosen.small else SHAPES
    rows = [row for name, shape in shapes.items() for row in rows_of(name, *shape)]
    if chosen.small:
        return
    about = (
        f"Llama models with random parameters in bfloat16, {N_SNAPSHOTS:,} token states of 4 x 512 tokens; the time "
        "includes opening the checkpoint. Memory is anonymous memory beyond that of the imports; estimates are those "
        "of dry_run=True. The lower bound is the time to read the bytes of a block from a file once and to multiply "
        "each of its matrices with all tokens in bfloat16. Generated by `make bench` on "
        f"{os.cpu_count()} cores ({platform.machine()}) with {versions()}."
    )
    columns = (
        "profile", "target memory", "memory", "estimated", "time", "estimated", "/ resident", "per block",
        "lower bound", "per block / bound",
    )  # fmt: skip
    write_report("streaming", "Streamed profiles", about, columns, rows)


if __name__ == "__main__":
    main()
