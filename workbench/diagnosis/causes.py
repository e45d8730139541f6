"""What may have gone wrong: the causes that a diagnosis tells apart, and what kind each is of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A cause of failure.

    Attributes:
        title: For people.
        kind: ``"hyperparameter"``, ``"architecture"``, ``"precision"``, ``"routing"`` or ``"data"``.
        meaning: One line.
    """

    title: str
    kind: str
    meaning: str


CAUSES: dict[str, Cause] = {
    "learning_rate": Cause("learning rate too high", "hyperparameter", "the peak rate is more than this model bears"),
    "schedule": Cause(
        "schedule",
        "hyperparameter",
        "the rate has the right size and the wrong course: no warm-up, a jump, an early end",
    ),
    "batch": Cause("batch too small", "hyperparameter", "gradients of so few rows are mostly noise at this rate"),
    "optimizer_eps": Cause(
        "optimizer's eps too large", "hyperparameter", "eps, not the gradients' size, rules the updates"
    ),
    "architecture": Cause(
        "architecture", "architecture", "a block, or the whole stack, cannot carry the signal as it is built"
    ),
    "precision": Cause("precision fault", "precision", "arithmetic with too few bits makes gradients or weights wrong"),
    "routing": Cause("routing", "routing", "the router, or the loss that is to balance it, sends tokens astray"),
    "data": Cause("burst of bad data", "data", "batches unlike the others came in between"),
}

#: Kinds of cause, in order.
KINDS = tuple(dict.fromkeys(cause.kind for cause in CAUSES.values()))
