"""Record the two runs of lesson 4 in data/paired_runs/: a healthy one, and one with a fault in its attention.

python data/make_paired_runs.py

Both have the same parameters, data and seed, and the same attention kernel. From step 220 on, the backward pass of one
of them uses the output of attention and its gradient with 6 of 16 bits truncated, as in notebook 05.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import workbench as wb

OUT = Path(__file__).parent / "paired_runs"
SEED, N_STEPS = 1, 620
#: Run -> first step of its fault.
ONSETS = {"healthy": None, "faulted": 220}


def record(name: str, work: Path) -> str:
    """Record one run with monitors and alarms."""
    fault = wb.faults.low_precision_attention(n_bits=6, start=ONSETS[name])
    model = wb.zoo.transformer(norm="pre_ln", d_model=32, n_layers=2, n_heads=4, vocab_size=16, max_length=8, seed=SEED)
    task = wb.tasks.associative_recall(length=8, vocab_size=16, n_pairs=2, batch_size=32, seed=SEED)
    store = work / f"{name}.zarr"
    *_, last = wb.train(
        model, task, n_steps=N_STEPS, learning_rate=0.016, warmup=50, clip_norm=1.0, seed=SEED, faults=[fault],
        optimizer_options={"betas": (0.9, 0.95), "fused": True}, recorder=wb.Recorder(n_probe_tokens=128, budget=None),
        alarms=wb.Alarms(), store=store,
    )  # fmt: skip
    run = wb.open_run(store).load()
    wb.export_netcdf(run, OUT / f"{name}.nc", overwrite=True)
    raised = [f"{alarm.signal} at {alarm.step}" for alarm in wb.alarms.recorded_alarms(run)]
    return f"{name}: {last.cause or 'not diverged'} at {last.step}, alarms: {', '.join(raised) or 'none'}"


def main() -> None:
    """Record both runs."""
    OUT.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        for name in ONSETS:
            print(record(name, Path(work)), flush=True)


if __name__ == "__main__":
    main()
