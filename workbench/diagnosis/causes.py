"""The causes that a diagnosis distinguishes, and their kinds."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.schema.statuses import CauseKind


@dataclass(frozen=True)
class Cause:
    """A cause of failure, with the name and the one-clause explanation that are shown to the user."""

    title: str
    kind: CauseKind
    meaning: str


CAUSES: dict[str, Cause] = {
    "learning_rate": Cause("learning rate too high", CauseKind.HYPERPARAMETER,
        "the peak learning rate is above the useful edge"),
    "schedule": Cause("schedule", CauseKind.HYPERPARAMETER,
        "the peak learning rate is suitable but its schedule is not: no warm-up, a jump, or an early decay"),
    "batch": Cause("batch too small", CauseKind.HYPERPARAMETER,
        "with so few examples, the gradients are mostly noise at this learning rate"),
    "optimizer_eps": Cause("optimizer's eps too large", CauseKind.HYPERPARAMETER,
        "eps, not the magnitude of the gradients, determines the updates"),
    "architecture": Cause("architecture", CauseKind.ARCHITECTURE,
        "a block, or the entire stack, does not propagate the signal"),
    "precision": Cause("precision fault", CauseKind.PRECISION,
        "arithmetic in low precision corrupts gradients or parameters"),
    "routing": Cause("routing", CauseKind.ROUTING, "the router, or its balance loss, assigns tokens badly to experts"),
    "data": Cause("burst of bad data", CauseKind.DATA, "some batches differ from all others"),
    "nothing": Cause("nothing wrong", CauseKind.NONE, "the run learns like runs without a fault"),
}  # fmt: skip
#: Causes that only facts establish, because no recorded run of the study has them.
OF_FACTS: dict[str, Cause] = {
    "wiring": Cause("wiring of the training step", CauseKind.WIRING,
        "gradients or updates do not reach the parameters as intended, or a setting changed without a plan"),
    "loss_scale": Cause("loss scale", CauseKind.PRECISION,
        "the scale of half precision is removed too late, or makes updates overflow"),
    "labels": Cause("labels or loss", CauseKind.DATA, "the loss does not measure what the model should learn"),
    "loader": Cause("data loader", CauseKind.DATA, "batches repeat, or hold little besides one token"),
}  # fmt: skip
#: Cause of runs with another fault than those that the ranking knows.
UNKNOWN = "unknown"
#: Every cause that a diagnosis may contain. A record never shows that a run has no fault.
ALL_CAUSES: dict[str, Cause] = {
    **CAUSES,
    **OF_FACTS,
    UNKNOWN: Cause("another cause", CauseKind.UNKNOWN, "a fault that the study of recorded runs does not have"),
    "nothing": Cause("nothing found", CauseKind.NONE, "what was recorded looks like that of runs without a fault"),
}
