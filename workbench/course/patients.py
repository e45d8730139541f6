"""Practice cases: runs with a hidden cause and a budget of measurements to find it, and programs that play them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from workbench.course import case_files, cures, scoring
from workbench.course.failure_runs import N_STEPS
from workbench.course.scoring import Score
from workbench.diagnosis import CAUSES
from workbench.errors import OptionError, require_listed
from workbench.io.progress import Progress
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt
from workbench.schema.runs import SCHEMA_VERSION

if TYPE_CHECKING:
    import pandas as pd

#: Measurement -> part of the run, its variables (None for all), and what it shows.
MEASUREMENTS: dict[str, tuple[str, tuple[str, ...] | None, str]] = {
    "loss": ("monitors", ("loss",), "loss of the batch at every step, and whether the run diverged"),
    "grad_norm": ("monitors", ("grad_norm",), "norm of all gradients together at every step, before clipping"),
    "log": ("monitors", ("learning_rate", "batch_size", "auxiliary_loss"),
        "learning rate, batch size and auxiliary loss at every step, as a log would show them"),
    "settings": ("", None, "model, task and plan as configured; a fault of the code is not among them"),
    "batches": ("monitors",
        ("label_agreement", "label_entropy", "token_entropy", "repeated_examples", "largest_losses"),
        "labels and tokens of every batch: entropy, agreement with the inputs, repeated examples, largest losses"),
    "optimizer": ("optimizer", None, "by block, every 5 steps: gradients, updates, weights, and Adam's moments"),
    "activations": ("activations", None, "by block, every 5 steps: norm, largest value and kurtosis of the states"),
    "attention": ("attention", None, "by head, every 20 steps: logits, entropy, and updates of queries and keys"),
    "router": ("router", None, "by block, every 10 steps: load of the experts and entropy of the routing; empty in a "
               "model without experts"),
    "curvature": ("curvature", None, "every 60 steps: sharpness of the loss, relative to the learning rate"),
    "spectra": ("spectra", None, "by block, at the start, in the middle and at the end: Koopman spectrum"),
}  # fmt: skip
#: Level -> budget, as a number of replays in addition to a fraction of all measurements.
BUDGETS: dict[int, tuple[int, float]] = {1: (2, 1.0), 2: (1, 1.0), 3: (1, 0.7), 4: (1, 0.4), 5: (0, 0.4)}
_COMPLAINTS = (
    "I trained this model, and I do not trust the result. Is something wrong?",
    "Before we train the large model, can you check this run?",
    "My colleague says that this run could have been better. Is that so, and why?",
    "This is one of our runs from last night. Should we change anything before the next one?",
    "We need a second opinion on this run: what would you change, if anything?",
    "The deadline is tomorrow. Can we use this run, or did it fail?",
)


def patient(seed: NonNegativeInt, level: int = 1) -> Patient:
    """Return a practice case: a failed or healthy run with a hidden cause, and a budget of measurements to find it.

    Args:
        seed: Any whole number from 0 on; the same seed is always the same case. The seeds from 0 to n - 1, where n is
            `n_patients` of the level, are all cases of the level; after that they repeat.
        level: 1 to 5, from clear failures with a large budget to healthy runs among mild failures with a small budget:

            1. Clear failures with one cause: the run diverged, or lacks at least half of what it should have learned.
            2. Moderate failures with one cause: the run lacks at least a quarter, or its loss rose for a time, or
               experts died.
            3. Clear and moderate failures, and healthy runs.
            4. Mild failures with one cause (the run lacks 15 to 25 %), and healthy runs.
            5. Mild failures, failures with two causes, and healthy runs, with a budget that is too small for a replay.

    Returns:
        The case.

    Raises:
        OptionError: If the seed is negative, or there is no such level.

    Example:
        >>> import workbench as wb
        >>> patient = wb.course.patient(3, level=1)
        >>> loss = patient.measure("loss")["loss"]
        >>> loss.dims, patient.spent
        (('step',), 1)

    See Also:
        `workbench.course.play`: Lets a program play many cases.
        `workbench.course.board`: Scores to compare with.
    """
    return Patient(seed, level)


def n_patients(level: int | None = None) -> int:
    """Return the number of different cases of a level, or of all levels together.

    Args:
        level: 1 to 5; None for all levels.

    Raises:
        OptionError: If there is no such level.

    Example:
        >>> import workbench as wb
        >>> wb.course.n_patients() >= 300
        True

    See Also:
        `workbench.course.patient`: Returns a case.
    """
    counts = case_files.counts()
    return sum(counts.values()) if level is None else counts[_checked(level)]


class Patient:
    """A practice case: a run with a hidden cause, of which only what is measured is known.

    `workbench.course.patient` returns one. It holds neither the cause nor whether the run failed. Measurements cost as
    much as they take of the compute of the training, in percent: a replay of the whole run costs 100.

    Args:
        seed: As in `workbench.course.patient`.
        level: As in `workbench.course.patient`.

    Attributes:
        seed: As above.
        level: As above.
        complaint: What its owner says; the same whatever is wrong.
        budget: What all measurements and replays together may cost.
        spent: What they have cost so far.
        cure_cost: Cost of `try_cure`.
        score: The score; None until `finish`.

    Example:
        >>> import workbench as wb
        >>> patient = wb.course.patient(3, level=1)
        >>> patient
        Patient(seed=3, level=1)
        >>> patient.score is None
        True

    See Also:
        `workbench.course.patient`: Describes the levels.
        `workbench.diagnose`: Diagnoses the record.
    """

    @checked
    def __init__(self, seed: NonNegativeInt, level: int = 1) -> None:
        self.seed, self.level = seed, _checked(level)
        self.complaint = _COMPLAINTS[self.seed % len(_COMPLAINTS)]
        self._costs = case_files.costs()
        self.cure_cost = self._costs.pop("cure")
        n_replays, fraction = BUDGETS[self.level]
        self.budget = round(n_replays * self.cure_cost + fraction * sum(self._costs.values()))
        self.spent = 0
        self.score: Score | None = None
        self._taken: dict[str, xr.Dataset] = {}
        self._tried: dict[str, xr.Dataset] = {}

    def __repr__(self) -> str:
        return f"Patient(seed={self.seed}, level={self.level})"

    @property
    def remaining(self) -> int:
        """What is left of the budget."""
        return self.budget - self.spent

    @property
    def measurements(self) -> pd.DataFrame:
        """Table of all measurements, the same for every case.

        Indexed by ``name``, with the columns ``cost`` (percent of the compute of the training), ``description`` and
        ``is_taken``.
        """
        import pandas as pd

        rows = [(name, self._costs[name], about, name in self._taken) for name, (_, _, about) in MEASUREMENTS.items()]
        return pd.DataFrame(rows, columns=["name", "cost", "description", "is_taken"]).set_index("name")

    @property
    def cures(self) -> dict[str, str]:
        """Cause -> the change that `try_cure` replays, one sentence; the same for every case."""
        return dict(cures.CURES)

    @property
    def record(self) -> xr.DataTree:
        """Everything that was measured so far, as a run.

        `workbench.diagnose` and the plots accept it as soon as the loss was measured.
        """
        parts: dict[str, list[xr.Dataset]] = {}
        for name, data in self._taken.items():
            if name != "settings" and data.data_vars:
                parts.setdefault(MEASUREMENTS[name][0], []).append(data)
        tree = xr.DataTree.from_dict({f"/{part}": xr.merge(found) for part, found in parts.items()})
        if "loss" in self._taken:
            tree["events"] = xr.DataTree(case_files.events_of(self._taken["loss"]))
        tree.attrs = {"schema_version": SCHEMA_VERSION, "subject": f"patient {self.seed} of level {self.level}"}
        if "settings" in self._taken:
            tree.attrs["configuration"] = self._taken["settings"].attrs["configuration"]
        return tree.copy(deep=True)

    def measure(self, name: str) -> xr.Dataset:
        """Take a measurement and add it to `record`; the budget is charged once, also if it shows nothing.

        Args:
            name: A name in `measurements`.

        Returns:
            The measured variables by ``step`` and, depending on the part, ``layer``, ``head``, ``expert``, ``module``
            or ``mode``; empty if the model has no such part. For "settings": ``value`` as text, by ``setting``.

        Raises:
            OptionError: If there is no such measurement, it costs more than what is left, or the case is finished.
        """
        require_listed("name", [name], MEASUREMENTS)
        if name not in self._taken:
            self._check_budget(name, self._costs[name])
            with self._opened() as case:
                self._taken[name] = _settings(case) if name == "settings" else _part(case, name)
            self.spent += self._costs[name]
        return self._taken[name].copy(deep=True)

    def try_cure(self, cause: str, *, progress: bool | Callable[[str], None] = True) -> xr.Dataset:
        """Replay the whole run with the change for a cause; takes a few seconds.

        The change is the one that `workbench.diagnose` proposes for the complete record. The budget is charged once.

        Args:
            cause: A name in `cures`.
            progress: Whether to show the progress, or a function that receives each progress message; an exception that
                it raises ends the replay, which then costs nothing.

        Returns:
            Dataset with the dimension ``step`` and the variables ``loss`` (of the run) and ``cured_loss`` (of the
            replay), in nat, NaN from the step at which a run diverged, and ``held_out_loss`` and
            ``cured_held_out_loss`` at the end. The attribute ``sentence`` says what happened, ``change`` is the change.

        Raises:
            OptionError: If there is no cure for this cause, it costs more than what is left, or the case is finished.
        """
        require_listed("cause", [cause], cures.CURES)
        if cause not in self._tried:
            self._check_budget("cure", self.cure_cost)
            self._tried[cause] = self._replay(cause, progress)
            self.spent += self.cure_cost
        return self._tried[cause].copy(deep=True)

    def finish(
        self, causes: str | Iterable[str], cure: str | None = None, *, progress: bool | Callable[[str], None] = True
    ) -> Score:
        """Name the causes, choose a cure, and end the case; afterwards nothing can be measured.

        If a cure is chosen that was not tried, the run is replayed with it, which takes a few seconds and costs
        nothing.

        Args:
            causes: Name of a cause, or several: a key of `cures`, or "nothing" if the run is healthy.
            cure: Cause whose change is made: a key of `cures`; None for none.
            progress: As in `try_cure`; an exception that the function raises leaves the case open.

        Returns:
            The score, which is also `score` afterwards.

        Raises:
            OptionError: If a name is unknown, "nothing" is combined with another cause, or the case is finished.
        """
        named = (causes,) if isinstance(causes, str) else tuple(dict.fromkeys(causes))
        require_listed("causes", named, CAUSES)
        if not named or ("nothing" in named and len(named) > 1):
            raise OptionError.of("causes", named, "one or several causes, or 'nothing' alone")
        cure = None if cure == "nothing" else cure
        require_listed("cure", [cure], (*cures.CURES, None))
        self._check_open()
        with self._opened() as case:
            truth, run = case_files.truth_of(case), case_files.whole_run(case)
        outcome = None
        if cure is not None and truth.how:  # no cure improves a healthy run
            tried = self._tried[cure] if cure in self._tried else self._replay(cure, progress)
            outcome = cures.Outcome(
                title=str(tried.attrs["change"]),
                problem=str(tried.attrs["problem"]),
                losses=tried["cured_loss"].values,
                final_loss=float(tried["cured_held_out_loss"]),
                rise=float(tried["cured_rise"]),
                dead_share=float(tried["cured_dead_share"]),
            )
        self.score = scoring.score(truth, run, named, cure, outcome, self.remaining / self.budget)
        return self.score

    def _opened(self) -> Any:
        return case_files.opened_case(self.level, self.seed % n_patients(self.level))

    def _check_open(self) -> None:
        if self.score is not None:
            raise OptionError(
                "This case is finished; open another one with wb.course.patient().",
            )  # fmt: skip

    def _check_budget(self, name: str, cost: int) -> None:
        self._check_open()
        if cost > self.remaining:
            raise OptionError(
                f"'{name}' costs {cost}, but only {self.remaining} of {self.budget} are left; name the causes with "
                "finish().",
            )  # fmt: skip

    def _replay(self, cause: str, progress: bool | Callable[[str], None]) -> xr.Dataset:
        with self._opened() as case:
            truth, run = case_files.truth_of(case), case_files.whole_run(case)
        with Progress(progress, "replayed", unit="step", total=N_STEPS) as bar:
            bar.describe("with the cure")
            outcome = cures.replay(truth, run, cause, bar.update)
        return _as_dataset(outcome, run, truth.result["final_loss"])


def _checked(level: int) -> int:
    require_listed("level", [level], BUDGETS)
    return int(level)


def _part(case: xr.Dataset, name: str) -> xr.Dataset:
    part, variables, _ = MEASUREMENTS[name]
    return case_files.unpack(case, part, variables)


def _settings(case: xr.Dataset) -> xr.Dataset:
    """Return the settings of a case as text, and as JSON in an attribute."""
    text = case_files.configuration(case)
    flat = dict(_flat(json.loads(text)))
    return xr.Dataset(
        {"value": ("setting", [str(value) for value in flat.values()])},
        {"setting": list(flat)},
        {"configuration": text},
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _as_dataset(outcome: cures.Outcome, run: xr.DataTree, final_loss: float) -> xr.Dataset:
    """Return the result of a replay next to the run."""
    monitors = run["monitors"].to_dataset()
    loss = monitors["loss"].reindex(step=np.arange(N_STEPS)).values
    has_diverged = int(monitors.attrs["diverged_at"]) >= 0
    if has_diverged:
        loss[int(monitors.attrs["diverged_at"]) :] = math.nan
    ends = [
        "diverged" if bad else f"ended at a held-out loss of {value:.3g}"
        for bad, value in ((outcome.has_diverged, outcome.final_loss), (has_diverged, final_loss))
    ]
    sentence = f"With {outcome.title}, the replay {ends[0]}; the run {ends[1]}."
    if outcome.problem:
        sentence = f"The change has no effect: {outcome.problem}."
    nat = {"units": "nat"}
    return xr.Dataset(
        {
            "loss": ("step", loss, nat | {"long_name": "loss of the run"}),
            "cured_loss": ("step", outcome.losses, nat | {"long_name": "loss of the replay with the cure"}),
            "held_out_loss": ((), final_loss, nat | {"long_name": "held-out loss of the run"}),
            "cured_held_out_loss": ((), outcome.final_loss, nat | {"long_name": "held-out loss of the replay"}),
            "cured_rise": ((), outcome.rise, nat | {"long_name": "largest temporary rise of the loss of the replay"}),
            "cured_dead_share": (
                (), outcome.dead_share, {"units": "1", "long_name": "fraction of experts without tokens"}),
        },
        {"step": np.arange(N_STEPS)},
        {"sentence": sentence, "change": outcome.title, "problem": outcome.problem},
    )  # fmt: skip


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
    return _scores(rows)


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


def _scores(rows: list[dict[str, Any]]) -> xr.Dataset:
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
