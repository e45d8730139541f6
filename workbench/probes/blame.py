"""Blame for a spoiled update: the rank, the micro-batch and the row that departs from all others and from its past."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from workbench.formatting import number_in_words

#: Updates that are the past, fewest of them, and the latest ones over which the evidence of a rank is summed.
_N_UPDATES, _LEAST_UPDATES, _RECENT = 48, 8, (1, 2, 4, 8)
#: Standard deviations from which a pass is blamed, and least of these: for how much larger its loss is than the model
#: expects, or for the logarithm of its loss if that is unknown.
_T_OF_PASS = {"surprise": (5.0, 1.0), "loss": (10.0, 0.02)}
#: Standard deviations from which a rank is blamed, and at which those of a pass count no further for its rank, so that
#: one pass alone cannot be a bad rank; passes of which a single one does not move the median.
_T_OF_RANK, _CLIP, _MANY = 5.0, 3.0, 24
#: How much further the first departs than the next one.
_GAP = 1.5
#: Values of a row: sum of the losses of its labels, its excess over what the model expects, the variance of that,
#: number of labels; product of the gradient of the logits with that of the sum of the losses, square of the latter and
#: of the former, and its largest entry at a label, which is the least weight that a loss may have; size of the inputs,
#: norm of the gradient of the row alone.
ROW_VALUES = (
    *("loss", "surprise", "variance", "labels"),
    *("product", "square", "given", "bound", "inputs", "norm"),
)
#: Least cosine of two gradients that differ by a factor, and least mean square of that of a label: of labels that a
#: model is sure of, little is left of the gradient, and that changes much with the parameters, unless the gradient of
#: the whole pass is repeated, up to a sine.
_PARALLEL, _LEAST_SQUARE, _OFF_OF_WEIGHT = 0.98, 0.1, 0.1
#: Variance of the loss of a label that is added to what a model expects, which may be surer than right.
_VARIANCE = 0.01
#: Standard deviations from which a row is blamed and least of these; least gradient over the root mean square of those
#: of all rows; fewest rows of which one can depart; largest part of a micro-batch that is blamed row by row, and score
#: from which rows are counted for it, or half of it if the median of all rows is above that.
_T_OF_ROW = {"inputs": (10.0, 0.2), "surprise": (5.0, 1.0), "size": (10.0, 0.3)}
_LEAST_NORM, _FEWEST_ROWS, _MOST_BLAMED, _ODD = 0.25, 6, 0.25, 0.6
#: Least departures from the others that are blamed, if they are above a multiple of the spread of these: logarithms of
#: the weight of a pass and of a row, of a factor between a gradient and the one that its batch gives when it is
#: computed again, and of the sine of the angle between them. Least sine of another direction, largest median of all,
#: and largest one of the passes of each other rank that are best repeated.
_LEAST_WEIGHT, _LEAST_OF_ROW, _LEAST_FACTOR, _LEAST_SINE, _TIMES, _TIMES_OF_SINE = 0.35, 0.7, 0.3, 0.5, 6.0, 4.0
_OFF, _REPEATED, _REPEATED_BY_RANK = 0.6, 0.15, 0.45
#: Relative difference of the parameters of ranks that is none.
_EQUAL = 1e-6


@dataclass(frozen=True)
class Blame:
    """What spoiled an update: a rank, a micro-batch and a row of it, or nobody; returned by ``watched.blame()``.

    Attributes:
        step: Step of the update, from 0.
        sentence: What was found, in words.
        rank: The rank; -1 if nobody is to blame.
        micro_batch: Index of the backward pass of the update on this rank, from 0; -1 if it is none in particular.
        row: Index of the row in the micro-batch, from 0; -1 if it is none in particular.
        row_id: Id of the row, from a column ``id``, ``index`` or ``idx`` of the inputs, or a hash of its content.
        score: Departure in multiples of the threshold; infinite for what needs no statistics, 0 for nobody.
        kind: What departs: ``"finite"``, ``"zero"``, ``"parameters"``, ``"weight"``, ``"replay"``, or a statistic.

    Example:
        >>> from workbench.probes.blame import Blame
        >>> blame = Blame(12, "Rank 1, micro-batch 3 of 4: it has no gradient.", rank=1, micro_batch=2)
        >>> blame.is_found, blame.micro_batch
        (True, 2)

    See Also:
        `workbench.watch`: Watches a run, of which ``watched.blame()`` asks for an update.
        `workbench.probes.first_bad_tensor`: Finds where in a pass the first value arises that is not finite.
    """

    step: int
    sentence: str
    rank: int = -1
    micro_batch: int = -1
    row: int = -1
    row_id: str = ""
    score: float = 0.0
    kind: str = ""

    @property
    def is_found(self) -> bool:
        """Whether somebody is to blame."""
        return self.rank >= 0


@dataclass(frozen=True)
class Passes:
    """Backward passes of one update on all ranks, before any reduction.

    Attributes:
        step: Step of the update.
        sketch: Projections and, last, norm of the gradient of each measured parameter, shape (rank, pass, parameter,
            projection + 1); NaN for a pass that a rank does not have.
        loss: Loss of each pass, shape (rank, pass); NaN if unknown.
        weights: Projections of the parameters themselves, shape (rank, parameter, projection + 1); NaN if they are not
            meant to be equal.
    """

    step: int
    sketch: np.ndarray
    loss: np.ndarray
    weights: np.ndarray

    @property
    def is_made(self) -> np.ndarray:
        """Whether a rank has a pass, (rank, pass)."""
        return ~np.isnan(self.sketch[..., -1]).any(-1)

    @property
    def is_bad(self) -> np.ndarray:
        """Whether a gradient is not finite, (rank, pass); such norms are sent as infinite."""
        return np.isinf(self.sketch[..., -1]).any(-1)

    def place(self, rank: int, number: int = -1) -> str:
        """Return the name of a rank or pass."""
        of_rank = int(self.is_made[rank].sum())
        found = [f"rank {rank}"] if len(self.sketch) > 1 else []
        found += [f"micro-batch {number + 1} of {of_rank}"] if number >= 0 and of_rank > 1 else []
        return ", ".join(found) or "this update"

    def blame(self, rank: int, number: int, words: str, score: float, kind: str) -> Blame:
        """Blame a rank, or one of its passes."""
        return Blame(self.step, f"{self.place(rank, number)}: {words}", rank, number, score=score, kind=kind)


@dataclass(frozen=True)
class Rows:
    """Rows of one micro-batch whose forward pass was repeated.

    Attributes:
        step: Step of the update.
        rank: Rank that has them.
        micro_batch: Index of the backward pass of the update, from 0.
        values: The `ROW_VALUES` of each row, shape (row, value); NaN if unknown, infinite if not finite.
        ids: Ids of the rows.
        off: Sine of the angle between the gradient that was seen and the one computed again, 1 if it is above a right
            angle, and
        scale: factor between them; medians over the parameters, NaN if unknown.
    """

    step: int
    rank: int
    micro_batch: int
    values: np.ndarray
    ids: Mapping[int, str] = field(default_factory=dict)
    off: float = math.nan
    scale: float = math.nan

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values[:, ROW_VALUES.index(name)]

    @property
    def surprise(self) -> float:
        """How much larger the loss of all is than the model expects, in standard deviations; NaN if unknown."""
        return float(_surprises(self["surprise"].sum(), self["variance"].sum(), self["labels"].sum()))

    @property
    def weight(self) -> float:
        """Factor between the gradient of the logits and that of the sum of all losses; NaN if they are not parallel."""
        return float(_weights(self.values.sum(0), 0.0 if self.off <= _OFF_OF_WEIGHT else _LEAST_SQUARE))


def _weights(values: np.ndarray, least: float = _LEAST_SQUARE) -> np.ndarray:
    names = ("product", "square", "given", "labels")
    product, square, given, labels = (values[..., ROW_VALUES.index(name)] for name in names)
    is_known = (product >= _PARALLEL * np.sqrt(square * given)) & (square > least * labels)
    return np.where(is_known, product / square, math.nan)


def _surprises(excess: np.ndarray, variance: np.ndarray, labels: np.ndarray) -> np.ndarray:
    spread = np.sqrt(variance + _VARIANCE * labels)
    return np.asarray(excess / np.where(spread > 0, spread, math.nan))


class PassHistory:
    """Losses of the passes of the latest updates, with which those of the next one are compared."""

    def __init__(self) -> None:
        self._losses: dict[int, np.ndarray] = {}

    def add(self, passes: Passes) -> None:
        """Remember the passes of an update."""
        # Losses vary in proportion to their size, unless they may be negative.
        is_known = passes.is_made & (passes.loss > 0) & np.isfinite(passes.loss)
        self._losses[passes.step] = np.where(is_known, np.log(np.where(is_known, passes.loss, 1.0)), math.nan)
        if len(self._losses) > _N_UPDATES:
            del self._losses[min(self._losses)]

    def table(self, step: int, groups: Sequence[Rows]) -> tuple[str, np.ndarray]:
        """Return a feature of all passes up to a step, which is the last, and its name: (update, rank, pass).

        A batch may be rare and have a large loss by right. Therefore the loss itself is read only if it is not known
        what the model expects.
        """
        steps = [each for each in self._losses if each <= step]
        past = [self._losses[each] for each in steps]
        shape = (len(past), max(map(len, past), default=0), max((each.shape[1] for each in past), default=0))
        surprise, loss = np.full(shape, math.nan), np.full(shape, math.nan)
        for row, each in zip(loss, past, strict=True):
            row[: len(each), : each.shape[1]] = each
        for rows in groups:
            if rows.step in steps and rows.micro_batch < shape[2]:
                surprise[steps.index(rows.step), rows.rank, rows.micro_batch] = rows.surprise
        return ("surprise", surprise) if np.isfinite(surprise[-1:]).any() else ("loss", loss)


def judge(passes: Passes, history: PassHistory, groups: Sequence[Rows]) -> Blame:
    """Blame the rank, the micro-batch or the row that spoiled an update, or nobody.

    What needs no statistics comes first: parameters that differ between ranks, gradients that are not finite or all
    zero in some passes alone, a loss with another weight, a gradient that its batch does not give. Then a rank is
    blamed whose passes depart from those of other ranks, further than before, summed over the latest updates; a row
    that departs from all other rows, and whose gradient is not small beside theirs; and a pass that departs from the
    others, further than before.

    Args:
        passes: Passes of the update.
        history: Passes up to this update, or also of later ones.
        groups: Rows of the passes of this update, and of others, which show what is usual.
    """
    now = [each for each in groups if each.step == passes.step]
    if (found := find_exact(passes)) is not None:
        return _row_that_is_not_finite(passes, found, now) if found.kind == "finite" else found
    # With other parameters, dropout or norms over the batch than in the training, losses are less well known.
    off = [each.off for each in now if math.isfinite(each.off)]
    caution = max(1.0, float(np.median(off)) / _REPEATED) if off else 1.0
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # values may be unknown
        for find in (_weighted_row, partial(_weighted, caution=caution), _scaled, _turned):
            if (found := find(passes, now)) is not None:
                return found
        row, best = _row(passes, now, groups, caution), nobody(passes.step)
        name, table = history.table(passes.step, groups)
        if len(table) > _LEAST_UPDATES:
            if (of_rank := _rank(passes, name, table)).score >= 1:
                return of_rank
            best = _pass(passes, name, table)
    is_in_it = (row.rank, row.micro_batch) == (best.rank, best.micro_batch)
    return row if row.score >= 1 and (is_in_it or row.score >= best.score) else best


def find_exact(passes: Passes) -> Blame | None:
    """Blame what needs neither statistics nor rows; None if there is no such thing."""
    made = passes.is_made
    if made.sum() > 1:
        if (found := _other_parameters(passes)) is not None:
            return found
        words = "its gradient is not finite, that of others is"
        if (found := _of_state(passes, passes.is_bad & made, words, "finite")) is not None:
            return found
        is_zero = made & (np.nan_to_num(passes.sketch[..., -1], nan=0.0) == 0).all(-1)
        words = "its gradient is zero, that of others is not"
        if (found := _of_state(passes, is_zero, words, "zero")) is not None:
            return found
    if (passes.is_bad & made).any():
        return Blame(passes.step, "No gradient is finite.", score=math.inf, kind="finite")
    return None


def _of_state(passes: Passes, which: np.ndarray, words: str, kind: str, score: float = math.inf) -> Blame | None:
    """Blame a rank in all of whose passes alone something holds, or the first pass if it holds in less than half."""
    made, ranks = passes.is_made, {int(r) for r in np.nonzero(which)[0]}
    if len(ranks) == 1 and (rank := min(ranks)) >= 0 and len(made) > 1 and (which[rank] == made[rank]).all():
        return passes.blame(rank, 0 if made[rank].sum() == 1 else -1, words, score, kind)
    places = [(int(r), int(m)) for r, m in zip(*np.nonzero(which), strict=True)]
    is_some = 0 < 2 * len(places) < made.sum() or (len(places) == 1 and made.sum() == 2)
    return passes.blame(*places[0], words, score, kind) if is_some else None


def _other_parameters(passes: Passes) -> Blame | None:
    """Blame the rank whose parameters differ from those of most ranks."""
    weights = passes.weights
    if len(weights) < 2 or np.isnan(weights).any():
        return None
    length = np.maximum(weights[..., -1].max(0), 1e-30)
    apart = np.abs(weights[:, None] - weights[None]).max(-1) / length  # rank, rank, parameter
    n_equal = (apart <= _EQUAL).all(-1).sum(1)
    if n_equal.min() == len(weights):
        return None
    odd = np.flatnonzero(n_equal < n_equal.max())
    if len(odd) == 1:
        words = "its parameters differ from those of the other ranks, which should be the same"
        return passes.blame(int(odd[0]), -1, words, math.inf, "parameters")
    sentence = "the parameters of the ranks differ, which should be the same; the ranks do not show which one is wrong"
    return Blame(passes.step, sentence, score=math.inf, kind="parameters")


def _row_that_is_not_finite(passes: Passes, found: Blame, now: Sequence[Rows]) -> Blame:
    for each in now:
        is_bad = np.isinf(each["norm"])
        if is_bad.any() and is_bad.sum() <= max(1, _MOST_BLAMED * len(is_bad)):
            return _of_row(passes, each, int(np.argmax(is_bad)), "its gradient is not finite", math.inf, "finite")
    return found


def _departures(values: np.ndarray, least: float, times: float = _TIMES, *, of: np.ndarray | None = None) -> np.ndarray:
    """Return how far each value is from the median of the others, in multiples of what is blamed; NaN if unknown."""
    found, is_known = np.full(len(values), math.nan), np.isfinite(values)
    for i in range(len(values)):
        others = values[is_known & (np.arange(len(values)) != i)]
        if len(others) > 1:
            found[i] = ((values if of is None else of)[i] - np.median(others)) / max(least, times * _spread(others))
    return found


def _spread(values: np.ndarray) -> float:
    return 1.4826 * float(np.median(np.abs(values - np.median(values)))) if len(values) else math.nan


def _kept_equal(weight: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return ones if a loop keeps the weight of a label equal, numbers of labels if that of all of them together."""
    both = [np.log(weight), np.log(weight * labels)]
    spread = [np.nan_to_num(_spread(each[np.isfinite(each)]), nan=math.inf) for each in both]
    return np.ones(len(labels)) if spread[0] <= spread[1] else labels


