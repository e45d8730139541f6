"""The runs of the study of the diagnosis: setups, injected faults, and the list of runs.

Families of setups are divided into three sets before the first measurement: the rules are fitted to the training set
("fit"), variants are chosen on the validation set ("choose"), and the test set ("locked") evaluates them once. Doses,
places and settings are drawn from wide ranges. Settings are drawn before the fault, and a run and its control share
them, so that only the setting of the fault itself reveals its cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

N_STEPS = 200
SEED = 21
#: Number of settings drawn for each setup.
N_BASES = 8
#: Number of pairs of faults for each setup.
N_PAIRS = 3


@dataclass(frozen=True)
class StudySetup:
    """An architecture, a task, and a learning rate at which the model learns well.

    Attributes:
        set: "fit", "choose" or "locked".
        family: Family with which the setup is held out.
        make: Name of a function of `wb.zoo`, or "design" for a configuration of transformers.
        options: Options of the model.
        task: Name of a function of `wb.tasks`.
        task_options: Options of the task.
        rate: Peak learning rate.
    """

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
    "pre_ln recall": StudySetup(
        "fit", "Pre-LN", "transformer", _of(32, 4, "pre_ln"), _RECALL, recall(10, 5, 32), 0.006
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
        0.01,
    ),
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
        0.008,
    ),
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
    "window moe": StudySetup(
        "locked", "Window MoE", "moe",
        _of(40, 3, "rms_norm", n_experts=5, top_k=2, window=4, position="rotary", mlp="swiglu", has_bias=False),
        _LM, lm(36, 14, 16), 0.006,
    ),
    "qwen3 moe bytes": StudySetup(
        "locked", "Qwen 3 MoE", "design",
        config("qwen3_moe", 32, 2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
        "text_bytes", BYTES, 0.006,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Plant:
    """An injected fault.

    Attributes:
        cause: Cause that the diagnosis should name.
        kind: Kind of the fault.
        dose: Strength of the fault.
        start: First step at which it acts.
        block: Block that it acts on; -1 for all blocks.
    """

    cause: str
    kind: str
    dose: float = math.nan
    start: int = 0
    block: int = -1


@dataclass(frozen=True)
class Case:
    """A run: a setup, settings, and injected faults.

    Attributes:
        setup: Name of the setup.
        base: Number of the settings drawn for the setup.
        plants: Injected faults; empty for a control.
    """

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


# The list of runs


def _log(low: float, high: float) -> Callable[[np.random.Generator], float]:
    return lambda draw: float(np.exp(draw.uniform(np.log(low), np.log(high))))


def _whole(low: int, high: int) -> Callable[[np.random.Generator], float]:
    return lambda draw: int(draw.integers(low, high + 1))


def _none(_: np.random.Generator) -> float:
    return math.nan


#: Cause, kind, dose, first step, whether the fault is injected into a single block, and number of draws.
_AT_ONCE, _EARLY, _MIDDLE = _whole(0, 0), _whole(0, 50), _whole(80, 130)
PLANTS: tuple[tuple[str, str, Callable, Callable, bool, int], ...] = (
    ("learning_rate", "rate", _log(6, 40), _AT_ONCE, False, 3),
    ("schedule", "jump", _log(4, 25), _MIDDLE, False, 2),
    ("schedule", "restarts", _log(4, 12), _whole(40, 70), False, 1),
    ("schedule", "ends early", _log(1e-3, 1e-2), _whole(10, 40), False, 2),
    ("schedule", "no warm-up", _log(2, 3), _AT_ONCE, False, 1),
    ("batch", "few rows", _whole(1, 3), _EARLY, False, 2),
    ("batch", "batch size", _whole(1, 2), _AT_ONCE, False, 1),
    ("optimizer_eps", "eps", _log(0.01, 1.0), _AT_ONCE, False, 3),
    ("architecture", "large branch", _log(5, 300), _AT_ONCE, True, 2),
    ("architecture", "large init", _log(3, 100), _AT_ONCE, True, 2),
    ("architecture", "no norm here", _log(8, 40), _AT_ONCE, True, 1),
    ("architecture", "no norm", _none, _AT_ONCE, False, 1),
    ("architecture", "no skip", _none, _AT_ONCE, True, 1),
    ("architecture", "no skip", _none, _AT_ONCE, False, 1),
    ("precision", "attention bits", _whole(8, 8), _EARLY, False, 3),
    ("precision", "coarse weights", _whole(1, 3), _EARLY, False, 2),
    ("precision", "reduction", _whole(4, 8), _EARLY, False, 1),
    ("routing", "wrong sign", _log(0.03, 0.5), _AT_ONCE, False, 2),
    ("routing", "balance", _log(30, 300), _AT_ONCE, False, 2),
    ("routing", "router rate", _log(100, 300), _AT_ONCE, False, 2),
    ("routing", "router init", _log(100, 400), _AT_ONCE, False, 2),
    ("data", "labels", _whole(12, 50), _MIDDLE, False, 2),
    ("data", "half of the labels", _whole(20, 60), _MIDDLE, False, 1),
    ("data", "tokens", _whole(15, 50), _MIDDLE, False, 2),
)
#: Additional draws of kinds for which most of the draws above do no harm within 200 updates.
STRONG_PLANTS: tuple[tuple[str, str, Callable, Callable, bool, int], ...] = (
    ("architecture", "large branch", _log(300, 3000), _AT_ONCE, True, 2),
    ("architecture", "large init", _log(60, 600), _AT_ONCE, True, 2),
    ("architecture", "no norm here", _log(40, 200), _AT_ONCE, True, 1),
    ("precision", "attention bits", _whole(8, 8), _whole(0, 10), False, 2),
    ("routing", "wrong sign", _log(0.3, 3), _AT_ONCE, False, 2),
    ("routing", "balance", _log(100, 1000), _AT_ONCE, False, 1),
    ("routing", "router rate", _log(300, 1000), _AT_ONCE, False, 3),
    ("routing", "router init", _log(400, 4000), _AT_ONCE, False, 3),
)
#: Kinds of faults that are not combined with others.
NO_PAIRS = ("router rate", "coarse weights", "batch size", "no skip", "no norm", "no norm here")


def _applies(setup: StudySetup, kind: str) -> bool:
    if kind in ("wrong sign", "balance"):
        return "n_experts" in setup.options
    if kind in ("router rate", "router init"):
        return setup.has_routers
    if kind == "attention bits":
        return setup.has_attention
    if kind == "tokens":
        return setup.task != "digits"
    return setup.has_norms or kind not in ("no norm", "no norm here")


def singles(
    name: str, plants: tuple, draw: np.random.Generator, *, first_base: int = 0, n_bases: int = N_BASES
) -> list[Case]:
    """Draw runs of a setup with one fault each.

    Args:
        name: Name of the setup.
        plants: Kinds of faults, as in `PLANTS`.
        draw: Random generator.
        first_base: First number of settings to draw from.
        n_bases: Number of settings to draw from.
    """
    setup, found = SETUPS[name], []
    n_blocks = int(setup.options["n_layers" if "n_layers" in setup.options else "num_hidden_layers"])
    for cause, kind, dose, start, is_local, n_draws in plants:
        for _ in range(n_draws if _applies(setup, kind) else 0):
            block = int(draw.integers(n_blocks)) if is_local else -1
            plant = Plant(cause, kind, dose(draw), int(start(draw)), block)
            found.append(Case(name, first_base + int(draw.integers(n_bases)), (plant,)))
    return found


def cases(which: str) -> list[Case]:
    """Return all runs of a set: controls, runs with one fault, and pairs of faults of one control."""
    found: list[Case] = []
    for number, (name, setup) in enumerate(SETUPS.items()):
        if setup.set != which:
            continue
        draw = np.random.default_rng([SEED, 1000 + number])
        found += [Case(name, base) for base in range(N_BASES)]
        single = singles(name, PLANTS, draw)
        found += single
        able = [case for case in single if case.plants[0].kind not in NO_PAIRS]
        for _ in range(N_PAIRS):
            one = able[int(draw.integers(len(able)))]
            others = [case for case in able if case.causes != one.causes]
            other = others[int(draw.integers(len(others)))]
            second = Case(name, one.base, other.plants)
            pair = Case(name, one.base, (*one.plants, *other.plants))
            found += [case for case in (second, pair) if case not in found]
        found += singles(name, STRONG_PLANTS, np.random.default_rng([SEED, 2000 + number]))
    return [case for case in dict.fromkeys(found) if not is_refused(case)]


def is_refused(case: Case) -> bool:
    """Return whether a run is impossible, without an auxiliary loss to remove or a residual stream to measure."""
    options, kinds = SETUPS[case.setup].options, {(plant.kind, plant.block) for plant in case.plants}
    starts_as_identity = options.get("initialization") in ("rezero", "fixup")
    return (("router rate", -1) in kinds and "n_experts" not in options) or (
        ("no skip", -1) in kinds and starts_as_identity
    )
