"""Which signals the alarms watch, in which direction each is bad, and what it points to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: An effective or stable rank that exceeds its smallest value, 1, by less than this counts as one.
_LEAST_EXCESS = 1e-4
_TINY = 1e-12


@dataclass(frozen=True)
class Watched:
    """One signal that the alarms watch.

    Attributes:
        part: Part of the run that holds the signal.
        variable: Variable of the signal.
        term: Term of the update of queries and keys, if the variable has terms: ``"D2"``, ``"dWq"``, ...; else empty.
        is_bad_low: Whether it is bad when it falls; otherwise when it rises.
        scale: Scale of the comparison: ``"linear"``, ``"log"``, or ``"excess"``, the logarithm of how far a rank is
            above 1.
        is_outcome: Whether it is commonly watched: the loss or the norm of the gradients; lead times are counted
            from the others to these.
        points_to: What it indicates, in plain words.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> watched = wb.alarms.Watched("monitors", "grad_norm")
        >>> watched.name, watched.badness(np.array([1.0, np.e])).round(3)
        ('grad_norm', array([0., 1.]))
    """

    part: str
    variable: str
    term: str = ""
    is_bad_low: bool = False
    scale: str = "log"
    is_outcome: bool = False
    points_to: str = ""

    @property
    def name(self) -> str:
        """The name: variable and term, such as ``"effective_rank D2"``."""
        return f"{self.variable} {self.term}".strip()

    def badness(self, values: np.ndarray) -> np.ndarray:
        """Values on a scale on which differences mean the same everywhere and more is worse.

        Args:
            values: Values as recorded, of any shape.

        Returns:
            The same shape, float64; NaN where a value is NaN, infinite, or negative on a logarithmic scale.
        """
        values = np.asarray(values, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.scale == "excess":
                values = np.log(np.maximum(values - 1, 0) + _LEAST_EXCESS)
            elif self.scale == "log":
                values = np.log(values + _TINY)
        values = np.where(np.isfinite(values), values, np.nan)
        return -values if self.is_bad_low else values


_UPDATE = (
    "the updates of queries and keys of this head are down to one direction, as biased attention gradients make them"
)
_RANKS = {
    "D2": _UPDATE,
    "D3": _UPDATE,
    "dWq": "the updates of the queries are down to one direction",
    "dWk": "the updates of the keys are down to one direction",
    "W": "queries and keys compare along one direction only",
}
_NORMS = {
    "D2": "the product of queries and keys moves further in each window than it did",
    "dWq": "the queries move further in each window than they did",
    "dWk": "the keys move further in each window than they did",
    "W": "the product of queries and keys grows, and with it the attention logits",
}

#: Every signal that is watched if a run records it.
WATCHED: tuple[Watched, ...] = (
    Watched("monitors", "loss", scale="linear", is_outcome=True, points_to="the loss itself rises"),
    Watched("monitors", "grad_norm", is_outcome=True, points_to="the gradients grow"),
    Watched("monitors", "spike_score", scale="linear", is_outcome=True, points_to="the loss has spikes"),
    *(
        Watched("attention", "effective_rank", term, is_bad_low=True, scale="excess", points_to=words)
        for term, words in _RANKS.items()
    ),
    *(Watched("attention", "frobenius_norm", term, points_to=words) for term, words in _NORMS.items()),
    Watched("attention", "attention_logit_max", points_to="attention logits grow towards where the softmax saturates"),
    Watched(
        "attention", "attention_entropy_share", is_bad_low=True, scale="linear",
        points_to="attention narrows to single tokens",
    ),
    Watched("router", "router_similarity", scale="linear", points_to="the experts' router rows become alike"),
    Watched("router", "router_conditioning", is_bad_low=True, points_to="the router's rows are mostly their mean"),
    Watched(
        "router", "routing_entropy_share", is_bad_low=True, scale="linear",
        points_to="the router is sure of its experts too early",
    ),
    Watched("router", "max_violation", scale="linear", points_to="one expert gets more than its share of the tokens"),
    Watched("router", "dead_experts", scale="linear", points_to="experts get no tokens at all"),
    Watched("router", "routing_change", scale="linear", points_to="tokens change their experts again and again"),
    Watched("optimizer", "update_ratio", points_to="updates are large against the weights"),
    Watched("optimizer", "adam_staleness", points_to="gradients have outgrown the optimizer's memory of their size"),
    Watched("optimizer", "gradient_rms", is_bad_low=True, points_to="gradients vanish in this block"),
    Watched("activations", "activation_max", points_to="single activations grow"),
    Watched("activations", "outlier_ratio", points_to="single activations stand out from the others"),
    Watched("activations", "kurtosis", points_to="activations have heavier tails"),
    Watched("activations", "state_norm", points_to="the residual stream grows"),
    Watched("activations", "log_z", points_to="the output logits drift away from normalized"),
)  # fmt: skip
