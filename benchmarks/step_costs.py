"""Count what each part of a recorder asks of a GPU, on a made-up device, and predict its time on an H100.

Call: python -m benchmarks.step_costs; writes benchmarks/step_costs.md.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import workbench as wb
from benchmarks.accelerator import random_model
from benchmarks.gpu_watching import LanguageModel
from benchmarks.host_reads import ROOT
from benchmarks.made_up_device import BANDWIDTH, COSTS, DEVICE, LAUNCH, LINK, Cost, labelled, make_up, move
from benchmarks.report import FOLDER, table
from workbench.callbacks.kss import Shaper
from workbench.callbacks.recorder.attached import AttachedRecorder
from workbench.callbacks.recorder.budget import Budget
from workbench.callbacks.recorder.options import CADENCE
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.models import readable_weights
from workbench.probes.gradient_projections import GradientProjections

#: Share of the training time that observation may take by default.
BUDGET = inspect.signature(wb.watch).parameters["budget"].default
#: Rows of every update, by the name under which a part is counted.
AT_EVERY_UPDATE = {
    "batch": "contents of the batch",
    "monitors": "gradient norm",
    "sample": "size of the update, on a sample",
    "settings": "settings",
    "row": "rows and hooks",
    "sketch": "gradient of each backward pass, sketched",
}
#: Parts with a cadence; the pass over the probe serves attention and activations, and most values that are copied are
#: those of attention.
BY_CADENCE = {
    "copy": "attention",
    "probe": "attention",
    **{part: part for part in CADENCE if part not in ("curvature", "spectra", "router")},
}

#: Kinds of shaping, measured at every update.
SHAPING = {"KSS, recommended": wb.KSS.recommended(interval=1), "KSS, published": wb.KSS.published(interval=1)}

#: Columns of a table.
COLUMNS = (
    "part", "launches", "GB", "copies to the host", "MB", "waits", "H100", "usual cadence, updates", "share of a step",
    f"cadence for {BUDGET:.0%}, updates", "share of a step",
)  # fmt: skip
#: Largest number of launches of a part, apart from blocks and for each block, and of its waits.
LIMITS = {
    "batch": (80, 0, 0),
    "monitors": (4, 0, 0),
    "sample": (15, 1, 0),
    "row": (16, 0, 0),
    "sketch": (6, 0, 0),
    "copy": (4, 2, 0),
    "probe": (68, 42, 0),
    "attention": (17, 8, 0),
    "optimizer": (57, 57, 0),
    "activations": (0, 0, 0),
    "precision": (0, 450, 0),
    "reduction": (53, 8, 0),
    "update": (37, 94, 0),
    "KSS, recommended": (20, 30, 5),
    "KSS, published": (20, 30, 5),
}
#: Largest number of waits in a step in which all parts of a recorder are measured.
MOST_WAITS = 0


@dataclass(frozen=True)
class Shape:
    """A model and its batch.

    Attributes:
        d_model: Width.
        n_layers: Number of blocks.
        n_heads: Number of heads.
        vocab_size: Number of tokens of the vocabulary.
        batch: Sequences, and tokens of each.
        dtype: Name of the format of parameters and states.
        milliseconds: Time of a step without recorder, on an H100.
    """

    d_model: int
    n_layers: int
    n_heads: int
    vocab_size: int
    batch: tuple[int, int]
    dtype: str
    milliseconds: float = math.nan


#: Steps whose time is known (benchmarks/gpu.md); that of 32k tokens is taken as 16 times that of 2k.
SHAPES = {
    "d = 512, L = 8, 8 heads, 64 x 64 tokens, float32": Shape(512, 8, 8, 256, (64, 64), "float32", 21.0),
    "d = 2,048, L = 24, 16 heads, 4 x 512 tokens, bfloat16": Shape(2048, 24, 16, 50257, (4, 512), "bfloat16", 64.5),
    "d = 2,048, L = 24, 16 heads, 16 x 2,048 tokens, bfloat16": Shape(
        2048, 24, 16, 50257, (16, 2048), "bfloat16", 16 * 64.5
    ),
}


class AtOnce(Executor):
    """Executor that does its work where it is submitted: only one thread may use the made-up device."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do the work, and return its result as a future."""
        future: Future[Any] = Future()
        future.set_result(work(*args, **kwargs))
        return future


