"""Compare several designs under one plan and budget: useful learning rates, loss and compute cost."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from workbench.assessment.assess import PARTS, assess_measured
from workbench.assessment.measured_model import MeasuredModel, flops_per_token, measured_model, planned_task
from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.formatting import counted
from workbench.hardware import read_plan
from workbench.hardware.plan_files import AssessmentPlan
from workbench.io.progress import Progress
from workbench.io.provenance import versions
from workbench.models.losses import token_loss
from workbench.option_checks import Seed, checked
from workbench.schema.runs import SCHEMA_VERSION
from workbench.schema.statuses import Verdict

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

#: Number of timed updates of each design, taken in turns; the median excludes the influence of slow first updates.
N_TIMED = 12
#: Losses are rounded to multiples of this when designs are compared, in nat.
SAME_LOSS = 0.02
#: Time of these updates, as a percentage of the time of an assessment.
_TIME_OF_STEPS = 3
#: Names of the comparison's own parts, which no design may have.
_RESERVED = ("designs",)
#: Columns that are variables of the pilot of each design.
OF_PILOT = [f"{name}{end}" for name in ("useful_edge", "best_rate") for end in ("", "_low", "_high")]


@checked
def compare_designs(
    designs: Mapping[str, Any],
    task: Any = None,
    *,
    plan: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    seed: Seed = 0,
    progress: bool | Callable[[str], None] = True,
) -> xr.DataTree:
    """Assess several designs under one plan, and compare verdicts, useful rates, losses and compute cost.

    Args:
        designs: Name -> subject, as in `workbench.assess`; at least two.
        task: As in `workbench.assess`; the same for all designs.
        plan: As in `workbench.assess`, with the budget in ``[budget]``.
        loss: As in `workbench.assess`; the same for all designs.
        seed: Seed of freshly initialized parameters and of data.
        progress: As in `workbench.assess`.

    Returns:
        DataTree of kind "comparison": the assessment of each design under its name, and the node ``designs`` with dim
        ``design``:

        - ``verdict``, ``structure_state`` and ``pilot_state``;
        - ``useful_edge`` (largest useful learning rate) and ``best_rate``, each with ``_low`` and ``_high``, and
          ``rate_margin`` (largest useful rate over the planned rate); NaN where the pilot did not find them;
        - ``loss_at_best``: held-out loss at the best rate in the last round of the pilot, of the model that was run,
          in nat; NaN if no round finished;
        - ``n_weights``: number of parameters;
        - ``flops_per_token``: compute cost, forward and backward;
        - ``relative_step_time``: time of an update of the measured model, over that of the fastest one;
        - ``steps_in_budget``: NaN if the plan sets no budget;
        - ``is_dominated``: whether another design is at least as good in verdict, loss at its best rate and compute
          cost, and better in one of them.

    Raises:
        OptionError: If there are fewer than two designs, a name cannot be used in a tree, or the plan does not fit a
            design.

    Example:
        >>> import workbench as wb
        >>> designs = {"small": "gpt2", "state space": "mamba-130m"}
        >>> tree = wb.compare_designs(designs, plan="plan.toml")  # doctest: +SKIP
        >>> tree = wb.samples.open("assessments")  # a recorded comparison of four published designs
        >>> tree["designs"]["design"].values.tolist()
        ['gpt2', 'llama-2-7b', 'mixtral-8x7b', 'qwen3-8b']

    See Also:
        `workbench.assess`: Assesses one design.
        `workbench.report`: Writes a comparison as a report.
    """
    import xarray as xr

    start = time.monotonic()
    if len(designs) < 2:
        raise OptionError.of("designs", designs, "a mapping of at least two designs", remedy="add another design")
    for name in designs:
        if not name or "/" in name or name in _RESERVED:
            raise OptionError(
                f"The name '{name}' cannot be used for a design; choose a name without '/' other than 'designs'."
            )
    plan = read_plan(plan)
    size = {"width": plan.target.width, "depth": plan.target.depth}
    found = {name: measured_model(subject, seed=seed, **size) for name, subject in designs.items()}
    for each in found.values():  # all plans are checked before the first design is measured
        plan.check_against(each.design or each.model)
    trees, total = {}, len(designs) * (sum(PARTS.values()) + _TIME_OF_STEPS)
    with Progress(progress, f"compared {counted(len(designs), 'design')}", total=total, unit="%") as bar:
        for name, each in found.items():
            bar.heading = f"{name}: "
            trees[name] = assess_measured(each, task, plan, loss, seed, bar)
        bar.heading = ""
        bar.begin("times of an update", len(designs) * _TIME_OF_STEPS)
        times = step_times({name: each.model for name, each in found.items()}, task, plan, loss=loss, seed=seed)
    rows = [_row(trees[name], found[name], plan) for name in designs]
    data = {name: ("design", np.array([row[name] for row in rows])) for name in rows[0]}
    data["relative_step_time"] = ("design", np.array([times[name] for name in designs]) / min(times.values()))
    table = xr.Dataset(data, {"design": list(designs)})
    table["is_dominated"] = ("design", dominated(table))
    for name, (long_name, units) in _MEANING.items():
        for end, about in (("", ""), ("_low", ", lower end"), ("_high", ", upper end")):
            if f"{name}{end}" in table:
                table[f"{name}{end}"].attrs = {"long_name": f"{long_name}{about}", "units": units}
    tree = xr.DataTree.from_dict({"designs": table, **trees})
    tree.attrs = {
        "kind": "comparison",
        "subject": " or ".join(designs),
        "plan": json.dumps(plan.as_dict(), default=str),
        "seed": seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration": time.monotonic() - start,
        "schema_version": SCHEMA_VERSION,
    }
    return tree


_MEANING = {
    "verdict": ("verdict", ""),
    "structure_state": ("structure", ""),
    "pilot_state": ("pilot", ""),
    "useful_edge": ("largest useful rate", "1"),
    "best_rate": ("best rate", "1"),
    "rate_margin": ("largest useful rate over the planned rate", "1"),
    "loss_at_best": ("loss at the best rate of the pilot, of the model that was run", "nat"),
    "n_weights": ("parameters", "1"),
    "flops_per_token": ("compute cost per token, forward and backward", "FLOP"),
    "relative_step_time": ("time of an update over that of the fastest design, of the models that were run", "1"),
    "steps_in_budget": ("updates within the budget", "1"),
    "is_dominated": ("another design is nowhere worse in verdict, loss and compute cost, and better in one", ""),
}


def _row(tree: xr.DataTree, measured: MeasuredModel, plan: AssessmentPlan) -> dict[str, Any]:
    pilot = tree["pilot"].to_dataset()
    found = {name: float(pilot[name]) for name in OF_PILOT}
    return {
        **{name: tree.attrs[name] for name in ("verdict", "structure_state", "pilot_state")},
        **found,
        "rate_margin": found["useful_edge"] / float(pilot["planned_rate"]),
        "loss_at_best": float(pilot["loss_at_best"]),
        "n_weights": measured.n_weights,
        "flops_per_token": flops_per_token(measured, plan),
        "steps_in_budget": tree.attrs["steps_in_budget"],
    }


def step_times(
    models: Mapping[str, nn.Module],
    task: Any,
    plan: AssessmentPlan,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    seed: int,
) -> dict[str, float]:
    """Measure the median time of an update of each model, in seconds.

    Copies of the models are updated in turns, so that other load on the machine slows all of them equally.
    """
    from workbench.tasks import as_task

    runs = {}
    for name, model in models.items():
        batches = planned_task(model, plan, seed=seed, loss=loss) if task is None else task
        runs[name] = train(
            copy.deepcopy(model),
            as_task(batches),
            n_steps=N_TIMED + 1,
            learning_rate=1e-6,
            stops_at_divergence=False,
            loss=loss,
        )
        next(runs[name])
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(N_TIMED):
        for name, run in runs.items():
            start = time.perf_counter()
            next(run)
            taken[name].append(time.perf_counter() - start)
    for run in runs.values():
        cast(Generator[Any, None, None], run).close()
    return {name: float(np.median(seconds)) for name, seconds in taken.items()}


def dominated(table: xr.Dataset) -> np.ndarray:
    """Return for each design whether it is dominated, bool of shape (design,).

    A design is dominated if another one is at least as good in verdict, loss at its best rate and compute cost, and
    better in one of them. Losses are rounded to ``SAME_LOSS``; a design without a loss neither dominates nor is
    dominated.
    """
    scores = np.column_stack(
        [
            [Verdict(verdict).severity for verdict in table["verdict"].values],
            table["flops_per_token"].values,
            np.round(table["loss_at_best"].values / SAME_LOSS),
        ]
    )
    return np.array([any((other <= own).all() and (other < own).any() for other in scores) for own in scores])
