"""The runs of the study of alarms: plans, faults with doses, and failures without an injected fault.

Setups and held-out families are those of the study of failures (`failure_cases.py`): alarms are fitted
to the training set ("fit"), chosen on the validation set ("choose") and evaluated on the test set ("locked"). Plans,
seeds and first steps of faults are drawn before the first measurement. Doses are ordered from large to small;
record_warnings.py finds the smallest harmful ones by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import workbench as wb
from workbench.course.failure_runs import BYTES, IMAGES, StudySetup, config, lm, model_and_task, recall
from workbench.course.failure_runs import SETUPS as SETUPS_OF_FAILURES
from workbench.models.losses import token_loss

SEED = 33
#: Twelve families that no other study has, each with a rate at which it learns well (best of 0.003, 0.01 and 0.03 in
#: 500 updates). Most are implementations of transformers.
LOCKED: dict[str, StudySetup] = {
    "granite bytes": StudySetup(
        "locked", "Granite", "design",
        config("granite", 32, 3, residual_multiplier=0.5, embedding_multiplier=4.0, logits_scaling=2.0),
        "text_bytes", BYTES, 0.01,
    ),
    "opt bytes": StudySetup(
        "locked", "OPT", "design", config("opt", 32, 3, ffn_dim=96, word_embed_proj_dim=32, dropout=0.0),
        "text_bytes", BYTES, 0.004,
    ),
    "nemotron lm": StudySetup(
        "locked", "Nemotron", "design", config("nemotron", 32, 3) | {"vocab_size": 40}, "synthetic_lm", lm(40, 14, 16),
        0.005,
    ),
    "glm4 bytes": StudySetup(
        "locked", "Sandwich norm", "design", config("glm4", 32, 3, head_dim=8), "text_bytes", BYTES, 0.01
    ),
    "kan recall": StudySetup(
        "locked", "KAN", "kan", {"d_model": 32, "n_layers": 3, "norm": "pre_ln"}, "associative_recall",
        recall(10, 5, 32), 0.008,
    ),
    "rms vit": StudySetup(
        "locked", "RMSNorm ViT", "vit", {"d_model": 32, "n_layers": 3, "norm": "rms_norm", **IMAGES}, "digits",
        {"batch_size": 32}, 0.008,
    ),
    "lfm2 lm": StudySetup(
        "locked", "Convolution hybrid", "design",
        config("lfm2", 32, 4, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False)
        | {"vocab_size": 40},
        "synthetic_lm", lm(40, 12, 16), 0.006,
    ),
    "diffllama bytes": StudySetup(
        "locked", "Differential attention", "design", config("diffllama", 32, 3), "text_bytes", BYTES, 0.006
    ),
    "olmoe lm": StudySetup(
        "locked", "OLMoE", "design",
        config("olmoe", 32, 2, num_experts=4, num_experts_per_tok=2, intermediate_size=48) | {"vocab_size": 40},
        "synthetic_lm", lm(40, 12, 16), 0.006,
    ),
    "deepseek lm": StudySetup(
        "locked", "DeepSeek", "design",
        config(
            "deepseek_v3", 32, 2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
            n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
            moe_intermediate_size=32, num_key_value_heads=4,
        ) | {"vocab_size": 40},
        "synthetic_lm", lm(40, 12, 16), 0.006,
    ),
    "recurrent gemma bytes": StudySetup(
        "locked", "Recurrent hybrid", "design", config("recurrent_gemma", 32, 3, lru_width=32, head_dim=8),
        "text_bytes", BYTES, 0.01,
    ),
    "minimax lm": StudySetup(
        "locked", "Linear attention", "design",
        config("minimax", 32, 2, num_local_experts=4, num_experts_per_tok=2) | {"vocab_size": 40},
        "synthetic_lm", lm(40, 12, 16), 0.008,
    ),
}  # fmt: skip
#: The alarms have been evaluated on the test setups of the study of failures before, so here they serve for choosing.
SETUPS = {
    name: replace(setup, set="choose" if setup.set == "locked" else setup.set)
    for name, setup in SETUPS_OF_FAILURES.items()
} | LOCKED
#: Set -> number of plans drawn for each setup, and updates of each run.
N_PLANS = {"fit": 5, "choose": 6, "locked": 6}
N_STEPS = {"fit": 3000, "choose": 3000, "locked": 3000}
#: Plans of which some have faults; all others are healthy runs.
N_FAULTED_PLANS = {"fit": 5, "choose": 6, "locked": 3}
#: Number of kinds of faults for each setup; in the test set without those that the logged settings reveal.
N_KINDS = {"fit": 6, "choose": 8, "locked": 8}
#: Updates of runs on text in the test set, as many as epochs of a small corpus have.
N_STEPS_OF_TEXT = 5500
#: Range of the first steps of faults.
EARLIEST, LATEST = 400, 900
#: Updates of runs that may fail without an injected fault.
N_STEPS_OF_LATE = 5_000
#: Updates of runs whose faults are examples for the attribution, and the warm-up of every second one, so that some
#: faults begin while the rate still rises.
N_STEPS_OF_EXAMPLES, LONG_WARMUP = 1000, 500
#: Number of the plan of these runs; no other run has it.
EXAMPLE_PLAN = 40


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        cause: Cause that the alarms should name.
        doses: Doses from large to small.
        make: Function from a dose and the first step to faults and callbacks of `wb.train`.
        is_visible: Whether the logged settings reveal the fault.
    """

    cause: str
    doses: tuple[float, ...]
    make: Callable[[float, int], dict[str, list[Any]]]
    is_visible: bool = False


