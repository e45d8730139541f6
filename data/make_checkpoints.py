"""Train the two small transformers that ship in data/checkpoints: one normalized, one without normalization.

    python data/make_checkpoints.py                                       # both, into data/checkpoints
    python data/make_checkpoints.py --only no_norm --steps 200 --out try  # a short run into another folder

It uses one thread, so that a re-run with the same machine, Python and torch yields the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import workbench as wb
from workbench.io.provenance import versions

#: Name -> normalization and peak learning rate. Without normalization the larger rate diverges.
RECIPES = {"pre_ln": ("pre_ln", 3e-3), "no_norm": ("none", 1e-3)}
MODEL = {"d_model": 64, "n_layers": 6, "n_heads": 4, "vocab_size": 256, "max_length": 64, "init_std": 0.02, "seed": 42}
TASK = {"length": 64, "batch_size": 32, "seed": 42}
WARMUP = 200
#: Early steps whose loss is recorded, for a quick check of a re-run.
EARLY = (1, 5, 10, 20)


def train(norm: str, peak_rate: float, n_steps: int, *, stop_at: int | None = None) -> tuple[torch.nn.Module, dict]:
    """Train a model, or only its first ``stop_at`` steps, and return it with its loss by step, in nat per byte."""
    losses = {}
    model = wb.zoo.transformer(norm=norm, **MODEL)
    task = wb.tasks.text_bytes(**TASK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(stop_at or n_steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / n_steps))
        optimizer.param_groups[0]["lr"] = peak_rate * min(1.0, (step + 1) / WARMUP) * decay
        tokens, targets = task.batch(step)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in EARLY or step % 500 == 0 or step == n_steps - 1:
            losses[str(step)] = round(loss.item(), 6)
            print(f"{norm} step {step}: loss {loss.item():.3f}", flush=True)
    return model, losses


@torch.no_grad()
def validation_loss(model: torch.nn.Module) -> float:
    """Return the loss on 64 held-out sequences, in nat per byte."""
    tokens, targets = wb.tasks.text_bytes(length=64, batch_size=64, seed=1, split="validation").batch(0)
    return float(cross_entropy(model.eval()(tokens).flatten(0, 1), targets.flatten()))


def main() -> None:
    """Read the command line and train the checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoints")
    parser.add_argument("--only", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, default=4000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in [args.only] if args.only else RECIPES:
        norm, peak_rate = RECIPES[name]
        start = time.monotonic()
        model, losses = train(norm, peak_rate, args.steps)
        subject = wb.Subject(
            model, name, "data/make_checkpoints.py", own_tokenizer=wb.ByteTokenizer(MODEL["max_length"])
        )
        folder = wb.save_checkpoint(subject, args.out / name, overwrite=True)
        weights = folder / "model.safetensors"
        record = {
            "call": f"python data/make_checkpoints.py --only {name} --steps {args.steps}",
            "seed": MODEL["seed"],
            "task": "byte-level language model of Python's language reference (pydoc_data.topics)",
            "peak_learning_rate": peak_rate,
            "n_steps": args.steps,
            "training_loss": losses,
            "validation_loss": round(validation_loss(model), 4),
            "seconds": round(time.monotonic() - start),
            "versions": versions(),
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        }
        (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
        print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
