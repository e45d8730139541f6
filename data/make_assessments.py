"""Assess four published designs under one plan for notebook 08, from their configurations without pretrained weights.

    python data/make_assessments.py

Reads ``notebooks/plan.toml`` and writes ``data/assessments.nc``, the comparison with the assessment of each design.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

import workbench as wb

ROOT = Path(__file__).resolve().parents[1]
PLAN = ROOT / "notebooks" / "plan.toml"
DESIGNS = ("gpt2", "llama-2-7b", "mixtral-8x7b", "qwen3-8b")
SEED = 0


def main() -> None:
    """Assess, compare and write the file."""
    torch.set_num_threads(1)
    start = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)

    tree = wb.compare_designs({name: name for name in DESIGNS}, plan=PLAN, seed=SEED, progress=report)
    tree.attrs["call"] = "python data/make_assessments.py"
    wb.export_netcdf(tree, ROOT / "data" / "assessments.nc", overwrite=True)


if __name__ == "__main__":
    main()
