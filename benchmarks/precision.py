"""Measure false and true positives of the precision probe: healthy arithmetic, and faults that lose some bits.

Call: python -m benchmarks.precision [--models 1000]; writes benchmarks/precision.md. The family, size, inputs and
training length of every model are random. Healthy models are probed twice in each number format: with the kernels of
torch, and with another correct kernel, the attention of the fault while it is inactive.

On another device, such as --device cuda --processes 16, the script writes benchmarks/precision_cuda.md and measures
float32 a second time with tf32 products. The models do not depend on the device or the number of processes.
"""

from __future__ import annotations

import argparse
import inspect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import multiprocessing, nn

import workbench as wb
from benchmarks.report import FOLDER, write_report
from workbench.io.provenance import versions
from workbench.models.losses import prediction_of, token_loss

SEED = 7
FAMILIES = ("pre_ln", "post_ln", "llama_style", "moe", "mamba", "llama", "qwen3")
#: Faults: number of bits lost, and whether the gradient loses them as well as the output.
DOSES = [(n_bits, gradient) for gradient in (True, False) for n_bits in (1, 2, 3, 4, 6, 8)]
#: Type of autocast, and whether float32 products use tf32, by number format.
FORMATS: dict[str, tuple[torch.dtype | None, bool]] = {"float32": (None, False), "bfloat16": (torch.bfloat16, False)}
FORMATS_ON_CUDA = {"float32": (None, False), "float32 by tf32": (None, True), "bfloat16": (torch.bfloat16, False)}


