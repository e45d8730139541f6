"""Assess four published designs under one plan, for notebook 08: built from their configurations, no weights fetched.

    python data/make_assessments.py

Reads ``notebooks/plan.toml``; writes ``data/assessments.nc``, the comparison with the assessment of each.
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
    """Assess, compare, write."""
    torch.set_num_threads(1)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)

    tree = wb.compare_designs({name: name for name in DESIGNS}, plan=PLAN, seed=SEED, progress=say)
    tree.attrs["call"] = "python data/make_assessments.py"
    wb.export_netcdf(tree, ROOT / "data" / "assessments.nc", overwrite=True)


if __name__ == "__main__":
    main()
