"""The runs of the study of the diagnosis, from which practice cases are taken: setups, faults, and their building.

Families of setups are divided into three sets before the first measurement: the rules are fitted to the training set
("fit"), variants are chosen on the validation set ("choose"), and the test set ("locked") evaluates them once. Settings
are drawn before the fault, and a run and its control share them, so that only the setting of the fault itself reveals
its cause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench import tasks, zoo
from workbench.callbacks import faults
from workbench.models.losses import prediction_of, token_loss
from workbench.scaling.designs import design

N_STEPS = 200
SEED = 21


@dataclass(frozen=True)
class StudySetup:
    """An architecture, a task, and a learning rate at which the model learns well."""

    set: str
    family: str
    make: str
    options: dict[str, Any]
    task: str
    task_options: dict[str, Any]
    rate: float

    @property
    def has_attention(self) -> bool:
        """Whether attention uses the kernel whose arithmetic a fault can change."""
        return self.make != "mamba" and self.options.get("model_type") not in ("gemma2", "bloom")

    @property
    def has_routers(self) -> bool:
        """Whether blocks route tokens to experts."""
        return "n_experts" in self.options or "num_experts" in self.options

    @property
    def has_norms(self) -> bool:
        """Whether blocks have normalizations."""
        return self.options.get("norm", "some") != "none"


def lm(vocab_size: int, length: int, batch_size: int) -> dict[str, Any]:
    """Return options of `synthetic_lm`."""
    return {"vocab_size": vocab_size, "length": length, "batch_size": batch_size, "n_sequences": 2000}


def recall(vocab_size: int, length: int, batch_size: int) -> dict[str, Any]:
    """Return options of `associative_recall`."""
    return {"vocab_size": vocab_size, "length": length, "n_pairs": 2, "batch_size": batch_size}


def _of(width: int, depth: int, norm: str | None = None, **others: Any) -> dict[str, Any]:
    return {"d_model": width, "n_layers": depth} | ({"norm": norm} if norm else {}) | others


def config(model_type: str, width: int, depth: int, **others: Any) -> dict[str, Any]:
    """Return a configuration of transformers from common and additional options."""
    return {
        "model_type": model_type, "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 3 * width, "vocab_size": 256, "max_position_embeddings": 64,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **others,
    }  # fmt: skip


IMAGES = {"image_size": 8, "patch_size": 4, "n_channels": 1, "n_classes": 10}
_XAVIER = {"initialization": "xavier"}
BYTES = {"length": 16, "batch_size": 16}
_LM, _RECALL, _VIT = "synthetic_lm", "associative_recall", {"batch_size": 32}

SETUPS: dict[str, StudySetup] = {
    "pre_ln lm": StudySetup("fit", "Pre-LN", "transformer", _of(32, 3, "pre_ln"), _LM, lm(32, 16, 16), 0.01),
    "pre_ln recall": StudySetup("fit", "Pre-LN", "transformer", _of(32, 4, "pre_ln"), _RECALL, recall(10, 5, 32), 0.006
    ),
    "gpt2 bytes": StudySetup("fit", "Pre-LN", "gpt2_style", _of(40, 3), "text_bytes", BYTES, 0.004),
    "vit": StudySetup("fit", "Pre-LN", "vit", _of(32, 3, "pre_ln", **IMAGES), "digits", _VIT, 0.005),
    "llama lm": StudySetup("fit", "Llama", "llama_style", _of(32, 3), _LM, lm(40, 12, 16), 0.006),
    "post_ln lm": StudySetup("fit", "Post-LN", "transformer", _of(32, 4, "post_ln"), _LM, lm(32, 12, 24), 0.008),
    "none recall": StudySetup("fit", "No norm", "transformer", _of(32, 4, "none"), _RECALL, recall(10, 5, 32), 0.0015),
    "x none recall": StudySetup(
        "fit", "No norm", "transformer", _of(32, 4, "none", **_XAVIER), _RECALL, recall(10, 5, 32), 0.003
    ),
    "none vit": StudySetup("fit", "No norm", "vit", _of(32, 3, "none", **IMAGES), "digits", _VIT, 0.008),
    "moe lm": StudySetup("fit", "MoE", "moe", _of(32, 2, n_experts=4, top_k=1), _LM, lm(32, 16, 16), 0.008),
    "moe recall": StudySetup("fit", "MoE", "moe", _of(32, 2, n_experts=4, top_k=2), _RECALL, recall(10, 5, 32), 0.01),
    "gemma2 bytes": StudySetup(
        "fit", "Gemma", "design", config("gemma2", 32, 3, head_dim=8, query_pre_attn_scalar=8), "text_bytes", BYTES,
        0.01),
    "x sub_ln vit": StudySetup(
        "choose", "SubLN", "vit", _of(32, 4, "sub_ln", **IMAGES, **_XAVIER), "digits", _VIT, 0.006
    ),
    "qk recall": StudySetup(
        "choose", "QK-norm", "transformer", _of(40, 3, "rms_norm", qk_norm=True), _RECALL, recall(12, 6, 32), 0.006
    ),
    "parallel bytes": StudySetup(
        "choose", "Parallel", "transformer", _of(32, 4, "pre_ln", is_parallel=True), "text_bytes", BYTES, 0.006
    ),
    "mixtral lm": StudySetup(
        "choose", "Mixtral", "mixtral_style", _of(32, 3, n_experts=6, top_k=2), _LM, lm(40, 12, 16), 0.006
    ),
    "rezero recall": StudySetup(
        "choose", "ReZero", "transformer", _of(32, 4, "none", initialization="rezero"), _RECALL, recall(10, 5, 32),
        0.008),
    "deepnorm lm": StudySetup(
        "locked", "DeepNorm", "transformer", _of(32, 4, "deep_norm_post"), _LM, lm(40, 14, 16), 0.006
    ),
    "deepnorm vit": StudySetup(
        "locked", "DeepNorm", "vit", _of(36, 3, "deep_norm_post", **IMAGES), "digits", {"batch_size": 28}, 0.004
    ),
    "olmo2 bytes": StudySetup("locked", "OLMo 2", "design", config("olmo2", 32, 3), "text_bytes", BYTES, 0.006),
    "mamba lm": StudySetup("locked", "Mamba", "mamba", _of(32, 3), _LM, lm(36, 10, 16), 0.006),
    "fixup recall": StudySetup(
        "locked", "Fixup", "transformer", _of(32, 4, "none", initialization="fixup"), _RECALL, recall(12, 5, 32), 0.002
    ),
    "bloom bytes": StudySetup(
        "locked", "ALiBi", "design", config("bloom", 32, 3, n_layer=3, n_head=4), "text_bytes", BYTES, 0.004
    ),
    "window moe": StudySetup("locked", "Window MoE", "moe",
        _of(40, 3, "rms_norm", n_experts=5, top_k=2, window=4, position="rotary", mlp="swiglu", has_bias=False),
        _LM, lm(36, 14, 16), 0.006),
    "qwen3 moe bytes": StudySetup("locked", "Qwen 3 MoE", "design",
        config("qwen3_moe", 32, 2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
        "text_bytes", BYTES, 0.006),
}  # fmt: skip


@dataclass(frozen=True)
class Plant:
    """An injected fault."""

    cause: str
    kind: str
    dose: float = math.nan
    start: int = 0
    block: int = -1


@dataclass(frozen=True)
class Case:
    """A run: the name of a setup, the number of settings drawn for it, and injected faults (none for a control)."""

    setup: str
    base: int
    plants: tuple[Plant, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run for file names."""
        text = f"{self.setup} {self.base}" + "".join(
            f" {p.kind} {p.dose:.4g} {p.start} {'all' if p.block < 0 else p.block}" for p in self.plants
        )
        return "_".join("".join(c if c.isalnum() or c == "." else " " for c in text).split())

    @property
    def control(self) -> Case:
        """The same run without faults."""
        return replace(self, plants=())

    @property
    def causes(self) -> tuple[str, ...]:
        """Causes of the injected faults."""
        return tuple(plant.cause for plant in self.plants)


