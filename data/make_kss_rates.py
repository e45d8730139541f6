"""Record the effect of Koopman Spectral Shaping on the useful learning rates and the best loss.

    python data/make_kss_rates.py                    # everything, into data/kss_rates.nc; resumable

Seven architectures (3 blocks of width 64; 2 blocks for mixtures of experts, Mamba and KAN, the latter of width 32) are
trained for 480 updates of AdamW, at a constant learning rate after a warm-up of 30 updates, at rates a factor of 2.25
apart, with two seeds. There are four controls: none, gradients clipped at norm 1, KSS as published, and the recommended
KSS. A fifth control, a smaller rate, is among the rates of the first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from make_sweep import write
from rate_designs import LENGTH, N_STEPS

import workbench as wb
from workbench.rates.rate_search import rate_of

TEXT = {"vocab_size": 256, "max_length": LENGTH}
SIZE = {"d_model": 64, "n_layers": 3, "n_heads": 4, **TEXT}
#: Name -> options of the model, and exponents of the first and the last rate.
ARCHITECTURES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "No norm": ({**SIZE, "norm": "none"}, (-3, 11)),
    "Pre-LN": ({**SIZE, "norm": "pre_ln"}, (-3, 11)),
    "RMSNorm": ({**SIZE, "norm": "rms_norm"}, (-3, 11)),
    "MoE": ({**SIZE, "family": "moe", "norm": "pre_ln", "n_experts": 4, "top_k": 2, "n_layers": 2}, (-3, 11)),
    "Mamba": ({"family": "mamba", "d_model": 64, "n_layers": 2, **TEXT}, (-3, 11)),
    "KAN": ({**SIZE, "family": "kan", "norm": "pre_ln", "d_model": 32, "n_layers": 2}, (-3, 11)),
    "ViT": (
        {
            "family": "vit", "norm": "pre_ln", "d_model": 64, "n_layers": 3, "n_heads": 4, "image_size": 8,
            "patch_size": 2, "n_channels": 1, "n_classes": 10,
        },
        (-5, 9),
    ),
}  # fmt: skip
#: Name -> gradient norm for clipping, and kind of KSS.
CONTROLS = {
    "none": (None, ""), "clipped at 1": (1.0, ""), "KSS, published": (None, "published"),
    "KSS, recommended": (None, "recommended"),
}  # fmt: skip
SEEDS = (1, 2)
STEP = 2


def runs() -> list[wb.sweeps.RunSettings]:
    """Return all runs."""
    found = []
    for name, (model, (first, last)) in ARCHITECTURES.items():
        is_image = name == "ViT"
        task = (
            {"name": "digits", "batch_size": 32}
            if is_image
            else {"name": "text_bytes", "length": LENGTH, "batch_size": 8}
        )
        for control, (clip_norm, kss) in CONTROLS.items():
            for k in range(first, last + 1, STEP):
                training = {
                    "n_steps": N_STEPS, "warmup": 30, "learning_rate": rate_of(k), "clip_norm": clip_norm,
                    "optimizer_options": {"betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True},
                    "stops_at_divergence": False,
                }  # fmt: skip
                found += [
                    wb.sweeps.RunSettings(
                        architecture=name, model=model, task=task, training=training, seed=seed, study=control,
                        n_snapshots=0, n_evaluations=20, kss=kss,
                    )
                    for seed in SEEDS
                ]  # fmt: skip
    return found


def main() -> None:
    """Read the command line and record the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("--folder", type=Path, default=here / "rates", help="folder of the temporary store")
    parser.add_argument("--out", type=Path, default=here / "kss_rates.nc")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    sweep = wb.sweeps.run(runs(), args.folder / "kss.zarr", n_workers=args.workers)
    about = {"call": "python data/make_kss_rates.py", "n_steps": N_STEPS, "seeds": json.dumps(SEEDS)}
    write(sweep, args.out, about, sweep.attrs)


if __name__ == "__main__":
    main()
