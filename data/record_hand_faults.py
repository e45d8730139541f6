"""Alarms on faults that are written by hand into a plain training loop, by kind; writes hand_faults.csv.

    python data/record_hand_faults.py --seeds 0 1       # resumable; each seed adds healthy steps and every fault
    python data/record_hand_faults.py --table           # writes the table

Models of transformers (Qwen2, GPT-NeoX, Gemma 2, Qwen3-MoE; width 64, three blocks) learn bytes of text (batch 8,
length 48) with AdamW and a cosine for 900 updates, watched with the defaults. The faults are in the loop, not in the
library, and neither detectors nor thresholds were fitted to them: a tenth of the labels is random, the same batch comes
for ever, the causal mask is lost, the learning rate is multiplied by 8, the gradient of one matrix is zero, the
optimizer's second moments are divided by 1,000. Each starts at a step between 400 and 600, in a copy of the healthy
run's process, and is watched for 50 steps. The healthy run goes on to its end.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import workbench as wb
from workbench.io.atomic import replacing

TABLE = Path(__file__).parent / "hand_faults.csv"
N_STEPS, N_WATCHED, EARLIEST, LATEST = 900, 50, 400, 600
BATCH, LENGTH, VOCABULARY, PEAK = 8, 48, 256, 3e-3
_SIZE: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": _GROUPED,
    "gpt_neox": {},
    "gemma2": _GROUPED | {"query_pre_attn_scalar": 16, "sliding_window": 32},
    "qwen3_moe": _GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
#: Faults -> cause that an alarm may name; those that the attribution does not know should be "unknown".
FAULTS = {
    "random labels": "corrupted_data",
    "same batch": "repeated_data",
    "lost mask": "unknown",
    "rate x 8": "large_rate",
    "zero gradient": "dropped_bucket",
    "moments / 1000": "damaged_optimizer_state",
}


class Loop:
    """The training loop, one update at a time.

    Args:
        model: Name of the model.
        seed: Seed of parameters, data and faults.
    """

    def __init__(self, model: str, seed: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1000 + seed)
        config = AutoConfig.for_model(model, **_SIZE, **MODELS[model])
        self.model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, N_STEPS)
        self.task = wb.tasks.text_bytes(length=LENGTH, batch_size=BATCH, seed=seed)
        self.draws = torch.Generator().manual_seed(seed)
        self.alarms = wb.Alarms()
        self.recorder = wb.Recorder(alarms=self.alarms, budget=None).attach(self.model, self.optimizer)
        self.fault, self.kept = "", None

    def begin(self, fault: str) -> None:
        """Inject a fault from the next update on."""
        self.fault = fault
        if fault == "rate x 8":
            self.schedule.base_lrs = [8 * rate for rate in self.schedule.base_lrs]
            for group in self.optimizer.param_groups:
                group["lr"] *= 8
        if fault == "moments / 1000":
            for state in self.optimizer.state.values():
                state["exp_avg_sq"].div_(1000)

    def update(self, step: int) -> None:
        """Do one update."""
        tokens, targets = self._batch(step)
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        visible = visible if self.fault == "lost mask" else visible.tril()
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min).expand(BATCH, 1, LENGTH, LENGTH)
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if self.fault == "zero gradient":
            matrices = [p for p in self.model.parameters() if p.ndim == 2 and p.grad is not None]
            matrices[len(matrices) // 2].grad.zero_()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.recorder.log(loss=loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = self.task.batch(step)
        if self.fault == "same batch":
            self.kept = tokens, targets = self.kept or (tokens, targets)
        if self.fault == "random labels":
            is_random = torch.rand(targets.shape, generator=self.draws) < 0.1
            targets = targets.where(~is_random, torch.randint(VOCABULARY, targets.shape, generator=self.draws))
        return tokens, targets


def record(model: str, seed: int, work: Path) -> None:
    """Train a healthy run, with a copy of the process for each fault, and write a file for each of them."""
    if place_of(work, model, "", seed).exists():
        return
    begun, loop = time.monotonic(), Loop(model, seed)
    start = int(np.random.default_rng([seed, list(MODELS).index(model)]).integers(EARLIEST, LATEST + 1))
    for step in range(N_STEPS):
        for fault in FAULTS if step == start else ():
            if (process := os.fork()) == 0:
                watch_fault(loop, model, fault, seed, start, work)
                os._exit(0)
            if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
                raise RuntimeError(f"The copy with the fault {fault} failed; its error is above.")
        loop.update(step)
    write(
        place_of(work, model, "", seed), row(loop, model, "", seed, 0, N_STEPS) | {"seconds": time.monotonic() - begun}
    )


def watch_fault(loop: Loop, model: str, fault: str, seed: int, start: int, work: Path) -> None:
    """Continue a run with a fault until a few steps after the first alarm."""
    loop.begin(fault)
    n_before, first, cause = len(loop.alarms.raised), math.inf, ""
    for step in range(start, start + N_WATCHED):
        loop.update(step)
        loop.recorder.finish_step()
        if len(loop.alarms.raised) > n_before and first == math.inf:
            first, cause = step, loop.alarms.attribute().cause
        if step >= first + 2:
            break
    write(place_of(work, model, fault, seed), row(loop, model, fault, seed, start, step + 1, cause))


def row(loop: Loop, model: str, fault: str, seed: int, start: int, n_steps: int, cause: str = "") -> dict[str, Any]:
    """Return a row of the table: the first alarm from the start on, with the cause named there."""
    found = [alarm for alarm in loop.alarms.raised if alarm.step >= start]
    first = found[0] if found else None
    return {
        "model": model, "seed": seed, "fault": fault, "start": start, "n_steps": n_steps,
        "delay": "" if first is None else first.step - start, "signal": "" if first is None else first.signal,
        "cause": cause, "expected": FAULTS.get(fault, ""),
        "signals": " ".join(sorted({alarm.signal.replace(" ", "_") for alarm in found})),
        "n_alarms": len(found),
    }  # fmt: skip


def write(place: Path, content: dict[str, Any]) -> None:
    """Write a row as JSON, and print it."""
    with replacing(place) as partial:
        partial.write_text(json.dumps(content))
    print(*content.values(), flush=True)


def place_of(work: Path, model: str, fault: str, seed: int) -> Path:
    """Return the file of a run."""
    return work / f"{model}_{fault or 'healthy'}_{seed}.json".replace(" ", "_").replace("/", "over")


def main() -> None:
    """Read the command line, and record the runs or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/hand_faults"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed in args.seeds:
        for model in MODELS:
            record(model, seed, args.work)
    if args.table:
        rows = [json.loads(place.read_text()) for place in sorted(args.work.glob("*.json"))]
        columns = list(dict.fromkeys(name for each in rows for name in each if name != "seconds"))
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
