"""Cost of recorders, alarms and KSS on an accelerator, and their values there and on the host."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import workbench as wb
from benchmarks.accelerator import (
    OF_1B,
    SMALL,
    Measurement,
    Section,
    as_time,
    lack_of_memory,
    random_model,
    release,
    wait_for,
)
from benchmarks.host_reads import ROOT, counter_for
from workbench.callbacks.recorder.options import CADENCE

EVERY = 10  # steps in a row before the other loop continues
#: Parts of a recorder of a dense model that returns its loss.
PARTS = ("attention", "optimizer", "activations", "precision", "reduction", "update")
OF_512 = {"d_model": 512, "n_layers": 8, "n_heads": 8, "vocab_size": 256, "max_length": 64}
#: Loops by name: shape, dtype, sequences and tokens of a batch, batches of an update, bytes of a token's states.
LOOPS: dict[str, tuple[dict[str, Any], torch.dtype, tuple[int, int], int]] = {
    "d = 512, L = 8, 2k tokens": (OF_512, torch.float32, (32, 64), 1),
    "1.3B, bfloat16, 2k tokens": (OF_1B, torch.bfloat16, (4, 512), 1),
    "1.3B, bfloat16, 32k tokens": (OF_1B, torch.bfloat16, (4, 1024), 8),
}
SMALL_LOOPS = {name: (SMALL, dtype, (2, 16), n) for name, (_, dtype, _, n) in LOOPS.items()}
D512, B1_2K, B1_32K = LOOPS


class LanguageModel(torch.nn.Module):
    """Model that returns its loss, as those of Hugging Face, so that the effect of an update can be measured."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits."""
        logits = self.inner(input_ids)
        return {"loss": cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), "logits": logits}


