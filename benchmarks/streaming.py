"""Memory and time of profiles whose weights stay on disk, at the shapes of 1.3B and of Llama 2 7B, in bfloat16.

Call: python -m benchmarks.streaming [--small]; writes benchmarks/streaming.md. It needs 7 GB of disk for checkpoints of
random weights, and about an hour and a half on two cores. Each profile runs in a process of its own, so that its
memory can be told: anonymous memory beyond what the imports take, sampled every 10 ms. Pages of the files themselves do
not count; the system takes them back when it needs them.
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
#: Width, width of the MLP, blocks, and the bounds of memory wanted (GB) at rank 64 and at full rank.
SHAPES = {"1.3B": (2048, 5504, 24, 1.2, 1.5), "8 blocks of Llama 2 7B": (4096, 11008, 8, 2.5, 2.5)}
SMALL = {"small": (128, 256, 2, 1.2, 1.5)}
#: How a profile is computed, at each rank. Many CPUs multiply float32 faster than bfloat16, so each block is also
#: converted, at the rank where the products take most of the time.
WAYS = {64: ("streamed", "streamed as float32", "resident"), None: ("streamed", "resident")}
#: Shapes whose checkpoint is too large to be profiled from memory here.
STREAMED_ALONE = ("8 blocks of Llama 2 7B",)


def write_checkpoint(folder: Path, width: int, mlp_width: int, n_layers: int) -> None:
    """Write random weights of a Llama in bfloat16, in shards of at most 1 GB."""
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
    """Anonymous memory of this process in GB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1e6


def measure(folder: str, way: str, rank: int | None) -> dict[str, Any]:
    """Profile a checkpoint and tell what it took."""
    # Imported first, so that they count as imports.
    import scipy.linalg
    import scipy.sparse.linalg  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    import xarray  # noqa: F401

    wb.profile, wb.open_checkpoint  # noqa: B018  # loads what they need
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
    """Seconds that a block takes at least: its bytes read from a file once, and its matrix products with all tokens."""
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
    """What a fresh process measures."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"WORKBENCH_CACHE": cache}
        call = [sys.executable, "-m", "benchmarks.streaming", *arguments]
        done = subprocess.run(call, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(name: str, width: int, mlp_width: int, n_layers: int, *wanted: float) -> list[str]:
    """The rows of one shape."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), width, mlp_width, n_layers)
        for (rank, ways), bound in zip(WAYS.items(), wanted, strict=True):
            ways = [way for way in ways if way != "resident" or name not in STREAMED_ALONE]
            found = {way: in_a_process("--measure", folder, way, str(rank or 0)) for way in ways}
            least = floor(width, mlp_width)
            for way, one in found.items():
                block, is_asked = one["seconds"] / one["n_layers"], way == "streamed"
                cells = [
                    f"{name}, {way}, {f'rank {rank}' if rank else 'full rank'}",
                    f"at most {bound} GB" if is_asked else "",
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
    """Measure, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny shape: does it run? Prints, and writes no file")
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
        f"Llama shapes with random weights in bfloat16, {N_SNAPSHOTS:,} token states of 4 x 512 tokens; opening and "
        "all else included. Memory is anonymous memory beyond the imports; the estimate is that of dry_run=True. The "
        "floor is what a block takes if its bytes are read from a file once and each of its matrices is multiplied "
        "with all tokens in bfloat16. Made by `make bench` on "
        f"{os.cpu_count()} cores ({platform.machine()}), {versions()}."
    )
    columns = (
        "profile", "memory wanted", "memory", "estimated", "time", "estimated", "/ resident", "a block", "floor",
        "block / floor",
    )  # fmt: skip
    write_report("streaming", "Profiles whose weights stay on disk", about, columns, rows)


if __name__ == "__main__":
    main()