def _weighted_row(passes: Passes, now: Sequence[Rows]) -> Blame | None:
    """Blame a row whose loss has at least more weight than the others of its micro-batch have."""
    for each in now:
        weight = _weights(each.values)
        counts = _kept_equal(weight, each["labels"])
        by = np.nan_to_num(_departures(np.log(weight * counts), _LEAST_OF_ROW, of=np.log(each["bound"] * counts)))
        i = int(np.argmax(by))
        if (
            np.isfinite(np.delete(weight, i)).sum() > 2
            and by[i] >= 1
            and (by >= 1).sum() <= max(1, _MOST_BLAMED * len(by))
        ):
            factor = number_in_words(float(each["bound"][i] / np.nanmedian(weight)))
            words = f"its loss has at least {factor} times the weight of the others"
            return _of_row(passes, each, i, words, by[i], "weight")
    return None


def _weighted(passes: Passes, now: Sequence[Rows], caution: float) -> Blame | None:
    """Blame a pass whose loss has another weight than those of the others."""
    weight, labels = np.array([[each.weight, each["labels"].sum()] for each in now]).reshape(-1, 2).T
    by = _departures(np.log(weight * _kept_equal(weight, labels)), _LEAST_WEIGHT * max(1.0, caution / 2))
    return _of_passes(passes, now, by, weight, "its loss has {} times the weight of the others", "weight")


