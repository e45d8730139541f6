"""Measure the time that `wb.watch` adds to a step of training loops as people write them, at its defaults.

Call: python -m benchmarks.foreign [--steps 350]; writes benchmarks/foreign.md. Each loop trains two equal models in one
process, one of them watched, which take turns after every step. Both must end with the same parameters, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import workbench as wb
from benchmarks.report import write_report
from workbench.io.provenance import versions

#: Steps that are not reported: in them the model is read, and the cost of the parts is measured.
N_SKIPPED = 50
WIDTH, DEPTH, N_HEADS, LENGTH, N_ROWS, N_TOKENS = 128, 4, 4, 64, 8, 65

#: Function of a model and an optimizer, or of a trainer, that returns the context of the watch or an empty one.
Attach = Callable[..., AbstractContextManager[Any]]
#: A loop that yields its model after each step.
Loop = Iterator[nn.Module]


@dataclass
class Times:
    """Seconds of the steps of two loops, and of the end of the watched one."""

    wall: dict[str, list[float]] = field(default_factory=lambda: {"without": [], "with": []})
    processor: dict[str, list[float]] = field(default_factory=lambda: {"without": [], "with": []})
    end: float = 0.0


# Loops


class Block(nn.Module):
    """Block of a small GPT, with queries, keys and values in one linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the block."""
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(c, 2)
        q, k, v = (each.view(b, t, N_HEADS, c // N_HEADS).transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.c_out(functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Small GPT that returns logits and loss, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(N_TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(DEPTH))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, N_TOKENS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, N_TOKENS), targets.reshape(-1))


def batches(seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets from a text of random characters."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(N_TOKENS, (20_000,), generator=generator)
    while True:
        places = torch.randint(len(text) - LENGTH - 1, (N_ROWS,), generator=generator)
        rows = torch.stack([text[i : i + LENGTH + 1] for i in places])
        yield rows[:, :-1], rows[:, 1:]


def nanogpt(attach: Attach, *, n_accumulated: int = 1, uses_autocast: bool = False) -> Loop:
    """Train as nanoGPT does: gradient accumulation, clipping, autocast, a loss that is read at every step."""
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    around = torch.autocast("cpu", torch.bfloat16) if uses_autocast else nullcontext()
    data = batches()
    with attach(model, optimizer):
        while True:
            for _ in range(n_accumulated):
                with around:
                    _, loss = model(*next(data))
                (loss / n_accumulated).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            yield model


def of_accelerate(attach: Attach) -> Loop:
    """Train with accelerate, which wraps model and optimizer."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = GPT()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with attach(model, optimizer):
        for inputs, targets in batches():
            with accelerator.accumulate(model):
                _, loss = model(inputs, targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            yield model


def of_transformers(attach: Attach) -> Loop:
    """Train a tiny Llama with the Trainer of transformers, which runs in a thread that stops after each step."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=N_HEADS,
        vocab_size=N_TOKENS,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    data = batches()
    rows = [{"input_ids": row, "labels": row} for _ in range(64) for row in next(data)[0]]
    turns = Turns()

    class Pause(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop |= not turns.pause()
            return control

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=N_ROWS,
            max_steps=100_000,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=10,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[Pause()])
        trainer.remove_callback(transformers.PrinterCallback)
        with attach(trainer):
            try:
                for _ in turns.of(trainer.train):
                    yield model
            finally:
                turns.end()


class Turns:
    """Turns of a thread that trains, and of the one that lets it make a step."""

    def __init__(self) -> None:
        self._goes_on, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ends = False

    def of(self, train: Callable[[], object]) -> Iterator[None]:
        """Yield after each step of a function that calls `pause` after each."""

        def run() -> None:
            torch.set_num_threads(1)
            try:
                train()
            except BaseException as error:  # noqa: BLE001  it is raised in the other thread
                self._error = error
            self._is_done.release()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        while True:
            self._is_done.acquire()
            if self._error is not None:
                raise self._error
            if not self._thread.is_alive():
                return
            yield
            self._goes_on.release()

    def pause(self) -> bool:
        """Wait for the next step; return whether there is one."""
        self._is_done.release()
        self._goes_on.acquire()
        return not self._ends

    def end(self) -> None:
        """Let the function end."""
        self._ends = True
        if self._thread is not None and self._thread.is_alive():
            self._goes_on.release()
            self._thread.join()


def of_ddp(attach: Attach) -> Loop:
    """Train with DDP, in a process of a group."""
    model = nn.parallel.DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with attach(model, optimizer):
        for inputs, targets in batches(seed=torch.distributed.get_rank()):
            _, loss = model(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield model


#: Loops by name, with the package that they need.
LOOPS: dict[str, tuple[Callable[[Attach], Loop], str]] = {
    "nanoGPT": (nanogpt, "torch"),
    "nanoGPT, 2 batches accumulated": (partial(nanogpt, n_accumulated=2), "torch"),
    "nanoGPT, autocast to bfloat16": (partial(nanogpt, uses_autocast=True), "torch"),
    "accelerate": (of_accelerate, "accelerate"),
    "Trainer of transformers": (of_transformers, "transformers"),
    "DDP, 2 processes with gloo": (of_ddp, "torch"),
}


# Measurement


def in_turn(make: Callable[[Attach], Loop], n_steps: int) -> Times:
    """Run two loops in turn, one of them watched, and return the times of their steps.

    Raises:
        AssertionError: If the parameters of both differ at the end.
    """
    times = Times()
    with tempfile.TemporaryDirectory() as folder:

        def watching(*trained: Any) -> AbstractContextManager[Any]:
            return wb.watch(*trained, store=Path(folder, "a.zarr"), shows=False)

        loops, models = {}, {}
        for name, attach in {"without": lambda *_: nullcontext(), "with": watching}.items():
            torch.manual_seed(0)
            loops[name] = make(attach)
            models[name] = next(loops[name])
        for _ in range(n_steps):
            for name, loop in loops.items():
                start, used = time.perf_counter(), time.process_time()
                next(loop)
                times.wall[name].append(time.perf_counter() - start)
                times.processor[name].append(time.process_time() - used)
        for loop in loops.values():  # the watched one is the last
            start = time.perf_counter()
            loop.close()
            times.end = time.perf_counter() - start
        here, there = (dict(model.named_parameters()) for model in models.values())
        for key, weight in here.items():
            assert torch.equal(weight, there[key]), f"{key} differs"
    return times


def in_processes(make: Callable[[Attach], Loop], n_steps: int, n_processes: int = 2) -> Times:
    """Run `in_turn` in processes that train together, and return the times of the first one."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        file = Path(folder, "times.pt")
        torch.multiprocessing.spawn(_trained_together, (n_processes, address, make, n_steps, file), n_processes)
        return torch.load(file, weights_only=False)


def _trained_together(
    rank: int, n: int, address: str, make: Callable[[Attach], Loop], n_steps: int, file: Path
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=n)
    times = in_turn(make, n_steps)
    if rank == 0:
        torch.save(times, file)
    torch.distributed.destroy_process_group()


def row(name: str, times: Times, n_skipped: int = N_SKIPPED) -> str:
    """Return the row of a loop."""
    wall, processor = ({key: each[n_skipped:] for key, each in of.items()} for of in (times.wall, times.processor))
    middle = {key: statistics.median(each) for key, each in wall.items()}
    mean, used = ({key: statistics.fmean(each) for key, each in of.items()} for of in (wall, processor))
    cells = [
        name,
        f"{1e3 * middle['without']:.1f} ms",
        f"**{mean['with'] / mean['without'] - 1:+.1%}**",
        f"{middle['with'] / middle['without'] - 1:+.1%}",
        f"{used['with'] / used['without'] - 1:+.1%}",
        f"{1e3 * (mean['with'] - mean['without']):.2f} ms",
        f"{1e3 * max(wall['with']):.0f} ms",
        f"{times.end:.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--only", nargs="+", choices=[*LOOPS], default=[*LOOPS])
    args = parser.parse_args(arguments)
    rows, missing = [], [name for name in ("peft", "trl") if find_spec(name) is None]
    with _one_thread():
        for name in args.only:
            make, package = LOOPS[name]
            if find_spec(package) is None:
                missing.append(package)
                continue
            measure = in_processes if make is of_ddp else in_turn
            rows.append(row(name, measure(make, args.steps), min(N_SKIPPED, args.steps // 3)))
            print(rows[-1], flush=True)
    about = (
        f"`wb.watch` at its defaults in loops as people write them, on a small model: d = {WIDTH}, L = {DEPTH}, "
        f"{N_HEADS} heads, batches of {N_ROWS} x {LENGTH} tokens, float32, AdamW, one thread. Two equal models train "
        f"in one process, one of them watched, and take turns after every step; {args.steps} steps of each, without "
        f"the first {N_SKIPPED}. All pairs ended with the same parameters, bit for bit. Times are wall-clock times, "
        "apart from the column of processor time, which contains that of background threads. The end is the time until "
        f"the watch is closed. Generated by `python -m benchmarks.foreign` on {os.cpu_count()} cores "
        f"({platform.machine()}) with {versions()}."
    )
    columns = (
        "loop", "step", "added, mean", "added, median", "added processor time, mean", "added per step, mean",
        "longest step", "end",
    )  # fmt: skip
    after = f"Not measured, because not installed: {', '.join(missing)}." if missing else ""
    write_report("foreign", "Cost of watching other training loops", about, columns, rows, after)


if __name__ == "__main__":
    main()
