"""Criteria of information flow: gradients through the depth, attention, tokens that become alike, fresh routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.assessment.depth_flow import EXTRAPOLATED
from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, number
from workbench.assessment.flow_numbers import NUMBERS, SCALE_OF

if TYPE_CHECKING:
    import xarray as xr

#: Paths of the numbers of the model that was run, and of those of the ladder of depths.
OF_MODEL, OF_DEPTH = "/flow_numbers", "/depth_flow"

#: The side without healthy values, if it is only one.
_BAD_SIDE = {
    "gradient_gain_steepest": "high", "branch_ratio_max": "high", "attention_logit_std_max": "high",
    "sink_share_max": "high", "token_cosine_last": "high", "max_violation_max": "high",
    "attention_entropy_share_min": "low", "effective_rank_last": "low", "routing_entropy_share_min": "low",
}  # fmt: skip


def _at_target(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    """A number of a thin model of the target depth; where depth was not varied, of the model that was run."""

    def read(tree: xr.DataTree) -> CriterionReading | str:
        if OF_DEPTH not in tree.groups:
            return _of_model(name)(tree)
        data = tree[OF_DEPTH].to_dataset()
        found = number(data.isel(depth=-1), name, spread=f"{name}_error")
        return (
            found
            if isinstance(found, str)
            else CriterionReading(found.value, found.spread, {"depth": data.sizes["depth"] - 1})
        )

    return read


def _extrapolated(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    def read(tree: xr.DataTree) -> CriterionReading | str:
        if OF_DEPTH not in tree.groups:
            return "the subject was not built at other depths"
        found = number(tree[OF_DEPTH].to_dataset(), f"{name}_extrapolated", spread=f"{name}_extrapolated_error")
        return "fewer than two smaller depths exist to extrapolate from" if isinstance(found, str) else found

    return read


def _of_model(name: str) -> Callable[[xr.DataTree], CriterionReading | str]:
    def read(tree: xr.DataTree) -> CriterionReading | str:
        return number(tree[OF_MODEL].to_dataset(), name, spread=f"{name}_error")

    return read


def _numbers(mode: str, names: dict[str, str], reads: Callable, *, path: str, suffix: str = "") -> list[Criterion]:
    found = []
    for name, meaning in names.items():
        title, units, _ = NUMBERS[name]
        found.append(
            Criterion(
                f"{name}{suffix}", mode, f"{title}, extrapolated" if suffix else title, units, path,
                f"{name}{suffix}", reads(name), meaning,
                scale=SCALE_OF.get(name, "linear"), bad_side=_BAD_SIDE.get(name, "both"),
            )
        )  # fmt: skip
    return found


FLOW = (
    *_numbers(
        "gradient_flow_collapse",
        {
            "gradient_gain_total": "gradients reach the first block much larger or smaller than they left the last",
            "signal_gain_total": "the stream leaves the last block much larger or smaller than it entered the first",
            "gradient_gain_steepest": "one block alone amplifies or attenuates gradients unlike any healthy one",
            "branch_ratio_max": "one branch outweighs the stream that it is added to",
        },
        _at_target,
        path=OF_DEPTH,
    ),
    *_numbers(
        "gradient_flow_collapse",
        {
            EXTRAPOLATED[1]: "smaller depths predict gradients that explode or vanish at the target depth",
            EXTRAPOLATED[0]: "smaller depths predict a stream that explodes or vanishes at the target depth",
        },
        _extrapolated,
        path=OF_DEPTH,
        suffix="_extrapolated",
    ),
    *_numbers(
        "attention_degeneracy",
        {
            "attention_entropy_share_min": "a head looks at next to nothing but one token",
            "attention_logit_std_max": "attention logits are spread so far that softmax saturates",
            "sink_share_max": "a head gives nearly all of its attention to the first token",
            "token_cosine_last": "the last block's tokens point the same way, so attention cannot tell them apart",
            "effective_rank_last": "the last block's tokens lie in too few directions",
        },
        _at_target,
        path=OF_DEPTH,
    ),
    *_numbers(
        "routing_oscillation",
        {
            "routing_entropy_share_min": "the fresh router is already sure of its choices",
            "max_violation_max": "the fresh router overloads one expert",
        },
        _of_model,
        path=OF_MODEL,
    ),
)