def _scaled(passes: Passes, now: Sequence[Rows]) -> Blame | None:
    """Blame a pass whose gradient is a multiple of the one that its batch gives, if those of the others are not."""
    scale = np.array([each.scale if each.scale > 0 and each.off <= _REPEATED else math.nan for each in now])
    words = "its gradient is {} times the one that its batch gives when it is computed again"
    return _of_passes(passes, now, _departures(np.log(scale), _LEAST_FACTOR), scale, words, "replay")


def _turned(passes: Passes, now: Sequence[Rows]) -> Blame | None:
    """Blame a pass, or a rank in all of its passes, whose gradient has another direction than its batch gives."""
    words = "its gradient is not the one that its batch gives when it is computed again; those of others are"
    off = np.array([max(each.off, 1e-3) for each in now])
    if len(off) > 2 and np.median(off) <= _REPEATED:
        by = np.where(off >= _OFF, _departures(np.log(off), _LEAST_SINE, _TIMES_OF_SINE), 0.0)
        if (found := _of_passes(passes, now, by, off, words, "replay")) is not None:
            return found
    ranks = sorted({each.rank for each in now})  # with dropout, single passes may be of any direction
    of_rank = {rank: [each.off for each in now if each.rank == rank] for rank in ranks}
    if (
        len(ranks) > 1
        and len(ranks) == len(passes.is_made)
        and all(len(values) > 1 and np.isfinite(values).all() for values in of_rank.values())
    ):
        *others, rank = sorted(ranks, key=lambda each: min(of_rank[each]))
        if (least := min(of_rank[rank])) >= _OFF and min(of_rank[others[-1]]) <= _REPEATED_BY_RANK:
            return passes.blame(rank, -1, words, least / _OFF, "replay")
    return None