def _fault(name: str, option: str, **others: Any) -> Callable[[float, int], dict[str, list[Any]]]:
    def make(dose: float, start: int) -> dict[str, list[Any]]:
        value = int(dose) if float(dose).is_integer() and option != "share" else dose
        return {"faults": [getattr(wb.faults, name)(start=start, **{option: value}, **others)]}

    return make


class Changed(wb.Callback):
    """Callback that silently changes the training at a step.

    Args:
        what: "weights" multiplies one matrix of the last block by the dose, "moments" divides the second moments of the
            optimizer by it, "loader" repeats the batches of that many steps from then on, "labels" replaces that
            fraction of the labels by random ones, "mask" lets attention see later tokens, and "zero_grad" keeps the
            gradients of earlier updates.
        dose: Strength of the change.
        start: Step of the change.
    """

    name = "changed"

    def __init__(self, what: str, dose: float, start: int) -> None:
        self.what, self.dose, self.start = what, dose, start
        self._kept: list[Any] = []
        self._step = 0
        self._draws = torch.Generator().manual_seed(start)

    def describe(self) -> dict[str, Any]:
        """Return the settings."""
        return {"what": self.what, "dose": self.dose, "start": self.start}

    @torch.no_grad()
    def begin_step(self, step: int) -> None:
        """Apply the changes that happen once."""
        self._step = step
        if step != self.start:
            return
        if self.what == "weights":
            matrices = [weight for weight in self.run.model.parameters() if weight.ndim == 2]
            matrices[-2].mul_(self.dose)
        elif self.what == "moments":
            for state in self.run.optimizer.state.values():
                if isinstance(state.get("exp_avg_sq"), Tensor):
                    state["exp_avg_sq"].div_(self.dose)
        elif self.what == "mask":
            for module in causal_modules(self.run.model):
                module.is_causal = False
        elif self.what == "zero_grad":
            self.run.optimizer.zero_grad = lambda *_, **__: None

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Repeat batches if the loader is changed, or replace labels."""
        if self.what not in ("loader", "labels") or self._step < self.start:
            return inputs, targets
        if self.what == "labels":
            config: Any = self.run.model.config
            others = torch.randint(
                config.vocab_size if targets.ndim > 1 else config.n_classes, targets.shape, generator=self._draws
            )
            is_other = (torch.rand(targets.shape, generator=self._draws) < self.dose) & (targets >= 0)
            return inputs, others.where(is_other, targets)
        if len(self._kept) < self.dose:
            self._kept.append((inputs, targets))
            return inputs, targets
        return self._kept[(self._step - self.start) % int(self.dose)]


def causal_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model whose attention is causal."""
    return [module for module in model.modules() if getattr(module, "is_causal", False)]


