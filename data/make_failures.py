"""Record the study behind the diagnosis: failed runs with a planted cause, each beside a healthy control without it.

    python data/make_failures.py --only dev            # runs that the rules are made from; resumable
    python data/make_failures.py --only fit            # the rules: workbench/diagnosis/shipped/
    python data/make_failures.py --only held_out       # other seeds, sizes, strengths and architectures
    python data/make_failures.py --only hard           # more of them, milder
    python data/make_failures.py --only collect        # data/failures.nc: the symptoms of every run, and the answers
    python data/make_failures.py --only examples       # data/failures/: three whole runs for the notebook

A planted run and its control differ in the plant alone: same seed, batches and every other setting. It counts as
failed if it diverges by the label of `workbench.train`; if it lacks, at the end and on held-out batches, 15 % of what
its control learned; if its loss rises in between by 40 % of that (not where batches have few rows, which scatter);
or if at least half of the experts of a block get no tokens while its control's do. A control is healthy if it learns at
least a fifth of its first loss and does none of it; beside one that is not, no run is used.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import workbench as wb
from workbench import diagnosis
from workbench.diagnosis import CAUSES, Rules, Symptom, find_failure, read_record, read_symptoms
from workbench.io.atomic import replacing
from workbench.io.provenance import versions
from workbench.models.losses import token_loss

N_STEPS = 200
#: Share of what the control learns that a failed run lacks at the end, and that a spike undoes.
LOST, SPIKE = 0.15, 0.4
#: Share of the experts of one block that no token goes to, in a run that failed by its routing.
DEAD = 0.5
OUT = Path(__file__).parent
SHIPPED = Path(diagnosis.__file__).parent / "shipped"
LOOKS = {"attention": 20, "router": 10, "optimizer": 5, "activations": 5}


@dataclass(frozen=True)
class Setup:
    """An architecture, a task, and a plan under which it is healthy."""

    make: str
    model: dict[str, Any]
    task: str
    task_options: dict[str, Any]
    plan: dict[str, Any]


def _lm(vocab_size: int, length: int, batch_size: int) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "length": length, "batch_size": batch_size, "n_sequences": 2000}


def _recall(vocab_size: int, length: int, batch_size: int) -> dict[str, Any]:
    return {"vocab_size": vocab_size, "length": length, "n_pairs": 2, "batch_size": batch_size}


def _plan(rate: float, warmup: int, **others: Any) -> dict[str, Any]:
    return {
        "learning_rate": rate,
        "warmup": warmup,
        "clip_norm": 1.0,
        "optimizer_options": {"betas": (0.9, 0.95)},
    } | others


def _of(width: int, depth: int, norm: str | None = None, **others: Any) -> dict[str, Any]:
    return {"d_model": width, "n_layers": depth} | ({"norm": norm} if norm else {}) | others


_IMAGES = {"image_size": 8, "patch_size": 4, "n_channels": 1, "n_classes": 10}
_XAVIER = {"initialization": "xavier"}
SLOW_ADAM = {"optimizer_options": {"betas": (0.9, 0.999)}}

SETUPS: dict[str, Setup] = {
    # dev
    "pre_ln lm": Setup("transformer", _of(32, 3, "pre_ln"), "synthetic_lm", _lm(32, 16, 16), _plan(0.01, 30)),
    "pre_ln recall": Setup(
        "transformer", _of(32, 4, "pre_ln"), "associative_recall", _recall(10, 5, 32), _plan(0.006, 0, clip_norm=None),
    ),
    "llama lm": Setup(
        "llama_style", _of(32, 3), "synthetic_lm", _lm(40, 12, 16), _plan(0.006, 0, schedule="cosine", clip_norm=None),
    ),
    "post_ln lm": Setup(
        "transformer", _of(32, 4, "post_ln"), "synthetic_lm", _lm(32, 12, 24), _plan(0.008, 60, **SLOW_ADAM),
    ),
    "no_norm lm": Setup("transformer", _of(32, 3, "none"), "synthetic_lm", _lm(32, 16, 8), _plan(0.002, 20)),
    "moe lm": Setup("moe", _of(32, 2, n_experts=4, top_k=1), "synthetic_lm", _lm(32, 16, 16), _plan(0.008, 20)),
    "moe recall": Setup(
        "moe", _of(32, 2, n_experts=4, top_k=2), "associative_recall", _recall(10, 5, 32),
        _plan(0.01, 30, clip_norm=None),
    ),
    "vit": Setup("vit", _of(32, 3, "pre_ln", **_IMAGES), "digits", {"batch_size": 32}, _plan(0.005, 20)),
    "vit none": Setup("vit", _of(32, 3, "none", **_IMAGES), "digits", {"batch_size": 32}, _plan(0.008, 20)),
    "none recall": Setup(
        "transformer", _of(32, 4, "none"), "associative_recall", _recall(10, 5, 32), _plan(0.0015, 20),
    ),
    "x none recall": Setup(
        "transformer", _of(32, 4, "none", **_XAVIER), "associative_recall", _recall(10, 5, 32), _plan(0.003, 20),
    ),
    "x pre recall": Setup(
        "transformer", _of(32, 4, "pre_ln", **_XAVIER), "associative_recall", _recall(10, 5, 32),
        _plan(0.008, 20, clip_norm=None),
    ),
    "x none vit": Setup(
        "vit", _of(32, 3, "none", **_IMAGES, **_XAVIER), "digits", {"batch_size": 32}, _plan(0.003, 20),
    ),
    # held out
    "wide recall": Setup(
        "transformer", _of(48, 3, "pre_ln"), "associative_recall", _recall(12, 6, 48), _plan(0.005, 10),
    ),
    "gpt2 bytes": Setup(
        "gpt2_style", _of(40, 3), "text_bytes", {"length": 16, "batch_size": 16},
        _plan(0.004, 20, schedule="linear", **SLOW_ADAM),
    ),
    "rms recall": Setup(
        "transformer", _of(40, 4, "rms_norm"), "associative_recall", _recall(14, 7, 24),
        _plan(0.008, 40, clip_norm=None),
    ),
    "post_ln recall": Setup(
        "transformer", _of(40, 3, "post_ln"), "associative_recall", _recall(10, 5, 32), _plan(0.004, 50),
    ),
    "rms vit": Setup("vit", _of(40, 3, "rms_norm", **_IMAGES), "digits", {"batch_size": 24}, _plan(0.004, 0)),
    "x sub_ln vit": Setup(
        "vit", _of(32, 4, "sub_ln", **_IMAGES, **_XAVIER), "digits", {"batch_size": 32}, _plan(0.006, 30, **SLOW_ADAM),
    ),
    "x none deep": Setup(
        "transformer", _of(40, 5, "none", **_XAVIER), "associative_recall", _recall(10, 5, 32), _plan(0.002, 20),
    ),
    "none bytes": Setup(
        "transformer", _of(32, 4, "none"), "text_bytes", {"length": 12, "batch_size": 16}, _plan(0.002, 20),
    ),
    "mixtral lm": Setup(
        "mixtral_style", _of(32, 3, n_experts=6, top_k=2), "synthetic_lm", _lm(40, 12, 16),
        _plan(0.006, 10, schedule="cosine"),
    ),
    "moe wide recall": Setup(
        "moe", _of(40, 2, n_experts=8, top_k=1), "associative_recall", _recall(12, 5, 32), _plan(0.008, 40),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run: a setup, a seed, changes to both plan and model that its control shares, and what is planted."""

    setup: str
    seed: int
    cause: str = ""  # empty: a control
    plant: str = ""  # kind of plant, see PLANTS
    strength: float = math.nan
    start: int = 0
    block: int = -1
    base: tuple[tuple[str, Any], ...] = field(
        default=()
    )  # fields of the plan that differ from the setup's, control included

    @property
    def name(self) -> str:
        """For a file."""
        plant = f"{self.cause} {self.plant} {self.strength:g} {self.start} {self.block}"
        text = f"{self.setup} {self.seed} {plant} {dict(self.base)}"
        return "_".join("".join(c if c.isalnum() or c == "." else " " for c in text).split())

    def control(self) -> Case:
        """The same run without its plant."""
        return Case(self.setup, self.seed, base=self.base)