def _of_passes(
    passes: Passes, now: Sequence[Rows], by: np.ndarray, values: np.ndarray, words: str, kind: str
) -> Blame | None:
    """Blame the pass that departs most, or all of its rank, unless as many depart as do not."""
    score = np.abs(np.nan_to_num(by))
    if not len(score) or score.max() < 1:
        return None
    which = np.zeros(passes.is_made.shape, dtype=bool)
    for each, value in zip(now, score, strict=True):
        which[each.rank, each.micro_batch] = value >= 1
    rest = values[(score < 1) & np.isfinite(values)]
    by_how_much = float(values[int(np.argmax(score))] / np.median(rest)) if len(rest) else math.nan
    if 2 * which.sum() >= passes.is_made.sum():
        return None
    return _of_state(passes, which, words.format(number_in_words(by_how_much)), kind, float(score.max()))


def _others(table: np.ndarray, *, are_ranks: bool) -> np.ndarray:
    """Return the median of all other passes of an update, or of those of other ranks, in the form of a table."""
    flat = table.reshape(len(table), -1)
    if flat.shape[1] > _MANY:
        return np.broadcast_to(np.nanmedian(flat, 1)[:, None, None], table.shape)
    of_rank = np.repeat(np.arange(table.shape[1]), table.shape[2])
    units = of_rank if are_ranks else np.arange(len(of_rank))
    return np.stack([np.nanmedian(flat[:, units != unit], 1) for unit in units], 1).reshape(table.shape)


