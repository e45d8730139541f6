"""Limits of metrics and attention logits that need no past: what no sound run exceeds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

#: Tokens, or examples without tokens, of a batch whose labels or tokens are not all the same by chance.
N_LABELS = 32
#: Entropy of the tokens of a batch, in nat, below which nearly all are the same.
LOW_ENTROPY = 0.3
#: Largest exponent of 2 of a gradient norm that is a loss scale and no limit of a clipping, and its tolerance.
LARGEST_EXPONENT, EXPONENT_TOLERANCE = -5, 1e-3
#: Value of ``lookahead`` that no number format explains.
LOOKAHEAD = 0.03

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Limit:
    """A limit of the metrics of an update.

    Attributes:
        variable: The metric that it is about.
        n_rows: Number of updates beyond it that raise an alarm.
        of_last: Number of latest updates among which these are counted; as many for updates in a row.
        is_beyond: Whether the metrics of an update, NaN where unknown, are beyond it.
        sentence: What it means and what to do; with ``{value}``, the value of the metric.
        fault: Fault that it shows; ``"unknown"`` if it may have several.
        counts_skipped: Whether updates that were skipped because of an overflow count.
    """

    variable: str
    n_rows: int
    of_last: int
    is_beyond: Callable[[Numbers], bool]
    sentence: str
    fault: str
    counts_skipped: bool = False


def _is_scale(norm: float) -> bool:
    power = math.log2(norm) if 0 < norm < math.inf else math.nan
    return power <= LARGEST_EXPONENT and abs(power - round(power)) < EXPONENT_TOLERANCE


def _is_large(of: Numbers) -> bool:
    return (of["batch_size"] if math.isnan(of["n_tokens"]) else of["n_tokens"]) >= N_LABELS


#: The limits, by what they find.
LIMITS: tuple[Limit, ...] = (
    Limit(
        "label_entropy", 3, 3, lambda of: of["label_entropy"] < 1e-9 and _is_large(of),
        "All labels of the last 3 batches are the same: check the code that makes them.", "corrupted_data",
    ),
    Limit(
        "ignored_labels", 3, 3, lambda of: of["ignored_labels"] >= 1,
        "All labels of the last 3 batches are ignored, so that nothing is learned: check how they are masked.",
        "corrupted_data",
    ),
    Limit(
        "token_entropy", 5, 5, lambda of: of["token_entropy"] < LOW_ENTROPY and _is_large(of),
        "The tokens of the last 5 batches are nearly all the same one (entropy {value:.2g} nat), such as padding or an "
        "unknown token: check the tokenizer.", "corrupted_data",
    ),
    Limit(
        "grad_norm", 3, 3, lambda of: of["grad_norm"] == 0 and of["loss"] != 0,
        "The gradient norm of the last 3 updates is exactly 0: no gradient reaches the optimizer. Look for detach() or "
        "zero_grad() between loss and update, and for labels that are all ignored.", "no_gradient",
    ),
    Limit(
        "grad_norm", 5, 5, lambda of: _is_scale(of["grad_norm"]),
        "The gradient norm of the last 5 updates is exactly a power of 2 ({value:.3g}): gradients are clipped before "
        "the loss scale is removed. Call scaler.unscale_(optimizer) before the clipping.", "loss_scale",
    ),
    Limit(
        "loss", 3, 3, lambda of: of["loss"] == math.inf or (
            math.isfinite(of["batch_size"]) and math.isnan(of["loss"]) and not math.isfinite(of["grad_norm"])
        ),
        "Loss and gradients of the last 3 updates are not finite: lower the learning rate, or look for the first value "
        "that is not finite with wb.probes.first_bad_tensor.", "unknown",
    ),
    Limit(
        "loss_scale", 3, 3, lambda of: of["loss_scale"] < 1,
        "The loss scale fell to {value:.3g}: gradients overflow in float16 at any scale. Look for values that are not "
        "finite, or train in bfloat16.", "loss_scale", counts_skipped=True,
    ),
    Limit(
        "lookahead", 10, 100, lambda of: of["lookahead"] > LOOKAHEAD and of["label_agreement"] >= 1,
        "Labels are the tokens of the inputs, but examples that begin with the same token have different outputs "
        "there: positions depend on later tokens, as without a causal mask, or on something random.", "unknown",
    ),
    Limit(
        "is_skipped", 12, 20, lambda of: of["is_skipped"] >= 1 and math.isnan(of["loss_scale"]),
        "The gradients of 12 of the last 20 backward passes were cleared without an update: call zero_grad() once an "
        "update, not once a micro-batch.", "gradients_discarded", counts_skipped=True,
    ),
    Limit(
        "is_skipped", 12, 20, lambda of: of["is_skipped"] >= 1 and math.isfinite(of["loss_scale"]),
        "12 of the last 20 updates were skipped because gradients overflowed in float16: the model hardly learns. "
        "Look for values that are not finite, or train in bfloat16.", "loss_scale", counts_skipped=True,
    ),
)  # fmt: skip
_NAMES = (
    "batch_size", "n_tokens", "loss", "grad_norm", "label_entropy", "ignored_labels", "token_entropy", "loss_scale",
    "is_skipped", "lookahead", "label_agreement",
)  # fmt: skip


class AbsoluteLimits:
    """Detector of metrics beyond a limit."""

    def __init__(self) -> None:
        self._latest = [deque[bool](maxlen=limit.of_last) for limit in LIMITS]

    def update(self, values: Mapping[str, Any]) -> tuple[Limit, float] | None:
        """Process the metrics of an update.

        Returns:
            The first limit that is exceeded, and the value of its metric; None if there is none.
        """
        of = {name: float(np.asarray(values.get(name, math.nan))) for name in _NAMES}
        found = None
        for limit, latest in zip(LIMITS, self._latest, strict=True):
            if of["is_skipped"] >= 1 and not limit.counts_skipped:
                continue
            latest.append(limit.is_beyond(of))
            if latest[-1] and sum(latest) >= limit.n_rows and found is None:
                found = limit, of[limit.variable]
        return found


#: All runs whose logits exceeded this diverged (Wortsman et al. 2023, arXiv:2309.14322, section 3.1). Losses worsen
#: from about a tenth of it on, a value that a healthy model without norms was observed to reach as well.
LOGIT_LIMIT = 10_000.0


class LargeLogit(NamedTuple):
    """The largest attention logit of a measurement that exceeds the limit, unit 1, with its place."""

    value: float
    layer: int
    head: int


class LogitLimit:
    """Detector of attention logits that grow beyond 10,000.

    `OwnPast` follows a trend and therefore does not report slow growth, so that an absolute limit is needed. A model
    whose logits exceed it from the first measurement on is not reported.
    """

    def __init__(self) -> None:
        self._was_within = False

    def update(self, values: Mapping[str, Any], coords: Mapping[str, Any]) -> LargeLogit | None:
        """Process a measurement of attention, of which ``attention_logit_max`` (layer, head) is used.

        Returns:
            The largest logit if it exceeds the limit after earlier ones did not; else None.
        """
        logits = np.asarray(values.get("attention_logit_max", math.nan), dtype=np.float64)
        if logits.ndim != 2 or not np.isfinite(logits).any():
            return None
        row, head = np.unravel_index(int(np.nanargmax(logits)), logits.shape)
        if logits[row, head] <= LOGIT_LIMIT:
            self._was_within = True
            return None
        layer = int(np.asarray(coords["layer"])[row]) if "layer" in coords else int(row)
        return LargeLogit(float(logits[row, head]), layer, int(head)) if self._was_within else None