@dataclass(frozen=True)
class Case:
    """A randomly chosen model with its training and inputs."""

    family: str
    seed: int
    length: int
    width: int
    depth: int
    rate: float
    n_steps: int
    n_rows: int

    @classmethod
    def drawn(cls, draw: np.random.Generator) -> Case:
        """Draw a case from a random generator."""
        family, seed = str(draw.choice(FAMILIES)), int(draw.integers(1_000_000))
        length, width, depth = int(draw.choice([8, 12, 16])), int(draw.choice([16, 32, 48])), int(draw.integers(2, 5))
        rate, n_steps = float(10 ** draw.uniform(-3.5, -2)), int(draw.choice([1, 20, 60]))
        return cls(family, seed, length, width, depth, rate, n_steps, int(draw.choice([2, 4, 8])))

    def model_and_task(self) -> tuple[nn.Module, Any]:
        """Return the untrained model on the CPU and its task."""
        length, width, seed = self.length, self.width, self.seed
        task = wb.tasks.associative_recall(length=length, vocab_size=16, n_pairs=2, batch_size=16, seed=seed)
        size: dict[str, Any] = {
            "d_model": width, "n_layers": self.depth, "vocab_size": 16, "max_length": length, "seed": seed
        }  # fmt: skip
        if self.family in ("pre_ln", "post_ln"):
            return wb.zoo.transformer(self.family, n_heads=4, **size), task
        if self.family == "llama_style":
            return wb.zoo.llama_style(n_heads=4, n_kv_heads=2, **size), task
        if self.family == "moe":
            return wb.zoo.moe(n_heads=4, n_experts=4, top_k=2, **size), task
        if self.family == "mamba":
            return wb.zoo.mamba(**size), task
        config = {
            "model_type": self.family, "hidden_size": width, "num_hidden_layers": self.depth, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": max(8, width // 4), "intermediate_size": 2 * width, "vocab_size": 16,
            "max_position_embeddings": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        return wb.design(config).build(seed=seed), task


def around(dtype: torch.dtype | None, cut: wb.faults.Cut | None, device: str = "cpu") -> AbstractContextManager[Any]:
    """Return the context of a pass: autocast, and attention that may lose bits."""
    stack = ExitStack()
    if dtype is not None:
        stack.enter_context(torch.autocast(device, dtype))
    if cut is not None:
        stack.enter_context(wb.faults.FlashAttentionMode()).cut = cut
    return stack


def probes_of(case: Case, device: str = "cpu") -> dict[tuple[str, str], tuple[bool, float]]:
    """Probe the model of a case.

    Returns:
        For each number format and arithmetic: whether the arithmetic is classified as broken, and the largest excess of
        error.
    """
    torch.set_num_threads(1)
    model, task = case.model_and_task()
    model = model.to(device)
    for _ in wb.train(model, task, n_steps=case.n_steps, learning_rate=case.rate, warmup=5):
        pass
    inputs, targets = (part[: case.n_rows].to(device) for part in task.batch(10_000))
    anatomy = wb.read_anatomy(model, inputs)
    query_keys = wb.query_key_weights(model, inputs, anatomy=anatomy)

    def loss_of(module: nn.Module) -> torch.Tensor:
        return token_loss(prediction_of(module(inputs)), targets)

    kinds: dict[str, wb.faults.Cut | None] = {"kernels of torch": None}
    if case.family != "mamba":
        kinds["another kernel"] = wb.faults.Cut()
        kinds |= {_name(n, g): wb.faults.Cut(n_bits=n, output=True, gradient=g) for n, g in DOSES}
    found = {}
    for name, (dtype, uses_tf32) in formats_on(device).items():
        with tf32_products(uses_tf32):
            for kind, cut in kinds.items():
                context: Callable[[], AbstractContextManager[Any]] = partial(around, dtype, cut, device)
                errors = wb.probes.precision_errors(
                    model, loss_of, anatomy=anatomy, query_keys=query_keys, around=context
                )
                largest = float(np.nanmax(errors["error_excess"]))
                found[name, kind] = (wb.probes.broken_arithmetic(errors) is not None, largest)
    return found


def formats_on(device: str) -> dict[str, tuple[torch.dtype | None, bool]]:
    """Return the number formats that are measured on a device."""
    return FORMATS_ON_CUDA if device.startswith("cuda") else FORMATS


@contextmanager
def tf32_products(is_on: bool) -> Iterator[None]:
    """Context in which float32 products on a CUDA device use tf32, or do not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _name(n_bits: int, cuts_gradient: bool) -> str:
    """Return the name of a fault in the table."""
    return f"{n_bits} {'bit' if n_bits == 1 else 'bits'} of {'O and dO' if cuts_gradient else 'O'} lost"


def all_probes(
    cases: Sequence[Case], device: str, n_processes: int, seconds: float
) -> Iterator[dict[tuple[str, str], tuple[bool, float]]]:
    """Yield the results of the cases in order, until the given number of seconds has passed."""
    start, probes = time.monotonic(), partial(probes_of, device=device)
    with ExitStack() as stack:
        if n_processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(n_processes))
            results = pool.imap(probes, cases)
        else:
            results = map(probes, cases)
        for result in results:
            yield result
            if time.monotonic() - start > seconds:
                return


def main() -> None:
    """Probe the models, print the table and save it."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or ""))
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the cases; limits were chosen on other seeds")
    parser.add_argument("--device", default="cpu", help="device, such as cuda")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="stop after this time and report the models probed so far"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the report")
    args = parser.parse_args()
    draw = np.random.default_rng(args.seed)
    cases = [Case.drawn(draw) for _ in range(args.models)]
    found: dict[tuple[str, str], list[tuple[bool, float]]] = defaultdict(list)
    n_models = 0
    for results in all_probes(cases, args.device, args.processes, args.seconds):
        n_models += 1
        for key, result in results.items():
            found[key].append(result)
        if n_models % 50 == 0:
            print(f"{n_models} of {args.models} models", flush=True)
    formats = formats_on(args.device)
    rows = []
    for kind in ("kernels of torch", "another kernel", *(_name(n, g) for n, g in DOSES)):
        cells = []
        for name in formats:
            results = found[name, kind]
            n_broken = sum(is_broken for is_broken, _ in results)
            low, middle, high = np.quantile([excess for _, excess in results], [0, 0.5, 1])
            cells.append(f"{n_broken} of {len(results)} | {low:,.3g}, {middle:,.3g}, {high:,.3g}")
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    is_cpu = torch.device(args.device).type == "cpu"
    where = "" if is_cpu else f" On {device_name(args.device)}."
    call = "make bench" if is_cpu else f"python -m benchmarks.precision --device {args.device}"
    about = (
        f"{n_models} random models of {len(FAMILIES)} families ({', '.join(FAMILIES)}; width 16 to 48, 2 to 4 blocks, "
        f"16 to 128 tokens, 1 to 60 updates; seed {args.seed}), each probed once.{where} Target: no healthy model and "
        "all models that lost two or more bits are classified as broken. The limits were chosen on about 150 random "
        "models with other seeds, but of the same families. Excess is the error of the worst block divided by the "
        "error that rounding explains: smallest, median and largest value. "
        f"Generated by `{call}` with {versions()}."
    )
    columns = ["arithmetic", *(column for name in formats for column in (f"{name}: broken", "excess"))]
    name = "precision" if is_cpu else f"precision_{torch.device(args.device).type}"
    write_report(name, "The precision probe", about, columns, rows, folder=args.out)


def device_name(device: str) -> str:
    """Return the name of a device, such as that of the GPU."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


if __name__ == "__main__":
    main()
