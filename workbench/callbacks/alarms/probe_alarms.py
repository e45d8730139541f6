"""Alarms without calibration: findings of probes, settings changed without a plan, and logits beyond a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.callbacks.alarms.absolute_limits import LOGIT_LIMIT, LOOKAHEAD, AbsoluteLimits, LogitLimit
from workbench.callbacks.observation import Alarm, Observation
from workbench.formatting import counted, percent
from workbench.probes.gradient_agreement import GradientVerdict
from workbench.probes.precision import broken_arithmetic

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

    Args:
        variable: Metric of the update that shows the property.
        holds: Whether a value of it shows the property.
        is_broken: Whether a value of it shows that the property is missing; between the two nothing is known.
        n_least: Number of batches with the property after which it is a rule.
        n_broken: Number of batches in a row without it that are reported.

    Attributes:
        n_before: Number of batches with the property before the first one without it.
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
#: Measurements without a fault after which it is considered over; some faults are intermittent.
_OVER_AFTER = 3
#: The same for the limits of metrics, in updates, because batches at a limit alternate with others.
_LIMIT_OVER_AFTER = 100
#: With fewer significant bits the fault may also be another one than rounding, which remains the most probable.
_LEAST_BITS = 2
_UNSURE = ("low_precision_reduction", "stale_reduction", "dropped_bucket")


@dataclass(frozen=True)
class Check:
    """One measurement of a probe.

    Attributes:
        step: Update after which it was taken.
        signal: ``"arithmetic"`` or ``"gradients"``.
        message: Description of the fault found; empty if there was none.
    """

    step: int
    signal: str
    message: str

    @property
    def is_sound(self) -> bool:
        """Whether no fault was found."""
        return not self.message


class ProbeAlarms:
    """Alarms at the first measurement at which a probe finds a fault, and again if it returns after it was over.

    A loop that changes gradients on purpose, by clipping values, adding noise or compressing them, does so from its
    first measurement on. In that case neither such changes, nor low precision, nor a missing backward pass raise an
    alarm. If routers choose experts, broken arithmetic must be found in two consecutive measurements, because a token
    near a tie may be sent to another expert in float64, which in a single measurement is indistinguishable from a
    fault.
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
        self.is_in_doubt = False
        self._has_routers = False

    def observe(self, observation: Observation) -> list[Alarm]:
        """Process an observation of any part.

        Returns:
            The alarms that it raises, usually none.
        """
        if observation.part == "settings":
            return self._setting(observation)
        self._has_routers |= observation.part == "router"
        signal = SIGNALS.get(observation.part)
        if signal is None:
            return []
        of_limits = []
        if observation.part == "monitors":
            standing = self.standing.get("settings")
            is_other = standing is not None and standing[1] == (_OTHER_SETTING,)
            if standing is not None and is_other and observation.step > standing[0].step + _LASTS:
                del self.standing["settings"]
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
        if _is_measured(observation) and not (observation.part == "precision" and self.is_in_doubt):
            self.checks[signal] = Check(observation.step, signal, "" if found is None else found[0].message)
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
        found, was_in_doubt = _broken_arithmetic(observation), self.is_in_doubt
        is_standing = SIGNALS["precision"] in self.standing
        self.is_in_doubt = found is not None and self._has_routers and not (was_in_doubt or is_standing)
        return None if self.is_in_doubt else found

    def _setting(self, observation: Observation) -> list[Alarm]:
        setting, message = (str(observation.coords[name]) for name in ("setting", "message"))
        factor = float(observation.values["factor"])
        self.standing.pop("settings", None)
        if factor == 1:  # the setting follows its plan
            return []
        alarm = Alarm(observation.step, setting, -1, -1, math.inf, factor, is_outcome=False, message=message)
        self.standing["settings"] = alarm, (_OF_SETTINGS.get((setting, factor > 1), _OTHER_SETTING),)
        return [alarm]

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


def _is_measured(observation: Observation) -> bool:
    """Return whether an observation is a measurement of a probe; gradients cannot be measured at every step."""
    if observation.part == "precision":
        return True
    return observation.part == "reduction" and float(observation.values["gradient_verdict"]) >= 0


def _sentence(verdict: GradientVerdict, values: Mapping[str, Any]) -> str:
    """Describe what is wrong with the gradients, and how to correct it."""
    where = f"in {percent(float(values['wrong_parameters']))} of the parameters"
    receiver = float(values.get("receiving_rank", math.nan))
    where += "" if math.isnan(receiver) else f" on rank {receiver:.0f}"
    if verdict == GradientVerdict.LOW_PRECISION:
        bits = counted(max(round(float(values["significant_bits"])), 0), "significant bit")
        return f"Gradients reach the optimizer with about {bits} {where}: reduce them in float32."
    if verdict == GradientVerdict.RANK_MISSING:
        rank = f"{float(values['missing_rank']):.0f}"
        return f"The gradients of rank {rank} are missing {where}: check its reduction and its network."
    if verdict == GradientVerdict.RANKS_UNEQUAL:
        return f"The gradients of the ranks are weighted unequally {where}: check the reduction."
    if verdict == GradientVerdict.PARAMETERS_MISSING:
        return (
            f"The optimizer receives zeros instead of the computed gradients {where}: buckets of the reduction are "
            "lost."
        )
    if verdict == GradientVerdict.PASS_MISSING:
        which = float(values.get("missing_pass", math.nan))
        which_pass = "one backward pass" if math.isnan(which) else f"backward pass {which:.0f}"
        return (
            f"The gradients of {which_pass} of this step are missing {where}: check how gradients are accumulated and "
            "reduced."
        )
    if verdict == GradientVerdict.NOT_CLEARED:
        return (
            f"The gradients of earlier updates are never cleared {where}, so that every update repeats them: call "
            "optimizer.zero_grad() once an update."
        )
    if verdict == GradientVerdict.DISCARDED:
        return (
            f"Only the last of several backward passes counts {where}: .grad is cleared before it, although the "
            "parameters have not changed. Call zero_grad() once an update, not once a micro-batch."
        )
    age = "those of earlier steps" if verdict == GradientVerdict.STALE else "not those computed in this step"
    return (
        f"The gradients that the optimizer receives are {age} {where}: check what happens between backward pass and "
        "update."
    )
