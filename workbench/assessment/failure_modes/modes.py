"""The failure modes that an assessment checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FailureMode:
    """A way in which training fails.

    Attributes:
        title: Title shown to the user.
        meaning: Description in one clause.
    """

    title: str
    meaning: str


#: Those of the structural catalog (SORT, ai.22) first, in its order, then those of a plan and its hardware.
FAILURE_MODES: dict[str, FailureMode] = {
    "gradient_flow_collapse": FailureMode(
        "Gradient flow collapse", "gradients vanish or explode through the depth of the model"
    ),
    "attention_degeneracy": FailureMode(
        "Attention degeneracy",
        "heads attend to a single token, attention logits grow without bound, or all tokens become alike",
    ),
    "routing_oscillation": FailureMode(
        "Routing oscillation", "tokens keep switching experts, or a few experts receive almost all tokens"
    ),
    "scale_dependent_divergence": FailureMode(
        "Scale-dependent divergence", "a plan that works at a small size diverges at the target size"
    ),
    "initialization_out_of_band": FailureMode(
        "Initialization out of band", "the initialized model lies outside the range of healthy models"
    ),
    "precision_headroom": FailureMode(
        "Precision headroom", "number formats, accumulation or reduction lose precision that the updates need"
    ),
    "unsuitable_rate": FailureMode(
        "Unsuitable learning rate", "the planned rate is too small or too large to learn well, or makes trials diverge"
    ),
}
