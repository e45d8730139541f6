"""Alarms without calibration: findings of probes, settings changed without a plan, metrics and logits beyond limits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from workbench.callbacks.observation import OF_CONTRACT, Alarm, Observation
from workbench.formatting import counted, percent
from workbench.probes.gradient_agreement import GradientVerdict
from workbench.probes.precision import broken_arithmetic

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
    Limit("label_entropy", 3, 3, lambda of: of["label_entropy"] < 1e-9 and _is_large(of),
        "All labels of the last 3 batches are the same: check the code that makes them.", "corrupted_data"),
    Limit("ignored_labels", 3, 3, lambda of: of["ignored_labels"] >= 1,
        "All labels of the last 3 batches are ignored, so that nothing is learned: check how they are masked.",
        "corrupted_data"),
    Limit("token_entropy", 5, 5, lambda of: of["token_entropy"] < LOW_ENTROPY and _is_large(of),
        "The tokens of the last 5 batches are nearly all the same one (entropy {value:.2g} nat), such as padding or an "
        "unknown token: check the tokenizer.", "corrupted_data"),
    Limit("grad_norm", 3, 3, lambda of: of["grad_norm"] == 0 and of["loss"] != 0,
        "The gradient norm of the last 3 updates is exactly 0: no gradient reaches the optimizer. Look for detach() or "
        "zero_grad() between loss and update, and for labels that are all ignored.", "no_gradient"),
    Limit("grad_norm", 5, 5, lambda of: _is_scale(of["grad_norm"]),
        "The gradient norm of the last 5 updates is exactly a power of 2 ({value:.3g}): gradients are clipped before "
        "the loss scale is removed. Call scaler.unscale_(optimizer) before the clipping.", "loss_scale"),
    Limit("loss", 3, 3, lambda of: of["loss"] == math.inf or (
            math.isfinite(of["batch_size"]) and math.isnan(of["loss"]) and not math.isfinite(of["grad_norm"])
        ),
        "Loss and gradients of the last 3 updates are not finite: lower the learning rate, or look for the first value "
        "that is not finite with wb.probes.first_bad_tensor.", "unknown"),
    Limit("loss_scale", 3, 3, lambda of: of["loss_scale"] < 1,
        "The loss scale fell to {value:.3g}: gradients overflow in float16 at any scale. Look for values that are not "
        "finite, or train in bfloat16.", "loss_scale", counts_skipped=True),
    Limit("lookahead", 10, 100, lambda of: of["lookahead"] > LOOKAHEAD and of["label_agreement"] >= 1,
        "Labels are the tokens of the inputs, but examples that begin with the same token have different outputs "
        "there: positions depend on later tokens, as without a causal mask, or on something random.", "unknown"),
    Limit("is_skipped", 12, 20, lambda of: of["is_skipped"] >= 1 and math.isnan(of["loss_scale"]),
        "The gradients of 12 of the last 20 backward passes were cleared without an update: call zero_grad() once an "
        "update, not once a micro-batch.", "gradients_discarded", counts_skipped=True),
    Limit("is_skipped", 12, 20, lambda of: of["is_skipped"] >= 1 and math.isfinite(of["loss_scale"]),
        "12 of the last 20 updates were skipped because gradients overflowed in float16: the model hardly learns. "
        "Look for values that are not finite, or train in bfloat16.", "loss_scale", counts_skipped=True),
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


#: Examples after which batches are evaluated: four times as many as the recorder remembers, so that a small data set
#: has already started again by then.
_N_EXAMPLES = 4096
#: Probability of a sequence of repeated batches, given the fraction of such batches so far, below which it is reported.
_PROBABILITY = 1e-7
#: Fraction of repeated examples from which on repetition is common.
_COMMON = 0.5
#: Batches after which a batch that equals one of the last eight is reported at once, more than such a small data set
#: has, and smallest size of a batch that no shuffled data set repeats by chance.
_N_BATCHES, _LEAST_SIZE = 16, 4


class RepeatedBatches:
    """Detector of sequences of repeated batches, that is, of batches all of whose examples occurred before.

    A batch of four or more examples that equals one of the last eight batches, in the same order, is reported at once,
    unless it does so from the start, as if there are only a few batches. Otherwise, the probability of a repeated batch
    is estimated as (number of repeated batches + 1) / (number of batches + 2), so that after 400 batches without a
    repeated one, three in a row are reported.

    A sequence must also be more than twice as long as any before, since a loop may use each batch several times.
    Nothing is reported if half of all examples repeat, because the data set is small. Counting restarts when the batch
    size changes. A loader that repeats more batches than the recorder remembers (1,024 examples) is not detected.
    """

    def __init__(self) -> None:
        self._begin(math.nan)

    def _begin(self, size: float) -> None:
        self._size, self._n_examples, self._sum = size, 0.0, 0.0
        self._n_batches = self._n_repeated = self._longest = self._n_same = 0
        #: Number of consecutive repeated batches, up to the latest one.
        self.n_in_a_row = 0
        self._may_report = False

    def update(self, values: Mapping[str, Any]) -> bool | None:
        """Process the metrics of an update.

        Returns:
            Whether the loader repeats itself; None if unknown.
        """
        names = ("repeated_examples", "batch_size", "repeated_batch")
        fraction, size, same = (float(np.asarray(values.get(name, math.nan))) for name in names)
        if not (math.isfinite(fraction) and math.isfinite(size)):
            return None
        if size != self._size:  # smaller batches are more often fully repeated by chance
            self._begin(size)
        is_repeated = fraction >= 1
        is_evaluated = self._n_examples >= _N_EXAMPLES
        self._n_examples += size
        self._n_batches += 1
        self._sum += fraction
        if not is_repeated:
            self._longest = max(self._longest, self.n_in_a_row)
            self.n_in_a_row = self._n_same = 0
            return False
        if not self.n_in_a_row:
            self._may_report = is_evaluated
        self.n_in_a_row += 1
        self._n_repeated += 1
        n_before = self._n_batches - self.n_in_a_row
        usual = (self._n_repeated - self.n_in_a_row + 1) / (n_before + 2)
        is_common = self._sum - self.n_in_a_row >= _COMMON * n_before
        self._n_same = self._n_same + 1 if same >= 1 else 0
        is_known = self._n_same == self.n_in_a_row and size >= _LEAST_SIZE and n_before >= _N_BATCHES
        if is_known and not is_common and self.n_in_a_row > 2 * self._longest:
            return True
        if not self._may_report or is_common or self.n_in_a_row <= 2 * self._longest:
            return False
        return self.n_in_a_row * math.log(usual) <= math.log(_PROBABILITY)


class RuleOfTask:
    """Detector of batches without a property that all batches before them had.

    In language modeling, for example, every label is the next token, without exception. Other tasks have no such rule,
    and nothing is reported for them.
    """

    def __init__(
        self,
        variable: str,
        holds: Callable[[float], bool],
        is_broken: Callable[[float], bool],
        *,
        n_least: int = 20,
        n_broken: int = 1,
    ) -> None:
        self._variable, self._holds, self._is_broken = variable, holds, is_broken
        self._n_least, self._n_broken = n_least, n_broken
        self.n_before = self._n_in_a_row = 0
        self._is_rule = True

    def update(self, values: Mapping[str, Any]) -> bool:
        """Process the metrics of an update, and return whether the rule is broken."""
        value = float(np.asarray(values.get(self._variable, math.nan)))
        if self._holds(value):
            self.n_before += 1
            self._n_in_a_row = 0
        elif self._is_broken(value):
            self._is_rule &= self._n_in_a_row > 0 or self.n_before >= self._n_least
            self._n_in_a_row += 1
        return self._is_rule and self._n_in_a_row >= self._n_broken


#: An alarm, and the faults that may have caused it.
Finding = tuple[Alarm, tuple[str, ...]]
#: Part -> name of the signal.
SIGNALS = {"precision": "arithmetic", "reduction": "gradients", "monitors": "data", "attention": "logits"}
#: Value of ``lookahead`` up to which rounding may explain it.
_NO_LOOKAHEAD = 0.01
#: Signal of the limits of metrics.
LIMITS_SIGNAL = "limits"
#: Verdict on gradients -> faults that cause it; several if they cannot be distinguished.
_FAULTS = {
    GradientVerdict.LOW_PRECISION: ("low_precision_reduction",),
    GradientVerdict.STALE: ("stale_reduction",),
    GradientVerdict.PARAMETERS_MISSING: ("dropped_bucket",),
    GradientVerdict.RANKS_UNEQUAL: ("dropped_bucket",),
    GradientVerdict.RANK_MISSING: ("dropped_bucket",),
    GradientVerdict.PASS_MISSING: ("dropped_bucket",),
    GradientVerdict.DISCARDED: ("gradients_discarded",),
    GradientVerdict.NOT_CLEARED: ("gradients_not_cleared",),
    GradientVerdict.NOT_COMPUTED: ("stale_reduction", "dropped_bucket", "low_precision_reduction"),
}
#: Verdicts that a training loop may cause on purpose.
_MAY_BE_MEANT = (GradientVerdict.LOW_PRECISION, GradientVerdict.NOT_COMPUTED, GradientVerdict.PASS_MISSING)
#: Setting, and whether it rose -> the fault.
_OF_SETTINGS = {
    ("learning_rate", True): "large_rate",
    ("batch_size", False): "small_batch",
    ("auxiliary_loss", False): "no_auxiliary_loss",
    ("tensors_without_gradient", False): "no_gradient",
    ("unchanged_tensors", False): "updates_lost",
}
#: Cause if the changed setting is not a known fault, and number of steps for which later alarms are attributed to it.
_OTHER_SETTING, _LASTS = "changed_setting", 50
#: Fault of a broken contract.
BROKEN_CONTRACT = "broken_contract"
#: Measurements without a fault after which it is considered over; some faults are intermittent.
_OVER_AFTER = 3
#: The same for the limits of metrics, in updates, because batches at a limit alternate with others.
_LIMIT_OVER_AFTER = 100
#: With fewer significant bits the fault may also be another one than rounding, which remains the most probable.
_LEAST_BITS = 2
_UNSURE = ("low_precision_reduction", "stale_reduction", "dropped_bucket")


@dataclass(frozen=True)
class Check:
    """One measurement of a probe."""

    step: int  # of the block measured longest ago if blocks are measured in turn and all are sound
    signal: str
    message: str

    @property
    def is_sound(self) -> bool:
        """Whether no fault was found."""
        return not self.message


class LatestArithmetic:
    """Latest errors of the arithmetic of each block, of which a run may measure only some at a time."""

    def __init__(self) -> None:
        self._values: dict[str, np.ndarray] = {}
        self._steps = np.zeros(0, dtype=np.int64)

    def update(self, observation: Observation) -> tuple[Observation, np.ndarray]:
        """Return an observation with the latest values of all blocks, and which of them are new, shape (layer,)."""
        values = {name: np.asarray(value, dtype=np.float64) for name, value in observation.values.items()}
        is_new = ~np.isnan(values["error_excess"])
        for name, value in values.items():
            before = self._values.get(name, value)
            if value.ndim and before.shape == value.shape:
                values[name] = np.where(is_new.reshape(-1, *[1] * (value.ndim - 1)), value, before)
        self._values = values
        before = self._steps if len(self._steps) == len(is_new) else np.full(len(is_new), -1)
        self._steps = np.where(is_new, observation.step, before)
        return replace(observation, values=values), is_new

    @property
    def oldest_step(self) -> int:
        """Step of the block that was measured longest ago; -1 if none was."""
        return int(min(self._steps[self._steps >= 0], default=-1))


class ProbeAlarms:
    """Alarms at the first measurement at which a probe finds a fault, and again if it returns after it was over.

    A loop that changes gradients on purpose, by clipping values, adding noise or compressing them, does so from its
    first measurement on. In that case neither such changes, nor low precision, nor a missing backward pass raise an
    alarm. If routers choose experts, broken arithmetic must be found in two consecutive measurements, because a token
    near a tie may be sent to another expert in float64, which in a single measurement is indistinguishable from a
    fault. If blocks are measured in turn, the latest measurement of each counts.
    """

    def __init__(self) -> None:
        self.standing: dict[str, Finding] = {}
        self.checks: dict[str, Check] = {}
        self._n_clean: dict[str, int] = {}
        self._changes_gradients: bool | None = None
        self._batches = RepeatedBatches()
        self._labels = RuleOfTask("label_agreement", lambda value: value >= 1, lambda value: value < 1)
        self._causality = RuleOfTask(
            "lookahead", lambda value: value < _NO_LOOKAHEAD, lambda value: value > LOOKAHEAD, n_broken=3
        )
        self._logits = LogitLimit()
        self._limits = AbsoluteLimits()
        self._arithmetic_of_blocks = LatestArithmetic()
        self.is_in_doubt = False
        self._doubted = -1  # layer with a finding that its next measurement confirms or refutes
        self._has_routers = False

    def observe(self, observation: Observation) -> list[Alarm]:
        """Process an observation of any part.

        Returns:
            The alarms that it raises, usually none.
        """
        if observation.part == "settings":
            return self._setting(observation)
        if observation.part == "contracts":
            return self._contract(observation)
        self._has_routers |= observation.part == "router"
        signal = SIGNALS.get(observation.part)
        if signal is None or observation.values.get("examined", 2) == 1:  # the batch was not examined
            return []
        of_limits = []
        if observation.part == "monitors":
            standing = self.standing.get("settings")
            is_other = standing is not None and standing[1] == (_OTHER_SETTING,)
            if standing is not None and is_other and observation.step > standing[0].step + _LASTS:
                del self.standing["settings"]
            for name in [n for n, (of, _) in self.standing.items() if n.startswith(OF_CONTRACT)]:
                if observation.step > self.standing[name][0].step + _LASTS:  # a later alarm may have another cause
                    del self.standing[name]
            beyond = self._beyond_limits(observation)
            own = "" if beyond is None else f"{LIMITS_SIGNAL} {beyond[1][0]}"
            for other in [each for each in self.standing if each.startswith(LIMITS_SIGNAL) and each != own]:
                self._settle(other, None, over_after=_LIMIT_OVER_AFTER)
            of_limits = self._settle(own, beyond) if own else []
        finders = {
            "precision": self._arithmetic,
            "reduction": self._gradients,
            "monitors": self._data,
            "attention": self._large_logit,
        }
        found = finders[observation.part](observation)
        is_measured = observation.part == "precision" and not self.is_in_doubt
        if observation.part == "reduction":  # gradients cannot be measured at every step
            is_measured = float(observation.values["gradient_verdict"]) >= 0
        if is_measured:
            step = self._arithmetic_of_blocks.oldest_step if found is None and signal == "arithmetic" else -1
            message = "" if found is None else found[0].message
            self.checks[signal] = Check(observation.step if step < 0 else step, signal, message)
        return of_limits + self._settle(signal, found)

    def _settle(self, signal: str, found: Finding | None, *, over_after: int = _OVER_AFTER) -> list[Alarm]:
        """Return the alarm of a finding unless it stands already; a fault is over after some measurements without."""
        if found is None:
            self._n_clean[signal] = self._n_clean.get(signal, 0) + 1
            if self._n_clean[signal] >= over_after:
                self.standing.pop(signal, None)
            return []
        self._n_clean[signal] = 0
        was_standing = signal in self.standing
        self.standing[signal] = found
        return [] if was_standing else [found[0]]

    def _arithmetic(self, observation: Observation) -> Finding | None:
        latest, is_new = self._arithmetic_of_blocks.update(observation)
        found = _broken_arithmetic(latest)
        if not self._has_routers or SIGNALS["precision"] in self.standing:
            self.is_in_doubt, self._doubted = False, -1
            return found
        is_found_now = found is not None and bool(is_new[found[0].layer])
        is_measured_again = self._doubted >= 0 and bool(is_new[self._doubted])
        self.is_in_doubt = is_found_now and not is_measured_again
        if found is not None and self.is_in_doubt:
            self._doubted = found[0].layer
        elif is_measured_again:
            self._doubted = -1
        return found if is_found_now and is_measured_again else None

    def _setting(self, observation: Observation) -> list[Alarm]:
        setting, message = (str(observation.coords[name]) for name in ("setting", "message"))
        factor = float(observation.values["factor"])
        self.standing.pop("settings", None)
        if factor == 1:  # the setting follows its plan
            return []
        alarm = Alarm(observation.step, setting, -1, -1, math.inf, factor, is_outcome=False, message=message)
        self.standing["settings"] = alarm, (_OF_SETTINGS.get((setting, factor > 1), _OTHER_SETTING),)
        return [alarm]

    def _contract(self, observation: Observation) -> list[Alarm]:
        id, message = (str(observation.coords[name]) for name in ("contract", "message"))
        signal = f"{OF_CONTRACT}{id}"
        alarm = Alarm(observation.step, signal, -1, -1, math.inf, math.nan, is_outcome=False, message=message)
        return self._settle(signal, (alarm, (BROKEN_CONTRACT,)))

    def _data(self, observation: Observation) -> Finding | None:
        is_broken = self._labels.update(observation.values), self._causality.update(observation.values)
        if is_broken[0]:
            fraction = 1 - float(observation.values["label_agreement"])
            message = (
                f"{percent(fraction)} of the labels differ from the tokens of their inputs, whereas all labels of the "
                f"{self._labels.n_before:,} batches before agreed: check the code that prepares the data."
            )
            return _alarm(observation, score=math.inf, value=fraction, message=message), ("corrupted_data",)
        if is_broken[1]:
            value = float(observation.values.get("lookahead", math.nan))
            message = (
                "In the last 3 updates, examples that begin with the same token had different outputs there, and equal "
                f"ones in {self._causality.n_before:,} updates before: positions depend on later tokens, as without a "
                "causal mask, or on something random."
            )
            return _alarm(observation, score=math.inf, value=value, message=message), ("unknown",)
        if not self._batches.update(observation.values):
            return None
        n = self._batches.n_in_a_row
        which = "The whole batch" if n == 1 else f"All examples of the last {n} batches"
        message = f"{which} occurred shortly before: the data loader repeats itself. Restart it."
        return _alarm(observation, score=math.inf, value=1.0, message=message), ("repeated_data",)

    def _beyond_limits(self, observation: Observation) -> Finding | None:
        found = self._limits.update(observation.values)
        if found is None or (found[0].variable == "lookahead" and SIGNALS["monitors"] in self.standing):
            return None
        limit, value = found
        message = limit.sentence.format(value=value)
        alarm = _alarm(observation, score=math.inf, value=value, message=message)
        return replace(alarm, signal=LIMITS_SIGNAL), (limit.fault,)

    def _large_logit(self, observation: Observation) -> Finding | None:
        found = self._logits.update(observation.values, observation.coords)
        if found is None:
            return None
        message = (
            f"The largest attention logit has grown to {found.value:,.0f} in layer {found.layer}, head {found.head}; "
            f"runs beyond {LOGIT_LIMIT:,.0f} are known to diverge: normalize queries and keys, or lower the "
            "learning rate."
        )
        where = {"layer": found.layer, "head": found.head}
        alarm = _alarm(observation, score=found.value / LOGIT_LIMIT, value=found.value, message=message, **where)
        return alarm, ("logit_growth",)

    def _gradients(self, observation: Observation) -> Finding | None:
        values = observation.values
        code = int(values["gradient_verdict"])
        if code < 0:
            return None
        verdict = list(GradientVerdict)[code]
        causes = _FAULTS.get(verdict, ())
        if verdict == GradientVerdict.LOW_PRECISION and not float(values["significant_bits"]) >= _LEAST_BITS:
            verdict, causes = GradientVerdict.NOT_COMPUTED, _UNSURE
        may_be_meant = verdict in _MAY_BE_MEANT
        if self._changes_gradients is None:
            self._changes_gradients = may_be_meant
        if not verdict.is_fault or (may_be_meant and self._changes_gradients):
            return None
        fraction = float(values["wrong_parameters"])
        return _alarm(observation, score=fraction, value=fraction, message=_sentence(verdict, values)), causes


def _alarm(
    observation: Observation, *, score: float, value: float, message: str, layer: int = -1, head: int = -1
) -> Alarm:
    signal = SIGNALS[observation.part]
    return Alarm(observation.step, signal, layer, head, score, value, is_outcome=False, message=message)


def _broken_arithmetic(observation: Observation) -> Finding | None:
    found = broken_arithmetic(observation.values)
    if found is None:
        return None
    score = found.excess / float(observation.values["excess_limit"])
    where = {"layer": found.layer, "head": found.head}
    sentence, rank = found.sentence, float(observation.values.get("broken_rank", math.nan))
    if not math.isnan(rank):
        sentence = f"On rank {rank:.0f} {sentence[0].lower()}{sentence[1:]}"
    alarm = _alarm(observation, score=score, value=found.error, message=sentence, **where)
    return alarm, ("low_precision_attention" if found.head >= 0 else "arithmetic",)


#: What is wrong with the gradients, and how to correct it.
_SENTENCES = {
    GradientVerdict.LOW_PRECISION: "Gradients reach the optimizer with about {bits} {where}: reduce them in float32.",
    GradientVerdict.RANK_MISSING:
        "The gradients of rank {rank} are missing {where}: check its reduction and its network.",
    GradientVerdict.RANKS_UNEQUAL: "The gradients of the ranks are weighted unequally {where}: check the reduction.",
    GradientVerdict.PARAMETERS_MISSING:
        "The optimizer receives zeros instead of the computed gradients {where}: buckets of the reduction are lost.",
    GradientVerdict.PASS_MISSING:
        "The gradients of {which_pass} of this step are missing {where}: check how gradients are accumulated and "
        "reduced.",
    GradientVerdict.NOT_CLEARED:
        "The gradients of earlier updates are never cleared {where}, so that every update repeats them: call "
        "optimizer.zero_grad() once an update.",
    GradientVerdict.DISCARDED:
        "Only the last of several backward passes counts {where}: .grad is cleared before it, although the parameters "
        "have not changed. Call zero_grad() once an update, not once a micro-batch.",
}  # fmt: skip
_OTHER_SENTENCE = (
    "The gradients that the optimizer receives are {age} {where}: check what happens between backward pass and update."
)


def _sentence(verdict: GradientVerdict, values: Mapping[str, Any]) -> str:
    """Describe what is wrong with the gradients, and how to correct it."""
    bits, rank, number, receiver = (
        float(values.get(name, math.nan))
        for name in ("significant_bits", "missing_rank", "missing_pass", "receiving_rank")
    )
    where = f"in {percent(float(values['wrong_parameters']))} of the parameters"
    return _SENTENCES.get(verdict, _OTHER_SENTENCE).format(
        where=where if math.isnan(receiver) else f"{where} on rank {receiver:.0f}",
        bits=counted(0 if math.isnan(bits) else max(round(bits), 0), "significant bit"),
        rank=f"{rank:.0f}",
        which_pass="one backward pass" if math.isnan(number) else f"backward pass {number:.0f}",
        age="those of earlier steps" if verdict == GradientVerdict.STALE else "not those computed in this step",
    )