class Later(wb.Callback):
    """Callback that does nothing until it becomes the fault of a case."""

    name = "later"
    is_planned = False

    def __init__(self) -> None:
        self._fault = wb.Callback()

    def become(self, case: Case) -> None:
        """Act as this fault from the next step on."""
        made = (KINDS | BY_HAND)[case.kind].make(case.dose, case.start or 0)
        [fault] = made.get("callbacks") or [wb.faults.Injection(made["faults"], seed=case.seed)]
        fault.setup(self.run)
        fault.begin()
        self._fault = fault

    @property
    def rate_factor(self) -> float:
        """Return the rate factor of the fault."""
        return self._fault.rate_factor

    def begin_step(self, step: int) -> None:
        """Act as the fault."""
        self._fault.begin_step(step)

    def change_batch(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Act as the fault."""
        return self._fault.change_batch(inputs, targets)

    def run_pass(self, one_pass: Any, inputs: Any, targets: Any) -> Any:
        """Act as the fault."""
        return self._fault.run_pass(one_pass, inputs, targets)

    def around_pass(self) -> Any:
        """Act as the fault."""
        return self._fault.around_pass()

    def auxiliary_loss(self, task_loss: Tensor, auxiliary: Tensor | None) -> Tensor | None:
        """Act as the fault."""
        return self._fault.auxiliary_loss(task_loss, auxiliary)

    def before_update(self, step: int, numbers: Any) -> None:
        """Act as the fault."""
        self._fault.before_update(step, numbers)


def _changed(what: str) -> Callable[[float, int], dict[str, list[Any]]]:
    return lambda dose, start: {"callbacks": [Changed(what, dose, start)]}


KINDS: dict[str, Kind] = {
    "attention": Kind("low_precision_attention", (8, 7, 6, 5, 4, 3, 2), _fault("low_precision_attention", "n_bits")),
    "attention output": Kind(
        "low_precision_attention", (8, 7, 6, 5, 4, 3), _fault("low_precision_attention", "n_bits", targets="output")
    ),
    "reduction": Kind(
        "low_precision_reduction", (8, 7, 6, 5, 4), _fault("low_precision_reduction", "n_bits", n_ranks=2)
    ),
    "bucket": Kind("dropped_bucket", (1.0, 0.5, 0.25, 0.1, 0.03), _fault("dropped_bucket", "share")),
    "bucket of a rank": Kind(
        "dropped_bucket", (1.0, 0.5, 0.25, 0.1), _fault("dropped_bucket", "share", lost_from="one_rank", n_ranks=2)
    ),
    "stale": Kind("stale_reduction", (64, 24, 8, 3, 1), _fault("stale_reduction", "delay")),
    "labels": Kind("corrupted_data", (1.0, 0.4, 0.15, 0.05, 0.02), _fault("corrupted_data", "share", what="labels")),
    "tokens": Kind("corrupted_data", (1.0, 0.4, 0.15, 0.05, 0.02), _fault("corrupted_data", "share", what="tokens")),
    "loader": Kind("repeated_data", (1, 4, 16, 64), _changed("loader")),
    "weights": Kind("damaged_weights", (300, 30, 10, 3), _changed("weights")),
    "moments": Kind("damaged_optimizer_state", (1e6, 1e4, 100, 10), _changed("moments")),
    "rate": Kind("large_rate", (30, 10, 4, 1.5), _fault("large_rate", "factor"), is_visible=True),
    "slow rate": Kind("large_rate", (30, 10, 4), _fault("large_rate", "factor", ramp=200), is_visible=True),
    "batch": Kind("small_batch", (1, 2, 4), _fault("small_batch", "n_rows"), is_visible=True),
    "auxiliary loss": Kind(
        "no_auxiliary_loss",
        (0,),
        lambda _, start: {"faults": [wb.faults.no_auxiliary_loss(start=start)]},
        is_visible=True,
    ),
}
#: Faults that are written by hand and were added after the study; no attribution was fitted to them.
BY_HAND: dict[str, Kind] = {
    "random labels": Kind("corrupted_data", (0.1,), _changed("labels")),
    "same batch": Kind("repeated_data", (1,), _changed("loader")),
    "lost mask": Kind("unknown", (0,), _changed("mask")),
    "gradients kept": Kind("gradients_not_cleared", (0,), _changed("zero_grad")),
}


@dataclass(frozen=True)
class Case:
    """A run of the study.

    Attributes:
        setup: Name of the setup.
        plan: Number of the plan drawn for the setup.
        kind: Kind of fault; empty if there is none.
        dose: Dose of the fault.
        is_example: Whether it is a short run that serves as an example for the attribution.
    """

    setup: str
    plan: int
    kind: str = ""
    dose: float = math.nan
    is_example: bool = False

    @property
    def set(self) -> str:
        """Set of the setup."""
        return SETUPS[self.setup].set

    @property
    def name(self) -> str:
        """Name of the run for file names."""
        text = f"{self.setup} {'example' if self.is_example else self.plan}" + (
            f" {self.kind} {self.dose:g}" if self.kind else ""
        )
        return "_".join("".join(c if c.isalnum() or c == "." else " " for c in text).split())

    @property
    def control(self) -> Case:
        """The same run without the fault."""
        return replace(self, kind="", dose=math.nan)

    @property
    def start(self) -> int | None:
        """First step of the fault, the same for all doses."""
        if not self.kind:
            return None
        draw = np.random.default_rng(
            [SEED, list(SETUPS).index(self.setup), self.plan, [*KINDS, *BY_HAND].index(self.kind)]
        )
        return int(draw.integers(EARLIEST, LATEST + 1))

    @property
    def seed(self) -> int:
        """Seed of model, data and training."""
        return 10_000 + 100 * list(SETUPS).index(self.setup) + self.plan


def restarting(step: int, *, period: int) -> float:
    """Return the factor of a schedule of cosine waves of equal height."""
    return 0.05 + 0.475 * (1 + math.cos(math.pi * (step % period) / period))


def plan_of(case: Case) -> dict[str, Any]:
    """Return keyword arguments of `wb.train` without faults, drawn for the setup."""
    setup = SETUPS[case.setup]
    draw = np.random.default_rng([SEED, list(SETUPS).index(case.setup), case.plan])
    n_steps = N_STEPS[setup.set]
    if setup.set == "locked" and setup.task == "text_bytes" and case.plan % 2 == 0:
        n_steps = N_STEPS_OF_TEXT
    if case.is_example:
        n_steps = N_STEPS_OF_EXAMPLES
    rate = setup.rate * float(draw.choice([0.25, 0.35, 0.5, 0.7]))
    schedule: Any = draw.choice(["constant", "cosine", "wsd", "linear", "restarts"]).item()
    if schedule == "restarts":
        schedule = partial(restarting, period=n_steps // 3)
    warmup = int(draw.choice([20, 50, 200, 500])) if setup.family != "Post-LN" else 200
    if case.is_example and list(SETUPS).index(case.setup) % 2:
        warmup = LONG_WARMUP
    betas = tuple(draw.choice([[0.9, 0.95], [0.9, 0.95], [0.9, 0.999]]).tolist())
    return {
        "n_steps": n_steps,
        "learning_rate": rate,
        "warmup": warmup,
        "schedule": schedule,
        "clip_norm": 1.0 if draw.random() < 0.7 else None,
        "optimizer_options": {"betas": betas, "weight_decay": float(draw.choice([0.0, 0.1])), "fused": True},
        "seed": case.seed,
    }


def build(case: Case) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return model, task and keyword arguments of `wb.train`, all newly created."""
    model, task = model_and_task(SETUPS[case.setup], case.seed)
    plan = plan_of(case)
    if case.kind:
        plan |= KINDS[case.kind].make(case.dose, case.start or 0)
    return model, task, plan


def applies(setup: StudySetup, kind: str) -> bool:
    """Return whether a fault can act in a setup."""
    if kind in ("attention", "attention output"):
        return setup.has_attention
    if kind == "auxiliary loss":
        return "n_experts" in setup.options
    if kind == "tokens":
        return setup.task != "digits"
    return True


def controls(which: str) -> list[Case]:
    """Return the runs of a set without a fault."""
    return [Case(name, i) for name, setup in SETUPS.items() if setup.set == which for i in range(N_PLANS[which])]


def searches(which: str) -> list[Case]:
    """Return kinds of faults for each setup in a drawn plan, with their largest dose.

    Kinds that the logged settings reveal are all added in the test set ("locked").
    """
    found = []
    for number, (name, setup) in enumerate(SETUPS.items()):
        if setup.set != which:
            continue
        draw = np.random.default_rng([SEED, 500 + number])
        able = [kind for kind in KINDS if applies(setup, kind)]
        visible = [kind for kind in able if KINDS[kind].is_visible] if which == "locked" else []
        kinds = [*draw.permutation([kind for kind in able if kind not in visible])[: N_KINDS[which]], *visible]
        n_plans = N_FAULTED_PLANS[which]
        found += [Case(name, int(draw.integers(n_plans)), str(kind), KINDS[kind].doses[0]) for kind in kinds]
    return found


def examples() -> dict[Case, list[Case]]:
    """Return healthy runs, and for each its runs with all applicable faults at the largest and a medium dose."""
    found = {}
    for name, setup in SETUPS.items():
        if setup.set != "locked":
            control = Case(name, EXAMPLE_PLAN, is_example=True)
            found[control] = [
                replace(control, kind=kind, dose=dose)
                for kind in KINDS
                if applies(setup, kind)
                for dose in dict.fromkeys((KINDS[kind].doses[0], KINDS[kind].doses[len(KINDS[kind].doses) // 2]))
            ]
    return found


# Failures without an injected fault


def z_loss(logits: Tensor, targets: Tensor, *, weight: float = 1e-3) -> Tensor:
    """Return the cross entropy with a penalty on log Z (Chowdhery et al. 2022, arXiv:2204.02311)."""
    return token_loss(logits, targets) + weight * logits.float().logsumexp(-1).square().mean()


@dataclass(frozen=True)
class LateCase:
    """A long run of a decoder at a high learning rate.

    Attributes:
        set: "fit" or "locked".
        norm: Normalization of the decoder.
        remedy: "", "qk_norm" or "z_loss".
        rate: Peak learning rate.
        seed: Seed of model, data and training.
    """

    set: str
    norm: str
    remedy: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run for file names."""
        return f"late_{self.norm}_{self.remedy or 'plain'}_{self.rate:g}_{self.seed}"


def late_cases(which: str) -> list[LateCase]:
    """Return the runs of a set; "locked" has another normalization and seeds, at rates at which "fit" failed."""
    if which == "choose":
        return []
    norm, rates, seeds = {
        "fit": ("pre_ln", (0.01, 0.03, 0.06, 0.1), (1,)),
        "locked": ("rms_norm", (0.06, 0.1), (11, 12)),
    }[which]
    return [
        LateCase(which, norm, remedy, rate, seed)
        for seed in seeds
        for rate in rates
        for remedy in ("", "qk_norm", "z_loss")
    ]


def build_late(case: LateCase) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return model, task and keyword arguments of `wb.train`."""
    size = {"d_model": 48, "n_layers": 3, "n_heads": 4, "vocab_size": 32, "max_length": 24}
    model = wb.zoo.transformer(case.norm, qk_norm=case.remedy == "qk_norm", **size, seed=case.seed)
    task = wb.tasks.synthetic_lm(vocab_size=32, length=24, batch_size=16, n_sequences=2000, seed=case.seed)
    plan = {
        "n_steps": N_STEPS_OF_LATE,
        "learning_rate": case.rate,
        "warmup": 100,
        "clip_norm": 1.0,
        "optimizer_options": {"betas": (0.9, 0.95), "fused": True},
        "seed": case.seed,
    }
    return model, task, plan | ({"loss": z_loss} if case.remedy == "z_loss" else {})
