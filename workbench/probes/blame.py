"""Blame for a spoiled update: the rank, the micro-batch and the row whose gradient departs from all others."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.formatting import number_in_words

#: Updates that are the past of a pass, the fewest of them, values that a comparison needs, and updates after which what
#: is usual is learned again.
_N_UPDATES, _LEAST_UPDATES, _N_PAST, _N_LEARN = 48, 8, 12, 8
#: Passes of an update that show how much they differ.
_FEWEST_NOW = 4
#: Features of a pass: the logarithm of the size of its gradient, its loss, and the cosine of its gradient with the sum
#: of the others.
FEATURES = ("size", "loss", "turn")
_TURN = FEATURES.index("turn")
#: Standard deviations from which a pass is blamed, by feature, and values to which the next one of a row is compared.
_T_OF_PASS, _N_NEXT = np.array([9.0, 7.0, 6.0]), 8
#: Least standard deviation of each feature of a pass, and of a row.
_LEAST_OF_PASS = np.array([0.1, 0.02, 0.25])
_LEAST_OF_ROW = {"size": 0.2, "loss": 0.1, "scale": 0.2}
#: Standard deviations from which a row is blamed, and least distance from the next one, over that of the next ones from
#: each other. Rows of texts, and short ones above all, have heavy tails.
_T_OF_ROW = {"size": (8.0, 4.0), "loss": (13.0, 6.0), "scale": (10.0, 4.0)}
#: Rows of a micro-batch from which they are compared with their own median.
_OWN_MEDIAN = 4
#: Fewest rows of which one can depart from the others, and largest fraction of them that is blamed row by row.
_FEWEST_ROWS, _MOST_BLAMED = 6, 0.25
#: Least difference between a gradient and what its batch gives when it is computed again, over the gradient, and over
#: the median of the same difference in the other passes.
_LEAST_OFF, _TIMES_OFF = 0.3, 4.0
#: Least logarithm of the weight of a loss over that of the others, and over the spread of these.
_LEAST_WEIGHT, _TIMES_WEIGHT = 0.2, 6.0
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
        kind: What departs: ``"finite"``, ``"zero"``, ``"parameters"``, ``"replay"``, or a feature of the pass or row.

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


class PassHistory:
    """Passes of the latest updates, with which those of the next one are compared."""

    def __init__(self) -> None:
        #: Differences from the other passes and values, by feature: (rank, pass, feature, 2).
        self._past: deque[np.ndarray] = deque(maxlen=_N_UPDATES)
        self._logs: deque[np.ndarray] = deque(maxlen=_N_UPDATES)
        self._usual = np.zeros(0)  # logarithm of the norm by parameter
        self._middle = self._spread = np.zeros(0)  # by rank, feature and 2
        self._n_added = self._learned = 0

    def judge(self, passes: Passes) -> Blame:
        """Compare the passes of an update with each other and with their past, and blame the one that departs.

        What needs no statistics comes first: parameters that differ between ranks, gradients that are not finite or all
        zero in some passes alone. Otherwise, the logarithm of the size, the loss and the direction of each gradient
        are compared with the median of the other passes, and the difference with that of the same rank in the past.
        With two passes in an update, the one that departs further from its own past is meant; a single one can only
        be a reason to look at its rows.
        """
        made, n = passes.is_made, int(passes.is_made.sum())
        for find in (_other_parameters, _not_finite, _zero):
            if n > 1 and (found := find(passes, made)) is not None:
                return found
        if (passes.is_bad & made).any():
            return Blame(passes.step, "No gradient is finite.", score=math.inf, kind="finite")
        if not n or not self._learn() or len(self._middle) != len(made):
            return nobody(passes.step)
        now = self._features(passes, made)
        spread: np.ndarray = np.maximum(self._spread[:, None], _spread_now(now, made))
        z = (now - self._middle[:, None]) / spread
        against, own = np.nan_to_num(z[..., 0]), np.nan_to_num(z[..., 1])
        if n == 1:
            against = own
        elif n == 2:  # both differ from the other one equally
            against = np.where(np.abs(own) >= np.abs(own).max((0, 1)), against, 0.0)
        against[..., _TURN] = np.minimum(against[..., _TURN], 0.0) if n > 1 else 0.0
        against = against / _T_OF_PASS
        rank, number, name = np.unravel_index(np.argmax(np.abs(against)), against.shape)
        score = float(np.abs(against).max())
        if n == 1:
            return Blame(passes.step, "The update departs from those before.", score=score, kind=FEATURES[name])
        by = float(now[rank, number, name, 0] - self._middle[rank, name, 0])
        words = _of_feature(FEATURES[name], by, now[..., name, 1], made, int(rank), int(number))
        return _blame(passes, int(rank), int(number), words, score, FEATURES[name])

    def add(self, passes: Passes, found: Blame) -> None:
        """Remember the passes of an update, without those to blame."""
        made = passes.is_made & ~passes.is_bad
        if found.score >= 1 and found.is_found:
            made[found.rank, found.micro_batch if found.micro_batch >= 0 else slice(None)] = False
        if made.any() and np.isfinite(passes.sketch[made]).all():
            self._past.append(self._features(passes, made))
            self._logs.append(_logs(passes, made))
            self._n_added += 1

    def _learn(self) -> bool:
        """Learn what is usual, at some updates; return whether it is known."""
        if self._n_added < _LEAST_UPDATES:
            return False
        if self._learned and self._n_added - self._learned < min(_N_LEARN, self._learned // 4):
            return True
        self._learned = self._n_added
        n_passes, n_ranks = max(each.shape[1] for each in self._past), max(len(each) for each in self._past)
        past = np.full((len(self._past), n_ranks, n_passes, len(FEATURES), 2), np.nan)
        for row, each in zip(past, self._past, strict=True):
            row[: len(each), : each.shape[1]] = each
        pooled = past.swapaxes(0, 1).reshape(n_ranks, -1, len(FEATURES), 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a feature may be unknown
            low, self._middle, high = np.nanquantile(pooled, [0.1, 0.5, 0.9], axis=1)
            near = 1.4826 * np.nanmedian(np.abs(pooled - self._middle[:, None]), axis=1)
            self._usual = np.nanmedian(np.concatenate([each.reshape(-1, each.shape[-1]) for each in self._logs]), 0)
        n_known = (~np.isnan(pooled)).sum(1)
        spread = np.maximum(np.maximum(near, (high - low) / 2.563), _LEAST_OF_PASS[:, None])
        self._spread = np.where(n_known >= _N_PAST, spread, np.nan)
        return True

    def _features(self, passes: Passes, made: np.ndarray) -> np.ndarray:
        """Return for each pass and feature the difference from the other passes, and the value, (rank, pass, f, 2)."""
        logs = _logs(passes, made)
        if len(self._usual):  # a parameter without a gradient, such as that of an expert without tokens, has its usual
            logs = np.where(np.isnan(logs), self._usual, logs)
        n_known = (~np.isnan(logs)).sum(-1)
        size = np.where(made & (n_known > 0), np.nansum(logs, -1) / np.maximum(n_known, 1), np.nan)
        length = np.where(passes.sketch[..., -1:] > 0, passes.sketch[..., -1:], 1.0)
        unit = np.where(made[..., None, None], np.nan_to_num(passes.sketch[..., :-1] / length), 0.0)
        rest = unit.sum((0, 1)) - unit
        lengths = np.sqrt(np.square(unit).sum((2, 3)) * np.square(rest).sum((2, 3)))
        turn = (unit * rest).sum((2, 3)) / np.where(lengths > 0, lengths, np.nan)
        # Losses vary in proportion to their size, unless they may be negative.
        loss = np.where(
            made & (passes.loss > 0) & np.isfinite(passes.loss), np.log(np.abs(passes.loss) + 1e-30), np.nan
        )
        values = np.stack([size, loss, np.where(made, turn, np.nan)], -1)
        others = np.stack([_against_others(values[..., i]) for i in range(len(FEATURES))], -1)
        return np.stack([others, values], -1)


def _spread_now(now: np.ndarray, made: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the passes of an update, (feature, 2), if there are enough; otherwise 0."""
    values = now[made][..., 1]
    if len(values) < _FEWEST_NOW:
        return np.zeros((len(FEATURES), 2))
    near = 1.4826 * np.median(np.abs(values - np.median(values, 0)), 0)
    return np.repeat(np.nan_to_num(near)[:, None], 2, 1)