# What is planted


def jumped(step: int, *, at: int, factor: float) -> float:
    """A schedule that raises the rate at a step and keeps it there."""
    return factor if step >= at else 1.0


def restarted(step: int, *, every: int, factor: float) -> float:
    """A schedule of cosine waves, each higher than the one before."""
    wave = 0.5 * (1 + math.cos(math.pi * (step % every) / every))
    return wave * (1 + (factor - 1) * (step // every))


def ended(step: int, *, at: int, factor: float) -> float:
    """A schedule that has come down to almost nothing far too early."""
    return max(1 - step / at, factor)


SCHEDULES = {"jump": jumped, "restarts": restarted, "ends early": ended}


class Branchless(nn.Module):
    """A block without its residual connection: what it adds is all that leaves it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    @property
    def mlp(self) -> nn.Module:
        """The block's own, which a mixture's auxiliary loss asks for."""
        return self.block.mlp

    def forward(self, x: Tensor) -> Tensor:
        """The branch alone."""
        return self.block(x) - x


class Scaled(nn.Module):
    """A branch whose output is multiplied."""

    def __init__(self, branch: nn.Module, factor: float) -> None:
        super().__init__()
        self.branch, self.factor = branch, factor

    def forward(self, x: Tensor) -> Tensor:
        """Its output, larger."""
        return self.branch(x) * self.factor


@torch.no_grad()
def plant_in_model(model: nn.Module, case: Case) -> nn.Module:
    """What is wrong with the model itself, in place."""
    if case.plant in ("large init", "large output init", "no norm here", "no skip", "large branch"):
        block = model.blocks[case.block]
        if case.plant == "large init":
            for weight in block.parameters():
                if weight.ndim > 1:
                    weight.mul_(case.strength)
        elif case.plant == "large output init":
            for branch in block.branches():
                for weight in branch.path()[-1]:
                    weight.mul_(case.strength)
        elif case.plant == "no norm here":
            block.attention_norm = block.mlp_norm = nn.Identity()
            for weight in block.parameters():
                if weight.ndim > 1:
                    weight.mul_(case.strength)
        elif case.plant == "no skip":
            for place in range(len(model.blocks)) if case.block < 0 else [case.block]:
                model.blocks[place] = Branchless(model.blocks[place])
        else:
            block.attention_scale = Scaled(block.attention_scale, case.strength)
            block.mlp_scale = Scaled(block.mlp_scale, case.strength)
    elif case.plant == "router init":
        for block in model.blocks:
            block.mlp.router.weight.mul_(case.strength)
    elif case.plant == "wrong sign":
        object.__setattr__(model.config, "balance_coefficient", -case.strength)
    return model


def faults_of(case: Case) -> list[Any]:
    """Faults of `workbench.faults` among the plants."""
    start, strength = case.start, int(case.strength) if math.isfinite(case.strength) else 0
    if case.plant == "few rows":
        return [wb.faults.small_batch(n_rows=strength, start=start)]
    if case.plant == "attention bits":
        return [wb.faults.low_precision_attention(n_bits=strength, start=start)]
    if case.plant == "attention output bits":
        return [wb.faults.low_precision_attention(n_bits=strength, start=start, targets="output")]
    if case.plant == "reduction":
        return [wb.faults.low_precision_reduction(n_bits=8, n_ranks=strength, start=start)]
    if case.plant in ("no auxiliary loss", "router rate"):
        return [wb.faults.no_auxiliary_loss(start=start)]
    if case.plant in ("labels", "tokens"):
        return [wb.faults.corrupted_data(what=case.plant, start=start, stop=start + strength)]
    if case.plant == "half of the labels":
        return [wb.faults.corrupted_data(what="labels", share=0.5, start=start, stop=start + strength)]
    return []


def router_rate(weights: list[nn.Parameter], *, routers: list[int], rate: float, factor: float, **options: Any) -> Any:
    """AdamW with another rate for the routers, told by their place among the weights."""
    own = [weight for i, weight in enumerate(weights) if i in routers]
    others = [weight for i, weight in enumerate(weights) if i not in routers]
    return torch.optim.AdamW([{"params": others}, {"params": own, "lr": rate * factor}], lr=rate, **options)


def build(case: Case) -> tuple[nn.Module, Any, dict[str, Any], list[Any]]:
    """Model, task, settings of `workbench.train` and faults of a case, all fresh."""
    setup = SETUPS[case.setup]
    plan = setup.plan | dict(case.base) | {"n_steps": N_STEPS, "seed": case.seed}
    plan["optimizer_options"] = {**plan["optimizer_options"], "fused": True}
    options, task_options = dict(setup.model), dict(setup.task_options)
    if case.plant == "balance":
        options["balance_coefficient"] = case.strength
    if case.plant == "no balance":
        options |= {"balance_coefficient": 0.0, "z_coefficient": 0.0}
    if case.plant == "no norm":
        options["norm"] = "none"
    if case.plant == "batch size":
        task_options["batch_size"] = int(case.strength)
    sizes = {}
    if "length" in task_options:
        sizes = {"vocab_size": task_options.get("vocab_size", 256), "max_length": task_options["length"]}
    model = getattr(wb.zoo, setup.make)(n_heads=4, **options, **sizes, seed=case.seed)
    task = getattr(wb.tasks, setup.task)(**task_options, seed=case.seed)
    if case.plant == "rate":
        plan["learning_rate"] *= case.strength
    elif case.plant == "no warm-up":
        plan["warmup"] = int(case.strength)
    elif case.plant in SCHEDULES:
        name = "every" if case.plant == "restarts" else "at"
        plan["schedule"] = partial(SCHEDULES[case.plant], factor=case.strength, **{name: case.start})
    elif case.plant == "eps":
        plan["optimizer_options"]["eps"] = case.strength
    elif case.plant == "router rate":
        routers = [i for i, (name, _) in enumerate(model.named_parameters()) if "router" in name]
        given = plan.pop("optimizer_options")
        del given["fused"]
        plan["optimizer"] = partial(
            router_rate, routers=routers, rate=plan["learning_rate"], factor=case.strength, **given
        )
        plan.pop("learning_rate")
    elif case.plant == "coarse weights":
        given = plan.pop("optimizer_options")
        plan["optimizer"] = partial(
            coarse_weights, n_bits=int(case.strength), start=case.start, lr=plan.pop("learning_rate"), **given
        )
    return plant_in_model(model, case), task, plan, faults_of(case)


def coarse_weights(weights: list[nn.Parameter], *, n_bits: int, start: int, **options: Any) -> Any:
    """AdamW whose weights are kept, from a step on, with so few bits of mantissa, as float8 without a master."""
    optimizer = torch.optim.AdamW(weights, **options)
    n_done = 0

    def round_off(*_: Any) -> None:
        nonlocal n_done
        n_done += 1
        if n_done > start:
            for weight in weights:
                mantissa, exponent = torch.frexp(weight.data)
                weight.data.copy_(torch.ldexp((mantissa * 2 ** (n_bits + 1)).round(), exponent - n_bits - 1))

    optimizer.register_step_post_hook(round_off)
    return optimizer


# One run


def held_out_loss(model: nn.Module, task: Any) -> float:
    """Mean over 512 rows that nothing was trained on."""
    split = {"split": "validation"} if hasattr(task, "split") else {}
    n_rows = min(512, task.n_held_out or 512)
    inputs, targets = replace(task, batch_size=n_rows, **split).batch(-1 if not split else 0)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = float(token_loss(model(inputs), targets))
    model.train(was_training)
    return found


def record(case: Case, work: Path) -> str:
    """Train one case into a netCDF file and a JSON beside it; nothing if it is there."""
    place = work / case.name
    if place.with_name(place.name + ".json").exists():
        return f"{case.name}: there already"
    begun = time.monotonic()
    model, task, plan, faults = build(case)
    start_loss = held_out_loss(model, task)
    folder = tempfile.TemporaryDirectory()
    store = Path(folder.name) / "run.zarr"
    recorder = wb.Recorder(every=LOOKS, n_probe_tokens=64)
    looks = {"spectra_every": 100, "profile_options": {"n_snapshots": 256, "n_workers": 1}}
    *_, last = wb.train(model, task, store=store, recorder=recorder, faults=faults, **looks, **plan)
    run = wb.open_run(store).load()
    wb.export_netcdf(run, place.with_name(place.name + ".nc"), overwrite=True)
    folder.cleanup()
    loss = run["monitors"]["loss"].values
    router = run["router"]["dead_experts"].values if "router" in run.children else np.zeros((1, 1))
    n_experts = run["router"].sizes["expert"] if "router" in run.children else 1
    result = asdict(case) | {
        "diverged": last.cause if last.diverged else "",
        "step": last.step,
        "start_loss": start_loss,
        "final_loss": math.nan if last.diverged else held_out_loss(model, task),
        "rise": largest_rise(loss),
        "dead_share": float(np.nanmax(router[-1]) / n_experts),
        "seconds": time.monotonic() - begun,
    }
    with replacing(place.with_name(place.name + ".json")) as partial_file:
        partial_file.write_text(json.dumps(result))
    how = (
        f"{last.cause} at {last.step}"
        if last.diverged
        else f"loss {result['final_loss']:.2f}, rise {result['rise']:.2f}, dead {result['dead_share']:.2f}"
    )
    return f"{case.name}: {how} ({result['seconds']:.0f} s)"


def largest_rise(loss: np.ndarray, window: int = 15) -> float:
    """By how much the loss, a running median of it, rises above where it had come down to; in nats."""
    loss = loss[np.isfinite(loss)]
    if len(loss) < 2 * window:
        return 0.0
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(loss, window), axis=1)
    return float(np.max(smooth - np.minimum.accumulate(smooth)))


def verdict(result: dict[str, Any], control: dict[str, Any]) -> str:
    """How a run failed beside its control; empty if it did not."""
    learned = control["start_loss"] - control["final_loss"]
    if result["diverged"]:
        return "diverged"
    # The loss of a batch of a few rows scatters by itself, so there only what was learned counts.
    if result["cause"] != "batch" and result["rise"] > SPIKE * learned + control["rise"]:
        return "spike"
    if not result["final_loss"] <= control["final_loss"] + LOST * learned:
        return "learned less"
    return "experts died" if result["dead_share"] >= DEAD > control["dead_share"] else ""


def is_healthy(control: dict[str, Any]) -> bool:
    """Whether a control went well: it learned at least a fifth of its first loss, without a spike."""
    learned = control["start_loss"] - control["final_loss"]
    return (
        not control["diverged"]
        and learned > 0.2 * control["start_loss"]
        and control["rise"] < SPIKE * learned
        and control["dead_share"] < DEAD
    )


# The sets


def _base(**plan: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(plan.items()))


def dev_cases() -> list[Case]:
    """Runs that the rules are made from."""
    rows = [
        ("learning_rate", "rate", [
            ("pre_ln lm", 1, 12), ("pre_ln lm", 2, 25), ("pre_ln recall", 1, 8), ("pre_ln recall", 2, 20),
            ("llama lm", 1, 12),
            ("post_ln lm", 1, 5), ("vit", 1, 15), ("vit none", 2, 8), ("x none recall", 1, 8), ("x none recall", 2, 15),
            ("x pre recall", 1, 15), ("moe recall", 1, 20),
        ]),
        ("schedule", "jump", [
            ("none recall", 1, 8, 100), ("vit", 1, 15, 100), ("x none recall", 1, 8, 80), ("post_ln lm", 1, 8, 110),
            ("moe recall", 2, 20, 90),
        ]),
        ("schedule", "restarts", [("pre_ln recall", 1, 8, 50), ("x pre recall", 2, 10, 66)]),
        ("schedule", "ends early", [("pre_ln recall", 2, 0.001, 20), ("llama lm", 1, 0.002, 15),
            ("vit", 2, 0.001, 40)]),
        ("schedule", "no warm-up", [
            ("post_ln lm", 2, 0, 0, -1, _base(learning_rate=0.016)),
            ("x none recall", 1, 0, 0, -1, _base(learning_rate=0.006, warmup=60)),
            ("vit none", 1, 0, 0, -1, _base(learning_rate=0.016, warmup=50)),
        ]),
        ("batch", "few rows", [
            ("pre_ln recall", 1, 1), ("pre_ln recall", 2, 2), ("vit", 1, 1), ("vit", 2, 2, 60), ("vit none", 1, 2),
            ("x none recall", 1, 1, 50), ("post_ln lm", 1, 1), ("moe recall", 1, 2), ("none recall", 1, 1, 50),
        ]),
        ("batch", "batch size", [("pre_ln lm", 1, 1), ("x pre recall", 1, 2), ("llama lm", 1, 1)]),
        ("optimizer_eps", "eps", [
            ("pre_ln lm", 1, 0.3), ("pre_ln recall", 1, 0.1), ("pre_ln recall", 2, 0.5), ("vit", 1, 0.03),
            ("vit", 2, 0.3),
            ("none recall", 1, 0.01), ("x none recall", 2, 0.1), ("post_ln lm", 1, 0.1), ("llama lm", 1, 0.3),
            ("moe lm", 1, 0.3),
            ("x pre recall", 1, 1.0), ("vit none", 1, 0.01),
        ]),
        ("architecture", "large branch", [
            ("pre_ln recall", 1, 100, 0, 2), ("x none recall", 1, 4, 0, 2), ("x none recall", 2, 6, 0, 0),
            ("x none vit", 1, 8, 0, 2),
            ("vit", 1, 100, 0, 1), ("x pre recall", 2, 200, 0, 1), ("pre_ln lm", 1, 200, 0, 0),
            ("vit none", 1, 30, 0, 1),
            ("x none recall", 1, 12, 0, 2), ("x none recall", 2, 20, 0, 0), ("x none vit", 1, 20, 0, 1),
            ("pre_ln recall", 2, 150, 0, 3),
            ("vit", 1, 1000, 0, 2), ("x pre recall", 1, 1000, 0, 3),
        ]),
        ("architecture", "large init", [
            ("x none recall", 2, 2.5, 0, 1), ("x none vit", 1, 3, 0, 1), ("post_ln lm", 1, 100, 0, 1),
            ("x pre recall", 1, 60, 0, 2),
            ("x none recall", 1, 3, 0, 3), ("x none recall", 1, 4, 0, 1), ("x none vit", 1, 6, 0, 2),
        ]),
        ("architecture", "no norm here", [("pre_ln recall", 2, 30, 0, 1), ("x pre recall", 1, 15, 0, 1)]),
        ("architecture", "no skip", [
            ("pre_ln recall", 1, 1, 0, 0), ("vit", 2, 1, 0, 1), ("pre_ln recall", 1, 1, 0, -1), ("vit", 1, 1, 0, -1),
            ("llama lm", 1, 1, 0, -1), ("post_ln lm", 1, 1, 0, -1), ("none recall", 1, 1, 0, -1),
        ]),
        ("architecture", "no norm", [("x pre recall", 1), ("pre_ln recall", 1), ("moe recall", 1)]),
        ("precision", "attention bits", [
            ("post_ln lm", 1, 8, 10), ("none recall", 1, 8, 10), ("none recall", 2, 8, 40), ("vit", 1, 8, 0),
            ("vit", 2, 8, 40),
            ("pre_ln recall", 1, 8, 10, -1, _base(learning_rate=0.012)), ("pre_ln lm", 2, 8, 20),
            ("x none recall", 1, 8, 20),
        ]),
        ("precision", "coarse weights", [
            ("pre_ln recall", 1, 2, 20), ("none recall", 1, 3, 50), ("vit", 1, 2, 50), ("x pre recall", 1, 2, 40),
        ]),
        ("precision", "reduction", [("pre_ln recall", 2, 8, 10)]),
        ("routing", "wrong sign", [("moe lm", 1, 0.3), ("moe recall", 1, 0.3), ("moe recall", 2, 0.1),
            ("moe lm", 2, 0.05)]),
        ("routing", "balance", [("moe lm", 1, 100), ("moe recall", 2, 300), ("moe recall", 1, 100)]),
        ("routing", "router rate", [("moe lm", 2, 200), ("moe recall", 1, 300)]),
        ("routing", "router init", [("moe lm", 1, 200), ("moe recall", 2, 300)]),
        ("data", "labels", [
            ("pre_ln recall", 1, 30, 120), ("pre_ln lm", 1, 30, 100), ("vit", 1, 40, 110), ("post_ln lm", 1, 25, 130),
        ]),
        ("data", "half of the labels", [("pre_ln recall", 2, 40, 100), ("vit none", 1, 50, 100),
            ("moe recall", 1, 40, 120)]),
        ("data", "tokens", [("pre_ln lm", 2, 20, 120), ("x none recall", 1, 40, 100), ("llama lm", 1, 30, 110),
            ("x pre recall", 1, 50, 90)]),
    ]  # fmt: skip
    return _cases(rows)


def held_out_cases() -> list[Case]:
    """Runs that the rules have not seen: other architectures, sizes, tasks, seeds and strengths."""
    rows = [
        ("learning_rate", "rate", [
            ("wide recall", 11, 16), ("gpt2 bytes", 11, 20), ("rms recall", 12, 10), ("post_ln recall", 11, 10),
            ("rms vit", 11, 18),
            ("x none deep", 11, 10), ("none bytes", 12, 14), ("mixtral lm", 11, 14),
        ]),
        ("schedule", "jump", [
            ("wide recall", 11, 18, 90), ("x none deep", 11, 12, 110), ("rms vit", 11, 22, 120),
            ("none bytes", 12, 12, 80),
        ]),
        ("schedule", "restarts", [("rms recall", 12, 7, 60)]),
        ("schedule", "ends early", [("gpt2 bytes", 11, 0.002, 18), ("x sub_ln vit", 12, 0.001, 12),
            ("post_ln recall", 11, 0.001, 25)]),
        ("batch", "few rows", [
            ("wide recall", 11, 2), ("rms recall", 12, 1, 40), ("rms vit", 11, 1), ("x none deep", 11, 1, 70),
            ("post_ln recall", 11, 1),
            ("x sub_ln vit", 12, 2, 30),
        ]),
        ("batch", "batch size", [("none bytes", 12, 1), ("mixtral lm", 11, 1)]),
        ("optimizer_eps", "eps", [
            ("wide recall", 11, 0.2), ("gpt2 bytes", 11, 0.5), ("rms recall", 12, 0.6),
            ("post_ln recall", 11, 0.15), ("rms vit", 11, 0.05),
            ("x none deep", 11, 0.3), ("none bytes", 12, 0.03),
        ]),
        ("architecture", "large branch", [
            ("x none deep", 11, 12, 0, 3), ("x none deep", 11, 18, 0, 1), ("wide recall", 11, 400, 0, 2),
            ("rms recall", 12, 600, 0, 3),
        ]),
        ("architecture", "large init", [("x none deep", 11, 5, 0, 0), ("post_ln recall", 11, 120, 0, 1),
            ("x sub_ln vit", 12, 80, 0, 1)]),
        ("architecture", "no norm here", [("wide recall", 11, 40, 0, 1)]),
        ("architecture", "no skip", [("wide recall", 11, 1, 0, -1), ("rms vit", 11, 1, 0, -1),
            ("mixtral lm", 11, 1, 0, -1)]),
        ("precision", "attention bits", [
            ("post_ln recall", 11, 8, 20), ("none bytes", 12, 8, 15), ("rms vit", 11, 8, 5), ("wide recall", 11, 8, 10),
            ("rms recall", 12, 8, 20),
        ]),
        ("precision", "coarse weights", [("wide recall", 11, 2, 30), ("none bytes", 12, 3, 30),
            ("rms vit", 11, 2, 30), ("x none deep", 11, 2, 60)]),
        ("routing", "wrong sign", [("mixtral lm", 11, 0.4), ("moe wide recall", 12, 0.2)]),
        ("routing", "balance", [("mixtral lm", 11, 150), ("moe wide recall", 12, 200)]),
        ("routing", "router rate", [("moe wide recall", 12, 250), ("mixtral lm", 11, 150)]),
        ("routing", "router init", [("mixtral lm", 11, 250), ("moe wide recall", 12, 400)]),
        ("data", "labels", [("wide recall", 11, 35, 110), ("rms vit", 11, 30, 130), ("none bytes", 12, 25, 120)]),
        ("data", "half of the labels", [("rms recall", 12, 45, 125), ("x sub_ln vit", 12, 40, 90),
            ("moe wide recall", 12, 50, 110)]),
        ("data", "tokens", [("x none deep", 11, 35, 90), ("gpt2 bytes", 11, 30, 110), ("mixtral lm", 11, 25, 130)]),
    ]  # fmt: skip
    return _cases(rows)


def hard_cases() -> list[Case]:
    """More held-out runs, milder, their settings like those of other causes; chosen after the rules were fixed."""
    gentle, steep = _base(learning_rate=0.01), _base(learning_rate=0.006, warmup=60)
    rows = [
        ("learning_rate", "rate", [
            ("post_ln recall", 11, 5), ("x none deep", 11, 5), ("wide recall", 11, 6), ("rms vit", 11, 8),
            ("none bytes", 12, 6),
        ]),
        ("schedule", "no warm-up", [
            ("post_ln recall", 11, 0, 0, -1, _base(learning_rate=0.016, warmup=60)),
            ("x sub_ln vit", 12, 0, 0, -1, _base(learning_rate=0.02, warmup=60)),
            ("none bytes", 12, 0, 0, -1, steep), ("x none deep", 11, 0, 0, -1, steep),
        ]),
        ("schedule", "jump", [("post_ln recall", 11, 5, 100), ("wide recall", 11, 6, 120)]),
        ("batch", "few rows", [
            ("wide recall", 11, 4, 0, -1, gentle), ("rms vit", 11, 4, 40, -1, gentle), ("x none deep", 11, 4, 60),
            ("mixtral lm", 11, 2, 30),
        ]),
        ("optimizer_eps", "eps", [("wide recall", 11, 0.03), ("rms vit", 11, 0.01), ("gpt2 bytes", 11, 0.05),
            ("x none deep", 11, 0.03)]),
        ("architecture", "large init", [("x none deep", 11, 2.2, 0, 3), ("x none deep", 11, 2.5, 0, 2)]),
        ("architecture", "no norm", [("wide recall", 11), ("rms vit", 11), ("moe wide recall", 12)]),
        ("architecture", "no skip", [("rms recall", 12, 1, 0, -1), ("gpt2 bytes", 11, 1, 0, -1)]),
        ("precision", "attention bits", [
            ("post_ln recall", 11, 8, 20, -1, gentle), ("none bytes", 12, 8, 15, -1, _base(learning_rate=0.004)),
            ("wide recall", 11, 8, 10, -1, gentle), ("rms vit", 11, 8, 0, -1, gentle),
            ("gpt2 bytes", 11, 8, 10, -1, gentle),
            ("x sub_ln vit", 12, 8, 10, -1, gentle), ("rms recall", 12, 8, 5, -1, _base(learning_rate=0.016)),
        ]),
        ("precision", "coarse weights", [("rms vit", 11, 1, 30), ("rms recall", 12, 1, 20),
            ("gpt2 bytes", 11, 1, 20), ("wide recall", 11, 1, 60)]),
        ("routing", "wrong sign", [("mixtral lm", 11, 0.03), ("moe wide recall", 12, 0.03)]),
        ("routing", "balance", [("mixtral lm", 11, 40), ("moe wide recall", 12, 40)]),
        ("data", "labels", [("wide recall", 11, 14, 110), ("none bytes", 12, 12, 120), ("rms vit", 11, 12, 140)]),
        ("data", "half of the labels", [("post_ln recall", 11, 30, 110)]),
    ]  # fmt: skip
    return _cases(rows)


def _cases(rows: list[tuple[str, str, list[tuple]]]) -> list[Case]:
    names = ("strength", "start", "block", "base")
    return [
        Case(
            setup,
            seed,
            cause,
            plant,
            **dict(zip(names, (float(v) if i == 0 else v for i, v in enumerate(rest)), strict=False)),
        )
        for cause, plant, places in rows
        for setup, seed, *rest in places
    ]


SETS = {"dev": dev_cases, "held_out": held_out_cases, "hard": hard_cases}


def record_all(cases: list[Case], work: Path, processes: int) -> None:
    """Every planted run and its control, in processes of one thread each."""
    work.mkdir(parents=True, exist_ok=True)
    todo = list(dict.fromkeys([*(case.control() for case in cases), *cases]))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for done in as_completed([pool.submit(record, case, work) for case in todo]):
            print(done.result(), flush=True)


# What is made of them

#: What may be read -> how it is called in the results.
VIEWS = {
    "everything": ("mechanism", "log", "configuration"),
    "without configuration": ("mechanism", "log"),
    "mechanism": ("mechanism",),
}
#: What a thin log holds.
THIN = ["loss", "grad_norm", "learning_rate"]


def failed(cases: list[Case], work: Path) -> list[tuple[Case, dict[str, Any], str]]:
    """The planted runs that failed beside a healthy control, how they ended, and how they failed."""
    found = []
    for case in cases:
        result, control = (json.loads((work / f"{one.name}.json").read_text()) for one in (case, case.control()))
        if is_healthy(control) and (how := verdict(result, control)):
            found.append((case, result, how))
    return found


def views(place: Path) -> dict[str, dict[str, Symptom]]:
    """The symptoms of a run, by what may be read; ``thin`` is loss, gradient norm and rate alone."""
    run = wb.open_run(place)
    record, thin = read_record(run), read_record(run["monitors"].to_dataset()[THIN])
    found = {name: read_symptoms(record, find_failure(record), kinds=kinds) for name, kinds in VIEWS.items()}
    return found | {"thin": read_symptoms(thin, find_failure(thin))}


def fit(work: Path) -> None:
    """The rules, from the dev runs alone; each is shown as a whole and with less of it, as thin records are."""
    runs = failed(dev_cases(), work / "dev")
    examples, groups = [], []
    for case, _, _ in runs:
        for symptoms in views(work / "dev" / f"{case.name}.nc").values():
            examples.append(({name: symptom.strength for name, symptom in symptoms.items()}, case.cause))
            groups.append(case.setup)
    by_penalty = {penalty: _across_setups(examples, groups, penalty) for penalty in PENALTIES}
    penalty = min(by_penalty, key=lambda one: by_penalty[one][1])
    for one, (right, cross_entropy) in by_penalty.items():
        print(f"penalty {one:g}: right {right:.3f}, cross entropy {cross_entropy:.3f} on setups left out", flush=True)
    about = f"{len(runs)} failed runs of {len(set(groups))} small models, data/make_failures.py"
    rules = Rules.fit(examples, penalty=penalty, about=about)
    SHIPPED.mkdir(exist_ok=True)
    rules.save(SHIPPED / "rules.json", overwrite=True)
    print(
        f"penalty {penalty:g}; fitted to {about}, {len(dev_cases()) - len(runs)} planted runs did not fail", flush=True
    )


PENALTIES = (1.0, 2.0, 4.0)


def _across_setups(
    examples: list[tuple[dict[str, float], str]], groups: list[str], penalty: float
) -> tuple[float, float]:
    """Share of causes ranked first and mean cross entropy, each setup judged by the others."""
    right, cross_entropy = [], []
    for group in sorted(set(groups)):
        rules = Rules.fit([one for one, of in zip(examples, groups, strict=True) if of != group], penalty=penalty)
        for (strengths, cause), of in zip(examples, groups, strict=True):
            if of == group:
                probability = rules.probabilities(strengths)
                right.append(next(iter(probability)) == cause)
                cross_entropy.append(-math.log(max(probability.get(cause, 0.0), 1e-9)))
    return float(np.mean(right)), float(np.mean(cross_entropy))


def collect(work: Path) -> None:
    """Symptoms, thin records and what the rules say of every failed run, dev and held out, in one file."""
    rules = Rules.shipped()
    rows, planned, seconds = [], {}, {}
    for study, cases in SETS.items():
        folder = work / study
        runs = failed(cases(), folder)
        controls = {case.control() for case in cases()}
        results = [json.loads((folder / f"{case.name}.json").read_text()) for case in (*controls, *cases())]
        seconds |= {case.name: result["seconds"] for case, result in zip((*controls, *cases()), results, strict=True)}
        planned[study] = {
            "planned": len(cases()),
            "failed": len(runs),
            "twins": len(controls),
            "healthy_twins": sum(is_healthy(result) for result in results[: len(controls)]),
        }
        for case, result, how in runs:
            rows.append((study, case, result, how, views(folder / f"{case.name}.nc"), thin_record(folder, case)))
    names = sorted({name for *_, seen, _ in rows for symptoms in seen.values() for name in symptoms})
    causes = list(rules.causes)
    shape = (len(rows), len(VIEWS) + 1, len(causes))
    probability, strength = np.zeros(shape), np.full((len(rows), len(names)), np.nan)
    for i, (*_, seen, _) in enumerate(rows):
        for j, symptoms in enumerate(seen.values()):
            found = rules.probabilities({name: symptom.strength for name, symptom in symptoms.items()})
            probability[i, j] = [found[cause] for cause in causes]
        for name, symptom in seen["everything"].items():
            strength[i, names.index(name)] = symptom.strength
    table = xr.Dataset(
        {
            "strength": (("run", "sign"), strength.astype(np.float32)),
            "probability": (("run", "view", "ranked_cause"), probability.astype(np.float32)),
            "layer": ("run", [diagnosis.block_at_fault(seen["everything"]) for *_, seen, _ in rows]),
            "how": ("run", [how for _, _, _, how, _, _ in rows]),
            **{
                name: (("run", "step"), np.stack([thin[name] for *_, thin in rows]).astype(np.float32)) for name in THIN
            },
        },
        coords={
            "sign": names,
            "view": [*VIEWS, "thin"],
            "ranked_cause": causes,
            "study": ("run", [study for study, *_ in rows]),
            **{
                name: ("run", [getattr(case, name) for _, case, *_ in rows])
                for name in ("cause", "setup", "seed", "plant", "start", "block")
            },
            "dose": ("run", [case.strength for _, case, *_ in rows]),
        },
    )
    table.attrs = {
        "call": "python data/make_failures.py",
        "n_steps": N_STEPS,
        "planned": json.dumps(planned),
        "rules": rules.about,
        "lost": LOST,
        "spike": SPIKE,
        "minutes": round(math.fsum(seconds.values()) / 60, 1),
        "versions": versions(),
    }
    packed = {name: {"zlib": True, "complevel": 6} for name, v in table.data_vars.items() if v.dtype.kind == "f"}
    with replacing(OUT / "failures.nc") as partial_file:
        table.to_netcdf(partial_file, engine="netcdf4", encoding=packed)
    print(json.dumps(planned), flush=True)


def thin_record(folder: Path, case: Case) -> dict[str, np.ndarray]:
    """Loss, gradient norm and rate of a run, NaN after its end."""
    monitors = wb.open_run(folder / f"{case.name}.nc")["monitors"].to_dataset().load()
    return {name: monitors[name].reindex(step=np.arange(N_STEPS)).values for name in THIN}


#: Three whole runs for a notebook, each small: what is wrong, the setup, and where the checkpoints are.
EXAMPLES: dict[str, tuple[Setup, Case]] = {
    "architecture": (
        Setup("transformer", _of(20, 4, "none", **_XAVIER), "associative_recall", _recall(10, 5, 32), _plan(0.004, 20)),
        Case("architecture", 31, "architecture", "large init", 4.5, 0, 1),
    ),
    "hyperparameter": (
        Setup("transformer", _of(20, 4, "none", **_XAVIER), "associative_recall", _recall(10, 5, 32), _plan(0.004, 20)),
        Case("hyperparameter", 32, "schedule", "jump", 15, 110),
    ),
    "precision": (
        Setup("transformer", _of(20, 4, "none"), "associative_recall", _recall(10, 5, 32), _plan(0.002, 20)),
        Case("precision", 33, "precision", "attention bits", 8, 30),
    ),
}


def example(name: str, folder: Path, work: Path) -> str:
    """One whole run with the last checkpoint before its failure; the answer is taken out of its record."""
    setup, case = EXAMPLES[name]
    SETUPS[case.setup] = setup
    model, task, plan, faults = build(case)
    places = folder / f"{name}.checkpoints"
    shutil.rmtree(places, ignore_errors=True)
    wb.save_checkpoint(model, places / "step-00000000")
    store = work / f"example_{name}.zarr"
    shutil.rmtree(store, ignore_errors=True)
    settings = {"recorder": wb.Recorder(every=LOOKS, n_probe_tokens=64), "spectra_every": 100, "checkpoint_every": 10}
    looks = {"profile_options": {"n_snapshots": 256, "n_workers": 1}, "overwrite": True}
    *_, last = wb.train(model, task, store=store, faults=faults, **settings, **looks, **plan)
    run = wb.open_run(store).load()
    failure = find_failure(read_record(run))
    found = {int(place.name[5:]): place for place in store.with_suffix(".checkpoints").glob("step-*")}
    before = max((step for step in found if step <= failure.step), default=0)
    if before:  # whose weights stand for those of the beginning too: one checkpoint is enough
        shutil.rmtree(places)
        shutil.copytree(found[before], places / found[before].name)
    wb.export_netcdf(without_answer(run), folder / f"{name}.nc", overwrite=True)
    return f"{name}: {last.cause or 'not diverged'} at {last.step}, failure from {failure.step}, checkpoint {before}"


def without_answer(run: xr.DataTree) -> xr.DataTree:
    """The run without what says which fault was injected."""
    events = run["events"].to_dataset()
    run["events"] = xr.DataTree(events.isel(event=events["kind"].values != "fault"))
    configuration = json.loads(run.attrs["configuration"])
    configuration.pop("faults", None)
    run.attrs["configuration"] = json.dumps(configuration)
    return run


def examples(work: Path) -> None:
    """All of `EXAMPLES`, into data/failures/."""
    folder = OUT / "failures"
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    for name in EXAMPLES:
        print(example(name, folder, work), flush=True)


def main() -> None:
    """Read the command line and make the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("artifacts/failures"))
    parser.add_argument("--only", choices=("dev", "fit", "held_out", "hard", "collect", "examples"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cause", choices=tuple(CAUSES), help="record runs of this cause only")
    args = parser.parse_args()
    for name in ("dev", "fit", "held_out", "hard", "collect", "examples"):
        if args.only not in (None, name):
            continue
        if name in SETS:
            cases = [case for case in SETS[name]() if args.cause in (None, case.cause)]
            record_all(cases, args.work / name, args.processes)
        else:
            {"fit": fit, "collect": collect, "examples": examples}[name](args.work)


if __name__ == "__main__":
    main()
