"""Score programs on the practice cases, and compare them with the recorded scores of `workbench.diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.course import case_files
from workbench.course.patients import BUDGETS, Patient, n_patients, patient
from workbench.course.scoring import Score
from workbench.errors import OptionError
from workbench.io.progress import Progress

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

#: A player returns the name of a cause, or several, and the cause whose change is the cure; None for no cure.
Player = Callable[[Patient], tuple[str | Iterable[str], str | None]]
#: Number of bootstrap samples of families for the intervals.
_N_BOOTSTRAP = 1000
#: Column of the board -> recorded variable.
_COLUMNS = {"points": "points", "causes_right": "are_causes_right", "cures_work": "does_cure_work", "spent": "spent"}


def play(
    player: Player,
    level: int | None = None,
    seeds: Iterable[int] | None = None,
    *,
    progress: bool | Callable[[str], None] = True,
) -> xr.Dataset:
    """Let a program play practice cases, and return its scores.

    Each case takes as long as the program, and a few seconds for the replay if it chooses a cure.

    Args:
        player: Function that receives a `workbench.course.Patient` and returns the causes and the cure, as for
            `Patient.finish`. If it raises an exception or returns something else, the case has 0 points.
        level: Level of the cases; None for all levels.
        seeds: Seeds of the cases of each level; None for all cases.
        progress: Whether to show the progress, or a function that receives each progress message and may end the call
            by raising an exception.

    Returns:
        Dataset with dim ``case`` and coordinates ``level`` and ``seed``: ``points`` (0 to 100), of which
        ``cause_points``, ``cure_points`` and ``budget_points``; ``are_causes_right``, ``does_cure_work`` and
        ``recovered`` as in `workbench.course.Score`; ``spent`` (fraction of the budget), and ``problem`` (what the
        program raised; empty if nothing).

    Raises:
        OptionError: If there is no such level, or a seed is negative.

    Example:
        >>> import workbench as wb
        >>> scores = wb.course.play(lambda patient: ("nothing", None), level=3, seeds=range(5), progress=False)
        >>> scores["points"].sizes["case"], float(scores["spent"].max())
        (5, 0.0)

    See Also:
        `workbench.course.board`: Scores to compare with.
    """
    levels = tuple(BUDGETS) if level is None else (level,)
    chosen = None if seeds is None else list(seeds)
    cases = [(n, seed) for n in levels for seed in (range(n_patients(n)) if chosen is None else chosen)]
    rows = []
    with Progress(progress, "played", unit="case", total=len(cases)) as bar:
        for n, seed in cases:
            bar.describe(f"level {n}, seed {seed}")
            one = patient(seed, n)
            score, problem = _score_of(player, one, bar)
            rows.append({"level": n, "seed": seed, "problem": problem, **_numbers(score, one)})
            bar.update()
    return _as_dataset(rows)


def _score_of(player: Player, one: Patient, bar: Progress) -> tuple[Score | None, str]:
    """Return the score, or None and what the program raised."""
    try:
        causes, cure = player(one)
    except Exception as error:  # noqa: BLE001 - the other cases are scored all the same
        return None, f"{type(error).__name__}: {error}"
    try:
        score = one.finish(causes, cure, progress=bar.describe) if one.score is None else one.score
    except (OptionError, TypeError) as error:
        return None, f"{type(error).__name__}: {error}"
    return score, ""


def _numbers(score: Score | None, one: Patient) -> dict[str, Any]:
    if score is None:
        numbers = dict.fromkeys(("points", "cause_points", "cure_points", "budget_points"), 0.0)
        right, works, recovered = False, False, np.nan
    else:
        points = score.parts["points"]
        numbers = {"points": score.points} | {
            f"{name.removesuffix('s')}_points": float(points[name]) for name in ("causes", "cure", "budget")
        }
        right, works, recovered = score.are_causes_right, score.does_cure_work, score.recovered
    return numbers | {
        "are_causes_right": right, "does_cure_work": works, "recovered": recovered, "spent": one.spent / one.budget,
    }  # fmt: skip


def _as_dataset(rows: list[dict[str, Any]]) -> xr.Dataset:
    import xarray as xr

    about = {"points": "0 to 100", "spent": "fraction of the budget", "problem": "what the program raised"}
    columns = {
        name: ("case", [row[name] for row in rows], {"meaning": about[name]} if name in about else {})
        for name in (rows[0] if rows else ())
    }
    data = xr.Dataset(columns)
    return data.set_coords([name for name in ("level", "seed") if name in data])


def board() -> pd.DataFrame:
    """Return the recorded scores of `workbench.diagnose` and of simple baselines on all practice cases.

    The cases are of families of models that neither the rules of `workbench.diagnose` nor the baselines were fitted to.

    Returns:
        Table indexed by ``level`` (1 to 5, and "all") and ``player``, with the columns ``n`` (cases), ``points`` (mean,
        0 to 100), ``causes_right`` (fraction of the cases in which exactly the causes were named), ``cures_work``
        (fraction in which the cure recovers at least half of the lost progress, or a healthy run is left alone) and
        ``spent`` (mean fraction of the budget). ``points_low`` and ``points_high`` (and so on) are the limits of 95 %
        intervals from resampled families.

    Example:
        >>> import workbench as wb
        >>> board = wb.course.board()
        >>> board.loc[("all", "wb.diagnose"), "points"] > board.loc[("all", "random"), "points"]
        np.True_

    See Also:
        `workbench.course.play`: Scores a program on the same cases.
    """
    import pandas as pd

    with case_files.opened() as data:
        scores = data[["level", "family", *(f"board_{name}" for name in _COLUMNS.values())]].load()
    rows = []
    levels = scores["level"].values
    for level in (*BUDGETS, "all"):
        chosen = scores.isel(patient=np.flatnonzero(levels == level) if level != "all" else slice(None))
        for player in map(str, chosen["player"].values):
            of_player = chosen.sel(player=player)
            values = {name: of_player[f"board_{variable}"].values for name, variable in _COLUMNS.items()}
            rows.append({"level": level, "player": player, **_means(values, of_player["family"].values)})
    return pd.DataFrame(rows).set_index(["level", "player"])


def _means(values: dict[str, np.ndarray], family: np.ndarray) -> dict[str, float]:
    """Return the number of cases, and each mean with its interval from resampled families."""
    names, of_case, sizes = np.unique(family, return_inverse=True, return_counts=True)
    drawn = np.random.default_rng(0).integers(len(names), size=(_N_BOOTSTRAP, len(names)))
    counts = np.stack([np.bincount(row, minlength=len(names)) for row in drawn])
    found: dict[str, float] = {"n": len(family)}
    for name, column in values.items():
        means = counts @ np.bincount(of_case, weights=column) / (counts @ sizes)
        low, high = np.quantile(means, [0.025, 0.975])
        found |= {name: float(column.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
    return found
