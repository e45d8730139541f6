"""The criteria of the structure, and those of the plan, measured by the pilot and the trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import xarray as xr

from workbench.assessment.structure import ALL
from workbench.formatting import counted
from workbench.schema.statuses import CriterionState

#: Size -> phrase; ``{}`` is a number or a range.
_WORDS = {"width": "width {}", "blocks": "{} blocks", "experts": "{} experts"}
#: Range of sizes of the models behind a band: size -> smallest and largest.
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the subject and of the measured model of an assessment.

    Attributes:
        width, blocks: Width and number of blocks of the subject.
        run_width, run_blocks: Width and number of blocks of the model that was run.
        experts: Number of experts in each block; 0 if there are none or the number is unknown.
        is_stand_in: Whether a proxy model was run, which is smaller than the subject or has a smaller vocabulary.
    """

    width: int
    blocks: int
    run_width: int
    run_blocks: int
    experts: int = 0
    is_stand_in: bool = False

    @classmethod
    def of(cls, tree: xr.DataTree) -> Sizes | None:
        """Return the sizes from the attributes of an assessment; None if it has none."""
        names = ("width", "depth", "measured_width", "measured_depth")
        if any(name not in tree.attrs for name in names):
            return None
        width, blocks, run_width, run_blocks = (int(tree.attrs[name]) for name in names)
        is_other = (width, blocks) != (run_width, run_blocks)
        return cls(
            width,
            blocks,
            run_width,
            run_blocks,
            int(tree.attrs.get("n_experts", 0)),
            bool(tree.attrs.get("is_stand_in", is_other)),  # trees of older versions lack it
        )

    @property
    def attributes(self) -> dict[str, int]:
        """The sizes as attributes of an assessment."""
        return {
            "width": self.width,
            "depth": self.blocks,
            "measured_width": self.run_width,
            "measured_depth": self.run_blocks,
            "n_experts": self.experts,
            "is_stand_in": int(self.is_stand_in),
        }

    @property
    def proxy(self) -> str:
        """Description of the proxy model that was run."""
        return f"a proxy model of width {self.run_width:,} with {counted(self.run_blocks, 'block')}"

    def outside(self, ranges: Ranges) -> str:
        """Return, as a clause, why a band of healthy models does not apply to these sizes; empty if it does."""
        healthy, own = [], []
        both = {
            "width": (self.run_width, self.width),
            "blocks": (self.run_blocks, self.blocks),
            "experts": (self.experts,),
        }
        for name, (low, high) in ranges.items():
            beyond = [size for size in both[name] if not low <= size <= high]
            if beyond:
                healthy.append(_WORDS[name].format(f"{low:,g}" if low == high else f"{low:,g} to {high:,g}"))
                own.append(_WORDS[name].format(f"{beyond[-1]:,g}"))
        if not own:
            return ""
        return f"the healthy reference models have {' and '.join(healthy)}, while this model has {' and '.join(own)}"


#: Why a number could not be measured, and why there is none of a part that was not run.
NOT_OBSERVED = "the model has no such part, or it cannot be observed"
_NOT_RUN = {"/pilot": "no pilot was run", "/trials": "no trials were run"}


#: Fractions are clipped to this distance from 0 and 1 before they are compared as log-odds.
EDGE_OF_SHARE = 1e-4


def _log(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 0, np.log(np.where(x > 0, x, 1.0)), -np.inf)


def _log_odds(x: np.ndarray) -> np.ndarray:
    x = np.clip(x, EDGE_OF_SHARE, 1 - EDGE_OF_SHARE)
    return np.log(x / (1 - x))


#: Scale on which numbers are compared -> the transformation to it and its inverse.
SCALES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "linear": (np.asarray, np.asarray),
    "log": (_log, np.exp),
    "share": (_log_odds, lambda x: 1 / (1 + np.exp(-x))),
}


