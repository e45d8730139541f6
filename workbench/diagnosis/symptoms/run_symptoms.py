"""Symptoms of what is trained how (log, updates, sharpness, settings), and of the model (blocks, attention, routing).

No setting is assumed to be wrong in itself; the fit of the rules determines how much evidence each is. The recorded
study also evaluates the diagnosis without settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.diagnosis.failed_run import Failure, Record
from workbench.formatting import capitalized, counted, short
from workbench.schema.statuses import FailureKind, SymptomKind
from workbench.schema.symptoms import SYMPTOMS
from workbench.training.training_plan import SCHEDULES


@dataclass(frozen=True)
class Symptom:
    """A number read from a run, as evidence for or against causes.

    ``strength`` is 0 if the value is not unusual, about 1 if it is striking, below 0 for the opposite, and never NaN;
    ``reference`` is the usual value, NaN if there is none. ``sentence`` is shown to the user. ``path``, ``variable``
    and ``selection`` are the place of the number in the run, empty for the configuration, checkpoints or several
    symptoms; step and layer are -1 for no specific one.
    """

    name: str
    strength: float
    value: float
    reference: float
    sentence: str
    units: str = "1"
    kind: SymptomKind = SymptomKind.MECHANISM
    step: int = -1
    layer: int = -1
    path: str = ""
    variable: str = ""
    selection: Mapping[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> dict[str, Any]:
        """Dimension -> value that selects the number in its part; empty if it has no part or no step."""
        return {"step": self.step, **self.selection} if self.path and self.step >= 0 else {}


def symptom_of(
    name: str,
    value: float,
    *,
    level: float | None = None,
    strength: float | None = None,
    place: str | None = None,
    sentence: str = "",
    reference: float | None = None,
    kind: SymptomKind | None = None,
    step: int = -1,
    layer: int = -1,
    selection: Mapping[str, Any] | None = None,
    **words: Any,
) -> Symptom:
    """Return a symptom by its rule in `SYMPTOMS`; what is passed replaces what follows from rule and value."""
    rule = SYMPTOMS[name]
    if strength is None:
        level = (finite_log10(value) if rule.is_log else value) if level is None else level
        strength = ramp(level, *rule.scale)
    sentence = sentence or rule.sentence
    for word, text in (("{short}", short), ("{fold}", fold)):
        if word in sentence:
            words[word[1:-1]] = text(value)
    part, _, variable = (rule.place if place is None else place).partition("/")
    return Symptom(
        name,
        strength,
        value,
        rule.reference if reference is None else reference,
        sentence.format(v=value, p=100 * value, step=step, **words),
        rule.units,
        kind or rule.kind,
        int(step),
        int(layer),
        f"/{part}" if part else "",
        variable,
        selection or {},
    )


def ramp(value: float, zero: float, one: float, low: float = 0.0, high: float = 1.5) -> float:
    """Return a linear function of a value that is 0 at ``zero`` and 1 at ``one``, clipped to [``low``, ``high``]."""
    if not math.isfinite(value):
        return high if value * (one - zero) > 0 else low if not math.isnan(value) else 0.0
    return float(min(max((value - zero) / (one - zero), low), high))


def fold(factor: float) -> str:
    """Return a factor as text, such as "by a factor of 12" or "by a factor of 3,380"."""
    return f"by a factor of {short(factor)}"


def in_steps(n: int) -> str:
    """Return a number of steps as text."""
    return "one step" if n == 1 else f"{n} steps"


def finite_log10(value: float, least: float = 1e-12) -> float:
    """Return log10 of a number clipped below at ``least``; NaN if it is not finite."""
    return math.log10(max(value, least)) if math.isfinite(value) else math.nan


#: The rate jumps if it rises by this factor from one step to the next; jumps in the first few steps are ignored.
_JUMP, _FIRST = 1.5, 4
#: A jump of rate or updates may precede the failure by at most the first number of steps, or follow it by at most the
#: second, because noise makes the onset uncertain.
_BEFORE, _AFTER = 40, 20
#: Number of steps on either side of a burst that it is compared with.
_SIDE = 15
#: Rate and updates have decayed below this fraction of their peak.
_DECAYED = 0.1
#: Product of learning rate and sharpness above which a quadratic loss diverges: preconditioned by Adam at beta1 = 0.9
#: (arXiv:2207.14484), and under gradient descent.
EDGES = {"preconditioned_sharpness_rate": 38.0, "sharpness_rate": 2.0}


def training_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of loss, gradient norm, learning rate, updates, sharpness and settings."""
    yield from _of_the_loss(record, failure)
    yield from _of_the_gradients(record, failure)
    yield from _of_the_rate(record, failure)
    if record.has("optimizer", "update_ratio"):
        yield from _of_updates(record, failure)
    yield from _of_curvature(record, failure)
    yield from _of_batches(record, failure)
    yield from _of_plan(record)


