"""The variables of a flow dataset: dimensions, units and meaning, in the manner of `workbench.schema`."""

from __future__ import annotations

from workbench.schema.runs import Variable

_BOUNDARY = ("boundary",)
_LAYER = ("layer",)
_SUBLAYER = ("layer", "sublayer")
_HEAD = ("layer", "head")

#: Of the states between blocks, of blocks and sub-layers; NaN where they do not exist or cannot be seen.
FLOW: dict[str, Variable] = {
    "state_rms": Variable(_BOUNDARY, "f", "state RMS", "1", "root mean square of the residual stream's entries"),
    "gradient_norm": Variable(
        _BOUNDARY, "f", "gradient norm", "1", "norm of the loss's gradient with respect to all states of the boundary"
    ),
    "token_cosine": Variable(
        _BOUNDARY, "f", "token cosine", "1", "mean cosine of two tokens of a sequence; 1: all point the same way"
    ),
    "effective_rank": Variable(
        _BOUNDARY,
        "f",
        "effective rank share",
        "1",
        "exp of the entropy of the states' singular values, over the largest rank possible",
    ),
    "signal_gain": Variable(_LAYER, "f", "signal gain", "1", "RMS of the states leaving over RMS of those entering"),
    "gradient_gain": Variable(
        _LAYER, "f", "gradient gain", "1", "norm of the gradient at the block's input over that at its output"
    ),
    "sublayer_signal_gain": Variable(
        _SUBLAYER, "f", "signal gain", "1", "RMS of the stream after the sub-layer over that before it"
    ),
    "sublayer_gradient_gain": Variable(
        _SUBLAYER, "f", "gradient gain", "1", "norm of the gradient before the sub-layer over that after it"
    ),
    "branch_ratio": Variable(
        _SUBLAYER, "f", "branch ratio", "1", "RMS of the branch over RMS of the stream that it is added to"
    ),
    "block_singular_value": Variable(
        ("layer", "singular"), "f", "singular value of the block", "1", "of the block's Jacobian, largest first"
    ),
    "block_singular_mean": Variable(
        _LAYER, "f", "mean singular value", "1", "root mean square of all singular values of the block's Jacobian"
    ),
    "end_to_end_singular_value": Variable(
        ("singular",), "f", "end-to-end singular value", "1", "of the Jacobian of all blocks together, largest first"
    ),
    "end_to_end_singular_mean": Variable(
        (), "f", "mean end-to-end singular value", "1", "root mean square of all singular values of all blocks together"
    ),
    "attention_entropy_share": Variable(
        _HEAD, "f", "attention entropy share", "1", "entropy over log(visible), mean over tokens that see several"
    ),
    "attention_logit_std": Variable(
        _HEAD, "f", "attention logit scale", "1", "deviation of a token's logits from their own mean, RMS over tokens"
    ),
    "attention_logit_max": Variable(_HEAD, "f", "largest attention logit", "1", "over all tokens"),
    "sink_share": Variable(
        _HEAD, "f", "sink share", "1", "attention on the first token of the sequence, mean over tokens that see others"
    ),
    "routing_entropy_share": Variable(
        _LAYER, "f", "routing entropy share", "1", "entropy of the full softmax over log(experts), mean over tokens"
    ),
    "max_violation": Variable(_LAYER, "f", "MaxVio", "1", "(largest - mean) / mean of the experts' load"),
    "routing_margin": Variable(
        _LAYER,
        "f",
        "routing margin",
        "1",
        "probability of the last chosen expert less that of the first rejected, mean over tokens",
    ),
}