def _logs(passes: Passes, made: np.ndarray) -> np.ndarray:
    norms = passes.sketch[..., -1]
    return np.where(made[..., None] & (norms > 0) & np.isfinite(norms), np.log(np.where(norms > 0, norms, 1.0)), np.nan)


def _against_others(now: np.ndarray) -> np.ndarray:
    """Return the difference of each value from the median of all other ones; NaN if there are none."""
    found, known = np.full(now.shape, np.nan), ~np.isnan(now)
    values = now[known]
    if (n := len(values)) < 2:
        return found
    place = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    ordered = np.sort(values)
    low, high = (n - 2) // 2, (n - 1) // 2  # of the others, in their order
    found[known] = values - (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
    return found


def _place(passes: Passes, rank: int, number: int) -> str:
    n_ranks, of_rank = len(passes.sketch), int(passes.is_made[rank].sum()) if rank >= 0 else 1
    found = [f"rank {rank}"] if n_ranks > 1 else []
    found += [f"micro-batch {number + 1} of {of_rank}"] if number >= 0 and of_rank > 1 else []
    return ", ".join(found) or "this update"


def _blame(passes: Passes, rank: int, number: int, words: str, score: float, kind: str) -> Blame:
    return Blame(passes.step, f"{_place(passes, rank, number)}: {words}", rank, number, score=score, kind=kind)


def _of_feature(name: str, by: float, now: np.ndarray, made: np.ndarray, rank: int, number: int) -> str:
    if name == "size":
        return f"its gradient is {number_in_words(math.exp(by))} times what it usually is beside the others"
    middle, value = float(np.median(now[made & ~np.isnan(now)])), float(now[rank, number])
    if name == "loss":
        middle, value = math.exp(middle), math.exp(value)
    what = "its loss is" if name == "loss" else "the cosine of its gradient with the others is"
    return f"{what} {number_in_words(value)}, and in the middle of all {number_in_words(middle)}"


def _only(which: np.ndarray, made: np.ndarray) -> list[tuple[int, int]]:
    """Return the passes for which something holds if that is less than half of them."""
    places = [(int(r), int(m)) for r, m in zip(*np.nonzero(which & made), strict=True)]
    return places if 2 * len(places) < int(made.sum()) or (len(places) == 1 and int(made.sum()) == 2) else []


def _not_finite(passes: Passes, made: np.ndarray) -> Blame | None:
    return _of_state(passes, passes.is_bad, made, "its gradient is not finite, that of others is", "finite")


def _zero(passes: Passes, made: np.ndarray) -> Blame | None:
    is_zero = (np.nan_to_num(passes.sketch[..., -1], nan=0.0) == 0).all(-1)
    return _of_state(passes, is_zero, made, "its gradient is zero, that of others is not", "zero")


def _of_state(passes: Passes, which: np.ndarray, made: np.ndarray, words: str, kind: str) -> Blame | None:
    """Blame the pass in which something alone holds, or a rank in all of whose passes it does and in no other."""
    which, ranks = which & made, {int(r) for r in np.nonzero(which & made)[0]}
    if len(ranks) == 1 and (rank := min(ranks)) >= 0 and len(made) > 1 and (which[rank] == made[rank]).all():
        number = 0 if made[rank].sum() == 1 else -1
        return _blame(passes, rank, number, words, math.inf, kind)
    places = _only(which, made)
    return _blame(passes, *places[0], words, math.inf, kind) if places else None


def _other_parameters(passes: Passes, made: np.ndarray) -> Blame | None:
    """Blame the rank whose parameters differ from those of most ranks."""
    weights = passes.weights
    if len(weights) < 2 or np.isnan(weights).any():
        return None
    length = np.maximum(weights[..., -1].max(0), 1e-30)
    apart = np.abs(weights[:, None] - weights[None]).max(-1) / length  # rank, rank, parameter
    is_equal = (apart <= _EQUAL).all(-1)
    n_equal = is_equal.sum(1)
    if n_equal.min() == len(weights):
        return None
    words = "its parameters differ from those of the other ranks, which should be the same"
    odd = np.flatnonzero(n_equal < n_equal.max())
    if len(odd) == 1:
        return _blame(passes, int(odd[0]), -1, words, math.inf, "parameters")
    words = "the parameters of the ranks differ, which should be the same"
    sentence = f"{words}; the ranks do not show which one is wrong"
    return Blame(passes.step, sentence, score=math.inf, kind="parameters")


@dataclass(frozen=True)
class Rows:
    """Rows of one micro-batch whose forward and backward pass was repeated, each alone.

    Attributes:
        rank: Rank that has them.
        micro_batch: Index of the backward pass of the update, from 0.
        numbers: Indices of the rows in the micro-batch.
        features: Values of each row by feature; infinite for a gradient that is not finite.
        ids: Ids of the rows.
        off: Difference between the gradient that was seen and the one computed again, over the former; NaN if unknown.
        scale: Factor between them.
        weight: Factor on the sum of the rows' losses, times their number, which is that on their mean; NaN if unknown.
        is_reference: Whether they are of an earlier update, and only show what is usual.
    """

    rank: int
    micro_batch: int
    numbers: Sequence[int]
    features: Mapping[str, np.ndarray]
    ids: Mapping[int, str] = field(default_factory=dict)
    off: float = math.nan
    scale: float = math.nan
    weight: float = math.nan
    is_reference: bool = False


def judge_rows(passes: Passes, found: Blame, groups: Sequence[Rows], *, is_current: bool = False) -> Blame:
    """Blame a row, if one departs from all others; otherwise return what is known without rows, or nobody.

    Args:
        passes: Passes of the update.
        found: The pass that departs, as of `PassHistory.judge`.
        groups: Rows of the micro-batches of the update, and of earlier ones.
        is_current: Whether the parameters are those of the update, so that gradients can be repeated exactly.
    """
    if found.kind in ("parameters", "zero"):
        return found
    now = [each for each in groups if not each.is_reference]
    if found.kind != "finite":
        for find in (_off, _weighted) if is_current else (_weighted,):
            if (other := find(passes, groups)) is not None:
                return other
    if found.score >= 1 and found.is_found and found.micro_batch >= 0:
        now = [each for each in now if (each.rank, each.micro_batch) == (found.rank, found.micro_batch)] or now
    best, top = found if found.score >= 1 and found.is_found else nobody(passes.step), 0.0
    medians = {id(each): _middles(each) for each in groups}
    for each in now:
        bad = np.isinf(each.features["size"]) if "size" in each.features else np.zeros(0, bool)
        if bad.any():
            if bad.sum() <= max(1, _MOST_BLAMED * len(bad)):
                return _of_row(
                    passes, each, int(np.flatnonzero(bad)[0]), "its gradient is not finite", math.inf, "finite"
                )
            continue
        for name, values in [pair for pair in each.features.items() if pair[0] in _T_OF_ROW]:
            given = [g.features[name] - medians[id(g)][name] for g in groups if name in g.features]
            others, values = np.concatenate(given), values - medians[id(each)][name]
            others = np.sort(others[np.isfinite(others)])[::-1]
            if len(others) < _FEWEST_ROWS or found.kind == "finite":
                continue
            i = int(np.argmax(np.where(np.isfinite(values), values, -math.inf)))
            far, apart = _T_OF_ROW[name]
            score = min(_deviates(values[i], others, _LEAST_OF_ROW[name]) / far, _gap(values[i], others) / apart)
            if score > top:
                top = score
                if score >= 1:
                    shift = medians[id(each)][name]
                    words = _of_row_feature(name, values[i] + shift, float(np.median(others)) + shift)
                    best = _of_row(passes, each, i, words, score, name)
    return best


def _middles(rows: Rows) -> dict[str, float]:
    """Return the median of each feature, from which rows differ; 0 if there are too few rows."""
    known = {name: values[np.isfinite(values)] for name, values in rows.features.items()}
    return {name: float(np.median(values)) if len(values) >= _OWN_MEDIAN else 0.0 for name, values in known.items()}


def _deviates(value: float, ordered: np.ndarray, least: float) -> float:
    """Return how many standard deviations a value is above the median of all, whose upper tail may be heavy."""
    middle, high = np.quantile(ordered, [0.5, 0.9])
    spread = max(1.4826 * float(np.median(np.abs(ordered - middle))), (high - middle) / 1.2816, least)
    return float((value - middle) / spread) if math.isfinite(value) else 0.0


def _gap(value: float, ordered: np.ndarray) -> float:
    """Return the distance of the largest value from the next one, over that of the next ones from each other.

    Of independent values with a tail of any scale, the former is above 3 times the latter about once in twenty times,
    unlike one that has another reason.
    """
    if value < ordered[0]:
        return 0.0
    following = ordered[1 : 1 + _N_NEXT]
    return float(value - following[0]) / max(float((following[:-1] - following[-1]).mean()), 1e-9)


def nobody(step: int, reason: str = "no rank, micro-batch or row departs from the others") -> Blame:
    """Return the answer that nobody is to blame."""
    return Blame(step, f"Step {step}: {reason}.")


def capital(found: Blame) -> Blame:
    """Return the same with a sentence that begins with a capital and ends with a stop."""
    words = found.sentence
    return replace(found, sentence=words[:1].upper() + words[1:].rstrip(".") + ".")


def _of_row(passes: Passes, rows: Rows, i: int, words: str, score: float, kind: str) -> Blame:
    number = rows.numbers[i]
    row_id = rows.ids.get(number, "")
    place = _place(passes, rows.rank, rows.micro_batch)
    place = "" if place == "this update" else f"{place}, "
    named = f"{place}row {number}" + (f" (id {row_id})" if row_id else "")
    return Blame(passes.step, f"{named}: {words}", rows.rank, rows.micro_batch, number, row_id, score, kind)


def _of_row_feature(name: str, value: float, middle: float) -> str:
    if name == "loss":
        return f"its loss is {number_in_words(value)}, in the middle of the others {number_in_words(middle)}"
    what = {"size": "its gradient is", "scale": "its inputs are"}[name]
    return f"{what} {number_in_words(math.exp(value - middle))} times the median of the others"


def _weighted(passes: Passes, groups: Sequence[Rows]) -> Blame | None:
    """Blame a pass whose loss has another weight than those of the others."""
    known = [(each, math.log(each.weight)) for each in groups if each.weight > 0 and math.isfinite(each.weight)]
    for each, weight in known if len(known) > 2 else ():
        others = np.array([other for of, other in known if of is not each])
        by = weight - float(np.median(others))
        spread = 1.4826 * float(np.median(np.abs(others - np.median(others))))
        score = abs(by) / max(_LEAST_WEIGHT, _TIMES_WEIGHT * spread)
        if score >= 1 and not each.is_reference:
            words = f"its loss has {number_in_words(math.exp(by))} times the weight of the others"
            return _blame(passes, each.rank, each.micro_batch, words, score, "weight")
    return None


def _off(passes: Passes, groups: Sequence[Rows]) -> Blame | None:
    """Blame a pass whose gradient is not the one that its batch gives, if that of the others is."""
    known = [each for each in groups if not math.isnan(each.off)]
    for each in known:
        rest = [other.off for other in known if other is not each]
        usual = max(float(np.median(rest)) if rest else math.inf, 0.0)
        if rest and each.off > max(_LEAST_OFF, _TIMES_OFF * usual):
            words = "its gradient is not the one that its batch gives when it is computed again; those of others are"
            if each.scale > 0 and abs(math.log(each.scale)) > 0.1:
                words = (
                    f"its gradient is {number_in_words(each.scale)} times the one that its batch gives when it is "
                    "computed again; those of others are the same"
                )
            score = each.off / max(_LEAST_OFF, _TIMES_OFF * usual)
            return _blame(passes, each.rank, each.micro_batch, words, score, "replay")
    return None
