"""Assembly of the measurements of all blocks into the variables of a flow, with a reason for each missing value."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from workbench.flow.attention_sharpness import routing_margin
from workbench.flow.branch_reader import StreamState, short_names
from workbench.flow.gains import BlockRecord, FlowPass
from workbench.flow.jacobian import SequenceJacobians
from workbench.models.anatomy import Anatomy
from workbench.models.router_weights import Router
from workbench.monitors.router_health import expert_load, max_violation, routing_entropy_share


def of_stream(run: FlowPass, unseen: list[str]) -> dict[str, np.ndarray]:
    """Return the measurements of the states between blocks, and the gains of blocks.

    Args:
        run: Forward and backward pass of the model.
        unseen: List to which a sentence is added for each value that is NaN; also in the functions below.
    """
    blocks = run.blocks
    into, out = [b.entering for b in blocks], [b.leaving for b in blocks]
    boundaries = [*into, out[-1]]
    norms = np.array([state.gradient_norm for state in boundaries])
    if run.failure:
        unseen.append(f"The model cannot be differentiated: {run.failure}.")
    elif not np.isfinite(norms).all():
        unseen.append("The gradient with respect to some states is not finite, or does not reach them.")
    elif not norms.any():
        unseen.append("The gradient with respect to all states is zero.")
    return {
        "state_rms": np.array([state.rms for state in boundaries]),
        "gradient_norm": norms,
        "token_cosine": np.array([value for block in blocks for value in block.cosine]),
        "effective_rank": np.array([value for block in blocks for value in block.rank]),
        "signal_gain": _ratio([b.rms for b in out], [a.rms for a in into]),
        "gradient_gain": _ratio([a.gradient_norm for a in into], [b.gradient_norm for b in out]),
    }


def of_sublayers(blocks: list[BlockRecord], anatomy: Anatomy, unseen: list[str]) -> dict[str, np.ndarray]:
    """Return the gains and branch ratios of sublayers, and their names (``sublayer_name``)."""
    shape = len(blocks), max(1, *(len(block.stream.sublayers) for block in blocks))
    names = np.full(shape, "", dtype=object)
    signal, gradient, branch = (np.full(shape, np.nan) for _ in range(3))
    silent, cut_off = [], []
    for layer, (block, site) in enumerate(zip(blocks, anatomy.sites, strict=True)):
        sublayers = block.stream.sublayers
        if not sublayers:
            silent.append(site.name)
            continue
        n = len(sublayers)
        names[layer, :n] = short_names([sublayer.name for sublayer in sublayers])
        branch[layer, :n] = _ratio([s.branch_rms for s in sublayers], [s.stream_rms for s in sublayers])
        # The first sublayer begins with the block, so that the product of the gains is the gain of the block.
        states: list[StreamState] = [block.entering, *(sublayer.before for sublayer in sublayers[1:]), block.leaving]
        signal[layer, :n] = _ratio([s.rms for s in states[1:]], [s.rms for s in states[:-1]])
        norms = [state.gradient_norm for state in states]
        gradient[layer, :n] = _ratio(norms[:-1], norms[1:])
        if not block.stream.reaches_output:
            signal[layer, n - 1] = gradient[layer, n - 1] = np.nan
            cut_off.append(site.name)
    if silent:
        unseen.append(f"No addition to a residual stream was observed in {_listed(silent, blocks)}.")
    if cut_off:
        unseen.append(
            "The operations after the last addition to the residual stream were not observed in "
            f"{_listed(cut_off, blocks)}."
        )
    return {
        "sublayer_name": names.astype(str),
        "sublayer_signal_gain": signal,
        "sublayer_gradient_gain": gradient,
        "branch_ratio": branch,
    }


def of_attention(blocks: list[BlockRecord], anatomy: Anatomy, unseen: list[str]) -> dict[str, np.ndarray]:
    """Return the measurements of attention, one number per head; NaN where there are fewer heads."""
    rows: dict[str, list[np.ndarray]] = {
        name: [] for name in ("attention_entropy_share", "attention_logit_std", "attention_logit_max", "sink_share")
    }
    hidden = []
    for block, site in zip(blocks, anatomy.sites, strict=True):
        health, sharpness = block.notes.attention, block.sharpness
        hidden += [site.name] if health is None else []
        values = (
            None if health is None else health.entropy_share,
            None if sharpness is None else sharpness.logit_std,
            None if health is None else health.logit_max,
            None if sharpness is None else sharpness.sink_fraction,
        )
        for row, value in zip(rows.values(), values, strict=True):
            row.append(np.empty(0) if value is None else value.detach().cpu().numpy().astype(np.float64))
    if hidden:
        unseen.append(
            f"No attention was observed in {_listed(hidden, blocks)}: there are no attention scores between tokens, or "
            "a custom kernel computes them."
        )
    n_heads = max(1, *(len(row) for values in rows.values() for row in values))
    return {
        name: np.stack([np.append(row, np.full(n_heads - len(row), np.nan)) for row in values])
        for name, values in rows.items()
    }


def of_routing(blocks: list[BlockRecord], routers: Mapping[int, Router], unseen: list[str]) -> dict[str, np.ndarray]:
    """Return the measurements of routing, one number per block; NaN for blocks without a router."""
    entropy, violation, margin = (np.full(len(blocks), np.nan) for _ in range(3))
    for layer, router in routers.items():
        notes = blocks[layer].notes
        logits, choices = notes.logits, notes.choices
        if logits is None:
            unseen.append(f"The router of {router.site} was not computed with {router.name}.")
            continue
        if choices is None and not router.is_corrected:
            choices = logits.topk(router.top_k, dim=-1).indices
        if notes.rows is not None and len(logits) == notes.n_tokens:
            counts = notes.rows.flatten().to(logits.device)
            choices = choices[counts] if choices is not None and len(choices) == len(counts) else choices
            logits = logits[counts]
        entropy[layer] = float(routing_entropy_share(logits))
        if choices is None or len(choices) != len(logits):
            unseen.append(f"The choices of the router of {router.site} cannot be observed, only its logits.")
        elif bool(torch.isfinite(logits).all()):
            violation[layer] = float(max_violation(expert_load(choices, router.n_experts)))
            margin[layer] = float(routing_margin(logits, choices))
    return {"routing_entropy_share": entropy, "max_violation": violation, "routing_margin": margin}


def of_jacobians(jacobians: SequenceJacobians, anatomy: Anatomy, unseen: list[str]) -> dict[str, np.ndarray]:
    """Return the singular values of the Jacobians of each block and of all blocks together."""
    names = [*(site.name for site in anatomy.sites), "all blocks together"]
    for name, values in zip(names, [*jacobians.blocks, jacobians.end_to_end], strict=True):
        if values.reason:
            unseen.append(f"Singular values of {name}: {values.reason}.")
    return {
        "block_singular_value": np.stack([values.largest for values in jacobians.blocks]),
        "block_singular_mean": np.array([values.mean for values in jacobians.blocks]),
        "end_to_end_singular_value": jacobians.end_to_end.largest,
        "end_to_end_singular_mean": np.array(jacobians.end_to_end.mean),
    }


def no_jacobians(n_layers: int, n_singular: int) -> dict[str, np.ndarray]:
    """Return NaN for singular values that were not requested."""
    return {
        "block_singular_value": np.full((n_layers, n_singular), np.nan),
        "block_singular_mean": np.full(n_layers, np.nan),
        "end_to_end_singular_value": np.full(n_singular, np.nan),
        "end_to_end_singular_mean": np.array(np.nan),
    }


def _listed(names: list[str], blocks: list[BlockRecord]) -> str:
    return "any block" if len(names) == len(blocks) else ", ".join(names)


def _ratio(over: list[float], under: list[float]) -> np.ndarray:
    """Return ratios; NaN where the denominator is 0."""
    divisor = np.array(under, float)
    return np.divide(np.array(over, float), divisor, out=np.full(len(over), np.nan), where=divisor != 0)