@contextmanager
def by_part(shaping: str = "") -> Iterator[None]:
    """Context in which costs are those of the parts of a recorder, or of KSS under a name."""
    timed, guarded, send = Budget.timed, AttachedRecorder._guarded, readable_weights.send_arrays

    @contextmanager
    def counted_timer(budget: Budget, part: str) -> Iterator[None]:
        with labelled(COSTS.part if COSTS.part in ("monitors", "sample") else part), timed(budget, part):
            yield

    def counted_part(recorder: AttachedRecorder, part: str, *args: Any, **kwargs: Any) -> Any:
        with labelled(part):
            return guarded(recorder, part, *args, **kwargs)

    def counted_copy(tensors: Sequence[torch.Tensor], *, waits: bool = True) -> Any:
        COSTS.are_late = not waits
        try:
            return send(tensors, waits=waits)
        finally:
            COSTS.are_late = False

    def counted_as(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with labelled(name):
                return function(*args, **kwargs)

        return call

    changes: dict[tuple[Any, str], Any] = {
        (Budget, "timed"): counted_timer,
        (AttachedRecorder, "_guarded"): counted_part,
        **{(module, "send_arrays"): counted_copy for module in _with_name("send_arrays")},
        **{(module, "ThreadPoolExecutor"): AtOnce for module in _with_name("ThreadPoolExecutor")},
        (GradientProjections, "_see"): counted_as("reduction", GradientProjections._see),
        (Shaper, "_act"): counted_as(shaping, Shaper._act),
        (Shaper, "_begin_update"): counted_as(shaping, Shaper._begin_update),
    }
    before = {(owner, name): vars(owner)[name] for owner, name in changes}
    for (owner, name), changed in changes.items():
        setattr(owner, name, changed)
    try:
        yield
    finally:
        for (owner, name), original in before.items():
            setattr(owner, name, original)


def _with_name(name: str) -> list[Any]:
    """Return the modules of the package that have a name, as its own or imported."""
    return [m for path, m in [*sys.modules.items()] if path.startswith("workbench.") and name in vars(m)]


def counted(shape: Shape) -> dict[str, dict[str, Any]]:
    """Return the cost of each part in a step in which all are measured; for a process of its own.

    The part ``""`` is the training step, and those that begin with "KSS" are of KSS.
    """
    make_up()
    config = {name: getattr(shape, name) for name in ("d_model", "n_layers", "n_heads", "vocab_size")}
    inner = random_model(config | {"max_length": shape.batch[1]}, torch.device("cpu"), getattr(torch, shape.dtype))
    model, tokens = LanguageModel(inner), torch.randint(0, shape.vocab_size, shape.batch)
    few = tokens[:2, :16]
    recorder = wb.Recorder(every=dict.fromkeys(BY_CADENCE.keys() - {"probe", "copy"}, 1), budget=None)
    recorder.prepare(model, {"input_ids": few, "labels": few})  # the structure of a model is read from its values
    shapers = {name: Shaper(kss) for name, kss in SHAPING.items()}
    for shaper in shapers.values():
        shaper.model = model
        shaper.read_anatomy({"input_ids": few, "labels": few})
    found: dict[str, Cost] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        move(model, recorder._reading, mode)
        inputs = mode.from_tensor(tokens).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        def steps() -> dict[str, Cost]:
            for _ in range(2):  # the first one reads the model and allocates buffers
                COSTS.begin()
                model(inputs, inputs)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
            found = COSTS.of_part
            COSTS.begin()
            return found

        with COSTS:
            with by_part(), recorder.attach(model, optimizer):
                found = steps()
            of_update = wb.Recorder(every=None, budget=None)
            of_update._reading = recorder._reading
            with by_part(), of_update.attach(model, optimizer):
                row = steps()["row"]
            found["copy"], found["row"] = found["row"].less(row), row
            for name, shaper in shapers.items():
                with by_part(name), shaper.attach(model, optimizer):
                    found |= {name: steps()[name]}
    return {part: vars(cost) | {"waits": dict(cost.waits)} for part, cost in found.items()}


def count(shapes: Sequence[Shape]) -> list[dict[str, Cost]]:
    """Return the costs of each part for some shapes, counted in another process."""
    command = [sys.executable, "-m", "benchmarks.step_costs", "--count", json.dumps([asdict(each) for each in shapes])]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return [
        {part: Cost(**cost | {"waits": Counter(cost["waits"])}) for part, cost in found.items()}
        for found in json.loads(done.stdout)
    ]


def cadences(shape: Shape, costs: Mapping[str, Cost]) -> tuple[dict[str, int], bool]:
    """Return the updates between two measurements of each part in the budget, and whether precision goes by blocks."""
    seconds = {part: cost.seconds for part, cost in costs.items() if part and part not in SHAPING}
    for part, of in (
        ("probe", "attention"),
        ("copy", "attention"),
        ("monitors", "batch"),
        ("sample", "batch"),
    ):  # these are measured together
        seconds[of] = seconds.get(of, 0.0) + seconds.pop(part, 0.0)
    known = seconds | {"step": shape.milliseconds / 1e3}
    budget = Budget(CADENCE, fixed=(), share=BUDGET, device=torch.device("cpu"), costs=seconds)
    budget.plan(known)
    if "precision" in budget.in_turn:  # from now on one block at a time
        budget.plan(known | {"precision": seconds["precision"] / shape.n_layers})
    every = dict(budget.interval)
    every |= {
        "row": 1,
        "probe": every["attention"],
        "copy": every["attention"],
        "monitors": every["batch"],
        "sample": every["batch"],
    }
    return every, "precision" in budget.in_turn


def section(name: str, shape: Shape, costs: Mapping[str, Cost]) -> list[str]:
    """Return the lines on one shape: a table of all parts, and their sum."""
    step, (every, is_in_turn) = shape.milliseconds / 1e3, cadences(shape, costs)
    usual = dict.fromkeys(AT_EVERY_UPDATE, 1) | {part: CADENCE[of] or 1 for part, of in BY_CADENCE.items()}
    names = AT_EVERY_UPDATE | {"probe": "pass over the probe", "copy": "copy of the values of all parts"}
    lines, sums = [], [0.0, 0.0]
    for part in [*usual, *SHAPING]:
        if (cost := costs.get(part)) is None:
            continue
        cells = [
            names.get(part, part),
            f"{cost.n_launches:,}",
            f"{cost.n_bytes / 1e9:.3g}",
            str(cost.n_reads),
            f"{cost.n_sent / 1e6:.3g}",
            str(cost.n_waits),
            f"{1e3 * cost.seconds:.3g} ms",
        ]
        if part in usual:
            of_budget = cost.seconds / (shape.n_layers if part == "precision" and is_in_turn else 1)
            shares = cost.seconds / usual[part] / step, of_budget / every[part] / step
            sums = [total + share for total, share in zip(sums, shares, strict=True)]
            cells += [str(usual[part]), f"{shares[0]:.2%}", f"{every[part]:,}", f"{shares[1]:.2%}"]
        else:
            cells += ["1", f"{cost.seconds / step:.1%}", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    plain, together = costs[""], [cost for part, cost in costs.items() if part in usual]
    return [
        f"## {name}",
        "",
        *table(COLUMNS, lines),
        "",
        f"At the usual cadences all parts take {sums[0]:.1%} of a step of {shape.milliseconds:,.0f} ms, and "
        f"**{sums[1]:.1%}** at those of the budget"
        + (", where precision is measured one block at a time" if is_in_turn else "")
        + f". Copies to the host and waits of a step in which all are measured: "
        f"{sum(cost.n_reads for cost in together)} and {sum(cost.n_waits for cost in together)}. The step itself "
        f"launches {plain.n_launches:,} "
        f"operations and moves {plain.n_bytes / 1e9:.3g} GB, which would take {1e3 * plain.seconds:.3g} ms.",
        "",
    ]


def main(arguments: list[str] | None = None) -> None:
    """Count all shapes, print the tables and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=json.loads, help="list of shapes as JSON: print their counts as JSON")
    args = parser.parse_args(arguments)
    if args.count is not None:
        warnings.simplefilter("ignore")
        json.dump([counted(Shape(**each)) for each in args.count], sys.stdout)
        return
    about = (
        "What a recorder asks of a GPU in a step in which it measures every part, counted on a device whose tensors "
        "have no values, and its predicted time on an H100: of each operation the longest of a launch "
        f"({1e6 * LAUNCH:.0f} us), its memory at {BANDWIDTH / 1e12:.1f} TB/s, copies at {LINK / 1e9:.0f} GB/s, and its "
        "arithmetic. The time of Python beyond the launches is not included, nor is work on the host: eigenvalues of "
        "small matrices, alarms, the store. GB are those read and written on the device. The model returns its loss, "
        "is trained with AdamW, and passes one batch per update, with attention that is not fused; steps take the time "
        "measured in `gpu.md`, those of 32k tokens 16 times that of 2k. The last two columns are the cadences that "
        f"`wb.watch` chooses for these costs within its budget of {BUDGET:.0%}, of which it keeps a fifth for the "
        "store, and their shares. KSS is counted for an update in which it acts. Generated by `python -m "
        f"benchmarks.step_costs` with {versions()}."
    )
    lines = ["# What watching asks of a GPU", "", about, ""]
    for name, shape in SHAPES.items():
        lines += section(name, shape, *count([shape]))
        with replacing(FOLDER / "step_costs.md") as partial:
            partial.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
