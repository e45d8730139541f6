"""Exercises of lesson 3: learning rates and their edges."""

from __future__ import annotations

from functools import cache

import numpy as np
import xarray as xr

from workbench.course.exercises import ChoiceExercise, FunctionExercise, NumberExercise, RangeExercise, SetExercise
from workbench.formatting import short
from workbench.rates.outcomes import loss_over_rates
from workbench.studies import samples

_BARE = "No norm, Xavier"
#: The rate of exercise 3.2, one of those that were recorded.
_RATE = 0.01139


@cache
def _study() -> xr.Dataset:
    return samples.open("rate_study", "fit")


@cache
def _runs(name: str) -> xr.Dataset:
    """Recorded runs of a design as in the notebook: AdamW, 480 updates, width 64, three blocks."""
    study = _study()
    settings = {"architecture": name, "optimizer": "AdamW", "n_steps": 480, "d_model": 64, "n_layers": 3}
    is_it = np.logical_and.reduce([study[key].values == value for key, value in settings.items()])
    return study.isel(run=is_it)


@cache
def _losses(name: str) -> xr.Dataset:
    shorter = _study().isel(run=(_study()["stage"] == "shorter").values)
    return loss_over_rates(_runs(name), shorter=shorter)


def _edge(name: str, of: str = _BARE) -> float:
    return float(_losses(of)[name])


def _outcome() -> str:
    """What happened to Post-LN at the rate of exercise 3.2."""
    runs = _runs("Post-LN")
    runs = runs.isel(run=np.isclose(runs["learning_rate"], _RATE))
    if bool(runs["has_diverged"].mean() > 0.5):
        return "explodes"
    losses = _losses("Post-LN")
    loss = losses["mean_loss"].sel(rate=_RATE, method="nearest")
    return "learns nothing" if bool(loss > losses["trivial_loss"]) else "learns well"


def _useful_edge(rate: np.ndarray, loss: np.ndarray, limit: float) -> float:
    place = int(np.argmin(loss))
    while place + 1 < len(rate) and loss[place + 1] <= limit:
        place += 1
    return float(rate[place])


def _slow_edge(rate: np.ndarray, loss: np.ndarray, limit: float) -> float:
    place = int(np.argmin(loss))
    while place > 0 and loss[place - 1] <= limit:
        place -= 1
    return float(rate[place])


def _first_beyond(rate: np.ndarray, loss: np.ndarray, limit: float) -> float:
    """The smallest rate above the band, or NaN if all larger rates are useful."""
    beyond = rate[rate > _useful_edge(rate, loss, limit)]
    return float(beyond[0]) if len(beyond) else float("nan")


def _strictly_below(rate: np.ndarray, loss: np.ndarray, limit: float) -> float:
    return _useful_edge(rate, loss, np.nextafter(limit, -np.inf))


def _band() -> tuple[float, float]:
    return _edge("slow_edge", "Llama-style"), _edge("useful_edge", "Llama-style")


def _cost(rate: float) -> str:
    """What the recorded run at the rate next to a given one lost against the best rate."""
    if rate <= 0:
        return "A learning rate is above 0; with 0 the model does not change."
    losses = _losses("Llama-style")
    nearest = int(np.abs(np.log(losses["rate"].values / rate)).argmin())
    excess = float(losses["mean_loss"][nearest] - losses["best_loss"])
    return (
        f"At {short(float(losses['rate'][nearest]))}, the recorded rate next to yours, the loss after all updates is "
        f"{excess:.2f} nat above that at the best rate."
    )


def _best_estimate() -> str:
    """The estimate of the useful edge that is most often within a factor of 1.6 on held-out families at 480 updates."""
    import pandas as pd

    table = pd.read_csv(samples.recorded("rate_accuracy.csv"))
    table = table.query("set == 'locked' and kind == 'model' and budget == 1000 and horizon == 480")
    columns = {"pilot": "1.6", "median edge": "by optimizer, 1.6", "one rate for all": "one rate, 1.6"}
    fractions = {name: float(table[column].iloc[0]) for name, column in columns.items()}
    return max(fractions, key=lambda name: fractions[name])


