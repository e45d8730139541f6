"""What Koopman Spectral Shaping costs a training run, as a ratio measured side by side in one process.

Call: python -m benchmarks.shaping [--rounds 2]; writes benchmarks/shaping.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

import workbench as wb
from benchmarks.report import write_report
from workbench.callbacks.kss import KSS, KSSOptions, PenaltyShape, Shaper, TrustRegion
from workbench.io.provenance import versions

#: Runs take turns in chunks of so many steps: the longest interval.
CHUNK = 10
SIZE = {"d_model": 256, "n_layers": 6, "n_heads": 8, "vocab_size": 256, "max_length": 256}


def variants() -> dict[str, tuple[KSS | None, str]]:
    """What is measured: name -> KSS and what is wanted."""
    on_all = KSSOptions(n_snapshots=512)
    rank_8 = PenaltyShape(rank=8, unstable_term="log", beta=0.0)
    return {
        "no KSS": (None, ""),
        "published, .15 / 10, half the layers": (KSS.published(), "8-12 % (published)"),
        "gradient, 5 / 2, all layers": (KSS(strength=5, interval=2, layers="all", options=on_all), "measured"),
        "gradient, rank 8, 64 states, 1 / 1": (
            KSS(strength=1, interval=1, layers="all", options=KSSOptions(n_snapshots=64, penalty=rank_8)),
            "measured",
        ),
        "trust region, every step (recommended)": (KSS.recommended(), "at most 3 %"),
        "trust region, every step, always outside its band": (always_outside(), "measured"),
        "trust region, every 5 steps": (KSS.recommended(interval=5), "measured"),
    }


def always_outside() -> KSS:
    """The recommended form where it costs most: each update is looked at twice, before and after."""
    best = KSS.recommended()
    return KSS.recommended(options=replace(best.options, trust_region=TrustRegion(highest=0.0, rise=1e6)))


def begin(kss: KSS | None, n_steps: int) -> Iterator[object]:
    """A fresh run of 32 sequences of 256 tokens at d = 256, L = 6."""
    model = wb.zoo.transformer("none", **SIZE, seed=0)
    task = wb.tasks.random_tokens(batch_size=32, length=SIZE["max_length"], vocab_size=SIZE["vocab_size"], seed=0)
    return wb.train(model, task, n_steps=n_steps, learning_rate=1e-3, warmup=100, kss=kss)


class Stopwatch:
    """Seconds spent inside KSS, by wrapping what it does around an update."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._undo: list[tuple[str, object]] = []

    def __enter__(self) -> Stopwatch:
        for name in ("_act", "_begin_update"):
            original = getattr(Shaper, name)
            self._undo.append((name, original))
            setattr(Shaper, name, self._timed(original))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, original in self._undo:
            setattr(Shaper, name, original)

    def _timed(self, function: object) -> object:
        def timed(*args: object) -> object:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def main() -> None:
    """Measure, print the table and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    n_rounds = parser.parse_args().rounds
    runs = {name: begin(kss, (n_rounds + 1) * CHUNK + 1) for name, (kss, _) in variants().items()}
    total, inside = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0.0)
    for run in runs.values():  # imports and the anatomy
        next(run)
    for i in range(n_rounds):
        for name, run in runs.items():
            with Stopwatch() as watch:
                start = time.perf_counter()
                for _ in range(CHUNK):
                    next(run)
                total[name] += time.perf_counter() - start
                inside[name] += watch.seconds
        print(f"round {i + 1} of {n_rounds}", flush=True)
    n_steps = n_rounds * CHUNK
    plain = total["no KSS"]
    rows = [
        f"| {name} | {wanted or '-'} | **{inside[name] / (total[name] - inside[name]):+.1%}** "
        f"| {total[name] / plain - 1:+.1%} | {1e3 * inside[name] / n_steps:.0f} ms a step |"
        for name, (_, wanted) in variants().items()
    ]
    about = (
        f"No-Norm, d = 256, L = 6, batches of 32 x 256 tokens, {n_steps} steps of each, in turns of {CHUNK} in one "
        f"process; without KSS a step takes {plain / n_steps:.2f} s. The share is the time inside KSS over the time "
        "outside it, in the same run; the ratio compares whole runs and carries their noise. Made by `make bench` on "
        f"{os.cpu_count()} cores ({platform.machine()}, {torch.get_num_threads()} threads), {versions()}."
    )
    columns = ("KSS", "wanted", "share of the step", "ratio of whole runs", "time")
    write_report("shaping", "Cost of Koopman Spectral Shaping", about, columns, rows)


if __name__ == "__main__":
    main()
