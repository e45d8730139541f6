"""Symptoms of the model: a block that differs from the others, attention, and the routing in a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from workbench.diagnosis.failed_run import Failure, Record
from workbench.diagnosis.symptoms.symptom import Symptom, finite_log10, ramp, symptom_of
from workbench.formatting import counted

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
