"""Facts about a run: numbers that absolute limits decide, without a healthy run to compare with and without weights.

A fact establishes a cause, excludes one, or only shows that something is wrong, which excludes "nothing". The findings
of the probes, repeated batches and settings that changed without a plan are those of
`callbacks.alarms.probe_alarms.ProbeAlarms`, to which the record is replayed: timeline, alarms and diagnosis agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.callbacks.alarms.probe_alarms import LIMITS, LIMITS_SIGNAL, LOGIT_LIMIT, N_LABELS, ProbeAlarms
from workbench.callbacks.alarms.run_evidence import observations
from workbench.callbacks.alarms.watched import WATCHED
from workbench.callbacks.observation import OF_CONTRACT
from workbench.diagnosis.causes import UNKNOWN
from workbench.diagnosis.failed_run import Failure, Record
from workbench.diagnosis.symptoms import Symptom
from workbench.diagnosis.unseen import labels_of_probe
from workbench.formatting import counted, listed, percent, short
from workbench.schema.events import Event
from workbench.schema.statuses import SymptomKind

#: Fault that an alarm names -> the cause of a diagnosis; the others are changes of a setting, or no cause.
_CAUSES = {
    "low_precision_attention": "precision", "arithmetic": "precision", "low_precision_reduction": "precision",
    "stale_reduction": "wiring", "dropped_bucket": "wiring", "changed_setting": "wiring", "corrupted_data": "data",
    "repeated_data": "loader", "large_rate": "schedule", "small_batch": "batch", "no_auxiliary_loss": "routing",
    "loss_scale": "loss_scale", "no_gradient": "wiring", "gradients_discarded": "wiring",
    "gradients_not_cleared": "wiring",
}  # fmt: skip
#: Broken contract -> the cause, of which ``"wiring"`` is that of all others.
_OF_CONTRACTS = {
    "labels_aligned": "labels", "labels_present": "labels", "padding_ignored": "labels", "batches_differ": "loader",
    "initial_loss": "labels", "lost_to_rounding": "precision", "finite": "precision", "loss_scale": "loss_scale",
    "clipping_order": "loss_scale", "schedule": "schedule", "balance_loss": "routing",
}  # fmt: skip
#: Metric beyond an absolute limit -> the cause, where the fault that the limit names has several.
_OF_LIMITS = {"label_entropy": "labels", "ignored_labels": "labels", "token_entropy": "loader"}
#: Signal of the alarms without statistics -> the variable that they are about.
_VARIABLES = {
    "arithmetic": "error_excess", "gradients": "gradient_verdict", "data": "repeated_examples",
    "logits": "attention_logit_max",
}  # fmt: skip
#: Name of the fact of a broken contract.
_CONTRACT = "broken_contract"
#: Log-odds that a fact contributes, and the probability that all other causes share if one is established.
WEIGHT, REST = 10.0, 0.01
#: Measurements, and rows, that must show a property that holds in all of them.
_N_MEASURED, _N_ROWS = 3, 10
#: Median fraction of weights that updates leave unchanged, above which the number format is too coarse for them, and
#: below which it is not.
_LOST, _KEPT = 0.25, 0.05
#: Largest difference between such fractions of one module if they are those of whole tensors.
_SAME = 1e-3
#: Relative size of an update below which float32 rounds it away too, as at the end of a schedule.
_TINY = 1e-6
#: Gradient RMS over eps in every block and measurement, above which eps is not the cause.
_OVER_EPS = 1e3
#: Multiple of log V above which a first loss is none of an untrained model.
_TOO_HIGH = 2.0
#: Fraction of the entropy of the labels below which a loss is too good, and number of updates after which a loss that
#: is not below it has learned nothing from the inputs.
_TOO_GOOD, _LATE = 0.05, 300
#: Fraction of the largest entropy below which attention considers a single token.
_FOCUS = 0.05
#: Number of experts up to which the tokens of a probe are many for each of them.
_N_EXPERTS = 16
#: Times that new batches follow repeated ones, which a further epoch does not have, and examples of such a batch.
_N_RETURNS, _N_EXAMPLES = 3, 4


@dataclass(frozen=True)
class RunFact(Symptom):
    """A number of a run that an absolute limit decides; it establishes its cause if ``is_for``, else excludes it."""

    kind: SymptomKind = SymptomKind.FACT
    cause: str = "nothing"
    is_for: bool = False

    @property
    def is_finding(self) -> bool:
        """Whether something is wrong: a cause is established, or "nothing" excluded."""
        return self.is_for or self.cause == "nothing"


def read_facts(record: Record, failure: Failure) -> list[RunFact]:
    """Return the facts of a run: broken contracts, then other findings, each by their first step."""
    groups = (
        _of_contracts,
        _of_alarms,
        _of_passes,
        _of_labels,
        _of_batches,
        _of_rate,
        _of_loss,
        _of_updates,
        _of_attention,
        _of_routing,
        _of_sound_arithmetic,
    )
    found = [fact for group in groups for fact in group(record, failure)]
    return sorted(found, key=lambda fact: (not fact.is_finding, fact.name != _CONTRACT, fact.step, not fact.is_for))


def settle(probability: Mapping[str, float], facts: Sequence[RunFact]) -> dict[str, float]:
    """Return the probabilities of the causes given the facts: established ones first, excluded ones 0."""
    established = list(dict.fromkeys(fact.cause for fact in facts if fact.is_for))
    excluded = {fact.cause for fact in facts if not fact.is_for} | ({"nothing"} if established else set())
    rest = {cause: 0.0 if cause in excluded else p for cause, p in probability.items() if cause not in established}
    if not math.fsum(rest.values()):
        rest[UNKNOWN] = 1.0
    share = (REST if established else 1.0) / math.fsum(rest.values())
    first = {cause: (1 - REST) / len(established) for cause in established}
    return first | {cause: rest[cause] * share for cause in sorted(rest, key=lambda cause: -rest[cause])}


def _of_contracts(record: Record, failure: Failure) -> Iterator[RunFact]:
    """Yield the contracts that experiments during the run have shown to be broken."""
    steps = {event.source.removeprefix(OF_CONTRACT): event.step for event in _alarms_of_contracts(record)}
    for each in record.contracts.failed if record.contracts is not None else ():
        sentence = f"The contract {each.id} is broken: {each.sentence}"
        cause = _OF_CONTRACTS.get(each.id, "wiring")
        yield RunFact(
            _CONTRACT, 1.0, math.nan, math.nan, sentence, step=steps.get(each.id, 0), cause=cause, is_for=True
        )


def _alarms_of_contracts(record: Record) -> list[Event]:
    return [event for event in record.events_of("alarm") if event.source.startswith(OF_CONTRACT)]


def _of_alarms(record: Record, failure: Failure) -> Iterator[RunFact]:
    """Yield the alarms without statistics by replaying the record, and the first of those that the watch raised."""
    probes, seen = ProbeAlarms(), set[str]()
    for each in observations(record.tree):
        for alarm in probes.observe(each):
            seen.add(alarm.signal)
            if each.part == "contracts":
                continue
            name, message = _VARIABLES.get(alarm.signal, alarm.signal), alarm.message.rstrip(".")
            faults = next((of for one, of in probes.standing.values() if one is alarm), ())
            cause = "wiring" if len(faults) > 1 else _CAUSES.get(faults[0], "nothing") if faults else "nothing"
            if alarm.signal == "data" and faults != ("repeated_data",):
                name = "label_agreement" if faults == ("corrupted_data",) else "lookahead"
            if alarm.signal == LIMITS_SIGNAL:
                name = next(of.variable for of in LIMITS if of.sentence.format(value=alarm.value) == alarm.message)
                cause = _OF_LIMITS.get(name, cause)
            if name == "loss":  # not finite, which the failure states
                continue
            path = f"/{each.part}" if each.part in record.parts and name in record.parts[each.part] else ""
            yield RunFact(
                f"alarm_of_{alarm.signal if alarm.signal in (*_VARIABLES, LIMITS_SIGNAL) else 'settings'}", 1.0,
                alarm.value, math.nan, f"{message}." if "step" in message else f"{message} (step {alarm.step}).",
                step=alarm.step, layer=alarm.layer, path=path, variable=name if path else "", cause=cause,
                is_for=cause != "nothing",
            )  # fmt: skip
    raised = [alarm for alarm in record.events_of("alarm") if alarm.source not in seen]
    of_watch = [alarm for alarm in raised if alarm.source in {watched.name for watched in WATCHED}]
    for event in [*of_watch[:1], *(event for event in raised if event not in of_watch)]:
        more = f" {counted(len(of_watch) - 1, 'more alarm')} followed." if event in of_watch and of_watch[1:] else ""
        sentence = f"The watch raised an alarm at step {event.step}: {event.message.rstrip('.')}.{more}"
        yield RunFact("alarm_of_the_watch", 1.0, event.score, 1.0, sentence, step=event.step, layer=event.layer)


def _of_passes(record: Record, failure: Failure) -> Iterator[RunFact]:
    """Yield what the watch has found to have spoiled an update: a rank, a micro-batch or a row."""
    for event in record.events_of("blame"):
        yield RunFact("blame", 1.0, event.score, 1.0, f"{event.message} (step {event.step})", step=event.step)


def _of_labels(record: Record, failure: Failure) -> Iterator[RunFact]:
    for sentence in filter(None, labels_of_probe(record).values()):
        yield RunFact("labels_of_the_probe", 1.0, math.nan, math.nan, sentence, step=0, cause="labels", is_for=True)


def _of_rate(record: Record, failure: Failure) -> Iterator[RunFact]:
    """Yield whether the rate was 0 for longer at the end than the last update of a schedule."""
    rate, ratio = record.every("learning_rate"), record.every("update_ratio")
    if rate is None or ratio is None:
        return
    is_off = (rate <= 1e-9 * np.nanmax(rate)) & ~(ratio > 0)  # other groups may have another rate
    n_off = int(np.argmin(is_off[::-1])) if not is_off.all() else 0
    if n_off > max(_N_ROWS, len(rate) // 20):
        sentence = (
            f"The learning rate is 0 in the last {n_off} of {len(rate)} updates, which change nothing: the schedule is "
            "shorter than the run, or was stepped more than once an update."
        )
        yield _fact(record, "learning_rate", len(rate) - n_off, 0.0, float(np.nanmax(rate)), sentence, "schedule")


def _of_batches(record: Record, failure: Failure) -> Iterator[RunFact]:
    size, counts = record.every("batch_size"), record.every("n_tokens")
    counts, entropy = size if counts is None else counts, record.every("label_entropy")
    if entropy is not None and counts is not None:
        known = np.flatnonzero(np.isfinite(entropy) & (counts >= N_LABELS))
        same = known[entropy[known] < 1e-9]
        if len(same) and np.median(entropy[known]) > 1:
            sentence = f"All labels of a batch are the same, first at step {record.every_step[same[0]]}."
            yield _fact(record, "label_entropy", same[0], 0.0, float(np.median(entropy[known])), sentence, "labels")
    repeated = record.every("repeated_examples")
    if repeated is None or size is None or not np.nanmedian(size) >= _N_EXAMPLES:
        return
    known = np.flatnonzero(np.isfinite(repeated))
    is_old = repeated[known] >= 1
    if is_old.mean() >= 0.25 and np.sum(is_old[:-1] & (repeated[known][1:] <= 0)) >= _N_RETURNS:
        first = known[np.argmax(is_old)]
        sentence = (
            f"{percent(float(is_old.mean()))} of the batches repeat a recent one between new ones, first at step "
            f"{record.every_step[first]}: several workers or ranks read the same data."
        )
        yield _fact(record, "repeated_examples", first, float(is_old.mean()), 0.0, sentence, "loader")


def _of_loss(record: Record, failure: Failure) -> Iterator[RunFact]:
    loss, norm = record.every("loss"), record.every("grad_norm")
    if loss is None:
        return
    if norm is not None and len(empty := np.flatnonzero(~np.isfinite(loss) & (norm == 0))):
        sentence = (
            f"At step {record.every_step[empty[0]]} the loss is not finite although every gradient is exactly 0: no "
            "label of the batch counts, for example because all are ignored."
        )
        yield _fact(record, "loss", empty[0], math.nan, math.nan, sentence, "labels", name="no_label_counts")
    known = np.flatnonzero(np.isfinite(loss))
    first, last, n_classes = float(loss[known[0]]), float(failure.smooth[-1]), record.n_classes or 0
    labels, tokens = record.every("label_entropy"), record.every("n_tokens")
    if n_classes > 3:
        guess = math.log(n_classes)
        n_tokens = float(np.nanmedian(tokens)) if tokens is not None else math.nan
        is_sum = 0.2 < first / (guess * n_tokens) < 5 if n_tokens > 1 else False
        if first > _TOO_HIGH * guess and not is_sum:
            sentence = (
                f"The first loss is {short(first)} nat; a uniform guess among {n_classes:,} classes has {guess:.3g}: "
                "the logits are too large from the start, or the loss is not a mean over labels."
            )
            yield _fact(record, "loss", known[0], first, guess, sentence, "nothing", name="first_loss_too_high")
        yield from _of_softmax(record, n_classes, loss[known])
    if labels is None or len(known) < 5 * _N_ROWS or failure.is_seen:
        return
    entropy = float(np.nanmedian(labels))
    if entropy > 1 and last < _TOO_GOOD * entropy:
        sentence = (
            f"The loss fell to {short(last)} nat, {percent(last / entropy)} of the entropy of its labels: too good, "
            "unless the inputs determine the labels or few examples repeat. Labels may leak into the inputs: no causal "
            "mask, or labels that are not shifted."
        )
        row = known[min(int(np.argmax(failure.smooth < _TOO_GOOD * entropy)), len(known) - 1)]
        yield _fact(record, "loss", row, last, entropy, sentence, "nothing", name="too_good")
    late = float(np.median(failure.smooth[-len(known) // 4 :]))
    # A few labels have less entropy than those of the data, and losses may be means over them; a forward pass has at
    # least the tokens of one example.
    ignored, n_examples = record.every("ignored_labels"), record.every("batch_size")
    is_complete = ignored is not None and n_examples is not None and np.mean(ignored < 0.1) > 0.9
    length = float(np.median(np.nan_to_num(tokens / n_examples))) if is_complete and tokens is not None else 0.0
    limit = entropy + math.exp(entropy) / max(length, 1e-9)
    quarter = failure.smooth[-len(known) // 2 : -len(known) // 4]
    is_flat = len(quarter) > 0 and late > float(np.median(quarter)) - failure.floor
    if len(known) >= _LATE and entropy > 0.5 and late > limit + failure.floor and is_flat:
        sentence = (
            f"After {len(known)} updates the loss of {late:.3g} nat is not below the entropy of its labels, "
            f"{entropy:.3g} nat: nothing is learned from the inputs."
        )
        yield _fact(record, "loss", known[-1], late, entropy, sentence, "nothing", name="only_frequencies")


def _of_softmax(record: Record, n_classes: int, loss: np.ndarray) -> Iterator[RunFact]:
    """Yield whether a softmax is applied twice: the logits are probabilities, or the late losses those of certain ones.

    The log sum exp of probabilities lies between that of equal ones and of a single one, ``most``. Their loss is at
    least ``most`` - 1, and exceeds it by the fraction of wrong examples once the model is certain.
    """
    log_z = record.values("activations", "log_z") if record.has("activations", "log_z") else np.zeros(0)
    most, size = math.log(n_classes - 1 + math.e), record.every("batch_size")
    is_between = (log_z > math.log(n_classes) + 1 / n_classes - 1e-4) & (log_z < most + 1e-4)
    is_bounded = bool((loss > most - 1.01).all() and (loss < max(most, loss[0]) + 0.1).all())
    n_wrong = (loss[-len(loss) // 3 :] - most + 1) * (np.nanmedian(size) if size is not None else math.nan)
    is_certain = np.mean(np.abs(n_wrong - np.round(n_wrong)) < 0.02) > 0.5
    are_probabilities = len(log_z) >= _N_MEASURED and is_between.all()
    if is_bounded and (are_probabilities or (is_certain and len(loss) >= 3 * _N_ROWS)):
        sentence = (
            f"The loss never falls below {most - 1:.3g} nat, the limit for {n_classes:,} classes if a softmax is "
            "applied twice, and it takes the values of that: the loss receives probabilities instead of logits."
        )
        yield _fact(record, "loss", 0, float(loss.min()), most - 1, sentence, "labels", name="softmax_twice")


def _of_updates(record: Record, failure: Failure) -> Iterator[RunFact]:
    if not record.has("optimizer", "update_ratio"):
        return
    rate, steps = record.every("learning_rate"), record.steps_of("optimizer")
    moves = np.full(len(steps), True) if rate is None else np.interp(steps, record.every_step, np.nan_to_num(rate)) > 0
    ratio, modules = record.values("optimizer", "update_ratio")[moves], record.parts["optimizer"]
    if len(ratio) >= _N_MEASURED and "layer" in modules.coords and record.has("optimizer", "module_grad_norm"):
        norm = record.values("optimizer", "module_grad_norm")[moves]
        is_cut = np.isnan(norm).all(axis=0) & (ratio == 0).all(axis=0)
        if is_cut.any() and not is_cut.all():
            names = [f"block {layer}" if layer >= 0 else "the rest" for layer in modules["layer"].values[is_cut]]
            sentence = (
                f"No gradient reaches {listed(names)}, and no update changed their weights although they require "
                "gradients: the graph is cut, for example by reentrant checkpointing of inputs that require none."
            )
            yield _of_modules(record, "module_grad_norm", math.nan, 0.0, sentence, "wiring", name="never_reached")
        elif (ratio[np.isfinite(ratio)] == 0).all():
            sentence = f"None of {counted(len(ratio), 'measured update')} at a rate above 0 changed a weight."
            yield _of_modules(record, "update_ratio", 0.0, 0.0, sentence, "wiring", name="no_update")
    if (unchanged := _unchanged(record)) > _LOST:
        late = record.values("optimizer", "unchanged_share")[len(ratio) // 2 :]
        is_same = len(late) >= _N_ROWS // 2 and np.nanmax(np.nanmax(late, axis=0) - np.nanmin(late, axis=0)) < _SAME
        why, cause = "because the number format rounds updates away. Keep the parameters in float32.", "precision"
        if is_same and unchanged < 0.99:  # that of whole tensors
            why, cause = "the same at each update: look whether the optimizer holds and writes all tensors.", "nothing"
        sentence = (
            f"In the median, an update leaves {percent(unchanged)} of the weights with a nonzero gradient unchanged, "
            f"{why}"
        )
        yield _of_modules(record, "unchanged_share", unchanged, _LOST, sentence, cause, name="rounded_away")
    if record.has("optimizer", "gradient_rms_over_eps"):
        least = float(np.nanmin(record.values("optimizer", "gradient_rms_over_eps")))
        if least > _OVER_EPS:
            sentence = f"The RMS of the gradients of every block is at least {short(least)} times eps."
            of = _of_modules(record, "gradient_rms_over_eps", least, _OVER_EPS, sentence, "", name="eps_is_small")
            yield replace(of, cause="optimizer_eps", is_for=False)


def _of_attention(record: Record, failure: Failure) -> Iterator[RunFact]:
    """Yield whether the attention of a block has saturated at the end, beyond what healthy models reach."""
    if not all(record.has("attention", name) for name in ("attention_logit_max", "attention_entropy_share")):
        return
    logits, entropy = (record.values("attention", n)[-1] for n in ("attention_logit_max", "attention_entropy_share"))
    if not np.isfinite(logits).any():
        return
    at = int(np.nanargmax(np.nanmax(logits, axis=1)))
    largest, focus = float(np.nanmax(logits[at])), float(np.nanmean(entropy[at]))
    if largest > LOGIT_LIMIT / 10 and focus < _FOCUS:
        layer = int(record.parts["attention"]["layer"].values[at])
        sentence = (
            f"The attention of block {layer} has saturated: its logits reach {short(largest)}, and its entropy is "
            f"{percent(focus)} of the maximum. They are not scaled by 1/sqrt(d), or queries and keys grow too fast."
        )
        yield RunFact(
            "attention_saturates", 1.0, largest, LOGIT_LIMIT / 10, sentence, step=int(record.steps_of("attention")[-1]),
            layer=layer, path="/attention", variable="attention_logit_max",
        )  # fmt: skip


def _of_routing(record: Record, failure: Failure) -> Iterator[RunFact]:
    """Yield whether half of the few experts of a block receive no token in any late measurement."""
    if not record.has("router", "dead_experts"):
        return
    steps, n_experts = record.steps_of("router"), record.parts["router"].sizes["expert"]
    late = np.nan_to_num(record.values("router", "dead_experts"))[len(steps) // 2 :]
    at, n_dead = int(np.argmax(late.min(axis=0))), int(late.min(axis=0).max())
    if len(late) >= _N_MEASURED and n_experts <= _N_EXPERTS and n_dead >= n_experts / 2:
        layer = int(record.parts["router"]["layer"].values[at])
        sentence = (
            f"{n_dead} of {n_experts} experts of block {layer} receive no token in any of the last {len(late)} "
            "measurements. A missing balance loss does this, and so do too high a rate and a faulty block."
        )
        yield RunFact(
            "experts_receive_nothing", 1.0, n_dead, 0.0, sentence, step=int(steps[-len(late)]), layer=layer,
            path="/router", variable="dead_experts",
        )  # fmt: skip


def _of_sound_arithmetic(record: Record, failure: Failure) -> Iterator[RunFact]:
    """Yield whether the probes of arithmetic and gradients would have found a fault of precision."""
    steps = record.steps_of("precision") if "precision" in record.parts else np.zeros(0)
    is_late = len(steps) >= _N_MEASURED and (not failure.is_seen or steps[-1] >= failure.step)
    if not is_late or not _unchanged(record) < _KEPT:
        return
    probes = ProbeAlarms()
    if any(probes.observe(each) for each in observations(record.tree) if each.part in ("precision", "reduction")):
        return
    sentence = (
        f"In {counted(len(steps), 'measurement')} no block differed from itself in float64 by more than rounding "
        "explains, and updates were not rounded away."
    )
    yield RunFact(
        "arithmetic_is_sound", 1.0, len(steps), _N_MEASURED, sentence, "measurement", step=int(steps[-1]),
        path="/precision", variable="error_excess", cause="precision",
    )  # fmt: skip


def _unchanged(record: Record) -> float:
    """Return the median unchanged fraction of weights, of updates that are not lost in any format; NaN if unknown."""
    if not record.has("optimizer", "unchanged_share"):
        return math.nan
    is_large = record.values("optimizer", "update_ratio") > _TINY
    found = record.values("optimizer", "unchanged_share")[is_large]
    return float(np.nanmedian(found)) if np.isfinite(found).any() else math.nan


def _fact(
    record: Record, variable: str, row: int, value: float, reference: float, sentence: str, cause: str, *,
    name: str = "",
) -> RunFact:  # fmt: skip
    """Return a fact about a monitor at one of all rows."""
    return RunFact(
        name or f"{variable}_is_off", 1.0, float(value), reference, sentence, step=int(record.every_step[row]),
        path="/monitors", variable=variable, cause=cause, is_for=cause != "nothing",
    )  # fmt: skip


def _of_modules(
    record: Record, variable: str, value: float, reference: float, sentence: str, cause: str, *, name: str
) -> RunFact:
    """Return a fact about all measurements of the optimizer."""
    return RunFact(
        name, 1.0, value, reference, sentence, step=int(record.steps_of("optimizer")[0]), path="/optimizer",
        variable=variable, cause=cause, is_for=cause != "nothing",
    )  # fmt: skip
