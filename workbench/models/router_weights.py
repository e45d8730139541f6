"""Router weights of mixture-of-experts blocks: the linear map whose outputs select the experts of each token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.attention_weights import Unreadable
from workbench.models.batches import Batches
from workbench.models.block_calls import Site
from workbench.models.calling import on_device_of, runnable, subject_in
from workbench.models.readable_weights import read_parameter, readable
from workbench.models.streaming import with_weights
from workbench.models.subject import Subject
from workbench.models.tracing import BlockTrace, ParameterSlice, Projection, TopChoice, trace_blocks


@dataclass(frozen=True)
class Router:
    """The router of one block.

    Attributes:
        layer: Index of the site.
        site: Name of the site.
        name: Path of the weight in the model.
        weight: Weight, shape (expert, feature).
        bias: Bias, shape (expert,); None if there is none.
        n_experts: Number of experts to choose from.
        top_k: Number of experts that each token is sent to.
        scoring: Function that is applied to the logits before the choice: "logits" (none), "softmax" or "sigmoid".
        is_corrected: Whether a correction per expert is added before the choice, or groups of experts are excluded, so
            that the chosen experts need not have the largest logits.
        rows: Rows of the parameter that are the weight.
        bias_rows: Entries of the parameter that are the bias; None if there is none.
    """

    layer: int
    site: str
    name: str
    weight: Tensor
    bias: Tensor | None
    n_experts: int
    top_k: int
    scoring: str
    is_corrected: bool
    rows: ParameterSlice
    bias_rows: ParameterSlice | None

    def read(self, model: nn.Module) -> Router:
        """Return the same router with its current weights, without a forward pass."""
        bias = _read(model, self.bias_rows) if self.bias_rows is not None else None
        return replace(self, weight=_read(model, self.rows), bias=bias)


@with_weights
def router_weights(
    model: Subject | nn.Module, inputs: Any, *, anatomy: Anatomy | None = None
) -> list[Router | Unreadable]:
    """Return the routers of the mixture-of-experts blocks of a model.

    The model runs once. A router is the linear map with one output per expert whose logits, unchanged or after softmax
    or sigmoid, are the scores from which the largest are selected; this is checked on the values.

    Args:
        model: Module, or a subject from `open_checkpoint`; it is not changed.
        inputs: Inputs as for `workbench.profile`; a dozen tokens are enough. Only the first of several batches is used.
        anatomy: Anatomy of the model; None to read it.

    Returns:
        One entry per block that selects the largest of some scores, in order; dense blocks are absent. A block whose
        selection cannot be traced to a linear map is `Unreadable`.

    Raises:
        AnatomyError: If no anatomy was passed and none can be read.

    Example:
        >>> import torch
        >>> import workbench as wb
        >>> model = wb.zoo.moe(d_model=16, n_layers=2, n_heads=2, n_experts=4)
        >>> routers = wb.router_weights(model, torch.arange(16)[None])
        >>> [tuple(router.weight.shape) for router in routers]
        [(4, 16), (4, 16)]

    See Also:
        `workbench.query_key_weights`: Returns the attention weights of the blocks.
        `workbench.monitors`: Measures routers along a run.
    """
    subject, model = subject_in(model), runnable(model)
    inputs = on_device_of(model, Batches.of(inputs, subject).first())
    anatomy = anatomy or read_anatomy(model, inputs)
    with readable(model):
        found = trace_blocks(model, inputs, anatomy, _find_router)
    routers: list[Router | Unreadable] = []
    for layer, (site, finding) in enumerate(zip(anatomy.sites, found, strict=True)):
        if isinstance(finding, str):
            routers.append(Unreadable(layer, site.name, finding))
        elif finding is not None:
            bias = None if finding.bias is None else _read(model, finding.bias)
            weight = _read(model, finding.rows)
            routers.append(Router(layer, site.name, finding.rows.name, weight, bias, len(weight), *finding))
    return routers


class _Finding(NamedTuple):
    """The last attributes of a `Router`."""

    top_k: int
    scoring: str
    is_corrected: bool
    rows: ParameterSlice
    bias: ParameterSlice | None


def _read(model: nn.Module, rows: ParameterSlice) -> Tensor:
    parameter = read_parameter(runnable(model), rows.name)
    return parameter.narrow(rows.axis, rows.start, rows.size).transpose(0, rows.axis).clone()


def _find_router(layer: int, site: Site, trace: BlockTrace) -> _Finding | str | None:
    """Return the router of a block, a sentence if it cannot be read, or None if the block selects nothing."""
    del layer
    selections = [s for s in trace.selections if s.scores.is_floating_point() and s.scores.shape[-1] > 1]
    for selection in reversed(selections):  # group-limited routers choose groups first, experts last
        for projection in reversed(trace.projections):
            if (how := _compared_as(projection, selection)) is None:
                continue
            scoring, is_corrected = how
            if projection.weight is None or projection.weight.is_module:
                return f"The router of {site.name} multiplies by a matrix that is not a parameter of the model."
            n_selected = selection.n_selected
            if not selection.is_top_k:  # the second expert may be selected in a second step from the remaining ones
                different: list[Tensor] = []
                for scores in (s.scores for s in selections if s.scores.shape == selection.scores.shape):
                    different += [] if any(torch.equal(scores, other) for other in different) else [scores]
                n_selected = len(different)
            return _Finding(n_selected, scoring, is_corrected, projection.weight, projection.bias)
    if certain := [s for s in selections if s.is_top_k]:
        n_experts = certain[-1].scores.shape[-1]
        return (
            f"{site.name} selects the largest of {n_experts} values, but these are not the logits of one of its linear "
            "maps, nor the softmax or sigmoid of such logits."
        )
    return None


def _compared_as(projection: Projection, selection: TopChoice) -> tuple[str, bool] | None:
    """Return which function maps a projection's outputs to the scores, and whether they are corrected; None if none."""
    n_experts = selection.scores.shape[-1]
    if projection.out.shape[-1] != n_experts or projection.out.numel() != selection.scores.numel():
        return None
    logits = projection.out.reshape(-1, n_experts).double()
    scores = selection.scores.reshape(-1, n_experts).double()
    rounding = max(1e-5, 4 * torch.finfo(projection.out.dtype).eps)
    views = {"logits": logits, "softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}
    for scoring, values in views.items():
        if torch.allclose(values, scores, rtol=rounding, atol=rounding):
            return scoring, False
    for scoring, values in views.items():
        # A correction is one number per expert; excluded experts are set to zero or to minus infinity.
        is_open = torch.isfinite(scores) & (scores != 0)
        difference = (scores - values).masked_fill(~is_open, float("nan"))
        middle = difference.nanmedian(dim=0).values
        is_same = ((difference - middle).abs() <= 10 * rounding) | ~is_open
        if is_same.all() and is_open.sum() > 2 * n_experts:
            return scoring, True
    return None
