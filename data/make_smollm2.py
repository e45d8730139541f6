"""Record the spectra of all blocks of SmolLM2-135M for different states and ranks, and of weights, in data/smollm2.nc.

python data/make_smollm2.py

The model is the 4-bit checkpoint of `wb.samples.smollm2`; notebook 01 measures every fourth block of it.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
import xarray as xr

import workbench as wb
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning

OUT = Path(__file__).parent / "smollm2.nc"
N_PASSAGES, N_CHARACTERS, N_STATES = 40, 400, 2048
N_PROMPTS, N_PROMPT_CHARACTERS, RANK = 4, 60, 32
MEASURES = [
    "near_unit_mass", "nonlinearity_ratio", "eigenvector_condition", "spectral_radius", "rank", "significant_digits",
]  # fmt: skip
WEIGHTS = ["n_spikes", "alpha", "ks_distance"]


def variants() -> dict[str, tuple[list[str], dict[str, Any]]]:
    """Return the texts and the options of each measurement, by name."""
    passages = wb.tasks.reference_passages(N_PASSAGES, n_characters=N_CHARACTERS)
    prompts = [text[:N_PROMPT_CHARACTERS] for text in passages[:N_PROMPTS]]
    many, few = {"n_snapshots": N_STATES, "skip_first": 1}, {"n_snapshots": None, "skip_first": 1}
    return {
        "2,048 states": (passages, many),
        "1,024 states": (passages, {**many, "n_snapshots": N_STATES // 2}),
        "2,048 states, 32 directions": (passages, {**many, "rank": RANK}),
        "4 prompts": (prompts, few),
        "4 prompts, 32 directions": (prompts, {**few, "rank": RANK}),
        "2,048 states with the first token": (passages, {"n_snapshots": N_STATES}),
    }


def main() -> None:
    """Measure the blocks and the weights."""
    torch.set_num_threads(1)
    start = time.monotonic()
    model = wb.open_checkpoint(wb.samples.smollm2(), name="SmolLM2-135M")
    blocks = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
        for name, (texts, options) in variants().items():
            blocks[name] = wb.profile(model, texts, n_workers=1, **options)[MEASURES].drop_vars("layer_name")
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    sources: dict[str, Any] = {name: wb.samples.load(name) for name in ("pre_ln", "no_norm")}
    sources |= {"SmolLM2-135M": model, "untrained": wb.zoo.transformer(d_model=64, n_layers=6, seed=0)}
    weights = []
    for name, source in sources.items():
        found = wb.weights.weight_spectra(source)
        rows = found[[*WEIGHTS, "role"]].isel(matrix=found["layer"].values >= 0).reset_coords(["role"])
        weights.append(
            rows.drop_vars(["matrix", "layer", "n_rows", "n_columns"], errors="ignore").assign(
                model=("matrix", [name] * rows.sizes["matrix"])
            )
        )
    data = xr.concat(blocks.values(), xr.IndexVariable("variant", list(blocks)), combine_attrs="drop")
    data = data.merge(xr.concat(weights, "matrix", combine_attrs="drop"))
    data.attrs = {
        "call": "python data/make_smollm2.py",
        "versions": versions(),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    with replacing(OUT) as partial:
        data.drop_encoding().to_netcdf(partial, engine="netcdf4")


if __name__ == "__main__":
    main()
