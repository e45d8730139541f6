"""Record how well narrow models represent wide ones before training, by the structure of both.

    python data/make_matched_width.py

For each design, three models with the same depth, tokens and seeds are measured: a narrow model with the initialization
of its library, a narrow model with matched variances (`workbench.scaling.matched_width`), and the design at its width.
Writes the measurements of `workbench.assessment.structure` to ``data/matched_width.nc``. Designs with more than a
billion parameters are measured at a smaller width than the published one, given by the coordinate ``width``.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

import workbench as wb
from workbench.assessment.structure import ALL, measure_structure
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.scaling import Design
from workbench.scaling.designs import matched_width
from workbench.training.training_plan import TrainingPlan

ROOT = Path(__file__).resolve().parents[1]
THIN, VOCABULARY, N_ROWS, LENGTH, SEEDS = 64, 256, 8, 32, (0, 1)
_WIDE = {"d_model": 512, "n_layers": 12, "n_heads": 8}
#: Name -> source for `workbench.design`, width and depth.
DESIGNS: dict[str, tuple[Any, int, int]] = {
    "gpt2": ("gpt2", 768, 12),
    "pythia-160m": ("pythia-160m", 768, 12),
    "smollm2-135m": ("smollm2-135m", 576, 30),
    "qwen2.5-0.5b": ("qwen2.5-0.5b", 896, 24),
    "llama-2-7b": ("llama-2-7b", 1024, 32),
    "mixtral-8x7b": ("mixtral-8x7b", 512, 8),
    "mamba-130m": ("mamba-130m", 768, 24),
    "Pre-LN": ({"family": "transformer", "norm": "pre_ln", **_WIDE}, 512, 12),
    "Post-LN": ({"family": "transformer", "norm": "post_ln", **_WIDE}, 512, 12),
    "No-Norm": ({"family": "transformer", "norm": "none", **_WIDE}, 512, 12),
    "Pre-LN, Xavier": ({"family": "transformer", "norm": "pre_ln", "initialization": "xavier", **_WIDE}, 512, 12),
    "Mamba of the zoo": ({"family": "mamba", "d_model": 512, "n_layers": 8}, 512, 8),
}
SIZES = ("thin", "matched", "target")
#: Learning rate of the first update times the width; published values lie between 0.08 and 4.6.
RATE_TIMES_WIDTH = 0.6


def design_of(name: str) -> Design:
    """Return a design of the table at the measured width and depth."""
    source, width, depth = DESIGNS[name]
    return wb.design(source, width=width, depth=depth)


def measure_size(name: str, size: str) -> xr.Dataset:
    """Measure the structure of a design at one of ``SIZES``."""
    of = design_of(name)
    thin = of.nearest_width(THIN)

    def make(seed: int) -> nn.Module:
        if size == "matched":
            return matched_width(of, thin, of.depth, seed, vocabulary=VOCABULARY)
        return of.build(thin if size == "thin" else None, None, seed, vocabulary=VOCABULARY)

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (2, N_ROWS, LENGTH + 1), generator=generator)
    batch, others = (tokens[0, :, :-1], tokens[0, :, 1:]), tokens[1, :, :-1]
    ratio = 1.0 if size == "target" else of.width / thin
    plan = TrainingPlan(1, RATE_TIMES_WIDTH / of.width)
    return measure_structure((make(seed) for seed in SEEDS), batch, others, plan, width_ratio=ratio)[0]


def main() -> None:
    """Measure all designs and write the file."""
    torch.set_num_threads(1)
    start = time.monotonic()
    rows = []
    for name in DESIGNS:
        rows.append(xr.concat([measure_size(name, size) for size in SIZES], "size"))
        print(f"{time.monotonic() - start:6.0f} s  {name}", flush=True)
    data = xr.concat(rows, "design", combine_attrs="drop").assign_coords(design=list(DESIGNS), size=list(SIZES))
    data = data.drop_vars([name for name in data if str(name).endswith("_error")])
    data["width"] = ("design", [DESIGNS[name][1] for name in DESIGNS])
    data["depth"] = ("design", [DESIGNS[name][2] for name in DESIGNS])
    for name in ALL:
        logs = [np.log(data[name].sel(size=size) / data[name].sel(size="target")).values for size in SIZES[:2]]
        thin, matched = (np.sqrt(np.nanmean(log**2)) for log in logs)
        print(f"{name}: RMS of the log ratio {thin:.3f} narrow, {matched:.3f} matched")
    data.attrs = {
        "call": "python data/make_matched_width.py",
        "seeds": str(list(SEEDS)),
        "thin_width": THIN,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration": round(time.monotonic() - start, 1),
    }
    with replacing(ROOT / "data" / "matched_width.nc") as path:
        data.to_netcdf(path, engine="netcdf4")


if __name__ == "__main__":
    main()