@dataclass(frozen=True)
class HealthyBand:
    """The range of healthy values, open where infinite; it does not apply beyond the ``sizes`` of its models.

    Beyond ``failing_low`` and ``failing_high`` a value is failing, not just at risk. ``n_reference`` healthy models
    gave the band, 0 for one by a rule; ``why`` is shown to the user.
    """

    low: float = -math.inf
    high: float = math.inf
    failing_low: float = -math.inf
    failing_high: float = math.inf
    n_reference: int = 0
    why: str = ""
    sizes: Ranges = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether every finite value lies inside."""
        return self.low == -math.inf and self.high == math.inf

    def open_but(self, bad_side: str) -> HealthyBand:
        """Return the band with the side opposite to ``bad_side`` open."""
        if bad_side == "high":
            return replace(self, low=-math.inf, failing_low=-math.inf)
        return replace(self, high=math.inf, failing_high=math.inf) if bad_side == "low" else self


@dataclass(frozen=True)
class CriterionReading:
    """A measured number of the tree.

    ``spread`` is its standard error over repetitions, ``layer`` -1 for no specific block, and ``only_flags`` why a
    healthy value is no evidence for a healthy design.
    """

    value: float
    spread: float = 0.0
    selection: Mapping[str, int] = field(default_factory=dict)
    layer: int = -1
    only_flags: str = ""


@dataclass(frozen=True)
class Criterion:
    """A number that indicates a failure mode.

    ``name`` is also that of its band in the healthy reference, unless ``band`` follows from a rule. On the ``scale``
    "log" the spread is that of the logarithm. ``bad_side`` is the side without healthy values ("low", "high", "both"),
    and ``rules_out`` tells whether a healthy value excludes the failure mode; if not, it is no evidence either way.
    """

    name: str
    failure_mode: str
    title: str
    path: str
    variable: str
    meaning: str
    band: HealthyBand | None = None
    scale: str = "linear"
    bad_side: str = "both"
    rules_out: bool = True
    units: str = "1"

    def read(self, tree: xr.DataTree) -> CriterionReading | str:
        """Return the number, or a clause that states why there is none; an infinite number was measured."""
        if self.path in _NOT_RUN and self.path not in tree.groups:
            return _NOT_RUN[self.path]
        data, name = tree[self.path].to_dataset(), self.variable
        if name not in data:
            return f"{name.replace('_', ' ')} was not measured"
        if np.isnan(float(data[name])):
            reason = data[name].attrs.get("unseen", NOT_OBSERVED)
            return reason[:1].lower() + reason[1:].rstrip(".") if self.path == "/pilot" else reason
        is_between_blocks = name in _OF_STREAM and bool(data.attrs.get("between_blocks", 0))
        return CriterionReading(
            float(data[name]),
            float(data[f"{name}_error"]) if f"{name}_error" in data else 0.0,
            layer=int(data[name].attrs.get("block", -1)),
            only_flags=BETWEEN_BLOCKS if is_between_blocks else "",
        )


def evaluate(reading: CriterionReading, band: HealthyBand, *, scale: str = "linear") -> tuple[CriterionState, float]:
    """Return the state of a reading, and the probability that another measurement would give the same state.

    The value (on the scale "log", its logarithm) is assumed to be normally distributed with the reading's spread. A
    band from n healthy models is itself uncertain: by exchangeability, the next healthy model lies beyond all of them
    with probability 2 / (n + 1), half of it at each end. No confidence that is based on the band exceeds 1 minus this.

    Returns:
        The state, which is never "not measured", and a confidence in [0, 1]. A value that is not finite is failing with
        confidence 1.
    """
    from scipy.stats import norm

    if not math.isfinite(reading.value):
        return CriterionState.FAILING, 1.0
    value, limits = reading.value, np.array([band.failing_low, band.low, band.high, band.failing_high])
    spread = reading.spread
    if scale == "log":
        value = math.log(value) if value > 0 else -math.inf
        limits = np.array([-math.inf if limit <= 0 else math.log(limit) for limit in limits])
    limits = np.clip(limits, [limits[0], -math.inf, -math.inf, limits[3]], math.inf)
    if value < limits[0] or value > limits[3]:
        state = CriterionState.FAILING
    elif value < limits[1] or value > limits[2]:
        state = CriterionState.AT_RISK
    else:
        state = CriterionState.HEALTHY
    if spread > 0 and math.isfinite(value):
        below = norm.cdf(limits, loc=value, scale=spread)
        inside, within = below[2] - below[1], below[3] - below[0]
        probabilities = {
            CriterionState.HEALTHY: inside,
            CriterionState.AT_RISK: within - inside,
            CriterionState.FAILING: 1 - within,
        }
        probability = probabilities[state]
    else:
        probability = 1.0
    largest = 1.0 if not band.n_reference else 1 - 2 / (band.n_reference + 1)
    return state, float(np.clip(probability, 0.0, 1.0) * largest)


#: Measurement -> its failure mode, the side without healthy values, and the meaning of a value there.
_ABOUT = {
    "gain_by_depth": ("gradient_flow_collapse", "high", "gradients explode or vanish with depth"),
    "growth_by_depth": ("gradient_flow_collapse", "high",
        "the residual stream grows or shrinks with depth more than in any design that trained"),
    "attention_entropy_share": (
        "attention_degeneracy", "low", "a head attends almost entirely to a single token at initialization"),
    "attention_logit_max": (
        "attention_degeneracy", "high", "attention logits at initialization exceed those of all designs that trained"),
    "routing_entropy_share": ("routing_oscillation", "low", "the router is confident in its choices at initialization"),
    "norm_eps_share": (
        "initialization_out_of_band", "high", "eps exceeds the variance of the states, so they are hardly normalized"),
    "loss_over_guess": ("initialization_out_of_band", "high", "the initial loss is far above that of a uniform guess"),
    "function_change": ("scale_dependent_divergence", "both",
        "the first update at the planned rate changes the predictions far more or less than in any design that trained",
    ),
}  # fmt: skip

#: Measurements of the residual stream, and why those between blocks can flag a design but not show that it is healthy.
_OF_STREAM = ("gain_by_depth", "growth_by_depth")
BETWEEN_BLOCKS = (
    "its residual stream cannot be read, and gains between its blocks can reveal a fault but not exclude one"
)
#: Measurement -> its band, if the limits follow from a rule.
_BANDS = {"norm_eps_share": HealthyBand(high=0.5, why="above one half, eps exceeds the variance that it is added to")}


STRUCTURE = tuple(
    Criterion(name, mode, ALL[name][0], "/structure", name, meaning, _BANDS.get(name), ALL[name][1], bad_side,
        rules_out=name not in _BANDS)
    for name, (mode, bad_side, meaning) in _ABOUT.items()
)  # fmt: skip


#: The criteria that decide about the planned learning rate.
RATE, SLOW_RATE, BROKEN_TRIALS = "rate_over_edge", "rate_over_slow_edge", "trials_broken"
#: Variable of the pilot: the limit of the planned rate.
LIMIT = "upper_rate_limit"
#: Beyond this factor a rate is failing, not just at risk, because it is then certainly above the useful edge.
_FAILING = 3.0
#: A larger fraction means that every trial diverged.
ALL_BROKEN = 0.999


PILOT = (
    Criterion(RATE, "unsuitable_rate", "planned rate over its upper limit", "/pilot", RATE,
        "the planned rate is too large to learn well",
        HealthyBand(high=1.0, failing_high=_FAILING,
            why="the limit is the upper end of the 80 % interval of the useful edge; for a proxy model, three times it",
        ),
        scale="log"),
    Criterion(SLOW_RATE, "unsuitable_rate", "planned rate over its lower limit", "/pilot", SLOW_RATE,
        "the planned rate is too small to learn well within the planned updates",
        HealthyBand(low=1.0, why="the limit is the lower end of the 80 % interval of the slow edge"), scale="log",
        rules_out=False),
    # Diverged trials are evidence against a plan. Trials of the first updates without divergence do not exclude
    # divergence after thousands of updates, so they are no evidence for a plan.
    Criterion(BROKEN_TRIALS, "unsuitable_rate", "fraction of trials of the plan that diverged", "/trials",
        "share_broken", "trials of the first updates diverged",
        HealthyBand(high=0.0, failing_high=ALL_BROKEN, why="no trial of a good plan diverges"),
        rules_out=False),
)  # fmt: skip
