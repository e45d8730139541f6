"""Evidence of a diverged step, and the place of its first value that is not finite."""

from __future__ import annotations

import math
import sys
import warnings
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.probes.failed_pass import Around, LossOf, first_bad_tensor

if TYPE_CHECKING:
    from torch import nn

    from workbench.training.step_record import StepRecord
    from workbench.training.training_plan import TrainingPlan


def place_of_failure(model: nn.Module, loss_of: LossOf, *, around: Around) -> str:
    """Repeat a failed pass and describe where the first value that is not finite arises.

    Args:
        model: Model with the parameters of the failed pass.
        loss_of: Function from the model to its loss on the batch of that pass.
        around: Function that returns the context of the pass.

    Returns:
        A sentence; it states the reason if the pass cannot be repeated, and is empty if the repeated pass is finite.
    """
    try:
        bad = first_bad_tensor(model, loss_of, around=around)
    except Exception as error:  # noqa: BLE001  (no error may prevent the record of the run)
        reason = str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
        return f"Its origin is unknown ({reason.rstrip('.')})."
    return "" if bad is None else bad.sentence


def evidence(record: StepRecord, plan: TrainingPlan, place: str) -> dict[str, Any]:
    """Return source, score and message of the event of a divergence.

    Args:
        record: Record of the step.
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


def warn_of_divergence(record: StepRecord, plan: TrainingPlan, place: str, store: object) -> None:
    """Warn whoever iterates over a run that it ends here, and name the next call; arguments as in `evidence`.

    Functions of the workbench that train, such as sweeps, report divergences in their results instead.
    """
    frame = sys._getframe(1).f_back  # of the generator, and of the code that asks it for the next step
    if frame is not None and str(frame.f_globals.get("__name__")).startswith("workbench."):
        return
    what = evidence(record, plan, place)["message"]
    call = "Train with store= and call wb.diagnose(store), which" if store is None else f"wb.diagnose({str(store)!r})"
    warnings.warn(f"The run diverged at step {record.step}. {what} {call} names the likely causes.", stacklevel=3)
