"""The failure modes that an assessment tests."""

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


#: Those of the structural catalogue (SORT, ai.22) first, in its order, then those of a plan and its hardware.
FAILURE_MODES: dict[str, FailureMode] = {
    "gradient_flow_collapse": FailureMode(
        "Gradient flow collapse", "gradients vanish or explode on their way through the depth"
    ),
    "attention_degeneracy": FailureMode(
        "Attention degeneracy", "heads look at one token only, their logits run away, or all tokens become alike"
    ),
    "routing_oscillation": FailureMode(
        "Routing oscillation", "tokens keep changing experts, or a few experts take them all"
    ),
    "scale_dependent_divergence": FailureMode(
        "Scale-dependent divergence", "what trains at a small size breaks at the target size"
    ),
    "initialization_out_of_band": FailureMode(
        "Initialization out of band", "the fresh model starts where no healthy one has started"
    ),
    "precision_headroom": FailureMode(
        "Precision headroom", "number formats, accumulation or reduction lose what the updates need"
    ),
    "unsuitable_rate": FailureMode(
        "Unsuitable learning rate", "the planned rate is too small or too large to learn well, or breaks trials"
    ),
}
