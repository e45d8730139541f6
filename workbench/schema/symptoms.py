"""Symptoms of a diagnosis: what each measures, how strong a value is as evidence, and the sentence that states it."""

from __future__ import annotations

import math
from typing import NamedTuple

from workbench.formatting import title_of
from workbench.schema.statuses import SymptomKind


class SymptomRule(NamedTuple):
    """How a symptom is read: title, part and variable of its value, and the template of its sentence.

    ``scale`` has the levels of strength 0 and 1, then its limits if not 0 and 1.5; ``is_log`` takes log10 of the value.
    In sentences ``v`` is the value, ``p`` percent, ``short`` and ``fold`` words.
    """

    title: str
    place: str
    scale: tuple[float, ...]
    reference: float
    sentence: str
    is_log: bool = False
    units: str = "1"
    kind: SymptomKind = SymptomKind.MECHANISM


_LOG, _SETTING = SymptomKind.LOG, SymptomKind.CONFIGURATION
_LOSS, _NORM, _RATE = "monitors/loss", "monitors/grad_norm", "monitors/learning_rate"

# fmt: off
#: Identifier of a symptom -> how it is read. Symptoms without a scale have another rule for their strength.
SYMPTOMS = {
    # Loss, gradient norm and learning rate
    "fails_at_once": SymptomRule("steps before the failure", _LOSS, (1.5, 0.3), math.nan,
        "{how}; the failure began {v} steps after the first step.", units="step"),
    "diverges": SymptomRule("step of divergence", _LOSS, (), math.nan, "The run did not diverge.", units="step"),
    "hardly_learns": SymptomRule("small decrease of the loss", _LOSS, (0.3, 0.05), 0.3,
        "The loss decreased by {p:.0f} % of its first value, from {first:.3g} to {low:.3g} nat."),
    "learns": SymptomRule("decrease of the loss", _LOSS, (0.05, 0.6, 0, 1), 0.3,
        "The loss decreased by {p:.0f} % of its first value, from {first:.3g} to {low:.3g} nat."),
    "ends_above_its_best": SymptomRule("undone decrease of the loss", _LOSS, (0.1, 0.5, 0, 1), 0.1,
        "At the end, {undone:.0f} % of the earlier decrease of the loss had been undone."),
    "spike_recovers": SymptomRule(
        "recovered fraction of the rise", _LOSS, (), math.nan, "The loss shows no rise that was recovered."),
    "abrupt": SymptomRule("duration of half of the rise", _LOSS, (1.6, 0.8), math.nan,
        "Half of the rise of the loss occurred within {span}.", units="step"),
    "loss_stands_above_both_sides": SymptomRule(
        "height of the rise over the loss noise", _LOSS, (1.0, 5.0, -0.5), math.nan,
        "For {span} the loss exceeded that before and after by {short} times its noise."),
    "loss_scatters_more": SymptomRule("growth of the loss noise", _LOSS, (0.2, 0.8, -0.5), 1.0,
        "The noise of the loss from step to step is up to {short} times that at the start.", is_log=True),
    "loss_noise": SymptomRule("relative noise of the loss", _LOSS, (-1.3, -0.5, -1), 0.05,
        "The noise of the loss from step to step is {p:.2g} % of its level.", is_log=True),
    "first_loss": SymptomRule("first loss", _LOSS, (1.3, 3.0, 0, 3), math.nan,
        "The first loss is {v:.3g} nat; that of a uniform guess is {guess:.3g} nat.", units="nat"),
    "first_gradient": SymptomRule(
        "first gradient norm", _NORM, (0.7, 2.0, 0, 3), 5.0, "The first gradient norm is {short}.", is_log=True),
    "gradient_noise": SymptomRule("noise of the gradient norm", _NORM, (0.08, 0.25, -1), 0.08,
        "The gradient norm fluctuates from step to step by a factor of {factor:.2f}.", units="decade"),
    "gradients_fade": SymptomRule("last over first gradient norm", _NORM, (-0.3, -1.3), 1.0,
        "At the end, the gradient norm is {short} times that at the start."),
    "gradients_build_up": SymptomRule("growth of gradients before the failure", _NORM, (0.1, 0.6, -0.5), 1.0,
        "When the loss began to rise, the gradient norm was {short} times that of 8 to 40 steps before."),
    "gradients_burst": SymptomRule("growth of gradients at the failure", _NORM, (0.3, 1.3, 0, 2), 1.0,
        "Within 15 steps after the loss began to rise, the gradient norm reached {short} times its earlier level."),
    "rate_jumps": SymptomRule("jump of the learning rate", _RATE, (0.1, 0.7), 1.0,
        "The learning rate did not jump before the failure.", is_log=True, kind=_LOG),
    "rate_is_spent": SymptomRule("fraction of steps at a decayed rate", _RATE, (0.25, 0.7), 0.25,
        "In {p:.0f} % of the steps after its peak, the learning rate was below a tenth of the peak.", kind=_LOG),
    "starts_at_full_rate": SymptomRule("first over largest learning rate", _RATE, (0.3, 0.9, 0, 1), 0.05,
        "The first learning rate is {p:.0f} % of the largest one in the first third of the run.", kind=_LOG),
    "fails_in_warm_up": SymptomRule("failure during the warm-up", _RATE, (), math.nan,
        "The run failed at a learning rate of {v:.3g}, not during the warm-up.", kind=_LOG),
    # Updates
    "update_size": SymptomRule("largest relative update", "optimizer/update_ratio", (-1.0, 0.0, -1.5), 0.1,
        "Before the failure, an update changed the weights of a block by up to {p:.3g} % of their norm.", is_log=True),
    "first_update": SymptomRule("first relative update", "optimizer/update_ratio", (-1.0, 0.0, -1.5), 0.1,
        "At step {step} the update changed the weights of a block by {p:.3g} % of their norm.", is_log=True),
    "eps_rules": SymptomRule("gradient RMS over eps", "optimizer/gradient_rms_over_eps", (1.5, 0.0, -1), 1e4,
        "The RMS of the gradients is {short} times the optimizer's eps; below about 1, eps determines the update.",
        is_log=True),
    "staleness": SymptomRule("Adam staleness", "optimizer/adam_staleness", (0.2, 0.8, 0, 2), 1.0,
        "Around the failure, the gradients were {short} times as large as Adam's second moment implies.", is_log=True),
    "weights_grow": SymptomRule("growth of the weight norm", "optimizer/module_weight_norm", (0.2, 1.0, -0.5, 2), 1.3,
        "At the end, the weight norm of a block is {short} times that at step {first}.", is_log=True),
    "starts_with_full_updates": SymptomRule(
        "first over largest update norm", "optimizer/update_ratio", (0.3, 0.9, 0, 1), 0.2,
        "The first measured update, at step {step}, has {p:.0f} % of the largest norm in the first third of the run."),
    "updates_leap": SymptomRule("jump of the update norm", "optimizer/update_ratio", (0.2, 0.7), 1.0,
        "From step {before} to step {step} the norm of the updates changed by a factor of {short}.", is_log=True),
    "updates_fade": SymptomRule("fraction of small updates", "optimizer/update_ratio", (0.25, 0.7), 0.2,
        "Of the updates after the largest one, {p:.0f} % were smaller than a tenth of it."),
    "gradients_are_noise": SymptomRule(
        "gradient signal fraction", "optimizer/gradient_signal_share", (0.5, 0.0, -1), 0.5,
        "At most {p:.2g} % of the mean squared gradient was common to successive batches (at step {step}); the rest "
        "was noise."),
    "weights_stay_unchanged": SymptomRule(
        "unchanged fraction of the weights", "optimizer/unchanged_share", (0.1, 0.6, -0.2), 0.0,
        "In the median, an update left {p:.0f} % of the weights with a nonzero gradient unchanged."),
    "updates_fall_short": SymptomRule("update over learning rate", "optimizer/update_ratio", (-0.4, -1.6, -1, 2), 0.5,
        "An update changes a weight by {v:.3g} times the learning rate; with Adam, about 0.5 to 1 is usual.",
        is_log=True),
    "updates_get_lost": SymptomRule("update over rate, gradients above eps", "optimizer/update_ratio", (), 0.5,
        "An update changes a weight by {v:.3g} times the learning rate, although the gradients are {over:.3g} times "
        "eps."),
    "rate_over_edge": SymptomRule("learning rate over stability edge", "curvature/", (-0.5, 1.0, -1, 2), 1.0,
        "At step {step} the learning rate was {short} times the edge of stability that follows from the sharpness.",
        is_log=True),
    # Blocks
    "odd_weights": SymptomRule(
        "outlying weight norm of a block", "optimizer/module_weight_norm", (0.35, 1.0, 0, 2.5), 1.0,
        "At step {step} the weight norm of block {block} is {short} times that of the other blocks{usual}."),
    "odd_gradients": SymptomRule(
        "outlying gradient norm of a block", "optimizer/module_grad_norm", (0.35, 1.0, 0, 2.5), 1.0,
        "At step {step} the gradient norm of block {block} is {short} times that of the other blocks{usual}."),
    "odd_updates": SymptomRule(
        "outlying relative update of a block", "optimizer/update_ratio", (0.35, 1.0, 0, 2.5), 1.0,
        "At step {step} the relative update of block {block} is {short} times that of the other blocks{usual}."),
    "gradients_differ_by_depth": SymptomRule(
        "range of gradient norms over blocks", "optimizer/module_grad_norm", (0.9, 2.0, 0, 2), 3.0,
        "At step {step} the gradient norms of the blocks differ {fold}."),
    "stream_grows_by_depth": SymptomRule(
        "growth of the stream over depth", "activations/state_norm", (0.7, 1.7, 0, 2), 2.0,
        "At step {step} the norm of the residual stream after the last block is {short} times that after the first."),
    "stream_jumps_at_a_block": SymptomRule(
        "growth of the stream at one block", "activations/state_norm", (0.5, 1.3, 0, 2), 1.5,
        "At step {step} block {block} changes the norm of the residual stream {fold}{usual}."),
    "stream_grows_in_training": SymptomRule(
        "growth of the stream in training", "activations/state_norm", (0.7, 2.0, -0.5, 2), 5.0,
        "By step {step} the norm of the residual stream has grown {fold} since step {first}.", is_log=True),
    "block_blows_up": SymptomRule("largest spectral radius", "spectra/spectral_radius", (0.0, 0.8, -0.5, 2.5), 3.0,
        "At step {step} block {block} amplifies its largest mode {fold}{usual}."),
    "block_forgets": SymptomRule("smallest spectral radius", "spectra/spectral_radius", (0.97, 0.5), 1.0,
        "At step {step} the spectral radius of block {block} is {v:.2g}; that of a residual block is usually at least "
        "1."),
    "near_unit_mass": SymptomRule("near-unit mass", "spectra/near_unit_mass", (0.3, 0.95), 0.2,
        "At step {step}, {p:.0f} % of the modes lie near the unit circle, as in models without normalization."),
    # Attention
    "attention_logits": SymptomRule(
        "largest attention logit", "attention/attention_logit_max", (1.0, 2.3, -0.5, 2), 10.0,
        "At step {step} the largest attention logit is {v:.3g}, in block {block}.", is_log=True),
    "logits_without_focus": SymptomRule(
        "large logits without focused attention", "attention/attention_logit_max", (), 10.0,
        "At step {step} the largest attention logit is {v:.3g}, although the attention entropy is still {mean:.0f} % "
        "of its maximum."),
    "attention_narrows": SymptomRule(
        "smallest attention entropy fraction", "attention/attention_entropy_share", (0.5, 0.05), 0.5,
        "At step {step} the attention entropy of the most focused block is {p:.0f} % of its maximum."),
    "updates_of_one_direction": SymptomRule(
        "effective rank of query-key updates", "attention/effective_rank", (4.0, 1.3, -0.5), 4.0,
        "At step {step} the updates of queries and keys have a median effective rank of {v:.2f} over the heads."),
    "queries_and_keys_move": SymptomRule(
        "relative change of query-key products", "attention/frobenius_norm", (-0.3, 0.5, -0.5), 0.5,
        "Within the window up to step {step}, the product of query and key weights of one head changed by {v:.3g} "
        "times its norm.", is_log=True),
    "attention_outgrows_the_rest": SymptomRule(
        "excess growth of query-key weights", "attention/frobenius_norm", (0.3, 1.3, -0.5, 2), 1.0,
        "By step {step} the query and key weights have grown {short} times as much as the other weights."),
    "updates_scatter": SymptomRule(
        "growth of the rank of query updates", "attention/effective_rank", (0.85, 1.25, -0.5), 0.6,
        "At step {step} the effective rank of the query updates is {v:.2g} times that at the start."),
    # Routing
    "auxiliary_loss_rules": SymptomRule(
        "auxiliary loss over task loss", "monitors/auxiliary_loss", (-0.7, 0.7, 0, 2), 0.02,
        "The auxiliary loss is {v:.3g} times the loss of the task.", is_log=True, kind=_LOG),
    "auxiliary_loss_is_gone": SymptomRule("missing auxiliary loss", "monitors/auxiliary_loss", (), 0.0,
        "The auxiliary loss was zero in {p:.0f} % of the steps.", kind=_LOG),
    "has_routers": SymptomRule(
        "blocks with a router", "", (), 0.0, "Tokens are routed to experts in {blocks}.", units="block"),
    "experts_die": SymptomRule("largest fraction of dead experts", "router/dead_experts", (0.1, 0.5, 0, 2), 0.0,
        "At step {step}, {p:.0f} % of the experts of block {block} receive no tokens."),
    "load_is_uneven": SymptomRule("largest MaxVio", "router/max_violation", (0.4, 1.0), 0.5,
        "At step {step} MaxVio, the relative excess load of the most loaded expert, is {v:.3g}."),
    "router_is_sure_at_once": SymptomRule(
        "initial routing entropy fraction", "router/routing_entropy_share", (0.8, 0.2, 0, 1.3), 0.95,
        "At step {step} the smallest routing entropy of a block is {p:.0f} % of its maximum."),
    "router_is_sure": SymptomRule("routing entropy fraction", "router/routing_entropy_share", (0.6, 0.1), 0.7,
        "At step {step} the smallest routing entropy of a block is {p:.0f} % of its maximum."),
    "router_rows_are_alike": SymptomRule("router similarity", "router/router_similarity", (0.3, 0.9), 0.0,
        "At step {step} the router rows of two experts have a mean cosine of up to {v:.2f}."),
    "routing_keeps_changing": SymptomRule("routing change", "router/routing_change", (0.15, 0.6), 0.1,
        "Up to step {step}, {p:.0f} % of the tokens changed their expert between two measurements."),
    # Settings
    "few_rows": SymptomRule(
        "batch size", "monitors/batch_size", (3.5, 1.0, -0.5), 16.0, "A batch has {v:.0f} examples.", units="example",
        kind=_LOG),
    "batches_shrink": SymptomRule("last over first batch size", "monitors/batch_size", (0.3, 2.0, -1), 1.0,
        "A batch has {first:.0f} examples at the start and {last:.0f} at the end.", kind=_LOG),
    "eps_setting": SymptomRule(
        "eps of the optimizer", "", (-6.5, -2.0), 1e-8, "The optimizer's eps is {v:.3g}.", kind=_SETTING),
    "no_warm_up_setting": SymptomRule(
        "length of the warm-up", "", (), 50.0, "The warm-up takes {warmup} steps.", units="step", kind=_SETTING),
    "own_schedule_setting": SymptomRule("custom schedule", "", (), 0.0, "The schedule is {which}.", kind=_SETTING),
    "no_clipping_setting": SymptomRule("clipping limit", "", (), 1.0, "Gradients are {how}.", kind=_SETTING),
    "no_norm_setting": SymptomRule("missing normalization", "", (), 0.0, "The normalization is {norm}.", kind=_SETTING),
    "balance_setting": SymptomRule(
        "coefficient of the balance loss", "", (1.0, 3.0), 0.01, "The balance loss has a coefficient of {v:g}.",
        kind=_SETTING),
    "low_precision_setting": SymptomRule("low precision", "", (), 0.0, "The precision is {which}.", kind=_SETTING),
}
# fmt: on
SYMPTOM_TITLES = {name: rule.title for name, rule in SYMPTOMS.items()} | {
    # Of several symptoms
    "rise_out_of_nothing": "unexplained rise of the loss",
    "a_block_stands_out": "one block unlike the others",
    "routing_is_off": "unusual routing",
    # Facts
    "alarm_of_arithmetic": "error of the arithmetic",
    "alarm_of_gradients": "wrong gradients",
    "alarm_of_data": "repeated batches or wrong labels",
    "alarm_of_logits": "attention logit beyond its limit",
    "alarm_of_limits": "metric beyond its limit",
    "alarm_of_settings": "changed setting",
    "alarm_of_the_watch": "alarm of the watch",
    "blame": "rank, micro-batch or row to blame",
    "label_entropy_is_off": "entropy of the labels",
    "repeated_examples_is_off": "repeated batches",
    "no_label_counts": "batch without a label",
    "first_loss_too_high": "first loss above that of a guess",
    "too_good": "loss far below its label entropy",
    "only_frequencies": "loss above the entropy of its labels",
    "softmax_twice": "limit of the loss",
    "never_reached": "gradient of blocks",
    "no_update": "size of the updates",
    "rounded_away": "updates rounded away",
    "eps_is_small": "smallest gradient RMS over eps",
    "attention_saturates": "logit of saturated attention",
    "arithmetic_is_sound": "clean measurements of the arithmetic",
}


def symptom_title(name: str) -> str:
    """Return the title of a symptom; for an unknown one, its identifier in words."""
    return SYMPTOM_TITLES.get(name, title_of(name))