def _of_the_loss(record: Record, failure: Failure) -> Iterator[Symptom]:
    steps, loss = record.steps, record.values("monitors", "loss")
    first, low = float(loss[0]), float(np.nanmin(failure.smooth))
    n_before, at, end = failure.step - int(steps[0]), failure.step, int(steps[-1])
    is_divergence, is_spike = failure.kind is FailureKind.DIVERGED, failure.kind is FailureKind.SPIKE
    yield symptom_of(
        "fails_at_once", n_before, level=math.log10(1 + n_before), strength=None if is_divergence else 0.0, step=at,
        how=capitalized(failure.words),
    )  # fmt: skip
    sentence = f"The run diverged at step {record.diverged_at}." if is_divergence else ""
    yield symptom_of(
        "diverges", float(record.diverged_at or math.nan), strength=float(is_divergence), step=at, sentence=sentence
    )
    drop = (first - low) / first if first > 0 else math.nan
    is_flat = failure.is_stalled and float(failure.smooth[0]) - low <= failure.floor  # also if a trained model goes on
    if math.isfinite(drop) and not is_flat:
        strength = None if failure.is_stalled else 0.0
        yield symptom_of("hardly_learns", drop, strength=strength, step=at, first=first, low=low)
        yield symptom_of("learns", drop, step=at, first=first, low=low)
    learned = float(failure.smooth[0]) - low
    if learned > 0:
        undone = float(failure.smooth[-1]) - low
        lost = undone / learned if undone > failure.floor else 0.0  # noise alone undoes all of a decrease by noise
        yield symptom_of("ends_above_its_best", lost, step=end, undone=100 * min(lost, 1))
    sentence = f"Of a rise of {failure.rise:.3g} nat, {{p:.0f}} % was recovered by the end." if is_spike else ""
    strength = failure.recovered if is_spike else 0.0
    yield symptom_of("spike_recovers", failure.recovered, strength=strength, step=at, sentence=sentence)
    if is_spike or is_divergence:
        tall = failure.smooth[failure.row :] - failure.smooth[failure.row]
        n_rising = int(np.argmax(tall >= 0.5 * np.nanmax(tall))) if np.nanmax(tall) > 0 else 1
        span = in_steps(max(n_rising, 1))
        yield symptom_of("abrupt", n_rising, level=math.log10(1 + n_rising), step=at, span=span)
        yield from _of_a_burst(loss, failure)
    # The growth of the loss's relative noise from step to step since the start.
    known = np.flatnonzero(np.isfinite(loss) & (loss > 0))
    if len(known) >= 4 * _SIDE:
        moves = np.abs(np.diff(loss[known])) / loss[known][:-1]
        parts = [float(np.median(part)) for part in np.array_split(moves[3:], 4)]
        rise = max(parts[1:]) / parts[0] if parts[0] > 0 else math.nan
        if math.isfinite(rise):
            yield symptom_of("loss_scatters_more", rise, step=end)
    noise = _relative_noise(loss, failure)
    if math.isfinite(noise):
        yield symptom_of("loss_noise", noise, step=at)
    if (n_classes := record.n_classes) and n_classes > 1:
        guess = math.log(n_classes)
        yield symptom_of("first_loss", first, level=first / guess, reference=guess, step=int(steps[0]), guess=guess)


def _of_a_burst(loss: np.ndarray, failure: Failure) -> Iterator[Symptom]:
    """Yield how far the loss lies above the steps before and after a burst, relative to its noise."""
    rises = failure.smooth - np.minimum.accumulate(failure.smooth)
    peak, first = int(np.argmax(rises)), failure.row + 1
    back = np.flatnonzero(rises[peak:] < 0.5 * rises[peak])
    last = peak + int(back[0]) if len(back) else len(loss)
    sides = [loss[max(0, first - _SIDE) : first], loss[last : last + _SIDE]]
    inside = loss[first:last]
    if min(len(inside), *map(len, sides)) >= 3 and failure.noise > 0:
        height = float(np.nanmedian(inside) - max(np.nanmedian(side) for side in sides)) / failure.noise
        yield symptom_of("loss_stands_above_both_sides", height, step=failure.step, span=in_steps(len(inside)))


