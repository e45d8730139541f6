"""What is known of a step that failed, and where its first value arose that is not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.probes.failed_pass import Around, LossOf, first_bad_tensor

if TYPE_CHECKING:
    from torch import nn

    from workbench.training.step_record import StepRecord
    from workbench.training.training_plan import TrainingPlan


def place_of_failure(model: nn.Module, loss_of: LossOf, *, around: Around) -> str:
    """Run the pass again and tell in a sentence where the first value arises that is not finite.

    Args:
        model: Model, with the weights that the failed pass had.
        loss_of: Function from the model to its loss on the batch of that pass.
        around: Function that returns the context of the pass.

    Returns:
        The sentence; why there is none, if the pass cannot be run again; empty if it does not fail a second time.
    """
    try:
        bad = first_bad_tensor(model, loss_of, around=around)
    except Exception as error:  # noqa: BLE001  (whatever it is, the record of the run is what matters)
        reason = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
        return f"Where it arose is not known ({reason.rstrip('.')})."
    return "" if bad is None else bad.sentence


def evidence(record: StepRecord, plan: TrainingPlan, place: str) -> dict[str, Any]:
    """The source, score and message of a divergence, for its event.

    Args:
        record: Numbers of the step.
        plan: Plan with the limits.
        place: Sentence of `place_of_failure`; may be empty.
    """
    if record.cause == "loss":
        score, limit = record.loss, plan.loss_limit
        what = f"Loss {score:.4g} is above {limit:g}."
    elif record.cause == "grad_norm":
        score, limit = record.grad_norm, plan.grad_norm_limit
        what = f"Gradient norm {score:.4g} is above {limit:g}."
    else:
        score = record.loss if not math.isfinite(record.loss) else record.grad_norm
        what = "Loss or gradients are not finite."
    return {"source": record.cause, "score": score, "message": f"{what} {place}".rstrip()}