class Loop:
    """A training loop that reads its loss at every step.

    Attributes:
        called: The model as the loop calls it, compiled or not.
        optimizer: AdamW on its parameters.
        losses: Loss of each step.
    """

    def __init__(self, name: str, device: torch.device, *, small: bool, is_compiled: bool = False) -> None:
        shape, dtype, self.batch, self.n_batches = (SMALL_LOOPS if small else LOOPS)[name]
        model = LanguageModel(random_model(shape, device, dtype)).train()
        self.called = torch.compile(model, backend=_backend(device)) if is_compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self.device, self.n_tokens, self.losses = device, shape["vocab_size"], list[float]()

    def step(self) -> float:
        """Train a step and return its seconds."""
        generator = torch.Generator().manual_seed(len(self.losses))
        tokens = [torch.randint(self.n_tokens, self.batch, generator=generator) for _ in range(self.n_batches)]
        tokens = [each.to(self.device) for each in tokens]
        wait_for(self.device)
        start = time.perf_counter()
        for each in tokens:
            loss = self.called(each, each)["loss"]
            (loss / self.n_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return time.perf_counter() - start


def alternate(
    loops: dict[str, Loop], *, seconds: float, n_most: int, n_skipped: int, in_a_row: int = EVERY
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run loops in turn, some steps of each, until the time is over.

    Returns:
        Seconds of the steps of each loop without the first, at least one; and its peak of memory in bytes.
    """
    times: dict[str, list[float]] = {name: [] for name in loops}
    peaks, end = dict.fromkeys(loops, 0.0), time.perf_counter() + seconds
    while (len(times[min(loops)]) < n_most and time.perf_counter() < end) or not times[min(loops)]:
        for name, loop in loops.items():
            is_on_cuda = loop.device.type == "cuda"
            if is_on_cuda:
                torch.cuda.reset_peak_memory_stats()
            times[name] += [loop.step() for _ in range(in_a_row)]
            if is_on_cuda:
                peaks[name] = torch.cuda.max_memory_allocated()
    return {name: found[min(n_skipped, len(found) // 3) :] for name, found in times.items()}, peaks


def _backend(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "eager"


def _needed(name: str, small: bool) -> int:
    """Return the bytes that two loops need: parameters, gradients, moments and a copy each, and the states of one."""
    (shape, dtype, batch, _) = (SMALL_LOOPS if small else LOOPS)[name]
    n_parameters = wb.zoo.count_parameters(wb.zoo.ArchitectureConfig(**shape))
    n_states = batch[0] * batch[1] * (shape["n_layers"] * 20 * shape["d_model"] + 4 * shape["vocab_size"])
    return (10 * n_parameters + n_states) * dtype.itemsize


# Values


def correctness(device: torch.device, small: bool) -> Section:
    """Compare all that a recorder measures on the device with the same run in float64 on the host."""
    n_steps = 20 if small else 50

    def recorded(place: torch.device) -> dict[str, list[dict[str, np.ndarray]]]:
        inner = wb.zoo.moe(
            d_model=64, n_layers=3, n_heads=4, n_experts=4, top_k=2, vocab_size=64, max_length=32, seed=0
        )
        model = LanguageModel(inner).double().to(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        every = {part: 10 for part in CADENCE if part not in ("curvature", "spectra")}
        recorder, found = wb.Recorder(every=every, budget=None), defaultdict(list)
        recorder.observe(lambda observation: found[observation.part].append(dict(observation.values)))
        generator = torch.Generator().manual_seed(0)
        with recorder.attach(model, optimizer):
            for _ in range(n_steps):
                tokens = torch.randint(64, (8, 32), generator=generator).to(place)
                model(tokens, tokens)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    def measure(part: str) -> tuple[list[str], Any]:
        if not runs:
            runs.append({})  # a failure is not repeated in each row
            runs[:] = [recorded(place) for place in (torch.device("cpu"), device)]
        if len(runs) < 2:
            return ["not measured: see the first row"], None
        here, there = (run[part] for run in runs)
        if not here or len(here) != len(there):
            return [f"failed: {len(here)} measurements on the host, {len(there)} on the device"], None
        differences = {
            name: max(_difference(a[name], b.get(name)) for a, b in zip(here, there, strict=True)) for name in here[0]
        }
        worst = max(differences, key=lambda name: differences[name])
        return [str(len(here)), str(len(differences)), worst, f"{differences[worst]:.0e}"], differences

    def spectra(dtype: torch.dtype) -> tuple[list[str], Any]:
        generator = torch.Generator().manual_seed(0)
        wq0, wk0, wq1, wk1 = (torch.randn(3, 4, 64, 16, generator=generator).to(dtype) for _ in range(4))
        wq1[1], wk1[1] = wq0[1], wk0[1]  # no change
        wq1[2] = wq0[2] + 1e-3 * wq1[2, ..., :1] @ wk1[2, ..., :1, :]  # a change of rank 1
        weights = (wq0, wk0, wq1, wk1)
        here = wb.monitors.qk_update_spectrum(*(weight.double() for weight in weights))
        there = wb.monitors.qk_update_spectrum(*(weight.to(device) for weight in weights))
        differences = {name: _difference(here[name].numpy(), there[name].double().cpu().numpy()) for name in here}
        worst = max(differences, key=lambda name: differences[name])
        return ["1", str(len(differences)), worst, f"{differences[worst]:.0e}"], differences

    def arithmetic(dtype: torch.dtype) -> tuple[list[str], Any]:
        model = wb.zoo.transformer(d_model=64, n_layers=3, n_heads=4, seed=1).to(device)
        tokens = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0)).to(device)
        around = partial(torch.autocast, device.type, dtype, enabled=dtype != torch.float32)
        errors = wb.probes.precision_errors(model, lambda m: m(tokens).logsumexp(-1).mean(), around=around)
        excess, is_broken = float(errors["error_excess"].max()), wb.probes.broken_arithmetic(errors) is not None
        return ["1", "1", "error_excess", f"{excess:.2g}, {'broken' if is_broken else 'sound'}"], excess

    runs: list[Any] = []
    rows = [(part, partial(measure, part)) for part in ("monitors", *PARTS, "router")]
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        rows.append((f"query-key spectra of weights in {name}", partial(spectra, dtype)))
        rows.append((f"precision of passes in {name}: excess", partial(arithmetic, dtype)))
    return Section(
        "Values on the device and in float64 on the host",
        f"Two runs of a mixture of experts (d = 64, L = 3) in float64, {n_steps} steps with AdamW, on the device and "
        "on the host, every part every 10 steps. The difference is the largest one of a variable, relative to its "
        "largest value in a measurement; inf where only one of both is NaN. In float64 the errors of `precision` are "
        "near its rounding unit, and excesses are ratios of such errors, so that they differ. The excess of sound "
        "arithmetic is below 25 in float32 and 2 in bfloat16.",
        ("part", "measurements", "variables", "worst variable", "difference"),
        [Measurement(label, run, seconds=60) for label, run in rows],
    )


def _difference(a: Any, b: Any) -> float:
    a, b = np.asarray(a, float), np.asarray(np.nan if b is None else b, float)
    if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
        return np.inf
    if np.isnan(a).all():
        return 0.0
    return float(np.nanmax(np.abs(a - b)) / max(np.nanmax(np.abs(a)), 1e-9))


# Cost


def parts(device: torch.device, small: bool) -> Section:
    """Measure the time that one measurement of each part adds to a training step."""
    loops: dict[str, Loop] = {}

    def measure(name: str, part: str) -> tuple[list[str], Any]:
        if reason := lack_of_memory(_needed(name, small), device) if not loops.get(name) else "":
            return [reason], None
        if name not in loops:
            loops.clear()
            release(device)
            loops[name], loops["watched"] = (Loop(name, device, small=small) for _ in range(2))
            loops[name].step()
        watched = loops["watched"]
        every = dict.fromkeys(CADENCE) | ({part: 1} if part in CADENCE else {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # windows of one step are too short for results, but cost the same
            with wb.Recorder(every=every, budget=None).attach(watched.called, watched.optimizer):
                for _ in range(2):  # reads the model, and allocates buffers
                    watched.step()
                with counter_for(device) as counter:
                    watched.step()
                pair = {"without": loops[name], "with": watched}
                times, peaks = alternate(pair, seconds=4, n_most=8 if small else 20, n_skipped=0, in_a_row=1)
        if (name, part) == cases[-1]:
            loops.clear()
        mean, middle = (each(times["with"]) - each(times["without"]) for each in (fmean, median))
        places = ", ".join(f"{place} ({n})" for place, n in counter.places.most_common(3))
        cells = [
            as_time(median(times["without"])),
            as_time(mean),
            as_time(middle),
            str(counter.n),
            _memory(peaks),
            places,
        ]
        return cells, {"mean": mean, "median": middle, "waits": counter.n, "n": len(times["with"])}

    cases = [(name, part) for name in (D512, B1_2K) for part in ("every update", *PARTS)]
    return Section(
        "Cost of a measurement, by part",
        "Time that a recorder adds to a training step in which it measures one part, and `every update`, what it does "
        "at each step anyway, which is contained in all rows. Two equal models with AdamW train in alternation, one of "
        f"them recorded; {'8' if small else 'at most 20'} steps of each. Waits of the host are those of one step, "
        "including one for the loss.",
        ("model, part", "step", "added, mean", "added, median", "waits", "added memory", "most frequent places"),
        [Measurement(f"{name}: {part}", partial(measure, name, part), seconds=20) for name, part in cases],
    )


def defaults(device: torch.device, small: bool, *, is_compiled: bool = False) -> Section:
    """Measure the time that `wb.watch` adds to a training step at its defaults."""
    n_most = 60 if small else 400

    def measure(name: str, seconds: float) -> tuple[list[str], Any]:
        if reason := lack_of_memory(_needed(name, small), device):
            return [reason], None
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        pair = {key: Loop(name, device, small=small, is_compiled=is_compiled) for key in ("without", "with")}
        pair["without"].step()
        breaks, watched = _breaks(), pair["with"]
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # bfloat16 parameters lose small updates, which does not affect the time
            path = Path(folder, "a.zarr")
            watch = stack.enter_context(wb.watch(watched.called, watched.optimizer, store=path, shows=False))
            watched.step()
            times, peaks = alternate(pair, seconds=seconds, n_most=n_most, n_skipped=50)
            with counter_for(device) as counter:
                for _ in range(EVERY):
                    watched.step()
            cost = str(watch.cost)
        n = min(len(loop.losses) for loop in pair.values())
        are_equal = pair["without"].losses[:n] == watched.losses[:n]
        means, middles = ({key: each(found) for key, found in times.items()} for each in (fmean, median))
        cells = [
            as_time(middles["without"]),
            f"**{means['with'] / means['without'] - 1:+.1%}**",
            f"{middles['with'] / middles['without'] - 1:+.1%}",
            as_time(max(times["with"])),
            str(len(times["with"])),
            f"{counter.n / EVERY:.1f}",
            _memory(peaks),
            "yes" if are_equal else "no",
            f"{breaks} / {_breaks()}" if is_compiled else "",
            "; ".join(" ".join(line.split()) for line in cost.splitlines()),
        ]
        return cells, {"mean": means, "median": middles, "places": dict(counter.places), "cost": cost}

    budget = inspect.signature(wb.watch).parameters["budget"].default
    seconds = {D512: 15, B1_2K: 25, B1_32K: 30}
    if is_compiled:
        del seconds[B1_32K]  # compilation would not end in time
    return Section(
        "`wb.watch` at its defaults" + (", compiled" if is_compiled else ""),
        f"The budget is {budget:.0%}. Two equal models with AdamW train in alternation, {EVERY} steps of each, one of "
        f"them watched, for up to {n_most} steps; the first 50 steps, or a third if there are fewer than 150, are left "
        "out. A step "
        "ends when its loss is read; 32k tokens are 8 batches of 4 x 1,024. Waits of the host per step include "
        f"one for the loss. torch.compile uses the backend '{_backend(device)}'; graph breaks before / after attaching "
        "the watch.",
        (
            "model", "step", "added, mean", "added, median", "longest step", "steps", "waits", "added memory",
            "equal losses", "graph breaks", "cost by part",
        ),
        [
            # Reading a large model takes longer than measuring it.
            Measurement(name, partial(measure, name, 2 if small else left), 10, 150 if is_compiled else 4 * left)
            for name, left in seconds.items()
        ],
    )  # fmt: skip


def _breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _memory(peaks: dict[str, float]) -> str:
    return f"{(peaks['with'] - peaks['without']) / 1e6:.0f} MB" if peaks["with"] else ""


# The training loop

FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "no options": dict,
    "KSS, recommended": lambda: {"kss": wb.KSS.recommended()},
    "KSS, published": lambda: {"kss": wb.KSS.published()},
    "a fault in the gradients": lambda: {"faults": [wb.faults.LowPrecisionReduction(n_ranks=2, start=0)]},
}


def training(device: torch.device, small: bool) -> Section:
    """Compare `wb.train` with a standard loop: speed, and how often the host waits for the device."""
    d_model, n_layers, batch_size, n_steps = (16, 2, 2, 20) if small else (512, 8, 64, 60)
    task = wb.tasks.associative_recall(batch_size=batch_size)

    def model() -> torch.nn.Module:
        return wb.zoo.transformer(d_model=d_model, n_layers=n_layers, n_heads=2 if small else 8).to(device)

    def standard_loop() -> Iterator[float]:
        trained = model().train()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        for inputs, targets in task.stream(0):
            loss = cross_entropy(trained(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    def run(name: str) -> Iterator[Any]:
        # Warm-up and counted steps together are as many as the timed steps; the run must not end within them.
        return wb.train(model(), task, n_steps=2 * n_steps + 1, learning_rate=1e-4, **FEATURES[name]())

    def measure(name: str) -> tuple[list[str], Any]:
        release(device)
        runs = {"loop": standard_loop(), "train": run(name)}
        waits: dict[str, Any] = {}
        for key, each in runs.items():
            _advance(each, n_steps // 2)
            with counter_for(device) as counter:
                _advance(each, n_steps // 2)
            waits[key] = counter
        seconds = dict.fromkeys(runs, 0.0)
        for _ in range(n_steps // EVERY):
            for key, each in runs.items():
                wait_for(device)
                start = time.perf_counter()
                _advance(each, EVERY)
                wait_for(device)
                seconds[key] += time.perf_counter() - start
        for each in runs.values():
            each.close()
        counts = {key: counter.n / (n_steps // 2) for key, counter in waits.items()}
        lines = ", ".join(f"{place} ({n})" for place, n in waits["train"].places.most_common(3))
        rates = [f"{n_steps / seconds[key]:.1f}" for key in runs]
        ratio = seconds["train"] / seconds["loop"]
        return [*rates, f"**{ratio - 1:+.1%}**", f"{counts['loop']:.2f}", f"**{counts['train']:.2f}**", lines], counts

    how = (
        "reported by CUDA, including the two copies of the batch in the standard loop"
        if device.type == "cuda"
        else "counted as calls that would make the host wait for a GPU, an upper bound"
    )
    return Section(
        "The training loop, and how often the host waits for the device",
        f"`wb.train` without a store, compared with a standard loop that reads its loss: Pre-LN, d = {d_model}, "
        f"L = {n_layers}, {batch_size} x 64 tokens of associative recall, float32, AdamW; {n_steps} steps, in "
        f"alternation. Waits per step are {how}, over {n_steps // 2} steps.",
        (
            "run",
            "standard loop, steps/s",
            "wb.train, steps/s",
            "added",
            "waits, standard loop",
            "waits, wb.train",
            "most frequent places",
        ),
        [Measurement(name, partial(measure, name), 3, 30) for name in FEATURES],
    )


def _advance(run: Iterator[Any], n_steps: int) -> None:
    for _ in range(n_steps):
        next(run)


# The tests that need a device

TESTS = {
    "moments, spectra, training, waits": "moments or spectra or training_agrees or host_waits",
    "monitors and shaping": "monitors_and_shaping or all_parts",
    "alarms": "(watching and not compiled) or attached_fault",
    "arithmetic": "(arithmetic and pre_ln and not tf32) or first_bad",
}


def tests(device: torch.device, small: bool) -> Section:
    """Run some of the tests that need a CUDA device."""

    def measure(selected: str) -> tuple[list[str], Any]:
        if importlib.util.find_spec("pytest") is None:
            return ["not measured: pytest is not installed"], None
        command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", "tests/test_cuda.py"]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, "--tb=line", "-k", selected], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        found = " ".join([*(done.stdout.splitlines()[-1:] or [done.stderr[-200:]]), *lines]).replace("|", "/")
        return [found[:600], as_time(time.perf_counter() - start)], found

    return Section(
        "Tests on CUDA",
        "Some tests of `tests/test_cuda.py`.",
        ("tests", "result", "time"),
        [Measurement(name, partial(measure, selected), 5, 70) for name, selected in TESTS.items()],
    )


#: Sections of the quick call, in the order in which they matter.
WATCHING: dict[str, Callable[[torch.device, bool], Section]] = {
    "correctness": correctness,
    "defaults": defaults,
    "parts": parts,
    "training": training,
    "tests": tests,
    "compiled": partial(defaults, is_compiled=True),
}
