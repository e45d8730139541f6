"""How often the precision probe calls healthy arithmetic broken, and which doses of a fault its first probe sees.

Call: python -m benchmarks.precision [--models 1000]; writes benchmarks/precision.md. Every model is drawn: family,
size, inputs, and how long it was trained. Healthy models are probed twice in each number format: by torch's own
kernels, and by another correct one, the attention that the fault uses while it is off.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import workbench as wb
from benchmarks.report import write_report
from workbench.io.provenance import versions
from workbench.models.losses import prediction_of, token_loss

SEED = 7
FAMILIES = ("pre_ln", "post_ln", "llama_style", "moe", "mamba", "llama", "qwen3")
#: Faults: bits that are lost, and of which tensors of the backward pass.
DOSES = [(n_bits, gradient) for gradient in (True, False) for n_bits in (1, 2, 3, 4, 6, 8)]
FORMATS = {"float32": None, "bfloat16": torch.bfloat16}


def drawn_model(draw: np.random.Generator) -> tuple[str, nn.Module, Any]:
    """Family, model and task."""
    family, seed = str(draw.choice(FAMILIES)), int(draw.integers(1_000_000))
    length, width, depth = int(draw.choice([8, 12, 16])), int(draw.choice([16, 32, 48])), int(draw.integers(2, 5))
    task = wb.tasks.associative_recall(length=length, vocab_size=16, n_pairs=2, batch_size=16, seed=seed)
    size: dict[str, Any] = {"d_model": width, "n_layers": depth, "vocab_size": 16, "max_length": length, "seed": seed}
    if family in ("pre_ln", "post_ln"):
        return family, wb.zoo.transformer(family, n_heads=4, **size), task
    if family == "llama_style":
        return family, wb.zoo.llama_style(n_heads=4, n_kv_heads=2, **size), task
    if family == "moe":
        return family, wb.zoo.moe(n_heads=4, n_experts=4, top_k=2, **size), task
    if family == "mamba":
        return family, wb.zoo.mamba(**size), task
    config = {
        "model_type": family, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": max(8, width // 4), "intermediate_size": 2 * width, "vocab_size": 16,
        "max_position_embeddings": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return family, wb.design(config).build(seed=seed), task


def around(dtype: torch.dtype | None, cut: wb.faults.Cut | None) -> AbstractContextManager[Any]:
    """The context of a pass: autocast, and attention that may lose bits."""
    stack = ExitStack()
    if dtype is not None:
        stack.enter_context(torch.autocast("cpu", dtype))
    if cut is not None:
        stack.enter_context(wb.faults.FlashAttentionMode()).cut = cut
    return stack


def probes_of(draw: np.random.Generator) -> dict[tuple[str, str], tuple[bool, float]]:
    """For each format and arithmetic: whether a drawn model's is called broken, and its largest excess."""
    family, model, task = drawn_model(draw)
    rate = float(10 ** draw.uniform(-3.5, -2))
    for _ in wb.train(model, task, n_steps=int(draw.choice([1, 20, 60])), learning_rate=rate, warmup=5):
        pass
    n_rows = int(draw.choice([2, 4, 8]))
    inputs, targets = (part[:n_rows] for part in task.batch(10_000))
    anatomy = wb.read_anatomy(model, inputs)
    query_keys = wb.query_key_weights(model, inputs, anatomy=anatomy)

    def loss_of(module: nn.Module) -> torch.Tensor:
        return token_loss(prediction_of(module(inputs)), targets)

    kinds: dict[str, wb.faults.Cut | None] = {"torch's kernels": None}
    if family != "mamba":
        kinds["another kernel"] = wb.faults.Cut()
        kinds |= {_name(n, g): wb.faults.Cut(n_bits=n, output=True, gradient=g) for n, g in DOSES}
    found = {}
    for name, dtype in FORMATS.items():
        for kind, cut in kinds.items():
            context: Callable[[], AbstractContextManager[Any]] = partial(around, dtype, cut)
            errors = wb.probes.precision_errors(model, loss_of, anatomy=anatomy, query_keys=query_keys, around=context)
            largest = float(np.nanmax(errors["error_excess"]))
            found[name, kind] = (wb.probes.broken_arithmetic(errors) is not None, largest)
    return found


def _name(n_bits: int, cuts_gradient: bool) -> str:
    return f"{n_bits} {'bit' if n_bits == 1 else 'bits'} of {'O and dO' if cuts_gradient else 'O'} lost"


def main() -> None:
    """Draw the models, print the table and save it."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    n_models = parser.parse_args().models
    draw = np.random.default_rng(SEED)
    found: dict[tuple[str, str], list[tuple[bool, float]]] = defaultdict(list)
    for i in range(n_models):
        for (name, kind), result in probes_of(draw).items():
            found[name, kind].append(result)
        if (i + 1) % 50 == 0:
            print(f"{i + 1} of {n_models} models", flush=True)
    rows = []
    for kind in ("torch's kernels", "another kernel", *(_name(n, g) for n, g in DOSES)):
        cells = []
        for name in FORMATS:
            results = found[name, kind]
            n_called = sum(is_broken for is_broken, _ in results)
            low, middle, high = np.quantile([excess for _, excess in results], [0, 0.5, 1])
            cells.append(f"{n_called} of {len(results)} | {low:,.3g}, {middle:,.3g}, {high:,.3g}")
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    about = (
        f"{n_models} drawn models of {len(FAMILIES)} families ({', '.join(FAMILIES)}; width 16 to 48, 2 to 4 blocks, "
        f"16 to 128 tokens, 1 to 60 updates; seed {SEED}), each probed once. Wanted: none of the healthy ones, and all "
        "that lost two bits or more. Limits were chosen on some 150 models drawn likewise from other seeds, not from "
        "other families. Excess: error over what rounding explains, of the worst block: smallest, "
        f"median, largest. Made by `make bench` with {versions()}."
    )
    columns = ("arithmetic", "float32: called broken", "excess", "bfloat16: called broken", "excess")
    write_report("precision", "The precision probe", about, columns, rows)


if __name__ == "__main__":
    main()
