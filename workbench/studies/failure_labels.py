"""The labels of the study of the diagnosis: whether and how a run failed compared with its control, and by which cause.

A run and its control have the same seed, batches and settings, and differ in the injected faults alone. A run counts as
failed in these cases:

- it diverges by the label of `workbench.train`;
- on held-out batches at the end, it lacks 15 % of what its control learned;
- its loss rises temporarily by 40 % of what its control learned (unless batches have few examples and noisy losses);
- at least half of the experts of a block receive no tokens, unlike those of its control.

A control is healthy if none of this applies and it lacks less than 15 % of what the best control of its setup learned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.models.losses import prediction_of, token_loss
from workbench.studies.failure_cases import Case

#: Fraction of what the control learns that a failed run lacks at the end, and that a spike undoes.
LOST, SPIKE = 0.15, 0.4
#: Fraction of the experts of one block without tokens in a run that failed by its routing.
DEAD = 0.5
#: Smallest decrease of the loss of a healthy control, as a fraction of its first loss.
LEARNED = 0.15


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
