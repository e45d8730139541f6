"""Count what each part of a recorder asks of a GPU, on a made-up device, and predict its time on an H100.

Call: python -m benchmarks.step_costs; writes benchmarks/step_costs.md.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import workbench as wb
from benchmarks.accelerator import random_model
from benchmarks.gpu_watching import LanguageModel
from benchmarks.host_reads import ROOT
from benchmarks.made_up_device import BANDWIDTH, COSTS, DEVICE, LAUNCH, Cost, labelled, make_up, move
from benchmarks.monitors import TIMED
from benchmarks.report import FOLDER, table
from workbench.callbacks.kss import Shaper
from workbench.callbacks.recorder.options import CADENCE
from workbench.io.atomic import replacing
from workbench.io.provenance import versions

#: Target: largest fraction of a step that all parts together take.
TARGET = 0.02
#: Rows of every update, by the name under which a part is counted.
AT_EVERY_UPDATE = {
    "batch": "contents of the batch",
    "monitors": "gradient norm",
    "sample": "size of the update, on a sample",
    "settings": "settings",
    "hooks": "the row",
}
#: Parts with a cadence; the pass over the probe serves attention and activations.
BY_CADENCE = {
    "probe": "attention",
    **{part: part for part in CADENCE if part not in ("curvature", "spectra", "router")},
}

#: Kinds of shaping, measured at every update.
SHAPING = {"KSS, recommended": wb.KSS.recommended(interval=1), "KSS, published": wb.KSS.published(interval=1)}

#: Columns of a table.
COLUMNS = (
    "part", "cadence", "launches", "GB", "copies to the host", "waits", "H100", "share of a step",
    f"cadence for {TARGET:.0%}, updates",
)  # fmt: skip
#: Largest number of launches of a part, apart from blocks and for each block, and of its waits.
LIMITS = {
    "batch": (95, 0, 0),
    "monitors": (4, 0, 0),
    "sample": (17, 1, 0),
    "hooks": (18, 0, 1),
    "probe": (15, 103, 1),
    "attention": (21, 8, 1),
    "optimizer": (61, 59, 1),
    "activations": (0, 0, 0),
    "precision": (0, 274, 1),
    "reduction": (55, 8, 1),
    "update": (62, 190, 1),
    "KSS, recommended": (20, 30, 5),
    "KSS, published": (20, 30, 5),
}
#: Largest number of waits in a step in which all parts of a recorder are measured.
MOST_WAITS = 7


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


def counted(shape: Shape) -> dict[str, dict[str, Any]]:
    """Return the cost of each part in a step in which all are measured; for a process of its own.

    The part ``""`` is the training step, and those that begin with "KSS" are of KSS.
    """
    make_up()
    config = {name: getattr(shape, name) for name in ("d_model", "n_layers", "n_heads", "vocab_size")}
    inner = random_model(config | {"max_length": shape.batch[1]}, torch.device("cpu"), getattr(torch, shape.dtype))
    model, tokens = LanguageModel(inner), torch.randint(0, shape.vocab_size, shape.batch)
    few = tokens[:2, :16]
    recorder = wb.Recorder(every=dict.fromkeys(BY_CADENCE.keys() - {"probe"}, 1))
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
            with labelled(TIMED), recorder.attach(model, optimizer):
                found = steps()
            for name, shaper in shapers.items():
                with (
                    labelled([(Shaper, "_act", name), (Shaper, "_begin_update", name)]),
                    shaper.attach(model, optimizer),
                ):
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


def section(name: str, shape: Shape, costs: Mapping[str, Cost]) -> list[str]:
    """Return the lines on one shape: a table of all parts, and their sum."""
    step = shape.milliseconds / 1e3
    rows = [(AT_EVERY_UPDATE[part], 1, costs[part]) for part in AT_EVERY_UPDATE if part in costs]
    fixed = sum(cost.seconds for _, _, cost in rows)
    parts = {part: (CADENCE[of] or 1, costs[part]) for part, of in BY_CADENCE.items() if part in costs}
    spread = sum(cost.seconds / every for every, cost in parts.values())
    left = TARGET * step - fixed
    factor = max(1.0, spread / left) if left > 0 else math.inf
    names = {"probe": "pass over the probe, for attention and activations"}
    lines = [_row(name, 1, cost, step, 1.0) for name, _, cost in rows]
    lines += [_row(names.get(part, part), every, cost, step, factor) for part, (every, cost) in parts.items()]
    lines += [_row(name, 1, costs[name], step, None) for name in SHAPING]
    plain, total = costs[""], fixed + spread
    in_budget = (
        f"With cadences that are {factor:.3g} times as long they take {TARGET:.0%}."
        if 1 < factor < math.inf
        else "They are within the budget."
        if factor == 1
        else "What is done at every update is above the budget alone."
    )
    n_waits = sum(cost.n_waits for part, cost in costs.items() if part in AT_EVERY_UPDATE or part in BY_CADENCE)
    return [
        f"## {name}",
        "",
        *table(COLUMNS, lines),
        "",
        f"At the default cadences all parts take {1e3 * total:.2g} ms of a step of {shape.milliseconds:,.0f} ms, "
        f"**{total / step:.1%}**; what is done at every update takes {fixed / step:.1%}. {in_budget} A step in which "
        f"all are measured waits {n_waits} times. The step itself launches {plain.n_launches:,} operations and moves "
        f"{plain.n_bytes / 1e9:.3g} GB, which would take {1e3 * plain.seconds:.3g} ms.",
        "",
    ]


def _row(name: str, every: int, cost: Cost, step: float, factor: float | None) -> str:
    """Return the row of a part; ``factor`` lengthens its cadence, None for one that has none."""
    cadence = "update" if every == 1 else f"{every} updates"
    longer = "" if factor is None or every == 1 or math.isinf(factor) else f"{math.ceil(every * factor - 1e-9):,}"
    cells = [
        name,
        f"every {cadence}",
        f"{cost.n_launches:,}",
        f"{cost.n_bytes / 1e9:.3g}",
        str(cost.n_reads),
        str(cost.n_waits),
        f"{1e3 * cost.seconds:.3g} ms",
        f"{cost.seconds / every / step:.2%}",
        longer,
    ]
    return "| " + " | ".join(cells) + " |"


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
        f"({1e6 * LAUNCH:.0f} us), its memory at {BANDWIDTH / 1e12:.1f} TB/s and its arithmetic. The time of Python "
        "beyond the launches is not included, nor is work on the host: eigenvalues of small matrices, alarms, the "
        "store. GB are those read and written on the device. The model returns its loss, is trained with AdamW, and "
        "passes one batch per update; steps take the time measured in `gpu.md`, those of 32k tokens 16 times that of "
        f"2k. The last column is the cadence at which all parts together take {TARGET:.0%} of a step, all lengthened "
        "by one factor. KSS is counted for an update in which it acts. Generated by `python -m benchmarks.step_costs` "
        f"with {versions()}."
    )
    lines = ["# What watching asks of a GPU", "", about, ""]
    for name, shape in SHAPES.items():
        lines += section(name, shape, *count([shape]))
        with replacing(FOLDER / "step_costs.md") as partial:
            partial.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
