"""Titles of the symptoms of a diagnosis, which figures and reports show instead of the identifiers in files."""

from __future__ import annotations

from workbench.formatting import title_of

#: Identifier of a symptom -> what its value measures, as a noun phrase.
SYMPTOM_TITLES = {
    # Loss, gradient norm and learning rate
    "fails_at_once": "steps before the failure",
    "diverges": "step of divergence",
    "hardly_learns": "small decrease of the loss",
    "learns": "decrease of the loss",
    "ends_above_its_best": "undone decrease of the loss",
    "spike_recovers": "recovered fraction of the rise",
    "abrupt": "duration of half of the rise",
    "rise_out_of_nothing": "unexplained rise of the loss",
    "loss_stands_above_both_sides": "height of the rise over the loss noise",
    "loss_scatters_more": "growth of the loss noise",
    "loss_noise": "relative noise of the loss",
    "first_loss": "first loss",
    "first_gradient": "first gradient norm",
    "gradient_noise": "noise of the gradient norm",
    "gradients_fade": "last over first gradient norm",
    "gradients_build_up": "growth of gradients before the failure",
    "gradients_burst": "growth of gradients at the failure",
    "rate_jumps": "jump of the learning rate",
    "rate_is_spent": "fraction of steps at a decayed rate",
    "starts_at_full_rate": "first over largest learning rate",
    "fails_in_warm_up": "failure during the warm-up",
    # Updates
    "update_size": "largest relative update",
    "first_update": "first relative update",
    "eps_rules": "gradient RMS over eps",
    "staleness": "Adam staleness",
    "weights_grow": "growth of the weight norm",
    "starts_with_full_updates": "first over largest update norm",
    "updates_leap": "jump of the update norm",
    "updates_fade": "fraction of small updates",
    "gradients_are_noise": "gradient signal fraction",
    "weights_stay_unchanged": "unchanged fraction of the weights",
    "updates_fall_short": "update over learning rate",
    "updates_get_lost": "update over rate, gradients above eps",
    "rate_over_edge": "learning rate over stability edge",
    # Blocks
    "a_block_stands_out": "one block unlike the others",
    "odd_weights": "outlying weight norm of a block",
    "odd_gradients": "outlying gradient norm of a block",
    "odd_updates": "outlying relative update of a block",
    "gradients_differ_by_depth": "range of gradient norms over blocks",
    "stream_grows_by_depth": "growth of the stream over depth",
    "stream_jumps_at_a_block": "growth of the stream at one block",
    "stream_grows_in_training": "growth of the stream in training",
    "block_blows_up": "largest spectral radius",
    "block_forgets": "smallest spectral radius",
    "near_unit_mass": "near-unit mass",
    # Attention
    "attention_logits": "largest attention logit",
    "logits_without_focus": "large logits without focused attention",
    "attention_narrows": "smallest attention entropy fraction",
    "updates_of_one_direction": "effective rank of query-key updates",
    "queries_and_keys_move": "relative change of query-key products",
    "attention_outgrows_the_rest": "excess growth of query-key weights",
    "updates_scatter": "growth of the rank of query updates",
    # Routing
    "routing_is_off": "unusual routing",
    "auxiliary_loss_rules": "auxiliary loss over task loss",
    "auxiliary_loss_is_gone": "missing auxiliary loss",
    "has_routers": "blocks with a router",
    "experts_die": "largest fraction of dead experts",
    "load_is_uneven": "largest MaxVio",
    "router_is_sure_at_once": "initial routing entropy fraction",
    "router_is_sure": "routing entropy fraction",
    "router_rows_are_alike": "router similarity",
    "routing_keeps_changing": "routing change",
    # Settings
    "few_rows": "batch size",
    "batches_shrink": "last over first batch size",
    "eps_setting": "eps of the optimizer",
    "no_warm_up_setting": "length of the warm-up",
    "own_schedule_setting": "custom schedule",
    "no_clipping_setting": "clipping limit",
    "no_norm_setting": "missing normalization",
    "balance_setting": "coefficient of the balance loss",
    "low_precision_setting": "low precision",
    # Facts
    "alarm_of_arithmetic": "error of the arithmetic",
    "alarm_of_gradients": "wrong gradients",
    "alarm_of_data": "repeated batches or wrong labels",
    "alarm_of_logits": "attention logit beyond its limit",
    "alarm_of_limits": "metric beyond its limit",
    "alarm_of_settings": "changed setting",
    "alarm_of_the_watch": "alarm of the watch",
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
    """Return the title of a symptom; for an unknown one, its identifier in words.

    Args:
        name: Identifier, such as ``"few_rows"``.
    """
    return SYMPTOM_TITLES.get(name, title_of(name))
