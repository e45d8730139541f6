"""Measurement of the information flow of a model on inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from workbench.flow.branch_reader import StreamState, short_names
from workbench.flow.gains import BlockRecord, FlowPass, Loss, routing_margin
from workbench.flow.jacobian import EXACT_UP_TO, SequenceJacobians
from workbench.io.provenance import versions
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.attention_weights import Unreadable
from workbench.models.batches import Batches, count_examples, take_examples
from workbench.models.calling import on_device_of, runnable, tensors_of, with_values
from workbench.models.checkpoint import open_checkpoint
from workbench.models.layout import BATCH_FIRST, BatchLayout
from workbench.models.profile import dtype_name
from workbench.models.router_weights import Router, router_weights
from workbench.models.streaming import with_weights
from workbench.models.subject import Subject
from workbench.monitors.router_health import expert_load, max_violation, routing_entropy_share
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt, Seed
from workbench.schema.runs import FLOW, SCHEMA_VERSION


@with_weights
@checked
def measure(
    subject: Subject | nn.Module,
    inputs: Any,
    *,
    targets: Any = None,
    loss: Loss | None = None,
    stack: str | None = None,
    anatomy: Anatomy | None = None,
    batch_first: bool | None = None,
    jacobian: bool = True,
    n_singular: PositiveInt = 8,
    n_tokens: PositiveInt = 1024,
    n_jacobian_tokens: PositiveInt = 8,
    seed: Seed = 0,
) -> xr.Dataset:
    """Measure how signal and gradient pass through a model: how each block and sublayer amplifies or attenuates them.

    The model runs forward and backward once, in eval mode. Gradients of parameters are not computed, and modes, random
    states, hooks, parameters and buffers are not changed.

    A sublayer is one addition to the residual stream. Its gains compare the stream after it with the stream before it;
    if the stream itself is normalized, as in Post-LN, the normalization belongs to the sublayer. The product of the
    gains of a block's sublayers is the gain of the block. If every block has signal gain s and gradient gain g, states
    grow as s^l and gradients as g^(L-l); both are 1 on average at a critical initialization (Schoenholz et al. 2017,
    arXiv:1611.01232).

    Args:
        subject: Subject from `open_checkpoint`, or any module whose blocks `read_anatomy` finds.
        inputs: Inputs as for `workbench.profile`; only the first of several batches is used.
        targets: Class indices as `token_loss` or ``loss`` takes them, with an entry per example; of several batches
            those of the first are used. If None, the targets are the next tokens, if the model returns logits of its
            tokens; otherwise the gradient is that of the output along a random direction. ``attrs["cotangent"]`` states
            which is used.
        loss: Function from logits and targets to a 0-dim tensor; None for mean cross entropy.
        stack: Name of the block stack to read, for models with several; see `read_anatomy`.
        anatomy: Anatomy of this model, which is then not read again; ``stack`` and ``batch_first`` are ignored.
        batch_first: As for `workbench.profile`.
        jacobian: Whether to compute singular values, which takes the most time.
        n_singular: Number of largest singular values to compute.
        n_tokens: Maximum number of tokens to measure: those of the first sequences of the inputs, at least one
            sequence. Singular values, attention and routing may use fewer.
        n_jacobian_tokens: Number of tokens for the Jacobians: the first ones of the sequence with the least padding.
            Inputs other than token ids are not truncated.
        seed: Seed of the random direction and of the estimates of singular values.

    Returns:
        Dataset of `FLOW`: dims ``boundary`` (states between blocks; 0 is the state that enters the first), ``layer``
        (with ``layer_name``), ``sublayer`` (with ``sublayer_name`` by layer; "" if there is none), ``head`` and
        ``singular``. A value is NaN if it does not exist or cannot be observed; ``attrs["unseen"]`` states the reasons,
        one per line.

    Raises:
        AnatomyError: If the residual stream cannot be identified with certainty.
        SnapshotError: If the inputs do not reach every block, or there is no gradient.
        OptionError: If an option is out of its range.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> flow = wb.flow.measure(model, wb.tasks.associative_recall(length=16), jacobian=False)
        >>> flow["signal_gain"].dims, flow["sublayer_name"].values[0].tolist()
        (('layer',), ['attention', 'mlp'])

    See Also:
        `workbench.flow.summarize`: Summarizes a flow in a few numbers.
        `workbench.plots.flow_map`: Draws a flow.
    """
    targets = next(iter(targets), None) if isinstance(targets, list | tuple) else targets
    subject = open_checkpoint(subject)
    model = runnable(subject.model)
    probe, batches = Batches.of(inputs, subject, n_tokens=n_tokens).probe_and_all()
    if anatomy is None:
        anatomy = read_anatomy(model, probe, stack=stack, batch_first=batch_first)
    layout = anatomy.layout
    batch, targets = first_examples(batches.first(), targets, n_tokens, layout)
    batch = on_device_of(model, batch)
    unseen: list[str] = []
    readable = router_weights(model, batch, anatomy=anatomy)
    unseen += [router.reason for router in readable if isinstance(router, Unreadable)]
    routers = {router.layer: router for router in readable if isinstance(router, Router)}
    run = FlowPass(model, anatomy, batch, targets=targets, loss=loss, routers=routers, seed=seed)
    values = of_stream(run, unseen) | of_sublayers(run.blocks, anatomy, unseen)
    values |= of_attention(run.blocks, anatomy, unseen) | of_routing(run.blocks, routers, unseen)
    attrs = {"n_tokens": run.n_tokens, "cotangent": run.cotangent}
    if jacobian:
        jacobians = SequenceJacobians(model, anatomy, one_sequence(batch, n_jacobian_tokens, layout), seed=seed)
        jacobians.measure(n_singular)
        values |= of_jacobians(jacobians, anatomy, unseen)
        is_exact = jacobians.n_entries <= EXACT_UP_TO
        attrs |= {
            "n_jacobian_entries": jacobians.n_entries,
            "singular_values": "exact" if is_exact else "Lanczos; the mean from 16 random vectors",
        }
    else:
        nan = np.full((len(anatomy.sites), n_singular), np.nan)
        values |= {"block_singular_value": nan, "end_to_end_singular_value": nan[0]}
        values |= {"block_singular_mean": nan[:, 0], "end_to_end_singular_mean": nan[0, 0]}
        unseen.append("Singular values were not requested (jacobian=False).")
    attrs |= {
        "subject": subject.name,
        "source": subject.source,
        "stack": anatomy.stack,
        "dtype": dtype_name(model),
        "seed": int(seed),
        "unseen": "\n".join(dict.fromkeys(unseen)),
        **({"unloaded": subject.unloaded} if subject.unloaded else {}),
    }
    return _as_dataset(values, [site.name for site in anatomy.sites], attrs)


def _as_dataset(values: dict[str, np.ndarray], layer_names: list[str], attrs: dict[str, Any]) -> xr.Dataset:
    sublayer_name = values.pop("sublayer_name")
    variables = {name: (rule.dims, values[name], rule.attrs) for name, rule in FLOW.items()}
    coords = {
        "boundary": np.arange(len(layer_names) + 1),
        "layer": np.arange(len(layer_names)),
        "layer_name": ("layer", np.array(layer_names, dtype=str)),
        "sublayer": np.arange(sublayer_name.shape[1]),
        "sublayer_name": (("layer", "sublayer"), sublayer_name),
        "head": np.arange(values["sink_share"].shape[1]),
        "singular": np.arange(len(values["end_to_end_singular_value"])),
    }
    provenance = {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return xr.Dataset(variables, coords, {**provenance, **attrs})


_MASKS = ("attention_mask", "decoder_attention_mask")


def first_examples(batch: Any, targets: Any, n_tokens: int, layout: BatchLayout = BATCH_FIRST) -> tuple[Any, Any]:
    """Return the first sequences of a batch and their targets, truncated if too long; unchanged for unknown axes."""
    if layout.inputs is None:
        return batch, targets
    axis = layout.inputs
    length = _length(batch, axis)
    n_examples = max(1, n_tokens // length)
    if n_examples < count_examples(batch, axis):
        batch = take_examples(batch, slice(0, n_examples), axis)
        if isinstance(targets, Tensor) and targets.ndim:
            targets = take_examples(targets, slice(0, n_examples), axis if targets.ndim > 1 else 0)
    if length > n_tokens and not axis and _has_tokens(batch):
        batch = _shortened(batch, length, lambda x: x[:, :n_tokens])
        if isinstance(targets, Tensor) and targets.ndim == 2 and targets.shape[1] == length:
            targets = targets[:, :n_tokens]
    return batch, targets


def one_sequence(batch: Any, n_tokens: int, layout: BatchLayout = BATCH_FIRST) -> Any:
    """Return the sequence with the least padding, without that padding, truncated if it consists of token ids."""
    if layout.inputs != 0:
        return batch if layout.inputs is None else take_examples(batch, slice(0, 1), layout.inputs)
    masks = (
        [batch[name] for name in _MASKS if isinstance(batch.get(name), Tensor)] if isinstance(batch, Mapping) else []
    )
    length = _length(batch)
    masks = [mask for mask in masks if mask.shape == (count_examples(batch), length)]
    row = int(masks[-1].ne(0).sum(1).argmax()) if masks else 0
    batch = take_examples(batch, slice(row, row + 1))
    if not _has_tokens(batch):
        return batch
    kept = masks[-1][row].ne(0).nonzero().flatten() if masks else torch.arange(length)
    return _shortened(batch, length, lambda x: x[:, kept[:n_tokens].to(x.device)])


def _length(batch: Any, axis: int = 0) -> int:
    """Return the number of tokens of a sequence; 1 if the examples are no sequences."""
    tensor = next(value for _, value in tensors_of(batch))
    if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point()):
        return max(1, tensor.shape[1 - axis])
    return 1


def _has_tokens(batch: Any) -> bool:
    """Return whether every tensor of a batch consists of token ids, or of their masks or positions."""
    return all(value.ndim <= 2 and not value.is_floating_point() for _, value in tensors_of(batch))


def _shortened(batch: Any, length: int, shorten: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of shape (sequence, length) of a batch."""

    def taken(value: Any, name: Any) -> Any:
        return shorten(value) if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == length else value

    return with_values(batch, taken)


def of_stream(run: FlowPass, unseen: list[str]) -> dict[str, np.ndarray]:
    """Return the measurements of states between blocks and gains; sentences on NaN values are added to ``unseen``."""
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
        queries, sharpness = block.notes.attention, block.sharpness
        health = None if queries is None else queries.health
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
        if blocks[layer].notes.logits is None:
            unseen.append(f"The router of {router.site} was not computed with {router.name}.")
            continue
        logits, choices = blocks[layer].notes.routing(router)
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


def _listed(names: list[str], blocks: list[BlockRecord]) -> str:
    return "any block" if len(names) == len(blocks) else ", ".join(names)


def _ratio(over: list[float], under: list[float]) -> np.ndarray:
    """Return ratios; NaN where the denominator is 0."""
    divisor = np.array(under, float)
    return np.divide(np.array(over, float), divisor, out=np.full(len(over), np.nan), where=divisor != 0)