EXERCISES = (
    SetExercise(
        number="3.1",
        question=(
            "Predict: four designs are trained at rates up to 0.13, far above their best rates. "
            "Which of them explode at any of these rates? Answer with a set of names: `'Pre-LN'`, `'Post-LN'`, "
            "`'MoE top-2'` and `'No norm, Xavier'`."
        ),
        answer=lambda: {
            name for name in ("Pre-LN", "Post-LN", "MoE top-2", _BARE) if _edge("explosion_edge", name) > 0
        },
        members={
            "Pre-LN": (
                "Each branch receives normalized states, whatever the size of the stream. Too large a rate makes such "
                "a model worse, not infinite."
            ),
            "Post-LN": (
                "The stream itself is normalized in each block. Too large a rate makes such a model useless, but its "
                "loss stays near that of a model that knows only the frequencies of the letters."
            ),
            "MoE top-2": (
                "A mixture of experts with normalization behaves like other designs with normalization in this respect."
            ),
            _BARE: (
                "Nothing limits the size of the states without normalization: twice as large states give twice as "
                "large logits."
            ),
        },
        hints=(
            "What limits the size of the states that a branch receives?",
            "Which of the four designs has no normalization?",
        ),
        solution="answer = {'No norm, Xavier'}\n",
        explanation=(
            "*Explode* means that most runs exceed a loss of 50 or a gradient norm of 500. With a normalization this "
            "is rare, even at rates that are far too large to learn."
        ),
    ),
    ChoiceExercise(
        number="3.2",
        question=(
            "Look at Post-LN at a rate of 0.011, a few times its best rate. What does it do: `'explodes'`, "
            "`'learns nothing'` or `'learns well'`?"
        ),
        answer=_outcome,
        choices={
            "explodes": (
                "No run exceeded a loss of 50 or a gradient norm of 500 at this rate: the loss in the figure is "
                "finite. Compare it with the loss of a model that knows only the frequencies of the letters."
            ),
            "learns nothing": "Compare its loss with the trivial loss.",
            "learns well": (
                "A finite loss does not mean that it learned. Compare it with the trivial loss, that of a model that "
                "knows only the frequencies of the letters."
            ),
        },
        hints=(
            "The dataset of each design has the trivial loss: the loss of a predictor that knows only how frequent "
            "each letter is.",
            'Compare `losses["Post-LN"]["mean_loss"]` at this rate with `losses["Post-LN"]["trivial_loss"]`.',
        ),
        solution="answer = 'learns nothing'\n",
        explanation=(
            "It does not explode and learned no more than the frequencies of the letters. "
            "Not exploding is the wrong criterion for a learning rate."
        ),
    ),
    FunctionExercise(
        number="3.3",
        question=(
            "Write a function that returns the useful edge on a grid of increasing rates: the largest rate of the "
            "contiguous band of useful rates around the best one. A rate is useful if its loss is at most `limit`."
        ),
        answer=lambda: _useful_edge,
        cases=lambda: [
            (np.array([0.001, 0.002, 0.004, 0.008]), np.array([2.5, 2.0, 2.1, 3.0]), 2.2),
            (np.array([0.001, 0.002, 0.004, 0.008, 0.016]), np.array([2.4, 2.0, 2.05, 2.9, 2.1]), 2.1),
            (np.array([0.01, 0.03, 0.1, 0.3]), np.array([2.2, 2.1, 2.3, np.inf]), 2.3),
            (np.array([0.001, 0.002, 0.004]), np.array([2.2, 2.1, 2.0]), 2.15),
            (np.array([0.001, 0.002, 0.004, 0.008]), np.array([2.1, 2.6, 2.0, 2.6]), 2.2),
        ],
        mistakes={
            "Your function returns the largest useful rate anywhere. Beyond a rate that is not useful, a single good "
            "run may be luck: stop at the first rate above the best one that is not useful.": (
                lambda rate, loss, limit: rate[loss <= limit].max()
            ),
            "Your function returns the best rate. The band of useful rates extends beyond it, up to the largest rate "
            "that is still useful.": lambda rate, loss, limit: rate[np.argmin(loss)],
            "Your function returns the first rate that is not useful. The useful edge is the last rate before it.": (
                _first_beyond
            ),
            "Your function returns the slow edge, the lower end of the band. Go from the best rate to larger ones.": (
                _slow_edge
            ),
            "Your function returns the largest rate whose loss is finite. A run may be finite and useless: compare its "
            "loss with `limit`.": lambda rate, loss, limit: rate[np.isfinite(loss)].max(),
            "Your function leaves out rates whose loss equals the limit. They are useful: use <=.": _strictly_below,
            "Your function returns a loss. The useful edge is a learning rate.": lambda rate, loss, limit: loss[
                rate == _useful_edge(rate, loss, limit)
            ][0],
            "Your function returns a place in the grid. Return the rate at this place.": lambda rate, loss, limit: int(
                np.flatnonzero(rate == _useful_edge(rate, loss, limit))[0]
            ),
        },
        hints=(
            "`np.argmin(loss)` is the place of the best rate. Start there.",
            "Move to the next larger rate as long as its loss is at most `limit`.",
            "Check that there is a next rate: the band may end with the grid.",
        ),
        solution="""\
def useful_edge(rate, loss, limit):
    place = np.argmin(loss)
    while place + 1 < len(rate) and loss[place + 1] <= limit:
        place += 1
    return rate[place]

answer = useful_edge
""",
        explanation="The workbench also interpolates between the rates of the grid, and averages over seeds.",
    ),
    NumberExercise(
        number="3.4",
        question=(
            "The design without normalization has both edges. How many times larger is its explosion edge than its "
            "useful edge?"
        ),
        answer=lambda: _edge("explosion_edge") / _edge("useful_edge"),
        mistakes={
            "This is upside down: divide the explosion edge by the useful edge.": lambda: (
                _edge("useful_edge") / _edge("explosion_edge")
            ),
            "You subtracted the edges. Learning rates are compared by their ratio.": lambda: (
                _edge("explosion_edge") - _edge("useful_edge")
            ),
            "You divided by the best rate. The useful edge is the upper end of the band of useful rates.": lambda: (
                _edge("explosion_edge") / _edge("best_rate")
            ),
            "You divided by the slow edge, the lower end of the band. The useful edge is its upper end.": lambda: (
                _edge("explosion_edge") / _edge("slow_edge")
            ),
            "This is the width of the band of useful rates. Compare its upper end with the explosion edge.": lambda: (
                _edge("useful_edge") / _edge("slow_edge")
            ),
            "You took the largest rate tried. Explosions begin at smaller rates, at `explosion_edge`.": lambda: (
                _edge("largest_rate") / _edge("useful_edge")
            ),
            "You divided by the useful edge of Pre-LN. Use both edges of the design without normalization.": lambda: (
                _edge("explosion_edge") / _edge("useful_edge", "Pre-LN")
            ),
            "You divided losses. The edges are learning rates.": lambda: _edge("trivial_loss") / _edge("best_loss"),
            "This is the explosion edge itself. Divide it by the useful edge.": lambda: _edge("explosion_edge"),
            "This is the useful edge itself. Divide the explosion edge by it.": lambda: _edge("useful_edge"),
        },
        look_at="Look at the row of the design without normalization in the table `edges`.",
        hints=(
            "The table `edges` has both edges of each design.",
            "Divide `explosion_edge` by `useful_edge` in the row of 'No norm, Xavier'.",
        ),
        solution="""\
row = edges.loc["No norm, Xavier"]
answer = row["explosion_edge"] / row["useful_edge"]
""",
        explanation=(
            "Between the two edges a run does not explode, but learns worse than at a smaller rate. "
            "A search that only avoids explosions ends in this region."
        ),
    ),
    RangeExercise(
        number="3.5",
        question=(
            "Choose a learning rate for the Llama-style design before any of it is trained. The check looks up how the "
            "recorded runs of this design went."
        ),
        answer=_band,
        too_small=lambda rate: f"{short(rate)} is too small for 480 updates. {_cost(rate)}",
        too_large=lambda rate: (
            f"{short(rate)} is too large. {_cost(rate)} A predicted useful edge is uncertain: stay clear of it."
        ),
        hints=(
            "The prediction gives a lower and an upper end, each with its uncertainty.",
            "The ends are the least certain rates. In the middle of the range both errors are unlikely.",
            "The middle of a range of rates is the geometric mean, the root of the product of the ends.",
        ),
        solution="answer = np.sqrt(predicted.slow_edge.value * predicted.useful_edge.value)\n",
        explanation=(
            "The rate lies in the measured band of useful rates. A rate in the middle of the predicted range is far "
            "from both edges, whose predictions are wrong by factors of two and more."
        ),
    ),
    ChoiceExercise(
        number="3.6",
        question=(
            "For designs of families that no fit has seen, which estimate of the useful edge is most often within a "
            "factor of 1.6 of the measured one, if the training has 480 updates: `'pilot'`, `'median edge'` or "
            "`'one rate for all'`?"
        ),
        answer=_best_estimate,
        choices={
            "pilot": (
                "The pilot is the best of the three if the training is as short as its own runs. Here the training is "
                "longer. Read the row of 480 updates."
            ),
            "median edge": "Read the row of 480 updates.",
            "one rate for all": (
                "The same rate for all optimizers is within a factor of 1.6 for few designs only. "
                "Read the row of 480 updates."
            ),
        },
        hints=("The table above has one row for each number of updates.",),
        solution="answer = 'median edge'\n",
        explanation=(
            "The median edge of recorded designs with the same optimizer costs nothing and is hard to beat here. "
            "Whatever you use, compare it with a simple baseline. No estimate reaches 80 % in this row."
        ),
    ),
)
