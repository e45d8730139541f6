"""The causes that a diagnosis distinguishes, and the kind of each."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.schema.statuses import CauseKind


@dataclass(frozen=True)
class Cause:
    """A cause of failure.

    Attributes:
        title: Name shown to the user.
        kind: Kind of the cause.
        meaning: Explanation in one line.
    """

    title: str
    kind: CauseKind
    meaning: str


CAUSES: dict[str, Cause] = {
    "learning_rate": Cause(
        "learning rate too high", CauseKind.HYPERPARAMETER, "the peak rate is above the useful edge"
    ),
    "schedule": Cause(
        "schedule",
        CauseKind.HYPERPARAMETER,
        "the peak rate is right but its schedule is not: no warm-up, a jump, an early end",
    ),
    "batch": Cause(
        "batch too small", CauseKind.HYPERPARAMETER, "gradients of so few examples are mostly noise at this rate"
    ),
    "optimizer_eps": Cause(
        "optimizer's eps too large", CauseKind.HYPERPARAMETER, "eps, not the gradients' size, rules the updates"
    ),
    "architecture": Cause(
        "architecture", CauseKind.ARCHITECTURE, "a block, or the whole stack, cannot carry the signal as it is built"
    ),
    "precision": Cause(
        "precision fault", CauseKind.PRECISION, "arithmetic with too few bits makes gradients or weights wrong"
    ),
    "routing": Cause(
        "routing", CauseKind.ROUTING, "the router, or the loss that is to balance it, sends tokens astray"
    ),
    "data": Cause("burst of bad data", CauseKind.DATA, "batches unlike the others came in between"),
    "nothing": Cause("nothing wrong", CauseKind.NONE, "the run learns as runs without a fault do"),
}
