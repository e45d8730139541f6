"""The list of runs of the study of the diagnosis, and their labels: whether and how a run failed, and by which cause.

Doses, places and settings are drawn from wide ranges. A run and its control have the same seed, batches and settings,
and differ in the injected faults alone. A run counts as failed in these cases:

- it diverges by the label of `workbench.train`;
- on held-out batches at the end, it lacks 15 % of what its control learned;
- its loss rises temporarily by 40 % of what its control learned (unless batches have few examples and noisy losses);
- at least half of the experts of a block receive no tokens, unlike those of its control.

A control is healthy if none of this applies and it lacks less than 15 % of what the best control of its setup learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.course.failure_runs import SEED, SETUPS, Case, Plant, StudySetup

#: Number of settings drawn for each setup.
N_BASES = 8
#: Number of pairs of faults for each setup.
N_PAIRS = 3
#: Fraction of what the control learns that a failed run lacks at the end, and that a spike undoes.
LOST, SPIKE = 0.15, 0.4
#: Fraction of the experts of one block without tokens in a run that failed by its routing.
DEAD = 0.5
#: Smallest decrease of the loss of a healthy control, as a fraction of its first loss.
LEARNED = 0.15


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


def answer(case: Case, results: Mapping[Case, Mapping[str, Any]]) -> tuple[tuple[str, ...], str]:
    """Return the causes of a run and how it failed; no cause if there was no harm or a single fault is not recorded.

    Of a pair of faults, the causes are those that make the run fail alone, or both if neither does.

    Args:
        case: The case.
        results: Case -> what `verdict` reads, for the case, its control, and each fault of a pair alone.
    """
    if not case.plants:
        return ("nothing",), ""
    how = verdict(results[case], results[case.control])
    if not how:
        return (), ""
    if len(case.plants) == 1:
        return case.causes, how
    alone = [replace(case, plants=(plant,)) for plant in case.plants]
    if any(one not in results for one in alone):
        return (), how
    harmful = [one.causes[0] for one in alone if verdict(results[one], results[case.control])]
    return tuple(harmful) or case.causes, how


def verdict(result: Mapping[str, Any], control: Mapping[str, Any]) -> str:
    """Return how a run failed compared with its control: "diverged", "spike", "learned less", "experts died" or "".

    Args:
        result: ``diverged``, ``final_loss`` (held out, in nat), ``rise`` (from `largest_rise`), ``dead_share`` (largest
            fraction of the experts of a block without tokens) and ``plants`` (injected faults as dictionaries).
        control: The same of the control, with ``start_loss`` (held out, in nat).
    """
    learned = control["start_loss"] - control["final_loss"]
    if result["diverged"]:
        return "diverged"
    # The loss of a batch of a few examples is noisy, so that only the final loss counts.
    has_few_rows = any(plant["cause"] == "batch" for plant in result["plants"])
    if not has_few_rows and result["rise"] > SPIKE * learned + control["rise"]:
        return "spike"
    if not result["final_loss"] <= control["final_loss"] + LOST * learned:
        return "learned less"
    return "experts died" if result["dead_share"] >= DEAD > control["dead_share"] else ""


def is_healthy(control: Mapping[str, Any], results: Mapping[Case, Mapping[str, Any]]) -> bool:
    """Return whether a control is healthy compared with the best control of its setup."""
    of_setup = [r for case, r in results.items() if case.setup == control["setup"] and not case.plants]
    best = min(r["final_loss"] for r in of_setup if math.isfinite(r["final_loss"]))
    learned = control["start_loss"] - control["final_loss"]
    return (
        not control["diverged"]
        and learned > LEARNED * control["start_loss"]
        and control["rise"] < SPIKE * learned
        and control["dead_share"] < DEAD
        and control["final_loss"] <= best + LOST * learned
    )
