"""Evaluate a rule for stopping a run after its first updates: the fractions of bad and of good runs that it stops.

    python data/judge_stop_rules.py

Reads ``rates.nc``, writes ``stop_rules.csv``. The rule stops a run whose training loss after ``update`` updates is more
than ``margin`` above that of the best rate at that time (of runs of other seeds, which represent the pilot). A run is
bad if it ends above the loss that the best rate has after four fifths of the updates. The baseline is the simplest
rule: a loss that is not finite or above twice its first value. `wb.assess` proposes the smallest margin that stops at
most 2 % of the good runs of 480 updates in the sets "fit" and "choose", after the number of updates of its pilot.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from workbench.io.atomic import replacing
from workbench.rates.outcomes import REFERENCE_SHARE

HERE = Path(__file__).parent
#: Updates of a window of the recorded training loss; the loss is the mean of two windows.
WINDOW = 10
UPDATES, MARGINS = (40, 80, 200, 400), (0.3, 0.5, 0.8, 1.2)
STUDIES = {"480 updates": ("coarse", "fine", "wider"), "2,000 updates": ("long",)}
SETS = {"fit and choose": ("fit", "choose"), "locked": ("locked",)}


@dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        is_bad: Whether its rate is not useful.
        excess: Loss above the best loss at the same time, by number of updates.
        stands_out: Whether the simplest rule stops the run, by number of updates.
    """

    is_bad: bool
    excess: dict[int, float]
    stands_out: dict[int, bool]


def loss_at(run: xr.Dataset, update: int) -> np.ndarray:
    """Return the training loss of every run after ``update`` updates."""
    last = update // WINDOW
    return run["training_loss"].values[:, last - 2 : last].mean(axis=1)


def runs_of(cell: xr.Dataset) -> list[Run]:
    """Return the runs of one design, task and number of updates, each compared with those of other seeds."""
    found = []
    rate, seed = cell["learning_rate"].values, cell["seed"].values
    held_out, first = cell["held_out_loss"].values, cell["initial_loss"].values
    early = {update: loss_at(cell, update) for update in UPDATES}
    at = round(REFERENCE_SHARE * held_out.shape[1]) - 1
    for i in range(cell.sizes["run"]):
        others = [np.flatnonzero((rate == each) & (seed != seed[i])) for each in np.unique(rate)]
        others = [runs for runs in others if len(runs)]
        final = np.array([held_out[runs, -1].mean() for runs in others])
        if not np.isfinite(final).any():
            continue
        reference = held_out[others[int(np.nanargmin(final))], at].mean()
        best = {update: np.nanmin([early[update][runs].mean() for runs in others]) for update in UPDATES}
        found.append(
            Run(
                not held_out[i, -1] <= reference,
                {update: float(early[update][i] - best[update]) for update in UPDATES},
                {update: bool(not early[update][i] <= 2 * first[i]) for update in UPDATES},
            )
        )
    return found


def main() -> None:
    """Evaluate and write the table."""
    import pandas as pd

    rates = xr.load_dataset(HERE / "rates.nc")
    rows = []
    for (name, stages), (of, sets) in itertools.product(STUDIES.items(), SETS.items()):
        chosen = rates.isel(run=np.isin(rates["stage"].values, stages) & np.isin(rates["study"].values, sets))
        cells = [chosen.isel(run=chosen["cell"].values == cell) for cell in dict.fromkeys(chosen["cell"].values)]
        runs = [run for cell in cells for run in runs_of(cell)]
        length = int(chosen["n_steps"].values.max())
        bad, good = [run for run in runs if run.is_bad], [run for run in runs if not run.is_bad]
        for update, margin in itertools.product(UPDATES, MARGINS):
            stopped = [np.array([not run.excess[update] <= margin for run in part]) for part in (bad, good)]
            plain = [np.array([run.stands_out[update] for run in part]) for part in (bad, good)]
            rows.append({
                "updates": name, "set": of, "after": update, "margin": margin, "bad runs": len(bad),
                "good runs": len(good), "bad stopped": stopped[0].mean(), "good stopped": stopped[1].mean(),
                "saved": stopped[0].sum() / len(runs) * (1 - update / length),
                "bad stopped, plainest": plain[0].mean(), "good stopped, plainest": plain[1].mean(),
            })  # fmt: skip
    with replacing(HERE / "stop_rules.csv") as partial:
        pd.DataFrame(rows).to_csv(partial, index=False, float_format="%.3f")


if __name__ == "__main__":
    main()
