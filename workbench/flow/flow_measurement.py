"""Measurement of the information flow of a model on inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.errors import OptionError
from workbench.flow import assemble
from workbench.flow.gains import FlowPass, eager_options
from workbench.flow.gradient_targets import Loss
from workbench.flow.jacobian import EXACT_UP_TO, SequenceJacobians
from workbench.io.provenance import versions
from workbench.models.anatomy import Anatomy, read_anatomy
from workbench.models.attention_weights import Unreadable
from workbench.models.batches import Batches, count_examples, take_examples
from workbench.models.calling import on_device_of
from workbench.models.checkpoint import open_checkpoint
from workbench.models.layout import BATCH_FIRST, BatchLayout
from workbench.models.profile import dtype_name
from workbench.models.router_weights import Router, router_weights
from workbench.models.streaming import with_weights
from workbench.models.subject import Subject
from workbench.models.wrapping import runnable
from workbench.option_checks import PositiveInt, Seed, checked
from workbench.schema.flows import FLOW
from workbench.schema.runs import SCHEMA_VERSION

if TYPE_CHECKING:
    import xarray as xr


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
    dtype: torch.dtype | None = None,
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
        dtype: Number format to compute in, with a copy of the model; None for that of the model.
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
    if dtype is not None and not dtype.is_floating_point:
        raise OptionError.of("dtype", str(dtype), "a floating-point type such as torch.float64")
    targets = next(iter(targets), None) if isinstance(targets, list | tuple) else targets
    subject = open_checkpoint(subject)
    model = runnable(subject.model)
    probe, batches = Batches.of(inputs, subject, n_tokens=n_tokens).probe_and_all()
    if dtype is not None:
        model, probe = _as_dtype(model, probe, dtype)
        anatomy, stack, batch_first = _options_of_copy(anatomy, stack, batch_first)
    if anatomy is None:
        anatomy = read_anatomy(model, probe, stack=stack, batch_first=batch_first)
    layout = anatomy.layout
    batch, targets = first_examples(batches.first(), targets, n_tokens, layout)
    batch = on_device_of(model, batch if dtype is None else _cast(batch, dtype))
    unseen: list[str] = []
    readable = router_weights(model, batch, anatomy=anatomy)
    unseen += [router.reason for router in readable if isinstance(router, Unreadable)]
    routers = {router.layer: router for router in readable if isinstance(router, Router)}
    run = FlowPass(model, anatomy, batch, targets=targets, loss=loss, routers=routers, seed=seed)
    values = assemble.of_stream(run, unseen) | assemble.of_sublayers(run.blocks, anatomy, unseen)
    values |= assemble.of_attention(run.blocks, anatomy, unseen) | assemble.of_routing(run.blocks, routers, unseen)
    attrs = {"n_tokens": run.n_tokens, "cotangent": run.cotangent}
    if jacobian:
        jacobians = SequenceJacobians(model, anatomy, one_sequence(batch, n_jacobian_tokens, layout), seed=seed)
        jacobians.measure(n_singular)
        values |= assemble.of_jacobians(jacobians, anatomy, unseen)
        is_exact = jacobians.n_entries <= EXACT_UP_TO
        attrs |= {
            "n_jacobian_entries": jacobians.n_entries,
            "singular_values": "exact" if is_exact else "Lanczos; the mean from 16 random vectors",
        }
    else:
        values |= assemble.no_jacobians(len(anatomy.sites), n_singular)
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
    import xarray as xr

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


def _options_of_copy(
    anatomy: Anatomy | None, stack: str | None, batch_first: bool | None
) -> tuple[None, str | None, bool | None]:
    """Return the arguments with which to read the anatomy of a copy: those of the model's anatomy, if it is known."""
    if anatomy is None:
        return None, stack, batch_first
    axis = anatomy.layout.inputs
    return None, anatomy.stack, None if axis is None else axis == 0


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors of a batch."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    if isinstance(batch, Mapping):
        return {name: cast(value) for name, value in batch.items()}
    return tuple(cast(value) for value in batch) if isinstance(batch, tuple | list) else cast(batch)


def _as_dtype(model: nn.Module, batch: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Return copies of a model and a batch in another number format."""
    batch = _cast(batch, dtype)
    copied = copy.deepcopy(model).to(dtype)
    for option in eager_options(copied):  # optimized kernels of experts and attention do not support float64
        setattr(*option)
    return copied, batch


_MASKS = ("attention_mask", "decoder_attention_mask")


def first_examples(batch: Any, targets: Any, n_tokens: int, layout: BatchLayout = BATCH_FIRST) -> tuple[Any, Any]:
    """Return the first sequences of a batch and their targets, at least one sequence, truncated if it is too long.

    Args:
        batch: Batch as `call_model` takes it.
        targets: Tensor with an entry for each sequence; None if there are no targets.
        n_tokens: Maximum number of tokens. Only token ids, and tensors shaped like them, can be truncated within a
            sequence.
        layout: Layout of the batch; if the axis that counts sequences is unknown, the batch is returned unchanged.
    """
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
    tensor = next(value for value in _values(batch) if isinstance(value, Tensor) and value.ndim)
    if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point()):
        return max(1, tensor.shape[1 - axis])
    return 1


def _has_tokens(batch: Any) -> bool:
    """Return whether every tensor of a batch consists of token ids, or of their masks or positions."""
    tensors = [value for value in _values(batch) if isinstance(value, Tensor) and value.ndim]
    return all(tensor.ndim <= 2 and not tensor.is_floating_point() for tensor in tensors)


def _shortened(batch: Any, length: int, shorten: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of shape (sequence, length) of a batch."""

    def taken(value: Any) -> Any:
        return shorten(value) if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == length else value

    if isinstance(batch, Mapping):
        return {name: taken(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(taken(value) for value in batch)
    return taken(batch)


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    return list(batch) if isinstance(batch, tuple | list) else [batch]