def _standardized(table: np.ndarray, n_now: int, least: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the latest updates in standard deviations of the same rank before them, and how many values these are."""
    before, now = table[:-n_now], table[-n_now:]
    middle = np.nanmedian(before, (0, 2))[:, None]
    low, high = np.nanquantile(before - middle, [0.1, 0.9], (0, 2))
    of_rank = np.fmax(1.4826 * np.nanmedian(np.abs(before - middle), (0, 2)), (high - low) / 2.563)
    of_all = 1.4826 * np.nanmedian(np.abs(before - middle))
    n_known = (~np.isnan(before)).sum((0, 2))
    spread = np.where(n_known >= _LEAST_UPDATES, np.maximum(np.fmax(of_rank, of_all), least), math.nan)
    return (now - middle) / spread[:, None], n_known


def _rank(passes: Passes, name: str, table: np.ndarray) -> Blame:
    """Blame a rank whose passes depart from those of other ranks more than they did, over the latest updates."""
    best, least = nobody(passes.step), _T_OF_PASS[name][1]
    n_recent = min(_RECENT[-1], len(table) - _LEAST_UPDATES)
    if table.shape[1] < 2:
        return best
    z, n_past = _standardized(table - _others(table, are_ranks=True), n_recent, least)
    own, _ = _standardized(table, n_recent, least)
    for n in [each for each in _RECENT if each <= n_recent]:
        clipped, of_own = (np.nanmean(np.clip(each[-n:], -_CLIP, _CLIP), (0, 2)) for each in (z, own))
        n_now = (~np.isnan(z[-n:])).sum((0, 2))
        score = np.nan_to_num(clipped / np.sqrt(1 / n_now + 1 / n_past)) / _T_OF_RANK
        if len(score) == 2:  # both differ from the other one equally
            score[np.abs(of_own) < np.abs(of_own).max()] = 0.0
        rank = int(np.argmax(score))
        if score[rank] > max(best.score, _GAP * np.delete(score, rank).max()):
            since = f", in the latest {n} updates" if n > 1 else ""
            words = _of_feature(name, table[-n:], table[-n:, rank]) + since
            best = passes.blame(rank, -1, words, float(score[rank]), name)
    return best


def _pass(passes: Passes, name: str, table: np.ndarray) -> Blame:
    """Blame a pass that departs from all others and from its past, or a rank if all of its passes do."""
    (threshold, least), n_now = _T_OF_PASS[name], int((~np.isnan(table[-1])).sum())
    score = np.nan_to_num(_standardized(table - _others(table, are_ranks=False), 1, least)[0][0]) / threshold
    if n_now == 2:  # both differ from the other one equally
        own = np.abs(np.nan_to_num(_standardized(table, 1, least)[0][0]))
        score[own < own.max()] = 0.0
    rank, number = (int(i) for i in np.unravel_index(np.argmax(score), score.shape))
    best, of_rank = float(score[rank, number]), score[rank][passes.is_made[rank]]
    if len(score) > 1 and len(of_rank) > 1 and of_rank.min() * _GAP >= best:
        number = -1
    score[rank, number if number >= 0 else slice(None)] = 0.0
    if n_now < 2 or best < 1 or best < _GAP * score.max():
        return nobody(passes.step)
    words = _of_feature(name, table[-1:], table[-1, rank, number if number >= 0 else slice(None)])
    return passes.blame(rank, number, words, best, name)


def _of_feature(name: str, values: np.ndarray, own: np.ndarray) -> str:
    value, middle = float(np.nanmean(own)), float(np.nanmedian(values))
    if name == "loss":
        words = number_in_words(math.exp(value)), number_in_words(math.exp(middle))
        return f"its loss is {words[0]}, and in the middle of all {words[1]}"
    words = number_in_words(value), number_in_words(middle)
    return (
        f"its loss is {words[0]} standard deviations above what the model expects, and in the middle of all {words[1]}"
    )


def row_features(rows: Rows) -> dict[str, np.ndarray]:
    """Return by feature what shows that a row departs from others: of its loss, and of its gradient for its labels."""
    labels = np.where(rows["labels"] > 0, rows["labels"], 1.0)
    surprise = _surprises(rows["surprise"], rows["variance"], labels)
    size = np.where(np.isnan(surprise), np.log(rows["norm"]), math.nan)  # a rare row has a large gradient by right
    return {"surprise": surprise, "size": size, "inputs": np.log(rows["inputs"])}


def _row(passes: Passes, now: Sequence[Rows], groups: Sequence[Rows], caution: float) -> Blame:
    """Blame a row that departs from all others, and whose gradient is not small beside theirs."""
    best = nobody(passes.step)
    if not now:
        return best
    norms = np.concatenate([each["norm"] for each in now])
    total = float(np.nanmean(np.square(norms)) * len(norms))
    for name, (threshold, least) in _T_OF_ROW.items():
        features = [row_features(each)[name] for each in groups]
        found = []  # score, its group, row, median of others, and scores of all rows of the group
        for each, own in zip(groups, features, strict=True):
            of_others = np.concatenate([of for of in features if of is not own] or [own])
            both = [values[np.isfinite(values)] for values in (of_others, own)]
            others = both[0] if len(both[0]) >= _FEWEST_ROWS else both[1]
            if each.step != passes.step or len(others) < _FEWEST_ROWS:
                continue
            middle, high = np.quantile(others, [0.5, 0.9])
            spread = max(_spread(others), float(high - middle) / 1.2816, least)
            spread *= 1.0 if name == "inputs" else caution
            score = np.nan_to_num((own - middle) / spread / threshold, nan=0.0, posinf=0.0, neginf=0.0)
            found.append((float(score.max()), each, int(np.argmax(score)), float(middle), score))
        found.sort(key=lambda of: -of[0])
        top, rows, i, middle, score = found[0] if found else (0.0, now[0], 0, 0.0, np.zeros(1))
        square = float(rows["norm"][i] ** 2)
        share = math.sqrt(square / (total - square)) if square < total else math.inf
        next_one = found[1][0] if len(found) > 1 else 0.0
        if top < max(1.0, best.score, _GAP * next_one) or not square * len(norms) >= _LEAST_NORM**2 * total:
            continue
        n = int((score >= (_ODD if np.median(score) < _ODD / 2 else _ODD / 2)).sum())
        if n > max(1, _MOST_BLAMED * len(score)):
            words = f"{n} of its {len(score)} rows depart from those of the others"
            best = passes.blame(rows.rank, rows.micro_batch, words, top, name)
        else:
            words = _of_row_feature(name, rows, i, middle) + (f" ({n} rows like this)" if n > 1 else "")
            words += f"; its gradient is {number_in_words(share)} times that of all other rows together"
            best = _of_row(passes, rows, i, words, top, name)
    return best


def _of_row_feature(name: str, rows: Rows, i: int, middle: float) -> str:
    if name != "surprise":
        by = number_in_words(math.exp(row_features(rows)[name][i] - middle))
        return f"its {'gradient is' if name == 'size' else 'inputs are'} {by} times the median of the others"
    loss, excess = (float(rows[of][i] / rows["labels"][i]) for of in ("loss", "surprise"))
    return f"its loss is {number_in_words(loss)} a label, where the model expects {number_in_words(loss - excess)}"


def _of_row(passes: Passes, rows: Rows, i: int, words: str, score: float, kind: str) -> Blame:
    row_id, place = rows.ids.get(i, ""), passes.place(rows.rank, rows.micro_batch)
    named = f"{'' if place == 'this update' else f'{place}, '}row {i}" + (f" (id {row_id})" if row_id else "")
    return Blame(passes.step, f"{named}: {words}", rows.rank, rows.micro_batch, i, row_id, float(score), kind)


def nobody(step: int, reason: str = "no rank, micro-batch or row departs from the others") -> Blame:
    """Return the answer that nobody is to blame."""
    return Blame(step, f"Step {step}: {reason}.")


def capital(found: Blame) -> Blame:
    """Return the same with a sentence that begins with a capital and ends with a stop."""
    words = found.sentence
    return replace(found, sentence=words[:1].upper() + words[1:].rstrip(".") + ".")