def jumped(step: int, *, at: int, factor: float) -> float:
    """Return the factor of a schedule that raises the rate at a step and keeps it high."""
    return factor if step >= at else 1.0


def restarted(step: int, *, at: int, factor: float) -> float:
    """Return the factor of a schedule of cosine waves, each higher than the previous one."""
    wave = 0.5 * (1 + math.cos(math.pi * (step % at) / at))
    return wave * (1 + (factor - 1) * (step // at))


def ended(step: int, *, at: int, factor: float) -> float:
    """Return the factor of a schedule that decays to almost 0 far too early."""
    return max(1 - step / at, factor)


SCHEDULES = {"jump": jumped, "restarts": restarted, "ends early": ended}


def stepped(step: int) -> float:
    """Return the factor of a healthy custom schedule, which is halved at three fifths of the run."""
    return 1.0 if step < 0.6 * N_STEPS else 0.5


@dataclass(frozen=True)
class Rescaled:
    """Hook that multiplies the update of a block, and removes the incoming state for a block without a skip."""

    factor: float = 1.0
    keeps_stream: bool = True

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Return the output of the block with a changed update."""
        state = output[0] if isinstance(output, tuple) else output
        new = args[0] * float(self.keeps_stream) + self.factor * (state - args[0])
        return (new, *output[1:]) if isinstance(output, tuple) else new


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, which are its longest list of modules."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(([*stack] for stack in stacks), key=len)


def _without_norms(module: nn.Module) -> None:
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if "norm" in type(child).__name__.lower():
                setattr(part, name, nn.Identity())


@torch.no_grad()
def plant_in_model(model: nn.Module, plant: Plant) -> None:
    """Inject a fault into the model itself, in place."""
    blocks = blocks_of(model)
    chosen = blocks if plant.block < 0 else [blocks[plant.block]]
    if plant.kind in ("large init", "no norm here"):
        for block in chosen:
            if plant.kind == "no norm here":
                _without_norms(block)
            for weight in block.parameters():
                if weight.ndim > 1:
                    weight.mul_(plant.dose)
    elif plant.kind == "large branch":
        for block in chosen:
            block.register_forward_hook(Rescaled(plant.dose))
    elif plant.kind == "no skip":
        for block in chosen:
            block.register_forward_hook(Rescaled(keeps_stream=False))
    elif plant.kind == "no norm":
        _without_norms(model)
    elif plant.kind == "router init":
        for name, weight in model.named_parameters():
            if is_router(name):
                weight.mul_(plant.dose)
    elif plant.kind in ("wrong sign", "balance"):
        object.__setattr__(model.config, "balance_coefficient", plant.dose * (-1 if plant.kind == "wrong sign" else 1))


def is_router(name: str) -> bool:
    """Return whether a parameter name is that of a router."""
    return "router" in name or name.endswith("mlp.gate.weight")


def fault_of(plant: Plant) -> Any:
    """Return the fault of `wb.faults` for a fault of that kind; None for others."""
    start, dose = plant.start, int(plant.dose) if math.isfinite(plant.dose) else 0
    if plant.kind == "few rows":
        return faults.small_batch(n_rows=dose, start=start)
    if plant.kind == "attention bits":
        return faults.low_precision_attention(n_bits=dose, start=start)
    if plant.kind == "reduction":
        return faults.low_precision_reduction(n_bits=8, n_ranks=dose, start=start)
    if plant.kind in ("labels", "tokens"):
        return faults.corrupted_data(what=plant.kind, start=start, stop=start + dose)
    if plant.kind == "half of the labels":
        return faults.corrupted_data(what="labels", share=0.5, start=start, stop=start + dose)
    if plant.kind == "router rate":
        return faults.no_auxiliary_loss(start=start)
    return None


def router_rate(weights: list[nn.Parameter], *, routers: list[int], rate: float, factor: float, **options: Any) -> Any:
    """Return AdamW with another learning rate for the routers, given by their positions among the parameters."""
    own = [weight for i, weight in enumerate(weights) if i in routers]
    others = [weight for i, weight in enumerate(weights) if i not in routers]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": own, "lr": rate * factor}]
    return torch.optim.AdamW(groups, lr=rate, **options)


def coarse_weights(weights: list[nn.Parameter], *, n_bits: int, start: int, **options: Any) -> Any:
    """Return AdamW whose parameters are rounded to ``n_bits`` mantissa bits from a step on, without a master copy."""
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


@dataclass
class BuiltRun:
    """Everything that a run needs."""

    model: nn.Module
    task: Any
    plan: dict[str, Any]
    faults: list[Any] = field(default_factory=list)


def base_of(setup: str, number: int) -> dict[str, Any]:
    """Return the settings with a number for a setup, drawn from the range of healthy plans independently of faults."""
    draw = np.random.default_rng([SEED, list(SETUPS).index(setup), number])
    rate = SETUPS[setup].rate * float(draw.choice([0.35, 0.5, 0.7, 1.0]))
    warmup = int(draw.choice([0, 10, 20, 40, 60])) if SETUPS[setup].family != "Post-LN" else 40
    eps = float(draw.choice([1e-8, 1e-8, 1e-6, 1e-10]))
    betas = tuple(draw.choice([[0.9, 0.95], [0.9, 0.95], [0.9, 0.999]]).tolist())
    return {
        "learning_rate": rate,
        "warmup": warmup,
        "schedule": draw.choice(["constant", "constant", "cosine", "linear", "own"]).item(),
        "clip_norm": 1.0 if draw.random() < 0.6 else None,
        "optimizer_options": {"betas": betas, "eps": eps},
        "seed": 100 * list(SETUPS).index(setup) + number,
    }


def model_and_task(setup: StudySetup, seed: int) -> tuple[nn.Module, Any]:
    """Return a freshly initialized model and the task of a setup."""
    task = getattr(tasks, setup.task)(**setup.task_options, seed=seed)
    if setup.make == "design":
        return design(setup.options).build(seed=seed), task
    sizes = {}
    if "length" in setup.task_options:
        sizes = {"vocab_size": setup.task_options.get("vocab_size", 256), "max_length": setup.task_options["length"]}
    heads = {} if setup.make == "mamba" else {"n_heads": 4}
    return getattr(zoo, setup.make)(**heads, **setup.options, **sizes, seed=seed), task


def build(case: Case) -> BuiltRun:
    """Return model, task, settings and faults of a case, all newly created."""
    setup = SETUPS[case.setup]
    plan = base_of(case.setup, case.base) | {"n_steps": N_STEPS}
    seed = plan["seed"]
    plan["schedule"] = stepped if plan["schedule"] == "own" else plan["schedule"]
    plan["optimizer_options"] = {**plan["optimizer_options"], "fused": True}
    task_options = dict(setup.task_options)
    for plant in case.plants:
        if plant.kind == "batch size":
            task_options["batch_size"] = int(plant.dose)
    made = BuiltRun(*model_and_task(replace(setup, task_options=task_options), seed), plan)
    for plant in case.plants:
        plant_in_training(made, plant)
    return made


def plant_in_training(made: BuiltRun, plant: Plant) -> None:
    """Inject a fault into the model, the settings or the faults of a run, in place."""
    plan = made.plan
    plant_in_model(made.model, plant)
    if plant.kind == "rate":
        plan["learning_rate"] *= plant.dose
    elif plant.kind == "no warm-up":
        plan["learning_rate"] *= plant.dose
        plan["warmup"] = 0
    elif plant.kind in SCHEDULES:
        plan["schedule"] = partial(SCHEDULES[plant.kind], factor=plant.dose, at=plant.start)
    elif plant.kind == "eps":
        plan["optimizer_options"] = {**plan["optimizer_options"], "eps": plant.dose}
    elif plant.kind == "router rate":
        routers = [i for i, (name, _) in enumerate(made.model.named_parameters()) if is_router(name)]
        given = {name: value for name, value in plan.pop("optimizer_options").items() if name != "fused"}
        rate = plan.pop("learning_rate")
        plan["optimizer"] = partial(router_rate, routers=routers, rate=rate, factor=plant.dose, **given)
    elif plant.kind == "coarse weights":
        given = plan.pop("optimizer_options")
        rate = plan.pop("learning_rate")
        plan["optimizer"] = partial(coarse_weights, n_bits=int(plant.dose), start=plant.start, lr=rate, **given)
    if (fault := fault_of(plant)) is not None:
        made.faults.append(fault)


def held_out_loss(model: nn.Module, task: Any) -> float:
    """Return the mean loss over up to 512 held-out examples."""
    split = {"split": "validation"} if hasattr(task, "split") else {}
    n_rows = min(512, task.n_held_out or 512)
    inputs, targets = replace(task, batch_size=n_rows, **split).batch(-1 if not split else 0)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = float(token_loss(prediction_of(model(inputs)), targets))
    model.train(was_training)
    return found


def largest_rise(loss: np.ndarray, window: int = 15) -> float:
    """Return the largest rise of the running median of the loss above its lowest level so far, in nat."""
    loss = loss[np.isfinite(loss)]
    if len(loss) < 2 * window:
        return 0.0
    smooth = np.median(np.lib.stride_tricks.sliding_window_view(loss, window), axis=1)
    return float(np.max(smooth - np.minimum.accumulate(smooth)))