def _relative_noise(loss: np.ndarray, failure: Failure) -> float:
    """Return the relative noise of the loss from step to step shortly before the failure, or at the end."""
    end = len(loss) if failure.is_stalled else max(failure.row + 1, 8)
    part = loss[max(0, end - 80) : end]
    part = part[np.isfinite(part)]
    if len(part) < 8:
        return math.nan
    level = float(np.median(part))
    return 1.48 * float(np.median(np.abs(np.diff(part)))) / math.sqrt(2) / level if level > 0 else math.nan


def _of_the_gradients(record: Record, failure: Failure) -> Iterator[Symptom]:
    norm = record.monitor("grad_norm")
    if norm is None:
        return
    steps, row = record.steps, failure.row
    yield symptom_of("first_gradient", float(norm[np.isfinite(norm)][0]), step=steps[0])
    logs = np.log10(np.maximum(np.where(np.isfinite(norm), norm, np.nan), 1e-12))
    window = logs[max(0, row - 60) : row + 1]
    window = window[np.isfinite(window)]
    if len(window) >= 10:
        scatter = float(1.48 * np.median(np.abs(np.diff(window))) / math.sqrt(2))
        yield symptom_of("gradient_noise", scatter, step=failure.step, factor=10**scatter)
    if failure.is_stalled:
        late = logs[-max(5, len(logs) // 10) :]
        change = float(np.nanmedian(late) - np.nanmedian(logs[: max(5, len(logs) // 10)]))
        yield symptom_of("gradients_fade", 10**change, level=change, step=steps[-1])
        return
    before = logs[max(0, row - 40) : max(1, row - 8)]
    build_up = (
        float(np.nanmedian(logs[max(0, row - 3) : row + 1]) - np.nanmedian(before)) if len(before) >= 3 else math.nan
    )
    if math.isfinite(build_up):
        burst = float(np.nanmax(logs[row : row + 15]) - np.nanmedian(before))
        yield symptom_of("gradients_build_up", 10**build_up, level=build_up, step=failure.step)
        yield symptom_of("gradients_burst", 10**burst, level=burst, step=failure.step)


def _of_the_rate(record: Record, failure: Failure) -> Iterator[Symptom]:
    rate = record.monitor("learning_rate")
    if rate is None or not np.nanmax(rate) > 0:
        return
    steps, row = record.steps, failure.row
    peak = float(np.nanmax(rate))
    factors = np.ones(len(rate))
    with np.errstate(divide="ignore", invalid="ignore"):
        factors[1:] = rate[1:] / np.maximum(rate[:-1], peak * 1e-6)
    factors[:_FIRST] = 1.0
    near = slice(max(0, row - _BEFORE), min(len(rate), row + _AFTER + 1)) if not failure.is_stalled else slice(None)
    factors = np.where(np.isfinite(factors), factors, 1.0)
    at = int(np.argmax(factors[near])) + near.indices(len(rate))[0]
    factor, sentence = float(factors[at]), ""
    if has_jumped := factor >= _JUMP:
        n = failure.step - int(steps[at])
        when = (
            f", {in_steps(abs(n))} {'before' if n > 0 else 'after'} the failure" if n else ", the step of the failure"
        )
        when = "" if failure.is_stalled else when
        sentence = f"The learning rate rose {fold(factor)} from one step to the next at step {steps[at]}{when}."
    yield symptom_of("rate_jumps", factor, strength=None if has_jumped else 0.0, step=steps[at], sentence=sentence)
    decayed = float(np.mean(rate[int(np.nanargmax(rate)) :] < _DECAYED * peak)) if len(rate) > 1 else 0.0
    yield symptom_of("rate_is_spent", decayed, strength=None if failure.is_stalled else 0.0, step=steps[-1])
    start = float(rate[0] / np.nanmax(rate[: max(2, len(rate) // 3)]))
    yield symptom_of("starts_at_full_rate", start, step=steps[0])
    # First row at which the rate was as high as at the failure.
    top = int(np.argmax(rate >= 0.98 * np.nanmax(rate[: max(row + 1, 2)])))
    is_rising = not failure.is_stalled and row > 0 and rate[row] < 0.98 * peak and top >= row - 2
    yield symptom_of(
        "fails_in_warm_up", float(rate[row]), strength=float(is_rising), reference=peak, step=failure.step,
        sentence="The run failed while the learning rate was rising, at {v:.3g}." if is_rising else "",
    )  # fmt: skip


def _of_updates(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of the part ``optimizer``, as medians over the blocks."""
    steps, ratio = record.steps_of("optimizer"), _over_blocks(record, "update_ratio")
    at = failure.last_row(steps)
    yield symptom_of("update_size", float(np.nanmax(ratio[: at + 1])), step=steps[at])
    yield symptom_of("first_update", float(ratio[0]), step=steps[0])
    yield from _of_their_course(failure, steps, ratio)
    if record.has("optimizer", "gradient_signal_share"):  # McCandlish et al. 2018, arXiv:1812.06162
        signal = _over_blocks(record, "gradient_signal_share")[: at + 1]
        if np.isfinite(signal).any():
            best = int(np.nanargmax(signal))
            yield symptom_of("gradients_are_noise", float(np.clip(signal[best], 0, 1)), step=steps[best])
    yield from _shortfall(record, steps, at)
    if record.has("optimizer", "unchanged_share"):  # weights that an update leaves exactly unchanged, by rounding
        unchanged = _over_blocks(record, "unchanged_share")[: at + 1]
        if (rate := record.monitor("learning_rate")) is not None:  # at a rate of 0 no weight should change
            unchanged = np.where(np.interp(steps[: at + 1], record.steps, rate) > 0, unchanged, np.nan)
        if np.isfinite(unchanged).any():
            yield symptom_of("weights_stay_unchanged", float(np.nanmedian(unchanged)), step=steps[at])
    if record.has("optimizer", "gradient_rms_over_eps"):
        over = float(np.nanmedian(_over_blocks(record, "gradient_rms_over_eps")[: at + 1]))
        yield symptom_of("eps_rules", over, step=steps[at])
    if record.has("optimizer", "adam_staleness"):
        near = np.nanmax(record.values("optimizer", "adam_staleness"), axis=1)[max(0, at - 1) : at + 3]
        found = float(np.nanmax(near)) if np.isfinite(near).any() else math.nan
        if math.isfinite(found):
            yield symptom_of("staleness", found, step=steps[at])
    if record.has("optimizer", "module_weight_norm"):
        weights = _over_blocks(record, "module_weight_norm")
        yield symptom_of("weights_grow", float(weights[-1] / weights[0]), step=steps[-1], first=steps[0])


def _of_their_course(failure: Failure, steps: np.ndarray, ratio: np.ndarray) -> Iterator[Symptom]:
    """Yield how the norm of the updates changes over the run: at the start, suddenly near the failure, or fading."""
    if len(ratio) < 4 or not np.isfinite(ratio).all() or not (ratio > 0).all():
        return
    start = float(ratio[0] / np.max(ratio[: max(2, len(ratio) // 3)]))
    yield symptom_of("starts_with_full_updates", start, step=steps[0])
    near = np.arange(2, len(ratio))
    if not failure.is_stalled:
        near = near[(steps[near] >= failure.step - _BEFORE) & (steps[near] <= failure.step + _AFTER)]
    leaps = ratio[near] / ratio[near - 1]
    at = int(near[np.argmax(leaps)]) if len(near) else 1
    leap = float(ratio[at] / ratio[at - 1]) if len(near) else 1.0
    yield symptom_of("updates_leap", leap, step=steps[at], before=steps[at - 1])
    peak = int(np.argmax(ratio))
    faded = float(np.mean(ratio[peak:] < _DECAYED * ratio[peak]))
    yield symptom_of("updates_fade", faded, strength=None if failure.is_stalled else 0.0, step=steps[-1])


def _shortfall(record: Record, steps: np.ndarray, at: int) -> Iterator[Symptom]:
    """Yield whether updates have the magnitude that the rate implies: for Adam about the rate per weight and step."""
    rate = record.monitor("learning_rate")
    needed = ("module_weight_norm", "module_grad_norm", "gradient_rms")
    if rate is None or not all(record.has("optimizer", name) for name in needed):
        return
    weight, norm, rms = (record.values("optimizer", name) for name in needed)
    rate_there = np.interp(steps, record.steps, rate)
    with np.errstate(divide="ignore", invalid="ignore"):
        # The root of the number of weights.
        size = np.sqrt(np.nanmedian(np.where(rms > 0, (norm / rms) ** 2, np.nan), axis=0))
        moved = record.values("optimizer", "update_ratio") * weight / size
        relative = np.nanmedian(moved[:, _blocks(record)], axis=1) / np.where(rate_there > 0, rate_there, np.nan)
    known = relative[: at + 1][np.isfinite(relative[: at + 1])]
    if not len(known):
        return
    found = float(np.median(known))
    yield symptom_of("updates_fall_short", found, step=steps[at])
    if record.has("optimizer", "gradient_rms_over_eps"):
        over = np.nanmedian(_over_blocks(record, "gradient_rms_over_eps")[: at + 1])
        is_small = ramp(finite_log10(float(over)), 0.7, 2.0, high=1)
        strength = is_small * ramp(abs(finite_log10(found) + 0.25), 0.3, 0.9)
        yield symptom_of("updates_get_lost", found, strength=strength, step=steps[at], over=over)


def _blocks(record: Record) -> np.ndarray:
    """Return the indices of the blocks among the modules; all indices if no module is a block."""
    part = record.parts["optimizer"]
    layer = part["layer"].values if "layer" in part.coords else np.arange(part.sizes["module"])
    found = np.flatnonzero(layer >= 0)
    return found if len(found) else np.arange(part.sizes["module"])


def _over_blocks(record: Record, name: str) -> np.ndarray:
    """Return the median over the blocks of a variable of the optimizer, shape (step,)."""
    return np.nanmedian(record.values("optimizer", name)[:, _blocks(record)], axis=1)


def _of_curvature(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the largest product of rate and sharpness before the failure, relative to the edge of stability."""
    name = next((name for name in EDGES if record.has("curvature", name)), None)
    if name is None:
        return
    steps = record.steps_of("curvature")
    values = record.values("curvature", name)[: failure.last_row(steps) + 1] / EDGES[name]
    if np.isfinite(values).any():
        at = int(np.nanargmax(values))
        yield symptom_of("rate_over_edge", float(values[at]), place=f"curvature/{name}", step=steps[at])


def _of_batches(record: Record, failure: Failure) -> Iterator[Symptom]:
    rows = record.monitor("batch_size")
    if rows is None:
        if given := record.setting("task", "batch_size"):
            size, kind = float(given), SymptomKind.CONFIGURATION
            yield symptom_of("few_rows", size, level=math.log2(max(size, 1)), place="", kind=kind)
        return
    at = len(rows) - 1 if failure.is_stalled else min(failure.row + 1, len(rows) - 1)
    there, first = float(np.nanmedian(rows[max(0, at - 5) : at + 1])), float(np.nanmedian(rows[:5]))
    yield symptom_of("few_rows", there, level=math.log2(max(there, 1)), step=record.steps[at])
    last = float(np.nanmedian(rows[-5:]))
    drop = math.log2(first / last) if first > 0 and last > 0 else 0.0
    yield symptom_of("batches_shrink", last / first if first > 0 else math.nan, level=drop, first=first, last=last)


def _of_plan(record: Record) -> Iterator[Symptom]:
    training = record.setting("training", default={})
    if not training:
        return
    optimizer = str(training.get("optimizer", "")).lower()
    options = training.get("optimizer_options") or {}
    eps = options.get("eps", 1e-8 if "adam" in optimizer else None)
    if isinstance(eps, int | float):
        yield symptom_of("eps_setting", float(eps), level=finite_log10(float(eps), 1e-30))
    if (warmup := training.get("warmup")) is not None:
        yield symptom_of("no_warm_up_setting", float(warmup), strength=0.0 if warmup else 1.0, warmup=warmup)
    schedule = str(training.get("schedule", "constant"))
    is_custom = float(schedule not in SCHEDULES)
    which = "a custom function" if is_custom else schedule
    yield symptom_of("own_schedule_setting", is_custom, strength=is_custom, which=which)
    clip = training.get("clip_norm")
    how = f"clipped at {clip:g}" if clip else "not clipped"
    yield symptom_of("no_clipping_setting", float(clip or math.nan), strength=0.0 if clip else 1.0, how=how)
    if (norm := record.setting("model", "config", "norm")) is not None:
        is_none = float(norm == "none")
        yield symptom_of("no_norm_setting", is_none, strength=is_none, norm=norm)
    if (balance := record.setting("model", "config", "balance_coefficient")) is not None:
        if balance <= 0:
            yield symptom_of("balance_setting", balance, strength=1.0)
        else:
            yield symptom_of("balance_setting", balance, level=abs(math.log10(balance / 0.01)))
    if (precision := training.get("precision")) is not None:
        is_low = float(precision != "float32")
        yield symptom_of("low_precision_setting", is_low, strength=is_low, which=precision)


#: log10 of the largest usual spectral radius of the first block, and of the others.
_FIRST_RADIUS, _RADIUS = 1.75, 1.5
#: Number of last measurements whose loads are used to infer the number of choices of the probe, the minimum and maximum
#: of that number, and the tolerance for counts to be integers.
_LOADS_READ, _FEWEST_CHOICES, _MOST_CHOICES, _WHOLE = 20, 64, 4097, 1e-3


def model_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of blocks, attention and routers."""
    if record.has("optimizer", "module_weight_norm"):
        yield from _of_modules(record)
    if record.has("activations", "state_norm"):
        yield from _of_states(record, failure)
    if record.has("spectra", "spectral_radius"):
        yield from _of_spectra(record)
    if record.weights is not None and not record.has("optimizer", "module_weight_norm"):
        sizes = record.weights.norm
        yield from _odd_block("odd_weights", sizes, np.arange(len(sizes)), record.weights.step, place="")
    if "attention" in record.parts:
        yield from _of_attention(record, failure)
        yield from _of_query_key_updates(record, failure)
    yield from _of_routing(record, failure)


def odd_one(values: np.ndarray) -> tuple[int, float]:
    """Return index and log10 ratio of the value farthest from the others' median; (-1, 0) for fewer than three."""
    logs = np.log10(np.maximum(np.asarray(values, dtype=np.float64), 1e-12))
    known = np.flatnonzero(np.isfinite(logs))
    if len(known) < 3:
        return -1, 0.0
    ratio = {int(i): float(logs[i] - np.median(logs[known[known != i]])) for i in known}
    place = max(ratio, key=lambda i: abs(ratio[i]))
    return place, ratio[place]


def _odd_block(
    name: str, values: np.ndarray, layers: np.ndarray, step: int, *, place: str | None = None
) -> Iterator[Symptom]:
    row, log_ratio = odd_one(values)
    if row < 0:
        return
    layer, is_odd = int(layers[row]), abs(log_ratio) > 0.35
    yield symptom_of(
        name, 10**log_ratio, level=abs(log_ratio), step=step, layer=layer if is_odd else -1, place=place, block=layer,
        selection={"layer" if place == "" else "module": layer}, usual=_usual(is_odd),
    )  # fmt: skip


def _of_modules(record: Record) -> Iterator[Symptom]:
    """Yield the differences between the blocks at the first measurement of weights, gradients and updates."""
    part = record.parts["optimizer"]
    layers = part["layer"].values if "layer" in part.coords else np.arange(part.sizes["module"])
    own, step = np.flatnonzero(layers >= 0), int(part["step"].values[0])
    for name, variable in (
        ("odd_weights", "module_weight_norm"),
        ("odd_gradients", "module_grad_norm"),
        ("odd_updates", "update_ratio"),
    ):
        if record.has("optimizer", variable):
            yield from _odd_block(name, record.values("optimizer", variable)[0][own], layers[own], step)
    if record.has("optimizer", "module_grad_norm"):
        norm = record.values("optimizer", "module_grad_norm")[0][own]
        if np.isfinite(norm).sum() > 1 and np.nanmax(norm) > 0:
            spread = finite_log10(float(np.nanmax(norm) / max(np.nanmin(norm), 1e-12)))
            yield symptom_of("gradients_differ_by_depth", 10**spread, level=spread, step=step)


def _of_states(record: Record, failure: Failure) -> Iterator[Symptom]:
    steps, norm = record.steps_of("activations"), record.values("activations", "state_norm")
    first = norm[0]
    if np.isfinite(first).sum() >= 2:
        growth = float(first[-1] / first[0])
        yield symptom_of("stream_grows_by_depth", growth, level=abs(finite_log10(growth)), step=steps[0])
        gains = np.nan_to_num(np.abs(np.diff(np.log10(np.maximum(first, 1e-12)))))
        jump = int(np.argmax(gains))
        is_odd = bool(gains[jump] > 0.5)
        yield symptom_of(
            "stream_jumps_at_a_block", float(first[jump + 1] / first[jump]), level=float(gains[jump]), step=steps[0],
            layer=jump + 1 if is_odd else -1, block=jump + 1, selection={"layer": jump + 1}, usual=_usual(is_odd),
        )  # fmt: skip
    at = failure.last_row(steps)
    later = float(np.nanmedian(norm[at] / first)) if np.isfinite(norm[at] / first).any() else math.nan
    if math.isfinite(later) and at:
        yield symptom_of("stream_grows_in_training", later, step=steps[at], first=steps[0])


def _of_spectra(record: Record) -> Iterator[Symptom]:
    """Yield the symptoms of the first recorded spectra, which are those at initialization if recorded at step 0."""
    part, radius = record.parts["spectra"], record.values("spectra", "spectral_radius")[0]
    step, layers = int(part["step"].values[0]), part["layer"].values
    if not np.isfinite(radius).any():
        return
    # The input of the first block is the embedding, which is small and of low rank, so a larger amplification is usual.
    excess = np.log10(np.maximum(radius, 1e-12)) - np.where(np.arange(len(radius)) == 0, _FIRST_RADIUS, _RADIUS)
    top, low = int(np.nanargmax(excess)), int(np.nanargmin(radius))
    for name, row, level, is_odd in (
        ("block_blows_up", top, float(excess[top]), excess[top] > 0),
        ("block_forgets", low, float(radius[low]), ramp(float(radius[low]), 0.97, 0.5) > 0),
    ):
        layer = int(layers[row])
        yield symptom_of(
            name, float(radius[row]), level=level, step=step, layer=layer if is_odd else -1, block=layer,
            selection={"layer": layer}, usual=_usual(bool(is_odd)),
        )  # fmt: skip
    if record.has("spectra", "near_unit_mass"):
        mass = float(np.nanmean(record.values("spectra", "near_unit_mass")[0]))
        yield symptom_of("near_unit_mass", mass, step=step)


def _usual(is_odd: bool) -> str:
    """Return the remark on the most extreme value of a run if it is still within the usual range."""
    return "" if is_odd else ", which is not unusual"


def _of_attention(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of attention before the failure, where arithmetic faults appear first (arXiv:2606.28116)."""
    steps = record.steps_of("attention")
    at = failure.last_row(steps)
    has_logits = record.has("attention", "attention_logit_max")
    if has_logits:
        logits = np.abs(record.values("attention", "attention_logit_max"))[at]
        level = float(np.nanmax(logits)) if np.isfinite(logits).any() else math.nan
        if math.isfinite(level):
            layer = int(np.nanargmax(np.nanmax(logits, axis=-1)))
            yield symptom_of("attention_logits", level, step=steps[at], block=layer, selection={"layer": layer})
    if record.has("attention", "attention_entropy_share"):
        fractions = record.values("attention", "attention_entropy_share")[at]
        if has_logits:
            level, mean = float(np.nanmax(logits)), float(np.nanmean(fractions))
            strength = ramp(finite_log10(level), 1.2, 2.2) * ramp(mean, 0.35, 0.65, high=1)
            yield symptom_of("logits_without_focus", level, strength=strength, step=steps[at], mean=100 * mean)
        yield symptom_of("attention_narrows", float(np.nanmin(np.nanmean(fractions, axis=-1))), step=steps[at])


def _of_query_key_updates(record: Record, failure: Failure) -> Iterator[Symptom]:
    part = record.parts["attention"]
    if not record.has("attention", "effective_rank") or "term" not in part.coords:
        return
    terms, steps = [str(term) for term in part["term"].values], record.steps_of("attention")
    at = failure.last_row(steps)
    ranks = record.values("attention", "effective_rank")
    if "D2" in terms:
        now = ranks[..., terms.index("D2")][at]
        if np.isfinite(now).any():
            found = float(np.nanmedian(now))
            yield symptom_of("updates_of_one_direction", found, step=steps[at], selection={"term": "D2"})
    if not ({"D2", "W"} <= set(terms) and record.has("attention", "frobenius_norm")):
        return
    norms = record.values("attention", "frobenius_norm")
    size = norms[..., terms.index("W")].reshape(len(steps), -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = norms[at][..., terms.index("D2")] / norms[at][..., terms.index("W")]
        growth = np.nanmax(size[at]) / np.nanmedian(size[0]) if np.isfinite(size[at]).any() else math.nan
    if np.isfinite(ratio).any():
        yield symptom_of("queries_and_keys_move", float(np.nanmax(ratio)), step=steps[at], selection={"term": "D2"})
    if "dWq" in terms and at:  # whether the query updates spread over more directions, which rounding causes
        rank = np.nanmedian(ranks[..., terms.index("dWq")], axis=(1, 2))
        late = float(np.nanmedian(rank[max(1, at - 2) : at + 1]) / rank[0]) if rank[0] > 0 else math.nan
        if math.isfinite(late):
            yield symptom_of("updates_scatter", late, step=steps[at], selection={"term": "dWq"})
    if record.has("optimizer", "module_weight_norm"):
        weights = np.nanmedian(record.values("optimizer", "module_weight_norm"), axis=1)
        first, last = (np.interp(steps[row], record.steps_of("optimizer"), weights) for row in (0, at))
        if math.isfinite(growth) and growth > 0 and math.isfinite(last / first):
            excess = finite_log10(float(growth)) - 2 * finite_log10(float(last / first))  # a product of two matrices
            name = "attention_outgrows_the_rest"
            yield symptom_of(name, 10**excess, level=excess, step=steps[at], selection={"term": "W"})


def _of_routing(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of the part ``router`` and of the magnitude of the auxiliary loss."""
    if (auxiliary := record.monitor("auxiliary_loss")) is not None:
        ratio = float(np.nanmedian(auxiliary) / np.nanmedian(record.values("monitors", "loss")))
        n_zero = float(np.mean(auxiliary[np.isfinite(auxiliary)] == 0))
        yield symptom_of("auxiliary_loss_rules", ratio, strength=None if ratio > 0 else 0.0)
        sentence = "The auxiliary loss is negative, which rewards imbalance." if ratio < 0 else ""
        strength = float(n_zero > 0.1 or ratio < 0)
        value = ratio if ratio < 0 else n_zero
        yield symptom_of("auxiliary_loss_is_gone", value, strength=strength, sentence=sentence)
    if "router" not in record.parts:
        if "optimizer" in record.parts or "activations" in record.parts:  # the model was measured and has no router
            sentence = "No block routes tokens to experts."
            yield symptom_of("has_routers", 0.0, strength=0.0, sentence=sentence)
            yield symptom_of("experts_die", 0.0, strength=0.0, place="", sentence="The model has no experts.")
        return
    part, steps = record.parts["router"], record.steps_of("router")
    # Before a spike the state of the router may show the cause; afterwards it may be a consequence.
    before = np.flatnonzero(steps <= failure.step + 1) if not failure.is_stalled else np.arange(len(steps))
    seen, has_dead = before, record.has("router", "dead_experts")
    if has_dead:
        seen = np.flatnonzero(np.isfinite(record.values("router", "dead_experts")).any(axis=1))
    before = np.intersect1d(before, seen)
    at = int(before[-1]) if len(before) else int(seen[0]) if len(seen) else 0
    n_blocks, n_experts = part.sizes["layer"], part.sizes.get("expert", 0)
    yield symptom_of("has_routers", float(n_blocks), strength=1.0, blocks=counted(n_blocks, "block"))
    if has_dead and n_experts:
        dead = record.values("router", "dead_experts")[at]
        row, fraction = int(np.nanargmax(dead)), float(np.nanmax(dead) / n_experts)
        by_chance = _unused_by_chance(record, n_experts)
        layer = int(part["layer"].values[row]) if "layer" in part.coords else row
        yield symptom_of(
            "experts_die", fraction, level=(fraction - by_chance) / (1 - by_chance), step=steps[at], block=row,
            layer=layer if fraction > 0.1 else -1,
        )  # fmt: skip
    if record.has("router", "max_violation") and n_experts > 1:
        violation = float(np.nanmax(record.values("router", "max_violation")[at]))
        yield symptom_of("load_is_uneven", violation, level=violation / (n_experts - 1), step=steps[at])
    if record.has("router", "routing_entropy_share"):
        entropy = record.values("router", "routing_entropy_share")
        yield symptom_of("router_is_sure_at_once", float(np.nanmin(entropy[0])), step=steps[0])
        yield symptom_of("router_is_sure", float(np.nanmin(entropy[at])), step=steps[at])
    if record.has("router", "router_similarity"):
        alike = float(np.nanmax(record.values("router", "router_similarity")[at]))
        yield symptom_of("router_rows_are_alike", alike, step=steps[at])
    if record.has("router", "routing_change") and at:
        change = float(np.nanmedian(record.values("router", "routing_change")[max(1, at - 5) : at + 1]))
        if math.isfinite(change):
            yield symptom_of("routing_keeps_changing", change, step=steps[at])


def _unused_by_chance(record: Record, n_experts: int) -> float:
    """Return the expected fraction of experts without a probe token under uniform routing.

    It is not negligible because the probe has few tokens. The number of choices is inferred from the loads: the
    smallest plausible number n for which all loads are integer multiples of 1 / n.
    """
    if not record.has("router", "expert_load"):
        return 0.0
    loads = record.values("router", "expert_load")[-_LOADS_READ:]
    loads = np.unique(loads[np.isfinite(loads) & (loads > 0)])
    for n_choices in range(_FEWEST_CHOICES, _MOST_CHOICES):
        counts = n_choices * loads
        if np.abs(counts - counts.round()).max(initial=0) < _WHOLE:
            return float((1 - 1 / n_experts) ** n_choices) if len(loads) else 0.0
    return 0.0
