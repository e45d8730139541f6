"""Record the router of a small mixture of experts in a healthy run and under five faults, in data/routing.nc.

python data/make_routing.py

Model, task and settings are those of notebook 06. Each run is repeated with three seeds; one has two faults at once.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import xarray as xr

import workbench as wb
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

OUT = Path(__file__).parent / "routing.nc"
MODEL: dict[str, Any] = {
    "norm": "pre_ln", "d_model": 32, "n_layers": 2, "n_heads": 4, "n_experts": 4, "top_k": 2, "vocab_size": 16,
    "max_length": 8,
}  # fmt: skip
TASK: dict[str, Any] = {"length": 8, "vocab_size": 16, "n_pairs": 2, "batch_size": 32}
N_STEPS = 300
PLAN: dict[str, Any] = {
    "learning_rate": 0.005, "warmup": 50, "clip_norm": 1.0,
    "optimizer_options": {"betas": (0.9, 0.95), "fused": True},
}  # fmt: skip
SEEDS = (1, 2, 3)
#: First step of the faults, except for the missing auxiliary loss, which is missing from the first step on.
START = 130
CADENCE, N_PROBE_TOKENS = 10, 256
#: The recorder measures the router and the attention, and nothing else.
PARTS: dict[str, int | None] = {
    "router": CADENCE, "attention": CADENCE,
    **dict.fromkeys(["optimizer", "activations", "precision", "reduction", "update"]),
}  # fmt: skip
NO_AUXILIARY_LOSS = wb.faults.no_auxiliary_loss(start=0)
SMALL_BATCH = wb.faults.small_batch(n_rows=2, start=START)
CASES: dict[str, list[wb.faults.Fault]] = {
    "balanced": [],
    "no auxiliary loss": [NO_AUXILIARY_LOSS],
    "rate x 10": [wb.faults.large_rate(factor=10, start=START)],
    "rate x 40": [wb.faults.large_rate(factor=40, start=START)],
    "batch of 2": [SMALL_BATCH],
    "batch of 2, no auxiliary loss": [SMALL_BATCH, NO_AUXILIARY_LOSS],
}


def record(case: str, seed: int, store: Path, n_steps: int = N_STEPS) -> xr.Dataset:
    """Train one run; return what was measured of it every ten steps, and its loss before each measurement."""
    task = wb.tasks.associative_recall(**TASK, seed=seed)
    recorder = wb.Recorder(every=PARTS, n_probe_tokens=N_PROBE_TOKENS, budget=None)
    model = wb.zoo.moe(**MODEL, seed=seed)
    faults = CASES[case]
    for _ in wb.train(model, task, n_steps=n_steps, faults=faults, store=store, recorder=recorder, seed=seed, **PLAN):
        pass
    run = wb.open_run(store).load()
    router, ranks = run["router"].to_dataset(), run["attention"]["effective_rank"].sel(term="D2")
    measured = router[["router_similarity", "routing_entropy_share", "max_violation", "dead_experts"]].mean("layer")
    loss = run["monitors"]["loss"].rolling(step=CADENCE).mean().sel(step=measured["step"])
    return measured.assign(smallest_rank=ranks.min(["layer", "head"]).drop_vars("term"), loss=loss)


def main() -> None:
    """Record all runs."""
    torch.set_num_threads(1)
    start, by_case = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            rows = []
            for seed in SEEDS:
                rows.append(record(case, seed, Path(folder) / f"{case} {seed}.zarr"))
                print(f"{case}, seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
            by_case.append(xr.concat(rows, xr.IndexVariable("seed", list(SEEDS))))
    data = xr.concat(by_case, xr.IndexVariable("case", list(CASES)), combine_attrs="drop")
    data["loss"].attrs = {"units": "nat", "meaning": f"mean of the training loss over the last {CADENCE} steps"}
    data["smallest_rank"].attrs = {"units": "1", "meaning": "smallest effective rank of D2 over layers and heads"}
    data.attrs = {
        "call": "python data/make_routing.py",
        "model": json.dumps(MODEL),
        "task": json.dumps(TASK),
        "plan": json.dumps({"n_steps": N_STEPS, **PLAN}),
        "start": START,
        "n_probe_tokens": N_PROBE_TOKENS,
        "versions": versions(),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    with replacing(OUT) as partial:
        data.drop_encoding().to_netcdf(partial, engine="netcdf4")


if __name__ == "__main__":
    main()
