"""Signals that the alarms watch, with the direction in which each is bad and what a change indicates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from workbench.callbacks.observation import Observation

#: Signals of the part ``attention`` that compare queries and keys over a window of updates.
_OVER_A_WINDOW = ("frobenius_norm", "stable_rank", "effective_rank", "spectral_entropy")
#: An effective or stable rank that exceeds its smallest value, 1, by less than this counts as 1.
_LEAST_EXCESS = 1e-4
_TINY = 1e-12


@dataclass(frozen=True)
class Watched:
    """One signal that the alarms watch.

    Attributes:
        part: Part of the run that holds the signal.
        variable: Variable of the signal.
        term: Term of the update of queries and keys, if the variable has terms: ``"D2"``, ``"dWq"``, ...; else empty.
        is_bad_low: Whether a fall is bad; otherwise a rise is.
        scale: Scale of the comparison: ``"linear"``, ``"log"``, or ``"excess"``, the logarithm of a rank minus 1.
        is_outcome: Whether it is a loss or the gradient norm, which are commonly watched; lead times are measured from
            the other signals to these.
        is_bad_both_ways: Whether it is bad in either direction.
        is_noise: Whether the measurements are independent apart from the trend, as those of random batches are.
        follows_rate: Whether it is proportional to the learning rate; it is then divided by the rate.
        accumulates: Whether its jumps also accumulate in a `CumulativeSum`.
        may_be_missing: Whether NaN only means that it was not measured, and not that a value is not finite.
        least_scale: Smallest standard deviation of the comparison, on the scale of `badness`.
        threshold: Threshold of a `LossShift`, which has a rate of false alarms of its own; NaN for all other signals,
            whose thresholds follow from the calibration.
        points_to: What a change of the signal indicates, in words.
    """

    part: str
    variable: str
    term: str = ""
    is_bad_low: bool = False
    scale: str = "log"
    is_outcome: bool = False
    is_bad_both_ways: bool = False
    is_noise: bool = False
    follows_rate: bool = False
    accumulates: bool = False
    may_be_missing: bool = False
    least_scale: float = 0.01
    threshold: float = math.nan
    points_to: str = ""

    @property
    def name(self) -> str:
        """Variable and term, such as ``"effective_rank D2"``."""
        return f"{self.variable} {self.term}".strip()

    @property
    def is_apart(self) -> bool:
        """Whether it may be measured at other updates than the rest of its part: the loss, and changes of weights."""
        return self.variable == "loss" or (self.part == "attention" and self.variable in _OVER_A_WINDOW)

    def badness(self, values: np.ndarray) -> np.ndarray:
        """Return values on a scale on which equal differences are equally bad and larger values are worse.

        Args:
            values: Values as recorded, of any shape.

        Returns:
            Array of the same shape, float64; NaN where a value is NaN, infinite, or negative on a logarithmic scale.
        """
        values = np.asarray(values, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.scale == "excess":
                values = np.log(np.maximum(values - 1, 0) + _LEAST_EXCESS)
            elif self.scale == "log":
                values = np.log(values + _TINY)
        values = np.where(np.isfinite(values), values, np.nan)
        return -values if self.is_bad_low else values


_UPDATE = (
    "the updates of queries and keys of this head are reduced to one direction, as with biased attention gradients"
)
_RANKS = {
    "D2": _UPDATE,
    "D3": _UPDATE,
    "dWq": "the updates of the queries are reduced to one direction",
    "dWk": "the updates of the keys are reduced to one direction",
}
_NORMS = {
    "D2": "the product of queries and keys changes more in each window than before",
    "dWq": "the queries change more in each window than before",
    "dWk": "the keys change more in each window than before",
    "W": "the product of queries and keys grows, and with it the attention logits",
}
#: Shifts of the loss that a person sees in its curve, whatever the calibration says. The thresholds are in deviations
#: of the mean of a window; data/README.md has their rate of false alarms.
RISE = Watched(
    "monitors", "loss", "rise", scale="linear", is_outcome=True, is_noise=True, threshold=5.5,
    points_to="something has changed for the worse, such as labels, tokens, masks or the rate",
)  # fmt: skip
FALL = Watched(
    "monitors", "loss", "fall", is_bad_low=True, scale="linear", is_outcome=True, is_noise=True, threshold=12.0,
    points_to="look whether labels leak into the inputs, a mask is lost or batches repeat; a task that is learned "
    "abruptly falls like this as well",
)  # fmt: skip
_MONITORED: tuple[Watched, ...] = (
    RISE,
    FALL,
    Watched("monitors", "loss", scale="linear", is_outcome=True, is_noise=True, least_scale=0.02,
        points_to="the loss itself rises"),
    Watched("monitors", "largest_losses", scale="linear", is_outcome=True, is_noise=True, may_be_missing=True,
        least_scale=0.02,
        points_to="some tokens are predicted much worse, as with wrong labels"),
    Watched("monitors", "grad_norm", is_outcome=True, accumulates=True, points_to="the gradients grow"),
    Watched("monitors", "update_ratio", follows_rate=True, may_be_missing=True,
        points_to="the updates grow relative to the parameters, at the same learning rate"),
    Watched("monitors", "token_entropy", scale="linear", is_bad_both_ways=True, is_noise=True, may_be_missing=True,
        points_to="the batches contain other tokens than before"),
    Watched("monitors", "label_entropy", scale="linear", is_bad_both_ways=True, is_noise=True, may_be_missing=True,
        points_to="the batches contain other labels than before"),
)  # fmt: skip
_OF_ATTENTION: tuple[Watched, ...] = (
    *(
        Watched("attention", "effective_rank", term, is_bad_low=True, scale="excess", points_to=words)
        for term, words in _RANKS.items()
    ),
    *(
        Watched("attention", "frobenius_norm", term, follows_rate=term != "W", points_to=words)
        for term, words in _NORMS.items()
    ),
    Watched("attention", "attention_logit_max", may_be_missing=True,
        points_to="attention logits grow towards saturation of the softmax"),
    Watched(
        "attention", "attention_entropy_share", is_bad_low=True, scale="linear", least_scale=0.02, may_be_missing=True,
        points_to="attention narrows to single tokens"),
)  # fmt: skip
_OF_ROUTERS: tuple[Watched, ...] = (
    Watched("router", "router_similarity", scale="linear", least_scale=0.02,
        points_to="the router weights of the experts become similar"),
    Watched("router", "router_conditioning", is_bad_low=True, points_to="the rows of the router are nearly equal"),
    Watched("router", "routing_entropy_share", is_bad_low=True, scale="linear", least_scale=0.02,
        points_to="the routing entropy is low too early"),
    Watched("router", "max_violation", scale="linear", least_scale=0.05,
        points_to="one expert receives a disproportionate fraction of the tokens"),
    Watched("router", "routing_change", scale="linear", least_scale=0.02,
        points_to="tokens keep changing their experts"),
)  # fmt: skip
_OF_UPDATES: tuple[Watched, ...] = (
    Watched("optimizer", "adam_staleness", points_to="gradients exceed the optimizer's estimate of their magnitude"),
)
_OF_ACTIVATIONS: tuple[Watched, ...] = (
    Watched("activations", "activation_max", points_to="single activations grow"),
    Watched("activations", "outlier_ratio", points_to="single activations exceed the others"),
    Watched("activations", "kurtosis", points_to="activations have heavier tails"),
    Watched("activations", "state_norm", points_to="the residual stream grows"),
    Watched("activations", "log_z", points_to="the output logits drift away from normalized"),
)

#: Every signal that is watched if a run records it.
WATCHED: tuple[Watched, ...] = (*_MONITORED, *_OF_ATTENTION, *_OF_ROUTERS, *_OF_UPDATES, *_OF_ACTIVATIONS)


@dataclass(frozen=True)
class WatchedValues:
    """A watched signal in one measurement."""

    watched: Watched
    values: np.ndarray
    layers: np.ndarray | None


def watched_values(observation: Observation) -> Iterator[WatchedValues]:
    """Yield the watched signals of a measurement."""
    values, coords = observation.values, observation.coords
    has_no_window = observation.part == "attention" and _lacks_window(values)
    is_skipped = bool(np.asarray(values.get("is_skipped", 0)) == 1)
    has_batch = bool(np.asarray(values.get("examined", 2)) != 1)
    for watched in WATCHED:
        if watched.part != observation.part or watched.variable not in values or watched.threshold > 0:
            continue
        if is_skipped and watched.variable == "grad_norm":  # not measured without an update
            continue
        if observation.part == "monitors" and not has_batch and watched.variable != "loss":
            continue
        if has_no_window and watched.variable in _OVER_A_WINDOW:
            continue
        found = np.asarray(values[watched.variable], dtype=np.float64)
        if watched.term:
            terms = [str(term) for term in coords["term"]]
            if watched.term not in terms:
                continue
            found = found[..., terms.index(watched.term)]
        layers = np.asarray(coords["layer"]) if "layer" in coords and found.ndim else None
        yield WatchedValues(watched, found, layers)


def _lacks_window(values: Mapping[str, np.ndarray]) -> bool:
    """Return whether updates of queries and keys are missing because their window is not full yet after a resume.

    Attention itself is still measured then; if parameters are not finite, its logits are not finite either.
    """
    spectra = [np.asarray(values[name], dtype=np.float64) for name in _OVER_A_WINDOW if name in values]
    logits = np.asarray(values.get("attention_logit_max", np.nan), dtype=np.float64)
    return bool(np.isfinite(logits).any()) and all(np.isnan(found).all() for found in spectra)
